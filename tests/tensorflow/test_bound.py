"""Bound eager variables: every change by TensorFlow is visible, or gives a clear error."""

import ctypes
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from python_calls import functions_in
from tensorflow.python.eager import context as eager_context
from tensorflow.python.eager import executor as eager_executor
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable
from tf_forks import Forks
from tf_models import shared_variable, some_slow

from flatweights import _core
from flatweights.tensorflow import TensorFlowVariables

MEGABYTE = 1 << 20

bound_alone = pytest.mark.parametrize("path", ["bound"], indirect=True)


def bound(variables: Any) -> Any:
    weights = TensorFlowVariables(variables)
    assert weights.unbound == {}
    return weights


def read(variables: Any) -> Any:
    """All values one after the other, as TensorFlow reads them."""
    return np.concatenate([np.array(v.numpy()).reshape(-1) for v in variables])


def resident_bytes() -> Any:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class MallocInfo(ctypes.Structure):
    """The result of glibc's mallinfo2."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def allocated() -> Any:
    """Blocks of Python and bytes of C++; whole pages if glibc is too old for bytes."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return resident_bytes()
    mallinfo2.restype = MallocInfo
    info = mallinfo2()
    return sys.getallocatedblocks() + info.uordblks + info.hblkhd


def grows(measure: Any, call: Any, repeats: Any, limit: Any, rounds: Any = 4) -> Any:
    """Whether ``measure`` grows by ``limit`` in a round of calls: a leak does in each round."""
    for _ in range(rounds):
        before = measure()
        for _ in range(repeats):
            call()
        gc.collect()
        if measure() - before < limit:
            return False
    return True


def in_thread(call: Callable[[], object], timeout: float = 120) -> object:
    """The result of ``call`` in a thread of its own, which must end in time."""
    results: list[object] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout)
    assert not thread.is_alive(), "deadlock"
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]


def tf_keras_model(policy: Any = "float32") -> Any:
    kind = tf_keras.mixed_precision.Policy(policy)
    return tf_keras.Sequential([tf_keras.layers.Dense(2, input_shape=(3,), dtype=kind)])


def keras_optimizer() -> Any:
    optimizer = keras.optimizers.Adam()
    optimizer.build([keras.Variable(np.ones(3, np.float32))])
    return optimizer.variables


def tf_keras_optimizer() -> Any:
    optimizer = tf_keras.optimizers.Adam()
    optimizer.build([tf.Variable(np.ones(3, np.float32))])
    return list(optimizer.variables)


def module() -> Any:
    made = tf.Module()
    made.w, made.parts = tf.Variable([1.0, 2.0]), [tf.Variable(3.0)]
    return made


def on_second_cpu() -> Any:
    with tf.device("CPU:1"):
        return tf.Variable([1.0, 2.0])


@bound_alone
@pytest.mark.parametrize(
    "build",
    [
        lambda: tf.Variable([1.0, 2.0]),
        lambda: keras.Variable([1.0, 2.0]),
        lambda: keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)]),
        lambda: keras.layers.BatchNormalization(dtype="mixed_bfloat16", name="norm"),
        lambda: tf_keras_model().variables,
        lambda: tf_keras_model("mixed_bfloat16").variables,
        module,
        keras_optimizer,
        tf_keras_optimizer,
        on_second_cpu,
        lambda: [on_second_cpu(), tf.Variable([3.0])],
    ],
)
def test_every_kind_of_eager_variable_is_bound(path: Any, build: Any) -> None:
    held = build()
    if isinstance(held, keras.layers.BatchNormalization):
        held.build((None, 4))
    weights = bound(held)
    np.testing.assert_array_equal(weights.get_flat(), read(weights.variables.values()))
    wanted = np.arange(1, weights.get_flat_size() + 1)
    weights.set_flat(wanted)
    np.testing.assert_array_equal(read(weights.variables.values()), wanted)


def step_of(function: Any) -> Any:
    compiled = tf.function(function, autograph=False, jit_compile=True)
    return lambda v: compiled(v)


UPDATES = {
    "assign": lambda v: v.assign(v * 2 + 1),
    "assign_add": lambda v: v.assign_add(tf.ones(6)),
    "assign_sub": lambda v: v.assign_sub(tf.ones(6)),
    "slice": lambda v: v[1:3].assign(v[1:3] + 1),
    "scatter_update": lambda v: v.scatter_update(tf.IndexedSlices(v[4] + 1, 4)),
    "scatter_add": lambda v: v.scatter_add(tf.IndexedSlices([1.0, 2.0], [1, 5])),
    "scatter_nd_add": lambda v: v.scatter_nd_add([[0], [3]], [1.0, 2.0]),
    "function": tf.function(lambda v: v.assign_add(tf.ones(6)), autograph=False),
    "xla": step_of(lambda v: v.assign_add(tf.ones(6))),
    "sgd": lambda v: tf.raw_ops.ResourceApplyGradientDescent(
        var=v.handle, alpha=0.5, delta=tf.ones(6)
    ),
    "sparse": lambda v: tf.raw_ops.ResourceSparseApplyAdagradV2(
        var=v.handle,
        accum=tf.Variable(tf.ones(6)).handle,
        lr=0.5,
        epsilon=1e-3,
        grad=[1.0],
        indices=[2],
    ),
    "raw": lambda v: tf.raw_ops.AssignVariableOp(resource=v.handle, value=v + 1),
}


@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
def test_updates_are_seen_and_go_on_from_what_was_set(update: Any) -> None:
    v, untouched = tf.Variable(tf.range(6.0), name="v"), tf.Variable(7.0, name="untouched")
    weights = TensorFlowVariables([v, untouched])
    for k in range(3):
        before = v.numpy()
        update(v)
        assert (v.numpy() != before).any()
        np.testing.assert_array_equal(weights.get_flat(), [*v.numpy(), 7])
        np.testing.assert_array_equal(weights.get_weights()["v"], v.numpy())
        weights.set_flat(np.float32([*range(k, k + 6), 7]))  # type: ignore[arg-type]
        np.testing.assert_array_equal(v.numpy(), np.arange(k, k + 6))


def keras_training(jit_compile: Any) -> Any:
    variables = [keras.Variable(np.arange(6, dtype=np.float32)), keras.Variable(np.float32(2))]
    optimizer = keras.optimizers.Adam(0.1)
    optimizer.build(variables)

    @tf.function(autograph=False, jit_compile=jit_compile)  # type: ignore[untyped-decorator]
    def step() -> None:
        optimizer.apply([tf.sin(v.value) for v in variables], variables)

    return [*variables, *optimizer.variables], step


def tf_keras_training(kind: Any) -> Any:
    variables = [tf.Variable(np.arange(6, dtype=np.float32)), tf.Variable(np.float32(2))]
    optimizer = kind(0.1)
    optimizer.build(variables)

    def step() -> None:
        optimizer.apply_gradients([(tf.sin(v), v) for v in variables])

    return [*variables, *optimizer.variables], step


TRAININGS = {
    "keras": lambda: keras_training(jit_compile=False),
    "keras-xla": lambda: keras_training(jit_compile=True),
    "tf_keras": lambda: tf_keras_training(tf_keras.optimizers.Adam),
    "tf_keras-sgd": lambda: tf_keras_training(lambda rate: tf_keras.optimizers.SGD(rate, 0.9)),
}


@pytest.mark.parametrize("build", some_slow(TRAININGS, "keras", "tf_keras"))
def test_training_is_seen_and_goes_on_from_what_was_set(build: Any) -> None:
    variables, step = build()
    twins, step_twins = build()
    weights = TensorFlowVariables(variables)
    for _ in range(3):
        before = read(variables)
        step()
        step_twins()
        assert (read(variables) != before).any()
        np.testing.assert_array_equal(weights.get_flat(), read(twins))
        weights.set_flat(weights.get_flat() * 2)
        for twin in twins:
            twin.assign(twin * 2)
        np.testing.assert_array_equal(read(variables), read(twins))


def replace_value(v: Any, value: Any) -> None:
    tf.raw_ops.AssignVariableOp(resource=v.handle, value=value, validate_shape=False)


def named(weights: Any, value: Any) -> Any:
    return {slot.name: np.full(slot.shape, value) for slot in weights.layout.slots}


CALLS = {
    "get_flat": lambda w: w.get_flat(),
    "get_flat_dtype": lambda w: w.get_flat(dtype=np.float64),
    "get_weights": lambda w: w.get_weights(),
    "set_flat": lambda w: w.set_flat(np.full(w.get_flat_size(), 9, np.float32)),
    "set_flat_cast": lambda w: w.set_flat([9] * w.get_flat_size()),
    "set_weights": lambda w: w.set_weights(named(w, 9)),
    "add_flat": lambda w: w.add_flat(np.ones(w.get_flat_size(), np.float32)),
    "lerp_flat": lambda w: w.lerp_flat([9] * w.get_flat_size(), 0.5),
}


@bound_alone
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(
    ("shape", "got"), [((3,), r"\(3,\)"), ((2, 1), r"\(2, 1\)"), ((), r"\(\)")]
)
def test_another_shape_is_an_error_that_changes_nothing(
    path: Any, call: Any, shape: Any, got: Any
) -> None:
    a = tf.Variable([1.0, 2.0], name="a")
    others = [tf.Variable([3.0], name=f"b{i}") for i in range(8)]
    weights = bound([*others[:4], a, *others[4:]])
    replace_value(a, tf.fill(shape, 5.0))
    with pytest.raises(
        ValueError, match=rf"slot 4 'a': expected float32 \(2,\), got float32 {got}$"
    ):
        call(weights)
    assert read(others).tolist() == [3] * 8
    np.testing.assert_array_equal(a.read_value().numpy(), np.full(shape, 5, np.float32))
    replace_value(a, tf.constant([6.0, 7.0]))
    assert weights.get_flat()[4:6].tolist() == [6, 7]
    weights.set_flat(range(10))
    assert read([a, *others[4:]]).tolist() == list(range(4, 10))


SETS = {name: call for name, call in CALLS.items() if name.startswith("set")}
OTHERS = {name: call for name, call in CALLS.items() if name not in SETS}


@pytest.mark.parametrize("call", SETS.values(), ids=SETS)
def test_setting_makes_a_destroyed_variable_anew(call: Any) -> None:
    a, b = shared_variable("a", tf.constant([1.0, 2.0])), tf.Variable([3.0], name="b")
    weights = TensorFlowVariables([a, b])
    for _ in range(2):
        tf.raw_ops.DestroyResourceOp(resource=a.handle)
        call(weights)
        assert read([a, b]).tolist() == weights.get_flat().tolist() == [9, 9, 9]


@pytest.mark.parametrize("call", OTHERS.values(), ids=OTHERS)
def test_a_destroyed_variable_is_no_old_value(call: Any) -> None:
    a, b = shared_variable("a", tf.constant([1.0, 2.0])), tf.Variable([3.0], name="b")
    weights = TensorFlowVariables([a, b])
    weights.get_flat()
    for k in range(2):
        tf.raw_ops.DestroyResourceOp(resource=a.handle)
        with pytest.raises((tf.errors.FailedPreconditionError, RuntimeError)):
            a.read_value()
        with pytest.raises((tf.errors.FailedPreconditionError, RuntimeError), match="a"):
            call(weights)
        assert b.numpy().tolist() == [3]
        tf.raw_ops.AssignVariableOp(resource=a.handle, value=tf.constant([k, k + 1.0]))
        assert weights.get_flat().tolist() == [k, k + 1, 3]
        weights.set_flat([7, 8, 3])
        assert read([a, b]).tolist() == [7, 8, 3]


def test_variables_live_as_long_as_what_moves_them() -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    weights = TensorFlowVariables(model)
    weights.set_flat([1, 2, 3])
    del model
    gc.collect()
    tf.Variable(tf.zeros(3))  # memory that was freed would be used again
    assert weights.get_flat().tolist() == [1, 2, 3]
    weights.add_flat([1, 1, 1])
    assert read(weights.variables.values()).tolist() == [2, 3, 4]


@bound_alone
def test_hot_loops_enter_few_functions_of_python(path: Any) -> None:
    x = keras.Input((3,))
    weights = bound(keras.Model(x, keras.layers.Dense(4)(keras.layers.Dense(2)(x))))
    out, buffer = weights.get_flat(), weights.get_weights().buffer
    checks = ["TensorFlowVariables._mover", "Changes.check"]
    called: dict[str, list[str]] = {
        "get_flat": functions_in(lambda: weights.get_flat(out)),
        "gather_into": functions_in(lambda: weights.gather_into(buffer)),
        "set_flat": functions_in(lambda: weights.set_flat(out)),
        "scatter": functions_in(lambda: weights.scatter(buffer)),
    }
    for name, entered in called.items():
        after = ["Adapted.check"] if name in ("set_flat", "scatter") else []
        assert entered == [f"TensorFlowVariables.{name}", *checks, *after]


def test_memory_of_deleted_variables_is_released() -> None:
    def cycle() -> None:
        v = tf.Variable(tf.zeros(4 * MEGABYTE))
        weights = TensorFlowVariables(v)
        weights.add_flat(weights.get_flat() + 1)
        weights.set_flat(weights.get_flat())

    # TensorFlow's threads may release memory to heaps of their own, which grow for some rounds.
    assert not grows(resident_bytes, cycle, repeats=5, limit=16 * MEGABYTE, rounds=10)


@bound_alone
def test_constructing_many_times_leaks_nothing(path: Any) -> None:
    variables = [tf.Variable(np.zeros(3, np.float32)) for _ in range(2)]
    repeats = 150
    assert not grows(allocated, lambda: bound(variables).get_flat(), repeats, limit=repeats)


def dispatch(v: Any, value: Any) -> None:
    """Assign ``value`` to all of ``v``, once other threads have multiplied matrices a while."""
    x = tf.eye(400)
    for _ in range(20):
        x = tf.matmul(x, x)
    # Unlike assign, this does not wait for the value in order to know its shape.
    tf.raw_ops.AssignVariableOp(resource=v.handle, value=tf.fill([1000], x[0, 0] * value))


def move_beside_dispatched_assignments() -> None:
    assert eager_context.context().is_async()
    v = tf.Variable(tf.zeros(1000), name="v")
    weights = TensorFlowVariables(v)
    weights.set_flat(weights.get_flat())
    for k in range(1, 3):
        dispatch(v, k)
        assert (weights.get_flat() == k).all()
        dispatch(v, 10 * k)
        assert (weights.get_weights()["v"] == 10 * k).all()
        dispatch(v, 20 * k)
        weights.set_flat(np.full(1000, -k, np.float32))
        assert (v.numpy() == -k).all()
        dispatch(v, 30 * k)
        weights.add_flat(np.ones(1000, np.float32))
        assert (v.numpy() == 30 * k + 1).all()
        dispatch(v, 40 * k)
        weights.set_weights({"v": np.full(1000, -2 * k)})
        assert (v.numpy() == -2 * k).all()


@contextmanager
def asynchronous_thread() -> Iterator[Any]:
    tf.config.experimental.set_synchronous_execution(False)
    try:
        yield
    finally:
        tf.config.experimental.set_synchronous_execution(True)


def in_asynchronous_thread() -> None:
    with asynchronous_thread():
        move_beside_dispatched_assignments()


def in_asynchronous_scope() -> None:
    executor = eager_executor.new_executor(enable_async=True)
    with eager_context.executor_scope(executor):
        move_beside_dispatched_assignments()


MOVES = {"thread": in_asynchronous_thread, "scope": in_asynchronous_scope}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
@pytest.mark.parametrize(
    "call", [lambda move: move(), pytest.param(in_thread, marks=pytest.mark.slow)]
)
def test_dispatched_assignments_come_first(move: Any, call: Any) -> None:
    call(move)
    assert not eager_context.context().is_async()


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_within_a_tf_function_every_call_is_refused(call: Any) -> None:
    a, b = tf.Variable([1.0, 2.0], name="a"), tf.Variable([3.0], name="b")
    weights = TensorFlowVariables([a, b])
    with pytest.raises(RuntimeError, match=r"inside a tf\.function"):
        tf.function(lambda: call(weights), autograph=False)()
    assert read([a, b]).tolist() == [1, 2, 3]


def test_within_a_py_function_every_call_is_made_when_it_runs() -> None:
    v = tf.Variable([1.0, 2.0])
    weights = TensorFlowVariables(v)

    def move() -> Any:
        flat = weights.get_flat()
        weights.set_flat(flat * 2)
        return flat

    run = tf.function(lambda: tf.numpy_function(move, [], tf.float32), autograph=False)
    for k in range(3):
        v.assign([k, 5.0])
        assert run().numpy().tolist() == [k, 5]
        assert v.numpy().tolist() == [2 * k, 10]


def test_eager_variables_are_found_and_moved_within_a_graph_context(path: Any) -> None:
    v = tf.Variable([1.0, 2.0], name="v")
    with tf.Graph().as_default() as graph:
        weights = TensorFlowVariables(v)
        assert list(weights.unbound) == ["v"], "bound at the first use"
        assert weights.get_flat().tolist() == [1, 2]
        weights.set_flat([3, 4])
        weights.add_flat([1, 1])
        assert weights.get_weights()["v"].tolist() == [4, 5]
        assert graph.get_operations() == []
    assert v.numpy().tolist() == [4, 5]
    assert bool(weights.unbound) is (path == "ops")


def second_object(v: Any) -> Any:
    return BaseResourceVariable(
        trainable=True,
        shape=v.shape,
        dtype=v.dtype,
        handle=v.handle,
        handle_name="second",
        distribute_strategy=None,
        cached_value=None,
    )


def test_two_objects_of_one_variable_see_each_other_and_do_not_deadlock() -> None:
    v = tf.Variable([1.0, 2.0], name="v")
    weights = TensorFlowVariables([v, second_object(v), tf.Variable(5.0, name="b")])

    def run() -> Any:
        assert weights.get_flat().tolist() == [1, 2, 1, 2, 5]
        weights.set_flat([3, 4, 3, 4, 6])
        weights.set_weights({"second": [7, 8]})
        return weights.get_weights()

    assert in_thread(run)["v"].tolist() == v.numpy().tolist() == [7, 8]  # type: ignore[index]
    other = TensorFlowVariables(second_object(v))
    other.add_flat([1, 1])
    assert weights.get_flat().tolist() == [8, 9, 8, 9, 6]
    weights.set_weights({"v": [1, 2]})
    assert other.get_flat().tolist() == v.numpy().tolist() == [1, 2]


NO_MEMORY = """
import resource
from pathlib import Path
import numpy as np
import tensorflow as tf
from flatweights.tensorflow import TensorFlowVariables

variable = tf.Variable(tf.zeros(1 << 24))
weights = TensorFlowVariables(variable)
flat = np.ones(1 << 24, np.float32)
weights.set_flat(flat)
seen = variable.read_value()  # what it reads is not written to any more
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
tf.zeros(1).numpy()  # starts the threads of TensorFlow, whose stacks count, too
resource.setrlimit(resource.RLIMIT_AS, (used + (48 << 20), resource.RLIM_INFINITY))
try:
    weights.set_flat(flat)
except MemoryError:
    print("MemoryError", float(variable.read_value()[-1]))
"""


@bound_alone
def test_a_new_value_without_memory_is_a_memory_error(path: Any) -> None:
    # With oneDNN, TensorFlow tries again for ten seconds. It is told so before it is imported.
    done = subprocess.run(
        [sys.executable, "-c", NO_MEMORY],
        env=os.environ | {"TF_ENABLE_ONEDNN_OPTS": "0"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.stdout.strip() == "MemoryError 1.0", done.stderr


FORKED = """
import os, signal, threading, time, warnings
import tensorflow as tf
from flatweights import Layout, _core
from flatweights.tensorflow import TensorFlowVariables
warnings.simplefilter("ignore", DeprecationWarning)

variable = tf.Variable(tf.zeros(3))
weights = TensorFlowVariables(variable)
library = weights._mover._library

@tf.function(autograph=False)
def put():  # many at once, each of which takes the lock of the table
    return tf.add_n([library.bind(variable.handle) for _ in range(100)])

put()
def run():
    while True:
        put()
threading.Thread(target=run, daemon=True).start()
for _ in range(10):
    child = os.fork()
    if not child:
        try:
            _core.BoundVariables(library.core, weights.layout.core, [0], [-1], [1], None)
        except _core.UnreadyError:  # no variable has this id
            os._exit(0)
        os._exit(2)
    end = time.monotonic() + 120
    done = 0
    while not done and time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.001)
    if not done:
        os.kill(child, signal.SIGKILL)
    print(os.waitstatus_to_exitcode(status) if done else "hangs", flush=True)
    if not done:
        break
os._exit(0)
"""


@bound_alone
def test_a_fork_while_another_thread_makes_variables_known_does_not_hang(
    path: Any, forks: Forks
) -> None:
    done = forks.run(FORKED)
    assert done.stdout.split() == ["0"] * 10, done.stderr


@bound_alone
def test_the_core_refuses_what_does_not_fit_the_variables(path: Any) -> None:
    """Python never passes such arguments; the core checks them to protect memory."""
    variable = tf.Variable([1.0, 2.0])
    weights = TensorFlowVariables(variable)
    bound, library = weights._mover._whole(), weights._mover._library
    assert bound is not None
    assert library is not None

    def bind(positions: list[int], ids: list[int]) -> Any:
        layout = weights.layout.core
        return _core.BoundVariables(library.core, layout, positions, ids, [1] * len(ids), None)

    vector = np.zeros(2, np.float32)
    refused: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (ValueError, "expected 1 arrays, got 0", lambda: bound.get_parts([])),
        (ValueError, "expected 1 arrays, got 2", lambda: bound.set_parts([0], [vector] * 2, False)),
        (ValueError, "expected a writable array", lambda: bound.get_parts([vector[:1]])),
        (IndexError, "slot 1: unbound", lambda: bound.set_parts([1], [vector], False)),
        (TypeError, "expected its own dtype", lambda: bound.add(np.zeros(2), False, 1.0)),
        (ValueError, "an id and a dtype for each position", lambda: bind([0], [])),
        (IndexError, "no such slot", lambda: bind([1], [0])),
    ]
    for error, message, call in refused:
        with pytest.raises(error, match=message):
            call()
    np.testing.assert_array_equal(variable, [1, 2])
