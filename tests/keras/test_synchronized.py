"""Layers BatchNormalization(synchronized=True), and tensors averaged in a step."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_programs import Place, build, close, images, in_threads, train
from process_groups import LocalProcessGroup

from flatweights import robust
from flatweights.keras import AverageLogs, average_gradients, mean_over_members
from flatweights.ray import Member


def replies_of(size: int, function: Any, *args: Any) -> list[Any]:
    replies = in_threads(size, function, *args)
    assert [reply for reply in replies if isinstance(reply, str)] == []
    return replies


@pytest.mark.parametrize(
    ("model", "size", "loop"),
    [
        ("synchronized", 2, "eager"),
        pytest.param("synchronized, deep", 2, "fit", marks=pytest.mark.slow),
        pytest.param("synchronized, deep", 3, "tf.function", marks=pytest.mark.slow),
        pytest.param("synchronized, deep", 2, "fit, several steps", marks=pytest.mark.slow),
    ],
)
def test_layers_equal_those_of_one_process(model: str, size: int, loop: str) -> None:
    oracle_losses, oracle = train(Place(), model, "SGD", loop)
    replies = replies_of(size, train, model, "SGD", loop)
    for losses, weights in replies:
        assert np.allclose(losses, oracle_losses, rtol=1e-5)
        assert all(map(np.array_equal, weights, replies[0][1]))  # moving statistics, too
        assert close(weights, oracle, 1e-5)


def cases() -> dict[str, tuple[Any, Any, dict[str, Any]]]:
    """By name: inputs of all members, their mask, and options of the layer."""
    rng = np.random.default_rng(3)
    far = rng.normal(1000.0, 1.0, size=(7, 3)).astype(np.float32)  # squares cancel in float32
    images = rng.normal(2.0, 3.0, size=(7, 4, 5, 3)).astype(np.float32)
    words = rng.normal(2.0, 3.0, size=(7, 6, 3)).astype(np.float32)
    mask = rng.random((7, 6)) < 0.6
    mask[5:] = False  # nothing of the last member
    return {
        "far from zero": (far, None, {}),
        "images": (images, None, {"momentum": 0.5}),
        "channels first": (images, None, {"axis": 1}),
        "masked": (words, mask, {}),
        "nothing in the last": (images[:5], None, {}),
        "half": (images.astype(np.float16), None, {"dtype": "mixed_float16"}),
    }


def normalize(place: Place, name: str, compiled: bool) -> Any:
    """One step on 5 samples in the first member and 2 in the last, or on all in one process."""
    x, mask, options = cases()[name]
    part = slice(None) if not place.name else slice(0, 5) if place.rank == 0 else slice(5, None)
    factors = np.random.default_rng(4).normal(size=x.shape)[part]
    layer = keras.layers.BatchNormalization(synchronized=bool(place.name), **options)
    layer.build(x.shape)
    if place.name:
        optimizer = average_gradients(keras.optimizers.SGD(), member=place.member())
        optimizer.build(layer.trainable_variables)
    x, mask = x[part], None if mask is None else mask[part]

    def step() -> Any:
        inputs = tf.constant(x)
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            outputs = layer(inputs, training=True, mask=mask)
            if mask is not None:
                outputs *= tf.cast(mask, tf.float32)[..., tf.newaxis]
            loss = tf.reduce_sum(tf.cast(outputs, tf.float32) * tf.cast(factors, tf.float32))
        return outputs, tape.gradient(loss, inputs)

    outputs, gradient = tf.function(step, autograph=False)() if compiled else step()
    # The loss of all is the mean of the members' losses, here the half of the sum.
    return (
        outputs.numpy().astype(float),
        2.0 * gradient.numpy().astype(float) if place.name else gradient.numpy().astype(float),
        layer.moving_mean.numpy(),
        layer.moving_variance.numpy(),
    )


@pytest.mark.parametrize(
    ("name", "compiled"),
    [
        pytest.param(
            *(name, compiled),
            id=f"{name}-{'graph' if compiled else 'eager'}",
            marks=pytest.mark.slow if compiled and name != "masked" else [],
        )
        for name in cases()
        for compiled in (False, True)
    ],
)
def test_moments_and_gradients_are_those_of_all_samples(name: str, compiled: bool) -> None:
    outputs, gradient, mean, variance = normalize(Place(), name, compiled)
    first, last = replies_of(2, normalize, name, compiled)
    bound = 1e-2 if name == "half" else 3e-3 if name == "far from zero" else 1e-5
    np.testing.assert_allclose(np.concatenate([first[0], last[0]]), outputs, bound, bound)
    joined = np.concatenate([first[1], last[1]]) / 2
    np.testing.assert_allclose(joined, gradient, bound, 4 * bound)
    for own in (first, last):
        np.testing.assert_allclose(own[2], mean, 1e-5)
        np.testing.assert_allclose(own[3], variance, 1e-4 if bound > 1e-5 else 1e-5)


def evaluate_in_one(place: Place) -> Any:
    model = build("synchronized", 0)
    optimizer = average_gradients(keras.optimizers.SGD(), member=place.member(), timeout=100.0)
    model.compile(optimizer, "mse", run_eagerly=True)
    x, y = (one[:8] for one in images("synchronized"))
    optimizer.build(model.trainable_variables)
    if place.rank == 0:  # if these calls waited for the other member, its next one would differ
        model.evaluate(x, y, verbose=0)
        model.predict(x, verbose=0)
        model(x[:2], training=False)
    model.fit(x, y, 4, validation_data=(x, y) if place.rank else None, verbose=0)
    return True


def test_only_training_communicates() -> None:
    assert replies_of(2, evaluate_in_one) == [True, True]


def with_other_batches(place: Place) -> Any:
    model = build("synchronized", 0)
    model.compile(average_gradients(keras.optimizers.SGD(), member=place.member()), "mse")
    x, y = images("synchronized")
    batches = 4 * (3 + place.rank)
    logs = AverageLogs(member=place.member())
    model.fit(x[:batches], y[:batches], 4, verbose=0, callbacks=[logs])


@pytest.mark.slow
def test_members_with_other_numbers_of_batches_all_raise() -> None:
    for told in in_threads(2, with_other_batches):
        assert "All members need as many batches in an epoch" in told


def with_nan(place: Place) -> Any:
    layer = keras.layers.BatchNormalization(synchronized=True)
    layer.build((4, 2))
    optimizer = keras.optimizers.SGD()
    average_gradients(optimizer, member=place.member(), nonfinite="skip")
    optimizer.build(layer.trainable_variables)
    x = tf.constant([[1.0, 2.0], [3.0, 6.0]]) * (np.nan if place.rank else 1.0)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(x, training=True) ** 3)
    optimizer.apply(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)
    return [one.numpy() for one in layer.variables]


def test_a_member_with_nan_is_left_out_of_moments_too() -> None:
    first, last = replies_of(2, with_nan)
    assert all(map(np.array_equal, first, last))
    assert np.isfinite(first).all()
    np.testing.assert_allclose(first[2], 0.01 * np.array([2.0, 4.0]), 1e-5)  # the mean of rank 0


def differentiate(place: Place, compiled: bool) -> Any:
    optimizer = average_gradients(keras.optimizers.SGD(), member=place.member())
    x = tf.constant([1.0 + place.rank, 4.0])

    def step() -> Any:
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as tape:
                tape.watch(x)
                mean = mean_over_members(x, optimizer, name="x")
                loss = (1.0 + place.rank) * tf.reduce_sum(mean**3)
            gradient = tape.gradient(loss, x)
            assert gradient is not None
        return mean, gradient, outer.gradient(gradient, x)

    function = tf.function(step, autograph=False) if compiled else step
    return [one.numpy() for one in function()]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "graph"])
def test_the_gradient_of_a_mean_is_the_mean_of_the_gradients(compiled: bool) -> None:
    for mean, gradient, second in replies_of(2, differentiate, compiled):
        np.testing.assert_allclose(mean, [1.5, 4.0])
        np.testing.assert_allclose(gradient, 1.5 * 3 * np.square([1.5, 4.0]))
        np.testing.assert_allclose(second, 1.5 * 6 * np.array([1.5, 4.0]))


def average_of_another_shape(place: Place) -> Any:
    optimizer = average_gradients(keras.optimizers.SGD(), member=place.member())
    mean_over_members(tf.ones((2, 3) if place.rank else (3, 2)), optimizer, name="x")


def test_tensors_of_other_shapes_are_not_averaged() -> None:
    for told in in_threads(2, average_of_another_shape):
        assert "slot 0: expected 'x' float32 (3, 2), got 'x' float32 (2, 3)" in told


@pytest.fixture(scope="module")
def member() -> Any:
    with LocalProcessGroup(1).join() as member:
        yield member


def test_a_member_alone_normalizes_as_keras_does(member: Member) -> None:
    x, y = (one[:40] for one in images("synchronized"))
    weights = []
    for synchronized in (True, False):
        model = build("synchronized", 0)
        optimizer = keras.optimizers.SGD(0.05)
        if synchronized:
            average_gradients(optimizer, member=member)
        for layer in model.layers:
            if hasattr(layer, "synchronized"):
                layer.synchronized = synchronized
        model.compile(optimizer, "mse", run_eagerly=True)
        model.fit(x, y, 20, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    assert close(weights[0], weights[1], 1e-5)


def test_xla_is_refused_by_the_name_of_the_tensor(member: Member) -> None:
    model = build("synchronized", 0)
    optimizer = average_gradients(keras.optimizers.SGD(), member=member)
    model.compile(optimizer, "mse", jit_compile=True)
    with pytest.raises(RuntimeError, match=r"moments beside .*jit_compile=False\)"):
        model.fit(*images("synchronized"), verbose=0)


def test_a_rule_is_refused(member: Member) -> None:
    model = build("synchronized", 0)
    optimizer = keras.optimizers.SGD()
    model.compile(average_gradients(optimizer, member=member, rule=robust.Median()), "mse")
    with pytest.raises(ValueError, match=r"rule: expected None with the layer .* got Median"):
        model.fit(*images("synchronized"), verbose=0)


def test_a_loop_that_has_not_built_its_optimizer_is_told_to(member: Member) -> None:
    model = build("synchronized", 0)
    optimizer = average_gradients(keras.optimizers.SGD(), member=member)

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(images("synchronized")[0][:4], training=True))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    with pytest.raises(RuntimeError, match=r"Call optimizer.build\(model.trainable_variables\)"):
        step()
    optimizer.build(model.trainable_variables)
    step()


@pytest.mark.slow
def test_a_model_that_is_compiled_again_uses_its_new_optimizer(
    member: Member,
) -> None:
    model = build("synchronized", 0)
    old: list[Any] = []  # alive, as until the next collection of garbage
    for _ in range(4):
        with LocalProcessGroup(1).join() as other:
            old.append(average_gradients(keras.optimizers.SGD(), member=other))
            old[-1].build(model.trainable_variables)
    optimizer = average_gradients(keras.optimizers.SGD(), member=member)
    model.compile(optimizer, "mse")
    x, y = images("synchronized")
    model.fit(x, y, verbose=0)  # the first trace: it is not built before
    model.train_on_batch(x, y)  # without fit


def test_arguments_are_checked(member: Member) -> None:
    optimizer = average_gradients(keras.optimizers.SGD(), member=member)
    with pytest.raises(TypeError, match="tensor: expected floating-point numbers, got int32"):
        mean_over_members(tf.constant([1]), optimizer)
    with pytest.raises(RuntimeError, match="got no such fit"):
        mean_over_members(tf.constant([1.0]))
    with pytest.raises(RuntimeError, match="got SGD"):
        mean_over_members(tf.constant([1.0]), keras.optimizers.SGD())
    with pytest.raises(ValueError, match=r"tensor: expected a known shape, .* got \(None,\)"):
        tf.function(
            lambda x: mean_over_members(x, optimizer),
            input_signature=[tf.TensorSpec([None], tf.float32)],
        )(tf.ones(2))
