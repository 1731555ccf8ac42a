"""Programs of tests that need a Ray of their own, each in a process of its own."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from reference import clean_environment

HELPERS = Path(__file__).parent


@contextmanager
def program(function: Callable[..., None], *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run a function of a test file in a process, group and session of its own."""
    code = (
        "import importlib.util, sys, ray; sys.path.insert(0, sys.argv[1]);"
        "spec = importlib.util.spec_from_file_location('program', sys.argv[2]);"
        "program = importlib.util.module_from_spec(spec); spec.loader.exec_module(program);"
        "getattr(program, sys.argv[3])(*sys.argv[4:])"
    )
    # A folder of its own: a cluster leaves its address there, for any other program to find.
    # (The names of Ray's sockets must be short.)
    folder = tempfile.mkdtemp(prefix="fw-", dir="/tmp")
    file, name = function.__code__.co_filename, function.__name__
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(HELPERS), file, name, *arguments],
        env=clean_environment(PYTHONPATH=str(HELPERS), RAY_DEDUP_LOGS="0", RAY_TMPDIR=folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        shutil.rmtree(folder, ignore_errors=True)


def output_of(function: Callable[..., None], *arguments: str, timeout: float = 300) -> str:
    """The output of such a function."""
    with program(function, *arguments) as process:
        out, err = process.communicate(timeout=timeout)
        assert process.returncode == 0, err[-5000:]
    return out
