"""Linear regression by workers that train apart and average their weights.

Every round, each worker starts from the averaged weights and takes a few steps on data of
its own. The driver averages the weights that they return where they lie in the object store,
and hands the result on by reference: it never needs TensorFlow.

    python -m flatweights.examples.linear_weights
    python -m flatweights.examples.linear_weights --graph

For a model of your own, let `Worker.build` return it (a Keras model; in graph mode, a
`TensorFlowVariables` with the session) and `Worker.train` train it. `main` stays as it is.
"""

from argparse import Namespace
from typing import Any

import ray

from flatweights import FlatWeights
from flatweights.examples._linear import batches, make_model, parse_options, report
from flatweights.ray import FlatWorker, average

LOCAL_STEPS = 10


class Worker(FlatWorker):
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
    ray.init()
    worker = ray.remote(Worker)
    workers = [worker.remote(rank, options) for rank in range(options.workers)]
    weights = workers[0].get_weights.remote()
    for _ in range(options.iterations):
        weights = average([worker.train.remote(weights) for worker in workers]).ref
    slope, intercept = ray.get(weights).values()
    report(slope.item(), intercept.item())


if __name__ == "__main__":
    main()
