"""Linear regression by workers that compute gradients for one model in the driver.

Every step, the driver sends its weights, and each worker returns the gradient of one batch of its
own as one vector. The driver averages the vectors and applies the mean to its model.

    python -m flatweights.examples.linear_gradients
    python -m flatweights.examples.linear_gradients --graph --plot line.png

For a model of your own, change `EagerModel`, which workers and driver share.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatweights import examples
from flatweights.ray import FlatWorker, WorkerGroup

TRUTH = {"slope": 0.1, "intercept": 0.3}
TOLERANCE = 1e-3
BATCH, LEARNING_RATE = 100, 0.5


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
    """Computes gradients on its own data, at the weights that the driver sends."""

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


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program; fail if the learned line is not the true one."""
    parser = examples.make_parser(
        __doc__, "the way to the line", workers=(3, "actors"), iterations=(200, "steps to take")
    )
    parser.add_argument("--graph", action="store_true", help="a TF1 graph, not eager TensorFlow")
    options = parser.parse_args(arguments)
    examples.start_ray(options.workers)
    group = WorkerGroup.create(
        Worker, options.workers, options.seed, options.graph, arguments=lambda rank: [rank]
    )
    examples.prepare_tensorflow()
    model = MODELS[options.graph](options.seed)
    learned = []
    for _ in range(options.iterations):
        mean = group.average("gradient", broadcast=model.variables.get_flat())
        model.apply(mean.weights)
        learned.append(model.variables.get_flat().tolist())
    print(examples.time_exchange(group))
    group.shutdown()

    rows = [
        {"": name, "true": f"{true:.4f}", "learned": f"{value:.4f}"}
        for (name, true), value in zip(TRUTH.items(), learned[-1], strict=True)
    ]
    gaps = np.abs(np.subtract(learned, list(TRUTH.values())))
    steps = range(1, len(gaps) + 1)
    curves = {name: (steps, gaps[:, i].tolist()) for i, name in enumerate(TRUTH)}
    panel = examples.Panel("distance to the truth", "step", curves, "log")
    examples.report(rows, options.plot, "Linear regression: averages of gradients", panel)
    if gaps[-1].max() > TOLERANCE:
        raise SystemExit(f"not within {TOLERANCE} of the truth: it needs more --iterations")


if __name__ == "__main__":
    examples.run(main)
