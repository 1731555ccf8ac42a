"""Answers of all workers that the core waits for, and averages, in one step."""

import gc
import itertools
import os
import signal
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

import numpy as np
import pytest
from channel_processes import LARGE, Driver, sealed, value_of, weights_of
from interrupts import Interrupts

import flatweights as fw
from flatweights import _core
from flatweights._layout import Layout
from flatweights.ray.channels._message import Message
from flatweights.ray.channels._protocol import VALUE, WEIGHTS
from flatweights.ray.support import _failpoints

pytestmark = pytest.mark.skipif(os.uname().sysname != "Linux", reason="channels are Linux's")


class AtOnce(Driver):
    """A driver that calls all its workers in one step, and reads all answers in one."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        for _ in range(3):  # the first messages bring segments, which is not done in one step
            self.values("get", 1.0)
            self.values("set", sealed(weights_of(1.0)))
        self.ends = [worker.channel for worker in self.workers]
        layout = self.ends[0].layout
        assert layout is not None
        self.layout: Layout = layout
        made = self.channels.answers_of(self.ends, layout)
        assert made is not None
        self.at_once = made

    def post_all(self, *commands: Message) -> list[int] | None:
        """Post a command to each worker, the same one if only one is given; make Ray's calls."""
        each = commands if len(commands) > 1 else commands * len(self.ends)
        uncalled = self.channels.post_at_once(self.at_once, self.ends, each)
        for k in uncalled or ():
            self.workers[k].serve()
        return uncalled

    def get_all(self, *values: float) -> None:
        assert self.post_all(*[self.command("get", value) for value in values]) is not None

    def mean(
        self,
        weights: list[float] | None = None,
        seconds: float = 30.0,
        *,
        takes_nonfinite: bool = False,
    ) -> fw.FlatWeights | None:
        """Return the mean of the answers; None, if it could not be made in one step."""
        buffer = self.layout.new_buffer()
        each = weights or [1.0] * len(self.ends)
        found = self.channels.mean_of(
            self.at_once, buffer, each, seconds, takes_nonfinite=takes_nonfinite
        )
        return None if found is None else fw.FlatWeights.wrap(buffer, self.layout)

    def are_done(self, seconds: float = 30.0) -> bool:
        return self.channels.are_done(self.at_once, len(self.ends), seconds)


@pytest.fixture
def driver() -> Iterator[AtOnce]:
    made = AtOnce(3)
    yield made
    made.close()


def test_it_has_the_bits_of_average_again_and_again(driver: AtOnce) -> None:
    values = np.random.default_rng(0).standard_normal((8, 3))
    for k, (row, weights) in enumerate(zip(values, itertools.cycle([None, [1.0, 0.0, 2.5]]))):
        driver.get_all(*row)
        mean = driver.mean(weights)
        expected = fw.average([np.full(LARGE, value) for value in row], weights)
        assert mean is not None, k
        assert mean["w"].tobytes() == expected.tobytes()
        assert not any(channel.count_views() for channel in driver.ends)
        one_by_one = [float(one["w"][0]) for one in driver.values("get", row[0])]
        assert one_by_one == [row[0]] * 3


def test_an_answer_of_another_kind_or_layout_leaves_all_unread(driver: AtOnce) -> None:
    get, echo = driver.command("get", 2.0), driver.command("echo", "no weights")
    assert driver.post_all(get, echo, get) is not None
    assert driver.mean() is None
    assert driver.wait()
    first, second, third = driver.ends
    assert second.take() == (VALUE, "no weights")
    for channel in (first, third):
        kind, packed = channel.take()
        assert kind == WEIGHTS
        assert (packed.weights()["w"] == 2.0).all()
    del packed
    # The same if the layout is another.
    other = fw.FlatWeights({"other": np.ones(LARGE)}).layout
    answers = driver.channels.answers_of(driver.ends, other)
    assert answers is not None
    commands, weights = [driver.command("get", 2.0)] * 3, [1.0] * 3
    assert driver.channels.post_at_once(answers, driver.ends, commands) is not None
    buffer = other.new_buffer()
    assert driver.channels.mean_of(answers, buffer, weights, 30.0, takes_nonfinite=True) is None
    assert driver.wait()
    assert [float(value_of(one.take())["w"][0]) for one in driver.ends] == [2.0] * 3


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_mean_that_is_not_finite_is_made_only_if_it_may_be(driver: AtOnce, value: float) -> None:
    driver.get_all(1.0, value, 3.0)
    assert driver.mean() is None
    assert driver.wait()
    assert [float(value_of(one.take())["w"][0]) for one in driver.ends][::2] == [1.0, 3.0]
    driver.get_all(1.0, value, 3.0)
    mean = driver.mean(takes_nonfinite=True)
    assert mean is not None
    assert not np.isfinite(mean["w"]).any()


def test_time_that_is_up_and_a_late_answer(driver: AtOnce) -> None:
    first, _, third = driver.ends
    get = driver.command("get", 2.0)
    assert driver.post_all(driver.command("sleep", 0.3), get, get) is not None
    begin = time.monotonic()
    assert driver.mean(seconds=0.05) is None
    assert time.monotonic() - begin >= 0.05
    assert not first.is_answered
    assert driver.wait()
    assert first.take() == (VALUE, None)
    assert (value_of(third.take())["w"] == 2.0).all()


def test_a_worker_that_dies_ends_the_wait(driver: AtOnce) -> None:
    _, second, third = driver.workers
    get = driver.command("get", 3.0)
    assert driver.post_all(get, driver.command("die"), get) is not None
    assert driver.mean() is None
    driver.channels.poll()
    assert second.channel.is_closed
    assert driver.wait([third])
    assert (value_of(third.channel.take())["w"] == 3.0).all()


def test_an_exception_of_a_signal_handler_leaves_all_unread(driver: AtOnce) -> None:
    def interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        get = driver.command("get", 2.0)
        assert driver.post_all(driver.command("sleep", 0.4), get, get) is not None
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            driver.mean()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert driver.wait()
    assert driver.ends[0].take() == (VALUE, None)
    assert (value_of(driver.ends[1].take())["w"] == 2.0).all()


def test_workers_that_answer_none(driver: AtOnce) -> None:
    sent = weights_of(4.0)
    driver.values("set", sent)  # brings the segment
    for value in range(20):
        assert driver.post_all(driver.command("set", sent)) is not None
        assert driver.are_done()
        assert not any(driver.is_held(index) for index in range(4))
        driver.get_all(float(value))
        mean = driver.mean()
        assert mean is not None
        assert (mean["w"] == value).all()
    forget = driver.command("forget")
    assert driver.post_all(driver.command("echo", 7), forget, forget) is not None
    assert not driver.are_done(), "one answers something else"
    assert driver.wait()
    assert [one.take() for one in driver.ends] == [(VALUE, 7), (VALUE, None), (VALUE, None)]
    assert driver.post_all(driver.command("sleep", 0.3)) is not None
    assert not driver.are_done(0.01)
    assert driver.are_done()


def test_workers_that_have_left_are_to_be_called(driver: AtOnce) -> None:
    driver.get_all(2.0)
    assert driver.mean() is not None
    for channel in driver.ends:
        channel.dismiss()
    called = [worker.called for worker in driver.workers]
    assert driver.post_all(driver.command("get", 3.0)) == [0, 1, 2]
    assert [worker.called for worker in driver.workers] == [count + 1 for count in called]
    mean = driver.mean()
    assert mean is not None
    assert (mean["w"] == 3.0).all()


def test_nothing_is_posted_if_it_takes_more(driver: AtOnce, monkeypatch: Any) -> None:
    command, second = driver.command("get", 3.0), driver.workers[1]
    driver.post("get", 2.0)
    assert driver.post_all(command) is None, "they have another command"
    assert driver.wait()
    assert driver.post_all(command) is None, "nobody has read the answers"
    assert [float(value_of(one.take())["w"][0]) for one in driver.ends] == [2.0] * 3
    second.post(driver.command("sleep", 0.2), driver.channels)
    assert driver.post_all(command) is None, "one is at work"
    assert driver.wait()
    assert second.channel.take() == (VALUE, None)
    driver.values("set_and_keep", weights_of(1.0))  # holds the segment that all know
    outside = driver.command("set", weights_of(2.0))
    assert outside.extents
    assert driver.post_all(outside) is None, "a segment is not known"
    with monkeypatch.context() as patched:
        patched.setattr(_failpoints, "hook", lambda _: None)
        assert driver.post_all(command) is None, "there are no such points in C++"
    assert driver.at_once.posts == 0
    driver.get_all(5.0)
    assert driver.at_once.posts == 1
    mean = driver.mean()
    assert mean is not None
    assert (mean["w"] == 5.0).all()


def test_the_core_refuses_wrong_commands(driver: AtOnce) -> None:
    answers, empty = driver.at_once, (b"", list[Any]())
    with pytest.raises(ValueError, match="at most 131072 bytes"):
        answers.post([(bytes(_core.MAILBOX_BYTES + 1), [])] * 3, [1] * 3)
    with pytest.raises(ValueError, match="each worker"):
        answers.post([empty] * 2, [1] * 2)
    with pytest.raises(ValueError, match="each worker"):
        answers.post([empty] * 3, [1] * 2)
    with pytest.raises(ValueError, match="expected less than 64"):
        answers.post([empty, (b"", [(64, 1, 0, 8)]), empty], [1] * 3)
    assert answers.posts == 0
    assert answers.were_read


def test_an_interrupt_at_any_point_leaves_answers_that_are_not_read_to_others() -> None:
    """Neither is one taken for read that is not: its segment would be held for ever."""
    gc.collect()  # what earlier tests have left is not to be interrupted
    driver, interrupts = AtOnce(1), Interrupts()
    (worker,) = driver.workers
    channel = worker.channel
    was_interrupted, calls = True, 0

    def post_and_average() -> None:
        driver.channels.post_at_once(driver.at_once, driver.ends, [command])
        driver.mean([-1.0], 0.01)  # there is no mean with that weight

    try:
        while was_interrupted:
            posts, command = driver.at_once.posts, driver.command("get", 5.0)
            while worker.pipe.poll():  # what its calls return
                worker.pipe.recv()
            was_interrupted, calls = interrupts.hit(post_and_average), calls + 1
            if driver.at_once.posts > posts:
                if not driver.wait(seconds=0.02):  # the worker has left meanwhile
                    worker.serve()
                    assert driver.wait()
                kind, packed = channel.take()
                assert (kind, packed.buffer.nbytes) == (WEIGHTS, driver.layout.nbytes)
                del packed
            assert channel.count_views() == 0
        assert calls > 50
        assert driver.at_once.posts > 10
    finally:
        driver.close()
