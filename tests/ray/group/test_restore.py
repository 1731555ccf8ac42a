"""`restore` waits for owed answers and for restarts, until its time is up."""

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from ray_pool import Lend, only_late
from ray_workers import PlainWorker, wait_for, weights_of
from reference import assert_same

from flatweights.ray import WorkerError, WorkerGroup
from flatweights.ray.peers._store import RayResult
from flatweights.ray.peers._wait import wait_any

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("way")]


def test_restore_waits_for_restarts_and_not_for_the_dead(lend: Lend) -> None:
    group = lend(PlainWorker, 3, max_restarts=1)
    group.broadcast(weights_of(1.0))
    found = group.average("act", {1: "die before"}, min_results=2)
    assert sorted(found.failed) == [1]
    assert group.restore(timeout=120) == [1]
    assert group.average("get_weights").used == (0, 1, 2)
    found = group.average("act", {1: "die before", 2: "die before"}, min_results=1)
    assert found.used == (0,)
    pid = group.actors()[1].pid
    with pytest.raises(ray.exceptions.ActorDiedError):
        ray.get(pid.remote())
    assert group.restore(timeout=None) == [2], "Ray has given up rank 1: nobody waits for it"


@pytest.mark.parametrize(
    "how",
    ["average", *(pytest.param(one, marks=pytest.mark.slow) for one in ("step", "broadcast"))],
)
def test_weights_that_are_sent_bring_a_late_rank_back(lend: Lend, tmp_path: Path, how: str) -> None:
    group = lend(PlainWorker, 3)
    group.broadcast(weights_of(1.0))
    hang: tuple[Any, ...] = ("act", {1: "hang"}, str(tmp_path))
    with only_late():
        assert group.average(*hang, timeout=0.05, min_results=2).late == (1,)
    sent = weights_of(3.0)
    assert group.broadcast(sent) == [0, 2], "it still owes an answer, and is not asked"
    in_flight = group._worker_set.ranks[1].in_flight
    assert in_flight is not None
    (tmp_path / "go on").touch()
    assert wait_any([in_flight], None)
    assert group.average("get_weights").used == (0, 2), "a call without weights brings nobody back"
    if how == "broadcast":
        assert group.broadcast(weights_of(4.0)) == [0, 1, 2]
    elif how == "step":
        assert list(group.step("ping", broadcast=weights_of(4.0))) == [0, 1, 2]
    else:
        found = group.average("get_weights", broadcast=weights_of(4.0))
        assert (found.used, found.failed) == ((0, 1, 2), {})
    for weights in group.step("get_weights").values():
        assert_same(weights, weights_of(4.0))


class InterruptedOnce(RayResult):
    """An answer whose value is taken only at the second try."""

    is_interrupted = False

    def result(self) -> Any:
        if not self.is_interrupted:
            self.is_interrupted = True
            raise KeyboardInterrupt
        return super().result()


def test_a_worker_whose_return_was_interrupted_comes_back(lend: Lend) -> None:
    group = lend(PlainWorker, 2)
    group.broadcast(weights_of(1.0))
    record = group._worker_set.ranks[1]
    record.leave_out(ray.exceptions.ActorDiedError())
    answer = InterruptedOnce(record.worker.handle.ping.remote())
    record.probe(answer, None)
    ray.wait([answer.ref])
    with pytest.raises(KeyboardInterrupt):
        group.broadcast(weights_of(2.0))
    assert group.broadcast(weights_of(3.0)) == [0, 1]
    for weights in group.step("get_weights").values():
        assert_same(weights, weights_of(3.0))


class Gated(PlainWorker):
    """Is built again only once there is a file."""

    def __init__(self, rank: int, gate: str) -> None:
        super().__init__(rank)
        if ray.get_runtime_context().was_current_actor_reconstructed:
            wait_for(Path(gate))


@pytest.mark.slow
@pytest.mark.parametrize("late", [(1,), (0, 1)], ids=["one", "all"])
def test_a_late_rank_that_dies_is_brought_back_by_weights(
    lend: Lend, tmp_path: Path, late: tuple[int, ...]
) -> None:
    """Calls that wait for no answer, or have theirs at once, learn of its death, too."""
    group = lend(PlainWorker, 2, max_restarts=-1)
    group.broadcast(weights_of(1.0))
    pids = group.step("pid")
    hang: tuple[Any, ...] = ("act", dict.fromkeys(late, "hang"), str(tmp_path))
    with only_late(len(late)), contextlib.suppress(WorkerError):
        group.average(*hang, timeout=0.05, min_results=1)
    assert sorted(group.unhealthy) == [*late]
    for rank in late:
        os.kill(pids[rank], signal.SIGKILL)
    sent: list[int] = []
    end = time.monotonic() + 120
    while len(sent) < 2:
        assert time.monotonic() < end, group.unhealthy
        with contextlib.suppress(WorkerError):
            sent = group.broadcast(weights_of(2.0))
        time.sleep(0.01)
    for weights in group.step("get_weights").values():
        assert_same(weights, weights_of(2.0))


@pytest.mark.slow
@pytest.mark.starts_actors
def test_rounds_do_not_wait_for_a_process_that_starts_again(tmp_path: Path) -> None:
    gate = tmp_path / "go on"
    remote: Any = ray.remote(num_cpus=0, max_restarts=-1)(Gated)
    with WorkerGroup([remote.remote(rank, str(gate)) for rank in range(2)]) as group:
        group.broadcast(weights_of(1.0))
        assert group.average("act", {1: "die before"}, min_results=1).used == (0,)
        rounds, end = 0, time.monotonic() + 2.5
        while time.monotonic() < end:
            rounds += 1
            found = group.average("get_weights", broadcast=weights_of(rounds), min_results=1)
            assert found.used == (0,)
        assert rounds > 10, "not one in each of Ray's timeouts, which are some 2 s"
        gate.touch()
        while found.used != (0, 1):
            assert time.monotonic() < end + 60
            rounds += 1
            found = group.average("get_weights", broadcast=weights_of(rounds), min_results=1)
            assert_same(found.weights, weights_of(rounds))
        assert found.failed == {}


def test_rounds_ask_a_dead_rank_ever_less_often(
    lend: Lend, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = lend(PlainWorker, 2, max_restarts=0)
    group.broadcast(weights_of(1.0))
    assert group.average("act", {1: "die before"}, min_results=1).used == (0,)
    worker, calls = group._worker_set.ranks[1].worker, 0
    by_ray = worker.call

    def counted(call: Any) -> Any:
        nonlocal calls
        calls += 1
        return by_ray(call)

    monkeypatch.setattr(worker, "call", counted)
    rounds, end = 0, time.monotonic() + 0.4
    while rounds < 100 or time.monotonic() < end:
        rounds += sum(1 for _ in group.run(10, "get_weights", min_results=1))
    seconds = time.monotonic() - end + 0.4
    assert calls <= 6 + seconds, f"{rounds} rounds"  # after 0, 0.05, 0.15, 0.35, 0.75, 1.55, 2.55 s
    assert 0 < calls < rounds / 5
    before = calls
    assert group.restore(timeout=0.0) == []
    assert calls == before + 1, "it asks at once"
