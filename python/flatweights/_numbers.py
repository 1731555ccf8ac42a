"""Checks of numbers that users pass, and the text of bytes."""

import math
import operator
from typing import Any

from flatweights._dtypes import is_floating, is_integer
from flatweights._trees import as_array, has_array_protocol


def real_number(value: Any, where: str) -> float:
    """Return ``value`` as a float; an integer beyond all floats becomes infinite.

    Raises:
        TypeError: If it is not a real number: strings, complex numbers, arrays with dimensions.
    """
    if type(value) is float:
        return value
    number = value
    if not isinstance(value, (int, float)) and has_array_protocol(value):
        # Not by float(): that accepts NumPy's strings, drops imaginary parts, and takes arrays of
        # one element.
        array = as_array(value, where)
        if array.ndim > 0:
            raise TypeError(f"{where}: expected a real number, got an array of shape {array.shape}")
        if not (is_floating(array.dtype) or is_integer(array.dtype)):
            raise TypeError(f"{where}: expected a real number, got {array.dtype}")
        number = array[()]
    elif not (hasattr(value, "__float__") or hasattr(value, "__index__")):
        raise TypeError(f"{where}: expected a real number, got {type(value).__name__}")
    try:
        return float(number)
    except OverflowError:  # an integer
        return math.inf if number > 0 else -math.inf
    except Exception as error:  # another library's method may raise anything
        raise TypeError(
            f"{where}: expected a real number, got {type(value).__name__}: {error}"
        ) from error


def as_integer(value: Any, where: str) -> int:
    """Return ``value`` as an int.

    Raises:
        TypeError: If it is not an integer.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{where}: expected an integer, got {value!r}") from None


def finite(value: Any, where: str) -> float:
    """Return ``value`` as a float.

    Raises:
        TypeError: If it is not a real number.
        ValueError: If it is not finite.
    """
    number = real_number(value, where)
    if not math.isfinite(number):
        raise ValueError(f"{where}: expected a finite number, got {number:g}")
    return number


def check_count(value: int, name: str, most: int | None = None, *, least: int = 1) -> int:
    """Return ``value``, checked to be an integer in ``least`` to ``most``, the number of ranks.

    Raises:
        TypeError: If it is not an integer.
        ValueError: If it is out of range.
    """
    checked = as_integer(value, name)
    if checked < least or (most is not None and checked > most):
        bound = f"at least {least}" if most is None else f"{least} to {most}, the number of ranks"
        raise ValueError(f"{name}: expected {bound}, got {value!r}")
    return checked


def readable_bytes(nbytes: float) -> str:
    """Return ``nbytes`` with three digits and a decimal unit."""
    units = ["TB", "GB", "MB", "kB", "B"]
    while nbytes >= 999.5 and len(units) > 1:
        nbytes /= 1000
        units.pop()
    return f"{nbytes:{'.3g' if nbytes < 999.5 else ',.0f'}} {units[-1]}"
