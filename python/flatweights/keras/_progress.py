"""A member's progress in a training that goes on without members that are late or have died."""

from __future__ import annotations

import logging
import pickle
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple, TypeAlias

import keras

from flatweights.keras import _fit_states as fit
from flatweights.keras._fit_states import Action, FitState, Phase, move
from flatweights.keras._hooks import SWAPPED, begin_at, end_data, know_direction, prepare_steps
from flatweights.keras._member_handle import MemberHandle, out_of_sync_is_error
from flatweights.keras._start import check_first_epochs
from flatweights.ray import Member, OutOfSyncError, Round, Saved, Variables, WorkerError, _clock
from flatweights.tensorflow import TensorFlowVariables

_log = logging.getLogger("flatweights")

_LAST = 10.0  # least seconds for which the end of a training waits for late members
_REPLACED = 300.0  # seconds for which it waits for the workers that replace dead ones
_PAUSE = 0.05  # seconds until it first looks for those workers


class _Cut(int):
    """The value of ``model.stop_training`` that ends an epoch, and not the training."""


_CUT = _Cut(True)
# Callbacks of Keras that save the model; the second is not in older versions.
SAVING: tuple[type[Any], ...] = tuple(
    getattr(keras.callbacks, name)
    for name in ("ModelCheckpoint", "OrbaxCheckpoint")
    if hasattr(keras.callbacks, name)
)
# Callbacks of Keras that decide by their counts. A member that was absent lacks these counts.
_DECIDING: tuple[type[Any], ...] = (
    keras.callbacks.EarlyStopping,
    keras.callbacks.ReduceLROnPlateau,
    *SAVING,
)
# Callbacks that see no epoch which a member skips. BackupAndRestore would save a state between two
# epochs.
_HIDDEN = (*_DECIDING, keras.callbacks.BackupAndRestore)
# Whether the model has the moving averages, and their slots the weights, travels with both.
_SWAPPING = keras.callbacks.SwapEMAWeights
_COUNTS = frozenset(
    (
        "best",
        "best_epoch",
        "best_weights",
        "cooldown_counter",
        "epochs_since_last_save",
        "stopped_epoch",
        "wait",
    )
)


class HasCounts:
    """A callback of this package with counts, which a healed member takes from its donor.

    Attributes:
        counted: The names of the attributes.
    """

    counted: frozenset[str] = frozenset()

    def forget_own(self) -> None:
        """Forget what it has counted in this member's own training, which has been given up."""


class Position(NamedTuple):
    """A member's place in its training.

    Attributes:
        epoch: The epoch.
        steps: The number of finished batches of that epoch.
        counts: The counts of each callback, by its name (see `names_of`), and the best weights that
            it keeps.
    """

    epoch: int = -1
    steps: int = 0
    counts: Mapping[str, Mapping[str, Any]] = {}


class SavedPosition:
    """A member's position in its training, as a part of the state that heals members.

    Attributes:
        position: The position; after the member was healed, the donor's.
    """

    def __init__(self) -> None:
        """Begin before the first epoch."""
        self.position = Position()

    def save(self) -> bytes:
        """Return the position; see `flatweights.ray.Saved`."""
        return pickle.dumps(tuple(self.position))

    def restore(self, saved: bytes) -> None:
        """Take another member's position."""
        self.position = Position(*pickle.loads(saved))


AnyState: TypeAlias = list[Variables | Saved]
"""The parts of a state that heals members; the variables and slots are the first."""


def _copy_of(part: Any) -> Any:
    """Return the values of a part of a state, as `_set_copy` takes them."""
    if not hasattr(part, "gather_into"):
        return bytes(memoryview(part.save()))  # a buffer may change
    buffer = part.layout.new_buffer()
    part.gather_into(buffer)
    return buffer


def _set_copy(part: Any, copy: Any) -> None:
    """Set a part of a state to the values of `_copy_of`."""
    (part.scatter if hasattr(part, "gather_into") else part.restore)(copy)


class Progress:
    """One `fit` of one member, while other members may be at other places of theirs.

    It tells events to `_fit_states`, and does what follows. A member that is not where the others
    are takes part in no calls except meetings: its steps average nothing, and its epochs end with
    their first batch. Callbacks that decide by their counts, or save, do not see these epochs.

    Attributes:
        params: The parameters of the `fit`, by which its callbacks are recognised.
        has_joined: Whether the training was under way when this `fit` began.
        stopped_in: The epoch in which a callback has stopped the training, if the others could not
            be told then: this member stops at the end of the first later epoch in which it is
            where they are. None without such a stop.
        has_ended_alone: Whether too few others have come to the end in time. They may be anywhere:
            this member makes no further call.
    """

    def __init__(
        self,
        handle: MemberHandle,
        callback: Any,
        callbacks: list[Any],
        state: TensorFlowVariables,
        more: Sequence[Any] = (),
        own: Collection[int] = (),
    ) -> None:
        """Begin, before the first epoch.

        Args:
            handle: The member.
            callback: One of the callbacks of the `fit`.
            callbacks: All callbacks of the `fit`, in the list by which Keras calls them.
            state: The variables and the optimizer's slots, which heal a member.
            more: Other parts of its state, such as a position in the data.
            own: The positions of the model's weights that are no part of the state.
        """
        self.params: dict[str, Any] = callback.params
        self.has_joined = handle.take().lacks_state
        self.stopped_in: int | None = None
        self.has_ended_alone = False
        self._handle = handle
        self._model = callback.model
        self._position = SavedPosition()
        self._state: AnyState = [state, self._position, *more]
        self._list = callbacks  # of which some are missing at the end of an epoch that is skipped
        self._whole: list[Any] = []  # then, all of them
        is_held = all(one is not callback for one in callbacks)  # by another callback
        self._callbacks = [*callbacks, callback] if is_held else [*callbacks]
        self._named = dict(zip(names_of(self._callbacks), self._callbacks, strict=True))
        self._own = own
        by_one = callback.model.steps_per_execution == 1
        self._now = FitState(steps=self.params.get("steps") if by_one else None)
        self._last: Any = None  # the callback that has told the end of the epoch
        self._pending: Position | None = None  # deciding callbacks go on from its counts
        self._copy: list[Any] = []  # of the parts of the state
        self._until, self._pause = 0.0, 0.0  # while the end waits for others

    @property
    def phase(self) -> Phase:
        """Where the member is, compared with the others."""
        return self._now.phase

    @property
    def is_cut(self) -> bool:
        """Whether this epoch was ended before its last batch, or is just being ended."""
        return self._now.is_cut

    @property
    def is_apart(self) -> bool:
        """Whether the member takes part in no calls except the meetings of epochs.

        Before the first epoch it does not: a step that is traced then is no step of the training.
        """
        return self.phase.skips or self.phase is Phase.NEW

    def join(self) -> None:
        """Wait until the others begin an epoch or end; get healed, and make `fit` begin there."""
        prepare_steps()  # from then on, the others wait for this member
        self._receive(fit.Joins())

    def begin_epoch(self, epoch: int) -> None:
        """Meet the others; all callbacks of a `fit` call it."""
        if self.has_joined:
            begin_at(self._model, None)  # Keras has read it; no later `fit` may begin there
        self._show()
        self._receive(fit.EpochBegins(epoch))

    def end_batch(self, batch: int) -> None:
        """End the epoch if this member is out of sync, or after the last step of the others."""
        self._receive(fit.BatchEnds(batch))

    def end_epoch(self, callback: Any) -> None:
        """Let `fit` go on, unless it is over; callbacks go on from the counts of the others.

        Args:
            callback: The callback that makes this call: those after it are about to see the epoch.
        """
        self._last = callback
        self._receive(fit.EpochEnds())
        if self.phase in (Phase.OUT_OF_SYNC, Phase.EARLY):
            self.hold_stop()
        elif self.stopped_in not in (None, self._now.epoch):
            self._model.stop_training, self.stopped_in = True, None

    def hold_stop(self) -> None:
        """If the training is stopped here, let it go on until the others can be told."""
        if self._model.stop_training:
            self._model.stop_training, self.stopped_in = False, self._now.epoch

    def end(self) -> None:
        """Meet the others at the end; wait a while for those that are late or being replaced.

        Callbacks and the optimizer call it; only the first call does something.
        """
        if self.phase is Phase.ENDED:
            return
        begin_at(self._model, None)  # even if this raises, the next `fit` begins at its own epoch
        self._show()
        patience = max(_LAST, self._handle.timeout or 0.0, _REPLACED * self._handle.is_replaceable)
        self._until = _clock.now() + patience
        self._receive(fit.FitEnds())

    @property
    def state(self) -> AnyState:
        """The state that heals this or another member, with this member's position."""
        counts = {k: own for k, one in self._named.items() if (own := _counts_of(one))}
        done = self._now.done + self._now.ahead
        self._position.position = Position(self._now.epoch, done, counts)
        return self._state

    def average(self, call: Callable[[Member, AnyState], Round], *, in_step: bool) -> Round | None:
        """Return the result of ``call``; None if the other members are at another place.

        Args:
            call: A call of the member with the state.
            in_step: Whether it is made in a step, rather than at the end of a batch or of an epoch.
        """
        member = self._handle.take()
        try:
            with out_of_sync_is_error(member, True):
                result = call(member, self.state)
        except OutOfSyncError:
            self._receive(fit.OutOfSync())
            return None
        if member.rank in result.healed:
            donor = self._take_over()
            self._receive(fit.Healed(donor.epoch, donor.steps, in_step))
        elif not in_step and member.rank in result.quarantined and member.rank in result.failed:
            # It has their weights, but its slots may be NaN, too: the next meeting or average heals
            # it. A member that a rule has left out has not failed.
            member.lacks_state = True
        return result

    def _receive(self, event: fit.Event) -> None:
        """Do what follows ``event``, and what follows the meetings in it."""
        following: fit.Event | None = event
        while following is not None:
            self._now, actions = move(self._now, following)
            following = None
            for action in actions:
                following = self._do(action)
            if self._now.phase in (Phase.TOGETHER, Phase.ENDED):
                self._copy = []  # no later action needs it

    def _do(self, action: Action) -> fit.Met | None:
        """Do ``action``; return the event that follows it."""
        match action:
            case Action.MEET:
                return self._meet(has_state=True)
            case Action.MEET_RECOVERING:
                self._handle.take().lacks_state = True
                return self._meet(has_state=False)
            case Action.KEEP:
                self._copy = [*map(_copy_of, self._state)]
            case Action.RESTORE:
                for one, copy in zip(self._state, self._copy, strict=True):
                    _set_copy(one, copy)
                self._take_counts(self._position.position, _SWAPPING)
            case Action.BEGIN_THERE:
                begin_at(self._model, self._now.others)
            case Action.BEGIN_NOWHERE:
                begin_at(self._model, self.params["epochs"])
            case Action.END_EPOCH:
                self._model.stop_training = self._model.stop_training or _CUT
            case Action.GO_ON:
                if self._model.stop_training is _CUT:
                    self._model.stop_training = False
                end_data()
            case Action.HIDE:
                self._hide()
            case Action.TAKE_COUNTS if self._pending is not None:
                self._take_counts(self._pending, but=_SWAPPING)
            case Action.TAKE_DECIDING if self._pending is not None:
                for one in self._callbacks:
                    know_direction(one)
                self._take_counts(self._pending, _DECIDING)  # other callbacks have counted since
                self._pending = None
        return None

    def _meet(self, *, has_state: bool) -> fit.Met:
        """Send this member's place; get healed if needed."""
        member, ends = self._handle.take(), self.phase is Phase.ENDING
        _clock.sleep(self._pause)
        # Members have begun to wait at other times: who leaves alone would fail the others.
        place = self._now.epoch, ends, ends and _clock.now() < self._until
        try:
            with out_of_sync_is_error(member, False):
                met = self._handle.gather(place, "place", at="epoch", state=self.state)
        except WorkerError as error:
            if not (ends and has_state) or member.lacks_state:  # it has missed the last calls
                raise
            # Too few are left for another step, but there is none: this member has the result.
            _log.warning("the end of a training does not wait for other members: %s", error)
            self.has_ended_alone = True
            return fit.Met(self._now.epoch, is_over=True)
        places = {rank: met.weights[rank] for rank in sorted(met.used)}
        epochs, have_ended, wait = zip(*places.values(), strict=True)
        check_first_epochs(dict(zip(places, epochs, strict=True)))
        is_healed = member.rank in met.healed
        if is_healed:
            self._take_over()
        if ends:
            self._pause = min(2 * self._pause or _PAUSE, 1.0)
        absent = {*member.ranks}.difference(met.used, met.healed)
        may_come = bool(absent or met.late or (met.failed and self._handle.is_replaceable))
        return fit.Met(epochs[0], any(have_ended), is_healed, may_come and any(wait))

    def _hide(self) -> None:
        """Hide the end of this epoch from some callbacks after the one that has told it."""
        places = (k for k, one in enumerate(self._list) if one is self._last)
        after = next(places, len(self._list))  # another callback may hold that one
        seen = [one for one in self._list[after:] if not isinstance(one, _HIDDEN)]
        self._whole = self._whole or [*self._list]
        self._list[after:] = seen  # by which Keras goes on, after that callback

    def _show(self) -> None:
        """Let all callbacks see the next epoch, or the end."""
        if self._whole:
            self._list[:], self._whole = self._whole, []

    def _take_over(self) -> Position:
        """Go on from the donor's counts, and return its place; warn about callbacks it lacks."""
        donor = self._pending = self._position.position
        self._take_counts(donor)
        for name, one in self._named.items():
            if isinstance(one, _DECIDING) and name not in donor.counts:
                _log.warning(
                    "%s begins anew: the member that gave the state has no such callback", name
                )
        return donor

    def _take_counts(
        self,
        donor: Position,
        kinds: type | tuple[type, ...] = object,
        but: type | tuple[type, ...] = (),
    ) -> None:
        """Take the counts of callbacks of some ``kinds``; members may have other callbacks."""
        for name, counts in donor.counts.items():
            one = self._named.get(name)
            if one is not None and isinstance(one, kinds) and not isinstance(one, but):
                best = counts.get("best_weights")
                if best is not None and self._own:
                    own = vars(one).get("best_weights") or self._model.get_weights()
                    best = [own[k] if k in self._own else best[k] for k in range(len(best))]
                    counts = {**counts, "best_weights": best}
                vars(one).update(counts)
                if isinstance(one, HasCounts):
                    one.forget_own()


def check_before(
    callback: Any, callbacks: Sequence[Any], follows: Callable[[Any], bool], would: str
) -> None:
    """Raise `ValueError` if a callback of a `fit` that ``follows`` ``callback`` stands before it.

    ``would`` is the predicate of a clause about it that gives the reason.
    """
    for one in takewhile(lambda other: other is not callback, callbacks):
        if follows(one):
            name = type(one).__name__
            raise ValueError(
                f"{type(callback).__name__}: expected before {name} in the list of callbacks, got "
                f"it after: {name} would {would}"
            )


def names_of(callbacks: Sequence[Any]) -> list[str]:
    """Return a name for each callback, which is that of the same callback in other members.

    It consists of the kind and a number, since some members may have more callbacks than others.
    """
    seen: Counter[str] = Counter()
    names = []
    for one in callbacks:
        kind = type(one).__name__
        names.append(f"{kind} {seen[kind]}")
        seen[kind] += 1
    return names


def keeps_best_weights(callback: Any) -> bool:
    """Whether ``callback`` keeps the best weights, and sets them at the end."""
    stops_early = isinstance(callback, keras.callbacks.EarlyStopping)
    return stops_early and bool(callback.restore_best_weights)


def _counts_of(callback: Any) -> dict[str, Any]:
    """Return the counts of a callback of Keras or of this package."""
    if isinstance(callback, HasCounts):
        names = callback.counted
    elif isinstance(callback, _SWAPPING):
        names = frozenset((SWAPPED,))
    else:
        names = _COUNTS if isinstance(callback, _DECIDING) else frozenset()
    return {name: value for name, value in vars(callback).items() if name in names}
