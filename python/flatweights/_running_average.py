"""The average of models that arrive one after the other."""

import threading
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatweights import _core
from flatweights._average import ratio, read_weight
from flatweights._cast import move_parts
from flatweights._dtypes import has_mean
from flatweights._sources import Template


class RunningAverage:
    """A weighted mean in one model's memory, whatever the number of sources.

    The sums are float64, plus as many float64 compensations where a part is float64 or
    complex128. Models added in some order give the bits that `flatweights.average` gives
    for them in that order. Calls from several threads take turns.

    >>> running = RunningAverage()
    >>> running.add(np.array([1.0, 2.0]), weight=3)
    >>> running.add(np.array([3.0, 6.0]))
    >>> running.mean(), running.total_weight
    (array([1.5, 3. ]), 4.0)
    """

    def __init__(self) -> None:
        """Begin with nothing; the first source sets kind, shapes and dtypes."""
        self._lock = threading.RLock()
        self._template: Template | None = None
        self._sum: _core.RunningSum | None = None
        self._kept: dict[int, NDArray[Any]] = {}
        self._base: float | None = None
        self._relative_total = 0.0
        self._total = 0.0

    @property
    def total_weight(self) -> float:
        """The sum of all weights so far."""
        return self._total

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
        self._add([source], [read_weight(weight, "weight")])

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
        models = list(sources)
        given = [1.0] * len(models) if weights is None else list(weights)
        if len(given) != len(models):
            raise ValueError(f"expected {len(models)} weights, one per source, got {len(given)}")
        if models:
            self._add(models, [read_weight(w, f"weight {k}") for k, w in enumerate(given)])

    def _add(self, models: list[Any], values: list[float]) -> None:
        with self._lock:
            template = self._template or Template.of(models[0])
            names = ["source"] if len(models) == 1 else [f"source {k}" for k in range(len(models))]
            parts = [template.read(*named) for named in zip(models, names, strict=True)]
            # A weight of 0 before any other has no ratio yet, and needs none.
            base = self._base if self._base is not None else next(filter(None, values), None)
            relative = [ratio(value, base) if base is not None else 0.0 for value in values]
            total = self._sum or _core.RunningSum(template.layout.code)
            total.add(template.packed, parts, relative)
            if self._template is None:
                self._begin(template, total, _kept_parts(template, models[0]))
            self._base = base
            for value, share in zip(values, relative, strict=True):
                self._relative_total += share
                self._total += value

    def merge(self, other: "RunningAverage") -> None:
        """Add what ``other`` has summed up, as if its sources were added here.

        The result is deterministic, but rounded otherwise than one long sum. ``other`` is
        left as it is.

        Args:
            other: Another running average over the same layout, or an empty one.

        Raises:
            ValueError: If ``other`` is this one, or its layout differs.
            TypeError: If its models are of another kind.
        """
        if other is self:
            raise ValueError("expected another running average, got the same one")
        first, second = sorted((self, other), key=id)  # one order for all threads
        with first._lock, second._lock:
            if other._template is None or other._sum is None:
                return
            template = self._template or other._template
            if template.kind is not other._template.kind:
                raise TypeError(
                    f"expected sums of {template.kind.value}, got {other._template.kind.value}"
                )
            template.check_layout(other._template.layout, "other")
            base = self._base if self._base is not None else other._base
            scale = ratio(other._base, base) if other._base and base else 1.0
            added = ratio(scale * other._relative_total, 1.0)
            total = self._sum or _core.RunningSum(template.layout.code)
            total.merge(other._sum, scale)
            if self._template is None:
                self._begin(template, total, other._kept)
            self._base = base
            self._relative_total += added
            self._total += other._total

    def mean(self, *, out: Any = None) -> Any:
        """Return the weighted mean so far; more may be added afterwards.

        Args:
            out: Where to write: of the kind of the sources, writable, without strides. A
                new model, if None.

        Returns:
            ``out``, or the new model.

        Raises:
            ValueError: If no weight is positive yet, or ``out`` has other shapes.
            TypeError: If ``out`` is of another kind or dtype.
        """
        with self._lock:
            if self._template is None or self._sum is None or self._base is None:
                raise ValueError("expected at least one source of positive weight, got none")
            result = self._template.new() if out is None else out
            parts = self._template.read_out(result)
            self._sum.divide_into(self._template.packed, parts, self._relative_total)
            if self._kept:
                views = self._template.views(result)
                move_parts([views[i] for i in self._kept], list(self._kept.values()))
            return result

    def _begin(
        self, template: Template, total: _core.RunningSum, kept: dict[int, NDArray[Any]]
    ) -> None:
        self._template, self._sum, self._kept = template, total, kept


def _kept_parts(template: Template, source: Any) -> dict[int, NDArray[Any]]:
    kept = [i for i, slot in enumerate(template.layout.slots) if not has_mean(slot.dtype)]
    views = template.views(source) if kept else []
    return {i: np.array(views[i]) for i in kept}
