"""The fit of `digits_lbfgs`, with gradients from actors, each on its part of the data.

SciPy's L-BFGS-B asks the driver for the loss and its gradient at one vector of weights after
another. The driver sends the vector to all actors; each returns loss and gradient on its own
digits. Their averages, weighted by the numbers of digits, are those on all of the data: except for
rounding, the fit is the same as that in one process, which runs first.

    python -m flatweights.examples.digits_lbfgs_actors
    python -m flatweights.examples.digits_lbfgs_actors --workers 4 --width 512 --plot digits.png

For a model of your own, change `build`; for other data, `Worker.build` and `main`. It pays where a
gradient takes longer than an exchange, of which the program prints the time; below that, stay in
one process.
"""

import time
from collections.abc import Callable, Sequence
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


def build(layers: int, width: int, seed: int, digits: examples.Digits) -> tuple[Any, Any, Any]:
    """Return a network, its variables, and its loss and gradient on ``digits`` as a function.

    The same seed gives the same weights.
    """
    import keras

    from flatweights.tensorflow import TensorFlowVariables

    keras.utils.set_random_seed(seed)
    options = {"kernel_regularizer": keras.regularizers.L2(PENALTY)}
    hidden = [keras.layers.Dense(width, activation="tanh", **options) for _ in range(layers - 1)]
    model = keras.Sequential([keras.Input((64,)), *hidden, keras.layers.Dense(10, **options)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(loss=loss, metrics=["accuracy"])
    variables = TensorFlowVariables(model)
    objective = variables.value_and_gradient(
        lambda: model.compute_loss(y=digits.labels, y_pred=model(digits.images))
    )
    return model, variables, objective


class Worker(FlatWorker):
    """Computes the loss and its gradient on one part of the data."""

    def build(self, layers: int, width: int, seed: int, workers: int, rank: int) -> Any:
        """Build the network in this process."""
        examples.prepare_tensorflow()
        digits, _ = examples.load_digits(seed)
        _, variables, self.objective = build(layers, width, seed, digits.shard(rank, workers))
        return variables

    def evaluate(self, x: NDArray[Any]) -> tuple[NDArray[Any], float]:
        """Return the gradient at the weights ``x`` as one vector, and the loss."""
        loss, gradient = self.objective(x)
        return gradient, loss


def averaged(group: WorkerGroup, sizes: Sequence[int]) -> Objective:
    """Return the objective that averages loss and gradient over the actors of ``group``."""

    def objective(x: NDArray[Any]) -> tuple[float, NDArray[Any]]:
        mean = group.average("evaluate", x, weights=sizes)
        return float(np.average(list(mean.extras.values()), weights=sizes)), mean.weights.copy()

    return objective


def fit(
    objective: Objective, start: NDArray[Any], iterations: int
) -> tuple[Any, list[float], list[float]]:
    """Return SciPy's result, and the seconds and the loss after each iteration."""
    objective(start)  # traces the function, which is no part of the comparison
    seconds: list[float] = []
    losses: list[float] = []
    begin = time.perf_counter()

    def record(intermediate_result: Any) -> None:
        seconds.append(time.perf_counter() - begin)
        losses.append(intermediate_result.fun)

    options = {"jac": True, "method": "L-BFGS-B", "options": {"maxiter": iterations}}
    with threadpool_limits(1):  # SciPy's own threads would spin on the cores of TensorFlow
        return minimize(objective, start, callback=record, **options), seconds, losses


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program; fail if the two fits are not the same, or too little is learned."""
    options = examples.make_parser(
        __doc__,
        "the losses over time",
        layers=(4, "of the network"),
        width=(256, "of a hidden layer"),
        iterations=(150, "at most"),
        workers=(2, "actors"),
    ).parse_args(arguments)
    settings, workers = (options.layers, options.width, options.seed), options.workers
    examples.start_ray(workers)
    group = WorkerGroup.create(Worker, workers, *settings, workers, arguments=lambda rank: [rank])
    examples.prepare_tensorflow()  # one thread, here as in each of the actors
    digits, test = examples.load_digits(options.seed)
    sizes = [len(digits.shard(rank, workers).labels) for rank in range(workers)]
    model, variables, alone = build(*settings, digits)
    start = variables.get_flat(dtype="f8")
    rows, curves, accuracies = [], {}, []
    objectives = {"in this process": alone, f"{workers} actors": averaged(group, sizes)}
    for name, objective in objectives.items():
        result, seconds, losses = fit(objective, start, options.iterations)
        variables.set_flat(result.x)
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
    pairs = list(zip(*(losses[:ALIKE] for _, losses in curves.values()), strict=False))
    gap = float(np.max(np.abs(np.diff(pairs))))
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
