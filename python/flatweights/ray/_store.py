"""Ray's object store, when it is too small."""

from typing import Any

import ray

from flatweights._sources import Template

FULL = (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError)


class StoreTooSmallError(RuntimeError):
    """The object store, and the disk that it spills to, cannot hold a round."""


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
    need = f"({ranks} + 2) * "
    try:
        nbytes = Template.of(weights).layout.nbytes
        need += f"{nbytes:,} = {(ranks + 2) * nbytes:,} bytes"
    except TypeError:
        need += "the bytes of the weights"
    return StoreTooSmallError(
        f"the object store is full: the results of {ranks} ranks, their average and the one "
        f"before need at least {need}; set ray.init(object_store_memory=...) or ray start "
        "--object-store-memory"
    )
