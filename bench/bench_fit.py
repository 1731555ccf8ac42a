"""Keras `fit` on several processes of one node: seconds per step, batches of 16 in each process.

``python -m bench.bench_fit [--quick] [--json FILE] [--plot FILE]``

Our first row averages the gradients of every batch; another averages the weights after every tenth;
a third has moments over the batches of all processes in each layer of `BatchNormalization`.
"without exchange" trains the same Keras 3 model in as many processes at the same time, each by
itself: the difference is the cost of the exchange. "the slowest of each step" is the same, but each
step counts as long as it took in its slowest process: no exchange can do better, since a step that
averages waits for all. The rival is `tf_keras` under
`MultiWorkerMirroredStrategy` with ring communication, since Keras 3 raises under that strategy.
All processes have one thread for TensorFlow's operations. Contenders take turns, one `fit` each,
and the slowest process counts. The rival's processes start after our rows, since they compute while
they wait; then it takes turns with our first row, which is slower beside them than in its own row.
The rival's ratio is to that. The time is that of the epoch, from its first batch to its end. The
rest of `fit` is left out, because for every contender it waits for a thread of `tf.data` that wakes
up 10, 30, 70, 150, 310, 630 ... ms after it has started. Before timing, the bench checks that all
our members have the same bits and have learned.

"the exchange alone" is the difference of the medians with and without exchange, beside averages of
as many numbers by Open MPI's ``Allreduce``, if it is installed, and by bare memory with futexes.
"""

import json
import os
import socket
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import ray

from bench import rivals, runner

BATCH = 16
STEPS = {"dense": 1000, "residual": 60, "resnet20": 40, "MobileNetV2": 10}
NORMALIZED = ("residual", "resnet20")  # 7 and 19 layers of BatchNormalization
ALONE = "without exchange"
SLOWEST = f"{ALONE}, the slowest of each step"
WEIGHTS = f"{runner.OURS}, weights of every 10th batch"
SYNCHRONIZED = f"{runner.OURS}, synchronized BatchNormalization"
RIVAL = "MultiWorkerMirroredStrategy, ring"


def build(keras: Any, kind: str, **normalization: bool) -> Any:
    """Return a model of Keras 3 or `tf_keras`, of 6, 39, 97 or 262 variables."""
    layers = keras.layers
    if kind == "dense":
        hidden = [layers.Dense(64, "tanh"), layers.Dense(64, "tanh")]
        return keras.Sequential([keras.Input((64,)), *hidden, layers.Dense(4)])
    if kind == "MobileNetV2":
        return keras.applications.MobileNetV2((32, 32, 3), weights=None, classes=4)

    def convolve(x: Any, width: int, stride: int = 1) -> Any:
        x = layers.Conv2D(width, 3, stride, "same", use_bias=False)(x)
        return layers.BatchNormalization(**normalization)(x)

    inputs = keras.Input((32, 32, 3))
    x = layers.ReLU()(convolve(inputs, 16))
    for stage, width in enumerate((16, 32, 64)):
        for block in range(3 if kind == "resnet20" else 1):
            stride = 2 if stage and not block else 1
            short = layers.Conv2D(width, 1, stride, use_bias=False)(x) if stride > 1 else x
            y = convolve(layers.ReLU()(convolve(x, width, stride)), width)
            x = layers.ReLU()(layers.Add()([short, y]))
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(4)(x))


def data(kind: str, seed: int) -> tuple[Any, Any]:
    """Return one process's data."""
    rng = np.random.default_rng(seed)
    shape = (64,) if kind == "dense" else (32, 32, 3)
    x = rng.standard_normal((BATCH * STEPS[kind], *shape), np.float32)
    return x, rng.standard_normal((len(x), 4), np.float32)


class Epoch:
    """The seconds of one epoch, by callbacks of Keras 3 or `tf_keras`."""

    def __init__(self, keras: Any) -> None:
        """Make the callback."""
        self.seconds = 0.0
        self.callback = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda *_: setattr(self, "seconds", -time.perf_counter()),
            on_epoch_end=lambda *_: setattr(self, "seconds", self.seconds + time.perf_counter()),
        )


def one_thread() -> None:
    """Give TensorFlow's operations one thread."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)


class Ours:
    """One process with Keras 3."""

    def __init__(self, kind: str, name: str, rank: int, size: int) -> None:
        """Join the process group, and compile a model for each way."""
        one_thread()
        import keras

        import flatweights.ray
        from flatweights.keras import AverageWeights, average_gradients

        self._data = data(kind, rank)
        member = flatweights.ray.join(name, rank=rank, size=size)
        self._callbacks: dict[str, list[Any]] = {
            runner.OURS: [],
            WEIGHTS: [AverageWeights(10, "batch", member=member)],
            ALONE: [],
        }
        if kind in NORMALIZED:
            self._callbacks[SYNCHRONIZED] = []
        self._models, self._epoch = {}, Epoch(keras)
        for way in self._callbacks:
            keras.utils.set_random_seed(0)
            normalization = {"synchronized": True} if way == SYNCHRONIZED else {}
            model = self._models[way] = build(keras, kind, **normalization)
            optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
            if way in (runner.OURS, SYNCHRONIZED):
                average_gradients(optimizer, member=member)
            model.compile(optimizer, "mse")

    def fit(self, way: str) -> tuple[float, float]:
        """Train for one epoch; return the seconds and the loss."""
        callbacks = [*self._callbacks[way], self._epoch.callback]
        history = self._models[way].fit(*self._data, BATCH, verbose=0, callbacks=callbacks)
        return self._epoch.seconds, history.history["loss"][0]

    def seconds_of_steps(self) -> Any:
        """Train for one epoch without exchange; return the seconds of each step."""
        import keras

        ends: list[float] = []

        def note(_: int, logs: Any = None) -> None:
            ends.append(time.perf_counter())

        callback = keras.callbacks.LambdaCallback(on_epoch_begin=note, on_train_batch_end=note)
        self._models[ALONE].fit(*self._data, BATCH, verbose=0, callbacks=[callback])
        return np.diff(ends)

    def weights(self) -> list[Any]:
        """Return the trained weights of the model whose gradients are averaged."""
        return [np.asarray(v) for v in self._models[runner.OURS].trainable_variables]


class Mirrored:
    """One process with `tf_keras` under TensorFlow's strategy."""

    def __init__(self, kind: str, addresses: list[str], rank: int) -> None:
        """Wait for the others, and compile the model."""
        cluster = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
        os.environ["TF_CONFIG"] = json.dumps(cluster)
        one_thread()
        import tensorflow as tf
        import tf_keras

        ring = tf.distribute.experimental.CommunicationImplementation.RING
        options = tf.distribute.experimental.CommunicationOptions(implementation=ring)
        strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
        with strategy.scope():
            self._model = build(tf_keras, kind)
            self._model.compile(tf_keras.optimizers.SGD(0.01, momentum=0.9), "mse")
        sharding = tf.data.Options()
        sharding.experimental_distribute.auto_shard_policy = (
            tf.data.experimental.AutoShardPolicy.OFF
        )
        # Each worker takes its part of a global batch: 16 samples.
        dataset = tf.data.Dataset.from_tensor_slices(data(kind, rank)).batch(BATCH)
        self._data = strategy.experimental_distribute_dataset(dataset.with_options(sharding))
        self._steps, self._epoch = STEPS[kind], Epoch(tf_keras)

    def fit(self) -> float:
        """Train for one epoch; return the seconds."""
        callbacks = [self._epoch.callback]
        self._model.fit(
            self._data, epochs=1, steps_per_epoch=self._steps, verbose=0, callbacks=callbacks
        )
        return self._epoch.seconds


def free_addresses(count: int) -> list[str]:
    """Return free addresses."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    finally:
        for one in sockets:
            one.close()


def in_turns(
    ways: dict[str, Callable[[], float]], steps: int, budget: float
) -> dict[str, list[float]]:
    """Return the seconds per step of each way; they take turns, after one `fit` each."""
    for call in ways.values():
        call()
    times: dict[str, list[float]] = {way: [] for way in ways}
    end = time.perf_counter() + budget
    while time.perf_counter() < end or len(times[runner.OURS]) < 5:
        for way, call in ways.items():
            times[way].append(call() / steps)
    return times


def time_kind(kind: str, size: int, budget: float, *, rival: bool) -> list[runner.Row]:
    """Time one kind of model on ``size`` processes."""
    actor: Any = ray.remote(num_cpus=0)(Ours)
    members = [actor.remote(kind, f"bench {kind} {size}", rank, size) for rank in range(size)]

    def fit(way: str) -> float:
        replies = ray.get([one.fit.remote(way) for one in members])
        return float(max(seconds for seconds, _ in replies))

    ways: dict[str, Callable[[], float]] = {
        way: partial(fit, way)
        for way in (runner.OURS, WEIGHTS, ALONE, *([SYNCHRONIZED] if kind in NORMALIZED else []))
    }
    ways[SLOWEST] = lambda: float(
        np.max(ray.get([one.seconds_of_steps.remote() for one in members]), axis=0).sum()
    )
    losses: list[float] = []
    while len(losses) < 2 or (losses[-1] >= losses[0] and len(losses) < 10):
        replies = ray.get([member.fit.remote(runner.OURS) for member in members])
        losses.append(float(np.mean([loss for _, loss in replies])))
    first, *rest = ray.get([member.weights.remote() for member in members])
    assert all(all(map(np.array_equal, first, weights)) for weights in rest), "members differ"
    assert losses[-1] < losses[0], f"nothing was learned: {losses}"

    case = f"{kind}, {size} processes"
    times = in_turns(ways, STEPS[kind], budget)
    rows = [runner.row_of(case, way, seconds) for way, seconds in times.items()]
    for row in rows:
        row.ratio = row.seconds / rows[0].seconds
    others: list[Any] = []
    if rival:
        mirrored: Any = ray.remote(num_cpus=0)(Mirrored)
        addresses = free_addresses(size)
        others = [mirrored.remote(kind, addresses, rank) for rank in range(size)]
        both = {
            runner.OURS: ways[runner.OURS],
            RIVAL: lambda: max(ray.get([one.fit.remote() for one in others])),
        }
        times = in_turns(both, STEPS[kind], budget / 2)
        ours, theirs = (runner.row_of(case, way, times[way]) for way in both)
        theirs.ratio = theirs.seconds / ours.seconds
        rows.append(theirs)
    for one in (*members, *others):
        ray.kill(one)
    seconds = {row.contender: row.seconds for row in rows}
    exchange = max(seconds[runner.OURS] - seconds[ALONE], 1e-9)
    case, size_of_all = f"{case}: the exchange alone", sum(one.size for one in first)
    rows.append(runner.Row(case, runner.OURS, exchange, 0.0, 0, ratio=1.0))
    return rows + rivals.rows_of(case, size_of_all, size, exchange, budget)


def run(options: Namespace) -> list[runner.Row]:
    """Time all kinds."""
    rows = []
    sizes = (2,) if options.quick else (2, 4)
    kinds = ("dense", "residual") if options.quick else tuple(STEPS)
    for size in sizes:
        for kind in kinds:
            rival = kind in ("dense", "residual")
            rows += time_kind(kind, size, 5.0 if options.quick else 20.0, rival=rival)
    return rows


def main() -> None:
    """Run the bench."""
    options = runner.arguments(__doc__ or "")
    ray.init(
        "local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR"
    )
    try:
        rows = run(options)
    finally:
        ray.shutdown()
    runner.report("fit on several processes, per step", rows, {}, options)


if __name__ == "__main__":
    main()
