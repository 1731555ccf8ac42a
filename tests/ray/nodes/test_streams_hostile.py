"""Strangers, dead peers, forks and interrupts have no effect on streams, or an immediate error."""

import collections
import contextlib
import errno
import gc
import logging
import multiprocessing
import os
import pickle
import resource
import secrets
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from stream_nodes import await_bytes, errors, nodes

from flatweights.ray.nodes import _streams
from flatweights.ray.nodes._address import Address
from flatweights.ray.nodes._connections import StreamError
from flatweights.ray.nodes._streams import Streams
from flatweights.ray.support import _listener

Attack = Callable[[Address, bytes], list[socket.socket]]


def connect(address: Address) -> socket.socket:
    connection = socket.create_connection((address.host, address.port), 60)
    connection.settimeout(60)
    return connection


def send(address: Address, data: bytes) -> list[socket.socket]:
    connection = connect(address)
    connection.sendall(data)
    return [connection]


def hello(key: bytes, epoch: bytes, place: int) -> bytes:
    return key + epoch + struct.pack("<I", place)


def scan(address: Address, epoch: bytes) -> list[socket.socket]:
    """A port scan: connect, and disconnect."""
    for _ in range(20):
        connect(address).close()
    return []


def reset(address: Address, epoch: bytes) -> list[socket.socket]:
    """Connect, and disconnect with a reset."""
    for _ in range(20):
        connection = connect(address)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    return []


def random_bytes(address: Address, _: bytes) -> list[socket.socket]:
    return [send(address, secrets.token_bytes(count))[0] for count in (32, 33, 52, 10_000) * 3]


def wrong_key(address: Address, epoch: bytes) -> list[socket.socket]:
    return [send(address, hello(bytes(32), epoch, 0))[0] for _ in range(3)]


def place_that_does_not_connect(address: Address, epoch: bytes) -> list[socket.socket]:
    return [send(address, hello(address.key, epoch, k))[0] for k in (2, 3, 4_000_000_000)]


def place_of_another(address: Address, epoch: bytes) -> list[socket.socket]:
    return [send(address, hello(address.key, epoch, k))[0] for k in (0, 1)]


def slow_hello(address: Address, _: bytes) -> list[socket.socket]:
    return send(address, address.key[:31])


def many(address: Address, _: bytes) -> list[socket.socket]:
    """A thousand connections at once."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    return [connect(address) for _ in range(1000)]


@pytest.mark.parametrize(
    ("attack", "reason"),
    [
        (scan, "closed before a hello"),
        (reset, "closed before a hello"),
        (random_bytes, "a wrong key"),
        (wrong_key, "a wrong key"),
        (place_that_does_not_connect, "a place that does not connect to this one"),
        (place_of_another, "a place that is connected"),
        (slow_hello, "no hello in time"),
        (many, "too many connections without a hello"),
    ],
)
def test_strangers_are_refused_and_have_no_effect(
    attack: Attack,
    reason: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if attack in (slow_hello, many):
        monkeypatch.setattr(_listener, "_HELLO_TIME", 0.5)
    epoch = secrets.token_bytes(16)
    with nodes(3) as some, caplog.at_level(logging.WARNING, "flatweights"):
        some.open(epoch)
        caplog.clear()
        some.check()
        address = some.streams[2].address
        held = attack(address, epoch)
        some.check(300_000)
        for connection in held:  # each is closed
            with contextlib.suppress(ConnectionResetError):
                while connection.recv(1000):
                    pass
            connection.close()
        some.check()
        while not caplog.records:  # the last one was not waited for
            time.sleep(0.01)
        some.open()
        some.check()
        some.streams[2].close()
        told = [record.getMessage() for record in caplog.records]
        assert sum(reason in text for text in told) == 1
        assert len(told) == len({*told})
        assert all(f"{address.host}:{address.port}" in text for text in told)
        assert address.key.hex() not in "".join(told)


def test_a_slow_stranger_does_not_hold_up_a_peer() -> None:
    with nodes(2) as some:
        with contextlib.ExitStack() as stack:
            for streams in some.streams:
                for connection in send(streams.address, streams.address.key[:5]):
                    stack.enter_context(connection)
            some.open()
        some.check()


def test_a_peer_that_is_early_or_late_is_no_stranger(caplog: pytest.LogCaptureFixture) -> None:
    past, epoch, next_one = (secrets.token_bytes(16) for _ in range(3))
    with nodes(2) as some, caplog.at_level(logging.WARNING, "flatweights"):
        some.open(past)
        some.open(epoch)
        address = some.streams[1].address
        for other in (past, next_one):
            (connection,) = send(address, hello(address.key, other, 0))
            assert connection.recv(1) == b""
            connection.close()
        some.check()
        assert not caplog.records


def test_a_peer_whose_connection_is_closed_comes_again() -> None:
    """Strangers may have pushed it out, or the other end has not opened the epoch yet."""
    streams, key, epoch = Streams("127.0.0.1"), secrets.token_bytes(32), secrets.token_bytes(16)
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        peers = [streams.address, Address("127.0.0.1", server.getsockname()[1], key)]
        opened = pool.submit(streams.open, peers, 0, epoch, time.monotonic() + 60)
        for is_last in (False, False, True):
            connection, _ = server.accept()
            with connection:
                assert connection.recv(52, socket.MSG_WAITALL) == hello(key, epoch, 0)
                if is_last:
                    connection.sendall(epoch)
                    assert not opened.result().is_closed
    streams.close()


def test_the_key_is_not_shown() -> None:
    streams = Streams("127.0.0.1")
    streams.close()
    assert repr(streams.address) == f"Address(127.0.0.1:{streams.address.port})"


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])
def test_all_addresses_are_refused(host: str) -> None:
    with pytest.raises(ValueError, match="expected one address"):
        Streams(host)


def test_a_frame_of_another_length_is_refused_before_it_is_read() -> None:
    """A peer with the right key is not a stranger, but its data are checked."""
    streams = Streams("127.0.0.1")
    epoch, target = secrets.token_bytes(16), np.zeros(100, np.uint8)
    peers = [Address("127.0.0.1", 1, bytes(32)), streams.address]
    pool = ThreadPoolExecutor(1)
    opened = pool.submit(streams.open, peers, 1, epoch, time.monotonic() + 60)
    answer = b""
    while answer != epoch:
        (peer,) = send(streams.address, hello(streams.address.key, epoch, 0))
        answer = peer.recv(16)
    try:
        connections = opened.result()
        peer.sendall(struct.pack("<QQ", 7, 1 << 40) + bytes([1]) * 1000)
        with pytest.raises(
            StreamError, match=r"peer 0: .*100 bytes; got exchange 7, 1099511627776"
        ):
            connections.send_and_receive(7, {}, {0: [target]}, patience=60)
        assert not target.any()
        assert connections.is_closed
    finally:
        peer.close()
        streams.close()
        pool.shutdown()


# Peers that die or stall


def _peer(pipe: Connection, me: int, size: int) -> None:
    """A node in a process of its own: opens its connections, and swaps until it is killed."""
    streams = Streams("127.0.0.1")
    pipe.send(streams.address)
    peers, epoch = pipe.recv()
    connections = streams.open(peers, me, epoch, time.monotonic() + 30)
    for number in range(1_000_000):
        one = np.zeros(1_000_000, np.uint8)
        others = [place for place in range(size) if place != me]
        into = {place: [np.empty_like(one)] for place in others}
        connections.send_and_receive(number, {place: [one] for place in others}, into, patience=30)
        if number == 3:
            pipe.send("swapping")


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_dies_or_stops_is_an_error_of_its_peers(stop: signal.Signals) -> None:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=_peer, args=(there, 1, 2), daemon=True)
    process.start()
    streams = Streams("127.0.0.1")
    try:
        peers, epoch = [streams.address, here.recv()], secrets.token_bytes(16)
        here.send((peers, epoch))
        connections = streams.open(peers, 0, epoch, time.monotonic() + 30)
        one, into = np.zeros(1_000_000, np.uint8), np.empty(1_000_000, np.uint8)
        patience = 30.0

        def swap(number: int) -> None:
            connections.send_and_receive(number, {1: [one]}, {1: [into]}, patience=patience)

        for number in range(10):
            swap(number)
        assert process.pid is not None
        os.kill(process.pid, stop)
        if stop is signal.SIGSTOP:
            patience = 0.5
        began = time.monotonic()
        with pytest.raises(StreamError, match="peer 1") as caught:
            collections.deque(map(swap, range(10, 1_000_000)), maxlen=0)
        assert time.monotonic() - began < 25  # not by patience, if it is dead
        assert isinstance(caught.value.__cause__, TimeoutError) == (stop is signal.SIGSTOP)
        assert connections.is_closed
    finally:
        streams.close()
        process.kill()
        process.join()
        here.close()
        there.close()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_has_no_part_in_the_links() -> None:
    with nodes(2) as some:
        some.check()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with pytest.raises(StreamError, match="parent"):
                    some.connections[0].send_and_receive(5, {}, {}, patience=1)
                peers = [streams.address for streams in some.streams]
                with pytest.raises(StreamError, match="closed"):
                    some.streams[0].open(peers, 0, secrets.token_bytes(16))
                for streams in some.streams:
                    streams.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        some.check()  # the child has ended nothing


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_that_lives_on_keeps_no_connection_open() -> None:
    with nodes(2) as some:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.read(read, 1)
            os._exit(0)
        try:
            some.connections[0].close()
            with pytest.raises(StreamError, match="closed the stream"):
                await_bytes(some.connections[1])
            address = some.streams[0].address
            some.streams[0].close()
            with pytest.raises(ConnectionRefusedError):
                connect(address)
        finally:
            os.write(write, b"x")
            os.waitpid(child, 0)
            os.close(read)
            os.close(write)


def test_a_node_without_descriptors_says_so_and_accepts_once_it_has_some(
    caplog: pytest.LogCaptureFixture,
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with nodes(2) as some, socket.socket() as stranger:
        address = some.streams[0].address
        lowest_free = os.dup(stranger.fileno())
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
        try:
            stranger.connect((address.host, address.port))
            while not any("cannot accept connections" in text for text in caplog.messages):
                time.sleep(0.01)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        stranger.settimeout(60)
        stranger.sendall(bytes(32))
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b"", "it is heard, and refused for its key"
        some.check()
    assert os.strerror(errno.EMFILE) in caplog.text
    assert "a wrong key" in caplog.text


def test_a_node_without_descriptors_cannot_connect_and_says_so() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with nodes(2) as some, socket.socket() as last:
        first, second = some.streams
        lowest_free = os.dup(last.fileno())
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
        try:
            with pytest.raises(StreamError, match=r"cannot connect to .*Too many open files"):
                first.connect(second.address, secrets.token_bytes(16), time.monotonic() + 60)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        some.check()


def test_the_address_of_another_machine_is_refused_and_leaves_no_socket() -> None:
    gc.collect()
    before = len([*Path("/proc/self/fd").iterdir()])
    with pytest.raises(OSError, match=os.strerror(errno.EADDRNOTAVAIL)):
        Streams("198.51.100.1")
    assert len([*Path("/proc/self/fd").iterdir()]) == before


@pytest.mark.parametrize(
    ("answer", "reason"),
    [(b"", "it has not answered in time"), (b"another epoch...", "a wrong answer")],
)
def test_a_peer_that_answers_late_or_wrongly_is_named(
    answer: bytes, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds_left = iter([60, 60 if answer else 0.1])  # to connect, and for the answer
    monkeypatch.setattr(_streams, "_left", lambda end: next(seconds_left))
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor() as pool:
        server.settimeout(60)

        def accept() -> socket.socket:
            connection, _ = server.accept()
            connection.sendall(answer)
            return connection

        accepted = pool.submit(accept)
        streams = Streams("127.0.0.1")
        peers = [streams.address, Address("127.0.0.1", server.getsockname()[1], bytes(32))]
        try:
            with pytest.raises(StreamError, match=f"peer 1: {reason}") as caught:
                streams.open(peers, 0, secrets.token_bytes(16), time.monotonic() + 60)
        finally:
            streams.close()
            accepted.result().close()
    again = pickle.loads(pickle.dumps(caught.value))  # agents tell the driver
    assert (str(again), again.peer, again.reason) == (str(caught.value), 1, reason)


def test_links_are_used_by_one_thread_at_a_time() -> None:
    with nodes(2) as some:
        waiting = some.pool.submit(await_bytes, some.connections[0])
        while not some.connections[0]._is_used:
            time.sleep(0.001)
        with pytest.raises(RuntimeError, match="another thread uses these connections"):
            await_bytes(some.connections[0])
        some.connections[1].close()
        with pytest.raises(StreamError, match="peer 1: it closed the stream"):
            waiting.result()


def test_descriptors_and_threads_are_gone_after_close() -> None:
    def count() -> tuple[int, int]:
        return len([*Path("/proc/self/fd").iterdir()]), threading.active_count()

    gc.collect()  # what other tests have left is closed before it is counted
    before = count()
    for _ in range(3):
        with nodes(4) as some:
            some.check()
            some.open()
            some.check()
            with pytest.raises(StreamError):
                await_bytes(some.connections[0], patience=0.05)
            strangers = [connect(streams.address) for streams in some.streams]
        for stranger in strangers:
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
            stranger.close()
    assert count() == before


def test_an_interrupt_ends_a_swap_and_those_of_its_peers() -> None:
    assert threading.current_thread() is threading.main_thread()
    with nodes(3) as some:
        others = [
            some.pool.submit(await_bytes, connections) for connections in some.connections[1:]
        ]

        def interrupt() -> Iterator[bytes]:
            os.kill(os.getpid(), signal.SIGINT)
            yield b""

        with pytest.raises(KeyboardInterrupt):
            some.connections[0].send_and_receive(
                0, {1: interrupt()}, {1: [bytearray(1)]}, patience=30
            )
        assert some.connections[0].is_closed
        errors([future.exception() for future in others])
        some.open()
        some.number = 0
        some.check()


def test_a_peer_that_cannot_be_reached_is_named() -> None:
    gone, streams = Streams("127.0.0.1"), Streams("127.0.0.1")
    gone.close()
    try:
        with pytest.raises(StreamError, match="peer 1: cannot connect") as caught:
            streams.open([streams.address, gone.address], 0, secrets.token_bytes(16))
        assert caught.value.peer == 1
        peers = [gone.address, streams.address]
        with pytest.raises(StreamError, match="peer 0: it has not connected in time"):
            streams.open(peers, 1, secrets.token_bytes(16), time.monotonic() + 0.1)
    finally:
        streams.close()


def test_an_epoch_is_used_once() -> None:
    epoch = secrets.token_bytes(16)
    with nodes(2) as some:
        some.open(epoch)
        some.connections[0].close()
        peers = [streams.address for streams in some.streams]
        with pytest.raises(ValueError, match="its connections have ended; choose another one"):
            some.streams[0].open(peers, 0, epoch)
        with pytest.raises(ValueError, match="expected 16 bytes, got 3"):
            some.streams[0].open(peers, 0, b"abc")
        with pytest.raises(ValueError, match="peers: expected"):
            some.streams[0].open(peers, 1, epoch)
