"""The examples `digits_lbfgs` and `digits_lbfgs_actors`, run as a user runs them."""

import argparse
import contextlib
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference import run_example

from flatweights.demo import _replica
from flatweights.examples import digits_lbfgs, digits_lbfgs_actors
from flatweights.examples._exchange import Seconds
from flatweights.examples._lbfgs import Fit, Search

TITLES = ["iterations", "evaluations", "loss", "train", "test", "seconds", "ms, median"]


def read_table(output: str) -> dict[str, dict[str, str]]:
    """The cells of the table at the end, by row and title."""
    lines = [re.split(r"\s{2,}", line.strip()) for line in output.splitlines()]
    begin = lines.index(TITLES)
    rows = [line for line in lines[begin + 2 :] if line != [""]]
    return {name: dict(zip(TITLES, cells, strict=True)) for name, *cells in rows}


@pytest.mark.parametrize("path", ["bound"], indirect=True)
def test_both_ways_fit_the_digits_alike(tmp_path: Path) -> None:
    plot = tmp_path / "digits.png"
    done = run_example("digits_lbfgs", "--plot", str(plot), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    table = read_table(done.stdout)
    ours, loop = table["flatweights"], table["loop over variables"]
    for title in TITLES[:5]:
        assert ours[title] == loop[title], "the same bits, so the same steps"
    assert int(ours["iterations"]) > 50
    assert float(ours["test"]) > 0.95
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("path", ["bound"], indirect=True)
def test_actors_fit_the_digits_as_one_process_does(tmp_path: Path) -> None:
    plot = tmp_path / "digits.png"
    options = ("--layers=3", "--width=32", "--iterations=80", "--plot", str(plot))
    done = run_example("digits_lbfgs_actors", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = re.search(r"the first 10 losses: the same within (\S+)", done.stdout)
    assert found, done.stdout
    assert float(found[1]) <= 1e-5
    assert re.search(r"exchange per round: \S+ ms as one buffer, \S+ ms as a dict", done.stdout)
    table = read_table(done.stdout)
    alone, together = table["in this process"], table["2 actors"]
    assert float(alone["test"]) > 0.95
    for accuracy in ("train", "test"):
        assert float(together[accuracy]) == pytest.approx(float(alone[accuracy]), abs=0.006)
    assert plot.read_bytes().startswith(b"\x89PNG")


def make_fit(loss: float, test: float) -> Fit:
    return Fit(Search(np.zeros(1), 1, [2.0, loss], [0.1, 0.2]), 0.9, test)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither TensorFlow nor Ray, for programs whose fits are given."""
    monkeypatch.setattr(sys, "argv", ["digits"])
    monkeypatch.setattr(_replica, "make_tensorflow_deterministic", lambda: None)
    monkeypatch.setattr(digits_lbfgs_actors, "ray_for", lambda cpus: contextlib.nullcontext())


@pytest.mark.usefixtures("quick")
def test_a_bad_fit_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(digits_lbfgs, "fit", lambda way, options: make_fit(1.0, 0.5))
    with pytest.raises(SystemExit, match=r"accuracy below 0\.95: it needs more --iterations"):
        digits_lbfgs.main()
    assert "1.0000" in capsys.readouterr().out


@pytest.mark.usefixtures("quick")
def test_a_fit_that_is_another_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fit_in_actors(options: argparse.Namespace) -> tuple[Any, Seconds]:
        return make_fit(1.0001, 0.99), Seconds(1.0, 2.0)

    monkeypatch.setattr(digits_lbfgs, "fit", lambda way, options: make_fit(1.0, 0.99))
    monkeypatch.setattr(digits_lbfgs_actors, "fit_in_actors", fit_in_actors)
    with pytest.raises(SystemExit, match=r"the same losses within 1e-05, got 1e-04"):
        digits_lbfgs_actors.main()
