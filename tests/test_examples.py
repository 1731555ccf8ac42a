"""The programs of `flatweights.examples`, run as a user runs them."""

import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest
from reference import run_example, run_python

PROGRAMS = ("linear_weights", "linear_gradients")
MODES = {"eager": [], "graph": ["--graph"]}


Runs = dict[tuple[str, str], Future[subprocess.CompletedProcess[str]]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Each program in each mode, two at a time: starting TensorFlow takes most of it."""
    cwd = tmp_path_factory.mktemp("examples")
    with ThreadPoolExecutor(2) as pool:
        yield {
            (program, mode): pool.submit(run_example, program, "--workers=2", *MODES[mode], cwd=cwd)
            for program, mode in product(PROGRAMS, MODES)
        }


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_linear_regression_finds_the_line(runs: Runs, program: str, mode: str) -> None:
    done = runs[program, mode].result()
    assert done.returncode == 0, done.stderr
    found = re.search(r"slope (\S+) .*intercept (\S+) ", done.stdout)
    assert found, done.stdout
    slope, intercept = map(float, found.groups())
    assert abs(slope - 0.1) <= 1e-3
    assert abs(intercept - 0.3) <= 1e-3


def test_a_result_off_the_line_fails(capsys: pytest.CaptureFixture[str]) -> None:
    from flatweights.examples._linear import report

    with pytest.raises(SystemExit, match="more --iterations"):
        report(0.1, 0.302)
    assert "slope 0.1000 (true: 0.1), intercept 0.3020 (true: 0.3)" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--workers", "--iterations"])
def test_options_are_checked(tmp_path: Path, option: str) -> None:
    done = run_example("linear_weights", option, "0", cwd=tmp_path)
    assert done.returncode == 2
    assert f"argument {option}: expected at least 1, got '0'" in done.stderr


def test_examples_import_tensorflow_where_they_use_it() -> None:
    code = """
import sys
import flatweights.examples
assert "ray" not in sys.modules
import flatweights.examples.linear_gradients
import flatweights.examples.linear_weights
assert "tensorflow" not in sys.modules
"""
    run_python(code)
