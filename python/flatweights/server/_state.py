"""The state of a server optimizer, in one packed buffer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatweights._core import move_parts
from flatweights._dtypes import is_averaged
from flatweights._layout import Layout, Slot
from flatweights._sources import Kind, Template
from flatweights._weights import FlatWeights

WEIGHTS = "weights"
MASTER = "master"

# Numbers in a block: few enough that the vectors of a step stay in the L2 cache between passes.
# Each number is computed independently of the others, so the block size changes no result.
BLOCK = 1 << 16


@dataclass
class Block:
    """Neighbouring numbers of the model, as vectors of float32 or float64.

    The numbers of 16-bit parts are here in float32, and a complex number is two real ones.

    Attributes:
        weights: The numbers of the model: a step changes them in place, or assigns others.
        average: The same numbers of the argument of `ServerOptimizer.step`. Read only.
        vectors: By name, the optimizer's own vectors for these numbers; a step changes them
            likewise.
    """

    weights: NDArray[Any]
    average: NDArray[Any]
    vectors: dict[str, NDArray[Any]]
    _published: NDArray[Any]
    _scratch: dict[str, NDArray[Any]]

    @property
    def published(self) -> NDArray[Any]:
        """The model that the workers had: 16-bit parts are rounded, unlike in ``weights``.

        For other parts, it is ``weights`` itself, so use it before you change ``weights``.
        """
        if self._published.dtype == self.weights.dtype:
            return self._published
        return _converted(self._published, self._memory("published"))

    @property
    def delta(self) -> NDArray[Any]:
        """The average minus ``published``; you may change this memory, which later blocks reuse."""
        out = self._memory("delta")
        np.subtract(self.average, self.published, out=out)
        return out

    def _memory(self, name: str) -> NDArray[Any]:
        """Return memory for a vector of this block; later blocks are at most as long."""
        if name not in self._scratch:
            self._scratch[name] = np.empty_like(self.weights)
        return self._scratch[name][: self.weights.size]


@dataclass(frozen=True)
class Run:
    """One vector over neighbouring parts of the model that share a dtype and have no padding.

    A complex number counts as two real ones.

    Attributes:
        offset: Offset of its first byte in the model.
        weights: The numbers in the model.
        wide: The same numbers in float32 or float64: for 16-bit weights, the master copy that they
            are rounded from. Without one, it is ``weights`` itself.
        kept: By name, the optimizer's vectors for these weights, such as the momentum; in the
            dtype of ``wide``.
    """

    offset: int
    weights: NDArray[Any]
    wide: NDArray[Any]
    kept: Mapping[str, NDArray[Any]]

    @property
    def has_master(self) -> bool:
        """Whether ``wide`` is a master copy."""
        return self.wide is not self.weights

    def blocks(self, memory: NDArray[np.uint8], *, whole: bool) -> Iterator[Block]:
        """Yield the blocks that together cover this vector.

        When the caller asks for the next block, the vectors that it assigned to the last one are
        copied, and 16-bit weights are rounded from the master copy.

        Args:
            memory: The bytes of another model in the same layout: the average.
            whole: Yield the whole vector as one block, which kernels split over their threads,
                unless there is a master copy. Otherwise blocks are small, so that NumPy's
                operations find them in the cache.
        """
        size = self.weights.size
        average = memory[self.offset : self.offset + self.weights.nbytes].view(self.weights.dtype)
        average.flags.writeable = False
        count = size if whole and not self.has_master else min(BLOCK, size)
        scratch: dict[str, NDArray[Any]] = {}
        converted = np.empty(count, self.wide.dtype) if self.has_master else None
        for begin in range(0, size, count):
            part = slice(begin, begin + count)
            numbers, weights = average[part], self.weights[part]
            if converted is not None:
                numbers = _converted(numbers, converted)
            wide = self.wide[part] if self.has_master else weights
            vectors = {name: vector[part] for name, vector in self.kept.items()}
            block = Block(wide, numbers, dict(vectors), weights, scratch)
            yield block
            if block.vectors.keys() != vectors.keys():
                got = [*block.vectors]
                raise ValueError(f"block.vectors: expected {[*vectors]}, got {got}")
            targets = (wide, *vectors.values())
            after = (block.weights, *[block.vectors[name] for name in vectors])
            changed = [pair for pair in zip(targets, after, strict=True) if pair[0] is not pair[1]]
            for old, new in [(old, _apart(new, old, targets)) for old, new in changed]:
                np.copyto(old, new)
            if self.has_master:
                move_parts([weights], [wide])


def _apart(new: NDArray[Any], own: NDArray[Any], targets: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return ``new``, or a copy if it is memory of another target, which is copied to as well."""
    others = (target for target in targets if target is not own)
    return new.copy() if any(np.may_share_memory(new, other) for other in others) else new


def _converted(numbers: NDArray[Any], memory: NDArray[Any]) -> NDArray[Any]:
    """Return ``numbers`` in the dtype of ``memory``, which is at least as long."""
    memory = memory[: numbers.size]
    move_parts([memory], [numbers])
    return memory


def new_layout(template: Template, kept: Sequence[str], numbers: Sequence[str]) -> Layout:
    """Return the layout of an optimizer's state.

    The model comes first, so the state begins with its packed form. The ``kept`` vectors follow,
    part by part, and then the single numbers: an int64, and float64 for the others.

    Args:
        template: The model.
        kept: Names of the vectors that are kept for the model's parts. `MASTER` is kept only for
            parts of 16 bits, none for integer parts.
        numbers: Names of the single numbers.
    """
    model = template.layout.slots
    slots = [(_key(WEIGHTS, template, slot), slot.shape, slot.dtype) for slot in model]
    for name in kept:
        for slot in model:
            if is_averaged(slot.dtype) and (name != MASTER or slot.dtype.itemsize == 2):
                slots.append((_key(name, template, slot), slot.shape, _wide(slot.dtype)))
    steps, *others = numbers
    slots.append((steps, (), np.dtype(np.int64)))
    slots += [(name, (), np.dtype(np.float64)) for name in others]
    return Layout(*zip(*slots, strict=True))


def template_of(state: FlatWeights) -> Template:
    """Return the template of the model at the beginning of ``state``.

    Raises:
        ValueError: If there is no model.
        TypeError: If the model has a dtype that `flatweights.average` refuses.
    """
    if WEIGHTS in state:
        return Template.of(state[WEIGHTS], WEIGHTS)
    prefix = f"{WEIGHTS}/"
    slots = [slot for slot in state.layout.slots if slot.name.startswith(prefix)]
    layout = Layout(
        [slot.name.removeprefix(prefix) for slot in slots],
        [slot.shape for slot in slots],
        [slot.dtype for slot in slots],
    )
    return Template.of(FlatWeights.wrap(state.buffer[: layout.nbytes], layout), WEIGHTS)


def model_memory(template: Template, state: FlatWeights) -> NDArray[np.uint8]:
    """Return the bytes of the model at the beginning of ``state``."""
    layout = template.layout
    size = layout.nbytes if template.packed else layout.slots[0].nbytes
    return state.buffer[:size]


def model_view(template: Template, memory: NDArray[np.uint8]) -> Any:
    """Return a view of ``memory`` as a model."""
    if template.packed:
        return FlatWeights.wrap(memory, template.layout)
    slot = template.layout.slots[0]
    return memory.view(slot.dtype).reshape(slot.shape)


def runs_of(template: Template, state: FlatWeights, kept: Sequence[str]) -> list[Run]:
    """Return the floating and complex parts of the model, joined into as few runs as possible."""
    groups: list[list[Slot]] = []
    for slot in template.layout.slots:
        if not is_averaged(slot.dtype) or not slot.size:
            continue
        last = groups[-1][-1] if groups else None
        if (
            last is not None
            and last.offset + last.nbytes == slot.offset
            and _real(last.dtype) == _real(slot.dtype)
        ):
            groups[-1].append(slot)
        else:
            groups.append([slot])
    return [_run(group, template, state, kept) for group in groups]


def _run(slots: list[Slot], template: Template, state: FlatWeights, kept: Sequence[str]) -> Run:
    def vector(name: str) -> NDArray[Any]:
        # Kept vectors have no padding either: 16-bit parts double their width, others keep it.
        first, last = (state.layout[_key(name, template, slot)] for slot in (slots[0], slots[-1]))
        memory = state.buffer[first.offset : last.offset + last.nbytes]
        return memory.view(_real(first.dtype))

    weights = vector(WEIGHTS)
    has_master = MASTER in kept and weights.dtype.itemsize == 2
    return Run(
        slots[0].offset,
        weights,
        vector(MASTER) if has_master else weights,
        {name: vector(name) for name in kept if name != MASTER},
    )


def _key(name: str, template: Template, slot: Slot) -> str:
    return f"{name}/{slot.name}" if template.kind is Kind.FLAT_WEIGHTS else name


def _wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(np.float32) if dtype.itemsize == 2 else dtype


def _real(dtype: np.dtype[Any]) -> np.dtype[Any]:
    if dtype.kind != "c":
        return dtype
    return np.dtype(np.float32 if dtype.itemsize == 8 else np.float64)
