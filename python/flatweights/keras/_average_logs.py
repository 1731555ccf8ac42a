"""`AverageLogs`: the losses and metrics of all members."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from flatweights import FlatWeights, average
from flatweights._average import Nonfinite, check_nonfinite
from flatweights.keras._average_weights import AverageWeights
from flatweights.keras._callback import MemberCallback
from flatweights.keras._gradients import averagings_in
from flatweights.keras._hooks import callbacks_beside
from flatweights.keras._member_handle import MemberHandle, calls_are_equal
from flatweights.keras._progress import SAVING, AnyState, check_before
from flatweights.keras._report import Report
from flatweights.keras._samples import Samples
from flatweights.ray import Member, Round
from flatweights.robust import AnyRule, Rule

_log = logging.getLogger("flatweights")


class AverageLogs(MemberCallback):
    """Averages the losses and metrics of each epoch over the members of a process group.

    Put it first in the list of callbacks. Callbacks after it see the averages and so decide alike
    in all members, such as `keras.callbacks.EarlyStopping`, ``ReduceLROnPlateau`` and
    ``ModelCheckpoint``. ``fit`` prints and returns the averages, too. If a callback before this one
    stops training in one member, it stops in all. One that does so within an epoch may stand
    anywhere: if the others would wait for the batches that are left, all finish that epoch first.

    Each value is weighted by the number of samples that it was computed from: those of the
    training or, if its name begins with ``val_``, those of the validation. A metric that sample
    weights or masks weight (``weighted_metrics``, or the accuracy of masked sequences) is weighted
    by the sum of these instead. That is exact for means, such as losses and accuracies. For a
    metric that is not a mean over samples (AUC, precision), the average of the members' values is
    close to the value over all samples, but not the same. So is that of a metric with an array of
    values, such as `keras.metrics.F1Score`. The average of counts and sums, such as
    those of `keras.metrics.TruePositives`, is what a member has counted on average: multiply it by
    the number of members. With a ``rule``, all members count equally.

    >>> import keras
    >>> import flatweights.ray
    >>> member = flatweights.ray.join("logs", rank=0, size=1)  # in Ray Train: AverageLogs()
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> data = np.ones((8, 2)), np.ones(8)
    >>> callbacks = [AverageLogs(member=member), keras.callbacks.EarlyStopping("loss")]
    >>> history = model.fit(*data, epochs=2, verbose=0, callbacks=callbacks)
    >>> member.leave()
    """

    def __init__(
        self,
        *,
        member: Member | None = None,
        timeout: float | None = None,
        min_results: int | None = None,
        nonfinite: Nonfinite = "propagate",
        rule: AnyRule | None = None,
    ) -> None:
        """Average in a process group.

        Args:
            member: This process's member. If None, that of the worker of Ray Train, shared with
                the other callbacks and optimizers, which leaves at the end of the training.
            timeout: Seconds that other members may be late; for ever, if None. If one callback or
                optimizer of a training gets a value, it applies to all of them. Among members,
                the shortest counts.
            min_results: The number of members that an average needs; all, if None. It applies to
                all callbacks and optimizers, too.
            nonfinite: What to do about members whose logs hold NaN or infinity; see
                `flatweights.average`. If all are left out, the average is NaN.
            rule: A rule that replaces the mean, such as ``flatweights.robust.Median()``, so that a
                few members with wrong logs do not spoil the average. A function gets a list of
                dicts of arrays, by the names of the logs.

        Raises:
            TypeError: If ``member`` is not a `Member`, or ``rule`` is not a rule.
            ValueError: If ``timeout``, ``min_results`` or ``nonfinite`` is out of range.
        """
        super().__init__(MemberHandle("AverageLogs", member, timeout, min_results))
        self._held = HeldStop()
        check_nonfinite(nonfinite)
        self._nonfinite = nonfinite
        self._rule = None if rule is None else _over_members(Rule.of(rule))

    def on_train_begin(self, logs: Any = None) -> None:
        """Check the order of the callbacks, and join if necessary.

        Raises:
            ValueError: If there is another `AverageLogs`, or a callback before this one decides by
                logs, which are not averages yet.
        """
        callbacks = callbacks_beside(self)
        if any(isinstance(one, AverageLogs) for one in callbacks if one is not self):
            raise ValueError("AverageLogs: expected one in the list of callbacks, got several")
        would = "get the logs of its own member, which differ from those of others"
        check_before(self, callbacks, _uses_logs, would)
        super().on_train_begin()
        self._samples = Samples(self.model)
        units = {one._unit for one in self._of_this_fit() if isinstance(one, AverageWeights)}
        in_steps = bool(averagings_in(self.model))
        if self._member.size > 1 and not (units or in_steps):
            _log.warning(
                "AverageLogs: neither average_gradients nor AverageWeights is part of this fit, so "
                "each member trains alone"
            )
        self._held.begin(self.model, lambda: self._is_cut)
        if self._member.size > 1 and (in_steps or "batch" in units):
            self._held.stand_last(callbacks)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begin to count the epoch's samples."""
        super().on_epoch_begin(epoch)
        self._samples.begin_epoch()

    def on_test_begin(self, logs: Any = None) -> None:
        """Read the number of samples of the training before the validation resets it."""
        if self._is_in_fit:
            self._samples.end_training()

    def on_test_end(self, logs: Any = None) -> None:
        """Read the number of samples of the validation."""
        if self._is_in_fit:
            self._samples.end_test()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replace the numbers in ``logs`` by their averages.

        Raises:
            WorkerError: If a member is dead or late.
            ValueError: If the members' calls differ, because one has other logs or is not at the
                end of an epoch.
        """
        self._held.release()
        super().on_epoch_end(epoch)
        if self._is_apart:
            return
        logs = {} if logs is None else logs
        own = self._numbers_in(logs)
        samples = {name: np.float64(self._samples.weight_of(name)) for name in own}
        if self._rule is not None:
            samples = dict.fromkeys(own, np.float64(1))
        counts = self._nonfinite != "skip" or all(np.isfinite(one).all() for one in own.values())
        if not counts:  # but it may stop the training
            own = {name: np.zeros_like(one) for name, one in own.items()}
            samples = dict.fromkeys(own, np.float64(0))
        part = {
            "logs": {name: value * samples[name] for name, value in own.items()},
            "samples": samples,
            "counts": np.float64(counts),
            "stops": np.float64(self.model.stop_training),
        }

        def exchange(member: Member, state: AnyState | None) -> Round:
            return member.average(
                part,
                **self._handle.terms,
                nonfinite="raise" if self._nonfinite == "raise" else "propagate",
                rule=self._rule,
                state=state,
            )

        with calls_are_equal(self._member, "logs"):
            result = self._average_at(exchange, at="epoch")
        if result is None:
            return
        mean = result.weights
        # If all weights are 0, Keras' own mean is 0; it is NaN if all members were left out.
        empty = 0.0 if mean["counts"] else np.nan
        for name in own:
            weight = mean["samples"][name]
            numbers = mean["logs"][name] / weight if weight else np.full(own[name].shape, empty)
            logs[name] = numbers if own[name].shape else float(numbers)
        if mean["stops"]:
            self.model.stop_training = True
        elif self._progress is not None:  # its own stop may have come too late for this average
            self._progress.hold_stop()

    def _numbers_in(self, logs: dict[str, Any]) -> dict[str, Any]:
        """Return the logs that are numbers, and the arrays of the model's own metrics.

        Arrays of others, such as a user's callback, may have another shape in each member.
        """
        own: dict[str, Any] = {}
        results: dict[str, Any] | None = None  # of the metrics, which are asked if there are arrays
        for name, value in logs.items():
            number = _number(value)
            if number is not None:
                own[name] = number
            elif hasattr(value, "dtype"):  # an array or, in older versions of Keras, a tensor
                results = self.model.get_metrics_result() if results is None else results
                is_of_metric = name in results or name.removeprefix("val_") in results
                array = np.asarray(value)
                if is_of_metric and np.can_cast(array.dtype, np.float64):
                    own[name] = array.astype(np.float64)
        return own

    def on_train_end(self, logs: Any = None) -> None:
        """Leave the process group, if no member was given."""
        self._held.leave()
        super().on_train_end()


class HeldStop(keras.callbacks.Callback):  # type: ignore[misc]
    """Holds a stop within an epoch until its end, as the last callback of a `fit`.

    Keras ends the epoch of a member at once if a callback sets ``model.stop_training``. Others
    would wait for the batches that are left.
    """

    def __init__(self) -> None:
        """Hold nothing."""
        super().__init__()
        self._callbacks: list[Any] = []
        self._is_cut: Callable[[], bool] = bool
        self._is_held = False

    def begin(self, model: Any, is_cut: Callable[[], bool]) -> None:
        """Begin with a `fit` of ``model``; an earlier one may have failed.

        Args:
            model: The model.
            is_cut: Returns whether the epoch ends because the others have ended it.
        """
        self.leave()
        self.set_model(model)
        self._is_cut, self._is_held = is_cut, False

    def stand_last(self, callbacks: list[Any]) -> None:
        """Become the last one of ``callbacks``, after all that may stop the training."""
        callbacks.append(self)
        self._callbacks = callbacks

    def leave(self) -> None:
        """Leave the list, which may be a user's own."""
        self._callbacks[:] = [one for one in self._callbacks if one is not self]
        self._callbacks = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Hold a stop, unless this epoch ends here because the others have ended it."""
        if self.model.stop_training and not self._is_cut():
            self.model.stop_training, self._is_held = False, True

    def release(self) -> None:
        """Stop at the end of the epoch."""
        if self._is_held:
            self.model.stop_training, self._is_held = True, False


def _number(value: Any) -> np.float64 | None:
    """Return a log as a number; None if it is something else, such as a text."""
    if np.ndim(value) or isinstance(value, str | bytes):
        return None
    try:
        number: np.float64 = np.float64(float(value))
    except (TypeError, ValueError):
        return None
    return number


def _over_members(rule: Rule) -> Callable[[list[FlatWeights]], FlatWeights]:
    """Return a rule for what members send: ``rule`` for their logs, the mean for the rest."""

    # Being local, it is pickled with its code: the coordinator of the process group imports no
    # Keras.
    def over_members(models: list[FlatWeights]) -> FlatWeights:
        result = average(models)
        names = [name.removeprefix("logs/") for name in result if name.startswith("logs/")]
        counted = [model for model in models if any(model[f"samples/{name}"] for name in names)]
        if counted:
            logs = rule([{name: model[f"logs/{name}"] for name in names} for model in counted])
            for name in names:
                result[f"logs/{name}"][...], result[f"samples/{name}"][...] = logs[name], 1.0
        return result

    over_members.__name__ = repr(rule)  # by which members compare it
    return over_members


def _uses_logs(callback: Any) -> bool:
    if isinstance(callback, SAVING):
        return bool(callback.save_best_only)
    kinds = (keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau, Report)
    return isinstance(callback, kinds)
