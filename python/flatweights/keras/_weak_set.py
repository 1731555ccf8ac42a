"""A set of the objects of a kind that exist, for all threads of the process."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedWeakSet(Generic[T]):
    """A weak set that other threads may change meanwhile: it is iterated over as it was before."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may use the set, too
        self._set: weakref.WeakSet[T] = weakref.WeakSet()

    def add(self, one: T) -> None:
        """Add an object, as long as it exists."""
        with self._lock:
            self._set.add(one)

    def discard(self, one: T) -> None:
        """Remove an object, if it is there."""
        with self._lock:
            self._set.discard(one)

    def __iter__(self) -> Iterator[T]:
        """Iterate over the objects that are there now."""
        with self._lock:
            return iter([*self._set])
