"""Processes of a training that are killed and stopped: an oracle of each step, and no leaks."""

import itertools
import os
import random
import secrets
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from healing_programs import Run, Training

from flatweights.ray import join

pytestmark = pytest.mark.ray


def coordinator_of(name: str) -> int:
    """Return the process of the coordinator of a process group."""
    space = f"flatweights-{ray.get_runtime_context().get_job_id()}"
    coordinator = ray.get_actor(f"flatweights:{name}", space)
    pid: int = ray.get(coordinator.__ray_call__.remote(lambda _: os.getpid()))
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


@pytest.mark.slow
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


class Batches:
    """An endless order of batches that all members share: each takes its own samples of a batch."""

    def __init__(self) -> None:
        self.drawn = 0

    def draw(self) -> int:
        self.drawn += 1
        return self.drawn

    def save(self) -> bytes:
        return b"%d" % self.drawn

    def restore(self, saved: bytes) -> None:
        self.drawn = int(saved)


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)
class Reader:
    """Takes one batch a step, and notes the batches of its steps in a file that outlives it."""

    def train(self, name: str, rank: int, folder: Path) -> None:
        """Train; two processes of rank 1 are killed in a step, and the third ends the training."""
        training, batches, own, is_over = Training(0), Batches(), 0, False
        with (
            join(name, rank=rank, size=2) as member,
            (folder / f"{rank}").open("ab", buffering=0) as log,
        ):
            while not is_over:
                batch = batches.draw()
                is_last = len([*folder.glob("died *")]) == 2
                if rank == 1 and own == 10 and not is_last:
                    (folder / f"died in {batch}").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                # All members see the numbers of the batches whose gradients were averaged.
                part = {"g": training.gradient(rank), "batch": np.array([float(batch)])}
                part["end"] = np.array([float(rank == 1 and own > 10 and is_last)])
                result = member.average(part, min_results=1, state=[training, batches])
                training.apply(result.weights["g"])
                own, is_over = own + 1, result.weights["end"][0] > 0
                if rank in result.used:
                    log.write(b"%d %d\n" % (training.steps[0], batch))
                assert result.weights["batch"][0] == batches.drawn == training.steps[0]


def test_a_replaced_member_repeats_and_skips_no_batch(tmp_path: Path) -> None:
    actors = [Reader.remote() for _ in range(2)]  # type: ignore[attr-defined]
    name = secrets.token_hex(4)
    calls = [one.train.remote(name, rank, tmp_path) for rank, one in enumerate(actors)]
    ray.get(calls, timeout=300)
    assert len([*tmp_path.glob("died *")]) == 2
    survivor, replaced = (
        [
            tuple(map(int, line.split()))
            for line in (tmp_path / f"{rank}").read_text().split("\n")[:-1]
        ]
        for rank in range(2)
    )
    last = survivor[-1][0]
    assert survivor == [(step, step) for step in range(1, last + 1)]
    # Each batch was taken in the step of its number: so none twice, and none out of order.
    assert replaced == [(step, step) for step, _ in replaced]
    taken = [batch for _, batch in replaced]
    assert len({*taken}) == len(taken)
    gaps = [b - a for a, b in itertools.pairwise(taken) if b != a + 1]
    assert len(gaps) == 2, "only the batches of steps without it, for each of its two deaths"
    assert taken[-1] == last


def check_training(folder: Path, seed: int, faults: int) -> None:
    shared = {*Path("/dev/shm").glob("*flatweights*")}
    rng, run, happened = random.Random(seed), Run(folder, seed), 0
    coordinator = coordinator_of(run.name)
    open_files = Path(f"/proc/{coordinator}/fd")
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


@pytest.mark.slow
def test_each_step_is_that_of_the_oracle_though_members_are_killed(tmp_path: Path) -> None:
    check_training(tmp_path, 0, 3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
def test_a_hundred_faults(tmp_path: Path, seed: int) -> None:
    check_training(tmp_path, seed, 100)
