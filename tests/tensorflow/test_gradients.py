"""flatten_gradients and apply_flat_gradients, against loops over the variables."""

import functools
import gc
import itertools
import threading
import traceback
import weakref
from typing import Any

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from reference import least_growth
from tensorflow.python.framework.indexed_slices import IndexedSlicesValue
from tf_forks import Forks

import flatweights as fw
from flatweights import _core
from flatweights.tensorflow import TensorFlowVariables, _gradients

# The way of moving weights is not tested here: once is enough.
pytestmark = pytest.mark.parametrize("path", ["bound"], indirect=True)

tf1 = tf.compat.v1


def concatenated(gradients: Any, dtype: Any = np.float32) -> Any:
    return np.concatenate([np.asarray(g, dtype).reshape(-1) for g in gradients])


def dense_model(seed: Any = 0, **kwargs: Any) -> Any:
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(5, activation="tanh", **kwargs),
            layers.BatchNormalization(**kwargs),
            layers.Dropout(0.5, **kwargs),
            layers.Dense(2, **kwargs),
        ]
    )


def normalised_model(**kwargs: Any) -> Any:
    """A smaller model, with variables that are not trained."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.BatchNormalization(**kwargs), keras.layers.Dense(2, **kwargs)]
    return keras.Sequential([keras.Input((4,)), *layers])


def gradients_of(model: Any, inputs: Any = None) -> Any:
    x = (
        np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
        if inputs is None
        else inputs
    )
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x, training=True)))
    return tape.gradient(loss, [v.value for v in model.trainable_variables])


@functools.cache
def given() -> Any:
    """A model and gradients, for tests that change neither."""
    model = dense_model()
    return model, gradients_of(model)


def random_gradients(variables: Any, seed: Any = 1, scale: Any = 1.0) -> Any:
    rng = np.random.default_rng(seed)
    return [(scale * rng.normal(size=v.shape)).astype(np.float32) for v in variables]


# Flattening


def test_a_gradient_for_each_trainable_variable_and_zeros_for_others_at_their_places() -> None:
    model, gradients = given()
    trained = TensorFlowVariables(model, trainable_only=True)
    flat = trained.flatten_gradients(gradients)
    np.testing.assert_array_equal(flat, concatenated(gradients), strict=True)
    assert np.abs(flat).max() > 0

    @functools.partial(tf.function, autograph=False)
    def inside() -> Any:
        gradients = gradients_of(model)
        return gradients, trained.flatten_gradients(gradients)

    of_function, flat = inside()
    np.testing.assert_array_equal(flat, concatenated(of_function))
    weights = TensorFlowVariables(model)
    by_variable = {id(v): g for v, g in zip(model.trainable_variables, gradients, strict=True)}
    expected = np.concatenate(
        [
            np.asarray(by_variable.get(id(v), np.zeros(v.shape))).reshape(-1)
            for v in weights.variables.values()
        ]
    )
    flat = weights.flatten_gradients(gradients)
    assert flat.dtype == weights.get_flat().dtype
    np.testing.assert_array_equal(flat, expected)
    every = [by_variable.get(id(v)) for v in weights.variables.values()]
    np.testing.assert_array_equal(weights.flatten_gradients(every), expected)


def test_pairs_in_any_order_and_names() -> None:
    model, gradients = given()
    weights = TensorFlowVariables(model)
    expected = weights.flatten_gradients(gradients)
    pairs = list(zip(gradients, model.trainable_variables, strict=True))
    shuffled = [pairs[i] for i in np.random.default_rng(0).permutation(len(pairs))]
    np.testing.assert_array_equal(weights.flatten_gradients(shuffled), expected)
    inner = [(g, v.value) for g, v in shuffled]
    np.testing.assert_array_equal(weights.flatten_gradients(iter(inner)), expected)
    names = {id(v): name for name, v in weights.variables.items()}
    by_name = {names[id(v)]: g for g, v in shuffled}
    np.testing.assert_array_equal(weights.flatten_gradients(by_name), expected)
    some = weights.flatten_gradients(shuffled[:1])
    assert np.count_nonzero(some) == np.count_nonzero(shuffled[0][0])


def test_none_and_no_rows_count_as_zeros_beside_strided_arrays_and_numbers() -> None:
    a, b, c = tf.Variable([1.0, 2.0]), tf.Variable(3.0), tf.Variable([[4.0]])
    weights = TensorFlowVariables([a, b, c])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(a * a) + tf.reduce_sum(c)
    out = np.full(4, np.nan, np.float32)
    assert weights.flatten_gradients(tape.gradient(loss, [a, b, c]), out=out) is out
    np.testing.assert_array_equal(out, np.float32([2, 4, 0, 1]))
    np.testing.assert_array_equal(weights.flatten_gradients([None] * 3), np.zeros(4))
    np.testing.assert_array_equal(weights.flatten_gradients({}), np.zeros(4))
    weights = TensorFlowVariables(
        [tf.Variable(tf.zeros((2, 3))), tf.Variable(tf.zeros((0, 3))), tf.Variable(0.0)]
    )
    array = np.arange(6, dtype=np.float32).reshape(3, 2).T
    flat = weights.flatten_gradients([array, tf.zeros((0, 3)), 7])
    np.testing.assert_array_equal(flat, [*array.reshape(-1), 7])
    no_rows = tf.IndexedSlices(tf.zeros((0, 3)), tf.zeros(0, tf.int64))
    flat = weights.flatten_gradients([no_rows, None, None], out=np.ones(7, np.float32))
    np.testing.assert_array_equal(flat, np.zeros(7))


@pytest.mark.parametrize("given", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("dtype", [None, np.float16, ml_dtypes.bfloat16, np.float64])
def test_dtypes_are_converted(given: Any, dtype: Any) -> None:
    values = np.random.default_rng(0).normal(size=(3, 5)).astype(given)
    weights = TensorFlowVariables([tf.Variable(tf.zeros((3, 5))), tf.Variable(1.0)])
    target = np.dtype(dtype or np.float32)
    for gradient in (values, tf.constant(values)):
        flat = weights.flatten_gradients([gradient, np.float32(2)], dtype=dtype)
        expected = np.append(values.astype(target), target.type(2))
        np.testing.assert_array_equal(flat, expected, strict=True)


def in_function(weights: Any, gradients: Any, **kwargs: Any) -> Any:
    flatten = tf.function(lambda: weights.flatten_gradients(gradients(), **kwargs), autograph=False)
    return flatten().numpy()


def in_tf1_graph(weights: Any, gradients: Any, **kwargs: Any) -> Any:
    with tf.Graph().as_default(), tf1.Session() as session:
        return session.run(weights.flatten_gradients(gradients(), **kwargs))


WAYS = {
    "memory": lambda weights, gradients, **kwargs: weights.flatten_gradients(gradients(), **kwargs),
    "function": in_function,
    "graph": in_tf1_graph,
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_integers_are_rounded_as_set_flat_rounds_them(way: Any) -> None:
    weights = TensorFlowVariables([tf.Variable(tf.zeros(5)), tf.Variable(tf.zeros((3, 1)))])

    def gradients() -> Any:
        rows = tf.IndexedSlices(tf.constant([[1.4], [0.2], [-3.5]]), tf.constant([0, 0, 2]), [3, 1])
        return [tf.constant([2.6, -2.6, 0.5, 1.5, 127.4]), rows]

    flat = way(weights, gradients, dtype=np.int8)
    expected = np.int8([3, -3, 0, 2, 127, 2, 0, -4])
    np.testing.assert_array_equal(flat, expected, strict=True)
    integers = TensorFlowVariables(tf.Variable(tf.zeros(8, tf.int8)))
    integers.set_flat(np.float32([2.6, -2.6, 0.5, 1.5, 127.4, 1.4 + 0.2, 0, -3.5]))
    np.testing.assert_array_equal(integers.get_flat(), expected)


TOO_LARGE = [
    *[(np.float32([1, value]), "int8") for value in (127.5, -129, np.nan, np.inf)],
    (np.float16([1, -np.inf]), "int64"),
    (np.float32([1, -1]), "uint8"),
    (np.float32([1, 2**31]), "int32"),
    (np.float64([1, 2**63]), "int64"),
    (np.float64([1, 2]), "bool"),
    (np.int32([1, -1]), "uint32"),
    (np.int64([1, -1]), "uint64"),
    (np.uint8([1, 128]), "int8"),
    (np.uint64([1, 2**63]), "int64"),
]
FITTING = [
    (np.float64([-(2**63), 2**62]), "int64"),
    (np.float64([0, 2**64 - 2**11]), "uint64"),
    (np.float16([-8, 6.5]), "int4"),
    (np.int64([-128, 127]), "int8"),
    (np.uint64([0, 2**63 - 1]), "int64"),
    (np.int64([0, 2**63 - 1]), "uint64"),
    (np.array([False, True]), "int16"),
]


@pytest.mark.parametrize(
    ("way", "values", "dtype", "fits"),
    [
        pytest.param(
            WAYS[way],
            values,
            dtype,
            fits,
            id=f"{way}-{values}-{dtype}",
            marks=pytest.mark.slow if k and way != "memory" else (),
        )
        for way in WAYS
        for fits, cases in ((False, TOO_LARGE), (True, FITTING))
        for k, (values, dtype) in enumerate(cases)
    ],
)
def test_integers_take_all_values_that_fit_and_refuse_others(
    way: Any, values: Any, dtype: str, fits: bool
) -> None:
    weights = TensorFlowVariables({"w": tf.Variable([0.0, 0.0])})
    if fits:
        flat = way(weights, lambda: [tf.constant(values)], dtype=dtype)
        assert (flat.dtype, flat.tolist()) == (dtype, [round(value) for value in values.tolist()])
        return
    errors = (ValueError, tf.errors.InvalidArgumentError)
    with pytest.raises(errors, match=f"slot 0 .*expected values that fit {dtype}"):
        way(weights, lambda: [tf.constant(values)], dtype=dtype)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_tensors_are_read_where_they_lie(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The core reads eager tensors by itself, without an array of each; its result says so."""
    assert _core.find_eager_tensors("TensorFlow's library has been found before")
    shapes: list[tuple[int, ...]] = [(3, 2), (), (5,), (2, 3)]
    layout = fw.Layout.of([np.zeros(shape, dtype) for shape in shapes])
    rng = np.random.default_rng(3)
    arrays = [rng.normal(size=shape).astype(dtype) for shape in shapes]
    *first, _, last = map(tf.constant, arrays)
    out = np.full(layout.size, 7, dtype)
    assert _core.gather(layout.core, [*first, None, last], out)
    arrays[2] = np.zeros(5, dtype)
    expected = np.concatenate([array.reshape(-1) for array in arrays])
    np.testing.assert_array_equal(out, expected, strict=True)
    wrong = tf.transpose(last), tf.cast(last, tf.int32), tf.strings.as_string(1), tf.Variable(last)
    for other in (*wrong, object()):
        out[:] = 7
        assert not _core.gather(layout.core, [*first, None, other], out)
        assert (out == 7).all()

    def refuse(self: Any) -> None:
        raise AssertionError("a copy was asked for")

    weights = TensorFlowVariables([tf.Variable(tf.zeros(shape, dtype)) for shape in shapes])
    monkeypatch.setattr(type(last), "numpy", refuse)
    flat = weights.flatten_gradients([*first, None, last])
    np.testing.assert_array_equal(flat, expected, strict=True)


def test_a_tensor_that_python_computes_later_is_waited_for_without_the_lock(forks: Forks) -> None:
    done = forks.run(LATER)
    assert done.stdout.split() == ["[4.0,", "6.0]", "InvalidArgumentError"], done.stderr


LATER = """
import time
import numpy as np
import tensorflow as tf
from flatweights.tensorflow import TensorFlowVariables

tf.config.experimental.set_synchronous_execution(False)
weights = TensorFlowVariables([tf.Variable([1.0, 2.0])])

def slow(x):  # in another thread, which takes the GIL
    time.sleep(0.2)
    return x.numpy() + 3

late = tf.py_function(slow, [tf.constant([1.0, 3.0])], tf.float32)
late = tf.reshape(late, [2])
print(weights.flatten_gradients([late]).tolist())
try:
    weights.flatten_gradients([tf.debugging.check_numerics([np.nan, 1.0], "no number")])
except tf.errors.InvalidArgumentError as error:
    print(type(error).__name__)
"""


# IndexedSlices


def slices(kind: Any, values: Any, indices: Any, shape: Any = None) -> Any:
    if kind == "value":
        return IndexedSlicesValue(values, indices, shape)
    shape = None if shape is None else tf.constant(shape)
    return tf.IndexedSlices(tf.constant(values), tf.constant(indices), shape)


@pytest.mark.parametrize("kind", ["value", "tensor"])
@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize("shape", [(50,), (50, 3), (50, 2, 2)])
def test_rows_of_one_index_are_added_up(kind: Any, index: Any, shape: Any) -> None:
    rng = np.random.default_rng(0)
    indices = rng.integers(0, 20, 300).astype(index)
    values = rng.integers(-9, 9, (300, *shape[1:])).astype(np.float32)
    weights = TensorFlowVariables([tf.Variable(1.0), tf.Variable(tf.zeros(shape))])
    expected = np.zeros(shape, np.float32)
    np.add.at(expected, indices, values)
    for dense_shape in (None, shape):
        given = slices(kind, values, indices, dense_shape)
        flat = weights.flatten_gradients([np.float32(5), given])
        np.testing.assert_array_equal(flat, [5, *expected.reshape(-1)])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_many_small_rows_of_16_bits_are_added_up_in_more(dtype: Any) -> None:
    # One by one in bfloat16, ones stop adding up at 256.
    given = tf.IndexedSlices(tf.ones((3000, 1), dtype), tf.zeros(3000, tf.int32))
    flat = TensorFlowVariables(tf.Variable([[0.0], [0.0]])).flatten_gradients([given])
    np.testing.assert_array_equal(flat, np.float32([3000, 0]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2", "float8_e4m3fn"])
def test_tensors_without_axes_of_any_dtype_are_read(dtype: Any) -> None:
    # TensorFlow's `__array__` returns a scalar for these.
    weights = TensorFlowVariables(tf.Variable(tf.cast(0.0, dtype), name="v"))
    tensor = tf.cast(2.0, dtype)
    np.testing.assert_array_equal(weights.flatten_gradients([tensor]).astype(float), [2])
    weights.set_weights({"v": tensor})
    np.testing.assert_array_equal(weights.get_flat().astype(float), [2])
    np.testing.assert_array_equal(fw.flatten([tensor, tensor]).astype(float), [2, 2])
    packed = fw.FlatWeights({"a": tensor})
    packed["a"] = tf.cast(3.0, dtype)
    assert float(packed["a"]) == 3
    if dtype == "bfloat16":  # there is arithmetic for it
        assert float(fw.average([{"a": tensor}, {"a": packed["a"]}])["a"]) == 2.5
        assert float(fw.average([tf.cast(1, dtype), tf.cast(3, dtype)])) == 2
        y = np.asarray(1, dtype)
        fw.axpy_(y, 1.0, tf.cast(3, dtype))
        assert float(y) == 4


# Clipping


@pytest.mark.parametrize(
    "clip_norm", [0.01, 1e6, *(pytest.param(norm, marks=pytest.mark.slow) for norm in (0, 1))]
)
def test_clipping_is_that_of_tensorflow(clip_norm: Any) -> None:
    model, gradients = given()
    weights = TensorFlowVariables(model, trainable_only=True)
    gradients = [*gradients[:-1], None]
    expected, _ = tf.clip_by_global_norm(gradients, float(clip_norm))
    flat = weights.flatten_gradients(gradients, clip_norm=clip_norm)
    np.testing.assert_allclose(flat, concatenated([*expected[:-1], np.zeros(2)]), rtol=1e-6)
    inside = tf.function(
        lambda *g: weights.flatten_gradients([*g, None], clip_norm=clip_norm), autograph=False
    )
    np.testing.assert_allclose(inside(*gradients[:-1]), flat, rtol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "clip_norm", "scale"),
    [
        pytest.param(*case, marks=() if "float32" in case or case[1:] == (5, 1) else mark)
        for mark in [pytest.mark.slow]
        for case in itertools.product(
            ["float16", "float32", "float64", "complex64"], [0, 5, 1e300], [0, 1]
        )
    ],
)
def test_clipping_inside_a_function_is_that_outside(dtype: Any, clip_norm: Any, scale: Any) -> None:
    weights = TensorFlowVariables(tf.Variable(tf.zeros(2, dtype)))
    gradient = tf.cast([3 * scale, 4 * scale], dtype)
    flat = weights.flatten_gradients([gradient], clip_norm=clip_norm)
    inside = tf.function(
        lambda g: weights.flatten_gradients([g], clip_norm=clip_norm), autograph=False
    )
    np.testing.assert_array_equal(inside(gradient), flat)
    np.testing.assert_array_equal(flat, np.zeros(2) if clip_norm == 0 else gradient)


@pytest.mark.parametrize(
    ("dtype", "size", "count"),
    [
        *(("float32", 1e30, 4), ("float32", 3e38, 4), ("float64", 1e300, 4)),
        *(("bfloat16", 1e38, 4), ("complex64", 1e30, 4), ("float32", 1e-30, 4)),
        *(("float16", 300, 4), ("float16", 1, 2**18)),  # more ones than the largest float16
    ],
)
@pytest.mark.parametrize("symbolic", [False, True])
def test_the_norm_of_large_and_small_numbers_is_finite(
    dtype: Any, size: Any, count: int, symbolic: Any
) -> None:
    weights = TensorFlowVariables(tf.Variable(tf.zeros(count, dtype)))

    def clip(gradient: Any) -> Any:
        norm = 0.25 * min(1, size) * np.sqrt(count)
        return weights.flatten_gradients([gradient], clip_norm=norm)

    flat = (tf.function(clip, autograph=False) if symbolic else clip)(
        tf.constant(np.full(count, size, dtype))
    )
    np.testing.assert_allclose(np.asarray(flat, "complex128"), 0.25 * min(1, size), rtol=1e-2)


@pytest.mark.parametrize("symbolic", [False, True])
def test_norms_that_are_not_finite_the_bound_or_huge(symbolic: bool) -> None:
    def clipped(gradient: Any, most: float | None) -> Any:
        weights = TensorFlowVariables(tf.Variable(tf.zeros_like(gradient)))

        def clip(given: Any) -> Any:
            return weights.flatten_gradients([given], clip_norm=most)

        return np.asarray((tf.function(clip, autograph=False) if symbolic else clip)(gradient))

    for bad in (np.nan, np.inf):
        gradient = tf.constant([bad, 1.0])
        expected = tf.clip_by_global_norm([gradient], 1.0)[0][0]
        np.testing.assert_array_equal(clipped(gradient, 1.0), expected)
        np.testing.assert_array_equal(clipped(gradient, None), gradient)
    assert clipped(tf.constant([13.0, 84.0]), 85.0).tolist() == [13.0, 84.0]
    huge = clipped(tf.constant([3e38 + 3e38j], tf.complex64), 5.0)
    np.testing.assert_allclose(np.abs(huge), 5.0, rtol=1e-5)


# Refusals


def eager_pair() -> Any:
    return TensorFlowVariables(
        [tf.Variable(tf.zeros((2, 3)), name="w"), tf.Variable(0.0, name="b")]
    )


ROWS = tf.IndexedSlices(tf.ones((1, 3)), tf.constant([2]))
W = np.zeros((2, 3), np.float32)


@pytest.mark.parametrize(
    ("gradients", "error", "match"),
    [
        ([W.T, 0.0], ValueError, r"slot 0 'w': expected float32 \(2, 3\), got float32 \(3, 2\)"),
        ([W, [0.0]], ValueError, r"slot 1 'b': expected float32 \(\), got float64 \(1,\)"),
        ([W + 1j, 0.0], TypeError, r"slot 0 'w': expected float32 \(2, 3\), got complex"),
        ([ROWS, 0.0], ValueError, r"slot 0 'w': expected indices from 0 to 1, got some .* 2 to 2"),
        ([W, ROWS], ValueError, r"slot 1 'b': expected rows of float32 \(\)"),
        ([IndexedSlicesValue(W, [[0, 1]], None), 0.0], ValueError, r"slot 0 'w': expected rows"),
        ([IndexedSlicesValue(W, [0, 1], (3, 3)), 0.0], ValueError, r"slot 0 'w': expected rows"),
        ([IndexedSlicesValue(W, [0, -1], None), 0.0], ValueError, "expected indices .* -1 to 0"),
        ([IndexedSlicesValue(W + 1j, [0, 1], None), 0.0], TypeError, "got complex"),
        ([IndexedSlicesValue(W, [0.0, 1.0], None), 0.0], TypeError, "'w', indices: .* got float64"),
        ([IndexedSlicesValue(W, [True, True], None), 0.0], TypeError, "'w', indices: .* got bool"),
        ([W], ValueError, r"grads: expected 2 gradients, one per variable, got 1; pairs"),
        (None, TypeError, "grads: expected gradients in a list or by name, got NoneType"),
        ("ab", TypeError, "grads: expected gradients in a list or by name, got str"),
        ([W, 0.0, None], ValueError, r"expected 2 gradients, .* got 3"),
        ({"w": W, "c": 0.0}, ValueError, r"expected names of variables, got \['c'\]"),
        ([(0.0, tf.Variable(0.0, name="x"))], ValueError, r"item 0: expected a variable .* 'x'"),
        (
            lambda b, out: [(1.0, b), (2.0, b)],
            ValueError,
            r"item 1: expected each variable once, got slot 1 'b'",
        ),
        (lambda b, out: [(1.0, b), W], TypeError, r"item 1: expected a pair .* got ndarray"),
        (
            lambda b, out: [out[1:].reshape(2, 3), 0.0],
            ValueError,
            r"out: expected memory of its own, overlaps slot 0 'w'",
        ),
    ],
)
def test_what_does_not_fit_is_named_and_changes_nothing(
    gradients: Any, error: Any, match: Any
) -> None:
    weights, out = eager_pair(), np.arange(7, dtype=np.float32)
    if callable(gradients):
        gradients = gradients(weights.variables["b"], out)
    with pytest.raises(error, match=match):
        weights.flatten_gradients(gradients, out=out)
    np.testing.assert_array_equal(out, np.arange(7))


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"clip_norm": -1}, ValueError, "clip_norm: expected a number that is not negative"),
        ({"clip_norm": np.nan}, ValueError, "clip_norm: expected a finite number"),
        ({"clip_norm": "1"}, TypeError, "clip_norm: expected a real number"),
        ({"clip_norm": 1, "dtype": np.int32}, TypeError, "clip_norm: expected a vector of a float"),
        ({"dtype": np.int32}, TypeError, r"slot 0 'w': expected int32"),
        ({"out": np.zeros(6, np.float32)}, ValueError, r"out: expected contiguous float32 \(7,\)"),
        ({"out": np.zeros(7)}, TypeError, r"out: expected float32 \(7,\), got float64"),
    ],
)
def test_options_are_checked(options: Any, error: Any, match: Any) -> None:
    with pytest.raises(error, match=match):
        eager_pair().flatten_gradients(
            [W.astype(complex) if "dtype" in options else W, 0.0], **options
        )


# Gradients of a graph


def graph_model(use_resource: Any = True) -> Any:
    """A graph, its loss, and variables of which one is not trained and one has no gradient."""
    x = tf1.placeholder(tf.float32, [None, 2], name="x")
    make = lambda name, value, **kwargs: tf1.get_variable(  # noqa: E731
        name, initializer=np.float32(value), use_resource=use_resource, **kwargs
    )
    table = make("table", np.arange(8).reshape(4, 2))
    moving = make("moving", [7, 7], trainable=False)
    w, unused = make("w", [[1], [2]]), make("unused", 3.0)
    rows = tf.gather(table, [1, 3, 1])
    loss = tf.reduce_sum(tf.square(x @ w)) + tf.reduce_sum(rows * rows) + moving[0]
    return x, loss, [table, moving, w, unused]


X = np.float32([[1, 2], [3, 4]])


@pytest.mark.parametrize("use_resource", [True, False])
def test_pairs_of_compute_gradients_become_one_tensor(use_resource: Any) -> None:
    with tf.Graph().as_default() as graph, tf1.Session() as session:
        x, loss, variables = graph_model(use_resource)
        pairs = tf1.train.GradientDescentOptimizer(0.1).compute_gradients(loss)
        weights = TensorFlowVariables(variables, session)
        flat = weights.flatten_gradients(pairs)
        clipped = weights.flatten_gradients(pairs, clip_norm=1.0)
        session.run(tf1.global_variables_initializer())
        kept = [(g, v) for g, v in pairs if g is not None]
        values = session.run([g for g, _ in kept], {x: X})
        dense = {v.op.name: np.zeros(v.shape) for v in variables}
        for value, (_, v) in zip(values, kept, strict=True):
            if isinstance(value, IndexedSlicesValue):
                np.add.at(dense[v.op.name], value.indices, value.values)
            else:
                dense[v.op.name] += value
        expected = concatenated(dense.values())
        assert np.count_nonzero(expected) == 6
        np.testing.assert_array_equal(session.run(flat, {x: X}), expected)
        assert flat.shape == expected.shape
        # Values from a session are flattened with or without the variables.
        by_pairs = zip(values, [v for _, v in kept], strict=True)
        np.testing.assert_array_equal(weights.flatten_gradients(by_pairs), expected)
        np.testing.assert_array_equal(weights.flatten_gradients([*values, None]), expected)
        assert abs(np.linalg.norm(session.run(clipped, {x: X})) - 1) < 1e-6
        graph.finalize()  # a loop of calls would add nothing to it
        assert weights.flatten_gradients(pairs) is flat
        assert weights.flatten_gradients(pairs, clip_norm=1.0) is clipped
        with pytest.raises(RuntimeError, match="graph is finalized: flatten its gradients before"):
            weights.flatten_gradients(pairs, clip_norm=2)


def test_the_callers_scopes_reach_neither_the_tensor_that_is_kept_nor_the_step() -> None:
    with tf.Graph().as_default(), tf1.Session() as session:
        *_, variables = graph_model()
        weights = TensorFlowVariables(variables, session)
        gradients = [2 * variables[0], *[None] * 3]
        session.run(tf1.global_variables_initializer())
        blocker = tf1.placeholder(tf.float32, [], name="never_fed")
        with tf.control_dependencies([blocker]), tf.device("/CPU:1"), tf1.name_scope("caller"):
            flat = weights.flatten_gradients(gradients)
            gradient = session.run(flat)
            weights.apply_flat_gradients(TF1["adam"](), gradient)
        np.testing.assert_array_equal(gradient[:8], 2 * np.arange(8))
        assert not flat.device
        assert not flat.name.startswith("caller")
        np.testing.assert_allclose(weights.get_flat()[1:8], np.arange(1, 8) - 0.01, rtol=1e-5)


def test_gradients_in_a_loop_of_tf1_are_flattened_there() -> None:
    tf1.disable_control_flow_v2()
    try:
        with tf.Graph().as_default(), tf1.Session() as session:
            weights = TensorFlowVariables(tf1.Variable(np.float32([1, 2])), session)
            _, total = tf1.while_loop(
                lambda i, _: i < 3,
                lambda i, flat: (i + 1, flat + weights.flatten_gradients([flat * 2])),
                [0, tf.ones(2)],
            )
            assert session.run(total).tolist() == [27, 27]
    finally:
        tf1.enable_control_flow_v2()


def test_autograph_leaves_what_it_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Converting that would take seconds."""
    stacks: list[traceback.StackSummary] = []

    def concat(*args: Any) -> Any:
        stacks.append(traceback.extract_stack())
        return buckets_concat(*args)

    buckets_concat = _gradients.concat
    monkeypatch.setattr(_gradients, "concat", concat)
    weights = eager_pair()
    tf.function(lambda w: weights.flatten_gradients([w, None]))(W)
    converted = [frame.name for frame in stacks[0] if "__autograph_generated" in frame.filename]
    assert converted
    assert {name.removeprefix("tf__") for name in converted} <= {"<lambda>", "flatten_gradients"}


def test_what_a_function_cannot_flatten_is_named() -> None:
    weights = eager_pair()

    def flatten(w: Any, **options: Any) -> None:
        tf.function(lambda w: weights.flatten_gradients([w, None], **options), autograph=False)(w)

    with pytest.raises(RuntimeError, match=r"inside a tf\.function only its own tensors"):
        tf.function(lambda: weights.flatten_gradients([W, 0.0]), autograph=False)()
    with pytest.raises(TypeError, match="out: expected None for gradients of a graph"):
        flatten(W, out=np.zeros(7, np.float32))
    with pytest.raises(ValueError, match=r"slot 0 'w': expected \(2, 3\), got \(3, 2\)"):
        flatten(W.T)
    with pytest.raises(TypeError, match=r"slot 0 'w': expected float32, got complex64"):
        flatten(W.astype(np.complex64))
    errors = (ValueError, tf.errors.InvalidArgumentError)
    for index, shape, match in ((-1, [2, 3], "out of range"), (1, [4, 3], r"got \(4, 3\)")):
        rows = functools.partial(slices, "eager", [[1.0, 2.0, 3.0]], [index], shape)
        with pytest.raises(errors, match=match):
            tf.function(lambda rows=rows: weights.flatten_gradients([rows(), None]))()


# Steps

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.1),
    "adamw": lambda: keras.optimizers.AdamW(0.1, weight_decay=0.1),
    "clipping": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.5),
    "tf_keras": lambda: tf_keras.optimizers.Adam(0.1),
    "tf_keras-legacy": lambda: tf_keras.optimizers.legacy.Adam(0.1),
    "tf1": lambda: tf1.train.AdamOptimizer(0.1),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n in ("sgd", "adam") else n for n in OPTIMIZERS],
)
def test_optimizers_take_the_steps_of_apply_gradients(name: Any) -> None:
    if "tf" in name:
        model, twin = ([tf.Variable([1.0, 2.0]), tf.Variable([[3.0]])] for _ in range(2))
        variables, twins = model, twin
    else:
        model, twin = normalised_model(), normalised_model()
        variables, twins = model.trainable_variables, twin.trainable_variables
    weights = TensorFlowVariables(model)
    before = weights.get_flat()
    optimizer, reference = OPTIMIZERS[name](), OPTIMIZERS[name]()
    for seed in range(3):
        gradients = random_gradients(variables, seed)
        weights.apply_flat_gradients(optimizer, weights.flatten_gradients(gradients))
        reference.apply_gradients(list(zip(map(tf.constant, gradients), twins, strict=True)))
    expected = TensorFlowVariables(twin).get_flat()
    assert np.abs(expected - before).max() > 0.01
    np.testing.assert_allclose(weights.get_flat(), expected, rtol=1e-5, atol=1e-6)
    assert name == "tf1" or int(optimizer.iterations) == 3


def test_what_is_not_trainable_is_left_out() -> None:
    model = dense_model()
    model.layers[0].trainable = False
    weights = TensorFlowVariables(model)
    before = weights.get_weights()
    frozen = [name for name, v in weights.variables.items() if not v.trainable]
    assert len(frozen) == 5
    flat = weights.flatten_gradients(random_gradients(model.trainable_variables))
    for name in frozen:  # not even read
        slot = weights.layout[name]
        flat[slot.start : slot.start + slot.size] = np.nan
    weights.apply_flat_gradients(keras.optimizers.SGD(0.1, weight_decay=0.1), flat)
    for name, value in weights.get_weights().items():
        assert (np.array_equal(value, before[name])) == (name in frozen)


def test_frozen_layers_of_tf_keras_need_trainable_only() -> None:
    layers = tf_keras.layers
    model = tf_keras.Sequential([layers.Dense(2, input_shape=(3,)), layers.Dense(1)])
    model.layers[0].trainable = False
    gradients = random_gradients(model.trainable_variables)
    with pytest.raises(ValueError, match=r"expected 4 gradients, .* got 2"):
        TensorFlowVariables(model).flatten_gradients(gradients)
    before = TensorFlowVariables(model).get_flat()
    weights = TensorFlowVariables(model, trainable_only=True)
    optimizer = tf_keras.optimizers.SGD(1.0)
    weights.apply_flat_gradients(optimizer, weights.flatten_gradients(gradients))
    changed = TensorFlowVariables(model).get_flat() - before
    np.testing.assert_array_equal(changed[:8], np.zeros(8))
    np.testing.assert_allclose(changed[8:], -concatenated(gradients), rtol=1e-5)


def test_states_of_recurrent_layers_of_tf_keras_are_no_part_of_a_step() -> None:
    layers = tf_keras.layers
    lstm = layers.LSTM(3, stateful=True, unroll=True, batch_input_shape=(1, 2, 4))
    model = tf_keras.Sequential([lstm, layers.Dense(1)])
    weights = TensorFlowVariables([model, [lstm.states[0]]])
    states = [name for name in weights.variables if "states" in name]
    assert len(states) == 2
    gradients = random_gradients(model.trainable_variables)
    flat = weights.flatten_gradients(gradients)
    assert flat.size == sum(g.size for g in gradients) + 6
    before = weights.get_weights()
    optimizer = tf_keras.optimizers.SGD(1.0, weight_decay=0.5)
    optimizer.build(model.trainable_variables)  # it knows no states
    weights.apply_flat_gradients(optimizer, flat)
    for name, value in weights.get_weights().items():
        assert np.array_equal(value, before[name]) == (name in states), name
    fun = weights.value_and_gradient(lambda: tf.reduce_sum(model(tf.ones((1, 2, 4)))))
    gradient = weights.layout.vector_views(fun(np.full(flat.size, 0.3))[1])
    for name, part in zip(weights.layout.names, gradient, strict=True):
        assert part.any() == (name not in states), name


class Assigning:
    """An optimizer that keeps its gradients, and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def apply_gradients(self, pairs: Any) -> None:
        self.calls += 1
        for gradient, variable in pairs:
            variable.assign(gradient)


@pytest.mark.parametrize("is_prepared", [False, True])
def test_a_step_is_traced_once_for_all_threads_and_dtypes(is_prepared: bool) -> None:
    optimizer, weights = Assigning(), eager_pair()
    if is_prepared:
        weights.prepare_gradients(optimizer)
    barrier = threading.Barrier(4)

    def step() -> None:
        barrier.wait()
        for k in range(25):
            flat = np.ones(7, np.float32 if k % 2 else np.float64)
            weights.apply_flat_gradients(optimizer, flat)

    threads = [threading.Thread(target=step) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert optimizer.calls == 1
    np.testing.assert_array_equal(weights.get_flat(), np.ones(7))


@pytest.mark.parametrize("size", [1, 4096])
def test_a_step_does_not_follow_the_callers_vector(size: Any) -> None:
    variable = tf.Variable(tf.zeros(size))
    weights = TensorFlowVariables(variable)
    flat = np.ones(size, np.float32)
    weights.apply_flat_gradients(Assigning(), flat)
    flat[:] = 2
    assert (variable.numpy() == 1).all()


def test_dtypes_are_fed_apart_and_cast() -> None:
    values = [(tf.float16, 3), (tf.float32, 2), (tf.float16, 1), (tf.bfloat16, 2), (tf.float64, 2)]
    variables = [tf.Variable(tf.zeros(n, dtype)) for dtype, n in values]
    weights = TensorFlowVariables(variables)
    flat = np.arange(10) + 0.5
    weights.apply_flat_gradients(Assigning(), flat)
    np.testing.assert_array_equal(weights.get_flat(), flat)
    weights.apply_flat_gradients(Assigning(), list(range(10)))
    np.testing.assert_array_equal(weights.get_flat(), np.arange(10))


def test_constraints_of_keras_hold() -> None:
    variable = keras.Variable([1.0, 1.0], trainable=True)
    variable.constraint = keras.constraints.NonNeg()
    TensorFlowVariables(variable).apply_flat_gradients(keras.optimizers.SGD(1.0), [2.0, 0.5])
    np.testing.assert_array_equal(variable.numpy(), [0, 0.5])


def test_within_a_graphs_context_eager_variables_take_steps() -> None:
    weights = eager_pair()
    sgd, adam = keras.optimizers.SGD(1.0), keras.optimizers.Adam(1.0)
    with tf.Graph().as_default():
        weights.apply_flat_gradients(sgd, np.ones(7))
        weights.apply_flat_gradients(adam, np.zeros(7))
        rows = tf.IndexedSlices(np.ones((2, 3), np.float32), np.array([1, 1]))
        np.testing.assert_array_equal(
            weights.flatten_gradients([rows, None]), [0, 0, 0, 2, 2, 2, 0]
        )
    np.testing.assert_array_equal(weights.get_flat(), -np.ones(7))


def test_an_optimizer_is_let_go() -> None:
    weights = eager_pair()
    for make in (
        lambda: keras.optimizers.SGD(0.1),
        lambda: tf1.train.GradientDescentOptimizer(0.1),
    ):
        optimizer = make()
        weights.apply_flat_gradients(optimizer, np.ones(7))
        gone = weakref.ref(optimizer)
        del optimizer
        gc.collect()
        assert gone() is None


def test_another_thread_may_change_the_list_while_the_core_reads(monkeypatch: Any) -> None:
    gradients = [tf.fill([2, 3], 2.0), tf.fill([], 3.0)]
    gather = _core.gather

    def with_another_thread(layout: Any, objects: Any, out: Any) -> bool:
        gradients.clear()  # the core does not hold the tensors whose memory it reads
        return gather(layout, objects, out)

    monkeypatch.setattr(_core, "gather", with_another_thread)
    np.testing.assert_array_equal(eager_pair().flatten_gradients(gradients), [2] * 6 + [3])


def test_mirrored_variables_take_steps() -> None:
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(1.0)
    weights = TensorFlowVariables(model)
    before = weights.get_flat()
    pairs = [(np.full(v.shape, 2, np.float32), v) for v in model.trainable_variables]
    weights.apply_flat_gradients(optimizer, weights.flatten_gradients(pairs))
    np.testing.assert_array_equal(weights.get_flat(), before - 2)
    for variable in model.trainable_variables:
        first, second = (v.numpy() for v in strategy.experimental_local_results(variable.value))
        np.testing.assert_array_equal(first, second)


def test_hundreds_of_calls_hold_no_memory() -> None:
    weights = eager_pair()
    optimizer = keras.optimizers.SGD(0.0)
    gradients = [tf.zeros(v.shape) for v in weights.variables.values()]

    def step() -> None:
        weights.apply_flat_gradients(optimizer, weights.flatten_gradients(gradients))

    assert least_growth(step, 100) < 8_000  # an array held by each call would be over 100 bytes


# Scaled losses


def scaled(flat: Any, factor: Any) -> Any:
    return (np.asarray(flat) * factor).astype(np.float32)


def test_keras_loss_scale_takes_gradients_of_the_scaled_loss() -> None:
    weights = eager_pair()
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=1024.0)
    weights.apply_flat_gradients(optimizer, scaled(np.arange(7), 1024))
    np.testing.assert_array_equal(weights.get_flat(), -np.arange(7))
    weights.apply_flat_gradients(optimizer, scaled([1, 2, np.inf, 4, 5, 6, 7], 1024))
    np.testing.assert_array_equal(weights.get_flat(), -np.arange(7))
    assert float(optimizer.dynamic_scale) == 512
    weights.apply_flat_gradients(optimizer, scaled(np.ones(7), 512))
    np.testing.assert_array_equal(weights.get_flat(), -np.arange(7) - 1)


@pytest.mark.parametrize("legacy", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_tf_keras_loss_scale_takes_gradients_that_are_unscaled(legacy: Any) -> None:
    kinds = tf_keras.optimizers.legacy if legacy else tf_keras.optimizers
    optimizer = tf_keras.mixed_precision.LossScaleOptimizer(kinds.SGD(1.0), initial_scale=1024.0)
    w = tf.Variable([1.0, 2.0])
    weights = TensorFlowVariables(w)
    with tf.GradientTape() as tape:
        loss = optimizer.get_scaled_loss(tf.reduce_sum(w * w))
    gradients = optimizer.get_unscaled_gradients(tape.gradient(loss, [w]))
    weights.apply_flat_gradients(optimizer, weights.flatten_gradients(gradients))
    np.testing.assert_array_equal(w.numpy(), [-1, -2])
    weights.apply_flat_gradients(optimizer, [np.nan, 1])
    np.testing.assert_array_equal(w.numpy(), [-1, -2])
    assert float(optimizer.loss_scale) == 512


def test_a_model_of_mixed_precision() -> None:
    model, twin = (normalised_model(dtype="mixed_float16") for _ in range(2))
    weights = TensorFlowVariables(model)
    optimizer, reference = (
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, 0.9)) for _ in range(2)
    )
    x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    for one, apply in (
        (model, lambda g: weights.apply_flat_gradients(optimizer, weights.flatten_gradients(g))),
        (
            twin,
            lambda g: reference.apply_gradients(
                list(zip(g, twin.trainable_variables, strict=True))
            ),
        ),
    ):
        keras.utils.set_random_seed(3)
        chosen = optimizer if one is model else reference
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = chosen.scale_loss(tf.reduce_mean(tf.cast(one(x), tf.float32) ** 2))
            apply(tape.gradient(loss, [v.value for v in one.trainable_variables]))
    expected = TensorFlowVariables(twin).get_flat()
    np.testing.assert_allclose(weights.get_flat(), expected, rtol=1e-3, atol=1e-3)


# Refusals of steps


def test_steps_check_what_they_are_given() -> None:
    weights = eager_pair()
    optimizer = keras.optimizers.SGD(1.0)
    with pytest.raises(ValueError, match=r"flat: expected shape \(7,\), got \(6,\)"):
        weights.apply_flat_gradients(optimizer, np.zeros(6))
    with pytest.raises(TypeError, match=r"slot 0 'w': expected float32 \(2, 3\), got complex128"):
        weights.apply_flat_gradients(optimizer, np.zeros(7, complex))
    with pytest.raises(TypeError, match="expected an optimizer, got str"):
        weights.apply_flat_gradients("sgd", np.zeros(7))
    for prepared in (False, True):
        with pytest.raises(RuntimeError, match=r"inside a tf\.function a step would be taken once"):
            tf.function(
                lambda: weights.apply_flat_gradients(optimizer, np.zeros(7)), autograph=False
            )()
        if not prepared:
            weights.prepare_gradients(optimizer)
    np.testing.assert_array_equal(weights.get_flat(), np.zeros(7))
    frozen = TensorFlowVariables(tf.Variable(1.0, trainable=False))
    with pytest.raises(ValueError, match="expected trainable variables, found none"):
        frozen.apply_flat_gradients(optimizer, [1.0])


# Steps in a graph

TF1 = {
    "sgd": lambda: tf1.train.GradientDescentOptimizer(0.01),
    "momentum": lambda: tf1.train.MomentumOptimizer(0.01, 0.9),
    "adam": lambda: tf1.train.AdamOptimizer(0.01),
}


@pytest.mark.parametrize(
    ("name", "use_resource"),
    [
        ("momentum", True),
        ("adam", False),
        *(
            pytest.param(name, use_resource, marks=pytest.mark.slow)
            for name, use_resource in (("sgd", True), ("sgd", False), ("adam", True))
        ),
    ],
)
def test_graph_optimizers_take_the_steps_of_apply_gradients(name: Any, use_resource: Any) -> None:
    flats = []
    for ours in (True, False):
        with tf.Graph().as_default(), tf1.Session() as session:
            x, loss, variables = graph_model(use_resource)
            optimizer = TF1[name]()
            pairs = optimizer.compute_gradients(loss)
            weights = TensorFlowVariables(variables, session)
            gradient = weights.flatten_gradients(pairs)
            if ours:
                session.run(tf1.global_variables_initializer())
                for _ in range(3):  # the first makes slots, and initializes them
                    flat = session.run(gradient, {x: X})
                    weights.apply_flat_gradients(optimizer, flat)
            else:
                dense = [
                    (tf.zeros(v.shape) if g is None else tf.convert_to_tensor(g), v)
                    for g, v in pairs
                ]
                train = optimizer.apply_gradients(dense)
                session.run(tf1.global_variables_initializer())
                for _ in range(3):
                    session.run(train, {x: X})
            flats.append(weights.get_flat())
    np.testing.assert_allclose(flats[0], flats[1], rtol=1e-5)
    np.testing.assert_array_equal(flats[0][8:10], [7, 7])


def test_a_graph_is_fed_through_one_placeholder_and_does_not_grow() -> None:
    with tf.Graph().as_default() as graph, tf1.Session() as session:
        variables = [tf1.Variable(np.float32(i), name=f"v{i}") for i in range(6)]
        variables += [tf1.Variable(np.float64(i), name=f"d{i}") for i in range(2)]
        weights = TensorFlowVariables(variables, session)
        session.run(tf1.global_variables_initializer())

        def placeholders() -> Any:
            return [op for op in graph.get_operations() if op.type == "Placeholder"]

        optimizer = tf1.train.AdamOptimizer(0.1)
        before = len(placeholders())
        weights.apply_flat_gradients(optimizer, np.ones(8))
        assert len(placeholders()) - before == 2, "one for each dtype"
        before = len(graph.get_operations())
        for _ in range(5):
            weights.apply_flat_gradients(optimizer, np.ones(8, np.float32))
        assert len(graph.get_operations()) == before


def test_a_finalized_graph_takes_steps_that_were_prepared_and_hooks_count_only_these() -> None:
    class Hook(tf1.train.SessionRunHook):  # type: ignore[misc, name-defined]
        runs = 0

        def before_run(self, context: Any) -> None:
            self.runs += 1

    with tf.Graph().as_default() as graph:
        v = tf1.Variable(np.float32([1, 2]), name="v")
        weights = TensorFlowVariables(v)
        optimizer, hook = tf1.train.MomentumOptimizer(0.5, 0.9), Hook()
        weights.prepare_gradients(optimizer)
        with tf1.train.MonitoredTrainingSession(hooks=[hook]) as session:
            assert graph.finalized
            weights.set_session(session)
            weights.apply_flat_gradients(optimizer, [2, 4])
            assert hook.runs == 1
            np.testing.assert_array_equal(weights.get_flat(), [0, 0])
            expected = r"graph is finalized: call prepare_gradients\(optimizer\) before"
            with pytest.raises(RuntimeError, match=expected):
                weights.apply_flat_gradients(tf1.train.MomentumOptimizer(0.5, 0.9), [1, 2])


@pytest.mark.parametrize("is_one_object", [True, False])
def test_each_session_has_slots_of_its_own_whatever_the_object(is_one_object: bool) -> None:
    with tf.Graph().as_default(), tf1.Session() as first, tf1.Session() as second:
        v = tf1.Variable(np.float32([1]), name="v")
        optimizer = tf1.train.MomentumOptimizer(1.0, 1.0)
        for session in (first, second):
            session.run(v.initializer)
        weights = TensorFlowVariables(v, first)
        weights.prepare_gradients(optimizer)  # creates slots, runs nothing
        for session in (first, second, first):
            if is_one_object:
                weights.set_session(session)
            else:
                weights = TensorFlowVariables(v, session)
            weights.apply_flat_gradients(optimizer, [1])
        # Steps of 1 and, with momentum, 2: the slots of the first session were not reset.
        assert first.run(v) == [-2]
        assert second.run(v) == [0]


@pytest.mark.parametrize("name", ["Momentum", "RMSProp", "Ftrl", "Adam"])
def test_the_step_is_the_dense_one_whatever_the_gradient_was(name: str) -> None:
    def optimizer() -> Any:
        return getattr(tf1.train, f"{name}Optimizer")(0.5, *([0.9] if name == "Momentum" else []))

    flat, dense = (tf.Variable(tf.ones((3, 2))) for _ in range(2))
    weights, ours, theirs = TensorFlowVariables(flat), optimizer(), optimizer()
    for row in (0, 1, 0):  # and never the last one
        rows = slices("eager", [[1.0, 2.0]], [row], [3, 2])
        weights.apply_flat_gradients(ours, weights.flatten_gradients([rows]))
        theirs.apply_gradients([(tf.convert_to_tensor(rows), dense)])
    np.testing.assert_allclose(flat, dense, rtol=1e-6)


def test_what_a_session_lacks_is_named() -> None:
    with tf.Graph().as_default():
        v, w = (tf1.Variable(np.float32([1]), name=name) for name in "vw")
        weights = TensorFlowVariables([v, w])
        optimizer = tf1.train.AdamOptimizer()
        with pytest.raises(RuntimeError, match="session is not set"):
            weights.apply_flat_gradients(optimizer, [1, 1])
        with tf1.Session() as session:
            weights.set_session(session)
            session.run(w.initializer)
            with pytest.raises(RuntimeError, match=r"uninitialized: .v.; first run tf\.compat"):
                weights.apply_flat_gradients(optimizer, [1, 1])
            with pytest.raises(TypeError, match=r"expected an optimizer of tf\.compat\.v1\.train"):
                weights.apply_flat_gradients(keras.optimizers.SGD(1.0), [1, 1])
            session.run(v.initializer)
            weights.apply_flat_gradients(optimizer, [1, 1])
        with pytest.raises(RuntimeError, match="session is closed"):
            weights.apply_flat_gradients(optimizer, [1, 1])


def test_loss_scaling_of_tf1() -> None:
    experimental = tf1.train.experimental
    with tf.Graph().as_default(), tf1.Session() as session:
        v = tf1.Variable(np.float32([1]), name="v")
        scale = tf1.mixed_precision.DynamicLossScale(initial_loss_scale=8.0)
        optimizer = experimental.MixedPrecisionLossScaleOptimizer(
            tf1.train.GradientDescentOptimizer(1.0), scale
        )
        weights = TensorFlowVariables(v, session)
        pairs = optimizer.compute_gradients(v[0] * 3)  # it divides by the scale
        session.run(tf1.global_variables_initializer())
        gradient = session.run(weights.flatten_gradients(pairs))
        np.testing.assert_array_equal(gradient, [3])
        weights.apply_flat_gradients(optimizer, gradient)
        weights.apply_flat_gradients(optimizer, [np.nan])
        assert session.run(v) == [-2]


FORKED = """
import os, signal, threading
import tensorflow as tf
from flatweights.tensorflow import TensorFlowVariables

tf1 = tf.compat.v1
inside, go_on = threading.Event(), threading.Event()

class Slow(tf1.train.GradientDescentOptimizer):
    def apply_gradients(self, *args, **kwargs):
        inside.set()
        go_on.wait()
        return super().apply_gradients(*args, **kwargs)

session = tf1.Session(graph=tf.Graph())
with session.graph.as_default():
    variable = tf1.get_variable("v", (3,), use_resource=True)
    session.run(variable.initializer)
    weights = TensorFlowVariables(variable, session)
thread = threading.Thread(target=lambda: weights.prepare_gradients(Slow(0.1)))
thread.start()
inside.wait()
child = os.fork()
if not child:
    signal.alarm(60)
    try:
        weights.prepare_gradients(tf1.train.GradientDescentOptimizer(0.1))
    except RuntimeError as error:
        os._exit("when the process forked" not in str(error))
    os._exit(2)
go_on.set()
thread.join()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_fork_while_another_thread_prepares_a_step_does_not_hang(forks: Forks) -> None:
    done = forks.run(FORKED)
    assert done.stdout.strip() == "0", done.stderr


INSIDE = """
import os, signal, sys, threading
import numpy as np
import tensorflow as tf
from flatweights.tensorflow import TensorFlowVariables

weights = TensorFlowVariables(tf.Variable(tf.zeros(3)))
gradient, optimizer = np.float32([1, 2, 3]), tf.compat.v1.train.GradientDescentOptimizer(1.0)
inside, go_on = threading.Event(), threading.Event()

def pause(frame, event, argument):  # at the first function that is called in the file
    if frame.f_code.co_filename.endswith(sys.argv[1]):
        sys.settrace(None)
        inside.set()
        go_on.wait()

def use():
    sys.settrace(pause)
    call()

call = {
    "_gradients.py": lambda: weights.flatten_gradients([gradient]),
    "_apply.py": lambda: weights.prepare_gradients(optimizer),
}[sys.argv[1]]
thread = threading.Thread(target=use)
thread.start()
inside.wait()
child = os.fork()
if not child:
    signal.alarm(60)
    call()
    os._exit(0)
go_on.set()
thread.join()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize(
    "file", ["_gradients.py", pytest.param("_apply.py", marks=pytest.mark.slow)]
)
def test_a_fork_while_another_thread_begins_to_use_gradients_does_not_hang(
    forks: Forks, file: str
) -> None:
    done = forks.run(INSIDE, file)
    assert done.stdout.strip() == "0", done.stderr
