"""Plans of schedules between nodes: those of members, whose agents and links fail, too."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator

from tests.sim import plans
from tests.sim.plans import Plan

_NODES = 3


def plan_of(seed: int, mix: str) -> Plan:
    """Return the plan of a seed and a mix: that of members, with more.

    Several nodes have members, agents have faults, and there may be exchanges. Five more ``rates``
    say how likely a link is ``cut`` or falls ``silent`` at a write, ``no link`` can be made, an
    exchange is ``broken`` off, and an actor is ``out of reach`` for a call of another one.
    """
    plan = plans.plan_of(seed, mix)
    rng = random.Random(f"{seed} {mix} nodes")
    plan["protocol"] = "nodes"
    plan["nodes"] = [f"node{rng.randrange(_NODES)}" for _ in range(plan["size"])]
    plan["exchanges"] = rng.random() < 0.5
    if mix == "calm":
        return plan
    rates = plan["rates"]
    rates["broken"] = rng.choice((0.0, 0.0, 0.05, 0.3)) if plan["exchanges"] else 0.0
    rates["cut"] = rng.choice((0.0, 0.01, 0.1))
    rates["silent"] = rng.choice((0.0, 0.0, 0.01))
    rates["no link"] = rng.choice((0.0, 0.0, 0.3, 1.0))
    for agent in range(1, 4):
        faults: dict[int, dict[str, object]] = {}
        if rng.random() < 0.15:
            faults[rng.randrange(5, 300)] = {"kind": "kill"}
        if rng.random() < 0.2:
            seconds = rng.choice((0.1, 1.5, 6.0))
            faults[rng.randrange(5, 300)] = {"kind": "stop", "seconds": seconds}
        if faults:
            plan["agent_faults"][agent] = faults
    rare = random.Random(f"{seed} {mix} longer")  # of its own: older seeds stay what they were
    for faults in plan["agent_faults"].values():
        for fault in faults.values():
            if fault["kind"] == "stop" and rare.random() < 0.2:
                fault["seconds"] = 60.0
    rarer = random.Random(f"{seed} {mix} out of reach")
    if rarer.random() < 0.2:
        rates["out of reach"] = rarer.choice((0.05, 0.3))
    if plan["exchanges"] and rarer.random() < 0.2:
        rates["short"] = rarer.choice((0.02, 0.2))
    return plan


def smaller(plan: Plan) -> Iterator[Plan]:
    """Return plans with one thing less than ``plan`` has."""
    for agent, faults in plan["agent_faults"].items():
        for point in faults:
            less = copy.deepcopy(plan)
            del less["agent_faults"][agent][point]
            yield less
    yield from plans.smaller(plan)
    for rank, node in enumerate(plan["nodes"]):
        if node != "node0":
            less = copy.deepcopy(plan)
            less["nodes"][rank] = "node0"
            yield less
