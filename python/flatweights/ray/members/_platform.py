"""What coordinators and members use of Ray, of channels and of their process, in one place.

`PLATFORM` is that of production. `tests/sim` has one of its own, on which the same coordinators and
members run in one process, with a virtual clock (`_clock`), and die as a seed says.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

import ray

from flatweights._settings import ray_setting
from flatweights.ray.channels._member_channel import MemberChannel
from flatweights.ray.members._ended import last_end, mark_end
from flatweights.ray.nodes._plan import ReduceDType
from flatweights.ray.peers._by_agent import AgentClient, Agents
from flatweights.ray.peers._platform import GroupPlatform
from flatweights.ray.peers._shared_actor import (
    has_shared_actor,
    other_jobs_with,
    shared_actor,
)

_TOKEN = 16
# With Ray 2.51.0 and 2.51.1, a node ends if two threads of one process get the same object at the
# same time (ray-project/ray#58394), and all members get the same object.
_getting = threading.RLock()  # again: a signal handler may call another member meanwhile

_Result = TypeVar("_Result")


class ActorPlace(NamedTuple):
    """Where an actor runs: the node, and the actor's handle."""

    node: str
    actor: ray.actor.ActorHandle


class MemberPlatform(GroupPlatform):
    """Ray, memory that two processes map, threads, and the names of this process."""

    # Of a coordinator.

    def begin_coordinator(self) -> ActorPlace:
        """Prepare this process, which is an actor, to be a coordinator; return where it is."""
        # An actor without CPUs gets one thread. But its members wait while it averages.
        os.environ.pop("OMP_NUM_THREADS", None)
        context = ray.get_runtime_context()
        return ActorPlace(context.get_node_id(), context.current_actor)

    def agents(
        self,
        offer: Callable[[int], None],
        reduce_dtype: ReduceDType,
        cls: type,
        args: tuple[Any, ...],
        calls: int,
        take: Callable[[AgentClient, Any], object],
    ) -> Agents:
        """Return the agents of other nodes, without any; see `Agents`."""
        return Agents(offer, reduce_dtype, cls, args, calls, take, self)

    def start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a coroutine of the event loop, which holds the task weakly."""
        return asyncio.create_task(coroutine)

    async def until(self, done: Future[_Result]) -> _Result:
        """Wait until ``done``; return its result, or raise its exception.

        If a member is cancelled (`ray.cancel`), Ray cancels its calls, too. The future is shielded
        from that: the process group's thread could not set it any more.
        """
        return await asyncio.shield(asyncio.wrap_future(done))

    def end_coordinator(self, actor: ray.actor.ActorHandle) -> None:
        """End the actor of this process."""
        ray.kill(actor)

    mark_end = staticmethod(mark_end)

    # Of a member.

    def setting(self) -> str:
        """Return the transport that this process must use, if one is set; see `ray_setting`."""
        return ray_setting()

    def find_coordinator(
        self, cls: type, name: str, node: str, concurrency: int, *args: object
    ) -> ray.actor.ActorHandle:
        """Find the coordinator of a process group, or start it; see `shared_actor`."""
        return shared_actor(cls, name, node, concurrency, *args)

    has_coordinator = staticmethod(has_shared_actor)
    other_jobs_with = staticmethod(other_jobs_with)

    def introduce(self) -> tuple[bytes, str]:
        """Return a token by which a coordinator recognises this process, and its name in errors."""
        return secrets.token_bytes(_TOKEN), self.who()

    def who(self) -> str:
        """Return the name of this process in errors.

        Ray gives the process of a task to later tasks, so that of the task is part of the name.
        """
        process, task = f"process {os.getpid()} on {socket.gethostname()}", self.task()
        if task is None or ray.get_runtime_context().get_actor_id() is not None:
            return process
        return f"{process} (task {task})"

    def task(self) -> str | None:
        """Return the id of this Ray task, which its retries have, too; None in a driver."""
        context = ray.get_runtime_context()
        if context.worker.mode != ray.WORKER_MODE:  # Ray would log a warning
            return None
        task: str | None = context.get_task_id()
        return task

    def member_channel(self, address: bytes, token: bytes, peer: str) -> MemberChannel:
        """Connect to ``peer``, and return the member's end of the channel.

        Raises:
            OSError: If it cannot be made.
            ChannelError: If the peer expects nobody with that token.
            MemoryError: If there is no memory for a mailbox.
        """
        return MemberChannel(address, token, peer)

    def get(self, ref: ray.ObjectRef, timeout: float | None = None) -> Any:
        """Return the result of a call or an object of the store, or raise its exception."""
        try:
            return super().get(ref, timeout)
        except ray.exceptions.RayTaskError:
            raise
        except BaseException:  # also an interrupt
            with contextlib.suppress(Exception):  # Ray may be shut down
                ref.future()  # the call may still fail, and Ray logs errors that nobody fetches
            raise

    def get_shared(self, ref: ray.ObjectRef) -> Any:
        """Return an object that other threads of this process may get at the same time."""
        with _getting:
            return ray.get(ref)

    last_end = staticmethod(last_end)


PLATFORM = MemberPlatform()
