"""The kernel of `FedAdagrad`, `FedAdam` and `FedYogi`, against NumPy in the same precision."""

from typing import Any

import numpy as np
import pytest
from reference import Guarded, read_only, refuses, same_bits

from flatweights import _core, server

KINDS = ("sum", "mean", "sign")
RATES = {"learning_rate": 0.03, "beta1": 0.9, "beta2": 0.98, "tau": 1e-3}


def mean(old: Any, new: Any, beta: float) -> Any:
    """Return the mean of two arrays, from the nearer end."""
    if beta > 0.5:
        return old + (new - old) * old.dtype.type(1 - beta)
    return new - (new - old) * old.dtype.type(beta)


def step(
    kind: Any,
    weights: Any,
    first: Any,
    second: Any,
    average: Any,
    before: Any,
    betas: tuple[float, float] = (RATES["beta1"], RATES["beta2"]),
) -> None:
    """Take the step, in place, one rounded operation of NumPy after the other."""
    rate, tau = (weights.dtype.type(RATES[name]) for name in ("learning_rate", "tau"))
    delta = -average if before is None else average - before
    direction = delta
    if first is not None:
        first[...] = mean(first, delta, betas[0])
        direction = first
    square = delta * delta
    if kind == "sum":
        second += square
    elif kind == "mean":
        second[...] = mean(second, square, betas[1])
    else:
        second -= np.sign(second - square) * (square * square.dtype.type(1 - betas[1]))
    weights += direction / (np.sqrt(second) + tau) * rate


@pytest.mark.parametrize("with_first", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_every_number_has_the_bits_of_the_formula(
    kind: Any, dtype: Any, with_first: bool, rng: np.random.Generator
) -> None:
    for size in (0, 1, 7, 63, 1025, 70_001):
        weights, first, average = (rng.normal(size=size).astype(dtype) for _ in range(3))
        second = rng.uniform(0, 2, size).astype(dtype)
        # Where the square is the second moment, Yogi has no direction.
        second[::3] = np.square(average - weights)[::3]
        ours = [Guarded(x, weights.itemsize) for x in (weights, first, second)]
        held = ours[1].array if with_first else None
        arrays = ours[0].array, held, ours[2].array, average, ours[0].array
        _core.adapt_(kind, *arrays, **RATES)  # type: ignore[arg-type]
        step(kind, weights, first if with_first else None, second, average, weights.copy())
        assert same_bits(ours[0].array, weights)
        assert same_bits(ours[1].array, first)
        assert same_bits(ours[2].array, second)
        assert all(one.is_intact() for one in ours)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_means_are_exact_for_all_betas(dtype: Any, rng: np.random.Generator) -> None:
    # Squares far from the mean, either way: 1e-8 beside 1e8, of which float32 adds nothing.
    old = 10.0 ** rng.uniform(-8, 8, (2, 999))
    gradient = 10.0 ** rng.uniform(-4, 4, 999)
    for beta in (0.0, 1e-300, 1e-9, 1e-3, 0.3, 0.5, 0.7, 0.99, 1 - 1e-6):
        weights, first, second, average = (
            np.array(x, dtype) for x in (np.zeros(999), *old, gradient)
        )
        _core.adapt_("mean", weights, first, second, average, None, 1.0, beta, beta, 1e-3)
        means = (beta * old + (1 - beta) * np.stack([-gradient, gradient**2])).astype(dtype)
        ulps = 4 * np.finfo(dtype).eps
        assert np.allclose(second, means[1], rtol=ulps, atol=0)
        # Signs differ, so parts may cancel.
        larger = np.maximum(beta * old[0], (1 - beta) * gradient)
        assert np.all(np.abs(first - means[0]) <= ulps * larger)
        arrays = [np.array(x, dtype) for x in (np.zeros(999), *old)]
        step("mean", arrays[0], arrays[1], arrays[2], average, None, (beta, beta))
        assert same_bits(first, arrays[1])
        assert same_bits(second, arrays[2])


@pytest.mark.parametrize("kind", KINDS)
def test_the_average_may_be_the_weights(kind: Any, rng: np.random.Generator) -> None:
    weights, before = rng.normal(size=(2, 100)).astype(np.float32)
    second, expected = np.ones((2, 100), np.float32)
    result = weights.copy()
    _core.adapt_(kind, result, None, second, result, before, **RATES)
    step(kind, weights, None, expected, weights.copy(), before)
    assert same_bits(result, weights)
    assert same_bits(second, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_without_weights_before_it_steps_against_a_gradient(
    kind: Any, rng: np.random.Generator
) -> None:
    weights, first, gradient = rng.normal(size=(3, 70_001)).astype(np.float32)
    for held in (first, None):
        ours = [array.copy() for array in (weights, first, np.square(first))]
        expected = [array.copy() for array in ours]
        _core.adapt_(
            kind, ours[0], None if held is None else ours[1], ours[2], gradient, None, **RATES
        )
        step(kind, expected[0], None if held is None else expected[1], expected[2], gradient, None)
        assert all(map(same_bits, ours, expected))


BASE = np.zeros(20, np.float32)
BAD = {
    "kind": ({"kind": "max"}, ValueError, "kind: expected 'sum', 'mean' or 'sign', got 'max'"),
    "no array": ({"second": [0.0]}, TypeError, "second: expected a NumPy array, got list"),
    "dtype": ({"weights": np.zeros(9, int)}, TypeError, "weights: expected float32 or float64"),
    "mixed": ({"average": np.zeros(9)}, ValueError, r"average: .* float32 \(9,\), got float64"),
    "length": ({"before": BASE[:3]}, ValueError, r"before: .* float32 \(9,\), got float32 \(3,\)"),
    "strides": ({"second": BASE[:18:2]}, ValueError, "second: expected a contiguous vector"),
    "shape": ({"weights": np.zeros((3, 3))}, ValueError, "weights: expected a contiguous vector"),
    "read-only": ({"first": read_only(BASE[:9])}, ValueError, "first: expected a writable array"),
    "unaligned": (
        {"average": np.zeros(37, np.uint8)[1:].view(np.float32)},
        ValueError,
        "average: expected an aligned array",
    ),
    "overlap": ({"weights": BASE[:9], "average": BASE[1:10]}, ValueError, "do not overlap"),
    "kept twice": ({"first": BASE[:9], "second": BASE[:9]}, ValueError, "do not overlap"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_not_as_it_should_be_changes_nothing(case: str) -> None:
    change, error, match = BAD[case]
    names = ("weights", "first", "second", "average", "before")
    given: dict[str, Any] = {name: np.ones(9, np.float32) for name in names}
    given = {"kind": "sum", **given, **change}  # type: ignore[dict-item]
    arrays = [value for value in given.values() if isinstance(value, np.ndarray)]
    with refuses(error, match, *arrays):
        _core.adapt_(**given, **RATES)  # type: ignore[arg-type]


def test_averages_that_are_not_aligned_are_read(rng: np.random.Generator) -> None:
    average = rng.normal(size=9).astype(np.float32)
    raw = np.zeros(37, np.uint8)
    raw[1:] = average.view(np.uint8)
    one, other = (server.FedAdam(np.zeros(9, np.float32)) for _ in range(2))
    assert same_bits(one.step(raw[1:].view(np.float32)), other.step(average))
