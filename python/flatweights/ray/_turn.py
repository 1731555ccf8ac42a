"""Calls that one thread at a time may make."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

Method = TypeVar("Method", bound=Callable[..., Any])


class Turn:
    """A lock that the thread in a call holds; that thread may make calls within it.

    Other threads do not wait for it, but raise: after a wait, their calls would find unexpected
    weights.
    """

    def __init__(self, owner: str) -> None:
        """Take the name of the object that is called, for errors."""
        self._owner = owner
        self._lock = threading.RLock()
        self._thread = 0  # the thread that is in a call

    def __enter__(self) -> None:
        """Begin a call.

        Raises:
            RuntimeError: If another thread is in a call.
        """
        if not self._lock.acquire(blocking=False):
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            raise RuntimeError(
                f"expected calls of a {self._owner} from one thread at a time, got one of "
                f"{threading.current_thread().name!r} while {names.get(self._thread)!r} is in "
                "another"
            )
        self._thread = threading.get_ident()

    def __exit__(self, *error: object) -> None:
        """End the call."""
        self._lock.release()


def alone(method: Method) -> Method:
    """Make a method run within the `Turn` that its object has as ``_turn``."""

    @functools.wraps(method)
    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        with self._turn:
            return method(self, *args, **kwargs)

    return cast("Method", call)
