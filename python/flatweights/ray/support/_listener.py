"""A listener: it lets peers connect, and refuses other processes.

A thread accepts each connection at once, so nobody can fill the queue of waiting connections. It
then makes the handshake: it reads, without waiting, the hello of a peer. After that, the connection
belongs to a peer. Until then it is pending: few are kept, each is refused in time, and each kind of
refusal is logged once. The thread does nothing else, and sleeps while nobody connects.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
from collections.abc import Callable, Iterator

from flatweights._forks import in_forks
from flatweights.ray import _clock

_MOST_PENDING = 64  # connections that have not made their handshake yet
_PAUSE = 0.05  # seconds until the next attempt to accept
_HELLO_TIME = 5.0  # seconds that a connection has for its hello

_log = logging.getLogger("flatweights")


class RefusedError(Exception):
    """The reason for which a connection is not that of a peer."""


class PendingConnection:
    """A connection that is being greeted.

    Attributes:
        connection: The socket; the function that greets may replace it by a socket over it, for
            TLS.
        events: The events of `select.poll` that the handshake waits for.
    """

    def __init__(self, connection: socket.socket, who: str) -> None:
        """Take a connection from ``who``."""
        self.connection = connection
        self.who = who
        self.events = select.POLLIN
        self.end = _clock.now() + _HELLO_TIME
        self.handshake: Iterator[int] = iter(())


class Listener:
    """Accepts the connections of peers, and refuses all others."""

    def __init__(
        self,
        listening: socket.socket,
        name: str,
        shake_hands: Callable[[PendingConnection], Iterator[int]],
    ) -> None:
        """Begin to accept connections.

        Args:
            listening: A socket that listens; it is closed at the end.
            name: The name of the listener, and perhaps its address, for the log.
            shake_hands: Makes the handshake of a pending connection in steps; yields the events of
                `select.poll` that each of them waits for. At its end, it has taken the connection
                over. The listener closes the connection if it raises `RefusedError`, or an
                `OSError` because the connection broke.
        """
        self._socket = closed_in_forks(listening)
        self._socket.setblocking(False)
        self._name = name
        self._shake_hands = shake_hands
        self._pending: dict[int, PendingConnection] = {}
        self._told: set[str] = set()
        self._is_closing = False
        thread = f"flatweights-{name.split()[0]}"
        self._thread = threading.Thread(target=self._run, name=thread, daemon=True)
        self._thread.start()

    @property
    def is_closed(self) -> bool:
        """Whether nobody can connect any more, as in a forked process."""
        return self._socket.fileno() < 0

    def close(self) -> None:
        """Refuse all pending connections, and wait for the thread."""
        self._is_closing = True
        shut(self._socket)  # wakes the thread
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._serve()
        finally:
            for pending in self._pending.values():
                pending.connection.close()
            self._socket.close()

    def _serve(self) -> None:
        """Wait for connections, for their hellos, and for the ends of their time."""
        poll = select.poll()
        poll.register(self._socket.fileno(), select.POLLIN)
        for descriptor, pending in self._pending.items():
            poll.register(descriptor, pending.events)
        ends = [pending.end for pending in self._pending.values()]
        for descriptor, _ in poll.poll(milliseconds(min(ends, default=None))):
            if descriptor in self._pending:
                self._go_on(descriptor)
            else:
                self._accept()
        now = _clock.now()
        for descriptor, pending in list(self._pending.items()):
            if pending.end <= now:
                self._refuse(descriptor, "no hello in time")

    def _accept(self) -> None:
        try:
            connection, address = self._socket.accept()
        except OSError as error:  # closed, gone again, or no descriptors are left
            if not self._is_closing and not isinstance(error, (BlockingIOError, ConnectionError)):
                self._warn_once("error", f"cannot accept connections: {error}")
                _clock.sleep(_PAUSE)
            return
        closed_in_forks(connection).setblocking(False)
        if len(self._pending) >= _MOST_PENDING:
            self._refuse(next(iter(self._pending)), "too many connections without a hello")
        pending = PendingConnection(connection, address[0] if address else "another process")
        pending.handshake = self._shake_hands(pending)
        descriptor = connection.fileno()
        self._pending[descriptor] = pending
        self._go_on(descriptor)

    def _go_on(self, descriptor: int) -> None:
        """Make the handshake with a pending connection, as far as possible without waiting."""
        pending = self._pending[descriptor]
        try:
            pending.events = next(pending.handshake)
        except StopIteration:
            del self._pending[descriptor]
        except RefusedError as error:
            self._refuse(descriptor, str(error))
        except OSError:
            self._refuse(descriptor, "closed before a hello")

    def _refuse(self, descriptor: int, reason: str) -> None:
        """Close a connection, and log the reason."""
        pending = self._pending.pop(descriptor)
        pending.connection.close()
        self._warn_once(reason, f"refused a connection from {pending.who}: {reason}")

    def _warn_once(self, kind: str, text: str) -> None:
        """Log ``text``, unless one of its kind was logged before."""
        if kind not in self._told:
            self._told.add(kind)
            _log.warning("%s: %s", self._name, text)


def milliseconds(end: float | None) -> int | None:
    """Return the milliseconds until ``end``, rounded up, for `select.poll`."""
    return None if end is None else max(0, int((end - _clock.now()) * 1000) + 1)


def shut(connection: socket.socket) -> None:
    """End a connection for all processes that have the socket, and for its peer."""
    with contextlib.suppress(OSError):
        # Not the method of a TLS socket: after it, another thread would read encrypted bytes.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def closed_in_forks(connection: socket.socket) -> socket.socket:
    """Close the copies of a socket in forks of this process; return the socket."""
    return in_forks(connection, socket.socket.close)
