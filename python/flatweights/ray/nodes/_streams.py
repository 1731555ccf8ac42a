"""Streams: how the processes of several nodes connect to each other.

Of the pair of nodes (i, j) with i < j, i connects to j. If Ray uses TLS, both verify each other's
certificate first. Then i sends a hello with the key of j's listener, the epoch, and its place i.
The key is compared before anything else is read. Once j has called `open` with that epoch, too, it
answers with the epoch. So an answer says that both ends are ready.

An epoch is one attempt. The process that makes all nodes connect chooses it at random. A connection
for an epoch that is not yet, or no longer, open here is closed without an answer; its peer connects
again until its time is up.

The socket of a `Link` is made in the same way: one process expects it by an epoch of its own, and
another one connects.
"""

from __future__ import annotations

import hmac
import secrets
import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence

from flatweights.ray import _clock
from flatweights.ray.nodes._address import HELLO, KEY, Address, family_of, listen
from flatweights.ray.nodes._connections import NodeConnections, StreamError, set_up
from flatweights.ray.nodes._tls import Tls, shake_hands
from flatweights.ray.support._errors import reason_in_a_line
from flatweights.ray.support._listener import (
    Listener,
    PendingConnection,
    RefusedError,
    closed_in_forks,
)

_EPOCH = 16  # bytes of an epoch
_PAUSE = 0.01  # seconds until the next attempt to connect, at first; twice as long each time
_LONGEST_PAUSE = 0.2


class Streams:
    """The sockets of one process to its peers on other nodes: one each, kept between rounds.

    Attributes:
        address: The address and the key that peers need to connect.
    """

    def __init__(self, host: str, ports: range = range(1)) -> None:
        """Listen on ``host`` alone, on one of ``ports``; see `listen`.

        Raises:
            OSError: If that is not possible, or Ray's certificates cannot be used.
        """
        self._opening = threading.Lock()  # held by `open`
        self._connections: NodeConnections | None = None  # of the epoch that was opened last
        self._expected: dict[bytes, Callable[[socket.socket], object]] = {}  # by epoch
        self._tls = Tls.of_ray()
        listening = listen(host, ports)
        key, has_tls = secrets.token_bytes(KEY), self._tls is not None
        self.address = Address(host, listening.getsockname()[1], key, has_tls)
        name = f"streams at {host}:{self.address.port}"
        self._listener = Listener(listening, name, self._shake_hands)

    def open(
        self, peers: Sequence[Address], me: int, epoch: bytes, end: float | None = None
    ) -> NodeConnections:
        """Return connections to ``peers``; those of the last call, if it had the same epoch.

        Args:
            peers: The addresses of all nodes, in their order, including that of this process.
            me: The place of this process among them.
            epoch: 16 bytes, chosen at random by the process that makes all nodes connect.
            end: The time at which to give up (`time.monotonic`); never, if None.

        Raises:
            StreamError: If a peer cannot be reached, or has not opened its connections in time.
            ValueError: If ``me`` is not the place of this process, or the epoch has ended.
        """
        peers = tuple(peers)
        if not (0 <= me < len(peers) and peers[me] == self.address):
            raise ValueError(f"peers: expected {self.address} at {me}, got {list(peers)}")
        if len(epoch) != _EPOCH:
            raise ValueError(f"epoch: expected {_EPOCH} bytes, got {len(epoch)}")
        with self._opening:
            old = self._connections
            if old is not None and old.epoch == epoch:
                if old.is_closed:
                    raise ValueError("epoch: its connections have ended; choose another one")
                return old
            connections = self._connections = NodeConnections(
                me, len(peers), epoch
            )  # admits its peers
            if old is not None:
                old.close()
            with connections.in_use():
                if self._listener.is_closed:
                    raise StreamError(-1, "the streams are closed")
                for place in range(me + 1, len(peers)):
                    pause = _PAUSE
                    while not self._reach(connections, place, peers[place], end):
                        connections.drop(place)
                        _clock.sleep(pause)
                        pause = min(2 * pause, _LONGEST_PAUSE)
                connections.wait(end)
            return connections

    def expect(self, epoch: bytes, take: Callable[[socket.socket], object]) -> None:
        """Have ``take`` called with the connection that another process makes by `connect`.

        If it was expected with another epoch, that ends.
        """
        for old, one in [*self._expected.items()]:  # which other threads change
            if one == take:
                self._expected.pop(old, None)
        self._expected[epoch] = take

    def connect(self, address: Address, epoch: bytes, end: float) -> socket.socket:
        """Return a connection to a process that expects it, or will before ``end``.

        Raises:
            StreamError: If it cannot be reached, or the time is up.
        """
        connections = NodeConnections(0, 2, epoch)
        try:
            while not self._reach(connections, 1, address, end):
                connections.drop(1)
                _clock.sleep(_LONGEST_PAUSE)
        except BaseException:
            connections.close()
            raise
        return connections.pop(1)

    def break_off(self, epoch: bytes) -> None:
        """End the connections of ``epoch``, or the call of another thread that opens them."""
        connections = self._connections
        if connections is not None and connections.epoch == epoch:
            connections.close()

    def close(self) -> None:
        """Close connections and listener, and wait for its thread. More calls do nothing."""
        if not self._listener.is_closed:
            self._listener.close()
            if self._connections is not None:
                self._connections.close()

    def _shake_hands(self, pending: PendingConnection) -> Iterator[int]:
        """Read a hello: the key, and the rest if the key is right; then take the connection."""
        if self._tls is not None:
            yield from self._tls.shake_hands(pending)
        connection, hello = pending.connection, bytearray()
        while len(hello) < HELLO.size:
            wanted = (KEY if len(hello) < KEY else HELLO.size) - len(hello)
            try:
                shard = connection.recv(wanted)
            except (BlockingIOError, ssl.SSLWantReadError):
                yield select.POLLIN
                continue
            if not shard:
                raise RefusedError("closed before a hello")
            hello += shard
            if len(hello) == KEY and not hmac.compare_digest(hello, self.address.key):
                raise RefusedError("a wrong key")
        _, epoch, place = HELLO.unpack(hello)
        take = self._expected.pop(epoch, None)
        if take is not None:
            set_up(connection)
            connection.send(epoch)
            try:
                take(connection)
            except Exception as error:
                raise RefusedError(reason_in_a_line(error)) from error
            return
        connections = self._connections
        if connections is None or connections.epoch != epoch or connections.is_closed:
            connection.close()
        elif not 0 <= place < connections.me:
            raise RefusedError("a place that does not connect to this one")
        elif place not in connections.missing:
            raise RefusedError("a place that is connected")
        else:
            try:
                set_up(connection)
                connection.send(epoch)
            except OSError:
                connection.close()  # the peer has gone, and may connect again
            else:
                connections.add(place, connection)

    def _reach(
        self, connections: NodeConnections, place: int, address: Address, end: float | None
    ) -> bool:
        """Connect to the peer at ``place``, and wait for its answer.

        Returns:
            False if the peer closed the connection, because others that connect pushed it out or
            the peer has not opened the epoch yet.
        """
        where = f"{address.host}:{address.port}"
        if address.has_tls != self.address.has_tls:
            ways = {True: "uses TLS", False: "does not use TLS"}
            theirs, ours = ways[address.has_tls], ways[self.address.has_tls]
            raise StreamError(
                place,
                f"{where} {theirs}, and the connecting process {ours}: set RAY_USE_TLS alike on "
                "all nodes",
            )
        try:
            connection = closed_in_forks(socket.socket(family_of(address.host)))
            connections.add(place, connection)
            set_up(connection)
            connection.settimeout(_left(end))
            connection.connect((address.host, address.port))
        except OSError as error:
            raise StreamError(place, f"cannot connect to {where}: {error}") from error
        try:
            if self._tls is not None:
                connection = self._tls.connect(connection, address.host)
                connections.add(place, connection)
                if not shake_hands(connection):
                    return False
            connection.sendall(HELLO.pack(address.key, connections.epoch, connections.me))
            connection.settimeout(_left(end))
            answer = connection.recv(_EPOCH)
        except TimeoutError as error:
            raise StreamError(place, "it has not answered in time") from error
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            return False
        except ssl.SSLError as error:
            raise StreamError(place, f"TLS with {where}: {error}") from error
        except OSError:
            return False
        if answer not in (b"", connections.epoch):
            raise StreamError(place, "a wrong answer")
        connection.setblocking(False)
        return answer == connections.epoch


def _left(end: float | None) -> float | None:
    """Return the seconds until ``end``.

    Raises:
        TimeoutError: If there are none.
    """
    left = None if end is None else end - _clock.now()
    if left is not None and left <= 0:
        raise TimeoutError("the time is up")
    return left
