"""What must hold of a group: checked when workers run methods, when calls return, and at the end.

The truth is what workers have done: which weights they were set to, which call they ran on which
weights, and what that gave. All models are multiples of a number that every count of ranks divides,
so exactly one average is right, bit by bit. In particular:

- an average consists of what its ranks have returned for that call, each with its weight, and all
  of them ran it on the weights that the group had sent last;
- no process runs a call twice, or in the middle of another one;
- late, failed and quarantined ranks are what they are called, and a rank without any trouble is
  none of these;
- a call ends within its timeouts, and does not wait while no worker works;
- once nothing goes wrong any more, a round of all workers that live follows in bounded time;
- at the end no answer is in flight, and no weights are held.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tests.sim.world import Process, World

from flatweights.ray.support._errors import is_stale

if TYPE_CHECKING:
    from tests.sim.group_platform import SimulatedWorkers

    from flatweights.ray.results._round import Round

UNIT = 720720.0
"""A multiple of all numbers up to 16: averages of multiples of it are integers."""

SIZE = 136
"""The numbers of a model: more than travel within a message."""

_SLACK = 0.7  # seconds of messages
_IDLE = 5.0  # seconds in which no worker works, and the driver waits
_REPORTED = 3.0  # seconds after which Ray has reported every death


class Run:
    """A method that a worker runs for a call.

    Attributes:
        base: The weights that it was set to last; None, if it has those that it was built with.
        before: The weights on which it runs.
        result: What it returns; None before, and if it raises.
        weight: The weight of the result.
        ended: The time at which it has returned.
        is_spoiled: Whether the result has NaN.
        is_late: Whether the driver knows that it is late.
        has_raised: Whether it has raised.
    """

    def __init__(self, process: Process, base: bytes | None, before: NDArray[Any]) -> None:
        self.process, self.base, self.before = process, base, before.tobytes()
        self.result: NDArray[Any] | None = None
        self.weight = 1.0
        self.ended = float("inf")
        self.is_spoiled = self.has_raised = self.is_late = False


class Call:
    """A call of the driver.

    Attributes:
        number: Its number, an argument of its methods.
        begin: The time at which it was made.
        runs: By rank, the methods that have run for it.
        rank: The rank of a call of a loop.
        rounds: The number of rounds of that loop before it.
        published: The number of publications before it.
    """

    def __init__(self, number: int, begin: float) -> None:
        self.number, self.begin = number, begin
        self.runs: dict[int, list[Run]] = {}
        self.rank = -1
        self.rounds = self.published = 0


class GroupOracle:
    """The notes, and the checks.

    Attributes:
        counts: How often things have happened, by name.
        latest: The weights that workers may have been sent last; None, if that is not known.
        troubled: The ranks that something has happened to, or that were late.
    """

    def __init__(self, world: World, plan: dict[str, Any], platform: SimulatedWorkers) -> None:
        self._world, self._plan, self._platform = world, plan, platform
        self.counts: Counter[str] = Counter()
        self.calls: dict[int, Call] = {}
        self._numbers = itertools.count(1)
        self._models = 0
        self._bases: dict[Any, int] = {}
        self.latest: set[bytes | None] | None = None
        self.built: dict[int, list[bytes]] = {}  # by rank, the weights of its processes
        self.troubled: set[int] = set()
        self.driver: Process | None = None
        self._idle_since: float | None = None
        self._in_call: Call | None = None
        self._before: set[bytes | None] | None = None  # what was the latest before
        self._has_run_on_some = False  # a worker, on weights that were sent
        self._known: list[Exception] = []  # errors of workers that lacked weights
        self.rounds = self.published = 0  # of the loop; finished publications
        self._open: dict[int, list[Call]] = {}  # calls of the loop, by rank
        self._publications: list[bytes] = []
        self._first: bytes | None = None  # the weights before the first publication

    def fail(self, text: str) -> None:
        """Note that an invariant does not hold."""
        self._world.fail(text)

    # Of workers.

    def new_model(self, rank: int) -> NDArray[Any]:
        """Return weights that no other process or call has."""
        values = np.zeros(SIZE)
        self._models += 1
        values[1 + rank] = self._models * UNIT
        return values

    def is_built(self, rank: int, process: Process, values: NDArray[Any]) -> None:
        """Note a new process, and its weights."""
        self.built.setdefault(rank, []).append(values.tobytes())
        process.notes["base"] = None

    def is_set(self, process: Process, values: NDArray[Any] | None) -> None:
        """Note that a worker was set to ``values``; None, if it has raised half-way."""
        process.notes["base"] = b"" if values is None else values.tobytes()
        if values is None:
            self.troubled.add(self._platform.actors.index(process.notes["actor"]))

    def begins(self, number: int, rank: int, process: Process, values: NDArray[Any]) -> Run:
        """Note that a worker begins to run a method."""
        call = self.calls[number]
        runs = call.runs.setdefault(rank, [])
        if any(run.process is process for run in runs):
            self.fail(f"{process.name} ran call {number} again")
        if process.notes.get("busy"):
            self.fail(f"{process.name} ran call {number} in the middle of another call")
        run = Run(process, process.notes["base"], values)
        runs.append(run)
        self._has_run_on_some = self._has_run_on_some or bool(run.base)
        if run.base == b"":
            self.fail(f"{process.name} ran call {number} on weights of which some were not set")
        elif call.rank >= 0:
            if run.base is not None and values.tobytes() != run.base:
                self.fail(f"{process.name} ran call {number} on weights that it had trained itself")
            self._check_publication(call, run)
        return run

    def result_of(self, run: Run, rank: int) -> NDArray[Any]:
        """Return what a method returns: it shows on which weights it has run."""
        values = self.new_model(rank)
        base = run.base if run.base is not None else run.before
        values[0] = UNIT * self._bases.setdefault(base, len(self._bases) + 1)
        run.result = values.copy()
        return values

    # Of the driver.

    def new_call(self) -> Call:
        """Return a new call."""
        call = Call(next(self._numbers), self._world.now)
        self.calls[call.number] = call
        return call

    def begin(self, call: Call | None) -> None:
        """Note that the driver is in a call from now on."""
        self._in_call, self._idle_since = call, None

    def end(self) -> None:
        """Note that the driver is in no call any more."""
        self._in_call = None

    def sends(self, values: NDArray[Any]) -> None:
        """Note that the driver is about to send weights, which workers may have from then on."""
        self._before = self.latest
        if self.latest is not None:
            self.latest = {*self.latest, values.tobytes()}

    def all_have_refused(self) -> None:
        """Note that all workers have refused the weights: those before are the latest again."""
        self.latest = self._before

    def has_sent(self, values: NDArray[Any]) -> None:
        """Note that workers have these weights."""
        self.latest = {values.tobytes()}

    def may_have_sent_average(self, call: Call) -> None:
        """Note that a call has failed, perhaps after workers were sent its average."""
        if self.latest is None:
            return
        runs = [run for runs in call.runs.values() for run in runs if run.result is not None]
        for count in range(1, len(runs) + 1):
            for some in itertools.combinations(runs, count):
                total = sum(run.weight for run in some)
                mean = sum(run.weight * run.result for run in some if run.result is not None)
                if total:
                    self.latest.add(np.asarray(mean / total).tobytes())

    def at_rest(self) -> None:
        """Check that the driver does not wait while nobody works; called as time passes."""
        call, world = self._in_call, self._world
        if call is None:
            return
        if self._is_busy():
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = world.now
        elif world.now > self._idle_since + _IDLE:
            self.fail(f"call {call.number} waits, and no worker works")

    def _is_busy(self) -> bool:
        world = self._world
        now = world.now
        driver = self.driver
        if driver is not None and driver.stopped_until > now:
            return True
        for actor in self._platform.actors:
            process = actor.process
            is_at_work = process.notes.get("busy") or process.stopped_until > now
            if is_at_work and not process.is_dead:
                return True
            if not actor.is_over and not actor.is_alive:
                return True
            if process.is_dead and now < process.died_at + _REPORTED:
                return True
        return False

    # Loops of results as they arrive.

    def begin_loop(self) -> None:
        """Note that a loop begins; results of earlier ones are in no round any more."""
        self.rounds = 0
        self._open.clear()

    def call_in_loop(self, rank: int) -> Call:
        """Return a new call of a loop to one rank."""
        call = self.new_call()
        call.rank, call.rounds, call.published = rank, self.rounds, self.published
        self._open.setdefault(rank, []).append(call)
        return call

    def publishes(self, values: NDArray[Any]) -> None:
        """Note that the driver is about to publish weights."""
        self._publications.append(values.tobytes())

    def has_not_published(self) -> None:
        """Note that there was no publication."""
        self._publications.pop()

    def has_published(self) -> None:
        """Note that the last publication is what workers get from now on."""
        self.published = len(self._publications)

    def _place_of(self, base: bytes | None) -> int:
        """Return the number of publications up to the weights of a method; 0 for the initial."""
        if base in self._publications:
            return self._publications.index(base) + 1
        return 0

    def _check_publication(self, call: Call, run: Run) -> None:
        place = self._place_of(run.base)
        if place < call.published:
            latest = f"publication {place}, and {call.published} was the latest"
            self.fail(f"call {call.number} to rank {call.rank} has the weights of {latest}")
        if place == 0 and run.base is not None:
            self._first = self._first or run.base
            if run.base != self._first:
                self.fail(f"call {call.number} to rank {call.rank} has weights of nobody")

    def check_result(self, begin: float, published: int, result: Round) -> None:
        """Check a round of a loop.

        Args:
            begin: The time at which it was asked for.
            published: The number of publications then.
            result: The round.
        """
        self.rounds += 1
        self.counts["rounds"] += 1
        for name in ("late", "failed", "stale", "quarantined"):
            self.counts[name] += len(getattr(result, name))
        ready = {rank: self._returned(rank) for rank in result.used}
        found = None
        for some in itertools.product(*ready.values()):
            runs = [call.runs[call.rank][-1] for call in some]
            total = sum(run.weight for run in runs)
            mean = sum(run.weight * run.result for run in runs if run.result is not None) / total
            if np.asarray(mean).tobytes() == np.asarray(result.weights["w"]).tobytes():
                found = some
                break
        if found is None:
            self.fail(f"round {self.rounds}: the average of {result.used} is none of their results")
            return
        for call in found:
            self._check_use(call, result, published)
        # Old results are left out whether they have NaN or not.
        left_out = [calls[0] for rank in result.stale if (calls := self._returned(rank, True))]
        for call in (*found, *left_out):
            calls = self._open[call.rank]
            if call in calls:
                del calls[: calls.index(call) + 1]
        self.troubled |= {*result.late, *result.failed, *result.stale}
        if len(found) == 1 and not self._platform.losses:
            self._check_is_oldest(found[0], begin)
        if result.late and self._plan["timeout"] is None:
            self.fail(f"round {self.rounds}: late {result.late}, without a timeout")

    def _returned(self, rank: int, may_be_spoiled: bool = False) -> list[Call]:
        """Return the calls of a rank that have returned, and were in no round."""
        now = self._world.now
        return [
            call
            for call in self._open.get(rank, ())
            if any(
                run.ended <= now
                and run.result is not None
                and (may_be_spoiled or not run.is_spoiled)
                for run in call.runs.get(rank, [])[-1:]
            )
        ]

    def _check_use(self, call: Call, result: Round, published: int) -> None:
        run = call.runs[call.rank][-1]
        place = self._place_of(run.base)
        staleness = result.staleness[call.rank]
        if not published - place <= staleness <= self.published - place:
            self.fail(
                f"round {self.rounds}: the result of rank {call.rank} is {self.published - place} "
                f"publications old, and not {staleness}"
            )
        most = self._plan["max_staleness"]
        if most is not None and staleness > most:
            self.fail(f"round {self.rounds}: rank {call.rank} is too stale: {staleness}")

    def _check_is_oldest(self, used: Call, begin: float) -> None:
        """Check that no older call had returned long before."""
        for rank in self._open:
            if rank in self.troubled or rank == used.rank or self._has_trouble(rank):
                continue
            for call in self._returned(rank)[:1]:
                run = call.runs[rank][-1]
                if run.ended < begin - _SLACK and call.rounds < used.rounds:
                    self.fail(
                        f"round {self.rounds}: rank {used.rank} was called after round "
                        f"{used.rounds}, rank {rank} after round {call.rounds}"
                    )

    # Rounds.

    def check_round(
        self, call: Call, result: Round, asked: Sequence[int], *, fresh: bool, by_run: bool = False
    ) -> None:
        """Check the round of a call.

        Args:
            call: The call.
            result: The round.
            asked: The ranks that it may contain.
            fresh: Whether workers had to run it on the weights that the group has sent last.
            by_run: Whether it is a round of `WorkerGroup.run`, before which no worker trains on.
        """
        used = result.used
        self.counts["rounds"] += 1
        self.counts["late"] += len(result.late)
        self.counts["failed"] += len(result.failed)
        self.counts["quarantined"] += len(result.quarantined)
        if [*used] != sorted({*used}) or not used:
            self.fail(f"call {call.number}: used {used}")
            return
        parts = [*used, *result.late, *result.failed]
        if sorted(parts) != sorted(asked):
            self.fail(f"call {call.number}: expected ranks {asked}, got {parts}")
        least = self._plan["min_results"]
        if len(used) < (least or 1) or (least is None and result.late):
            self.fail(f"call {call.number}: {result!r} with min_results={least}")
        runs = {rank: run for rank in used if (run := self.run_of(call, rank)) is not None}
        if len(runs) < len(used):
            return
        self._check_mean(call, result, runs)
        if fresh:
            self._check_bases(call, runs)
        for rank, run in runs.items() if by_run else ():
            if run.base not in (None, run.before):
                self.fail(f"call {call.number}: rank {rank} has trained since it was sent weights")
        for rank in result.quarantined:
            if not any(run.is_spoiled for run in call.runs.get(rank, ())):
                self.fail(f"call {call.number}: rank {rank} is in quarantine, without NaN")
        self.check_lost(call, result.failed, result.late)
        self.troubled -= {*used}

    def run_of(self, call: Call, rank: int, *, may_be_spoiled: bool = False) -> Run | None:
        """Return the method that a rank has run for a call; check that it has returned."""
        runs = [run for run in call.runs.get(rank, ()) if run.result is not None]
        runs = [run for run in runs if run.ended <= self._world.now]
        if not runs:
            self.fail(f"call {call.number}: used rank {rank}, which has not returned")
            return None
        run = runs[-1]
        if run.is_spoiled and not may_be_spoiled:
            self.fail(f"call {call.number}: used rank {rank}, whose result has NaN")
        return run

    def _check_mean(self, call: Call, result: Round, runs: Mapping[int, Any]) -> None:
        total = sum(run.weight for run in runs.values())
        mean = sum(run.weight * run.result for run in runs.values()) / total
        got = np.asarray(result.weights["w"])
        if got.tobytes() != mean.tobytes():
            where = np.flatnonzero(got != mean)
            self.fail(f"call {call.number}: wrong average of {[*runs]} at {where[:4]}")

    def _check_bases(self, call: Call, runs: Mapping[int, Run]) -> None:
        """Check that all have run it on the same weights, which the group has sent last."""
        bases = {run.base for run in runs.values()}
        if len(bases) > 1:
            self.fail(f"call {call.number}: ranks {[*runs]} ran it on different weights")
            return
        if None in bases and self._plan["initial"]:
            self.fail(f"call {call.number}: ranks {[*runs]} ran it on weights of their own")
        if self.latest is not None and not bases <= self.latest:
            self.fail(f"call {call.number}: ranks {[*runs]} ran it on old weights")
        if None not in bases:
            self.latest = {*bases}

    def check_lost(
        self, call: Call, failed: Mapping[int, Exception], late: Iterable[int] = ()
    ) -> None:
        """Check that ranks are late or have failed for a reason."""
        timeout, now = self._plan["timeout"], self._world.now
        for rank in late:
            if timeout is None or now < call.begin + timeout - 1e-3:
                self.fail(f"call {call.number}: rank {rank} is late before the time is up")
        for rank in [*late, *[k for k, why in failed.items() if isinstance(why, TimeoutError)]]:
            owes = self._platform.actors[rank].process.notes.get("busy")
            # A process that was started since may repeat an earlier call, as Ray's retries do.
            if owes is not None and owes in call.runs.get(rank, ()):
                owes.is_late = True
        if self._platform.losses:
            return
        for rank, error in failed.items():
            is_known = any(error is one for one in self._known)
            if is_stale(error) and not is_known:
                self._known.append(error)
                has_weights = self._plan["initial"] and self._has_run_on_some
                if has_weights and not self._platform.actors[rank].life:
                    self.fail(f"call {call.number}: rank {rank} was called without its weights")
            runs = call.runs.get(rank, ())
            if any(run.has_raised or run.is_spoiled for run in runs):
                continue
            is_late = isinstance(error, TimeoutError)
            if is_late and (self._platform.is_calm or timeout is not None):
                continue  # `restore` has not waited for it, or it was late in an earlier call
            if rank not in self.troubled and not self._has_trouble(rank):
                self.fail(f"call {call.number}: rank {rank} has failed without a reason: {error!r}")
        self.troubled |= {*late, *failed}

    def _has_trouble(self, rank: int) -> bool:
        """Whether something has happened to a worker."""
        actor = self._platform.actors[rank]
        driver = self.driver
        is_stopped = driver is not None and bool(driver.stops)
        return bool(
            actor.is_over
            or actor.life
            or actor.process.is_dead
            or actor.process.stops
            or is_stopped
        )
