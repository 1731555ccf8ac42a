"""Members on one GPU: a step of Keras `fit` with averaged gradients, and rounds of averages.

``python -m bench.bench_gpu_members [--quick] [--json FILE]``

All members share the first GPU, each in a process of its own. "without exchange" trains the same
model in as many processes at the same time, each by itself: the difference to our row is the cost
of the exchange. Steps are not compiled by XLA, which cannot wait for others; one row compiles the
computation of the gradients alone. Rounds average variables in place, with all ways that
``FLATWEIGHTS_GPU`` knows, beside one copy of as many bytes within the GPU's memory. The slowest
process counts. Before timing, the bench checks that all members have the same bits. Of each `fit`
the second epoch is timed: the first one begins with a comparison of all members' weights.
"""

import os
import time
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")  # members share the GPU

import numpy as np
import ray

from bench import models, runner

BATCH = 16
STEPS = {"dense": 300, "ResNet50": 20}
ALONE = "without exchange"
COMPILED = f"{runner.OURS}, gradients compiled by XLA"
CALLS = 20  # of a round, between two looks at the clock


def build(keras: Any, kind: str) -> Any:
    """Return a model of Keras, of 6 or 320 variables."""
    if kind == "dense":
        hidden = [keras.layers.Dense(64, "tanh"), keras.layers.Dense(64, "tanh")]
        return keras.Sequential([keras.Input((64,)), *hidden, keras.layers.Dense(4)])
    return keras.applications.ResNet50(weights=None, input_shape=(32, 32, 3), classes=1000)


def compiled_steps(keras: Any, model: Any) -> Any:
    """Return ``model`` with a `train_step` that XLA compiles up to the gradients."""
    import tensorflow as tf

    class Compiled(keras.Model):  # type: ignore[misc]
        @tf.function(jit_compile=True)  # type: ignore[untyped-decorator]
        def gradients(self, x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            return loss, tape.gradient(loss, self.trainable_variables)

        def train_step(self, data: Any) -> Any:
            loss, grads = self.gradients(*data)
            self.optimizer.apply(grads, self.trainable_variables)
            return {"loss": loss}

    return Compiled(model.inputs, model.outputs)


class Trained:
    """One process that fits models."""

    def __init__(self, kind: str, name: str, rank: int, size: int, ways: list[str]) -> None:
        """Join, and compile a model for each way."""
        import keras

        import flatweights.ray
        from flatweights.keras import average_gradients

        rng = np.random.default_rng(rank)
        shape, classes = ((64,), 4) if kind == "dense" else ((32, 32, 3), 1000)
        x = rng.standard_normal((BATCH * STEPS[kind], *shape), np.float32)
        y = rng.standard_normal((len(x), classes), np.float32)
        self._data, self._steps = (x, y), STEPS[kind]
        member = flatweights.ray.join(name, rank=rank, size=size)
        self._models, self._seconds = {}, 0.0
        self._clock = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda *_: setattr(self, "_seconds", -time.perf_counter()),
            on_epoch_end=lambda *_: setattr(self, "_seconds", self._seconds + time.perf_counter()),
        )
        for way in ways:
            keras.utils.set_random_seed(0)
            model = self._models[way] = build(keras, kind)
            if way == COMPILED:
                model = self._models[way] = compiled_steps(keras, model)
            optimizer = keras.optimizers.SGD(0.001)
            if way != ALONE:
                average_gradients(optimizer, member=member)
            model.compile(optimizer, "mse", jit_compile=False)

    def fit(self, way: str) -> float:
        """Train for two epochs; return the seconds of a step of the second one."""
        model = self._models[way]
        model.fit(*self._data, BATCH, epochs=2, verbose=0, callbacks=[self._clock])
        return self._seconds / self._steps

    def weights(self, way: str) -> list[Any]:
        """Return the trained weights."""
        return [np.asarray(v) for v in self._models[way].trainable_variables]


class Averaged:
    """One process that averages variables."""

    def __init__(self, kind: str, name: str, rank: int, size: int, gpu: str) -> None:
        """Join, and make the variables on the GPU."""
        os.environ["FLATWEIGHTS_GPU"] = gpu
        import tensorflow as tf

        import flatweights.ray
        from flatweights.tensorflow import TensorFlowVariables

        shapes = models.POLICY if kind == "policy" else getattr(models, kind)()
        with tf.device("GPU:0"):
            self._variables = [tf.Variable(part) for part in models.random_parts(shapes, seed=rank)]
            self._flat = tf.zeros(sum(int(np.prod(shape)) for shape in shapes))
        self._ours = TensorFlowVariables(self._variables)
        self._member = flatweights.ray.join(name, rank=rank, size=size)
        self._sync = tf.test.experimental.sync_devices
        self._copy = tf.function(lambda x: x + 0, autograph=False)

    def average(self, calls: int) -> tuple[float, str]:
        """Return the seconds of a call, and the way by which this member's weights went."""
        self._sync()
        begin = time.perf_counter()
        for _ in range(calls):
            round_ = self._member.average_variables(self._ours)
        self._sync()
        return (time.perf_counter() - begin) / calls, str(round_.transports[self._member.rank])

    def copy(self, calls: int) -> float:
        """Return the seconds of a copy of as many bytes within the GPU's memory."""
        self._copy(self._flat)
        self._sync()
        begin = time.perf_counter()
        for _ in range(calls):
            self._copy(self._flat)
        self._sync()
        return (time.perf_counter() - begin) / calls

    def flat(self) -> Any:
        """Return the values."""
        return self._ours.get_flat()


def time_fit(
    kind: str, size: int, budget: float, ways: Sequence[str] = (runner.OURS, ALONE, COMPILED)
) -> list[runner.Row]:
    """Time `fit` of one kind of model on ``size`` processes."""
    actor: Any = ray.remote(num_cpus=1, num_gpus=1 / size)(Trained)
    members = [actor.remote(kind, f"fit {kind}", rank, size, [*ways]) for rank in range(size)]

    def fit(way: str) -> float:
        return float(max(ray.get([one.fit.remote(way) for one in members])))

    times: dict[str, list[float]] = {}
    for way in ways:
        try:
            fit(way)
            times[way] = []
        except Exception as error:  # XLA needs parts of CUDA that a machine may lack
            print(f"{kind}: {way}: {error!s:.600}", flush=True)
    first, *rest = ray.get([one.weights.remote(runner.OURS) for one in members])
    assert all(all(map(np.array_equal, first, weights)) for weights in rest), "members differ"
    end = time.perf_counter() + budget
    while time.perf_counter() < end or len(times[runner.OURS]) < 3:
        for way, seconds in times.items():
            seconds.append(fit(way))
    rows = [runner.row_of(f"fit {kind}, {size}", way, took) for way, took in times.items()]
    for one in members:
        ray.kill(one)
    return rows


def time_rounds(kind: str, size: int, gpu: str, budget: float) -> list[runner.Row]:
    """Time averages of variables on ``size`` processes, with one setting of ``FLATWEIGHTS_GPU``."""
    actor: Any = ray.remote(num_cpus=1, num_gpus=1 / size)(Averaged)
    name = f"average {kind} {size} {gpu}"
    members = [actor.remote(kind, name, rank, size, gpu) for rank in range(size)]
    parts = [np.asarray(one) for one in ray.get([one.flat.remote() for one in members])]
    ray.get([one.average.remote(1) for one in members])
    mean = np.mean(np.stack(parts).astype(np.float64), axis=0)
    for one in ray.get([one.flat.remote() for one in members]):
        assert np.allclose(one, mean, rtol=1e-6, atol=1e-7), "no average"
    times: list[float] = []
    copies: list[float] = []
    end = time.perf_counter() + budget
    while time.perf_counter() < end or len(times) < 3:
        answers = ray.get([one.average.remote(CALLS) for one in members])
        times.append(max(seconds for seconds, _ in answers))
        copies.append(ray.get(members[0].copy.remote(CALLS)))
    case = f"average_variables {kind}, {size}"
    rows = [runner.row_of(case, f"{runner.OURS}, {gpu}: {answers[0][1]}", times)]
    if gpu == "host":
        rows.append(runner.row_of(case, "one copy within the GPU", copies))
    for one in members:
        ray.kill(one)
    return rows


def run(options: Namespace) -> list[runner.Row]:
    """Time everything."""
    budget = 3.0 if options.quick else 10.0
    rows = []
    jobs = [partial(time_fit, kind, 2, budget) for kind in STEPS]
    sizes = (2,) if options.quick else (2, 4, 8)
    for kind in ("policy", "resnet20", "resnet50"):
        for size in sizes:
            jobs += [partial(time_rounds, kind, size, gpu, budget) for gpu in ("host", "device")]
    for job in jobs:
        try:
            these = job()
        except Exception as error:  # the other cases are still worth their time
            print(f"{job.args}: {error!s:.2000}", flush=True)
            continue
        for row in these:
            print(f"{row.case}: {row.contender}: {row.seconds * 1e6:.1f} µs", flush=True)
        rows += these
    return rows


def main() -> None:
    """Run the bench."""
    options = runner.arguments(__doc__ or "")
    ray.init("local", num_cpus=9, num_gpus=1, include_dashboard=False, log_to_driver=False)
    try:
        rows = run(options)
    finally:
        ray.shutdown()
    runner.report("members on one GPU", rows, {}, options)


if __name__ == "__main__":
    main()
