"""Plans of schedules of a `fit`, drawn from a seed: plain data, as those of `plans`."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

from tests.sim import plans
from tests.sim.plans import Plan

MIXES = (
    "heal",
    "absent",
    "kills",
    "stops",
    "absent",
    "calm",
    "elastic",
    "short",
    "repeats",
    "store",
    "heal",
    "absent",
    "kills",
    "stops",
    "absent",
    "later",
    "elastic",
    "short",
    "repeats",
    "store",
)
"""Kinds of plan: what goes wrong most often."""


def mix_of(seed: int) -> str:
    """Return the mix of a seed, unless another is wanted."""
    return MIXES[seed % len(MIXES)]


def plan_of(seed: int, mix: str) -> Plan:
    """Return the plan of a seed and a mix: that of other members, with other keys.

    - ``epochs``, ``steps``, ``execution``: the length of the `fit`, and its steps per execution;
    - ``knows_steps``: whether the number of steps is known; ``every``: batches between two averages
      of weights, if there are any; ``gradients``: whether steps average gradients: if not, weights
      are averaged at the end of epochs, unless it is after batches;
    - ``trace``: the most seconds that the first step of a process takes longer than others;
    - ``patience``, ``keeps_best``: of `EarlyStopping`; ``stops``: a rank and an epoch, after which
      that member's own callback ends the training; ``halts``: a rank, an epoch and a batch, after
      which it does so, and whether it stands before the package's callbacks; ``restores``: the
      epoch with which a callback of a replacement makes it begin;
    - ``logs``: whether there is an `AverageLogs`: if not, losses are those of data that all have;
    - ``replaces``: whether dead members are replaced, so that the end waits for them;
    - ``before``: what members exchange in each step before its gradients, without the state: rows
      of tables, or moments of a layer; None, if nothing.
    """
    rng = random.Random(f"{seed} {mix} fit")
    size = rng.choice((2, 2, 3, 3, 4))
    plan = plans.plan_of(seed, "heal" if mix in ("absent", "later") else mix) | {
        "mix": mix,
        "protocol": "fit",
        "program": "fit",
        "size": size,
        "timeout": rng.choice((None, 0.3, 2.0, 10.0)),
        "min_results": rng.choice((1, 1, 1, min(2, size))),
        "nonfinite": "raise",
        "work": rng.choice((0.0, 0.01, 0.1, 0.5)),
        "any_rank": False,
        "min_size": rng.randrange(1, size + 1) if mix == "elastic" else None,
        "coordinator_faults": {},
        "epochs": rng.choice((1, 2, 2, 3)),
        "steps": rng.choice((1, 2, 3, 4)),
        "execution": rng.choice((1, 1, 1, 2)),
        "knows_steps": rng.random() < 0.8,
        "every": rng.choice((0, 0, 1, 3)),
        "trace": rng.choice((0.0, 0.1, 3.0)),
        "patience": rng.choice((0, 0, 1, 2)),
        "keeps_best": rng.random() < 0.3,
        "stops": None,
        "halts": None,
        "restores": None,
        "replaces": rng.random() < 0.3,
    }
    plan |= dict.fromkeys(("nan", "differs", "leaves", "raises", "drops"), 0.0)
    if rng.random() < 0.15:
        plan["stops"] = [rng.randrange(size), rng.randrange(plan["epochs"])]
    if rng.random() < 0.2:
        plan["restores"] = rng.randrange(plan["epochs"] + 1)
    calls = 6 + plan["epochs"] * (plan["steps"] + 3)
    if mix == "absent":
        plan |= {"timeout": rng.choice((0.02, 0.3)), "work": 0.1, "slow": 0.0, "min_results": 1}
        plan |= {"epochs": 4, "trace": 0.0}
        plan["lives"] = [_absent(rng, calls) for _ in range(size)]
    elif mix == "later":
        plan |= {"epochs": 5, "steps": rng.choice((1, 2)), "restores": rng.choice((2, 3, 4, 5, 5))}
        plan |= {"work": 0.1, "trace": 0.0}
        plan["lives"] = [_replaced(rng, calls) for _ in range(size)]
    else:
        plan["lives"] = [plans.lives_of(rng, mix, calls) for _ in range(size)]
    ways = ("shm", "store") if mix == "store" else ("shm",)
    plan["ways"] = [rng.choice(ways) for _ in range(size)]
    plan["nodes"] = ["node0"] * size
    plan["before"] = rng.choice((None, None, None, "rows", "moments"))
    if rng.random() < 0.2:
        place = rng.randrange(size), rng.randrange(plan["epochs"]), rng.randrange(plan["steps"])
        plan["halts"] = [*place, rng.random() < 0.5]
    plan["gradients"] = rng.random() < 0.7
    if not plan["gradients"]:
        plan["before"] = None
        plan["keeps_best"] &= not plan["every"]  # else, each member has other ones
    averages_weights = plan["every"] or not plan["gradients"]
    own = random.Random(f"{seed} {mix} logs")
    plan["logs"] = not (averages_weights and own.random() < 0.2)
    if not plan["logs"]:
        plan["halts"] = None  # a stop within an epoch needs `AverageLogs`
        if own.random() < 0.7:
            plan |= {"epochs": 4, "stops": [own.randrange(size), own.randrange(2)]}
    return plan


def _absent(rng: random.Random, calls: int) -> list[dict[str, Any]]:
    """Return the only process of a rank, which is stopped now and then, perhaps for epochs."""
    faults = {
        rng.randrange(1, 12 * calls): {"kind": "stop", "seconds": rng.choice((0.1, 0.5, 1.5, 3.0))}
        for _ in range(rng.choice((0, 1, 2, 3)))
    }
    return [{"delay": 0.0, "faults": faults, "is_twice": False}]


def _replaced(rng: random.Random, calls: int) -> list[dict[str, Any]]:
    """Return the processes of a rank, of which the first one may die early."""
    lives: list[dict[str, Any]] = [{"delay": 0.0, "faults": {}, "is_twice": False}]
    if rng.random() < 0.5:
        lives[0]["faults"][rng.randrange(20, 6 * calls)] = {"kind": "kill"}
        lives.append({"delay": 0.0, "faults": {}, "is_twice": False})
    return lives


_NEUTRAL: tuple[tuple[str, Any], ...] = (
    ("execution", 1),
    ("knows_steps", True),
    ("gradients", True),
    ("every", 0),
    ("trace", 0.0),
    ("patience", 0),
    ("keeps_best", False),
    ("stops", None),
    ("halts", None),
    ("restores", None),
    ("logs", True),
    ("before", None),
)


def smaller(plan: Plan) -> Iterator[Plan]:
    """Return plans with one thing less than ``plan`` has, the largest first."""
    for name in ("epochs", "steps"):
        for count in range(1, plan[name]):
            yield copy.deepcopy(plan) | {name: count}
    yield from plans.milder(plan, _NEUTRAL)
    yield from plans.smaller(plan)
