"""`Turn`: calls of one thread at a time, which interrupts leave free."""

import contextlib
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from flatweights.ray.support._turn import Turn, alone


class Called:
    """An object with a call that others may not make meanwhile, and one within it."""

    def __init__(self) -> None:
        self._turn = Turn("Called")

    @alone
    def outer(self) -> str:
        return self.inner()

    @alone
    def inner(self) -> str:
        return "made"


def interrupted(call: Callable[[], object], after: int) -> bool:
    """Make a call, and interrupt it after so many calls of Python; return whether it was."""
    left = after

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal left
        if event in ("call", "c_return") and frame.f_code is not interrupted.__code__:
            left -= 1
            if left < 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(count)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


@pytest.mark.parametrize("way", ["alone", "of a loop", "briefly", "beside"])
def test_an_interrupt_leaves_the_turn_to_other_threads(way: str) -> None:
    called = Called()
    turn = called._turn
    calls: dict[str, Callable[[], object]] = {
        "alone": called.outer,
        "of a loop": lambda: turn.run(called.outer, admits=True),
        "briefly": lambda: turn.briefly(called.outer),
        "beside": lambda: turn.beside(lambda is_alone: called.outer()),
    }
    with ThreadPoolExecutor(1) as other:
        for after in range(1000):
            if not interrupted(calls[way], after):
                break
            assert other.submit(called.outer).result(timeout=60) == "made", after
            assert other.submit(turn.beside, lambda is_alone: is_alone).result(timeout=60), after
        else:
            pytest.fail("it was never called to its end")
    assert after > 4


@pytest.mark.parametrize("admits", [False, True])
def test_others_are_refused_during_a_call_or_may_be_beside_a_loop(admits: bool) -> None:
    called = Called()
    turn = called._turn
    begun, may_end = threading.Event(), threading.Event()

    def wait() -> str:
        begun.set()
        may_end.wait(60)
        return called.inner()

    with ThreadPoolExecutor(1) as other:
        call = other.submit(turn.run, wait, admits=admits)
        begun.wait(60)
        try:
            for refused in (called.outer, lambda: turn.briefly(called.outer)):
                with pytest.raises(RuntimeError, match="one thread at a time, got one of 'MainTh"):
                    refused()
            with contextlib.nullcontext() if admits else pytest.raises(RuntimeError):
                assert turn.beside(lambda is_alone: is_alone) is False
        finally:
            may_end.set()
        assert call.result() == "made"
    assert turn.beside(lambda is_alone: is_alone)
    assert called.outer() == "made"


def test_others_wait_for_a_brief_call() -> None:
    called = Called()
    begun, order = threading.Event(), list[str]()

    def brief() -> None:
        begun.set()
        threading.Event().wait(0.2)
        order.append("brief")

    with ThreadPoolExecutor(1) as other:
        call = other.submit(called._turn.briefly, brief)
        begun.wait(60)
        order.append(called.outer())
        call.result()
    assert order == ["brief", "made"]
