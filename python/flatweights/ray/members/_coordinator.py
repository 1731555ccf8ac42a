"""The coordinator of a process group: an actor without CPUs, on the node of the first member.

Its methods are coroutines of one event loop. They hand the members' messages to the one thread of
the process group, and wait for its answer. So a waiting call takes no thread, however many members
there are. The process group itself is a plain object, since Ray wraps every method of an actor's
class to trace its calls.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from flatweights.ray import _clock
from flatweights.ray.core._requests import MemberDiedError
from flatweights.ray.members._call_queue import Result
from flatweights.ray.members._config import GroupConfig
from flatweights.ray.members._node_agent import Streamed
from flatweights.ray.members._platform import PLATFORM, MemberPlatform
from flatweights.ray.members._process_group import ProcessGroup
from flatweights.ray.members._rendezvous import Entry, JoinReply
from flatweights.ray.members._sessions import Handed, Reply, StoreRequest
from flatweights.ray.support._errors import reason_in_a_line

_LAST_REPLIES = 1.0  # seconds in which finished calls return their results


class Coordinator:
    """The actor. Members call `stay` and `enter`, and then `attach` or `exchange`."""

    def __init__(
        self,
        name: str,
        config: GroupConfig,
        platform: MemberPlatform = PLATFORM,
        group: type[ProcessGroup] = ProcessGroup,
    ) -> None:
        """Make the process group, and start its thread.

        Args:
            name: Its name.
            config: Its configuration.
            platform: What it uses of Ray, channels and threads.
            group: The class of the process group; a simulator has one that shows what it does.
        """
        self._platform = platform
        place = platform.begin_coordinator()
        self._group = group(name, config, *place, platform)
        # By member, a future that is done at its end. Ray may begin its first calls in any order.
        self._ends: dict[bytes, Future[None]] = defaultdict(Future)
        self._entered: set[bytes] = set()  # members whose end the process group decides
        self._watches: set[asyncio.Task[None]] = set()  # the loop itself holds them weakly
        self._running = 0  # exchanges that have not returned; the thread below reads it
        platform.start_thread(self._serve, (name, place.actor), "flatweights-group")

    async def stay(self, token: bytes) -> None:
        """Return when a member is gone: its process owns the result, so Ray reports its death."""
        await self._platform.until(self._ends[token])

    async def enter(
        self,
        token: bytes,
        stays: Sequence[ray.ObjectRef],
        rank: int | None,
        config: GroupConfig,
        who: str,
        node: str,
        wants_channel: bool,
        task: str | None,
    ) -> JoinReply:
        """Admit a process; wait while its rank belongs to a process that may have ended.

        Args:
            token: The token by which the coordinator recognises the member, as in its call of
                `stay`.
            stays: The reference to the result of that call, which shows its death from now on.
            rank: See `Entry`, also for the following.
            config: See `Entry`.
            who: See `Entry`.
            node: See `Entry`.
            wants_channel: See `Entry`.
            task: See `Entry`.

        Raises:
            ValueError: If ``config`` differs from that of the process group, or ``rank`` is taken
                or too large.
            MemberDiedError: If the process has already given up.
        """
        over = self._ends[token]
        if over.done():
            raise MemberDiedError(f"{who} has given up to join")
        self._entered.add(token)
        watch = self._platform.start(self._watch(token, who, stays[0]))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)
        join_reply: Future[JoinReply] = Future()
        now = _clock.now()
        entry = Entry(token, rank, config, who, node, wants_channel, task, now, join_reply, over)
        self._group.queue.post(self._group.rendezvous.enter, entry)
        return await self._platform.until(join_reply)

    async def attach(self, token: bytes, nonce: bytes) -> None:
        """Make the channel to a member that has connected.

        Raises:
            ChannelError: If it has not connected.
        """
        await self._call(self._group.attach, token, nonce)

    async def exchange(
        self, token: bytes, body: bytes | None = None, buffer: NDArray[np.uint8] | None = None
    ) -> Reply:
        """Ask for a call; return the body of the response, and references to the weights.

        Without a body, return the first response.
        """
        caller: Future[Reply] = Future()
        self._running += 1
        try:
            if body is None:
                self._group.queue.post(self._group.expect, token, caller)
            else:
                self._group.queue.post(self._group.put, token, StoreRequest(body, buffer, caller))
            return await self._platform.until(caller)
        finally:
            self._running -= 1

    async def deliver(self, token: bytes, body: bytes, buffer: NDArray[np.uint8] | None) -> None:
        """Take a request that does not fit into a channel; the channel then announces it."""
        await self._call(self._group.put, token, StoreRequest(body, buffer, None))

    async def receive(self, agent: str, number: int, message: list[Handed] | Streamed) -> None:
        """Take a message of the agent with a token; see `Link.receive`.

        The group's thread may wait for it in an exchange.
        """
        self._group.receive(agent, number, message)

    async def fetch(self, number: int) -> tuple[bytes, NDArray[np.uint8] | None]:
        """Return a response that did not fit into a channel: its body and its buffer.

        Raises:
            KeyError: If no member has to fetch it.
        """
        return await self._call(self._group.fetch, number)

    async def lose(self, token: bytes, why: MemberDiedError) -> None:
        """Count a member as dead that has dropped its end, or has given up to enter."""
        if token not in self._entered and not self._ends[token].done():
            self._ends[token].set_result(None)
        self._group.queue.post(self._group.lose, token, why)

    async def awaited_by(self, token: bytes) -> tuple[list[int], bool]:
        """Return for whom a process waits; see `Rendezvous`."""
        return await self._call(self._group.rendezvous.awaited_by, token)

    async def _call(self, method: Callable[..., Result], *args: Any) -> Result:
        """Call ``method`` in the group's thread; return its result, or raise its exception."""
        return await self._platform.until(self._group.queue.called(method, *args))

    async def _watch(self, token: bytes, who: str, stays: ray.ObjectRef) -> None:
        """Tell the process group if the process that owns the result of `stay` dies."""
        try:
            await stays
        except ray.exceptions.OwnerDiedError:
            why = MemberDiedError(f"{who}: it or its node has died")
            self._group.queue.post(self._group.note_death, token, why)
        except ray.exceptions.ActorDiedError:
            return  # this actor is being killed, and its members must learn only that
        except Exception as error:
            await self.lose(token, MemberDiedError(f"{who}: {reason_in_a_line(error)}"))

    def _serve(self, name: str, handle: ray.actor.ActorHandle) -> None:
        """Run the process group, then end the actor."""
        try:
            self._group.run()
        finally:
            self._platform.mark_end(name, self._group.rendezvous.lost())
            end = _clock.now() + _LAST_REPLIES
            while self._running and _clock.now() < end:
                _clock.sleep(0.01)
            self._platform.end_coordinator(handle)
