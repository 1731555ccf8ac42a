"""Averaging the results of Ray actors, and actors whose weights travel as one buffer.

Imports Ray, and TensorFlow only where a `FlatWorker` is built.
"""

from flatweights.ray._average import average
from flatweights.ray._cost import ExchangeCost, exchange_cost
from flatweights.ray._errors import WorkerError
from flatweights.ray._group import WorkerGroup
from flatweights.ray._round import Round
from flatweights.ray._sharded import ShardedAverage
from flatweights.ray._sharded_round import ShardedRound, ShardedWeights
from flatweights.ray._store import StoreTooSmallError
from flatweights.ray._worker import FlatWorker, StaleWorkerError

__all__ = [
    "ExchangeCost",
    "FlatWorker",
    "Round",
    "ShardedAverage",
    "ShardedRound",
    "ShardedWeights",
    "StaleWorkerError",
    "StoreTooSmallError",
    "WorkerError",
    "WorkerGroup",
    "average",
    "exchange_cost",
]
