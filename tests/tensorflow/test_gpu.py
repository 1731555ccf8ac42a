"""Variables in the memory of a GPU, alone and among others in host memory.

A GPU works while Python goes on. So most tests read and write without waiting for it, while its
kernels are still running. All values are small integers, which every dtype here holds exactly.

Nothing here multiplies matrices: machines may lack cuBLAS.
"""

import gc
import os
import re
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")  # other processes may use the GPU, too

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from numpy.typing import NDArray
from reference import same_bits
from tensorflow.python.ops.resource_variable_ops import UninitializedVariable
from tf_models import only_bound, shared_variable

from flatweights import FlatWeights
from flatweights.tensorflow import TensorFlowVariables

tf1 = tf.compat.v1

DEVICE = "GPU:0"
STEPS = 200  # that keep a GPU busy for some milliseconds
LARGE = 10_000_000  # elements: 40 MB

pytestmark = pytest.mark.skipif(
    not tf.config.list_physical_devices("GPU"), reason="there is no GPU, or it is hidden"
)

Values = dict[str, NDArray[Any]]

# By name, the devices of variables in turn.
PLACES = {"gpu": (DEVICE,), "mixed": (DEVICE, "CPU:0")}

_SHAPES = ((7, 5), (), (0, 3), (1, 1, 1), (5,), (2, 3, 2))
_DTYPES = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float64": np.float64,
    "int8": np.int8,
    "int32": np.int32,
    "int64": np.int64,
    "bool": np.bool_,
    "complex64": np.complex64,
}
_MIXED = ("float32", "int64", "float16", "bool", "bfloat16", "int32", "float64")


def filled(shape: tuple[int, ...], dtype: Any, rng: np.random.Generator) -> NDArray[Any]:
    """Multiples of 4, so that a quarter of a difference is exact; any booleans."""
    if np.dtype(dtype) == np.bool_:
        return np.asarray(rng.integers(0, 2, shape), np.bool_)
    values = 4 * np.asarray(rng.integers(-15, 16, shape))
    if np.dtype(dtype).kind == "c":
        values = values + 4j * rng.integers(-15, 16, shape)
    return np.asarray(values, dtype)


def values_of(kind: str, seed: int = 0) -> Values:
    """The values of one of the `KINDS` of models, by name."""
    rng = np.random.default_rng(seed)
    if kind in _DTYPES:
        parts = [(shape, _DTYPES[kind]) for shape in _SHAPES]
    elif kind == "mixed":
        parts = [(_SHAPES[i % 6], _DTYPES[_MIXED[i % 7]]) for i in range(42)]
    elif kind == "many bytes":
        parts = [((2 * (i % 7) + 1,), np.int8) for i in range(300)]
    elif kind == "many floats":
        parts = [((i % 8, 3) if i % 5 else (), np.float32) for i in range(300)]
    else:
        parts = [((3,), np.float32), ((LARGE,), np.float32), ((), np.float32)]
    return {f"v{i}": filled(shape, dtype, rng) for i, (shape, dtype) in enumerate(parts)}


KINDS = [*_DTYPES, "mixed", "many bytes", "many floats", "large"]


def build(values: Mapping[str, Any], place: str = "gpu") -> tuple[list[Any], TensorFlowVariables]:
    """Variables on the devices of ``place``, and what moves them."""
    variables = []
    devices = PLACES[place]
    for i, (name, value) in enumerate(values.items()):
        with tf.device(devices[i % len(devices)]):
            variables.append(tf.Variable(value, name=name))
    return variables, TensorFlowVariables(variables)


def flat_of(values: Mapping[str, NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate([value.astype(dtype).reshape(-1) for value in values.values()])


def assert_values(variables: list[Any], expected: Mapping[str, NDArray[Any]]) -> None:
    """Fail unless TensorFlow reads these values."""
    for variable, (name, value) in zip(variables, expected.items(), strict=True):
        assert same_bits(np.asarray(variable.numpy()), value), name


def name_of(variable: Any) -> str:
    return str(variable.name).partition(":")[0]


def is_floating(value: NDArray[Any]) -> bool:
    return value.dtype.kind in "fcV"  # bfloat16 is of kind V


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> str:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param  # type: ignore[no-any-return]


# What every call moves.


def test_gets_give_every_bit(kind: str, place: str) -> None:
    values = values_of(kind)
    variables, weights = build(values, place)
    expected = flat_of(values, weights.layout.dtype)
    assert same_bits(weights.get_flat(), expected)
    out = np.empty_like(expected)
    assert weights.get_flat(out) is out
    assert same_bits(out, expected)
    wide = np.dtype(np.complex128 if kind == "complex64" else np.float64)
    vector = np.empty(len(expected), wide)
    assert same_bits(weights.get_flat(vector, dtype=wide), expected.astype(wide))
    named = weights.get_weights()
    assert list(named) == list(values)
    assert all(same_bits(named[name], values[name]) for name in values)
    buffer = weights.layout.new_buffer()
    weights.gather_into(buffer)
    for view, value in zip(weights.layout.packed_views(buffer), values.values(), strict=True):
        assert same_bits(view, value)
    assert_values(variables, values)


def test_sets_take_every_bit(kind: str, place: str) -> None:
    variables, weights = build(values_of(kind), place)
    own = weights.layout.dtype
    other = np.dtype(np.complex128 if kind == "complex64" else np.float64)
    for seed, dtype in enumerate((own, other, own), 1):
        values = values_of(kind, seed)
        weights.set_flat(flat_of(values, dtype))
        assert_values(variables, values)
    values = values_of(kind, 4)
    weights.set_weights(values)
    assert_values(variables, values)
    values = values_of(kind, 5)
    weights.set_weights(FlatWeights(values))
    assert_values(variables, values)
    part = dict(list(values_of(kind, 6).items())[1::3])
    weights.set_weights(part)
    assert_values(variables, values | part)
    weights.scatter(FlatWeights(values).buffer)
    assert_values(variables, values)
    assert same_bits(weights.get_flat(), flat_of(values, own))


def test_updates_are_those_of_numpy(kind: str, place: str) -> None:
    values, steps, targets = (values_of(kind, seed) for seed in range(3))
    variables, weights = build(values, place)
    own = weights.layout.dtype
    for dtype in (own, np.dtype(np.complex128 if kind == "complex64" else np.float64)):
        weights.set_flat(flat_of(values, dtype))
        weights.add_flat(flat_of(steps, dtype), 0.5)
        expected = {
            name: (v + steps[name] / 2).astype(v.dtype) if is_floating(v) else v
            for name, v in values.items()
        }
        assert_values(variables, expected)
        weights.set_flat(flat_of(values, dtype))
        weights.lerp_flat(flat_of(targets, dtype), 0.25)
        expected = {
            name: (v + (targets[name] - v) / 4).astype(v.dtype) if is_floating(v) else v
            for name, v in values.items()
        }
        assert_values(variables, expected)


def test_dtypes_without_a_common_real_one_move_by_name(place: str) -> None:
    values = values_of("mixed") | {f"c{k}": v for k, v in values_of("complex64").items()}
    variables, weights = build(values, place)
    named = weights.get_weights()
    assert all(same_bits(named[name], value) for name, value in values.items())
    twice = {name: value + value for name, value in values.items()}
    weights.set_weights(twice)
    assert_values(variables, twice)


@only_bound
def test_variables_that_are_not_bound_say_why(kind: str, place: str, path: str) -> None:
    variables, weights = build(values_of(kind), place)
    weights.get_weights()
    unbound = weights.unbound
    # The values of some dtypes, such as int32, are in host memory, whatever the device.
    there = [
        name_of(v) for v in variables if DEVICE in v.device and DEVICE in v.value().backing_device
    ]
    assert len(set(there) & set(unbound)) in (0, len(there))
    assert all(re.search("memory|device|GPU", unbound[name]) for name in there if name in unbound)
    elsewhere = {name_of(v) for v in variables if DEVICE not in v.device}
    assert not elsewhere & set(unbound)


# Memory that is shared, or that its owner writes to again.


@pytest.mark.parametrize("kind", ["float32", "mixed", "large"])
def test_shared_weights_are_copied_and_said_to_be(kind: str, place: str) -> None:
    variables, weights = build(values_of(kind), place)
    values = values_of(kind, 1)
    flat = flat_of(values, weights.layout.dtype)
    flat.setflags(write=False)
    weights.set_flat(flat, share=True)
    assert_values(variables, values)
    assert list(weights.shared) == list(values)
    there = [name_of(v) for v in variables if DEVICE in v.device]
    assert not any(weights.shared[name] for name in there if is_floating(values[name]))
    flat.setflags(write=True)
    if place == "gpu":
        flat.fill(0)
        assert_values(variables, values)
    values = values_of(kind, 2)
    named = FlatWeights(values)
    named.buffer.setflags(write=False)
    frozen = FlatWeights.wrap(named.buffer, named.layout)
    weights.set_weights(frozen, share=True)
    assert_values(variables, values)
    assert same_bits(weights.get_flat(), flat_of(values, weights.layout.dtype))


def test_a_vector_may_be_changed_as_soon_as_it_is_set(place: str) -> None:
    variables, weights = build({"w": np.zeros(LARGE, np.float32), "b": np.zeros(3, np.float32)})
    flat, size = np.empty(LARGE + 3, np.float32), LARGE
    named = {"w": flat[:size], "b": flat[size:]}
    calls: list[Callable[[], None]] = [
        lambda: weights.set_flat(flat),
        lambda: weights.set_weights(named),
        lambda: weights.set_weights({"w": named["w"]}),
        lambda: weights.add_flat(flat),
        lambda: weights.lerp_flat(flat, 1.0),
    ]
    for k, call in enumerate(calls, 1):
        for variable in variables:
            variable.assign(tf.zeros_like(variable))
        flat.fill(k)
        call()
        flat.fill(-1)
        assert (variables[0].numpy() == k).all()


def test_what_was_got_does_not_follow_the_variables(place: str) -> None:
    values = values_of("large")
    variables, weights = build(values, place)
    flat, named = weights.get_flat(), weights.get_weights()
    for variable in variables:
        variable.assign(tf.zeros_like(variable))
    weights.set_flat(np.ones(weights.get_flat_size(), np.float32))
    assert same_bits(flat, flat_of(values, np.float32))
    assert all(same_bits(named[name], value) for name, value in values.items())


# Order: nothing here waits for the GPU, except by the calls themselves.


def pattern(k: int = 0, size: int = LARGE) -> NDArray[Any]:
    """Zeros and ones: their sum is exact in float32."""
    return np.asarray(np.arange(size) % (k + 2) == 0, np.float32)


def trainer(variable: Any, steps: int = STEPS) -> Any:
    """A function that adds a vector many times, one kernel after the other."""

    @tf.function(autograph=False, jit_compile=False)  # type: ignore[untyped-decorator]
    def train(step: Any) -> None:
        for _ in range(steps):
            variable.assign_add(step, read_value=False)

    return train


def on_device(value: Any) -> Any:
    with tf.device(DEVICE):
        return tf.identity(tf.constant(value))


def test_a_get_sees_all_steps_before_it(place: str) -> None:
    (w, b), weights = build({"w": pattern(), "b": np.zeros(3, np.float32)}, place)
    train, step = trainer(w), on_device(pattern(1))
    expected = pattern()
    out = np.empty(weights.get_flat_size(), np.float32)
    for k in range(5):
        train(step)
        b.assign_add([1.0, 2.0, 3.0])
        flat = weights.get_flat(out) if k % 2 else weights.get_flat()
        expected += STEPS * pattern(1)
        assert same_bits(flat[:LARGE], expected)
        assert flat[LARGE:].tolist() == [k + 1, 2 * k + 2, 3 * k + 3]
        train(step)
        named = weights.get_weights()
        expected += STEPS * pattern(1)
        assert same_bits(named["w"], expected)


def test_steps_and_reads_see_the_set_before_them(place: str) -> None:
    (w, b), weights = build({"w": pattern(), "b": np.zeros(3, np.float32)}, place)
    train, step = trainer(w), on_device(pattern(1))
    flat = np.empty(weights.get_flat_size(), np.float32)
    for k in range(4):
        train(step)  # its kernels still run when the set begins
        flat[:LARGE], flat[LARGE:] = pattern(k), k
        weights.set_flat(flat)
        value, total = w.read_value(), tf.reduce_sum(w)
        train(step)
        flat.fill(-1)
        assert same_bits(value.numpy(), pattern(k))
        assert float(total) == pattern(k).sum()
        assert same_bits(weights.get_flat()[:LARGE], pattern(k) + STEPS * pattern(1))
        assert b.numpy().tolist() == [k] * 3


def test_updates_come_between_the_steps_around_them(place: str) -> None:
    (w, b), weights = build({"w": pattern(), "b": np.zeros(3, np.float32)}, place)
    train, step = trainer(w), on_device(pattern(1))
    delta = np.concatenate([pattern(2), np.ones(3, np.float32)])
    expected = pattern()
    for _ in range(3):
        train(step)
        weights.add_flat(delta, 2.0)
        train(step)
        expected += 2 * STEPS * pattern(1) + 2 * pattern(2)
        assert same_bits(weights.get_flat()[:LARGE], expected)
        train(step)
        weights.lerp_flat(delta, 1.0)
        train(step)
        expected = pattern(2) + STEPS * pattern(1)
        assert same_bits(w.numpy(), expected)
        assert b.numpy().tolist() == [1] * 3


def test_a_get_sees_what_an_elementwise_model_has_learned(place: str) -> None:
    """Gradient descent by a function, whose results NumPy computes exactly."""
    values: Values = {"w": 4 * pattern(1, 999_999), "b": np.array([8.0, 16.0], np.float32)}
    variables, weights = build(values, place)

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(v * v) for v in variables])
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.25 * gradient)  # halves it

    for k in range(1, 11):
        step()
        assert same_bits(weights.get_flat(), flat_of(values, np.float32) / np.float32(2**k))


CHANGES: dict[str, Callable[[TensorFlowVariables, NDArray[Any]], None]] = {
    "set_flat": lambda weights, flat: weights.set_flat(flat),
    "set_flat, cast": lambda weights, flat: weights.set_flat(flat.astype(np.float64)),
    "set_weights": lambda weights, flat: weights.set_weights({"w": flat[: flat.size - 3]}),
    "add_flat": lambda weights, flat: weights.add_flat(flat),
    "lerp_flat": lambda weights, flat: weights.lerp_flat(flat, 0.5),
}


@pytest.mark.parametrize("change", CHANGES)
def test_values_that_were_read_never_change(change: str, place: str) -> None:
    before = 2 * pattern(1)
    (w, _), weights = build({"w": before, "b": np.zeros(3, np.float32)}, place)
    flat = np.full(weights.get_flat_size(), 8, np.float32)
    with tf.device(DEVICE):
        other = tf.Variable(w)  # aliases the value, until one of them is written
    read = {
        "read_value": w.read_value(),
        "value": w.value(),
        "identity": tf.identity(w),
        "slice": w[:10],
        "rest": w[16:],
        "reshape": tf.reshape(w, [-1, 2]),
    }
    for _ in range(2):
        CHANGES[change](weights, flat)
        trainer(w, 3)(tf.ones_like(w))
    for name, tensor in read.items():
        expected = {"slice": before[:10], "rest": before[16:]}.get(name, before)
        assert same_bits(tensor.numpy().reshape(-1), expected), name
    assert same_bits(other.numpy(), before)
    assert same_bits(weights.get_flat()[:LARGE], w.numpy())


def test_sparse_updates_come_between(place: str) -> None:
    values: Values = {"w": np.zeros((1000, 40), np.float32), "b": np.zeros(3, np.float32)}
    (w, b), weights = build(values, place)
    rng = np.random.default_rng(0)
    expected = values["w"].copy()
    for k in range(8):
        rows = rng.integers(0, 1000, 300)
        with tf.device(DEVICE):
            slices = tf.IndexedSlices(tf.ones((300, 40)), tf.constant(rows))
            if k % 2:
                w.scatter_add(slices)
            else:
                w.scatter_nd_add(tf.constant(rows[:, None]), tf.ones((300, 40)))
        np.add.at(expected, rows, 1)
        old = w.read_value()
        assert same_bits(weights.get_weights()["w"], expected)
        before = expected.copy()
        expected *= 2
        weights.set_flat(np.concatenate([expected.reshape(-1), np.full(3, k, np.float32)]))
        assert same_bits(tf.gather(w, rows).numpy(), expected[rows])
        weights.add_flat(np.ones(weights.get_flat_size(), np.float32))
        expected += 1
        w.scatter_update(tf.IndexedSlices(tf.zeros((1, 40)), [k]))
        expected[k] = 0
        assert same_bits(weights.get_flat()[:40_000].reshape(1000, 40), expected)
        assert same_bits(old.numpy(), before)
        assert b.numpy().tolist() == [k + 1] * 3


def test_optimizers_of_keras_step_between(place: str) -> None:
    values: Values = {"w": 64 * pattern(1, 4096), "b": np.array([64.0], np.float32)}
    made = []
    for i, (name, value) in enumerate(values.items()):
        with tf.device(PLACES[place][i % len(PLACES[place])]):
            made.append(keras.Variable(value, name=name))
    optimizer = keras.optimizers.SGD(0.5, momentum=0.5)
    with tf.device(DEVICE):
        optimizer.build(made)
    weights = TensorFlowVariables(made)
    state = TensorFlowVariables([made, optimizer])
    flat = flat_of(values, np.float32)
    speed = np.zeros_like(flat)
    for k in range(6):
        gradient = np.full_like(flat, 2.0 * (k + 1))
        if k % 2:
            weights.apply_flat_gradients(optimizer, gradient)
        else:
            parts = [gradient[:4096], gradient[4096:]]
            optimizer.apply([tf.constant(part) for part in parts], made)
        speed = np.float32(0.5) * speed - np.float32(0.5) * gradient
        flat = flat + speed
        assert same_bits(weights.get_flat(), flat)
        flat = flat + np.float32(8)
        weights.set_flat(flat)
        momenta = [v for name, v in state.get_weights().items() if "moment" in name]
        assert same_bits(np.concatenate([v.reshape(-1) for v in momenta]), speed)


# Gradients.


def test_gradients_become_one_vector(place: str) -> None:
    values = values_of("float32")
    variables, weights = build(values, place)
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(v * v) for v in variables[1:]])
    gradients = tape.gradient(loss, variables)
    expected = 2 * flat_of(values, np.float32)
    expected[:35] = 0  # there is none
    assert same_bits(weights.flatten_gradients(gradients), expected)
    out = np.empty_like(expected)
    assert weights.flatten_gradients(gradients, out=out) is out
    assert same_bits(out, expected)
    wide = weights.flatten_gradients(gradients, dtype=np.float64)
    assert same_bits(wide, expected.astype(np.float64))
    pairs = list(zip(gradients, variables, strict=True))[::-1]
    assert same_bits(weights.flatten_gradients(pairs), expected)
    assert same_bits(weights.flatten_gradients({"v1": gradients[1]})[35:36], expected[35:36])


def test_gradients_are_complete_when_they_are_flattened(place: str) -> None:
    (w, _), weights = build({"w": pattern(), "b": np.zeros(3, np.float32)}, place)
    out = np.empty(weights.get_flat_size(), np.float32)
    with tf.device(DEVICE):
        one = tf.ones(LARGE)

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def late() -> Any:
        gradient = w + 0
        for _ in range(STEPS):
            gradient = gradient + one
        return gradient

    for _ in range(3):
        weights.flatten_gradients([late(), None], out=out)
        assert same_bits(out[:LARGE], pattern() + STEPS)


def test_sparse_gradients_are_added_by_row(place: str) -> None:
    (w, b), weights = build({"w": np.zeros((6, 4), np.float32), "b": np.zeros(2, np.float32)})
    with tf.GradientTape() as tape, tf.device(DEVICE):
        loss = tf.reduce_sum(tf.gather(w, [1, 4, 1])) + tf.reduce_sum(3 * b)
    gradients = tape.gradient(loss, [w, b])
    assert isinstance(gradients[0], tf.IndexedSlices)
    expected = [*np.repeat([0, 2, 0, 0, 1, 0], 4).tolist(), 3, 3]
    assert weights.flatten_gradients(gradients).tolist() == expected


def test_gradients_are_clipped(place: str) -> None:
    variables, weights = build(
        {"a": np.zeros((), np.float32), "b": np.array([0], np.float32)}, place
    )
    with tf.device(DEVICE):
        gradients = [tf.constant(3.0), tf.constant([4.0])]
    assert weights.flatten_gradients(gradients, clip_norm=2.5).tolist() == [1.5, 2]

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def flat() -> Any:
        with tf.GradientTape() as tape:
            loss = 3 * variables[0] + tf.reduce_sum(4 * variables[1])
        return weights.flatten_gradients(tape.gradient(loss, variables))

    assert flat().numpy().tolist() == [3, 4]


def test_a_loss_is_a_function_of_the_vector(place: str) -> None:
    variables, weights = build(values_of("float32"), place)
    function = weights.value_and_gradient(
        lambda: tf.add_n([tf.reduce_sum(v * v) for v in variables])
    )
    for k in range(3):
        flat = np.full(weights.get_flat_size(), k + 1.0)
        loss, gradient = function(flat)
        assert loss == flat.size * (k + 1) ** 2
        assert same_bits(gradient, 2 * flat)
        assert same_bits(weights.get_flat(), flat.astype(np.float32))


# Modes, errors, lifetimes.


@pytest.mark.parametrize("kind", ["float32", "mixed", "many floats", "large"])
def test_a_session_moves_them(kind: str, place: str) -> None:
    values, devices = values_of(kind), PLACES[place]
    variables, feeds, fills = {}, {}, []
    with tf.Graph().as_default():
        for i, (name, value) in enumerate(values.items()):
            with tf.device(f"/{devices[i % len(devices)]}"):
                zeros = tf1.zeros_initializer()
                variables[name] = tf1.get_variable(name, value.shape, value.dtype, zeros)
                feeds[name] = tf1.placeholder(value.dtype, value.shape)
                fills.append(variables[name].assign(feeds[name]).op)
        first = variables["v0"]
        with tf.device(f"/{DEVICE}"):
            step = tf.group(
                *(
                    v.assign_add(tf.ones_like(v)).op
                    for v in variables.values()
                    if v.dtype == "float"
                )
            )
        initialize = tf1.global_variables_initializer()
        config = tf1.ConfigProto(allow_soft_placement=True)
        config.gpu_options.allow_growth = True
        session = tf1.Session(config=config)
        weights = TensorFlowVariables(list(variables.values()), session)
        if len(values) < 100:  # each variable takes a run of the session
            with pytest.raises(RuntimeError, match="got uninitialized: 'v0'"):
                weights.get_weights()
        session.run(initialize)
        session.run(fills, {feeds[name]: value for name, value in values.items()})
        dtype = weights.layout.dtype
        assert same_bits(weights.get_flat(), flat_of(values, dtype))
        for seed in range(1, 4):
            values = values_of(kind, seed)
            weights.set_flat(flat_of(values, dtype))
            read = session.run(variables)
            assert all(same_bits(np.asarray(read[name]), values[name]) for name in values)
            session.run(step)
            values = {n: v + 1 if v.dtype == np.float32 else v for n, v in values.items()}
            values = {n: np.asarray(v) for n, v in values.items()}
            named = weights.get_weights()
            assert all(same_bits(named[name], values[name]) for name in values)
            part = dict(list(values_of(kind, seed + 10).items())[::2])
            weights.set_weights(part)
            assert same_bits(weights.get_flat(), flat_of(values | part, dtype))
            values = values_of(kind, seed)
            weights.set_flat(flat_of(values, np.float64))
            weights.add_flat(flat_of(values, np.float64))
            weights.lerp_flat(flat_of(values, np.float64), 0.5)
            expected = values["v0"] + values["v0"] / 2
            assert same_bits(session.run(first), expected.astype(values["v0"].dtype))
        session.run(initialize)
        assert not weights.get_flat().any()
        session.close()


def test_an_uninitialized_variable_is_named_and_a_set_initializes_it(place: str) -> None:
    devices = PLACES[place]
    with tf.device(DEVICE):
        known = tf.Variable([1.0, 2.0], name="known")
    with tf.device(devices[-1]):
        unknown = UninitializedVariable(shape=[3], dtype=tf.float32, name="u")
    weights = TensorFlowVariables([known, unknown])
    calls: list[Callable[[], Any]] = [
        weights.get_flat,
        weights.get_weights,
        lambda: weights.add_flat(np.ones(5)),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="got uninitialized: 'u';"):
            call()
    assert known.numpy().tolist() == [1, 2]
    weights.set_flat(np.arange(5.0))
    assert known.numpy().tolist() == [0, 1]
    assert unknown.numpy().tolist() == [2, 3, 4]
    assert weights.get_flat().tolist() == [0, 1, 2, 3, 4]


def test_a_variable_that_was_destroyed_is_made_anew(place: str, path: str) -> None:
    with tf.device(DEVICE):
        a = shared_variable(f"a, {place}, {path}", on_device([1.0, 2.0]))
    with tf.device(PLACES[place][-1]):
        b = tf.Variable([3.0], name="b")
    weights = TensorFlowVariables([a, b])
    assert weights.get_flat().tolist() == [1, 2, 3]
    for k in range(3):
        tf.raw_ops.DestroyResourceOp(resource=a.handle)
        with pytest.raises(RuntimeError, match="a"):
            weights.get_flat()
        tf.raw_ops.AssignVariableOp(resource=a.handle, value=on_device([k, k + 1.0]))
        assert weights.get_flat().tolist() == [k, k + 1, 3]
        weights.set_flat([7, 8, 3])
        assert a.numpy().tolist() == [7, 8]
        assert b.numpy().tolist() == [3]
    tf.raw_ops.DestroyResourceOp(resource=a.handle)
    weights.set_flat([4, 5, 6])
    assert weights.get_flat().tolist() == [4, 5, 6]
    assert a.numpy().tolist() == [4, 5]


def test_variables_live_as_long_as_what_moves_them(place: str) -> None:
    values = values_of("many floats")
    variables, weights = build(values, place)
    variables.clear()
    gc.collect()
    others, _ = build(values_of("many floats", 1), place)  # would take memory that was freed
    assert same_bits(weights.get_flat(), flat_of(values, np.float32))
    del others


def test_variables_are_let_go(place: str) -> None:
    def construct() -> Any:
        variables, weights = build(values_of("large"), place)
        weights.set_flat(weights.get_flat())
        weights.add_flat(weights.get_flat())
        return weakref.ref(variables[1])

    for _ in range(3):
        gone = construct()
        gc.collect()
        assert gone() is None


def test_a_model_may_be_let_go_while_its_steps_still_run(place: str) -> None:
    for k in range(3):
        (w, _), weights = build({"w": pattern(), "b": np.zeros(3, np.float32)}, place)
        train = trainer(w)
        weights.set_flat(np.full(weights.get_flat_size(), k, np.float32))
        train(on_device(pattern(1)))
        value = w.read_value()
        weights.set_flat(np.zeros(weights.get_flat_size(), np.float32))
        del w, weights, train, _
        gc.collect()
        assert same_bits(value.numpy(), np.float32(k) + STEPS * pattern(1))


# Threads.


@pytest.mark.parametrize("size", [1000, 500_000])
def test_a_get_sees_all_or_nothing_of_a_set(size: int, place: str) -> None:
    values = {f"v{i}": np.zeros(size + i, np.float32) for i in range(5)}
    variables, weights = build(values, place)
    total, rounds = weights.get_flat_size(), 60
    errors: list[BaseException] = []
    start, done = threading.Barrier(3), threading.Event()

    def watched(work: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            start.wait()
            try:
                work()
            except BaseException as error:
                errors.append(error)

        return run

    def set_constants() -> None:
        try:
            for k in range(rounds):
                weights.set_flat(np.full(total, k % 2 + 1, np.float32))
        finally:
            done.set()

    def get() -> None:
        out, seen = np.empty(total, np.float32), set()
        while not done.is_set():
            flat = weights.get_flat(out)
            assert flat.min() == flat.max(), np.unique(flat).tolist()
            seen.add(float(flat[0]))
        assert seen <= {0.0, 1.0, 2.0}

    works = [set_constants, get, get]
    threads = [threading.Thread(target=watched(work)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not errors, errors
    assert set(weights.get_flat()) == {(rounds - 1) % 2 + 1}
    assert all(set(v.numpy()) == {(rounds - 1) % 2 + 1} for v in variables)


def test_two_threads_that_add_lose_nothing(place: str) -> None:
    values = {f"v{i}": np.zeros(1000 + i, np.float32) for i in range(5)}
    _, weights = build(values, place)
    one = np.ones(weights.get_flat_size(), np.float32)

    def add() -> None:
        for _ in range(40):
            weights.add_flat(one)

    threads = [threading.Thread(target=add) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert set(weights.get_flat()) == {80}


# Processes.


@only_bound  # TensorFlow's operations may wait for ever there
def test_a_fork_gets_an_error(place: str, path: str) -> None:
    _, weights = build(values_of("float32"), place)
    weights.get_flat()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            weights.get_flat()
        except RuntimeError as error:
            status = 0 if "NVIDIA's driver" in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    weights.set_flat(np.zeros(weights.get_flat_size(), np.float32))
