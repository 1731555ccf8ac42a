"""A run of faults that anybody can repeat.

``python -m bench.chaos --minutes 30 --seed 1 [--group | --members | --fit | --asynchronous |
--publish] [--json FILE] [--plot FILE]``

Six processes on two nodes of this machine train, or read what one of them publishes, while every 20
to 30 s something happens to one of them. Everything that is averaged or read is compared with an
oracle afterwards. A run that fails says its seed: the same seed gives the same faults in the same
order, at the same distances.
"""

import argparse
import importlib
import logging
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import ray
from ray.cluster_utils import Cluster

from bench.chaos import report
from bench.chaos.run import Plan, own_processes, run, wait_for_end

MODES = ("group", "members", "fit", "asynchronous", "publish")
ROOT = Path(__file__).parents[2]
_STORE = 256 << 20  # bytes


def start_ray() -> Cluster:
    """Start two nodes on this machine, without a dashboard."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path[1:]])
    node: dict[str, Any] = {"num_cpus": 4, "object_store_memory": _STORE}
    head = node | {"resources": {"home": 1}, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(**node, resources={"away": 1})
    ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
    return cluster


def main() -> None:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=float, nargs=2, default=(20.0, 30.0), metavar="SECONDS")
    parser.add_argument("--quiet", type=float, default=20.0, metavar="SECONDS")
    for mode in MODES:
        parser.add_argument(f"--{mode}", dest="modes", action="append_const", const=mode)
    parser.add_argument("--json", type=Path, metavar="FILE", help="all modes may share it")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    options = parser.parse_args()
    (mode,) = options.modes or ["group"]
    plan = Plan(options.seed, 60 * options.minutes, quiet=options.quiet, every=tuple(options.every))
    logging.getLogger("flatweights").setLevel(logging.ERROR)
    cluster = start_ray()
    record = run(importlib.import_module(f"bench.chaos.{mode}").Mode, plan)
    started = own_processes()
    ray.shutdown()
    cluster.shutdown()
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
