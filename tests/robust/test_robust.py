"""Robust averages against NumPy, against exact fractions, and through all kinds of model."""

import doctest
import importlib
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from reference import (
    BFLOAT16,
    MISALIGNMENTS,
    REAL,
    SIZES,
    Guarded,
    each,
    exact_mean,
    nearest,
    random_array,
    refuses,
    same_bits,
    ulp,
)

import flatweights as fw
from flatweights import _core, robust

# Fewer sources than a network has inputs, the sizes at its ends, runs of unequal sizes, and several
# rounds of merges.
COUNTS = (1, 2, *range(3, 19), 31, 33, 47, 64, 100)


def numpy_median(sources: list[NDArray[Any]]) -> NDArray[Any]:
    """NumPy's median in float64, rounded once; zeros are positive."""
    with np.errstate(all="ignore"):
        wide = np.median(np.stack(sources).astype(np.float64), axis=0)
        return (np.asarray(wide) + 0.0).astype(sources[0].dtype)


def sorted_columns(sources: list[NDArray[Any]]) -> list[list[Fraction]]:
    stacked = np.stack(sources).astype(np.float64)
    return [sorted(map(Fraction, column)) for column in stacked.T.tolist()]


def exact_mean_around_median(column: list[Fraction], keep: int) -> Fraction:
    """The mean of the ``keep`` numbers nearest to the median; of equally near ones, the smaller."""
    middle = (column[(len(column) - 1) // 2] + column[len(column) // 2]) / 2
    kept = sorted(column, key=lambda x: (abs(x - middle), x))[:keep]
    return sum(kept, Fraction(0)) / keep


# Networks: any sequence is sorted if all sequences of zeros and ones are (Knuth 3, 5.3.4).


def test_every_network_sorts_all_zeros_and_ones() -> None:
    for count in range(1, 17):
        rows = [
            (np.arange(2**count, dtype=np.uint32) >> k & 1).astype(np.float32) for k in range(count)
        ]
        layout = fw.Layout.of([rows[0]])
        ones = sum(rows)
        for dtype in (np.float32, np.float16, np.float64):
            typed = [[row.astype(dtype)] for row in rows]
            layout = fw.Layout.of(typed[0])
            for rank in range(count):
                out = np.empty(2**count, dtype)
                _core.order_into(layout.core, False, [out], typed, rank, rank + 1, 0)
                assert np.array_equal(out, ones >= count - rank), (count, rank, dtype)


def test_merged_runs_are_sorted(rng: np.random.Generator) -> None:
    for count in (17, 24, 31, 32, 33, 47, 48, 49, 63, 64, 65, 100, 257):
        for values in (rng.integers(0, 2, (count, 500)), rng.integers(-99, 99, (count, 500))):
            rows = values.astype(np.float32)
            layout = fw.Layout.of([rows[0]])
            expected = np.sort(rows, axis=0)
            for rank in {0, 1, count // 3, count // 2, count - 2, count - 1}:
                out = np.empty(500, np.float32)
                sources = [[row] for row in rows]
                _core.order_into(layout.core, False, [out], sources, rank, rank + 1, 0)
                assert np.array_equal(out, expected[rank]), (count, rank)


# Values.


@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_the_median_is_numpys_bit_for_bit(dtype: np.dtype[Any], rng: np.random.Generator) -> None:
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 6e-8, 1e-40, 5e-324, 3e38])
    for count in COUNTS:
        for wide in (False, True):
            values = rng.normal(size=(count, 499)) * np.exp(
                rng.normal(size=(count, 499)) * 5 * wide
            )
            if wide:
                at = rng.random(values.shape) < 0.02
                values[at] = rng.choice(special, at.sum())
            with np.errstate(all="ignore"):
                sources = list(values.astype(dtype))
            expected, got = numpy_median(sources), robust.median(sources)
            nan = np.isnan(expected.astype(np.float64))
            assert np.array_equal(nan, np.isnan(got.astype(np.float64)))
            assert same_bits(got[~nan], expected[~nan])


@each(misalignment=MISALIGNMENTS)
@each(dtype=REAL)
def test_each_size_is_written_and_nothing_beside_it(
    misalignment: int, dtype: np.dtype[Any], rng: np.random.Generator
) -> None:
    for k, size in enumerate(SIZES):
        count = (2, 5, 20)[k % 3]
        values = [random_array(rng, size, dtype) for _ in range(count)]
        sources = [Guarded(v, misalignment * (k + 1) % 64).array for k, v in enumerate(values)]
        out = Guarded(np.zeros(size, dtype), misalignment)
        assert robust.median(sources, out=out.array) is out.array
        assert same_bits(out.array, numpy_median(values))
        assert out.is_intact()
        assert all(map(same_bits, sources, values))
        robust.mean_around_median(sources, count, out=out.array)
        assert out.is_intact()


@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_trimmed_means_are_the_exact_ones_rounded(
    dtype: np.dtype[Any], rng: np.random.Generator
) -> None:
    # A float64 sum and its quotient are rounded, each to its own unit.
    slack = Fraction(1, 2) + (Fraction(1) if dtype.itemsize == 8 else Fraction(1, 2**20))
    for count, trim in ((3, 1), (5, 0), (10, 2), (16, 5), (16, 0), (20, 3), (40, 11)):
        exponents = rng.uniform(-4, 4, (count, 30))
        sources = list((rng.choice([-1, 1], (count, 30)) * 10**exponents).astype(dtype))
        got = robust.trimmed_mean(sources, trim)
        for value, column in zip(got.tolist(), sorted_columns(sources), strict=True):
            exact = exact_mean([float(x) for x in column[trim : count - trim]])
            assert abs(Fraction(value) - exact) <= slack * ulp(exact, dtype)


@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_means_around_the_median_are_the_exact_ones_rounded(
    dtype: np.dtype[Any], rng: np.random.Generator
) -> None:
    slack = Fraction(1, 2) + (Fraction(1) if dtype.itemsize == 8 else Fraction(1, 2**20))
    for count in (1, 2, 3, 4, 7, 10, 16, 20, 37):
        for keep in {1, count // 3 or 1, count // 2 or 1, count - 1 or 1, count}:
            # Coarse numbers are often equally far from the median; wide ones lose bits in sums.
            coarse = rng.integers(-4, 4, (count, 6)) / 4
            wide = rng.choice([-1, 1], (count, 6)) * 10 ** rng.uniform(-4, 4, (count, 6))
            sources = list(np.concatenate([coarse, wide], axis=1).astype(dtype))
            got = robust.mean_around_median(sources, keep)
            for value, column in zip(got.tolist(), sorted_columns(sources), strict=True):
                exact = exact_mean_around_median(column, keep)
                assert abs(Fraction(value) - exact) <= slack * ulp(exact, dtype), (count, keep)


def test_a_tie_in_float32_that_float64_would_not_see() -> None:
    # 2 * median is 2**60 + 2; float64 rounds 1 + 2**60 + ... alike.
    columns = [-(2.0**-30), 1.0, 2.0 + 2.0**-22]
    sources = [np.array([x], np.float32) for x in columns]
    expected = exact_mean_around_median([Fraction(float(s[0])) for s in sources], 2)
    got = robust.mean_around_median(sources, 2)
    assert got[0] == nearest(expected, np.dtype(np.float32))


def test_a_fraction_is_trimmed_as_in_flower() -> None:
    sources = [np.array([float(k**3)]) for k in range(10)]
    for fraction in (0.0, 0.05, 0.1, 0.2, 0.29, 0.49):
        cut = int(fraction * 10)
        expected = robust.trimmed_mean(sources, cut)
        for trim in (fraction, np.float64(fraction), np.array(fraction), np.array(cut)):
            assert same_bits(robust.trimmed_mean(sources, trim), expected)  # type: ignore[arg-type]


# Kinds of model, out and nonfinite.


def models_of(rng: np.random.Generator, count: int) -> list[dict[str, NDArray[Any]]]:
    return [
        {
            "kernel": random_array(rng, (3, 5), np.dtype(np.float32)),
            "step": np.array(k, np.int64),
            "bias": random_array(rng, 7, np.dtype(np.float64)),
            "half": random_array(rng, (2, 2), BFLOAT16),
            "none": np.zeros((0, 3), np.float32),
            "flags": np.array([k % 2 == 0, True]),
        }
        for k in range(count)
    ]


RULES = [
    robust.Median(),
    robust.TrimmedMean(1),
    robust.TrimmedMean(0.2),
    robust.MeanAroundMedian(3),
]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_every_kind_of_model_gives_one_of_its_kind(
    rule: robust.Rule, rng: np.random.Generator
) -> None:
    models = models_of(rng, 5)
    expected = {
        name: rule([model[name] for model in models]) for name in ("kernel", "bias", "half")
    }
    expected |= {name: models[0][name] for name in ("step", "none", "flags")}
    as_dict = rule(models)
    assert list(as_dict) == list(models[0])
    assert all(same_bits(as_dict[name], expected[name]) for name in expected)
    as_list: Any = rule([list(model.values()) for model in models])
    flat = rule([fw.FlatWeights(model) for model in models])
    tree: Any = rule([{"a": model, "b": [model["bias"]]} for model in models])
    assert isinstance(flat, fw.FlatWeights)
    for i, name in enumerate(models[0]):
        for got in (as_list[i], flat[name], tree["a"][name]):
            assert same_bits(np.asarray(got), np.asarray(expected[name])), name


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("position", [0, 2, 4])
def test_out_may_be_a_source(rule: robust.Rule, position: int, rng: np.random.Generator) -> None:
    sources = [random_array(rng, 3000, np.dtype(np.float32)) for _ in range(5)]
    expected = rule(sources)
    assert rule(sources, out=sources[position]) is sources[position]
    assert same_bits(sources[position], expected)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_order_of_sources_does_not_matter(rule: robust.Rule, rng: np.random.Generator) -> None:
    for dtype in REAL:
        sources = [random_array(rng, 777, dtype) for _ in range(7)]
        expected = rule(sources)
        for order in ([6, 5, 4, 3, 2, 1, 0], [3, 1, 6, 0, 5, 2, 4]):
            assert same_bits(rule([sources[k] for k in order]), expected)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("in_place", [False, True])
def test_nonfinite_sources_are_named_or_left_out(
    rule: robust.Rule, bad: float, in_place: bool, rng: np.random.Generator
) -> None:
    models = [{"a": rng.normal(size=9), "b": rng.normal(size=5)} for _ in range(6)]
    models[2]["b"][3] = bad
    good = [model for k, model in enumerate(models) if k != 2]
    expected = rule(good)
    before = [{k: v.copy() for k, v in model.items()} for model in models]
    with pytest.raises(ValueError, match="source 2, slot 1 'b': holds NaN or infinity"):
        rule(models, nonfinite="raise", out=models[0] if in_place else None)
    assert all(same_bits(m[k], b[k]) for m, b in zip(models, before, strict=True) for k in b)
    outcome = rule.apply(models, nonfinite="skip", out=models[0] if in_place else None)
    assert outcome.used == [0, 1, 3, 4, 5]
    assert all(same_bits(outcome.weights[k], expected[k]) for k in expected)


def test_nan_stays_and_infinity_is_a_number_like_others() -> None:
    sources = [np.array([x, 1.0, -np.inf]) for x in (1.0, 2.0, np.nan, np.inf, 3.0)]
    assert np.array_equal(robust.median(sources), [np.nan, 1.0, -np.inf], equal_nan=True)
    del sources[2]
    assert robust.median(sources)[0] == 2.5
    assert robust.trimmed_mean(sources, 1)[0] == 2.5
    assert robust.trimmed_mean(sources, 0)[0] == np.inf


@pytest.mark.parametrize("dtype", REAL, ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_infinity_is_nearest_to_an_infinite_median(dtype: Any, sign: int) -> None:
    for numbers in ([1, 2, np.inf, np.inf, np.inf], [np.inf, 1, np.inf, 2], [1, np.inf, np.inf]):
        sources = [np.full(100, sign * number, dtype) for number in numbers]
        for keep in range(1, len(numbers) + 1):
            got = robust.mean_around_median(sources, keep).astype(np.float64)
            assert np.array_equal(got, np.full(100, sign * np.inf)), (numbers, keep)
    sources = [np.full(100, sign * number, dtype) for number in (1, 2, 4, np.inf, np.inf)]
    expected = np.full(100, sign * 7 / 3, dtype)
    assert np.array_equal(robust.mean_around_median(sources, 3), expected)


# Errors.


def test_what_has_no_order_or_leaves_nothing_is_refused() -> None:
    a = np.ones(3)
    with pytest.raises(TypeError, match="source 0: expected real numbers, got complex64"):
        robust.median([a.astype(np.complex64)] * 3)
    with pytest.raises(TypeError, match="slot 0 'w': expected real numbers, got complex128"):
        robust.median([{"w": a.astype(np.complex128)}] * 3)
    with pytest.raises(TypeError, match="int64"):
        robust.median([np.arange(3)] * 3)
    with pytest.raises(ValueError, match="at least one source"):
        robust.median([])
    with pytest.raises(ValueError, match="less than half of the 4 sources, got 2"):
        robust.trimmed_mean([a] * 4, 2)
    for trim in (-1, -0.1, 0.5, 0.7):
        with pytest.raises(ValueError, match="trim: expected an integer of at least 0, or a frac"):
            robust.TrimmedMean(trim)
    with pytest.raises(ValueError, match="at most the 4 sources, got 5"):
        robust.mean_around_median([a] * 4, 5)
    with pytest.raises(ValueError, match="keep: expected at least 1, got 0"):
        robust.mean_around_median([a] * 4, 0)
    with pytest.raises(TypeError, match="Median has no weights"):
        robust.Median()([a, a, a], [1, 2, 3])
    with pytest.raises(ValueError, match=r"source 1: expected float64 \(3,\)"):
        robust.median([a, np.ones(4), a])
    buffer = np.ones(8)
    with pytest.raises(ValueError, match="overlaps"):
        robust.median([buffer[:4], np.ones(4)], out=buffer[2:6])


def test_the_parts_of_the_out_of_a_function_may_not_overlap() -> None:
    base = np.zeros(5)
    rule = robust.Rule.of(lambda models: models[0])
    with pytest.raises(ValueError, match="out, slot 1 '1': overlaps another part of out"):
        rule([[np.ones(3), np.ones(3)]], out=[base[:3], base[2:]])
    assert not base.any()


def test_a_function_may_return_other_parts_of_the_source_that_is_out() -> None:
    model = {"a": np.array([1.0, 2.0]), "b": np.array([3.0, 4.0])}
    rule = robust.Rule.of(lambda models: {"a": models[0]["b"], "b": models[0]["a"]})
    rule([model], out=model)
    assert model["a"].tolist() == [3.0, 4.0]
    assert model["b"].tolist() == [1.0, 2.0]


def test_the_out_of_a_function_overlaps_no_source_in_other_slots() -> None:
    called = False

    def first(models: list[Any]) -> Any:
        nonlocal called
        called = True
        return models[0]

    rule = robust.Rule.of(first)
    a, b = np.array([1.0, 2.0]), np.array([3.0, 4.0])
    with refuses(ValueError, "source 0, slot [01] '[ab]': overlaps out; only the very", a, b):
        rule([{"a": a, "b": b}], out={"a": b, "b": a})
    base = np.arange(8.0)
    with refuses(ValueError, "source 1, slot 0 '0': overlaps out", base):
        rule([[np.ones(3)] * 2, [base[:3], base[3:6]]], out=[base[1:4], base[4:7]])
    assert not called


@pytest.mark.parametrize("starts", [(0, 3), (3, 0), (1, 2), (2, 0), (6, 6)])
def test_a_function_may_return_memory_of_out(starts: tuple[int, int]) -> None:
    base = np.arange(9.0)
    out = [base[:3], base[3:6]]
    made = [base[start : start + 3] for start in starts]
    expected = [part.tolist() for part in made]
    robust.Rule.of(lambda models: made)([[np.ones(3)] * 2], out=out)
    assert [part.tolist() for part in out] == expected


@pytest.mark.parametrize("name", ["_centers", "_coordinates", "_rules", "_selection"])
def test_examples_in_docstrings_are_right(name: str) -> None:
    module = importlib.import_module(f"flatweights.robust.{name}")
    assert doctest.testmod(module, extraglobs={"np": np}).failed == 0
