"""Streams: one socket between each pair of nodes, over which all of them swap bytes at once.

Each process has a `Streams`: a listener on the node's own address, and a thread that admits
peers. `Streams.open` connects the process to its peers, and gives `Links`.

- Of the pair (i, j) with i < j, i connects to j. It sends the key of j's listener, the epoch, and
  its place i. j compares the key before it looks at the rest. Once it has called `open` with that
  epoch, too, it answers with the epoch. So an answer says that both ends are ready.
- An epoch is used once. Sockets of an older one are closed, and connections for it refused.
- In a swap each node sends buffers to each other node, each of them in a frame: the number of the
  swap and the length (8 bytes each), then the bytes. The receiver checks both before it reads more.
- A node gives all peers the same share of its link, a turn of some bytes each. It begins with the
  node after it, so no two nodes begin with the same one; a peer that takes nothing now is passed
  over. It reads whatever arrives. So all links are in use until the end of a swap.
- After any error all sockets of the links are shut down, which ends the other thread and, within
  a moment, the swaps of all peers.
"""

from __future__ import annotations

import collections
import contextlib
import hmac
import logging
import math
import os
import secrets
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

Buffer: TypeAlias = Any  # what has the buffer protocol, contiguous; a type of its own since 3.12

_KEY = 32  # bytes of a listener's key
_EPOCH = 16  # bytes of an epoch
_HELLO = struct.Struct(f"<{_KEY}s{_EPOCH}sI")  # key, epoch, place of the sender
_FRAME = struct.Struct("<QQ")  # number of the swap, length of the data

_BLOCK = 256 << 10  # bytes that one call reads
_TURN = 1 << 20  # bytes that a peer is sent before it is the next one's turn
_UNSENT = 256 << 10  # bytes that the kernel takes before it can send them
_STRANGERS = 64  # connections that have not sent a hello yet
_GUESTS = 1024  # connections with the right key whose epoch has not been opened here yet
_PAST = 64  # epochs that are remembered as ended
_HELLO_TIME = 5.0  # seconds in which a hello has to arrive
_GUEST_TIME = 60.0  # seconds for which a guest may wait; it may come again
_PAUSE = 0.05  # seconds until the next attempt to connect, or to accept

_BROKEN_OFF = "the streams were closed, or other links are wanted"

_log = logging.getLogger("flatweights")


class StreamError(OSError):
    """A stream cannot be made, or broke.

    Attributes:
        peer: The place of the peer among the nodes; -1 if it is not known.
    """

    def __init__(self, peer: int, reason: str) -> None:
        """Say which peer, and why."""
        super().__init__(reason if peer < 0 else f"peer {peer}: {reason}")
        self.peer = peer
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by what the constructor takes."""
        return type(self), (self.peer, self.reason)


class Address(NamedTuple):
    """Where a process listens, and the key that it asks for.

    Attributes:
        host: The node's address.
        port: The port.
        key: 32 random bytes of this listener.
    """

    host: str
    port: int
    key: bytes

    def __repr__(self) -> str:
        """Show where, and not the key."""
        return f"Address({self.host}:{self.port})"


class Streams:
    """The sockets of one process to its peers on other nodes: one each, kept between rounds.

    Attributes:
        address: What the peers need to connect.
    """

    def __init__(self, host: str) -> None:
        """Listen on ``host`` alone, on a port that is free.

        Args:
            host: The address of this node.

        Raises:
            OSError: If ``host`` is not an address of this machine.
            ValueError: If ``host`` stands for all addresses.
        """
        if host in ("", "0.0.0.0", "::"):
            raise ValueError(f"host: expected one address of this node, got {host!r}")
        self._listener = _listen(host)
        port = self._listener.getsockname()[1]
        self.address = Address(host, port, secrets.token_bytes(_KEY))
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._opening = threading.Lock()  # held by `open`
        self._links: Links | None = None
        self._peers: tuple[Address, ...] = ()
        self._epoch: bytes | None = None  # the one that is open, or being opened
        self._me = 0
        self._lower: dict[int, socket.socket] = {}  # admitted sockets of `_epoch`, by place
        self._past: collections.deque[bytes] = collections.deque(maxlen=_PAST)
        self._guests: dict[socket.socket, _Guest] = {}
        self._strangers: dict[socket.socket, _Stranger] = {}  # of the thread alone
        self._told: set[str] = set()  # kinds of refusals that were logged
        self._is_closed = False
        _all.add(self)
        self._thread = threading.Thread(
            target=self._admit_all, name="flatweights-streams", daemon=True
        )
        self._thread.start()

    def open(
        self, peers: Sequence[Address], me: int, epoch: bytes, end: float | None = None
    ) -> Links:
        """Return links to ``peers``, connected; those of the last call if it was for the same.

        Args:
            peers: The addresses of all nodes, in their order, with that of this process.
            me: The place of this process among them.
            epoch: 16 bytes that whoever has all nodes open their links chose at random for this.
            end: When to give up (`time.monotonic`), if not before.

        Raises:
            StreamError: If a peer cannot be reached, or has not opened its links in time.
            ValueError: If ``me`` is not the place of this process, or the epoch was used before.
        """
        peers = tuple(peers)
        if not (0 <= me < len(peers) and peers[me] == self.address):
            raise ValueError(f"peers: expected {self.address} at {me}, got {list(peers)}")
        if len(epoch) != _EPOCH:
            raise ValueError(f"epoch: expected {_EPOCH} bytes, got {len(epoch)}")
        with self._opening:
            if epoch == self._epoch and self._links is not None:
                if peers != self._peers or me != self._me:
                    raise ValueError("epoch: the same as before, with other peers")
                if self._links.is_closed:
                    raise ValueError("epoch: its links have ended; choose another one")
                return self._links
            self._begin(peers, me, epoch)
            sockets: dict[int, socket.socket] = {}
            try:
                higher = {place: peers[place] for place in range(me + 1, len(peers))}
                _connect(higher, epoch, me, sockets, end, lambda: epoch != self._epoch)
                self._wait_for_lower(end, epoch)
                with self._lock:
                    if epoch != self._epoch:
                        raise StreamError(-1, _BROKEN_OFF)
                    sockets.update(self._lower)
                    self._links = Links(sockets, me, len(peers))
            except BaseException:
                self._end_epoch()
                for connection in sockets.values():
                    _shut(connection)
                    connection.close()
                raise
            return self._links

    def break_off(self, epoch: bytes) -> None:
        """End the links of ``epoch``, or the call that opens them: another thread is in it."""
        if epoch == self._epoch:
            self._end_epoch()

    def close(self) -> None:
        """Close all links and the listener, and wait for the thread. More calls do nothing."""
        with self._lock:
            self._is_closed = True
            self._arrived.notify_all()
        self._end_epoch()
        _shut(self._listener)  # wakes the thread
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _begin(self, peers: tuple[Address, ...], me: int, epoch: bytes) -> None:
        """Let connections for ``epoch`` in, and no others."""
        self._end_epoch()
        with self._lock:
            if self._is_closed:
                raise StreamError(-1, "the streams are closed")
            if epoch in self._past:
                raise ValueError("epoch: it was used before")
            self._peers, self._me, self._epoch = peers, me, epoch
            for connection, guest in list(self._guests.items()):
                if guest.epoch == epoch:
                    del self._guests[connection]
                    self._admit(connection, guest)

    def _end_epoch(self) -> None:
        with self._lock:
            links, lower, epoch = self._links, self._lower, self._epoch
            self._links, self._lower, self._epoch = None, {}, None
            if epoch is not None:
                self._past.append(epoch)
            self._arrived.notify_all()
        if links is not None:
            links.close()
        for connection in lower.values():
            if links is None:
                _shut(connection)
                connection.close()

    def _wait_for_lower(self, end: float | None, epoch: bytes) -> None:
        with self._lock:
            while epoch == self._epoch:
                missing = [place for place in range(self._me) if place not in self._lower]
                if not missing:
                    return
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    text = "it has not connected in time"
                    raise StreamError(missing[0], text) from TimeoutError(text)
                self._arrived.wait(left)
            raise StreamError(-1, _BROKEN_OFF)

    # The thread

    def _admit_all(self) -> None:
        """Accept connections until the listener is closed; the thread does nothing else."""
        try:
            while not self._is_closed:
                self._admit_some()
        finally:
            with self._lock:
                connections = [*self._strangers, *self._guests]
                self._strangers.clear()
                self._guests.clear()
            for connection in connections:
                connection.close()
            self._listener.close()

    def _admit_some(self) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        by_descriptor: dict[int, socket.socket] = {}
        with self._lock:
            waiting: dict[socket.socket, _Stranger | _Guest] = {**self._strangers, **self._guests}
        for connection in waiting:
            by_descriptor[connection.fileno()] = connection
            poll.register(connection, select.POLLIN)
        first = min((one.end for one in waiting.values()), default=None)
        events = poll.poll(_milliseconds(first))
        for descriptor, _ in events:
            ready = by_descriptor.get(descriptor)
            if ready is None:
                self._accept()
            elif ready in self._strangers:
                self._listen_to(ready)
            else:
                self._drop_guest(ready, "gave up, or sent more than a hello")
        now = time.monotonic()
        for connection, one in waiting.items():
            if one.end <= now and connection in self._strangers:
                self._refuse(connection, "no hello in time")
            elif one.end <= now:
                self._drop_guest(connection, "an epoch that was not opened here")

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:  # closed; gone again; or there are no descriptors left
            if not self._is_closed and not isinstance(error, (BlockingIOError, ConnectionError)):
                self._tell("error", f"cannot accept connections: {error}")
                time.sleep(_PAUSE)
            return
        connection.setblocking(False)
        if len(self._strangers) >= _STRANGERS:
            self._refuse(next(iter(self._strangers)), "too many connections without a hello")
        self._strangers[connection] = _Stranger(time.monotonic() + _HELLO_TIME, bytearray())
        self._listen_to(connection)

    def _listen_to(self, connection: socket.socket) -> None:
        """Read more of a stranger's hello: its key first, and the rest if that is right."""
        hello = self._strangers[connection].hello
        try:
            while len(hello) < _HELLO.size:
                wanted = (_KEY if len(hello) < _KEY else _HELLO.size) - len(hello)
                piece = connection.recv(wanted)
                if not piece:
                    self._refuse(connection, "closed before a hello")
                    return
                hello += piece
                if len(hello) == _KEY and not hmac.compare_digest(hello, self.address.key):
                    self._refuse(connection, "a wrong key")
                    return
        except BlockingIOError:
            return
        except OSError:
            self._refuse(connection, "closed before a hello")
            return
        del self._strangers[connection]
        _, epoch, place = _HELLO.unpack(hello)
        guest = _Guest(time.monotonic() + _GUEST_TIME, epoch, place)
        with self._lock:
            if epoch == self._epoch:
                self._admit(connection, guest)
                return
            if epoch in self._past:
                self._refuse(connection, "an epoch that has ended")
                return
            if len(self._guests) >= _GUESTS:
                self._refuse(self._guests_first(), "too many connections for other epochs")
            self._guests[connection] = guest

    def _guests_first(self) -> socket.socket:
        connection = next(iter(self._guests))
        del self._guests[connection]
        return connection

    def _admit(self, connection: socket.socket, guest: _Guest) -> None:
        """Take a connection for the epoch that is open; the lock is held."""
        if not 0 <= guest.place < self._me:
            self._refuse(connection, "a place that does not connect to this one")
        elif guest.place in self._lower:
            self._refuse(connection, "a place that is connected")
        else:
            try:
                _set_up(connection)
                connection.send(guest.epoch)
            except OSError:
                self._refuse(connection, "closed before the answer")
                return
            self._lower[guest.place] = connection
            self._arrived.notify_all()

    def _drop_guest(self, connection: socket.socket, reason: str) -> None:
        with self._lock:
            guest = self._guests.pop(connection, None)
        if guest is not None:
            self._refuse(connection, reason)

    def _refuse(self, connection: socket.socket, reason: str) -> None:
        self._strangers.pop(connection, None)
        who = "an unknown address"
        with contextlib.suppress(OSError):
            who = connection.getpeername()[0]
        self._tell(reason, f"refused a connection from {who}: {reason}")
        connection.close()

    def _tell(self, kind: str, text: str) -> None:
        """Log ``text``, unless one of its kind was logged before."""
        if kind not in self._told:
            self._told.add(kind)
            _log.warning("streams at %s:%d: %s", self.address.host, self.address.port, text)

    def _forget(self) -> None:
        """Close this process's copies of the sockets: it is a fork, and they are its parent's."""
        self._is_closed = True
        self._lock = threading.Lock()  # other threads may have held them
        self._arrived = threading.Condition(self._lock)
        self._opening = threading.Lock()
        if self._links is not None:
            self._links.forget()
        waiting = [*self._lower.values(), *self._guests, *self._strangers]
        for connection in (self._listener, *waiting):
            connection.close()


class Links:
    """The sockets to all peers of one epoch.

    Attributes:
        me: The place of this process.
        size: How many nodes there are.
        is_closed: Whether they are closed, or broke. They stay so.
        sent_bytes: Bytes sent to each node, in their order.
        received_bytes: Bytes received from each node.
    """

    def __init__(self, sockets: Mapping[int, socket.socket], me: int, size: int) -> None:
        """Take connected sockets, by place."""
        self.me = me
        self.size = size
        self.is_closed = False
        self.sent_bytes = [0] * size
        self.received_bytes = [0] * size
        self._sockets = dict(sockets)
        self._lock = threading.Lock()
        self._error: BaseException | None = None  # why they ended
        self._is_swapping = False
        self._gate = _Gate()

    def swap(
        self,
        number: int,
        sends: Mapping[int, Callable[[], Iterable[Buffer]]],
        receives: Mapping[int, Sequence[Buffer]],
        *,
        patience: float,
        end: float | None = None,
        ready: int | None = None,
        arrived: Callable[[int, int], int | None] | None = None,
    ) -> None:
        """Send buffers to all peers and receive buffers from all of them, at the same time.

        All nodes have to call it with the same number, and what one sends to another has to be cut
        into buffers of the same lengths on both sides. No bytes are copied. What a node sends may
        depend on what it receives, as the second step of an allreduce does: `ready` holds buffers
        back, and `arrived` releases them.

        Args:
            number: What tells this swap from those before and after it.
            sends: By place, a function that returns the buffers to send, or makes them one by one.
                It is called in another thread; a buffer is asked for just before it goes. A place
                that is not there gets none.
            receives: By place, the writable buffers to fill.
            patience: Seconds without a byte from a peer, or to it, after which it has stalled.
            end: When the swap has to be over (`time.monotonic`).
            ready: How many buffers may go to each peer for now; all of them if None.
            arrived: Called in this thread with a place and an index, when that buffer of
                ``receives`` is full. It may return a new, larger ``ready``.

        Raises:
            StreamError: If a peer closes its links, stalls, or sends another number or length than
                expected. The links have ended then, as after anything that a function raises.
        """
        readers = [
            _Reader(place, connection, number, receives.get(place, ()))
            for place, connection in self._sockets.items()
        ]
        order = [(self.me + step) % self.size for step in range(1, self.size)]
        writers = [_Writer(k, self._sockets[k], number, sends.get(k, tuple)) for k in order]
        limits = _Limits(patience, end, time.monotonic())
        with self._in_use():
            gate = self._gate
            gate.start(ready)
            sender = threading.Thread(
                target=self._send_all,
                args=(writers, gate, limits),
                name="flatweights-sender",
                daemon=True,
            )
            try:
                sender.start()
                self._receive_all(readers, gate, limits, arrived)
                gate.end()
                sender.join()
            except BaseException as error:
                self._fail(error)
            finally:
                gate.end()
                _join(sender)
            if self._error is not None:
                raise self._error

    def close(self) -> None:
        """Close the sockets. A swap that runs in another thread ends with an error."""
        self._fail(StreamError(-1, "the links were closed"))

    def forget(self) -> None:
        """Close the sockets of this process, a fork, which its parent goes on to use."""
        self._lock = threading.Lock()
        self.is_closed = True
        self._error = StreamError(-1, "they are those of the parent process")
        self._is_swapping = False
        self._close_unused()

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        with self._lock:
            if self._is_swapping:
                raise RuntimeError("a swap over these links is still going on")
            if self.is_closed:
                raise StreamError(-1, f"the links have ended: {self._error}")
            self._is_swapping = True
        try:
            yield
        finally:
            with self._lock:
                self._is_swapping = False
                self._close_unused()

    def _fail(self, error: BaseException) -> None:
        """End the links, and all that waits for them here or elsewhere, for the first reason."""
        with self._lock:
            if not self.is_closed:
                self.is_closed = True
                self._error = error
                for connection in self._sockets.values():
                    _shut(connection)
            self._close_unused()

    def _close_unused(self) -> None:
        """Close the sockets of links that have ended once no thread uses them; the lock is held."""
        if self.is_closed and not self._is_swapping:
            for connection in self._sockets.values():
                connection.close()
            self._gate.close()

    def _send_all(self, writers: list[_Writer], gate: _Gate, limits: _Limits) -> None:
        """Send all buffers; run by a thread of its own."""
        try:
            poll = select.poll()
            poll.register(gate.descriptor, select.POLLIN)
            blocked: dict[int, _Writer] = {}
            while writers:
                limits.check_time(writers)
                is_over = gate.is_over  # then nothing becomes ready after this
                able = [one for one in writers if not one.is_blocked and one.is_ready(gate.ready)]
                if able:
                    one = min(able, key=lambda one: one.turns)  # of equals the first one
                    self.sent_bytes[one.place] += one.send()
                    if one.is_blocked:
                        descriptor = one.connection.fileno()
                        blocked[descriptor] = one
                        poll.register(descriptor, select.POLLOUT)
                    elif one.is_done:
                        writers.remove(one)
                    continue
                if is_over and not blocked:
                    _check_sent(writers)
                    return
                for descriptor, _ in poll.poll(limits.milliseconds(blocked.values())):
                    if descriptor == gate.descriptor:
                        gate.pass_through()
                    else:
                        blocked.pop(descriptor).is_blocked = False
                        poll.unregister(descriptor)
                limits.check_progress(blocked.values(), "takes")
        except BaseException as error:
            self._fail(error)

    def _receive_all(
        self,
        readers: list[_Reader],
        gate: _Gate,
        limits: _Limits,
        arrived: Callable[[int, int], int | None] | None,
    ) -> None:
        poll = select.poll()
        left = {}
        for reader in readers:
            if not reader.is_done:
                descriptor = reader.connection.fileno()
                left[descriptor] = reader
                poll.register(descriptor, select.POLLIN)
        while left:
            limits.check_time(left.values())
            # Who has bytes there now has not stalled, however long the last buffer took here.
            silent = dict(left)
            for descriptor, _ in poll.poll(limits.milliseconds(left.values())):
                reader = silent.pop(descriptor)
                index = reader.index
                self.received_bytes[reader.place] += reader.read()
                if reader.index > index and arrived is not None:
                    gate.open(arrived(reader.place, index))
                if reader.is_done:
                    poll.unregister(descriptor)
                    del left[descriptor]
            limits.check_progress(silent.values(), "sends")


def _check_sent(writers: Iterable[_Writer]) -> None:
    for one in writers:
        if one.has_next():
            raise RuntimeError(f"peer {one.place}: a buffer has not become ready to be sent")


class _Writer:
    """What one peer is to be sent.

    Attributes:
        place: The peer.
        connection: The socket to it.
        turns: How many turns it has had.
        is_blocked: Whether the socket takes nothing now.
        is_done: Whether all is sent.
        since: When it was blocked.
    """

    def __init__(
        self,
        place: int,
        connection: socket.socket,
        number: int,
        give: Callable[[], Iterable[Buffer]],
    ) -> None:
        self.place = place
        self.connection = connection
        self.turns = 0
        self.is_blocked = False
        self.is_done = False
        self.since = 0.0
        self._number = number
        self._give = give
        self._buffers: Iterator[Buffer] | None = None
        self._index = 0  # of the next buffer
        self._rest: list[memoryview] = []  # of the present frame
        self._left = _TURN  # bytes of the turn

    @property
    def missing(self) -> int:
        """How much it lacks, to compare: the peer that lacks most has stalled first."""
        return -self.turns

    def is_ready(self, ready: float) -> bool:
        """Whether there is something to send, if ``ready`` buffers may go."""
        return bool(self._rest) or self._index < ready

    def send(self) -> int:
        """Send up to the end of the turn; return how many bytes that was.

        Raises:
            StreamError: If the peer has closed its end.
        """
        if not self._rest and not self.has_next():
            self.is_done = True
            return 0
        first = self._rest[0]
        pieces = [first, *self._rest[1:]] if first.nbytes < self._left else [first[: self._left]]
        try:
            count = self.connection.sendmsg([pieces[0], *(p[: self._left] for p in pieces[1:])])
        except BlockingIOError:
            self.is_blocked = True
            self.since = time.monotonic()
            return 0
        except OSError as error:
            raise StreamError(self.place, f"it closed the stream ({error})") from error
        self._left -= count
        if self._left <= 0:
            self._left = _TURN
            self.turns += 1
        sent = count
        while self._rest and count >= self._rest[0].nbytes:
            count -= self._rest.pop(0).nbytes
        if count:
            self._rest[0] = self._rest[0][count:]
        return sent

    def has_next(self) -> bool:
        """Take the next buffer, and return whether there is one."""
        if self._buffers is None:
            self._buffers = iter(self._give())
        try:
            view = _view(next(self._buffers))
        except StopIteration:
            return False
        self._index += 1
        self._rest = [memoryview(_FRAME.pack(self._number, view.nbytes))]
        if view.nbytes:
            self._rest.append(view)
        return True


class _Reader:
    """What one peer sends.

    Attributes:
        place: The peer.
        connection: The socket to it.
        index: The buffer that is being filled.
        is_done: Whether all are full.
        since: When bytes came last.
    """

    def __init__(
        self, place: int, connection: socket.socket, number: int, buffers: Sequence[Buffer]
    ) -> None:
        self.place = place
        self.connection = connection
        self.index = 0
        self.is_done = not buffers
        self.since = time.monotonic()
        self._number = number
        self._views = [_view(buffer) for buffer in buffers]
        self._frame = memoryview(bytearray(_FRAME.size))
        self._rest = self._frame
        self._in_frame = True  # or in the buffer

    @property
    def missing(self) -> int:
        """How much is missing, to compare."""
        data = 0 if self._in_frame else self._rest.nbytes
        return data + sum(view.nbytes for view in self._views[self.index + (not self._in_frame) :])

    def read(self) -> int:
        """Read what is there, a block of one buffer at most; return how many bytes that was.

        Raises:
            StreamError: If the peer has closed its end, or sends another frame than expected.
        """
        try:
            count = self.connection.recv_into(self._rest[:_BLOCK])
        except BlockingIOError:
            return 0
        except OSError as error:
            raise StreamError(self.place, f"it closed the stream ({error})") from error
        if count == 0:
            raise StreamError(self.place, f"it closed the stream in swap {self._number}")
        self.since = time.monotonic()
        self._rest = self._rest[count:]
        if not self._rest.nbytes and self._in_frame:
            self._check_frame()
            self._in_frame = False
            self._rest = self._views[self.index]
        if not self._rest.nbytes and not self._in_frame:
            self._in_frame = True
            self._rest = self._frame
            self.index += 1
            self.is_done = self.index == len(self._views)
        return count

    def _check_frame(self) -> None:
        expected = self._number, self._views[self.index].nbytes
        got = _FRAME.unpack(self._frame)
        if got != expected:
            raise StreamError(
                self.place,
                f"buffer {self.index}: expected swap {expected[0]}, {expected[1]} bytes;"
                f" got swap {got[0]}, {got[1]} bytes",
            )


class _Gate:
    """How many buffers may go to each peer; opened by one thread, waited for by another.

    Attributes:
        ready: How many.
        is_over: Whether it opens no further.
        descriptor: Readable after the gate has opened.
    """

    def __init__(self) -> None:
        self.ready: float = 0
        self.is_over = False
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def start(self, ready: int | None) -> None:
        """Let ``ready`` buffers go, or all of them."""
        self.ready = math.inf if ready is None else ready
        self.is_over = False

    def open(self, ready: int | None) -> None:
        """Let ``ready`` buffers go, if that is more than before."""
        if ready is not None and ready > self.ready:
            self.ready = ready
            os.eventfd_write(self.descriptor, 1)

    def end(self) -> None:
        """Have the other thread know that it opens no further."""
        self.is_over = True
        os.eventfd_write(self.descriptor, 1)

    def pass_through(self) -> None:
        """Wait for the next opening from now on."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)

    def close(self) -> None:
        """Close the descriptor, once no thread waits."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class _Limits(NamedTuple):
    """When a swap has failed."""

    patience: float
    end: float | None
    began: float

    def milliseconds(self, waiting: Iterable[_Writer | _Reader]) -> int | None:
        """Return how long to wait for any of ``waiting``."""
        times = [one.since + self.patience for one in waiting]
        times += [] if self.end is None else [self.end]
        return _milliseconds(min(times, default=None))

    def check_time(self, waiting: Iterable[_Writer | _Reader]) -> None:
        """Raise if the time is up for ``waiting``."""
        now = time.monotonic()
        if self.end is not None and now >= self.end:
            self._blame(waiting, f"the time is up after {now - self.began:.3g} s")

    def check_progress(self, silent: Iterable[_Writer | _Reader], doing: str) -> None:
        """Raise if one of ``silent``, which can do nothing now, has been so for too long."""
        now = time.monotonic()
        late = [one for one in silent if now >= one.since + self.patience]
        if late:
            self._blame(late, f"it has stalled: it {doing} nothing for {self.patience:g} s")

    @staticmethod
    def _blame(late: Iterable[_Writer | _Reader], text: str) -> None:
        # The others may wait for the one that lacks most, too.
        worst = max(late, key=lambda one: one.missing)
        raise StreamError(worst.place, text) from TimeoutError(text)


class _Stranger(NamedTuple):
    """A connection that has not sent a whole hello."""

    end: float
    hello: bytearray


class _Guest(NamedTuple):
    """A connection with the right key, for an epoch that is not open yet."""

    end: float
    epoch: bytes
    place: int


def _connect(
    higher: Mapping[int, Address],
    epoch: bytes,
    me: int,
    sockets: dict[int, socket.socket],
    end: float | None,
    is_over: Callable[[], bool],
) -> None:
    """Connect to all of ``higher``, and wait for their answers.

    Args:
        higher: Addresses by place.
        epoch: The epoch.
        me: The place of this process.
        sockets: Gets the connected sockets; in the end, those of all places.
        end: When to give up.
        is_over: Whether another thread has ended the epoch.
    """
    calls = {place: _Call(place, address, epoch, me) for place, address in higher.items()}
    try:
        while calls:
            poll = select.poll()
            by_descriptor = {}
            pause = None
            for call in calls.values():
                if call.connection is None and time.monotonic() >= call.since:
                    call.begin()
                if call.connection is None:
                    pause = call.since
                else:
                    by_descriptor[call.connection.fileno()] = call
                    poll.register(call.connection, call.events)
            soon = time.monotonic() + _PAUSE
            until = min(soon if one is None else one for one in (pause, end, soon))
            for descriptor, _ in poll.poll(_milliseconds(until)):
                call = by_descriptor[descriptor]
                if call.go_on() and call.connection is not None:
                    sockets[call.place] = call.connection
                    del calls[call.place]
            if is_over():
                raise StreamError(-1, _BROKEN_OFF)
            if calls and end is not None and time.monotonic() >= end:
                call = next(iter(calls.values()))
                text = f"no answer in time from {call.address.host}:{call.address.port}"
                raise StreamError(call.place, text) from TimeoutError(text)
    finally:
        for call in calls.values():
            if call.connection is not None:
                _shut(call.connection)
                call.connection.close()


class _Call:
    """A connection that is being made."""

    def __init__(self, place: int, address: Address, epoch: bytes, me: int) -> None:
        self.place = place
        self.address = address
        self.connection: socket.socket | None = None
        self.events = select.POLLOUT
        self.since = 0.0  # when to connect
        self._hello = _HELLO.pack(address.key, epoch, me)
        self._epoch = epoch
        self._answer = b""

    def begin(self) -> None:
        """Begin to connect."""
        self.connection = socket.socket(_family(self.address.host), socket.SOCK_STREAM)
        self.connection.setblocking(False)
        self.events, self._answer = select.POLLOUT, b""
        _set_up(self.connection)
        try:
            self.connection.connect((self.address.host, self.address.port))
        except BlockingIOError:
            pass
        except OSError as error:
            raise self._unreachable(error) from error

    def go_on(self) -> bool:
        """Do what can be done now, and return whether the peer has answered."""
        assert self.connection is not None
        if self.events == select.POLLOUT:
            code = self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise self._unreachable(OSError(code, os.strerror(code)))
            self.events = select.POLLIN
            with contextlib.suppress(OSError):  # seen below
                self.connection.send(self._hello)
            return False
        try:
            piece = self.connection.recv(_EPOCH - len(self._answer))
        except BlockingIOError:
            return False
        except OSError:
            piece = b""
        if not piece:  # pushed out by others that connect; or it has not opened this epoch
            self.connection.close()
            self.connection = None
            self.since = time.monotonic() + _PAUSE
            return False
        self._answer += piece
        if len(self._answer) < _EPOCH:
            return False
        if self._answer != self._epoch:
            raise StreamError(self.place, f"a wrong answer from {self.address!r}")
        return True

    def _unreachable(self, error: OSError) -> StreamError:
        return StreamError(
            self.place, f"cannot connect to {self.address.host}:{self.address.port}: {error}"
        )


def _listen(host: str) -> socket.socket:
    listener = socket.socket(_family(host), socket.SOCK_STREAM)
    try:
        listener.bind((host, 0))
        listener.listen(1024)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _set_up(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _shut(connection: socket.socket) -> None:
    """End a connection for all processes that have the socket, and for its peer."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _view(buffer: Buffer) -> memoryview:
    """Return a view of the bytes of ``buffer``."""
    view = memoryview(buffer)
    return view.cast("B") if view.nbytes else memoryview(b"")


def _join(thread: threading.Thread) -> None:
    """Wait for the thread, whatever interrupts."""
    while thread.is_alive():
        with contextlib.suppress(KeyboardInterrupt):
            thread.join()


def _milliseconds(end: float | None) -> int | None:
    """Return how long to poll until ``end``, rounded up."""
    return None if end is None else max(0, int((end - time.monotonic()) * 1000) + 1)


_all: weakref.WeakSet[Streams] = weakref.WeakSet()


def _forget_all() -> None:
    for streams in list(_all):
        streams._forget()


os.register_at_fork(after_in_child=_forget_all)
