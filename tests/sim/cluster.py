"""A modelled cluster: a virtual clock, nodes, and what messages, links and memory cost.

A link has a rate, a latency, and one queue in each direction; the processes of a node share its
memory; a process handles one message after the other. What messages cost was measured, and stands
in `costs.json`.
"""

from __future__ import annotations

import heapq
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

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
        workers: The number of processes on each: members, workers, or subscribers.
        nbytes: Bytes of a model of float32.
        link: Bytes per second of a link in each direction, without headers.
        latency: Seconds from one node to another.
        costs: By name, seconds of a message, or bytes per second.
        dead: The number of processes that die before they ask.
        step: Seconds that each process computes before.
    """

    nodes: int
    workers: int
    nbytes: int
    link: float
    latency: float
    costs: dict[str, float]
    dead: int = 0
    step: float = 0.0

    @classmethod
    def of(
        cls,
        nodes: int,
        workers: int,
        nbytes: int,
        bits: float,
        latency: float = 1e-4,
        dead: int = 0,
        step: float = 0.0,
    ) -> Cluster:
        """Return a cluster with the measured costs, whose links have ``bits`` per second."""
        costs: dict[str, float] = json.loads(COSTS.read_text())
        link = bits / 8 * costs["link share"]
        return cls(nodes, workers, nbytes // 4 * 4, link, latency, costs, dead, step)

    @property
    def size(self) -> int:
        """The number of processes."""
        return self.nodes * self.workers
