"""The variables that set_weights matches a mapping to."""

from typing import Any

import numpy as np
import pytest
from tf_models import build_eager

from flatweights import Layout
from flatweights._match import match_slots

# The way of moving weights is not tested here: once is enough.
pytestmark = pytest.mark.parametrize("path", ["bound"], indirect=True)

SHAPES = {
    "dense/kernel": (4, 4),
    "dense/bias": (4,),
    "dense_1/kernel": (4, 4),
    "dense_1/bias": (4,),
}


def model_layout() -> Any:
    return Layout.of({name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()})


def weights_named(names: Any, dtype: Any = np.float32) -> Any:
    return {n: np.zeros(s, dtype) for n, s in zip(names, SHAPES.values(), strict=True)}


def test_known_names_match_by_name_in_any_order_and_number() -> None:
    given = weights_named(SHAPES)
    backwards = dict(reversed(list(given.items())))
    assert match_slots(backwards, model_layout()) == dict(enumerate(SHAPES))
    assert match_slots({"dense_1/bias": np.zeros(4)}, model_layout()) == {3: "dense_1/bias"}


# In the first, dense_1 is known too: by name it would set the wrong layer.
@pytest.mark.parametrize(
    "names",
    [
        ["dense_1/kernel", "dense_1/bias", "dense_2/kernel", "dense_2/bias"],
        [f"actor/{name}" for name in SHAPES],
    ],
    ids=["shifted numbers", "renamed scope"],
)
def test_other_names_match_by_position_unless_it_is_strict(names: Any) -> None:
    given = weights_named(names)
    assert match_slots(given, model_layout()) == dict(enumerate(names))
    with pytest.raises(ValueError, match="strict: expected the names of the model; missing"):
        match_slots(given, model_layout(), strict=True)


def test_position_needs_the_same_dtypes_names_and_a_full_set() -> None:
    names = [f"actor/{name}" for name in SHAPES]
    with pytest.raises(AssertionError, match="No variables in the input matched"):
        match_slots(weights_named(names, np.float64), model_layout())
    # Ignored names do not count, or the state of a generator would be set as the last bias.
    seed = "seed_generator_state"
    with pytest.raises(AssertionError, match="No variables in the input matched"):
        match_slots(weights_named([*names[:3], seed]), model_layout(), ignored={seed})
    # Numbers would look like positions, which may disagree with the order of the items.
    given: Any = dict(enumerate(weights_named(SHAPES).values()))
    with pytest.raises(
        AssertionError, match=r"expected 'dense/kernel', .*, got 0, 1, 2 and 1 more"
    ):
        match_slots(given, model_layout())
    given = weights_named(names)
    del given["actor/dense/bias"]
    with pytest.raises(
        AssertionError, match=r"in the network: expected 'dense/kernel', .* and 1 more, got 'actor/"
    ):
        match_slots(given, model_layout())


def test_extra_weights_are_ignored_with_a_warning_that_points_at_the_caller() -> None:
    model = build_eager({"w": np.zeros(2, np.float32)})
    match = r"ignores 2 weights .*adam/m.*adam/v"
    with pytest.warns(UserWarning, match=match) as caught:
        model.weights.set_weights({"w": np.ones(2), "adam/m": np.ones(2), "adam/v": np.ones(2)})
    assert caught[0].filename == __file__
    assert model.weights.get_flat().tolist() == [1, 1]


def test_strict_refuses_subsets_and_extras() -> None:
    with pytest.raises(ValueError, match=r"missing \['dense/bias'.*unknown \[\]"):
        match_slots({"dense/kernel": np.zeros((4, 4))}, model_layout(), strict=True)
    with pytest.raises(ValueError, match=r"missing \[\], unknown \['adam'\]"):
        match_slots({**weights_named(SHAPES), "adam": 0}, model_layout(), strict=True)
    assert len(match_slots(weights_named(SHAPES), model_layout(), strict=True)) == 4


def test_rename_maps_names_of_the_input_to_names_of_the_model() -> None:
    given = {"k": np.zeros((4, 4)), "dense/bias": np.zeros(4)}
    found = match_slots(given, model_layout(), rename={"k": "dense_1/kernel"})
    assert found == {2: "k", 1: "dense/bias"}
    with pytest.raises(ValueError, match=r"rename: expected names in the weights, got \['q'\]"):
        match_slots(given, model_layout(), rename={"q": "dense/kernel"})
    with pytest.raises(ValueError, match=r"several for \['dense/bias'\]"):
        match_slots(given, model_layout(), rename={"k": "dense/bias"})
