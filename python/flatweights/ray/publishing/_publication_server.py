"""A server of a publication: readers of this node map its memory, which a socket hands out.

Readers connect to an abstract Unix socket, and get a number and the descriptors of both files. The
connection stays open. When it ends, the reader is gone, and its hold is cleared. A thread does
this, so `publish` makes no system call.

One number is kept for the reader that reads for others. It asks for it on its connection, and gives
back the one that it has got, if any was left. A publisher that takes over needs no number.
"""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import struct
import threading
from collections.abc import Callable
from typing import NamedTuple

from flatweights import _core
from flatweights.ray import _clock
from flatweights.ray.channels._end import ChannelError, check_user, receive_packet
from flatweights.ray.support._listener import closed_in_forks, milliseconds

_READER = struct.Struct("<cI")  # a kind, the number of the reader
_WELCOME, _FULL = b"R", b"F"
_TAKEN_OVER, _FOR_OTHERS = b"T", b"O"  # what the other side says
_PROXY_READER = _core.PUBLICATION_READERS - 1  # the number of the one that reads for others
_TICK = 1.0  # seconds
_PAUSE = 0.01  # seconds between two attempts to connect to a socket whose queue is full


class PublicationAddress(NamedTuple):
    """The address of a publication server for readers of its node.

    Attributes:
        socket: The address of its socket.
        control: The nonce of the file of the publication.
        data: The nonce of the file of its slots.
        nbytes: The bytes of the weights.
    """

    socket: bytes
    control: bytes
    data: bytes
    nbytes: int


class FullError(RuntimeError):
    """A publication server has its largest number of readers."""


class PublicationServer:
    """A publication, and its readers, which a thread lets in from `start` on.

    Once it has ended, nothing of its memory stays, except what readers map.

    Attributes:
        publication: The publication.
        address: Its address for readers.
        is_closed: Whether it admits no more readers.
        is_superseded: Whether that is because another publisher has taken over.
    """

    def __init__(self, nbytes: int, tick: Callable[[], None] = lambda: None) -> None:
        """Allocate memory for weights of ``nbytes``; the thread calls ``tick`` every second.

        Raises:
            OSError: If memory is short, or this system has no such files.
        """
        self.publication = _core.Publication(nbytes)
        self.is_closed = self.is_superseded = False
        self._tick = tick
        # By descriptor; without a number, if all were taken.
        self._readers: dict[int, tuple[socket.socket, int | None]] = {}
        self._free = list(range(_PROXY_READER))
        self._idle_since = _clock.now()
        self._listener = closed_in_forks(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        self._woken, self._waker = map(closed_in_forks, socket.socketpair())
        try:
            address = b"\0flatweights-" + secrets.token_hex(16).encode()
            self._listener.bind(address)
            self._listener.listen(_core.PUBLICATION_READERS)
            self._listener.setblocking(False)
        except BaseException:
            self._listener.close()
            raise
        _, control = self.publication.control
        _, data = self.publication.data
        self.address = PublicationAddress(address, control, data, nbytes)
        self._thread = threading.Thread(
            target=self._run, name="flatweights-publication", daemon=True
        )
        self._has_begun = False  # whether the thread runs, which then ends everything
        self._beginning = threading.RLock()  # a signal handler may call `close` within it

    def start(self) -> None:
        """Begin to admit readers.

        The thread keeps everything alive. So whoever made this object sees to it first that `close`
        will be called, even if this call is interrupted.
        """
        self._thread.start()

    @property
    def idle(self) -> float:
        """The seconds since the last reader left; 0 if there is a reader."""
        return 0.0 if self._readers else _clock.now() - self._idle_since

    def close(self) -> None:
        """Admit no more readers; the present ones look for another server."""
        self.is_closed = True
        with self._beginning:
            has_begun = self._has_begun
        self._waker.close()
        if not has_begun:  # the thread, which an interrupt may have left to begin later, ends
            self._end()
        elif self._thread is not threading.current_thread():
            self._thread.join()

    def supersede(self) -> None:
        """Admit no more readers, since another publisher has taken over; the thread ends soon."""
        self.is_superseded = self.is_closed = True

    def _run(self) -> None:
        with self._beginning:
            if self.is_closed:
                return
            self._has_begun = True
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        ticked = _clock.now()
        try:
            while not self.is_closed:
                for descriptor, _ in poll.poll(int(1000 * _TICK)):
                    if descriptor in self._readers:
                        self._on_event(descriptor, poll)
                    elif descriptor == self._listener.fileno():
                        self._accept(poll)
                if _clock.now() - ticked >= _TICK:
                    ticked = _clock.now()
                    self._tick()
        finally:
            self.is_closed = True
            self._end()

    def _end(self) -> None:
        self._woken.close()
        self._listener.close()
        for connection, _ in self._readers.values():
            connection.close()
        self.publication.close()

    def _accept(self, poll: select.poll) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if not isinstance(error, (BlockingIOError, ConnectionError)):
                _clock.sleep(_PAUSE)  # no descriptors are left
            return
        try:
            closed_in_forks(connection).setblocking(False)
            check_user(connection)
            reader = self._free[0] if self._free else None
            if reader is None:
                connection.send(_READER.pack(_FULL, _PROXY_READER))
            else:
                self._welcome(connection, reader)
        except (OSError, ChannelError):
            connection.close()
            return
        del self._free[:1]
        self._readers[connection.fileno()] = connection, reader
        poll.register(connection, select.POLLIN)

    def _welcome(self, connection: socket.socket, reader: int) -> None:
        control, _ = self.publication.control
        data, _ = self.publication.data
        socket.send_fds(connection, [_READER.pack(_WELCOME, reader)], [control, data])

    def _on_event(self, descriptor: int, poll: select.poll) -> None:
        connection, reader = self._readers[descriptor]
        try:
            word = connection.recv(1)
        except BlockingIOError:
            return
        except OSError:
            word = b""
        if word == _TAKEN_OVER:
            self.supersede()
            return
        if word == _FOR_OTHERS and all(one != _PROXY_READER for _, one in self._readers.values()):
            with contextlib.suppress(OSError):  # it has ended, which is the next event
                self._welcome(connection, _PROXY_READER)
                self._readers[descriptor] = connection, _PROXY_READER
                self._free += [] if reader is None else [reader]
            return
        # Once the connection has ended, the reader reads no more.
        poll.unregister(descriptor)
        del self._readers[descriptor]
        if reader is not None:
            self.publication.clear(reader)
            if reader != _PROXY_READER:
                self._free.append(reader)
        self._idle_since = _clock.now()
        connection.close()


class PublicationConnection:
    """A reader's connection to a publication server.

    Attributes:
        connection: The socket; readable once the server has closed.
        reader: The reader.
    """

    def __init__(
        self, address: PublicationAddress, end: float, *, for_others: bool = False
    ) -> None:
        """Connect to a publication server of this node.

        Args:
            address: The server.
            end: The time at which to give up, by `time.monotonic`.
            for_others: Whether this is the reader for which the server keeps a number.

        Raises:
            OSError: If the server has closed, is on another machine, or does not answer in time.
            FullError: If it has too many readers.
            ChannelError: If it belongs to another user.
            ValueError: If the files that it hands out are not those of ``address``.
        """
        self.connection = closed_in_forks(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        descriptors = _core.Descriptors()
        try:
            _connect(self.connection, address.socket, end)
            packet, descriptors = self._receive(end)
            if packet and for_others:
                descriptors.close()
                self.connection.send(_FOR_OTHERS)
                packet, descriptors = self._receive(end)
            if len(packet) != _READER.size:
                raise ConnectionResetError("the server has closed")
            kind, number = _READER.unpack(packet)
            if kind != _WELCOME or len(descriptors.numbers) != 2:
                raise FullError(f"the server of this node has {number} readers, and takes no more")
            control, data = descriptors.numbers
            self.reader = _core.PublicationReader(
                control, address.control, data, address.data, address.nbytes, number
            )
        except BaseException:
            self.connection.close()
            raise
        finally:
            descriptors.close()

    def _receive(self, end: float) -> tuple[bytes, _core.Descriptors]:
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        while (received := receive_packet(self.connection)) is None:
            if not poll.poll(milliseconds(end)):
                raise TimeoutError("the server does not answer in time")
        return received

    @property
    def is_over(self) -> bool:
        """Whether the server has closed, or its process has ended."""
        try:
            self.connection.recv(1)
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    def close(self) -> None:
        """Disconnect; views of the weights that were read last may change from then on."""
        self.reader.close()  # before another reader gets its number, whose hold it would release
        self.connection.close()


def take_over(address: PublicationAddress, end: float) -> None:
    """Tell a publication server that it is superseded, and wait until it has closed.

    Raises:
        OSError: If it has closed already, or does not answer until ``end``.
        ChannelError: If it belongs to another user.
    """
    with closed_in_forks(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as connection:
        _connect(connection, address.socket, end)
        connection.send(_TAKEN_OVER)
        connection.settimeout(max(1e-3, end - _clock.now()))
        while connection.recv(_READER.size):
            pass


def _connect(connection: socket.socket, address: bytes, end: float) -> None:
    connection.setblocking(False)
    while True:
        try:
            connection.connect(address)
            break
        except BlockingIOError:  # its queue is full
            if _clock.now() >= end:
                raise TimeoutError("the server takes no connections") from None
            _clock.sleep(_PAUSE)
    check_user(connection)
