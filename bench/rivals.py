"""Rounds without Python or Ray, as rivals in the same run: Open MPI, and bare memory."""

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench import runner

ROOT = Path(__file__).parents[1]
_PATHS = [str(Path(sys.executable).parent)]  # a wheel of Open MPI puts mpirun here
_LONGEST = 1.0  # seconds for each


def rows_of(case: str, elements: int, count: int, ours: float, budget: float) -> list[runner.Row]:
    """Return the rows of an average of float32 vectors over processes of one node.

    Args:
        case: The name of the case.
        elements: The length of the vectors.
        count: The number of processes.
        ours: The seconds of our row.
        budget: Seconds for each rival.

    Returns:
        No row of what is not installed.
    """
    seconds = str(min(_LONGEST, budget))
    rows = [*open_mpi(case, elements, count, budget)]
    for way in ("coordinator", "slices"):
        command = [bare_rounds(), str(count), str(elements), way, seconds]
        rows += _row(case, f"bare memory and futexes, {way}", command, "C++ compiler")
    for row in rows:
        row.ratio = row.seconds / ours
    return rows


def open_mpi(case: str, elements: int, count: int, budget: float) -> list[runner.Row]:
    """Return the row of Open MPI, in processes of its own; no row if it is not installed."""
    path = os.pathsep.join([*_PATHS, os.environ.get("PATH", "")])
    command = [shutil.which("mpirun", path=path), "--oversubscribe", "--allow-run-as-root"]
    command += ["-n", str(count), sys.executable, "-m", "bench.mpi_allreduce"]
    command += [str(elements), str(min(_LONGEST, budget))]
    return _row(case, "Open MPI Allreduce", command, "Open MPI")


@functools.cache
def bare_rounds() -> str | None:
    """Return the program `bare_rounds.cpp`, compiled; None without a compiler."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        return None
    program = Path(tempfile.mkdtemp()) / "bare_rounds"
    options = ["-std=c++20", "-O3", "-march=native", "-o", str(program)]
    source = str(ROOT / "bench" / "bare_rounds.cpp")
    done = subprocess.run([compiler, *options, source], capture_output=True, check=False)
    return str(program) if done.returncode == 0 else None


def _row(case: str, name: str, command: Sequence[str | None], needs: str) -> list[runner.Row]:
    """Return the row of a program that prints its seconds."""
    given = [part for part in command if part is not None]
    if len(given) < len(command):
        print(f"{case}: no row of {name}: there is no {needs}")
        return []
    run = subprocess.run(given, capture_output=True, text=True, cwd=ROOT, check=False)
    if run.returncode != 0:
        print(f"{case}: no row of {name}: {(run.stderr.strip().splitlines() or ['?'])[-1]}")
        return []
    return [runner.row_of(case, name, json.loads(run.stdout.splitlines()[-1]))]
