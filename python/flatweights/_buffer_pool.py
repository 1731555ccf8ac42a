"""The memory of large results, which is kept to be used again."""

from flatweights import _core


def clear_pool() -> None:
    """Give the memory that the pool keeps back to the system.

    New memory costs a page fault for each page, which doubles the time of a large result. So
    results of 64 KiB and more (those of `flatten`, `average`, `FlatWeights`, ``get_flat``) leave
    their memory to a pool when they are deleted, and later ones take it from there. Arrays in use
    are not touched. A process keeps at most 1/32 of the memory of its machine or control group,
    and at most 1 GiB, or as many bytes as the environment variable ``FLATWEIGHTS_POOL_BYTES`` says
    at the first large result; 0 keeps nothing.

    >>> import numpy as np
    >>> from flatweights import flatten
    >>> vector = flatten([np.ones(100_000)])
    >>> del vector
    >>> clear_pool()
    """
    _core.clear_pool()
