"""Evolution strategies on CartPole: places in a noise table and returns travel, no weights.

Salimans, Ho, Chen, Sidor and Sutskever, "Evolution Strategies as a Scalable Alternative to
Reinforcement Learning", 2017. One table of normal noise lies in the object store, and every
actor reads it there. An actor tries the policy's vector of weights plus and minus a piece of
the table, and answers with the place of the piece and two returns. Each actor gets the
answers of all, and takes the step that follows from them itself: after the first weights, none
travel. The driver takes the same steps, without TensorFlow; in the end all have the same bits.

    python -m flatweights.examples.cartpole_evolution
    python -m flatweights.examples.cartpole_evolution --workers 4 --plot returns.png

For a task of your own, change `Player.build`, which returns the policy, and `play`, which tells
what a vector of weights is worth: any number will do, without gradients. ``trials`` in the table
is what the driver sends to each actor per update, beside the ``weights`` that it need not send. A
mean return of 475 takes 20 to 40 updates.
"""

import hashlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import ray
from numpy.typing import NDArray

from flatweights import axpy_, examples
from flatweights.examples.cartpole_policy_gradient import ACTIONS, ENVIRONMENT, build_network
from flatweights.ray import FlatWorker, WorkerGroup

NOISE = 1_000_000  # 25 million in the paper, for a million weights; here a policy has 4,610
PAIRS, EACH = 16, 4  # trials of a generation, and episodes with the same weights
SIGMA, LEARNING_RATE = 0.1, 0.2


class Trial(NamedTuple):
    """One piece of noise: where it begins, and the mean returns with it added and subtracted."""

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

    def build(self, seed: int, noise: NDArray[np.float32], rank: int, pairs: int) -> Any:
        """Build the policy in this process; ``noise`` stays in the object store."""
        examples.prepare_tensorflow()
        self.noise, self.pairs = noise, pairs
        self.rng = np.random.default_rng([seed, rank])
        network, self.policy = build_network(ACTIONS, seed)
        return network

    def generation(self, trials: Sequence[Trial], seed: int) -> tuple[list[Trial], list[float]]:
        """Take the step that follows from ``trials`` of all players; make new ones around there.

        Returns:
            The new trials, and the returns of all their episodes, which start from ``seed``.
        """
        self.move(trials)
        center, tried, returns = self.get_flat(), [], []
        last = len(self.noise) - len(center)
        for place in self.rng.integers(last, size=self.pairs, endpoint=True).tolist():
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
        return digest(self.get_flat()), float(play(self.policy, examples.EPISODES, seed).mean())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program; fail if weights differ in the end, or the goal is not reached."""
    options = examples.make_policy_parser(__doc__, updates=100).parse_args(arguments)
    examples.start_ray(options.workers)
    table = ray.put(np.random.default_rng(options.seed).standard_normal(NOISE, np.float32))
    noise = ray.get(table)  # a view of the object store
    parts = np.array_split(range(PAIRS), options.workers)
    group = WorkerGroup.create(
        Player,
        options.workers,
        options.seed,
        table,
        arguments=lambda rank: [rank, len(parts[rank])],
    )
    weights = group.step("get_flat")[0].copy()
    group.broadcast(weights.copy())  # the last weights that travel
    returns, trials, seed = examples.Returns(options, every=1), list[Trial](), options.seed
    while not returns.is_over:
        replies = list(group.step("generation", trials, seed).values())
        seed += 1  # all trials of a generation start alike
        trials = [trial for tried, _ in replies for trial in tried]
        for place, scale in steps_of(trials):
            axpy_(weights, scale, noise[place : place + len(weights)])
        ended = [value for _, values in replies for value in values]
        returns.add(int(sum(ended)), ended)  # a step's reward is 1
    digests, played = zip(*group.step("finish", trials, options.seed).values(), strict=True)
    if set(digests) != {digest(weights)}:
        raise SystemExit("the players ended with other weights than the driver")
    print(f"SHA-256 of the weights, alike in driver and {len(digests)} players: {digests[0]}")
    if options.save:
        group.step("get_weights")[0].save(options.save)
    group.shutdown()
    cells = {
        f"{examples.EPISODES} more, greedy": f"{played[0]:.1f}",
        "trials": f"{len(pickle.dumps(trials))} bytes",
        "weights": f"{weights.nbytes} bytes",
    }
    returns.report("evolution strategies", cells)


if __name__ == "__main__":
    examples.run(main)
