"""Calls from other threads to the one thread that owns a process group, or a node agent of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import ray

from flatweights.ray.channels._driver_channel import Channels
from flatweights.ray.peers._platform import PLATFORM, GroupPlatform
from flatweights.ray.support._errors import reason_in_a_line

Result = TypeVar("Result")


class CallQueue:
    """Calls for the thread to make, in their order; true while there are any.

    Attributes:
        channels: The channels at which the thread waits, and by which it is woken.
    """

    def __init__(self, channels: Channels, platform: GroupPlatform = PLATFORM) -> None:
        """Begin without calls."""
        self.channels = channels
        self._platform = platform
        self._calls: deque[Callable[[], object]] = deque()

    def __bool__(self) -> bool:
        return bool(self._calls)

    def post(self, method: Callable[..., object], *args: Any) -> None:
        """Make the thread call ``method``."""
        self._calls.append(lambda: method(*args))
        self.channels.ring()

    def call(self, method: Callable[..., Result], *args: Any) -> Result:
        """Call ``method`` in the thread; return its result, or raise its exception."""
        return self._platform.result_of(self.called(method, *args))

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
                self._platform.get(ref)
            except ray.exceptions.OwnerDiedError:
                self.post(lost, "it or its node has died")
            except Exception as error:
                self.post(lost, reason_in_a_line(error))

        self._platform.start_thread(wait, (), "flatweights-watch")

    def read(self) -> None:
        """Make all calls; only the thread itself may call this."""
        while self._calls:
            self._calls.popleft()()
