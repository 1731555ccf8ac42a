"""Averages of all members, or of a group, in a modelled cluster.

`Calls` and `Plan` are those of production; links, memory and messages are those of `Cluster`.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from tests.sim.cluster import Clock, Cluster, Node

from flatweights import Layout
from flatweights._sources import Kind, Template
from flatweights.ray.core._calls import Calls
from flatweights.ray.core._events import Ended, Reduce, Reduced, Requested, Send, Tick
from flatweights.ray.core._peer import Peer, Peers
from flatweights.ray.core._requests import MemberDiedError, Request
from flatweights.ray.nodes._plan import SMALL, Plan


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


class Average(ABC):
    """One average of the models of all processes.

    Attributes:
        cluster: The sizes.
        nodes: The nodes; the coordinator, or the driver, is on the first one.
        times: By phase, the time at which it has ended.
        used: The ranks whose weights are in the average.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.clock = cluster, Clock()
        self.nodes = [Node() for _ in range(cluster.nodes)]
        self.times: dict[str, float] = {}
        self.used: tuple[int, ...] = ()
        self._is_small = cluster.nbytes < SMALL
        self._waiting = 0
        step = max(1, cluster.size // max(1, cluster.dead))
        self._dead = {*range(0, cluster.size, step)[: cluster.dead]}

    @abstractmethod
    def run(self) -> None:
        """Make it."""

    def _note(self, phase: str) -> None:
        self.times[phase] = self.clock.now

    def _move(self, node: Node, models: float) -> float:
        nbytes = models * self.cluster.nbytes
        return node.memory.serve(self.clock.now, nbytes / self.cluster.costs["memory"], nbytes)

    def _compute(self, node: Node, ask: Callable[[], object]) -> None:
        """Let a process compute its step, and write its variables to its segment."""

        def read() -> None:
            if self.cluster.step:
                self._note("steps are computed")
            self.clock.at(self._move(node, 2), ask)

        self.clock.at(self.clock.now + self.cluster.step, read)

    def _average(self, used: Iterable[int], done: Callable[[], object]) -> None:
        """Average the models of ranks, in the memory of all nodes; then call ``done``."""
        cluster, costs = self.cluster, self.cluster.costs
        self.used = tuple(sorted(used))
        if cluster.nodes == 1 or self._is_small:
            nbytes = (len(self.used) + 1) * cluster.nbytes
            seconds = nbytes / costs["channel memory"]
            self.clock.at(self.nodes[0].memory.serve(self.clock.now, seconds, nbytes), done)
            return
        groups = tuple(
            tuple(k for k in self.used if k // cluster.workers == node)
            for node in range(cluster.nodes)
        )
        layout = Layout(["w"], [(cluster.nbytes // 4,)], ["float32"])
        template = Template(Kind.FLAT_WEIGHTS, layout)
        plan = Plan(1, template, groups, dict.fromkeys(self.used, 1.0), "float64")
        # All agents are called; each sums its own models while it sends.
        begun = self.clock.now
        for number, (node, group) in enumerate(zip(self.nodes, groups, strict=True)):
            begun = self.nodes[0].agent.serve(self.clock.now, costs["message"])
            nbytes = sum(sum(plan.sizes(number, k)) for k in range(cluster.nodes))
            if plan.form(number) == "sum":
                nbytes += len(group) * cluster.nbytes
            node.memory.serve(begun, nbytes / costs["memory"], nbytes)
        exchange = Exchange(self.clock, self.nodes, plan, cluster)
        begin = begun + costs["message latency"] + cluster.latency
        self.clock.at(begin, lambda: exchange.start(lambda: self._averaged(done)))

    def _averaged(self, done: Callable[[], object]) -> None:
        for _ in self.nodes:  # the agents' results
            self.nodes[0].agent.serve(self.clock.now, self.cluster.costs["message"])
        done()

    def _scatter(self, node: Node) -> None:
        self._waiting += 1
        # The average is read by all; each writes its variables.
        self.clock.at(self._move(node, 2), self._end)

    def _end(self) -> None:
        self._waiting -= 1
        if not self._waiting:
            self._note("variables are set")


class MembersCall(Average):
    """One call of `Member.average_variables`, or a step of a `fit` with averaged gradients."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
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

    def run(self) -> None:
        """Make the call."""
        cluster, clock = self.cluster, self.clock
        for number, node in enumerate(self.nodes):
            ranks = range(number * cluster.workers, (number + 1) * cluster.workers)
            for rank in ranks:
                if rank in self._dead:
                    why = MemberDiedError("it has died")
                    clock.at(
                        0.0,
                        lambda peer=self._members[rank], why=why: self._take(  # type: ignore[misc]
                            Ended(peer, why)
                        ),
                    )
                    continue
                self._compute(node, lambda k=number, r=rank: self._ask(k, r))  # type: ignore[misc]
        clock.run()

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
        self._note("all have asked")
        self._average(call.requests, lambda: self._reduced(call))

    def _reduced(self, call: Reduce) -> None:
        self._note("averaged")
        cluster, costs, clock = self.cluster, self.cluster.costs, self.clock
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
                clock.at(end, lambda one=node: self._told(one))  # type: ignore[misc]

    def _told(self, node: Node) -> None:
        self._note("responses are there")
        self._scatter(node)


class GroupRound(Average):
    """A round of `WorkerGroup.run`: workers set the last average, compute, and return weights."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._missing = cluster.size - len(self._dead)

    def run(self) -> None:
        """Make the round; the driver finds out that workers have died when it sends commands."""
        costs = self.cluster.costs
        for number, node in enumerate(self.nodes):
            begun = self._tell_agent() if number else self.clock.now
            if number and self._is_small:
                nbytes = self.cluster.nbytes
                begun = self.nodes[0].out.serve(begun, nbytes / self.cluster.link, nbytes)
            for rank in range(number * self.cluster.workers, (number + 1) * self.cluster.workers):
                if rank in self._dead:
                    continue
                told = node.agent.serve(begun, costs["response"])
                self.clock.at(told, lambda k=number, r=rank: self._work(k, r))  # type: ignore[misc]
        self.clock.run()

    def _tell_agent(self) -> float:
        costs = self.cluster.costs
        told = self.nodes[0].agent.serve(self.clock.now, costs["message"])
        return told + costs["message latency"] + self.cluster.latency

    def _work(self, number: int, rank: int) -> None:
        self._note("commands are there")
        node = self.nodes[number]
        end = self._move(node, 2)  # the last average
        self.clock.at(end, lambda: self._compute(node, lambda: self._answer(number, rank)))

    def _answer(self, number: int, rank: int) -> None:
        cluster, costs = self.cluster, self.cluster.costs
        came = self.nodes[number].agent.serve(self.clock.now, costs["request"])
        if number:
            came += costs["message latency"] + cluster.latency
            share = 1 / cluster.workers  # the agent tells of its workers together
            came = self.nodes[0].agent.serve(came, costs["message"] * share, share)
            if self._is_small:
                came = self.nodes[0].into.serve(came, cluster.nbytes / cluster.link, cluster.nbytes)
        self.clock.at(came, self._answered)

    def _answered(self) -> None:
        self._missing -= 1
        if not self._missing:
            self._note("all have answered")
            used = {*range(self.cluster.size)} - self._dead
            self._average(used, lambda: self._note("averaged"))
