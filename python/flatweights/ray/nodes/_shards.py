"""Shards of equal size of the packed form. It does not import Ray."""

import functools
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatweights._core import move_parts
from flatweights._layout import ALIGNMENT, Layout
from flatweights._sources import Kind, Template
from flatweights._trees import Tree
from flatweights._weights import FlatWeights

Bytes = NDArray[np.uint8]
Model = NDArray[Any] | FlatWeights


@dataclass(frozen=True)
class Shard:
    """A contiguous part of the packed form, about as large as the others.

    Attributes:
        begin: First byte.
        end: The byte after the last one; both are multiples of 64.
        layout: The layout of the shard, which is a packed form of its own: whole parts, and at
            either end perhaps a flat slice of a part. Dtypes are those of the model, so that each
            part is averaged in its own dtype.
    """

    begin: int
    end: int
    layout: Layout


@functools.lru_cache(maxsize=16)
def shards_of(layout: Layout, count: int) -> tuple[Shard, ...]:
    """Return ``count`` shards that together are the packed form of ``layout``.

    They differ by 64 bytes at most. Parts begin at multiples of 64 bytes, and an element has 1, 2,
    4, 8 or 16 bytes, so no element is cut in two. There are fewer shards if there are fewer lines
    of 64 bytes; none is empty.
    """
    lines = layout.nbytes // ALIGNMENT
    count = min(count, lines)
    edges = [ALIGNMENT * (lines * k // count) for k in range(count + 1)] if count else [0]
    offsets = [slot.offset for slot in layout.slots]
    return tuple(_shard(layout, offsets, begin, end) for begin, end in pairwise(edges))


def _shard(layout: Layout, offsets: Sequence[int], begin: int, end: int) -> Shard:
    # Several parts without elements lie at one offset.
    first = max(0, bisect_right(offsets, begin) - 1)
    names, shapes, dtypes = [], [], []
    for i in range(first, len(offsets)):
        slot = layout.slots[i]
        if slot.offset >= end:
            break
        inside = min(end, slot.offset + slot.nbytes) - max(begin, slot.offset)
        if inside > 0:
            names.append(str(i))
            shapes.append((inside // slot.dtype.itemsize,))
            dtypes.append(slot.dtype)
    return Shard(begin, end, Layout(names, shapes, dtypes))


def canonical(model: Any) -> tuple[Any, Tree | None]:
    """Return ``model`` with its dicts in an order that depends only on their keys; and its tree.

    So two models with the same keys can be averaged, whatever their order. The tree has the
    containers in their own order, and is None for an array and for `FlatWeights`.
    """
    if isinstance(model, FlatWeights) or not isinstance(model, (Mapping, list, tuple)):
        return model, None
    containers = Tree.of(model, "source")
    ordered = containers.sorted()
    return ordered.build(ordered.leaves(model, "source")), containers


def packed_bytes(template: Template, model: Any) -> Bytes:
    """Return all bytes of ``model``: views of an array and of `FlatWeights`, else a packed copy."""
    arrays = template.read(model, "source")
    if template.packed:
        return arrays[0]
    if template.kind is Kind.ARRAY:
        return arrays[0].reshape(-1).view(np.uint8)
    buffer = template.layout.new_buffer()
    move_parts(template.layout.packed_views(buffer), arrays)
    return buffer


def model_of(shard: Bytes, layout: Layout) -> Model:
    """Return the bytes of a shard of this ``layout`` as a model for `flatweights.average`."""
    if len(layout) == 1 and shard.size != layout.nbytes:  # the last of an array
        return shard.view(layout.slots[0].dtype)
    return FlatWeights.wrap(shard, layout)
