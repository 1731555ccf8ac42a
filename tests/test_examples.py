"""The programs of `flatweights.examples`, run as a user runs them."""

import re
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from reference import run_example, run_python

from flatweights.examples._exchange import Seconds
from flatweights.examples._linear import report

PROGRAMS = ("linear_weights", "linear_gradients")
MODES = {"eager": [], "graph": ["--graph"]}
INTERRUPTED_S = 60


Runs = dict[tuple[str, str], Future[subprocess.CompletedProcess[str]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("examples")


@pytest.fixture(scope="module")
def runs(folder: Path) -> Iterator[Runs]:
    """Each program in each mode, two at a time: starting TensorFlow takes most of it."""

    def run(program: str, mode: str) -> subprocess.CompletedProcess[str]:
        options = ["--workers=2", f"--plot={program}-{mode}.png", *MODES[mode]]
        return run_example(program, *options, cwd=folder)

    with ThreadPoolExecutor(2) as pool:
        yield {key: pool.submit(run, *key) for key in product(PROGRAMS, MODES)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_linear_regression_finds_the_line(
    runs: Runs, folder: Path, program: str, mode: str
) -> None:
    done = runs[program, mode].result()
    assert done.returncode == 0, done.stderr
    found = dict(re.findall(r"^ +(slope|intercept) +\S+ +(\S+) *$", done.stdout, re.MULTILINE))
    assert float(found["slope"]) == pytest.approx(0.1, abs=1e-3)
    assert float(found["intercept"]) == pytest.approx(0.3, abs=1e-3)
    times = re.search(r"round: (\S+) ms as one buffer, (\S+) ms as a dict", done.stdout)
    assert times, done.stdout
    assert min(map(float, times.groups())) > 0
    assert (folder / f"{program}-{mode}.png").read_bytes().startswith(b"\x89PNG")


def test_a_result_off_the_line_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="more --iterations"):
        report([[0.1, 0.302]], Seconds(0.002, 0.003), Namespace(plot=None))
    out = capsys.readouterr().out
    assert "2.0 ms as one buffer, 3.0 ms as a dict of arrays (1.5 times)" in out
    assert re.search("intercept +0.3000 +0.3020", out)


@pytest.mark.parametrize("there", ["raylet", "ray::Worker"])
def test_interrupt_ends_an_example_cleanly(folder: Path, there: str) -> None:
    import psutil  # which comes with Ray

    command = [sys.executable, "-m", "flatweights.examples.linear_weights"]
    process = subprocess.Popen(
        [*command, "--workers=1", "--iterations=1000000"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    family: list[psutil.Process] = []
    while process.poll() is None and there not in map(title, family):
        family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=INTERRUPTED_S)
    assert (process.returncode, out) == (130, "")
    assert errors.splitlines()[-1] == "interrupted"
    assert "Traceback" not in errors
    assert not psutil.wait_procs(family, timeout=INTERRUPTED_S)[1]


def title(process: Any) -> str:
    """What a process calls itself now; nothing if it has ended."""
    try:
        return Path(f"/proc/{process.pid}/comm").read_text().rstrip("\n")
    except OSError:
        return ""


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
import flatweights.examples.resnet
assert "tensorflow" not in sys.modules
"""
    run_python(code)
