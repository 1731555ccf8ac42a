"""Calls for which other threads wait, and which a signal handler cannot make within another."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


class CallLock:
    """A lock that is held during calls of one object.

    Attributes:
        lock: The lock. It is reentrant: a signal handler runs in the thread of the call that it
            interrupts, so it would wait for that call for ever. Its own call is refused instead.
    """

    def __init__(self, owner: str) -> None:
        """Take what the object is, for errors."""
        self.lock = threading.RLock()
        self._owner = owner
        self._is_in_call = False

    def run(self, call: Callable[[], Result]) -> Result:
        """Make a call, once that of another thread has ended, and return its result.

        Raises:
            RuntimeError: If this thread is in a call already.
        """
        with self.lock:
            if self._is_in_call:
                raise RuntimeError(
                    f"this thread is in a call of the {self._owner} already. In a signal handler, "
                    "set a flag, and make the call later"
                )
            try:
                self._is_in_call = True
                return call()
            finally:
                self._is_in_call = False
