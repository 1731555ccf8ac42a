"""TensorFlow with two logical CPUs, and one set of variables built in either mode."""

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable

from flatweights.tensorflow import TensorFlowVariables

_CPU = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(_CPU, [tf.config.LogicalDeviceConfiguration()] * 2)

tf1 = tf.compat.v1

# For tests whose behaviour does not depend on the way of moving weights, or has only one way.
only_bound = pytest.mark.parametrize("path", ["bound"], indirect=True)

# For tests that find little when operations move the weights.
mostly_bound = pytest.mark.parametrize(
    "path", ["bound", pytest.param("ops", marks=pytest.mark.slow)], indirect=True
)


def some_slow(cases: Mapping[str, Any], *always: str) -> list[Any]:
    """The cases of a test by name; those that are not named in ``always`` are slow."""
    assert {*always} <= {*cases}
    return [
        pytest.param(case, id=name, marks=() if name in always else pytest.mark.slow)
        for name, case in cases.items()
    ]


def shared_variable(name: str, value: Any) -> Any:
    """A variable that is looked up by its name at each use, as in a session."""
    handle = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=value.shape, shared_name=name)
    tf.raw_ops.AssignVariableOp(resource=handle, value=value)
    return BaseResourceVariable(
        trainable=True,
        shape=value.shape,
        dtype=tf.float32,
        handle=handle,
        handle_name=name,
        distribute_strategy=None,
        cached_value=None,
    )


@dataclass
class Model:
    """Variables, with a way to read and write each that does not use flatweights."""

    weights: TensorFlowVariables
    read: Callable[[], dict[str, np.ndarray]]
    write: Callable[[str, Any], None]


def build_eager(values: Mapping[str, np.ndarray], **kwargs: Any) -> Model:
    variables = {name: tf.Variable(value, name=name) for name, value in values.items()}
    return Model(
        TensorFlowVariables(list(variables.values()), **kwargs),
        lambda: {name: np.array(v.numpy()) for name, v in variables.items()},
        lambda name, value: variables[name].assign(value),
    )


class _Graph:
    """A graph with variables of given shapes and dtypes, and an assignment to each."""

    def __init__(
        self, parts: tuple[tuple[str, tuple[int, ...], np.dtype[Any]], ...], use_resource: bool
    ) -> None:
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.variables = {
                name: tf1.Variable(np.zeros(shape, dtype), name=name, use_resource=use_resource)
                for name, shape, dtype in parts
            }
            self.feeds = {
                name: tf1.placeholder(v.dtype.base_dtype, v.shape)
                for name, v in self.variables.items()
            }
            self.assignments = {
                name: tf1.assign(v, self.feeds[name]).op for name, v in self.variables.items()
            }


# To build a graph takes longer than most tests of it.
_shared_graph = functools.lru_cache(maxsize=4)(_Graph)


def build_graph(
    values: Mapping[str, np.ndarray], *, use_resource: bool = True, is_shared: bool = True
) -> Model:
    """Variables in a session of their own, by default of a graph that other models have, too."""
    arrays = {name: np.asarray(value) for name, value in values.items()}
    parts = tuple((name, array.shape, array.dtype) for name, array in arrays.items())
    of = (_shared_graph if is_shared else _Graph)(parts, use_resource)
    session = tf1.Session(graph=of.graph)

    def write(name: str, value: Any) -> None:
        feed = of.feeds[name]
        session.run(of.assignments[name], {feed: np.reshape(value, feed.shape)})

    session.run(list(of.assignments.values()), {of.feeds[n]: a for n, a in arrays.items()})
    return Model(
        TensorFlowVariables(list(of.variables.values()), session),
        lambda: session.run(of.variables),
        write,
    )


def build_ref_graph(values: Mapping[str, np.ndarray]) -> Model:
    return build_graph(values, use_resource=False)


BUILDERS = {"eager": build_eager, "graph": build_graph, "ref-graph": build_ref_graph}


def random_values(seed: int = 0) -> dict[str, np.ndarray]:
    """Shapes that are often handled wrongly: a number, no elements, ones, and odd sizes."""
    rng = np.random.default_rng(seed)
    return {
        "kernel": rng.normal(size=(7, 5)).astype(np.float32),
        "scalar": np.float32(rng.normal()),
        "empty": np.zeros((0, 3), np.float32),
        "ones": rng.normal(size=(1, 1, 1)).astype(np.float32),
        "bias": rng.normal(size=5).astype(np.float32),
    }


def mixed_values(seed: int = 0) -> dict[str, np.ndarray]:
    """Dtypes that interleave, so that no dtype's variables lie side by side."""
    rng = np.random.default_rng(seed)
    return {
        "half": rng.normal(size=(3, 2)).astype(np.float16),
        "step": np.int64(2**40 + 1),
        "single": rng.normal(size=4).astype(np.float32),
        "seed": rng.integers(0, 2**32, size=2, dtype=np.uint32),
        "double": rng.normal(size=(2, 2)),
        "brain": rng.normal(size=3).astype(ml_dtypes.bfloat16),
        "flag": np.array([True, False, True]),
        "single2": rng.normal(size=2).astype(np.float32),
    }
