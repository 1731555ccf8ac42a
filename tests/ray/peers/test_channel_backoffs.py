"""Channels that cannot be made or used for a while: rounds go on through Ray, with the reason."""

import errno
import logging
import os
import resource
from typing import Any

import pytest
from ray_pool import Lend
from ray_workers import PlainWorker, trained, weights_of
from reference import same_bits

import flatweights as fw
from flatweights.ray import Round, WorkerGroup
from flatweights.ray.peers import _backoff, _by_channel, _platform
from flatweights.ray.peers._backoff import Backoff

pytestmark = pytest.mark.ray

TOO_MANY = "Too many open files"


class Poor(PlainWorker):
    """Uses up its file descriptors on request."""

    limit = 0

    def take_descriptors(self, leave: int) -> None:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        first = os.dup(0)
        os.close(first)
        resource.setrlimit(resource.RLIMIT_NOFILE, (first + leave, most))

    def give_descriptors(self) -> None:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def check_round(group: WorkerGroup) -> Round:
    start = weights_of(3.0)
    group.broadcast(start, timeout=60)
    found = group.average("train", timeout=60)
    expected = fw.average([trained(start, rank) for rank in range(2)])
    assert found.used == (0, 1)
    assert same_bits(found.weights.buffer, expected.buffer)
    return found


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "through Ray" in r.getMessage()]


@pytest.fixture(autouse=True)
def slowly(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The driver sleeps until it is woken, and tries nothing again before `try_again`."""
    monkeypatch.setattr(_by_channel, "_SLICE", 3600.0)
    monkeypatch.setattr(_backoff, "_PAUSE", 3600.0)
    monkeypatch.setattr(_backoff, "_MOST_PAUSE", 3600.0)
    caplog.set_level(logging.INFO, "flatweights")


def try_again(group: WorkerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make rounds until all workers have channels."""
    monkeypatch.setattr(Backoff, "is_over", True)
    while check_round(group).transports != {0: "shm", 1: "shm"}:
        pass


def test_a_worker_that_cannot_take_its_doorbell_is_called_through_ray(
    lend: Lend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    group = lend(Poor, 2)
    rank = group.actors()[1]
    group.step("ping")  # asks for channels
    rank.take_descriptors.remote(2)
    for _ in range(3):
        ways = check_round(group).transports
        assert TOO_MANY in ways[1]
    rank.give_descriptors.remote()
    try_again(group, monkeypatch)
    assert len({*messages(caplog)}) == len(messages(caplog)), "each reason is logged once"


def test_a_driver_that_cannot_make_channels_says_so_and_tries_again(
    lend: Lend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    group = lend(PlainWorker, 2)

    def fail() -> Any:
        raise OSError(errno.EMFILE, TOO_MANY)

    with monkeypatch.context() as patched:
        patched.setattr(_platform, "Channels", fail)
        reason = f"OSError: [Errno {errno.EMFILE}] {TOO_MANY}"
        for _ in range(3):
            assert check_round(group).transports == dict.fromkeys((0, 1), f"store: {reason}")
        assert messages(caplog) == [f"workers are reached through Ray: {reason}"]
    try_again(group, monkeypatch)


def test_channels_that_there_can_never_be_are_not_tried_again(
    lend: Lend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    group = lend(PlainWorker, 2)

    def fail() -> Any:
        raise AttributeError("no AF_UNIX")

    with monkeypatch.context() as patched:
        patched.setattr(_platform, "Channels", fail)
        group.step("ping")
    for _ in range(2):
        assert check_round(group).transports == dict.fromkeys(
            (0, 1), "store: AttributeError: no AF_UNIX"
        )
    assert len(messages(caplog)) == 1


def test_pauses_between_attempts_double(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_backoff, "_PAUSE", 1.0)
    monkeypatch.setattr(_backoff, "_MOST_PAUSE", 60.0)
    now = 100.0
    monkeypatch.setattr("flatweights.ray._clock.now", lambda: now)
    backoff = Backoff("rank 0 is")
    after = [backoff.is_over]
    for pause in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0):
        backoff.note("no memory", may_pass=True)
        for seconds in (pause - 0.5, 0.5):
            now += seconds
            after.append(backoff.is_over)
    assert after == [True] + [False, True] * 8
    backoff.note("async", may_pass=False)
    now += 1e9
    assert not backoff.is_over
