"""Streams: how the processes of several nodes connect to each other.

Of the pair of nodes (i, j) with i < j, i connects to j. It sends a hello with the key of j's
listener, the epoch, and its place i. Once j has called `open` with that epoch, too, it answers with
the epoch. So an answer says that both ends are ready.

An epoch is one attempt: whoever has all nodes connect chose it at random. A connection for an epoch
that is not open here, yet or any more, is closed without a word; its peer connects again until its
time is up.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence

from flatweights.ray.nodes._links import Links, StreamError, kept, set_up
from flatweights.ray.nodes._listener import HELLO, Address, Listener

_EPOCH = 16  # bytes of an epoch
_PAUSE = 0.01  # seconds until the next attempt to connect, at first; twice as long each time
_LONGEST_PAUSE = 0.2


class Streams:
    """The sockets of one process to its peers on other nodes: one each, kept between rounds.

    Attributes:
        address: What the peers need to connect.
    """

    def __init__(self, host: str) -> None:
        """Listen on ``host`` alone; see `Listener`."""
        self._opening = threading.Lock()  # held by `open`
        self._links: Links | None = None  # of the epoch that was opened last
        self._listener = Listener(host, self._admit)
        self.address = self._listener.address

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
            ValueError: If ``me`` is not the place of this process, or the epoch has ended.
        """
        peers = tuple(peers)
        if not (0 <= me < len(peers) and peers[me] == self.address):
            raise ValueError(f"peers: expected {self.address} at {me}, got {list(peers)}")
        if len(epoch) != _EPOCH:
            raise ValueError(f"epoch: expected {_EPOCH} bytes, got {len(epoch)}")
        with self._opening:
            old = self._links
            if old is not None and old.epoch == epoch:
                if old.is_closed:
                    raise ValueError("epoch: its links have ended; choose another one")
                return old
            links = self._links = Links(me, len(peers), epoch)  # lets its peers in
            if old is not None:
                old.close()
            with links.in_use():
                if self._listener.is_closed:
                    raise StreamError(-1, "the streams are closed")
                higher = range(me + 1, len(peers))
                calls = [_call(links, place, peers[place], end) for place in higher]
                for place, connection in zip(higher, calls, strict=True):
                    pause = _PAUSE
                    while not _is_answered(links, place, connection, end):
                        links.drop(place)
                        time.sleep(pause)
                        pause = min(2 * pause, _LONGEST_PAUSE)
                        connection = _call(links, place, peers[place], end)
                links.wait(end)
            return links

    def break_off(self, epoch: bytes) -> None:
        """End the links of ``epoch``, or the call that opens them: another thread is in it."""
        links = self._links
        if links is not None and links.epoch == epoch:
            links.close()

    def close(self) -> None:
        """Close all links and the listener, and wait for its thread. More calls do nothing."""
        if not self._listener.is_closed:
            self._listener.close()
            if self._links is not None:
                self._links.close()

    def _admit(self, connection: socket.socket, epoch: bytes, place: int) -> None:
        """Take the connection of a peer, and answer it."""
        links = self._links
        if links is None or links.epoch != epoch or links.is_closed:
            connection.close()
        elif not 0 <= place < links.me:
            self._listener.refuse(connection, "a place that does not connect to this one")
        elif place not in links.missing:
            self._listener.refuse(connection, "a place that is connected")
        else:
            try:
                set_up(connection)
                connection.send(epoch)
            except OSError:
                connection.close()  # it is gone, and may come again
            else:
                links.add(place, connection)


def _call(links: Links, place: int, address: Address, end: float | None) -> socket.socket:
    """Connect to the peer at ``place``, and send a hello."""
    connection = kept(socket.socket(address.family))
    links.add(place, connection)
    try:
        set_up(connection)
        connection.settimeout(_left(end))
        connection.connect((address.host, address.port))
        connection.sendall(HELLO.pack(address.key, links.epoch, links.me))
    except OSError as error:
        where = f"{address.host}:{address.port}"
        raise StreamError(place, f"cannot connect to {where}: {error}") from error
    return connection


def _is_answered(links: Links, place: int, connection: socket.socket, end: float | None) -> bool:
    """Wait for the answer of the peer at ``place``; return False if it closed the connection.

    Others that connect may have pushed it out, or the peer has not opened the epoch yet.
    """
    try:
        connection.settimeout(_left(end))
        answer = connection.recv(_EPOCH)
    except TimeoutError as error:
        raise StreamError(place, "it has not answered in time") from error
    except OSError:
        return False
    if answer not in (b"", links.epoch):
        raise StreamError(place, "a wrong answer")
    connection.setblocking(False)
    return answer == links.epoch


def _left(end: float | None) -> float | None:
    """Return the seconds until ``end``.

    Raises:
        TimeoutError: If there are none.
    """
    left = None if end is None else end - time.monotonic()
    if left is not None and left <= 0:
        raise TimeoutError("the time is up")
    return left
