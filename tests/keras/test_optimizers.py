"""The effects of `average_gradients` on an optimizer, in one process."""

import gc
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_programs import OPTIMIZERS, Place, build, images, in_threads, prepare
from process_groups import LocalProcessGroup

from flatweights import robust
from flatweights.keras import (
    AverageLogs,
    AverageWeights,
    average_gradients,
    mean_over_members,
)
from flatweights.ray import Member
from flatweights.server import FedAvgM
from flatweights.tensorflow import TensorFlowVariables
from flatweights.tensorflow._python_op import compute_in_python


@pytest.fixture(scope="module")
def member() -> Iterator[Member]:
    prepare()
    with LocalProcessGroup(1).join() as member:
        yield member


def test_it_is_the_optimizer_that_was_given(member: Member) -> None:
    for make in OPTIMIZERS.values():
        optimizer = make(keras.optimizers)
        kind, config = type(optimizer), keras.saving.serialize_keras_object(optimizer)
        averaging = average_gradients(optimizer, member=member)
        assert averaging is optimizer
        assert type(averaging) is kind
        assert keras.saving.serialize_keras_object(averaging) == config
        with pytest.raises(ValueError, match="it averages gradients already"):
            average_gradients(averaging, member=member)


def test_xla_may_compile_the_gradients_alone(member: Member) -> None:
    class Compiled(keras.Model):  # type: ignore[misc]
        @tf.function(jit_compile=True)  # type: ignore[untyped-decorator]
        def gradients(self, x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            return loss, tape.gradient(loss, self.trainable_variables)

        def train_step(self, data: Any) -> Any:
            loss, grads = self.gradients(*data)
            self.optimizer.apply(grads, self.trainable_variables)
            return {"loss": loss}

    x, y = (one[:64] for one in images("dense"))
    weights = []
    for kind in (keras.Model, Compiled):
        inner = build("dense", 0)
        model = kind(inner.inputs, inner.outputs)
        optimizer = average_gradients(keras.optimizers.SGD(0.1), member=member)
        run_eagerly = kind is keras.Model
        model.compile(optimizer, "mse", jit_compile=False, run_eagerly=run_eagerly)
        model.fit(x, y, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    for ours, theirs in zip(*weights, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # Keras saves variables like this
def test_a_model_is_saved_with_it_and_loaded_without(member: Member, tmp_path: Path) -> None:
    model = build("dense", 0)
    optimizer = average_gradients(keras.optimizers.Adam(0.01), member=member)
    model.compile(optimizer, "mse", run_eagerly=True)
    x, y = (one[:40] for one in images("dense"))
    model.fit(x, y, epochs=1, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for ours, theirs in zip(model.optimizer.variables, loaded.optimizer.variables, strict=True):
        assert np.array_equal(ours, theirs)
    loaded.run_eagerly = True
    average_gradients(loaded.optimizer, member=member)  # as a training that is resumed does
    for network in (model, loaded):
        network.fit(x, y, epochs=1, shuffle=False, verbose=0)
    assert all(map(np.array_equal, model.get_weights(), loaded.get_weights()))


def test_under_the_policy_of_half_precision_the_outer_optimizer_averages(
    member: Member,
) -> None:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        optimizer = keras.optimizers.SGD(0.1)
        with pytest.raises(ValueError, match=r"average_gradients\(keras.optimizers.LossScaleOptim"):
            average_gradients(optimizer, member=member)
        scaled = keras.optimizers.LossScaleOptimizer(optimizer)
        average_gradients(scaled, member=member)
        model = build("dense", 0)
        model.compile(scaled, "mse")
        assert model.optimizer is scaled
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
        with pytest.raises(ValueError, match="nonfinite: expected 'propagate' for a LossScale"):
            average_gradients(optimizer, member=member, nonfinite="raise")
    finally:
        keras.config.set_dtype_policy("float32")


class Lazy(keras.optimizers.Optimizer):  # type: ignore[misc]
    """An optimizer that makes its slots in the first step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(learning_rate=0.1, **options)
        self.momenta: dict[int, Any] = {}

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        k = self._get_variable_index(variable)
        if k not in self.momenta:
            with tf.init_scope():
                self.momenta[k] = self.add_variable_from_reference(variable, "momentum")
        self.assign(self.momenta[k], 0.9 * self.momenta[k] + gradient)
        self.assign_sub(variable, learning_rate * self.momenta[k])


@pytest.mark.parametrize("eagerly", [True, False])
def test_slots_that_the_first_step_makes_are_refused_if_members_are_healed(
    member: Member, eagerly: bool
) -> None:
    def fit(optimizer: Any, **terms: Any) -> None:
        model = build("dense", 0)
        average_gradients(optimizer, member=member, **terms)
        model.compile(optimizer, "mse", run_eagerly=eagerly)
        model.fit(*images("dense"), verbose=0, callbacks=[AverageLogs()])

    fit(Lazy())
    for options in ({}, {"gradient_accumulation_steps": 2}):
        with pytest.raises(ValueError, match="expected an optimizer that makes all of its var"):
            fit(Lazy(**options), min_results=1)


def test_slots_that_the_first_step_makes_are_averaged() -> None:
    prepare()

    def train(member: Member) -> list[Any]:
        model, optimizer = build("dense", member.rank), Lazy()
        model.compile(optimizer, "mse", run_eagerly=True)
        x, y = images("dense")
        averaging = AverageWeights(member=member, include_optimizer=True)
        model.fit(x[member.rank :: 2], y[member.rank :: 2], verbose=0, callbacks=[averaging])
        return [v.numpy() for v in [*model.variables, *optimizer.momenta.values()]]

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(train, LocalProcessGroup(2).join_all())
    assert all(map(np.array_equal, first, second))


def test_under_the_policy_of_the_model_it_is_told_how_to_scale(
    member: Member,
) -> None:
    class Half(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(dtype="mixed_float16")
            self.dense = keras.layers.Dense(1, dtype="mixed_float16")

        def call(self, x: Any) -> Any:
            return self.dense(x)

    model = Half()
    model(images("dense")[0])
    model.compile(average_gradients(keras.optimizers.SGD(0.1), member=member), "mse")
    for callbacks in ([AverageLogs()], [AverageWeights()], []):
        with pytest.raises(
            (ValueError, RuntimeError), match=r"average_gradients\(keras.optimizers.LossScaleOptim"
        ):
            model.fit(*images("dense"), verbose=0, callbacks=callbacks)
    # Eagerly nothing is traced, and members would skip steps that others make.
    averaged = average_gradients(keras.optimizers.SGD(0.1), member=member)
    model.compile(averaged, "mse", run_eagerly=True)
    with pytest.raises(ValueError, match="expected the optimizer of the model, got the one inside"):
        model.fit(*images("dense"), verbose=0)
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    model.compile(average_gradients(scaled, member=member), "mse")
    model.fit(*images("dense"), verbose=0, callbacks=[AverageLogs()])
    assert model.optimizer is scaled


def test_an_overflow_halves_the_scale_and_skips_the_step(member: Member) -> None:
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=8.0)
    average_gradients(optimizer, member=member)
    variable = keras.Variable([1.0, 2.0])
    optimizer.build([variable])
    step = tf.function(lambda grad: optimizer.apply([grad], [variable]))
    step(tf.constant([np.inf, 0.0]))
    assert np.asarray(variable).tolist() == [1.0, 2.0]
    assert float(optimizer.dynamic_scale) == 4.0
    step(tf.constant([4.0, 0.0]))
    assert np.asarray(variable).tolist() == [0.0, 2.0]


def test_a_scale_around_it_is_told_to_go_inside(member: Member) -> None:
    inner = average_gradients(keras.optimizers.SGD(), member=member)
    outer = keras.optimizers.LossScaleOptimizer(inner)
    variable = keras.Variable([1.0])
    with pytest.raises(RuntimeError, match=r"average_gradients\(keras.optimizers.LossScaleOptim"):
        tf.function(lambda grad: outer.apply([grad], [variable]))(tf.ones(1))


def test_an_optimizer_of_another_model_is_refused(member: Member) -> None:
    optimizer = average_gradients(keras.optimizers.Adam(), member=member)
    x, y = np.ones((4, 2)), np.ones((4, 1))
    first, second = (
        keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name=name)])
        for name in ("first", "second")
    )
    first.compile(optimizer, "mse")
    first.fit(x, y, verbose=0)
    second.compile(optimizer, "mse")
    with pytest.raises(
        ValueError, match=r"got also 'sequential[_0-9]*/second/kernel'.* that of another model"
    ):
        second.fit(x, y, verbose=0)


def test_a_model_is_freed_although_tensorflow_keeps_its_steps(member: Member) -> None:
    """The registry of gradients has the graph of each step in which Keras calls `all_reduce`."""

    def trained() -> list[Any]:
        model = keras.Sequential(
            [
                keras.Input((2,), dtype="int32"),
                keras.layers.Embedding(8, 2),
                keras.layers.Flatten(),
                keras.layers.BatchNormalization(synchronized=True),
                keras.layers.Dense(1),
            ]
        )
        optimizer = average_gradients(keras.optimizers.SGD(), member=member, sparse=True)
        model.compile(optimizer, "mse")
        model.fit(np.zeros((4, 2), np.int32), np.ones((4, 1)), batch_size=2, verbose=0)
        return [weakref.ref(model), weakref.ref(optimizer)]

    freed = trained()
    gc.collect()
    assert [one() for one in freed] == [None, None]


def test_a_step_outlives_its_optimizer_with_an_error(member: Member) -> None:
    variable = keras.Variable([1.0])

    def traced() -> Any:
        optimizer = average_gradients(keras.optimizers.SGD(), member=member)
        optimizer.build([variable])
        function = tf.function(lambda grad: optimizer.apply([grad], [variable]))
        return function.get_concrete_function(tf.TensorSpec([1]))

    step = traced()
    gc.collect()
    with pytest.raises(tf.errors.OpError, match="the optimizer of a step lives as long as the"):
        step(tf.ones(1))


def test_xla_is_told_how_to_compile(member: Member) -> None:
    model = build("dense", 0)
    optimizer = average_gradients(keras.optimizers.SGD(), member=member)
    model.compile(optimizer, "mse", jit_compile=True)
    with pytest.raises(RuntimeError, match=r"model\.compile\(\.\.\., jit_compile=False\)"):
        model.fit(*images("dense"), verbose=0)


def test_replicas_of_a_strategy_are_refused_by_name(member: Member) -> None:
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        optimizer = keras.optimizers.SGD()
        with pytest.raises(
            RuntimeError, match=r"got an optimizer of a MirroredStrategy: .* Use Av"
        ):
            average_gradients(optimizer, member=member)
    with pytest.raises(RuntimeError, match=r"got an optimizer of a MirroredStrategy"):
        average_gradients(optimizer, member=member)


def test_members_that_may_come_back_need_one_optimizer(member: Member) -> None:
    class Own(keras.Sequential):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x) - y) ** 2)
            variables = self.trainable_variables
            gradients = tape.gradient(loss, variables)
            self.second.apply_gradients(zip(gradients, variables, strict=True))
            return {"loss": loss}

    model = Own([keras.Input((8,)), keras.layers.Dense(1)])
    model.second = average_gradients(keras.optimizers.SGD(), member=member, min_results=1)
    model.compile("sgd")
    with pytest.raises(ValueError, match=r"expected the optimizer that the model was compiled"):
        model.fit(*images("dense"), verbose=0, callbacks=[AverageLogs(member=member)])
    model.compile(model.second, "mse")
    with pytest.raises(ValueError, match=r"expected the callback AverageLogs or .* got neither"):
        model.fit(*images("dense"), verbose=0)


def test_an_exchange_a_step_of_one_buffer(member: Member) -> None:
    calls: list[int] = []  # those that were made in Python

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(member, name)

        def average_variables(self, variables: Any, *weight: Any, **options: Any) -> Any:
            calls.append(len(variables.layout))
            return member.average_variables(variables, *weight, **options)

    optimizer = keras.optimizers.SGD(gradient_accumulation_steps=4)
    average_gradients(optimizer, member=member)
    handle = optimizer.apply.__self__.handle
    handle._given = Counting()
    model = build("dense", 0)
    model.compile(optimizer, "mse")

    def responses(epochs: int) -> int:
        before = member.average(np.zeros(1)).number
        model.fit(*images("dense"), batch_size=12, epochs=epochs, verbose=0)  # of 20 steps
        after = member.average(np.zeros(1)).number
        assert before is not None
        assert after is not None
        return after - before

    assert responses(3) - responses(1) == 2 * 5
    assert {*calls} == {4}  # one slot for each variable


@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables")
@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
def test_variables_without_gradients_are_left_out_of_accumulated_ones(
    member: Member, in_graph: bool
) -> None:
    variables = [keras.Variable([1.0]), keras.Variable([2.0]), keras.Variable([[3.0, 4.0]])]
    optimizer = keras.optimizers.SGD(1.0, clipnorm=5.0, gradient_accumulation_steps=2)
    average_gradients(optimizer, member=member).build(variables)

    def step(first: Any, last: Any) -> None:
        optimizer.apply([first, None, last], variables)

    step = tf.function(step) if in_graph else step
    step(tf.constant([1.0]), tf.constant([[6.0, 8.0]]))
    assert [np.asarray(one).tolist() for one in variables] == [[1.0], [2.0], [[3.0, 4.0]]]
    step(tf.constant([3.0]), tf.constant([[6.0, 8.0]]))
    first, second, last = map(np.asarray, variables)
    assert (first.tolist(), second.tolist()) == ([-1.0], [2.0])
    np.testing.assert_allclose(last, [[0.0, 0.0]], atol=1e-6)  # clipped from a norm of 10


@pytest.mark.slow
def test_more_members_in_a_process_than_threads_of_tensorflow() -> None:
    """Each step waits for the steps of the others."""
    size = tf.config.threading.get_inter_op_parallelism_threads() + 4
    group = LocalProcessGroup(size)
    x, y = images("dense")
    networks = [build("dense", seed) for seed in range(size)]

    def fit(rank: int) -> Any:
        with group.join(rank) as member:
            model, logs = networks[rank], AverageLogs(member=member)
            optimizer = average_gradients(keras.optimizers.SGD(0.05), timeout=120.0)
            model.compile(optimizer, "mse")
            mine = slice(rank, len(x) // size * size, size)
            model.fit(x[mine], y[mine], 4, verbose=0, shuffle=False, callbacks=[logs])
            return model.get_weights()

    with ThreadPoolExecutor(size) as threads:
        first, *others = threads.map(fit, range(size))
    for weights in others:
        assert all(map(np.array_equal, first, weights))


def test_updates_in_functions_of_their_own_are_made_in_one_order() -> None:
    """As of an actor and a critic. In one member, the gradient of the first is late."""
    prepare()
    group = LocalProcessGroup(2)

    def train(rank: int) -> list[Any]:
        with group.join(rank) as member:
            actor, critic = (keras.Variable(np.zeros((4, 2), "float32")) for _ in range(2))
            updates = []
            for one in (actor, critic):
                optimizer = average_gradients(keras.optimizers.SGD(1.0), member=member)
                optimizer.build([one])
                is_late = one is actor and rank == 0
                step = partial(update, optimizer, one, is_late=is_late)
                updates.append(tf.function(step))
            both = tf.function(lambda x: [one(x + 10 * k) for k, one in enumerate(updates)])
            for _ in range(2):  # the first call of a process may happen to be in order
                both(tf.constant(float(rank)))
            return [actor.numpy(), critic.numpy()]

    def update(optimizer: Any, one: Any, value: tf.Tensor, *, is_late: bool) -> tf.Tensor:
        def wait(value: Any) -> Any:
            if is_late:
                threading.Event().wait(0.2)
            return value

        ready = tf.numpy_function(wait, [tf.fill((4, 2), value)], tf.float32, stateful=False)
        grad = tf.ensure_shape(ready, (4, 2))
        grad = mean_over_members(grad, optimizer)
        optimizer.apply([grad], [one])
        return one.value

    with ThreadPoolExecutor(2) as threads:
        for actor, critic in threads.map(train, range(2)):
            assert np.all(actor == -2 * 0.5)
            assert np.all(critic == -2 * 10.5)


def test_members_that_differ_in_a_step_are_an_error_that_says_how_to_start() -> None:
    group, variables = LocalProcessGroup(2), [keras.Variable([float(rank)]) for rank in range(2)]

    def apply(rank: int) -> Any:
        with group.join(rank) as member:
            optimizer = average_gradients(keras.optimizers.SGD(1.0), member=member)
            with pytest.raises(ValueError, match=r"got other values in ranks \[1\]\. Before fit"):
                optimizer.apply([tf.constant([1.0])], [variables[rank]])
            optimizer.build([variables[rank]])
            optimizer.apply([tf.constant([1.0])], [variables[rank]])
            return np.asarray(variables[rank]).tolist()

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(apply, range(2))) == [[-1.0]] * 2


def fit_in_float8(place: Place) -> list[list[Any]]:
    """Return the kernel and the scales of its inputs after each of two `fit`."""
    layer = keras.layers.Dense(1)
    model = keras.Sequential([keras.Input((8,)), layer])
    layer.quantize("float8")
    model.compile(average_gradients(keras.optimizers.Adam(), member=place.member()), "mse")
    x, y = (one[place.rank : 128 : 2] for one in images("dense"))
    ended = []
    for _ in range(2):
        model.fit((1 + place.rank) * x, y, verbose=0)
        ended.append([np.asarray(layer.kernel), np.asarray(layer.inputs_scale)])
    return ended


def test_scales_of_float8_are_each_members_own() -> None:
    first, second = in_threads(2, fit_in_float8)
    for (kernel, scale), (others, other_scale) in zip(first, second, strict=True):
        np.testing.assert_array_equal(kernel, others)
        assert scale != other_scale


def test_a_member_that_was_late_does_not_meet_the_end_of_the_others_training() -> None:
    group, both = LocalProcessGroup(2), threading.Barrier(2, timeout=60)

    def train(rank: int) -> Any:
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        with group.join(rank) as member:
            callback = AverageWeights(member=member, timeout=1.0, min_results=1)
            callback.set_model(model)

            def epoch() -> tuple[int, ...]:
                callback.on_epoch_begin(0)
                callback.on_train_batch_end(0)
                callback.on_epoch_end(0)
                assert callback.round is not None
                return callback.round.late

            callback.on_train_begin()
            if rank == 0:
                assert epoch() == (1,)
                both.wait()
            else:
                both.wait()
                assert epoch() == (1,)
            both.wait()
            if rank:  # it is an epoch behind
                epoch()
            callback.on_train_end()
            both.wait()

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(train, range(2)))


def begin_with_average_weights(member: Member) -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    callback = AverageWeights(member=member)
    callback.set_model(model)
    callback.on_train_begin()


def make_a_step(member: Member) -> None:
    variable = keras.Variable([0.0])
    optimizer = average_gradients(keras.optimizers.SGD(1.0), member=member)
    optimizer.build([variable])
    optimizer.apply([tf.constant([1.0])], [variable])
    np.testing.assert_array_equal(variable, [-1.0])


@pytest.mark.parametrize("act", [begin_with_average_weights, make_a_step])
def test_a_member_that_joins_again_takes_nothing_of_the_past(act: Callable[[Member], None]) -> None:
    group, both = LocalProcessGroup(2), threading.Barrier(2, timeout=60)

    def take_part(rank: int) -> None:
        with suppress(ArithmeticError), group.join(rank) as member:
            act(member)
            both.wait()
            if rank == 0:
                both.wait()  # until the other has ended, and has joined again
            else:
                raise ArithmeticError
        if rank:
            with group.join(rank) as member:
                with pytest.raises(TimeoutError, match="rank 1 was late, or has joined again"):
                    act(member)
                both.wait()

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(take_part, range(2)))


def test_a_rule_takes_the_place_of_the_mean() -> None:
    group, before = LocalProcessGroup(3), threading.Barrier(3)
    gave = [[1.0, 2.0], [3.0, 100.0], [5.0, -7.0]]

    def train(rank: int) -> Any:
        variable, kernel = keras.Variable([0.0, 0.0]), keras.layers.Dense(1, use_bias=False)
        model = keras.Sequential([keras.Input((2,)), kernel])
        model.compile("sgd", "mse")
        with group.join(rank) as member:
            rule = robust.Median()
            optimizer = average_gradients(keras.optimizers.SGD(1.0), member=member, rule=rule)
            optimizer.build([variable])
            optimizer.apply([tf.constant(gave[rank])], [variable])
            callback = AverageWeights(member=member, rule=rule)
            callback.set_model(model)
            callback.on_train_begin()
            callback.on_epoch_begin(0)
            model.set_weights([np.array(gave[rank])[:, None]])
            callback.on_train_batch_end(0)
            callback.on_epoch_end(0)
            before.wait()
            return np.asarray(variable).tolist(), model.get_weights()[0].tolist()

    with ThreadPoolExecutor(3) as threads:
        results = list(threads.map(train, range(3)))
    assert results == [([-3.0, -2.0], [[3.0], [2.0]])] * 3


def test_arguments_are_checked(member: Member) -> None:
    such = r"optimizer: expected an optimizer object of Keras 3, such as keras.optimizers.Adam\(\)"
    wrong = (("adam", "'adam'"), (3, "builtins.int"), (keras.optimizers.Adam, "the class Adam"))
    for given, got in wrong:
        with pytest.raises(TypeError, match=f"{such}, got {got}"):
            average_gradients(given, member=member)
    for make in (AverageLogs, AverageWeights):
        with pytest.raises(TypeError, match="member: expected a Member, got int"):
            make(member=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="rule: expected"):
        average_gradients(keras.optimizers.SGD(), member=member, rule="median")  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"outer: expected a function of the first weights.* got .*SGD"
    ):
        AverageWeights(outer=keras.optimizers.SGD(0.7))
    with pytest.raises(
        TypeError, match=r"variables: expected an object with layout.* got Sequential"
    ):
        member.average_variables(build("dense", 0))
    with pytest.raises(TypeError, match=r"got Sequential; pass its get_weights\(\)"):
        member.average(build("dense", 0))
    with pytest.raises(TypeError, match="timeout: expected a real number, got str"):
        AverageLogs(timeout="3")  # type: ignore[arg-type]
    for wrong_count in (1.5, np.nan, np.inf):
        with pytest.raises(TypeError, match=f"every: expected an integer, got {wrong_count}"):
            AverageWeights(wrong_count)  # type: ignore[arg-type]
    variables = "expected a list of variables, such as model.trainable_variables, got "
    optimizer = average_gradients(keras.optimizers.SGD(), member=member)
    with pytest.raises(TypeError, match=f"optimizer.build: {variables}nothing"):
        optimizer.build()
    with pytest.raises(TypeError, match=f"optimizer.build: {variables}Sequential"):
        optimizer.build(build("dense", 0))
    with pytest.raises(TypeError, match="weight: Median has no weights, all members count alike"):
        AverageWeights(weight=2.0, rule=robust.Median())
    for arguments, message in [
        ({"every": 0}, "every: expected at least 1, got 0"),
        ({"unit": "step"}, "unit: expected 'epoch' or 'batch', got 'step'"),
        ({"weight": "size"}, "weight: expected 'samples' or a positive number, got 'size'"),
        ({"weight": -1.0}, "weight: expected 'samples' or a positive number, got -1.0"),
        ({"weight": np.ones(2)}, r"weight: expected .* number, got array\(\[1., 1.\]\)"),
        ({"weight": None}, "weight: expected 'samples' or a positive number, got None"),
        ({"nonfinite": "drop"}, "nonfinite: expected 'propagate', 'raise' or 'skip', got 'drop'"),
        ({"min_results": 0}, "min_results: expected at least 1, got 0"),
        ({"timeout": -1}, "timeout: expected seconds, not negative, got -1"),
        ({"outer": print, "min_results": 1}, "min_results: expected None with outer"),
    ]:
        with pytest.raises(ValueError, match=message):
            AverageWeights(**arguments)  # type: ignore[arg-type]


def test_an_outer_optimizer_of_other_weights_is_refused_before_the_training(
    member: Member,
) -> None:
    def weights_of(model: Any) -> Any:
        return TensorFlowVariables(model, trainable_only=True).get_weights()

    model = build("dense", 0)
    model.compile("sgd", "mse")
    before = model.get_weights()
    convolutional = FedAvgM(weights_of(build("convolutional", 0)))
    such = "outer: expected an optimizer of the model's trainable variables, such as .* got one of"
    cases: list[tuple[Any, type[Exception], str]] = [
        (convolutional, ValueError, f"{such} other weights: expected 4 slots, got 6"),
        (FedAvgM(np.zeros(3)), ValueError, f"{such} other weights: expected FlatWeights, got ndar"),
        (lambda weights: FedAvgM(np.zeros(3)), ValueError, such),
        (lambda weights: None, TypeError, "expected a function that returns an optimizer of flat"),
    ]
    for outer, kind, message in cases:
        averaging = AverageWeights(member=member, outer=outer)
        with pytest.raises(kind, match=message):
            model.fit(*images("dense"), verbose=0, callbacks=[averaging])
    assert all(map(np.array_equal, model.get_weights(), before))
    averaging = AverageWeights(member=member, outer=FedAvgM(weights_of(model)))
    model.fit(*images("dense"), verbose=0, callbacks=[averaging])


def test_what_is_said_to_one_counts_for_all(member: Member) -> None:
    x, y = images("dense")
    model = build("dense", 0)
    optimizer = average_gradients(keras.optimizers.SGD(0.05))
    model.compile(optimizer, "mse")
    weights, logs = AverageWeights(timeout=3.0, member=member), AverageLogs(min_results=1)
    seen: list[Any] = []

    def look(*_: Any) -> None:
        for handle in (weights._handle, logs._handle, optimizer.apply.__self__.handle):
            seen.append((handle.take(), handle.timeout))
        seen.extend(one._handle.min_results for one in (weights, logs))

    spy = keras.callbacks.LambdaCallback(on_epoch_begin=look)
    model.fit(x, y, verbose=0, callbacks=[logs, spy, weights])
    assert seen == [(member, 3.0)] * 3 + [1, 1]
    # In another training, what its own callbacks say.
    spy = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda *_: seen.append(optimizer.apply.__self__.handle.timeout)
    )
    model.fit(x, y, verbose=0, callbacks=[AverageLogs(member=member, timeout=5.0), spy])
    assert seen[-1] == 5.0


def test_what_is_said_to_one_counts_for_all_optimizers_of_a_model(member: Member) -> None:
    x, y = images("dense")
    network = build("dense", 0)

    class Halves(keras.Model):  # type: ignore[misc]
        def train_step(self, _: Any) -> Any:
            variables = network.trainable_variables
            for k, one in enumerate((self.optimizer, self.other)):
                one.apply([*map(tf.zeros_like, variables[k::2])], variables[k::2])
            return {"loss": 0.0}

    halves = Halves()
    halves.built, halves.whole = True, network
    both = [average_gradients(keras.optimizers.SGD(0.05, name=name)) for name in ("a", "b")]
    halves.compile(both[0], run_eagerly=True)
    halves.other = both[1]
    handles, seen = [one.apply.__self__.handle for one in both], list[Any]()
    spy = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda *_: seen.extend((one.take(), one.timeout) for one in handles)
    )
    callbacks = [AverageLogs(member=member, timeout=3.0), spy]
    halves.fit(x[:8], y[:8], batch_size=8, verbose=0, callbacks=callbacks)
    assert seen == [(member, 3.0)] * 2
    halves.other = average_gradients(keras.optimizers.SGD(0.05), timeout=50.0)
    callbacks = [AverageLogs(member=member, timeout=5.0)]
    with pytest.raises(ValueError, match="timeout: expected one value for all callbacks and opt"):
        halves.fit(x[:8], y[:8], verbose=0, callbacks=callbacks)


def test_callbacks_that_were_told_different_things_raise_before_the_training(
    member: Member,
) -> None:
    model = build("dense", 0)
    model.compile(average_gradients(keras.optimizers.SGD(), timeout=4.0, member=member), "mse")
    before = model.get_weights()
    outer = AverageWeights(outer=partial(FedAvgM, momentum=0.9))
    for callbacks, message in [
        ([AverageLogs(timeout=5.0)], "timeout: .* got 5.0 for AverageLogs and 4.0 for average_g"),
        (
            [AverageLogs(min_results=1), AverageWeights(min_results=2)],
            "min_results: expected one value for all callbacks and optimizers of a ",
        ),
        (
            [AverageLogs(min_results=1), outer],
            r"min_results: expected None with AverageWeights\(outer=...\), which needs all members",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            model.fit(*images("dense"), verbose=0, callbacks=callbacks)
    assert all(map(np.array_equal, model.get_weights(), before))


@pytest.mark.slow
def test_a_training_goes_on_without_a_member_that_sleeps() -> None:
    """The list of docs/keras.md, whose first callback sets the terms of both."""
    group, woken = LocalProcessGroup(2), threading.Event()
    x, y = images("dense")
    networks = [build("dense", seed) for seed in range(2)]

    def fit(rank: int) -> Any:
        def sleep(epoch: int, _: Any) -> None:
            if rank == 1 and epoch == 1:
                assert woken.wait(300)
            elif rank == 0 and epoch == 3:
                woken.set()

        model = networks[rank]
        model.compile("sgd", "mse")
        with group.join(rank) as member:
            callbacks = [
                AverageWeights(min_results=1, timeout=1.0, member=member),
                AverageLogs(),
                keras.callbacks.LambdaCallback(on_epoch_begin=sleep),
            ]
            history = model.fit(x, y, epochs=4, verbose=0, callbacks=callbacks).history
            return history["loss"], model.get_weights()

    with ThreadPoolExecutor(2) as threads:
        (losses, weights), (_, others) = threads.map(fit, range(2))
    assert len(losses) == 4
    assert all(map(np.array_equal, weights, others))  # it has the latest average


def scaled_step(place: Place) -> Any:
    weights = keras.Variable(np.zeros(3, np.float32), name="w")
    inner = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=1.0)
    optimizer.build([weights])
    if place.rank == 0:  # it goes on from a checkpoint of its first step
        optimizer.apply([tf.fill([3], 4.0)], [weights])
    optimizer = average_gradients(optimizer, member=place.member())
    optimizer.build([weights])
    optimizer.apply([tf.fill([3], 2.0 + 4.0 * place.rank)], [weights])
    return weights.numpy().tolist()


def test_averages_that_a_wrapped_optimizer_adds_up_are_those_of_rank_0() -> None:
    assert in_threads(2, scaled_step) == [[-4.0] * 3] * 2


def steps_of_dtypes(place: Place) -> Any:
    weights = keras.Variable(np.zeros(2, np.float32), name="w")
    table = keras.Variable(np.zeros((4, 2), np.float32), name="table")
    options: Any = {"sparse": True, "member": place.member()}
    optimizer = average_gradients(keras.optimizers.SGD(1.0), **options)
    optimizer.build([weights, table])
    for dtype in (tf.float32, tf.float16, tf.float32):
        value = tf.cast(place.rank + 1.0, dtype)
        rows = tf.IndexedSlices(tf.fill([1, 2], value), [place.rank], [4, 2])
        optimizer.apply([tf.fill([2], value), rows], [weights, table])
    return weights.numpy().tolist(), table.numpy()[:, 0].tolist()


def test_gradients_may_have_another_dtype_in_each_step() -> None:
    assert in_threads(2, steps_of_dtypes) == [([-4.5] * 2, [-1.5, -3.0, 0.0, 0.0])] * 2


def test_autograph_leaves_what_a_step_calls(
    member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Converting that would take seconds."""
    stacks: list[traceback.StackSummary] = []

    def compute(*args: Any, **options: Any) -> Any:
        stacks.append(traceback.extract_stack())
        return compute_in_python(*args, **options)

    monkeypatch.setattr("flatweights.keras._step_average.compute_in_python", compute)
    weights = keras.Variable(np.zeros(2, np.float32))
    optimizer = average_gradients(keras.optimizers.SGD(1.0), member=member)
    optimizer.build([weights])
    tf.function(lambda: optimizer.apply([tf.ones(2)], [weights]))()
    assert weights.numpy().tolist() == [-1.0, -1.0]
    converted = [frame.name for frame in stacks[0] if "__autograph_generated" in frame.filename]
    assert converted
    assert {name.removeprefix("tf__") for name in converted} <= {"<lambda>", "_apply_averages"}


def test_a_gradient_may_be_a_number(member: Member) -> None:
    weights = keras.Variable(1.0)
    optimizer = average_gradients(keras.optimizers.SGD(1.0), member=member)
    optimizer.apply([0.5], [weights])
    assert float(weights.numpy()) == 0.5


def test_the_end_of_a_loop_may_be_told_twice(member: Member) -> None:
    weights = keras.Variable(1.0)
    optimizer = average_gradients(keras.optimizers.SGD(1.0), member=member)
    optimizer.apply([0.5], [weights])
    for _ in range(2):
        optimizer.finalize_variable_values([weights])


def steps_after_an_error(place: Place, value: float) -> Any:
    weights = keras.Variable(np.zeros(2, np.float32), name="w")
    member = place.member()
    optimizer = average_gradients(keras.optimizers.SGD(1.0), member=member, nonfinite="raise")
    optimizer.build([weights])
    with pytest.raises(ValueError, match="rank 1, slot 0 'w': holds NaN"):
        optimizer.apply([tf.fill([2], [1.0, np.nan][place.rank])], [weights])
    weights.assign(tf.fill([2], value * place.rank))  # each has a checkpoint of its own
    optimizer.apply([tf.ones(2)], [weights])
    return weights.numpy().tolist()


def test_after_an_error_members_are_compared_again() -> None:
    assert in_threads(2, steps_after_an_error, 0.0) == [[-1.0, -1.0]] * 2
    for reply in in_threads(2, steps_after_an_error, 7.0):
        assert "expected the variables and the optimizer's slots of rank 0 in all" in reply
