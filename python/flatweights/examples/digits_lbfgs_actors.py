"""The fit of `digits_lbfgs`, its gradients computed by actors: each on a part of the data.

SciPy's L-BFGS-B asks the driver for the loss and its gradient at one vector of weights after
another. The driver sends the vector to all actors; each returns loss and gradient on its own
examples. Their averages, weighted by the numbers of examples, are those on all of the data: the
fit is the same as that in one process, which runs first, except for rounding.

    python -m flatweights.examples.digits_lbfgs_actors
    python -m flatweights.examples.digits_lbfgs_actors --workers 4 --width 512 --plot digits.png

For a model of your own, change `build`, and `load_shard` to load your data. It pays where a
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
PENALTY = 1e-4
ALIKE = 10  # questions that have the same answers; later, what was rounded has grown
TOLERANCE = 1e-5  # of a loss

Data = tuple[Any, Any]  # images and labels
Objective = Callable[[NDArray[Any]], tuple[float, NDArray[Any]]]


def load_shard(rank: int, workers: int, seed: int) -> tuple[Data, Data]:
    """Return the digits of one worker, and those that no worker has."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    held_out, rest = np.split(np.random.default_rng(seed).permutation(len(labels)), [359])
    own = np.array_split(rest, workers)[rank]
    images = (images / 16).astype(np.float32)
    return (images[own], labels[own]), (images[held_out], labels[held_out])


def build(layers: int, width: int, seed: int, data: Data) -> tuple[Any, Callable[[], Any]]:
    """Return a network and its loss on ``data``; the same seed gives the same weights."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(seed)
    hidden = [keras.layers.Dense(width, activation="tanh") for _ in range(layers - 1)]
    network = keras.Sequential([keras.Input((64,)), *hidden, keras.layers.Dense(10)])
    kernels = [v.value for v in network.trainable_variables if v.name == "kernel"]
    images, labels = data

    def loss() -> Any:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, network(images))
        return tf.reduce_mean(losses) + PENALTY * tf.add_n([*map(tf.nn.l2_loss, kernels)])

    return network, loss


def measure(network: Any, data: Data) -> float:
    """Return the accuracy of ``network`` on ``data``."""
    return float(np.mean(np.argmax(network(data[0]), axis=1) == data[1]))


class Worker(FlatWorker):
    """Computes the loss and its gradient on one part of the data."""

    def build(self, layers: int, width: int, seed: int, workers: int, rank: int) -> Any:
        """Build the network in this process."""
        examples.prepare_tensorflow()
        from flatweights.tensorflow import TensorFlowVariables

        self.shard, _ = load_shard(rank, workers, seed)
        network, loss = build(layers, width, seed, self.shard)
        variables = TensorFlowVariables(network)
        self.objective = variables.value_and_gradient(loss)
        return variables

    def evaluate(self, x: NDArray[Any]) -> tuple[NDArray[Any], float]:
        """Return the gradient at the weights ``x`` as one vector, and the loss."""
        loss, gradient = self.objective(x)
        return gradient, loss

    def size(self) -> int:
        """Return how many examples there are."""
        return len(self.shard[1])


def averaged(group: WorkerGroup) -> Objective:
    """Return the objective that averages loss and gradient over the actors of ``group``."""
    sizes = list(group.step("size").values())

    def objective(x: NDArray[Any]) -> tuple[float, NDArray[Any]]:
        mean = group.average("evaluate", x, weights=sizes)
        return float(np.average(list(mean.extras.values()), weights=sizes)), mean.weights.copy()

    return objective


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
    from flatweights.tensorflow import TensorFlowVariables

    fitted, held_out = load_shard(0, 1, options.seed)
    network, loss = build(*settings, fitted)
    variables = TensorFlowVariables(network)
    start = variables.get_flat(dtype="f8")
    objectives = {
        "in this process": variables.value_and_gradient(loss),
        f"{workers} actors": averaged(group),
    }
    rows, curves, accuracies = [], {}, []
    for name, objective in objectives.items():
        result, losses, seconds = search(objective, start, options.iterations)
        variables.set_flat(result.x)
        accuracies.append(measure(network, held_out))
        rows.append(
            {
                "": name,
                "iterations": result.nit,
                "evaluations": len(losses),
                "loss": f"{result.fun:.4f}",
                "train": f"{measure(network, fitted):.3f}",
                "test": f"{accuracies[-1]:.3f}",
                "seconds": f"{seconds[-1]:.2f}",
                "ms, median": f"{1e3 * np.median(np.diff(seconds)):.2f}",
            }
        )
        curves[name] = seconds, losses
    alone, together = (losses[:ALIKE] for _, losses in curves.values())
    count = min(len(alone), len(together))
    gap = max(abs(a - b) for a, b in zip(alone, together, strict=False))
    print(f"the first {count} losses: the same within {gap:.0e}")
    print(examples.time_exchange(group))
    group.shutdown()
    examples.print_table(rows)
    if options.plot:
        panel = examples.Panel("loss", "seconds", curves, "log")
        examples.draw(options.plot, "Handwritten digits, fitted by L-BFGS-B", panel)
    if gap > TOLERANCE:
        raise SystemExit(f"expected the same losses within {TOLERANCE}, got {gap:.0e} between them")
    if min(accuracies) < ENOUGH:
        raise SystemExit(f"accuracy below {ENOUGH}: it needs more --iterations")


if __name__ == "__main__":
    examples.run(main)
