"""Checks that memory is read-only before it is shared."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatweights import _core


def check_frozen(array: NDArray[Any], where: str) -> None:
    """Check that neither ``array`` nor what it is a view of can be written to.

    What the chain of views ends in is trusted to tell the truth: an array that owns its memory
    counts as read-only once its flag says so, anything else if it exports a read-only buffer
    (`bytes`, a read-only `mmap`, what Ray returns). An end that exports no buffer
    (the capsule under `numpy.from_dlpack`, an ``__array_interface__``) tells nothing of its
    memory that could be trusted: it is refused, whatever flag the array has.

    Args:
        array: The array.
        where: How an error names it.

    Raises:
        ValueError: If it can be written to, or does not tell.
    """
    link: Any = array
    while link is not None:
        obstacle = _obstacle(link)
        if obstacle:
            got = obstacle if link is array else f"a view of {obstacle}"
            raise ValueError(
                f"{where}: to be shared, expected memory that nobody can write to, such as "
                f"ray.get returns, got {got}: its owner could change the model behind its back. "
                "An array is frozen by array.setflags(write=False)"
            )
        link = _beneath(link)


def _obstacle(link: Any) -> str | None:
    kind = type(link).__name__
    if isinstance(link, np.ndarray):
        return f"a writable {kind}" if link.flags.writeable else None
    view = _view(link)
    if view is not None:
        return None if view.readonly else f"a writable {kind}"
    if _core.is_pooled(link):  # then the array over it owns its memory
        return None
    interface = getattr(link, "__array_interface__", None)
    data = interface.get("data") if isinstance(interface, dict) else None
    if isinstance(data, tuple) and not data[1]:
        return f"a writable {kind}"
    # What as_strided puts between a view and its array tells by its base.
    if getattr(link, "base", None) is not None:
        return None
    return f"a {kind}, which does not tell whether it can be written to"


def _beneath(link: Any) -> Any:
    """Return what ``link`` is a view of; None if it is no view."""
    view = None if isinstance(link, np.ndarray) else _view(link)
    if view is None:
        return getattr(link, "base", None)
    return None if view.obj is link else view.obj


def _view(link: Any) -> memoryview | None:
    try:
        return memoryview(link)
    except (TypeError, ValueError, BufferError):
        return None
