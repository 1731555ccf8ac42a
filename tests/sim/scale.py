"""How a call scales with members, nodes and bytes: the package's decisions in a modelled cluster.

`Calls` and `Plan` are those of production. Links, memory and what a message costs a process are
modelled: a link has a rate, a latency, and one queue in each direction; the processes of a node
share its memory; a process handles one message after the other. What messages cost was measured,
and stands in `costs.json`.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatweights import Layout
from flatweights._sources import Kind, Template
from flatweights.ray.core._calls import Calls
from flatweights.ray.core._events import Ended, Reduce, Reduced, Requested, Send, Tick
from flatweights.ray.core._peer import Peer, Peers
from flatweights.ray.core._requests import MemberDiedError, Request
from flatweights.ray.nodes._costs import _BITS, _BYTES, _number, plan
from flatweights.ray.nodes._plan import SMALL, Plan

COSTS = Path(__file__).parent / "costs.json"


class Clock:
    """A virtual clock, and what happens at its times."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()

    def at(self, time: float, do: Callable[[], object]) -> None:
        """Call ``do`` at a time."""
        heapq.heappush(self._events, (time, next(self._numbers), do))

    def run(self) -> None:
        """Go on until nothing is left to happen."""
        while self._events:
            self.now, _, do = heapq.heappop(self._events)
            do()


@dataclass
class Queue:
    """Something that serves one after the other: a direction of a link, memory, or a process.

    Attributes:
        free: The time at which it is free.
        served: How much it has served: bytes, or messages.
    """

    free: float = 0.0
    served: float = 0.0

    def serve(self, now: float, seconds: float, amount: float = 1.0) -> float:
        """Return the time at which it has served what comes ``now`` and takes ``seconds``."""
        self.free = max(self.free, now) + seconds
        self.served += amount
        return self.free


@dataclass
class Node:
    """A machine.

    Attributes:
        out: Its link's direction out.
        into: The other direction.
        memory: Its memory.
        agent: The process of the package that serves its members; on the first node, that is the
            coordinator.
    """

    out: Queue = field(default_factory=Queue)
    into: Queue = field(default_factory=Queue)
    memory: Queue = field(default_factory=Queue)
    agent: Queue = field(default_factory=Queue)


@dataclass(frozen=True)
class Cluster:
    """The sizes, and the costs.

    Attributes:
        nodes: The number of nodes.
        workers: The number of members, or workers, on each.
        nbytes: Bytes of a model of float32.
        link: Bytes per second of a link in each direction, without headers.
        latency: Seconds from one node to another.
        costs: By name, seconds of a message, or bytes per second.
        dead: The number of members that die before they ask.
    """

    nodes: int
    workers: int
    nbytes: int
    link: float
    latency: float
    costs: dict[str, float]
    dead: int = 0

    @classmethod
    def of(
        cls,
        nodes: int,
        workers: int,
        nbytes: int,
        bits: float,
        latency: float = 1e-4,
        dead: int = 0,
    ) -> Cluster:
        """Return a cluster with the measured costs, whose links have ``bits`` per second."""
        costs: dict[str, float] = json.loads(COSTS.read_text())
        link = bits / 8 * costs["link share"]
        return cls(nodes, workers, nbytes // 4 * 4, link, latency, costs, dead)

    @property
    def size(self) -> int:
        """The number of members."""
        return self.nodes * self.workers


class Exchange:
    """Shards of sums, and of averages, that the nodes send each other, block by block.

    It follows `StreamAllreduce`: a node sends every other node that node's blocks of its sum, in
    turns over these nodes, and the average of a block of its own once that has come from all.
    """

    def __init__(self, clock: Clock, nodes: list[Node], plan: Plan, cluster: Cluster) -> None:
        self._clock, self._nodes, self._cluster = clock, nodes, cluster
        self._plan = plan.in_blocks()
        self._among = [node for node, group in enumerate(plan.groups) if group]
        blocks, count = self._plan.blocks, len(nodes)
        self._to: list[list[deque[tuple[int, float]]]] = []  # by sender and receiver
        for sender in range(count):
            sizes = [
                [sum(self._plan.sizes(sender, k)) for k in self._plan.of_node(node)]
                for node in range(count)
            ]
            self._to.append([deque(enumerate(one)) for one in sizes])
            self._to[sender][sender].clear()
        self._turn = [
            itertools.cycle([(k + i) % count for i in range(1, count)]) for k in range(count)
        ]
        self._missing = [[count - 1] * blocks for _ in nodes]
        self._averages = [(count - 1) * blocks for _ in nodes]  # that a node has still to get
        self._is_sending = [False] * count
        self._done: Callable[[], object] = lambda: None
        self._left = count

    def start(self, done: Callable[[], object]) -> None:
        """Begin; call ``done`` once all nodes have all averages."""
        self._done = done
        if len(self._nodes) == 1:
            self._clock.at(self._clock.now, done)
            return
        for node in range(len(self._nodes)):
            self._send(node)

    def _send(self, sender: int) -> None:
        """Send the next block, unless one is on its way out."""
        waiting = self._to[sender]
        if self._is_sending[sender] or not any(waiting):
            return
        receiver = next(k for k in self._turn[sender] if waiting[k])
        block, nbytes = waiting[receiver].popleft()
        self._is_sending[sender] = True
        clock, cluster = self._clock, self._cluster
        seconds = nbytes / cluster.link
        end = self._nodes[sender].out.serve(clock.now, seconds, nbytes)
        # Bytes are received while they are sent.
        begun = end - seconds + cluster.latency
        came = self._nodes[receiver].into.serve(begun, seconds, nbytes)
        clock.at(end, lambda: self._sent(sender))
        clock.at(came, lambda: self._came(receiver, block))

    def _sent(self, sender: int) -> None:
        self._is_sending[sender] = False
        self._send(sender)

    def _came(self, node: int, block: int) -> None:
        """Take a block: an average if it is negative; average a block that has come from all."""
        if block < 0:
            self._averages[node] -= 1
            self._left -= not self._averages[node]
            if not self._left:
                self._done()
            return
        self._missing[node][block] -= 1
        if self._missing[node][block]:
            return
        shard = self._plan.of_node(node)[block]
        bounds = self._plan.bounds(shard)
        nbytes = bounds.stop - bounds.start
        read = sum(sum(self._plan.sizes(k, shard)) for k in self._among)
        seconds = (read + nbytes) / self._cluster.costs["memory"]
        end = self._nodes[node].memory.serve(self._clock.now, seconds, read + nbytes)
        self._clock.at(end, lambda: self._averaged(node, nbytes))

    def _averaged(self, node: int, nbytes: float) -> None:
        for receiver, waiting in enumerate(self._to[node]):
            if receiver != node:
                waiting.append((-1, nbytes))
        self._send(node)


class MembersCall:
    """One average of all members, as `Member.average_variables` makes it.

    Attributes:
        times: By phase, the time at which it has ended.
        used: The ranks whose weights are in the average.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.clock = cluster, Clock()
        self.nodes = [Node() for _ in range(cluster.nodes)]
        self.times: dict[str, float] = {}
        self.used: tuple[int, ...] = ()
        self._peers = Peers()
        self._calls = Calls("scale", self._peers)
        self._calls.is_open = True
        self._members: list[Peer] = []
        for rank in range(cluster.size):
            peer = Peer(rank, f"rank {rank}", b"%d" % rank, rank + 1)
            self._peers.add(peer)
            peer.ready()
            peer.told(0)
            peer.join()
            self._members.append(peer)
        least = 1 if cluster.dead else None
        self._request = Request("average", "layout", timeout=600.0, min_results=least)
        self._is_small = cluster.nbytes < SMALL
        self._waiting = 0

    def run(self) -> None:
        """Make the call."""
        cluster, clock = self.cluster, self.clock
        step = max(1, cluster.size // max(1, cluster.dead))
        dead = {*range(0, cluster.size, step)[: cluster.dead]}
        for number, node in enumerate(self.nodes):
            ranks = range(number * cluster.workers, (number + 1) * cluster.workers)
            for rank in ranks:
                if rank in dead:
                    why = MemberDiedError("it has died")
                    clock.at(
                        0.0,
                        lambda peer=self._members[rank], why=why: self._take(  # type: ignore[misc]
                            Ended(peer, why)
                        ),
                    )
                    continue
                # A member reads its variables, and writes them to its segment.
                end = self._move(node, 2)
                clock.at(end, lambda k=number, r=rank: self._ask(k, r))  # type: ignore[misc]
        clock.run()

    def _move(self, node: Node, models: float) -> float:
        nbytes = models * self.cluster.nbytes
        return node.memory.serve(self.clock.now, nbytes / self.cluster.costs["memory"], nbytes)

    def _ask(self, number: int, rank: int) -> None:
        self.times["variables are read"] = self.clock.now
        costs, agent, clock = self.cluster.costs, self.nodes[number].agent, self.clock
        read = agent.serve(clock.now, costs["request"])
        if not number:
            clock.at(read, lambda: self._requested(rank))
            return
        came = read + costs["message latency"] + self.cluster.latency
        clock.at(came, lambda: self._handed(rank))

    def _handed(self, rank: int) -> None:
        costs = self.cluster.costs
        share = 1 / self.cluster.workers  # the agent hands them on together
        end = self.nodes[0].agent.serve(self.clock.now, costs["message"] * share, share)
        if self._is_small:  # it has the weights
            seconds = self.cluster.nbytes / self.cluster.link
            end = self.nodes[0].into.serve(end, seconds, self.cluster.nbytes)
        self.clock.at(end, lambda: self._requested(rank))

    def _requested(self, rank: int) -> None:
        peer = self._members[rank]
        peer.requests(self._request, self.clock.now)
        self._take(Requested(peer))

    def _take(self, event: Any) -> None:
        """Tell the core of an event, and do what it says."""
        self._calls.receive(event, self.clock.now)
        self._calls.receive(Tick(), self.clock.now)
        for action in self._calls.actions():
            if isinstance(action, Reduce):
                self._reduce(action)

    def _reduce(self, call: Reduce) -> None:
        self.times["all have asked"] = self.clock.now
        cluster, costs = self.cluster, self.cluster.costs
        self.used = tuple(sorted(call.requests))
        if cluster.nodes == 1 or self._is_small:
            nbytes = (len(self.used) + 1) * cluster.nbytes
            seconds = nbytes / costs["channel memory"]
            end = self.nodes[0].memory.serve(self.clock.now, seconds, nbytes)
            self.clock.at(end, lambda: self._reduced(call))
            return
        groups = tuple(
            tuple(k for k in self.used if k // cluster.workers == node)
            for node in range(cluster.nodes)
        )
        layout = Layout(["w"], [(cluster.nbytes // 4,)], ["float32"])
        template = Template(Kind.FLAT_WEIGHTS, layout)
        plan = Plan(1, template, groups, dict.fromkeys(self.used, 1.0), "float64")
        # The coordinator calls all agents; each sums its own members before it sends.
        begun = self.clock.now
        for number, (node, group) in enumerate(zip(self.nodes, groups, strict=True)):
            begun = self.nodes[0].agent.serve(self.clock.now, costs["message"])
            nbytes = sum(sum(plan.sizes(number, k)) for k in range(cluster.nodes))
            if plan.form(number) == "sum":
                nbytes += len(group) * cluster.nbytes
            node.memory.serve(begun, nbytes / costs["memory"], nbytes)
        exchange = Exchange(self.clock, self.nodes, plan, cluster)
        begin = begun + costs["message latency"] + cluster.latency
        self.clock.at(begin, lambda: exchange.start(lambda: self._reduced(call)))

    def _reduced(self, call: Reduce) -> None:
        self.times["averaged"] = self.clock.now
        cluster, costs, clock = self.cluster, self.cluster.costs, self.clock
        if cluster.nodes > 1:
            for _ in self.nodes:  # the agents' results
                self.nodes[0].agent.serve(clock.now, costs["message"])
        self._calls.receive(Reduced(self.used, cluster.nbytes), clock.now)
        (send,) = [one for one in self._calls.actions() if isinstance(one, Send)]
        ranks = {peer.rank for peer in send.peers}
        for number, node in enumerate(self.nodes):
            here = [k for k in ranks if k // cluster.workers == number]
            came = self.nodes[0].agent.serve(clock.now, costs["response"])
            if number:
                came += costs["message latency"] + cluster.latency
                if self._is_small:
                    seconds = cluster.nbytes / cluster.link
                    came = self.nodes[0].out.serve(came, seconds, cluster.nbytes)
            for _ in here:
                end = node.agent.serve(came, costs["response"])
                self._waiting += 1
                clock.at(end, lambda one=node: self._scatter(one))  # type: ignore[misc]

    def _scatter(self, node: Node) -> None:
        self.times["responses are there"] = self.clock.now
        # The average is read by all; each writes its variables.
        self.clock.at(self._move(node, 2), self._end)

    def _end(self) -> None:
        self._waiting -= 1
        if not self._waiting:
            self.times["variables are set"] = self.clock.now


def phases(call: MembersCall) -> Iterator[tuple[str, float]]:
    """Yield the seconds of each phase, in their order."""
    last = 0.0
    for name, end in sorted(call.times.items(), key=lambda one: one[1]):
        yield name, end - last
        last = end


def text_of(call: MembersCall) -> str:
    """Return what a call has taken, as text."""
    cluster, nodes = call.cluster, call.nodes
    lines = [
        f"{cluster.nodes} nodes of {cluster.workers} members, {cluster.nbytes / 1e9:g} GB, "
        f"{cluster.link * 8 / 1e9:.3g} Gbit/s of weights: "
        f"{len(call.used)} of {cluster.size} members"
    ]
    lines += [f"{seconds:10.4g} s  {name}" for name, seconds in phases(call)]
    lines += [
        f"{max(call.times.values()):10.4g} s  in all",
        f"{max(one.out.served for one in nodes) / 1e9:10.4g} GB out of the busiest node",
        f"{max(one.into.served for one in nodes) / 1e9:10.4g} GB into it",
        f"{nodes[0].agent.served:10.0f}    messages at the coordinator",
        f"{max(one.agent.served for one in [*nodes[1:], Node()]):10.0f}    at an agent",
    ]
    return "\n".join(lines)


def seconds_of(cluster: Cluster) -> float:
    """Return the seconds of a call."""
    call = MembersCall(cluster)
    call.run()
    return max(call.times.values())


def rows_of_figure() -> Iterator[dict[str, float]]:
    """Yield the times of the figure in docs/scale.md: 8 members on each node."""
    for bits, nbytes in itertools.product((10e9, 100e9), (10**6, 10**8, 10**9, 10**10)):
        for nodes in (2, 4, 8, 16, 32, 64, 125):
            seconds = seconds_of(Cluster.of(nodes, 8, nbytes, bits))
            yield {"bits": bits, "bytes": nbytes, "nodes": nodes, "seconds": seconds}


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate one call, or those of the figure."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim --scale", description=__doc__)
    parser.add_argument("--members", type=int, default=1000)
    parser.add_argument("--nodes", type=int, default=125)
    parser.add_argument("--bytes", default="10GB", help="of the model")
    parser.add_argument("--link", default="100Gbit", help="bits per second in each direction")
    parser.add_argument("--latency", type=float, default=1e-4, help="seconds between two nodes")
    parser.add_argument("--dead", type=int, default=0, help="members that die before they ask")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="write the times of docs/scale")
    args = parser.parse_args(arguments)
    if args.figure is not None:
        args.figure.write_text(json.dumps([*rows_of_figure()], indent=1))
        return
    nbytes = round(_number(args.bytes, "bytes", _BYTES))
    bits = _number(args.link, "link", _BITS)
    workers, rest = divmod(args.members, args.nodes)
    if rest or not workers:
        parser.error(f"--members: expected a multiple of the {args.nodes} nodes")
    call = MembersCall(Cluster.of(args.nodes, workers, nbytes, bits, args.latency, args.dead))
    call.run()
    print(text_of(call))
    chosen = plan(nodes=args.nodes, workers=workers, model=nbytes, link=bits).chosen
    print(f"{chosen.seconds:10.4g} s  says flatweights plan")
