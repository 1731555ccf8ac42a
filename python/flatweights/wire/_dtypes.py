"""What numbers are rounded to on their way."""

from __future__ import annotations

from typing import Any, Literal

import ml_dtypes
import numpy as np

WireDType = Literal["bfloat16", "float16"]
"""Name of what float32 and float64 are rounded to: ``"bfloat16"`` or ``"float16"``."""

WIRE_DTYPES: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}


def dtype_on_wire(name: str) -> np.dtype[Any]:
    """Return the dtype called ``name``, if numbers can be rounded to it.

    bfloat16 has 8 significant bits and reaches as far as float32; float16 has 11, but reaches
    from 6e-8 to 65504 only.

    >>> dtype_on_wire("float16")
    dtype('float16')

    Args:
        name: ``"bfloat16"`` or ``"float16"``: a ``WireDType``.

    Raises:
        ValueError: If it is anything else.
    """
    if isinstance(name, str) and name in WIRE_DTYPES:
        return WIRE_DTYPES[name]
    raise ValueError(f"wire_dtype: expected 'bfloat16' or 'float16', got {name!r}")


def is_rounded(dtype: np.dtype[Any]) -> bool:
    """Whether parts of ``dtype`` travel in 16 bits; others travel as they are."""
    return dtype.isnative and dtype.char in "fd"
