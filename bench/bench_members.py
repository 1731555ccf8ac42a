"""One average of members on a node, compared with a round of a `WorkerGroup` over the same actors.

``python -m bench.bench_members [--quick] [--json FILE] [--plot FILE]``

The actors do not train, so only the exchange is timed. Members call in loops of their own, without
the driver. The driver calls `WorkerGroup.average` with ``broadcast=`` in a loop. Both gather the
variables of all actors, average them and set them. Both take turns; the first rounds of a turn,
which bring the actors back from other calls, are not timed. "arrays" is `Member.average` of a
`FlatWeights` into itself, without TensorFlow. The limit counts the bytes that must move: each
member's variables and segment are read and written, the average reads all segments and writes one,
and each member reads that one. Open MPI's ``Allreduce``, if it is installed, and bare memory with
futexes have neither variables nor Python's calls, and no member may be missing.
"""

import os
import time
from argparse import Namespace
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import ray

import flatweights as fw
from bench import machine, models, rivals, runner
from bench.bench_exchange import start_ray
from flatweights.ray import FlatWorker, Member, WorkerGroup, join

GROUP = "WorkerGroup, one call"
ARRAYS = f"{runner.OURS}, arrays"
_TURNS = 5
_UNTIMED = 3


class Worker(FlatWorker):
    """An actor of a group that is also a member of a process group."""

    member: Member

    def build(self, shapes: models.Shapes, seed: int) -> Any:
        """Make the variables."""
        import tensorflow as tf

        values = models.random_parts(shapes, seed=seed)
        return {f"v{i}": tf.Variable(v, name=f"v{i}") for i, v in enumerate(values)}

    def join(self, name: str, rank: int, size: int) -> None:
        """Join the process group."""
        self.member = join(name, rank=rank, size=size)

    def averages(self, way: str, seconds: float) -> list[float]:
        """Call averages for some seconds; return the seconds of each call."""
        arrays = self.variables.get_weights()
        times: list[float] = []
        end = time.perf_counter() + seconds
        goes_on = np.ones(1)
        while goes_on[0]:
            for _ in range(10 if times else _UNTIMED + 1):
                begin = time.perf_counter()
                if way == ARRAYS:
                    self.member.average(arrays, out=arrays)
                else:
                    self.member.average_variables(self.variables)
                times.append(time.perf_counter() - begin)
            # All stop together.
            goes_on = self.member.broadcast(np.array([time.perf_counter() < end]))
        return times[_UNTIMED:]


def run_case(name: str, shapes: models.Shapes, count: int, budget: float) -> list[runner.Row]:
    """Return the rows of one model and number of members."""
    actor = ray.remote(num_cpus=0)(Worker)
    workers = [actor.remote(shapes, seed) for seed in range(count)]
    group = WorkerGroup(workers)
    ray.get([w.join.remote(f"{name}-{count}", rank, count) for rank, w in enumerate(workers)])
    values = [
        np.concatenate([part.reshape(-1) for part in models.random_parts(shapes, seed=seed)])
        for seed in range(count)
    ]
    oracle = fw.average(values)
    times: dict[str, list[float]] = {runner.OURS: [], ARRAYS: [], GROUP: []}
    ray.get([worker.averages.remote(runner.OURS, 0.0) for worker in workers])
    for vector in ray.get([worker.get_flat.remote() for worker in workers]):
        np.testing.assert_array_equal(vector, oracle)
    result: Any = None
    for _ in range(_TURNS):
        for way in (runner.OURS, ARRAYS):
            share = budget / _TURNS / len(times)
            times[way] += ray.get([w.averages.remote(way, share) for w in workers])[0]
        end = time.perf_counter() + share
        count_of_turn = 0
        while time.perf_counter() < end or count_of_turn < 2 * _UNTIMED:
            begin = time.perf_counter()
            result = group.average("get_weights", broadcast=result)
            count_of_turn += 1
            if count_of_turn > _UNTIMED:
                times[GROUP].append(time.perf_counter() - begin)
    case = f"{name}, {count} members"
    nbytes = values[0].nbytes * (4 * count + count + 1)
    rows = [runner.row_of(case, way, seconds, nbytes) for way, seconds in times.items()]
    for row in rows:
        row.ratio = row.seconds / rows[0].seconds
    for worker in workers:
        ray.kill(worker)
    return rows + rivals.rows_of(case, values[0].size, count, rows[0].seconds, budget)


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
        for count in (4,) if options.quick else (2, 4, 8):
            rows += run_case(name, shapes, count, 4.0 if options.quick else 10.0)
    ray.shutdown()
    runner.report("members", rows, machine.limits(rounds=3), options)


if __name__ == "__main__":
    run(runner.arguments(__doc__ or ""))
