import copy
import hashlib
import json
import pickle
import weakref
import zlib
from typing import Any

import numpy as np
import pytest
from layouts import forget_layouts
from reference import MOVED, clean_environment, each, run_python

import flatweights as fw
from flatweights import Layout, Slot
from flatweights import _layout as layout_module

EXAMPLE = {
    "kernel": np.zeros((3, 5), np.float32),
    "bias": np.zeros(0, np.float32),
    "step": np.int64(7),
    "scale": np.zeros((1, 33), np.float16),
}


def test_slots_lie_where_the_definition_puts_them() -> None:
    layout = Layout.of(EXAMPLE)
    start = offset = 0
    for slot, (name, part) in zip(layout.slots, EXAMPLE.items(), strict=True):
        assert slot == Slot(name, part.shape, part.dtype, start, offset)
        assert (slot.size, slot.nbytes) == (part.size, part.nbytes)
        start += part.size
        offset += -(-part.nbytes // 64) * 64
    assert (layout.size, layout.nbytes) == (start, offset)
    assert layout.names == tuple(EXAMPLE)
    assert len(layout) == 4
    assert layout.dtype == np.concatenate([np.ravel(p) for p in EXAMPLE.values()]).dtype


def test_slots_are_found_by_name_and_by_position() -> None:
    layout = Layout.of(EXAMPLE)
    assert layout["step"] is layout[2] is layout[-2]
    assert layout.index("scale") == 3
    assert "step" in layout
    assert "nope" not in layout
    assert str(layout["step"]) == "'step' int64 ()"
    with pytest.raises(KeyError, match="nope"):
        layout["nope"]
    with pytest.raises(IndexError, match="expected a position below 4, got 4"):
        layout[4]
    with pytest.raises(TypeError, match="expected a name or a position, got float"):
        layout[1.0]  # type: ignore[index]


def test_a_sequence_names_parts_by_position() -> None:
    layout = Layout.of(list(EXAMPLE.values()))
    assert layout.names == ("0", "1", "2", "3")
    assert not layout.named
    assert Layout.of(EXAMPLE).named


def test_no_parts_make_an_empty_layout() -> None:
    layout = Layout.of({})
    assert (layout.size, layout.nbytes, layout.slots, layout.dtype) == (0, 0, (), np.float64)  # type: ignore[comparison-overlap]


def test_a_layout_holds_65000_parts() -> None:
    layout = Layout.of([np.zeros(3, np.float32)] * 65_000)
    assert layout.size == 195_000
    assert layout[-1].offset == 64_999 * 64


@pytest.mark.parametrize("count", [3_000, pytest.param(65_000, marks=pytest.mark.slow)])
def test_many_parts_come_back_from_json(count: int) -> None:
    layout = Layout.of([np.zeros(3, np.float32)] * count)
    assert Layout.from_json(layout.to_json()) == layout


def test_parts_without_common_dtype_have_no_vector() -> None:
    layout = Layout.of([np.zeros(1, "M8[s]"), np.zeros(1)])
    assert layout.nbytes == 128
    with pytest.raises(TypeError, match=r"no vector holds these dtypes: datetime64\[s\], float64"):
        layout.dtype  # noqa: B018


CHANGES = {
    "name": lambda p: {("other" if k == "bias" else k): v for k, v in p.items()},
    "order": lambda p: dict(reversed(p.items())),
    "shape": lambda p: p | {"kernel": np.zeros((5, 3), np.float32)},
    "dtype": lambda p: p | {"step": np.uint64(7)},
    "byte order": lambda p: p | {"step": np.array(7, ">i8")},
    "dimension": lambda p: p | {"step": np.array([7])},
}


@pytest.mark.parametrize("change", CHANGES)
def test_digest_and_equality_see_every_change_and_signature_no_names(change: str) -> None:
    layout, other = Layout.of(EXAMPLE), Layout.of(CHANGES[change](EXAMPLE))  # type: ignore[no-untyped-call]
    assert layout != other
    assert layout.digest != other.digest
    assert (layout.signature == other.signature) == (change == "name")


def test_equal_layouts_are_one_key() -> None:
    layout, same = Layout.of(EXAMPLE), Layout.of({k: v + 1 for k, v in EXAMPLE.items()})
    assert layout == same
    assert layout.digest == same.digest
    assert {layout: 1}[same] == 1
    assert layout != "no layout"
    by_position = Layout.of([np.zeros(1)])
    assert by_position != Layout.of({"0": np.zeros(1)})
    assert by_position.digest == Layout.of({"0": np.zeros(1)}).digest


def test_digest_and_signature_are_those_of_every_process() -> None:
    code = """
import numpy as np, ml_dtypes
from flatweights import Layout
layout = Layout.of({"kernel": np.zeros((3, 5), ml_dtypes.bfloat16), "step": np.int64(1)})
print(layout.digest, layout.signature)
"""
    layout = Layout(["kernel", "step"], [(3, 5), ()], ["bfloat16", np.int64])
    expected = f"{layout.digest} {layout.signature}"
    for seed in ("0", "1"):
        assert run_python(code, clean_environment(PYTHONHASHSEED=seed)).split() == expected.split()


def test_digests_stay_what_they_are() -> None:
    # With another value, files and processes of other versions would not be readable.
    layout = Layout(["a/b", "c"], [(2, 3), ()], [np.float32, np.int64])
    named, nameless = b'[["a/b",[2,3],"<f4"],["c",[],"<i8"]]', b'[[[2,3],"<f4"],[[],"<i8"]]'
    assert layout.digest == hashlib.sha256(named).hexdigest()
    assert layout.signature == hashlib.sha256(nameless).hexdigest()


def test_astype_changes_real_floating_slots_alone() -> None:
    parts = {
        "w": np.zeros(3, np.float64),
        "h": np.zeros(3, "bfloat16"),
        "c": np.zeros(3, np.complex64),
        "n": np.zeros(3, np.int64),
    }
    layout = Layout.of(parts).astype(np.float32)
    assert [s.dtype for s in layout.slots] == [np.float32, np.float32, np.complex64, np.int64]
    assert layout.names == tuple(parts)
    assert layout.named
    assert not Layout.of([np.zeros(1)]).astype("f2").named


def test_astype_refuses_other_dtypes() -> None:
    layout = Layout.of([np.zeros(1)])
    for dtype in (np.int32, np.complex64, "S4", bool):
        with pytest.raises(TypeError, match="dtype: expected one of real floating-point numbers"):
            layout.astype(dtype)
    with pytest.raises(TypeError, match=r"dtype: expected a dtype, .* got 'float31'"):
        layout.astype("float31")


@each(dtype=MOVED)
def test_json_and_pickles_keep_every_dtype(dtype: np.dtype[Any]) -> None:
    layout = Layout.of([np.zeros((2, 3), dtype), np.zeros(0, dtype), np.zeros((), dtype)])
    assert Layout.from_json(layout.to_json()) == layout
    assert Layout.from_json(layout.to_json().encode()) == layout
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        pickled = pickle.dumps(layout, protocol)
        forget_layouts()
        copied = pickle.loads(pickled)
        assert copied is not layout
        assert copied == layout
        assert (copied.digest, copied.signature) == (layout.digest, layout.signature)


def test_pickles_are_small_and_not_rebuilt() -> None:
    layout = Layout.of({f"block_{i}/dense/kernel": np.zeros((64, 64)) for i in range(300)})
    pickled = pickle.dumps(layout)
    assert len(pickled) < 6_000
    assert pickle.loads(pickled) is layout
    forget_layouts()
    rebuilt = pickle.loads(pickled)
    assert rebuilt is not layout
    assert pickle.loads(pickled) is rebuilt
    assert pickle.dumps(rebuilt) == pickled
    assert copy.deepcopy(layout) == layout


def test_the_number_of_remembered_layouts_is_bounded() -> None:
    layouts = [Layout.of([np.zeros(i)]) for i in range(200)]
    pickles = [pickle.dumps(layout) for layout in layouts]
    kept = [weakref.ref(layout) for layout in layouts]
    del layouts
    assert sum(layout() is not None for layout in kept) == 64
    forget_layouts()
    rebuilt = [weakref.ref(pickle.loads(pickled)) for pickled in pickles]
    assert sum(layout() is not None for layout in rebuilt) == 64


def test_equal_layouts_are_remembered_once() -> None:
    first = Layout.of({"v": np.zeros(12)})
    pickled = pickle.dumps(first)
    for _ in range(200):
        assert pickle.dumps(Layout.of({"w": np.zeros(11)})) != pickled
    assert pickle.loads(pickled) is first


def test_names_may_be_any_unicode() -> None:
    names = ["", "ü/κ", "a\0b", '"quoted"', "日本\n"]
    layout = Layout.of({name: np.zeros(1) for name in names})
    assert Layout.from_json(layout.to_json()).names == tuple(names)


def test_dimensions_may_be_numpy_integers_and_64() -> None:
    assert Layout(["a"], [(1,) * 64], ["f4"]).slots[0].shape == (1,) * 64
    layout = Layout(["a"], [(np.int64(2), np.uint8(3))], ["f4"])
    assert layout == Layout.of({"a": np.zeros((2, 3), np.float32)})
    assert layout.digest == Layout.of({"a": np.zeros((2, 3), np.float32)}).digest


BAD_LAYOUTS = {
    "no name": (TypeError, "slot 0: expected a name of type str, got 3", [3], [()], ["f4"]),
    "surrogate": (ValueError, "slot 0: expected a name in Unicode", ["\ud800"], [()], ["f4"]),
    "twice": (ValueError, "unique names, got 'a' twice", ["a", "a"], [(), ()], ["f4", "f4"]),
    "lengths": (ValueError, "2 names, 1 shapes, 1 dtypes", ["a", "b"], [()], ["f4"]),
    "negative": (
        ValueError,
        r"slot 0 .a.: expected no negative .* got \(2, -1\)",
        ["a"],
        [(2, -1)],
        ["f4"],
    ),
    "float": (TypeError, r"shape 0: expected .* got \(2.0,\)", ["a"], [(2.0,)], ["f4"]),
    "no shape": (TypeError, "shape 0: expected a sequence of integers, got 2", ["a"], [2], ["f4"]),
    "one shape": (TypeError, "shapes: expected a sequence, .* got int", ["a"], 2, ["f4"]),
    "one name": (TypeError, "names: expected a sequence, .* got str", "a", [()], ["f4"]),
    "one dtype": (TypeError, "dtypes: expected a sequence, .* got str", ["a"], [()], "f4"),
    "no dtype": (TypeError, "dtype 0: expected a dtype, .* got 'f3'", ["a"], [()], ["f3"]),
    "many dimensions": (ValueError, "at most 64 dimensions, got 65", ["a"], [(1,) * 65], ["f4"]),
    "objects": (TypeError, "slot 0 'a': expected a dtype of fixed size", ["a"], [()], ["O"]),
    "fields of objects": (TypeError, "without Python objects", ["a"], [()], [[("x", "O")]]),
    "no size": (TypeError, "slot 0 'a': expected a dtype of fixed size", ["a"], [()], ["V0"]),
    "subarray": (TypeError, "dtype without a shape", ["a"], [()], [("f4", (2,))]),
    "one dimension": (OverflowError, "slot 0 'a': more bytes than", ["a"], [(2**70,)], ["f4"]),
    "product": (OverflowError, "slot 0 'a': more bytes than", ["a"], [(2**40, 2**40)], ["f4"]),
    "empty product": (OverflowError, "slot 0 'a'", ["a"], [(2**40, 0, 2**40)], ["f4"]),
    "sum": (
        OverflowError,
        "slot 1 'b': more",
        ["a", "b"],
        [(2**62 - 64,), (2**62 - 64,)],
        ["b"] * 2,
    ),
    "padding": (OverflowError, "slot 0 'a': more bytes than", ["a"], [(2**62 - 1,)], ["i1"]),
}


@each(case=BAD_LAYOUTS)
def test_bad_layouts_are_refused(case: str) -> None:
    error, match, names, shapes, dtypes = BAD_LAYOUTS[case]
    with pytest.raises(error, match=match):
        Layout(names, shapes, dtypes)  # type: ignore[arg-type]


def test_what_holds_no_parts_is_refused() -> None:
    wrong: tuple[Any, ...] = (np.zeros(3), "abc", b"abc", 3, iter([]))
    for parts in wrong:
        with pytest.raises(TypeError, match="expected a mapping or a sequence of arrays, got"):
            Layout.of(parts)


def _altered(**changes: Any) -> str:
    return json.dumps(json.loads(Layout.of(EXAMPLE).to_json()) | changes)


def _altered_slot(i: int, **changes: Any) -> str:
    record = json.loads(Layout.of(EXAMPLE).to_json())
    record["slots"][i] |= changes
    return json.dumps(record)


BAD_JSON = {
    "nothing": ("", "not a layout"),
    "None": (None, "not a layout"),
    "number, no text": (3, "not a layout"),
    "list, no text": (["{}"], "not a layout"),
    "null": ("null", "not a layout"),
    "list": ("[]", "not a layout"),
    "empty object": ("{}", "KeyError: 'format'"),
    "not Unicode": (b"\xff\xfe\xfd", "not a layout"),
    "deep": ("[" * 100_000, "not a layout"),
    "format": (_altered(format="flatweights.layout/2"), "expected format 'flatweights.layout/1'"),
    "slots": (_altered(slots=None), "not a layout"),
    "slots of text": (_altered(slots="ab"), "not a layout"),
    "fewer slots": (_altered(slots=[]), "size: expected 0, got 49"),
    "size": (_altered(size=3), "size: expected 49, got 3"),
    "nbytes": (_altered(nbytes=2**70), "nbytes: expected 256, got"),
    "digest": (_altered(digest="0" * 64), "digest: expected"),
    "named": (_altered(named=1), "expected bool, got 1"),
    "name": (_altered_slot(0, name="x"), "digest: expected"),
    "no name": (_altered_slot(0, name=None), "expected str, got None"),
    "name twice": (_altered_slot(0, name="bias"), "unique names, got 'bias' twice"),
    "surrogate": (_altered_slot(0, name="\ud800"), "expected a name in Unicode"),
    "shape": (_altered_slot(0, shape=[5, 3]), "digest: expected"),
    "no shape": (_altered_slot(0, shape=15), "expected list, got 15"),
    "negative dimension": (_altered_slot(0, shape=[-3, -5]), "expected no negative dimension"),
    "float dimension": (_altered_slot(0, shape=[3.0, 5]), "expected int, got 3.0"),
    "boolean dimension": (_altered_slot(0, shape=[True, 15]), "expected int, got True"),
    "overflow": (_altered_slot(0, shape=[2**40, 2**40]), "OverflowError: slot 0 'kernel'"),
    "large integer": (_altered_slot(0, shape=[2**70]), "OverflowError: slot 0"),
    "dtype": (_altered_slot(0, dtype="<f8"), "slot 1 'bias': expected offset 128, got 64"),
    "no dtype": (_altered_slot(0, dtype="float32"), "expected the name of a dtype, got 'float32'"),
    "objects": (_altered_slot(0, dtype="|O"), "without Python objects"),
    "negative start": (_altered_slot(1, start=-1), "got -1 .negative."),
    "negative offset": (_altered_slot(1, offset=-64), "got -64 .negative."),
    "unaligned": (_altered_slot(2, offset=68), "got 68 .not a multiple of 64."),
    "overlap": (_altered_slot(1, offset=0), "got 0 .overlaps the slot before it."),
    "overlap in the vector": (_altered_slot(1, start=14), "start 15, got 14 .overlaps"),
    "gap": (_altered_slot(3, offset=256), "offset 128, got 256 .leaves a gap"),
    "far away": (_altered_slot(3, offset=2**80), "leaves a gap or lies beyond the end"),
    "float start": (_altered_slot(1, start=15.0), "expected int, got 15.0"),
}


@each(case=BAD_JSON)
def test_altered_json_is_refused(case: str) -> None:
    text, match = BAD_JSON[case]
    with pytest.raises(ValueError, match=match):
        Layout.from_json(text)  # type: ignore[arg-type]


def test_truncated_json_is_refused_at_every_length() -> None:
    text = Layout.of(EXAMPLE).to_json()
    for end in range(len(text)):
        with pytest.raises(ValueError, match="not a layout"):
            Layout.from_json(text[:end])


def _pickled(layout: Layout) -> tuple[Any, bytes]:
    rebuild, (data,) = layout.__reduce__()
    return rebuild, data


def test_truncated_pickles_are_refused_at_every_length() -> None:
    rebuild, data = _pickled(Layout.of(EXAMPLE))
    for end in range(len(data)):
        with pytest.raises(ValueError, match="not a layout"):
            rebuild(data[:end])


def test_altered_pickles_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rebuild, whole = _pickled(Layout.of(EXAMPLE))
    wrong = b"", b"x", None, "text", bytearray(b"x"), zlib.compress(b"{}"), zlib.compress(b"")
    for data in wrong:
        with pytest.raises(ValueError, match="not a layout"):
            rebuild(data)
    with pytest.raises(ValueError, match="followed by more data"):
        rebuild(whole + b"\0")
    monkeypatch.setattr(layout_module, "_MOST_PICKLED_BYTES", 1000)
    with pytest.raises(ValueError, match="truncated, too large"):
        rebuild(zlib.compress(b" " * 1001))


def test_views_lie_in_the_buffer_at_their_offsets() -> None:
    layout = Layout.of(EXAMPLE)
    buffer = layout.new_buffer()
    assert buffer.ctypes.data % 64 == 0
    buffer[:] = np.arange(buffer.size) % 251
    for slot, view in zip(layout.slots, layout.packed_views(buffer), strict=True):
        expected = buffer[slot.offset : slot.offset + slot.nbytes].view(slot.dtype)
        assert view.tobytes() == expected.tobytes()
        assert (view.shape, view.dtype) == (slot.shape, slot.dtype)
        assert view.size == 0 or np.shares_memory(view, buffer)


def test_padding_of_a_new_buffer_is_zero() -> None:
    layout = Layout.of(EXAMPLE)
    for _ in range(50):  # reused memory holds the last values
        buffer = layout.new_buffer()
        used = np.zeros(buffer.size, bool)
        for slot in layout.slots:
            used[slot.offset : slot.offset + slot.nbytes] = True
        assert not buffer[~used].any()
        buffer[:] = 255


def test_views_of_enormous_empty_parts() -> None:
    layout = Layout(["a", "b"], [(2**58, 0), (0, 2**58)], [np.float16] * 2)
    views = layout.packed_views(layout.new_buffer())
    assert [v.shape for v in views] == [(2**58, 0), (0, 2**58)]
    views = layout.vector_views(np.zeros(0, np.complex128))
    assert [v.shape for v in views] == [(2**58, 0), (0, 2**58)]
    # In a vector so much wider such a shape has strides that overflow.
    with pytest.raises(ValueError, match="array is too big"):
        layout.vector_views(np.zeros(0, "S40"))


BAD_BUFFERS = {
    "bytes": (TypeError, "buffer: expected a NumPy array, got bytes", lambda b: b.tobytes()),
    "list": (TypeError, "buffer: expected a NumPy array, got list", lambda b: b.tolist()),
    "short": (ValueError, r"contiguous uint8 \(256,\), got uint8 \(255,\)", lambda b: b[:-1]),
    "long": (ValueError, r"got uint8 \(512,\)", lambda b: np.repeat(b, 2)),
    "dtype": (ValueError, r"contiguous uint8 \(256,\), got int8 \(256,\)", lambda b: b.view("i1")),
    "matrix": (ValueError, r"got uint8 \(1, 256\)", lambda b: b[np.newaxis]),
    "strides": (ValueError, "contiguous uint8", lambda b: np.repeat(b, 2)[::2]),
    "none": (TypeError, "got NoneType", lambda b: None),
}


@pytest.mark.parametrize("case", BAD_BUFFERS)
def test_bad_buffers_are_refused(case: str) -> None:
    error, match, alter = BAD_BUFFERS[case]
    layout = Layout.of(EXAMPLE)
    with pytest.raises(error, match=match):
        fw.FlatWeights.wrap(alter(layout.new_buffer()), layout)  # type: ignore[no-untyped-call]


def test_a_layout_shows_its_size() -> None:
    layout = Layout.of(EXAMPLE)
    assert repr(layout) == (
        f"<Layout of 4 slots, 49 elements, 256 bytes packed, digest {layout.digest[:12]}>"
    )
