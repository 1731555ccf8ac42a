"""What runs on the nodes of a `ShardedAverage`: cutting results, adding shards up."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import ray

from flatweights._average import average, read_weight
from flatweights._layout import Layout
from flatweights._running_average import RunningAverage
from flatweights._sources import Template
from flatweights._trees import Tree
from flatweights.ray._result import split
from flatweights.ray._shards import Bytes, bytes_of, canonical, cut, model_of, shards_of
from flatweights.ray._wire import nbytes_of, widen


class Header(NamedTuple):
    """What the driver is told of a rank's result.

    Attributes:
        template: What it is; dicts by sorted keys.
        containers: Those of a dict, a list or a tree, in their own order.
        weight: Its weight, if a function of the result gives that.
        extras: What was returned beside the weights.
        spoiled: The error about NaN and infinity, if it was looked for them and has any.
        nbytes: Bytes of the weights as they were returned.
        error: Why it cannot be averaged: the caller's mistake.
        node: Where it was read.
    """

    template: Template | None = None
    containers: Tree | None = None
    weight: float | None = None
    extras: Any = None
    spoiled: Exception | None = None
    nbytes: int = 0
    error: Exception | None = None
    node: str = ""


class Reading(NamedTuple):
    """How results are read.

    Attributes:
        num_shards: Into how many shards to cut one; 0: not at all.
        screen: Whether to look for NaN and infinity.
        weigh: A function of a result that gives its weight.
    """

    num_shards: int
    screen: bool
    weigh: Callable[[Any], float] | None


class Outcome(NamedTuple):
    """What became of a call.

    Attributes:
        lost: What could not be fetched, by rank or node, and why; the call has no result then.
        node: The node that it ran on.
        seconds: How long it took.
    """

    lost: dict[Any, Exception]
    node: str
    seconds: float


def read_result(result: Any, rank: int, reading: Reading) -> Any:
    """Read a result where it lies: return its `Header`, and its shards.

    Each shard is copied once: from the object store to the object store. (Dicts and lists are
    packed first, and copied twice.) Where there are fewer, the last are None.
    """
    shards: list[Any] = []
    try:
        received, extras = split(result)
        model, containers = canonical(widen(received))
        where = f"rank {rank}"
        template = Template.of(model, where)
        weight = reading.weigh and read_weight(reading.weigh(result), f"weight of {where}")
        spoiled = None
        if reading.screen:
            spoiled = template.find_nonfinite(template.read(model, where), where)
        nbytes = nbytes_of(received)
        header = Header(
            template,
            containers,
            weight,
            extras,
            spoiled,
            template.layout.nbytes if nbytes is None else nbytes,
            node=_node(),
        )
        if reading.num_shards and not spoiled:
            shards = cut(template, model, reading.num_shards)
    except Exception as error:  # of a kind that the caller is to see as it is
        header = Header(error=error.with_traceback(None))
    if not reading.num_shards:
        return header
    return (header, *shards, *[None] * (reading.num_shards - len(shards)))


def add_up_node(
    refs: Mapping[int, Any], weights: Sequence[float], num_shards: int, patience: float
) -> Any:
    """Add up the results of one node: return an `Outcome`, and the sum of each shard.

    Args:
        refs: The results, by rank, in the order in which they are added.
        weights: One for each.
        num_shards: Into how many shards to cut the sum.
        patience: Seconds to wait for a result.

    Returns:
        One object for the outcome and one for each shard: a `RunningAverage`; the shard itself, if
        it is of one rank: half as many bytes. None for what is not.
    """
    begin = time.monotonic()
    models: list[Any] = []
    lost: dict[int, Exception] = {}
    for rank, ref in refs.items():
        values = _fetch({rank: ref}, patience, lost)
        if values:
            models.append(canonical(widen(split(values.pop(rank))[0]))[0])
    sums: list[Any] = []
    if not lost:
        template = Template.of(models[0])
        rows = [cut(template, model, num_shards) for model in models]
        for r, *shards in zip(shards_of(template.layout, num_shards), *rows, strict=True):
            sums.append(shards[0] if len(shards) == 1 else _sum_of(shards, r.layout, weights))
    sums += [None] * (num_shards - len(sums))
    return (Outcome(lost, _node(), time.monotonic() - begin), *sums)


def _sum_of(shards: Sequence[Bytes], layout: Layout, weights: Sequence[float]) -> RunningAverage:
    total = RunningAverage()
    total.add_all([model_of(shard, layout) for shard in shards], weights)
    return total


class ShardOwner:
    """An actor that averages the same shard of all ranks. It keeps nothing between rounds."""

    def average(
        self,
        layout: Layout,
        refs: Mapping[int, Any],
        weights: Sequence[float],
        max_inflight: int,
        patience: float,
    ) -> tuple[Outcome, Bytes | None]:
        """Average a shard of all ranks, with the bits that `flatweights.average` gives.

        Args:
            layout: Of the shard.
            refs: It, by rank, in the order in which they are added.
            weights: One for each.
            max_inflight: How many are mapped at once.
            patience: Seconds to wait for a shard.
        """
        begin = time.monotonic()
        lost: dict[int, Exception] = {}
        running = RunningAverage()
        at = 0
        mean: Any = None
        for run in _runs(refs, max_inflight, patience, lost):
            if lost:
                continue  # to tell of all that are lost
            models = [model_of(shard, layout) for shard in run.values()]
            if len(models) == len(refs):
                mean = average(models, weights)
            else:
                running.add_all(models, weights[at : at + len(models)])
            at += len(models)
        if not lost and mean is None:
            mean = running.mean()
        outcome = Outcome(lost, _node(), time.monotonic() - begin)
        return outcome, None if lost else bytes_of(mean)

    def merge(
        self,
        layout: Layout,
        refs: Mapping[Any, Any],
        weights: Sequence[float],
        max_inflight: int,
        patience: float,
    ) -> tuple[Outcome, Bytes | None]:
        """Merge the sums that nodes have of a shard, and divide by the sum of all weights.

        Args:
            layout: Of the shard.
            refs: What `add_up_node` gave, by node, in the order in which they are merged.
            weights: Of each node's first rank: that of a shard which is of one rank alone.
            max_inflight: How many are mapped at once.
            patience: Seconds to wait for one.
        """
        begin = time.monotonic()
        lost: dict[Any, Exception] = {}
        weight_of = dict(zip(refs, weights, strict=True))
        total = RunningAverage()
        for run in _runs(refs, max_inflight, patience, lost):
            if lost:
                continue  # to tell of all that are lost
            for node, value in run.items():
                is_sum = isinstance(value, RunningAverage)
                total.merge(value if is_sum else _sum_of([value], layout, [weight_of[node]]))
        outcome = Outcome(lost, _node(), time.monotonic() - begin)
        return outcome, None if lost else bytes_of(total.mean())


def _runs(
    refs: Mapping[Any, Any], size: int, patience: float, lost: dict[Any, Exception]
) -> Iterator[dict[Any, Any]]:
    """Yield values by runs of ``size``, the next one on its way; note in ``lost`` what is not."""
    items = list(refs.items())
    for at in range(0, len(items), size):
        coming = [ref for _, ref in items[at : at + 2 * size]]
        ray.wait(coming, num_returns=len(coming), timeout=0)
        run = _fetch(dict(items[at : at + size]), patience, lost)
        yield run
        run.clear()


def _fetch(refs: Mapping[Any, Any], patience: float, lost: dict[Any, Exception]) -> dict[Any, Any]:
    """Return the values; note in ``lost`` what cannot be had, and why."""
    values: dict[Any, Any] = {}
    try:
        values = dict(zip(refs, ray.get(list(refs.values()), timeout=patience), strict=True))
    except ray.exceptions.RayError:
        for key, ref in refs.items():
            try:
                values[key] = ray.get(ref, timeout=patience)
            except ray.exceptions.RayError as error:
                lost[key] = error.with_traceback(None)
    # A shard was there when its rank was counted in. If its node died since, Ray cuts the result
    # again elsewhere; where that is gone, too, there is nothing instead of a shard.
    for key in [key for key, value in values.items() if value is None]:
        del values[key]
        lost[key] = ray.exceptions.ObjectLostError(refs[key].hex(), None, "")
    return values


def _node() -> str:
    node: str = ray.get_runtime_context().get_node_id()
    return node


# Without CPUs of their own: they run beside the workers, and never wait for room.
READ_RESULT: Any = ray.remote(num_cpus=0)(read_result)
ADD_UP_NODE: Any = ray.remote(num_cpus=0)(add_up_node)
