"""Tensors of a step in the form that `Member.average_variables` takes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatweights import Layout
from flatweights._core import (
    CalledTensors,
    DeviceSegment,
    MemberTurn,
    PeerDeviceSegment,
    RepeatedRequest,
)


class Exchange:
    """Gradients, or another tensor, in the form that `Member.average_variables` takes.

    Attributes:
        variables: The variables of the gradients.
        layout: Of the tensors: vectors, if they are gradients.
        weight: The weight of this member's tensors.
        grads: The tensors and their averages, on the host or on a GPU, while they are averaged.
    """

    weight = 1.0

    def __init__(
        self,
        names: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        dtypes: Sequence[Any],
        variables: Sequence[Any] = (),
    ) -> None:
        """Take the names, shapes and dtypes of the tensors, and the variables of gradients."""
        self.variables = variables
        self.layout = Layout(names, shapes, dtypes)
        self.grads: CalledTensors | None = None

    @contextlib.contextmanager
    def of(self, grads: CalledTensors) -> Iterator[None]:
        """Enclose a call that averages ``grads``."""
        self.grads = grads
        try:
            yield
        finally:
            self.grads = None

    def pass_on(self, grads: CalledTensors) -> None:
        """Make ``grads`` their own averages."""
        grads.pass_on(self.layout.core)

    def check(self) -> None:
        """Raise if the average of a call in which this member took part is no average."""

    def let_repeat(self, request: RepeatedRequest, turn: MemberTurn, seconds: float) -> None:
        """Let the op of the step make the next call like this one without Python.

        Args:
            request: The call.
            turn: That of the member.
            seconds: How long it waits for the response, before Python does.
        """
        assert self.grads is not None
        self.grads.let_repeat(self.layout.core, request, turn, self.weight, seconds)

    @property
    def gpu(self) -> bytes | None:
        return None if self.grads is None else self.grads.gpu

    def gather_into_segment(self, segment: DeviceSegment) -> None:
        assert self.grads is not None
        self.grads.gather_into_segment(self.layout.core, segment)

    def scatter_segment(self, segment: DeviceSegment | PeerDeviceSegment) -> None:
        assert self.grads is not None
        self.grads.scatter_segment(self.layout.core, segment)

    def gather_into(self, buffer: NDArray[np.uint8]) -> None:
        assert self.grads is not None
        self.grads.gather_into(self.layout.core, buffer)

    def scatter(self, buffer: NDArray[np.uint8]) -> None:
        assert self.grads is not None
        self.grads.scatter(self.layout.core, buffer)
