"""Processes that average or get published weights draw random numbers of their own."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import ray
from process_groups import LocalProcessGroup

import flatweights as fw
from flatweights.ray import FlatWorker, Member, Publisher, Subscriber, WorkerGroup, average

pytestmark = pytest.mark.ray


def noisy(seed: int) -> Any:
    import keras

    noise = [keras.layers.Dropout(0.5, seed=seed), keras.layers.GaussianNoise(1.0, seed=seed)]
    ones = keras.initializers.Constant(1.0 + seed)
    dense = keras.layers.Dense(1, kernel_initializer=ones)
    return keras.Sequential([keras.Input((64,)), *noise, dense])


class Worker(FlatWorker):
    def build(self, rank: int) -> Any:
        self.model = noisy(rank)
        return self.model

    def vector(self) -> Any:
        return self.get_flat()

    def state(self) -> tuple[list[int], float]:
        seeds = [int(v.numpy()[0]) for v in self.model.variables if "seed" in v.path]
        return seeds, float(self.model.layers[-1].kernel.numpy()[0, 0])


@pytest.mark.parametrize("wire", [None, pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_workers_of_a_group_keep_their_seeds(wire: Any) -> None:
    with WorkerGroup.create(
        Worker, 2, arguments=lambda rank: (rank,), num_cpus=0, wire_dtype=wire
    ) as group:
        for method in ("get_weights",) if wire else ("get_weights", "vector"):
            for _ in group.run(2, method):
                pass
            assert group.step("state") == {0: ([0, 0], 1.5), 1: ([1, 1], 1.5)}, method
        actors = list(group.actors().values())
        given = group.step("get_weights")[0]
        given["dense/kernel"][:] = 3.0
        assert group.broadcast(given) == [0, 1]
        assert group.step("state") == {0: ([0, 0], 3.0), 1: ([1, 1], 3.0)}
        mean = average([actor.get_weights.remote() for actor in actors])
        ray.get([actor.set_weights.remote(mean.ref) for actor in actors])
        assert group.step("state") == {0: ([0, 0], 3.0), 1: ([1, 1], 3.0)}


def test_members_keep_their_seeds_and_a_healed_one_gets_the_donors() -> None:
    from flatweights.tensorflow import TensorFlowVariables

    models = [TensorFlowVariables(noisy(rank)) for rank in range(2)]

    def call(member: Member) -> list[Any]:
        variables = models[member.rank]

        def state() -> Any:
            weights = variables.get_weights()
            seeds = [int(weights[name][0]) for name in variables.seed_names]
            return seeds, float(weights["dense/kernel"][0, 0])

        states = []
        with member:
            member.average_variables(variables)
            states.append(state())
            variables.set_weights({"dense/kernel": np.full((64, 1), 7.0 + member.rank)})
            member.broadcast_variables(variables, 1)
            states.append(state())
            member.lacks_state = member.rank == 1
            part = {"x": np.zeros(1)}
            member.average(part, state=variables, min_results=1)
            states.append(state())
        return states

    with ThreadPoolExecutor(2) as pool:
        replies = [*pool.map(call, LocalProcessGroup(2).join_all())]
    assert replies[0] == [([0, 0], 1.5), ([0, 0], 8.0), ([0, 0], 8.0)]
    assert replies[1] == [([1, 1], 1.5), ([1, 1], 8.0), ([0, 0], 8.0)]


def test_subscribers_keep_their_seeds() -> None:
    from flatweights.tensorflow import TensorFlowVariables

    learner, actor = (TensorFlowVariables(noisy(seed)) for seed in (3, 4))
    with Publisher("seeds", learner) as publisher, Subscriber("seeds", actor) as subscriber:
        publisher.publish()
        assert subscriber.update()
        assert isinstance(subscriber.read(), fw.FlatWeights)
    weights = actor.get_weights()
    assert [int(weights[name][0]) for name in actor.seed_names] == [4, 4]
    assert weights["dense/kernel"][0, 0] == 4.0
