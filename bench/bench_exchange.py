"""One round on Ray: get, average, put, set, over actors that hold TensorFlow variables.

``python -m bench.bench_exchange [--quick] [--json FILE] [--plot FILE]``

The workers do not train, so only the exchange is timed. Our rows are rounds of a `WorkerGroup`,
over channels and over the object store. In loops, a round is one call that sets, runs and averages,
since the guide's loop also passes weights on with the call; a loop that calls `average` and
`broadcast` has a row of its own. Contenders alternate, and the first round of each turn is not
timed. Some also run in loops of their own, with the next round at once or after 5 ms. More rows
time a round right after other calls, which has to call workers back to their channels, and one
empty command to one worker.

If PyTorch is installed, one rival is an allreduce by gloo of the vector that `FlatWorker` gets and
sets: it has no driver, and no worker may be missing. Others neither set nor get variables: Open
MPI's ``Allreduce``, if it is installed, and bare memory with futexes. "memory traffic" makes the
copies of a round (get, average, set) in the driver only: its ratio is the share of memory traffic
in a round.

The limit counts the bytes that a round must move: each worker's variables and segment are read
and written, the average reads all segments and writes one, and each worker reads that one.
"""

import os
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import ray

import flatweights as fw
from bench import machine, models, peers, rivals, runner
from flatweights.ray import FlatWorker, WorkerGroup, average

STORE = f"{runner.OURS}, object store"
TWO_CALLS = f"{runner.OURS}, average and broadcast"
PAUSE = 5e-3
_LOOPS = 3


class Worker(FlatWorker):
    """An actor that gives and takes its variables in every way that is compared."""

    def build(self, shapes: models.Shapes, seed: int) -> Any:
        """Make the variables, and a Keras layer with the same ones."""
        import tensorflow as tf

        from bench.peers import KerasHolder

        self._shapes, self._seed = shapes, seed
        values = models.random_parts(shapes, seed=seed)
        self._keras = KerasHolder(shapes)
        self._keras.set_weights(values)
        self._named = {f"v{i}": tf.Variable(v, name=f"v{i}") for i, v in enumerate(values)}
        return self._named

    def get_dict(self) -> dict[str, Any]:
        """Return a dict of arrays, as in Ray's guide."""
        return {name: variable.numpy() for name, variable in self._named.items()}

    def set_dict(self, weights: dict[str, Any]) -> None:
        """Assign each."""
        for name, variable in self._named.items():
            variable.assign(weights[name])

    def get_list(self) -> Any:
        """Return Keras's list of weights."""
        return self._keras.get_weights()

    def set_list(self, weights: Any) -> None:
        """Set them with Keras."""
        self._keras.set_weights(weights)

    def begin(self) -> None:
        """Reset the weights to the first ones."""
        values = models.random_parts(self._shapes, seed=self._seed)
        self.set_flat(np.concatenate([part.reshape(-1) for part in values]))

    def join(self, name: str, size: int, rank: int) -> None:
        """Join a group of ``size`` for collective calls."""
        collective = peers.gloo_collective()
        assert collective is not None
        collective.init_collective_group(size, rank, backend="gloo", group_name=name)
        self._collective, self._group, self._size = collective, name, size

    def allreduce(self) -> None:
        """Take the mean of all workers' weights, as each of them does at the same time."""
        vector = self.get_flat()
        self._collective.allreduce(vector, group_name=self._group)
        vector /= self._size
        self.set_flat(vector)


class Rounds:
    """The ways to do a round over one set of workers.

    Attributes:
        steps: Seconds of each step of each round, by way and step.
    """

    def __init__(self, workers: list[Any]) -> None:
        """Take the ``workers``."""
        self._workers = workers
        self._group = WorkerGroup(workers)
        self._one = WorkerGroup(workers[:1])
        self._out: Any = None
        self._found: Any = None
        self.steps: dict[tuple[str, str], list[float]] = defaultdict(list)

    @contextmanager
    def _step(self, way: str, step: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.steps[way, step].append(time.perf_counter() - begin)

    def flat(self) -> Any:
        """One buffer each, through the object store."""
        with self._step(STORE, "get, average"):
            refs = [worker.get_weights.remote() for worker in self._workers]
            found = average(refs, out=self._out)
        with self._step(STORE, "put"):
            ref = found.ref
        with self._step(STORE, "set"):
            ray.get([worker.set_weights.remote(ref) for worker in self._workers])
        if self._out is None:
            self._out = found.weights.copy()
        return np.concatenate([part.reshape(-1) for part in found.weights.values()])

    def in_one_call(self) -> None:
        """A round of a group, which sends the average of the round before."""
        self._found = self._group.average("get_weights", broadcast=self._found)

    def in_channels(self) -> Any:
        """A round of a group that ends when all workers have the average."""
        with self._step(runner.OURS, "get, average"):
            found = self._group.average("get_weights")
        with self._step(runner.OURS, "send"):
            self._group.broadcast(found)
        return np.concatenate([part.reshape(-1) for part in found.weights.values()])

    def command(self) -> None:
        """One empty command to one worker."""
        self._one.step("ping")

    def dict_loop(self) -> Any:
        """The loop of Ray's guide."""
        way = "dict of arrays"
        with self._step(way, "get"):
            given = ray.get([worker.get_dict.remote() for worker in self._workers])
        with self._step(way, "average"):
            mean = {k: sum(w[k] for w in given) / len(given) for k in given[0]}
        with self._step(way, "put"):
            ref = ray.put(mean)
        with self._step(way, "set"):
            ray.get([worker.set_dict.remote(ref) for worker in self._workers])
        return np.concatenate([part.reshape(-1) for part in mean.values()])

    def lists(self) -> Any:
        """Lists of Keras weights, as in the example of Ray's current guide."""
        way = "Keras lists"
        with self._step(way, "get"):
            given = ray.get([worker.get_list.remote() for worker in self._workers])
        with self._step(way, "average"):
            mean = [sum(layer) / len(given) for layer in zip(*given, strict=True)]
        with self._step(way, "put"):
            ref = ray.put(mean)
        with self._step(way, "set"):
            ray.get([worker.set_list.remote(ref) for worker in self._workers])
        return np.concatenate([part.reshape(-1) for part in mean])

    def join(self, name: str) -> None:
        """Prepare `allreduce`."""
        size = len(self._workers)
        ray.get([worker.join.remote(name, size, k) for k, worker in enumerate(self._workers)])

    def allreduce(self) -> Any:
        """Each worker with the others, by gloo."""
        first = not self.steps["gloo allreduce", "get, allreduce, set"]
        if first:
            ray.get([worker.begin.remote() for worker in self._workers])
        with self._step("gloo allreduce", "get, allreduce, set"):
            ray.get([worker.allreduce.remote() for worker in self._workers])
        # The result is in the workers; the first is compared.
        return ray.get(self._workers[-1].get_flat.remote()) if first else None

    def calls(self) -> None:
        """One call of Ray's to each: afterwards no worker waits at its mailbox."""
        ray.get([worker.ping.remote() for worker in self._workers])

    def empty(self) -> None:
        """The calls alone, which no way over Ray can avoid."""
        for _ in range(2):
            ray.get([worker.ping.remote() for worker in self._workers])


def run_case(name: str, shapes: models.Shapes, count: int, budget: float) -> list[runner.Row]:
    """Return the rows of one model and number of workers."""
    actor = ray.remote(num_cpus=0)(Worker)
    workers = [actor.remote(shapes, seed) for seed in range(count)]
    rounds = Rounds(workers)
    values = [
        np.concatenate([part.reshape(-1) for part in models.random_parts(shapes, seed=seed)])
        for seed in range(count)
    ]
    oracle = np.mean(np.asarray(values, np.float64), axis=0)
    contenders: dict[str, Callable[[], Any]] = {
        runner.OURS: rounds.in_channels,
        STORE: rounds.flat,
        "dict of arrays": rounds.dict_loop,
        "Keras lists": rounds.lists,
    }
    if peers.gloo_collective() is None:
        print(f"{name}, {count} workers: no gloo allreduce: PyTorch is not installed")
    else:
        rounds.join(f"{name}-{count}")
        contenders["gloo allreduce"] = rounds.allreduce
    nbytes = values[0].nbytes * (4 * count + count + 1)
    contenders["memory traffic"] = traffic_of(shapes, count)
    for _ in range(2):  # the first round goes through the store while workers attach
        rounds.in_channels()
    rounds.steps.clear()
    ray.get([worker.begin.remote() for worker in workers])
    # The first call of each sets all workers to the mean, which later rounds keep.
    rows = runner.time_case(
        f"{name}, {count} workers",
        contenders,
        nbytes=nbytes,
        oracle=oracle,
        tolerance=1e-6,
        budget=budget,
        between=rounds.calls,
    )
    case = f"{name}, {count} workers"
    rows += rivals.rows_of(case, values[0].size, count, rows[0].seconds, budget)
    rows += runner.time_case(
        f"{name}, {count} workers: two empty calls each",
        {"Ray": rounds.empty},
        nbytes=0,
        budget=min(1.0, budget),
    )
    rows += run_loops(rounds, f"{name}, {count} workers: in a loop", budget)
    rows += run_loops(rounds, f"{name}, {count} workers: 5 ms between", budget, PAUSE)
    rows += run_commands(rounds, name, count)
    rows += [
        runner.row_of(f"{name}, {count} workers: steps", f"{way}: {step}", seconds)
        for (way, step), seconds in rounds.steps.items()
    ]
    for worker in workers:
        ray.kill(worker)
    return rows


def traffic_of(shapes: models.Shapes, count: int) -> Callable[[], Any]:
    """Return a function that moves the bytes of a round, and returns the average."""
    replicas = [
        fw.FlatWeights(
            {f"v{i}": part for i, part in enumerate(models.random_parts(shapes, seed=k))}
        )
        for k in range(count)
    ]
    segments = [model.copy() for model in replicas]
    mean, taken = segments[0].copy(), [model.copy() for model in replicas]

    def move() -> Any:
        for model, segment in zip(replicas, segments, strict=True):
            np.copyto(segment.buffer, model.buffer)
        fw.average(segments, out=mean)
        for one in taken:
            np.copyto(one.buffer, mean.buffer)
        return np.concatenate([part.reshape(-1) for part in mean.values()])

    return move


def run_loops(rounds: Rounds, case: str, budget: float, pause: float = 0.0) -> list[runner.Row]:
    """Return the rows of ways in loops of their own, in which workers wait at their channels."""
    ways = {
        runner.OURS: rounds.in_one_call,
        TWO_CALLS: rounds.in_channels,
        STORE: rounds.flat,
        "dict of arrays": rounds.dict_loop,
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(_LOOPS):
        for way, call in ways.items():
            rounds.calls()
            call()
            end = time.perf_counter() + budget / _LOOPS / len(ways)
            while time.perf_counter() < end or len(times[way]) < _LOOPS:
                time.sleep(pause)
                begin = time.perf_counter()
                call()
                times[way].append(time.perf_counter() - begin)
    rows = [runner.row_of(case, way, seconds) for way, seconds in times.items()]
    for row in rows:
        row.ratio = row.seconds / rows[0].seconds
    return rows


def run_commands(rounds: Rounds, name: str, count: int) -> list[runner.Row]:
    """Return the rows of empty commands by a channel, and of rounds that call workers back."""
    rows = []
    for way, pause in (("at once", 0.0), ("after 5 ms", PAUSE)):
        seconds = []
        for _ in range(200):
            time.sleep(pause)
            begin = time.perf_counter()
            rounds.command()
            seconds.append(time.perf_counter() - begin)
        rows.append(runner.row_of(f"{name}, {count} workers: one command", way, seconds[20:]))
    firsts = []
    for _ in range(20):
        rounds.calls()
        begin = time.perf_counter()
        rounds.in_channels()
        firsts.append(time.perf_counter() - begin)
    case = f"{name}, {count} workers: a round after other calls"
    return [*rows, runner.row_of(case, runner.OURS, firsts)]


def start_ray() -> None:
    """Start a Ray whose actors find this package and are silent."""
    inherited = {"PYTHONPATH": str(rivals.ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    ray.init(
        "local", include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": inherited}
    )


def run(options: Namespace) -> None:
    """Run the bench."""
    budget = 1.5 if options.quick else 5
    start_ray()
    shapes_of: dict[str, models.Shapes] = {
        "policy": models.POLICY,
        "resnet20": models.resnet20(),
        "resnet50": models.resnet50(),
    }
    if options.quick:
        shapes_of = {"resnet20": shapes_of["resnet20"]}
    rows = []
    for name, shapes in shapes_of.items():
        for count in (4,) if options.quick else (1, 4, 8):
            rows += run_case(name, shapes, count, budget)
    ray.shutdown()
    runner.report("exchange", rows, machine.limits(rounds=3), options)


if __name__ == "__main__":
    run(runner.arguments(__doc__ or ""))
