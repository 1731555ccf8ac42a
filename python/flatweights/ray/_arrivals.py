"""Results of ranks, taken as they arrive and handed on in the order of the ranks."""

import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import ray


class Arrival(NamedTuple):
    """What one rank gave.

    Attributes:
        rank: The rank.
        value: What its worker returned; of no meaning after an error.
        error: What it raised instead.
    """

    rank: int
    value: Any
    error: Exception | None = None


class Arrivals:
    """Waits for references, and hands out their values by runs of consecutive ranks.

    A value holds its object in the object store mapped, and keeps the store from dropping
    it. So at most ``max_inflight`` of them are held at once; what arrives out of turn stays
    a reference until its turn comes.

    Attributes:
        failed: By rank, what workers raised, so far.
        seconds_waited: How long it has waited for results.
    """

    def __init__(
        self, refs: Sequence[Any], *, max_inflight: int, deadline: float | None = None
    ) -> None:
        """Take one reference per rank.

        Args:
            refs: The references.
            max_inflight: How many values are held at once; at least 1.
            deadline: When to stop waiting, by `time.monotonic`; never, if None.
        """
        self._refs = list(refs)
        self._ranks_of: dict[Any, list[int]] = {}  # one object may be the result of several
        for rank, ref in enumerate(self._refs):
            self._ranks_of.setdefault(ref, []).append(rank)
        self._max_inflight = max_inflight
        self._deadline = deadline
        self._pending = list(self._ranks_of)
        self._arrived: set[int] = set()
        self._held: dict[int, Any] = {}
        self._next = 0
        self.failed: dict[int, Exception] = {}
        self.seconds_waited = 0.0

    @property
    def late(self) -> list[int]:
        """The ranks that have not answered."""
        return sorted(rank for ref in self._pending for rank in self._ranks_of[ref])

    def wait(self) -> bool:
        """Wait for more results; return whether there is any to wait for, and time."""
        if not self._pending:
            return False
        begin = time.monotonic()
        left = None if self._deadline is None else max(0.0, self._deadline - begin)
        ready, _ = ray.wait(self._pending, num_returns=1, timeout=left)
        # All that have arrived meanwhile make one run.
        if ready and len(self._pending) > 1:
            ready, _ = ray.wait(self._pending, num_returns=len(self._pending), timeout=0)
        self.seconds_waited += time.monotonic() - begin
        if not ready:
            return False
        self._take(ready)
        return True

    def runs(self, *, to_the_end: bool = False) -> Iterator[list[Arrival]]:
        """Yield runs of consecutive ranks, at most ``max_inflight`` long, as far as they go.

        Failed ranks are passed over. The caller clears each run before it asks for the next.

        Args:
            to_the_end: Pass over ranks that have not answered, too.
        """
        while run := self._next_run(to_the_end=to_the_end):
            yield run

    def let_go(self) -> None:
        """Hold no value any longer: an error that is raised keeps all that its frames see."""
        self._held.clear()

    def _take(self, ready: Sequence[Any]) -> None:
        taken = set(ready)
        self._pending = [ref for ref in self._pending if ref not in taken]
        arrived = sorted(rank for ref in ready for rank in self._ranks_of[ref])
        self._arrived.update(arrived)
        for rank in arrived:
            # To be told of a failure at once, each is looked at; not each is held.
            value = self._get(rank)
            if rank not in self.failed and rank < self._next + self._max_inflight:
                self._held[rank] = value

    def _get(self, rank: int) -> Any:
        try:
            return ray.get(self._refs[rank])
        except ray.exceptions.RayError as error:
            # The frames of its traceback would hold other ranks' results.
            self.failed[rank] = error.with_traceback(None)
        return None

    def _next_run(self, *, to_the_end: bool) -> list[Arrival]:
        run: list[Arrival] = []
        while self._next < len(self._refs) and len(run) < self._max_inflight:
            rank = self._next
            if rank not in self._arrived and not to_the_end:
                break
            self._next += 1
            if rank in self.failed or rank not in self._arrived:
                continue
            value = self._held.pop(rank) if rank in self._held else self._get(rank)
            if rank not in self.failed:
                run.append(Arrival(rank, value))
        return run
