"""Which ways there are to and from the GPUs that TensorFlow sees."""

from __future__ import annotations

import tensorflow as tf

from flatweights import _core
from flatweights._settings import GPU, gpu_setting
from flatweights.tensorflow.library._load import load_library


def status() -> str:
    """Return, for each GPU, how its variables are moved and averaged, and why, as text.

    It has TensorFlow use the GPUs, which takes some of their memory until the process ends.
    """
    devices = tf.config.list_physical_devices("GPU")
    if not devices:
        return "TensorFlow sees none"
    try:
        setting = gpu_setting()
    except ValueError as error:
        return str(error)
    for device in devices:
        tf.config.experimental.set_memory_growth(device, True)
    tf.zeros(1)  # now the driver is in use
    if load_library() is None:
        return "TensorFlow's operations, without the op library"
    if why := _core.device_obstacle():
        return f"TensorFlow's operations, since {why}"
    return "; ".join(
        f"{_core.device_name(uuid)}: {_way(uuid, setting)}" for uuid in _core.device_uuids()
    )


def _way(uuid: bytes, setting: str) -> str:
    if setting == "host":
        return f"gets and sets by a kernel; averages on the host ({GPU}=host)"
    if why := _core.device_segment_obstacle(uuid):
        return f"gets and sets by a kernel; averages on the host, since {why}"
    return "gets and sets by a kernel; averages of members stay on it"
