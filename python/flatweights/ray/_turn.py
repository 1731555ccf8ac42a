"""Calls that one thread at a time may make, and those that any thread may make beside a loop."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
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
        self._short = threading.RLock()  # held during calls for which other threads wait
        self._admits = False  # whether the call is one of a loop that others may be beside

    def __enter__(self) -> None:
        """Begin a call.

        Raises:
            RuntimeError: If another thread is in a call.
        """
        with self._short:
            is_free = self._lock.acquire(blocking=False)
        if not is_free:
            raise self._error()
        self._thread = threading.get_ident()

    def __exit__(self, *error: object) -> None:
        """End the call."""
        self._lock.release()

    @contextlib.contextmanager
    def briefly(self) -> Iterator[None]:
        """Make a call for which other threads wait.

        Raises:
            RuntimeError: If another thread is in a call.
        """
        with self._short, self:
            yield

    @contextlib.contextmanager
    def of_loop(self) -> Iterator[None]:
        """Make a call that admits calls `beside` it.

        Raises:
            RuntimeError: If another thread is in a call.
        """
        with self._short:
            self.__enter__()
            before, self._admits = self._admits, True
        try:
            yield
        finally:
            with self._short:
                self._admits = before
                self.__exit__()

    @contextlib.contextmanager
    def beside(self) -> Iterator[bool]:
        """Make a call for which others wait, if no other thread is in a call, except `of_loop`.

        Yields:
            Whether no other thread is in a call.

        Raises:
            RuntimeError: If another thread is in another call.
        """
        with self._short:
            if self._lock.acquire(blocking=False):
                try:
                    yield True
                finally:
                    self._lock.release()
            elif self._admits:
                yield False
            else:
                raise self._error()

    def _error(self) -> RuntimeError:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        return RuntimeError(
            f"expected calls of a {self._owner} from one thread at a time, got one of "
            f"{threading.current_thread().name!r} while {names.get(self._thread)!r} is in "
            "another"
        )


def alone(method: Method) -> Method:
    """Make a method run within the `Turn` that its object has as ``_turn``."""

    @functools.wraps(method)
    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        with self._turn:
            return method(self, *args, **kwargs)

    return cast("Method", call)
