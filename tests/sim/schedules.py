"""One schedule: a world, its processes, and the oracle."""

from __future__ import annotations

import contextlib
import gc
import logging
import random
import sys
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.sim import fit_plans, group_plans, nodes_plans, plans
from tests.sim.group_schedules import GroupSchedule
from tests.sim.oracle import Oracle
from tests.sim.plans import Plan
from tests.sim.platform import Simulated
from tests.sim.programs import STATE, Program
from tests.sim.world import BEGIN, Fault, Process, World

from flatweights.ray import _clock
from flatweights.ray.core import _response_cache
from flatweights.ray.results import _report
from flatweights.ray.support import _failpoints

_MOST_STEPS = 60_000
_TRIES = 8  # seeds with which a smaller plan is tried
_SMALLER = {
    "members": plans.smaller,
    "nodes": nodes_plans.smaller,
    "fit": fit_plans.smaller,
    "group": group_plans.smaller,
    "asynchronous": group_plans.smaller,
}


class Schedule:
    """The processes of one process group.

    Attributes:
        models: The number of models that were sent so far.
    """

    def __init__(self, plan: Plan, seed: int, *, has_transcript: bool = False) -> None:
        self.plan = plan.copy()  # programs change an entry
        for entry in ("coordinator_faults", "agent_faults"):
            self.plan[entry] = {int(k): _faults(faults) for k, faults in plan[entry].items()}
        self.world = World(seed, yields=plan["yields"], has_transcript=has_transcript)
        self.world.rates = self.plan["rates"]
        self.oracle, self._program = _parts_of(self.plan, self.world)
        self.world.at_rest = self.oracle.at_rest
        self.platform = Simulated(self.world, self.oracle, self.plan)
        self.models = 0

    def run(self) -> None:
        """Run it; `World.failures` has what does not hold."""
        world = self.world
        with _installed(world, self.plan["keeps_few"]):
            for rank in range(self.plan["size"]):
                self._start(rank, 0)
            end = world.run(_MOST_STEPS)
            if end == "stuck":
                names = ", ".join(task.name for one in self._processes() for task in one.tasks)
                world.fail(f"nothing can go on: {names}")
            elif end == "steps":
                world.fail(f"no end after {_MOST_STEPS} steps")
            elif end == "done":
                self.oracle.at_end(self.platform.links)
            world.close(self._processes())
            for channels in self.platform.listeners.values():
                channels.let_go()

    def _processes(self) -> list[Process]:
        return [
            *self.oracle.mains,
            *[coordinator.process for coordinator in self.oracle.coordinators],
            *[agent.process for agent in self.oracle.agents],
        ]

    def _start(self, rank: int, life: int) -> None:
        """Start a process of a rank, or two at once."""
        entry = self.plan["lives"][rank][life]
        delay = entry["delay"] + (0.0 if life else self.world.draw() * 0.01)
        name = f"rank{rank}.{life}" if life else f"rank{rank}"
        self.world.after(delay, lambda: self._begin(name, entry["faults"], rank, life))
        if entry["is_twice"]:
            delay += self.world.draw() * 0.01
            last = len(self.plan["lives"][rank])
            self.world.after(delay, lambda: self._begin(f"{name}b", {}, rank, last))

    def _begin(self, name: str, faults: dict[Any, Any], rank: int, life: int) -> None:
        process = Process(self.world, name, _faults(faults))
        process.notes["way"] = self.plan["ways"][rank]
        process.notes["node"] = self.plan["nodes"][rank]
        self.oracle.mains.append(process)

        def end() -> None:
            self.platform.process_has_died(process)
            if life + 1 < len(self.plan["lives"][rank]):
                self._start(rank, life + 1)

        def main() -> None:
            process.main = self.world.current
            self._program(self, rank).run()
            self.world.note("has ended")
            process.kill()

        process.at_death.append(end)
        self.world.spawn(process, main, name)


def _parts_of(plan: Plan, world: World) -> tuple[Oracle, type[Program]]:
    """Return the oracle of a plan's members, and their program."""
    if plan["program"] != "fit":
        return Oracle(world, plan, STATE), Program
    from tests.sim.fit_oracle import FitOracle
    from tests.sim.fit_programs import FitProgram  # imports Keras

    return FitOracle(world, plan, None), FitProgram


def _faults(faults: dict[Any, Any]) -> dict[int, Fault]:
    return {int(point): Fault(**fault) for point, fault in faults.items()}


class _Log(logging.Handler):
    """Shows what the package logs in the transcript; an error of the package is a violation."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world, self._thread = world, threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread != self._thread:  # of a process group of another test
            return
        current = self._world.current
        if current is not None and current.process.is_dead:  # its task unwinds
            return
        if record.levelno >= logging.ERROR:
            self._world.fail(f"{record.getMessage()}: {sys.exc_info()[1]!r}")
            if self._world.transcript is not None:
                self._world.transcript.append(logging.Formatter().format(record))
        else:
            self._world.note(f"logs: {record.getMessage()}")


@contextlib.contextmanager
def _installed(world: World, keeps_few: bool) -> Iterator[None]:
    """Give the package the clock, the points and the log of a world; this is all that it replaces.

    Other seams are arguments. The responses of which process groups keep few are those of
    constants.
    """
    log = logging.getLogger("flatweights")
    handler = _Log(world)
    before = log.level, log.propagate, log.handlers
    clock = _clock.now, _clock.sleep, _clock.wall
    kept = _response_cache._KEPT, _response_cache._KEPT_SMALL
    hook, works = _failpoints.hook, _report.METRICS.works
    drawn = random.getstate()
    thread = threading.get_ident()  # others, as that of the metrics, have the real clock

    def point(name: str) -> None:
        if threading.get_ident() == thread:
            world.point(name)

    def read_clock() -> float:
        return world.read_clock() if threading.get_ident() == thread else clock[0]()

    def sleep(seconds: float) -> None:
        (world.sleep if threading.get_ident() == thread else clock[1])(seconds)

    _clock.now = _clock.wall = read_clock
    _clock.sleep = sleep
    _failpoints.hook = point
    _report.METRICS.works = False
    if keeps_few:
        _response_cache._KEPT, _response_cache._KEPT_SMALL = 1, 0
    log.propagate, log.handlers = False, [handler]
    log.setLevel(logging.ERROR if world.transcript is None else logging.INFO)
    random.seed(0)
    try:
        yield
    finally:
        random.setstate(drawn)
        log.propagate, log.handlers = before[1:]
        log.setLevel(before[0])
        _response_cache._KEPT, _response_cache._KEPT_SMALL = kept
        _failpoints.hook, _report.METRICS.works = hook, works
        _clock.now, _clock.sleep, _clock.wall = clock


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Collect no garbage meanwhile: it is slow, and `collect` does it now and then."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.collect()
        if was_enabled:
            gc.enable()


class Failure(NamedTuple):
    """A schedule that violates an invariant: its plan, its seed, and what does not hold."""

    plan: Plan
    seed: int
    text: str


def schedule_of(plan: Plan, seed: int, *, has_transcript: bool = False) -> Schedule | GroupSchedule:
    """Return the schedule of a plan of any protocol, which has run."""
    if plan["protocol"] in ("members", "nodes", "fit"):
        schedule = Schedule(plan, seed, has_transcript=has_transcript)
        schedule.run()
        return schedule
    of_group = GroupSchedule(plan, seed, has_transcript=has_transcript)
    with _installed(of_group.world, keeps_few=False):
        of_group.run()
    return of_group


def failure_of(plan: Plan, seed: int) -> Failure | None:
    """Run a schedule; return its failure, if it has one."""
    failures = schedule_of(plan, seed).world.failures
    return Failure(plan, seed, failures[0]) if failures else None


def shrunk(failure: Failure) -> Failure:
    """Return a failure of the same kind with as small a plan as is found."""
    kind = kind_of(failure.text)
    while True:
        for plan in _SMALLER[failure.plan["protocol"]](failure.plan):
            found = None
            for seed in (failure.seed, *range(_TRIES)):
                found = failure_of(plan, seed)
                if found is not None and kind_of(found.text) == kind:
                    break
                found = None
            if found is not None:
                failure = found
                break
        else:
            return failure


def kind_of(text: str) -> str:
    """Return a violation without its numbers and names."""
    return " ".join(word for word in text.split() if word.isalpha())[:60]


def transcript_of(plan: Plan, seed: int) -> list[str]:
    """Return what happens in a schedule, in lines."""
    world = schedule_of(plan, seed, has_transcript=True).world
    assert world.transcript is not None
    end = f"{world.now - BEGIN:9.4f}  {'':<14}  the end, after {world.steps} steps"
    return [*world.transcript, end]
