"""Models of arrays, read and written like `Variables`: through one packed buffer."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatweights import _core
from flatweights._layout import Layout
from flatweights._sources import Template, first_difference
from flatweights._weights import FlatWeights
from flatweights.ray.results._variables import Variables


class Arrays:
    """The arrays of a model that `flatweights.average` takes.

    Attributes:
        layout: Their layout.
    """

    def __init__(self, model: Any, where: str) -> None:
        """Take a model; errors name it ``where``.

        Raises:
            TypeError: If it is of no kind that `flatweights.average` takes.
        """
        self._template = Template.of(model, where)
        self._model = model
        self._where = where
        self.layout = self._template.layout

    def gather_into(self, buffer: NDArray[np.uint8]) -> None:
        """Copy the arrays into a packed ``buffer``."""
        parts = self._template.read(self._model, self._where)
        self._check(parts)
        _core.move_parts(self._template.parts_in(buffer), parts)

    def scatter(self, buffer: NDArray[np.uint8]) -> None:
        """Copy a packed ``buffer`` into the arrays."""
        targets = self._template.read_out(self._model, self._where)
        self._check(targets)
        _core.move_parts(targets, self._template.parts_in(buffer))

    def _check(self, arrays: list[NDArray[Any]]) -> None:
        """Raise, naming the slot, if an array has not the shape and dtype that it had at first."""
        if not (self._template.packed or self.layout.core.fits(arrays)):
            self._template.match_arrays(arrays, self._where)

    def check_writable(self) -> None:
        """Raise unless `scatter` can write to all arrays.

        Raises:
            TypeError: If one is no NumPy array.
            ValueError: If one is read-only or not contiguous, or overlaps another one.
        """
        targets = self._template.targets(self._model, self._where)
        self._template.check_apart(targets, self._where)


def source_of(model: Any, where: str) -> Variables:
    """Return ``model`` as `Variables`, to gather weights from.

    Raises:
        TypeError: If it is of no kind that `flatweights.average` takes.
    """
    if isinstance(model, Variables):
        return model
    if hasattr(model, "trainable_variables") or hasattr(model, "parameters"):
        kind = type(model).__name__  # its get_weights() would be copies, which nobody changes
        raise TypeError(
            f"{where}: expected variables, got {kind}; pass TensorFlowVariables(model) of "
            "flatweights.tensorflow, or for other frameworks an object with the methods of "
            "flatweights.ray.Variables"
        )
    return Arrays(model, where)


def target_of(model: Any, where: str) -> Variables:
    """Return ``model`` as `Variables`, to write weights to."""
    source = source_of(model, where)
    if isinstance(source, Arrays):
        source.check_writable()
    return source


def check_layout(got: Layout, published: Layout, where: str) -> None:
    """Raise unless weights of both layouts can be copied to each other.

    Slots of a sequence or a bare array have no names of their own: they match by position.

    Raises:
        ValueError: If they cannot; the error names the first difference.
    """
    if got.named and published.named:
        difference = first_difference(published, got)
    elif got.signature == published.signature:
        difference = None
    else:
        difference = first_difference(published, got) or "expected other names"
    if difference is not None:
        raise ValueError(f"{where}, against the published weights: {difference}")


def copy_of(buffer: NDArray[np.uint8], layout: Layout) -> FlatWeights:
    """Return a copy of a packed ``buffer`` as weights."""
    weights = FlatWeights.empty(layout)
    _core.move_parts([weights.buffer], [buffer])
    return weights
