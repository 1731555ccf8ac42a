"""The memory of large results, which is kept to be used again."""

from flatweights import _core


def clear_pool() -> None:
    """Give the memory that the pool keeps back to the system.

    New memory costs a page fault for each page, which doubles the time of a large result. So
    results of 64 KiB and more (those of `flatten`, `average`, `FlatWeights`, ``get_flat``) leave
    their memory to a pool when they are deleted, and later ones take it from there. Arrays in use
    are not touched.

    >>> import numpy as np
    >>> from flatweights import flatten
    >>> vector = flatten([np.ones(100_000)])
    >>> del vector
    >>> clear_pool()
    """
    _core.clear_pool()
