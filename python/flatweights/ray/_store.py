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
    nbytes = size_of(weights)
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


def size_of(weights: Any) -> int | None:
    """Return the bytes of ``weights``, None if they are of no kind that is averaged."""
    try:
        return Template.of(weights).layout.nbytes
    except TypeError:
        return None
