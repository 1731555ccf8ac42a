"""Ctrl-C at every point of a round over channels, raw calls, shared and nested drivers."""

import contextlib
import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from interrupts import Interrupts
from ray_pool import Lend
from ray_workers import PlainWorker, trained, wait_for, weights_of
from reference import same_bits

import flatweights as fw
from flatweights.ray import WorkerError, WorkerGroup
from flatweights.ray.peers._by_channel import ChannelResult
from flatweights.ray.peers._worker_set import WorkerSet
from flatweights.ray.support import _failpoints

pytestmark = pytest.mark.ray

SIZE = 3_000


@pytest.fixture(scope="module")
def group() -> Iterator[WorkerGroup]:
    made = WorkerGroup.create(PlainWorker, 2, arguments=lambda rank: (rank, SIZE), num_cpus=0)
    yield made
    made.shutdown()


def check_round(group: WorkerGroup) -> None:
    """Make one round from newly sent weights, and compare the bits with the oracle."""
    start = weights_of(3.0, SIZE)
    group.broadcast(start)
    found = group.average("train", 2.0)
    expected = fw.average([trained(start, rank, 2.0) for rank in found.used])
    assert found.used == (0, 1)
    assert same_bits(found.weights.buffer, expected.buffer)


def leave_mailboxes(group: WorkerGroup) -> None:
    """Wait until the workers have left their mailboxes: then their Ray calls return."""
    workers: list[Any] = [group._worker_set.ranks[rank].worker for rank in range(2)]
    calls = [worker.channel.latest_call() for worker in workers if worker.channel is not None]
    ray.wait(calls, num_returns=len(calls), timeout=60)


@pytest.mark.parametrize("point", _failpoints.DRIVER)
@pytest.mark.parametrize(
    ("calls", "is_hot"),
    [
        pytest.param(2, True, id="two calls in a loop"),
        pytest.param(2, False, id="two calls after a pause", marks=pytest.mark.slow),
        pytest.param(1, True, id="one call in a loop", marks=pytest.mark.slow),
        pytest.param(1, False, id="one call after a pause"),
    ],
)
def test_an_interrupt_at_any_point_loses_nothing(
    group: WorkerGroup, point: str, is_hot: bool, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_round(group)
    if not is_hot:
        leave_mailboxes(group)
    reached: list[str] = []
    driver = threading.get_ident()  # a process group of an earlier test may still have its thread

    def interrupt(name: str) -> None:
        if name == point and not reached and threading.get_ident() == driver:
            reached.append(name)
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(_failpoints, "hook", interrupt)
        try:
            if calls == 1:
                group.average("train", 1.0, broadcast=weights_of(5.0, SIZE))
            else:
                group.broadcast(group.average("train", 1.0))
        except KeyboardInterrupt:
            assert reached
    # If all have answered at the first look, nobody waits; in a loop, no worker is called back.
    passed_by = ("waiting", "calling", "called") if is_hot else ("waiting",)
    assert reached or point in passed_by, "it was never there"
    for _ in range(2):
        check_round(group)


@pytest.mark.parametrize(
    ("where", "name"),
    [
        pytest.param(ChannelResult, "_is_there", id="one by one", marks=pytest.mark.slow),
        pytest.param(WorkerSet, "round_at_once", id="all at once"),
    ],
)
def test_an_interrupt_while_an_answer_is_read_loses_nothing(
    group: WorkerGroup, where: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, interrupts, is_over, step = getattr(where, name), Interrupts(), False, 0

    def read_half_way(*given: Any, **options: Any) -> Any:
        nonlocal is_over
        patched.undo()
        there: list[Any] = []
        is_over = not interrupts.hit(lambda: there.append(read(*given, **options)))
        if not is_over:
            raise KeyboardInterrupt
        return there[0]

    def held() -> list[int]:
        """Return how many views this process has of each segment of the workers."""
        workers: list[Any] = [group._worker_set.ranks[rank].worker for rank in range(2)]
        channels = [worker.channel for worker in workers if worker.channel is not None]
        return [channel.mailbox.holds(False, index) for channel in channels for index in range(4)]

    while not is_over:
        if step % 3 == 0 or name == "round_at_once":
            check_round(group)
        assert all(count < 100 for count in held()), "none was dropped twice"
        with monkeypatch.context() as patched:
            patched.setattr(where, name, read_half_way)
            if where is ChannelResult:
                patched.setattr(_failpoints, "hook", lambda _: None)
            with contextlib.suppress(KeyboardInterrupt):
                group.average("train", 1.0)
        step += 1
    check_round(group)
    assert step > 10


def test_a_raw_call_in_a_hot_loop_has_its_turn(group: WorkerGroup) -> None:
    """The raw call returns while the loop goes on."""
    check_round(group)
    stop = threading.Event()
    rounds = []

    def loop() -> None:
        while not stop.is_set():
            rounds.append(group.step("ping"))

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        assert ray.get(group.actors()[0].how_often.remote(), timeout=60) >= 0
        assert thread.is_alive()
    finally:
        stop.set()
        thread.join()
    assert rounds[-1] == {0: "pong", 1: "pong"}


def test_channels_that_are_insisted_on_say_what_is_missing(
    lend: Lend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLATWEIGHTS_RAY", "shm")
    at_once = lend(PlainWorker, 1, max_concurrency=4)
    with pytest.raises(RuntimeError, match=r"=shm: there is no channel .*: the actor is async"):
        at_once.step("ping")
    found = lend(PlainWorker, 1)
    found.broadcast(weights_of(1.0))
    assert found.average("train").transports == {0: "shm"}


class Nested:
    """A driver in an actor."""

    def for_ever(self, actors: list[object], began: str) -> None:
        group = WorkerGroup(actors)
        found: object = weights_of(1.0, SIZE)
        while True:
            found = group.average("train", broadcast=found, min_results=1)
            Path(began).touch() if set(found.transports.values()) == {"shm"} else None

    def pid(self) -> int:
        return os.getpid()

    def rounds(self, actors: list[object]) -> tuple[dict[int, str], float]:
        group = WorkerGroup(actors)
        for value in (1.0, 2.0, 3.0):
            group.broadcast(weights_of(value, SIZE))
            found = group.average("train")
        return found.transports, float(found.weights["w"][0])

    def beside_another(self, actors: list[object], value: float, me: str, other: str) -> list[bool]:
        """Train from ``value`` beside another driver; return which rounds had the right bits."""
        group = WorkerGroup(actors)
        weights = weights_of(value, SIZE)
        are_right: list[bool] = []
        together = 0
        while together < 30:
            expected = fw.average([trained(weights, rank) for rank in range(2)])
            weights = group.average("train", broadcast=weights).weights
            are_right.append(same_bits(weights.buffer, expected.buffer))
            Path(me).touch()
            together += Path(other).exists()
        return are_right


def test_drivers_in_an_actor_and_in_this_process_share_actors_by_channels(
    group: WorkerGroup,
) -> None:
    nested = ray.remote(num_cpus=0)(Nested).remote()
    ways, value = ray.get(nested.rounds.remote(list(group.actors().values())), timeout=120)
    assert ways == {0: "shm", 1: "shm"}
    expected = fw.average([trained(weights_of(3.0, SIZE), rank) for rank in range(2)])
    assert value == np.asarray(expected["w"])[0]
    ray.kill(nested)
    check_round(group)
    other = WorkerGroup(list(group.actors().values()))  # another driver here
    for number in (1.0, 2.0, 3.0):
        for one in (group, other):
            start = weights_of(number, SIZE)
            one.broadcast(start)
            found = one.average("train")
            expected = fw.average([trained(start, rank) for rank in range(2)])
            assert same_bits(found.weights.buffer, expected.buffer)


@pytest.mark.slow
def test_two_drivers_share_actors(group: WorkerGroup, tmp_path: Path) -> None:
    """Each driver sends its weights with the call, so no round mixes them."""
    actors = list(group.actors().values())
    paths = [str(tmp_path / name) for name in ("one", "other")]
    drivers = [ray.remote(num_cpus=0)(Nested).remote() for _ in paths]
    rounds = [
        driver.beside_another.remote(actors, value, *order)
        for driver, value, order in zip(drivers, (1.0, 50.0), (paths, paths[::-1]), strict=True)
    ]
    for are_right in ray.get(rounds, timeout=300):
        assert len(are_right) >= 30
        assert all(are_right)
    for driver in drivers:
        ray.kill(driver)
    check_round(group)


def memory_files(pid: int) -> tuple[int, int]:
    """Return how many memory files of channels a process maps, and how many it has open."""
    maps = Path(f"/proc/{pid}/maps").read_text().count("memfd:flatweights")
    names = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            names.append(str(link.readlink()))
    return maps, sum("memfd:flatweights" in name for name in names)


class Unreadable:
    """An object that can be pickled, but not unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.fspath, (3,)


class Puzzling(PlainWorker):
    def puzzle(self) -> Any:
        return [np.zeros(SIZE), Unreadable()]


def test_a_result_that_cannot_be_unpickled_is_an_error_of_its_method(lend: Lend) -> None:
    group = lend(Puzzling, 2, SIZE)
    group.broadcast(weights_of(3.0, SIZE))
    kept = []

    def puzzle() -> tuple[int, int]:
        found = group.average("train")
        assert found.transports == {0: "shm", 1: "shm"}
        text = r"rank 1: UnreadableResultError: its result cannot be unpickled: TypeError: expected"
        with pytest.raises(WorkerError, match=rf"rank 0: Unr[^\n]*\n{text} str") as caught:
            group.step("puzzle", broadcast=found)
        kept.append(caught.value)  # which holds no segment
        assert group.healthy_actor_ids() == [0, 1]
        maps = [memory_files(pid)[0] for pid in (os.getpid(), *group.step("pid").values())]
        return maps[0], maps[1]

    before = puzzle()
    for _ in range(3):
        after = puzzle()
    assert after[0] < before[0] + 3, "a mailbox and a segment for each channel"
    assert after[1] < before[1] + 3


def test_a_driver_and_a_worker_killed_at_one_moment_leave_nothing(
    lend: Lend, tmp_path: Path
) -> None:
    group = lend(PlainWorker, 2, SIZE, max_restarts=-1)
    actors = list(group.actors().values())
    check_round(group)
    pids = group.step("pid")
    before = memory_files(pids[1])
    shared = {*Path("/dev/shm").glob("*flatweights*")}
    nested = ray.remote(num_cpus=0)(Nested).remote()
    driver = psutil.Process(ray.get(nested.pid.remote(), timeout=120))
    worker = psutil.Process(pids[0])
    nested.for_ever.remote(actors, str(tmp_path / "began"))
    wait_for(tmp_path / "began")
    assert memory_files(pids[1]) > before
    for process in (driver, worker):
        process.kill()
    for process in (driver, worker):
        process.wait(60)
    del group
    gc.collect()
    again = WorkerGroup(actors)  # those that survive attach, and drop the channels of the dead
    start = weights_of(3.0, SIZE)
    found = again.average("train", broadcast=start, min_results=1)
    while found.transports[1] != "shm":
        found = again.average("train", broadcast=start, min_results=1)
    expected = fw.average([trained(start, rank) for rank in found.used])
    assert same_bits(found.weights.buffer, expected.buffer)
    after = memory_files(pids[1])
    assert after[0] < before[0] + 2, "a channel has a mailbox, a doorbell, and a segment or more"
    assert after[1] == before[1] == 0
    assert {*Path("/dev/shm").glob("*flatweights*")} <= shared
    ray.kill(nested)
