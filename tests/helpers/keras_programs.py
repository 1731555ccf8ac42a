"""Trainings of several members together, and of one process by itself, for their tests."""

import contextlib
import os
import random
import secrets
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import ray
from process_groups import LocalProcessGroup

_members: dict[tuple[str, int], Any] = {}
_building = threading.Lock()  # Keras has one seed and one policy for all threads
STEPS = 20  # batches in an epoch
BATCH = 12  # of one process, or of all members together


class Place(NamedTuple):
    """The part of a training that a process has.

    Attributes:
        name: The process group; empty for a training by itself.
        rank: The rank of this member.
        size: The number of members.
    """

    name: str = ""
    rank: int = 0
    size: int = 1

    def member(self) -> Any:
        """This process's member of the process group, which all tests share."""
        import flatweights.ray

        key = self.name, self.rank
        if key not in _members:
            join = partial(flatweights.ray.join, self.name, rank=self.rank, size=self.size)
            _members[key] = join(timeout=900)  # a busy machine starts the coordinator slowly
        return _members[key]

    def part(self, images: Any) -> Any:
        """The part of every batch that this process trains on."""
        batches = images.reshape(STEPS, self.size, BATCH // self.size, *images.shape[1:])
        return batches[:, self.rank].reshape(-1, *images.shape[1:])


@ray.remote(num_cpus=0)
class Process:
    """Another process, with Keras imported."""

    def __init__(self) -> None:
        prepare()

    def pid(self) -> int:
        return os.getpid()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


def prepare() -> None:
    import tensorflow as tf

    import flatweights.keras

    with contextlib.suppress(RuntimeError):  # other tests have used it
        tf.config.threading.set_intra_op_parallelism_threads(1)
    assert flatweights.keras


class Together:
    """Calls a function in several processes, of which this one is the last."""

    def __init__(self) -> None:
        self._others: list[Any] = []
        self._name = secrets.token_hex(4)

    def __call__(self, size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``function(place, *args)`` in all; return results or errors by rank."""
        places = [Place(f"{self._name}-{size}", rank, size) for rank in range(size)]
        self.start(size - 1)
        calls = [
            other.call.remote(outcome, function, place, *args)
            for other, place in zip(self._others, places[:-1], strict=False)  # some may be spare
        ]
        own = outcome(function, places[-1], *args)
        return [*ray.get(calls), own]

    def start(self, count: int) -> None:
        """Start other processes, unless so many are there; do not wait for them."""
        while len(self._others) < count:
            self._others.append(Process.remote())  # type: ignore[attr-defined]

    def take(self) -> Any:
        """Return one of the other processes, which may die: it takes part in no later call."""
        self.start(1)
        return self._others.pop()

    def stop(self) -> None:
        for member in _members.values():
            member.leave()
        _members.clear()
        for other in self._others:
            ray.kill(other)
        self._others.clear()


def in_threads(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call ``function(place, *args)`` in threads of this process; return results or errors by rank.

    This finds what `Together` finds except for what processes do not share.
    """
    prepare()
    places = [Place(f"threads {secrets.token_hex(4)}", rank, size) for rank in range(size)]
    members = LocalProcessGroup(size).join_all()
    _members.update(zip([place[:2] for place in places], members, strict=True))
    with ThreadPoolExecutor(size) as pool:
        replies = [*pool.map(lambda place: outcome(function, place, *args), places)]
    for place in places:
        _members.pop(place[:2]).leave()
    return replies


def outcome(function: Callable[..., Any], *args: Any) -> Any:
    """The result of ``function``, or the text of its exception."""
    try:
        return function(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def images(kind: str) -> tuple[Any, Any]:
    rng = np.random.default_rng(7)
    shape = (8, 8, 1) if kind == "convolutional" else (8,)
    x = rng.normal(size=(STEPS * BATCH, *shape)).astype(np.float32)
    sums = x.reshape(len(x), -1).sum(axis=1, keepdims=True)
    return x, np.sin(sums).astype(np.float32)


def build(kind: str, seed: int, policy: str = "float32") -> Any:
    """Return a model; ``lazy`` ones have no variables before the first batch."""
    import keras

    with _building:
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy(policy)
        seed_initializers(seed)
        try:
            return _build(kind)
        finally:
            keras.config.set_dtype_policy(before)


def seed_initializers(seed: int) -> None:
    """Give the layers that are made next the same first weights each time.

    `keras.utils.set_random_seed` also lets TensorFlow forget its kernels, and the ten steps after
    it cost twice as much.
    """
    random.seed(seed)  # whence Keras takes the seed of each initializer


def _build(kind: str) -> Any:
    import keras
    from keras import layers

    hidden: list[Any] = [layers.Dense(16, "tanh")]
    begin: list[Any] = [keras.Input((8,))]
    if kind == "convolutional":
        begin = [keras.Input((8, 8, 1))]
        hidden = [layers.Conv2D(4, 3, activation="tanh"), layers.Flatten(), *hidden]
    if kind == "embedding":
        hidden = [embedded(), *hidden]
    if kind == "normalized":
        hidden.append(layers.BatchNormalization())
    if kind in SYNCHRONIZED:
        return residual(keras.Input((8,)), SYNCHRONIZED[kind])
    return keras.Sequential([*([] if kind == "lazy" else begin), *hidden, layers.Dense(1)])


SYNCHRONIZED = {"synchronized": 2, "synchronized, deep": 20}
"""By kind, the number of layers."""


def residual(inputs: Any, depth: int) -> Any:
    """Layers of BatchNormalization, each in a branch, so that they do not amplify rounding."""
    import keras
    from keras import layers

    x = inputs
    for _ in range(depth):
        branch = layers.BatchNormalization(synchronized=True)(x)
        x = layers.Add()([x, 0.2 * layers.Dense(8, "tanh")(branch)])
    return keras.Model(inputs, layers.Dense(1)(x))


def embedded() -> Any:
    import keras
    from keras import ops

    class Bins(keras.layers.Layer):  # type: ignore[misc]
        """Rows of a table, of which each batch takes a few, some of them twice."""

        def build(self, shape: Any) -> None:
            self.table = self.add_weight(shape=(50, 3), name="table")

        def call(self, x: Any) -> Any:
            rows = ops.take(self.table, ops.cast(ops.clip(8 * x + 25, 0, 49), "int32"), axis=0)
            return ops.reshape(rows, (-1, 24))

    return Bins()


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda k: k.SGD(0.05),
    "momentum": lambda k: k.SGD(k.schedules.ExponentialDecay(0.02, 10, 0.9), momentum=0.9),
    "Adam, clipped": lambda k: k.Adam(0.01, global_clipnorm=0.5),
    "clipped each": lambda k: k.AdamW(0.01, clipnorm=0.1, weight_decay=0.01),
    "accumulated": lambda k: k.SGD(0.02, 0.9, gradient_accumulation_steps=4, use_ema=True),
    "scaled": lambda k: k.LossScaleOptimizer(k.SGD(0.05), initial_scale=8.0),
}


def train(
    place: Place, model: str, optimizer: str, loop: str = "fit", policy: str = "float32"
) -> Any:
    """Train for 40 steps, or 6 in an eager loop; return losses by epoch and the weights."""
    import keras

    import flatweights.keras as fwk

    member = place.member() if place.name else None
    network = build(model, place.rank, policy)  # members of other seeds start as rank 0
    if member is None:  # Keras' usual moments are the oracle
        for layer in network.layers:
            if isinstance(layer, keras.layers.BatchNormalization):
                layer.synchronized = False
    made = OPTIMIZERS[optimizer](keras.optimizers)
    if member is not None:
        made = fwk.average_gradients(made, member=member)
    x, y = map(place.part, images(model))
    losses = LOOPS[loop](network, made, x, y, BATCH // place.size, member)
    return losses, network.get_weights()


def _fit(model: Any, optimizer: Any, x: Any, y: Any, size: int, member: Any, **options: Any) -> Any:
    import flatweights.keras as fwk

    model.compile(optimizer, "mse", **options)
    logs = [] if member is None else [fwk.AverageLogs(member=member)]
    fit = model.fit(x, y, size, epochs=2, shuffle=False, verbose=0, callbacks=logs)
    return fit.history["loss"]


def _several_steps(*args: Any) -> Any:
    return _fit(*args, steps_per_execution=2)  # both are traced


def _eager_fit(*args: Any) -> Any:
    return _fit(*args, run_eagerly=True)


def _again(model: Any, optimizer: Any, x: Any, y: Any, size: int, member: Any) -> Any:
    """Two calls of fit; between them rank 0, or the process by itself, loads other weights."""
    import flatweights.keras as fwk

    model.compile(optimizer, "mse")
    logs = [] if member is None else [fwk.AverageLogs(member=member)]
    losses = []
    for other in (1.0, 0.5):
        if member is None or member.rank == 0:
            slots = optimizer.variables if other != 1.0 else ()
            for variable in (*model.trainable_variables, *slots):
                if variable.dtype == "float32" and variable.shape:
                    variable.assign(other * variable)
        fit = model.fit(x, y, size, shuffle=False, verbose=0, callbacks=logs)
        losses += fit.history["loss"]
    return losses


def _loop(compiled: bool, model: Any, optimizer: Any, x: Any, y: Any, size: int) -> Any:
    import tensorflow as tf

    optimizer.build(model.trainable_variables)

    def step(images: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            outputs = tf.cast(model(images, training=True), labels.dtype)  # of half precision
            loss = tf.reduce_mean((outputs - labels) ** 2)
            scaled = optimizer.scale_loss(loss)
        grads = tape.gradient(scaled, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return loss

    function = tf.function(step) if compiled else step
    for _ in range(2):  # without a trace, each step is dear
        for begin in range(0, len(x) if compiled else 3 * size, size):
            function(x[begin : begin + size], y[begin : begin + size])
    return []


LOOPS: dict[str, Callable[..., Any]] = {
    "fit": _fit,
    "fit, several steps": _several_steps,
    "fit, eager": _eager_fit,
    "fit, again": _again,
    "tf.function": lambda *args: _loop(True, *args[:-1]),
    "eager": lambda *args: _loop(False, *args[:-1]),
}


def close(ours: Sequence[Any], oracle: Sequence[Any], bound: float) -> bool:
    """Whether all weights equal the oracle's, relative to the largest of each variable."""
    return all(
        np.abs(a - b).max() <= bound * max(np.abs(b).max(), 1e-3)
        for a, b in zip(ours, oracle, strict=True)
    )


def train_with_a_death(config: Mapping[str, Any]) -> None:
    """As a worker of Ray Train: rank 1 dies in the third epoch of the first attempt."""
    import keras
    import ray.train

    from flatweights.keras import AverageLogs, Report, average_gradients

    context = ray.train.get_context()
    place = Place("", context.get_world_rank(), context.get_world_size())
    marker = Path(config["folder"], "died")
    network = build("dense", seed=place.rank)
    network.compile(OPTIMIZERS["Adam, clipped"](keras.optimizers), "mse")
    epochs = Report.resume(network)

    class Dies(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if place.rank == 1 and self.epoch == 2 and batch == 7 and not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            logs["began"] = epochs

    average_gradients(network.optimizer)
    x, y = map(place.part, images("dense"))
    network.fit(
        x,
        y,
        BATCH // place.size,
        epochs=4,
        initial_epoch=epochs,
        shuffle=False,
        verbose=0,
        callbacks=[AverageLogs(), Dies(), Report()],
    )
    np.savez(Path(config["folder"], f"{place.rank}.npz"), *network.get_weights())


def wait_until_taken(folder: Path, count: int) -> None:
    """Wait until Ray Train's controller has taken ``count`` checkpoints: it looks now and then.

    Reports that it has not taken when a worker dies are lost.
    """
    import json

    while True:
        for snapshot in folder.glob("storage/*/checkpoint_manager_snapshot.json"):
            with contextlib.suppress(ValueError):  # it is being written
                if len(json.loads(snapshot.read_text())["checkpoint_results"]) >= count:
                    return
        time.sleep(0.01)


def train_and_be_replaced(config: Mapping[str, Any]) -> None:
    """As a worker of Ray Train: some workers die in a step, and their replacements finish.

    Args:
        config: ``folder`` for notes; ``dies``, by rank, the epoch; ``epochs``, how many others each
            has to have done afterwards, or None if the training ends with the epoch of the death;
            ``coordinator``, whether that of the process group is killed instead; ``reports``,
            whether rank 1 dies in a report of that epoch, and that of rank 0 comes once it is being
            replaced.
    """
    import json

    import keras
    import ray.train

    from flatweights.keras import AverageLogs, Report, average_gradients

    context = ray.train.get_context()
    place = Place("", context.get_world_rank(), context.get_world_size())
    notes = Path(config["folder"], f"rank {place.rank}")
    notes.mkdir(exist_ok=True)
    starts = len([*notes.glob("start *")])
    Path(notes, f"start {os.getpid()}{' again' * bool(starts)}").touch()
    dies = -1 if starts else config["dies"].get(place.rank, -1)
    report = ray.train.report

    def interrupted(*args: Any, **options: Any) -> None:
        if ends.epoch == config["dies"][1] and not starts:
            _die_or_be_late(place.rank, config)
        report(*args, **options)

    if config.get("reports"):
        dies = -1
        if place.rank < 2:
            vars(ray.train)["report"] = interrupted
    network = build("dense", seed=10 * starts + place.rank)
    optimizer = average_gradients(keras.optimizers.Adam(0.01), min_results=1)
    network.compile(optimizer, "mse")
    done = Report.resume(network)

    class Ends(keras.callbacks.Callback):  # type: ignore[misc]
        epoch = epochs = 0

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if self.epoch == dies and batch == 7:
                _kill_worker_or_coordinator(config)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.epochs += 1
            if starts and self.epochs == config["epochs"]:
                (notes / "enough").touch()
            if all((notes.parent / f"rank {rank}" / "enough").exists() for rank in mortal):
                self.model.stop_training = True  # in all, by AverageLogs

    mortal = range(place.size) if config.get("coordinator") else config["dies"]
    ends = Ends()
    begin = int(network.optimizer.iterations)
    epochs = 1 << 20 if config["epochs"] else 1 + max(config["dies"].values())
    x, y = map(place.part, images("dense"))
    fit = network.fit(
        x,
        y,
        BATCH // place.size,
        epochs=epochs,
        initial_epoch=done,
        shuffle=False,
        verbose=0,
        callbacks=[ends, AverageLogs(), Report()],
    )
    state = [*network.trainable_weights, *network.optimizer.variables]
    np.savez(notes / "state.npz", *map(np.asarray, state))
    facts = {"begin": begin, "done": done, "epochs": fit.epoch}
    (notes / "end").write_text(json.dumps(facts))


def _die_or_be_late(rank: int, config: Mapping[str, Any]) -> None:
    """As rank 1, die before a report; as rank 0, go on once rank 1 is being replaced."""
    folder = Path(config["folder"])
    if rank == 1:
        wait_until_taken(folder, config["dies"][1])
        os.kill(os.getpid(), signal.SIGKILL)
    while not [*folder.glob("rank 1/start * again")]:
        time.sleep(0.01)


def _kill_worker_or_coordinator(config: Mapping[str, Any]) -> None:
    """Kill this process, or the coordinator of its process group."""
    wait_until_taken(Path(config["folder"]), min(config["dies"].values()))
    if not config.get("coordinator"):
        os.kill(os.getpid(), signal.SIGKILL)
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["name"].startswith("flatweights:train-"):
            ray.kill(ray.get_actor(**actor))


def tried(config: Mapping[str, Any]) -> None:
    """As a trial of Ray Tune: two tasks train together."""
    import ray.tune

    name = ray.tune.get_context().get_trial_id()
    run = ray.remote(num_cpus=0)(train)
    places = [Place(name, rank, 2) for rank in range(2)]
    replies = ray.get([run.remote(place, "dense", config["optimizer"]) for place in places])
    assert all(map(np.array_equal, replies[0][1], replies[1][1]))
    ray.tune.report({"loss": replies[0][0][-1]})
