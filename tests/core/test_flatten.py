import gc
import sys
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from reference import (
    BFLOAT16,
    MISALIGNMENTS,
    MOVED,
    SIZES,
    Guarded,
    each,
    nearest,
    random_array,
    read_only,
    refuses,
    same_bits,
)

import flatweights as fw
from flatweights import _core


def concatenated(parts: list[Any]) -> np.ndarray:
    return np.concatenate([np.asarray(part).reshape(-1) for part in parts])


def example(rng: np.random.Generator, dtype: np.dtype[Any]) -> list[np.ndarray]:
    shapes = [(3, 5), (), (0,), (2, 0, 3), (65,), (1, 1, 1)]
    return [random_array(rng, shape, dtype) for shape in shapes]


@each(moved_dtype=MOVED)
def test_flatten_and_its_inverses_keep_every_dtype(
    moved_dtype: np.dtype[Any], rng: np.random.Generator
) -> None:
    parts = example(rng, moved_dtype)
    flat = fw.flatten(parts)
    assert same_bits(flat, concatenated(parts))
    native = [part.astype(flat.dtype) for part in parts]
    views = fw.unflatten(flat, fw.Layout.of(parts))
    written = [np.zeros_like(part) for part in native]
    fw.unflatten_into(written, flat)
    for part, view, copy in zip(native, views, written, strict=True):
        assert same_bits(part, view)
        assert same_bits(part, copy)


@pytest.mark.parametrize("misalignment", MISALIGNMENTS)
def test_flatten_writes_each_size_and_nothing_beside_it(
    misalignment: int, rng: np.random.Generator
) -> None:
    sources = [
        Guarded(random_array(rng, size, np.dtype(np.float32)), (misalignment * i) % 64)
        for i, size in enumerate(SIZES)
    ]
    parts = [source.array for source in sources]
    out = Guarded(np.zeros(sum(SIZES), np.float32), misalignment)
    before = [part.copy() for part in parts]
    assert fw.flatten(parts, out=out.array) is out.array
    assert same_bits(out.array, concatenated(before))
    assert out.is_intact()
    assert all(map(same_bits, parts, before))


@pytest.mark.parametrize("misalignment", MISALIGNMENTS)
def test_unflatten_into_writes_each_size_and_nothing_beside_it(
    misalignment: int, rng: np.random.Generator
) -> None:
    flat = Guarded(random_array(rng, sum(SIZES), np.dtype(np.float32)), misalignment).array
    targets = [
        Guarded(np.zeros(size, np.float32), (misalignment * i) % 64) for i, size in enumerate(SIZES)
    ]
    fw.unflatten_into([target.array for target in targets], flat)
    assert same_bits(concatenated([target.array for target in targets]), flat)
    assert all(target.is_intact() for target in targets)


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_large_models_are_moved_by_any_number_of_threads(
    threads: int, use_threads: Callable[[int], None], rng: np.random.Generator
) -> None:
    use_threads(threads)
    # Borders between parts fall anywhere beside those between threads.
    sizes = [5, 300_001, 0, 3, 140_000, 1]
    parts = [rng.integers(0, 256, size).astype(np.uint8) for size in [8 * n for n in sizes]]
    flat = fw.flatten(parts)
    assert same_bits(flat, concatenated(parts))
    written = [np.zeros_like(part) for part in parts]
    fw.unflatten_into(written, flat)
    assert all(map(same_bits, written, parts))


def test_a_mapping_is_taken_in_its_order() -> None:
    parts = {"b": np.array([1.0, 2.0]), "a": np.array([[3.0]])}
    flat = fw.flatten(parts)
    assert flat.tolist() == [1, 2, 3]
    views = fw.unflatten(flat, fw.Layout.of(parts))
    assert list(views) == ["b", "a"]
    written = {"b": np.zeros(2), "a": np.zeros((1, 1))}
    fw.unflatten_into(written, flat)
    assert (written["b"].tolist(), written["a"].tolist()) == ([1, 2], [[3]])


def test_mixed_dtypes_promote_as_concatenate_does(rng: np.random.Generator) -> None:
    for dtypes in ("f4 f8", "f4 i8", "f2 ? i1", "u8 i8", "c8 f8", "S3 S5", ">f4 f4"):
        parts = [random_array(rng, (2, 3), np.dtype(d)) for d in dtypes.split()]
        assert same_bits(fw.flatten(parts), concatenated(parts)), dtypes
    mixed = [np.array([1.5, -2.0], BFLOAT16), np.array([3], np.int64)]
    assert same_bits(fw.flatten(mixed), np.array([1.5, -2.0, 3.0]))
    floats = [np.float16([1.5, -0.0]), np.arange(2.0), np.array(3.25, BFLOAT16)]
    assert same_bits(fw.flatten(floats), np.array([1.5, -0.0, 0, 1, 3.25]))


def test_strided_parts_are_read_in_c_order_and_others_are_converted(
    rng: np.random.Generator,
) -> None:
    base = random_array(rng, (6, 8), np.dtype(np.float64))
    parts = [base.T, base[::2, ::-1], base[:, 3], np.broadcast_to(base[0], (2, 8)), base]
    expected = concatenated([part.copy(order="C") for part in parts])
    assert same_bits(fw.flatten(parts), expected)
    assert fw.flatten([1.5, [2, 3], np.float64(4)]).tolist() == [1.5, 2, 3, 4]


@pytest.mark.parametrize("parts", [[], {}, [np.zeros(0)], [np.zeros((0, 3)), np.zeros((2, 0))]])
def test_nothing_gives_an_empty_vector(parts: Any) -> None:
    flat = fw.flatten(parts)
    assert same_bits(flat, np.zeros(0))
    fw.unflatten_into(parts, flat)
    views = fw.unflatten(flat, fw.Layout.of(parts))
    given = list(parts.values()) if isinstance(parts, dict) else parts
    assert [v.shape for v in (views.values() if isinstance(views, dict) else views)] == [
        part.shape for part in given
    ]


def test_65000_parts(rng: np.random.Generator) -> None:
    values = random_array(rng, 65_000 * 3, np.dtype(np.float32))
    parts = list(values.reshape(65_000, 3))
    flat = fw.flatten(parts)
    assert same_bits(flat, values)
    written = np.zeros_like(values)
    fw.unflatten_into(list(written.reshape(65_000, 3)), flat)
    assert same_bits(written, values)


def test_the_result_is_aligned() -> None:
    assert all(fw.flatten([np.zeros(n)]).ctypes.data % 64 == 0 for n in range(1, 20))


def test_sources_may_be_read_only(rng: np.random.Generator) -> None:
    part = read_only(random_array(rng, 100, np.dtype(np.float32)))
    flat = fw.flatten([part])
    assert same_bits(flat, part)
    assert flat.flags.writeable
    target = np.zeros(100, np.float32)
    fw.unflatten_into([target], read_only(flat))
    assert same_bits(target, part)


def test_flatten_into_a_vector_that_the_parts_are_views_of() -> None:
    flat = np.arange(7.0)
    layout = fw.Layout.of([np.zeros((2, 2)), np.zeros(3)])
    views = fw.unflatten(flat, layout)
    views[0][...] = 9
    assert fw.flatten(views, out=flat) is flat
    fw.unflatten_into(views, flat)
    assert flat.tolist() == [9, 9, 9, 9, 4, 5, 6]


def test_views_have_the_memory_dtype_and_flags_of_the_vector() -> None:
    flat = np.arange(7.0)
    views = fw.unflatten(flat, fw.Layout.of({"a": np.zeros((2, 2)), "b": np.zeros(3)}))
    assert isinstance(views, Mapping)
    assert all(np.shares_memory(view, flat) for view in views.values())
    views["b"][1] = -1
    assert flat[5] == -1
    layout = fw.Layout.of([np.zeros(2, np.float32), np.int64(1)])
    halves = fw.unflatten(read_only(np.arange(3.0, dtype=np.float16)), layout)
    assert [view.dtype for view in halves] == [np.float16] * 2
    with pytest.raises(ValueError, match="read-only"):
        halves[0][0] = 1


@pytest.mark.parametrize("misalignment", [1, 4, 8])
def test_a_misaligned_vector_is_viewed_in_place(misalignment: int) -> None:
    flat = Guarded(np.arange(5.0), misalignment).array
    a, b = fw.unflatten(flat, fw.Layout.of([np.zeros((2, 1)), np.zeros(3)]))
    assert (a.tolist(), b.tolist()) == ([[0], [1]], [2, 3, 4])
    assert np.shares_memory(a, flat)
    assert b.flags.aligned == (misalignment % 8 == 0)


BAD_OUT = {
    "short": (ValueError, r"out: expected shape \(4,\), got float32 \(3,\)", np.zeros(3, "f4")),
    "long": (ValueError, r"out: expected shape \(4,\), got float32 \(5,\)", np.zeros(5, "f4")),
    "dtype": (TypeError, "out: expected a vector of float32, got float64", np.zeros(4)),
    "matrix": (ValueError, r"contiguous vector, got float32 \(2, 2\)", np.zeros((2, 2), "f4")),
    "strides": (ValueError, "out: expected a contiguous vector", np.zeros(8, "f4")[::2]),
    "backwards": (ValueError, "out: expected a contiguous vector", np.zeros(4, "f4")[::-1]),
    "read-only": (ValueError, "expected a writable array", read_only(np.zeros(4, "f4"))),
    "list": (TypeError, "out: expected a vector of float32, got list", [0.0] * 4),
}


@pytest.mark.parametrize("case", BAD_OUT)
def test_flatten_refuses_a_bad_out(case: str) -> None:
    error, match, out = BAD_OUT[case]
    with refuses(error, match, np.asarray(out)):
        fw.flatten([np.ones(1, "f4"), np.ones((3, 1), "f4")], out=out)


@pytest.mark.parametrize(
    "part",
    [
        lambda base: base[1:4],
        lambda base: base[0:3],
        lambda base: base[4:1:-1],
        lambda base: base.view(np.int16)[4:7],
        lambda base: base[2:5:2],
        lambda base: base.view(np.float16)[5:7],
    ],
    ids=["shifted", "before", "backwards", "other dtype", "strided", "narrower"],
)
def test_flatten_refuses_parts_that_overlap_out(part: Callable[[np.ndarray], np.ndarray]) -> None:
    base = np.arange(10, dtype=np.float32)
    parts = [np.ones(1, np.float32), part(base)]
    out = base[2 : 3 + parts[1].size]
    with refuses(ValueError, "part 1: overlaps out", base):
        fw.flatten(parts, out=out)


@pytest.mark.parametrize(
    ("parts", "match"),
    [
        ([np.array([None])], "without Python objects, got object"),
        ([np.zeros(2), np.array([None])], "without Python objects"),
        ([np.zeros(3, "V0")], "fixed size"),
        ([np.zeros(1), np.zeros(1, "M8[s]")], r"no vector holds .*: datetime64\[s\], float64"),
        (np.zeros(3), "expected a mapping or a sequence of arrays, got ndarray"),
        ("abc", "got str"),
    ],
    ids=["objects", "also objects", "no size", "no common dtype", "array", "text"],
)
def test_flatten_refuses_what_no_vector_holds(parts: Any, match: str) -> None:
    with pytest.raises(TypeError, match=match):
        fw.flatten(parts)


def test_parts_larger_than_memory_are_refused() -> None:
    huge = [np.broadcast_to(np.int8(0), (2**62,))] * 4
    out = np.zeros(3, np.int8)
    with refuses(ValueError, r"out: expected shape \(9223372036854775807,\), got int8", out):
        fw.flatten(huge, out=out)
    with pytest.raises(MemoryError):
        fw.flatten(huge)
    with pytest.raises(MemoryError):
        fw.flatten(huge[:1])
    doubles = np.broadcast_to(np.float64(0), (2**59,))
    with pytest.raises(MemoryError, match=f"cannot allocate {2**65} bytes"):
        fw.flatten([doubles] * 8)


BAD_FLAT = {
    "short": (ValueError, r"flat: expected shape \(7,\), got float64 \(6,\)", np.zeros(6)),
    "long": (ValueError, r"flat: expected shape \(7,\), got float64 \(8,\)", np.zeros(8)),
    "strides": (ValueError, "flat: expected a contiguous", np.zeros(14)[::2]),
    "list": (TypeError, "flat: expected a NumPy array, got list", [0.0] * 7),
    "matrix": (
        ValueError,
        r"flat: expected (shape \(7,\)|a contiguous vector), got float64 \(7, 1\)",
        np.zeros((7, 1)),
    ),
}


@pytest.mark.parametrize("case", BAD_FLAT)
def test_a_vector_that_does_not_match_is_refused(case: str) -> None:
    error, match, flat = BAD_FLAT[case]
    parts = [np.ones((2, 2)), np.ones(3)]
    with pytest.raises(error, match=match):
        fw.unflatten(flat, fw.Layout.of(parts))
    with refuses(error, match, *parts):
        fw.unflatten_into(parts, flat)


BAD_PARTS = {
    "dtype": (TypeError, r"part 1: expected float64, got float32 \(3,\)", np.ones(3, "f4")),
    "strides": (ValueError, "part 1: expected a C-contiguous array", np.ones(6)[::2]),
    "columns": (ValueError, "part 1: expected a C-contiguous", np.ones((3, 2)).T),
    "read-only": (ValueError, "part 1: expected a writable array", read_only(np.ones(3))),
    "list": (TypeError, "part 1: expected a NumPy array, got list", [1.0, 1.0, 1.0]),
    "scalar": (TypeError, "part 1: expected a NumPy array, got float64", np.float64(1)),
}


@pytest.mark.parametrize("case", BAD_PARTS)
def test_unflatten_into_refuses_bad_parts(case: str) -> None:
    error, match, bad = BAD_PARTS[case]
    good = np.ones((2, 2))
    with refuses(error, match, good, np.asarray(bad)):
        fw.unflatten_into([good, bad], np.zeros(4 + np.size(bad)))


def test_unflatten_into_refuses_what_holds_no_parts() -> None:
    wrong: tuple[Any, ...] = (None, 3)
    for parts in wrong:
        with pytest.raises(TypeError, match="parts: expected a mapping or a sequence of arrays"):
            fw.unflatten_into(parts, np.zeros(0))


def test_unflatten_into_refuses_parts_that_overlap_the_vector() -> None:
    flat = np.arange(6.0)
    for parts in ([flat[2:4], np.zeros(4)], [np.zeros(4), flat[3:5]], [np.zeros(1), flat[0:5]]):
        with refuses(ValueError, r"part [01]: overlaps flat", flat, *parts):
            fw.unflatten_into(parts, flat)


def test_unflatten_into_refuses_parts_that_overlap_each_other() -> None:
    base = np.arange(10.0)
    for parts in ([base[:3], base[2:5]], [base, base], [base[5:], np.zeros(2), base[:6]]):
        flat = np.zeros(sum(part.size for part in parts))
        with refuses(ValueError, r"part \d: overlaps part \d", base):
            fw.unflatten_into(parts, flat)
    # Parts without elements overlap nothing, and neighbours are apart.
    fw.unflatten_into([base[:3], base[1:1], base[3:]], np.ones(10))
    assert base.tolist() == [1.0] * 10


REALS = [np.float16, BFLOAT16, np.float32, np.float64]


@each(threads=[1, 3])
@each(target=REALS)
@each(source=REALS)
def test_real_parts_are_converted_with_one_rounding(
    source: Any, target: Any, threads: int, use_threads: Callable[[int], None]
) -> None:
    use_threads(threads)
    rng = np.random.default_rng(3)
    # An odd number of 2-byte elements first: later parts begin within lines, and the
    # borders between threads within elements.
    values = [rng.normal(size=n) * 10.0 ** rng.integers(-6, 5, n) for n in (3, 100_001, 1025, 1)]
    parts = [value.astype(source) for value in values]
    targets = [np.full(part.shape, 7, target) for part in parts]
    fw._core.move_parts(targets, parts)
    for part, converted in zip(parts, targets, strict=True):
        wide = part.astype(np.float64)
        if target == BFLOAT16:  # ml_dtypes rounds float64 twice
            expected = np.array([nearest(Fraction(x), BFLOAT16) for x in wide[::7][:100]])
            converted = converted[::7][:100]
        else:
            expected = wide.astype(target)
        np.testing.assert_array_equal(converted.astype(np.float64), expected.astype(np.float64))


@pytest.mark.parametrize("dtype", ["O", [("name", "O"), ("number", "f4")], "T"], ids=str)
def test_unflatten_into_refuses_python_objects(dtype: Any) -> None:
    # Moved as bytes, references would not be counted.
    part, flat = np.zeros(2, dtype), np.zeros(2, dtype)
    for call in (fw.unflatten_into, _core.unflatten_into):
        with pytest.raises(TypeError, match="flat: expected numbers without Python objects, got"):
            call([part], flat)


def test_the_core_moves_no_reference_as_bytes() -> None:
    thing = object()
    count = sys.getrefcount(thing)
    objects = np.full(3, thing, object)
    for move in (
        lambda to: _core.flatten_into(to, [objects]),
        lambda to: _core.move_parts([to], [objects]),
    ):
        target = np.zeros(3, object)
        move(target)
        assert sys.getrefcount(thing) == count + 6
        assert target.tolist() == [thing] * 3
        del target
        assert sys.getrefcount(thing) == count + 3
    strings = np.array(["x" * 100, "", "y"], "T")
    target = np.zeros(3, "T")
    _core.move_parts([target], [strings])
    del strings
    gc.collect()
    assert target.tolist() == ["x" * 100, "", "y"]
