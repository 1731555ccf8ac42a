"""Channels between processes: messages stay whole under kept views, deaths, stops and refusals."""

import contextlib
import functools
import gc
import itertools
import math
import os
import resource
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from channel_processes import LARGE, Driver, Model, command_of, sealed, value_of, weights_of
from interrupts import Interrupts
from reference import same_bits

import flatweights as fw
from flatweights import _core
from flatweights.ray.channels._driver_channel import Channels
from flatweights.ray.channels._end import ChannelError
from flatweights.ray.channels._message import Message, join_message
from flatweights.ray.channels._protocol import BROKEN, BY_CALL, REFUSED, VALUE, WEIGHTS, WELCOME
from flatweights.ray.channels._segments import Extent, Segments
from flatweights.ray.channels._worker_channel import NoChannel, WorkerChannel, WorkerChannels

pytestmark = pytest.mark.skipif(os.uname().sysname != "Linux", reason="channels are Linux's")


@pytest.fixture
def driver() -> Iterator[Driver]:
    made = Driver(2)
    yield made
    made.close()


@pytest.fixture
def one() -> Iterator[Driver]:
    made = Driver(1)
    yield made
    made.close()


def view_of(segment: _core.Segment, mailbox: _core.Mailbox, offset: int, nbytes: int) -> Any:
    """Return the bytes that the worker reads at a position that a command names."""
    mailbox.withdraw()
    mailbox.post(join_message(0, b"", [Extent(0, 1, offset, nbytes)]), 1)
    mailbox.add_hold(True, 0)
    peer = _core.PeerSegment(segment.descriptor, segment.nonce)
    _, (view,), _ = mailbox.read_message(True, {0: (1, peer)})
    return view


def attach_anew(driver: Driver) -> None:
    """Give up the channel of the only worker, and make another channel to it."""
    (worker,) = driver.workers
    driver.channels.give_up(worker.channel)
    if worker.calls:
        worker.outcomes(worker.calls)  # they have ended
    worker.attach(driver.channels)


def are_two(segments: Segments) -> bool:
    with pytest.raises(IndexError):
        segments[2]
    return bool(segments[1])


# Memory files


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_commands_posted_without_a_wake_wait_for_one(count: int) -> None:
    boxes = [_core.Mailbox() for _ in range(count)]
    taken: list[int] = []

    def serve(k: int) -> None:
        boxes[k].enter(1)
        if boxes[k].wait(60.0, 1):
            taken.append(k)

    threads = [threading.Thread(target=serve, args=(k,), daemon=True) for k in range(count)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)  # until they sleep: awake workers take commands without a call of wake
    for box in boxes:
        box.post(join_message(5, b"body"), 1, wakes=False)
    _core.Mailbox.wake(boxes)
    for thread in threads:
        thread.join(30.0)
    assert sorted(taken) == [*range(count)]


def test_a_peer_sees_what_the_owner_writes() -> None:
    segment, mailbox = _core.Segment(10_000), _core.Mailbox()
    segment.memory()[:] = np.arange(10_000) % 251
    view = view_of(segment, mailbox, 100, 9_900)
    assert view.tobytes() == (np.arange(10_000) % 251).astype(np.uint8)[100:].tobytes()
    assert not view.flags.writeable
    assert view.ctypes.data % 4 == 0


def test_a_segment_that_is_another_is_refused(tmp_path: Path) -> None:
    segment = _core.Segment(5000)
    with pytest.raises(ValueError, match="nonce is not the one"):
        _core.PeerSegment(segment.descriptor, bytes(16))
    with pytest.raises(ValueError, match="expected 16 bytes, got 3"):
        _core.PeerSegment(segment.descriptor, b"abc")
    unsealed = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 5000)
    with pytest.raises(ValueError, match="fixed size, got another file"):
        _core.PeerSegment(unsealed, segment.nonce)
    os.close(unsealed)
    (tmp_path / "file").write_bytes(bytes(5000))
    with (tmp_path / "file").open("r+b") as file, pytest.raises(ValueError, match="another file"):
        _core.PeerSegment(file.fileno(), segment.nonce)
    with pytest.raises(OSError, match="memory file"):
        _core.Segment(1 << 62)
    with pytest.raises(ValueError, match=r"mailbox: expected \d+ bytes, got 5000"):
        _core.Mailbox.open(segment.descriptor, segment.nonce)
    for nbytes in (0, 100_000):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.descriptor, nbytes)
    # In the format of another version of the package: a mark, the size, and the nonce.
    mark = os.pread(segment.descriptor, 8, 0)
    os.pwrite(segment.descriptor, mark[:-1] + b"9", 0)
    with pytest.raises(ValueError, match="a memory file of this version of flatweights"):
        _core.PeerSegment(segment.descriptor, segment.nonce)
    os.pwrite(segment.descriptor, mark + (4999).to_bytes(8, sys.byteorder), 0)
    with pytest.raises(ValueError, match="memory file: expected 4999 bytes, got 5000"):
        _core.PeerSegment(segment.descriptor, segment.nonce)


def test_a_doorbell_without_a_file_leaves_no_descriptor() -> None:
    limits, free = resource.getrlimit(resource.RLIMIT_NOFILE), os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, limits[1]))
    try:
        with contextlib.suppress(OSError):
            _core.Doorbell()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    os.close(first := os.dup(0))
    assert first == free


@pytest.mark.parametrize(
    ("seconds", "is_taken"),
    [(math.inf, True), (1e300, True), (-math.inf, False), (math.nan, False)],
)
def test_a_wait_may_be_for_ever_but_not_for_no_number(seconds: float, is_taken: bool) -> None:
    mailbox = _core.Mailbox()
    mailbox.enter(1)
    writer = threading.Timer(0.1, mailbox.post, (join_message(5, b"body"), 1))
    writer.start()
    assert mailbox.wait(seconds, 1) is is_taken
    writer.join()


def test_the_time_of_a_wait_is_up_although_signals_come() -> None:
    mailbox, ticks = _core.Mailbox(), 0

    def tick(number: int, frame: Any) -> None:
        nonlocal ticks
        ticks += 1
        assert ticks < 1000, "the wait begins anew with each signal"

    before = signal.signal(signal.SIGALRM, tick)
    signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
    try:
        mailbox.enter(1)
        assert not mailbox.wait(0.1, 1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    assert ticks


def test_a_mailbox_takes_one_command_at_a_time() -> None:
    mailbox = _core.Mailbox()
    mailbox.post(join_message(5, b"first"), 1)
    for command in (b"second", bytes(_core.MAILBOX_BYTES + 1)):
        with pytest.raises(RuntimeError, match=f"not ready for a command of {len(command)} bytes"):
            mailbox.post(command, 1)
    assert mailbox.read_message(True, {}) == (5, [], b"first")


def test_a_message_that_cannot_be_read_holds_nothing() -> None:
    segment, mailbox = _core.Segment(100), _core.Mailbox()
    segments = {2: (7, _core.PeerSegment(segment.descriptor, segment.nonce))}

    def post(*extents: Extent) -> None:
        mailbox.withdraw()
        mailbox.post(join_message(5, b"body", extents), 1)
        for extent in extents:
            mailbox.add_hold(True, extent.segment)

    good = Extent(2, 7, 10, 20)
    post(good, Extent(2, 7, 90, 10))
    kind, views, body = mailbox.read_message(True, segments)
    assert (kind, [view.nbytes for view in views], body) == (5, [20, 10], b"body")
    assert mailbox.holds(True, 2) == 2
    views.clear()
    for unknown, error in (
        (Extent(3, 7, 0, 1), "^segment 3: expected generation 7, got none$"),
        (Extent(2, 6, 0, 1), "^segment 2: expected generation 6, got 7$"),
    ):
        post(good, unknown)
        with pytest.raises(IndexError, match=error):
            mailbox.read_message(True, segments)
        assert mailbox.holds(True, unknown.segment) >= 1, "it may be sent meanwhile"
        mailbox.release_message(True)
    post(good, Extent(2, 7, 90, 11), good)
    with pytest.raises(ValueError, match=r"expected at most 100 bytes, got 90 \+ 11"):
        mailbox.read_message(True, segments)
    assert [mailbox.holds(True, index) for index in (2, 3)] == [0, 0]
    for offset, nbytes in [(0, 101), (101, 0), (1 << 63, 1 << 63), (50, 51)]:
        with pytest.raises(ValueError, match="segment 0: expected at most 100 bytes"):
            view_of(segment, mailbox, offset, nbytes)
    for content, error in (
        (b"short", "expected a header, got 5 bytes"),
        (join_message(5, b"", [good])[:-1], "expected 1 extents in 23 bytes"),
        (join_message(5, b"", [good._replace(segment=64)]), "expected a segment below 64"),
    ):
        mailbox.withdraw()
        mailbox.post(content, 1)
        with pytest.raises(ValueError, match=error):
            mailbox.read_message(True, segments)


# Segments that are offered


def test_an_offer_is_taken_once_by_an_array_of_that_size() -> None:
    segment = _core.Segment(4096)
    segment.offer(4000)
    assert segment.offset_of(_core.empty(4096)) == -1
    first, second = _core.empty(4000), _core.empty(4000)
    assert segment.offset_of(first) == 0
    assert segment.offset_of(second) == -1
    taken = [segment.is_taken]
    view = first[10:20]
    del first
    taken.append(segment.is_taken)
    del view
    assert [*taken, segment.is_taken] == [True, True, False]
    segment.offer(4000)
    _core.withdraw_offer()
    assert segment.offset_of(_core.empty(4000)) == -1
    with pytest.raises(ValueError, match="offer: expected at most 4096 bytes"):
        segment.offer(4097)


def test_an_average_is_made_in_the_segment() -> None:
    sources = [fw.FlatWeights({"w": np.full(1000, k, np.float32)}) for k in (1.0, 4.0)]
    segment = _core.Segment(sources[0].buffer.nbytes)
    segment.offer(segment.nbytes)
    mean = fw.average(sources)
    assert segment.offset_of(mean.buffer) == 0
    assert (mean["w"] == 2.5).all()


def test_a_segment_that_is_held_is_not_written() -> None:
    held = {0}
    segments = Segments(2, held.__contains__)
    first = segments.copy_in([memoryview(b"a" * 3000)])
    second = segments.copy_in([memoryview(b"b" * 3000), memoryview(b"c" * 10)])
    assert first is not None
    assert second is not None
    assert [extent.segment for extent in first + second] == [0, 1, 1]
    assert second[1].offset % 64 == 0
    held.add(1)
    assert segments.copy_in([memoryview(b"d" * 3000)]) is None
    held.discard(0)
    third = segments.copy_in([memoryview(b"e" * 3000)])
    assert third is not None
    assert third[0][:2] == (0, 1)
    larger = segments.copy_in([memoryview(b"f" * 30_000)])
    assert larger is not None
    assert larger[0][:2] == (0, 2), "another file in place of the one that was too small"
    assert are_two(segments)
    # Models of two sizes take turns without new segments.
    segments = Segments(8, lambda index: 0)
    small, large = memoryview(b"s" * 3_000), memoryview(b"l" * 300_000)
    files = [segments.copy_in([buffer]) for _ in range(5) for buffer in (small, large)]
    assert len({places[0][:2] for places in files if places is not None}) == 2


# Channels


def test_results_are_whole_and_are_not_moved_twice(driver: Driver) -> None:
    addresses = set()
    for value in (1.0, 2.0, 3.0):
        values = driver.values("get", value)
        assert all((weights["w"] == value).all() for weights in values)
        assert [int(weights["n"]) for weights in values] == [0, 1]
        assert not values[0].buffer.flags.writeable
        addresses |= {weights.buffer.ctypes.data for weights in values}
        del values
    assert len(addresses) == 2, "one segment of each worker"


def test_a_result_that_the_worker_keeps_is_copied(one: Driver) -> None:
    one.values("get", 1.0)  # from now on results are made in the segment
    (kept,) = one.values("get_and_keep", 5.0)
    one.values("change_kept")
    assert (kept["w"] == 5.0).all()
    (again,) = one.values("get", 6.0)
    assert (again["w"] == 6.0).all()
    assert (kept["w"] == 5.0).all()
    ((kept, extras),) = one.values("get_and_keep_with", 5.0, "more")
    one.values("change_kept")
    assert (kept["w"] == 5.0).all()
    assert extras == "more"


def test_extras_as_large_as_a_result_that_the_worker_keeps_are_their_own(one: Driver) -> None:
    for value in range(6):  # from the third on, two segments are free
        extras = np.full(LARGE, 100.0 + value)
        ((kept, returned),) = one.values("get_and_keep_with", float(value), extras)
        assert (kept["w"] == value).all()
        assert (returned == extras).all()
        del kept, returned


def test_a_result_that_the_driver_keeps_is_not_overwritten(one: Driver) -> None:
    (worker,) = one.workers
    kept = [one.values("get", float(value))[0] for value in range(4)]
    assert [weights["w"][-1] for weights in kept] == [0, 1, 2, 3]
    # No segment is left: the result goes through the call.
    one.post("get", 4.0)
    assert one.wait()
    assert worker.channel.take()[0] == BY_CALL
    (_, value) = worker.outcomes(worker.calls)[-1]
    assert (value["w"] == 4.0).all()
    assert [weights["w"][-1] for weights in kept] == [0, 1, 2, 3]
    del kept[:2]
    assert one.values("get", 5.0)[0]["w"][0] == 5.0


def test_the_average_goes_out_from_where_it_was_made(driver: Driver) -> None:
    nbytes = driver.values("get", 1.0)[0].buffer.nbytes
    for value in (3.0, 4.0, 5.0):
        sources = driver.values("get", value)
        driver.channels.segments.offer(nbytes)
        mean = sealed(fw.average(sources))
        del sources
        assert driver.values("set", mean) == [None, None]
        assert [w["w"][7] for w in driver.values("get")] == [value, value]
    assert are_two(driver.channels.segments)


def test_weights_that_a_worker_keeps_stay_as_they_were(driver: Driver) -> None:
    first = fw.FlatWeights({"w": np.full(LARGE, 1.0)})
    driver.values("set_and_keep", sealed(first))
    for value in (2.0, 3.0, 4.0):
        other = fw.FlatWeights({"w": np.full(LARGE, value)})
        driver.values("set", other)
    assert driver.values("total") == [LARGE, LARGE]
    assert are_two(driver.channels.segments)
    driver.values("forget")
    assert [driver.is_held(index) for index in range(2)] == [False, False]
    # Weights that can still be written are copied.
    nbytes = driver.values("get", 1.0)[0].buffer.nbytes
    driver.channels.segments.offer(nbytes)
    weights = fw.average(driver.values("get", 2.0))
    driver.values("set_and_keep", weights)
    weights["w"] += 1.0
    assert driver.values("total") == [2.0 * LARGE] * 2


def test_extras_lists_and_dicts_pass(one: Driver) -> None:
    extras = {"losses": np.arange(5000.0), "name": "x", "list": [1, None, (2.5, True)]}
    for _ in range(3):
        ((weights, found),) = one.values("get_with", extras)
        assert (weights["w"] == 0).all()
        assert (found["losses"] == extras["losses"]).all()
        assert [found["name"], found["list"]] == ["x", extras["list"]]
    (found,) = one.values("get_dict")
    assert type(found) is dict
    assert sorted(found) == ["n", "w"]
    assert found["w"].shape == (LARGE,)


@pytest.mark.parametrize(("method", "said"), [("fail", "ArithmeticError"), ("leave", "SystemExit")])
def test_errors_and_what_is_too_large_go_through_the_call(
    one: Driver, method: str, said: str
) -> None:
    (answer,) = one.answers(method)
    assert answer == (BY_CALL, 1)
    assert said in one.workers[0].outcomes(1)[0][1]
    assert one.values("echo", 7) == [7], "and the channel goes on"
    assert command_of(one.channels, "echo", "x" * 200_000) is None
    ((kind, number),) = one.answers("repeat", "x", 200_000)
    assert kind == BY_CALL
    assert one.workers[0].outcomes(number - 1)[-1] == ("value", "x" * 200_000)


def test_a_command_that_cannot_be_read_is_refused(one: Driver) -> None:
    (worker,) = one.workers
    command = one.command("echo", 1)
    worker.post(command._replace(content=command.content[:-5]), one.channels)
    assert one.wait()
    assert worker.channel.take()[0] == REFUSED
    assert one.answers("echo", 2)[0] == (VALUE, 2)


def test_calls_of_an_idle_a_busy_and_a_dismissed_worker_return(one: Driver) -> None:
    one.values("echo", 1)
    (worker,) = one.workers
    assert worker.outcomes(1) == [("value", None)], "it has returned to Ray"
    before = worker.calls
    one.values("echo", 2)
    assert worker.calls == before + 1
    worker.channel.dismiss()
    assert worker.outcomes(1) == [("value", None)], "at once"
    end = time.monotonic() + 60
    before = worker.calls
    while worker.calls < before + 3:  # though commands keep coming
        assert time.monotonic() < end
        one.values("echo", 1)
    assert worker.outcomes(2) == [("value", None)] * 2


def test_a_command_after_a_dismissal_waits_for_a_later_call(one: Driver) -> None:
    """Even if the worker does not know yet that it was dismissed: Ray's calls come in between."""
    (worker,) = one.workers
    one.values("echo", 1)
    worker.signal(signal.SIGSTOP)
    worker.channel.dismiss()
    assert not worker.channel.post(one.command("echo", 2), one.channels.segments)
    worker.signal(signal.SIGCONT)
    assert worker.outcomes(1) == [("value", None)], "the call that was dismissed has ended"
    assert not worker.channel.is_answered
    worker.serve()
    assert one.wait()
    assert worker.channel.take() == (VALUE, 2)


def test_a_call_ahead_that_is_interrupted_ends_the_channel(one: Driver) -> None:
    """A command would wait for a call that may never have been made."""
    (worker,) = one.workers
    one.values("echo", 1)

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        worker.channel.serve(interrupt)
    assert worker.channel.is_given_up
    assert worker.channel.latest_call() is worker.channel.calls[1]
    worker.outcomes(1)
    worker.attach(one.channels)
    assert one.values("echo", 2) == [2]


def test_a_command_that_is_withdrawn_is_not_run(one: Driver) -> None:
    (worker,) = one.workers
    weights = fw.FlatWeights({"w": np.ones(LARGE)})
    channel = worker.channel
    assert not channel.post(one.command("set_and_keep", weights), one.channels.segments)
    assert one.is_held(0)
    with pytest.raises(ChannelError, match="was not answered"):
        channel.post(one.command("echo", 1), one.channels.segments)
    for _ in range(2):
        channel.withdraw()
    assert channel.is_answered
    assert not one.is_held(0)
    assert one.values("echo", 4) == [4]
    attach_anew(one)
    channel = worker.channel  # if it is given up, it takes its command back
    channel.post(one.command("set_and_keep", weights_of(1.0)), one.channels.segments)
    one.channels.give_up(channel)
    assert channel.is_closed


def test_weights_of_the_layout_that_came_last_are_a_buffer_alone(one: Driver) -> None:
    other = fw.FlatWeights({"v": np.arange(6_000.0), "m": np.ones(3, np.int8)})
    kinds = [answer[0] for _ in range(3) for answer in one.answers("get", 2.0)]
    assert kinds == [VALUE, WEIGHTS, WEIGHTS]
    one.values("set", other)
    kinds = []
    for _ in range(3):
        (answer,) = one.answers("get")
        kinds.append(answer[0])
        weights = value_of(answer)
        assert weights.layout == other.layout
        assert weights.buffer.tobytes() == other.buffer.tobytes()
    assert kinds == [VALUE, WEIGHTS, WEIGHTS]
    # Other results are messages as before, and do not change the known layout.
    kinds = [
        one.answers(method, *args)[0][0]  # type: ignore[arg-type]
        for method, *args in (["get_dict"], ["get_with", 1])
    ]
    assert kinds == [VALUE, VALUE]
    assert one.answers("get")[0][0] == WEIGHTS


def test_a_death_is_known_at_once_and_gives_back_what_was_held(driver: Driver) -> None:
    driver.values("set_and_keep", fw.FlatWeights({"w": np.ones(LARGE)}))
    first, second = driver.workers
    second.post(driver.command("get", 9.0), driver.channels)
    assert driver.wait([second])
    first.post(driver.command("sleep", 60.0), driver.channels)
    first.signal(signal.SIGKILL)
    while not first.channel.is_closed:
        driver.channels.wait([first.channel], 60)
    assert not first.channel.is_answered
    assert (value_of(second.channel.take())["w"] == 9.0).all()
    second.post(driver.command("forget"), driver.channels)
    assert driver.wait([second])
    extents = driver.channels.segments.copy_in([memoryview(bytes(8 * LARGE))])
    assert [extent.segment for extent in extents or ()] == [0], "it is free"


def test_a_worker_may_still_be_about_to_say_who_it_is_when_another_is_met() -> None:
    channels = Channels()
    first, second = channels.new_token(), channels.new_token()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as slow:
        slow.connect(channels.address)
        quick = WorkerChannel(channels.address, first)
        channels.connect(first, quick.mailbox.nonce)
        mailbox = _core.Mailbox()
        socket.send_fds(slow, [b"H" + second + mailbox.nonce], [mailbox.descriptor])
        assert slow.recv(1) == WELCOME
        assert not channels.connect(second, mailbox.nonce).is_closed
    quick.close()
    channels.close()


def test_a_worker_that_dies_before_it_is_met_leaves_no_socket() -> None:
    channels = Channels()
    gc.collect()  # what other tests have left
    before = len(list(Path("/proc/self/fd").iterdir()))
    token = channels.new_token()
    worker = WorkerChannel(channels.address, token)
    worker.close()
    with pytest.raises(OSError, match="Broken pipe"):
        channels.connect(token, worker.mailbox.nonce)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before  # theirs may still close
    # A channel that nobody takes: another one is taken first, and then everything is closed.
    known, unknown = (WorkerChannel(channels.address, channels.new_token()) for _ in range(2))
    with pytest.raises(ChannelError, match="has not connected"):
        channels.connect(channels.new_token(), bytes(16))
    channels.close()
    assert known.connection.recv(10) == unknown.connection.recv(10) == b""
    for one in (known, unknown):
        one.close()


def test_a_stranger_is_no_worker(one: Driver) -> None:
    channels = one.channels
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(channels.address)
        stranger.send(b"H" + bytes(32))
        assert stranger.recv(10) == b""
        with pytest.raises(ChannelError, match="has not connected"):
            channels.connect(channels.new_token(), bytes(16))
    token = channels.new_token()
    (worker,) = one.workers
    worker.pipe.send(("attach", channels.address, token))
    worker.outcomes(1)
    with pytest.raises(ChannelError, match="not that of the worker"):
        channels.connect(token, bytes(16))
    assert one.values("echo", 5) == [5]


def test_there_is_no_channel_to_elsewhere_or_to_other_threads(one: Driver) -> None:
    (worker,) = one.workers
    worker.pipe.send(("attach", b"\0flatweights-nowhere", b"t" * 16))
    ((_, why),) = worker.outcomes(1)
    assert why == NoChannel(
        "ConnectionRefusedError: [Errno 111] Connection refused", may_pass=False
    )
    worker.pipe.send(("attach in a thread", one.channels.address, b"t" * 16))
    ((_, why),) = worker.outcomes(1)
    assert why == NoChannel("the actor is async or has max_concurrency above 1", may_pass=False)


def test_where_there_is_no_memory_results_go_through_the_call(one: Driver) -> None:
    one.values("limit_memory", 100_000)
    (answer,) = one.answers("get", 2.0)
    assert answer[0] == BY_CALL


def test_a_channel_whose_segments_cannot_be_mapped_is_broken_and_holds_none(one: Driver) -> None:
    (worker,) = one.workers
    one.values("limit_memory", 100_000)
    weights = fw.FlatWeights({"w": np.ones(LARGE)})
    (answer,) = one.answers("set_and_keep", weights)
    assert answer[0] == BROKEN
    assert "Cannot allocate memory" in answer[1]
    assert not one.is_held(0)
    while not worker.channel.is_closed:
        one.channels.wait([], 60)
    worker.outcomes(worker.called)
    worker.process.rlimit(resource.RLIMIT_AS, (-1, -1))
    worker.attach(one.channels)
    assert one.answers("set_and_keep", weights)[0][0] == VALUE


def test_descriptors_and_segments_stay_few(one: Driver) -> None:
    def count() -> tuple[int, int]:
        (theirs,) = one.values("descriptors")
        return theirs, len(list(Path("/proc/self/fd").iterdir()))

    one.values("get", 1.0)
    before = count()
    for k in range(40):
        weights = fw.FlatWeights({"w": np.full(1000 * (k % 7 + 1), 1.0)})
        one.values("set", weights)
        one.values("get")
    theirs, ours = count()
    assert theirs <= before[0] + 2
    assert ours <= before[1] + 2


def test_two_drivers_share_a_worker(one: Driver) -> None:
    other = Channels()
    (worker,) = one.workers
    mine = worker.channel, worker.token
    worker.attach(other)
    theirs = worker.channel, worker.token
    for k in range(4):
        for channels, (channel, token) in ((one.channels, mine), (other, theirs)):
            worker.channel, worker.token = channel, token
            command = command_of(channels, "get", float(k))
            assert command is not None
            worker.post(command, channels)
            while not channel.is_answered:
                channels.wait([channel], 60)
            assert (value_of(channel.take())["w"] == k).all()
    other.close()


def test_a_channel_that_is_given_up_is_kept_while_its_worker_reads_segments(one: Driver) -> None:
    (worker,) = one.workers
    first = worker.channel

    def descriptors() -> tuple[int, int]:
        (theirs,) = one.values("descriptors")
        return theirs, len(list(Path("/proc/self/fd").iterdir()))

    one.values("get", 2.0)  # so that the worker has a segment
    one.values("set_and_keep", weights_of(1.0))
    before = descriptors()
    for value in (3.0, 4.0, 5.0):
        attach_anew(one)
        one.values("set", weights_of(value))
        assert one.values("total") == [LARGE], "it reads what it was sent"
        assert not first.is_closed
    one.values("forget")
    for _ in range(3):  # the worker drops its end when it attaches once more
        attach_anew(one)
    assert first.is_closed
    theirs, ours = descriptors()
    assert theirs == before[0]
    assert ours <= before[1] + 1, "a segment more, as the first was held"


def test_a_channel_whose_post_was_interrupted_works_or_is_given_up(one: Driver) -> None:
    (worker,) = one.workers
    command = one.command("set", weights_of(1.0))
    interrupts = Interrupts()
    for step in itertools.count():
        attach_anew(one)  # a mailbox that has had no answer
        post = functools.partial(worker.channel.post, command, one.channels.segments)
        was_interrupted = interrupts.hit(post)
        # it takes no other command
        if worker.channel.is_given_up or not worker.channel.is_answered:
            attach_anew(one)
        assert one.values("echo", step) == [step]
        if not was_interrupted:
            break
    assert step > 10


def test_an_interrupt_while_a_segment_is_received_leaves_no_descriptor_open() -> None:
    channels, segment = Channels(), _core.Segment(4096)
    token = channels.new_token()
    worker = WorkerChannel(channels.address, token)
    channel = channels.connect(token, worker.mailbox.nonce)
    packet = b"W" + struct.pack("<IIQ16s", 0, 1, segment.nbytes, segment.nonce)

    def received() -> int:
        """Return the number of descriptors once the segment has come."""
        socket.send_fds(channel.connection, [packet], [segment.descriptor])
        worker.receive()
        links = [one.readlink() for one in Path("/proc/self/fd").iterdir() if one.is_symlink()]
        return len([link for link in links if "memfd:flatweights" in str(link)])

    gc.collect()  # what other tests have left
    interrupts, before, steps = Interrupts(), received(), 0
    socket.send_fds(channel.connection, [packet], [segment.descriptor])
    while interrupts.hit(worker.receive):
        assert received() <= before
        socket.send_fds(channel.connection, [packet], [segment.descriptor])
        steps += 1
    assert steps > 50
    worker.connection.close()
    channels.close()


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Use up all file descriptors of this process."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(int(link.name) for link in Path("/proc/self/fd").iterdir()) + 1
    kept: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                kept.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in kept:
            os.close(descriptor)


def test_a_worker_that_cannot_take_its_doorbell_wakes_the_driver() -> None:
    """The worker closes its end, which holds no segment: it has no other way to wake the driver."""
    channels = Channels()
    token = channels.new_token()
    worker = WorkerChannel(channels.address, token)
    channel = channels.connect(token, worker.mailbox.nonce)
    command = command_of(channels, "echo", weights_of(1.0))
    assert command is not None
    assert not channel.post(command, channels.segments)
    assert channel.is_holding(0)
    with no_descriptors():
        channel.serve(lambda number: worker.serve(None, number))
    channels.wait([], 60)
    assert channel.is_closed
    lost = "(NoDescriptorsError: Too many open files)"
    reason = f"ChannelError: segment 0: expected generation 1, got none {lost}"
    assert channel.take() == (BROKEN, reason)
    assert not channel.is_holding(0)
    channels.close()


@pytest.mark.parametrize("calls", [1, 2])
def test_a_result_whose_segment_cannot_be_sent_goes_through_the_call(calls: int) -> None:
    """The second result of one layout has a message of another kind."""
    channels = Channels()
    token = channels.new_token()
    worker, model = WorkerChannel(channels.address, token), Model(0, LARGE)
    channel = channels.connect(token, worker.mailbox.nonce)

    def get(value: float) -> Any:
        command = command_of(channels, "get", value)
        assert command is not None
        if not channel.post(command, channels.segments):
            channel.serve(lambda number: worker.serve(model, number))
        return channel.take()

    for _ in range(calls - 1):
        assert get(1.0)[0] == VALUE
        worker._peer_has.clear()  # its segment has to be sent again
    with contextlib.suppress(BlockingIOError):
        while True:
            worker.connection.send(b"full")
    kind, number = get(2.0)
    assert kind == BY_CALL
    assert same_bits(channel.calls[number].buffer, model.get(2.0).buffer)
    worker.close()
    channels.close()


def test_a_driver_without_descriptors_meets_the_worker_later(
    one: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    (worker,) = one.workers
    token = one.channels.new_token()
    with no_descriptors():
        worker.pipe.send(("attach", one.channels.address, token))
        while "Too many open files" not in caplog.text:
            time.sleep(0.01)
    ((_, nonce),) = worker.outcomes(1)
    assert not one.channels.connect(token, nonce).is_closed


def test_a_channel_that_is_forgotten_is_closed() -> None:
    channels = Channels()
    token = channels.new_token()
    worker = WorkerChannel(channels.address, token)
    channels.forget(token)
    worker.receive()
    assert worker.is_closed, "nobody waits for it any more"
    with pytest.raises(ChannelError, match="does not expect this worker"):
        WorkerChannel(channels.address, token)
    worker.close()
    channels.close()


@contextlib.contextmanager
def stranger(address: bytes, user: int, count: int, say: bytes = b"") -> Iterator[None]:
    """Another process, of ``user``, that opens connections and keeps them."""
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
            os.setuid(user)
            ours.close()
            opened = []
            for _ in range(count):
                one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                one.setblocking(False)
                opened.append(one)
                with contextlib.suppress(OSError):  # the queue is full, or it was refused already
                    one.connect(address)
                    if say:
                        one.send(say)
            theirs.send(b"!")
            theirs.recv(1)
        finally:
            os._exit(0)
    theirs.close()
    try:
        assert ours.recv(1) == b"!"
        yield
    finally:
        ours.close()
        os.waitpid(child, 0)


ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize(
    ("user", "say", "told"),
    [
        pytest.param(65534, b"", "the peer belongs to user 65534", marks=ROOT_ONLY),
        pytest.param(65534, b"H" + bytes(32), "belongs to user 65534", marks=ROOT_ONLY),
        (os.geteuid(), b"", "too many connections without a hello"),
        (os.geteuid(), b"garbage", "no hello"),
        (os.geteuid(), b"H" + bytes(10_000), "no hello"),
    ],
)
def test_strangers_do_not_keep_a_worker_out(
    user: int, say: bytes, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    channels = Channels()
    before = len([*Path("/proc/self/fd").iterdir()])
    with stranger(channels.address, user, 600, say):
        token = channels.new_token()
        worker = WorkerChannel(channels.address, token)
        assert not channels.connect(token, worker.mailbox.nonce).is_closed
        assert len([*Path("/proc/self/fd").iterdir()]) < before + 100
        worker.close()
    assert [record for record in caplog.records if told in record.getMessage()]
    assert len(caplog.records) < 4, caplog.text
    channels.close()


def test_a_worker_gives_up_on_a_driver_that_takes_no_connection() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stuck:
        stuck.bind(b"\0flatweights-stuck-%d" % os.getpid())
        stuck.listen(1)
        queued = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(8)]
        for count in (0, 8):  # with and without room in its queue
            for one in queued[:count]:
                one.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    one.connect(stuck.getsockname())
            with pytest.raises(TimeoutError, match="not taken the connection"):
                WorkerChannel(stuck.getsockname(), b"t" * 16, 0.1)
        for one in queued:
            one.close()


def test_closed_channels_give_their_memory_back() -> None:
    def mapped() -> int:
        """Return the number of mapped segments that hold weights."""
        lines = [one.split() for one in Path("/proc/self/maps").read_text().splitlines()]
        sizes = [one[0].split("-") for one in lines if "/memfd:flatweights" in one]
        return sum(int(end, 16) - int(begin, 16) > 4 * LARGE for begin, end in sizes)

    driver = Driver(2)
    gc.collect()  # what other tests have left
    before = mapped()
    kept = driver.values("get", 1.0)[0]
    driver.values("set", weights_of(1.0))
    assert mapped() - before == 3
    driver.close()
    assert mapped() - before == 1, "that of the view"
    assert (kept["w"] == 1.0).all()


def test_a_worker_without_descriptors_says_that_this_may_pass() -> None:
    with no_descriptors():
        found = WorkerChannels().attach(b"\0flatweights-nowhere", b"t" * 16)
    assert found == NoChannel("OSError: [Errno 24] memfd_create: Too many open files", True)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_segment_is_not_offered_to_a_fork() -> None:
    """The forked process would write into memory that its parent sends."""
    segment = _core.Segment(1000)
    segment.offer(1000)
    child = os.fork()
    if child == 0:
        os._exit(int(segment.offset_of(_core.empty(1000)) >= 0))
    assert os.waitpid(child, 0)[1] == 0
    assert segment.offset_of(_core.empty(1000)) == 0


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_of_the_driver_leaves_its_channels_alone(driver: Driver) -> None:
    child = os.fork()
    if child == 0:
        driver.channels.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert driver.values("echo", 1) == [1, 1]
    first, second = driver.workers
    first.signal(signal.SIGKILL)
    end = time.monotonic() + 60
    while not first.channel.is_closed:
        assert time.monotonic() < end, "nobody has heard of its death"
        driver.channels.wait([], 60)
    driver.workers = [second]
    assert driver.values("echo", 2) == [2]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_the_end_of_a_worker_is_seen_although_a_fork_of_it_lives_on() -> None:
    """Such as a process that loads its data: the others would wait for the worker as long."""
    channels = Channels()
    token = channels.new_token()
    worker = WorkerChannel(channels.address, token)
    channel = channels.connect(token, worker.mailbox.nonce)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    try:
        worker.close()
        channels.wait([], 10)
        assert channel.is_closed
    finally:
        os.close(write)
        os.waitpid(child, 0)
        os.close(read)
        channels.close()


def test_a_packet_that_cannot_be_read_breaks_no_wait_and_is_named_later() -> None:
    channels = Channels()
    token = channels.new_token()
    worker = WorkerChannel(channels.address, token)
    channel = channels.connect(token, worker.mailbox.nonce)
    worker.connection.send(b"Wxy")
    channels.wait([], 60)
    channel.post(Message(join_message(0, b""), []), channels.segments)
    assert worker.mailbox.wait(0.0, 1)
    worker.mailbox.answer_with(join_message(VALUE, b"", [Extent(3, 2, 0, 1)]), 0)
    error = (
        r"^segment 3: expected generation 2, got none \(ChannelError: expected a segment, got a pac"
    )
    with pytest.raises(ChannelError, match=error):
        channel.take()
    worker.close()
    channels.close()


def test_a_forked_child_drops_no_hold(one: Driver) -> None:
    (weights,) = one.values("get", 1.0)
    held = one.workers[0].channel.mailbox.holds(False, 0)
    child = os.fork()
    if child == 0:
        del weights
        os._exit(0)
    os.waitpid(child, 0)
    assert held == one.workers[0].channel.mailbox.holds(False, 0) == 1
