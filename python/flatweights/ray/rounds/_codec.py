"""The encoding of workers' weights, and the check of those that are averaged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from flatweights.ray._wire import widen


class Codec(NamedTuple):
    """The encoding of workers' weights, and the check of weights before they are averaged.

    Attributes:
        decode: A function that decodes a worker's weights, or the average of encoded weights.
        finish: A function that turns the mean of decoded weights into the average; it may change
            the mean.
        accept: A function that raises unless the first of these weights, or their layout, may be
            averaged; errors name them by its text.
    """

    decode: Callable[[Any], Any] = widen
    finish: Callable[[Any], Any] = lambda mean: mean
    accept: Callable[[Any, str], None] = lambda model, where: None

    @property
    def is_encoded(self) -> bool:
        """Whether workers encode their weights."""
        return self.decode is not widen


PLAIN = Codec()
"""A codec for plain weights; it widens a `flatweights.wire.Difference`."""
