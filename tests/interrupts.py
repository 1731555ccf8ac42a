"""Calls that are interrupted at each point at which Python can raise."""

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_OF_THE_PACKAGE = "/flatweights/"


def interrupted(call: Callable[[], Any], step: int) -> bool:
    """Call, with a KeyboardInterrupt before the ``step``-th instruction of the package.

    Returns:
        Whether there was one: False once the call has fewer instructions.
    """
    left = step

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if _OF_THE_PACKAGE not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def each_interruption(make: Callable[[], tuple[Any, Callable[[], Any]]]) -> Iterator[Any]:
    """Yield what ``make`` makes, after the call that goes with it was interrupted.

    Args:
        make: Gives a new object, and a call that changes it.
    """
    step = 0
    while True:
        target, call = make()
        if not interrupted(call, step):
            assert step > 0, "nothing of the package was called"
            return
        yield target
        step += 1
