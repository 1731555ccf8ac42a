"""Handwritten digits, fitted by SciPy's L-BFGS-B: the whole model is one vector to it.

SciPy asks for the loss and its gradient at one vector of weights after another.
`TensorFlowVariables.value_and_gradient` makes a function for it of a Keras model and a loss: one
set and one get for each question, however many variables there are. Beside it, the same fit with
a loop over the variables, as it is written by hand. Both get the same bits in answer to each
question, and so the same weights in the end; only the time differs.

    python -m flatweights.examples.digits_lbfgs
    python -m flatweights.examples.digits_lbfgs --layers 3 --plot digits.png

For a model of your own, change `build_model` and `make_loss`, which returns the loss on all of your
data: L-BFGS wants the same answer to the same question, so random batches will not do.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from threadpoolctl import threadpool_limits

from flatweights import examples

ENOUGH = 0.95
PENALTY = 1e-4

Data = tuple[Any, Any]  # images and labels
Objective = Callable[[NDArray[Any]], tuple[float, NDArray[Any]]]


def load_data(seed: int) -> tuple[Data, Data]:
    """Return the digits to fit, and others."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    held_out, fitted = np.split(np.random.default_rng(seed).permutation(len(labels)), [359])
    images = (images / 16).astype(np.float32)
    return (images[fitted], labels[fitted]), (images[held_out], labels[held_out])


def build_model(layers: int, width: int, seed: int) -> Any:
    """Return a network of so many layers; the same seed gives the same weights."""
    import keras

    keras.utils.set_random_seed(seed)
    hidden = [keras.layers.Dense(width, activation="tanh") for _ in range(layers - 1)]
    return keras.Sequential([keras.Input((64,)), *hidden, keras.layers.Dense(10)])


def make_loss(model: Any, data: Data) -> Callable[[], Any]:
    """Return a function that returns the loss of ``model`` on ``data``, with a weight decay."""
    import tensorflow as tf

    images, labels = data
    kernels = [v.value for v in model.trainable_variables if v.name == "kernel"]

    def loss() -> Any:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model(images))
        return tf.reduce_mean(losses) + PENALTY * tf.add_n([*map(tf.nn.l2_loss, kernels)])

    return loss


def measure(model: Any, data: Data) -> float:
    """Return the accuracy of ``model`` on ``data``."""
    return float(np.mean(np.argmax(model(data[0]), axis=1) == data[1]))


def with_flatweights(model: Any, loss: Callable[[], Any]) -> Objective:
    """Return the objective of one vector."""
    from flatweights.tensorflow import TensorFlowVariables

    return TensorFlowVariables(model).value_and_gradient(loss)


def with_a_loop(model: Any, loss: Callable[[], Any]) -> Objective:
    """Return the same, written by hand."""
    import tensorflow as tf

    variables = [v.value for v in model.trainable_variables]
    ends = np.cumsum([np.prod(v.shape, dtype=int) for v in variables])

    @tf.function  # type: ignore[untyped-decorator]
    def evaluate() -> Any:
        with tf.GradientTape() as tape:
            value = loss()
        return value, tape.gradient(value, variables)

    def objective(x: NDArray[Any]) -> tuple[float, NDArray[Any]]:
        for variable, piece in zip(variables, np.split(x, ends[:-1]), strict=True):
            variable.assign(piece.reshape(variable.shape).astype(np.float32))
        value, gradients = evaluate()
        flat = np.concatenate([gradient.numpy().reshape(-1) for gradient in gradients])
        return float(value), flat.astype(np.float64)

    return objective


WAYS = {"flatweights": with_flatweights, "loop over variables": with_a_loop}


def search(
    objective: Objective, start: NDArray[Any], iterations: int
) -> tuple[Any, list[float], list[float]]:
    """Return SciPy's result, and the loss and the time of each evaluation."""
    objective(start)  # what is traced at the first question is no part of the comparison
    losses, times = [], [time.perf_counter()]

    def recorded(x: NDArray[Any]) -> tuple[float, NDArray[Any]]:
        loss, gradient = objective(x)
        losses.append(loss)
        times.append(time.perf_counter())
        return loss, gradient

    with threadpool_limits(1):  # SciPy's own threads wait busily where TensorFlow has to run
        options = {"maxiter": iterations}
        result = minimize(recorded, start, jac=True, method="L-BFGS-B", options=options)
    return result, losses, [t - times[0] for t in times[1:]]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program; fail if too little is learned."""
    options = examples.make_parser(
        __doc__,
        "the losses over time",
        layers=(10, "of the network"),
        width=(32, "of a hidden layer"),
        iterations=(150, "at most"),
    ).parse_args(arguments)
    examples.prepare_tensorflow()  # one thread: the model is small, and both ways agree
    from flatweights.tensorflow import TensorFlowVariables

    fitted, held_out = load_data(options.seed)
    rows, curves, accuracies = [], {}, []
    for name, way in WAYS.items():
        model = build_model(options.layers, options.width, options.seed)
        variables = TensorFlowVariables(model)
        objective, start = way(model, make_loss(model, fitted)), variables.get_flat(dtype="f8")
        result, losses, seconds = search(objective, start, options.iterations)
        variables.set_flat(result.x)  # the last ones asked about need not be the best
        accuracies.append(measure(model, held_out))
        rows.append(
            {
                "": name,
                "iterations": result.nit,
                "evaluations": len(losses),
                "loss": f"{result.fun:.4f}",
                "train": f"{measure(model, fitted):.3f}",
                "test": f"{accuracies[-1]:.3f}",
                "seconds": f"{seconds[-1]:.2f}",
                "ms, median": f"{1e3 * np.median(np.diff(seconds)):.2f}",
            }
        )
        curves[name] = seconds, np.minimum.accumulate(losses).tolist()
    examples.print_table(rows)
    if options.plot:
        panel = examples.Panel("lowest loss so far", "seconds", curves, "log")
        examples.draw(options.plot, "Handwritten digits, fitted by L-BFGS-B", panel)
    if min(accuracies) < ENOUGH:
        raise SystemExit(f"accuracy below {ENOUGH}: it needs more --iterations")


if __name__ == "__main__":
    examples.run(main)
