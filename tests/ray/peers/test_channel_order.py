"""A group's commands and other calls on the actors' handles run in the order of submission."""

import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from interrupts import handlers_end
from ray_pool import Lend
from ray_workers import PlainWorker, weights_of

from flatweights.ray import WorkerError, WorkerGroup
from flatweights.ray.peers._call_log import CallLog

pytestmark = pytest.mark.ray

ROUNDS = 8


class Ordered(PlainWorker):
    """Keeps the arguments of raw calls."""

    def keep(self, value: Any, *_: Any) -> Any:
        self.kept = value
        return value

    def keep_each(self, value: Any) -> Iterator[Any]:
        yield self.keep(value)

    def last_kept(self) -> Any:
        return self.kept


@pytest.fixture
def group(lend: Lend) -> WorkerGroup:
    made = lend(Ordered, 2)
    made.broadcast(weights_of(0.0))
    while set(made.average("train").transports.values()) != {"shm"}:
        pass
    return made


def on_a_copy(handle: Any, value: Any) -> None:
    copied = pickle.loads(pickle.dumps(handle))  # Ray 2.40 wants the handle to outlive the call
    copied.keep.remote(value)


def in_thread(call: Callable[[], Any]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "on the handle": lambda handle, value: handle.keep.remote(value),
    "awaited": lambda handle, value: ray.get(handle.keep.remote(value)),
    "on a copy": on_a_copy,
    "without a result": lambda handle, value: handle.keep.options(num_returns=0).remote(value),
    "a generator": lambda handle, value: handle.keep_each.remote(value),
    "in a thread": lambda handle, value: in_thread(lambda: handle.keep.remote(value)),
    "with a reference": lambda handle, value: handle.keep.remote(value, ray.put(value)),
    "by another group": lambda handle, value: other_group(handle).step("keep", value),
}
FEW = ("on the handle", "without a result", "a generator", "by another group")


def other_group(handle: Any) -> WorkerGroup:
    """Return a group that sends its worker no weights: those of the first group stay."""
    return WorkerGroup([handle], initial=None)


@pytest.mark.parametrize(
    "way", [way if way in FEW else pytest.param(way, marks=pytest.mark.slow) for way in WAYS]
)
def test_a_group_call_comes_after_the_raw_calls_before_it(group: WorkerGroup, way: str) -> None:
    for k in range(ROUNDS):
        for rank, handle in group.actors().items():
            WAYS[way](handle, (k, rank))
        assert group.step("last_kept") == {0: (k, 0), 1: (k, 1)}
        if k % 3 == 0:  # the next one finds the workers at their mailboxes, or on their way out
            group.step("ping")


def test_channels_are_used_again_after_raw_calls(group: WorkerGroup) -> None:
    for handle in group.actors().values():
        handle.keep.remote(1)
    assert group.average("train").transports == {0: "shm", 1: "shm"}


def test_a_command_waits_for_the_call_of_a_round_that_was_broken_off(lend: Lend) -> None:
    """That call is still queued when the round ends, since the other rank has raised."""
    group = lend(PlainWorker, 2)
    start = weights_of(3.0)
    for _ in range(2):
        group.broadcast(start)
        while set(group.average("train").transports.values()) != {"shm"}:
            pass
        process = group.step("pid")[1]
        os.kill(process, signal.SIGSTOP)  # most likely at its mailbox
        try:
            with pytest.raises(WorkerError, match="rank 0: ArithmeticError: diverged"):
                group.average("act", {0: "raise"}, broadcast=ray.put(start))
        finally:
            goes_on = threading.Timer(0.1, os.kill, (process, signal.SIGCONT))
            goes_on.start()
        assert group.average("act", {}).used == (0, 1)
        goes_on.join()


def test_a_signal_handler_may_follow_the_calls_of_another_actor(group: WorkerGroup) -> None:
    first, second = group.actors().values()
    assert handlers_end(lambda: CallLog.of(first), lambda: CallLog.of(second))
