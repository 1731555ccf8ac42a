"""What is installed and in use."""

import platform
from importlib import metadata

from flatweights import _core

_DISTRIBUTIONS = ("numpy", "ml_dtypes", "tensorflow", "tensorflow-cpu", "keras", "tf_keras", "ray")


def show_config() -> dict[str, str]:
    """Return versions, threads and the code paths in use, as text, ready to be printed.

    Neither TensorFlow nor Ray is imported for it.

    >>> show_config()["instruction set"] in {"avx512", "avx2", "baseline", "portable"}
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
    config["tensorflow path"] = "tensorflow-only: one fused concat and split per device and dtype"
    return config
