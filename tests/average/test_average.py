import enum
import gc
import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from reference import (
    AVERAGED,
    BFLOAT16,
    BLOCK,
    INTEGERS,
    MISALIGNMENTS,
    OTHERS,
    SIZES,
    Guarded,
    arrays_of,
    assert_mean,
    classes_of_16_bits,
    dtype_id,
    each,
    exact_mean,
    nearest,
    random_array,
    read_only,
    refuses,
    same_bits,
    ulp,
)

import flatweights as fw
from flatweights.robust import distances, median

NONFINITE = (np.nan, np.inf, -np.inf)
SIXTEEN_BITS = [np.dtype(np.float16), BFLOAT16]
KINDS: dict[str, Callable[[dict[str, np.ndarray]], Any]] = {
    "FlatWeights": fw.FlatWeights,
    "dict": dict,
    "list": lambda parts: list(parts.values()),
}


def models_of(
    rng: np.random.Generator, count: int, kind: str = "dict"
) -> tuple[list[Any], list[dict[str, np.ndarray]]]:
    """Return ``count`` models of one kind, and the same values as dicts of separate arrays."""
    parts = [
        {
            "kernel": random_array(rng, (3, 5), np.dtype(np.float32)),
            "step": np.array(k, np.int64),
            "bias": random_array(rng, 7, np.dtype(np.float64)),
            "half": random_array(rng, (2, 2), BFLOAT16),
            "phase": random_array(rng, 3, np.dtype(np.complex64)),
            "none": np.zeros((0, 3), np.float32),
            "flags": np.array([k % 2 == 0, True]),
        }
        for k in range(count)
    ]
    copies = [{name: part.copy() for name, part in p.items()} for p in parts]
    return [KINDS[kind](p) for p in parts], copies


def assert_model_mean(
    result: Any, parts: list[dict[str, np.ndarray]], weights: list[float] | None = None
) -> None:
    for array, name in zip(arrays_of(result), parts[0], strict=True):
        sources = [p[name] for p in parts]
        if array.dtype.kind in "bi":
            assert same_bits(array, sources[0])
        else:
            assert_mean(array, sources, weights)


# Right for every dtype, size and place.


@each(misalignment=MISALIGNMENTS)
@each(averaged_dtype=AVERAGED)
def test_each_size_is_averaged_and_nothing_beside_it_written(
    misalignment: int, averaged_dtype: np.dtype[Any], rng: np.random.Generator
) -> None:
    for size, count in itertools.product(SIZES, (1, 2, 3)):
        values = [random_array(rng, size, averaged_dtype) for _ in range(count)]
        sources = [Guarded(v, misalignment * (k + 1) % 64).array for k, v in enumerate(values)]
        out = Guarded(np.zeros(size, averaged_dtype), misalignment)
        weights = [0.5, 3.0, 1.25][:count]
        assert fw.average(sources, weights, out=out.array) is out.array
        assert_mean(out.array, values, weights)
        assert out.is_intact()
        assert all(map(same_bits, sources, values))


@each(weighted=[False, True])
@each(averaged_dtype=AVERAGED)
def test_the_mean_of_many(
    weighted: bool, averaged_dtype: np.dtype[Any], rng: np.random.Generator
) -> None:
    sources = [random_array(rng, (3, 11), averaged_dtype) for _ in range(1000)]
    weights = list(rng.uniform(0, 5, 1000)) if weighted else None
    assert_mean(fw.average(sources, weights), sources, weights)


@each(averaged_dtype=AVERAGED)
def test_one_source_is_its_own_mean(
    averaged_dtype: np.dtype[Any], rng: np.random.Generator
) -> None:
    source = random_array(rng, (5, 3), averaged_dtype)
    for weights in (None, [3], [0.1], [1e-300]):
        result = fw.average([source], weights)
        assert same_bits(result, source)
        assert not np.shares_memory(result, source)


@pytest.mark.parametrize("weights", [None, [1, 1, 1, 1, 1], [2, 0.5, 1, 0, 3]])
@pytest.mark.parametrize("dtype", [*SIXTEEN_BITS, np.dtype(np.float32)], ids=str)
def test_the_mean_is_the_exact_one_rounded_once(
    dtype: np.dtype[Any], weights: list[float] | None, rng: np.random.Generator
) -> None:
    # Integers over a power of two: their sums are exact in float64, ties are frequent.
    scale = {"float16": 2**-12, "bfloat16": 2**-9, "float32": 2**-20}[dtype.name]
    columns = [(rng.integers(-(2**12), 2**12, 500) * scale).astype(dtype) for _ in range(5)]
    result = fw.average(columns, weights).astype(np.float64)
    for i in range(500):
        assert result[i] == nearest(exact_mean([c[i] for c in columns], weights), dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_error_stays_below_units_over_many_magnitudes(
    dtype: Any, rng: np.random.Generator
) -> None:
    dtype = np.dtype(dtype)
    # A float64 sum and its quotient are rounded, each to its own unit.
    slack = Fraction(1, 2) + (Fraction(1, 2**20) if dtype.itemsize == 4 else Fraction(1))
    exponents = rng.uniform(-30, 30, (9, 300))
    columns = (rng.choice([-1, 1], (9, 300)) * 10**exponents).astype(dtype)
    result = fw.average(list(columns))
    for i in range(300):
        exact = exact_mean(list(columns[:, i]))
        assert abs(Fraction(float(result[i])) - exact) <= slack * ulp(exact, dtype)


@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
def test_what_cancels_leaves_the_rest(dtype: Any) -> None:
    sources = [np.full(3, v, dtype) for v in (1e16, 1.0, -1e16)]
    for order in itertools.permutations(sources):
        assert fw.average(list(order)).tolist() == [1 / 3] * 3


def test_float32_is_summed_in_more_than_float32() -> None:
    sources = [np.array([2.0**25], np.float32)] + [np.array([1.0], np.float32)] * 63
    assert fw.average(sources)[0] == np.float32((2.0**25 + 63) / 64)


@pytest.mark.parametrize("dtype", AVERAGED, ids=dtype_id)
def test_means_of_the_largest_and_the_smallest_numbers(dtype: np.dtype[Any]) -> None:
    real = np.zeros(1, dtype).real.dtype if dtype.kind == "c" else dtype
    info = ml_dtypes.finfo(real)
    count = 1 if real == np.float64 else 5  # a float64 sum out of range is infinite
    for value in (info.max, info.min, info.smallest_subnormal, info.smallest_normal):
        sources = [np.full(3, value, dtype)] * count
        assert same_bits(fw.average(sources), sources[0])


def test_float64_sums_out_of_range_are_infinite() -> None:
    assert fw.average([np.array([1.7e308, -1.7e308])] * 2).tolist() == [np.inf, -np.inf]


# All of 16 bits.


def every_value(dtype: np.dtype[Any]) -> np.ndarray:
    return np.arange(2**16, dtype=np.uint16).view(dtype)


@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
def test_every_16_bit_number_survives(dtype: np.dtype[Any]) -> None:
    values = every_value(dtype)
    for count in (1, 3):
        result = fw.average([values] * count)
        nan, _ = classes_of_16_bits(values)
        assert np.array_equal(classes_of_16_bits(result)[0], nan)
        # A sum that begins at 0 turns -0 into 0, as Python's does.
        expected = np.where(values.view(np.uint16) == 0x8000, 0, values.view(np.uint16))
        assert np.array_equal(result.view(np.uint16)[~nan], expected[~nan])


@pytest.mark.parametrize("weights", [[1, 1], [1, 1 + 2**-30], [1 + 2**-30, 1], [3, 1]])
@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
def test_every_midpoint_of_16_bit_neighbours_is_rounded_right(
    dtype: np.dtype[Any], weights: list[float]
) -> None:
    # Equal weights give ties; almost equal weights distinguish one rounding from two.
    patterns = np.arange(2**15 - 1, dtype=np.uint16)
    low, high = patterns.view(dtype), (patterns + 1).astype(np.uint16).view(dtype)
    _, finite = classes_of_16_bits(high)
    low, high = low[finite], high[finite]
    result = fw.average([low, high], weights).view(np.uint16)
    negative = fw.average([-low, -high], weights).view(np.uint16)
    first, second = Fraction(weights[0]), Fraction(weights[1])
    # Between neighbours the weights decide, or the last bit if they are equal.
    if first == second:
        expected = np.where(low.view(np.uint16) % 2 == 0, low.view(np.uint16), high.view(np.uint16))
    else:
        expected = (low if first > second else high).view(np.uint16)
    assert np.array_equal(result, expected)
    assert np.array_equal(negative[expected != 0], (expected | 0x8000)[expected != 0])


@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
def test_means_below_the_smallest_number_round_to_even(dtype: np.dtype[Any]) -> None:
    smallest = np.array([1], np.uint16).view(dtype)
    zero = np.zeros(1, dtype)
    assert fw.average([smallest, zero]).view(np.uint16).tolist() == [0]
    assert fw.average([smallest, zero, smallest]).view(np.uint16).tolist() == [1]
    assert fw.average([smallest, zero, zero]).view(np.uint16).tolist() == [0]


# Not a number.


@each(weights=[None, [1, 2], [0, 1]])
@each(averaged_dtype=AVERAGED)
def test_nonfinite_values_go_where_arithmetic_takes_them(
    averaged_dtype: np.dtype[Any], weights: list[float] | None
) -> None:
    if averaged_dtype.kind == "c":
        first = np.array([complex(v, 1) for v in (np.nan, np.inf, -np.inf, np.inf, 1)])
        second = np.array([complex(v, 1) for v in (1, 1, 1, -np.inf, 1)])
    else:
        first = np.array([np.nan, np.inf, -np.inf, np.inf, 1])
        second = np.array([1, 1, 1, -np.inf, 1])
    first, second = first.astype(averaged_dtype), second.astype(averaged_dtype)
    result = fw.average([first, second], weights).real.astype(np.float64)
    # 0 times infinity is not a number either.
    infinities = [np.nan, -np.nan] if weights == [0, 1] else [np.inf, -np.inf]
    np.testing.assert_array_equal(result, [np.nan, *infinities, np.nan, 1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", NONFINITE)
def test_raise_names_source_and_slot(kind: str, value: float, rng: np.random.Generator) -> None:
    models, _ = models_of(rng, 4, kind)
    arrays_of(models[2])[2][3] = value
    separate = models_of(rng, 1, kind)[0][0]
    name = 2 if kind == "list" else "bias"
    for out in (separate, models[0], models[2]):
        # A separate out is undefined afterwards; the sources are unchanged.
        sources = [array for model in models for array in arrays_of(model)]
        with refuses(ValueError, f"source 2, slot 2 '{name}': holds NaN or infinity", *sources):
            fw.average(models, nonfinite="raise", out=out)


@pytest.mark.parametrize("nonfinite", ["propagate", "raise", "skip"])
@pytest.mark.parametrize("in_place", [False, True])
def test_an_overflowing_sum_of_finite_sources_is_infinite(nonfinite: str, in_place: bool) -> None:
    sources = [np.array([1.5e308, 1.0]) for _ in range(2)]
    out = sources[1] if in_place else None
    result = fw.average(sources, nonfinite=nonfinite, out=out)  # type: ignore[arg-type]
    assert result.tolist() == [np.inf, 1.0]


@each(part=[0, 1, 0.5])
@each(value=NONFINITE)
@each(averaged_dtype=AVERAGED)
def test_nonfinite_values_are_found_in_every_place(
    averaged_dtype: np.dtype[Any], value: float, part: float, use_threads: Callable[[int], None]
) -> None:
    use_threads(2)
    for size in (1, 2, BLOCK + 1, *([300_000] if value == np.inf else [])):  # takes longest
        source = np.ones(size, averaged_dtype)
        fw.average([source], nonfinite="raise", out=np.empty_like(source))
        bad = complex(1, value) if averaged_dtype.kind == "c" else value
        source[int(part * (size - 1))] = bad
        with pytest.raises(ValueError, match="source 1: holds NaN or infinity"):
            fw.average([np.ones(size, averaged_dtype), source], nonfinite="raise")


def test_the_first_bad_slot_is_named_whatever_the_threads(
    use_threads: Callable[[int], None],
) -> None:
    use_threads(4)
    model = [np.ones(600_000, np.float32) for _ in range(5)]
    model[1][-1] = model[4][0] = np.nan
    for _ in range(10):
        with pytest.raises(ValueError, match="source 0, slot 1 '1': holds NaN"):
            fw.average([model], nonfinite="raise")


@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
def test_screening_tells_every_16_bit_number(dtype: np.dtype[Any]) -> None:
    values = every_value(dtype)
    _, finite = classes_of_16_bits(values)
    fw.average([values[finite]], nonfinite="raise")
    for value in values[~finite]:
        with pytest.raises(ValueError, match="holds NaN or infinity"):
            fw.average([np.array([value])], nonfinite="raise")


@pytest.mark.parametrize("kind", KINDS)
def test_skip_leaves_sources_out_and_renormalises(kind: str, rng: np.random.Generator) -> None:
    models, parts = models_of(rng, 5, kind)
    arrays_of(models[0])[0][0, 0] = np.nan
    arrays_of(models[2])[3][0, 0] = np.inf
    result = fw.average(models, [1, 2, 3, 4, 5], nonfinite="skip")
    # The integers, too, come from the first remaining source.
    assert_model_mean(result, [parts[1], *parts[3:]], [2, 4, 5])
    same = fw.average([models[1], *models[3:]], [2, 4, 5])
    assert all(map(same_bits, arrays_of(result), arrays_of(same)))


def test_skip_with_all_finite_changes_nothing(rng: np.random.Generator) -> None:
    models, _ = models_of(rng, 3)
    plain, skipping = fw.average(models), fw.average(models, nonfinite="skip")
    assert all(map(same_bits, plain.values(), skipping.values()))


@pytest.mark.parametrize("weights", [None, [1, 0]])
def test_skip_raises_where_no_weight_is_left(weights: Any) -> None:
    bad, good = np.array([np.nan]), np.array([1.0])
    with refuses(ValueError, "every source of positive weight holds NaN or infinity", bad, good):
        fw.average([bad, bad if weights is None else good], weights, nonfinite="skip", out=bad)


def test_integers_are_always_finite() -> None:
    model = {"w": np.ones(2), "n": np.array([-1, 2**63 - 1])}
    assert fw.average([model], nonfinite="raise")["n"].tolist() == [-1, 2**63 - 1]


def test_another_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="'propagate', 'raise' or 'skip', got 'ignore'"):
        fw.average([np.ones(1)], nonfinite="ignore")  # type: ignore[arg-type]


# Kinds of models.


@pytest.mark.parametrize("weights", [None, [1.0, 0.0, 2.5]])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_averaged_part_by_part(
    kind: str, weights: list[float] | None, rng: np.random.Generator
) -> None:
    models, parts = models_of(rng, 3, kind)
    result = fw.average(models, weights)
    assert type(result) is type(models[0])
    assert_model_mean(result, parts, weights)
    for model, part in zip(models, parts, strict=True):
        assert all(map(same_bits, arrays_of(model), part.values()))
    if kind != "list":
        assert list(result) == list(parts[0])
    if kind == "FlatWeights":
        assert result.layout is models[0].layout


def test_all_kinds_give_the_same_bits(rng: np.random.Generator) -> None:
    _, parts = models_of(rng, 5)
    results = [
        arrays_of(fw.average([make(p) for p in parts], [1, 2, 3, 4, 5])) for make in KINDS.values()
    ]
    for others in zip(*results, strict=True):
        assert all(same_bits(others[0], other) for other in others)


def test_the_order_of_keys_is_that_of_the_first() -> None:
    result = fw.average([{"a": np.ones(1), "b": np.ones(2)}, {"b": np.zeros(2), "a": np.zeros(1)}])
    assert list(result) == ["a", "b"]
    assert result["b"].tolist() == [0.5, 0.5]


@pytest.mark.parametrize("make", [OrderedDict, MappingProxyType])
def test_any_mapping_will_do(make: Any) -> None:
    result = fw.average([make({"a": np.ones(2)}), make({"a": np.zeros(2)})])
    assert result["a"].tolist() == [0.5, 0.5]


def test_any_keys_will_do() -> None:
    model = {1: np.ones(1), "1": np.zeros(1), ("a", 2): np.ones(2)}
    result = fw.average([model, model])
    assert list(result) == list(model)
    assert [v.tolist() for v in result.values()] == [[1], [0], [1, 1]]


class Part(str, enum.Enum):
    KERNEL = "kernel"


@pytest.mark.parametrize("wrap", [lambda parts: parts, lambda parts: {"nested": parts}])
def test_keys_are_those_of_the_call_and_not_equal_ones_of_an_earlier_one(wrap: Any) -> None:
    for key in (Part.KERNEL, "kernel", 1, True, 1.0, np.int64(1), (1, True), (True, 1)):
        model = wrap({key: np.ones(2)})
        assert repr(fw.average([model, model])) == repr(model)


@pytest.mark.parametrize("wrap", [lambda parts: parts, lambda parts: {"nested": parts}])
def test_a_key_is_not_kept(wrap: Any) -> None:
    class Key:
        pass

    key = Key()
    fw.average([wrap({key: np.ones(2)})] * 2)
    held = weakref.ref(key)
    del key
    gc.collect()
    assert held() is None


def test_sequences_may_be_tuples_and_hold_scalars() -> None:
    result = fw.average([(np.float32(1), [1.0, 2.0]), (np.float32(3), [3.0, 6.0])])
    assert [(r.dtype.name, r.tolist()) for r in result] == [("float32", 2), ("float64", [2, 4])]  # type: ignore[union-attr]


def test_arrays_of_no_dimension() -> None:
    result = fw.average([np.float32(1), np.array(3, np.float32)])
    assert same_bits(result, np.array(2, np.float32))


def test_sources_may_be_any_iterable() -> None:
    assert fw.average(np.array([v]) for v in (1.0, 3.0)).tolist() == [2]
    assert fw.average(np.array([[1.0, 2.0], [3.0, 6.0]])).tolist() == [2, 4]
    assert fw.average({1: np.array([1.0]), 2: np.array([3.0])}.values(), iter([3, 1])) == 1.5


def test_a_vector_is_averaged_throughout() -> None:
    layout = fw.Layout.of({"w": np.zeros(2, np.float32), "step": np.int64(0)})
    flats = [fw.flatten({"w": np.full(2, v, np.float32), "step": np.int64(v)}) for v in (1, 2)]
    views = fw.unflatten(fw.average(flats), layout)
    assert views["step"] == 1.5  # type: ignore[call-overload]


@pytest.mark.parametrize("dtype", INTEGERS, ids=dtype_id)
def test_integers_keep_the_first_value_within_a_model_and_have_no_mean_alone(
    dtype: np.dtype[Any],
) -> None:
    models = [{"n": np.full(3, k, dtype), "w": np.full(1, float(k))} for k in (1, 0)]
    result = fw.average(models)
    assert same_bits(result["n"], models[0]["n"])
    assert result["w"] == 0.5
    out = {"n": np.full(3, 0, dtype), "w": np.zeros(1)}
    assert same_bits(fw.average(models, out=out)["n"], models[0]["n"])
    assert same_bits(fw.average(models, [0, 1])["n"], models[0]["n"])
    with pytest.raises(TypeError, match=f"source 0: expected float16.* got {dtype}"):
        fw.average([np.ones(3, dtype)] * 2)


@pytest.mark.parametrize("dtype", OTHERS, ids=dtype_id)
def test_other_dtypes_have_no_mean(dtype: np.dtype[Any]) -> None:
    array = np.zeros(3, dtype)
    with pytest.raises(TypeError, match="source 0: expected float16, bfloat16"):
        fw.average([array])
    with pytest.raises(TypeError, match="source 0, slot 1 'b': expected float16, bfloat16"):
        fw.average([{"a": np.zeros(1), "b": array}])


@pytest.mark.parametrize("kind", KINDS)
def test_models_of_integers_alone(kind: str) -> None:
    models = [KINDS[kind]({"n": np.array([k, k])}) for k in (3, 4)]
    assert arrays_of(fw.average(models))[0].tolist() == [3, 3]


@pytest.mark.parametrize("kind", KINDS)
def test_models_without_parts(kind: str) -> None:
    assert arrays_of(fw.average([KINDS[kind]({})] * 2, nonfinite="raise")) == []


def test_20000_parts(rng: np.random.Generator) -> None:
    models = [list(random_array(rng, (20_000, 2), np.dtype(np.float32))) for _ in range(2)]
    expected = fw.average([np.concatenate(model) for model in models])
    assert np.array_equal(np.concatenate(fw.average(models)), expected)
    fw.average(models, out=models[1], nonfinite="raise")
    assert np.array_equal(np.concatenate(models[1]), expected)


# Where sources lie.


def test_strided_sources_are_read_in_c_order(rng: np.random.Generator) -> None:
    base = random_array(rng, (4, 6), np.dtype(np.float64))
    result = fw.average([base.T, base.T[:, ::-1]])
    assert_mean(result, [base.T.copy(), base.T[:, ::-1].copy()])
    assert result.flags.c_contiguous


@pytest.mark.parametrize("kind", KINDS)
def test_sources_may_be_read_only(kind: str, rng: np.random.Generator) -> None:
    models, parts = models_of(rng, 2, kind)
    if kind == "FlatWeights":
        models = [fw.FlatWeights.wrap(read_only(m.buffer), m.layout) for m in models]
    else:
        models = [KINDS[kind]({k: read_only(v) for k, v in p.items()}) for p in parts]
    result = fw.average(models)
    assert_model_mean(result, parts)
    assert all(part.flags.writeable for part in arrays_of(result))


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_out_may_be_one_of_the_sources(kind: str, position: int, rng: np.random.Generator) -> None:
    models, parts = models_of(rng, 3, kind)
    out = models[position]
    assert fw.average(models, [1, 2, 3], out=out) is out
    assert_model_mean(out, parts, [1, 2, 3])
    for k in {0, 1, 2} - {position}:
        assert all(map(same_bits, arrays_of(models[k]), parts[k].values()))


def test_out_may_be_several_of_the_sources() -> None:
    a, b = np.array([1.0, 2.0]), np.array([4.0, 8.0])
    fw.average([a, b, a], out=a)
    assert a.tolist() == [2.0, 4.0]


@pytest.mark.parametrize("size", [3, 2 * BLOCK + 1, 1_300_000])
def test_average_into_is_average(size: int, rng: np.random.Generator) -> None:
    sources = [random_array(rng, size, np.dtype(np.float32)) for _ in range(3)]
    expected = fw.average(sources, [3, 1, 2])
    fw.average_into(sources[1], sources, [3, 1, 2])
    assert same_bits(sources[1], expected)


@pytest.mark.parametrize("kind", KINDS)
def test_results_do_not_alias(kind: str, rng: np.random.Generator) -> None:
    models, _ = models_of(rng, 2, kind)
    results = [fw.average(models), fw.average(models)]
    owners = [*models, *results]
    for a, b in itertools.combinations(owners, 2):
        assert not any(map(np.shares_memory, arrays_of(a), arrays_of(b)))


def test_new_results_are_aligned() -> None:
    for n in range(1, 20):
        for part in (fw.average([np.ones(n)]), *fw.average([[np.ones(n), np.ones(3)]])):
            assert part.ctypes.data % 64 == 0


OVERLAPS = {
    "shifted": lambda base: ([base[1:5]], base[2:6]),
    "shifted back": lambda base: ([base[2:6]], base[1:5]),
    "bytes": lambda base: ([base[:4]], base.view("u1")[4:36].view("f8")),
    "second source": lambda base: ([np.ones(4), base[1:5]], base[2:6]),
    "reversed": lambda base: ([np.ones(10), base[::-1]], base),
    "every other": lambda base: ([np.ones(5), base[::2]], base[:5]),
    "transposed": lambda base: ([base[:9].reshape(3, 3).T], base[:9].reshape(3, 3)),
    "a negative stride within": lambda base: ([base[5:1:-1]], base[1:5]),
}


@pytest.mark.parametrize("nonfinite", ["propagate", "raise", "skip"])
@pytest.mark.parametrize("case", OVERLAPS)
def test_out_may_not_overlap_a_source_in_part(case: str, nonfinite: Any) -> None:
    base = np.arange(10.0)
    base[4] = np.nan
    sources, out = OVERLAPS[case](base)
    for weights in (None, [1] * len(sources)):
        for models, target in ((sources, out), ([[one] for one in sources], [out])):
            with refuses(ValueError, f"source {len(sources) - 1}.*: overlaps out; only", base):
                fw.average(models, weights, out=target, nonfinite=nonfinite)


def test_sources_may_lie_beside_out() -> None:
    base = np.arange(12.0)
    fw.average([base[:4], base[8:]], out=base[4:8])
    assert base.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]


def test_a_strided_source_may_lie_around_out() -> None:
    base = np.arange(12.0).reshape(3, 4)
    fw.average([base[:2, 0], base[1:, 3]], out=base[0, 1:3])
    assert base[0].tolist() == [0, 3.5, 7.5, 3]


@pytest.mark.parametrize("make", [dict, lambda parts: list(parts.values())])
def test_out_may_not_be_another_part_of_a_source(make: Any) -> None:
    a, b = np.ones(3), np.zeros(3)
    with refuses(ValueError, r"source 0, slot [01] '\w': overlaps out", a, b):
        fw.average([make({"a": a, "b": b})], out=make({"a": b, "b": a}))


def test_the_parts_of_out_may_not_overlap() -> None:
    base = np.zeros(5)
    with refuses(ValueError, "out, slot 1 '1': overlaps another part of out", base):
        fw.average([[np.ones(3), np.ones(3)]], out=[base[:3], base[2:]])


def test_wrapped_buffers_may_not_overlap_in_part() -> None:
    layout = fw.Layout.of({"a": np.zeros(16), "b": np.zeros(16)})
    memory = np.zeros(layout.nbytes + 64, np.uint8)
    source = fw.FlatWeights.wrap(memory[:-64], layout)
    out = fw.FlatWeights.wrap(memory[64:], layout)
    with refuses(ValueError, "source 0, slot [01] '[ab]': overlaps out", memory):
        fw.average([source], out=out)


def test_neighbours_do_not_overlap() -> None:
    base = np.arange(9.0)
    fw.average([base[:3], base[6:]], out=base[3:6])
    assert base.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8]


# The same bits.


def bits_of(model: Any) -> list[bytes]:
    return [array.tobytes() for array in arrays_of(model)]


@pytest.mark.parametrize("weights", [pytest.param(None, marks=pytest.mark.slow), [0.3, 1.7, 0.9]])
def test_bits_do_not_depend_on_threads(
    weights: list[float] | None, use_threads: Callable[[int], None], rng: np.random.Generator
) -> None:
    # The borders between threads cut parts of several dtypes anywhere.
    sizes = {"float32": 300_001, "float16": 200_003, "float64": 150_009, "complex64": 100_007}
    models = [[random_array(rng, n, np.dtype(t)) for t, n in sizes.items()] for _ in range(3)]
    results = []
    for threads in (1, 2, 3, 4):
        use_threads(threads)
        results.append(bits_of(fw.average(models, weights)))
        running = fw.RunningAverage()
        for model, weight in zip(models, weights or [1, 1, 1], strict=True):
            running.add(model, weight)
        results.append(bits_of(running.mean()))
    assert all(result == results[0] for result in results)


@each(averaged_dtype=AVERAGED)
def test_bits_do_not_depend_on_alignment(
    averaged_dtype: np.dtype[Any], rng: np.random.Generator
) -> None:
    values = [random_array(rng, 3 * BLOCK + 5, averaged_dtype) for _ in range(4)]
    expected = fw.average(values, [1, 0.1, 7, 2])
    for misalignment in (1, 2, 8, 31, 63):
        sources = [Guarded(v, misalignment * k % 64).array for k, v in enumerate(values)]
        assert same_bits(fw.average(sources, [1, 0.1, 7, 2]), expected)


def test_bits_do_not_depend_on_the_split_into_parts(rng: np.random.Generator) -> None:
    values = [random_array(rng, 5000, np.dtype(np.float64)) for _ in range(3)]
    whole = fw.average(values)
    parts = fw.average([np.split(v, [1, 1, 1023, 3000]) for v in values])
    assert same_bits(np.concatenate(parts), whole)


@each(weight=[1, 3, 0.1, 1 / 3, 1e-300, 1e300, np.float32(0.7), True])
@each(averaged_dtype=AVERAGED)
def test_equal_weights_give_what_none_gives(
    weight: Any, averaged_dtype: np.dtype[Any], rng: np.random.Generator
) -> None:
    sources = [random_array(rng, 999, averaged_dtype) for _ in range(7)]
    assert same_bits(fw.average(sources, [weight] * 7), fw.average(sources))


@each(averaged_dtype=AVERAGED)
def test_weights_of_zero_take_no_part(
    averaged_dtype: np.dtype[Any], rng: np.random.Generator
) -> None:
    sources = [random_array(rng, 99, averaged_dtype) for _ in range(4)]
    assert same_bits(
        fw.average(sources, [0, 2.5, 0, 1.5]), fw.average([sources[1], sources[3]], [2.5, 1.5])
    )


# Bad input.


@pytest.mark.parametrize(
    ("weights", "match"),
    [
        ([1], "expected 2 weights, one per source, got 1"),
        ([], "expected 2 weights, one per source, got 0"),
        ([1, 1, 1], "expected 2 weights, one per source, got 3"),
        ([0, 0], "expected a positive weight, got only zeros"),
        ([1, -1], "weight 1: expected a finite weight, not negative, got -1"),
        ([np.nan, 1], "weight 0: expected a finite weight, not negative, got nan"),
        ([1, np.inf], "weight 1: expected a finite weight, not negative, got inf"),
        ([1e-300, 1], "at most 1.3e.154 times the first positive one, got 1e-300 and 1.0"),
    ],
)
def test_bad_weights_are_refused(weights: list[Any], match: str) -> None:
    out = np.zeros(2)
    for sources in ([np.ones(2)] * 2, [out, np.ones(2)]):
        with refuses(ValueError, match, out):
            fw.average(sources, weights, out=out)


@pytest.mark.parametrize("weights", [{0: 100, 1: 1}, {1: 100}.keys(), {1.0, 2.0}, "19", b"12"])
def test_weights_without_the_order_of_the_sources_are_refused(weights: Any) -> None:
    out, total = np.zeros(2), fw.RunningAverage()
    with refuses(TypeError, "weights: expected numbers in the order of the sources, got a", out):
        fw.average([np.ones(2)] * 2, weights, out=out)
    with refuses(TypeError, "weights: expected numbers in the order of the sources, got a", out):
        total.add_all([np.ones(2)] * 2, weights)
    assert fw.average([np.ones(2), np.zeros(2)], {"a": 3, "b": 1}.values()).tolist() == [0.75, 0.75]


@pytest.mark.parametrize(
    "results", [{0: {"w": np.ones(2)}}, {"a": np.ones(2)}, fw.FlatWeights({"w": np.ones(2)})]
)
def test_results_by_rank_are_refused_with_what_to_pass(results: Any) -> None:
    total = fw.RunningAverage()
    calls: list[Callable[[Any], Any]] = [fw.average, median, distances, total.add_all]
    hint = r"^sources: expected a list .* list\(models\.values\(\)\), or the models in one list"
    for call in calls:
        with pytest.raises(TypeError, match=hint):
            call(results)
    assert fw.average(list(results.values())) is not None


@pytest.mark.parametrize("sources", [[], iter([]), {}, ()])
def test_no_sources_are_refused(sources: Any) -> None:
    out = np.zeros(2)
    with refuses(ValueError, "expected at least one source, got none", out):
        fw.average(sources, out=out)


@pytest.mark.parametrize(
    ("sources", "match"),
    [
        ([1.5, 2.5], "expected an array, FlatWeights, .* got float"),
        (["a", "b"], "source 0: .* got str"),
        ("ab", "sources: expected a list of models, got str"),
        (b"ab", "sources: expected a list of models, got bytes"),
        (None, "sources: expected a list of models, got NoneType"),
        (3, "sources: expected a list of models, got int"),
        ([None], "got NoneType"),
        ([b"ab"], "got bytes"),
        ({"w": np.ones(1)}, r"expected a list of models, got dict; .* in one list, \[a, b\]"),
        ([{1}], "got set"),
        ([np.ones(1), [np.ones(1)]], "source 1: expected an array, got a sequence of arrays"),
        ([[np.ones(1)], {"0": np.ones(1)}], "source 1: expected a sequence .* got a mapping"),
        (
            [fw.FlatWeights([np.ones(1)]), {"0": np.ones(1)}],
            "source 1: expected FlatWeights, got a mapping",
        ),
    ],
)
def test_sources_that_are_no_models_of_one_kind_are_refused(sources: Any, match: str) -> None:
    with pytest.raises(TypeError, match=match):
        fw.average(sources)


MISMATCHES = {
    "shape": (
        ValueError,
        r"source 1, slot 0 'a': expected float32 \(2, 3\), got float32 \(3, 2\)",
        {"a": np.ones((3, 2), "f4"), "b": np.ones(2)},
    ),
    "dtype": (
        TypeError,
        r"source 1, slot 0 'a': expected float32 \(2, 3\), got float64 \(2, 3\)",
        {"a": np.ones((2, 3)), "b": np.ones(2)},
    ),
    "missing": (
        ValueError,
        r"source 1: expected the keys of the first; missing \['b'\], unknown \[\]",
        {"a": np.ones((2, 3), "f4")},
    ),
    "unknown": (
        ValueError,
        r"source 1: expected the keys of the first; missing \['b'\], unknown \['c'\]",
        {"a": np.ones((2, 3), "f4"), "c": np.ones(2)},
    ),
    "more": (
        ValueError,
        r"missing \[\], unknown \['c'\]",
        {"a": np.ones((2, 3), "f4"), "b": np.ones(2), "c": np.ones(1)},
    ),
}


@each(nonfinite=["propagate", "raise", "skip"])
@each(case=MISMATCHES)
def test_dicts_that_differ_are_refused(case: str, nonfinite: Any) -> None:
    error, match, other = MISMATCHES[case]
    first = {"a": np.ones((2, 3), "f4"), "b": np.ones(2)}
    out = {k: np.zeros_like(v) for k, v in first.items()}
    with refuses(error, match, *out.values()):
        fw.average([first, other], out=out, nonfinite=nonfinite)


@pytest.mark.parametrize("nonfinite", ["propagate", "raise"])
def test_sequences_that_differ_are_refused(nonfinite: Any) -> None:
    first = [np.ones((2, 3), "f4"), np.ones(2)]
    out = [np.zeros_like(part) for part in first]
    for other, match in (
        (first[:1], "source 1: expected 2 parts, got 1"),
        ([*first, np.ones(1)], "source 1: expected 2 parts, got 3"),
        (first[::-1], r"source 1, slot 0 '0': expected float32 \(2, 3\), got float64 \(2,\)"),
    ):
        with refuses((TypeError, ValueError), match, *out):  # type: ignore[arg-type]
            fw.average([first, other], out=out, nonfinite=nonfinite)


@pytest.mark.parametrize(
    ("other", "error", "match"),
    [
        (np.ones(3), ValueError, r"source 1: expected float64 \(2,\), got float64 \(3,\)"),
        (np.ones((2, 1)), ValueError, r"expected float64 \(2,\), got float64 \(2, 1\)"),
        (np.ones(2, "f4"), TypeError, r"source 1: expected float64 \(2,\), got float32 \(2,\)"),
        (np.ones(2, ">f8"), TypeError, r"source 1: expected float64 \(2,\), got >f8 \(2,\)"),
        (np.ones(2, int), TypeError, r"source 1: expected float64 \(2,\), got int64 \(2,\)"),
    ],
)
def test_arrays_that_differ_are_refused(other: Any, error: Any, match: str) -> None:
    out = np.zeros(2)
    with refuses(error, match, out):
        fw.average([np.ones(2), other], out=out)


@pytest.mark.parametrize(
    ("other", "match"),
    [
        ({"a": np.ones(2)}, "source 1: expected 2 slots, got 1"),
        ({"a": np.ones(2), "c": np.ones(3)}, r"slot 1: expected 'b' float64 \(3,\), got 'c'"),
        ({"b": np.ones(3), "a": np.ones(2)}, r"source 1: slot 0: expected 'a' float64 \(2,\)"),
        ({"a": np.ones(2, "f4"), "b": np.ones(3)}, r"float64 \(2,\), got 'a' float32 \(2,\)"),
    ],
)
def test_flat_weights_of_another_digest_are_refused(other: Any, match: str) -> None:
    first = fw.FlatWeights({"a": np.ones(2), "b": np.ones(3)})
    out = first.copy()
    with refuses(ValueError, match, out.buffer):
        fw.average([first, fw.FlatWeights(other)], out=out)


BAD_OUT = {
    "short": (ValueError, r"out: expected float64 \(3,\), got float64 \(2,\)", np.zeros(2)),
    "shape": (ValueError, r"out: expected float64 \(3,\), got float64 \(3, 1\)", np.zeros((3, 1))),
    "dtype": (TypeError, r"out: expected float64 \(3,\), got float32 \(3,\)", np.zeros(3, "f4")),
    "strides": (ValueError, "out: expected a C-contiguous array", np.zeros(6)[::2]),
    "read-only": (ValueError, "out: expected a writable array, got a read", read_only(np.zeros(3))),
    "kind": (TypeError, "out: expected an array, got a sequence of arrays", [0.0, 0.0, 0.0]),
}


@pytest.mark.parametrize("case", BAD_OUT)
def test_a_bad_out_is_refused(case: str) -> None:
    error, match, out = BAD_OUT[case]
    with refuses(error, match, np.asarray(out)):
        fw.average([np.ones(3)] * 2, out=out)
    if case != "kind":
        with refuses(error, match.replace("out:", "out, slot 1 'b':"), out):  # type: ignore[arg-type]
            fw.average([{"a": np.ones(1), "b": np.ones(3)}], out={"a": np.zeros(1), "b": out})


def test_a_source_that_is_an_out_with_strides_is_refused_as_that_out() -> None:
    base = np.arange(12.0)
    for out in (base[::2], base.reshape(3, 4).T):
        for models, target in (([out, out + 1], out), ([{"a": out}, {"a": out + 1}], {"a": out})):
            for average in (fw.average, median):
                with refuses(ValueError, "out.*: expected a C-contiguous array, got strides", base):
                    average(models, out=target)


def test_out_consists_of_numpy_arrays() -> None:
    with pytest.raises(TypeError, match="out: expected a NumPy array, got float64"):
        fw.average([np.float64(1)], out=np.float64(0))
    with pytest.raises(TypeError, match="out, slot 0 '0': expected a NumPy array, got list"):
        fw.average([[np.ones(2)]], out=[[0.0, 0.0]])
    with pytest.raises(TypeError, match="out, slot 1 'b': expected a NumPy array, got NoneType"):
        fw.average([{"a": np.ones(1), "b": np.ones(1)}], out={"a": np.zeros(1), "b": None})


def test_an_out_of_other_parts_is_refused() -> None:
    with pytest.raises(ValueError, match="out: expected 2 parts, got 1"):
        fw.average([[np.ones(1), np.ones(1)]], out=[np.zeros(1)])
    with pytest.raises(ValueError, match=r"out: expected the keys of the first; missing \['a'\]"):
        fw.average([{"a": np.ones(1)}], out={"b": np.ones(1)})
    with pytest.raises(ValueError, match="out: expected 1 slots, got 0"):
        fw.average([fw.FlatWeights({"a": np.ones(1)})], out=fw.FlatWeights({}))
    w = fw.FlatWeights({"a": np.ones(1)})
    frozen = fw.FlatWeights.wrap(read_only(w.buffer.copy()), w.layout)
    with pytest.raises(ValueError, match="out: expected a writable buffer, got a read-only one"):
        fw.average([w], out=frozen)


class OnlyDLPack:
    """An array of a library that NumPy does not know."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


class OnlyInterface:
    """An object that is an array only by its ``__array_interface__``."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.__array_interface__ = array.__array_interface__


@pytest.mark.parametrize("wrap", [OnlyDLPack, OnlyInterface, memoryview])
def test_other_libraries_arrays_are_read_in_place(wrap: Callable[[np.ndarray], Any]) -> None:
    arrays = [np.float32([1, 2, 3]), np.float32([3, 6, 9])]  # type: ignore[arg-type]
    foreign: list[Any] = [wrap(array) for array in arrays]
    assert fw.average(foreign).tolist() == [2, 4, 6]
    assert fw.average([{"w": one} for one in foreign])["w"].tolist() == [2, 4, 6]
    assert fw.flatten(foreign).tolist() == [1, 2, 3, 3, 6, 9]
    arrays[0][:] = 5
    assert fw.average([foreign[0]]).tolist() == [5, 5, 5], "read in place, not copied when wrapped"


def test_a_weight_that_no_float_holds_is_refused() -> None:
    with refuses(ValueError, "weight 0: expected a finite weight, not negative"):
        fw.average([np.ones(1)] * 2, weights=[10**400, 1])


def test_plain_arrays_give_what_lists_of_them_give() -> None:
    rng = np.random.default_rng(0)
    for dtype in (np.float16, np.float32, np.float64, np.complex64):
        for shape in ((), (7,), (3, 5), (0, 2)):
            sources = [np.asarray(rng.standard_normal(shape), dtype) for _ in range(4)]
            (expected,) = fw.average([[source] for source in sources])
            got = fw.average(sources)
            out = sources[2].copy()
            assert fw.average(sources, out=out) is out
            assert type(got) is np.ndarray
            for result in (got, out):
                assert (result.dtype, result.shape) == (expected.dtype, shape)
                assert result.tobytes() == expected.tobytes()


def test_plain_arrays_that_partly_overlap_out_are_refused_and_left() -> None:
    memory = np.arange(10.0)
    with pytest.raises(ValueError, match="overlaps"):
        fw.average([memory[:8], np.zeros(8)], out=memory[2:])
    assert np.array_equal(memory, np.arange(10.0))
