"""Locks for objects that a fork may leave half changed."""

import os
import threading
from contextlib import AbstractContextManager

_PATIENCE = 1.0  # seconds; a thread of this process releases the lock long before


class TurnLock:
    """A reentrant lock that detects that its holder does not exist after a fork.

    A forked child has no copy of the thread that held the lock, and the object that the
    thread was changing is half changed.

    >>> turns = TurnLock()
    >>> with turns.ready():
    ...     pass
    """

    def __init__(self) -> None:
        """Begin unlocked."""
        self._lock = threading.RLock()
        self._process = os.getpid()

    def ready(self) -> AbstractContextManager[bool]:
        """Return the lock itself, for a ``with`` statement, which no interrupt leaves locked.

        Raises:
            RuntimeError: If a thread of the parent process held it during the fork.
        """
        process = os.getpid()
        if self._process != process:
            if not self._lock.acquire(timeout=_PATIENCE):
                raise RuntimeError(
                    "another thread was changing this object when the process forked: here it is "
                    "half changed and cannot be used"
                )
            self._process = process
            self._lock.release()
        return self._lock

    def is_mine(self) -> bool:
        """Return whether this thread holds it.

        Unlike a flag of ours, no interrupt leaves this set.
        """
        is_mine: bool = self._lock._is_owned()  # type: ignore[attr-defined]
        return is_mine


class CallLock(TurnLock):
    """A lock that is held during calls of one object, none of which may be made within another.

    A signal handler runs in the thread of the call that it interrupts. It would wait for that call
    for ever, or find the object half changed.

    >>> calls = CallLock("sum")
    >>> with calls.ready():
    ...     pass
    """

    def __init__(self, owner: str) -> None:
        """Take what the object is, for errors."""
        super().__init__()
        self._owner = owner

    def ready(self) -> AbstractContextManager[bool]:
        """Return the lock itself, as that of a `TurnLock`.

        Raises:
            RuntimeError: If this thread is in a call already; or as a `TurnLock` does.
        """
        if self.is_mine():
            raise nested(f"the {self._owner}")
        return super().ready()


def nested(owner: str) -> RuntimeError:
    """Return the error of a call of ``owner`` within another one of the same thread."""
    return RuntimeError(
        f"this thread is in a call of {owner} already. In a signal handler, set a flag, and make "
        "the call later"
    )
