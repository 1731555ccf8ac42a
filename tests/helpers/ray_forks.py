"""Ray's workers as copies of one process that has imported Ray, NumPy and maybe TensorFlow.

A node whose ``setup_worker_path`` is this file starts it instead of a worker. It passes arguments,
environment and output on to that process, which forks: the copy becomes the worker. Without such a
process, in another network namespace, or with a ``runtime_env`` that sets `ALONE` or more than
variables, a worker starts as usual.

The process only imports: a copy would not have the threads of TensorFlow and Ray.
"""

import contextlib
import gc
import json
import os
import pickle
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

ALONE = "FLATWEIGHTS_TESTS_ALONE"
"""A variable of the ``runtime_env`` of actors that must not be copies."""

_CONTEXT = "--serialized-runtime-env-context="
_ADDRESS = "FLATWEIGHTS_TESTS_FORKS"  # the variable with the address of the process
_NETWORK = Path("/proc/self/ns/net")
_NO_JOB = "ff" * 4  # as in workers that Ray starts before it has a job
_AT_FIRST_RESULT = (
    "pyarrow.json",
    "pydantic.v1",
    "ray._common.pydantic_compat",
    "ray._private.arrow_serialization",
)
"""Modules that a worker imports before it returns its first result, if they are installed."""


class RayForks:
    """The process, which ends with the one that started it.

    Attributes:
        environment: The variables with which Ray must be started to find it.
    """

    def __init__(self, folder: Path, *, with_tensorflow: bool = True) -> None:
        """Start it; ``folder`` is for its socket.

        Args:
            folder: A folder of a short name.
            with_tensorflow: Whether it imports TensorFlow, which takes longer than all the rest.
        """
        serve = "--serve-tensorflow" if with_tensorflow else "--serve"
        address = str(folder / "forks")
        self.environment = {_ADDRESS: address}
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(address)
            listener.listen(128)  # workers that start meanwhile wait for the imports
            self._process = subprocess.Popen(
                [sys.executable, __file__, serve, str(listener.fileno())],
                pass_fds=[listener.fileno()],
                stdin=subprocess.PIPE,
            )

    def stop(self) -> None:
        self._process.communicate()


def are_there() -> bool:
    """Whether the environment of this process names such a process."""
    return _ADDRESS in os.environ


def start_worker() -> None:
    """Let a copy become the worker; without one, become the worker here."""
    (program,) = [k for k, text in enumerate(sys.argv) if text.endswith("default_worker.py")]
    contexts = [json.loads(a[len(_CONTEXT) :]) for a in sys.argv if a.startswith(_CONTEXT)]
    if any(map(needs_more_than_variables, contexts)):
        setup = str(Path(sys.argv[program]).with_name("setup_worker.py"))
        os.execv(sys.executable, [sys.executable, setup, *sys.argv[1:]])
    # Ray's own setup does this for other workers, but imports all of Ray.
    for context in contexts:
        os.environ.update(context.get("env_vars", {}))
    ours = ("--language", _CONTEXT)
    arguments = [a for a in sys.argv[program:] if not a.startswith(ours)]
    if not have_copied(arguments):
        os.execv(sys.executable, [sys.executable, *arguments])


def needs_more_than_variables(context: dict[str, Any]) -> bool:
    """Whether a ``runtime_env`` asks for more than variables, or for a worker that is no copy."""
    rest = {name for name, value in context.items() if value} - {"env_vars", "py_executable"}
    variables = context.get("env_vars", {})
    is_other = context.get("py_executable", sys.executable) != sys.executable
    return bool(rest) or is_other or ALONE in variables or any("$" in v for v in variables.values())


def have_copied(arguments: list[str]) -> bool:
    """Start the worker as a copy; return False if there is nothing to copy."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as there:
            there.connect(os.environ[_ADDRESS])
            blocked = {int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])}
            network = _NETWORK.readlink()
            message = pickle.dumps((arguments, dict(os.environ), blocked, network))
            socket.send_fds(there, [message], [0, 1, 2])
            return there.recv(1) == b"1"
    except (KeyError, OSError):
        return False


def serve(listener: socket.socket, *, with_tensorflow: bool) -> None:
    """Fork for each worker of one cluster, until the process that started this one has ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # copies that end are forgotten
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # as in Ray's own processes
    if with_tensorflow:
        import_tensorflow()
    here = _NETWORK.readlink()
    has_ray = False
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            return
        with listener.accept()[0] as there, contextlib.suppress(OSError):  # Ray has killed it
            message, files, _, _ = socket.recv_fds(there, 1 << 20, 3)
            if not message:
                continue
            arguments, environment, blocked, network = pickle.loads(message)
            is_ours = network == here
            if is_ours and not has_ray:
                import_ray(environment)
                has_ray = True
            if is_ours and not os.fork():
                break
            for file in files:
                os.close(file)
            there.send(b"1" if is_ours else b"0")
    listener.close()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    become_worker(arguments, environment, blocked)


def import_tensorflow() -> None:
    errors = os.dup(2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # TensorFlow prints a greeting in any case
    try:
        import_module("tensorflow")
        import_module("keras")
    finally:
        os.dup2(errors, 2)
        os.close(errors)


def import_ray(environment: dict[str, str]) -> None:
    """Import Ray in a worker's environment, since it keeps the values that it finds there."""
    os.environ.clear()
    os.environ.update(environment | {"RAY_JOB_ID": _NO_JOB})
    import_module("ray._private.workers.default_worker")
    import_module("flatweights.ray")
    for name in _AT_FIRST_RESULT:
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


if __name__ == "__main__":
    if sys.argv[1].startswith("--serve"):
        there = socket.socket(fileno=int(sys.argv[2]))
        serve(there, with_tensorflow=sys.argv[1] == "--serve-tensorflow")
    else:
        start_worker()
