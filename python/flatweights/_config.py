"""What is installed and in use."""

import importlib.util
import platform
import sys
from importlib import metadata

from flatweights import _core

_DISTRIBUTIONS = ("numpy", "ml_dtypes", "tensorflow", "tensorflow-cpu", "keras", "tf_keras", "ray")


def show_config() -> dict[str, str]:
    """Return versions, number of threads and active code paths, as text to print.

    This imports neither TensorFlow nor Ray. How weights are moved to and from TensorFlow is
    known once `flatweights.tensorflow` is imported; ``flatweights info`` imports it in a
    separate process.

    Environment variables override the defaults; each is read when it is first needed:

    * ``FLATWEIGHTS_NUM_THREADS``, else ``OMP_NUM_THREADS``: largest number of threads.
    * ``FLATWEIGHTS_ISA``: avx512, avx2, neon, baseline or portable.
    * ``FLATWEIGHTS_STREAM_ABOVE``: bytes read and written by one call above which results
      bypass the caches. Default: the size of the L3 cache, or 32 MiB if that is unknown.
    * ``FLATWEIGHTS_POOL_BYTES``: most bytes of deleted results that are kept for reuse.
      Default: 1/32 of the memory of the machine or control group, at most 1 GiB.
    * ``FLATWEIGHTS_RAY``: how a new `WorkerGroup` reaches workers on its machine. ``store``
      always uses Ray's object store; ``lanes`` raises if a worker has no lane.

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
    config["streams above"] = f"{_core.get_stream_above() / 2**20:.10g} MiB"
    config["pool keeps up to"] = f"{_core.get_pool_limit() / 2**20:.10g} MiB"
    library = sys.modules.get("flatweights.tensorflow._library")
    if library:
        config["tensorflow path"] = library.status()
    elif importlib.util.find_spec("tensorflow") is None:
        config["tensorflow path"] = "none, since tensorflow is not installed"
    else:
        config["tensorflow path"] = "known once flatweights.tensorflow is imported"
    lanes = sys.modules.get("flatweights.ray._lane_calls")
    config["rounds on Ray"] = lanes.status() if lanes else "known once flatweights.ray is imported"
    return config
