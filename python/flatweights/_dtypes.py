"""Names of dtypes, kinds of dtypes, and the dtype of a vector that holds several."""

import json
from collections.abc import Iterable
from typing import Any

import ml_dtypes  # noqa: F401  registers its dtypes with NumPy, by name
import numpy as np


def read_dtype(dtype: Any, where: str) -> np.dtype[Any]:
    """Return ``dtype`` as `numpy.dtype`; errors name it ``where``.

    Raises:
        TypeError: If it describes none.
    """
    try:
        read: np.dtype[Any] = np.dtype(dtype)
        return read
    except Exception as error:  # NumPy raises many kinds, and asks the object for its own dtype
        got = repr(dtype) if isinstance(dtype, (str, bytes, int, float)) else type(dtype).__name__
        raise TypeError(f"{where}: expected a dtype, such as 'float32', got {got}") from error


def is_ml_dtype(dtype: np.dtype[Any]) -> bool:
    """Whether ``dtype`` is one that ml_dtypes adds to NumPy, such as bfloat16."""
    return dtype.type.__module__.partition(".")[0] == "ml_dtypes"


def is_floating(dtype: np.dtype[Any]) -> bool:
    """Whether ``dtype`` holds real floating-point numbers, including bfloat16 and float8."""
    if is_ml_dtype(dtype):
        return "float" in dtype.name
    return dtype.kind == "f"


def is_integer(dtype: np.dtype[Any]) -> bool:
    """Whether ``dtype`` holds integers or booleans, including those of ml_dtypes."""
    if is_ml_dtype(dtype):
        return "int" in dtype.name
    return dtype.kind in "biu"


def is_averaged(dtype: np.dtype[Any]) -> bool:
    """Whether the kernels compute with ``dtype``: native complex or float of 16 to 64 bits."""
    return dtype.isnative and (dtype.name == "bfloat16" or dtype.char in "efdFD")


def encode_dtype(dtype: np.dtype[Any]) -> str:
    """Return a string for ``dtype`` that is the same in every process and on every machine.

    Raises:
        TypeError: If ``dtype`` is a subarray, has fields with titles, or is one of ml_dtypes in the
            other byte order, for which there is no name.
    """
    if is_ml_dtype(dtype):
        if not dtype.isnative:
            raise TypeError(f"expected {dtype.name} in native byte order, got {dtype.str}")
        return str(dtype.name)
    if dtype.names is not None:
        return json.dumps(_structure(dtype), separators=(",", ":"))
    if dtype.subdtype is not None:
        raise TypeError(
            f"expected a dtype without a shape, got {dtype}; add it to the part's shape"
        )
    return str(dtype.str)


def decode_dtype(code: str) -> np.dtype[Any]:
    """Return the dtype that `encode_dtype` wrote as ``code``.

    Raises:
        ValueError: If ``code`` is not such a string.
    """
    try:
        is_structure = code.startswith("{")
        dtype = _from_structure(json.loads(code)) if is_structure else np.dtype(code)
        canonical = encode_dtype(dtype) == code
    except Exception as error:  # NumPy raises many kinds for malformed descriptions
        raise ValueError(f"expected the name of a dtype, got {code!r}") from error
    if not canonical:
        raise ValueError(f"expected the name of a dtype, got {code!r}")
    return dtype


def _structure(dtype: np.dtype[Any]) -> dict[str, Any]:
    # NumPy's own description, dtype.descr, does not support ml_dtypes.
    formats, offsets = [], []
    names = dtype.names or ()
    for name in names:
        # fields is not None, since dtype has names.
        field, offset, *title = dtype.fields[name]  # type: ignore[index]
        if title:
            raise TypeError(f"expected fields without titles, got {dtype}")
        formats.append([encode_dtype(field.base), list(field.shape)])
        offsets.append(int(offset))
    return {
        "names": list(names),
        "formats": formats,
        "offsets": offsets,
        "itemsize": dtype.itemsize,
    }


def _from_structure(record: dict[str, Any]) -> np.dtype[Any]:
    formats = [(decode_dtype(code), tuple(shape)) for code, shape in record["formats"]]
    description: Any = {**record, "formats": formats}
    dtype: np.dtype[Any] = np.dtype(description)
    return dtype


def promote(dtypes: Iterable[np.dtype[Any]]) -> np.dtype[Any] | None:
    """Return the dtype of a vector that holds all of ``dtypes``, or None if there is none.

    Promotes like `numpy.concatenate`. Where NumPy rejects a floating type of ml_dtypes
    (bfloat16 with float16, or with an integer of 16 bits or more), it counts as float32.
    Without any dtypes the result is float64, as for `numpy.zeros`.
    """
    distinct = sorted(set(dtypes), key=encode_dtype)
    if not distinct:
        return np.dtype(np.float64)
    try:
        return np.result_type(*distinct)
    except TypeError:
        pass
    stand_ins = [np.dtype(np.float32) if is_ml_dtype(d) and is_floating(d) else d for d in distinct]
    try:
        return np.result_type(*stand_ins)
    except TypeError:
        return None
