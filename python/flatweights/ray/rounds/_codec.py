"""The encoding of workers' weights, and the check of those that are averaged."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from flatweights._layout import Layout
from flatweights._weights import FlatWeights
from flatweights.ray.results._wire import widen
from flatweights.ray.support._errors import shortened


class Codec(NamedTuple):
    """The encoding of workers' weights, and the check of weights before they are averaged.

    Attributes:
        decode: A function that decodes a worker's weights, or the average of encoded weights.
        finish: A function that turns the mean of decoded weights into the average; it may change
            the mean.
        relative: The inverse of ``finish``: a function that turns a model of a rule, named by its
            text in errors, into one that is comparable to decoded weights; it changes nothing.
        accept: A function that raises unless the first of these weights, or their layout, may be
            averaged; errors name them by its text.
    """

    decode: Callable[[Any], Any] = widen
    finish: Callable[[Any], Any] = lambda mean: mean
    relative: Callable[[Any, str], Any] = lambda model, where: model
    accept: Callable[[Any, str], None] = lambda model, where: None

    def accepts(self, layout: Layout) -> bool:
        """Whether weights of ``layout`` may be averaged."""
        try:
            self.accept(layout, "")
        except TypeError:
            return False
        return True

    @property
    def is_encoded(self) -> bool:
        """Whether workers encode their weights."""
        return self.decode is not widen


PLAIN = Codec()
"""A codec for plain weights; it widens a `flatweights.wire.Difference`."""


def plain_codec(layout: Layout | None, method: str) -> Codec:
    """Return the codec for plain weights that ``method`` returns, which it checks.

    Args:
        layout: The layout of the weights of the workers; None if unknown, and nothing is checked.
        method: The name of the method.
    """
    if layout is None:
        return PLAIN
    return Codec(accept=functools.partial(_check_result, layout, method))


def _check_result(layout: Layout, method: str, model: Any, where: str) -> None:
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
    if model is layout:
        return
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
        got = _text_of(model)
        is_theirs = np.ndim(model) > 0 and math.prod(np.shape(model)) <= layout.size
    if not is_theirs:
        raise TypeError(
            f"{where}: expected weights of the workers ({len(layout)} parts, {layout.size} "
            f"elements) or gradients of them from {method!r}, got {got}: should it return "
            "self.get_weights()?"
        )


def check_settable(layout: Layout, method: str, model: Any, where: str) -> None:
    """Raise `TypeError` if workers cannot set ``model``, an average: they take names or a vector.

    Args:
        layout: The layout of the weights of the workers.
        method: The name of the method that returned such models.
        model: The average.
        where: The name of a worker that returned one, in the error.
    """
    if isinstance(model, (dict, Mapping)):
        return
    if isinstance(model, (list, tuple)):
        got = f"a list of {len(model)}"
    elif np.shape(model) == (layout.size,):
        return
    else:
        got = _text_of(model)
    raise TypeError(
        f"{where}: expected weights by name from {method!r}, or one vector of {layout.size} "
        f"elements, since run sends the average to all workers; got {got}: should it return "
        "self.get_weights()?"
    )


def _text_of(result: Any) -> str:
    """Return how errors name ``result``, which is no container: its shape, or its type."""
    shape = np.shape(result)
    return f"an array of the shape {shape}" if shape else type(result).__name__
