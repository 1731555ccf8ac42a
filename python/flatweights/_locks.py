"""The lock of an object that a fork may catch in the middle of a change."""

import os
import threading
from contextlib import AbstractContextManager

_PATIENCE = 1.0  # seconds; a thread that is there lets go, or has noted its process, long before


class TurnLock:
    """A reentrant lock that notices when a fork has left its holder behind.

    In the child of a fork, a thread that held the lock is not there, and what it was changing
    is half changed.

    >>> turns = TurnLock()
    >>> with turns.ready():
    ...     pass
    """

    def __init__(self) -> None:
        """Begin unlocked."""
        self._lock = threading.RLock()
        self._process = os.getpid()

    def ready(self) -> AbstractContextManager[bool]:
        """Return the lock itself, to be taken by ``with``: no interrupt leaves that locked.

        Raises:
            RuntimeError: If a thread held it that a fork has left behind.
        """
        process = os.getpid()
        if self._process != process:
            if not self._lock.acquire(timeout=_PATIENCE):
                raise RuntimeError(
                    "another thread was changing this when the process forked: here it is changed "
                    "by half, and cannot be used"
                )
            self._process = process
            self._lock.release()
        return self._lock
