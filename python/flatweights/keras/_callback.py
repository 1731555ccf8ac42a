"""The base class of the callbacks: they share a member, and the terms on which its calls wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import keras

from flatweights.keras._gradients import Averaging, averaging_of, averagings_in
from flatweights.keras._hooks import running_fit
from flatweights.keras._member_handle import MemberHandle, agree
from flatweights.keras._progress import AnyState, Progress
from flatweights.keras._weak_set import SharedWeakSet
from flatweights.ray import Member, Round

_callbacks = SharedWeakSet["MemberCallback"]()


class MemberCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """A callback that averages something in a process group."""

    makes_progress = False  # in a `fit` in which no gradients are averaged

    def __init__(self, handle: MemberHandle) -> None:
        """Average with the member of ``handle``, on its terms."""
        super().__init__()
        self._handle = handle
        self._params_of_fit: Any = None
        self._averagings: list[Averaging] = []
        self._progress: Progress | None = None
        _callbacks.add(self)

    def set_model(self, model: Any) -> None:
        """Take the model.

        Raises:
            TypeError: If it is not a model of Keras 3.
        """
        if not isinstance(model, keras.Model):
            raise TypeError(
                f"{type(self).__name__}: expected a model of Keras 3, got {type(model).__module__}."
                f"{type(model).__name__}. Build the model by `import keras`: if "
                "TF_USE_LEGACY_KERAS is set, tf.keras is the package tf_keras (Keras 2)"
            )
        super().set_model(model)

    def on_train_begin(self, logs: Any = None) -> None:
        """Join, if necessary, and give all members the same start if gradients are averaged.

        Raises:
            ValueError: If this worker may be replaced, and neither weights nor gradients are
                averaged.
        """
        self._params_of_fit = self.params
        averaging = averaging_of(self.model)
        more = [one for one in averagings_in(self.model) if one is not averaging]
        self._averagings = more if averaging is None else [averaging, *more]
        of_this_fit = self._of_this_fit()
        agree([one._handle for one in of_this_fit] + [one.handle for one in self._averagings])
        self._member: Member = self._handle.begin(running_fit(outermost=True))
        if averaging is not None:
            averaging.training.begin(self, is_alone=not more)
        for one in more:
            one.training.begin_beside(self)
        self._progress = None if averaging is None else averaging.training.progress
        is_brought_along = self._progress is not None or any(
            one.makes_progress for one in of_this_fit
        )
        if self._handle.is_replaceable and not is_brought_along:
            raise ValueError(
                f"{type(self).__name__}: in a worker that ReplaceWorkers replaces, expected "
                "AverageWeights in the list of callbacks, or a model compiled with an optimizer "
                "that average_gradients has changed: otherwise, a new worker would not learn the "
                "epoch of the others"
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Meet the others, if they may be in another epoch."""
        for averaging in self._averagings:
            averaging.training.begin_epoch(epoch)
        if self._progress is not None:
            self._progress.begin_epoch(epoch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """End the epoch, if the others have ended it."""
        if self._progress is not None:
            self._progress.end_batch(batch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Let `fit` continue, if the epoch was cut short."""
        if self._progress is not None:
            self._progress.end_epoch(self)

    def _of_this_fit(self) -> list[MemberCallback]:
        """Return the callbacks of this package in the same `fit`, which have begun or will."""
        # All callbacks of a `fit` have the same dictionary.
        others = [one for one in _callbacks if one.params is self.params is not None]
        return [self, *(one for one in others if one is not self)]

    @property
    def _is_in_fit(self) -> bool:
        """Whether `fit` calls this, rather than an `evaluate` that a user calls."""
        return self.params is self._params_of_fit is not None

    @property
    def _is_cut(self) -> bool:
        """Whether this epoch ends before its last batch, because the others have ended it."""
        return self._progress is not None and self._progress.is_cut

    @property
    def _is_apart(self) -> bool:
        """Whether this member takes part in no calls, because the others are at another place."""
        return self._progress is not None and self._progress.is_apart

    def _average_at(
        self, call: Callable[[Member, AnyState | None], Round], *, at: Literal["batch", "epoch"]
    ) -> Round | None:
        """Return the result of ``call``; None, if this member is not at the place of the others."""
        progress = self._progress
        if progress is None:
            return call(self._member, None)
        result = progress.average(call, in_step=False)
        if at == "epoch":  # what callbacks after this one see
            progress.end_epoch(self)
        return None if progress.is_apart else result

    def _meet_at_end(self) -> None:
        """Wait a while for members that are late; `average_gradients` has already done so."""
        if self._progress is not None:
            self._progress.end()

    def on_train_end(self, logs: Any = None) -> None:
        """Leave the process group, if no member was given."""
        self._meet_at_end()
        for averaging in self._averagings:
            averaging.training.end()
        self._progress = None
        self._handle.end()
