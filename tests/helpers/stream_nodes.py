"""Several nodes in this process, whose connections are real sockets."""

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from flatweights.ray.nodes._connections import NodeConnections, StreamError
from flatweights.ray.nodes._streams import Streams

Bytes = NDArray[np.uint8]


class Nodes:
    """Several nodes in this process."""

    def __init__(self, size: int) -> None:
        self.streams = [Streams("127.0.0.1") for _ in range(size)]
        self.pool = ThreadPoolExecutor(size)
        self.connections: list[NodeConnections] = []
        self.number = 0

    def together(self, call: Callable[[int], object]) -> list[object]:
        """Call for all nodes at once; return results or exceptions."""
        futures = [self.pool.submit(call, place) for place in range(len(self.streams))]
        return [future.exception() or future.result() for future in futures]

    def open(self, epoch: bytes | None = None) -> "Nodes":
        peers = [streams.address for streams in self.streams]
        epoch = epoch or secrets.token_bytes(16)
        connections = self.together(
            lambda place: self.streams[place].open(peers, place, epoch, time.monotonic() + 60)
        )
        self.connections = [each for each in connections if isinstance(each, NodeConnections)]
        assert len(self.connections) == len(connections), connections
        return self

    def send_and_receive(
        self, data: Sequence[Sequence[Sequence[Bytes]]], patience: float = 60
    ) -> list[object]:
        """Send ``data[i][j]`` from node i to node j; return by node what it received, by peer."""
        size, number = len(self.streams), self.number
        self.number += 1

        def swap_at(me: int) -> object:
            others = [place for place in range(size) if place != me]
            into = {place: [np.zeros_like(each) for each in data[place][me]] for place in others}
            sends = {place: data[me][place] for place in others}
            self.connections[me].send_and_receive(number, sends, into, patience=patience)
            return into

        return self.together(swap_at)

    def check(self, nbytes: int = 10_000) -> None:
        """Check the result of a swap."""
        size = len(self.streams)
        data = [[[random_bytes(nbytes)] for _ in range(size)] for _ in range(size)]
        assert_received(data, self.send_and_receive(data))

    def close(self) -> None:
        for streams in self.streams:
            streams.close()
        self.pool.shutdown()


def random_bytes(nbytes: int) -> Bytes:
    return np.frombuffer(secrets.token_bytes(nbytes), np.uint8)


def assert_received(data: Sequence[Sequence[Sequence[Bytes]]], received: list[object]) -> None:
    for me, into in enumerate(received):
        assert isinstance(into, dict), into
        for place, buffers in into.items():
            for got, sent in zip(buffers, data[place][me], strict=True):
                np.testing.assert_array_equal(got, sent)


@contextlib.contextmanager
def nodes(size: int) -> Iterator[Nodes]:
    made = Nodes(size)
    try:
        yield made.open()
    finally:
        made.close()


def errors(outcomes: list[object]) -> list[StreamError]:
    assert all(isinstance(each, StreamError) for each in outcomes), outcomes
    return [each for each in outcomes if isinstance(each, StreamError)]


def await_bytes(
    connections: NodeConnections, patience: float = 60, end: float | None = None
) -> None:
    """Wait for bytes from all peers that send none."""
    into = {
        place: [np.zeros(1, np.uint8)]
        for place in range(connections.size)
        if place != connections.me
    }
    connections.send_and_receive(0, {}, into, patience=patience, end=end)
