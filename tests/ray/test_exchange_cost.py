"""The model of what a round costs: by hand, and against bytes counted on a cluster."""

import json
import os
from typing import Any

import numpy as np
import pytest
import ray
from bench.exchange_cost import exchange_cost
from ray_cluster import LEAN
from ray_programs import output_of
from ray_workers import PlainWorker, weights_of
from reference import same_bits

from flatweights.ray import ShardedAverage, WorkerGroup

M = 1e9
NODES = 2
LARGE = 320_000  # elements of float64: half of a model is 1.28 MB


def test_bytes_by_hand() -> None:
    # Four nodes with two workers each. Sums of float32 are twice as large.
    cost = exchange_cost(M, 8, workers_per_node=2)
    driver = cost["driver"]
    assert (driver.gathered_in, driver.gathered_out) == (6 * M, 2 * M)
    assert (driver.returned_in, driver.returned_out) == (M, 3 * M)
    assert driver.network == (6 + 3) * M
    per_node = cost["per node"]
    assert (per_node.gathered_in, per_node.gathered_out) == (6 * M, 2 * M)
    assert per_node.returned_out == 3 * M
    sharded = cost["sharded"]
    assert (sharded.gathered_in, sharded.gathered_out) == (1.5 * M, 1.5 * M)
    assert (sharded.returned_in, sharded.returned_out) == (0.75 * M, 0.75 * M)
    assert sharded.network == (6 + 3) * M
    both = cost["per node, sharded"]
    assert (both.gathered_in, both.gathered_out) == (1.5 * M, 1.5 * M)
    assert both.network == (6 + 3) * M
    # More shards than nodes: some own two of five. Fewer: some own none.
    assert exchange_cost(M, 8, workers_per_node=2, num_shards=5)["sharded"].gathered_in == (
        pytest.approx(6 * M * 2 / 5)
    )
    few = exchange_cost(M, 8, workers_per_node=2, num_shards=2)["sharded"]
    assert (few.gathered_in, few.gathered_out, few.returned_in) == (3 * M, 2 * M, M)


def test_seconds_are_those_of_the_slowest_link_and_process() -> None:
    cost = exchange_cost(M, 8, workers_per_node=2, network=1e9, memory=1e9, per_object=1e-3)
    assert cost["driver"].seconds == pytest.approx((6 + 3) + (8 + 3) + 9e-3)
    assert cost["sharded"].objects == 8 + 8 * 5 + 8
    assert cost["sharded"].seconds == pytest.approx((1.5 + 0.75) + (8 + 2) / 4 + 56e-3)
    both = exchange_cost(M, 8, workers_per_node=2, network=1e9, memory=1e9, summing=1e9)
    assert both["per node, sharded"].seconds == pytest.approx(
        (1.5 + 0.75) + (4 * 2 + 2) / 4 + 2 + both["per node, sharded"].objects * 0.3e-3
    )


def test_one_node_and_one_worker_per_node() -> None:
    for cost in exchange_cost(M, 4).values():
        assert cost.gathered_in == cost.gathered_out == cost.network == 0
    alone = exchange_cost(M, 5, workers_per_node=1)
    assert alone["per node"].gathered_in == 4 * M  # what a node has alone is sent as it is
    assert alone["per node, sharded"].summed == 0


@pytest.mark.parametrize(
    "options",
    [
        {"nbytes": 0},
        {"workers": 0},
        {"workers": 12},
        {"num_shards": 0},
        {"network": -1},
        {"wide": float("nan")},
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        exchange_cost(**({"nbytes": M, "workers": 8} | options))


def created() -> dict[str, int]:
    """By node, the bytes of all objects that were ever made in its store: copies, too."""
    from ray._private.internal_api import node_stats

    return {
        node["NodeID"]: node_stats(
            node["NodeManagerAddress"], node["NodeManagerPort"]
        ).store_stats.cumulative_created_bytes
        for node in ray.nodes()
    }


def count_bytes() -> None:
    os.environ["FLATWEIGHTS_RAY"] = "store"  # whose bytes are counted
    from ray.cluster_utils import Cluster

    node = LEAN | {"object_store_memory": 200 * 2**20, "num_cpus": 1}
    cluster = Cluster(initialize_head=True, head_node_args={"resources": {"node0": 1}, **node})
    for k in range(1, NODES):
        cluster.add_node(resources={f"node{k}": 1}, **node)
    ray.init(cluster.address, log_to_driver=False)
    cluster.wait_for_nodes()
    actor = ray.remote(num_cpus=0)(PlainWorker)
    group = WorkerGroup(
        [
            actor.options(resources={f"node{rank % NODES}": 0.1}).remote(rank, LARGE)
            for rank in range(2 * NODES)
        ]
    )
    start = weights_of(1.0, LARGE)
    nbytes = start.layout.nbytes
    ways: dict[str, Any] = {
        "driver": None,
        "per node": ShardedAverage(1, per_node=True, nodes=[home()]),
        "sharded": ShardedAverage(),
        "per node, sharded": ShardedAverage(per_node=True),
    }
    counted: dict[str, Any] = {}
    for way, sharded in ways.items():
        made = 2 * nbytes * (2 if "per node" in way else 1)
        own = {"driver": 0, "per node": nbytes}.get(way, nbytes / NODES)
        rounds = []
        for _ in range(3):  # the first one starts owners
            group.broadcast(start)
            before = created()
            found = group.average("get_weights", sharded=sharded)
            gathered = created()
            group.broadcast(found)
            returned = created()
            # Without what was made on each node itself: results or shards, sums, and the average.
            mine = {node: own * (way != "per node" or node == home()) for node in before}
            put = {node: nbytes * (way == "driver" and node == home()) for node in before}
            rounds.append(
                {
                    "in": [gathered[node] - before[node] - made - mine[node] for node in before],
                    "back": [returned[node] - gathered[node] - put[node] for node in before],
                }
            )
        for weights in group.step("get_weights").values():
            assert same_bits(weights.buffer, start.buffer), way
        # Ray now and then fetches an object twice.
        counted[way] = min(rounds[1:], key=lambda bytes_: sum(bytes_["in"] + bytes_["back"]))  # type: ignore[operator]
    print(json.dumps({"nbytes": nbytes, **counted}))
    ray.shutdown()
    cluster.shutdown()


def home() -> str:
    node: str = ray.get_runtime_context().get_node_id()
    return node


@pytest.mark.slow
def test_counted_bytes_are_those_of_the_model() -> None:
    counted = json.loads(output_of(count_bytes).splitlines()[-1])
    nbytes = counted.pop("nbytes")
    expected = exchange_cost(nbytes, 2 * NODES, workers_per_node=2)
    for way, cost in expected.items():
        got = counted[way]
        # To a thousandth of a model: headers of objects. A sum also has a pickle and weights, of
        # some kilobytes, however large the model is.
        near = nbytes / 1000 + 4096 * way.startswith("per node")
        assert max(got["in"]) == pytest.approx(cost.gathered_in, abs=near), way
        assert max(got["back"]) == pytest.approx(cost.returned_in, abs=near), way
        assert np.sum(got["in"] + got["back"]) == pytest.approx(cost.network, abs=6 * near), way
