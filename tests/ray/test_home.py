"""Variables that `exclude` leaves at home, in workers, members, publishers and subscribers."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import ray
from process_groups import LocalProcessGroup

from flatweights.ray import (
    CallsDifferError,
    FlatWorker,
    Member,
    Publisher,
    Subscriber,
    WorkerGroup,
    average,
)

pytestmark = pytest.mark.ray

SHARED = ("body/kernel", "body/bias")


def personal(rank: int) -> Any:
    """A model whose variables all differ from those of other ranks."""
    import keras

    layers = [keras.layers.Dense(4, name="body"), keras.layers.BatchNormalization(name="norm")]
    layers = [keras.Input((8,)), *layers, keras.layers.Dense(2, name="head")]
    model = keras.Sequential(layers)
    rng = np.random.default_rng(rank)
    for variable in model.weights:
        variable.assign(rng.standard_normal(variable.shape))
    return model


def values(model: Any) -> dict[str, Any]:
    """Copies of the variables by name, read without this package."""
    return {one.path.partition("/")[2]: one.numpy().copy() for one in model.weights}


def check(got: dict[str, Any], home: dict[str, Any], shared: dict[str, Any]) -> None:
    """Compare ``got`` with the bits of ``home``, except for the variables that are averaged."""
    for name, value in got.items():
        if name in SHARED:
            np.testing.assert_allclose(value, shared[name], rtol=1e-6, err_msg=name)
        else:
            assert value.tobytes() == home[name].tobytes(), name


def mean(*models: dict[str, Any]) -> dict[str, Any]:
    return {name: np.mean([one[name] for one in models], axis=0, dtype=float) for name in SHARED}


class Worker(FlatWorker):
    def build(self, rank: int) -> Any:
        from flatweights.tensorflow import TensorFlowVariables

        self.model = personal(rank)
        return TensorFlowVariables(self.model, exclude=["norm", "head"])

    def vector(self) -> Any:
        return self.get_flat()

    def values(self) -> Any:
        return values(self.model)


@pytest.mark.parametrize("wire", [None, pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_workers_of_a_group_average_what_is_not_at_home(wire: Any) -> None:
    with WorkerGroup.create(
        Worker, 2, arguments=lambda rank: (rank,), num_cpus=0, wire_dtype=wire
    ) as group:
        first = group.step("values")
        shared = mean(*first.values())
        for method in ("get_weights",) if wire else ("get_weights", "vector"):
            for result in group.run(2, method):
                assert result.weights is not None
            for rank, got in group.step("values").items():
                if wire:  # the average has lost bits
                    shared = {name: got[name] for name in SHARED}
                check(got, first[rank], shared)
        actors = list(group.actors().values())
        result = average([actor.get_weights.remote() for actor in actors])
        assert tuple(result.weights) == SHARED
        ray.get([actor.set_weights.remote(result.ref) for actor in actors])
        for rank, got in group.step("values").items():
            check(got, first[rank], shared)


def test_members_average_and_broadcast_what_is_not_at_home() -> None:
    from flatweights.tensorflow import TensorFlowVariables

    models = [personal(rank) for rank in range(2)]
    first = [values(model) for model in models]

    def call(member: Member) -> list[Any]:
        model = models[member.rank]
        variables = TensorFlowVariables(model, only="body")
        with member:
            member.average_variables(variables)
            averaged = values(model)
            variables.set_flat(np.full(36, float(member.rank)))
            member.broadcast_variables(variables, 1)
            broadcast = values(model)
            wrong = TensorFlowVariables(model, only=("body", "norm")[member.rank])
            with pytest.raises(CallsDifferError, match="without 'body/kernel', with 'norm/gamma'"):
                member.average_variables(wrong)
        return [averaged, broadcast]

    with ThreadPoolExecutor(2) as pool:
        replies = [*pool.map(call, LocalProcessGroup(2).join_all())]
    for home, (averaged, broadcast) in zip(first, replies, strict=True):
        check(averaged, home, mean(*first))
        check(broadcast, home, {name: np.ones_like(home[name]) for name in SHARED})


@pytest.mark.slow
def test_a_healed_member_keeps_what_its_state_leaves_at_home() -> None:
    import keras

    from flatweights.tensorflow import TensorFlowVariables

    models = [personal(rank) for rank in range(2)]
    first = [values(model) for model in models]
    optimizers = [keras.optimizers.Adam(0.1) for _ in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        x = np.ones((4, 8), np.float32) * first[0]["head/kernel"].mean()
        model.compile(optimizer, "mse")
        model.train_on_batch(x, np.ones((4, 2)))
    trained = [values(model) for model in models]
    slots = [{v.path: v.numpy().copy() for v in one.variables} for one in optimizers]

    def call(member: Member) -> None:
        rank = member.rank
        state = TensorFlowVariables([models[rank], optimizers[rank]], exclude=["head", "norm"])
        with member:
            member.lacks_state = rank == 1
            member.average({"x": np.zeros(1)}, state=state, min_results=1)

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(call, LocalProcessGroup(2).join_all())] == [None, None]
    check(values(models[1]), trained[1], trained[0])
    for variable, given in zip(optimizers[1].variables, slots[0].values(), strict=True):
        is_home = "head" in variable.path or "norm" in variable.path
        expected = slots[1][variable.path] if is_home else given
        assert variable.numpy().tobytes() == expected.tobytes(), variable.path


def test_a_subscriber_keeps_what_the_publisher_leaves_at_home() -> None:
    from flatweights.tensorflow import TensorFlowVariables

    models = [personal(rank) for rank in range(2)]
    first = [values(model) for model in models]
    learner, actor = (TensorFlowVariables(model, exclude=["norm", "head"]) for model in models)
    with Publisher("home", learner) as publisher, Subscriber("home", actor) as subscriber:
        publisher.publish()
        assert subscriber.update()
    check(values(models[1]), first[1], first[0])
