"""`Turn`: calls of one thread at a time, which interrupts leave free."""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
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
        return self.opened()

    @property
    def opened(self) -> Callable[[], str]:
        """A function that makes the inner call, and may do so within one."""
        opened = self._turn.open_to_calls(self.inner)
        assert opened is not None
        return opened

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
        "of a loop": lambda: turn.run(called.opened, admits=True),
        "briefly": lambda: turn.briefly(called.opened),
        "beside": lambda: turn.beside(lambda is_alone: str(is_alone)),
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
        return called.opened()

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


@pytest.mark.parametrize("admits", [False, True])
def test_a_call_within_one_is_refused_unless_in_a_function_that_is_open_to_calls(
    admits: bool,
) -> None:
    called = Called()
    turn, made = called._turn, list[str]()

    def refused(call: Callable[[], object]) -> None:
        with pytest.raises(
            RuntimeError, match=r"no call of a Called within another one, .* a signal"
        ):
            call()

    def within() -> None:
        refused(called.inner)
        refused(lambda: turn.briefly(called.inner))
        made.append(called.opened())
        refused(called.inner)
        if admits:  # as other threads may
            assert turn.beside(lambda is_alone: is_alone) is False
        else:
            refused(lambda: turn.beside(lambda is_alone: is_alone))
        opened = turn.open_to_calls(lambda: turn.beside(lambda is_alone: is_alone))
        assert opened is not None
        assert opened()
        nested = turn.open_to_calls(lambda: turn.run(within_that))
        assert nested is not None
        nested()

    def within_that() -> None:
        refused(called.inner)
        refused(lambda: turn.beside(lambda _: None))

    turn.run(within, admits=admits)
    assert made == ["made"]
    turn.beside(lambda _: refused(called.outer))
    turn.beside(lambda _: refused(lambda: turn.beside(lambda _: None)))
    assert called.outer() == "made"


def test_what_an_open_function_returns_step_by_step_may_make_calls_too() -> None:
    called = Called()

    def step_by_step(count: int) -> Iterator[str]:
        for _ in range(count):
            yield called.inner()

    opened = called._turn.open_to_calls(step_by_step)
    assert opened is not None
    assert [*called._turn.run(lambda: opened(2))] == ["made", "made"]
    assert called._turn.open_to_calls(None) is None


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
