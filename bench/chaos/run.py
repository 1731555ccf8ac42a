"""One run: turns with faults between turns without, then the check of all notes."""

import contextlib
import faulthandler
import math
import os
import signal
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from bench import nodes
from bench.chaos import faults, oracle
from bench.chaos.oracle import Entry, Got, Note, read_logs

HANG = 60.0  # seconds without a step that a rank takes part in
_START = 300.0  # seconds that processes have to start: six import TensorFlow on few cores
_POLL = 0.05
_FULL_STEPS = 3  # before a turn without faults: all recover, from the last fault too
_MEMORY = "/memfd:flatweights"  # the target of the descriptor of such a file
_PACKETS = "0005"  # the type of the sockets of channels and publications; Ray has none of it


@dataclass
class Plan:
    """The parameters of a run.

    Attributes:
        seed: It decides the faults and all weights.
        seconds: The time with faults, in all.
        quiet: Seconds without faults once all ranks were in a few steps: before, in the middle,
            after.
        every: The fewest and the most seconds between two faults.
        lasting: The fewest and the most seconds that a process is stopped.
        size: The number of ranks.
        elements: The number of elements of a model.
        pace: Seconds of work in each step of a worker.
        timeout: Seconds that the others wait for a late process.
        without: Kinds of faults that are left out.
        mbit: The rate of links that are cut and slowed down, in Mbit/s; 0 without such links.
        steps: The fewest steps of both turns with faults, however long they take; of modes that
            count them.
    """

    seed: int
    seconds: float
    quiet: float = 20.0
    every: tuple[float, float] = (20.0, 30.0)
    lasting: tuple[float, float] = (1.0, 10.0)
    size: int = 6
    elements: int = 70_000
    pace: float = 0.01
    timeout: float = 1.0
    without: Sequence[str] = ()
    mbit: float = 0.0
    steps: int = 0


class Mode(ABC):
    """A training of several processes, and its possible faults.

    Attributes:
        kinds: The kinds of faults; repeated kinds are more frequent.
        points: The points of calls at which a process dies.
        in_turns: Whether a step has one rank; otherwise all ranks take part in each step.
        failure: The error that ended the training too early.
        count: How many steps there were; without end in modes that do not count them.
        is_quiet: Whether this is a turn without faults.
    """

    kinds: ClassVar[tuple[str, ...]]
    points: ClassVar[tuple[str, ...]] = ()
    in_turns: ClassVar[bool] = False

    def __init__(self, folder: Path, plan: Plan) -> None:
        """Take the folder and the plan of the run."""
        self.folder = folder
        self.plan = plan
        self.over = folder / "over"
        self.failure: BaseException | None = None
        self.count = math.inf
        self.is_quiet = False

    @abstractmethod
    def start(self) -> None:
        """Start the processes."""

    @abstractmethod
    def tend(self) -> None:
        """Start dead processes again, unless Ray does; it is called again and again."""

    def is_as_at_first(self) -> bool:
        """Whether there are as many processes as at first; asked at the end of a quiet turn."""
        return True

    @abstractmethod
    def end(self) -> None:
        """Wait for the processes to end; the file ``over`` exists."""

    @abstractmethod
    def check(self, entries: Sequence[Entry]) -> tuple[int, list[str]]:
        """Return the number of averages or reads that the oracle compared, and the errors."""

    def megabytes_kept(self, entries: Sequence[Entry]) -> float:
        """Return by how much other libraries have made a process grow, at most."""
        return 0.0


class DrivenMode(Mode):
    """A mode whose steps a thread of the driver makes."""

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def tend(self) -> None:
        """Do nothing: Ray starts the actors again."""

    def end(self) -> None:
        """Wait for the thread."""
        self._thread.join(HANG)
        if self._thread.is_alive():
            self.failure = self.failure or TimeoutError("the driver's loop does not end")

    @abstractmethod
    def steps(self) -> None:
        """Make the group, and steps until ``over`` exists; shut the group down."""

    def _run(self) -> None:
        try:
            self.steps()
        except BaseException as error:
            self.failure = error


@dataclass
class Injected:
    """A fault that was caused.

    Attributes:
        at: Its time, in seconds since the run began.
        kind: Its kind.
        rank: The process that it befell, if it has one.
        seconds: The time until the next full step.
    """

    at: float
    kind: str
    rank: int
    seconds: float | None = None


class Usage(NamedTuple):
    """The resources of the processes of a role.

    Attributes:
        processes: Their number.
        descriptors: The descriptors of the process with most of them.
        shared: Of one process, at most: the memory files and sockets that this package makes.
        megabytes: The memory of its own of the process that has the most.
    """

    processes: int = 0
    descriptors: int = 0
    shared: int = 0
    megabytes: float = 0.0


@dataclass
class Record:
    """The record of a run.

    Attributes:
        mode: The name of the mode.
        plan: The plan of the run.
        turns: Begin and end of each turn, in seconds; the first, third and fifth without faults.
        faults: The faults that were caused.
        steps: The number of steps in each second.
        checked: The number of averages or reads that the oracle compared.
        wrong: The differences from the oracle.
        hangs: The ranks that were in no step for a minute, and other things that did not end.
        events: The number of notes of each text.
        usage: By role, the resources of its processes at the end of each turn without faults.
        left: Processes that still ran at the end.
        megabytes_kept: The memory of other libraries by which a process grew, at most.
        rates: Steps per second in turns without faults, in turns with faults, and between the
            recovery from one fault and the next fault.
    """

    mode: str
    plan: dict[str, Any]
    turns: list[tuple[float, float]] = field(default_factory=list)
    faults: list[Injected] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    checked: int = 0
    wrong: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)
    events: dict[str, int] = field(default_factory=dict)
    usage: list[dict[str, Usage]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    megabytes_kept: float = 0.0
    rates: tuple[float, float, float] = (0.0, 0.0, 0.0)

    @property
    def kept(self) -> tuple[float, float]:
        """The rates of steps with faults, and between them, relative to the rate without faults."""
        quiet, with_faults, between = self.rates
        return (with_faults / quiet, between / quiet) if quiet else (0.0, 0.0)

    def as_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


class Run:
    """Runs a mode by its plan."""

    def __init__(self, kind: type[Mode], plan: Plan, folder: Path) -> None:
        """Prepare; nothing is started."""
        self.plan = plan
        self.record = Record(kind.__module__.rpartition(".")[2], asdict(plan))
        self._folder = folder
        self._mode = kind(folder, plan)
        self._injector = faults.Injector(folder, kind.points, plan.mbit)
        kinds = [*kind.kinds, *(faults.LINKS if plan.mbit else ())]
        kinds = [one for one in kinds if one not in plan.without]
        self._faults = faults.schedule(plan.seed, kinds, plan.size, plan.every, plan.lasting)

    def do(self) -> Record:
        """Run; return the record."""
        record, mode = self.record, self._mode
        mode.start()
        try:
            self._wait_until_all_take_part(_START)
            self._begin = time.monotonic()
            for number in range(5):
                begin = time.monotonic() - self._begin
                try:
                    self._turn(number)
                finally:
                    record.turns.append((begin, time.monotonic() - self._begin))
        except TimeoutError as error:
            record.hangs.append(str(error))
        finally:
            self._injector.end()
            mode.over.touch()
            mode.end()
        if mode.failure is not None:
            record.hangs.append(f"{type(mode.failure).__name__}: {mode.failure}")
        self._evaluate()
        return record

    def _turn(self, number: int) -> None:
        begin, plan, mode = time.monotonic(), self.plan, self._mode
        if number % 2:
            self._make_faults(begin + plan.seconds / 2, plan.steps * (number + 1) // 4)
            self._wait_until_all_take_part()
        else:
            mode.is_quiet = True
            end = time.monotonic() + HANG
            while not mode.is_as_at_first() and time.monotonic() < end:
                self._watch(time.monotonic() + _POLL)
            for _ in range(_FULL_STEPS):
                last = time.time()
                while not self._was_full_since(last) and time.monotonic() < end:
                    self._watch(time.monotonic() + _POLL)
            self._watch(time.monotonic() + plan.quiet)
            self.record.usage.append(usage_of(own_processes()))
            mode.is_quiet = False

    def _make_faults(self, end: float, steps: int) -> None:
        while True:
            fault = next(self._faults)
            due = time.monotonic() + fault.after
            is_last = due > end and self._mode.count >= steps
            self._watch(min(due, end) if is_last else due)
            if is_last:
                return
            while (rank := self._injector.do(fault)) is None:  # take another one
                fault = next(self._faults)
            at = time.monotonic() - self._begin
            self.record.faults.append(Injected(at, fault.kind, rank))

    def _watch(self, end: float) -> None:
        """Tend the mode until ``end``."""
        while True:
            self._mode.tend()
            now = time.monotonic()
            if now >= end:
                return
            if self._mode.failure is not None:
                raise TimeoutError("the training has ended")
            unseen = [rank for rank, age in self._ages().items() if age > HANG]
            if unseen:
                self._show_stacks()
                raise TimeoutError(f"ranks {unseen} were in no step for {HANG:.0f} s")
            time.sleep(min(_POLL, end - now))

    def _wait_until_all_take_part(self, seconds: float = HANG) -> None:
        begin = time.monotonic()
        while time.monotonic() < begin + seconds:
            self._watch(time.monotonic() + _POLL)
            ages = self._ages()
            if len(ages) >= self.plan.size and max(ages.values()) < time.monotonic() - begin:
                return
        self._show_stacks()
        raise TimeoutError(f"not all ranks take part after {seconds:.0f} s: {self._ages()}")

    def _was_full_since(self, begin: float) -> bool:
        """Whether all ranks were in a step; in modes ``in_turns``, each in one."""
        if self._mode.in_turns:
            return all(time.time() - age > begin for age in self._ages().values())
        full = self._folder / oracle.FULL
        return full.exists() and full.stat().st_mtime > begin

    def _ages(self) -> dict[int, float]:
        """Return, by rank, the seconds since its last step."""
        ages = {}
        for path in self._folder.glob("*.seen"):
            with contextlib.suppress(FileNotFoundError):
                ages[int(path.stem)] = time.time() - path.stat().st_mtime
        return ages

    def _show_stacks(self) -> None:
        """Print the stacks of all threads, here and in the processes with a rank."""
        faulthandler.dump_traceback(all_threads=True)
        for path in self._folder.glob("[0-9]*.pid"):
            with contextlib.suppress(OSError):
                os.kill(int(path.read_text()), signal.SIGUSR1)
        time.sleep(1.0)
        for path in sorted(self._folder.glob("*.stacks")):
            print(path.name, path.read_text(), file=sys.stderr)

    def _evaluate(self) -> None:
        record, mode = self.record, self._mode
        entries = list(read_logs(self._folder))
        record.checked, record.wrong = mode.check(entries)
        record.megabytes_kept = mode.megabytes_kept(entries)
        notes = [entry for entry in entries if isinstance(entry, Note)]
        record.wrong += [f"rank {n.rank}: {n.text}" for n in notes if n.text.startswith("wrong")]
        record.events = dict(Counter(note.text.partition(":")[0] for note in notes))
        steps = _steps_of(entries)
        if not steps or not record.turns:
            return
        times = [step.at - self._begin for step in steps]
        full = [at - self._begin for at in _full(steps, mode.in_turns)]
        end = record.turns[-1][1]
        counts = Counter(int(at) for at in times)
        record.steps = [counts[second] for second in range(int(end))]
        recovering = []
        for fault in record.faults:
            # A process takes an order a little later.
            text = faults.BEFALLEN + fault.kind
            orders = [n.at - self._begin for n in notes if (n.rank, n.text) == (fault.rank, text)]
            fault.at = min((at for at in orders if at >= fault.at), default=fault.at)
            # The first full step may have begun before the fault.
            after = [at for at in full if at > fault.at][1:2]
            fault.seconds = after[0] - fault.at if after else None
            recovering.append((fault.at, after[0] if after else end))
        quiet, loud = record.turns[::2], record.turns[1::2]
        calm = _without(loud, recovering)
        record.rates = (_rate(times, quiet), _rate(times, loud), _rate(times, calm))


Span = tuple[float, float]


def _steps_of(entries: Sequence[Entry]) -> list[Got]:
    """Return the first note of each step, in their order."""
    first: dict[Any, Got] = {}
    for got in entries:
        if isinstance(got, Got):
            key = (got.group, got.number, got.used)
            if key not in first or got.at < first[key].at:
                first[key] = got
    return sorted(first.values(), key=lambda got: got.at)


def _full(steps: Sequence[Got], in_turns: bool) -> list[float]:
    """Return the times of full steps: all ranks were in one; ``in_turns``, each in one since."""
    times, seen = [], set[int]()
    for step in steps:
        seen = (seen if in_turns else set()) | {*step.used}
        if seen.issuperset(step.expected):
            times.append(step.at)
            seen = set()
    return times


def _without(spans: Sequence[Span], holes: Sequence[Span]) -> list[Span]:
    for begin, end in holes:
        pieces = [((a, min(b, begin)), (max(a, end), b)) for a, b in spans]
        spans = [(a, b) for pair in pieces for a, b in pair if a < b]
    return list(spans)


def _rate(times: Sequence[float], spans: Sequence[Span]) -> float:
    seconds = sum(end - begin for begin, end in spans)
    count = sum(any(begin <= at < end for begin, end in spans) for at in times)
    return count / seconds if seconds else 0.0


def own_processes() -> dict[int, str]:
    """Return the roles of this process, and of all processes that it has started.

    On the nodes of `bench.nodes`, the process that made them has started Ray.
    """
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            parents[int(folder.name)] = int(
                (folder / "stat").read_text().rpartition(")")[2].split()[1]
            )
    above = [os.getppid()] if nodes.is_among_nodes() else []
    roles, found = {os.getpid(): "driver"}, [*above, os.getpid()]
    for parent in found:
        for pid in (pid for pid, one in parents.items() if one == parent and pid not in found):
            with contextlib.suppress(OSError):
                words = (Path("/proc") / str(pid) / "cmdline").read_bytes().split(b"\0")
                roles[pid] = Path(words[0].decode().partition(" ")[0].partition(".")[0]).name
                found.append(pid)
    return roles


def usage_of(roles: dict[int, str]) -> dict[str, Usage]:
    """Return the resources of the processes, by role."""
    usage: dict[str, Usage] = {}
    for pid, role in roles.items():
        folder = Path("/proc") / str(pid)
        with contextlib.suppress(OSError):
            targets = [str(path.readlink()) for path in (folder / "fd").iterdir()]
            lines = (folder / "smaps_rollup").read_text().splitlines()
            private = sum(int(line.split()[1]) for line in lines if line.startswith("Private"))
            packets = {
                f"socket:[{line.split()[6]}]"
                for line in (folder / "net" / "unix").read_text().splitlines()[1:]
                if line.split()[4] == _PACKETS
            }
            shared = [t for t in targets if t.startswith(_MEMORY) or t in packets]
            before = usage.get(role, Usage())
            usage[role] = Usage(
                before.processes + 1,
                max(before.descriptors, len(targets)),
                max(before.shared, len(shared)),
                max(before.megabytes, private / 1024),
            )
    return usage


def run(kind: type[Mode], plan: Plan) -> Record:
    """Run a mode in the Ray that this process is connected to."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        return Run(kind, plan, Path(folder)).do()


def wait_for_end(pids: Sequence[int], seconds: float = 15.0) -> list[int]:
    """Return the processes that still live after some seconds."""
    end = time.monotonic() + seconds
    living = list(pids)
    while living and time.monotonic() < end:
        time.sleep(0.1)
        living = [pid for pid in living if _lives(pid)]
    return living


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with contextlib.suppress(OSError):
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
