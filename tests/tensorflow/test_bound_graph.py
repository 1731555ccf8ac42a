"""Bound variables of sessions: every change by TensorFlow is visible, or gives a clear error."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tf_models import only_bound, some_slow

from flatweights.tensorflow import TensorFlowVariables
from flatweights.tensorflow._session import SessionOperations

tf1 = tf.compat.v1


@pytest.fixture(autouse=True)
def graph() -> Iterator[Any]:
    with tf.Graph().as_default() as new:
        yield new


def variable(name: Any, value: Any, **kwargs: Any) -> Any:
    return tf1.Variable(np.float32(value), name=name, **{"use_resource": True, **kwargs})


def initialized(target: Any = "", **kwargs: Any) -> Any:
    session = tf1.Session(target, **kwargs)
    session.run(tf1.global_variables_initializer())
    return session


def bound(variables: Any, session: Any) -> Any:
    weights = TensorFlowVariables(variables, session)
    assert weights.unbound == {}
    return weights


def replacement(v: Any) -> Any:
    """The operation that gives ``v`` a value of any shape, and the placeholder for the value."""
    value = tf1.placeholder(tf.float32)
    return tf.raw_ops.AssignVariableOp(resource=v.handle, value=value, validate_shape=False), value


def destruction(v: Any) -> Any:
    return tf.raw_ops.DestroyResourceOp(resource=v.handle)


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
SETS = {name: call for name, call in CALLS.items() if name.startswith("set")}
OTHERS = {name: call for name, call in CALLS.items() if name not in SETS}


@only_bound
def test_variables_are_bound_as_soon_as_they_are_initialized(path: Any) -> None:
    v = variable("v", [1, 2])
    at_once = bound(v, initialized())
    later = TensorFlowVariables(v)
    assert list(later.unbound) == ["v"]
    later.set_session(initialized())
    last = TensorFlowVariables(v, tf1.Session())
    assert "not initialized" in last.unbound["v"]
    last.sess.run(v.initializer)
    for weights in (at_once, later, last):
        for _ in range(2):
            assert weights.get_flat().tolist() == [1, 2]
            assert weights.unbound == {}
            weights.set_flat([3, 4])
            assert weights.sess.run(v).tolist() == [3, 4]
            weights.sess.run(v.initializer)


@only_bound
def test_ref_type_variables_are_listed_and_moved_beside_bound_ones(path: Any) -> None:
    old, v = variable("old", [1, 2], use_resource=False), variable("v", 3)
    weights = TensorFlowVariables([old, v], initialized())
    assert list(weights.unbound) == ["old"]
    assert "ref" in weights.unbound["old"]
    weights.set_flat([4, 5, 6])
    values = weights.sess.run([old, v])
    assert [value.tolist() for value in values] == [[4, 5], 6]
    weights.add_flat([1, 1, 1])
    assert weights.get_flat().tolist() == [5, 6, 7]
    weights.set_weights({"old": [8, 9]})
    assert weights.get_weights()["old"].tolist() == [8, 9]


OPTIMIZERS = {
    "descent": lambda: tf1.train.GradientDescentOptimizer(0.1),
    "momentum": lambda: tf1.train.MomentumOptimizer(0.1, 0.9, use_nesterov=True),
    "adam": lambda: tf1.train.AdamOptimizer(0.1),
    "ftrl": lambda: tf1.train.FtrlOptimizer(0.1),
}


@pytest.mark.parametrize("optimizer", some_slow(OPTIMIZERS, "descent", "adam"))
def test_steps_are_seen_and_go_on_from_what_was_set(optimizer: Any) -> None:
    variables = [variable("a", [1, 2, 3]), variable("b", 4), variable("table", np.ones((5, 2)))]
    loss = sum(tf.reduce_sum(tf.sin(v)) for v in variables[:2])
    loss += tf.reduce_sum(tf.nn.embedding_lookup(variables[2], [1, 3, 3]))
    step = optimizer().minimize(loss)
    weights = TensorFlowVariables(tf1.global_variables(), initialized())
    twin = initialized()
    flats = [tf.concat([tf.reshape(v, [-1]) for v in tf1.global_variables()], 0)]
    fed = [tf1.placeholder(tf.float32, v.shape) for v in variables]
    doubled = [v.assign(f).op for v, f in zip(variables, fed, strict=True)]
    for _ in range(3):
        before = weights.get_flat()
        weights.sess.run(step)
        twin.run(step)
        assert (weights.get_flat() != before).any()
        np.testing.assert_array_equal(weights.get_flat(), twin.run(flats)[0])
        weights.set_weights({v.op.name: weights.get_weights()[v.op.name] * 2 for v in variables})
        twin.run(doubled, {f: x * 2 for f, x in zip(fed, twin.run(variables), strict=True)})
        np.testing.assert_array_equal(weights.sess.run(flats)[0], twin.run(flats)[0])


@pytest.mark.parametrize("call", some_slow(CALLS, "set_flat", "set_weights", "lerp_flat"))
def test_values_of_an_earlier_run_do_not_change(call: Any) -> None:
    a, b = variable("a", [1, 2]), variable("b", [3])
    weights = TensorFlowVariables([a, b], initialized())
    for _ in range(2):
        held = weights.sess.run([a.read_value(), b.value()])
        before = [value.tolist() for value in held]
        call(weights)
        assert [value.tolist() for value in held] == before


@only_bound
@pytest.mark.parametrize("call", some_slow(CALLS, "get_flat", "set_weights", "add_flat"))
def test_another_shape_is_an_error_that_changes_nothing(path: Any, call: Any) -> None:
    before = [variable(f"b{i}", [3]) for i in range(4)]
    a = variable("a", [1, 2])
    others = [*before, *(variable(f"b{i}", [3]) for i in range(4, 8))]
    replace, value = replacement(a)
    weights = bound([*others, a], initialized())
    weights.sess.run(replace, {value: [5, 5, 5]})
    expected = r"slot 4 'a': expected float32 \(2,\), got float32 \(3,\)"
    with pytest.raises(ValueError, match=expected):
        call(weights)
    assert np.concatenate(weights.sess.run(others)).tolist() == [3] * 8
    weights.sess.run(replace, {value: [6, 7]})
    assert weights.get_flat()[4:6].tolist() == [6, 7]


@pytest.mark.parametrize("call", some_slow(OTHERS, "get_flat", "get_weights", "lerp_flat"))
def test_what_is_not_initialized_or_destroyed_is_named(call: Any) -> None:
    a, b = variable("a", [1, 2]), variable("b", [3])
    destroy = destruction(a)
    session = tf1.Session()
    session.run(b.initializer)
    weights = TensorFlowVariables([a, b], session)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"got uninitialized: 'a'; first run tf"):
            call(weights)
        assert session.run(b).tolist() == [3]
        session.run(a.initializer)
        assert weights.get_flat().tolist() == [1, 2, 3]
        session.run(destroy)


@pytest.mark.parametrize("call", some_slow(SETS, "set_flat", "set_weights"))
def test_setting_initializes_and_makes_a_destroyed_variable_anew(call: Any) -> None:
    a, b = variable("a", [1, 2]), variable("b", [3])
    destroy = destruction(a)
    weights = TensorFlowVariables([a, b], tf1.Session())
    for _ in range(3):
        call(weights)
        assert [value.tolist() for value in weights.sess.run([a, b])] == [[9, 9], [9]]
        assert weights.get_flat().tolist() == [9, 9, 9]
        weights.sess.run(destroy)


def test_each_session_has_its_own_values() -> None:
    v = variable("v", [1, 2])
    first, second = initialized(), initialized()
    weights = TensorFlowVariables(v, first)
    for k in range(3):
        weights.set_session(first)
        weights.set_flat([k, 3])
        weights.set_session(second)
        assert weights.get_flat().tolist() == ([k - 1, 4] if k else [1, 2])
        weights.set_flat([k, 4])
        assert first.run(v).tolist() == [k, 3]
        weights.set_session(first)
        assert weights.get_flat().tolist() == [k, 3]
        assert second.run(v).tolist() == [k, 4]
    with tf1.Session(graph=tf.Graph()) as other, pytest.raises(ValueError, match="of the graph"):
        weights.set_session(other)
    assert weights.sess is first


Session: Any = tf1.Session


class ClosedLater(Session):  # type: ignore[misc]
    """A session that closes after a number of accesses, as another thread could close it."""

    looks = 0
    is_closed = False

    @property
    def _closed(self) -> bool:
        self.looks -= 1
        if self.looks == 0:
            self.close()
        return self.is_closed

    @_closed.setter
    def _closed(self, closed: bool) -> None:
        self.is_closed = closed


TRAINING = {
    "apply_flat_gradients": lambda w: w.apply_flat_gradients(
        tf1.train.AdamOptimizer(), np.ones(w.get_flat_size(), np.float32)
    ),
    "value_and_gradient": lambda w: w.value_and_gradient(
        lambda: tf.reduce_sum([tf.reduce_sum(v) for v in w.variables.values()]), dtype=np.float32
    )(np.ones(w.get_flat_size(), np.float32)),
}


@pytest.mark.parametrize(
    "call", some_slow(CALLS | TRAINING, "get_weights", "set_flat", "add_flat", *TRAINING)
)
@pytest.mark.parametrize("is_reset", [False, True])
def test_a_closed_session_is_an_error_and_the_next_has_its_own_values(
    call: Any, is_reset: bool
) -> None:
    weights = TensorFlowVariables([variable("a", [1, 2]), variable("b", [3])], initialized())
    weights.set_flat([7, 8, 9])
    if is_reset:
        tf1.Session.reset("")  # closes all sessions of the process, and none of them says so
    else:
        weights.sess.close()
    with pytest.raises(RuntimeError, match="session is closed: call set_session"):
        call(weights)
    weights.set_session(None)
    with pytest.raises(RuntimeError, match="session is not set"):
        call(weights)
    weights.set_session(initialized())
    assert weights.get_flat().tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    "call", some_slow(CALLS | TRAINING, "get_flat", "set_weights", "lerp_flat", *TRAINING)
)
@pytest.mark.parametrize(
    ("resource", "path"),
    [(True, "bound"), pytest.param(False, "bound", marks=pytest.mark.slow), (True, "ops")],
    indirect=["path"],
)
def test_a_session_that_is_closed_during_a_call_is_the_error_of_a_closed_session(
    path: Any, call: Any, resource: Any
) -> None:
    a, b = variable("a", [1, 2]), variable("b", [3], use_resource=resource)
    weights = TensorFlowVariables([a, b])
    messages = []
    for looks in range(1, 12):
        session = ClosedLater()
        session.run([a.initializer, b.initializer])
        session.looks = looks
        weights.set_session(session)
        try:
            call(weights)
        except RuntimeError as error:
            messages.append(str(error))
        if session.looks > 0:
            break  # the call made fewer accesses
    assert messages
    assert all("losed" in message for message in messages), messages


def test_a_monitored_session_is_used_within_its_context() -> None:
    v = variable("v", [1, 2])
    weights = TensorFlowVariables(v)
    for _ in range(2):
        with tf1.train.MonitoredSession() as session:
            weights.set_session(session)
            assert weights.get_flat().tolist() == [1, 2]
            weights.set_flat([3, 4])
            assert session.run(v).tolist() == weights.get_flat().tolist() == [3, 4]
        with pytest.raises(RuntimeError, match="session is closed"):
            weights.get_flat()


SessionRunHook: Any = tf1.train.SessionRunHook


class AbortOnce(SessionRunHook):  # type: ignore[misc]
    """Makes a monitored session recreate its own session."""

    armed = False

    def before_run(self, run_context: Any) -> None:
        if self.armed:
            self.armed = False
            raise tf.errors.AbortedError(None, None, "preempted")


@contextlib.contextmanager
def recovering() -> Iterator[tuple[Any, Any, TensorFlowVariables, AbortOnce, Any]]:
    """A variable of [1, 2], an operation that adds 10, the weights, a hook, and their session."""
    v = variable("v", [1, 2])
    bump = tf1.assign_add(v, [10.0, 10.0])
    weights = TensorFlowVariables(v)
    hook = AbortOnce()
    with tf1.train.MonitoredSession(hooks=[hook]) as session:
        weights.set_session(session)
        yield v, bump.op, weights, hook, session


def test_a_session_that_recovers_has_its_new_values() -> None:
    with recovering() as (v, bump, weights, hook, session):
        for _ in range(2):
            weights.set_flat([3, 4])
            hook.armed = True
            session.run(bump)
            assert session.run(v).tolist() == [11, 12], "recovered, initialized, bumped"
            assert weights.get_flat().tolist() == [11, 12]
            weights.add_flat([1, 1])
            assert session.run(v).tolist() == [12, 13]


@pytest.fixture
def after_binding(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """Functions to call once, as by another thread, between the binding op and its use."""
    calls: list[Callable[[], object]] = []
    bind = SessionOperations.bind

    def bind_and_call(self: Any, groups: Any) -> Any:
        results = bind(self, groups)
        while calls:
            calls.pop()()
        return results

    monkeypatch.setattr(SessionOperations, "bind", bind_and_call)
    return calls


@only_bound
def test_a_session_that_recovers_while_it_is_bound_is_bound_again(
    path: Any, after_binding: list[Callable[[], object]]
) -> None:
    with recovering() as (_, bump, weights, hook, session):
        hook.armed = True
        after_binding.append(lambda: session.run(bump))
        for _ in range(2):
            assert weights.get_flat().tolist() == [11, 12], "recovered, initialized, bumped"
        assert not hook.armed
        assert weights.unbound == {}


@only_bound
def test_a_session_that_is_set_while_another_is_bound_has_its_own_values(
    path: Any, after_binding: list[Callable[[], object]]
) -> None:
    v = variable("v", [1, 2])
    first, second = initialized(), initialized()
    second.run(tf1.assign(v, [3, 4]))
    weights = TensorFlowVariables(v)
    weights.set_session(first)
    after_binding.append(lambda: weights.set_session(second))
    weights.get_flat()
    assert weights.get_flat().tolist() == [3, 4]
    weights.set_flat([5, 6])
    assert [session.run(v).tolist() for session in (first, second)] == [[1, 2], [5, 6]]


@only_bound
def test_a_variable_that_is_destroyed_at_construction_is_bound_later(
    path: Any, after_binding: list[Callable[[], object]]
) -> None:
    v = variable("v", [1, 2])
    destroy, session = destruction(v), initialized()
    after_binding.append(lambda: session.run([destroy]))
    weights = TensorFlowVariables(v, session)
    assert list(weights.unbound) == ["v"]
    session.run(v.initializer)
    assert weights.get_flat().tolist() == [1, 2]
    assert weights.unbound == {}


def test_no_call_adds_to_a_graph_not_even_to_a_finalized_one(graph: Any, tmp_path: Path) -> None:
    weights = TensorFlowVariables([variable("a", [1, 2]), variable("b", [3])], initialized())
    before = len(graph.get_operations())
    graph.finalize()
    for _ in range(2):
        for call in CALLS.values():
            call(weights)  # type: ignore[no-untyped-call]
        weights.set_weights({"a": [1, 2]})
        weights.save(tmp_path / "saved")
        weights.load(tmp_path / "saved")
    assert len(graph.get_operations()) == before


def operations_of(graph: Any, kind: Any) -> Any:
    return [op for op in graph.get_operations() if op.type == kind]


@only_bound
def test_each_variable_has_a_binding_operation_outside_of_the_callers_scopes(
    path: Any, graph: Any
) -> None:
    a = variable("a", 1)
    with tf.device("/CPU:1"):
        b = variable("b", 2)
    old = variable("old", 3, use_resource=False)
    blocker = tf1.placeholder(tf.float32, [], name="never_fed")
    with tf1.name_scope("scope"), tf.control_dependencies([blocker]), tf.device("/CPU:1"):
        weights = TensorFlowVariables([a, b, old])
    found = operations_of(graph, "FlatweightsBindVariable")
    assert [op.inputs[0].op for op in found] == [a.handle.op, b.handle.op]
    for op in found:
        assert (op.device, op.control_inputs, "scope" in op.name) == ("", [], False)
    session = initialized(config=tf1.ConfigProto(device_count={"CPU": 2}))
    weights.set_session(session)
    assert weights.get_flat().tolist() == [1, 2, 3]
    assert list(weights.unbound) == ["old"]


def placements(session: Any, fetches: Any) -> Any:
    """The device on which each operation ran, by its name."""
    metadata = tf1.RunMetadata()
    options = tf1.RunOptions(trace_level=tf1.RunOptions.SOFTWARE_TRACE)
    session.run(fetches, options=options, run_metadata=metadata)
    return {
        node.node_name: device.device[-5:]
        for device in metadata.step_stats.dev_stats
        for node in device.node_stats
    }


def test_construction_moves_no_variable_to_another_device(graph: Any) -> None:
    a = variable("a", [1, 2])
    with tf.device("/CPU:1"):
        b = variable("b", [3])
    with tf.device("/CPU:1"):
        weights = TensorFlowVariables([a, b])
    reads = [a.read_value(), b.read_value()]
    session = initialized(config=tf1.ConfigProto(device_count={"CPU": 2}))
    weights.set_session(session)
    weights.set_flat([4, 5, 6])
    where = placements(session, reads)
    assert [where[v.handle.op.name] for v in (a, b)] == ["CPU:0", "CPU:1"]
    assert [value.tolist() for value in session.run(reads)] == [[4, 5], [6]]


@pytest.mark.parametrize(("path", "count"), [("bound", 1), ("ops", 0)], indirect=["path"])
def test_an_exported_graph_needs_the_op_library_unless_operations_are_chosen(
    path: Any, count: Any
) -> None:
    TensorFlowVariables(variable("v", 1))
    nodes = tf1.train.export_meta_graph().graph_def.node
    assert [node.op for node in nodes].count("FlatweightsBindVariable") == count


def test_a_session_with_a_target_is_served_by_operations(graph: Any) -> None:
    server = tf.distribute.Server.create_local_server()
    a, b = variable("a", [1, 2]), variable("b", [3])
    session = initialized(server.target)
    weights = TensorFlowVariables([a, b], session)
    assert set(weights.unbound) == {"a", "b"}
    assert operations_of(graph, "FlatweightsBindVariable") == []
    others = TensorFlowVariables([a, b], initialized())
    others.set_flat([7, 8, 9])
    others.set_session(session)  # beside another one, which has bound its variables
    for each in (weights, others):
        assert each.get_flat().tolist() == [1, 2, 3]
        each.set_flat([4, 5, 6])
        each.add_flat([1, 1, 1])
        assert [value.tolist() for value in session.run([a, b])] == [[5, 6], [7]]
        assert each.get_flat().tolist() == [5, 6, 7]
        session.run(tf1.global_variables_initializer())


def test_threads_share_a_session() -> None:
    sizes = [7, 1, 300]
    variables = [variable(f"v{i}", np.zeros(n)) for i, n in enumerate(sizes)]
    weights = TensorFlowVariables(variables, initialized())
    wrong: list[Any] = []
    start = threading.Barrier(4)

    def move(k: Any) -> None:
        try:
            start.wait(120)
            for _ in range(100):
                weights.set_flat(np.full(sum(sizes), k, np.float32))
                named = weights.get_weights()
                flat = weights.get_flat()
                whole = [*named.values(), *np.split(flat, np.cumsum(sizes)[:-1])]
                wrong.extend(x for x in whole if (x != x[0]).any() or x[0] not in range(4))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=move, args=(k,), daemon=True) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert wrong == []
    assert (weights.get_flat() == np.concatenate(weights.sess.run(variables))).all()
