"""All kinds of objects with variables: each variable is found once, read and set."""

import contextlib
import importlib
import shelve
import sys
import threading
import types
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from keras.src.backend.common.stateless_scope import StatelessScope
from tf_kinds import KINDS, Block, Leaf, OldBlock, Tree, numbers, value
from tf_models import only_bound

from flatweights.tensorflow import TensorFlowVariables, _structure

pytestmark = only_bound  # differences between the ways of moving are tested elsewhere

tf1 = tf.compat.v1


def inner(variable: Any) -> Any:
    """The `tf.Variable` within a variable of Keras 3, or within a cast of `tf_keras`."""
    variable = variable._value if isinstance(variable, keras.Variable) else variable
    return getattr(variable, "_variable", variable)


def changed(array: Any) -> Any:
    return ~array if array.dtype == bool else (array + 1).astype(array.dtype)


# What these hold, other kinds do, too; optimizers of Keras are those of `test_optimizers`.
SELDOM = {
    *("keras_recurrent", "keras_variables", "keras_optimizer_alone"),
    *("keras_actor_and_critic", "keras_model_and_optimizer", "tf_keras_nested"),
    *("tf_keras_recurrent", "tf_keras_model_and_optimizer", "mixture"),
    *("tf_keras_model_and_legacy_optimizer", "tf_keras_stateful", "tf_keras_lookups"),
}


# Models have an order of their own.
IN_ORDER = {"keras_nested", "tf_keras_nested", "tf_keras_subclassed"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(k, marks=pytest.mark.slow) if k in SELDOM else k for k in KINDS],
)
def test_every_variable_is_found_once_got_and_set(name: Any) -> None:
    output, variables = KINDS[name]()
    weights = TensorFlowVariables(output)
    found = Counter(id(inner(v)) for v in weights.variables.values())
    assert found == Counter(id(inner(v)) for v in variables)
    if name in IN_ORDER:
        assert [id(v) for v in weights.variables.values()] == [id(v) for v in variables]
    got = weights.get_weights()
    for key, variable in weights.variables.items():
        np.testing.assert_array_equal(got[key], value(inner(variable)), strict=True)
    wanted = {key: changed(array) for key, array in got.items()}
    weights.set_weights(wanted, strict=True)
    for key, variable in weights.variables.items():
        np.testing.assert_array_equal(value(inner(variable)), wanted[key], strict=True)
    weights.set_flat(np.concatenate([np.ravel(got[k]).astype(weights.layout.dtype) for k in got]))
    for key, variable in weights.variables.items():
        np.testing.assert_array_equal(value(inner(variable)), got[key], strict=True)


FROZEN = {
    "block/gain",
    "block/norm/moving_mean",
    "block/norm/moving_variance",
    "block/drop/seed_generator_state",
}


@pytest.mark.parametrize(("of", "block"), [(keras, Block), (tf_keras, OldBlock)])
def test_what_keras_does_not_train_is_there_unless_it_is_not_wanted(of: Any, block: Any) -> None:
    model = of.Sequential([of.Input((4,)), block(3), of.layers.Dense(3, name="head")])
    everything = list(TensorFlowVariables(model).variables)
    trained = TensorFlowVariables(model, trainable_only=True)
    assert [id(v) for v in trained.variables.values()] == [id(v) for v in model.trainable_variables]
    if of is keras:
        assert set(everything) - {*trained.variables} == FROZEN
        expected = [name for name in everything if name not in FROZEN]
        assert list(trained.variables) == expected, "in the same order"
    model.layers[0].trainable = False
    assert set(TensorFlowVariables(model).variables) == set(everything)
    assert of is tf_keras or list(TensorFlowVariables(model).variables) == everything
    only = TensorFlowVariables(model, trainable_only=True)
    assert list(only.variables) == ["head/kernel", "head/bias"]
    assert [id(v) for v in only.variables.values()] == [id(v) for v in model.trainable_variables]


def test_optimizers_modules_objects_and_graphs_without_what_is_not_trained() -> None:
    model = KINDS["keras_model_and_optimizer"]().output
    trained = TensorFlowVariables(model, trainable_only=True)
    assert [id(v) for v in trained.variables.values()] == [
        id(v) for v in model[0].trainable_variables
    ]
    leaf = TensorFlowVariables(Leaf(), trainable_only=True)
    assert list(leaf.variables) == ["w"]
    tree = Tree()
    found = TensorFlowVariables(tree, trainable_only=True).variables.values()
    assert {id(v) for v in found} == {id(v) for v in tree.trainable_variables}
    frozen = tf.Variable(1.0, trainable=False)
    assert list(TensorFlowVariables([Leaf(), frozen], trainable_only=True).variables) == ["0/w"]
    with pytest.raises(ValueError, match="to have trainable variables, found none"):
        TensorFlowVariables(frozen, trainable_only=True)
    with tf.Graph().as_default():
        a = tf1.get_variable("a", [2])
        b = tf1.get_variable("b", [2], trainable=False)
        assert list(TensorFlowVariables(a + b).variables) == ["a", "b"]
        assert list(TensorFlowVariables(a + b, trainable_only=True).variables) == ["a"]
        given = TensorFlowVariables(None, input_variables=[a, b], trainable_only=True)
        assert list(given.variables) == ["a"]


def test_a_strange_variable_is_refused_by_its_name_and_can_be_left_out() -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    label = tf.Variable("text", name="label")
    with pytest.raises(TypeError, match=r"variable 'label': expected numbers .* got string; leave"):
        TensorFlowVariables([model, label])
    tree = Leaf()
    tree.label = label
    with pytest.raises(TypeError, match=r"variable 'label': .*leave it out by exclude=.label."):
        TensorFlowVariables(tree)
    rest = [v for v in tree.variables if v.dtype != tf.string]
    assert len(TensorFlowVariables(rest).variables) == 2


UNBUILT = {
    "keras_sequential": lambda: keras.Sequential([keras.layers.Dense(2)]),
    "keras_layer": lambda: keras.layers.Dense(2),
    "keras_model": lambda: KerasModel(),
    "keras_model_in_a_list": lambda: [KINDS["keras_layer"]().output, KerasModel()],
    "keras_layer_in_a_module": lambda: ModuleWith(keras.layers.Dense(2)),
    "keras_layer_in_an_object": lambda: types.SimpleNamespace(inside=keras.layers.Dense(2)),
    "tf_keras_sequential": lambda: tf_keras.Sequential([tf_keras.layers.Dense(2)]),
    "tf_keras_layer": lambda: tf_keras.layers.Dense(2),
    "tf_keras_model": lambda: OldModel(),
    "keras_attention": lambda: keras.layers.MultiHeadAttention(2, 2),
    "tf_keras_attention": lambda: tf_keras.layers.MultiHeadAttention(2, 2),
    "tf_keras_normalization": lambda: tf_keras.layers.BatchNormalization(),
    "keras_optimizer": lambda: keras.optimizers.Adam(),
    "keras_loss_scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
    "tf_keras_optimizer": lambda: tf_keras.optimizers.Adam(),
    "tf_keras_legacy_optimizer": lambda: tf_keras.optimizers.legacy.Adam(),
    "tf_keras_loss_scale": lambda: tf_keras.mixed_precision.LossScaleOptimizer(
        tf_keras.optimizers.Adam()
    ),
}


class ModuleWith(tf.Module):  # type: ignore[misc]
    def __init__(self, inside: Any) -> None:
        super().__init__()
        self.inside = inside


class KerasModel(keras.Model):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, x: Any) -> Any:
        return self.dense(x)


class OldModel(tf_keras.Model):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.dense = tf_keras.layers.Dense(2)

    def call(self, x: Any) -> Any:
        return self.dense(x)


@pytest.mark.parametrize("name", UNBUILT)
def test_what_is_not_built_says_what_to_call(name: Any) -> None:
    with pytest.raises(ValueError, match=r"is not built, .*: call build\("):
        TensorFlowVariables(UNBUILT[name]())  # type: ignore[no-untyped-call]


def test_states_of_recurrent_layers_are_restored_and_not_trained() -> None:
    model = tf_keras.Sequential([tf_keras.layers.GRU(2, stateful=True, unroll=True)])
    model.build((1, 3, 4))
    without = list(TensorFlowVariables(model, trainable_only=True).variables)
    assert without == ["gru/cell/kernel", "gru/cell/recurrent_kernel", "gru/cell/bias"]
    weights = TensorFlowVariables(model)
    assert list(weights.variables) == [*without, "gru/states/0"]
    x = numbers(1, 3, 4)
    before = weights.get_weights()
    first = model(x)
    assert not np.array_equal(model(x), first)
    weights.set_weights(before)
    np.testing.assert_array_equal(model(x), first)


def test_a_variable_that_is_made_later_says_what_to_call_and_is_there_then() -> None:
    class Lazy(keras.layers.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inside = None

        def call(self, x: Any) -> Any:
            if self.inside is None:
                self.inside = keras.layers.Dense(2)
            return self.inside(x)  # type: ignore[misc]

    lazy = Lazy()
    with pytest.raises(ValueError, match=r"'lazy.*' is not built.*call build\(\) or call it"):
        TensorFlowVariables(lazy)

    with StatelessScope():
        later = keras.Variable("zeros", shape=(2,), name="later")
        with pytest.raises(ValueError, match="variable 'later' has no value yet: build the model"):
            TensorFlowVariables(later)

    for model in (KerasModel(), OldModel()):
        model(numbers(1, 3))
        assert list(TensorFlowVariables(model).variables) == ["dense/kernel", "dense/bias"]


@pytest.mark.parametrize(
    "symbolic",
    [
        lambda: keras.layers.Dense(2)(keras.Input((4,))),
        lambda: tf_keras.layers.Dense(2)(tf_keras.Input((4,))),
    ],
    ids=["keras", "tf_keras"],
)
def test_the_symbolic_output_of_a_model_is_no_model(symbolic: Any) -> None:
    # It holds only the last layer: a part of the model, without an error.
    with pytest.raises(TypeError, match=r"got KerasTensor: pass the model"):
        TensorFlowVariables(symbolic())


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class WithSlots:
    __slots__ = ("late", "w")
    w: Any


def test_objects_of_all_kinds_and_seeds() -> None:
    a, b = tf.Variable(1.0, name="a"), tf.Variable(2.0, name="b")
    assert list(TensorFlowVariables(Pair(a, b)).variables) == ["a", "b"]
    assert list(TensorFlowVariables(types.SimpleNamespace(x=a, y=[b])).variables) == ["x", "y/0"]
    assert list(TensorFlowVariables(WithSlots(a)).variables) == ["w"]
    assert list(TensorFlowVariables(types.SimpleNamespace(s=WithSlots(a))).variables) == ["s/w"]
    assert list(TensorFlowVariables(types.MappingProxyType({"x": a})).variables) == ["x"]
    one, two = Leaf(), Leaf()
    one.extra, two.other = a, a
    both = TensorFlowVariables({"one": one, "two": two, "three": a})
    assert list(both.variables) == ["one/b", "one/extra", "one/w", "two/b", "two/w"], "shared once"
    seed = keras.random.SeedGenerator(1)
    holder = types.SimpleNamespace(w=tf.Variable(1.0), seed=seed)
    assert list(TensorFlowVariables(holder).variables) == ["seed/state", "w"]
    assert list(TensorFlowVariables([seed, tf.Variable(1.0)]).variables) == ["0/state", "Variable"]
    holder.seed = tf.random.Generator.from_seed(1)
    assert list(TensorFlowVariables(holder).variables) == ["seed/state_var", "w"]


@pytest.mark.parametrize("module", [keras, tf_keras], ids=["keras", "tf_keras"])
def test_objects_in_layers_hold_variables_as_those_in_modules_do(module: Any) -> None:
    class Loss(module.losses.Loss):  # type: ignore[misc]
        """Of a class of Keras, so it is no object of the user's own."""

    def fill(holder: Any) -> list[str]:
        inner = module.layers.Dense(1)
        inner.build((None, 2))
        holder.pair = types.SimpleNamespace(a=tf.Variable(1.0))
        space = types.SimpleNamespace(w=tf.Variable(2.0), dense=inner, itself=holder)
        holder.spaces = {"x": [space, WithSlots(tf.Variable(3.0))]}
        of_spaces = ("0/dense/bias", "0/dense/kernel", "0/w", "1/w")
        return ["pair/a", *(f"spaces/x/{name}" for name in of_spaces)]

    class Holder(module.layers.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.dense = module.layers.Dense(1)
            self.dense.build((None, 2))
            self.built = True

    layer, plain = Holder(), tf.Module()
    names = fill(layer)
    assert fill(plain) == names == sorted(TensorFlowVariables(plain).variables)
    layer.pair.b = [module.optimizers.SGD(), layer.dense]
    layer.own = Loss()
    layer.own.w = tf.Variable(4.0)
    found = TensorFlowVariables(layer)
    assert sorted(found.variables) == ["dense/bias", "dense/kernel", *names]
    assert list(found.variables)[:2] == ["dense/kernel", "dense/bias"]


class Settings:
    """Keys as attributes: what is none of them is a `KeyError`."""

    def __init__(self, **items: Any) -> None:
        self.__dict__["items"] = items

    def __getattr__(self, key: str) -> Any:
        return self.__dict__["items"][key]


class Lax:
    """What it does not have is None."""

    def __init__(self, **items: Any) -> None:
        self.__dict__.update(items)

    def __getattr__(self, key: str) -> Any:
        return None


class LaxWithSlots:
    __slots__ = ("late", "w")

    def __init__(self, w: Any) -> None:
        self.w = w

    __getattr__ = Lax.__getattr__


class StrictWithSlots(LaxWithSlots):
    __slots__ = ()

    def __getattr__(self, key: str) -> Any:
        raise KeyError(key)


class Unbound:
    """As proxies of web frameworks: outside of a request it is of no class."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("outside of a request")

    @__class__.setter
    def __class__(self, kind: Any) -> None:
        pass


def holders(value: Any) -> list[Any]:
    """A layer of each Keras, a module and an object, all of which hold ``value``."""
    made: list[Any] = [keras.layers.Dense(1), tf_keras.layers.Dense(1), tf.Module()]
    for layer in made[:2]:
        layer.build((None, 1))
    made.append(types.SimpleNamespace())
    for holder in made:
        holder.own = value
    return made


def test_objects_that_answer_anything_hold_variables_as_others_do() -> None:
    kinds = (
        lambda w: Settings(w=w),
        lambda w: Lax(w=w),
        LaxWithSlots,
        StrictWithSlots,
    )
    for kind in kinds:
        w = tf.Variable(1.0)
        value = kind(w)
        name = "items/w" if kind is kinds[0] else "w"
        assert list(TensorFlowVariables(value).variables) == [name]
        for holder in holders(value):
            assert f"own/{name}" in TensorFlowVariables(holder).variables


def test_attributes_that_cannot_be_read_hold_nothing(tmp_path: Path) -> None:
    with shelve.open(str(tmp_path / "shelf")) as shelf:
        pass
    gone = weakref.proxy(Lax())
    b = tf.Variable(1.0)
    for unreadable, error in (
        (shelf, ValueError),
        (gone, ReferenceError),
        (Unbound(), RuntimeError),
    ):
        for holder in holders(types.SimpleNamespace(a=[unreadable], b=b)):
            assert TensorFlowVariables(holder).variables["own/b"] is b
        with pytest.raises(error):  # what is passed itself is not left out
            TensorFlowVariables([unreadable, b])


def test_objects_and_lists_may_be_nested_more_deeply_than_calls() -> None:
    w, b = tf.Variable(1.0), tf.Variable(2.0)
    node, nest = types.SimpleNamespace(w=w), [b]
    for _ in range(1_100):
        node, nest = types.SimpleNamespace(next=node), [nest]
    for holder in holders(types.SimpleNamespace(node=node, nest=nest)):
        found = {id(v) for v in TensorFlowVariables(holder).variables.values()}
        assert {id(w), id(b)} <= found
    too_deep: Any = w
    for _ in range(3_000):
        too_deep = [too_deep]
    with pytest.raises(ValueError, match="expected fewer levels of containers"):
        TensorFlowVariables(too_deep)


@pytest.mark.parametrize("module", [keras, tf_keras])
@pytest.mark.parametrize("context", [contextlib.nullcontext, lambda: tf.Graph().as_default()])
def test_layers_that_are_adapted_say_that_what_is_set_has_no_effect(
    module: Any, context: Any
) -> None:
    norm = module.layers.Normalization()
    norm.adapt(numbers(5, 2))
    weights = TensorFlowVariables(module.Sequential([module.Input((2,)), norm]))
    values = weights.get_weights()
    with context():
        weights.set_weights(values)  # the same, as of a process that has adapted it alike
        match = r"'normalization/mean': .* has no effect"
        with pytest.warns(RuntimeWarning, match=match) as caught:
            weights.set_flat(weights.get_flat() + 1.0)
        assert caught[0].filename == __file__
        weights.set_weights({"normalization/mean": np.zeros(2)})  # it has been said


def test_adapted_values_that_the_compute_dtype_does_not_hold() -> None:
    norm = keras.layers.Normalization(dtype="mixed_float16")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras overflows, too
        norm.adapt(1e4 * numbers(5, 2))
    weights = TensorFlowVariables(norm)
    weights.set_flat(weights.get_flat())  # warns of nothing: warnings are errors


# NumPy warns of how tf_keras adapts.
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("module", [keras, tf_keras])
def test_lookups_bins_and_tables_of_adapted_layers(module: Any) -> None:
    words = module.layers.StringLookup(
        vocabulary=["a", "b"], idf_weights=[0.5, 0.25], output_mode="tf_idf"
    )
    text = module.Sequential([module.Input((1,), dtype="string"), words, module.layers.Dense(1)])
    bins = module.layers.Discretization(num_bins=3)
    bins.adapt(numbers(5, 1))
    numeric = module.Sequential([module.Input((1,)), bins, module.layers.Dense(1)])
    lookup = module.layers.TextVectorization(vocabulary=["a", "b"], output_sequence_length=3)
    layers = [module.Input((1,), dtype="string"), lookup, module.layers.Embedding(4, 2)]
    tables = TensorFlowVariables(module.Sequential(layers))  # which are no variables
    assert list(tables.variables) == ["embedding/embeddings"]
    own = ["string_lookup/idf_weights"] if module is keras else []
    names = ["dense/kernel", "dense/bias"]
    weights = TensorFlowVariables(text)
    assert list(weights.variables) == [*names, *own]
    assert list(TensorFlowVariables(numeric).variables) == names
    if own:
        with pytest.warns(RuntimeWarning, match="'string_lookup/idf_weights'"):
            weights.set_weights({"string_lookup/idf_weights": np.zeros(3)})


def test_a_loaded_saved_model(tmp_path: Path) -> None:
    tree = Tree()
    tf.saved_model.save(tree, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    ours, theirs = TensorFlowVariables(tree), TensorFlowVariables(loaded)
    assert theirs.layout.names == ours.layout.names
    ours.set_flat(np.arange(ours.get_flat_size()))
    theirs.set_weights(ours.get_weights(), strict=True)
    np.testing.assert_array_equal(loaded.up.w.numpy(), tree.up.w.numpy())


@pytest.mark.parametrize("normalised", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_layers_of_exported_models_have_no_names_of_the_process_that_exported_them(
    tmp_path: Path, normalised: bool
) -> None:
    names = []
    for k in range(2):  # the second one has `dense_1` where the first one has `dense`
        layers = [keras.Input((3,)), keras.layers.Dense(2)]
        layers += [keras.layers.BatchNormalization()] * normalised
        keras.Sequential(layers).export(tmp_path / str(k), verbose=False)
        loaded = keras.layers.TFSMLayer(tmp_path / str(k), call_endpoint="serve")
        weights = TensorFlowVariables(keras.Sequential([keras.Input((3,)), loaded]))
        assert len(weights.variables) == 2 + 4 * normalised
        names.append(list(weights.variables))
    assert names[0] == names[1]


def test_a_loaded_saved_model_of_a_compiled_tf_keras_model_has_its_optimizer(
    tmp_path: Path,
) -> None:
    model = tf_keras.Sequential([tf_keras.layers.Dense(1, input_shape=(2,))])
    model.compile("adam", "mse", run_eagerly=True)
    model.optimizer.build(model.trainable_variables)
    tf.saved_model.save(model, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    weights = TensorFlowVariables(loaded)
    found = {id(v) for v in weights.variables.values()}
    assert found >= {id(v) for v in (*loaded.variables, *loaded.optimizer.variables)}
    weights.set_flat(np.arange(weights.get_flat_size()))
    slot = loaded.optimizer.variables[-1]
    (name,) = (name for name, v in weights.variables.items() if v is slot)
    np.testing.assert_array_equal(slot.numpy(), weights.get_weights()[name])
    assert np.any(slot.numpy() > 0)


def test_keys_are_named_by_their_value_or_numbered() -> None:
    class Key:
        pass

    class Averaged(tf.Module):  # type: ignore[misc]
        def __init__(self, w: Any) -> None:
            super().__init__()
            self.slots = {w.ref(): tf.Variable(0.0), "own": tf.Variable(1.0)}

    w = tf.Variable([1.0], name="w")
    average = tf.train.ExponentialMovingAverage(0.9)
    average.apply([w])
    cases: list[tuple[Any, list[str]]] = [
        ([w, average], ["w", "1/averages/0"]),
        (Averaged(w), ["slots/0", "slots/own"]),
        ({Key(): tf.Variable(1.0), ("a", 1): tf.Variable(2.0)}, ["0", "('a', 1)"]),
        ({w.ref(): {2: tf.Variable(1.0)}, 0: {2: tf.Variable(1.0)}}, ["0/2", "0/2_1"]),
    ]
    for output, names in cases:
        assert list(TensorFlowVariables(output).variables) == names

    class Text(str):
        __slots__ = ()

        def __str__(self) -> str:
            return f"<Text at {id(self)}>"

        __repr__ = __str__

    class Count(int):
        __repr__ = __str__ = Text.__str__

    class Part(float):
        __repr__ = __str__ = Text.__str__

    class Raw(bytes):
        __slots__ = ()
        __repr__ = __str__ = Text.__str__

    plain = ["x", 1, 0.5, b"y", ("x", (1, 0.5)), True, np.str_("z"), np.float64(2.5)]
    own = [
        Text("x"),
        Count(1),
        Part(0.5),
        Raw(b"y"),
        (Text("x"), (Count(1), Part(0.5))),
        *plain[5:],
    ]
    found, expected = (
        list(TensorFlowVariables({key: tf.Variable(0.0) for key in keys}).variables)
        for keys in (own, plain)
    )
    assert found == expected
    assert expected[:4] == ["x", "1", "0.5", "b'y'"]


def test_containers_that_contain_themselves_are_entered_once() -> None:
    w, b = tf.Variable([1.0], name="w"), tf.Variable([2.0], name="b")
    items: list[Any] = [w]
    named: dict[str, Any] = {"items": items, "b": b}
    items.append(named)
    named["itself"] = named
    for output in (items, named):
        assert sorted(TensorFlowVariables(output).get_flat().tolist()) == [1.0, 2.0]
    empty: list[Any] = []
    empty.append(empty)
    with pytest.raises(ValueError, match="to have variables, found none"):
        TensorFlowVariables(empty)


# NumPy warns of how Keras saves.
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_a_loaded_cloned_or_sent_keras_model_takes_the_weights_of_its_origin(
    tmp_path: Path,
) -> None:
    model, small = KINDS["keras_convolutional"]().output, KINDS["keras_sequential"]().output
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    sent = cloudpickle.loads(cloudpickle.dumps(small))
    cloned = keras.models.clone_model(small)
    for origin, copy in ((model, loaded), (small, cloned), (small, sent)):
        here, there = TensorFlowVariables(origin), TensorFlowVariables(copy)
        assert there.layout == here.layout
        assert copy is not sent or np.array_equal(there.get_flat(), here.get_flat())
        there.set_flat(np.zeros(there.get_flat_size()))
        assert here.get_flat().any()


# ---- graphs ----


@pytest.fixture
def graph() -> Iterator[Any]:
    with tf.Graph().as_default() as new:
        yield new


def initialized() -> Any:
    session = tf1.Session()
    session.run(tf1.global_variables_initializer())
    return session


def check_round_trip(weights: Any, session: Any) -> None:
    """Set numbers, and read every variable through the session itself."""
    flat = np.arange(weights.get_flat_size(), dtype=weights.layout.dtype)
    weights.set_flat(flat)
    read = session.run(weights.variables)
    np.testing.assert_array_equal(np.concatenate([v.ravel() for v in read.values()]), flat)
    np.testing.assert_array_equal(weights.get_flat(), flat)
    weights.set_weights({name: array + 1 for name, array in weights.get_weights().items()})
    for name, array in session.run(weights.variables).items():
        np.testing.assert_array_equal(array, read[name] + 1)


@pytest.mark.parametrize("use_resource", [True, False])
def test_get_variable_with_scopes_templates_and_reuse(graph: Any, use_resource: Any) -> None:
    def tower(x: Any) -> Any:
        with tf1.variable_scope("tower", reuse=tf1.AUTO_REUSE):
            with tf1.variable_scope("inner"):
                w = tf1.get_variable("w", [3, 2], use_resource=use_resource)
            return tf.matmul(x, w) + tf1.get_variable("b", [2], use_resource=use_resource)

    def layer(x: Any) -> Any:
        return x * tf1.get_variable("scale", [], use_resource=use_resource)

    x = tf1.placeholder(tf.float32, [None, 3])
    template = tf1.make_template("layer", layer)
    first, second = tower(x), template(template(tower(x * 2)))
    session = initialized()
    weights = TensorFlowVariables([first, second], session)
    assert list(weights.variables) == ["tower/inner/w", "tower/b", "layer/scale"]
    check_round_trip(weights, session)


@pytest.mark.parametrize("use_resource", [True, False])
def test_partitioned_variables_are_moved_in_parts(graph: Any, use_resource: Any) -> None:
    whole = tf1.get_variable(
        "w", [5, 2], partitioner=tf1.fixed_size_partitioner(2), use_resource=use_resource
    )
    names = ["w/part_0", "w/part_1"]
    session = initialized()
    for output in (whole, [whole], {"a": whole}, tf.reduce_sum(whole.as_tensor())):
        assert list(TensorFlowVariables(output).variables) == names
    assert list(TensorFlowVariables(None, input_variables=[whole]).variables) == names
    weights = TensorFlowVariables(whole, session)
    check_round_trip(weights, session)
    weights.set_flat(np.arange(10))
    np.testing.assert_array_equal(
        session.run(whole.as_tensor()), np.arange(10, dtype=np.float32).reshape(5, 2)
    )


@pytest.mark.parametrize("version", [1, 2])
def test_bodies_of_conditions_and_loops(graph: Any, version: Any) -> None:
    (tf1.enable_control_flow_v2 if version == 2 else tf1.disable_control_flow_v2)()
    try:
        names = ["before", "condition", "yes", "no", "bound", "body"]
        before, condition, yes, no, bound, body = (
            tf1.get_variable(name, [], initializer=tf1.ones_initializer()) for name in names
        )
        unused = tf1.get_variable("unused", [])
        chosen = tf1.cond(condition > 0, lambda: yes * before, lambda: no * 2.0)
        _, total = tf1.while_loop(
            lambda i, _: i < bound, lambda i, x: (i + 1, x * body), [0.0, chosen]
        )
        session = initialized()
        weights = TensorFlowVariables(total, session)
        assert list(weights.variables) == names
        assert unused.op.name not in weights.variables
        check_round_trip(weights, session)
    finally:
        tf1.enable_control_flow_v2()


def test_functions_control_dependencies_and_many_operations_lead_to_variables(graph: Any) -> None:
    counter = tf1.get_variable("counter", [], tf.int64, initializer=tf1.zeros_initializer())
    a, b = tf1.get_variable("a", []), tf1.get_variable("b", [])

    @tf.function  # type: ignore[untyped-decorator]
    def double(x: Any) -> Any:
        return x * a

    deep = b * 2.0
    for _ in range(1_100):  # deeper than Python's recursion
        deep = tf.raw_ops.Identity(input=deep)
    with tf.control_dependencies([tf1.assign_add(counter, 1)]):
        train = tf.no_op()
    session = initialized()
    for output, names in (
        (train, ["counter"]),
        (double(2.0), ["a"]),
        (deep, ["b"]),
    ):
        weights = TensorFlowVariables(output, session)
        assert list(weights.variables) == names
        check_round_trip(weights, session)


def test_a_training_operation_leads_to_slots_as_well(graph: Any) -> None:
    w = tf1.get_variable("w", [2])
    optimizer = tf1.train.AdamOptimizer(0.1)
    step = optimizer.minimize(tf.reduce_sum(w * w))
    names = {"w", "w/Adam", "w/Adam_1", "beta1_power", "beta2_power"}
    assert set(TensorFlowVariables(step).variables) == names
    assert set(TensorFlowVariables(w, None, optimizer.variables()).variables) == names
    assert next(iter(TensorFlowVariables(w, None, optimizer.variables()).variables)) == "w"
    assert set(TensorFlowVariables([w, optimizer]).variables) == names


@pytest.mark.parametrize("module", ["keras", "tf_keras"])
def test_layers_of_keras_in_a_graph(graph: Any, module: Any) -> None:
    layers = {"keras": keras, "tf_keras": tf_keras}[module].layers
    hidden, head = layers.Dense(3), layers.Dense(2)
    y = head(hidden(tf1.placeholder(tf.float32, [None, 4])))
    session = initialized()
    by_search, by_layer = (TensorFlowVariables(o, session) for o in (y, [hidden, head]))
    assert by_search.layout == by_layer.layout
    check_round_trip(by_layer, session)
    mixed = TensorFlowVariables([y, {"head": head}], session)
    assert mixed.layout == by_layer.layout


def test_namespaces_and_packages_that_are_called_like_pythons_own_are_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = tf.Variable(1.0)
    inner = types.SimpleNamespace(inner=types.SimpleNamespace(w=w), b=tf.Variable(2.0))
    assert list(TensorFlowVariables(inner).variables) == ["b", "inner/w"]
    tmp_path.joinpath("code.py").write_text("class Agent:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "code", raising=False)
    _structure._may_hold.cache_clear()
    module, agent = tf.Module(), importlib.import_module("code").Agent()
    agent.w, module.agent, module.thread = w, agent, threading.local()
    module.thread.w = tf.Variable(3.0)  # of Python's own: not searched
    try:
        assert list(TensorFlowVariables(module).variables) == ["agent/w"]
    finally:
        _structure._may_hold.cache_clear()
