import copy
import doctest
import importlib
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interrupts import each_interruption
from reference import (
    AVERAGED,
    BFLOAT16,
    REAL,
    dtype_id,
    each,
    random_array,
    read_only,
    refuses,
    run_python,
    same_bits,
)

import flatweights as fw
from flatweights import server
from flatweights.server import _state

Array = np.ndarray[Any, Any]
Make = Callable[[Any], server.ServerOptimizer[Any]]

LR, BETA1, BETA2, TAU = 0.1, 0.9, 0.97, 1e-2

MAKERS: dict[str, Make] = {
    "FedAvg": lambda w: server.FedAvg(w),
    "FedAvgM": lambda w: server.FedAvgM(w, momentum=BETA1, learning_rate=LR),
    "FedAvgM without momentum": lambda w: server.FedAvgM(w, momentum=0, learning_rate=LR),
    "FedAvgM with nesterov": lambda w: server.FedAvgM(
        w, momentum=BETA1, learning_rate=LR, nesterov=True
    ),
    "ExponentialMovingAverage": lambda w: server.ExponentialMovingAverage(w, decay=BETA1),
    "FedAdagrad": lambda w: server.FedAdagrad(w, learning_rate=LR, tau=TAU),
    "FedAdagrad with beta1": lambda w: server.FedAdagrad(w, learning_rate=LR, tau=TAU, beta1=BETA1),
    "FedAdam": lambda w: server.FedAdam(w, learning_rate=LR, beta2=BETA2, tau=TAU),
    "FedAdam without beta1": lambda w: server.FedAdam(
        w, learning_rate=LR, beta1=0, beta2=BETA2, tau=TAU
    ),
    "FedYogi": lambda w: server.FedYogi(w, learning_rate=LR, beta2=BETA2, tau=TAU),
    "GradientDescent": lambda w: server.GradientDescent(w, learning_rate=LR),
    "GradientDescent, clipped": lambda w: server.GradientDescent(w, learning_rate=LR, max_norm=0.5),
    "GradientDescent with momentum": lambda w: server.GradientDescent(
        w, learning_rate=LR, momentum=BETA1, max_norm=2.0
    ),
    "Adam": lambda w: server.Adam(w, learning_rate=LR, beta2=BETA2, epsilon=TAU),
    "Adam without beta1": lambda w: server.Adam(
        w, learning_rate=LR, beta1=0, beta2=BETA2, epsilon=TAU
    ),
}
OF_ALL_KINDS = pytest.mark.parametrize("name", MAKERS)
# For what the classes have in common: some with and without each vector of state.
OF_SOME_KINDS = pytest.mark.parametrize(
    "name",
    [
        name
        if name in ("FedAvg", "FedAvgM", "FedAdam", "GradientDescent", "Adam without beta1")
        else pytest.param(name, marks=pytest.mark.slow)
        for name in MAKERS
    ],
)
AVERAGING = [name for name in MAKERS if not name.startswith(("Gradient", "Adam"))]


class Oracle:
    """The formulas of the papers, in float64, without blocks or state of 32 bits.

    Attributes:
        x: The model, as one float64 vector; not rounded to 16 bits.
    """

    def __init__(self, name: str, x: Array) -> None:
        self._name = name
        self.x = x
        self._m = np.zeros_like(x)
        self._v = np.full_like(x, 0.0 if name.startswith("Adam") else TAU**2)
        self._steps = 0

    def step(self, average: Array, published: Array) -> None:
        """Take an average; ``published`` is the model that workers had."""
        name, delta = self._name, average - published
        if name == "FedAvg":
            self.x = average
        elif name == "ExponentialMovingAverage":
            self.x = BETA1 * self.x + (1 - BETA1) * average
        elif name.startswith("FedAvgM"):
            momentum = 0.0 if "without" in name else BETA1
            self._m = momentum * self._m + delta
            ahead = delta + momentum * self._m if "nesterov" in name else self._m
            self.x = self.x + LR * ahead
        elif name.startswith("Gradient"):
            most = {"Gr": math.inf, "cl": 0.5, "mo": 2.0}[name.split()[-1][:2]]
            momentum = BETA1 if "momentum" in name else 0.0
            length = np.linalg.norm(average)
            self._m = momentum * self._m + average * (most / length if length > most else 1.0)
            self.x = self.x - LR * self._m
        elif name.startswith("Adam"):
            self._steps += 1
            beta1 = 0.0 if "without" in name else BETA1
            self._m = beta1 * self._m + (1 - beta1) * average
            self._v = BETA2 * self._v + (1 - BETA2) * average**2
            rate = LR * np.sqrt(1 - BETA2**self._steps) / (1 - beta1**self._steps)
            self.x = self.x - rate * self._m / (np.sqrt(self._v) + TAU)
        else:
            has_beta1 = name in ("FedAdagrad with beta1", "FedAdam", "FedYogi")
            beta1 = BETA1 if has_beta1 else 0.0
            self._m = beta1 * self._m + (1 - beta1) * delta
            if name.startswith("FedAdagrad"):
                self._v = self._v + delta**2
            elif name.startswith("FedAdam"):
                self._v = BETA2 * self._v + (1 - BETA2) * delta**2
            else:
                self._v = self._v - (1 - BETA2) * delta**2 * np.sign(self._v - delta**2)
            self.x = self.x + LR * self._m / (np.sqrt(self._v) + TAU)


def reals(array: Array) -> Array:
    """The real and imaginary parts, in float64."""
    return array.reshape(-1).view(array.real.dtype).astype(np.float64)


def numbers(model: Any) -> Array:
    """All floating numbers of a model, in float64."""
    if not isinstance(model, dict):
        return reals(model)
    found = [reals(part) for part in model.values() if part.dtype.kind not in "bi"]
    return np.concatenate([*found, np.zeros(0)])


def units(model: Any) -> Array:
    """For each of `numbers`, the relative distance between numbers of its dtype."""
    parts = model.values() if isinstance(model, dict) else [model]
    eps = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float64": 2.0**-52, "complex128": 2.0**-52}
    found = [
        np.full(reals(p).size, eps.get(p.dtype.name, 2.0**-23))
        for p in parts
        if p.dtype.kind not in "bi"
    ]
    return np.concatenate([*found, np.zeros(0)])


def model(rng: np.random.Generator, step: int = 0) -> fw.FlatWeights:
    """A model of all dtypes, some with padding after them, and integers between."""
    return fw.FlatWeights(
        {
            "kernel": random_array(rng, (3, 5), np.dtype(np.float32)),
            "step": np.array(step, np.int64),
            "conv": random_array(rng, (4, 16), np.dtype(np.float32)),
            "phase": random_array(rng, 8, np.dtype(np.complex64)),
            "bias": random_array(rng, 1025, np.dtype(np.float64)),
            "half": random_array(rng, (32, 2), np.dtype(np.float16)),
            "half/more": random_array(rng, 3, np.dtype(np.float16)),
            "mask": np.array([True, bool(step % 2), True]),
            "none": np.zeros((0, 3), np.float32),
            "brain": random_array(rng, 33, BFLOAT16),
            "brain/scale": random_array(rng, (), BFLOAT16),
            "wide phase": random_array(rng, 2, np.dtype(np.complex128)),
        }
    )


def image(optimizer: server.ServerOptimizer[Any]) -> bytes:
    return optimizer.state.buffer.tobytes()


# Right results.


def check_steps(name: str, initial: Any, averages: list[Any]) -> None:
    optimizer, oracle = MAKERS[name](initial), Oracle(name, numbers(initial))
    for average in averages:
        published = numbers(optimizer.weights)
        # Both start from the same 16-bit model, since workers see its rounding.
        oracle.step(numbers(average), published)
        returned = optimizer.step(average)
        assert returned is optimizer.weights
        got, unit = numbers(returned), units(returned)
        scale = np.abs(oracle.x) + np.abs(published) + np.abs(numbers(average)) + 1
        inner = np.where(unit == 2.0**-52, 2.0**-52, 2.0**-24)  # of the state
        tolerance = 0.51 * unit * np.abs(oracle.x) + 100 * inner * scale
        assert np.all(np.abs(got - oracle.x) <= tolerance + 2.0**-24 * (unit > 1e-4))
    assert optimizer.steps == len(averages)


@OF_ALL_KINDS
@each(shape=[(), (1,), (2, 3), (0, 4), (70,)])
@each(averaged_dtype=AVERAGED)
def test_arrays_follow_the_papers(
    name: str,
    shape: tuple[int, ...],
    averaged_dtype: np.dtype[Any],
    rng: np.random.Generator,
) -> None:
    models = [random_array(rng, shape, averaged_dtype) for _ in range(6)]
    models = [np.asarray(m, averaged_dtype).reshape(shape) for m in models]
    check_steps(name, models[0], models[1:])


@OF_ALL_KINDS
def test_models_of_mixed_dtypes_follow_the_papers(name: str, rng: np.random.Generator) -> None:
    check_steps(name, model(rng), [model(rng, k) for k in range(1, 7)])


@OF_SOME_KINDS
@settings(max_examples=10)
@given(data=st.data())
def test_any_layout_follows_the_papers(name: str, data: st.DataObject) -> None:
    dtypes = st.sampled_from((*AVERAGED, np.dtype(np.int32), np.dtype(bool)))
    shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
    slots = data.draw(st.lists(st.tuples(shapes, dtypes), max_size=6))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    models = [
        fw.FlatWeights(
            {str(i): np.asarray(random_array(rng, s, d), d) for i, (s, d) in enumerate(slots)}
        )
        for _ in range(3)
    ]
    check_steps(name, models[0], models[1:])


@OF_SOME_KINDS
@each(dtype=REAL)
def test_blocks_do_not_change_the_bits(
    name: str, dtype: np.dtype[Any], rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [random_array(rng, 5000, dtype) for _ in range(3)]
    images = set()
    for block in (1 << 16, 1024, 37):
        monkeypatch.setattr(_state, "BLOCK", block)
        optimizer = MAKERS[name](models[0])
        for average in models[1:]:
            optimizer.step(average)
        images.add(image(optimizer))
    assert len(images) == 1


@OF_SOME_KINDS
def test_more_than_one_block(name: str, rng: np.random.Generator) -> None:
    size = _state.BLOCK + 5
    for dtype in (np.float32, np.float16):
        models = [random_array(rng, size, np.dtype(dtype)) for _ in range(3)]
        check_steps(name, models[0], models[1:])


@OF_SOME_KINDS
def test_an_array_and_a_model_of_one_part_agree(name: str, rng: np.random.Generator) -> None:
    for dtype in REAL:
        arrays = [random_array(rng, (5, 3), dtype) for _ in range(4)]
        flat, packed = MAKERS[name](arrays[0]), MAKERS[name](fw.FlatWeights({"w": arrays[0]}))
        for array in arrays[1:]:
            result = packed.step(fw.FlatWeights({"w": array}))["w"]
            assert same_bits(flat.step(array), result)


@each(averaged_dtype=AVERAGED)
def test_without_momentum_and_at_full_rate_it_is_the_average(
    averaged_dtype: np.dtype[Any], rng: np.random.Generator
) -> None:
    initial = random_array(rng, 100, averaged_dtype)
    averages = [random_array(rng, 100, averaged_dtype) for _ in range(3)]
    averages.append(np.array([-0.0, 0.0] * 50).astype(averaged_dtype))
    plain = server.FedAvg(initial)
    optimizer = server.FedAvgM(initial, momentum=0, learning_rate=1)
    smoothed = server.ExponentialMovingAverage(initial, decay=0)
    for average in averages:
        assert same_bits(optimizer.step(average), average)
        assert same_bits(plain.step(average), average)
        assert np.array_equal(smoothed.step(average), average)
    assert "momentum" not in optimizer.state


@pytest.mark.parametrize("rate", [0.5, 1.5])
def test_another_rate_goes_less_far_than_the_average_or_farther(rate: float) -> None:
    optimizer = server.FedAvgM(np.array([1.0, 2.0]), momentum=0, learning_rate=rate)
    assert np.array_equal(optimizer.step(np.array([3.0, 2.0])), [1.0 + 2 * rate, 2.0])


def test_models_without_momentum_are_the_average_too(rng: np.random.Generator) -> None:
    optimizer = server.FedAvgM(model(rng), momentum=0)
    average = fw.average([model(rng, 3), model(rng, 4)])
    assert same_bits(optimizer.step(average).buffer, average.buffer)
    assert same_bits(server.FedAvg(model(rng)).step(average).buffer, average.buffer)


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BFLOAT16], ids=dtype_id)
def test_steps_too_small_for_16_bits_add_up(dtype: np.dtype[Any]) -> None:
    one, two = np.ones(3, dtype), np.full(3, 2, dtype)
    smoothed = server.ExponentialMovingAverage(one, decay=1 - 2.0**-13)
    for _ in range(1000):
        smoothed.step(two)
    assert smoothed.weights.astype(float) == pytest.approx(2 - (1 - 2.0**-13) ** 1000, rel=2.0**-8)
    descent = server.GradientDescent(one, learning_rate=2.0**-13)
    for _ in range(500):
        descent.step(two)
    assert descent.weights.astype(float) == pytest.approx(1 - 1000 / 2**13, rel=2.0**-8)


def test_a_decay_that_grows_gives_the_mean_of_the_iterates(rng: np.random.Generator) -> None:
    iterates = rng.normal(size=(50, 4))
    smoothed = server.ExponentialMovingAverage(np.zeros(4))
    for t, iterate in enumerate(iterates):
        smoothed.decay = t / (t + 1)
        smoothed.step(iterate)
    np.testing.assert_allclose(smoothed.weights, iterates.mean(axis=0), rtol=1e-12)


def test_adaptive_steps_are_as_large_as_the_learning_rate() -> None:
    initial = np.zeros(3)
    average = np.array([1e-3, -1.0, 1e6])  # the scale of a difference does not matter
    for cls in (server.FedAdam, server.FedYogi):
        optimizer = cls(initial, learning_rate=0.01, beta1=0, beta2=0, tau=1e-12)
        assert optimizer.step(average) == pytest.approx([0.01, -0.01, 0.01])
    adagrad = server.FedAdagrad(initial, learning_rate=0.01, tau=1e-12)
    assert adagrad.step(average) == pytest.approx([0.01, -0.01, 0.01])


def test_yogi_where_the_square_is_the_second_moment() -> None:
    optimizer = server.FedYogi(np.zeros(1), tau=0.5)
    optimizer.step(np.array([0.5]))  # v begins with 0.25: the sign is 0
    assert optimizer.state["second"] == 0.25


def test_gradients_are_clipped_and_left_as_they_are() -> None:
    optimizer = server.GradientDescent(np.zeros(2), learning_rate=1.0, max_norm=1.0)
    assert math.isnan(optimizer.gradient_norm)
    gradient = read_only(np.array([30.0, 40.0]))
    assert optimizer.step(gradient) == pytest.approx([-0.6, -0.8])
    assert optimizer.gradient_norm == 50
    optimizer.max_norm = math.inf
    optimizer.step(gradient)
    assert optimizer.weights == pytest.approx([-30.6, -40.8])
    assert gradient.tolist() == [30, 40]


# Integers.


@OF_ALL_KINDS
def test_integers_take_the_value_of_the_average(name: str, rng: np.random.Generator) -> None:
    optimizer = MAKERS[name](model(rng, 7))
    for step in (8, 11):
        optimizer.step(model(rng, step))
        expected = step if name in AVERAGING else 7
        assert int(optimizer.weights["step"]) == expected
        assert optimizer.weights["mask"].tolist() == [True, bool(expected % 2), True]


@OF_SOME_KINDS
@each(parts=[{}, {"n": np.arange(3)}, {"none": np.zeros((0, 2))}])
def test_models_without_floats(name: str, parts: dict[str, Array]) -> None:
    optimizer = MAKERS[name](fw.FlatWeights(parts))
    average = fw.FlatWeights({key: part + 1 for key, part in parts.items()})
    optimizer.step(average)
    for key, part in average.items():
        kept = parts[key] if name not in AVERAGING else part
        assert same_bits(optimizer.weights[key], kept)


# Ownership.


@OF_SOME_KINDS
def test_what_is_returned_is_read_only_and_owned(name: str, rng: np.random.Generator) -> None:
    initial, averages = model(rng), [model(rng, k) for k in range(2)]
    before = initial.buffer.tobytes(), [average.buffer.tobytes() for average in averages]
    optimizer = MAKERS[name](initial)
    first = optimizer.step(averages[0])
    kept = first.copy()
    second = optimizer.step(averages[1])
    assert second is first
    assert not same_bits(kept["conv"], second["conv"])
    with pytest.raises(ValueError, match="read-only"):
        second["step"] = 0
    with pytest.raises(ValueError, match="read-only"):
        optimizer.state["weights/step"] = 0
    assert (initial.buffer.tobytes(), [a.buffer.tobytes() for a in averages]) == before


@pytest.mark.parametrize("name", AVERAGING)
def test_the_average_may_be_the_weights(name: str, rng: np.random.Generator) -> None:
    optimizer = MAKERS[name](model(rng))
    before = optimizer.weights.buffer.tobytes()
    optimizer.step(optimizer.weights)
    assert optimizer.weights.buffer.tobytes() == before


def test_averages_from_shared_memory_and_with_strides(rng: np.random.Generator) -> None:
    wide = rng.normal(size=(4, 6))
    optimizer = server.FedAvg(wide[:, ::2])
    assert same_bits(optimizer.step(read_only(wide)[:, 1::2]), wide[:, 1::2].copy())
    packed = server.FedAdam(model(rng))
    average = model(rng)
    packed.step(pickle.loads(pickle.dumps(average, protocol=5)))


@OF_ALL_KINDS
def test_strides_change_nothing(name: str, rng: np.random.Generator) -> None:
    first, wide = rng.normal(size=(3, 4)), rng.normal(size=(4, 3))
    optimizer, other = MAKERS[name](first), MAKERS[name](first)
    for average in (wide.T, wide[::-1].T):
        assert same_bits(optimizer.step(average), other.step(average.copy("C")))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("beta1", [0.0, 1e-12, 0.5])
@pytest.mark.parametrize("beta2", [0.0, 1e-20])
def test_moments_that_keep_little_are_the_last_numbers(
    beta2: float, beta1: float, dtype: Any
) -> None:
    # A square of 1e-8 beside 1e8 leaves nothing: v + (square - v) is 0.
    large, small = np.array([1e4], dtype), np.array([1e-4], dtype)
    steps = {"learning_rate": 0.01, "beta1": beta1, "beta2": beta2}
    adam = server.Adam(np.zeros(1, dtype), **steps)
    adam.step(large)
    before = float(adam.weights[0])
    adam.step(small)
    first = (beta1 * (1 - beta1) * 1e4 + (1 - beta1) * 1e-4) / (1 - beta1**2)
    assert adam.weights[0] == pytest.approx(before - 0.01 * first / (1e-4 + 1e-7), rel=2e-3)
    fed = server.FedAdam(np.zeros(1, dtype), **steps, tau=1e-7)
    fed.step(large)
    before = float(fed.weights[0])
    fed.step(np.array([before + 1e-4], dtype))
    delta = float(dtype(before + 1e-4)) - before
    first = beta1 * (1 - beta1) * 1e4 + (1 - beta1) * delta
    assert fed.weights[0] == pytest.approx(before + 0.01 * first / (delta + 1e-7), rel=2e-3)


@OF_ALL_KINDS
def test_a_step_may_take_a_vector_of_the_state(name: str) -> None:
    optimizer, other = (MAKERS[name](np.arange(4.0)) for _ in range(2))
    for taken in (optimizer, other):
        taken.step(np.ones(4))
    for vector in optimizer.vectors():
        own = optimizer.state[vector]
        copied = own.copy()
        assert same_bits(optimizer.step(own), other.step(copied))


def test_a_model_is_converted_once() -> None:
    # A second conversion could give other numbers than those that were checked.
    class Growing:
        value = 0.0

        def __array__(self, dtype: Any = None, copy: Any = None) -> Array:
            self.value = self.value + 1.0
            return np.full(2, self.value)

    optimizer = server.GradientDescent(np.zeros(2), learning_rate=1.0)
    weights = optimizer.step(Growing())  # type: ignore[arg-type]
    assert optimizer.gradient_norm == np.linalg.norm(weights)


class Changing:
    """An array of ones, and another one from one of its conversions on."""

    def __init__(self, left: int, other: Array) -> None:
        self._left, self._other = left, other

    def __array__(self, dtype: Any = None, copy: Any = None) -> Array:
        self._left -= 1
        return np.ones(3) if self._left >= 0 else self._other


@OF_ALL_KINDS
@pytest.mark.parametrize(
    ("other", "match"),
    [
        (np.full(3, np.nan), "holds NaN or infinity"),
        (np.ones(1), r"expected float64 \(3,\), got float64 \(1,\)"),
    ],
    ids=["NaN", "shape"],
)
def test_what_is_used_of_a_model_was_checked(name: str, other: Array, match: str) -> None:
    with pytest.raises(ValueError, match=f"initial: {match}"):
        MAKERS[name](Changing(1, other))  # the first conversion sets shape and dtype
    assert MAKERS[name](Changing(2, other)).weights.tolist() == [1.0] * 3
    optimizer = MAKERS[name](np.ones(3))
    with refuses(ValueError, match, optimizer.state.buffer):
        optimizer.step(Changing(0, other))
    optimizer.step(Changing(1, other))
    assert np.isfinite(optimizer.weights).all()


def test_padding_stays_zero(rng: np.random.Generator) -> None:
    average = model(rng)
    dirty = np.full(average.layout.nbytes, 0xFF, np.uint8)
    wrapped = fw.FlatWeights.wrap(dirty, average.layout)
    wrapped.update(average)
    for name in AVERAGING:
        clean, other = MAKERS[name](average), MAKERS[name](average)
        clean.step(average)
        other.step(wrapped)
        assert image(clean) == image(other)


# State.


@OF_SOME_KINDS
@each(how=["save", "state", "pickle", "deepcopy"])
def test_going_on_gives_the_same_bits(
    name: str, how: str, rng: np.random.Generator, tmp_path: Path
) -> None:
    for initial, averages in (
        (model(rng), [model(rng, k) for k in range(6)]),
        (rng.normal(size=(3, 7)), list(rng.normal(size=(6, 3, 7)))),
        (rng.normal(size=70).astype(BFLOAT16), list(rng.normal(size=(6, 70)).astype(BFLOAT16))),
    ):
        optimizer = MAKERS[name](initial)
        for average in averages[:3]:
            optimizer.step(average)
        if how == "save":
            path = tmp_path / "state.safetensors"
            optimizer.save(path)
            other = type(optimizer).load(path)
        elif how == "state":
            other = type(optimizer).from_state(optimizer.state)
        elif how == "pickle":
            other = pickle.loads(pickle.dumps(optimizer))
        else:
            other = copy.deepcopy(optimizer)
        assert type(other) is type(optimizer)
        assert other.steps == 3
        assert repr(other) == repr(optimizer)
        halfway = image(optimizer)
        for average in averages[3:]:
            ours, theirs = optimizer.step(average), other.step(average)
            assert type(ours) is type(theirs)
        assert image(optimizer) == image(other) != halfway
        if isinstance(ours, fw.FlatWeights):
            assert ours.layout.digest == theirs.layout.digest


def test_the_state_is_named(rng: np.random.Generator) -> None:
    weights = fw.FlatWeights({"w": np.zeros(2, BFLOAT16), "b": np.zeros(2), "n": np.int64(3)})
    state = server.FedAdam(weights, learning_rate=0.25).state
    assert list(state)[:8] == [
        "weights/w",
        "weights/b",
        "weights/n",
        "master/w",
        "momentum/w",
        "momentum/b",
        "second/w",
        "second/b",
    ]
    assert state["FedAdam.learning_rate"] == 0.25
    assert [str(state[f"second/{k}"].dtype) for k in "wb"] == ["float32", "float64"]


def test_the_learning_rate_may_change_and_is_saved(tmp_path: Path) -> None:
    optimizer = server.FedAvgM(np.zeros(2), momentum=0)
    optimizer.learning_rate = 0.5
    optimizer.save(tmp_path / "state")
    loaded = server.FedAvgM.load(tmp_path / "state")
    assert loaded.learning_rate == 0.5
    assert loaded.step(np.ones(2)).tolist() == [0.5, 0.5]
    with pytest.raises(AttributeError, match="momentum: fixed"):
        optimizer.momentum = 0.5
    with refuses(ValueError, "learning_rate: expected a positive finite number, got 0"):
        optimizer.learning_rate = 0
    assert optimizer.learning_rate == 0.5


def test_states_of_others_are_refused(rng: np.random.Generator, tmp_path: Path) -> None:
    optimizer = server.FedAdam(np.ones(3, np.float32))
    optimizer.save(tmp_path / "adam")
    with pytest.raises(ValueError, match=r"adam: expected the state of a FedYogi.*of FedAdam"):
        server.FedYogi.load(tmp_path / "adam")
    fw.FlatWeights({"w": np.ones(3)}).save(tmp_path / "model")
    with pytest.raises(ValueError, match=r"model: expected the state of a FedAdam.*no optimizer"):
        server.FedAdam.load(tmp_path / "model")
    with pytest.raises(TypeError, match="state: expected FlatWeights, got dict"):
        server.FedAdam.from_state({})  # type: ignore[arg-type]
    damaged = (tmp_path / "adam").read_bytes()
    (tmp_path / "adam").write_bytes(damaged[:-1] + bytes([damaged[-1] ^ 1]))
    with pytest.raises(ValueError, match="adam"):
        server.FedAdam.load(tmp_path / "adam")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda parts: parts.pop("second"), r"state: FedAdam: expected \d+ slots"),
        (lambda parts: parts.pop("weights"), "state: FedAdam: expected"),
        (lambda parts: parts.update(second=np.ones(4, np.float32)), r"slot 2: expected 'second'"),
        (lambda parts: parts.update({"FedAdam.beta2": np.ones(())}), "beta2: expected"),
        (lambda parts: parts.update({"FedAdam.beta2": np.ones(2)}), "with 'FedAdam.beta2'"),
        (lambda parts: parts.update({"FedAdam.steps": np.int64(-1)}), "number of steps, got -1"),
        (
            lambda parts: parts.update(momentum=np.full(3, np.nan, np.float32)),
            "state, slot 1 'momentum': holds NaN or infinity",
        ),
        (lambda parts: parts.update(weights=np.arange(3)), "state: weights: expected float16"),
    ],
    ids=range(8),
)
def test_altered_states_are_refused(change: Callable[[Any], None], match: str) -> None:
    parts = dict(server.FedAdam(np.ones(3, np.float32)).state)
    change(parts)
    with pytest.raises(ValueError, match=match):
        server.FedAdam.from_state(fw.FlatWeights(parts))


# Bad input.


@OF_SOME_KINDS
@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (lambda w: dict(w), TypeError, "expected FlatWeights, got a mapping"),
        (lambda w: w["bias"], TypeError, "expected FlatWeights, got an array"),
        (lambda w: [w, w], TypeError, "got a sequence of arrays; pass their average"),
        (lambda w: None, TypeError, "expected an array, FlatWeights"),
        (lambda w: fw.FlatWeights({**w, "more": np.ones(1)}), ValueError, "expected 12 slots"),
        (
            lambda w: fw.FlatWeights({**w, "bias": w["bias"].astype(np.float32)}),
            ValueError,
            "slot 4: expected 'bias' float64",
        ),
    ],
    ids=range(6),
)
def test_wrong_models_change_nothing(
    name: str,
    change: Callable[[Any], Any],
    error: type[Exception],
    match: str,
    rng: np.random.Generator,
) -> None:
    optimizer = MAKERS[name](model(rng))
    optimizer.step(model(rng))
    with refuses(error, match, optimizer.state.buffer):
        optimizer.step(change(model(rng)))
    assert optimizer.steps == 1


@OF_SOME_KINDS
def test_wrong_arrays_change_nothing(name: str) -> None:
    optimizer = MAKERS[name](np.ones((2, 3), np.float32))
    for bad, error, match in (
        (np.ones(6, np.float32), ValueError, r"expected float32 \(2, 3\), got float32 \(6,\)"),
        (np.ones((2, 3)), TypeError, r"expected float32 \(2, 3\), got float64"),
        (np.ones((2, 3), int), TypeError, "expected float32"),
        ([np.ones((2, 3), np.float32)], TypeError, "expected an array, got a sequence .* average"),
        (fw.FlatWeights({"w": np.ones(6)}), TypeError, "got FlatWeights; .* made from an array"),
    ):
        with refuses(error, match, optimizer.state.buffer):
            optimizer.step(bad)


@OF_SOME_KINDS
@each(value=[np.nan, np.inf, -np.inf])
@each(part=["conv", "phase", "bias", "half/more", "brain"])
def test_nan_and_infinity_change_nothing(
    name: str, value: float, part: str, rng: np.random.Generator
) -> None:
    optimizer = MAKERS[name](model(rng))
    optimizer.step(model(rng))
    average = model(rng, 5)
    average[part].reshape(-1)[-1] = value
    match = f"(average|gradient), slot .*'{part}': holds NaN or infinity"
    with refuses(ValueError, match, optimizer.state.buffer):
        optimizer.step(average)
    with pytest.raises(ValueError, match=f"initial, slot .*'{part}': holds NaN"):
        MAKERS[name](average)


@pytest.mark.parametrize("name", ["FedAvgM", "FedAdagrad", "FedAdam", "FedYogi"])
def test_averages_whose_squares_overflow_change_nothing(name: str) -> None:
    for dtype, value in ((np.float32, 1e20), (np.float64, 1e200)):
        optimizer = MAKERS[name](np.ones(3, dtype))
        with refuses(ValueError, "average: expected a norm of at most", optimizer.state.buffer):
            optimizer.step(np.full(3, value, dtype))
    optimizer = MAKERS[name](np.full(3, 1e20, np.float32))
    with refuses(ValueError, "weights: expected a norm of at most", optimizer.state.buffer):
        optimizer.step(np.ones(3, np.float32))
    large = MAKERS[name](np.zeros(3, np.float32))
    for k in range(20):
        large.step(np.full(3, 4e16 * (-1) ** k, np.float32))
    assert fw.isfinite(large.state["weights"])
    assert fw.isfinite(large.weights)


def test_a_gradient_without_a_finite_norm_changes_nothing() -> None:
    optimizer = server.GradientDescent(np.ones(2), learning_rate=1)
    with refuses(ValueError, "gradient: expected a finite norm, got inf", optimizer.state.buffer):
        optimizer.step(np.full(2, 1.7e308))


@pytest.mark.parametrize(
    ("cls", "arguments", "match"),
    [
        (server.FedAvgM, {"momentum": 1}, "momentum: expected a number from 0 to below 1, got 1"),
        (server.FedAvgM, {"momentum": -0.1}, "momentum: expected"),
        (server.FedAvgM, {"nesterov": 2}, "nesterov: expected False or True, got 2"),
        (server.FedAvgM, {"learning_rate": math.inf}, "learning_rate: expected a positive finite"),
        (server.FedAvgM, {"learning_rate": math.nan}, "learning_rate: expected"),
        (server.ExponentialMovingAverage, {"decay": 1.1}, "decay: expected a number from 0 to 1"),
        (server.FedAdagrad, {"tau": 0}, "tau: expected a number from 1e-15"),
        (server.FedAdam, {"beta1": 1.0}, "beta1: expected"),
        (server.FedAdam, {"beta2": math.nan}, "beta2: expected"),
        (server.FedYogi, {"learning_rate": 0}, "learning_rate: expected"),
        (server.GradientDescent, {"learning_rate": 1, "max_norm": 0}, "max_norm: expected"),
    ],
)
def test_numbers_out_of_range_are_refused(cls: Any, arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        cls(np.zeros(3), **arguments)
    key = next(iter(arguments))
    with pytest.raises(TypeError, match=f"{key}: expected a real number, got str"):
        cls(np.zeros(3), **{**arguments, key: "1"})


@pytest.mark.parametrize("name", server.__all__)
def test_wrong_arguments_are_those_of_the_class_by_name(name: str) -> None:
    cls: Any = getattr(server, name)
    if issubclass(cls, server.ServerOptimizer) and cls is not server.ServerOptimizer:
        with pytest.raises(TypeError, match=rf"^{name}.__init__\(\)"):
            cls(np.zeros(3), momentums=0.5)


@OF_ALL_KINDS
def test_models_that_cannot_be_optimised_are_refused(name: str) -> None:
    with pytest.raises(TypeError, match="initial: expected an array or FlatWeights, got a mapping"):
        MAKERS[name]({"w": np.zeros(3)})
    with pytest.raises(TypeError, match="initial: expected float16"):
        MAKERS[name](np.zeros(3, np.int32))
    with pytest.raises(TypeError, match=r"initial, slot 0 'w': expected float16"):
        MAKERS[name](fw.FlatWeights({"w": np.zeros(3, ">f4")}))


# One's own.


class Lion(server.ServerOptimizer[Any]):
    """The rule of `ServerOptimizer`'s example, with numbers that decide about a vector."""

    learning_rate = server.Hyperparameter.positive()
    beta = server.Hyperparameter.fraction(fixed=True)

    def __init__(self, initial: Any, *, learning_rate: float = 0.1, beta: float = 0.5) -> None:
        super().__init__(initial, learning_rate=learning_rate, beta=beta)

    def vectors(self) -> dict[str, float]:
        return {"momentum": 0.25} if self.beta else {}

    def update(self, block: server.Block) -> None:
        direction = block.delta
        if self.beta:
            momentum = self.beta * block.vectors["momentum"] + (1 - self.beta) * direction
            block.vectors["momentum"] = direction = momentum
        step = self.learning_rate * np.sign(direction)
        if block.weights.dtype == np.float64:  # to assign is as good as to change in place
            block.weights = block.weights + step
        else:
            block.weights += step


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_an_optimizer_of_ones_own_is_like_the_others(
    beta: float, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_state, "BLOCK", 100)
    optimizer = Lion(model(rng), beta=beta)
    weights, published = numbers(optimizer.weights), numbers(optimizer.weights)
    momentum = np.full(weights.size, 0.25)
    for step in range(3):
        average = model(rng, step)
        momentum = beta * momentum + (1 - beta) * (numbers(average) - published)
        weights = weights + 0.1 * np.sign(momentum)
        published = numbers(optimizer.step(average))
        assert np.all(np.abs(published - weights) <= 4 * units(average) * (1 + np.abs(weights)))
        assert optimizer.weights["step"] == step
        optimizer = pickle.loads(pickle.dumps(optimizer))
    assert repr(optimizer).startswith(f"<Lion(learning_rate=0.1, beta={beta}) of ")
    assert ("momentum/bias" in optimizer.state) == bool(beta)
    with refuses(ValueError, "average: expected a norm of at most", optimizer.state.buffer):
        optimizer.step(fw.FlatWeights({**model(rng), "conv": np.full((4, 16), 1e30, np.float32)}))


def test_an_update_cannot_write_to_the_average_and_one_that_fails_stops_the_optimizer() -> None:
    class Writes(server.FedAvg[Any]):
        def update(self, block: server.Block) -> None:
            block.average[0] += 1

    optimizer, average = Writes(np.zeros(3)), np.ones(3)
    with pytest.raises(ValueError, match="read-only"):
        optimizer.step(average)
    with pytest.raises(RuntimeError, match="or was interrupted"):
        optimizer.step(average)


def test_hyperparameters_and_vectors_of_ones_own_are_checked() -> None:
    class Forgets(Lion):
        def __init__(self, initial: Any) -> None:
            server.ServerOptimizer.__init__(self, initial, learning_rate=1, rate=2)

    with pytest.raises(TypeError, match=r"Forgets: expected the hyperparameters \['beta', 'learn"):
        Forgets(np.zeros(3))

    class Takes(Lion):
        def vectors(self) -> dict[str, float]:
            return {"master": 0.0}

    with pytest.raises(ValueError, match=r"Takes.vectors: 'master' is another vector"):
        Takes(np.zeros(3))


# The package.


@pytest.mark.parametrize("name", ["", "._adaptive", "._averaging", "._gradient", "._optimizer"])
def test_examples_in_docstrings_are_right(name: str) -> None:
    module = importlib.import_module(f"flatweights.server{name}")
    failed, attempted = doctest.testmod(module, extraglobs={"np": np})
    assert failed == 0
    assert attempted


def test_what_is_exported_is_described() -> None:
    for name in server.__all__:
        cls = getattr(server, name)
        assert cls.__doc__
        if issubclass(cls, server.ServerOptimizer):
            assert ">>>" in cls.__doc__
            assert cls.step.__doc__


def test_import_needs_neither_tensorflow_nor_ray() -> None:
    code = "import sys, flatweights.server; print({'ray', 'tensorflow'} & set(sys.modules))"
    assert run_python(code).split() == ["set()"]


# Interrupts.


@pytest.mark.parametrize(
    "name",
    [n if n == "FedAdam" else pytest.param(n, marks=pytest.mark.slow) for n in MAKERS],
)
def test_an_interrupted_step_is_done_or_the_optimizer_refuses_to_be_used(name: str) -> None:
    initial = fw.FlatWeights({"w": np.ones(3, np.float16), "n": np.int64(1), "b": np.ones(2)})
    given = fw.FlatWeights({"w": np.full(3, 2, np.float16), "n": np.int64(2), "b": np.full(2, 2.0)})
    whole = MAKERS[name](initial)
    before = whole.state.buffer.tobytes()
    whole.step(given)
    after = whole.state.buffer.tobytes()

    def make() -> tuple[Any, Callable[[], Any]]:
        optimizer = MAKERS[name](initial)
        return optimizer, lambda: optimizer.step(given)

    calls: list[Callable[[Any], Any]] = [
        lambda o: o.state,
        lambda o: o.weights,
        lambda o: o.step(given),
        lambda o: o.save("unwritten"),
        pickle.dumps,
    ]
    seen, refused = set(), 0
    for optimizer in each_interruption(make):
        if optimizer._is_whole:
            seen.add(optimizer.state.buffer.tobytes())
            continue
        refused += 1
        with pytest.raises(RuntimeError, match="or was interrupted"):
            calls[refused % len(calls)](optimizer)
    assert seen == {before, after}
    assert refused >= len(calls)


def test_an_update_may_replace_its_vectors_by_name() -> None:
    class Two(server.ServerOptimizer[Any]):
        names = "b", "a"  # in another order than at first

        def vectors(self) -> dict[str, float]:
            return {"a": 1.0, "b": 2.0}

        def update(self, block: server.Block, /) -> None:
            block.vectors = {name: block.vectors[name] * 10 for name in self.names}

    optimizer = Two(np.zeros(3))
    optimizer.step(np.ones(3))
    assert (optimizer.state["a"][0], optimizer.state["b"][0]) == (10, 20)
    optimizer.names = "a", "c"
    with pytest.raises(KeyError, match="c"):
        optimizer.step(np.ones(3))


def test_a_state_that_would_not_load_is_not_saved(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    optimizer = server.FedAvgM(np.zeros(2, np.float16), momentum=0.9)
    for _ in range(2):
        optimizer.step(np.array([6e4, 1], np.float16))
    assert np.isinf(optimizer.weights[0]), "in 16 bits, but its master copy is finite"
    optimizer.save(path)
    assert server.FedAvgM.load(path).state.buffer.tobytes() == optimizer.state.buffer.tobytes()
    saved = path.read_bytes()
    lost = server.ExponentialMovingAverage(np.array([-1.7e308]), decay=0.5)
    lost.step(np.array([1.7e308]))
    with pytest.raises(ValueError, match="state, slot 0 'weights': holds NaN or infinity"):
        lost.save(path)
    with pytest.raises(ValueError, match="state, slot 0 'weights': holds NaN or infinity"):
        pickle.dumps(lost)
    assert path.read_bytes() == saved


class Remembering(server.ServerOptimizer[Any]):
    """Keeps two vectors, which it swaps, and the weights from before the step."""

    def vectors(self) -> dict[str, float]:
        return {"first": 1.0, "second": 2.0, "before": 0.0}

    def update(self, block: server.Block) -> None:
        kept = block.vectors
        kept["first"], kept["second"] = kept["second"], kept["first"]
        kept["before"] = block.weights
        block.weights = block.weights + 0.5 * block.delta


def test_an_update_may_assign_vectors_to_each_other() -> None:
    optimizer = Remembering(np.array([1.0, 2.0]))
    for first, before, weights in ((2.0, [1.0, 2.0], [2.0, 3.0]), (1.0, [2.0, 3.0], [2.5, 3.5])):
        assert optimizer.step(np.array([3.0, 4.0])).tolist() == weights
        assert optimizer.state["before"].tolist() == before
        assert optimizer.state["first"].tolist() == [first] * 2
        assert optimizer.state["second"].tolist() == [3.0 - first] * 2
