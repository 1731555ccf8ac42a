"""Keras models that several processes of a Ray program train together.

Each process builds the model and calls ``fit`` on its part of the data; two lines change. With
`average_gradients`, the processes take the steps that one process would take with all of their
batches. With `AverageWeights`, each trains by itself and their weights are averaged now and then.
`AverageLogs` gives callbacks, such as early stopping, the metrics of all processes. `Report` gives
Ray Train the metrics and a checkpoint of each epoch, and resumes from one.

    model.compile(flatweights.keras.average_gradients(keras.optimizers.Adam()), "mse")
    model.fit(part_of_the_data, callbacks=[flatweights.keras.AverageLogs()])

Imports Keras, TensorFlow and Ray.
"""

from flatweights.keras import _backend as _backend  # checks Keras before anything imports it
from flatweights.keras._average_logs import AverageLogs
from flatweights.keras._average_weights import AverageWeights
from flatweights.keras._gradients import average_gradients
from flatweights.keras._report import Report

__all__ = ["AverageLogs", "AverageWeights", "Report", "average_gradients"]
