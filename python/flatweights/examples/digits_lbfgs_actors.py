"""The fit of `digits_lbfgs`, its gradients computed by actors: each on a part of the data.

SciPy's L-BFGS-B asks the driver for the loss and its gradient at one vector of weights after
another. The driver puts the vector into the object store once; each actor lets its model
use it where it lies, and returns loss and gradient on its own examples. Their averages,
weighted by the numbers of examples, are those on all of the data: the fit is the same as
that in one process, which runs first, but for rounding.

    python -m flatweights.examples.digits_lbfgs_actors
    python -m flatweights.examples.digits_lbfgs_actors --workers 4 --width 512 --plot digits.png

For a model of your own, change `build_model` and `make_loss` of `digits_lbfgs`, and let each
actor load its own part of your data. It pays where a gradient takes longer than an exchange,
of which the program prints the time; below that, stay in one process.

On two cores of a shared virtual machine (TensorFlow 2.21, Ray 2.60, SciPy 1.17), with 8
variables of 151,000 weights: accuracy 0.978 on digits that were not fitted, both ways; the
first 10 losses the same within 2e-7; 20 ms an evaluation against 14 ms in one process: on
two cores, so small a network does not pay for the exchange (5 ms; 9 ms with dicts of arrays).
"""

import argparse
import os
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from flatweights._arguments import integer
from flatweights.demo._digits import Examples, split_digits
from flatweights.examples import digits_lbfgs
from flatweights.examples._exchange import ComparedWorker, Seconds, time_gradients
from flatweights.examples._lbfgs import Fit, make_lbfgs_parser, report, search
from flatweights.examples._main import run
from flatweights.examples._ray import ray_for
from flatweights.ray import average

# What TensorFlow logs as it starts would bury the result.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

ALIKE = 10  # questions that have the same answers; later, what was rounded has grown
TOLERANCE = 1e-5  # of a loss


class Worker(ComparedWorker):
    """Computes the loss and its gradient on one part of the data."""

    def build(self, shard: Examples, options: argparse.Namespace) -> Any:
        """Build the model in this process."""
        import tensorflow as tf

        from flatweights.demo._replica import make_tensorflow_deterministic

        make_tensorflow_deterministic()
        self.shard = shard
        self.model = digits_lbfgs.build_model(options)
        loss = digits_lbfgs.make_loss(self.model, shard)
        trained = [v.value for v in self.model.trainable_variables]

        @tf.function  # type: ignore[untyped-decorator]
        def differentiate() -> Any:
            with tf.GradientTape() as tape:
                value = loss()
            return value, tape.gradient(value, trained)

        self.differentiate = differentiate
        return self.model

    def evaluate(self, weights: NDArray[Any]) -> tuple[NDArray[Any], float]:
        """Return the gradient at ``weights`` as one vector, and the loss."""
        # It is never trained here, so it need not have weights of its own.
        self.variables.set_flat(weights, share=True)
        loss, gradients = self.differentiate()
        return self.variables.flatten_gradients(gradients), float(loss)

    def measure(self, weights: NDArray[Any], test: Examples) -> tuple[float, float]:
        """Return the accuracy on the data of this actor, and on ``test``."""
        self.set_flat(weights)
        train, others = (digits_lbfgs.measure(self.model, e) for e in (self.shard, test))
        return train, others


def fit(workers: list[Any], sizes: list[int], test: Examples, iterations: int) -> Fit:
    """Fit the model of ``workers``, which have so many examples each."""

    def objective(x: NDArray[Any]) -> tuple[float, NDArray[Any]]:
        weights = ray.put(x.astype(np.float32))
        mean = average([worker.evaluate.remote(weights) for worker in workers], sizes)
        losses = [mean.extras[rank] for rank in mean.used]
        return float(np.average(losses, weights=sizes)), mean.weights.astype(np.float64)

    found = search(objective, ray.get(workers[0].get_flat.remote()), iterations)
    best = found.x.astype(np.float32)
    scores = ray.get([worker.measure.remote(best, test) for worker in workers])
    train = float(np.average([score[0] for score in scores], weights=sizes))
    return Fit(found, train, scores[0][1])


def fit_in_actors(options: argparse.Namespace) -> tuple[Fit, Seconds]:
    """Fit the model in actors; return what came of it, and the time of an exchange."""
    from flatweights.tensorflow import TensorFlowVariables

    shards, test = split_digits(options.workers, options.seed)
    worker = ray.remote(Worker)
    workers = [worker.remote(shard, options) for shard in shards]
    found = fit(workers, [len(shard.labels) for shard in shards], test, options.iterations)
    variables = TensorFlowVariables(digits_lbfgs.build_model(options))
    return found, time_gradients(workers, variables)


def main() -> None:
    """Run the program.

    Raises:
        SystemExit: If the two fits are not the same, or too little is learned.
    """
    parser = make_lbfgs_parser(__doc__, layers=4, width=256)
    parser.add_argument(
        "--workers", type=integer(1), default=2, metavar="N", help="default: %(default)s"
    )
    options = parser.parse_args()
    from flatweights.demo._replica import make_tensorflow_deterministic

    make_tensorflow_deterministic()  # one thread, here as in each of the actors
    alone = digits_lbfgs.fit(digits_lbfgs.with_flatweights, options)
    with ray_for(options.workers):
        together, seconds = fit_in_actors(options)
    losses = [one.search.losses[:ALIKE] for one in (alone, together)]
    count = min(map(len, losses))
    gap = float(np.max(np.abs(np.subtract(losses[0][:count], losses[1][:count]))))
    print(f"the first {count} losses: the same within {gap:.0e}")
    print(seconds)
    report({"in this process": alone, f"{options.workers} actors": together}, options)
    if gap > TOLERANCE:
        raise SystemExit(f"expected the same losses within {TOLERANCE}, got {gap:.0e} between them")


if __name__ == "__main__":
    run(main)
