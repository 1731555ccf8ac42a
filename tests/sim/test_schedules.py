"""Members and groups in schedules with faults; see the package's docstring."""

import gc
import hashlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.sim import fit_plans, group_plans, nodes_plans, plans
from tests.sim.__main__ import PROTOCOLS, plan_of
from tests.sim.mutants import MUTANTS, changed
from tests.sim.schedules import schedule_of, transcript_of, without_collector

import flatweights

# Blocks by default, a sixteenth of all, and schedules in each.
SCHEDULES = {
    "members": (2, 120),
    "nodes": (1, 50),
    "group": (1, 120),
    "asynchronous": (1, 60),
    "fit": (1, 30),
}
BLOCKS = [
    pytest.param(
        protocol,
        range(k * count, (k + 1) * count),
        id=f"{protocol}-{k}",
        marks=[] if k < blocks else pytest.mark.slow,
    )
    for protocol, (blocks, count) in SCHEDULES.items()
    for k in range(16 * blocks)
]
FOUND = {
    "group": (4667, 5840),
    "fit": (3657, 4268),
    "members": (110992,),
    "nodes": (4218, 62020, 700280, 4025274, 4037996),
}  # later ones, which have found something
# What is to be tested has to happen.
GROUPS = ("rounds", "late", "failed", "errors")
HAPPENS = {
    "members": ("calls", "late", "healed", "errors", "quarantined", "differ"),
    "nodes": ("calls", "late", "healed", "errors", "exchanges"),
    "group": (*GROUPS, "in one step"),
    "asynchronous": GROUPS,
    "fit": ("ended", "late", "healed", "epochs seen"),
}
HASHED = {
    "members": range(4),
    "nodes": range(0, 12, 6),
    "group": range(0, 8, 4),
    "asynchronous": range(1, 8, 4),
    "fit": range(2),
}
PACKAGES = Path(flatweights.__file__).parents[1]
ROOT = Path(__file__).parents[2]

HASH = """
import sys

from tests.sim.test_schedules import hashes

print("\\n".join(hashes(sys.argv[1:])))
"""


def hashes(protocols: Sequence[str]) -> list[str]:
    """Return a hash of the transcript of each of some schedules."""
    texts = [
        "\n".join(transcript_of(plan_of(protocol, seed, None), seed))
        for protocol in protocols
        for seed in HASHED[protocol]
    ]
    return [hashlib.sha256(text.encode()).hexdigest() for text in texts]


@pytest.mark.parametrize(("protocol", "seeds"), BLOCKS)
def test_no_schedule_violates_an_invariant(protocol: str, seeds: range) -> None:
    counts: Counter[str] = Counter()
    found = () if seeds.start else FOUND.get(protocol, ())
    with without_collector():
        for seed in (*seeds, *found):
            schedule = schedule_of(plan_of(protocol, seed, None), seed)
            counts += schedule.oracle.counts
            how = f"python -m tests.sim --protocol {protocol} --seed {seed} shows how"
            assert not schedule.world.failures, f"{schedule.world.failures[0]}: {how}"
            if seed % 100 == 99:
                gc.collect()
    for name in HAPPENS[protocol]:
        assert counts[name] > len(seeds) / 100, counts


@pytest.mark.parametrize(
    "protocols",
    [
        pytest.param(PROTOCOLS[:-1], id="without Keras"),
        pytest.param(PROTOCOLS[-1:], id="fit", marks=pytest.mark.slow),
    ],
)
def test_a_seed_gives_one_schedule(protocols: Sequence[str]) -> None:
    # Another process, in which sets of texts have another order.
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    ran = subprocess.run(
        [sys.executable, "-c", HASH, *protocols],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    there = ran.stdout.split()
    assert len(there) == sum(len(HASHED[protocol]) for protocol in protocols)
    assert there == hashes(protocols)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_transcript_does_not_change_the_schedule(protocol: str) -> None:
    for seed in range(0, len(plans.MIXES), 2):
        plan = plan_of(protocol, seed, None)
        steps = schedule_of(plan, seed).world.steps
        assert transcript_of(plan, seed)[-1].endswith(f"after {steps} steps")


def test_smaller_plans_run() -> None:
    for plan in plans.smaller(plan_of("members", 8, "wild")):
        assert not schedule_of(plan, 8).world.failures
    for plan in nodes_plans.smaller(plan_of("nodes", 8, "wild")):
        assert not schedule_of(plan, 8).world.failures
    for plan in group_plans.smaller(plan_of("group", 8, "wild")):
        assert not schedule_of(plan, 8).world.failures
    for plan in fit_plans.smaller(plan_of("fit", 8, "heal")):
        assert not schedule_of(plan, 8).world.failures


def test_an_interrupt_may_leave_a_refusal_unread() -> None:
    plan = plan_of("group", 0, "calm") | {"program": "mixed", "size": 1, "rounds": 9}
    plan |= {"refuses": 0.2, "rates": {"no channel": 1.0}, "in_one_step": 0.0, "work": 0.01}
    plan |= {"timeout": None, "min_results": 1, "initial": True, "nonfinite": "skip"}
    for seed in (14, 17, 26, 28):
        for point in range(18, 60):
            plan["driver_faults"] = {str(point): {"kind": "interrupt"}}
            assert not schedule_of(plan, seed).world.failures, (seed, point)


def test_the_text_of_each_mutant_occurs_once() -> None:
    assert len(MUTANTS) >= 40
    for mutant in MUTANTS.values():
        source = PACKAGES.joinpath(*mutant.package.split("."), mutant.file).read_text()
        wrong = changed(mutant, source)
        assert wrong != source
        compile(wrong, mutant.file, "exec")


@pytest.mark.parametrize(
    ("protocol", "name", "seeds"),
    [
        ("group", "each worker starts from its own weights", 100),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (
                ("members", "the highest rank gives", 1000),
                ("nodes", "what was not confirmed is forgotten", 300),
                ("asynchronous", "staleness counts from the publication before", 100),
                ("members", "a call does not wait for members on time", 1000),
                ("members", "one number per session", 1000),
                ("fit", "the batches by which others are ahead are forgotten", 400),
            )
        ),
    ],
)
def test_wrong_changes_are_found(protocol: str, name: str, seeds: int) -> None:
    command = [sys.executable, "-m", "tests.sim", "--mutant", name, "--protocol", protocol]
    command += ["--keep", "1", "--no-shrink", "--seeds", str(seeds)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert " 1 violations" in ran.stdout
