"""The programs of members: what users write, with the documented calls."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from tests.sim.oracle import Call
from tests.sim.world import World

from flatweights import Layout
from flatweights.ray import _clock
from flatweights.ray.core._requests import CallsDifferError, MemberError
from flatweights.ray.members._config import GroupConfig
from flatweights.ray.members._member import Member, joined
from flatweights.ray.members._rendezvous import _GRACE
from flatweights.ray.support._errors import WorkerError

if TYPE_CHECKING:
    from tests.sim.schedules import Schedule

_JOIN = 120.0  # seconds
_MOST_JOINS = 5  # by one process, if coordinators end
_MOST_RESETS = 4  # of a state, one after the other
_MOST_IN_VAIN = 6  # calls that raise, one after the other
_MOST_BROADCASTS = 12


class ProgramError(Exception):
    """An error of the program itself."""


@functools.lru_cache
def _layout_of(*shapes: tuple[int, ...]) -> Layout:
    return Layout.of([np.zeros(shape) for shape in shapes])


class Arrays:
    """Arrays as `Variables`: their layout, and the way into a packed buffer and out of it.

    Attributes:
        world: The world, whose points these are; None, if there are none.
    """

    def __init__(self, world: World | None, *arrays: Any) -> None:
        self.world, self._arrays = world, arrays
        self.layout = _layout_of(*[array.shape for array in arrays])

    def gather_into(self, buffer: Any) -> None:
        if self.world is not None:
            self.world.point("gathering")
        views = self.layout.packed_views(buffer)
        for array, view in zip(self._arrays, views, strict=True):
            view[...] = array

    def scatter(self, buffer: Any) -> None:
        if self.world is not None:
            self.world.point("scattering")
        views = self.layout.packed_views(buffer)
        for array, view in zip(self._arrays, views, strict=True):
            array[...] = view

    def bytes(self) -> Any:
        return tuple(array.tobytes() for array in self._arrays)


class Named(Arrays):
    """One array with a name, which tells its layout from those of others."""

    def __init__(self, world: World, name: str, size: int) -> None:
        super().__init__(world, np.zeros(size))
        (self.array,) = self._arrays
        self.layout = Layout.of({name: self.array})


class State(Arrays):
    """The state of a training: two weights, the step, and how often it has begun anew."""

    def __init__(self, world: World) -> None:
        self.weights, self.step, self.began = np.zeros(2), np.zeros(1), np.zeros(1)
        super().__init__(world, self.weights, self.step, self.began)


class Program:
    """The program of one process.

    | program | its calls |
    | --- | --- |
    | weights | averages of weights, of one or more kinds |
    | state | averages of gradients, with a state that heals |
    | broadcast | the same after a broadcast of the state |
    | mixed | the same, with an average without a state in between |
    | gathered | averages of gradients, and before each of them all gather their places |
    | twins | averages of two models of one layout, in turns, perhaps after some of the first |
    """

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self._world, self._oracle = schedule.world, schedule.oracle
        self._platform, self._plan = schedule.platform, schedule.plan
        self._schedule = schedule
        self._rank = rank
        self._process = schedule.world.process()
        self._calls = 0
        self._attempts = 0  # of calls
        self._in_vain = self._resets = self._last = 0
        self._was_interrupted = False
        self._state = State(self._world)
        count = self._plan["size"] + 2
        self._values = np.zeros(count), np.zeros(count)
        self._in_place: dict[str, Named] = {}
        self._twins = [Arrays(self._world, values) for values in self._values]

    def run(self) -> None:
        """Be a member until all calls are made; join again if the coordinator dies."""
        for _ in range(_MOST_JOINS):
            began = self._world.now
            try:
                with self._join() as member:
                    self._world.note(f"has joined as rank {member.rank}")
                    if self._train(member):
                        member._finalizer()  # as if it were collected
                return
            except ProgramError:
                return
            except MemberError as error:
                self._world.note(f"MemberError: {error}")
                if not self._joins_again(error):
                    return
            except TimeoutError as error:
                self._world.note(f"TimeoutError: {error}")
                texts = "has ended", "missing ranks", "not answer", "no answer", "came just then"
                has_reason = any(text in str(error) for text in texts)
                node = None if "missing ranks" in str(error) else self._process.notes["node"]
                is_silent = self._platform.was_agent_stopped(node)
                is_silent |= any(main.is_dead for main in self._oracle.mains)
                if not (has_reason and is_silent):
                    self._world.fail(f"{self._process.name}: TimeoutError: {error}")
                return
            except ValueError as error:
                if "taken" in str(error) or "which is" in str(error):
                    self._world.note(f"ValueError: {error}")  # two processes want one rank
                    if self._world.now < began + _GRACE:
                        self._world.fail(f"{self._process.name} was refused at once: {error}")
                    return
                raise
            except KeyboardInterrupt:
                self._world.note("KeyboardInterrupt ends it")
                self._process.notes["broke"] = True
                return

    def _join(self) -> Member:
        plan = self._plan
        rank = None if plan["any_rank"] else self._rank
        config = GroupConfig.of(plan["size"], "float64", plan["min_size"], plan["grace"])
        return joined("simulated", rank, config, _JOIN, _clock.now() + _JOIN, self._platform)

    def _joins_again(self, error: MemberError) -> bool:
        """Whether the program joins again after its member has failed."""
        if self._was_interrupted or self._platform.has_agent_broken(self._process.notes["node"]):
            return False
        if self._has_a_coordinator_died():
            # The members of another process group may have other states.
            return self._plan["program"] not in ("state", "gathered", "fit")
        # A process that was stopped has no time left to find another coordinator.
        if not (self._oracle.losses or self._process.stops):
            self._world.fail(f"{self._process.name}: MemberError: {error}")
        return False

    def _has_a_coordinator_died(self) -> bool:
        """Whether a coordinator was killed, rather than that it has ended with its last member."""
        return any(
            coordinator.process.notes.get("broke") for coordinator in self._oracle.coordinators
        )

    def _train(self, member: Member) -> bool:
        """Make the calls; return whether to drop the member."""
        world, plan, rng = self._world, self._plan, self._world.rng
        program = plan["program"]
        if program in ("broadcast", "mixed") and not self._broadcast(member):
            return False
        calls = {
            "weights": self._average_weights,
            "twins": self._average_twins,
            "gathered": self._gather_and_average,
        }
        call: Callable[[Member], None] = calls.get(program, self._average_gradient)
        while True:
            made = self._calls if program in ("weights", "twins") else self._state.step[0]
            self._attempts += 1
            if made >= plan["calls"] or self._attempts > 12 * plan["calls"] + 40:
                return False
            seconds = plan["work"] * world.draw()
            if world.draw() < plan["slow"]:
                seconds += rng.choice((0.1, 1.0, 5.0))
            if seconds:
                world.sleep(seconds)
            if world.draw() < plan["leaves"]:
                return False
            if world.draw() < plan["raises"]:
                raise ProgramError("a bug of the program")
            if world.draw() < plan["drops"]:
                return True
            try:
                call(member)
                self._in_vain = self._resets = 0
            except KeyboardInterrupt:
                self._note_interrupt(member)
                if world.draw() < 0.5:
                    raise
                self._was_interrupted = True
            except (CallsDifferError, WorkerError, ValueError, RuntimeError) as error:
                if not self._goes_on(member, error):
                    return False

    def _note_interrupt(self, member: Member) -> None:
        """Check that a member whose call was interrupted makes no call as if nothing were."""
        self._world.note("KeyboardInterrupt in a call")
        self._process.notes["broke"] = True
        if member._coordinator.stage != "idle":
            has_state = self._plan["program"] not in ("weights", "twins")
            if not (member._over or (has_state and member.lacks_state)):
                self._world.fail("a call was interrupted, and the next one will not raise")

    def _goes_on(self, member: Member, error: Exception) -> bool:
        """Whether the program goes on after an error of a call; raise what it does not expect."""
        if type(error) is RuntimeError and "take turns" in str(error):
            return False
        is_expected = isinstance(error, (CallsDifferError, WorkerError, ValueError))
        if not is_expected or isinstance(error, (MemberError, NotImplementedError)):
            raise error
        self._world.note(f"{type(error).__name__}: {error}")
        if isinstance(error, CallsDifferError) and self._attempts > 6:
            self._plan["differs"] = 0.0  # the calls of members may never be the same again
        if "no member is left that has the state" in str(error):
            began, last = self._oracle.lost_states_of(member)
            if last != self._last:  # others may have begun anew, and died
                self._last, self._resets = last, 0
            self._state = State(self._world)
            self._state.began[0] = began
            member.lacks_state = False
            self._resets += 1
            if self._resets == _MOST_RESETS:
                self._world.fail(
                    "'no member is left that has the state', again and again, although the member "
                    "has set lacks_state = False"
                )
                return False
        else:
            self._resets = 0
        self._in_vain += 1
        self._calls += 1
        return self._in_vain < _MOST_IN_VAIN

    def _vector(self, member: Member) -> Any:
        """Return weights that no other call has."""
        vector = np.zeros(self._plan["size"] + 2)
        self._schedule.models += 1
        vector[member.rank] = self._schedule.models
        return vector

    @contextlib.contextmanager
    def _call(self, vector: Any, weight: float, state: Any = None) -> Any:
        call = self._process.notes["call"] = Call(self._process, vector, weight, state)
        try:
            yield call
        finally:
            self._process.notes["call"] = None

    def _average(self, member: Member, name: str, payload: Any, state: Any = None) -> Any:
        world, plan = self._world, self._plan
        vector = self._vector(member)
        vector[-2:] = payload
        if world.draw() < plan["nan"]:
            vector[0] = np.nan
        weight = float(world.rng.choice((1, 1, 1, 1, 2, 4)))
        least = plan["min_results"]
        if world.draw() < plan["differs"]:
            if world.draw() < 0.5:
                name = "wrong"
            else:
                least = 1 if least is None else None
        options = {
            "timeout": plan["timeout"],
            "min_results": least,
            "nonfinite": plan["nonfinite"],
            "state": state,
        }
        with self._call(vector, weight, state) as call:
            if plan["in_place"]:
                variables = self._in_place.get(name) or Named(world, name, vector.size)
                self._in_place[name] = variables
                variables.array[:] = vector
                result = member.average_variables(variables, weight, **options)
                mean = variables.array.copy()
            else:
                result = member.average({name: vector}, weight, **options)
                mean = result.weights[name]
        self._oracle.returned(call, member, result, mean)
        return mean

    def _average_weights(self, member: Member) -> None:
        every = self._plan.get("broadcasts")
        if every and self._calls % every == every - 1:
            self._broadcast_weights(member, self._calls // every % member.size)
            return
        kind = self._calls % self._plan["kinds"]
        self._average(member, f"part {kind}", (self._rank, self._calls))
        self._calls += 1

    def _broadcast_weights(self, member: Member, root: int) -> None:
        vector, name = self._vector(member), "of a root"
        timeout = self._plan["timeout"]
        with self._call(vector, 1.0) as call:
            variables = self._in_place.get(name) or Named(self._world, name, vector.size)
            self._in_place[name] = variables
            variables.array[:] = vector
            result = member.broadcast_variables(variables, root, timeout=timeout)
        if result.used != (root,):
            self._world.fail(f"a broadcast of {result.used} in place of {root}")
        self._oracle.returned(call, member, result, variables.array)
        self._calls += 1

    def _average_twins(self, member: Member) -> None:
        model = self._calls % 2 if self._calls >= self._plan["alone"] else 0
        variables, values = self._twins[model], self._values[model]
        vector = self._vector(member)
        values[:] = vector
        weight = float(self._world.rng.choice((1, 1, 1, 2)))
        with self._call(vector, weight) as call:
            call.model = model
            timeout = self._plan["timeout"]
            result = member.average_variables(variables, weight, timeout=timeout, min_results=1)
        self._oracle.returned(call, member, result, values)
        self._calls += 1

    def _average_gradient(self, member: Member) -> None:
        state, step = self._state, self._state.step[0]
        is_mixed = self._plan["program"] == "mixed"
        kind = int(step) % self._plan["kinds"] if is_mixed else 0
        payload = step + 3 * self._rank, 7 * step + self._rank
        mean = self._average(member, f"gradient {kind}", payload, state)
        state.weights[:] = state.weights * 0.5 + mean[-2:]
        state.step += 1
        self._oracle.made_step(member, state)
        if is_mixed and state.step[0] % 3 == 2:
            with contextlib.suppress(CallsDifferError, WorkerError):
                self._average(member, "metric", (self._rank, 1.0))

    def _gather_and_average(self, member: Member) -> None:
        self._schedule.models += 1
        value = self._rank, self._schedule.models
        with self._call(None, 1.0, self._state) as call:
            call.value = value
            result = member.all_gather(
                value,
                "places",
                timeout=self._plan["timeout"],
                min_results=self._plan["min_results"],
                state=self._state,
            )
        self._oracle.returned(call, member, result, None)
        self._oracle.gathered(member, result)
        self._average_gradient(member)

    def _broadcast(self, member: Member) -> bool:
        """Broadcast the state of rank 0; return whether it has arrived."""
        for _ in range(_MOST_BROADCASTS):
            with self._call(None, 1.0, self._state):
                try:
                    timeout = self._plan["timeout"]
                    result = member.broadcast_variables(self._state, 0, timeout=timeout)
                    if result.number is None:
                        self._world.fail("a broadcast without a number")
                    return True
                except (CallsDifferError, WorkerError) as error:
                    self._world.note(f"broadcast: {error}")
                    is_lost = isinstance(error, WorkerError)
                    if is_lost and self._world.draw() < 0.2:
                        self._world.sleep(0.5)
        return False


STATE = State(World(0)).layout
"""The layout of a `State`."""
