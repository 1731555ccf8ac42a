import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import pytest
from reference import (
    BFLOAT16,
    MOVED,
    Guarded,
    assert_parts,
    each,
    random_array,
    read_only,
    refuses,
    same_bits,
)

import flatweights as fw
from flatweights import FlatWeights, Layout

BUFFERED = [p for p in range(2, pickle.HIGHEST_PROTOCOL + 1) if p < 5]


@pytest.fixture
def parts(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {
        "kernel": random_array(rng, (3, 5), np.dtype(np.float32)),
        "bias": random_array(rng, 5, np.dtype(np.float64)),
        "step": np.array(7, np.int64),
        "half": random_array(rng, (4,), BFLOAT16),
        "none": np.zeros((0, 3), np.float32),
    }


@pytest.fixture
def frozen(parts: dict[str, np.ndarray]) -> FlatWeights:
    """Views of a read-only buffer, as `ray.get` returns them."""
    made = FlatWeights(parts)
    return FlatWeights.wrap(read_only(made.buffer), made.layout)


def out_of_band(
    weights: Any, dumps: Callable[..., bytes] = pickle.dumps
) -> tuple[bytes, list[Any]]:
    buffers: list[pickle.PickleBuffer] = []
    return dumps(weights, protocol=5, buffer_callback=buffers.append), buffers


# It behaves like a dict of arrays.


def test_it_copies_the_parts_into_one_buffer(parts: dict[str, np.ndarray]) -> None:
    w = FlatWeights(parts)
    assert_parts(w, parts)
    assert w.layout == Layout.of(parts)
    assert w.buffer.nbytes == w.layout.nbytes
    assert w.buffer.ctypes.data % 64 == 0
    for part in w.values():
        assert part.size == 0 or np.shares_memory(part, w.buffer)
        assert part.size == 0 or part.ctypes.data % 64 == 0
    parts["bias"][0] = 99
    assert w["bias"][0] != 99


@each(dtype=MOVED)
def test_it_holds_every_dtype(dtype: np.dtype[Any], rng: np.random.Generator) -> None:
    parts = {"a": random_array(rng, (3, 2), dtype), "b": random_array(rng, 65, dtype)}
    w = FlatWeights(parts)
    assert_parts(w, parts)
    assert_parts(pickle.loads(pickle.dumps(w)), parts)


def test_it_takes_a_sequence_scalars_and_strided_parts() -> None:
    w = FlatWeights([1.5, [2, 3], np.arange(6.0).reshape(2, 3).T])
    assert_parts(w, {"0": 1.5, "1": [2, 3], "2": np.array([[0.0, 3], [1, 4], [2, 5]])})


def test_it_is_a_dict(parts: dict[str, np.ndarray]) -> None:
    w = FlatWeights(parts)
    assert isinstance(w, dict)
    assert list(w) == list(w.keys()) == [k for k, _ in w.items()] == list(parts)
    assert list(reversed(w)) == list(reversed(parts))
    assert len(w) == 5
    assert "bias" in w
    assert "nope" not in w
    assert w.get("nope") is None
    assert w.get("bias") is w["bias"] is w.setdefault("bias") is w.setdefault("bias", 3)
    assert w.keys() == parts.keys()
    assert {**w} == dict(w) == dict(w.items())
    assert f"{w}".startswith("{'kernel': array(")
    assert all(type(part) is np.ndarray for part in w.values())
    with pytest.raises(KeyError, match="nope"):
        w["nope"]
    with pytest.raises(TypeError, match="unhashable"):
        hash(w)


def test_a_plain_dict_over_the_same_arrays(parts: dict[str, np.ndarray]) -> None:
    w = FlatWeights(parts)
    plain = dict(w)
    assert type(plain) is dict
    assert plain["bias"] is w["bias"]
    del plain["bias"]
    plain["new"] = np.zeros(1)
    assert list(w) == list(parts)


def test_equality_is_that_of_dicts() -> None:
    w = FlatWeights({"a": np.float32(1), "b": np.zeros(0)})
    assert w.keys() == {"a", "b"}
    assert (FlatWeights({"a": np.ones(())}) == {"a": np.ones(())}) is True
    assert (FlatWeights({"a": np.ones(())}) == {"a": np.zeros(())}) is False
    assert w != {"a": np.float32(1)}


def test_the_loop_of_rays_guide(parts: dict[str, np.ndarray]) -> None:
    plain = [{k: np.asarray(v * f) for k, v in parts.items()} for f in (1, 2, 4)]
    flat = [FlatWeights(p) for p in plain]
    frozen = [FlatWeights.wrap(read_only(w.buffer), w.layout) for w in flat]
    expected = {k: sum(p[k] for p in plain) / 3 for k in plain[0]}
    for ws in (flat, frozen):
        mean = {k: sum(w[k] for w in ws) / len(ws) for k in ws[0]}
        assert_parts(mean, expected)


# Assigning writes through.


@pytest.mark.parametrize(
    "assign",
    [
        lambda w, v: w.__setitem__("bias", v),
        lambda w, v: w.update({"bias": v}),
        lambda w, v: w.update([("bias", v)]),
        lambda w, v: w.update(bias=v),
        lambda w, v: w.update({"step": 7}, bias=v),
        lambda w, v: w.__ior__({"bias": v}),
        lambda w, v: w.__ior__([("bias", v)]),
        lambda w, v: w.setdefault("bias").__setitem__(..., v),
        lambda w, v: w["bias"].__setitem__(slice(None), v),
        lambda w, v: np.copyto(w["bias"], v),
    ],
)
def test_every_way_of_assigning_writes_through(
    assign: Callable[[FlatWeights, Any], Any], parts: dict[str, np.ndarray]
) -> None:
    w = FlatWeights(parts)
    view, values = w["bias"], np.arange(5.0)
    assign(w, values)
    assert w["bias"] is view
    assert not np.shares_memory(w["bias"], values)
    assert_parts(w, parts | {"bias": values})
    again = FlatWeights.wrap(w.buffer, w.layout)
    assert_parts(again, parts | {"bias": values})


def test_augmented_assignment_works_in_place(parts: dict[str, np.ndarray]) -> None:
    w = same = FlatWeights(parts)
    view = w["kernel"]
    w["kernel"] += 1
    w["kernel"] *= 2
    w["step"] += 1
    w["half"] -= w["half"]
    assert w["kernel"] is view
    expected = {
        "kernel": (parts["kernel"] + 1) * 2,
        "step": np.array(8),
        "half": parts["half"] - parts["half"],
    }
    assert_parts(w, parts | expected)
    w |= {"step": 9}
    assert w is same
    assert w["step"] == 9


def test_update_with_nothing_changes_nothing(parts: dict[str, np.ndarray]) -> None:
    w = FlatWeights(parts)
    w.update()
    w.update({})
    w.update(w)
    assert_parts(w, parts)


def test_assigning_leaves_the_padding_alone(parts: dict[str, np.ndarray]) -> None:
    w = FlatWeights(parts)
    used = np.zeros(w.buffer.size, bool)
    for slot in w.layout.slots:
        used[slot.offset : slot.offset + slot.nbytes] = True
    w.update({k: v * 0 + 1 for k, v in parts.items()})
    assert not w.buffer[~used].any()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("kernel", np.full((3, 5), 1 / 3), np.float32(1 / 3)),
        ("kernel", np.full((3, 5), 2, np.int64), np.float32(2)),
        ("kernel", np.full((3, 5), 1.5, BFLOAT16), np.float32(1.5)),
        ("half", np.full(4, 1e300), np.inf),
        ("half", np.full(4, 1.5, np.float16), 1.5),
        ("step", 2.6, 3),
        ("step", np.float64(1e15), 10**15),
        ("bias", [True] * 5, 1.0),
        ("bias", [1, 2.0, 3, 4, 5], [1.0, 2, 3, 4, 5]),
    ],
)
def test_assigning_casts_as_copyto_does(name: str, value: Any, expected: Any, parts: Any) -> None:
    w = FlatWeights(parts)
    w[name] = value
    assert w[name].dtype == parts[name].dtype
    assert np.array_equal(w[name], np.broadcast_to(expected, w[name].shape))


def test_a_part_without_elements_is_cast_whatever_its_dimensions() -> None:
    shape = (2**60, 0)
    weights = FlatWeights.empty(Layout(["a"], [shape], ["i1"]))
    weights["a"] = np.empty(shape, np.int16)  # no array of 16 bytes an element has this shape
    assert weights["a"].shape == shape


def test_update_reads_all_before_it_writes() -> None:
    w = FlatWeights({"a": np.array([1.0, 2.0]), "b": np.array([3.0, 4.0])})
    w.update(a=w["b"], b=w["a"])
    assert (w["a"].tolist(), w["b"].tolist()) == ([3, 4], [1, 2])
    w.update(a=w["a"][::-1], b=w["a"])
    assert (w["a"].tolist(), w["b"].tolist()) == ([4, 3], [3, 4])
    other = FlatWeights.wrap(w.buffer, w.layout)
    w.update({"a": other["b"], "b": other["a"]})
    assert (other["a"].tolist(), other["b"].tolist()) == ([3, 4], [4, 3])


def test_a_part_may_be_assigned_a_view_of_itself() -> None:
    w = FlatWeights({"a": np.arange(9.0).reshape(3, 3)})
    expected = w["a"].T.copy()
    w["a"] = w["a"].T
    assert np.array_equal(w["a"], expected)
    w["a"] = w["a"]
    w["a"] = w["a"][:]
    assert np.array_equal(w["a"], expected)


BAD_VALUES: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "unknown": (TypeError, "the keys of FlatWeights are fixed and 'nope'", {"nope": 1.0}),
    "none": (TypeError, "the keys of FlatWeights are fixed and 'nope'", {"nope": None}),
    "no name": (
        TypeError,
        "fixed and 3 is not one of them; dict.weights. is a plain dict",
        {3: 1.0},  # type: ignore[dict-item]
    ),
    "shape": (
        ValueError,
        r"slot 1 'bias': expected float64 \(5,\), got float64 \(1, 5\)",
        {"bias": np.zeros((1, 5))},
    ),
    "scalar": (ValueError, r"expected float64 \(5,\), got float64 \(\)", {"bias": 0.0}),
    "complex": (
        TypeError,
        r"slot 1 'bias': expected float64 \(5,\), got complex128 \(5,\)",
        {"bias": np.zeros(5, complex)},
    ),
    "text": (TypeError, "got <U1", {"bias": ["a"] * 5}),
    "objects": (TypeError, "expected an array, got list of Python objects", {"bias": [None] * 5}),
    "too large": (ValueError, "slot 2 'step': expected values that fit int64", {"step": 1e30}),
    "NaN": (ValueError, "slot 2 'step': expected values that fit int64", {"step": np.nan}),
}


@pytest.mark.parametrize("case", BAD_VALUES)
def test_bad_values_are_refused_before_anything_changes(
    case: str, parts: dict[str, np.ndarray]
) -> None:
    error, match, bad = BAD_VALUES[case]
    w = FlatWeights(parts)
    good: dict[str, Any] = {"kernel": np.zeros((3, 5))}
    with refuses(error, match, w.buffer):
        w.update(good | bad)
    with refuses(error, match, w.buffer):
        w |= good | bad
    ((name, value),) = bad.items()
    with refuses(error, match, w.buffer):
        w[name] = value
    assert_parts(w, parts)


def test_the_keys_are_fixed(parts: dict[str, np.ndarray]) -> None:
    w = FlatWeights(parts)
    attempts: list[Callable[[], Any]] = [
        lambda: w.__delitem__("bias"),
        lambda: w.pop("bias"),
        lambda: w.pop("nope", None),
        lambda: w.popitem(),
        lambda: w.clear(),
        lambda: w.setdefault("nope", np.zeros(1)),
        lambda: w.__setitem__("nope", np.zeros(1)),
    ]
    for attempt in attempts:
        with refuses(TypeError, r"keys of FlatWeights are fixed.*dict\(weights\)", w.buffer):
            attempt()
    with pytest.raises(TypeError, match=r"FlatWeights\.empty"):
        FlatWeights.fromkeys(["a"])
    assert_parts(w, parts)


# Read-only buffers.


@pytest.mark.parametrize(
    "assign",
    [
        lambda w: w.__setitem__("bias", np.zeros(5)),
        lambda w: w.__setitem__("bias", w["bias"]),
        lambda w: w.update(bias=np.zeros(5)),
        lambda w: w.__ior__({"bias": np.zeros(5)}),
    ],
)
def test_assigning_into_a_read_only_buffer_names_copy(
    assign: Callable[[FlatWeights], Any], frozen: FlatWeights
) -> None:
    with refuses(ValueError, r"read-only.*copy\(\)", frozen.buffer):
        assign(frozen)


def test_a_copy_of_a_read_only_buffer_is_writable_unlike_its_views(
    frozen: FlatWeights, parts: Any
) -> None:
    assert not any(part.flags.writeable for part in frozen.values())
    with refuses(ValueError, "read-only", frozen.buffer):
        frozen["bias"] += 1
    w = frozen.copy()
    assert_parts(w, parts)
    w["bias"] += 1
    w["step"] = 1
    assert_parts(w, parts | {"bias": parts["bias"] + 1, "step": np.array(1)})
    assert_parts(frozen, parts)


# Copies.


@pytest.mark.parametrize("make", [FlatWeights.copy, copy.copy, copy.deepcopy, FlatWeights])
def test_a_copy_shares_nothing(make: Callable[[Any], FlatWeights], parts: Any) -> None:
    w = FlatWeights(parts)
    other = make(w)
    assert type(other) is FlatWeights
    assert other.layout == w.layout
    assert_parts(other, parts)
    assert same_bits(other.buffer, w.buffer)
    assert not np.shares_memory(other.buffer, w.buffer)
    other["bias"] = 0 * other["bias"]
    assert_parts(w, parts)


def test_deepcopy_copies_what_is_held_twice_once(parts: Any) -> None:
    w = FlatWeights(parts)
    first, second = copy.deepcopy([w, w])
    assert first is second
    assert first is not w


def test_or_gives_a_plain_dict(parts: dict[str, np.ndarray]) -> None:
    w = FlatWeights(parts)
    other = {"bias": np.zeros(5), "new": np.ones(1)}
    left, right = w | other, other | w
    assert type(left) is type(right) is dict
    assert left["bias"] is other["bias"]
    assert right["bias"] is w["bias"]
    assert left["new"] is right["new"] is other["new"]
    assert type(w | w) is dict
    assert_parts(w, parts)


def test_a_subclass_stays_one(parts: Any) -> None:
    w = Named(parts)
    for other in (w.copy(), copy.deepcopy(w), pickle.loads(pickle.dumps(w))):
        assert type(other) is Named
        assert_parts(other, parts)


class Named(FlatWeights):
    pass


# Wrapping.


@pytest.mark.parametrize(
    ("passed", "hint"),
    [
        (FlatWeights({"w": np.zeros(3)}), "FlatWeights; pass its .layout"),
        ({"w": np.zeros(3)}, "dict; pass Layout.of(parts)"),
        (None, "NoneType; pass Layout.of(parts)"),
    ],
)
def test_weights_in_place_of_their_layout_are_refused(passed: Any, hint: str) -> None:
    message = re.escape(f"layout: expected a Layout, got {hint}")
    calls: list[Callable[[], object]] = [
        lambda: fw.unflatten(np.zeros(3), passed),
        lambda: FlatWeights.wrap(np.zeros(64, np.uint8), passed),
        lambda: FlatWeights.empty(passed),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=message):
            call()


def test_wrap_moves_nothing(parts: Any) -> None:
    w = FlatWeights(parts)
    other = FlatWeights.wrap(w.buffer, w.layout)
    assert other.buffer is w.buffer
    other["bias"] = np.zeros(5)
    assert not w["bias"].any()


@pytest.mark.parametrize("misalignment", [1, 2, 4, 8, 33])
def test_an_unaligned_buffer_is_wrapped(misalignment: int, parts: Any) -> None:
    w = FlatWeights(parts)
    guarded = Guarded(w.buffer, misalignment)
    other = FlatWeights.wrap(guarded.array, w.layout)
    assert_parts(other, parts)
    other["bias"] += 1
    other["kernel"] = parts["kernel"] * 2
    expected = parts | {"bias": parts["bias"] + 1, "kernel": parts["kernel"] * 2}
    assert_parts(other, expected)
    assert_parts(other.copy(), expected)
    assert_parts(pickle.loads(pickle.dumps(other)), expected)
    assert guarded.is_intact()


def test_empty_has_the_layout_and_zero_padding(parts: Any) -> None:
    layout = Layout.of(parts)
    w = FlatWeights.empty(layout)
    assert w.layout is layout
    assert w.buffer.nbytes == layout.nbytes
    w.update(parts)
    assert same_bits(w.buffer, FlatWeights(parts).buffer)


def test_no_parts() -> None:
    w = FlatWeights({})
    assert (len(w), w.buffer.nbytes) == (0, 0)
    for other in (w.copy(), pickle.loads(pickle.dumps(w)), pickle.loads(pickle.dumps(w, 2))):
        assert_parts(other, {})
    data, buffers = out_of_band(w)
    assert_parts(pickle.loads(data, buffers=buffers), {})


BAD_PARTS = {
    "number as name": (TypeError, "slot 0: expected a name of type str, got 1", {1: np.zeros(1)}),
    "objects": (TypeError, "slot 1 'b': expected an array, got list", {"a": 1.0, "b": [None]}),
    "array": (TypeError, "expected a mapping or a sequence of arrays", np.zeros(3)),
    "number": (TypeError, "expected a mapping or a sequence of arrays, got int", 3),
}


@pytest.mark.parametrize("case", BAD_PARTS)
def test_bad_parts_are_refused(case: str) -> None:
    error, match, bad = BAD_PARTS[case]
    with pytest.raises(error, match=match):
        FlatWeights(bad)  # type: ignore[arg-type]


def test_layout_and_buffer_cannot_be_replaced(parts: Any) -> None:
    w = FlatWeights(parts)
    for name in ("layout", "buffer", "anything"):
        with pytest.raises(AttributeError):
            setattr(w, name, None)


# Pickles.


@pytest.mark.parametrize("protocol", [*BUFFERED, 5])
def test_pickles_hold_a_writable_copy(protocol: int, frozen: Any, parts: Any) -> None:
    w = FlatWeights(parts)
    for source in (frozen, w):
        other = pickle.loads(pickle.dumps(source, protocol))
        assert_parts(other, parts)
        assert other.layout == source.layout
    other["bias"] += 1
    assert_parts(w, parts)


@pytest.mark.parametrize("dumps", [pickle.dumps, cloudpickle.dumps])
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16], ids=str)
def test_exactly_one_buffer_goes_out_of_band(
    dumps: Callable[..., bytes], dtype: Any, rng: np.random.Generator
) -> None:
    parts = {f"layer_{i}": random_array(rng, (10, 10), np.dtype(dtype)) for i in range(50)}
    w = FlatWeights(parts)
    data, buffers = out_of_band(w, dumps)
    assert len(buffers) == 1
    assert len(data) < 2_000
    with buffers[0].raw() as raw:
        assert raw.nbytes == w.buffer.nbytes
        assert np.shares_memory(np.frombuffer(raw, np.uint8), w.buffer)
        assert_parts(pickle.loads(data, buffers=[raw]), parts)


def test_what_was_out_of_band_is_viewed(parts: Any) -> None:
    data, (buffer,) = out_of_band(FlatWeights(parts))
    shared = bytes(buffer)
    w = pickle.loads(data, buffers=[shared])
    assert_parts(w, parts)
    assert np.shares_memory(w.buffer, np.frombuffer(shared, np.uint8))
    with refuses(ValueError, r"read-only.*copy\(\)", w.buffer):
        w["bias"] = np.zeros(5)
    writable = pickle.loads(data, buffers=[bytearray(shared)])
    writable["bias"] = np.zeros(5)
    assert not writable["bias"].any()


@pytest.mark.parametrize("change", [lambda b: b[:-1], lambda b: b + b"\0", lambda b: b""])
def test_a_buffer_of_another_length_is_refused(
    change: Callable[[bytes], bytes], parts: Any
) -> None:
    data, (buffer,) = out_of_band(FlatWeights(parts))
    with pytest.raises(ValueError, match=r"buffer: expected contiguous uint8 .* got uint8"):
        pickle.loads(data, buffers=[change(bytes(buffer))])


def test_averages_replace_the_loop(parts: dict[str, np.ndarray]) -> None:
    ws = [FlatWeights(parts | {"bias": parts["bias"] * f}) for f in (1, 3)]
    assert_parts(fw.average(ws), parts | {"bias": parts["bias"] * 2})


# How they are shown.


def test_a_small_model_is_shown_as_a_dict_and_a_large_one_by_its_first_parts() -> None:
    assert repr(FlatWeights({"a": np.ones(2)})) == "{'a': array([1., 1.])}"
    weights = FlatWeights({f"<{i}>": np.zeros((100, i), np.float32) for i in range(320)})
    lines = repr(weights).splitlines()
    size = 100 * 320 * 319 // 2
    assert lines[0].startswith(f"<FlatWeights of 320 parts, {size:,} elements, ")
    assert lines[1:] == [f"  '<{i}>' float32 (100, {i})" for i in range(10)] + ["  and 310 more>"]
    assert str(weights) == repr(weights)
    table = weights._repr_html_()
    assert table.startswith("<table>")
    assert table.count("<tr>") == 12
    assert "<td>&lt;9&gt;</td><td>float32</td><td>(100, 9)</td>" in table
    assert "and 310 more" in table
    assert "and" not in FlatWeights({"w": np.zeros(1000)})._repr_html_()
