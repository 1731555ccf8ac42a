"""The example `keras_fit`, run as a user runs it."""

import contextlib
import re
import sys
from pathlib import Path

import pytest
from reference import run_example

from flatweights.examples import keras_fit

ROWS = ("Network, as in Ray's guide", "Network", "FlatNetwork")


def test_plain_and_flat_actors_learn_the_same(tmp_path: Path) -> None:
    done = run_example("keras_fit", "--rounds=5", "--plot=fit.png", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [re.split(r"\s{2,}", line.strip()) for line in done.stdout.splitlines()]
    rows = {name: cells for name, *cells in lines if name in ROWS}
    assert tuple(rows) == ROWS
    learned = {tuple(cells[:2]) for cells in rows.values()}
    assert len(learned) == 1, "two workers' averages round alike, whoever makes them"
    assert float(next(iter(learned))[1]) > 0.95
    for cells in rows.values():
        assert float(cells[2].removesuffix(" ms")) > 0
    assert (tmp_path / "fit.png").read_bytes().startswith(b"\x89PNG")


def test_a_bad_fit_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = keras_fit.Results(
        losses={"Network": [2.0, 0.1], "FlatNetwork": [2.0, 1.5]},
        accuracy={"Network": 0.99, "FlatNetwork": 0.4},
        seconds={name: [0.1, 0.003, 0.002] for name in ROWS},
    )
    monkeypatch.setattr(sys, "argv", ["keras_fit"])
    monkeypatch.setattr(keras_fit, "ray_for", lambda cpus: contextlib.nullcontext())
    monkeypatch.setattr(keras_fit, "fit_in_actors", lambda options: results)
    with pytest.raises(SystemExit, match=r"accuracy below 0\.95: it needs more --rounds"):
        keras_fit.main()
    assert re.search(r"FlatNetwork +1\.5000 +0\.400 +3\.0 ms +1\.0", capsys.readouterr().out)
