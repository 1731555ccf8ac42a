"""get_weights and set_weights, in both modes."""

from typing import Any

import numpy as np
import pytest
from tf_models import build_eager, build_graph, mixed_values, random_values

from flatweights import FlatWeights


def test_get_weights_gives_each_value_in_its_dtype(build: Any) -> None:
    values = mixed_values()
    weights = build(values).weights.get_weights()
    assert isinstance(weights, FlatWeights)
    assert list(weights) == list(values)
    for name, value in values.items():
        np.testing.assert_array_equal(weights[name], value, strict=True)
        assert weights[name].flags.writeable


@pytest.mark.parametrize("values", [mixed_values, random_values])
def test_weights_in_any_order_and_number_set_by_name(build: Any, values: Any) -> None:
    model = build(values(0))
    some = list(values(3).items())[::2]
    for given in (FlatWeights(values(1)), dict(reversed(values(2).items())), dict(some)):
        wanted = {**model.read(), **given}
        model.weights.set_weights(given)
        for name, value in model.read().items():
            np.testing.assert_array_equal(value, wanted[name])


def test_the_averaging_comprehension_sets_a_model_with_counters(build: Any) -> None:
    # It turns int64 into float64, and uint32 into float64.
    models = [build(mixed_values(seed)) for seed in range(2)]
    sets = [model.weights.get_weights() for model in models]
    mean = {k: sum(np.asarray(w[k], np.float64) for w in sets) / 2 for k in sets[0] if k != "flag"}
    models[0].weights.set_weights(mean)
    now = models[0].read()
    assert now["step"] == 2**40 + 1
    np.testing.assert_array_equal(now["seed"], np.rint(mean["seed"]).astype(np.uint32))
    np.testing.assert_array_equal(now["single"], mean["single"].astype(np.float32))  # type: ignore[union-attr]


def test_weights_cross_modes() -> None:
    eager, graph = build_eager(mixed_values(0)), build_graph(mixed_values(1))
    graph.weights.set_weights(eager.weights.get_weights(), strict=True)
    for name, value in graph.read().items():
        np.testing.assert_array_equal(value, mixed_values(0)[name])
    eager.write("step", 5)
    graph.weights.set_weights(eager.weights.get_weights())
    assert graph.read()["step"] == 5


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (
            {"bias": np.zeros(4, np.float32)},
            ValueError,
            r"slot 4 'bias': expected float32 \(5,\), got float32 \(4,\)",
        ),
        ({"bias": np.zeros((5, 1))}, ValueError, r"expected float32 \(5,\), got float64 \(5, 1\)"),
        (
            {"bias": np.zeros(5, np.complex128)},
            TypeError,
            r"expected float32 \(5,\), got complex128",
        ),
        ({"bias": "text"}, ValueError, r"expected float32 \(5,\), got <U4 \(\)"),
        ([1, 2], TypeError, r"such as TensorFlowVariables\(model\)\.get_weights\(\), got l"),
        ({}, AssertionError, "No variables in the input matched"),
        (
            {"unknown": np.zeros(5)},
            AssertionError,
            r"got 'unknown'. Possible causes(.|\n)*each network definition in its own tf\.Graph",
        ),
    ],
)
def test_wrong_weights_change_nothing(build: Any, bad: Any, error: Any, message: Any) -> None:
    values = random_values()
    model = build(values)
    given = {"kernel": np.zeros((7, 5)), **bad} if isinstance(bad, dict) and "bias" in bad else bad
    with pytest.raises(error, match=message):
        model.weights.set_weights(given)
    for name, value in model.read().items():
        np.testing.assert_array_equal(value, values[name])
