import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from reference import AVERAGED, INTEGERS, MOVED, OTHERS, REAL, each

import flatweights as fw
from flatweights._core import is_settable, move_parts
from flatweights._dtypes import (
    decode_dtype,
    encode_dtype,
    is_averaged,
    is_floating,
    is_integer,
    promote,
)
from flatweights._layout import Layout, cast_for_slot

STRUCTURED = [
    np.dtype([("x", "f4"), ("y", "i2")]),
    np.dtype([("x", "f4"), ("y", "f8")], align=True),
    np.dtype([("x", "f4", (2, 3)), ("y", [("z", ">i4"), ("t", "M8[s]")])]),
    np.dtype({"names": ["x"], "formats": ["i4"], "offsets": [4], "itemsize": 16}),
    np.dtype([("w", ml_dtypes.bfloat16), ("q", ml_dtypes.int4, (3,))]),
]

ML_TYPES = [
    value
    for value in vars(ml_dtypes).values()
    if isinstance(value, type) and issubclass(value, np.generic)
]


@each(dtype=[*MOVED, *STRUCTURED])
def test_an_encoded_dtype_decodes_to_itself(dtype: np.dtype[Any]) -> None:
    assert decode_dtype(encode_dtype(dtype)) == dtype


def test_every_ml_dtype_can_be_written_down() -> None:
    dtypes = [np.dtype(t) for t in ML_TYPES]
    assert len(dtypes) > 10
    assert [decode_dtype(encode_dtype(d)) for d in dtypes] == dtypes


@each(
    code=[
        "",
        "float33",
        "float32",
        "<f4 ",
        "i4,i4",
        "(2,)<f4",
        "numpy.float32",
        "[",
        "{",
        "{}",
        '{"names":["a"],"formats":[["<f4",[]]],"offsets":[0],"itemsize":2}',
        '{"names":["a"],"formats":[["<f4",[-1]]],"offsets":[0],"itemsize":4}',
        '{"names":["a"],"formats":[["<f4",[]]],"offsets":[0],"itemsize":4,"aligned":true}',
        '{"names":"a","formats":[],"offsets":[0],"itemsize":4}',
        "bfloat",
        "dtype",
    ]
)
def test_decode_refuses_what_encode_does_not_write(code: str) -> None:
    with pytest.raises(ValueError, match="expected the name of a dtype, got"):
        decode_dtype(code)


@pytest.mark.parametrize(
    ("dtype", "match"),
    [
        (np.dtype(("f4", (2,))), "expected a dtype without a shape"),
        (np.dtype([(("title", "x"), "f4")]), "without titles"),
        (np.dtype(ml_dtypes.bfloat16).newbyteorder(), "expected bfloat16 in native byte order"),
    ],
    ids=["subarray", "titles", "swapped"],
)
def test_encode_refuses_what_no_layout_holds(dtype: np.dtype[Any], match: str) -> None:
    with pytest.raises(TypeError, match=match):
        encode_dtype(dtype)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_promotion_is_that_of_concatenate(count: int) -> None:
    candidates = [np.dtype(t) for t in "?bhilBHILefdFDg"]
    candidates += [*(d for d in OTHERS if d.kind not in "V"), np.dtype(ml_dtypes.bfloat16)]
    compared = 0
    for dtypes in itertools.product(candidates, repeat=count):
        try:
            expected = np.concatenate([np.zeros(1, d) for d in dtypes]).dtype
        except TypeError:
            continue
        assert promote(dtypes) == expected, dtypes
        compared += 1
    assert compared >= len(candidates) ** count / 2


def test_a_vector_of_nothing_is_float64() -> None:
    assert promote([]) == np.float64


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (np.int64, np.float64),
        (np.int16, np.float32),
        (np.float16, np.float32),
        (np.float64, np.float64),
        (ml_dtypes.float8_e4m3fn, np.float32),
    ],
)
def test_bfloat16_counts_as_float32_where_numpy_refuses(other: Any, expected: Any) -> None:
    pair = [np.dtype(ml_dtypes.bfloat16), np.dtype(other)]
    assert promote(pair) == promote(reversed(pair)) == expected


def test_there_may_be_no_common_dtype() -> None:
    assert promote([np.dtype("M8[s]"), np.dtype("f4")]) is None
    # Nothing stands in for integers.
    assert promote([np.dtype(ml_dtypes.int4), np.dtype(ml_dtypes.uint4)]) is None


@each(dtype=MOVED)
def test_the_classes_of_dtypes(dtype: np.dtype[Any]) -> None:
    assert is_averaged(dtype) == (dtype in AVERAGED)
    assert is_integer(dtype) == (dtype in INTEGERS)
    assert is_floating(dtype) == (dtype in REAL or (dtype in OTHERS and "float" in dtype.name))


def layout_of(shape: tuple[int, ...], dtype: Any) -> Layout:
    return Layout(["a"], [shape], [dtype])


def test_what_may_be_set_can_be_set() -> None:
    # int1 has no 1.
    types = [*"?bhilBHILefdFDg", *(t for t in ML_TYPES if t.__name__ != "int1")]
    dtypes = [np.dtype(t) for t in types]
    allowed = 0
    for source, target in itertools.product(dtypes, repeat=2):
        if is_settable(source, target):
            array = cast_for_slot(layout_of((3,), target), 0, np.ones(3, source))
            written = np.empty(3, target)
            move_parts([written], [array])
            assert np.all(written == np.ones(3, target)), (source, target)
            allowed += 1
    assert allowed > 300


@each(target=[np.float32, np.complex64, np.bool_, np.int32, np.float64])
@each(source=[np.float64, np.complex128, np.bool_, np.int64, np.uint8])
def test_what_may_be_set_is_what_copyto_sets_and_integers_from_reals(
    source: Any, target: Any
) -> None:
    source, target = np.dtype(source), np.dtype(target)
    by_numpy = np.can_cast(source, target, casting="same_kind")
    assert is_settable(source, target) == (
        by_numpy or (target.kind in "bi" and source.kind in "biuf")
    )


def test_complex_values_set_complex_parts_alone() -> None:
    kinds = [np.dtype(kind) for kind in (*"?bhilBHILefdg", *ML_TYPES)]
    reals = [kind for kind in kinds if "complex" not in kind.name]
    weights = fw.FlatWeights([np.zeros(1, kind) for kind in reals])
    for source in (np.complex64, np.complex128, np.clongdouble):
        for i, target in enumerate(reals):
            assert not is_settable(np.dtype(source), target), target
            with pytest.raises(TypeError, match=f"slot {i} .*, got complex"):
                weights[str(i)] = np.array([3 + 4j], source)


@pytest.mark.parametrize(
    ("values", "target", "expected"),
    [
        (np.array([1.4, 2.6, -3.5]), np.int8, [1, 3, -4]),
        (np.array([0.4, 0.6]), np.bool_, [False, True]),
        (np.array([2.0**62, -(2.0**63)]), np.int64, [2**62, -(2**63)]),
        (np.array([2.0**63]), np.uint64, [2**63]),
        (np.array([1, 2], np.float16), np.int64, [1, 2]),
        (np.array([7, -8], np.int64), ml_dtypes.int4, [7, -8]),
        (np.array([7, -8], ml_dtypes.int4), np.int8, [7, -8]),
        (np.array([], np.int64), np.int8, []),
    ],
)
def test_integers_take_rounded_values(values: Any, target: Any, expected: list[Any]) -> None:
    array = cast_for_slot(layout_of(values.shape, target), 0, values)
    assert array.dtype == target
    assert array.astype(object).tolist() == expected


@pytest.mark.parametrize(
    ("value", "target"),
    [
        (np.nan, np.int32),
        (np.inf, np.int64),
        (np.float16(-np.inf), np.int64),
        (np.float16(np.inf), np.uint64),
        (2.0**63, np.int64),
        (-1.0, np.uint8),
        (127.5, np.int8),
        (256, np.uint8),
        (2, np.bool_),
        (8, ml_dtypes.int4),
        (np.uint64(2**63), np.int64),
    ],
)
def test_integers_refuse_values_that_do_not_fit(value: Any, target: Any) -> None:
    with pytest.raises(ValueError, match=r"^slot 0 'a': expected values that fit \w+, got some"):
        cast_for_slot(layout_of((), target), 0, value)


def test_setting_names_the_place_and_both_kinds() -> None:
    layout = layout_of((2,), np.float32)
    with pytest.raises(ValueError, match=r"^slot 0 'a': expected float32 \(2,\), got float64 \(3,"):
        cast_for_slot(layout, 0, np.zeros(3))
    with pytest.raises(TypeError, match=r"^slot 0 'a': expected float32 \(2,\), got complex"):
        cast_for_slot(layout, 0, np.zeros(2, complex))


def test_casts_that_overflow_are_silent() -> None:
    target = np.zeros(2, np.float16)
    move_parts([target], [np.array([1e300, 0, -1e300])[::2]])
    assert target.tolist() == [np.inf, -np.inf]
