"""The result of a worker: weights, or weights and extras. It does not import Ray."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatweights._average import read_weight
from flatweights._layout import Layout
from flatweights._sources import Template
from flatweights._weights import FlatWeights


@dataclass(eq=False)
class Packed:
    """The contents of `FlatWeights`, without a view for each part.

    Attributes:
        buffer: The packed buffer.
        layout: The layout of the buffer.
    """

    buffer: NDArray[np.uint8]
    layout: Layout

    def weights(self) -> FlatWeights:
        """Return them with a view for each part."""
        return FlatWeights.wrap(self.buffer, self.layout)


def split(result: Any) -> tuple[Any, Any]:
    """Return the weights and the extras of ``result``; extras are None, if there are only weights.

    Args:
        result: Weights of any kind; or ``(weights, extras)``, a tuple of two.
    """
    is_pair = isinstance(result, tuple) and len(result) == 2
    return result if is_pair else (result, None)


def weight_of(function: Callable[[Any], Any], result: Any, where: str) -> float:
    """Return the weight of ``result`` by a user's ``function`` of it.

    Args:
        function: The function that was passed as ``weights``.
        result: What the method returned.
        where: How errors name the worker.

    Raises:
        TypeError: If ``result`` is not of the form that the function expects, or the function does
            not return a number.
        ValueError: If the weight is negative or not finite.
        Exception: As the function raises.
    """
    try:
        weight = function(result)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        is_pair = split(result)[1] is not None
        form = "a tuple (weights, extras)" if is_pair else type(result).__name__
        raise TypeError(
            f"weight of {where}: the function of weights= gets the method's result, {form}, and "
            f"raised {type(error).__name__}: {error}"
        ) from error
    return read_weight(weight, f"weight of {where}")


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


def parts_of(model: Any) -> list[NDArray[Any]]:
    """Return the arrays that ``model`` consists of: the same objects each time."""
    if isinstance(model, FlatWeights):
        return [model.buffer]
    if isinstance(model, (Mapping, list, tuple)):
        values = model.values() if isinstance(model, Mapping) else model
        return [part for value in values for part in parts_of(value)]
    return [model if isinstance(model, np.ndarray) else np.asarray(model)]


def may_change(model: Any) -> bool:
    """Whether the numbers of ``model`` may change: a read-only view shows what others write.

    The weights of an optimizer of `flatweights.server` are such a view, which each step changes.
    """
    for part in parts_of(model):
        memory: Any = part
        while isinstance(memory, np.ndarray):
            if memory.flags.writeable:
                return True
            memory = memory.base
    return False


def packed_nbytes(model: Any) -> int | None:
    """Return the bytes of ``model`` in one packed buffer; None if its kind cannot be averaged."""
    if isinstance(model, FlatWeights):
        return model.buffer.nbytes
    try:
        return Template.of(model).layout.nbytes
    except TypeError:
        return None


def is_arrays(weights: Any) -> bool:
    """Whether ``weights`` are arrays of this process, and nothing else."""
    if type(weights) in (FlatWeights, np.ndarray):
        return True
    is_dict = isinstance(weights, dict) and not isinstance(weights, FlatWeights)
    return is_dict and all(isinstance(part, np.ndarray) for part in weights.values())
