"""The layouts of models in 16 bits, and checks that encoders and messages share."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from flatweights._inplace import isfinite
from flatweights._layout import Layout, layout_at
from flatweights._sources import Kind, Template
from flatweights._weights import FlatWeights

WireDType = Literal["bfloat16", "float16"]
"""The name of the dtype that float32 and float64 are rounded to."""

WIRE_DTYPES: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}


def dtype_on_wire(name: str) -> np.dtype[Any]:
    """Return the 16-bit dtype called ``name``.

    bfloat16 has 8 significant bits and the range of float32; float16 has 11 significant bits, and a
    range of only 6e-8 to 65504.

    >>> dtype_on_wire("float16")
    dtype('float16')

    Args:
        name: ``"bfloat16"`` or ``"float16"``: a ``WireDType``.

    Raises:
        ValueError: If ``name`` is anything else.
    """
    if isinstance(name, str) and name in WIRE_DTYPES:
        return WIRE_DTYPES[name]
    raise ValueError(f"wire_dtype: expected 'bfloat16' or 'float16', got {name!r}")


def is_rounded(dtype: np.dtype[Any]) -> bool:
    """Whether parts of ``dtype`` travel in 16 bits; others travel unchanged."""
    return dtype.isnative and dtype.char in "fd"


@dataclass(frozen=True)
class Layouts:
    """The layouts that encoding a model needs.

    Attributes:
        model: The model's own.
        wire: That of the messages: rounded slots have the 16-bit dtype.
        rounded: That of the rounded slots alone, in the model's dtypes.
    """

    model: Layout
    wire: Layout
    rounded: Layout


@functools.lru_cache(maxsize=64)
def layouts_for(layout: Layout, dtype: np.dtype[Any]) -> Layouts:
    """Return the layouts for models of ``layout`` whose numbers are rounded to ``dtype``."""
    slots = layout.slots
    shapes = [slot.shape for slot in slots]
    dtypes = [dtype if is_rounded(slot.dtype) else slot.dtype for slot in slots]
    rounded = [i for i, slot in enumerate(slots) if is_rounded(slot.dtype)]
    return Layouts(
        layout,
        Layout(layout.names, shapes, dtypes, named=layout.named),
        layout_at(layout, rounded),
    )


def wire_layout(layout: Layout, wire_dtype: WireDType) -> Layout:
    """Return ``layout`` with its float32 and float64 slots changed to ``wire_dtype``.

    It is the layout of `Difference.values`. A transport that sends bare bytes needs it to rebuild
    the message.

    >>> from flatweights import Layout
    >>> layout = Layout.of({"w": np.zeros(3), "step": np.int64(0)})
    >>> [str(slot.dtype) for slot in wire_layout(layout, "bfloat16").slots]
    ['bfloat16', 'int64']

    Args:
        layout: The layout of a model.
        wire_dtype: ``"bfloat16"`` or ``"float16"``.

    Raises:
        TypeError: If ``layout`` is not a `Layout`.
        ValueError: If ``wire_dtype`` is anything else.
    """
    check_kind(layout, Layout, "layout")
    return layouts_for(layout, dtype_on_wire(wire_dtype)).wire


def check_kind(value: Any, kind: type, where: str) -> None:
    """Raise `TypeError` unless ``value`` is an instance of ``kind``."""
    if not isinstance(value, kind):
        raise TypeError(f"{where}: expected {kind.__name__}, got {type(value).__name__}")


def check_layout(expected: Layout, got: Layout, where: str) -> None:
    """Raise `ValueError`, naming the first difference, unless the digests agree."""
    Template(Kind.FLAT_WEIGHTS, expected).check_layout(got, where)


def check_weights(weights: Any, layout: Layout, where: str) -> None:
    """Raise unless ``weights`` are `FlatWeights` of ``layout``."""
    check_kind(weights, FlatWeights, where)
    check_layout(layout, weights.layout, where)


def check_writable(weights: Any, layout: Layout, where: str) -> None:
    """Raise unless ``weights`` are `FlatWeights` of ``layout`` over a writable buffer."""
    check_weights(weights, layout, where)
    if not weights.buffer.flags.writeable:
        raise ValueError(f"{where}: expected a writable buffer, got a read-only one")


def nonfinite_error(i: int, values: FlatWeights, part: NDArray[Any], where: str) -> ValueError:
    """Return the error for NaN or infinity in slot ``i`` of ``values``, or of what they lead to.

    Args:
        i: The slot.
        values: The rounded values.
        part: The array that slot ``i`` was rounded from. If it is finite, a number of it was too
            large: for the dtype, or, if ``values`` are finite as well, for the reference plus the
            rounded difference.
        where: The name of the model in the error.
    """
    template = Template(Kind.FLAT_WEIGHTS, values.layout)
    slot = values.layout.slots[i]
    if not isfinite(np.ascontiguousarray(part)):
        return template.nonfinite_error(i, where)
    expected = (
        f"numbers that a difference in {slot.dtype} reaches without overflow, got larger ones"
        if isfinite(values[slot.name])
        else f"a difference that fits {slot.dtype}, got a larger one"
    )
    return ValueError(f"{where}{template.at_slot(i)}: expected {expected}")
