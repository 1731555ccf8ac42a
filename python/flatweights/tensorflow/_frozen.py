"""Whether memory may be shared: nobody must be able to write to it."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def check_frozen(array: NDArray[Any], where: str) -> None:
    """Check that neither ``array`` nor what it is a view of can be written to.

    An array that owns its memory counts as read-only once its flag says so.

    Args:
        array: The array.
        where: How an error names it.

    Raises:
        ValueError: If it can be written to.
    """
    link: Any = array
    while link is not None:
        if _is_writable(link):
            kind = type(link).__name__
            got = f"a writable {kind}" if link is array else f"a view of a writable {kind}"
            raise ValueError(
                f"{where}: to be shared, expected memory that nobody can write to, such as "
                f"ray.get returns, got {got}: its owner could change the model behind its back. "
                "An array is frozen by array.setflags(write=False)"
            )
        link = _beneath(link)


def _is_writable(link: Any) -> bool:
    if isinstance(link, np.ndarray):
        return link.flags.writeable
    view = _view(link)
    if view is not None:
        return not view.readonly
    # What as_strided puts between a view and its array, say. Else, the array's flag has to do.
    interface = getattr(link, "__array_interface__", None)
    data = interface.get("data") if isinstance(interface, dict) else None
    return isinstance(data, tuple) and not data[1]


def _beneath(link: Any) -> Any:
    """Return what ``link`` is a view of; None if it is no view, or does not tell."""
    view = None if isinstance(link, np.ndarray) else _view(link)
    if view is None:
        return getattr(link, "base", None)
    return None if view.obj is link else view.obj


def _view(link: Any) -> memoryview | None:
    try:
        return memoryview(link)
    except (TypeError, ValueError, BufferError):
        return None
