import secrets
import socket
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from stream_nodes import assert_received, await_bytes, errors, nodes, random_bytes

from flatweights.ray.nodes._connections import StreamError, set_up
from flatweights.ray.nodes._streams import Streams


@settings(max_examples=5)
@given(st.integers(2, 5), st.integers(1, 3), st.data())
def test_each_node_receives_what_the_others_send(
    size: int, swaps: int, draw: st.DataObject
) -> None:
    lengths = st.lists(st.sampled_from([0, 1, 7, 1000, 300_000, 1_000_001]), max_size=3)
    with nodes(size) as some:
        for _ in range(swaps):
            data = [
                [[random_bytes(count) for count in draw.draw(lengths)] for _ in range(size)]
                for _ in range(size)
            ]
            assert_received(data, some.send_and_receive(data))


def test_a_peer_may_have_nothing_to_send() -> None:
    with nodes(3) as some:
        outcomes = some.together(
            lambda me: some.connections[me].send_and_receive(0, {}, {}, patience=60)
        )
        assert outcomes == [(0, 0)] * 3
        some.number = 1
        some.check()


def test_the_same_epoch_has_the_same_links() -> None:
    epoch = secrets.token_bytes(16)
    with nodes(3) as some:
        before = some.open(epoch).connections
        assert all(a is b for a, b in zip(before, some.open(epoch).connections, strict=True))
        after = some.open().connections
        assert all(connections.is_closed for connections in before)
        assert not any(connections.is_closed for connections in after)
        some.check()


@pytest.mark.parametrize(("number", "length"), [(0, 99), (1, 100)])
def test_another_number_or_length_than_expected_names_the_peer(number: int, length: int) -> None:
    with nodes(2) as some:

        def swap(me: int) -> None:
            if me == 0:
                sends = {1: [np.zeros(100, np.uint8)]}
                some.connections[0].send_and_receive(0, sends, {}, patience=60)
            else:
                some.connections[1].send_and_receive(
                    number, {}, {0: [np.zeros(length, np.uint8)]}, patience=60
                )

        _, outcome = some.together(swap)
        assert isinstance(outcome, StreamError)
        assert outcome.peer == 0
        text = f"expected exchange {number}, {length} bytes; got exchange 0, 100 bytes"
        assert text in str(outcome)


def test_a_peer_that_stalls_is_named() -> None:
    with nodes(3) as some:

        def swap(me: int) -> None:
            if me != 2:
                one = np.zeros(1, np.uint8)
                sends = {1 - me: [one]}
                into = {place: [one.copy()] for place in (1 - me, 2)}
                some.connections[me].send_and_receive(0, sends, into, patience=0.2)

        first, second, _ = some.together(swap)
        assert 2 in {error.peer for error in errors([first, second])}


def test_the_time_of_a_swap_may_be_up() -> None:
    with nodes(2) as some:
        with pytest.raises(StreamError, match="peer 1: the time is up") as caught:
            await_bytes(some.connections[0], end=time.monotonic() + 0.1)
        assert isinstance(caught.value.__cause__, TimeoutError)
        with pytest.raises(StreamError, match="peer 0: it closed the stream"):
            await_bytes(some.connections[1])


def test_close_ends_a_swap() -> None:
    with nodes(2) as some:
        swap = some.pool.submit(await_bytes, some.connections[0])
        some.connections[0].close()
        with pytest.raises(StreamError, match=r"closed|ended"):
            swap.result()


def test_closed_streams_open_nothing() -> None:
    streams, epoch = Streams("127.0.0.1"), secrets.token_bytes(16)
    streams.close()
    with pytest.raises(StreamError, match="the streams are closed"):
        streams.open([streams.address], 0, epoch)
    with pytest.raises(ValueError, match="its connections have ended"):
        streams.open([streams.address], 0, epoch)


def test_streams_share_queues_without_bbr() -> None:
    with socket.socket() as one:
        try:
            for name in (b"cubic", b"bbr"):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
        except OSError:
            pytest.skip("this system has but one congestion control")
        set_up(one)
        name = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        assert name.rstrip(b"\0") == b"cubic"
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")  # another choice is kept
        set_up(one)
        name = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        assert name.rstrip(b"\0") == b"reno"


def test_nothing_listens_after_close() -> None:
    streams = Streams("127.0.0.1")
    streams.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((streams.address.host, streams.address.port))


def test_what_goes_may_depend_on_what_came() -> None:
    """An allreduce in one swap: a block's sum is sent once the block has come from all."""
    size, blocks, nbytes = 4, 5, 3000
    with nodes(size) as some:
        data = [
            [[random_bytes(nbytes) for _ in range(blocks)] for _ in range(size)]
            for _ in range(size)
        ]

        def reduce(me: int) -> NDArray[np.uint8]:
            others = [place for place in range(size) if place != me]
            came = {place: np.zeros((blocks, nbytes), np.uint8) for place in others}
            result = np.zeros((size, blocks, nbytes), np.uint8)
            count = [0] * blocks

            def arrived(place: int, index: int) -> list[NDArray[np.uint8]]:
                if index >= blocks:
                    return []
                count[index] += 1
                if count[index] < len(others):
                    return []
                result[me, index] = data[me][me][index] + sum(came[k][index] for k in others)
                return [result[me, index]]

            some.connections[me].send_and_receive(
                0,
                {k: data[me][k] for k in others},
                {k: [*came[k], *result[k]] for k in others},
                patience=60,
                arrived=arrived,
            )
            return result

        expected = [
            [sum(data[node][shard][k] for node in range(size)) for k in range(blocks)]
            for shard in range(size)
        ]
        for result in some.together(reduce):
            np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("where", ["sends", "arrived"])
def test_what_a_function_raises_ends_all_links(where: str) -> None:
    def fails(*_: int) -> Any:
        raise KeyError("mine")

    def sends_fail() -> Any:
        yield np.zeros(10, np.uint8)
        fails()

    with nodes(3) as some:

        def swap(me: int) -> None:
            one = np.zeros(10, np.uint8)
            sends: dict[int, Any] = {place: [one] for place in range(3) if place != me}
            into = {place: [one.copy()] for place in sends}
            if me == 1 and where == "sends":
                sends[2] = sends_fail()
            arrived = fails if me == 1 and where == "arrived" else lambda *_: ()
            some.connections[me].send_and_receive(0, sends, into, patience=60, arrived=arrived)
            some.connections[me].send_and_receive(1, sends, into, patience=60)

        first, second, third = some.together(swap)
        assert isinstance(second, KeyError)
        assert {error.peer for error in errors([first, third])} & {1}
        assert all(connections.is_closed for connections in some.connections)
