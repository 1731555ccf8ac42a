import math
from collections.abc import Callable
from fractions import Fraction
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
    dtype_id,
    each,
    nearest,
    random_array,
    read_only,
    refuses,
    same_bits,
)

import flatweights as fw

Array = np.ndarray[Any, Any]
Change = Callable[[Any, Any], object]


def near_end(y: Array, x: Array, a: float) -> Array:
    return y + a * (x - y) if a < 0.5 else x - (1 - a) * (x - y)


# The function that is called, and the same in float64 with NumPy.
CHANGES: dict[str, tuple[Change, Callable[[Array, Array], Array]]] = {
    "scale_": (lambda y, x: fw.scale_(y, -0.3), lambda y, x: -0.3 * y),
    "axpy_": (lambda y, x: fw.axpy_(y, 0.7, x), lambda y, x: y + 0.7 * x),
    "lerp_, near": (lambda y, x: fw.lerp_(y, x, 0.1), lambda y, x: near_end(y, x, 0.1)),
    "lerp_, far": (lambda y, x: fw.lerp_(y, x, 0.9), lambda y, x: near_end(y, x, 0.9)),
    "lerp_, beyond": (lambda y, x: fw.lerp_(y, x, 1.5), lambda y, x: near_end(y, x, 1.5)),
}
READS: dict[str, Callable[[Any], object]] = {"norm": fw.norm, "isfinite": fw.isfinite}
ON_Y: dict[str, Callable[[Any], object]] = {
    "scale_": lambda y: fw.scale_(y, 2.0),
    "axpy_": lambda y: fw.axpy_(y, 2.0, fw.FlatWeights(y) if isinstance(y, dict) else np.array(y)),
    "lerp_": lambda y: fw.lerp_(y, fw.FlatWeights(y) if isinstance(y, dict) else np.array(y), 0.2),
    "clip_by_norm_": lambda y: fw.clip_by_norm_(y, 1e-3),
}
WITH_X: dict[str, Change] = {
    "axpy_": lambda y, x: fw.axpy_(y, 2.0, x),
    "lerp_": lambda y, x: fw.lerp_(y, x, 0.2),
}


def reals(array: Array) -> Array:
    """The real and imaginary parts of ``array``, one after the other."""
    return array.reshape(-1).view(array.real.dtype)


def rounded(values: Array, dtype: np.dtype[Any]) -> Array:
    """Finite float64 numbers, rounded to ``dtype`` once."""
    if dtype == BFLOAT16:  # ml_dtypes rounds twice
        values = np.array([nearest(Fraction(v), dtype) for v in values.tolist()])
    return values.astype(dtype)


def expected(y: Array, x: Array, compute: Callable[[Array, Array], Array]) -> Array:
    wide = compute(reals(y).astype(np.float64), reals(x).astype(np.float64))
    return rounded(wide, reals(y).dtype).view(y.dtype).reshape(y.shape)  # type: ignore[no-any-return]


def exact_norm(*arrays: Array) -> float:
    """The norm within a unit in the last place, by integers: squares are added without rounding."""
    values = [float(v) for array in arrays for v in reals(array).tolist()]
    total = sum((Fraction(v) ** 2 for v in values), Fraction(0))
    if total == 0:
        return 0.0
    shift = (total.denominator.bit_length() - total.numerator.bit_length()) // 2 + 64
    scaled = total * Fraction(4) ** shift
    root = Fraction(math.isqrt(scaled.numerator // scaled.denominator))
    return float(root / Fraction(2) ** shift)


def model(rng: np.random.Generator, step: int = 0) -> dict[str, Array]:
    return {
        "kernel": random_array(rng, (3, 5), np.dtype(np.float32)),
        "step": np.array(step, np.int64),
        "bias": random_array(rng, BLOCK + 1, np.dtype(np.float64)),
        "half": random_array(rng, (2, 2), np.dtype(np.float16)),
        "mask": np.array([True, False, True]),
        "brain": random_array(rng, 9, BFLOAT16),
        "phase": random_array(rng, 3, np.dtype(np.complex64)),
        "none": np.zeros((0, 3), np.float32),
    }


# Right results.


@pytest.mark.parametrize("name", CHANGES)
@each(averaged_dtype=AVERAGED)
def test_changes_are_rounded_once(
    name: str, averaged_dtype: np.dtype[Any], rng: np.random.Generator
) -> None:
    change, compute = CHANGES[name]
    for i, size in enumerate(SIZES):
        y = Guarded(random_array(rng, size, averaged_dtype), MISALIGNMENTS[i % 4])
        x = Guarded(random_array(rng, size, averaged_dtype), MISALIGNMENTS[i // 4 % 4])
        before = x.array.copy()
        result = expected(y.array, x.array, compute)
        assert change(y.array, x.array) is None
        assert same_bits(y.array, result)
        assert y.is_intact()
        assert same_bits(x.array, before)
        assert x.is_intact()


@each(name=CHANGES)
@each(averaged_dtype=AVERAGED)
def test_x_may_be_y(name: str, averaged_dtype: np.dtype[Any], rng: np.random.Generator) -> None:
    change, compute = CHANGES[name]
    y = random_array(rng, BLOCK + 3, averaged_dtype)
    result = expected(y, y.copy(), compute)
    change(y, y[:])
    assert same_bits(y, result)


@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (0, 4), (2, 1, 3, 5)])
def test_arrays_of_any_shape(shape: tuple[int, ...], rng: np.random.Generator) -> None:
    y, x = (np.array(rng.normal(size=shape)) for _ in range(2))
    result = y + 2.0 * x
    fw.axpy_(y, 2.0, x)
    assert same_bits(y, result)
    assert fw.norm(y) == exact_norm(y)
    assert fw.isfinite(y)


def test_float64_is_what_numpy_computes(rng: np.random.Generator) -> None:
    y, x = rng.normal(size=(2, 5000)) * 10.0 ** rng.uniform(-300, 300, (2, 5000))
    for a in (0.0, -1.0, 0.3, 1e300, 5e-324):
        with np.errstate(all="ignore"):
            results = a * y, y + a * x
        scaled, added = y.copy(), y.copy()
        fw.scale_(scaled, a)
        fw.axpy_(added, a, x)
        assert same_bits(scaled, results[0])
        assert same_bits(added, results[1])


@pytest.mark.parametrize("dtype", AVERAGED, ids=dtype_id)
def test_lerp_reaches_both_ends(dtype: np.dtype[Any], rng: np.random.Generator) -> None:
    wide = rng.normal(size=(2, 3000)) * 10.0 ** rng.uniform(-4, 4, (2, 3000))
    special = np.array([np.inf, -np.inf, 1.7e308, -1.7e308, 0.0, -0.0, 5e-324])
    wide[:, :49] = np.repeat(special, 7), np.tile(special, 7)  # no difference of many is finite
    with np.errstate(over="ignore"):
        y, x = wide.astype(dtype)
    target = y.copy()
    fw.lerp_(target, x, 0)
    assert same_bits(target, y)
    fw.lerp_(target, x, 1)
    assert same_bits(target, x)
    nans = np.full(3000, np.nan, dtype)
    fw.lerp_(target, nans, 0)
    assert same_bits(target, x)
    fw.lerp_(nans, x, 1)
    assert same_bits(nans, x)


@pytest.mark.parametrize("a", [0.3, np.float32(0.25), np.int64(3), 2, True, np.array(0.5)])
def test_numbers_of_all_kinds(a: Any) -> None:
    y = np.array([1.0, 2.0])
    fw.scale_(y, a)
    assert y.tolist() == [float(a), 2 * float(a)]


def test_array_likes_are_read_in_place() -> None:
    class Tensor:
        def __array__(self, dtype: Any = None, copy: Any = None) -> Array:
            return np.array([3.0, 4.0])

    y = np.ones(2)
    fw.axpy_(y, 1, Tensor())  # type: ignore[type-var]
    assert y.tolist() == [4, 5]
    assert fw.norm(Tensor()) == 5  # type: ignore[type-var]
    assert fw.norm(np.float32(-2)) == 2


# Models.


@pytest.mark.parametrize("name", CHANGES)
def test_flat_weights_are_changed_but_for_integers(name: str, rng: np.random.Generator) -> None:
    change, compute = CHANGES[name]
    ours, theirs = model(rng, 7), model(rng, 8)
    y, x = fw.FlatWeights(ours), fw.FlatWeights(theirs)
    buffer = x.buffer.copy()
    change(y, x)
    for key, part in ours.items():
        floating = part.dtype.kind not in "bi"
        assert same_bits(y[key], expected(part, theirs[key], compute) if floating else part)
    assert same_bits(x.buffer, buffer)
    change(y, y)
    assert int(y["step"]) == 7


def test_the_norm_of_flat_weights_leaves_integers_out(rng: np.random.Generator) -> None:
    parts = model(rng, 10**6)
    weights = fw.FlatWeights(parts)
    floating = [part for part in parts.values() if part.dtype.kind not in "bi"]
    before = exact_norm(*floating)
    assert fw.norm(weights) == pytest.approx(before, rel=2e-16)
    assert fw.clip_by_norm_(weights, 2.0) == fw.norm(fw.FlatWeights(parts))
    assert fw.norm(weights) == pytest.approx(2.0, rel=1e-3)  # the parts of 16 bits are rounded
    assert int(weights["step"]) == 10**6
    assert weights["mask"].tolist() == [True, False, True]
    for key in ("kernel", "bias", "phase"):
        np.testing.assert_allclose(weights[key], parts[key] * (2.0 / before), rtol=1e-6)


def test_models_without_floats() -> None:
    weights = fw.FlatWeights({"step": np.array([3, 4]), "none": np.zeros(0)})
    fw.scale_(weights, 2)
    fw.axpy_(weights, 2, weights)
    assert fw.clip_by_norm_(weights, 0.0) == fw.norm(weights) == 0
    assert fw.isfinite(weights)
    assert weights["step"].tolist() == [3, 4]
    assert fw.norm(fw.FlatWeights({})) == 0


# Norms.


@each(averaged_dtype=AVERAGED)
def test_norm_of_each_dtype_and_size(
    averaged_dtype: np.dtype[Any], rng: np.random.Generator
) -> None:
    for i, size in enumerate(SIZES):
        x = Guarded(random_array(rng, size, averaged_dtype), MISALIGNMENTS[i % 4]).array
        found = fw.norm(read_only(x))
        assert type(found) is float
        assert abs(found - exact_norm(x)) <= 2 * math.ulp(found)


@pytest.mark.parametrize("reach", [150, 300])
@pytest.mark.parametrize("size", [3, 16, BLOCK + 5, 20_000])
def test_norm_of_numbers_far_apart(size: int, reach: int, rng: np.random.Generator) -> None:
    for _ in range(3):
        x = rng.normal(size=size) * 10.0 ** rng.uniform(-reach, reach, size)
        largest = float(np.max(np.abs(x)))
        root = math.sqrt(math.fsum((float(v) / largest) ** 2 for v in x)) * largest
        assert abs(fw.norm(x) - root) <= 3 * math.ulp(root)


def test_small_squares_are_not_lost_beside_a_large_one() -> None:
    # Added one by one to 1, each of these squares would be rounded away.
    x = np.full(1_000_001, 2.0**-27)
    x[0] = 1.0
    expected = math.sqrt(1 + 1_000_000 * 2.0**-54)
    for order in (x, x[::-1].copy()):
        assert abs(fw.norm(order) - expected) <= math.ulp(expected)


@pytest.mark.parametrize(
    "scale", [2.0**-1074, 2.0**-1000, 2.0**-520, 2.0**-480, 2.0**510, 2.0**1020]
)
def test_norm_beyond_the_range_of_squares(scale: float) -> None:
    x = np.array([3.0, 0.0, -4.0]) * scale
    assert fw.norm(x) == 5 * scale
    assert fw.norm(np.append(x, 0.0).view(np.complex128)) == 5 * scale
    parts = {"a": np.ones(0, np.float32), "b": x, "c": np.zeros(3, np.float16)}
    assert fw.norm(fw.FlatWeights(parts)) == 5 * scale


def test_norm_of_zeros_subnormals_and_the_largest_numbers() -> None:
    assert fw.norm(np.zeros(0)) == fw.norm(np.zeros(5)) == fw.norm(np.array(-0.0)) == 0
    assert math.copysign(1, fw.norm(np.array([-0.0]))) == 1
    for dtype in (np.float16, BFLOAT16, np.float32, np.float64):
        info = ml_dtypes.finfo(dtype)
        for value in (info.smallest_subnormal, info.tiny, info.max):
            for count in (1, 4):
                root = float(value) * math.sqrt(count)
                assert fw.norm(np.full(count, value, dtype)) == root
        assert fw.isfinite(np.full(3, info.max, dtype))
    assert fw.norm(np.full(4, 1.7e308)) == math.inf


@each(at=[0, 5, BLOCK, 2 * BLOCK])
@each(value=[np.nan, -np.nan, np.inf, -np.inf])
@each(averaged_dtype=AVERAGED)
def test_nan_and_infinity_are_found_wherever_they_are(
    value: float, at: int, averaged_dtype: np.dtype[Any]
) -> None:
    x = np.ones(2 * BLOCK + 1, averaged_dtype)
    assert fw.isfinite(x)
    x[at] = value
    assert not fw.isfinite(x)
    assert not fw.isfinite(fw.FlatWeights({"a": np.arange(3), "b": x}))
    found = fw.norm(x)
    assert math.isnan(found) if math.isnan(value) else found == math.inf
    both = np.array([np.inf, np.nan]).astype(averaged_dtype)
    assert math.isnan(fw.norm(both))


# Clipping.


@each(averaged_dtype=AVERAGED)
def test_clipping_scales_to_the_norm(
    averaged_dtype: np.dtype[Any], rng: np.random.Generator
) -> None:
    y = random_array(rng, 2 * BLOCK + 1, averaged_dtype)
    before, copy = fw.norm(y), y.copy()
    assert fw.clip_by_norm_(y, before) == before
    assert fw.clip_by_norm_(y, math.inf) == before
    assert same_bits(y, copy)
    assert fw.clip_by_norm_(y, 3.0) == before
    fw.scale_(copy, 3.0 / before)
    assert same_bits(y, copy)
    assert fw.norm(y) == pytest.approx(3.0, rel=2e-3)
    assert fw.clip_by_norm_(y, 0) > 0
    assert not np.any(y)


@pytest.mark.parametrize("most", [1e-20, 1e-300])
def test_clipping_over_the_whole_range_of_float64(most: float) -> None:
    y = np.array([3.0, 4.0, 1e-290]) * 1e300
    assert fw.clip_by_norm_(y, most) == pytest.approx(5e300)
    np.testing.assert_allclose(y[:2], np.array([0.6, 0.8]) * most, rtol=1e-15)


@pytest.mark.parametrize("bad", [[np.nan, 1.0], [np.inf, 1.0], [1.7e308, 1.7e308]])
def test_clipping_to_a_norm_that_is_not_finite_is_refused(bad: list[float]) -> None:
    y = np.array(bad)
    for most in (1.0, 0.0, math.inf):
        with refuses(ValueError, "y: expected a finite norm, got (nan|inf)", y):
            fw.clip_by_norm_(y, most)


# NaN, infinity, subnormals.


def test_nan_infinity_and_overflow_are_those_of_numpy() -> None:
    special = [np.nan, np.inf, -np.inf, 1.0, -0.0, 1.7e308, 5e-324]
    y, x = (np.array(v) for v in zip(*((a, b) for a in special for b in special), strict=True))
    for change, compute in CHANGES.values():
        result = y.copy()
        change(result, x)
        with np.errstate(all="ignore"):
            np.testing.assert_array_equal(result, compute(y, x))
        assert {v.tobytes() for v in result[np.isnan(result)]} <= {np.array(np.nan).tobytes()}


@each(averaged_dtype=AVERAGED)
def test_every_nan_becomes_the_same_one(averaged_dtype: np.dtype[Any]) -> None:
    nans = np.array([np.nan, -np.nan] * BLOCK).astype(averaged_dtype)
    width = f"u{reals(nans).dtype.itemsize}"
    for change, _ in CHANGES.values():
        y = nans.copy()
        change(y, nans[::-1].copy())
        parts = reals(y)
        found = {int(v) for v in parts.view(width)[np.isnan(parts.astype(np.float64))]}
        assert len(found) == 1


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.float32], ids=str)
def test_results_below_and_above_the_range(dtype: Any) -> None:
    info = ml_dtypes.finfo(dtype)
    least, most = float(info.smallest_subnormal), float(info.max)
    y = np.array([least, 3 * least, most, -most]).astype(dtype)
    halved, doubled = y.copy(), y.copy()
    fw.scale_(halved, 0.5)
    assert halved.astype(float).tolist() == [0.0, 2 * least, most / 2, -most / 2]  # ties to even
    fw.scale_(doubled, 2)
    assert doubled.astype(float).tolist() == [2 * least, 6 * least, np.inf, -np.inf]
    fw.scale_(y, 1e-300)
    assert not np.any(y)


# The same bits.


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_threads_do_not_change_the_bits(
    threads: int, use_threads: Callable[[int], None], rng: np.random.Generator
) -> None:
    size = 700_001
    y, x = rng.normal(size=(2, size)) * 10.0 ** rng.uniform(-30, 30, (2, size))
    parts = {
        "a": y[:300_007].astype(np.float32),
        "n": np.arange(5),
        "b": y[:65_000],
        "c": np.clip(y[-200_001:], -6e4, 6e4).astype(np.float16),
    }
    use_threads(1)
    weights = fw.FlatWeights(parts)
    expected_norms = fw.norm(y), fw.norm(weights)
    added, clipped = y.copy(), y.copy()
    fw.axpy_(added, 0.1, x)
    fw.clip_by_norm_(clipped, 1.0)
    fw.lerp_(weights, fw.FlatWeights(parts), 0.3)
    use_threads(threads)
    assert (fw.norm(y), fw.norm(fw.FlatWeights(parts))) == expected_norms
    z = y.copy()
    fw.axpy_(z, 0.1, x)
    assert same_bits(z, added)
    z = y.copy()
    fw.clip_by_norm_(z, 1.0)
    assert same_bits(z, clipped)
    other = fw.FlatWeights(parts)
    fw.lerp_(other, fw.FlatWeights(parts), 0.3)
    assert same_bits(other.buffer, weights.buffer)


@each(averaged_dtype=AVERAGED)
def test_alignment_does_not_change_the_norm(
    averaged_dtype: np.dtype[Any], rng: np.random.Generator
) -> None:
    x = random_array(rng, 3 * BLOCK + 7, averaged_dtype)
    assert len({fw.norm(Guarded(x, m).array) for m in MISALIGNMENTS}) == 1


# Bad input.


@each(name=[*ON_Y, *READS])
@each(dtype=INTEGERS + OTHERS)
def test_arrays_without_floats_are_refused(
    name: str, dtype: np.dtype[Any], rng: np.random.Generator
) -> None:
    call = ON_Y.get(name) or READS[name]
    bad = random_array(rng, 3, dtype)
    with refuses(TypeError, r"^[xy]: expected float16, bfloat16, .* got ", bad):
        call(bad)
    if dtype in OTHERS:
        weights = fw.FlatWeights({"a": np.ones(2), "bad": bad})
        with refuses(TypeError, r"^[xy], slot 1 'bad': expected float16", weights.buffer):
            call(weights)


@each(name=[*ON_Y, *READS])
@each(bad=[[1.0], {"a": np.ones(1)}, 3.5, None, "x"])
def test_other_things_are_refused(name: str, bad: Any) -> None:
    call = {
        **READS,
        "scale_": lambda y: fw.scale_(y, 1.0),
        "axpy_": lambda y: fw.axpy_(y, 1.0, np.ones(1)),
        "lerp_": lambda y: fw.lerp_(y, np.ones(1), 1.0),
        "clip_by_norm_": lambda y: fw.clip_by_norm_(y, 1.0),
    }[name]
    with pytest.raises(TypeError, match=r"^[xy]: expected an? .*array or FlatWeights, got "):
        call(bad)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("name", ON_Y)
def test_a_y_that_cannot_be_written_is_refused(name: str) -> None:
    base = np.arange(8.0)
    with refuses(ValueError, "^y: expected a writable array", base):
        ON_Y[name](read_only(base))
    with refuses(ValueError, "^y: expected a C-contiguous array, got strides", base):
        ON_Y[name](base[::2])
    with refuses(ValueError, "^y: expected a C-contiguous array, got strides", base):
        ON_Y[name](base.reshape(2, 4).T)
    weights = fw.FlatWeights({"a": base})
    locked = fw.FlatWeights.wrap(read_only(weights.buffer), weights.layout)
    with refuses(ValueError, "^y: expected a writable buffer", weights.buffer):
        ON_Y[name](locked)
    with pytest.raises(TypeError, match=r"^y: expected a NumPy array"):
        ON_Y[name](np.float64(1.0))


@pytest.mark.parametrize("name", READS)
def test_strides_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"^x: expected a C-contiguous array, got strides"):
        READS[name](np.ones(8)[::2])


BAD_X = {
    "shape": (ValueError, r"^x: expected float64 \(4,\), got float64 \(2, 2\)", np.ones((2, 2))),
    "size": (ValueError, r"^x: expected float64 \(4,\), got float64 \(3,\)", np.ones(3)),
    "dtype": (TypeError, r"^x: expected float64 \(4,\), got float32", np.ones(4, np.float32)),
    "integers": (TypeError, r"^x: expected float64 \(4,\), got int64", np.ones(4, int)),
    "bytes": (TypeError, r"^x: expected float64 \(4,\), got >f8", np.ones(4, ">f8")),
    "strides": (ValueError, "^x: expected a C-contiguous array", np.ones(8)[::2]),
    "kind": (TypeError, "^x: expected an array, got FlatWeights", fw.FlatWeights([np.ones(4)])),
    "list": (TypeError, "^x: expected an array or FlatWeights, got list", [1.0] * 4),
    "number": (TypeError, "^x: expected an array or FlatWeights, got float", 1.0),
}


@each(case=BAD_X)
@each(name=WITH_X)
def test_a_bad_x_is_refused(name: str, case: str) -> None:
    error, match, bad = BAD_X[case]
    y = np.arange(4.0)
    with refuses(error, match, y):
        WITH_X[name](y, bad)


@pytest.mark.parametrize("name", WITH_X)
def test_another_layout_is_refused(name: str) -> None:
    y = fw.FlatWeights({"a": np.ones(3), "b": np.ones(2)})
    for bad, match in (
        ({"a": np.ones(3), "c": np.ones(2)}, "^x: slot 1: expected 'b' .* got 'c'"),
        ({"a": np.ones(3), "b": np.ones(3)}, r"^x: slot 1: expected 'b' float64 \(2,\)"),
        ({"a": np.ones(3)}, "^x: expected 2 slots, got 1"),
    ):
        with refuses(ValueError, match, y.buffer):
            WITH_X[name](y, fw.FlatWeights(bad))
    with refuses(TypeError, "^x: expected FlatWeights, got an array", y.buffer):
        WITH_X[name](y, np.ones(5))


@pytest.mark.parametrize("name", WITH_X)
def test_overlap_is_refused(name: str) -> None:
    base = np.arange(20.0)
    for y, x in ((base[:10], base[1:11]), (base[1:11], base[:10]), (base[:10], base[9:19])):
        with refuses(ValueError, "^x: overlaps y; only the very same array", base):
            WITH_X[name](y, x)
    WITH_X[name](base[:10], base[10:])
    raw = np.zeros(64 * 4, np.uint8)
    layout = fw.Layout.of({"a": np.ones(8), "b": np.ones(8)})
    first = fw.FlatWeights.wrap(raw[:128], layout)
    with refuses(ValueError, "^x, slot 0 'a': overlaps y; only", raw):
        WITH_X[name](first, fw.FlatWeights.wrap(raw[64:192], layout))
    WITH_X[name](first, fw.FlatWeights.wrap(raw[128:], layout))
    WITH_X[name](first, fw.FlatWeights.wrap(raw[:128], layout))


NOT_FINITE = [np.nan, np.inf, -np.inf, np.float32("nan"), 10**400]
NO_NUMBERS = [None, "2", b"2", np.str_("2"), 1j, np.complex64(1), [1.0], np.ones(1), np.ones(2)]


@pytest.mark.parametrize("a", NOT_FINITE, ids=lambda a: str(a)[:9])
def test_a_factor_that_is_not_finite_is_refused(a: Any) -> None:
    y = np.arange(4.0)
    with refuses(ValueError, "^a: expected a finite number, got ", y):
        fw.scale_(y, a)
    with refuses(ValueError, "^a: expected a finite number, got ", y):
        fw.axpy_(y, a, np.ones(4))
    with refuses(ValueError, "^a: expected a finite number, got ", y):
        fw.lerp_(y, np.ones(4), a)


@pytest.mark.parametrize("a", NO_NUMBERS, ids=repr)
def test_what_is_no_number_is_refused(a: Any) -> None:
    y = np.arange(4.0)
    with refuses(TypeError, "^a: expected a real number, got ", y):
        fw.scale_(y, a)
    with refuses(TypeError, "^a: expected a real number, got ", y):
        fw.axpy_(y, a, np.ones(4))
    with refuses(TypeError, "^a: expected a real number, got ", y):
        fw.lerp_(y, np.ones(4), a)
    with refuses(TypeError, "^max_norm: expected a real number, got ", y):
        fw.clip_by_norm_(y, a)


@pytest.mark.parametrize("most", [-1, -0.5, -np.inf, np.nan, -(10**400)], ids=lambda a: str(a)[:9])
def test_a_bad_largest_norm_is_refused(most: Any) -> None:
    y = np.arange(4.0)
    with refuses(ValueError, "^max_norm: expected a number that is not negative, got ", y):
        fw.clip_by_norm_(y, most)
