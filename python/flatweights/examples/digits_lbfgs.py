"""Handwritten digits, fitted by SciPy's L-BFGS-B, alone or with gradients from actors.

SciPy asks for the loss and its gradient at one vector of weights after another.
`TensorFlowVariables.value_and_gradient` makes that function of a Keras model and a loss: one set
and one get for each evaluation, however many variables there are. Beside it, the program runs the
same fit with a loop over the variables, as it is written by hand. Both give the same bits for the
same vector, and so the same weights in the end; only the time differs.

With ``--actors``, the same fit runs once more, with gradients from actors. The driver sends the
vector to all of them; each returns loss and gradient on its own digits. Their averages, weighted
by the numbers of digits, are those on all of the data, except for rounding.

    python -m flatweights.examples.digits_lbfgs
    python -m flatweights.examples.digits_lbfgs --layers 3 --plot digits.png
    python -m flatweights.examples.digits_lbfgs --actors 2 --layers 4 --width 512

For a model of your own, change `build_model`, and `loss_of`, the loss on all of your data: L-BFGS
wants the same answer for the same vector, so random batches will not do. Actors pay where a
gradient takes longer than an exchange, of which the program prints the time; below that, stay in
one process.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from threadpoolctl import threadpool_limits

from flatweights import examples
from flatweights.ray import FlatWorker, WorkerGroup

ENOUGH = 0.95
PENALTY = 5e-5  # of the squares of the weights
ALIKE = 10  # iterations with the same losses; later, rounding errors have grown
TOLERANCE = 1e-5  # of a loss

Objective = Callable[[NDArray[Any]], tuple[float, NDArray[Any]]]


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


def loss_of(model: Any, digits: examples.Digits) -> Any:
    """Return the loss of ``model`` on all ``digits``, with the penalty."""
    return model.compute_loss(y=digits.labels, y_pred=model(digits.images))


def with_a_loop(model: Any, loss: Callable[[], Any]) -> Objective:
    """Return loss and gradient as a function of one vector, written by hand."""
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


class Worker(FlatWorker):
    """Computes the loss and its gradient on one part of the data."""

    def build(self, layers: int, width: int, seed: int, workers: int, rank: int) -> Any:
        """Build the network in this process."""
        examples.prepare_tensorflow()
        from flatweights.tensorflow import TensorFlowVariables

        digits, _ = examples.load_digits(seed)
        model = build_model(layers, width, seed)
        variables = TensorFlowVariables(model)
        loss = partial(loss_of, model, digits.shard(rank, workers))
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
    objective(start)  # traces the function, which is no part of the comparison
    seconds, losses = list[float](), list[float]()

    def record(intermediate_result: Any) -> None:
        seconds.append(time.perf_counter() - begin)
        losses.append(intermediate_result.fun)

    options = {"jac": True, "method": "L-BFGS-B", "options": {"maxiter": iterations}}
    with threadpool_limits(1):  # SciPy's own threads would spin on the cores of TensorFlow
        begin = time.perf_counter()
        return minimize(objective, start, callback=record, **options), seconds, losses


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program; fail if actors do not give the same fit, or too little is learned."""
    parser = examples.make_parser(
        __doc__,
        "the losses over time",
        layers=(10, "of the network"),
        width=(32, "of a hidden layer"),
        iterations=(150, "at most"),
    )
    help_ = "that compute gradients, each on its part of the digits; 0: only in this process"
    parser.add_argument("--actors", type=examples.integer(0), default=0, help=help_)
    options = parser.parse_args(arguments)
    settings, actors = (options.layers, options.width, options.seed), options.actors
    examples.prepare_tensorflow()  # one thread: the model is small, and all ways sum alike
    from flatweights.tensorflow import TensorFlowVariables

    digits, test = examples.load_digits(options.seed)
    model = build_model(*settings)
    variables, loss = TensorFlowVariables(model), partial(loss_of, model, digits)
    ways = {
        "flatweights": variables.value_and_gradient(loss),
        "loop over variables": with_a_loop(model, loss),
    }
    if actors:
        examples.start_ray(actors)
        group = WorkerGroup.create(Worker, actors, *settings, actors, arguments=lambda rank: [rank])
        sizes = [len(digits.shard(rank, actors).labels) for rank in range(actors)]
        ways[f"{actors} actors"] = with_actors(group, sizes)
    start = variables.get_flat(dtype="f8")
    rows, curves, accuracies, gap = [], {}, [], 0.0
    for name, objective in ways.items():
        result, seconds, losses = fit(objective, start, options.iterations)
        variables.set_flat(result.x)  # the best weights need not be the last that were evaluated
        accuracies.append(model.evaluate(*test, verbose=0)[1])
        curves[name] = seconds, losses
        rows.append(
            {
                "": name,
                "iterations": result.nit,
                "evaluations": result.nfev,
                "loss": f"{result.fun:.4f}",
                "train": f"{model.evaluate(*digits, verbose=0)[1]:.3f}",
                "test": f"{accuracies[-1]:.3f}",
                "seconds": f"{seconds[-1]:.2f}",
                "ms each": f"{1e3 * seconds[-1] / result.nfev:.2f}",
            }
        )
    if actors:
        pairs = list(zip(*(losses[:ALIKE] for _, losses in curves.values()), strict=False))
        gap = float(np.max(np.ptp(pairs, axis=1)))
        print(f"the first {len(pairs)} losses: the same within {gap:.0e}")
        print(examples.time_exchange(group))
        group.shutdown()
    panel = examples.Panel("loss", "seconds", curves, "log")
    examples.report(rows, options.plot, "Handwritten digits, fitted by L-BFGS-B", panel)
    if gap > TOLERANCE:
        raise SystemExit(f"expected the same losses within {TOLERANCE}, got {gap:.0e} between them")
    if min(accuracies) < ENOUGH:
        raise SystemExit(f"accuracy below {ENOUGH}: it needs more --iterations")


if __name__ == "__main__":
    examples.run(main)
