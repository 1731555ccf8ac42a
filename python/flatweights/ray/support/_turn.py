"""Calls that one thread at a time may make, and those that any thread may make beside a loop."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

Method = TypeVar("Method", bound=Callable[..., Any])
Function = TypeVar("Function", bound=Callable[..., Any])
Result = TypeVar("Result")


class Turn:
    """The turn of the thread that is in a call.

    Other threads do not wait for it, but raise: after a wait, their calls would find unexpected
    weights. So do calls of the same thread within it, by a signal handler or a user's function,
    which would find half of its work done; except in functions that are made `open_to_calls`.

    An interrupt, such as Ctrl-C, may come between any two calls of Python, and leaves no turn
    taken: the frame that takes it gives it back by an assignment, and ``with`` is for locks alone.
    """

    def __init__(
        self, owner: str, lock: Any = None, thread: Callable[[], int] = threading.get_ident
    ) -> None:
        """Take the name of the object that is called, for errors.

        Args:
            owner: The name.
            lock: A lock that its owner may take again; a new one, if None.
            thread: Returns the number of the thread that calls it, which is not 0.
        """
        self._owner = owner
        self._ident = thread
        self._thread = 0  # the thread that is in a call; 0, if none is
        self._admits = False  # whether the call is one of a loop that others may be beside
        self._is_open = False  # whether that thread may make a call within it
        self._is_beside = False  # whether a thread is in a call beside one of a loop, or alone
        self._ended = ""  # why there are no more calls
        self._close: Callable[[], object] | None = None  # what is to follow the last call
        # Held during calls for which other threads wait.
        self._short: Any = threading.RLock() if lock is None else lock

    def run(self, call: Callable[[], Result], *, admits: bool = False) -> Result:
        """Make a call, and return its result.

        Args:
            call: The call.
            admits: Whether it is one of a loop, which admits calls `beside` it.

        Raises:
            RuntimeError: If a thread is in a call; or if the call has failed after `end`.
        """
        own = self._ident()
        if self._thread == own:
            with self._short:
                if self._is_beside or not self._is_open:
                    raise self._within_error()
                of_outer = self._admits
                self._is_open, self._admits = False, admits
            try:
                return call()
            finally:
                self._is_open, self._admits = True, of_outer
        was_over = bool(self._ended)
        try:
            with self._short:
                if self._is_beside:  # this thread is: others wait for the lock
                    raise self._within_error()
                if self._thread:
                    raise self._error()
                self._thread, self._admits, self._is_open = own, admits, False
            return call()
        except Exception as error:
            if self._ended and not was_over and self._thread == own:
                raise RuntimeError(self._ended) from error
            raise
        finally:
            if self._thread == own:
                self._thread = 0
                self._close_if_over()

    def open_to_calls(self, function: Function | None) -> Function | None:
        """Return a user's ``function``, which may make calls when it is called within one.

        Nothing of that call may be half done then. What it returns by an iterator is listed.
        """
        if function is None:
            return None

        @functools.wraps(function)
        def opened(*args: Any) -> Any:
            try:
                self._is_open = True
                found = function(*args)
                return [*found] if isinstance(found, Iterator) else found
            finally:
                self._is_open = False

        return cast("Function", opened)

    def end(self, why: str, close: Callable[[], object]) -> None:
        """Run ``close`` once no call runs: now, or at the end of one that runs.

        If that call raises an error, it may be because of what has ended it, which ``why`` tells.
        A signal handler and other threads may end an object that is in a call.
        """
        self._ended, self._close = why, close
        self._close_if_over()

    def _close_if_over(self) -> None:
        if self._thread or self._is_beside:
            return
        close, self._close = self._close, None
        if close is not None:
            close()

    def briefly(self, call: Callable[[], Result]) -> Result:
        """Make a call for which other threads wait, and return its result.

        Raises:
            RuntimeError: As `run`.
        """
        with self._short:
            return self.run(call)

    def beside(self, call: Callable[[bool], Result]) -> Result:
        """Make a call for which others wait, if no thread is in a call, except of a loop.

        Args:
            call: The call. Its argument is whether no thread is in a call.

        Raises:
            RuntimeError: If a thread is in another call.
        """
        with self._short:
            is_own = self._is_beside or self._thread == self._ident()
            is_alone = not self._thread or (is_own and self._is_open)
            if self._is_beside or not (is_alone or self._admits):
                raise self._within_error() if is_own else self._error()
            self._is_beside = True
            try:
                return call(is_alone)
            finally:
                self._is_beside = False
                self._close_if_over()

    def _within_error(self) -> RuntimeError:
        return RuntimeError(
            f"expected no call of a {self._owner} within another one, got one in a function that "
            "was passed as weights= or rule=, or in a signal handler"
        )

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
        return self._turn.run(functools.partial(method, self, *args, **kwargs))

    return cast("Method", call)
