"""Variables of `tf.distribute` strategies, on two logical CPUs, and of several devices."""

import contextlib
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from interrupts import Interrupts
from tf_kinds import numbers
from tf_models import mostly_bound  # and it makes the logical devices

from flatweights.tensorflow import TensorFlowVariables
from flatweights.tensorflow._mover import Mover

ON_READ = tf.VariableSynchronization.ON_READ
AGGREGATIONS = {
    "sum": tf.VariableAggregation.SUM,
    "mean": tf.VariableAggregation.MEAN,
    "first": tf.VariableAggregation.ONLY_FIRST_REPLICA,
}


@pytest.fixture
def strategy() -> Any:
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def inner(variable: Any) -> Any:
    variable = variable._value if isinstance(variable, keras.Variable) else variable
    return getattr(variable, "_variable", variable)


def replicas(variable: Any) -> Any:
    """The value of each replica, read by TensorFlow."""
    return [np.array(component.numpy()) for component in inner(variable).values]


def keras_model() -> Any:
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(3),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.1, seed=0),
            keras.layers.Dense(2),
        ]
    )
    model.compile(keras.optimizers.Adam(0.1), "mse")
    model.optimizer.build(model.trainable_variables)
    return [model, model.optimizer], [*model.variables, *model.optimizer.variables]


def tf_keras_model() -> Any:
    model = tf_keras.Sequential(
        [
            tf_keras.Input((4,)),
            tf_keras.layers.Dense(3),
            tf_keras.layers.BatchNormalization(),
            tf_keras.layers.Dense(2),
        ]
    )
    model.compile(tf_keras.optimizers.Adam(0.1), "mse")
    optimizer = model.optimizer
    optimizer.build(model.trainable_variables)
    variables = [*model.variables, *optimizer.variables, optimizer.learning_rate]
    return [model, optimizer], variables


def module() -> Any:
    class Module(tf.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.w = tf.Variable([[1.0, 2.0]])
            self.n = tf.Variable([3, 4], dtype=tf.int64)

    made = Module()
    return made, [made.n, made.w]


BUILDERS = {"keras": keras_model, "tf_keras": tf_keras_model, "module": module}


def on_paths(*first: tuple[Any, str], of: Iterable[Any]) -> pytest.MarkDecorator:
    """Cases with both ways of moving weights, of which those are slow that are not given first."""
    others = [(case, path) for case in of for path in ("bound", "ops") if (case, path) not in first]
    slow = [pytest.param(*pair, marks=pytest.mark.slow) for pair in others]
    return pytest.mark.parametrize(("case", "path"), [*first, *slow], indirect=["path"])


def test_layers_of_mirrored_variables_are_watched_under_their_names(strategy: Any) -> None:
    with strategy.scope():
        norm = keras.layers.Normalization(name="norm")
        norm.adapt(numbers(5, 2))
        dense = keras.layers.Dense(2, name="dense")
        model = keras.Sequential([keras.Input((2,)), norm, dense])
    weights = TensorFlowVariables(model)
    values = weights.get_flat()
    weights.set_flat(values)
    with pytest.warns(RuntimeWarning, match="'norm/mean': .* has no effect"):
        weights.set_flat(values + 1.0)
    model.pop()
    with pytest.raises(RuntimeError, match="lacks 'dense/kernel'"):
        weights.get_flat()


@on_paths(("keras", "bound"), ("tf_keras", "ops"), ("module", "bound"), of=BUILDERS)
def test_mirrored_variables_are_read_once_and_set_on_all_replicas(
    strategy: Any, case: Any, path: Any
) -> None:
    with strategy.scope():
        output, variables = BUILDERS[case]()
    weights = TensorFlowVariables(output)
    assert len(weights.variables) == len(variables)
    assert {id(v) for v in weights.variables.values()} == {id(v) for v in variables}
    for key, array in weights.get_weights().items():
        np.testing.assert_array_equal(array, inner(weights.variables[key]).numpy(), strict=True)
    flat = np.arange(weights.get_flat_size(), dtype=weights.layout.dtype)
    weights.set_flat(flat)
    np.testing.assert_array_equal(weights.get_flat(), flat)
    for slot, variable in zip(weights.layout.slots, weights.variables.values(), strict=True):
        expected = flat[slot.start : slot.start + slot.size].reshape(slot.shape)
        for array in replicas(variable):
            np.testing.assert_array_equal(array, expected.astype(slot.dtype), strict=True)
    if path == "bound":
        assert set(weights.unbound) == {
            key
            for key, v in weights.variables.items()
            if getattr(inner(v), "synchronization", None) == ON_READ
        }


def test_every_way_of_setting_reaches_all_replicas_or_none(strategy: Any, tmp_path: Path) -> None:
    with strategy.scope():
        a, b = tf.Variable([1.0, 2.0], name="a"), tf.Variable([3.0], name="b")
    weights = TensorFlowVariables([a, b])
    weights.set_weights(weights.get_weights())
    weights.set_weights({"b": [5]})
    assert [r.tolist() for r in (*replicas(a), *replicas(b))] == [[1, 2], [1, 2], [5], [5]]
    weights.set_weights({"x": np.float32([7, 8]), "y": np.float32([9])})  # type: ignore[arg-type]
    assert [r.tolist() for r in (*replicas(a), *replicas(b))] == [[7, 8], [7, 8], [9], [9]]
    weights.add_flat([1, 1, 1])
    assert [r.tolist() for r in (*replicas(a), *replicas(b))] == [[8, 9], [8, 9], [10], [10]]
    weights.lerp_flat([0, 1, 0], 0.5)
    assert [r.tolist() for r in (*replicas(a), *replicas(b))] == [[4, 5], [4, 5], [5], [5]]
    frozen = np.float32([1, 2, 3])  # type: ignore[arg-type]
    frozen.setflags(write=False)
    weights.set_flat(frozen, share=True)
    assert [r.tolist() for r in (*replicas(a), *replicas(b))] == [[1, 2], [1, 2], [3], [3]]
    weights.save(tmp_path / "saved")
    weights.set_flat(np.zeros(3, np.float32))
    assert [r.tolist() for r in (*replicas(a), *replicas(b))] == [[0, 0], [0, 0], [0], [0]]
    weights.load(tmp_path / "saved")
    for call in (lambda: weights.set_flat([1, 2]), lambda: weights.set_weights({"a": [1]})):
        with pytest.raises(ValueError, match="expected"):
            call()  # type: ignore[no-untyped-call]
    assert [r.tolist() for r in (*replicas(a), *replicas(b))] == [[1, 2], [1, 2], [3], [3]]


@on_paths(
    *((name, "bound") for name in AGGREGATIONS), ("mean", "ops"), ("sum", "ops"), of=AGGREGATIONS
)
def test_synchronized_variables_are_read_and_assigned_by_tensorflow(
    strategy: Any, case: Any
) -> None:
    with strategy.scope():
        v = tf.Variable(
            [1.0, 2.0], synchronization=ON_READ, aggregation=AGGREGATIONS[case], name="v"
        )
        beside = tf.Variable([3.0], name="beside")
    for component, value in zip(v.values, ([2.0, 4.0], [6.0, 8.0]), strict=True):
        component.assign(value)
    weights = TensorFlowVariables([v, beside])
    read = {"sum": [8, 12], "mean": [4, 6], "first": [2, 4]}[case]
    np.testing.assert_array_equal(v.numpy(), read)
    np.testing.assert_array_equal(weights.get_flat(), [*read, 3])
    np.testing.assert_array_equal(weights.get_weights()["v"], read)
    for call in (
        lambda: weights.set_flat([4, 6, 5]),
        lambda: weights.set_weights({"v": [4, 6], "beside": [5]}),
        lambda: weights.set_weights({"v": [4, 6]}),
    ):
        v.assign(tf.constant([0.0, 0.0]))
        call()  # type: ignore[no-untyped-call]
        ours = replicas(v)
        v.assign(tf.constant([4.0, 6.0]))
        # TensorFlow would give each replica half of a sum, which may not be a number of its kind.
        theirs = [[4, 6], [0, 0]] if case == "sum" else replicas(v)
        np.testing.assert_array_equal(ours, theirs)
        np.testing.assert_array_equal(weights.get_flat(), [4, 6, 5])
    assert next(iter(weights.unbound)) == "v"
    if case != "sum":
        return
    with strategy.scope():
        counts = tf.Variable(
            [0, 0], synchronization=ON_READ, aggregation=AGGREGATIONS["sum"], name="counts"
        )
    weights = TensorFlowVariables([counts, tf.Variable([1], name="beside")])
    for call in (
        lambda: weights.set_flat([7, 5, 2]),  # odd: no replica holds half of them
        lambda: weights.set_weights({"counts": [7, 5]}),
        lambda: weights.set_weights(weights.get_weights()),
    ):
        call()
        np.testing.assert_array_equal(counts.numpy(), [7, 5])
        np.testing.assert_array_equal(weights.get_flat(), [7, 5, 2])


@on_paths(("keras", "ops"), ("tf_keras", "bound"), of=["keras", "tf_keras"])
def test_weights_go_between_a_strategy_and_one_device(strategy: Any, case: Any) -> None:
    with strategy.scope():
        mirrored = TensorFlowVariables(BUILDERS[case]()[0])
    alone = TensorFlowVariables(BUILDERS[case]()[0])
    assert mirrored.layout == alone.layout
    alone.set_weights(mirrored.get_weights(), strict=True)
    np.testing.assert_array_equal(alone.get_flat(), mirrored.get_flat())
    alone.add_flat(np.ones(alone.get_flat_size()))
    mirrored.set_weights(alone.get_weights(), strict=True)
    np.testing.assert_array_equal(alone.get_flat(), mirrored.get_flat())


def test_variables_of_several_strategies_and_replicas_alone(strategy: Any) -> None:
    with strategy.scope():
        a = tf.Variable([1.0], name="a")
    with tf.distribute.MirroredStrategy(["CPU:1"]).scope():
        b = tf.Variable([2.0], name="b")
    with tf.distribute.OneDeviceStrategy("CPU:1").scope():
        c = tf.Variable([3.0], name="c")
    with tf.distribute.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"]).scope():
        d = tf.Variable([4.0], name="d")
    e = tf.Variable([5.0], name="e")
    weights = TensorFlowVariables([a, b, c, d, e])
    np.testing.assert_array_equal(weights.get_flat(), [1, 2, 3, 4, 5])
    weights.set_flat([6, 7, 8, 9, 10])
    assert [v.numpy().tolist() for v in (a, b, c, d, e)] == [[6], [7], [8], [9], [10]]
    assert [r.tolist() for r in replicas(a)] == [[6], [6]]
    alone = TensorFlowVariables(list(strategy.experimental_local_results(a)))
    alone.set_flat([2, 3])
    assert [r.tolist() for r in replicas(a)] == [[2], [3]]


def test_distributed_calls_trace_nothing_anew(
    strategy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with strategy.scope():
        a = tf.Variable([1.0], name="a")
        b = tf.Variable([1.0], synchronization=ON_READ, aggregation=AGGREGATIONS["mean"], name="b")
    weights = TensorFlowVariables([a, b])

    def calls() -> None:
        weights.set_flat(weights.get_flat())
        weights.set_weights(weights.get_weights())
        weights.set_weights({"b": [3]})

    calls()
    traced = []
    original = tf.Graph.__init__

    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        traced.append(self)
        original(self, *args, **kwargs)

    monkeypatch.setattr(tf.Graph, "__init__", counted)
    for _ in range(10):
        calls()
    assert not traced


def test_within_the_scope_and_replicas_of_the_strategy_calls_work_as_outside(strategy: Any) -> None:
    with strategy.scope():
        a = tf.Variable([1.0], name="a")
        b = tf.Variable([2.0], synchronization=ON_READ, aggregation=AGGREGATIONS["sum"], name="b")
        weights = TensorFlowVariables([a, b])
        np.testing.assert_array_equal(weights.get_flat(), [1, 4])  # 2 in each replica
        weights.set_flat([3, 4])
        weights.set_weights({"b": [6]})
        np.testing.assert_array_equal(weights.get_weights()["b"], [6])
    assert [r.tolist() for r in (*replicas(a), *replicas(b))] == [[3], [3], [6], [0]]
    with strategy.scope():
        c = tf.Variable([1.0], name="c", aggregation=tf.VariableAggregation.MEAN)
    weights = TensorFlowVariables(c)
    got = strategy.run(lambda: tf.constant(weights.get_flat()))
    assert [value.numpy().tolist() for value in got.values] == [[1], [1]]


@on_paths((keras, "ops"), (tf_keras, "bound"), of=[keras, tf_keras])
def test_within_the_scope_of_the_strategy_steps_and_gradients_say_where_to_call_them(
    strategy: Any, case: Any
) -> None:
    with strategy.scope():
        a, sgd = tf.Variable([1.0], name="a"), case.optimizers.SGD(0.5)
    weights = TensorFlowVariables(a)
    evaluate = weights.value_and_gradient(lambda: tf.reduce_sum(a * a))
    calls = [
        lambda: weights.apply_flat_gradients(sgd, [2]),
        lambda: weights.value_and_gradient(lambda: tf.reduce_sum(a * a)),
        lambda: evaluate([3]),
    ]
    for _ in range(2):  # before and after the step was traced
        for call in calls:
            with strategy.scope(), pytest.raises(RuntimeError, match=r"scope.*call this outside"):
                call()  # type: ignore[no-untyped-call]
        weights.set_flat([3])
        weights.apply_flat_gradients(sgd, [2])
        assert [r.tolist() for r in replicas(a)] == [[2], [2]]
    assert evaluate([3])[1].tolist() == [6]


def test_replicas_are_equal_after_sets_in_several_threads(
    strategy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with strategy.scope():
        v = tf.Variable(tf.zeros(200), name="v")
    models = [TensorFlowVariables(v) for _ in range(2)]
    entered, both_set = threading.Event(), threading.Event()
    follow = Mover.set_parts

    def slow_follow(self: Any, *args: Any, **kwargs: Any) -> None:
        is_follower = self not in [model._mover for model in models]
        if is_follower and not entered.is_set():  # it has read the values that it will write
            entered.set()
            both_set.wait(0.5)  # the second one gets here, unless there is a lock
        follow(self, *args, **kwargs)

    monkeypatch.setattr(Mover, "set_parts", slow_follow)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(models[0].set_flat, np.full(200, 1, np.float32))
        assert entered.wait(120)
        models[1].set_flat(np.full(200, 2, np.float32))
        both_set.set()
        first.result()
    np.testing.assert_array_equal(*replicas(v))


def test_what_cannot_be_read_as_one_value_is_refused_by_name(strategy: Any) -> None:
    with strategy.scope():
        v = tf.Variable([1.0], synchronization=ON_READ, name="own")
    with pytest.raises(ValueError, match=r"variable 'own': expected an aggregation.*leave it out"):
        TensorFlowVariables(v)
    from tensorflow.experimental import dtensor

    mesh = dtensor.create_mesh([("x", 2)], devices=["CPU:0", "CPU:1"])
    rows, whole = (
        dtensor.DVariable(
            dtensor.call_with_layout(tf.zeros, dtensor.Layout(spec, mesh), shape=(4, 2)), name=name
        )
        for name, spec in (("rows", ["x", dtensor.UNSHARDED]), ("whole", [dtensor.UNSHARDED] * 2))
    )
    message = r"'rows': expected a DTensor .* got the layout \['x', 'unsharded'\]; leave it out"
    with pytest.raises(ValueError, match=message):
        TensorFlowVariables([rows, whole])
    assert (TensorFlowVariables(whole).get_flat() == np.zeros(8)).all()


@mostly_bound
def test_replicas_are_equal_after_a_signal_handler_set_others(path: Any, strategy: Any) -> None:
    with strategy.scope():
        mirrored = [tf.Variable(np.zeros(2), dtype=d) for d in (tf.float32, tf.float64)]
    weights = TensorFlowVariables(mirrored)
    sets = 0

    def handle() -> None:
        nonlocal sets
        with contextlib.suppress(RuntimeError):
            weights.set_flat([2.0] * 4)
            sets += 1

    interrupts, is_hit = Interrupts(handle, at_lines_only=True), True
    while is_hit:
        weights.set_flat([0.0] * 4)
        is_hit = interrupts.hit(lambda: weights.set_flat([1.0] * 4))
        values = np.array([replicas(variable) for variable in mirrored])
        assert len(np.unique(values)) == 1
    assert sets
