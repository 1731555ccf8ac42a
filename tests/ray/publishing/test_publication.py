"""Publications in memory: reads are whole, whichever process is stopped or killed. No Ray."""

import contextlib
import errno
import itertools
import mmap
import os
import random
import resource
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from publication_processes import (
    NUMBERS,
    Process,
    hold,
    publish,
    publish_and_die,
    publish_for_ever,
    publish_on,
    read,
    read_all,
    read_on,
    shared_counts,
)

from flatweights import _core
from flatweights.ray.channels._end import ChannelError, is_shortage
from flatweights.ray.publishing import _publication_server
from flatweights.ray.publishing._publication_server import (
    FullError,
    PublicationAddress,
    PublicationConnection,
    PublicationServer,
    take_over,
)

_readings: list[PublicationConnection] = []  # of one test

pytestmark = pytest.mark.skipif(os.uname().sysname != "Linux", reason="such memory is Linux's")


@pytest.fixture
def server() -> Iterator[PublicationServer]:
    made = PublicationServer(8 * NUMBERS)
    made.start()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _end_of_readings() -> Iterator[None]:
    yield
    while _readings:
        _readings.pop().close()


def connect(server: PublicationServer, **options: bool) -> PublicationConnection:
    _readings.append(PublicationConnection(server.address, time.monotonic() + 60, **options))
    return _readings[-1]


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def wait_for_reads(counts: Any, readers: Iterable[int], more: int) -> None:
    """Wait until each of these readers has read more than so many times again."""
    enough = {k: counts[k] + more for k in readers}
    wait_until(lambda: all(counts[k] > count for k, count in enough.items()))


def test_a_reader_gets_the_newest_alone_and_once(server: PublicationServer) -> None:
    reading = connect(server)
    assert read(reading) is None
    for version in (1, 2, 5):
        publish(server, version)
    news = read(reading)
    assert news is not None
    assert news[0] == 5
    assert (news[1] == 5).all()
    del news
    assert read(reading, 5) is None
    assert reading.reader.newest == 5
    assert not reading.reader.wait(5, 0.0)
    writer = threading.Thread(target=publish, args=(server, 6))
    writer.start()
    assert reading.reader.wait(5, 60.0)
    writer.join()
    assert not reading.reader.wait(6, 0.001)


def test_what_is_read_stays_as_it_is_while_others_are_published(server: PublicationServer) -> None:
    readings = [connect(server) for _ in range(4)]
    held = []
    for version, reading in enumerate(readings, 1):
        publish(server, version)
        held.append(read(reading))
    for version in range(5, 100):
        publish(server, version)
    for version, news in enumerate(held, 1):
        assert news is not None
        assert news[0] == version
        assert (news[1] == version).all()
    # A slot for each reader that holds one, the newest, and the next.
    assert server.publication.slots == 6
    del held, news
    for version in range(100, 200):
        publish(server, version)
    assert server.publication.slots == 6


def test_most_readers_hold_a_slot_each(server: PublicationServer) -> None:
    most = _core.PUBLICATION_READERS - 1
    readings = [connect(server) for _ in range(most)]
    with pytest.raises(FullError, match=f"has {most} readers"):
        connect(server)
    readings.append(connect(server, for_others=True))
    held = []
    for version, reading in enumerate(readings, 1):
        publish(server, version)
        held.append(read(reading))
    publish(server, 1000)
    publish(server, 1001)
    for version, news in enumerate(held, 1):
        assert news is not None
        assert (news[1] == version).all()
    readings[7].close()
    assert server.publication.slots == _core.PUBLICATION_READERS + 2
    end = time.monotonic() + 60
    while True:  # until the server has seen that one is gone
        with contextlib.suppress(FullError):
            connect(server)
            break
        assert time.monotonic() < end


def test_one_place_is_kept_for_the_reader_that_reads_for_others(server: PublicationServer) -> None:
    for _ in range(3):
        first = connect(server, for_others=True)
        with pytest.raises((FullError, OSError)):
            connect(server, for_others=True)
        readings = [connect(server) for _ in range(_core.PUBLICATION_READERS - 1)]
        publish(server, server.publication.newest + 1)
        assert all(read(one) for one in (first, *readings))
        for one in (first, *readings):
            one.close()
        wait_until(lambda: server.idle > 0)


def test_a_server_without_places_is_taken_over(server: PublicationServer) -> None:
    readings = [connect(server) for _ in range(_core.PUBLICATION_READERS - 1)]
    take_over(server.address, time.monotonic() + 60)
    assert server.is_closed
    assert all(reading.is_over for reading in readings)


def test_the_end_of_a_view_releases_nothing_of_the_next_reader(server: PublicationServer) -> None:
    del server._free[1:]  # all readers have the same number, one after the other
    first = connect(server)
    publish(server, 1)
    kept = read(first)
    assert kept is not None
    first.close()
    end, second = time.monotonic() + 60, None
    while second is None:  # until the server has seen that the first is gone
        assert time.monotonic() < end
        with contextlib.suppress(FullError):
            second = connect(server)
    held = read(second)
    assert held is not None
    del kept
    publish(server, 2)
    with pytest.raises(RuntimeError, match="still exists: copy"):
        read(second)


def test_a_view_that_is_kept_is_told_and_changes_nothing(server: PublicationServer) -> None:
    reading = connect(server)
    publish(server, 1)
    kept = read(reading)
    publish(server, 2)
    with pytest.raises(RuntimeError, match="still exists: copy"):
        read(reading)
    assert kept is not None
    assert (kept[1] == 1).all()
    assert not kept[1].flags.writeable
    del kept
    news = read(reading)
    assert news is not None
    assert news[0] == 2


def test_what_is_written_is_not_published_while_a_view_is_kept(server: PublicationServer) -> None:
    kept = server.publication.begin()
    with pytest.raises(RuntimeError, match="could change"):
        server.publication.commit(1)
    assert server.publication.newest == 0
    del kept
    server.publication.commit(1)
    assert server.publication.newest == 1
    for version in (0, 1, 2**56):
        server.publication.begin()
        with pytest.raises(ValueError, match="expected more than 1"):
            server.publication.commit(version)
    server.publication.commit(8)
    with pytest.raises(RuntimeError, match="begun"):
        server.publication.commit(9)


def test_two_threads_do_not_write_to_one_slot() -> None:
    nbytes = 32 << 20
    publication = _core.Publication(nbytes)
    readers = [
        _core.PublicationReader(*publication.control, *publication.data, nbytes, k)
        for k in range(2)
    ]
    kept = []
    for number, reader in enumerate(readers, 1):
        publication.begin()
        publication.commit(number)
        kept.append(reader.take(0))
    publication.begin()
    publication.commit(3)  # the next slot is the first one without memory, which takes a while
    start, begun = threading.Barrier(2), list[Any]()

    def begin() -> None:
        start.wait()
        with contextlib.suppress(RuntimeError):
            begun.append(publication.begin())

    threads = [threading.Thread(target=begin) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(begun) == 1


@pytest.fixture
def _no_large_files() -> Iterator[None]:
    """Files of this process stay below 64 MB, so that no test fills the memory of the machine."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 20, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.usefixtures("_no_large_files")
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda free: PublicationServer(free // 2), id="publication"),  # of 3 copies
        pytest.param(lambda free: _core.Segment(2 * free), id="segment"),
    ],
)
def test_memory_that_is_not_free_is_refused(make: Callable[[int], object]) -> None:
    """In a container, the kernel would kill a process that takes it."""
    with pytest.raises(OSError, match=r"memory file: \d+ bytes do not fit, \d+ are free") as raised:
        make(_core.free_memory())
    assert raised.value.errno == errno.ENOMEM


def test_threads_that_wait_for_one_reader_are_woken_until_the_last_has_ended(
    server: PublicationServer,
) -> None:
    reading = connect(server)

    def is_to_be_woken() -> bool:
        with mmap.mmap(server.publication.control[0], 0) as memory:
            return any(memory[4096 + 64 : 4096 + 88])  # a bit for each reader

    sleeper = threading.Thread(target=reading.reader.wait, args=(0, 3600.0), daemon=True)
    sleeper.start()
    wait_until(is_to_be_woken)
    assert not reading.reader.wait(0, 0.0)
    assert is_to_be_woken()
    publish(server, 1)
    sleeper.join(60)
    assert not sleeper.is_alive()
    assert not is_to_be_woken()


def test_strangers_in_the_queue_do_not_keep_readers_out(server: PublicationServer) -> None:
    """Each is accepted at once: 300 silent connections are more than a queue takes."""
    strangers = []
    with contextlib.suppress(OSError):
        for _ in range(300):
            stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stranger.setblocking(False)
            strangers.append(stranger)
            stranger.connect(server.address.socket)
    for stranger in strangers:
        stranger.close()
    wait_until(lambda: server.idle > 0)
    connect(server).close()


def test_a_lack_of_descriptors_counts_as_one_that_may_pass() -> None:
    writer = Process(publish_for_ever)
    address, end = PublicationAddress(*writer.receive()), time.monotonic() + 60
    limits, held, errors = resource.getrlimit(resource.RLIMIT_NOFILE), list[int](), []
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, limits[0]), limits[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(0))
        for _ in range(3):  # none for the socket, none for the two files, one for both
            try:
                PublicationConnection(address, end).close()
            except Exception as error:
                errors.append(error)
            os.close(held.pop())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in held:
            os.close(descriptor)
        writer.kill()
    assert [is_shortage(error) for error in errors] == [True] * 3, errors


def test_wrong_addresses_and_users_are_refused(
    server: PublicationServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = time.monotonic() + 60
    for place in (
        server.address._replace(control=bytes(16)),
        server.address._replace(data=bytes(16)),
        server.address._replace(nbytes=10**6),
    ):
        with pytest.raises(ValueError, match=r"nonce|slots"):
            PublicationConnection(place, end)
    with pytest.raises(OSError, match="refused"):
        PublicationConnection(server.address._replace(socket=b"\0flatweights-nowhere"), end)

    def refuse(connection: socket.socket) -> None:
        raise ChannelError("the peer belongs to another user")

    monkeypatch.setattr(_publication_server, "check_user", refuse)
    with pytest.raises((ChannelError, OSError)):
        connect(server)
    monkeypatch.undo()
    connect(server).close()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize(
    ("at", "number"),
    [
        pytest.param(0, 1 << 8 | 200, id="a slot that does not exist"),
        pytest.param(0, 7 << 8, id="a number that is not in its slot"),
        pytest.param(128, 9, id="the stamp of the slot"),
    ],
)
def test_memory_that_a_process_has_overwritten_is_told(
    server: PublicationServer, at: int, number: int
) -> None:
    """A reader would otherwise look for ever, or find nothing although something is new."""
    reading = connect(server)
    publish(server, 1)
    descriptor, _ = server.publication.control
    data = 4096  # a header comes first
    with mmap.mmap(descriptor, 0) as memory:
        memory[data + at : data + at + 8] = number.to_bytes(8, sys.byteorder)
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends it even while it holds the interpreter's lock
        code = 1
        try:
            with pytest.raises(RuntimeError, match="a process has overwritten memory that all"):
                read(reading)
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    publish(server, 8)
    news = read(reading)
    assert news is not None
    assert news[0] == 8
    assert (news[1] == 8).all()


def test_the_end_of_a_publication_server_is_seen(server: PublicationServer) -> None:
    reading = connect(server)
    publish(server, 3)
    assert not reading.is_over
    server.close()
    wait_until(lambda: reading.is_over)
    news = read(reading)  # the last publication stays
    assert news is not None
    assert (news[1] == 3).all()
    with pytest.raises(OSError, match="refused"):
        connect(server)


def test_a_fork_releases_nothing_of_its_parent(server: PublicationServer) -> None:
    reading = connect(server)
    publish(server, 1)
    held = read(reading)
    child = os.fork()
    if child == 0:
        del held
        os._exit(0)
    os.waitpid(child, 0)
    for version in range(2, 50):
        publish(server, version)
    assert held is not None
    assert (held[1] == 1).all()


# The following tests have processes, which are stopped and killed.


def test_a_reader_that_is_stopped_costs_one_slot_and_nobody_time(server: PublicationServer) -> None:
    publish(server, 1)
    stopped = Process(hold, tuple(server.address))
    assert stopped.receive() == 1
    stopped.process.suspend()
    other = connect(server)
    for version in range(2, 2000):
        publish(server, version)
        news = read(other)
        assert news is not None
        assert news[0] == version
        del news
    assert server.publication.slots == 3
    stopped.process.resume()
    stopped.pipe.send("go on")
    assert stopped.receive() == 1
    stopped.kill()


def test_the_slot_of_a_reader_that_is_killed_is_used_again(server: PublicationServer) -> None:
    publish(server, 1)
    version = itertools.count(2)
    held = []
    for _ in range(4):
        reader = Process(hold, tuple(server.address))
        held.append(reader.receive())
        reader.kill()
        wait_until(lambda: server.idle > 0)  # the server has seen its end
        for _ in range(5):
            publish(server, next(version))
    assert held == [1, 6, 11, 16]
    assert server.publication.slots == 3


@pytest.mark.parametrize("count", [5, pytest.param(3000, marks=pytest.mark.slow)])
def test_reads_are_whole_whoever_is_killed_or_stopped(
    server: PublicationServer, count: int
) -> None:
    rng = random.Random(count)
    publish(server, 1)
    version = itertools.count(2)
    readers = [Process(read_all, tuple(server.address)) for _ in range(4)]
    for reader in readers:
        assert reader.receive() == "ready"
    wrong: list[Any] = []
    for _ in range(count):
        for _ in range(rng.randrange(200)):
            publish(server, next(version))
        k = rng.randrange(4)
        readers[k].process.suspend()
        for _ in range(rng.randrange(200)):
            publish(server, next(version))
        if rng.random() < 0.5:
            readers[k].process.resume()
            continue
        while readers[k].pipe.poll():
            wrong.append(readers[k].pipe.recv())
        readers[k].kill()
        readers[k] = Process(read_all, tuple(server.address))
        assert readers[k].receive() == "ready"
    for reader in readers:
        reader.pipe.send("stop")
        while not isinstance(outcome := reader.receive(), int):
            wrong.append(outcome)
        reader.kill()
    assert wrong == []


def test_a_writer_that_is_stopped_or_killed_leaves_a_whole_publication() -> None:
    rng = random.Random(5)
    for _ in range(10):
        writer = Process(publish_for_ever)
        reading = PublicationConnection(
            PublicationAddress(*writer.receive()), time.monotonic() + 60
        )
        seen = 0
        for _ in range(rng.randrange(1, 30)):
            writer.process.suspend()
            news = read(reading)
            if news is not None:
                assert news[0] >= seen
                assert (news[1] == news[0]).all()
                seen = news[0]
                del news
            writer.process.resume()
        writer.kill()
        while not reading.is_over:
            time.sleep(0.001)
        news = read(reading)
        if news is not None:
            assert (news[1] == news[0]).all()
        del news
        reading.close()


@pytest.mark.parametrize("reads", [2_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_readers_go_on_while_writers_and_readers_are_killed_and_stopped(reads: int) -> None:
    rng = random.Random(reads)
    firsts = itertools.count(1, 10**12)  # of the writers, as a name's publishers number versions
    counts = shared_counts(4)
    writer = Process(publish_on, next(firsts))
    address = writer.receive()
    readers = [Process(read_on, k, counts) for k in range(4)]
    for reader in readers:
        reader.pipe.send(address)
    wrong: list[Any] = []
    faults = Counter[str]()
    while sum(counts) < reads or sum(faults.values()) < reads // 2_500 + 8:
        fault = rng.choice(["reader stopped", "reader killed", "writer stopped", "writer killed"])
        faults[fault] += 1
        k = rng.randrange(4)
        if fault == "reader stopped":
            readers[k].process.suspend()
            wait_for_reads(counts, {*range(4)} - {k}, 20)
            readers[k].process.resume()
        elif fault == "reader killed":
            while readers[k].pipe.poll():
                wrong.append(readers[k].pipe.recv())
            readers[k].kill()
            readers[k] = Process(read_on, k, counts)
            readers[k].pipe.send(address)
        elif fault == "writer stopped":
            writer.process.suspend()
            time.sleep(0.01 * rng.random())
            writer.process.resume()
        else:
            writer.kill()
            writer = Process(publish_on, next(firsts))
            address = writer.receive()
            for reader in readers:
                reader.pipe.send(address)
        wait_for_reads(counts, range(4), reads // 2_000)
    print(sum(counts), "reads", dict(faults))
    for process in (writer, *readers):
        while process is not writer and process.pipe.poll():
            wrong.append(process.pipe.recv())
        process.kill()
    assert wrong == []


def test_nothing_is_left_of_a_process_that_is_killed(tmp_path: Path) -> None:
    def names() -> set[str]:
        return {file.name for folder in ("/dev/shm", tmp_path) for file in Path(folder).iterdir()}

    before = names()
    program = Process(publish_and_die, str(tmp_path))
    assert program.receive() is True
    program.process.wait(60)
    assert not any("flatweights" in name for name in names() - before)
