"""Asynchronous training: updates per second, without and with work in the workers.

``python -m bench.bench_async [--quick] [--json FILE]``

A worker gets weights, sets its TensorFlow variables, works and returns a gradient. The driver adds
each gradient to the weights in place as it arrives, and gives the new weights to that worker. The
guide's loop uses ``ray.wait`` over plain actors that take and return dicts of arrays. "handles" is
the same loop over this package's workers, with one vector each way. Ours uses
`WorkerGroup.as_completed` and `WorkerGroup.publish`. The ways alternate; rows are medians, with the
spread of the middle half. "publish" is a single call of it. The last rows are rounds of `run` while
two workers are added: while their processes start and import TensorFlow, which takes two cores, and
while their construction sleeps for 5 s.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import ray

import flatweights as fw
from bench import models, runner
from flatweights.ray import FlatWorker, WorkerGroup

MODELS = {"policy": models.POLICY, "resnet20": models.resnet20()}
GUIDE, HANDLES = "guide: ray.wait, dicts", "handles: ray.wait, buffers"
OURS = f"{runner.OURS}, as_completed"


class Worker(FlatWorker):
    """Returns a gradient after a given time of work."""

    def build(self, shapes: models.Shapes, seed: int, asleep: Path | None = None) -> Any:
        """Make the variables and the gradient; sleep 5 s before, if a file is to be made then."""
        import tensorflow as tf

        if asleep is not None:
            asleep.touch()
            time.sleep(5.0)
        values = models.random_parts(shapes, seed=seed)
        self._named = {f"v{i}": tf.Variable(v, name=f"v{i}") for i, v in enumerate(values)}
        self._parts = {name: variable.numpy() for name, variable in self._named.items()}
        return self._named

    def work(self, seconds: float) -> None:
        """Compute for ``seconds``."""
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass

    def of_dict(self, weights: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Work on a dict of arrays, and return one: the way of Ray's guide."""
        for name, variable in self._named.items():
            variable.assign(weights[name])
        self.work(seconds)
        return self._parts

    def of_weights(self, weights: Any, seconds: float) -> Any:
        """Work on weights in one buffer, and return weights: the loop over handles."""
        self.set_weights(weights)
        return self.of_group(seconds)

    def of_group(self, seconds: float) -> Any:
        """Work on the weights that the group sent; return weights, as large as a gradient."""
        self.work(seconds)
        return self.get_weights()


Loop = Callable[[int, float], None]


class Loops:
    """The loops over one set of workers; each takes a number of updates, and seconds of work."""

    def __init__(self, shapes: models.Shapes, workers: list[Any]) -> None:
        """Take the ``workers``."""
        parts = models.random_parts(shapes)
        self.weights = fw.FlatWeights({f"v{i}": part for i, part in enumerate(parts)})
        self.workers = workers
        self.group = WorkerGroup(workers)
        self.most = 0  # staleness

    def guide(self, updates: int, seconds: float) -> None:
        """Run the guide's loop."""
        weights = {name: part.copy() for name, part in self.weights.items()}
        running = {worker.of_dict.remote(weights, seconds): worker for worker in self.workers}
        for _ in range(updates):
            (first,), _ = ray.wait(list(running))
            worker, gradient = running.pop(first), ray.get(first)
            for name, part in gradient.items():
                weights[name] += 1e-9 * part
            running[worker.of_dict.remote(weights, seconds)] = worker
        ray.get(list(running))

    def handles(self, updates: int, seconds: float) -> None:
        """Run the same loop with one buffer each way."""
        weights = self.weights.copy()
        running = {worker.of_weights.remote(weights, seconds): worker for worker in self.workers}
        for _ in range(updates):
            (first,), _ = ray.wait(list(running))
            worker, gradient = running.pop(first), ray.get(first)
            fw.axpy_(weights, 1e-9, gradient)
            running[worker.of_weights.remote(weights, seconds)] = worker
        ray.get(list(running))

    def ours(self, updates: int, seconds: float) -> None:
        """Run a loop of the group."""
        weights = self.weights.copy()
        self.group.publish(weights)
        for result in self.group.as_completed("of_group", seconds, updates=updates):
            fw.axpy_(weights, 1e-9, result.weights)
            self.group.publish(weights)
            self.most = max(self.most, *result.staleness.values())

    def check(self) -> None:
        """Check that every result comes from the weights that its staleness names."""
        weights = self.weights.copy()
        for number in range(200):
            weights["v0"][...] = number
            self.group.publish(weights)
            if number == 0:
                rounds = self.group.as_completed("of_group", 0.0)
            result = next(rounds)
            (staleness,) = result.staleness.values()
            assert (result.weights["v0"] == number - staleness).all(), (number, staleness)
        rounds.close()


def run_case(name: str, workers: list[Any], work: float, budget: float) -> list[runner.Row]:
    """Return the rows of one model, these workers and seconds of work."""
    loops = Loops(MODELS[name], workers)
    loops.check()
    ways: dict[str, Loop] = {GUIDE: loops.guide, HANDLES: loops.handles, OURS: loops.ours}
    times: dict[str, list[float]] = {way: [] for way in ways}
    shares: dict[str, list[float]] = {way: [] for way in ways}
    counts = dict.fromkeys(ways, 20)
    for way, loop in ways.items():  # warm up; updates in a fiftieth of the budget
        loop(20, work)
        begin = time.perf_counter()
        loop(20, work)
        counts[way] = max(20, int(0.02 * budget / ((time.perf_counter() - begin) / 20)))
    loops.most = 0
    end = time.perf_counter() + budget
    while time.perf_counter() < end:
        for way, loop in ways.items():
            begin, begin_share = time.perf_counter(), time.process_time()
            loop(counts[way], work)
            times[way].append((time.perf_counter() - begin) / counts[way])
            shares[way].append((time.process_time() - begin_share) / counts[way])
    nbytes = 2 * loops.weights.buffer.nbytes
    case = f"{name}, {len(workers)} workers, {1e3 * work:g} ms of work"
    print(f"{case}: staleness {loops.most} at most")
    rows = []
    for text, measured, moved in (("", times, nbytes), (": the driver's share", shares, 0)):
        ours = statistics.median(measured[OURS])
        rows += [_row(case + text, way, took, moved, ours) for way, took in measured.items()]
    return rows


def publish_case(name: str, workers: list[Any], budget: float) -> list[runner.Row]:
    """Return the row of one call of `WorkerGroup.publish`, while two workers work."""
    loops = Loops(MODELS[name], workers)
    weights, times = loops.weights.copy(), []
    for _ in loops.group.as_completed("of_group", 0.0, updates=max(100, int(400 * budget))):
        begin = time.perf_counter()
        loops.group.publish(weights)
        times.append(time.perf_counter() - begin)
    nbytes = 2 * weights.buffer.nbytes
    return [_row(f"publish {name}", OURS, times, nbytes, statistics.median(times))]


def adding_case(name: str) -> list[runner.Row]:
    """Return rounds of four workers before and while two more are built."""
    group = WorkerGroup.create(Worker, 4, MODELS[name], arguments=lambda rank: (rank,), num_cpus=0)
    group.average("of_group", 0.0)  # all have started
    before, starting, asleep = list[float](), list[float](), list[float]()
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        files = {rank: Path(folder) / str(rank) for rank in (4, 5)}
        for result in group.run(1_000_000, "of_group", 0.0):
            seconds = result.seconds["round"]
            if result.joined:
                break
            if not starting and time.perf_counter() < begin + 2:
                before.append(seconds)
            elif not starting:
                group.add(2, MODELS[name], arguments=lambda rank: (rank, files[rank]))
                starting.append(seconds)
            elif asleep or all(map(Path.exists, files.values())):
                asleep.append(seconds)
            else:
                starting.append(seconds)
    group.shutdown()
    ways = {OURS: before, "while two start": starting, "while two sleep": asleep}
    case, median, rows = f"rounds of run, {name}, 4 workers", statistics.median(before), []
    for way, times in ways.items():
        times.sort()
        shares = [times[min(len(times) - 1, int(share * len(times)))] for share in (0.5, 0.99, 1)]
        print(way, "median, 99 %, slowest:", *(f"{1e3 * seconds:.2f} ms" for seconds in shares))
        rows.append(_row(case, way, times, 0, median))
    return rows


def _row(case: str, way: str, times: list[float], nbytes: int, ours: float) -> runner.Row:
    row = runner.row_of(case, way, times, nbytes)
    row.ratio = row.seconds / ours
    return row


def main() -> None:
    """Run the cases."""
    options = runner.parser(__doc__ or "").parse_args()
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    budget = 4.0 if options.quick else 20.0
    rows: list[runner.Row] = []
    published: list[runner.Row] = []
    for name, shapes in MODELS.items():
        actor: Any = ray.remote(Worker)
        workers = [actor.options(num_cpus=0).remote(shapes, seed) for seed in range(4)]
        for work in (0.0, 2e-3):
            for count in (2, 4):
                rows += run_case(name, workers[:count], work, budget)
        published += publish_case(name, workers[:2], budget)
        for worker in workers:
            ray.kill(worker)
    rows += published
    rows += adding_case("policy")
    runner.report("Asynchronous training: seconds of one update", rows, {}, options)


if __name__ == "__main__":
    main()
