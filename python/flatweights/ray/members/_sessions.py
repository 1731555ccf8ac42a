"""The record of one member, from its entry to its end, and its requests.

A session is a `Peer`, with the channel or the call by which its process is reached. One thread,
that of the process group or of the node agent, calls these methods; no other thread reads a
session.

If a member leaves or dies, its end becomes known: the socket of its channel closes, and Ray reports
the death of the process that owns the result of its call of `Coordinator.stay`. Until then nobody
else gets its rank; afterwards another process gets it at once.
"""

from __future__ import annotations

import functools
import pickle
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import ray
from numpy.typing import NDArray

from flatweights import _core
from flatweights._layout import Layout, unpickle_layout
from flatweights._sources import Kind, Template
from flatweights._weights import FlatWeights
from flatweights.ray import _clock
from flatweights.ray.channels._driver_channel import DriverChannel
from flatweights.ray.channels._message import Message, buffer_message
from flatweights.ray.channels._protocol import ASKED_AGAIN, COMMAND, NUMBER, REDUCED, REPEAT, RESEND
from flatweights.ray.channels._segments import Segments
from flatweights.ray.core._peer import Peer, PeerState
from flatweights.ray.core._requests import MemberDiedError, Request, end_of, remember
from flatweights.ray.members._call_queue import CallQueue
from flatweights.ray.peers._by_agent import AgentClient
from flatweights.ray.peers._result_metadata import ResultMetadata
from flatweights.ray.peers._store import RayResult
from flatweights.ray.results._result import Packed

SLICE = 1.0  # seconds between two looks for events that ring no bell
_REPEATED = 4096  # bytes; longer requests are not likely to come again


Reply: TypeAlias = tuple[bytes, list[ray.ObjectRef] | None]
"""The result of a member's call through Ray: the response, and a reference to its weights."""


class StoreRequest(NamedTuple):
    """A request that came through Ray: its body, its buffer, and the future of its caller."""

    body: bytes
    buffer: NDArray[np.uint8] | RemoteWeights | None
    caller: Future[Reply] | None


class Handed(NamedTuple):
    """What the agent of a node hands on to the coordinator for a member.

    Attributes:
        token: That of the member.
        body: Its request; None, if it is ready for its first response.
        buffer: Its weights, if they leave their node, or a placeholder.
    """

    token: bytes
    body: bytes | None = None
    buffer: NDArray[np.uint8] | RemoteWeights | None = None


class Announced(NamedTuple):
    """A response of which a member was told only a number, by which it fetches the rest."""

    number: int
    body: bytes
    buffer: NDArray[np.uint8] | None


class RemoteWeights(NamedTuple):
    """A placeholder for weights that stay on the member's node.

    Attributes:
        not_finite: The error about NaN or infinity, if they were screened and hold any.
    """

    not_finite: Exception | None


class Prepared(NamedTuple):
    """What a member may ask for again, by a number.

    Attributes:
        request: The request.
        layout: The layout that it names.
    """

    request: Request
    layout: Layout | None


@dataclass(eq=False)
class Session(Peer):
    """The record of one member, at a coordinator or a node agent.

    Attributes:
        agent: The agent of its node, if that has the channel to it.
        over: The future on which its call of `Coordinator.stay` waits for its end.
        task: The id of its Ray task; None, if it is in none.
        channel: The channel to it; None, if it calls through Ray.
        answer: Its request, while it is `ASKING`.
        fault: The error that describes its end, until the core or the coordinator knows of it.
        announced: The response that it has to fetch, until it asks again.
        prepared: What it may ask for again, by number.
        seen: The time at which its request was seen, before it was read; 0, if it was not.
        is_quiet: Whether its next request may ring no bell although it has a timeout.
    """

    agent: AgentClient | None = None
    over: Future[None] | None = None
    task: str | None = None
    channel: DriverChannel | None = None
    answer: SessionResult | None = None
    fault: MemberDiedError | None = None
    announced: Announced | None = None
    prepared: dict[int, Prepared] = field(default_factory=dict)
    seen: float = 0.0
    is_quiet: bool = False
    _store_requests: deque[StoreRequest] = field(default_factory=deque)
    _caller: Future[Reply] | None = None  # of its call through Ray, which waits
    _layouts: dict[str, Layout] = field(default_factory=dict)  # layouts that it has sent, by digest

    @property
    def is_attached(self) -> bool:
        """Whether its channel is made: here, or at the agent of its node."""
        return self.state is not PeerState.ENTERING

    def attach(self, channel: DriverChannel) -> None:
        """Take the channel to it: it is ready for its first response."""
        self.channel, self.has_channel = channel, True
        self.ready()

    def expect(self, caller: Future[Reply] | None) -> None:
        """Note that it waits for its first response: in a call through Ray or at its node agent."""
        self._caller = caller
        self.ready()
        if caller is not None:
            self.agent = None

    def receive(self, store_request: StoreRequest) -> None:
        """Take a request that came through Ray; `poll` reads it."""
        self._store_requests.append(store_request)

    def poll(self) -> bool:
        """Read from the member; return whether there is a request, or the member has ended."""
        if self.state is PeerState.WORKING:
            try:
                self._read()
            except Exception as error:  # it died while it sent a segment, or its data are invalid
                why = f"{type(error).__name__}: {error}"
                self.fault = MemberDiedError(f"{self.who}: its call could not be read: {why}")
            if self.answer is not None or self.fault is not None:
                return True
        if self.channel is None or not self.channel.is_closed or not self.is_present:
            return False
        self.fault = end_of(self.who, self.channel.last_words)
        return True

    def take_caller(self) -> Future[Reply] | None:
        """Drop the request, whose response is sent; return the future of its call through Ray."""
        self._drop_request()
        caller, self._caller = self._caller, None
        return caller

    def close(self) -> None:
        """Drop what belongs to a member that has left or died."""
        self.announced = None
        self._drop_request()
        self._store_requests.clear()
        if self._caller is not None and not self._caller.done():
            self._caller.set_exception(self.why or MemberDiedError("this member has left"))
        self._caller = None
        if self.over is not None and not self.over.done():
            self.over.set_result(None)

    def _drop_request(self) -> None:
        if self.answer is not None:
            self.answer.release()
            self.answer = None

    def _read(self) -> None:
        """Read the request, if it has arrived."""
        channel = self.channel
        body: bytes | None = None
        buffer: NDArray[np.uint8] | RemoteWeights | None = None
        kind, since = 0, 0.0
        if channel is not None and channel.is_answered:
            kind, (body, buffers) = channel.take()
            since, self.seen = self.seen, 0.0
            if kind == REDUCED:  # too late: the others have gone on without it
                channel.order(RESEND)
                return
            buffer = buffers[0] if buffers else None
            del buffers
        if kind == REPEAT and body is not None:
            number, weight = ASKED_AGAIN.unpack(body)
            known = self.prepared.get(number)
            if known is None:  # an interrupt has kept the member from learning of a later number
                assert channel is not None
                buffer = None
                channel.order(RESEND)
                return
            request, layout = known.request._replace(weight=weight), known.layout
            self._take(SessionResult(self, request, body, layout, buffer, number), since)
            return
        if self._store_requests and (channel is None or body == b""):
            body, buffer, self._caller = self._store_requests.popleft()
        if body is None:
            return
        read = _request_in if len(body) <= _REPEATED else _request_in.__wrapped__
        request, pickled = read(body)
        if pickled is not None:
            sent = unpickle_layout(pickled)
            remember(self._layouts, sent.digest, sent)
        layout = None if request.digest is None else self._layouts[request.digest]
        self._take(SessionResult(self, request, body, layout, buffer), since)

    def _take(self, answer: SessionResult, since: float) -> None:
        self.answer, self.announced, self.is_quiet = answer, None, False
        self.requests(answer.request, since or _clock.now())


def wait_for(
    sessions: Sequence[Session], queue: CallQueue, timeout: float | None, enough: int
) -> list[Session]:
    """Return those of ``sessions`` that have asked or ended; return early if calls are queued.

    Args:
        sessions: The present members.
        queue: The calls from other threads to this one.
        timeout: Seconds to wait; for ever, if None.
        enough: The number of requests to wait for. Urgent requests, and ends, are returned at once.
    """
    end = None if timeout is None else _clock.now() + timeout
    heard: dict[Session, None] = {}
    while True:
        channels, is_quiet = [], False
        for session in sessions:
            channel = session.channel
            is_open = channel is not None and not channel.is_closed
            if session.state is PeerState.ASKING and is_open:  # most, at the end of a call
                continue
            if session.poll():  # also one that has asked, and has died since
                heard[session] = None
            elif session.state is PeerState.WORKING and channel is not None:
                # Before its first response a member asks for nothing, but its mailbox looks
                # answered: so only members that work are watched.
                channels.append(channel)
                is_quiet = is_quiet or session.is_quiet
        left = SLICE if end is None else min(SLICE, end - _clock.now())
        if len(heard) >= enough or left <= 0 or queue or any(map(_is_urgent, heard)):
            return [*heard]
        # All requests except the last are read while that member still works. The first one may
        # begin the time of a call, even if it does not ring.
        queue.channels.wait(channels, left, 1 if is_quiet else max(1, enough - len(heard) - 1))


def _is_urgent(session: Session) -> bool:
    """Whether a member's request or end stops the wait for others at once."""
    if session.fault is not None or session.answer is None:
        return True
    return session.answer.request.is_urgent


class SessionResult(RayResult):
    """The request of a member, as an answer that a round averages.

    Attributes:
        session: The member.
        request: The request.
        body: The request in the form in which it came.
        prepared: The number by which it came; 0, if it came whole.
        away: The placeholder, if the weights stay on their node.
        known_layout: The layout that the request names, if it names one.
    """

    def __init__(
        self,
        session: Session,
        request: Request,
        body: bytes,
        layout: Layout | None,
        buffer: NDArray[np.uint8] | RemoteWeights | None,
        prepared: int = 0,
    ) -> None:
        """Take the request of ``session``, and the layout and the buffer that it names.

        Raises:
            ValueError: If the buffer is not as long as the layout says.
        """
        super().__init__(None)
        self.session = session
        self.request = request
        self.body = body
        self.prepared = prepared
        self.away: RemoteWeights | None = None
        self.known_layout = layout
        if isinstance(buffer, RemoteWeights):
            assert session.agent is not None
            self.away, self.agent = buffer, session.agent
            self._platform = session.agent.platform
        elif layout is not None and request.root in (None, session.rank):
            is_sent = request.brings_weights and not request.is_in_segment
            given, expected = as_array(buffer), layout.nbytes if is_sent else 0
            if given.nbytes != expected:
                raise ValueError(f"expected {expected:,} bytes of weights, got {given.nbytes:,}")
            self.packed = None if request.is_in_segment else Packed(given, layout)

    @property
    def is_in_store(self) -> bool:
        """Whether its weights were brought to the store; an array in a store request was not."""
        return self.ref is not None

    @property
    def layout(self) -> Layout:
        """The layout that the request names."""
        assert self.known_layout is not None
        return self.known_layout

    def result(self) -> Any:
        """Return the weights; if they stay with `agent`, metadata of them."""
        if self.ref is not None:
            return FlatWeights.wrap(self._platform.get(self.ref), self.layout)
        if self.away is not None:
            template = Template(Kind.FLAT_WEIGHTS, self.layout)
            return ResultMetadata(
                template, not_finite=self.away.not_finite, nbytes=self.layout.nbytes
            )
        return None if self.packed is None else self.packed.weights()

    def fetch(self) -> bool:
        """Ask the agent for weights that are away; return whether they are."""
        if self.away is not None:
            self.ref = self.agent.handle.give.remote(self.session.rank)
        return self.away is not None

    def release(self) -> None:
        """Drop the weights."""
        self.packed = self.away = self.ref = None


@functools.lru_cache(maxsize=256)
def _request_in(body: bytes) -> tuple[Request, bytes | None]:
    """Return the request in ``body``, the same object for the same body, and its pickled layout."""
    fields, layout = pickle.loads(body)
    return Request(*fields), layout


def as_array(buffer: NDArray[np.uint8] | None) -> NDArray[np.uint8]:
    """Return the packed buffer of a request or a response; an empty one, if it has none."""
    return np.empty(0, np.uint8) if buffer is None else buffer


class Post:
    """A response on its way to members that have channels.

    A message holds it, with its weights in a segment. Without a segment, or if it is too long, each
    member is told a number, by which it fetches the response through Ray.
    """

    def __init__(
        self, number: int, body: bytes, buffer: NDArray[np.uint8] | None, segments: Segments
    ) -> None:
        """Make the message.

        Args:
            number: A number that no other response has.
            body: The response.
            buffer: Its weights.
            segments: The segments of this process.
        """
        self._segments = segments
        self._announced: Announced | None = None
        message = buffer_message(COMMAND, body, buffer, segments)
        if message is None:
            self._announced = Announced(number, body, buffer)
            message = buffer_message(COMMAND, NUMBER.pack(number), None, segments)
            assert message is not None
        self._message: Message = message

    def to(self, session: Session, posted: list[_core.Mailbox]) -> None:
        """Give it to ``session``; add its mailbox to ``posted``, to be woken.

        Raises:
            Exception: If the member is dead.
        """
        assert session.channel is not None
        session.announced = self._announced
        session.channel.post(self._message, self._segments, posted)


def fetched(sessions: Iterable[Session], number: int) -> tuple[bytes, NDArray[np.uint8] | None]:
    """Return the response that one of ``sessions`` has to fetch: its body and its buffer.

    Raises:
        KeyError: If none of them has to.
    """
    for session in sessions:
        if session.announced is not None and session.announced.number == number:
            return session.announced.body, session.announced.buffer
    raise KeyError(f"response {number} is no longer kept")
