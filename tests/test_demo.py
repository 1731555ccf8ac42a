"""`flatweights demo`, run as a command."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from flatweights.demo import Options

COMMAND = [sys.executable, "-m", "flatweights.cli", "demo"]
TIMEOUT_S = 300
LAST_LINE = re.compile(r"test accuracy (\d\.\d{4}), SHA-256 of the weights ([0-9a-f]{64})")
ROWS = ["compute", "gather", "average", "put", "scatter", "Ray calls, waiting", "sum"]


class Finished(NamedTuple):
    accuracy: float
    digest: str
    output: str


def demo(folder: Path, *arguments: str) -> Finished:
    run = subprocess.run(
        [*COMMAND, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert (run.returncode, run.stderr) == (0, ""), run.stdout + run.stderr
    last = LAST_LINE.fullmatch(run.stdout.splitlines()[-1])
    assert last, run.stdout
    return Finished(float(last[1]), last[2], run.stdout)


def cells(output: str, row: str) -> list[str]:
    (line,) = [line for line in output.splitlines() if line.strip().startswith(row + "  ")]
    return re.split(r"\s{2,}", line.strip())[1:]


SHORT = ("--rounds", "6", "--local-steps", "4", "--seed", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def weights_run(folder) -> Finished:
    return demo(folder, *SHORT, "--plot", "plot.png")


@pytest.fixture(scope="module")
def gradients_run(folder) -> Finished:
    # Three shards of the digits differ in size.
    return demo(folder, *SHORT, "--mode", "gradients", "--workers", "3")


@pytest.fixture(params=["weights_run", "gradients_run"])
def either_run(request) -> Finished:
    return request.getfixturevalue(request.param)


def test_model_learns(weights_run):
    assert weights_run.accuracy > 0.3


def test_progress_is_plain_lines_without_a_terminal(either_run):
    assert "\x1b" not in either_run.output
    assert "round 6 of 6: test accuracy" in either_run.output


def test_parts_of_the_time_add_up(either_run):
    times = [[float(cell.split()[0]) for cell in cells(either_run.output, row)[:2]] for row in ROWS]
    for *parts, total in zip(*times, strict=True):
        assert all(part >= 0 for part in parts)
        assert sum(parts) == pytest.approx(total, abs=0.05)


def test_both_ways_exchange_the_same_numbers(either_run):
    flat, rival = (
        int(cell.replace(",", "")) for cell in cells(either_run.output, "bytes exchanged")
    )
    assert flat == pytest.approx(rival, rel=0.01)
    flat, rival = map(int, cells(either_run.output, "in arrays"))
    assert rival == 16 * flat


def test_both_ways_train_alike(either_run):
    flat, rival = map(float, cells(either_run.output, "test accuracy"))
    assert flat == either_run.accuracy
    assert flat == pytest.approx(rival, abs=0.02)


def test_plot_is_a_picture(weights_run, folder):
    from matplotlib.image import imread

    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    pixels = imread(folder / "plot.png")
    assert min(pixels.shape[:2]) > 500
    assert pixels.std() > 0


def test_seed_fixes_the_weights(weights_run, folder):
    again = demo(folder, *SHORT)
    assert again.digest == weights_run.digest
    other = demo(folder, *SHORT[:-1], "2")
    assert other.digest != weights_run.digest


@pytest.fixture(scope="module")
def kill_run(folder) -> Finished:
    return demo(folder, "--kill-worker", "--rounds", "8", "--plot", "kill.png")


def test_accuracy_survives_a_worker(kill_run):
    assert kill_run.accuracy > 0.9


def test_screen_says_when_a_worker_dies_and_is_back(kill_run):
    died = r"^round 4: rank 1 died: Actor\w+Error: .+; averaged over 1 of 2$"
    back = r"^round ([56]): rank 1 is back; averaged over 2 of 2$"
    (before,) = re.finditer(died, kill_run.output, re.MULTILINE)
    (after,) = re.finditer(back, kill_run.output, re.MULTILINE)
    assert before.start() < after.start()
    without = int(after[1]) - 4
    assert cells(kill_run.output, "rounds") == [str(8 - without), str(without)]
    assert cells(kill_run.output, "results averaged") == ["2", "1"]


def test_bytes_are_those_of_the_workers_that_are_left(kill_run, weights_run):
    # Two results and their average.
    message = int(cells(weights_run.output, "bytes exchanged")[0].replace(",", "")) // 3
    for direction in ("in", "out"):
        assert cells(kill_run.output, f"bytes {direction}") == [f"{2 * message:,}", f"{message:,}"]


def test_accuracy_of_the_last_round_is_in_the_table(kill_run):
    assert float(cells(kill_run.output, "test accuracy, last")[0]) == kill_run.accuracy


def test_plot_of_a_worker_that_dies_is_a_picture(kill_run, folder):
    from matplotlib.image import imread

    pixels = imread(folder / "kill.png")[..., :3]
    assert min(pixels.shape[:2]) > 500
    red = (0xD1 / 255, 0x49 / 255, 0x5B / 255)
    assert (abs(pixels - red).max(axis=2) < 0.01).any(), "rounds without it"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"workers": 1}, "kill_worker: expected at least 2 workers, got 1"),
        ({"rounds": 1}, "kill_worker: expected at least 2 rounds, got 1"),
        ({"mode": "gradients"}, "kill_worker: averages weights, got mode 'gradients'"),
    ],
)
def test_who_is_killed_leaves_others(wrong, message):
    right = {"workers": 2, "rounds": 2, "local_steps": 1, "mode": "weights", "seed": 0}
    Options(**right, kill_worker=True)
    Options(**{**right, **wrong})
    with pytest.raises(ValueError, match=re.escape(message)):
        Options(**{**right, **wrong}, kill_worker=True)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["weights", "gradients"])
def test_defaults_reach_the_promised_accuracy(mode, folder):
    assert demo(folder, "--mode", mode).accuracy > 0.95


class Process(NamedTuple):
    """A process: ids are given again, but not with the same start."""

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
    """Return the processes of a session, and what descends from them."""
    found: dict[int, Process] = {}
    for process in processes():
        if process.session == leader or process.parent in found:
            found[process.id] = process
    return set(found.values())


def still_running(before: set[Process]) -> set[Process]:
    known = {(process.id, process.started) for process in before}
    return {process for process in processes() if (process.id, process.started) in known}


@contextlib.contextmanager
def running_demo(folder: Path, until: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Start the demo in a session of its own, and wait for a line of its output."""
    endless = arguments or ("--rounds", "100000", "--local-steps", "1")
    with subprocess.Popen(
        [*COMMAND, *endless],
        cwd=folder,
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


@pytest.mark.parametrize(
    ("until", "there", "send"),
    [
        pytest.param("starting Ray", "gcs_server", os.killpg, id="Ray starts"),
        pytest.param("importing TensorFlow", "raylet", os.kill, id="TensorFlow starts"),
        pytest.param("round 1 of", "ray::DigitsWork", os.killpg, id="training"),
    ],
)
def test_interrupt_stops_everything(until, there, send, folder):
    with running_demo(folder, until) as process:
        before = family(process.pid)
        while process.poll() is None and there not in {found.name for found in before}:
            before = family(process.pid)
        send(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=TIMEOUT_S)
        assert not family(process.pid)
        assert not still_running(before)
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "flatweights: interrupted"
    assert "Traceback" not in errors


@pytest.mark.slow
def test_interrupt_while_a_worker_comes_back_stops_everything(folder):
    with running_demo(folder, "round 2: rank 1 died", "--kill-worker", "--rounds", "4") as process:
        before = family(process.pid)
        time.sleep(1)  # Ray has started it again, or not yet
        before |= family(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=TIMEOUT_S)
        assert not family(process.pid)
        assert not still_running(before)
    assert process.returncode == 130
    assert errors == "flatweights: interrupted\n"


def test_worker_that_dies_is_named(folder):
    with running_demo(folder, "round 1 of") as process:
        before = family(process.pid)
        workers = [found for found in before if found.name.startswith("ray::Digits")]
        assert len(workers) == 2
        os.kill(workers[0].id, signal.SIGKILL)
        _, errors = process.communicate(timeout=TIMEOUT_S)
        assert not still_running(before)
    assert process.returncode == 1
    (line,) = errors.splitlines()
    assert re.match(r"flatweights demo: rank [01]: ActorDiedError: The actor died", line)
