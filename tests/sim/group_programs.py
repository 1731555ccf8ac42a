"""The worker of a group, and the program of its driver: what users write."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from tests.sim.group_oracle import SIZE, Call
from tests.sim.world import Process

from flatweights import Layout
from flatweights.ray import _clock
from flatweights.ray._worker import FlatWorker, _GroupState
from flatweights.ray.support._errors import StoreTooSmallError, WorkerError, is_refusal

if TYPE_CHECKING:
    from tests.sim.group_schedules import GroupSchedule

    from flatweights.ray.results._round import Round

_LAYOUT = Layout.of({"w": np.zeros(SIZE)})
_MOST_IN_VAIN = 8  # calls that raise, one after the other
_ALL_CALLS = 200.0  # seconds in which all calls end
_CALM = 40.0  # seconds in which all workers take part again, once nothing goes wrong


class UserError(Exception):
    """An error of a user's method."""


class Model:
    """The variables of a worker, as `Variables`."""

    layout = _LAYOUT

    def __init__(self, schedule: GroupSchedule, process: Process, values: Any) -> None:
        self._schedule, self._process, self.values = schedule, process, values

    def gather_into(self, buffer: Any) -> None:
        self._schedule.world.point("gathering")
        (view,) = self.layout.packed_views(buffer)
        view[...] = self.values

    def scatter(self, buffer: Any) -> None:
        schedule, world = self._schedule, self._schedule.world
        (view,) = self.layout.packed_views(buffer)
        world.point("scattering")
        if world.draw() < schedule.plan["refuses"]:
            self.values[: SIZE // 2] = view[: SIZE // 2]
            schedule.oracle.is_set(self._process, None)
            world.note("cannot set its weights")
            raise ValueError("half of the variables are missing")
        self.values[...] = view
        schedule.oracle.is_set(self._process, self.values)


class Worker(FlatWorker):
    """A worker; the first argument of its methods is the number of the driver's call."""

    def __init__(self, schedule: GroupSchedule, rank: int, process: Process) -> None:
        self.__dict__["_of_groups"] = _GroupState(schedule.platform)
        self._schedule, self._rank, self._process = schedule, rank, process
        super().__init__()

    def build(self) -> Any:
        oracle = self._schedule.oracle
        values = oracle.new_model(self._rank)
        oracle.is_built(self._rank, self._process, values)
        return Model(self._schedule, self._process, values)

    def train(self, number: int) -> Any:
        """Return weights that show on which weights it has run."""
        world, plan, oracle = self._schedule.world, self._schedule.plan, self._schedule.oracle
        notes = self._process.notes
        model = self.variables
        run = oracle.begins(number, self._rank, self._process, model.values)
        notes["busy"] = run
        try:
            world.note(f"runs call {number}")
            seconds = plan["work"] * world.draw()
            if world.draw() < plan["slow"]:
                seconds += world.rng.choice((0.1, 1.0, 5.0))
            if seconds:
                world.sleep(seconds)
            world.point("training")
            if world.draw() < plan["raises"]:
                run.has_raised = True
                raise UserError("a bug of the method")
            model.values[...] = oracle.result_of(run, self._rank)
            weights = self.get_weights()
            if world.draw() < plan["nan"]:
                run.is_spoiled = True
                weights["w"][0] = np.nan
        finally:
            notes["busy"] = None
        run.ended = world.now
        if not plan["weighted"]:
            return weights
        run.weight = float(world.rng.choice((1, 2, 4)))
        return weights, {"weight": run.weight, "number": number}


class GroupProgram:
    """The program of the driver.

    | program | its calls |
    | --- | --- |
    | run | `WorkerGroup.run`, begun anew after an error |
    | average | an average in each call, which the next call brings |
    | mixed | averages, broadcasts, steps, and changes of the group, in any order |
    | completed | `WorkerGroup.as_completed`, with publications |
    """

    def __init__(self, schedule: GroupSchedule) -> None:
        self._schedule = schedule
        self._world, self._oracle = schedule.world, schedule.oracle
        self._platform, self._plan = schedule.platform, schedule.plan
        self._made = 0.0  # rounds; other calls count half
        self._removed: set[int] = set()
        self._in_vain = 0
        self._last: Any = None
        self._is_looping = self._is_publishing = False

    def run(self) -> None:
        """Make all rounds; then check that all workers take part if nothing goes wrong."""
        plan = self._plan
        actors = [self._schedule.start(rank) for rank in range(plan["size"])]
        while True:
            try:
                self._group = self._schedule.group_class(
                    actors,
                    max_inflight=plan["max_inflight"],
                    initial="lowest" if plan["initial"] else None,
                )
                break
            except KeyboardInterrupt:
                self._world.note("KeyboardInterrupt")
        self._oracle.latest = None if plan["initial"] else {None}
        programs: dict[str, Callable[[], None]] = {
            "run": self._run,
            "average": self._average,
            "mixed": self._mixed,
            "completed": self._completed,
        }
        program = programs[plan["program"]]
        while self._made < plan["rounds"] and self._in_vain < _MOST_IN_VAIN:
            try:
                program()
                self._in_vain = 0
            except KeyboardInterrupt:
                self._world.note("KeyboardInterrupt")
            except (WorkerError, StoreTooSmallError, ValueError) as error:
                if isinstance(error, ValueError) and "NaN" not in str(error):
                    raise
                self._in_vain += 1
                self._oracle.counts["errors"] += 1
                self._world.note(f"{type(error).__name__}: {error}".splitlines()[0])
                self._pause()
        self._calm_down()
        self._end()

    def _pause(self) -> None:
        """Let time pass after an error, as users do."""
        with contextlib.suppress(KeyboardInterrupt):
            self._world.sleep(self._world.draw() * self._world.rng.choice((0.0, 0.1, 3.0)))

    # Calls.

    @contextlib.contextmanager
    def _calling(self, phases: int = 1) -> Iterator[Call]:
        """Make a call, and check how long it takes."""
        oracle, world, plan = self._oracle, self._world, self._plan
        call = oracle.new_call()
        oracle.begin(call)
        driver = world.process()
        stops = len(driver.stops)
        try:
            yield call
        except WorkerError as error:
            oracle.check_lost(call, error.failed)
            if plan["timeout"] is not None:
                # A broadcast names workers that raise, and not those that are late besides.
                oracle.troubled |= {*self._ranks()}
            raise
        finally:
            oracle.end()
            took = world.now - call.begin
            timeout = plan["timeout"]
            if timeout is not None and len(driver.stops) == stops:
                most = (plan["size"] + 7) * phases * timeout + 3.0
                if took > most and not driver.is_dead:
                    oracle.fail(f"call {call.number} took {took:.1f} s, timeout {timeout:g} s")

    def _arguments(self) -> dict[str, Any]:
        plan = self._plan
        weights = (lambda result: result[1]["weight"]) if plan["weighted"] else None
        return {
            "timeout": plan["timeout"],
            "min_results": plan["min_results"],
            "nonfinite": plan["nonfinite"],
            "weights": weights,
        }

    def _ranks(self) -> list[int]:
        return [rank for rank in self._group._worker_set.ranks.records if rank not in self._removed]

    def _asked(self, before: Sequence[int], result: Round) -> list[int]:
        """Return the ranks that a round may contain; others have joined after its average."""
        return [rank for rank in self._ranks() if rank in before or rank in result.joined]

    def _grow_or_shrink(self) -> None:
        """Add a worker or remove one, now and then."""
        group, plan, draw = self._group, self._plan, self._world.draw
        actors, ranks = self._platform.actors, self._ranks()
        if plan["grows"] and draw() < plan["grows"] and len(actors) < len(plan["actors"]):
            group.add(actors=[self._schedule.start(len(actors))])
        if plan["leaves"] and draw() < plan["leaves"] and len(ranks) > 1:
            rank = self._world.rng.choice(ranks)
            self._oracle.troubled.add(rank)  # what it owes a loop is dropped
            group.remove(rank)
            self._removed.add(rank)
            self._world.note(f"has removed rank {rank}")

    def _run(self) -> None:
        group, oracle = self._group, self._oracle
        calls: list[Call] = []
        left = self._plan["rounds"] - int(self._made)
        rounds = group.run(
            left, "train", round_arguments=lambda _: [calls[-1].number], **self._arguments()
        )
        while True:
            with self._calling(2) as call:
                calls.append(call)
                before = self._ranks()
                try:
                    result = next(rounds, None)
                except BaseException:
                    oracle.may_have_sent_average(call)
                    raise
                if result is None:
                    return
                self._made += 1
                asked, by_run = self._asked(before, result), self._plan["program"] == "run"
                oracle.check_round(call, result, asked, fresh=True, by_run=by_run)
                oracle.has_sent(np.asarray(result.weights["w"]))
                self._world.note(f"round {self._made}: {result!r}")
                del result

    def _average(self) -> None:
        oracle = self._oracle
        sent, last = None, self._last
        with self._calling() as call:
            if last is not None:
                sent = np.array(last.weights["w"])
                oracle.sends(sent)
            with self._refusals() if sent is not None else contextlib.nullcontext():
                result = self._group.average(
                    "train", call.number, broadcast=last, **self._arguments()
                )
            self._made += 1
            if sent is not None:
                oracle.has_sent(sent)
            oracle.check_round(call, result, self._ranks(), fresh=True)
            self._check_refusals(result)
            self._world.note(f"average {self._made}: {result!r}")
            self._last = result

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        """Send weights; tell the oracle if all workers refuse them."""
        try:
            yield
        except WorkerError as error:
            causes = [getattr(one, "cause", one) for one in error.failed.values()]
            is_refused = all("half of the variables" in str(cause) for cause in causes)
            if is_refused and error.failed.keys() == {*self._ranks()}:
                self._oracle.all_have_refused()
                self._last = None  # the next call sends nothing
            raise

    def _check_refusals(self, result: Any) -> None:
        """Check that workers that could not set weights, unlike others, are not called any more."""
        for rank, error in result.failed.items():
            if is_refusal(error) and self._group.is_actor_healthy(rank):
                self._world.fail(f"rank {rank} has refused weights, and is healthy")

    def _mixed(self) -> None:
        oracle, group, draw = self._oracle, self._group, self._world.draw
        self._grow_or_shrink()
        kind = draw()
        if kind < 0.4:
            self._last = self._last if draw() < 0.5 else None
            self._average()
        elif kind < 0.6:
            values = oracle.new_model(0)
            with self._calling():
                oracle.sends(values)
                with self._refusals():
                    group.broadcast({"w": values.copy()}, timeout=self._plan["timeout"])
                oracle.has_sent(values)
                self._world.note("has broadcast")
        elif kind < 0.75:
            with self._calling() as call:
                results = group.step("train", call.number, timeout=self._plan["timeout"])
                for rank in results:
                    oracle.run_of(call, rank, may_be_spoiled=True)
                self._world.note(f"step: {[*results]}")
        elif kind < 0.85:
            with self._calling():
                back = group.restore(timeout=2.0)
                self._world.note(f"restored {back}")
        else:
            with self._calling():
                result = group.average("get_weights", timeout=self._plan["timeout"], min_results=1)
                self._world.note(f"read: {result!r}")
        self._made += 0.5

    def _completed(self) -> None:
        """Take results as they arrive, and publish weights, here or in another thread."""
        oracle, world, plan, group = self._oracle, self._world, self._plan, self._group
        oracle.begin_loop()
        oracle.latest = None
        options = self._arguments()
        del options["min_results"]
        loop = group.as_completed(
            "train",
            arguments=lambda rank: [oracle.call_in_loop(rank).number],
            buffer=min(plan["buffer"], len(self._ranks())),
            max_staleness=plan["max_staleness"],
            **options,
        )
        self._is_looping = True
        if plan["beside"] and not self._is_publishing:
            self._is_publishing = True
            world.spawn(world.process(), self._publish_beside, "driver.publisher")
        try:
            while self._made < plan["rounds"]:
                begin, published = world.now, oracle.published
                with self._waiting():
                    result = next(loop)
                self._made += 0.5
                world.note(f"result: {result!r}, staleness {result.staleness}")
                oracle.check_result(begin, published, result)
                if not {*result.used} <= {*self._ranks()}:
                    world.fail(f"ranks {result.used} are used, of {self._ranks()}")
                del result
                self._grow_or_shrink()
                if world.draw() < 0.3:
                    world.sleep(world.draw() * plan["work"])
                if not plan["beside"] and world.draw() < plan["publishes"]:
                    self._publish()
                kind = world.draw()
                if kind < 0.05:
                    with self._calling() as call:
                        results = group.step("train", call.number, timeout=plan["timeout"])
                    # What the loop waits for from the others is dropped.
                    oracle.troubled |= {*self._ranks()} - results.keys()
                elif kind < 0.1:
                    with self._calling():
                        group.restore(timeout=1.0)
            if not plan["beside"] and world.draw() < 0.5:
                self._hear_from_all(loop)
        finally:
            self._is_looping = False
            loop.close()

    def _hear_from_all(self, loop: Any) -> None:
        """Go on with a loop once nothing goes wrong any more, until each worker has a result."""
        world, oracle, timeout = self._world, self._oracle, self._plan["timeout"]
        end, seen = self._calm(), set[int]()
        self._plan["timeout"] = timeout  # that of the loop
        while not seen >= {*self._alive()}:
            begin, published = world.now, oracle.published
            with self._waiting():
                result = next(loop)
            oracle.check_result(begin, published, result)
            seen.update(result.used)
            del result
            world.sleep(0.1)
            if world.now > end:
                world.fail(f"ranks {self._alive()} live, and a loop hears only from {sorted(seen)}")
                return

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Wait for a result."""
        self._oracle.begin(Call(0, self._world.now))
        try:
            yield
        finally:
            self._oracle.end()

    def _publish(self) -> None:
        values = self._oracle.new_model(0)
        self._oracle.publishes(values)
        try:
            self._group.publish({"w": values})
        except BaseException:
            self._oracle.has_not_published()
            raise
        self._oracle.has_published()
        self._world.note("has published")

    def _publish_beside(self) -> None:
        """Publish weights, as another thread does."""
        world = self._world
        while True:
            world.sleep(0.01 + world.draw() * self._plan["work"])
            if not self._is_looping:
                self._is_publishing = False
                return
            with contextlib.suppress(RuntimeError):  # another thread is in a call
                self._publish()

    # The end.

    def _calm(self) -> float:
        """Let nothing go wrong any more; return the time until which all that live take part."""
        world, plan = self._world, self._plan
        world.note("nothing goes wrong any more")
        plan |= {"nan": 0.0, "raises": 0.0, "refuses": 0.0, "slow": 0.0}
        plan |= {"timeout": None, "min_results": 1, "nonfinite": "raise"}
        world.rates.clear()
        world.process().faults.clear()
        self._platform.is_calm = True
        for actor in self._platform.actors:
            actor.process.faults.clear()
        actors = self._platform.actors
        return _CALM + max([world.now, *[actor.process.stopped_until for actor in actors]])

    def _calm_down(self) -> None:
        """Let nothing go wrong any more, and wait until all workers that live take part."""
        world, plan, group, oracle = self._world, self._plan, self._group, self._oracle
        end = self._calm()
        self._last = None
        by_run = world.draw() < 0.5  # which asks workers whether they are back, too
        has_weights = plan["initial"]  # actors that were restarted need some
        while True:
            if not has_weights:
                values = oracle.new_model(0)
                with self._calling(), contextlib.suppress(WorkerError):
                    oracle.sends(values)
                    group.broadcast({"w": values.copy()})
                    oracle.has_sent(values)
                    has_weights = True
            alive, before = self._alive(), self._ranks()
            used: tuple[int, ...] = ()
            if not by_run:
                with self._calling():
                    group.restore(timeout=5.0)
            with self._calling(2) as call, contextlib.suppress(WorkerError):
                if by_run:
                    (result,) = group.run(1, "train", call.number, **self._arguments())
                else:
                    result = group.average("train", call.number, **self._arguments())
                used = result.used
                oracle.check_round(call, result, self._asked(before, result), fresh=True)
                if by_run:
                    oracle.has_sent(np.asarray(result.weights["w"]))
                del result
            if [*used] == alive == self._alive():
                return
            if world.now > end:
                why = {
                    k: f"{type(error).__name__}: {error}" for k, error in group.unhealthy.items()
                }
                self._world.fail(f"ranks {alive} live, and only {used} take part: {why}")
                return
            world.sleep(1.0)

    def _alive(self) -> list[int]:
        actors = self._platform.actors
        return [rank for rank in self._group.actors() if actors[rank].may_come_back]

    def _end(self) -> None:
        """Check that nothing is owed and held; end the group."""
        world, worker_set = self._world, self._group._worker_set
        for rank, record in worker_set.ranks.records.items():
            if record.in_flight is not None and record.why is None:
                world.fail(f"rank {rank} owes an answer at the end")
        channels = worker_set.channels
        if channels.last is not None or channels.asleep is not None:
            world.fail("the last command is not forgotten")
        for mailbox in self._platform.mailboxes:
            if mailbox.holds(False, 0):
                self._platform.collect()
                if mailbox.holds(False, 0):
                    world.fail(f"weights of {mailbox.worker.name} are held at the end")
        world.sleep(_ALL_CALLS)
        worker_set.ranks.admit()
        for rank, actor in enumerate(self._platform.actors):
            if rank in self._removed and not actor.is_over:
                world.fail(f"rank {rank} was removed, and lives at the end")
            actor.process.notes["busy"] = None  # `shutdown` waits for nobody
        self._group.shutdown()
        now = _clock.now()
        world.note(f"has ended at {now:.1f}")
