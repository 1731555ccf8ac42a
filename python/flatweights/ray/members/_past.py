"""The calls that a meeting has made: what it knows of them, for members that are late.

The last outcomes of a few kinds of call are kept, and of more kinds if they are small, such as
those that a `fit` makes when it begins. They answer late asks at once. Of many more kinds, only the
number of the last outcome is known. A call is recognised by the layouts of its weights and of its
state. If two models of one layout take turns in a member's calls (`Turns`), an outcome of one could
be given to a member that asks for the other; so the asks of such twins are refused. So are those of
a member that was given an outcome before the twins were noticed, in the first cycle of a loop.

A member that has the last outcome of one kind of call may lack that of another: a restarted process
that got the latest critic still has its first actor. So each kind knows the members that have its
last outcome.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

from flatweights.ray._result import Packed
from flatweights.ray.members._asks import Ask, Kind, LacksStateError
from flatweights.ray.members._gpu_rounds import Stayed
from flatweights.ray.members._seats import Seat

_KEPT = 8  # kinds of call of which the last outcome is kept
_KEPT_SMALL = 64  # kinds of which it is kept after that, if it is small
_SMALL = 1 << 16  # bytes
_KINDS = 1024  # kinds of call of which the number of the last outcome is known

_Value = TypeVar("_Value")


class Kept(NamedTuple):
    """The last outcome of one kind of call.

    Attributes:
        number: Its number.
        body: The outcome.
        weights: Its weights, on the host or in a window of a GPU; None, if members have gathered
            objects, which are in the body.
        previous: The number of the call with the same state before it; 0 without a state.
    """

    number: int
    body: bytes
    weights: Packed | Stayed | None
    previous: int


class Made(NamedTuple):
    """The last call of one kind.

    Attributes:
        number: Its number.
        seats: The numbers of the seats that have its outcome.
        late: The numbers of the seats that were ever given an outcome of this kind for which they
            were late.
    """

    number: int
    seats: set[int]
    late: set[int]


class Past:
    """The outcomes with weights, and the keys of twins."""

    def __init__(self) -> None:
        """Begin without calls."""
        self._kept: dict[Kind, Kept] = {}  # the oldest first
        self._small: dict[Kind, Kept] = {}  # small ones that were the oldest of these, likewise
        self._made: dict[Kind, Made] = {}  # the oldest first
        self._states: dict[str, int] = {}  # by layout of a state, the last call with it
        self._twins: set[str] = set()  # the keys of asks that are twins

    def answer_for(self, seat: Seat) -> Kept | None:
        """Return the outcome that answers the ask of ``seat`` at once; None if it has to wait.

        Raises:
            LacksStateError: If that outcome, or the next, would not bring its state to that of the
                others.
            RuntimeError: If it could be given the weights, or the state, of another model.
        """
        ask = seat.ask
        self._twins.update(ask.twins)
        is_twin = not self._twins.isdisjoint(ask.keys)
        if ask.lacks:
            if is_twin:
                raise _twin_error(seat)
            return None
        kept = self._last(ask.kind)
        if kept is not None and kept.number <= seat.has:
            kept = None  # it takes part in the open call, or waits for it
        if ask.state is not None:
            before = self._states.get(ask.state, 0) if kept is None else kept.previous
            if seat.states.get(ask.state, 0) < before:
                raise LacksStateError(f"rank {seat.rank} has missed calls with a state")
            if kept is not None:
                seat.states[ask.state] = kept.number
        elif is_twin and (kept is not None or self.is_behind(seat) or self._was_late(seat)):
            raise _twin_error(seat)
        if kept is not None:
            self._note(seat)
        return kept

    def astray(self, seats: Sequence[Seat]) -> list[tuple[Seat, RuntimeError]]:
        """Return the members of the open call that may be at the other twin's, with their errors.

        They have asked before the twins were noticed.
        """
        return [
            (seat, _twin_error(seat))
            for seat in seats
            if not self._twins.isdisjoint(seat.ask.keys) and self._was_late(seat)
        ]

    def is_behind(self, seat: Seat) -> bool:
        """Whether ``seat`` lacks the last outcome of its kind of call, and gets the next one.

        Its weights do not count in that call: they are from before the outcome that it lacks. With
        a state, it is healed instead. In a broadcast, only weights of the root count, which all
        take as they are: so a member takes part once it has an outcome of any kind since the last.
        """
        ask, made = seat.ask, self._made.get(seat.ask.kind)
        if made is None or ask.state is not None:
            return False
        if ask.operation == "broadcast":
            return made.number > seat.has
        return seat.number not in made.seats

    def last_for(self, seat: Seat) -> Kept | None:
        """Return the last outcome of the call that ``seat`` asks for; None if it is not kept."""
        kept = self._last(seat.ask.kind)
        if kept is not None:
            self._note(seat)
        return kept

    def keep(
        self,
        ask: Ask,
        number: int,
        body: bytes,
        weights: Packed | Stayed | None,
        seats: Sequence[Seat],
        late: Sequence[Seat] = (),
    ) -> None:
        """Keep the outcome of the call of ``ask``.

        The ``seats`` get it, and with it the state; so do those that are ``late`` for it.
        """
        previous = 0 if ask.state is None else self._states.get(ask.state, 0)
        self._small.pop(ask.kind, None)
        oldest = _put_last(self._kept, ask.kind, Kept(number, body, weights, previous), _KEPT)
        if oldest is not None:
            kind, kept = oldest
            own = kept.weights
            if isinstance(own, Packed) and own.buffer.nbytes <= _SMALL:
                own = Packed(own.buffer.copy(), own.layout)  # in no window
            if own is not kept.weights or (own is None and len(kept.body) <= _SMALL):
                _put_last(self._small, kind, kept._replace(weights=own), _KEPT_SMALL)
        before = self._made.get(ask.kind)
        ever = set() if before is None else before.late
        ever.update(seat.number for seat in late)
        made = Made(number, {seat.number for seat in (*seats, *late)}, ever)
        _put_last(self._made, ask.kind, made, _KINDS)
        if ask.state is not None:
            self._states[ask.state] = number
            for seat in seats:
                seat.states[ask.state] = number

    def has(self, stayed: Stayed) -> bool:
        """Whether an outcome with these weights is kept."""
        return any(kept.weights is stayed for kept in self._kept.values())

    def forget(self, state: str | None) -> None:
        """Forget all calls with a state that no member has any more."""
        of_kinds: tuple[dict[Kind, Any], ...] = (self._kept, self._small, self._made)
        for calls in of_kinds:
            for kind in [kind for kind in calls if kind[-1] == state]:
                del calls[kind]
        self._states.pop(state or "", None)

    def _last(self, kind: Kind) -> Kept | None:
        return self._kept.get(kind) or self._small.get(kind)

    def _note(self, seat: Seat) -> None:
        """Note that ``seat``, which is late, gets the last outcome of its kind of call."""
        made = self._made.get(seat.ask.kind)
        if made is not None:
            made.seats.add(seat.number)
            made.late.add(seat.number)

    def _was_late(self, seat: Seat) -> bool:
        """Whether ``seat`` was ever late for a call like that of its ask, and without a state."""
        made = self._made.get(seat.ask.kind)
        return seat.ask.state is None and made is not None and seat.number in made.late


def _put_last(
    last: dict[Kind, _Value], kind: Kind, value: _Value, most: int
) -> tuple[Kind, _Value] | None:
    """Make ``value`` the newest of at most ``most``; return the oldest one if it has to go."""
    last.pop(kind, None)
    last[kind] = value
    if len(last) <= most:
        return None
    oldest = next(iter(last))
    return oldest, last.pop(oldest)


def _twin_error(seat: Seat) -> RuntimeError:
    return RuntimeError(
        f"rank {seat.rank} was late, or has joined again, and could be given another model's "
        "weights: several models of one layout take turns in this meeting. Give their parts "
        "names of their own, as in TensorFlowVariables({'critic 1': model}), or use a meeting "
        "for each"
    )
