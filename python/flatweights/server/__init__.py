"""Server-side optimizers: each round's average updates a global model in place.

An optimizer owns the global model. Each step takes the average of the workers' results and
updates the model, which is then sent to the workers. `FedAvg` sets the model to the average.
`FedAvgM`, `FedAdagrad`, `FedAdam` and `FedYogi` use the difference between average and model as a
gradient. `ExponentialMovingAverage` smooths the averages. None needs TensorFlow or Ray.
`ServerOptimizer` shows how to write your own.

A parameter server takes gradients: `GradientDescent`, with momentum and clipping, and `Adam` step
against those of `TensorFlowVariables.flatten_gradients`, or any others.

>>> from flatweights import FlatWeights, average
>>> from flatweights.server import FedAvgM
>>> optimizer = FedAvgM(FlatWeights({"w": np.zeros(2, np.float32)}), momentum=0.5)
>>> for results in ([1.0, 3.0], [4.0, 4.0]):  # two rounds of two workers
...     models = [FlatWeights({"w": np.full(2, value, np.float32)}) for value in results]
...     weights = optimizer.step(average(models))
>>> weights["w"]
array([5., 5.], dtype=float32)

With a `flatweights.ray.WorkerGroup`, a round is::

    group.broadcast(optimizer.step(group.average("train").weights))
"""

from flatweights.server._adam import Adam
from flatweights.server._adaptive import FedAdagrad, FedAdam, FedYogi
from flatweights.server._averaging import ExponentialMovingAverage, FedAvg, FedAvgM
from flatweights.server._gradient import GradientDescent
from flatweights.server._optimizer import Hyperparameter, ServerOptimizer
from flatweights.server._state import Block

__all__ = [
    "Adam",
    "Block",
    "ExponentialMovingAverage",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedYogi",
    "GradientDescent",
    "Hyperparameter",
    "ServerOptimizer",
]
