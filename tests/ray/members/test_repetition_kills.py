"""Members that are killed and stopped in calls that they repeat; see `killed_members`."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from reference import clean_environment

HELPERS = Path(__file__).parents[2] / "helpers"


def run(faults: int, *arguments: str) -> dict[str, Any]:
    ran = subprocess.run(
        [sys.executable, HELPERS / "killed_members.py", str(faults), "7", *arguments],
        capture_output=True,
        text=True,
        env=clean_environment(PYTHONPATH=str(HELPERS)),
        check=False,
        timeout=60 + 2 * faults,
    )
    assert ran.returncode == 0, ran.stderr
    told: dict[str, Any] = json.loads(ran.stdout)
    assert told["wrong"] == []
    assert told["kills"] >= faults / 2
    return told


@pytest.mark.slow
@pytest.mark.parametrize("faults", [20, 10_000])
def test_averages_are_right_whoever_is_killed_in_a_series(faults: int) -> None:
    assert run(faults)["in C++"] >= faults


@pytest.mark.slow
def test_averages_are_right_whoever_is_killed_in_a_step_without_python() -> None:
    assert run(300, "steps")["steps"] >= 3000
