import json
import pickle
import string
from fractions import Fraction
from typing import Any

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from layouts import forget_layouts
from reference import BFLOAT16, INTEGERS, MOVED, exact_mean, nearest, same_bits, ulp

import flatweights as fw
from flatweights import FlatWeights, Layout

shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
# Those that NumPy converts into one another.
numpy_dtypes = [d for d in MOVED if d.isbuiltin == 1 and d.kind in "?biufc"]


@st.composite
def arrays(draw: st.DrawFn, dtype: np.dtype[Any] | None = None) -> np.ndarray:
    """Arrays of any shape, dtype and bits, some of them strided."""
    dtype = dtype or draw(st.sampled_from(MOVED))
    shape = draw(shapes)
    nbytes = int(np.prod(shape)) * dtype.itemsize
    if dtype in INTEGERS and dtype.itemsize == 1:  # not all bits are a boolean or an int4
        array = draw(hnp.arrays(np.uint8, shape, elements=st.integers(0, 1))).astype(dtype)
    elif dtype.kind == "U":
        array = draw(hnp.arrays(dtype, shape))
    else:
        array = np.frombuffer(draw(st.binary(min_size=nbytes, max_size=nbytes)), np.uint8)
        array = np.ndarray(shape, dtype, array.copy())
    if array.ndim >= 2 and draw(st.booleans()):
        array = array.swapaxes(0, -1)
    return array


models = st.one_of(
    st.lists(arrays(), max_size=6),
    st.dictionaries(names, arrays(), max_size=6),
)


@st.composite
def models_of_one_dtype(draw: st.DrawFn) -> Any:
    dtype = draw(st.sampled_from(MOVED))
    return draw(
        st.one_of(
            st.lists(arrays(dtype), min_size=1, max_size=6),
            st.dictionaries(names, arrays(dtype), min_size=1, max_size=6),
        )
    )


def parts_of(model: Any) -> list[np.ndarray]:
    return list(model.values() if isinstance(model, dict) else model)


def in_c_order(array: np.ndarray) -> np.ndarray:
    return array.copy(order="C")  # type: ignore[no-any-return]


few = settings(max_examples=30)  # all that NumPy, JSON and pickles hold is slow to make


@given(models_of_one_dtype())
def test_unflatten_and_unflatten_into_undo_flatten(model: Any) -> None:
    flat = fw.flatten(model)
    views = fw.unflatten(flat, Layout.of(model))
    assert type(views) is type(model)
    if isinstance(model, dict):
        assert list(views) == list(model)
    for part, view in zip(parts_of(model), parts_of(views), strict=True):
        assert same_bits(in_c_order(part.astype(flat.dtype)), view)
    targets = [np.zeros(part.shape, flat.dtype) for part in parts_of(model)]
    fw.unflatten_into(targets, flat)
    for part, target in zip(parts_of(model), targets, strict=True):
        assert same_bits(in_c_order(part.astype(flat.dtype)), target)
    assert same_bits(fw.flatten(targets), flat)


@few
@given(st.lists(st.sampled_from(numpy_dtypes).flatmap(arrays), min_size=1, max_size=5))
def test_flatten_converts_as_concatenate_does(model: list[np.ndarray]) -> None:
    with np.errstate(all="ignore"):
        expected = np.concatenate([part.reshape(-1) for part in model])
    flat = fw.flatten(model)
    assert flat.dtype == expected.dtype
    np.testing.assert_array_equal(flat, expected)


@few
@given(models, st.integers(2, pickle.HIGHEST_PROTOCOL))
def test_flat_weights_hold_and_pickle_any_model(model: Any, protocol: int) -> None:
    w = FlatWeights(model)
    buffers: list[pickle.PickleBuffer] = []
    copies = [w, w.copy(), pickle.loads(pickle.dumps(w, protocol))]
    pickled = pickle.dumps(w, 5, buffer_callback=buffers.append)
    copies.append(pickle.loads(pickled, buffers=[bytes(b) for b in buffers]))
    assert len(buffers) == 1
    for other in copies:
        assert other.layout == w.layout
        assert list(other) == (
            list(model) if isinstance(model, dict) else [str(i) for i in range(len(model))]
        )
        assert same_bits(other.buffer, w.buffer)
        for part, view in zip(parts_of(model), other.values(), strict=True):
            assert same_bits(in_c_order(part), view)


@few
@given(models)
def test_layouts_survive_json_and_pickles(model: Any) -> None:
    layout = Layout.of(model)
    pickled = pickle.dumps(layout)
    forget_layouts()
    for other in (Layout.from_json(layout.to_json()), pickle.loads(pickled)):
        assert other == layout
        assert hash(other) == hash(layout)
        assert (other.digest, other.signature) == (layout.digest, layout.signature)
        assert other.slots == layout.slots


@few
@given(models)
def test_slots_are_aligned_and_apart(model: Any) -> None:
    layout = Layout.of(model)
    end = 0
    for slot in layout.slots:
        assert slot.offset % 64 == 0
        assert slot.offset >= end
        end = slot.offset + slot.nbytes
    assert end <= layout.nbytes < end + 64
    assert layout.size == sum(part.size for part in parts_of(model))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(string.ascii_lowercase, max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
odd_values = json_values | st.sampled_from(
    [-1, 0, 1, 63, 64, 2**31, 2**62, 2**63, 2**64, "<f4", "|O", "|V0", "bfloat16", "<f8", "", []]
)


def places_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to everything in a JSON value."""
    found = [path] if path else []
    items = {dict: dict.items, list: enumerate}.get(type(value), lambda _: ())(value)  # type: ignore[call-overload]
    for key, inner in items:
        found += places_in(inner, (*path, key))
    return found


def is_same_but_for_named(layout: Layout, other: Layout) -> bool:
    # The digest does not cover whether a mapping gave the names.
    return other.slots == layout.slots and other.digest == layout.digest


@settings(max_examples=15)
@given(st.data(), models)
def test_changed_json_raises_or_means_the_same(data: st.DataObject, model: Any) -> None:
    layout = Layout.of(model)
    record = json.loads(layout.to_json())
    for _ in range(data.draw(st.integers(1, 3))):
        *path, last = data.draw(st.sampled_from(places_in(record)))
        inner = record
        for key in path:
            inner = inner[key]
        if data.draw(st.booleans()):
            inner[last] = data.draw(odd_values)
        else:
            del inner[last]
    try:
        other = Layout.from_json(json.dumps(record))
    except ValueError:
        return
    assert is_same_but_for_named(layout, other)


@few
@given(st.data(), models)
def test_changed_text_raises_or_means_the_same(data: st.DataObject, model: Any) -> None:
    layout = Layout.of(model)
    text = bytearray(layout.to_json().encode())
    for _ in range(data.draw(st.integers(1, 3))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    try:
        other = Layout.from_json(bytes(text))
    except ValueError:
        return
    assert is_same_but_for_named(layout, other)


@given(st.binary(max_size=200) | st.text(max_size=200) | json_values.map(json.dumps))
def test_any_text_raises(text: Any) -> None:
    try:
        Layout.from_json(text)
    except ValueError:
        return
    raise AssertionError(f"read a layout from {text!r}")


@few
@given(st.data(), models)
def test_flipped_bits_of_a_pickled_layout_raise(data: st.DataObject, model: Any) -> None:
    layout = Layout.of(model)
    rebuild, (pickled,) = layout.__reduce__()
    flipped = bytearray(pickled)
    for _ in range(data.draw(st.integers(1, 3))):
        flipped[data.draw(st.integers(0, len(flipped) - 1))] ^= data.draw(st.integers(0, 255))
    forget_layouts()
    try:
        other = rebuild(bytes(flipped))
    except ValueError:
        return
    assert other == layout


finite = {
    np.dtype(np.float16): st.floats(width=16, allow_nan=False, allow_infinity=False),
    np.dtype(np.float32): st.floats(width=32, allow_nan=False, allow_infinity=False),
}


@given(st.data(), st.sampled_from(list(finite)), st.integers(1, 8))
def test_the_mean_is_between_and_next_to_the_exact_one(
    data: st.DataObject, dtype: np.dtype[Any], count: int
) -> None:
    values = data.draw(st.lists(finite[dtype], min_size=count, max_size=count))
    result = float(fw.average([np.array([v], dtype) for v in values])[0])
    assert min(values) <= result <= max(values)
    expected = nearest(exact_mean(values), dtype)
    if dtype == np.float16:  # 40 bits hold all of them: the sum is exact
        assert result == expected
    else:
        assert abs(result - expected) <= ulp(Fraction(expected), dtype)


@given(
    st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=20),
    st.lists(st.integers(1, 100), min_size=1, max_size=5),
)
def test_the_mean_of_the_same_is_the_same(bits: list[int], weights: list[int]) -> None:
    for dtype in (np.dtype(np.float16), BFLOAT16):
        source = np.array(bits, np.uint16).view(dtype)
        as_float = source.astype(np.float32)
        assume(np.all(np.isfinite(as_float)))
        mean = fw.average([source] * len(weights), weights)
        assert np.array_equal(mean.astype(np.float32), as_float)


@given(
    st.lists(
        st.tuples(st.floats(-1e6, 1e6), st.floats(0, 1e3, allow_subnormal=False)),
        min_size=1,
        max_size=8,
    ),
    st.integers(0, 8),
)
def test_a_running_average_has_the_bits_of_average(
    pairs: list[tuple[float, float]], split: int
) -> None:
    sources = [np.array([v, -v, 1.0]) for v, _ in pairs]
    weights = [w for _, w in pairs]
    assume(any(weights))
    assume(max(weights) / min(w for w in weights if w) < 2.0**500)
    running, tail = fw.RunningAverage(), fw.RunningAverage()
    for source, weight in zip(sources, weights, strict=True):
        running.add(source, weight)
    expected = fw.average(sources, weights)
    assert same_bits(running.mean(), expected)
    head = fw.RunningAverage()
    for k, (source, weight) in enumerate(zip(sources, weights, strict=True)):
        (head if k < split else tail).add(source, weight)
    head.merge(tail)
    scale = max(abs(v) for v, _ in pairs) + 1
    assert np.allclose(head.mean(), expected, rtol=0, atol=1e-14 * scale)
