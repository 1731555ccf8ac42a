"""A run with random faults that can be repeated by its seed.

``python -m bench.chaos --minutes 30 --seed 1 [--group | --members | --fit | --asynchronous |
--publish] [--links MBIT] [--json FILE] [--plot FILE]``

Six processes on two nodes of this machine train, or read the weights that one of them publishes,
while a fault befalls one of them every 20 to 30 s. Afterwards, all averages and all reads are
compared with an oracle. A run that fails prints its seed: the same seed gives the same faults in
the same order, at the same distances.

With ``--links`` there are three nodes, each in a network of its own, with links of that rate. The
links are cut and slowed down, too. This needs root, ``ip`` and ``tc``.
"""

import argparse
import contextlib
import importlib
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import ray
from ray.cluster_utils import Cluster

from bench import nodes
from bench.chaos import report
from bench.chaos.run import Plan, own_processes, run, wait_for_end

MODES = ("group", "members", "fit", "asynchronous", "publish")
ROOT = Path(__file__).parents[2]
_STORE = 256 << 20  # bytes


@contextlib.contextmanager
def ray_of_nodes() -> Iterator[None]:
    """Connect to the Ray of `bench.nodes`, or to a new Ray of two nodes, for the run."""
    options = {"log_to_driver": False, "logging_level": "ERROR"}
    if nodes.is_among_nodes():
        ray.init(**options)
        yield
        ray.shutdown()
        return
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path[1:]])
    node: dict[str, Any] = {"num_cpus": 4, "object_store_memory": _STORE}
    head = node | {"resources": {"node0": 1}, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(**node, resources={"node1": 1})
    ray.init(cluster.address, **options)
    yield
    ray.shutdown()
    cluster.shutdown()


def run_among_nodes(mbit: float) -> int:
    """Make three nodes with links of a rate, and run this command on the first of them."""
    absent = nodes.missing()
    if absent is not None:
        print(f"--links: needs {absent}", file=sys.stderr)
        return 2
    command = ["-m", "bench.chaos", *sys.argv[1:]]
    nodes.enter(command)
    cluster = nodes.Nodes.make(3)
    cluster.shape(mbit)
    cluster.start_ray(store=_STORE)
    inside = cluster.inside(0, [sys.executable, *command])
    return subprocess.run(inside, env=cluster.environment(), check=False).returncode


def main() -> None:
    """Run the mode that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=float, nargs=2, default=(20.0, 30.0), metavar="SECONDS")
    parser.add_argument("--quiet", type=float, default=20.0, metavar="SECONDS")
    parser.add_argument("--pace", type=float, default=0.01, metavar="SECONDS")
    parser.add_argument("--elements", type=int, default=70_000)
    for mode in MODES:
        parser.add_argument(f"--{mode}", dest="modes", action="append_const", const=mode)
    parser.add_argument("--links", type=float, default=0.0, metavar="MBIT")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all modes may share it")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.links and not nodes.is_among_nodes():
        sys.exit(run_among_nodes(options.links))
    (mode,) = options.modes or ["group"]
    plan = Plan(
        options.seed,
        60 * options.minutes,
        quiet=options.quiet,
        every=tuple(options.every),
        mbit=options.links,
        pace=options.pace,
        elements=options.elements,
    )
    logging.getLogger("flatweights").setLevel(logging.ERROR)
    with ray_of_nodes():
        record = run(importlib.import_module(f"bench.chaos.{mode}").Mode, plan)
        started = own_processes()
    if nodes.is_among_nodes():  # its Ray lives on
        started = {pid: role for pid, role in started.items() if role in report.OURS}
    started.pop(os.getpid())
    record.left = [started[pid] for pid in wait_for_end([*started])]
    report.show(record)
    if options.json:
        report.write_json(record, options.json)
    if options.plot:
        report.plot(record, options.plot)
    failures = report.failures_of(record)
    if failures:
        raise SystemExit(f"seed {options.seed} fails:\n" + "\n".join(failures))


if __name__ == "__main__":
    main()
