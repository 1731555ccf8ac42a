"""The driver's end of channels: it posts commands, and waits for answers of any of its workers."""

import functools
import os
import pickle
import secrets
import select
import socket
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatweights import _core
from flatweights._layout import Layout
from flatweights._sources import check_flat_weights
from flatweights._weights import FlatWeights
from flatweights.ray import _clock
from flatweights.ray.channels._end import ChannelEnd, ChannelError, check_user, receive_packet
from flatweights.ray.channels._message import Message, join_message
from flatweights.ray.channels._protocol import (
    BY_CALL,
    NUMBER,
    REDUCED,
    REFUSAL,
    REPEAT,
    REQUEST,
    VALUE,
    WEIGHTS,
    WELCOME,
)
from flatweights.ray.channels._segments import Extent, Segments
from flatweights.ray.results._result import Packed
from flatweights.ray.support import _failpoints as failpoints
from flatweights.ray.support._errors import UnreadableResultError, reason_in_a_line
from flatweights.ray.support._listener import Listener, PendingConnection, RefusedError

_MOST_SEGMENTS = 64  # the number of counts in a mailbox; segments are made when they are needed
_CALLS_KEPT = 4  # by worker: the current call, and former ones that may have returned results
_TOKEN = 16
_NOTHING = pickle.dumps(None, protocol=5)  # the most frequent answer
_WATCH = 150e-6  # seconds that a driver polls mailboxes before it sleeps
_SOON = 2 * _WATCH  # if a wait, including waking, took no longer, polling was enough


class DriverChannel(ChannelEnd):
    """The channel to one worker.

    Attributes:
        calls: References to the results of the last `FlatWorker.serve_channel` calls, by number.
        is_given_up: Whether no command is posted any more, although the worker may be alive.
        layout: The layout of the last weights that arrived in a message; None before the first.
    """

    def __init__(self, connection: socket.socket, mailbox: _core.Mailbox) -> None:
        """Take a socket of a worker, and its mailbox."""
        super().__init__(connection, mailbox, is_worker=False)
        self.calls: dict[int, Any] = {}
        self.is_given_up = False
        self._count = 0  # of Ray calls
        self._sent: list[Extent] = []  # of the command in the mailbox
        self._is_read = True
        self._reader: _core.WorkerAnswers | None = None  # which may have read the answer
        self.layout: Layout | None = None
        self._digest = b""  # of the layout

    @property
    def is_answered(self) -> bool:
        """Whether the last command was answered."""
        return self.mailbox.is_answered

    def order(self, kind: int, body: bytes = b"") -> None:
        """Post a command of another kind than `COMMAND`, without buffers; errors as of `post`."""
        self.post(Message(join_message(kind, body), []), None)

    def post(
        self, command: Message, segments: Segments | None, asleep: list[_core.Mailbox] | None = None
    ) -> bool:
        """Post a command; return whether a Ray call that takes it exists; if not, call `serve`.

        Args:
            command: The command.
            segments: The segments of this process, if the command has buffers.
            asleep: A list to which the mailbox is added, so that `Mailbox.wake` can wake its
                worker with others. If None, this wakes the worker.

        Raises:
            ChannelError: If the worker has not answered the last command.
            OSError: If the worker is dead, or does not take new segments.
            Exception: If the last answer was not read before, and cannot be read now.
        """
        if not self.mailbox.is_answered:
            raise ChannelError("the last command was not answered")
        try:
            self.settle()
            if not self._is_read:  # once it is read, the worker reuses its segment
                self.take()
            if command.extents:
                assert segments is not None
                self.share(segments, command.extents)
            if failpoints.hook is not None:
                failpoints.reach("shared")
            self._sent, self._is_read, self._reader = command.extents, False, None
            if asleep is not None:
                asleep.append(self.mailbox)
            is_expected = self.mailbox.post(command.content, self._count, asleep is None)
            if failpoints.hook is not None:
                failpoints.reach("posted")
            return is_expected
        except BaseException:  # holds, command and answer may disagree now
            self.is_given_up = True
            raise

    @property
    def has_command(self) -> bool:
        """Whether a command was posted whose answer nobody has read."""
        self.settle()
        return not (self.is_answered and self._is_read)

    def may_be_posted(self, extents: list[Extent]) -> bool:
        """Whether `post` would find the last answer read, and the segments of ``extents`` sent."""
        if self.is_closed or self.is_given_up:
            return False
        sent = self._peer_has
        for index, generation, _, _ in extents:
            if index not in sent or sent[index] != generation:
                return False
        return self._is_read or (self._reader is not None and self._reader.were_read)

    def expect(self, reader: _core.WorkerAnswers, extents: list[Extent]) -> int:
        """Expect that ``reader`` posts a command with ``extents``, and perhaps reads the answer.

        All earlier answers were read. Until it posts, the last one counts as read.

        Returns:
            The number of Ray calls so far that serve commands.
        """
        self._reader, self._sent, self._is_read = reader, extents, False
        return self._count

    def settle(self) -> None:
        """Note that the answer was read, if its reader has."""
        reader = self._reader
        if reader is not None and reader.were_read:
            self._is_read = True

    def close(self) -> None:
        """Close the socket, and let go of what reads the answers of several channels."""
        self.settle()
        self._reader = None
        super().close()

    def was_posted(self, extents: list[Extent]) -> None:
        """Note that `_core.RepeatedCalls` has read an answer, and posted the next command."""
        self._sent, self._is_read, self._reader = extents, False, None

    def serve(self, call: Callable[[int], Any]) -> None:
        """Make another Ray call that serves commands, by ``call``, which takes its number."""
        self._count += 1
        try:
            failpoints.reach("calling")
            self.calls[self._count] = call(self._count)
            failpoints.reach("called")
        except BaseException:
            # It is unknown whether the call was made, and whether it would take a command. So the
            # worker has to attach anew.
            self.is_given_up = True
            raise
        self.calls.pop(self._count - _CALLS_KEPT, None)

    def is_holding(self, index: int) -> bool:
        """Whether the worker holds, or will read, a view of the driver's segment ``index``."""
        return self.mailbox.holds(True, index) > 0

    def count_views(self) -> int:
        """Return the number of views that this process has of the worker's segments."""
        return sum(self.mailbox.holds(False, index) for index in self.peer_segments)

    def latest_call(self) -> Any:
        """Return the reference to the result of the last call."""
        return self.calls[max(self.calls)]

    def dismiss(self) -> None:
        """Stop all calls so far from taking commands: the next command needs a new call.

        Call it only after the last command was answered.
        """
        self.mailbox.dismiss(self._count)

    def take(self) -> tuple[int, Any]:
        """Return kind and content of the answer; arrays are views, valid until the next command.

        A view may be kept longer: as long as it exists, its segment is not written.

        Returns:
            One of the kinds in `flatweights.ray.channels._protocol`; and, for ``VALUE``, the
            result; for ``WEIGHTS``, the result as `Packed`; for ``BY_CALL``, the number of the Ray
            call that returns it; for ``REFUSED`` and ``BROKEN``, the reason; for ``REQUEST``,
            ``REDUCED`` and ``REPEAT``, body and buffers.
        """
        self.settle()
        if self._is_read:  # by C++; an interrupt came before anybody noted the outcome
            return VALUE, None
        self._is_read = True
        kind, buffers, body = self.read()
        if kind in (REQUEST, REDUCED, REPEAT):
            return kind, (body, buffers)
        if kind == WEIGHTS:
            (buffer,) = buffers
            if self.layout is None or self._digest != body:
                raise ChannelError("the layout of the weights is not known")
            if buffer.nbytes != self.layout.nbytes:
                expected = f"{self.layout.nbytes:,} bytes of weights"
                raise ChannelError(f"expected {expected}, got {buffer.nbytes:,}")
            return kind, Packed(buffer, self.layout)
        if kind == VALUE and body == _NOTHING:
            return kind, None
        if kind == VALUE:
            value, reason = _unpickled(body, buffers)
            if reason:  # an error with frames that have the buffers would hold their segment
                del buffers
                raise UnreadableResultError(f"its result cannot be unpickled: {reason}")
            if type(value) is FlatWeights:
                self.layout = value.layout
                self._digest = value.layout.digest.encode()
            return kind, value
        if kind == BY_CALL:
            return kind, NUMBER.unpack(body)[0]
        return kind, body.decode()

    def withdraw(self) -> bool:
        """Withdraw the command, unless the worker has taken it; return whether it was."""
        try:
            if not self.mailbox.withdraw():
                return False
            self._is_read = True
            self.release(self._sent)
        except BaseException:  # as in `post`: the two sides may disagree now
            self.is_given_up = True
            raise
        return True


class Channels:
    """The channels of one driver: its socket, its doorbell, and its segments.

    Attributes:
        address: The address at which workers connect.
        segments: The segments that this process writes.
    """

    def __init__(self) -> None:
        """Listen on a new address.

        Raises:
            OSError: If such sockets or memory files cannot be made here.
        """
        _core.Mailbox()  # raises if there are no memory files
        self.address = b"\0flatweights-" + secrets.token_hex(16).encode()
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listening.bind(self.address)
        listening.listen(512)
        self._met = _Connections()
        self._listener = Listener(listening, "channels", self._met.shake_hands)
        weakref.finalize(self, self._listener.close)
        self._doorbell = _core.Doorbell()
        self._poll = select.epoll()
        self._bell = self._doorbell.fileno()
        self._poll.register(self._bell, select.EPOLLIN)
        self._channels: dict[int, DriverChannel] = {}  # by descriptor
        self._process = os.getpid()
        self._waits: dict[int, float] = {}  # by missing answers, seconds of the last wait
        # A bound method would be a cycle, and keep the segments until the next collection.
        self.segments = Segments(_MOST_SEGMENTS, functools.partial(_is_held, self._channels))

    def new_token(self) -> bytes:
        """Return a token by which the driver recognises a worker."""
        token = secrets.token_bytes(_TOKEN)
        self._met.expect(token)
        return token

    def expect(self, token: bytes) -> None:
        """Admit a worker with ``token``, which another process has made."""
        self._met.expect(token)

    def forget(self, token: bytes) -> None:
        """Admit no worker with ``token`` any more: it has made no channel."""
        channel = self._met.take(token)
        if channel is not None:
            channel.close()

    def connect(self, token: bytes, nonce: bytes) -> DriverChannel:
        """Return the channel to a worker that has attached; its token is invalid afterwards.

        Args:
            token: The token that the worker was given.
            nonce: The nonce of its mailbox, which it has returned through Ray.

        Raises:
            ChannelError: If it has not connected, or its mailbox has another nonce.
            OSError: If it has died since.
        """
        self._drop_given_up()
        channel = self._met.take(token)
        if channel is None:
            raise ChannelError("the worker has not connected")
        bell = self._doorbell
        try:
            if channel.mailbox.nonce != nonce:
                raise ChannelError("the mailbox is not that of the worker")
            socket.send_fds(
                channel.connection, [b"D" + bell.nonce], [bell.descriptor, bell.fileno()]
            )
        except (OSError, ChannelError):  # it is already dead, or a wrong process
            channel.close()
            raise
        descriptor = channel.connection.fileno()
        self._channels[descriptor] = channel
        self._poll.register(descriptor, select.EPOLLIN | select.EPOLLRDHUP)
        return channel

    def wait(
        self, channels: Sequence[DriverChannel], seconds: float | None, enough: int = 1
    ) -> float:
        """Sleep until there are answers, a worker has died or the time is up; or wake early.

        Args:
            channels: The channels whose answers are missing.
            seconds: The longest sleep; for ever, if None.
            enough: The number of answers that ends the sleep. An answer whose result a Ray call
                returns ends it at once, and so does a death.

        Returns:
            The seconds that it took.
        """
        begin = _clock.now()
        boxes = [channel.mailbox for channel in channels]
        span = self._span_of(len(boxes), seconds)
        if not (span and _core.Mailbox.watch(boxes, enough, span)):
            self._sleep(boxes, seconds, enough)
        took = self._waits[len(boxes)] = _clock.now() - begin
        return took

    def _span_of(self, count: int, seconds: float | None) -> float:
        """Return the seconds for which to poll ``count`` mailboxes before this process sleeps.

        If the last answers took longer, polling would take processors from the workers.
        """
        if count == 0 or self._waits.get(count, 0.0) > _SOON:
            return 0.0
        return _WATCH if seconds is None or seconds > _WATCH else seconds

    def answers_of(
        self, channels: list[DriverChannel], layout: Layout
    ) -> _core.WorkerAnswers | None:
        """Return what posts commands to ``channels`` and reads their answers in one step.

        Args:
            channels: The channels.
            layout: The layout of the weights that they answer. If it has no mean, this is None.
        """
        try:
            check_flat_weights(layout, "")
        except TypeError:
            return None
        boxes = [channel.mailbox for channel in channels]
        segments = [channel.peer_segments for channel in channels]
        return _core.WorkerAnswers(boxes, segments, layout.core, layout.digest.encode())

    def post_at_once(
        self,
        answers: _core.WorkerAnswers,
        channels: list[DriverChannel],
        commands: Sequence[Message],
    ) -> list[int] | None:
        """Post a command to each of ``channels`` in one step, and wake their workers.

        If an exception comes, `_core.WorkerAnswers.posts` tells whether they were posted.

        Args:
            answers: What `answers_of` has returned for these channels.
            channels: The channels.
            commands: The command for each.

        Returns:
            The positions of the channels whose command needs a Ray call: see
            `DriverChannel.serve`. None, and nothing is posted, if one of them takes more than that.
        """
        if failpoints.hook is not None:  # there are no such points in C++
            return None
        each = [*zip(channels, commands, strict=True)]
        for channel, command in each:
            if not channel.may_be_posted(command.extents):
                return None
        answers.note_read()
        calls = [channel.expect(answers, command.extents) for channel, command in each]
        return answers.post(commands, calls)

    def mean_of(
        self,
        answers: _core.WorkerAnswers,
        out: NDArray[np.uint8],
        weights: list[float],
        seconds: float,
        *,
        takes_nonfinite: bool,
    ) -> tuple[float, float] | None:
        """Wait for the answers to `post_at_once`, and write the mean of their weights to ``out``.

        Args:
            answers: The answers.
            out: A packed buffer of their layout.
            weights: One for each worker.
            seconds: The longest wait.
            takes_nonfinite: Whether a mean with NaN or infinity is one, too.

        Returns:
            The seconds of the wait and of the average. None if there is no such mean: an answer is
            anything else, a worker has died, or the time is up. Then no answer is read.
        """
        count = len(weights)
        span, bell, poll = self._span_of(count, seconds), self._doorbell, self._poll.fileno()
        found = answers.mean(out, weights, takes_nonfinite, span, seconds, bell, poll)
        if found is not None:
            self._waits[count] = found[0]
        return found

    def are_done(self, answers: _core.WorkerAnswers, count: int, seconds: float) -> bool:
        """Wait until workers have answered None; return whether all have, and nothing else.

        Args:
            answers: The answers to `post_at_once`.
            count: Their number.
            seconds: The longest wait.
        """
        span, bell, poll = self._span_of(count, seconds), self._doorbell, self._poll.fileno()
        waited = answers.values(_NOTHING, span, seconds, bell, poll)
        if waited is not None:
            self._waits[count] = waited
        return waited is not None

    def _sleep(self, boxes: list[_core.Mailbox], seconds: float | None, enough: int) -> None:
        self._doorbell.arm(enough)
        failpoints.reach("waiting")
        for box in boxes:
            if box.is_answered:  # perhaps before the bell was armed
                return
        self._receive(seconds)

    def poll(self) -> None:
        """Note which workers have died, without waiting: `wait` may find its answers without it."""
        self._receive(0.0)

    def _receive(self, seconds: float | None) -> None:
        for descriptor, _ in self._poll.poll(seconds):
            if descriptor == self._bell:
                self._doorbell.hear()
                continue
            channel = self._channels[descriptor]
            channel.receive()
            if channel.is_closed:
                self._drop(channel)

    def repeated_calls(self, channels: Sequence[DriverChannel]) -> _core.RepeatedCalls:
        """Return calls that the workers at the ends of ``channels`` may repeat: none so far."""
        boxes = [channel.mailbox for channel in channels]
        return _core.RepeatedCalls(boxes, [channel.peer_segments for channel in channels])

    def run_repeated(
        self, calls: _core.RepeatedCalls, number: int, seconds: float, seen: list[float]
    ) -> Any:
        """Make ``calls`` until something else is to be done; see `_core.RepeatedCalls.run`."""
        if failpoints.hook is not None:  # there are no such points in C++
            return 0, 0, 0.0, seen, []
        ended = calls.run(number, seconds, self._doorbell, self._poll.fileno(), seen)
        self.poll()
        return ended

    wake = staticmethod(_core.Mailbox.wake)
    """Wake the workers that sleep at mailboxes, after `DriverChannel.post` with a list of them."""

    def ring(self) -> None:
        """End `wait`, from any thread."""
        self._doorbell.ring()

    def give_up(self, channel: DriverChannel) -> None:
        """Post nothing to ``channel`` any more; close it once its worker holds none of `segments`.

        Until then the channel stays open, since its counts protect segments that the worker may
        still read. The worker drops its own end when it attaches anew.
        """
        channel.is_given_up = True
        channel.withdraw()
        self._drop_given_up()

    def _drop_given_up(self) -> None:
        for channel in [*self._channels.values()]:
            if channel.is_given_up and not any(map(channel.is_holding, range(_MOST_SEGMENTS))):
                self._drop(channel)

    def _drop(self, channel: DriverChannel) -> None:
        """Close the channel of a worker that is dead, or no longer reads any segment."""
        descriptor = next((d for d, known in self._channels.items() if known is channel), None)
        if descriptor is not None:
            del self._channels[descriptor]
            if os.getpid() == self._process:  # a forked process shares the epoll with its parent
                self._poll.unregister(descriptor)
        channel.close()

    def close(self) -> None:
        """Close everything, and release all segments; views of them stay valid."""
        self._listener.close()
        for channel in [*self._channels.values(), *self._met.all()]:
            self._drop(channel)
            channel.forget_segments()
        self.segments.clear()
        self._poll.close()


def _unpickled(body: bytes, buffers: Sequence[Any]) -> tuple[Any, str]:
    """Return the value of a message, and why it cannot be unpickled: nothing, if it can."""
    try:
        return pickle.loads(body, buffers=buffers), ""
    except Exception as error:
        return None, reason_in_a_line(error)


class _Connections:
    """The workers that are expected, and those that have connected; a thread greets them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channels: dict[bytes, DriverChannel | None] = {}  # by token

    def expect(self, token: bytes) -> None:
        """Expect a worker with ``token``."""
        self._channels[token] = None

    def take(self, token: bytes) -> DriverChannel | None:
        """Return the channel to a worker, if it has connected; expect it no longer."""
        with self._lock:
            return self._channels.pop(token, None)

    def all(self) -> list[DriverChannel]:
        """Return the channels that nobody has taken."""
        return [channel for channel in self._channels.values() if channel is not None]

    def shake_hands(self, pending: PendingConnection) -> Iterator[int]:
        """Make the channel to a worker once it has sent its token and its mailbox; welcome it."""
        connection = pending.connection
        try:
            check_user(connection)
            while (received := receive_packet(connection)) is None:
                yield select.POLLIN
        except ChannelError as error:
            raise RefusedError(str(error)) from None
        packet, descriptors = received
        try:
            token, nonce = packet[1 : 1 + _TOKEN], packet[1 + _TOKEN :]
            if packet[:1] != b"H" or len(descriptors.numbers) != 1:
                raise RefusedError("closed before a hello" if not packet else "no hello")
            channel = DriverChannel(connection, _core.Mailbox.open(descriptors.numbers[0], nonce))
        except (OSError, ChannelError, ValueError, MemoryError) as error:
            raise RefusedError(f"{type(error).__name__}: {error}") from None
        finally:
            descriptors.close()
        with self._lock:
            is_expected = self._channels.get(token, channel) is None
            if is_expected:
                self._channels[token] = channel
        connection.send(WELCOME if is_expected else REFUSAL)
        if not is_expected:
            raise RefusedError("no such worker is expected")


def _is_held(channels: Mapping[int, DriverChannel], index: int) -> bool:
    """Whether a worker holds a view of the driver's segment ``index``."""
    return bool([True for channel in channels.values() if channel.mailbox.holds(True, index)])
