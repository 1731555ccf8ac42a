"""Rounds whose result is a robust average instead of the mean."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray
from ray_pool import Actors
from ray_workers import PlainWorker, trained, weights_of
from reference import assert_same, same_bits

import flatweights as fw
from flatweights import FlatWeights, robust
from flatweights.ray import WorkerError, WorkerGroup, average
from flatweights.robust import AnyRule, Rule

pytestmark = pytest.mark.ray

RULES = [
    robust.Median(),
    robust.TrimmedMean(0.25),
    robust.MeanAroundMedian(3),
    robust.Krum(1),
    robust.MultiKrum(1, 3),
    robust.GeometricMedian(),
    robust.CenteredClipping(1.0),
]


@pytest.fixture(scope="module")
def five(way: str, all_actors: Actors) -> Iterator[WorkerGroup]:
    with all_actors.loan() as lend:
        yield lend(PlainWorker, 5, max_restarts=-1)


@pytest.fixture
def group(five: WorkerGroup) -> WorkerGroup:
    five.broadcast(weights_of(1.0))
    return five


def test_every_rule_gives_what_it_gives_for_the_results(group: WorkerGroup) -> None:
    for rule in RULES:
        group.broadcast(weights_of(1.0))
        results = [trained(weights_of(1.0), rank) for rank in range(5)]
        expected = rule.apply(results)
        found = group.average("train", rule=rule)
        assert_same(found.weights, expected.weights)
        assert list(found.used) == expected.used
        assert found.quarantined == tuple(k for k in range(5) if k not in expected.used)
        assert found.failed == {}
        assert list(found.scores.values()) == (expected.scores or [])
        assert found.record()["scores"] == {str(k): v for k, v in found.scores.items()}
        assert group.healthy_actor_ids() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "rule", [*RULES, lambda models: models[0]], ids=[*map(str, RULES), "a function"]
)
def test_a_rule_writes_out_only_if_enough_ranks_are_left(rule: AnyRule) -> None:
    models = [np.array([value, -value]) for value in (1.0, 2.0, np.nan, 3.0, 5.0, np.inf, 6.0)]
    refs, out = [ray.put(model) for model in models], np.full(2, 7.0)
    with pytest.raises(WorkerError, match="rank 2: ValueError: rank 2: holds NaN"):
        average(refs, rule=rule, out=out, nonfinite="skip", min_results=6)
    assert out.tolist() == [7.0, 7.0]
    found = average(refs, rule=rule, out=out, nonfinite="skip", min_results=5)
    rest = [model for model in models if np.isfinite(model).all()]
    assert same_bits(out, Rule.of(rule)(rest))
    assert found.weights is out
    assert {2, 5} <= {*found.quarantined}
    assert [*found.failed] == [2, 5]


@pytest.mark.starts_actors
def test_rounds_send_what_the_rule_gives_and_start_from_what_is_sent(group: WorkerGroup) -> None:
    expected = weights_of(1.0)
    for found in group.run(3, "train", rule=robust.Median()):
        expected = robust.median([trained(expected, rank) for rank in range(5)])
        assert_same(found.weights, expected)
    assert all(same_bits(w["w"], expected["w"]) for w in group.step("get_weights").values())
    for value in (1.0, 100.0):
        start = weights_of(value)
        rule = robust.CenteredClipping(1.0, 1, start)
        found = group.average("train", broadcast=start, rule=rule)
        assert_same(found.weights, rule([trained(start, rank) for rank in range(5)]))


@pytest.mark.starts_actors
def test_a_rank_with_nan_fails_and_one_left_out_by_the_rule_does_not(group: WorkerGroup) -> None:
    poisoned: dict[str, Any] = {"plan": {1: "nan"}}
    with pytest.raises(ValueError, match="rank 1, slot 0 'w': holds NaN or infinity"):
        group.average("act", **poisoned, rule=robust.Median())
    group.broadcast(weights_of(1.0))
    found = group.average("act", **poisoned, rule=robust.MultiKrum(0, 3), nonfinite="skip")
    rest = [trained(weights_of(1.0), rank) for rank in (0, 2, 3, 4)]
    expected = robust.MultiKrum(0, 3).apply(rest)
    used = [(0, 2, 3, 4)[k] for k in expected.used]
    assert_same(found.weights, expected.weights)
    assert list(found.used) == used
    assert list(found.failed) == [1]
    assert found.quarantined == tuple(k for k in range(5) if k not in used)
    assert sorted(found.scores) == [0, 2, 3, 4]
    group.broadcast(weights_of(1.0))
    with pytest.raises(WorkerError):
        group.average("act", **poisoned, rule=robust.Median(), nonfinite="skip", min_results=5)


@pytest.mark.starts_actors
def test_any_function_is_a_rule_and_is_not_kept_after_its_round(group: WorkerGroup) -> None:
    held = {*range(3)}
    known = weakref.ref(held)

    def second(models: list[FlatWeights], held: object = held) -> FlatWeights:
        return models[1]

    found = group.average("train", rule=second)
    assert_same(found.weights, trained(weights_of(1.0), 1))
    assert found.used == (0, 1, 2, 3, 4)
    out = weights_of(0.0)
    refs = [ray.put(weights_of(float(k))) for k in range(3)]
    assert average(refs, rule=second, out=out).weights is out
    assert_same(out, weights_of(1.0))
    with pytest.raises(TypeError, match="the result of the rule: expected FlatWeights, got an arr"):
        average(refs, rule=lambda models: np.zeros(3))
    del second, held
    gc.collect()
    assert known() is None


def test_plain_references_of_large_results(rng: np.random.Generator) -> None:
    vectors = [rng.normal(size=100_000).astype(np.float32) for _ in range(6)]
    vectors[2] += 100
    refs = [ray.put(vector) for vector in vectors]
    found = average(refs, rule=robust.MultiKrum(1, 4), max_inflight=2)
    assert 2 in found.quarantined
    assert same_bits(found.weights, fw.average([vectors[k] for k in found.used]))
    assert "quarantined (" in repr(found)
    weights = [1.0, 2.0, 0.5, 1.0, 1.0, 1.0]
    weighted = average(refs, weights, rule=robust.GeometricMedian())
    assert same_bits(weighted.weights, robust.geometric_median(vectors, weights))


@pytest.mark.starts_actors
def test_wrong_rules_are_refused_before_anybody_works(group: WorkerGroup) -> None:
    before = group.step("how_often")
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"rule": "median"}, TypeError, "rule: expected a value such as flatweights.robust.Median"),
        ({"rule": robust.Median}, TypeError, "rule: expected a value such as"),
        (
            {"rule": robust.Median(), "weights": [1.0] * 5},
            TypeError,
            "weights: Median has no weights",
        ),
        ({"rule": max, "weights": [1.0] * 5}, TypeError, "weights: max has no weights"),
    ]
    for arguments, error, text in wrong:
        with pytest.raises(error, match=text):
            group.average("train", **arguments)
        with pytest.raises(error, match=text):
            group.run(2, "train", **arguments)
    assert group.step("how_often") == before
