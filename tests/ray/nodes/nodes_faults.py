"""Faults of links and nodes in the middle of exchanges, over links shaped to a rate.

``python -m tests.ray.nodes.nodes_faults [--mbit 200] [--timeout 6] [--case NAME]``

It makes its own nodes (see `bench.nodes`), for which it needs root, ``ip`` and ``tc``; if one is
missing, it says so. In each round, a fault happens at a point of the exchange, or a moment later.
The round must end within a second after its timeout, its average must have the bits that
`Round.used` and `Round.groups` determine, and all ranks must come back once the fault is over.
"""

import argparse
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "helpers"))

import numpy as np
import ray
from bench import nodes
from ray_workers import merged
from reference import same_bits

import flatweights as fw
from flatweights.ray import FlatWorker, Round, WorkerError, WorkerGroup
from flatweights.ray.support import _failpoints

PLACES = (0, 1, 2, 1, 1, 2)  # by rank, its node
SIZE = 1_000_003  # elements
SLACK = 1.0  # seconds after its timeout in which a round must end
LONGEST = 30.0  # seconds in which a round without a timeout must end
STORE = 100_000_000  # bytes of the object store of each node
DELAYS = (0.0, 0.15)  # seconds after the point


def model_of(rank: int, seed: int) -> fw.FlatWeights:
    values = np.random.default_rng([seed, rank]).normal(size=SIZE)
    return fw.FlatWeights({"w": values.astype(np.float32), "n": np.int64(rank)})


class Giver(FlatWorker):
    """Returns random weights, and takes any."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.model = model_of(rank, 0)

    def get_weights(self) -> fw.FlatWeights:
        return self.model

    def set_weights(self, new_weights: Mapping[str, Any], *, share: bool = False) -> None:
        self.model = fw.FlatWeights(new_weights)

    def fill(self, nbytes: int) -> None:
        """Keep ``nbytes`` of the node's store in use."""
        self.kept = None
        self.kept = ray.get(ray.put(np.ones(nbytes, np.uint8))) if nbytes else None

    def give(self, seed: int) -> fw.FlatWeights:
        return model_of(self.rank, seed)


def check(result: Round, seed: int) -> None:
    models = [model_of(rank, seed) for rank in result.used]
    if result.groups:
        places = [[result.used.index(rank) for rank in group] for group in result.groups]
        expected = merged(models, places)
    else:
        expected = fw.average(models)
    assert same_bits(result.weights.buffer, expected.buffer), result


def meet(group: WorkerGroup, timeout: float = 120) -> float:
    """Wait until all ranks take part, by channels and agents; return the seconds of the last."""
    end = time.monotonic() + timeout
    while True:
        begin = time.monotonic()
        group.restore(timeout=5)
        found = group.average("give", 1, min_results=1, timeout=20)
        check(found, 1)
        by_memory = [k for k in found.used if found.transports[k].startswith(("shm", "agent"))]
        if len(by_memory) == len(PLACES):
            return time.monotonic() - begin
        assert time.monotonic() < end, (found, found.transports, group.unhealthy)


class Faults:
    """The group, its nodes, and their faults."""

    def __init__(self, mbit: float, timeout: float) -> None:
        self.timeout = timeout  # seconds of a round
        os.environ["FLATWEIGHTS_BETWEEN_NODES"] = "streams"
        self.nodes, self.mbit = nodes.Nodes.of_this_process(), mbit
        worker = ray.remote(num_cpus=0, max_restarts=-1)(Giver)
        self.group = WorkerGroup(
            [
                worker.options(resources={f"node{node}": 1}).remote(rank)
                for rank, node in enumerate(PLACES)
            ]
        )
        self.group.broadcast(model_of(0, 0))
        self.failures = 0
        meet(self.group)

    def at(self, point: str, delay: float, act: Callable[[], object]) -> None:
        """Call ``act`` ``delay`` seconds after the next ``point`` of the driver's exchange."""

        def hook(reached: str) -> None:
            if reached == point:
                _failpoints.hook = None
                if delay:
                    threading.Timer(delay, act).start()
                else:
                    act()

        _failpoints.hook = hook

    def try_round(
        self,
        name: str,
        after: Callable[[], object],
        least: set[int],
        timeout: float | None = -1.0,
    ) -> None:
        """Make a round with the prepared fault, end the fault, and wait until all are back."""
        timeout = self.timeout if timeout == -1 else timeout
        begin = time.monotonic()
        said = ""
        try:
            found = self.group.average("give", 3, min_results=1, timeout=timeout)
            took = time.monotonic() - begin
            check(found, 3)
            if not least <= {*found.used}:
                said = f"left out more than the node: {found}"
        except WorkerError as error:
            took = time.monotonic() - begin
            found, said = None, f"no result: {error}"
        if took > (LONGEST if timeout is None else timeout + SLACK):
            said += f"; took {took:.2f} s"
        _failpoints.hook = None
        time.sleep(0.5)
        after()
        begin = time.monotonic()
        try:
            meet(self.group)
        except (AssertionError, WorkerError) as error:
            said += f"; not back: {error}"
        back = time.monotonic() - begin
        used = "" if found is None else f"of {found.used}"
        print(
            f"{'FAILED' if said else 'ok':6} {name}: {took:.2f} s {used},"
            f" all back after {back:.1f} s {said[:600]}",
            flush=True,
        )
        self.failures += bool(said)

    def cut(self) -> None:
        for point in _failpoints.NODE:
            for delay in DELAYS:
                self.at(point, delay, lambda: self.nodes.cut(1))
                self.try_round(
                    f"link cut at {point} + {delay} s", lambda: self.nodes.mend(1), {0, 2, 5}
                )

    def cut_at_home(self) -> None:
        self.at("exchanging", 0.1, lambda: self.nodes.cut(0))
        self.try_round("the driver's link cut", lambda: self.nodes.mend(0), {0})

    def cut_between(self) -> None:
        for timeout in (self.timeout, None):
            self.at("exchanging", 0.0, lambda: self.nodes.cut_between(1, 2))
            self.try_round(
                f"the link between two others cut, timeout {timeout}",
                lambda: self.nodes.mend_between(1, 2),
                {*range(6)} if timeout is None else {0},
                timeout,
            )

    def full_store(self) -> None:
        """The stores of two nodes have no room for results that are to go to the driver."""
        actors = self.group.actors()
        fillers = [actors[rank] for rank in (1, 2)]
        ray.get([filler.fill.remote(STORE - (8 << 20)) for filler in fillers])

        def after() -> None:
            self.nodes.mend_between(1, 2)
            ray.get([filler.fill.remote(0) for filler in fillers])

        self.at("exchanging", 0.0, lambda: self.nodes.cut_between(1, 2))
        self.try_round("full object stores", after, {*range(6)}, None)

    def slow(self) -> None:
        for point in ("exchanging", "merging"):
            self.at(point, 0.05, lambda: self.nodes.slow(1, self.mbit / 10))
            self.try_round(
                f"a tenth of the rate at {point}", lambda: self.nodes.slow(1, self.mbit), {0}
            )

    def interrupt(self) -> None:
        for point in _failpoints.NODE:
            self.at(point, 0.0, lambda: os.kill(os.getpid(), 2))
            try:
                self.group.average("give", 3)
            except KeyboardInterrupt:
                self.try_round(f"after an interrupt at {point}", lambda: None, {*range(6)})

    def kill(self) -> None:
        self.at("exchanging", 0.1, lambda: self.nodes.kill(1))
        begin = time.monotonic()
        found = self.group.average("give", 3, min_results=1, timeout=self.timeout)
        took = time.monotonic() - begin
        check(found, 3)
        is_good = took < self.timeout + SLACK and {0, 2, 5} <= {*found.used}
        print(f"{'ok' if is_good else 'FAILED':6} a node killed: {took:.2f} s {found}")
        again = self.group.average("give", 4, min_results=1, timeout=self.timeout)
        check(again, 4)
        self.failures += not is_good


CASES = ("cut", "cut_at_home", "cut_between", "full_store", "slow", "interrupt", "kill")


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--mbit", type=float, default=200.0)
    parser.add_argument("--timeout", type=float, default=6.0)
    parser.add_argument("--case", choices=CASES, action="append")
    options = parser.parse_args()
    if nodes.is_among_nodes():
        ray.init(log_to_driver=False)
        faults = Faults(options.mbit, options.timeout)
        for case in options.case or CASES:
            getattr(faults, case)()
        return min(faults.failures, 1)
    absent = nodes.missing()
    if absent is not None:
        print(f"nodes_faults: needs {absent}", file=sys.stderr)
        return 2
    command = ["-m", "tests.ray.nodes.nodes_faults", *sys.argv[1:]]
    nodes.enter(command)
    cluster = nodes.Nodes.make(3)
    cluster.shape(options.mbit)
    cluster.start_ray(store=STORE)
    inside = cluster.inside(0, [sys.executable, *command])
    environment = cluster.environment()
    environment["PYTHONPATH"] += os.pathsep + str(Path(__file__).parents[2] / "helpers")
    return subprocess.run(inside, env=environment, check=False, timeout=1800).returncode


if __name__ == "__main__":
    sys.exit(main())
