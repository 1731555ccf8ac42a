"""The averages of a run: the same work in each round, on ranks and arguments that may change."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from flatweights.ray.peers._by_rank import ByRank, more_arguments
from flatweights.ray.peers._wait import RoundSpec
from flatweights.ray.peers._worker_set import WorkerSet
from flatweights.ray.results._round import Round
from flatweights.ray.rounds._barrier import average_of
from flatweights.ray.rounds._codec import check_settable
from flatweights.ray.rounds._work import Work


@dataclasses.dataclass(eq=False)
class RoundRun:
    """The arguments of `WorkerGroup.run`, which are checked.

    Attributes:
        worker_set: The workers.
        work: The work of each round.
        spec: The average.
        ranks: The ranks to call, or a function of the number of the round.
        arguments: A function of the number of the round that returns more arguments.
    """

    worker_set: WorkerSet
    work: Work
    spec: RoundSpec
    ranks: Iterable[int] | Callable[[int], Iterable[int]] | None
    arguments: ByRank | None

    def average(self, number: int) -> Round:
        """Make the average of the round ``number``, which workers can be sent."""
        work = self.work
        if self.arguments is not None:
            more = more_arguments(self.arguments, number, "round_arguments", "round")
            work = dataclasses.replace(work, args=(*work.args, *more))
        asked = self.ranks(number) if callable(self.ranks) else self.ranks
        self.worker_set.ranks.admit()
        result = average_of(self.worker_set, work, self.spec, asked)
        layout = self.worker_set.layout  # None if workers may take something else
        if layout is not None:
            check_settable(layout, work.method, result.weights, f"rank {result.used[0]}")
        return result
