"""Optimizers: all of their slots, named after their variables, and their counters."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tf_kinds import Block, OldBlock, numbers, unlisted, value
from tf_models import only_bound

from flatweights.tensorflow import TensorFlowVariables

pytestmark = only_bound  # differences between the ways of moving are tested elsewhere

tf1 = tf.compat.v1


def of_kind(module: Any, base: Any) -> Any:
    """The optimizers of a module, except base classes."""
    return [
        getattr(module, name)
        for name in sorted(vars(module))
        if isinstance(getattr(module, name), type)
        and issubclass(getattr(module, name), base)
        and name not in ("Optimizer", "LossScaleOptimizer", "MultiOptimizer", "experimental")
    ]


CLASSES = {
    f"{prefix}.{kind.__name__}": kind
    for prefix, module, base in (
        ("keras", keras.optimizers, keras.optimizers.Optimizer),
        ("tf_keras", tf_keras.optimizers, tf_keras.optimizers.Optimizer),
        (
            "tf_keras.legacy",
            tf_keras.optimizers.legacy,
            tf_keras.optimizers.legacy.Optimizer,
        ),
    )
    for kind in of_kind(module, base)
}
OPTIONS = {
    "SGD": {"momentum": 0.9},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Adam": {"amsgrad": True},
}


# The other optimizers of a module name their slots by the same code.
ALWAYS = {
    *("keras.Adafactor", "keras.Muon", "keras.Adam.accumulating", "keras.LossScale"),
    *("tf_keras.Adam", "tf_keras.legacy.Adam"),
}


def some_always(names: Iterable[str]) -> Any:
    """Names for the default run, and others for that of slow tests."""
    return [n if n in ALWAYS else pytest.param(n, marks=pytest.mark.slow) for n in names]


def made(name: Any) -> Any:
    kind = CLASSES[name]
    return kind(**OPTIONS.get(kind.__name__, {}))  # type: ignore[arg-type]


def model_of(name: Any, units: Any = 3) -> Any:
    """A model of the optimizer's own Keras, with a state of its own kind in the middle."""
    if name.startswith("tf_keras"):
        layers = [tf_keras.Input((4,)), OldBlock(units), tf_keras.layers.Dense(2)]
        return tf_keras.Sequential(layers)
    return keras.Sequential([keras.Input((4,)), Block(units), keras.layers.Dense(2)])


def model_without_chance(name: Any) -> Any:
    """A model without dropout: that of `tf_keras` has a state outside of variables."""
    keras_of_name = tf_keras if name.startswith("tf_keras") else keras
    layers = keras_of_name.layers
    return keras_of_name.Sequential(
        [
            keras_of_name.Input((4,)),
            layers.Dense(3, activation="tanh"),
            layers.BatchNormalization(),
            *([layers.Dropout(0.5)] if keras_of_name is keras else []),
            layers.Dense(2, activation="tanh"),
        ]
    )


def step(model: Any, optimizer: Any, x: Any = None) -> None:
    x = numbers(8, 4) if x is None else x
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(x, training=True) ** 2)
    variables = model.trainable_variables
    gradients = tape.gradient(loss, variables)
    if hasattr(variables[0], "_value"):
        optimizer.apply(gradients, variables)
    else:
        optimizer.apply_gradients(
            (g, v) for g, v in zip(gradients, variables, strict=True) if g is not None
        )


def build(model: Any, optimizer: Any) -> None:
    """Make the optimizer's variables, for which some need a step."""
    if hasattr(optimizer, "build"):
        optimizer.build(model.trainable_variables)
    else:
        step(model, optimizer)


def own_variables(optimizer: Any) -> Any:
    found = optimizer.variables
    return list(found() if callable(found) and not isinstance(found, list) else found)


@pytest.mark.parametrize("name", some_always(CLASSES))
def test_every_optimizer_gives_its_variables_under_the_names_of_their_owners(name: Any) -> None:
    layouts = []
    for units in (3, 3):
        model, optimizer = model_of(name, units), made(name)
        build(model, optimizer)
        weights = TensorFlowVariables({"model": model, "optimizer": optimizer})
        found = list(weights.variables.values())[len(model.variables) :]
        expected = own_variables(optimizer)
        if name.startswith("tf_keras"):
            expected += unlisted(optimizer)
        assert [id(v) for v in found] == [id(v) for v in expected]
        layouts.append(weights.layout)
        models = set(list(weights.variables)[: len(model.variables)])
        slots = [n for n in list(weights.variables)[len(model.variables) :] if n.count("/") > 1]
        for slot in slots:
            owner = slot.removeprefix("optimizer/").rpartition("/")[0]
            assert owner in models, slot
        of_owners = [v for n, v in weights.variables.items() if n in slots]
        assert len(own_variables(optimizer)) - len(of_owners) <= 3, "counters have their own names"
    assert layouts[0] == layouts[1], "whatever was built before"


TRAINED = {
    "keras.SGD": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "keras.Adam": lambda: keras.optimizers.Adam(0.01),
    "keras.Adam.accumulating": lambda: keras.optimizers.Adam(
        0.01, gradient_accumulation_steps=2, use_ema=True
    ),
    "keras.LossScale": lambda: keras.optimizers.LossScaleOptimizer(  # which hides a variable of it
        keras.optimizers.Nadam(0.01), initial_scale=4.0, dynamic_growth_steps=2
    ),
    "tf_keras.SGD": lambda: tf_keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "tf_keras.Adam": lambda: tf_keras.optimizers.Adam(0.01),
    "tf_keras.legacy.SGD": lambda: tf_keras.optimizers.legacy.SGD(0.1, momentum=0.9),
    "tf_keras.legacy.Adam": lambda: tf_keras.optimizers.legacy.Adam(0.01),
}


@pytest.mark.parametrize("name", some_always(TRAINED))
def test_training_goes_on_exactly_where_the_other_left_off(name: Any) -> None:
    def built() -> Any:
        model, optimizer = model_without_chance(name), TRAINED[name]()
        step(model, optimizer)
        return model, optimizer

    first, second = built(), built()
    step(*first, numbers(8, 4) * 2.0)  # type: ignore[call-arg]
    here, there = TensorFlowVariables(list(first)), TensorFlowVariables(list(second))
    assert here.layout == there.layout
    there.set_weights(here.get_weights(), strict=True)
    for k in range(2):
        for model, optimizer in (first, second):
            step(model, optimizer, numbers(8, 4) * (k - 1.0))
    ours, theirs = here.get_weights(), there.get_weights()
    assert np.isfinite(here.get_flat()).all()
    for key in ours:
        np.testing.assert_array_equal(ours[key], theirs[key], err_msg=key)


class Outer(keras.optimizers.Optimizer):  # type: ignore[misc]
    """An optimizer of a user, with state that Keras does not list, and another optimizer."""

    def __init__(self) -> None:
        super().__init__(learning_rate=1.0)
        self.wrapped = keras.optimizers.SGD(0.1, momentum=0.9)
        self.wrapped.holder = self

    def build(self, variables: Any) -> None:
        super().build(variables)
        self.wrapped.build(variables)
        self.of_model = [*variables]
        self.sums = [tf.Variable(tf.zeros(v.shape)) for v in variables]
        # Other processes do not have an identity, but they have a text.
        self.more = {id(self): [tf.Variable(0.0)], "text": tf.Variable(1.0)}
        self.several = [keras.optimizers.SGD(0.1)]
        self.several[0].build(variables)

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        if not self.built:
            self.build(trainable_variables)
        for total, grad in zip(self.sums, grads, strict=True):
            total.assign_add(grad)
        self.more[id(self)][0].assign_add(1.0)
        self.wrapped.apply([0.1 * total for total in self.sums], trainable_variables)


def test_state_in_containers_and_in_optimizers_within_optimizers_is_found_once() -> None:
    def built() -> Any:
        model, optimizer = model_of("keras"), Outer()
        step(model, optimizer)
        return model, optimizer

    (model, optimizer), second = built(), built()
    here, there = TensorFlowVariables([model, optimizer]), TensorFlowVariables([*second])
    own = [*optimizer.sums, *optimizer.more[id(optimizer)], optimizer.more["text"]]
    held = [*optimizer.wrapped.variables, *optimizer.several[0].variables]
    listed = [*model.variables, *optimizer.variables, *held]
    found = [id(v) for v in here.variables.values()]
    assert {*found} == {id(v) for v in [*listed, *own]}
    assert len(found) == len({*found})
    names = {"more/0/0", "more/text", "wrapped/iteration", "several/0/iteration"}
    assert {f"optimizer/{name}" for name in names} <= set(here.variables)
    kernel = next(name for name in here.variables if name.endswith("kernel"))
    assert {f"optimizer/{kernel}/sums", f"optimizer/wrapped/{kernel}/momentums"} <= set(
        here.variables
    )
    there.set_weights(here.get_weights(), strict=True)
    for each in ((model, optimizer), second):
        step(*each)
    np.testing.assert_array_equal(here.get_flat(), there.get_flat())


def test_slots_have_the_names_of_their_owners_wherever_the_optimizers_are() -> None:
    model = model_of("keras")
    fast, slow = TRAINED["keras.SGD"](), TRAINED["keras.SGD"]()
    for optimizer in (fast, slow):
        optimizer.build(model.trainable_variables)
    names = list(TensorFlowVariables(model, input_variables=[fast]).variables)
    assert {"block/dense/kernel/momentums", "dense/kernel/momentums"} < {*names}
    before = TensorFlowVariables({"o": fast, "m": model})
    after = TensorFlowVariables({"m": model, "o": fast})
    assert set(before.variables) == set(after.variables)
    assert "o/m/block/dense/kernel/momentums" in before.variables
    names = list(TensorFlowVariables({"m": model, "fast": fast, "slow": slow}).variables)
    assert len(names) == len(set(names))
    assert {"fast/m/dense/bias/momentums", "slow/m/dense/bias/momentums"} < {*names}
    first, second = keras.layers.Dense(1), keras.layers.Dense(1)
    first.build((1, 2))
    second.build((1, 2))
    both = keras.optimizers.SGD(0.1, momentum=0.9)
    both.build([*first.variables, *second.variables])
    names = list(TensorFlowVariables([first, both, second]).variables)
    assert names[:2] == ["0/kernel", "0/bias"]
    assert "1/2/bias/momentums" in names


def test_the_optimizer_of_a_compiled_model_is_not_part_of_the_model() -> None:
    for name in ("keras.Adam", "tf_keras.Adam", "tf_keras.legacy.Adam"):
        model = model_of(name)
        model.compile(TRAINED[name](), "mse", run_eagerly=True)
        build(model, model.optimizer)
        found = TensorFlowVariables(model).variables.values()
        assert [id(v) for v in found] == [id(v) for v in model.variables]


def sgd_with_adam_for(pattern: str) -> Any:
    """Return an optimizer that consists of two."""
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        pytest.skip("this Keras has none")
    chosen = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1, momentum=0.9))
    chosen[pattern] = keras.optimizers.Adam(0.1)
    return keras.optimizers.MultiOptimizer(chosen)


@pytest.mark.parametrize(
    ("pattern", "is_scaled", "kernels"),
    [
        (".*kernel", False, "velocities"),
        ("nothing", False, "momentums"),  # so that one of the two optimizers has no slots
        ("nothing", True, "momentums"),
    ],
)
def test_an_optimizer_that_consists_of_two(pattern: str, is_scaled: bool, kernels: str) -> None:
    layouts = []
    for _ in range(2):
        model, optimizer = model_of("keras"), sgd_with_adam_for(pattern)
        if is_scaled:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        with pytest.raises(ValueError, match=f"{type(optimizer).__name__}.* is not built"):
            TensorFlowVariables([model, optimizer])
        optimizer.build(model.trainable_variables)
        weights = TensorFlowVariables({"m": model, "o": optimizer})
        slots = {f"o/m/dense/kernel/{kernels}", "o/m/dense/bias/momentums"}
        assert slots <= set(weights.variables)
        assert {id(one.value) for one in optimizer.variables} <= {
            id(getattr(one, "value", one)) for one in weights.variables.values()
        }
        layouts.append(weights.layout)
    assert layouts[0] == layouts[1]


def test_the_loss_scale_of_tf_keras_is_state() -> None:
    inner = tf_keras.optimizers.Adam(0.01)
    optimizer = tf_keras.mixed_precision.LossScaleOptimizer(inner, initial_scale=8)
    model = model_of("tf_keras")
    optimizer.build(model.trainable_variables)
    weights = TensorFlowVariables([model, optimizer])
    scale = next(name for name in weights.variables if "loss_scale" in name)
    assert weights.get_weights()[scale] == 8
    weights.set_weights({scale: 2})
    assert optimizer.loss_scale.numpy() == 2


@pytest.mark.parametrize("name", ["keras", "tf_keras", "tf_keras.legacy"])
def test_a_schedule_is_no_variable_and_a_learning_rate_is_one(name: str) -> None:
    module = (keras if name == "keras" else tf_keras).optimizers
    schedule = module.schedules.ExponentialDecay(0.1, 10, 0.9)
    own, model = tf.Variable(0.2), model_of(name)
    for rate, there in ((schedule, False), (0.1, True), (own, True)):
        if rate is own and name == "keras":
            continue  # it takes none
        optimizer = (module.legacy if name == "tf_keras.legacy" else module).SGD(rate)
        build(model, optimizer)
        found = TensorFlowVariables([model, optimizer])
        assert ("optimizer/learning_rate" in found.variables) == there
        assert not any("current" in name for name in found.variables)
        assert any("iter" in name for name in found.variables)
        if there:
            found.set_weights({"optimizer/learning_rate": 0.5})
            assert float(optimizer.learning_rate) == 0.5


RESUMED = {
    "SGD": lambda: tf_keras.optimizers.SGD(0.1, momentum=0.9),
    "Nadam": lambda: tf_keras.optimizers.Nadam(0.1),
    "legacy.SGD": lambda: tf_keras.optimizers.legacy.SGD(0.1, momentum=0.9),
    "loss_scale": lambda: tf_keras.mixed_precision.LossScaleOptimizer(
        tf_keras.optimizers.Adam(0.1), initial_scale=4, dynamic_growth_steps=2
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n == "SGD" else n for n in RESUMED]
)
def test_tf_keras_goes_on_with_what_it_does_not_list(name: str, tmp_path: Path) -> None:
    def built() -> Any:
        layers = [tf_keras.Input((4,)), tf_keras.layers.Dense(2)]
        model, optimizer = tf_keras.Sequential(layers), RESUMED[name]()
        train: Any = partial(step, model, optimizer, tf.constant(numbers(8, 4)))
        if name == "Nadam":  # in eager mode it counts beside its variables
            train = tf.function(train, autograph=False)
        train()
        return [model, optimizer], train

    (first, train), (second, resume), (third, restore) = (built() for _ in range(3))
    for _ in range(2):
        train()
    first[1].learning_rate = 0.01  # as callbacks that reduce it do
    if name.startswith("legacy"):
        first[1].momentum = 0.5
    here, there, oracle = map(TensorFlowVariables, (first, second, third))
    here.save(tmp_path / "training")
    there.load(tmp_path / "training")
    saved, restored = (tf.train.Checkpoint(m=m, o=o) for m, o in (first, third))
    restored.restore(saved.save(tmp_path / "checkpoint"))
    for _ in range(2):
        assert there.get_weights().keys() == here.get_weights().keys()
        np.testing.assert_array_equal(here.get_flat(), oracle.get_flat())
        np.testing.assert_array_equal(here.get_flat(), there.get_flat())
        for each in (train, resume, restore):
            each()


TF1 = {
    "momentum": lambda: tf1.train.MomentumOptimizer(0.1, 0.9),
    "adam": lambda: tf1.train.AdamOptimizer(0.01),
    "rmsprop": lambda: tf1.train.RMSPropOptimizer(0.01),
}


@pytest.mark.parametrize(
    ("name", "use_resource"),
    [
        ("adam", True),
        ("momentum", False),
        *(
            pytest.param(name, use_resource, marks=pytest.mark.slow)
            for name, use_resource in (("adam", False), ("momentum", True), ("rmsprop", True))
        ),
    ],
)
def test_training_goes_on_in_another_graph(name: Any, use_resource: Any) -> None:
    def built() -> Any:
        with tf.Graph().as_default():
            w = tf1.get_variable("w", [3], use_resource=use_resource)
            b = tf1.get_variable("b", [], use_resource=use_resource)
            counter = tf1.train.get_or_create_global_step()
            loss = tf.reduce_sum(tf.square(w * [1.0, 2.0, 3.0] + b - 1.0))
            optimizer = TF1[name]()
            train = optimizer.minimize(loss, global_step=counter)
            session = tf1.Session()
            session.run(tf1.global_variables_initializer())
            weights = TensorFlowVariables(
                loss, session, input_variables=[*optimizer.variables(), counter]
            )
            assert len(weights.variables) == len(tf1.global_variables())
            return weights, train

    (here, train), (there, other_train) = built(), built()
    for _ in range(2):
        here.sess.run(train)
    there.set_weights(here.get_weights(), strict=True)
    for _ in range(2):
        here.sess.run(train)
        there.sess.run(other_train)
    assert here.get_weights()["global_step"] == 4
    np.testing.assert_array_equal(here.get_flat(), there.get_flat())


@pytest.mark.parametrize("names", [("dense_8", "dense_9"), ("dense_9", "dense_10")])
def test_slots_of_a_tf1_optimizer_keep_their_places_whatever_was_built_before(names: Any) -> None:
    """Keras numbers names by process, and sorted by name ``dense_10`` comes before ``dense_9``."""
    first, second = (tf.Variable([0.0], name=name) for name in names)
    optimizer = tf1.train.AdamOptimizer(0.1)
    optimizer.apply_gradients([(tf.constant([1.0]), first), (tf.constant([2.0]), second)])
    weights = TensorFlowVariables({"first": first, "second": second, "o": optimizer})
    slots = [f"o/{owner}/{kind}" for owner in ("first", "second") for kind in ("m", "v")]
    assert list(weights.variables)[-4:] == slots
    moments = weights.get_weights()
    assert moments["o/second/m"] == pytest.approx(2 * moments["o/first/m"])
    assert moments["o/second/v"] == pytest.approx(4 * moments["o/first/v"])
    found = {id(v) for v in weights.variables.values()}
    assert found == {id(v) for v in (first, second, *optimizer.variables())}


@pytest.mark.parametrize(
    "name",
    ["keras.Adam", pytest.param("tf_keras.Adam", marks=pytest.mark.slow), "tf_keras.legacy.Adam"],
)
def test_weights_with_slots_set_a_model_without_an_optimizer(name: str) -> None:
    model, optimizer = model_of(name), TRAINED[name]()
    build(model, optimizer)
    evaluated = model_of(name)
    evaluation = TensorFlowVariables(evaluated)
    beside = TensorFlowVariables(model, input_variables=[optimizer])
    assert list(beside.variables)[: len(model.variables)] == list(evaluation.variables)
    for training in (TensorFlowVariables([model, optimizer]), beside):
        evaluation.set_flat(np.zeros(evaluation.get_flat_size()))
        with pytest.warns(UserWarning, match=r"ignores \d+ weights .*iter"):
            evaluation.set_weights(training.get_weights())
        for theirs, ours in zip(model.variables, evaluated.variables, strict=True):
            np.testing.assert_array_equal(value(theirs), value(ours))


class Counting(tf.Module):  # type: ignore[misc]
    """A model that counts its steps in a variable, which TensorFlow calls trainable."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.step = tf.Variable([1.0, 2.0]), tf.Variable(7, dtype=tf.int64)


@pytest.mark.parametrize("library", [keras, tf_keras], ids=["keras", "tf_keras"])
def test_variables_that_have_no_gradient_are_no_part_of_a_step(library: Any) -> None:
    ours, theirs = Counting(), Counting()
    variables = TensorFlowVariables(ours)
    optimizers = library.optimizers.Adam(0.1), library.optimizers.Adam(0.1)
    gradient = np.array([2.0, 4.0], np.float32)
    for _ in range(2):
        variables.apply_flat_gradients(optimizers[0], variables.flatten_gradients({"w": gradient}))
        optimizers[1].apply_gradients([(tf.constant(gradient), theirs.w)])
    assert np.array_equal(ours.w, theirs.w)
    assert int(ours.step) == 7


def test_variables_without_gradients_leave_a_graph_as_it_was() -> None:
    tf1 = tf.compat.v1
    with tf1.Graph().as_default():
        w = tf1.get_variable("w", initializer=[1.0, 2.0], use_resource=True)
        step = tf1.get_variable("step", initializer=7, use_resource=True)
        with tf1.Session() as session:
            session.run(tf1.global_variables_initializer())
            variables = TensorFlowVariables([w, step], session)
            variables.apply_flat_gradients(tf1.train.GradientDescentOptimizer(0.5), np.ones(3))
            assert session.run(w).tolist() == [0.5, 1.5]
            assert session.run(step) == 7


def test_slots_are_those_of_keras_in_models_of_several_dtypes() -> None:
    def model() -> Any:
        layers = [
            keras.layers.Dense(2, use_bias=False, dtype=dtype, kernel_initializer="ones")
            for dtype in ("float32", "float64", "float32")
        ]
        return keras.Sequential([keras.Input((2,)), *layers])

    ours, theirs = model(), model()
    optimizers = [keras.optimizers.SGD(1.0, momentum=0.9) for _ in range(2)]
    TensorFlowVariables(ours).apply_flat_gradients(optimizers[0], np.zeros(12))
    optimizers[1].build(theirs.trainable_variables)
    for mine, other in zip(optimizers[0].variables, optimizers[1].variables, strict=True):
        assert (mine.dtype, tuple(mine.shape)) == (other.dtype, tuple(other.shape))
    gradients = [tf.zeros((2, 2)), tf.zeros((2, 2), tf.float64), tf.ones((2, 2))]
    optimizers[0].apply(gradients)  # to the variables that it was built with, in order
    moved = [float(np.abs(1.0 - np.asarray(one)).max()) for one in ours.trainable_variables]
    assert moved == [0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    "library",
    [
        pytest.param(keras, id="keras", marks=pytest.mark.slow),
        pytest.param(tf_keras, id="tf_keras"),
    ],
)
def test_no_variable_of_an_optimizer_is_trained(library: Any) -> None:
    def built() -> Any:
        model = library.Sequential([library.Input((2,)), library.layers.Dense(1)])
        optimizer = library.optimizers.Nadam(0.1)
        optimizer.build(model.trainable_variables)
        return model, optimizer

    ours, theirs = built(), built()
    gradients = [tf.constant([[1.0], [2.0]]), tf.constant([3.0])]
    variables, others = (TensorFlowVariables([*each]) for each in (ours, theirs))
    others.set_weights(variables.get_weights())
    pairs = list(zip(gradients, theirs[0].trainable_variables, strict=True))
    step = tf.function(lambda: theirs[1].apply_gradients(pairs), autograph=False)
    for _ in range(2):
        variables.apply_flat_gradients(ours[1], variables.flatten_gradients(gradients))
        step()
    assert np.array_equal(variables.get_flat(), others.get_flat())
    product = ours[1]._u_product
    loss = variables.value_and_gradient(
        lambda: tf.reduce_sum(ours[0](tf.ones((1, 2)))) + tf.convert_to_tensor(product) ** 2
    )
    _, gradient = loss(variables.get_flat())
    assert gradient[:3].tolist() == [1.0, 1.0, 1.0]
    assert not gradient[3:].any()
