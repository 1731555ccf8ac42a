"""A transport that fails for a while: the reason, and the time of the next try.

How often a worker that is lost is asked whether it is back is in its `WorkerRecord` (`_ranks`).
"""

from __future__ import annotations

import logging
import math

from flatweights.ray import _clock

_PAUSE = 1.0  # seconds until the next try to make a channel; doubled each time
_MOST_PAUSE = 60.0

_log = logging.getLogger("flatweights")


class Backoff:
    """The reason for which there is no channel at present, and the time of the next try.

    Attributes:
        reason: The reason; empty if nothing has failed.
    """

    def __init__(self, who: str, reason: str = "") -> None:
        """Take the name of the peer that Ray reaches meanwhile; a ``reason`` is final."""
        self.reason = reason
        self._who = who
        self._pause = _PAUSE
        self._end = math.inf if reason else -math.inf

    @property
    def is_over(self) -> bool:
        """Whether it is worth trying now."""
        return _clock.now() >= self._end

    def note(self, reason: str, *, may_pass: bool) -> None:
        """Note a failure. If it may pass, there is another try, after pauses that double."""
        if reason != self.reason:
            level = logging.WARNING if may_pass else logging.INFO
            _log.log(level, "%s reached through Ray: %s", self._who, reason)
        self.reason = reason
        self._end = _clock.now() + self._pause if may_pass else math.inf
        self._pause = min(2 * self._pause, _MOST_PAUSE)
