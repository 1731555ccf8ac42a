"""The worker of Ray Train that this process is, if it is one."""

import secrets
from typing import Any, NamedTuple


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


def train_worker() -> TrainWorker | None:
    """Return the worker of Ray Train that this process is; None if it is none."""
    try:
        import ray.train
    except ImportError:  # it needs packages that Ray alone does not
        return None
    try:
        context = ray.train.get_context()
        rank, size = context.get_world_rank(), context.get_world_size()
    except (RuntimeError, AttributeError):
        return None
    if rank is None or size is None:
        return None
    return TrainWorker(f"train-{_attempt(context)}", rank, size)


def _attempt(context: Any) -> str:
    """Return what all workers of this attempt have in common, and no other attempt has."""
    try:
        from ray.train.collective import broadcast_from_rank_zero
    except ImportError:  # before Ray 2.50
        return f"{context.get_experiment_name()}-{context.get_trial_id()}"
    token: str = broadcast_from_rank_zero(secrets.token_hex(8))
    return token
