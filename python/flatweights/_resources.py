"""How many threads the kernels use, and the memory that is kept for later results."""

from flatweights import _core


def get_num_threads() -> int:
    """Return the largest number of threads that one call uses.

    It is decided at the first call that needs it: by `set_num_threads`, else by the environment
    variables ``FLATWEIGHTS_NUM_THREADS`` or ``OMP_NUM_THREADS``, else by the number of processors
    that the process's affinity and its control group's quota allow. Results have the same bits
    for any number of threads.

    >>> get_num_threads() >= 1
    True

    Raises:
        ValueError: If ``FLATWEIGHTS_NUM_THREADS`` is not a positive number.
    """
    return _core.get_num_threads()


def set_num_threads(count: int) -> None:
    """Set the largest number of threads that one call uses, in this process from now on.

    It has precedence over the environment variables. Small arrays are moved and averaged by the
    calling thread alone.

    >>> before = get_num_threads()
    >>> set_num_threads(1)
    >>> get_num_threads()
    1
    >>> set_num_threads(before)

    Args:
        count: From 1 to 1024; the calling thread is one of them.

    Raises:
        TypeError: If it is not an integer.
        ValueError: If it is out of range.
    """
    _core.set_num_threads(count)


def clear_pool() -> None:
    """Return the memory that the pool keeps to the system.

    New memory costs one page fault per page, which doubles the time of a large result. So
    deleted results of 64 KiB and more (of `flatten`, `average`, `FlatWeights`, ``get_flat``)
    leave their memory to a pool, and later results reuse it. Arrays in use are not touched. A
    process keeps at most 1/32 of the memory of its machine or control group, and at most 1 GiB.
    The environment variable ``FLATWEIGHTS_POOL_BYTES``, read at the first large result, sets
    another bound; 0 keeps nothing.

    >>> import numpy as np
    >>> from flatweights import flatten
    >>> vector = flatten([np.ones(100_000)])
    >>> del vector
    >>> clear_pool()
    """
    _core.clear_pool()
