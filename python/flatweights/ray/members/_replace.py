"""`ReplaceWorkers`: Ray Train replaces the worker that has failed, and no other.

Imports Ray Train, which takes seconds: `flatweights.ray` imports this module at its first use.
"""

from __future__ import annotations

import secrets
from typing import Any

import ray
import ray.train
from ray.train.backend import Backend, BackendConfig

from flatweights.ray.members._train import use_token

_SINCE = "2.56"


class ReplaceWorkers(BackendConfig):  # type: ignore[misc]
    """Has Ray Train replace the worker that has failed, while the others go on.

    By default, Ray Train starts all workers again if one of them fails. With this backend, it
    starts one process in the place of the one that has died or raised, under the same rank, and
    runs the training function in it. `join` without arguments, and callbacks and optimizers of
    `flatweights.keras` without ``member``, then take part in the process group that is under way,
    whose members heal the new one. They need ``min_results``, since an average would otherwise need
    all.

    >>> from ray.train import FailureConfig, RunConfig, ScalingConfig
    >>> from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
    >>> def train():  # or a function with `flatweights.keras` and fit
    ...     with join() as member:
    ...         member.average(np.ones(2), min_results=1)
    >>> trainer = DataParallelTrainer(
    ...     train,
    ...     backend_config=ReplaceWorkers(),
    ...     scaling_config=ScalingConfig(num_workers=2),
    ...     run_config=RunConfig(failure_config=FailureConfig(max_failures=10)),
    ... )  # trainer.fit() starts the workers

    Ray's controller looks for failed workers every two seconds, or as often as
    ``RAY_TRAIN_HEALTH_CHECK_INTERVAL_S`` in its environment says. Each look that finds some uses up
    one of ``max_failures``, whose default is 0. If all workers fail between two looks, Ray Train
    starts all of them again, and they meet anew.
    """

    def __init__(self) -> None:
        """Check the version of Ray.

        Raises:
            RuntimeError: If it cannot replace one worker.
        """
        check_ray(Backend, ray.__version__)

    @property
    def backend_cls(self) -> type[Any]:
        """The class of the backend; for Ray Train."""
        return TokenBackend


class TokenBackend(Backend):  # type: ignore[misc]
    """Gives a token to all workers that are to meet; lives in the controller of a run."""

    has_replica_groups = True
    _token = ""

    def on_training_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """Give the token to workers that have just been started: to all, or to one that is new."""
        sizes = worker_group.execute(_world_size)
        if len(sizes) == sizes[0]:
            self._token = secrets.token_hex(8)
        worker_group.execute(use_token, self._token)


def check_ray(backend: type[Any], version: str) -> None:
    """Raise `RuntimeError` if Ray of ``version``, with this ``backend``, restarts all workers."""
    if not hasattr(backend, "has_replica_groups"):
        raise RuntimeError(
            f"ReplaceWorkers: expected Ray {_SINCE} or newer, which can replace one worker, got "
            f"Ray {version}. Without ReplaceWorkers, it starts all workers again if one fails, and "
            "they go on from the last checkpoint"
        )


def _world_size() -> int:
    """Return the number of workers of the run, in one of them."""
    size: int = ray.train.get_context().get_world_size()
    return size
