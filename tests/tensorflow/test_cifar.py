"""CIFAR's binary files, written here by NumPy, read by the example `resnet`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.datasets import load_digits

from flatweights.examples._cifar import Cifar, CifarError
from flatweights.examples._images import Digits, evaluation_batches, training_batches

pytestmark = pytest.mark.parametrize("path", ["bound"], indirect=True)

LABELS = {"cifar10": (10,), "cifar100": (20, 100)}
Found = list[tuple[NDArray[np.uint8], int]]


def write(path: Path, name: str, images: int, seed: int = 0) -> NDArray[np.uint8]:
    """Write random images; return the records."""
    rng = np.random.default_rng(seed)
    labels = [rng.integers(0, n, (images, 1), np.uint8) for n in LABELS[name]]
    pixels = rng.integers(0, 256, (images, 3 * 32 * 32), np.uint8)
    records = np.concatenate([*labels, pixels], axis=1)
    records.tofile(path)
    return records


def read(cifar: Cifar, rank: int = 0, workers: int = 1) -> Found:
    return [(image, int(label)) for image, label in cifar.share(rank, workers).as_numpy_iterator()]


def expected(records: NDArray[np.uint8], labels: int) -> Found:
    """Pixel by pixel, as the format is described: red, green, blue; row by row."""
    found = []
    for record in records:
        image = np.empty((32, 32, 3), np.uint8)
        for c in range(3):
            for y in range(32):
                for x in range(32):
                    image[y, x, c] = record[labels + 1024 * c + 32 * y + x]
        found.append((image, int(record[labels - 1])))
    return found


def assert_equal(found: Found, wanted: Found) -> None:
    assert [label for _, label in found] == [label for _, label in wanted]
    for (image, _), (other, _) in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(image, other, strict=True)


@pytest.mark.parametrize("name", LABELS)
def test_records_are_read_in_the_order_of_the_files(tmp_path: Path, name: str) -> None:
    written = {n: write(tmp_path / f"data_{n}.bin", name, n, seed=n) for n in (3, 1, 2)}
    (tmp_path / "readme.html").write_text("something else")
    found = Cifar.find(str(tmp_path / "data_*.bin"))
    assert (found.name, found.size, found.classes) == (name, 6, LABELS[name][-1])
    records = np.concatenate([written[n] for n in (1, 2, 3)])
    assert_equal(read(found), expected(records, len(LABELS[name])))


@pytest.mark.parametrize("workers", [2, 3])
def test_shares_are_disjoint_and_cover_everything(tmp_path: Path, workers: int) -> None:
    records = write(tmp_path / "a", "cifar10", 7)
    found = Cifar.find(str(tmp_path / "a"), "cifar10")
    shares = [read(found, rank, workers) for rank in range(workers)]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    pixels = sorted(image.tobytes() for share in shares for image, _ in share)
    assert pixels == sorted(image.tobytes() for image, _ in expected(records, 1))


def fails(pattern: Path, message: str, name: str | None = None) -> None:
    with pytest.raises(CifarError, match=message):
        Cifar.find(str(pattern), name)


def test_wrong_files_are_named(tmp_path: Path) -> None:
    fails(tmp_path / "no*", r"no\*: expected at least one file, found none")
    (tmp_path / "folder").mkdir()
    fails(tmp_path / "folder", "folder: cannot be read: Is a directory")
    (tmp_path / "empty").touch()
    fails(tmp_path / "empty", r"empty: expected records of 3073 \(cifar10\) .* got 0 bytes")
    fails(tmp_path / "empty", r"empty: expected records of 3074 .* got 0 bytes", "cifar100")


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    write(tmp_path / "1", "cifar10", 2)
    (tmp_path / "2").write_bytes(write(tmp_path / "2", "cifar10", 3).tobytes()[:-1])
    fails(tmp_path / "2", r"2: expected records of 3073 \(cifar10\) or 3074.*got 9218 bytes")
    fails(
        tmp_path / "*",
        r"2: expected records of 3073 bytes \(cifar10\), got 9218 bytes: 2 records and 3072 bytes",
    )


def test_files_of_two_kinds_are_told_apart(tmp_path: Path) -> None:
    write(tmp_path / "1", "cifar10", 2)
    write(tmp_path / "2", "cifar100", 2)
    fails(tmp_path / "*", r"2: expected records of 3073 bytes \(cifar10\), got 6148")
    fails(tmp_path / "1", r"1: expected records of 3074 bytes \(cifar100\), got 6146", "cifar100")


def test_sizes_that_fit_both_kinds_need_a_name(tmp_path: Path) -> None:
    with (tmp_path / "both").open("wb") as file:
        file.truncate(3073 * 3074)
    fails(tmp_path / "both", "both fit: say which, by --dataset")
    assert Cifar.find(str(tmp_path / "both"), "cifar100").size == 3073


@pytest.mark.parametrize(("name", "column", "most"), [("cifar10", 0, 9), ("cifar100", 0, 19)])
def test_labels_that_there_are_not_are_named(
    tmp_path: Path, name: str, column: int, most: int
) -> None:
    records = write(tmp_path / "1", name, 5)
    records[3, column] = most + 1
    records.tofile(tmp_path / "1")
    fails(tmp_path / "1", f"1: record 3: expected a label from 0 to {most}, got {most + 1}", name)


def columns(path: Path, images: int) -> Any:
    """Write images that get lighter from left to right."""
    records = np.zeros((images, 3073), np.uint8)
    records[:, 1:] = np.tile(np.arange(100, 228, 4, dtype=np.uint8), 3 * 32)
    records.tofile(path)
    return Cifar.find(str(path))


def test_images_are_shifted_mirrored_and_standardised(tmp_path: Path) -> None:
    images = columns(tmp_path / "1", 2)
    batches = training_batches(images, 0, 1, batch=40, seed=(0,)).as_numpy_iterator()
    batch, labels = next(batches)
    assert batch.shape == (40, 32, 32, 3)
    assert labels.tolist() == [0] * 40
    np.testing.assert_allclose(batch.mean(axis=(1, 2, 3)), 0, atol=1e-5)
    np.testing.assert_allclose(batch.std(axis=(1, 2, 3)), 1, atol=1e-5)
    middle = batch[:, 16, :, 0]  # padding is darker than all pixels
    mirrored = middle[:, 8] > middle[:, 24]
    assert 5 < mirrored.sum() < 35
    shifts = {int(np.argmax(row)) for row in middle[~mirrored]}
    assert shifts <= set(range(27, 32)), "four pixels at most"
    assert len(shifts) > 2
    again, _ = next(training_batches(images, 0, 1, 40, (0,)).as_numpy_iterator())
    np.testing.assert_array_equal(again, batch)
    other, _ = next(training_batches(images, 0, 1, 40, (1,)).as_numpy_iterator())
    assert not np.array_equal(other, batch)


def test_what_is_evaluated_is_not_changed_but_for_its_scale(tmp_path: Path) -> None:
    records = write(tmp_path / "1", "cifar10", 3)
    ((batch, labels),) = evaluation_batches(Cifar.find(str(tmp_path / "1"))).as_numpy_iterator()
    for found, label, (image, wanted) in zip(batch, labels, expected(records, 1), strict=True):
        pixels = image.astype(np.float64)
        np.testing.assert_allclose(found, (pixels - pixels.mean()) / pixels.std(), atol=1e-4)
        assert label == wanted


def test_digits_are_shared_out() -> None:
    digits, held_out = Digits(seed=3), Digits(seed=3, held_out=True)
    parts = [digits.share(0, 2), digits.share(1, 2), held_out.share()]
    found = [list(part.as_numpy_iterator()) for part in parts]
    assert list(map(len, found)) == [719, 719, 359]
    assert (digits.size, held_out.size) == (719 + 719, 359)
    scans = load_digits()
    pixels = (scans.images * (255 / 16)).reshape(-1, 64)
    seen = set()
    for part in found:
        for image, label in part[::20]:
            assert image.shape == (32, 32, 3)
            assert image.dtype == np.uint8
            # Enlarged, a pixel is the mean of about 4x4.
            small = image[..., 0].astype(float).reshape(8, 4, 8, 4).mean(axis=(1, 3)).reshape(64)
            nearest = int(np.argmin(np.square(pixels - small).sum(axis=1)))
            assert scans.target[nearest] == label
            seen.add(nearest)
    assert len(seen) == sum(len(part[::20]) for part in found), "no scan is there twice"


def test_digits_are_shifted_and_not_mirrored() -> None:
    digits = Digits(seed=3)
    batch, _ = next(training_batches(digits, 0, 2, 12, (0,)).as_numpy_iterator())
    sources = np.stack([image[..., 0] for image, _ in digits.share(0, 2).as_numpy_iterator()])
    windows = np.lib.stride_tricks.sliding_window_view(sources[:, 4:28, 4:28], (16, 16), (1, 2))
    standard = standardised(windows.reshape(-1, 256).astype(np.float32))
    inside = standardised(batch[:, 8:24, 8:24, 0].reshape(12, 256))
    assert (inside @ standard.T / 256).max(axis=1) == pytest.approx(np.ones(12), abs=1e-4)


def standardised(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    centred = rows - rows.mean(axis=1, keepdims=True)
    return centred / np.maximum(centred.std(axis=1, keepdims=True), 1e-6)
