"""Faults of whole clusters and drivers: each program has a Ray of its own.

A program is a function of this file, run in a process of its own. It checks its results against an
oracle, bit for bit, and prints the values that the test compares.
"""

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from ray_cluster import start_lean_ray
from ray_programs import output_of, program
from ray_workers import PlainWorker, trained, wait_for, weights_of
from reference import same_bits

import flatweights as fw
from flatweights import FlatWeights
from flatweights.ray import Round, StoreTooSmallError, WorkerError, WorkerGroup

pytestmark = [pytest.mark.ray(own=True), pytest.mark.starts_actors]

LARGE = 40_000  # elements; beyond 100 KiB weights lie in shared memory
MIB = 2**20
SMALLEST_STORE = 75 * MIB  # Ray takes no less
FREED_SOON = {"free_objects_period_milliseconds": 100, "oom_grace_period_s": 1}
"""Settings by which objects leave the store soon, and a full store is told soon."""


def make_group(n: int, size: int, **options: Any) -> WorkerGroup:
    return WorkerGroup.create(
        PlainWorker, n, arguments=lambda rank: (rank, size), num_cpus=0, **options
    )


def check(got: FlatWeights, before: FlatWeights, ranks: Any) -> None:
    expected = fw.average([trained(before, rank) for rank in ranks])
    assert same_bits(got.buffer, expected.buffer)


def be_interrupted(folder: str) -> None:
    start_lean_ray()
    state = Path(folder) / "state.safetensors"
    group = make_group(3, LARGE)
    expected = weights_of(1.0, LARGE)
    group.broadcast(expected)
    expected.save(state)
    found = None
    try:
        for found in group.run(2, "train"):
            check(found.weights, expected, range(3))
            expected = found.weights.copy()
            found.weights.save(state)
        print(*group.step("pid").values(), flush=True)
        for found in group.run(1, "act", {1: "hang"}, folder):
            found.weights.save(state)
    except KeyboardInterrupt:
        assert found is not None
        assert same_bits(found.weights.buffer, expected.buffer)
        assert same_bits(FlatWeights.load(state).buffer, expected.buffer)
        print("interrupted", flush=True)
        raise


@pytest.mark.slow
def test_ctrl_c_in_a_round_leaves_the_last_round(way: str, tmp_path: Path) -> None:
    with program(be_interrupted, str(tmp_path)) as driver:
        assert driver.stdout is not None
        processes = [psutil.Process(int(pid)) for pid in driver.stdout.readline().split()]
        assert len(processes) == 3
        tree = psutil.Process(driver.pid).children(recursive=True)
        wait_for(tmp_path / "1 trained")  # in the middle of the round
        os.killpg(driver.pid, signal.SIGINT)  # as a terminal does
        out, err = driver.communicate(timeout=120)
    assert out == "interrupted\n", err
    assert driver.returncode in (1, 130, -signal.SIGINT)
    assert err.rstrip().endswith("KeyboardInterrupt"), err
    _, alive = psutil.wait_procs({*processes, *tree}, timeout=60)
    assert alive == [], "no process is left"
    expected = weights_of(1.0, LARGE)
    for _ in range(2):
        expected = fw.average([trained(expected, rank) for rank in range(3)])
    assert same_bits(FlatWeights.load(tmp_path / "state.safetensors").buffer, expected.buffer)


def fill_the_store() -> None:
    os.environ["FLATWEIGHTS_RAY"] = "store"
    # No room on the disk to spill to.
    start_lean_ray(
        object_store_memory=SMALLEST_STORE,
        _system_config=FREED_SOON | {"local_fs_capacity_threshold": 1e-6},
    )
    size = 30 * MIB // 8
    group = make_group(2, size, max_inflight=2)
    start = weights_of(1.0, size)
    group.broadcast(start)
    out = weights_of(7.0, size)
    kept = out.copy()
    try:
        group.average("train", out=out)
    except WorkerError as error:
        print(error)
    assert same_bits(out.buffer, kept.buffer)
    assert group.healthy_actor_ids() == [0, 1]
    group.step("ping")  # workers answer once their results, too, are made or given up
    found = check_once_there_is_room(group, start)
    pins = []
    for weights in (weights_of(2.0, size), found):
        while True:
            with contextlib.suppress(ray.exceptions.OutOfDiskError):
                while True:
                    pins.append(ray.get(ray.put(np.zeros(size))))
            try:
                group.broadcast(weights)
            except StoreTooSmallError as error:
                print(error)
                break
    pins.clear()
    check_once_there_is_room(group, start)


def check_once_there_is_room(group: WorkerGroup, start: FlatWeights) -> Round:
    """Check a round from ``start``; wait until Ray has freed dropped objects."""
    while True:
        try:
            found = group.average("train", broadcast=start, min_results=1)
        except StoreTooSmallError:
            continue
        except WorkerError as error:
            if not all(isinstance(one, StoreTooSmallError) for one in error.failed.values()):
                raise
            continue
        assert found.used
        check(found.weights, start, found.used)
        return found


@pytest.mark.slow
def test_a_full_store_says_how_large_it_must_be() -> None:
    out = output_of(fill_the_store)
    nbytes = weights_of(0.0, 30 * MIB // 8).layout.nbytes
    need = f"need at least (2 + 2) * {nbytes:,} = {4 * nbytes:,} bytes; set ray.init("
    lines = out.splitlines()
    of_ranks = [line for line in lines if line.startswith("rank ")]
    assert of_ranks
    assert all("StoreTooSmallError: the object store is full" in line for line in of_ranks)
    assert any(need in line for line in of_ranks)
    assert sum(line.startswith("the object store is full") and need in line for line in lines) == 2


def store_in_use() -> tuple[int, int]:
    """Bytes in the object store, and bytes ever spilled from it."""
    from ray._private.internal_api import get_memory_info_reply, get_state_from_address
    from ray._private.worker import global_worker

    address = global_worker.gcs_client.address
    stats = get_memory_info_reply(get_state_from_address(address)).store_stats
    return stats.object_store_bytes_used, stats.spilled_bytes_total


def settled_use(most: int) -> int:
    """Bytes in the object store, once there are ``most``: Ray frees once in a while."""
    end = time.monotonic() + 60
    while (used := store_in_use()[0]) > most and time.monotonic() < end:
        time.sleep(0.05)
    return used


def go_round(rounds: str, mib: str, ranks: str) -> None:
    size, n = int(mib) * MIB // 8, int(ranks)
    nbytes = weights_of(0.0, size).layout.nbytes
    # N + 2 buffers; without the 16th the allocator of the store now and then finds no hole.
    room = (n + 2) * nbytes * 17 // 16
    store = max(SMALLEST_STORE, room)
    start_lean_ray(object_store_memory=store, _system_config=FREED_SOON)
    rest = store - room  # Ray's smallest store is larger: the rest is taken
    ballast = ray.get(ray.put(np.zeros(max(0, rest), np.uint8)))
    group = make_group(n, size)
    group.broadcast(weights_of(0.0, size))
    me = psutil.Process()
    begin = time.monotonic()
    used, heap = [], []
    found = None
    for k, found in enumerate(group.run(int(rounds), "train")):  # noqa: B007
        if k % max(1, int(rounds) // 20) == 0:
            used.append(settled_use(rest + (n + 2) * nbytes) - rest)
            info = me.memory_full_info()
            heap.append(info.uss)
            if len(used) == 2:
                early = settled_use(rest + 2 * nbytes) - rest
    seconds = time.monotonic() - begin
    assert found is not None
    assert found.weights["w"][0] == int(rounds) * (n + 1) / 2
    late = settled_use(rest + early + nbytes) - rest
    print(nbytes, max(used), early, late, store_in_use()[1], heap[2], heap[-1], seconds)
    assert ballast is not None


@pytest.mark.slow
def test_rounds_hold_the_object_store_and_the_heap_flat(way: str) -> None:
    rounds, mib, ranks = 200, 4, 4
    out = output_of(go_round, str(rounds), str(mib), str(ranks), timeout=600)
    nbytes, most, early, late, spilled, heap, heap_late, seconds = map(float, out.split())
    print(f"{rounds} rounds in {seconds:.1f} s, {1e3 * seconds / rounds:.1f} ms each; {out}")
    assert spilled == 0
    assert most <= (ranks + 2) * (nbytes + 4096)
    assert late <= early + nbytes
    assert heap_late <= heap + 2 * nbytes + 8 * MIB
