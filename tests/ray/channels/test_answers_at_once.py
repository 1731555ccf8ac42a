"""Answers of all workers that the core waits for, and averages, in one step."""

import functools
import gc
import itertools
import os
import signal
import time
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

import numpy as np
import pytest
from channel_processes import LARGE, Driver, value_of, weights_of
from interrupts import Interrupts

import flatweights as fw
from flatweights import _core
from flatweights._layout import Layout
from flatweights.ray.channels._message import Message
from flatweights.ray.channels._protocol import VALUE, WEIGHTS

pytestmark = pytest.mark.skipif(os.uname().sysname != "Linux", reason="channels are Linux's")


@pytest.fixture
def driver() -> Iterator[Driver]:
    made = Driver(3)
    made.values("get", 1.0)  # from now on, the layout is known
    yield made
    made.close()


def layout_of(driver: Driver) -> Layout:
    layout: Layout | None = driver.workers[0].channel.layout
    assert layout is not None
    return layout


def mean_of(
    driver: Driver,
    weights: list[float] | None = None,
    seconds: float = 30.0,
    *,
    takes_nonfinite: bool = False,
) -> fw.FlatWeights | None:
    """Return the mean of the answers; None, if it could not be made in one step."""
    layout = layout_of(driver)
    buffer = layout.new_buffer()
    channels = [worker.channel for worker in driver.workers]
    found = driver.channels.mean_of(
        channels,
        layout,
        buffer,
        weights or [1.0] * len(channels),
        seconds,
        takes_nonfinite=takes_nonfinite,
    )
    return None if found is None else fw.FlatWeights.wrap(buffer, layout)


def post_each(driver: Driver, method: str, *values: float) -> None:
    for worker, value in zip(driver.workers, values, strict=True):
        worker.post(driver.command(method, value), driver.channels)


def test_it_has_the_bits_of_average_again_and_again(driver: Driver) -> None:
    values = np.random.default_rng(0).standard_normal((8, 3))
    for k, (row, weights) in enumerate(zip(values, itertools.cycle([None, [1.0, 0.0, 2.5]]))):
        post_each(driver, "get", *row)
        mean = mean_of(driver, weights)
        expected = fw.average([np.full(LARGE, value) for value in row], weights)
        assert mean is not None, k
        assert mean["w"].tobytes() == expected.tobytes()
        assert not any(worker.channel.count_views() for worker in driver.workers)


def test_answers_can_be_read_one_by_one_in_between(driver: Driver) -> None:
    for value in (2.0, 3.0):
        driver.post("get", value)
        mean = mean_of(driver)
        assert mean is not None
        assert (mean["w"] == value).all()
        assert [float(one["w"][0]) for one in driver.values("get", value + 0.5)] == [
            value + 0.5
        ] * 3


def test_an_answer_of_another_kind_leaves_all_unread(driver: Driver) -> None:
    first, second, third = driver.workers
    for worker in (first, third):
        worker.post(driver.command("get", 2.0), driver.channels)
    second.post(driver.command("echo", "no weights"), driver.channels)
    assert mean_of(driver) is None
    assert driver.wait()
    assert second.channel.take() == (VALUE, "no weights")
    for worker in (first, third):
        kind, packed = worker.channel.take()
        assert kind == WEIGHTS
        assert (packed.weights()["w"] == 2.0).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_mean_that_is_not_finite_is_made_only_if_it_may_be(driver: Driver, value: float) -> None:
    post_each(driver, "get", 1.0, value, 3.0)
    assert mean_of(driver) is None
    assert driver.wait()
    assert [float(value_of(w.channel.take())["w"][0]) for w in driver.workers][::2] == [1.0, 3.0]
    post_each(driver, "get", 1.0, value, 3.0)
    mean = mean_of(driver, takes_nonfinite=True)
    assert mean is not None
    assert not np.isfinite(mean["w"]).any()


def test_time_that_is_up_and_a_late_answer(driver: Driver) -> None:
    first, second, third = driver.workers
    first.post(driver.command("sleep", 0.3), driver.channels)
    for worker in (second, third):
        worker.post(driver.command("get", 2.0), driver.channels)
    begin = time.monotonic()
    assert mean_of(driver, seconds=0.05) is None
    assert time.monotonic() - begin >= 0.05
    assert not first.channel.is_answered
    assert driver.wait()
    assert first.channel.take() == (VALUE, None)
    assert (value_of(third.channel.take())["w"] == 2.0).all()


def test_a_worker_that_dies_ends_the_wait(driver: Driver) -> None:
    _, second, third = driver.workers
    driver.post("get", 2.0)
    assert driver.wait()
    for worker in driver.workers:
        worker.channel.take()
    second.post(driver.command("die"), driver.channels)
    for worker in (driver.workers[0], third):
        worker.post(driver.command("get", 3.0), driver.channels)
    assert mean_of(driver) is None
    driver.channels.poll()
    assert second.channel.is_closed
    assert driver.wait([third])
    assert (value_of(third.channel.take())["w"] == 3.0).all()


def test_an_exception_of_a_signal_handler_leaves_all_unread(driver: Driver) -> None:
    def interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        driver.workers[0].post(driver.command("sleep", 0.4), driver.channels)
        for worker in driver.workers[1:]:
            worker.post(driver.command("get", 2.0), driver.channels)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            mean_of(driver)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert driver.wait()
    assert driver.workers[0].channel.take() == (VALUE, None)
    assert (value_of(driver.workers[1].channel.take())["w"] == 2.0).all()


def test_weights_of_another_layout_are_left_unread(driver: Driver) -> None:
    other = fw.FlatWeights({"other": np.ones(LARGE)}).layout
    channels = [worker.channel for worker in driver.workers]
    driver.post("get", 2.0)
    buffer = other.new_buffer()
    weights = [1.0, 1.0, 1.0]
    assert (
        driver.channels.mean_of(channels, other, buffer, weights, 30.0, takes_nonfinite=True)
        is None
    )
    assert driver.wait()
    assert [float(value_of(one.take())["w"][0]) for one in channels] == [2.0] * 3


def test_workers_that_answer_none(driver: Driver) -> None:
    channels = [worker.channel for worker in driver.workers]
    driver.post("get", 2.0)
    assert mean_of(driver) is not None
    for value in (4.0, 5.0):
        driver.post("set", weights_of(value))
        assert driver.channels.are_done(channels, 30.0)
        assert [float(one["w"][0]) for one in driver.values("get")] == [value] * 3


def test_a_worker_that_does_not_answer_none(driver: Driver) -> None:
    channels = [worker.channel for worker in driver.workers]
    driver.post("get", 2.0)
    assert mean_of(driver) is not None
    driver.workers[0].post(driver.command("echo", 7), driver.channels)
    for worker in driver.workers[1:]:
        worker.post(driver.command("forget"), driver.channels)
    assert not driver.channels.are_done(channels, 30.0)
    assert driver.wait()
    assert [one.take() for one in channels] == [(VALUE, 7), (VALUE, None), (VALUE, None)]
    driver.post("sleep", 0.3)
    assert not driver.channels.are_done(channels, 0.01)
    assert driver.channels.are_done(channels, 30.0)


def post_at_once(driver: Driver, command: Message) -> list[int] | None:
    """Post a command to all workers in one step, with the Ray calls that it needs."""
    channels = [worker.channel for worker in driver.workers]
    reader = driver.channels.reader_of(channels)
    if reader is None:
        return None
    uncalled = driver.channels.post_at_once(reader, channels, command)
    for k in uncalled or ():
        driver.workers[k].serve()
    return uncalled


def test_commands_of_all_in_one_step_again_and_again(driver: Driver) -> None:
    channels = [worker.channel for worker in driver.workers]
    driver.post("get", 2.0)
    assert mean_of(driver) is not None
    sent = weights_of(4.0)
    for _ in range(3):  # the first have to bring segments, which is not done in one step
        assert [float(one["w"][0]) for one in driver.values("get", 3.0)] == [3.0] * 3
        driver.post("set", sent)
        assert driver.channels.are_done(channels, 30.0)
    for value in range(20):
        assert post_at_once(driver, driver.command("set", sent)) is not None
        assert driver.channels.are_done(channels, 30.0)
        assert not any(driver.is_held(index) for index in range(4))
        assert post_at_once(driver, driver.command("get", float(value))) is not None
        mean = mean_of(driver)
        assert mean is not None
        assert (mean["w"] == value).all()
        assert not any(channel.count_views() for channel in channels)


def test_workers_that_have_left_are_to_be_called(driver: Driver) -> None:
    driver.post("get", 2.0)
    assert mean_of(driver) is not None
    first, *others = driver.workers
    assert first.pipe.poll(60), "it leaves its mailbox after a while"
    for worker in others:
        worker.channel.dismiss()
    called = [worker.called for worker in driver.workers]
    assert post_at_once(driver, driver.command("get", 3.0)) == [0, 1, 2]
    assert [worker.called for worker in driver.workers] == [count + 1 for count in called]
    mean = mean_of(driver)
    assert mean is not None
    assert (mean["w"] == 3.0).all()


def test_nothing_is_posted_unless_all_is_as_it_was(driver: Driver) -> None:
    channels = [worker.channel for worker in driver.workers]
    command = driver.command("get", 3.0)
    assert post_at_once(driver, command) is None, "nothing has read all answers"
    driver.post("get", 2.0)
    assert mean_of(driver) is not None
    reader = driver.channels.reader_of(channels)
    assert reader is not None
    assert driver.channels.post_at_once(reader, channels, driver.command("echo", 1)) is not None
    posts = reader.posts
    assert driver.channels.post_at_once(reader, channels, command) is None, "none was read"
    assert driver.wait()
    assert [channel.take() for channel in channels] == [(VALUE, 1)] * 3
    driver.post("get", 2.0)
    assert mean_of(driver) is not None
    second = driver.workers[1]
    second.post(driver.command("sleep", 0.2), driver.channels)
    assert driver.channels.post_at_once(reader, channels, command) is None, "one is at work"
    assert driver.wait()
    assert second.channel.take() == (VALUE, None)
    driver.post("get", 2.0)
    assert mean_of(driver) is not None
    outside = driver.command("set", weights_of(1.0))
    assert outside.extents
    assert driver.channels.post_at_once(reader, channels, outside) is None, "a segment is not known"
    assert reader.posts == posts
    assert [float(value_of(w)["w"][0]) for w in driver.answers("get", 5.0)] == [5.0] * 3


def test_the_core_refuses_wrong_commands_for_all(driver: Driver) -> None:
    driver.post("get", 2.0)
    assert mean_of(driver) is not None
    reader = driver.channels.reader_of([worker.channel for worker in driver.workers])
    assert reader is not None
    with pytest.raises(ValueError, match="at most 131072 bytes"):
        reader.post(bytes(_core.MAILBOX_BYTES + 1), [], [1, 1, 1])
    with pytest.raises(ValueError, match="each worker"):
        reader.post(b"", [], [1, 1])
    with pytest.raises(ValueError, match="expected less than 64"):
        reader.post(b"", [64], [1, 1, 1])
    assert reader.posts == 0
    assert reader.were_read


def test_an_interrupt_at_any_point_leaves_answers_that_are_not_read_to_others() -> None:
    """Neither is one taken for read that is not: its segment would be held for ever."""
    gc.collect()  # what earlier tests have left is not to be interrupted
    driver, interrupts = Driver(1), Interrupts()
    try:
        driver.values("get", 1.0)
        (worker,) = driver.workers
        layout, was_interrupted, calls = layout_of(driver), True, 0
        arguments = [worker.channel], layout, layout.new_buffer(), [-1.0], 30.0
        mean = functools.partial(driver.channels.mean_of, *arguments, takes_nonfinite=True)
        while was_interrupted:
            driver.post("get", 5.0)
            assert driver.wait()
            if calls == 0:  # which makes what the others use
                assert mean() is None  # there is no mean with that weight
            was_interrupted, calls = interrupts.hit(mean), calls + 1
            kind, packed = worker.channel.take()
            assert (kind, packed.buffer.nbytes) == (WEIGHTS, layout.nbytes)
            del packed
            assert worker.channel.count_views() == 0
        assert calls > 50
    finally:
        driver.close()
