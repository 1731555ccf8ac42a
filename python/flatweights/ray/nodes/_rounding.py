"""16 bits between nodes, with error feedback from message to message. It does not import Ray."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from flatweights import _core
from flatweights._layout import Layout
from flatweights.ray.nodes._shards import Bytes, shards_of


class Coding(NamedTuple):
    """The models before they were encoded in 16 bits.

    Attributes:
        layout: Their layout.
        base: The version of the weights that they are differences from; None for gradients.
    """

    layout: Layout
    base: int | None


class Residuals:
    """The rounding errors of one node's messages, which its next messages make up for.

    A node rounds twice: the average of several ranks, and the average of its own shards over all
    nodes. If an exchange succeeds, its errors are kept, otherwise those from before it. Each error
    is kept at the position of its number in the model, so that nodes may own other shards in the
    next exchange. A restarted agent starts without errors.
    """

    def __init__(self) -> None:
        """Start with errors of zero."""
        self._now: dict[tuple[bool, bool], tuple[Layout, Bytes]] = {}
        self._next: list[tuple[Bytes, Bytes]] = []  # errors, and those that replace them
        self._number = 0

    def begin(self, number: int, settled: int, coding: Coding) -> None:
        """Begin the exchange ``number``; ``settled`` was the last of this node that succeeded."""
        if self._number == settled:
            for now, following in self._next:
                now[...] = following
        self._next.clear()
        self._number = number
        for of_node in (True, False):  # not when they are needed, since two threads round
            key = of_node, coding.base is None
            if key not in self._now or self._now[key][0] != coding.layout:
                # Not from the pool: memory for shards of other nodes is never touched.
                self._now[key] = coding.layout, np.zeros(coding.layout.nbytes, np.uint8)

    def round(
        self,
        shards: tuple[Layout, int],
        shard: int,
        coding: Coding,
        sources: list[Bytes],
        weights: list[float],
        out: Bytes,
        *,
        of_node: bool,
    ) -> None:
        """Write the average of ``sources``, plus the errors of earlier ones, to ``out`` in 16 bits.

        Args:
            shards: The layout in 16 bits, and the number of its shards.
            shard: The shard.
            coding: The models before they were encoded.
            sources: The bytes of the shard, in 16 bits.
            weights: One weight for each source.
            out: The bytes of the shard.
            of_node: Whether the sources are ranks of this node, rather than nodes.

        Raises:
            ValueError: If the average does not fit 16 bits.
        """
        narrow = shards_of(*shards)[shard].layout
        bounds, wide = _wide_shards(*shards, coding.layout)[shard]
        mean, following = wide.new_buffer(), wide.new_buffer()
        _core.average_widened_into(wide.core, mean, narrow.core, sources, weights)
        now = self._now[of_node, coding.base is None][1][bounds]
        args = wide.core, True, [mean], narrow.core, out, None, now, following
        if _core.encode_difference(*args) is not None:
            raise ValueError("wire_dtype: the average of differences does not fit it")
        self._next.append((now, following))


@functools.lru_cache(maxsize=16)
def _wide_shards(narrow: Layout, count: int, wide: Layout) -> tuple[tuple[slice, Layout], ...]:
    """Return the positions of the shards in the packed form of ``wide``, and their layouts there.

    A shard of 16 bits ends at a multiple of 64 bytes or with a slot; so does the wide shard.
    """
    made = []
    for shard in shards_of(narrow, count):
        places = [int(name) for name in shard.layout.names]
        dtypes = [wide.slots[i].dtype for i in places]
        layout = Layout(shard.layout.names, [slot.shape for slot in shard.layout.slots], dtypes)
        first, slot = narrow.slots[places[0]], wide.slots[places[0]]
        before = max(0, shard.begin - first.offset) // first.dtype.itemsize
        begin = slot.offset + before * slot.dtype.itemsize
        made.append((slice(begin, begin + layout.nbytes), layout))
    return tuple(made)
