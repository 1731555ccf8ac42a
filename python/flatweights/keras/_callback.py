"""What the callbacks have in common: a member, terms that all of one `fit` share, and a count."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import keras

from flatweights.keras._gradients import averaging_of
from flatweights.keras._lease import MemberLease, agree
from flatweights.keras._samples import Samples
from flatweights.ray import Member

_callbacks: weakref.WeakSet[MemberCallback] = weakref.WeakSet()
_lock = threading.Lock()


class MemberCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """A callback that averages something in a meeting."""

    def __init__(self, lease: MemberLease) -> None:
        """Average as ``lease`` says."""
        super().__init__()
        self._lease = lease
        with _lock:
            _callbacks.add(self)

    def on_train_begin(self, logs: Any = None) -> None:
        """Join, if need be, and have gradients start alike in all members."""
        averaging = averaging_of(self.model)
        # `fit` gives its callbacks one and the same dictionary.
        with _lock:
            of_this_fit = [one for one in _callbacks if one.params is self.params is not None]
        leases = {id(one): one._lease for one in (self, *of_this_fit)}
        agree([*leases.values(), *([] if averaging is None else [averaging.lease])])
        self._member: Member = self._lease.take()
        if averaging is not None:
            averaging.begin_fit(self)
        self._progress = None if averaging is None else averaging.progress
        self._samples = Samples(self.model)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Meet the others, if they can be elsewhere; count anew."""
        if self._progress is not None:
            self._progress.begin_epoch(epoch)
        self._samples.begin_epoch()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """End the epoch, if the others have."""
        if self._progress is not None:
            self._progress.end_batch()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Go on, if the epoch was made to end."""
        if self._progress is not None:
            self._progress.end_epoch()

    @property
    def _is_apart(self) -> bool:
        """Whether this member takes part in no calls, because it is not where the others are."""
        return self._progress is not None and self._progress.is_apart

    def on_test_begin(self, logs: Any = None) -> None:
        """Take the count of the training before that of the validation begins."""
        self._samples.begin_test()

    def on_train_end(self, logs: Any = None) -> None:
        """Leave, if it joined by itself."""
        self._lease.end()
