"""The names of Keras that are not documented, and that `_hooks.py` alone uses.

Each test drives one of them by the installed Keras. `HOOKS` has the versions of Keras whose source
was read for it: a failure with a later one tells which name it has changed.
"""

import ast
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import flatweights.keras
from flatweights.keras import _hooks

PACKAGE = Path(flatweights.keras.__file__).parent
# The names, and the first and the last version of Keras in which each is what `_hooks.py` expects.
OF_FIT = "fit: callbacks, epoch_iterator, self, val_sample_weight, val_x, val_y"
HOOKS = {
    OF_FIT: ("3.5", "3.15"),
    "CallbackList.on_train_begin: self": ("3.5", "3.15"),
    "Model._initial_epoch": ("3.5", "3.15"),
    "Model._compile_loss": ("3.5", "3.15"),
    "Optimizer._trainable_variables": ("3.5", "3.15"),
    "Optimizer._clip_gradients": ("3.5", "3.15"),
    "TFEpochIterator._distributed_dataset": ("3.5", "3.15"),
    "EarlyStopping._set_monitor_op": ("3.5", "3.15"),  # of MonitorCallback since 3.12
    "SwapEMAWeights._ema_weights_in_model": ("3.5", "3.15"),
    "BatchNormalization._moments": ("3.5", "3.15"),
}


def private_names(file: Path, own: set[str]) -> Iterator[str]:
    """Yield the attributes that begin with ``_``, which are not of this package's classes."""
    for node in ast.walk(ast.parse(file.read_text())):
        name = node.attr if isinstance(node, ast.Attribute) else None
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value if node.value.isidentifier() else None
        if name is not None and re.match("_[^_]", name) and name not in own:
            yield name


def own_names(file: Path) -> Iterator[str]:
    """Yield the names that the classes and the functions of a file define."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
            yield node.attr


def test_no_other_file_has_a_private_name_of_keras() -> None:
    files = [file for file in PACKAGE.glob("*.py") if file.name != "_hooks.py"]
    assert len(files) > 8
    own = {name for file in files for name in own_names(file)}
    own |= {"_replace"}  # of named tuples
    named = {file.name: set(private_names(file, own)) for file in files}
    assert {file: names for file, names in named.items() if names} == {}
    frames = re.compile(r"\bgc\b|currentframe|f_locals|f_back|tb_frame")
    assert [file.name for file in files if frames.search(file.read_text())] == []


def test_there_are_at_most_eight_attributes_and_each_has_a_test() -> None:
    """Beside them, the frames of two functions of Keras are looked for: `fit` tells nobody more."""
    private = set(private_names(PACKAGE / "_hooks.py", set()))
    assert private == {
        "_" + name for _, dot, name in (hook.partition("._") for hook in HOOKS) if dot
    }
    assert len(private) <= 8
    assert len(HOOKS) - len(private) <= 2


def installed_is_known(hook: str) -> str:
    """Return the beginning of the message of a test of ``hook`` that fails."""
    first, last = HOOKS[hook]
    return f"{hook}: as in Keras {first} to {last}; this is {keras.__version__}"


class Spy(keras.callbacks.Callback):  # type: ignore[misc]
    """Notes what hooks return in a `fit`."""

    def __init__(self) -> None:
        super().__init__()
        self.beside: list[Any] = []
        self.epochs: list[int] = []
        self.begins_at: int | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        self.beside = _hooks.callbacks_beside(self)
        self.before = _hooks.running_fit()
        if self.begins_at is not None:
            _hooks.begin_at(self.model, self.begins_at)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epochs.append(epoch)


def network(**options: Any) -> Any:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    # A trace costs more than the few steps of most tests here.
    model.compile(options.pop("optimizer", "sgd"), "mse", **{"run_eagerly": True} | options)
    return model


DATA = np.ones((8, 2), np.float32), np.ones((8, 1), np.float32)


def test_a_callback_finds_those_of_its_fit() -> None:
    spy, other, model = Spy(), keras.callbacks.Callback(), network()
    history = model.fit(*DATA, verbose=0, callbacks=[[other], spy])
    why = installed_is_known("CallbackList.on_train_begin: self")
    assert spy.beside == [other, spy, history], why
    spy.on_train_begin()
    assert spy.beside == [spy]


def test_a_fit_that_calls_callbacks_in_another_way_is_refused_by_name() -> None:
    class Model(keras.Sequential):  # type: ignore[misc]
        """Such as that of a Keras whose `fit` would call each callback by itself."""

        def make_train_function(self, force: bool = False) -> Any:
            spy.on_train_begin()
            return super().make_train_function(force)

    spy, model = Spy(), Model([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(RuntimeError, match=f"Spy: expected that .* Keras {keras.__version__} does"):
        model.fit(*DATA, verbose=0)


def test_an_optimizer_finds_its_fit() -> None:
    seen: list[Any] = []

    class Noting(keras.optimizers.SGD):  # type: ignore[misc]
        def apply(self, grads: Any, trainable_variables: Any = None) -> None:
            seen.append(_hooks.running_fit())
            super().apply(grads, trainable_variables)

    spy, model = Spy(), network(optimizer=Noting(), run_eagerly=False)
    history = model.fit(*DATA, verbose=0, callbacks=[spy])
    assert seen
    for fit in (*seen, spy.before):
        assert fit is not None
        assert fit[:2] == (model, [spy, history]), installed_is_known(OF_FIT)
    seen.clear()
    model.optimizer.apply([tf.zeros((2, 1)), tf.zeros(1)], model.trainable_variables)
    assert seen == [None]


def test_a_fit_begins_at_the_epoch_that_it_is_told() -> None:
    spy, model = Spy(), network()
    for begins_at, epochs in ((2, [2, 3]), (None, [0, 1, 2, 3]), (4, [])):
        spy.begins_at = begins_at
        spy.epochs = []
        model.fit(*DATA, epochs=4, verbose=0, callbacks=[spy])
        assert spy.epochs == epochs, installed_is_known("Model._initial_epoch")
        _hooks.begin_at(model, None)


def test_an_optimizer_knows_its_variables() -> None:
    why = installed_is_known("Optimizer._trainable_variables")
    for kind in (keras.optimizers.SGD, keras.optimizers.Adam):
        variables = [keras.Variable([1.0]), keras.Variable([2.0])]
        for optimizer in (kind(), keras.optimizers.LossScaleOptimizer(kind())):
            assert _hooks.variables_of(optimizer) == [], why
            optimizer.build(variables)
            pairs = zip(_hooks.variables_of(optimizer), variables, strict=True)
            assert all(one is other for one, other in pairs), why


class Batches(keras.utils.PyDataset):  # type: ignore[misc]
    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> Any:
        return DATA


def test_a_fit_goes_on_after_an_epoch_that_was_cut_short() -> None:
    class Cut(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_training = True

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = False
            _hooks.end_data()

    history = network().fit(Batches(), epochs=3, verbose=0, callbacks=[Cut()])
    assert history.epoch == [0, 1, 2], installed_is_known(OF_FIT)


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
def test_accumulated_gradients_are_replaced_before_they_are_clipped(in_graph: bool) -> None:
    variable = keras.Variable([0.0])
    optimizer = keras.optimizers.SGD(1.0, clipvalue=3.0, gradient_accumulation_steps=2)
    optimizer.build([variable])
    _hooks.replace_clipping(optimizer, lambda sums: [2 * one for one in sums])

    def step(gradient: Any) -> None:
        optimizer.apply([gradient], [variable])

    step = tf.function(step, autograph=False) if in_graph else step
    values = []
    for gradient in (0.5, 1.5, 10.0, 20.0):
        step(tf.constant([gradient]))
        values.append(float(variable[0]))
    assert values == [0, -2, -2, -5], installed_is_known("Optimizer._clip_gradients")


def test_the_losses_of_outputs_are_told_from_other_metrics() -> None:
    inputs = keras.Input((2,))
    outputs = [keras.layers.Dense(1, name=name)(inputs) for name in "ab"]
    model = keras.Model(inputs, outputs)
    assert _hooks.losses_of_outputs(model) == []
    model.compile("sgd", ["mse", "mse"], metrics=[["mae"], ["mae"]], run_eagerly=True)
    model.fit(DATA[0], [DATA[1], DATA[1]], verbose=0)
    names = {metric.name for metric in _hooks.losses_of_outputs(model)}
    assert names == {"a_loss", "b_loss"}, installed_is_known("Model._compile_loss")


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # Keras reads a learning rate
@pytest.mark.parametrize("kind", [keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau])
def test_a_callback_keeps_the_best_value_that_it_was_given(kind: Any) -> None:
    callback, model = kind("loss"), network()
    callback.set_model(model)
    callback.on_train_begin()
    _hooks.know_direction(callback)
    vars(callback).update(best=0.25)
    callback.on_epoch_end(0, {"loss": 0.5})
    assert (callback.best, callback.wait) == (0.25, 1), installed_is_known(
        "EarlyStopping._set_monitor_op"
    )


class Drawn(keras.utils.PyDataset):  # type: ignore[misc]
    """Batches, of which it counts those that were drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = 0

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> Any:
        self.drawn += 1
        return DATA[0][:2], DATA[1][:2]


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("arrays", marks=pytest.mark.slow),
        "PyDataset",
        pytest.param("eager", marks=pytest.mark.slow),
        "several steps",
        "own loop",
    ],
)
def test_steps_are_traced_before_a_training_and_none_is_executed(kind: str) -> None:
    model = network(optimizer="sgd")
    steps = 2 if kind == "several steps" else 1
    model.compile("sgd", "mse", run_eagerly=kind == "eager", steps_per_execution=steps)
    data, tested = Drawn(), Drawn()
    own, own_test = model.train_step, model.test_step
    traced: list[str] = []
    before: list[list[str]] = []
    executed = tf.Variable(0)
    second = iter(tf.data.Dataset.range(1000).prefetch(2))

    def step(batch: Any) -> Any:
        traced.append("step")
        executed.assign_add(1)
        second.get_next()
        return own(batch)

    def test_step(batch: Any) -> Any:
        traced.append("test")
        executed.assign_add(1)
        second.get_next()
        return own_test(batch)

    class Traces(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_begin(self, logs: Any = None) -> None:
            state, drawn = [v.numpy() for v in model.variables], (data.drawn, tested.drawn)
            _hooks.prepare_steps()
            for variable, value in zip(model.variables, state, strict=True):
                np.testing.assert_array_equal(variable, value)
            assert int(model.optimizer.iterations) == int(executed) == 0
            assert (data.drawn, tested.drawn) == drawn
            before.append([*traced])

    model.train_step, model.test_step = step, test_step
    if kind == "own loop":

        def loop(iterator: Any) -> Any:
            executed.assign_add(1)
            second.get_next()
            for batch in iterator:
                logs = own(batch)
                break
            return logs

        model.make_train_function = lambda force=False: setattr(model, "train_function", loop)
        model.make_test_function = lambda force=False: setattr(model, "test_function", loop)
    options = {"epochs": 2, "shuffle": False, "verbose": 0, "callbacks": [Traces()]}
    if kind == "PyDataset":
        model.fit(data, validation_data=tested, **options)
    else:
        model.fit(*DATA, len(DATA[0]) // 4, validation_data=DATA, **options)
    assert int(second.get_next()) == int(executed)
    if kind in ("eager", "own loop"):
        assert before == [[]]
    elif kind == "PyDataset":
        assert before == [[one for one in traced if one == "step"]] != [[]]
    else:
        why = installed_is_known("TFEpochIterator._distributed_dataset")
        assert before == [traced], why
        assert {*traced} == {"step", "test"}, installed_is_known(OF_FIT)


def test_functions_of_other_threads_go_on_while_steps_are_traced() -> None:
    model = network(run_eagerly=False)
    doubled = tf.function(lambda x: 2 * x)
    two, found = tf.constant(2), []

    class Traces(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_begin(self, logs: Any = None) -> None:
            own = model.train_function

            def train(iterator: Any) -> Any:
                with ThreadPoolExecutor(1) as pool:
                    found.append(int(pool.submit(doubled, two).result()))
                return own(iterator)

            model.train_function = train
            _hooks.prepare_steps()
            model.train_function = own

    doubled(two)
    model.fit(*DATA, verbose=0, callbacks=[Traces()])
    assert found == [4, 4]
    assert int(model.optimizer.iterations) == 1


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("dict", marks=pytest.mark.slow),
        pytest.param("Dataset", marks=pytest.mark.slow),
        pytest.param("split", marks=pytest.mark.slow),
        "weights",
        "generator",
    ],
)
def test_the_step_of_a_validation_is_traced_as_it_is_made(kind: str) -> None:
    inputs = {"a": keras.Input((2,), name="a"), "b": keras.Input((1,), name="b")}
    outputs = keras.layers.Dense(1)(keras.layers.Concatenate()([*inputs.values()]))
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    own_test, before, traced = model.test_step, [], []

    def test_step(batch: Any) -> Any:
        traced.append(batch)
        return own_test(batch)

    class Traces(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_begin(self, logs: Any = None) -> None:
            _hooks.prepare_steps()
            before.append(len(traced))

    x = {"a": DATA[0], "b": DATA[1].astype(np.float64)}
    batches = tf.data.Dataset.from_tensor_slices((x, DATA[1])).batch(3)
    validations: dict[str, Any] = {
        "dict": {"validation_data": (x, DATA[1])},
        "Dataset": {"validation_data": batches},
        "split": {"validation_split": 0.5},
        "weights": {"validation_data": (x, DATA[1], np.ones(8))},
        "generator": {"validation_data": (one for one in batches), "validation_steps": 1},
    }
    model.test_step = test_step
    options = {"epochs": 1, "verbose": 0, "callbacks": [Traces()], **validations[kind]}
    model.fit(x, DATA[1], batch_size=4, **options)
    assert len(traced) == 1
    assert before == [0 if kind == "generator" else 1]


def test_something_is_called_once_all_callbacks_have_begun() -> None:
    told: list[str] = []

    class Tells(keras.callbacks.Callback):  # type: ignore[misc]
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def on_train_begin(self, logs: Any = None) -> None:
            told.append(self.name)
            _hooks.call_after_begin(self, lambda: told.append(f"after {self.name}"))

    model = network()
    given = [Tells("first"), Tells("last")]
    callbacks = keras.callbacks.CallbackList(given, add_history=True, model=model)
    model.fit(*DATA, verbose=0, callbacks=callbacks)
    assert told == ["first", "last", "after first", "after last"]
    assert len(callbacks.callbacks) == 3, installed_is_known("CallbackList.on_train_begin: self")


def test_it_is_known_whether_the_moving_averages_are_in_the_model() -> None:
    swaps = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    told: list[Any] = []

    class Looks(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            told.append(vars(swaps).get(_hooks.SWAPPED))

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            told.append(vars(swaps).get(_hooks.SWAPPED))

    model = network(optimizer=keras.optimizers.SGD(use_ema=True))
    model.fit(*DATA, batch_size=8, epochs=2, verbose=0, callbacks=[swaps, Looks()])
    why = installed_is_known("SwapEMAWeights._ema_weights_in_model")
    assert told == [False, True, False, True], why


def test_synchronized_layers_use_other_moments_in_training_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind, told = keras.layers.BatchNormalization, []
    monkeypatch.setattr(kind, "_moments", kind._moments)  # undone after the test

    def moments(layer: Any, inputs: Any, mask: Any, local: Any) -> Any:
        told.append((layer, inputs.shape, mask))
        return tuple(one + 1.0 for one in local())

    x = np.array([[1, 2], [3, 6]], np.float32)
    for _ in range(2):  # the later one replaces the earlier
        _hooks.replace_moments(moments)
    for synchronized in (True, False):
        layer = kind(momentum=0.0, synchronized=synchronized)
        layer(x)
        assert told == []
        layer(x, training=True)
        why = installed_is_known("BatchNormalization._moments")
        assert told == ([(layer, x.shape, None)] if synchronized else []), why
        told.clear()
        assert np.allclose(layer.moving_mean, np.add([2, 4], synchronized)), why
        assert np.allclose(layer.moving_variance, np.add([1, 4], synchronized)), why
