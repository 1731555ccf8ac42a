"""get_flat and set_flat, in both modes."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tf_models import mixed_values, random_values

from flatweights import FlatWeights


def concatenated(values: Any, dtype: Any = np.float32) -> Any:
    return np.concatenate([np.asarray(v).reshape(-1).astype(dtype) for v in values.values()])


@pytest.mark.parametrize(
    ("values", "dtype"), [(mixed_values, np.float64), (random_values, np.float32)]
)
def test_the_vector_is_the_concatenation_and_sets_every_variable(
    build: Any, values: Any, dtype: Any
) -> None:
    model = build(values(0))
    flat = model.weights.get_flat()
    np.testing.assert_array_equal(flat, concatenated(values(0), dtype), strict=True)
    assert model.weights.get_flat_size() == flat.size
    assert type(model.weights.get_flat_size()) is int
    room = np.full(flat.size + 2, np.nan, dtype)
    out = room[1:-1]  # aligned to nothing but its own elements
    assert model.weights.get_flat(out) is out
    np.testing.assert_array_equal(out, flat)
    assert np.isnan(room[[0, -1]]).all()
    wanted = values(1)
    model.weights.set_flat(concatenated(wanted, dtype))
    for name, value in model.read().items():
        np.testing.assert_array_equal(value, wanted[name], strict=True)


def test_packed_buffers_are_gathered_and_scattered(build: Any) -> None:
    values = mixed_values()
    model = build(values)
    buffer = model.weights.layout.new_buffer()
    model.weights.gather_into(buffer)
    assert buffer.tobytes() == FlatWeights(values).buffer.tobytes()
    for name, value in values.items():
        model.write(name, np.zeros_like(value))
    for wrong in (buffer[:-1], buffer.astype(np.int16), np.zeros(2 * buffer.size, np.uint8)[::2]):
        for call in (model.weights.gather_into, model.weights.scatter):
            with pytest.raises((TypeError, ValueError), match=r"expected|buffer"):
                call(wrong)
    for other in (buffer.tobytes(), FlatWeights(values)):
        for call in (model.weights.gather_into, model.weights.scatter):
            expected = f"^buffer: expected a NumPy array, got {type(other).__name__}$"
            with pytest.raises(TypeError, match=expected):
                call(other)
    assert not any(value.any() for value in model.read().values())
    model.weights.scatter(buffer)
    for name, value in model.read().items():
        np.testing.assert_array_equal(value, values[name])


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16, np.complex64])
def test_get_flat_converts_to_dtypes_that_hold_the_weights(build: Any, dtype: Any) -> None:
    values = random_values()
    model = build(values)
    flat = model.weights.get_flat(dtype=dtype)
    np.testing.assert_array_equal(flat, concatenated(values).astype(dtype), strict=True)
    out = np.empty(flat.shape, dtype)
    assert model.weights.get_flat(out, dtype=dtype) is out
    np.testing.assert_array_equal(out, flat)
    for wrong in (np.int64, bool, "U4", object):
        with pytest.raises(TypeError, match="dtype: expected one that holds float32, got"):
            model.weights.get_flat(dtype=wrong)


def read_only(array: Any) -> Any:
    array.setflags(write=False)
    return array


def test_set_flat_takes_any_dtype_lists_strides_and_read_only(build: Any) -> None:
    model = build(random_values())
    size = model.weights.get_flat_size()
    dtypes = [np.float64, np.float16, ml_dtypes.bfloat16, np.int8, bool]
    vectors: list[Any] = [np.arange(k, k + size).astype(dtype) for k, dtype in enumerate(dtypes)]
    wide = np.repeat(np.arange(size, dtype=np.float32), 2)
    vectors += [list(range(size)), (wide + 1)[::2], read_only(wide[::2] + 2)]
    for flat in vectors:
        model.weights.set_flat(flat)
        np.testing.assert_array_equal(model.weights.get_flat(), np.asarray(flat, np.float32))


def test_integers_take_the_rounded_value_or_nothing_changes(build: Any) -> None:
    model = build({"w": np.zeros(1, np.float32), "n": np.zeros(5, np.int32)})
    model.weights.set_flat(np.array([0.5, 0.5, 1.5, -2.4, 7.0, 2.6]))
    for bad in (np.nan, np.inf, 2.0**31, -(2.0**31) - 1):
        with pytest.raises(ValueError, match=r"slot 1 'n': expected values that fit int32"):
            model.weights.set_flat(np.array([5.0, 5.0, 5.0, 5.0, 5.0, bad]))
        np.testing.assert_array_equal(model.read()["n"], [0, 2, -2, 7, 3])
        np.testing.assert_array_equal(model.read()["w"], np.float32([0.5]))


@pytest.mark.parametrize("aligned", [True, False])
def test_what_was_set_does_not_follow_the_callers_array(build: Any, aligned: Any) -> None:
    # TensorFlow aliases aligned NumPy memory where it may.
    model = build({"w": np.zeros(2048, np.float32), "b": np.zeros(2048, np.float32)})
    room = np.zeros(4096 + 16, np.float32)
    first = (-room.ctypes.data // 4) % 16 + (0 if aligned else 1)
    flat = room[first : first + 4096]
    flat[:] = 1
    model.weights.set_flat(flat)
    flat[:] = 2
    assert (model.weights.get_flat() == 1).all()
    model.weights.set_weights({"w": flat[:2048], "b": flat[2048:]})
    flat[:] = 3
    assert (model.weights.get_flat() == 2).all()
    model.weights.set_weights({"w": flat[:2048]})
    flat[:] = 4
    assert (model.read()["w"] == 3).all()


def test_what_was_read_does_not_alias_the_model(build: Any) -> None:
    model = build({"w": np.zeros(4096, np.float32)})
    flat, weights = model.weights.get_flat(), model.weights.get_weights()
    flat[:] = 1
    weights["w"][:] = 1
    assert (model.read()["w"] == 0).all()
    model.write("w", np.full(4096, 2, np.float32))
    others = model.weights.get_flat(), model.weights.get_weights()["w"]
    assert all((other == 2).all() for other in others)
    assert (flat == 1).all()
    assert (weights["w"] == 1).all()


@pytest.mark.parametrize(
    ("flat", "error", "message"),
    [
        (np.zeros(3, np.float32), ValueError, r"new_weights: expected shape \(4,\), got \(3,\)"),
        (np.zeros((2, 2), np.float32), ValueError, r"expected shape \(4,\), got \(2, 2\)"),
        (
            np.zeros(4, np.complex64),
            TypeError,
            r"slot 0 'w': expected float32 \(3,\), got complex64",
        ),
        (np.zeros(4, "U1"), TypeError, r"expected float32 \(3,\), got <U1 \(3,\)"),
        (np.zeros(4, object), TypeError, r"expected float32 \(3,\), got object \(3,\)"),
        ({"w": np.zeros(3)}, TypeError, "got dict; set_weights takes weights by name"),
    ],
)
def test_a_wrong_vector_changes_nothing(build: Any, flat: Any, error: Any, message: Any) -> None:
    model = build({"w": np.ones(3, np.float32), "b": np.float32(1)})
    with pytest.raises(error, match=message):
        model.weights.set_flat(flat)
    assert (model.weights.get_flat() == 1).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_updates_leave_integers_and_take_vectors_that_do_not_convert_to_them(
    build: Any, dtype: Any
) -> None:
    model = build(
        {
            "w": np.float32([1, 2]),
            "seed": np.uint32([7, 8]),
            "b": np.float32(3),
            "flag": np.bool_(1),
        }
    )
    model.weights.add_flat(np.array([1, 1, 100, 100, 1, 1], dtype), 2)
    np.testing.assert_array_equal(model.weights.get_flat(), [3, 4, 7, 8, 5, 1])
    model.weights.lerp_flat(np.array([5, 4, np.nan, 0.5, 1, np.nan], dtype), 0.5)
    np.testing.assert_array_equal(model.weights.get_flat(), [4, 4, 7, 8, 3, 1])


@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        (np.zeros(4), TypeError, r"out: expected float32 \(4,\), got float64 \(4,\)"),
        (
            np.zeros(5, np.float32),
            ValueError,
            r"expected contiguous float32 \(4,\), got float32 \(5,\)",
        ),
        (np.zeros((4, 1), np.float32), ValueError, r"got float32 \(4, 1\)"),
        (np.zeros(8, np.float32)[::2], ValueError, r"with strides \(8,\)"),
        (read_only(np.zeros(4, np.float32)), ValueError, "expected a writable array"),
        ([0.0] * 4, TypeError, "expected a NumPy array, got list"),
    ],
)
def test_a_wrong_out_is_not_written(build: Any, out: Any, error: Any, message: Any) -> None:
    model = build({"w": np.ones(3, np.float32), "b": np.float32(1)})
    with pytest.raises(error, match=message):
        model.weights.get_flat(out)
    assert not np.any(np.asarray(out))


@pytest.mark.parametrize("update", ["add_flat", "lerp_flat"])
def test_threads_lose_no_update(build: Any, update: Any) -> None:
    model = build({"w": np.zeros(5000, np.float32), "b": np.float32(0)})
    size = model.weights.get_flat_size()
    threads, rounds = 4, 25
    start = threading.Barrier(threads)

    def work() -> None:
        start.wait()
        for _ in range(rounds):
            if update == "add_flat":
                model.weights.add_flat(np.ones(size, np.float32))
            else:
                model.weights.lerp_flat(np.ones(size, np.float32), 1 / 64)

    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(work) for _ in range(threads)]:
            done.result()
    left = (1 - 1 / 64) ** (threads * rounds)
    expected = threads * rounds if update == "add_flat" else 1 - left
    np.testing.assert_allclose(model.weights.get_flat(), expected, rtol=1e-4)


@pytest.mark.parametrize("path", ["ops"], indirect=True)
def test_a_read_sees_all_or_nothing_of_a_set(
    path: Any, build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build({f"v{i}": np.zeros(50, np.float32) for i in range(4)})
    half_written, was_read = threading.Event(), threading.Event()
    operations = type(model.weights._mover._operations)
    write = operations.write

    def slow_write(self: Any, values: Any) -> None:
        places = list(values)
        write(self, {i: values[i] for i in places[:2]})
        half_written.set()
        was_read.wait(0.5)  # the read gets through, unless there is a lock
        write(self, {i: values[i] for i in places[2:]})

    monkeypatch.setattr(operations, "write", slow_write)
    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(model.weights.set_flat, np.ones(200, np.float32))
        assert half_written.wait(120)
        flat = model.weights.get_flat()
        was_read.set()
        writer.result()
    assert (flat == flat[0]).all()


def test_integers_that_a_vector_rounds_are_named_once(build: Any) -> None:
    model = build({"w": np.ones(2, np.float32), "state": np.int64([-(2**53) + 1, 2**53 - 1])})
    model.weights.set_flat(model.weights.get_flat())  # which holds them, so there is no warning
    np.testing.assert_array_equal(model.read()["state"], [-(2**53) + 1, 2**53 - 1])
    with pytest.warns(RuntimeWarning, match="from a vector of float32; get_weights"):
        model.weights.get_flat(dtype=np.float32)
    model = build({"w": np.ones(2, np.float32), "state": np.int64([1, 2**53 + 1])})
    with pytest.warns(RuntimeWarning, match=r"slot 1 'state': set_flat cannot restore its int64"):
        model.weights.get_flat()
    model.weights.get_flat()
    model.weights.set_weights(model.weights.get_weights())
    np.testing.assert_array_equal(model.read()["state"], [1, 2**53 + 1])


def test_real_variables_beside_complex_ones_are_named_once(build: Any) -> None:
    model = build({"c": np.complex64([1j]), "w": np.ones(2, np.float32)})
    with pytest.warns(RuntimeWarning, match=r"slot 1 'w': set_flat cannot restore its float32"):
        flat = model.weights.get_flat()
    model.weights.get_flat()
    with pytest.raises(TypeError, match="slot 1 'w'"):
        model.weights.set_flat(flat)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_imaginary_parts_are_never_dropped(build: Any, dtype: Any) -> None:
    model = build({"c": np.complex64([1 + 2j])})
    with pytest.raises(TypeError, match="expected one that holds complex64"):
        model.weights.get_flat(dtype=dtype)
    with pytest.raises(TypeError, match=r"slot 0 'c': .* got complex64"):
        model.weights.flatten_gradients([np.complex64([1j])], dtype=dtype)
    model = build({"w": np.zeros(1, dtype)})
    for sets in (model.weights.set_flat, lambda x: model.weights.set_weights({"w": x})):
        with pytest.raises(TypeError, match=r"slot 0 'w': .* got complex128"):
            sets([3 + 4j])
    assert model.weights.get_flat() == [0]
