"""The state of a server optimizer, in one packed buffer."""

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
MOMENTUM = "momentum"

# Numbers in a block: few enough that the vectors of a step stay in the L2 cache between passes.
# Each number is computed by itself, so the block size changes no result.
BLOCK = 1 << 16


@dataclass(frozen=True)
class Run:
    """One vector over neighbouring parts of the model that share a dtype and have no padding.

    A complex number counts as two real ones.

    Attributes:
        offset: Offset of its first byte in the model.
        weights: The numbers in the model.
        wide: The same numbers in float32 or float64. For 16-bit weights, it is the master copy
            that they are rounded from; otherwise it is ``weights`` itself.
        kept: By name, the optimizer's vectors for these weights, such as the momentum; in the
            dtype of ``wide``.
    """

    offset: int
    weights: NDArray[Any]
    wide: NDArray[Any]
    kept: Mapping[str, NDArray[Any]]

    def read(self, memory: NDArray[np.uint8]) -> NDArray[Any]:
        """Return the same numbers of another model: ``memory`` holds it, in the same layout."""
        end = self.offset + self.weights.nbytes
        return memory[self.offset : end].view(self.weights.dtype)

    @property
    def has_master(self) -> bool:
        """Whether ``wide`` is a master copy."""
        return self.wide is not self.weights

    def scratch(self) -> NDArray[Any]:
        """Return memory for one block, in the dtype of ``wide``."""
        return np.empty(min(BLOCK, self.weights.size), self.wide.dtype)

    def blocks(self, *models: NDArray[Any], whole: bool = True) -> Iterator[tuple[Any, ...]]:
        """Yield slices that together cover the vector, each with that slice of every model.

        With a master copy, the slices of ``models`` are converted to its dtype; when the caller
        asks for the next block, the weights of the last one are rounded from the master copy.
        Without one, the whole vector is one block, which kernels split over their threads.

        Args:
            *models: Vectors as long as this one, in the dtype of ``weights``.
            whole: If False, blocks have at most `BLOCK` numbers even without a master copy: NumPy's
                operations then find them in the cache.
        """
        if whole and not self.has_master:
            yield slice(None), *models
            return
        size = self.weights.size
        scratch = [self.scratch() for _ in models] if self.has_master else []
        for begin in range(0, size, BLOCK):
            block = slice(begin, min(begin + BLOCK, size))
            numbers = [model[block] for model in models]
            if self.has_master:
                converted = [memory[: block.stop - begin] for memory in scratch]
                move_parts(converted, numbers)
                numbers = converted
            yield block, *numbers
            if self.has_master:
                move_parts([self.weights[block]], [self.wide[block]])


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
