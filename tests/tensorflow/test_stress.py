"""Threads that gather, scatter and train the same variables at once.

Every write fills each variable with one constant, so two values in one variable are a torn
read or a torn write.
"""

import faulthandler
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tf_models import only_bound

import flatweights as fw
from flatweights import FlatWeights
from flatweights.tensorflow import TensorFlowVariables

DEADLINE = 60.0  # more seconds to end; later, they wait for each other

SHAPES = {
    "one": (),
    "few": (3,),
    "odd": (17, 59),
    "page": (64, 256),
    "wide": (300_000,),
    "accumulator": (300_000,),
    "table": (2_000, 50),
}


class Crew:
    """Threads that each repeat one function, until the time is up or one fails."""

    def __init__(self, seconds: float) -> None:
        self.rounds: dict[str, int] = {}
        self._seconds = seconds
        self._stop = threading.Event()
        self._errors: list[tuple[str, BaseException]] = []
        self._threads: list[threading.Thread] = []

    def add(self, name: str, work: Callable[[], object]) -> None:
        """Let a thread call ``work``."""
        self.rounds[name] = 0

        def run() -> None:
            try:
                while not self._stop.is_set():
                    work()
                    self.rounds[name] += 1
            except BaseException as error:
                self._errors.append((name, error))
                self._stop.set()

        # Daemons: a hanging thread does not block the report.
        self._threads.append(threading.Thread(target=run, name=name, daemon=True))

    def run(self, part: float = 1.0) -> None:
        """Let them run for ``part`` of the time, and longer until each has done a round.

        Raises the first error of a thread, and fails if a thread never ends or never does a round.
        """
        for thread in self._threads:
            thread.start()
        self._stop.wait(self._seconds * part)
        end = time.monotonic() + DEADLINE
        while not all(self.rounds.values()) and time.monotonic() < end:
            if self._stop.wait(0.05):
                break
        self._stop.set()
        end = time.monotonic() + DEADLINE
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        hanging = [thread.name for thread in self._threads if thread.is_alive()]
        if hanging:
            faulthandler.dump_traceback(sys.__stderr__, all_threads=True)  # type: ignore[arg-type]
            pytest.fail(f"threads that hang: {hanging}; rounds: {self.rounds}")
        for name, error in self._errors:
            raise AssertionError(f"{name}: {error}; rounds: {self.rounds}") from error
        assert all(self.rounds.values()), self.rounds


@pytest.fixture(params=[0.3, pytest.param(8.0, marks=pytest.mark.slow)], ids=["short", "long"])
def crew(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Threads for some seconds, that copy with threads of their own."""
    before = fw.get_num_threads()
    interval = sys.getswitchinterval()
    fw.set_num_threads(2)
    sys.setswitchinterval(1e-4)
    yield Crew(request.param)
    sys.setswitchinterval(interval)
    fw.set_num_threads(before)


@pytest.fixture
def variables() -> Any:
    """Variables from one element to copies that take a while, one of them copied when read."""
    made = {name: tf.Variable(tf.zeros(shape), name=name) for name, shape in SHAPES.items()}
    tf.gather(made["table"], [0])  # from now on it is written in place
    return made


def weights_of(variables: Any) -> Any:
    return TensorFlowVariables(list(variables.values()))


def constants() -> Any:
    """Small integers: sums and halves of them are exact in any order."""
    return map(float, itertools.cycle(range(1, 1000)))


def check_one_value(name: Any, values: Any) -> None:
    values = np.asarray(values).reshape(-1)
    if not (values == values[0]).all():
        places = np.flatnonzero(values != values[0])
        raise AssertionError(
            f"{name} is torn: {values[0]} and, from {places[0]} to {places[-1]}, {places.size} "
            f"others such as {values[places[0]]}"
        )


def check_parts(parts: Any) -> None:
    for name, part in parts.items():
        check_one_value(name, part)


def all_rows(shape: Any, value: Any) -> Any:
    return tf.IndexedSlices(tf.fill(shape, value), tf.range(shape[0]))


def frozen(array: Any) -> Any:
    array.setflags(write=False)
    return array


def add_gathers(crew: Any, weights: Any, check: Any) -> None:
    """Threads that read all variables, each in another way."""
    layout = weights.layout
    out = np.empty(layout.size, np.float32)
    crew.add("get_flat", lambda: check(fw.unflatten(weights.get_flat(), layout)))
    crew.add("get_flat(out)", lambda: check(fw.unflatten(weights.get_flat(out), layout)))
    crew.add(
        "get_flat(dtype)", lambda: check(fw.unflatten(weights.get_flat(dtype=np.float64), layout))
    )
    crew.add("get_weights", lambda: check(weights.get_weights()))


def add_scatters(crew: Any, weights: Any) -> None:
    """Threads that write all variables, each in another way."""
    size, layout = weights.layout.size, weights.layout
    numbers = constants()  # all threads draw from it, so no two of them write the same number

    def vector(dtype: Any = np.float32) -> Any:
        return np.full(size, next(numbers), dtype)

    def packed() -> Any:
        made, value = FlatWeights.empty(layout), next(numbers)
        for part in made.values():
            part[...] = value
        return made

    def share_packed() -> None:
        buffer = frozen(packed().buffer)
        weights.set_weights(FlatWeights.wrap(buffer, layout), share=True)

    crew.add("set_flat", lambda: weights.set_flat(vector()))
    crew.add("set_flat, converted", lambda: weights.set_flat(vector(np.float64)))
    crew.add("set_flat, shared", lambda: weights.set_flat(frozen(vector()), share=True))
    crew.add("set_weights", lambda: weights.set_weights(packed()))
    crew.add("set_weights, shared", share_packed)
    crew.add("add_flat", lambda: weights.add_flat(np.ones(size, np.float32), 2.0))
    crew.add("lerp_flat", lambda: weights.lerp_flat(vector(), 0.5))


def test_no_variable_is_torn(crew: Any, variables: Any, path: Any) -> None:
    weights = weights_of(variables)
    # TensorFlow itself tears the table: its sparse updates, and its reads beside them, share a
    # lock. Bound reads do not tear it.
    dense = {name: v for name, v in variables.items() if name != "table"}
    sgd = keras.optimizers.SGD(1.0)
    sgd.build(list(dense.values()))
    gradients = [tf.ones(v.shape) for v in dense.values()]
    sparse, assigned = constants(), constants()

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def add_one() -> None:
        for v in variables.values():
            v.assign_add(tf.ones_like(v))

    @tf.function(autograph=False, jit_compile=True)  # type: ignore[untyped-decorator]
    def compiled() -> None:
        for v in dense.values():
            v.assign(v + 2)

    def assign() -> None:
        value = next(assigned)
        for name, v in dense.items():
            v.assign(tf.fill(SHAPES[name], value))

    def scatter() -> None:
        table = variables["table"]
        table.scatter_update(all_rows(SHAPES["table"], next(sparse)))  # a lock that others share
        indices = tf.range(SHAPES["table"][0])[:, None]
        table.scatter_nd_update(indices, tf.fill(SHAPES["table"], next(sparse)))  # one of its own

    def momentum() -> None:
        tf.raw_ops.ResourceApplyMomentum(
            var=dense["wide"].handle,
            accum=dense["accumulator"].handle,
            lr=1.0,
            grad=tf.ones(SHAPES["wide"]),
            momentum=0.0,
            use_locking=True,
        )

    def read() -> None:
        check_parts({name: v.numpy() for name, v in dense.items()})

    add_one()
    compiled()
    if path == "bound":
        assert weights.unbound == {}
        crew.add("sparse updates", scatter)
    add_gathers(crew, weights, check_parts)
    add_scatters(crew, weights)
    crew.add("assign", assign)
    crew.add("function", add_one)
    crew.add("XLA", compiled)
    crew.add("momentum", momentum)
    crew.add("optimizer", lambda: sgd.apply(gradients, list(dense.values())))
    crew.add("read", read)
    crew.run()
    check_parts(weights.get_weights())


@only_bound
def test_a_gather_sees_all_of_a_scatter_or_nothing(crew: Any, variables: Any, path: Any) -> None:
    weights = weights_of(variables)
    assert weights.unbound == {}

    def check(parts: Any) -> None:
        check_parts(parts)
        check_one_value("the model", [np.asarray(part).flat[0] for part in parts.values()])

    add_gathers(crew, weights, check)
    add_scatters(crew, weights)
    crew.run()
    check(weights.get_weights())


@only_bound
def test_sparse_updates_do_not_tear_what_is_gathered(crew: Any, path: Any) -> None:
    # TensorFlow updates the rows in place, holding a lock that readers share.
    shape = (30_000, 10)
    table = tf.Variable(tf.zeros(shape))
    tf.gather(table, [0])
    weights = TensorFlowVariables(table)
    numbers = constants()
    crew.add("get_flat", lambda: check_one_value("table", weights.get_flat()))
    crew.add("get_weights", lambda: check_parts(weights.get_weights()))
    crew.add("scatter", lambda: table.scatter_update(all_rows(shape, next(numbers))))
    crew.run()


@only_bound
def test_models_that_name_variables_in_another_order_do_not_wait_for_each_other(path: Any) -> None:
    # Many small variables: nearly all of the time goes into taking locks, and each call takes all.
    variables = [tf.Variable(float(i)) for i in range(200)]
    models = [TensorFlowVariables(variables), TensorFlowVariables(variables[::-1])]
    crew = Crew(0.3)
    for model in models:
        assert model.unbound == {}
        flat = model.get_flat()
        crew.add(f"set_flat {id(model)}", lambda model=model, flat=flat: model.set_flat(flat))  # type: ignore[misc]
    crew.run()


def test_models_come_and_go_beside_others(crew: Any, variables: Any, path: Any) -> None:
    weights = weights_of(variables)
    numbers, own = constants(), constants()
    size = weights.layout.size

    def bind_again() -> None:
        again = weights_of(variables)
        check_parts(again.get_weights())
        again.set_flat(np.full(size, next(numbers), np.float32))

    def variables_of_its_own() -> None:
        value = next(own)
        mine = [tf.Variable(tf.zeros(40_000)) for _ in range(3)]
        model = TensorFlowVariables(mine)
        model.set_flat(frozen(np.full(120_000, value, np.float32)), share=True)
        mine[0].assign_add(tf.ones(40_000))
        assert [v.numpy()[-1] for v in mine] == [value + 1, value, value]

    crew.add("bind again", bind_again)
    crew.add("bind again, too", bind_again)
    crew.add("variables of its own", variables_of_its_own)
    crew.add("get_weights", lambda: check_parts(weights.get_weights()))
    crew.add("set_flat", lambda: weights.set_flat(np.full(size, 7, np.float32)))
    crew.run(part=0.5)
    check_parts(weights.get_weights())
