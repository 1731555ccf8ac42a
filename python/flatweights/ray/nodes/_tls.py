"""TLS between nodes, with the certificates that Ray is configured with; both ends are verified."""

from __future__ import annotations

import os
import select
import socket
import ssl
from collections.abc import Iterator
from typing import NamedTuple

from flatweights.ray.support._listener import PendingConnection, RefusedError, closed_in_forks

_FILES = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")
_VERIFIED = b"!"  # with TLS 1.3, only this tells a client that its certificate is accepted


class Tls(NamedTuple):
    """The settings of both ends of a connection.

    Attributes:
        accepts: The settings of the end that listens.
        connects: The settings of the end that connects.
    """

    accepts: ssl.SSLContext
    connects: ssl.SSLContext

    @classmethod
    def of_ray(cls) -> Tls | None:
        """Return the settings of Ray; None if it does not use TLS.

        Raises:
            OSError: If a file cannot be used, or no file is given.
        """
        if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
            return None
        if missing := [name for name in _FILES if not os.environ.get(name)]:
            raise OSError(f"RAY_USE_TLS is set, and {', '.join(missing)} is not")
        certificate, key, authority = (os.environ[name] for name in _FILES)
        made = []
        for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
            context = ssl.SSLContext(protocol)
            context.verify_mode = ssl.CERT_REQUIRED
            try:
                context.load_cert_chain(certificate, key)
                context.load_verify_locations(authority)
            except OSError as error:
                raise OSError(f"TLS: {certificate}, {key}, {authority}: {error}") from error
            made.append(context)
        return cls(*made)

    def shake_hands(self, pending: PendingConnection) -> Iterator[int]:
        """Accept a connection in steps, as `Listener` does."""
        pending.connection = secure = self.accepts.wrap_socket(
            pending.connection, server_side=True, do_handshake_on_connect=False
        )
        closed_in_forks(secure)
        while True:
            try:
                secure.do_handshake()
                break
            except ssl.SSLWantReadError:
                yield select.POLLIN
            except ssl.SSLWantWriteError:
                yield select.POLLOUT
            except ssl.SSLError as error:
                raise RefusedError(f"TLS: {error}") from None
        secure.send(_VERIFIED)

    def connect(self, connection: socket.socket, host: str) -> socket.socket:
        """Return a connection over ``connection``, before the handshake.

        Args:
            connection: A blocking socket, connected.
            host: The address that the other end's certificate has to have.
        """
        made = self.connects.wrap_socket(
            connection, server_hostname=host, do_handshake_on_connect=False
        )
        return closed_in_forks(made)


def shake_hands(connection: socket.socket) -> bool:
    """Verify both ends of a connection; return False if the other end has closed it.

    Raises:
        ssl.SSLError: If one end does not accept the other's certificate.
    """
    assert isinstance(connection, ssl.SSLSocket)
    connection.do_handshake()
    return connection.recv(1) == _VERIFIED
