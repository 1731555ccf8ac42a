"""The average of what workers return, spread over actors on several nodes."""

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import ray

from flatweights._average import Nonfinite
from flatweights.ray._average import Job, Weights, count, references
from flatweights.ray._cuts import at
from flatweights.ray._report import report
from flatweights.ray._sharded_job import ShardedJob
from flatweights.ray._sharded_round import ShardedRound
from flatweights.ray._shards import RangeOwner


class ShardedAverage:
    """Averages results without any whole buffer in the driver: each range on a node of its own.

    Each result is read and cut on the node where it lies. Each range of the packed buffer has an
    owner, an actor, that fetches its piece of every rank and averages it; the ranges are even in
    bytes, and placed on the nodes in turn. So each node takes in and gives out about what its own
    workers returned, where one driver would take in all. What comes back is a `ShardedRound`, of
    which every worker fetches the ranges by itself.

    Who is averaged is settled before anything is: all ranges are of the same ranks, added in their
    order, and have the bits that `flatweights.average` gives over `ShardedRound.used`.

    With ``per_node``, each node adds up its own results first, and sends the sums: once, instead of
    each result. They are sums and weights, never means, with the float64 (and compensation) of
    `flatweights.RunningAverage`; so they are twice the bytes of float32 or float64 and
    four times those of 16 bits. A node with one result sends that. The result has the bits of one
    `RunningAverage` for each node, ranks added in order, merged in the order of the nodes'
    lowest ranks: which depends on where ranks were, and is in `ShardedRound.groups`. Results that
    are small enough to travel inline (100 KiB) lie on no node, and count as those of one.

    If a node dies in the middle of a round, the ranks whose results lay on it have failed, in all
    ranges; its range is averaged elsewhere. An owner keeps nothing between rounds.

    If a node dies after the round, the ranges that nobody has fetched from it are lost.

    `exchange_cost` says when which way is the cheapest. On one node, `flatweights.ray.average` is
    as good, and starts nothing.

    >>> import numpy as np
    >>> _ = ray.init(num_cpus=1, log_to_driver=False, ignore_reinit_error=True)
    >>> refs = [ray.put(np.array([1.0, 2.0])), ray.put(np.array([3.0, 6.0]))]
    >>> with ShardedAverage(2) as sharded:
    ...     sharded.average(refs).weights
    array([2., 4.])
    """

    def __init__(
        self,
        num_shards: int | None = None,
        *,
        per_node: bool = False,
        nodes: Sequence[str] | None = None,
        num_cpus: float = 0,
        max_inflight: int = 8,
        patience: float = 300.0,
    ) -> None:
        """Say how to average; the owners are started by the first round.

        Args:
            num_shards: Into how many ranges to cut the buffer. One for each node, if None.
            per_node: Whether each node adds up its own results first.
            nodes: Ids of the nodes to place owners on, in turn. All that are alive at the first
                round, the driver's own last, if None. An owner whose node is gone is placed
                where Ray finds room.
            num_cpus: What an owner is given. Ray lets it use so many threads, one at least,
                and waits where there are none left.
            max_inflight: How many pieces an owner maps at once.
            patience: Seconds without any progress in reading or averaging after which those that
                are waited for count as failed. Not for the workers: see `average`.

        Raises:
            TypeError: If ``num_shards`` is no integer.
            ValueError: If an argument is out of range, or ``nodes`` is empty.
        """
        if num_shards is not None:
            count(operator.index(num_shards), "num_shards", None)
        if nodes is not None and not list(nodes):
            raise ValueError("nodes: expected at least one id, got none")
        if not num_cpus >= 0:
            raise ValueError(f"num_cpus: expected not less than 0, got {num_cpus!r}")
        if not 0 < patience < math.inf:
            raise ValueError(f"patience: expected seconds, more than 0, got {patience!r}")
        self._num_shards = num_shards
        self._per_node = per_node
        self._nodes = None if nodes is None else list(nodes)
        self._num_cpus = num_cpus
        self._max_inflight = count(max_inflight, "max_inflight", None)
        self._patience = patience
        self._owners: list[Any] = []
        self._ended = False

    def average(
        self,
        refs: Iterable[Any],
        weights: Weights = None,
        *,
        timeout: float | None = None,
        min_results: int | None = None,
        nonfinite: Nonfinite = "raise",
    ) -> ShardedRound:
        """Average what ``refs`` refer to.

        See `flatweights.ray.average`, whose bits it gives (without ``per_node``).

        Args:
            refs: One reference per rank, to what `flatweights.ray.average` takes.
            weights: One weight per rank; or a function of what a worker returned, which is
                called on the node where that lies.
            timeout: Seconds to wait for results; for ever, if None. What has arrived by then is
                read and averaged, however long that takes.
            min_results: How many ranks make an average; all, if None. Those on a node that dies
                in the middle of the round have failed.
            nonfinite: What to do about NaN and infinity. Unless ``"propagate"``, each result
                is looked through where it lies, before anything is averaged.

        Raises:
            WorkerError: If fewer than ``min_results`` ranks can give a result.
            RuntimeError: If a range could be averaged nowhere, or after `shutdown`.
            TypeError: As `flatweights.ray.average`.
            ValueError: As `flatweights.ray.average`.
        """
        ranks = references(refs)
        job = self.job(
            len(ranks), weights, timeout=timeout, min_results=min_results, nonfinite=nonfinite
        )
        found = job.run(ranks)
        report(found)
        return found

    def job(self, ranks: int, weights: Weights, **options: Any) -> ShardedJob:
        """Check what `average` was given, for so many ranks."""
        job = Job.of(ranks, weights, max_inflight=self._max_inflight, **options)
        if self._ended:
            raise RuntimeError("this ShardedAverage was shut down")
        if not self._owners:
            self._start()
        return ShardedJob(job, self._owners, self._new_owner, self._per_node, self._patience)

    def shutdown(self) -> None:
        """End the owners. Rounds that there were keep their pieces."""
        self._ended = True
        for owner in self._owners:
            ray.kill(owner)
        self._owners.clear()

    def __enter__(self) -> "ShardedAverage":
        """Return itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Shut down."""
        self.shutdown()

    def _start(self) -> None:
        nodes = _nodes() if self._nodes is None else self._nodes
        shards = len(nodes) if self._num_shards is None else self._num_shards
        self._owners = [self._new_owner(nodes[k % len(nodes)]) for k in range(shards)]

    def _new_owner(self, node: str = "") -> Any:
        # Firmly: Ray places actors that need nothing at random, if a node is only preferred.
        options = at(node, firmly=True) or {"scheduling_strategy": "SPREAD"}
        owner: Any = ray.remote(RangeOwner)
        return owner.options(num_cpus=self._num_cpus, **options).remote()


def _nodes() -> list[str]:
    if not ray.is_initialized():
        ray.init()
    alive = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])
    mine = ray.get_runtime_context().get_node_id()
    return sorted(alive, key=lambda node: node == mine)
