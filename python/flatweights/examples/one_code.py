"""One code, run eagerly, as a `tf.function` and in a TF1 session, changing over half-way.

The model, the loss and the step of the optimizer are written once. Each way of running them
trains on handwritten digits to the end; and each starts a training that another finishes,
from the file that `TensorFlowVariables.save` wrote: the weights and the optimizer's slots,
``[model, optimizer]``. A break alone changes no bit of the weights at the end; another way
of running sums in another order, which rounds differently.

    python -m flatweights.examples.one_code
    python -m flatweights.examples.one_code --steps 400 --plot one_code.png

For a model of your own, change `Network` and `train_step`. What runs in all three ways is
`tf.Module`s or Keras 3 layers, `tf.GradientTape`, and the optimizers of
`tf.compat.v1.train`; Keras's own optimizers do not run in a session.

On two cores of a shared virtual machine (TensorFlow 2.21), 200 steps of 64 digits: accuracy
0.975 on digits that were not trained on, whichever way and however it was broken; the
weights are the same bits after a break, and differ by less than 1e-6 between the ways.
"""

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatweights.examples import Panel, draw, make_parser, prepare_tensorflow, print_table, run

BATCH = 64
ENOUGH = 0.9
TOLERANCE = 1e-3  # of a weight, after steps that were rounded otherwise
HELD_OUT = 359  # digits that are not trained on

Data = tuple[Any, Any]  # images and labels


def load_data(seed: int) -> tuple[Data, Data]:
    """Return the digits to train on, and others."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(labels))
    images = (images / 16).astype(np.float32)
    parts = (order[HELD_OUT:], order[:HELD_OUT])
    trained_on, held_out = ((images[part], labels[part]) for part in parts)
    return trained_on, held_out


def build(seed: int) -> tuple[Any, Any]:
    """Return a network and its optimizer, in the mode that TensorFlow is in."""
    import tensorflow as tf

    class Network(tf.Module):  # type: ignore[misc]
        """A hidden layer and an output layer."""

        def __init__(self) -> None:
            super().__init__()
            rng = np.random.default_rng(seed)
            self.hidden = tf.Variable(rng.normal(0, 0.1, (64, 32)).astype("f"), name="hidden")
            self.hidden_bias = tf.Variable(tf.zeros(32), name="hidden_bias")
            self.output = tf.Variable(rng.normal(0, 0.1, (32, 10)).astype("f"), name="output")
            self.output_bias = tf.Variable(tf.zeros(10), name="output_bias")

        def __call__(self, images: Any) -> Any:
            hidden = tf.tanh(images @ self.hidden + self.hidden_bias)
            return hidden @ self.output + self.output_bias

    return Network(), tf.compat.v1.train.AdamOptimizer(0.01)


def train_step(network: Any, optimizer: Any, images: Any, labels: Any) -> Any:
    """Take one step; return the loss and, in a graph, the operation that takes it."""
    import tensorflow as tf

    with tf.GradientTape() as tape:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, network(images))
        loss = tf.reduce_mean(losses)
    variables = network.trainable_variables
    step = optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    return loss, step


class Way(ABC):
    """A way to run the code above.

    Attributes:
        variables: The weights of the network and the slots of the optimizer.
    """

    variables: Any

    @abstractmethod
    def train(self, images: NDArray[Any], labels: NDArray[Any]) -> float:
        """Take a step; return the loss before it."""

    @abstractmethod
    def predict(self, images: NDArray[Any]) -> NDArray[Any]:
        """Return one score for each class."""


class Eagerly(Way):
    """Operation by operation."""

    def __init__(self, seed: int) -> None:
        """Build the network; a first step without gradients makes the slots."""
        import tensorflow as tf

        from flatweights.tensorflow import TensorFlowVariables

        self._network, optimizer = build(seed)
        trained = self._network.trainable_variables
        before = [v.numpy() for v in trained]
        optimizer.apply_gradients([(tf.zeros_like(v), v) for v in trained])
        self.variables = TensorFlowVariables([self._network, optimizer])
        # Powers of Adam's decays have moved on: the graph's slots are those of no step.
        for variable, value in zip(trained, before, strict=True):
            variable.assign(value)
        for variable in optimizer.variables():
            start = {"beta1_power": 0.9, "beta2_power": 0.999}.get(variable.name.split(":")[0], 0)
            variable.assign(tf.fill(variable.shape, tf.constant(start, variable.dtype)))
        self._step = self._prepare(lambda x, y: train_step(self._network, optimizer, x, y)[0])

    def _prepare(self, step: Any) -> Any:
        return step

    def train(self, images: NDArray[Any], labels: NDArray[Any]) -> float:
        """Take a step."""
        return float(self._step(images, labels))

    def predict(self, images: NDArray[Any]) -> NDArray[Any]:
        """Return one score for each class."""
        return np.asarray(self._network(images))


class AsFunction(Eagerly):
    """As a graph that TensorFlow traces at the first step."""

    def _prepare(self, step: Any) -> Any:
        import tensorflow as tf

        return tf.function(step)


class InSession(Way):
    """As a graph of TF1, in a session."""

    def __init__(self, seed: int) -> None:
        """Build the graph, and the slots with it."""
        import tensorflow as tf

        from flatweights.tensorflow import TensorFlowVariables

        tf1 = tf.compat.v1
        with tf.Graph().as_default():
            self._images = tf1.placeholder(tf.float32, [None, 64])
            self._labels = tf1.placeholder(tf.int64, [None])
            network, optimizer = build(seed)
            self._scores = network(self._images)
            self._fetches = train_step(network, optimizer, self._images, self._labels)
            self._session = tf1.Session()
            self._session.run(tf1.global_variables_initializer())
            self.variables = TensorFlowVariables([network, optimizer], self._session)

    def train(self, images: NDArray[Any], labels: NDArray[Any]) -> float:
        """Take a step."""
        feed = {self._images: images, self._labels: labels}
        return float(self._session.run(self._fetches, feed)[0])

    def predict(self, images: NDArray[Any]) -> NDArray[Any]:
        """Return one score for each class."""
        return np.asarray(self._session.run(self._scores, {self._images: images}))


WAYS: dict[str, type[Any]] = {
    "eager": Eagerly,
    "tf.function": AsFunction,
    "TF1 session": InSession,
}


def train_in_turn(
    first: str, second: str | None, data: Data, steps: int, seed: int
) -> tuple[Way, list[float]]:
    """Train half of the steps in one way, save, load in another, and train the rest.

    Without a ``second`` way there is no break. Each step's batch is the same in every run.
    """
    images, labels = data
    way: Way = WAYS[first](seed)
    losses = []
    for step in range(steps):
        if step == steps // 2 and second is not None:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "half-way.safetensors")
                way.variables.save(path)
                way = WAYS[second](seed + 1)  # other weights than those that it loads
                way.variables.load(path)
        chosen = np.random.default_rng((seed, step)).integers(len(labels), size=BATCH)
        losses.append(way.train(images[chosen], labels[chosen]))
    return way, losses


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program.

    Raises:
        SystemExit: If a break changes the weights, or too little is learned.
    """
    options = make_parser(__doc__, "the losses", steps=(200, "of 64 digits")).parse_args(arguments)
    prepare_tensorflow()  # one thread: sums in one order
    data, (images, labels) = load_data(options.seed)
    rows: list[tuple[str, ...]] = []
    losses: dict[tuple[str, str | None], list[float]] = {}
    unbroken: dict[str, NDArray[Any]] = {}
    wrong = []
    for first, second in [*((way, None) for way in WAYS), *product(WAYS, WAYS)]:
        way, curve = train_in_turn(first, second, data, options.steps, options.seed)
        losses[first, second] = curve
        weights = way.variables.get_flat()
        gap = float(np.max(np.abs(weights - unbroken.setdefault(second or first, weights))))
        accuracy = float(np.mean(np.argmax(way.predict(images), axis=1) == labels))
        verdict = "same bits" if gap == 0 else f"within {gap:.0e}"
        name = second or "(no break)"
        rows.append((first, name, f"{curve[-1]:.4f}", f"{accuracy:.3f}", verdict))
        if gap > (0 if first == second else TOLERANCE):
            wrong.append(f"{first}, {name}: the weights differ by {gap} from those without a break")
        if accuracy < ENOUGH:
            wrong.append(f"{first}, {name}: accuracy below {ENOUGH}: it needs more --steps")
    print_table(("first half", "second half", "last loss", "accuracy", "weights"), rows)
    if options.plot:
        ways, steps = list(WAYS), range(options.steps)
        turns = list(zip(ways, ways[1:] + ways[:1], strict=True))
        curves = {f"{a}, {b}": (steps, losses[a, b]) for a, b in turns}
        expected = losses[ways[0], None]
        gaps = {
            name: (steps, np.abs(np.subtract(y, expected)).tolist())
            for name, (_, y) in curves.items()
        }
        draw(
            options.plot,
            f"One code, saved and loaded after {options.steps // 2} steps",
            Panel("loss", "step", curves, "log", alike=True),
            Panel(f"distance to the loss of {ways[0]}, without a break", "step", gaps),
        )
    if wrong:
        raise SystemExit(wrong[0])


if __name__ == "__main__":
    run(main)
