"""One average that is spread over actors: who is in it, and what its ranges become."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import ray

from flatweights._average import read_weights
from flatweights._sources import Template
from flatweights.ray._average import Job, late_error, own
from flatweights.ray._cuts import Cuts, at
from flatweights.ray._errors import WorkerError, reason_of
from flatweights.ray._metrics import METRICS
from flatweights.ray._ranges import as_kind, ranges_of
from flatweights.ray._sharded_round import ShardedRound, ShardedWeights
from flatweights.ray._shards import ADD_UP_NODE, Outcome, Reading, Sum

_MOST_OWNERS = 4  # that are tried for one range, before something else must be wrong

Key = TypeVar("Key")


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
            extras={k: own(headers[k].extras) for k in used if headers[k].extras is not None},
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
