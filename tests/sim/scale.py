"""How averages and published weights scale with processes, nodes and bytes, in a modelled cluster.

The decisions are the package's own: its core, its plan, its tree of relays. Links, memory and what
a message costs a process are modelled; see `tests.sim.cluster`.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.sim.cluster import Cluster, Node
from tests.sim.scale_averages import Average, GroupRound, MembersCall
from tests.sim.scale_publishing import Publishing

from flatweights.ray.nodes._costs import _BITS, _BYTES, _number, plan
from flatweights.ray.nodes._plan import SMALL

Made = Average | Publishing

_PATHS: dict[str, type[MembersCall | GroupRound | Publishing]] = {
    "members": MembersCall,
    "fit": MembersCall,
    "group": GroupRound,
    "published": Publishing,
}


def made(path: str, cluster: Cluster) -> Made:
    """Make one call of members, step of a `fit`, round of a group, or publication."""
    one: Made = _PATHS[path](cluster)
    one.run()
    return one


def phases(one: Made) -> Iterator[tuple[str, float]]:
    """Yield the seconds of each phase, in their order."""
    last = 0.0
    for name, end in sorted(one.times.items(), key=lambda one: one[1]):
        yield name, end - last
        last = end


def text_of(one: Made) -> str:
    """Return what it has taken, as text."""
    cluster, nodes = one.cluster, one.nodes
    used = "" if isinstance(one, Publishing) else f": {len(one.used)} of {cluster.size} averaged"
    away = cluster.nodes - 1
    streams = away if cluster.nbytes >= SMALL else 0
    lines = [
        f"{cluster.nodes} nodes of {cluster.workers} processes, {cluster.nbytes / 1e9:g} GB, "
        f"{cluster.link * 8 / 1e9:.3g} Gbit/s of weights{used}"
    ]
    lines += [f"{seconds:10.4g} s  {name}" for name, seconds in phases(one)]
    lines += [
        f"{max(one.times.values()):10.4g} s  in all",
        f"{max(one.out.served for one in nodes) / 1e9:10.4g} GB out of the busiest node",
        f"{max(one.into.served for one in nodes) / 1e9:10.4g} GB into it",
        f"{nodes[0].agent.served:10.0f}    messages at the busiest process",
        f"{max(one.agent.served for one in [*nodes[1:], Node()]):10.0f}    at an agent",
    ]
    if isinstance(one, MembersCall):
        lines += [
            f"{2 + away:10d}    threads of the package at the busiest process",
            f"{cluster.workers + away + streams:10d}    sockets there",
        ]
    return "\n".join(lines)


def seconds_of(cluster: Cluster, path: str = "members") -> float:
    """Return the seconds of a call."""
    return max(made(path, cluster).times.values())


def planned(path: str, cluster: Cluster, bits: float) -> float:
    """Return the seconds that `flatweights.ray.plan` says."""
    cost = plan(nodes=cluster.nodes, workers=cluster.workers, model=cluster.nbytes, link=bits)
    return cost.published if path == "published" else cost.chosen.seconds + cluster.step


def rows_of_figure() -> Iterator[dict[str, float]]:
    """Yield the times of the figure in docs/scale.md: 8 members on each node."""
    for bits, nbytes in itertools.product((10e9, 100e9), (10**6, 10**8, 10**9, 10**10)):
        for nodes in (2, 4, 8, 16, 32, 64, 125):
            seconds = seconds_of(Cluster.of(nodes, 8, nbytes, bits))
            yield {"bits": bits, "bytes": nbytes, "nodes": nodes, "seconds": seconds}


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate one call, or those of the figure."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim --scale", description=__doc__)
    parser.add_argument("--of", choices=[*_PATHS], default="members", help="what is simulated")
    parser.add_argument("--members", type=int, default=1000, help="all processes")
    parser.add_argument("--nodes", type=int, default=125)
    parser.add_argument("--bytes", default="10GB", help="of the model")
    parser.add_argument("--link", default="100Gbit", help="bits per second in each direction")
    parser.add_argument("--latency", type=float, default=1e-4, help="seconds between two nodes")
    parser.add_argument("--dead", type=int, default=0, help="processes that die before they ask")
    parser.add_argument("--step", type=float, default=0.0, help="seconds of a step of each process")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="write the times of docs/scale")
    args = parser.parse_args(arguments)
    if args.figure is not None:
        args.figure.write_text(json.dumps([*rows_of_figure()], indent=1))
        return
    nbytes = round(_number(args.bytes, "bytes", _BYTES))
    bits = _number(args.link, "link", _BITS)
    workers, rest = divmod(args.members, args.nodes)
    if rest or not workers:
        parser.error(f"--members: expected a multiple of the {args.nodes} nodes")
    if args.of == "published" and (args.dead or args.step):
        parser.error("--of published: expected neither --dead nor --step")
    cluster = Cluster.of(args.nodes, workers, nbytes, bits, args.latency, args.dead, args.step)
    print(text_of(made(args.of, cluster)))
    print(f"{planned(args.of, cluster, bits):10.4g} s  says flatweights plan")
