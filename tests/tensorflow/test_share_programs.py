"""Random programs over shared memory: TensorFlow does not write to it, and computes the same."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import share_programs

pytestmark = pytest.mark.parametrize("path", ["bound"], indirect=True)


@pytest.mark.parametrize("mode", share_programs.MODES)
def test_random_programs_do_not_write_to_what_they_share(path: Any, mode: Any) -> None:
    # Without the extra reference of roots, 5 of the first 12 functions write to the memory.
    for seed in (
        (0, 1, 2, 4) if mode == "function" else (0, 4)
    ):  # 4 also reads and writes single rows
        assert share_programs.run_program(mode, seed, share_programs.frozen) == []


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 1200, 200))
def test_random_programs_run_over_protected_memory(path: Any, first: Any) -> None:
    program = Path(share_programs.__file__)
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", program, str(first), str(first + 200)],
        cwd=program.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
