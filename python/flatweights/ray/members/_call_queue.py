"""Calls from other threads to the one thread that owns a process group, or a node agent of it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import ray

from flatweights.ray.channels._driver_channel import Channels
from flatweights.ray.support._errors import reason_in_a_line

Result = TypeVar("Result")


class CallQueue:
    """Calls for the thread to make, in their order; true while there are any.

    Attributes:
        channels: The channels at which the thread waits, and by which it is woken.
    """

    def __init__(self, channels: Channels) -> None:
        """Begin without calls."""
        self.channels = channels
        self._calls: deque[Callable[[], object]] = deque()

    def __bool__(self) -> bool:
        return bool(self._calls)

    def post(self, method: Callable[..., object], *args: Any) -> None:
        """Make the thread call ``method``."""
        self._calls.append(lambda: method(*args))
        self.channels.ring()

    def call(self, method: Callable[..., Result], *args: Any) -> Result:
        """Call ``method`` in the thread; return its result, or raise its exception."""
        return self.called(method, *args).result()

    def called(self, method: Callable[..., Result], *args: Any) -> Future[Result]:
        """Make the thread call ``method``; return a future for its result or exception."""
        done: Future[Result] = Future()

        def call() -> None:
            try:
                done.set_result(method(*args))
            except Exception as error:
                done.set_exception(error)

        self.post(call)
        return done

    def watch(self, ref: ray.ObjectRef, lost: Callable[[str], object]) -> None:
        """Make the thread call ``lost`` with the reason, if the process that makes ``ref`` dies."""

        def wait() -> None:
            try:
                ray.get(ref)
            except ray.exceptions.OwnerDiedError:
                self.post(lost, "it or its node has died")
            except Exception as error:
                self.post(lost, reason_in_a_line(error))

        threading.Thread(target=wait, daemon=True).start()

    def read(self) -> None:
        """Make all calls; only the thread itself may call this."""
        while self._calls:
            self._calls.popleft()()
