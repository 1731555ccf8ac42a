"""Members that die, leave, give up and are replaced, at each step of a process group.

No Ray is started: the coordinator and the members are threads, with channels between them.
"""

import gc
import itertools
import logging
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import Queue
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import ray
from process_groups import LocalProcessGroup, kill

from flatweights import FlatWeights, Layout
from flatweights._sources import Template
from flatweights.ray import MemberDiedError, MemberError, WorkerError
from flatweights.ray.channels._end import ChannelError
from flatweights.ray.channels._member_channel import CoordinatorDiedError, MemberChannel
from flatweights.ray.core._peer import PeerState
from flatweights.ray.core._requests import Request
from flatweights.ray.members._member import Member
from flatweights.ray.members._node_agent import NodeAgent, NodeAgentActor, NodeAgentResponse
from flatweights.ray.members._platform import PLATFORM
from flatweights.ray.members._sessions import Session, StoreRequest
from flatweights.ray.peers._by_channel import GroupChannels
from flatweights.ray.support._errors import IN_FORK

PATIENCE = 60.0


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as made:
        yield made


def mean_of(member: Member, value: float, **options: Any) -> tuple[float, Any]:
    result = member.average(np.array([value]), **options)
    return float(result.weights[0]), result


def call_all(
    threads: ThreadPoolExecutor, members: list[Member], values: list[float], **options: Any
) -> list[tuple[float, Any]]:
    calls = [
        threads.submit(mean_of, member, value, **options)
        for member, value in zip(members, values, strict=True)
    ]
    return [call.result(PATIENCE) for call in calls]


def finish(local: LocalProcessGroup, *members: Member) -> None:
    """Let all members leave; then the coordinator must end."""
    for member in members:
        member.leave()
    local.thread.join(PATIENCE)
    assert not local.thread.is_alive()


def test_a_root_that_joins_again_sends_its_weights_in_time_for_any_broadcast(
    threads: ThreadPoolExecutor,
) -> None:
    """All take a root's weights as they are, so no average makes them stale."""
    local = LocalProcessGroup(2)
    first, second = local.join_all()
    for k in range(2):
        for one in (first, second):
            threads.submit(one.broadcast if k else one.average, {f"{k}": np.ones(2)})
    local.wait_until(lambda group: group.calls.number == 2)
    kill(first)
    local.wait_until(lambda group: group.rendezvous.sessions[0].state is PeerState.DEAD)
    second.average({"0": np.ones(2)}, min_results=1)
    again = local.join(0)
    assert again.average({"0": np.zeros(2)}, min_results=1).late == (0,)
    sent = [threads.submit(one.broadcast, {"1": np.full(2, 7.0)}) for one in (second, again)]
    assert [one.result(PATIENCE)["1"][0] for one in sent] == [7.0, 7.0]
    finish(local, again, second)


def test_an_average_that_needs_more_members_than_are_left_says_so(
    threads: ThreadPoolExecutor,
) -> None:
    local = LocalProcessGroup(3)
    *members, third = local.join_all()
    third.leave()
    calls = [threads.submit(mean_of, one, 1.0, min_results=3) for one in members]
    for call in calls:
        with pytest.raises(WorkerError, match="min_results: expected 3 ranks, got 2: there are no"):
            call.result(PATIENCE)
    finish(local, *members)


def test_a_call_that_raises_keeps_no_memory_that_the_coordinator_maps() -> None:
    local = LocalProcessGroup(1)
    [member] = local.join_all()
    gc.collect()
    gc.disable()
    try:
        for _ in range(8):  # twice as often as there are segments
            with pytest.raises(ValueError, match="NaN"):
                member.average(np.full(1000, np.nan))
        assert mean_of(member, 1.0)[0] == 1.0
    finally:
        gc.enable()
    finish(local, member)


def in_state(
    local: LocalProcessGroup, threads: ThreadPoolExecutor, state: PeerState
) -> tuple[Callable[[], None], Any, Future[Any] | None]:
    """Bring rank 0 of a process group of three into ``state``, and the other two to `WORKING`.

    Returns:
        A function that kills it, the other two members, and its call.
    """
    others = [local.enter(1), local.enter(2)]
    channels = [local.channel(entry) for entry in others]
    if state is PeerState.ENTERING:
        entry = local.enter(0)
        entry.join_reply.result(PATIENCE)

        def die() -> None:
            local.lose(entry, MemberDiedError("it was killed"))

        return die, (others, channels), None
    if state is PeerState.READY:
        entry = local.enter(0)
        channel = local.channel(entry)
        return channel.close, (others, channels), None
    members = [threads.submit(local.member, e, k) for e, k in zip(others, channels, strict=True)]
    first = local.join(0)
    both = [member.result(PATIENCE) for member in members]
    call_all(threads, [first, *both], [1.0, 2.0, 3.0])
    if state is PeerState.WORKING:
        return lambda: kill(first), both, None
    asked = threads.submit(mean_of, first, 50.0, min_results=1)
    local.until_asked(0)
    return lambda: kill(first), both, asked


@pytest.mark.parametrize(
    "state", [PeerState.ENTERING, PeerState.READY, PeerState.WORKING, PeerState.ASKING]
)
def test_a_death_and_a_successor_in_each_state(
    threads: ThreadPoolExecutor, state: PeerState
) -> None:
    """The successor comes before or after the death; the others ask before, between or after."""
    for events in itertools.permutations(["die", "enter", "ask"]):
        is_open = state in (PeerState.WORKING, PeerState.ASKING)
        if not is_open and events[2] != "ask":
            continue  # nobody asks before all have joined
        local = LocalProcessGroup(3)
        die, others, asked = in_state(local, threads, state)
        joining: Future[Member] | None = None
        calls: list[Future[Any]] = []
        for event in events:
            if event == "die":
                die()
            elif event == "enter":
                joining = threads.submit(local.join, 0)
            else:
                if not is_open:
                    entries = zip(*others, strict=True)
                    both = [threads.submit(local.member, *entry) for entry in entries]
                    others = [member.result(PATIENCE) for member in both]
                calls = [threads.submit(mean_of, one, 5.0, min_results=1) for one in others]
        assert joining is not None
        again, number = joining.result(PATIENCE), 0
        while number < 1 + is_open:  # until it has the response that the others wait for
            value, result = mean_of(again, -10.0, min_results=1)
            number = result.number
        for call in calls:
            mean, got = call.result(PATIENCE)
            assert (mean, got.used) == (value, result.used), events
        # A member that requests and dies is part of the call if the call closes before the death is
        # seen.
        whole = {0.0, 20.0} if state is PeerState.ASKING else {0.0}
        assert value in {(0, 1, 2): whole, (1, 2): {5.0}}[result.used], events
        if asked is not None:
            asked.exception(PATIENCE)
        finish(local, again, *others)


def test_what_leaves_a_with_is_named_in_all_others(
    threads: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    local = LocalProcessGroup(2)
    first, second = local.join_all()
    with pytest.raises(RuntimeError, match="bug"), second:
        raise RuntimeError("my own bug")
    with (
        caplog.at_level(logging.WARNING, "flatweights"),
        pytest.raises(WorkerError, match=r"^rank 1 left with RuntimeError: my own bug") as info,
        first,
    ):
        first.average(np.ones(1))
    assert isinstance(info.value.failed[1], MemberDiedError)
    local.thread.join(PATIENCE)
    told = [record.message for record in caplog.records if "rank" in record.message]
    assert told == [
        "process group 'local': rank 1 left with RuntimeError: my own bug (process of rank 1)"
    ]


class TheState:
    """The state of a training: one number, unless there are ``count`` of them."""

    def __init__(self, value: float, count: int = 1) -> None:
        self.layout = Layout.of([np.zeros(count)])
        self.value = np.full(count, value)

    def gather_into(self, buffer: Any) -> None:
        self.layout.packed_views(buffer)[0][:] = self.value

    def scatter(self, buffer: Any) -> None:
        self.value = self.layout.packed_views(buffer)[0].copy()


def test_the_log_names_ranks_that_are_lost_and_those_that_are_back_once(
    threads: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    local = LocalProcessGroup(3)
    first, second, third = local.join_all()
    options: dict[str, Any] = {"min_results": 1}
    with caplog.at_level(logging.WARNING, "flatweights"):
        call_all(threads, [first, second, third], [1.0, 2.0, 3.0])
        asked = threads.submit(mean_of, first, 1.0, **options)
        local.until_asked(0)
        mean_of(second, 2.0, timeout=0.01, **options)
        asked.result(PATIENCE)
        call_all(threads, [first, second], [1.0, 2.0], **options)
        mean_of(third, 3.0)  # the last response
        call_all(threads, [first, second, third], [1.0, 2.0, 3.0])
        kill(third)
        for _ in range(2):
            call_all(threads, [first, second], [1.0, 2.0], **options)
        third = local.join(2)
        old, new = TheState(7.0), TheState(0.0)
        asked = threads.submit(mean_of, third, 1.0, state=new, **options)
        local.wait_until(lambda group: group.calls.waiting.recovering)
        call_all(threads, [first, second], [1.0, 2.0], state=old, **options)
        assert asked.result(PATIENCE)[1].healed == (2,)
        assert new.value == 7.0
        finish(local, first, second, third)
    late, *rest = [record.message.partition(": ")[2] for record in caplog.records]
    assert late.startswith("2 of 3 ranks, 1 late (2)")
    assert rest == [
        "rank 2 is back",
        "rank 2: MemberDiedError: process of rank 2 has ended without leave()",
        "rank 2 is healed, with the state of rank 0",
    ]


def test_a_late_member_gets_no_average_of_a_call_with_another_state(
    threads: ThreadPoolExecutor,
) -> None:
    local = LocalProcessGroup(2)
    first, late = members = local.join_all()
    one, other = TheState(1.0, count=1), TheState(2.0, count=2)
    options: dict[str, Any] = {"min_results": 1, "timeout": PATIENCE}
    call_all(threads, members, [10.0, 10.0], state=one, **options)
    call_all(threads, members, [11.0, 11.0], state=other, **options)
    options["timeout"] = 0.01
    assert mean_of(first, 12.0, state=other, **options)[1].late == (1,)
    assert mean_of(first, 13.0, state=one, **options)[1].late == (1,)
    value, result = mean_of(late, 99.0, state=other, **options)
    assert (value, result.late, result.healed) == (12.0, (1,), ())
    value, result = mean_of(late, 99.0, state=one, **options)
    assert (value, result.late, result.healed) == (13.0, (1,), ())
    finish(local, first, late)


LARGE = 10_000  # elements: more bytes than a response that is kept longer than others


def layer_of(member: Member, k: int, value: float, **options: Any) -> tuple[float, Any]:
    result = member.average({f"layer {k}": np.full(LARGE, value)}, min_results=1, **options)
    return float(result.weights[f"layer {k}"][0]), result


def test_small_responses_of_many_kinds_of_call_are_kept(threads: ThreadPoolExecutor) -> None:
    local = LocalProcessGroup(2)
    first, late = local.join_all()
    for value in (1.0, 2.0):
        for k in range(40):
            one = {f"number {k}": np.array([value + k])}
            assert first.average(one, min_results=1, timeout=0.01).late == (1,)
    for k in range(40):
        result = late.average({f"number {k}": np.zeros(1)}, min_results=1, timeout=PATIENCE)
        assert (result.weights[f"number {k}"][0], result.late) == (2.0 + k, (1,))
    finish(local, first, late)


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), LARGE])
def test_a_broadcast_at_the_start_is_kept_whatever_calls_follow(
    size: int, threads: ThreadPoolExecutor
) -> None:
    local = LocalProcessGroup(2)
    members = local.join_all()
    for call in [
        threads.submit(one.broadcast, {"model": np.full(size, 1.0 + one.rank)}) for one in members
    ]:
        call.result(PATIENCE)
    kill(members[1])
    local.wait_until(lambda group: group.rendezvous.sessions[1].state is PeerState.DEAD)
    for k in range(12):
        layer_of(members[0], k, float(k))
    for step in range(1100):  # more kinds than are known
        members[0].all_gather(step, f"score of step {step}", min_results=1)
    again = local.join(1)
    asked = threads.submit(again.broadcast, {"model": np.zeros(size)})
    assert asked.result(PATIENCE)["model"][0] == 1.0
    finish(local, members[0], again)


def test_a_root_takes_part_in_a_broadcast_that_waits_for_it(threads: ThreadPoolExecutor) -> None:
    local = LocalProcessGroup(2)
    members = local.join_all()
    model = {"model": np.full(LARGE, 1.0)}
    for call in [threads.submit(one.broadcast, model) for one in members]:
        call.result(PATIENCE)
    kill(members[0])
    local.wait_until(lambda group: group.rendezvous.sessions[0].state is PeerState.DEAD)
    for k in range(12):  # the response of the broadcast is no longer kept
        members[1].broadcast({f"layer {k}": np.full(LARGE, 1.0)}, root=1)
    again = local.join(0)
    asked = threads.submit(members[1].broadcast, model)
    local.until_asked(1)
    assert again.broadcast({"model": np.full(LARGE, 2.0)})["model"][0] == 2.0
    assert asked.result(PATIENCE)["model"][0] == 2.0
    finish(local, again, members[1])


def test_the_others_learn_why_a_root_takes_no_part(threads: ThreadPoolExecutor) -> None:
    local = LocalProcessGroup(3, min_size=2, grace=0.0)
    first, second = (threads.submit(local.join, rank) for rank in range(2))
    root, other = first.result(PATIENCE), second.result(PATIENCE)
    root.lacks_state = True
    state = TheState(1.0)
    asked = threads.submit(mean_of, root, 1.0, state=state, min_results=1)
    local.wait_until(lambda group: group.calls.waiting.recovering)
    with pytest.raises(
        WorkerError, match=r"^rank 0: RuntimeError: it waits for the others to call"
    ):
        other.broadcast(np.ones(1))
    with pytest.raises(
        WorkerError, match=r"^rank 2: RuntimeError: it has not joined the process group"
    ):
        other.broadcast(np.ones(1), root=2)
    mean_of(other, 1.0, state=state, min_results=1)
    asked.result(PATIENCE)
    root.leave()
    local.wait_until(lambda group: not group.rendezvous.sessions[0].is_present)
    with pytest.raises(WorkerError, match=r"^rank 0: RuntimeError: it has left"):
        other.broadcast(np.ones(1))
    finish(local, other)


def test_an_interrupted_call_is_named(threads: ThreadPoolExecutor) -> None:
    local = LocalProcessGroup(2)
    first, second = local.join_all()

    def interrupt(*args: Any) -> Any:
        raise KeyboardInterrupt

    second._coordinator._channel.response = interrupt  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        second.average(np.ones(1))
    local.wait_until(lambda group: group.rendezvous.sessions[1].state is PeerState.DEAD)
    with pytest.raises(WorkerError, match=r"^rank 1 left with KeyboardInterrupt"):
        first.average(np.ones(1))
    finish(local, first)


def test_a_response_that_cannot_be_read_is_named(threads: ThreadPoolExecutor) -> None:
    local = LocalProcessGroup(2)
    first, second = local.join_all()

    def read() -> Any:
        raise ChannelError("Too many open files")

    second._coordinator._channel.read = read  # type: ignore[attr-defined]
    asked = threads.submit(first.average, np.ones(1))
    with pytest.raises(MemberError, match="could not be read: Too many open files"):
        second.average(np.ones(1))
    asked.result(PATIENCE)
    local.wait_until(lambda group: group.rendezvous.sessions[1].state is PeerState.DEAD)
    with pytest.raises(WorkerError, match=r"^rank 1 left with ChannelError: Too many open files"):
        first.average(np.ones(1))
    finish(local, first)


class Breaking(TheState):
    """Variables, or a state, that cannot be set the first time."""

    def __init__(self, value: float, error: BaseException, count: int = 1) -> None:
        super().__init__(value, count)
        self.errors = [error]

    def scatter(self, buffer: Any) -> None:
        if self.errors:
            raise self.errors.pop()
        super().scatter(buffer)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("average_variables", KeyboardInterrupt()),
        ("broadcast_variables", RuntimeError("the device is lost")),
    ],
)
def test_a_member_that_cannot_apply_an_response_ends(
    threads: ThreadPoolExecutor, call: str, error: BaseException
) -> None:
    """Its weights would lack that response in all later averages."""
    local = LocalProcessGroup(2)
    first, second = local.join_all()
    other = threads.submit(getattr(first, call), TheState(1.0))
    with pytest.raises(type(error)):
        getattr(second, call)(Breaking(2.0, error))
    other.result(PATIENCE)
    with pytest.raises(MemberError, match=f"broken off by {type(error).__name__}"):
        second.average(np.ones(1))
    value, result = mean_of(first, 5.0, min_results=1)
    assert (value, list(result.failed)) == (5.0, [1])
    finish(local, first)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("the device is lost")])
def test_a_member_that_cannot_read_its_variables_has_not_called(
    threads: ThreadPoolExecutor, error: BaseException
) -> None:
    class Unreadable(TheState):
        def gather_into(self, buffer: Any) -> None:
            raise error

    local = LocalProcessGroup(2)
    first, second = local.join_all()
    one, other = TheState(1.0), TheState(3.0)
    asked = threads.submit(first.average_variables, one)
    with pytest.raises(type(error)):
        second.average_variables(Unreadable(5.0))
    second.average_variables(other)
    assert asked.result(PATIENCE).used == (0, 1)
    assert [*one.value, *other.value] == [2.0, 2.0]
    finish(local, first, second)


@pytest.mark.parametrize(
    ("broken", "error"),
    [("variables", RuntimeError("the device is lost")), ("state", KeyboardInterrupt())],
)
def test_a_member_that_cannot_apply_an_response_lacks_the_state(
    threads: ThreadPoolExecutor, broken: str, error: BaseException
) -> None:
    local = LocalProcessGroup(2)
    first, second = local.join_all()
    gradients = [TheState(1.0), TheState(3.0)]
    states = [TheState(7.0, count=2), TheState(0.0, count=2)]
    if broken == "state":  # it breaks while it is healed
        states[1] = Breaking(0.0, error, count=2)
        second.lacks_state = True
    else:
        gradients[1] = Breaking(3.0, error)

    def call_both() -> list[Future[Any]]:
        calls = [
            threads.submit(one.average_variables, gradient, state=state, min_results=1)
            for one, gradient, state in zip((first, second), gradients, states, strict=True)
        ]
        wait(calls, PATIENCE)
        return calls

    before = call_both()
    assert before[0].exception() is None
    assert before[1].exception() is error
    assert second.lacks_state
    local.wait_until(lambda group: group.rendezvous.sessions[1].state is PeerState.WORKING)
    states[0].value[:] = 8.0
    asked = threads.submit(second.average_variables, gradients[1], state=states[1], min_results=1)
    local.wait_until(lambda group: group.calls.waiting.recovering)
    result = first.average_variables(gradients[0], state=states[0], min_results=1)
    assert asked.result(PATIENCE).healed == result.healed == (1,)
    assert states[1].value.tolist() == [8.0, 8.0]
    assert [one.lacks_state for one in (first, second)] == [False, False]
    finish(local, first, second)


def test_a_member_whose_leave_is_interrupted_is_waited_for_no_longer(
    threads: ThreadPoolExecutor,
) -> None:
    local = LocalProcessGroup(2)
    first, second = local.join_all()

    def interrupt() -> None:
        raise KeyboardInterrupt

    second._coordinator.leave = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        second.leave()
    local.wait_until(lambda group: group.rendezvous.sessions[1].state is PeerState.DEAD)
    finish(local, first)


def test_a_signal_handler_in_a_call_is_told_to_leave_later(threads: ThreadPoolExecutor) -> None:
    local = LocalProcessGroup(2)
    first, second = local.join_all()

    def handle(*args: Any) -> None:
        first.leave()

    def send() -> None:
        local.until_asked(0)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)  # type: ignore[arg-type]

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        sent = threads.submit(send)
        with pytest.raises(RuntimeError, match="In a signal handler, set a flag"):
            first.average(np.ones(1))
        sent.result(PATIENCE)
    finally:
        signal.signal(signal.SIGUSR1, before)
    local.wait_until(lambda group: group.rendezvous.sessions[0].state is PeerState.DEAD)
    finish(local, second)


def test_members_that_end_with_their_training_are_no_deaths(
    threads: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    local = LocalProcessGroup(2)
    members = local.join_all()
    with caplog.at_level(logging.WARNING, "flatweights"):
        call_all(threads, members, [1.0, 2.0])
        for member in members:
            kill(member)
        local.thread.join(PATIENCE)
    assert not caplog.records


def test_all_calls_of_a_member_are_refused_in_a_fork(threads: ThreadPoolExecutor) -> None:
    local = LocalProcessGroup(2)
    first, second = local.join_all()
    asked = threads.submit(mean_of, first, 1.0)  # so a thread that no fork has holds the lock
    local.until_asked(0)
    weights = np.ones(1)
    calls: list[Callable[[], Any]] = [
        lambda: first.average(weights),
        lambda: first.average_variables(None),  # type: ignore[arg-type]
        lambda: first.broadcast(weights),
        lambda: first.broadcast_variables(None),  # type: ignore[arg-type]
        first.leave,
        lambda: first.__exit__(None, None, None),
    ]
    child = os.fork()
    if child == 0:
        texts = set()
        for call in calls:
            try:
                call()
            except MemberError as error:
                texts.add(str(error))
        first.__exit__(KeyError, KeyError(), None)
        os._exit(0 if texts == {f"this process is a fork of the member's. {IN_FORK}"} else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert mean_of(second, 2.0)[0] == 1.5
    assert asked.result(PATIENCE)[0] == 1.5
    finish(local, first, second)


def test_a_coordinator_that_fails_tells_waiting_members_why(
    threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("no room for the average")

    local = LocalProcessGroup(2)
    members = local.join_all()
    call_all(threads, members, [1.0, 2.0])
    monkeypatch.setattr(local.group, "_transports", fail)
    for call in [threads.submit(mean_of, member, 1.0) for member in members]:
        with pytest.raises(
            MemberError, match="coordinator has failed: MemoryError: no room for the"
        ):
            call.result(PATIENCE)
    local.thread.join(PATIENCE)
    assert not local.thread.is_alive()


def test_a_member_whose_response_cannot_be_put_into_the_store_is_told(
    threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put(_: Any) -> None:
        raise ray.exceptions.ObjectStoreFullError("no room")

    local = LocalProcessGroup(2)
    entries = [local.enter(rank) for rank in range(2)]
    post, expect = local.group.queue.post, local.group.expect
    started: Future[Any] = Future()  # of a member without a channel
    assert entries[1].join_reply.result(PATIENCE).rank == 1
    post(expect, entries[1].token, started)
    other = local.member(entries[0], local.channel(entries[0]))
    started.result(PATIENCE)
    weights = FlatWeights({"w": np.ones(3)})
    template = Template.of(weights, "weights")
    monkeypatch.setattr(ray, "put", put)
    average = threads.submit(other.average, weights)
    local.until_asked(0)
    request = Request("average", template.layout.digest)
    body = pickle.dumps((tuple(request), template.layout.pickled))
    response: Future[Any] = Future()
    post(local.group.put, entries[1].token, StoreRequest(body, weights.buffer, response))
    assert average.result(PATIENCE).used == (0, 1)
    with pytest.raises(MemberDiedError, match="ObjectStoreFullError: no room"):
        response.result(PATIENCE)
    finish(local, other)


class TheCoordinator:
    """The coordinator of a node agent: it notes the calls of methods that the node agent makes."""

    def __init__(self) -> None:
        self.calls: Queue[tuple[str, tuple[Any, ...]]] = Queue()
        self.channels = GroupChannels()  # they close with the last reference

    def __getattr__(self, name: str) -> Any:
        def remote(*args: Any) -> Any:
            self.calls.put((name, args))
            return SimpleNamespace(future=Future)

        return SimpleNamespace(remote=remote)

    def next(self, name: str) -> tuple[Any, ...]:
        called, args = self.calls.get(timeout=PATIENCE)
        assert called == name
        return args


@pytest.fixture
def node_agent() -> Iterator[tuple[NodeAgent, TheCoordinator]]:
    coordinator = TheCoordinator()
    end: Any = SimpleNamespace(models={})
    handle: Any = coordinator
    made = NodeAgent(handle, handle.hand.remote, coordinator.channels, end)
    yield made, coordinator
    made.queue.post(sys.exit)  # its thread ends
    for thread in threading.enumerate():
        if thread.name == "flatweights-node-agent":
            thread.join(PATIENCE)


def channel_of(node_agent: NodeAgent, coordinator: TheCoordinator, rank: int) -> MemberChannel:
    """Return the channel of a member of the node agent."""
    token = b"%016d" % rank
    channel = MemberChannel(
        node_agent.queue.call(node_agent.enter, rank, f"process of rank {rank}", token), token
    )
    node_agent.queue.call(node_agent.attach, token, channel.mailbox.nonce)
    assert coordinator.next("hand")[0][0].token == token
    return channel


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # `exit`
def test_members_of_a_node_agent_that_cannot_get_an_response_are_told(
    node_agent: tuple[NodeAgent, TheCoordinator], monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(_: Any, timeout: float | None) -> None:
        raise ray.exceptions.ObjectLostError("11", "the coordinator", "")

    made, coordinator = node_agent
    channel = channel_of(made, coordinator, 1)
    monkeypatch.setattr(ray, "get", get)
    response = NodeAgentResponse(3, b"response", [None], [b"%016d" % 1])
    made.queue.post(made.post, response)
    token, why = coordinator.next("lose")
    assert token == b"%016d" % 1
    assert "process of rank 1: its response did not come: ObjectLostError" in str(why)
    with pytest.raises(CoordinatorDiedError):
        channel.response(PATIENCE)
    channel.close()


def test_a_request_with_the_wrong_number_of_bytes_ends_its_member_alone(
    node_agent: tuple[NodeAgent, TheCoordinator],
) -> None:
    """It would otherwise be averaged, or end the thread that all members of the node wait for."""
    made, coordinator = node_agent
    channels = [channel_of(made, coordinator, rank) for rank in range(2)]
    tokens = [b"%016d" % rank for rank in range(2)]
    made.queue.call(made.post, NodeAgentResponse(1, b"first", None, tokens))
    weights = FlatWeights({"w": np.ones(100_000)})
    body = pickle.dumps((tuple(Request("average", weights.layout.digest)), weights.layout.pickled))
    for channel, more in zip(channels, (64, 0), strict=True):
        assert channel.response(PATIENCE)[0] == b"first"
        channel.request(body, np.zeros(weights.buffer.nbytes + more, np.uint8), is_urgent=True)
    token, why = coordinator.next("lose")
    assert token == tokens[0]
    assert "expected 800,000 bytes of weights, got 800,064" in str(why)
    assert coordinator.next("hand")[0][0].token == tokens[1]
    for channel in channels:
        channel.close()


@pytest.mark.parametrize("said", [{"operation": "heal"}, {"operation": "average", "lacks": True}])
def test_a_request_without_weights_passes_a_node_agent(
    node_agent: tuple[NodeAgent, TheCoordinator], said: dict[str, Any]
) -> None:
    made, coordinator = node_agent
    channel = channel_of(made, coordinator, 1)
    made.queue.call(made.post, NodeAgentResponse(1, b"first", None, [b"%016d" % 1]))
    assert channel.response(PATIENCE)[0] == b"first"
    layout = Layout.of({"w": np.ones(100_000)})
    channel.request(
        pickle.dumps((tuple(Request(**said, digest=layout.digest)), layout.pickled)),
        None,
        is_urgent=True,
    )
    token, body, buffer = coordinator.next("hand")[0][0]
    session = Session(1, "process of rank 1", token, state=PeerState.WORKING)
    session.receive(StoreRequest(body, buffer, None))
    assert session.poll()
    assert session.fault is None
    channel.close()


def test_the_coordinator_learns_why_a_node_agent_has_failed(
    node_agent: tuple[NodeAgent, TheCoordinator], caplog: pytest.LogCaptureFixture
) -> None:
    made, _ = node_agent

    def fail() -> None:
        raise MemoryError("no room")

    stays = SimpleNamespace(_node_agent=made, _platform=PLATFORM)
    made.queue.post(fail)
    with pytest.raises(MemoryError, match="no room"):
        NodeAgentActor.stay(cast("Any", stays))
    assert "the agent of a node of a process group has failed" in caplog.text


def test_a_call_says_that_another_thread_has_ended_the_member() -> None:
    group = LocalProcessGroup(2)
    first, _ = group.join_all()
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(first.average, np.ones(3))
        group.until_asked(0)
        with pytest.raises(ValueError, match="diverged"), first:
            raise ValueError("diverged")
        with pytest.raises(MemberError, match="this member ended with ValueError"):
            waits.result(60)


def test_a_dead_coordinator_is_named_if_a_call_has_to_send_memory(
    threads: ThreadPoolExecutor,
) -> None:
    members = LocalProcessGroup(2).join_all()
    call_all(threads, members, [1.0, 2.0])
    kill(members[0])
    with pytest.raises(MemberError, match=r"process group 'local': the coordinator has ended$"):
        members[0].average(np.ones(100_000))
