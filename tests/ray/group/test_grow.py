"""Groups that grow and shrink: `WorkerGroup.add` and `WorkerGroup.remove`."""

import contextlib
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from ray_pool import Actors, Lend
from ray_workers import PlainWorker, trained, wait_for, weights_of
from reference import assert_same

import flatweights as fw
from flatweights.ray import Round, WorkerError, WorkerGroup

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("way")]


def refuses(
    error: type[Exception], match: str, call: Callable[..., Any], *args: Any, **kwargs: Any
) -> None:
    with pytest.raises(error, match=re.escape(match)):
        call(*args, **kwargs)


class Slow(PlainWorker):
    """A worker that is built once a file exists."""

    def __init__(self, rank: int = 0, size: int = 5, where: str = "") -> None:
        super().__init__(rank, size)
        if where:
            wait_for(Path(where))


class Another(PlainWorker):
    """A worker of another class."""


@pytest.fixture
def group(way: str) -> Iterator[WorkerGroup]:
    with WorkerGroup.create(
        Slow, 2, arguments=lambda rank: (rank,), num_cpus=0, max_restarts=-1
    ) as made:
        made.broadcast(weights_of(1.0))
        yield made


def until_joined(rounds: Iterator[Round], count: int = 1) -> Round:
    """Return the first round after ``count`` workers have joined."""
    joined, end = list[int](), time.monotonic() + 120
    for found in rounds:
        joined += found.joined
        if len(joined) == count:
            return found
        assert time.monotonic() < end, "nobody has joined"
        time.sleep(0.01)
    raise AssertionError("the rounds are over")


def is_gone(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


@pytest.mark.slow
@pytest.mark.starts_actors
def test_an_interrupt_while_added_workers_are_looked_for_stops_no_other_call(
    group: WorkerGroup, tmp_path: Path
) -> None:
    gate = tmp_path / "built"

    def interrupt(frame: Any, event: str, _: Any) -> None:
        """Interrupt as soon as a lock of Python's own is taken."""
        if event == "return" and frame.f_code is threading.Condition.__enter__.__code__:
            sys.setprofile(None)
            raise KeyboardInterrupt

    group.add(1, arguments=lambda rank: (rank, 5, str(gate)))
    sys.setprofile(interrupt)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            group.step("ping")
    finally:
        sys.setprofile(None)
    gate.touch()
    another = group.actors()[0]
    ray.get(group.actors()[2].ping.remote(), timeout=120)
    assert ray.get(another.ping.remote(), timeout=30) == "pong"
    assert until_joined(group.run(1_000_000, "train")).joined == (2,)


@pytest.mark.starts_actors
def test_workers_are_added_in_the_body_of_run_and_removed(
    group: WorkerGroup, tmp_path: Path
) -> None:
    gate = tmp_path / "built"
    latest = weights_of(1.0)
    rounds = group.run(1_000_000, "train", min_results=None)
    for found in rounds:
        assert found.used == (0, 1)
        latest = fw.average([trained(latest, rank) for rank in found.used])
        assert_same(found.weights, latest)
        if found.number == 2:
            # Arguments of their own: the class waits for a file.
            added = group.add(2, arguments=lambda rank: (rank, 5, str(gate)))
            assert added == [2, 3]
            assert list(group.actors()) == [0, 1, 2, 3]
            assert group.healthy_actor_ids() == [0, 1]
        if found.number == 6:  # rounds go on while they start
            break
    gate.touch()
    joined = list[int]()
    end = time.monotonic() + 120
    for found in rounds:
        latest = fw.average([trained(latest, rank) for rank in found.used])
        assert_same(found.weights, latest)
        joined += found.joined
        assert not {*found.used} - {0, 1} - {*joined}
        assert not found.failed
        assert found.record()["joined"] == [*found.joined]
        if len(joined) == 2:
            break
        assert time.monotonic() < end
    assert sorted(joined) == [2, 3]
    group.remove([0, 3])
    found = next(rounds)
    assert (found.used, found.left, found.record()["left"]) == ((1, 2), (0, 3), [0, 3])
    assert next(rounds).left == ()
    rounds.close()  # type: ignore[attr-defined]
    assert group.add() == [4], "ranks are never used again"
    found = until_joined(group.run(1_000_000, "train"))
    assert found.used == (1, 2, 4)
    assert "3 ranks" in repr(group)


@pytest.mark.slow
@pytest.mark.starts_actors
def test_ranks_may_name_workers_that_are_still_starting(group: WorkerGroup, tmp_path: Path) -> None:
    gate = tmp_path / "built"
    rounds = group.run(3, "train", ranks=lambda _: list(group.actors()))
    assert next(rounds).used == (0, 1)
    assert group.add(arguments=lambda rank: (rank, 5, str(gate))) == [2]
    assert [group.is_actor_healthy(rank) for rank in range(4)] == [True, True, False, False]
    refuses(ValueError, "at least one worker that is ready to stay", group.remove, [0, 1])
    assert [found.used for found in rounds] == [(0, 1)] * 2
    assert group.step("ping", ranks=[2, 0]) == {0: "pong"}
    message = "expected at least one worker that is ready, as healthy_actor_ids() lists them, got"
    refuses(ValueError, f"ranks: {message} [2]", group.step, "ping", ranks=[2])
    waits = group.as_completed("train", ranks=[2])
    gate.touch()
    assert next(waits).used == (2,)
    waits.close()
    assert group.step("ping", ranks=[2]) == {2: "pong"}
    group.remove([0, 1])
    assert [group.is_actor_healthy(rank) for rank in range(3)] == [False, False, True]
    assert group.average("train").used == (2,)


@pytest.mark.slow
@pytest.mark.starts_actors
def test_workers_come_and_go_in_the_body_of_as_completed(group: WorkerGroup) -> None:
    group.publish(weights_of(0.0))
    rounds = group.as_completed("train", 0.0)
    pid = ray.get(group.actors()[0].pid.remote())
    next(rounds)
    (added,) = group.add(actors=[ray.remote(Slow).options(num_cpus=0).remote(7, 5)])
    found = until_joined(rounds)
    group.remove(0)
    used = set[int]()
    lefts = list[int]()
    for found in rounds:
        assert 0 not in found.used
        assert (found.weights["w"] == 0.0).all()
        used |= {*found.used}
        lefts += found.left
        if used == {1, added}:
            break
    rounds.close()
    assert lefts == [0]
    assert group.average("train").used == (1, added)
    while not is_gone(pid):  # a call of the group sees that it has answered
        assert group.average("train").used == (1, added)


@pytest.mark.slow
@pytest.mark.starts_actors
def test_a_worker_that_joins_in_another_call_in_the_body_of_as_completed_gets_work(
    group: WorkerGroup,
) -> None:
    rounds = group.as_completed("train")
    next(rounds)
    (added,) = group.add()
    ray.get(group.actors()[added].ping.remote())
    end = time.monotonic() + 60
    while added not in group.step("ping"):
        assert time.monotonic() < end
    while added not in next(rounds).used:
        assert time.monotonic() < end, "it is never called"
    rounds.close()


@pytest.mark.starts_actors
def test_a_removed_worker_may_live_on(lend: Lend) -> None:
    group = lend(PlainWorker, 2)
    group.broadcast(weights_of(1.0))
    actor = group.actors()[1]
    group.average("train")
    group.remove(1, kill=False)
    assert group.average("train").used == (0,)
    assert ray.get(actor.ping.remote(), timeout=60) == "pong"
    assert group.add(actors=[actor]) == [2]
    found = until_joined(group.run(1_000_000, "train"))
    assert found.used == (0, 2)
    ray.kill(actor)


def test_a_round_that_fails_leaves_it_to_the_next_one_who_has_left(lend: Lend) -> None:
    group = lend(PlainWorker, 2, initial=None)
    group.broadcast(weights_of(1.0))
    group.remove(1, kill=False)
    wrong = {0: "other layout"}  # which no worker can set
    with pytest.raises(WorkerError, match="unknown names"):
        list(group.run(1, "act", wrong))
    first, second = group.run(2, "train")
    assert (first.left, second.left) == ((1,), ())


@pytest.mark.starts_actors
def test_a_worker_that_cannot_be_built_is_unhealthy(group: WorkerGroup) -> None:
    group.add(arguments=lambda rank: (rank, "no size"), max_restarts=0)
    found = until_joined(group.run(1_000_000, "train", min_results=1))
    assert found.used == (0, 1)
    assert 2 in found.failed
    group.remove(np.int64(2))
    assert group.average("train").used == (0, 1)


@pytest.fixture(scope="module")
def two(way: str, all_actors: Actors) -> Iterator[WorkerGroup]:
    with all_actors.loan() as lend:
        yield lend(PlainWorker, 2)


def test_wrong_arguments_change_nothing(two: WorkerGroup, lend: Lend) -> None:
    others = lend(PlainWorker, 1)
    other, mine = others.actors()[0], two.actors()[0]
    refuses(ValueError, "ranks: expected some of 0 to 1, got [2]", two.remove, [2])
    refuses(ValueError, "ranks: expected each once", two.remove, [1, 1])
    refuses(ValueError, "ranks: expected at least one worker that is ready", two.remove, [0, 1])
    refuses(TypeError, "ranks", two.remove, ["0"])
    refuses(TypeError, "ranks: expected a list of integers, got Actor", two.remove, mine)
    refuses(TypeError, "actors: expected actors, since the group was made", two.add, 1)
    refuses(ValueError, "n: expected at least 1", two.add, 0)
    add: Callable[..., Any] = two.add
    refuses(ValueError, "rank 2: expected another actor than that of rank 0", add, actors=[mine])
    refuses(ValueError, "expected at least one actor", add, actors=[])
    refuses(TypeError, "actors: expected a list of actors, got ActorHandle", add, actors=other)
    refuses(TypeError, "got dict; pass list(actors.values())", add, actors=others.actors())
    refuses(TypeError, "got dict; pass list(actors.values())", WorkerGroup, two.actors())
    refuses(TypeError, "rank 2: expected an actor of a FlatWorker class", add, actors=[3])
    refuses(TypeError, "actors: expected no other arguments", add, 2, actors=[other])
    refuses(ValueError, "expected another actor than that of rank 0", WorkerGroup, [other, other])
    twice = [other, other]
    refuses(ValueError, "rank 3: expected another actor than that of rank 2", add, actors=twice)
    stranger = ray.remote(Another).options(num_cpus=0).remote()
    refuses(
        TypeError,
        "rank 2: expected an actor of PlainWorker, got one of Another",
        add,
        actors=[stranger],
    )
    ray.kill(stranger)
    assert list(two.actors()) == [0, 1]
    assert two.average("get_weights").used == (0, 1)


def test_weights_by_rank_name_a_rank_that_was_added_later(lend: Lend) -> None:
    group = lend(PlainWorker, 2)
    more = lend(PlainWorker, 1)
    group.broadcast(weights_of(1.0))
    rounds = group.run(1_000_000, "train", weights=[1.0, 2.0])
    next(rounds)
    group.add(actors=more.actors().values())
    with pytest.raises(ValueError, match="expected one for rank 2, which was added later"):
        until_joined(rounds)
    assert group.average("train", weights=[1.0, 2.0, 3.0]).used == (0, 1, 2)
    group.remove(0)
    found = group.average("get_weights", weights=[9.0, 2.0, 3.0])
    assert found.used == (1, 2)


class WithData(PlainWorker):
    def __init__(self, rank: int, data: Any) -> None:
        super().__init__(rank)


@pytest.mark.starts_actors
def test_a_group_keeps_no_arguments_of_workers_that_it_has_ended() -> None:
    kept: list[weakref.ref[Any]] = []
    groups: list[WorkerGroup] = []

    def arguments(rank: int) -> list[Any]:
        for group in groups:  # that they may call
            assert group.average("get_weights").used == (0,)
        data = np.zeros(1000)
        kept.append(weakref.ref(data))
        return [rank, data]

    with WorkerGroup.create(WithData, 1, arguments=arguments, num_cpus=0) as group:
        groups.append(group)
        group.add(1)
        until_joined(group.run(1_000_000, "get_weights"))
        assert [data() is not None for data in kept] == [True, True]
        group.remove(1)
        assert [data() is not None for data in kept] == [True, False]
        with pytest.raises(RuntimeError, match="expected a function that adds no workers itself"):
            group.add(1, arguments=lambda rank: [*group.add(1), rank])
