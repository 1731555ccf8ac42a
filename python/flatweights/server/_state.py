"""The state of a server optimizer, in one packed buffer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatweights._cast import move_parts
from flatweights._dtypes import is_averaged
from flatweights._layout import Layout, Slot
from flatweights._sources import Kind, Template
from flatweights._weights import FlatWeights

WEIGHTS = "weights"
MASTER = "master"

# Numbers of a block, so that the vectors of a step stay in the L2 cache from pass to pass. Each
# number is computed independently, so results do not depend on it.
BLOCK = 1 << 16


@dataclass(frozen=True)
class Run:
    """Neighbouring parts of the model with one dtype and no padding between: one vector.

    Complex numbers are two real ones each.

    Attributes:
        offset: Offset of the first byte in the model.
        weights: The numbers in the model.
        wide: The same numbers in float32 or float64: of 16-bit weights, the master copy
            that they are rounded from; otherwise ``weights`` itself.
        kept: By name, the vectors that the optimizer keeps beside them, in the dtype of ``wide``.
    """

    offset: int
    weights: NDArray[Any]
    wide: NDArray[Any]
    kept: Mapping[str, NDArray[Any]]

    def read(self, memory: NDArray[np.uint8]) -> NDArray[Any]:
        """Return the numbers at the same place in ``memory``, a model of the same layout."""
        end = self.offset + self.weights.nbytes
        return memory[self.offset : end].view(self.weights.dtype)

    @property
    def has_master(self) -> bool:
        """Whether ``wide`` is a master copy."""
        return self.wide is not self.weights

    def blocks(self) -> list[slice]:
        """Return consecutive ranges of `BLOCK` numbers that cover the vector."""
        size = self.weights.size
        return [slice(begin, min(begin + BLOCK, size)) for begin in range(0, size, BLOCK)]

    def scratch(self) -> NDArray[Any]:
        """Return memory for one block, in the dtype of ``wide``."""
        return np.empty(min(BLOCK, self.weights.size), self.wide.dtype)

    def publish(self, block: slice) -> None:
        """Round the master copy, if there is one, to the weights."""
        if self.has_master:
            move_parts([self.weights[block]], [self.wide[block]])

    def widen(self, numbers: NDArray[Any], block: slice, scratch: NDArray[Any]) -> NDArray[Any]:
        """Return ``numbers[block]`` in the dtype of ``wide``: converted into ``scratch``."""
        if not self.has_master:
            return numbers[block]
        converted = scratch[: block.stop - block.start]
        move_parts([converted], [numbers[block]])
        return converted

    def subtract(
        self,
        delta: NDArray[Any],
        average: NDArray[Any],
        block: slice,
        scratch: NDArray[Any],
    ) -> NDArray[Any]:
        """Write ``average - weights`` of one block to ``delta``; return the written part.

        Both are converted first where they have 16 bits.
        """
        result = delta[: block.stop - block.start]
        before = self.widen(self.weights, block, scratch)
        np.subtract(self.widen(average, block, delta), before, out=result)
        return result


def new_layout(template: Template, kept: Sequence[str], numbers: Sequence[str]) -> Layout:
    """Return the layout of an optimizer's state.

    First the model, so that the state begins with its packed form; then the ``kept`` arrays,
    part by part; then single numbers, the first an int64 and the others float64.

    Args:
        template: The model.
        kept: Names of arrays of the model's size; `MASTER` only where it has 16 bits.
        numbers: Names of the single numbers.
    """
    names = [_key(WEIGHTS, template, slot) for slot in template.layout.slots]
    shapes = [slot.shape for slot in template.layout.slots]
    dtypes = [slot.dtype for slot in template.layout.slots]
    for name in kept:
        for slot in template.layout.slots:
            if is_averaged(slot.dtype) and (name != MASTER or slot.dtype.itemsize == 2):
                names.append(_key(name, template, slot))
                shapes.append(slot.shape)
                dtypes.append(_wide(slot.dtype))
    names += numbers
    shapes += [()] * len(numbers)
    dtypes += [np.dtype(np.float64 if i else np.int64) for i in range(len(numbers))]
    return Layout(names, shapes, dtypes)


def template_of(state: FlatWeights) -> Template:
    """Return the model that ``state`` begins with.

    Raises:
        ValueError: If it begins with none.
        TypeError: If that has a part without a mean.
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
    """Return the bytes of the model that ``state`` begins with."""
    layout = template.layout
    size = layout.nbytes if template.packed else layout.slots[0].nbytes
    return state.buffer[:size]


def model_view(template: Template, memory: NDArray[np.uint8]) -> Any:
    """Return ``memory`` as a model."""
    if template.packed:
        return FlatWeights.wrap(memory, template.layout)
    slot = template.layout.slots[0]
    return memory.view(slot.dtype).reshape(slot.shape)


def runs_of(template: Template, state: FlatWeights, kept: Sequence[str]) -> list[Run]:
    """Return the floating and complex parts of the model as few long vectors."""
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
        # 16 bits become 32, others keep their width, so there is still no padding between parts.
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
