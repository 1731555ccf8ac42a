"""The core of members' calls in all orders of a few events, and in random orders of more."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from tests.sim.call_orders import SETUPS, CallsModel
from tests.sim.orders import explore, walk

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", SETUPS)
def test_no_order_breaks_a_promise(name: str) -> None:
    explored = explore(CallsModel(SETUPS[name]), 200)
    assert explored.wrong is None, f"{explored.wrong}: python -m tests.sim --orders {name!r}"
    assert explored.states >= 200
    first = pickle.dumps(CallsModel(SETUPS[name]))
    for seed in range(40):
        _, wrong = walk(first, seed, 80)
        assert wrong is None, f"seed {seed}, {wrong}: python -m tests.sim --orders {name!r}"


def test_all_orders_come_to_an_end() -> None:
    tiny = SETUPS["nobody waits"]._replace(size=2, calls=1)
    explored = explore(CallsModel(tiny))
    assert explored.is_all
    assert explored.wrong is None
    assert explored.states > 100


def test_the_first_order_that_is_wrong_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CallsModel, "_check_waits", lambda model: model._check(False, "broken"))
    explored = explore(CallsModel(SETUPS["average"]))
    assert explored.wrong is not None
    assert str(explored.wrong.error) == "broken"
    assert explored.wrong.moves == [("step",)]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("the highest rank gives", marks=pytest.mark.slow),
        "a response that was got late is not noted",
    ],
)
def test_wrong_changes_of_the_core_are_found(name: str) -> None:
    command = [sys.executable, "-m", "tests.sim", "--orders", "--mutants", "--random", "2000", name]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "1 of 1 mutants are found" in ran.stdout
