"""Versions, code paths in use, threads, and memory kept for reuse."""

import importlib.util
import platform
import sys
from importlib import metadata

from flatweights import _core
from flatweights._numbers import as_integer
from flatweights._settings import RAY, ray_setting

_DISTRIBUTIONS = ("numpy", "ml_dtypes", "tensorflow", "tensorflow-cpu", "keras", "tf_keras", "ray")
_MOST_THREADS = 1024


def show_config() -> dict[str, str]:
    """Return versions, number of threads and active code paths, as text to print.

    This imports neither TensorFlow nor Ray. The code path to and from TensorFlow is known once
    `flatweights.tensorflow` is imported; ``flatweights info`` imports it in a separate process.

    Environment variables override the defaults; each is read when it is first needed:

    * ``FLATWEIGHTS_NUM_THREADS``, else ``OMP_NUM_THREADS``: largest number of threads.
    * ``FLATWEIGHTS_ISA``: avx512, avx2, neon, baseline or portable.
    * ``FLATWEIGHTS_STREAM_ABOVE``: bytes read and written by one call above which results
      bypass the caches. Default: the size of the L3 cache, or 32 MiB if that is unknown.
    * ``FLATWEIGHTS_POOL_BYTES``: most bytes of deleted results that are kept for reuse.
      Default: 1/32 of the memory of the machine or control group, at most 1 GiB.
    * ``FLATWEIGHTS_RAY``: how a new `WorkerGroup` reaches workers on its machine. ``store``
      always uses Ray's object store; ``shm`` raises if a worker has no channel.
    * ``FLATWEIGHTS_GPU``: where members average variables that are on one GPU. ``host`` always
      averages in memory of the host; ``device`` stays on the GPU for few bytes, too, and raises
      if it cannot.
    * ``FLATWEIGHTS_BETWEEN_NODES``: ``streams`` or ``driver``, the way of averages of several
      nodes. Default: by their size.
    * ``FLATWEIGHTS_PORTS``: the ports of connections between nodes, such as ``20000-20100``.
    * ``FLATWEIGHTS_TENSORFLOW``: ``bound`` raises if the library of TensorFlow operations cannot
      be compiled or loaded; ``ops`` does without it.
    * ``FLATWEIGHTS_CACHE_DIR``: the folder in which that library is kept.

    Raises:
        ValueError: If one of these variables is malformed.

    >>> show_config()["instruction set"] in {"avx512", "avx2", "neon", "baseline", "portable"}
    True
    """
    config = {
        "flatweights": _core.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
    }
    for name in _DISTRIBUTIONS:
        try:
            config[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            if name in ("tensorflow", "ray"):
                config[name] = "not installed"
    config["threads"] = str(_core.get_num_threads())
    config["instruction set"] = _core.get_isa()
    config["bypasses caches above"] = f"{_core.get_stream_above() / 2**20:.10g} MiB"
    config["pool keeps up to"] = f"{_core.get_pool_limit() / 2**20:.10g} MiB"
    library = sys.modules.get("flatweights.tensorflow.library._load")
    if library:
        config["tensorflow path"] = library.status()
    elif importlib.util.find_spec("tensorflow") is None:
        config["tensorflow path"] = "none, since tensorflow is not installed"
    else:
        config["tensorflow path"] = "known once flatweights.tensorflow is imported"
    config["rounds on Ray"] = _rounds_on_ray()
    return config


def _rounds_on_ray() -> str:
    """Return the way by which a new group reaches its workers."""
    if importlib.util.find_spec("ray") is None:
        return "none, since ray is not installed"
    return {
        "": "channels within a machine, else the object store",
        "store": f"the object store ({RAY}=store)",
        "shm": f"channels ({RAY}=shm)",
    }[ray_setting()]


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
    number = as_integer(count, "count")
    if not 1 <= number <= _MOST_THREADS:
        raise ValueError(
            f"count: expected a number of threads from 1 to {_MOST_THREADS}, got {number}"
        )
    _core.set_num_threads(number)


def clear_pool() -> None:
    """Return the memory that the pool keeps to the system.

    New memory costs one page fault per page, which doubles the time of a large result. So
    deleted results of 64 KiB and more (of `flatten`, `average`, `FlatWeights`, ``get_flat``)
    leave their memory to a pool, and later results reuse it. Arrays in use are not touched. A
    process keeps at most 1/32 of the memory of its machine or control group, and at most 1 GiB.
    The environment variable ``FLATWEIGHTS_POOL_BYTES``, read at the first call, sets another
    bound; 0 keeps nothing.

    >>> import numpy as np
    >>> from flatweights import flatten
    >>> vector = flatten([np.ones(100_000)])
    >>> del vector
    >>> clear_pool()
    """
    _core.clear_pool()
