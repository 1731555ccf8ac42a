"""Evolution strategies on CartPole: actors send noise positions and returns, no weights.

Salimans, Ho, Chen, Sidor and Sutskever, "Evolution Strategies as a Scalable Alternative to
Reinforcement Learning", 2017. One table of normal noise lies in the object store, and every
actor reads it there. An actor tries the policy's vector of weights plus and minus a piece of
the table, and answers with the place of the piece and two returns. Each actor gets the
answers of all, and takes the step that follows from them itself: after the first weights, none
travel. The driver takes the same steps, without TensorFlow; in the end all have the same bits.

    flatweights examples cartpole_evolution
    flatweights examples --plot returns.png cartpole_evolution --workers 4

For a task of your own, change `Player.build`, which returns the policy, and `play`, which scores a
vector of weights: the score can be any number, and needs no gradient. A mean return of 475 takes 20
to 50 updates.
"""

import argparse
import hashlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import ray
from numpy.typing import NDArray

from flatweights import axpy_
from flatweights.ray import FlatWorker, WorkerGroup

ENVIRONMENT, OBSERVATIONS, ACTIONS = "CartPole-v1", 4, 2
UPDATES = 100
NOISE = 1_000_000  # 25 million in the paper, for a million weights; here a policy has 4,610
PAIRS, EACH = 8, 4  # trials of each actor in a generation, and episodes with the same weights
SIGMA, LEARNING_RATE = 0.1, 0.2


class Trial(NamedTuple):
    """One piece of noise: its place, and the mean returns with it added and subtracted."""

    place: int
    plus: float
    minus: float


def play(
    policy: Callable[[NDArray[Any]], NDArray[Any]], episodes: int, seed: int
) -> NDArray[np.float64]:
    """Return the returns of ``episodes`` with the likeliest actions; they are played at once."""
    environments = gymnasium.make_vec(ENVIRONMENT, episodes)
    states, _ = environments.reset(seed=seed)
    running, returns = np.ones(episodes, np.bool_), np.zeros(episodes)
    while running.any():
        states, rewards, failed, cut, _ = environments.step(np.argmax(policy(states), axis=1))
        returns += np.where(running, rewards, 0.0)
        running &= ~(failed | cut)
    return returns


def steps_of(trials: Sequence[Trial]) -> Iterator[tuple[int, float]]:
    """Yield place and factor of each piece to add: equal answers give equal steps in all actors."""
    returns = np.array([[trial.plus, trial.minus] for trial in trials])
    # Ranks from -0.5 to 0.5 in place of returns: an outlier moves the weights no further.
    ranks = np.argsort(np.argsort(returns, axis=None, kind="stable")) / (returns.size - 1) - 0.5
    for trial, (plus, minus) in zip(trials, ranks.reshape(returns.shape), strict=True):
        yield trial.place, LEARNING_RATE / (SIGMA * returns.size) * float(plus - minus)


def digest(weights: NDArray[np.float32]) -> str:
    """Return the SHA-256 of a vector."""
    return hashlib.sha256(weights.data).hexdigest()


class Player(FlatWorker):
    """Tries weights around its own, and moves its own."""

    def build(self, seed: int, noise: NDArray[np.float32], rank: int) -> Any:
        """Build the policy in this process; ``noise`` stays in the object store."""
        import keras
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)  # the actors share the cores
        self.noise, self.rng = noise, np.random.default_rng([seed, rank])
        keras.utils.set_random_seed(seed)
        hidden = [keras.layers.Dense(64, "tanh", kernel_initializer="orthogonal") for _ in range(2)]
        last = keras.layers.Dense(ACTIONS, kernel_initializer=keras.initializers.Orthogonal(0.01))
        network = keras.Sequential([keras.Input((OBSERVATIONS,)), *hidden, last])
        # Traced once: a plain call of the network takes ten times as long.
        call = tf.function(network).get_concrete_function(tf.TensorSpec([None, OBSERVATIONS]))
        self.policy = lambda states: np.asarray(call(tf.constant(states)))
        return network

    def generation(self, trials: Sequence[Trial], seed: int) -> tuple[list[Trial], list[float]]:
        """Take the step that follows from ``trials`` of all players; make new ones around there.

        Returns:
            The new trials, and the returns of all their episodes, which start from ``seed``.
        """
        self.move(trials)
        center, tried, returns = self.get_flat(), [], []
        last = len(self.noise) - len(center)
        for place in self.rng.integers(last, size=PAIRS, endpoint=True).tolist():
            pair = []
            for scale in (SIGMA, -SIGMA):
                self.set_flat(center + scale * self.piece(place))
                pair.append(play(self.policy, EACH, seed))
            tried.append(Trial(place, *(float(some.mean()) for some in pair)))
            returns += np.concatenate(pair).tolist()
        self.set_flat(center)
        return tried, returns

    def move(self, trials: Sequence[Trial]) -> None:
        """Take the step that follows from ``trials``, in the variables' own memory."""
        for place, scale in steps_of(trials):
            self.variables.add_flat(self.piece(place), scale)

    def piece(self, place: int) -> NDArray[np.float32]:
        """Return the noise at ``place``."""
        return self.noise[place : place + self.variables.get_flat_size()]

    def finish(self, trials: Sequence[Trial], seed: int) -> tuple[str, float]:
        """Take the last step; return the digest of the weights and their mean return."""
        self.move(trials)
        return digest(self.get_flat()), float(play(self.policy, 100, seed).mean())


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
    """Run the program; return curves. It fails if weights differ or too little is learned."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--workers", type=int, default=2, help="actors that play; default: %(default)s")
    add("--updates", type=int, default=UPDATES, help="updates, at most; default: %(default)s")
    add("--goal", type=float, default=475, help="mean return of 100 episodes; default: %(default)s")
    add("--seed", type=int, default=0, help="seed of the first weights and the episodes")
    add("--save", type=Path, help="file to write the weights to")
    options = parser.parse_args(arguments)
    if not 0 <= options.seed < 2**31:
        parser.error(f"--seed: expected 0 to {2**31 - 1}, got {options.seed}")
    if min(options.workers, options.updates) < 1:
        parser.error(f"expected at least 1 worker and 1 update, got {vars(options)}")
    if options.save and (options.save.is_dir() or not options.save.absolute().parent.is_dir()):
        parser.error(f"--save: expected a file in a folder that exists, got {options.save}")
    ray.init(ignore_reinit_error=True, include_dashboard=False, logging_level="ERROR")
    table = ray.put(np.random.default_rng(options.seed).standard_normal(NOISE, np.float32))
    noise = ray.get(table)  # a view of the object store
    settings = options.seed, table
    group = WorkerGroup.create(Player, options.workers, *settings, arguments=lambda rank: [rank])
    weights = group.step("get_flat")[0].copy()
    group.broadcast(weights.copy())  # the last weights that travel
    curve, trials, seed, steps = list[tuple[float, float]](), list[Trial](), options.seed, 0
    while len(curve) < options.updates and (not curve or curve[-1][1] < options.goal):
        replies = list(group.step("generation", trials, seed).values())
        seed += 1  # all trials of a generation start alike
        trials = [trial for tried, _ in replies for trial in tried]
        for place, scale in steps_of(trials):
            axpy_(weights, scale, noise[place : place + len(weights)])
        returns = [value for _, values in replies for value in values]
        steps += int(sum(returns))  # a step's reward is 1
        curve.append((1e-3 * steps, float(np.mean(returns[-100:]))))
        line = f"update {len(curve)}: {steps} steps, mean return {curve[-1][1]:.1f}"
        print(line, flush=True)
    digests, played = zip(*group.step("finish", trials, options.seed).values(), strict=True)
    if set(digests) != {digest(weights)}:
        raise SystemExit("the players ended with other weights than the driver")
    print(f"SHA-256 of the weights, alike in driver and {len(digests)} players: {digests[0]}")
    if options.save:
        group.step("get_weights")[0].save(options.save)
    group.shutdown()
    sent = f"{len(pickle.dumps(trials))} bytes of trials, no {weights.nbytes} bytes of weights"
    print(f"sent to each player per update: {sent}; 100 greedy episodes: {played[0]:.1f}")
    if curve[-1][1] < options.goal:
        raise SystemExit(f"mean return {curve[-1][1]:.1f}: it needs more --updates")
    return {"return by thousand steps": {"": tuple(zip(*curve, strict=True))}}


if __name__ == "__main__":
    main()
