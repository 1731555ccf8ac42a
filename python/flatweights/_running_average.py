"""The average of models that arrive one after the other."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flatweights import _core
from flatweights._average import list_of, read_weight, read_weights
from flatweights._core import move_parts
from flatweights._dtypes import is_averaged
from flatweights._locks import CallLock
from flatweights._sources import Template

_Weights = tuple[float, float, float]
_Kept = Mapping[int, NDArray[Any]]


class _Sums(NamedTuple):
    """The state of a running average that has a source.

    Attributes:
        template: The kind and layout that the sources share.
        sum: The sum and its weights: `_core` changes both, or neither.
        kept: By slot, the integer and boolean parts of the first source.
    """

    template: Template
    sum: _core.RunningSum
    kept: _Kept


class RunningAverage:
    """A weighted mean in one model's memory, whatever the number of sources.

    The sums are float64, plus as many float64 compensations where a part is float64 or
    complex128. The result has the same bits as that of `flatweights.average` for the same models
    in the same order. Calls from several threads take turns; a call within another of the same
    thread, such as that of a signal handler, raises `RuntimeError`. An interrupted call (Ctrl-C)
    has added its sources with their weights, or nothing; `total_weight` shows which.

    Pickling keeps every bit of an unfinished sum: later additions and merges give the same
    result as without it. With protocol 5 the sums are one out-of-band buffer, which is used
    in place and copied only if more is added to it.

    >>> running = RunningAverage()
    >>> running.add(np.array([1.0, 2.0]), weight=3)
    >>> running.add(np.array([3.0, 6.0]))
    >>> running.mean(), running.total_weight
    (array([1.5, 3. ]), 4.0)
    >>> running
    <RunningAverage of an array, 2 elements, total weight 4>
    """

    def __init__(self) -> None:
        """Start empty; the first source sets kind, shapes and dtypes."""
        self._calls = CallLock("running average")
        self._state: _Sums | None = None  # assigned only when complete

    def __repr__(self) -> str:
        """The kind of the sources, their size and weight."""
        state = self._state
        if state is None:
            return "<RunningAverage of nothing yet>"
        kind, size = state.template.kind.value, state.template.layout.size
        return f"<RunningAverage of {kind}, {size:,} elements, total weight {self.total_weight:g}>"

    @property
    def total_weight(self) -> float:
        """The sum of all weights so far."""
        state = self._state
        return state.sum.total_weight if state else 0.0

    def add(self, source: Any, weight: float = 1.0) -> None:
        """Add one model.

        Integer and boolean parts keep the value of the first model added.

        Args:
            source: An array, `FlatWeights`, a mapping or a sequence of arrays; of the kind,
                shapes and dtypes of the first one. It is read, not kept.
            weight: Finite and not negative.

        Raises:
            TypeError: If kind or dtype differ, or a dtype has no mean.
            ValueError: If keys, shapes or digests differ, or the weight is not as above.
        """
        self._add([source], [read_weight(weight, "weight")], ["source"])

    def add_all(self, sources: Iterable[Any], weights: Iterable[float] | None = None) -> None:
        """Add several models, as `add` does one after the other, in one pass over the sum.

        >>> running = RunningAverage()
        >>> running.add_all([np.array([1.0]), np.array([3.0])], weights=[3, 1])
        >>> running.mean()
        array([1.5])

        Args:
            sources: Models; see `add`. If one is refused, none is added.
            weights: One weight per source. 1, if None.

        Raises:
            TypeError: As `add`.
            ValueError: As `add`, or if there is not one weight per source.
        """
        models = list_of(sources)
        factors = read_weights(weights, len(models), all_may_be_zero=True)
        if models:
            self._add(models, factors, [f"source {k}" for k in range(len(models))])

    def _add(self, models: list[Any], weights: list[float], names: list[str]) -> None:
        with self._calls.ready():
            state = self._state
            template = state.template if state else Template.of(models[0], names[0])
            parts = list(map(template.read, models, names))
            kept = state.kept if state else _kept_parts(template, models[0])
            target = state.sum if state else _core.RunningSum(template.layout.core)
            target.add(template.packed, parts, weights)
            self._state = _Sums(template, target, kept)

    def merge(self, other: RunningAverage) -> None:
        """Add the sums of ``other``, as if its sources were added here.

        The result is deterministic, but its rounding differs from that of one long sum. ``other``
        is unchanged.

        Args:
            other: Another running average over the same layout, or an empty one.

        Raises:
            ValueError: If ``other`` is this one, or its layout differs.
            TypeError: If it is no `RunningAverage`, or its models are of another kind.
        """
        if not isinstance(other, RunningAverage):
            raise TypeError(f"other: expected a RunningAverage, got {type(other).__name__}")
        if other is self:
            raise ValueError("other: expected another running average, got the same one")
        first, second = sorted((self, other), key=id)  # all threads lock in one order
        with first._calls.ready(), second._calls.ready():
            state, added = self._state, other._state
            if added is None:
                return
            template = state.template if state else added.template
            if template.kind is not added.template.kind:
                raise TypeError(
                    f"expected sums of {template.kind.value}, got {added.template.kind.value}"
                )
            template.check_layout(added.template.layout, "other")
            target = state.sum if state else _core.RunningSum(template.layout.core)
            target.merge(added.sum)
            self._state = _Sums(template, target, state.kept if state else added.kept)

    def mean(self, *, out: Any = None) -> Any:
        """Return the weighted mean so far; more may be added afterwards.

        Args:
            out: Model to write to: of the kind of the sources, writable and contiguous. A
                new model, if None.

        Returns:
            ``out``, or the new model.

        Raises:
            ValueError: If no weight is positive yet, or ``out`` has other shapes.
            TypeError: If ``out`` is of another kind or dtype.
        """
        with self._calls.ready():
            state = self._state
            if state is None or not state.sum.total_weight:
                raise ValueError("expected at least one source of positive weight, got none")
            template = state.template
            result = template.new() if out is None else out
            parts = template.read_out(result)
            state.sum.divide_into(template.packed, parts)
            if state.kept:
                views = template.views(result)
                move_parts([views[i] for i in state.kept], list(state.kept.values()))
            return result

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle sums and weights as they are; with protocol 5 the sums are out of band."""
        with self._calls.ready():
            state = self._state
            if state is None:
                return type(self), ()
            memory: Any = state.sum.memory
            if protocol >= 5:
                # The pickler may read the memory at any later time; additions go to a copy.
                memory.flags.writeable = False
                memory = pickle.PickleBuffer(memory.view(np.uint8).data)
            else:
                memory = memory.tobytes()
            return running_of, (type(self), state.template, memory, state.sum.weights, state.kept)


def running_of(
    cls: type[RunningAverage], template: Template, buffer: Any, weights: _Weights, kept: _Kept
) -> RunningAverage:
    """Return a running average with this state.

    Additions go to a copy of ``buffer``, since other sums may use it. Until then, `state_of`
    returns a read-only view of it; later, memory that is writable.

    Args:
        cls: Its class.
        template: The kind and layout that the sources share.
        buffer: The sums.
        weights: The state of the weights of the sources.
        kept: By slot, the parts without a mean.
    """
    memory: NDArray[Any] = np.frombuffer(buffer, np.float64)
    memory.flags.writeable = False
    running = cls()
    running._state = _Sums(template, _core.RunningSum(template.layout.core, memory, weights), kept)
    return running


def state_of(running: RunningAverage) -> tuple[NDArray[np.float64], _Weights, _Kept]:
    """Return the last three arguments of `running_of`, after something was added."""
    state = running._state
    assert state is not None
    return state.sum.memory, state.sum.weights, state.kept


def _kept_parts(template: Template, source: Any) -> dict[int, NDArray[Any]]:
    kept = [i for i, slot in enumerate(template.layout.slots) if not is_averaged(slot.dtype)]
    views = template.views(source) if kept else []
    return {i: np.array(views[i]) for i in kept}
