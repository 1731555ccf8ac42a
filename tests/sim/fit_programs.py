"""The program of a member that trains by `fit`: a loop as Keras', round the package's own parts.

`Progress`, the states of a `fit`, the start of a training and the member are the package's own, and
`EarlyStopping` is Keras'. The loop, the model, its optimizer and what `AverageLogs` and
`AverageWeights` do at their places are played here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from tests.sim.fit_oracle import FitOracle
from tests.sim.oracle import Call
from tests.sim.plans import Plan
from tests.sim.programs import Arrays, Named, Program

from flatweights.keras._average_logs import HeldStop
from flatweights.keras._fit_states import Phase
from flatweights.keras._member_handle import MemberHandle
from flatweights.keras._progress import (
    HasCounts,
    Position,
    Progress,
    SavedPosition,
)
from flatweights.keras._start import FitStart, start_alike
from flatweights.ray.core._requests import CallsDifferError, MemberError
from flatweights.ray.members._member import Member
from flatweights.ray.results._round import Round
from flatweights.ray.results._variables import WholeState
from flatweights.ray.support._errors import WorkerError

if TYPE_CHECKING:
    from tests.sim.schedules import Schedule

_NEVER = 1000  # epochs without a better loss


class Model:
    """What callbacks see of a model."""

    def __init__(self, plan: Plan, weights: Any) -> None:
        self.steps_per_execution = plan["execution"]
        self.stop_training = False
        self._initial_epoch: int | None = None
        self._weights = weights

    @property
    def first(self) -> int | None:
        """The epoch with which a callback makes `fit` begin."""
        return self._initial_epoch

    def get_weights(self) -> list[Any]:
        return [self._weights.copy()]

    def set_weights(self, weights: list[Any]) -> None:
        self._weights[:] = weights[0]


class Callback:
    """A callback of the package."""

    def __init__(self, model: Model, params: dict[str, Any]) -> None:
        self.model, self.params = model, params


class Weights(Callback, HasCounts):
    """What `AverageWeights` counts."""

    counted = frozenset(("steps",))

    def __init__(self, model: Model, params: dict[str, Any]) -> None:
        super().__init__(model, params)
        self.steps = 0
        self.batch = -1


class Stopping(keras.callbacks.EarlyStopping):  # type: ignore[misc]
    """Keras' callback, in any model; as before Keras 3.8, it forgets its best value once."""

    def __init__(self, plan: Plan, model: Model) -> None:
        patience = plan["patience"] or _NEVER
        best = plan["keeps_best"]
        super().__init__("loss", patience=patience, mode="min", restore_best_weights=best)
        self._model = model
        self.on_train_begin()

    def _set_monitor_op(self) -> None:
        super()._set_monitor_op()
        self.best = None


class Moments(Named):
    """A tensor of a step."""

    def let_repeat(self, *_: object) -> None:
        """Repeat nothing."""


class Handle(MemberHandle):
    """The handle of a `fit`; the oracle knows what it sends."""

    def __init__(self, fit: Fit, member: Member) -> None:
        plan = fit.program.plan
        super().__init__("simulated", member, plan["timeout"], plan["min_results"])
        self._fit = fit

    @property
    def is_replaceable(self) -> bool:
        replaced: bool = self._fit.program.plan["replaces"]
        return replaced

    def gather(
        self, value: object, name: str, *, at: Any, state: Any = None, at_least: float = 0.0
    ) -> Round:
        with self._fit.sends(None, state) as call:
            call.value = value
            self._fit.last = None
            result = super().gather(value, name, at=at, state=state, at_least=at_least)
        self._fit.returned(call, result)
        self._fit.last = result.number
        if self._fit.is_ending and self._fit.has_told_end is None:
            self._fit.has_told_end = self._fit.member.rank in result.used
        if name == "place":
            self._fit.met = [*result.weights.values()]
        self._fit.oracle.gathered(self._fit.member, result)
        return result


class State:
    """The state that heals a member of a `fit`, as the oracle compares it."""

    def __init__(self, weights: Any, iterations: Any, position: Position) -> None:
        self._arrays, self._position = (weights, iterations), position

    @classmethod
    def of(cls, packed: Any) -> State:
        """Return the state in a packed buffer."""
        weights, iterations, position = np.zeros(2), np.zeros(1), SavedPosition()
        variables: Any = Arrays(None, weights, iterations)
        WholeState([variables, position]).scatter(packed)
        return cls(weights, iterations, position.position)

    def bytes(self) -> Any:
        """Return its parts: weights, iterations and position."""
        epoch, steps, counts = self._position
        own = {
            (name, key): [one.tobytes() for one in value] if type(value) is list else value
            for name, of_callback in counts.items()
            for key, value in of_callback.items()
        }
        return *(array.tobytes() for array in self._arrays), repr((epoch, steps, own))


class Fit:
    """One `fit` of one member."""

    def __init__(self, program: FitProgram, member: Member) -> None:
        self.program, self.member, self.oracle = program, member, program.oracle
        plan, world = program.plan, program.world
        self._world, self._plan = world, plan
        self.weights = np.full(2, float(member.rank + 1))
        self.iterations = np.zeros(1)
        self._variables = Arrays(world, self.weights, self.iterations)
        self._model = Model(plan, self.weights)
        steps = plan["steps"] if plan["knows_steps"] else None
        params = {"epochs": plan["epochs"], "steps": steps}
        self._logs = Callback(self._model, params)
        self._averaging = Weights(self._model, params)
        self._stopping = Stopping(plan, self._model)
        own = [self._logs, self._averaging] if plan["logs"] else [self._averaging]
        self._callbacks = [*own, self._stopping]
        self._held = HeldStop()
        self._stopped: int | None = None  # the epoch in which its own callback ends the training
        self._handle = Handle(self, member)
        self._progress: Progress | None = None
        self._named: dict[str, Named] = {}
        self._moments: Moments | None = None
        self._is_traced = False
        self.last: int | None = None  # the number of the last meeting
        self.met: list[Any] = []  # the places of the members of the last meeting
        self.has_told_end = plan["logs"] or None  # whether others know of its stop
        self.is_calling = False  # until the call is over; an interrupt leaves it so

    @property
    def is_ending(self) -> bool:
        """Whether it waits for the others after its last epoch."""
        return self._progress is not None and self._progress.phase is Phase.ENDING

    @contextlib.contextmanager
    def sends(self, vector: Any, state: Any) -> Iterator[Call]:
        """Let the oracle know what a call sends."""
        before = self.program.process.notes.get("call")
        place = None if state is None else state[1].position
        sent = None if place is None else State(self.weights, self.iterations, place)
        with self.program.calls(vector, sent) as call:
            if place is not None:
                call.place, call.steps = place, float(self.iterations[0])
            self.is_calling = True
            yield call
            self.is_calling = before is not None
        self.program.process.notes["call"] = before

    def returned(self, call: Call, result: Round, mean: Any = None) -> None:
        self.oracle.returned(call, self.member, result, mean)

    def run(self) -> None:
        """Train, as `keras.Model.fit` does."""
        plan, model = self._plan, self._model
        self._begin_alike(None)
        variables: Any = self._variables
        callbacks = self._callbacks
        progress = self._progress = Progress(self._handle, callbacks[0], callbacks, variables)
        self._held.begin(model, lambda: progress.is_cut)
        if plan["logs"]:
            self._held.stand_last(self._callbacks)
        if self.member.lacks_state:
            self._trace()
            progress.join()
            self.oracle.joins(self.member, model.first, self.met)
        first = model.first or 0
        if progress.has_joined and plan["restores"] is not None:  # another callback does
            first, self.weights[:] = plan["restores"], -1.0
        for epoch in range(first, plan["epochs"]):
            if epoch == first and plan["gradients"] and not progress.has_joined:
                self._begin_alike(epoch)
            self.oracle.begins(
                self.member, epoch, None if progress.stopped_in is not None else self._stopped
            )
            progress.begin_epoch(epoch)
            progress.begin_epoch(epoch)  # another callback
            if progress.phase is Phase.TOGETHER and progress._copy:
                self._world.fail(f"{self.program.process.name}: keeps a copy of the state")
            self._averaging.batch = -1
            self._train(epoch)
            self._end_epoch(epoch)
            if model.stop_training:
                self.oracle.breaks(self.member, are_over=progress.phase is Phase.OVER)
                break
        is_told = progress.stopped_in is None and progress.phase is not Phase.OVER
        self.last = None
        try:
            progress.end()
        finally:
            if model.first is not None:
                self._world.fail(f"{self.program.process.name}: the next fit begins elsewhere")
        told = epoch if is_told and self.has_told_end and self._stopped is not None else None
        self.oracle.leaves(self.member, self.last)
        self._average_last()
        is_alone = progress.has_ended_alone
        self.oracle.ended(self.member, self.iterations, self.weights, told, is_alone=is_alone)
        self._stopping.on_train_end()
        if not is_alone:
            self.oracle.has_best(self.member, self.weights)

    def _begin_alike(self, epoch: int | None) -> None:
        if self.member.lacks_state:
            return

        def own() -> FitStart:
            values = self.weights.tobytes() + self.iterations.tobytes()
            return FitStart(False, epoch, b"names", values, {})

        with self.sends(None, None):
            start_alike(self._handle, self._variables, own)

    def _train(self, epoch: int) -> None:
        """Train for an epoch, or until a callback ends it."""
        plan, world, progress = self._plan, self._world, self._progress
        assert progress is not None
        for begin in range(0, plan["steps"], plan["execution"]):
            end = min(begin + plan["execution"], plan["steps"]) - 1
            for batch in range(begin, end + 1):
                self._step(epoch, batch)
            self._may_stop(epoch, range(begin, end + 1), is_first=True)
            progress.end_batch(end)
            progress.end_batch(end)
            if not progress.is_apart and self._averages_weights:
                averaging = self._averaging
                averaging.steps += end - averaging.batch
                averaging.batch = end
                if averaging.steps >= (plan["every"] or np.inf):
                    self._average_weights((epoch, end))
                    progress.end_batch(end)
            self._may_stop(epoch, range(begin, end + 1), is_first=False)
            if self._held in self._callbacks:
                self._held.on_train_batch_end(end)
            if self._model.stop_training:
                break
            if progress.is_apart:
                world.fail(f"{self.program.process.name}: another batch of an epoch to skip")

    def _may_stop(self, epoch: int, batches: range, *, is_first: bool) -> None:
        """Stop the training within an epoch, as a callback of the member's own."""
        if self._plan["halts"] is None:
            return
        rank, at, batch, stands_first = self._plan["halts"]
        if (rank, at, stands_first) == (self.member.rank, epoch, is_first) and batch in batches:
            self._model.stop_training, self._stopped = True, epoch

    def _trace(self) -> None:
        if not self._is_traced:
            self._world.sleep(self._plan["trace"] * self._world.draw())
            self._is_traced = True

    def _step(self, epoch: int, batch: int) -> None:
        plan, world, progress = self._plan, self._world, self._progress
        assert progress is not None
        self._trace()
        seconds = plan["work"] * world.draw()
        if world.draw() < plan["slow"]:
            seconds += world.rng.choice((0.1, 1.0, 5.0))
        if seconds:
            world.sleep(seconds)
        if plan["before"] and not (progress.is_apart or self.member.lacks_state):
            self._exchange_before(plan["before"])
        rank = self.member.rank
        payload = epoch + 3 * rank, 7 * batch + rank
        mean = None
        if plan["gradients"] and not progress.is_apart:
            mean = self._average("gradient", payload, in_step=True)
        # Without gradients, integers stay such.
        kept = 0.5 * self.weights if plan["gradients"] else self.weights
        self.weights[:] = kept + (payload if mean is None else mean)
        self.iterations += 1

    def _exchange_before(self, what: str) -> None:
        """Exchange rows or moments in a step, before its gradients."""
        member, terms = self.member, self._handle.terms
        steps = float(self.iterations[0])
        assert self._progress is not None
        place: Any = self._progress.state[1]
        if what == "rows":
            with self.sends(None, None) as call:
                call.place, call.steps, call.value = place.position, steps, steps
                result = member.all_gather(steps, what, **terms)
            self.returned(call, result)
            self.oracle.gathered(member, result)
            return
        vector = self.program.vector(member)
        vector[-2:] = steps
        moments = self._moments = self._moments or Moments(self._world, what, vector.size)
        moments.array[:] = vector
        with self.sends(vector, None) as call:
            call.place, call.steps = place.position, steps
            result = member.average_variables(moments, call.weight, **terms)
        self.returned(call, result, moments.array)

    def _average(self, name: str, payload: Any, *, in_step: bool) -> Any:
        """Return the mean of ``payload``; None if the others are elsewhere."""
        program, progress = self.program, self._progress
        assert progress is not None
        vector = program.vector(self.member)
        vector[-2:] = payload
        variables = self._named.setdefault(name, Named(self._world, name, vector.size))
        variables.array[:] = vector
        calls: list[Call] = []

        def call(member: Member, state: Any) -> Round:
            with self.sends(vector, state) as sent:
                calls.append(sent)
                return member.average_variables(
                    variables, sent.weight, state=state, **self._handle.terms
                )

        result = progress.average(call, in_step=in_step)
        if result is None:
            return None
        self.returned(calls[0], result, variables.array)
        return variables.array[-2:].copy()

    @property
    def _averages_weights(self) -> bool:
        """Whether weights are averaged: after batches, or at the end of every epoch."""
        return bool(self._plan["every"]) or not self._plan["gradients"]

    def _average_weights(self, place: Any) -> None:
        """Average the weights, as `AverageWeights` does."""
        self._averaging.steps = 0
        sent = place if self._plan["gradients"] else self.weights
        mean = self._average("weights", sent, in_step=False)
        if mean is not None and not self._plan["gradients"]:
            self.weights[:] = np.round(mean)

    def _average_last(self) -> None:
        """Average the weights of batches after the last average, as `AverageWeights` does."""
        assert self._progress is not None
        if self._progress.has_ended_alone:
            return
        trained = self._averages_weights and bool(self._averaging.steps)
        self.oracle.averages_last(self.member, trained)
        if not trained:
            return
        vector = self.program.vector(self.member)
        if not self._plan["gradients"]:
            vector[-2:] = self.weights
        variables = self._named.setdefault("weights", Named(self._world, "weights", vector.size))
        variables.array[:] = vector
        with self.sends(vector, None) as call:
            result = self.member.average_variables(variables, call.weight, **self._handle.terms)
        self.returned(call, result, variables.array)
        if not self._plan["gradients"]:
            self.weights[:] = np.round(variables.array[-2:])

    def _end_epoch(self, epoch: int) -> None:
        """Call the callbacks, as their list does."""
        plan, model, progress = self._plan, self._model, self._progress
        assert progress is not None
        rank = self.member.rank
        if plan["stops"] == [rank, epoch]:  # a callback before the package's
            model.stop_training, self._stopped = True, epoch
        own = self._world.rng.randrange(8)
        logs = {"loss": float(own if plan["logs"] else (5 * epoch + 3) % 8)}
        for one in self._callbacks:
            if one is self._stopping:
                self._stopping.on_epoch_end(epoch, logs)
                self.oracle.has_seen(self.member, epoch, self._stopping)
                continue
            if one is self._held:
                continue
            if one is self._logs:
                self._held.release()
            progress.end_epoch(one)
            is_due = one is self._averaging and not (plan["gradients"] or plan["every"])
            if is_due and not progress.is_apart:
                self._average_weights(None)
                progress.end_epoch(one)
            if one is self._logs and not progress.is_apart:
                payload = float(model.stop_training), self._world.rng.randrange(8)
                mean = self._average("logs", payload, in_step=False)
                progress.end_epoch(one)
                if mean is not None and not progress.is_apart:
                    if mean[0]:
                        model.stop_training = True
                    else:
                        progress.hold_stop()
                    logs["loss"] = float(mean[1])


class FitProgram(Program):
    """The program of a process that trains by one `fit`."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        super().__init__(schedule, rank)
        oracle: Any = self._oracle
        self.oracle: FitOracle = oracle
        self.world, self.plan = self._world, self._plan
        self.process, self.vector = self._process, self._vector

    def calls(self, vector: Any, state: Any) -> Any:
        weight = float(self.world.rng.choice((1, 1, 1, 2)))
        return self._call(vector, weight, state)

    def _train(self, member: Member) -> bool:
        fit = Fit(self, member)
        try:
            fit.run()
        except KeyboardInterrupt:
            if fit.is_calling:
                self._note_interrupt(member)
            raise
        except MemberError:
            raise
        except CallsDifferError as error:
            self.world.fail(f"{self.process.name}: {error}")
        except WorkerError as error:
            self.world.note(f"WorkerError: {error}")
            if fit.is_ending and not member.lacks_state:
                self.world.fail(f"{self.process.name} has trained to the end: {error}")
        return False
