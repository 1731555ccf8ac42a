"""`share=True`: variables that alias read-only memory."""

import gc
import mmap
import pickle
import tempfile
import textwrap
import threading
import time
import weakref
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from reference import read_only, refuses, same_bits
from tf_forks import Forks
from tf_models import (
    build_eager,
    build_graph,
    mixed_values,
    mostly_bound,
    only_bound,
    random_values,
    some_slow,
)

from flatweights import FlatWeights, flatten
from flatweights.tensorflow import TensorFlowVariables

tf1 = tf.compat.v1


def frozen(values: Any, shift: Any = 0) -> Any:
    """A frozen copy that begins ``shift`` bytes after a 64-byte boundary, as a view."""
    values = np.asarray(values)
    room = np.zeros(values.nbytes + 128, np.uint8)
    start = -room.ctypes.data % 64 + shift
    view = room[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    view[...] = values
    room.setflags(write=False)
    view.setflags(write=False)
    return view


def frozen_weights(values: Any) -> Any:
    """`FlatWeights` as `ray.get` gives them."""
    weights = FlatWeights(values)
    return FlatWeights.wrap(frozen(weights.buffer), weights.layout)


def address(variable: Any) -> Any:
    """The address of a variable's value."""
    return np.asarray(memoryview(variable.value())).ctypes.data


def aliases(variable: Any, array: Any) -> Any:
    """Whether the variable's value lies within ``array``."""
    return 0 <= address(variable) - array.ctypes.data < array.nbytes


def is_gone(alive: Any) -> Any:
    """Whether the object of ``alive`` dies soon, without another call to flatweights."""
    for _ in range(200):
        gc.collect(0)
        if alive() is None:
            return True
        time.sleep(0.001)
    return False


def watched(size: Any = 32) -> Any:
    """A vector that may be shared, and whether its memory is alive."""
    flat = frozen(np.arange(1, size + 1, dtype=np.float32))
    return flat, weakref.ref(flat.base)


def in_thread(work: Any) -> None:
    """Call ``work`` in a thread that ends with it."""
    errors = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


# Values are right, on both paths.


@pytest.mark.parametrize("values", [random_values, mixed_values])
def test_shared_weights_are_the_models(build: Any, values: Any) -> None:
    model = build(values(0))
    some = dict(list(values(1).items())[::2])
    model.weights.set_weights({name: frozen(value) for name, value in some.items()}, share=True)
    for name, value in model.read().items():
        np.testing.assert_array_equal(value, (values(0) | some)[name], strict=True)
    wanted = values(2)
    model.weights.set_weights(frozen_weights(wanted), share=True)
    for name, value in model.read().items():
        np.testing.assert_array_equal(value, wanted[name], strict=True)
    assert model.weights.get_weights().buffer.tobytes() == FlatWeights(wanted).buffer.tobytes()
    shared = {name for name, yes in model.weights.shared.items() if yes}
    assert model.weights.shared.keys() == model.weights.variables.keys()
    assert shared == {n for n, v in wanted.items() if v.size} - set(model.weights.unbound)


@pytest.mark.parametrize("shift", [0, 4])
def test_a_shared_vector_is_the_models(build: Any, shift: Any) -> None:
    model = build(random_values(0))
    flat = frozen(np.arange(model.weights.get_flat_size(), dtype=np.float32), shift)
    model.weights.set_flat(flat, share=True)
    assert same_bits(model.weights.get_flat(), flat)
    read = np.concatenate([np.asarray(v).reshape(-1) for v in model.read().values()])
    assert same_bits(read, flat)


@pytest.mark.parametrize("source", [np.float64, np.float16, np.int32])
def test_what_has_another_dtype_is_converted(build: Any, source: Any) -> None:
    model = build(random_values())
    wanted = {name: frozen(np.full(v.shape, 3, source)) for name, v in model.read().items()}
    model.weights.set_weights(wanted, share=True)
    assert set(model.weights.get_flat()) == {3}
    model.weights.set_flat(frozen(np.full(model.weights.get_flat_size(), 5, source)), share=True)
    for value in model.read().values():
        np.testing.assert_array_equal(value, np.full_like(value, 5))
    integers = build({"step": np.int64(0), "count": np.zeros(3, np.int32)})
    wanted = {"step": frozen(source(2)), "count": frozen(source([4, 5, 6]))}
    integers.weights.set_weights(wanted, share=True)
    assert [v.tolist() for v in integers.weights.get_weights().values()] == [2, [4, 5, 6]]


# Aliased values.


@only_bound
def test_all_of_a_packed_buffer_is_aliased(path: Any) -> None:
    model = build_eager({n: v for n, v in mixed_values().items() if n != "brain"})
    shared = frozen_weights(model.read())
    model.weights.set_weights(shared, share=True)
    assert model.weights.unbound == {}
    for name, variable in model.weights.variables.items():
        assert address(variable) == shared[name].ctypes.data


@only_bound
def test_aligned_slots_of_a_vector_are_aliased_and_others_copied(path: Any) -> None:
    variables = [tf.Variable(tf.zeros(n)) for n in (16, 15, 1, 32, 1, 3)]
    weights = TensorFlowVariables(variables)
    flat = frozen(np.arange(68, dtype=np.float32))
    weights.set_flat(flat, share=True)
    assert weights.unbound == {}
    assert [aliases(v, flat) for v in variables] == [True, True, False, True, True, False]
    assert address(variables[4]) == flat[64:].ctypes.data
    assert same_bits(weights.get_flat(), flat)


@only_bound
@pytest.mark.parametrize(
    ("shift", "dtype"), [(4, "float32"), (32, "float32"), (60, "float32"), (0, "float64")]
)
def test_a_vector_that_is_shifted_or_of_another_dtype_is_neither_aliased_nor_kept(
    path: Any, shift: int, dtype: str
) -> None:
    variables = [tf.Variable(tf.zeros(16)), tf.Variable(tf.zeros(16))]
    flat = frozen(np.arange(32, dtype=dtype), shift)
    alive = weakref.ref(flat.base)
    TensorFlowVariables(variables).set_flat(flat, share=True)
    assert not any(aliases(v, flat) for v in variables)
    del flat
    assert is_gone(alive)
    assert np.concatenate([v.numpy() for v in variables]).tolist() == list(range(32))


@only_bound
def test_each_array_of_a_dict_is_aliased_alone(path: Any) -> None:
    a, b, c = (tf.Variable(tf.zeros((4, 8)), name=name) for name in "abc")
    weights = TensorFlowVariables([a, b, c])
    given = {
        "c": frozen(np.full((4, 8), 3, np.float32)),
        "a": frozen(np.full((4, 8), 1, np.float32)),
        "b": frozen(np.full((8, 4), 2, np.float32)).T,  # not contiguous
    }
    weights.set_weights(given, share=True)
    assert address(a) == given["a"].ctypes.data
    assert address(c) == given["c"].ctypes.data
    assert not aliases(b, given["b"].T)
    assert weights.get_flat().tolist() == [1] * 32 + [2] * 32 + [3] * 32


@only_bound
@pytest.mark.parametrize(
    "switch",
    [
        lambda v: tf.gather(v, [0]),
        lambda v: tf.nn.embedding_lookup(v, [1]),
        lambda v: v[0].assign(v[0]),
        lambda v: v.scatter_nd_update([[0]], [[0.0] * 16]),
        lambda v: None,
    ],
    ids=["gather", "lookup", "slice", "scatter", "nothing yet"],
)
def test_what_tensorflow_writes_to_in_place_is_not_aliased(path: Any, switch: Any) -> None:
    v, dense = tf.Variable(tf.zeros((2, 16))), tf.Variable(tf.zeros((2, 16)))
    switch(v)
    flat = frozen(np.arange(64, dtype=np.float32))
    before = flat.tobytes()
    weights = TensorFlowVariables([v, dense])
    for _ in range(2):
        weights.set_flat(flat, share=True)
        # Reading such a variable copies, so the address of its value shows nothing; its writes do.
        v.scatter_nd_add([[0], [1]], tf.ones((2, 16)))
        assert v.numpy().tolist() == (flat[:32].reshape(2, 16) + 1).tolist()
        assert aliases(dense, flat)
        assert flat.tobytes() == before


@only_bound
def test_models_tell_what_they_share(path: Any) -> None:
    variables = [tf.Variable(tf.zeros(n), name=f"v{n}") for n in (16, 15, 32)]
    weights = TensorFlowVariables(variables)
    assert weights.shared == {"v16": False, "v15": False, "v32": False}
    flat = frozen(np.arange(63, dtype=np.float32))
    weights.set_flat(flat, share=True)
    assert weights.shared == {"v16": True, "v15": True, "v32": False}
    variables[0].assign_add(tf.ones(16))
    assert weights.shared == {"v16": False, "v15": True, "v32": False}
    weights.set_flat(flat)
    assert not any(weights.shared.values())
    variables[0].assign(tf.reshape(frozen_tensor(), [16]))
    assert not any(weights.shared.values()), "not what a set gave it"


def frozen_tensor() -> Any:
    return tf.experimental.dlpack.from_dlpack(tf.experimental.dlpack.to_dlpack(tf.ones(16)))


# How long the owner lives.


@only_bound
def test_one_variable_is_enough_to_keep_the_memory_alive(path: Any) -> None:
    variables = [tf.Variable(tf.zeros(16)) for _ in range(2)]
    weights = TensorFlowVariables(variables)
    flat, alive = watched()
    weights.set_flat(flat, share=True)
    del flat
    for _ in range(5):
        gc.collect()
        np.zeros(64).fill(-1)  # would take memory that was freed
    assert weights.get_flat().tolist() == list(range(1, 33))
    variables[0].assign(tf.zeros(16))
    assert not is_gone(alive)
    assert variables[1].numpy().tolist() == list(range(17, 33))
    variables[1].assign(tf.zeros(16))
    assert is_gone(alive)


@only_bound
@pytest.mark.parametrize("read", [lambda v: v.value(), lambda v: v[1:]], ids=["value", "slice"])
def test_what_was_read_keeps_the_memory_alive(path: Any, read: Any) -> None:
    v = tf.Variable(tf.zeros((2, 16)))
    flat, alive = watched()
    TensorFlowVariables(v).set_flat(flat, share=True)
    piece = read(v)
    del flat, v
    assert not is_gone(alive)
    assert piece[-1].numpy().tolist() == list(range(17, 33))
    piece = piece[:, :1]  # a copy
    assert is_gone(alive)


@only_bound
def test_a_slice_that_a_function_used_keeps_nothing(path: Any) -> None:
    v = tf.Variable(tf.zeros((2, 16)))
    weights = TensorFlowVariables(v)

    @tf.function(autograph=False)
    def step() -> Any:
        old = v[:1]
        v.assign_add(tf.ones((2, 16)))
        return tf.reduce_sum(v[:1] - old)

    for _ in range(3):
        flat, alive = watched()
        weights.set_flat(flat, share=True)
        del flat
        assert step().numpy() == 16
        assert is_gone(alive)


@only_bound
def test_what_was_converted_for_integers_lives_as_long_as_they_do(path: Any) -> None:
    """Their values come from a vector of floats, in new arrays, some of them aligned."""
    integers = [tf.Variable(tf.zeros(8, tf.int64), name=f"i{k}") for k in range(64)]
    weights = TensorFlowVariables([tf.Variable(tf.zeros(64)), *integers])
    wanted = frozen(np.arange(weights.get_flat_size(), dtype=np.float64))
    for values in (wanted, frozen(wanted.astype(np.float32))):
        weights.set_flat(values, share=True)
        others = [np.full(8, -1, np.int64) for _ in range(1000)]
        assert weights.get_flat().tolist() == values.tolist()
        del others


RELEASES = {
    "assign": lambda v, w: v.assign(tf.zeros(32)),
    "assign_add": lambda v, w: v.assign_add(tf.ones(32)),
    "optimizer": lambda v, w: tf_keras.optimizers.SGD(0.5).apply_gradients([(tf.ones(32), v)]),
    "set_flat": lambda v, w: w.set_flat(np.zeros(32, np.float32)),
    "set_flat, converted": lambda v, w: w.set_flat(np.zeros(32)),
    "set_weights": lambda v, w: w.set_weights({w.layout.names[0]: np.zeros(32)}),
    "set_flat, shared": lambda v, w: w.set_flat(frozen(np.zeros(32, np.float32)), share=True),
    "add_flat": lambda v, w: w.add_flat(np.ones(32, np.float32)),
    "lerp_flat": lambda v, w: w.lerp_flat(np.ones(32, np.float32), 0.5),
    "scatter": lambda v, w: v.scatter_nd_update([[0]], [1.0]),
    "function": lambda v, w: tf.function(lambda: v.assign_add(tf.ones(32)), autograph=False)(),
}


@only_bound
@pytest.mark.parametrize("thread", [lambda work: work(), in_thread], ids=["here", "in a thread"])
@pytest.mark.parametrize("release", RELEASES)
def test_the_memory_is_let_go_when_the_variable_changes(
    path: Any, release: Any, thread: Any
) -> None:
    v = tf.Variable(tf.zeros(32))
    weights = TensorFlowVariables(v)
    flat, alive = watched()
    weights.set_flat(flat, share=True)
    del flat

    def work() -> None:
        RELEASES[release](v, weights)
        assert is_gone(alive), "also while the main thread waits"

    thread(work)
    assert same_bits(weights.get_flat(), v.numpy())


@only_bound
def test_a_training_step_lets_the_memory_go(path: Any) -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8)])
    model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=False, jit_compile=False)
    weights = TensorFlowVariables(model)
    shared = frozen_weights(weights.get_weights())
    before, alive = shared.buffer.tobytes(), weakref.ref(shared.buffer.base)
    weights.set_weights(shared, share=True)
    assert all(aliases(v.value, shared.buffer) for v in model.variables)
    model.train_on_batch(np.ones((2, 4)), np.ones((2, 8)))
    assert not any(aliases(v.value, shared.buffer) for v in model.variables)
    assert shared.buffer.tobytes() == before
    del shared
    assert is_gone(alive)


@only_bound
@pytest.mark.parametrize("thread", [lambda work: work(), in_thread], ids=["here", "in a thread"])
def test_the_memory_is_let_go_when_the_variable_dies(path: Any, thread: Any) -> None:
    held = [tf.Variable(tf.zeros(32))]
    held.append(TensorFlowVariables(held[0]))
    flat, alive = watched()
    held[1].set_flat(flat, share=True)
    del flat
    del held[1]
    assert not is_gone(alive), "the variable needs no TensorFlowVariables"
    thread(held.clear)
    assert is_gone(alive)


@only_bound
def test_the_memory_is_let_go_when_the_session_is_closed(path: Any) -> None:
    model = build_graph({"a": np.zeros(32, np.float32)})
    flat, alive = watched()
    model.weights.set_flat(flat, share=True)
    assert model.weights.unbound == {}
    del flat
    assert not is_gone(alive)
    assert model.read()["a"].tolist() == list(range(1, 33))
    model.weights.sess.close()
    del model
    gc.collect()
    assert is_gone(alive)


@only_bound
def test_many_rounds_keep_nothing(path: Any) -> None:
    variables = [tf.Variable(tf.zeros(64)) for _ in range(8)]
    weights = TensorFlowVariables(variables)
    step = tf.function(lambda: assign_adds(variables), autograph=False)
    alive = []
    for k in range(100):
        flat = frozen(np.full(512, k, np.float32))
        alive.append(weakref.ref(flat.base))
        weights.set_flat(flat, share=True)
        if k % 3 == 0:
            in_thread(step)
    del flat
    weights.set_flat(np.zeros(512, np.float32))
    assert all(map(is_gone, alive))


@only_bound
def test_a_set_that_is_refused_half_way_shares_and_keeps_nothing(path: Any) -> None:
    variables = [tf.Variable(tf.zeros(32)) for _ in range(3)]
    weights = TensorFlowVariables(variables)
    tf.raw_ops.AssignVariableOp(resource=variables[1].handle, value=tf.zeros(5))
    flat, alive = watched(96)
    with pytest.raises(ValueError, match=r"slot 1 .* expected float32 \(32,\), got float32 \(5,\)"):
        weights.set_flat(flat, share=True)
    assert not aliases(variables[0], flat)
    assert not aliases(variables[2], flat)
    del flat
    assert is_gone(alive)


# TensorFlow never writes into shared memory.


PIECES = {
    "slice": lambda v: v[:32],
    "slice of a slice": lambda v: v[:48][:32],
    "unstack": lambda v: tf.unstack(v)[3],
    "split": lambda v: tf.split(v, 2)[1],
    "reshaped": lambda v: tf.reshape(v[:32], [-1]),
    "bitcast": lambda v: tf.bitcast(tf.bitcast(v[:32], tf.int32), tf.float32),
}


@mostly_bound
@pytest.mark.parametrize("piece", some_slow(PIECES, "slice", "unstack", "bitcast"))
def test_a_piece_that_outlives_the_value_is_not_computed_in_place(piece: Any) -> None:
    v = tf.Variable(tf.zeros((64, 64)))
    flat = frozen(np.ones(64 * 64, np.float32))
    weights = TensorFlowVariables(v)

    @tf.function(autograph=False)
    def step(change: Any) -> Any:
        old = piece(v)
        v.assign_sub(change)
        return tf.reduce_max(tf.abs(old - piece(v)))

    for _ in range(2):
        weights.set_flat(flat, share=True)
        assert step(tf.fill((64, 64), 3.0)).numpy() == 3
        assert set(flat) == {1}


@mostly_bound
@pytest.mark.parametrize("piece", PIECES.values(), ids=PIECES)
def test_a_variable_that_was_assigned_a_piece_is_not_updated_in_place(piece: Any) -> None:
    v = tf.Variable(tf.zeros((64, 64)))
    other = tf.Variable(piece(v), shape=tf.TensorShape(None))
    flat = frozen(np.ones(64 * 64, np.float32))
    TensorFlowVariables(v).set_flat(flat, share=True)
    other.assign(piece(v))
    v.assign_add(tf.ones((64, 64)))
    other.assign_add(tf.ones_like(other))
    assert set(other.numpy().flat) == {2}
    assert set(flat) == {1}


@only_bound
def test_a_variable_that_was_assigned_a_piece_is_set_apart(path: Any) -> None:
    v, other = tf.Variable(tf.zeros((64, 64))), tf.Variable(tf.zeros((32, 64)), name="other")
    flat = frozen(np.ones(64 * 64, np.float32))
    weights, others = TensorFlowVariables(v), TensorFlowVariables(other)
    for write in (
        lambda: others.set_flat(np.full(32 * 64, 5, np.float32)),
        lambda: others.add_flat(np.full(32 * 64, 4, np.float32)),
        lambda: others.lerp_flat(np.full(32 * 64, 5, np.float32), 1),
    ):
        weights.set_flat(flat, share=True)
        other.assign(v[:32])
        assert others.shared == {"other": True}
        weights.set_flat(np.zeros(64 * 64, np.float32))
        write()
        assert set(other.numpy().flat) == {5}
        assert set(flat) == {1}


@mostly_bound
def test_pieces_in_one_thread_beside_sets_in_another() -> None:
    v = tf.Variable(tf.zeros((64, 64)))
    weights = TensorFlowVariables(v)
    memory = [frozen(np.full(64 * 64, k + 1, np.float32)) for k in range(8)]
    weights.set_flat(memory[0], share=True)
    stop, seen = threading.Event(), []

    @tf.function(autograph=False)
    def compute() -> Any:
        piece = v[:32]
        with tf.control_dependencies([piece]):
            busy = tf.reduce_sum(tf.random.normal((100, 100)))  # until the variable has moved on
        with tf.control_dependencies([busy]):
            return tf.nn.relu(tf.ones((32, 64)) + piece)

    def run() -> None:
        while not stop.is_set():
            seen.append(compute().numpy())

    compute()
    thread = threading.Thread(target=run)
    thread.start()
    k = 0
    while len(seen) < 20 and thread.is_alive():
        weights.set_flat(memory[k % 8], share=True)
        k += 1
    stop.set()
    thread.join()
    assert all(set(flat) == {k + 1} for k, flat in enumerate(memory))
    assert all(len(set(value.flat)) == 1 and 2 <= value.flat[0] <= 9 for value in seen)


def tf_function(jit: Any) -> Any:
    def update(variables: Any) -> None:
        @tf.function(autograph=False, jit_compile=jit)
        def run() -> None:
            for v in variables:
                v.assign(v * 2 + 1)
                v.assign_add(tf.ones_like(v))

        run()
        run()

    return update


def optimizer(make: Any, apply: Any) -> Any:
    def update(variables: Any) -> None:
        tuned = make()
        for k in range(2):
            apply(tuned, [tf.fill(v.shape, k + 1.0) for v in variables], variables)

    return update


def keras3(make: Any) -> Any:
    return optimizer(make, lambda o, grads, variables: o.apply(grads, variables))


def legacy(make: Any) -> Any:
    return optimizer(make, lambda o, grads, vs: o.apply_gradients(zip(grads, vs, strict=True)))


def assign_adds(variables: Any) -> None:
    for v in variables:
        v.assign_add(tf.ones_like(v))
        v.assign_sub(tf.ones_like(v) * 3)


def assigns_of_one_to_the_other(variables: Any) -> None:
    variables[0].assign(variables[1])  # both have one buffer now
    for v in variables[:2]:
        v.assign_add(tf.ones_like(v))


def slices(variables: Any) -> None:
    for v in variables:
        v[0].assign(v[1] + 1)
        v[1:].assign(v[:-1] * 2)


def scatters(variables: Any) -> None:
    for v in variables:
        v.scatter_nd_update([[0], [2]], tf.fill((2, *v.shape[1:]), 7.0))
        v.scatter_nd_add([[0], [2]], tf.fill((2, *v.shape[1:]), 7.0))


def gathers_then_scatters(variables: Any) -> None:
    for v in variables:
        tf.gather(v, [0])
        v.scatter_nd_sub([[0], [2]], tf.fill((2, *v.shape[1:]), 7.0))
        v.assign_add(tf.ones_like(v))


def sparse_gradients(make: Any) -> Any:
    def update(variables: Any) -> None:
        tuned = make()
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(tf.gather(v, [0, 2]) * 2) for v in variables])
            grads = tape.gradient(loss, variables)
            assert all(isinstance(g, tf.IndexedSlices) for g in grads)
            tuned.apply_gradients(zip(grads, variables, strict=True))

    return update


def raw_momentum(variables: Any) -> None:
    for v, accum in (variables[:2], variables[1::-1]):
        tf.raw_ops.ResourceApplyMomentum(
            var=v.handle,
            accum=accum.handle,
            lr=0.5,
            grad=tf.ones_like(v),
            momentum=0.5,
            use_locking=True,
        )


UPDATES = {
    "assign_add": assign_adds,
    "assign from another": assigns_of_one_to_the_other,
    "function": tf_function(jit=None),
    "XLA": tf_function(jit=True),
    "slices": slices,
    "scatters": scatters,
    "gathers, then scatters": gathers_then_scatters,
    "momentum, by operation": raw_momentum,
    "Keras SGD": keras3(lambda: keras.optimizers.SGD(0.5, momentum=0.9)),
    "Keras Adam": keras3(lambda: keras.optimizers.Adam(0.5)),
    "tf_keras SGD": legacy(lambda: tf_keras.optimizers.SGD(0.5, momentum=0.9)),
    "tf_keras Adam": legacy(lambda: tf_keras.optimizers.Adam(0.5)),
    "tf_keras Adam, compiled": legacy(lambda: tf_keras.optimizers.Adam(0.5, jit_compile=True)),
    "tf_keras SGD, old": legacy(lambda: tf_keras.optimizers.legacy.SGD(0.5, momentum=0.9)),
    "sparse SGD": sparse_gradients(lambda: tf_keras.optimizers.legacy.SGD(0.5, momentum=0.9)),
    "sparse Adam": sparse_gradients(lambda: tf_keras.optimizers.Adam(0.5)),
    "sparse Adagrad": sparse_gradients(lambda: tf_keras.optimizers.legacy.Adagrad(0.5)),
}


def ones(layout: Any) -> Any:
    return FlatWeights({slot.name: np.ones(slot.shape, slot.dtype) for slot in layout.slots})


def two_variables() -> Any:
    return [tf.Variable(tf.zeros((4, 16))) for _ in range(2)]


OFTEN = (
    *("assign_add", "assign from another", "function", "slices", "gathers, then scatters"),
    *("momentum, by operation", "Keras Adam", "tf_keras Adam", "sparse Adam"),
)


OF_THIS_PACKAGE = {
    "set_flat": lambda w: w.set_flat(np.full(128, 9, np.float32)),
    "set_flat, converted": lambda w: w.set_flat(np.full(128, 9.0)),
    "set_weights": lambda w: w.set_weights(ones(w.layout)),
    "subset": lambda w: w.set_weights({w.layout.names[0]: np.ones((4, 16))}),
    "add_flat": lambda w: w.add_flat(np.ones(128, np.float32), 2.0),
    "add_flat, converted": lambda w: w.add_flat(np.ones(128), 2.0),
    "lerp_flat": lambda w: w.lerp_flat(np.ones(128, np.float32), 0.5),
}


@mostly_bound
@pytest.mark.parametrize(
    ("is_ours", "update"),
    [
        *(
            pytest.param(False, *p.values, id=p.id, marks=p.marks)
            for p in some_slow(UPDATES, *OFTEN)
        ),
        *(pytest.param(True, update, id=name) for name, update in OF_THIS_PACKAGE.items()),
    ],
)
def test_tensorflow_and_this_package_copy_before_they_write(is_ours: bool, update: Any) -> None:
    values = np.linspace(1, 2, 128, dtype=np.float32)
    flat = frozen(values)
    shared, plain = two_variables(), two_variables()
    sharing, others = TensorFlowVariables(shared), TensorFlowVariables(plain)
    sharing.set_flat(flat, share=True)
    others.set_flat(values)
    for _ in range(2 if is_ours else 1):
        update(sharing if is_ours else shared)
        update(others if is_ours else plain)
        assert same_bits(flat, values)
        for a, b in zip(shared, plain, strict=True):
            assert same_bits(a.numpy(), b.numpy())
        assert not same_bits(sharing.get_flat(), values)


@mostly_bound
def test_slots_of_an_optimizer_are_shared_too() -> None:
    values, bits = [], []
    for share in (False, True):
        variables = [keras.Variable(tf.zeros((4, 16)), name=n) for n in "ab"]
        adam = keras.optimizers.Adam(0.5)
        adam.build(variables)
        weights = TensorFlowVariables([variables, adam.variables])
        source = frozen_weights(ones(weights.layout))
        values.append((source.buffer, source.buffer.tobytes()))
        weights.set_weights(source, share=share)
        for _ in range(3):
            adam.apply([tf.ones((4, 16))] * 2, variables)
        bits.append(weights.get_weights().buffer.tobytes())
    assert all(buffer.tobytes() == before for buffer, before in values)
    assert bits[0] == bits[1]


def test_the_state_of_a_generator_is_not_advanced_in_place() -> None:
    generator, twin = (tf.random.Generator.from_seed(7) for _ in range(2))
    state = frozen(generator.state.numpy())
    before = state.tobytes()
    TensorFlowVariables(generator.state).set_flat(state, share=True)
    assert same_bits(generator.normal([8]).numpy(), twin.normal([8]).numpy())
    generator.skip(3)
    twin.skip(3)
    assert same_bits(generator.normal([8]).numpy(), twin.normal([8]).numpy())
    assert state.tobytes() == before


def test_what_is_read_is_apart() -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(16)])
    weights = TensorFlowVariables(model)
    shared = frozen_weights(weights.get_weights())
    before = shared.buffer.tobytes()
    weights.set_weights(shared, share=True)
    for array in (*model.get_weights(), *(v.numpy() for v in model.variables), weights.get_flat()):
        array[...] = -1
    weights.get_weights().buffer[...] = 1
    for v in model.variables:
        tf.Variable(v).assign_add(tf.ones(v.shape))  # a variable whose first value is this one's
    assert shared.buffer.tobytes() == before
    assert weights.get_weights().buffer.tobytes() == before


@mostly_bound
@pytest.mark.parametrize(
    "kind", ["Adam", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("SGD", "momentum"))]
)
def test_sessions_copy_before_they_write(kind: Any) -> None:
    results = []
    values = np.linspace(1, 2, 64, dtype=np.float32)
    for share in (False, True):
        with tf.Graph().as_default():
            a, b = (tf1.get_variable(n, (2, 16), use_resource=True) for n in "ab")
            loss = tf.reduce_sum(tf.square(a) + b)
            train = {
                "SGD": lambda: tf1.train.GradientDescentOptimizer(0.5),
                "momentum": lambda: tf1.train.MomentumOptimizer(0.5, 0.9),
                "Adam": lambda: tf1.train.AdamOptimizer(0.5),
            }[kind]().minimize(loss)
            session = tf1.Session()
            session.run(tf1.global_variables_initializer())
            weights = TensorFlowVariables(None, session, [a, b])
            flat = frozen(values)
            weights.set_flat(flat, share=share)
            read = session.run(a)
            np.testing.assert_array_equal(read, flat[:32].reshape(2, 16))
            read.setflags(write=True)
            read[...] = -1  # fetched arrays belong to the caller
            for _ in range(3):
                session.run(train)
            assert same_bits(flat, values)
            results.append(weights.get_flat())
            assert not same_bits(results[-1], values)
    assert same_bits(*results)


# Refusals.


class Interface:
    """An object that shows only the address of its memory."""

    def __init__(self, array: Any, readonly: Any) -> None:
        self.array = array
        pointer = (array.ctypes.data, readonly)
        self.__array_interface__ = array.__array_interface__ | {"data": pointer}


class Exporter:
    """An array that is read-only by DLPack, as far as NumPy supports this."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.array.__dlpack__()  # of the old kind: NumPy makes a read-only array of it

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


def pooled() -> Any:
    """Memory of the package's own, frozen."""
    weights = FlatWeights({"v": vector()})
    weights.buffer.setflags(write=False)
    return weights.buffer.view(np.float32)[:16]


VIEWS: list[Any] = []


def pooled_vector(*, has_views: Any = False) -> Any:
    """A vector of the package's own, frozen."""
    flat = flatten([vector()])
    VIEWS[:] = [flat[:1]] if has_views else []
    flat.setflags(write=False)
    return flat


def mapped(access: Any) -> Any:
    with tempfile.TemporaryFile() as file:
        file.write(np.arange(16, dtype=np.float32).tobytes())
        file.flush()
        return mmap.mmap(file.fileno(), 64, access=access)


def vector() -> Any:
    return np.arange(16, dtype=np.float32)


def from_buffer(buffer: Any) -> Any:
    return np.frombuffer(buffer, np.float32)


WRITABLE = {
    "array": vector,
    "view of an array": lambda: read_only(vector()),
    "view of a view": lambda: read_only(read_only(vector())[:]),
    "frozen view of a part": lambda: read_only(np.zeros(20, np.float32)[2:18]),
    "strided view": lambda: np.lib.stride_tricks.as_strided(vector(), writeable=False),
    "strided view of a view": lambda: np.lib.stride_tricks.as_strided(read_only(vector())),
    "window": lambda: np.lib.stride_tricks.sliding_window_view(vector(), 16)[0],
    "broadcast view": lambda: np.broadcast_to(vector(), (16,)),
    "bytearray": lambda: from_buffer(bytearray(64)),
    "view of a bytearray": lambda: read_only(from_buffer(bytearray(64))),
    "memoryview": lambda: from_buffer(memoryview(bytearray(64))),
    "memoryview, read-only": lambda: from_buffer(memoryview(bytearray(64)).toreadonly()),
    "memoryview of an array": lambda: from_buffer(memoryview(vector()).toreadonly()),
    "memoryview of a view": lambda: from_buffer(memoryview(read_only(vector()))),
    "pickle buffer": lambda: from_buffer(pickle.PickleBuffer(read_only(vector()))),
    "mmap": lambda: read_only(from_buffer(mapped(mmap.ACCESS_WRITE))),
    "mmap, private": lambda: read_only(from_buffer(mapped(mmap.ACCESS_COPY))),
    "interface": lambda: np.asarray(Interface(vector(), readonly=False)),
    "view of an interface": lambda: read_only(np.asarray(Interface(vector(), readonly=False))),
    "interface that claims": lambda: np.asarray(Interface(vector(), readonly=True)),
    "interface of a frozen array": lambda: np.asarray(Interface(frozen(vector()), readonly=True)),
    "dlpack": lambda: read_only(np.from_dlpack(vector())),
    "dlpack of a frozen view": lambda: np.from_dlpack(Exporter(vector())),
    "vector of the pool with other views": lambda: pooled_vector(has_views=True),
    "list": lambda: vector().tolist(),
}

FROZEN = {
    "frozen array": lambda: frozen(vector()),
    "view of a frozen array": lambda: read_only(frozen(np.arange(20, dtype=np.float32))[:16]),
    "bytes": lambda: from_buffer(vector().tobytes()),
    "memoryview of bytes": lambda: from_buffer(memoryview(vector().tobytes())),
    "pickle buffer of bytes": lambda: from_buffer(pickle.PickleBuffer(vector().tobytes())),
    "mmap": lambda: from_buffer(mapped(mmap.ACCESS_READ)),
    "strided view of a frozen array": lambda: np.lib.stride_tricks.as_strided(frozen(vector())),
    "buffer of the pool": pooled,
    "vector of the pool": pooled_vector,
}


@mostly_bound
@pytest.mark.parametrize("what", WRITABLE)
def test_what_can_be_written_to_is_refused(what: Any) -> None:
    given = WRITABLE[what]()
    v = tf.Variable(tf.fill([16], 5.0), name="v")
    weights = TensorFlowVariables(v)
    with pytest.raises(ValueError, match="new_weights: to be shared, expected"):
        weights.set_flat(given, share=True)
    with pytest.raises(ValueError, match="slot 0 'v': to be shared, expected"):
        weights.set_weights({"v": given}, share=True)
    assert v.numpy().tolist() == [5.0] * 16


@mostly_bound
@pytest.mark.parametrize("what", FROZEN)
def test_what_nobody_can_write_to_is_shared(what: Any) -> None:
    v = tf.Variable(tf.fill([16], 5.0), name="v")
    weights = TensorFlowVariables(v)
    expected = FROZEN[what]().tolist()
    weights.set_flat(FROZEN[what](), share=True)
    gc.collect()
    assert v.numpy().tolist() == expected
    v.assign(tf.zeros(16))
    weights.set_weights({"v": FROZEN[what]()}, share=True)
    gc.collect()
    assert v.numpy().tolist() == expected


def test_refused_weights_and_vectors_change_nothing(build: Any) -> None:
    values = random_values()
    model = build(values)
    weights = FlatWeights(random_values(1))
    view = FlatWeights.wrap(read_only(weights.buffer), weights.layout)
    for given in (weights, view):
        with refuses(ValueError, "slot 0 .*: to be shared", weights.buffer):
            model.weights.set_weights(given, share=True)
    weights.buffer.setflags(write=False)
    assert weights["ones"].flags.writeable, "its parts can still be written to"
    with pytest.raises(ValueError, match="to be shared, expected"):
        model.weights.set_weights(weights, share=True)
    one_writable = {name: frozen(value + 1) for name, value in values.items()}
    one_writable["ones"] = values["ones"] + 1
    with pytest.raises(ValueError, match="slot 3 'ones': to be shared, expected"):
        model.weights.set_weights(one_writable, share=True)
    with pytest.raises(ValueError, match=r"new_weights: expected shape \(42,\), got \(48,\)"):
        model.weights.set_flat(frozen(np.zeros(48, np.float32)), share=True)
    for name, value in model.read().items():
        np.testing.assert_array_equal(value, values[name])


# Several variables over one buffer.


@only_bound
def test_one_buffer_is_shared_by_two_models_and_twice_in_one(path: Any) -> None:
    shared = frozen_weights(random_values(1))
    before = shared.buffer.tobytes()
    models = [build_eager(random_values(0)), build_eager(random_values(0))]
    for model in models:
        model.weights.set_weights(shared, share=True)
    kernels = [model.weights.variables["kernel"] for model in models]
    assert address(kernels[0]) == address(kernels[1]) == shared["kernel"].ctypes.data
    kernels[0].assign_add(tf.ones((7, 5)))
    assert same_bits(kernels[1].numpy(), np.array(shared["kernel"]))
    assert same_bits(kernels[0].numpy(), shared["kernel"] + 1)
    assert shared.buffer.tobytes() == before

    a, b = (tf.Variable(tf.zeros(16), name=n) for n in "ab")
    weights = TensorFlowVariables([a, b])
    one, alive = watched(16)
    before = one.tobytes()
    for _ in range(2):
        weights.set_weights({"a": one, "b": one}, share=True)
        assert address(a) == address(b) == one.ctypes.data
    a.assign_add(tf.ones(16))
    assert b.numpy().tolist() == one.tolist()
    assert a.numpy().tolist() == (one + 1).tolist()
    assert one.tobytes() == before
    del one
    b.assign(a)
    assert is_gone(alive)


@only_bound
def test_what_is_shared_may_be_set_to_where_it_is(path: Any) -> None:
    v = tf.Variable(tf.zeros(32))
    weights = TensorFlowVariables(v)
    flat, alive = watched()
    weights.set_flat(flat, share=True)
    weights.set_flat(flat)  # a copy of it, into memory of its own
    assert not aliases(v, flat)
    weights.set_flat(flat, share=True)
    weights.set_flat(flat, share=True)
    assert aliases(v, flat)
    weights.add_flat(flat)
    assert v.numpy().tolist() == [2 * x for x in range(1, 33)]
    assert flat.tolist() == list(range(1, 33))
    del flat
    assert is_gone(alive)


def test_a_value_that_was_read_is_shared() -> None:
    a, b = tf.Variable(tf.range(32.0)), tf.Variable(tf.zeros(32))
    value = a.numpy()
    value.setflags(write=False)
    TensorFlowVariables(b).set_flat(value, share=True)
    a.assign_add(tf.ones(32))
    b.assign_add(tf.ones(32) * 2)
    assert value.tolist() == list(range(32))
    assert a.numpy().tolist() == [x + 1 for x in range(32)]
    assert b.numpy().tolist() == [x + 2 for x in range(32)]


@only_bound
def test_assigning_a_variable_passes_the_memory_on(path: Any) -> None:
    a, b = tf.Variable(tf.zeros(32)), tf.Variable(tf.zeros(32))
    flat, alive = watched()
    before = flat.tobytes()
    TensorFlowVariables(a).set_flat(flat, share=True)
    b.assign(a)
    assert aliases(b, flat)
    del a
    TensorFlowVariables(b).add_flat(np.ones(32, np.float32))
    assert b.numpy().tolist() == list(range(2, 34))
    assert flat.tobytes() == before
    del flat
    assert is_gone(alive)


@only_bound
def test_numbers_and_nothing_are_shared(path: Any) -> None:
    number, none = tf.Variable(0.0), tf.Variable(tf.zeros((0, 3)))
    weights = TensorFlowVariables([none, number])
    flat = frozen(np.float32([7]))
    weights.set_flat(flat, share=True)
    assert aliases(number, flat)
    assert number.numpy() == 7
    assert none.shape == (0, 3)
    TensorFlowVariables(none).set_flat(frozen(np.zeros(0, np.float32)), share=True)
    number.assign_add(1)
    assert flat.tolist() == [7]


# The end of the process.

END = """
import faulthandler
faulthandler.enable()
import os
import sys
import threading
import numpy as np
import tensorflow as tf
from flatweights.tensorflow import TensorFlowVariables

def frozen(n):
    flat = np.arange(n, dtype=np.float32)
    room = np.zeros(4 * n + 64, np.uint8)
    start = -room.ctypes.data % 64
    view = room[start:start + 4 * n].view(np.float32)
    view[...] = np.arange(n)
    room.setflags(write=False)
    view.setflags(write=False)
    return view

tf1 = tf.compat.v1
variables = [tf.Variable(tf.zeros(1000)) for _ in range(3)]
weights = TensorFlowVariables(variables)
weights.set_flat(frozen(3000), share=True)
with tf.Graph().as_default():
    a = tf1.get_variable("a", (1000,), use_resource=True)
    session = tf1.Session()
    session.run(a.initializer)
    in_session = TensorFlowVariables(a, session)
    in_session.set_flat(frozen(1000), share=True)
step = tf.function(lambda: variables[0].assign_add(tf.ones(1000)), autograph=False)
thread = threading.Thread(target=step)
thread.start()
thread.join()
assert weights.unbound == in_session.unbound == {}
print(int(weights.get_flat()[-1]), int(in_session.get_flat()[-1]))
"""
# Flush, or the child would have a copy of the unwritten output.
FORK = "sys.stdout.flush()\nis_child = os.fork() == 0\nif not is_child: os.wait()\n"
KEEP = (
    "sys.modules['kept'] = [weights, in_session, variables, session, variables[1][:500]]\n"
    "variables[1].assign(tf.zeros(1000))\n"
)
DELETE = "variables.clear(); del weights\n"
ENDS = {
    "falls off": "",
    "exits": "sys.exit(0)",
    "kept": KEEP,
    "forked": f"{FORK}if not is_child: sys.exit(0)\n{DELETE}",
    "forked and kept": f"{FORK}if is_child:\n    {DELETE}    raise SystemExit\n{KEEP}",
}


@only_bound
@pytest.mark.parametrize("end", some_slow(ENDS, "forked and kept"))
def test_processes_end_while_variables_alias(path: Any, end: Any, forks: Forks) -> None:
    done = forks.run(textwrap.dedent(END) + end)
    assert (done.returncode, done.stdout.strip()) == (0, "2999 999"), done.stderr
    for word in ("Traceback", "Fatal", "Segmentation", "Abort", "terminate called"):
        assert word not in done.stderr
