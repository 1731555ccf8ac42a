"""Nodes of a cluster that die, in the middle of a round and after it: one program for all.

What it sees it checks against an oracle, bit for bit; it prints what the tests ask for.
"""

import json
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import ray
from ray_cluster import LEAN
from ray_programs import output_of
from ray_workers import PlainWorker, merged, trained, wait_for, weights_of
from reference import same_bits

import flatweights as fw
from flatweights.ray import ShardedAverage, WorkerError, WorkerGroup

pytestmark = pytest.mark.starts_actors

LARGE = 200_000  # elements; beyond 100 KiB shards lie in shared memory
NODE = LEAN | {"object_store_memory": 75 * 2**20, "num_cpus": 1}


def start_cluster() -> Any:
    from ray.cluster_utils import Cluster

    # A raylet that is killed is missed after two seconds instead of twenty.
    health = {
        "health_check_initial_delay_ms": 0,
        "health_check_period_ms": 500,
        "health_check_timeout_ms": 5000,
        "health_check_failure_threshold": 4,
    }
    head = {"resources": {"home": 1}, "_system_config": health, **NODE}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    ray.init(cluster.address, log_to_driver=False)
    return cluster


def add_nodes(cluster: Any, *places: str) -> list[Any]:
    nodes = [cluster.add_node(resources={place: 1}, **NODE) for place in places]
    cluster.wait_for_nodes()
    return nodes


def place_actor(rank: int, place: str) -> Any:
    actor = ray.remote(num_cpus=0)(PlainWorker)
    return actor.options(resources={place: 0.1}).remote(rank, LARGE)


def lose_nodes(folder: str) -> None:
    cluster = start_cluster()
    home = {rank: place_actor(rank, "home") for rank in (0, 2)}
    said = {
        "sharded": lose_nodes_of_sharded_averages(cluster, home, folder),
        "driver": lose_nodes_of_the_drivers_average(cluster, home),
    }
    print(json.dumps(said))
    ray.shutdown()
    cluster.shutdown()


def lose_nodes_of_sharded_averages(cluster: Any, home: dict[int, Any], folder: str) -> list[Any]:
    nodes = add_nodes(cluster, "away0", "away1")
    away = {1: place_actor(1, "away0"), 3: place_actor(3, "away1")}
    group = WorkerGroup([(home | away)[rank] for rank in range(4)])
    start = weights_of(1.0, LARGE)
    assert group.broadcast(start) == [0, 1, 2, 3]
    values = [trained(start, rank) for rank in range(4)]
    by_shard = ShardedAverage()  # an owner on each node
    by_node = ShardedAverage(2, per_node=True)
    weights = [1, 2, 4, 5]
    actors = group.actors().values()
    found: Any = by_shard.average([actor.train.remote() for actor in actors], weights)
    assert found.used == (0, 1, 2, 3)
    assert same_bits(found.weights.buffer, fw.average(values, weights).buffer)
    group.broadcast(start)
    found = group.average("train", sharded=by_node, weights=weights)
    assert found.groups == ((0, 2), (1,), (3,)), found.groups
    expected = merged(values, found.groups, weights)
    assert same_bits(found.weights.buffer, expected.buffer)
    kept = [actor.get_weights.remote() for actor in actors]
    ray.wait(kept, num_returns=4, fetch_local=False)

    def lose(node: Any, ranks: Sequence[int], where: Path) -> None:
        for rank in ranks:
            wait_for(where / f"{rank} trained")
        time.sleep(1)  # the others' results have been cut, or lie there to be added up
        cluster.remove_node(node, allow_graceful=False)
        (where / "go on").touch()  # rank 2 comes last

    said: list[Any] = []
    for number, sharded in enumerate((by_shard, by_node)):
        group.broadcast(start)
        where = Path(folder) / str(number)
        where.mkdir()
        called = group.healthy_actor_ids()
        thread = threading.Thread(target=lose, args=(nodes[number], called, where))
        thread.start()
        lost = [1, 3][number]
        left = tuple(rank for rank in called if rank != lost)
        found = group.average("act", {2: "hang"}, str(where), min_results=2, sharded=sharded)
        thread.join()
        assert found.used == left, found
        said.append(type(found.failed[lost]).__name__)
        groups = [left] if sharded is by_shard else found.groups
        assert groups == ([(0, 2, 3)], ((0, 2),))[number], found
        expected = merged(values, groups)
        assert same_bits(found.weights.buffer, expected.buffer)
    # With all that is left, once more; and where that is too few.
    assert group.broadcast(found) == [0, 2]
    assert group.average("get_weights", sharded=by_shard).used == (0, 2)
    try:
        by_shard.average(kept, timeout=60, min_results=3)
    except WorkerError as error:
        said.append(list(error.failed))
    for owners in (by_shard, by_node):
        owners.shutdown()
    return said


def lose_nodes_of_the_drivers_average(cluster: Any, home: dict[int, Any]) -> list[Any]:
    nodes = add_nodes(cluster, "away2", "away3")
    away = {1: place_actor(1, "away2"), 3: place_actor(3, "away3")}
    group = WorkerGroup([(home | away)[rank] for rank in range(4)], max_inflight=2)
    start = weights_of(1.0, LARGE)
    assert group.broadcast(start) == [0, 1, 2, 3]
    # In the middle of its work.
    with tempfile.TemporaryDirectory() as folder:
        remove = threading.Thread(target=lose_once_it_hangs, args=(cluster, nodes[0], Path(folder)))
        remove.start()
        found = group.average("act", {1: "hang"}, folder, min_results=3)
        remove.join()
    assert found.used == (0, 2, 3), found
    assert list(found.failed) == [1]
    died = type(found.failed[1]).__name__
    expected = fw.average([trained(start, rank) for rank in (0, 2, 3)])
    assert same_bits(found.weights.buffer, expected.buffer)
    group.broadcast(found)

    # After its answer, which lay on its node.
    handles = [group.actors()[rank] for rank in group.healthy_actor_ids()]
    refs = [handle.train.remote() for handle in handles]
    ray.wait(refs, num_returns=3, fetch_local=False)
    cluster.remove_node(nodes[1])
    time.sleep(0.5)
    last = fw.ray.average(refs, min_results=2, timeout=60)
    assert last.used == (0, 1), last
    expected = fw.average([trained(found.weights, rank) for rank in (0, 2)])
    assert same_bits(last.weights.buffer, expected.buffer)
    assert group.average("get_weights", min_results=2).used == (0, 2)
    return [died, type(last.failed[2]).__name__]


def lose_once_it_hangs(cluster: Any, node: Any, where: Path) -> None:
    wait_for(where / "1 trained")
    cluster.remove_node(node)


@pytest.fixture(scope="module")
def said(way: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = output_of(lose_nodes, str(tmp_path_factory.mktemp("nodes")), timeout=600)
    lines: dict[str, Any] = json.loads(out.splitlines()[-1])
    return lines


def test_a_node_that_dies_takes_only_its_ranks_along(said: dict[str, Any]) -> None:
    first, second, last = said["sharded"]
    assert first.startswith(("Object", "Actor")), first
    assert second.startswith(("Object", "Actor")), second
    assert last == [1, 3]


def test_a_node_that_goes_is_missed_by_the_driver(said: dict[str, Any]) -> None:
    died, lost = said["driver"]
    assert died in ("ActorDiedError", "ActorUnavailableError")
    assert lost.startswith("Object"), "ObjectLostError or one of its kin"
