"""Members on three nodes, whose agents exchange the members' weights.

`check_members` compares all that they get with an oracle, bit for bit.
"""

import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import ray
from held import Held
from reference import same_bits

import flatweights as fw
from flatweights.ray import Member, MemberDiedError, join
from flatweights.robust import Median

LARGE = 150_000  # elements, of which agents exchange pieces


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


def agent_of(member: Member) -> Any:
    return member._coordinator._actor


def close_streams(member: Member) -> None:
    """Make the agent of this node stop listening."""
    ray.get(agent_of(member).__ray_call__.remote(lambda agent: agent.end._streams.close()))


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

    ray.get(agent_of(member).__ray_call__.remote(patch))


def fail_node_agent(member: Member) -> None:
    """End the thread of the agent of this node, to which all its members have channels."""
    ray.get(
        agent_of(member).__ray_call__.remote(
            lambda agent: agent._node_agent.queue.post(divmod, 1, 0)
        )
    )


def has_link(agent: Any) -> bool:
    has: bool = ray.get(agent.__ray_call__.remote(lambda agent: agent._link.has_socket))
    return has


def refuse(*_: object) -> None:
    raise OSError("a firewall")


def averages(member: Member, count: int) -> list[Any]:
    return [averaged(member, 100) for _ in range(count)]


def classes_alive() -> set[str]:
    """Return the classes of all actors that are alive."""
    actors = ray._private.state.actors().values()
    return {actor["ActorClassName"] for actor in actors if actor["State"] == "ALIVE"}


def check_members(*nodes: str) -> None:
    """Run members on three nodes, of which each has a resource of one of these names."""
    members = Members(nodes)
    members.check_calls()
    members.check_values_that_are_not_finite()
    members.check_links()
    members.check_streams_that_cannot_be_opened()
    members.check_deaths()
    members.check_end()


class Members:
    """Five members: the first with the coordinator, three on the second node, one on the third."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self.puppets = [self.start(nodes[node]) for node in (0, 1, 1, 1, 2)]
        self.nodes = nodes
        self.ranks = range(len(self.puppets))
        first, *others = self.puppets
        joined = [first.join.remote(0, len(self.ranks))]
        while "Coordinator" not in classes_alive():
            time.sleep(0.05)
        for rank, puppet in enumerate(others, 1):
            joined.append(puppet.join.remote(rank, len(self.ranks)))
        ray.get(joined)
        self.models = [model_of(rank) for rank in self.ranks]
        self.small = fw.average([model_of(rank, 100) for rank in self.ranks])
        of_node = fw.RunningAverage()
        of_node.add_all(self.models[1:4])
        mean = fw.RunningAverage()
        mean.add(self.models[0])
        mean.merge(of_node)
        mean.add(self.models[4])
        self.mean = mean.mean()

    @staticmethod
    def start(node: str) -> Any:
        puppet: Any = Puppet
        return puppet.options(resources={node: 1}).remote()

    def call(self, function: Any, *args: Any, ranks: Sequence[int] | None = None) -> list[Any]:
        """Run ``function(member, *args)`` in all members, or in some, at the same time."""
        chosen = self.ranks if ranks is None else ranks
        calls = [self.puppets[rank].run.remote(function, *args) for rank in chosen]
        got: list[Any] = ray.get(calls)
        return got

    def check(self, rounds: Sequence[Any], expected: Any, used: Sequence[int] | None = None) -> Any:
        for result in rounds:
            assert tuple(result.used) == tuple(self.ranks if used is None else used), result
            assert same_bits(result.weights.buffer, expected.buffer)
        return rounds[0]

    def check_exchanged(self, function: Any, expected: Any) -> Any:
        while not (rounds := self.call(function))[0].groups:
            # On a busy machine a stream may stall, and the coordinator averages.
            self.check(rounds, fw.average(self.models))
        return self.check(rounds, expected)

    def check_calls(self) -> None:
        """Agents exchange large weights, and the coordinator averages small ones."""
        large = self.check_exchanged(averaged, self.mean)
        assert large.groups == ((0,), (1, 2, 3), (4,)), large.groups
        assert large.transports == {0: "shm"} | dict.fromkeys((1, 2, 3, 4), "agent: streams")
        ways = self.check(self.call(averaged, 100), self.small).transports
        assert {*ways.values()} == {"shm", "store"}
        self.check_broadcast()
        for size in (10, 300_000):
            values = {rank: bytes([rank]) * size for rank in self.ranks}
            for objects in self.call(gathered, size):
                assert objects == values
        narrow = fw.RunningAverage()
        narrow.add(self.models[0])
        narrow.add(fw.average(self.models[1:4]), 3.0)
        narrow.add(self.models[4])
        self.check_exchanged(averaged_in_float32, narrow.mean())
        by_rule = self.call(lambda member: averaged(member, rule=Median()))
        self.check(by_rule, fw.robust.median(self.models))

    def check_broadcast(self) -> None:
        for got in self.call(broadcasted, 2):
            assert same_bits(got.buffer, self.models[2].buffer)

    def check_values_that_are_not_finite(self) -> None:
        expected = "ValueError: rank 3, slot 1 'b': holds NaN or infinity"
        assert self.call(averaged_spoiled, 3) == [expected] * len(self.ranks)
        skip = self.call(lambda member: averaged_spoiled(member, 3, nonfinite="skip"))
        assert {tuple(result.quarantined) for result in skip} == {(3,)}
        expected = "ValueError: every source of positive weight holds NaN or infinity"
        assert self.call(averaged_without_weight, 3) == [expected] * len(self.ranks)

    def check_links(self) -> None:
        """The socket of a link ends between two calls, or within one: calls go through Ray."""
        agents = self.call(agent_of, ranks=(1, 4))
        assert all(map(has_link, agents))
        agents[0].__ray_call__.remote(lambda agent: vars(agent.end).update(connect=refuse))
        running = [puppet.run.remote(averages, 20) for puppet in self.puppets]
        agents[0].__ray_call__.remote(lambda agent: agent._link.close())
        for rounds in zip(*ray.get(running), strict=True):
            self.check(rounds, self.small)
        assert [has_link(agent) for agent in agents] == [False, True]
        large = self.check_exchanged(averaged, self.mean)
        assert len(large.links) == 3  # all nodes have said how it ended
        agents[0].__ray_call__.remote(lambda agent: vars(agent.end).pop("connect") and None)
        deadline = time.monotonic() + 60
        while not all(map(has_link, agents)):  # another socket is made
            assert time.monotonic() < deadline
            self.check(self.call(averaged, 100), self.small)
            time.sleep(0.1)
        self.check_exchanged(averaged, self.mean)

    def check_streams_that_cannot_be_opened(self) -> None:
        """Nobody listens at one node any more; its agent answers, and the coordinator averages."""
        self.call(close_streams, ranks=[4])
        ways = self.check(self.call(averaged), fw.average(self.models)).transports
        assert [*ways] == [*self.ranks]
        assert ways.pop(0) == "shm"
        assert all(way.startswith("store: StreamError") for way in ways.values()), ways
        self.check_broadcast()

    def kill(self, rank: int) -> None:
        os.kill(ray.get(self.puppets[rank].pid.remote()), signal.SIGKILL)

    def check_deaths(self) -> None:
        """A dead member, and a dead agent, take only their own along."""
        of_three = {"min_results": 3}
        self.kill(2)
        less = self.call(lambda member: averaged(member, **of_three), ranks=(0, 1, 3, 4))
        self.check(less, fw.average([self.models[k] for k in (0, 1, 3, 4)]), (0, 1, 3, 4))
        assert {type(result.failed[2]) for result in less} == {MemberDiedError}

        # Another process takes its rank, and gets the state, which is large, from another node.
        self.puppets[2] = self.start(self.nodes[1])
        ray.get(self.puppets[2].join.remote(2, len(self.ranks)))
        healed = self.call(heal)
        assert len({*healed}) == 1, healed
        assert healed[0][0] == (2,), healed[0]
        self.kill(2)

        # The agent of a node dies while it gives a state: its members cannot go on, others can.
        self.call(lacks_the_state, True, ranks=(0, 1, 3))
        self.call(die_in_give, ranks=[4])
        *others, orphan = self.call(heal, ranks=(0, 1, 3, 4))
        assert orphan == "MemberError: process group 'nodes': the agent of this node has ended"
        for other in others:
            assert re.match("WorkerError.*: no member is left that has the state", other), other
        self.call(lacks_the_state, False, ranks=(0, 1, 3))
        rest = self.call(lambda member: averaged(member, **of_three), ranks=(0, 1, 3))
        self.check(rest, fw.average([self.models[k] for k in (0, 1, 3)]), (0, 1, 3))

        # The thread of the agent of a node fails: its members and the others learn that, and why.
        self.call(fail_node_agent, ranks=[1])
        last, *orphans = self.call(lambda member: averaged(member, min_results=1), ranks=(0, 1, 3))
        self.check([last], self.models[0], (0,))
        for orphan in orphans:
            assert "the agent of this node has ended" in orphan, orphans
        assert "the agent of its node: ZeroDivisionError" in str(last.failed[1])

    def check_end(self) -> None:
        """Nothing is left when the last member has left."""
        self.call(lambda member: member.leave(), ranks=[0])
        deadline = time.monotonic() + 30
        while classes_alive() & {"Coordinator", "NodeAgentActor"}:
            assert time.monotonic() < deadline, classes_alive()
            time.sleep(0.05)
        for puppet in self.puppets:
            ray.kill(puppet)
