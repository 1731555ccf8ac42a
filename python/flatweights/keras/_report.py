"""`Report`: each epoch goes to Ray Train, with a checkpoint to resume from."""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, TypeAlias

import keras
import ray

from flatweights._daemon import in_daemon
from flatweights._numbers import check_count
from flatweights.keras._callback import MemberCallback
from flatweights.keras._member_handle import MemberHandle
from flatweights.keras._progress import AnyState
from flatweights.ray import Member, Round, _clock, is_replaceable

_MODEL = "model.keras"
_WEIGHTS = "model.weights.h5"  # of a model whose structure Keras cannot save
_EPOCHS = "epochs"  # in the metrics and in the checkpoint's metadata
_PAUSE = 0.05  # seconds between two looks whether all have reported
_PATIENCE = 60.0  # seconds, at least, for which the others wait while rank 0 saves the model

_WHY_NOT = "not all workers could report it together"

_Told: TypeAlias = Mapping[int, tuple[bool, bool]]
"""By rank, whether a worker has a report to make or waits in one, and whether that is an old one.
"""

_log = logging.getLogger("flatweights")


class Report(MemberCallback):
    """Reports epochs to Ray Train: the logs of each worker, and rank 0's model as a checkpoint.

    Put it last in the list of callbacks, after `AverageLogs`: it reports the logs as the other
    callbacks leave them. The metrics also contain ``epochs``, the number of finished epochs, and
    ``seconds``, the time of this epoch without the report. The checkpoint has one file,
    ``model.keras``, with the optimizer's state: `keras.models.load_model` reads it. If Keras cannot
    save the structure of the model, such as that of a class without ``get_config``, the file is
    ``model.weights.h5``, without the structure; `resume` reads either.

    `resume` sets a model to the latest checkpoint, after Ray Train has restarted the workers::

        def train(config):
            model = build()
            model.compile(average_gradients(keras.optimizers.Adam()), "mse")
            done = Report.resume(model)
            callbacks = [AverageLogs(), Report()]
            model.fit(*data(), epochs=10, initial_epoch=done, callbacks=callbacks)

    Each report waits for those of all workers, and Ray's controller looks for reports only every
    two seconds, unless ``RAY_TRAIN_HEALTH_CHECK_INTERVAL_S`` in its environment says otherwise.

    With `ReplaceWorkers`, an epoch at whose end a worker is missing is not reported: Ray Train
    takes a report once it has one of each worker, and the others would wait for the new worker. At
    the end of the training they do wait for it, and then all report the last epoch.
    """

    def __init__(self, every: int = 1, *, save: bool = True) -> None:
        """Report every n-th epoch.

        Args:
            every: The number n; the last epoch is always reported.
            save: Whether rank 0 saves the model.

        Raises:
            TypeError: If ``every`` is not an integer.
            ValueError: If it is below 1.
        """
        super().__init__(MemberHandle("Report", None))
        self._every = check_count(every, "every")
        self._saves = save
        self._saves_weights_only = False  # Keras cannot save the structure of the model
        self._call: Future[None] | None = None  # of ray.train.report, the last one
        self._reported = 0  # epochs up to the last one that was reported

    @staticmethod
    def resume(model: keras.Model, checkpoint: Any = None) -> int:
        """Set ``model`` and its optimizer to a checkpoint; return the number of finished epochs.

        All workers must call it, before ``fit(initial_epoch=...)``. Without a checkpoint, the model
        is unchanged.

        Args:
            model: The same model as the saved one; built and compiled.
            checkpoint: A `ray.train.Checkpoint`, such as ``trainer.fit().checkpoint`` of an earlier
                run. If None, the latest of this run; there is none at its first start.

        Returns:
            The number of epochs; 0 without a checkpoint.

        Raises:
            TypeError: If ``model`` or ``checkpoint`` is something else.
            RuntimeError: If ``checkpoint`` is None, outside of a worker of Ray Train.
            ValueError: If the model is not built or not compiled, or the checkpoint is of another
                model, or not of a `Report`.
        """
        import ray.train

        if not isinstance(model, keras.Model):
            raise TypeError(f"model: expected a model of Keras 3, got {type(model).__name__}")
        if not (model.built and getattr(model, "optimizer", None) is not None):
            raise ValueError("model: expected one that is built and compiled")
        if checkpoint is None:
            try:
                checkpoint = ray.train.get_checkpoint()
            except (RuntimeError, DeprecationWarning) as error:  # the latter in Ray Tune
                raise RuntimeError(
                    "checkpoint: outside of a worker of Ray Train expected a ray.train.Checkpoint, "
                    "such as trainer.fit().checkpoint, got None"
                ) from error
            if checkpoint is None:
                return 0
        if not hasattr(checkpoint, "as_directory"):
            raise TypeError(
                "checkpoint: expected a ray.train.Checkpoint, such as trainer.fit().checkpoint or "
                f"Checkpoint.from_directory(path), got {type(checkpoint).__name__}"
            )
        epochs = checkpoint.get_metadata().get(_EPOCHS)
        if epochs is None:
            raise ValueError("checkpoint: expected one of flatweights.keras.Report")
        optimizer = model.optimizer
        if not optimizer.built:
            # That of the class: averaging the start of a training, as `average_gradients` does
            # here, would be in vain.
            type(optimizer).build(optimizer, model.trainable_variables)
        with checkpoint.as_directory() as folder, warnings.catch_warnings():
            # Keras warns of an optimizer of another kind, and leaves this one as it is.
            warnings.filterwarnings("error", "Skipping variable loading for optimizer")
            try:
                whole = Path(folder, _MODEL)
                model.load_weights(whole if whole.exists() else Path(folder, _WEIGHTS))
            except UserWarning as warning:
                raise ValueError(f"checkpoint: {warning}") from None
        return int(epochs)

    def on_train_begin(self, logs: Any = None) -> None:
        """Find out which worker this is.

        Raises:
            RuntimeError: If it is not a worker of Ray Train.
        """
        import ray.train

        try:
            self._rank = ray.train.get_context().get_world_rank()
        except (RuntimeError, DeprecationWarning):  # the latter in a function of Ray Tune
            self._rank = None
        if self._rank is None:
            raise RuntimeError(
                "Report: expected a worker of Ray Train; elsewhere, save the model in rank 0 by "
                "keras.callbacks.ModelCheckpoint"
            )
        self._unreported: dict[str, Any] = {}
        self._reported = 0
        if is_replaceable():
            super().on_train_begin()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Take the time."""
        super().on_epoch_begin(epoch)
        self._began = _clock.now()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Report, if it is time.

        Raises:
            TypeError: If a value of ``logs`` cannot be pickled.
        """
        super().on_epoch_end(epoch)
        if self._is_apart:
            return
        epochs = epoch + 1
        is_last = epochs == self.params["epochs"] or self.model.stop_training
        if epochs % self._every and not is_last:
            return
        seconds = _clock.now() - self._began
        metrics = {_EPOCHS: epochs, "seconds": seconds, **(logs or {})}
        for name, value in metrics.items():
            try:
                ray.cloudpickle.dumps(value)
            except Exception as error:
                raise TypeError(
                    f"Report: logs[{name!r}]: expected a value that can be pickled, such as a "
                    f"number, got {type(value).__name__}: {error}"
                ) from error
        if not is_replaceable():
            _report(metrics, self._saved())
        elif self._report_with_others(metrics, in_epoch=True):
            self._unreported, self._reported = {}, epochs
        else:
            self._unreported = metrics
            _log.info("epoch %d is not reported to Ray Train: %s", epochs, _WHY_NOT)

    def on_train_end(self, logs: Any = None) -> None:
        """Report the last epoch, if a worker was missing at its end."""
        self._meet_at_end()
        if is_replaceable():
            last = self._last_unreported()
            # The first report may only complete an old call of rank 0.
            if not (self._report_with_others(last) or self._report_with_others(last)):
                _log.warning("the last epoch is not reported to Ray Train: %s", _WHY_NOT)
        super().on_train_end()

    def _last_unreported(self) -> dict[str, Any]:
        """Return the metrics of the last epoch that any member has finished; empty, if reported.

        A member that was replaced, or was elsewhere, has none, or those of an earlier epoch.
        """
        own = self._reported, self._unreported
        given = [*self._handle.gather(own, "unreported metrics", at="report").weights.values()]
        last = max((metrics for _, metrics in given), key=_epochs_in)
        return last if _epochs_in(last) > max(reported for reported, _ in given) else {}

    def _saved(self) -> tempfile.TemporaryDirectory[str] | None:
        """Return a folder with the model, if this worker saves it."""
        if self._rank or not self._saves:
            return None
        folder = tempfile.TemporaryDirectory()
        if not self._saves_weights_only:
            try:
                self.model.save(Path(folder.name, _MODEL))
                return folder
            except (NotImplementedError, TypeError, ValueError) as error:
                reason = " ".join(str(error).split()).partition(" Example:")[0]
                _log.warning("Report saves weights only, in %s, because of: %s", _WEIGHTS, reason)
                self._saves_weights_only = True
                Path(folder.name, _MODEL).unlink(missing_ok=True)
        self.model.save_weights(Path(folder.name, _WEIGHTS))
        return folder

    def _report_with_others(self, metrics: dict[str, Any], *, in_epoch: bool = False) -> bool:
        """Report, unless a worker is missing; return whether nothing is left to be reported.

        Ray Train has all workers wait in a report until the last one calls it. So none begins one
        unless all are there, and rank 0 has saved the model. If one dies meanwhile, the others go
        on: the call is in a thread. Ray ends it before it starts the new worker, or, if that has
        come too early, with the next call of the others, which is counted as one of this worker.
        Ray Train keeps the metrics and the checkpoint of rank 0. So if its call is such an old one,
        this epoch is not reported.

        Args:
            metrics: What is reported; if empty, this worker has nothing to report.
            in_epoch: Whether an epoch has just ended: a worker that is late is healed there.
        """
        is_old = self._waits()
        told = self._tell(bool(metrics) or is_old, is_old, in_epoch)
        if told is not None and any(other_is_old for _, other_is_old in told.values()):
            # All are there, so Ray has ended the calls that it ends. Which ones are left is known
            # to all before a new call begins, which would end them.
            is_old = self._waits()
            told = self._tell(bool(metrics) or is_old, is_old, in_epoch)
        if told is None or not _any_reports(told):
            return not metrics
        folder = self._saved() if metrics and not is_old else None
        if self._tell(True, is_old, in_epoch) is None:  # it has taken too long, or one has died
            if folder is not None:
                folder.cleanup()
            return not metrics
        if not is_old:
            self._call = in_daemon("flatweights-report", _report, metrics, folder)
        while told is not None and _any_reports(told):
            if self._call is not None:
                wait([self._call], _PAUSE)
            told = self._tell(self._waits(), is_old, in_epoch)
        is_reported = told is not None and not told[0][1]
        return is_reported or not metrics

    def _tell(self, reports: bool, is_old: bool, in_epoch: bool) -> _Told | None:
        """Return what all workers tell; None, if one is missing, late or at another place.

        Args:
            reports: Whether this worker has a report to make, or waits in one.
            is_old: Whether it waits in one of an earlier epoch.
            in_epoch: Whether an epoch has just ended.
        """
        met = self._gather((reports, is_old), in_epoch)
        if met is not None and met.late and not in_epoch:
            # A new worker is late for its first call of a kind.
            met = self._gather((reports, is_old), in_epoch)
        if met is None or met.late or len(met.used) < self._member.size:
            return None
        told: _Told = met.weights
        return told

    def _gather(self, value: tuple[bool, bool], in_epoch: bool) -> Round | None:
        """Return the values of all workers; None, if the others are at another place."""

        def call(_: Member, state: AnyState | None) -> Round:
            return self._handle.gather(
                value, "reports", at="report", state=state, at_least=_PATIENCE
            )

        return self._average_at(call, at="epoch") if in_epoch else call(self._member, None)

    def _waits(self) -> bool:
        """Return whether a call that has begun, now or in an earlier epoch, has not returned.

        Raises:
            Exception: What it has raised.
        """
        if self._call is not None and self._call.done():
            call, self._call = self._call, None
            call.result()
        return self._call is not None


def _any_reports(told: _Told) -> bool:
    return any(reports for reports, _ in told.values())


def _epochs_in(metrics: dict[str, Any]) -> int:
    return int(metrics.get(_EPOCHS, 0))


def _report(metrics: dict[str, Any], folder: tempfile.TemporaryDirectory[str] | None) -> None:
    """Call Ray Train, with what is in ``folder`` as a checkpoint; remove the folder."""
    import ray.train

    if folder is None:
        ray.train.report(metrics)
        return
    with folder:
        checkpoint = ray.train.Checkpoint.from_directory(folder.name)
        checkpoint.set_metadata({_EPOCHS: metrics[_EPOCHS]})
        ray.train.report(metrics, checkpoint=checkpoint)
