"""Rounds of `flatweights.examples.federated`, some of whose clients fail."""

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import ray
from numpy.typing import NDArray
from reference import assert_mean

from flatweights import FlatWeights
from flatweights.examples.federated import (
    Client,
    DropoutError,
    draw_clients,
    play_round,
    run_server,
    split_data,
)
from flatweights.server import FedAvg

OPTIONS = argparse.Namespace(
    clients=40,
    concentration=1.0,
    deaths=1,  # in every round
    failing=0.4,
    fraction=0.25,
    local_epochs=1,
    rounds=1,
    seed=0,
)


@pytest.fixture(scope="module")
def actor() -> Iterator[Any]:
    client = ray.remote(num_cpus=1, max_restarts=-1, max_task_retries=-1)(Client)
    actor = client.remote(OPTIONS)
    yield actor
    ray.kill(actor)


@pytest.fixture(scope="module")
def first(actor: Any) -> FlatWeights:
    return ray.get(actor.get_weights.remote()).copy()


def train_alone(
    actor: Any, weights: FlatWeights, clients: Sequence[int]
) -> list[tuple[NDArray[Any], int]]:
    """What each of ``clients`` returns in round 0: as one vector, and the size of its data."""
    sizes = [len(shard.labels) for shard in split_data(OPTIONS)[0]]
    found = []
    for client in clients:
        trained, _ = ray.get(actor.train.remote(weights, 0, client, "trains"))
        vector = np.concatenate([array.reshape(-1) for array in trained.values()])
        found.append((vector, sizes[client]))
    return found


def check(weights: FlatWeights, alone: list[tuple[NDArray[Any], int]]) -> None:
    vectors, sizes = zip(*alone, strict=True)
    assert len(set(sizes)) > 1
    result = np.concatenate([array.reshape(-1) for array in weights.values()])
    assert_mean(result, vectors, [float(size) for size in sizes])


def test_clients_that_raise_are_listed_and_left_out(actor: Any, first: FlatWeights) -> None:
    clients = [(3, "raises"), (17, "trains"), (8, "trains"), (30, "raises"), (5, "trains")]
    found = play_round([actor], first, 0, clients)
    assert list(found.failed) == [0, 3]
    assert all(isinstance(error, DropoutError) for error in found.failed.values())
    assert "client 30 is off line" in str(found.failed[3])
    assert list(found.used) == [1, 2, 4]
    check(found.weights, train_alone(actor, first, [17, 8, 5]))


def test_a_process_that_dies_takes_one_client_with_it(actor: Any, first: FlatWeights) -> None:
    drawn = draw_clients(0, OPTIONS)
    fates = [fate for _, fate in drawn]
    assert sorted(fates) == ["dies"] + ["raises"] * 3 + ["trains"] * 6
    # Some have answered before the process dies, and some wait behind it.
    assert "trains" in fates[: fates.index("dies")]
    assert "trains" in fates[fates.index("dies") :]
    before = ray.get(actor.__ray_call__.remote(lambda _: __import__("os").getpid()))
    server = FedAvg(first)
    history = run_server([actor], server, OPTIONS)
    assert ray.get(actor.__ray_call__.remote(lambda _: __import__("os").getpid())) != before
    assert (history.raised, history.died) == (3, 1)
    assert history.nbytes == 6 * first.layout.nbytes
    survivors = [client for client, fate in drawn if fate == "trains"]
    check(server.weights, train_alone(actor, first, survivors))
