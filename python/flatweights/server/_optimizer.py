"""The base class of server optimizers, and their hyperparameters."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, ClassVar, Generic, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from flatweights._core import move_parts
from flatweights._dtypes import is_averaged
from flatweights._inplace import Model, norm
from flatweights._layout import Layout
from flatweights._numbers import real_number
from flatweights._sources import Kind, Template
from flatweights._weights import FlatWeights, sealed
from flatweights.server._state import (
    MASTER,
    WEIGHTS,
    Block,
    Run,
    model_memory,
    model_view,
    new_layout,
    runs_of,
    template_of,
)

Optimizer = TypeVar("Optimizer", bound="ServerOptimizer[Any]")

# The largest norm, by the bytes of a number: up to it, squares and sums of many squares are finite.
_LARGEST_NORM = {4: 2.0**56, 8: 2.0**400}

_STEPS = "steps"


class Hyperparameter:
    """A number of an optimizer: its state holds it, and every assignment is checked.

    It is an attribute of the class, whose constructor passes the value to that of
    `ServerOptimizer`.
    """

    def __init__(
        self, expected: str, check: Callable[[float], bool], *, fixed: bool = False
    ) -> None:
        """Describe the number.

        Args:
            expected: The valid numbers, in words.
            check: A function that tells whether a number is valid.
            fixed: Whether the number cannot be set later.
        """
        self._expected = expected
        self._check = check
        self._fixed = fixed
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, optimizer: None, owner: type) -> Hyperparameter: ...
    @overload
    def __get__(self, optimizer: ServerOptimizer[Any], owner: type) -> float: ...
    def __get__(
        self, optimizer: ServerOptimizer[Any] | None, owner: type
    ) -> float | Hyperparameter:
        if optimizer is None:
            return self
        return float(optimizer._numbers[self._name])

    def __set__(self, optimizer: ServerOptimizer[Any], value: float) -> None:
        if self._fixed:
            raise AttributeError(f"{self._name}: fixed when the optimizer is created")
        optimizer._numbers[self._name][...] = self.read(value)

    def read(self, value: Any) -> float:
        """Return ``value`` as a checked float."""
        setting = real_number(value, self._name)
        if not self._check(setting):
            raise ValueError(f"{self._name}: expected {self._expected}, got {value!r}")
        return setting

    @classmethod
    def positive(cls) -> Hyperparameter:
        """Return a number that is positive and finite, such as a learning rate."""
        return cls("a positive finite number", lambda value: 0 < value < math.inf)

    @classmethod
    def fraction(cls, *, fixed: bool = False) -> Hyperparameter:
        """Return a number that is at least 0 and less than 1."""
        return cls("a number from 0 to below 1", lambda value: 0 <= value < 1, fixed=fixed)


class ServerOptimizer(ABC, Generic[Model]):
    """A global model, and the rule by which each round's average updates it.

    The model is `FlatWeights`, or one array of any shape. Its numbers are float16, bfloat16,
    float32, float64 or complex; `FlatWeights` may have integer and boolean parts beside them. The
    optimizer owns a copy of the model, in one buffer with the rest of its state, and each step
    changes that buffer in place. Parts of float16 and bfloat16 have a master copy in float32, where
    steps too small for 16 bits add up (Micikevicius et al., "Mixed Precision Training", ICLR 2018),
    and their moments are float32, too. Other parts are computed in their own precision. Each
    complex number counts as two numbers, real and imaginary.

    A step runs on the caller's thread, and kernels may use the core's threads; their number changes
    no bit of a result. Only one thread may step an optimizer at a time. An optimizer can be
    pickled, and `copy.copy` copies its state. If a step is interrupted (Ctrl-C), the model is lost:
    further steps, `weights`, `state`, `save` and pickling raise `RuntimeError`. Continue from a
    state that was saved before.

    To write your own optimizer, derive a class that declares its `Hyperparameter`s and defines
    `update`, which changes the weights. It may also define `vectors`, to keep more vectors beside
    the weights, and `check`. This class does the rest: checks, 16-bit parts, integers, files and
    pickles.

    >>> class FedLion(ServerOptimizer):
    ...     '''Steps of one size, each in the direction of the smoothed difference.'''
    ...
    ...     learning_rate = Hyperparameter.positive()
    ...     beta = Hyperparameter.fraction()
    ...
    ...     def __init__(self, initial, *, learning_rate=0.01, beta=0.9):
    ...         super().__init__(initial, learning_rate=learning_rate, beta=beta)
    ...
    ...     def vectors(self):
    ...         return {"momentum": 0.0}
    ...
    ...     def update(self, block):
    ...         momentum = block.vectors["momentum"]
    ...         momentum *= self.beta
    ...         momentum += (1 - self.beta) * block.delta
    ...         block.weights += self.learning_rate * np.sign(momentum)
    >>> optimizer = FedLion(np.zeros(2, np.float16))
    >>> optimizer.step(np.array([3, -5], np.float16))
    array([ 0.01, -0.01], dtype=float16)
    >>> optimizer
    <FedLion(learning_rate=0.01, beta=0.9) of 2 numbers, after 1 steps>
    """

    _template: Template
    _state: FlatWeights
    _weights: Any
    _memory: NDArray[np.uint8]
    _runs: list[Run]
    _numbers: dict[str, NDArray[Any]]
    _integers: dict[str, NDArray[Any]]
    _is_whole = True  # False during a step, and after one that was interrupted

    def __init__(self, initial: Any, **hyperparameters: float) -> None:
        """Start from a model.

        Args:
            initial: `FlatWeights` or an array; it is copied.
            **hyperparameters: A number for each `Hyperparameter` of the class.

        Raises:
            TypeError: If ``initial`` is neither, or has a dtype that `flatweights.average` refuses;
                or a hyperparameter is not a real number, is missing, or is unknown to the class.
            ValueError: If ``initial`` holds NaN or infinity, or a number is out of range.
        """
        cls, declared = type(self), self._hyperparameters()
        if hyperparameters.keys() != declared.keys():
            raise TypeError(
                f"{cls.__name__}: expected the hyperparameters {sorted(declared)}, "
                f"got {sorted(hyperparameters)}"
            )
        checked = {name: h.read(hyperparameters[name]) for name, h in declared.items()}
        template = Template.of(initial, "initial")
        if template.kind not in (Kind.FLAT_WEIGHTS, Kind.ARRAY):
            raise TypeError(
                f"initial: expected an array or FlatWeights, got {template.kind.value}; "
                "FlatWeights(parts) copies one"
            )
        self._template = template
        initial = self._read(initial, "initial")
        memory = self._bytes_of(initial, "initial")
        self._check_finite(initial, "initial")
        self._numbers = {name: np.array(value) for name, value in checked.items()}
        state = FlatWeights.empty(self._layout(template))
        for name, array in self._numbers_of(state).items():
            array[...] = {_STEPS: 0, **checked}[name]
        self._adopt(template, state)
        move_parts([self._memory], [memory])
        for run in self._runs:
            if run.has_master:
                move_parts([run.wide], [run.weights])
            for name, value in self.vectors().items():
                run.kept[name][...] = value

    @classmethod
    def _numbers_of(cls, state: FlatWeights) -> dict[str, NDArray[Any]]:
        return {name: state[slot] for name, slot in cls._number_slots().items()}

    def _adopt(self, template: Template, state: FlatWeights) -> None:
        """Continue from ``state`` itself, not a copy."""
        self._template, self._state = template, state
        self._memory = model_memory(template, state)
        self._weights = model_view(template, sealed(self._memory))
        self._runs = runs_of(template, state, self._kept())
        self._numbers = self._numbers_of(state)
        parts = model_view(template, self._memory) if template.packed else {}
        self._integers = {n: part for n, part in parts.items() if not is_averaged(part.dtype)}

    def step(self, average: Model, /) -> Model:
        """Update the model by this round's average; return it.

        Integer and boolean parts take the values of the average.

        Args:
            average: It has the kind, shapes and dtypes of the model, and may be `weights`. It is
                read and not kept; a strided array is copied first.

        Returns:
            The `weights`, read-only and changed in place by the next step.

        Raises:
            TypeError: If the average is of another kind or dtype.
            ValueError: If its shape or digest differs, or `check` refuses it. The model has not
                changed.
            RuntimeError: If an earlier step was interrupted.
        """
        return self._step(average, "average", self._integers)

    @abstractmethod
    def update(self, block: Block, /) -> None:
        """Change ``block.weights``, and ``block.vectors``, in place: the optimizer's rule.

        A step calls it for one block of the model after the other. A block may have any length, so
        compute each number independently of the others.
        """

    def vectors(self) -> Mapping[str, float]:
        """Return the vectors to keep beside the model: by name, the first value of all numbers.

        They are part of `state`; their number and names may depend on hyperparameters that are
        fixed. By default there are none.
        """
        return {}

    def check(self, average: Model, /) -> None:
        """Raise if a step would leave the range of numbers; it is called before `update`.

        By default an average is refused if it holds NaN or infinity, or if its norm or that of the
        weights exceeds 2**56 (2**400 if all numbers are float64 or complex128): squares of their
        differences are then finite.

        Raises:
            ValueError: If the average is refused.
        """
        self._check_norm(average, "average")
        self._check_norm(self._weights, "weights")

    @property
    def weights(self) -> Model:
        """The model, as a read-only view of the optimizer's buffer, which the next step changes.

        Use ``optimizer.weights.copy()`` to keep the model as it is now. `ray.put` and pickles copy
        it.
        """
        self._check_whole()
        model: Model = self._weights
        return model

    @property
    def steps(self) -> int:
        """The number of steps so far."""
        return int(self._numbers[_STEPS])

    @property
    def state(self) -> FlatWeights:
        """The whole state, as a read-only view of the optimizer's buffer.

        The parts of the model are named ``weights/<name>``, and the vectors beside them
        ``master/<name>`` or, as in `vectors`, ``momentum/<name>``. If the model is an array, they
        are named ``weights``, ``master`` and ``momentum``. Names of single numbers begin with the
        name of the class: ``FedAdam.steps``.
        """
        self._check_whole()
        return sealed(self._state)

    @classmethod
    def from_state(cls: type[Optimizer], state: FlatWeights) -> Optimizer:
        """Return an optimizer that continues from a copy of ``state``, bit for bit.

        Args:
            state: The `state` of an optimizer of this class.

        Raises:
            TypeError: If ``state`` is not `FlatWeights`.
            ValueError: If it is not the state of an optimizer of this class, or holds NaN or
                infinity. Weights with a finite master copy may be infinite.
        """
        if not isinstance(state, FlatWeights):
            raise TypeError(f"state: expected FlatWeights, got {type(state).__name__}")
        return cls._resume(state.copy(), "state")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state to a safetensors file, as `FlatWeights.save` does.

        Raises:
            OSError: If the file cannot be written.
            ValueError: If the state holds NaN or infinity, which `load` would refuse.
            RuntimeError: If a step was interrupted.
        """
        self._checked_state().save(path)

    @classmethod
    def load(cls: type[Optimizer], path: str | os.PathLike[str]) -> Optimizer:
        """Return an optimizer that continues from a saved state, bit for bit.

        Args:
            path: A file that `save` wrote.

        Raises:
            OSError: If the file cannot be opened.
            ValueError: If the file is damaged, is not the state of an optimizer of this class, or
                holds NaN or infinity.
        """
        return cls._resume(FlatWeights.load(path), os.fspath(path))

    @classmethod
    def _resume(cls: type[Optimizer], state: FlatWeights, where: str) -> Optimizer:
        """Return an optimizer over ``state`` itself, not a copy."""
        numbers = cls._number_slots()
        for name in numbers.values():
            if name not in state or state[name].shape != ():
                end = f".{_STEPS}"
                owners = [n.removesuffix(end) for n in state if n.endswith(end) and "/" not in n]
                raise ValueError(
                    f"{where}: expected the state of a {cls.__name__}, with {name!r}; "
                    f"got that of {owners[0] if owners else 'no optimizer'}"
                )
        optimizer = cls.__new__(cls)
        optimizer._numbers = cls._numbers_of(state)
        try:
            for name, hyperparameter in cls._hyperparameters().items():
                hyperparameter.read(optimizer._numbers[name])
            template = template_of(state)
            expected = Template(Kind.FLAT_WEIGHTS, optimizer._layout(template))
            expected.check_layout(state.layout, cls.__name__)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: {error}") from error
        optimizer._adopt(template, state)
        optimizer._check_values(where)
        if optimizer.steps < 0:
            raise ValueError(f"{where}: expected a number of steps, got {optimizer.steps}")
        return optimizer

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the state.

        Raises:
            ValueError: As `save`.
        """
        return type(self).from_state, (self._checked_state(),)

    def __repr__(self) -> str:
        """Class, hyperparameters, model and steps."""
        numbers = ", ".join(f"{name}={getattr(self, name)!r}" for name in self._hyperparameters())
        size = self._template.layout.size
        return f"<{type(self).__name__}({numbers}) of {size} numbers, after {self.steps} steps>"

    def _checked_state(self) -> FlatWeights:
        state = self.state
        self._check_values("state")
        return state

    def _check_values(self, where: str) -> None:
        """Raise if the state holds NaN or infinity, apart from weights that have a master copy."""
        state, numbers = self._state, {*self._number_slots().values()}
        have_master = {
            WEIGHTS + name.removeprefix(MASTER) for name in state if name.split("/")[0] == MASTER
        }
        parts = {n: part for n, part in state.items() if n not in numbers | have_master}
        template = Template.of(parts, where)
        error = template.find_nonfinite(template.read(parts, where), where)
        if error is not None:
            raise error

    _has_master: ClassVar = True
    """Whether 16-bit parts have a master copy."""

    @property
    def _wants_whole(self) -> bool:
        """Whether `update` calls kernels with threads of their own, which want long blocks."""
        return False

    def _kept(self) -> list[str]:
        """Return the names of all vectors beside the model."""
        names: list[str] = list(self.vectors())
        if taken := {WEIGHTS, MASTER}.intersection(names):
            raise ValueError(f"{type(self).__name__}.vectors: {min(taken)!r} is another vector")
        return [MASTER, *names] if self._has_master else names

    @classmethod
    def _hyperparameters(cls) -> dict[str, Hyperparameter]:
        owners = reversed(cls.__mro__)
        items = (item for owner in owners for item in vars(owner).items())
        return {name: value for name, value in items if isinstance(value, Hyperparameter)}

    @classmethod
    def _number_slots(cls) -> dict[str, str]:
        """Return the slot of each single number, by its name."""
        return {name: f"{cls.__name__}.{name}" for name in (_STEPS, *cls._hyperparameters())}

    def _layout(self, template: Template) -> Layout:
        return new_layout(template, self._kept(), list(self._number_slots().values()))

    def _step(self, model: Any, where: str, integers: Mapping[str, NDArray[Any]]) -> Model:
        """Take a step by ``model``, which errors call ``where``; ``integers`` take its values."""
        self._check_whole()
        try:
            model = self._read(model, where)
        except TypeError as error:
            hint = self._hint(model)
            if hint:
                raise TypeError(f"{error}{hint}") from None
            raise
        memory = self._bytes_of(model, where)
        if model is not self._weights and np.may_share_memory(memory, self._state.buffer):
            memory = memory.copy()  # another vector of the state, which the step changes
        self.check(model)
        whole = self._wants_whole
        silence = nullcontext() if whole else np.errstate(all="ignore")
        self._is_whole = False  # for ever, unless the step completes
        with silence:
            for run in self._runs:
                for block in run.blocks(memory, whole=whole):
                    self.update(block)
            if integers:
                move_parts([*integers.values()], [model[name] for name in integers])
        self._numbers[_STEPS][...] += 1
        self._is_whole = True
        return self.weights

    def _hint(self, model: Any) -> str:
        """Return a clause about ``model``, which is of another kind; it may be empty."""
        expected = Mapping if self._template.packed else np.ndarray
        if isinstance(model, (list, tuple)) and model and isinstance(model[0], expected):
            return "; pass their average, flatweights.average(models)"
        if isinstance(model, Mapping) and not self._template.packed:
            return "; the optimizer was made from an array"
        return ""

    def _read(self, model: Any, where: str) -> Any:
        """Return ``model``, or the array that it is, after a check of kind, shapes and dtypes.

        An array is converted once, so that the numbers that are checked later are those that are
        used; and it has no strides, which `norm` refuses.
        """
        parts = self._template.read(model, where)
        if self._template.packed:
            return model
        self._template.match_arrays(parts, where)
        return parts[0]

    def _bytes_of(self, model: Any, where: str) -> NDArray[np.uint8]:
        (array,) = self._template.read(model, where)
        memory: NDArray[np.uint8] = array.reshape(-1).view(np.uint8)
        return memory

    def _check_finite(self, model: Any, where: str) -> None:
        error = self._template.find_nonfinite(self._template.read(model, where), where)
        if error is not None:
            raise error

    def _check_norm(self, model: Any, where: str) -> None:
        """Raise unless squares of the numbers of ``model`` are finite."""
        sizes = [run.wide.dtype.itemsize for run in self._runs]
        largest = min((_LARGEST_NORM[size] for size in sizes), default=math.inf)
        length = norm(model)
        if not length <= largest:
            self._check_finite(model, where)
            raise ValueError(f"{where}: expected a norm of at most {largest:.2g}, got {length:.3g}")

    def _check_whole(self) -> None:
        if not self._is_whole:
            raise RuntimeError(
                "a step is running, or was interrupted and has changed a part of the model: after "
                "an interrupt, continue from a state that was saved or pickled before"
            )
