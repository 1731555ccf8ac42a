"""Groups and their workers in schedules with faults; see the package's docstring."""

import gc
import hashlib
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests.sim.group_plans import mix_of, plan_of, smaller
from tests.sim.schedules import schedule_of, transcript_of, without_collector

SCHEDULES = {"group": 500, "asynchronous": 300}
ROOT = Path(__file__).parents[2]

HASH = """
import hashlib
from tests.sim.group_plans import mix_of, plan_of
from tests.sim.schedules import transcript_of

for seed in range(18):
    plan = plan_of(seed, mix_of(seed), ("group", "asynchronous")[seed % 2])
    lines = transcript_of(plan, seed)
    print(hashlib.sha256("\\n".join(lines).encode()).hexdigest())
"""


@pytest.mark.parametrize("protocol", SCHEDULES)
def test_no_schedule_violates_an_invariant(protocol: str) -> None:
    counts: Counter[str] = Counter()
    with without_collector():
        for seed in range(SCHEDULES[protocol]):
            schedule = schedule_of(plan_of(seed, mix_of(seed), protocol), seed)
            counts += schedule.oracle.counts
            how = f"python -m tests.sim --protocol {protocol} --seed {seed} shows how"
            assert not schedule.world.failures, f"{schedule.world.failures[0]}: {how}"
            if seed % 100 == 99:
                gc.collect()
    # What is to be tested has happened.
    for name in ("rounds", "late", "failed", "errors"):
        assert counts[name] > SCHEDULES[protocol] / 100, counts


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
    assert len(there) == 18
    for seed, expected in enumerate(there):
        plan = plan_of(seed, mix_of(seed), ("group", "asynchronous")[seed % 2])
        text = "\n".join(transcript_of(plan, seed))
        assert hashlib.sha256(text.encode()).hexdigest() == expected


@pytest.mark.parametrize(
    ("protocol", "name"),
    [
        ("group", "each worker starts from its own weights"),
        ("asynchronous", "staleness counts from the publication before"),
    ],
)
def test_wrong_changes_are_found(protocol: str, name: str) -> None:
    command = [sys.executable, "-m", "tests.sim", "--mutant", name, "--protocol", protocol]
    command += ["--keep", "1", "--no-shrink", "--seeds", "100"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert " 1 violations" in ran.stdout


def test_smaller_plans_run() -> None:
    for plan in smaller(plan_of(8, "wild", "group")):
        assert not schedule_of(plan, 8).world.failures
