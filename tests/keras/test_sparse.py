"""Gradients of tables, of which only the rows that batches take travel."""

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_programs import prepare
from process_groups import LocalProcessGroup, kill

from flatweights import robust
from flatweights.keras import average_gradients
from flatweights.keras._gradients import averaging_of_optimizer
from flatweights.keras._sparse import _room_for
from flatweights.ray import Member, Round

ROWS, WIDTH = 300, 5
STEPS = 24
LIMIT = 300.0  # seconds after which a test counts as hung

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "SGD": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "Adam": lambda: keras.optimizers.Adam(0.01, amsgrad=True),
    "AdamW": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, use_ema=True),
    "Ftrl": lambda: keras.optimizers.Ftrl(0.1),
    "Nadam": lambda: keras.optimizers.Nadam(0.01),
    "Adadelta": lambda: keras.optimizers.Adadelta(1.0),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.01),
    "AdamW, clipped": lambda: keras.optimizers.AdamW(
        0.01, weight_decay=0.1, use_ema=True, global_clipnorm=0.1
    ),
    "clipped": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1),
    "clipped each": lambda: keras.optimizers.SGD(0.1, clipnorm=0.1),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), 4.0),
    "scaled by a factor": lambda: keras.optimizers.SGD(0.1, loss_scale_factor=4.0),
    "accumulated inside": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), 4.0
    ),
}


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    prepare()
    made = ThreadPoolExecutor(4)
    yield made
    made.shutdown(wait=False)


class KilledError(Exception):
    """A member has ended, in the middle of its training."""


def batch(rank: int, step: int) -> tuple[Any, Any]:
    """Numbers of rows, some of them twice, of which there are most in the middle; and factors."""
    rng = np.random.default_rng([rank, step])
    count = int(rng.integers(1, 8 + 9 * min(step, STEPS - step)))
    return rng.integers(0, ROWS // (1 + rank), count, np.int32), rng.normal(size=count)


class Training:
    """A table and a vector, whose product is trained.

    Attributes:
        variables: Both.
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: Any, compiled: bool = True) -> None:
        rng = np.random.default_rng(1)
        shapes = (ROWS, WIDTH), (WIDTH,)
        values = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
        self.variables = [keras.Variable(one, name=f"v{k}") for k, one in enumerate(values)]
        self.optimizer = optimizer
        optimizer.build(self.variables)
        numbers, factors = tf.TensorSpec([None], tf.int32), tf.TensorSpec([None], tf.float32)
        signature = [numbers, factors]
        # AutoGraph, which converts the optimizer for seconds, is in test_average_gradients.
        function = tf.function(self._go, input_signature=signature, autograph=False)
        self._step = function if compiled else self._go

    def step(self, numbers: Any, factors: Any) -> None:
        self._step(tf.constant(numbers), tf.constant(factors, tf.float32))

    def _go(self, numbers: Any, factors: Any) -> None:
        table, vector = (one.value for one in self.variables)
        with tf.GradientTape() as tape:
            product = tf.reduce_sum(tf.gather(table, numbers) * vector, -1)
            loss = self.optimizer.scale_loss(tf.reduce_sum(tf.tanh(product) * factors))
        gradients = tape.gradient(loss, [table, vector])
        assert isinstance(gradients[0], tf.IndexedSlices)
        self.optimizer.apply(gradients, self.variables)

    @property
    def state(self) -> list[Any]:
        return [np.asarray(one) for one in [*self.variables, *self.optimizer.variables]]


def train(member: Member, name: str, sparse: Any, compiled: bool, **options: Any) -> Any:
    optimizer = average_gradients(OPTIMIZERS[name](), member=member, sparse=sparse, **options)
    training = Training(optimizer, compiled)
    for step in range(0, STEPS, 1 if compiled else 3):
        training.step(*batch(member.rank, step))
    return training.state


def in_all(pool: ThreadPoolExecutor, size: int, function: Any, *args: Any, **options: Any) -> Any:
    members = LocalProcessGroup(size).join_all()
    try:
        calls = [pool.submit(function, member, *args, **options) for member in members]
        return [call.result(LIMIT) for call in calls]
    finally:
        for member in members:
            member.leave()


def check_alike(states: list[list[Any]]) -> None:
    for k, parts in enumerate(zip(*states, strict=True)):
        for other in parts[1:]:
            np.testing.assert_array_equal(parts[0], other, err_msg=f"part {k}")


@pytest.mark.parametrize(
    ("name", "size", "compiled"),
    [
        pytest.param("Adam", 3, True, marks=pytest.mark.slow),
        pytest.param("momentum", 2, False, marks=pytest.mark.slow),
        ("accumulated inside", 2, False),
        *(
            pytest.param(name, 2, True, marks=[] if name == "AdamW, clipped" else pytest.mark.slow)
            for name in OPTIMIZERS
        ),
    ],
)
def test_weights_are_those_of_the_dense_exchange(
    name: str, size: int, compiled: bool, pool: ThreadPoolExecutor
) -> None:
    dense = in_all(pool, size, train, name, False, compiled)
    rows = in_all(pool, size, train, name, True, compiled)
    check_alike(rows)
    for k, (own, other) in enumerate(zip(rows[0], dense[0], strict=True)):
        near = 1e-6 if k < 2 else 1e-5  # slots add up squares in another order
        np.testing.assert_allclose(own, other, near, near * max(1.0, np.abs(other).max()))


@pytest.mark.parametrize("compiled", [True, False])
def test_reading_a_table_after_a_step_copies_nothing(
    compiled: bool, pool: ThreadPoolExecutor
) -> None:
    def steps(member: Member) -> None:
        optimizer = average_gradients(keras.optimizers.SGD(0.1), member=member, sparse=True)
        training = Training(optimizer, compiled)
        table = training.variables[0].value
        for step in range(3):
            held = table.read_value()
            before = held.numpy().copy()
            training.step(*batch(member.rank, step))
            np.testing.assert_array_equal(held, before)  # what was read keeps its value
            del held
            reads = [np.asarray(memoryview(table.read_value())) for _ in range(2)]
            assert reads[0].ctypes.data == reads[1].ctypes.data
            assert not np.array_equal(reads[0], before)

    in_all(pool, 2, steps)


def test_rows_are_the_means_of_the_members_sums(pool: ThreadPoolExecutor) -> None:
    def steps(member: Member) -> Any:
        optimizer = average_gradients(keras.optimizers.SGD(1.0), member=member, sparse=True)
        table = keras.Variable(np.zeros((ROWS, WIDTH), np.float32))
        optimizer.build([table])
        for k in range(8):
            numbers, factors = batch(member.rank, 3 * k)
            rows = np.outer(factors, np.arange(1, WIDTH + 1)).astype(np.float32)
            optimizer.apply([tf.IndexedSlices(rows, numbers, (ROWS, WIDTH))], [table])
        return table.numpy()

    expected = np.zeros((ROWS, WIDTH))
    for k in range(8):
        for rank in range(3):
            numbers, factors = batch(rank, 3 * k)
            np.subtract.at(expected, numbers, np.outer(factors, np.arange(1, WIDTH + 1)) / 3)
    for table in in_all(pool, 3, steps):
        np.testing.assert_allclose(table, expected, 1e-5, 1e-5)


def test_a_layer_in_fit_equals_one_process(pool: ThreadPoolExecutor) -> None:
    rng = np.random.default_rng(2)
    x, y = rng.integers(0, 40, (48, 3)), rng.normal(size=(48, 1)).astype(np.float32)

    def fit(member: Member | None) -> Any:
        table = keras.layers.Embedding(40, 4, embeddings_initializer="ones")
        layers = [table, keras.layers.Flatten(), keras.layers.Dense(1, kernel_initializer="ones")]
        model = keras.Sequential([keras.Input((3,), dtype="int32"), *layers])
        optimizer = keras.optimizers.SGD(0.05, momentum=0.5)
        part = (x, y)
        if member is not None:
            average_gradients(optimizer, member=member, sparse=True)
            part = x[member.rank :: 2], y[member.rank :: 2]
        # The process by itself has too few steps for a trace.
        model.compile(optimizer, "mse", steps_per_execution=2, run_eagerly=member is None)
        data = tf.data.Dataset.from_tensor_slices(part).batch(12 if member is None else 6)
        model.fit(data, shuffle=False, verbose=0)
        return model.get_weights()

    members = in_all(pool, 2, fit)
    check_alike(members)
    for own, oracle in zip(members[0], fit(None), strict=True):
        np.testing.assert_allclose(own, oracle, 1e-5, 1e-6)


def test_a_member_with_nan_is_left_out_with_its_rows(pool: ThreadPoolExecutor) -> None:
    def steps(member: Member) -> Any:
        optimizer = keras.optimizers.SGD(1.0)
        average_gradients(optimizer, member=member, sparse=True, nonfinite="skip")
        table = keras.Variable(np.zeros((8, 1), np.float32))
        optimizer.build([table])
        rows = np.array([[1.0], [np.nan if member.rank else 2.0]], np.float32)
        optimizer.apply([tf.IndexedSlices(rows, [member.rank, 7], (8, 1))], [table])
        return table.numpy().ravel().tolist()

    assert in_all(pool, 2, steps) == [[-1.0, *[0.0] * 6, -2.0]] * 2


def test_a_replaced_member_is_healed_in_a_loop_of_ones_own(pool: ThreadPoolExecutor) -> None:
    group = LocalProcessGroup(2)
    members = group.join_all()

    def go(member: Member, dies_at: int = -1) -> Any:
        optimizer = average_gradients(
            keras.optimizers.Adam(0.01),
            member=member,
            min_results=1,
            timeout=60.0,
            sparse=True,
        )
        training = Training(optimizer)
        while int(optimizer.iterations) < STEPS:
            done = int(optimizer.iterations)
            if done == dies_at:
                kill(member)
                raise KilledError
            if done == 12 and dies_at < 0:
                group.wait_until(lambda inside: inside.calls.waiting.out_of_sync or inside.heals)
            training.step(*batch(member.rank, done))
        member.average({"the end": np.zeros(1)}, min_results=1)
        return training.state

    survivor = pool.submit(go, members[0])
    with pytest.raises(KilledError):
        go(members[1], dies_at=5)
    new = go(group.join(1))
    check_alike([new, survivor.result(LIMIT)])


def test_a_member_that_was_late_for_the_numbers_does_not_count(pool: ThreadPoolExecutor) -> None:
    """Rank 1 sleeps until rank 0 has gone on to the values, and then comes in time for these."""
    group = LocalProcessGroup(2)
    members = group.join_all()

    def go(member: Member) -> Any:
        optimizer = keras.optimizers.SGD(1.0)
        average_gradients(optimizer, member=member, sparse=True, min_results=1, timeout=60.0)
        averaging = averaging_of_optimizer(optimizer)
        assert averaging is not None
        table = keras.Variable(np.zeros((8, 1), np.float32))
        optimizer.build([table])

        def step() -> None:
            rows = np.array([[1.0], [3.0]], np.float32)
            optimizer.apply([tf.IndexedSlices(rows, [member.rank, 7], (8, 1))], [table])

        step()
        if member.rank == 0:
            gather = member.all_gather

            def not_wait(*args: Any, **options: Any) -> Round:
                result = gather(*args, **options | {"timeout": 0.05})
                peers = group.group.rendezvous.peers
                group.wait_until(lambda inside: peers.newest[1].has == result.number)
                return result

            vars(member)["all_gather"] = not_wait
            step()
            del vars(member)["all_gather"]
        else:
            number = group.group.rendezvous.peers.newest[1].has  # of the first step
            group.wait_until(lambda inside: inside.calls.number > number)
            step()
        step()
        return table.numpy().ravel().tolist()

    calls = [pool.submit(go, member) for member in members]
    first, late = (call.result(LIMIT) for call in calls)
    assert first == late
    # Of the second step, only rank 0 counts; of the others, both.
    assert first == [-2.0, -1.0, *[0.0] * 5, -9.0]
    for member in members:
        member.leave()


def test_other_rows_than_those_agreed_on_are_an_error(pool: ThreadPoolExecutor) -> None:
    def go(member: Member) -> None:
        optimizer = average_gradients(keras.optimizers.SGD(), member=member, sparse=True)
        table = keras.Variable(np.zeros((99, 1), np.float32))
        optimizer.build([table])
        averaging = averaging_of_optimizer(optimizer)
        assert averaging is not None
        exchange = averaging.step._exchange

        def of_another_step(make: Any, grads: Any) -> None:
            tables = make.func.__self__
            tables._unions = [tables._unions[0] + member.rank]
            exchange(make, grads)

        vars(averaging.step)["_exchange"] = of_another_step
        rows = tf.IndexedSlices(np.ones((1, 1), np.float32), [3], (99, 1))
        with pytest.raises(RuntimeError, match="expected the same rows of all members"):
            optimizer.apply([rows], [table])

    in_all(pool, 2, go)


def test_auto_decides_by_bytes_and_nodes(
    pool: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    def rows_travel(rows: int, *, is_far: bool, **options: Any) -> bool:
        def go(member: Member) -> bool:
            optimizer = average_gradients(keras.optimizers.SGD(), member=member, **options)
            table = keras.Variable(np.zeros((rows, 64), np.float32), name="words")
            optimizer.build([table])
            averaging = averaging_of_optimizer(optimizer)
            assert averaging is not None
            averaging._exchanges.is_far |= is_far
            caplog.clear()
            one = tf.IndexedSlices(np.ones((1, 64), np.float32), [3], (rows, 64))
            optimizer.apply([one], [table])
            assert table.numpy()[3, 0] != 0
            return "of the gradient of words" in caplog.text

        (travels,) = in_all(pool, 1, go)
        return bool(travels)

    caplog.set_level(logging.INFO, "flatweights")
    mib = 1 << 12  # rows
    assert [rows_travel(n * mib, is_far=False) for n in (3, 4)] == [False, True]
    assert [rows_travel(n * mib // 2, is_far=True) for n in (1, 2)] == [False, True]
    assert rows_travel(64, is_far=False, sparse=True)
    assert not rows_travel(4 * mib, is_far=True, sparse=False)
    assert not rows_travel(4 * mib, is_far=True, rule=robust.Median())


@pytest.mark.parametrize(("rows", "got"), [([3, -1], "-1 to 3"), ([8, 0], "0 to 8")])
def test_rows_out_of_range_are_named(rows: list[int], got: str, pool: ThreadPoolExecutor) -> None:
    def go(member: Member) -> None:
        optimizer = average_gradients(keras.optimizers.SGD(), member=member, sparse=True)
        table = keras.Variable(np.zeros((8, 1), np.float32), name="words")
        optimizer.build([table])
        slices = tf.IndexedSlices(np.ones((2, 1), np.float32), rows, (8, 1))
        with pytest.raises(ValueError, match=f"words: expected rows 0 to 7, got rows {got}"):
            optimizer.apply([slices], [table])

    in_all(pool, 1, go)


def test_arguments_are_checked() -> None:
    optimizer = keras.optimizers.SGD(gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match="sparse: expected True, False or 'auto', got 'yes'"):
        average_gradients(optimizer, sparse="yes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"with a rule, got True: Median"):
        average_gradients(optimizer, sparse=True, rule=robust.Median())
    with pytest.raises(ValueError, match="with gradient_accumulation_steps, got True"):
        average_gradients(optimizer, sparse=True)
    average_gradients(optimizer)  # nothing has changed before


@pytest.mark.parametrize(
    ("count", "room", "expected"),
    [(0, 0, 16), (1, 16, 16), (17, 0, 20), (2045, 0, 2048), (2049, 0, 2560), (2049, 4096, 4096),
     (2047, 4096, 2048), (3000, 2048, 3072)],
)  # fmt: skip
def test_rooms_hold_the_rows_and_change_seldom(count: int, room: int, expected: int) -> None:
    assert _room_for(count, room) == expected
