"""value_and_gradient, and its use by SciPy."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from reference import least_growth
from scipy.optimize import minimize
from tf_models import only_bound

from flatweights.tensorflow import TensorFlowVariables

pytestmark = only_bound  # differences between the ways of moving are tested elsewhere

tf1 = tf.compat.v1

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 3))
Y = X @ [[1.0], [-2.0], [0.5]] + 0.3 + 0.1 * RNG.normal(size=(40, 1))
RIDGE = 0.1


def least_squares() -> Any:
    """Weights and intercept that minimise the ridge regression's loss, in closed form."""
    a = np.hstack([X, np.ones((40, 1))])
    penalty = RIDGE * 40 * np.diag([1.0, 1.0, 1.0, 0.0])
    return np.linalg.solve(a.T @ a + penalty, a.T @ Y).reshape(-1)


def regression(dtype: Any = tf.float64) -> Any:
    w = tf.Variable(tf.zeros((3, 1), dtype), name="w")
    b = tf.Variable(tf.zeros((), dtype), name="b")
    x, y = tf.constant(X, dtype), tf.constant(Y, dtype)

    def loss() -> Any:
        return tf.reduce_mean((x @ w + b - y) ** 2) + RIDGE * tf.reduce_sum(w**2)

    return TensorFlowVariables([w, b]), loss


@pytest.mark.parametrize(("dtype", "error"), [(tf.float64, 1e-8), (tf.float32, 1e-3)])
def test_lbfgs_finds_the_optimum_of_a_convex_problem(dtype: Any, error: float) -> None:
    weights, loss = regression(dtype)
    fun = weights.value_and_gradient(loss)
    x0 = weights.get_flat(dtype=np.float64)
    result = minimize(fun, x0, jac=True, method="L-BFGS-B", options={"gtol": 1e-10, "ftol": 0})
    assert np.abs(result.x - least_squares()).max() < error
    weights.set_flat(result.x)
    assert loss().numpy() == pytest.approx(result.fun, rel=0 if dtype is tf.float64 else 1e-6)


def test_lbfgs_finds_what_scikit_learn_finds() -> None:
    from sklearn.datasets import load_iris
    from sklearn.linear_model import LogisticRegression

    x, y = load_iris(return_X_y=True)
    x = (x - x.mean(0)) / x.std(0)
    w, b = tf.Variable(tf.zeros((4, 3), tf.float64)), tf.Variable(tf.zeros(3, tf.float64))
    weights = TensorFlowVariables([w, b])

    def loss() -> Any:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, x @ w + b)
        return tf.reduce_sum(losses) + tf.reduce_sum(w**2) / 2

    result = minimize(
        weights.value_and_gradient(loss),
        weights.get_flat(),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": 1000, "gtol": 1e-8, "ftol": 0},
    )
    expected = LogisticRegression(C=1.0, tol=1e-9, max_iter=10_000).fit(x, y)
    np.testing.assert_allclose(result.x[:12].reshape(4, 3).T, expected.coef_, atol=1e-5)
    weights.set_flat(result.x)
    bias = b.numpy() - b.numpy().mean()
    np.testing.assert_allclose(bias, expected.intercept_ - expected.intercept_.mean(), atol=1e-5)


def test_the_path_is_that_of_a_loop_over_the_variables() -> None:
    # The same bits at each step, so the same steps.
    ours, loss = regression(tf.float32)
    fun = ours.value_and_gradient(loss)
    theirs, their_loss = regression(tf.float32)
    variables = list(theirs.variables.values())

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def step() -> Any:
        with tf.GradientTape() as tape:
            value = their_loss()
        return value, tape.gradient(value, variables)

    def by_hand(x: Any) -> Any:
        begin = 0
        for v in variables:
            size = int(np.prod(v.shape))
            v.assign(x[begin : begin + size].reshape(v.shape).astype(np.float32))
            begin += size
        value, gradients = step()
        flat = np.concatenate([g.numpy().reshape(-1) for g in gradients]).astype(np.float64)
        return float(value), flat

    results = [minimize(f, np.zeros(4), jac=True, method="L-BFGS-B") for f in (fun, by_hand)]
    assert results[0].nit == results[1].nit > 3
    np.testing.assert_array_equal(results[0].x, results[1].x)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_what_is_returned(dtype: Any) -> None:
    weights, loss = regression(tf.float32)
    fun = weights.value_and_gradient(loss, dtype=dtype)
    x = np.float64([1, 2, 3, 4])  # type: ignore[arg-type]
    value, gradient = fun(x)
    assert type(value) is float
    assert gradient.dtype == dtype
    assert gradient.flags.writeable
    np.testing.assert_array_equal(weights.get_flat(), x)
    with tf.GradientTape() as tape:
        expected = loss()
    parts = tape.gradient(expected, list(weights.variables.values()))
    assert value == pytest.approx(float(expected), rel=1e-6)
    np.testing.assert_allclose(gradient, weights.flatten_gradients(parts), rtol=1e-5)


def test_a_loss_is_traced_once_and_each_gradient_is_a_vector_of_its_own() -> None:
    calls = []
    w = tf.Variable([1.0, 2.0], dtype=tf.float64)
    slopes = tf.constant([3.0, 4.0], tf.float64)
    weights = TensorFlowVariables(w)

    def loss() -> Any:
        calls.append(1)
        return tf.reduce_sum(w * slopes)

    # The gradient of a linear loss is a constant of the function, which must not be handed out.
    fun = weights.value_and_gradient(loss)
    gradients = []
    for k in range(50):
        value, gradient = fun([k, 1])
        assert (value, gradient.tolist()) == (3 * k + 4, [3, 4])
        gradient[:] = k
        gradients.append(gradient)
    assert [gradient.tolist() for gradient in gradients] == [[k, k] for k in range(50)]
    assert len(calls) == 1
    np.testing.assert_array_equal(slopes, [3, 4])


def test_a_loss_may_be_a_function_already_and_branch_on_tensors() -> None:
    w = tf.Variable([1.0])
    weights = TensorFlowVariables(w)

    def loss() -> Any:
        if w[0] > 0:  # noqa: SIM108
            value = w[0] ** 2
        else:
            value = -w[0]
        return value

    compiled = tf.function(lambda: w[0] ** 2, autograph=False, jit_compile=True)
    for one in (loss, tf.function(loss), compiled):
        fun = weights.value_and_gradient(one)
        assert fun([3.0]) == (9, [6])  # type: ignore[comparison-overlap]
    assert weights.value_and_gradient(loss)([-3.0]) == (3, [-1])  # type: ignore[comparison-overlap]


def test_a_keras_model_with_an_embedding_and_what_is_not_trained() -> None:
    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            layers.Embedding(20, 3),
            layers.Flatten(),
            layers.BatchNormalization(),
            layers.Dropout(0.5),
            layers.Dense(4),
            layers.Dense(1),
        ]
    )
    model.layers[-2].trainable = False
    x, y = RNG.integers(0, 9, (16, 5)), RNG.normal(size=(16, 1)).astype(np.float32)

    def loss() -> Any:
        return tf.reduce_mean((model(x, training=True) - y) ** 2)

    weights = TensorFlowVariables(model)
    point = weights.get_flat(dtype=np.float64)
    with tf.GradientTape() as tape:
        expected = loss()
    gradients = tape.gradient(expected, [v.value for v in model.trainable_variables])
    pairs = list(zip(gradients, model.trainable_variables, strict=True))
    flat = weights.flatten_gradients(pairs)
    fun = weights.value_and_gradient(loss)
    for _ in range(2):  # the same seeds and moving statistics each time
        value, gradient = fun(point)
        assert value == pytest.approx(float(expected), rel=1e-5)
        np.testing.assert_allclose(gradient, flat, rtol=1e-4, atol=1e-6)
    trainable = weights.flatten_gradients([(np.ones(v.shape), v) for _, v in pairs])
    assert not gradient[trainable == 0].any()
    assert np.count_nonzero(trainable == 0) == 2 * 15 + 2 + (15 * 4 + 4)
    alone = TensorFlowVariables(model, trainable_only=True)
    value, gradient = alone.value_and_gradient(loss)(alone.get_flat(dtype=np.float64))
    assert gradient.size == np.count_nonzero(trainable)


def test_a_variable_that_keras_unfroze_is_watched() -> None:
    layer = keras.layers.Dense(1, trainable=False)
    layer.build((None, 2))
    layer.trainable = True
    weights = TensorFlowVariables(layer)
    fun = weights.value_and_gradient(lambda: tf.reduce_sum(layer(tf.ones((1, 2)))))
    np.testing.assert_array_equal(fun(np.zeros(3))[1], np.ones(3))


def test_a_tf_keras_model() -> None:
    import tf_keras

    model = tf_keras.Sequential([tf_keras.layers.Dense(1, input_shape=(3,))])
    x, y = X.astype(np.float32), Y.astype(np.float32)
    weights = TensorFlowVariables(model)
    fun = weights.value_and_gradient(lambda: tf.reduce_mean((model(x) - y) ** 2))
    result = minimize(fun, weights.get_flat(dtype=np.float64), jac=True, method="L-BFGS-B")
    expected = np.linalg.lstsq(np.hstack([X, np.ones((40, 1))]), Y, rcond=None)[0].reshape(-1)
    assert np.abs(result.x - expected).max() < 1e-3


def test_variables_of_several_dtypes_and_of_sixteen_bits() -> None:
    a = tf.Variable([1.0, 2.0], dtype=tf.float16)
    b = tf.Variable(3.0, dtype=tf.float64)
    n = tf.Variable(5, dtype=tf.int64, trainable=False)
    weights = TensorFlowVariables([a, n, b])
    fun = weights.value_and_gradient(lambda: tf.cast(tf.reduce_sum(a * a), tf.float64) * b)
    value, gradient = fun([1, 2, 7, 3])
    assert value == 15
    np.testing.assert_array_equal(gradient, [6, 12, 0, 5])
    assert n.numpy() == 7
    for dtype in (tf.bfloat16, tf.float16):
        weights = tf.Variable(tf.constant([1.0, 2.0], dtype))
        variables = TensorFlowVariables(weights)
        evaluate = variables.value_and_gradient(lambda: tf.reduce_sum(weights * weights))  # noqa: B023
        loss, gradient = evaluate([3.0, 4.0])
        assert (loss, gradient.tolist()) == (25.0, [6.0, 8.0])


def test_hundreds_of_calls_hold_no_memory() -> None:
    weights, loss = regression()
    fun = weights.value_and_gradient(loss)
    # An array held by each call would be over 100 bytes.
    assert least_growth(lambda: fun(np.zeros(4)), 100) < 8_000


# Refusals


@pytest.mark.parametrize(
    ("loss", "match"),
    [
        (lambda w: w, r"loss_fn: expected a scalar of a floating dtype, got float32 \(2,\)"),
        (lambda w: tf.cast(w[0], tf.int32), "expected a scalar of a floating dtype, got int32"),
        (lambda w: tf.constant(1.0), "expected a loss that depends on the variables"),
        (lambda w: 1.0, "expected a loss that depends on the variables"),
    ],
)
def test_losses_are_checked_before_anything_is_set(loss: Any, match: Any) -> None:
    w = tf.Variable([1.0, 2.0])
    with pytest.raises(ValueError, match=match):
        TensorFlowVariables(w).value_and_gradient(lambda: loss(w))


def test_options_vectors_and_the_context_are_checked() -> None:
    weights, loss = regression()
    with pytest.raises(TypeError, match="dtype: expected a floating one that holds float64"):
        weights.value_and_gradient(loss, dtype=np.int64)
    with pytest.raises(ValueError, match=r"expected shape \(4,\), got \(3,\)"):
        weights.value_and_gradient(loss)(np.zeros(3))
    frozen = TensorFlowVariables(tf.Variable(1.0, trainable=False))
    with pytest.raises(ValueError, match="expected trainable variables, found none"):
        frozen.value_and_gradient(loss)
    fun = weights.value_and_gradient(loss)
    with pytest.raises(RuntimeError, match=r"outside of any tf\.function"):
        tf.function(lambda: weights.value_and_gradient(loss), autograph=False)()
    with pytest.raises(RuntimeError, match=r"inside a tf\.function"):
        tf.function(lambda: fun(np.zeros(4)), autograph=False)()


# In a graph


@pytest.mark.parametrize("use_resource", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_graph_is_minimised_on_data_that_is_fed(use_resource: Any) -> None:
    with tf.Graph().as_default() as graph, tf1.Session() as session:
        x, y = (tf1.placeholder(tf.float64, [None, n]) for n in (3, 1))
        w = tf1.get_variable("w", initializer=np.zeros((3, 1)), use_resource=use_resource)
        step = tf1.get_variable("step", initializer=np.int64(5), trainable=False)
        b = tf1.get_variable("b", initializer=np.float64(0), use_resource=use_resource)
        loss = tf.reduce_mean((x @ w + b - y) ** 2) + RIDGE * tf.reduce_sum(w**2)
        weights = TensorFlowVariables([w, step, b], session)
        fun = weights.value_and_gradient(lambda: loss)
        session.run(tf1.global_variables_initializer())
        graph.finalize()
        before = len(graph.get_operations())
        result = minimize(
            fun,
            weights.get_flat(dtype=np.float64),
            args=({x: X, y: Y},),
            jac=True,
            method="L-BFGS-B",
            options={"gtol": 1e-10, "ftol": 0},
        )
        assert len(graph.get_operations()) == before
        assert result.x[3] == 5
        assert np.abs(np.delete(result.x, 3) - least_squares()).max() < 1e-8
        with pytest.raises(
            RuntimeError, match="graph is finalized: call value_and_gradient before"
        ):
            weights.value_and_gradient(lambda: loss)
