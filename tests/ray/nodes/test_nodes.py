"""Nodes of a cluster that die, in the middle of a round and after it: one program for all.

It checks its results against an oracle, bit for bit, and prints the values that the tests compare.
"""

import json
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import ray
from ray_cluster import LEAN, MISSED_SOON, start_lean_cluster
from ray_pool import restored
from ray_programs import output_of
from ray_workers import PlainWorker, trained, wait_for, weights_of
from reference import same_bits

import flatweights as fw
from flatweights.ray import WorkerError, WorkerGroup

pytestmark = [pytest.mark.ray(own=True), pytest.mark.starts_actors, pytest.mark.slow]

LARGE = 200_000  # elements; results beyond 100 KiB lie on the node of their worker
NODE = LEAN | {"object_store_memory": 75 * 2**20, "num_cpus": 1}


def start_cluster() -> Any:
    resources = {"home": 1, "away": 2}
    return start_lean_cluster(resources=resources, _system_config=MISSED_SOON, **NODE)


def place_actor(rank: int, **resources: float) -> Any:
    actor = ray.remote(num_cpus=0, max_restarts=-1)(PlainWorker)
    return actor.options(resources=resources).remote(rank, LARGE)


def lose_nodes() -> None:
    cluster = start_cluster()
    # Ranks 1 and 3 run on a node each, and have no room here before the last step.
    stopgap = place_actor(4, away=2)
    ray.get(stopgap.ping.remote())
    nodes = [cluster.add_node(resources={"away": 1}, **NODE) for _ in range(2)]
    cluster.wait_for_nodes()
    actors = [place_actor(k, **({"away": 0.6} if k % 2 else {"home": 0.1})) for k in range(4)]
    where_is = {node.node_id: node for node in nodes}
    nodes = [where_is[ray.get(actors[rank].node.remote())] for rank in (1, 3)]
    group = WorkerGroup(actors, max_inflight=2)
    start = weights_of(1.0, LARGE)
    assert group.broadcast(start) == [0, 1, 2, 3]
    weights = [1, 2, 4, 5]
    found = group.average("train", weights=weights)
    assert found.used == (0, 1, 2, 3)
    expected = fw.average([trained(start, rank) for rank in range(4)], weights)
    assert same_bits(found.weights.buffer, expected.buffer)
    assert group.broadcast(found) == [0, 1, 2, 3]
    for got in group.step("get_weights").values():
        assert same_bits(got.buffer, expected.buffer)
    # Results that stay on their node.
    kept = [actor.get_weights.remote() for actor in actors]
    ray.wait(kept, num_returns=4, fetch_local=False)

    # A node dies silently while its worker works.
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        lose = threading.Thread(target=lose_once_it_hangs, args=(cluster, nodes[0], where))
        lose.start()
        found = group.average("act", {1: "hang"}, folder, min_results=3)
        lose.join()
    assert found.used == (0, 2, 3), found
    assert list(found.failed) == [1]
    died = type(found.failed[1]).__name__
    expected = fw.average([trained(expected, rank) for rank in (0, 2, 3)])
    assert same_bits(found.weights.buffer, expected.buffer)
    assert group.broadcast(found) == [0, 2, 3]

    # A node dies after its worker's answer, which lay on it.
    refs = [actors[rank].train.remote() for rank in (0, 2, 3)]
    ray.wait(refs, num_returns=3, fetch_local=False)
    cluster.remove_node(nodes[1])
    last = fw.ray.average(refs, min_results=2, timeout=60)
    assert last.used == (0, 1), last
    lost = type(last.failed[2]).__name__
    third = fw.average([trained(expected, rank) for rank in (0, 2)])
    assert same_bits(last.weights.buffer, third.buffer)
    missing: list[int] = []
    try:
        fw.ray.average(kept, min_results=3, timeout=60)
    except WorkerError as error:
        missing = sorted(error.failed)
    assert group.average("get_weights", min_results=2).used == (0, 2)

    # The workers that Ray restarts on the remaining node get the weights of the others.
    group.broadcast(last)
    ray.kill(stopgap)
    while len(group.healthy_actor_ids()) < 4:
        restored(group)
    back = group.average("train")
    assert back.used == (0, 1, 2, 3)
    expected = fw.average([trained(third, rank) for rank in range(4)])
    assert same_bits(back.weights.buffer, expected.buffer)
    print(json.dumps([died, lost, missing]))
    group.shutdown()
    ray.shutdown()
    cluster.shutdown()


def lose_once_it_hangs(cluster: Any, node: Any, where: Path) -> None:
    wait_for(where / "1 trained")
    cluster.remove_node(node, allow_graceful=False)


@pytest.fixture(scope="module")
def said(way: str) -> list[Any]:
    said: list[Any] = json.loads(output_of(lose_nodes, timeout=600).splitlines()[-1])
    return said


def test_a_node_that_dies_takes_only_its_ranks_along(said: list[Any]) -> None:
    died, _, missing = said
    assert died in ("ActorDiedError", "ActorUnavailableError")
    assert missing == [1, 3], "those whose results lay on the nodes"


def test_a_result_on_a_node_that_is_gone_is_missed(said: list[Any]) -> None:
    assert said[1].startswith("Object"), "ObjectLostError or one of its kin"
