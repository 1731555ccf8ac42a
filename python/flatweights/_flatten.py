"""Copies parts into one vector, and back."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatweights import _core
from flatweights._dtypes import promote
from flatweights._layout import Layout, Parts, arrays_of, check_layout_kind
from flatweights._trees import listed


def flatten(parts: Parts, *, out: NDArray[Any] | None = None) -> NDArray[Any]:
    """Return ``parts`` back to back in one vector.

    Each byte is read once and written once. Contiguous parts are copied without the GIL if
    they have the vector's dtype, or if both dtypes are real floating types. NumPy copies
    and converts the others.

    >>> flatten([np.array([[1.0, 2.0]]), np.array([3.0])])
    array([1., 2., 3.])

    Args:
        parts: A mapping from name to array, or a sequence of arrays.
        out: Vector to write to: contiguous, of the parts' common dtype (promoted as by
            `numpy.concatenate`) and total size. A new one, if None.

    Returns:
        ``out``, or the new vector.

    Raises:
        TypeError: If the parts have no common dtype, or ``out`` has another one.
        ValueError: If ``out`` has another length, is strided or read-only, or overlaps
            a part.
    """
    arrays, size, dtype = _read(parts)
    if out is None:
        out = new_vector(size, dtype)
    elif not isinstance(out, np.ndarray) or out.dtype != dtype:
        got = out.dtype if isinstance(out, np.ndarray) else type(out).__name__
        raise TypeError(f"out: expected a vector of {dtype}, got {got}")
    _core.flatten_into(out, arrays)
    return out


def _read(parts: Parts) -> tuple[list[NDArray[Any]], int, np.dtype[Any]]:
    """Return the arrays, their total number of elements, and the dtype of their vector."""
    if isinstance(parts, (dict, list, tuple)):
        # Usually all dtypes agree. Looking at each array in Python takes longer than copying it.
        values: list[Any] = list(parts.values() if isinstance(parts, dict) else parts)
        total = _core.uniform_size(values)
        if total >= 0:
            return values, total, values[0].dtype
    arrays = arrays_of(parts)
    dtypes = {array.dtype for array in arrays}
    return arrays, sum(array.size for array in arrays), _common_dtype(dtypes)


def _common_dtype(dtypes: set[np.dtype[Any]]) -> np.dtype[Any]:
    dtype = promote(dtypes)
    if dtype is None:
        raise TypeError(f"no vector holds these dtypes: {', '.join(sorted(map(str, dtypes)))}")
    if dtype.hasobject or dtype.itemsize == 0:
        raise TypeError(f"expected dtypes of fixed size without Python objects, got {dtype}")
    return dtype


def unflatten(flat: NDArray[Any], layout: Layout) -> dict[str, NDArray[Any]] | list[NDArray[Any]]:
    """Return one view into ``flat`` per slot of ``layout``.

    No bytes move: writing to a view writes to ``flat``, and each view keeps ``flat``
    alive. A read-only ``flat`` gives read-only views. All views have the dtype of
    ``flat``, not of the slots.

    >>> layout = Layout.of([np.zeros((2, 2)), np.zeros(3)])
    >>> unflatten(np.arange(7.0), layout)[1]
    array([4., 5., 6.])

    Args:
        flat: One-dimensional contiguous array of ``layout.size`` elements.
        layout: Layout of the parts.

    Returns:
        A dict from name to view if a mapping named the layout, else a list.

    Raises:
        TypeError: If ``flat`` is not a NumPy array, or ``layout`` no `Layout`.
        ValueError: If ``flat`` has another length or is not contiguous.
    """
    check_layout_kind(layout)
    views = layout.vector_views(flat)
    return dict(zip(layout.names, views, strict=True)) if layout.named else views


def unflatten_into(parts: Parts, flat: NDArray[Any]) -> None:
    """Write the vector ``flat`` into ``parts``: the inverse of `flatten`.

    Each byte is read once and written once, without the GIL.

    >>> a, b = np.zeros((1, 2)), np.zeros(1)
    >>> unflatten_into([a, b], np.array([1.0, 2.0, 3.0]))
    >>> a, b
    (array([[1., 2.]]), array([3.]))

    Args:
        parts: A mapping from name to array, or a sequence of arrays: each writable,
            C-contiguous and of the dtype of ``flat``.
        flat: Contiguous vector of the parts' total size.

    Raises:
        TypeError: If a part is not a NumPy array, or has another dtype; or if there are Python
            objects in ``flat``.
        ValueError: If the lengths differ, a part is strided or read-only, or overlaps
            ``flat`` or another part.
    """
    values = parts.values() if hasattr(parts, "values") else parts
    arrays = listed(values, "parts: expected a mapping or a sequence of arrays")
    _core.unflatten_into(arrays, flat)


def new_vector(size: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return a 64-byte aligned vector with undefined contents.

    Raises:
        MemoryError: If it cannot be allocated.
    """
    if size * dtype.itemsize > sys.maxsize:
        raise MemoryError(f"cannot allocate {size * dtype.itemsize} bytes")
    return _core.empty(size * dtype.itemsize).view(dtype)
