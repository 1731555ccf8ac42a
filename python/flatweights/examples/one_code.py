"""One code, run eagerly, as a `tf.function` and in a TF1 session, changing over half-way.

The model, the loss and the step of the optimizer are written once. Each way of running them
trains on handwritten digits to the end; and each starts a training that another finishes, from
the file that `TensorFlowVariables.save` wrote: the weights and the optimizer's slots. A break alone
changes no bit of the weights at the end; another way of running sums in another order, which rounds
differently.

    python -m flatweights.examples.one_code
    python -m flatweights.examples.one_code --steps 400 --plot one_code.png

For a model of your own, change `build` and `train_step`. What runs in all three ways is a
`tf.Module` or Keras 3 layers, `tf.GradientTape`, and the optimizers of `tf.compat.v1.train`;
Keras's own optimizers do not run in a session.
"""

import tempfile
from collections.abc import Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatweights import examples

BATCH = 64
ENOUGH = 0.9
TOLERANCE = 1e-3  # of a weight, after steps that were rounded otherwise

Data = tuple[Any, Any]  # images and labels


def load_data(seed: int) -> tuple[Data, Data]:
    """Return the digits to train on, and others."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    held_out, rest = np.split(np.random.default_rng(seed).permutation(len(labels)), [359])
    images = (images / 16).astype(np.float32)
    return (images[rest], labels[rest]), (images[held_out], labels[held_out])


def build(seed: int) -> tuple[Any, Any]:
    """Return a network and its optimizer, in the mode that TensorFlow is in."""
    import tensorflow as tf

    rng = np.random.default_rng(seed)

    class Network(tf.Module):  # type: ignore[misc]
        """A hidden layer and an output layer."""

        def __init__(self) -> None:
            super().__init__()
            self.hidden = tf.Variable(rng.normal(0, 0.1, (64, 32)).astype("f"), name="hidden")
            self.hidden_bias = tf.Variable(tf.zeros(32), name="hidden_bias")
            self.output = tf.Variable(rng.normal(0, 0.1, (32, 10)).astype("f"), name="output")
            self.output_bias = tf.Variable(tf.zeros(10), name="output_bias")

        def __call__(self, images: Any) -> Any:
            hidden = tf.tanh(images @ self.hidden + self.hidden_bias)
            return hidden @ self.output + self.output_bias

    return Network(), tf.compat.v1.train.MomentumOptimizer(0.1, 0.9)


def train_step(network: Any, optimizer: Any, images: Any, labels: Any) -> Any:
    """Take one step; return the loss and, in a graph, the operation that takes it."""
    import tensorflow as tf

    with tf.GradientTape() as tape:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, network(images))
        loss = tf.reduce_mean(losses)
    variables = network.trainable_variables
    step = optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    return loss, step


class Eager:
    """Runs the code above operation by operation; ``variables`` are its weights and slots."""

    def __init__(self, seed: int) -> None:
        """Build the network; a first step without gradients makes the optimizer's slots."""
        import tensorflow as tf

        from flatweights.tensorflow import TensorFlowVariables

        self.network, optimizer = build(seed)
        optimizer.apply_gradients([(tf.zeros_like(v), v) for v in self.network.trainable_variables])
        self.variables = TensorFlowVariables([self.network, optimizer])
        self.step: Any = lambda x, y: train_step(self.network, optimizer, x, y)[0]

    def train(self, images: NDArray[Any], labels: NDArray[Any]) -> float:
        """Take a step; return the loss before it."""
        return float(self.step(images, labels))

    def predict(self, images: NDArray[Any]) -> NDArray[Any]:
        """Return one score for each class."""
        return np.asarray(self.network(images))


class Function(Eager):
    """Runs it as a graph that TensorFlow traces at the first step."""

    def __init__(self, seed: int) -> None:
        """Build the network."""
        import tensorflow as tf

        super().__init__(seed)
        self.step = tf.function(self.step)


class Session:
    """Runs it as a graph of TF1."""

    def __init__(self, seed: int) -> None:
        """Build the graph, and the slots with it."""
        import tensorflow.compat.v1 as tf

        from flatweights.tensorflow import TensorFlowVariables

        with tf.Graph().as_default():
            self.images = tf.placeholder(tf.float32, [None, 64])
            self.labels = tf.placeholder(tf.int64, [None])
            network, optimizer = build(seed)
            self.scores = network(self.images)
            self.step = train_step(network, optimizer, self.images, self.labels)
            self.session = tf.Session()
            self.session.run(tf.global_variables_initializer())
            self.variables = TensorFlowVariables([network, optimizer], self.session)

    def train(self, images: NDArray[Any], labels: NDArray[Any]) -> float:
        """Take a step; return the loss before it."""
        return float(self.session.run(self.step, {self.images: images, self.labels: labels})[0])

    def predict(self, images: NDArray[Any]) -> NDArray[Any]:
        """Return one score for each class."""
        return np.asarray(self.session.run(self.scores, {self.images: images}))


WAYS: dict[str, type[Any]] = {"eager": Eager, "tf.function": Function, "TF1 session": Session}


def train_in_turn(
    first: str, second: str | None, data: Data, steps: int, seed: int
) -> tuple[Any, list[float]]:
    """Train half of the steps in one way, save, load in another, and train the rest.

    Without a ``second`` way there is no break. Each step's batch is the same in every run.
    """
    images, labels = data
    way, losses = WAYS[first](seed), []
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
    """Run the program; fail if a break changes the weights, or too little is learned."""
    parser = examples.make_parser(__doc__, "the losses", steps=(200, f"of {BATCH} digits"))
    options = parser.parse_args(arguments)
    examples.prepare_tensorflow()  # one thread: sums in one order
    data, (images, labels) = load_data(options.seed)
    rows, losses, wrong = [], dict[tuple[str, str | None], list[float]](), []
    unbroken: dict[str, NDArray[Any]] = {}
    for first, second in [*((way, None) for way in WAYS), *product(WAYS, WAYS)]:
        way, losses[first, second] = train_in_turn(first, second, data, options.steps, options.seed)
        weights, name = way.variables.get_flat(), second or "(no break)"
        gap = float(np.max(np.abs(weights - unbroken.setdefault(second or first, weights))))
        accuracy = float(np.mean(np.argmax(way.predict(images), axis=1) == labels))
        rows.append(
            {
                "first half": first,
                "second half": name,
                "last loss": f"{losses[first, second][-1]:.4f}",
                "accuracy": f"{accuracy:.3f}",
                "weights": "same bits" if gap == 0 else f"within {gap:.0e}",
            }
        )
        if gap > (0 if first == second else TOLERANCE):
            wrong.append(f"{first}, {name}: the weights differ by {gap} from those without a break")
        if accuracy < ENOUGH:
            wrong.append(f"{first}, {name}: accuracy below {ENOUGH}: it needs more --steps")
    examples.print_table(rows)
    if options.plot:
        steps = range(options.steps)
        turns = list(pairwise([*WAYS, next(iter(WAYS))]))
        curves = {f"{a}, {b}": (steps, losses[a, b]) for a, b in turns}
        title = f"One code, saved and loaded after {options.steps // 2} steps"
        examples.draw(options.plot, title, examples.Panel("loss", "step", curves, "log"))
    if wrong:
        raise SystemExit(wrong[0])


if __name__ == "__main__":
    examples.run(main)
