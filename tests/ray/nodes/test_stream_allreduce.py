"""Exchanges over streams give the bits of exchanges in one shard, without a network."""

import itertools
import secrets
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import flatweights as fw
from flatweights._sources import Template
from flatweights.ray.nodes._plan import Plan, ReduceDType
from flatweights.ray.nodes._stream_allreduce import StreamAllreduce
from flatweights.ray.nodes._streams import Streams


def plan_of(model: fw.FlatWeights, groups: tuple[tuple[int, ...], ...], sums: ReduceDType) -> Plan:
    weights = {rank: 1.0 + rank % 3 for group in groups for rank in group}
    return Plan(1, Template.of(model, "model"), groups, weights, sums)


GROUPS = (
    ((0,), (1,)),
    ((0,), (), (1,)),
    ((), (0, 1)),
    ((1, 3, 5), (0, 2), (4,)),
    ((0, 1, 2), (3, 4, 5)),
)
FEW_LARGE = ((GROUPS[3], "float64"),)  # the others are slow


@pytest.mark.parametrize(
    ("groups", "sums", "size"),
    [
        pytest.param(
            groups,
            sums,
            size,
            marks=[pytest.mark.slow] if size > 50 and (groups, sums) not in FEW_LARGE else [],
        )
        for groups in GROUPS
        for sums in ("float64", "float32")
        for size in (1, 50, 1_000_003)
    ],
)
def test_blocks_do_not_change_the_bits(
    groups: tuple[tuple[int, ...], ...], sums: ReduceDType, size: int, rng: np.random.Generator
) -> None:
    models = {
        rank: fw.FlatWeights(
            {"a": rng.normal(size=size).astype("f4"), "n": np.int64(rank), "b": rng.normal(size=3)}
        )
        for group in groups
        for rank in group
    }
    plan = plan_of(models[0], groups, sums)
    by_node = [{rank: models[rank].buffer for rank in group} for group in groups]
    expected = np.zeros_like(models[0].buffer)
    for shard in range(len(groups)):
        parts = [plan.contribution(k, shard, by_node[k]) for k in range(len(groups))]
        plan.merge(shard, parts, expected[plan.bounds(shard)])

    streams = [Streams("127.0.0.1") for _ in groups]
    peers, epoch = [each.address for each in streams], secrets.token_bytes(16)

    def exchange(me: int) -> np.typing.NDArray[np.uint8]:
        mean = np.zeros_like(expected)
        links = streams[me].open(peers, me, epoch, time.monotonic() + 60)
        StreamAllreduce(plan, me, by_node[me], mean).run(links, patience=60, end=None)
        return mean

    try:
        with ThreadPoolExecutor(len(groups)) as pool:
            for mean in pool.map(exchange, range(len(groups))):
                np.testing.assert_array_equal(mean, expected)
    finally:
        for each in streams:
            each.close()


def test_a_large_shard_has_blocks_and_a_small_one_has_not() -> None:
    groups = ((0,), (1,))
    small = plan_of(fw.FlatWeights({"a": np.zeros(100, "f4")}), groups, "float64")
    large = plan_of(fw.FlatWeights({"a": np.zeros(2_000_000, "f4")}), groups, "float64")
    assert small.in_blocks() == small
    assert large.in_blocks().blocks == 7
    shards = [large.in_blocks().bounds(k) for k in range(14)]
    assert shards[0].start == 0
    assert shards[-1].stop == 8_000_000
    assert all(a.stop == b.start for a, b in itertools.pairwise(shards))
