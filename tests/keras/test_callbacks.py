"""`AverageWeights` and `AverageLogs` in several processes."""

import contextlib
import inspect
import logging
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from keras_programs import (
    BATCH,
    Place,
    build,
    images,
    in_threads,
    outcome,
    seed_initializers,
)
from process_groups import LocalProcessGroup, kill

import flatweights as fw
from flatweights.ray import CallsDifferError
from flatweights.server import FedAvgM

# Keras says so of a data set, unless it is told otherwise.
pytestmark = pytest.mark.filterwarnings("ignore:`shuffle=True` was passed")


def compiled(place: Place, kind: str = "dense", **options: Any) -> Any:
    import keras

    model = build(kind, seed=place.rank)
    # Most trainings here have a few steps: that costs less than a trace.
    model.compile(keras.optimizers.SGD(0.05), "mse", **{"run_eagerly": True} | options)
    return model


def few(place: Place, steps: int = 3) -> Any:
    """The member's parts of the first batches of `BATCH` samples, which all members share."""
    size = BATCH // place.size
    return batches(tuple(place.part(one)[: steps * size] for one in images("dense")), size)


def part(place: Place, kind: str = "dense") -> Any:
    """Unequal parts: rank k has k + 1 batches."""
    x, y = images(kind)
    begin = BATCH * sum(range(place.rank + 1))
    mine = slice(begin, begin + BATCH * (place.rank + 1))
    return x[mine], y[mine]


def batches(data: Any, size: int = BATCH) -> Any:
    """Return batches of ``size``: Keras begins with them in half of the time that arrays need."""
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(data).batch(size)


def weights_after(place: Place, epochs: int, every: int, unit: str) -> Any:
    from flatweights.keras import AverageWeights

    member = place.member()
    averaging = AverageWeights(every, unit, member=member)  # type: ignore[arg-type]
    model = compiled(place, "normalized")
    model.fit(batches(part(place)), epochs=epochs, verbose=0, callbacks=[averaging])
    return model.get_weights(), averaging.round.used  # type: ignore[union-attr]


def test_epochs_end_with_the_average_weighted_by_samples() -> None:
    replies = in_threads(2, weights_after, 3, 2, "epoch")
    model = compiled(Place(), "normalized")
    weights = model.get_weights()  # those of rank 0
    for epochs in (2, 1):  # every two, and at the end
        both = []
        for rank in range(2):
            model.set_weights(weights)
            model.fit(batches(part(Place("", rank, 2))), epochs=epochs, verbose=0)
            both.append(model.get_weights())
        weights = fw.average(both, [1.0, 2.0])
    assert not any(isinstance(reply, str) for reply in replies), replies
    for ours, used in replies:
        assert used == (0, 1)
        assert all(map(np.array_equal, ours, replies[0][0]))
        assert all(
            np.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(ours, weights, strict=True)
        )


def evaluating(hooks: tuple[str, ...]) -> Any:
    """Return a user's callback that evaluates the model at these places."""
    import keras

    class Evaluating(keras.callbacks.Callback):  # type: ignore[misc]
        def use(self, place: int, logs: Any = None) -> None:
            if place == 0:
                return
            self.model.evaluate(held, verbose=0)
            self.model.test_on_batch(*first)
            if place == 1:
                self.model.reset_metrics()

    for hook in hooks:
        setattr(Evaluating, hook, Evaluating.use)
    held = few(Place(), 1)
    (first,) = held
    return Evaluating()


EVALUATE_IN = "on_train_batch_begin", "on_train_batch_end", "on_epoch_end"


@pytest.mark.parametrize(
    ("unit", "expected"),
    [("batch", [BATCH, 6] * 2), ("epoch", [BATCH + 6] * 2)],
    ids=["batch", "epoch"],
)
def test_each_average_counts_the_samples_of_the_training_since_the_last_one(
    unit: Any, expected: list[int]
) -> None:
    from flatweights.keras import AverageWeights

    (member,) = LocalProcessGroup(1).join_all()
    average, counts = member.average_variables, list[float]()

    def noting(variables: Any, weight: float, **options: Any) -> Any:
        counts.append(weight)
        return average(variables, weight, **options)

    vars(member)["average_variables"] = noting
    data = batches(tuple(one[: BATCH + 6] for one in images("dense")))
    averaging = AverageWeights(1, unit, member=member)
    callbacks = [evaluating(EVALUATE_IN), averaging, evaluating(EVALUATE_IN)]
    compiled(Place()).fit(data, epochs=2, verbose=0, callbacks=callbacks)
    assert counts == expected


def weights_of_evaluated(place: Place, unit: str, hooks: tuple[str, ...]) -> Any:
    """Return the weights after a training that a user's callbacks interrupt at these places."""
    from flatweights.keras import AverageWeights

    every = 1 if unit == "epoch" else 3
    averaging = AverageWeights(every, unit, member=place.member())  # type: ignore[arg-type]
    model = compiled(place, run_eagerly=False)
    callbacks = [evaluating(hooks), averaging, evaluating(hooks)]
    x, y = part(place)
    options = {"verbose": 0, "shuffle": False, "callbacks": callbacks}
    for epochs in (2, 1):
        model.fit(x, y, len(x) // 3, epochs, **options)
    return model.get_weights()


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["epoch", "batch"])
def test_samples_of_a_users_evaluations_are_no_samples_of_the_training(unit: str) -> None:
    expected = in_threads(2, weights_of_evaluated, unit, ())
    found = in_threads(2, weights_of_evaluated, unit, EVALUATE_IN)
    for ours, alone in zip(found, expected, strict=True):
        assert all(map(np.array_equal, ours, alone))


def rounds_seen(place: Place, every: int) -> list[int]:
    """How many averages there have been after each execution of two batches."""
    import keras

    from flatweights.keras import AverageWeights

    averaging = AverageWeights(every, "batch", member=place.member())
    model, rounds, seen = compiled(place, steps_per_execution=2), [], []

    def note(batch: int, logs: Any) -> None:
        if averaging.round is not None and averaging.round not in rounds:
            rounds.append(averaging.round)
        seen.append(len(rounds))

    noting = keras.callbacks.LambdaCallback(on_train_batch_end=note)
    model.fit(few(Place(), 8), epochs=1, verbose=0, callbacks=[averaging, noting])
    return seen


def test_each_batch_of_an_execution_of_several_counts() -> None:
    import keras

    # Older versions of Keras tell the first batch of an execution, not the last one.
    tells_last = "end_step" in inspect.getsource(keras.Model.fit)
    assert in_threads(1, rounds_seen, 4) == [[0, 1, 1, 2] if tells_last else [0, 0, 1, 1]]


def validated(place: Place) -> Any:
    """The values that earlier callbacks see, later ones, `fit`, and a validation at the end."""
    import keras

    from flatweights.keras import AverageLogs, AverageWeights

    own: list[dict[str, float]] = []
    seen: list[dict[str, float]] = []

    def spy(values: list[dict[str, float]]) -> Any:
        return keras.callbacks.LambdaCallback(on_epoch_end=lambda _, logs: values.append({**logs}))

    member = place.member()
    model = compiled(place, metrics=["mae"])
    ours = [AverageLogs(member=member), AverageWeights(member=member)]
    early = keras.callbacks.EarlyStopping("loss", min_delta=10.0)  # at the second epoch
    callbacks = [spy(own), *ours, spy(seen), early]
    x, y = part(place)
    held = batches((x[: TESTED[place.rank]], y[: TESTED[place.rank]]))
    options = {"verbose": 0, "callbacks": callbacks, "validation_data": held}
    fit = model.fit(batches((x, y)), epochs=5, **options)
    local = model.evaluate(held, verbose=0, return_dict=True)
    return own, seen, fit.history, local


TESTED = (8, 4)  # samples of the validation, by rank


def test_callbacks_see_the_logs_of_all_and_decide_alike() -> None:
    replies = in_threads(2, validated)
    assert not any(isinstance(reply, str) for reply in replies), replies
    trained = [len(part(Place("", rank, 2))[0]) for rank in range(2)]
    for _, seen, history, _ in replies:
        assert len(seen) == 2
        assert seen == replies[0][1]
        assert {name: [epoch[name] for epoch in seen] for name in seen[0]} == history
        # The validation is of the averaged weights, which are the model's at the end.
        for name in ("loss", "mae"):
            mean = np.average([local[name] for *_, local in replies], weights=TESTED)
            assert np.isclose(history[f"val_{name}"][-1], mean, rtol=1e-5)
            mean = np.average([own[-1][name] for own, *_ in replies], weights=trained)
            assert np.isclose(history[name][-1], mean, rtol=1e-5)


def diloco(place: Place) -> Any:
    from flatweights.keras import AverageWeights

    member = place.member()
    outer = partial(FedAvgM, momentum=0.9, learning_rate=0.7, nesterov=True)
    averaging = AverageWeights(2, "batch", member=member, outer=outer)
    model = compiled(place)
    model.fit(few(place, 4), verbose=0, callbacks=[averaging])
    assert averaging.outer is not None
    return model.get_weights(), averaging.outer.steps, averaging.outer.state["FedAvgM.nesterov"]


def test_an_outer_optimizer_steps_once_for_each_average() -> None:
    replies = in_threads(2, diloco)
    assert not any(isinstance(reply, str) for reply in replies), replies
    model = compiled(Place())
    outer = FedAvgM(
        fw.FlatWeights(dict(zip("abcd", model.get_weights(), strict=True))),
        momentum=0.9,
        learning_rate=0.7,
        nesterov=True,
    )
    for begin in range(0, 4, 2):
        results = []
        for rank in range(2):
            place = Place("", rank, 2)
            model.set_weights(list(outer.weights.values()))
            model.fit(few(place, 4).skip(begin).take(2), verbose=0)
            results.append(fw.FlatWeights(dict(zip("abcd", model.get_weights(), strict=True))))
        outer.step(fw.average(results))
    for ours, steps, nesterov in replies:
        assert (steps, nesterov) == (2, 1)
        assert all(map(np.array_equal, ours, replies[0][0]))
        pairs = zip(ours, outer.weights.values(), strict=True)
        assert all(np.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in pairs)


def with_models(function: Callable[[Place, Any, Any], Any]) -> list[Any]:
    """Return the results of ``function(place, member, model)`` in two members."""
    models = [build("dense", seed=rank) for rank in range(2)]  # a thread would take another's seed

    def call(member: Any) -> Any:
        with member:
            return function(Place("", member.rank, 2), member, models[member.rank])

    with ThreadPoolExecutor(2) as pool:
        return [*pool.map(call, LocalProcessGroup(2).join_all())]


@pytest.mark.slow
def test_an_outer_optimizer_that_was_given_goes_on_in_the_next_fit() -> None:
    import keras

    from flatweights.keras import AverageWeights
    from flatweights.tensorflow import TensorFlowVariables

    def weights_after(fits: int, place: Place, member: Any, model: Any) -> Any:
        model.compile(keras.optimizers.SGD(0.05), "mse")
        start = TensorFlowVariables(model, trainable_only=True).get_weights()
        outer = FedAvgM(start, momentum=0.5)
        averaging = AverageWeights(member=member, outer=outer)
        for _ in range(fits):
            options = {"epochs": 4 // fits, "shuffle": False, "verbose": 0}
            model.fit(*part(place), BATCH, callbacks=[averaging], **options)
        return model.get_weights()

    one, two = (with_models(partial(weights_after, fits)) for fits in (1, 2))
    for weights in (one[1], *two):
        assert all(map(np.array_equal, one[0], weights))


@pytest.mark.parametrize(
    ("dies", "averages"),
    [
        ("before", "weights"),
        ("in the broadcast", "gradients"),
        pytest.param("in the broadcast", "weights", marks=pytest.mark.slow),
    ],
)
def test_members_start_from_those_of_another_if_rank_0_dies(dies: str, averages: str) -> None:
    import keras

    from flatweights.keras import AverageLogs, AverageWeights, average_gradients

    models = [build("dense", seed=rank) for rank in range(3)]
    expected, first = models[1].get_weights(), list[Any]()

    def trained(member: Any) -> Any:
        model = models[member.rank]
        optimizer: Any = keras.optimizers.SGD(0.05, momentum=0.5)
        averaging: Any = AverageWeights(member=member, min_results=2)
        if averages == "gradients":
            average_gradients(optimizer, member=member, min_results=2)
            averaging = AverageLogs()
        model.compile(optimizer, "mse", run_eagerly=True)

        def begin(batch: int, logs: Any) -> None:
            if batch == 0:
                first.append(model.get_weights())

        look = keras.callbacks.LambdaCallback(on_train_batch_begin=begin)
        model.fit(few(Place(), 2), verbose=0, callbacks=[averaging, look])
        return model.get_weights()

    def die(*_: Any, **options: Any) -> None:
        kill(members[0])
        raise RuntimeError("killed")

    members = LocalProcessGroup(3).join_all()
    if dies == "before":
        kill(members[0])
    vars(members[0])["broadcast_variables"] = die
    with ThreadPoolExecutor(3) as threads:
        calls = [threads.submit(outcome, trained, member) for member in members]
        killed, *ended = [call.result(600) for call in calls]
    assert isinstance(killed, str)
    assert not any(isinstance(one, str) for one in ended), ended
    assert all(map(np.array_equal, *ended))
    for weights in first:
        assert all(map(np.array_equal, weights, expected))


@pytest.mark.parametrize(
    ("every", "kind"),
    [pytest.param(1, "", marks=pytest.mark.slow), (2, ""), (1, "of layers"), (1, "outer")],
)
def test_members_end_with_the_average_of_their_moving_averages(every: int, kind: str) -> None:
    """With an average after the epoch, or none; such an average is no step of an outer optimizer.

    An optimizer that consists of others has moving averages if one of these has.
    """
    import keras

    from flatweights.keras import AverageWeights

    if kind == "of layers" and not hasattr(keras.optimizers, "MultiOptimizer"):
        pytest.skip("this Keras has none")

    def trained(place: Place, model: Any, callbacks: Any) -> Any:
        averaged = keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.5)
        if kind == "of layers":
            chosen = keras.optimizers.OptimizerMap(averaged)
            averaged = keras.optimizers.MultiOptimizer(chosen)
        model.compile(averaged, "mse", run_eagerly=True)
        model.fit(batches(part(place)), verbose=0, callbacks=callbacks)
        return model.get_weights()

    def member_trained(place: Place, member: Any, model: Any) -> Any:
        outer = partial(FedAvgM, momentum=0.9) if kind == "outer" else None
        averaging = AverageWeights(every, member=member, outer=outer)
        weights = trained(place, model, [averaging])
        assert averaging.outer is None or averaging.outer.steps == 1
        return weights

    alone = [trained(Place("", rank, 2), build("dense", seed=0), []) for rank in range(2)]
    expected = fw.average(alone, [1.0, 2.0])
    replies = with_models(member_trained)
    assert all(map(np.array_equal, *replies))
    pairs = zip(replies[0], expected, strict=True)
    assert all(np.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in pairs)


def test_weights_that_one_member_gets_between_build_and_fit_reach_all() -> None:
    import keras

    from flatweights.keras import AverageLogs, average_gradients

    def trained(place: Place, member: Any, model: Any) -> Any:
        optimizer = average_gradients(keras.optimizers.SGD(0.0), member=member)
        model.compile(optimizer, "mse", run_eagerly=True)
        model.optimizer.build(model.trainable_variables)
        if member.rank == 0:
            model.set_weights([weights + 1 for weights in model.get_weights()])
        model.fit(few(place), verbose=0, callbacks=[AverageLogs()])
        return model.get_weights()

    expected = [weights + 1 for weights in build("dense", seed=0).get_weights()]
    for weights in with_models(trained):
        assert all(map(np.array_equal, weights, expected))


def test_every_fit_with_one_callback_list_begins_with_the_same_weights() -> None:
    import keras

    from flatweights.keras import AverageLogs, average_gradients

    def trained(place: Place, member: Any, model: Any) -> Any:
        optimizer = average_gradients(keras.optimizers.SGD(0.05), member=member)
        model.compile(optimizer, "mse", run_eagerly=True)
        own = keras.callbacks.CallbackList([AverageLogs()], True, model=model, epochs=1)
        for _ in range(2):
            model.set_weights([weights + place.rank for weights in model.get_weights()])
            model.fit(few(place), verbose=0, callbacks=own)
        return model.get_weights()

    first, second = with_models(trained)
    assert all(map(np.array_equal, first, second))


def fail(*_: Any, **__: Any) -> None:
    raise KeyError("of a user's own")


def trained_by_two(
    kept: str, place: Place, member: Any, model: Any, fits: int = 2, *, fails: bool = False
) -> Any:
    """Return the weights and slots after one or two `fit` of a model that two optimizers train.

    Before the second `fit`, a member changes what the second optimizer trains. With ``fails``, it
    changes that optimizer's slots, and an exception ends the first `fit`, which has a callback.
    """
    import keras
    import tensorflow as tf

    from flatweights.keras import AverageLogs, average_gradients

    class Halves(keras.Model):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x) - y) ** 2)
            variables = model.trainable_variables
            grads = tape.gradient(loss, variables)
            for k, optimizer in enumerate(optimizers):
                optimizer.apply(grads[k::2], variables[k::2])
            return {"loss": loss}

    halves = Halves()
    halves.built = True
    optimizers = [
        average_gradients(keras.optimizers.Adam(0.01, name=name), member=member)
        for name in ("even", "odd")
    ]
    callbacks = [AverageLogs(member=member)]
    if kept == "list":
        halves.both = optimizers
    elif kept == "dict":
        halves.both = dict(enumerate(optimizers))
    else:
        halves.even, halves.odd = optimizers
    if kept == "one is the model's":
        halves.compile(optimizers[0], run_eagerly=True)
        callbacks = []
        halves.whole = model if fails else None  # with a callback, its variables are built
    else:
        halves.compile()
    data = few(place, 2)
    for fit in range(fits):
        if fit > 0 and fails:
            for slot in optimizers[1].variables[2:]:  # after the iterations and the rate
                slot.assign(slot + place.rank)
        elif fit > 0:
            weights = enumerate(model.get_weights())
            model.set_weights([one + place.rank * (k % 2) for k, one in weights])
        elif fails:
            own = [AverageLogs(member=member), keras.callbacks.LambdaCallback(on_epoch_end=fail)]
            with pytest.raises(KeyError, match="of a user"):
                halves.fit(data, verbose=0, callbacks=own)
            continue
        halves.fit(data, verbose=0, callbacks=callbacks)
    return [*model.get_weights(), *(one.numpy() for o in optimizers for one in o.variables)]


@pytest.mark.parametrize(
    "kept",
    [
        pytest.param("attributes", marks=pytest.mark.slow),
        "list",
        pytest.param("dict", marks=pytest.mark.slow),
    ],
)
def test_every_fit_gives_each_of_several_optimizers_the_same_start(kept: str) -> None:
    first, second = with_models(partial(trained_by_two, kept))
    assert all(map(np.array_equal, first, second))


def test_of_several_optimizers_that_of_compile_has_slots_of_its_own_variables_alone() -> None:
    import keras
    import tensorflow as tf

    from flatweights.keras import AverageLogs, average_gradients

    class Halves(keras.Model):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self.one(data[0]) - self.other(data[0]) - data[1]) ** 2)
            halves = self.one.trainable_variables, self.other.trainable_variables
            for optimizer, half, grads in zip(
                both, halves, tape.gradient(loss, halves), strict=True
            ):
                optimizer.apply(grads, half)
            return {"loss": loss}

        def call(self, x: Any) -> Any:
            return self.one(x) - self.other(x)

    [member] = LocalProcessGroup(1).join_all()
    made = keras.optimizers.SGD(use_ema=True), keras.optimizers.SGD()  # averages replace weights
    both = [average_gradients(one, member=member) for one in made]
    halves = Halves()
    halves.one, halves.other, halves.second = keras.layers.Dense(1), keras.layers.Dense(1), both[1]
    halves(np.ones((1, 2)))
    halves.compile(both[0], run_eagerly=True)
    data = np.ones((8, 2)), np.ones((8, 1))
    halves.fit(*data, 4, epochs=2, verbose=0, callbacks=[AverageLogs(member=member)])
    slots = both[0].variables[2:]  # after the iterations and the rate
    assert [one.shape for one in slots] == [(2, 1), (1,)]


@pytest.mark.parametrize("fails", [pytest.param(False, marks=pytest.mark.slow), True])
def test_without_callbacks_a_second_optimizer_compares_its_start_in_every_fit(fails: bool) -> None:
    train = partial(outcome, partial(trained_by_two, "one is the model's", fails=fails))
    for reply in with_models(train):
        assert "ValueError: average_gradients: at the first step expected the variables" in reply
        assert "got other values in ranks [1]" in reply


@pytest.mark.parametrize(
    "kept", [pytest.param("attributes", marks=pytest.mark.slow), "one is the model's"]
)
def test_a_shared_member_leaves_after_a_fit_by_several_optimizers(
    kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flatweights.keras import _member_handle

    [member] = LocalProcessGroup(1).join_all()
    monkeypatch.setattr(_member_handle, "join", lambda: member)
    trained_by_two(kept, Place("", 0, 1), None, build("dense", seed=0), fits=1)
    assert member.is_over


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras saves
def test_weights_that_a_callback_sets_when_the_training_begins_reach_all(tmp_path: Path) -> None:
    import keras

    from flatweights.keras import AverageLogs, average_gradients

    def trained(epochs: tuple[int, int], place: Place, member: Any, model: Any) -> Any:
        optimizer = average_gradients(keras.optimizers.SGD(0.05), member=member)
        model.compile(optimizer, "mse", run_eagerly=True)
        restored = build("dense", seed=7 + member.rank)  # by a training that was broken off
        keeper = keras.callbacks.BackupAndRestore(tmp_path / f"{epochs} {member.rank}")
        keeper.set_model(restored)
        restored.compile(keras.optimizers.SGD(0.05), "mse")
        restored.optimizer.build(restored.trainable_variables)
        keeper.on_epoch_end(epochs[member.rank] - 1)
        keeper.set_model(model)
        options = {"epochs": 3, "verbose": 0, "callbacks": [AverageLogs(), keeper]}
        model.fit(few(place, 3), **options)
        return model.get_weights(), int(optimizer.iterations)

    first, second = with_models(partial(trained, (2, 2)))
    assert first[1] == second[1] == 3
    assert all(map(np.array_equal, first[0], second[0]))
    for reply in with_models(partial(outcome, partial(trained, (2, 1)))):
        assert "expected all members to begin with the same epoch, got rank 0 begins " in reply
        assert "with epoch 2, rank 1 begins with epoch 1" in reply


def test_callbacks_of_a_fit_do_nothing_in_an_evaluation_of_the_users() -> None:
    import keras

    from flatweights.keras import AverageLogs, AverageWeights

    def interrupt(batch: int, logs: Any) -> None:
        raise KeyboardInterrupt

    group = LocalProcessGroup(1)
    (member,) = group.join_all()
    model = compiled(Place())
    stop = keras.callbacks.LambdaCallback(on_train_batch_end=interrupt)
    callbacks = [AverageWeights(member=member), AverageLogs(member=member), stop]
    for _ in range(2):  # before a fit, and after one that was broken off in its epoch
        before = group.last_call()
        model.evaluate(few(Place()), verbose=0, callbacks=callbacks)
        assert group.last_call() == before
        with pytest.raises(KeyboardInterrupt):
            model.fit(few(Place()), verbose=0, callbacks=callbacks)
    member.leave()


def test_logs_that_are_no_numbers_are_left_as_they_are() -> None:
    texts = {"text": "a", "bytes": b"1", "nothing": None, "list": [1], "complex": 1j}
    models = [compiled(Place()) for _ in range(3)]
    logs: Any = {"loss": 1.0, "count": 2, "flag": True, **texts}
    with ThreadPoolExecutor(3) as pool:
        members = LocalProcessGroup(3).join_all()
        replies = pool.map(logged, members, models, [logs] * 3, [False] * 3, [{}] * 3)
        assert [*replies] == [(logs, False)] * 3


def test_arrays_of_the_models_metrics_are_averaged_and_others_are_not() -> None:
    import keras

    models = [keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)]) for _ in range(2)]
    for model in models:
        metrics = [keras.metrics.F1Score(threshold=0.5, name="f1")]
        model.compile("sgd", "mse", metrics=metrics, run_eagerly=True)
        model.train_on_batch(np.ones((4, 2)), np.ones((4, 3)))
    own = {"f1": np.array([0.0, 0.5, 1.0], np.float32), "val_f1": np.array([0.5], np.float32)}
    drawn = np.array([1, 2, 3])
    logs: list[Any] = [
        {"f1": rank * own["f1"], "val_f1": rank * own["val_f1"], "drawn": drawn[rank:]}
        for rank in range(2)
    ]
    with ThreadPoolExecutor(2) as pool:
        members = LocalProcessGroup(2).join_all()
        replies = pool.map(logged, members, models, logs, [False] * 2, [{}] * 2)
        for rank, (told, _) in enumerate(replies):
            assert told["f1"].tolist() == [0.0, 0.25, 0.5]
            assert told["val_f1"].tolist() == [0.25]
            assert told["drawn"].tolist() == drawn[rank:].tolist()


def unequal(place: Place, way: str) -> Any:
    import keras

    from flatweights.keras import AverageLogs, AverageWeights, average_gradients

    member = place.member()
    optimizer = keras.optimizers.SGD(0.05)
    callbacks = [AverageLogs(member=member)] if way == "logs" else []
    if way == "weights":
        callbacks = [AverageWeights(1, "batch", member=member)]
    else:
        average_gradients(optimizer, member=member)
    model = build("dense", 0)
    model.compile(optimizer, "mse", run_eagerly=way != "gradients")
    model.fit(*part(place), BATCH, epochs=2, verbose=0, callbacks=callbacks)


@pytest.mark.parametrize(
    ("way", "first"),
    [
        pytest.param(
            *("logs", "rank 0 has ended its epoch, rank 1 has not. All members need"),
            marks=pytest.mark.slow,
        ),
        ("gradients", "rank 1 is at a step of its epoch, rank 0 has ended its training. All"),
        ("weights", "rank 1 averages its weights, rank 0 has ended its training. "),
    ],
    ids=["logs", "gradients", "weights"],
)
def test_unequal_parts_are_an_error_in_all_members(way: str, first: str) -> None:
    for reply in in_threads(2, unequal, way):
        cause = f"CallsDifferError: {first}"
        # Without a callback TensorFlow's error comes first.
        assert cause in reply if way == "gradients" else reply.startswith(cause), reply
        assert "as many batches in an epoch" in reply, reply


def after_an_error(place: Place) -> Any:
    """A fit on unequal parts, then one on equal parts."""
    import keras
    import tensorflow as tf

    import flatweights.keras as fwk

    member = place.member()
    model = build("dense", 0)
    optimizer = fwk.average_gradients(keras.optimizers.SGD(0.05, momentum=0.9), member=member)
    model.compile(optimizer, "mse", run_eagerly=True)
    logs = [fwk.AverageLogs(member=member)]
    with pytest.raises((ValueError, tf.errors.OpError), match="as many batches"):
        model.fit(few(place, 2 if place.rank else 1), verbose=0, callbacks=logs)
    if place.rank:  # the next one starts from the weights of rank 0
        model.set_weights([2 * weights for weights in model.get_weights()])
    model.fit(few(place, 2), verbose=0, callbacks=logs)
    return model.get_weights()


def test_after_an_error_in_all_members_the_next_fit_is_whole() -> None:
    first, second = in_threads(2, after_an_error)
    assert not isinstance(first, str), first
    assert not isinstance(second, str), second
    assert all(map(np.array_equal, first, second))


def unfinished(
    place: Place, where: str, terms: dict[str, Any], *, compiled: bool = False
) -> tuple[Any, Any]:
    """Return a model, and its data, after a `fit` that an exception in a callback has ended.

    Args:
        place: The member.
        where: When the exception comes.
        terms: What the optimizer gets. `AverageLogs` gets the terms of the training.
        compiled: Whether the step is.
    """
    import keras

    from flatweights.keras import AverageLogs, average_gradients

    member = place.member()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer = average_gradients(keras.optimizers.SGD(0.1), member=member, **terms)
    model.compile(optimizer, "mse", run_eagerly=not compiled)
    data = np.full((4, 2), 1.0 + place.rank), np.ones((4, 1))
    logs = AverageLogs(member=member, timeout=60, min_results=2)
    fails = keras.callbacks.LambdaCallback(**{where: fail})
    with pytest.raises(KeyError, match="of a user"):
        model.fit(*data, 2, verbose=0, callbacks=[logs, fails])
    return model, data


def after_an_unfinished_fit(where: str, then: str, place: Place) -> Any:
    from flatweights.keras._gradients import averaging_of

    terms = {"min_results": 2} if then == "refused" else {}
    model, data = unfinished(place, where, terms, compiled=then == "compiled loop")
    if then == "refused":
        with pytest.raises(ValueError, match="expected the callback AverageLogs or AverageWeights"):
            model.fit(*data, 2, verbose=0)
    elif then == "fit":
        model.fit(*data, 2, verbose=0)
    else:
        model.optimizer.build(model.trainable_variables)
    averaging = averaging_of(model)
    assert averaging is not None
    expected = 2 if then == "refused" else None
    assert averaging.handle.terms == {"timeout": None, "min_results": expected}
    model.train_on_batch(*data)
    model.train_function(iter([data]))
    return model.get_weights()


@pytest.mark.parametrize(
    ("where", "then"),
    [
        pytest.param("on_train_begin", "refused", marks=pytest.mark.slow),
        ("on_train_batch_end", "refused"),
        ("on_train_batch_end", "fit"),
        ("on_train_batch_end", "loop"),
        pytest.param("on_train_batch_end", "compiled loop", marks=pytest.mark.slow),
    ],
)
def test_a_fit_that_an_exception_has_ended_counts_no_more(where: str, then: str) -> None:
    """Neither its progress nor the terms that its callbacks had."""
    first, second = in_threads(2, partial(after_an_unfinished_fit, where, then))
    assert not isinstance(first, str), first
    assert not isinstance(second, str), second
    assert all(map(np.array_equal, first, second))


def test_members_that_differ_after_an_unfinished_fit_are_an_error_in_the_next() -> None:
    def train(place: Place) -> None:
        model, data = unfinished(place, "on_train_batch_end", {})
        model.set_weights([one + place.rank for one in model.get_weights()])
        model.fit(*data, 2, verbose=0)

    for reply in in_threads(2, train):
        assert "at the first step expected the variables" in reply
        assert "got other values in ranks [1]" in reply


def test_a_fit_without_an_epoch_may_follow_other_iterations() -> None:
    """Such as those of a checkpoint that is loaded."""
    from flatweights.keras import average_gradients

    (member,) = LocalProcessGroup(1).join_all()
    model = compiled(Place())
    model.compile(average_gradients(model.optimizer, member=member), "mse", run_eagerly=True)
    model.fit(few(Place()), verbose=0)
    model.optimizer.iterations.assign(1000)
    model.fit(few(Place()), verbose=0, epochs=3, initial_epoch=3)
    model.fit(few(Place()), verbose=0)


OF_STOPPED = 4  # the steps of an epoch


def stopped(place: Place, averages: str, make: str, is_first: bool, **terms: Any) -> Any:
    """Return epochs, batches and weights of a member, after one has stopped in the middle.

    Before that training, there is another one, in which an error comes after such a stop.
    """
    import keras

    from flatweights.keras import AverageLogs, AverageWeights, average_gradients

    class Stops(keras.callbacks.Callback):  # type: ignore[misc]
        fails, epoch, batches = averages != "epoch", 0, 0

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.batches += 1
            if place.rank == 1 and make == "limit" and (self.epoch, batch) == (1, 1):
                self.model.stop_training = True
            if self.fails and self.epoch == 1 and batch >= 2:
                raise KeyError("of both")

    member = place.member()
    optimizer = keras.optimizers.SGD(0.05)
    callbacks: list[Any] = [AverageLogs(member=member)]
    if averages == "gradients":
        average_gradients(optimizer, member=member, **terms)
    else:
        callbacks.insert(0, AverageWeights(1, averages, member=member, nonfinite="propagate"))  # type: ignore[arg-type]
    model = build("dense", place.rank)
    # As many steps as here cost less than a trace.
    model.compile(optimizer, "mse", run_eagerly=True)
    x, y = (place.part(one)[: OF_STOPPED * BATCH // 2] for one in images("dense"))
    if make == "NaN" and place.rank == 1:
        y[BATCH // 2] = np.nan
    stops, ends = Stops(), [keras.callbacks.TerminateOnNaN()] if make == "NaN" else []
    callbacks = [stops, *ends, *callbacks] if is_first else [*callbacks, *ends, stops]
    made = keras.callbacks.CallbackList(callbacks, True, model=model, epochs=4, steps=OF_STOPPED)
    own = [*made.callbacks]
    given = made if averages == "batch" else callbacks
    fit = partial(model.fit, batches((x, y), BATCH // 2), epochs=4, verbose=0)
    if stops.fails:
        with pytest.raises(KeyError) if make == "limit" else contextlib.nullcontext():
            fit(callbacks=given)
        stops.fails, stops.batches = False, 0
        model.set_weights([np.ones_like(weights) for weights in model.get_weights()])
    history = fit(callbacks=given)
    assert made.callbacks == own
    return history.epoch, stops.batches, model.get_weights()


@pytest.mark.parametrize(
    ("averages", "make", "is_first", "terms"),
    [
        ("gradients", "NaN", False, {}),
        ("gradients", "limit", True, {"min_results": 1, "timeout": 300.0}),
        pytest.param("batch", "limit", False, {}, marks=pytest.mark.slow),
    ],
)
def test_a_stop_of_one_member_within_an_epoch_stops_all_at_its_end(
    averages: str, make: str, is_first: bool, terms: dict[str, Any]
) -> None:
    replies = in_threads(2, partial(stopped, **terms), averages, make, is_first)
    assert not any(isinstance(reply, str) for reply in replies), replies
    epochs = [0] if make == "NaN" else [0, 1]
    for ended, batches, weights in replies:
        assert ended == epochs
        assert batches == len(epochs) * OF_STOPPED
        for ours, theirs in zip(weights, replies[0][2], strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_a_member_that_others_meet_after_epochs_only_stops_at_once() -> None:
    replies = in_threads(2, stopped, "epoch", "limit", True)
    assert not any(isinstance(reply, str) for reply in replies), replies
    assert [reply[:2] for reply in replies] == [([0, 1], 2 * OF_STOPPED), ([0, 1], OF_STOPPED + 2)]


def test_the_order_of_callbacks_is_that_of_the_fit_not_of_other_lists() -> None:
    import keras

    from flatweights.keras import AverageLogs

    class Holder(keras.callbacks.Callback):  # type: ignore[misc]
        """A callback that holds another, whose order is its own matter."""

        def __init__(self, held: Any) -> None:
            super().__init__()
            self.held = held

        def on_train_begin(self, logs: Any = None) -> None:
            self.held.set_params(self.params)
            self.held.set_model(self.model)
            self.held.on_train_begin(logs)

    (member,) = LocalProcessGroup(1).join_all()
    early, history = keras.callbacks.EarlyStopping("loss"), keras.callbacks.History()
    with member:
        model, data = compiled(Place()), few(Place(), 1)
        logs = AverageLogs(member=member)
        kept = [early, logs, history]  # not a list of a fit
        own = keras.callbacks.CallbackList([logs, early, history], model=model, epochs=1, steps=8)
        for callbacks in ([logs, early, history], own, [early, Holder(logs)]):
            model.fit(data, verbose=0, callbacks=callbacks)
        with pytest.raises(ValueError, match="AverageLogs: expected before EarlyStopping"):
            model.fit(data, verbose=0, callbacks=kept)
        own.callbacks.reverse()
        with pytest.raises(ValueError, match="AverageLogs: expected before EarlyStopping"):
            model.fit(data, verbose=0, callbacks=own)


def test_wrong_lists_of_callbacks_raise_before_the_training() -> None:
    import keras

    from flatweights.keras import AverageLogs, AverageWeights, Report, average_gradients

    class ReportElsewhere(Report):
        def on_train_begin(self, logs: Any = None) -> None:
            """Ray Train is not here."""

    # Older versions of Keras have no OrbaxCheckpoint.
    class Orbax(getattr(keras.callbacks, "OrbaxCheckpoint", keras.callbacks.ModelCheckpoint)):  # type: ignore[misc]
        def __init__(self, *, best: bool) -> None:
            """Without the library that writes the files."""
            keras.callbacks.Callback.__init__(self)
            self.save_best_only = best

    early = keras.callbacks.EarlyStopping("loss")
    restores = keras.callbacks.EarlyStopping("loss", restore_best_weights=True)
    best = keras.callbacks.ModelCheckpoint("best.keras", "loss", save_best_only=True)
    last = keras.callbacks.ModelCheckpoint("last.keras")
    resumes = keras.callbacks.BackupAndRestore("backup")
    swaps = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    wrong: list[tuple[list[Any], str]] = [
        ([early, AverageLogs()], "expected before EarlyStopping in the list of callbacks"),
        ([last, best, AverageLogs()], "expected before ModelCheckpoint"),
        ([AverageLogs(), AverageLogs()], "expected one in the list of callbacks, got several"),
        ([ReportElsewhere(), AverageLogs()], "expected before ReportElsewhere in the list"),
        ([last, AverageWeights()], "AverageWeights: expected before ModelCheckpoint"),
        ([restores, AverageWeights()], "AverageWeights: expected before EarlyStopping"),
        ([Orbax(best=False), AverageWeights()], "AverageWeights: expected before Orbax"),
        ([Orbax(best=True), AverageLogs()], "AverageLogs: expected before Orbax"),
        ([resumes, AverageWeights()], "AverageWeights: expected before BackupAndRestore"),
        ([swaps, AverageWeights()], "AverageWeights: expected before SwapEMAWeights"),
        ([AverageWeights(outer=FedAvgM), resumes], "expected no BackupAndRestore in the list"),
        ([early], "expected the callback AverageLogs or AverageWeights in fit"),
    ]
    model = compiled(Place())
    model.compile(average_gradients(keras.optimizers.SGD(), min_results=1), "mse")
    before, data = model.get_weights(), few(Place(), 1)
    for callbacks, message in wrong:
        with pytest.raises(ValueError, match=message):
            model.fit(data, verbose=0, callbacks=callbacks)
    assert all(map(np.array_equal, model.get_weights(), before))


def test_weights_among_the_slots_are_averaged_too_or_refused() -> None:
    import keras

    from flatweights.keras import AverageWeights

    kind = getattr(keras.optimizers, "ScheduleFreeAdamW", None)
    if kind is None:
        pytest.skip("this Keras has no ScheduleFreeAdamW")
    (member,) = LocalProcessGroup(1).join_all()
    with member:
        for make in (kind, lambda: keras.optimizers.LossScaleOptimizer(kind())):
            model = compiled(Place())
            model.compile(make(), "mse")
            data = few(Place(), 1)
            with pytest.raises(ValueError, match="expected include_optimizer=True with ScheduleFr"):
                model.fit(data, verbose=0, callbacks=[AverageWeights(member=member)])
            averaging = AverageWeights(member=member, include_optimizer=True)
            model.fit(data, verbose=0, callbacks=[averaging])


def test_members_that_may_be_late_may_have_an_optimizer_of_their_own() -> None:
    import keras
    import tensorflow as tf

    from flatweights.keras import AverageWeights

    class Own(keras.Sequential):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x) - y) ** 2)
            self.own.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    (member,) = LocalProcessGroup(1).join_all()
    model = Own([keras.Input((8,)), keras.layers.Dense(1)])
    model.own = keras.optimizers.SGD()
    model.own.build(model.trainable_variables)
    model.compile(optimizer=None)
    averaging = AverageWeights(member=member, min_results=1)
    with member:
        model.fit(few(Place(), 1), verbose=0, callbacks=[averaging])
    assert averaging.round is not None


def test_members_that_may_be_late_need_a_model_that_is_built() -> None:
    import keras

    from flatweights.keras import AverageWeights

    (member,) = LocalProcessGroup(1).join_all()

    class Grows(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.scale = keras.layers.BatchNormalization(center=False, scale=False)
            self.dense = keras.layers.Dense(1)
            self.dense.build((None, 8))
            self.built = True

        def call(self, inputs: Any) -> Any:
            return self.dense(self.scale(inputs))

    data = few(Place(), 1)
    with member:
        for model in (keras.Sequential([keras.layers.Dense(1)]), Grows()):
            model.compile("sgd", "mse", run_eagerly=True)
            with pytest.raises(ValueError, match=r"^min_results: expected a model .*built before"):
                model.fit(data, verbose=0, callbacks=[AverageWeights(member=member, min_results=1)])


def test_an_optimizer_whose_step_was_traced_before_averages_or_raises() -> None:
    from flatweights.keras import AverageLogs, average_gradients

    group = LocalProcessGroup(1)
    (member,) = group.join_all()
    for callbacks in ([AverageLogs()], []):
        model = compiled(Place(), run_eagerly=False)
        data, steps = few(Place()), 3
        model.fit(data, verbose=0)
        average_gradients(model.optimizer, member=member)
        before = group.last_call()
        if callbacks:
            model.fit(data, verbose=0, callbacks=callbacks)
            assert group.last_call() >= before + steps
        else:
            with pytest.raises(RuntimeError, match="this fit has averaged nothing"):
                model.fit(data, verbose=0)
            model.fit(data, verbose=0, epochs=1, initial_epoch=1)


@pytest.mark.slow
def test_members_that_train_alone_are_warned(caplog: pytest.LogCaptureFixture) -> None:
    import keras

    from flatweights.keras import AverageLogs, AverageWeights, average_gradients

    def fit(member: Any, more: list[Any], of_the_model: bool) -> None:
        callbacks = [*more, AverageLogs(member=member)]
        model = compiled(Place())
        if of_the_model:  # for a `train_step` of a user's own
            model.critic = average_gradients(keras.optimizers.SGD(), member=member)
        model.fit(*images("dense"), verbose=0, callbacks=callbacks)

    cases: list[tuple[list[Any], bool]] = [([], False), ([AverageWeights], False), ([], True)]
    for others, of_the_model in cases:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "flatweights"), ThreadPoolExecutor(2) as pool:
            members = LocalProcessGroup(2).join_all()
            mores = [[kind(member=member) for kind in others] for member in members]
            done = [
                pool.submit(fit, *one, of_the_model) for one in zip(members, mores, strict=True)
            ]
            for one in done:
                one.result(300)
        assert ("each member trains alone" in caplog.text) == (not others and not of_the_model)


def test_logs_that_sample_weights_or_masks_weight_are_those_of_all_samples() -> None:
    import keras

    from flatweights.keras import AverageLogs

    rng = np.random.default_rng(0)
    x = rng.integers(0, 3, (30, 5))  # 0 is masked
    y = rng.integers(0, 2, (30, 5, 1))
    weight = rng.exponential(size=(30, 5)) * np.linspace(0.01, 1, 30)[:, None]

    def model() -> Any:
        seed_initializers(3)
        layers = [keras.layers.Embedding(3, 4, mask_zero=True), keras.layers.Dense(1, "sigmoid")]
        made = keras.Sequential([keras.Input((5,)), *layers])
        metrics = {"metrics": ["binary_accuracy"], "weighted_metrics": ["mse", "binary_accuracy"]}
        rate = keras.optimizers.SGD(0.0)
        made.compile(rate, "binary_crossentropy", run_eagerly=True, **metrics)
        return made

    def fit(member: Any, network: Any, mine: slice) -> Any:
        data, logs = batches((x[mine], y[mine], weight[mine]), 10), AverageLogs(member=member)
        history = network.fit(data, verbose=0, validation_data=data, callbacks=[logs])
        return {name: values[0] for name, values in history.history.items()}

    expected = model().evaluate(x, y, 10, 0, sample_weight=weight, return_dict=True)
    assert expected.keys() == {"loss", "mse", "binary_accuracy", "weighted_binary_accuracy"}
    expected |= {f"val_{name}": value for name, value in expected.items()}
    members, networks = LocalProcessGroup(2).join_all(), [model(), model()]
    with ThreadPoolExecutor(2) as pool:
        for logs in pool.map(fit, members, networks, [slice(0, 10), slice(10, 30)]):
            assert logs == pytest.approx(expected, rel=1e-5)


def test_losses_of_several_outputs_are_weighted_by_samples() -> None:
    import keras

    from flatweights.keras import AverageLogs

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(36, 3)), rng.normal(size=(36, 1)) * np.arange(36)[:, None]
    # Parts of batches of which Keras knows the shape, and with a shorter last batch, of which it
    # does not while it traces a step.
    parts = [slice(0, 10), slice(10, 36)]

    def model(run_eagerly: bool) -> Any:
        seed_initializers(3)
        begin = keras.Input((3,))
        outputs = [keras.layers.Dense(1, name=name)(begin) for name in "ab"]
        made = keras.Model(begin, outputs)
        made.compile(keras.optimizers.SGD(0.0), ["mse", "mae"], run_eagerly=run_eagerly)
        return made

    def fit(member: Any, network: Any, mine: slice) -> Any:
        data, logs = (x[mine], [y[mine]] * 2), AverageLogs(member=member)
        history = network.fit(
            *data, 10, verbose=0, shuffle=False, validation_data=data, callbacks=[logs]
        )
        return {name: values[0] for name, values in history.history.items()}

    own = [
        model(run_eagerly).evaluate(x[p], [y[p]] * 2, 10, 0, return_dict=True)
        for run_eagerly, p in zip((True, False), parts, strict=True)
    ]
    expected = {name: (10 * own[0][name] + 26 * own[1][name]) / 36 for name in own[0]}
    assert {"a_loss", "b_loss"} < expected.keys()
    expected |= {f"val_{name}": value for name, value in expected.items()}
    models = [model(True), model(False)]
    with ThreadPoolExecutor(2) as pool:
        for logs in pool.map(fit, LocalProcessGroup(2).join_all(), models, parts):
            assert logs == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_metrics_whose_weights_are_all_zero_are_zero_as_without_members() -> None:
    from flatweights.keras import AverageLogs

    def fit(member: Any, network: Any, callbacks: Any = None) -> Any:
        x, y, weights = np.ones((8, 8)), np.ones(8), np.zeros(8)
        logs = [AverageLogs(member=member)] if callbacks is None else callbacks
        return network.fit(x, y, sample_weight=weights, verbose=0, callbacks=logs).history

    models = [compiled(Place(), weighted_metrics=["mae"]) for _ in range(3)]
    expected = fit(None, models[2], [])
    assert expected["mae"] == [0.0]
    with ThreadPoolExecutor(2) as pool:
        for logs in pool.map(fit, LocalProcessGroup(2).join_all(), models[:2]):
            assert logs == expected


def best_of_first(place: Place, unit: str) -> Any:
    """Return the weights after a training whose first epoch, without an average, was the best."""
    import keras

    from flatweights.keras import AverageLogs, AverageWeights

    class Noting(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if not epoch:
                first.extend(self.model.get_weights())

    first: list[Any] = []
    member = place.member()
    averaging = AverageWeights(2 if unit == "epoch" else 3, unit, member=member)  # type: ignore[arg-type]
    early = keras.callbacks.EarlyStopping("loss", mode="max", restore_best_weights=True)
    callbacks = [averaging, AverageLogs(member=member), early, Noting()]
    model = compiled(place, "normalized")
    x, y = images("normalized")
    data = (x, y) if unit == "batch" else part(place)
    model.fit(*data, BATCH, 2, verbose=0, shuffle=False, callbacks=callbacks)
    return model.get_weights(), first, len(data[0])


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["epoch", "batch"])
def test_best_weights_of_an_epoch_that_no_average_ended_are_averaged(unit: str) -> None:
    replies = in_threads(2, best_of_first, unit)
    samples = [reply[2] for reply in replies]
    expected = fw.average([reply[1] for reply in replies], samples)
    for weights, *_ in replies:
        for mine, mean, other in zip(weights, expected, replies[0][0], strict=True):
            np.testing.assert_array_equal(mine, other)
            np.testing.assert_allclose(mine, mean, rtol=1e-6)


@pytest.mark.parametrize("includes_slots", [False, True])
def test_best_weights_of_members_that_swap_in_their_own_moving_averages_are_equal(
    *, includes_slots: bool
) -> None:
    import keras

    from flatweights.keras import AverageLogs, AverageWeights

    kept: dict[int, list[list[Any]]] = {0: [], 1: []}

    def fit(member: Any) -> Any:
        model = build("dense", seed=member.rank)
        optimizer = keras.optimizers.Adam(0.05, use_ema=True, ema_momentum=0.5)
        model.compile(optimizer, "mse", run_eagerly=True)
        keep = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda *_: kept[member.rank].append(model.get_weights())
        )
        callbacks = [
            AverageWeights(member=member, include_optimizer=includes_slots),
            AverageLogs(member=member),
            keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
            keep,
            keras.callbacks.EarlyStopping("loss", mode="max", restore_best_weights=True),
        ]
        x, y = images("dense")
        mine = slice(member.rank, None, 2)
        model.fit(x[mine], y[mine], BATCH, 2, verbose=0, shuffle=False, callbacks=callbacks)
        return model.get_weights()

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(fit, LocalProcessGroup(2).join_all())
    are_own = [not np.array_equal(*each) for each in zip(kept[0][0], kept[1][0], strict=True)]
    assert any(are_own) is not includes_slots
    for mine, other, *best in zip(first, second, kept[0][0], kept[1][0], strict=True):
        np.testing.assert_array_equal(mine, other)
        np.testing.assert_allclose(mine, np.mean(best, axis=0), rtol=1e-6, atol=1e-8)


def test_a_model_that_is_built_by_its_first_step_is_refused_by_name() -> None:
    import keras

    from flatweights.keras import AverageLogs, average_gradients

    (member,) = LocalProcessGroup(1).join_all()
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(average_gradients(keras.optimizers.Adam(), member=member), "mse")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="expected a model that is built before"):
            model.fit(batches((np.ones((8, 2)), np.ones(8))), verbose=0, callbacks=[AverageLogs()])


def test_variables_that_the_optimizer_does_not_know_are_named_with_the_remedy() -> None:
    import keras

    from flatweights.keras import AverageLogs, average_gradients

    class Scaled(keras.Model):  # type: ignore[misc]
        def build(self, shape: Any) -> None:
            self.dense = keras.layers.Dense(1)
            self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

        def call(self, x: Any) -> Any:
            return self.dense(x) * self.scale

    (member,) = LocalProcessGroup(1).join_all()
    x, y = np.ones((8, 2), np.float32), np.ones(8)
    for is_called in (False, True):
        model = Scaled()
        model.build((None, 2))
        if is_called:
            model(x[:1])
        optimizer = average_gradients(keras.optimizers.SGD(), member=member)
        model.compile(optimizer, "mse", run_eagerly=is_called)
        context: Any = contextlib.nullcontext()
        if not is_called:
            context = pytest.raises(
                ValueError, match=r"dense\w*/kernel'. If the .* model\(x\[:1\]\)"
            )
        with context:
            model.fit(batches((x, y)), verbose=0, callbacks=[AverageLogs()])


def test_layers_that_the_first_batch_builds_are_averaged_too() -> None:
    import keras

    from flatweights.keras import AverageWeights

    class Half(keras.Model):  # type: ignore[misc]
        """A model whose own `build` leaves its layer unbuilt."""

        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def build(self, shape: Any) -> None:
            self.scale = self.add_weight(shape=(), initializer="ones")

        def call(self, x: Any) -> Any:
            return self.scale * self.dense(x)

    def fit(member: Any) -> Any:
        model = Half()
        model.build((None, 8))
        assert model.built
        assert len(model.weights) == 1
        model.compile(keras.optimizers.SGD(0.05), "mse", run_eagerly=True)
        data = few(Place("", member.rank, 2), 2)
        averaging = AverageWeights(member=member)
        model.fit(data, epochs=2, verbose=0, callbacks=[averaging])
        return model.get_weights()

    with ThreadPoolExecutor(2) as pool:
        ours, others = pool.map(fit, LocalProcessGroup(2).join_all())
    assert len(ours) == 3
    assert all(map(np.array_equal, ours, others))


def advised(member: Any, model: Any, options: dict[str, Any]) -> str:
    import keras

    from flatweights.keras import AverageLogs, AverageWeights, average_gradients

    averages = AverageWeights(member=member)
    with member:
        optimizer: Any = keras.optimizers.SGD(0.05)
        if options.get("averages") == "gradients":
            average_gradients(optimizer, member=member, rule=options.get("rule"))
            callbacks = [AverageLogs()]
        else:
            callbacks = [averages, *options.get("callbacks", [AverageLogs()])]
        model.compile(optimizer, "mse", metrics=options.get("metrics"), run_eagerly=True)
        with pytest.raises(CallsDifferError) as error:
            model.fit(options["data"], verbose=0, epochs=options["epochs"], callbacks=callbacks)
    return str(error.value)


def test_members_whose_calls_differ_get_the_advice_that_fits_the_cause() -> None:
    from flatweights import robust
    from flatweights.keras import AverageLogs

    data = few(Place(), 1)
    trims = [{"callbacks": [AverageLogs(rule=robust.TrimmedMean(trim))]} for trim in (0, 1)]
    gradients = {"averages": "gradients", "data": data, "epochs": 1}
    weights = {"data": data, "epochs": 1}
    cases: list[tuple[list[str], list[dict[str, Any]], str]] = [
        (["dense", "normalized"], [gradients] * 2, "need the same model, optimizer and callbacks"),
        (["dense", "normalized"], [weights] * 2, "need the same model, optimizer and callbacks"),
        (
            ["dense"] * 2,
            [gradients, gradients | {"rule": robust.Median()}],
            "need the same model, gradients of the same variables, and the same arguments of",
        ),
        (
            ["dense"] * 2,
            [weights, weights | {"metrics": ["mae"]}],
            "ranks 0, 1 have ended their epoch, but .* need the same metrics",
        ),
        (
            ["dense"] * 2,
            [weights | trim for trim in trims],
            r"TrimmedMean\(trim=0\).*TrimmedMean\(trim=1\).* the same arguments of AverageLogs",
        ),
        (
            ["dense"] * 2,
            [weights, weights | {"epochs": 2}],
            "and as many epochs: give fit the same",
        ),
        (["dense"] * 2, [gradients, weights], "need the same model, optimizer and callbacks"),
    ]
    with ThreadPoolExecutor(2) as pool:
        for kinds, options, advice in cases:
            models = [build(kind, 0) for kind in kinds]
            replies = [*pool.map(advised, LocalProcessGroup(2).join_all(), models, options)]
            for reply in replies:
                assert re.search(advice, reply, re.DOTALL), (advice, reply)


def test_a_model_of_keras_2_is_refused_by_name() -> None:
    import tf_keras

    from flatweights.keras import AverageLogs, AverageWeights, Report

    model = tf_keras.Sequential([tf_keras.Input((8,)), tf_keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    for kind in (AverageLogs, AverageWeights, Report):
        with pytest.raises(
            TypeError, match=rf"{kind.__name__}: .* Keras 3, got tf_keras\..*Sequent"
        ):
            model.fit(*images("dense"), verbose=0, callbacks=[kind()])


def logged(
    member: Any, model: Any, own: dict[str, float], stops: bool, options: dict[str, Any]
) -> Any:
    """Return the logs of a member after the end of an epoch, and whether its training stops."""
    from flatweights.keras import AverageLogs

    with member:
        logs = dict(own)
        callback = AverageLogs(member=member, **options)
        callback.set_model(model)
        callback.on_train_begin()
        callback.on_epoch_begin(0)
        model.stop_training = stops
        callback.on_epoch_end(0, logs)
        return logs, model.stop_training


def logs_of_three(
    models: list[Any], losses: list[float], stops: Any = (), **options: Any
) -> list[Any]:
    own = [{"loss": loss, "val_loss": 10 * loss} for loss in losses]
    stop = [rank in stops for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        call = partial(outcome, logged)
        return [*pool.map(call, LocalProcessGroup(3).join_all(), models, own, stop, [options] * 3)]


def test_a_rule_for_logs_withstands_a_liar_but_a_stop_of_one_still_stops_all() -> None:
    from flatweights import robust

    def first(models: list[Any]) -> Any:
        assert [*models[0]] == ["loss", "val_loss"]
        return models[0]

    models = [compiled(Place()) for _ in range(3)]
    for rule, expected in ((robust.Median(), 3.0), (first, 1.0)):
        for stops in ((), (1,)):
            replies = logs_of_three(models, [1.0, 3.0, 1e30], stops, rule=rule)
            assert replies == [({"loss": expected, "val_loss": 10 * expected}, bool(stops))] * 3


def test_a_stop_that_comes_too_late_for_the_average_of_others_stops_its_member(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def of_others(part: Any, **_: Any) -> Any:
        return SimpleNamespace(weights=part | {"stops": np.float64(0)})

    (member,) = LocalProcessGroup(1).join_all()
    monkeypatch.setattr(member, "average", of_others)
    for stops in (False, True):
        assert logged(member, compiled(Place()), {"loss": 1.0}, stops, {})[1] == stops


def test_members_whose_logs_are_nan_are_left_out_or_raise() -> None:
    from flatweights import robust

    models, losses = [compiled(Place()) for _ in range(3)], [1.0, np.nan, 3.0]
    for rule in (None, robust.Median()):
        for logs, stops in logs_of_three(models, losses, [1], rule=rule, nonfinite="skip"):
            assert logs == pytest.approx({"loss": 2.0, "val_loss": 20.0})
            assert stops
        for reply in logs_of_three(models, losses, rule=rule, nonfinite="raise"):
            assert "rank 1, slot 0 'logs/loss': holds NaN or infinity" in reply
        for logs, _ in logs_of_three(models, [np.nan] * 3, rule=rule, nonfinite="skip"):
            assert np.isnan([*logs.values()]).all()
    for logs, _ in logs_of_three(models, losses):
        assert np.isnan([*logs.values()]).all()


def test_the_host_of_a_rule_for_logs_needs_no_keras(tmp_path: Path) -> None:
    import ray

    from flatweights import robust
    from flatweights.keras import AverageLogs

    rule = AverageLogs(rule=robust.Median())._rule
    (tmp_path / "rule").write_bytes(ray.cloudpickle.dumps(robust.Rule.of(rule)))  # type: ignore[arg-type]
    program = (
        "import pickle, sys; from pathlib import Path; import flatweights as fw;"
        "models = [fw.FlatWeights({'logs/loss': 1.0 * k, 'samples/loss': 1.0}) for k in (1, 2, 9)];"
        "print(pickle.loads(Path(sys.argv[1]).read_bytes())(models)['logs/loss']);"
        "assert not {'keras', 'tensorflow'} & {*sys.modules}"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "rule")]
    assert subprocess.run(command, check=True, capture_output=True).stdout == b"2.0\n"


LAYERS = ("body", "norm", "head")


def with_a_head(rank: int) -> Any:
    """A compiled model of three layers, whose variables all differ from those of other ranks."""
    import keras

    layers = [keras.layers.Dense(4, name="body"), keras.layers.BatchNormalization(name="norm")]
    layers = [keras.Input((8,)), *layers, keras.layers.Dense(1, name="head")]
    model = keras.Sequential(layers)
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    optimizer.build(model.trainable_variables)
    model.compile(optimizer, "mse", run_eagerly=True)
    rng = np.random.default_rng(rank)
    for variable in model.weights:
        variable.assign(rng.uniform(0.5, 1.5, variable.shape))
    return model


def noted(model: Any) -> list[tuple[str, Any]]:
    """Copies of all variables and slots, each with its layer; empty for the optimizer's own."""
    variables = [*model.weights, *model.optimizer.variables]
    layers = [next((one for one in LAYERS if one in v.path), "") for v in variables]
    return [(layer, v.numpy().copy()) for layer, v in zip(layers, variables, strict=True)]


AT_HOME: dict[str, tuple[Callable[[], dict[str, Any]], tuple[str, ...]]] = {
    "a head": (lambda: {"exclude": "head"}, ("head",)),
    "FedBN": (lambda: {"exclude": lambda slot: "norm/" in slot.name}, ("norm",)),
    "two, by an iterator": (lambda: {"exclude": iter(["head", "norm"])}, ("head", "norm")),
    "all but the body": (lambda: {"only": ["body"]}, ("head", "norm", "")),
}


STILL = partial(FedAvgM, momentum=0.0)
CHOICES = [
    ("a head", True, None),
    ("all but the body", False, STILL),
]


@pytest.mark.parametrize(
    ("what", "include_optimizer", "outer"),
    [
        pytest.param(*one, marks=[] if one in CHOICES else pytest.mark.slow)
        for one in product(AT_HOME, [False, True], [None, STILL])
    ],
)
def test_variables_that_stay_at_home_keep_their_bits_and_the_others_are_averaged(
    what: str, include_optimizer: bool, outer: Any
) -> None:
    import keras

    from flatweights.keras import AverageWeights

    choice, home = AT_HOME[what]

    def fit(member: Any) -> Any:
        model, notes = models[member.rank], list[Any]()
        begins = keras.callbacks.LambdaCallback(
            on_train_begin=lambda logs: notes.append(noted(model)),
            on_epoch_end=lambda epoch, logs: notes.append(noted(model)),
        )
        averaging = AverageWeights(
            member=member,
            weight=1.0 + member.rank,
            include_optimizer=include_optimizer,
            outer=outer,
            **choice(),
        )
        ends = keras.callbacks.LambdaCallback(
            on_train_begin=lambda logs: notes.append(noted(model)),
            on_epoch_end=lambda epoch, logs: notes.append(noted(model)),
        )
        data, callbacks = few(Place("", member.rank, 2), 1), [begins, averaging, ends]
        model.fit(data, epochs=2, verbose=0, callbacks=callbacks)
        return notes

    models = [with_a_head(rank) for rank in range(2)]
    count = len(models[0].weights)
    with ThreadPoolExecutor(2) as pool:
        both = [*pool.map(fit, LocalProcessGroup(2).join_all())]
    assert [len(notes) for notes in both] == [6, 6]
    for k in range(0, 6, 2):  # the start, and two epochs
        for i, (layer, _) in enumerate(both[0][k]):
            before, after = ([notes[k + j][i][1] for notes in both] for j in (0, 1))
            if layer in home or (i >= count and not include_optimizer):
                assert [one.tobytes() for one in after] == [one.tobytes() for one in before]
                continue
            assert after[0].tobytes() == after[1].tobytes()
            expected = before[0] if k == 0 else np.average(before, axis=0, weights=[1.0, 2.0])
            np.testing.assert_allclose(after[0], expected, rtol=1e-5, atol=1e-7)
    last = [notes[-1] for notes in both]
    for i, (layer, value) in enumerate(last[0]):
        if layer in home and layer:
            assert not np.array_equal(value, last[1][i][1]), "each has trained its own"


@pytest.mark.slow
def test_best_weights_of_layers_that_stay_at_home_are_each_members_own() -> None:
    import keras

    from flatweights.keras import AverageLogs, AverageWeights

    def fit(member: Any) -> Any:
        model, first = models[member.rank], list[Any]()
        averaging = AverageWeights(2, member=member, exclude=["head", "norm/gamma"])
        early = keras.callbacks.EarlyStopping("loss", mode="max", restore_best_weights=True)
        note = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: first.extend([] if epoch else model.get_weights())
        )
        x, y = images("dense")
        mine = slice(member.rank, None, 2)
        callbacks = [averaging, AverageLogs(member=member), early, note]
        model.fit(x[mine], y[mine], BATCH, 2, verbose=0, callbacks=callbacks)
        return first, model.get_weights()

    models = [with_a_head(rank) for rank in range(2)]
    paths = [one.path.partition("/")[2] for one in models[0].weights]
    with ThreadPoolExecutor(2) as pool:
        both = [*pool.map(fit, LocalProcessGroup(2).join_all())]
    for i, path in enumerate(paths):
        firsts, lasts = ([one[j][i] for one in both] for j in (0, 1))
        if path in ("head/kernel", "head/bias", "norm/gamma"):
            assert [one.tobytes() for one in lasts] == [one.tobytes() for one in firsts]
        else:
            assert lasts[0].tobytes() == lasts[1].tobytes()
            np.testing.assert_allclose(lasts[0], np.mean(firsts, axis=0), rtol=1e-6)


def test_a_choice_that_is_none_is_refused_before_or_at_the_start_of_the_training() -> None:
    from flatweights.keras import AverageWeights

    with pytest.raises(ValueError, match="exclude: expected None with only, got both"):
        AverageWeights(exclude="head", only="body")
    with pytest.raises(TypeError, match="only: expected names, prefixes of names, or a function"):
        AverageWeights(only=3)  # type: ignore[arg-type]
    (member,) = LocalProcessGroup(1).join_all()
    model = with_a_head(0)
    outer = partial(FedAvgM, momentum=0.9)
    cases: list[tuple[str, dict[str, Any]]] = [
        ("got 'heads', which none has; near it are 'head'", {"exclude": "heads"}),
        ("expected variables that are left", {"only": lambda slot: False}),
        ("expected trainable variables to average", {"only": "norm/moving_mean", "outer": outer}),
    ]
    for text, options in cases:
        averaging = AverageWeights(member=member, **options)
        with pytest.raises(ValueError, match=text):
            model.fit(few(Place(), 1), verbose=0, callbacks=[averaging])


def test_members_with_other_choices_get_names_of_both() -> None:
    from flatweights.keras import AverageWeights

    def fit(member: Any) -> str:
        averaging = AverageWeights(member=member, exclude=("head", "norm")[member.rank])
        with pytest.raises(CallsDifferError) as error:
            models[member.rank].fit(few(Place(), 1), verbose=0, callbacks=[averaging])
        return str(error.value)

    models = [with_a_head(rank) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for text in pool.map(fit, LocalProcessGroup(2).join_all()):
            assert "expected 6 slots, got 4, without 'norm/gamma', with 'head/kernel'" in text
