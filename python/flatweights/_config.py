"""What is installed and in use."""

import importlib.util
import platform
import sys
from importlib import metadata

from flatweights import _core

_DISTRIBUTIONS = ("numpy", "ml_dtypes", "tensorflow", "tensorflow-cpu", "keras", "tf_keras", "ray")


def show_config() -> dict[str, str]:
    """Return versions, threads and the code paths in use, as text, ready to be printed.

    Neither TensorFlow nor Ray is imported for it: which way weights are moved to and from
    TensorFlow is told once `flatweights.tensorflow` is imported, or by ``flatweights info``,
    which asks a process of its own.

    Environment variables, read at the first call that needs them, choose otherwise than by the
    machine: ``FLATWEIGHTS_NUM_THREADS`` (else ``OMP_NUM_THREADS``), ``FLATWEIGHTS_ISA``
    (avx512, avx2, neon, baseline or portable) and ``FLATWEIGHTS_STREAM_ABOVE``, the bytes read and
    written by one call above which results are written past the caches: without it, the size of
    the third cache, or 32 MiB where none is known. ``FLATWEIGHTS_POOL_BYTES`` bounds the memory of
    deleted results that is kept to be used again: without it, 1/32 of the memory of the machine or
    of the control group, 1 GiB at most. ``FLATWEIGHTS_RAY`` says how a `WorkerGroup`
    reaches workers on its machine: ``store``, never past Ray's object store, or ``lanes``, with
    an error where there is no lane to a worker; read when a group is made.

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
