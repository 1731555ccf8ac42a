"""Exchanges between nodes, without Ray: each gives the bits of the documented average."""

import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from reference import REAL, random_array

import flatweights as fw
from flatweights import FlatWeights, RunningAverage
from flatweights._sources import Template
from flatweights.ray.nodes._connections import StreamError
from flatweights.ray.nodes._node_reducer import Endpoints, NodeReducer
from flatweights.ray.nodes._plan import Plan, ReduceDType, nbytes_of
from flatweights.ray.nodes._shards import canonical, packed_bytes
from flatweights.ray.peers._by_channel import GroupChannels
from flatweights.ray.peers._result_metadata import ReadOptions, read_into
from flatweights.ray.support import _failpoints

DTYPES = [*REAL, *map(np.dtype, ("c8", "c16", "i8", "i4", "u1", "?"))]
SUMS: tuple[ReduceDType, ...] = ("float64", "float32")
READING = ReadOptions(screen=False, weigh=None)


@st.composite
def exchanges(draw: st.DrawFn) -> tuple[list[list[int]], list[float], ReduceDType, list[Any]]:
    """Groups by node, weights by rank, the dtype of sums, and a model for each rank."""
    sizes = draw(st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any))
    ranks = draw(st.permutations(range(sum(sizes))))
    groups, start = [], 0
    for size in sizes:
        groups.append(sorted(ranks[start : start + size]))
        start += size
    weight = st.sampled_from([0.0, 0.25, 1.0, 1.0, 3.0, 1e-3])
    weights = draw(st.lists(weight, min_size=len(ranks), max_size=len(ranks)).filter(any))
    sums: ReduceDType = draw(st.sampled_from(["float64", "float32"]))
    return groups, weights, sums, draw(models(len(ranks)))


@st.composite
def models(draw: st.DrawFn, count: int) -> list[Any]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    size = st.sampled_from([0, 1, 3, 15, 16, 17, 100, 1000])
    if draw(st.booleans()):  # an array; the last of its bytes fill no line of 64
        dtype = draw(st.sampled_from([dtype for dtype in DTYPES if dtype.kind not in "iub"]))
        length = draw(size)
        return [random_array(rng, length, dtype) for _ in range(count)]
    parts = draw(st.lists(st.tuples(st.sampled_from(DTYPES), size), min_size=1, max_size=6))
    by_rank: list[dict[str, NDArray[Any]]] = [
        {f"{i}": random_array(rng, length, dtype) for i, (dtype, length) in enumerate(parts)}
        for _ in range(count)
    ]
    form = draw(st.sampled_from(["FlatWeights", "dict", "list", "tree"]))
    if form == "FlatWeights":
        return [FlatWeights(model) for model in by_rank]
    if form == "list":
        return [list(model.values()) for model in by_rank]
    if form == "tree":
        return [{"b": [*model.values()], "a": {"x": model["0"]}} for model in by_rank]
    return by_rank


def plan_of(
    groups: Sequence[Sequence[int]],
    weights: Sequence[float],
    sums: ReduceDType,
    models: Sequence[Any],
) -> Plan:
    template = Template.of(canonical(models[0])[0])
    return Plan(1, template, tuple(map(tuple, groups)), dict(enumerate(weights)), sums)


def expected_of(plan: Plan, models: Sequence[Any]) -> Any:
    """The documented average, by public functions only."""
    weights = [plan.weights[rank] for rank in range(len(models))]
    groups = plan.merged_groups()
    if not groups:
        return fw.average(models, weights)
    total = RunningAverage()
    for group in groups:
        of_group = [weights[rank] for rank in group]
        one = RunningAverage()
        if plan.reduce_dtype == "float32" and len(group) > 1 and any(of_group):
            one.add(fw.average([models[rank] for rank in group], of_group), sum(of_group))
        else:
            one.add_all([models[rank] for rank in group], of_group)
        total.merge(one)
    return total.mean()


def bits(plan: Plan, model: Any) -> bytes:
    return packed_bytes(plan.template, canonical(model)[0]).tobytes()


def averaged(plan: Plan, models: Sequence[Any]) -> bytes:
    """The average that nodes compute from nothing but each other's messages."""
    packed = [packed_bytes(plan.template, canonical(model)[0]) for model in models]
    out = np.empty(nbytes_of(plan.template), np.uint8)
    if plan.template.kind.name != "ARRAY":
        out[:] = 0  # padding
    nodes = range(len(plan.groups))
    for shard in nodes:
        received = []
        for node in nodes:
            own = {rank: packed[rank] for rank in plan.groups[node]}
            sent = plan.contribution(node, shard, own)
            coming = plan.new_contribution(node, shard)
            assert [part.nbytes for part in sent] == [part.nbytes for part in coming]
            for part, there in zip(sent, coming, strict=True):
                there[:] = part
            received.append(coming)
        plan.merge(shard, received, out[plan.bounds(shard)])
    return out.tobytes()


@settings(max_examples=50)
@given(exchanges())
def test_shards_are_the_documented_average(exchange: Any) -> None:
    groups, weights, sums, models = exchange
    plan = plan_of(groups, weights, sums, models)
    assert averaged(plan, models) == bits(plan, expected_of(plan, models))


def test_few_ranks_a_node_have_the_bits_of_average() -> None:
    models = [random_array(np.random.default_rng(k), 100, np.dtype("f4")) for k in range(6)]
    for groups in ([[0, 1], [2, 3], [4, 5]], [[3, 5], [], [0], [1, 2], [4]], [[5, 0], [1]]):
        assert not plan_of(groups, [1.0] * 6, "float64", models).merged_groups(), groups
    # A sum of float32 takes twice its bytes, so from three ranks on it is sent instead.
    plan = plan_of([[0, 1, 2], [], [3, 4, 5]], [1.0] * 6, "float64", models)
    assert plan.merged_groups() == ((0, 1, 2), (3, 4, 5))
    assert sum(plan.sizes(0, 1)) < 3 * (plan.bounds(1).stop - plan.bounds(1).start)


def test_float32_sums_have_the_bytes_of_one_model_and_err_by_their_rounding() -> None:
    rng = np.random.default_rng(1)
    models = [rng.normal(size=10_001).astype(np.float32) for _ in range(8)]
    plan = plan_of([[0, 1, 2, 3], [4, 5, 6, 7]], [1.0] * 8, "float32", models)
    assert sum(plan.sizes(0, 1)) == plan.bounds(1).stop - plan.bounds(1).start
    got = np.frombuffer(averaged(plan, models), np.float32)
    exact = np.mean(np.array(models, np.float64), axis=0)
    largest = np.abs(models).max()
    np.testing.assert_allclose(got, exact, rtol=0, atol=2 * np.finfo(np.float32).eps * largest)


def test_a_node_whose_ranks_all_weigh_nothing_adds_nothing() -> None:
    models = [random_array(np.random.default_rng(k), 100, np.dtype("f4")) for k in range(4)]
    models[0][:] = np.nan
    for sums in SUMS:
        for groups in ([[0, 1], [2, 3]], [[2], [0, 1, 3]]):
            plan = plan_of(groups, [0.0, 0.0, 1.0, 2.0], sums, models)
            assert averaged(plan, models) == bits(plan, expected_of(plan, models)), (sums, groups)


# Over streams, in threads


class Ends:
    """The ends of some nodes, all in this process."""

    def __init__(self, count: int) -> None:
        self.ends = [NodeReducer(GroupChannels().offer, "127.0.0.1") for _ in range(count)]
        self.pool = ThreadPoolExecutor(count)
        self.epoch = secrets.token_bytes(16)

    def read(self, plan: Plan, models: Sequence[Any]) -> None:
        for end, group in zip(self.ends, plan.groups, strict=True):
            end.models.clear()
            for rank in group:
                assert read_into(end.models, rank, models[rank], READING).error is None

    def together(self, plan: Plan, left: float | None = 10.0) -> list[Any]:
        """Exchange; return by node the traffic or the exception."""
        endpoints = Endpoints(tuple(end.address for end in self.ends), self.epoch, left)
        futures = [
            self.pool.submit(end.stream, plan, me, endpoints) for me, end in enumerate(self.ends)
        ]
        return [future.exception() or future.result() for future in futures]

    def close(self) -> None:
        self.pool.shutdown()
        for end in self.ends:
            end.close()


@pytest.fixture
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    made = Ends(request.param)
    yield made
    made.close()


def some_model(rng: np.random.Generator, rank: int) -> FlatWeights:
    return FlatWeights(
        {
            "w": rng.normal(size=5_003).astype(np.float32),
            "half": rng.normal(size=77).astype(ml_dtypes.bfloat16),
            "n": np.int64(rank),
            "nothing": np.zeros((0, 3)),
        }
    )


@pytest.mark.parametrize("ends", [1, 2, 3, 5], indirect=True)
def test_nodes_exchange_over_streams_what_the_plan_says(ends: Ends) -> None:
    count = len(ends.ends)
    rng = np.random.default_rng(count)
    for number, sums in enumerate((*SUMS, SUMS[0]), 1):
        groups = [[*range(k, 9, count)] for k in range(count)]
        groups[-1] = [] if number == 3 and count > 1 else groups[-1]
        ranks = sorted(rank for group in groups for rank in group)
        groups = [[ranks.index(rank) for rank in group] for group in groups]
        models = [some_model(rng, rank) for rank in ranks]
        weights = [float(rank % 3) + 0.5 for rank in ranks]
        plan = plan_of(groups, weights, sums, models)._replace(number=number)
        ends.read(plan, models)
        traffic = ends.together(plan)
        expected = expected_of(plan, models)
        for me, end in enumerate(ends.ends):
            assert bits(plan, end.weights(number)) == bits(plan, expected), (number, me)
            with pytest.raises(KeyError, match=f"exchange {number + 1} is not here"):
                end.weights(number + 1)
        assert sum(one.sent for one in traffic) == sum(one.received for one in traffic)


@pytest.mark.parametrize("ends", [3], indirect=True)
def test_a_node_that_does_not_come_breaks_the_exchange_off(ends: Ends) -> None:
    models = [some_model(np.random.default_rng(k), k) for k in range(3)]
    plan = plan_of([[0], [1], [2]], [1.0] * 3, "float64", models)
    ends.read(plan, models)
    endpoints = Endpoints(tuple(end.address for end in ends.ends), ends.epoch, 0.3)
    begin = time.monotonic()
    futures = [ends.pool.submit(ends.ends[k].stream, plan, k, endpoints) for k in (0, 2)]
    for future in futures:
        assert isinstance(future.exception(), StreamError)
    assert time.monotonic() - begin < 20  # it is 0.3 s, on a machine that has time
    # The results of the ranks are still available for another exchange.
    ends.epoch = secrets.token_bytes(16)
    ends.together(plan)
    for end in ends.ends:
        assert bits(plan, end.weights(1)) == bits(plan, fw.average(models))


@pytest.mark.parametrize("ends", [2], indirect=True)
def test_models_that_are_replaced_in_an_exchange_stay_in_it(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent may get an order and the response that ends its call at once, after a delay."""
    models = [some_model(np.random.default_rng(k), k) for k in range(2)]
    plan = plan_of([[0], [1]], [1.0] * 2, "float64", models)
    ends.read(plan, models)

    both = threading.Barrier(2)

    def forget(reached: str) -> None:
        if reached == "exchanging":
            both.wait(10.0)
            for end in ends.ends:
                end.models.clear()

    monkeypatch.setattr(_failpoints, "hook", forget)
    ends.together(plan)
    for end in ends.ends:
        assert bits(plan, end.weights(1)) == bits(plan, fw.average(models))
    with pytest.raises(StreamError, match="its results are gone"):
        ends.ends[0].stream(plan, 0, Endpoints((ends.ends[0].address,), ends.epoch, 1.0))


@pytest.mark.parametrize("ends", [2], indirect=True)
def test_an_average_stays_as_it_was_when_the_next_one_is_made(ends: Ends) -> None:
    rng = np.random.default_rng(0)
    kept: list[tuple[Mapping[str, Any], bytes]] = []
    for number in (1, 2, 3):
        models = [some_model(rng, rank) for rank in range(2)]
        plan = plan_of([[0], [1]], [1.0, 1.0], "float64", models)._replace(number=number)
        ends.read(plan, models)
        ends.together(plan)
        mean = ends.ends[0].weights(number)
        assert not mean.buffer.flags.writeable
        kept.append((mean, bits(plan, mean)))
    for mean, before in kept:
        assert bits(plan, mean) == before


def test_an_end_that_is_dropped_listens_no_more() -> None:
    def threads() -> int:
        return sum(one.name == "flatweights-streams" for one in threading.enumerate())

    before = threads()
    end = NodeReducer(GroupChannels().offer, "127.0.0.1")
    address = end.address
    assert threads() == before + 1
    del end
    limit = time.monotonic() + 30
    while threads() > before:
        assert time.monotonic() < limit, f"{address} is still there"
        time.sleep(0.01)
