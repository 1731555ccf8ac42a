"""Faults: their schedule, from a seed, and the code that causes them.

A process with a rank writes its process id into a file, for signals. Faults that it has to cause
itself, such as sending NaN, are orders in another file, which it reads at its next step.
"""

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import ray

from bench import nodes
from bench.chaos.oracle import Log
from flatweights.ray.support import _failpoints

KILLED, STOPPED, AT_POINT = "kill -9", "SIGSTOP", "kill -9 inside a call"
NAN, EXCEPTION, LATE, LAYOUT = "NaN", "exception", "late", "another layout"
STORE = "object store full"
ACTORS = {
    "coordinator killed": ("Coordinator",),
    "agent killed": ("Agent", "NodeAgentActor"),
    "relay killed": ("Relay", "Proxy"),
}
"""Faults of processes without a rank: the names of their classes."""
PUBLISHER = "publisher killed"
CUT, SLOW = "link cut", "link slow"
LINKS = (CUT, SLOW)
"""Faults of the link of a node, if `bench.nodes` has made the nodes."""
_TENTH = 0.1  # the part of its rate that a slow link keeps
ADDED, REMOVED = "worker added", "worker removed"

DRIVER = -1  # the rank of the driver
BEFALLEN = "befallen by "  # the note of a process about an order that it has taken


class InjectedError(Exception):
    """The exception that a process raises on an order."""


class Fault(NamedTuple):
    """A fault of the schedule.

    Attributes:
        after: Seconds after the last fault.
        kind: Its kind.
        rank: The process that it befalls, if it has one.
        seconds: Its duration, if it has one.
        draw: A random number below 1, for further choices.
    """

    after: float
    kind: str
    rank: int
    seconds: float
    draw: float


def schedule(
    seed: int,
    kinds: Sequence[str],
    size: int,
    every: tuple[float, float],
    lasting: tuple[float, float],
) -> Iterator[Fault]:
    """Yield faults for ever, all kinds equally often.

    Args:
        seed: The same seed gives the same faults.
        kinds: The kinds of faults.
        size: The number of ranks.
        every: The fewest and the most seconds between two faults.
        lasting: The fewest and the most seconds of one fault.
    """
    draws = random.Random(seed)
    while True:
        for kind in draws.sample(kinds, len(kinds)):
            after, rank = draws.uniform(*every), draws.randrange(size)
            yield Fault(after, kind, rank, draws.uniform(*lasting), draws.random())


class Injector:
    """Causes faults in the processes that log in a folder, and in actors that start after it."""

    def __init__(self, folder: Path, points: Sequence[str], mbit: float = 0.0) -> None:
        """Take the ``points`` of calls at which processes die, and the rate of links."""
        self._folder = folder
        self._points = points
        self._mbit = mbit
        self._others = {*actors()}  # of tests that use the same Ray
        self._timers: list[threading.Timer] = []

    def do(self, fault: Fault) -> int | None:
        """Cause ``fault``; return the rank that it befalls.

        Returns:
            `DRIVER` for processes without a rank; None if there is no such process.
        """
        kind = fault.kind
        ranks = sorted(int(path.stem) for path in self._folder.glob("*.pid"))
        ranks = [rank for rank in ranks if rank != DRIVER]
        if not ranks:
            return None
        rank = 0 if kind == PUBLISHER else ranks[fault.rank % len(ranks)]
        if kind in (KILLED, STOPPED, PUBLISHER):
            return rank if self._signal(fault, self._pid(rank)) else None
        if kind in ACTORS:
            names = {pid: name for pid, name in actors().items() if pid not in self._others}
            pids = [pid for pid, name in names.items() if name in ACTORS[kind]]
            is_done = pids and _kill(pids[int(fault.draw * len(pids))], signal.SIGKILL)
            return DRIVER if is_done else None
        if kind == STORE:
            fill_stores(fault.seconds)
            return DRIVER
        if kind in LINKS:
            self._harm_link(fault)
            return DRIVER
        if kind in (ADDED, REMOVED):
            self._tell(DRIVER, f"{kind}:{fault.draw}")
            return DRIVER
        point = self._points[int(fault.draw * len(self._points))] if self._points else ""
        self._tell(rank, f"{kind}:{point if kind == AT_POINT else fault.seconds}")
        return rank

    def end(self) -> None:
        """Let stopped processes continue."""
        for timer in self._timers:
            timer.cancel()
            timer.function(*timer.args)
        self._timers.clear()

    def _pid(self, rank: int) -> int:
        try:
            return int(self._folder.joinpath(f"{rank}.pid").read_text())
        except (FileNotFoundError, ValueError):
            return 0

    def _signal(self, fault: Fault, pid: int) -> bool:
        if fault.kind != STOPPED:
            return _kill(pid, signal.SIGKILL)
        if not _kill(pid, signal.SIGSTOP):
            return False
        self._later(fault.seconds, _kill, pid, signal.SIGCONT)
        return True

    def _harm_link(self, fault: Fault) -> None:
        """Cut or slow down the link of a node without the driver; mend it later."""
        there = nodes.Nodes.of_this_process()
        node = 1 + int(fault.draw * (len(there) - 1))
        if fault.kind == CUT:
            there.cut(node)
            self._later(fault.seconds, there.mend, node)
        else:
            there.slow(node, _TENTH * self._mbit)
            self._later(fault.seconds, there.slow, node, self._mbit)

    def _later(self, seconds: float, act: Callable[..., object], *args: Any) -> None:
        """Call ``act`` after some seconds, or at the end of the run."""
        timer = threading.Timer(seconds, act, args)
        timer.start()
        self._timers = [one for one in self._timers if one.is_alive()] + [timer]

    def _tell(self, rank: int, text: str) -> None:
        unfinished = self._folder / f"{rank}.unfinished"
        unfinished.write_text(text)
        unfinished.rename(self._folder / f"{rank}.order")


def obey(log: Log) -> str:
    """Obey this process's order, if any process can; return the kind of other faults."""
    kind, _, rest = log.order().partition(":")
    if kind == AT_POINT:
        _failpoints.hook = _die_at(rest, log)
    elif kind:
        log.note(f"{BEFALLEN}{kind}")
    if kind == LATE:
        time.sleep(float(rest))
    elif kind == EXCEPTION:
        raise InjectedError("told to raise")
    return kind


def spoil(model: Any) -> None:
    """Put NaN into a model."""
    model["bias"] = np.array([0.0, np.nan, 1.0], np.float32)


def actors() -> dict[int, str]:
    """Return the class of each living actor, by process."""
    known = ray._private.state.actors().values()
    return {a["Pid"]: a["ActorClassName"] for a in known if a["State"] == "ALIVE"}


def place(rank: int) -> dict[str, Any]:
    """Return Ray's options that put a rank on its node: with two nodes, every third on the second.

    Nodes have a resource by their number: ``node0``, ``node1`` and so on.
    """
    count = sum(name[4:].isdigit() for name in ray.cluster_resources() if name.startswith("node"))
    where = {f"node{max(0, rank % 3 + count - 3)}": 0.001} if count else {}
    return {"num_cpus": 0, "resources": where}


def fill_stores(seconds: float) -> None:
    """Fill the object store of each node, for some seconds."""
    for node in ray.nodes():
        if node["Alive"]:
            where = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
                node["NodeID"], soft=False
            )
            free = int(node["Resources"].get("object_store_memory", 0))
            _fill.options(scheduling_strategy=where).remote(free, seconds)


@ray.remote(num_cpus=0, max_retries=0, max_calls=1)  # type: ignore[untyped-decorator]
def _fill(nbytes: int, seconds: float) -> None:
    """Hold the store full; its process, which has grown, ends then and runs no other task."""
    kept = []
    for share in (0.5, 0.25, 0.12, 0.06, 0.03):
        ref = ray.put(np.ones(int(share * nbytes), np.uint8))
        kept.append((ref, ray.get(ref)))
    time.sleep(seconds)


def _kill(pid: int, number: signal.Signals) -> bool:
    """Send a signal to one of Ray's processes; return False if it has ended."""
    with contextlib.suppress(OSError):
        if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::"):
            os.kill(pid, number)
            return True
    return False


def _die_at(point: str, log: Log) -> Callable[[str], None]:
    def hook(reached: str) -> None:
        if reached == point:
            log.note(f"{BEFALLEN}{AT_POINT}")
            os.kill(os.getpid(), signal.SIGKILL)

    return hook
