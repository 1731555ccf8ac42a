"""What groups and workers use of Ray and of channels, in one place; see `members/_platform.py`.

`PLATFORM` is that of production. `tests/sim` has one of its own, on which the same groups and
workers run in one process, with a virtual clock (`_clock`), and die as a seed says.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Sequence
from typing import Any

import ray

from flatweights.ray.channels._driver_channel import Channels
from flatweights.ray.channels._worker_channel import WorkerChannel
from flatweights.ray.support._errors import check_connected, session_of_ray


class GroupPlatform:
    """Ray, threads, and memory that two processes map."""

    # Of a driver.

    session = staticmethod(session_of_ray)
    check_connected = staticmethod(check_connected)

    thread = staticmethod(threading.get_ident)

    def lock(self) -> Any:
        """Return a lock that the thread that has it may take again."""
        return threading.RLock()

    def channels(self) -> Channels:
        """Return the driver's ends of channels, without any.

        Raises:
            OSError: If there can be no channels on this system.
        """
        return Channels()

    def wait(
        self, refs: Sequence[ray.ObjectRef], timeout: float | None = 0, enough: int = 1
    ) -> list[ray.ObjectRef]:
        """Wait for ``enough`` of ``refs``, which differ; return those that are there."""
        there: list[ray.ObjectRef] = ray.wait(refs, num_returns=enough, timeout=timeout)[0]
        return there

    def put(self, value: Any) -> ray.ObjectRef:
        """Put a value into the object store.

        Raises:
            ray.exceptions.ObjectStoreFullError: If it is full.
        """
        return ray.put(value)

    def kill(self, handle: ray.actor.ActorHandle) -> None:
        """End an actor; Ray does not start it again."""
        ray.kill(handle)

    def end(self, handle: ray.actor.ActorHandle) -> None:
        """End an actor, unless Ray was shut down, which has ended it: `kill` would start a Ray."""
        if ray.is_initialized():
            with contextlib.suppress(ValueError):  # the actor belongs to an earlier session of Ray
                self.kill(handle)

    # Of a driver and of a worker.

    def get(self, ref: ray.ObjectRef, timeout: float | None = None) -> Any:
        """Return the result of a call or an object of the store, or raise its exception."""
        return ray.get(ref, timeout=timeout)

    def node(self) -> str:
        """Return the id of this node."""
        node: str = ray.get_runtime_context().get_node_id()
        return node

    # Of a worker.

    def worker_channel(self, address: bytes, token: bytes) -> WorkerChannel:
        """Connect to a driver; see `WorkerChannel`."""
        return WorkerChannel(address, token)

    def was_restarted(self) -> bool:
        """Whether Ray has started this actor more than once."""
        return _was_restarted()


@functools.cache
def _was_restarted() -> bool:
    context = ray.get_runtime_context()
    if context.get_actor_id() is None:
        return False
    with warnings.catch_warnings():  # Ray itself calls a deprecated function here
        warnings.simplefilter("ignore")
        return bool(context.was_current_actor_reconstructed)


PLATFORM = GroupPlatform()
