"""Waiting for the answer of an actor in a thread that may outlive `ray.shutdown`."""

from __future__ import annotations

import threading
from concurrent.futures import TimeoutError as LateError
from typing import Any

import ray

from flatweights.ray import _clock
from flatweights.ray.support._errors import check_connected

_LOOK = 0.2  # seconds between two looks whether Ray is still there
_PAUSE = 0.001  # seconds between the first two looks of the main thread


def answer_of(ref: ray.ObjectRef, timeout: float) -> Any:
    """Return what `ray.get` would return, or raise what it would raise.

    The thread does not wait inside a call of Ray. If one did while another thread shuts Ray down,
    as the end of every program does, Ray would end the process at once, without a word and with
    code 1.

    Nor does the main thread, to which interrupts come, wait for a future: an interrupt may leave
    its lock taken, and Ray's own thread, which needs it for the result, would then handle no answer
    of this process any more.

    Raises:
        ray.exceptions.GetTimeoutError: If there is no answer after ``timeout`` seconds.
        RuntimeError: If Ray is shut down.
        Exception: The exception of the call.
    """
    end, pause = _clock.now() + timeout, _PAUSE
    is_main = threading.current_thread() is threading.main_thread()
    future = None if is_main else ref.future()
    while True:
        check_connected()
        left = max(0.0, end - _clock.now())
        if future is not None:
            try:
                return future.result(min(left, _LOOK))
            except LateError:
                if future.done():  # the call has raised it, or has ended just now
                    return future.result()
        elif ray.wait([ref], timeout=0)[0]:
            return ray.get(ref)
        else:
            _clock.sleep(min(left, pause))
            pause = min(2 * pause, _LOOK)
        if left <= 0:
            if is_main:
                ref.future()  # the call may still fail, and Ray logs errors that nobody fetches
            raise ray.exceptions.GetTimeoutError(f"no answer within {timeout:g} s")
