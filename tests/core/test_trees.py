"""Models whose arrays are in nested dicts, lists and tuples."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from reference import refuses, same_bits

import flatweights as fw


class Moments(NamedTuple):
    mean: Any
    square: Any


class Empty(NamedTuple):
    """A state without arrays, such as ``optax.EmptyState``."""


def tree(value: float) -> dict[str, Any]:
    value = float(value)
    return {
        "params": {
            "layers": [
                {"kernel": np.full((2, 3), value, np.float32), "bias": np.full(3, 2 * value)},
                {"kernel": np.full((3, 1), -value, np.float32), "bias": np.full(1, value)},
            ],
            "scale": [value, 3 * value],  # a list of numbers is an array
        },
        "state": Moments(np.full(2, value), (np.full(1, value), np.full(1, 5.0))),
        "empty": {"dict": {}, "list": [], "nested": ((), [Empty()]), "state": Empty()},
        "step": np.int64(value),
    }


NAMES = (
    "params/layers/0/kernel",
    "params/layers/0/bias",
    "params/layers/1/kernel",
    "params/layers/1/bias",
    "params/scale",
    "state/0",
    "state/1/0",
    "state/1/1",
    "step",
)


def test_arrays_are_named_by_their_paths() -> None:
    weights = fw.FlatWeights(tree(3))
    assert weights.layout.names == fw.Layout.of(tree(3)).names == NAMES
    assert weights["params/layers/1/kernel"].tolist() == [[-3], [-3], [-3]]
    assert weights["params/scale"].tolist() == [3, 9]
    assert same_bits(fw.flatten(tree(3)), fw.flatten(weights))
    assert list(fw.unflatten(fw.flatten(tree(3)), weights.layout)) == list(NAMES)
    listed = fw.Layout.of([tree(3), np.ones(2)])
    assert (listed.names[0], listed.names[-1]) == ("0/params/layers/0/kernel", "1")
    assert listed.named


def assert_tree(result: Any, value: float, step: int) -> None:
    assert type(result["state"]) is Moments
    assert type(result["params"]["layers"]) is list
    assert type(result["state"].square) is tuple
    empty = result["empty"]
    assert repr(empty) == repr(tree(0)["empty"])  # == would accept a tuple for an Empty
    assert result["step"] == step
    result = fw.FlatWeights({**result, "step": np.int64(value)})
    expected = fw.FlatWeights(tree(value))
    assert result.layout == expected.layout
    assert same_bits(result.buffer, expected.buffer)


def test_trees_are_averaged_into_trees() -> None:
    assert_tree(fw.average([tree(1), tree(4)], weights=[2, 1]), 2.0, 1)
    running = fw.RunningAverage()
    running.add_all([tree(1), tree(3)])
    assert_tree(running.mean(), 2.0, 1)


def test_out_and_another_order_of_keys() -> None:
    out = tree(0)
    out["params"]["scale"] = np.zeros(2)
    out["step"] = np.zeros((), np.int64)
    sources = [tree(1), dict(reversed(tree(3).items()))]
    assert fw.average(sources, out=out) is out
    assert_tree(out, 2.0, 1)


def test_the_state_of_an_optimizer_may_be_empty() -> None:
    def state(value: float) -> tuple[Any, ...]:
        return Moments(
            {"w": np.full(1, value, np.float32)}, {"w": np.full(1, value, np.float32)}
        ), Empty()

    mean = fw.average([state(1), state(3)])
    assert repr(mean) == repr(state(2))
    assert fw.average([state(1), state(3)], out=mean) is mean
    assert fw.flatten(state(1)).dtype == np.float32
    assert fw.Layout.of(state(1)).names == ("0/0/w", "0/1/w")


@pytest.mark.parametrize(
    ("clash", "names"),
    [
        ({"a": {1: 5.0, "1": 6.0}}, ("'a'/1", "'a'/'1'")),
        ({"a/b": 5.0, "a": {"b": 6.0}}, ("'a/b'", "'a'/'b'")),
        ([{0: 5.0, "0": {}}, {0: 6.0}], ("0/0", "1/0")),  # no clash
    ],
)
def test_keys_are_quoted_where_two_paths_would_be_the_same(clash: Any, names: Any) -> None:
    assert fw.average([clash, clash]) == clash
    assert fw.Layout.of(clash).names == fw.FlatWeights(clash).layout.names == names
    running = fw.RunningAverage()
    running.add(clash)
    assert running.mean() == clash


@pytest.mark.parametrize("model", [[[]], ((), [[], Empty()]), {"a": [], "b": ({},)}])
def test_containers_without_an_array_hold_nothing(model: Any) -> None:
    assert repr(fw.average([model, model])) == repr(model)
    assert len(fw.Layout.of(model)) == 0
    assert fw.flatten(model).shape == (0,)


def changed(**parts: Any) -> dict[str, Any]:
    return {**tree(1), **parts}


ITSELF: list[Any] = []
ITSELF.append(ITSELF)


@pytest.mark.parametrize(
    ("bad", "error", "match"),
    [
        (changed(more=np.ones(1)), ValueError, r"source 1: .*unknown \['more'\]"),
        (changed(state=[np.ones(2)]), ValueError, r"source 1, 'state': .*missing \[1\]"),
        (changed(state=np.ones(2)), TypeError, "source 1, 'state': expected a sequence, got nd"),
        (changed(params=[np.ones(2)]), TypeError, "source 1, 'params': expected a mapping, got"),
        (changed(empty=tree(1)["empty"] | {"list": np.ones(0)}), TypeError, "'empty/list': expect"),
        (changed(empty=tree(1)["empty"] | {"list": [1.0]}), ValueError, r"list'.*unknown \[0\]"),
        (changed(step=None), TypeError, "source 1, slot 8 'step': expected an array, got None"),
        (changed(step=[[1], [2, 3]]), ValueError, "source 1, slot 8 'step': expected an array"),
        (np.ones(2), TypeError, "source 1: expected a mapping, got ndarray"),
    ],
)
def test_another_tree_is_refused_by_path(bad: Any, error: Any, match: str) -> None:
    with refuses(error, match):
        fw.average([tree(1), bad])


CALLS: list[Callable[[Any], Any]] = [
    lambda parts: fw.average([parts, parts]),
    fw.flatten,
    fw.FlatWeights,
    fw.Layout.of,
    fw.RunningAverage().add,
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("parts", "error", "match"),
    [
        ({"a": {"b": None}}, TypeError, "slot 0 'a/b': expected an array, got NoneType"),
        ({"a": [np.ones(1), [[1], [2, 3]]]}, ValueError, "slot 1 'a/1': expected an array, got l"),
        ({"a": ITSELF}, ValueError, "at most 64 levels .* does one contain itself"),
        (ITSELF, ValueError, "at most 64 levels .* does one contain itself"),
        ([np.array([None])], TypeError, "expected .* Python objects"),
    ],
)
def test_what_makes_no_array_is_refused_by_path(
    call: Callable[[Any], Any], parts: Any, error: Any, match: str
) -> None:
    with refuses(error, match):
        call(parts)


def test_an_array_of_objects_is_refused_by_the_name_of_its_source() -> None:
    objects = np.array([None])
    with refuses(TypeError, "source 0: expected an array of numbers, got one of Python objects"):
        fw.average([objects])
    with refuses(TypeError, "source 0, slot 0 'w': expected an array of numbers, got one of Pyth"):
        fw.average([{"w": objects}, {"w": np.ones(1)}])
