"""Checks that memory is read-only before it is shared."""

import sys
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatweights import _core


def check_frozen(array: NDArray[Any], where: str) -> None:
    """Check that neither ``array`` nor any object that it is a view of is writable.

    The last object in the chain of views is trusted: an array that owns its memory is
    read-only if its flag says so, any other object if it exports a read-only buffer (`bytes`,
    a read-only `mmap`, the buffers of Ray). An object that exports no buffer (the capsule
    under `numpy.from_dlpack`, an ``__array_interface__``) is rejected, whatever the flag of
    the array: it has no information that could be trusted. Pooled memory counts as owned by the
    only view of it.

    Args:
        array: The array.
        where: How errors name it.

    Raises:
        ValueError: If it is writable, or not known to be read-only.
    """
    link: Any = array
    while link is not None:
        obstacle, beneath = _look_at(link)
        if obstacle:
            got = obstacle if link is array else f"a view of {obstacle}"
            raise ValueError(
                f"{where}: to be shared, expected read-only memory, such as ray.get returns, got "
                f"{got}: its owner could change the model unnoticed. "
                "array.setflags(write=False) freezes an array, but not what it is a view of: copy "
                "that first"
            )
        link = beneath


def _look_at(link: Any) -> tuple[str | None, Any]:
    """Return why ``link`` may be writable, or None, and the object it is a view of, or None."""
    writable = f"a writable {type(link).__name__}"
    if isinstance(link, np.ndarray) and not link.flags.writeable and _is_only_view(link):
        return None, None
    base = getattr(link, "base", None)
    if isinstance(link, np.ndarray):
        return writable if link.flags.writeable else None, base
    with suppress(TypeError, ValueError, BufferError):
        view = memoryview(link)
        return None if view.readonly else writable, None if view.obj is link else view.obj
    if _core.is_pooled(link):  # the array over it counts as the owner
        return None, base
    interface = getattr(link, "__array_interface__", None)
    data = interface.get("data") if isinstance(interface, dict) else None
    if isinstance(data, tuple) and not data[1]:
        return writable, base
    # as_strided puts an object between a view and its array; its base is checked next.
    if base is not None:
        return None, base
    return f"a {type(link).__name__}, which does not say whether it is writable", None


def _is_only_view(array: Any) -> bool:
    """Whether ``array`` alone refers to the array over pooled memory that it is a view of.

    `get_flat` and `flatweights.average` return such views, through which alone the memory can be
    written to.
    """
    is_pooled = isinstance(array.base, np.ndarray) and _core.is_pooled(array.base.base)
    return is_pooled and _references_to_base(array) == _FROM_ONE_VIEW


def _references_to_base(array: Any) -> int:
    return sys.getrefcount(array.base)


_FROM_ONE_VIEW = _references_to_base(_core.empty(1).view(np.int8))
