"""A link: messages between two processes on different nodes, in order and exactly once.

A message goes over a socket, which takes a fraction of the time of a call through Ray. Without a
socket, and once it has ended, messages go through Ray. Each has a number, so neither a message that
came both ways nor the order in which Ray makes calls matters. The sender keeps what it has sent
over the socket until the receiver confirms it. If the socket ends, or a message is not confirmed in
time, it sends that again through Ray, and all others until there is another socket.

A frame is the number of a message and the length of its pickle (8 bytes each), then the pickle.
Without a pickle, it confirms all messages up to that number. `Streams` makes the socket: both ends
know each other's key, and use Ray's TLS.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import select
import socket
import ssl
import struct
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from flatweights.ray import _clock
from flatweights.ray.support._errors import reason_in_a_line
from flatweights.ray.support._listener import shut

_FRAME = struct.Struct("<QQ")
_BLOCK = 1 << 18  # bytes that one call reads at most
_PATIENCE = 5.0  # seconds until a message is confirmed
_TICK = 1.0  # seconds after which that is checked again

_log = logging.getLogger("flatweights")


class _Unconfirmed(NamedTuple):
    number: int
    message: Any
    at: float


class LinkSocket:
    """The socket of a link.

    One thread, the reader, waits for it and closes it. It waits without the link's lock, which all
    other methods need.
    """

    def __init__(self, connection: socket.socket) -> None:
        """Take a connection.

        Raises:
            OSError: If there is no free descriptor.
        """
        connection.setblocking(False)
        self._connection = connection
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._wake, select.POLLIN)

    def wait(self, seconds: float, *, writes: bool) -> None:
        """Wait until something can be read, or sent if it ``writes``, or `wake` is called."""
        self._poll.register(self._connection, select.POLLIN | (select.POLLOUT if writes else 0))
        self._poll.poll(int(1000 * seconds))

    def wake(self) -> None:
        """End the reader's wait."""
        os.eventfd_write(self._wake, 1)

    def read(self, received: bytearray) -> None:
        """Append all that has arrived.

        Raises:
            OSError: If the socket has ended.
        """
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        connection = self._connection
        while True:
            try:
                block = connection.recv(_BLOCK)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return
            if not block:
                raise ConnectionError("the peer has closed it")
            received += block
            if len(block) < _BLOCK and not isinstance(connection, ssl.SSLSocket):
                return

    def write(self, data: bytearray) -> int:
        """Send as much as the socket takes; return how many bytes that were.

        Raises:
            OSError: If the socket has ended.
        """
        try:
            return self._connection.send(data)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return 0

    def shut(self) -> None:
        """End the socket, for the peer and for the reader."""
        shut(self._connection)

    def close(self) -> None:
        """Close it; nobody may use it any more."""
        shut(self._connection)
        self._connection.close()
        os.close(self._wake)


class LinkPlatform:
    """What links use of threads and sockets; `tests/sim` has another one."""

    def lock(self) -> Any:
        """Return a lock that the thread that has it may take again."""
        return threading.RLock()

    def start_thread(self, run: Callable[..., object], args: tuple[Any, ...], name: str) -> Any:
        """Call ``run`` in a thread of its own, which does not keep the process alive.

        Returns:
            The thread: its `join` waits until it has ended.

        Raises:
            RuntimeError: If there are too many threads.
        """
        thread = threading.Thread(target=run, args=args, daemon=True, name=name)
        thread.start()
        return thread

    def link_socket(self, connection: Any) -> LinkSocket:
        """Return the socket of a link over a connection."""
        return LinkSocket(connection)


class Link:
    """One end."""

    def __init__(
        self,
        take: Callable[[Any], object],
        by_ray: Callable[[int, Any], object],
        lost: Callable[[str], object],
        ended: Callable[[], object] = lambda: None,
        platform: LinkPlatform = LinkPlatform(),  # noqa: B008 - it has no state
    ) -> None:
        """Begin without a socket.

        Args:
            take: Called with each message of the peer, in their order, by any thread; it must not
                wait.
            by_ray: Has Ray call `receive` of the peer.
            lost: Called with the reason, if a message cannot be sent again.
            ended: Called when the socket has ended, unless there is another one.
            platform: What it uses of threads and sockets.
        """
        self._take, self._by_ray, self._lost, self._ended = take, by_ray, lost, ended
        self._platform = platform
        self._server: threading.Thread | None = None
        self._is_replaced = False  # whether the peer has made another socket
        self._sending = platform.lock()  # for all that follows
        self._socket: LinkSocket | None = None
        self._sent = 0  # the number of the last message
        self._unconfirmed: deque[_Unconfirmed] = deque()
        self._unsent = bytearray()
        self._taking = platform.lock()  # for all that follows
        self._taken = 0  # the number of the last message of the peer
        self._early: dict[int, Any] = {}  # those that came before others

    @property
    def has_socket(self) -> bool:
        """Whether messages go over a socket."""
        return self._socket is not None

    def attach(self, connection: Any) -> None:
        """Send messages over a connection to the peer from now on; read from it in a thread.

        An earlier connection ends: the peer has made another one.
        """
        if self._server is not None:
            self._is_replaced = True
            self.close()
            self._server.join()
            self._is_replaced, self._server = False, None
        own = self._platform.link_socket(connection)
        with self._sending:
            self._socket = own
            try:
                name = "flatweights-link"
                self._server = self._platform.start_thread(self._serve, (own,), name)
            except RuntimeError:  # there are too many threads
                self._socket = None
                own.close()
                raise

    def send(self, message: Any, *, by_ray: bool = False) -> None:
        """Send a message; through Ray, if it has references to objects of Ray.

        Raises:
            Exception: If it cannot be pickled, or Ray does not take it. It counts as not sent.
        """
        with self._sending:
            number = self._sent + 1
            if by_ray or self._socket is None:
                self._by_ray(number, message)
            else:
                payload = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
                self._unconfirmed.append(_Unconfirmed(number, message, _clock.now()))
                self._write(_FRAME.pack(number, len(payload)) + payload)
            self._sent = number

    def receive(self, number: int, message: Any) -> None:
        """Take a message of the peer, which came over the socket or through Ray."""
        with self._taking:
            if number <= self._taken:
                return
            self._early[number] = message
            while self._taken + 1 in self._early:
                self._taken += 1
                try:
                    self._take(self._early.pop(self._taken))
                except Exception:
                    _log.exception("a message from another node has failed")

    def close(self) -> None:
        """End the socket."""
        with self._sending:
            if self._socket is not None:
                self._socket.shut()

    def _serve(self, own: LinkSocket) -> None:
        """Read and write until the socket ends, or a message is not confirmed in time."""
        received = bytearray()
        try:
            while True:
                with self._sending:
                    writes = bool(self._unsent)
                own.wait(_TICK, writes=writes)
                with self._sending:
                    self._write(b"")
                    own.read(received)
                self._take_frames(received)
                with self._sending:
                    self._check_confirmed()
        except Exception as error:
            self._end(own, reason_in_a_line(error))

    def _take_frames(self, received: bytearray) -> None:
        """Take the messages and confirmations that have arrived as a whole."""
        begin = confirmed = 0
        while len(received) - begin >= _FRAME.size:
            number, nbytes = _FRAME.unpack_from(received, begin)
            end = begin + _FRAME.size + nbytes
            if nbytes == 0:
                self._confirm(number)
            elif end > len(received):
                break
            else:
                self.receive(number, pickle.loads(received[begin + _FRAME.size : end]))
                confirmed = number
            begin = end
        del received[:begin]
        if confirmed:
            with self._sending:
                self._write(_FRAME.pack(confirmed, 0))

    def _check_confirmed(self) -> None:
        """Raise if a message has not been confirmed in time; the lock is held."""
        if self._unconfirmed and self._unconfirmed[0].at + _PATIENCE < _clock.now():
            raise TimeoutError(f"a message was not confirmed in {_PATIENCE:g} s")

    def _confirm(self, number: int) -> None:
        with self._sending:
            while self._unconfirmed and self._unconfirmed[0].number <= number:
                self._unconfirmed.popleft()

    def _write(self, data: bytes) -> None:
        """Send, after what is still to be sent, as much as the socket takes; the lock is held."""
        had_to_wait = bool(self._unsent)
        self._unsent += data
        if self._unsent and self._socket is not None:
            try:
                del self._unsent[: self._socket.write(self._unsent)]
            except OSError:
                return  # the reader finds out
            if self._unsent and not had_to_wait:
                self._socket.wake()

    def _end(self, own: LinkSocket, why: str) -> None:
        """Close the socket, and send again what was not confirmed."""
        with self._sending:
            self._socket = None
            own.close()
            unconfirmed = [*self._unconfirmed]
            self._unconfirmed.clear()
            self._unsent.clear()
            _log.debug("a link to another node has ended (%s): messages go through Ray", why)
            try:
                for number, message, _ in unconfirmed:
                    self._by_ray(number, message)
            except Exception as error:  # Ray's store is full
                self._lost(f"a message was not sent: {reason_in_a_line(error)}")
        if not self._is_replaced:
            self._ended()
