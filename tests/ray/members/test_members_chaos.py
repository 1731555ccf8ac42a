"""Random faults in the calls of members, and an oracle of every bit."""

import os
from pathlib import Path

import numpy as np
import pytest
from bench.chaos import faults, members
from bench.chaos.run import Plan, run

from flatweights.ray import join

pytestmark = [pytest.mark.ray, pytest.mark.starts_actors]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seconds", "seed"),  # odd seeds: rank 0 calls through the store
    [(5, 2), *((60, seed) for seed in (3, 4, 5, 6))],
)
def test_each_response_is_the_average_of_what_its_ranks_gave(seconds: int, seed: int) -> None:
    record = run(
        members.Mode,
        Plan(
            seed,
            seconds,
            quiet=0.1,
            every=(0.1, 0.5),
            lasting=(0.02, 1.5),
            size=4,
            elements=2_000,
            pace=0.01,
            timeout=0.5,
            without=[faults.STORE],
        ),
    )
    print(record.events, record.rates, record.faults)
    assert not record.wrong + record.hangs
    assert record.checked > 5 * seconds
    assert any(fault.seconds for fault in record.faults)  # on a busy machine, not after each
    assert {faults.KILLED, faults.STOPPED} <= {fault.kind for fault in record.faults}


def test_the_coordinator_of_another_group_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "0.pid").write_text(str(os.getpid()))
    with join("that of another test", size=1) as member:
        injector = faults.Injector(tmp_path, [])
        assert injector.do(faults.Fault(0.0, "coordinator killed", 0, 0.0, 0.0)) is None
        assert member.average(np.ones(1)).used == (0,)
