"""Ways that fail for a while: the user's choice in the environment, and when to try again."""

from __future__ import annotations

import logging
import math
import os
import time

VARIABLE = "FLATWEIGHTS_RAY"
_PAUSE = 1.0  # seconds before a lane that could not be made is tried again; doubled each time
_MOST_PAUSE = 60.0

_log = logging.getLogger("flatweights")


def choice() -> str:
    """Return the value of ``FLATWEIGHTS_RAY``: ``"store"``, ``"lanes"`` or nothing.

    Raises:
        ValueError: If it has another value.
    """
    return setting(VARIABLE, "store", "lanes")


def setting(variable: str, *values: str) -> str:
    """Return the value of an environment variable, or nothing.

    Raises:
        ValueError: If it is none of ``values``.
    """
    value = os.environ.get(variable, "")
    if value not in ("", *values):
        expected = f"{', '.join(values[:-1])} or {values[-1]}"
        raise ValueError(f"{variable}: expected {expected}, got {value!r}")
    return value


class Setback:
    """Why there is no lane at present, and when it is worth trying again.

    Attributes:
        reason: Why; empty if nothing has ever failed.
    """

    def __init__(self, who: str, reason: str = "") -> None:
        """Take ``who`` is reached through Ray meanwhile; with a ``reason``, that is final."""
        self.reason = reason
        self._who = who
        self._pause = _PAUSE
        self._end = math.inf if reason else -math.inf

    @property
    def is_over(self) -> bool:
        """Whether it is worth trying now."""
        return time.monotonic() >= self._end

    def note(self, reason: str, *, may_pass: bool) -> None:
        """Note a failure. What may pass is tried again, after pauses that double."""
        if reason != self.reason:
            level = logging.WARNING if may_pass else logging.INFO
            _log.log(level, "%s reached through Ray: %s", self._who, reason)
        self.reason = reason
        self._end = time.monotonic() + self._pause if may_pass else math.inf
        self._pause = min(2 * self._pause, _MOST_PAUSE)
