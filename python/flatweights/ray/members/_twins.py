"""Detects models of one layout that take turns in the calls of a member, such as twin critics.

The coordinator recognises a call by its layouts, so it could give a member that was late, or has
joined again, the weights or the state of the other one.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

_log = logging.getLogger("flatweights")


class Twins:
    """The variables, and the states, of a member's calls.

    An object counts from its second turn on: a program may make new objects for each call, or for
    each of several trainings, one after the other.

    Attributes:
        changes: How often an object took the turn of another one of its layout.
    """

    def __init__(self, name: str) -> None:
        """Begin without calls, in the process group ``name``."""
        self._name = name
        self.changes = 0
        # By key: the object of the last call, and others of earlier ones, as far as they live.
        self._last: dict[str, weakref.ref[Any]] = {}
        self._earlier: dict[str, list[weakref.ref[Any]]] = {}
        self._twins: set[str] = set()

    def is_twin(self, one: Any, key: str) -> bool:
        """Note a call with ``one``; return whether it and another of this layout take turns."""
        last = self._last.get(key)
        if last is None or last() is not one:
            self.changes += 1
            try:
                self._last[key] = weakref.ref(one)
            except TypeError:  # its class has no weak references
                return False
            earlier = [ref for ref in self._earlier.get(key, ()) if ref() is not None]
            if any(ref() is one for ref in earlier):
                self._warn(key)
            if last is not None and all(ref() is not last() for ref in earlier):
                earlier.append(last)
            self._earlier[key] = earlier
        return key in self._twins

    def _warn(self, key: str) -> None:
        if key not in self._twins:
            self._twins.add(key)
            text = (
                "process group %r: several models of one layout take turns, so a member that is "
                "late or joins again cannot be given any. Give their parts names of their own"
            )
            _log.warning(text, self._name)
