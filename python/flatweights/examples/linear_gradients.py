"""Linear regression by workers that compute gradients for one model in the driver.

Every iteration, each worker computes the gradients of one batch of its own, at the weights of
the driver, and returns them as one vector. The driver averages the vectors, applies the mean
to its model, and sends the new weights.

    python -m flatweights.examples.linear_gradients
    python -m flatweights.examples.linear_gradients --graph --plot line.png

For a model of your own, change `make_model`, which workers and driver share: what it returns
has `variables`, computes `gradients` and can `apply` them, in the order of the variables. A
model with variables that are not trained needs a `Layout` of the others to cut the vector by.
(`ComparedWorker` is a `FlatWorker` that can also do as Ray's guide does.)

On two cores of a shared virtual machine (TensorFlow 2.21, Ray 2.60), 3 workers: 3 ms for an
exchange, 5 ms with dicts of arrays. With two numbers to move it is Ray's calls alone.
"""

from argparse import Namespace
from typing import Any

import ray
from numpy.typing import NDArray

from flatweights.examples._exchange import ComparedWorker, time_gradients
from flatweights.examples._linear import batches, make_model, parse_options, report
from flatweights.examples._main import run
from flatweights.examples._ray import ray_for
from flatweights.ray import average


class Worker(ComparedWorker):
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
    with ray_for(options.workers):
        worker = ray.remote(Worker)
        workers = [worker.remote(rank, options) for rank in range(options.workers)]
        model = make_model(options)
        history = []
        for _ in range(options.iterations):
            weights = ray.put(model.variables.get_flat())
            mean = average([worker.gradients.remote(weights) for worker in workers])
            model.apply(mean.weights)
            history.append(model.variables.get_flat().tolist())
        seconds = time_gradients(workers, model.variables)
    report(history, seconds, options)


if __name__ == "__main__":
    run(main)
