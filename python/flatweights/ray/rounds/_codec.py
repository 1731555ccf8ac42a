"""The encoding of workers' weights, and the check of those that are averaged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from flatweights.ray._wire import widen


class Codec(NamedTuple):
    """How the weights of workers travel, and which ones are averaged.

    Attributes:
        decode: Decodes the weights that a worker returned, or the average of encoded ones.
        finish: Turns the mean of decoded weights into the average; it may change the mean.
        accept: Raises unless the first of these weights, or their layout, are to be averaged;
            errors name them by the text.
    """

    decode: Callable[[Any], Any] = widen
    finish: Callable[[Any], Any] = lambda mean: mean
    accept: Callable[[Any, str], None] = lambda model, where: None

    @property
    def is_encoded(self) -> bool:
        """Whether a group has workers encode weights."""
        return self.decode is not widen


PLAIN = Codec()
"""Weights as they are; a `flatweights.wire.Difference` is widened."""
