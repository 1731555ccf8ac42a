"""What the linear regressions share: data, model in either mode of TensorFlow, options, report.

TensorFlow is imported where a model is built, so a driver that builds none does not need it.
"""

import argparse
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatweights import flatten
from flatweights._arguments import integer
from flatweights.examples._curves import Panel, draw
from flatweights.examples._exchange import Seconds
from flatweights.examples._options import make_parser
from flatweights.examples._table import print_table

# Ray's workers inherit it. What TensorFlow logs as it starts would bury the result.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

SLOPE, INTERCEPT = 0.1, 0.3
TOLERANCE = 1e-3
BATCH_SIZE = 100
LEARNING_RATE = 0.5

Batch = tuple[NDArray[np.float32], NDArray[np.float32]]


def batches(seed: int, rank: int) -> Iterator[Batch]:
    """Yield points on the line: those of one worker, never the same as another's."""
    rng = np.random.default_rng([seed, rank])
    while True:
        x = rng.random((BATCH_SIZE, 1), np.float32)
        yield x, SLOPE * x + INTERCEPT


class EagerModel:
    """The model in Keras, run eagerly.

    Attributes:
        variables: Its weights.
    """

    def __init__(self, seed: int) -> None:
        """Build the model; the same seed gives the same weights."""
        import keras

        from flatweights.tensorflow import TensorFlowVariables

        keras.utils.set_random_seed(seed)
        self._model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        self._optimizer = keras.optimizers.SGD(LEARNING_RATE)
        self.variables = TensorFlowVariables(self._model)

    def step(self, x: NDArray[np.float32], y: NDArray[np.float32]) -> None:
        """Train on one batch."""
        self._optimizer.apply(self._gradients(x, y), self._model.trainable_variables)

    def gradients(self, x: NDArray[np.float32], y: NDArray[np.float32]) -> NDArray[Any]:
        """Return the gradients of one batch as one vector."""
        return flatten(self._gradients(x, y))

    def apply(self, gradients: NDArray[Any]) -> None:
        """Take the step that a vector of gradients asks for."""
        parts = self.variables.layout.vector_views(gradients)
        self._optimizer.apply(parts, self._model.trainable_variables)

    def _gradients(self, x: NDArray[np.float32], y: NDArray[np.float32]) -> list[Any]:
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self._model(x) - y))
        return list(tape.gradient(loss, self._model.trainable_variables))


class GraphModel:
    """The model as a TF1 graph with placeholders, run in a session.

    Attributes:
        variables: Its weights.
    """

    def __init__(self, seed: int) -> None:
        """Build the model; the same seed gives the same weights."""
        import tensorflow.compat.v1 as tf

        from flatweights.tensorflow import TensorFlowVariables

        with tf.Graph().as_default():
            tf.set_random_seed(seed)
            self._x = tf.placeholder(tf.float32, [None, 1])
            self._y = tf.placeholder(tf.float32, [None, 1])
            slope = tf.get_variable("slope", initializer=tf.random_uniform([1], -1.0, 1.0))
            intercept = tf.get_variable("intercept", initializer=tf.zeros([1]))
            loss = tf.reduce_mean(tf.square(slope * self._x + intercept - self._y))
            optimizer = tf.train.GradientDescentOptimizer(LEARNING_RATE)
            gradients = optimizer.compute_gradients(loss)
            self._gradients = [gradient for gradient, _ in gradients]
            self._train = optimizer.apply_gradients(gradients)
            self._session = tf.Session()
            self._session.run(tf.global_variables_initializer())
            self.variables = TensorFlowVariables(loss, self._session)

    def step(self, x: NDArray[np.float32], y: NDArray[np.float32]) -> None:
        """Train on one batch."""
        self._session.run(self._train, {self._x: x, self._y: y})

    def gradients(self, x: NDArray[np.float32], y: NDArray[np.float32]) -> NDArray[Any]:
        """Return the gradients of one batch as one vector."""
        return flatten(self._session.run(self._gradients, {self._x: x, self._y: y}))

    def apply(self, gradients: NDArray[Any]) -> None:
        """Take the step that a vector of gradients asks for."""
        # What is fed stands in for the gradients of a batch, so no batch is needed.
        parts = self.variables.layout.vector_views(gradients)
        self._session.run(self._train, dict(zip(self._gradients, parts, strict=True)))


def make_model(options: argparse.Namespace) -> EagerModel | GraphModel:
    """Build the model in the mode that was asked for."""
    return GraphModel(options.seed) if options.graph else EagerModel(options.seed)


def parse_options(description: str | None, iterations: int) -> argparse.Namespace:
    """Read the command line.

    Args:
        description: What ``--help`` says first: the docstring of the program.
        iterations: How often to average, by default.
    """
    parser = make_parser(description, plot="the way to the line")
    parser.add_argument("--graph", action="store_true", help="a TF1 graph, not eager TensorFlow")
    parser.add_argument(
        "--workers", type=integer(1), default=3, metavar="N", help="default: %(default)s"
    )
    parser.add_argument(
        "--iterations",
        type=integer(1),
        default=iterations,
        metavar="N",
        help="how often to average; default: %(default)s",
    )
    return parser.parse_args()


def report(
    history: Sequence[Sequence[float]], seconds: Seconds, options: argparse.Namespace
) -> None:
    """Print, and draw if asked to, what was learned.

    Args:
        history: Slope and intercept after each iteration.
        seconds: What an exchange took.
        options: As `parse_options` gives them.

    Raises:
        SystemExit: If it is further from the truth than `TOLERANCE`.
    """
    print(seconds)
    truth = {"slope": SLOPE, "intercept": INTERCEPT}
    print_table(
        ("", "true", "learned"),
        [(n, f"{t:.4f}", f"{v:.4f}") for (n, t), v in zip(truth.items(), history[-1], strict=True)],
    )
    gaps = np.abs(np.subtract(history, list(truth.values())))
    if options.plot:
        steps = range(1, len(history) + 1)
        curves = {n: (steps, gaps[:, i].tolist()) for i, n in enumerate(truth)}
        draw(
            options.plot,
            "Linear regression",
            Panel("distance to the truth", "iteration", curves, "log"),
        )
    if np.max(gaps[-1]) > TOLERANCE:
        raise SystemExit(f"further off than {TOLERANCE}: it needs more --iterations")
