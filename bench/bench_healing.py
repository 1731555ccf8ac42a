"""Trainings with averaged gradients whose members die and sleep: the cost for the survivors.

``python -m bench.bench_healing [--quick] [--json FILE] [--plot FILE]``

Four processes of a node train a Keras model in their own loop. Ten times, one of them is killed at
a random moment and replaced by another process; five times, one is stopped for longer than the
others wait. "longest step" is the longest step of rank 0, which survives, from each fault until the
member takes part again; for a step that waits for a sleeping member, only the time beyond the
timeout counts. "healing" is the time of a new member's first call: it waits for the next step of
the others, and gets variables, slots and iterations. The import of TensorFlow and the building of
the model are done before that call, and do not count. "step" is the median step of rank 0 with all
members, in a training that can do without members, and in one that needs all. All processes have
one thread for TensorFlow's operations. At the end, the bench checks that all members have the same
bits, and that no step is missing.
"""

import hashlib
import os
import random
import signal
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import ray

from bench import runner
from bench.bench_exchange import start_ray
from bench.bench_fit import BATCH, build, data, one_thread

SIZE = 4
TIMEOUT = 1.0  # seconds
ALL = f"{runner.OURS}, step, all members needed"
_FAR = 1 << 40  # steps


class Step(NamedTuple):
    """One step of one member: its begin and end by `time.monotonic`, and the ranks in it."""

    begin: float
    end: float
    number: int
    used: tuple[int, ...]


class Trained(NamedTuple):
    """The record of one member."""

    steps: list[Step]
    digest: str


class Trainer:
    """A process with a model."""

    def __init__(self, kind: str, seed: int) -> None:
        """Build the model."""
        one_thread()
        import keras

        keras.utils.set_random_seed(seed)
        self._model = build(keras, kind)
        self._data = [part[: 8 * BATCH] for part in data(kind, seed)]

    def pid(self) -> int:
        """Return the id of the process."""
        return os.getpid()

    def train(self, name: str, rank: int, folder: str, min_results: int | None) -> Trained:
        """Take part in a training until a file in ``folder`` names its last step."""
        import keras
        import tensorflow as tf

        from flatweights.keras import average_gradients
        from flatweights.ray import join

        model, (x, y) = self._model, map(tf.constant, self._data)
        member = join(name, rank=rank, size=SIZE)
        optimizer = average_gradients(
            keras.optimizers.SGD(0.01, momentum=0.9), member=member, min_results=min_results
        )
        optimizer.build(model.trainable_variables)
        beats = np.memmap(Path(folder, "beats"), np.int64)
        steps: list[Step] = []
        calls: list[Any] = []
        average = member.average_variables

        def timed(*args: Any, **options: Any) -> Any:
            begin = time.monotonic()
            options["timeout"] = TIMEOUT if steps else 60.0  # the first step is traced
            result = average(*args, **options)
            if not calls:
                name = f"healed {os.getpid()}" if result.healed else "began"
                Path(folder, name).write_text(str(time.monotonic() - begin))
            calls.append(result)
            return result

        vars(member)["average_variables"] = timed

        @tf.function  # type: ignore[untyped-decorator]
        def step(x: Any, y: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
            variables = model.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)

        while int(optimizer.iterations) < beats[SIZE]:
            k = BATCH * (len(steps) % 8)
            begin = time.monotonic()
            step(x[k : k + BATCH], y[k : k + BATCH])
            result = calls[-1]
            steps.append(Step(begin, time.monotonic(), result.number, result.used))
            if rank in result.used:
                beats[rank] = int(optimizer.iterations)
        member.average({"end": np.zeros(1)}, min_results=1, timeout=60.0)
        member.leave()
        digest = hashlib.blake2b(digest_size=8)
        for variable in (*model.trainable_variables, *optimizer.variables):
            digest.update(np.asarray(variable).tobytes())
        return Trained(steps, digest.hexdigest())


class Training:
    """Four members, and one process that waits to take a place."""

    def __init__(self, kind: str, name: str, min_results: int | None) -> None:
        """Begin to train."""
        self._actor: Any = ray.remote(num_cpus=0, max_concurrency=2)(Trainer)
        self._kind, self._terms, self._built = kind, min_results, 0
        self._folder = tempfile.TemporaryDirectory()
        self._name = name
        self.beats = np.memmap(
            Path(self._folder.name, "beats"), np.int64, mode="w+", shape=(SIZE + 1,)
        )
        self.beats[SIZE] = _FAR
        self._spare: Any = None
        trainers = [self._trainer() for _ in range(SIZE)]
        self.pids = ray.get([trainer.pid.remote() for trainer in trainers])
        self._trainers = trainers
        self._runs = [self._run(trainer, rank) for rank, trainer in enumerate(trainers)]
        self.until_all_take_part()

    def _trainer(self) -> Any:
        self._built += 1
        return self._actor.remote(self._kind, self._built)

    def _run(self, trainer: Any, rank: int) -> Any:
        return trainer.train.remote(self._name, rank, self._folder.name, self._terms)

    def until_all_take_part(self) -> None:
        """Wait until each member has taken part in some more steps."""
        target = int(self.beats[:SIZE].max()) + 10
        while self.beats[:SIZE].min() < target:
            gone, _ = ray.wait(self._runs, timeout=0)
            ray.get(gone)
            time.sleep(0.01)

    def prepare(self) -> None:
        """Start another process, which waits for the next place."""
        self._spare = self._trainer()
        ray.get(self._spare.pid.remote())

    def kill(self, rank: int) -> None:
        """Replace a member."""
        os.kill(self.pids[rank], signal.SIGKILL)
        ray.wait([self._runs[rank]])
        self._trainers[rank], self._spare = self._spare, None
        self.pids[rank] = ray.get(self._trainers[rank].pid.remote())
        self._runs[rank] = self._run(self._trainers[rank], rank)
        self.until_all_take_part()

    def stop(self, rank: int) -> None:
        """Stop a member for a while."""
        os.kill(self.pids[rank], signal.SIGSTOP)
        time.sleep(1.5 * TIMEOUT)
        os.kill(self.pids[rank], signal.SIGCONT)
        self.until_all_take_part()

    def end(self) -> list[Trained]:
        """End the training after some more steps; return the records of all members."""
        self.beats[SIZE] = self.beats[:SIZE].max() + 100
        trained = [Trained(*one) for one in ray.get(self._runs)]
        for trainer in self._trainers:
            ray.kill(trainer)
        assert len({one.digest for one in trained}) == 1, "members differ"
        return trained

    def healings(self) -> list[float]:
        """Return the seconds of the first call of each new member."""
        return [float(path.read_text()) for path in Path(self._folder.name).glob("healed *")]


def usual(trained: list[Trained]) -> list[float]:
    """Return the seconds of rank 0's steps with all members."""
    steps = [Step(*step) for step in trained[0].steps]
    return [step.end - step.begin for step in steps if len(step.used) == SIZE][10:]


def time_kind(kind: str, kills: int, stops: int) -> list[runner.Row]:
    """Time one kind of model."""
    rng = random.Random(0)
    faults: list[tuple[str, float, float]] = []
    plain: list[float] = []
    steps: list[float] = []
    for turn in range(4):  # trainings of the two ways take turns
        needs_all = turn % 2 == 1
        training = Training(kind, f"{kind} {turn}", None if needs_all else 1)
        until = time.monotonic() + 6.0
        while time.monotonic() < until:
            training.until_all_take_part()
        (plain if needs_all else steps).extend(usual(training.end()))
    training = Training(kind, f"{kind} healing", 1)
    for what in rng.sample(["dies"] * kills + ["sleeps"] * stops, kills + stops):
        rank = rng.randrange(1, SIZE)  # rank 0 has seen all steps
        if what == "dies":
            training.prepare()
        training.until_all_take_part()
        time.sleep(rng.random() * 0.2)
        begin = time.monotonic()
        (training.kill if what == "dies" else training.stop)(rank)
        faults.append((what, begin, time.monotonic()))
    trained = training.end()
    survivor = [Step(*step) for step in trained[0].steps]
    numbers = [step.number for step in survivor]
    assert numbers == [*range(numbers[0], numbers[0] + len(numbers))], "a step is missing"
    longest: dict[str, list[float]] = {"dies": [], "sleeps": []}
    for what, begin, end in faults:
        seconds = [s.end - s.begin for s in survivor if s.end > begin and s.begin < end]
        longest[what].append(max(seconds) - (TIMEOUT if what == "sleeps" else 0.0))
    healings = training.healings()
    assert len(healings) == kills
    case = f"{kind}, {SIZE} members"
    return [
        runner.row_of(case, f"{runner.OURS}, step", steps),
        runner.row_of(case, ALL, plain),
        runner.row_of(case, f"{runner.OURS}, longest step, a member dies", longest["dies"]),
        runner.row_of(case, f"{runner.OURS}, longest step, one sleeps", longest["sleeps"]),
        runner.row_of(case, f"{runner.OURS}, healing", healings),
    ]


def run(options: Namespace) -> list[runner.Row]:
    """Time all kinds."""
    kills, stops = (3, 2) if options.quick else (10, 5)
    return [row for kind in ("dense", "resnet20") for row in time_kind(kind, kills, stops)]


def main() -> None:
    """Run the bench."""
    options = runner.arguments(__doc__ or "")
    start_ray()
    try:
        rows = run(options)
    finally:
        ray.shutdown()
    runner.report("members that die and sleep", rows, {}, options)


if __name__ == "__main__":
    main()
