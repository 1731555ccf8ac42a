"""TF1 graphs only: sessions, search, and graphs that do not grow."""

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from flatweights.tensorflow import TensorFlowVariables
from flatweights.tensorflow._session import run

tf1 = tf.compat.v1


@pytest.fixture
def graph() -> Iterator[Any]:
    with tf.Graph().as_default() as new:
        yield new


def variable(name: Any, value: Any = 0.0, **kwargs: Any) -> Any:
    return tf1.Variable(np.float32(value), name=name, **kwargs)


def initialized() -> Any:
    session = tf1.Session()
    session.run(tf1.global_variables_initializer())
    return session


@pytest.mark.parametrize("use_resource", [True, False])
def test_search_finds_what_the_output_depends_on(graph: Any, use_resource: Any) -> None:
    a, b, unused, c = (variable(n, use_resource=use_resource) for n in ("a", "b", "unused", "c"))
    loss = tf.square(tf.sin(c) + a * 2) + tf.exp(b)
    weights = TensorFlowVariables(loss)
    assert list(weights.variables) == ["a", "b", "c"], "order of creation, not of discovery"
    assert weights.variables["c"] is c
    assert unused.op.name not in weights.layout


def test_a_list_of_outputs_and_input_variables(graph: Any) -> None:
    a, b, c = variable("a"), variable("b"), variable("c")
    step = tf1.Variable(np.int64(7), name="step", trainable=False)
    local = variable("local", collections=[tf1.GraphKeys.LOCAL_VARIABLES])
    session = initialized()
    session.run(tf1.local_variables_initializer())
    weights = TensorFlowVariables([b * 2, (a + 1).op], session, [step, a, c, local])
    assert list(weights.variables) == ["a", "b", "step", "c", "local"]
    assert weights.get_weights()["step"].dtype == np.int64
    weights.set_flat([1, 2, 3, 4, 5])
    assert session.run([a, b, step, c, local]) == [1, 2, 3, 4, 5]


def test_what_a_model_does_not_train_is_left_out_of_its_outputs_variables_too(graph: Any) -> None:
    import tf_keras

    layers = tf_keras.layers
    gru = layers.GRU(2, stateful=True, unroll=True, batch_input_shape=(1, 1, 4), name="gru")
    model = tf_keras.Sequential([gru, layers.Dense(1)])
    model.layers[1].trainable = False
    loss = tf.reduce_sum(model(tf.ones((1, 1, 4))))
    for output in ([model, loss], [loss, model]):
        weights = TensorFlowVariables(output, initialized(), trainable_only=True)
        assert list(weights.variables) == [v.op.name for v in model.trainable_variables]


def test_the_attributes_of_rays_class(graph: Any) -> None:
    a = variable("scope/a", 1.0)
    blocker = tf1.placeholder(tf.float32, [], name="never_fed")
    session = initialized()
    with tf1.name_scope("caller"), tf.control_dependencies([blocker]), tf.device("/CPU:1"):
        weights = TensorFlowVariables(a, session)
    assert weights.sess is session
    assert list(weights.placeholders) == list(weights.assignment_nodes) == ["scope/a"]
    assert weights.placeholders["scope/a"].name == "Placeholder_scope/a:0"
    session.run(
        weights.assignment_nodes["scope/a"], {weights.placeholders["scope/a"]: np.float32(5)}
    )
    assert weights.get_flat() == [5]
    weights.set_flat([6])
    assert session.run(weights.variables) == {"scope/a": 6}


def test_a_session_that_another_thread_closes_in_a_run_is_a_closed_session(graph: Any) -> None:
    queue = tf1.FIFOQueue(1, tf.float32, [()])
    waits, cancels = queue.dequeue(), queue.close(cancel_pending_enqueues=True)
    session = initialized()
    threading.Timer(0.1, session.close).start()
    with pytest.raises(RuntimeError, match="session is closed"):
        run(session, waits)  # TensorFlow says that the run was cancelled
    stays, puts = initialized(), queue.enqueue(1.0)
    stays.run(puts)
    threading.Timer(0.1, stays.run, [cancels]).start()
    with pytest.raises(tf.errors.CancelledError):
        run(stays, puts)


def test_an_optimizer_of_a_graph_has_its_slots_outside_of_the_graph_too() -> None:
    with tf.Graph().as_default():
        weight = tf1.get_variable("w", [2])
        optimizer = tf1.train.AdamOptimizer()
        optimizer.minimize(tf.reduce_sum(weight))
        session = tf1.Session()
        inside = TensorFlowVariables([weight, optimizer], session)
    outside = TensorFlowVariables([weight, optimizer], session)
    assert [*outside.variables] == [*inside.variables]
    assert "w/Adam" in outside.variables


def test_a_finalized_graph_is_refused_at_construction_and_works_after(graph: Any) -> None:
    a = variable("a", 1.0)
    weights = TensorFlowVariables(a, initialized())
    graph.finalize()
    with pytest.raises(RuntimeError, match=r"graph is finalized: construct .* before"):
        TensorFlowVariables(a)
    weights.set_flat([2])
    weights.set_weights({"a": 3})
    assert weights.get_weights()["a"] == 3


def test_what_is_no_model_of_one_graph_is_refused() -> None:
    eager = tf.Variable(1.0)
    with tf.Graph().as_default():
        a = variable("a")
        label = tf1.Variable("text", name="label")
        with pytest.raises(ValueError, match="expected variables of a graph, got eager ones"):
            TensorFlowVariables([a, eager])
        with pytest.raises(ValueError, match="to have variables, found none"):
            TensorFlowVariables(tf1.placeholder(tf.float32))
        with pytest.raises(TypeError, match=r"variable 'label': expected numbers .* got string"):
            TensorFlowVariables(label)
    with tf.Graph().as_default():
        b = variable("b")
    with pytest.raises(ValueError, match="expected variables of one graph, got some of 2 graphs"):
        TensorFlowVariables([a, b])
    with tf1.Session(graph=tf.Graph()) as session, pytest.raises(ValueError, match="got eager"):
        TensorFlowVariables(eager, session)


def test_sessions_and_graphs_are_let_go() -> None:
    def construct() -> Any:
        with tf.Graph().as_default() as own:
            weights = TensorFlowVariables(variable("a", 1.0), initialized())
        weights.set_flat(weights.get_flat())
        sessions = [weakref.ref(weights.sess)]
        weights.set_session(None)
        gc.collect()
        with own.as_default():
            weights.set_session(initialized())
        assert weights.get_flat() == [1]
        sessions.append(weakref.ref(weights.sess))
        gc.disable()
        try:
            del weights
            assert [session() for session in sessions] == [None, None], "the last one at once"
        finally:
            gc.enable()
        return weakref.ref(own)

    gone = construct()
    gc.collect()
    assert gone() is None


def test_a_session_within_another_object_serves(graph: Any) -> None:
    class Wrapper:
        def __init__(self, session: Any) -> None:
            self.graph, self.run = session.graph, session.run

    weights = TensorFlowVariables(variable("a", 1.0), Wrapper(initialized()))
    weights.set_flat(weights.get_flat() + 1.0)
    assert weights.get_flat() == [2]
    weights.apply_flat_gradients(tf1.train.MomentumOptimizer(1.0, 0.9), [1])
    assert weights.get_flat() == [1]
