"""The two programs of Ray's guide: a line, learned by exchanging weights or gradients.

With ``--exchange weights``, each worker starts from the averaged weights and takes a few steps on
data of its own; `WorkerGroup.run` averages the results and sends the average to all workers. The
driver needs no TensorFlow.

With ``--exchange gradients``, the driver has a model, too. Every step, it sends its weights, and
each worker returns the gradient of one batch of its own as one vector. The driver averages the
vectors and applies the mean to its model.

    flatweights examples linear
    flatweights examples --plot line.png linear --exchange gradients --graph

For a model of your own, change `eager`, or `graph`, which makes the same model of TF1.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import ray
from numpy.typing import NDArray

from flatweights import FlatWeights
from flatweights.ray import FlatWorker, WorkerGroup

TRUTH = {"slope": 0.1, "intercept": 0.3}
TOLERANCE = 1e-3
LOCAL_STEPS, BATCH, LEARNING_RATE = 10, 100, 0.5
LINES = 10  # of progress


class Model(NamedTuple):
    """A model in one mode of TensorFlow.

    Attributes:
        variables: The weights.
        optimizer: For `TensorFlowVariables.apply_flat_gradients`.
        differentiate: Returns the gradients of one batch, an array for each weight.
    """

    variables: Any
    optimizer: Any
    differentiate: Callable[[NDArray[Any], NDArray[Any]], Any]


def eager(seed: int) -> Model:
    """Return the model in Keras, run eagerly; the same seed gives the same weights."""
    import keras
    import tensorflow as tf

    from flatweights.tensorflow import TensorFlowVariables

    keras.utils.set_random_seed(seed)
    line = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    weights = [v.value for v in line.trainable_variables]

    def differentiate(x: NDArray[Any], y: NDArray[Any]) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(line(x) - y))
        return tape.gradient(loss, weights)

    return Model(TensorFlowVariables(line), keras.optimizers.SGD(LEARNING_RATE), differentiate)


def graph(seed: int) -> Model:
    """Return the model as a TF1 graph, run in a session; the same seed gives the same weights."""
    import tensorflow.compat.v1 as tf

    from flatweights.tensorflow import TensorFlowVariables

    with tf.Graph().as_default():
        tf.set_random_seed(seed)
        x, y = (tf.placeholder(tf.float32, [None, 1]) for _ in range(2))
        slope = tf.get_variable("slope", initializer=tf.random_uniform([1], -1.0, 1.0))
        intercept = tf.get_variable("intercept", initializer=tf.zeros([1]))
        loss = tf.reduce_mean(tf.square(slope * x + intercept - y))
        gradients = tf.gradients(loss, [slope, intercept])
        session = tf.Session()
        session.run(tf.global_variables_initializer())
        variables = TensorFlowVariables(loss, session)
    optimizer = tf.train.GradientDescentOptimizer(LEARNING_RATE)
    return Model(variables, optimizer, session.make_callable(gradients, [x, y]))


class Worker(FlatWorker):
    """Computes gradients on its own data, or trains its own copy of the model on it."""

    def build(self, seed: int, build_model: Callable[[int], Model], rank: int) -> Any:
        """Build the model in this process."""
        self.rng = np.random.default_rng([seed, rank])
        self.model = build_model(seed)
        return self.model.variables

    def gradient(self) -> Any:
        """Return the gradient of the next batch as one vector."""
        x = self.rng.random((BATCH, 1), np.float32)
        gradients = self.model.differentiate(x, TRUTH["slope"] * x + TRUTH["intercept"])
        return self.variables.flatten_gradients(gradients)

    def train(self) -> FlatWeights:
        """Take a few steps; return the weights."""
        for _ in range(LOCAL_STEPS):
            self.variables.apply_flat_gradients(self.model.optimizer, self.gradient())
        return self.get_weights()


def average_weights(group: WorkerGroup, rounds: int) -> Iterator[list[float]]:
    """Yield the weights after each average."""
    for mean in group.run(rounds, "train"):
        yield [value.item() for value in mean.weights.values()]


def average_gradients(group: WorkerGroup, rounds: int, model: Model) -> Iterator[list[float]]:
    """Yield the weights of ``model`` after each step that it takes."""
    for _ in range(rounds):
        mean = group.average("gradient", broadcast=model.variables.get_flat())
        model.variables.apply_flat_gradients(model.optimizer, mean.weights)
        yield model.variables.get_flat().tolist()


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, list[float]]]:
    """Run the program; return curves. It fails if the learned line is not the true one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, exchanges = parser.add_argument, ("weights", "gradients")
    add("--workers", type=int, default=3, help="actors; default: %(default)s")
    help_ = f"steps; weights are averaged after every {LOCAL_STEPS}; default: %(default)s"
    add("--steps", type=int, default=200, help=help_)
    add("--seed", type=int, default=0, help="seed of the data and the first weights")
    add("--exchange", choices=exchanges, default="weights", help="values to average")
    add("--graph", action="store_true", help="use a TF1 graph instead of eager TensorFlow")
    options = parser.parse_args(arguments)
    if not 0 <= options.seed < 2**31:
        parser.error(f"--seed: expected 0 to {2**31 - 1}, got {options.seed}")
    if min(options.workers, options.steps) < 1:
        parser.error(f"expected at least 1 worker and 1 step, got {vars(options)}")
    ray.init(ignore_reinit_error=True, include_dashboard=False, logging_level="ERROR")
    settings = options.seed, graph if options.graph else eager
    group = WorkerGroup.create(Worker, options.workers, *settings, arguments=lambda rank: [rank])
    if options.exchange == "weights":
        rounds = max(1, options.steps // LOCAL_STEPS)
        results = average_weights(group, rounds)
    else:
        rounds = options.steps
        results = average_gradients(group, rounds, settings[1](options.seed))
    learned = []
    for number, (slope, intercept) in enumerate(results, 1):
        learned.append([slope, intercept])
        if number % max(1, rounds // LINES) == 0:
            line = f"slope {slope:.4f}, intercept {intercept:.4f}"
            print(f"round {number} of {rounds}: {line}", flush=True)
    group.shutdown()

    print(f"\n{'':12}{'true':>8}{'learned':>10}")
    for (name, true), value in zip(TRUTH.items(), learned[-1], strict=True):
        print(f"{name:12}{true:8.4f}{value:10.4f}")
    gaps = np.abs(np.subtract(learned, list(TRUTH.values())))
    if gaps[-1].max() > TOLERANCE:
        raise SystemExit(f"not within {TOLERANCE} of the truth: it needs more --steps")
    by_name = {name: gaps[:, i].tolist() for i, name in enumerate(TRUTH)}
    return {"distance to the truth by average": by_name}


if __name__ == "__main__":
    main()
