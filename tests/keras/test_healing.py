"""Trainings with averaged gradients that survive deaths of members, and heal their successors."""

import functools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_programs import build, images, prepare
from process_groups import LocalProcessGroup, kill

from flatweights import Layout
from flatweights.keras import AverageLogs, AverageWeights, average_gradients
from flatweights.keras._gradients import averaging_of
from flatweights.ray import Member
from flatweights.robust import Krum, Median
from flatweights.tensorflow import TensorFlowVariables

EPOCHS = 4
MORE = 6  # in trainings of which a member misses some
BATCH = 12  # of all members together: an epoch has 20
PATIENCE = 300.0  # seconds that members wait for each other
LIMIT = 600.0  # seconds after which a test counts as hung
END = 1_000  # of an epoch, in place of a batch


class KilledError(Exception):
    """A member has ended, in the middle of its training."""


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    prepare()
    made = ThreadPoolExecutor(8)
    yield made
    made.shutdown(wait=False)  # a test that failed may have left some in a call


class Fit:
    """One member's ``fit``, in a thread.

    Attributes:
        at: By epoch and batch, or `END`, its action at the beginning of that batch, or at the end.
        done: The result of the training: the history, and the state.
    """

    def __init__(self, member: Member, kind: str = "normalized", **options: Any) -> None:
        self.member = member
        self.at: dict[tuple[int, int], Callable[[], object]] = {}
        self.model = build(kind, member.rank)
        self.options = {
            "epochs": EPOCHS,
            "verbose": 0,
            "batch_size": BATCH // member.size,
        } | options
        self.compile: dict[str, Any] = {}
        self.logs = AverageLogs()
        self.more: list[Any] = []
        # It has a slot for each variable, and half of the operations of Adam.
        self.optimizer: Any = keras.optimizers.SGD(0.01, momentum=0.9)
        self.state: Any = None
        self.data: Any = None
        self.weights: Any = None  # an AverageWeights, in place of averaged gradients
        self.holds: Callable[[Any], Any] = lambda callback: callback
        self.done: Future[Any] = Future()

    def start(self, pool: ThreadPoolExecutor) -> None:
        self.done = pool.submit(self._run)

    def goes_on_without(self, epoch: int, batch: int) -> None:
        """Let the others go on without a member, which sleeps from a batch on.

        Before that batch, members are never late: on a busy machine, one may trace its first step
        for long.
        """
        self.at[epoch, batch] = lambda: self._wait_for_others(1.0)
        self.at[epoch, batch + 4] = lambda: self._wait_for_others(PATIENCE)

    def _wait_for_others(self, seconds: float) -> None:
        averaging = averaging_of(self.model)
        own = self.weights._handle if averaging is None else averaging.handle
        for handle in (own, self.logs._handle):
            handle.timeout = seconds  # the shortest of all members' counts
        self.member._turn.forget_steps()  # with the old one

    def _run(self) -> tuple[Any, list[Any]]:
        terms: dict[str, Any] = {"min_results": 1, "timeout": PATIENCE, "member": self.member}
        optimizer = self.optimizer
        if self.weights is None:
            optimizer = average_gradients(optimizer, state=self.state, **terms)
        else:
            self.weights._handle.given |= terms
        self.model.compile(optimizer, "mse", **self.compile)
        x, y = images("dense")
        mine = slice(self.member.rank, None, self.member.size)
        averaging = [] if self.weights is None else [self.holds(self.weights)]
        callbacks = [_Act(self), self.logs, *averaging, *self.more]
        data = (x[mine], y[mine]) if self.data is None else (self.data,)
        history = self.model.fit(*data, callbacks=callbacks, **self.options)
        weights = [*map(np.asarray, self.model.trainable_weights)]
        if self.weights is not None:
            return history, weights
        slots = [np.asarray(one) for one in self.model.optimizer.variables]
        # Moving statistics are each member's own.
        return history, [*weights, *slots]


class _Act(keras.callbacks.Callback):  # type: ignore[misc]
    def __init__(self, fit: Fit) -> None:
        super().__init__()
        self._fit = fit

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch
        self._do(-1)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._do(batch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._do(END)

    def _do(self, batch: int) -> None:
        act = self._fit.at.get((self._epoch, batch))
        if act is not None:
            act()


def fits(group: LocalProcessGroup, kind: str = "normalized", **options: Any) -> list[Fit]:
    return [Fit(member, kind, **options) for member in group.join_all()]


def check_alike(states: list[list[Any]]) -> None:
    for k, parts in enumerate(zip(*states, strict=True)):
        for other in parts[1:]:
            np.testing.assert_array_equal(parts[0], other, err_msg=f"part {k}")


def dies(fit: Fit) -> Callable[[], None]:
    def die() -> None:
        kill(fit.member)
        raise KilledError

    return die


def swap(fit: Fit) -> None:
    """Swap the weights with their moving averages between epochs."""
    fit.optimizer = keras.optimizers.SGD(0.01, momentum=0.9, use_ema=True)
    fit.more = [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)]


def replacement(group: LocalProcessGroup, dead: Fit, **options: Any) -> Fit:
    with pytest.raises(KilledError):
        dead.done.result(LIMIT)
    return Fit(group.join(dead.member.rank), **options)


def test_a_replaced_member_begins_with_the_others_next_epoch_and_ends_with_them(
    pool: ThreadPoolExecutor,
) -> None:
    group, go_on = LocalProcessGroup(2), threading.Event()
    first, dead = fits(group, "dense")
    dead.at[1, 3] = dies(dead)
    first.at[2, -1] = lambda: go_on.wait(LIMIT)
    for fit in (first, dead):
        swap(fit)
        fit.start(pool)
    new = replacement(group, dead, kind="dense")
    swap(new)
    new.start(pool)
    group.wait_until(lambda inside: len(inside.calls.waiting.recovering) == 1)
    go_on.set()
    ended = [fit.done.result(LIMIT) for fit in (first, new)]
    epochs = [history.epoch for history, _ in ended]
    assert epochs == [[*range(EPOCHS)], [*range(2, EPOCHS)]]
    assert ended[1][0].history["loss"] == ended[0][0].history["loss"][-2:]
    check_alike([state for _, state in ended])


@pytest.mark.slow
def test_a_member_is_healed_in_an_accumulated_step_and_ends_its_epoch_with_the_others(
    pool: ThreadPoolExecutor,
) -> None:
    group, slept = LocalProcessGroup(2), threading.Event()
    first, late = fits(group, "dense", epochs=3)
    for fit in (first, late):
        fit.optimizer = keras.optimizers.SGD(0.01, momentum=0.9, gradient_accumulation_steps=2)

    def sleep() -> None:
        number = group.last_call()
        group.wait_until(lambda inside: inside.calls.number > number + 5)
        slept.set()

    late.at[2, 4] = sleep
    first.goes_on_without(2, 4)
    first.at[2, 16] = lambda: slept.wait(LIMIT)
    first.at[2, 18] = group.until_one_is_back
    for fit in (first, late):
        fit.start(pool)
    check_alike([fit.done.result(LIMIT)[1] for fit in (first, late)])


class _Acts(keras.layers.Layer):  # type: ignore[misc]
    """Does something in the middle of a step, after a synchronized layer."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__()
        self._act = act

    def call(self, x: Any, training: bool = False) -> Any:
        if not training:
            return x
        with tf.control_dependencies([tf.numpy_function(self._act, [], [])]):
            return tf.identity(x)


def test_the_other_goes_on_without_a_member_in_the_middle_of_a_synchronized_step(
    pool: ThreadPoolExecutor,
) -> None:
    group, slept = LocalProcessGroup(2), threading.Event()
    first, late = fits(group)
    steps: list[int] = []

    def act() -> None:
        steps.append(1)
        if len(steps) == 2 * 20 + 5:
            number = group.last_call()
            group.wait_until(lambda inside: inside.calls.number > number + 16)
            slept.set()

    def model(between: Callable[[], object]) -> Any:
        inputs = keras.Input((8,))
        x = keras.layers.BatchNormalization(synchronized=True)(inputs)
        return keras.Model(inputs, keras.layers.Dense(1)(_Acts(between)(x)))

    for fit in (first, late):
        fit.model = model(act if fit is late else lambda: None)
    first.goes_on_without(2, 4)
    first.at[2, 16] = lambda: slept.wait(LIMIT)  # it takes its time once that one has overslept
    first.at[2, 18] = group.until_one_is_back
    for fit in (first, late):
        fit.start(pool)
    ended = [fit.done.result(LIMIT) for fit in (first, late)]
    check_alike([state for _, state in ended])
    assert [history.epoch[-1] for history, _ in ended] == [EPOCHS - 1] * 2


@pytest.mark.slow
def test_a_member_that_sleeps_for_epochs_meets_the_others_again(pool: ThreadPoolExecutor) -> None:
    for _ in range(3):  # on a busy machine, the others may begin the last epoch before it comes
        whole = whole_epochs_after_sleep(pool)
        if whole:
            break
    assert whole == [*range(5, MORE)], "it passes by those that the first has begun"


@pytest.mark.slow
def test_a_py_dataset_goes_on_after_epochs_that_were_cut_short(pool: ThreadPoolExecutor) -> None:
    group, slept = LocalProcessGroup(2), threading.Event()
    first, late = fits(group, "dense", epochs=MORE)
    for fit in (first, late):
        fit.data = Stream(fit.member.rank, 8)
        fit.options.pop("batch_size")
    late.at[1, 4] = lambda: slept.wait(LIMIT)
    first.goes_on_without(1, 4)

    def wake() -> None:
        slept.set()
        group.wait_until(lambda inside: inside.calls.waiting.recovering)

    first.at[3, 2] = wake
    for fit in (first, late):
        fit.start(pool)
    ended = [fit.done.result(LIMIT) for fit in (first, late)]
    check_alike([state for _, state in ended])


def whole_epochs_after_sleep(pool: ThreadPoolExecutor) -> list[int]:
    """The epochs of which a member that sleeps from the second to the fifth has all batches."""
    group, slept = LocalProcessGroup(2), threading.Event()
    first, late = fits(group, "dense", epochs=MORE)
    for fit in (first, late):
        swap(fit)

    def sleep() -> None:
        assert slept.wait(LIMIT)

    late.at[1, 4] = sleep
    first.goes_on_without(1, 4)
    saved = list[int]()
    late.more.append(saver := keras.callbacks.BackupAndRestore("unused"))
    saver.on_epoch_end = lambda epoch, logs=None: saved.append(epoch)
    saver.on_train_begin = saver.on_train_end = lambda logs=None: None

    def wake() -> None:
        slept.set()
        # It is healed in this epoch.
        group.wait_until(lambda inside: inside.calls.waiting.recovering)

    first.at[4, 2] = wake
    first.at[4, 19] = lambda: group.wait_until(lambda inside: inside.calls.waiting.recovering)
    whole: list[int] = []  # the epochs of which the late one has more than a first batch
    for epoch in range(2, MORE):
        late.at[epoch, 1] = functools.partial(whole.append, epoch)
    for fit in (first, late):
        fit.start(pool)
    ended = [fit.done.result(LIMIT) for fit in (first, late)]
    check_alike([state for _, state in ended])
    assert saved == [0, *whole]
    return whole


@pytest.mark.slow
def test_the_training_ends_for_all_if_a_callback_of_one_stops_it(pool: ThreadPoolExecutor) -> None:
    group = LocalProcessGroup(2)
    both = fits(group, "dense", epochs=MORE)
    stop = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, _: setattr(both[1].model, "stop_training", epoch == 2)
    )
    both[1].more.append(stop)
    for fit in both:
        fit.start(pool)
    (first, state), (second, other) = [fit.done.result(LIMIT) for fit in both]
    assert second.epoch == [0, 1, 2]
    assert first.epoch[:3] == [0, 1, 2]
    assert len(first.epoch) <= 4
    check_alike([state, other])


def best_of_first(kind: type[Any]) -> Any:
    """Return a callback whose best epoch is the first, the one with the largest loss."""
    return kind("loss", mode="max", patience=EPOCHS, restore_best_weights=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # of Keras 3.5
def test_a_fit_after_one_that_failed_begins_at_its_own_first_epoch(
    pool: ThreadPoolExecutor,
) -> None:
    group, there, go_on = LocalProcessGroup(2), threading.Event(), threading.Event()
    first, dead = fits(group, "dense", epochs=3)
    dead.at[1, 3] = dies(dead)

    def wait() -> None:
        there.set()
        assert go_on.wait(LIMIT)

    first.at[2, -1] = wait
    for fit in (first, dead):
        fit.start(pool)
    assert there.wait(LIMIT)  # a replacement that came earlier would miss the last epoch
    new = replacement(group, dead, kind="dense", epochs=3)
    new.at[2, 3] = dies(new)
    new.start(pool)
    group.wait_until(lambda inside: len(inside.calls.waiting.recovering) == 1)
    go_on.set()
    with pytest.raises(KilledError):
        new.done.result(LIMIT)
    new.model.compile("sgd", "mse")
    x, y = images("dense")
    assert new.model.fit(x, y, epochs=2, steps_per_epoch=1, verbose=0).epoch == [0, 1]
    first.done.result(LIMIT)


def test_another_fit_needs_the_callback_too_but_not_a_loop_of_ones_own() -> None:
    prepare()
    (fit,) = fits(LocalProcessGroup(1), "dense", epochs=1)
    fit._run()
    x, y = images("dense")
    with pytest.raises(ValueError, match="expected the callback AverageLogs or AverageWeights"):
        fit.model.fit(x, y, BATCH, verbose=0)
    steps = int(fit.model.optimizer.iterations)
    fit.model.optimizer.build(fit.model.trainable_variables)
    fit.model.train_on_batch(x, y)
    assert int(fit.model.optimizer.iterations) == steps + 1


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # of Keras' own callback
@pytest.mark.parametrize(
    "saves", [pytest.param("the others", marks=pytest.mark.slow), "the replaced"]
)
def test_a_replaced_member_counts_as_the_others_do(
    pool: ThreadPoolExecutor, tmp_path: Path, saves: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A learning rate that falls after some epochs falls in the same epoch in all members.

    All end with the best weights, those of an epoch before the replacement. Only one of them may
    have a callback more, in front of it.
    """
    group, go_on = LocalProcessGroup(2), threading.Event()

    def callbacks(who: str) -> list[Any]:
        file = tmp_path / "best.keras"
        best = keras.callbacks.ModelCheckpoint(file, "loss", save_best_only=True)
        plateau = keras.callbacks.ReduceLROnPlateau("loss", 0.5, patience=2, min_delta=100.0)
        all_have = [plateau, best_of_first(keras.callbacks.EarlyStopping)]
        return [best, *all_have] if who == saves else all_have

    first, dead = fits(group, "dense")
    first.more, dead.more = callbacks("the others"), callbacks("the replaced")
    dead.at[1, 3] = dies(dead)
    first.at[2, -1] = lambda: go_on.wait(LIMIT)
    after_first: list[Any] = []
    first.at[1, 0] = lambda: after_first.extend(first.model.get_weights())
    for fit in (first, dead):
        fit.start(pool)
    new = replacement(group, dead, kind="dense")
    new.more = callbacks("the replaced")
    new.start(pool)
    group.wait_until(lambda inside: len(inside.calls.waiting.recovering) == 1)
    go_on.set()
    ended = [fit.done.result(LIMIT) for fit in (first, new)]
    check_alike([state for _, state in ended])
    check_alike([ended[1][1][: len(after_first)], after_first])
    rate = float(first.model.optimizer.learning_rate)
    assert rate == pytest.approx(0.005)
    warns = "ModelCheckpoint 0 begins anew" in caplog.text
    assert warns == (saves == "the replaced")


def test_a_member_that_is_healed_averages_its_weights_after_the_same_batches(
    pool: ThreadPoolExecutor,
) -> None:
    group, waits = LocalProcessGroup(2), threading.Event()
    first, late = fits(group, "dense", epochs=3)
    for fit in (first, late):
        fit.more = [AverageWeights(every=3, unit="batch")]

    def wait() -> None:
        """Wait for the late member, whose request is for gradients, as the next call is."""
        waits.set()
        group.until_one_is_back()

    late.at[2, 4] = lambda: waits.wait(LIMIT)
    first.goes_on_without(2, 4)
    steps: list[int] = []
    late.at[2, 5] = lambda: steps.append(int(late.model.optimizer.iterations))
    first.at[2, 16] = wait
    for fit in (first, late):
        fit.start(pool)
    ended = [fit.done.result(LIMIT) for fit in (first, late)]
    check_alike([state for _, state in ended])
    assert [history.epoch for history, _ in ended] == [[0, 1, 2]] * 2
    assert steps
    assert steps[0] > 2 * 20 + 5, "healed in the epoch"


@pytest.mark.parametrize(("every", "unit"), [(1, "epoch"), (7, "batch")])
def test_a_member_that_averages_weights_alone_is_replaced(
    pool: ThreadPoolExecutor, every: int, unit: Any
) -> None:
    group, go_on = LocalProcessGroup(2), threading.Event()

    def train(fit: Fit) -> None:
        fit.weights = AverageWeights(every, unit)
        fit.more = [best_of_first(keras.callbacks.EarlyStopping)]
        fit.start(pool)

    def note(fit: Fit) -> None:
        began[fit.member.rank] = [*fit.model.get_weights(), int(fit.model.optimizer.iterations)]

    first, dead = fits(group)
    dead.at[1, 3] = dies(dead)
    first.at[2, -1] = lambda: go_on.wait(LIMIT)
    began: dict[int, list[Any]] = {}
    for fit in (first, dead):
        train(fit)
    new = replacement(group, dead)
    for fit in (first, new):
        fit.at[2, 0] = functools.partial(note, fit)
    train(new)
    group.wait_until(lambda inside: len(inside.calls.waiting.recovering) == 1)
    go_on.set()
    ended = [fit.done.result(LIMIT) for fit in (first, new)]
    assert [history.epoch for history, _ in ended] == [[*range(EPOCHS)], [*range(2, EPOCHS)]]
    assert ended[1][0].history["loss"] == ended[0][0].history["loss"][-2:]
    check_alike([state for _, state in ended])
    check_alike([began[0], began[1]])
    assert began[1][-1] == 2 * 20, "it has the slots of the others, too"
    assert new.weights.round.used == (0, 1)


@pytest.mark.parametrize(
    ("every", "unit"),
    [(1, "epoch"), pytest.param(7, "batch", marks=pytest.mark.slow)],
)
def test_a_member_with_nan_gets_the_slots_of_the_others_too(
    pool: ThreadPoolExecutor, every: int, unit: Any
) -> None:
    first, spoiled = fits(LocalProcessGroup(2), "dense")

    def spoil() -> None:
        kernel = spoiled.model.weights[0]
        kernel.assign(np.full(kernel.shape, np.nan))

    spoiled.at[1, 4] = spoil
    for fit in (first, spoiled):
        fit.weights = AverageWeights(every, unit, nonfinite="skip")
        fit.start(pool)
    ended = [fit.done.result(LIMIT) for fit in (first, spoiled)]
    check_alike([state for _, state in ended])
    assert spoiled.weights.round.used == (0, 1)
    for slot in spoiled.model.optimizer.variables:
        assert np.all(np.isfinite(slot)), slot.path


def test_a_member_that_a_rule_leaves_out_is_not_healed(pool: ThreadPoolExecutor) -> None:
    members = fits(LocalProcessGroup(3), "dense", epochs=2)
    rounds: list[Any] = []
    for fit in members:
        fit.weights = AverageWeights(5, "batch", rule=Krum(0))
        fit.logs = AverageLogs(rule=Median())
        for at in ((0, 6), (0, 11), (0, 16), (1, 1), (1, 6)):
            fit.at[at] = lambda fit=fit: rounds.append(fit.weights.round)  # type: ignore[misc]
        fit.start(pool)
    check_alike([fit.done.result(LIMIT)[1] for fit in members])
    assert len(rounds) == 15
    assert all(one.healed == () and len(one.quarantined) == 2 for one in rounds), rounds


@pytest.mark.slow
def test_samples_of_a_training_that_was_given_up_do_not_count(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, waits = LocalProcessGroup(2), threading.Event()
    first, late = fits(group, "dense", epochs=MORE)
    sent: list[float] = []
    average_variables = late.member.average_variables

    def noted(variables: Any, weight: float = 1.0, **options: Any) -> Any:
        sent.append(weight)
        return average_variables(variables, weight, **options)

    def wait() -> None:
        waits.set()
        group.until_one_is_back()

    monkeypatch.setattr(late.member, "average_variables", noted)
    late.at[1, 4] = lambda: waits.wait(LIMIT)
    first.at[1, 4] = lambda: first._wait_for_others(1.0)
    first.at[3, 10] = wait
    first.at[4, -1] = lambda: group.wait_until(
        lambda inside: len(inside.calls.waiting.recovering) == 1
    )
    first.at[4, 0] = lambda: first._wait_for_others(PATIENCE)
    for fit in (first, late):
        fit.weights = AverageWeights(every=5)
        fit.start(pool)
    ended = [fit.done.result(LIMIT) for fit in (first, late)]
    check_alike([state for _, state in ended])
    assert sent == [20 * BATCH // 2] * 2, "of the epoch before which it was healed, and of the last"


class Holds(keras.callbacks.Callback):  # type: ignore[misc]
    """Calls another callback."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self._held = held

    def __getattribute__(self, name: str) -> Any:
        if name.startswith(("on_", "set_")):
            return getattr(self._held, name)
        return super().__getattribute__(name)


@pytest.mark.parametrize("holds", [lambda callback: callback, Holds], ids=["listed", "held"])
def test_a_replaced_member_has_the_counts_of_the_others_and_its_own_variables(
    pool: ThreadPoolExecutor, holds: Any
) -> None:
    group, go_on = LocalProcessGroup(2), threading.Event()
    own: dict[int, list[Any]] = {}

    def train(fit: Fit) -> None:
        kernels = [name for name in TensorFlowVariables(fit.model).variables if "kernel" in name]
        fit.weights, fit.holds = AverageWeights(only=kernels), holds
        fit.more = [best_of_first(keras.callbacks.EarlyStopping)]
        fit.start(pool)

    def note(fit: Fit) -> None:
        own[fit.member.rank] = [*fit.model.get_weights()[1::2], int(fit.model.optimizer.iterations)]

    first, dead = fits(group, "dense")
    dead.at[1, 3] = dies(dead)
    first.at[1, 0] = functools.partial(note, first)
    first.at[2, -1] = lambda: go_on.wait(LIMIT)
    for fit in (first, dead):
        train(fit)
    new = replacement(group, dead, kind="dense")
    new.at[2, 0] = functools.partial(note, new)
    train(new)
    group.wait_until(lambda inside: len(inside.calls.waiting.recovering) == 1)
    go_on.set()
    ended = [fit.done.result(LIMIT) for fit in (first, new)]
    check_alike([state[::2] for _, state in ended])  # of the best epoch, before the replacement
    for rank, (_, state) in enumerate(ended):
        check_alike([state[1::2], own[rank][:-1]])
    assert own[1][-1] == 2 * 20


def test_a_member_that_averages_weights_alone_is_late(pool: ThreadPoolExecutor) -> None:
    group, waits = LocalProcessGroup(2), threading.Event()
    first, late = fits(group, "dense", epochs=MORE)
    for fit in (first, late):
        fit.weights = AverageWeights(3, "batch")

    def wait() -> None:
        waits.set()
        group.until_one_is_back()

    late.at[1, 4] = lambda: waits.wait(LIMIT)
    first.at[1, 4] = lambda: first._wait_for_others(1.0)
    first.at[3, 10] = wait
    first.at[3, 16] = lambda: first._wait_for_others(PATIENCE)
    first.at[4, -1] = lambda: group.wait_until(
        lambda inside: len(inside.calls.waiting.recovering) == 1
    )
    for fit in (first, late):
        fit.start(pool)
    ended = [fit.done.result(LIMIT) for fit in (first, late)]
    check_alike([state for _, state in ended])
    assert ended[1][0].history["loss"][-1] == ended[0][0].history["loss"][-1]
    assert late.weights.round.used == (0, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compiled", "fitted"),
    [
        ({"steps_per_execution": 4}, {"validation_split": 0.2}),
        ({"run_eagerly": True}, {}),
    ],
    ids=["several steps at a time, with a validation", "eagerly"],
)
def test_ways_to_fit(
    pool: ThreadPoolExecutor, compiled: dict[str, Any], fitted: dict[str, Any]
) -> None:
    group, go_on, slept = LocalProcessGroup(3), threading.Event(), threading.Event()
    first, dead, late = fits(group, **fitted)
    dead.at[1, 4] = dies(dead)
    late.at[1, 8] = lambda: slept.wait(LIMIT)
    first.goes_on_without(1, 8)

    def wait() -> None:
        slept.set()
        go_on.wait(LIMIT)

    first.at[2, -1] = wait
    for fit in (first, dead, late):
        fit.compile = compiled
        fit.start(pool)
    new = replacement(group, dead, **fitted)
    new.compile = compiled
    new.start(pool)
    group.wait_until(
        lambda inside: 1 in [session.rank for session in inside.calls.waiting.recovering]
    )
    go_on.set()
    check_alike([fit.done.result(LIMIT)[1] for fit in (first, new, late)])


@pytest.mark.parametrize("accumulates", [None, 2])
def test_a_loop_of_ones_own_counts_by_iterations(
    pool: ThreadPoolExecutor, accumulates: int | None
) -> None:
    group = LocalProcessGroup(2)
    members = group.join_all()
    data = np.random.default_rng(0).normal(size=(2, 20, 3)).astype(np.float32)

    def train(member: Member, steps: int, dies_at: int = -1) -> list[Any]:
        start = 1.0 if dies_at >= 0 else 0.0
        weights = keras.Variable(np.full(3, start), dtype="float32")
        optimizer: Any = keras.optimizers.SGD(
            0.1, momentum=0.9, gradient_accumulation_steps=accumulates
        )
        # What is updated before and after the gradients are applied, and read by nothing of these.
        others = [tf.Variable(np.full(2000, start, np.float32)) for _ in range(40)]
        state = TensorFlowVariables(others)
        average_gradients(optimizer, member=member, min_results=1, timeout=60.0, state=state)
        optimizer.build([weights])

        def later(_: Any) -> Any:
            time.sleep(0.02 * member.rank)
            return np.ones(2000, np.float32)

        @tf.function(autograph=False)  # type: ignore[untyped-decorator]
        def step(x: Any) -> None:
            slow = tf.numpy_function(later, [x], tf.float32, stateful=False)
            for other in others[::2]:
                other.assign_add(tf.ensure_shape(slow, 2000))
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((weights.value - x) ** 2)
            optimizer.apply(tape.gradient(loss, [weights.value]), [weights])
            for other in others[1::2]:
                other.assign(0.9 * other + 0.1 * weights.value[0])

        while int(optimizer.iterations) < steps:
            done = int(optimizer.iterations)
            if done == dies_at:
                kill(member)
                raise KilledError
            if done == 10 and dies_at < 0:
                group.until_one_is_back()
            step(data[member.rank, done])
        member.average({"the end": np.zeros(1)}, min_results=1)
        return [np.asarray(one) for one in [weights, *others, *optimizer.variables]]

    survivor = pool.submit(train, members[0], 20)
    with pytest.raises(KilledError):
        train(members[1], 20, dies_at=5)
    new = group.join(1)
    own = train(new, 20)
    check_alike([own, survivor.result(LIMIT)])


@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
def test_twins_of_ones_own_loop_are_healed_by_the_names_of_their_optimizers(
    pool: ThreadPoolExecutor, named: bool
) -> None:
    group = LocalProcessGroup(2)
    members = group.join_all()

    def train(member: Member, steps: int, dies_at: int = -1) -> list[Any]:
        weights = [keras.Variable(np.full(3, 9.0 + k), dtype="float32") for k in range(2)]
        optimizers = []
        for k in range(2):
            adam = keras.optimizers.Adam(0.1, name=f"critic_of_{k}" if named else "adam")
            optimizers.append(average_gradients(adam, member=member, min_results=1, timeout=60.0))
            optimizers[k].build([weights[k]])
        while int(optimizers[1].iterations) < steps:
            done = int(optimizers[1].iterations)
            if done == dies_at:
                kill(member)
                raise KilledError
            if done == 10 and dies_at < 0:
                group.until_one_is_back()
            for target, (optimizer, one) in enumerate(zip(optimizers, weights, strict=True)):
                optimizer.apply([2 * (one.value - float(target))], [one])
        return [np.asarray(one) for k in range(2) for one in [weights[k], *optimizers[k].variables]]

    survivor = pool.submit(train, members[0], 20 if named else 10)
    with pytest.raises(KilledError):
        train(members[1], 20, dies_at=5)
    if not named:
        survivor.result(LIMIT)
    new = group.join(1)
    if named:
        own = train(new, 20)
        check_alike([own, survivor.result(LIMIT)])
        return
    with pytest.raises(RuntimeError, match="several models of one layout take turns"):
        train(new, 20)


class Stream(keras.utils.PyDataset):  # type: ignore[misc]
    """Batches of an endless stream, whose position is the number of finished epochs.

    Attributes:
        drawn: The numbers of the batches in the stream, in the order in which they were drawn
            since the first epoch has begun: Keras has looked at some before.
    """

    def __init__(self, rank: int, batches: int) -> None:
        super().__init__()
        self.rank, self.batches, self.epochs = rank, batches, 0
        self.drawn: list[int] = []
        self.has_begun = False

    def begin_epoch(self) -> None:
        if not self.has_begun:
            self.drawn.clear()
        self.has_begun = True

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, i: int) -> Any:
        number = self.epochs * self.batches + i
        self.drawn.append(number)
        x = np.random.default_rng([self.rank, number]).normal(size=(4, 8)).astype(np.float32)
        return x, np.sin(x.sum(axis=1, keepdims=True))

    def end_epoch(self) -> None:
        self.epochs += 1

    def save(self) -> bytes:
        return b"%d" % self.epochs

    def restore(self, saved: bytes) -> None:
        self.epochs = int(saved)


class Tells(keras.callbacks.Callback):  # type: ignore[misc]
    """Tells the model something before the training; it has an attribute that this package uses."""

    counted = 0

    def on_train_begin(self, logs: Any = None) -> None:
        self.model.is_told = True


def test_a_replaced_member_goes_on_in_the_data_where_the_others_are(
    pool: ThreadPoolExecutor,
) -> None:
    group, arrays = LocalProcessGroup(2), [np.zeros(1), np.zeros(1), np.zeros(1)]

    class Counter:
        """The epochs that have begun, in an array that is set in place."""

        def __init__(self, array: Any) -> None:
            self.array, self.layout = array, Layout.of([array])

        def gather_into(self, buffer: Any) -> None:
            self.layout.packed_views(buffer)[0][...] = self.array

        def scatter(self, buffer: Any) -> None:
            self.array[...] = self.layout.packed_views(buffer)[0]

    def prepared(fit: Fit, array: Any) -> Fit:
        fit.data = Stream(fit.member.rank, 8)
        fit.state = [Counter(array), fit.data]
        fit.options.pop("batch_size")
        fit.options["shuffle"] = False
        fit.more = [Tells()]

        def begin_epoch() -> None:
            fit.data.begin_epoch()
            array[0] += 1

        for epoch in range(MORE):
            fit.at[epoch, -1] = begin_epoch
            fit.at[epoch, END] = fit.data.end_epoch
        return fit

    first, dead = (
        prepared(fit, array)
        for fit, array in zip(fits(group, "dense", epochs=MORE), arrays, strict=False)
    )
    dead.at[2, 3] = dies(dead)
    there, go_on = threading.Event(), threading.Event()
    first.at[3, 2] = lambda: there.set() or go_on.wait(LIMIT)  # type: ignore[func-returns-value]
    for fit in (first, dead):
        fit.start(pool)
    new = prepared(replacement(group, dead, kind="dense", epochs=MORE), arrays[2])
    step, traced = new.model.train_step, count()

    def trace(data: Any) -> Any:
        assert new.model.is_told, "all callbacks have begun"
        next(traced)
        return step(data)

    new.model.train_step = trace
    assert there.wait(LIMIT)
    new.start(pool)
    group.wait_until(lambda inside: len(inside.calls.waiting.recovering) == 1)
    traced_before = next(traced)
    go_on.set()
    (_, state), (history, other) = [fit.done.result(LIMIT) for fit in (first, new)]
    check_alike([state, other])
    assert history.epoch == [4, 5]
    assert first.data.drawn == [*range(8 * MORE)]
    assert new.data.drawn == [*range(8 * 4, 8 * MORE)], "it neither repeats nor skips a batch"
    assert next(traced) - 1 == traced_before > 0, "nobody waits while it traces its step"
    assert new.data.epochs == first.data.epochs == MORE
    assert arrays[0] == arrays[2] == MORE


def test_a_loop_of_ones_own_heals_its_place_in_the_data(pool: ThreadPoolExecutor) -> None:
    group = LocalProcessGroup(2)
    x, y = images("dense")

    def loop(member: Member, place: Stream, model: Any, dies_at: int) -> Any:
        optimizer: Any = keras.optimizers.SGD(0.01, momentum=0.9)
        average_gradients(optimizer, member=member, min_results=1, timeout=PATIENCE, state=place)
        optimizer.build(model.trainable_variables)
        numbers = []
        while optimizer.iterations < 15:
            number = place.epochs
            place.epochs += 1
            if number == dies_at:
                kill(member)
                raise KilledError
            if number == 10 and member.rank == 0:  # the other has come
                group.until_one_is_back()
            with tf.GradientTape() as tape:
                rows = slice(2 * number, 2 * number + 2)
                loss = tf.reduce_mean((model(x[rows]) - y[rows]) ** 2)
            grads = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
            numbers.append((int(optimizer.iterations), place.epochs))
        return numbers

    members = group.join_all()
    models = [build("dense", 0) for _ in range(3)]
    calls = [
        pool.submit(loop, member, Stream(member.rank, 1), models[member.rank], dies_at)
        for member, dies_at in zip(members, (-1, 4), strict=True)
    ]
    with pytest.raises(KilledError):
        calls[1].result(LIMIT)
    group.wait_until(lambda inside: inside.rendezvous.sessions[1].why is not None)
    again = pool.submit(loop, group.join(1), Stream(1, 1), models[2], -1)
    survivor, replaced = calls[0].result(LIMIT), again.result(LIMIT)
    assert survivor == [(step, step) for step in range(1, 16)]
    healed = replaced[0][0]
    assert 5 <= healed <= 11
    assert replaced == [(step, step) for step in range(healed, 16)]
