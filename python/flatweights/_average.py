"""The weighted mean of several models, in one pass over memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from itertools import islice
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from flatweights import _core
from flatweights._layout import Layout
from flatweights._numbers import real_number
from flatweights._sources import Template, check_flat_weights
from flatweights._trees import listed
from flatweights._weights import FlatWeights

Nonfinite = Literal["propagate", "raise", "skip"]

Source = TypeVar("Source")
"""An array, `FlatWeights`, a mapping of arrays, or a sequence of arrays."""

NONE_FINITE = "every source of positive weight holds NaN or infinity"
"""The text of the error if ``nonfinite="skip"`` leaves only weights of 0."""


def average(
    sources: Iterable[Source],
    weights: Iterable[float] | None = None,
    *,
    out: Source | None = None,
    nonfinite: Nonfinite = "propagate",
) -> Source:
    """Return the weighted mean of ``sources``.

    One pass reads each source once and writes the result once, without the GIL. Floating
    and complex parts are averaged. Within a model, integer and boolean parts (counters,
    seeds) keep the value of the first source; a bare array of integers raises
    `TypeError`. A vector is averaged throughout, including integers promoted into it.

    float16, bfloat16, float32 and complex64 are summed in float64; float64 and complex128
    are summed with compensation (Neumaier, "Rundungsfehleranalyse einiger Verfahren zur
    Summation endlicher Summen", ZAMM 54, 1974). Sources are added in the order given; at
    the end the sum is divided by the sum of the weights and rounded once. Each weight is
    first divided by the first positive one, so equal weights give the same result as None.
    The bits of the result do not depend on threads or alignment. As in NumPy, a float64 sum
    that overflows is infinite, and a NaN in a source of weight 0 makes the result NaN.

    It replaces ``{k: sum(w[k] for w in ws) / len(ws) for k in ws[0]}``.

    >>> import numpy as np
    >>> a, b = {"w": np.array([1.0, 2.0])}, {"w": np.array([3.0, 6.0])}
    >>> average([a, b])
    {'w': array([2., 4.])}
    >>> average([a["w"], b["w"]], weights=[3, 1])
    array([1.5, 3. ])

    Args:
        sources: Models, all of one kind: arrays, `FlatWeights`, mappings of arrays with
            the same keys, sequences of arrays (Keras ``get_weights()``), or nested dicts,
            lists and tuples of arrays (Flax), which are named by their paths. Shapes and
            dtypes must agree; for `FlatWeights`, `Layout.digest` must. Strided arrays are
            copied first. The iterable is consumed before any source is read, so a generator
            must not yield one buffer twice.
        weights: One weight per source, in their order, such as its number of samples: finite,
            not negative, not all 0, and none above 2**512 times the first positive one. Equal
            weights, if None.
        out: Model to write to: of the same kind, writable and contiguous. It may be one of
            the sources. If None, a new model of the same kind: a dict for mappings, a list
            for sequences, nested containers for nested ones.
        nonfinite: What to do about NaN and infinity: ``"propagate"`` them; ``"raise"``,
            naming source and slot; or ``"skip"`` the source and divide by the weights of
            the rest. They are detected while averaging, so after ``"raise"`` a separate
            ``out`` has undefined contents; an ``out`` that is a source is unchanged.

    Returns:
        ``out``, or the new model.

    Raises:
        TypeError: If the sources differ in kind or dtype, or a dtype has no mean.
        ValueError: If there is no source; if keys, shapes or digests differ; if weights are
            not as above; if ``out`` overlaps a source without being it; if a source is not
            finite under ``"raise"``; or if ``"skip"`` leaves no source of positive weight.
    """
    if weights is None and nonfinite == "propagate":
        if type(sources) is list:
            # The core reads without the GIL. Another thread may replace models in the caller's list
            # meanwhile, and the old ones must live on.
            sources = sources[:]
        mean = _core.try_average(sources, out)  # as fast as NumPy for small arrays
        if mean is None:
            mean = _average_packed(sources, out)
        if mean is not None:
            result: Source = mean
            return result
    return average_used(sources, weights, out=out, nonfinite=nonfinite)[0]


def _average_packed(sources: Any, out: Any) -> FlatWeights | None:
    """Return the mean of a list of `FlatWeights` over one layout; None for anything else.

    A fast path: it halves the time of small models.
    """
    if type(sources) is not list or not sources:
        return None
    for model in sources:
        if type(model) is not FlatWeights:
            return None
    if out is not None and type(out) is not FlatWeights:
        return None
    # Their properties would cost a function call each.
    layouts = [model._layout for model in sources]
    buffers = [[model._buffer] for model in sources]
    if out is None:
        target = layouts[0].new_buffer()
    else:
        layouts.append(out._layout)
        target = out._buffer
    weights = [1.0] * len(buffers)
    if mean_of_packed(target, layouts, buffers, weights, "source 0") is None:
        return None
    result: FlatWeights = FlatWeights.wrap(target, layouts[0]) if out is None else out
    return result


def mean_of_packed(
    out: NDArray[np.uint8],
    layouts: list[Layout],
    buffers: list[list[NDArray[np.uint8]]],
    weights: list[float],
    where: str,
) -> bool | None:
    """Write the weighted mean of packed buffers to ``out``; return whether all sums were finite.

    Args:
        out: Packed buffer of the first layout.
        layouts: Those of all buffers.
        buffers: One packed buffer in a list for each model.
        weights: One for each, as `read_weights` returns them.
        where: How errors name the first model.

    Returns:
        None, with nothing done, unless all layouts have one digest.

    Raises:
        TypeError: If a slot has a dtype without a mean.
        ValueError: If ``out`` is read-only, or overlaps a model without being it.
    """
    layout = layouts[0]
    for other in layouts:
        if other is not layout and other.digest != layout.digest:
            return None
    check_flat_weights(layout, where)
    return _core.average_into(layout.core, True, [out], buffers, weights)


def average_used(
    sources: Iterable[Source],
    weights: Iterable[float] | None = None,
    *,
    out: Source | None = None,
    nonfinite: Nonfinite = "propagate",
    names: Sequence[str] | None = None,
    template: Template | None = None,
) -> tuple[Source, list[int]]:
    """Return the mean as `average` does, and the positions of the sources that are in it.

    Errors about NaN and infinity name sources by ``names``, if given. A known ``template`` of the
    sources is not computed again.
    """
    job = Job(sources, weights, out, nonfinite, names, template)
    return job.result, job.screened(job.mean)


_Arrays = list[NDArray[Any]]


class Job:
    """The checked sources of one average or robust rule, and the model to write to.

    Attributes:
        models: The sources.
        template: The kind and layout that they share.
        parts: The parts of each source.
        result: The model to write to.
        written: Its parts.
        weights: One weight per source.
        nonfinite: What to do about NaN and infinity.
    """

    def __init__(
        self,
        sources: Iterable[Any],
        weights: Iterable[float] | None,
        out: Any,
        nonfinite: Nonfinite,
        names: Sequence[str] | None,
        template: Template | None = None,
    ) -> None:
        """Read and check everything except for the shapes and dtypes of parts.

        Args:
            sources: The sources.
            weights: One weight per source; equal ones, if None.
            out: The model to write to; a new one, if None.
            nonfinite: What to do about NaN and infinity.
            names: The names of the sources in errors about NaN and infinity, if not numbers.
            template: The template of the sources, if it is known.
        """
        self.models = read_sources(sources)
        check_nonfinite(nonfinite)
        self.weights = read_weights(weights, len(self.models))
        self.template = template or Template.of(self.models[0])
        self.result = self.template.new() if out is None else out
        self.written = self.template.read_out(self.result)
        if not all(part.flags.c_contiguous for part in self.written):
            self.check([])  # raises, before a source that is this result is copied
        self.parts = self.template.read_all(self.models, self.written)
        self.nonfinite = nonfinite
        self._names = names

    @property
    def everything(self) -> list[int]:
        """The positions of all sources."""
        return list(range(len(self.parts)))

    def finite(self) -> list[int]:
        """Return the positions of the finite sources; under ``"raise"``, raise for any other."""
        used = []
        for k, arrays in enumerate(self.parts):
            name = self._names[k] if self._names else f"source {k}"
            error = self.template.find_nonfinite(arrays, name)
            if error is None:
                used.append(k)
            elif self.nonfinite == "raise":
                raise error
        if not any(self.weights[k] for k in used):
            raise ValueError(NONE_FINITE)
        return used

    def check(self, sources: list[_Arrays]) -> None:
        """Raise unless the parts of ``sources`` and of the result fit, and do not overlap.

        The part of a source may be the same memory as that of the result. What writes the result in
        the core checks this itself.
        """
        template = self.template
        _core.check_average(template.layout.core, template.packed, self.written, sources)

    def screened(self, write: Callable[[list[int]], bool]) -> list[int]:
        """Call ``write`` with the positions of the sources to use; return these positions.

        ``write`` writes the result and returns whether it is finite. Sources are screened only
        if a result is not finite, or overwrites one of them.
        """
        used = self.everything
        if self.nonfinite == "propagate":
            write(used)
        elif _core.shares_slots(self.written, self.parts):  # before a source is overwritten
            used = self.finite()
            write(used)
        elif not write(used):
            # Find the source only now. There is none if a sum of finite numbers overflowed.
            used = self.finite()
            if len(used) < len(self.parts):
                write(used)
        return used

    def mean(self, used: list[int]) -> bool:
        """Write the mean of the sources at these positions; return whether sums were finite."""
        parts, weights = self.parts, self.weights
        if len(used) < len(parts):
            parts, weights = [parts[k] for k in used], [weights[k] for k in used]
        return self._write(parts, weights)

    def average(self, weights: Mapping[int, float], points: list[_Arrays] | None = None) -> None:
        """Write the mean of the sources, or ``points``, at the positions that have ``weights``."""
        points = self.parts if points is None else points
        self._write([points[k] for k in weights], list(weights.values()))

    def _write(self, parts: list[_Arrays], weights: list[float]) -> bool:
        template = self.template
        core, packed = template.layout.core, template.packed
        return _core.average_into(core, packed, self.written, parts, weights)


def average_into(
    out: Source, sources: Iterable[Source], weights: Iterable[float] | None = None
) -> None:
    """Write the weighted mean of ``sources`` to ``out``, which may be one of them.

    As `average` with ``out``.

    >>> import numpy as np
    >>> a, b = np.array([1.0, 2.0]), np.array([3.0, 6.0])
    >>> average_into(a, [a, b])
    >>> a
    array([2., 4.])

    Args:
        out: Model to write to: of the kind of the sources, writable and contiguous.
        sources: Models, all of one kind.
        weights: One weight per source. Equal weights, if None.

    Raises:
        TypeError: As `average`.
        ValueError: As `average`.
    """
    average(sources, weights, out=out)


def check_nonfinite(nonfinite: str) -> None:
    """Raise `ValueError` unless ``nonfinite`` is one of the three choices."""
    if nonfinite not in ("propagate", "raise", "skip"):
        raise ValueError(f"nonfinite: expected 'propagate', 'raise' or 'skip', got {nonfinite!r}")


def read_sources(sources: Iterable[Any]) -> list[Any]:
    """Return ``sources`` as a list of at least one."""
    models = list_of(sources)
    if not models:
        raise ValueError("expected at least one source, got none")
    return models


def list_of(sources: Iterable[Any]) -> list[Any]:
    """Return ``sources`` as a list.

    Raises:
        TypeError: If they are not iterable; or a mapping, which would give its keys, or a text.
    """
    if type(sources) is list:
        return sources[:]
    if isinstance(sources, Mapping) and sources:
        raise TypeError(
            f"sources: expected a list of models, got {type(sources).__name__}; pass "
            "list(models.values()), or the models in one list, [a, b]"
        )
    return listed(sources, "sources: expected a list of models")


def read_weights(
    weights: Iterable[float] | None, count: int, *, all_may_be_zero: bool = False
) -> list[float]:
    """Return ``count`` checked weights."""
    if weights is None:
        return [1.0] * count
    expected = "weights: expected numbers in the order of the sources"
    in_one_list = "; pass all models in one list, as in average([a, b])"
    if isinstance(weights, (Mapping, Set, str, bytes)):
        hint = in_one_list if isinstance(weights, Mapping) else ""
        raise TypeError(f"{expected}, got a {type(weights).__name__}{hint}")
    try:
        rest = iter(weights)
    except TypeError as error:
        raise TypeError(f"{expected}, got {type(weights).__name__}") from error
    # One more than needed, but not all of an endless iterator.
    given: list[Any] = list(islice(rest, count + 1))
    if given and isinstance(given[0], np.ndarray) and given[0].ndim > 0:
        got = f"an array of shape {given[0].shape}{in_one_list}"
        raise TypeError(f"weight 0: expected a real number, got {got}")
    factors = [read_weight(w, f"weight {k}") for k, w in enumerate(given)]
    if len(factors) != count:
        got = f"{len(factors)}{' or more' if len(factors) > count else ''}"
        raise ValueError(f"expected {count} weights, one per source, got {got}")
    if not any(factors) and not all_may_be_zero:
        raise ValueError("expected a positive weight, got only zeros")
    return factors


def read_weight(weight: float, where: str) -> float:
    """Return ``weight`` as a checked float."""
    value = real_number(weight, where)
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{where}: expected a finite weight, not negative, got {value:g}")
    return value
