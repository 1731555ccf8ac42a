"""Models without a framework: a user's class holds their arrays."""

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import ray
from numpy.typing import NDArray
from ray_forks import ALONE
from reference import run_python, same_bits

from flatweights import FlatWeights, Layout, average
from flatweights.ray import FlatWorker, Variables, WorkerGroup, join
from flatweights.ray.peers._transport import plain_weights
from flatweights.ray.results import _variables

pytestmark = pytest.mark.ray


class Arrays:
    """Holds the arrays of a model, as a user of another library would write it."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self.arrays = dict(arrays)
        self.layout = Layout.of(self.arrays)

    def gather_into(self, buffer: NDArray[np.uint8]) -> None:
        views = self.layout.packed_views(buffer)
        for view, array in zip(views, self.arrays.values(), strict=True):
            view[...] = array

    def scatter(self, buffer: NDArray[np.uint8]) -> None:
        views = self.layout.packed_views(buffer)
        for view, array in zip(views, self.arrays.values(), strict=True):
            array[...] = view


def new_arrays() -> dict[str, NDArray[Any]]:
    return {
        "kernel": np.arange(6, dtype=np.float32).reshape(2, 3),
        "bias": np.array([6.0, 7.0, 8.0]),
        "step": np.array(9),
    }


class Regression(FlatWorker):
    """Fits a line by gradient descent, with NumPy alone."""

    def build(self, rank: int) -> Arrays:
        rng = np.random.default_rng(rank)
        self.x = rng.normal(size=64)
        self.y = 3.0 * self.x + 1.0
        self.model = {"slope": np.array(float(rank)), "offset": np.array(0.0)}
        return Arrays(self.model)

    def train(self, steps: int) -> FlatWeights:
        for _ in range(steps):
            error = self.model["slope"] * self.x + self.model["offset"] - self.y
            self.model["slope"] -= 0.1 * np.mean(error * self.x)
            self.model["offset"] -= 0.1 * np.mean(error)
        return self.get_weights()

    def imported(self) -> list[str]:
        return sorted({"tensorflow", "keras", "torch"} & set(sys.modules))


@pytest.mark.starts_actors
@pytest.mark.parametrize("alone", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_group_trains_a_model_without_a_framework(way: str, alone: bool) -> None:
    variables = {ALONE: "1"} if alone else {}
    workers: Any = ray.remote(num_cpus=0, runtime_env={"env_vars": variables})(Regression)
    with WorkerGroup.create(workers, 2, arguments=lambda rank: [rank]) as group:
        for result in group.run(20, "train", 5, timeout=120):
            assert result.used == (0, 1)
        assert result.weights["slope"] == pytest.approx(3.0, abs=1e-3)
        assert result.weights["offset"] == pytest.approx(1.0, abs=1e-3)
        for flat in group.step("get_flat").values():
            assert flat.tolist() == [result.weights["slope"], result.weights["offset"]]
        group.broadcast(np.array([5.0, 6.0]))
        models = group.step("get_weights")
        assert models[0] == models[1] == {"slope": 5.0, "offset": 6.0}
        assert not alone or group.step("imported") == {0: [], 1: []}


class Large(FlatWorker):
    """Its weights lie in segments, as those of large models do."""

    def build(self, rank: int) -> Arrays:
        return Arrays({"w": np.full(40_000, rank + 1.0)})


@pytest.mark.starts_actors
def test_large_weights_count_by_rank(way: str) -> None:
    workers: Any = ray.remote(num_cpus=0)(Large)
    with WorkerGroup.create(workers, 2, arguments=lambda rank: [rank], initial=None) as group:
        for _ in range(20):  # the first ones by Ray
            found = group.average("get_weights", weights=[1.0, 3.0])
            assert set(found.weights["w"]) == {1.75}


def test_a_member_averages_them_in_place() -> None:
    held = Arrays(new_arrays())
    half: Any = type("Half", (), {"layout": held.layout, "gather_into": held.gather_into})()
    with join("variables", rank=0, size=1) as member:
        with pytest.raises(TypeError, match=r"^variables: .* got Half, which lacks scatter$"):
            member.average_variables(half)
        assert member.average_variables(held, rule=lambda models: average([*models] * 3)).used
    for name, expected in new_arrays().items():
        assert same_bits(held.arrays[name], expected)


def test_weights_leave_by_name_and_as_a_vector() -> None:
    held = Arrays(new_arrays())
    assert isinstance(held, Variables)
    weights = _variables.get_weights(held)
    assert list(weights) == list(held.arrays)
    assert all(same_bits(weights[name], array) for name, array in held.arrays.items())
    weights["bias"] = [0.0, 0.0, 0.0]
    assert held.arrays["bias"].tolist() == [6.0, 7.0, 8.0]
    assert same_bits(_variables.get_flat(held), np.arange(10.0))


def test_weights_are_set_by_name_by_position_and_in_part() -> None:
    held = Arrays(new_arrays())
    twice = {name: 2 * array for name, array in new_arrays().items()}
    for new in (FlatWeights(twice), twice, {f"other/{k}": v for k, v in twice.items()}):
        held = Arrays(new_arrays())
        _variables.set_weights(held, new)
        assert all(same_bits(held.arrays[name], twice[name]) for name in twice)
    _variables.set_weights(held, {"bias": np.ones(3, np.float32)})
    assert held.arrays["bias"].tolist() == [1.0, 1.0, 1.0]
    assert same_bits(held.arrays["kernel"], twice["kernel"])
    _variables.set_flat(held, np.arange(20.0)[::2])
    assert held.arrays["step"] == 18
    assert held.arrays["kernel"].tolist() == [[0, 2, 4], [6, 8, 10]]


def test_wrong_weights_change_nothing() -> None:
    held = Arrays(new_arrays())
    cases: list[tuple[Any, str]] = [
        ({"bias": np.ones(2)}, r"slot 1 'bias': expected float64 \(3,\), got float64 \(2,\)"),
        ({"nobody": np.ones(3)}, "No variables in the input matched"),
        ([np.ones(3)], "expected a mapping"),
        (np.ones(9), r"new_weights: expected shape \(10,\)"),
        ({"step": np.array(1e30)}, "slot 2 'step'.*fit"),
    ]
    for new, message in cases:
        set_ = _variables.set_flat if isinstance(new, np.ndarray) else _variables.set_weights
        with pytest.raises((ValueError, TypeError, AssertionError), match=message):
            set_(held, new)
        assert all(same_bits(held.arrays[name], array) for name, array in new_arrays().items())
    by_name: Any = _variables.get_weights(held)
    with pytest.raises(TypeError, match="expected an array, got FlatWeights; set_weights takes"):
        _variables.set_flat(held, by_name)
    with pytest.raises(TypeError, match="share: expected False, got True: Arrays copies"):
        _variables.set_weights(held, new_arrays(), share=True)
    with pytest.raises(TypeError, match="share: expected False"):
        _variables.set_flat(held, np.ones(10), share=True)


def test_methods_of_its_own_come_first() -> None:
    class Own(Arrays):
        def set_weights(self, weights: Any, *, share: bool) -> None:
            self.got = weights, share

    held = Own(new_arrays())
    _variables.set_weights(held, {"bias": 1}, share=True)
    assert held.got == ({"bias": 1}, True)
    assert same_bits(_variables.get_flat(held), np.arange(10.0))


@pytest.mark.parametrize("own", ["none", "class", "object", "variables"])
def test_weights_of_a_command_are_set_by_the_method_that_a_user_has_written(own: str) -> None:
    told: list[Any] = []

    class Own(Arrays):
        def set_weights(self, weights: Any, *, share: bool) -> None:
            told.append(weights)
            self.scatter(FlatWeights(weights).buffer)

    class Worker(FlatWorker):
        def build(self) -> Arrays:
            zeros = {name: np.zeros_like(array) for name, array in new_arrays().items()}
            return Own(zeros) if own == "variables" else Arrays(zeros)

    class Overriding(Worker):
        def set_weights(self, new_weights: Any, *, share: bool = False) -> None:
            told.append(new_weights)
            super().set_weights(new_weights, share=share)

    worker = Overriding() if own == "class" else Worker()
    if own == "object":
        by_class = worker.set_weights
        worker.set_weights = lambda new: (told.append(new), by_class(new))  # type: ignore
    sent = FlatWeights(new_arrays())
    worker.call_version((("group", 1), ("group", 1), None), plain_weights(sent), None)
    assert [list(weights) for weights in told] == ([] if own == "none" else [list(sent)])
    assert same_bits(worker.get_flat(), np.arange(10.0))


def test_what_is_no_model_is_refused_by_name() -> None:
    program = """
from flatweights.ray import FlatWorker

import numpy as np

class Half:
    layout = gather_into = None

class Worker(FlatWorker):
    def build(self, built):
        return built

for built in {"w": 1.0}, {"w": np.ones(1)}, Half(), 3:
    try:
        Worker(built)
    except TypeError as error:
        print(error)
"""
    gots = ["a dict", "a dict of NumPy arrays", "Half, which lacks scatter", "int"]
    lines = run_python(program).splitlines()
    for line, got in zip(lines, gots, strict=True):
        assert line.startswith(f"Worker.build() returned {got}: expected an object with layout, ")
