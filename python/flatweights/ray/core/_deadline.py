"""The end of a wait."""

from __future__ import annotations

from typing import NamedTuple


class Deadline(NamedTuple):
    """The end of a wait.

    Attributes:
        timeout: The seconds that errors show; for ever, if None.
        end: The time at which the seconds are over; never, if None.
    """

    timeout: float | None
    end: float | None

    @classmethod
    def after(cls, timeout: float | None, now: float) -> Deadline:
        """Return the deadline in ``timeout`` seconds, which were checked."""
        return NEVER if timeout is None else cls(timeout, now + timeout)

    def is_over(self, now: float) -> bool:
        """Whether the seconds are over."""
        return self.end is not None and now >= self.end


NEVER = Deadline(None, None)
