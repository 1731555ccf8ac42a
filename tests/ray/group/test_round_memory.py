"""Rounds leave nothing behind: in the driver, in the workers, and in the object store."""

import gc
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import ray
from ray_workers import PlainWorker, weights_of

from flatweights.ray import WorkerGroup

pytestmark = pytest.mark.ray

WAYS = ["shm", "store"]


class Kept(NamedTuple):
    """The resources of a process.

    Attributes:
        objects: Python objects that the garbage collector knows.
        blocks: Blocks of memory that Python has allocated.
        files: Open file descriptors.
        nbytes: Bytes of its private memory.
    """

    objects: int
    blocks: int
    files: int
    nbytes: int

    @classmethod
    def by_driver(cls) -> "Kept":
        # The least of some measurements: Ray's threads come and go with hundreds of blocks.
        looks = []
        for _ in range(4):
            time.sleep(0.05)
            gc.collect()
            looks.append((len(gc.get_objects()), sys.getallocatedblocks()))
        objects, blocks = (min(counts) for counts in zip(*looks, strict=True))
        return cls(objects, blocks, *of_process(os.getpid()))


def of_process(pid: int) -> tuple[int, int]:
    """Return the number of a process's open files, and the bytes of its private memory."""
    process = Path(f"/proc/{pid}")
    (line,) = [x for x in (process / "status").read_text().splitlines() if x.startswith("RssAnon")]
    return len(list((process / "fd").iterdir())), int(line.split()[1]) * 1024


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("FLATWEIGHTS_RAY", request.param)
    out: str = request.param
    return out


def run(group: WorkerGroup, rounds: int) -> None:
    for found in group.run(rounds, "train_counted", 0.5):
        assert found.used == tuple(range(len(group.actors())))
        group.broadcast(found)


def started(workers: int, size: int) -> WorkerGroup:
    group = WorkerGroup.create(
        PlainWorker, workers, arguments=lambda rank: (rank, size), num_cpus=0
    )
    group.broadcast(weights_of(0.0, size))
    return group


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "size"),
    [
        pytest.param("shm", 5, marks=pytest.mark.slow),
        ("shm", 20_000),
        pytest.param("store", 20_000, marks=pytest.mark.slow),
    ],
    indirect=["way"],
)
def test_rounds_keep_no_objects_and_no_files_in_the_driver(way: str, size: int) -> None:
    rounds = 100
    group = started(2, size)
    run(group, rounds)
    # A leak of each round grows with every round; caches and other threads grow now and then.
    for _ in range(3):
        before = Kept.by_driver()
        run(group, rounds)
        after = Kept.by_driver()
        objects, blocks, files, _ = (b - a for a, b in zip(before, after, strict=True))
        if objects < rounds / 2 and blocks < rounds and files < 10:
            break
    group.shutdown()
    assert objects < rounds / 2
    assert blocks < rounds
    assert files < 10


@pytest.mark.slow
def test_two_thousand_rounds_leave_memory_and_files_as_they_are(way: str) -> None:
    group = started(6, 5 * 2**20 // 8)
    pids = [ray.get(actor.pid.remote()) for actor in group.actors().values()]
    run(group, 200)
    before, workers_before = Kept.by_driver(), [of_process(pid) for pid in pids]
    run(group, 1800)
    after, workers_after = Kept.by_driver(), [of_process(pid) for pid in pids]
    group.shutdown()
    print(way, before, after, workers_before, workers_after, sep="\n")
    assert after.objects - before.objects < 100
    assert after.blocks - before.blocks < 900
    assert after.files - before.files <= 2
    # Plain `ray.get` and `ray.put` of the same bytes add about 1 MB: memory that malloc has free.
    assert after.nbytes - before.nbytes < 6 << 20
    for (files, nbytes), (files_before, nbytes_before) in zip(
        workers_after, workers_before, strict=True
    ):
        assert files - files_before <= 2
        assert nbytes - nbytes_before < 6 << 20
