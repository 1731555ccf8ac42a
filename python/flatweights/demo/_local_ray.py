"""Ray on this machine, for as long as a block runs."""

import contextlib
import logging
import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path

import ray

from flatweights.demo._interrupts import Interrupts
from flatweights.demo._options import DemoError

_STORE_BYTES = 256 * 2**20

# Inherited by the actors.
_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "-1",
    "KERAS_BACKEND": "tensorflow",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else Ray warns that this will be the default
    "RAY_USAGE_STATS_ENABLED": "0",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "TF_ENABLE_ONEDNN_OPTS": "0",
}

_GRACE_MS = 5000


@contextlib.contextmanager
def local_ray(num_cpus: int, interrupts: Interrupts) -> Iterator[None]:
    """Start Ray, and stop it with every process that it started, whatever happens.

    Meanwhile `sys.stdout` is silenced, and an interrupt waits while Ray starts or stops.

    Raises:
        DemoError: If Ray does not start.
    """
    others = set(_descendants())
    environment = dict(os.environ)
    with contextlib.ExitStack() as stack:
        # There Ray prints what it finds out about a worker that died, whatever its log level.
        nowhere = stack.enter_context(Path(os.devnull).open("w"))
        stack.enter_context(contextlib.redirect_stdout(nowhere))
        stack.callback(_restore, environment)
        os.environ.update(_ENVIRONMENT)
        try:
            # Half started, Ray can neither be used nor stopped.
            with interrupts.held("interrupted: Ray will stop as soon as it has started"):
                _start(num_cpus)
            yield
        finally:
            with interrupts.held("interrupted: Ray is stopping"):
                _stop(others)


def _start(num_cpus: int) -> None:
    try:
        ray.init(
            address="local",
            num_cpus=num_cpus,
            num_gpus=0,
            object_store_memory=_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise DemoError(f"Ray did not start: {type(error).__name__}: {reason}") from error


def _stop(others: set[int]) -> None:
    """Stop Ray, and wait until its processes have ended; then end those that have not."""
    running = [fd for pid in _descendants() if pid not in others for fd in _pidfd(pid)]
    grace = _GRACE_MS if ray.is_initialized() else 0
    try:
        ray.shutdown()
    finally:
        left = _wait(running, grace)
        for fd in left:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        _wait(left, _GRACE_MS)
        for fd in running:
            os.close(fd)


def _wait(pidfds: list[int], timeout_ms: int) -> list[int]:
    """Return those whose process has not ended in time."""
    left = set(pidfds)
    poll = select.poll()
    for fd in left:
        poll.register(fd, select.POLLIN)
    while left:
        ended = poll.poll(timeout_ms)
        if not ended:
            break
        for fd, _ in ended:
            poll.unregister(fd)
            left.discard(fd)
    return list(left)


def _pidfd(pid: int) -> list[int]:
    try:
        return [os.pidfd_open(pid)]
    except ProcessLookupError:
        return []


def _descendants() -> list[int]:
    """Return the processes that this one started, directly or through others."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended since
            # pid (name) state parent ...; the name may hold anything
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = [os.getpid()]
    for pid in found:
        found.extend(children.get(pid, []))
    return found[1:]


def _restore(environment: dict[str, str]) -> None:
    for name in _ENVIRONMENT:
        if name in environment:
            os.environ[name] = environment[name]
        else:
            os.environ.pop(name, None)
