"""The turn of the thread that makes a member's call."""

import contextlib
import signal
import threading
import time
from typing import Any

import pytest

from flatweights._core import MemberTurn


def test_one_thread_at_a_time_has_it() -> None:
    turn, inside, most = MemberTurn(), 0, 0
    counts = [0] * 4

    def act(k: int) -> None:
        nonlocal inside, most
        for _ in range(200):
            with turn:
                inside += 1
                most = max(most, inside)
                assert turn.is_taken
                assert turn.is_own
                counts[k] += 1
                time.sleep(0)
                inside -= 1

    threads = [threading.Thread(target=act, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert counts == [200] * 4
    assert most == 1
    assert not turn.is_taken
    assert not turn.is_own


def test_it_is_given_back_after_an_error() -> None:
    turn = MemberTurn()
    with contextlib.suppress(ValueError), turn:
        raise ValueError
    assert not turn.is_taken


def test_a_signal_ends_the_wait_for_it() -> None:
    turn, taken, over = MemberTurn(), threading.Event(), threading.Event()

    def keep() -> None:
        with turn:
            taken.set()
            over.wait(60.0)

    def interrupt(number: int, frame: Any) -> None:
        raise InterruptedError

    thread = threading.Thread(target=keep)
    thread.start()
    assert taken.wait(60.0)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(InterruptedError), turn:
            raise AssertionError("the other thread has it")
    finally:
        signal.signal(signal.SIGALRM, before)
        over.set()
        thread.join(60.0)
    assert not turn.is_taken


def test_nobody_goes_on_with_what_no_step_has_asked() -> None:
    turn = MemberTurn()
    assert turn.resume() is None
    with turn:
        assert turn.resume() is None
        turn.forget_steps()
    assert not turn.is_taken
