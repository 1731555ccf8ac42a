"""The states of a member in a `fit` that goes on without members that are late or have died.

A member trains together with the others, or is out of sync: they have gone on without it. It gets
the state of their training, is healed, in a step or where all meet: at the beginning of each epoch,
and at the end. Then it goes on from where they are. If it cannot, because they are in the middle of
a later epoch, it skips epochs, each of which ends with its first batch, until it meets them.

`RULES` is the table of that. `move` looks up what happens, and changes nothing but what it returns.
So it knows no Keras, no clock and no member, and a test can drive it through all orders of events.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple


class Phase(enum.Enum):
    """Where a member is, compared with the others."""

    NEW = "its `fit` has begun no epoch"
    JOINING = "it waits until the others begin an epoch, or end"
    JOINED = "it has the state with which they begin an epoch"
    LATE = "it has the state with which they have ended"
    MEETING = "it waits for them at the beginning of its epoch"
    TOGETHER = "it is where they are"
    OUT_OF_SYNC = "the others have gone on, and it lacks their state"
    EARLY = "it has the state with which they begin a later epoch"
    OVER = "they have ended"
    ENDING = "it waits for them after its last epoch"
    ENDED = "its `fit` is over"

    @property
    def skips(self) -> bool:
        """Whether the member takes part in no calls except meetings."""
        return self in (Phase.OUT_OF_SYNC, Phase.EARLY, Phase.OVER)


class Action(enum.Enum):
    """What a member does after an event; the state after it has the numbers."""

    MEET = "meet"
    MEET_RECOVERING = "meet, lacking the state"
    KEEP = "keep a copy of the state"
    RESTORE = "take the copy"
    BEGIN_THERE = "begin `fit` with their epoch"
    BEGIN_NOWHERE = "begin no epoch"
    END_EPOCH = "end the epoch"
    GO_ON = "go on after it"
    HIDE = "hide the epoch from deciding callbacks"
    TAKE_COUNTS = "all callbacks take the donor's counts"
    TAKE_DECIDING = "deciding callbacks take the donor's counts"


@dataclass(frozen=True)
class FitState:
    """A member's state in a `fit`.

    Attributes:
        phase: The phase.
        steps: The batches of an epoch, if they are known and each is an execution of its own.
        epoch: The epoch; -1 before the first.
        done: The finished batches of the epoch.
        ahead: The batches by which the others are ahead in it: they end it sooner.
        others: The epoch in which the others are or, where they were met, which they begin.
        others_wait: Whether they meet again at the end, for members that may still come.
        is_cut: Whether this epoch was ended before its last batch.
    """

    phase: Phase = Phase.NEW
    steps: int | None = None
    epoch: int = -1
    done: int = 0
    ahead: int = 0
    others: int = -1
    others_wait: bool = False
    is_cut: bool = False


class Joins(NamedTuple):
    """`fit` begins while the training of the others is under way."""


class EpochBegins(NamedTuple):
    """`fit` begins an epoch."""

    epoch: int


class Met(NamedTuple):
    """The members have met.

    Attributes:
        epoch: The epoch that the others begin, or would begin if they did not end.
        is_over: Whether one of them has ended.
        is_healed: Whether this member got their state and counts there.
        may_come: Whether one that is late or is being replaced may still come to the end.
    """

    epoch: int
    is_over: bool = False
    is_healed: bool = False
    may_come: bool = False


class Healed(NamedTuple):
    """This member got the state and the counts of another one in an average.

    Attributes:
        epoch: The epoch of that one.
        batches: The batches of it that it has finished, with those by which others are ahead of it.
        in_step: Whether it was an average of gradients, in a step.
    """

    epoch: int
    batches: int
    in_step: bool


class OutOfSync(NamedTuple):
    """The others have made another call than the one in which this member waits for the state."""


class BatchEnds(NamedTuple):
    """`fit` has finished a batch, or several of them in one execution."""

    batch: int


class EpochEnds(NamedTuple):
    """`fit` has finished an epoch, and callbacks are about to see it."""


class FitEnds(NamedTuple):
    """`fit` has finished its last epoch."""


Event = Joins | EpochBegins | Met | Healed | OutOfSync | BatchEnds | EpochEnds | FitEnds


class Edge(NamedTuple):
    """A row of the table.

    Attributes:
        phases: It is for these phases,
        event: for this kind of event,
        when: and if this one of `CONDITIONS` is true.
        then: The next phase; None, if it stays the same.
        actions: What the member does then, in this order.
    """

    phases: tuple[Phase, ...]
    event: type[Any]
    when: str
    then: Phase | None
    actions: tuple[Action, ...] = ()


# By the state that has the event's numbers already, and the event.
CONDITIONS: dict[str, Callable[[FitState, Any], bool]] = {
    "": lambda now, event: True,
    "they begin it": lambda now, event: now.epoch == now.others,
    "they begin a later one": lambda now, event: now.epoch < now.others,
    "they are in it, or in a later one": lambda now, event: now.epoch <= now.others,
    "it is the last for them": lambda now, event: (
        now.ahead > 0 and now.done + now.ahead >= (now.steps or 0)
    ),
    "it was cut short": lambda now, event: now.is_cut,
    "one has ended": lambda now, met: met.is_over,
    "none has ended": lambda now, met: not met.is_over,
    "the others meet again": lambda now, event: now.others_wait,
    "healed, in an earlier epoch": lambda now, met: met.is_healed and met.epoch < now.epoch,
    "healed, in a later epoch": lambda now, met: met.is_healed and met.epoch > now.epoch,
    "in its epoch, whose steps are counted": lambda now, donor: (
        now.steps is not None and donor.epoch == now.epoch
    ),
    "between steps, at the same batch of the epoch": lambda now, donor: (
        not donor.in_step and donor[:2] == (now.epoch, now.done + now.ahead)
    ),
}

_P, _A = Phase, Action

# For each phase and event, the first row counts whose condition is true. Other events cannot occur.
RULES = (
    Edge((_P.NEW,), Joins, "", _P.JOINING, (_A.MEET,)),
    Edge((_P.JOINING,), Met, "one has ended", _P.LATE, (_A.KEEP, _A.BEGIN_NOWHERE)),
    Edge((_P.JOINING,), Met, "", _P.JOINED, (_A.KEEP, _A.BEGIN_THERE)),
    Edge((_P.JOINED,), EpochBegins, "they begin it", _P.TOGETHER, (_A.RESTORE, _A.TAKE_COUNTS)),
    Edge((_P.JOINED,), EpochBegins, "", _P.MEETING, (_A.MEET_RECOVERING,)),
    Edge((_P.LATE,), EpochBegins, "", _P.OVER, (_A.RESTORE, _A.TAKE_COUNTS)),
    Edge((_P.NEW, _P.TOGETHER), EpochBegins, "", _P.MEETING, (_A.MEET,)),
    Edge((_P.OUT_OF_SYNC,), EpochBegins, "they are in it, or in a later one", None),
    Edge((_P.EARLY,), EpochBegins, "they begin a later one", None),
    Edge((_P.EARLY,), EpochBegins, "they begin it", _P.TOGETHER),
    Edge((_P.OUT_OF_SYNC, _P.EARLY), EpochBegins, "", _P.MEETING, (_A.MEET_RECOVERING,)),
    Edge((_P.OVER,), EpochBegins, "", None),
    Edge((_P.MEETING,), Met, "one has ended", _P.OVER, (_A.KEEP,)),
    Edge((_P.MEETING,), Met, "healed, in an earlier epoch", None, (_A.MEET_RECOVERING,)),
    Edge((_P.MEETING,), Met, "healed, in a later epoch", _P.EARLY, (_A.KEEP,)),
    Edge((_P.MEETING,), Met, "", _P.TOGETHER),
    Edge((_P.TOGETHER,), OutOfSync, "", _P.OUT_OF_SYNC),
    Edge((_P.TOGETHER,), Healed, "in its epoch, whose steps are counted", None),
    Edge((_P.TOGETHER,), Healed, "between steps, at the same batch of the epoch", None),
    Edge((_P.TOGETHER,), Healed, "", _P.OUT_OF_SYNC),
    Edge((_P.TOGETHER,), BatchEnds, "it is the last for them", None, (_A.END_EPOCH,)),
    Edge((_P.TOGETHER,), BatchEnds, "", None),
    Edge((_P.OUT_OF_SYNC,), BatchEnds, "", None, (_A.END_EPOCH,)),
    Edge((_P.EARLY, _P.OVER), BatchEnds, "", None, (_A.RESTORE, _A.END_EPOCH)),
    Edge((_P.TOGETHER,), EpochEnds, "it was cut short", None, (_A.TAKE_DECIDING, _A.GO_ON)),
    Edge((_P.TOGETHER,), EpochEnds, "", None, (_A.TAKE_DECIDING,)),
    Edge((_P.OUT_OF_SYNC, _P.EARLY), EpochEnds, "it was cut short", None, (_A.HIDE, _A.GO_ON)),
    Edge((_P.OUT_OF_SYNC, _P.EARLY), EpochEnds, "", None, (_A.HIDE,)),
    Edge((_P.OVER,), EpochEnds, "", None, (_A.HIDE,)),
    Edge((_P.NEW, _P.TOGETHER), FitEnds, "", _P.ENDING, (_A.MEET,)),
    Edge((_P.JOINED, _P.OUT_OF_SYNC, _P.EARLY), FitEnds, "", _P.ENDING, (_A.MEET_RECOVERING,)),
    Edge(
        (_P.LATE,),
        FitEnds,
        "the others meet again",
        _P.ENDING,
        (_A.RESTORE, _A.TAKE_COUNTS, _A.MEET),
    ),
    Edge((_P.LATE,), FitEnds, "", _P.ENDED, (_A.RESTORE, _A.TAKE_COUNTS)),
    Edge((_P.OVER,), FitEnds, "the others meet again", _P.ENDING, (_A.MEET,)),
    Edge((_P.OVER,), FitEnds, "", _P.ENDED),
    Edge((_P.ENDING,), Met, "none has ended", None, (_A.MEET_RECOVERING,)),
    Edge((_P.ENDING,), Met, "the others meet again", None, (_A.MEET,)),
    Edge((_P.ENDING,), Met, "", _P.ENDED),
)


Table = dict[tuple[Phase, type[Any]], list[Edge]]


def table_of(rules: Sequence[Edge]) -> Table:
    """Return ``rules`` by phase and kind of event."""
    table: Table = {}
    for rule in rules:
        for phase in rule.phases:
            table.setdefault((phase, rule.event), []).append(rule)
    return table


_TABLE = table_of(RULES)


def move(
    state: FitState, event: Event, table: Table = _TABLE
) -> tuple[FitState, tuple[Action, ...]]:
    """Return the state after ``event``, and what the member does then, in this order.

    Raises:
        ValueError: If the event cannot occur in this state.
    """
    phase = state.phase
    match event:
        case EpochBegins(epoch) if epoch == state.epoch:
            return state, ()  # another callback of the `fit` has told it
        case EpochBegins(epoch):
            state = replace(state, epoch=epoch, done=0, ahead=0)
        case FitEnds():
            after = state.others if phase in (Phase.LATE, Phase.OVER) else state.epoch + 1
            state = replace(state, epoch=after, done=0, ahead=0)
        case BatchEnds(batch):
            state = replace(state, done=batch + 1)
        case Met(epoch, may_come=wait) if phase is Phase.ENDING:  # it may have had fewer
            state = replace(state, epoch=epoch, others_wait=wait)
        case Met(epoch, may_come=wait):
            state = replace(state, others=epoch, others_wait=wait)
        case Healed(epoch):
            state = replace(state, others=epoch)
    for rule in table.get((phase, type(event)), ()):
        if CONDITIONS[rule.when](state, event):
            break
    else:
        raise ValueError(f"{event}: cannot occur in the phase {phase.name}")
    if rule.then is Phase.OUT_OF_SYNC:
        state = replace(state, ahead=0)
    elif isinstance(event, Healed):
        state = replace(state, ahead=event.batches - state.done)
    is_cut = _A.END_EPOCH in rule.actions or (state.is_cut and not isinstance(event, EpochEnds))
    if rule.then is not None or is_cut != state.is_cut:
        state = replace(state, phase=rule.then or phase, is_cut=is_cut)
    return state, rule.actions
