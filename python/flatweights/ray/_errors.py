"""What went wrong in workers, by rank."""

import re
from collections.abc import Mapping
from typing import Any

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_EXIT_DETAIL = re.compile(r"Worker exit detail: (.*?)(?: Some common causes|$)")


class WorkerError(RuntimeError):
    """Some workers gave no result that could be averaged.

    Attributes:
        failed: By rank, what each of them raised.
    """

    def __init__(self, failed: Mapping[int, Exception]) -> None:
        """Say which ranks failed, and why."""
        self.failed = dict(failed)
        reasons = [f"rank {rank}: {reason_of(error)}" for rank, error in self.failed.items()]
        super().__init__("\n".join(reasons))  # Ray's own errors have several lines

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by what the constructor takes."""
        return type(self), (self.failed,)


def reason_of(error: Exception) -> str:
    """Return what a worker raised, rather than what Ray has wrapped around it."""
    cause = getattr(error, "cause", None)  # what a RayTaskError was raised from
    shown = cause if isinstance(cause, Exception) else error
    return f"{type(shown).__name__}: {shown}"


def reason_in_a_line(error: Exception) -> str:
    """As `reason_of`, on one line: Ray's own errors have several, and colours in them."""
    cause = getattr(error, "cause", None)
    shown = cause if isinstance(cause, Exception) else error
    name = type(shown).__name__
    lines = [line.strip() for line in _COLOURS.sub("", str(shown)).splitlines() if line.strip()]
    if not lines:
        return name
    if "creation task" in lines[0]:  # the constructor raised: a traceback, the error last
        return f"{name}: {lines[-1]}"
    detail = _EXIT_DETAIL.search(lines[-1])
    return f"{name}: {lines[0]}" + (f" {detail[1]}" if detail else "")
