"""The fit of `digits_lbfgs`, its gradients computed by actors: each on a part of the data.

SciPy's L-BFGS-B asks the driver for the loss and its gradient at one vector of weights after
another. The driver sends the vector to all actors; each lets its model use it where it lies, and
returns loss and gradient on its own examples. Their averages, weighted by the numbers of
examples, are those on all of the data: the fit is the same as that in one process, which runs
first, except for rounding.

    python -m flatweights.examples.digits_lbfgs_actors
    python -m flatweights.examples.digits_lbfgs_actors --workers 4 --width 512 --plot digits.png

For a model of your own, change `Model`, and `load_shard` to load your data. It pays where a
gradient takes longer than an exchange, of which the program prints the time; below that, stay
in one process.

On two cores of a shared virtual machine (TensorFlow 2.21, Ray 2.60, SciPy 1.17), with 8
variables of 151,000 weights: accuracy 0.978 on digits that were not fitted, both ways; the
first 10 losses the same within 2e-7; 20 ms an evaluation against 14 ms in one process: on
two cores, so small a network does not pay for the exchange (5 ms; 9 ms with dicts of arrays).
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from threadpoolctl import threadpool_limits

from flatweights.examples import (
    Panel,
    draw,
    make_parser,
    prepare_tensorflow,
    print_table,
    run,
    start_ray,
    time_exchange,
)
from flatweights.ray import FlatWorker, WorkerGroup

ENOUGH = 0.95
PENALTY = 1e-4
HELD_OUT = 359  # digits that no worker fits
ALIKE = 10  # questions that have the same answers; later, what was rounded has grown
TOLERANCE = 1e-5  # of a loss

Data = tuple[Any, Any]  # images and labels
Objective = Callable[[NDArray[Any]], tuple[float, NDArray[Any]]]


def load_shard(rank: int, workers: int, seed: int) -> tuple[Data, Data]:
    """Return the digits of one worker, and those that no worker has."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(labels))
    own, held_out = np.array_split(order[HELD_OUT:], workers)[rank], order[:HELD_OUT]
    images = (images / 16).astype(np.float32)
    return (images[own], labels[own]), (images[held_out], labels[held_out])


class Model:
    """A network, and its loss on some data.

    Attributes:
        network: The network.
        loss: Computes the loss: small kernels are better.
    """

    def __init__(self, layers: int, width: int, seed: int, data: Data) -> None:
        """Build the network; the same seed gives the same weights."""
        import keras
        import tensorflow as tf

        keras.utils.set_random_seed(seed)
        hidden = [keras.layers.Dense(width, activation="tanh") for _ in range(layers - 1)]
        self.network = keras.Sequential([keras.Input((64,)), *hidden, keras.layers.Dense(10)])
        kernels = [v.value for v in self.network.trainable_variables if v.name == "kernel"]
        images, labels = data

        def loss() -> Any:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, self.network(images))
            return tf.reduce_mean(losses) + PENALTY * tf.add_n([*map(tf.nn.l2_loss, kernels)])

        self.loss = loss

    def measure(self, data: Data) -> float:
        """Return the accuracy on ``data``."""
        return float(np.mean(np.argmax(self.network(data[0]), axis=1) == data[1]))


class Worker(FlatWorker):
    """Computes the loss and its gradient on one part of the data."""

    def build(self, layers: int, width: int, seed: int, workers: int, rank: int) -> Any:
        """Build the model in this process."""
        prepare_tensorflow()
        import tensorflow as tf

        self.shard, self.held_out = load_shard(rank, workers, seed)
        self.model = Model(layers, width, seed, self.shard)
        trained = [v.value for v in self.model.network.trainable_variables]

        @tf.function  # type: ignore[untyped-decorator]
        def differentiate() -> Any:
            with tf.GradientTape() as tape:
                value = self.model.loss()
            return value, tape.gradient(value, trained)

        self.differentiate = differentiate
        return self.model.network

    def set_flat(self, new_weights: Any, *, share: bool = True) -> None:
        """Set the weights; they are never trained here, so the model need not have its own."""
        super().set_flat(new_weights, share=share)

    def evaluate(self) -> tuple[NDArray[Any], float]:
        """Return the gradient as one vector, and the loss."""
        loss, gradients = self.differentiate()
        return self.variables.flatten_gradients(gradients), float(loss)

    def measure(self) -> tuple[float, float]:
        """Return the accuracy on the data of this actor, and on digits that no actor has."""
        return self.model.measure(self.shard), self.model.measure(self.held_out)

    def size(self) -> int:
        """Return how many examples there are."""
        return len(self.shard[1])


class Fit(NamedTuple):
    """The result of a search: the best weights, and loss and time of each evaluation."""

    best: NDArray[Any]
    iterations: int
    losses: list[float]
    seconds: list[float]


def search(objective: Objective, start: NDArray[Any], iterations: int) -> Fit:
    """Ask ``objective`` from ``start`` on."""
    start = start.astype(np.float64)
    objective(start)  # what is traced at the first question is no part of the comparison
    losses: list[float] = []
    seconds: list[float] = []

    def recorded(x: NDArray[Any]) -> tuple[float, NDArray[Any]]:
        answer = objective(x)
        losses.append(answer[0])
        seconds.append(time.perf_counter() - began)
        return answer

    limits = {"maxiter": iterations, "maxfun": 10 * iterations}
    with threadpool_limits(1):  # SciPy's own threads wait busily where TensorFlow has to run
        began = time.perf_counter()
        result = minimize(recorded, start, jac=True, method="L-BFGS-B", options=limits)
    return Fit(result.x, int(result.nit), losses, seconds)


def averaged(group: WorkerGroup, sizes: Sequence[int]) -> Objective:
    """Return the objective that averages loss and gradient over the actors of ``group``."""

    def objective(x: NDArray[Any]) -> tuple[float, NDArray[Any]]:
        group.broadcast(x.astype(np.float32))
        mean = group.average("evaluate", weights=sizes)
        losses = [mean.extras[rank] for rank in mean.used]
        return float(np.average(losses, weights=sizes)), mean.weights.astype(np.float64)

    return objective


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program.

    Raises:
        SystemExit: If the two fits are not the same, or too little is learned.
    """
    parser = make_parser(
        __doc__,
        "the losses over time",
        layers=(4, "of the network"),
        width=(256, "of a hidden layer"),
        iterations=(150, "at most"),
        workers=(2, "actors"),
    )
    options = parser.parse_args(arguments)
    settings = options.layers, options.width, options.seed
    start_ray(options.workers)
    group = WorkerGroup.create(
        Worker, options.workers, *settings, options.workers, arguments=lambda rank: (rank,)
    )
    prepare_tensorflow()  # one thread, here as in each of the actors
    from flatweights.tensorflow import TensorFlowVariables

    fitted, held_out = load_shard(0, 1, options.seed)
    model = Model(*settings, fitted)
    variables = TensorFlowVariables(model.network, trainable_only=True)
    start = variables.get_flat()
    alone = search(variables.value_and_gradient(model.loss), start, options.iterations)
    variables.set_flat(alone.best)
    sizes = list(group.step("size").values())
    together = search(averaged(group, sizes), start, options.iterations)
    group.broadcast(together.best.astype(np.float32))
    scores = list(group.step("measure").values())
    accuracy = {
        "in this process": (model.measure(fitted), model.measure(held_out)),
        f"{options.workers} actors": (
            float(np.average([own for own, _ in scores], weights=sizes)),
            scores[0][1],
        ),
    }
    fits = dict(zip(accuracy, (alone, together), strict=True))
    count = min(ALIKE, len(alone.losses), len(together.losses))
    gap = np.max(np.abs(np.subtract(alone.losses[:count], together.losses[:count])))
    print(f"the first {count} losses: the same within {gap:.0e}")
    print(time_exchange(group))
    group.shutdown()

    rows = []
    for name, (_, iterations, losses, seconds) in fits.items():
        counts = str(iterations), str(len(losses)), f"{min(losses):.4f}"
        learned = (f"{share:.3f}" for share in accuracy[name])
        times = f"{seconds[-1]:.2f}", f"{1e3 * np.median(np.diff(seconds)):.2f}"
        rows.append((name, *counts, *learned, *times))
    titles = ("", "iterations", "evaluations", "loss", "train", "test", "seconds", "ms, median")
    print_table(titles, rows)
    if options.plot:
        curves = {n: (f.seconds, np.minimum.accumulate(f.losses).tolist()) for n, f in fits.items()}
        panel = Panel("lowest loss so far", "seconds", curves, "log")
        draw(options.plot, "Handwritten digits, fitted by L-BFGS-B", panel)
    if gap > TOLERANCE:
        raise SystemExit(f"expected the same losses within {TOLERANCE}, got {gap:.0e} between them")
    if min(test for _, test in accuracy.values()) < ENOUGH:
        raise SystemExit(f"accuracy below {ENOUGH}: it needs more --iterations")


if __name__ == "__main__":
    run(main)
