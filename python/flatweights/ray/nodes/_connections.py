"""Connections: one socket to each peer, over which all nodes exchange bytes at once.

Each node sends buffers to each other node, each of them in a frame: the number of the exchange and
the length (8 bytes each), then the bytes. The receiver checks both before it reads more.

- The caller's thread serves all sockets: it reads and sends on every socket that is ready, one
  block at a time, so all are busy until the end. It also computes the next data to send.
- The first error ends the connections: all sockets are shut down, and the peers' exchanges end
  within a moment. Another thread may end them, too. Sockets are closed once no thread uses them.
"""

from __future__ import annotations

import collections
import contextlib
import select
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from flatweights.ray import _clock
from flatweights.ray.support._listener import milliseconds, shut

Buffer: TypeAlias = Any  # a contiguous object with the buffer protocol; a type since Python 3.12

_FRAME = struct.Struct("<QQ")  # number of the exchange, length of the data
_BLOCK = 1 << 20  # bytes that one call reads at most
_UNSENT = 256 << 10  # bytes that the kernel takes before it can send them


class StreamError(OSError):
    """A stream cannot be made, or broke.

    Attributes:
        peer: The place of the peer among the nodes; -1 if it is not known.
    """

    def __init__(self, peer: int, reason: str) -> None:
        """Name the peer and the reason."""
        super().__init__(reason if peer < 0 else f"peer {peer}: {reason}")
        self.peer = peer
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments of the constructor."""
        return type(self), (self.peer, self.reason)


def late(peer: int, reason: str) -> StreamError:
    """Return the error of a peer that is too late."""
    error = StreamError(peer, reason)
    error.__cause__ = TimeoutError(reason)
    return error


class NodeConnections:
    """The sockets to all peers.

    Attributes:
        me: The place of this process.
        size: The number of nodes.
        epoch: The attempt that these connections belong to, by which they differ from earlier and
            later ones.
    """

    def __init__(self, me: int, size: int, epoch: bytes) -> None:
        """Begin without sockets; see `add`."""
        self.me = me
        self.size = size
        self.epoch = epoch
        self._sockets: dict[int, socket.socket] = {}
        self._changed = threading.Condition()
        self._ended = ""  # the reason
        self._is_used = False

    @property
    def is_closed(self) -> bool:
        """Whether they are closed, or broke. They stay so."""
        return bool(self._ended)

    @property
    def missing(self) -> list[int]:
        """The places of peers to which there is no socket."""
        return [k for k in range(self.size) if k != self.me and k not in self._sockets]

    def check(self) -> None:
        """Raise `StreamError` if they are closed, or broke."""
        if self._ended:
            raise StreamError(-1, f"the connections have ended: {self._ended}")

    def add(self, place: int, connection: socket.socket) -> None:
        """Take the socket to the peer at ``place``; close it if the connections have ended."""
        with self._changed:
            if self.is_closed:
                connection.close()
            else:
                self._sockets[place] = connection
                self._changed.notify_all()

    def drop(self, place: int) -> None:
        """Close the socket to the peer at ``place``."""
        with self._changed:
            self._sockets.pop(place).close()

    def pop(self, place: int) -> socket.socket:
        """Take out the socket to the peer at ``place``: it belongs to the caller."""
        return self._sockets.pop(place)

    def wait(self, end: float | None) -> None:
        """Wait until there are sockets to all peers, at most until ``end``.

        Raises:
            StreamError: If the time is up, or the connections have ended.
        """
        timeout = None if end is None else end - _clock.now()
        with self._changed:
            self._changed.wait_for(lambda: self.is_closed or not self.missing, timeout)
            self.check()
            for place in self.missing:
                raise late(place, "it has not connected in time")

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Use the sockets: they stay open meanwhile; an error in the body ends the connections."""
        # A copy, since peers may connect meanwhile. A child process may wait for the lock for ever.
        sockets = [*self._sockets.values()]
        if not self.is_closed and any(one.fileno() < 0 for one in sockets):
            raise StreamError(-1, "the connections are those of the parent process")
        with self._changed:
            if self._is_used:
                raise RuntimeError("another thread uses these connections")
            self.check()
            self._is_used = True
        try:
            yield
        except BaseException as error:
            is_first = self._end(f"{type(error).__name__}: {error}")
            if isinstance(error, StreamError) and not is_first:
                self.check()  # another thread has ended the connections, which caused this error
            raise
        finally:
            with self._changed:
                self._is_used = False
                self._close_unused()

    def send_and_receive(
        self,
        number: int,
        sends: Mapping[int, Iterable[Buffer]],
        receives: Mapping[int, Sequence[Buffer]],
        *,
        patience: float,
        end: float | None = None,
        arrived: Callable[[int, int], Iterable[Buffer]] = lambda place, index: (),
    ) -> tuple[int, int]:
        """Send buffers to all peers and receive buffers from all of them, at the same time.

        All nodes have to call it with the same number, and the buffers of a sender need the same
        lengths as those of its receiver. No bytes are copied. The buffers that a node sends may
        depend on those that it receives, as in the second step of an allreduce.

        Args:
            number: The number of this exchange, by which it differs from earlier and later ones.
            sends: By place, the buffers to send, each taken from the iterable just before it is
                sent. Places that are missing get none.
            receives: By place, the writable buffers to fill.
            patience: Seconds without a byte from or to a peer after which it has stalled.
            end: The time at which the exchange must be over (`time.monotonic`).
            arrived: A function that is called with a place and an index when that buffer of
                ``receives`` is full. It returns the buffers to send to every peer next.

        Returns:
            The bytes that were sent, and those that were received.

        Raises:
            StreamError: If a peer closes its connections, stalls, or sends another number or length
                than expected. All connections have ended then, as after any exception of one of the
                functions.
        """
        with self.in_use():
            began = _clock.now()
            # Each node begins with the node after it, so no two begin with the same one.
            order = [(self.me + step) % self.size for step in range(1, self.size)]
            peers = [_Endpoint(place, self._sockets[place], number) for place in order]

            def pass_on(place: int, index: int) -> None:
                if buffers := arrived(place, index):
                    for peer in peers:
                        peer.send(buffers)

            for peer in peers:
                peer.send(sends.get(peer.place, ()))
                peer.receive(receives.get(peer.place, ()), pass_on)
            while waiting := {peer.descriptor: peer for peer in peers if peer.events}:
                if end is not None and _clock.now() >= end:
                    text = f"the time is up after {_clock.now() - began:.3g} s"
                    raise late(_worst(waiting.values()), text)
                first = min(peer.since for peer in waiting.values()) + patience
                for descriptor, events in _poll(waiting, first if end is None else min(first, end)):
                    waiting.pop(descriptor).go_on(events)
                # A peer whose bytes have arrived has not stalled, even if reading them takes long.
                since = _clock.now() - patience
                if silent := [peer for peer in waiting.values() if peer.since <= since]:
                    raise late(_worst(silent), f"it has stalled: no byte for {patience:g} s")
            return sum(peer.sent for peer in peers), sum(peer.received for peer in peers)

    def close(self) -> None:
        """Close the sockets. An exchange that runs in another thread ends with an error."""
        self._end("they were closed")

    def _end(self, why: str) -> bool:
        """End the connections, and wake waiting threads; return whether this call ended them."""
        with self._changed:
            is_first = not self.is_closed
            if is_first:
                self._ended = why
                for connection in self._sockets.values():
                    shut(connection)
                self._changed.notify_all()
            self._close_unused()
            return is_first

    def _close_unused(self) -> None:
        """Close the sockets after the end, once no thread uses them; the lock is held."""
        if self.is_closed and not self._is_used:
            for connection in self._sockets.values():
                connection.close()


class _Endpoint:
    """The buffers that are sent to one peer in an exchange, and received from it.

    Attributes:
        place: The peer.
        descriptor: The descriptor of the socket to it.
        since: The last time at which a byte was sent or received, or nothing was to be moved.
        missing: The number of buffers that have not arrived.
        sent: Bytes sent, with those of the frames.
        received: Bytes received, likewise.
    """

    def __init__(self, place: int, connection: socket.socket, number: int) -> None:
        self.place = place
        self.descriptor = connection.fileno()
        self.since = _clock.now()
        self.missing = self.sent = self.received = 0
        self._connection = connection
        self._write, self._pending = _writer_of(connection)
        self._number = number
        self._queue: collections.deque[Iterable[Buffer]] = collections.deque()
        self._sending: Iterator[None] | None = None
        self._reading: Iterator[None] | None = None

    @property
    def events(self) -> int:
        """The events to poll for; 0 if nothing is to be read or sent for now."""
        reads = select.POLLIN if self._reading is not None else 0
        return reads | (select.POLLOUT if self._sending is not None else 0)

    def go_on(self, events: int) -> None:
        """Read a block, and send as much as the socket takes."""
        if events & ~select.POLLOUT and self._reading is not None:
            self._reading = _step(self._reading)
        if events & select.POLLOUT and self._sending is not None:
            self._sending = _step(self._sending)

    def send(self, buffers: Iterable[Buffer]) -> None:
        """Queue ``buffers`` to be sent, after those of other calls."""
        if not self.events:
            self.since = _clock.now()
        self._queue.append(buffers)
        self._sending = self._sending or self._send()

    def receive(self, buffers: Sequence[Buffer], arrived: Callable[[int, int], None]) -> None:
        """Begin to fill ``buffers``; ``arrived`` is called with the place and the index of each."""
        self.missing = len(buffers)
        self._reading = _step(self._receive(buffers, arrived))

    def _send(self) -> Iterator[None]:
        """Send all buffers; each step begins when the socket takes some."""
        while self._queue:
            for buffer in self._queue.popleft():
                view = _view(buffer)
                rest = [memoryview(_FRAME.pack(self._number, view.nbytes)), view]
                while rest:
                    count = self._move(self._write, rest) or 0
                    self.sent += count
                    while rest and count >= rest[0].nbytes:
                        count -= rest.pop(0).nbytes
                    if rest:
                        rest[0] = rest[0][count:]
                    yield

    def _receive(
        self, buffers: Sequence[Buffer], arrived: Callable[[int, int], None]
    ) -> Iterator[None]:
        """Fill all buffers; each step ends when there is nothing to read."""
        frame = memoryview(bytearray(_FRAME.size))
        for index, buffer in enumerate(buffers):
            view = _view(buffer)
            yield from self._fill(frame)
            number, nbytes = _FRAME.unpack(frame)
            if (number, nbytes) != (self._number, view.nbytes):
                raise StreamError(
                    self.place,
                    f"buffer {index}: expected exchange {self._number}, {view.nbytes} bytes;"
                    f" got exchange {number}, {nbytes} bytes",
                )
            yield from self._fill(view)
            self.missing -= 1
            arrived(self.place, index)

    def _fill(self, view: memoryview) -> Iterator[None]:
        while view.nbytes:
            if not self._pending():
                yield
            count = self._move(self._connection.recv_into, view[:_BLOCK])
            if count == 0:
                raise StreamError(self.place, f"it closed the stream in exchange {self._number}")
            if count is not None:
                self.received += count
                view = view[count:]

    def _move(self, call: Callable[[Buffer], int], data: Buffer) -> int | None:
        """Return the number of bytes that a socket's call moved; None if it would have to wait."""
        try:
            count = call(data)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None
        except OSError as error:
            raise StreamError(self.place, f"it closed the stream ({error})") from error
        self.since = _clock.now()
        return count


def _writer_of(
    connection: socket.socket,
) -> tuple[Callable[[list[memoryview]], int], Callable[[], int]]:
    """Return a function that sends views, and one that counts received bytes that poll misses."""
    if isinstance(connection, ssl.SSLSocket):
        return lambda views: connection.send(views[0]), connection.pending
    return connection.sendmsg, lambda: 0


def _step(steps: Iterator[None]) -> Iterator[None] | None:
    """Take the next step; return None after the last one."""
    for _ in steps:
        return steps
    return None


def _poll(waiting: Mapping[int, _Endpoint], end: float) -> list[tuple[int, int]]:
    """Wait until a socket is ready, at most until ``end``; return descriptors and events."""
    poll = select.poll()
    for descriptor, peer in waiting.items():
        poll.register(descriptor, peer.events)
    return poll.poll(milliseconds(end))


def _worst(peers: Iterable[_Endpoint]) -> int:
    """Return the place of the peer with most missing buffers: others may wait for it, too."""
    return max(peers, key=lambda peer: peer.missing).place


def set_up(connection: socket.socket) -> None:
    """Make a connection send without delay, and queue no more than it can send soon."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Several streams with BBR overfill a short queue, and resend the packets that it drops.
    if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).startswith(b"bbr"):
        with contextlib.suppress(OSError):  # the system may lack it
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")


def _view(buffer: Buffer) -> memoryview:
    """Return a view of the bytes of ``buffer``."""
    view = memoryview(buffer)
    return view.cast("B") if view.nbytes else memoryview(b"")
