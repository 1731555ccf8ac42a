"""Plans of schedules of a group, drawn from a seed: plain data, as those of `plans`."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

from tests.sim.plans import Plan, fewer_faults, milder

MIXES = ("calm", "kills", "stops", "store", "short", "interrupts", "raises", "restarts", "wild")
"""Kinds of plan: what goes wrong most often."""

_KILLS = {"kills": 0.7, "wild": 0.4, "store": 0.4, "short": 0.3, "interrupts": 0.3, "restarts": 0.9}
_STOPS = {"stops": 0.7, "wild": 0.4, "store": 0.3, "short": 0.2, "interrupts": 0.3, "raises": 0.2}
_PROGRAMS = {"group": ("run", "run", "average", "mixed"), "asynchronous": ("completed",)}


def mix_of(seed: int) -> str:
    """Return the mix of a seed, unless another is wanted."""
    return MIXES[seed % len(MIXES)]


def plan_of(seed: int, mix: str, protocol: str) -> Plan:
    """Return the plan of a seed and a mix.

    Its keys:

    - ``program``, ``rounds``: what the driver runs (`group_programs.Program`), how many rounds;
    - ``initial``: whether all workers start from the same weights;
    - ``timeout``, ``min_results``, ``nonfinite``, ``weighted``: arguments of its calls;
    - ``work``, ``slow``: seconds of a method, and how likely these are many more;
    - ``nan``, ``raises``, ``refuses``: how likely a method returns NaN or raises, and how likely a
      worker cannot set weights;
    - ``rates``: how likely memory is short, the store is full, or a channel cannot be made;
    - ``actors``: by rank, ``lives``, the processes one after the other with the delay until each is
      built and its faults by the number of a point; and whether Ray ``retries`` its calls;
    - ``driver_faults``: the driver's faults, likewise;
    - ``max_inflight``: the number of results that may be mapped at once;
    - ``grows``, ``leaves``: how likely a worker is added or removed between two rounds;
    - ``buffer``, ``max_staleness``: arguments of a loop; ``publishes``: how likely its body
      publishes weights; ``beside``: whether another thread does;
    - ``yields``: how likely a task is preempted at a point;
    - ``in_one_step``: the share of averages that `_core.WorkerAnswers` makes.
    """
    rng = random.Random(f"{seed} {mix} {protocol}")
    size = rng.choice((1, 2, 2, 3, 3, 4))
    plan: Plan = {
        "protocol": protocol,
        "mix": mix,
        "program": rng.choice(_PROGRAMS[protocol]),
        "size": size,
        "rounds": rng.choice((2, 4, 6, 9)),
        "initial": rng.random() < 0.85,
        "timeout": rng.choice((None, None, 0.02, 0.3, 2.0, 10.0)),
        "min_results": rng.choice((None, 1, 1, 1, size)),
        "nonfinite": rng.choice(("raise", "skip")),
        "weighted": rng.random() < 0.3,
        "work": rng.choice((0.0, 0.01, 0.05, 1.0)),
        "slow": rng.choice((0.0, 0.05, 0.2)),
        "nan": 0.0,
        "raises": 0.0,
        "refuses": 0.0,
        "grows": 0.0,
        "leaves": 0.0,
        "max_inflight": rng.choice((1, 2, 4)),
        "yields": rng.choice((0.1, 0.5, 0.9)),
        "rates": {},
        "driver_faults": {},
        "buffer": rng.choice((1, 1, 2)),
        "max_staleness": rng.choice((None, None, 1, 3)),
        "publishes": rng.choice((0.5, 1.0)),
        "beside": rng.random() < 0.3,
    }
    if mix in ("raises", "wild"):
        plan["nan"] = rng.choice((0.0, 0.1))
        plan["raises"] = rng.choice((0.0, 0.05, 0.2))
        plan["refuses"] = rng.choice((0.0, 0.05, 0.2))
    if mix in ("wild", "restarts", "kills") and plan["program"] != "run":
        plan["grows"] = rng.choice((0.0, 0.2))
        plan["leaves"] = rng.choice((0.0, 0.1))
    if plan["leaves"] and plan["min_results"] is not None:
        plan["min_results"] = 1  # there may be few workers
    rates = plan["rates"]
    if mix in ("store", "wild"):
        rates["no channel"] = rng.choice((0.0, 0.2, 1.0))
        rates["full"] = rng.choice((0.0, 0.0, 0.03))
    if mix in ("short", "wild"):
        rates["no segment"] = rng.choice((0.02, 0.2, 0.7))
        rates["unsent"] = rng.choice((0.0, 0.0, 0.02))
    plan["actors"] = [_actor(rng, mix, plan["rounds"]) for _ in range(size + 3)]
    points = 60 * size
    faults = plan["driver_faults"]
    if mix == "interrupts" or (mix == "wild" and rng.random() < 0.3):
        for _ in range(rng.choice((1, 2, 4))):
            faults[rng.randrange(1, points * 6)] = {"kind": "interrupt"}
    if mix in ("stops", "wild") and rng.random() < 0.3:
        seconds = rng.choice((0.5, 3.0, 20.0))
        faults[rng.randrange(1, points * 3)] = {"kind": "stop", "seconds": seconds}
    plan["in_one_step"] = rng.choice((1.0, 0.5, 0.0, 1.0))
    return plan


def _actor(rng: random.Random, mix: str, rounds: int) -> dict[str, Any]:
    """Return the processes of one actor."""
    lives: list[dict[str, Any]] = []
    points = 22 * rounds + 30
    delay = rng.choice((0.0, 0.0, 0.01, 0.5))
    while True:
        faults: dict[int, dict[str, Any]] = {}
        lives.append({"delay": delay, "faults": faults})
        ends = rng.random() < _KILLS.get(mix, 0.0)
        if ends:
            faults[rng.randrange(1, points)] = {"kind": "kill"}
        if rng.random() < _STOPS.get(mix, 0.0):
            seconds = rng.choice((0.1, 1.5, 6.0, 40.0))
            faults[rng.randrange(1, points)] = {"kind": "stop", "seconds": seconds}
        goes_on = {"restarts": 0.8, "wild": 0.4}.get(mix, 0.2)
        if not ends or len(lives) == 4 or rng.random() > goes_on:
            return {"lives": lives, "retries": mix != "calm" and rng.random() < 0.3}
        delay = rng.choice((0.0, 0.01, 0.3, 2.0))


_NEUTRAL = (
    ("nan", 0.0),
    ("raises", 0.0),
    ("refuses", 0.0),
    ("grows", 0.0),
    ("leaves", 0.0),
    ("slow", 0.0),
    ("weighted", False),
    ("initial", True),
    ("timeout", None),
    ("min_results", 1),
    ("work", 0.0),
    ("max_inflight", 4),
    ("buffer", 1),
    ("max_staleness", None),
    ("publishes", 1.0),
    ("beside", False),
    ("yields", 0.1),
    ("in_one_step", 0.0),
)
"""Entries of a plan, with the values by which they have little effect."""


def smaller(plan: Plan) -> Iterator[Plan]:
    """Return plans with one thing less than ``plan`` has, the largest first."""

    def with_(**changes: Any) -> Plan:
        return copy.deepcopy(plan) | changes

    if plan["size"] > 1:
        for rank in range(plan["size"]):
            less = with_(size=plan["size"] - 1)
            del less["actors"][rank]
            if less["min_results"] is not None:
                less["min_results"] = min(less["min_results"], less["size"])
            yield less
    for rounds in (1, 2, 3, 5):
        if rounds < plan["rounds"]:
            yield with_(rounds=rounds)
    yield from fewer_faults(plan, lambda of: [one["lives"] for one in of["actors"]], "delay", 0.0)
    for rank, actor in enumerate(plan["actors"]):
        if actor["retries"]:
            less = with_()
            less["actors"][rank]["retries"] = False
            yield less
    for point in plan["driver_faults"]:
        less = with_()
        del less["driver_faults"][point]
        yield less
    yield from milder(plan, _NEUTRAL)
