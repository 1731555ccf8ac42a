"""Random faults in the calls of members, and an oracle of every bit."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def chaos() -> ModuleType:
    """The program beside this file: ``ray`` is another package."""
    path = Path(__file__).with_name("chaos_members.py")
    spec = importlib.util.spec_from_file_location("chaos_members", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3, 4, 5])  # odd ones: rank 0 calls through the store
def test_each_outcome_is_the_average_of_what_its_ranks_gave(chaos: ModuleType, seed: int) -> None:
    happened = chaos.run(4, 600, seed)
    print(dict(happened))
    assert happened["outcomes"] == pytest.approx(600, abs=60)
    assert happened["killed"] > 0
    assert happened["late"] > 0
