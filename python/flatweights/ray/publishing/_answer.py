"""Waiting for the answer of an actor in a thread that may outlive `ray.shutdown`."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import TimeoutError as LateError
from typing import Any

import ray

from flatweights.ray._errors import check_connected

_LOOK = 0.2  # seconds between two looks whether Ray is still there


def answer_of(ref: ray.ObjectRef, timeout: float) -> Any:
    """Return what `ray.get` would return, or raise what it would raise.

    The thread does not wait inside a call of Ray. If one did while another thread shuts Ray down,
    as the end of every program does, Ray would end the process at once, without a word and with
    code 1.

    Raises:
        ray.exceptions.GetTimeoutError: If there is no answer after ``timeout`` seconds.
        RuntimeError: If Ray is shut down.
        Exception: The exception of the call.
    """
    end = time.monotonic() + timeout
    answer = ref.future()
    while True:
        check_connected()
        left = end - time.monotonic()
        with contextlib.suppress(LateError):
            return answer.result(min(max(0.0, left), _LOOK))
        if left <= 0:
            raise ray.exceptions.GetTimeoutError(f"no answer within {timeout:g} s")
