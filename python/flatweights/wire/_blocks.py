"""How models of one layout become 16-bit ones: block by block, in one pass over memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatweights import _core
from flatweights._cast import move_parts
from flatweights._layout import Layout, Slot
from flatweights._weights import FlatWeights
from flatweights.wire._checks import check_kind
from flatweights.wire._dtypes import WireDType, dtype_on_wire, is_rounded

# Numbers of a block: what is computed between two reads of memory stays in a cache, and the
# core shares the averages among its threads.
# Every number is computed by itself, so the bits do not depend on it.
BLOCK = 1 << 17


@dataclass(frozen=True)
class Block:
    """Numbers of one dtype that lie within reach of one another in a packed model.

    Attributes:
        dtype: Their dtype.
        begin: First byte in the model.
        end: Byte after the last number.
        ranges: Slot, and first and last number in it, for each slot that has some of them.
        starts: Where these begin, counted in numbers from `begin`.
    """

    dtype: np.dtype[Any]
    begin: int
    end: int
    ranges: tuple[tuple[int, int, int], ...]
    starts: tuple[int, ...]

    def read(self, memory: NDArray[np.uint8]) -> NDArray[Any]:
        """Return the numbers in a model's memory, padding included."""
        return memory[self.begin : self.end].view(self.dtype)

    def pieces(self, slots: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Return the numbers of each slot, of flat views of all slots of some model."""
        return [slots[i][first:last] for i, first, last in self.ranges]

    def cut(self, numbers: NDArray[Any]) -> list[NDArray[Any]]:
        """Return the numbers of each slot, of what `read` returns."""
        pairs = zip(self.starts, self.ranges, strict=True)
        return [numbers[start : start + last - first] for start, (_, first, last) in pairs]


@dataclass(frozen=True)
class Plan:
    """How models of one layout become 16-bit ones.

    Attributes:
        layout: Of the models.
        wire: Of what travels.
        blocks: All numbers that are rounded.
        kept: The slots that travel as they are.
    """

    layout: Layout
    wire: Layout
    blocks: tuple[Block, ...]
    kept: tuple[int, ...]

    def keep(self, target: FlatWeights, source: Any) -> None:
        """Copy what travels as it is."""
        names = [self.layout.names[i] for i in self.kept]
        move_parts([target[name] for name in names], [source[name] for name in names])


@functools.lru_cache(maxsize=64)
def plan_for(layout: Layout, dtype: np.dtype[Any]) -> Plan:
    """Return the plan for models of ``layout``, whose numbers are rounded to ``dtype``."""
    slots = layout.slots
    dtypes = [dtype if is_rounded(slot.dtype) else slot.dtype for slot in slots]
    return Plan(
        layout,
        Layout(layout.names, [slot.shape for slot in slots], dtypes, named=layout.named),
        tuple(_blocks(slots)),
        tuple(i for i, slot in enumerate(slots) if not is_rounded(slot.dtype)),
    )


def wire_layout(layout: Layout, wire_dtype: WireDType) -> Layout:
    """Return ``layout`` with its float32 and float64 slots changed to ``wire_dtype``.

    That is the layout of `Difference.values`: who sends these as bytes alone makes weights
    of them again with it.

    >>> from flatweights import Layout
    >>> layout = Layout.of({"w": np.zeros(3), "step": np.int64(0)})
    >>> [str(slot.dtype) for slot in wire_layout(layout, "bfloat16").slots]
    ['bfloat16', 'int64']

    Args:
        layout: Of a model.
        wire_dtype: ``"bfloat16"`` or ``"float16"``.

    Raises:
        TypeError: If ``layout`` is no `Layout`.
        ValueError: If ``wire_dtype`` is another one.
    """
    check_kind(layout, Layout, "layout")
    return plan_for(layout, dtype_on_wire(wire_dtype)).wire


class Scratch:
    """Room for one block, used by one after the other."""

    def __init__(self, plan: Plan) -> None:
        """Make room for the largest block of ``plan``."""
        most = max((block.end - block.begin for block in plan.blocks), default=0)
        self._memory = _core.empty(most)

    def of(self, block: Block) -> NDArray[Any]:
        """Return room for ``block``."""
        numbers: NDArray[Any] = self._memory[: block.end - block.begin].view(block.dtype)
        return numbers


def _blocks(slots: Sequence[Slot]) -> list[Block]:
    """Cut large slots into pieces, and join small ones that follow one another."""
    found: list[Block] = []
    group: list[tuple[int, int, int]] = []

    def place(at: tuple[int, int, int], number: int) -> int:
        return slots[at[0]].offset + number * slots[at[0]].dtype.itemsize

    def close() -> None:
        if group:
            dtype = slots[group[0][0]].dtype
            begin, end = place(group[0], group[0][1]), place(group[-1], group[-1][2])
            starts = [(place(at, at[1]) - begin) // dtype.itemsize for at in group]
            found.append(Block(dtype, begin, end, tuple(group), tuple(starts)))
            group.clear()

    for i, slot in enumerate(slots):
        if not is_rounded(slot.dtype):
            close()
            continue
        for first in range(0, slot.size, BLOCK):
            piece = (i, first, min(first + BLOCK, slot.size))
            most = BLOCK * slot.dtype.itemsize
            if group and (
                slots[group[0][0]].dtype != slot.dtype
                or place(piece, piece[2]) - place(group[0], group[0][1]) > most
            ):
                close()
            group.append(piece)
    close()
    return found
