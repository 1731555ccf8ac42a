"""`flatweights demo` as a command: interrupts, and workers that die."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from reference import clean_environment

from flatweights import FlatWeights
from flatweights.demo import SIZES

COMMAND = [sys.executable, "-m", "flatweights"]
ENDLESS = ("demo", "--size=small", "--rounds=100000", "--local-steps=1")
TIMEOUT_S = 300


class Process(NamedTuple):
    """A process: ids are reused, but not with the same start time."""

    id: int
    started: int
    name: str
    parent: int
    session: int


def processes() -> list[Process]:
    """Return all living processes, parents before children."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended since
            head, _, tail = stat.read_text().rpartition(")")
            state, parent, _, session, *rest = tail.split()
            if state not in "ZX":
                number, _, name = head.partition(" (")
                started = int(rest[15])
                found.append(Process(int(number), started, name, int(parent), int(session)))
    return sorted(found, key=lambda process: (process.started, process.id))


def family(leader: int) -> set[Process]:
    """Return the processes of a session, and their descendants."""
    found: dict[int, Process] = {}
    for process in processes():
        if process.session == leader or process.parent in found:
            found[process.id] = process
    return set(found.values())


def still_running(before: set[Process]) -> set[Process]:
    known = {(process.id, process.started) for process in before}
    return {process for process in processes() if (process.id, process.started) in known}


@contextlib.contextmanager
def running(until: str, *arguments: str, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    """Start the command in a session of its own, and wait for a line of its output."""
    with subprocess.Popen(
        [*COMMAND, *arguments],
        cwd=cwd,
        env=clean_environment(RAY_ADDRESS="local"),
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        watchdog = threading.Timer(TIMEOUT_S, process.kill)
        watchdog.start()
        try:
            assert process.stdout is not None
            assert any(line.startswith(until) for line in process.stdout)
            yield process
        finally:
            watchdog.cancel()
            for left in family(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(left.id, signal.SIGKILL)


def interrupt(process: subprocess.Popen[str], send: Callable[[int, int], None]) -> str:
    """Interrupt it; return its output, after checking that none of its processes is left."""
    before = family(process.pid)
    send(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert not family(process.pid)
    assert not still_running(before)
    assert process.returncode == 130
    return errors


@pytest.mark.parametrize(
    ("until", "send"),
    [
        pytest.param("starting Ray", os.killpg, id="Ray starts", marks=pytest.mark.slow),
        pytest.param(
            "importing TensorFlow", os.kill, id="TensorFlow starts", marks=pytest.mark.slow
        ),
        pytest.param("round 1 of", os.killpg, id="training", marks=pytest.mark.slow),
    ],
)
def test_interrupt_stops_everything(
    until: str, send: Callable[[int, int], None], tmp_path: Path
) -> None:
    with running(until, *ENDLESS, cwd=tmp_path) as process:
        assert interrupt(process, send) == "interrupted\n"


@pytest.mark.slow
def test_interrupt_while_a_worker_comes_back_stops_everything(tmp_path: Path) -> None:
    options = ("demo", "--size=small", "--kill-worker", "--rounds=4")
    with running("round 2: rank 1 died", *options, cwd=tmp_path) as process:
        time.sleep(1)  # Ray may have restarted it, or not yet
        assert interrupt(process, os.killpg) == "interrupted\n"


@pytest.mark.slow
def test_an_example_that_was_interrupted_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    program = "examples resnet --num-residual-units=1 --enough=0 --checkpoint=weights.safetensors"
    options = [*program.split(), "--rounds=1000"]
    with running("round 2 of", *options, cwd=tmp_path) as process:
        assert interrupt(process, os.killpg) == "interrupted\n"
    done = int(FlatWeights.load(tmp_path / "weights.safetensors")["sgd/iteration"]) // 10
    said = f"weights.safetensors: {done} of 1000 rounds are done"
    with running(said, *options, "--mode=graph", cwd=tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(f"round {done + 1} of 1000: loss")
        interrupt(process, os.kill)


@pytest.mark.slow
def test_worker_that_dies_is_named(tmp_path: Path) -> None:
    with running("round 1 of", *ENDLESS, cwd=tmp_path) as process:
        before = family(process.pid)
        workers = [found for found in before if found.name.startswith("ray::Digits")]
        assert len(workers) == 2
        os.kill(workers[0].id, signal.SIGKILL)
        _, errors = process.communicate(timeout=TIMEOUT_S)
        assert not still_running(before)
    assert process.returncode == 1
    (line,) = errors.splitlines()
    assert re.match(r"rank [01]: ActorDiedError: The actor died.* Start again", line)


def test_the_network_is_large_and_its_message_no_larger_than_the_arrays() -> None:
    # 50 kernels and biases; parts of a multiple of 64 bytes need no padding.
    width, depth, *_ = SIZES["full"]
    sizes = [64 * width, width, *(depth * [width * width, width]), width * 10]
    assert len(sizes) + 1 == 100
    assert all(4 * size % 64 == 0 for size in sizes)
    assert 4 * sum(sizes) > 20e6
