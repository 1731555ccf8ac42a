"""The samples of a model: Keras tells callbacks only about batches.

They are counted as the weight that Keras gives to the mean of the loss. A model whose own
``train_step`` does not update that mean has 0 samples.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import keras
import numpy as np

from flatweights.keras._hooks import losses_of_outputs


class TrainedSamples:
    """Counts the samples that a model is trained with, however often it is evaluated meanwhile.

    Evaluations, such as those of a user's callback, reset the mean of the loss, and use it
    themselves. To read it before and after these costs less than to read it in each batch.
    """

    def __init__(self, model: Any) -> None:
        """Count the samples of ``model``, which is compiled, from now on."""
        self._mean = _mean_of_loss(model)
        self._trained = 0.0
        self.skip()
        _count_around(model, "evaluate", self)
        _count_around(model, "test_on_batch", self)
        if self._mean is not None:
            _count_around(self._mean, "reset_state", self)

    def read(self) -> float:
        """Return the number of samples that the model was trained with."""
        before = self._read
        self.skip()
        self._trained += self._read - before
        return self._trained

    def skip(self) -> None:
        """Leave out what the mean has counted since the last `read`."""
        self._read = _count(self._mean)


def _count_around(owner: Any, name: str, samples: TrainedSamples) -> None:
    """Leave out what a method of ``owner`` does to the mean of the loss.

    The method stays replaced, since no callback learns of a `fit` that an error ends.
    """
    own = getattr(owner, name)
    counters: weakref.WeakSet[TrainedSamples] | None = getattr(own, "counters", None)
    if counters is None:
        counters = weakref.WeakSet()

        @functools.wraps(own)
        def call(*args: Any, **kwargs: Any) -> Any:
            for one in counters:
                one.read()
            try:
                return own(*args, **kwargs)
            finally:
                for one in counters:
                    one.skip()

        call.counters = counters  # type: ignore[attr-defined]
        vars(owner)[name] = call
    counters.add(samples)


class Samples:
    """Counts the samples of an epoch's training and of its validation, as the weights of its logs.

    A callback calls these methods.
    """

    def __init__(self, model: Any) -> None:
        """Count the samples of ``model``, which is compiled."""
        self._model = model
        self._mean = _mean_of_loss(model)
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Note that an epoch begins: Keras has reset its metrics."""
        self._trained = self._tested = 0.0
        self._is_trained = False
        self._trained_by_log: dict[str, float] = {}
        self._tested_by_log: dict[str, float] = {}

    def end_training(self) -> None:
        """Note that the epoch's training has ended, before Keras resets its metrics."""
        if not self._is_trained:
            self._trained = _count(self._mean)
            self._trained_by_log = self._count_by_log()
        self._is_trained = True

    def end_test(self) -> None:
        """Note that the validation has ended."""
        self._tested = _count(self._mean)
        self._tested_by_log = self._count_by_log()

    def weight_of(self, log: str) -> float:
        """Return the weight of the value of a log at the end of the epoch, by its name.

        It is the number of samples that the value was computed from or, if sample weights or masks
        weight it, the sum of these; 1 if no samples were counted.
        """
        self.end_training()
        if self._is_of_validation(log):
            total, counts = self._tested, self._tested_by_log
            log = log.removeprefix("val_")
        else:
            total, counts = self._trained, self._trained_by_log
        return counts.get(log, total) if total else 1.0

    def _is_of_validation(self, log: str) -> bool:
        """Whether a log is of the validation: outputs and metrics may have such names, too."""
        if not log.startswith("val_"):
            return False
        names = [*getattr(self._model, "output_names", ())]
        for metric in self._model.metrics:
            names += [one.name for one in (metric, *getattr(metric, "metrics", ()))]
        own = [name for name in names if name.startswith("val_")]
        return not any(f"{log}_".startswith(f"{one}_") for one in own)

    def _count_by_log(self) -> dict[str, float]:
        """Return the sum of the weights in each mean of the model's metrics, by its name in logs.

        Sample weights and masks weight the values of some metrics, but not the samples themselves.
        """
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
        return {name: _count(mean) for name, mean in means.items()}


def _mean_of_loss(model: Any) -> Any:
    """Return the mean of the loss of a model; None without one."""
    means = (m for m in model.metrics if isinstance(m, keras.metrics.Mean))
    return next((mean for mean in means if mean.name == "loss"), None)


def _count(mean: Any) -> float:
    return 0.0 if mean is None else float(np.asarray(mean.count))
