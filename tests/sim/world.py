"""The scheduler: processes, their tasks, events, and the virtual clock; one task runs at a time.

A task is a greenlet. Whatever a task can be preempted at calls `World.point`, and whatever it waits
for calls `World.block`; between two of these it runs alone. A seed decides which task goes on. The
clock moves only when nothing can go on before the next event.

A task that waits is looked at again only when the `Changing` object that it waits for says that it
has changed, when its time is up, or when its process dies. So a step costs as much as there are
tasks that can go on, and not as much as there are tasks.
"""

from __future__ import annotations

import heapq
import random
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from greenlet import getcurrent, greenlet

BEGIN = 1000.0
"""The time, in seconds, at which a schedule begins."""

_NEVER = float("inf")


class Killed(BaseException):
    """Unwinds the tasks of a process that was killed; nothing that they do meanwhile counts."""


class Fault(NamedTuple):
    """What happens to a process at one of its points.

    Attributes:
        kind: "kill", "stop" or "interrupt".
        seconds: How long it is stopped.
    """

    kind: str
    seconds: float = 0.0


class Changing:
    """Something that tasks wait for."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.waiters: list[Task] = []

    def changed(self, *_: object) -> None:
        """Have the tasks that wait for it look again."""
        for task in self.waiters:
            self._world.look(task)


class Bell(Changing):
    """The bell of one that waits for answers, and polls for them before it sleeps."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._is_rung = False
        self._missing = 0

    def count_down(self) -> None:
        """Ring, if this is the last of the answers that were missing."""
        self._missing -= 1
        if self._missing == 0:
            self.ring_bell()

    def ring_bell(self) -> None:
        """Wake the one that waits."""
        self._is_rung = True
        self.changed()

    def finds(self, channels: Sequence[Any], enough: int) -> bool:
        """Whether it polls, and finds ``enough`` answers."""
        if not channels or self._world.draw() >= 0.3:
            return False
        self._world.point("watch", 1.0)
        answered: int = sum(channel.is_answered for channel in channels)
        return answered >= enough


class SimulatedLock(Changing):
    """A lock that the task that has it may take again."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._owner: Any = None
        self._depth = 0

    def __enter__(self) -> None:
        current = self._world.current
        self._world.point("a lock")
        if self._owner is not current:
            self._world.block(lambda: self._owner is None, self)
        self._owner = current
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self.changed()


class Task:
    """A thread or a coroutine of a process."""

    def __init__(self, world: World, process: Process, run: Callable[[], Any], name: str) -> None:
        self.world, self.process, self.name, self._run = world, process, name, run
        self.condition: Callable[[], bool] | None = None  # that it waits for
        self.end: float | None = None  # of that wait
        self.waits = 0  # how often it has waited
        self.is_looked_at = False  # by the scheduler, in each step
        self.is_over = self.has_begun = False
        self.weight = 1.0  # how likely it goes on, compared with others
        self.abandon: Callable[[], None] = _nothing  # called if the task never begins
        self.is_in_loop = False  # of an event loop: alone among such tasks, until it awaits
        self._greenlet = greenlet(self._main, world.scheduler)

    def _main(self) -> None:
        try:
            if not self.process.is_dead:
                self._run()
        except Killed:
            pass
        except BaseException as error:
            self.world.crashed(self, error)
        finally:
            self.is_over = True
            self.leave_loop()

    def leave_loop(self) -> None:
        """Let other coroutines of the event loop run."""
        if self.process.in_loop is self:
            self.process.in_loop = None

    def resume(self) -> None:
        """Run until the task pauses or ends."""
        self.has_begun = True
        if self.is_in_loop:
            self.process.in_loop = self
        self.world.current = self
        self._greenlet.switch()
        self.world.current = None

    def pause(self) -> None:
        """Let the scheduler go on."""
        self.world.scheduler.switch()
        if self.process.is_dead:
            raise Killed


class Process:
    """A process: at its points, by their number, it is killed, stopped or interrupted.

    Attributes:
        stops: The times, from and until, at which it was stopped.
        notes: What the simulation knows of it, by name.
    """

    def __init__(self, world: World, name: str, faults: dict[int, Fault] | None = None) -> None:
        self.world, self.name, self.faults = world, name, faults or {}
        self.is_dead = False
        self.died_at = _NEVER
        self.stopped_until = 0.0
        self.in_loop: Task | None = None  # the coroutine that runs
        self.main: Task | None = None  # the task that is interrupted
        self.points = 0
        self.tasks: list[Task] = []
        self.at_death: list[Callable[[], None]] = []
        self.stops: list[tuple[float, float]] = []
        self.notes: dict[Any, Any] = {}

    def stop(self, seconds: float) -> None:
        """Stop all its tasks for a while."""
        self.stopped_until = max(self.stopped_until, self.world.now + seconds)
        self.stops.append((self.world.now, self.stopped_until))

    def kill(self) -> None:
        """End it where it is."""
        if not self.is_dead:
            self.is_dead, self.died_at = True, self.world.now
            for task in self.tasks:
                self.world.look(task)
            for act in self.at_death:
                act()


class World:
    """The scheduler and the clock.

    Attributes:
        now: The time.
        failures: The invariants that were violated; the first one ends the schedule.
        transcript: What has happened, in lines; None, if nobody wants to read it.
    """

    def __init__(self, seed: int, *, yields: float = 0.5, has_transcript: bool = False) -> None:
        """Begin at `BEGIN`.

        Args:
            seed: The seed of everything that is drawn.
            yields: How likely a task is preempted at a point.
            has_transcript: Whether to write a transcript.
        """
        self.rng = random.Random(seed)
        self.draw = self.rng.random
        self.now = BEGIN
        self.scheduler = getcurrent()
        self.current: Task | None = None
        self.steps = 0
        self.transcript: list[str] | None = [] if has_transcript else None
        self.failures: list[str] = []
        self.rates: dict[str, float] = {}  # how likely things go wrong, by name
        self.at_rest: Callable[[], None] = _nothing  # called before the clock moves
        self._yields = yields
        self._tasks = 0  # that are not over
        self._looked_at: list[Task] = []
        self._timers: list[tuple[float, int, Task, int]] = []
        self._events: list[tuple[float, int, Process | None, Callable[[], None]]] = []
        self._count = 0

    # The transcript.

    def note(self, text: str) -> None:
        """Add a line to the transcript."""
        if self.transcript is not None:
            name = self.current.name if self.current else ""
            self.transcript.append(f"{self.now - BEGIN:9.4f}  {name:<14}  {text}")

    def fail(self, text: str) -> None:
        """Note that an invariant does not hold."""
        self.note(f"VIOLATION: {text}")
        self.failures.append(text)

    def crashed(self, task: Task, error: BaseException) -> None:
        """Note that a task has ended with an error that nobody expects."""
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{where.name}, line {where.lineno}"
        self.fail(f"{task.name} raised {type(error).__name__}: {error} ({place})")
        if self.transcript is not None:
            self.transcript += traceback.format_exception(error)

    def chance(self, name: str) -> bool:
        """Whether something goes wrong now, by its rate."""
        rate = self.rates.get(name, 0.0)
        return rate > 0 and self.draw() < rate

    # What tasks call.

    def process(self) -> Process:
        """Return the process of the current task.

        Raises:
            Killed: If it is dead, or no task runs: a finalizer of an earlier schedule.
        """
        if self.current is None or self.current.process.is_dead:
            raise Killed
        return self.current.process

    def spawn(self, process: Process, run: Callable[[], Any], name: str) -> Task:
        """Start a task."""
        task = Task(self, process, run, name)
        task.weight = _WEIGHTS[int(self.draw() * len(_WEIGHTS))]
        process.tasks.append(task)
        self._tasks += 1
        self.look(task)
        return task

    def look(self, task: Task) -> None:
        """Have the scheduler look at a task from its next step on."""
        if not (task.is_looked_at or task.is_over):
            task.is_looked_at = True
            self._looked_at.append(task)

    def after(
        self, seconds: float, act: Callable[[], None], process: Process | None = None
    ) -> None:
        """Call ``act`` later; in a ``process``, not while that is stopped, nor once it is dead."""
        self._count += 1
        heapq.heappush(self._events, (self.now + seconds, self._count, process, act))

    def point(self, name: str, likely: float | None = None) -> None:
        """Be preempted, maybe; or be killed, stopped or interrupted, as the plan says."""
        task = self.current
        if task is None:
            return
        process = task.process
        if process.is_dead:
            raise Killed
        process.points += 1
        if process.faults and process.points in process.faults:
            self._strike(task, process.faults[process.points], name)
        if self.draw() < (self._yields if likely is None else likely):
            task.pause()

    def _strike(self, task: Task, fault: Fault, name: str) -> None:
        process = task.process
        if fault.kind == "kill":
            self.note(f"{process.name} is killed at point {process.points}: {name}")
            process.notes["broke"] = True  # a leave that it has sent may not arrive
            process.kill()
            raise Killed
        if fault.kind == "stop":
            where = f"at point {process.points}: {name}"
            self.note(f"{process.name} is stopped for {fault.seconds:g} s {where}")
            process.stop(fault.seconds)
            task.pause()
        elif task is process.main:
            self.note(f"{process.name} is interrupted at point {process.points}: {name}")
            raise KeyboardInterrupt

    def block(
        self, condition: Callable[[], bool], on: Changing | None, seconds: float | None = None
    ) -> bool:
        """Wait until ``condition``; return whether it holds, rather than that the time is up.

        Args:
            condition: What it waits for.
            on: What changes when that may have become true.
            seconds: How long to wait; for ever, if None.
        """
        task = self.current
        assert task is not None
        if task.process.is_dead:
            raise Killed
        if condition():
            return True
        task.condition, task.waits = condition, task.waits + 1
        if seconds is not None:
            task.end = self.now + seconds
            self._count += 1
            heapq.heappush(self._timers, (task.end, self._count, task, task.waits))
        if on is not None:
            on.waiters.append(task)
        task.pause()
        task.condition = task.end = None
        if on is not None:
            on.waiters.remove(task)
        return condition()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        self.block(_never, None, seconds)

    def read_clock(self) -> float:
        """Return the time; a task may be preempted there. Reading it takes time, too."""
        task = self.current
        if task is not None:
            if task.process.is_dead:
                raise Killed
            if self.draw() < _AT_CLOCK:
                self.point("clock", 1.0)
            self.now += _READ
        return self.now

    # The scheduler.

    def run(self, most_steps: int) -> str:
        """Run until nothing is left to do ("done"), nothing can go on ("stuck"), an invariant does
        not hold ("violated"), or too many steps were made ("steps").
        """
        draw = self.draw
        while not self.failures:
            self.steps += 1
            if self.steps > most_steps:
                return "steps"
            now = self.now
            later = self._look_at_timers(now)
            ready, total, continued = self._look_at_tasks(now)
            if self._events and self._events[0][0] <= now:
                ready.append(None)
                total += 1.0
            if not ready:
                later = min(later, continued)
                if later == _NEVER:
                    return "stuck" if self._tasks else "done"
                self.at_rest()
                self.now = max(now, later)
                continue
            chosen = ready[0] if len(ready) == 1 else _choice(ready, draw() * total)
            if chosen is None:
                self._happen()
                continue
            chosen.resume()
            if chosen.is_over:
                self._end(chosen)
        return "violated"

    def _look_at_timers(self, now: float) -> float:
        """Look at the tasks whose time is up; return the time of the next timer or event."""
        timers, events = self._timers, self._events
        while timers and (timers[0][0] <= now or timers[0][2].waits != timers[0][3]):
            _, _, task, wait = heapq.heappop(timers)
            if task.waits == wait:
                self.look(task)
        later = events[0][0] if events else _NEVER
        return timers[0][0] if timers and timers[0][0] < later else later

    def _look_at_tasks(self, now: float) -> tuple[list[Task | None], float, float]:
        """Return the tasks that can go on, their weight together, and when a stopped one may."""
        ready: list[Task | None] = []
        total, continued = 0.0, _NEVER
        is_any_done = False  # with waiting, or over
        for task in self._looked_at:
            process = task.process
            condition = task.condition
            if task.is_over:
                is_any_done = True
            elif process.is_dead:
                if task.has_begun:  # it unwinds
                    ready.append(task)
                    total += task.weight
                else:
                    self._end(task)
                    is_any_done = True
            elif process.stopped_until > now:
                continued = min(continued, process.stopped_until)
            elif condition is None or condition() or (task.end is not None and task.end <= now):
                if not task.is_in_loop or process.in_loop in (None, task):
                    ready.append(task)
                    total += task.weight
            else:
                task.is_looked_at = False
                is_any_done = True
        if is_any_done:
            self._looked_at = [
                task for task in self._looked_at if task.is_looked_at and not task.is_over
            ]
        return ready, total, continued

    def _end(self, task: Task) -> None:
        if not task.has_begun:
            task.abandon()
        task.is_over = True
        task.waits += 1  # its timer is no longer of use
        task.process.tasks.remove(task)
        self._tasks -= 1

    def _happen(self) -> None:
        """Let the next event happen."""
        _, _, process, act = heapq.heappop(self._events)
        if process is None:
            act()
        elif not process.is_dead:
            if process.stopped_until > self.now:
                self.after(process.stopped_until - self.now, act, process)
            else:
                act()

    def close(self, processes: list[Process]) -> None:
        """End all processes, without any effect."""
        for process in processes:
            process.is_dead = True
        for process in processes:
            for task in process.tasks:
                if not task.has_begun:
                    task.abandon()
                elif not task.is_over:
                    task.resume()
            process.tasks.clear()
        self._events.clear()
        self._timers.clear()
        self._looked_at.clear()


_READ = 1e-6  # seconds; or a loop until some time would never end
_AT_CLOCK = 0.03  # how likely a task is preempted where it reads the clock
_WEIGHTS = 1.0, 1.0, 0.3, 0.05  # how likely tasks go on


def _nothing() -> None:
    pass


def _never() -> bool:
    return False


def _choice(ready: list[Task | None], at: float) -> Task | None:
    """Return one of ``ready``: that at whose place among their weights ``at`` lies."""
    for task in ready:
        at -= 1.0 if task is None else task.weight
        if at < 0.0:
            return task
    return ready[-1]
