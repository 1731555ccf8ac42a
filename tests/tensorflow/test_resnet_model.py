"""The network of the example `resnet`, in both modes of TensorFlow."""

from argparse import Namespace
from functools import cache
from typing import Any

import numpy as np
import pytest

from flatweights.examples.resnet import build_model, build_network, load_images

pytestmark = pytest.mark.parametrize("path", ["bound"], indirect=True)

MODES = ("eager", "graph")
RATE, DECAY = 0.05, 1e-4

# TensorFlow traces and optimizes a network with residual units for seconds.
UNITS = pytest.mark.parametrize("units", [0, pytest.param(1, marks=pytest.mark.slow)])


@cache
def images() -> tuple[Any, Any]:
    rng = np.random.default_rng(1)
    labels = np.arange(16, dtype=np.int32) % 4
    stripes = 40 * np.sin(np.arange(32) * (1 + labels[:, None]))
    pixels = 128 + 20 * rng.normal(size=(16, 32, 32, 3)) + stripes[:, None, :, None]
    return pixels.round().clip(0, 255).astype(np.uint8), labels


def standardised() -> Any:
    pixels = images()[0].astype(np.float64)
    values = pixels - pixels.mean(axis=(1, 2, 3), keepdims=True)
    return values / values.std(axis=(1, 2, 3), keepdims=True)


@cache
def build(mode: str, units: int) -> tuple[Any, Any, Any]:
    options = Namespace(
        mode=mode, seed=5, num_residual_units=units, dataset="digits",
        learning_rate=RATE, rounds=4, steps=4,
    )  # fmt: skip
    return build_network(options)


@cache
def trained(mode: str, units: int) -> tuple[list[Any], list[float]]:
    """The weights before the first and after each step, and the loss before each."""
    variables, train, _ = build(mode, units)
    weights, losses, (pixels, labels) = [variables.get_weights()], [], images()
    for step in range(16):
        half = slice(0, 8) if step % 2 == 0 else slice(8, 16)
        losses.append(float(np.mean(train(pixels[half], labels[half])[0])))
        weights.append(variables.get_weights())
    return weights, losses


def parts(weights: Any, end: str) -> list[Any]:
    return [array.astype(np.float64) for name, array in weights.items() if name.endswith(end)]


@UNITS
@pytest.mark.parametrize("mode", MODES)
def test_moving_statistics_follow_what_is_normalised(mode: str, units: int) -> None:
    before, after = trained(mode, units)[0][:2]
    padded = np.pad(standardised()[:8], [(0, 0), (1, 1), (1, 1), (0, 0)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))
    x = np.einsum("bhwcij,ijco->bhwo", windows, parts(before, "kernel")[0])
    mean, variance = parts(after, "moving_mean")[0], parts(after, "moving_variance")[0]
    np.testing.assert_allclose(mean, 0.1 * x.mean(axis=(0, 1, 2)), rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(variance, 0.9 + 0.1 * x.var(axis=(0, 1, 2)), rtol=1e-3)


def trainable(weights: Any) -> dict[str, Any]:
    ends = ("kernel", "bias", "gamma", "beta")
    return {
        name: array.astype(np.float64) for name, array in weights.items() if name.endswith(ends)
    }


@UNITS
@pytest.mark.parametrize("mode", MODES)
def test_steps_go_where_the_momenta_point_at_a_rate_that_falls(mode: str, units: int) -> None:
    weights, _ = trained(mode, units)
    for step, rate in ((1, RATE), (8, RATE), (11, 0.1 * RATE), (16, 0.01 * RATE)):
        before, after = (trainable(weights[i]) for i in (step - 1, step))
        old, new = (parts(weights[i], "momentum") for i in (step - 1, step))
        assert weights[step]["sgd/iteration"] == step
        for (name, start), end, last, momentum in zip(
            before.items(), after.values(), old, new, strict=True
        ):
            moved = momentum - rate * DECAY * start
            np.testing.assert_allclose(end, start + moved, rtol=1e-5, atol=1e-6, err_msg=name)
            gradient = (0.9 * last - momentum) / rate
            assert 0 < np.abs(gradient).max() < 20, "what was added is a gradient times the rate"


@UNITS
def test_both_modes_learn_alike(units: int) -> None:
    (eager, losses), (graph, other_losses) = (trained(mode, units) for mode in MODES)
    assert losses[-1] < 0.7 * losses[0]
    np.testing.assert_allclose(losses, other_losses, rtol=1e-3)
    np.testing.assert_array_equal(eager[0].buffer, graph[0].buffer)
    # `w`, the kernel of one convolution of many in this process, may be `w_1` there.
    assert len(eager[0]) == len(graph[0])
    for name, x, y in zip(eager[-1], eager[-1].values(), graph[-1].values(), strict=True):
        assert not np.array_equal(x, eager[0][name]), name
        np.testing.assert_allclose(x, y, rtol=1e-2, atol=2e-3, err_msg=name)


@pytest.mark.parametrize(
    ("mode", "units"),
    [("eager", 1), ("graph", 0), pytest.param("graph", 1, marks=pytest.mark.slow)],
)
def test_evaluation_is_that_of_keras(mode: str, units: int) -> None:
    if (mode, units) != ("eager", 1):
        trained(mode, units)  # from the weights that it was built with
    variables, _, evaluate = build(mode, units)
    rng = np.random.default_rng(2)
    for value in (weights := variables.get_weights()).values():
        if value.ndim:  # the rate of training and the number of steps stay
            value += rng.normal(0, 0.1, value.shape).astype(np.float32)
    variables.set_weights(weights)
    own = [value for name, value in weights.items() if not name.startswith("sgd")]
    losses, right = map(np.asarray, evaluate(*images()))
    model = build_model(units, 10)
    assert len(own) == len(model.weights)
    model.set_weights(own)
    outputs = np.asarray(model(standardised().astype(np.float32), training=False), np.float64)
    wanted = np.log(np.exp(outputs).sum(axis=1)) - outputs[np.arange(16), images()[1]]
    np.testing.assert_allclose(losses, wanted, rtol=1e-3, atol=1e-4)
    assert right.tolist() == (outputs.argmax(axis=1) == images()[1]).tolist()


@pytest.mark.parametrize(
    ("units", "layers", "parameters"),
    [(1, 8, 0.076e6), pytest.param(5, 32, 0.46e6, marks=pytest.mark.slow)],
)
def test_layers_are_counted_as_in_the_paper(units: int, layers: int, parameters: float) -> None:
    model = build_model(units, 10)
    assert sum(v.name == "kernel" for v in model.trainable_variables) == layers
    assert model.count_params() == pytest.approx(parameters, rel=0.03)


def test_images_of_cifar_are_those_that_keras_downloads(monkeypatch: pytest.MonkeyPatch) -> None:
    from keras.datasets import cifar100

    rng = np.random.default_rng(0)
    parts = [
        (rng.integers(256, size=(n, 32, 32, 3)), rng.integers(100, size=(n, 1))) for n in (5, 2)
    ]
    monkeypatch.setattr(cifar100, "load_data", lambda: parts)
    for (pixels, labels), (given, column) in zip(load_images("cifar100", 0), parts, strict=True):
        assert [str(part.dtype) for part in (pixels, labels)] == ["uint8", "int32"]
        np.testing.assert_array_equal(pixels, given)
        assert labels.tolist() == column[:, 0].tolist()
