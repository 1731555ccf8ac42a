"""The workers of a group by rank, their health, and the answers that they owe."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray

from flatweights.ray._calls import Answer, Worker, wait_any
from flatweights.ray._engine import Arrivals, Deadline
from flatweights.ray._errors import is_lost, late_error, reason_of
from flatweights.ray.lanes._calls import GroupLanes, LaneWorker

_log = logging.getLogger("flatweights")


class Workers:
    """Workers by rank, and their health.

    Attributes:
        lanes: Those to workers on this machine.
        unhealthy: By rank, why workers are not called.
        owed: By rank, the answers that workers still owe. Nothing is sent to these ranks before
            they have answered: it could change the weights that they are working on.
    """

    def __init__(self, handles: Sequence[Any]) -> None:
        """Take actors of `FlatWorker` classes; all count as healthy.

        Raises:
            ValueError: If there is none, or one is given twice.
            TypeError: If one is no actor of a `FlatWorker` class.
        """
        actors = list(handles)
        if not actors:
            raise ValueError("expected at least one actor, got none")
        ranks: dict[Any, int] = {}
        for rank, actor in enumerate(actors):
            if not isinstance(actor, ray.actor.ActorHandle) or not hasattr(actor, "call_version"):
                raise TypeError(
                    f"rank {rank}: expected an actor of a FlatWorker class, "
                    f"got {type(actor).__name__}"
                )
            first = ranks.setdefault(actor._actor_id, rank)
            if first != rank:
                raise ValueError(f"rank {rank}: expected another actor than that of rank {first}")
        self.lanes = GroupLanes(len(actors))
        self._workers: list[Worker] = [
            LaneWorker(actor, rank, self.lanes) for rank, actor in enumerate(actors)
        ]
        self.unhealthy: dict[int, Exception] = {}
        self.owed: dict[int, Answer] = {}
        self._is_shut_down = False

    def __len__(self) -> int:
        return len(self._workers)

    def __getitem__(self, rank: int) -> Worker:
        return self._workers[rank]

    def handles(self) -> dict[int, Any]:
        """Return the actors by rank."""
        return {rank: worker.handle for rank, worker in enumerate(self._workers)}

    def healthy(self) -> list[int]:
        """Return the ranks that are called."""
        return [rank for rank in range(len(self)) if rank not in self.unhealthy]

    def settle(self, deadline: Deadline) -> list[int]:
        """Wait for answers that healthy ranks owe to broken-off calls; return the healthy ranks.

        Ranks that have not answered by the ``deadline`` are late, and unhealthy.
        """
        owing = {answer: rank for rank, answer in self.owed.items() if rank not in self.unhealthy}
        while owing:
            there = wait_any(owing, deadline.end)
            for answer in there:
                del self.owed[owing.pop(answer)]
                answer.let_go()
            if not there:
                self.note(dict.fromkeys(owing.values(), late_error(deadline.timeout)))
                break
        return self.healthy()

    def close(self, arrivals: Arrivals) -> None:
        """Note the failed, late and missing answers of a round that is over, or was broken off."""
        self.lanes.done()
        for rank, answer in arrivals.unanswered.items():
            rest = answer if rank in arrivals.late else answer.abandon()
            if rest is not None:
                self.owed[rank] = rest
        arrivals.let_go()
        self.note(arrivals.failed)
        if arrivals.late:
            self.note(dict.fromkeys(arrivals.late, late_error(arrivals.deadline.timeout)))

    def note(self, failed: Mapping[int, Exception]) -> None:
        """Count ranks as unhealthy that failed for a reason of Ray's."""
        for rank, error in failed.items():
            if is_lost(error):
                if rank not in self.unhealthy:
                    _log.warning("flatweights: rank %d is left out: %s", rank, reason_of(error))
                self.unhealthy[rank] = error

    def heal(self, ranks: Iterable[int]) -> None:
        """Count ``ranks`` as healthy again."""
        for rank in ranks:
            del self.unhealthy[rank]
            _log.warning("flatweights: rank %d is back", rank)

    def to_probe(self) -> list[int]:
        """Return the unhealthy ranks that owe nothing; late answers that have come are dropped.

        None once the actors were ended.
        """
        if self._is_shut_down:
            return []
        owing = {answer: rank for rank, answer in self.owed.items() if rank in self.unhealthy}
        for answer in wait_any(owing, 0.0) if owing else ():
            del self.owed[owing[answer]]
            answer.let_go()
        return [rank for rank in sorted(self.unhealthy) if rank not in self.owed]

    def shut_down(self) -> None:
        """End all; none is called any more."""
        for worker in self._workers:
            worker.end()
        self._is_shut_down = True
        self.unhealthy = dict.fromkeys(range(len(self)), RuntimeError("the group was shut down"))
        self.owed.clear()
