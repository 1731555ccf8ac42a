"""Casts of values to the dtypes of a model's parts.

Setting a model casts like ``np.copyto(casting="same_kind")``, so the float64 vector of an
optimizer sets a float32 model. Two casts are added: any real floating type converts to any
other (bfloat16 to float16), and integer parts take rounded values, because a vector that is
float64 because of a counter must be able to set that counter.
"""

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, NDArray

from flatweights import _core
from flatweights._dtypes import is_floating, is_integer, is_ml_dtype
from flatweights._layout import Layout, Slot, place_of
from flatweights._trees import as_array


def is_settable(source: np.dtype[Any], target: np.dtype[Any]) -> bool:
    """Whether values of dtype ``source`` may set a part of dtype ``target``."""
    if source == target:
        return True
    if is_integer(target):
        return is_integer(source) or is_floating(source)
    if is_floating(source) and is_floating(target):
        return True
    return np.can_cast(source, target, casting="same_kind")


def settable(value: ArrayLike, slot: Slot, where: str) -> NDArray[Any]:
    """Return ``value`` as an array that `move_parts` can write to ``slot``.

    It is a copy only if the slot is an integer one of another dtype.

    Args:
        value: What to write.
        slot: Shape and dtype to write to.
        where: How errors name the slot, such as ``"slot 3 'dense/bias'"``.

    Raises:
        ValueError: If the shape differs, or a value does not fit an integer dtype.
        TypeError: If the dtype cannot be cast.
    """
    array = as_array(value)
    if array.shape != slot.shape or not is_settable(array.dtype, slot.dtype):
        message = f"{where}: expected {slot.dtype} {slot.shape}, got {array.dtype} {array.shape}"
        raise (ValueError if array.shape != slot.shape else TypeError)(message)
    if is_integer(slot.dtype) and array.dtype != slot.dtype:
        return _to_integers(array, slot.dtype, where)
    return array


def settable_at(layout: Layout, i: int, value: ArrayLike) -> NDArray[Any]:
    """Return ``value`` as `settable` does, for slot ``i`` of ``layout``; errors name it."""
    slot = layout.slots[i]
    return settable(value, slot, place_of(i, slot))


def move_parts(targets: list[NDArray[Any]], sources: list[NDArray[Any]]) -> None:
    """Write each of ``sources``, as returned by `settable`, to its target, without the GIL."""
    for i in _core.copy_parts(targets, sources):
        copy_cast(targets[i], sources[i])


def copy_cast(target: NDArray[Any], source: NDArray[Any]) -> None:
    """Cast ``source`` into ``target``; values that are too large silently become infinity."""
    with np.errstate(all="ignore"):
        if not np.can_cast(source.dtype, target.dtype, casting="unsafe"):
            # Some pairs of 8-bit types have no conversion; float32 holds each exactly.
            source = source.astype(np.float32)
        np.copyto(target, source, casting="unsafe")


def _to_integers(array: NDArray[Any], dtype: np.dtype[Any], where: str) -> NDArray[Any]:
    low, high = _integer_range(dtype)
    if is_integer(array.dtype):
        values = array.astype(np.int64) if is_ml_dtype(array.dtype) else array
        fits = values.size == 0 or (low <= int(values.min()) and int(values.max()) <= high)
    else:
        # float64 holds the bounds; narrower types do not.
        wide = array.dtype if array.dtype.char == "g" else np.dtype(np.float64)
        values = np.rint(array.astype(wide))
        # high + 1 is a power of two and so exact; high itself may not be.
        fits = bool(np.all((values >= float(low)) & (values < float(high + 1))))
    if not fits:
        raise ValueError(f"{where}: expected values that fit {dtype}, got some that do not")
    return np.asarray(values.astype(dtype))  # rint turns a 0-d array into a scalar


def _integer_range(dtype: np.dtype[Any]) -> tuple[int, int]:
    if dtype.kind == "b":
        return 0, 1
    info = ml_dtypes.iinfo(dtype)
    return int(info.min), int(info.max)
