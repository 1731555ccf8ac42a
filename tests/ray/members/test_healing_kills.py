"""Processes of a training that are killed and stopped: an oracle of each step, and no leaks."""

import os
import random
import time
from pathlib import Path

import pytest
import ray
from healing_programs import Run

pytestmark = pytest.mark.ray


def host_of(name: str) -> int:
    """Return the process of the host of a meeting."""
    space = f"flatweights-{ray.get_runtime_context().get_job_id()}"
    host = ray.get_actor(f"flatweights:{name}", space)
    pid: int = ray.get(host.__ray_call__.remote(lambda _: os.getpid()))
    return pid


def check_training(folder: Path, seed: int, faults: int) -> None:
    shared = {*Path("/dev/shm").glob("*flatweights*")}
    rng, run, happened = random.Random(seed), Run(folder, seed), 0
    host = host_of(run.name)
    open_files = Path(f"/proc/{host}/fd")
    while happened < min(faults, 5):
        happened += run.fault(rng)
    before = len([*open_files.iterdir()])
    while happened < faults:
        happened += run.fault(rng)
    assert len([*open_files.iterdir()]) <= before + 8
    run.end()
    assert run.check() > 200
    end = time.monotonic() + 60
    while open_files.exists() or any(Path(f"/proc/{pid}").exists() for pid in run.pids):
        assert time.monotonic() < end, "a process is left"
        time.sleep(0.05)
    assert {*Path("/dev/shm").glob("*flatweights*")} <= shared


def test_each_step_is_that_of_the_oracle_though_members_are_killed(tmp_path: Path) -> None:
    check_training(tmp_path, 0, 3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
def test_a_hundred_faults(tmp_path: Path, seed: int) -> None:
    check_training(tmp_path, seed, 100)
