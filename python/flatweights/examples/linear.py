"""The two programs of Ray's guide: a line, learned by exchanging weights or gradients.

With ``--exchange weights``, each worker starts from the averaged weights and takes a few steps on
data of its own; `WorkerGroup.run` averages what the workers return and sends the average to all.
The driver needs no TensorFlow.

With ``--exchange gradients``, the driver has a model, too. Every step, it sends its weights, and
each worker returns the gradient of one batch of its own as one vector. The driver averages the
vectors and applies the mean to its model.

    python -m flatweights.examples.linear
    python -m flatweights.examples.linear --exchange gradients --graph --plot line.png

For a model of your own, change `EagerModel`, or `GraphModel` with its session.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatweights import FlatWeights, examples
from flatweights.ray import FlatWorker, WorkerGroup

TRUTH = {"slope": 0.1, "intercept": 0.3}
TOLERANCE = 1e-3
LOCAL_STEPS, BATCH, LEARNING_RATE = 10, 100, 0.5


class EagerModel:
    """The model in Keras, run eagerly; ``variables`` are its weights."""

    def __init__(self, seed: int) -> None:
        """Build the model; the same seed gives the same weights."""
        import keras

        from flatweights.tensorflow import TensorFlowVariables

        keras.utils.set_random_seed(seed)
        self.model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        self.optimizer = keras.optimizers.SGD(LEARNING_RATE)
        self.variables = TensorFlowVariables(self.model, trainable_only=True)

    def gradient(self, x: NDArray[Any], y: NDArray[Any]) -> Any:
        """Return the gradient of one batch as one vector."""
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self.model(x) - y))
        gradients = tape.gradient(loss, [v.value for v in self.model.trainable_variables])
        return self.variables.flatten_gradients(gradients)

    def apply(self, gradient: NDArray[Any]) -> None:
        """Take a step along ``gradient``."""
        self.variables.apply_flat_gradients(self.optimizer, gradient)


class GraphModel:
    """The model as a TF1 graph, run in a session; ``variables`` are its weights."""

    def __init__(self, seed: int) -> None:
        """Build the model; the same seed gives the same weights."""
        import tensorflow.compat.v1 as tf

        from flatweights.tensorflow import TensorFlowVariables

        with tf.Graph().as_default():
            tf.set_random_seed(seed)
            self.x, self.y = (tf.placeholder(tf.float32, [None, 1]) for _ in range(2))
            slope = tf.get_variable("slope", initializer=tf.random_uniform([1], -1.0, 1.0))
            intercept = tf.get_variable("intercept", initializer=tf.zeros([1]))
            loss = tf.reduce_mean(tf.square(slope * self.x + intercept - self.y))
            optimizer = tf.train.GradientDescentOptimizer(LEARNING_RATE)
            pairs = optimizer.compute_gradients(loss)
            self.gradients = [gradient for gradient, _ in pairs]
            self.step = optimizer.apply_gradients(pairs)
            self.session = tf.Session()
            self.session.run(tf.global_variables_initializer())
            self.variables = TensorFlowVariables(loss, self.session)

    def gradient(self, x: NDArray[Any], y: NDArray[Any]) -> Any:
        """Return the gradient of one batch as one vector."""
        gradients = self.session.run(self.gradients, {self.x: x, self.y: y})
        return self.variables.flatten_gradients(gradients)

    def apply(self, gradient: NDArray[Any]) -> None:
        """Take a step along ``gradient``, fed in place of the gradient of a batch."""
        parts = self.variables.layout.vector_views(gradient)
        self.session.run(self.step, dict(zip(self.gradients, parts, strict=True)))


MODELS: dict[bool, type[Any]] = {False: EagerModel, True: GraphModel}


class Worker(FlatWorker):
    """Computes gradients on its own data, or trains its own copy of the model on it."""

    def build(self, seed: int, graph: bool, rank: int) -> Any:
        """Build the model in this process."""
        examples.prepare_tensorflow()
        self.rng = np.random.default_rng([seed, rank])
        self.model = MODELS[graph](seed)
        return self.model.variables

    def gradient(self) -> Any:
        """Return the gradient of the next batch as one vector."""
        x = self.rng.random((BATCH, 1), np.float32)
        return self.model.gradient(x, TRUTH["slope"] * x + TRUTH["intercept"])

    def train(self) -> FlatWeights:
        """Take a few steps; return the weights."""
        for _ in range(LOCAL_STEPS):
            self.model.apply(self.gradient())
        return self.get_weights()


def average_weights(group: WorkerGroup, steps: int) -> Iterator[list[float]]:
    """Yield the weights after each average."""
    for mean in group.run(max(1, steps // LOCAL_STEPS), "train"):
        yield [value.item() for value in mean.weights.values()]


def average_gradients(group: WorkerGroup, steps: int, model: Any) -> Iterator[list[float]]:
    """Yield the weights of ``model`` after each step that it takes."""
    for _ in range(steps):
        mean = group.average("gradient", broadcast=model.variables.get_flat())
        model.apply(mean.weights)
        yield model.variables.get_flat().tolist()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program; fail if the learned line is not the true one."""
    parser = examples.make_parser(
        __doc__,
        "the way to the line",
        workers=(3, "actors"),
        steps=(200, f"to take; weights are averaged after every {LOCAL_STEPS} of them"),
    )
    add, exchanges = parser.add_argument, ("weights", "gradients")
    add("--exchange", choices=exchanges, default="weights", help="what is averaged")
    add("--graph", action="store_true", help="a TF1 graph, not eager TensorFlow")
    options = parser.parse_args(arguments)
    examples.start_ray(options.workers)
    settings = options.seed, options.graph
    group = WorkerGroup.create(Worker, options.workers, *settings, arguments=lambda rank: [rank])
    if options.exchange == "weights":
        learned = list(average_weights(group, options.steps))
    else:
        examples.prepare_tensorflow()
        model = MODELS[options.graph](options.seed)
        learned = list(average_gradients(group, options.steps, model))
    print(examples.time_exchange(group))
    group.shutdown()

    rows = [
        {"": name, "true": f"{true:.4f}", "learned": f"{value:.4f}"}
        for (name, true), value in zip(TRUTH.items(), learned[-1], strict=True)
    ]
    gaps = np.abs(np.subtract(learned, list(TRUTH.values())))
    averages = range(1, len(gaps) + 1)
    curves = {name: (averages, gaps[:, i].tolist()) for i, name in enumerate(TRUTH)}
    panel = examples.Panel("distance to the truth", "average", curves, "log")
    title = f"Linear regression: averages of {options.exchange}"
    examples.report(rows, options.plot, title, panel)
    if gaps[-1].max() > TOLERANCE:
        raise SystemExit(f"not within {TOLERANCE} of the truth: it needs more --steps")


if __name__ == "__main__":
    examples.run(main)
