"""Asynchronous rounds while workers are killed in every step of a call, added and removed.

An oracle knows every publication, so it can compute every average from the versions that a round
names.
"""

import pytest
from bench.chaos import asynchronous, faults
from bench.chaos.run import Plan, run

pytestmark = [pytest.mark.ray, pytest.mark.starts_actors, pytest.mark.slow]


@pytest.mark.parametrize(
    ("way", "rounds", "elements", "seed"),
    [
        ("", 200, 3_000, 1),
        *(
            (way, 3_000, elements, seed)
            for seed, (way, elements) in enumerate(
                [("", 5), ("", 3_000), ("", 40_000), ("store", 5), ("store", 40_000)], 2
            )
        ),
    ],
)
def test_each_result_is_of_the_publication_that_its_round_names(
    monkeypatch: pytest.MonkeyPatch, way: str, rounds: int, elements: int, seed: int
) -> None:
    monkeypatch.setenv("FLATWEIGHTS_RAY", way)
    record = run(
        asynchronous.Mode,
        Plan(
            seed,
            rounds / 60,
            quiet=0.1,
            every=(0.05, 0.3),
            lasting=(0.02, 0.8),
            size=3,
            elements=elements,
            pace=0.01,
            timeout=0.4,
            without=[faults.STORE],
            steps=rounds,
        ),
    )
    print(record.events, record.rates, record.faults)
    assert not record.wrong + record.hangs
    assert record.checked >= rounds
    assert any(fault.seconds for fault in record.faults)  # on a busy machine, not after each
    kinds = {fault.kind for fault in record.faults}  # fewer on a fast machine: a plan is by time
    assert kinds & {faults.KILLED, faults.AT_POINT}
    assert kinds & {faults.ADDED, faults.REMOVED}
