"""Members and their host, in two thousand schedules with faults; see the package's docstring."""

import gc
import hashlib
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests.sim.mutants import MUTANTS, changed
from tests.sim.plans import MIXES, mix_of, plan_of, smaller
from tests.sim.schedules import Schedule, transcript_of, without_collector

import flatweights

SCHEDULES = 2000
PACKAGE = Path(flatweights.__file__).parent / "ray"
ROOT = Path(__file__).parents[2]

HASH = """
import hashlib
from tests.sim.plans import mix_of, plan_of
from tests.sim.schedules import transcript_of

for seed in range(24):
    lines = transcript_of(plan_of(seed, mix_of(seed)), seed)
    print(hashlib.sha256("\\n".join(lines).encode()).hexdigest())
"""


def test_no_schedule_violates_an_invariant() -> None:
    counts: Counter[str] = Counter()
    with without_collector():
        for seed in range(SCHEDULES):
            plan = plan_of(seed, mix_of(seed))
            schedule = Schedule(plan, seed)
            schedule.run()
            counts += schedule.oracle.counts
            how = f"python -m tests.sim --seed {seed} shows how"
            assert not schedule.world.failures, f"{schedule.world.failures[0]}: {how}"
            if seed % 100 == 99:
                gc.collect()
    # What is to be tested has happened.
    for name in ("calls", "late", "healed", "errors", "quarantined", "differ"):
        assert counts[name] > SCHEDULES / 100, counts


def test_a_seed_gives_one_schedule() -> None:
    # Another process, in which sets of texts have another order.
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    ran = subprocess.run(
        [sys.executable, "-c", HASH],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    there = ran.stdout.split()
    assert len(there) == 24
    for seed, expected in enumerate(there):
        text = "\n".join(transcript_of(plan_of(seed, mix_of(seed)), seed))
        assert hashlib.sha256(text.encode()).hexdigest() == expected


def test_a_transcript_does_not_change_the_schedule() -> None:
    for seed in range(len(MIXES)):
        plan = plan_of(seed, mix_of(seed))
        schedule = Schedule(plan, seed)
        schedule.run()
        assert transcript_of(plan, seed)[-1].endswith(f"after {schedule.world.steps} steps")


def test_smaller_plans_run() -> None:
    for plan in smaller(plan_of(8, "wild")):
        schedule = Schedule(plan, 8)
        schedule.run()
        assert not schedule.world.failures


def test_the_text_of_each_mutant_occurs_once() -> None:
    assert len(MUTANTS) >= 40
    for mutant in MUTANTS.values():
        source = (PACKAGE / mutant.file).read_text()
        wrong = changed(mutant, source)
        assert wrong != source
        compile(wrong, mutant.file, "exec")


@pytest.mark.parametrize(
    "name",
    ["a call does not wait for members on time", "one number per seat", "the highest rank gives"],
)
def test_wrong_changes_are_found(name: str) -> None:
    command = [sys.executable, "-m", "tests.sim", "--mutant", name, "--keep", "1", "--no-shrink"]
    ran = subprocess.run(
        [*command, "--seeds", "1000"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert " 1 violations" in ran.stdout
