"""SIGINT, where it can be acted upon."""

import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

# A key held down sends many signals. One of them is enough, but if its exception got lost (in
# a destructor, say), a later one counts again.
_REPEAT_S = 2.0


class Interrupts(contextlib.AbstractContextManager["Interrupts"]):
    """Raises `KeyboardInterrupt` on SIGINT, but for blocks during which it is held back."""

    def __init__(self) -> None:
        """Change nothing yet."""
        self._held = ""
        self._pending = False
        self._raised = -math.inf

    def __enter__(self) -> "Interrupts":
        """Take SIGINT over."""
        self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Give SIGINT back, unless the program is on its way out because of it."""
        if kind is not KeyboardInterrupt:
            signal.signal(signal.SIGINT, self._previous)

    @contextlib.contextmanager
    def held(self, why: str) -> Iterator[None]:
        """Raise `KeyboardInterrupt` after the block if there was a signal during it.

        Args:
            why: What to tell someone who has pressed Ctrl-C and sees nothing happen.
        """
        self._held = why
        try:
            yield
        finally:
            self._held = ""
        if self._pending:
            self._pending = False
            self._raise()

    def _raise(self) -> NoReturn:
        self._raised = time.monotonic()
        raise KeyboardInterrupt

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        recently = time.monotonic() - self._raised < _REPEAT_S
        if not self._held and not recently:
            self._raise()
        if self._held and not self._pending and not recently:
            self._pending = True
            # print() might interrupt another print() here, and raise.
            os.write(sys.stderr.fileno(), f"\n{self._held}\n".encode())
