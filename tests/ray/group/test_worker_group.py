"""`WorkerGroup`: actors that are called together, healthy or not."""

import gc
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from ray_pool import Actors, Lend, only_late, restored
from ray_workers import POISON, PlainWorker, trained, weights_of
from reference import assert_same, refuses, same_bits

import flatweights as fw
from flatweights import FlatWeights
from flatweights.ray import (
    FlatWorker,
    RefusedWeightsError,
    Round,
    StaleWorkerError,
    WorkerError,
    WorkerGroup,
)
from flatweights.ray.peers._actor_spec import ActorSpec
from flatweights.ray.peers._shared_actor import actor_class
from flatweights.server import FedAvgM

pytestmark = pytest.mark.ray

SMALL, LARGE = 5, 40_000  # elements; beyond 100 KiB weights lie in shared memory
SIZES = [pytest.param(SMALL, id="inline", marks=pytest.mark.slow), pytest.param(LARGE, id="shared")]

Make = Callable[..., WorkerGroup]


@pytest.fixture
def make(way: str, lend: Lend) -> Make:
    """Make a group of workers that know their rank, and that Ray restarts."""
    restarted = {"max_restarts": -1}
    return lambda n=3, size=SMALL, **options: lend(PlainWorker, n, size, **restarted | options)


@pytest.fixture(scope="module")
def three(way: str, all_actors: Actors) -> Iterator[WorkerGroup]:
    with all_actors.loan() as lend:
        yield lend(PlainWorker, 3, max_restarts=-1)


@pytest.fixture
def group(three: WorkerGroup) -> WorkerGroup:
    """Three workers that several tests share, which leave them healthy, with any weights."""
    three.broadcast(weights_of(0.0))  # another group may have sent others
    assert len(three.step("forget_calls")) == 3
    return three


def mean_of(before: FlatWeights, ranks: Any, weights: Any = None, step: float = 1.0) -> FlatWeights:
    return fw.average([trained(before, rank, step) for rank in ranks], weights)


def assert_all_have(group: WorkerGroup, expected: FlatWeights) -> None:
    for weights in group.step("get_weights").values():
        assert_same(weights, expected)


def test_create_passes_options_and_arguments_on() -> None:
    group = WorkerGroup.create(
        PlainWorker,
        2,
        7,
        arguments=lambda rank: (10 + rank,),
        num_cpus=0,
        name=None,
        max_restarts=3,
        resources={},
    )
    sizes = {rank: weights["w"].size for rank, weights in group.step("get_weights").items()}
    assert sizes == {0: 10, 1: 11}
    assert list(group.actors()) == [0, 1]
    group.shutdown()
    group = WorkerGroup.create(ray.remote(num_cpus=0)(PlainWorker), 1, 7)  # an actor already
    assert group.broadcast(weights_of(1.0)) == [0]
    group.shutdown()


class Restartable(PlainWorker):
    def __init__(self, shared: Any, rank: int, own: Any) -> None:
        super().__init__(rank)
        self.sums = float(shared.sum()), float(own.sum())

    def both_sums(self) -> tuple[float, float]:
        return self.sums


@pytest.mark.slow
def test_a_restart_has_the_large_arguments_too() -> None:
    size = 50_000  # so many that Ray puts them into the object store
    group = WorkerGroup.create(
        Restartable,
        2,
        np.full(size, 2.0),
        arguments=lambda rank: (rank, np.full(size, float(rank))),
        num_cpus=0,
        max_restarts=1,
    )
    assert group.step("both_sums") == {0: (2 * size, 0), 1: (2 * size, size)}
    group.broadcast(weights_of(1.0))
    process = psutil.Process(group.step("pid")[1])
    time.sleep(1)  # until then Ray keeps arguments by itself
    kill(group, 1, no_restart=False)
    process.wait(60)
    group.step("ping")
    restored(group)
    assert group.step("both_sums") == {0: (2 * size, 0), 1: (2 * size, size)}
    group.shutdown()


@pytest.fixture
def passed_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[ActorSpec], list[tuple[Any, ...]]]:
    """Returns the arguments that Ray gets for the actors of two ranks, which are not started."""

    def note(remote: Any, args: tuple[Any, ...], **options: Any) -> tuple[Any, ...]:
        return args

    monkeypatch.setattr(ray.actor.ActorClass, "_remote", note)
    return lambda spec: spec.start(range(2))


def test_large_arguments_are_passed_by_reference_to_actors_that_ray_restarts(
    passed_by: Callable[[ActorSpec], list[tuple[Any, ...]]],
) -> None:
    decorated: dict[str, Any]
    for decorated, options, restarts in (
        ({}, {}, False),
        ({}, {"max_restarts": -1}, True),
        ({"max_restarts": -1}, {}, True),
        ({"max_restarts": -1}, {"num_cpus": 0}, True),
        ({"max_restarts": -1}, {"max_restarts": 0}, False),
        ({"max_restarts": 0}, {"max_restarts": 1}, True),
    ):
        remote = ray.remote(num_gpus=0, **decorated)(PlainWorker)
        spec = ActorSpec(remote, [np.ones(LARGE), 5], lambda rank: [np.ones(LARGE)], options)
        for passed in passed_by(spec):
            are_references = [isinstance(one, ray.ObjectRef) for one in passed]
            assert are_references == [restarts, False, restarts], (decorated, options)
    # So are small ones that are large together: Ray takes 10 MB by value, and loses the rest.
    part = np.ones(10_000)  # 80 kB
    remote, options = ray.remote(PlainWorker), {"max_restarts": -1}
    for count, other in ((10, 10), (40, 40), (0, 80), (80, 0)):

        def own(rank: int, parts: Sequence[Any] = [part] * other) -> list[Any]:
            return [*parts, rank]

        spec = ActorSpec(remote, [part] * count, own, options)
        for rank, passed in enumerate(passed_by(spec)):
            by_value = [one for one in passed if not isinstance(one, ray.ObjectRef)]
            assert by_value.pop() == rank
            assert len(by_value) == min(count + other, (4 << 20) // part.nbytes)
            assert len(passed) == count + other + 1
    refs = [ray.put(0)] * 20_000  # which travel as they are
    assert passed_by(ActorSpec(remote, refs, None, options)) == [tuple(refs)] * 2


def test_what_arguments_refer_to_is_kept_no_longer_than_they_are(
    request: pytest.FixtureRequest,
) -> None:
    counts = ray._private.worker.global_worker.core_worker.get_all_reference_counts
    actor = ray.remote(num_cpus=0)(PlainWorker).remote(0)
    process = psutil.Process(ray.get(actor.pid.remote()))
    ref = ray.put(np.ones(LARGE))
    passed_by = request.getfixturevalue("passed_by")  # from now on, no actor starts
    gc.collect()  # of other tests
    before = counts()
    spec = ActorSpec(ray.remote(PlainWorker), [[ref, actor]], None, {"max_restarts": -1})
    assert passed_by(spec) == [([ref, actor],)] * 2
    assert counts() == before
    del actor, spec
    process.wait(60)


def test_create_refuses_what_is_no_worker() -> None:
    with pytest.raises(
        TypeError, match="worker: expected a subclass of FlatWorker, got <class 'dict'>"
    ):
        WorkerGroup.create(dict, 2)
    with pytest.raises(TypeError, match="worker: expected a subclass of FlatWorker"):
        WorkerGroup.create(ray.remote(dict), 1)
    with pytest.raises(ValueError, match="n: expected at least 1, got 0"):
        WorkerGroup.create(PlainWorker, 0)
    with pytest.raises(ValueError, match="max_inflight: expected at least 1, got 0"):
        WorkerGroup.create(PlainWorker, 1, max_inflight=0, num_cpus=0)
    for _ in range(2):
        with pytest.raises(ValueError, match="no_such_option"):
            WorkerGroup.create(PlainWorker, 1, no_such_option=1)
        made = PlainWorker.__subclasses__()  # Ray keeps each class of actors that it makes
    with pytest.raises(ValueError, match="no_such_option"):
        WorkerGroup.create(PlainWorker, 1, no_such_option=1)
    assert PlainWorker.__subclasses__() == made


def test_groups_of_a_class_that_has_changed_get_it_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Changes(FlatWorker):
        rate = 0.1

    first = actor_class(Changes)
    assert actor_class(Changes) is first
    Changes.rate = 0.2
    second = actor_class(Changes)
    assert second is not first
    assert actor_class(Changes) is second
    before = actor_class(PlainWorker)  # pickled by its name
    monkeypatch.setattr(PlainWorker, "another", lambda self: None, raising=False)
    assert actor_class(PlainWorker) is not before
    Changes.held = threading.Lock()  # type: ignore[attr-defined]
    assert actor_class(Changes).__ray_actor_class__ is Changes


@ray.remote(num_cpus=0)
class Stranger:
    def ping(self) -> None: ...


def test_a_group_is_of_flat_workers() -> None:
    with pytest.raises(ValueError, match="at least one actor"):
        WorkerGroup([])
    with pytest.raises(TypeError, match="an actor of a FlatWorker class, got one of Stranger"):
        WorkerGroup([Stranger.remote()])  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="rank 0: expected an actor of a FlatWorker class, got int"):
        WorkerGroup([1])
    classes: list[Any] = [PlainWorker, [PlainWorker, PlainWorker], ray.remote(PlainWorker)]
    for wrong in classes:
        with pytest.raises(
            TypeError, match=r"handles of actors, got a class; .*create\(PlainWorker, n\)"
        ):
            WorkerGroup(wrong)


@pytest.mark.slow
def test_actors_may_be_given_and_change_groups(group: WorkerGroup) -> None:
    group.broadcast(weights_of(1.0))
    second = WorkerGroup(list(group.actors().values()))
    assert_same(second.average().weights, weights_of(1.0))
    second.broadcast(weights_of(2.0))
    assert_same(second.average().weights, weights_of(2.0))
    with pytest.raises(WorkerError, match=r"rank 0: StaleWorkerError: expected weights of ver"):
        group.average(min_results=1)
    assert group.restore() == [0, 1, 2]
    assert_same(group.average().weights, weights_of(1.0))


def test_step_gives_results_by_rank(group: WorkerGroup) -> None:
    assert group.step("how_often") == {0: 0, 1: 0, 2: 0}
    start = weights_of(2.0)
    group.broadcast(start)
    for rank, weights in group.step("train", 0.5).items():
        assert_same(weights, trained(start, rank, 0.5))
    assert group.step("train", step=0.25).keys() == {0, 1, 2}
    assert group.step("how_often") == {0: 2, 1: 2, 2: 2}
    # References are resolved, as in any call of an actor.
    assert len(group.step("set_weights", ray.put(start))) == 3
    assert_all_have(group, start)


def senders() -> dict[str, Callable[[FlatWeights], Any]]:
    def put_flat(w: FlatWeights) -> Any:
        return np.concatenate([part.ravel() for part in w.values()])

    return {
        "FlatWeights": lambda w: w,
        "dict": lambda w: dict(w),
        "vector": put_flat,
        "ref": ray.put,
        "ref of a dict": lambda w: ray.put(dict(w)),
        "ref of a vector": lambda w: ray.put(put_flat(w)),
        "Round": lambda w: fw.ray.average([ray.put(w)]),
    }


@pytest.mark.parametrize("size", SIZES)
def test_broadcast_and_calls_take_any_kind_of_weights(group: WorkerGroup, size: int) -> None:
    for k, (name, send) in enumerate(senders().items()):
        start = weights_of(float(k), size)
        assert group.broadcast(send(start)) == [0, 1, 2], name
        assert_all_have(group, start)
        found = group.average("train", 0.5, broadcast=send(start))
        assert_same(found.weights, mean_of(start, range(3), step=0.5))
        for rank, weights in group.step("train", broadcast=send(start)).items():
            assert_same(weights, trained(start, rank))


def test_a_loop_that_brings_each_average_with_the_next_call(group: WorkerGroup) -> None:
    expected = weights_of(1.0)
    found: Any = expected
    for _ in range(4):
        before = found
        found = group.average("train_counted", 0.5, broadcast=before)
        expected = mean_of(expected, range(3), step=0.5)
        assert_same(found.weights, expected)
    assert before.nbytes_sent == 3 * before.weights.buffer.nbytes
    assert {*before.seconds} == {"wait", "average", "put"}
    assert group.step("how_often") == group.step("how_often_set") == {0: 4, 1: 4, 2: 4}
    group._worker_set.ranks[1].why = TimeoutError("away")
    assert group.restore() == [1]
    assert_same(group.step("get_weights")[1], before.weights)  # those that were sent last


@pytest.mark.slow
@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["inline", "shared"])
def test_what_was_sent_does_not_follow_the_caller(make: Make, size: int) -> None:
    group = make(2, size)
    group.broadcast(weights_of(0.0, size))  # in Ray's store: there are no channels yet
    group.step("ping")
    mine, optimizer = weights_of(1.0, size), FedAvgM(weights_of(1.0, size))
    # Read-only arrays, which are not copied, in a dict in which they are replaced.
    first, second = ({k: v.copy() for k, v in weights_of(x, size).items()} for x in (1.0, 2.0))
    for array in (*first.values(), *second.values()):
        array.flags.writeable = False

    def change_mine() -> None:
        mine["w"] += 1

    changes: list[tuple[Any, Callable[[], object]]] = [
        (mine, change_mine),
        (optimizer.weights, lambda: optimizer.step(weights_of(2.0, size))),  # they are read-only
        (first, lambda: first.update(w=second["w"])),
    ]
    for weights, change in changes:
        group.broadcast(weights)
        change()
        with pytest.raises(WorkerError):
            group.average("act", {0: "die before"})
        assert restored(group) == [0]
        assert_same(group.step("get_weights")[0], weights_of(1.0, size))
    twice = Round(optimizer.weights, [0])
    for value in (3.0, 4.0):
        optimizer.step(weights_of(value, size))
        group.broadcast(twice)
        for found in group.step("get_weights").values():
            assert_same(found, optimizer.weights)


@pytest.mark.parametrize("kind", [dict, FlatWeights])
def test_what_was_sent_by_ray_is_what_channels_send_later(
    make: Make, kind: Any, tmp_path: Path
) -> None:
    group = make(2, LARGE)
    mine = kind(weights_of(1.0, LARGE))
    group.broadcast(mine)  # in Ray's store: there are no channels yet
    group.step("ping")
    mine["w"] += 1
    assert late_round(group, tmp_path, min_results=1).late == (1,)
    (tmp_path / "go on").touch()
    assert restored(group) == [1]
    assert_same(group.step("get_weights")[1], weights_of(1.0, LARGE))


def test_what_nobody_took_yet_does_not_follow_the_caller(make: Make, tmp_path: Path) -> None:
    group = make(2, LARGE)
    group.broadcast(weights_of(0.0, LARGE))  # else the first round asks for weights to start from
    group.step("ping")
    with pytest.raises(WorkerError):
        group.average("act", dict.fromkeys(range(2), "hang"), str(tmp_path), timeout=0.05)
    mine = weights_of(1.0, LARGE)
    with pytest.raises(WorkerError):
        group.broadcast(mine)  # all are late: the weights wait for them
    mine["w"] += 1
    (tmp_path / "go on").touch()
    while len(group.healthy_actor_ids()) < 2:
        restored(group)
    for found in group.step("get_weights").values():
        assert_same(found, weights_of(1.0, LARGE))


@pytest.mark.starts_actors
@pytest.mark.parametrize("max_inflight", [2, 3], ids=["streamed", "fused"])
def test_average_is_in_the_ranks_of_the_group(group: WorkerGroup, max_inflight: int) -> None:
    group = WorkerGroup(list(group.actors().values()), max_inflight=max_inflight)
    start = weights_of(1.0)
    group.broadcast(start)
    out = weights_of(0.0)
    found = group.average("train_counted", weights=[1, 2, 3], out=out)
    assert found.weights is out
    assert_same(out, mean_of(start, range(3), [1, 2, 3]))
    assert found.used == (0, 1, 2)
    assert found.extras == {rank: {"samples": rank + 1, "calls": 1} for rank in range(3)}
    group.broadcast(start)
    found = group.average("train_counted", weights=lambda result: result[1]["samples"])
    assert_same(found.weights, mean_of(start, range(3), [1, 2, 3]))
    is_a_pair = r"^weight of rank 0: .* a tuple \(weights, extras\), and raised TypeError: "
    with pytest.raises(TypeError, match=is_a_pair):
        group.average("train_counted", weights=lambda result: result["samples"])
    with pytest.raises(TypeError, match=r"^weight of rank 0: .* FlatWeights, and raised KeyError"):
        group.average("get_weights", weights=lambda result: result["samples"])


def kill(group: WorkerGroup, *ranks: int, no_restart: bool = True) -> None:
    actors = group.actors()
    for rank in ranks:
        ray.kill(actors[rank], no_restart=no_restart)
    # It takes effect later: until then an actor answers.
    for rank in ranks if no_restart else ():
        with pytest.raises(ray.exceptions.RayActorError):
            ask_for_ever(actors[rank])


def ask_for_ever(actor: Any) -> None:
    while True:
        ray.get(actor.ping.remote(), timeout=300)


def test_a_method_that_raises_leaves_its_actor_healthy(group: WorkerGroup) -> None:
    start = weights_of(1.0)
    group.broadcast(start)
    for call in (group.step, group.average):
        with pytest.raises(WorkerError, match=r"^rank 1: ArithmeticError: diverged$") as caught:
            call("act", {1: "raise"})
        assert list(caught.value.failed) == [1]
    found = group.average("act", {1: "raise"}, min_results=2)
    assert found.used == (0, 2)
    assert list(found.failed) == [1]
    assert group.healthy_actor_ids() == [0, 1, 2]
    with pytest.raises(WorkerError, match=r"rank 0: AttributeError: .*no_such_method"):
        group.step("no_such_method")


@pytest.mark.starts_actors
def test_another_layout_or_nan_leaves_actors_healthy(group: WorkerGroup) -> None:
    group.broadcast(weights_of(1.0))
    out = weights_of(7.0)
    with refuses(ValueError, "rank 1: expected 2 slots, got 1", out.buffer):
        group.average("act", {1: "other layout"}, out=out)
    with pytest.raises(ValueError, match="rank 2, slot 0 'w': holds NaN"):
        group.average("act", {2: "nan"})
    group.broadcast(weights_of(1.0))
    found = group.average("act", {2: "nan"}, nonfinite="skip")
    assert_same(found.weights, mean_of(weights_of(1.0), [0, 1]))
    assert str(found.failed[2]) == "rank 2, slot 0 'w': holds NaN or infinity"
    assert group.healthy_actor_ids() == [0, 1, 2]


def test_a_worker_that_dies_is_left_out(
    make: Make, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    group = make(3, LARGE)
    start = weights_of(1.0, LARGE)
    group.broadcast(start)
    caplog.set_level(logging.WARNING, "flatweights")
    found = group.average("act", {1: "die during"}, min_results=2)
    assert found.used == (0, 2)
    assert isinstance(found.failed[1], ray.exceptions.RayActorError)
    if way == "shm":  # Ray says it a second later
        assert "its process has ended; Ray may be starting it again" in str(found.failed[1])
    assert_same(found.weights, mean_of(start, [0, 2]))
    assert group.healthy_actor_ids() == [0, 2]
    assert 1 in group.broadcast(found) or restored(group) == [1]
    assert_all_have(group, found.weights)
    again = group.average("train")
    assert again.used == (0, 1, 2)
    assert again.failed == {}
    assert_same(again.weights, mean_of(found.weights, range(3)))
    of_rank = [
        text for text in map(logging.LogRecord.getMessage, caplog.records) if "rank 1" in text
    ]
    assert of_rank[0].startswith("rank 1 is left out: ")
    assert of_rank[-1] == "rank 1 is back"


@pytest.mark.slow
def test_who_died_after_its_answer_is_in_this_round_and_not_in_the_next(
    make: Make, tmp_path: Path
) -> None:
    group = make(3, LARGE)
    start = weights_of(1.0, LARGE)
    group.broadcast(start)
    pid = group.step("pid")[1]
    found = group.average("act", {1: "die after"}, str(tmp_path))
    assert found.used == (0, 1, 2)
    assert_same(found.weights, mean_of(start, range(3)))
    process = psutil.Process(pid)
    (tmp_path / "die").touch()
    process.wait(60)
    again = group.average("train", min_results=2)
    assert again.used == (0, 2)
    expected = [trained(trained(start, rank), rank) for rank in (0, 2)]
    assert_same(again.weights, fw.average(expected))
    assert 1 in group.broadcast(again) or restored(group) == [1]
    assert_all_have(group, again.weights)


def assert_restarted(error: Exception) -> None:
    """Ray itself calls the restarted actor again; over a channel nobody waits for that for long."""
    if not isinstance(error, ray.exceptions.ActorUnavailableError):
        assert isinstance(error, StaleWorkerError)
        assert "restarted since" in str(error)


def test_a_restart_between_rounds_is_noticed(make: Make) -> None:
    group = make(2, max_task_retries=-1)
    start = weights_of(1.0)
    group.broadcast(start)
    process = psutil.Process(group.step("pid")[0])
    kill(group, 0, no_restart=False)
    process.wait(60)
    found = group.average("train", min_results=1)
    assert found.used == (1,)
    assert np.max(found.weights["w"]) < POISON
    assert_same(found.weights, mean_of(start, [1]))
    step = group.step("how_often")
    assert step == {1: 1}


@pytest.mark.slow
def test_before_any_broadcast_a_restarted_worker_does_not_come_back(
    make: Make, tmp_path: Path
) -> None:
    group = make(3, max_task_retries=-1, initial=None)
    start = weights_of(2.0)
    group.step("set_weights", start)  # the group does not know of it
    found = group.average("act", {2: "die once"}, str(tmp_path), min_results=2)
    assert_restarted(found.failed[2])
    assert_same(found.weights, mean_of(start, [0, 1]))
    assert group.restore() == []
    assert group.healthy_actor_ids() == [0, 1]
    assert 2 in group.broadcast(found) or restored(group) == [2]
    assert_all_have(group, found.weights)


def late_round(group: WorkerGroup, where: Path, **options: Any) -> Round:
    with only_late():
        return group.average(
            "act", {1: "hang"}, str(where), **({"timeout": 0.05, "min_results": 2} | options)
        )


def test_a_late_answer_is_never_averaged(group: WorkerGroup, tmp_path: Path) -> None:
    start = weights_of(1.0)
    group.broadcast(start)
    assert group.step("ping") == dict.fromkeys(range(3), "pong")  # they have started
    found = late_round(group, tmp_path)
    assert found.used == (0, 2)
    assert found.late == (1,)
    assert_same(found.weights, mean_of(start, [0, 2]))
    assert isinstance(group.unhealthy[1], TimeoutError)
    group.broadcast(found)
    assert group.restore(timeout=0.1) == [], "it is not even asked"
    again = group.average("train")
    assert again.used == (0, 2)
    assert_same(again.weights, mean_of(found.weights, [0, 2]))
    (tmp_path / "go on").touch()
    assert restored(group) == [1]
    assert group.unhealthy == {}
    assert_same(group.step("get_weights")[1], found.weights)  # the latest that were sent
    assert group.step("how_often") == {0: 2, 1: 1, 2: 2}, "nor was it called"
    assert group.step("how_often_set") == {0: 2, 1: 2, 2: 2}
    group.broadcast(found)
    assert_same(group.average("train").weights, mean_of(found.weights, range(3)))


@pytest.mark.starts_actors
@pytest.mark.parametrize(("need", "remedy"), [(3, "$"), (None, "\npass min_results=2 to average")])
def test_too_few_in_time_is_an_error_and_they_are_late_all_the_same(
    group: WorkerGroup, tmp_path: Path, need: int | None, remedy: str
) -> None:
    group.broadcast(weights_of(1.0))
    out = weights_of(7.0)
    late = rf"^rank 1: TimeoutError: no result after 0\.05 s{remedy}"
    with refuses(WorkerError, late, out.buffer):
        late_round(group, tmp_path, min_results=need, out=out)
    assert group.healthy_actor_ids() == [0, 2]
    with pytest.raises(WorkerError, match=r"^rank 1: TimeoutError"):
        group.average("train", min_results=3)
    assert group.step("how_often") == {0: 1, 2: 1}, "nobody works in vain"
    (tmp_path / "go on").touch()
    assert restored(group) == [1]


class Choosy(PlainWorker):
    """A worker that refuses negative weights if its rank is odd."""

    def set_weights(self, new_weights: Mapping[str, Any], *, share: bool = False) -> None:
        if new_weights["w"][0] < 0 and (self.rank % 2 or new_weights["w"][0] < -1):
            raise ValueError("negative")
        super().set_weights(new_weights)


def test_weights_that_nobody_takes_change_nothing(way: str, lend: Lend) -> None:
    group = lend(Choosy, 2)
    start = weights_of(1.0)
    group.broadcast(start)
    with pytest.raises(WorkerError, match=r"rank 0: ValueError: negative\nrank 1: ValueError"):
        group.broadcast(weights_of(-2.0))
    assert group.healthy_actor_ids() == [0, 1]
    assert_same(group.average("train").weights, mean_of(start, [0, 1]))
    # Some workers take them: the others do not count until they have them.
    with pytest.raises(WorkerError, match=r"^rank 1: ValueError: negative$"):
        group.broadcast(weights_of(-1.0))
    assert group.healthy_actor_ids() == [0]
    assert group.restore() == []
    assert_same(group.average("train").weights, mean_of(weights_of(-1.0), [0]))
    assert group.broadcast(start) == [0, 1]
    assert_same(group.average("train").weights, mean_of(start, [0, 1]))
    # The same if a call brings them: a worker that refuses them does not run the method.
    group.step("forget_calls", broadcast=start)
    reason = "RefusedWeightsError: ValueError: negative"
    for call in (group.average, group.step):
        with pytest.raises(WorkerError, match=rf"^rank [01]: {reason}"):
            call("train", broadcast=weights_of(-2.0))
        assert group.healthy_actor_ids() == [0, 1]
    assert_same(group.average("train").weights, mean_of(start, [0, 1]))
    found = group.average("train", broadcast=weights_of(-1.0), min_results=1)
    assert found.used == (0,)
    assert isinstance(found.failed[1].cause, RefusedWeightsError)  # type: ignore[attr-defined]
    assert_same(found.weights, mean_of(weights_of(-1.0), [0]))
    assert group.healthy_actor_ids() == [0]
    assert group.restore() == []
    assert group.step("how_often", broadcast=start) == {0: 2}
    assert group.restore() == [1]
    assert group.step("how_often") == {0: 2, 1: 1}


def test_all_dead_is_an_error_that_names_all(make: Make) -> None:
    group = make(2)
    group.step("ping")
    kill(group, 0, 1)
    with pytest.raises(WorkerError) as caught:
        group.broadcast(weights_of(1.0))
    assert list(caught.value.failed) == [0, 1]
    assert group.restore(timeout=60) == []
    calls: list[Callable[[], Any]] = [
        lambda: group.step("ping"),
        lambda: group.step("ping", broadcast=weights_of(1.0)),
        lambda: group.average(),
        lambda: group.broadcast(weights_of(1.0)),
        lambda: list(group.run(1, "train")),
        lambda: next(group.as_completed("train")),
    ]
    for call in calls:
        with pytest.raises(WorkerError, match=r"rank 0: ActorDiedError(.|\n)*rank 1: Actor"):
            call()


def test_run_trains_averages_and_sends(group: WorkerGroup) -> None:
    expected = weights_of(1.0)
    group.broadcast(expected)
    rounds = 0
    for found in group.run(3, "train_counted", 0.5, weights=lambda result: result[1]["samples"]):
        expected = mean_of(expected, range(3), [1, 2, 3], 0.5)
        assert_same(found.weights, expected)
        assert_all_have(group, expected)
        assert set(found.seconds) == {"wait", "average", "put", "broadcast", "round"}
        rounds += 1
    assert rounds == 3
    start = weights_of(1.0)
    group.broadcast(start)
    (found,) = group.run(1, "get_flat")
    assert same_bits(found.weights, np.concatenate([part.ravel() for part in start.values()]))
    assert_all_have(group, start)


def test_run_after_a_broken_round_and_a_broadcast_begins_with_what_workers_have(
    group: WorkerGroup,
) -> None:
    with pytest.raises(WorkerError, match="rank 1: ArithmeticError"):
        list(group.run(1, "act", {1: "raise"}))
    start = weights_of(1.0)
    group.broadcast(start)
    group.step("train")
    assert_same(next(group.run(1, "get_weights")).weights, mean_of(start, range(3)))


@pytest.mark.starts_actors
def test_after_a_broken_round_a_late_rank_takes_no_time_from_others(
    group: WorkerGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group.broadcast(weights_of(1.0))
    with pytest.raises(WorkerError, match="rank 1: ArithmeticError"):
        list(group.run(1, "act", {1: "raise", 2: "hang"}, str(tmp_path)))
    # through Ray, a worker queues its calls
    is_waited_for = group._worker_set.ranks[2].in_flight is not None
    ends: list[Any] = []
    settle, send = group._worker_set._await_in_flight, group._worker_set._send_latest

    def settled(deadline: Any) -> None:
        ends.append(deadline.end)
        (tmp_path / "go on").touch()
        settle(deadline)

    def sent(ranks: Any, deadline: Any) -> Any:
        ends.append(deadline.end)
        (tmp_path / "go on").touch()
        return send(ranks, deadline)

    monkeypatch.setattr(group._worker_set, "_await_in_flight", settled)
    monkeypatch.setattr(group._worker_set, "_send_latest", sent)
    next(group.run(1, "train", timeout=60))
    assert len(ends) == 1 + is_waited_for
    assert ends == sorted({*ends}), "the time to send begins once the late ranks were waited for"


def segments_of_this_process() -> int:
    """The number of mapped segments that hold weights."""
    lines = [one.split() for one in Path("/proc/self/maps").read_text().splitlines()]
    sizes = [one[0].split("-") for one in lines if "/memfd:flatweights" in one]
    return sum(int(end, 16) - int(begin, 16) >= 8 * LARGE for begin, end in sizes)


def test_shutdown_ends_the_processes_and_lets_go(make: Make, tmp_path: Path) -> None:
    others = segments_of_this_process()
    group = make(3, LARGE)
    group.broadcast(weights_of(1.0, LARGE))
    processes = [psutil.Process(pid) for pid in group.step("pid").values()]
    begun = group.run(2, "get_weights")
    next(begun)
    late_round(group, tmp_path)
    kept = group.average("get_weights", min_results=1).weights
    expected = kept.copy()
    before = segments_of_this_process()
    assert before > others + 1 or group._worker_set.channels.channels is None
    group.shutdown()
    assert segments_of_this_process() <= others + 1, "that of the average at most"
    assert same_bits(kept.buffer, expected.buffer)
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert alive == []
    calls: list[Callable[[], Any]] = [
        group.average,
        lambda: group.broadcast(weights_of(1.0, LARGE)),
        lambda: next(group.as_completed("train")),
        lambda: next(begun),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=r"^the group was shut down$"):
            call()
    assert group.restore() == []
    group.shutdown()


@pytest.mark.slow
def test_a_group_that_is_dropped_takes_its_processes_along() -> None:
    group = WorkerGroup.create(PlainWorker, 2, num_cpus=0)
    group.broadcast(weights_of(1.0))
    processes = [psutil.Process(pid) for pid in group.step("pid").values()]
    dropped = weakref.ref(group)
    del group
    assert dropped() is None, "at once: it is in no cycle"
    gc.collect()
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert alive == []


@pytest.mark.starts_actors
def test_a_fork_of_the_driver_has_no_part_in_the_group(group: WorkerGroup) -> None:
    """Its calls would wait for ever, and its commands would be among those of its parent."""
    found = group.average("train")
    loop = group.as_completed("train")
    next(loop)
    calls: list[Callable[[], object]] = [
        lambda: group.step("get_weights"),
        lambda: group.average("train", broadcast=found),
        lambda: group.broadcast(found),
        lambda: group.publish(found),
        group.restore,
        lambda: next(group.run(1, "train")),
        lambda: next(loop),
        lambda: group.remove(0),
        lambda: group.add(actors=[]),
    ]
    child = os.fork()
    if child == 0:
        texts = set()
        try:
            for call in calls:
                try:
                    call()
                except RuntimeError as error:
                    texts.add(str(error))
            group.shutdown()  # as at the end of a `with`
        finally:
            expected = {"this process is a fork of the group's: call the group where it was made"}
            os._exit(0 if texts == expected else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    next(loop)
    loop.close()
    assert group.average("train", broadcast=found).used == tuple(range(3))


def test_an_interrupt_in_a_round_leaves_the_last_round_as_it_was(make: Make) -> None:
    group = make()
    start = weights_of(1.0)
    group.broadcast(start)
    (last,) = group.run(1, "train")
    kept = last.weights.copy()
    with pytest.raises(KeyboardInterrupt):
        list(group.run(1, "act", {1: "interrupt"}, str(os.getpid())))
    assert_same(last.weights, kept)
    assert_same(ray.get(last.ref), kept)
    assert_same(kept, mean_of(start, range(3)))
    kill(group, 1)  # still at work
    (found,) = group.run(1, "train", min_results=2)
    assert_same(found.weights, mean_of(kept, [0, 2]))


class Empty(FlatWorker):
    """A worker whose weights have no bytes."""

    def __init__(self) -> None:
        self.weights = FlatWeights({"w": np.zeros((0, 4), np.float32)})

    def get_weights(self) -> Any:
        return self.weights

    def set_weights(self, new_weights: Any, *, share: bool = False) -> None:
        self.weights = new_weights


def test_weights_without_bytes_travel_like_others() -> None:
    group = WorkerGroup.create(Empty, 1, num_cpus=0)
    for _ in range(4):
        assert group.broadcast(FlatWeights({"w": np.zeros((0, 4), np.float32)})) == [0]
    assert [result.used for result in group.run(3, "get_weights")] == [(0,)] * 3
    group.shutdown()
