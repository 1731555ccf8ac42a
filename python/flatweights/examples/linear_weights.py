"""Linear regression by workers that train apart and average their weights.

Every round, each worker starts from the averaged weights and takes a few steps on data of its
own; `WorkerGroup.run` averages what they return and sends the average to all. The driver needs
no TensorFlow.

    python -m flatweights.examples.linear_weights
    python -m flatweights.examples.linear_weights --graph --plot line.png

For a model of your own, let `Worker.build` return it (a Keras model; in graph mode, a
`TensorFlowVariables` with the session), and `Worker.train` train it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flatweights import FlatWeights, examples
from flatweights.ray import FlatWorker, WorkerGroup

TRUTH = {"slope": 0.1, "intercept": 0.3}
TOLERANCE = 1e-3
LOCAL_STEPS, BATCH, LEARNING_RATE = 10, 100, 0.5


def build_eagerly(seed: int) -> tuple[Any, Callable[[Any, Any], Any]]:
    """Return a Keras model, and a function that trains it on one batch."""
    import keras

    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(LEARNING_RATE), "mse")
    return model, model.train_on_batch


def build_in_a_graph(seed: int) -> tuple[Any, Callable[[Any, Any], Any]]:
    """Return the weights of a model in a TF1 graph, and a function that trains it on one batch."""
    import tensorflow.compat.v1 as tf

    from flatweights.tensorflow import TensorFlowVariables

    with tf.Graph().as_default():
        tf.set_random_seed(seed)
        x, y = (tf.placeholder(tf.float32, [None, 1]) for _ in range(2))
        slope = tf.get_variable("slope", initializer=tf.random_uniform([1], -1.0, 1.0))
        intercept = tf.get_variable("intercept", initializer=tf.zeros([1]))
        loss = tf.reduce_mean(tf.square(slope * x + intercept - y))
        step = tf.train.GradientDescentOptimizer(LEARNING_RATE).minimize(loss)
        session = tf.Session()
        session.run(tf.global_variables_initializer())
        return TensorFlowVariables(loss, session), lambda a, b: session.run(step, {x: a, y: b})


class Worker(FlatWorker):
    """Trains its own copy of the model on its own data."""

    def build(self, seed: int, graph: bool, rank: int) -> Any:
        """Build the model in this process."""
        examples.prepare_tensorflow()
        self.rng = np.random.default_rng([seed, rank])
        model, self.step = build_in_a_graph(seed) if graph else build_eagerly(seed)
        return model

    def train(self) -> FlatWeights:
        """Take a few steps; return the weights."""
        for _ in range(LOCAL_STEPS):
            x = self.rng.random((BATCH, 1), np.float32)
            self.step(x, TRUTH["slope"] * x + TRUTH["intercept"])
        return self.get_weights()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program; fail if the learned line is not the true one."""
    parser = examples.make_parser(
        __doc__, "the way to the line", workers=(3, "actors"), iterations=(20, "averages to take")
    )
    parser.add_argument("--graph", action="store_true", help="a TF1 graph, not eager TensorFlow")
    options = parser.parse_args(arguments)
    examples.start_ray(options.workers)
    group = WorkerGroup.create(
        Worker, options.workers, options.seed, options.graph, arguments=lambda rank: [rank]
    )
    learned = [
        [value.item() for value in result.weights.values()]
        for result in group.run(options.iterations, "train")
    ]
    print(examples.time_exchange(group))
    group.shutdown()

    rows = [
        {"": name, "true": f"{true:.4f}", "learned": f"{value:.4f}"}
        for (name, true), value in zip(TRUTH.items(), learned[-1], strict=True)
    ]
    gaps = np.abs(np.subtract(learned, list(TRUTH.values())))
    rounds = range(1, len(gaps) + 1)
    curves = {name: (rounds, gaps[:, i].tolist()) for i, name in enumerate(TRUTH)}
    panel = examples.Panel("distance to the truth", "average", curves, "log")
    examples.report(rows, options.plot, "Linear regression: averages of weights", panel)
    if gaps[-1].max() > TOLERANCE:
        raise SystemExit(f"not within {TOLERANCE} of the truth: it needs more --iterations")


if __name__ == "__main__":
    examples.run(main)
