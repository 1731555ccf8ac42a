"""What is refused, before anything has changed."""

from typing import Any

import numpy as np

from flatweights._inplace import isfinite
from flatweights._layout import Layout
from flatweights._sources import Kind, Template
from flatweights._weights import FlatWeights


def check_kind(value: Any, kind: type, where: str) -> None:
    """Raise `TypeError` unless ``value`` is a ``kind``."""
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


def check_finite(values: FlatWeights, model: Any, where: str) -> None:
    """Raise if ``values`` hold NaN or infinity; say whether ``model`` does, or it is too large."""
    template = Template(Kind.FLAT_WEIGHTS, values.layout)
    i = template.first_nonfinite([values.buffer])
    if i is None:
        return
    slot = values.layout.slots[i]
    if values is not model and isfinite(np.ascontiguousarray(model[slot.name])):
        raise ValueError(
            f"{where}{template.place(i)}: expected a difference that fits {slot.dtype}, "
            "got a larger one"
        )
    raise template.nonfinite_error(i, where)
