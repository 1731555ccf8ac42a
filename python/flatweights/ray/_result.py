"""The result of a worker: weights, or weights and extras. It does not import Ray."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flatweights._layout import Layout
from flatweights._weights import FlatWeights

_MOST_SHOWN = 2000  # characters of a text that a worker sent


class Packed(NamedTuple):
    """The contents of `FlatWeights`, without a view for each part.

    Attributes:
        buffer: The packed buffer.
        layout: The layout of the buffer.
    """

    buffer: NDArray[np.uint8]
    layout: Layout


def split(result: Any) -> tuple[Any, Any]:
    """Return the weights and the extras of ``result``; extras are None, if there are only weights.

    Args:
        result: Weights of any kind; or ``(weights, extras)``, a tuple of two.
    """
    is_pair = isinstance(result, tuple) and len(result) == 2
    return result if is_pair else (result, None)


def with_weights(result: Any, change: Callable[[Any], Any]) -> Any:
    """Return ``result`` with ``change(weights)`` for its weights; the extras stay as they are."""
    weights, extras = split(result)
    return change(weights) if weights is result else (change(weights), extras)


def copied(extras: Any) -> Any:
    """Return ``extras``, or weights, with copies of the arrays in it."""
    if isinstance(extras, (np.ndarray, FlatWeights)):
        return extras.copy()
    if type(extras) is dict:
        return {key: copied(value) for key, value in extras.items()}
    if type(extras) in (list, tuple):
        return type(extras)(map(copied, extras))
    return extras


def check_result(layout: Layout, method: str, model: Any, where: str) -> None:
    """Raise `TypeError` unless ``model`` can be weights of ``layout``, or gradients of them.

    There may be gradients of only some of the weights.

    Args:
        layout: The layout of the weights of the workers.
        method: The name of the method.
        model: The model that the method returned; or its layout, for `FlatWeights`.
        where: The name of the worker in the error.
    """
    if isinstance(model, FlatWeights):
        model = model.layout
    if isinstance(model, (Layout, Mapping)):
        names = model.names if isinstance(model, Layout) else model
        got = f"parts of the names {shortened(', '.join(map(repr, names)))}"
        is_theirs = any(name in layout for name in names)
        if isinstance(model, Layout):  # by position
            is_theirs = is_theirs or model.signature == layout.signature
    elif isinstance(model, (list, tuple)):
        shapes = [np.shape(part) for part in model if not isinstance(part, (Mapping, list, tuple))]
        got = f"{len(model)} parts of the shapes {shortened(str(shapes))}"
        is_theirs = not Counter(shapes) - Counter(slot.shape for slot in layout.slots)
    else:
        got = f"an array of the shape {np.shape(model)}"
        is_theirs = np.ndim(model) > 0 and math.prod(np.shape(model)) <= layout.size
    if not is_theirs:
        raise TypeError(
            f"{where}: expected weights of the workers ({len(layout)} parts, {layout.size} "
            f"elements) or gradients of them from {method!r}, got {got}: should it return "
            "self.get_weights()?"
        )


def shortened(text: str) -> str:
    """Return the beginning and the end of a text that is too long to be shown."""
    if len(text) <= _MOST_SHOWN:
        return text
    begin, end = text[: _MOST_SHOWN * 3 // 4], text[-_MOST_SHOWN // 4 :]
    return f"{begin} ... [{len(text):,} characters] ... {end}"


def parts_of(model: Any) -> list[Any]:
    """Return the arrays that ``model`` consists of: the same objects each time."""
    if isinstance(model, FlatWeights):
        return [model.buffer]
    if isinstance(model, (Mapping, list, tuple)):
        values = model.values() if isinstance(model, Mapping) else model
        return [part for value in values for part in parts_of(value)]
    return [model if isinstance(model, np.ndarray) else np.asarray(model)]


def is_arrays(weights: Any) -> bool:
    """Whether ``weights`` are arrays of this process, and nothing else."""
    if isinstance(weights, dict) and not isinstance(weights, FlatWeights):
        return all(isinstance(part, np.ndarray) for part in weights.values())
    return type(weights) in (FlatWeights, np.ndarray)
