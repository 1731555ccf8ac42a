"""Members: processes that request for averages, over channels and over Ray's object store."""

import asyncio
import contextlib
import itertools
import os
import pickle
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import reference
from process_groups import LocalProcessGroup
from ray_workers import wait_for

import flatweights as fw
from flatweights import robust
from flatweights.ray import Member, MemberDiedError, MemberError, NotInTrainError, WorkerError, join
from flatweights.ray.members import _member
from flatweights.ray.members._config import GroupConfig
from flatweights.ray.members._coordinator import Coordinator
from flatweights.ray.members._platform import PLATFORM
from flatweights.ray.members._train import train_worker
from flatweights.ray.support import _failpoints

pytestmark = pytest.mark.ray

N = 3
NAMES = (f"process group {k}" for k in itertools.count())
# the process group decides it, whichever way brings the calls
BY_ONE_WAY = pytest.mark.starts_actors


@ray.remote(num_cpus=0)
class Puppet:
    """A process that runs a test's functions, and keeps its member in between."""

    def __init__(self, way: str) -> None:
        os.environ["FLATWEIGHTS_RAY"] = "store" if way == "store" else ""
        self.member: Member | None = None

    def join(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        self.member = join(*args, **kwargs)
        return self.member.rank, self.member.size

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(self.member, *args)

    def leave(self) -> None:
        if self.member is not None:
            self.member.leave()
        self.member = None

    def pid(self) -> int:
        return os.getpid()


class Puppets:
    """Any number of puppets; a killed puppet is replaced."""

    def __init__(self, way: str) -> None:
        self._way = way
        self._all: list[Any] = []

    def meet(self, n: int = N) -> list[Any]:
        """Return ``n`` puppets that have joined a new process group, by rank."""
        puppets = self.idle(n)
        name = next(NAMES)
        joined = ray.get([p.join.remote(name, rank=r, size=n) for r, p in enumerate(puppets)])
        assert joined == [(rank, n) for rank in range(n)]
        return puppets

    def idle(self, n: int) -> list[Any]:
        """Return ``n`` puppets that are in no process group."""
        alive = []
        for puppet in self._all:
            try:
                ray.get(puppet.leave.remote(), timeout=60)
                alive.append(puppet)
            except ray.exceptions.RayError:
                pass
        self._all = alive + [Puppet.remote(self._way) for _ in range(n - len(alive))]  # type: ignore[attr-defined]
        return self._all[:n]


@pytest.fixture(scope="module")
def puppets(way: str) -> Iterator[Puppets]:
    made = Puppets(way)
    yield made
    for puppet in made.idle(0):
        ray.kill(puppet)


def all_of(puppets: list[Any], function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run ``function(member, *args)`` in all puppets together; return the results."""
    calls = [puppet.run.remote(function, *args) for puppet in puppets]
    results: list[Any] = ray.get(calls, timeout=120)
    return results


def errors_of(puppets: list[Any], function: Callable[..., Any], *args: Any) -> list[Exception]:
    """Return its exception in each puppet."""

    def caught(member: Member) -> Exception | None:
        try:
            function(member, *args)
        except Exception as error:
            return error
        return None

    return all_of(puppets, caught)


def model_of(rank: int, kind: str = "dict") -> Any:
    rng = np.random.default_rng(rank)
    parts = {
        "kernel": rng.normal(size=(40, 30)).astype(np.float32),
        "bias": rng.normal(size=7),
        "steps": np.int64(rank + 5),
    }
    if kind == "FlatWeights":
        return fw.FlatWeights(parts)
    if kind == "list":
        return list(parts.values())
    if kind == "array":
        return parts["kernel"]
    if kind == "tree":
        return {"layers": [parts["kernel"], {"bias": parts["bias"]}]}
    return parts


def average_of(member: Member, *args: Any, **options: Any) -> Any:
    result = member.average(model_of(member.rank), *args, **options)
    return result.weights, result.record()


def same_bits(a: Any, b: Any) -> bool:
    """Whether two models have the same containers, and arrays of the same bits."""
    if isinstance(a, dict):
        return list(a) == list(b) and all(same_bits(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same_bits, a, b))
    return reference.same_bits(a, np.asarray(b))


KINDS = ("dict", "FlatWeights", "list", "array", "tree")


@BY_ONE_WAY
def test_layouts_that_were_forgotten_are_sent_again(puppets: Puppets) -> None:
    def averages(member: Member) -> list[float]:
        sizes = [*range(1, 71), 1]
        models = [np.full(size, float(member.rank)) for size in sizes]
        return [float(member.average(model).weights[-1]) for model in models]

    assert all_of(puppets.meet(2), averages) == [[0.5] * 71] * 2


def test_averages_have_the_bits_of_flatweights_average(puppets: Puppets) -> None:
    def averages(member: Member) -> list[Any]:
        weight = float(member.rank + 1)
        return [member.average(model_of(member.rank, kind), weight).weights for kind in KINDS]

    got = all_of(puppets.meet(), averages)
    for k, kind in enumerate(KINDS):
        models = [model_of(rank, kind) for rank in range(N)]
        expected = fw.average(models, weights=[1.0, 2.0, 3.0])
        for result in got:
            assert type(result[k]) is type(expected)
            assert same_bits(result[k], expected)


@BY_ONE_WAY
def test_out_is_written_and_may_be_the_source(puppets: Puppets) -> None:
    def in_place(member: Member) -> Any:
        weights = model_of(member.rank)
        weights["steps"] = np.array(weights["steps"])
        result = member.average(weights, out=weights)
        assert result.weights is weights
        return weights

    expected = fw.average([model_of(rank) for rank in range(N)])
    for result in all_of(puppets.meet(), in_place):
        assert same_bits(result, expected)


def test_the_parts_of_out_may_not_overlap() -> None:
    base, shared = np.zeros(5), np.full(3, 7.0)
    with LocalProcessGroup(1).join(0) as member:
        with pytest.raises(ValueError, match="out, slot 1 '1': overlaps another part of out"):
            member.average([np.ones(3), np.zeros(3)], out=[base[:3], base[2:]])
        assert not base.any()
        tied = [shared, shared]  # as of an embedding that is also the last layer
        assert member.average(tied, out=tied).weights is tied
    assert shared.tolist() == [7.0] * 3


@BY_ONE_WAY
def test_a_broadcast_gives_all_members_the_weights_of_the_root(puppets: Puppets) -> None:
    def sent(member: Member) -> Any:
        counts = member.broadcast(np.arange(3) * member.rank, root=1)
        return counts, member.broadcast(model_of(member.rank), root=2)

    for counts, model in all_of(puppets.meet(), sent):
        assert counts.tolist() == [0, 1, 2]
        assert same_bits(model, model_of(2))


@BY_ONE_WAY
def test_objects_of_all_come_by_rank_whether_they_fit_into_a_mailbox_or_not(
    puppets: Puppets,
) -> None:
    def gathered(member: Member) -> Any:
        small = member.all_gather({"rank": member.rank}, "places")
        large = member.all_gather(bytes([member.rank]) * 3_000_000)
        return small.weights, large.weights

    small = {rank: {"rank": rank} for rank in range(N)}
    large = {rank: bytes([rank]) * 3_000_000 for rank in range(N)}
    assert all_of(puppets.meet(), gathered) == [(small, large)] * N


@BY_ONE_WAY
def test_different_calls_are_an_error_in_all_members(puppets: Puppets) -> None:
    def different(member: Member) -> Any:
        if member.rank == 1:
            return member.broadcast(model_of(0))
        return member.average(model_of(0, "array" if member.rank == 2 else "dict"))

    met = puppets.meet()
    for error in errors_of(met, different):
        assert isinstance(error, ValueError)
        text = str(error)
        assert "rank 0: average(layout" in text
        assert "rank 1: broadcast(layout" in text
        assert "root=0" in text
        assert "rank 2: average(layout" in text
    results = all_of(met, average_of)  # the next call works normally
    assert [record["used"] for _, record in results] == [[0, 1, 2]] * N


@BY_ONE_WAY
def test_the_first_slot_that_differs_is_named(puppets: Puppets) -> None:
    def different(member: Member) -> Any:
        size = 5 if member.rank == 2 else 4
        weights = {"kernel": np.ones((2, 2)), "bias": np.ones(size, np.float32)}
        return member.average(weights)

    for error in errors_of(puppets.meet(), different):
        assert isinstance(error, ValueError)
        expected = (
            "weights of rank 2: slot 1: expected 'bias' float32 (4,), got 'bias' float32 (5,)"
        )
        assert str(error).endswith(expected)


@BY_ONE_WAY
def test_a_member_that_leaves_is_no_fault(puppets: Puppets) -> None:
    met = puppets.meet()
    all_of(met, average_of)
    ray.get(met[1].leave.remote())
    results = all_of([met[0], met[2]], average_of)
    for weights, record in results:
        assert record["used"] == [0, 2]
        assert not record["failed"]
        assert same_bits(weights, fw.average([model_of(0), model_of(2)]))
    assert all_of([met[0], met[2]], lambda member: member.ranks) == [(0, 2)] * 2


@BY_ONE_WAY
@pytest.mark.parametrize("min_results", [pytest.param(None, marks=pytest.mark.slow), 2])
def test_a_member_that_is_killed_is_named_and_left_out(
    puppets: Puppets, min_results: int | None
) -> None:
    met = puppets.meet()
    pid = ray.get(met[1].pid.remote())
    calls = (
        [met[rank].run.remote(average_of, 1.0) for rank in (0, 2)] if min_results is None else []
    )
    os.kill(pid, signal.SIGKILL)
    if min_results is None:
        for call in calls:
            with pytest.raises(
                WorkerError, match=f"rank 1: MemberDiedError: process {pid}"
            ) as info:
                ray.get(call, timeout=60)
            cause: Any = info.value.cause  # type: ignore[attr-defined]
            assert isinstance(cause.failed[1], MemberDiedError)
        return

    def enough(member: Member) -> Any:
        return average_of(member, min_results=2)

    for weights, record in all_of([met[0], met[2]], enough):
        assert record["used"] == [0, 2]
        assert f"process {pid}" in record["failed"]["1"]
        assert same_bits(weights, fw.average([model_of(0), model_of(2)]))


@BY_ONE_WAY
def test_members_of_one_process_get_all_responses(puppets: Puppets) -> None:
    name, calls = next(NAMES), 100

    def join_twice(_: Any) -> list[int]:
        def take_part(rank: int) -> int:
            with join(name, rank=rank, size=2) as member:
                return sum(len(member.average(np.ones(1)).used) for _ in range(calls))

        with ThreadPoolExecutor() as threads:
            return list(threads.map(take_part, range(2)))

    [puppet] = puppets.idle(1)
    assert ray.get(puppet.run.remote(join_twice), timeout=120) == [2 * calls] * 2


@BY_ONE_WAY
def test_a_restarted_process_joins_again_under_its_rank(puppets: Puppets) -> None:
    met = puppets.meet(2)
    name = all_of(met, lambda member: member.name)[0]
    all_of(met, average_of)
    os.kill(ray.get(met[1].pid.remote()), signal.SIGKILL)
    fresh = Puppet.remote("shm")  # type: ignore[attr-defined]
    assert ray.get(fresh.join.remote(name, rank=1, size=2), timeout=60) == (1, 2)
    [(weights, record)] = all_of([fresh], average_of)
    assert record["late"] == [1]
    assert same_bits(weights, fw.average([model_of(0), model_of(1)]))
    for _, record in all_of([met[0], fresh], average_of):
        assert record["used"] == [0, 1]
    ray.kill(fresh)


@pytest.mark.slow
@BY_ONE_WAY
@pytest.mark.parametrize(
    "point",
    [
        *_failpoints.JOIN,
    ],
)
def test_a_process_that_dies_or_gives_up_while_it_joins_leaves_nothing(
    puppets: Puppets, point: str
) -> None:
    def try_to_join(_: Any, name: str, point: str, action: str) -> None:
        def act(reached: str) -> None:
            if reached == point and action == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            elif reached == point:
                raise TimeoutError("the time is up")

        _failpoints.hook = act
        try:
            join(name, rank=0, size=2, timeout=60.0)
        finally:
            _failpoints.hook = None

    first, second = puppets.idle(2)
    name = next(NAMES)
    other = second.join.remote(name, rank=1, size=2)
    with pytest.raises(TimeoutError, match="expected 2 members"):
        ray.get(first.run.remote(try_to_join, name, point, "give up"), timeout=60)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(first.run.remote(try_to_join, name, point, "die"), timeout=60)
    fresh = Puppet.remote("shm")  # type: ignore[attr-defined]
    joined = ray.get([fresh.join.remote(name, rank=0, size=2), other], timeout=60)
    assert joined == [(0, 2), (1, 2)]
    used = [record["used"] for _, record in all_of([fresh, second], average_of)]
    assert used == [[0, 1]] * 2
    ray.kill(fresh)


@BY_ONE_WAY
def test_another_coordinator_follows_those_that_end_before_they_have_started(
    puppets: Puppets,
) -> None:
    def find_and_join(_: Any, name: str) -> int:
        lost = "a" * 56  # the id of a node that Ray does not know any more
        config = GroupConfig.of(1, "float64", None, None)
        found = [PLATFORM.find_coordinator(Coordinator, name, lost, 64, name, config), None]

        def find(self: Any, *args: Any) -> Any:
            if not found:
                return find_again(self, *args)
            if (actor := found.pop()) is None:
                raise ConnectionError("it ended as it was found")
            return actor

        kind: Any = type(PLATFORM)
        find_again, kind.find_coordinator = kind.find_coordinator, find
        try:
            with join(name, rank=0, size=1, timeout=60.0) as member:
                return member.rank
        finally:
            kind.find_coordinator = find_again

    (puppet,) = puppets.idle(1)
    assert ray.get(puppet.run.remote(find_and_join, next(NAMES)), timeout=60) == 0


@BY_ONE_WAY
def test_a_cancelled_process_ends_no_group(puppets: Puppets, tmp_path: Path) -> None:
    def take_the_rank_of_another(name: str, rank: int, enters: Path) -> None:
        _failpoints.hook = lambda point: enters.touch() if point == "entering" else None
        join(name, rank=rank, size=2, timeout=60.0)

    first, second = puppets.idle(2)
    name = next(NAMES)
    joined = [p.join.remote(name, rank=rank, size=2) for rank, p in enumerate([first, second])]
    assert ray.get(joined, timeout=60) == [(0, 2), (1, 2)]
    task: Any = ray.remote(num_cpus=0, max_retries=0)(take_the_rank_of_another)
    entering = task.remote(name, 1, tmp_path / "enters")
    wait_for(tmp_path / "enters")
    time.sleep(0.5)  # the coordinator knows of it, and waits whether the other one is about to end
    ray.cancel(entering)
    with pytest.raises(ray.exceptions.RayError):
        ray.get(entering, timeout=60)
    used = [record["used"] for _, record in all_of([first, second], average_of)]
    assert used == [[0, 1]] * 2


def coordinator_of(name: str) -> Any:
    """Return the coordinator of a process group; None if there is none."""
    namespace = f"flatweights-{ray.get_runtime_context().get_job_id()}"
    try:
        return ray.get_actor(f"flatweights:{name}", namespace=namespace)
    except ValueError:
        return None


def wait_for_the_end_of(name: str, patience: float) -> None:
    end = time.monotonic() + patience
    while coordinator_of(name) is not None:
        assert time.monotonic() < end, "the coordinator is still there"
        time.sleep(0.05)


@BY_ONE_WAY
def test_joining_again_and_again_makes_no_further_class(puppets: Puppets) -> None:
    counts = []
    for _ in range(2):
        with join(next(NAMES), size=1, timeout=60.0):
            counts.append(len(Coordinator.__subclasses__()))
    assert counts[0] == counts[1]


@pytest.mark.slow
@BY_ONE_WAY
def test_a_process_joins_although_the_coordinator_that_another_starts_meanwhile_ends_at_once(
    puppets: Puppets, monkeypatch: pytest.MonkeyPatch
) -> None:
    [other] = puppets.idle(1)
    name = next(NAMES)
    get_actor = ray.get_actor
    looks = itertools.count(1)

    def look(*args: Any, **kwargs: Any) -> Any:
        """Look for the coordinator: Ray does so twice before it starts one, and once after."""
        number = next(looks)
        if number == 3:
            ray.get(other.leave.remote(), timeout=60)
            monkeypatch.setattr(ray, "get_actor", get_actor)
            wait_for_the_end_of(name, 50.0)
            monkeypatch.setattr(ray, "get_actor", look)
        try:
            return get_actor(*args, **kwargs)
        finally:
            if number == 2:
                ray.get(other.join.remote(name, size=1), timeout=60)

    monkeypatch.setattr(ray, "get_actor", look)
    with join(name, size=1, timeout=60.0) as member:
        assert member.rank == 0
    assert next(looks) > 4  # it has looked again


@pytest.mark.slow
@BY_ONE_WAY
def test_a_coordinator_whose_members_gave_up_ends(puppets: Puppets) -> None:
    [puppet] = puppets.idle(1)
    name = next(NAMES)
    with pytest.raises(TimeoutError):
        ray.get(puppet.join.remote(name, rank=0, size=2, timeout=0.05))
    wait_for_the_end_of(name, 50.0)  # a process group without members lasts for 60 s


@pytest.mark.slow
@BY_ONE_WAY
def test_a_coordinator_has_few_threads_however_many_members_there_are(puppets: Puppets) -> None:
    threads: list[int] = []
    for size in (2, 2000):
        name = next(NAMES)
        puppet = Puppet.remote("shm")  # type: ignore[attr-defined]
        puppet.join.remote(name, rank=1, size=size)
        while (coordinator := coordinator_of(name)) is None:
            time.sleep(0.05)
        assert len(ray.get(coordinator.awaited_by.remote(b""))[0]) >= size - 1
        pid = ray._private.state.actors(coordinator._actor_id.hex())["Pid"]
        threads.append(len([*Path(f"/proc/{pid}/task").iterdir()]))
        ray.kill(puppet)
        wait_for_the_end_of(name, 60.0)
    assert threads[1] < threads[0] + 20, threads


@BY_ONE_WAY
def test_join_names_the_ranks_that_are_missing(puppets: Puppets) -> None:
    first, second = puppets.idle(2)
    name = next(NAMES)
    first.join.remote(name, rank=1, size=3, timeout=60.0)
    while (coordinator := coordinator_of(name)) is None or ray.get(
        coordinator.awaited_by.remote(b"")
    ) != ([0, 2], False):
        time.sleep(0.05)
    with pytest.raises(TimeoutError, match=r"expected 3 members in 0.5 s; missing ranks: 2$"):
        ray.get(second.join.remote(name, rank=0, size=3, timeout=0.5))
    ray.kill(first)


@BY_ONE_WAY
def test_join_names_another_job_in_which_others_may_wait(puppets: Puppets) -> None:
    (puppet,), name = puppets.idle(1), next(NAMES)
    of_job = {"name": f"flatweights:{name}", "namespace": "flatweights-0a0a0000"}
    kind: Any = Puppet
    actor = kind.options(**of_job, lifetime="detached").remote("")
    ray.get(actor.pid.remote())
    message = "missing ranks: 1; a name is local to its Ray job, .* also in use in job 0a0a0000$"
    with pytest.raises(TimeoutError, match=message):
        ray.get(puppet.join.remote(name, rank=0, size=2, timeout=0.5))
    ray.kill(actor)


@BY_ONE_WAY
def test_who_gives_up_to_join_under_a_rank_that_is_taken_is_told_so(puppets: Puppets) -> None:
    first, second = puppets.idle(2)
    name = next(NAMES)
    ray.get(first.join.remote(name, rank=0, size=1))
    with pytest.raises(TimeoutError, match=r"in 0.5 s; rank 0 is that of another process"):
        ray.get(second.join.remote(name, rank=0, size=1, timeout=0.5))
    ray.get(first.leave.remote())


@BY_ONE_WAY
def test_who_joins_after_the_end_is_told_so(puppets: Puppets) -> None:
    first, late = puppets.idle(2)
    name = next(NAMES)
    ray.get(first.join.remote(name, rank=0, size=1))
    ray.get(first.leave.remote())
    wait_for_the_end_of(name, 60.0)
    with pytest.raises(
        TimeoutError, match=r"ranks: 0; a process group of this name has ended [0-9]+ s"
    ):
        ray.get(late.join.remote(name, rank=1, size=2, timeout=0.5))


@ray.remote(num_cpus=0, max_retries=1)  # type: ignore[untyped-decorator]
def dies_at_first(name: str, folder: Path) -> None:
    """Die in a process group; the retry joins once that has ended."""
    if not (folder / "first").exists():
        (folder / "first").touch()
        join(name, rank=1, size=2).average(model_of(1))
        os._exit(1)
    while not (folder / "ended").exists():
        time.sleep(0.05)
    join(name, rank=1, size=2, timeout=60.0)


@ray.remote(num_cpus=0)  # type: ignore[untyped-decorator]
def joins_again(name: str, rank: int) -> list[tuple[int, ...]]:
    """Leave a process group by an error, and another one as it should be, in one task."""
    used = []
    for _ in range(3):
        with (
            contextlib.suppress(LookupError),
            join(name, rank=rank, size=2, timeout=60.0) as member,
        ):
            used.append(member.average(model_of(rank)).used)
            if rank and len(used) < 3:
                member.average(model_of(rank))  # until the other has left
                raise LookupError
    return used


@pytest.mark.slow
@BY_ONE_WAY
def test_a_task_whose_member_has_ended_by_an_error_joins_again(puppets: Puppets) -> None:
    tasks = [joins_again.remote(name, rank) for name in [next(NAMES)] for rank in range(2)]
    assert ray.get(tasks) == [[(0, 1)] * 3] * 2


def mean_with(member: Member, value: float) -> tuple[float, tuple[int, ...]]:
    result = member.average({"w": np.full(3, value)})
    return float(result.weights["w"][0]), result.used


@BY_ONE_WAY
def test_who_has_left_waits_for_the_next_group_of_the_name(puppets: Puppets) -> None:
    """One training after the other: the last one's averages are none of the next one's."""
    pair = puppets.idle(2)
    name = next(NAMES)
    terms: dict[str, Any] = {"size": 2, "timeout": 60.0}
    ray.get([one.join.remote(name, rank=rank, **terms) for rank, one in enumerate(pair)])
    calls = [one.run.remote(mean_with, 10.0 * rank) for rank, one in enumerate(pair)]
    assert ray.get(calls) == [(5.0, (0, 1))] * 2
    ray.get(pair[0].leave.remote())
    with pytest.raises(TimeoutError, match=r"ranks 1 have not left the process group of this name"):
        ray.get(pair[0].join.remote(name, rank=0, size=2, timeout=1.0))
    again = pair[0].join.remote(name, rank=0, **terms)
    assert ray.wait([again], timeout=0.5) == ([], [again])
    assert ray.get(pair[1].run.remote(mean_with, 20.0)) == (20.0, (1,))
    ray.get(pair[1].leave.remote())
    ray.get([again, pair[1].join.remote(name, rank=1, **terms)])
    calls = [one.run.remote(mean_with, 100.0 * rank) for rank, one in enumerate(pair)]
    assert ray.get(calls) == [(50.0, (0, 1))] * 2


@ray.remote(num_cpus=0)  # type: ignore[untyped-decorator]
def who() -> str:
    return PLATFORM.who()


@BY_ONE_WAY
def test_a_task_is_another_process_than_the_one_before_it(puppets: Puppets) -> None:
    """Ray gives both one process; the second may take the rank of a member that has died."""
    one, other = ray.get(who.remote()), ray.get(who.remote())
    assert one != other
    assert re.fullmatch(r"process \d+ on .* \(task [0-9a-f]+\)", one)
    (puppet,) = puppets.idle(1)
    in_actor = [puppet.run.remote(lambda member: PLATFORM.who()) for _ in range(2)]
    assert len({*ray.get(in_actor)}) == 1


@ray.remote(num_cpus=0, max_retries=1)  # type: ignore[untyped-decorator]
def both_die_at_first(name: str, rank: int, folder: Path) -> tuple[int, ...]:
    """Die in a process group, as the other does; the retry joins again."""
    member = join(name, rank=rank, size=2, timeout=60.0)
    used = member.average(model_of(rank)).used
    if not (folder / f"died {rank}").exists():
        (folder / f"died {rank}").touch()
        os._exit(1)
    member.leave()
    return used


@pytest.mark.slow
@BY_ONE_WAY
def test_retries_of_all_members_meet(puppets: Puppets, tmp_path: Path) -> None:
    name = next(NAMES)
    tasks = [both_die_at_first.remote(name, rank, tmp_path) for rank in range(2)]
    assert ray.get(tasks) == [(0, 1)] * 2


@BY_ONE_WAY
def test_the_retry_of_a_task_does_not_wait_for_a_group_that_has_ended(
    puppets: Puppets, tmp_path: Path
) -> None:
    (first,) = puppets.idle(1)
    name = next(NAMES)
    task = dies_at_first.remote(name, tmp_path)
    ray.get(first.join.remote(name, rank=0, size=2))
    ray.get(first.run.remote(lambda member: member.average(model_of(0)).number))
    ray.get(first.leave.remote())
    wait_for_the_end_of(name, 60.0)
    (tmp_path / "ended").touch()
    with pytest.raises(MemberError, match=r"has ended [0-9]+ s ago, after this task's member had"):
        ray.get(task)


@BY_ONE_WAY
def test_wrong_arguments_raise_before_anything_is_sent(puppets: Puppets) -> None:
    def wrong(member: Member) -> list[str]:
        calls: list[Callable[[], Any]] = [
            lambda: member.average(np.arange(3)),
            lambda: member.average(model_of(0), -1.0),
            lambda: member.average(model_of(0), min_results=4),
            lambda: member.average(model_of(0), timeout=-1.0),
            lambda: member.average(model_of(0), nonfinite="no"),  # type: ignore[arg-type]
            lambda: member.average(model_of(0, "array"), out=np.zeros((40, 30))),
            lambda: member.broadcast(model_of(0), root=3),
            lambda: pickle.dumps(member),
            lambda: member.broadcast(model_of(0), root=None),  # type: ignore[arg-type]
            lambda: member.broadcast(object()),
            lambda: member.average(model_of(0), state={}),  # type: ignore[arg-type]
            lambda: member.broadcast_variables({}),  # type: ignore[arg-type]
            lambda: member.average(np.array([np.nan])),
        ]
        raised = []
        for call in calls:
            try:
                call()
            except (TypeError, ValueError) as error:
                raised.append(str(error))
        member.average(model_of(0))
        return raised

    for texts in all_of(puppets.meet(1), wrong):
        assert len(texts) == 13, texts
        assert [text.partition(", such as")[0] for text in texts[-5:]] == [
            "root: expected an integer, got None",
            "weights: expected an array, got object",
            "state: expected an object with layout, gather_into and scatter",
            "variables: expected an object with layout, gather_into and scatter",
            "rank 0: holds NaN or infinity",
        ]


@BY_ONE_WAY
def test_nan_is_named_by_its_rank_and_slot(puppets: Puppets) -> None:
    def diverged(member: Member, nonfinite: Any) -> Any:
        model = model_of(member.rank)
        if member.rank == 1:
            model["bias"][3] = np.nan
        return member.average(model, nonfinite=nonfinite).record()

    met = puppets.meet()
    for error in errors_of(met, diverged, "raise"):
        assert isinstance(error, ValueError)
        assert "rank 1, slot 1 'bias': holds NaN or infinity" in str(error)
    for record in all_of(met, diverged, "skip"):
        assert record["used"] == [0, 2]
        assert record["quarantined"] == [1]


@BY_ONE_WAY
def test_a_rule_takes_the_place_of_the_mean(puppets: Puppets) -> None:
    def hostile(member: Member, rule: Any) -> Any:
        model = model_of(member.rank)
        if member.rank == 1:
            model["kernel"] *= -1000
        result = member.average(model, rule=rule)
        return result.weights, result.record()

    models = [model_of(rank) for rank in range(N)]
    models[1]["kernel"] *= -1000
    met = puppets.meet()
    for weights, record in all_of(met, hostile, robust.Median()):
        assert record["used"] == [0, 1, 2]
        assert same_bits(weights, robust.median(models))
    for weights, _ in all_of(met, hostile, lambda given: given[2]):
        assert same_bits(weights, models[2])

    class LongError(Exception):
        def __init__(self, text: str, other: int) -> None:
            super().__init__(text)

    def fail(given: Any) -> Any:
        raise LongError("x" * 200_000, 1)

    for error in errors_of(met, hostile, fail):
        assert str(error).startswith("rule fail: LongError: xxx")
        assert len(str(error)) < 2000

    def different(member: Member) -> None:
        hostile(member, robust.Median() if member.rank else robust.TrimmedMean(1))

    for error in errors_of(met, different):
        assert isinstance(error, ValueError)
        assert "rank 0: average(layout" in str(error)
        assert "rule=TrimmedMean" in str(error)


@BY_ONE_WAY
def test_the_death_of_the_coordinator_is_an_error_in_all_members(puppets: Puppets) -> None:
    met = puppets.meet()
    name = all_of(met, lambda member: member.name)[0]
    namespace = f"flatweights-{ray.get_runtime_context().get_job_id()}"
    coordinator = ray.get_actor(f"flatweights:{name}", namespace=namespace)
    calls = [puppet.run.remote(average_of) for puppet in met[:2]]
    time.sleep(0.2)
    ray.kill(coordinator)
    for call in calls:
        with pytest.raises(MemberError, match=name):
            ray.get(call, timeout=60)


@BY_ONE_WAY
def test_a_coordinator_that_is_killed_counts_no_member_as_dead(way: str) -> None:
    lost: list[Any] = []

    class Dying(Coordinator):
        def __init__(self) -> None: ...

        async def lose(self, token: bytes, why: Any) -> None:
            lost.append(why)

    actor: Any = Puppet.remote(way)  # type: ignore[attr-defined]
    stays = actor.run.remote(time.sleep, 60.0)
    ray.kill(actor)
    asyncio.run(Dying()._watch(b"", "a member", stays))
    assert not lost


@BY_ONE_WAY
def test_the_coordinator_ends_with_the_last_member(puppets: Puppets) -> None:
    met = puppets.meet()
    name = all_of(met, lambda member: member.name)[0]
    for puppet in met:
        assert coordinator_of(name) is not None
        ray.get(puppet.leave.remote())
    wait_for_the_end_of(name, 60.0)


@BY_ONE_WAY
def test_an_exception_in_a_member_reaches_the_others_as_its_death(puppets: Puppets) -> None:
    met = puppets.meet(2)

    def fail(member: Member) -> None:
        with member:
            raise RuntimeError("diverged")

    with pytest.raises(RuntimeError, match="diverged"):
        ray.get(met[0].run.remote(fail))
    with pytest.raises(WorkerError, match="rank 0 left with RuntimeError: diverged"):
        ray.get(met[1].run.remote(average_of), timeout=60)
    with pytest.raises(MemberError, match="ended with RuntimeError"):
        ray.get(met[0].run.remote(average_of), timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "points"),
    [
        ("interrupt", _failpoints.MEMBER),
        ("kill", _failpoints.MEMBER),
    ],
)
def test_a_member_that_ends_at_any_point_leaves_nothing_half_done(
    how: str, points: tuple[str, ...]
) -> None:
    """Only over channels: through the object store there are no such points."""

    def end(member: Member, point: str, how: str) -> str:
        def hook(reached: str) -> None:
            if reached == point:
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise KeyboardInterrupt

        average_of(member, min_results=1)
        _failpoints.hook = hook
        try:
            average_of(member, min_results=1)
        except KeyboardInterrupt:
            pass
        finally:
            _failpoints.hook = None
        with pytest.raises(MemberError, match="broken off by KeyboardInterrupt"):
            average_of(member)
        return "ended"

    def go_on(member: Member) -> list[Any]:
        return [average_of(member, min_results=1) for _ in range(3)]

    puppets = Puppets("shm")
    for point in points:
        first, second = puppets.meet(2)
        others = first.run.remote(go_on)
        ended = second.run.remote(end, point, how)
        if how == "kill":
            with pytest.raises(ray.exceptions.ActorDiedError):
                ray.get(ended, timeout=60)
        else:
            assert ray.get(ended, timeout=60) == "ended"
        # Its weights count if they were sent completely.
        took_part = [0, 1] if point != "asking" else [0]
        for (weights, record), used in zip(ray.get(others), ([0, 1], took_part, [0]), strict=True):
            assert record["used"] in ([used] if point != "asked" else [used, [0]])
            assert same_bits(weights, fw.average([model_of(rank) for rank in record["used"]]))
    for puppet in puppets.idle(0):
        ray.kill(puppet)


@pytest.mark.parametrize("way", ["shm", "store"])
def test_an_interrupt_while_a_member_is_made_leaves_its_rank_free(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setenv("FLATWEIGHTS_RAY", way)
    with join("made", rank=1, size=2, min_size=1, grace=0.0) as other:
        with monkeypatch.context() as patched:
            patched.setattr(_member, "Twins", interrupt)
            with pytest.raises(KeyboardInterrupt):
                join("made", rank=0, size=2, min_size=1, grace=0.0)
        with join("made", rank=0, size=2, min_size=1, grace=0.0) as member:
            assert member.ranks == (0, 1)
        assert other.average(np.ones(1)).used == (1,)


def test_two_groups_at_once_in_one_process() -> None:
    results: list[float] = []

    def take_part(group: LocalProcessGroup, rank: int) -> None:
        with group.join(rank) as member:
            for k in range(20):
                mean = member.average(np.full(4, float(rank + k))).weights
                results.append(float(mean[0]) - k)

    groups = [LocalProcessGroup(2), LocalProcessGroup(2)]
    threads = [threading.Thread(target=take_part, args=(g, r)) for g in groups for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert results == [0.5] * 80


def test_an_event_loop_is_not_blocked() -> None:
    async def wait() -> None:
        join("never", size=1)

    with pytest.raises(RuntimeError, match="would block the event loop"):
        asyncio.run(wait())


def test_join_without_arguments_is_for_ray_train() -> None:
    with pytest.raises(NotInTrainError, match=r"^outside of Ray Train expected join"):
        join()


def test_attempts_of_ray_train_that_cannot_be_told_apart_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    train = pytest.importorskip("ray.train")
    worker = SimpleNamespace(
        get_experiment_name=lambda: "run", get_world_rank=lambda: 0, get_world_size=lambda: 2
    )
    monkeypatch.setattr(train, "get_context", lambda: worker)
    monkeypatch.setitem(sys.modules, "ray.train.collective", None)  # as before Ray 2.50
    with pytest.raises(NotImplementedError, match=r"Ray 2\.50 or later"):
        train_worker(1.0)


@BY_ONE_WAY
def test_a_member_that_has_left_gives_its_segments_back(puppets: Puppets) -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:flatweights")

    def averages(member: Member) -> tuple[int, int, float]:
        before = mapped()
        kept = member.average(np.full(100_000, float(member.rank))).weights
        member.leave()
        return before, mapped(), kept[0]

    for before, after, kept in all_of(puppets.meet(), averages):
        assert after <= before + 1  # the doorbell
        assert kept == 1.0
