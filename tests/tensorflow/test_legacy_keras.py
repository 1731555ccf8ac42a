"""`TF_USE_LEGACY_KERAS=1`, which Ray Train sets: `tf.keras` is `tf_keras`, `tf1.layers` work.

A process reads it once, so each program here has a process of its own.
"""

import os
import textwrap
from typing import Any

import pytest
from tf_forks import Forks

START = """
import os
import numpy as np
import tensorflow as tf
from flatweights.tensorflow import TensorFlowVariables

tf1 = tf.compat.v1
assert tf.keras.__name__.startswith(("tf_keras", "keras.api._v2")), tf.keras.__name__

def check(weights, read):
    flat = np.arange(weights.get_flat_size(), dtype=weights.layout.dtype)
    weights.set_flat(flat)
    values = [np.asarray(v).ravel() for v in read()]
    np.testing.assert_array_equal(np.concatenate(values), flat)
    np.testing.assert_array_equal(weights.get_flat(), flat)
    weights.set_weights({k: a * 2 for k, a in weights.get_weights().items()}, strict=True)
    np.testing.assert_array_equal(weights.get_flat(), flat * 2)
"""

PROGRAMS = {
    "tf1_layers": """
        with tf.Graph().as_default():
            x = tf1.placeholder(tf.float32, [None, 8, 8, 1])
            with tf1.variable_scope("net"):
                y = tf1.layers.conv2d(x, 2, 3, name="first")
                y = tf1.layers.batch_normalization(y, training=True)
                y = tf1.layers.dense(tf1.layers.flatten(y), 3)
                y = tf1.layers.dense(y, 3)
            with tf1.variable_scope("net", reuse=True):
                tf1.layers.conv2d(x, 2, 3, name="first")
            session = tf1.Session()
            session.run(tf1.global_variables_initializer())
            weights = TensorFlowVariables(y, session)
            names = list(weights.variables)
            assert names[:2] == ["net/first/kernel", "net/first/bias"], names
            assert names[-2:] == ["net/dense_1/kernel", "net/dense_1/bias"], names
            assert len(names) == len(tf1.global_variables()) == 10, names
            trained = TensorFlowVariables(y, session, trainable_only=True)
            assert len(trained.variables) == len(tf1.trainable_variables()) == 8
            for one in (weights, trained):
                check(one, lambda: session.run(list(one.variables.values())))
    """,
    "tf1_layer_objects": """
        with tf.Graph().as_default():
            layer = tf1.layers.Dense(3, name="given")
            y = layer(tf1.placeholder(tf.float32, [None, 2]))
            session = tf1.Session()
            session.run(tf1.global_variables_initializer())
            weights = TensorFlowVariables(layer, session)
            assert list(weights.variables) == ["given/kernel", "given/bias"]
            check(weights, lambda: session.run(list(weights.variables.values())))
    """,
    "model_in_a_graph": """
        with tf.Graph().as_default():
            model = tf.keras.Sequential(
                [tf.keras.Input((4,)), tf.keras.layers.Dense(3), tf.keras.layers.Dense(2)]
            )
            session = tf1.Session()
            session.run(tf1.global_variables_initializer())
            before = len(tf1.get_default_graph().get_operations())
            weights = TensorFlowVariables(model, session)
            assert list(weights.variables) == [v.op.name for v in model.variables]
            grown = len(tf1.get_default_graph().get_operations())
            for _ in range(3):
                check(weights, lambda: session.run(model.variables))
            assert len(tf1.get_default_graph().get_operations()) == grown
    """,
    "eager_model_and_optimizers": """
        for kind in (tf.keras.optimizers.Adam, tf.keras.optimizers.legacy.Adam):
            model = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(3)])
            model.compile(kind(0.1), "mse", run_eagerly=True)
            model.fit(np.ones((4, 4)), np.ones((4, 3)), verbose=0)
            weights = TensorFlowVariables([model, model.optimizer])
            assert "optimizer/dense/kernel/" in "".join(weights.variables), list(weights.variables)
            check(weights, lambda: [v.numpy() for v in weights.variables.values()])
            model.fit(np.ones((4, 4)), np.ones((4, 3)), verbose=0)
    """,
    "v1_mode": """
        tf1.disable_v2_behavior()
        model = tf.keras.Sequential([tf.keras.layers.Dense(3, input_shape=(4,))])
        session = tf1.keras.backend.get_session()
        session.run(tf1.global_variables_initializer())
        weights = TensorFlowVariables(model, session)
        check(weights, lambda: session.run(model.variables))
        plain = tf1.get_variable("plain", [2], use_resource=False)
        session.run(plain.initializer)
        weights = TensorFlowVariables([model, plain], session)
        assert list(weights.variables)[-1] == "plain"
        check(weights, lambda: session.run([*model.variables, plain]))
    """,
    "without_keras": """
        import sys
        variable = tf.Variable([1.0, 2.0], name="w")
        check(TensorFlowVariables(variable), lambda: [variable.numpy()])
        assert "keras" not in sys.modules, "nothing imports Keras 3"
    """,
}


@pytest.fixture(params=["bound"], autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Differences between the ways of moving are tested elsewhere."""
    monkeypatch.setenv("FLATWEIGHTS_TENSORFLOW", request.param)
    return request.param


# These change the process, or look at all of it.
ALONE = ("v1_mode", "without_keras")
TOGETHER = " ".join(name for name in PROGRAMS if name not in ALONE)


@pytest.mark.parametrize("names", [TOGETHER, *ALONE])
def test_variables_of_legacy_keras_go_round(names: Any, forks: Forks) -> None:
    programs = [textwrap.dedent(PROGRAMS[name]) for name in names.split()]
    environment = os.environ | {"TF_USE_LEGACY_KERAS": "1"}
    done = forks.run("\n".join([START, *programs]), environment=environment)
    assert done.returncode == 0, done.stderr[-3000:]
