"""Calls that are interrupted at each point at which Python can raise or run a signal handler."""

import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

_OF_THE_PACKAGE = "/flatweights/"


def _interrupt() -> NoReturn:
    raise KeyboardInterrupt


class Interrupts:
    """Interrupts one call after the other, each call one instruction of the package later.

    Tracing instructions takes ten times as long as tracing lines. So only the instructions behind
    the line of the last interrupt are traced; the number of those before it is known from the last
    call.
    """

    def __init__(
        self, handler: Callable[[], Any] = _interrupt, *, at_lines_only: bool = False
    ) -> None:
        """Begin before the first instruction.

        Args:
            handler: What runs at the interrupt: by default it raises a KeyboardInterrupt.
            at_lines_only: Whether only the first instruction of each line is interrupted.
        """
        self._handler = handler
        self._at_lines_only = at_lines_only
        self._line = 0  # lines that begin, functions that are entered
        self._instruction = 0  # those since then

    def hit(self, call: Callable[[], Any]) -> bool:
        """Run ``call``, with an interrupt before the next instruction.

        Returns:
            Whether it was interrupted: False once the call has fewer instructions.
        """
        line, left = -1, self._instruction
        is_hit = False

        def enter(frame: FrameType, _: str, __: Any) -> Any:
            if _OF_THE_PACKAGE not in frame.f_code.co_filename:
                return None
            return go_on(frame, "line", None)

        def go_on(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal line, left, is_hit
            if is_hit:
                return None
            if event == "line":
                line += 1
                if self._at_lines_only:
                    if line == self._line:
                        self._line, is_hit = line + 1, True
                        self._handler()
                elif line >= self._line:
                    if line > self._line:  # the line of the last interrupt has no more instructions
                        self._line, self._instruction, left = line, 0, 0
                    _trace_instructions(frame)
            elif event == "opcode":
                left -= 1
                if left < 0:
                    self._instruction += 1
                    is_hit = True
                    self._handler()
            return go_on

        before = sys.gettrace()
        sys.settrace(enter)
        try:
            call()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return is_hit


def _trace_instructions(frame: FrameType | None) -> None:
    """Trace the instructions of a function, and of its callers, to which it returns."""
    while frame is not None:
        if frame.f_trace is not None or _OF_THE_PACKAGE in frame.f_code.co_filename:
            frame.f_trace_opcodes = True
        frame = frame.f_back


def each_interruption(make: Callable[[], tuple[Any, Callable[[], Any]]]) -> Iterator[Any]:
    """Yield each object of ``make``, after the call that belongs to it was interrupted.

    Args:
        make: A function that returns a new object, and a call that changes it.
    """
    interrupts = Interrupts()
    target, call = make()
    assert interrupts.hit(call), "nothing of the package was called"
    while True:
        yield target
        target, call = make()
        if not interrupts.hit(call):
            return


def handlers_end(call: Callable[[], Any], handler: Callable[[], Any]) -> bool:
    """Whether ``handler`` may run within each instruction of ``call``, and waits for no lock.

    If it does, the thread that waits is left.
    """

    def run() -> None:
        interrupts = Interrupts(handler)
        while interrupts.hit(call):
            pass

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout=60)
    return not thread.is_alive()
