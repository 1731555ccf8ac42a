"""Links: messages in order and exactly once, whatever happens to the socket. Ray is a thread here.

Messages that "Ray" delivers come late and in any order, as those of calls that several threads run.
"""

import contextlib
import pickle
import random
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import ray
from links import wait_for_socket

from flatweights.ray.nodes import _link
from flatweights.ray.nodes._address import Address
from flatweights.ray.nodes._connections import StreamError
from flatweights.ray.nodes._link import Link
from flatweights.ray.nodes._node_reducer import NodeReducer
from flatweights.ray.nodes._streams import Streams
from flatweights.ray.peers import _by_agent
from flatweights.ray.peers._agent import Agent
from flatweights.ray.peers._by_agent import AgentClient
from flatweights.ray.peers._platform import PLATFORM, GroupPlatform

PATIENCE = 20.0
HERE = "127.0.0.1"


class Pair:
    """Two links, and what each has got."""

    def __init__(self, seed: int = 0) -> None:
        self._ray = ThreadPoolExecutor(4)
        self._rng = random.Random(seed)
        self.got: tuple[list[Any], list[Any]] = ([], [])
        self.through_ray = [0, 0]
        self.lost: list[str] = []
        self.ended = [threading.Event(), threading.Event()]
        self.links = [self._made(0), self._made(1)]
        self.sockets: list[socket.socket] = []

    def _made(self, k: int) -> Link:
        def by_ray(number: int, message: Any) -> None:
            self.through_ray[k] += 1
            copied = pickle.loads(pickle.dumps(message))
            self._ray.submit(self._deliver, 1 - k, number, copied, self._rng.random() / 1000)

        return Link(self.got[k].append, by_ray, self.lost.append, self.ended[k].set)

    def _deliver(self, k: int, number: int, message: Any, seconds: float) -> None:
        time.sleep(seconds)
        self.links[k].receive(number, message)

    def connect(self) -> None:
        self.sockets = [*socket.socketpair()]
        for link, end in zip(self.links, self.sockets, strict=True):
            link.attach(end)

    def until(self, k: int, count: int) -> list[Any]:
        """Return what a link has got, once these are as many messages."""
        end = time.monotonic() + PATIENCE
        while len(self.got[k]) < count and time.monotonic() < end:
            time.sleep(0.001)
        time.sleep(0.01)  # more would be too many
        return self.got[k]

    def close(self) -> None:
        for link in self.links:
            link.close()
        self._ray.shutdown()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def test_messages_go_over_the_socket_in_order(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_link, "_PATIENCE", 1.0)
    monkeypatch.setattr(_link, "_TICK", 0.1)
    pair.connect()
    assert all(link.has_socket for link in pair.links)
    for i in range(300):
        pair.links[0].send(("to 1", i))
        pair.links[1].send(("to 0", i))
    assert pair.until(1, 300) == [("to 1", i) for i in range(300)]
    assert pair.until(0, 300) == [("to 0", i) for i in range(300)]
    assert not any(ended.wait(1.5) for ended in pair.ended)  # all are confirmed
    assert pair.through_ray == [0, 0]


def test_without_a_socket_they_go_through_ray_in_order(pair: Pair) -> None:
    for i in range(100):
        pair.links[0].send(i)
    assert pair.until(1, 100) == [*range(100)]
    assert pair.through_ray == [100, 0]


def test_messages_before_the_socket_and_with_references_keep_their_places(pair: Pair) -> None:
    for i in range(60):
        if i == 20:
            pair.connect()
        pair.links[0].send(i, by_ray=i % 7 == 0)
    assert pair.until(1, 60) == [*range(60)]
    assert 20 < pair.through_ray[0] < 30


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 8))]
)
def test_each_message_arrives_once_though_the_socket_breaks(seed: int) -> None:
    pair, rng = Pair(seed), random.Random(seed)
    pair.connect()

    def send(k: int) -> None:
        for i in range(400):
            pair.links[k].send((i, bytes(rng.choice((1, 100, 200_000)))))

    senders = [threading.Thread(target=send, args=(k,)) for k in range(2)]
    for sender in senders:
        sender.start()
    time.sleep(rng.random() / 50)
    with contextlib.suppress(OSError):
        pair.sockets[seed % 2].shutdown(rng.choice((socket.SHUT_RD, socket.SHUT_RDWR)))
    for sender in senders:
        sender.join()
    for k in range(2):
        assert [i for i, _ in pair.until(k, 400)] == [*range(400)]
    assert all(ended.wait(PATIENCE) for ended in pair.ended)
    assert not any(link.has_socket for link in pair.links)
    assert sum(pair.through_ray) > 0
    assert pair.lost == []
    pair.close()


def test_each_message_arrives_once_over_one_socket_after_another(pair: Pair) -> None:
    def send(k: int) -> None:
        for i in range(600):
            pair.links[k].send(i)
            time.sleep(0.0005)

    senders = [threading.Thread(target=send, args=(k,)) for k in range(2)]
    for sender in senders:
        sender.start()
    for turn in range(12):
        pair.connect()  # it ends the last one
        time.sleep(0.02)
        if turn % 3 == 0:
            pair.links[turn % 2].close()
            time.sleep(0.005)
    for sender in senders:
        sender.join()
    assert all(link.has_socket for link in pair.links)
    for k in range(2):
        assert pair.until(k, 600) == [*range(600)]
    assert pair.lost == []


def test_another_socket_is_no_end(pair: Pair) -> None:
    for i in range(5):
        pair.connect()
        pair.links[0].send(i)
    assert pair.until(1, 5) == [*range(5)]
    assert not pair.ended[0].wait(0.1)


def test_a_message_that_fails_does_not_hold_up_the_next(caplog: pytest.LogCaptureFixture) -> None:
    got: list[int] = []

    def take(message: int) -> None:
        got.append(1 // message)

    link = Link(take, failing, pytest.fail)
    for number, message in ((3, 1), (2, 0), (1, 1)):
        link.receive(number, message)
    assert got == [1, 1]
    assert "a message from another node has failed" in caplog.text


def test_a_call_that_may_not_have_come_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_by_agent, "_RECONNECT", 0.01)
    restarting = ray.exceptions.ActorUnavailableError("it is restarting", None)
    dead = ray.exceptions.ActorDiedError()
    results: list[Any] = [restarting, restarting, dead, None]
    made: list[int] = []

    def call(number: int) -> Any:
        made.append(number)
        called: Future[None] = Future()
        result = results.pop(0)
        if result is None:
            called.set_result(None)
        else:
            called.set_exception(result)
        return SimpleNamespace(future=lambda: called)

    _by_agent.call_while_alive(PLATFORM, call, 7)
    end = time.monotonic() + PATIENCE
    while len(made) < 3 and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.1)
    assert made == [7, 7, 7]  # a dead actor is not called again


@pytest.mark.parametrize(
    ("has_link", "error", "is_dead"),
    [
        (True, ray.exceptions.ActorUnavailableError("out of reach", None), False),
        (False, ray.exceptions.ActorUnavailableError("out of reach", None), True),
        (True, ray.exceptions.ActorDiedError(), True),
        (True, ray.exceptions.GetTimeoutError(), False),
    ],
)
def test_an_agent_with_a_link_may_be_out_of_reach(
    has_link: bool, error: Exception, is_dead: bool
) -> None:
    class Agentless(GroupPlatform):
        def start_agent(self, *_: Any) -> Any:
            return MagicMock()

    take = (lambda *_: None) if has_link else None
    agent = AgentClient("node", Agent, (), 1, take, Agentless())
    agent.note_failure(error)
    assert agent.is_dead is is_dead
    agent.close()


def test_what_is_not_confirmed_in_time_is_sent_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_link, "_PATIENCE", 0.1)
    monkeypatch.setattr(_link, "_TICK", 0.02)
    mine, silent = socket.socketpair()
    pair.links[0].attach(mine)
    for i in range(50):
        pair.links[0].send((i, bytes(100_000)))  # more than the socket takes
    assert [i for i, _ in pair.until(1, 50)] == [*range(50)]
    assert pair.ended[0].is_set()
    silent.close()


@pytest.mark.parametrize(
    "senders",
    [
        pytest.param((0,), id="one direction", marks=pytest.mark.slow),
        pytest.param((0, 1), id="both directions"),
    ],
)
def test_messages_that_no_socket_takes_at_once(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, senders: tuple[int, ...]
) -> None:
    monkeypatch.setattr(_link, "_TICK", 3600.0)
    pair.connect()
    big = np.random.default_rng(0).integers(0, 255, 5_000_000, np.uint8)
    for _ in range(4):
        for k in senders:
            pair.links[k].send(big)
    for k in senders:
        got = pair.until(1 - k, 4)
        assert len(got) == 4
        for one in got:
            np.testing.assert_array_equal(one, big)
    assert pair.through_ray == [0, 0]


def test_what_one_socket_did_not_take_is_not_sent_over_the_next(pair: Pair) -> None:
    full, other = socket.socketpair()
    pair.links[0].attach(full)
    pair.links[0].send(bytes(5_000_000))  # nobody reads it
    other.close()
    assert pair.ended[0].wait(PATIENCE)
    pair.ended[0].clear()
    pair.connect()
    pair.links[0].send("next")
    assert [len(one) for one in pair.until(1, 2)] == [5_000_000, 4]
    assert pair.through_ray == [1, 0]
    assert not pair.ended[0].is_set()


def test_a_message_that_cannot_be_sent_raises_and_leaves_no_gap(pair: Pair) -> None:
    pair.connect()
    pair.links[0].send("first")
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        pair.links[0].send(threading.Lock())
    pair.links[0].send("second")
    assert pair.until(1, 2) == ["first", "second"]


def failing(number: int, message: Any) -> None:
    raise MemoryError("the store is full")


def test_what_ray_does_not_take_either_is_lost_and_said() -> None:
    lost: list[str] = []
    ended = threading.Event()
    link = Link(lambda message: None, failing, lost.append, ended.set)
    with pytest.raises(MemoryError):
        link.send("without a socket")
    mine, other = socket.socketpair()
    link.attach(mine)
    link.send("never confirmed")
    other.close()
    assert ended.wait(PATIENCE)
    assert lost == ["a message was not sent: MemoryError: the store is full"]


@pytest.mark.parametrize(
    "sent",
    [struct.pack("<QQ", 1, 3) + b"\x80\x04?", b"", struct.pack("<QQ", 1, 1 << 40)],
    ids=["no pickle", "nothing", "half a frame"],
)
def test_a_peer_that_sends_something_else_ends_the_socket(pair: Pair, sent: bytes) -> None:
    mine, other = socket.socketpair()
    pair.links[0].attach(mine)
    other.sendall(sent)
    other.close()
    assert pair.ended[0].wait(PATIENCE)
    pair.links[0].send("through Ray")
    assert pair.until(1, 1) == ["through Ray"]
    assert pair.got[0] == []


@pytest.fixture
def listening() -> Iterator[Callable[[], Streams]]:
    made: list[Streams] = []

    def make() -> Streams:
        made.append(Streams(HERE))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_streams_make_the_socket(pair: Pair, listening: Callable[[], Streams]) -> None:
    one, other = listening(), listening()
    one.expect(b"e" * 16, pair.links[0].attach)
    pair.links[1].attach(other.connect(one.address, b"e" * 16, time.monotonic() + PATIENCE))
    wait_for_socket(pair.links[0])
    pair.links[0].send("to 1")
    pair.links[1].send("to 0")
    assert (pair.until(0, 1), pair.until(1, 1)) == (["to 0"], ["to 1"])
    assert pair.through_ray == [0, 0]


def test_a_process_listens_once_whichever_thread_is_first() -> None:
    for _ in range(20):
        end = NodeReducer(lambda nbytes: None, HERE)
        with ThreadPoolExecutor(4) as threads:
            made = [*threads.map(lambda _, end=end: end.address, range(4))]
        assert len({*made}) == 1
        end.close()


def test_threads_that_expect_connections_at_once_lose_none(
    listening: Callable[[], Streams], monkeypatch: pytest.MonkeyPatch
) -> None:
    streams, switches = listening(), sys.getswitchinterval()

    def expect(k: int) -> bytes:
        def take(connection: socket.socket) -> None: ...

        for number in range(3_000):
            epoch = struct.pack("=qq", k, number)
            streams.expect(epoch, take)
        return epoch

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            last = [*pool.map(expect, range(4))]
    finally:
        sys.setswitchinterval(switches)
    assert {*streams._expected} == {*last}


def test_a_process_that_is_not_expected_gets_no_socket(listening: Callable[[], Streams]) -> None:
    one, other = listening(), listening()
    taken: list[socket.socket] = []
    one.expect(b"e" * 16, taken.append)
    with pytest.raises(StreamError, match="the time is up"):
        other.connect(one.address, b"f" * 16, time.monotonic() + 0.3)
    wrong = Address(HERE, one.address.port, b"k" * 32)
    with pytest.raises(StreamError):
        other.connect(wrong, b"e" * 16, time.monotonic() + 0.3)
    assert taken == []
