"""The numbers of samples, and the sums of weights, that a model's metrics have counted."""

from typing import Any

import keras
import numpy as np

from flatweights.keras._samples import Samples


class Pair(keras.metrics.Metric):  # type: ignore[misc]
    """A metric of a user's that consists of others."""

    def __init__(self) -> None:
        super().__init__(name="pair")
        self.metrics = [keras.metrics.Mean(), keras.metrics.Mean()]

    def update_state(self, *values: Any, **options: Any) -> None:
        for metric in self.metrics:
            metric.update_state(values[0])

    def result(self) -> Any:
        return self.metrics[0].result() + self.metrics[1].result()


class Model(keras.Sequential):  # type: ignore[misc]
    """A model with a metric of its own, and two outer ones."""

    def __init__(self) -> None:
        super().__init__([keras.layers.Dense(1)])
        self.pair = Pair()


def test_metrics_that_consist_of_others_are_no_obstacle() -> None:
    model = Model()
    metrics: dict[str, Any] = {"metrics": ["mae", Pair()], "weighted_metrics": ["mse"]}
    model.compile("sgd", "mse", run_eagerly=True, **metrics)
    weights = np.array([0.5, 1.5, 0.0, 1.0, 3.0], np.float32)
    model.fit(np.ones((5, 3)), np.ones((5, 1)), sample_weight=weights, batch_size=2, verbose=0)
    samples = Samples(model)
    weights_of_logs = {log: samples.weight_of(log) for log in ("loss", "mae", "mse", "pair")}
    assert weights_of_logs == {"loss": 5.0, "mae": 5.0, "mse": 6.0, "pair": 5.0}
