"""A mark in the key-value store of Ray's cluster for each name whose process group has ended.

A process that joins after the end starts a process group of its own, and waits in it for others
that may not come: the name may be used again. But the retry of a task whose member died in the
group that has ended is told so.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import NamedTuple

import ray
from ray.experimental import internal_kv

from flatweights.ray import _clock

_NAMESPACE = b"flatweights"


class GroupEnd(NamedTuple):
    """The end of a process group.

    Attributes:
        time: Its time, in seconds since 1970.
        tasks: The Ray tasks whose members died in it and were not replaced, by their ids.
    """

    time: float
    tasks: Sequence[str] = ()

    @property
    def seconds_since(self) -> float:
        """The seconds since then."""
        return max(0.0, _clock.wall() - self.time)


def mark_end(name: str, tasks: Sequence[str]) -> None:
    """Note that a process group of this ``name``, in this Ray job, has ended now.

    Args:
        name: The name.
        tasks: See `GroupEnd`.
    """
    end = json.dumps([_clock.wall(), tasks]).encode()
    with contextlib.suppress(Exception):  # Ray is being shut down
        internal_kv._internal_kv_put(_key(name), end, namespace=_NAMESPACE)


def last_end(name: str) -> GroupEnd | None:
    """Return the end of the last process group of this ``name``; None if none has ended."""
    value = internal_kv._internal_kv_get(_key(name), namespace=_NAMESPACE)
    return None if value is None else GroupEnd(*json.loads(value))


def _key(name: str) -> bytes:
    job = ray.get_runtime_context().get_job_id()
    return f"ended process group:{job}:{name.encode().hex()}".encode()
