"""`exclude` and `only`: variables of a model that stay at home."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tf_models import only_bound

from flatweights import Slot
from flatweights.tensorflow import TensorFlowVariables

pytestmark = only_bound  # differences between the ways of moving are tested elsewhere

tf1 = tf.compat.v1

BODY = ["body/kernel", "body/bias"]
NORM = ["norm/gamma", "norm/beta", "norm/moving_mean", "norm/moving_variance"]
HEAD = ["head/kernel", "head/bias"]
HEAD_1 = ["head_1/kernel", "head_1/bias"]
ALL = [*BODY, *NORM, *HEAD, *HEAD_1]


def model(of: Any = keras) -> Any:
    layers = of.layers
    made = of.Sequential(
        [
            of.Input((3,)),
            layers.Dense(4, name="body"),
            layers.BatchNormalization(name="norm"),
            layers.Dense(3, name="head"),
            layers.Dense(3, name="head_1"),
        ]
    )
    for number, variable in enumerate(made.weights):
        variable.assign(tf.fill(variable.shape, float(number + 1)))
    return made


shared_model = functools.cache(model)  # for tests that leave its values as they were


def values(made: Any) -> dict[str, Any]:
    """Every variable of the model by name, read without this package."""
    return {
        f"{layer.name}/{str(variable.name).partition(':')[0].rpartition('/')[2]}": np.array(
            variable.numpy()
        )
        for layer in made.layers
        for variable in layer.weights
    }


CHOICES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a name": ({"exclude": "head/bias"}, [*BODY, *NORM, "head/kernel", *HEAD_1]),
    "a prefix": ({"exclude": "head"}, [*BODY, *NORM, *HEAD_1]),
    "a prefix with its end": ({"exclude": "head/"}, [*BODY, *NORM, *HEAD_1]),
    "several": ({"exclude": ["norm", "head/bias"]}, [*BODY, "head/kernel", *HEAD_1]),
    "a tuple": ({"exclude": ("body", "norm", "head")}, HEAD_1),
    "a generator": ({"exclude": (name for name in ("body", "norm"))}, [*HEAD, *HEAD_1]),
    "nothing": ({"exclude": ()}, ALL),
    "a function": (
        {"exclude": lambda slot: "moving" in slot.name},
        [*BODY, *NORM[:2], *HEAD, *HEAD_1],
    ),
    "a function of shapes": (
        {"exclude": lambda slot: slot.shape == (4, 3)},
        [*BODY, *NORM, *HEAD[1:], *HEAD_1],
    ),
    "a function of none": ({"exclude": lambda slot: slot.size > 1000}, ALL),
    "only a name": ({"only": "norm/beta"}, ["norm/beta"]),
    "only prefixes": ({"only": ["head_1", "body"]}, [*BODY, *HEAD_1]),
    "only a function": (
        {"only": lambda slot: len(slot.shape) == 2},
        ["body/kernel", "head/kernel", "head_1/kernel"],
    ),
    "of those that are trained": (
        {"exclude": "norm", "trainable_only": True},
        [*BODY, *HEAD, *HEAD_1],
    ),
}


# The others are found to choose the same variables as one of these.
OFTEN = [
    *(("a name", keras), ("a prefix", keras), ("several", keras), ("a generator", keras)),
    *(("nothing", keras), ("a function", keras), ("only a name", tf_keras)),
    *(("only prefixes", keras), ("only a function", keras)),
    *(("of those that are trained", keras), ("of those that are trained", tf_keras)),
]


@pytest.mark.parametrize(
    ("what", "of"),
    [
        pytest.param(what, of, marks=() if (what, of) in OFTEN else pytest.mark.slow)
        for what in CHOICES
        for of in (keras, tf_keras)
    ],
)
def test_gets_and_sets_are_of_the_chosen_variables_alone(what: str, of: Any) -> None:
    options, left = CHOICES[what]
    if what == "a generator":
        options = {"exclude": (name for name in ("body", "norm"))}
    made = shared_model(of)
    before = values(made)
    weights = TensorFlowVariables(made, **options)
    assert list(weights.variables) == left
    assert weights.layout.names == tuple(left)
    expected = np.concatenate([before[name].ravel() for name in left])
    np.testing.assert_array_equal(weights.get_flat(), expected)
    assert weights.get_flat_size() == expected.size
    got = weights.get_weights()
    assert list(got) == left
    buffer = weights.layout.new_buffer()
    weights.gather_into(buffer)
    np.testing.assert_array_equal(buffer, got.buffer)

    def sets(change: Callable[[], None], factor: float) -> None:
        change()
        for name, value in values(made).items():
            wanted = before[name] * np.float32(factor if name in left else 1)
            assert value.tobytes() == wanted.tobytes(), name

    sets(lambda: weights.set_flat(2 * expected), 2)
    sets(lambda: weights.set_weights({name: 3 * before[name] for name in left}), 3)
    sets(lambda: weights.set_weights(got), 1)
    sets(lambda: weights.add_flat(expected, 4.0), 5)
    sets(lambda: weights.lerp_flat(0 * expected, 1.0), 0)
    sets(lambda: weights.scatter(buffer), 1)


def test_names_are_those_among_all_variables() -> None:
    leaves = [tf.Variable(float(k), name="w") for k in range(3)]
    assert list(TensorFlowVariables(leaves).variables) == ["w", "w_1", "w_2"]
    weights = TensorFlowVariables(leaves, exclude="w")
    assert list(weights.variables) == ["w_1", "w_2"]
    assert weights.get_flat().tolist() == [1.0, 2.0]
    seen: list[Slot] = []
    TensorFlowVariables(leaves, exclude=seen.append)
    assert tuple(seen) == TensorFlowVariables(leaves).layout.slots
    label = tf.Variable("text", name="label")  # which cannot be moved
    weights = TensorFlowVariables([*leaves, label], exclude=["w", "label"])
    assert weights.get_flat().tolist() == [1.0, 2.0]


class Refusal:
    """What is wrong, and what the error says."""

    def __init__(self, error: type[Exception], text: str, **options: Any) -> None:
        self.error, self.text, self.options = error, text, options


REFUSED = [
    Refusal(ValueError, "exclude: expected None with only, got both", exclude="head", only="body"),
    Refusal(
        ValueError,
        r"exclude: expected names .* got 'haed', which none has; near it are 'head', 'head_1'",
        exclude=["body", "haed"],
    ),
    Refusal(ValueError, r"only: .* got 'hea', which none has; near it are 'head'", only="hea"),
    Refusal(
        ValueError, r"got 'norm/gama', which none has; near it are 'norm/gamma'", only="norm/gama"
    ),
    Refusal(
        ValueError,
        r"got 'xyzzy', which none has; the variables are 'body/kernel', .* and 7 more",
        exclude="xyzzy",
    ),
    Refusal(ValueError, "got '', which none has", exclude=""),
    Refusal(TypeError, r"only: expected names, .* got array\('head'", only=np.array("head")),
    Refusal(
        ValueError,
        r"exclude: expected variables that are left, got none of 10: 'body/kernel', .* and 7 more",
        exclude=["body", "norm", "head", "head_1"],
    ),
    Refusal(ValueError, "exclude: expected variables that are left", exclude=lambda slot: True),
    Refusal(ValueError, "only: expected variables that are left", only=lambda slot: False),
    Refusal(ValueError, "only: expected variables that are left", only=[]),
    Refusal(TypeError, r"exclude: expected names, prefixes .* got 3$", exclude=3),
    Refusal(TypeError, r"only: expected names, .* got b'head'$", only=b"head"),
    Refusal(TypeError, r"exclude: expected names, .* got 3 among them", exclude=["head", 3]),
    Refusal(
        TypeError,
        r"only: .* that returns True or False, got ndarray for 'body/kernel'.*: The truth value",
        only=lambda slot: np.ones(slot.shape, bool),
    ),
]


@functools.cache
def untouched() -> Any:
    """A model that no test changes."""
    return model()


@pytest.mark.parametrize("refused", REFUSED)
def test_a_choice_that_is_none_is_refused(refused: Refusal) -> None:
    with pytest.raises(refused.error, match=refused.text):
        TensorFlowVariables(untouched(), **refused.options)


def state(of: Any = keras) -> Any:
    made = model(of)
    optimizer = of.optimizers.Adam(0.1)
    optimizer.build(made.trainable_variables)
    return made, optimizer


OF_BODY, OF_HEAD = (
    [f"optimizer/{name}/{kind}" for name in names for kind in ("momentums", "velocities")]
    for names in (BODY, HEAD)
)


@pytest.mark.parametrize("of", [keras, tf_keras])
def test_slots_of_an_optimizer_stay_with_their_variable(of: Any) -> None:
    both = state(of)
    of_head = OF_HEAD
    everything = list(TensorFlowVariables(both).variables)
    assert {*of_head} < {*everything}
    expected = [name for name in everything if name not in {*HEAD, *of_head}]
    assert "optimizer/head_1/kernel/momentums" in expected
    for exclude in ("head", HEAD, lambda slot: slot.name in HEAD):
        assert list(TensorFlowVariables(both, exclude=exclude).variables) == expected
    assert {*TensorFlowVariables(both, only="head").variables} == {*HEAD, *of_head}
    by_function = TensorFlowVariables(both, only=lambda slot: "head/" in slot.name)
    assert {*by_function.variables} == {*HEAD, *of_head}
    one = "optimizer/head/bias/momentums"
    rest = [name for name in everything if name != one]
    assert list(TensorFlowVariables(both, exclude=one).variables) == rest
    counters = [name for name in everything if name.startswith("optimizer/") and "head" not in name]
    kept = TensorFlowVariables(both, only=lambda slot: not slot.name.startswith("optimizer"))
    assert list(kept.variables) == ALL
    assert counters, "the steps and the learning rate are variables of their own"
    # A text for the optimizer has the slots of the variables beside it.
    optimizer = [name for name in everything if name.startswith("optimizer/")]
    counters = [name for name in optimizer if len(name.split("/")) == 2]
    choices: dict[tuple[str, ...], list[str]] = {
        ("head", "optimizer"): [*HEAD, *counters, *OF_HEAD],
        ("optimizer", "head"): [*HEAD, *counters, *OF_HEAD],
        ("head/bias", "optimizer/head"): [HEAD[1], *OF_HEAD[2:]],
        # Slots alone, since nothing else can be meant.
        ("optimizer",): optimizer,
        ("optimizer/head",): OF_HEAD,
        ("body", "optimizer/head"): [*BODY, *OF_BODY, *OF_HEAD],
        ("body", one): [*BODY, *OF_BODY, one],
        ("body", "optimizer", one): [*BODY, *counters, *OF_BODY, one],
    }
    for only, left in choices.items():
        assert {*TensorFlowVariables(both, only=only).variables} == {*left}, only


def test_a_full_set_or_file_sets_the_chosen_ones_without_a_warning(tmp_path: Any) -> None:
    made, other = model(), model()
    full = TensorFlowVariables(other).get_weights()
    before = values(made)
    weights = TensorFlowVariables(made, exclude=["head", "norm"])
    twice = {name: 2 * value for name, value in full.items()}
    weights.set_weights(twice)  # warnings are errors
    for name, value in values(made).items():
        is_left = name in weights.variables
        assert value.tobytes() == (before[name] * np.float32(1 + is_left)).tobytes(), name
    with pytest.raises(ValueError, match=r"strict: .* unknown \['norm/gamma', "):
        weights.set_weights(twice, strict=True)
    with pytest.warns(UserWarning, match=r"ignores 1 weights .*: \['tail'\]"):
        weights.set_weights({**twice, "tail": np.zeros(1)})
    before = values(made)
    TensorFlowVariables(other).set_flat(np.arange(TensorFlowVariables(other).get_flat_size()))
    TensorFlowVariables(other).save(tmp_path / "all")
    TensorFlowVariables(made, only="body").load(tmp_path / "all")
    for name, value in values(made).items():
        wanted = values(other) if name in BODY else before
        assert value.tobytes() == wanted[name].tobytes(), name


def test_weights_of_what_was_left_out_are_never_set_by_position() -> None:
    made = model()
    before = values(made)
    heads = TensorFlowVariables(made, only="head_1")
    others = {
        name.replace("head_1", "head"): np.zeros_like(v) for name, v in heads.get_weights().items()
    }
    others["head/kernel"] = np.zeros((3, 3), np.float32)  # the shape of head_1's
    with pytest.raises(AssertionError, match="No variables in the input matched"):
        heads.set_weights(others)
    assert {n: v.tobytes() for n, v in values(made).items()} == {
        n: v.tobytes() for n, v in before.items()
    }


def test_a_graphs_variables_are_chosen_by_their_names() -> None:
    with tf.Graph().as_default():
        with tf1.variable_scope("body"):
            a = tf1.get_variable("w", [2])
        with tf1.variable_scope("head"):
            b = tf1.get_variable("w", [2])
        loss = tf.reduce_sum(a * a + b * b)
        step = tf1.train.MomentumOptimizer(0.1, 0.9).minimize(loss)
        session = tf1.Session()
        session.run(tf1.global_variables_initializer())
        weights = TensorFlowVariables(step, session, exclude="head")
        assert list(weights.variables) == ["body/w", "body/w/Momentum"]
        before = session.run([a, b])
        weights.set_weights({"body/w": np.zeros(2)})
        after = session.run([a, b])
        assert after[0].tolist() == [0.0, 0.0]
        assert after[1].tobytes() == before[1].tobytes()
        both = TensorFlowVariables([loss, b], session, only=lambda slot: slot.name == "head/w")
        np.testing.assert_array_equal(both.get_flat(), before[1])


@pytest.mark.parametrize("use_resource", [True, False])
def test_slots_in_a_graph_stay_with_their_variable_in_any_scope(use_resource: bool) -> None:
    with tf.Graph().as_default():
        names = ["body/w", "head/w", "head/table"]
        held = [tf1.get_variable(name, [4, 2], use_resource=use_resource) for name in names]
        loss = tf.reduce_sum(held[0] * held[1]) + tf.reduce_sum(tf.gather(held[2], [1, 1]))
        momentum, adam = tf1.train.MomentumOptimizer(0.1, 0.9), tf1.train.AdamOptimizer()
        with tf1.variable_scope("train"):
            step = momentum.minimize(loss)
            slots = tf1.global_variables()[3:]
            rows = adam.minimize(loss, var_list=held[2:])
        of_head = [f"train/{name}/Momentum" for name in names[1:]]
        for output in (step, [held, momentum], [*held, *slots]):
            weights = TensorFlowVariables(output, exclude="head")
            assert {*weights.variables} == {"body/w", "train/body/w/Momentum"}
            weights = TensorFlowVariables(output, only="head")
            assert {*weights.variables} == {*names[1:], *of_head}
        # No operation takes both a table and the slots that Adam has for it.
        scales = tf1.mixed_precision
        scaled = scales.MixedPrecisionLossScaleOptimizer(adam, scales.FixedLossScale(2.0))
        for output in ([held, adam], [rows, adam, held], [held, scaled]):
            weights = TensorFlowVariables(output, exclude=lambda slot: slot.name == "head/table")
            assert not [name for name in weights.variables if "table" in name]
            assert "train/beta1_power" in weights.variables


@pytest.mark.parametrize("optimizers", [tf_keras.optimizers, tf_keras.optimizers.legacy])
def test_slots_of_tf_keras_in_a_graph_stay_with_their_variable(optimizers: Any) -> None:
    with tf.Graph().as_default():
        layers = [tf_keras.layers.Dense(2, name="body"), tf_keras.layers.Dense(1, name="head")]
        made = tf_keras.Sequential([tf_keras.Input((3,)), *layers])
        trained = made.trainable_variables
        optimizer = optimizers.Adam()
        gradients = tf1.gradients(tf.reduce_sum(made(tf.ones((1, 3)))), trained)
        optimizer.apply_gradients(list(zip(gradients, trained, strict=True)))
        everything = list(TensorFlowVariables([made, optimizer]).variables)
        assert sum("head/" in name for name in everything) == 6
        weights = TensorFlowVariables([made, optimizer], exclude="head")
        assert list(weights.variables) == [name for name in everything if "head/" not in name]
        assert len(TensorFlowVariables([made, optimizer], only="head").variables) == 6


def test_gradients_and_steps_are_of_the_chosen_variables() -> None:
    made = model()
    before = values(made)
    weights = TensorFlowVariables(made, only=["body", "head"])
    x = np.ones((2, 3), np.float32)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(made(x))
    grads = tape.gradient(loss, list(weights.variables.values()))
    flat = weights.flatten_gradients(grads)
    assert flat.size == weights.get_flat_size()
    weights.apply_flat_gradients(keras.optimizers.SGD(1.0), flat)
    after = values(made)
    expected = weights.layout.vector_views(flat)
    for name, grad in zip(weights.layout.names, expected, strict=True):
        np.testing.assert_allclose(after[name], before[name] - grad, rtol=1e-6)
    for name in before.keys() - {*weights.layout.names}:
        assert after[name].tobytes() == before[name].tobytes()


def test_mirrored_variables_are_chosen_with_their_replicas() -> None:
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        a, b = tf.Variable([1.0], name="a"), tf.Variable([2.0], name="b")
    weights = TensorFlowVariables([a, b], exclude="a")
    weights.set_flat([5.0])
    assert [one.numpy().tolist() for one in b.values] == [[5.0], [5.0]]
    assert [one.numpy().tolist() for one in a.values] == [[1.0], [1.0]]
