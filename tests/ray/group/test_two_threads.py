"""A group that two threads call at once: it refuses, and works as before."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from ray_pool import Lend
from ray_workers import PlainWorker

from flatweights import FlatWeights

pytestmark = pytest.mark.ray


class Patient(PlainWorker):
    """Answers once a file exists."""

    def wait(self, file: str, step: float) -> FlatWeights:
        while not Path(file).exists():
            time.sleep(0.01)
        return self.train(step)


def test_a_call_while_another_thread_is_in_one_is_refused(lend: Lend, tmp_path: Path) -> None:
    group = lend(Patient, 2)
    group.broadcast({"w": np.zeros(5), "n": np.int64(0)})
    results: list[FlatWeights] = []
    go, begun = tmp_path / "go", threading.Event()

    def first_rank(rank: int) -> list[float]:
        begun.set()
        return [1.0]

    def run() -> None:
        results.append(group.average("wait", str(go), arguments=first_rank).weights)

    thread = threading.Thread(target=run, name="the first")
    thread.start()
    begun.wait()
    calls: list[Callable[[], object]] = [
        lambda: group.step("get_weights"),
        lambda: group.average("train"),
        lambda: group.broadcast(np.zeros(6)),
        group.restore,
        lambda: next(group.run(1, "train")),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=r"from one thread at a time.* while 'the first' is"):
            call()
    go.touch()
    thread.join()
    assert results[0]["w"].tolist() == [1.5] * 5
    assert group.average("train").weights["w"].tolist() == [0.0 + 1.0 * 1.5 + 1.5] * 5
    assert len(group.healthy_actor_ids()) == 2


def test_a_call_while_another_thread_waits_in_as_completed_is_refused(
    lend: Lend, tmp_path: Path
) -> None:
    group = lend(Patient, 2)
    group.broadcast({"w": np.zeros(5), "n": np.int64(0)})
    go, begun, used = tmp_path / "go", threading.Event(), list[int]()

    def arguments(rank: int) -> list[float]:
        begun.set()
        return [1.0]

    def run() -> None:
        for result in group.as_completed("wait", str(go), updates=4, arguments=arguments):
            used.extend(result.used)

    thread = threading.Thread(target=run, name="the first")
    thread.start()
    begun.wait()
    for call in (lambda: group.step("ping"), lambda: next(group.as_completed("train"))):
        with pytest.raises(RuntimeError, match=r"from one thread at a time.* while 'the first' is"):
            call()
    go.touch()
    thread.join()
    assert len(used) == 4
    assert group.average("train").used == (0, 1)


def test_a_function_that_a_round_calls_may_call_the_group(lend: Lend) -> None:
    group = lend(PlainWorker, 2)
    group.broadcast({"w": np.zeros(5), "n": np.int64(0)})
    seen = []

    def arguments(rank: int) -> list[float]:
        seen.append(group.step("get_weights")[0]["w"][0])
        return [1.0]

    for _ in group.run(1, "train", round_arguments=arguments):
        pass
    assert seen == [0.0]
