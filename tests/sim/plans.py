"""Plans of schedules, drawn from a seed: plain data, so that parts of them can be taken out.

A plan says which members there are, what they call, with which arguments, and what goes wrong at
which point (`World.point`) of which process. Mixes draw some of this more often than other plans.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Plan = dict[str, Any]
Lives = list[dict[str, Any]]
"""The processes of one rank, one after the other."""

MIXES = (
    "calm",
    "kills",
    "stops",
    "store",
    "short",
    "elastic",
    "coordinator",
    "states",
    "wild",
    "heal",
    "twins",
    "forgets",
    "repeats",
)
"""Kinds of plan: what goes wrong, or what is called, most often."""

# How likely a process is killed, and how likely it is stopped; the least likely mix is "calm".
_KILLS = {
    "calm": 0.0,
    "kills": 0.9,
    "stops": 0.2,
    "store": 0.5,
    "short": 0.4,
    "elastic": 0.5,
    "coordinator": 0.3,
    "states": 0.8,
    "wild": 0.6,
    "heal": 0.9,
    "twins": 0.4,
    "forgets": 0.5,
    "repeats": 0.5,
}
_STOPS = {
    "calm": 0.0,
    "kills": 0.1,
    "stops": 0.9,
    "store": 0.4,
    "short": 0.2,
    "elastic": 0.2,
    "coordinator": 0.1,
    "states": 0.5,
    "wild": 0.6,
    "heal": 0.4,
    "twins": 0.5,
    "forgets": 0.6,
    "repeats": 0.3,
}
_INTERRUPTS = {
    "kills": 0.2,
    "wild": 0.3,
    "elastic": 0.2,
    "twins": 0.2,
    "heal": 0.3,
    "repeats": 0.2,
}
_PROGRAMS = {
    "states": ("state", "broadcast", "mixed", "gathered"),
    "heal": ("state", "mixed", "gathered"),
    "twins": ("twins",),
    "repeats": ("weights", "state", "state", "mixed", "twins"),
    "forgets": ("weights", "mixed", "broadcast"),
}
_MOST_LIVES = 4  # processes of one rank, one after the other


def mix_of(seed: int) -> str:
    """Return the mix of a seed, unless another is wanted."""
    return MIXES[seed % len(MIXES)]


def plan_of(seed: int, mix: str) -> Plan:
    """Return the plan of a seed and a mix.

    Its keys:

    - ``program``, ``calls``, ``kinds``: what members run (`programs.Program`), how many calls they
      make, of how many kinds;
    - ``size``, ``min_size``, ``grace``, ``any_rank``: how they join;
    - ``timeout``, ``min_results``, ``nonfinite``: arguments of their calls;
    - ``work``, ``slow``: seconds between two calls, and how likely these are many more;
    - ``nan``, ``differs``, ``leaves``, ``raises``, ``drops``: how likely a call has NaN or is
      another one than the others make, and how likely a member leaves, raises or drops its member;
    - ``rates``: how likely memory is short, the store is full, or a channel cannot be made;
    - ``lives``: by rank, its processes one after the other: the delay until it starts, its faults
      by the number of a point, and whether two start at once;
    - ``ways``: by rank, "shm" or "store"; ``coordinator_faults``: by coordinator, its faults,
      likewise;
    - ``nodes``, ``agent_faults``: by rank, its node; by agent of a node, its faults, likewise;
    - ``exchanges``: whether weights stay on their nodes, which exchange sums;
    - ``keeps_few``: whether process groups keep the responses of one kind of call only;
    - ``in_place``: whether members average variables; ``alone``: after how many calls twins begin
      to take turns;
    - ``repeats``: the share of repeated calls that are made without the process group's thread;
    - ``broadcasts``: of how many calls of the program "weights" one is a broadcast, or None;
    - ``yields``: how likely a task is preempted at a point.
    """
    rng = random.Random(f"{seed} {mix}")
    size = rng.choice((1, 2, 2, 3, 3, 3, 4))
    program = rng.choice(_PROGRAMS.get(mix, ("weights", "state", "broadcast", "mixed", "gathered")))
    plan: Plan = {
        "protocol": "members",
        "mix": mix,
        "program": program,
        "size": size,
        "calls": rng.choice((2, 4, 6, 9)),
        "timeout": rng.choice((None, None, 0.02, 0.3, 2.0, 10.0)),
        "min_results": rng.choice((None, 1, 1, 1, size)),
        "nonfinite": rng.choice(("raise", "skip")),
        "nan": rng.choice((0.0, 0.0, 0.1)),
        "kinds": rng.choice((1, 1, 2)),
        "differs": 0.0,
        "leaves": 0.0,
        "raises": 0.0,
        "drops": 0.0,
        "work": rng.choice((0.0, 0.01, 0.05, 1.0)),
        "slow": rng.choice((0.0, 0.05, 0.2)),
        "yields": rng.choice((0.1, 0.5, 0.9)),
        "min_size": None,
        "grace": 30.0,
        "any_rank": rng.random() < 0.1,
        "rates": {},
        "coordinator_faults": {},
        "agent_faults": {},
        "exchanges": False,
        "keeps_few": mix == "forgets",
    }
    if mix == "heal":
        plan |= {
            "size": max(2, size),
            "calls": rng.choice((6, 9, 14)),
            "timeout": rng.choice((None, 0.3, 2.0)),
            "work": rng.choice((0.01, 0.1, 0.5)),
            "min_results": 1,
            "nan": 0.0,
            "any_rank": False,
        }
    elif mix in ("twins", "forgets"):
        timeout = rng.choice((0.02, 0.3, 2.0))
        plan |= {"timeout": timeout, "min_results": 1, "calls": 9, "kinds": 3, "slow": 0.2}
    if mix == "twins":  # a member misses two of the first calls, before twins are noticed
        plan |= {"timeout": rng.choice((0.02, 0.3)), "calls": 6, "work": rng.choice((0.3, 1.0))}
        plan |= {"slow": 0.4}
    if mix == "repeats":
        plan |= {
            "size": max(2, size),
            "calls": rng.choice((15, 25)),
            "nan": rng.choice((0.0, 0.0, 0.03)),
            "work": rng.choice((0.0, 0.01, 0.1)),
            "slow": rng.choice((0.0, 0.03)),
        }
    plan["lives"] = [lives_of(rng, mix, plan["calls"]) for _ in range(plan["size"])]
    plan["ways"] = ["shm"] * plan["size"]
    plan["nodes"] = ["node0"] * plan["size"]
    _add_faults(rng, plan)
    plan["in_place"] = rng.random() < (0.7 if mix == "repeats" else 0.2)
    plan["alone"] = rng.choice((0, 0, 5)) if mix != "repeats" else 8
    plan["repeats"] = rng.choice((0.0, 0.5, 0.9, 1.0, 1.0))
    plan["broadcasts"] = rng.choice((None, None, None, 1, 2))
    return plan


def lives_of(rng: random.Random, mix: str, calls: int) -> list[dict[str, Any]]:
    """Return the processes of one rank."""
    lives: list[dict[str, Any]] = []
    points = 12 * calls + 25  # at about so many points a process may die in time
    delay, is_twice = 0.0, False
    while True:
        faults: dict[int, dict[str, Any]] = {}
        lives.append({"delay": delay, "faults": faults, "is_twice": is_twice})
        ends = False
        if rng.random() < _KILLS[mix]:
            faults[rng.randrange(1, points)] = {"kind": "kill"}
            ends = True
        if rng.random() < _STOPS[mix]:
            seconds = rng.choice((0.1, 1.5, 6.0, 40.0))
            faults[rng.randrange(1, points)] = {"kind": "stop", "seconds": seconds}
        if rng.random() < _INTERRUPTS.get(mix, 0.0):
            faults[rng.randrange(1, points)] = {"kind": "interrupt"}
            ends = True
        if not ends or len(lives) == _MOST_LIVES or rng.random() < 0.2:
            return lives
        delay = rng.choice((0.0, 0.0, 0.01, 0.3) if mix == "heal" else (0.0, 0.0, 0.01, 0.3, 3.0))
        is_twice = rng.random() < 0.05


def _add_faults(rng: random.Random, plan: Plan) -> None:
    """Add what goes wrong apart from the ends of members."""
    mix, size, rates = plan["mix"], plan["size"], plan["rates"]
    if mix in ("store", "wild"):
        plan["ways"] = [rng.choice(("shm", "store")) for _ in range(size)]
        rates["no channel"] = rng.choice((0.0, 0.2))
        rates["full"] = rng.choice((0.0, 0.0, 0.02))
    if mix in ("short", "wild"):
        rates["no segment"] = rng.choice((0.02, 0.2, 0.7))
        rates["unsent"] = rng.choice((0.0, 0.0, 0.02))
    if mix in ("elastic", "wild") and size > 1:
        plan["min_size"] = rng.randrange(1, size + 1)
        plan["grace"] = rng.choice((0.0, 0.05, 3.0))
        plan["leaves"] = rng.choice((0.0, 0.1))
    if mix in ("wild", "kills"):
        plan["differs"] = rng.choice((0.0, 0.1))
        plan["raises"] = rng.choice((0.0, 0.03))
        plan["drops"] = rng.choice((0.0, 0.03))
    # Members of the next process group may have other states, so such programs end with their
    # coordinator.
    has_state = plan["program"] in ("state", "mixed", "gathered")
    if not has_state and (mix == "coordinator" or (mix == "wild" and rng.random() < 0.2)):
        faults: dict[int, dict[str, Any]] = {}
        if rng.random() < 0.7:
            faults[rng.randrange(20, 400)] = {"kind": "kill"}
        faults[rng.randrange(20, 400)] = {"kind": "stop", "seconds": rng.choice((0.5, 5.0))}
        plan["coordinator_faults"] = {1: faults}
    elif mix == "stops" and rng.random() < 0.5:
        plan["coordinator_faults"] = {1: {rng.randrange(20, 400): {"kind": "stop", "seconds": 3.0}}}


_NEUTRAL = (
    ("differs", 0.0),
    ("leaves", 0.0),
    ("raises", 0.0),
    ("drops", 0.0),
    ("nan", 0.0),
    ("slow", 0.0),
    ("kinds", 1),
    ("any_rank", False),
    ("min_size", None),
    ("timeout", None),
    ("work", 0.0),
)
"""Entries of a plan, with the values by which they have no effect."""


def fewer_faults(
    plan: Plan, lives_in: Callable[[Plan], list[Lives]], entry: str, neutral: Any
) -> Iterator[Plan]:
    """Return plans with one process, fault, or ``entry`` of a process less than ``plan`` has.

    Args:
        plan: The plan.
        lives_in: Returns the processes in a plan, by rank.
        entry: An entry of a process.
        neutral: The value by which it has no effect.
    """

    def less() -> tuple[Plan, list[Lives]]:
        copied = copy.deepcopy(plan)
        return copied, lives_in(copied)

    for rank, lives in enumerate(lives_in(plan)):
        if len(lives) > 1:
            fewer, found = less()
            found[rank].pop()
            yield fewer
        for k, life in enumerate(lives):
            for point in life["faults"]:
                fewer, found = less()
                del found[rank][k]["faults"][point]
                yield fewer
            if life[entry] != neutral:
                fewer, found = less()
                found[rank][k][entry] = neutral
                yield fewer


def milder(plan: Plan, neutral: Sequence[tuple[str, Any]]) -> Iterator[Plan]:
    """Return plans without one of the rates of ``plan``, or with one of its entries ``neutral``."""
    for name, rate in plan["rates"].items():
        if rate:
            yield copy.deepcopy(plan) | {"rates": plan["rates"] | {name: 0.0}}
    for name, value in neutral:
        if plan[name] != value:
            yield copy.deepcopy(plan) | {name: value}


def smaller(plan: Plan) -> Iterator[Plan]:
    """Return plans with one thing less than ``plan`` has, the largest first."""

    def with_(**changes: Any) -> Plan:
        return copy.deepcopy(plan) | changes

    if plan["size"] > 1:
        for rank in range(plan["size"]):
            less = with_(size=plan["size"] - 1)
            del less["lives"][rank], less["ways"][rank], less["nodes"][rank]
            for name in ("min_size", "min_results"):
                if less[name] is not None:
                    less[name] = min(less[name], less["size"])
            yield less
    for calls in (1, 2, 3, 5):
        if calls < plan["calls"]:
            yield with_(calls=calls)
    yield from fewer_faults(plan, lambda of: [*of["lives"]], "is_twice", False)
    for coordinator, faults in plan["coordinator_faults"].items():
        for point in faults:
            less = with_()
            del less["coordinator_faults"][coordinator][point]
            yield less
    yield from milder(plan, _NEUTRAL)
    if "store" in plan["ways"]:
        yield with_(ways=["shm"] * plan["size"])
