"""The network of the example `resnet`, in both modes of TensorFlow."""

from functools import cache
from typing import Any

import numpy as np
import pytest

from flatweights.examples.resnet import build_model, build_network

pytestmark = pytest.mark.parametrize("path", ["bound"], indirect=True)

MODES = ("eager", "graph")
RATE = 0.05


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
def trained(mode: str, steps: int) -> tuple[Any, Any, list[float]]:
    """The weights before and after some steps, and the loss before each."""
    variables, train, _ = build_network(mode, units=1, classes=4, seed=5)
    before, (pixels, labels) = variables.get_weights(), images()
    losses = []
    for step in range(steps):
        half = slice(0, 8) if step % 2 == 0 else slice(8, 16)
        losses.append(float(np.mean(train(pixels[half], labels[half], RATE)[0])))
    return before, variables.get_weights(), losses


@pytest.mark.parametrize("mode", MODES)
def test_moving_statistics_follow_what_is_normalised(mode: str) -> None:
    before, after, _ = trained(mode, 1)
    first, mean, variance = (
        next(name for name in before if name.endswith(end))
        for end in ("kernel", "moving_mean", "moving_variance")
    )
    kernel = before[first].astype(np.float64)
    padded = np.pad(standardised()[:8], [(0, 0), (1, 1), (1, 1), (0, 0)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))
    x = np.einsum("bhwcij,ijco->bhwo", windows, kernel)
    np.testing.assert_allclose(after[mean], 0.1 * x.mean(axis=(0, 1, 2)), rtol=1e-3, atol=1e-5)
    wanted = 0.9 + 0.1 * x.var(axis=(0, 1, 2))
    np.testing.assert_allclose(after[variance], wanted, rtol=1e-3)


@pytest.mark.parametrize("mode", MODES)
def test_a_step_goes_where_the_momenta_point(mode: str) -> None:
    before, after, _ = trained(mode, 1)
    names = list(before)
    trained_names = [n for n in names if "moving" not in n and "momentum" not in n]
    momenta = [name for name in names if "momentum" in name]
    for name, momentum in zip(trained_names, momenta, strict=True):
        assert np.any(after[momentum]), momentum
        np.testing.assert_allclose(
            after[name], before[name] - RATE * after[momentum], rtol=1e-5, atol=1e-6
        )


def test_both_modes_learn_alike() -> None:
    (start, eager, losses), (other_start, graph, other_losses) = (trained(m, 8) for m in MODES)
    assert losses[-1] < 0.7 * losses[0]
    np.testing.assert_allclose(losses, other_losses, rtol=1e-3)
    np.testing.assert_array_equal(start.buffer, other_start.buffer)
    for name, x, y in zip(eager, eager.values(), graph.values(), strict=True):
        assert not np.array_equal(x, start[name]), name
        np.testing.assert_allclose(x, y, rtol=1e-2, atol=2e-3, err_msg=name)


@pytest.mark.parametrize("mode", MODES)
def test_evaluation_is_that_of_keras(mode: str) -> None:
    weights = trained("eager", 8)[1]
    variables, _, evaluate = build_network(mode, units=1, classes=4, seed=6)
    variables.set_weights(dict(zip(variables.layout.names, weights.values(), strict=True)))
    own = [value for name, value in weights.items() if "momentum" not in name]
    losses, right = map(np.asarray, evaluate(*images()))
    model = build_model(1, 4, 5)
    assert len(own) == len(model.weights)
    model.set_weights(own)
    model.compile(loss="sparse_categorical_crossentropy")
    outputs = model.predict(standardised().astype(np.float32), verbose=0).astype(np.float64)
    wanted = np.log(np.exp(outputs).sum(axis=1)) - outputs[np.arange(16), images()[1]]
    np.testing.assert_allclose(losses, wanted, rtol=1e-3, atol=1e-4)
    assert right.tolist() == (outputs.argmax(axis=1) == images()[1]).tolist()


def test_layers_are_counted_as_in_the_paper() -> None:
    model = build_model(5, 10, 0)
    assert sum(v.name == "kernel" for v in model.trainable_variables) == 32
    assert model.count_params() == pytest.approx(0.46e6, rel=0.02)
