"""Random faults in rounds over channels and over the object store, and an oracle of every bit."""

from collections import Counter

import pytest
from bench.chaos import faults, group
from bench.chaos.run import Plan, run

pytestmark = pytest.mark.ray


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "seconds", "elements", "seed"),
    [
        ("", 3, 3_000, 1),
        pytest.param("store", 4, 40_000, 2, marks=pytest.mark.slow),
        *(
            pytest.param("", 60, elements, seed, marks=pytest.mark.slow)
            for seed, elements in enumerate((5, 3_000, 40_000, 70_000), 3)
        ),
        pytest.param("store", 60, 3_000, 7, marks=pytest.mark.slow),
    ],
)
def test_the_average_is_that_of_the_ranks_that_it_names_whatever_happens(
    monkeypatch: pytest.MonkeyPatch, way: str, seconds: int, elements: int, seed: int
) -> None:
    monkeypatch.setenv("FLATWEIGHTS_RAY", way)
    record = run(
        group.Mode,
        Plan(
            seed,
            seconds,
            quiet=0.4,  # seconds; the last of these turns has full steps
            every=(0.05, 0.3),
            lasting=(0.02, 0.8),
            size=3,
            elements=elements,
            pace=0.01,
            timeout=0.4,
            without=[faults.STORE],
        ),
    )
    print(record.events, record.rates, Counter(fault.kind for fault in record.faults))
    assert not record.wrong + record.hangs
    assert record.checked > 5 * seconds
    assert any(fault.seconds for fault in record.faults)  # on a busy machine, not after each
    assert {faults.KILLED, faults.STOPPED} <= {fault.kind for fault in record.faults}
    assert ("by shm" in record.events) == (way == "")
