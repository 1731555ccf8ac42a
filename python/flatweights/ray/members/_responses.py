"""Sends responses to members, each by the transport to it.

There are three: a member's channel; the answer to its call of the coordinator's actor, through Ray;
and, on another node, the agent of that node, which gets a response once for all of its members.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from flatweights import _core
from flatweights.ray.channels._driver_channel import Channels
from flatweights.ray.core._requests import MemberDiedError
from flatweights.ray.members._gpu_rounds import OnDevice
from flatweights.ray.members._node_agent import NodeAgentResponse, SentWeights
from flatweights.ray.members._sessions import Post, Session
from flatweights.ray.peers._agent import AverageOf
from flatweights.ray.peers._by_agent import AgentClient
from flatweights.ray.peers._result_metadata import Exchanged
from flatweights.ray.results._result import Packed
from flatweights.ray.support._errors import reason_in_a_line

_IN_CALL = 1 << 16
"""Bytes of weights that Ray sends within a call, faster than another node fetches them."""


class ResponseSender:
    """Sends the responses of a process group."""

    def __init__(
        self,
        channels: Channels,
        put: Callable[[Any], ray.ObjectRef],
        lose: Callable[[Session, MemberDiedError], object],
    ) -> None:
        """Send nothing yet.

        Args:
            channels: The channels to members on this node.
            put: A function that puts an array in Ray's store.
            lose: A function that counts a member as dead.
        """
        self._channels = channels
        self._put, self._lose = put, lose
        self._posts = 0

    def send(
        self,
        number: int,
        body: bytes,
        weights: Packed | OnDevice | None,
        sessions: Sequence[Session],
        exchanged: Exchanged | None = None,
    ) -> None:
        """Give ``sessions`` a response; those that cannot get it are dead.

        Args:
            number: The number of the response; for the state that goes with it, its negative.
            body: The response.
            weights: Its weights.
            sessions: The members, which wait for it.
            exchanged: The agents that already have the weights.
        """
        self._posts += 1
        buffer = weights.buffer if isinstance(weights, Packed) else None
        sending = _Sending(self._posts, body, buffer, self._channels, self._put)
        far: dict[AgentClient, list[Session]] = {}
        for session in sessions:
            caller = session.take_caller()
            try:
                if isinstance(weights, OnDevice):
                    weights.send(session)
                if session.channel is not None:
                    sending.send_by_channel(session)
                elif caller is not None:
                    sending.answer(caller)
                elif session.agent is not None:
                    far.setdefault(session.agent, []).append(session)
            except Exception as error:  # the member died meanwhile, or Ray's store is full
                why = MemberDiedError(f"{session.who}: {reason_in_a_line(error)}")
                if caller is not None and not caller.done():
                    caller.set_exception(why)
                self._lose(session, why)
        sending.wake()
        for agent, there in far.items():
            try:
                sending.send_by_agent(agent, number, there, exchanged)
            except Exception as error:  # Ray's store is full
                fault = f"its response was not sent: {reason_in_a_line(error)}"
                for session in there:
                    self._lose(session, MemberDiedError(f"{session.who}: {fault}"))


class _Sending:
    """A response on its way: what it is made into for each transport is made once."""

    def __init__(
        self,
        number: int,
        body: bytes,
        buffer: NDArray[np.uint8] | None,
        channels: Channels,
        put: Callable[[Any], ray.ObjectRef],
    ) -> None:
        self._number, self._body, self._buffer = number, body, buffer
        self._channels, self._put = channels, put
        self._post: Post | None = None
        self._ref: ray.ObjectRef | None = None
        self._posted: list[_core.Mailbox] = []

    def send_by_channel(self, session: Session) -> None:
        """Post it in the channel of a member; `wake` wakes the member."""
        if self._post is None:
            self._post = Post(self._number, self._body, self._buffer, self._channels.segments)
        self._post.to(session, self._posted)

    def wake(self) -> None:
        """Wake all members in whose channels it is."""
        self._channels.wake(self._posted)
        self._posted.clear()

    def answer(self, caller: Future[Any]) -> None:
        """Answer the call of a member."""
        refs = None if self._buffer is None else [self._in_store(self._buffer)]
        caller.set_result((self._body, refs))

    def send_by_agent(
        self,
        agent: AgentClient,
        number: int,
        sessions: Sequence[Session],
        exchanged: Exchanged | None,
    ) -> None:
        """Have the agent of another node send it to its members."""
        sent: SentWeights = None
        if exchanged is not None and agent.has(exchanged):
            sent = AverageOf(exchanged.number)
        elif self._buffer is not None and self._buffer.nbytes <= _IN_CALL:
            sent = self._buffer
        elif self._buffer is not None:
            sent = [self._in_store(self._buffer)]
        tokens = [session.token for session in sessions]
        assert agent.link is not None
        response = NodeAgentResponse(number, self._body, sent, tokens)
        agent.link.send(response, by_ray=isinstance(sent, list))

    def _in_store(self, buffer: NDArray[np.uint8]) -> ray.ObjectRef:
        if self._ref is None:
            self.wake()  # do not let them sleep while weights are put
            self._ref = self._put(buffer)
        return self._ref
