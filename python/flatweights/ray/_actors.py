"""The actors of a group: which of them are called, and what calls have come to."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from flatweights.ray._average import late_error
from flatweights.ray._errors import reason_of
from flatweights.ray._worker import StaleWorkerError

_log = logging.getLogger("flatweights")


class Actors:
    """Actors by rank, and their health.

    Attributes:
        handles: The actors.
        unhealthy: By rank, why actors are not called.
        owed: By rank, what a late actor is still working on.
    """

    def __init__(self, handles: Sequence[Any]) -> None:
        """Take actors of `FlatWorker` classes; all count as healthy.

        Raises:
            ValueError: If there is none.
            TypeError: If one is no actor of a `FlatWorker` class.
        """
        self.handles = list(handles)
        if not self.handles:
            raise ValueError("expected at least one actor, got none")
        for rank, actor in enumerate(self.handles):
            if not isinstance(actor, ray.actor.ActorHandle) or not hasattr(
                actor, "receive_version"
            ):
                raise TypeError(
                    f"rank {rank}: expected an actor of a FlatWorker class, "
                    f"got {type(actor).__name__}"
                )
        self.unhealthy: dict[int, Exception] = {}
        self.owed: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.handles)

    def __getitem__(self, rank: int) -> Any:
        return self.handles[rank]

    def healthy(self) -> list[int]:
        """Return the ranks that are called."""
        return [rank for rank in range(len(self.handles)) if rank not in self.unhealthy]

    def collect(
        self, refs: Mapping[int, Any], timeout: float | None
    ) -> tuple[dict[int, Any], dict[int, Exception]]:
        """Return results and errors by rank; what is late is an error, and owed."""
        results: dict[int, Any] = {}
        failed: dict[int, Exception] = {}
        if not refs:
            return results, failed
        ready, _ = ray.wait(list(refs.values()), num_returns=len(refs), timeout=timeout)
        arrived = set(ready)
        for rank, ref in refs.items():
            if ref not in arrived:
                failed[rank] = late_error(timeout)
                self.owed[rank] = ref
                continue
            try:
                results[rank] = ray.get(ref)
            except ray.exceptions.RayError as error:
                failed[rank] = error.with_traceback(None)
        return results, failed

    def note(self, failed: Mapping[int, Exception]) -> None:
        """Count ranks as unhealthy that failed for a reason of Ray's."""
        for rank, error in failed.items():
            if _is_of_ray(error):
                if rank not in self.unhealthy:
                    _log.warning("flatweights: rank %d is left out: %s", rank, reason_of(error))
                self.unhealthy[rank] = error

    def heal(self, ranks: Mapping[int, Any]) -> None:
        """Count ``ranks`` as healthy again."""
        for rank in ranks:
            del self.unhealthy[rank]
            _log.warning("flatweights: rank %d is back", rank)

    def to_probe(self) -> list[int]:
        """Return the unhealthy ranks that owe nothing: what late ones have answered is dropped."""
        if self.owed:
            refs = list(self.owed.values())
            ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
            answered = set(ready)
            self.owed = {r: ref for r, ref in self.owed.items() if ref not in answered}
        return [rank for rank in sorted(self.unhealthy) if rank not in self.owed]

    def shut_down(self) -> None:
        """End all; none is called any more."""
        for actor in self.handles:
            ray.kill(actor)
        ended = RuntimeError("the group was shut down")
        self.unhealthy = dict.fromkeys(range(len(self.handles)), ended)
        self.owed.clear()


def raised(failed: Mapping[int, Exception]) -> dict[int, Exception]:
    """Return what methods raised, of what has failed."""
    return {rank: error for rank, error in failed.items() if not _is_of_ray(error)}


def _is_of_ray(error: Exception) -> bool:
    """Whether the actor, rather than its method, failed: it died, is stale, or is late."""
    if isinstance(error, ray.exceptions.RayTaskError):
        return isinstance(getattr(error, "cause", None), StaleWorkerError)
    return isinstance(error, (ray.exceptions.RayError, TimeoutError))
