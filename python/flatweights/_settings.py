"""Environment variables that choose the way of rounds on Ray."""

from __future__ import annotations

import os

RAY = "FLATWEIGHTS_RAY"
GPU = "FLATWEIGHTS_GPU"


def setting(variable: str, *values: str) -> str:
    """Return the value of an environment variable, or nothing.

    Raises:
        ValueError: If it is none of ``values``.
    """
    value = os.environ.get(variable, "")
    if value not in ("", *values):
        expected = f"{', '.join(values[:-1])} or {values[-1]}"
        raise ValueError(f"{variable}: expected {expected}, got {value!r}")
    return value


def ray_setting() -> str:
    """Return the value of ``FLATWEIGHTS_RAY``: ``"store"``, ``"shm"`` or nothing.

    Raises:
        ValueError: If it has another value.
    """
    return setting(RAY, "store", "shm")


def gpu_setting() -> str:
    """Return the value of ``FLATWEIGHTS_GPU``: ``"host"``, ``"device"`` or nothing.

    Raises:
        ValueError: If it has another value.
    """
    return setting(GPU, "host", "device")
