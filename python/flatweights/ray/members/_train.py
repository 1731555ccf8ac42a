"""The worker of Ray Train that this process is, if it is one."""

import secrets
import warnings
from concurrent.futures import Future
from typing import Any, NamedTuple

from flatweights._daemon import in_daemon
from flatweights._locks import CallLock

_lock = CallLock("worker of Ray Train")
_pending: Future[str] | None = None
_token: str | None = None


class TrainWorker(NamedTuple):
    """A worker of one attempt of a run.

    Attributes:
        name: A name that all workers of this attempt share, and no other attempt has.
        rank: Its world rank.
        size: The number of workers.
    """

    name: str
    rank: int
    size: int


def use_token(token: str) -> None:
    """Have this process, a worker, meet those that are given the same ``token``.

    `ReplaceWorkers` gives it to all workers that it starts, and to each that it replaces.
    """
    global _token
    _token = token


def is_replaceable() -> bool:
    """Return whether this process is a worker of Ray Train that `ReplaceWorkers` replaces.

    If it dies or raises, another process takes its place, and the other workers go on.

    >>> is_replaceable()
    False
    """
    return _token is not None


def train_worker(timeout: float | None) -> TrainWorker | None:
    """Return the worker of Ray Train that this process is; None if it is none.

    Args:
        timeout: Seconds to wait for the other workers; for ever, if None.

    Raises:
        TimeoutError: If not all of them have come in time.
        NotImplementedError: If Ray is older than 2.50.
    """
    try:
        import ray.train
    except ImportError:  # it needs packages that Ray alone does not
        return None
    try:
        context = ray.train.get_context()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the earlier training of Ray warns outside of it
            if not context.get_experiment_name():
                return None
            rank, size = context.get_world_rank(), context.get_world_size()
    except (RuntimeError, AttributeError, DeprecationWarning):  # the last in Ray Tune
        return None
    if rank is None or size is None:
        return None
    # Those that are replaced have no barrier: the other workers would not come to it.
    token = _attempt(context, size, timeout) if _token is None else _token
    return TrainWorker(f"train-{token}", rank, size)


def _attempt(context: Any, size: int, timeout: float | None) -> str:
    """Return an id that all workers of this attempt share, and no other attempt has."""
    global _pending
    try:
        from ray.train.collective import broadcast_from_rank_zero
    except ImportError:
        raise NotImplementedError(
            "join: without arguments, it needs Ray 2.50 or later in a worker of Ray Train: before, "
            "nothing tells one attempt of a run from the next. Pass a name of its own for each "
            "attempt, rank= and size="
        ) from None
    with _lock.ready():
        # It has no timeout, and counts its callers: one that gave up is not to call it again.
        if _pending is None:
            _pending = in_daemon(
                "flatweights-train", broadcast_from_rank_zero, secrets.token_hex(8)
            )
        pending = _pending
    try:
        token: str = pending.result(timeout)
    except TimeoutError:
        if pending.done():  # it is what the call itself raised
            raise
        raise TimeoutError(
            f"join: expected all {size} workers of Ray Train to call it in {timeout:.3g} s"
        ) from None
    finally:
        with _lock.ready():
            if _pending is pending and pending.done():
                _pending = None
    return token
