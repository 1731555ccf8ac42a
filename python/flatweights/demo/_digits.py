"""Scikit-learn's handwritten digits, split between workers."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

_TEST_FRACTION = 0.2


class Examples(NamedTuple):
    """Scans and what they show."""

    images: NDArray[np.float32]
    labels: NDArray[np.int32]


def split_digits(workers: int, seed: int) -> tuple[list[Examples], Examples]:
    """Return one shard per worker, and examples that no worker trains on.

    The shards are disjoint, and their sizes differ by one at most.
    """
    digits = load_digits()
    images = (digits.images / 16.0).astype(np.float32)[..., np.newaxis]
    labels = digits.target.astype(np.int32)
    order = np.random.default_rng(seed).permutation(len(labels))
    held_out = round(_TEST_FRACTION * len(labels))
    shards = np.array_split(order[held_out:], workers)
    test = order[:held_out]
    return [Examples(images[s], labels[s]) for s in shards], Examples(images[test], labels[test])
