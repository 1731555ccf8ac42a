"""Images, batches and checkpoints of the example `resnet`: no TensorFlow, no Ray."""

from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from flatweights import FlatWeights
from flatweights.examples.resnet import Images, draw_batch, load_images, main


def test_digits_are_enlarged_and_split() -> None:
    scans = load_digits()
    parts = load_images("digits", seed=3)
    assert [len(labels) for _, labels in parts] == [1437, 360]
    small = {
        image.tobytes(): label for image, label in zip(scans.images, scans.target, strict=False)
    }
    seen = []
    for pixels, labels in parts:
        assert pixels.shape[1:] == (32, 32, 3)
        assert [str(part.dtype) for part in (pixels, labels)] == ["uint8", "int32"]
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
    rng = np.random.default_rng(0)
    shifts = set()
    for _ in range(20):
        batch, labels = draw_batch(columns(), 40, True, rng)
        assert batch.shape == (40, 32, 32, 3)
        assert batch.dtype == np.uint8
        assert labels.tolist() == [0] * 40
        middle = batch[:, 16, :, 0].astype(int)  # padding is darker than all pixels
        mirrored = middle[:, 8] > middle[:, 24]
        assert 5 < mirrored.sum() < 35
        shifts |= {int(np.argmax(row)) for row in middle[~mirrored]}
    assert shifts == set(range(27, 32)), "four pixels at most"
    digits, _ = draw_batch(columns(), 40, False, rng)
    assert not np.any(digits[:, 16, 8, 0] > digits[:, 16, 24, 0]), "mirrored: another digit"


def test_batches_depend_on_the_generator_alone() -> None:
    images = load_images("digits", seed=0)[0]
    one, same, other = (draw_batch(images, 40, True, np.random.default_rng(k)) for k in (1, 1, 2))
    for part in range(2):
        np.testing.assert_array_equal(one[part], same[part])
        assert not np.array_equal(one[part], other[part])


def says(*options: str) -> str:
    with pytest.raises(SystemExit) as error:
        main(options)
    return str(error.value)


@pytest.mark.parametrize("content", [b"", b"something else", None])
def test_a_file_that_is_no_checkpoint_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "weights.safetensors"
    if content is None:
        FlatWeights({"w": np.zeros(3)}).save(path)
    else:
        path.write_bytes(content)
    assert says(f"--checkpoint={path}").startswith(f"{path}: no checkpoint of this program: ")


def test_nothing_is_left_to_do_after_the_last_round(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "weights.safetensors"
    FlatWeights({"sgd/iteration": np.int64(40)}).save(path)
    message = says(f"--checkpoint={path}", "--rounds=4")
    assert message == "nothing is left: choose more --rounds or another --checkpoint"
    assert capsys.readouterr().out == f"{path}: 4 of 4 rounds are done\n"
