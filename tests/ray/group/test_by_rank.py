"""Calls of some of the ranks, with arguments by rank and by round; groups as context managers."""

import functools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from ray_pool import Actors, wait_until_dead
from ray_workers import PlainWorker, weights_of
from reference import assert_same

import flatweights as fw
from flatweights import FlatWeights
from flatweights.ray import WorkerError, WorkerGroup

pytestmark = [pytest.mark.ray, pytest.mark.starts_actors]  # mostly over channels


class Adding(PlainWorker):
    """Adds a given number, and returns its arguments."""

    def add(self, *values: float) -> FlatWeights:
        self.model["w"] += sum(values)
        return self.get_weights()

    def told(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs


@pytest.fixture(scope="module")
def four(way: str, all_actors: Actors) -> Iterator[WorkerGroup]:
    with all_actors.loan() as lend:
        yield lend(Adding, 4)


@pytest.fixture
def group(four: WorkerGroup) -> WorkerGroup:
    four.broadcast(weights_of(1.0))
    return four


def added(*values: float) -> FlatWeights:
    return weights_of(1.0 + sum(values))


def test_arguments_by_rank_follow_those_of_all(group: WorkerGroup) -> None:
    expected = {rank: ((1, rank, 10 * rank), {"x": 2}) for rank in range(4)}
    assert group.step("told", 1, arguments=lambda rank: (rank, 10 * rank), x=2) == expected
    found = group.average("add", 0.5, arguments=lambda rank: [rank])
    assert_same(found.weights, fw.average([added(0.5, rank) for rank in range(4)]))
    (found,) = group.run(1, "add", arguments=lambda rank: [rank])
    twice = [added(0.5, rank, rank) for rank in range(4)]
    assert_same(found.weights, fw.average(twice))
    told = group.step("told", arguments=lambda rank: [np.full(50_000, rank)])
    for rank, ((array,), _) in told.items():
        assert array.tolist() == [rank] * 50_000


def test_only_ranks_that_are_asked_are_called_and_others_get_the_weights_later(
    group: WorkerGroup,
) -> None:
    found = group.average("add", arguments=lambda rank: [rank], ranks=[3, 1])
    assert (found.used, found.failed, found.late) == ((1, 3), {}, ())
    assert_same(found.weights, fw.average([added(1), added(3)]))
    assert sorted(group.step("told", ranks=(2,))) == [2]
    for rank, weights in group.step("get_weights").items():
        assert_same(weights, added(rank if rank in (1, 3) else 0))
    found = group.average("add", 1.0, broadcast=weights_of(5.0), ranks=[0, 2])
    assert_same(found.weights, weights_of(6.0))
    assert_same(group.average("add", 2.0, ranks=[1, 2]).weights, weights_of(7.5))
    assert group.healthy_actor_ids() == [0, 1, 2, 3]
    given = [6.0, 7.0, 8.0, 5.0]
    for rank, weights in group.step("get_weights").items():
        assert_same(weights, weights_of(given[rank]))


def test_only_ranks_that_were_asked_are_missed(group: WorkerGroup) -> None:
    group._worker_set.ranks[0].why = TimeoutError("away")
    found = group.average("add", 1.0, ranks=[1, 2], min_results=2)
    assert (found.used, found.failed) == ((1, 2), {})
    assert list(group.average("add", 1.0, ranks=[0, 2], min_results=1).failed) == [0]
    with pytest.raises(WorkerError, match=r"^rank 0: TimeoutError: away$"):
        group.average("add", 1.0, ranks=[0])
    assert group.restore(timeout=60) == [0]


def test_run_takes_functions_of_the_round(group: WorkerGroup) -> None:
    told: list[int] = []

    def sample(number: int) -> list[int]:
        told.append(number)
        return [number % 4, (number + 1) % 4]

    rounds = group.run(
        3,
        "add",
        0.25,
        ranks=sample,
        arguments=lambda rank: [rank],
        round_arguments=lambda number: [100.0 * number],
    )
    value = 1.0
    for number, found in enumerate(rounds, 1):
        asked = sorted([number % 4, (number + 1) % 4])
        assert found.used == tuple(asked)
        each = [weights_of(value + 0.25 + 100 * number + rank) for rank in asked]
        assert_same(found.weights, fw.average(each))
        value = float(found.weights["w"][0])
        for weights in group.step("get_weights").values():
            assert_same(weights, found.weights)
    assert told == [1, 2, 3]


def test_wrong_ranks_and_arguments_are_refused_before_a_call(group: WorkerGroup) -> None:
    def fail(rank: int) -> Any:
        if rank == 2:
            raise LookupError("no argument")
        return [9.0]

    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"ranks": [4]}, ValueError, r"ranks: expected some of 0 to 3, got \[4\]"),
        ({"ranks": [-1, 0]}, ValueError, r"ranks: expected some of 0 to 3, got \[-1, 0\]"),
        ({"ranks": []}, ValueError, r"ranks: expected some of 0 to 3, got \[\]"),
        ({"ranks": [1, 0, 1]}, ValueError, r"ranks: expected each once, got \[0, 1, 1\]"),
        ({"ranks": [0.5]}, TypeError, "integer"),
        ({"arguments": [1]}, TypeError, "arguments: expected a function of the rank"),
        ({"arguments": lambda rank: rank}, TypeError, "returns a sequence, such as .*, got int"),
        ({"ranks": 1}, TypeError, "ranks: expected a list of integers, got 1"),
        ({"arguments": fail}, LookupError, "no argument"),
    ]
    for options, kind, text in wrong:
        with pytest.raises(kind, match=text):
            group.step("add", **options)
        with pytest.raises(kind, match=text):
            group.average("add", broadcast=weights_of(3.0), **options)
        with pytest.raises(kind, match=text):
            list(group.run(1, "add", **options))
    actors, held = list(group.actors().values()), Holder()
    calls: list[Callable[[], Any]] = [
        lambda: group.broadcast(held),
        lambda: group.step("add", 1.0, broadcast=held),
        lambda: group.average("add", 1.0, broadcast=held),
        lambda: WorkerGroup(actors, initial=held),
        lambda: WorkerGroup.create(PlainWorker, 1, initial=held),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=r"got Holder; pass TensorFlowVariables\(model\)\.get"):
            call()
    with pytest.raises(ValueError, match="initial: expected 'lowest', weights or None, got 'x'"):
        WorkerGroup(actors, initial="x")
    average: Any = group.average
    with pytest.raises(
        ValueError, match="payload_kind: expected 'weights' or 'gradients', got 'gra"
    ):
        average("add", payload_kind="gradient")
    with pytest.raises(ValueError, match="rounds: expected at least 0, got -1"):
        group.run(-1, "add")
    function: Any
    for function in ([1], lambda number: number):
        with pytest.raises(TypeError, match="round_arguments: expected a function"):
            list(group.run(1, "add", round_arguments=function))
    for weights in group.step("get_weights").values():
        assert_same(weights, weights_of(1.0))


def test_wrong_options_are_refused_before_a_call(group: WorkerGroup) -> None:
    untyped: Any = group
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"weights": [1, 2]}, ValueError, "expected 4 weights, one per source, got 2"),
        ({"weights": [0, 0, 0, 0]}, ValueError, "positive weight"),
        ({"weights": [1, -1, 1, 1]}, ValueError, "weight 1: expected a finite weight"),
        ({"min_results": 5}, ValueError, "min_results: expected 1 to 4"),
        ({"min_results": 0}, ValueError, "min_results: expected 1 to 4"),
        ({"min_results": 3, "ranks": [0, 1]}, ValueError, "expected 1 to 2, the number of ranks"),
        ({"min_results": 1.5}, TypeError, r"min_results: expected an integer, got 1\.5"),
        ({"nonfinite": "ignore"}, ValueError, "nonfinite: expected"),
        ({"method": None}, TypeError, "method: expected a name, got None"),
        ({"method": 3}, TypeError, "method: expected a name, got 3"),
    ]
    for options, kind, text in wrong:
        with pytest.raises(kind, match=text):
            untyped.average(**{"method": "train", "broadcast": weights_of(9.0)} | options)
        with pytest.raises(kind, match=text):
            list(untyped.run(1, **{"method": "train"} | options))
    with pytest.raises(TypeError, match="method: expected a name, got None"):
        untyped.step(None)
    with pytest.raises(TypeError, match=r"rounds: expected an integer, got 2\.5"):
        untyped.run(2.5, "add")
    average: Any = fw.ray.average
    for timeout in (float("nan"), -1, "2"):
        calls: list[Callable[..., Any]] = [
            functools.partial(untyped.step, "train"),
            functools.partial(untyped.average, "train"),
            functools.partial(untyped.broadcast, weights_of(7.0)),
            untyped.restore,
            functools.partial(untyped.run, 1, "train"),
            functools.partial(average, [ray.put(np.zeros(2))]),
        ]
        for call in calls:
            with pytest.raises((TypeError, ValueError), match="timeout: expected seconds"):
                call(timeout=timeout)
    for weights in group.step("get_weights").values():
        assert_same(weights, weights_of(1.0))


class Holder:
    """As a model of Keras has it."""

    def get_weights(self) -> list[Any]:
        return []


# A group ends with its block.


def test_a_group_ends_with_its_block(way: str) -> None:
    processes: list[psutil.Process] = []

    def use(group: WorkerGroup) -> None:
        with group:
            processes.extend(map(psutil.Process, group.step("pid").values()))
            raise LookupError("in the block")

    group = WorkerGroup.create(PlainWorker, 1, num_cpus=0)
    with pytest.raises(LookupError, match="in the block"):
        use(group)
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert (len(processes), alive) == (1, [])
    with pytest.raises(RuntimeError, match="the group was shut down"):
        group.step("pid")


def test_a_group_that_cannot_be_made_leaves_no_actor(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []

    def fail(actors: list[Any], *_: Any) -> None:
        started.extend(actors)
        raise LookupError("not made")

    monkeypatch.setattr("flatweights.ray._group.WorkerSet", fail)
    with pytest.raises(LookupError, match="not made"):
        WorkerGroup.create(PlainWorker, 1, num_cpus=0)
    assert len(started) == 1
    for actor in started:
        wait_until_dead(actor)


def test_a_group_is_not_pickled_and_says_what_to_pass(group: WorkerGroup) -> None:
    actors = list(group.actors().values())
    for dumps in (pickle.dumps, ray.cloudpickle.dumps):
        with pytest.raises(TypeError, match=r"pass list\(group\.actors\(\)\.values\(\)\)"):
            dumps(group)

    def average(actors: list[Any]) -> Any:
        return WorkerGroup(actors).average("add", 1.0).used

    elsewhere: Any = ray.remote(num_cpus=0)(average)
    assert ray.get(elsewhere.remote(actors)) == (0, 1, 2, 3)


def test_a_group_says_how_it_is(group: WorkerGroup, way: str) -> None:
    actors = list(group.actors().values())
    fresh = WorkerGroup(actors)
    assert repr(fresh).startswith("<WorkerGroup of 4 ranks, 4 healthy, 0 rounds")
    for _ in range(3):
        fresh.average("add", 1.0)
    fresh._worker_set.ranks[2].why = TimeoutError("away")
    expected = f"<WorkerGroup of 4 ranks, 3 healthy (2: TimeoutError), 3 rounds, {way}>"
    for _ in range(200):  # until all have attached
        if repr(fresh) == expected:
            return
        fresh.step("ping")
    raise AssertionError(repr(fresh))
