"""What the drivers of examples average, with actors that hold plain arrays."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import ray
from numpy.typing import NDArray
from reference import assert_mean

from flatweights import FlatWeights
from flatweights.demo._digits import Examples
from flatweights.examples._exchange import time_exchange
from flatweights.examples.digits_lbfgs_actors import fit
from flatweights.examples.keras_fit import exchange, exchange_as_in_the_guide

WORKERS = 3


@ray.remote(num_cpus=0)
class Holder:
    """Has weights: a list or a dict of arrays."""

    def __init__(self, weights: Any) -> None:
        self.weights = weights
        self.kinds: list[str] = []

    def get_weights(self) -> Any:
        return FlatWeights(self.weights) if isinstance(self.weights, dict) else self.weights

    def set_weights(self, weights: Any) -> None:
        self.kinds.append(type(weights).__name__)
        named = hasattr(weights, "items")
        self.weights = (
            {name: array.copy() for name, array in weights.items()}
            if named
            else [array.copy() for array in weights]
        )

    get_dict = get_held = lambda self: self.weights
    set_dict = set_weights

    def get_kinds(self) -> list[str]:
        return self.kinds


@pytest.fixture
def sources(rng: np.random.Generator) -> list[list[NDArray[Any]]]:
    """The weights of each worker."""
    shapes = ((3, 4), (4,), (2, 2, 2))
    return [[rng.normal(size=shape).astype("f") for shape in shapes] for _ in range(WORKERS)]


@pytest.mark.parametrize("way", [exchange, exchange_as_in_the_guide])
def test_exchange_of_lists_sets_all_workers_to_the_mean(
    sources: list[list[NDArray[Any]]], way: Callable[[Sequence[Any]], None]
) -> None:
    holders = [Holder.remote(weights) for weights in sources]
    way(holders)
    for found in ray.get([holder.get_held.remote() for holder in holders]):
        for got, *given in zip(found, *sources, strict=True):
            if way is exchange:
                assert_mean(got, given)
            else:  # one rounding for each addition
                np.testing.assert_allclose(got, np.mean(given, axis=0), rtol=1e-5, atol=1e-6)


def test_both_ways_are_timed_and_leave_the_mean(sources: list[list[NDArray[Any]]]) -> None:
    names = ("kernel", "bias", "other")
    holders = [Holder.remote(dict(zip(names, weights, strict=True))) for weights in sources]
    seconds = time_exchange(holders, rounds=2)
    assert min(seconds) > 0
    for found in ray.get([holder.get_held.remote() for holder in holders]):
        for name, *given in zip(names, *sources, strict=True):
            np.testing.assert_allclose(found[name], np.mean(given, axis=0), rtol=1e-5, atol=1e-6)
    for kinds in ray.get([holder.get_kinds.remote() for holder in holders]):
        assert kinds == ["FlatWeights", "dict"] * 3


@ray.remote(num_cpus=0)
class Quadratic:
    """Has examples of an unknown vector; the loss is half their mean squared distance to it."""

    def __init__(self, examples: NDArray[Any]) -> None:
        self.examples = examples

    def get_flat(self) -> NDArray[Any]:
        return np.zeros(self.examples.shape[1], np.float32)

    def evaluate(self, x: NDArray[Any]) -> tuple[NDArray[Any], float]:
        gaps = x - self.examples
        return gaps.mean(axis=0), float(0.5 * np.mean(np.sum(gaps**2, axis=1)))

    def measure(self, x: NDArray[Any], test: Examples) -> tuple[float, float]:
        return float(len(self.examples)), float(np.sum(x))


@pytest.fixture
def parts(rng: np.random.Generator) -> list[NDArray[Any]]:
    """Examples in parts of unequal sizes, each around a place of its own."""
    return [
        (place + rng.normal(size=(size, 5))).astype("f")
        for place, size in ((0.0, 1), (3.0, 2), (-1.0, 7))
    ]


def test_lbfgs_over_actors_fits_all_of_the_data(parts: list[NDArray[Any]]) -> None:
    everything = np.concatenate(parts).astype(np.float64)
    test = Examples(np.zeros((0, 8, 8, 1), np.float32), np.zeros(0, np.int32))
    sizes = [len(part) for part in parts]
    found = fit([Quadratic.remote(part) for part in parts], sizes, test, 50)
    best = everything.mean(axis=0)
    np.testing.assert_allclose(found.search.x, best, atol=1e-5)
    for loss, x in ((found.search.losses[0], 0.0), (min(found.search.losses), best)):
        expected = 0.5 * np.mean(np.sum((x - everything) ** 2, axis=1))
        assert loss == pytest.approx(expected, rel=1e-5)
    assert found.train == pytest.approx((1 + 4 + 49) / 10)
    assert found.test == pytest.approx(best.sum(), abs=1e-4)
