"""Streams over TLS: the same bytes, and a line in the log for each invalid certificate."""

import contextlib
import logging
import secrets
import shutil
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest
from certificates import make_authority, make_certificate, tls_environment
from links import wait_for_socket
from stream_nodes import Nodes, await_bytes, nodes, random_bytes

from flatweights.ray.nodes._address import chosen_ports
from flatweights.ray.nodes._connections import StreamError
from flatweights.ray.nodes._link import Link
from flatweights.ray.nodes._streams import Streams

pytestmark = pytest.mark.skipif(not shutil.which("openssl"), reason="openssl makes certificates")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def good(authority: Path) -> Path:
    return make_certificate(authority, "good")


@pytest.fixture(scope="module")
def bad(authority: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    others = make_authority(tmp_path_factory.mktemp("tls") / "theirs")
    return {
        "expired": make_certificate(authority, "expired", days=-1),
        "of another authority": make_certificate(others, "theirs"),
        "of another address": make_certificate(authority, "elsewhere", "198.51.100.1"),
    }


def streams_with(certificate: Path, ports: range = range(1)) -> Streams:
    with pytest.MonkeyPatch.context() as environment:
        for name, value in tls_environment(certificate).items():
            environment.setenv(name, value)
        return Streams("127.0.0.1", ports)


@pytest.fixture
def tls(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in tls_environment(good).items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("tls")
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_each_node_receives_what_the_others_send(size: int) -> None:
    with nodes(size) as some:
        for nbytes in (0, 1, 16_384, 100_000, 3_000_001):
            some.check(nbytes)
        data = [[[random_bytes(7), random_bytes(40_000)]] * size for _ in range(size)]
        some.send_and_receive(data)
        some.check()


@pytest.mark.usefixtures("tls")
def test_nothing_passes_in_the_clear() -> None:
    """A proxy between two nodes sees neither the key nor the data."""
    seen: list[bytes] = []
    secret = b"the weights of a model" * 10

    def pass_on(source: socket.socket, target: socket.socket) -> None:
        while shard := source.recv(1 << 16):
            seen.append(shard)
            target.sendall(shard)

    with nodes(2) as some, socket.create_server(("127.0.0.1", 0)) as proxy:
        real = some.streams[1].address

        def serve() -> None:
            ours, _ = proxy.accept()
            theirs = socket.create_connection((real.host, real.port))
            with ours, theirs, ThreadPoolExecutor(2) as pool:
                pool.submit(pass_on, ours, theirs)
                pool.submit(pass_on, theirs, ours).result()

        with ThreadPoolExecutor(3) as pool:
            serving = pool.submit(serve)
            shown, epoch = real._replace(port=proxy.getsockname()[1]), secrets.token_bytes(16)
            end = time.monotonic() + 60
            first = pool.submit(
                some.streams[0].open, [some.streams[0].address, shown], 0, epoch, end
            )
            second = some.streams[1].open([some.streams[0].address, real], 1, epoch, end)
            connections, into = first.result(), np.zeros(len(secret), np.uint8)
            sending = pool.submit(connections.send_and_receive, 1, {1: [secret]}, {}, patience=60)
            second.send_and_receive(1, {}, {0: [into]}, patience=60)
            sending.result()
            connections.close()
            second.close()
            serving.result()
    assert into.tobytes() == secret
    assert len(b"".join(seen)) > 1000
    for hidden in (secret[:22], real.key, epoch):
        assert hidden not in b"".join(seen)


@pytest.mark.usefixtures("tls")
def test_close_ends_a_swap() -> None:
    with nodes(2) as some:
        swap = some.pool.submit(await_bytes, some.connections[0])
        some.connections[0].close()
        with pytest.raises(StreamError, match=r"closed|ended"):
            swap.result()


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("why", ["expired", "of another authority", "of another address", "none"])
def test_a_certificate_that_is_not_good_is_named_at_once(
    why: str, place: int, good: Path, bad: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Node 0 connects to node 1; the certificate of one of them is invalid."""
    made = [streams_with(good), streams_with(good)]
    made[place].close()
    made[place] = Streams("127.0.0.1") if why == "none" else streams_with(bad[why])
    peers, epoch = [one.address for one in made], secrets.token_bytes(16)
    if why == "of another address" and place == 0:  # it may connect from anywhere
        some = Nodes(2)
        for old in some.streams:
            old.close()
        some.streams = made
        some.open().check()
        some.close()
        return
    end = time.monotonic() + 60
    with ThreadPoolExecutor(1) as pool, caplog.at_level(logging.WARNING, "flatweights"):
        waiting = pool.submit(made[1].open, peers, 1, epoch, end)
        said = {
            "expired": r"certificate (has )?expired",
            "of another authority": r"unknown ca|self.signed certificate",
            "of another address": r"IP address mismatch",
            "none": r"use TLS, and the connecting process uses TLS|the connecting process does not",
        }[why]
        with pytest.raises(StreamError, match=said):
            made[0].open(peers, 0, epoch, end)
        made[1].break_off(epoch)
        with pytest.raises(StreamError):
            waiting.result()
        for one in made:
            one.close()
    if why != "none":
        assert "refused a connection from 127.0.0.1: TLS: " in caplog.text
    assert "Traceback" not in caplog.text


@pytest.mark.usefixtures("tls")
def test_a_stranger_without_a_certificate_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    with nodes(2) as some:
        address = some.streams[1].address
        for data in (address.key + bytes(20), b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01"):
            with socket.create_connection((address.host, address.port), 60) as stranger:
                stranger.sendall(data)
                with contextlib.suppress(OSError):  # it may be closed already
                    stranger.shutdown(socket.SHUT_WR)
                    while stranger.recv(1000):
                        pass
        some.check()
    assert "TLS: " in caplog.text
    assert address.key.hex() not in caplog.text


@pytest.mark.usefixtures("tls")
@pytest.mark.parametrize("name", ["RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT"])
def test_a_file_that_is_not_there_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, str(tmp_path / "nowhere"))
    with pytest.raises(OSError, match="nowhere"):
        Streams("127.0.0.1")
    monkeypatch.delenv(name)
    with pytest.raises(OSError, match=f"RAY_USE_TLS is set, and {name} is not"):
        Streams("127.0.0.1")


# Ports


def free_ports(count: int) -> range:
    """Return ports, of which the first is free, and the others most likely, too."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        first: int = one.getsockname()[1]
    return range(min(first, 65000), min(first, 65000) + count)


def test_streams_listen_on_the_ports_that_are_allowed() -> None:
    ports = free_ports(100)
    made = [Streams("127.0.0.1", ports) for _ in range(3)]
    used = [one.address.port for one in made]
    assert len({*used}) == 3
    assert {*used} <= {*ports}
    for one in made:
        one.close()
    kept = Streams("127.0.0.1", ports[:1])
    with pytest.raises(OSError, match=r"FLATWEIGHTS_PORTS: no port of .* is free"):
        Streams("127.0.0.1", ports[:1])
    kept.close()


def test_a_port_serves_again_while_old_connections_end() -> None:
    ports = free_ports(1)
    with nodes(2) as some:
        for _ in range(3):
            some.streams[1].close()  # this end closes first, so its port stays in use for a while
            some.streams[1] = Streams("127.0.0.1", ports)
            some.open()
            some.number = 0
            some.check()


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", range(1)), ("20000-20100", range(20000, 20101)), ("20000", range(20000, 20001))],
)
def test_ports_are_chosen(text: str, expected: range, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLATWEIGHTS_PORTS", text)
    assert chosen_ports() == expected


@pytest.mark.parametrize("text", ["x", "1-", "-5", "20100-20000", "0-5", "65000-70000", "1,2"])
def test_malformed_ports_are_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLATWEIGHTS_PORTS", text)
    with pytest.raises(ValueError, match="FLATWEIGHTS_PORTS: expected ports such as 20000-20100"):
        chosen_ports()


def test_links_take_messages_over_tls(good: Path) -> None:
    ends = [streams_with(good) for _ in range(2)]
    through_ray: list[int] = []
    got: list[SimpleQueue[bytes]] = [SimpleQueue(), SimpleQueue()]

    def by_ray(number: int, message: bytes) -> None:
        through_ray.append(number)

    links = [Link(one.put, by_ray, pytest.fail) for one in got]
    ends[0].expect(b"e" * 16, links[0].attach)
    links[1].attach(ends[1].connect(ends[0].address, b"e" * 16, time.monotonic() + 60))
    wait_for_socket(links[0])
    sent = [
        secrets.token_bytes(nbytes) for nbytes in (10, 16_384, 3_000_001, 0, 100_000, 1_000_000)
    ]
    for message in sent:
        for link in links:
            link.send(message)
    for queue in got:
        assert [queue.get(timeout=60) for _ in sent] == sent
    assert through_ray == []
    for link in links:
        link.close()
    for end in ends:
        end.close()
