"""Programs for Ray's `TensorFlowVariables`, with another import; thousands of calls."""

import gc
import os
import pickle
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import tensorflow as tf
from tf_forks import Forks
from tf_kinds import KINDS

from flatweights.tensorflow import TensorFlowVariables

tf1 = tf.compat.v1


def linear(w_name: Any = None, b_name: Any = None) -> Any:
    """The network of Ray's guide: one weight, one bias."""
    x, y = tf1.placeholder(tf.float32, [100]), tf1.placeholder(tf.float32, [100])
    w = tf1.Variable(tf1.random_uniform([1], -1.0, 1.0), name=w_name)
    b = tf1.Variable(tf1.zeros([1]), name=b_name)
    return tf.reduce_mean(tf.square(w * x + b - y)), x, y


class Network:
    """A network in a graph and a session of its own; variables before initialization."""

    def __init__(self, *, use_loss: Any = True, more: Any = False) -> None:
        with tf.Graph().as_default():
            extra = [tf1.Variable(1)] if more else None
            self.loss, self.x, self.y = linear()
            self.sess = tf1.Session()
            self.weights = TensorFlowVariables(
                self.loss if use_loss else None, self.sess, input_variables=extra
            )
            optimizer = tf1.train.GradientDescentOptimizer(0.5)
            self.gradients = optimizer.compute_gradients(self.loss)
            self.train = optimizer.apply_gradients(self.gradients)
            self.sess.run(tf1.global_variables_initializer())

    def feed(self) -> Any:
        x = np.linspace(0, 1, 100, dtype=np.float32)
        return {self.x: x, self.y: 2 * x + 1}


def test_the_example_of_the_documentation() -> None:
    workers = [Network() for _ in range(2)]
    start: Any = workers[0].weights.get_weights()
    before = workers[0].sess.run(workers[0].loss, workers[0].feed())
    for _ in range(12):
        results: list[Any] = []
        for worker in workers:
            worker.weights.set_weights(start)
            for _ in range(5):
                worker.sess.run(worker.train, worker.feed())
            results.append(worker.weights.get_weights())
        start = {k: sum(w[k] for w in results) / len(results) for k in results[0]}
    workers[0].weights.set_weights(start)
    after = workers[0].sess.run(workers[0].loss, workers[0].feed())
    assert after < before / 10


def test_gradients_are_averaged_and_fed() -> None:
    workers = [Network() for _ in range(2)]
    for _ in range(5):
        weights = workers[0].weights.get_weights()
        gradients = []
        for worker in workers:
            worker.weights.set_weights(weights)
            gradients.append(worker.sess.run([g for g, _ in worker.gradients], worker.feed()))
        mean = [sum(g) / len(g) for g in zip(*gradients, strict=True)]
        first = workers[0]
        loss = first.sess.run(first.loss, first.feed())
        feed = {g: m for (g, _), m in zip(first.gradients, mean, strict=True)}
        first.sess.run(first.train, {**first.feed(), **feed})
        assert first.sess.run(first.loss, first.feed()) < loss


def test_what_was_got_is_changed_in_place_and_set() -> None:
    with tf.Graph().as_default():
        sess = tf1.Session()
        loss, _, _ = linear()
        sess.run(tf1.global_variables_initializer())
        first = TensorFlowVariables(loss, sess)
        weights = first.get_weights()
        for name, _ in weights.items():
            weights[name] += 1.0
        assert weights != first.get_weights(), "not aliased"
        first.set_weights(weights)
        assert weights == first.get_weights()

        # Another network in the same graph does not get in the way.
        other_loss, _, _ = linear("w", "b")
        sess.run(tf1.global_variables_initializer())
        other = TensorFlowVariables(other_loss, sess)
        assert list(other.variables) == ["w", "b"]
        flat = other.get_flat() + 2.0
        other.set_flat(flat)
        np.testing.assert_array_equal(other.get_flat(), flat)
        assert other.get_flat_size() == 2

        third = TensorFlowVariables([other_loss], sess=tf1.Session())
        assert third.sess is not sess
        third.set_session(sess)
        assert third.sess is sess
        np.testing.assert_array_equal(third.get_flat(), flat)


@pytest.mark.parametrize(("use_loss", "count"), [(True, 3), (False, 1)])
def test_integers_among_input_variables_with_and_without_a_loss(use_loss: Any, count: Any) -> None:
    net = Network(use_loss=use_loss, more=True)
    assert len(net.weights.variables) == len(net.weights.placeholders) == count
    net.weights.set_weights(net.weights.get_weights())
    net.weights.set_flat(net.weights.get_flat())
    integers = [a for a in net.weights.get_weights().values() if a.dtype == np.int32]
    assert [a.tolist() for a in integers] == [1]


@pytest.mark.parametrize("output", [None, [], ()])
def test_no_output_but_variables(output: Any) -> None:
    with tf.Graph().as_default():
        w = tf1.get_variable("w", [2])
        sess = tf1.Session()
        sess.run(w.initializer)
        assert list(TensorFlowVariables(output, sess, [w]).variables) == ["w"]
    model = KINDS["keras_sequential"]().output
    weights = TensorFlowVariables(output, None, model.variables)
    assert weights.get_flat_size() == sum(np.prod(v.shape) for v in model.variables)
    weights.set_flat(np.arange(weights.get_flat_size()))
    np.testing.assert_array_equal(model.variables[1].numpy(), [12, 13, 14])


def test_networks_in_graphs_of_their_own_are_independent_and_exchange() -> None:
    one, two = Network(), Network()
    assert list(one.weights.variables) == list(two.weights.variables)
    ones, twos = one.weights.get_weights(), two.weights.get_weights()
    assert ones != twos
    one.weights.set_weights(twos)
    assert one.weights.get_weights() == twos
    assert two.weights.get_weights() == twos
    two.weights.set_weights(ones)
    assert two.weights.get_weights() == ones
    assert one.weights.get_weights() == twos


# ---- calls by the thousand ----


def rounds(weights: Any, count: int) -> None:
    flat, some = weights.get_flat(), next(iter(weights.variables))
    for _ in range(count):
        weights.get_flat(flat)
        weights.set_flat(weights.get_flat())
        got = weights.get_weights()
        weights.set_weights(got)
        weights.set_weights({some: got[some]})
        weights.add_flat(flat, 0.0)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def check_no_growth(weights: Any) -> None:
    """Check that neither memory nor Python's objects grow with the number of calls."""
    rounds(weights, 30)
    memory, objects = [], []
    # A leak grows each time; the rest of the process may change once. Between two measurements are
    # 360 calls that move 800 kB each: one vector lost in a hundred calls would be 3 MB.
    for k in range(4):
        gc.collect()
        memory.append(resident_bytes())
        objects.append(len(gc.get_objects()))
        if k and min(np.diff(memory)) < 1.5e6 and min(np.diff(objects)) < 100:
            return
        rounds(weights, 60)
    raise AssertionError(f"bytes {memory}, objects {objects}")


def test_thousands_of_calls_add_nothing_to_eager_tensorflow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = TensorFlowVariables(
        [tf.Variable(np.zeros(n, np.float32)) for n in (100_000, 3, 100_000)]
    )
    rounds(weights, 1)
    graphs: list[int] = []
    original = tf.Graph.__init__

    def counted(self: Any, *args: Any) -> None:
        graphs.append(1)
        original(self, *args)

    monkeypatch.setattr(tf.Graph, "__init__", counted)
    check_no_growth(weights)
    assert not graphs, "every tf.function was traced before"


@pytest.mark.parametrize("use_resource", [pytest.param(True, marks=pytest.mark.slow), False])
def test_thousands_of_calls_add_nothing_to_a_graph(use_resource: Any) -> None:
    with tf.Graph().as_default() as graph:
        for n in (100_000, 3, 100_000):
            tf1.get_variable(
                f"w{len(graph.get_operations())}",
                initializer=np.zeros(n, np.float32),
                use_resource=use_resource,
            )
        session = tf1.Session()
        session.run(tf1.global_variables_initializer())
        weights = TensorFlowVariables(tf1.global_variables(), session)
        graph.finalize()
        count, version = len(graph.get_operations()), graph.version
        check_no_growth(weights)
        assert (len(graph.get_operations()), graph.version) == (count, version)


# ---- messages ----


@pytest.mark.parametrize("dumps", [pickle.dumps, cloudpickle.dumps])
def test_what_holds_the_variables_is_not_sent_either(dumps: Any) -> None:
    weights = TensorFlowVariables(tf.Variable(1.0, name="w"))
    with pytest.raises(TypeError, match="Build the model inside the actor, and send get_weights"):
        dumps({"model": weights})
    with pytest.raises(TypeError, match="Build the model inside the actor"):
        cloudpickle.dumps(lambda: weights.get_flat())
    for sent in (weights.get_weights(), weights.get_flat(), weights.layout):
        again = pickle.loads(dumps(sent))
        assert type(again) is type(sent)
    assert pickle.loads(dumps(weights.get_weights())) == weights.get_weights()


SENDER = """
import sys
import cloudpickle
import keras
from flatweights import FlatWeights
from flatweights.tensorflow import TensorFlowVariables


class Net(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, x):
        return self.dense(x)


class Named(FlatWeights):
    pass


class Actor:
    def __init__(self):
        self.model = Net()
        self.model(keras.ops.zeros((1, 3)))
        self.weights = TensorFlowVariables(self.model)

    def set_and_get(self, weights):
        self.weights.set_weights(weights, strict=True)
        return self.weights.get_weights()


def take(weights):
    return Actor().set_and_get(weights)


weights = Actor().weights.get_weights()
with open(sys.argv[1], "wb") as file:
    cloudpickle.dump((Actor, take, weights, weights.layout, Named(weights)), file)
"""

RECEIVER = """
import pickle
import sys
from flatweights import FlatWeights

with open(sys.argv[1], "rb") as file:
    Actor, take, weights, layout, named = pickle.load(file)
assert type(weights) is FlatWeights and weights.layout == layout
for same in (take(weights), Actor().set_and_get(named), named):
    assert same.layout == layout and same.buffer.tobytes() == weights.buffer.tobytes()
assert type(named).__name__ == "Named"
print("received")
"""


@pytest.mark.slow  # actors of Ray receive the same, and models of many kinds arrive elsewhere
@pytest.mark.parametrize("path", ["bound"], indirect=True)
def test_classes_functions_and_weights_of_main_arrive_in_another_process(
    tmp_path: Path, forks: Forks
) -> None:
    out = ""
    for program in (SENDER, RECEIVER):
        done = forks.run(program, tmp_path / "sent")
        assert done.returncode == 0, done.stderr[-3000:]
        out = done.stdout
    assert "received" in out
