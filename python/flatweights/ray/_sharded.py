"""The average of what workers return, spread over actors on several nodes."""

import math
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import ray

from flatweights._average import Nonfinite, read_weights
from flatweights._sources import Template
from flatweights.ray._average import Job, Weights, _own, _references, count, late_error
from flatweights.ray._cuts import Cuts, at
from flatweights.ray._errors import WorkerError, reason_of
from flatweights.ray._metrics import METRICS
from flatweights.ray._ranges import as_kind, ranges_of
from flatweights.ray._report import report
from flatweights.ray._sharded_round import ShardedRound, ShardedWeights
from flatweights.ray._shards import ADD_UP_NODE, Outcome, RangeOwner, Reading, Sum

_MOST_OWNERS = 4  # that are tried for one range, before something else must be wrong

Key = TypeVar("Key")


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
        ranks = _references(refs)
        job = self.job(
            len(ranks), weights, timeout=timeout, min_results=min_results, nonfinite=nonfinite
        )
        found = job.run(ranks)
        report(found)
        return found

    def job(self, ranks: int, weights: Weights, **options: Any) -> "ShardedJob":
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


class ShardedJob:
    """One average: what is asked for, and what has become of the ranks.

    Attributes:
        arrivals: The results, once it runs.
    """

    def __init__(
        self,
        job: Job,
        owners: list[Any],
        new_owner: Callable[[], Any],
        per_node: bool,
        patience: float,
    ) -> None:
        """Take what was checked; ``owners`` that fail are replaced in place."""
        self._job = job
        self._owners = owners
        self._new_owner = new_owner
        self._per_node = per_node
        self._patience = patience
        self._sums: dict[tuple[int, ...], list[Any]] = {}  # by the ranks of a node
        self._quarantined: set[int] = set()
        self.arrivals: Cuts

    @property
    def reading(self) -> Reading:
        """How results are read where they lie."""
        return Reading(
            shards=0 if self._per_node else len(self._owners),
            screen=self._job.nonfinite != "propagate",
            weigh=self._job.weigh if callable(self._job.weigh) else None,
        )

    def run(self, refs: list[Any], pieces: Sequence[Sequence[Any]] | None = None) -> ShardedRound:
        """Average what ``refs`` refer to; after an error, the list has been cleared.

        Args:
            refs: One reference per rank.
            pieces: If ranks have cut their results themselves; see `Cuts`.
        """
        timeout = self._job.timeout
        self.arrivals = Cuts(
            refs,
            self.reading,
            deadline=None if timeout is None else time.monotonic() + timeout,
            patience=self._patience,
            pieces=pieces,
        )
        try:
            return self._run(len(refs))
        except BaseException as error:
            if isinstance(error, Exception):
                METRICS.count_failed_round()
            refs.clear()
            self.arrivals.let_go()
            self._sums.clear()
            raise

    def _run(self, ranks: int) -> ShardedRound:
        cuts = self.arrivals
        while cuts.wait():
            self._check(ranks)
        begin = time.monotonic()
        pieces: list[Any] | None = None
        while pieces is None:  # once more without them, if ranks were lost
            used, weights, template = self._settle(ranks)
            groups = self._groups(used) if self._per_node else []
            if groups:
                pieces = self._average_sums(groups, weights, template)
            else:
                pieces = self._average(used, weights, template)
        headers = cuts.headers
        return ShardedRound(
            ShardedWeights(template, headers[used[0]].keys, pieces),
            used,
            groups=groups,
            failed=dict(sorted(cuts.failed.items())),
            quarantined=sorted(self._quarantined),
            late=cuts.late,
            extras={k: _own(headers[k].extras) for k in used if headers[k].extras is not None},
            seconds={"wait": cuts.seconds_waited, "average": time.monotonic() - begin},
            nbytes=sum(headers[rank].nbytes for rank in used),
        )

    def _check(self, ranks: int, spoiled: Mapping[int, Exception] | None = None) -> None:
        """Raise if too few can give a result, or too few are left by the ``spoiled``."""
        failed = self.arrivals.failed
        late = self.arrivals.late
        left = ranks - len(failed) - len(late)
        if left >= self._job.need and left - len(spoiled or ()) >= self._job.need_finite:
            return
        reasons = {**failed, **(spoiled or {})}
        first = next(iter(reasons.values()), None)
        reasons |= dict.fromkeys(late, late_error(self._job.timeout))
        raise WorkerError(dict(sorted(reasons.items()))) from first

    def _settle(self, ranks: int) -> tuple[list[int], dict[int, float], Template]:
        """Return who is averaged, their weights, and what they have in common."""
        cuts = self.arrivals
        self._check(ranks)
        used = sorted(rank for rank in cuts.headers if rank not in cuts.failed)
        spoiled: dict[int, Exception] = {}
        template: Template | None = None
        for rank in used:
            header = cuts.headers[rank]
            if header.error is not None:
                raise header.error
            assert header.template is not None
            template = template or header.template
            _match(template, header.template, rank, used[0])
            if header.spoiled is not None:
                spoiled[rank] = header.spoiled
        assert template is not None
        if spoiled and self._job.nonfinite == "raise":
            raise next(iter(spoiled.values()))
        self._check(ranks, spoiled)
        cuts.lose(spoiled)
        self._quarantined |= spoiled.keys()
        used = [rank for rank in used if rank not in spoiled]
        given = self._job.weigh
        values = [cuts.headers[rank].weight if callable(given) else given[rank] for rank in used]
        checked = read_weights([value or 0.0 for value in values], len(used))
        return used, dict(zip(used, checked, strict=True)), template

    def _groups(self, used: Sequence[int]) -> list[list[int]]:
        """Return the ranks by node, nodes in the order of their lowest ranks."""
        groups: dict[str, list[int]] = {}
        for rank in used:
            groups.setdefault(self.arrivals.nodes[rank], []).append(rank)
        return list(groups.values())

    def _average(
        self, used: Sequence[int], weights: Mapping[int, float], template: Template
    ) -> list[Any] | None:
        """Return references to the ranges; None if ranks were lost, which have failed now."""
        values = [weights[rank] for rank in used]
        layouts = [r.layout for r in ranges_of(template.layout, len(self._owners))]

        def call(k: int) -> Any:
            refs = {rank: self.arrivals.pieces[rank][k] for rank in used}
            options = layouts[k], refs, values, self._job.max_inflight, self._patience
            return self._owners[k].average.options(num_returns=2).remote(*options)

        pieces, lost = self._from_owners(len(layouts), call)
        self.arrivals.lose(lost)
        return None if lost else pieces

    def _average_sums(
        self, groups: Sequence[list[int]], weights: Mapping[int, float], template: Template
    ) -> list[Any] | None:
        """As `_average`, by the sums of each node."""
        shards = len(self._owners)
        calls: dict[Any, tuple[int, ...]] = {}
        sums: dict[tuple[int, ...], list[Any]] = {}
        for group in map(tuple, groups):
            if group in self._sums:
                sums[group] = self._sums[group]
                continue
            refs = {rank: self.arrivals.refs[rank] for rank in group}
            values = [weights[rank] for rank in group]
            options = {"num_returns": 1 + shards, **at(self.arrivals.nodes[group[0]])}
            outcome, *sums[group] = ADD_UP_NODE.options(**options).remote(
                refs, values, shards, self._patience
            )
            calls[outcome] = group
        lost: dict[int, Exception] = {}
        for group, outcome in _outcomes(calls, self._patience):
            if isinstance(outcome, Exception):
                lost |= dict.fromkeys(group, outcome)
            lost |= outcome.lost if isinstance(outcome, Outcome) else {}
        self._sums = {group: found for group, found in sums.items() if not lost.keys() & group}
        if not lost:
            weighed = [Sum.of([weights[rank] for rank in group])[0] for group in sums]
            layouts = [r.layout for r in ranges_of(template.layout, shards)]

            def call(k: int) -> Any:
                refs = {group: sums[group][k] for group in sums}
                options = layouts[k], refs, weighed, self._job.max_inflight, self._patience
                return self._owners[k].merge.options(num_returns=2).remote(*options)

            pieces, without = self._from_owners(len(layouts), call)
            lost = {rank: error for group, error in without.items() for rank in group}
        self.arrivals.lose(lost)
        return None if lost else pieces

    def _from_owners(
        self, ranges: int, call: Callable[[int], Any]
    ) -> tuple[list[Any], dict[Any, Exception]]:
        """Have each range averaged by its owner, by another if that fails.

        Returns:
            References to the ranges, and what could not be fetched.

        Raises:
            RuntimeError: If several owners of a range have failed.
        """
        pieces: list[Any] = [None] * ranges
        nodes: dict[int, str] = {}
        calls: dict[Any, int] = {}
        tries = [0] * ranges

        def start(k: int) -> None:
            outcome, pieces[k] = call(k)
            calls[outcome] = k
            tries[k] += 1

        missing = set(range(ranges))
        while missing:
            for k in missing:
                start(k)
            for k, outcome in _outcomes(calls, self._patience):
                if isinstance(outcome, Outcome):
                    if outcome.lost:
                        return [], outcome.lost
                    nodes[k] = outcome.node
                    continue
                if tries[k] == _MOST_OWNERS or isinstance(outcome, ray.exceptions.RayTaskError):
                    raise RuntimeError(
                        f"range {k} of {ranges} could not be averaged, its owner failed: "
                        f"{reason_of(outcome)}"
                    ) from outcome
                ray.kill(self._owners[k])
                self._owners[k] = self._new_owner()
                start(k)
            # A node may have died after it had averaged its range.
            alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
            missing = {k for k in range(ranges) if nodes[k] not in alive}
        return pieces, {}


def _match(template: Template, other: Template, rank: int, first: int) -> None:
    """Raise unless a rank's result is such a model as the first one's."""
    if template == other:
        return
    where = f"rank {rank}"
    try:
        if template.kind is not other.kind:
            raise TypeError(f"{where}: expected {template.kind.value}, got {other.kind.value}")
        if template.packed:
            template.check_layout(other.layout, where)
            return
        # Nothing of the model is here; arrays without memory stand for it.
        slots = other.layout.slots
        arrays = [np.broadcast_to(np.zeros((), slot.dtype), slot.shape) for slot in slots]
        template.match(as_kind(other, arrays), where)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{error} (rank {first} gave what is expected)") from None


def _outcomes(calls: dict[Any, Key], patience: float) -> Iterator[tuple[Key, Outcome | Exception]]:
    """Yield what became of each of ``calls``, which may grow meanwhile, until it is empty.

    If nothing has happened for ``patience`` seconds, the rest have failed.
    """
    while calls:
        ready, _ = ray.wait(list(calls), num_returns=1, timeout=patience, fetch_local=False)
        if not ready:
            for ref in list(calls):
                yield calls.pop(ref), TimeoutError(f"nothing has happened for {patience} s")
        for ref in ready:
            key = calls.pop(ref)
            try:
                yield key, ray.get(ref)
            except ray.exceptions.RayError as error:
                yield key, error.with_traceback(None)
