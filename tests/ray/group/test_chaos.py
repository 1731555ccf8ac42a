"""Random faults in rounds over lanes and over the object store, and an oracle of every bit."""

import importlib.util
import re
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def chaos() -> ModuleType:
    """The program beside this file: ``ray`` is another package."""
    path = Path(__file__).with_name("chaos.py")
    spec = importlib.util.spec_from_file_location("chaos", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("way", "rounds", "seed"),
    [
        ("", 350, 1),
        ("store", 150, 2),
        *(pytest.param("", 2000, seed, marks=pytest.mark.slow) for seed in (3, 4, 5, 6)),
        pytest.param("store", 2000, 7, marks=pytest.mark.slow),
    ],
)
def test_the_average_is_that_of_the_ranks_that_it_names_whatever_happens(
    chaos: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
    rounds: int,
    seed: int,
) -> None:
    monkeypatch.setenv("FLATWEIGHTS_RAY", way)
    summary = chaos.run(rounds, seed)
    print(summary)
    counts = Counter(
        {what: int(number) for number, what in re.findall(r"(\d+) (\w+|\([^)]*\))", summary)}
    )
    assert counts["stopped"] > 0
    assert counts["killed"] + counts["died"] > 0
    assert (counts["(by lanes)"] > 0) == (way == "")
