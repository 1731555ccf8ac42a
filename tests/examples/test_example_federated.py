"""The clients' data and failures in the example `federated`; no TensorFlow, no Ray."""

import argparse
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from flatweights.examples.federated import draw_clients, main, split_by_label

# The partition.

labels = st.lists(st.integers(-3, 5), min_size=1, max_size=80)
concentrations = st.one_of(st.sampled_from([1e-300, 1e300]), st.floats(1e-6, 1e6))


@given(labels, st.data(), concentrations, st.integers(0, 2**32))
def test_every_example_belongs_to_one_client(
    labels: list[int], data: st.DataObject, concentration: float, seed: int
) -> None:
    clients = data.draw(st.integers(1, len(labels)))
    parts = split_by_label(labels, clients, concentration, seed)
    assert len(parts) == clients
    assert min(len(part) for part in parts) >= 1
    assert sorted(i for part in parts for i in part.tolist()) == list(range(len(labels)))
    again = split_by_label(labels, clients, concentration, seed)
    assert [part.tolist() for part in again] == [part.tolist() for part in parts]


def distance(parts: list[NDArray[Any]], kinds: NDArray[Any]) -> float:
    """The mean distance, from 0 to 1, between a client's mix of labels and that of all clients."""
    overall = Counter(kinds.tolist())
    found = []
    for part in parts:
        own = Counter(kinds[part].tolist())
        gaps = [abs(own[k] / len(part) - overall[k] / len(kinds)) for k in overall]
        found.append(sum(gaps) / 2)
    return sum(found) / len(found)


def test_concentration_makes_clients_alike() -> None:
    kinds = np.repeat(np.arange(10), 500)
    by_concentration = [
        distance(split_by_label(kinds, 20, concentration, seed=0), kinds)
        for concentration in (0.01, 1.0, 10.0, 10_000.0)
    ]
    assert by_concentration == sorted(by_concentration, reverse=True)
    # One label each, except for the last clients, which take the rest; then the mix of all.
    assert by_concentration[0] > 0.75
    assert by_concentration[-1] < 0.2


def test_sizes_differ_and_seeds_matter() -> None:
    kinds = np.arange(1437) % 10
    parts, others = (split_by_label(kinds, 100, 0.1, seed) for seed in (0, 1))
    sizes = [len(part) for part in parts]
    assert min(sizes) <= 4
    assert max(sizes) >= 40
    assert [part.tolist() for part in parts] != [part.tolist() for part in others]


# The rounds.


@settings(max_examples=30)
@given(
    st.integers(1, 200),
    st.floats(0.01, 1.0),
    st.floats(0.0, 0.99),
    st.integers(0, 5),
    st.integers(0, 10),
    st.integers(0, 6),
)
def test_a_round_has_distinct_clients_of_which_some_fail(
    clients: int, fraction: float, failing: float, deaths: int, number: int, hostile: int
) -> None:
    options = argparse.Namespace(
        clients=clients,
        fraction=fraction,
        failing=failing,
        deaths=deaths,
        hostile=hostile,
        seed=3,
    )
    drawn = draw_clients(number, options)
    names = [client for client, _ in drawn]
    assert len(set(names)) == len(names)
    assert set(names) <= set(range(clients))
    assert abs(len(names) - max(1.0, fraction * clients)) <= 0.5
    fates = Counter(fate for _, fate in drawn)
    assert fates["trains"] >= 1
    assert fates["trains"] + fates["lies"] + fates["raises"] + fates["dies"] == len(drawn)
    assert fates["lies"] == min(hostile, fates["trains"] + fates["lies"] - 1)
    if len(drawn) > 1:
        wanted = min(failing * len(drawn), len(drawn) - 1)
        assert abs(fates["raises"] + fates["dies"] - wanted) <= 0.5
    assert fates["dies"] <= (1 if deaths else 0)
    assert draw_clients(number, options) == drawn


def test_one_round_of_so_many_has_a_death() -> None:
    options = argparse.Namespace(clients=50, fraction=0.2, failing=0.2, deaths=4, hostile=0, seed=0)
    died = [
        sum(fate == "dies" for _, fate in draw_clients(number, options)) for number in range(12)
    ]
    assert sum(died) == 3
    assert all(sum(died[begin : begin + 4]) == 1 for begin in range(9))


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--concentration", "inf", "expected above 0, at most 1e9, got inf"),
        ("--clients", "1001", "expected 1 to 1000, got 1001"),
        ("--fraction", "0", "expected above 0, at most 1, got 0.0"),
        ("--fraction", "nan", "expected above 0, at most 1, got nan"),
        ("--failing", "1", "expected at least 0, below 1, got 1.0"),
        ("--local-epochs", "0", "expected at least 1, got 0"),
        ("--deaths", "-1", "expected at least 0, got -1"),
        ("--seed", "-1", "expected 0 to 2147483647, got -1"),
    ],
)
def test_options_are_checked(
    option: str,
    value: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([option, value])
    assert f"{option}: {message}" in capsys.readouterr().err


@pytest.mark.parametrize(("rule", "least"), [("trimmed_mean", 17), ("krum", 19)])
def test_a_rule_that_cannot_stand_so_many_hostile_clients_is_refused(
    rule: str, least: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--hostile=8", "--rule", "mean", rule])  # 20 clients of a round, of which 4 fail
    message = (
        f"--rule {rule}: expected at least {least} results in a round with --hostile 8, got 16"
    )
    assert message in capsys.readouterr().err
