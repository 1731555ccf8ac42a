"""A member's connection to its coordinator: a channel within a node, else Ray's object store."""

from __future__ import annotations

import contextlib
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
import ray
from numpy.typing import NDArray

from flatweights._layout import Layout, unpickle_layout
from flatweights.ray.channels._end import ChannelError
from flatweights.ray.channels._gpu_segments import OwnSegment
from flatweights.ray.channels._member_channel import CoordinatorDiedError, MemberChannel, Shortcut
from flatweights.ray.channels._protocol import (
    ASKED_AGAIN,
    NUMBER,
    REDUCE,
    REDUCED,
    REPEAT,
    REPEATED,
    RESEND,
    TOLD_AGAIN,
)
from flatweights.ray.channels._segments import new_buffer
from flatweights.ray.core._requests import (
    Kind,
    MemberDiedError,
    MemberError,
    OnGpu,
    Request,
    Response,
    Told,
    end_of,
    remember,
)
from flatweights.ray.members._config import GroupConfig
from flatweights.ray.members._coordinator import Coordinator
from flatweights.ray.members._gpu_member import GpuMember, gpu_of
from flatweights.ray.members._platform import PLATFORM, MemberPlatform
from flatweights.ray.members._rendezvous import JoinReply
from flatweights.ray.members._repeated_call import Repeatable, response_again
from flatweights.ray.members._sessions import as_array
from flatweights.ray.peers._wait import seconds_left
from flatweights.ray.results._variables import Memory, Variables
from flatweights.ray.support._failpoints import reach

Made = TypeVar("Made")

Sent: TypeAlias = NDArray[np.uint8] | OwnSegment | None
"""The packed weights of a request, in memory of the host or in a segment of a GPU."""

_ABSENT = 5.0  # seconds in which a coordinator has to name the missing ranks
_CALLS = 4  # of a member in its coordinator: `stay`, the current one, and two that it gave up
_GRACE = 30.0  # seconds beyond the timeout of a call for which a member waits for its coordinator
_LEAVE = pickle.dumps((Request("leave").fields, None))


class Identity(NamedTuple):
    """The identity of a process for its coordinator, from its entry on.

    Attributes:
        token: The token by which the coordinator recognises the process.
        who: The name of the process in errors.
        stays: The result of its call of `Coordinator.stay`. The process owns it: if it dies, the
            coordinator learns that from Ray.
    """

    token: bytes
    who: str
    stays: ray.ObjectRef | None = None


class CoordinatorClient(ABC):
    """A member's end of the connection to its coordinator.

    Attributes:
        stage: What has come of the current call: "asking", once a request was sent, until its
            response is received; "told", if the member has still to apply that; else "idle".
    """

    def __init__(
        self, actor: ray.actor.ActorHandle, identity: Identity, platform: MemberPlatform = PLATFORM
    ) -> None:
        """Take the actor, which is the coordinator or the agent of this node, and the identity."""
        self.stage: Literal["idle", "asking", "told"] = "idle"
        self._platform = platform
        self._actor = actor
        self._identity = identity
        self._known: dict[str, None] = {}  # digests of layouts that the coordinator has been sent

    def offer(self, nbytes: int) -> None:  # noqa: B027 - through Ray there is no such memory
        """Let this thread make its next buffer of ``nbytes`` where the coordinator reads it."""

    def packed(self, variables: Variables) -> NDArray[np.uint8]:
        """Return ``variables``, read into a buffer, if possible one that the coordinator reads."""
        buffer = new_buffer(variables.layout, self.offer)
        variables.gather_into(buffer)
        return buffer

    def gather(self, variables: Variables, request: Request) -> tuple[Request, Sent]:
        """Read ``variables`` into memory from which an average is made.

        Returns:
            The request, which tells where they are; and the memory, for `exchange`.
        """
        return request, self.packed(variables)

    def on_gpu(self, variables: Variables, request: Request) -> Request:
        """Return the request of a member that sends nothing; it tells where ``variables`` are."""
        return request

    def again(
        self, request: Request, size: int, buffer: Sent
    ) -> tuple[Shortcut, Repeatable] | None:
        """Return the way to make a call again that was just made; None, if there is none.

        Args:
            request: The request.
            size: The bytes of its weights.
            buffer: What was sent with it.
        """
        return None

    def was_asked(  # noqa: B027 - as for `offer`
        self, request: Request, known: Repeatable, has_come: bool
    ) -> None:
        """Note that a `Shortcut` has asked: the next `exchange` waits for the response or reads it.

        Args:
            request: The request.
            known: What is known of such calls.
            has_come: Whether the response has come.
        """

    def exchange(self, request: Request, layout: Layout, sent: Sent) -> tuple[Response, Any]:
        """Ask, and wait; return the response, and its weights, which are read-only.

        The weights are in a segment of a GPU only if those that were sent could be.

        Args:
            request: The request.
            layout: The layout of the expected weights, and of those that are sent.
            sent: The packed weights, if they are sent.

        Raises:
            CoordinatorDiedError: If the coordinator is gone.
            TimeoutError: If it does not answer.
            Exception: The error of the response.
        """
        self.stage = "asking"
        patience = None if request.timeout is None else request.timeout + _GRACE
        if not request.brings_weights:
            patience = None  # the others may still be in an epoch, or have stopped
        try:
            told, got = self._send_and_receive(request, layout, sent, patience)
        except ray.exceptions.RayError as error:
            raise CoordinatorDiedError(f"the coordinator cannot be reached: {error}") from None
        self.stage = "told"
        response = _response_in(told)
        self._learn(response, request)
        if response.error is not None:
            self.stage = "idle"
            try:
                raise response.error
            finally:  # the error has this frame: a cycle would keep the buffer, and its segment
                del response
        if request.operation == "give":
            return response, as_array(None)
        theirs = layout if response.layout is None else unpickle_layout(response.layout)
        if theirs.digest != layout.digest:
            raise ValueError(f"expected weights of {layout}, got those of {theirs}")
        return response, self._memory_of(response, got)

    def _body(self, request: Request, layout: Layout) -> bytes:
        """Return a request as it is sent, with a layout that the coordinator does not know yet."""
        is_known = layout.digest in self._known
        if not is_known:
            remember(self._known, layout.digest)
        return pickle.dumps((request.fields, None if is_known else layout.pickled))

    def _learn(self, response: Response, request: Request) -> None:  # noqa: B027 - as for `offer`
        """Note what a response says about the next call like ``request``."""

    def _memory_of(self, response: Response, got: NDArray[np.uint8] | None) -> Memory:
        """Return the weights of a response, of which the message had ``got``."""
        return as_array(got)

    @abstractmethod
    def start(self, timeout: float | None) -> Response:
        """Wait for the first response."""

    @abstractmethod
    def leave(self) -> None:
        """Tell the coordinator that the member leaves."""

    @abstractmethod
    def close(self, raised: str = "") -> None:
        """Close this end; the coordinator learns that it is gone, and what it ``raised``."""

    @abstractmethod
    def _send_and_receive(
        self, request: Request, layout: Layout, sent: Sent, patience: float | None
    ) -> Told:
        """Send a request and its weights; return the body of the response, and its weights.

        Args:
            request: The request.
            layout: The layout of the weights.
            sent: The weights.
            patience: Seconds to wait for the response; for ever, if None.
        """


class ChannelClient(CoordinatorClient):
    """The end of a channel: memory that member and coordinator map."""

    def __init__(
        self,
        actor: ray.actor.ActorHandle,
        identity: Identity,
        channel: MemberChannel,
        session: int,
        platform: MemberPlatform = PLATFORM,
    ) -> None:
        """Take the channel, which is attached, and the number of the session."""
        super().__init__(actor, identity, platform)
        self._channel = channel
        self._gpu = GpuMember(channel, session)
        self._session = session
        self._may_stay: set[Kind] = set()  # kinds of call whose weights may stay on their GPU
        self._prepared: dict[tuple[Any, ...], Repeatable] = {}  # by signature, what may be repeated

    def offer(self, nbytes: int) -> None:
        """Offer a segment."""
        self._channel.offer(nbytes)

    def start(self, timeout: float | None) -> Response:
        """Wait for the first command."""
        told = self._response(timeout)
        assert told is not None
        return _response_in(told[0])

    def leave(self) -> None:
        """Answer the last command."""
        self._channel.request(_LEAVE, None, is_urgent=True)

    def close(self, raised: str = "") -> None:
        """Close the socket."""
        if raised and not self._channel.is_closed:
            self._channel.send_last_words(raised)
        self._channel.close()
        self._gpu.clear()

    def gather(self, variables: Variables, request: Request) -> tuple[Request, Sent]:
        """Read ``variables`` into a segment: of their GPU, if the last such call allows it."""
        request = self.on_gpu(variables, request)
        if request.gpu is None or request.kind not in self._may_stay:
            return super().gather(variables, request)
        segment = self._gpu.gather(variables, request.gpu.uuid)
        if segment is None:
            return super().gather(variables, request)
        return request._replace(gpu=OnGpu(request.gpu.uuid, segment.handle.placed)), segment

    def on_gpu(self, variables: Variables, request: Request) -> Request:
        """Return the request with the GPU that ``variables`` are on, if they are on one."""
        uuid = gpu_of(variables)
        return request if uuid is None else request._replace(gpu=OnGpu(uuid))

    def again(
        self, request: Request, size: int, buffer: Sent
    ) -> tuple[Shortcut, Repeatable] | None:
        """Return the way to ask again, if the coordinator has just repeated the call."""
        known = self._prepared.get(request.signature)
        if known is None or not known.was_repeated or isinstance(buffer, OwnSegment):
            return None
        if buffer is None and request.gpu is not None:  # the weights may come in a segment of it
            return None
        shortcut = self._channel.shortcut(known.response.prepared, size, buffer)
        return None if shortcut is None else (shortcut, known)

    def was_asked(self, request: Request, known: Repeatable, has_come: bool) -> None:
        """See the base class."""
        # Other kinds of calls may have displaced it.
        remember(self._prepared, request.signature, known)
        self._channel.pending = has_come

    def _send_and_receive(
        self, request: Request, layout: Layout, sent: Sent, patience: float | None
    ) -> Told:
        while True:
            if isinstance(sent, OwnSegment):
                try:
                    self._gpu.announce(sent)
                except OSError as error:
                    raise self._channel.not_sent(error) from error
                buffer = None
            else:
                buffer = sent
            known = self._prepared.get(request.signature)
            is_sent = self._channel.pending is not None
            if not is_sent and (known is None or not self._repeat(request, known, buffer)):
                self._send(self._body(request, layout), buffer, request.is_urgent)
            told = self._response(patience, known)
            if told is not None:
                return told
            # The coordinator wants the same again: the whole request, with weights in its own
            # memory.
            self._prepared.pop(request.signature, None)
            if isinstance(sent, OwnSegment):
                self._may_stay.discard(request.kind)
                request = request.through_host()
                segment, sent = sent.memory, new_buffer(layout, self.offer)
                segment.copy_to(sent)

    def _repeat(
        self, request: Request, known: Repeatable, buffer: NDArray[np.uint8] | None
    ) -> bool:
        """Ask by a number; return whether there was a segment."""
        body = ASKED_AGAIN.pack(known.response.prepared, request.weight)
        # A coordinator that makes repetitions without Python sees them in time; see
        # `RepeatedCalls`.
        is_urgent = request.is_urgent and not known.was_repeated
        return self._channel.request(body, buffer, is_urgent=is_urgent, kind=REPEAT)

    def _send(self, body: bytes, buffer: NDArray[np.uint8] | None, is_urgent: bool) -> None:
        if not self._channel.request(body, buffer, is_urgent=is_urgent):
            # There is no segment, or the request is too long for a mailbox.
            self._platform.check_connected()
            self._platform.get(self._actor.deliver.remote(self._identity.token, body, buffer))
            self._channel.request(b"", None, is_urgent=is_urgent)

    def _learn(self, response: Response, request: Request) -> None:
        if self._session in response.sessions:
            signature = request.signature
            if not response.prepared:
                self._prepared.pop(signature, None)
            elif not (signature in self._prepared and self._prepared[signature].was_repeated):
                remember(self._prepared, signature, Repeatable(response._replace(layout=None)))
        if response.may_stay:
            self._may_stay.add(request.kind)
        else:
            self._may_stay.discard(request.kind)

    def _memory_of(self, response: Response, got: NDArray[np.uint8] | None) -> Memory:
        return as_array(got) if response.placed is None else self._gpu.memory(response.placed)

    def _response(self, patience: float | None, known: Repeatable | None = None) -> Told | None:
        """Return the response; None if the coordinator wants the request again.

        Args:
            patience: Seconds to wait for it; for ever, if None.
            known: What is known of such calls, if the request was repeated.
        """
        while True:
            body, buffers, kind = self._channel.response(patience)
            if kind == REPEATED and known is not None:
                known.was_repeated = True
                number, *seconds = TOLD_AGAIN.unpack(body)
                return response_again(known.response, number, *seconds), buffers[0]
            if known is not None:
                known.was_repeated = False
            if kind == RESEND:
                return None
            if kind != REDUCE:
                break
            self._channel.request(self._gpu.reduce(body), None, is_urgent=True, kind=REDUCED)
        if len(body) <= NUMBER.size:
            fetched: Told = self._platform.get(self._actor.fetch.remote(*NUMBER.unpack(body)))
            return fetched
        return body, buffers[0] if buffers else None


class StoreClient(CoordinatorClient):
    """An end that uses Ray's calls and its object store, for members without a channel."""

    def __init__(
        self,
        coordinator: ray.actor.ActorHandle,
        identity: Identity,
        platform: MemberPlatform = PLATFORM,
    ) -> None:
        """Take the coordinator."""
        super().__init__(coordinator, identity, platform)
        # The references of the last response. If one thread drops its reference when another has
        # just received the same, Ray never finds the object. So references are dropped one response
        # later.
        self._last_refs: list[ray.ObjectRef] | None = None

    def start(self, timeout: float | None) -> Response:
        """Call without a body."""
        call = self._actor.exchange.remote(self._identity.token)
        return _response_in(self._take(call, timeout)[0])

    def leave(self) -> None:
        """Deliver a request without waiting for the response."""
        self._platform.check_connected()
        self._platform.get(self._actor.deliver.remote(self._identity.token, _LEAVE, None))

    def close(self, raised: str = "") -> None:
        """Tell the coordinator, unless it has seen that the member left."""
        with contextlib.suppress(Exception):  # Ray may be shut down
            self._platform.check_connected()
            self._actor.lose.remote(self._identity.token, end_of(self._identity.who, raised))

    def _send_and_receive(
        self, request: Request, layout: Layout, sent: Sent, patience: float | None
    ) -> Told:
        self._platform.check_connected()
        body = self._body(request, layout)
        call = self._actor.exchange.remote(self._identity.token, body, sent)
        return self._take(call, patience)

    def _take(self, call: ray.ObjectRef, patience: float | None) -> Told:
        try:
            body, refs = self._platform.get(call, patience)
        except ray.exceptions.GetTimeoutError:
            raise TimeoutError(f"no answer of the coordinator within {patience} s") from None
        except ray.exceptions.RayTaskError as error:
            raise CoordinatorDiedError(str(error.cause)) from None
        self._last_refs = refs
        if refs is None:
            return body, None
        return body, self._platform.get_shared(refs[0])


def _response_in(told: bytes | Response) -> Response:
    return told if isinstance(told, Response) else Response(*pickle.loads(told))


def enter(
    name: str,
    rank: int | None,
    config: GroupConfig,
    timeout: float | None,
    end: float | None,
    make: Callable[[CoordinatorClient, JoinReply, Response], Made],
    platform: MemberPlatform = PLATFORM,
) -> Made:
    """Find or start the coordinator, join, wait for the others, and return what ``make`` returns.

    Args:
        name: See `flatweights.ray.join`.
        rank: See `flatweights.ray.join`.
        config: The configuration of the process group.
        timeout: See `flatweights.ray.join`; for errors.
        end: The time at which it is over, by `time.monotonic`.
        make: Makes the member of the connection, the join reply and the first response. From then
            on, the member sees to its end.
        platform: What the member uses of Ray and channels.

    Raises:
        CoordinatorDiedError: If the coordinator has ended meanwhile.
        ray.exceptions.RayActorError: The same.
        MemberError: If this is the retry of a task whose member died in that group, which has
            ended.
        TimeoutError: If not all have joined in time.
        ValueError: If the coordinator refuses ``rank`` or ``config``.
    """
    node, task = platform.node(), platform.task()
    last = None if config.min_size == 1 else platform.last_end(name)  # one alone may begin
    is_over = last is not None and last.is_over_for(task, platform.who())
    if last is not None and is_over and not platform.has_coordinator(name):
        raise MemberError(
            f"process group {name!r}: it has ended {last.seconds_since:.0f} s ago, after this "
            "task's member had died in it: this retry of the task has nobody to join"
        )
    concurrency = _CALLS * config.size + 64  # coroutines, not threads
    try:
        coordinator = platform.find_coordinator(Coordinator, name, node, concurrency, name, config)
    except ConnectionError as error:
        raise CoordinatorDiedError(str(error)) from None
    wants_channel = platform.setting() != "store"
    token, who = platform.introduce()
    join_reply: JoinReply | None = None
    client: CoordinatorClient | None = None
    try:
        identity = Identity(token, who, coordinator.stay.remote(token))
        entering = coordinator.enter.remote(
            token, [identity.stays], rank, config, who, node, wants_channel, task
        )
        reach("entering")
        join_reply = platform.get(entering, seconds_left(end))
        assert join_reply is not None
        reach("entered")
        client = _end_of(coordinator, join_reply, identity, end, platform)
        reach("attached")
        return make(client, join_reply, client.start(seconds_left(end)))
    except BaseException as error:
        is_late, why = isinstance(error, (TimeoutError, ray.exceptions.GetTimeoutError)), ""
        try:
            if is_late:  # the coordinator ends with its last member
                platform.check_connected()
                own = rank if join_reply is None else join_reply.rank
                is_in = join_reply is not None
                why = _who_is_missing(coordinator, token, own, platform, is_in=is_in)
                last = platform.last_end(name)
                if last is not None:
                    ago = f"{last.seconds_since:.0f} s ago"
                    why += f"; a process group of this name has ended {ago}"
                others = platform.other_jobs_with(name)
                if others:
                    jobs = ", ".join(others)
                    why += f"; a name is local to its Ray job, and it is also in use in job {jobs}"
        finally:
            with contextlib.suppress(Exception):  # another thread may have shut down Ray
                platform.check_connected()
                coordinator.lose.remote(token, MemberDiedError(f"{who} has given up to join"))
            if client is not None:
                client.close()
        if is_late:
            expected = f"expected {config} in {timeout} s"
            raise TimeoutError(f"process group {name!r}: {expected}; {why}") from None
        if isinstance(error, ray.exceptions.RayTaskError):
            if isinstance(error.cause, ValueError):
                raise error.cause from None
            raise CoordinatorDiedError(str(error.cause)) from None
        raise


def _who_is_missing(
    coordinator: ray.actor.ActorHandle,
    token: bytes,
    own: int | None,
    platform: MemberPlatform,
    *,
    is_in: bool,
) -> str:
    """Return a clause about the ranks that have yet to join, or to leave the last process group.

    ``own`` is the rank of this process; unless it ``is_in``, another process may have that.
    """
    try:
        ranks, are_to_leave = platform.get(coordinator.awaited_by.remote(token), _ABSENT)
    except ray.exceptions.RayError as error:
        return f"its coordinator does not answer: {type(error).__name__}"
    if are_to_leave:
        return (
            f"ranks {', '.join(map(str, ranks))} have not left the process group of this name that "
            "this process has left"
        )
    if own is not None and own not in ranks and not is_in:
        return f"rank {own} is that of another process"
    missing = [str(rank) for rank in ranks if rank != own]
    if not missing:
        return "the last of them came just then"
    return f"missing ranks: {', '.join(missing)}"


def _end_of(
    coordinator: ray.actor.ActorHandle,
    join_reply: JoinReply,
    identity: Identity,
    end: float | None,
    platform: MemberPlatform,
) -> CoordinatorClient:
    """Make the channel that a join reply allows; otherwise return an end that uses Ray's store.

    Raises:
        OSError: If the channel cannot be made, and ``FLATWEIGHTS_RAY=shm`` requires it.
        ChannelError: Likewise; or if the coordinator did not find it.
        MemoryError: Likewise.
        ray.exceptions.RayError: If the coordinator, or the agent of this node, has died, or does
            not answer by ``end``.
    """
    address, actor, peer = join_reply.address, coordinator, "the coordinator"
    if join_reply.node_agent is not None:
        actor, peer = join_reply.node_agent, "the agent of this node"
        try:
            entering = actor.enter.remote(join_reply.rank, identity.who, identity.token)
            address = platform.get(entering, seconds_left(end))
        except ray.exceptions.GetTimeoutError:
            raise
        except ray.exceptions.RayError:
            address = None
    if address is None:
        return StoreClient(coordinator, identity, platform)
    try:
        channel = platform.member_channel(address, identity.token, peer)
    except (OSError, ChannelError, MemoryError):
        if platform.setting() == "shm":
            raise
        return StoreClient(coordinator, identity, platform)
    try:
        attaching = actor.attach.remote(identity.token, channel.mailbox.nonce)
        platform.get(attaching, seconds_left(end))
    except BaseException:
        channel.close()
        raise
    return ChannelClient(actor, identity, channel, join_reply.session, platform)
