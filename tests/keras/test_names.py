"""Members never average one variable with another: names come from the model's structure."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_programs import Place, build, images, in_threads, seed_initializers
from process_groups import LocalProcessGroup

from flatweights.keras import AverageLogs, AverageWeights, average_gradients
from flatweights.ray import CallsDifferError
from flatweights.server import FedAvgM

X, Y = np.ones((4, 2), np.float32), np.zeros((4, 2), np.float32)


def in_members(function: Callable[[Any], Any]) -> list[Any]:
    """Call ``function`` in two members; return results or errors by rank."""

    def call(member: Any) -> Any:
        with member:
            try:
                return function(member)
            except (CallsDifferError, tf.errors.OpError) as error:  # in a `tf.function`
                return str(error)

    with ThreadPoolExecutor(2) as pool:
        return [*pool.map(call, LocalProcessGroup(2).join_all())]


def towers(names: list[str]) -> tuple[Any, dict[str, Any]]:
    inputs = keras.Input((2,))
    layers = {
        name: keras.layers.Dense(2, name=name, kernel_initializer=keras.initializers.Constant(k))
        for k, name in enumerate(sorted(names))
    }
    return keras.Model(inputs, keras.layers.Add()([layers[n](inputs) for n in names])), layers


def order(member: Any) -> list[str]:
    """That of a set of names, which differs between processes."""
    return ["age", "city", "item"][:: 1 - 2 * member.rank]


def fit_towers(how: str, member: Any) -> None:
    model, layers = towers(order(member))
    optimizer = keras.optimizers.SGD(0.0, momentum=0.9)
    callback: Any = AverageLogs(member=member)
    if how == "gradients":
        average_gradients(optimizer, member=member)
    else:
        outer = partial(FedAvgM, momentum=0.5) if how == "outer" else None
        callback = AverageWeights(member=member, outer=outer)
    if how == "frozen":
        layers["age" if member.rank else "city"].trainable = False
        outer = partial(FedAvgM, momentum=0.5)
        callback = AverageWeights(member=member, outer=outer)
    model.compile(optimizer, "mse")
    model.fit(X, Y, 2, verbose=0, callbacks=[callback])


@pytest.mark.parametrize(
    ("how", "name"),
    [("gradients", "item"), ("weights", "item"), ("outer", "item"), ("frozen", "city")],
)
def test_layers_of_one_shape_in_another_order_raise_in_all_members(how: str, name: str) -> None:
    for reply in in_members(partial(fit_towers, how)):
        assert "age/kernel" in reply
        assert f"{name}/kernel" in reply


class Named(keras.layers.Layer):  # type: ignore[misc]
    """A layer whose own name is a part of that of the layer in it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = keras.layers.Dense(2, name=f"{self.name}_inner")

    def call(self, x: Any) -> Any:
        return self.inner(x)


def step_of_own(mixes: bool, member: Any) -> Any:
    """A loop of a user's own, whose optimizer knows no model."""
    for _ in range(member.rank):
        keras.layers.Dense(1), keras.layers.LSTM(1), Named()  # Keras counts them
    reshaped, both = keras.layers.Reshape((1, 2)), keras.layers.Bidirectional(keras.layers.LSTM(1))
    first = [keras.layers.Dense(2), reshaped, both, Named()]
    model, _ = towers(order(member) if mixes else ["a", "b"])
    model = keras.Sequential([keras.Input((2,)), *first, model])
    optimizer = average_gradients(keras.optimizers.SGD(0.1), member=member)
    optimizer.build(model.trainable_variables)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(X))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return model.get_weights()


def test_without_a_model_the_paths_of_keras_are_compared() -> None:
    for reply in in_members(partial(step_of_own, True)):
        assert "age/kernel" in reply
        assert "item/kernel" in reply
    ours, others = in_members(partial(step_of_own, False))
    assert all(map(np.array_equal, ours, others))


class Skips(keras.Model):  # type: ignore[misc]
    """Stochastic depth: each batch leaves out one of two layers, another one in each member."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.a, self.b = keras.layers.Dense(2), keras.layers.Dense(2)
        self.steps = rank

    def call(self, x: Any, training: bool = False) -> Any:
        if not training:
            return self.b(self.a(x))
        self.steps += 1
        return (self.a if self.steps % 2 else self.b)(x)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("run_eagerly", [True, False])
def test_gradients_of_other_layers_raise_in_all_members(run_eagerly: bool) -> None:
    def fit(member: Any) -> None:
        model = Skips(member.rank)
        model(X)
        optimizer = average_gradients(keras.optimizers.SGD(0.1), member=member)
        model.compile(optimizer, "mse", run_eagerly=run_eagerly)
        model.fit(X, Y, 4, verbose=0, callbacks=[AverageLogs(member=member)])

    for reply in in_members(fit):
        assert "a/kernel" in reply
        assert "b/kernel" in reply


@pytest.mark.parametrize("runs_eagerly", [True, False])
def test_gradients_of_other_layers_raise_in_a_loop_of_own(runs_eagerly: bool) -> None:
    def step(member: Any) -> None:
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2), keras.layers.Dense(2)])
        optimizer = average_gradients(keras.optimizers.SGD(0.1), member=member)
        optimizer.build(model.trainable_variables)
        trained = model.layers[member.rank].trainable_variables

        def apply() -> None:
            optimizer.apply_gradients([(tf.ones_like(one), one) for one in trained])

        (apply if runs_eagerly else tf.function(apply, autograph=False))()

    for reply in in_members(step):
        assert "dense/kernel" in reply
        assert "dense_1/kernel" in reply


def steps_of_any_size(place: Place, first: str) -> Any:
    """Trace steps again at other places than the other member does."""
    member = place.member()
    model = build("dense", 0)
    model.compile(average_gradients(keras.optimizers.SGD(0.01), member=member), "mse")
    x, y = (array[:24] for array in images("dense"))
    own = 3 + place.rank  # the other one traces a batch of 4 later
    fit = partial(model.fit, x, y, verbose=0, shuffle=False)
    if first == "build":
        model.optimizer.build(model.trainable_variables)
    if first != "fit":
        model.train_on_batch(x[:8], y[:8])
    fit(batch_size=[8, 6][place.rank], steps_per_epoch=3)
    fit(batch_size=12, callbacks=[AverageLogs(member=member)])
    model.train_on_batch(x[:own], y[:own])
    fit(batch_size=8)
    model.train_on_batch(x[:4], y[:4])
    return [array.tolist() for array in model.get_weights()]


@pytest.mark.parametrize("first", ["fit", pytest.param("build", marks=pytest.mark.slow)])
def test_names_do_not_depend_on_which_steps_a_member_traces(first: str) -> None:
    one, other = in_threads(2, steps_of_any_size, first)
    assert one == other
    assert not isinstance(one, str), one


def own_steps(place: Place) -> Any:
    """Trace a step before a fit and, in one member only, after it."""
    member = place.member()
    layers = keras.layers
    seed_initializers(0)
    inputs = keras.Input((3,), dtype="int32")
    model = keras.Sequential([inputs, layers.Embedding(8, 2), layers.Dense(2)])
    optimizer = average_gradients(keras.optimizers.SGD(0.1), member=member, sparse=True)
    optimizer.build(model.trainable_variables)

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - 1.0) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    x = tf.reshape(tf.range(24), [8, 3]) % 8
    step(x[:4])
    model.compile(optimizer, "mse")
    targets = tf.ones([8, 3, 2])
    model.fit(x, targets, 4, verbose=0, shuffle=False, callbacks=[AverageLogs(member=member)])
    step(x[: 4 + place.rank])
    return [array.tolist() for array in model.get_weights()]


def test_rows_have_the_names_that_are_in_use() -> None:
    one, other = in_threads(2, own_steps)
    assert one == other
    assert not isinstance(one, str), one


def step_traced_again(place: Place) -> Any:
    """Return the weights after steps, the last of which rank 1 alone traces."""
    x, y = images("dense")
    seed_initializers(place.rank)
    normalize = keras.layers.BatchNormalization(synchronized=True)
    model = keras.Sequential([keras.Input((8,)), normalize, keras.layers.Dense(1)])
    unused = keras.layers.Dense(2)
    unused.build((None, 3))
    variables = [*model.trainable_variables, *unused.trainable_variables]
    optimizer = average_gradients(keras.optimizers.SGD(0.01), member=place.member())

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        optimizer.apply(tape.gradient(loss, variables), variables)

    optimizer.build(variables)
    step(x[:4], y[:4])
    optimizer.finalize_variable_values(variables)  # as `fit` at its end
    count = 4 + place.rank
    step(x[:count], y[:count])
    return [variable.numpy() for variable in variables]


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_a_member_that_traces_its_step_again_starts_with_the_others() -> None:
    one, other = in_threads(2, step_traced_again)
    assert all(map(np.array_equal, one, other)), (one, other)


def freeze_between(place: Place) -> Any:
    """Return the mean of a layer that is frozen with other values in each member, and the rest."""
    x, y = images("dense")
    first, last = keras.layers.Dense(4), keras.layers.Dense(1)
    model = keras.Sequential([keras.Input((8,)), first, last])
    optimizer = average_gradients(keras.optimizers.SGD(0.01), member=place.member())
    optimizer.build(model.trainable_variables)
    model.compile(optimizer, "mse", run_eagerly=True)
    model.fit(x[:4], y[:4], verbose=0)
    first.trainable = False
    first.set_weights([np.full((8, 4), place.rank), np.zeros(4)])
    model.compile(optimizer, "mse", run_eagerly=True)
    model.fit(x[:4], y[:4], verbose=0)
    return first.get_weights()[0].mean(), last.get_weights()


def test_layers_that_are_frozen_later_keep_each_members_values() -> None:
    one, other = in_threads(2, freeze_between)
    assert (one[0], other[0]) == (0.0, 1.0), (one, other)
    assert all(map(np.array_equal, one[1], other[1]))
