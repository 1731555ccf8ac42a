"""Rounds between nodes, over links shaped to a rate: ours, the guide's loop, and two rings.

``python -m bench.bench_nodes [--quick] [--scale] [--case NODES WORKERS MB MBIT] [--json FILE]
[--plot FILE]``

The bench makes its own nodes (see `bench.nodes`). It needs root, ``ip`` and ``tc``; if one is
missing, it says so and ends. Workers are actors without TensorFlow and do not train, so only the
exchange is timed. Contenders take turns, and the first round of each turn is not timed. The limit
is the time of an allreduce: 2 (K - 1) / K models through each link in each direction. "% of the
way's" compares with the time of the bytes that the contender's way must send through one link, one
after the other. "count" is the number of bytes that must pass the busier direction of the busiest
link. "of it" is the number of bytes by the counters of the nodes' interfaces, divided by that
count; they include headers, which are 4.6 % at 1,500 bytes a packet. "predicted" is the time that
`flatweights.ray.plan` predicts, divided by the measured time; "simulated" is the same for ``python
-m tests.sim --scale --of group``, for the way that a group takes by itself. The ring over plain
sockets is the limit in practice.

``--scale`` compares these two with what is measured, in six cases, without rivals: docs/scale.md
has the figures.
"""

import functools
import json
import math
import os
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from tests.sim import scale
from tests.sim.cluster import Cluster

from bench import machine, models, nodes, runner
from bench.nodes import Nodes, Traffic
from bench.rings import Kind, Ring
from flatweights import FlatWeights
from flatweights.ray import FlatWorker, WorkerGroup, plan
from flatweights.ray.nodes._costs import TransportCost

MB = 1_000_000

OURS = runner.OURS
GUIDE = "the guide's loop"
RINGS: dict[Kind, str] = {
    "sockets": "ring over plain sockets",
    "tensorflow": "TensorFlow's ring",
}

_PARTS = 10  # of a model
_TURNS = 3
_MOST = 50  # rounds of a turn
_WAY = "FLATWEIGHTS_BETWEEN_NODES"


@dataclass(frozen=True)
class Case:
    """The size of an exchange, and its links.

    Attributes:
        nodes: The number of nodes.
        workers: The number of workers on each.
        nbytes: Bytes of the model.
        mbit: Million bits per second of each link and direction; None: not limited.
        queue: The longest time, in milliseconds, that a byte waits in a link's queue.
    """

    nodes: int
    workers: int
    nbytes: int
    mbit: float | None
    queue: float = 20.0

    def __str__(self) -> str:
        size = f"{self.nbytes / MB:.0f} MB" if self.nbytes >= MB else f"{self.nbytes / 1e3:.0f} kB"
        rate = "unshaped" if self.mbit is None else f"{self.mbit:.0f} Mbit/s"
        queue = "" if self.queue == 20 else f", queue {self.queue:.0f} ms"
        return f"{self.nodes} x {self.workers}, {size}, {rate}{queue}"

    @property
    def least(self) -> float:
        """Bytes through each link and direction in an allreduce."""
        return 2 * (self.nodes - 1) / self.nodes * self.nbytes


POLICY = 4 * sum(int(np.prod(shape)) for shape in models.POLICY)
QUICK = (Case(4, 1, 20 * MB, 500), Case(4, 4, 20 * MB, 400))
CASES = (
    *(Case(nodes, 1, 20 * MB, 300) for nodes in (3, 4, 6)),
    *(Case(nodes, 1, 100 * MB, 1000) for nodes in (3, 4, 6)),
    Case(4, 4, 20 * MB, 400),
    Case(4, 1, 20 * MB, 500, queue=3),
    Case(4, 1, 20 * MB, 500),
    Case(4, 1, 20 * MB, 500, queue=100),
    Case(2, 1, 100 * MB, None),
    Case(3, 1, POLICY, 1000),
)
SCALE = tuple(
    Case(count, workers, mbytes * MB, mbit)
    for count, workers, mbit in ((6, 1, 1000), (3, 2, 1000), (4, 4, 400))
    for mbytes in (20, 100)
)


COLUMNS = (
    *("case", "contender", "time", "±%", "% of limit", "% of the way's", "vs. ours"),
    *("MB out / in", "count", "of it", "predicted", "simulated"),
)


@dataclass
class Row:
    """The time that one contender took for a round of one case.

    Attributes:
        case: Nodes, workers on each, model and links.
        contender: The name of the contender; ours begin with `OURS`.
        nodes: The number of nodes.
        seconds: Median.
        spread: Half the distance between the quartiles, relative to the median.
        ratio: Time over that of `OURS`.
        limit: Seconds of an allreduce at the rate of the links; None if they have no rate.
        way_limit: Seconds of the bytes that the contender's way brings through one link.
        sent: Bytes per round through the busiest link out of a node.
        received: Bytes per round through the busiest link into one.
        count: Bytes that the way must bring through the busiest link and direction.
        predicted: Seconds that `flatweights.ray.plan` predicts; None for rings.
        simulated: Seconds of a simulation; None for all but `OURS`.
    """

    case: str
    contender: str
    nodes: int
    seconds: float
    spread: float
    ratio: float
    limit: float | None
    way_limit: float | None
    sent: float
    received: float
    count: float
    predicted: float | None
    simulated: float | None

    def cells(self) -> list[str]:
        """Return the cells of the columns after the contender's; see `COLUMNS`."""

        def over(least: float | None) -> str:
            return "" if least is None else f"{100 * least / self.seconds:.0f}"

        time = f"{self.seconds:.3f} s" if self.seconds >= 0.1 else f"{1e3 * self.seconds:.2f} ms"
        busiest = max(self.sent, self.received) / self.count
        return [
            *(time, f"{100 * self.spread:.0f}", over(self.limit), over(self.way_limit)),
            *(f"{self.ratio:.2f}", f"{self.sent / MB:.1f} / {self.received / MB:.1f}"),
            *(f"{self.count / MB:.1f}", f"{busiest:.2f}"),
            *(
                "" if seconds is None else f"{seconds / self.seconds:.2f}"
                for seconds in (self.predicted, self.simulated)
            ),
        ]


class Worker(FlatWorker):
    """A worker that holds arrays."""

    def __init__(self, nbytes: int, seed: int) -> None:
        """Make the arrays; the base's constructor would import TensorFlow."""
        self._nbytes, self._seed = nbytes, seed
        self._model = FlatWeights(parts_of(nbytes, seed))

    def begin(self) -> None:
        """Reset the weights to the first ones."""
        self._model.update(parts_of(self._nbytes, self._seed))

    def get_weights(self) -> FlatWeights:
        """Return the weights."""
        return self._model

    def set_weights(self, new_weights: Any, *, share: bool = False) -> None:
        """Copy them."""
        self._model.update(new_weights)

    def get_dict(self) -> dict[str, Any]:
        """Return a dict of arrays, as in Ray's guide."""
        return {name: np.array(part) for name, part in self._model.items()}

    def set_dict(self, weights: dict[str, Any]) -> None:
        """Assign each."""
        self._model.update(weights)

    def sample(self) -> Any:
        """Return the first of the weights."""
        return self._model["p0"][:1000].copy()


def parts_of(nbytes: int, seed: int) -> dict[str, NDArray[Any]]:
    """Return the parts of a model by name."""
    vector = models.random_vector(nbytes // 4, seed=seed)
    return {f"p{i}": part for i, part in enumerate(np.array_split(vector, _PARTS))}


@dataclass
class Contender:
    """A way to do rounds.

    Attributes:
        name: See `Row`.
        cost: Its cost by `flatweights.ray.plan`.
        prepare: A function that brings workers back from another contender; its time does not
            count.
        rounds: A function that makes a number of rounds, and returns the seconds of each.
    """

    name: str
    cost: TransportCost
    prepare: Callable[[], Any]
    rounds: Callable[[int], list[float]]


class Rounds:
    """Ways to do rounds over one set of workers, and the two rings."""

    def __init__(self, case: Case, cluster: Nodes, *, rivals: bool) -> None:
        """Start the workers, ``case.workers`` on each node, and the rings if there are rivals."""
        actor = ray.remote(num_cpus=0)(Worker)
        ranks = range(case.nodes * case.workers)
        self._case = case
        self._workers = [
            actor.options(resources={f"node{rank % case.nodes}": 1}).remote(case.nbytes, rank)
            for rank in ranks
        ]
        self._oracle: NDArray[Any] = np.zeros(case.nbytes // 4)
        for rank in ranks:
            self._oracle += np.concatenate([*parts_of(case.nbytes, rank).values()])
        self._oracle /= len(ranks)
        self._rivals = rivals
        self._rings = {kind: Ring(kind, cluster, case.nodes) for kind in RINGS if rivals}
        rate = 100e9 if case.mbit is None else case.mbit * 1e6
        of = functools.partial(plan, nodes=case.nodes, model=case.nbytes, link=rate)
        self._plan = of(workers=case.workers)
        self._ring = of(workers=1)["streams"]

    def contenders(self) -> Iterator[Contender]:
        """Yield the contenders, each after a round whose result is checked."""
        for kind, ring in self._rings.items():
            times = functools.partial(ring.times, self._case.nbytes)
            yield Contender(RINGS[kind], self._ring, functools.partial(times, 1), times)
        if self._rivals:
            self._check(GUIDE, self._guide())
            guide = lambda count: [_seconds(self._guide) for _ in range(count)]  # noqa: E731
            yield Contender(GUIDE, self._plan[GUIDE], self._guide, guide)
        for name, (way, key, options) in ours_of(self._case).items():
            if not self._rivals and name != OURS:
                continue
            yield self._group(name, way, self._plan[key], options)

    def close(self) -> None:
        """End the workers and the rings."""
        for ring in self._rings.values():
            ring.close()
        for worker in self._workers:
            ray.kill(worker)

    def _guide(self) -> Any:
        """A round as in Ray's guide: each worker returns a dict of arrays, and all get the mean."""
        given = ray.get([worker.get_dict.remote() for worker in self._workers])
        mean = {k: sum(w[k] for w in given) / len(given) for k in given[0]}
        ref = ray.put(mean)
        ray.get([worker.set_dict.remote(ref) for worker in self._workers])
        return mean

    def _group(
        self, name: str, way: str, cost: TransportCost, options: dict[str, Any]
    ) -> Contender:
        _choose(way)
        group = WorkerGroup(self._workers, initial=None, **options)
        latest: Any = None

        def prepare() -> None:
            # Another contender has set weights since: give all workers the same again.
            _choose(way)
            group.broadcast(latest)
            rounds(1)

        def rounds(count: int) -> list[float]:
            nonlocal latest
            times, begin = [], time.perf_counter()
            for result in group.run(count, "get_weights"):
                times.append(time.perf_counter() - begin)
                latest = result
                begin = time.perf_counter()
            return times

        rounds(2)  # the first shows the group the size; with the second, its agents are up
        ray.get([worker.begin.remote() for worker in self._workers])
        rounds(1)
        self._check(name, latest.weights)
        ways = sorted(set(latest.transports.values()))
        print(f"{self._case}: {name}: {', '.join(ways)}", file=sys.stderr, flush=True)
        return Contender(name, cost, prepare, rounds)

    def _check(self, name: str, mean: Any) -> None:
        """Raise unless a round has brought the mean to all workers."""
        found = np.concatenate([mean[f"p{i}"] for i in range(_PARTS)])
        tolerance = 1e-2 if "16 bits" in name else 1e-5
        np.testing.assert_allclose(found, self._oracle, atol=tolerance, err_msg=name)
        first = ray.get([worker.sample.remote() for worker in self._workers])
        for one in first:
            np.testing.assert_allclose(one, self._oracle[: one.size], atol=tolerance, err_msg=name)


def ours_of(case: Case) -> dict[str, tuple[str, Any, dict[str, Any]]]:
    """Return, by name, the way that is forced, its key in a plan, and options of the group."""
    small = case.nbytes < MB
    default = "driver" if small else "streams"
    found: dict[str, tuple[str, Any, dict[str, Any]]] = {OURS: ("", default, {})}
    found[f"{OURS}, in the driver"] = ("driver", "driver", {})
    if small:
        found[f"{OURS}, over streams"] = ("streams", "streams", {})
    if case.workers > 1:
        key = ("streams", 'reduce_dtype="float32"')
        found[f"{OURS}, float32 sums"] = ("", key, {"reduce_dtype": "float32"})
    if not small:
        key = ("streams", 'wire_dtype="bfloat16"')
        found[f"{OURS}, 16 bits"] = ("", key, {"wire_dtype": "bfloat16"})
    return found


def _choose(way: str) -> None:
    os.environ.pop(_WAY, None)
    if way:
        os.environ[_WAY] = way


def _seconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def run_case(case: Case, cluster: Nodes, budget: float, *, rivals: bool) -> list[Row]:
    """Return the rows of one case.

    Args:
        case: The case.
        cluster: The nodes.
        budget: Seconds of rounds for each contender.
        rivals: Whether there are rows of others than `OURS`.
    """
    cluster.shape(case.mbit, queue=case.queue)
    rounds = Rounds(case, cluster, rivals=rivals)
    contenders = list(rounds.contenders())
    times: dict[str, list[float]] = {one.name: [] for one in contenders}
    passed: dict[str, list[Traffic]] = {}
    for _ in range(_TURNS):
        for one in contenders:
            one.prepare()
            known = times[one.name]
            each = statistics.median(known) if known else math.inf
            count = max(1, min(_MOST, int(budget / _TURNS / each)))
            before = cluster.traffic()
            known += one.rounds(count)
            ends = zip(cluster.traffic(), before, strict=True)
            passed[one.name] = [end.since(begin, count) for end, begin in ends]
    rounds.close()
    ours = statistics.median(times[OURS])
    rate = None if case.mbit is None else case.mbit * 1e6 / 8
    return [_row(case, one, times[one.name], passed[one.name], ours, rate) for one in contenders]


def _row(
    case: Case,
    one: Contender,
    times: Sequence[float],
    passed: Sequence[Traffic],
    ours: float,
    rate: float | None,
) -> Row:
    row = runner.row_of(str(case), one.name, times)
    cluster = Cluster.of(case.nodes, case.workers, case.nbytes, 8 * (rate or 1.0))
    return Row(
        case=row.case,
        contender=row.contender,
        nodes=case.nodes,
        seconds=row.seconds,
        spread=row.spread,
        ratio=row.seconds / ours,
        limit=None if rate is None else case.least / rate,
        way_limit=None if rate is None else one.cost.critical / rate,
        sent=max(link.sent for link in passed),
        received=max(link.received for link in passed),
        count=max(one.cost.sent, one.cost.received),
        predicted=None if rate is None or one.name in RINGS.values() else one.cost.seconds,
        simulated=None if rate is None or one.name != OURS else scale.seconds_of(cluster, "group"),
    )


def table_of(rows: Sequence[Row]) -> Table:
    """Return all rows as a table."""
    table = runner.table_of(COLUMNS, [(r.case, r.contender, *r.cells()) for r in rows])
    for column in table.columns:
        column.no_wrap = True
    return table


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the time of a round against the number of nodes, for each size of model."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    panels: dict[str, list[Row]] = {}
    for row in rows:
        over, _, what = row.case.partition(", ")
        if over.endswith("x 1") and row.limit is not None and "queue" not in what:
            panels.setdefault(what, []).append(row)
    panels = {what: of for what, of in panels.items() if len({row.nodes for row in of}) > 1}
    if not panels:
        return
    figure, all_axes = plt.subplots(
        1, len(panels), figsize=(5 * len(panels), 4), layout="constrained", squeeze=False
    )
    for axes, (what, of) in zip(all_axes[0], panels.items(), strict=True):
        for name in dict.fromkeys(row.contender for row in of):
            line = [(row.nodes, row.seconds) for row in of if row.contender == name]
            axes.plot(*zip(*line, strict=True), "o-", lw=2 if name == OURS else 1, label=name)
        limits = sorted({(row.nodes, row.limit or 0.0) for row in of})
        axes.plot(*zip(*limits, strict=True), "k--", lw=1, label="limit of an allreduce")
        axes.set_title(what)
        axes.set_xlabel("nodes, one worker each")
        axes.set_xticks([count for count, _ in limits])
        axes.set_ylabel("a round, s")
        axes.set_ylim(bottom=0)
        axes.grid(lw=0.5)
    all_axes[0][0].legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def run(options: Namespace) -> None:
    """Run the bench."""
    cases = SCALE if options.scale else QUICK if options.quick else CASES
    cases = tuple(_case_of(given) for given in options.case or []) or cases
    nodes.run_among("bench_nodes", max(case.nodes for case in cases))
    drive(cases, options)


def _case_of(given: Sequence[float]) -> Case:
    count, workers, mb, mbit = given
    return Case(int(count), int(workers), int(mb * MB), mbit or None)


def drive(cases: Sequence[Case], options: Namespace) -> None:
    """Run the cases, from the first node."""
    cluster = Nodes.of_this_process()
    ray.init(os.environ["RAY_ADDRESS"], log_to_driver=False, logging_level="error")
    info, rows = machine.describe(), list[Row]()
    for case in cases:
        print(f"{case} ...", file=sys.stderr, flush=True)
        rows += run_case(
            case, cluster, budget=3.0 if options.quick else 9.0, rivals=not options.scale
        )
        if options.json:  # after each case, since all of them take long
            record = {"machine": info, "nodes": [asdict(row) for row in rows]}
            options.json.write_text(json.dumps(record, indent=1))
    ray.shutdown()
    console = Console(width=170)
    console.print("[bold]nodes[/bold]")
    console.print("  ".join(f"{key}: {value}" for key, value in info.items()), highlight=False)
    console.print(table_of(rows))
    if options.plot:
        draw(rows, options.plot)


def arguments() -> Namespace:
    """Return the options."""
    parser = runner.parser(__doc__ or "")
    parser.add_argument("--scale", action="store_true", help="six cases, and no rivals")
    names = ("NODES", "WORKERS", "MB", "MBIT")
    what = "one case instead: nodes, workers on each, size of the model, rate (0: not shaped)"
    parser.add_argument("--case", nargs=4, type=float, action="append", metavar=names, help=what)
    return parser.parse_args()


if __name__ == "__main__":
    run(arguments())
