"""Handwritten digits, fitted by SciPy's L-BFGS-B, alone or with gradients from actors.

SciPy asks for the loss and its gradient at one vector of weights after another.
`TensorFlowVariables.value_and_gradient` makes that function from a Keras model and a loss: one set
and one get for each evaluation, however many variables there are.

With ``--actors``, the same fit runs once more, with gradients from actors. The driver sends the
vector to all of them; each returns loss and gradient on its own digits. Their averages, weighted
by the numbers of digits, are those on all of the data, except for rounding.

    flatweights examples digits_lbfgs
    flatweights examples --plot digits.png digits_lbfgs --layers 3
    flatweights examples digits_lbfgs --actors 2 --layers 4 --width 512

For a model of your own, change `build_model`, and `loss_of`, the loss on all of your data: L-BFGS
needs the same loss for the same vector, so random batches do not work. Actors pay off if a gradient
takes longer than an exchange (see `flatweights demo`); otherwise, stay in one process.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from scipy.optimize import minimize
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from threadpoolctl import threadpool_limits

from flatweights.ray import FlatWorker, WorkerGroup

ENOUGH = 0.95
PENALTY = 5e-5  # of the squares of the weights
ALIKE = 10  # iterations with the same losses; later, rounding errors have grown
TOLERANCE = 1e-5  # of a loss

Objective = Callable[[NDArray[Any]], tuple[float, NDArray[Any]]]
Digits = tuple[NDArray[Any], NDArray[Any]]  # images and labels


def split_digits(seed: int) -> tuple[Digits, Digits]:
    """Return digits to train on, and others to test with."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    parts = train_test_split(images, labels, test_size=0.2, random_state=seed)
    return (parts[0], parts[2]), (parts[1], parts[3])


def set_up_tensorflow() -> None:
    """Use one thread: the model is small, and driver and actors sum alike."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.experimental.enable_op_determinism()


def build_model(layers: int, width: int, seed: int) -> Any:
    """Return a network with a loss; the same seed gives the same weights."""
    import keras

    keras.utils.set_random_seed(seed)
    options = {"kernel_regularizer": keras.regularizers.L2(PENALTY)}
    hidden = [keras.layers.Dense(width, activation="tanh", **options) for _ in range(layers - 1)]
    model = keras.Sequential([keras.Input((64,)), *hidden, keras.layers.Dense(10, **options)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(loss=loss, metrics=["accuracy"])
    return model


def loss_of(model: Any, digits: Digits) -> Any:
    """Return the loss of ``model`` on all ``digits``, with the penalty."""
    images, labels = digits
    return model.compute_loss(y=labels, y_pred=model(images))


class Worker(FlatWorker):
    """Computes the loss and its gradient on one part of the data."""

    def build(self, layers: int, width: int, seed: int, workers: int, rank: int) -> Any:
        """Build the network in this process."""
        set_up_tensorflow()
        from flatweights.tensorflow import TensorFlowVariables

        (images, labels), _ = split_digits(seed)
        model = build_model(layers, width, seed)
        variables = TensorFlowVariables(model)
        loss = partial(loss_of, model, (images[rank::workers], labels[rank::workers]))
        self.objective = variables.value_and_gradient(loss)
        return variables

    def evaluate(self, x: NDArray[Any]) -> tuple[NDArray[Any], float]:
        """Return the gradient at the weights ``x`` as one vector, and the loss."""
        loss, gradient = self.objective(x)
        return gradient, loss


def with_actors(group: WorkerGroup, sizes: Sequence[int]) -> Objective:
    """Return the function that averages loss and gradient over the actors of ``group``."""

    def objective(x: NDArray[Any]) -> tuple[float, NDArray[Any]]:
        mean = group.average("evaluate", x, weights=sizes)
        return float(np.average(list(mean.extras.values()), weights=sizes)), mean.weights.copy()

    return objective


def fit(
    objective: Objective, start: NDArray[Any], iterations: int
) -> tuple[Any, list[float], list[float]]:
    """Return SciPy's result, and the seconds and the loss after each iteration."""
    objective(start)  # traces the function, which the comparison leaves out
    seconds, losses = list[float](), list[float]()

    def record(intermediate_result: Any) -> None:
        seconds.append(time.perf_counter() - begin)
        losses.append(intermediate_result.fun)

    options = {"jac": True, "method": "L-BFGS-B", "options": {"maxiter": iterations}}
    with threadpool_limits(1):  # SciPy's own threads would spin on the cores of TensorFlow
        begin = time.perf_counter()
        return minimize(objective, start, callback=record, **options), seconds, losses


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
    """Run the program; return curves. It fails if actors give another fit, or learn too little."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--layers", type=int, default=10, help="layers of the network; default: %(default)s")
    add("--width", type=int, default=32, help="units of a hidden layer; default: %(default)s")
    add("--iterations", type=int, default=150, help="iterations, at most; default: %(default)s")
    add("--seed", type=int, default=0, help="seed of the data and the first weights")
    add("--actors", type=int, default=0, help="actors that compute gradients, each on its part")
    options = parser.parse_args(arguments)
    if not 0 <= options.seed < 2**31:
        parser.error(f"--seed: expected 0 to {2**31 - 1}, got {options.seed}")
    if min(options.layers, options.width, options.iterations) < 1 or options.actors < 0:
        expected = "at least 1 layer, unit and iteration, and no fewer than 0 actors"
        parser.error(f"expected {expected}, got {vars(options)}")
    settings, actors = (options.layers, options.width, options.seed), options.actors
    set_up_tensorflow()
    from flatweights.tensorflow import TensorFlowVariables

    digits, test = split_digits(options.seed)
    model = build_model(*settings)
    variables, loss = TensorFlowVariables(model), partial(loss_of, model, digits)
    ways = {"one process": variables.value_and_gradient(loss)}
    if actors:
        ray.init(ignore_reinit_error=True, include_dashboard=False, logging_level="ERROR")
        group = WorkerGroup.create(Worker, actors, *settings, actors, arguments=lambda rank: [rank])
        sizes = [len(digits[1][rank::actors]) for rank in range(actors)]
        ways[f"{actors} actors"] = with_actors(group, sizes)
    start = variables.get_flat(dtype="f8")
    titles = ("iterations", "evaluations", "loss", "train", "test", "seconds", "ms each")
    print(f"{'':20}" + "".join(f"{title:>13}" for title in titles))
    curves = {}
    for name, objective in ways.items():
        result, seconds, losses = fit(objective, start, options.iterations)
        variables.set_flat(result.x)  # the best weights need not be the last that were evaluated
        train, accuracy = (model.evaluate(*some, verbose=0)[1] for some in (digits, test))
        curves[name] = seconds, losses
        cells = f"{result.nit:13}{result.nfev:13}{result.fun:13.4f}{train:13.3f}{accuracy:13.3f}"
        each = 1e3 * seconds[-1] / result.nfev
        print(f"{name:20}{cells}{seconds[-1]:13.2f}{each:13.2f}", flush=True)
        if accuracy < ENOUGH:
            raise SystemExit(f"accuracy below {ENOUGH}: it needs more --iterations")
    if actors:
        group.shutdown()
        pairs = list(zip(*(losses[:ALIKE] for _, losses in curves.values()), strict=False))
        gap = float(np.max(np.ptp(pairs, axis=1)))
        print(f"the first {len(pairs)} losses: the same within {gap:.0e}")
        if gap > TOLERANCE:
            raise SystemExit(f"expected the same losses within {TOLERANCE}")
    return {"loss by seconds": curves}


if __name__ == "__main__":
    main()
