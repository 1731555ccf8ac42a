"""Values that others hold do not change, and variables get the right bits."""

import threading
import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import flatweights as fw
from flatweights.tensorflow import TensorFlowVariables

SIZE = 320  # rows of a matrix this wide are aligned, so TensorFlow aliases them


def hold_read_value(v: Any) -> Any:
    tensor = v.read_value()
    return tensor.numpy


def hold_value(v: Any) -> Any:
    tensor = v.value()
    return tensor.numpy


def hold_identity(v: Any) -> Any:
    tensor = tf.identity(v)
    return tensor.numpy


def hold_reshaped(v: Any) -> Any:
    tensor = tf.reshape(v, [-1, 1])
    return tensor.numpy


def hold_numpy(v: Any) -> Any:
    array = v.numpy()
    return lambda: array


def hold_memoryview(v: Any) -> Any:
    view = memoryview(v.read_value())
    return lambda: np.frombuffer(view, np.float32)


def hold_asarray(v: Any) -> Any:
    view = np.asarray(v.read_value())
    return lambda: view


def hold_dlpack(v: Any) -> Any:
    view = np.from_dlpack(v.read_value())
    return lambda: view


def hold_assigned_variable(v: Any) -> Any:
    other = tf.Variable(tf.zeros(SIZE))
    other.assign(v)
    return other.numpy


def hold_assigned_tensor(v: Any) -> Any:
    tensor = v - 1000
    v.assign(tensor)
    return tensor.numpy


def hold_assigned_slice(v: Any) -> Any:
    whole = tf.reshape(tf.range(-2.0 * SIZE, 0), [2, SIZE])
    v.assign(whole[1])
    return lambda: whole[1].numpy()


def hold_dataset(v: Any) -> Any:
    dataset = tf.data.Dataset.from_tensors(v.read_value())
    return lambda: next(iter(dataset)).numpy()


def hold_running_iterator(v: Any) -> Any:
    rows = iter(tf.data.Dataset.from_tensor_slices(v.read_value()).repeat().batch(SIZE // 4))
    return lambda: np.concatenate([next(rows).numpy() for _ in range(4)])


def hold_capture(v: Any) -> Any:
    tensor = v.read_value()
    function = tf.function(lambda: tensor * 1, autograph=False)
    return lambda: function().numpy()


HOLDERS = {
    name.removeprefix("hold_"): function
    for name, function in list(globals().items())
    if name.startswith("hold_")
}

WRITES = {
    "set_flat": lambda w, x: w.set_flat(x),
    "set_flat_cast": lambda w, x: w.set_flat(x.astype(np.float64)),
    "set_weights": lambda w, x: w.set_weights({"v": x}),
    "set_packed": lambda w, x: w.set_weights(fw.FlatWeights({"v": x})),
    "add_flat": lambda w, x: w.add_flat(x - w.get_flat()),
    "lerp_flat": lambda w, x: w.lerp_flat(x, 1.0),
}


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_values_that_others_hold_do_not_change(hold: Any) -> None:
    v = tf.Variable(tf.zeros(SIZE), name="v")
    weights = TensorFlowVariables(v)
    for k, (name, write) in enumerate(WRITES.items(), start=1):
        held = hold(v)
        before = np.array(held())
        write(weights, np.arange(k, k + SIZE, dtype=np.float32))
        np.testing.assert_array_equal(v.numpy(), np.arange(k, k + SIZE), err_msg=name)
        np.testing.assert_array_equal(held(), before, err_msg=name)
        assert (held().reshape(-1) != v.numpy()).all(), name


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_gradients_are_those_of_the_values_that_were_computed_with(write: Any) -> None:
    v = tf.Variable(tf.range(1.0, SIZE + 1), name="v")
    weights = TensorFlowVariables(v)
    with tf.GradientTape() as tape:
        y = v * v
    write(weights, np.full(SIZE, -1, np.float32))
    np.testing.assert_array_equal(tape.gradient(y, v), 2 * np.arange(1, SIZE + 1))


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_fed_array_of_which_a_variable_is_a_slice_does_not_change(write: Any) -> None:
    room = np.zeros(2 * SIZE * 4 + 64, np.uint8)
    start = -room.ctypes.data % 64  # TensorFlow copies unaligned memory
    fed = room[start : start + 2 * SIZE * 4].view(np.float32).reshape(2, SIZE)
    fed[...] = 1
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        feed = tf.compat.v1.placeholder(tf.float32, fed.shape)
        v = tf.compat.v1.get_variable("v", [SIZE], use_resource=True)
        assign = tf.compat.v1.assign(v, tf.unstack(feed)[0]).op
        session.run(v.initializer)
        weights = TensorFlowVariables(v, session)
        weights.get_flat()
        session.run(assign, {feed: fed})
        write(weights, np.arange(SIZE, dtype=np.float32))
        np.testing.assert_array_equal(weights.get_flat(), np.arange(SIZE))
    assert set(fed.flat) == {1}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_what_was_set_or_got_and_the_variable_do_not_reach_each_other(write: Any) -> None:
    v = tf.Variable(tf.zeros(SIZE), name="v")
    weights = TensorFlowVariables(v)
    source = np.arange(SIZE, dtype=np.float32)
    write(weights, source)
    arrays = (source, weights.get_flat(), weights.get_weights()["v"])
    v.assign_add(tf.ones(SIZE))
    v.scatter_update(tf.IndexedSlices(-1.0, 3))
    for array in arrays:
        np.testing.assert_array_equal(array, np.arange(SIZE))
    write(weights, source)
    for array in (*arrays, weights.get_flat(), weights.get_weights()["v"]):
        array[:] = -1
    np.testing.assert_array_equal(v.numpy(), np.arange(SIZE))


def test_a_function_that_runs_sees_one_value() -> None:
    v = tf.Variable(tf.zeros(20_000), name="v")
    weights = TensorFlowVariables(v)
    ready, stop = threading.Event(), threading.Event()
    seen, changed = [], []

    @tf.function
    def watch() -> Any:
        held = v.read_value()
        first = tf.identity(held[0])
        same = tf.constant(True)
        for _ in tf.range(100):
            same = same & tf.reduce_all(held == first)
        return first, same

    def run() -> None:
        while not stop.is_set():
            first, same = watch()
            seen.append(float(first))
            if not same:
                changed.append(float(first))
            ready.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(60)
    end, k = time.monotonic() + 0.2, 0
    while time.monotonic() < end or (len(set(seen)) <= 2 and time.monotonic() < end + 60):
        k += 1
        list(WRITES.values())[k % len(WRITES)](weights, np.full(20_000, k, np.float32))
    stop.set()
    thread.join(120)
    assert not thread.is_alive()
    assert changed == []
    assert len(set(seen)) > 2


def by_gather(v: Any) -> None:
    tf.gather(v, [0, 1])


def by_lookup(v: Any) -> None:
    tf.nn.embedding_lookup(v, [2])


def by_scatter(v: Any) -> None:
    v.scatter_nd_update([[0]], [v[0]])


def by_slice(v: Any) -> None:
    v[0].assign(v[0])


@pytest.mark.parametrize("switch", [by_gather, by_lookup, by_scatter, by_slice])
def test_variables_that_are_copied_on_reading_are_moved_as_others(switch: Any) -> None:
    v, other = tf.Variable(tf.range(float(SIZE)), name="v"), tf.Variable(tf.zeros(SIZE))
    weights = TensorFlowVariables(v)
    switch(v)
    for k, (name, write) in enumerate(WRITES.items(), start=1):
        held = v.read_value()
        other.assign(v)
        before = held.numpy()
        np.testing.assert_array_equal(weights.get_flat(), before, err_msg=name)
        write(weights, np.arange(k, k + SIZE, dtype=np.float32))
        expected = np.arange(k, k + SIZE)
        np.testing.assert_array_equal(v.numpy(), expected, err_msg=name)
        np.testing.assert_array_equal(held.numpy(), before, err_msg=name)
        np.testing.assert_array_equal(other.numpy(), before, err_msg=name)
        v.scatter_nd_add([[1], [4]], [10.0, 20.0])
        expected[[1, 4]] += [10, 20]
        np.testing.assert_array_equal(v.numpy(), expected, err_msg=name)
        np.testing.assert_array_equal(weights.get_weights()["v"], expected, err_msg=name)


DTYPES = [
    *(np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.complex64, np.complex128),
    *(np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64, np.bool_),
    *(ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
]
SHAPES = [(), (0, 3), (17,), (2, 0), (3, 5, 2), (1,)]


def random_bits(dtype: Any, size: Any, rng: np.random.Generator) -> Any:
    if dtype is np.bool_:
        return rng.integers(0, 2, size).astype(bool)
    return rng.integers(0, 256, size * np.dtype(dtype).itemsize, np.uint8).view(dtype)


def bytes_of(variables: Any) -> Any:
    return b"".join(v.numpy().tobytes() for v in variables)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_every_dtype_goes_round_to_the_bit(dtype: Any, rng: np.random.Generator) -> None:
    variables = [tf.Variable(np.zeros(shape, dtype)) for shape in SHAPES]
    weights = TensorFlowVariables(variables)
    for set_all in (
        weights.set_flat,
        lambda flat: weights.set_weights(fw.unflatten(flat, weights.layout)),
        lambda flat: weights.set_weights(fw.FlatWeights(fw.unflatten(flat, weights.layout))),
    ):
        flat = random_bits(dtype, weights.get_flat_size(), rng)
        set_all(flat)
        assert bytes_of(variables) == flat.tobytes()
        assert weights.get_flat().tobytes() == flat.tobytes()
        assert b"".join(x.tobytes() for x in weights.get_weights().values()) == flat.tobytes()


def float32_values(rng: np.random.Generator) -> Any:
    """Random bits, values half-way between two of a narrower type, and special ones."""
    high = rng.integers(0, 1 << 16, 4000, dtype=np.uint32) << 16
    ties = [high | 0x8000, (high & 0xBFFF0000) | 0x1000, (high & 0xBFFF0000) | 0x3000]
    special = np.float32([0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519.99, 65520, 1e-8, 1e-45])
    random = rng.integers(0, 1 << 32, 4000, dtype=np.uint32)
    return np.concatenate([np.concatenate([*ties, random]).view(np.float32), special])


def assert_same_bits(got: Any, expected: Any) -> None:
    """Fail unless all bits are equal, except those of NaNs."""
    assert got.dtype == expected.dtype
    kind = f"u{expected.dtype.itemsize}"
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(got), nan)
    np.testing.assert_array_equal(got.view(kind)[~nan], expected.view(kind)[~nan])


NARROW_AND_WIDE = [np.float16, ml_dtypes.bfloat16, np.float64]


@pytest.mark.parametrize("dtype", NARROW_AND_WIDE, ids=lambda dtype: np.dtype(dtype).name)
def test_conversions_are_those_of_numpy(dtype: Any, rng: np.random.Generator) -> None:
    wide = float32_values(rng)
    bits = random_bits(dtype, 5000, rng)
    v, w = tf.Variable(wide), tf.Variable(np.zeros(wide.shape, dtype))
    with np.errstate(all="ignore"):
        expected, back = wide.astype(dtype), bits.astype(np.float32)
    assert_same_bits(TensorFlowVariables(v).get_flat(dtype=dtype), expected)
    TensorFlowVariables(w).set_flat(wide)
    assert_same_bits(w.numpy(), expected)
    u = tf.Variable(tf.zeros(bits.shape))
    TensorFlowVariables(u).set_flat(bits)
    assert_same_bits(u.numpy(), back)


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int64, np.uint64, np.bool_])
def test_integers_set_floating_variables_as_numpy_casts(
    dtype: Any, rng: np.random.Generator
) -> None:
    values = random_bits(dtype, 500, rng)
    v = tf.Variable(tf.zeros(values.shape))
    TensorFlowVariables(v).set_flat(values)
    assert_same_bits(v.numpy(), values.astype(np.float32))


AVERAGED = DTYPES[:6]


def model_of(dtype: Any, rng: np.random.Generator) -> Any:
    values = [rng.normal(size=shape).astype(dtype) for shape in SHAPES]
    variables = [tf.Variable(value) for value in values]
    flat = np.concatenate([value.reshape(-1) for value in values])
    return variables, flat, rng.normal(size=flat.size).astype(dtype)


@pytest.mark.parametrize("dtype", AVERAGED, ids=lambda dtype: np.dtype(dtype).name)
def test_add_flat_is_axpy_and_lerp_flat_is_lerp_to_the_bit(
    dtype: Any, rng: np.random.Generator
) -> None:
    variables, flat, delta = model_of(dtype, rng)
    weights = TensorFlowVariables(variables)
    other = rng.normal(size=flat.size).astype(np.result_type(dtype, np.float64))
    for given in (delta, other):  # of another dtype: it is cast to that of the variables
        before = flat.tobytes()
        weights.add_flat(given, -0.37)
        fw.axpy_(flat, -0.37, given.astype(dtype))
        assert bytes_of(variables) == flat.tobytes() != before
        weights.lerp_flat(given, 0.37)
        before = flat.tobytes()
        fw.lerp_(flat, given.astype(dtype), 0.37)
        assert bytes_of(variables) == flat.tobytes() != before


def mixed_model() -> Any:
    return [
        tf.Variable(np.float32([1, 2]), name="w"),
        tf.Variable(np.int64(2**40), name="seed"),
        tf.Variable(np.float16([0.5]), name="half"),
        tf.Variable([True, False], name="flags"),
        tf.Variable(np.float64(3), name="double"),
    ]


def test_a_model_of_integers_alone_keeps_its_values() -> None:
    variable = tf.Variable(np.arange(5000))
    weights = TensorFlowVariables(variable)
    for update in (weights.add_flat, weights.lerp_flat):
        held = variable.read_value()  # so that writing would need new memory
        update(np.ones(5000), 0.5)
        assert variable.numpy().tolist() == held.numpy().tolist() == list(range(5000))


ONES = np.ones(7)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda w: w.add_flat(ONES[1:]), ValueError, r"delta: expected shape \(7,\), got \(6,\)"),
        (lambda w: w.add_flat(None), TypeError, "delta: expected an array, got NoneType"),
        (lambda w: w.lerp_flat(ONES[None], 0.5), ValueError, r"target: .* got \(1, 7\)"),
        (lambda w: w.add_flat(ONES * 1j), TypeError, r"'w': expected float32 \(2,\), got complex"),
        (lambda w: w.lerp_flat(["a"] * 7, 1), TypeError, r"expected float32 \(2,\), got <U1"),
        (lambda w: w.add_flat(ONES, np.nan), ValueError, "scale: expected a finite number"),
        (lambda w: w.lerp_flat(ONES, -np.inf), ValueError, "t: expected a finite number"),
        (lambda w: w.add_flat(ONES, "1"), TypeError, "scale: expected a real number, got str"),
        (lambda w: w.lerp_flat(ONES, 1j), TypeError, "t: expected a real number, got complex"),
    ],
)
def test_wrong_updates_change_nothing(call: Any, error: Any, message: Any) -> None:
    variables = mixed_model()
    with pytest.raises(error, match=message):
        call(TensorFlowVariables(variables))
    assert bytes_of(variables) == bytes_of(mixed_model())


def test_models_with_float8_are_not_computed_with() -> None:
    w = tf.Variable([1.0, 2.0], name="w")
    small = tf.Variable(np.ones(2, ml_dtypes.float8_e4m3fn), name="small")
    weights = TensorFlowVariables([w, small])
    for call in (lambda: weights.add_flat(np.ones(4)), lambda: weights.lerp_flat(np.ones(4), 0.5)):
        with pytest.raises(TypeError, match=r"with arithmetic, got .*'small'.*float8_e4m3fn"):
            call()
    assert w.numpy().tolist() == [1, 2]
