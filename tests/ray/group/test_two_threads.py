"""A group that two threads call at once: it refuses, and works as before."""

import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray_pool import Lend
from ray_workers import PlainWorker

from flatweights import FlatWeights

pytestmark = pytest.mark.ray


class Patient(PlainWorker):
    """Answers once a file exists."""

    def wait(self, file: str, step: float) -> FlatWeights:
        Path(f"{file}.awaited").touch()
        while not Path(file).exists():
            time.sleep(0.01)
        return self.train(step)


@pytest.mark.parametrize("by", ["a handler", "a thread"])
@pytest.mark.parametrize("call", ["average", "step", "as_completed"])
def test_a_group_that_is_shut_down_in_a_call_says_so(
    lend: Lend, tmp_path: Path, call: str, by: str
) -> None:
    group = lend(Patient, 2)
    group.broadcast({"w": np.zeros(5), "n": np.int64(0)})
    wait, go = partial(getattr(group, call), "wait"), str(tmp_path / "go")

    def shut_down() -> None:
        while not Path(f"{go}.awaited").exists():
            time.sleep(0.01)
        if by == "a thread":
            group.shutdown()
        else:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    thread = threading.Thread(target=shut_down)
    before = signal.signal(signal.SIGUSR1, lambda *_: group.shutdown())
    try:
        thread.start()
        with pytest.raises(RuntimeError, match=r"^the group was shut down$"):
            next(iter(wait(go, 1.0)))
        thread.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert group._worker_set.channels.made is None
    with pytest.raises(RuntimeError, match=r"^the group was shut down$"):
        group.step("get_weights")


@pytest.mark.parametrize("outer", ["that waits for an owed answer", "of a loop"])
def test_calls_of_a_signal_handler_within_a_call_are_refused(
    lend: Lend, tmp_path: Path, outer: str
) -> None:
    """They would take answers for which that call waits."""
    group, go, refused = lend(Patient, 2), tmp_path / "go", list[str]()
    weights = {"w": np.zeros(5), "n": np.int64(0)}
    group.broadcast(weights)
    calls: list[Callable[[], object]] = [
        lambda: group.step("train", 1.0),
        lambda: group.broadcast(weights),
        lambda: group.average("train", 1.0),
        lambda: next(group.as_completed("train", 1.0)),
        lambda: group.remove(1),
    ]

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def call_all(*_: object) -> None:
        for call in calls:
            with pytest.raises(RuntimeError, match="expected no call") as error:
                call()
            refused.append(str(error.value))
        go.touch()

    def send_a_signal() -> None:
        while not (Path(f"{go}.awaited").exists() and group._turn._thread):
            time.sleep(0.01)
        time.sleep(0.05)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    def during(call: Callable[[], Any], handler: Callable[..., object]) -> Any:
        thread = threading.Thread(target=send_a_signal)
        before = signal.signal(signal.SIGUSR1, handler)
        try:
            thread.start()
            return call()
        finally:
            thread.join()
            signal.signal(signal.SIGUSR1, before)

    if outer == "of a loop":
        loop = group.as_completed("wait", str(go), 1.0, updates=1)
        found = during(lambda: next(loop), call_all)
        loop.close()
        assert [*found.weights["w"]] in ([1.0] * 5, [2.0] * 5)
    else:
        with pytest.raises(KeyboardInterrupt):
            during(lambda: group.average("wait", str(go), 1.0), interrupt)
        found = during(lambda: group.average("train", 1.0, broadcast=weights), call_all)
        assert found.weights["w"].tolist() == [1.5] * 5
    assert len(refused) == len(calls)
    found = group.average("train", 1.0, broadcast=weights)
    assert found.weights["w"].tolist() == [1.5] * 5


@pytest.mark.parametrize("is_loop", [False, True], ids=["average", "as_completed"])
def test_a_call_while_another_thread_is_in_one_is_refused(
    lend: Lend, tmp_path: Path, is_loop: bool
) -> None:
    group = lend(Patient, 2)
    weights = {"w": np.zeros(5), "n": np.int64(0)}
    group.broadcast(weights)
    used: list[int] = []
    go, begun = tmp_path / "go", threading.Event()

    def first_rank(rank: int) -> list[float]:
        begun.set()
        return [1.0]

    def run() -> None:
        if is_loop:
            loop = group.as_completed("wait", str(go), updates=4, arguments=first_rank)
            used.extend(rank for result in loop for rank in result.used)
        else:
            result = group.average("wait", str(go), arguments=first_rank)
            assert result.weights["w"].tolist() == [1.5] * 5
            used.extend(result.used)

    thread = threading.Thread(target=run, name="the first")
    thread.start()
    begun.wait()
    calls: list[Callable[[], object]] = [
        lambda: group.step("get_weights"),
        lambda: group.average("train"),
        lambda: group.broadcast(np.zeros(6)),
        group.restore,
        lambda: next(group.run(1, "train")),
        lambda: group.as_completed("train"),
    ]
    if not is_loop:  # beside which others may publish
        calls.append(lambda: group.publish(weights))
    for call in calls:
        with pytest.raises(RuntimeError, match=r"from one thread at a time.* while 'the first' is"):
            call()
    go.touch()
    thread.join()
    assert len(used) == (4 if is_loop else 2)
    group.publish(weights)
    assert group.average("train").weights["w"].tolist() == [1.5] * 5
    assert len(group.healthy_actor_ids()) == 2


@pytest.mark.slow
def test_another_thread_publishes_while_a_loop_waits(lend: Lend) -> None:
    """Each result is of one publication, the one that its round names."""
    group = lend(PlainWorker, 3, 40_000)
    weights = {"w": np.zeros(40_000), "n": np.int64(0)}
    group.publish(weights)  # as number 1, with its number as values
    begun = ended = 1
    is_over = threading.Event()

    def publish() -> None:
        nonlocal begun, ended
        while not is_over.is_set():
            begun += 1
            group.publish({"w": np.full(40_000, float(begun - 1)), "n": np.int64(begun - 1)})
            ended += 1

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=publish)
    thread.start()
    try:
        rounds = group.as_completed("get_weights", updates=300)
        while True:
            fewest = ended
            result = next(rounds, None)
            if result is None:
                break
            (staleness,) = result.staleness.values()
            values = result.weights["w"]
            assert (values == values[0]).all()
            assert result.weights["n"] == values[0]
            assert fewest - 1 <= values[0] + staleness <= begun - 1
    finally:
        is_over.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert ended > 50
    group.broadcast(weights)
    assert group.average("get_weights").weights["w"].max() == 0.0


def test_functions_of_arguments_may_call_the_group(lend: Lend) -> None:
    group = lend(PlainWorker, 4)
    latest, seen = {"w": np.full(5, 7.0), "n": np.int64(0)}, list[float]()

    def read(rank: int) -> list[float]:
        seen.append(group.step("get_weights")[0]["w"][0])
        return [1.0]

    def send(rank: int) -> list[float]:
        if rank == 1:
            group.broadcast(latest)
        return [1.0]

    assert group.average("train", arguments=send).weights["w"].tolist() == [9.5] * 5
    group.broadcast(latest)
    for _ in group.run(1, "train", round_arguments=read):
        pass
    assert seen == [7.0]
    methods: list[Any] = [group.average, group.step]
    for number, call in enumerate(methods):

        def remove(rank: int, number: int = number) -> list[float]:
            if len(group.actors()) == 4 - number:
                group.remove(3 - number, kill=False)
            return [1.0]

        call("train", arguments=remove)
        assert [*group.actors()] == [0, 1, 2][: 3 - number]

    def remove_the_next(rank: int) -> list[float]:
        if rank == 1:
            group.remove(1, kill=False)
        return [1.0]

    loop = group.as_completed("train", arguments=remove_the_next, updates=3)
    assert [found.used for found in loop] == [(0,)] * 3


@pytest.mark.parametrize("name", [pytest.param("weights", marks=pytest.mark.slow), "rule"])
def test_functions_of_results_cannot_call_the_group(lend: Lend, name: str) -> None:
    """The results that they get are those of a call that is not over."""
    group = lend(Patient, 2)
    weights = {"w": np.zeros(5), "n": np.int64(0)}
    group.broadcast(weights)
    calls: list[Callable[[], object]] = [
        lambda: group.average("train"),
        lambda: group.step("train"),
        lambda: group.broadcast(weights),
        lambda: group.publish(weights),
        lambda: group.remove(1),
        lambda: next(group.run(1, "train")),
        lambda: group.as_completed("train"),
        lambda: next(group.as_completed("train")),
    ]
    for call in calls:

        def function(results: Any, call: Callable[[], object] = call) -> Any:
            call()
            return 1.0

        for broadcast in (None, weights):
            options: Any = {name: function, "broadcast": broadcast}
            with pytest.raises(RuntimeError, match="within another one, got one in a function"):
                group.average("train", **options)
        group.broadcast(weights)
        assert group.average("train").weights["w"].tolist() == [1.5] * 5
    assert len(group.healthy_actor_ids()) == 2
