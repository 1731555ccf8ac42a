"""A mark in the key-value store of Ray's cluster for each name whose process group has ended.

A process that joins after the end would start a process group of its own, and wait in it for others
that are not going to come. The name may be used again, so this is no error; but the error of the
process that has waited in vain says it.
"""

from __future__ import annotations

import contextlib

import ray
from ray.experimental import internal_kv

from flatweights.ray import _clock

_NAMESPACE = b"flatweights"


def mark_end(name: str) -> None:
    """Note that a process group of this ``name``, in this Ray job, has ended now."""
    with contextlib.suppress(Exception):  # Ray is being shut down
        internal_kv._internal_kv_put(_key(name), repr(_clock.wall()).encode(), namespace=_NAMESPACE)


def seconds_since_end(name: str) -> float | None:
    """Return the seconds since the last process group of this ``name`` ended; None if none has."""
    value = internal_kv._internal_kv_get(_key(name), namespace=_NAMESPACE)
    return None if value is None else max(0.0, _clock.wall() - float(value))


def _key(name: str) -> bytes:
    job = ray.get_runtime_context().get_job_id()
    return f"ended process group:{job}:{name.encode().hex()}".encode()
