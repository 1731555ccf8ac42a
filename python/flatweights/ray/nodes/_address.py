"""The addresses at which processes of several nodes listen for each other."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from typing import NamedTuple

KEY = 32
"""Bytes of a listener's key."""
HELLO = struct.Struct(f"<{KEY}s16sI")
"""Key, epoch, place of the sender."""

_VARIABLE = "FLATWEIGHTS_PORTS"
_ANY = range(1)  # the system chooses one that is free


class Address(NamedTuple):
    """The address at which a process listens, and the key that it asks for.

    Attributes:
        host: The node's address.
        port: The port.
        key: 32 random bytes of this listener.
        has_tls: Whether it expects TLS.
    """

    host: str
    port: int
    key: bytes
    has_tls: bool = False

    def __repr__(self) -> str:
        """Show the address without the key."""
        return f"Address({self.host}:{self.port})"


def chosen_ports() -> range:
    """Return the ports that ``FLATWEIGHTS_PORTS`` allows; only 0, for any port.

    Raises:
        ValueError: If it is malformed.
    """
    text = os.environ.get(_VARIABLE, "")
    if not text:
        return _ANY
    first, to, last = text.partition("-")
    with contextlib.suppress(ValueError):
        ports = range(int(first), int(last if to else first) + 1)
        if ports and ports[0] > 0 and ports[-1] < 1 << 16:
            return ports
    raise ValueError(f"{_VARIABLE}: expected ports such as 20000-20100, got {text!r}")


def family_of(host: str) -> socket.AddressFamily:
    """Return the family of an address."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def listen(host: str, ports: range) -> socket.socket:
    """Return a socket that listens on ``host`` alone, on one of ``ports``.

    Raises:
        OSError: If ``host`` is not an address of this machine, or no port is free.
        ValueError: If ``host`` stands for all addresses.
    """
    if host in ("", "0.0.0.0", "::"):
        raise ValueError(f"host: expected one address of this node, got {host!r}")
    for port in ports:
        made = socket.socket(family_of(host))
        try:
            if port:  # connections of an earlier listener may still be closing
                made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind((host, port))
            made.listen(1024)
        except OSError as error:
            made.close()
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return made
    text = f"{_VARIABLE}: no port of {ports[0]} to {ports[-1]} is free at {host}"
    raise OSError(errno.EADDRINUSE, text)
