"""A supervised program leaves no process behind, in whatever way it ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flatweights.examples import _supervise

WAIT_S = 120


@contextmanager
def supervised(body: str, before: str = "") -> Iterator[subprocess.Popen[str]]:
    """Run ``body`` as the supervised function of a program, which does ``before`` first."""
    # The file alone: the package would import NumPy.
    code = f"""
import ctypes, os, runpy, signal, subprocess, sys, time
supervise = runpy.run_path({_supervise.__file__!r})["supervise"]
def main():
    {body}
{before}
sys.exit(supervise(main))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def outcome(body: str) -> tuple[int, str, str]:
    with supervised(body) as process:
        out, err = process.communicate(timeout=WAIT_S)
    return process.returncode, out, err


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        pytest.param("print('said')", (0, "said\n", ""), marks=pytest.mark.slow),
        pytest.param("sys.exit(3)", (3, "", ""), marks=pytest.mark.slow),
        ("sys.exit('what to do')", (1, "", "what to do\n")),
        ("os.kill(os.getpid(), 9)", (137, "", "ended by SIGKILL; if memory was short, use")),
    ],
)
def test_the_exit_is_that_of_the_program(body: str, expected: tuple[int, str, str]) -> None:
    code, out, err = outcome(body)
    assert (code, out) == expected[:2]
    assert err.startswith(expected[2])
    assert bool(err) == bool(expected[2])


def test_an_error_has_its_traceback() -> None:
    code, _, err = outcome("raise KeyError('name')")
    assert code == 1
    assert err.endswith("KeyError: 'name'\n")
    assert "Traceback" in err


# A child, a grandchild in a session of its own, and an orphan, like Ray's processes.
STARTS = (
    "[print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid) for _ in range(2)];"
    "left = subprocess.run(['sh', '-c', 'sleep 600 >/dev/null & echo $!'], stdout=-1).stdout;"
    "print(left.decode(), end='', flush=True);"
)


def started(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout is not None
    pids = [int(process.stdout.readline()) for _ in range(3)]
    assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    return pids


def test_processes_do_not_outlive_the_program() -> None:
    with supervised(STARTS + "time.sleep(0.5)") as process:
        pids = started(process)
        assert process.wait(WAIT_S) == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.parametrize(
    "received",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        signal.SIGTERM,
        pytest.param(signal.SIGHUP, marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_all_with_one_line(received: signal.Signals) -> None:
    # Holding the GIL, as some of Ray's and TensorFlow's C++ does.
    with supervised(STARTS + "ctypes.PyDLL(None).sleep(600)") as process:
        pids = started(process)
        process.send_signal(received)
        _, err = process.communicate(timeout=WAIT_S)
        assert (process.returncode, err) == (128 + received, "interrupted\n")
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_signal_that_the_process_ignores_ends_nothing() -> None:
    ignored = "signal.signal(signal.SIGHUP, signal.SIG_IGN); signal.signal(signal.SIGCHLD, 1)"
    with supervised("print(input(), flush=True)", f"{ignored}; print(flush=True)") as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGHUP)  # as the end of a terminal under nohup
        out, err = process.communicate("goes on\n", timeout=WAIT_S)
    assert (process.returncode, out, err) == (0, "goes on\n", "")


def test_the_program_dies_with_its_supervisor() -> None:
    with supervised("print(os.getpid(), flush=True); time.sleep(600)") as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()
        deadline = time.monotonic() + WAIT_S
        while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
            os.sched_yield()
            time.sleep(0.02)
        assert not Path(f"/proc/{pid}").exists()


def test_ctrl_c_ends_the_command_while_it_is_imported() -> None:
    code = """
import sys, time
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy":
            print("importing", flush=True)
            while True: time.sleep(0.05)
sys.meta_path.insert(0, Slow())
import flatweights_command
flatweights_command.main()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, err) == (130, "interrupted\n")
