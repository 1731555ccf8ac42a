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


def test_an_output_whose_name_begins_as_logs_of_a_validation_counts_in_training() -> None:
    inputs = keras.Input((3,))
    heads = {name: keras.layers.Dense(1, name=name)(inputs) for name in ("one", "val_two")}
    model = keras.Model(inputs, heads)
    losses = dict.fromkeys(heads, "mse")
    model.compile("sgd", losses, metrics={"val_two": ["mae"]})
    targets = {name: np.ones((5, 1)) for name in heads}
    samples = Samples(model)

    class Count(keras.callbacks.Callback):  # type: ignore[misc]
        def on_test_begin(self, logs: Any = None) -> None:
            samples.end_training()

        def on_test_end(self, logs: Any = None) -> None:
            samples.end_test()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.weights = {log: samples.weight_of(log) for log in logs}

    count, few = Count(), {name: one[:2] for name, one in targets.items()}
    options: dict[str, Any] = {"validation_data": (np.ones((2, 3)), few), "callbacks": [count]}
    model.fit(np.ones((5, 3)), targets, batch_size=2, verbose=0, **options)
    of_training = {log: weight for log, weight in count.weights.items() if weight == 5.0}
    assert {"loss", "one_loss", "val_two_loss", "val_two_mae"} == {*of_training}
    rest = {log: 2.0 for log in count.weights if log not in of_training}
    assert {log: count.weights[log] for log in rest} == rest
    assert {"val_loss", "val_one_loss", "val_val_two_loss", "val_val_two_mae"} == {*rest}


def test_metrics_that_consist_of_others_are_no_obstacle() -> None:
    model = Model()
    metrics: dict[str, Any] = {"metrics": ["mae", Pair()], "weighted_metrics": ["mse"]}
    model.compile("sgd", "mse", run_eagerly=True, **metrics)
    weights = np.array([0.5, 1.5, 0.0, 1.0, 3.0], np.float32)
    model.fit(np.ones((5, 3)), np.ones((5, 1)), sample_weight=weights, batch_size=2, verbose=0)
    samples = Samples(model)
    weights_of_logs = {log: samples.weight_of(log) for log in ("loss", "mae", "mse", "pair")}
    assert weights_of_logs == {"loss": 5.0, "mae": 5.0, "mse": 6.0, "pair": 5.0}
