"""Members that average gradients, and whose optimizers or callbacks differ."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_programs import build, images, outcome, prepare
from process_groups import LocalProcessGroup

from flatweights.keras import AverageLogs, AverageWeights, average_gradients
from flatweights.ray import CallsDifferError, Member
from flatweights.server import FedAdam, FedAvgM

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation"),  # Keras reads a learning rate
]

Kinds = keras.optimizers
Calls = keras.callbacks


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    prepare()
    with ThreadPoolExecutor(3) as pool:
        yield pool


def together(
    pool: ThreadPoolExecutor, size: int, function: Callable[..., Any], *args: Any
) -> list[Any]:
    """Call ``function(member, *args)`` in the thread of each member; return results or errors."""

    def take_part(member: Member) -> Any:
        with member:
            return function(member, *args)

    members = LocalProcessGroup(size).join_all()
    return [*pool.map(outcome, [take_part] * size, members)]


def built(member: Member, make: Callable[[int], Any]) -> Any:
    """Return the values of a variable and of the optimizer after its start."""
    variable = keras.Variable([float(member.rank)])
    optimizer = average_gradients(make(member.rank), member=member)
    try:
        optimizer.build([variable])
    except CallsDifferError:
        assert np.asarray(variable).tolist() == [float(member.rank)]  # nothing was changed
        raise
    return [np.asarray(one).tolist() for one in (variable, *optimizer.variables)]


def scheduled(steps: int) -> Any:
    return Kinds.schedules.ExponentialDecay(0.1, steps, 0.9)


def test_optimizers_that_differ_raise_in_all_members_before_the_first_step(
    pool: ThreadPoolExecutor,
) -> None:
    cases: list[tuple[Callable[[int], Any], str]] = [
        (lambda k: Kinds.Adam(clipnorm=[None, 1.0][k]), "Adam.clipnorm: rank 0 has None, rank 1"),
        (lambda k: Kinds.SGD(momentum=0.9 * k), "SGD.momentum: rank 0 has 0, rank 1 has 0.9"),
        (lambda k: Kinds.Adam(beta_2=0.9 + 0.01 * k), "Adam.beta_2: rank 0 has 0.9, rank 1 has"),
        (lambda k: [Kinds.Adam, Kinds.SGD][k](), "got optimizer: rank 0 has Adam, rank 1 has SGD"),
        (
            lambda k: Kinds.SGD(scheduled(10 + k)),
            "SGD.learning_rate.decay_steps: rank 0 has 10, rank 1 has 11",
        ),
        (
            lambda k: Kinds.SGD([0.1, scheduled(10)][k]),
            "SGD.learning_rate: rank 0 has a number, rank 1 has ExponentialDecay",
        ),
        (
            lambda k: Kinds.LossScaleOptimizer(Kinds.SGD(nesterov=k == 1, clipvalue=0.5 + k)),
            "LossScaleOptimizer.inner_optimizer.clipvalue: rank 0 has 0.5, rank 1 has 1.5; "
            "LossScaleOptimizer.inner_optimizer.nesterov: rank 0 has False, rank 1 has True",
        ),
    ]
    for make, text in cases:
        for reply in together(pool, 2, built, make):
            assert str(reply).startswith("CallsDifferError: average_gradients: expected"), reply
            assert text in reply
    replies = together(pool, 3, built, lambda k: Kinds.SGD(weight_decay=[0.1, 0.2, 0.1][k]))
    assert all("weight_decay: ranks 0, 2 have 0.1, rank 1 has 0.2" in r for r in replies), replies


def test_optimizers_may_differ_in_what_rank_0_sends_and_in_what_cannot_be_compared(
    pool: ThreadPoolExecutor,
) -> None:
    class Own(Kinds.SGD):  # type: ignore[misc,name-defined]
        def get_config(self) -> Any:
            raise NotImplementedError

    def rate() -> float:
        return 0.1

    cases: list[Callable[[int], Any]] = [
        lambda k: Kinds.SGD(0.1 + k, name=f"rank_{k}"),
        lambda k: Kinds.SGD(0.1, weight_decay=[0, 0.0][k]),
        lambda k: Kinds.SGD(rate if k else partial(rate)),
        lambda k: Own(0.1),
    ]
    for make in cases:
        first, second = together(pool, 2, built, make)
        assert first == second
        assert first[0] == [0.0]


def fitted(
    member: Member, make: Callable[[int], list[Any]], logs: bool = True, **terms: Any
) -> Any:
    """Return the trainable weights after ``fit`` with callbacks; they are rank 0's at first."""
    model = networks[member.rank]
    optimizer = average_gradients(Kinds.SGD(0.05), member=member, **terms)
    model.compile(optimizer, "mse", run_eagerly=True)
    before = model.get_weights()
    x, y = (one[member.rank : 120 : member.size] for one in images("dense"))
    try:
        callbacks = [*([AverageLogs()] if logs else ()), *make(member.rank)]
        model.fit(x, y, 30, epochs=2, verbose=0, shuffle=False, callbacks=callbacks)
    except (CallsDifferError, tf.errors.OpError):
        assert all(map(np.array_equal, model.get_weights(), before))
        raise
    return model.get_weights()


networks: list[Any] = []


@pytest.fixture(scope="module", autouse=True)
def two_networks() -> Iterator[None]:
    prepare()
    networks.extend(build("dense", seed) for seed in range(2))
    yield
    networks.clear()


def test_callbacks_that_decide_in_one_member_only_raise_in_all(pool: ThreadPoolExecutor) -> None:
    def stops(**options: Any) -> Any:
        return Calls.EarlyStopping("loss", **options)

    cases: list[tuple[Callable[[int], list[Any]], str]] = [
        (
            lambda k: [Calls.LearningRateScheduler(lambda epoch, rate: rate)] * k,
            "LearningRateScheduler callbacks: rank 0 has 0, rank 1 has 1",
        ),
        (lambda k: [Calls.ReduceLROnPlateau("loss")] * k, "ReduceLROnPlateau callbacks: rank 0"),
        (lambda k: [stops()] * k, "EarlyStopping callbacks: rank 0 has 0, rank 1 has 1"),
        (lambda k: [stops(), stops(patience=k)], "EarlyStopping 1.patience: rank 0 has 0, rank 1"),
        (lambda k: [Calls.TerminateOnNaN()] * k, "TerminateOnNaN callbacks: rank 0 has 0, rank 1"),
    ]
    for make, text in cases:
        for reply in together(pool, 2, fitted, make):
            assert str(reply).startswith("CallsDifferError: average_gradients: expected"), reply
            assert text in reply
    make, text = cases[0]
    for reply in together(pool, 2, lambda member: fitted(member, make, logs=False)):
        assert text in reply


def test_callbacks_that_only_look_may_be_in_one_member_only(
    pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    def callbacks(rank: int) -> list[Any]:
        decide = [
            Calls.ReduceLROnPlateau("loss", verbose=rank),
            Calls.LearningRateScheduler(lambda epoch, rate: rate),
        ]
        look = [Calls.ModelCheckpoint(tmp_path / "one.keras"), Calls.CSVLogger(tmp_path / "log")]
        return [*(look if rank == 0 else ()), *decide]

    first, second = together(pool, 2, fitted, callbacks)
    assert all(map(np.array_equal, first, second)), (first, second)


def test_if_members_may_leave_one_may_end_the_training_of_all(pool: ThreadPoolExecutor) -> None:
    def callbacks(rank: int) -> list[Any]:
        return [Calls.EarlyStopping("loss", patience=5)] * rank

    first, second = together(pool, 2, lambda m: fitted(m, callbacks, min_results=1))
    assert all(map(np.array_equal, first, second)), (first, second)

    def plateaus(rank: int) -> list[Any]:
        return [Calls.ReduceLROnPlateau("loss", factor=0.1 * (1 + rank))]

    for reply in together(pool, 2, lambda m: fitted(m, plateaus, min_results=1)):
        assert "got ReduceLROnPlateau.factor: rank 0 has 0.1, rank 1 has 0.2" in reply


@pytest.mark.slow
def test_members_that_average_weights_may_train_by_optimizers_of_their_own(
    pool: ThreadPoolExecutor,
) -> None:
    def fit(member: Member) -> Any:
        model = networks[member.rank]
        model.compile([Kinds.SGD(0.05), Kinds.Adam(clipnorm=1.0)][member.rank], "mse")
        callbacks = [AverageWeights(member=member), AverageLogs()]
        callbacks += [Calls.LearningRateScheduler(lambda _: 0.01)] * member.rank
        model.fit(*images("dense"), verbose=0, callbacks=callbacks)
        return model.get_weights()

    first, second = together(pool, 2, fit)
    assert all(map(np.array_equal, first, second)), (first, second)


def test_outer_optimizers_that_differ_raise_in_all_members(pool: ThreadPoolExecutor) -> None:
    def fit(member: Member, outers: list[Any]) -> Any:
        model = networks[member.rank]
        model.compile("sgd", "mse", run_eagerly=True)
        averaging = AverageWeights(member=member, outer=outers[member.rank])
        model.fit(*(one[:40] for one in images("dense")), verbose=0, callbacks=[averaging])

    slow, fast = (partial(FedAvgM, learning_rate=rate) for rate in (0.5, 0.7))
    for reply in together(pool, 2, lambda member: fit(member, [slow, fast])):
        assert "CallsDifferError: outer: expected an optimizer with the same settings" in reply
        assert "FedAvgM.learning_rate: rank 0 has 0.5, rank 1 has 0.7" in reply
    for reply in together(pool, 2, lambda member: fit(member, [slow, FedAdam])):
        assert "got outer: rank 0 has FedAvgM, rank 1 has FedAdam" in reply
    assert together(pool, 2, lambda member: fit(member, [fast, fast])) == [None, None]
