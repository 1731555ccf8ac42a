"""Steps of a table of embeddings in two members, on one node or between two of a slow network.

``python -m bench.bench_embeddings [--quick] [--json FILE] [--mbit RATE]``

The model is a table of 1,000,000 x 32 float32 (128 MB) and two dense layers; a batch is 1,024 ids
in each member. "without exchange" trains the same model in both members at the same time, each by
itself: the difference is the cost of the exchange. ``sparse=False`` exchanges whole gradients;
otherwise rows are exchanged where these are less work. With ``--mbit``, each member is on a node of
its own, with links of so many million bits per second (see `bench.nodes`). One thread computes
TensorFlow's operations. Settings take turns, and the slower member counts. Before timing, the bench
checks that both members have the same weights.
"""

import hashlib
import os
import sys
import time
from argparse import ArgumentParser, Namespace
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import ray

from bench import nodes, runner

ROWS, WIDTH, BATCH = 1_000_000, 32, 1024
OPTIMIZERS = ("SGD", "Adagrad", "Adam", "Ftrl")
ALONE = "without exchange"
DENSE = f"{runner.OURS}, sparse=False"
SETTINGS = (runner.OURS, DENSE, ALONE)
TURN = 5  # steps


class Trained:
    """One process with a model for each setting."""

    def __init__(self, name: str, rank: int, optimizer: str) -> None:
        """Join, and make the models."""
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
        import keras

        import flatweights.ray
        from flatweights.keras import average_gradients

        self._member = flatweights.ray.join(name, rank=rank, size=2)
        self._rng = np.random.default_rng(rank)
        self._steps: dict[str, Any] = {}
        self._models: dict[str, Any] = {}
        for setting in SETTINGS:
            keras.utils.set_random_seed(0)
            table = keras.layers.Embedding(ROWS, WIDTH)
            hidden = [keras.layers.Flatten(), keras.layers.Dense(64, "relu")]
            inputs = keras.Input((1,), dtype="int32")
            model = keras.Sequential([inputs, table, *hidden, keras.layers.Dense(1)])
            rule = getattr(keras.optimizers, optimizer)(0.01)
            if setting != ALONE:
                sparse: Any = False if setting == DENSE else "auto"
                average_gradients(rule, member=self._member, sparse=sparse)
            rule.build(model.trainable_variables)
            self._models[setting] = model
            self._steps[setting] = self._step(tf, model, rule)

    @staticmethod
    def _step(tf: Any, model: Any, optimizer: Any) -> Any:
        @tf.function(autograph=False)  # type: ignore[untyped-decorator]
        def step(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
            optimizer.apply(
                tape.gradient(loss, model.trainable_variables), model.trainable_variables
            )
            return loss

        return step

    def step(self, setting: str, count: int) -> float:
        """Make steps together with the other member; return the seconds of one."""
        self._member.all_gather(0)
        begin = time.perf_counter()
        for _ in range(count):
            x = self._rng.integers(0, ROWS, (BATCH, 1)).astype(np.int32)
            y = self._rng.standard_normal((BATCH, 1), np.float32)
            self._steps[setting](x, y).numpy()
        return (time.perf_counter() - begin) / count

    def digest(self, setting: str) -> bytes:
        """Return a digest of the weights."""
        digest = hashlib.blake2b()
        for variable in self._models[setting].trainable_variables:
            digest.update(np.asarray(variable).tobytes())
        return digest.digest()

    def leave(self) -> None:
        """Leave the process group."""
        self._member.leave()


def time_optimizer(name: str, budget: float, *, is_far: bool) -> list[runner.Row]:
    """Time the steps of one optimizer."""
    where = [{"resources": {f"node{k}": 1}} if is_far else {"num_cpus": 0} for k in range(2)]
    actor: Any = ray.remote(num_cpus=0)(Trained)
    members = [actor.options(**where[k]).remote(f"table {name}", k, name) for k in range(2)]

    def step(setting: str, count: int) -> float:
        return float(max(ray.get([one.step.remote(setting, count) for one in members])))

    for setting in SETTINGS:
        step(setting, 2)
    for setting in (runner.OURS, DENSE):
        digests = {*ray.get([one.digest.remote(setting) for one in members])}
        assert len(digests) == 1, f"{name}, {setting}: members differ"
    times: dict[str, list[float]] = {setting: [] for setting in SETTINGS}
    end = time.perf_counter() + budget
    while time.perf_counter() < end or len(times[ALONE]) < 3:
        for setting, took in times.items():
            took.append(step(setting, 1 if setting == DENSE and is_far else TURN))
    ray.get([one.leave.remote() for one in members])
    for one in members:
        ray.kill(one)
    return [runner.row_of(f"step, {name}", setting, took) for setting, took in times.items()]


def run(options: Namespace, mbit: float | None) -> None:
    """Time all optimizers in the Ray of this machine, or of its nodes."""
    rows: list[runner.Row] = []
    for name in OPTIMIZERS[:1] if options.quick else OPTIMIZERS:
        these = time_optimizer(name, 5.0 if options.quick else 15.0, is_far=mbit is not None)
        for row in these:
            print(f"{row.case}: {row.contender}: {row.seconds * 1e3:.1f} ms", flush=True)
        rows += these
    where = "one node" if mbit is None else f"two nodes, {mbit:.0f} Mbit/s"
    runner.report(f"a table of {ROWS:,} x {WIDTH}, two members, {where}", rows, {}, options)


def main() -> None:
    """Run the bench."""
    parser = ArgumentParser(add_help=False)
    parser.add_argument("--mbit", type=float)
    own, rest = parser.parse_known_args()
    if own.mbit is not None:
        nodes.run_among("bench_embeddings", 2, own.mbit)
    sys.argv[1:] = rest
    options = runner.arguments(__doc__ or "")
    local: dict[str, Any] = {"address": "local", "num_cpus": 2, "include_dashboard": False}
    ray.init(log_to_driver=False, **({} if own.mbit is not None else local))
    try:
        run(options, own.mbit)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
