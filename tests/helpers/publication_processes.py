"""Readers and writers of a publication server in processes of their own, without Ray."""

import contextlib
import ctypes
import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from flatweights.ray.publishing._publication_server import (
    FullError,
    PublicationAddress,
    PublicationConnection,
    PublicationServer,
)

# A process is a fork of a server that has imported everything, once.
_processes = multiprocessing.get_context("forkserver")

NUMBERS = 3000  # of a publication: several pages


def publish(server: PublicationServer, version: int) -> None:
    buffer = server.publication.begin()
    buffer.view(np.int64)[:] = version
    del buffer
    server.publication.commit(version)


def read(reading: PublicationConnection, seen: int = 0) -> tuple[int, Any] | None:
    news = reading.reader.take(seen)
    return None if news is None else (news[0], news[2].view(np.int64))


def read_all(address: Any, pipe: Connection) -> None:
    """Read until the pipe says stop; report errors, and the number of reads."""
    reading = PublicationConnection(PublicationAddress(*address), time.monotonic() + 60)
    pipe.send("ready")
    seen = reads = 0
    while not pipe.poll():
        for _ in range(1000):
            news = reading.reader.take(seen)
            if news is None:
                continue
            version, _, buffer = news
            numbers = buffer.view(np.int64)
            if not (numbers == version).all() or version <= seen:
                pipe.send(f"version {version} after {seen}: {numbers.min()} to {numbers.max()}")
            seen, reads = version, reads + 1
            del buffer, numbers, news
    pipe.send(reads)


def read_on(k: int, counts: Any, pipe: Connection) -> None:
    """Read from one server after the other, as the pipe says; count reads, report what is wrong."""
    reading: PublicationConnection | None = None
    seen = 0
    while True:
        if pipe.poll(0.05 if reading is None else 0.0):
            address = pipe.recv()
            reading = None
            with contextlib.suppress(OSError, FullError):  # its writer has been killed meanwhile
                reading = PublicationConnection(PublicationAddress(*address), time.monotonic() + 60)
        if reading is None:
            continue
        for _ in range(100):
            news = reading.reader.take(seen)
            if news is None:  # leave the processor to whoever writes
                reading.reader.wait(seen, 0.05)
                break
            version, _, buffer = news
            numbers = buffer.view(np.int64)
            if not (numbers == version).all() or version <= seen:
                pipe.send(f"version {version} after {seen}: {numbers.min()} to {numbers.max()}")
            seen = version
            counts[k] += 1
            del buffer, numbers, news


def hold(address: Any, pipe: Connection) -> None:
    reading = PublicationConnection(PublicationAddress(*address), time.monotonic() + 60)
    news = reading.reader.take(0)
    assert news is not None
    pipe.send(news[0])
    pipe.recv()
    pipe.send(int(news[2].view(np.int64).max()))


def publish_and_die(folder: str, pipe: Connection) -> None:
    """Die while this process has a publication, and a view of it."""
    os.chdir(folder)
    server = PublicationServer(8 * NUMBERS)
    server.start()
    publish(server, 1)
    reading = PublicationConnection(server.address, time.monotonic() + 60)
    held = read(reading)
    pipe.send(held is not None)
    os.kill(os.getpid(), signal.SIGKILL)


def _start_server() -> None:
    """Start the server, unless it runs; it finds this module only by the environment."""
    folders = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    with pytest.MonkeyPatch.context() as inherited:
        inherited.setenv("PYTHONPATH", os.pathsep.join(folders))
        _processes.set_forkserver_preload(["publication_processes"])
        forkserver.ensure_running()


class Process:
    """A process that runs a function with some arguments, and a pipe to it."""

    def __init__(self, function: Callable[..., None], *args: Any) -> None:
        _start_server()
        self.pipe, theirs = _processes.Pipe()
        process = _processes.Process(target=function, args=(*args, theirs), daemon=True)
        process.start()
        theirs.close()
        assert process.pid is not None
        self.process = psutil.Process(process.pid)

    def receive(self) -> Any:
        assert self.pipe.poll(60)
        return self.pipe.recv()

    def kill(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):  # it may have ended by itself
            self.process.kill()
            self.process.wait(60)


def publish_for_ever(pipe: Connection) -> None:
    server = PublicationServer(8 * NUMBERS)
    server.start()
    pipe.send(tuple(server.address))
    for version in itertools.count(1):
        publish(server, version)


def publish_on(first: int, pipe: Connection) -> None:
    """Publish for ever, and let readers that wait have the processor after each publication."""
    server = PublicationServer(8 * NUMBERS)
    server.start()
    pipe.send(tuple(server.address))
    for version in itertools.count(first):
        publish(server, version)
        os.sched_yield()


def shared_counts(count: int) -> Any:
    """Numbers that processes share."""
    return _processes.RawArray(ctypes.c_int64, count)
