"""What the programs on CartPole share: environments, the policy, its returns, options.

CartPole is that of Barto, Sutton and Anderson, "Neuronlike Adaptive Elements That Can Solve
Difficult Learning Control Problems", 1983: a pole on a cart, 1 for each step that it stays up,
500 at most. TensorFlow and Gymnasium are imported where they are used.
"""

import argparse
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flatweights._arguments import integer, output_file
from flatweights.examples._curves import Panel, draw
from flatweights.examples._options import make_parser
from flatweights.examples._table import print_table

ENVIRONMENT = "CartPole-v1"
OBSERVATIONS, ACTIONS = 4, 2
LIMIT = 500  # the most that an episode returns
GOAL = 475  # mean return of a hundred episodes in a row: Gymnasium calls it solved
EPISODES = 100

Policy = Callable[[NDArray[np.float32]], NDArray[np.float32]]
"""From observations, one per row, to logits of the actions."""


def build_network(outputs: int, width: int, seed: int) -> Any:
    """Return a network of two hidden layers; its last layer starts near zero."""
    import keras

    layers = keras.layers
    start = [
        keras.initializers.Orthogonal(gain, seed=seed + i) for i, gain in enumerate((1, 1, 0.01))
    ]
    return keras.Sequential(
        [
            keras.Input((OBSERVATIONS,)),
            layers.Dense(width, activation="tanh", kernel_initializer=start[0]),
            layers.Dense(width, activation="tanh", kernel_initializer=start[1]),
            layers.Dense(outputs, kernel_initializer=start[2]),
        ]
    )


def as_policy(network: Any) -> Policy:
    """Return what calls ``network``, traced once: a plain call takes many times as long."""
    import tensorflow as tf

    states = tf.TensorSpec([None, OBSERVATIONS])
    call = tf.function(network, input_signature=[states]).get_concrete_function()
    return lambda observations: np.asarray(call(tf.constant(observations)))


class Rollout(NamedTuple):
    """Some steps of several environments: time along the first axis, environments along the next.

    Attributes:
        observations: Before each step and after the last.
        actions: Taken in each step.
        rewards: For each step.
        failed: Whether the step ended the episode and nothing comes after.
        over: Whether it ended the episode, be it by the limit of its length.
        counts: Whether it was a step: else the environment was reset.
        returns: Of the episodes that ended, in order.
    """

    observations: NDArray[np.float32]
    actions: NDArray[np.int64]
    rewards: NDArray[np.float32]
    failed: NDArray[np.bool_]
    over: NDArray[np.bool_]
    counts: NDArray[np.bool_]
    returns: list[float]

    @property
    def steps(self) -> int:
        """How many steps were taken, over all environments."""
        return int(np.count_nonzero(self.counts))


class Environments:
    """Several environments that are stepped as one: a call of the policy serves all of them."""

    def __init__(self, count: int, seed: Sequence[int]) -> None:
        """Make ``count``; a worker's rank in ``seed`` gives it episodes of its own."""
        import gymnasium

        self._rng = np.random.default_rng(seed)
        self._vector = gymnasium.make_vec(ENVIRONMENT, count)
        self._observations, _ = self._vector.reset(seed=int(self._rng.integers(2**31)))
        self._over = np.zeros(count, np.bool_)
        self._returns = np.zeros(count)

    def rollout(self, policy: Policy, steps: int) -> Rollout:
        """Go on from where the last one stopped, with actions drawn from ``policy``."""
        observations, columns, returns = [self._observations], [], []
        for _ in range(steps):
            logits = policy(self._observations)
            # The largest of logits with Gumbel noise is a sample of their softmax.
            actions = np.argmax(logits + self._rng.gumbel(size=logits.shape), axis=1)
            # What was over is reset instead, and the action is ignored.
            counts = ~self._over
            self._observations, rewards, failed, cut, _ = self._vector.step(actions)
            self._over = failed | cut
            self._returns += rewards
            returns.extend(self._returns[self._over].tolist())
            self._returns[self._over] = 0.0
            observations.append(self._observations)
            columns.append((actions, rewards.astype(np.float32), failed.copy(), self._over, counts))
        actions, rewards, failed, over, counts = map(np.stack, zip(*columns, strict=True))
        return Rollout(np.stack(observations), actions, rewards, failed, over, counts, returns)


def play(policy: Policy, episodes: int, seed: int) -> NDArray[np.float64]:
    """Return the returns of ``episodes`` with the likeliest actions; they are played at once."""
    import gymnasium

    vector = gymnasium.make_vec(ENVIRONMENT, episodes)
    observations, _ = vector.reset(seed=seed)
    running, returns = np.ones(episodes, np.bool_), np.zeros(episodes)
    while running.any():
        actions = np.argmax(policy(observations), axis=1)
        observations, rewards, failed, cut, _ = vector.step(actions)
        returns += np.where(running, rewards, 0.0)
        running &= ~(failed | cut)
    return returns


def advantages(
    rollout: Rollout, values: NDArray[Any], discount: float, decay: float
) -> NDArray[np.float32]:
    """Return the generalised advantage estimates of all steps.

    Schulman, Moritz, Levine, Jordan and Abbeel, "High-Dimensional Continuous Control Using
    Generalized Advantage Estimation", ICLR 2016. An episode that ran into the limit of its
    length is valued as if it went on.

    Args:
        rollout: What was done.
        values: Of its observations: one row more than there are steps.
        discount: Of rewards, per step.
        decay: The lambda of the paper: 0 trusts the values, 1 the rewards.
    """
    onward = np.where(rollout.failed, 0.0, discount)
    errors = rollout.rewards + onward * values[1:] - values[:-1]
    found = np.zeros(errors.shape, np.float32)
    later = np.zeros(errors.shape[1:])
    for t in reversed(range(len(errors))):
        later = errors[t] + np.where(rollout.over[t], 0.0, discount * decay * later)
        found[t] = later
    return found


class Samples(NamedTuple):
    """Steps to learn from, of all environments in one row.

    Attributes:
        states: What was observed before each.
        actions: Taken.
        better: How much better it went than expected.
        targets: What to expect instead.
    """

    states: NDArray[np.float32]
    actions: NDArray[np.int64]
    better: NDArray[np.float32]
    targets: NDArray[np.float32]

    @staticmethod
    def signature() -> list[Any]:
        """Return what `tf.function` has to know, so that it traces once."""
        import tensorflow as tf

        number = tf.TensorSpec([None])
        states, actions = tf.TensorSpec([None, OBSERVATIONS]), tf.TensorSpec([None], tf.int64)
        return [states, actions, number, number]

    @classmethod
    def of(cls, rollout: Rollout, critic: Policy, discount: float, decay: float) -> "Samples":
        """Value the steps of ``rollout`` by ``critic``; see `advantages`."""
        states = rollout.observations
        values = critic(states.reshape(-1, OBSERVATIONS)).reshape(states.shape[:2])
        better = advantages(rollout, values, discount, decay)
        chosen = rollout.counts
        targets = better + values[:-1]
        return cls(states[:-1][chosen], rollout.actions[chosen], better[chosen], targets[chosen])


class History:
    """What came of the episodes so far.

    Attributes:
        updates: How many steps the weights have taken.
        steps: Of all environments together.
        seconds: From the first rollout to the last update.
    """

    def __init__(self, options: argparse.Namespace, every: int) -> None:
        """Begin now, for a run with these options; print a line for ``every`` so many updates."""
        self.updates = self.steps = 0
        self.seconds = 0.0
        self._options, self._every = options, every
        self._last: deque[float] = deque(maxlen=EPISODES)
        self._began = time.perf_counter()
        self._curve: list[tuple[int, float, float]] = []

    @property
    def mean(self) -> float:
        """Return of the last hundred episodes; of fewer, if there are no more."""
        return sum(self._last) / max(1, len(self._last))

    @property
    def done(self) -> bool:
        """Whether the goal is reached, or the number of updates."""
        return self._reached or self.updates >= self._options.updates

    @property
    def _reached(self) -> bool:
        return len(self._last) == EPISODES and self.mean >= self._options.goal

    def add(self, returns: Iterable[float], steps: int) -> None:
        """Note one update, and the episodes that ended and the steps that were taken for it."""
        self._last.extend(returns)
        self.updates += 1
        self.steps += steps
        self.seconds = time.perf_counter() - self._began
        self._curve.append((self.steps, self.seconds, self.mean))
        if self.updates % self._every == 0 or self.done:
            print(f"update {self.updates}: {self.steps} steps, mean return {self.mean:.1f}")

    def report(self, title: str, played: NDArray[Any], more: Mapping[str, str]) -> None:
        """Print the table; draw the plot that was asked for.

        Args:
            title: Of the plot.
            played: What `play` returned for the weights at the end.
            more: What else to print, by title.

        Raises:
            SystemExit: If the goal was not reached.
        """
        cells = {
            "updates": str(self.updates),
            "environment steps": f"{self.steps:,}",
            "seconds": f"{self.seconds:.1f}",
            "last 100 episodes": f"{self.mean:.1f}",
            f"{len(played)} more, greedy": f"{played.mean():.1f}",
            **more,
        }
        print_table(list(cells), [list(cells.values())])
        if self._options.plot:
            steps, seconds, means = zip(*self._curve, strict=True)
            thousands = [1e-3 * count for count in steps]
            draw(
                self._options.plot,
                title,
                Panel(
                    "return, last 100 episodes",
                    "thousand environment steps",
                    {"": (thousands, means)},
                ),
                Panel("return, last 100 episodes", "seconds", {"": (seconds, means)}),
            )
        if not self._reached:
            goal = self._options.goal
            raise SystemExit(f"mean return {self.mean:.1f}, not {goal}: it needs more --updates")


def parse_options(description: str | None, updates: int) -> argparse.Namespace:
    """Read the command line.

    Args:
        description: What ``--help`` says first: the docstring of the program.
        updates: When to give up, by default.
    """
    parser = make_parser(description, plot="the returns")
    for name, default, text in (
        ("--workers", 2, "actors that play"),
        ("--updates", updates, "how many at most"),
        ("--goal", GOAL, "stop when the last hundred episodes returned that, on average"),
    ):
        parser.add_argument(
            name,
            type=integer(1, LIMIT if name == "--goal" else None),
            default=default,
            metavar="N",
            help=f"{text}; default: %(default)s",
        )
    parser.add_argument(
        "--save", type=output_file, metavar="FILE", help="write the weights there, as safetensors"
    )
    return parser.parse_args()
