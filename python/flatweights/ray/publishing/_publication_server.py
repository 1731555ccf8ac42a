"""A server of a publication: readers of this node map its memory, which a socket hands out.

Readers connect to an abstract Unix socket, and get a number and the descriptors of both files. The
connection stays open. When it ends, the reader is gone, and its hold is cleared. A thread does
this, so `publish` makes no system call.
"""

from __future__ import annotations

import contextlib
import os
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
from flatweights.ray.support._listener import kept

_READER = struct.Struct("<cI")  # a kind, the number of the reader
_WELCOME, _FULL, _TAKEN_OVER = b"R", b"F", b"T"
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
    """A publication, and its readers.

    Once it has ended, nothing of its memory stays, except what readers map.

    Attributes:
        publication: The publication.
        address: Its address for readers.
        is_closed: Whether it admits no more readers.
    """

    def __init__(self, nbytes: int, tick: Callable[[], None] = lambda: None) -> None:
        """Allocate memory for weights of ``nbytes``; the thread calls ``tick`` every second.

        Raises:
            OSError: If memory is short, or this system has no such files.
        """
        self.publication = _core.Publication(nbytes)
        self.is_closed = False
        self._tick = tick
        self._readers: dict[int, tuple[socket.socket, int]] = {}  # by descriptor
        self._free = list(range(_core.PUBLICATION_READERS))
        self._idle_since = _clock.now()
        self._listener = kept(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        ours, self._waker = map(kept, socket.socketpair())
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
            target=self._run, args=(ours,), name="flatweights-publication", daemon=True
        )
        self._thread.start()

    @property
    def idle(self) -> float:
        """The seconds since the last reader left; 0 if there is a reader."""
        return 0.0 if self._readers else _clock.now() - self._idle_since

    def close(self) -> None:
        """Admit no more readers; the present ones look for another server."""
        self.is_closed = True
        self._waker.close()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self, waker: socket.socket) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        poll.register(waker, select.POLLIN)
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
            waker.close()
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
            kept(connection).setblocking(False)
            check_user(connection)
            if not self._free:
                connection.send(_READER.pack(_FULL, len(self._readers)))
                connection.close()
                return
            reader = self._free[0]
            control, _ = self.publication.control
            data, _ = self.publication.data
            socket.send_fds(connection, [_READER.pack(_WELCOME, reader)], [control, data])
        except (OSError, ChannelError):
            connection.close()
            return
        del self._free[0]
        self._readers[connection.fileno()] = connection, reader
        poll.register(connection, select.POLLIN)

    def _on_event(self, descriptor: int, poll: select.poll) -> None:
        connection, reader = self._readers[descriptor]
        try:
            word = connection.recv(1)
        except BlockingIOError:
            return
        except OSError:
            word = b""
        if word == _TAKEN_OVER:
            self.is_closed = True
            return
        # Once the connection has ended, the reader reads no more.
        poll.unregister(descriptor)
        self.publication.clear(reader)
        del self._readers[descriptor]
        self._free.append(reader)
        self._idle_since = _clock.now()
        connection.close()


class PublicationConnection:
    """A reader's connection to a publication server.

    Attributes:
        connection: The socket; readable once the server has closed.
        reader: The reader.
    """

    def __init__(self, address: PublicationAddress, end: float) -> None:
        """Connect to a publication server of this node.

        Args:
            address: The server.
            end: The time at which to give up, by `time.monotonic`.

        Raises:
            OSError: If the server has closed, is on another machine, or does not answer in time.
            FullError: If it has too many readers.
            ChannelError: If it belongs to another user.
            ValueError: If the files that it hands out are not those of ``address``.
        """
        self.connection = kept(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        descriptors: list[int] = []
        try:
            self._connect(address.socket, end)
            check_user(self.connection)
            self.connection.settimeout(max(1e-3, end - _clock.now()))
            packet, descriptors = receive_packet(self.connection)
            self.connection.setblocking(False)
            if len(packet) != _READER.size:
                raise ConnectionResetError("the server has closed")
            kind, number = _READER.unpack(packet)
            if kind != _WELCOME or len(descriptors) != 2:
                raise FullError(
                    f"the publisher has {number} readers on this node, and takes no more"
                )
            control, data = descriptors
            self.reader = _core.PublicationReader(
                control, address.control, data, address.data, address.nbytes, number
            )
        except BaseException:
            self.connection.close()
            raise
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _connect(self, address: bytes, end: float) -> None:
        self.connection.setblocking(False)
        while True:
            try:
                return self.connection.connect(address)
            except BlockingIOError:  # its queue is full
                if _clock.now() >= end:
                    raise TimeoutError("the server takes no connections") from None
                _clock.sleep(_PAUSE)

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

    def take_over(self, end: float) -> None:
        """Tell the server that it is superseded, and wait until it has closed."""
        with contextlib.suppress(OSError):
            self.connection.send(_TAKEN_OVER)
            self.connection.settimeout(max(1e-3, end - _clock.now()))
            self.connection.recv(1)

    def close(self) -> None:
        """Disconnect; views of the weights that were read last may change from then on."""
        self.reader.close()  # before another reader gets its number, whose hold it would release
        self.connection.close()
