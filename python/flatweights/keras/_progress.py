"""A member's progress in a training that goes on without members that are late or have died."""

from __future__ import annotations

import gc
import pickle
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flatweights import Layout
from flatweights.keras._lease import MemberLease, calls_are_equal
from flatweights.ray import is_replaceable
from flatweights.tensorflow import TensorFlowVariables

_ROOM = 8192  # bytes for the giver's place and for the counts of its callbacks
_LAST = 10.0  # least seconds for which the end of a training waits for late members
_REPLACED = 300.0  # seconds for which it waits for the workers that replace dead ones
_PAUSE = 0.05  # seconds until it first looks for them
# The numbers by which callbacks of Keras decide. A member that was absent lacks them.
_COUNTS = frozenset(
    ("best", "best_epoch", "cooldown_counter", "epochs_since_last_save", "stopped_epoch", "wait")
)


class Place(NamedTuple):
    """A member's place in its training.

    Attributes:
        epoch: The epoch.
        steps: The number of finished steps of that epoch.
        counts: The counts of each callback, by its index in the list of callbacks.
    """

    epoch: int = -1
    steps: int = 0
    counts: Mapping[int, Mapping[str, Any]] = {}


class State:
    """The state that heals a member: variables, the optimizer's slots, and the training's place.

    Attributes:
        layout: The slots of the variables, then one for the place.
        place: This member's place; after it was healed, the giver's.
    """

    def __init__(self, variables: TensorFlowVariables) -> None:
        """Take the variables, including the optimizer's slots."""
        slots = variables.layout.slots
        self._variables = variables
        self.layout = Layout(
            [*(slot.name for slot in slots), "the place in the training"],
            [*(slot.shape for slot in slots), (_ROOM,)],
            [*(slot.dtype for slot in slots), np.dtype(np.uint8)],
        )
        self.place = Place()

    def gather_into(self, buffer: NDArray[np.uint8]) -> None:
        """Read all; see `flatweights.ray.Variables`."""
        self._variables.gather_into(buffer[: self._variables.layout.nbytes])
        place = pickle.dumps(tuple(self.place))
        if len(place) > _ROOM:
            place = pickle.dumps(tuple(self.place._replace(counts={})))
        room = self.layout.packed_views(buffer)[-1]
        room[: len(place)] = np.frombuffer(place, np.uint8)
        room[len(place) :] = 0

    def scatter(self, buffer: NDArray[np.uint8]) -> None:
        """Set all; see `flatweights.ray.Variables`."""
        self._variables.scatter(buffer[: self._variables.layout.nbytes])
        self.place = Place(*pickle.loads(self.layout.packed_views(buffer)[-1].tobytes()))


class Progress:
    """One `fit` of one member, while other members may be at other places of theirs.

    All members meet at the beginning of each epoch, and at the end. A member that lacks the state
    is healed there, or in a step. If it is then at another place than the others, it stays apart:
    its steps average nothing, and its epochs end with their first batch. So it skips the epochs
    that the others have begun already, and meets them at the beginning of the next one.

    Attributes:
        params: The parameters of the `fit`, by which its callbacks are recognised.
        is_apart: Whether the member takes part in no calls except the meetings of epochs.
        is_over: Whether the others have ended their training.
        has_joined: Whether the training was under way when this `fit` began.
    """

    def __init__(self, lease: MemberLease, model: Any, callback: Any, state: State) -> None:
        """Begin, before the first epoch.

        Args:
            lease: The member.
            model: The model.
            callback: One of the callbacks of the `fit`.
            state: The state that heals a member.
        """
        self.params: dict[str, Any] = callback.params
        self.is_apart = self.is_over = self.has_joined = False
        self._lease = lease
        self._model = model
        self._state = state
        self._callbacks = _callbacks_beside(callback)
        self._epoch = -1
        self._others = -1  # the epoch in which the others were when this member was healed
        self._steps = 0  # of this epoch
        self._last_step: int | None = None  # of this epoch, if it ends before its data
        self._breaks = False  # whether this epoch was cut short
        self._pending: Place | None = None  # callbacks continue from its counts
        self._final: NDArray[np.uint8] | None = None  # the state at the end of the training

    def join(self) -> None:
        """Wait until the others begin an epoch or end; get healed, and make `fit` begin there."""
        self._meet()
        self.has_joined = True
        self._epoch = self._state.place.epoch
        self._model._initial_epoch = self.params["epochs"] if self.is_over else self._epoch
        self.is_apart = False

    def begin_epoch(self, epoch: int) -> None:
        """Meet the others; all callbacks of a `fit` call it."""
        if self.has_joined:
            self._model._initial_epoch = None  # it was read; a later `fit` must not begin there
            if self._pending is not None:
                self._take_counts(self._pending)  # `AverageWeights` has set its own to zero
        if epoch == self._epoch:
            return
        self._epoch, self._steps, self._last_step = epoch, 0, None
        if self.is_apart and epoch <= self._others:
            return
        self._meet()
        while self.is_apart and self._others < epoch:
            self._meet()
        if self.is_over:  # this epoch is beyond the end of the others' training
            self._final = self._state.layout.new_buffer()
            self._state.gather_into(self._final)
            self.is_apart = True

    def end_batch(self) -> None:
        """End the epoch if this member is apart, or after the last step of the others."""
        is_last = self._last_step is not None and self._steps >= self._last_step
        if self.is_apart or is_last:
            self._breaks = self._model.stop_training = True
        if self._final is not None:
            self._state.scatter(self._final)

    def end_epoch(self) -> None:
        """Let `fit` go on, unless it is over; callbacks go on from the counts of the others."""
        if self._pending is not None and not self.is_apart:
            for one in self._callbacks:
                if getattr(one, "monitor_op", one) is None:  # set at the end of the first epoch
                    one._set_monitor_op()
            self._take_counts(self._pending)
            self._pending = None
        if self._breaks:
            self._breaks = False
            self._model.stop_training = self.is_over

    @property
    def state(self) -> State:
        """The state that heals this or another member, with this member's place."""
        counts = {k: _counts_of(one) for k, one in enumerate(self._callbacks)}
        self._state.place = Place(self._epoch, self._steps, counts)
        return self._state

    def end_step(self, is_healed: bool) -> None:
        """Note that a step was averaged; if it healed this member, decide where to go on."""
        steps, self._steps = self._steps, self._steps + 1
        if not is_healed:
            return
        giver = self._state.place
        self._pending = giver
        self._take_counts(giver)
        total: int | None = self.params.get("steps")
        by_step = self._model.steps_per_execution == 1
        if giver.epoch == self._epoch and by_step and total is not None and giver.steps >= steps:
            # This member is at the giver's place, and may be the next giver. All have equally many
            # batches.
            self._steps, self._last_step = giver.steps + 1, total
        else:
            self.is_apart, self._others = True, giver.epoch

    def end(self) -> None:
        """Meet the others at the end; wait a while for those that are late or being replaced."""
        if not self.is_over:
            patience = max(_LAST, self._lease.timeout or 0.0, _REPLACED * is_replaceable())
            until, pause = time.monotonic() + patience, _PAUSE
            self._epoch += 1
            while self._meet(ends=True) and time.monotonic() < until:
                time.sleep(pause)
                pause = min(2 * pause, 1.0)
        self._model._initial_epoch = None
        self.is_apart = False

    def _meet(self, ends: bool = False) -> bool:
        """Tell the others this member's place; get healed, if needed; return if one may come."""
        member = self._lease.take()
        member.raises_elsewhere = False
        if self.is_apart:
            member.lacks_state = True
        place = np.array([self._epoch, ends], np.float64)
        with calls_are_equal(member, "epoch"):
            met = member.average(
                {"place": place},
                timeout=self._lease.timeout,
                min_results=self._lease.min_results,
                state=self.state,
            )
        epoch, over = met.weights["place"]
        self.is_over = bool(over)
        is_healed = member.rank in met.healed
        if is_healed:
            self._pending = self._state.place
            self._take_counts(self._pending)
            self._others = round(epoch)
        self.is_apart = is_healed and self._others != self._epoch and not self.is_over
        return bool(met.late or (met.failed and is_replaceable()))

    def _take_counts(self, giver: Place) -> None:
        for k, counts in giver.counts.items():
            vars(self._callbacks[k]).update(counts)


def _callbacks_beside(callback: Any) -> list[Any]:
    """Return all callbacks of a `fit`, since some decide by their counts.

    Keras gives a callback no access to the others: this is the list that holds it and the history.
    """
    history = callback.model.history
    lists = (one for one in gc.get_referrers(callback) if isinstance(one, list))
    return next((one for one in lists if any(other is history for other in one)), [])


def _counts_of(callback: Any) -> dict[str, Any]:
    """Return the counts of a callback of Keras or of this package."""
    names = getattr(callback, "counted", None)
    if names is None:
        names = _COUNTS if type(callback).__module__.startswith("keras.") else ()
    return {name: value for name, value in vars(callback).items() if name in names}
