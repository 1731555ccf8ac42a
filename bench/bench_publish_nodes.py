"""Published weights on all nodes: seconds from `Publisher.publish` until every node has set them.

``python -m bench.bench_publish_nodes [--quick] [--case NODES MB MBIT] [--json FILE]``

The publisher is on the first node, and a subscriber is on each of the others. The rival is what one
does with Ray alone: `ray.put`, and one actor on each node that gets the reference and copies the
weights. Both take turns; all values are checked. "out of the source" is the number of models that
passed the first node's link, headers included, and "out of the busiest" that of the node whose link
passed most. "predicted" is the time of `flatweights.ray.plan`, divided by the measured time;
"simulated" is that of ``python -m tests.sim --scale --of published``. The bench makes its own nodes
(see `bench.nodes`), which needs root, ``ip`` and ``tc``; if one is missing, it says so and ends.
"""

import json
import os
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import ray
from rich.console import Console
from tests.sim import scale
from tests.sim.cluster import Cluster

from bench import machine, models, nodes, runner
from bench.nodes import Nodes
from flatweights.ray import Publisher, Subscriber, plan

MB = 1_000_000
RAY = "ray.put, and ray.get on each node"

COLUMNS = (
    *("case", "contender", "time", "±%", "vs. ours", "out of the source", "out of the busiest"),
    *("predicted", "simulated"),
)


@dataclass(frozen=True)
class Case:
    """Nodes, bytes of the weights, and million bits per second of each link and direction."""

    nodes: int
    nbytes: int
    mbit: float

    def __str__(self) -> str:
        return f"{self.nodes} nodes, {self.nbytes / MB:.0f} MB, {self.mbit:.0f} Mbit/s"


QUICK = (Case(7, 20 * MB, 400),)
CASES = (Case(2, 20 * MB, 400), Case(4, 20 * MB, 400), *QUICK, Case(7, 100 * MB, 1000))


@dataclass
class Row:
    """The time of one contender; see `COLUMNS`."""

    case: str
    contender: str
    seconds: float
    spread: float
    ratio: float
    source: float
    busiest: float
    predicted: float | None
    simulated: float | None

    def cells(self) -> list[str]:
        """Return the cells of the columns."""

        def over(seconds: float | None) -> str:
            return "" if seconds is None else f"{seconds / self.seconds:.2f}"

        return [
            *(self.case, self.contender, f"{self.seconds:.3f} s", f"{100 * self.spread:.0f}"),
            *(f"{self.ratio:.2f}", f"{self.source:.2f}", f"{self.busiest:.2f}"),
            *(over(self.predicted), over(self.simulated)),
        ]


class Reader:
    """An actor with weights, and a subscriber that sets them."""

    def __init__(self, name: str, nbytes: int) -> None:
        """Subscribe."""
        self._weights: Any = np.zeros(nbytes // 4, np.float32)
        self._subscriber = Subscriber(name, self._weights, timeout=120)

    def wait(self, version: int) -> float:
        """Return the first weight, once this version is set."""
        while self._subscriber.version < version:
            if not self._subscriber.update():
                time.sleep(0.001)
        return self._checked()

    def copy(self, weights: Any) -> float:
        """Copy weights that Ray has got; return the first one."""
        np.copyto(self._weights, weights)
        return self._checked()

    def _checked(self) -> float:
        shift: Any = self._weights - models.random_vector(self._weights.size, seed=0)
        assert np.ptp(shift) < 1e-2, "torn weights"
        return float(shift[0])


def run_case(case: Case, cluster: Nodes, budget: float) -> list[Row]:
    """Return the rows of one case."""
    cluster.shape(case.mbit)
    first = models.random_vector(case.nbytes // 4, seed=0)
    weights = first.copy()
    name = str(case)
    publisher = Publisher(name, weights)
    actor: Any = ray.remote(num_cpus=0)(Reader)
    readers = [
        actor.options(resources={f"node{k}": 1}).remote(name, case.nbytes)
        for k in range(1, case.nodes)
    ]

    def ours() -> list[Any]:
        version = publisher.publish()
        return [reader.wait.remote(version) for reader in readers]

    def by_ray() -> list[Any]:
        ref = ray.put(weights)
        return [reader.copy.remote(ref) for reader in readers]

    ways: dict[str, Callable[[], list[Any]]] = {runner.OURS: ours, RAY: by_ray}
    times: dict[str, list[float]] = {way: [] for way in ways}
    passed: dict[str, list[list[float]]] = {way: [] for way in ways}
    end, turn = time.perf_counter() + budget, 0
    while time.perf_counter() < end or turn < 3 * len(ways):
        for way, call in ways.items():
            turn += 1
            np.add(first, np.float32(turn), out=weights)
            before = cluster.traffic()
            begin = time.perf_counter()
            found = ray.get(call())
            seconds = time.perf_counter() - begin
            assert np.allclose(found, turn, atol=1e-2), f"{way}: expected {turn}, got {found}"
            if turn > len(ways):
                times[way].append(seconds)
                links = zip(cluster.traffic(), before, strict=True)
                passed[way].append([now.since(then).sent / case.nbytes for now, then in links])
    publisher.close()
    for reader in readers:
        ray.kill(reader)
    bits = case.mbit * 1e6
    predicted = plan(nodes=case.nodes, workers=1, model=case.nbytes, link=bits).published
    modelled = Cluster.of(case.nodes, 1, case.nbytes, bits)
    rows = []
    for way, took in times.items():
        row = runner.row_of(str(case), way, took)
        is_ours = way == runner.OURS
        rows.append(
            Row(
                case=row.case,
                contender=way,
                seconds=row.seconds,
                spread=row.spread,
                ratio=row.seconds / statistics.median(times[runner.OURS]),
                source=statistics.median(links[0] for links in passed[way]),
                busiest=statistics.median(max(links) for links in passed[way]),
                predicted=predicted if is_ours else None,
                simulated=scale.seconds_of(modelled, "published") if is_ours else None,
            )
        )
    return rows


def drive(cases: Sequence[Case], options: Namespace) -> None:
    """Run the cases, from the first node."""
    cluster = Nodes.of_this_process()
    ray.init(os.environ["RAY_ADDRESS"], log_to_driver=False, logging_level="error")
    rows: list[Row] = []
    for case in cases:
        print(f"{case} ...", file=sys.stderr, flush=True)
        rows += run_case(case, cluster, 6.0 if options.quick else 20.0)
    ray.shutdown()
    info = machine.describe()
    console = Console(width=170)
    console.print("  ".join(f"{key}: {value}" for key, value in info.items()), highlight=False)
    console.print(runner.table_of(COLUMNS, [tuple(row.cells()) for row in rows]))
    if options.json:
        record = {"machine": info, "published": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(record, indent=1))


def main() -> None:
    """Run the bench."""
    parser = runner.parser(__doc__ or "")
    parser.add_argument("--case", nargs=3, type=float, action="append")
    options = parser.parse_args()
    given = tuple(Case(int(count), int(mb * MB), mbit) for count, mb, mbit in options.case or [])
    cases = given or (QUICK if options.quick else CASES)
    nodes.run_among("bench_publish_nodes", max(case.nodes for case in cases))
    drive(cases, options)


if __name__ == "__main__":
    main()
