"""Keras models that several processes of a Ray program train together.

Each process builds the model and calls ``fit`` on its part of the data; two lines change. With
`average_gradients`, the processes take the steps that one process would take with all of their
batches. With `AverageWeights`, each trains by itself and their weights are averaged now and then.
`AverageLogs` gives callbacks, such as early stopping, the metrics of all processes. `Report` gives
Ray Train the metrics and a checkpoint of each epoch, and resumes from one. `ReplaceWorkers` has Ray
Train replace the worker that has failed, while the others go on::

    model.compile(flatweights.keras.average_gradients(keras.optimizers.Adam()), "mse")
    model.fit(part_of_the_data, callbacks=[flatweights.keras.AverageLogs()])

Imports Keras, TensorFlow and Ray.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flatweights.keras import _backend as _backend  # checks Keras before anything imports it
from flatweights.keras._average_logs import AverageLogs
from flatweights.keras._average_weights import AverageWeights
from flatweights.keras._gradients import average_gradients
from flatweights.keras._mean import mean_over_members
from flatweights.keras._report import Report

if TYPE_CHECKING:
    from flatweights.ray import ReplaceWorkers

__all__ = [
    "AverageLogs",
    "AverageWeights",
    "ReplaceWorkers",
    "Report",
    "average_gradients",
    "mean_over_members",
]


def __getattr__(name: str) -> Any:
    """Import names that need Ray Train at their first use, since that takes seconds."""
    if name == "ReplaceWorkers":
        from flatweights.ray import ReplaceWorkers

        return ReplaceWorkers
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
