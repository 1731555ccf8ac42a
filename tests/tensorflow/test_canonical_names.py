"""Names and order that are the same in every process, and matching of other names."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tf_elsewhere import Elsewhere, give, take, train
from tf_kinds import KINDS, value

from flatweights.tensorflow import TensorFlowVariables

tf1 = tf.compat.v1


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Names do not depend on how weights are moved: one way is enough."""
    monkeypatch.setenv("FLATWEIGHTS_TENSORFLOW", "ops")
    return "ops"


# `test_sources` gets and sets all kinds, in one process.
ALWAYS = {
    *("keras_shared_layers", "keras_with_bare_variables", "keras_model_and_optimizer"),
    "tf_keras_subclassed",
}


@pytest.mark.parametrize(
    "name",
    [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in KINDS],
)
def test_processes_agree_and_exchange_weights(name: Any, elsewhere: Elsewhere) -> None:
    elsewhere.start(give, name)
    model = TensorFlowVariables(KINDS[name]().output)
    theirs = elsewhere.result()
    assert theirs.layout.names == model.layout.names
    assert theirs.layout.digest == model.layout.digest
    model.set_weights(theirs, strict=True)
    for key, variable in model.variables.items():
        np.testing.assert_array_equal(value(variable), theirs[key], strict=True)
    mine = {
        key: np.arange(array.size).reshape(array.shape).astype(array.dtype)
        for key, array in theirs.items()
    }
    model.set_weights(mine)
    there = elsewhere.call(take, model.get_weights())
    assert list(there) == list(model.variables)
    for key, array in mine.items():
        np.testing.assert_array_equal(there[key], array, strict=True)


@pytest.mark.slow
@pytest.mark.parametrize("module", ["keras", "tf_keras"])
def test_training_moves_to_another_process_and_goes_on_with_the_same_bits(
    module: Any, elsewhere: Elsewhere
) -> None:
    state, expected = train(module, 2, None, 2)
    _, there = elsewhere.call(train, module, 0, state, 2)
    assert not np.array_equal(state.buffer, expected.buffer)
    for key, array in expected.items():
        np.testing.assert_array_equal(there[key], array, err_msg=key)


def test_layers_are_numbered_in_order_and_afresh_for_each_model() -> None:
    x = inputs = keras.Input((3,))
    for _ in range(2):
        x = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3, name="same")])(x)
    x = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3)], name="sequential_999")(x)
    names = list(TensorFlowVariables(keras.Model(inputs, x)).variables)
    assert names == [
        *("sequential/same/kernel", "sequential/same/bias"),
        *("sequential_1/same/kernel", "sequential_1/same/bias"),
        *("sequential_2/dense/kernel", "sequential_2/dense/bias"),
    ]

    class _MLPv2(tf_keras.layers.Dense):  # type: ignore[misc]
        pass

    class _MLP2D(keras.layers.Dense):  # type: ignore[misc]
        pass

    def built() -> Any:
        old = tf_keras.Sequential([tf_keras.Input((2,)), _MLPv2(2), _MLPv2(2)])
        new = keras.Sequential([keras.Input((2,)), _MLP2D(2), _MLP2D(2)])
        return TensorFlowVariables([old, new]).layout

    assert built().names == built().names


def sequential(units: Any = (3, 3), module: Any = keras, first: Any = None) -> Any:
    names = [None] * len(units) if first is None else [f"dense_{first + i}" for i in range(9)]
    return module.Sequential(
        [
            module.Input((3,)),
            *(module.layers.Dense(n, name=k) for n, k in zip(units, names, strict=False)),
        ]
    )


def in_graph(scopes: Any, session: Any = True) -> Any:
    """Dense layers of a TF1 graph by the names of their scopes."""
    with tf.Graph().as_default():
        x = tf1.placeholder(tf.float32, [None, 3])
        for scope in scopes:
            with tf1.variable_scope(scope):
                zeros = tf1.zeros_initializer()
                kernel = tf1.get_variable("kernel", [3, 3], initializer=zeros)
                x = tf.matmul(x, kernel) + tf1.get_variable("bias", [3], initializer=zeros)
        sess = tf1.Session()
        sess.run(tf1.global_variables_initializer())
        return TensorFlowVariables(x, sess)


def check_order(source: Any, target: Any) -> None:
    """Check that set values arrive variable by variable in order, without a warning."""
    flat = np.arange(source.get_flat_size(), dtype=np.float32)
    source.set_flat(flat)
    target.set_weights(source.get_weights())
    np.testing.assert_array_equal(target.get_flat(), flat)
    target.set_weights(dict(source.get_weights()))
    np.testing.assert_array_equal(target.get_flat(), flat)


def test_weights_arrive_in_order_whatever_the_numbers_scopes_and_kind_of_the_other_model() -> None:
    shifted, first = in_graph(["dense_1", "dense_2"]), in_graph(["dense", "dense_1"])
    check_order(shifted, first)
    check_order(first, shifted)
    check_order(in_graph(["layer1", "layer2"]), in_graph(["layer2", "layer3"]))
    source = in_graph(["a/dense", "a/dense_1"])
    check_order(source, in_graph(["b/dense", "b/dense_1"]))
    check_order(source, in_graph(["x/y/dense_3", "x/y/dense_4"]))
    new, old = (TensorFlowVariables(sequential(module=m)) for m in (keras, tf_keras))
    assert new.layout == old.layout
    check_order(new, old)
    check_order(old, new)
    check_order(first, new)
    check_order(new, in_graph(["net/dense_1", "net/dense_2"]))


def test_keras_3_to_tf_keras_by_name_where_the_order_differs() -> None:
    # tf_keras lists trained variables first; names give the right order.
    def built(module: Any) -> Any:
        class Block(module.layers.Layer):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.a = module.layers.BatchNormalization()
                self.b = module.layers.BatchNormalization()

            def build(self, shape: Any) -> None:
                self.a.build(shape)
                self.b.build(shape)
                super().build(shape)

            def call(self, x: Any) -> Any:
                return self.b(self.a(x))

        return TensorFlowVariables(module.Sequential([module.Input((3,)), Block()]))

    new, old = built(keras), built(tf_keras)
    assert set(new.layout.names) == set(old.layout.names)
    assert new.layout.names != old.layout.names
    new.set_flat(np.arange(24))
    old.set_weights(new.get_weights())
    for key, array in new.get_weights().items():
        np.testing.assert_array_equal(old.get_weights()[key], array)


def test_given_names_that_overlap_arrive_in_order() -> None:
    source = TensorFlowVariables(sequential(first=1))
    target = TensorFlowVariables(sequential(first=0))
    check_order(source, target)
    # The same for names that the user read from Keras, not from us.
    model = sequential()
    weights = {v.path: np.full(v.shape, i, np.float32) for i, v in enumerate(model.variables)}
    target.set_weights(weights)
    assert [array.flat[0] for array in target.get_weights().values()] == [0, 1, 2, 3]


def test_weights_in_another_order_are_not_taken_by_position() -> None:
    target = TensorFlowVariables(
        keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization(name="norm")])
    )
    before = target.get_flat()
    given = target.get_weights()
    for change in (
        lambda name: f"actor/{name}",  # a new scope, and sorted by name: beta before gamma
        lambda name: name.replace("norm", "normal"),
    ):
        renamed = {change(name): given[name] + 1 for name in sorted(given)}
        with pytest.raises(AssertionError, match="No variables in the input matched"):
            target.set_weights(renamed)
    np.testing.assert_array_equal(target.get_flat(), before)
    layers = TensorFlowVariables({name: sequential((3,)) for name in ("encoder", "decoder")})
    swapped = {
        f"net/{name}": layers.get_weights()[name]
        for name in sorted(layers.variables, key=lambda n: (n.split("/")[0], "bias" in n))
    }
    with pytest.raises(AssertionError, match="No variables in the input matched"):
        layers.set_weights(swapped)


def test_two_networks_in_one_graph_exchange_both_ways() -> None:
    with tf.Graph().as_default():
        outputs = []
        for scope in ("one", "two"):
            with tf1.variable_scope(scope):
                x = tf1.get_variable("w", [3])
                outputs.append(x * tf1.get_variable("v", [3]))
        session = tf1.Session()
        session.run(tf1.global_variables_initializer())
        one, two = (TensorFlowVariables(output, session) for output in outputs)
    for source, target in ((one, two), (two, one)):
        check_order(source, target)
        source.add_flat(np.ones(6))
        weights, before = source.get_weights(), target.get_flat()
        with pytest.raises(ValueError, match="strict: expected the names of the model"):
            target.set_weights(weights, strict=True)
        with pytest.raises(TypeError, match="rename: expected a mapping of names, got list"):
            target.set_weights(weights, rename=[*weights])  # type: ignore[arg-type]
        np.testing.assert_array_equal(target.get_flat(), before)
        names = reversed(target.variables)  # by position they would be set the other way round
        rename = dict(zip(source.variables, names, strict=True))
        target.set_weights(weights, rename=rename, strict=True)
        for name, renamed in rename.items():
            np.testing.assert_array_equal(target.get_weights()[renamed], weights[name])


def test_a_smaller_or_larger_network_is_never_taken_by_position() -> None:
    two, three = (TensorFlowVariables(sequential((3,) * n)) for n in (2, 3))
    before = three.get_flat()
    three.set_weights(two.get_weights())  # all are known: a subset
    assert np.array_equal(three.get_flat()[-12:], before[-12:])
    with pytest.warns(UserWarning, match="ignores 2 weights"):
        two.set_weights(three.get_weights())
    with pytest.raises(AssertionError, match="No variables in the input matched"):
        two.set_weights({f"x/{k}": v for k, v in three.get_weights().items()})
    a, b, c = (tf.Variable([0.0], name=n) for n in "abc")
    weights = TensorFlowVariables([a, b, c])
    with pytest.warns(UserWarning, match=r"ignores 1 weights .*\['x'\]"):
        weights.set_weights({"c": [3], "a": [1], "x": np.float32([9])})  # type: ignore[arg-type]
    np.testing.assert_array_equal(weights.get_flat(), [1, 0, 3])
