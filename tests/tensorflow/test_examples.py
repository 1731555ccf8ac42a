"""The examples that need no Ray, run within this process."""

import re
from pathlib import Path

import numpy as np
import pytest

from flatweights.examples import digits_lbfgs, one_code

pytestmark = pytest.mark.parametrize("path", ["bound"], indirect=True)


@pytest.fixture(autouse=True)
def _tensorflow_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings for determinism would stay in force for the whole process."""
    import tensorflow as tf

    monkeypatch.setattr(tf.config.threading, "set_intra_op_parallelism_threads", lambda count: None)
    monkeypatch.setattr(tf.config.experimental, "enable_op_determinism", lambda: None)


def read_table(output: str) -> list[list[str]]:
    lines = [re.split(r"\s{2,}", line.strip()) for line in output.splitlines()]
    return [cells for cells in lines if len(cells) > 1]


@pytest.mark.slow
def test_each_way_goes_on_where_another_has_stopped(capsys: pytest.CaptureFixture[str]) -> None:
    curves = one_code.main(["--steps=60"])
    titles, *rows = read_table(capsys.readouterr().out)
    assert titles == ["first half", "second half", "last loss", "accuracy", "weights"]
    assert len(rows) == 3 + 9
    for first, second, _, accuracy, weights in rows:
        assert float(accuracy) > 0.9
        if second in (first, "(no break)"):
            assert weights == "same bits"
    assert [len(losses) for losses in curves["loss by step"].values()] == [60] * 3


def test_a_break_that_changes_the_weights_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Forgetful:
        """Variables that keep their first values, even after a load."""

        def __init__(self, seed: int) -> None:
            self._weights = np.full(3, float(seed))

        def get_flat(self) -> np.ndarray:
            return self._weights

        def save(self, path: Path) -> None:
            path.write_bytes(b"")

        def load(self, path: Path) -> None:
            pass

    def forgetful(seed: int) -> one_code.Training:
        return one_code.Training(
            Forgetful(seed), lambda images, labels: 1.0, lambda images: np.zeros((len(images), 10))
        )

    monkeypatch.setattr(one_code, "WAYS", {"forgetful": forgetful})
    monkeypatch.setattr(one_code, "ENOUGH", 0.0)
    with pytest.raises(SystemExit, match=r"differ by 1\.0 from those without a break"):
        one_code.main([])
    assert "(no break)" in capsys.readouterr().out


def test_the_digits_are_fitted(capsys: pytest.CaptureFixture[str]) -> None:
    curves = digits_lbfgs.main(["--layers=2"])
    _, fit = read_table(capsys.readouterr().out)
    assert fit[0] == "one process"
    assert int(fit[1]) > 50
    assert float(fit[5]) > 0.95
    ((seconds, losses),) = curves["loss by seconds"].values()
    assert len(seconds) == len(losses) == int(fit[1])
    assert losses[-1] == min(losses) < 0.1 * losses[0]


def test_a_bad_fit_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"accuracy below 0\.95: it needs more --iterations"):
        digits_lbfgs.main(["--layers=1", "--iterations=1"])
    assert "one process" in capsys.readouterr().out
