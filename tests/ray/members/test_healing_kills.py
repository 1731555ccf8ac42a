"""Processes of a training that are killed and stopped: an oracle of each step, and no leaks."""

import os
import random
import secrets
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from healing_programs import Run, Training

from flatweights.ray import join

pytestmark = pytest.mark.ray


def host_of(name: str) -> int:
    """Return the process of the host of a meeting."""
    space = f"flatweights-{ray.get_runtime_context().get_job_id()}"
    host = ray.get_actor(f"flatweights:{name}", space)
    pid: int = ray.get(host.__ray_call__.remote(lambda _: os.getpid()))
    return pid


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)
class Restarted:
    """An actor whose method joins again, in the process that Ray starts in the place of another."""

    def descend(self, name: str, rank: int, marker: Path) -> Any:
        """Return how many steps there were, of which this process took some, and their result."""
        training, own = Training(0), 0
        used: tuple[int, ...] = ()
        with join(name, rank=rank, size=2) as member:
            was_late = member.lacks_state
            while training.steps[0] < 20 or len(used) < 2:
                if rank == 1 and own == 10 and not marker.exists():
                    marker.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                mean = {"g": training.gradient(rank)}
                result = member.average(mean, min_results=1, state=training)
                training.apply(result.weights["g"])
                own, used = own + 1, result.used
        return int(training.steps[0]), own, was_late, training.digest()


def test_an_actor_that_ray_starts_again_is_healed(tmp_path: Path) -> None:
    actors = [Restarted.remote() for _ in range(2)]  # type: ignore[attr-defined]
    name, marker = secrets.token_hex(4), tmp_path / "died"
    calls = [actor.descend.remote(name, rank, marker) for rank, actor in enumerate(actors)]
    (steps, own, was_late, digest), (same, others, lacked, healed) = ray.get(calls, timeout=300)
    assert marker.exists()
    assert (was_late, lacked) == (False, True)
    assert own == steps == same, "no step of the survivor is lost"
    assert 2 <= others <= steps - 10
    assert digest == healed


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
