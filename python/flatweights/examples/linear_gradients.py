"""Linear regression by workers that compute gradients for one model in the driver.

Every iteration, each worker computes the gradients of one batch of its own, at the weights of
the driver, and returns them as one vector. The driver averages the vectors, applies the mean
to its model, and sends the new weights.

    python -m flatweights.examples.linear_gradients
    python -m flatweights.examples.linear_gradients --graph

For a model of your own, change `make_model`, which workers and driver share: what it returns
has `variables`, computes `gradients` and can `apply` them, in the order of the variables. A
model with variables that are not trained needs a `Layout` of the others to cut the vector by.
"""

from argparse import Namespace
from typing import Any

import ray
from numpy.typing import NDArray

from flatweights.examples._linear import batches, make_model, parse_options, report
from flatweights.ray import FlatWorker, average


class Worker(FlatWorker):
    """Computes gradients on its own data, with weights that it is given."""

    def build(self, rank: int, options: Namespace) -> Any:
        """Build the model in this process."""
        self.batches = batches(options.seed, rank)
        self.model = make_model(options)
        return self.model.variables

    def gradients(self, weights: NDArray[Any]) -> NDArray[Any]:
        """Return the gradients of the next batch at ``weights``, as one vector."""
        self.set_flat(weights)
        return self.model.gradients(*next(self.batches))


def main() -> None:
    """Run the program."""
    options = parse_options(__doc__, iterations=200)
    ray.init()
    worker = ray.remote(Worker)
    workers = [worker.remote(rank, options) for rank in range(options.workers)]
    model = make_model(options)
    for _ in range(options.iterations):
        weights = ray.put(model.variables.get_flat())
        mean = average([worker.gradients.remote(weights) for worker in workers])
        model.apply(mean.weights)
    report(*model.variables.get_flat().tolist())


if __name__ == "__main__":
    main()
