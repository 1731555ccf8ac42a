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
    base: Any = array
    while isinstance(base, np.ndarray):
        if base.flags.writeable:
            what = "a read-only array" if base is array else "a view of a read-only array"
            raise ValueError(
                f"{where}: to be shared, expected {what}, such as ray.get returns, for its owner "
                "could change the model behind its back; freeze it by array.setflags(write=False)"
            )
        base = base.base
    try:
        writable = base is not None and not memoryview(base).readonly
    except TypeError:  # no buffer: the array's own flag has to do
        writable = False
    if writable:
        raise ValueError(
            f"{where}: to be shared, expected read-only memory, got a view of a writable "
            f"{type(base).__name__}"
        )
