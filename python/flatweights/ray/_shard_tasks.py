"""The tasks and actors that cut results and add up shards on the nodes of a `ShardedAverage`."""

from collections.abc import Callable, Iterator, Mapping
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
    """The description of a rank's result, which the driver gets in its place.

    Attributes:
        template: That of the weights; dicts by sorted keys.
        containers: Those of a dict, a list or a tree, in their own order.
        weight: Its weight, if a function of the result gives that.
        extras: The part of the result beside the weights.
        spoiled: The error about NaN or infinity, if the weights were screened and hold any.
        nbytes: Bytes of the weights as they were returned.
        error: Why it cannot be averaged, if it cannot: the caller's mistake.
        node: The node that it was read on.
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
        num_shards: Into how many shards to cut a result; with 0, it is not cut.
        screen: Whether to look for NaN and infinity in it.
        weigh: A function of a result that gives its weight.
    """

    num_shards: int
    screen: bool
    weigh: Callable[[Any], float] | None


class Outcome(NamedTuple):
    """The outcome of a task or of a call of an owner.

    Attributes:
        lost: By rank or group, why a source could not be fetched; there is no result then.
        node: The node that it ran on.
    """

    lost: dict[Any, Exception]
    node: str


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
    except Exception as error:  # the driver raises it
        header = Header(error=error.with_traceback(None))
    if not reading.num_shards:
        return header
    return (header, *shards, *[None] * (reading.num_shards - len(shards)))


def add_up_node(
    refs: Mapping[int, Any], weights: Mapping[int, float], num_shards: int, patience: float
) -> Any:
    """Add up the results of one node: return an `Outcome`, and the sum of each shard.

    Args:
        refs: The results, by rank, in the order in which they are added.
        weights: One for each.
        num_shards: Into how many shards to cut the sum.
        patience: Seconds to wait for the results.

    Returns:
        One object for the outcome and one for each shard: a `RunningAverage`; of one rank, the
        shard itself, which has half as many bytes. None for each shard that there is not.
    """
    lost: dict[int, Exception] = {}
    results = _fetch(refs, patience, lost)
    sums: list[Any] = []
    if not lost:
        models = [canonical(widen(split(result)[0]))[0] for result in results.values()]
        template = Template.of(models[0])
        rows = [cut(template, model, num_shards) for model in models]
        for r, *row in zip(shards_of(template.layout, num_shards), *rows, strict=True):
            sources = dict(zip(results, row, strict=True))
            sums.append(
                row[0] if len(row) == 1 else _added(RunningAverage(), sources, r.layout, weights)
            )
    return (Outcome(lost, _node()), *sums, *[None] * (num_shards - len(sums)))


def _added(
    total: RunningAverage,
    shards: Mapping[Any, Bytes],
    layout: Layout,
    weights: Mapping[Any, float],
) -> RunningAverage:
    """Return ``total``, to which ``shards`` were added in one pass."""
    models = [model_of(shard, layout) for shard in shards.values()]
    total.add_all(models, [weights[key] for key in shards])
    return total


class ShardOwner:
    """An actor that averages the same shard of all ranks. It keeps nothing between rounds."""

    def average(
        self,
        layout: Layout,
        refs: Mapping[Any, Any],
        weights: Mapping[Any, float],
        max_inflight: int,
        patience: float,
        *,
        merges: bool = False,
    ) -> tuple[Outcome, Bytes | None]:
        """Average a shard, with the bits that `flatweights.average` gives.

        Args:
            layout: Of the shard.
            refs: Its sources, by rank or group, in the order in which they are added.
            weights: One for each; of a group that is one rank, that of the rank.
            max_inflight: How many are mapped at once.
            patience: Seconds to wait for a source.
            merges: Whether the sources are of `add_up_node`, to be merged: the bits are those
                of their `RunningAverage` then.
        """
        lost: dict[Any, Exception] = {}
        total = RunningAverage()
        mean: Any = None
        for run in _runs(refs, max_inflight, patience, lost):
            if lost:
                continue  # to tell of all that are lost
            if merges:
                for key, value in run.items():
                    total.merge(
                        value
                        if isinstance(value, RunningAverage)
                        else _added(RunningAverage(), {key: value}, layout, weights)
                    )
            elif len(run) == len(refs):
                models = [model_of(shard, layout) for shard in run.values()]
                mean = average(models, [weights[key] for key in run])
            else:
                _added(total, run, layout, weights)
        if lost:
            return Outcome(lost, _node()), None
        return Outcome(lost, _node()), bytes_of(total.mean() if mean is None else mean)


def _runs(
    refs: Mapping[Any, Any], size: int, patience: float, lost: dict[Any, Exception]
) -> Iterator[dict[Any, Any]]:
    """Yield values by runs of ``size`` while the next run is fetched; add errors to ``lost``."""
    items = list(refs.items())
    for at in range(0, len(items), size):
        coming = [ref for _, ref in items[at : at + 2 * size]]
        ray.wait(coming, num_returns=len(coming), timeout=0)
        run = _fetch(dict(items[at : at + size]), patience, lost)
        yield run
        run.clear()


def _fetch(refs: Mapping[Any, Any], patience: float, lost: dict[Any, Exception]) -> dict[Any, Any]:
    """Return the values that can be fetched; add the errors of others to ``lost``."""
    values: dict[Any, Any] = {}
    try:
        values = dict(zip(refs, ray.get(list(refs.values()), timeout=patience), strict=True))
    except ray.exceptions.RayError:
        for key, ref in refs.items():
            try:
                values[key] = ray.get(ref, timeout=patience)
            except ray.exceptions.RayError as error:
                lost[key] = error.with_traceback(None)
    # A shard was there when its rank was counted in. If its node has died since, Ray cuts the
    # result again elsewhere; if the result is gone, too, None comes in place of the shard.
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
