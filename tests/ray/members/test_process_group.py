"""A process group without an actor: its counts, and members whose coordinator is killed."""

import gc
import json
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from process_groups import LocalProcessGroup, entry_of, with_sessions
from reference import assert_same, clean_environment, same_bits

import flatweights as fw
from flatweights import FlatWeights
from flatweights.ray import CallsDifferError, MemberDiedError, MemberError, _clock
from flatweights.ray.channels._member_channel import MemberChannel
from flatweights.ray.core._events import Ended, Event, Gave, Tick
from flatweights.ray.core._requests import Request
from flatweights.ray.members._client import ChannelClient, Identity
from flatweights.ray.members._config import GroupConfig
from flatweights.ray.members._member import Member
from flatweights.ray.members._platform import PLATFORM
from flatweights.ray.members._process_group import ProcessGroup
from flatweights.ray.members._rendezvous import JoinReply
from flatweights.ray.members._sessions import RemoteWeights, StoreRequest
from flatweights.ray.nodes._plan import check_reduce_dtype
from flatweights.ray.results._report import METRICS, RECEIVED, ROUND, SENT
from flatweights.ray.support import _failpoints
from flatweights.robust import CenteredClipping

HELPERS = Path(__file__).parents[2] / "helpers"
COORDINATOR = """
import json, os, signal, time
from process_groups import with_sessions
from flatweights.ray.support import _failpoints
from flatweights.ray.members._process_group import ProcessGroup
from flatweights.ray.members._config import GroupConfig

orders = open(0, "rb", buffering=0)  # children read on where their siblings have stopped
for point in _failpoints.COORDINATOR:
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        continue
    group = ProcessGroup("doomed", GroupConfig.of(2), "here", None)
    entered = with_sessions(group, 0, 1)
    told = [[entry.token.hex(), *reply[:2], reply.address.hex()] for entry, reply in entered]
    print(json.dumps(told), flush=True)
    for (entry, _), nonce in zip(entered, json.loads(orders.readline())):
        group.attach(entry.token, bytes.fromhex(nonce))

    def die(reached):
        if reached == point and group.calls.number >= 3:
            os.kill(os.getpid(), signal.SIGKILL)

    _failpoints.hook = die
    group.run()
"""


def test_members_of_a_killed_coordinator_are_told() -> None:
    def call_till_the_end(
        rank: int, token: bytes, join_reply: JoinReply, channel: MemberChannel
    ) -> int:
        coordinator = ChannelClient(None, Identity(token, "member"), channel, join_reply.session)
        member = Member("doomed", coordinator, join_reply, coordinator.start(60.0))
        weights = {"w": np.full(500, float(rank))}
        calls = 0
        while True:
            try:
                assert member.average(weights).weights["w"][0] == 0.5
            except MemberError:
                break
            calls += 1
            time.sleep(0.001 * rank)  # so that the coordinator waits, too
        with pytest.raises(MemberError, match="the coordinator"):
            member.average(weights)
        return calls

    coordinator = subprocess.Popen(
        [sys.executable, "-c", COORDINATOR],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=clean_environment(PYTHONPATH=str(HELPERS)),
    )
    assert coordinator.stdin is not None
    assert coordinator.stdout is not None
    with coordinator, ThreadPoolExecutor(2) as threads:
        for _ in _failpoints.COORDINATOR:
            told = json.loads(coordinator.stdout.readline())
            tokens = [bytes.fromhex(token) for token, *_ in told]
            join_replies = [
                JoinReply(rank, session, bytes.fromhex(a)) for _, rank, session, a in told
            ]
            channels = [
                MemberChannel(t.address or b"", k)
                for t, k in zip(join_replies, tokens, strict=True)
            ]
            coordinator.stdin.write(
                json.dumps([channel.mailbox.nonce.hex() for channel in channels]) + "\n"
            )
            coordinator.stdin.flush()
            calls = list(threads.map(call_till_the_end, range(2), tokens, join_replies, channels))
            assert min(calls) >= 2
        coordinator.stdin.close()
    assert coordinator.returncode == 0


def test_members_agree_on_the_configuration() -> None:
    group = ProcessGroup("agreed", GroupConfig.of(2, "float32", 1, 9.0), "here", None)
    refused = {
        GroupConfig.of(3, "float32", 1, 9.0): "size: expected 2, as the others, got 3",
        GroupConfig.of(
            2, "float64", 1, 9.0
        ): "reduce_dtype: expected 'float32', as the others, got 'float64'",
        GroupConfig.of(2, "float32"): "min_size: expected 1, as the others, got 2",
        GroupConfig.of(2, "float32", 1, 8.0): "grace: expected 9.0, as the others, got 8.0",
    }
    for config, said in refused.items():
        entry = entry_of(0, config)
        group.rendezvous.enter(entry)
        group.rendezvous.admit()
        assert str(entry.join_reply.exception()) == said
        assert entry.over.done()
    group._channels.close()
    with pytest.raises(ValueError, match="reduce_dtype: expected 'float64' or 'float32', got 'f4'"):
        check_reduce_dtype("f4")


def test_a_coordinator_sleeps_while_members_are_still_to_join() -> None:
    group = ProcessGroup("quiet", GroupConfig.of(2), "here", None)
    [(entry, join_reply)] = with_sessions(group, 0)
    channel = MemberChannel(join_reply.address or b"", entry.token)
    group.attach(entry.token, channel.mailbox.nonce)
    sleeps, poll = [], group._channels._poll

    class Poll:
        def poll(self, seconds: float) -> Any:
            sleeps.append(seconds)
            group.queue.post(lambda: None)  # so that it wakes
            return poll.poll(seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group._channels, "_poll", Poll())
        group._step()
    assert len(sleeps) == 1
    channel.close()
    group._channels.close()


def test_a_coordinator_does_not_wait_once_the_last_member_has_died(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may learn of that when it posts a state, at the beginning of a step."""
    group = ProcessGroup("over", GroupConfig.of(1), "here", None)
    [(entry, _)] = with_sessions(group, 0)
    session, waits = group.rendezvous.present[entry.token], list[Any]()
    died = MemberDiedError("it died")
    monkeypatch.setattr(group, "_welcome", lambda: group._lose(session, died))
    monkeypatch.setattr(group._channels, "wait", lambda *args: waits.append(args))
    group.run()
    assert not waits
    assert entry.over.done()


def test_a_coordinator_does_not_wait_before_it_looks_at_who_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may learn that a member has died when it tells the member that its time is up."""
    group = ProcessGroup("told", GroupConfig.of(2), "here", None)
    with_sessions(group, 0, 1)
    session, receive = group.rendezvous.sessions[1], group._receive

    def tell(event: Event) -> bool:
        if isinstance(event, Tick) and session.is_present:
            group._lose(session, MemberDiedError("it died"))
        return receive(event)

    monkeypatch.setattr(group, "_receive", tell)
    monkeypatch.setattr(group._channels, "wait", lambda *args: pytest.fail("it waits"))
    group._step()
    assert not session.is_present


def test_a_coordinator_counts_its_averages(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[Any] = []
    monkeypatch.setattr(METRICS, "add", lambda *values: counted.append(values))
    local = LocalProcessGroup(1)
    member = local.join(0)
    member.average({"w": np.ones(500)})
    member.broadcast({"w": np.ones(500)})
    member.leave()
    local.thread.join()
    (counts, seconds, used), sent = counted
    assert (used, sent) == (1, ({SENT: 4032},))
    assert counts == {ROUND: 1, RECEIVED: 4032, ("transports", "transport", "shm"): 1}
    assert {"wait", "average"} <= seconds.keys()


def average_all(members: list[Member], models: list[Any], **options: Any) -> list[Any]:
    """Return what each member gets of an average: its model, or its error."""

    def average(rank: int) -> Any:
        mine = {name: values[rank] for name, values in options.items()}
        try:
            return members[rank].average(models[rank], **mine).weights
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(members)) as pool:
        return [*pool.map(average, range(len(members)))]


def test_a_centre_is_of_the_kind_of_the_models() -> None:
    members = LocalProcessGroup(3).join_all()
    kinds: list[Callable[[float], Any]] = [
        lambda x: np.full(3, x),
        lambda x: {"a": np.full(3, x), "n": np.int64(x)},
        lambda x: [np.full((2, 2), x), np.full(3, x, np.float32)],
        lambda x: {"a": [np.full(3, x), {"b": np.full(2, x)}]},
        lambda x: FlatWeights({"a": np.full(3, x)}),
    ]
    for kind in kinds:
        models = [kind(float(rank)) for rank in range(3)]
        centers = average_all(members, models)
        rules = [CenteredClipping(0.5, 2, center) for center in centers]
        expected = FlatWeights([rules[0](models)])
        for got in average_all(members, models, rule=rules):
            assert type(got) is type(models[0])
            assert_same(FlatWeights([got]), expected)
    for error in average_all(members, models, rule=[CenteredClipping(0.5, 2, np.ones(3))] * 3):
        assert "center: expected FlatWeights, got an array" in str(error)
    packed = [CenteredClipping(0.5, 2, models[1])] * 3
    for got in average_all(members, [dict(model) for model in models], rule=packed):
        assert_same(got["a"], packed[0](models)["a"])


def test_a_centre_of_variables_is_of_their_names() -> None:
    class Held:
        layout = fw.Layout.of({"a": np.zeros(3), "seed": np.int64(0)})

        def __init__(self, value: float) -> None:
            self.held = FlatWeights({"a": np.full(3, value), "seed": np.int64(value)})

        def gather_into(self, buffer: Any) -> None:
            buffer[:] = self.held.buffer

        def scatter(self, buffer: Any) -> None:
            self.held.buffer[:] = buffer

    member = LocalProcessGroup(1).join(0)
    for center in ({"a": np.zeros(3), "seed": 0}, FlatWeights({"a": np.zeros(3), "seed": 0})):
        variables = Held(2.0)
        member.average_variables(variables, rule=CenteredClipping(1.0, 1, center))
        assert np.allclose(variables.held["a"], 1 / np.sqrt(3))


def test_members_with_different_centres_all_raise() -> None:
    members = LocalProcessGroup(3).join_all()
    models = [{"a": np.full(3, float(rank)), "seed": np.int64(rank)} for rank in range(3)]
    for other in (None, {"a": np.full(3, 2.0), "seed": np.int64(0)}):
        centers = [models[1], models[1], other]
        rules = [CenteredClipping(0.5, 2, center) for center in centers]
        for error in average_all(members, models, rule=rules):
            assert isinstance(error, CallsDifferError)
            assert "ranks 0, 1: average(layout" in str(error)
            assert "CenteredClipping(radius=0.5, steps=2), center" in str(error)
    # Integers do not count: seeds are each member's own.
    rules = [CenteredClipping(0.5, 2, models[1] | {"seed": np.int64(rank)}) for rank in range(3)]
    for got in average_all(members, models, rule=rules):
        assert_same(got["a"], rules[0](models)["a"])


def test_a_late_member_goes_on_with_the_centre_of_the_others() -> None:
    members = LocalProcessGroup(2).join_all()
    first, late = members

    def rule(center: Any) -> CenteredClipping:
        return CenteredClipping(0.5, 2, center)

    models = [np.zeros(3), np.ones(3)]
    centers = average_all(members, models)
    center = centers[0]
    for _ in range(2):
        found = first.average(models[0], rule=rule(center), timeout=0.0, min_results=1)
        assert found.late == (1,)
        center = found.weights
    found = late.average(models[1], rule=rule(centers[1]), timeout=0.0, min_results=1)
    assert found.late == (1,)
    assert same_bits(found.weights, center)
    rules = [rule(center), rule(found.weights)]
    for got in average_all(members, models, rule=rules):
        assert_same(got, rules[0](models))


def test_a_coordinator_keeps_no_centre_of_earlier_calls() -> None:
    member = LocalProcessGroup(1).join(0)
    model = {"a": np.zeros(5000)}
    for value in range(4):
        center = {"a": np.full(5000, float(value))}
        member.average(model, rule=CenteredClipping(0.25, 3, center))
    gc.collect()
    rules = [one for one in gc.get_objects() if type(one) is CenteredClipping]
    assert not [rule for rule in rules if (rule.radius, rule.steps) == (0.25, 3)]


class Far:
    """A process group whose rank 1 is on another node; the agent of that is played."""

    def __init__(self) -> None:
        self.group = ProcessGroup("far", GroupConfig.of(2), "here", None)
        with_sessions(self.group, 0, 1)
        self.session = self.group.rendezvous.sessions[1]
        forget = SimpleNamespace(remote=lambda token: SimpleNamespace(future=Future))
        handle = SimpleNamespace(forget=forget)
        agent: Any = SimpleNamespace(is_dead=False, handle=handle, platform=PLATFORM)
        self.session.agent = agent

    def report(self) -> None:
        """Have Ray report that the process has died."""
        self.group.note_death(self.session.token, MemberDiedError("Ray says so"))

    def believe(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        """Have the group look at the report, so many seconds later."""
        now = _clock.now()
        with monkeypatch.context() as patch:
            patch.setattr(_clock, "now", lambda: now + seconds)
            self.group.rendezvous.believe_reports()


def test_a_report_is_believed_if_the_agent_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    far = Far()
    far.session.expect(None)
    far.session.told(0)
    far.report()
    assert far.session.is_present
    assert far.group._patience(None) == pytest.approx(10.0, abs=1.0)
    far.believe(monkeypatch, 11.0)
    assert str(far.session.why) == "Ray says so"


def test_nobody_waits_for_a_state_at_an_agent_that_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    far, events, state = Far(), list[Any](), Future[Any]()
    given = FlatWeights({"w": np.arange(5.0)})
    agent: Any = far.session.agent
    # What Ray returns for a call whose result is still to come.
    agent.handle.give = SimpleNamespace(remote=lambda rank: SimpleNamespace(future=lambda: state))
    far.session.expect(None)
    far.session.told(0)
    give = Request("give", given.layout.digest)
    body = pickle.dumps((give.fields, given.layout.pickled))
    far.session.receive(StoreRequest(body, RemoteWeights(None), None))
    assert far.session.poll()
    monkeypatch.setattr(far.group, "_receive", events.append)
    far.group._on_event(far.session)  # while nothing has come
    assert not events
    state.set_result(given.buffer)
    far.group.queue.read()
    assert events == [Gave(far.session)]


@pytest.mark.parametrize(("min_size", "waits"), [(None, True), (1, False)])
def test_a_process_that_has_left_waits_for_the_end(min_size: int | None, waits: bool) -> None:
    """It comes for the next group of this name, unless members of this one come and go."""
    group = ProcessGroup("local", GroupConfig.of(2, min_size=min_size), "here", None)
    left = with_sessions(group, 0, 1)[0][0]
    for session in group.rendezvous.sessions.values():
        session.join()
    group._receive(Ended(group.rendezvous.present[left.token]))
    entries = [entry_of(0, group._config) for _ in range(2)]
    entries[1] = entries[1]._replace(who="another process")
    for entry in entries if waits else entries[:1]:
        group.rendezvous.enter(entry)
    group.rendezvous.admit()
    assert [entry.join_reply.done() for entry in entries] == [not waits, waits]
    if waits:
        assert group.rendezvous.awaited_by(entries[0].token) == ([0, 1], True)
        assert group._patience(None) is None  # it sleeps meanwhile
        group.rendezvous.close()
        with pytest.raises(RuntimeError, match="the process group has ended"):
            entries[0].join_reply.result(0)


def test_a_replacement_gets_the_rank_once_a_report_is_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    far = Far()
    far.session.expect(None)
    far.report()
    entry = entry_of(1, GroupConfig.of(2))
    far.group.rendezvous.enter(entry)
    far.believe(monkeypatch, 11.0)
    far.group.rendezvous.admit()
    assert entry.join_reply.result(0).rank == 1


def test_an_error_of_ray_while_variables_are_read_is_the_users_own() -> None:
    class Remote:
        layout = fw.Layout.of({"a": np.zeros(3)})
        error: Exception | None = ray.exceptions.GetTimeoutError("of an actor of the user's own")

        def gather_into(self, buffer: Any) -> None:
            if self.error is not None:
                raise self.error
            buffer[:] = 0

        def scatter(self, buffer: Any) -> None:
            pass

    with LocalProcessGroup(1).join(0) as member:
        variables = Remote()
        with pytest.raises(ray.exceptions.GetTimeoutError, match="of the user's own"):
            member.average_variables(variables)
        variables.error = None
        assert member.average_variables(variables).number == 1


def test_leave_closes_a_member_whose_end_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = LocalProcessGroup(2).join_all()
    close = ChannelClient.close

    def interrupt(*_: Any) -> None:
        monkeypatch.setattr(ChannelClient, "close", close)
        raise KeyboardInterrupt

    monkeypatch.setattr(ChannelClient, "close", interrupt)
    with pytest.raises(KeyboardInterrupt), second:
        raise ArithmeticError
    second.leave()
    found = first.average(np.zeros(3), min_results=1, timeout=5)
    assert (list(found.failed), found.late) == ([1], ())


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_a_rule_that_would_end_the_coordinator_is_an_error_in_all(error: BaseException) -> None:
    def rule(models: Any) -> Any:
        raise error

    members = LocalProcessGroup(2).join_all()
    models = [np.zeros(3), np.ones(3)]
    for got in average_all(members, models, rule=[rule] * 2):
        assert f"rule rule: {type(error).__name__}" in str(got)
    for got in average_all(members, models):
        assert_same(got, np.full(3, 0.5))
