"""The core of a process group alone: events in, actions out, at times that the test gives."""

from typing import Any

import pytest
from calls import TheProcessGroup

from flatweights.ray.core._calls import Awaited
from flatweights.ray.core._deadline import NEVER
from flatweights.ray.core._events import (
    Action,
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
    Respond,
    Send,
    SendKept,
    SendState,
    StateCopied,
    TimeIsUp,
)
from flatweights.ray.core._healing import Healing
from flatweights.ray.core._peer import Peer, PeerState
from flatweights.ray.core._requests import MemberDiedError, Request

STEP = Request("average", "weights", min_results=1, state="state")


class Core(TheProcessGroup):
    """The core, whose calls a test reduces."""

    def reduce(self, result: Event | None = None) -> Send:
        """Give the call that is due a result; return who gets it."""
        (call,) = only(Reduce, self.done)
        self.receive(Reduced(sorted(call.requests), 8) if result is None else result)
        send: Send
        (send,) = only(Send, self.done)
        return send

    def step(self, *ranks: int) -> Send:
        """Let members make a step."""
        for rank in ranks:
            self.request(rank, STEP)
        return self.reduce()


def only(kind: Any, actions: list[Action]) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


@pytest.fixture
def group() -> Core:
    return Core()


def test_a_call_is_due_once_all_have_asked(group: Core) -> None:
    assert group.request(0) == group.request(2) == []
    assert group.awaited().requests == 1
    (call,) = only(Reduce, group.request(1))
    assert [*call.requests] == [0, 2, 1]
    send = group.reduce()
    assert [peer.rank for peer in send.peers] == [1, 2, 0]  # the last is still awake
    assert {group[rank].state for rank in range(3)} == {PeerState.WORKING}
    assert send.number == group[0].has == 1


def test_the_dead_are_left_out_and_named(group: Core) -> None:
    why = MemberDiedError("it died")
    group.request(0)
    actions = group.receive(Ended(group[2], why))
    assert only(Detach, actions) == [Detach(group[2])]
    assert only(LogDeath, actions)
    assert not only(Reduce, actions)  # rank 1 is on time
    (call,) = only(Reduce, group.request(1))
    assert (call.lost, [*call.requests], call.late) == ({2: why}, [0, 1], [])
    assert not only(Detach, group.receive(Ended(group[2], why)))


def test_time_is_up_for_those_that_are_late(group: Core) -> None:
    group.request(0, timeout=2.0)
    assert group.awaited() == Awaited(2, 102.0)
    group.now = 102.0
    (call,) = only(Reduce, group.receive())
    assert (call.late, call.timeout) == ([1, 2], 2.0)
    assert group.reduce().late == (1, 2)
    kept = group.request(1)
    assert only(SendKept, kept) == [SendKept(1, [group[1]])]
    assert group[1].has == 1
    # another call: it takes part in the next
    assert group.request(2, Request("average", "others")) == []


def test_a_broadcast_waits_for_a_late_root_but_not_for_a_dead_one(group: Core) -> None:
    group.request(0, timeout=2.0)
    group.now = 102.0
    group.receive()
    assert group.reduce().late == (1, 2)
    assert group.request(0, Request("broadcast", "weights", root=2)) == []
    (call,) = only(Reduce, group.receive(Ended(group[2], MemberDiedError("it died"))))
    assert [*call.requests] == [0]


def test_an_error_answers_those_that_took_part_and_is_not_kept(group: Core) -> None:
    group.request(0, timeout=2.0)
    group.now = 103.0
    group.receive()
    send = group.reduce(Refused())
    assert [peer.rank for peer in send.peers] == [0]
    assert not only(SendKept, group.request(1))
    assert group[1].state is PeerState.ASKING


def heal(group: Core, rank: int) -> None:
    """Have the last member lack the state, and be healed by rank 0."""
    others = sorted({*group.peers.ranks()} - {rank})
    group.request(rank, STEP, lacks=True)
    send = group.step(*others)
    assert (send.donor, send.recovering) == (group[others[0]].number, [group[rank]])
    number = send.number
    donor = group[others[0]]
    donor.requests(Request("give", "state"), group.now)
    assert only(CopyState, group.receive(Gave(donor, True))) == [CopyState(number)]
    assert only(Respond, group.done) == [Respond([donor], None)]
    group.receive(StateCopied(number))
    group.request(rank, Request("heal", "state"))
    assert only(SendState, group.done) == [SendState(number, [group[rank]])]


def test_a_member_that_was_healed_is_awaited(group: Core) -> None:
    group.step(0, 1, 2)
    heal(group, 2)
    assert group.awaited() == Awaited(3, None)
    group.request(0, STEP)
    group.now += 1000.0
    assert not only(Reduce, group.request(1, STEP))
    assert only(Reduce, group.request(2, STEP))
    assert group.reduce().took_part == (1, 2, 3)


def test_a_donor_that_dies_leaves_a_reason(group: Core) -> None:
    group.step(0, 1, 2)
    group.request(2, STEP, lacks=True)
    group.step(0, 1)
    group.request(2, Request("heal", "state"))
    (answer,) = only(Respond, group.receive(Ended(group[0], MemberDiedError("it died"))))
    assert str(answer.error) == "rank 0, which gives it, is gone"


def test_states_are_released_once_nobody_needs_them(group: Core) -> None:
    group.step(0, 1, 2)
    heal(group, 2)
    assert only(Release, group.done) == [Release(group.calls.number)]
    assert not group.calls.healings
    group.step(0, 1, 2)
    group.request(1, STEP, lacks=True)
    number = group.step(0, 2).number
    assert [one.number for one in group.calls.healings] == [number]
    group.receive(Ended(group[1], MemberDiedError("it died")))
    assert only(Release, group.done) == [Release(number)]


def test_nobody_has_the_state_any_more(group: Core) -> None:
    group.request(0, STEP, lacks=True)
    group.request(1, STEP, lacks=True)
    (none,) = only(NobodyHas, group.request(2, STEP, lacks=True))
    assert [peer.rank for peer in none.peers] == [0, 1, 2]
    assert group.step(0, 1, 2).took_part == (1, 2, 3)


def test_those_that_wait_for_another_call_give_up_in_time(group: Core) -> None:
    for kind in range(9):  # of which eight are kept
        for rank in range(3):
            group.request(rank, digest=f"weights {kind}")
        group.reduce(Reduced((0, 1, 2), 1_000_000))
    group.receive(Ended(group[2], MemberDiedError("it died")))
    group.join(2)
    assert not only(SendKept, group.request(2, digest="weights 0", timeout=5.0))
    assert group.awaited().end == group.now + 5.0
    group.now += 5.0
    (up,) = only(TimeIsUp, group.receive())
    assert (up.peers, up.others, up.timeout) == ([group[2]], [0, 1], 5.0)
    assert only(SendKept, group.request(2, digest="weights 8")) == [SendKept(9, [group[2]])]


def test_a_member_that_does_not_fetch_its_state_keeps_no_other_from_being_healed(
    group: Core,
) -> None:
    group.step(0, 1, 2)
    group.request(2, STEP, lacks=True)
    donor, number = group[0], group.step(0, 1).number
    donor.requests(Request("give", "state"), group.now)
    assert only(CopyState, group.receive(Gave(donor, True))) == [CopyState(number)]
    group.receive(StateCopied(number))
    # Rank 2 is stopped before it asks for the state; rank 1 has joined again.
    group.request(1, STEP, lacks=True)
    group.request(0, STEP, timeout=1.0)
    group.now += 2.0
    group.receive()
    send = group.reduce()
    assert (send.donor, send.recovering, send.late) == (donor.number, [group[1]], (2,))
    donor.requests(Request("give", "state"), group.now)
    assert only(CopyState, group.receive(Gave(donor, True))) == [CopyState(send.number)]


def test_a_state_that_was_given_outlives_its_donor() -> None:
    donor, other = Peer(0, "a", b""), Peer(1, "b", b"")
    healing = Healing(1, donor, [other], NEVER, is_given=True, waiting=[other])
    healing.lose(donor)
    assert healing.is_known
    assert healing.why is None
