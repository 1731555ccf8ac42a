"""A listener: where peers connect, and strangers come no further.

Who connects has some seconds to send a hello: the key of this listener, an epoch, and a place. The
key is compared before anything else is read. A connection whose hello is complete is that of a peer
and passed on. All others are strangers: few of them may wait, each is refused in time, and each
kind of refusal is logged once. A thread does this, and nothing else.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from flatweights.ray.nodes._links import kept, milliseconds, shut

KEY = 32
"""Bytes of a listener's key."""
HELLO = struct.Struct(f"<{KEY}s16sI")
"""Key, epoch, place of the sender."""

_STRANGERS = 64  # connections that have not sent a hello yet
_PAUSE = 0.05  # seconds until the next attempt to accept
_HELLO_TIME = 5.0  # seconds in which a hello has to arrive

_log = logging.getLogger("flatweights")


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

    @property
    def family(self) -> socket.AddressFamily:
        """That of ``host``."""
        return socket.AF_INET6 if ":" in self.host else socket.AF_INET

    def __repr__(self) -> str:
        """Show where, and not the key."""
        return f"Address({self.host}:{self.port})"


class _Stranger(NamedTuple):
    connection: socket.socket
    hello: bytearray
    end: float  # when the hello has to be complete


class Listener:
    """Where the peers of a process connect.

    Attributes:
        address: What they need for that.
    """

    def __init__(self, host: str, admit: Callable[[socket.socket, bytes, int], None]) -> None:
        """Listen on ``host`` alone, on a port that is free.

        Args:
            host: The address of this node.
            admit: Called by the thread with the connection of a peer, its epoch and its place.

        Raises:
            OSError: If ``host`` is not an address of this machine.
            ValueError: If ``host`` stands for all addresses.
        """
        if host in ("", "0.0.0.0", "::"):
            raise ValueError(f"host: expected one address of this node, got {host!r}")
        self._socket = kept(socket.socket(Address(host, 0, b"").family))
        try:
            self._socket.bind((host, 0))
            self._socket.listen(1024)
            self._socket.setblocking(False)
        except BaseException:
            self._socket.close()
            raise
        port = self._socket.getsockname()[1]
        self.address = Address(host, port, secrets.token_bytes(KEY))
        self._admit = admit
        self._is_closing = False
        self._strangers: dict[int, _Stranger] = {}  # by descriptor; of the thread alone
        self._told: set[str] = set()  # kinds of refusals that were logged
        self._thread = threading.Thread(target=self._run, name="flatweights-streams", daemon=True)
        self._thread.start()

    @property
    def is_closed(self) -> bool:
        """Whether it is closed; also in a fork of the process that listens."""
        return self._is_closing or self._socket.fileno() < 0

    def close(self) -> None:
        """Refuse all strangers, and wait for the thread."""
        self._is_closing = True
        shut(self._socket)  # wakes the thread
        if self._thread is not threading.current_thread():
            self._thread.join()

    def refuse(self, connection: socket.socket, reason: str) -> None:
        """Close a connection, and log why."""
        who = "an unknown address"
        with contextlib.suppress(OSError):
            who = connection.getpeername()[0]
        connection.close()
        self._tell(reason, f"refused a connection from {who}: {reason}")

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._serve()
        finally:
            for stranger in self._strangers.values():
                stranger.connection.close()
            self._socket.close()

    def _serve(self) -> None:
        """Wait until something comes, or has not come in time."""
        poll = select.poll()
        for descriptor in (self._socket.fileno(), *self._strangers):
            poll.register(descriptor, select.POLLIN)
        ends = [stranger.end for stranger in self._strangers.values()]
        for descriptor, _ in poll.poll(milliseconds(min(ends, default=None))):
            if descriptor in self._strangers:
                self._hear(descriptor)
            else:
                self._accept()
        now = time.monotonic()
        for descriptor, stranger in list(self._strangers.items()):
            if stranger.end <= now:
                self._refuse(descriptor, "no hello in time")

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError as error:  # closed; gone again; or there are no descriptors left
            if not self._is_closing and not isinstance(error, (BlockingIOError, ConnectionError)):
                self._tell("error", f"cannot accept connections: {error}")
                time.sleep(_PAUSE)
            return
        kept(connection).setblocking(False)
        if len(self._strangers) >= _STRANGERS:
            self._refuse(next(iter(self._strangers)), "too many connections without a hello")
        end = time.monotonic() + _HELLO_TIME
        self._strangers[connection.fileno()] = _Stranger(connection, bytearray(), end)

    def _hear(self, descriptor: int) -> None:
        """Read more of a hello: the key first, and the rest if that is right."""
        connection, hello, _ = self._strangers[descriptor]
        wanted = (KEY if len(hello) < KEY else HELLO.size) - len(hello)
        try:
            hello += (piece := connection.recv(wanted))
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        if not piece:
            self._refuse(descriptor, "closed before a hello")
        elif len(hello) == KEY and not hmac.compare_digest(hello, self.address.key):
            self._refuse(descriptor, "a wrong key")
        elif len(hello) == HELLO.size:
            del self._strangers[descriptor]
            self._admit(connection, *HELLO.unpack(hello)[1:])

    def _refuse(self, descriptor: int, reason: str) -> None:
        self.refuse(self._strangers.pop(descriptor).connection, reason)

    def _tell(self, kind: str, text: str) -> None:
        """Log ``text``, unless one of its kind was logged before."""
        if kind not in self._told:
            self._told.add(kind)
            _log.warning("streams at %s:%d: %s", self.address.host, self.address.port, text)
