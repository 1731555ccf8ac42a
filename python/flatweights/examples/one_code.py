"""The same code run eagerly, as a `tf.function` and in a TF1 session, switching half-way.

The model, the loss and the step of the optimizer are written once. Each way of running them
trains on handwritten digits to the end. Each way also starts a training that another way finishes,
from the file that `TensorFlowVariables.save` wrote: the weights and the optimizer's slots. A break
alone changes no bit of the final weights. But each way of running sums in an order of its own, and
so rounds differently.

    flatweights examples one_code
    flatweights examples --plot one_code.png one_code --steps 400

For a model of your own, change `build` and `train_step`. A `tf.Module`, Keras 3 layers,
`tf.GradientTape` and the optimizers of `tf.compat.v1.train` run in all three ways; Keras's own
optimizers do not run in a session.
"""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

BATCH = 64
ENOUGH = 0.9
TOLERANCE = 1e-3  # of a weight, after steps that were rounded differently


def build(seed: int) -> tuple[Any, Any]:
    """Return a network and its optimizer, in the mode that TensorFlow is in."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(seed)
    layers = keras.layers.Dense(32, activation="tanh"), keras.layers.Dense(10)
    network = keras.Sequential([keras.Input((64,)), *layers])
    return network, tf.compat.v1.train.MomentumOptimizer(0.1, 0.9)


def train_step(network: Any, optimizer: Any, images: Any, labels: Any) -> Any:
    """Take one step; return the loss and, in a graph, the operation that takes the step."""
    import tensorflow as tf

    with tf.GradientTape() as tape:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, network(images))
        loss = tf.reduce_mean(losses)
    variables = [v.value for v in network.trainable_variables]
    step = optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    return loss, step


class Training(NamedTuple):
    """The code above in one way of running it.

    Attributes:
        variables: The weights and the optimizer's slots.
        step: Takes one step on images and labels; returns the loss before it.
        predict: Returns one score for each image and class.
    """

    variables: Any
    step: Callable[[Any, Any], Any]
    predict: Callable[[Any], Any]


def eager(seed: int, compiled: bool = False) -> Training:
    """Run the code operation by operation, or ``compiled``, as a graph traced at the first step."""
    import tensorflow as tf

    from flatweights.tensorflow import TensorFlowVariables

    network, optimizer = build(seed)
    # A step without gradients makes the optimizer's slots.
    weights = [v.value for v in network.trainable_variables]
    optimizer.apply_gradients([(tf.zeros(v.shape), v) for v in weights])

    def step(images: Any, labels: Any) -> Any:
        return train_step(network, optimizer, images, labels)[0]

    variables = TensorFlowVariables([network, optimizer])
    return Training(variables, tf.function(step) if compiled else step, network)


def session(seed: int) -> Training:
    """Run it as a graph of TF1."""
    import tensorflow.compat.v1 as tf

    from flatweights.tensorflow import TensorFlowVariables

    with tf.Graph().as_default():
        images, labels = tf.placeholder(tf.float32, [None, 64]), tf.placeholder(tf.int64, [None])
        network, optimizer = build(seed)
        scores, step = network(images), train_step(network, optimizer, images, labels)
        session = tf.Session()
        session.run(tf.global_variables_initializer())
        variables = TensorFlowVariables([network, optimizer], session)
    return Training(
        variables,
        lambda x, y: session.run(step, {images: x, labels: y})[0],
        lambda x: session.run(scores, {images: x}),
    )


WAYS: dict[str, Callable[[int], Training]] = {
    "eager": eager,
    "tf.function": partial(eager, compiled=True),
    "TF1 session": session,
}


def train_in_turn(
    first: str, second: str | None, images: Any, labels: Any, steps: int, seed: int
) -> tuple[Training, list[float]]:
    """Train half of the steps in one way, save, load in another, and train the rest.

    Without a ``second`` way there is no break. Each step's batch is the same in every run.
    """
    training, losses = WAYS[first](seed), []
    for step in range(steps):
        if second is not None and step == steps // 2:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "half-way.safetensors")
                training.variables.save(path)
                training = WAYS[second](seed + 1)  # other weights than those that it loads
                training.variables.load(path)
        batch = np.random.default_rng((seed, step)).integers(len(labels), size=BATCH)
        losses.append(float(training.step(images[batch], labels[batch])))
    return training, losses


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, list[float]]]:
    """Run the program; return curves. It fails if a break changes weights, or learns too little."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    help_ = f"steps; batches of {BATCH}; default: %(default)s"
    parser.add_argument("--steps", type=int, default=200, help=help_)
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the data and the first weights"
    )
    options = parser.parse_args(arguments)
    if not 0 <= options.seed < 2**31:
        parser.error(f"--seed: expected 0 to {2**31 - 1}, got {options.seed}")
    if options.steps < 1:
        parser.error(f"expected at least 1 step, got {options.steps}")
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)  # sums in one order
    tf.config.experimental.enable_op_determinism()
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    parts = train_test_split(images, labels, test_size=0.2, random_state=options.seed)
    images, test_images, labels, test_labels = parts
    print(f"{'first half':14}{'second half':14}{'last loss':>9}{'accuracy':>10}  weights")
    losses = dict[tuple[str, str | None], list[float]]()
    unbroken: dict[str, NDArray[Any]] = {}
    for turn in [*((way, None) for way in WAYS), *product(WAYS, WAYS)]:
        first, second = turn
        training, losses[turn] = train_in_turn(*turn, images, labels, options.steps, options.seed)
        weights, name = training.variables.get_flat(), second or "(no break)"
        gap = float(np.max(np.abs(weights - unbroken.setdefault(second or first, weights))))
        accuracy = np.mean(np.argmax(training.predict(test_images), axis=1) == test_labels)
        bits = "same bits" if gap == 0 else f"within {gap:.0e}"
        print(f"{first:14}{name:14}{losses[turn][-1]:9.4f}{accuracy:10.3f}  {bits}", flush=True)
        if gap > (0 if first == second else TOLERANCE):
            raise SystemExit(f"weights differ by {gap} from those without a break")
        if accuracy < ENOUGH:
            raise SystemExit(f"accuracy below {ENOUGH}: it needs more --steps")
    pairs = pairwise([*WAYS, next(iter(WAYS))])
    return {"loss by step": {f"{a}, {b}": losses[a, b] for a, b in pairs}}


if __name__ == "__main__":
    main()
