"""The binary files of CIFAR-10 and CIFAR-100, checked before they are used, read by `tf.data`.

A. Krizhevsky: "Learning Multiple Layers of Features from Tiny Images", 2009. An image is one
record: its label, in CIFAR-100 the coarse and then the fine one, and the red, green and blue
values of 32x32 pixels, row by row, one byte each. A file is nothing but records.
"""

import glob
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

SIDE = 32
PIXELS = 3 * SIDE * SIDE


class Format(NamedTuple):
    """What records are made of.

    Attributes:
        labels: How many labels there are of each kind. The last kind is what is learned.
    """

    labels: tuple[int, ...]

    @property
    def classes(self) -> int:
        """How many kinds of images there are."""
        return self.labels[-1]

    @property
    def record_bytes(self) -> int:
        """The size of one image with its labels."""
        return len(self.labels) + PIXELS


FORMATS = {"cifar10": Format((10,)), "cifar100": Format((20, 100))}


class CifarError(ValueError):
    """Files are missing, or are not what they should be; the message names one."""


@dataclass(frozen=True)
class Cifar:
    """Files of one kind, checked; `Cifar.find` makes it.

    Attributes:
        name: Which of `FORMATS`.
        files: Where they are, in the order of their names.
        size: How many images there are.
    """

    name: str
    files: tuple[str, ...]
    size: int

    @property
    def classes(self) -> int:
        """How many kinds of images there are."""
        return FORMATS[self.name].classes

    @classmethod
    def find(cls, pattern: str, name: str | None = None) -> "Cifar":
        """Find and check files; each is read once, for its labels.

        Args:
            pattern: Path of a file; ``*``, ``?`` and ``[...]`` stand for others.
            name: Which of `FORMATS` they should be; None to tell it from their sizes.

        Raises:
            CifarError: If there is no such file, one cannot be read, is truncated or otherwise
                of a wrong size, has labels that there are not, or is of another kind than
                the ones before it.
        """
        files = sorted(glob.glob(pattern))  # noqa: PTH207 (which takes no absolute pattern)
        if not files:
            raise CifarError(f"{pattern}: expected at least one file, found none")
        sizes = {file: _size_of(file) for file in files}
        name = name or _name_of(files[0], sizes[files[0]])
        record = FORMATS[name].record_bytes
        for file, size in sizes.items():
            if size == 0 or size % record:
                raise CifarError(
                    f"{file}: expected records of {record} bytes ({name}), got {size} bytes: "
                    f"{size // record} records and {size % record} bytes"
                )
            _check_labels(file, FORMATS[name])
        return cls(name, tuple(files), sum(sizes.values()) // record)

    def share(self, rank: int = 0, workers: int = 1) -> Any:
        """Return a `tf.data.Dataset` of one worker's images, in order, with their labels.

        An image has 32x32x3 bytes: height, width, channels; a label is an int32.

        Args:
            rank: Whose. No two shares have an image in common, and together they have all.
            workers: How many shares there are.
        """
        import tensorflow as tf

        kind = FORMATS[self.name]
        labels = len(kind.labels)

        def decode(record: Any) -> Any:
            values = tf.io.decode_raw(record, tf.uint8)
            image = tf.transpose(tf.reshape(values[labels:], (3, SIDE, SIDE)), (1, 2, 0))
            return image, tf.cast(values[labels - 1], tf.int32)

        # Each worker reads all files once, and then has its share in memory, as bytes.
        records = tf.data.FixedLengthRecordDataset(list(self.files), kind.record_bytes)
        return records.shard(workers, rank).cache().map(decode)


def _size_of(file: str) -> int:
    try:
        with Path(file).open("rb") as opened:  # raises for what is no file, or is not ours to read
            return os.fstat(opened.fileno()).st_size
    except OSError as error:
        raise CifarError(f"{file}: cannot be read: {error.strerror}") from error


def _name_of(file: str, size: int) -> str:
    fitting = [n for n, kind in FORMATS.items() if size and size % kind.record_bytes == 0]
    if len(fitting) != 1:
        records = " or ".join(f"{kind.record_bytes} ({n})" for n, kind in FORMATS.items())
        which = "both fit: say which, by --dataset" if fitting else "neither fits"
        raise CifarError(f"{file}: expected records of {records} bytes, got {size} bytes: {which}")
    return fitting[0]


def _check_labels(file: str, kind: Format) -> None:
    records = np.memmap(file, np.uint8, "r").reshape(-1, kind.record_bytes)
    labels = records[:, : len(kind.labels)]
    wrong = np.argwhere(labels >= np.asarray(kind.labels))
    if len(wrong):
        record, which = wrong[0]
        raise CifarError(
            f"{file}: record {record}: expected a label from 0 to {kind.labels[which] - 1}, "
            f"got {labels[record, which]}"
        )
