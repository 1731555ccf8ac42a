"""Weights of models of Keras that are quantized, and of those that are not."""

import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from flatweights.tensorflow import TensorFlowVariables

X = np.linspace(-1, 1, 8, dtype=np.float32)[None]


def net(mode: str | None = None) -> Any:
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(4)])
    if mode is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the input layer has nothing to quantize
            model.quantize(mode)
    return model


@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_weights_of_a_quantized_model_set_a_quantized_model(mode: str) -> None:
    ours, others = net(mode), net(mode)
    TensorFlowVariables(others).set_weights(dict(TensorFlowVariables(ours).get_weights()))
    np.testing.assert_array_equal(others(X), ours(X))


def test_floats_do_not_set_an_int8_model(tmp_path: Path) -> None:
    quantized, floats = TensorFlowVariables(net("int8")), TensorFlowVariables(net())
    before = quantized.get_weights()
    message = r"'dense/kernel': expected whole numbers, got float32 with fractions"
    with pytest.raises(ValueError, match=message):
        quantized.set_weights(floats.get_weights())
    floats.save(tmp_path / "floats")
    with pytest.raises(ValueError, match=message):
        quantized.load(tmp_path / "floats")
    np.testing.assert_array_equal(quantized.get_weights().buffer, before.buffer)
    kernel = {"dense/kernel": np.full((8, 16), 3.0)}
    quantized.set_weights(kernel)
    assert (quantized.get_weights()["dense/kernel"] == 3).all()


def test_an_int8_model_does_not_set_floats() -> None:
    quantized, floats = TensorFlowVariables(net("int8")), TensorFlowVariables(net())
    before = floats.get_weights()
    message = r"'dense/kernel': expected float32, got int8 and 'dense/kernel_scale': the weights"
    with pytest.raises(ValueError, match=message):
        floats.set_weights(quantized.get_weights())
    np.testing.assert_array_equal(floats.get_weights().buffer, before.buffer)


def change(model: Any, how: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if how == "lora":
            model.layers[0].enable_lora(2)
        else:
            model.quantize(how)


@pytest.mark.parametrize("how", ["int8", "int4", "float8", "lora"])
@pytest.mark.parametrize("trainable_only", [False, True])
def test_variables_that_are_no_longer_the_models_are_neither_read_nor_set(
    how: str, trainable_only: bool
) -> None:
    model = net()
    variables = TensorFlowVariables([model], trainable_only=trainable_only)
    weights, flat = variables.get_weights(), variables.get_flat().copy()
    flat.setflags(write=False)
    change(model, how)
    for call in (
        variables.get_flat,
        variables.get_weights,
        lambda: variables.set_flat(flat),
        lambda: variables.set_flat(flat, share=True),
        lambda: variables.set_weights(weights),
        lambda: variables.set_weights({"dense/bias": np.zeros(16)}),
        lambda: variables.scatter(weights.buffer),
        lambda: variables.gather_into(weights.buffer),
        lambda: variables.add_flat(flat),
        lambda: variables.flatten_gradients([]),
        lambda: variables.apply_flat_gradients(keras.optimizers.SGD(), flat),
    ):
        with pytest.raises(RuntimeError, match=r"make a new TensorFlowVariables"):
            call()
    again = TensorFlowVariables([model], trainable_only=trainable_only)
    again.set_weights(again.get_weights())
