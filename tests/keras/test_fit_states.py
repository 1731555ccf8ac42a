"""The states of members in a `fit`, driven through orders of calls, lateness and deaths.

A simulator plays the members' `fit`, and the group in which they meet: no Keras, no process and no
clock. A list of numbers decides who goes on, who is late and who dies; Hypothesis makes it, and
shrinks it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatweights.keras._fit_states import (
    CONDITIONS,
    RULES,
    Action,
    BatchEnds,
    Edge,
    EpochBegins,
    EpochEnds,
    Event,
    FitEnds,
    FitState,
    Healed,
    Joins,
    Met,
    OutOfSync,
    Phase,
    move,
    table_of,
)

EPOCHS, STEPS = 4, 4
FAULTS = Path(__file__).parents[2] / "docs" / "keras-faults.md"


class Call(NamedTuple):
    """A member's call, in which it waits.

    Attributes:
        kind: That of the call; the group does not know the epoch of a step.
        ends: Whether it is the meeting at the end.
    """

    kind: str
    ends: bool = False


class Reply(NamedTuple):
    """What the group answers; the donor's epoch, batches, version and count, if it heals."""

    number: int
    version: int
    epoch: int
    is_over: bool
    may_come: bool
    healed: tuple[int, int, int, int] | None = None
    is_out_of_sync: bool = False


Running = Generator[Call, Reply, None]


class Member:
    """One member's `fit`, which does what its core says.

    Attributes:
        version: The steps in its weights, if they are those of the group; None, if not.
        count: The epochs that a callback has counted which decides by them.
        number: The calls of the group that it has had.
    """

    def __init__(
        self,
        group: Group,
        *,
        is_new: bool = False,
        stops_after: int = EPOCHS,
        restores: int | None = None,
    ) -> None:
        self.group, self.stops_after, self.restores = group, stops_after, restores
        self.now = FitState(steps=group.steps)
        self.lacks, self.number = is_new, group.number if is_new else 0
        self.version: int | None = None if is_new else 0
        self.copy: int | None = None
        self.count, self.pending = 0, cast("int | None", None)
        self.is_set_up = False  # that callback sets itself up at the end of the first epoch
        self.first, self.stops, self.sees = 0, False, True
        self.whole: set[int] = set()
        self.call: Call | None = None
        self.reply: Reply | None = None
        self.is_over = False
        self.running = self.fit(is_new)

    def __repr__(self) -> str:
        return f"{self.now.phase.name} {self.now.epoch}.{self.now.done}+{self.now.ahead}"

    def go_on(self) -> None:
        """Run until the next call, or the end."""
        try:
            if self.reply is None:  # it begins
                self.call = next(self.running)
            else:
                self.call = self.running.send(self.reply)
        except StopIteration:
            self.call, self.is_over = None, True
        self.reply = None

    def fit(self, is_new: bool) -> Running:
        if is_new:
            yield from self.receive(Joins())
            self.version, self.count = None, 0  # other callbacks begin, and may set weights
            self.first = self.first if self.restores is None else self.restores
        for epoch in range(self.first, EPOCHS):
            self.sees = True
            yield from self.receive(EpochBegins(epoch))
            self.stops = False
            for batch in range(STEPS):
                if self.now.phase.skips:
                    self.version = None
                else:
                    yield from self.average("step")
                yield from self.receive(BatchEnds(batch))
                is_due = (self.now.done + self.now.ahead) % 3 == 0
                if is_due and not self.now.phase.skips:
                    yield from self.average("weights")
                    yield from self.receive(BatchEnds(batch))
                if self.stops:
                    break
                assert not self.now.phase.skips, f"{self}: another batch of an epoch to skip"
            yield from self.receive(EpochEnds())
            if not self.now.phase.skips:
                yield from self.average("logs")
                yield from self.receive(EpochEnds())
            if self.sees:
                self.count += 1 if self.is_set_up else 1 - self.count
                self.is_set_up = True
                assert self.count == epoch + 1, f"{self}: a callback counts {self.count} epochs"
                assert not self.now.phase.skips
                self.whole.add(epoch)
            assert not self.stops or self.now.phase is Phase.OVER, f"{self} ends"
            if self.stops or epoch >= self.stops_after:
                break
        yield from self.receive(FitEnds())
        yield Call("last average")  # of weights, which needs no state

    def average(self, kind: str) -> Running:
        assert self.now.phase is Phase.TOGETHER, f"{self}: {kind}"
        reply = yield Call(kind)
        if reply.is_out_of_sync:
            if kind == "step":
                self.version = None  # its own gradients
            yield from self.receive(OutOfSync())
            return
        if reply.healed is not None:
            epoch, batches, *_ = reply.healed
            self.heal(reply)
            yield from self.receive(Healed(epoch, batches, kind == "step"))
        self.version, self.number = reply.version, reply.number

    def heal(self, reply: Reply) -> None:
        assert reply.healed is not None
        *_, self.version, self.count = reply.healed
        self.pending, self.lacks = self.count, False

    def receive(self, event: Event) -> Running:
        following: Event | None = event
        while following is not None:
            self.now, actions = move(self.now, following, self.group.table)
            self.group.told.append((self.now, following, actions))
            following = None
            for action in actions:
                assert following is None, "a meeting is the last action"
                match action:
                    case Action.MEET | Action.MEET_RECOVERING:
                        self.lacks = self.lacks or action is Action.MEET_RECOVERING
                        reply = yield Call("meeting", self.now.phase is Phase.ENDING)
                        if reply.healed is not None:
                            self.heal(reply)
                        self.version, self.number = reply.version, reply.number
                        heals = reply.healed is not None
                        following = Met(reply.epoch, reply.is_over, heals, reply.may_come)
                    case Action.KEEP:
                        self.copy = self.version
                    case Action.RESTORE:
                        self.version = self.copy
                    case Action.BEGIN_THERE:
                        self.first = self.now.others
                    case Action.BEGIN_NOWHERE:
                        self.first = EPOCHS
                    case Action.END_EPOCH:
                        self.stops = True
                    case Action.GO_ON:
                        self.stops = False
                    case Action.HIDE:
                        self.sees = False
                    case Action.TAKE_COUNTS if self.pending is not None:
                        self.count = self.pending
                    case Action.TAKE_DECIDING if self.pending is not None:
                        self.count, self.pending, self.is_set_up = self.pending, None, True


class Group:
    """The members, and the calls that they have made together."""

    def __init__(
        self,
        size: int,
        rules: Sequence[Edge] = RULES,
        *,
        by_one: bool = True,
        restores: int | None = None,
        **options: Any,
    ) -> None:
        self.restores = restores  # the epoch at which a replacement begins by itself
        self.table, self.steps = table_of(rules), STEPS if by_one else None
        self.number = self.version = 0
        self.last = Call("start"), Reply(0, 0, 0, False, False)
        self.told: deque[Any] = deque(maxlen=40)
        self.members = [Member(self, **(options if k == 0 else {})) for k in range(size)]
        self.ended: list[Member] = []

    def run(self, decisions: Sequence[int]) -> None:
        """Run all to their end; after the decisions, nobody is late any more."""
        left = deque(decisions)
        for _ in range(3_000):
            for member in [*self.members]:
                if member.is_over:
                    self.members.remove(member)
                    self.ended.append(member)
            if not self.members:
                return
            running = [one for one in self.members if one.call is None]
            acts: list[Callable[[], None]] = [one.go_on for one in running]
            if any(not one.lacks for one in self.members if one.call is not None):
                acts.append(self.close)
            mortal = self.mortal()
            number = left.popleft() if left else 0
            if number >= 10 and mortal is not None:
                self.members.remove(mortal)
                self.members.append(Member(self, is_new=True, restores=self.restores))
            else:
                assert acts, f"all wait for ever: {self.members}"
                acts[number % len(acts)]()
            for member in self.members:
                if member.call is not None and not member.lacks:
                    self.look(member)
        raise AssertionError(f"they do not end: {self.members}")

    def mortal(self) -> Member | None:
        """Return a member that may die: another one has the state, and waits at the end for it."""
        able = [one for one in self.members if not (one.lacks or one.now.phase.skips)]
        able = [one for one in able if one.number >= self.number - 1]
        ending = [one for one in self.members if one.now.phase is Phase.ENDING]
        if self.ended or any(one.call is None for one in ending) or len(able) < 2:
            return None
        if any(one.now.phase is Phase.ENDED for one in self.members):  # it waits no longer
            return None
        return able[0]

    def look(self, member: Member) -> None:
        """Answer a member that has missed one call by that; if it has missed more, it lacks."""
        assert member.call is not None
        call, reply = self.last
        if member.number == self.number - 1 and member.call.kind == call.kind:
            self.answer(member, reply)
        elif member.number < self.number:
            member.lacks = True

    def close(self) -> None:
        """Close the call of the members that have the state; others are late."""
        waiting = [one for one in self.members if one.call is not None]
        used = [one for one in waiting if not one.lacks]
        calls = [one.call for one in used if one.call is not None]
        assert len({call.kind for call in calls}) == 1, f"calls differ: {used}"
        places = {(one.now.epoch, one.now.done + one.now.ahead) for one in used}
        assert len(places) == 1, f"they average at several places: {used}"
        assert {one.version for one in used} == {self.version}, f"states differ: {used}"
        ((epoch, batches),) = places
        donor = (epoch, batches, self.version, used[0].count)
        self.number += 1
        self.version += calls[0].kind == "step"
        there = [one for one in waiting if one.call is not None and one.call.kind == calls[0].kind]
        may_come = len(there) < len(self.members)
        over = any(call.ends for call in calls)
        reply = Reply(self.number, self.version, epoch, over, may_come)
        self.last = calls[0], reply
        for one in waiting:
            assert one.call is not None
            if not one.lacks:
                self.answer(one, reply)
            elif one.call.kind == calls[0].kind:
                self.answer(one, reply._replace(healed=donor))
            elif one.call.kind != "meeting":
                self.answer(one, reply._replace(is_out_of_sync=True))

    def answer(self, member: Member, reply: Reply) -> None:
        member.reply, member.call = reply, None


def simulate(
    decisions: Sequence[int], size: int, rules: Sequence[Edge] = RULES, **options: Any
) -> Group:
    """Run a group, and check its end."""
    group = Group(size, rules, **options)
    group.run(decisions)
    if "stops_after" not in options:
        assert group.version == EPOCHS * STEPS, "no step is left out, and none is made twice"
    for member in group.ended:
        assert member.now.phase is Phase.ENDED
        assert member.version == group.version, f"{member} ends with other weights"
    return group


# Numbers from 10 on let a member die, if another one can go on.
decided = st.lists(st.integers(0, 11), max_size=120)


@settings(max_examples=150, deadline=None)
@given(decided, st.integers(1, 4), st.booleans(), st.none() | st.integers(0, EPOCHS))
def test_members_meet_at_the_same_places_and_end_with_the_same_weights(
    decisions: list[int], size: int, by_one: bool, restores: int | None
) -> None:
    simulate(decisions, size, by_one=by_one, restores=restores)


@settings(max_examples=100, deadline=None)
@given(decided, st.integers(2, 3), st.integers(0, EPOCHS - 2))
def test_a_training_that_one_ends_early_ends_for_all_with_the_same_weights(
    decisions: list[int], size: int, last: int
) -> None:
    simulate(decisions, size, stops_after=last)


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.slow if seed > 1 else []) for seed in range(4)]
)
def test_random_orders_of_calls_lateness_and_deaths(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(150):
        death = rng.choice([0, 0.03, 0.1])
        length = rng.randrange(150)
        decisions = [11 if rng.random() < death else rng.randrange(10) for _ in range(length)]
        options: dict[str, Any] = {"by_one": rng.random() < 0.7}
        if rng.random() < 0.25:
            options["stops_after"] = rng.randrange(EPOCHS - 1)
        if rng.random() < 0.3:
            options["restores"] = rng.randrange(EPOCHS + 1)
        try:
            simulate(decisions, rng.randint(1, 4), **options)
        except AssertionError as error:
            raise AssertionError(f"{decisions}, {options}: {error}") from error


def test_without_faults_all_have_all_epochs() -> None:
    group = simulate([], 3)
    assert all(one.whole == {*range(EPOCHS)} for one in group.ended)


def without(number: int, action: Action | None) -> list[Edge]:
    """Return the rules, one of them without an action; without that rule, if it is None."""
    rule = RULES[number]
    actions = tuple(one for one in rule.actions if one is not action)
    kept = [] if action is None else [rule._replace(actions=actions)]
    return [*RULES[:number], *kept, *RULES[number + 1 :]]


@pytest.mark.parametrize(
    ("phase", "event", "when", "action"),
    [
        (Phase.JOINED, EpochBegins, "they begin it", Action.RESTORE),
        (Phase.JOINED, EpochBegins, "they begin it", Action.TAKE_COUNTS),
        (Phase.MEETING, Met, "one has ended", None),
        (Phase.MEETING, Met, "healed, in a later epoch", None),
        (Phase.TOGETHER, Healed, "", None),
        (Phase.EARLY, BatchEnds, "", Action.RESTORE),
        (Phase.TOGETHER, BatchEnds, "it is the last for them", None),
        (Phase.OUT_OF_SYNC, EpochEnds, "", Action.HIDE),
        (Phase.OUT_OF_SYNC, EpochEnds, "it was cut short", Action.GO_ON),
        (Phase.ENDING, Met, "none has ended", None),
        (Phase.LATE, FitEnds, "the others meet again", None),
        (Phase.OVER, FitEnds, "the others meet again", None),
    ],
)
def test_the_simulator_finds_what_is_missing(
    phase: Phase, event: type[Any], when: str, action: Action | None
) -> None:
    (number,) = [
        k
        for k, rule in enumerate(RULES)
        if phase in rule.phases and rule.event is event and rule.when == when
    ]
    rng, rules = random.Random(0), without(number, action)
    for _ in range(3_000):
        decisions = [11 if rng.random() < 0.04 else rng.randrange(10) for _ in range(100)]
        options = {"stops_after": rng.randrange(3)} if rng.random() < 0.3 else {}
        try:
            simulate(decisions, rng.randint(2, 4), rules, **options)
        except (AssertionError, ValueError):
            return
    pytest.fail("nothing was found")


together = FitState(Phase.TOGETHER, steps=20, epoch=2, done=4)


def phases(state: FitState, *events: Event) -> tuple[list[str], list[Action]]:
    """Return the phases after ``events``, and the actions of the last one."""
    names: list[str] = []
    actions: tuple[Action, ...] = ()
    for event in events:
        state, actions = move(state, event)
        names.append(f"{state.phase.name}{f' +{state.ahead}' if state.ahead else ''}")
    return names, [*actions]


def test_a_member_that_is_healed_in_its_epoch_ends_it_with_the_others() -> None:
    healed = Healed(epoch=2, batches=14, in_step=True)
    names, actions = phases(together, healed, BatchEnds(4), BatchEnds(8), BatchEnds(9))
    assert names == ["TOGETHER +10"] * 4
    assert actions == [Action.END_EPOCH]
    names, actions = phases(together, healed, BatchEnds(4), Healed(2, 17, in_step=True))
    assert names[-1] == "TOGETHER +12"
    assert phases(together, Healed(3, 14, in_step=True))[0] == ["OUT_OF_SYNC"]
    ahead = move(together, healed)[0]
    assert phases(ahead, Healed(2, 13, in_step=True))[0] == ["OUT_OF_SYNC"], "it has told others 14"
    several = FitState(Phase.TOGETHER, steps=None, epoch=2, done=4)
    assert phases(several, Healed(2, 4, in_step=True))[0] == ["OUT_OF_SYNC"]
    assert phases(several, Healed(2, 4, in_step=False))[0] == ["TOGETHER"]


def test_a_member_skips_epochs_until_it_is_where_the_others_are() -> None:
    behind = FitState(Phase.OUT_OF_SYNC, epoch=2, others=4)
    skipped: list[Event] = [BatchEnds(0), EpochEnds()]
    names, _ = phases(behind, EpochBegins(3), *skipped, EpochBegins(4), *skipped, EpochBegins(5))
    assert names == ["OUT_OF_SYNC"] * 6 + ["MEETING"]
    meeting = FitState(Phase.MEETING, epoch=2)
    later = Met(4, is_healed=True)
    names, actions = phases(meeting, later, *skipped, EpochBegins(3), *skipped, EpochBegins(4))
    assert names == ["EARLY"] * 6 + ["TOGETHER"]
    assert actions == [], "it has met them"


def test_a_replacement_begins_where_the_others_are_or_not_at_all() -> None:
    names, actions = phases(FitState(), Joins(), Met(3, is_healed=True))
    assert (names, actions[-1]) == (["JOINING", "JOINED"], Action.BEGIN_THERE)
    names, actions = phases(FitState(), Joins(), Met(3, is_over=True, is_healed=True))
    assert (names, actions[-1]) == (["JOINING", "LATE"], Action.BEGIN_NOWHERE)


def test_events_that_cannot_occur_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"BatchEnds\(batch=0\): cannot occur in the phase M"):
        move(FitState(Phase.MEETING), BatchEnds(0))


def name_of(phase: Phase) -> str:
    return phase.name.lower().replace("_", " ")


def table() -> list[str]:
    """Return the rows of the tables in the docs."""
    rows = [f"| {name_of(phase)} | {phase.value} |" for phase in Phase]
    for rule in RULES:
        which = ", ".join(map(name_of, rule.phases))
        then = "" if rule.then is None else name_of(rule.then)
        does = ", ".join(action.value for action in rule.actions)
        cells = [which, f"`{rule.event.__name__}`", rule.when, then, does]
        rows.append(f"| {' | '.join(cells)} |".replace("  ", " "))
    return rows


def test_the_tables_of_the_docs_are_those_of_the_code() -> None:
    section = FAULTS.read_text().partition("## The states of a member")[2]
    rows = [line for line in section.splitlines() if line.startswith("| ")]
    assert [row for row in rows if "---" not in row and not row.startswith("| state |")] == table()


def test_conditions_and_actions_are_all_used() -> None:
    assert {rule.when for rule in RULES} == {*CONDITIONS}
    assert {action for rule in RULES for action in rule.actions} == {*Action}
    for rule in RULES:  # what follows a meeting is said by its event
        assert not {Action.MEET, Action.MEET_RECOVERING} & {*rule.actions[:-1]}
