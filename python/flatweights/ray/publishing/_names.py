"""The publisher of a name: a record in the key-value store of Ray's cluster.

Each publisher of a name, within a job, adds a record under the next free number. Adding a record is
atomic, so there is one publisher for each number. The one with the highest number is the current
publisher; all others are superseded. Records stay as long as the cluster, some kilobytes each: if a
number were used again, versions would decrease.
"""

from __future__ import annotations

import os
import pickle
import socket
from typing import NamedTuple

import ray
from ray.experimental import internal_kv

from flatweights.ray.publishing._publication_server import PublicationAddress
from flatweights.ray.support._errors import check_connected

VERSIONS = 10**12
"""The number of versions of each publisher: the first of publisher n is n * VERSIONS + 1."""

_NAMESPACE = b"flatweights"


class PublisherRecord(NamedTuple):
    """One publisher of a name.

    Attributes:
        number: Counts the publishers of the name.
        node: The node of its process.
        who: Its name in errors.
        layout: The layout of its weights, pickled.
        address: The address of its server, for readers of its node.
    """

    number: int
    node: str
    who: str
    layout: bytes
    address: PublicationAddress


def this_node() -> str:
    """Return the node of this process.

    Raises:
        RuntimeError: If Ray is not initialized.
    """
    check_connected()
    node: str = ray.get_runtime_context().get_node_id()
    return node


def register(
    name: str, layout: bytes, address: PublicationAddress
) -> tuple[PublisherRecord, PublisherRecord | None]:
    """Become the publisher of ``name``; return the new record, and that of the last publisher."""
    node, who = this_node(), f"process {os.getpid()} on {socket.gethostname()}"
    while True:
        before = find(name)
        number = 0 if before is None else before.number + 1
        record = PublisherRecord(number, node, who, layout, address)
        exists = internal_kv._internal_kv_put(
            _key(name, number), pickle.dumps(tuple(record)), False, namespace=_NAMESPACE
        )
        if not exists:
            return record, before


def find(name: str) -> PublisherRecord | None:
    """Return the record of the publisher of ``name``; None if there was none yet.

    Raises:
        RuntimeError: If Ray is not initialized.
    """
    keys = internal_kv._internal_kv_list(_prefix(name), namespace=_NAMESPACE)
    return _read(max(keys)) if keys else None


def other_jobs_with(name: str) -> list[str]:
    """Return the ids of other Ray jobs that have, or had, a publisher of ``name``."""
    check_connected()
    of_name, own = name.encode().hex(), str(ray.get_runtime_context().get_job_id())
    keys = internal_kv._internal_kv_list(b"publisher:", namespace=_NAMESPACE)
    jobs = {job for _, job, one, _ in (key.decode().split(":") for key in keys) if one == of_name}
    return sorted(jobs - {own})


def is_superseded(name: str, number: int) -> bool:
    """Whether the publisher with this number is not the last one of ``name``.

    Raises:
        RuntimeError: If Ray is not initialized.
    """
    key = _key(name, number + 1)
    return bool(internal_kv._internal_kv_exists(key, namespace=_NAMESPACE))


def _read(key: bytes) -> PublisherRecord:
    value = internal_kv._internal_kv_get(key, namespace=_NAMESPACE)
    number, node, who, layout, address = pickle.loads(value)
    return PublisherRecord(number, node, who, layout, PublicationAddress(*address))


def _prefix(name: str) -> bytes:
    check_connected()
    job = ray.get_runtime_context().get_job_id()
    return f"publisher:{job}:{name.encode().hex()}:".encode()


def _key(name: str, number: int) -> bytes:
    return _prefix(name) + b"%012d" % number
