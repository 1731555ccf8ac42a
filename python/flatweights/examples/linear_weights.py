"""Linear regression by workers that train apart and average their weights.

Every round, each worker starts from the averaged weights and takes a few steps on data of
its own. The driver averages the weights that they return where they lie in the object store,
and hands the result on by reference: it never needs TensorFlow.

    python -m flatweights.examples.linear_weights
    python -m flatweights.examples.linear_weights --graph --plot line.png

For a model of your own, let `Worker.build` return it (a Keras model; in graph mode, a
`TensorFlowVariables` with the session) and `Worker.train` train it. The loop in `main` stays
as it is. (`ComparedWorker` is a `FlatWorker` that can also do as Ray's guide does.)

On two cores of a shared virtual machine (TensorFlow 2.21, Ray 2.60), 3 workers: 6 ms for an
exchange, 8 ms with dicts of arrays. With two numbers to move it is Ray's calls alone;
`flatweights demo` and `keras_fit` have models of more.
"""

from argparse import Namespace
from typing import Any

import ray

from flatweights import FlatWeights
from flatweights.examples._exchange import ComparedWorker, time_exchange
from flatweights.examples._linear import batches, make_model, parse_options, report
from flatweights.examples._main import run
from flatweights.examples._ray import ray_for
from flatweights.ray import average

LOCAL_STEPS = 10


class Worker(ComparedWorker):
    """Trains its own copy of the model on its own data."""

    def build(self, rank: int, options: Namespace) -> Any:
        """Build the model in this process."""
        self.batches = batches(options.seed, rank)
        self.model = make_model(options)
        return self.model.variables

    def train(self, weights: FlatWeights) -> FlatWeights:
        """Take a few steps from ``weights``, and return where they lead."""
        self.set_weights(weights)
        for _ in range(LOCAL_STEPS):
            self.model.step(*next(self.batches))
        return self.get_weights()


def main() -> None:
    """Run the program."""
    options = parse_options(__doc__, iterations=20)
    with ray_for(options.workers):
        worker = ray.remote(Worker)
        workers = [worker.remote(rank, options) for rank in range(options.workers)]
        weights = workers[0].get_weights.remote()
        history = []
        for _ in range(options.iterations):
            mean = average([worker.train.remote(weights) for worker in workers])
            weights = mean.ref
            history.append([value.item() for value in mean.weights.values()])
        seconds = time_exchange(workers)
    report(history, seconds, options)


if __name__ == "__main__":
    run(main)
