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
_MOST = 1000  # lost members that are remembered


class GroupEnd(NamedTuple):
    """The end of a process group.

    Attributes:
        time: Its time, in seconds since 1970.
        lost: The Ray task and the process of each member that died and was not replaced, in this
            and in earlier groups of the name, if others left when they had done their work.
    """

    time: float
    lost: Sequence[tuple[str, str]] = ()

    @property
    def seconds_since(self) -> float:
        """The seconds since then."""
        return max(0.0, _clock.wall() - self.time)

    def is_over_for(self, task: str | None, who: str) -> bool:
        """Whether process ``who`` is the retry of a ``task`` whose member died in the group."""
        return any(own == task and process != who for own, process in self.lost)


def mark_end(name: str, lost: Sequence[tuple[str, str]]) -> None:
    """Note that a process group of this ``name``, in this Ray job, has ended now.

    Args:
        name: The name.
        lost: See `GroupEnd`.
    """
    with contextlib.suppress(Exception):  # Ray is being shut down
        earlier = last_end(name)  # of which a retry may still come
        every = [*(() if earlier is None else earlier.lost), *lost][-_MOST:]
        end = json.dumps([_clock.wall(), every]).encode()
        internal_kv._internal_kv_put(_key(name), end, namespace=_NAMESPACE)


def last_end(name: str) -> GroupEnd | None:
    """Return the end of the last process group of this ``name``; None if none has ended."""
    value = internal_kv._internal_kv_get(_key(name), namespace=_NAMESPACE)
    return None if value is None else GroupEnd(*json.loads(value))


def _key(name: str) -> bytes:
    job = ray.get_runtime_context().get_job_id()
    return f"ended process group:{job}:{name.encode().hex()}".encode()
