"""A node agent: the agent of a process group on another node than its coordinator's.

The members of its node make channels to it, as other members do to the coordinator. Large weights
stay here: the coordinator gets only the requests, and lets node agents exchange shards. Small
weights go to the coordinator with the request.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import NamedTuple, NoReturn, TypeAlias

import numpy as np
import ray
from numpy.typing import NDArray

from flatweights import _core
from flatweights._sources import Kind, Template
from flatweights.ray.channels._end import ChannelError
from flatweights.ray.core._peer import PeerState
from flatweights.ray.core._requests import MemberDiedError
from flatweights.ray.members._call_queue import CallQueue
from flatweights.ray.members._platform import PLATFORM, MemberPlatform
from flatweights.ray.members._sessions import (
    SLICE,
    Handed,
    Post,
    RemoteWeights,
    Session,
    StoreRequest,
    fetched,
    wait_for,
)
from flatweights.ray.nodes._address import Address
from flatweights.ray.nodes._connections import StreamError
from flatweights.ray.nodes._link import Link
from flatweights.ray.nodes._node_reducer import NodeReducer, Traffic
from flatweights.ray.peers._agent import Agent, AverageOf, StreamOrder
from flatweights.ray.peers._by_agent import call_while_alive
from flatweights.ray.peers._by_channel import GroupChannels
from flatweights.ray.support._errors import reason_in_a_line

_log = logging.getLogger("flatweights")


SentWeights: TypeAlias = AverageOf | NDArray[np.uint8] | Sequence[ray.ObjectRef] | None
"""The packed weights of a response, or a list with a reference to them; None without weights."""


class NodeAgentResponse(NamedTuple):
    """A response for members of one node agent.

    Attributes:
        number: Its number.
        body: The response.
        weights: Its weights.
        tokens: The tokens of the members.
    """

    number: int
    body: bytes
    weights: SentWeights
    tokens: Sequence[bytes]


class Streamed(NamedTuple):
    """The outcome of an exchange.

    Attributes:
        number: The number of the exchange.
        outcome: What `Agent.stream` has returned.
    """

    number: int
    outcome: Traffic | Exception


class NodeAgent:
    """The members of one node. One thread owns their sessions, as in a process group.

    Attributes:
        queue: The calls that other threads want that thread to make.
        failure: A future for the error that has ended that thread.
    """

    def __init__(
        self,
        coordinator: ray.actor.ActorHandle,
        hand: Callable[[list[Handed]], object],
        channels: GroupChannels,
        end: NodeReducer,
        platform: MemberPlatform = PLATFORM,
    ) -> None:
        """Begin without members.

        Args:
            coordinator: The actor of the process group.
            hand: Sends requests to it.
            channels: The channels of this process.
            end: This node's part of exchanges.
            platform: What it uses of Ray, channels and threads.

        Raises:
            OSError: If there can be no channels.
        """
        made = channels.channels
        if made is None:
            raise OSError(channels.backoff.reason)
        self._coordinator = coordinator
        self._hand = hand
        self._channels = made
        self._end = end
        self._sessions: dict[bytes, Session] = {}
        self._senders: dict[int, Session] = {}  # by rank, the member that a model here belongs to
        self._posts = 0
        self._platform = platform
        self.queue = CallQueue(made, platform)
        self.failure: Future[NoReturn] = Future()
        platform.start_thread(self._run, (), "flatweights-node-agent")

    def enter(self, rank: int, who: str, token: bytes) -> bytes:
        """Admit a member that the coordinator has; return the address for its channel."""
        self._channels.expect(token)
        self._sessions[token] = Session(rank, who, token)
        return self._channels.address

    def attach(self, token: bytes, nonce: bytes) -> None:
        """Make the channel to a member, and tell the coordinator that it is ready.

        Raises:
            ChannelError: If it has not connected.
        """
        session = self._sessions.get(token)
        if session is None or session.state is not PeerState.ENTERING:
            raise ChannelError("no such member")
        session.attach(self._channels.connect(token, nonce))
        self._hand([Handed(token)])

    def forget(self, token: bytes) -> None:
        """Drop a member that has left, or that the coordinator counts as dead."""
        session = self._sessions.pop(token, None)
        if session is None:
            return
        if session.channel is None:
            self._channels.forget(token)
        else:
            self._channels.give_up(session.channel)

    def deliver(self, token: bytes, body: bytes, buffer: NDArray[np.uint8] | None) -> None:
        """Take a request that does not fit into a channel."""
        self._sessions[token].receive(StoreRequest(body, buffer, None))

    def fetch(self, number: int) -> tuple[bytes, NDArray[np.uint8] | None]:
        """Return a response that did not fit into a channel: its body and its buffer.

        Raises:
            KeyError: If no member has to fetch it.
        """
        return fetched(self._sessions.values(), number)

    def post(self, response: NodeAgentResponse) -> None:
        """Give members a response."""
        told = [self._sessions[token] for token in response.tokens if token in self._sessions]
        self._posts += 1
        try:
            buffer = self._buffer_of(response.weights)
            post = Post(self._posts, response.body, buffer, self._channels.segments)
        except Exception as error:  # the store has lost them, or memory is short
            why = f"its response did not come: {reason_in_a_line(error)}"
            for session in told:
                self._lose(session, MemberDiedError(f"{session.who}: {why}"))
            return
        posted: list[_core.Mailbox] = []
        # No exchange uses the models of the call that ends. A member that has ended may have asked
        # for the next one, and other members of this node are told something meanwhile.
        ended = [
            sender
            for sender in self._senders.values()
            if not sender.is_present and sender.has < response.number
        ]
        for session in (*told, *ended):
            if self._senders.get(session.rank) is session:  # not a successor of a dead member
                del self._senders[session.rank]
                self._end.models.pop(session.rank, None)
        for session in told:
            session.told(response.number)
            session.take_caller()
            try:
                post.to(session, posted)
            except Exception as error:  # the member died meanwhile
                self._lose(
                    session, MemberDiedError(f"{session.who}: {type(error).__name__}: {error}")
                )
        self._channels.wake(posted)

    def _buffer_of(self, weights: SentWeights) -> NDArray[np.uint8] | None:
        """Return the packed weights of a response; None if it has none."""
        if weights is None:
            return None
        if isinstance(weights, np.ndarray):
            return weights
        buffer: NDArray[np.uint8]
        if isinstance(weights, AverageOf):
            buffer = self._end.weights(weights.number).buffer
        else:
            buffer = self._platform.get(weights[0])
        return buffer

    def _run(self) -> None:
        try:
            while True:
                self._hand_on()
                self.queue.read()
        except BaseException as error:  # else the members would wait for ever
            _log.exception("the agent of a node of a process group has failed")
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Tell the coordinator that this agent has failed; the first error counts."""
        with contextlib.suppress(InvalidStateError):
            self.failure.set_exception(error)

    def _hand_on(self) -> None:
        """Wait for requests, and send them to the coordinator.

        Nothing here may hold a request during the next wait: its member would need more segments.
        """
        handed = []
        for session in wait_for([*self._sessions.values()], self.queue, SLICE, 1):
            if session.fault is not None:
                self._lose(session, session.fault)
            else:
                handed.append(self._handed(session))
        if handed:
            self._hand(handed)

    def _handed(self, session: Session) -> Handed:
        """Return a member's request for the coordinator; large weights stay here."""
        answer = session.answer
        assert answer is not None
        request = answer.request
        packed = answer.packed
        if request.operation == "leave":
            session.ends(None)
            session.close()
        if packed is None or packed.buffer.nbytes < self._platform.least_exchanged:
            return Handed(session.token, answer.body, None if packed is None else packed.buffer)
        self._end.models[session.rank] = packed.buffer
        self._senders[session.rank] = session
        not_finite = None
        if request.nonfinite != "propagate" and request.rule is None:
            template = Template(Kind.FLAT_WEIGHTS, packed.layout)
            not_finite = template.find_nonfinite([packed.buffer], f"rank {session.rank}")
        return Handed(session.token, answer.body, RemoteWeights(not_finite))

    def _lose(self, session: Session, why: MemberDiedError) -> None:
        """Count a member as dead, and tell the coordinator."""
        session.ends(why)
        session.close()
        call_while_alive(self._platform, self._coordinator.lose.remote, session.token, why)
        self.forget(session.token)


class NodeAgentActor(Agent):
    """The actor; see `NodeAgent`."""

    def __init__(
        self, coordinator: ray.actor.ActorHandle, token: str, platform: MemberPlatform = PLATFORM
    ) -> None:
        """Start, for the process group of ``coordinator``."""
        super().__init__(platform)
        self._platform = platform
        receive = functools.partial(call_while_alive, platform, coordinator.receive.remote, token)
        self._orders = platform.queue()  # of `StreamOrder`
        self._link = Link(self._take, receive, self._fail, platform=platform)
        self._connecting = platform.lock()
        self._node_agent = NodeAgent(
            coordinator, self._link.send, self.channels, self.end, platform
        )
        platform.start_thread(self._stream_all, (), "flatweights-exchanges")

    def stay(self) -> None:
        """Never return: the error tells the coordinator when the node agent has failed, or died."""
        self._platform.result_of(self._node_agent.failure)

    def enter(self, rank: int, who: str, token: bytes) -> bytes:
        """See `NodeAgent.enter`."""
        return self._node_agent.queue.call(self._node_agent.enter, rank, who, token)

    def attach(self, token: bytes, nonce: bytes) -> None:
        """See `NodeAgent.attach`."""
        self._node_agent.queue.call(self._node_agent.attach, token, nonce)

    def forget(self, token: bytes) -> None:
        """See `NodeAgent.forget`."""
        self._node_agent.queue.post(self._node_agent.forget, token)

    def deliver(self, token: bytes, body: bytes, buffer: NDArray[np.uint8] | None) -> None:
        """See `NodeAgent.deliver`."""
        self._node_agent.queue.call(self._node_agent.deliver, token, body, buffer)

    def fetch(self, number: int) -> tuple[bytes, NDArray[np.uint8] | None]:
        """See `NodeAgent.fetch`."""
        return self._node_agent.queue.call(self._node_agent.fetch, number)

    def connect(self, address: Address, epoch: bytes) -> bool:
        """Make a socket for the link; return whether the coordinator was reached there."""
        with self._connecting, contextlib.suppress(OSError):
            self._link.attach(self.end.connect(address, epoch))
            return True
        return False

    def receive(self, number: int, message: NodeAgentResponse | StreamOrder) -> None:
        """Take a message of the coordinator that comes through Ray; see `Link.receive`."""
        self._link.receive(number, message)

    def _take(self, message: NodeAgentResponse | StreamOrder) -> None:
        """Have another thread do what the coordinator tells this agent."""
        if isinstance(message, NodeAgentResponse):
            self._node_agent.queue.post(self._node_agent.post, message)
        else:
            self._supersede(message.plan.number)
            self._orders.put(message)

    def _stream_all(self) -> None:
        """Take part in exchanges, and tell the coordinator the outcomes."""
        while True:
            order = self._orders.get()
            outcome: Traffic | Exception
            try:
                outcome = self.stream(*order)
            except Exception as error:  # memory is short; the coordinator averages itself
                outcome = StreamError(-1, reason_in_a_line(error))
            try:
                self._link.send(Streamed(order.plan.number, outcome))
            except Exception as error:
                self._fail(reason_in_a_line(error))
                return

    def _fail(self, why: str) -> None:
        """Count this agent as failed, since it cannot do its part."""
        self._node_agent.fail(RuntimeError(why))

    def _result(self, rank: int) -> NDArray[np.uint8]:
        """Return the weights of a member.

        Raises:
            MemberDiedError: If it has ended, and its weights are gone.
        """
        try:  # another thread may drop them meanwhile
            return self.end.models[rank]
        except KeyError:
            raise MemberDiedError(f"rank {rank} has ended, and its weights are gone") from None
