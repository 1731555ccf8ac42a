"""The example `digits_lbfgs`, run as a user runs it."""

import sys
from pathlib import Path

import pytest
from reference import run_example

from flatweights.demo import _replica
from flatweights.examples import digits_lbfgs


@pytest.mark.parametrize("path", ["bound"], indirect=True)
def test_both_ways_fit_the_digits_alike(tmp_path: Path) -> None:
    plot = tmp_path / "digits.png"
    done = run_example("digits_lbfgs", "--plot", str(plot), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    titles, ours, loop = done.stdout.splitlines()
    assert titles.split()[:3] == ["iterations", "evaluations", "loss"]
    numbers, others = (line[20:].split() for line in (ours, loop))
    assert ours.startswith("flatweights ")
    assert numbers[:5] == others[:5], "the same bits, so the same steps"
    assert int(numbers[0]) > 50
    assert float(numbers[4]) > 0.95
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_bad_fit_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = digits_lbfgs.Fit(1, [2.0, 1.0], [0.1, 0.2], 0.9, 0.5)
    monkeypatch.setattr(sys, "argv", ["digits_lbfgs"])
    monkeypatch.setattr(_replica, "make_tensorflow_deterministic", lambda: None)
    monkeypatch.setattr(digits_lbfgs, "fit", lambda way, options: bad)
    with pytest.raises(SystemExit, match=r"accuracy below 0\.95: it needs more --iterations"):
        digits_lbfgs.main()
    assert "1.0000" in capsys.readouterr().out
