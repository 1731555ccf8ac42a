"""Eager variables only: structure, names, functions that trace once."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from interrupts import Interrupts
from keras.src.backend.common.variables import AutocastScope
from tensorflow.python.distribute.sharded_variable import ShardedVariable
from tensorflow.python.ops.resource_variable_ops import UninitializedVariable
from tf_forks import Forks
from tf_models import mixed_values

from flatweights.tensorflow import TensorFlowVariables, _eager

tf1 = tf.compat.v1
DTYPES = [tf.float32, tf.float64, tf.float16]  # a bucket each


def sequential(units: Any = (4, 2)) -> Any:
    return keras.Sequential([keras.Input((8,)), *(keras.layers.Dense(n) for n in units)])


class Blocks(keras.Model):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.blocks = [keras.layers.Dense(3), keras.layers.Dense(3)]
        self.heads = {"policy": keras.layers.Dense(2), "value": keras.layers.Dense(1)}
        self._hidden = keras.layers.BatchNormalization()
        self.drop = keras.layers.Dropout(0.5)
        self.scale = self.add_weight(shape=(), name="scale")

    def call(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        x = self.drop(self._hidden(x))
        return self.heads["policy"](x) * self.scale, self.heads["value"](x)


BLOCKS_NAMES = {
    "scale",
    *(f"blocks/{i}/{v}" for i in range(2) for v in ("kernel", "bias")),
    *(f"heads/{h}/{v}" for h in ("policy", "value") for v in ("kernel", "bias")),
    *(f"hidden/{v}" for v in ("gamma", "beta", "moving_mean", "moving_variance")),
    "drop/seed_generator_state",
}


def blocks() -> Any:
    model = Blocks()
    model(np.zeros((1, 3)))
    return model


def values_of(model: Any) -> Any:
    return [np.array(v.numpy()) for v in model.variables]


def test_a_keras_model_gives_its_variables_in_its_order_by_its_attributes() -> None:
    model = blocks()
    weights = TensorFlowVariables(model)
    assert set(weights.variables) == BLOCKS_NAMES
    assert list(weights.variables.values()) == model.variables
    for array, value in zip(weights.get_weights().values(), values_of(model), strict=True):
        np.testing.assert_array_equal(array, value, strict=True)


def test_names_are_those_that_were_given_or_count_afresh() -> None:
    sequential()  # advances Keras's own counters
    assert list(TensorFlowVariables(sequential()).variables) == [
        *("dense/kernel", "dense/bias", "dense_1/kernel", "dense_1/bias"),
    ]
    inputs = keras.Input((4,))
    x = keras.layers.Dense(3, name="stem")(inputs)
    x = keras.layers.Dense(3)(x)
    nested = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)], name="head")
    model = keras.Model(inputs, nested(x))
    assert list(TensorFlowVariables(model).variables) == [
        *("stem/kernel", "stem/bias", "dense/kernel", "dense/bias"),
        *("head/dense/kernel", "head/dense/bias"),
    ]


def test_names_of_nested_outputs_and_of_a_shared_layer() -> None:
    shared, inputs = keras.layers.Dense(4), keras.Input((4,))
    model = keras.Model(inputs, shared(shared(inputs)))
    assert list(TensorFlowVariables([model, shared]).variables) == [
        *("0/dense/kernel", "0/dense/bias"),
    ]
    a, b = tf.Variable(1.0, name="a"), tf.Variable(2.0, name="b")
    same = [tf.Variable(float(i)) for i in range(3)]
    assert list(TensorFlowVariables([a, b]).variables) == ["a", "b"]
    assert list(TensorFlowVariables([a, [b]]).variables) == ["a", "1/b"]
    assert list(TensorFlowVariables(same).variables) == ["Variable", "Variable_1", "Variable_2"]
    assert list(TensorFlowVariables({"x": a, "y": {"z": b}}).variables) == ["x", "y/z"]
    assert list(TensorFlowVariables(a, input_variables=[b, a]).variables) == ["a", "b"]
    assert list(TensorFlowVariables({"pi": sequential((2,)), "v": sequential((1,))}).variables) == [
        *("pi/dense/kernel", "pi/dense/bias", "v/dense/kernel", "v/dense/bias"),
    ]


def test_a_module_gives_its_attributes_and_keras_layers_within() -> None:
    class Module(tf.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.w = tf.Variable([1.0, 2.0])
            self.parts = [tf.Variable(3.0), {"k": tf.Variable(4.0)}]
            self.inner: Any = None
            self.layer = keras.layers.Dense(1)
            self.note = "not a variable"

    module = Module()
    module.inner = Module()
    for one in (module, module.inner):
        one.layer.build((None, 2))
    assert list(TensorFlowVariables(module).variables) == [
        *("inner/layer/kernel", "inner/layer/bias", "inner/parts/0", "inner/parts/1/k", "inner/w"),
        *("layer/kernel", "layer/bias", "parts/0", "parts/1/k", "w"),
    ]


@pytest.mark.parametrize(
    ("output", "error", "message"),
    [
        (lambda: keras.layers.Dense(2), ValueError, r"Dense 'dense.*' is not built"),
        (Blocks, ValueError, r"Blocks 'blocks.*' is not built.*unbuilt: blocks"),
        (lambda: object(), TypeError, "expected operations or tensors .* got object"),
        (lambda: "name", TypeError, "got str"),
        (list, ValueError, "to have variables, found none"),
        (lambda: None, ValueError, "to have variables, found none"),
        (lambda: tf.Variable("text", name="label"), TypeError, "'label': expected numbers"),
        (
            lambda: tf.Variable([1.0], shape=tf.TensorShape([None]), name="loose"),
            ValueError,
            "'loose': expected a fixed shape, got .*; leave it out",
        ),
        (lambda: tf.constant(1.0), TypeError, "got EagerTensor"),
    ],
)
def test_what_is_not_accepted_says_so(output: Any, error: Any, message: Any) -> None:
    with pytest.raises(error, match=message):
        TensorFlowVariables(output())


def test_nothing_is_traced_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("a graph was made")

    weights = TensorFlowVariables([tf.Variable(v) for v in mixed_values().values()])
    monkeypatch.setattr(tf.Graph, "__init__", refuse)
    weights.set_flat(weights.get_flat())
    weights.set_weights(weights.get_weights())
    weights.set_weights(dict(list(weights.get_weights().items())[:2]))
    weights.add_flat(weights.get_flat())


def test_within_an_autocast_scope_the_variables_are_read_not_their_casts() -> None:
    layer = keras.layers.Dense(4, dtype="mixed_bfloat16")
    layer.build((None, 8))
    with AutocastScope("bfloat16"):
        assert layer.kernel.value.dtype == tf.bfloat16
        weights = TensorFlowVariables(layer)
        expected = layer.kernel._value.numpy()
        np.testing.assert_array_equal(weights.get_weights()["kernel"], expected, strict=True)


def test_eager_variables_have_no_session() -> None:
    weights = TensorFlowVariables(tf.Variable(1.0))
    assert weights.sess is None
    weights.set_session(None)
    with tf1.Session(graph=tf.Graph()) as session, pytest.raises(ValueError, match="got eager"):
        weights.set_session(session)
    with pytest.raises(AttributeError, match="eager variables have no placeholders"):
        _ = weights.placeholders
    assert not hasattr(weights, "assignment_nodes")


def uninitialized(dtype: Any = tf.float32) -> Any:
    return UninitializedVariable(shape=[3], dtype=dtype, name="u")


@pytest.mark.parametrize("dtype", [tf.float32, tf.int32, tf.bfloat16])
@pytest.mark.parametrize("call", ["get_flat", "get_weights", "add_flat"])
def test_an_uninitialized_variable_is_named_and_a_set_initializes_it(
    path: Any, call: Any, dtype: Any
) -> None:
    known, others = tf.Variable([1.0, 2.0]), [uninitialized(dtype), uninitialized()]
    weights = TensorFlowVariables([known, *others])
    arguments = [np.ones(8)] if call == "add_flat" else []
    names = r"'u', 'u_1'" if dtype == tf.float32 else r"'u(_1)?'"
    with pytest.raises(RuntimeError, match=f"initialized variables, got uninitialized: {names};"):
        getattr(weights, call)(*arguments)
    np.testing.assert_array_equal(known, [1, 2])
    weights.set_flat(np.arange(8.0))
    np.testing.assert_array_equal(known, [0, 1])
    assert [np.array(v.numpy()).tolist() for v in others] == [[2, 3, 4], [5, 6, 7]]
    np.testing.assert_array_equal(weights.get_flat(), np.arange(8.0))
    assert bool(weights.unbound) is (path == "ops")


@pytest.mark.parametrize("where", ["alone", "attribute"])
def test_a_sharded_variable_is_its_shards(where: Any) -> None:
    shards = [tf.Variable([1.0, 2.0], name="s"), tf.Variable([3.0], name="s")]
    model = ShardedVariable(shards, name="s")
    if where == "attribute":
        module = tf.Module()
        module.table = model
        model = module
    weights = TensorFlowVariables(model)
    np.testing.assert_array_equal(weights.get_flat(), [1, 2, 3])
    weights.set_flat([4, 5, 6])
    np.testing.assert_array_equal(shards[1], [6])


@pytest.mark.parametrize("path", ["ops"], indirect=True)
@pytest.mark.parametrize("conversion", range(3))
def test_an_interrupted_conversion_sets_nothing(
    path: Any, conversion: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = [tf.Variable([1.0]), tf.Variable([2.0]), tf.Variable([3], dtype=tf.int32)]
    weights = TensorFlowVariables(variables)
    convert, steps = _eager._aliased, iter(range(3))

    def interrupted(*args: Any) -> Any:
        if next(steps) == conversion:
            raise KeyboardInterrupt
        return convert(*args)

    monkeypatch.setattr(_eager, "_aliased", interrupted)
    with pytest.raises(KeyboardInterrupt):
        weights.set_flat([4, 5, 6])
    assert [int(variable[0]) for variable in variables] == [1, 2, 3]


def test_calls_within_other_scopes_move_variables_of_two_devices(path: Any) -> None:
    variables = []
    for device, values in (("CPU:1", [1.0, 2.0]), ("CPU:0", [3.0]), ("CPU:1", [4.0])):
        with tf.device(device):
            variables.append(tf.Variable(values))
    weights = TensorFlowVariables(variables)
    with tf.device("CPU:0"):
        weights.set_flat(weights.get_flat() + 1)
        np.testing.assert_array_equal(weights.get_flat(), [2, 3, 4, 5])
    with tf.Graph().as_default():
        weights.add_flat([1, 1, 1, 1])
        np.testing.assert_array_equal(weights.get_flat(), [3, 4, 5, 6])
        weights.set_flat([5, 6, 7, 8])
    assert [v.numpy().tolist() for v in variables] == [[5, 6], [7], [8]]
    assert [v.device[-5:] for v in variables] == ["CPU:1", "CPU:0", "CPU:1"]


FORKED = """
import os, signal, threading
os.environ["FLATWEIGHTS_TENSORFLOW"] = "ops"
import tensorflow as tf
from flatweights.tensorflow import TensorFlowVariables, _eager

weights = TensorFlowVariables(tf.Variable([1.0, 2.0]))
inside, go_on = threading.Event(), threading.Event()

def call():  # as one that has not run its last operation
    with _eager._lock.ready():
        inside.set()
        go_on.wait()

thread = threading.Thread(target=call)
thread.start()
assert inside.wait(60)
child = os.fork()
if not child:
    signal.alarm(60)
    try:
        weights.add_flat([1.0, 1.0])
    except RuntimeError as error:
        os._exit("when the process forked" not in str(error))
    os._exit(2)
go_on.set()
thread.join()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("path", ["ops"], indirect=True)
def test_a_fork_while_another_thread_runs_operations_does_not_hang(path: Any, forks: Forks) -> None:
    done = forks.run(FORKED)
    assert done.stdout.strip() == "0", done.stderr


@pytest.mark.parametrize("path", ["ops"], indirect=True)
@pytest.mark.parametrize(
    "call", ["set", *(pytest.param(call, marks=pytest.mark.slow) for call in ("add", "get"))]
)
def test_a_signal_handler_finds_and_leaves_no_mixture_of_two_calls(path: Any, call: str) -> None:
    """Its own call is refused, or it is made before or after the one that it interrupts."""
    weights = TensorFlowVariables([tf.Variable(np.zeros(2), dtype=d) for d in DTYPES[:2]])
    refusals: list[str] = []

    def value() -> float:
        (value,) = np.unique(weights.get_flat())
        return float(value)

    def handle() -> None:
        try:
            assert value() in {0.0, 1.0}
            weights.set_flat([2.0] * 4)
            assert value() == 2.0
        except RuntimeError as error:
            refusals.append(str(error))

    calls: Any = {
        "set": (lambda: weights.set_flat([1.0] * 4), {1.0, 2.0}),
        "add": (lambda: weights.add_flat([1.0] * 4), {1.0, 2.0, 3.0}),
        "get": (value, {0.0, 2.0}),
    }
    called, expected = calls[call]
    called()  # traces what it runs
    interrupts, is_hit = Interrupts(handle, at_lines_only=True), True
    while is_hit:
        weights.set_flat([0.0] * 4)
        is_hit = interrupts.hit(called)
        if is_hit:
            assert value() in expected
    (text,) = set(refusals)
    assert text.startswith("this thread is in a call of these variables already")
