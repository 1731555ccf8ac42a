"""Results of ranks, read and cut on the nodes where they lie."""

import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import ray
from ray.experimental import get_local_object_locations
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from flatweights.ray._shards import READ_RESULT, Header, Reading

# Results that are read at once on one node: each takes a process of its own, which Ray starts.
_READERS = 2

_MOST_INLINE = 100 * 1024  # bytes of a result that travels with the reply, as Ray has it


class Cuts:
    """Waits for references, and has each result read on its node as soon as it is there.

    The driver fetches no result: of each it gets a header. So nothing is mapped here.

    Attributes:
        failed: By rank, what workers raised, or why a result could not be read.
        late: The ranks that had not answered when the time was up.
        headers: By rank, what is known of its result.
        pieces: By rank, references to its pieces.
        nodes: By rank, a node that its result lies on; empty, if it travelled inline.
        seconds_waited: How long it has waited for results and their pieces.
    """

    def __init__(
        self,
        refs: Sequence[Any],
        reading: Reading,
        *,
        deadline: float | None,
        patience: float,
        pieces: Sequence[Sequence[Any]] | None = None,
    ) -> None:
        """Take one reference per rank.

        Args:
            refs: The references.
            reading: How to read results.
            pieces: If ranks read and cut their results themselves: references to the pieces of
                each. The ``refs`` are those to the headers then.
            deadline: When to stop waiting for results, by `time.monotonic`; never, if None.
            patience: Seconds without any result read after which those being read have failed.
        """
        self.refs = list(refs)
        self._reading = reading
        self._deadline = deadline
        self._patience = patience
        self._pending: dict[Any, list[int]] = {}  # one object may be the result of several
        for rank, ref in enumerate(self.refs):
            self._pending.setdefault(ref, []).append(rank)
        self._being_read: dict[Any, int] = {}
        self._unknown: set[int] = set()  # where their results lie
        self._readers: Counter[str] = Counter()  # by node
        self._waiting: dict[str, deque[tuple[Any, int]]] = {}
        self._last = time.monotonic()
        self.failed: dict[int, Exception] = {}
        self.late: list[int] = []
        self.headers: dict[int, Header] = {}
        self._are_cut = pieces is not None
        self.pieces: dict[int, list[Any]] = {k: list(row) for k, row in enumerate(pieces or ())}
        self.nodes: dict[int, str] = {}
        self.seconds_waited = 0.0

    def wait(self) -> bool:
        """Wait for something to happen; return whether there is more to wait for."""
        begin = time.monotonic()
        refs = [*self._pending, *self._being_read]
        if not refs:
            return False
        ready, _ = ray.wait(refs, num_returns=1, timeout=self._left(begin), fetch_local=False)
        if ready and len(refs) > 1:
            ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
        for ref in ready:
            self._last = time.monotonic()
            if ref in self._being_read:
                rank = self._being_read.pop(ref)
                node = self.nodes[rank]
                self._take(ref, rank)
                self._readers[node] -= 1
                self._start(node)
            else:
                receive = self._take if self._are_cut else self._read
                for rank in self._pending.pop(ref):
                    receive(ref, rank)
        now = time.monotonic()
        if self._deadline is not None and now >= self._deadline:
            self.late += sorted(rank for ranks in self._pending.values() for rank in ranks)
            self._pending.clear()
        if not ready and self._being_read and now - self._last >= self._patience:
            error = TimeoutError(f"the result was there, but not read in {self._patience} s")
            self.failed |= dict.fromkeys(self._being_read.values(), error)
            for queue in self._waiting.values():
                self.failed |= dict.fromkeys((rank for _, rank in queue), error)
            self._being_read.clear()
            self._waiting.clear()
        self.seconds_waited += now - begin
        return True

    def lose(self, lost: dict[int, Exception]) -> None:
        """Take note that pieces of these ranks are gone, and why."""
        self.failed |= lost

    def let_go(self) -> None:
        """Hold no reference any longer."""
        self.refs.clear()
        self._pending.clear()
        self._being_read.clear()
        self._waiting.clear()
        self.pieces.clear()
        self.headers.clear()

    def _left(self, now: float) -> float | None:
        times = []
        if self._pending and self._deadline is not None:
            times.append(self._deadline - now)
        if self._being_read:
            times.append(self._last + self._patience - now)
        return max(0.0, min(times)) if times else None

    def _read(self, ref: Any, rank: int) -> None:
        """Have the result read on its node."""
        found = get_local_object_locations([ref]).get(ref, {})
        nodes, size = found.get("node_ids"), found.get("object_size")
        if nodes == []:
            # It travelled inline, if it is not lost or an error: nothing is fetched here.
            try:
                ray.get(ref, timeout=self._patience)
            except ray.exceptions.RayError as error:
                # The frames of its traceback would hold other ranks' results.
                self.failed[rank] = error.with_traceback(None)
                return
        if not nodes and (size is None or size > _MOST_INLINE):
            self._unknown.add(rank)
        node = self.nodes[rank] = min(nodes) if nodes else ""
        self._waiting.setdefault(node, deque()).append((ref, rank))
        self._start(node)

    def _start(self, node: str) -> None:
        """Begin to read what lies on ``node``, as many results as may be read at once."""
        queue = self._waiting.get(node, deque())
        while queue and self._readers[node] < _READERS:
            ref, rank = queue.popleft()
            task = READ_RESULT.options(num_returns=1 + self._reading.shards, **at(node))
            found = task.remote(ref, rank, self._reading)
            header, *self.pieces[rank] = found if self._reading.shards else [found]
            self._being_read[header] = rank
            self._readers[node] += 1

    def _take(self, ref: Any, rank: int) -> None:
        try:
            self.headers[rank] = ray.get(ref)
        except ray.exceptions.RayError as error:
            self.failed[rank] = error.with_traceback(None)
            self.pieces.pop(rank, None)
        if rank in self._unknown and rank in self.headers:
            self.nodes[rank] = self.headers[rank].node  # Ray has read it where it lies


def at(node: str, *, firmly: bool = False) -> dict[str, Any]:
    """Return the options for something to run on ``node``; anywhere, if that is empty.

    Args:
        node: Id of the node. Ray itself starts a task where most of its arguments lie.
        firmly: Whether it fails if the node is gone, instead of running elsewhere.
    """
    if not node:
        return {}
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=not firmly)}
