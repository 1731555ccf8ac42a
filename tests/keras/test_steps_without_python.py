"""Steps that repeat the call of the last one: they enter no Python, unless something is different.

Members are threads, each with a process group's real channel.
"""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_programs import in_threads, outcome, seed_initializers
from process_groups import LocalProcessGroup

from flatweights.keras import average_gradients
from flatweights.keras._exchange import Exchange
from flatweights.ray import Member
from flatweights.ray.support import _failpoints

SIZE, STEPS = 2, 90
FEW = STEPS // 3  # members that trace their steps are late for the first ones


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a step has entered Python, by the first name of its tensors."""
    counts: Counter[str] = Counter()
    of = Exchange.of

    def counting(exchange: Exchange, grads: Any) -> Any:
        counts[exchange.layout.slots[0].name] += 1
        return of(exchange, grads)

    monkeypatch.setattr(Exchange, "of", counting)
    return counts


def model_of(*, normalized: bool = False) -> Any:
    seed_initializers(3)
    layers = [keras.Input((3,)), keras.layers.Dense(5, "tanh")]
    if normalized:
        layers.append(keras.layers.BatchNormalization(synchronized=True))
    return keras.Sequential([*layers, keras.layers.Dense(2)])


def data_of(rank: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(rank)
    x = rng.normal(size=(4 * STEPS, 3)).astype(np.float32)
    return x, x[:, :2] ** 2


_making = threading.Lock()


def fit_twice(
    place: Any, callback: Callable[[int, int], None], normalized: bool, between: threading.Barrier
) -> list[Any]:
    """Return the weights after each of two trainings from one start; they have one trace."""
    with _making:
        model = model_of(normalized=normalized)
    optimizer = average_gradients(keras.optimizers.SGD(0.01, momentum=0.9), member=place.member())
    model.compile(optimizer, "mse", jit_compile=False)
    optimizer.build(model.trainable_variables)
    variables = [*model.variables, *optimizer.variables]
    start, weights = [one.numpy() for one in variables], []
    calls = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: callback(place.rank, batch)
    )
    for callbacks in ([calls], []):
        for one, value in zip(variables, start, strict=True):
            one.assign(value)
        options = {"shuffle": False, "verbose": 0, "callbacks": callbacks}
        model.fit(*data_of(place.rank), batch_size=4, **options)
        weights.append(model.get_weights())
        between.wait()
    return weights


def nothing(rank: int, batch: int) -> None:
    pass


def pause(rank: int, batch: int) -> None:
    if rank == 1 and batch in (45, 60):
        time.sleep(0.4)  # longer than C++ waits


@pytest.mark.parametrize(
    ("callback", "normalized"),
    [
        pytest.param(pause, True, id="normalized, after a pause"),
        pytest.param(pause, False, id="after a pause", marks=pytest.mark.slow),
        pytest.param(nothing, True, id="normalized", marks=pytest.mark.slow),
        pytest.param(nothing, False, id="", marks=pytest.mark.slow),
    ],
)
def test_they_have_the_bits_of_steps_in_python(
    entered: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
    callback: Callable[[int, int], None],
    normalized: bool,
) -> None:
    counts: list[Counter[str]] = []

    def go_to_python() -> None:
        counts.append(entered.copy())
        entered.clear()
        monkeypatch.setattr(_failpoints, "hook", lambda point: None)  # its points are in Python

    between = threading.Barrier(SIZE, go_to_python, 600)
    replies = in_threads(SIZE, fit_twice, callback, normalized, between)
    assert not any(isinstance(reply, str) for reply in replies), replies
    for reply in replies:
        for weights in reply:
            assert all(map(np.array_equal, weights, replies[0][0]))
    own, in_python = counts
    assert len(own) == (3 if normalized else 1)  # moments and their gradient, and all gradients
    assert max(own.values()) <= SIZE * FEW
    assert min(in_python.values()) == SIZE * STEPS


class Loop:
    """A loop of a user's own, of one variable; its gradient is the member's rank, plus 1."""

    def __init__(self, member: Member, **options: Any) -> None:
        self.variable = keras.Variable([0.0, 0.0])
        optimizer = average_gradients(keras.optimizers.SGD(1.0), member=member, **options)
        optimizer.build([self.variable])
        own = tf.fill(2, member.rank + 1.0)
        self.step = tf.function(lambda: optimizer.apply([own], [self.variable]), autograph=False)

    def take(self, steps: int) -> list[float]:
        """Take steps; return the averages that were applied."""
        averages = []
        for _ in range(steps):
            before = self.variable.numpy()
            self.step()
            averages.append(float((before - self.variable.numpy())[0]))
        return averages


@pytest.fixture
def members() -> Iterator[list[Member]]:
    made = LocalProcessGroup(SIZE).join_all()
    yield made
    for member in made:
        member.leave()


def together(members: list[Member], act: Callable[[Member], Any]) -> list[Any]:
    """Call ``act`` in a thread for each member; return results, or the texts of errors."""
    with ThreadPoolExecutor(SIZE) as pool:
        return [*pool.map(lambda member: outcome(act, member), members)]


def test_another_thread_may_leave_meanwhile(entered: Counter[str], members: list[Member]) -> None:
    going = threading.Barrier(SIZE)
    enough, left = threading.Event(), threading.Event()

    def leave(member: Member) -> None:
        enough.wait()
        member.leave()
        left.set()

    def act(member: Member) -> Any:
        loop = Loop(member, min_results=1)
        loop.take(20)
        before = entered.total()
        going.wait()
        if member.rank == 0:
            threading.Thread(target=leave, args=[member]).start()
            return loop.take(10**6)
        averages = loop.take(100)
        enough.set()
        while not left.is_set():
            averages += loop.take(10)
        return before, [*averages, *loop.take(20)]

    error, (before, averages) = together(members, act)
    assert "has left the process group" in error
    assert {*averages} <= {1.5, 2.0}  # of both, and of the one that stays
    assert averages[-10:] == [2.0] * 10
    assert averages == sorted(averages)
    assert averages[:100] == [1.5] * 100
    assert entered.total() - before < len(averages) / 2


def test_a_member_that_is_said_to_lack_the_state_is_healed(members: list[Member]) -> None:
    def act(member: Member) -> Any:
        loop = Loop(member, min_results=1)
        loop.take(20)
        if member.rank == 1:
            loop.variable.assign([500.0, 500.0])
            member.lacks_state = True
        loop.take(20)
        return loop.variable.numpy().tolist(), member.lacks_state

    assert together(members, act) == [([-59.5] * 2, False)] * 2  # one step had one average alone


def test_calls_of_other_kinds_take_their_turns(members: list[Member]) -> None:
    """Their weights may be where those of the steps were: segments are replaced."""

    def act(member: Member) -> Any:
        loop, means = Loop(member), []
        for size in (3, 10**4, 10**6, 30, 10**5, 10):
            assert loop.take(8) == [1.5] * 8
            means.append(member.average(np.full(size, float(member.rank))).weights)
        return all((mean == 0.5).all() for mean in means)

    assert together(members, act) == [True] * 2


def test_a_model_that_is_gone_leaves_the_member_as_it_was(members: list[Member]) -> None:
    def act(member: Member) -> Any:
        for _ in range(3):
            assert Loop(member).take(8) == [1.5] * 8
        return float(member.average(np.full(3, float(member.rank))).weights[0])

    assert together(members, act) == [0.5] * 2


def test_a_member_that_has_ended_averages_no_more(members: list[Member]) -> None:
    ended = threading.Barrier(SIZE)

    def act(member: Member) -> Any:
        loop = Loop(member, min_results=1)
        loop.take(40)
        if member.rank == 1:
            ended.wait()
            return loop.take(40)
        with contextlib.suppress(ValueError), member:
            raise ValueError("broken")
        ended.wait()
        return [outcome(loop.take, 1) for _ in range(3)]

    errors, averages = together(members, act)
    assert all("this member ended with ValueError" in error for error in errors), errors
    assert averages == [2.0] * 40


def test_a_step_that_does_not_take_its_average_ends_the_member(
    members: list[Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later call would get the average of that step."""

    def act(member: Member) -> Any:
        loop = Loop(member, min_results=1)
        loop.take(40)
        if member.rank == 1:
            return None

        def broken(*args: Any) -> Any:
            raise ValueError("broken before the average")

        monkeypatch.setattr(Exchange, "of", broken)
        errors = [outcome(loop.take, 1)]  # it asks, and Python is to go on with it
        monkeypatch.undo()
        return [*errors, outcome(member.average, np.zeros(3)), outcome(loop.take, 1)]

    errors, _ = together(members, act)
    assert "broken before the average" in errors[0]
    assert all("a step was broken off" in error for error in errors[1:]), errors


def test_a_coordinator_that_is_gone_is_an_error_of_the_step(
    entered: Counter[str], members: list[Member]
) -> None:
    def act(member: Member) -> Any:
        loop = Loop(member)
        loop.take(20)
        if member.rank == 1:
            member._coordinator.close()
            return None
        return loop.take(10**6)

    error, _ = together(members, act)
    assert "MemberDiedError" in error
