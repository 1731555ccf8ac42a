"""Members on several nodes, whose agents exchange the members' weights; one program for all.

It checks its results against an oracle, bit for bit, and says the values that the tests compare as
it goes on.
"""

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import ray
from held import Held
from ray_cluster import LEAN, start_lean_cluster
from ray_programs import program
from reference import same_bits

import flatweights as fw
from flatweights.ray import Member, join
from flatweights.robust import Median

pytestmark = pytest.mark.ray(own=True)

LARGE = 150_000  # elements, of which agents exchange pieces
NODE = LEAN | {"object_store_memory": 75 * 2**20, "num_cpus": 1}


@ray.remote(num_cpus=0)
class Puppet:
    def join(self, rank: int, size: int) -> None:
        self.member: Member = join("nodes", rank=rank, size=size)

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(self.member, *args)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def pid(self) -> int:
        return os.getpid()


def model_of(rank: int, size: int = LARGE) -> fw.FlatWeights:
    values = np.random.default_rng(rank).normal(size=size).astype(np.float32)
    return fw.FlatWeights({"a": values[: size // 3], "b": values[size // 3 :], "n": np.arange(3)})


def averaged(member: Member, size: int = LARGE, **options: Any) -> Any:
    return member.average(model_of(member.rank, size), **options)


def heal(member: Member) -> tuple[tuple[int, ...], bytes]:
    """Take steps until one has healed members; return their ranks, and the state."""
    start = -1.0 if member.lacks_state else 1.0
    state = Held(w=np.full(LARGE, start, np.float32), steps=np.zeros(1, np.float32))
    w, steps = state.arrays.values()
    while True:
        result = member.average({"g": w + steps}, min_results=1, state=state)
        w -= result.weights["g"]
        steps += 1
        if result.healed:
            return result.healed, w.tobytes() + steps.tobytes()


def averaged_spoiled(member: Member, not_finite: int, **options: Any) -> Any:
    model = model_of(member.rank)
    if member.rank == not_finite:
        model["b"][7] = np.nan
    return member.average(model, **options)


def averaged_without_weight(member: Member, not_finite: int) -> Any:
    """Average where only the one that is not finite has a weight."""
    weight = float(member.rank == not_finite)
    return averaged_spoiled(member, not_finite, weight=weight, nonfinite="skip")


def broadcasted(member: Member, root: int) -> Any:
    return member.broadcast(model_of(member.rank), root=root)


def gathered(member: Member, size: int) -> Any:
    return member.all_gather(bytes([member.rank]) * size).weights


def averaged_in_float32(member: Member) -> Any:
    with join("narrow", rank=member.rank, size=member.size, reduce_dtype="float32") as other:
        return averaged(other)


def close_streams(member: Member) -> None:
    """Make the agent of this node stop listening."""
    agent = member._coordinator._actor
    ray.get(agent.__ray_call__.remote(lambda agent: agent.end._streams.close()))


def lacks_the_state(member: Member, lacks: bool) -> None:
    member.lacks_state = lacks


def die_in_give(member: Member) -> None:
    """Have the agent of this node die when it is asked for a state: the weights are smaller."""
    most = 4 * LARGE

    def patch(agent: Any) -> None:
        def give(rank: int) -> Any:
            model = agent.end.models[rank]
            if model.nbytes > most:
                os.kill(os.getpid(), signal.SIGKILL)
            return model

        agent._result = give

    ray.get(member._coordinator._actor.__ray_call__.remote(patch))


def fail_node_agent(member: Member) -> None:
    """End the thread of the agent of this node, to which all its members have channels."""
    agent = member._coordinator._actor
    ray.get(agent.__ray_call__.remote(lambda agent: agent._node_agent.queue.post(divmod, 1, 0)))


def agent_of(member: Member) -> Any:
    return member._coordinator._actor


def has_link(agent: Any) -> bool:
    has: bool = ray.get(agent.__ray_call__.remote(lambda agent: agent._link.has_socket))
    return has


def refuse(*_: object) -> None:
    raise OSError("a firewall")


def averages(member: Member, count: int) -> list[Any]:
    return [averaged(member, 100) for _ in range(count)]


def alive() -> dict[int, tuple[str, str]]:
    """Return class and node of all actors that are alive, by process."""
    actors = ray._private.state.actors().values()
    return {
        a["Pid"]: (a["ActorClassName"], a["Address"]["NodeID"])
        for a in actors
        if a["State"] == "ALIVE"
    }


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def meet_on_nodes() -> None:
    cluster = start_lean_cluster(resources={"node0": 9}, **NODE)
    for node in (1, 2):
        cluster.add_node(resources={f"node{node}": 9}, **NODE)
    cluster.wait_for_nodes()
    places = (0, 1, 1, 1, 2)
    puppet_of: Any = Puppet
    puppets = [puppet_of.options(resources={f"node{node}": 1}).remote() for node in places]
    size = len(puppets)
    joined = [puppets[0].join.remote(0, size)]  # the first member has the coordinator on its node
    while "Coordinator" not in {kind for kind, _ in alive().values()}:
        time.sleep(0.05)
    joined += [puppet.join.remote(rank, size) for rank, puppet in enumerate(puppets) if rank]
    ray.get(joined)
    say(joined=True)

    def call(function: Any, *args: Any) -> list[Any]:
        got: list[Any] = ray.get([puppet.run.remote(function, *args) for puppet in puppets])
        return got

    def check(rounds: list[Any], expected: Any, used: Any = range(size)) -> Any:
        for result in rounds:
            assert tuple(result.used) == tuple(used), result
            assert same_bits(result.weights.buffer, expected.buffer)
        return rounds[0]

    models = [model_of(rank) for rank in range(size)]
    of_node = fw.RunningAverage()
    of_node.add_all(models[1:4])
    expected = fw.RunningAverage()
    expected.add(models[0])
    expected.merge(of_node)
    expected.add(models[4])

    def exchanged(function: Any, expected: Any) -> Any:
        while not (rounds := call(function))[0].groups:
            # On a busy machine a stream may stall, and the coordinator averages.
            check(rounds, fw.average(models))
        return check(rounds, expected)

    large = exchanged(averaged, expected.mean())
    assert large.groups == ((0,), (1, 2, 3), (4,)), large.groups
    small = [model_of(rank, 100) for rank in range(size)]
    small_ways = check(call(averaged, 100), fw.average(small)).transports
    say(large=large.transports, small=small_ways)
    for got in call(broadcasted, 2):
        assert same_bits(got.buffer, models[2].buffer)
    for size_of_one in (10, 300_000):
        values = {rank: bytes([rank]) * size_of_one for rank in range(size)}
        for objects in call(gathered, size_of_one):
            assert objects == values
    narrow = fw.RunningAverage()
    narrow.add(models[0])
    narrow.add(fw.average(models[1:4]), 3.0)
    narrow.add(models[4])
    exchanged(averaged_in_float32, narrow.mean())
    not_finite = call(averaged_spoiled, 3)
    assert len({*not_finite}) == 1
    say(not_finite=not_finite[0])
    skipped = [r.run.remote(lambda m: averaged_spoiled(m, 3, nonfinite="skip")) for r in puppets]
    skip = ray.get(skipped)
    assert {tuple(result.quarantined) for result in skip} == {(3,)}
    none_finite = call(averaged_without_weight, 3)
    assert len({*none_finite}) == 1
    say(none_finite=none_finite[0])
    by_rule = ray.get([r.run.remote(lambda m: averaged(m, rule=Median())) for r in puppets])
    check(by_rule, fw.robust.median(models))

    # The socket of a node's link ends between two calls, or within one: calls go through Ray.
    agents = ray.get([puppets[rank].run.remote(agent_of) for rank in (1, 4)])
    assert all(map(has_link, agents))
    agents[0].__ray_call__.remote(lambda agent: vars(agent.end).update(connect=refuse))
    running = [puppet.run.remote(averages, 20) for puppet in puppets]
    agents[0].__ray_call__.remote(lambda agent: agent._link.close())
    for rounds in zip(*ray.get(running), strict=True):
        check([*rounds], fw.average(small))
    assert [has_link(agent) for agent in agents] == [False, True]
    assert len(exchanged(averaged, expected.mean()).links) == 3  # all nodes have said how it ended
    agents[0].__ray_call__.remote(lambda agent: vars(agent.end).pop("connect") and None)
    deadline = time.monotonic() + 60
    while not all(map(has_link, agents)):  # another socket is made
        assert time.monotonic() < deadline
        check(call(averaged, 100), fw.average(small))
        time.sleep(0.1)
    exchanged(averaged, expected.mean())

    # Nobody listens at one node any more; its agent answers.
    ray.get(puppets[4].run.remote(close_streams))
    broken = check(call(averaged), fw.average(models)).transports
    say(broken=broken)
    for got in call(broadcasted, 2):
        assert same_bits(got.buffer, models[2].buffer)

    # A member on another node dies; the others go on.
    os.kill(ray.get(puppets[2].pid.remote()), signal.SIGKILL)
    left = [puppet for rank, puppet in enumerate(puppets) if rank != 2]
    less = ray.get([p.run.remote(lambda m: averaged(m, min_results=3)) for p in left])
    check(less, fw.average([models[k] for k in (0, 1, 3, 4)]), (0, 1, 3, 4))
    say(died=sorted({type(result.failed[2]).__name__ for result in less}))

    # Another process takes its rank, and gets the state, which is large, from another node.
    puppets[2] = puppet_of.options(resources={"node1": 1}).remote()
    ray.get(puppets[2].join.remote(2, size))
    healed = ray.get([p.run.remote(heal) for p in puppets])
    assert len({*healed}) == 1, healed
    assert healed[0][0] == (2,), healed[0]
    left = [puppet for rank, puppet in enumerate(puppets) if rank != 2]
    os.kill(ray.get(puppets[2].pid.remote()), signal.SIGKILL)

    # The agent of a node dies while it gives a state: its members cannot go on, others can.
    ray.get([p.run.remote(lacks_the_state, True) for p in left[:3]])
    ray.get(puppets[4].run.remote(die_in_give))
    lost = ray.get([p.run.remote(heal) for p in left])
    ray.get([p.run.remote(lacks_the_state, False) for p in left[:3]])
    rest = ray.get([p.run.remote(lambda m: averaged(m, min_results=3)) for p in left[:3]])
    check(rest, fw.average([models[k] for k in (0, 1, 3)]), (0, 1, 3))
    say(lost=lost)

    # The thread of the agent of a node fails: its members and the others learn that, and why.
    ray.get(puppets[1].run.remote(fail_node_agent))
    last, *orphans = ray.get([p.run.remote(lambda m: averaged(m, min_results=1)) for p in left[:3]])
    check([last], models[0], (0,))
    say(orphans=[*orphans, str(last.failed[1])])

    ray.get(puppets[0].run.remote(lambda m: m.leave()))
    deadline = time.monotonic() + 30
    names = {"Coordinator"}
    while names & {"Coordinator", "NodeAgentActor"} and time.monotonic() < deadline:
        time.sleep(0.2)
        names = {kind for kind, _ in alive().values()}
    say(left=sorted(names))
    ray.shutdown()
    cluster.shutdown()


class Said:
    """What the program says, as soon as it has said it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._values: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        while name not in self._values:
            line = self._process.stdout.readline()
            assert line, self._process.stderr.read()[-5000:]
            if line.startswith("{"):  # not what Ray says
                self._values |= json.loads(line)
        return self._values[name]


@pytest.fixture(scope="module")
def said() -> Iterator[Said]:
    with program(meet_on_nodes) as process:
        end = threading.Timer(600, process.kill)
        end.start()
        said = Said(process)
        assert said["joined"]
        yield said
        end.cancel()


def test_agents_exchange_large_weights_and_the_coordinator_averages_small_ones(said: Said) -> None:
    away = dict.fromkeys("1234", "agent: streams")
    assert said["large"] == {"0": "shm"} | away
    assert set(said["small"].values()) == {"shm", "store"}


def test_an_error_is_that_of_all_members_on_all_nodes(said: Said) -> None:
    assert said["not_finite"] == "ValueError: rank 3, slot 1 'b': holds NaN or infinity"
    expected = "ValueError: every source of positive weight holds NaN or infinity"
    assert said["none_finite"] == expected


def test_the_coordinator_averages_all_where_streams_cannot_be_opened(said: Said) -> None:
    ways = dict(said["broken"])
    assert ways.pop("0") == "shm"
    assert [*ways] == [*"1234"]
    assert all(way.startswith("store: StreamError") for way in ways.values()), ways


def test_a_dead_member_and_a_dead_agent_take_only_their_own_along(said: Said) -> None:
    assert said["died"] == ["MemberDiedError"]
    *others, orphan = said["lost"]
    assert orphan == "MemberError: process group 'nodes': the agent of this node has ended"
    for other in others:
        assert re.match("WorkerError.*: no member is left that has the state", other), other


def test_an_agent_whose_thread_has_failed_counts_as_dead(said: Said) -> None:
    *orphans, why = said["orphans"]
    assert all("the agent of this node has ended" in orphan for orphan in orphans), orphans
    assert "the agent of its node: ZeroDivisionError" in why, why


def test_nothing_is_left_when_the_last_member_has_left(said: Said) -> None:
    assert said["left"] == ["Puppet"]
