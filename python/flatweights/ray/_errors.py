"""What went wrong in workers, by rank."""

from collections.abc import Mapping
from typing import Any


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
