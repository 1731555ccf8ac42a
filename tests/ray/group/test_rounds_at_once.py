"""Rounds that call all workers, and read all answers, in one step of C++."""

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray_workers import PlainWorker, trained, weights_of
from reference import same_bits

import flatweights as fw
from flatweights import FlatWeights
from flatweights.ray import WorkerGroup
from flatweights.ray.peers._worker_set import WorkerSet

pytestmark = pytest.mark.ray

SIZE = 3_000


class Slow(PlainWorker):
    """A worker that takes its time."""

    def wait(self, seconds: float) -> FlatWeights:
        time.sleep(seconds)
        return self.get_weights()

    def set_weights(self, new_weights: Mapping[str, Any], *, share: bool = False) -> None:
        super().set_weights(new_weights, share=share)
        time.sleep(float(self.model["w"][0]) if self.model["w"][0] < 2.0 else 0.0)


def group_of(count: int, kind: Any = PlainWorker, **options: Any) -> WorkerGroup:
    made = WorkerGroup.create(
        kind, count, arguments=lambda rank: (rank, SIZE), num_cpus=0, **options
    )
    warm_up(made)
    return made


def warm_up(group: WorkerGroup) -> Any:
    """Make rounds until all workers have attached, and know all segments."""
    found: Any = weights_of(3.0, SIZE)
    for _ in range(200):
        found = group.average("train", broadcast=found)
        if {*found.transports.values()} == {"shm"}:
            break
    for _ in range(6):
        found = group.average("train", broadcast=found)
    return found


@pytest.fixture(scope="module")
def group() -> Iterator[WorkerGroup]:
    made = group_of(3)
    yield made
    made.shutdown()


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """By call, whether it was made in one step."""
    made, call = list[bool](), WorkerSet.round_at_once

    def noted(self: WorkerSet, *args: Any, **options: Any) -> Any:
        outcome = call(self, *args, **options)
        made.append(outcome is not None)
        return outcome

    monkeypatch.setattr(WorkerSet, "round_at_once", noted)
    return made


def test_calls_that_repeat_are_made_at_once(group: WorkerGroup, at_once: list[bool]) -> None:
    found = warm_up(group)
    at_once.clear()
    for rounds in ([None] * 5, [[0, 2]] * 5):
        for ranks in rounds:
            found = group.average("train", 2.0, broadcast=found, ranks=ranks)
    [*group.run(5, "train", 1.0)]
    group.average("train", arguments=lambda rank: (float(rank),))
    assert sum(at_once) >= 18, at_once


def test_a_round_says_the_same_in_either_way(
    group: WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rounds() -> list[Any]:
        found, made = warm_up(group), []
        for ranks in (None, None, [0, 2], [0, 2]):
            start = found.weights
            found = group.average("train", 2.0, broadcast=found, ranks=ranks)
            expected = [trained(start, rank, 2.0) for rank in ranks or range(3)]
            assert same_bits(found.weights.buffer, fw.average(expected).buffer)
            made.append((found.record(), sorted(found.seconds)))
        for found in group.run(3, "train", 1.0):
            made.append((found.record(), sorted(found.seconds)))
        for record, _ in made:
            del record["seconds"]
        return made

    of_all = rounds()
    with monkeypatch.context() as patched:
        patched.setattr(WorkerSet, "ready", lambda *_: None)
        one_by_one = rounds()
    assert of_all == one_by_one


def test_a_worker_gets_all_weights_of_which_each_broadcast_had_a_part() -> None:
    group = group_of(2, initial=None, max_restarts=-1)
    for _ in range(4):
        group.broadcast(FlatWeights({"w": np.full(SIZE, 5.0)}))
        group.average("get_weights")
    part = FlatWeights({"n": np.int64(9)})
    part.buffer.flags.writeable = False
    for _ in range(3):
        group.broadcast(part)
    assert {*group._worker_set.latest.names} == {"w", "n"}
    (pid,) = group.step("pid", ranks=[0]).values()
    os.kill(pid, 9)
    end = time.monotonic() + 60
    while group.average("get_weights", min_results=1).used != (0, 1) or not group.step("pid"):
        assert time.monotonic() < end, "it does not come back"
        group.restore(timeout=5)
    found = group.step("get_weights", ranks=[0])[0]
    assert (found["w"] == 5.0).all()
    assert found["n"] == 9
    group.shutdown()


def test_the_seconds_of_calls_that_take_longer_than_a_look_at_rays_calls() -> None:
    group = group_of(2, Slow)
    assert group.average("wait", 1.3).seconds["wait"] > 1.25
    slow = group.average("get_weights")
    start = FlatWeights({"w": np.full(SIZE, 1.2), "n": np.int64(3)})
    group.broadcast(weights_of(1.2, SIZE))
    (slow,) = group.run(1, "get_weights")
    assert slow.weights["w"][0] == start["w"][0]
    assert slow.seconds["broadcast"] > 1.1
    group.shutdown()


def test_arguments_by_rank_whose_function_brings_a_worker_back() -> None:
    group, start = group_of(2, Slow), weights_of(7.0, SIZE)
    group.broadcast(start)
    found = group.average("wait", arguments=lambda rank: (float(rank),), timeout=0.3, min_results=1)
    assert found.late == (1,)
    asked: list[int] = []

    def step_of(rank: int) -> tuple[float]:
        if not asked:
            asked.append(rank)
            assert group.restore(timeout=30) == [1]
        asked.append(rank)
        return (float(rank),)

    found = group.average("train", arguments=step_of)
    assert found.used == (0, 1)
    assert asked == [0, 0, 1]
    expected = fw.average([trained(start, rank, float(rank)) for rank in range(2)])
    assert same_bits(found.weights.buffer, expected.buffer)
    group.shutdown()


def mapped() -> int:
    """Return how many segments of memory this process maps."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return sum("memfd:" in line for line in maps)


def test_segments_of_workers_that_were_removed_are_let_go_of() -> None:
    group = group_of(3)
    rounds = group.run(16, "train", min_results=3)
    next(rounds)
    found = warm_up(group)
    before = mapped()
    del found
    group.remove([1, 2])
    for _ in range(4):
        group.step("ping", ranks=[0])
        group.average("get_weights", out=weights_of(0.0, SIZE))
    assert mapped() <= before - 4, "two mailboxes, and a segment of each"
    with pytest.raises(ValueError, match="min_results"):
        next(rounds)
    group.shutdown()
