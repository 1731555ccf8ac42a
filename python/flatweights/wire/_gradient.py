"""Gradients, which nobody keeps a reference of."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatweights._layout import Layout
from flatweights._weights import FlatWeights
from flatweights.wire._blocks import plan_for
from flatweights.wire._checks import check_layout
from flatweights.wire._difference import Difference
from flatweights.wire._dtypes import WireDType, dtype_on_wire
from flatweights.wire._residual import Residual
from flatweights.wire._views import read_only

_VECTOR = "vector"


class GradientEncoder:
    """Gradients in 16 bits: what rounding takes from one is added to the next.

    Error feedback as in Seide, Fu, Droppo, Li and Yu, Interspeech 2014; see `flatweights.wire`.
    Kept is what was lost, in two buffers by turns; 8 bytes for each number of float32.
    Each worker has one encoder; decode with `average_differences`, or `Difference.widen`.

    >>> encoder = GradientEncoder("bfloat16")
    >>> gradient = np.float32([1.001])  # 1 in bfloat16
    >>> sent = [encoder.encode(gradient).widen()["vector"] for _ in range(1000)]
    >>> round(float(sum(sent)[0]), 2)
    1001.0
    """

    def __init__(self, wire_dtype: WireDType) -> None:
        """Begin with nothing lost; the first gradient sets the layout.

        Args:
            wire_dtype: ``"bfloat16"`` or ``"float16"``.

        Raises:
            ValueError: If it is another one.
        """
        self._wire_dtype = dtype_on_wire(wire_dtype)
        self._residual: Residual | None = None

    @property
    def residual(self) -> FlatWeights:
        """What rounding has taken so far, read-only: a view, which `encode` changes.

        Raises:
            ValueError: Before the first gradient.
        """
        if self._residual is None:
            raise ValueError("expected a gradient first, got none")
        return read_only(self._residual.now)

    def encode(self, gradient: FlatWeights | NDArray[Any]) -> Difference:
        """Return ``gradient``, and what was lost before, in 16 bits.

        One pass by blocks: for each number of float32, 8 bytes are read and 6 written; then
        the 2 that go out are read once more, for NaN and infinity.

        >>> GradientEncoder("float16").encode(np.float32([0.5, 1.0])).values
        {'vector': array([0.5, 1. ], dtype=float16)}

        Args:
            gradient: `FlatWeights`, or a vector (one axis) without strides, which becomes one
                part called ``"vector"``. It is read, not kept.

        Raises:
            ValueError: If it has another layout than the first one, holds NaN or infinity,
                or is too large for the dtype. All is then as it was.
            TypeError: If it is neither.
        """
        model: Any
        if isinstance(gradient, FlatWeights):
            model, memory, layout = gradient, gradient.buffer, gradient.layout
        elif isinstance(gradient, np.ndarray) and gradient.ndim == 1:
            # One part of a model: bare arrays of bfloat16 are pickled number by number.
            if not gradient.flags.c_contiguous:
                raise ValueError("gradient: expected a vector without strides")
            layout = _vector_layout(gradient.size, gradient.dtype)
            model, memory = {_VECTOR: gradient}, gradient.view(np.uint8)
        else:
            raise TypeError(
                f"gradient: expected FlatWeights or a vector, got {type(gradient).__name__}"
            )
        residual = self._residual
        if residual is None:
            residual = Residual(plan_for(layout, self._wire_dtype))
        check_layout(residual.plan.layout, layout, "gradient")
        values = residual.encode(model, memory, None, "gradient")
        self._residual = residual
        return Difference(values, residual.plan.layout)


@functools.lru_cache(maxsize=64)
def _vector_layout(size: int, dtype: np.dtype[Any]) -> Layout:
    return Layout([_VECTOR], [(size,)], [dtype])
