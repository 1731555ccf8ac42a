"""Data that is split between clients unequally: in size and in what there is of each label."""

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

# Of the Dirichlet distribution of sizes: the largest are about four times the mean.
_SIZES = 2.0


def split_by_label(
    labels: ArrayLike, clients: int, concentration: float, seed: int
) -> list[NDArray[np.intp]]:
    """Return one array per client: which examples are its own.

    Every example belongs to one client, and no client is without. The mix of labels of each is
    drawn from a Dirichlet distribution around the mix of all, and its examples are drawn by
    that mix without replacement, as in Hsu, Qi and Brown, "Measuring the Effects of
    Non-Identical Data Distribution for Federated Visual Classification", 2019. Where a client
    asks for labels that are used up, it takes of those that are left. Unlike there, sizes
    differ: they are drawn from a Dirichlet distribution too.

    >>> split_by_label([0, 0, 0, 1, 1, 1], clients=2, concentration=0.01, seed=0)
    [array([3, 4, 5]), array([0, 1, 2])]

    Args:
        labels: What each example shows: one integer for each.
        clients: How many; no more than there are examples.
        concentration: How alike the clients are: near 0, each has few labels; the larger, the
            nearer is each to the mix of all.
        seed: The same one gives the same split.

    Raises:
        ValueError: If ``labels`` has not one dimension, ``clients`` is out of range, or
            ``concentration`` is not positive and finite.
    """
    kinds = np.asarray(labels)
    if kinds.ndim != 1:
        raise ValueError(f"labels: expected one dimension, got {kinds.ndim}")
    if not 1 <= clients <= len(kinds):
        raise ValueError(
            f"clients: expected 1 to {len(kinds)}, the number of examples, got {clients!r}"
        )
    if not (concentration > 0 and math.isfinite(concentration)):
        raise ValueError(f"concentration: expected a positive number, got {concentration!r}")
    rng = np.random.default_rng(seed)
    stacks = [list(rng.permutation(np.flatnonzero(kinds == kind))) for kind in np.unique(kinds)]
    overall = np.array([len(stack) / len(kinds) for stack in stacks])
    # One for each, and the rest by shares.
    shares = rng.dirichlet(np.full(clients, _SIZES))
    sizes = 1 + rng.multinomial(len(kinds) - clients, shares)
    parts = []
    for size in sizes:
        mix = rng.dirichlet(concentration * overall)
        part = [stacks[_draw(mix, stacks, rng)].pop() for _ in range(size)]
        parts.append(np.sort(np.array(part, np.intp)))
    return parts


def _draw(mix: NDArray[np.float64], stacks: list[list[np.intp]], rng: np.random.Generator) -> int:
    """Return which of ``stacks`` to take from: by ``mix``, among those that are not empty."""
    left = np.array([len(stack) for stack in stacks])
    chances = np.where(left > 0, mix, 0.0)
    if not chances.sum() > 0:
        chances = left.astype(np.float64)
    return int(rng.choice(len(stacks), p=chances / chances.sum()))
