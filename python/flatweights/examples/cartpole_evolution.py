"""Evolution strategies on CartPole: places in a noise table and returns travel, no weights.

Salimans, Ho, Chen, Sidor and Sutskever, "Evolution Strategies as a Scalable Alternative to
Reinforcement Learning", 2017. One table of normal noise lies in the object store, and every
actor reads it there. An actor tries the policy's vector of weights plus and minus a piece of
the table, and answers with the place of the piece and two returns. Each actor gets the
answers of all, and takes the step that they ask for itself: after the first weights, none
travel. The driver takes the same steps, without TensorFlow; in the end all have the same bits.

    python -m flatweights.examples.cartpole_evolution
    python -m flatweights.examples.cartpole_evolution --workers 4 --plot returns.png

For a task of your own, change `Player.build`, which returns the policy, and `play`, which tells
what a vector of weights is worth: any number will do, without gradients. ``trials`` in the table
is what the driver sends to each actor per update, beside the ``weights`` that it need not send.

On two cores of a shared virtual machine (TensorFlow 2.21, Gymnasium 1.2), with seeds 0, 1 and
2: a mean return of 475 after 29, 27 and 34 updates, or 577,000 to 778,000 steps, in 19 seconds
with seed 0; 500.0 in each hundred episodes afterwards. To each actor some 500 bytes went per
update; the weights have 18,440.
"""

import argparse
import hashlib
import pickle
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import ray
from numpy.typing import NDArray

from flatweights import axpy_
from flatweights.examples._cartpole import (
    ACTIONS,
    EPISODES,
    History,
    as_policy,
    build_network,
    parse_options,
    play,
)
from flatweights.examples._main import run
from flatweights.examples._ray import ray_for
from flatweights.ray import FlatWorker

WIDTH = 64
# 25 million in the paper, for a million weights; here a policy has 4,610.
NOISE = 1_000_000
PAIRS = 16  # per generation, from all actors
EACH = 4  # episodes with the same weights
SIGMA = 0.1
LEARNING_RATE = 0.2


class Trial(NamedTuple):
    """What came of one piece of noise.

    Attributes:
        place: Where the piece begins in the table.
        plus: The mean return with it added.
        minus: With it subtracted.
    """

    place: int
    plus: float
    minus: float


def steps_of(trials: Sequence[Trial]) -> Iterator[tuple[int, float]]:
    """Yield how much to add of which piece: equal answers give equal steps, everywhere."""
    returns = np.array([[trial.plus, trial.minus] for trial in trials])
    # Ranks from -0.5 to 0.5 in place of returns: one that stands out moves no further.
    ranks = np.argsort(np.argsort(returns, axis=None, kind="stable")) / (returns.size - 1) - 0.5
    for trial, (plus, minus) in zip(trials, ranks.reshape(returns.shape), strict=True):
        yield trial.place, LEARNING_RATE / (SIGMA * returns.size) * float(plus - minus)


class Player(FlatWorker):
    """Tries weights around those that it has, and moves them."""

    def build(self, rank: int, seed: int, noise: NDArray[np.float32]) -> Any:
        """Build the policy in this process; ``noise`` stays in the object store."""
        from flatweights.demo._replica import make_tensorflow_deterministic

        make_tensorflow_deterministic()
        self.noise = noise
        self.rng = np.random.default_rng([seed, rank])
        network = build_network(ACTIONS, WIDTH, seed)
        self.policy = as_policy(network)
        return network

    def generation(
        self, trials: Sequence[Trial], pairs: int, seed: int
    ) -> tuple[list[Trial], list[float]]:
        """Take the step of the last generation's ``trials``; try what lies around there.

        Returns:
            The trials, and the returns of all their episodes.
        """
        self.move(trials)
        last = len(self.noise) - self.variables.get_flat_size()
        places = self.rng.integers(last, size=pairs, endpoint=True).tolist()
        center = self.get_flat()
        tried, returns = [], []
        for place in places:
            pair = []
            for scale in (SIGMA, -SIGMA):
                self.set_flat(center)
                self.variables.add_flat(self.piece(place), scale)
                pair.append(play(self.policy, EACH, seed))
            tried.append(Trial(place, *(float(some.mean()) for some in pair)))
            returns += np.concatenate(pair).tolist()
        self.set_flat(center)
        return tried, returns

    def move(self, trials: Sequence[Trial]) -> None:
        """Take the step that ``trials`` ask for, in the variables' own memory."""
        for place, scale in steps_of(trials):
            self.variables.add_flat(self.piece(place), scale)

    def piece(self, place: int) -> NDArray[np.float32]:
        """Return the noise at ``place``."""
        return self.noise[place : place + self.variables.get_flat_size()]

    def finish(self, trials: Sequence[Trial], seed: int) -> tuple[str, NDArray[Any]]:
        """Take the last step; return the digest of the weights, and how they play."""
        self.move(trials)
        return digest(self.get_flat()), play(self.policy, EPISODES, seed)


def digest(weights: NDArray[np.float32]) -> str:
    """Return the SHA-256 of a vector."""
    return hashlib.sha256(weights.data).hexdigest()


def main() -> None:
    """Run the program.

    Raises:
        SystemExit: If the goal is not reached, or the weights at the end differ.
    """
    options = parse_options(__doc__, updates=100)
    with ray_for(options.workers):
        train(options)


def train(options: argparse.Namespace) -> None:
    """Run the program, with Ray."""
    rng = np.random.default_rng(options.seed)
    table = ray.put(rng.standard_normal(NOISE, np.float32))
    noise = ray.get(table)  # read where it lies
    player: Any = ray.remote(Player)
    players = [player.remote(rank, options.seed, table) for rank in range(options.workers)]
    weights = ray.get(players[0].get_flat.remote()).copy()  # the last weights that travel
    start = ray.put(weights)
    ray.get([one.set_flat.remote(start) for one in players])
    pairs = [len(part) for part in np.array_split(range(PAIRS), len(players))]
    history = History(options, every=1)
    trials: list[Trial] = []
    while not history.done:
        calls = zip(players, pairs, strict=True)
        seed = options.seed + history.updates  # the same starts for all of a generation
        found = ray.get([one.generation.remote(trials, n, seed) for one, n in calls])
        trials = [trial for tried, _ in found for trial in tried]
        for place, scale in steps_of(trials):
            axpy_(weights, scale, noise[place : place + len(weights)])
        returns = [one for _, some in found for one in some]
        history.add(returns, int(sum(returns)))
    ends = [one.finish.remote(trials, options.seed) for one in players]
    digests, played = zip(*ray.get(ends), strict=True)
    if set(digests) != {digest(weights)}:
        raise SystemExit("the players ended with other weights than the driver")
    print(f"SHA-256 of the weights, alike in driver and {len(players)} players: {digests[0]}")
    if options.save:
        ray.get(players[0].get_weights.remote()).save(options.save)
    sent = len(pickle.dumps(trials))
    more = {"trials": f"{sent} bytes", "weights": f"{weights.nbytes} bytes"}
    history.report("CartPole, evolution strategies", played[0], more)


if __name__ == "__main__":
    run(main)
