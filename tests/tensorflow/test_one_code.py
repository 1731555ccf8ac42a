"""The example `one_code`, run as a user runs it."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from reference import run_example

from flatweights.examples import one_code


@pytest.mark.parametrize("path", ["bound"], indirect=True)
def test_each_way_goes_on_where_another_has_stopped(tmp_path: Path) -> None:
    plot = tmp_path / "one_code.png"
    done = run_example("one_code", "--plot", str(plot), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [re.split(r"\s{2,}", line.strip()) for line in done.stdout.splitlines()]
    titles, _, *rows = [cells for cells in lines if cells != [""]]
    assert titles == ["first half", "second half", "last loss", "accuracy", "weights"]
    assert len(rows) == 3 + 9
    for first, second, _, accuracy, weights in rows:
        assert float(accuracy) > 0.95
        if second in (first, "(no break)"):
            assert weights == "same bits"
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("path", ["bound"], indirect=True)
def test_a_break_that_changes_the_weights_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Forgetful(one_code.Way):
        """Ends at the weights that it begins with, whatever it loads."""

        def __init__(self, seed: int) -> None:
            self.variables = self
            self._weights = np.full(3, float(seed))

        def get_flat(self) -> np.ndarray:
            return self._weights

        def save(self, path: Path) -> None:
            path.write_bytes(b"")

        def load(self, path: Path) -> None:
            pass

        def train(self, images: np.ndarray, labels: np.ndarray) -> float:
            return 1.0

        def predict(self, images: np.ndarray) -> np.ndarray:
            return np.eye(10)[one_code.split_digits(1, 0)[1].labels]

    monkeypatch.setattr(one_code, "WAYS", {"forgetful": Forgetful})
    monkeypatch.setattr("flatweights.demo._replica.make_tensorflow_deterministic", lambda: None)
    monkeypatch.setattr(sys, "argv", ["one_code"])
    with pytest.raises(SystemExit, match=r"differ by 1\.0 from those without a break"):
        one_code.main()
    assert "(no break)" in capsys.readouterr().out
