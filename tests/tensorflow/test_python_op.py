"""Tensors that Python functions compute, with the op library and without it."""

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tf_forks import Forks

from flatweights.tensorflow import _python_op
from flatweights.tensorflow._python_op import compute_in_python

DTYPES = ("float32", "float64", "bfloat16", "int8", "complex64", "bool")


def reverse(inputs: list[Any], outputs: list[Any]) -> None:
    for source, target in zip(inputs, outputs, strict=True):
        target[:] = source[::-1].copy()


@pytest.mark.parametrize("compiled", [False, True])
def test_tensors_of_any_shape_and_dtype_are_computed(compiled: bool) -> None:
    rng = np.random.default_rng(1)
    values = [tf.cast(rng.normal(size=shape), d) for shape in [(), (0,), (3, 4)] for d in DTYPES]
    before = [np.copy(value.numpy()) for value in values]
    step = tf.function(lambda *tensors: compute_in_python(reverse, tensors))
    results = step(*values) if compiled else compute_in_python(reverse, values)
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

    @tf.function  # type: ignore[untyped-decorator]
    def several(x: tf.Tensor) -> tf.Tensor:
        for _ in tf.range(3):
            (x,) = compute_in_python(count, [x])
        compute_in_python(count, [x])  # nothing uses the result
        return x

    assert several(tf.zeros(2)).numpy().tolist() == [3, 3]
    assert calls == [0, 1, 2, 3]


MEETING = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
import tensorflow as tf
from flatweights.tensorflow._python_op import compute_in_python

tf.config.threading.set_inter_op_parallelism_threads(1)
met = threading.Barrier(4, timeout=20)

def meet(inputs, outputs):
    met.wait()
    outputs[0][:] = inputs[0] + 1

steps = [tf.function(lambda x: 2 * compute_in_python(meet, [2 * x])[0]) for _ in range(4)]
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
    done = forks.run(MEETING)
    assert done.returncode == 0, done.stderr


class MuteError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def test_an_error_without_a_text_is_an_error_too() -> None:
    def fail(inputs: list[Any], outputs: list[Any]) -> None:
        raise MuteError

    with pytest.raises(tf.errors.OpError, match=r"an error without a text|MuteError"):
        tf.function(lambda x: compute_in_python(fail, [x]))(tf.zeros(2))


def test_what_it_raises_is_told() -> None:
    def fail(inputs: list[Any], outputs: list[Any]) -> None:
        raise LookupError("no such thing")

    function = tf.function(lambda x: compute_in_python(fail, [x]))
    with pytest.raises(tf.errors.OpError, match="LookupError: no such thing"):
        function(tf.zeros(2))
    with pytest.raises(LookupError, match="no such thing"):
        compute_in_python(fail, [tf.zeros(2)])


def test_a_graph_keeps_its_function_and_nothing_else_does(path: str) -> None:
    class Owner:
        """Refers to its graph, which refers to it."""

        def __init__(self) -> None:
            self.function = tf.function(lambda x: compute_in_python(self.compute, [x]))

        def compute(self, inputs: list[Any], outputs: list[Any]) -> None:
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


def test_a_graph_without_its_function_says_so(path: str) -> None:
    if path == "ops":
        pytest.skip("TensorFlow keeps functions of its own op")
    step = tf.function(lambda x: compute_in_python(reverse, [x]))
    concrete = step.get_concrete_function(tf.zeros(1))
    delattr(concrete.graph, _python_op._CALLS)
    gc.collect()
    with pytest.raises(tf.errors.UnknownError, match="the function of this graph is gone"):
        concrete(tf.zeros(1))
