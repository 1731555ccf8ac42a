"""Averaged gradients of variables on a GPU. All values are small integers, so means are exact."""

import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")  # other processes may use the GPU, too

import keras
import numpy as np
import pytest
import tensorflow as tf

import flatweights.ray
from flatweights.keras import average_gradients
from flatweights.tensorflow._python_op import HOST, compute_in_python, device_of

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(
        not tf.config.list_physical_devices("GPU"), reason="there is no GPU, or it is hidden"
    ),
]

NAMES = (f"gpu {k}" for k in itertools.count())
SHAPES = ((300, 7), (), (1_000_001,), (0, 3), (5,))
STEPS = 3


def values(seed: int, dtype: str) -> list[Any]:
    """Multiples of 4 that every dtype holds."""
    rng = np.random.default_rng(seed)
    return [tf.cast(4 * rng.integers(-9, 10, shape), dtype) for shape in SHAPES]


def train(rank: int, name: str, dtype: str, wrap: Callable[[Any], Any], devices: str) -> list[Any]:
    """What the variables of one member are after some steps with gradients of its own."""
    places = devices.split()
    variables = []
    for i, start in enumerate(values(100, dtype)):
        with tf.device(places[i % len(places)]):
            variables.append(keras.Variable(start, dtype=dtype))
    with flatweights.ray.join(name, rank=rank, size=2) as member:
        optimizer = average_gradients(keras.optimizers.SGD(1.0), member=member)
        optimizer.build(variables)

        def step(k: Any) -> None:
            with tf.device("GPU:0"):
                # They are still being computed when the step begins to gather them.
                grads = [grad * tf.cast(k, dtype) for grad in values(rank, dtype)]
            optimizer.apply(grads, variables)

        run = wrap(step)
        for k in range(STEPS):
            run(tf.constant(k + 1))
        return [np.asarray(variable.value.numpy(), np.float64) for variable in variables]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize(
    ("wrap", "devices"),
    [(tf.function, "GPU:0"), (lambda step: step, "GPU:0"), (tf.function, "GPU:0 CPU:0")],
    ids=["compiled", "eager", "mixed"],
)
def test_members_apply_the_mean(dtype: str, wrap: Callable[[Any], Any], devices: str) -> None:
    name = next(NAMES)
    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(lambda rank: train(rank, name, dtype, wrap, devices), range(2)))
    grads = [values(rank, "float64") for rank in range(2)]
    expected = values(100, "float64")
    for i, start in enumerate(expected):
        mean = (grads[0][i] + grads[1][i]) / 2
        wanted = np.asarray(start - sum(range(1, STEPS + 1)) * mean)
        for own in results:
            np.testing.assert_array_equal(own[i], wanted, err_msg=f"variable {i}")


def test_gradients_of_one_gpu_stay_on_it() -> None:
    with tf.device("GPU:0"):
        there = [tf.Variable([1.0]), tf.Variable([2.0])]
    with tf.device("CPU:0"):
        here = tf.Variable([3.0])
    assert device_of(there) == there[0].device
    assert device_of([*there, here]) == HOST
    seen = []
    layout = flatweights.Layout.of([np.empty(1, np.float32)])

    def double(called: Any) -> None:
        buffer = layout.new_buffer()
        called.gather_into(layout.core, buffer)
        layout.packed_views(buffer)[0][:] *= 2
        called.scatter(layout.core, buffer)

    @tf.function  # type: ignore[untyped-decorator]
    def step(x: Any) -> Any:
        (y,) = compute_in_python(double, [x], device_of(there))
        seen.append(y.op.device)
        return y + 1

    with tf.device("GPU:0"):
        assert step(tf.constant([4.0])).numpy().tolist() == [9.0]
        (eager,) = compute_in_python(double, [tf.constant([5.0])], device_of(there))
    assert seen == [there[0].device]
    assert "GPU:0" in eager.device
    assert eager.numpy().tolist() == [10.0]
