"""Files, batches and checkpoints of the example `resnet`: no TensorFlow, no Ray."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.datasets import load_digits

from flatweights import FlatWeights
from flatweights.examples.resnet import (
    Checkpoint,
    Images,
    draw_batch,
    learning_rate,
    load_images,
    main,
    open_checkpoint,
)

LABELS = {"cifar10": (10,), "cifar100": (20, 100)}
SETTINGS = "4 rounds, digits"


def load(pattern: str | None, dataset: str = "cifar10", tests: bool = False) -> Images:
    options = Namespace(train_data_path=pattern, eval_data_path=pattern, dataset=dataset, seed=3)
    return load_images(options, tests)


def write(path: Path, name: str, images: int, seed: int = 0) -> NDArray[np.uint8]:
    """Write random images; return the records."""
    rng = np.random.default_rng(seed)
    labels = [rng.integers(0, n, (images, 1), np.uint8) for n in LABELS[name]]
    pixels = rng.integers(0, 256, (images, 3 * 32 * 32), np.uint8)
    records = np.concatenate([*labels, pixels], axis=1)
    records.tofile(path)
    return records


@pytest.mark.parametrize("name", LABELS)
def test_records_are_read_in_the_order_of_the_files(tmp_path: Path, name: str) -> None:
    written = {n: write(tmp_path / f"data_{n}.bin", name, n, seed=n) for n in (3, 1, 2)}
    (tmp_path / "readme.html").write_text("something else")
    pixels, labels = load(str(tmp_path / "data_*.bin"), name)
    records, first = np.concatenate([written[n] for n in (1, 2, 3)]), len(LABELS[name])
    assert labels.tolist() == records[:, first - 1].tolist()
    # Pixel by pixel, as the format is described: red, green, blue; row by row.
    for i, c, y, x in np.ndindex(6, 3, 32, 32):
        assert pixels[i, y, x, c] == records[i, first + 1024 * c + 32 * y + x]


def refused(pattern: Path, name: str = "cifar10") -> str:
    with pytest.raises(SystemExit) as error:
        load(str(pattern), name)
    return str(error.value)


def test_wrong_files_are_named(tmp_path: Path) -> None:
    assert "no*: expected at least one file, found none" in refused(tmp_path / "no*")
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError, match="folder"):
        load(str(tmp_path / "folder"))
    (tmp_path / "empty").touch()
    assert "expected records of 3073 bytes (cifar10), got 0" in refused(tmp_path / "empty")
    write(tmp_path / "1", "cifar10", 2)
    (tmp_path / "2").write_bytes(write(tmp_path / "2", "cifar10", 3).tobytes()[:-1])
    assert "2: expected records of 3073 bytes (cifar10), got 9218" in refused(tmp_path / "[12]")
    assert "1: expected records of 3074 bytes (cifar100)" in refused(tmp_path / "1", "cifar100")


@pytest.mark.parametrize(("name", "column"), [("cifar10", 0), ("cifar100", 0), ("cifar100", 1)])
def test_labels_that_there_are_not_are_refused(tmp_path: Path, name: str, column: int) -> None:
    records = write(tmp_path / "1", name, 5)
    records[3, column] = LABELS[name][column]
    records.tofile(tmp_path / "1")
    assert f"1: expected labels of {name}, below" in refused(tmp_path / "1", name)


def test_digits_are_enlarged_and_split() -> None:
    scans = load_digits()
    parts = [load(None, "digits", tests) for tests in (False, True)]
    assert [len(labels) for _, labels in parts] == [1438, 359]
    small = {
        image.tobytes(): label for image, label in zip(scans.images, scans.target, strict=False)
    }
    seen = []
    for pixels, labels in parts:
        assert pixels.dtype == np.uint8
        for image, label in zip(pixels, labels, strict=True):
            scan = np.round(image[2::4, 2::4, 1] * (16 / 255))
            assert small[scan.tobytes()] == label
            seen.append(scan.tobytes())
    assert len(set(seen)) == len(small)


def columns() -> Images:
    """Images that get lighter from left to right."""
    pixels = np.tile(np.arange(100, 228, 4, dtype=np.uint8)[:, np.newaxis], (2, 32, 1, 3))
    return pixels, np.zeros(2, np.int32)


def test_batches_are_shifted_and_mirrored() -> None:
    batch, labels = draw_batch(columns(), 40, True, np.random.default_rng(0))
    assert batch.shape == (40, 32, 32, 3)
    assert labels.tolist() == [0] * 40
    assert batch.dtype == np.uint8
    middle = batch[:, 16, :, 0].astype(int)  # padding is darker than all pixels
    mirrored = middle[:, 8] > middle[:, 24]
    assert 5 < mirrored.sum() < 35
    shifts = {int(np.argmax(row)) for row in middle[~mirrored]}
    assert shifts <= set(range(27, 32)), "four pixels at most"
    assert len(shifts) > 2
    again, _ = draw_batch(columns(), 40, True, np.random.default_rng(0))
    np.testing.assert_array_equal(again, batch)
    digits, _ = draw_batch(columns(), 40, False, np.random.default_rng(0))
    assert not np.any(digits[:, 16, 8, 0] > digits[:, 16, 24, 0]), "mirrored: another digit"


def test_the_rate_falls_after_half_and_three_quarters() -> None:
    rates = [learning_rate(1.0, number, 8) for number in range(1, 9)]
    assert rates == pytest.approx([1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01])


# Checkpoints.


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint.safetensors"


def save(path: Path, number: int) -> None:
    weights = FlatWeights({"w": np.full(3, number, np.float32)})
    said = Checkpoint(number, weights).save(path, SETTINGS)
    assert said == f"round {number} is saved: {path}"


def says(call: Any, *arguments: Any) -> str:
    with pytest.raises(SystemExit) as error:
        call(*arguments)
    return str(error.value)


def test_the_last_checkpoint_is_loaded(path: Path) -> None:
    for number in (1, 3):
        save(path, number)
    checkpoint = open_checkpoint(path, SETTINGS, 4, True)
    assert checkpoint.number == 3
    assert checkpoint.weights is not None
    assert {name: array.tolist() for name, array in checkpoint.weights.items()} == {"w": [3, 3, 3]}


def test_without_a_round_there_is_nothing_to_save_and_nothing_to_resume(path: Path) -> None:
    assert Checkpoint().save(path, SETTINGS) == "no round is complete: nothing to save"
    assert open_checkpoint(path, SETTINGS, 4, False) == Checkpoint()
    with pytest.raises(FileNotFoundError):
        open_checkpoint(path, SETTINGS, 4, True)


@pytest.mark.parametrize("resume", [True, False])
def test_a_damaged_checkpoint_is_named(path: Path, resume: bool) -> None:
    path.write_bytes(b"")
    assert f"{path}: no whole checkpoint" in says(open_checkpoint, path, SETTINGS, 4, resume)
    FlatWeights({"w": np.zeros(3)}).save(path)
    assert f"{path}: no whole checkpoint" in says(open_checkpoint, path, SETTINGS, 4, resume)


def test_another_training_is_not_resumed_and_not_replaced(path: Path) -> None:
    save(path, 4)
    for resume in (True, False):
        message = says(open_checkpoint, path, "5 rounds, digits", 5, resume)
        assert message == (
            f"{path}: a checkpoint of another training:\n"
            "  there 4 rounds, digits\n  here 5 rounds, digits"
        )
    assert "all 4 rounds are done" in says(open_checkpoint, path, SETTINGS, 4, True)
    assert open_checkpoint(path, SETTINGS, 4, False) == Checkpoint()  # complete: may be done again
    save(path, 2)
    assert "which --resume continues" in says(open_checkpoint, path, SETTINGS, 4, False)


def test_what_does_not_go_together_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("a.bin"), "cifar10", 2)
    files = ["--train-data-path=a*", "--eval-data-path=a.bin"]
    assert "an image for each of 3 workers, got 2" in says(main, [*files, "--num-workers=3"])
    for options in (files[:1], files[1:], ["--dataset=cifar10"], [*files, "--dataset=digits"]):
        with pytest.raises(SystemExit):
            main(options)
        expected = "--train-data-path, --eval-data-path: expected both for CIFAR, none for digits"
        assert expected in capsys.readouterr().err
    with pytest.raises(FileExistsError, match=r"a\.bin"):
        main(["--checkpoint-dir=a.bin"])
