"""`Report`: each epoch goes to Ray Train, with a checkpoint to resume from."""

from __future__ import annotations

import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import keras

from flatweights._numbers import check_count

_MODEL = "model.keras"
_EPOCHS = "epochs"  # in the metrics and in the checkpoint's metadata


class Report(keras.callbacks.Callback):  # type: ignore[misc]
    """Reports epochs to Ray Train: the logs of each worker, and rank 0's model as a checkpoint.

    Put it last in the list of callbacks, after `AverageLogs`: it reports the logs as the other
    callbacks leave them. The metrics also contain ``epochs``, the number of finished epochs, and
    ``seconds``, the time of this epoch without the report. The checkpoint has one file,
    ``model.keras``, with the optimizer's state: `keras.models.load_model` reads it.

    `resume` sets a model to the latest checkpoint, after Ray Train has restarted the workers::

        def train(config):
            model = build()
            model.compile(average_gradients(keras.optimizers.Adam()), "mse")
            done = Report.resume(model)
            callbacks = [AverageLogs(), Report()]
            model.fit(*data(), epochs=10, initial_epoch=done, callbacks=callbacks)

    Each report waits for those of all workers, and Ray's controller looks for reports only every
    two seconds, unless ``RAY_TRAIN_HEALTH_CHECK_INTERVAL_S`` in its environment says otherwise.
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
        super().__init__()
        self._every = check_count(every, "every")
        self._saves = save

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
            ValueError: If the model is not built or not compiled, or the checkpoint is of another
                model, or not of a `Report`.
        """
        if not (model.built and getattr(model, "optimizer", None) is not None):
            raise ValueError("model: expected one that is built and compiled")
        if checkpoint is None:
            import ray.train

            checkpoint = ray.train.get_checkpoint()
            if checkpoint is None:
                return 0
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
                model.load_weights(Path(folder, _MODEL))
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
        except RuntimeError:
            self._rank = None
        if self._rank is None:
            raise RuntimeError("Report: expected a worker of Ray Train")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Take the time."""
        self._began = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Report, if it is time."""
        import ray.train

        epochs = epoch + 1
        is_last = epochs == self.params["epochs"] or self.model.stop_training
        if epochs % self._every and not is_last:
            return
        seconds = time.perf_counter() - self._began
        metrics = {_EPOCHS: epochs, "seconds": seconds, **(logs or {})}
        if self._rank or not self._saves:
            ray.train.report(metrics)
            return
        with tempfile.TemporaryDirectory() as folder:
            self.model.save(Path(folder, _MODEL))
            checkpoint = ray.train.Checkpoint.from_directory(folder)
            checkpoint.set_metadata({_EPOCHS: epochs})
            ray.train.report(metrics, checkpoint=checkpoint)
