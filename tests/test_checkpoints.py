"""Checkpoints of the example `resnet`."""

import json
from pathlib import Path

import numpy as np
import pytest

from flatweights import FlatWeights
from flatweights.examples._checkpoints import CheckpointError, Checkpoints, Last

SETTINGS = {"--rounds": 4, "images": "digits"}


def weights(value: float) -> FlatWeights:
    return FlatWeights({"w": np.full(3, value, np.float32)})


def saved(folder: Path, *numbers: int) -> Checkpoints:
    checkpoints = Checkpoints(folder, SETTINGS)
    for number in numbers:
        checkpoints.last = Last(number, weights(number))
        assert (
            checkpoints.save() == f"round {number} is saved: {folder}/round-{number:06}.safetensors"
        )
    return checkpoints


def test_the_last_one_is_loaded_and_the_others_are_gone(tmp_path: Path) -> None:
    saved(tmp_path, 1, 3)
    (tmp_path / "mine.safetensors").touch()
    found = Checkpoints(tmp_path, SETTINGS)
    last = found.load()
    assert last.number == 3
    np.testing.assert_array_equal(last.weights["w"], [3, 3, 3])
    assert found.saved == 3
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"checkpoint.json", "round-000003.safetensors", "mine.safetensors"}


def test_without_a_round_there_is_nothing_to_save(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "none", SETTINGS)
    assert checkpoints.save() == "no round is complete: nothing to save"
    with pytest.raises(CheckpointError, match="none: no checkpoint to resume"):
        checkpoints.load()


def test_where_writing_fails_the_one_before_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = saved(tmp_path, 1)
    checkpoints.last = Last(2, weights(2))
    real = Path.write_text

    def half(path: Path, text: str) -> int:
        real(path, text[:10])
        raise OSError("no space left")

    with monkeypatch.context() as full:
        full.setattr(Path, "write_text", half)
        with pytest.raises(OSError, match="no space"):
            checkpoints.save()
    assert Checkpoints(tmp_path, SETTINGS).load().number == 1
    assert checkpoints.save().startswith("round 2 is saved")
    assert Checkpoints(tmp_path, SETTINGS).load().number == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"--rounds": 5, "images": "digits"}, "--rounds: 4 there, 5 here$"),
        ({"--rounds": 5}, "--rounds: 4 there, 5 here; images: 'digits' there, None here$"),
    ],
)
def test_another_training_is_refused(
    tmp_path: Path, settings: dict[str, int], message: str
) -> None:
    saved(tmp_path, 1)
    with pytest.raises(CheckpointError, match=message):
        Checkpoints(tmp_path, settings).load()


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"round": "1", "weights": "w", "settings": {}}', "\xff"]
)
def test_a_damaged_index_is_named(tmp_path: Path, text: str) -> None:
    saved(tmp_path, 1)
    (tmp_path / "checkpoint.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"checkpoint\.json: no whole checkpoint"):
        Checkpoints(tmp_path, SETTINGS).load()
    with pytest.raises(CheckpointError, match="another training"):
        Checkpoints(tmp_path, SETTINGS).check_free(4)


def test_damaged_and_missing_weights_are_named(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    file = tmp_path / "round-000001.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"its weights: .*round-000001\.safetensors"):
        Checkpoints(tmp_path, SETTINGS).load()
    file.unlink()
    with pytest.raises(CheckpointError, match=r"its weights: .*round-000001\.safetensors"):
        Checkpoints(tmp_path, SETTINGS).load()


def test_only_a_complete_training_of_the_same_settings_may_be_replaced(tmp_path: Path) -> None:
    Checkpoints(tmp_path, SETTINGS).check_free(4)
    saved(tmp_path, 3)
    with pytest.raises(CheckpointError, match="which --resume continues"):
        Checkpoints(tmp_path, SETTINGS).check_free(4)
    saved(tmp_path, 4)
    Checkpoints(tmp_path, SETTINGS).check_free(4)
    with pytest.raises(CheckpointError, match="another training"):
        Checkpoints(tmp_path, {"--rounds": 4}).check_free(4)
    assert json.loads((tmp_path / "checkpoint.json").read_text())["round"] == 4
