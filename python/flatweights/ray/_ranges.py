"""A packed buffer, cut into ranges of equal bytes; imports nothing of Ray."""

import functools
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatweights._cast import move_parts
from flatweights._flatten import new_vector
from flatweights._layout import ALIGNMENT, Layout
from flatweights._sources import Kind, Template
from flatweights._trees import Tree
from flatweights._weights import FlatWeights

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Range:
    """A range of the packed form.

    Attributes:
        begin: First byte.
        end: The byte after the last one; both are multiples of 64.
        layout: What lies in the range, in its own packed form: whole parts, and at either
            end a piece of one, flat. Dtypes are those of the model, so that each piece is
            averaged in its own.
    """

    begin: int
    end: int
    layout: Layout


@functools.lru_cache(maxsize=16)
def ranges_of(layout: Layout, count: int) -> tuple[Range, ...]:
    """Return ``count`` ranges that together are the packed form of ``layout``.

    They differ by 64 bytes at most. Parts begin at multiples of 64 bytes and elements have
    1 to 16, so that no element is cut in two. There are fewer if there are fewer
    lines of 64 bytes; none is empty.
    """
    lines = layout.nbytes // ALIGNMENT
    count = min(count, lines)
    edges = [ALIGNMENT * (lines * k // count) for k in range(count + 1)] if count else [0]
    offsets = [slot.offset for slot in layout.slots]
    return tuple(_range(layout, offsets, begin, end) for begin, end in pairwise(edges))


def _range(layout: Layout, offsets: Sequence[int], begin: int, end: int) -> Range:
    # Of parts without elements several lie at one offset.
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
    return Range(begin, end, Layout(names, shapes, dtypes))


def canonical(model: Any) -> tuple[Any, Tree | None]:
    """Return ``model``, its dicts in an order that depends on their keys alone; and its containers.

    Two models with the same keys are averaged whatever the order of either. The containers, in
    their own order, are None for an array and for `FlatWeights`.
    """
    if isinstance(model, FlatWeights) or not isinstance(model, (Mapping, list, tuple)):
        return model, None
    containers = Tree.of(model, "source")
    ordered = containers.sorted()
    return ordered.build(ordered.leaves(model, "source")), containers


def cut(template: Template, model: Any, count: int) -> list[Bytes]:
    """Return the pieces of ``model`` for each of the ranges.

    Those of an array and of `FlatWeights` are views; of dicts and lists, views of a packed copy.
    The last piece of an array ends where its elements do.
    """
    packed = _packed(template, model)
    return [packed[r.begin : r.end] for r in ranges_of(template.layout, count)]


def _packed(template: Template, model: Any) -> Bytes:
    arrays = template.read(model, "source")
    if template.packed:
        return arrays[0]
    if template.kind is Kind.ARRAY:
        return arrays[0].reshape(-1).view(np.uint8)
    buffer = template.layout.new_buffer()
    move_parts(template.layout.packed_views(buffer), arrays)
    return buffer


def model_of(piece: Bytes, layout: Layout) -> Any:
    """Return what `flatweights.average` takes for a piece of a range of this ``layout``."""
    if len(layout) == 1 and piece.size != layout.nbytes:  # the last of an array
        return piece.view(layout.slots[0].dtype)
    return FlatWeights.wrap(piece, layout)


def bytes_of(model: Any) -> Bytes:
    """Return the piece that `model_of` made ``model`` of."""
    buffer: Bytes = model.buffer if isinstance(model, FlatWeights) else model.view(np.uint8)
    return buffer


def assemble(template: Template, pieces: Sequence[Bytes]) -> Any:
    """Return the model that ``pieces``, one for each range, are of; each byte is moved once."""
    if template.kind in (Kind.FLAT_WEIGHTS, Kind.ARRAY):
        result = template.new()
        buffer = result.buffer if template.packed else result.reshape(-1).view(np.uint8)
        _join(buffer, pieces)
        return result
    buffer = template.layout.new_buffer()
    _join(buffer, pieces)
    views = template.layout.packed_views(buffer)
    return as_kind(template, views)


def as_kind(template: Template, parts: Sequence[NDArray[Any]]) -> Any:
    """Return ``parts`` as an array, a list, a tree, or a dict (also for `FlatWeights`)."""
    if template.kind is Kind.ARRAY:
        return parts[0]
    if template.tree is not None:
        return template.tree.build(parts)
    if template.kind is Kind.SEQUENCE:
        return list(parts)
    names = template.layout.names if template.packed else template.keys
    return dict(zip(names, parts, strict=True))


def _join(target: Bytes, pieces: Sequence[Bytes]) -> None:
    edges = np.cumsum([0, *(piece.size for piece in pieces)])
    rows = [target[a:b] for a, b in pairwise(edges)]
    # The last piece of an array may have come with padding.
    move_parts(rows, [piece[: row.size] for row, piece in zip(rows, pieces, strict=True)])


def in_place(template: Template, pieces: Sequence[Bytes]) -> list[NDArray[Any]]:
    """Return the parts, in the order of the slots, as views of ``pieces`` where they can be.

    Parts that were cut are put together, the others not copied: an array is one part.
    """
    ranges = ranges_of(template.layout, max(1, len(pieces)))
    begins = [r.begin for r in ranges]
    found: list[NDArray[Any]] = []
    for slot in template.layout.slots:
        end = slot.offset + slot.nbytes
        rows = []
        k = max(0, bisect_right(begins, slot.offset) - 1)
        while slot.nbytes and k < len(ranges) and ranges[k].begin < end:
            begin = ranges[k].begin
            rows.append(pieces[k][max(0, slot.offset - begin) : min(end, ranges[k].end) - begin])
            k += 1
        if len(rows) == 1:
            found.append(rows[0].view(slot.dtype).reshape(slot.shape))
            continue
        whole = new_vector(slot.nbytes, np.dtype(np.uint8))
        _join(whole, rows)
        found.append(whole.view(slot.dtype).reshape(slot.shape))
    return found
