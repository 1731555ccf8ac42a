"""The average spread over actors on several nodes, each of which owns a shard of the buffer."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import ray
from ray.experimental import get_local_object_locations
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from flatweights._average import Nonfinite, read_weights
from flatweights._sources import Template
from flatweights.ray._calls import Answer, RayAnswer, wait_any
from flatweights.ray._driver import references
from flatweights.ray._engine import (
    Arrivals,
    Deadline,
    Request,
    Weights,
    check_count,
    letting_go,
)
from flatweights.ray._errors import reason_of
from flatweights.ray._report import report
from flatweights.ray._result import copied
from flatweights.ray._round import ShardedRound, ShardedWeights
from flatweights.ray._shard_tasks import (
    ADD_UP_NODE,
    READ_RESULT,
    Header,
    Outcome,
    Reading,
    ShardOwner,
)
from flatweights.ray._shards import as_kind, shards_of

# Results that are read at once on one node: each takes a process of its own, which Ray starts.
_READERS = 2

_MOST_INLINE = 100 * 1024  # bytes of the largest result that Ray sends with the reply

_MOST_OWNERS = 4  # owners that are tried for one shard before the round raises

Key = TypeVar("Key")
Group = tuple[int, ...]  # ranks whose sum is one source of the shards


class ShardedAverage:
    """Averages results in shards, on several nodes, so that the driver holds no whole buffer.

    Each result is read and cut on the node where it lies. Each shard of the packed buffer has an
    owner, an actor that fetches its shard of every rank and averages it. The shards are of equal
    size, and their owners are placed on the nodes in turn. So each node receives and sends about as
    many bytes as its own workers returned, where a single driver would receive them all. The result
    is a `ShardedRound`, whose shards every worker fetches by itself.

    The ranks are settled before any shard is averaged: all shards are of the same ranks, added in
    their order, and have the bits that `flatweights.average` gives over `ShardedRound.used`.

    With ``per_node``, each node adds up its own results first, and sends the sums: once, instead of
    each result. They are sums and weights, never means, with the float64 (and compensation) of
    `flatweights.RunningAverage`; so they are twice the bytes of float32 or float64 and
    four times those of 16 bits. A node with one result sends that. The result has the bits of one
    `RunningAverage` for each node, ranks added in order, merged in the order of the nodes'
    lowest ranks: which depends on where ranks were, and is in `ShardedRound.groups`. Results that
    are small enough to travel inline (100 KiB) lie on no node, and count as those of one.

    If a node dies in the middle of a round, the ranks whose results lay on it have failed, for all
    shards, and its own shards are averaged elsewhere. An owner keeps nothing between rounds. If a
    node dies after the round, those of its shards that nobody has fetched are lost.

    On a single node, `flatweights.ray.average` does the same without starting actors.

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
            num_shards: Into how many shards to cut the buffer. One for each node, if None.
            per_node: Whether each node adds up its own results first.
            nodes: Ids of the nodes to place owners on, in turn. All that are alive at the first
                round, the driver's own last, if None. An owner whose node is gone is placed
                where Ray finds room.
            num_cpus: CPUs that Ray reserves for each owner; it waits where none are left. An
                owner uses so many threads, one at least.
            max_inflight: How many shards an owner maps at once.
            patience: Seconds without any progress in reading or averaging, after which the results
                that are not read yet have failed. The time that workers take does not count: see
                ``timeout`` of `average`.

        Raises:
            TypeError: If ``num_shards`` is no integer.
            ValueError: If an argument is out of range, or ``nodes`` is empty.
        """
        if num_shards is not None:
            check_count(num_shards, "num_shards")
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
        self._max_inflight = check_count(max_inflight, "max_inflight")
        self.patience = patience
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
        """Average the results that ``refs`` refer to.

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
            RuntimeError: If a shard could be averaged nowhere, or after `shutdown`.
            TypeError: As `flatweights.ray.average`.
            ValueError: As `flatweights.ray.average`.
        """
        answers = references(refs, fetch=False)
        request = self.request(
            len(answers),
            weights,
            timeout=timeout,
            min_results=min_results,
            nonfinite=nonfinite,
        )
        arrivals = Arrivals(Deadline.after(request.timeout), answers, patience=self.patience)
        result = ShardedPlan(self, arrivals, request).run()
        report(result)
        return result

    def request(self, ranks: int, weights: Weights, **options: Any) -> Request:
        """Return the checked arguments of a round of so many ranks."""
        request = Request.of(ranks, weights, max_inflight=self._max_inflight, **options)
        if self._ended:
            raise RuntimeError("this ShardedAverage was shut down")
        return request

    def shutdown(self) -> None:
        """End the owners. Rounds that there were keep their shards."""
        self._ended = True
        for owner in self._owners:
            ray.kill(owner)
        self._owners.clear()

    def __enter__(self) -> ShardedAverage:
        """Return itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Shut down."""
        self.shutdown()

    def _start(self) -> list[Any]:
        """Return the owners, which the first round starts."""
        if not self._owners:
            nodes = _nodes() if self._nodes is None else self._nodes
            num_shards = len(nodes) if self._num_shards is None else self._num_shards
            self._owners = [self._new_owner(nodes[k % len(nodes)]) for k in range(num_shards)]
        return self._owners

    def _new_owner(self, node: str = "") -> Any:
        # Firmly: Ray places actors that need nothing at random, if a node is only preferred.
        options = _at(node, firmly=True) or {"scheduling_strategy": "SPREAD"}
        owner: Any = ray.remote(ShardOwner)
        return owner.options(num_cpus=self._num_cpus, **options).remote()


def _nodes() -> list[str]:
    if not ray.is_initialized():
        ray.init()
    alive = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])
    mine = ray.get_runtime_context().get_node_id()
    return sorted(alive, key=lambda node: node == mine)


class ShardedPlan:
    """One average over shards: it assigns results to readers, and shards to owners.

    The driver fetches no result, only a header of each, so nothing is mapped here.

    Attributes:
        reading: How results are read.
    """

    def __init__(self, sharded: ShardedAverage, arrivals: Arrivals, request: Request) -> None:
        """Prepare the average; start the owners.

        Args:
            sharded: Has the owners; those that fail are replaced.
            arrivals: The results, and the headers of those that `expect` adds.
            request: The arguments of the round.
        """
        self._owners = sharded._start()
        self._new_owner = sharded._new_owner
        self._per_node = sharded._per_node
        self._patience = sharded.patience
        self._arrivals = arrivals
        self._request = request
        self.reading = Reading(
            num_shards=0 if self._per_node else len(self._owners),
            screen=request.nonfinite != "propagate",
            weigh=request.weights if callable(request.weights) else None,
        )
        # By the ranks that it is of, the shards of a result, or of a sum that a node has made.
        self._sources: dict[Group, list[Any]] = {}
        self._headers: dict[int, Header] = {}
        self._nodes: dict[int, str] = {}  # of the results; empty, if one travelled inline
        self._unknown: set[int] = set()  # where their results lie
        self._being_read: dict[int, RayAnswer] = {}
        self._readers: Counter[str] = Counter()  # by node
        self._queues: dict[str, deque[int]] = {}  # of the ranks on a node that are read later

    def expect(self, rank: int, ref: Any, *shards: Any) -> None:
        """Wait for a result, too; if there are ``shards``, the rank has cut it itself.

        Args:
            rank: The rank.
            ref: A reference to the result, or to its header.
            *shards: References to the shards.
        """
        self._arrivals.expect(rank, RayAnswer(ref, fetch=False))
        if shards:
            self._sources[rank,] = list(shards)

    def run(self) -> ShardedRound:
        """Wait, read, average; nothing is held afterwards but the references to the shards."""
        with letting_go(self.let_go, self._arrivals.let_go):
            return self._run()

    def let_go(self) -> None:
        """Hold no reference any longer."""
        self._sources.clear()
        self._being_read.clear()
        self._queues.clear()
        self._headers.clear()

    def _run(self) -> ShardedRound:
        arrivals = self._arrivals
        while (came := arrivals.wait()) is not None:
            for rank in came:
                self._receive(rank)
            for rank in [rank for rank in self._being_read if rank in arrivals.failed]:
                del self._being_read[rank]  # reading has made no progress
                arrivals.lose({k: arrivals.failed[rank] for q in self._queues.values() for k in q})
                self._queues.clear()
            arrivals.check(self._request)
        begin = time.monotonic()
        shards: list[Any] | None = None
        while shards is None:  # once more without them, if ranks were lost
            used, weights, template = self._settle()
            groups = self._groups(used)
            shards = self._average(groups, weights, template)
        headers = self._headers
        return ShardedRound(
            ShardedWeights(template, headers[used[0]].containers, shards),
            used,
            groups=groups if self._per_node else (),
            failed=dict(sorted(arrivals.failed.items())),
            quarantined=sorted(arrivals.quarantined),
            late=arrivals.late,
            extras={k: copied(headers[k].extras) for k in used if headers[k].extras is not None},
            seconds={"wait": arrivals.seconds_waited, "average": time.monotonic() - begin},
            nbytes=sum(headers[rank].nbytes for rank in used),
        )

    def _ref(self, rank: int) -> Any:
        return self._arrivals.answers[rank].ref  # type: ignore[attr-defined]

    def _receive(self, rank: int) -> None:
        """Take a header that came; have a result read on its node."""
        if rank in self._being_read:
            answer = self._being_read.pop(rank)
            node = self._nodes[rank]
            self._readers[node] -= 1
            self._take_header(rank, answer)
            self._read_more(node)
        elif (rank,) in self._sources:  # the rank has cut it
            self._take_header(rank, self._arrivals.answers[rank])
        else:
            self._read(rank)

    def _take_header(self, rank: int, answer: Any) -> None:
        try:
            self._headers[rank] = answer.take()
        except ray.exceptions.RayError as error:
            self._arrivals.lose({rank: error.with_traceback(None)})
            self._sources.pop((rank,), None)
            return
        if rank in self._unknown:
            self._nodes[rank] = self._headers[rank].node  # Ray has read it where it lies

    def _read(self, rank: int) -> None:
        ref = self._ref(rank)
        location = get_local_object_locations([ref]).get(ref, {})
        nodes, size = location.get("node_ids"), location.get("object_size")
        if nodes == []:
            # It travelled inline, if it is not lost or an error: nothing is fetched here.
            try:
                ray.get(ref, timeout=self._patience)
            except ray.exceptions.RayError as error:
                self._arrivals.lose({rank: error.with_traceback(None)})
                return
        if not nodes and (size is None or size > _MOST_INLINE):
            self._unknown.add(rank)
        node = self._nodes[rank] = min(nodes) if nodes else ""
        self._queues.setdefault(node, deque()).append(rank)
        self._read_more(node)

    def _read_more(self, node: str) -> None:
        """Start readers for results on ``node``, as many as may run at once."""
        queue = self._queues.get(node, deque())
        while queue and self._readers[node] < _READERS:
            rank = queue.popleft()
            task = READ_RESULT.options(num_returns=1 + self.reading.num_shards, **_at(node))
            refs = task.remote(self._ref(rank), rank, self.reading)
            header, *shards = [refs] if self._per_node else refs
            if shards:
                self._sources[rank,] = shards
            self._being_read[rank] = RayAnswer(header, fetch=False)
            self._arrivals.follow(rank, self._being_read[rank])
            self._readers[node] += 1

    def _settle(self) -> tuple[list[int], dict[int, float], Template]:
        """Return the ranks that are averaged, their weights, and their template."""
        arrivals, request = self._arrivals, self._request
        arrivals.check(request)
        template: Template | None = None
        first = 0
        spoiled: dict[int, Exception] = {}
        read = sorted(rank for rank in self._headers if rank not in arrivals.failed)
        for rank in read:
            header = self._headers[rank]
            if header.error is not None:
                raise header.error
            assert header.template is not None
            if template is None:
                template, first = header.template, rank
            _match(template, header.template, rank, first)
            if header.spoiled is not None:
                spoiled[rank] = header.spoiled
        assert template is not None
        if spoiled and request.nonfinite == "raise":
            raise next(iter(spoiled.values()))
        arrivals.quarantine(spoiled)
        arrivals.check(request)
        ranks = sorted(rank for rank in self._headers if rank not in arrivals.failed)
        asked = request.weights
        values = [self._headers[k].weight or 0.0 if callable(asked) else asked[k] for k in ranks]
        weights = dict(zip(ranks, read_weights(values, len(ranks)), strict=True))
        return ranks, weights, template

    def _groups(self, used: Sequence[int]) -> list[Group]:
        """Return the ranks by node, nodes in the order of their lowest ranks; else each alone."""
        groups: dict[Any, list[int]] = {}
        for rank in used:
            groups.setdefault(self._nodes[rank] if self._per_node else rank, []).append(rank)
        return list(map(tuple, groups.values()))

    def _average(
        self, groups: Sequence[Group], weights: Mapping[int, float], template: Template
    ) -> list[Any] | None:
        """Return references to the shards; None if ranks were lost, which have failed now."""
        shards: list[Any] = []
        lost = self._add_up_nodes(groups, weights)
        if not lost:
            shards, without = self._from_owners(template, groups, weights)
            lost = {rank: error for group, error in without.items() for rank in group}
        self._arrivals.lose(lost)
        return None if lost else shards

    def _add_up_nodes(
        self, groups: Sequence[Group], weights: Mapping[int, float]
    ) -> dict[int, Exception]:
        """Have nodes add up groups that are no source yet; return errors of lost ranks."""
        calls: dict[Answer, Group] = {}
        for group in groups:
            if group not in self._sources:
                refs = {rank: self._ref(rank) for rank in group}
                options = _at(self._nodes[group[0]])
                task = ADD_UP_NODE.options(num_returns=1 + len(self._owners), **options)
                outcome, *self._sources[group] = task.remote(
                    refs, weights, len(self._owners), self._patience
                )
                calls[RayAnswer(outcome, fetch=False)] = group
        lost: dict[int, Exception] = {}
        for group, outcome in _outcomes(calls, self._patience):
            without = (
                outcome.lost if isinstance(outcome, Outcome) else dict.fromkeys(group, outcome)
            )
            if without:
                del self._sources[group]
            lost |= without
        return lost

    def _from_owners(
        self, template: Template, groups: Sequence[Group], weights: Mapping[int, float]
    ) -> tuple[list[Any], dict[Group, Exception]]:
        """Have each shard averaged by its owner, by another if that fails.

        Args:
            template: Of the whole model.
            groups: Those whose sums are averaged, in order.
            weights: By rank.

        Returns:
            References to the shards, and what could not be fetched; one of the two is empty.

        Raises:
            RuntimeError: If several owners of a shard have failed.
        """
        layouts = [r.layout for r in shards_of(template.layout, len(self._owners))]
        shards: list[Any] = [None] * len(layouts)
        nodes: dict[int, str] = {}
        calls: dict[Answer, int] = {}
        tries = [0] * len(layouts)

        def start(k: int) -> None:
            call = self._owners[k].average.options(num_returns=2)
            outcome, shards[k] = call.remote(
                layouts[k],
                {group: self._sources[group][k] for group in groups},
                {group: weights[group[0]] for group in groups},
                self._request.max_inflight,
                self._patience,
                merges=self._per_node,
            )
            calls[RayAnswer(outcome, fetch=False)] = k
            tries[k] += 1

        missing = set(range(len(layouts)))
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
                        f"shard {k} of {len(layouts)} could not be averaged, its owner failed: "
                        f"{reason_of(outcome)}"
                    ) from outcome
                ray.kill(self._owners[k])
                self._owners[k] = self._new_owner()
                start(k)
            # A node may have died after it had averaged its shard.
            alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
            missing = {k for k in range(len(layouts)) if nodes[k] not in alive}
        return shards, {}


def _match(template: Template, other: Template, rank: int, first: int) -> None:
    """Raise unless the result of ``rank`` is a model like that of rank ``first``."""
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


def _outcomes(
    calls: dict[Answer, Key], patience: float
) -> Iterator[tuple[Key, Outcome | Exception]]:
    """Yield the outcome of each of ``calls``, which may grow meanwhile, until there is none left.

    If none has come for ``patience`` seconds, the rest have failed.
    """
    while calls:
        there = wait_any(calls, Deadline.after(patience).end)
        if not there:
            for answer in list(calls):
                yield calls.pop(answer), TimeoutError(f"nothing has happened for {patience} s")
        for answer in there:
            key = calls.pop(answer)
            try:
                outcome: Outcome | Exception = answer.take()
            except ray.exceptions.RayError as error:
                outcome = error.with_traceback(None)
            yield key, outcome


def _at(node: str, *, firmly: bool = False) -> dict[str, Any]:
    """Return the options for something to run on ``node``; anywhere, if that is empty.

    Args:
        node: Id of the node. Ray itself starts a task where most of its arguments lie.
        firmly: Whether it fails if the node is gone, instead of running elsewhere.
    """
    if not node:
        return {}
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=not firmly)}
