"""The states of members in a `fit`: the table, and moves that are easy to get wrong.

`tests/sim` drives the states through random orders of calls, lateness and deaths.
"""

from pathlib import Path

import pytest

from flatweights.keras._fit_states import (
    CONDITIONS,
    RULES,
    Action,
    BatchEnds,
    EpochBegins,
    EpochEnds,
    Event,
    FitState,
    Healed,
    Joins,
    Met,
    Phase,
    move,
)

FAULTS = Path(__file__).parents[2] / "docs" / "keras-faults.md"

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
