"""`FlatWorker` actors, eager and in graph mode.

TensorFlow starts in two processes for the whole file. The programs of `test_examples.py` run
workers that are defined in ``__main__``.
"""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray
from numpy.typing import NDArray
from reference import run_python, same_bits

import flatweights as fw
from flatweights import FlatWeights
from flatweights.ray import FlatWorker, WorkerError, average

pytestmark = pytest.mark.ray

KERNEL = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], np.float32)
BIAS = np.array([7.0, 8.0], np.float32)
FLAT = np.arange(1, 9, dtype=np.float32)
ANOTHER = np.linspace(-1, 1, 8, dtype=np.float32)

NAMES = {"eager": ["dense/kernel", "dense/bias"], "graph": ["kernel", "bias"]}


@ray.remote
class EagerWorker(FlatWorker):
    """A Keras model; `build` returns it."""

    def build(self, kernel: NDArray[Any], *, bias: NDArray[Any]) -> Any:
        import keras

        self.model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        for variable, value in zip(self.model.variables, (kernel, bias), strict=True):
            variable.assign(value)
        return self.model

    def predict(self, x: NDArray[Any]) -> NDArray[Any]:
        return np.array(self.model(x))

    def describe(self) -> tuple[str, list[str]]:
        return type(self.variables).__name__, list(self.variables.variables)


@ray.remote
class GraphWorker(FlatWorker):
    """A TF1 graph; `build` returns variables with their session."""

    def build(self, kernel: NDArray[Any], *, bias: NDArray[Any]) -> Any:
        import tensorflow.compat.v1 as tf

        from flatweights.tensorflow import TensorFlowVariables

        with tf.Graph().as_default():
            self.x = tf.placeholder(tf.float32, [None, 3])
            self.y = self.x @ tf.get_variable("kernel", initializer=kernel)
            self.y += tf.get_variable("bias", initializer=bias)
            self.session = tf.Session()
            self.session.run(tf.global_variables_initializer())
            return TensorFlowVariables(self.y, self.session)

    def predict(self, x: NDArray[Any]) -> NDArray[Any]:
        return np.array(self.session.run(self.y, {self.x: x}))

    def describe(self) -> tuple[str, list[str]]:
        return type(self.variables).__name__, list(self.variables.variables)


@pytest.fixture(scope="module")
def actors() -> dict[str, Any]:
    """One worker per mode, which start at the same time."""
    classes = {"eager": EagerWorker, "graph": GraphWorker}
    return {mode: cls.remote(KERNEL, bias=BIAS) for mode, cls in classes.items()}  # type: ignore[attr-defined]


@pytest.fixture(params=NAMES)
def mode(request: pytest.FixtureRequest) -> str:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def worker(actors: dict[str, Any], mode: str) -> Iterator[Any]:
    """A worker, whose weights are reset after the test."""
    yield actors[mode]
    ray.get(actors[mode].set_flat.remote(FLAT))


def test_build_takes_the_arguments_of_the_actor(worker: Any, mode: str) -> None:
    assert ray.get(worker.describe.remote()) == ("TensorFlowVariables", NAMES[mode])
    x = np.eye(3, dtype=np.float32)
    np.testing.assert_allclose(ray.get(worker.predict.remote(x)), KERNEL + BIAS, rtol=1e-6)


BUILD = """
import sys
from flatweights.ray import FlatWorker

class Worker(FlatWorker):
    def build(self):
        print("tensorflow" in sys.modules)
        sys.exit()

Worker()
"""


def test_build_may_set_what_tensorflow_reads_when_imported() -> None:
    assert run_python(BUILD) == "False\n"


def test_weights_leave_by_name_and_as_a_vector(worker: Any, mode: str) -> None:
    weights = ray.get(worker.get_weights.remote())
    assert type(weights) is FlatWeights
    assert list(weights) == NAMES[mode]
    assert same_bits(ray.get(worker.get_flat.remote()), FLAT)
    ray.get(worker.set_flat.remote(ANOTHER))
    for got, expected in zip(weights.values(), (KERNEL, BIAS), strict=True):
        assert same_bits(got, expected), "it does not follow the model"


@pytest.mark.parametrize("share", [False, True], ids=["copied", "shared"])
@pytest.mark.parametrize("send", [lambda value: value, ray.put], ids=["value", "ref"])
def test_the_model_is_set_by_name_and_by_a_vector(
    worker: Any, mode: str, send: Any, share: bool
) -> None:
    def flat() -> Any:
        return ray.get(worker.get_flat.remote())

    assert ray.get(worker.set_flat.remote(send(ANOTHER), share=share)) is None
    assert same_bits(flat(), ANOTHER)
    expected = ANOTHER[:6].reshape(3, 2) + ANOTHER[6:]
    got = ray.get(worker.predict.remote(np.eye(3, dtype=np.float32)))
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    kernel, bias = NAMES[mode]
    weights = FlatWeights({kernel: -KERNEL, bias: -BIAS})
    assert ray.get(worker.set_weights.remote(send(weights), share=share)) is None
    assert same_bits(flat(), -FLAT)
    assert ray.get(worker.set_weights.remote(send({bias: BIAS}), share=share)) is None
    assert same_bits(flat(), np.concatenate([-FLAT[:6], BIAS]))
    ray.get(worker.set_flat.remote(send(weights), share=share))
    assert same_bits(flat(), -FLAT)


def test_a_round_averages_and_broadcasts(actors: dict[str, Any]) -> None:
    workers = list(actors.values())
    ray.get(workers[1].set_flat.remote(ANOTHER))
    mean = average([w.get_flat.remote() for w in workers], [3, 1])
    assert same_bits(mean.weights, fw.average([FLAT, ANOTHER], [3, 1]))
    ray.get([w.set_flat.remote(mean.ref) for w in workers])
    for w in workers:
        assert same_bits(ray.get(w.get_flat.remote()), mean.weights)
    ray.get([w.set_flat.remote(FLAT) for w in workers])


def test_weights_of_one_mode_set_the_other_by_position(actors: dict[str, Any]) -> None:
    weights = ray.get(actors["eager"].get_weights.remote()).copy()
    weights["dense/bias"] = [9, 10]
    ray.get(actors["graph"].set_weights.remote(weights))
    assert ray.get(actors["graph"].get_flat.remote()).tolist() == [*range(1, 7), 9, 10]
    ray.get(actors["graph"].set_flat.remote(FLAT))


def test_a_wrong_vector_is_refused_by_rank_and_changes_nothing(worker: Any) -> None:
    with pytest.raises(ValueError, match=r"expected shape \(8,\), got \(7,\)"):
        ray.get(worker.set_flat.remote(FLAT[:7]))
    assert same_bits(ray.get(worker.get_flat.remote()), FLAT)


@ray.remote
class UnbuiltWorker(FlatWorker):
    """Forgets `build`."""


@ray.remote
class EmptyHandedWorker(FlatWorker):
    """Forgets to return its model."""

    def build(self) -> None:
        pass


@ray.remote
class OwnConstructorWorker(FlatWorker):
    """Forgets the constructor of its base."""

    def __init__(self) -> None:
        self.rounds = 0


def test_a_worker_whose_constructor_does_not_call_that_of_its_base_says_so() -> None:
    worker: Any = OwnConstructorWorker.remote()  # type: ignore[attr-defined]
    missing = r"OwnConstructorWorker has no variables: its __init__ must call super\(\)\.__init__"
    for method in (worker.get_weights, worker.get_flat):
        with pytest.raises(AttributeError, match=missing):
            ray.get(method.remote())


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (UnbuiltWorker, r"NotImplementedError: UnbuiltWorker must define build\(\)"),
        pytest.param(
            EmptyHandedWorker,
            r"TypeError: EmptyHandedWorker\.build\(\) returned None",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["no build", "no model"],
)
def test_a_worker_without_a_model_says_so(cls: Any, message: str) -> None:
    for _ in range(3):  # Ray may see the end of the process before it reads the reason
        with pytest.raises(ray.exceptions.ActorDiedError) as caught:
            ray.get(cls.remote().get_flat.remote())
        if "worker process has died" not in str(caught.value):
            break
    first, *traceback = str(WorkerError({3: caught.value})).splitlines()
    assert re.match(f"rank 3: ActorDiedError: its constructor raised {message}", first)
    assert any("_worker.py" in line for line in traceback)
    assert all(line.strip(" ^~\x1b") and "\x1b" not in line for line in traceback)
