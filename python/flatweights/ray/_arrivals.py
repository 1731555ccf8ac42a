"""Results of ranks, taken as they arrive and handed on in the order of the ranks."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import ray


class Arrival(NamedTuple):
    """What one rank gave.

    Attributes:
        rank: The rank.
        value: What its worker returned.
    """

    rank: int
    value: Any


class Arrivals:
    """Waits for references, and hands out their values by runs of consecutive ranks.

    A value holds its object in the object store mapped, and keeps the store from dropping
    it. So at most ``max_inflight`` of them are held at once; what arrives out of turn stays
    a reference until its turn comes.

    Attributes:
        failed: By rank, what workers raised, so far.
        late: The ranks that had not answered when the time was up.
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
        self.late: list[int] = []
        self.seconds_waited = 0.0

    def wait(self) -> bool:
        """Wait for more results; return whether any came: none is left, or the time is up.

        All runs are to have been taken before.
        """
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
            self.late = sorted(rank for ref in self._pending for rank in self._ranks_of[ref])
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

    def rewind(self, without: Mapping[int, Exception]) -> None:
        """Begin anew with rank 0; what arrived is handed out again.

        Args:
            without: Ranks that count as failed from now on, and why.
        """
        self.failed.update(without)
        self._next = 0

    def one(self, rank: int) -> Any:
        """Return the value of a rank that has answered; None if it has failed or failed now."""
        if rank in self._held:
            return self._held[rank]
        try:
            return ray.get(self._refs[rank])
        except ray.exceptions.RayError as error:
            # The frames of its traceback would hold other ranks' results.
            self.failed[rank] = error.with_traceback(None)
        return None

    def any(self) -> Any:
        """Return the value of some rank, or None if there is none yet."""
        arrived = sorted(self._arrived.difference(self.failed))
        return self.one(arrived[0]) if arrived else None

    def let_go(self) -> None:
        """Hold no value and no reference any longer."""
        self._held.clear()
        self._refs.clear()
        self._ranks_of.clear()
        self._pending.clear()

    def _take(self, ready: Sequence[Any]) -> None:
        taken = set(ready)
        self._pending = [ref for ref in self._pending if ref not in taken]
        arrived = sorted((rank for ref in ready for rank in self._ranks_of[ref]), reverse=True)
        self._arrived.update(arrived)
        # To be told of a failure at once, each is looked at; not each is held. Those out of
        # turn come first: the rank whose turn it is, and so one value, is not held then.
        for rank in arrived:
            if rank >= self._next + self._max_inflight:
                self.one(rank)
                continue
            value = self.one(rank)
            if rank not in self.failed:
                self._held[rank] = value

    def _next_run(self, *, to_the_end: bool) -> list[Arrival]:
        run: list[Arrival] = []
        while self._next < len(self._refs) and len(run) < self._max_inflight:
            rank = self._next
            if rank not in self._arrived and not to_the_end:
                break
            self._next += 1
            if rank in self.failed or rank not in self._arrived:
                continue
            value = self._held.pop(rank) if rank in self._held else self.one(rank)
            if rank not in self.failed:
                run.append(Arrival(rank, value))
        return run
