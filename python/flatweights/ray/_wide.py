"""The sum of a range of several models, in float64; imports nothing of Ray.

It holds, number for number, what `flatweights.RunningAverage` would, and can be sent.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flatweights._cast import move_parts
from flatweights._dtypes import has_mean
from flatweights._layout import Layout
from flatweights.ray._ranges import Bytes

_CHUNK = 8192  # numbers; a few float64 vectors of it stay in the second cache


class _Fragment(NamedTuple):
    """Real numbers of one dtype in a range: ``place`` in bytes, ``numbers`` in the sum."""

    place: slice
    numbers: slice
    dtype: np.dtype[Any]
    lost: slice | None


class _Plan(NamedTuple):
    averaged: tuple[_Fragment, ...]
    kept: tuple[slice, ...]
    numbers: int
    lost: int


@functools.lru_cache(maxsize=256)
def _plan_of(layout: Layout) -> _Plan:
    averaged, kept = [], []
    numbers = lost = 0
    for slot in layout.slots:
        place = slice(slot.offset, slot.offset + slot.nbytes)
        if not has_mean(slot.dtype):
            kept.append(place)
            continue
        real = np.zeros(0, slot.dtype).real.dtype if slot.dtype.kind == "c" else slot.dtype
        count = slot.nbytes // real.itemsize
        compensated = real == np.float64
        averaged.append(
            _Fragment(
                place,
                slice(numbers, numbers + count),
                real,
                slice(lost, lost + count) if compensated else None,
            )
        )
        numbers += count
        lost += count if compensated else 0
    return _Plan(tuple(averaged), tuple(kept), numbers, lost)


class WideSum(NamedTuple):
    """A weighted sum over the numbers of a range.

    Attributes:
        total: The sum, float64.
        lost: What its additions rounded away, for float64 and complex128 (Neumaier, ZAMM 54,
            1974).
        kept: The bytes of integer and boolean parts, of the first model.
    """

    total: NDArray[np.float64]
    lost: NDArray[np.float64]
    kept: Bytes

    @classmethod
    def zero(cls, layout: Layout, kept: Bytes) -> "WideSum":
        """Return the sum of nothing over a range of this ``layout``."""
        plan = _plan_of(layout)
        return cls(np.zeros(plan.numbers), np.zeros(plan.lost), kept)

    @classmethod
    def of(cls, layout: Layout, pieces: Sequence[Bytes], weights: Iterable[float]) -> "WideSum":
        """Return the sum of ``pieces`` of the range."""
        kept = [pieces[0][place] for place in _plan_of(layout).kept]
        total = cls.zero(layout, np.concatenate([*kept, np.zeros(0, np.uint8)]))
        total.add(layout, pieces, weights)
        return total

    def add(self, layout: Layout, pieces: Sequence[Bytes], weights: Iterable[float]) -> None:
        """Add pieces of the range, one after the other but in one pass over the sum."""
        given = list(weights)
        for fragment in _plan_of(layout).averaged:
            sources = [piece[fragment.place].view(fragment.dtype) for piece in pieces]
            for total, lost, chunk in self._chunks(fragment):
                for source, weight in zip(sources, given, strict=True):
                    term = np.empty(total.size)
                    move_parts([term], [source[chunk]])
                    term *= weight
                    _add(total, lost, term)

    def merge(self, layout: Layout, other: "WideSum", scale: float) -> None:
        """Add ``scale`` times another sum over the range."""
        for fragment in _plan_of(layout).averaged:
            for (total, lost, _), (more, theirs, _) in zip(
                self._chunks(fragment), other._chunks(fragment), strict=True
            ):
                _add(total, lost, more * scale)
                if lost is not None and theirs is not None:
                    lost += theirs * scale

    def divide(self, layout: Layout, weight: float) -> Bytes:
        """Return the piece that the sum divided by ``weight`` is, rounded once."""
        plan = _plan_of(layout)
        buffer = layout.new_buffer()
        for fragment in plan.averaged:
            out = buffer[fragment.place].view(fragment.dtype)
            for total, lost, chunk in self._chunks(fragment):
                value = total if lost is None else total + np.where(np.isfinite(lost), lost, 0.0)
                value = value / weight
                value[np.isnan(value)] = np.nan  # one NaN, as the kernels write
                move_parts([out[chunk]], [value])
        at = 0
        for place in plan.kept:
            size = place.stop - place.start
            buffer[place] = self.kept[at : at + size]
            at += size
        return buffer

    def _chunks(self, fragment: _Fragment) -> Iterable[tuple[Any, Any, slice]]:
        total = self.total[fragment.numbers]
        lost = None if fragment.lost is None else self.lost[fragment.lost]
        for begin in range(0, total.size, _CHUNK):
            chunk = slice(begin, begin + _CHUNK)
            yield total[chunk], None if lost is None else lost[chunk], chunk


def _add(
    total: NDArray[np.float64], lost: NDArray[np.float64] | None, term: NDArray[np.float64]
) -> None:
    if lost is None:
        total += term
        return
    following = total + term
    added = following - total
    lost += (total - (following - added)) + (term - added)
    total[:] = following
