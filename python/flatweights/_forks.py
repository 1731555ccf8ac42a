"""Objects that belong to one process: its forks have copies of them, which they must not use."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

Owned = TypeVar("Owned")
Finalizer: TypeAlias = "weakref.finalize[[int, Callable[[], object]], Any]"

_ends: weakref.WeakKeyDictionary[Any, Callable[[Any], object]] = weakref.WeakKeyDictionary()


def in_forks(owned: Owned, end: Callable[[Owned], object]) -> Owned:
    """Call ``end`` with ``owned`` in each fork of this process, while it lives; return it."""
    _ends[owned] = end
    return owned


def finalizer(owner: object, close: Callable[[], object]) -> Finalizer:
    """Return a finalizer of ``owner``, which calls ``close``, except in a fork of this process."""
    return weakref.finalize(owner, _close_in, os.getpid(), close)


def close_by(one: Finalizer) -> None:
    """Call a finalizer, and let go of it only then: after an interrupt, it can be called again."""
    if (alive := one.peek()) is not None:
        _, close, args, _ = alive
        close(*args)
        one.detach()


def _close_in(process: int, close: Callable[[], object]) -> None:
    if process == os.getpid():
        close()


def _end_copies() -> None:
    with contextlib.ExitStack() as stack:  # it calls all, whatever one raises
        for owned, end in reversed(list(_ends.items())):
            stack.enter_context(contextlib.suppress(OSError))  # of a socket that is broken
            stack.callback(end, owned)


os.register_at_fork(after_in_child=_end_copies)
