"""The segments that this process writes and its peers read."""

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flatweights import _core
from flatweights._core import move_parts
from flatweights._layout import Layout

_LINE = 64

_log = logging.getLogger("flatweights")


class Extent(NamedTuple):
    """The position of a buffer: the segment, and the bytes in it.

    Attributes:
        segment: Index of the segment.
        generation: The number of memory files that have had this index.
        offset: The offset of the first byte.
        nbytes: Bytes of the buffer.
    """

    segment: int
    generation: int
    offset: int
    nbytes: int


def new_buffer(layout: Layout, offer: Callable[[int], object]) -> NDArray[np.uint8]:
    """Return a packed buffer, if possible in memory that ``offer`` offers to this thread."""
    offer(layout.nbytes)
    try:
        return layout.new_buffer()
    finally:
        _core.withdraw_offer()


class Segments:
    """Segments by index: made when they are needed, replaced when their size does not fit.

    A segment is free while no array of this process is over it and no peer holds a view.

    Attributes:
        changes: How often a segment took the place of another one.
    """

    def __init__(self, most: int, holds: Callable[[int], int]) -> None:
        """Start without segments.

        Args:
            most: The largest number of segments.
            holds: A function of an index: the number of views that peers hold of that segment.
        """
        self._most = most
        self._holds = holds
        self._segments: list[_core.Segment] = []
        self._generations: list[int] = []
        self._warned = False
        self.changes = 0

    def __getitem__(self, index: int) -> _core.Segment:
        """Return a segment."""
        return self._segments[index]

    def clear(self) -> None:
        """Make no more segments, and forget the present ones; arrays over them stay valid."""
        self._most = 0
        self.changes += 1
        self._segments.clear()
        self._generations.clear()

    def offer(self, nbytes: int, *, most_taken: int | None = None) -> None:
        """Offer a free segment to the next array of ``nbytes`` that this thread makes.

        Args:
            nbytes: The bytes of the array; for 0, nothing is offered.
            most_taken: If at least this many segments are taken, offer nothing.
        """
        taken = 0
        for segment in self._segments:
            taken += segment.is_taken
        if most_taken is not None and taken >= most_taken:
            return
        index = self._free(nbytes) if nbytes > 0 else None
        if index is not None:
            self._segments[index].offer(nbytes)

    def find(self, buffer: memoryview | NDArray[np.uint8]) -> Extent | None:
        """Return the extent of ``buffer``; None if it lies in no segment."""
        for index, segment in enumerate(self._segments):
            offset = segment.offset_of(buffer)
            if offset >= 0:
                return Extent(index, self._generations[index], offset, buffer.nbytes)
        return None

    def is_taken(self, extent: Extent) -> bool:
        """Whether an array of this process is over the segment of ``extent``."""
        return self._segments[extent.segment].is_taken

    def copy_in(
        self, buffers: Sequence[memoryview | Extent], *, besides: int | None = None
    ) -> list[Extent] | None:
        """Copy ``buffers`` into a free segment; None if there is none.

        Args:
            buffers: Memory of this process, or extents in other segments.
            besides: The index of a segment that is not free, although nothing shows it yet.
        """
        ends = np.cumsum([-(-buffer.nbytes // _LINE) * _LINE for buffer in buffers]).tolist()
        index = self._free(ends[-1], besides)
        if index is None:
            return None
        starts = [0, *ends[:-1]]
        extents = [
            Extent(index, self._generations[index], start, buffer.nbytes)
            for start, buffer in zip(starts, buffers, strict=True)
        ]
        sources = [
            self._bytes_at(b) if isinstance(b, Extent) else np.frombuffer(b, np.uint8)
            for b in buffers
        ]
        move_parts([*map(self._bytes_at, extents)], sources)
        return extents

    def copy_of(self, extent: Extent) -> NDArray[np.uint8]:
        """Return a copy of the bytes at ``extent``."""
        return np.array(self._bytes_at(extent))

    def _bytes_at(self, extent: Extent) -> NDArray[np.uint8]:
        memory = self._segments[extent.segment].memory()
        return memory[extent.offset : extent.offset + extent.nbytes]

    def _free(self, nbytes: int, besides: int | None = None) -> int | None:
        """Return the index of a free segment of ``nbytes`` or more; make one if necessary."""
        for index, segment in enumerate(self._segments):
            # A segment that is much too large was made for another model.
            fits = nbytes <= segment.nbytes <= 4 * nbytes + 4096 and index != besides
            if fits and not segment.is_taken and not self._holds(index):
                return index
        free = [
            i
            for i, w in enumerate(self._segments)
            if i != besides and not (w.is_taken or self._holds(i))
        ]
        is_full = len(self._segments) >= self._most
        if not free and is_full:
            return None
        # One segment may have another size: models of two sizes, such as weights and logs, take
        # turns.
        is_replaced = len(free) > 1 or (bool(free) and is_full)
        if is_replaced:  # release its memory before more is allocated
            index = free[0]
            self.changes += 1
            self._segments[index] = _core.Segment(0)
            self._generations[index] += 1
        try:
            made = _core.Segment(nbytes)
        except (MemoryError, OSError) as error:
            if not self._warned:
                self._warned = True
                _log.warning("no segment, so weights go through Ray: %s", error)
            return None
        if is_replaced:
            self._segments[index] = made
            return index
        self._segments.append(made)
        self._generations.append(1)
        return len(self._segments) - 1
