"""Weights in Ray's object store, and the error if it is full."""

from __future__ import annotations

from typing import Any

import ray
import ray.util.client

from flatweights.ray._errors import StoreTooSmallError
from flatweights.ray._wire import nbytes_of

FULL = (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError)
"""The errors of a result for which there was no room."""


def check_cluster() -> None:
    """Raise unless this process is part of Ray's cluster: a driver of Ray Client is not.

    Raises:
        RuntimeError: If Ray is connected by ``ray://``.
    """
    if ray.util.client.ray.is_connected():
        raise RuntimeError(
            "expected a driver in Ray's cluster, got one that is connected by Ray Client (ray://), "
            "which has no object store of its own: run it on a node of the cluster, with "
            "ray.init(address='auto') or as ray job submit -- python PROGRAM"
        )


def put(weights: Any, ranks: int) -> Any:
    """Put ``weights``, for or from so many ``ranks``, into the object store.

    Raises:
        StoreTooSmallError: If there is no room.
    """
    try:
        return ray.put(weights)
    except FULL as error:
        raise too_small(ranks, weights) from error


def too_small(ranks: int, weights: Any) -> StoreTooSmallError:
    """Return the error that says how large the store must be for ``weights``, if known."""
    nbytes = nbytes_of(weights)
    need = f"({ranks} + 2) * " + (
        "the bytes of the weights"
        if nbytes is None
        else f"{nbytes:,} = {(ranks + 2) * nbytes:,} bytes"
    )
    return StoreTooSmallError(
        f"the object store is full: the results of {ranks} ranks, their average and the one "
        f"before need at least {need}; set ray.init(object_store_memory=...) or ray start "
        "--object-store-memory"
    )
