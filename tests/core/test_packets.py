"""`_core.receive_packet`: packets of a socket, whose descriptors are closed with what has them."""

import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from flatweights import _core

Pair = tuple[socket.socket, socket.socket]

pytestmark = pytest.mark.skipif(os.uname().sysname != "Linux", reason="Linux's sockets")


def is_open(descriptor: int) -> bool:
    return Path(f"/proc/self/fd/{descriptor}").exists()


@pytest.fixture
def pair() -> Iterator[Pair]:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        yield here, there


def test_descriptors_are_closed_with_their_object(pair: Pair) -> None:
    here, there = pair
    socket.send_fds(there, [b"packet"], [here.fileno(), there.fileno()])
    received = _core.receive_packet(here.fileno(), 512)
    assert received is not None
    body, descriptors, are_short = received
    numbers = descriptors.numbers
    assert (body, len(numbers), are_short) == (b"packet", 2, False)
    assert all(map(is_open, numbers))
    assert not any(map(os.get_inheritable, numbers))
    del received, descriptors
    assert not any(map(is_open, numbers))
    socket.send_fds(there, [b"packet"], [here.fileno()])
    received = _core.receive_packet(here.fileno(), 512)
    assert received is not None
    numbers = received[1].numbers
    received[1].close()
    assert not any(map(is_open, numbers))
    assert received[1].numbers == []


def test_without_a_packet_it_does_not_wait(pair: Pair) -> None:
    assert _core.receive_packet(pair[0].fileno(), 512) is None


def test_the_end_is_an_empty_packet_and_errors_are_those_of_the_system(pair: Pair) -> None:
    here, there = pair
    there.close()
    received = _core.receive_packet(here.fileno(), 512)
    assert received is not None
    assert (received[0], len(received[1].numbers), received[2]) == (b"", 0, False)
    with pytest.raises(OSError, match="Bad file descriptor"):
        _core.receive_packet(-1, 512)


def test_a_peer_that_has_left_packets_unread_is_an_error_of_its_own_class(pair: Pair) -> None:
    here, there = pair
    here.send(b"unread")
    there.close()
    with pytest.raises(ConnectionResetError):
        _core.receive_packet(here.fileno(), 512)


def test_a_process_without_free_descriptors_is_told_so_and_leaks_none(pair: Pair) -> None:
    here, there = pair
    socket.send_fds(there, [b"packet"], [here.fileno()] * 3)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = [os.dup(0) for _ in range(2)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(free), hard))
    os.close(free[0])  # one descriptor is free
    try:
        received = _core.receive_packet(here.fileno(), 512)
        assert received is not None
        body, descriptors, are_short = received
        assert (body, are_short) == (b"packet", True)
        del received, descriptors
        free[0] = os.dup(0)  # it is free again
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for number in free:
            os.close(number)
