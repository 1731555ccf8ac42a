"""The newest weights for acting processes: through shared memory, or from an actor.

``python -m bench.bench_publish [--quick] [--json FILE] [--plot FILE]``

The driver publishes again and again. Readers, each an actor with the model's variables, ask for
newer weights in a loop, as between two steps of an environment. The readers time a question without
newer weights, and one with newer weights until the variables are set. All ways take turns.

- "an actor's references": the way of RLlib. An actor holds version and reference; a reader calls
  ``pull_if_newer(version)``, gets the dict of arrays, and assigns each variable.
- "one vector through Ray's store": the same, but with one flat vector, which `set_flat` reads in
  place.
- "a memcpy of memory that both map": not a way to publish, since a read may be torn, but the limit
  of an update. The bytes are in the cache of another processor, which has just written them, and no
  variable is set.

Processors that share no cache pay for every line that moves between them, by any way. So there are
also rows of a reader in the publisher's process, with warm and with cold caches (128 MB written
before each update).

The driver times publishing, and a step of NumPy alone, with a reader that asks all the time, and
beside a process that only computes. The last row shows the part of the slowdown that comes from the
machine, such as memory and a clock that two processors share. The limit in percent is the time to
read and write the model once for each reader.
"""

import os
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import ray

from bench import machine, models, runner
from bench.bench_exchange import start_ray
from flatweights.ray import Publisher, Subscriber
from flatweights.tensorflow import TensorFlowVariables

ACTOR, VECTOR = "an actor's references", "one vector through Ray's store"
MEMCPY = "a memcpy of memory that both map"
WAYS = (runner.OURS, ACTOR, VECTOR, MEMCPY)
_TURNS = 4
_PAUSE = 1e-3  # seconds between two questions: a step of an environment
_HEAD = 64  # bytes before the model, in which its version is


def variables_of(shapes: models.Shapes, seed: int) -> TensorFlowVariables:
    """Return the variables of a model."""
    import tensorflow as tf

    values = models.random_parts(shapes, seed=seed)
    return TensorFlowVariables([tf.Variable(v, name=f"v{i}") for i, v in enumerate(values)])


class Mapped:
    """A file in memory with a version and a model; reads of it may be torn."""

    def __init__(self, path: str, nbytes: int) -> None:
        """Map it; it is made if there is none."""
        with Path(path).open("ab") as file:
            file.truncate(_HEAD + nbytes)
        memory = np.memmap(path, np.uint8, "r+")
        self.version, self.model = memory[:8].view(np.int64), memory[_HEAD:]


class Holder:
    """Holds the newest reference and its version."""

    def __init__(self) -> None:
        """Hold nothing."""
        self.held: tuple[int, list[Any]] = (0, [])

    def put(self, version: int, refs: list[Any]) -> None:
        """Hold a newer reference."""
        self.held = version, refs

    def pull_if_newer(self, version: int) -> Any:
        """Return version and reference if they are newer."""
        return self.held if self.held[0] > version else None


class Reader:
    """Has the variables of a model, and sets them to the newest weights."""

    def __init__(
        self, name: str, shapes: models.Shapes, holders: dict[str, Any], path: str
    ) -> None:
        """Make the variables."""
        self.variables = variables_of(shapes, seed=1)
        self.subscriber = Subscriber(name, self.variables)
        self.holders = holders
        self.copy = self.variables.get_flat().view(np.uint8).copy()
        self.mapped = Mapped(path, self.copy.nbytes)
        self.versions = dict.fromkeys(WAYS, 0)

    def ask(self, way: str) -> bool:
        """Set the variables if there are newer weights; return whether there were."""
        if way == runner.OURS:
            return self.subscriber.update()
        if way == MEMCPY:
            version = int(self.mapped.version[0])
            if version <= self.versions[way]:
                return False
            self.versions[way] = version
            np.copyto(self.copy, self.mapped.model)
            return True
        news = ray.get(self.holders[way].pull_if_newer.remote(self.versions[way]))
        if news is None:
            return False
        self.versions[way], (ref,) = news
        weights = ray.get(ref)
        if way == VECTOR:
            self.variables.set_flat(weights)
        else:
            for name, variable in self.variables.variables.items():
                variable.assign(weights[name])
        return True

    def run(self, way: str, seconds: float, pause: float) -> tuple[list[float], list[float]]:
        """Ask for a while; return the seconds without newer weights, and those with newer weights.

        Questions that are too short for the clock are timed in hundreds.
        """
        nothing: list[float] = []
        news: list[float] = []
        end = time.perf_counter() + seconds
        self.ask(way)
        while time.perf_counter() < end:
            begin = time.perf_counter()
            is_new = self.ask(way)
            took = time.perf_counter() - begin
            if is_new:
                news.append(took)
            elif way in (runner.OURS, MEMCPY):
                begin = time.perf_counter()
                was_new = [self.ask(way) for _ in range(100)]
                took = (time.perf_counter() - begin) / 100
                if not any(was_new):
                    nothing.append(took)
            else:
                nothing.append(took)
            if pause:
                time.sleep(pause)
        return nothing, news

    def compute(self, seconds: float) -> None:
        """Compute for so long, without memory that others read or write."""
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass

    def values(self, way: str) -> Any:
        """Return all weights as one vector."""
        return self.copy.view(np.float32) if way == MEMCPY else self.variables.get_flat()


remote_holder: Any = ray.remote(num_cpus=0)(Holder)
remote_reader: Any = ray.remote(num_cpus=0)(Reader)


class Learner:
    """Publishes by each way.

    Attributes:
        times: By way, the seconds of each publication.
    """

    def __init__(self, name: str, shapes: models.Shapes) -> None:
        """Make variables, a publisher and holders."""
        self.variables = variables_of(shapes, seed=0)
        self.publisher = Publisher(name, self.variables)
        self.holders = {way: remote_holder.remote() for way in (ACTOR, VECTOR)}
        self.folder = tempfile.TemporaryDirectory(dir="/dev/shm")
        self.path = str(Path(self.folder.name) / "mapped")
        self.mapped = Mapped(self.path, self.variables.get_flat().nbytes)
        self.version = 0
        self.times: dict[str, list[float]] = {way: [] for way in WAYS}

    def publish(self, way: str) -> None:
        """Publish once."""
        self.version += 1
        flat = self.variables.get_flat().view(np.uint8) if way == MEMCPY else None
        begin = time.perf_counter()
        if way == runner.OURS:
            self.publisher.publish()
        elif flat is not None:
            np.copyto(self.mapped.model, flat)
            self.mapped.version[0] = self.version
        else:
            get = self.variables.get_flat if way == VECTOR else self._parts
            ref = ray.put(get())
            ray.get(self.holders[way].put.remote(self.version, [ref]))
        self.times[way].append(time.perf_counter() - begin)

    def close(self) -> None:
        """Publish no more."""
        self.publisher.close()
        self.folder.cleanup()

    def _parts(self) -> dict[str, Any]:
        return {name: variable.numpy() for name, variable in self.variables.variables.items()}


def run_case(name: str, shapes: models.Shapes, count: int, budget: float) -> list[runner.Row]:
    """Return the rows of one model and number of readers."""
    learner = Learner(f"{name}-{count}", shapes)
    flat = learner.variables.get_flat()
    readers = [
        remote_reader.remote(f"{name}-{count}", shapes, learner.holders, learner.path)
        for _ in range(count)
    ]
    for way in WAYS:  # check results, and warm up
        learner.variables.set_flat(flat * (2 + WAYS.index(way)))
        learner.publish(way)
        ray.get([reader.run.remote(way, 0.0, 0.0) for reader in readers])
        for values in ray.get([reader.values.remote(way) for reader in readers]):
            np.testing.assert_array_equal(values, learner.variables.get_flat())
    pause = max(3e-3, 4 * flat.nbytes / 1e9)
    nothing: dict[str, list[float]] = {way: [] for way in WAYS}
    news: dict[str, list[float]] = {way: [] for way in WAYS}
    for times in learner.times.values():
        times.clear()
    for _ in range(_TURNS):
        for way in WAYS:
            seconds = budget / _TURNS / len(WAYS)
            calls = [reader.run.remote(way, seconds, _PAUSE) for reader in readers]
            waiting = calls
            while waiting:
                learner.publish(way)
                _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=pause)
            for without, some in ray.get(calls):
                nothing[way] += without
                news[way] += some
    nbytes = flat.nbytes
    case = f"{name}, {count} reader{'s' if count > 1 else ''}"
    rows = []
    for what, measured, moved in (
        ("nothing new", nothing, 0),
        ("read and set", news, 2 * nbytes * count),
        ("publish", learner.times, 2 * nbytes),
    ):
        found = [
            runner.row_of(f"{case}: {what}", way, measured[way], moved)
            for way in WAYS
            if len(measured[way]) > 1
        ]
        for row in found:
            row.ratio = row.seconds / found[0].seconds
        rows += found
    for actor in (*readers, *learner.holders.values()):
        ray.kill(actor)
    learner.close()
    return rows


def run_alone(budget: float) -> list[runner.Row]:
    """Return the rows of an update in the publisher's own process, with warm and cold caches."""
    shapes = models.resnet20()
    learner = Learner("alone", shapes)
    nbytes = learner.mapped.model.nbytes
    trampled = np.zeros(128 << 20, np.uint8)
    rows = []
    with Subscriber("alone", variables_of(shapes, seed=1)) as subscriber:
        copy = np.empty(nbytes, np.uint8)
        contenders: dict[str, Callable[[], Any]] = {
            runner.OURS: subscriber.update,
            MEMCPY: lambda: np.copyto(copy, learner.mapped.model),
        }
        for caches in ("warm", "cold"):
            times: dict[str, list[float]] = {way: [] for way in contenders}
            end = time.perf_counter() + budget / 2
            while time.perf_counter() < end:
                for way, call in contenders.items():
                    learner.publish(way)
                    if caches == "cold":
                        np.add(trampled, 1, out=trampled)
                    begin = time.perf_counter()
                    call()
                    times[way].append(time.perf_counter() - begin)
            case = f"resnet20, in the publisher's process: read and set, {caches}"
            found = [runner.row_of(case, way, t, 2 * nbytes) for way, t in times.items()]
            for row in found:
                row.ratio = row.seconds / found[0].seconds
            rows += found
    learner.close()
    return rows


def run_steps(budget: float) -> list[runner.Row]:
    """Return the rows of a learner's step with and without a reader that asks all the time."""
    learner = Learner("steps", models.resnet20())
    learner.publish(runner.OURS)
    reader = remote_reader.remote("steps", models.resnet20(), learner.holders, learner.path)
    ray.get(reader.run.remote(runner.OURS, 0.0, 0.0))
    a = models.random_vector(500 * 500).reshape(500, 500)
    contenders: dict[str, Callable[[float], Any]] = {
        "alone": lambda _: None,
        "with a reader that asks all the time": lambda s: reader.run.remote(runner.OURS, s, 0.0),
        "beside a process that computes by itself": reader.compute.remote,
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(2 * _TURNS):
        for name, begin_call in contenders.items():
            seconds = budget / len(contenders) / 2 / _TURNS
            call = begin_call(seconds)
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                begin = time.perf_counter()
                np.sin(a)
                learner.publisher.publish()
                times[name].append(time.perf_counter() - begin)
            if call is not None:
                ray.get(call)
    rows = [runner.row_of("resnet20: a step and a publication", n, t) for n, t in times.items()]
    for row in rows:
        row.ratio = row.seconds / rows[0].seconds
    ray.kill(reader)
    learner.close()
    return rows


def run(options: Namespace) -> None:
    """Run the bench."""
    start_ray()
    shapes_of: dict[str, models.Shapes] = {
        "policy": models.POLICY,
        "resnet20": models.resnet20(),
        "resnet50": models.resnet50(),
    }
    rows = []
    for name, shapes in shapes_of.items():
        for count in (1, 4):
            rows += run_case(name, shapes, count, 6.0 if options.quick else 20.0)
    rows += run_alone(2.0 if options.quick else 6.0)
    rows += run_steps(4.0 if options.quick else 12.0)
    ray.shutdown()
    runner.report("publish", rows, machine.limits(rounds=3), options)


if __name__ == "__main__":
    run(runner.arguments(__doc__ or ""))
