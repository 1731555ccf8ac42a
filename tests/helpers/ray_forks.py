"""Ray's workers as copies of one process that has imported Ray, NumPy and maybe TensorFlow.

A node whose ``setup_worker_path`` is `START` runs that instead of a worker. It passes arguments,
environment and output on to this process, which forks: the copy becomes the worker. Without such a
process, in another network namespace, or with a ``runtime_env`` that sets `ALONE` or more than
variables, a worker starts as usual.

The process only imports: a copy would not have the threads of TensorFlow and Ray.
"""

import contextlib
import gc
import json
import marshal
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ray_worker_start import ADDRESS, NETWORK
from tf_forks import Fork, shared_forks

ALONE = "FLATWEIGHTS_TESTS_ALONE"
"""A variable of the ``runtime_env`` of actors that must not be copies."""

START = str(Path(__file__).with_name("ray_worker_start.py"))

_NO_JOB = "ff" * 4  # as in workers that Ray starts before it has a job
_IN_WORKERS = (
    "pytest",
    "pyarrow.json",
    "pydantic.v1",
    "ray._common.usage.usage_lib",
    "ray._common.pydantic_compat",
    "ray._private.arrow_serialization",
)
"""Modules that most workers of tests import before their first result, if they are installed.

None of them makes an id of Ray, as `ray.dag` does: all copies would then make the same ids.
"""

_PROGRAM = f"""
import sys

sys.path.insert(0, {str(Path(__file__).parent)!r})
import ray_forks

ray_forks.serve(*map(int, sys.argv[1:]))
"""


class RayForks:
    """The process, which ends with the one that started it.

    Attributes:
        environment: The variables with which Ray must be started to find it.
    """

    def __init__(self, folder: Path, *, with_tensorflow: bool = True) -> None:
        """Start it; ``folder`` is for its socket.

        Args:
            folder: A folder of a short name.
            with_tensorflow: Whether it has TensorFlow, whose import takes longer than all the rest:
                then it is itself a copy of the process that has imported it for other tests.
        """
        address = str(folder / "forks")
        self.environment = {ADDRESS: address}
        read, self._lasts = os.pipe()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(address)
            listener.listen(128)  # workers that start meanwhile wait for the imports
            files = [listener.fileno(), read]
            self._process: Fork | subprocess.Popen[Any]
            if with_tensorflow and forks_well():
                self._process = shared_forks().start(_PROGRAM, files=files)
            else:
                arguments = [sys.executable, "-c", _PROGRAM, *map(str, files)]
                self._process = subprocess.Popen(arguments, pass_fds=files)
        os.close(read)

    def stop(self) -> None:
        os.close(self._lasts)
        self._process.communicate()


def forks_well() -> bool:
    """Whether a copy of a process that has imported TensorFlow works; with 2.18 it crashes."""
    try:
        major, minor = version("tensorflow").split(".")[:2]
    except PackageNotFoundError:
        return False
    return (int(major), int(minor)) >= (2, 21)


def are_there() -> bool:
    """Whether the environment of this process names such a process."""
    return ADDRESS in os.environ


def variables_of(contexts: list[str]) -> dict[str, str] | None:
    """Return the variables of a ``runtime_env``, as Ray hands it over.

    Returns:
        None, if it asks for more than variables, or for a worker that is no copy.
    """
    found: dict[str, str] = {}
    for context in map(json.loads, contexts):
        if needs_more_than_variables(context):
            return None
        found |= context.get("env_vars", {})
    return found


def needs_more_than_variables(context: dict[str, Any]) -> bool:
    rest = {name for name, value in context.items() if value} - {"env_vars", "py_executable"}
    variables = context.get("env_vars", {})
    is_other = context.get("py_executable", sys.executable) != sys.executable
    return bool(rest) or is_other or ALONE in variables or any("$" in v for v in variables.values())


def serve(listener: int, lasts: int) -> None:
    """Fork for each worker of one cluster, until the process that started this one has ended.

    Args:
        listener: The file of the socket at which workers ask.
        lasts: A pipe that the process has open.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # copies that end are forgotten
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # as in Ray's own processes
    if "tensorflow" in sys.modules:
        import_module("keras")
    asked = socket.socket(fileno=listener)
    here = os.readlink(NETWORK)  # noqa: PTH115
    has_ray = False
    while True:
        ready, _, _ = select.select([listener, lasts], [], [])
        if lasts in ready:
            return
        with asked.accept()[0] as there, contextlib.suppress(OSError):  # Ray has killed it
            message, files, _, _ = socket.recv_fds(there, 1 << 20, 3)
            if not message:
                continue
            arguments, contexts, environment, blocked, network = marshal.loads(message)
            variables = variables_of(contexts)
            is_ours = network == here and variables is not None
            if is_ours and not has_ray:
                import_ray(environment)
                has_ray = True
            if is_ours and not os.fork():
                break
            for file in files:
                os.close(file)
            there.send(marshal.dumps((is_ours, variables)))
    asked.close()
    os.close(lasts)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    become_worker(arguments, environment | (variables or {}), blocked)


def import_ray(environment: dict[str, str]) -> None:
    """Import Ray in a worker's environment, since it keeps the values that it finds there."""
    os.environ.clear()
    os.environ.update(environment | {"RAY_JOB_ID": _NO_JOB})
    import_module("ray._private.workers.default_worker")
    import_module("flatweights.ray")
    if "tensorflow" in sys.modules:
        import_module("flatweights.tensorflow")
    for name in _IN_WORKERS:
        with contextlib.suppress(ImportError):
            import_module(name)
    gc.collect()
    gc.freeze()


def become_worker(arguments: list[str], environment: dict[str, str], blocked: set[int]) -> None:
    """Run Ray's program of a worker in this copy."""
    import numpy as np

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    random.seed()
    np.random.seed()
    sys.argv = arguments
    sys.path[0] = str(Path(arguments[0]).parent)
    runpy.run_path(arguments[0], run_name="__main__")
