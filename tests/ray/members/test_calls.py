"""The core of a meeting alone: events in, actions out, at times that the test gives."""

from typing import Any

import pytest
from calls import TheMeeting

from flatweights.ray.core._asks import Ask, MemberDiedError
from flatweights.ray.core._calls import Awaited
from flatweights.ray.core._events import (
    Action,
    Answer,
    CopyState,
    Detach,
    Ended,
    Event,
    Gave,
    LogDeath,
    NobodyHas,
    Reduce,
    Reduced,
    Refused,
    Release,
    Send,
    SendKept,
    SendState,
    StateCopied,
    TimeIsUp,
)
from flatweights.ray.core._peer import State

STEP = Ask("average", "weights", min_results=1, state="state")


class Core(TheMeeting):
    """The core, whose calls a test reduces."""

    def reduce(self, result: Event | None = None) -> Send:
        """Give the call that is due a result; return who gets it."""
        (call,) = only(Reduce, self.done)
        self.tell(Reduced(sorted(call.asks), 8) if result is None else result)
        send: Send
        (send,) = only(Send, self.done)
        return send

    def step(self, *ranks: int) -> Send:
        """Let members make a step."""
        for rank in ranks:
            self.ask(rank, STEP)
        return self.reduce()


def only(kind: Any, actions: list[Action]) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


@pytest.fixture
def meeting() -> Core:
    return Core()


def test_a_call_is_due_once_all_have_asked(meeting: Core) -> None:
    assert meeting.ask(0) == meeting.ask(2) == []
    assert meeting.awaited().asks == 1
    (call,) = only(Reduce, meeting.ask(1))
    assert [*call.asks] == [0, 2, 1]
    send = meeting.reduce()
    assert [peer.rank for peer in send.peers] == [1, 2, 0]  # the last is still awake
    assert {meeting[rank].state for rank in range(3)} == {State.WORKING}
    assert send.number == meeting[0].has == 1


def test_the_dead_are_left_out_and_named(meeting: Core) -> None:
    why = MemberDiedError("it died")
    meeting.ask(0)
    actions = meeting.tell(Ended(meeting[2], why))
    assert only(Detach, actions) == [Detach(meeting[2])]
    assert only(LogDeath, actions)
    assert not only(Reduce, actions)  # rank 1 is on time
    (call,) = only(Reduce, meeting.ask(1))
    assert (call.lost, [*call.asks], call.late) == ({2: why}, [0, 1], [])
    assert not only(Detach, meeting.tell(Ended(meeting[2], why)))


def test_time_is_up_for_those_that_are_late(meeting: Core) -> None:
    meeting.ask(0, timeout=2.0)
    assert meeting.awaited() == Awaited(2, 102.0)
    meeting.now = 102.0
    (call,) = only(Reduce, meeting.tell())
    assert (call.late, call.timeout) == ([1, 2], 2.0)
    assert meeting.reduce().late == (1, 2)
    kept = meeting.ask(1)
    assert only(SendKept, kept) == [SendKept(1, [meeting[1]])]
    assert meeting[1].has == 1
    assert meeting.ask(2, Ask("average", "others")) == []  # another call: it takes part in the next


def test_an_error_answers_those_that_took_part_and_is_not_kept(meeting: Core) -> None:
    meeting.ask(0, timeout=2.0)
    meeting.now = 103.0
    meeting.tell()
    send = meeting.reduce(Refused())
    assert [peer.rank for peer in send.peers] == [0]
    assert not only(SendKept, meeting.ask(1))
    assert meeting[1].state is State.ASKING


def heal(meeting: Core, rank: int) -> None:
    """Have the last member lack the state, and be healed by rank 0."""
    others = sorted({*meeting.peers.ranks()} - {rank})
    meeting.ask(rank, STEP, lacks=True)
    send = meeting.step(*others)
    assert (send.giver, send.lacking) == (meeting[others[0]].number, [meeting[rank]])
    number = send.number
    giver = meeting[others[0]]
    giver.asks(Ask("give", "state"), meeting.now)
    assert only(CopyState, meeting.tell(Gave(giver, True))) == [CopyState(number)]
    assert only(Answer, meeting.done) == [Answer([giver], None)]
    meeting.tell(StateCopied(number))
    meeting.ask(rank, Ask("heal", "state"))
    assert only(SendState, meeting.done) == [SendState(number, [meeting[rank]])]


def test_a_member_that_was_healed_is_awaited(meeting: Core) -> None:
    meeting.step(0, 1, 2)
    heal(meeting, 2)
    assert meeting.awaited() == Awaited(3, None)
    meeting.ask(0, STEP)
    meeting.now += 1000.0
    assert not only(Reduce, meeting.ask(1, STEP))
    assert only(Reduce, meeting.ask(2, STEP))
    assert meeting.reduce().took_part == (1, 2, 3)


def test_a_giver_that_dies_leaves_a_reason(meeting: Core) -> None:
    meeting.step(0, 1, 2)
    meeting.ask(2, STEP, lacks=True)
    meeting.step(0, 1)
    meeting.ask(2, Ask("heal", "state"))
    (answer,) = only(Answer, meeting.tell(Ended(meeting[0], MemberDiedError("it died"))))
    assert str(answer.error) == "rank 0, which gives it, is gone"


def test_states_are_released_once_nobody_needs_them(meeting: Core) -> None:
    meeting.step(0, 1, 2)
    heal(meeting, 2)
    number = meeting.calls.number
    meeting.step(0, 1, 2)
    meeting.ask(1, STEP, lacks=True)
    meeting.ask(0, STEP)
    meeting.ask(2, STEP)
    meeting.tell(Reduced((0, 2), 8))
    assert only(Release, meeting.done) == [Release(number)]
    assert [one.number for one in meeting.calls.healings] == [meeting.calls.number]


def test_nobody_has_the_state_any_more(meeting: Core) -> None:
    meeting.ask(0, STEP, lacks=True)
    meeting.ask(1, STEP, lacks=True)
    (none,) = only(NobodyHas, meeting.ask(2, STEP, lacks=True))
    assert [peer.rank for peer in none.peers] == [0, 1, 2]
    assert meeting.step(0, 1, 2).took_part == (1, 2, 3)


def test_those_that_wait_for_another_call_give_up_in_time(meeting: Core) -> None:
    for kind in range(9):  # of which eight are kept
        for rank in range(3):
            meeting.ask(rank, digest=f"weights {kind}")
        meeting.reduce(Reduced((0, 1, 2), 1_000_000))
    meeting.tell(Ended(meeting[2], MemberDiedError("it died")))
    meeting.join(2)
    assert not only(SendKept, meeting.ask(2, digest="weights 0", timeout=5.0))
    assert meeting.awaited().end == meeting.now + 5.0
    meeting.now += 5.0
    (up,) = only(TimeIsUp, meeting.tell())
    assert (up.peers, up.others, up.timeout) == ([meeting[2]], [0, 1], 5.0)
    assert only(SendKept, meeting.ask(2, digest="weights 8")) == [SendKept(9, [meeting[2]])]


def test_a_member_that_does_not_fetch_its_state_keeps_no_other_from_being_healed(
    meeting: Core,
) -> None:
    meeting.step(0, 1, 2)
    meeting.ask(2, STEP, lacks=True)
    giver, number = meeting[0], meeting.step(0, 1).number
    giver.asks(Ask("give", "state"), meeting.now)
    assert only(CopyState, meeting.tell(Gave(giver, True))) == [CopyState(number)]
    meeting.tell(StateCopied(number))
    # Rank 2 is stopped before it asks for the state; rank 1 has joined again.
    meeting.ask(1, STEP, lacks=True)
    meeting.ask(0, STEP, timeout=1.0)
    meeting.now += 2.0
    meeting.tell()
    send = meeting.reduce()
    assert (send.giver, send.lacking, send.late) == (giver.number, [meeting[1]], (2,))
    giver.asks(Ask("give", "state"), meeting.now)
    assert only(CopyState, meeting.tell(Gave(giver, True))) == [CopyState(send.number)]
