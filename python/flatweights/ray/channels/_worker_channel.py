"""The worker's end of channels: it attaches to drivers, and serves their commands.

A worker serves inside a call of Ray's, in the actor's own main thread: `serve` takes the
command in the mailbox, runs it, answers, and sleeps on the mailbox for the next one. It returns
`LINGER` seconds after its last answer, and after `STAY` seconds in any case, so that other calls
on the actor's handle get their turn. For the next command, the driver then makes another call.
"""

import functools
import pickle
import socket
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from flatweights import _core
from flatweights._layout import Layout
from flatweights._weights import FlatWeights
from flatweights.ray import _clock
from flatweights.ray.channels._end import ChannelEnd, ChannelError, check_user, is_shortage
from flatweights.ray.channels._message import Message, join_message, make_message
from flatweights.ray.channels._protocol import (
    BROKEN,
    BY_CALL,
    CALL,
    NUMBER,
    REFUSAL,
    REFUSED,
    VALUE,
    WEIGHTS,
    WELCOME,
)
from flatweights.ray.channels._segments import Segments
from flatweights.ray.support import _failpoints as failpoints
from flatweights.ray.support._listener import closed_in_forks

LINGER = 0.01
"""Seconds for which a worker waits for the next command."""
STAY = 0.2
"""Seconds after which `serve` returns even if commands keep coming.

A Ray call costs some 2 ms of processor time in driver and worker together: with 50 ms, an eighth of
the time of small rounds with four workers on two cores. A raw call on the actor's handle waits at
most this long, plus the time of the running command.
"""

PATIENCE = 5.0
"""Seconds in which a driver has to accept a connection."""

_MOST_SEGMENTS = 4
_PAUSE = 0.001  # seconds until the next attempt to connect, at first; twice as long each time


class NoChannel(NamedTuple):
    """The reason for which a worker has made no channel.

    Attributes:
        reason: The reason.
        may_pass: Whether another try may succeed later.
        node: The node of the worker, if it is not the driver's.
    """

    reason: str
    may_pass: bool
    node: str = ""


class WorkerChannel(ChannelEnd):
    """This worker's end of the channel to one driver."""

    _doorbell: _core.Doorbell | None = None
    _last_nbytes = 0  # of the last result
    _is_copy_left = False  # whether the pool still has the memory it was copied from
    _layout: Layout | None = None  # of the last weights that were sent as a VALUE
    _digest = b""  # of the layout
    _answered = 0.0  # the time of the last answer
    _is_broken = False  # whether commands cannot be read any more

    def __init__(self, address: bytes, token: bytes, patience: float = PATIENCE) -> None:
        """Connect to a driver and hand over a mailbox.

        Args:
            address: The address of the driver's socket.
            token: The token by which the driver recognises this worker.
            patience: Seconds in which the driver has to accept it.

        Raises:
            OSError: If there is no such socket here, or no memory.
            TimeoutError: If the driver does not accept the connection in time.
            ChannelError: If the driver belongs to another user, or does not expect this worker.
        """
        mailbox = _core.Mailbox()
        connection = _connect(address, b"H" + token + mailbox.nonce, mailbox.descriptor, patience)
        super().__init__(connection, mailbox, is_worker=True)
        self.mailbox.close_descriptor()
        self._segments = Segments(_MOST_SEGMENTS, functools.partial(self.mailbox.holds, False))

    def _take(self, kind: bytes, body: bytes, descriptors: _core.Descriptors) -> None:
        if kind == b"D" and len(descriptors.numbers) == 2 and self._doorbell is None:
            memory, bell = descriptors.numbers
            self._doorbell = _core.Doorbell.open(memory, bell, body)
        else:
            super()._take(kind, body, descriptors)

    def serve(self, worker: Any, call: int) -> Any:
        """Run commands on ``worker`` until none comes; return a result that goes through Ray.

        Args:
            worker: The object whose methods are called.
            call: The number of this Ray call.

        Returns:
            The result, after which the call has ended; None if no result goes through Ray.
        """
        mailbox = self.mailbox
        now = _clock.now()
        end = now + STAY
        if failpoints.hook is not None:
            failpoints.reach("called")
        mailbox.enter(call)
        while mailbox.wait(self._answered + LINGER - now, call):
            if failpoints.hook is not None:
                failpoints.reach("taken")
            ends = 0 if _clock.now() < end else call
            box: list[Any] = []
            answer = None
            try:
                answer = self._run(worker, box)
            finally:
                if answer is None:  # this Ray call returns the result, or raises the error
                    mailbox.answer_with(join_message(BY_CALL, NUMBER.pack(call)), call)
                    if self._doorbell is not None:  # even if it waits for more answers
                        self._doorbell.ring()
            if answer is None:
                return box.pop()
            if self._is_broken:
                mailbox.answer_with(answer, call)
                self.close()  # this wakes the driver even without a doorbell
                return None
            mailbox.answer_with(answer, ends)
            if failpoints.hook is not None:
                failpoints.reach("answered")
            if self._doorbell is not None:
                self._doorbell.count_down()
            if failpoints.hook is not None:
                failpoints.reach("rung")
            self._answered = now = _clock.now()
            if ends:
                return None
        if failpoints.hook is not None:
            failpoints.reach("waited")
        return None

    def _run(self, worker: Any, box: list[Any]) -> bytes | None:
        """Run the command in the mailbox; return the answer, None if the result is in ``box``."""
        try:
            kind, buffers, body = self._read_first() if self._doorbell is None else self.read()
        except (ChannelError, OSError, ValueError, MemoryError) as error:
            self._is_broken = True
            return join_message(BROKEN, f"{type(error).__name__}: {error}".encode())
        try:
            method, args, kwargs = _command_of(kind, buffers, body)
        except Exception as error:
            return join_message(REFUSED, f"{type(error).__name__}: {error}".encode())
        finally:
            del buffers
        if failpoints.hook is not None:
            failpoints.reach("read")
        if self._is_copy_left:  # later results are made in segments, and never reuse that memory
            self._is_copy_left = False
            _core.clear_pool()
        if self._last_nbytes:
            self._segments.offer(self._last_nbytes, most_taken=2)
        try:
            box.append(getattr(worker, method)(*args, **kwargs))
        finally:
            _core.withdraw_offer()
            # The driver must not see the answer while views of its segments are alive.
            del args, kwargs, body
        if failpoints.hook is not None:
            failpoints.reach("run")
        message = self._weights_message(box)
        layout = self._layout
        if message is None:
            layout = box[0].layout if type(box[0]) is FlatWeights else layout
            message = make_message(VALUE, box, self._segments, frozen=False)
        if message is None:
            return None
        answer, extents = message
        try:
            self.share(self._segments, extents)
        except OSError:  # the driver is gone, or its socket is full
            box.append(self._value_of(message))
            return None
        if layout is not None and layout is not self._layout:
            self._layout, self._digest = layout, layout.digest.encode()
        if extents:
            nbytes = 0
            for extent in extents:
                nbytes = extent.nbytes if extent.nbytes > nbytes else nbytes
            self._is_copy_left = nbytes > self._last_nbytes
            self._last_nbytes = nbytes
        if failpoints.hook is not None:
            failpoints.reach("gathered")
        return answer

    def _read_first(self) -> tuple[int, list[Any], bytes]:
        """Return the first command, as `read` does, once the driver's doorbell has come.

        Raises:
            ChannelError: Also if the driver has not sent the doorbell before the command.
        """
        self.receive()
        command = self.read()
        if self._doorbell is None:  # checked after `read`, so that no segment stays held
            raise self._missing("expected a doorbell, got none")
        return command

    def _value_of(self, message: Message) -> Any:
        """Return the value of an answer that cannot be sent, in memory of its own."""
        header = len(join_message(VALUE, b"", message.extents))
        body = message.content[header:]
        copies = [*map(self._segments.copy_of, message.extents)]
        if message.content.startswith(join_message(WEIGHTS, self._digest, message.extents)):
            assert self._layout is not None
            return FlatWeights.wrap(copies[0], self._layout)
        return pickle.loads(body, buffers=copies)

    def _weights_message(self, box: list[Any]) -> Message | None:
        """Return a message with weights that lie in a segment, in a layout that the driver knows.

        Returns:
            None for other results, or if no segment is free.
        """
        weights = box[0]
        if type(weights) is not FlatWeights or weights.layout is not self._layout:
            return None
        extent = self._segments.find(weights.buffer)
        if extent is None:
            return None
        box.clear()
        del weights
        if self._segments.is_taken(extent):  # an array over them is alive, and may be written to
            copied = self._segments.copy_in([extent])
            if copied is None:
                box.append(FlatWeights.wrap(self._segments.copy_of(extent), self._layout))
                return None
            (extent,) = copied
        return Message(join_message(WEIGHTS, self._digest, [extent]), [extent])


def _command_of(kind: int, buffers: list[Any], body: bytes) -> tuple[str, Any, Any]:
    """Return the method that a command calls, its arguments and its keyword arguments."""
    if kind == CALL:
        return "run_plain", (body, [*buffers]), {}
    command: tuple[str, Any, Any] = pickle.loads(body, buffers=buffers)
    return command


def _connect(address: bytes, hello: bytes, descriptor: int, patience: float) -> socket.socket:
    """Return a connection to a driver that has accepted the ``hello``.

    A driver closes connections while it has no free descriptors, or if too many arrive at once, and
    its queue fills up while it is stopped. So this tries again.
    """
    end, pause = _clock.now() + patience, _PAUSE
    while (left := end - _clock.now()) > 0:
        connection = closed_in_forks(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        try:
            connection.settimeout(left)
            connection.connect(address)
            check_user(connection)
            socket.send_fds(connection, [hello], [descriptor])
            answer = connection.recv(1)
            if answer == WELCOME:
                return connection
            if answer == REFUSAL:
                raise ChannelError("the driver does not expect this worker any more")
        except (BlockingIOError, BrokenPipeError, ConnectionResetError, TimeoutError):
            pass
        except BaseException:
            connection.close()
            raise
        connection.close()
        _clock.sleep(pause)
        pause *= 2
    raise TimeoutError(f"the driver has not taken the connection in {patience:g} s")


class WorkerChannels(dict[bytes, WorkerChannel]):
    """The channels of one worker, by token: one for each group that it belongs to."""

    def __init__(self, connect: Callable[[bytes, bytes], WorkerChannel] = WorkerChannel) -> None:
        """Begin without channels; ``connect`` makes one, as the constructor of `WorkerChannel`."""
        super().__init__()
        self._connect = connect

    def attach(self, address: bytes, token: bytes) -> bytes | NoChannel:
        """Make a channel; return the nonce of its mailbox, or the reason for which there is none.

        Args:
            address: The address of the driver's socket.
            token: The token of the channel.
        """
        for known, channel in list(self.items()):
            channel.receive()
            if channel.is_closed:
                del self[known]
        if threading.current_thread() is not threading.main_thread():
            return NoChannel("the actor is async or has max_concurrency above 1", may_pass=False)
        try:
            made = self._connect(address, token)
        except (OSError, ChannelError, ValueError, MemoryError) as error:
            return NoChannel(f"{type(error).__name__}: {error}", is_shortage(error))
        self[token] = made
        return made.mailbox.nonce
