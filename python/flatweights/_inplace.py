"""In-place operations on weights: scaled steps, moving averages, norms."""

from __future__ import annotations

import math
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from flatweights import _core
from flatweights._numbers import finite, real_number
from flatweights._sources import Kind, Template
from flatweights._trees import as_array, has_array_protocol
from flatweights._weights import FlatWeights

Model = TypeVar("Model", NDArray[Any], FlatWeights)
"""A contiguous array of any shape, or `FlatWeights`."""


def scale_(y: Model, a: float) -> None:
    """Multiply ``y`` by ``a`` in place.

    One pass over memory, without the GIL; no other bytes move. The products are computed in
    float64 and rounded once to the dtype of ``y``. The bits do not depend on threads,
    alignment or instruction set; all NaNs get the same bits. Within `FlatWeights`,
    integer and boolean parts stay as they are.

    It replaces ``np.multiply(y, a, out=y)``.

    >>> y = np.array([1.0, 2.0])
    >>> scale_(y, 0.5)
    >>> y
    array([0.5, 1. ])

    Args:
        y: Array of any shape, C-contiguous and writable, or `FlatWeights` over a writable
            buffer; float16, bfloat16, float32, float64 or complex.
        a: A finite real number.

    Raises:
        TypeError: If ``y`` is neither, or has no floating dtype; or ``a`` is not a real number.
        ValueError: If ``y`` is read-only or strided, or ``a`` is not finite.
    """
    template, parts = _read_y(y)
    _core.scale_(template.layout.core, template.packed, parts, finite(a, "a"))


def axpy_(y: Model, a: float, x: Model) -> None:
    """Add ``a * x`` to ``y`` in place.

    One pass over memory, without the GIL. Product and sum are computed in float64 without
    fused multiply-add, and rounded once to the dtype of ``y``; for float64, the result is
    NumPy's. The bits do not depend on threads, alignment or instruction set; all NaNs get
    the same bits. Within `FlatWeights`, integer and boolean parts of ``y`` stay as they
    are.

    It replaces ``y += a * x`` without the temporary; the name comes from BLAS (Lawson et al.,
    "Basic Linear Algebra Subprograms for Fortran Usage", ACM TOMS 5(3), 1979).

    >>> y = np.array([1.0, 2.0])
    >>> axpy_(y, -0.5, np.array([2.0, 2.0]))
    >>> y
    array([0., 1.])

    Args:
        y: Array of any shape, C-contiguous and writable, or `FlatWeights` over a writable
            buffer; float16, bfloat16, float32, float64 or complex.
        a: A finite real number.
        x: Of the kind, shape and dtype of ``y``, C-contiguous; `FlatWeights` of the same
            `Layout.digest`. It may be ``y``.

    Raises:
        TypeError: If ``y`` and ``x`` are neither, or differ in kind or dtype, or have no
            floating dtype; or ``a`` is not a real number.
        ValueError: If shapes or digests differ, ``y`` is read-only, one is strided,
            ``x`` overlaps ``y`` without being it, or ``a`` is not finite.
    """
    template, parts = _read_y(y)
    others = _read_x(x, template)
    _core.axpy_(template.layout.core, template.packed, parts, finite(a, "a"), others)


def lerp_(y: Model, x: Model, a: float) -> None:
    """Move ``y`` towards ``x``, by the fraction ``a`` of the way, in place.

    ``y += a * (x - y)``: the exponential moving average, the soft update of a target
    network. One pass over memory, without the GIL. It is computed in float64 without
    fused multiply-add, and rounded once to the dtype of ``y``. For ``a >= 0.5`` the formula
    is ``x - (1 - a) * (x - y)``, whose rounding errors are relative to the nearer end. 0 keeps
    ``y`` and 1 gives ``x``; for any other ``a``, the result is not finite where ``x - y`` is
    not, even if that is the overflow of two finite numbers. The bits do not depend on
    threads, alignment or instruction set; all NaNs get the same bits. Within `FlatWeights`,
    integer and boolean parts of ``y`` stay as they are.

    >>> y = np.array([0.0, 2.0])
    >>> lerp_(y, np.array([4.0, 2.0]), 0.25)
    >>> y
    array([1., 2.])

    Args:
        y: Array of any shape, C-contiguous and writable, or `FlatWeights` over a writable
            buffer; float16, bfloat16, float32, float64 or complex.
        x: Of the kind, shape and dtype of ``y``, C-contiguous; `FlatWeights` of the same
            `Layout.digest`. It may be ``y``.
        a: A finite real number; outside 0 to 1 it extrapolates.

    Raises:
        TypeError: As `axpy_`.
        ValueError: As `axpy_`.
    """
    template, parts = _read_y(y)
    others = _read_x(x, template)
    _core.lerp_(template.layout.core, template.packed, parts, others, finite(a, "a"))


def norm(x: Model) -> float:
    """Return the square root of the sum of the squares of all numbers in ``x``.

    Real and imaginary parts count alike; within `FlatWeights`, integer and boolean parts do
    not. One pass over memory, without the GIL. Squares are added in float64 for all dtypes,
    in blocks of 4096 over 32 columns and in a fixed order, so the bits do not depend on
    threads, alignment or instruction set. Squares of float64 are added to their column four
    at a time, with compensation (Neumaier, ZAMM 54, 1974), which leaves an error of about one
    unit in the last place. If the sum overflows, or is so close to 0 that squares may have
    underflowed, a second pass scales by a power of two (Blue, "A Portable Fortran Program to
    Find the Euclidean Norm of a Vector", ACM TOMS 4(1), 1978).

    >>> norm(np.array([3.0, 4.0], np.float32))
    5.0
    >>> norm(np.full(4, 1e300))
    2e+300

    Args:
        x: Array of any shape, C-contiguous, or `FlatWeights`; float16, bfloat16, float32,
            float64 or complex.

    Returns:
        The norm. It is NaN or infinite if ``x`` holds such a number, infinite where it
        exceeds float64, and 0.0 if ``x`` is empty.

    Raises:
        TypeError: If ``x`` is neither, or has no floating dtype.
        ValueError: If ``x`` is strided.
    """
    template, parts = _read(x, "x")
    return _core.norm(template.layout.core, template.packed, parts)


def clip_by_norm_(y: Model, max_norm: float) -> float:
    """Scale ``y`` in place so that its `norm` is at most ``max_norm``.

    One pass over memory for the `norm`; if it exceeds ``max_norm``, a second one for
    `scale_` by ``max_norm / norm``. Both run without the GIL. The new norm may exceed
    ``max_norm`` by a rounding error.

    >>> y = np.array([3.0, 4.0])
    >>> clip_by_norm_(y, 1.0)
    5.0
    >>> y
    array([0.6, 0.8])

    Args:
        y: Array of any shape, C-contiguous and writable, or `FlatWeights` over a writable
            buffer; float16, bfloat16, float32, float64 or complex.
        max_norm: Not negative; infinity changes nothing.

    Returns:
        The norm before scaling.

    Raises:
        TypeError: If ``y`` is neither, or has no floating dtype; or ``max_norm`` is not a
            real number.
        ValueError: If ``y`` is read-only or strided, ``max_norm`` is negative or NaN, or the
            norm is not finite; ``y`` is unchanged then.
    """
    template, parts = _read_y(y)
    most = real_number(max_norm, "max_norm")
    if not most >= 0:
        raise ValueError(f"max_norm: expected a number that is not negative, got {max_norm!r}")
    before = _core.clip_by_norm_(template.layout.core, template.packed, parts, most)
    if not math.isfinite(before):
        raise ValueError(f"y: expected a finite norm, got {before}")
    return before


def isfinite(x: Model) -> bool:
    """Return whether ``x`` holds neither NaN nor infinity.

    One pass over memory, without the GIL. Integer and boolean parts of `FlatWeights` count
    as finite. It replaces ``np.isfinite(x).all()`` without the temporary.

    >>> isfinite(np.array([1.0, 2.0])), isfinite(np.array([1.0, np.nan]))
    (True, False)

    Args:
        x: Array of any shape, C-contiguous, or `FlatWeights`; float16, bfloat16, float32,
            float64 or complex.

    Raises:
        TypeError: If ``x`` is neither, or has no floating dtype.
        ValueError: If ``x`` is strided.
    """
    template, parts = _read(x, "x")
    return _core.isfinite(template.layout.core, template.packed, parts)


def _memory(model: Any, where: str) -> tuple[Kind, NDArray[Any]]:
    if isinstance(model, FlatWeights):
        return Kind.FLAT_WEIGHTS, model.buffer
    if has_array_protocol(model):
        return Kind.ARRAY, as_array(model, where)
    raise TypeError(f"{where}: expected an array or FlatWeights, got {type(model).__name__}")


def _read(model: Any, where: str) -> tuple[Template, list[NDArray[Any]]]:
    """Return the template of ``model`` and its memory; the kernels reject strides."""
    _, memory = _memory(model, where)
    return Template.of(model, where), [memory]


def _read_y(y: Any) -> tuple[Template, list[NDArray[Any]]]:
    if not isinstance(y, (np.ndarray, FlatWeights)):  # a converted copy would be written and lost
        raise TypeError(f"y: expected a NumPy array or FlatWeights, got {type(y).__name__}")
    return _read(y, "y")


def _read_x(x: Any, template: Template) -> list[NDArray[Any]]:
    """Return the memory of ``x``; the kernels check the dtype and shape of an array."""
    kind, memory = _memory(x, "x")
    if kind is not template.kind:
        raise TypeError(f"x: expected {template.kind.value}, got {kind.value}")
    if kind is Kind.FLAT_WEIGHTS:
        template.check_layout(x.layout, "x")
    return [memory]
