"""Counts the samples that a model was trained with: Keras tells callbacks only about batches."""

from typing import Any

import keras
import numpy as np

from flatweights.keras._hooks import losses_of_outputs


class Samples:
    """Counts the samples of an epoch, as the weight that Keras gives to the mean of the loss.

    A callback calls these methods. A model whose own ``train_step`` does not update that mean has 0
    samples.

    Attributes:
        trained: The samples of the epoch's training until the last `read`.
        tested: The samples of the validation, once it has ended.
    """

    def __init__(self, model: Any, *, by_log: bool = False) -> None:
        """Count the samples of ``model``, which is compiled.

        Args:
            model: The model.
            by_log: Whether `weight_of` will be called: that takes more time.
        """
        self._model = model
        self._by_log = by_log
        means = (m for m in model.metrics if isinstance(m, keras.metrics.Mean))
        self._mean = next((mean for mean in means if mean.name == "loss"), None)
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Note that an epoch begins: Keras has reset its metrics."""
        self.trained = self.tested = 0.0
        self._is_trained = False
        self._trained_by_log: dict[str, float] = {}
        self._tested_by_log: dict[str, float] = {}

    def read(self) -> float:
        """Return the number of samples that the model was trained with in this epoch."""
        if not self._is_trained:
            self.trained = self._count()
        return self.trained

    def begin_test(self) -> None:
        """Note that the validation begins: Keras is about to reset its metrics."""
        self._end_training()

    def end_test(self) -> None:
        """Note that the validation has ended."""
        self.tested = self._count()
        self._tested_by_log = self._count_by_log()

    def weight_of(self, log: str) -> float:
        """Return the weight of the value of a log at the end of the epoch, by its name.

        It is the number of samples that the value was computed from or, if sample weights or masks
        weight it, the sum of these; 1 if no samples were counted.
        """
        self._end_training()
        if log.startswith("val_"):
            total, counts = self.tested, self._tested_by_log
        else:
            total, counts = self.trained, self._trained_by_log
        return counts.get(log.removeprefix("val_"), total) if total else 1.0

    def _end_training(self) -> None:
        self.read()
        if not self._is_trained:
            self._trained_by_log = self._count_by_log()
        self._is_trained = True

    def _count(self) -> float:
        return 0.0 if self._mean is None else float(np.asarray(self._mean.count))

    def _count_by_log(self) -> dict[str, float]:
        """Return the sum of the weights in each mean of the model's metrics, by its name in logs.

        Sample weights and masks weight the values of some metrics, but not the samples themselves.
        """
        if not self._by_log:
            return {}
        named: dict[str, Any] = {}
        apart = {id(metric) for metric in losses_of_outputs(self._model)}
        for metric in self._model.metrics:
            compiled = getattr(metric, "metrics", None)  # one metric has all that `compile` got
            values = metric.result() if compiled else None
            if isinstance(values, dict) and compiled and len(values) == len(compiled):
                named.update(zip(values, compiled, strict=True))
            elif id(metric) not in apart:
                named[metric.name] = metric
        means = {name: m for name, m in named.items() if isinstance(m, keras.metrics.Mean)}
        return {name: float(np.asarray(mean.count)) for name, mean in means.items()}
