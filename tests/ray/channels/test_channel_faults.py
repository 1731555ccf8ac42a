"""Workers and drivers that die, stop or sleep at every point of the protocol of channels."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from channel_processes import Driver, WorkerProcess, start_driver, value_of, weights_of

from flatweights.ray.support._failpoints import DRIVER, WORKER

pytestmark = pytest.mark.skipif(os.uname().sysname != "Linux", reason="channels are Linux's")

ACTIONS = ("die", "stop", "sleep")
FEW = ("called", "gathered", "sending", "waiting")
"""Points at which a process of the default run stops or sleeps, too."""


@pytest.fixture
def driver() -> Iterator[Driver]:
    made = Driver(2)
    yield made
    made.close()


def state_of(worker: WorkerProcess) -> str:
    return Path(f"/proc/{worker.process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def check_late(driver: Driver, late: WorkerProcess, other: WorkerProcess) -> None:
    """Continue with ``other`` alone, and then with both again."""
    end = time.monotonic() + 60
    while state_of(late) != "T":
        assert time.monotonic() < end
        time.sleep(0.001)
    is_answered = late.channel.is_answered
    kept = value_of(late.channel.take()) if is_answered else None
    for value in (7.0, 8.0):
        other.post(driver.command("get", value), driver.channels)
        assert driver.wait([other])
        assert (value_of(other.channel.take())["w"] == value).all()
    if kept is not None:
        assert (kept["w"] == 2.0).all()
    late.signal(signal.SIGCONT)
    assert driver.wait([late])
    if kept is None:
        assert (value_of(late.channel.take())["w"] == 2.0).all()


def come_to_wait(driver: Driver, worker: WorkerProcess) -> None:
    """Send commands until the worker has died or stopped while it waited for one.

    It does not wait after an answer that ends its call because that has lasted long enough.
    """
    outcomes = 0
    with contextlib.suppress(EOFError, ConnectionResetError, psutil.NoSuchProcess):  # it has died
        while worker.process.status() != psutil.STATUS_STOPPED:
            if worker.pipe.poll(0.005):
                worker.outcomes(1)
                outcomes += 1
                if outcomes == worker.called:
                    assert (value_of(worker.channel.take())["w"] == 2.0).all()
                    worker.post(driver.command("get", 2.0), driver.channels)


@pytest.mark.parametrize(
    ("point", "action"),
    [
        pytest.param(point, action, marks=() if is_few else pytest.mark.slow)
        for point in WORKER
        for action, is_few in (("die", True), ("stop", point in FEW), ("sleep", False))
    ],
)
def test_a_worker_fails_at_a_point(driver: Driver, point: str, action: str) -> None:
    first, second = driver.workers
    driver.values("get", 1.0)
    if point == "called":  # the next command finds it outside of its call
        assert first.outcomes(1) == [("value", None)]
    first.post(driver.command("fail_at", point, action), driver.channels)
    assert driver.wait([first])
    assert value_of(first.channel.take()) is None
    if point == "called":
        first.channel.dismiss()
        assert first.outcomes(1) == [("value", None)]
    driver.post("get", 2.0)
    assert driver.wait([second])
    assert (value_of(second.channel.take())["w"] == 2.0).all()
    if point == "waited" and action != "sleep":
        come_to_wait(driver, first)
    if action == "stop":
        check_late(driver, first, second)
    elif action == "sleep":
        assert driver.wait([first])
        assert (value_of(first.channel.take())["w"] == 2.0).all()
    else:
        while not first.channel.is_closed:
            driver.channels.wait([], 60)
        if first.channel.is_answered:  # it died afterwards
            assert (value_of(first.channel.take())["w"] == 2.0).all()
        driver.workers = [second]
    for value in (3.0, 4.0):
        assert all((w["w"] == value).all() for w in driver.values("get", value))


@pytest.mark.parametrize("action", ACTIONS)
def test_a_worker_fails_between_the_halves_of_a_set(driver: Driver, action: str) -> None:
    first, second = driver.workers
    driver.values("set", weights_of(1.0))
    new = weights_of(5.0)
    first.post(driver.command("set_by_halves", new, action), driver.channels)
    second.post(driver.command("set", new), driver.channels)
    assert driver.wait([second])
    if action == "die":
        while not first.channel.is_closed:
            driver.channels.wait([], 60)
        assert not first.channel.is_answered
        driver.workers = [second]
    else:
        if action == "stop":
            assert not driver.wait([first], seconds=0.05)
            assert driver.is_held(0) or driver.is_held(1), "it still reads them"
            first.signal(signal.SIGCONT)
        assert driver.wait([first])
    assert all((w["w"] == 5.0).all() for w in driver.values("get"))


@pytest.mark.parametrize(
    ("point", "action"),
    [
        pytest.param(point, action, marks=() if is_few else pytest.mark.slow)
        for point in DRIVER
        for action, is_few in (("die", True), ("stop", False), ("sleep", point in FEW))
    ],
)
def test_a_driver_fails_at_a_point(point: str, action: str) -> None:
    """A driver that dies leaves no process and no file; one that goes on has lost nothing."""
    shared = set(Path("/dev/shm").glob("flatweights*"))
    program, pipe, worker = start_driver(point, action)
    if action == "stop":
        end = time.monotonic() + 60
        stat = Path(f"/proc/{program.pid}/stat")
        while stat.read_text().rsplit(")", 1)[1].split()[0] != "T":
            assert time.monotonic() < end
            time.sleep(0.001)
        time.sleep(0.02)
        assert program.pid is not None
        os.kill(program.pid, signal.SIGCONT)
    program.join(60)
    if action == "die":
        assert program.exitcode == -signal.SIGKILL
    else:
        assert program.exitcode == 0
        assert pipe.recv() == "done"
    end = time.monotonic() + 60
    while Path(f"/proc/{worker}").exists():
        assert time.monotonic() < end
        time.sleep(0.005)
    assert set(Path("/dev/shm").glob("flatweights*")) <= shared
