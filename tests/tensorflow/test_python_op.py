"""Tensors that Python functions compute, with the op library and without it."""

import functools
import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tf_forks import Forks

from flatweights import Layout
from flatweights._core import CalledTensors
from flatweights.tensorflow import _python_op
from flatweights.tensorflow._python_op import Compute, compute_in_python

DTYPES = ("float32", "float64", "bfloat16", "int8", "complex64", "bool")

Arrays = list[np.ndarray[Any, Any]]


def in_arrays(function: Callable[[Arrays, Arrays], None], values: Sequence[Any]) -> Compute:
    """A function of called tensors like ``values``, as one that reads and writes arrays."""
    layout = Layout.of(
        [
            np.empty(one.shape.num_elements(), tf.as_dtype(one.dtype).as_numpy_dtype)
            for one in values
        ]
    )

    def compute(called: CalledTensors) -> None:
        inputs, outputs = layout.new_buffer(), layout.new_buffer()
        called.gather_into(layout.core, inputs)
        function(layout.packed_views(inputs), layout.packed_views(outputs))
        called.scatter(layout.core, outputs)

    return compute


def reverse(inputs: Arrays, outputs: Arrays) -> None:
    for source, target in zip(inputs, outputs, strict=True):
        target[:] = source[::-1]


@pytest.mark.parametrize("compiled", [False, True])
def test_tensors_of_any_shape_and_dtype_are_computed(compiled: bool) -> None:
    rng = np.random.default_rng(1)
    values = [tf.cast(rng.normal(size=shape), d) for shape in [(), (0,), (3, 4)] for d in DTYPES]
    before = [np.copy(value.numpy()) for value in values]
    compute = in_arrays(reverse, values)
    step = tf.function(lambda *tensors: compute_in_python(compute, tensors), autograph=False)
    results = step(*values) if compiled else compute_in_python(compute, values)
    for result, value, kept in zip(results, values, before, strict=True):
        assert result.dtype == value.dtype
        assert result.shape == value.shape
        assert np.array_equal(result.numpy().reshape(-1), kept.reshape(-1)[::-1])
        assert np.array_equal(value.numpy(), kept)  # the input is unchanged


def test_it_runs_in_loops_and_at_each_call() -> None:
    calls: list[float] = []

    def count(inputs: list[Any], outputs: list[Any]) -> None:
        calls.append(float(inputs[0][0]))
        outputs[0][:] = inputs[0] + 1

    compute = in_arrays(count, [tf.zeros(2)])

    @tf.function  # type: ignore[untyped-decorator]
    def several(x: tf.Tensor) -> tf.Tensor:
        for _ in tf.range(3):
            (x,) = compute_in_python(compute, [x])
        compute_in_python(compute, [x])  # nothing uses the result
        return x

    assert several(tf.zeros(2)).numpy().tolist() == [3, 3]
    assert calls == [0, 1, 2, 3]


class Ordered:
    """Two calls that are noted when they are made, of which the input of the first is late.

    Each is in a step that updates a variable of its own, by which alone TensorFlow would order it.
    """

    def __init__(self) -> None:
        self.made: list[str] = []
        self._second = threading.Event()
        self._variables = {name: tf.Variable([1.0, 2.0]) for name in ("first", "second")}

    def first(self, x: tf.Tensor) -> tf.Tensor:
        return self._step("first", self.late(x))

    def second(self, x: tf.Tensor) -> tf.Tensor:
        return self._step("second", x)

    def late(self, x: tf.Tensor) -> tf.Tensor:
        def wait(x: Any) -> Any:
            self._second.wait(0.1)  # in vain, if the order is right
            return x

        return tf.ensure_shape(tf.numpy_function(wait, [x], x.dtype, stateful=False), x.shape)

    def in_time(self, x: tf.Tensor) -> tf.Tensor:
        same = tf.numpy_function(lambda x: x, [x], x.dtype, stateful=False)
        return tf.ensure_shape(same, x.shape)

    def call(self, name: str, x: tf.Tensor) -> tf.Tensor:
        def note(inputs: Arrays, outputs: Arrays) -> None:
            self.note(name)
            outputs[0][:] = inputs[0]

        return compute_in_python(in_arrays(note, [x]), [x])[0]

    def note(self, name: str) -> None:
        self.made.append(name)
        if name == "second":
            self._second.set()

    def _step(self, name: str, x: tf.Tensor) -> tf.Tensor:
        return self._variables[name].assign_add(self.call(name, x)).read_value()


def in_loop(step: Any) -> Any:
    def loop(x: tf.Tensor) -> Any:
        return tf.while_loop(lambda y: y[0] < 2, lambda y: [step(y) * 0 + 2], [x])[0]

    return loop


function = functools.partial(tf.function, autograph=False)  # to convert code takes longest

WRAPPED: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda step: step,
    "function": function,
    "function in a function": lambda step: function(lambda x: function(step)(x)),
    "loop": in_loop,
    "function in a loop": lambda step: in_loop(function(step)),
    "map": lambda step: lambda x: tf.map_fn(step, x[tf.newaxis]),
    "condition": lambda step: lambda x: tf.cond(x[0] > 0, lambda: step(x), lambda: x),
    "case": lambda step: (
        lambda x: tf.switch_case(tf.cast(x[0], tf.int32), [lambda: x, lambda: step(x)])
    ),
}


PAIRS = [*((kind, kind) for kind in WRAPPED), ("function", "nothing"), ("nothing", "function")]
OFTEN = {
    *(("nothing", "bound"), ("function", "bound"), ("function", "ops")),
    *(("function in a loop", "bound"), ("loop", "ops"), ("condition", "bound")),
}


@pytest.mark.parametrize(
    ("first", "second", "path"),
    [
        pytest.param(*pair, path, marks=() if (pair[0], path) in OFTEN else pytest.mark.slow)
        for pair in PAIRS
        for path in ("bound", "ops")
    ],
    indirect=["path"],
)
def test_calls_are_made_in_the_order_of_the_program(first: str, second: str) -> None:
    ordered = Ordered()
    one, other = WRAPPED[first](ordered.first), WRAPPED[second](ordered.second)
    tf.function(lambda x: (one(x), other(x)), autograph=False)(tf.ones(2))
    assert ordered.made == ["first", "second"]


def test_calls_are_made_in_order_beside_earlier_traces_and_other_operations_with_state() -> None:
    """Also a function of a user's own may make calls of a member, and it has no variables."""
    ordered = Ordered()
    first, second = function(ordered.first), function(ordered.second)
    for one in (second, first):
        one.get_concrete_function(tf.TensorSpec([2]))
    tf.function(lambda x: (first(x), second(x)), autograph=False)(tf.ones(2))
    assert ordered.made == ["first", "second"]
    for is_first in (True, False):
        ordered = Ordered()

        def of_user(x: tf.Tensor, ordered: Ordered = ordered, is_first: bool = is_first) -> Any:
            name = "first" if is_first else "second"
            return tf.py_function(
                lambda _: ordered.note(name), [ordered.late(x) if is_first else x], []
            )

        steps = (
            [of_user, function(ordered.second)] if is_first else [function(ordered.first), of_user]
        )
        tf.function(lambda x, steps=steps: [one(x) for one in steps] and x, autograph=False)(
            tf.ones(2)
        )
        assert ordered.made == ["first", "second"]


@pytest.mark.parametrize("compiled", [pytest.param(False, marks=pytest.mark.slow), True])
def test_calls_of_the_gradient_of_a_function_are_made_in_one_order(compiled: bool) -> None:
    """Whichever input of them is there first."""

    def made(late: str) -> list[str]:
        ordered = Ordered()

        def called(name: str) -> Callable[[tf.Tensor], tf.Tensor]:
            @tf.custom_gradient  # type: ignore[untyped-decorator]
            def identity(x: tf.Tensor) -> Any:
                return tf.identity(x), lambda grad: ordered.call(name, grad)

            return identity  # type: ignore[no-any-return]

        def delayed(is_late: bool) -> Callable[[tf.Tensor], tf.Tensor]:
            wait = ordered.late if is_late else ordered.in_time

            @tf.custom_gradient  # type: ignore[untyped-decorator]
            def identity(x: tf.Tensor) -> Any:
                return tf.identity(x), wait

            return identity  # type: ignore[no-any-return]

        @tf.function(autograph=False)  # type: ignore[untyped-decorator]
        def loss(x: tf.Tensor) -> tf.Tensor:
            pair = [delayed(name == late)(called(name)(x)) for name in ("one", "other")]
            return tf.reduce_sum(pair[0]) + tf.reduce_sum(pair[1])

        def gradient(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = loss(x)
            return tape.gradient(y, x)

        (tf.function(gradient, autograph=False) if compiled else gradient)(tf.ones(2))
        return ordered.made

    assert made("one") == made("other") != []


def test_a_module_with_a_function_that_calls_python_is_saved(tmp_path: Path) -> None:
    class Trained(tf.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.ordered = Ordered()
            self.weights = tf.Variable([1.0, 2.0])

        @tf.function(autograph=False, input_signature=[tf.TensorSpec([2])])  # type: ignore[untyped-decorator]
        def train(self, x: tf.Tensor) -> tf.Tensor:
            return self.weights.assign_add(self.ordered.call("first", x))

        @tf.function(autograph=False, input_signature=[tf.TensorSpec([2])])  # type: ignore[untyped-decorator]
        def predict(self, x: tf.Tensor) -> tf.Tensor:
            return self.weights * x

    trained = Trained()
    trained.train(tf.ones(2))
    tf.saved_model.save(trained, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    assert loaded.predict(tf.ones(2)).numpy().tolist() == [2, 3]


GROUP = """
import threading
from concurrent.futures import ThreadPoolExecutor
import numpy as np
import tensorflow as tf
from flatweights import Layout
from flatweights.tensorflow._python_op import compute_in_python

tf.config.threading.set_inter_op_parallelism_threads(1)
met = threading.Barrier(4, timeout=20)

layout = Layout.of([np.empty(2, np.float32)])

def meet(called):
    met.wait()
    called.gather_into(layout.core, buffer := layout.new_buffer())
    layout.packed_views(buffer)[0][:] += 1
    called.scatter(layout.core, buffer)

def call(x):
    return 2 * compute_in_python(meet, [2 * x])[0]

steps = [tf.function(call, autograph=False) for _ in range(4)]
for step in steps:
    step.get_concrete_function(tf.zeros(2))
with ThreadPoolExecutor(4) as threads:
    results = list(threads.map(lambda step: float(step(tf.ones(2))[1]), steps))
assert results == [6.0] * 4, results
"""


def test_functions_that_wait_for_each_other_hold_no_thread_of_tensorflow(
    path: str, forks: Forks
) -> None:
    """There are more such functions than threads in its pool."""
    if path == "ops":
        pytest.skip("TensorFlow's own op holds one")
    done = forks.run(GROUP)
    assert done.returncode == 0, done.stderr


class MuteError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def test_what_it_raises_is_told() -> None:
    def fail(called: CalledTensors) -> None:
        raise LookupError("no such thing")

    step = function(lambda x: compute_in_python(fail, [x]))
    with pytest.raises(tf.errors.OpError, match="LookupError: no such thing"):
        step(tf.zeros(2))
    with pytest.raises(LookupError, match="no such thing"):
        compute_in_python(fail, [tf.zeros(2)])

    def fail_mutely(called: CalledTensors) -> None:
        raise MuteError

    with pytest.raises(tf.errors.OpError, match=r"an error without a text|MuteError"):
        function(lambda x: compute_in_python(fail_mutely, [x]))(tf.zeros(2))


def test_a_graph_keeps_its_function_and_nothing_else_does(path: str) -> None:
    class Owner:
        """Refers to its graph, which refers to it."""

        def __init__(self) -> None:
            self.seven = in_arrays(self.write, [tf.zeros(1)])
            self.function = function(lambda x: compute_in_python(self.seven, [x]))

        def write(self, inputs: Arrays, outputs: Arrays) -> None:
            outputs[0][:] = 7

    owner = Owner()
    concrete = owner.function.get_concrete_function(tf.zeros(1))
    gone = weakref.ref(owner)
    del owner
    gc.collect()
    assert concrete(tf.zeros(1))[0].numpy() == 7
    del concrete
    gc.collect()
    assert gone() is None or path == "ops"  # TensorFlow keeps functions of its own op
    if path == "ops":
        return
    compute = in_arrays(reverse, [tf.zeros(1)])
    concrete = function(lambda x: compute_in_python(compute, [x])).get_concrete_function(
        tf.zeros(1)
    )
    delattr(concrete.graph, _python_op._CALLS)
    gc.collect()
    with pytest.raises(tf.errors.UnknownError, match="the function of this graph is gone"):
        concrete(tf.zeros(1))


def test_tensors_of_another_layout_or_that_are_kept_are_refused(path: str) -> None:
    layout = Layout.of([np.empty(3, np.float32), np.empty(2, np.float64)])

    def compute(called: CalledTensors) -> None:
        called.gather_into(layout.core, layout.new_buffer())

    for wrong in (
        [tf.zeros(3)],
        [tf.zeros(3), tf.zeros(2)],
        [tf.zeros(2), tf.zeros(2, tf.float64)],
    ):
        with pytest.raises(ValueError, match=r"expected 2 arrays|expected float(32|64) \("):
            compute_in_python(compute, wrong)
    kept: list[CalledTensors] = []
    function(lambda x: compute_in_python(kept.append, [x]))(tf.zeros(2))
    if path == "bound":  # without the op library they are arrays
        with pytest.raises(RuntimeError, match="belong to TensorFlow again"):
            kept[0].gather_into(layout.core, layout.new_buffer())


@pytest.mark.parametrize("compiled", [False, True])
def test_sizes_are_those_of_the_call(compiled: bool) -> None:
    sizes: list[list[int]] = []

    def compute(called: CalledTensors) -> None:
        sizes.append(called.sizes)
        layout = Layout(["x", "y"], [(size,) for size in sizes[-1]], [np.float32, np.int64])
        called.pass_on(layout.core)

    def call(x: Any, y: Any) -> Any:
        return compute_in_python(compute, [x, y])

    unknown = [tf.TensorSpec([None], tf.float32), tf.TensorSpec([None], tf.int64)]
    step = tf.function(call, input_signature=unknown) if compiled else call
    for x, y in ((3, 1), (0, 7), (2, 0)):
        results = step(tf.range(x, dtype=tf.float32), tf.range(y, dtype=tf.int64))
        assert [one.numpy().tolist() for one in results] == [[*range(x)], [*range(y)]]
        assert sizes[-1] == [x, y]
    (passed,) = compute_in_python(
        lambda one: one.pass_on(Layout.of([np.empty(2, np.float32)]).core), [x := tf.ones(2)]
    )
    assert (passed + x).numpy().tolist() == [2, 2]
