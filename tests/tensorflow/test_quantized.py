"""Weights of models of Keras that are quantized, and of those that are not."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tf_models import mostly_bound

from flatweights import FlatWeights
from flatweights.tensorflow import TensorFlowVariables

X = np.linspace(-1, 1, 8, dtype=np.float32)[None]


def net(mode: str | None = None, kernel: str = "random_normal") -> Any:
    layers = [keras.layers.Dense(units, kernel_initializer=kernel) for units in (16, 4)]
    model = keras.Sequential([keras.Input((8,)), *layers])
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


def same_names(name: str) -> str:
    return name


def old(name: str) -> str:
    return f"old/{name}"


def only_kernels(name: str) -> str:
    return name.replace("kernel", "old") if name.endswith("kernel") else name


Names = Callable[[str], str]


def refuse(
    target: TensorFlowVariables, weights: FlatWeights, names: Names, path: Path, message: str
) -> None:
    """Set and load ``weights`` under other names: both raise, and nothing is set."""
    before = target.get_weights()
    given = FlatWeights({names(name): part for name, part in weights.items()})
    given.save(path)
    rename = {names(name): name for name in weights if names(name) != name}
    with pytest.raises(ValueError, match=message):
        target.set_weights(given, rename=rename)
    with pytest.raises(ValueError, match=message):
        target.load(path, rename=rename)
    np.testing.assert_array_equal(target.get_weights().buffer, before.buffer)


@mostly_bound
@pytest.mark.parametrize(
    ("names", "kernel"),
    [
        *((names, "random_normal") for names in (same_names, old, only_kernels)),
        *((same_names, kernel) for kernel in ("ones", "identity", "zeros")),
        *(
            pytest.param(names, kernel, marks=pytest.mark.slow)
            for names in (old, only_kernels)
            for kernel in ("ones", "identity", "zeros")
        ),
    ],
)
def test_floats_do_not_set_an_int8_model(names: Names, kernel: str, tmp_path: Path) -> None:
    floats = TensorFlowVariables(net(kernel=kernel)).get_weights()
    message = r"'dense/kernel': expected int8, got float32: only the model has 'dense/kernel_scale'"
    for exclude in (None, ["dense/kernel_scale", "dense_1/kernel_scale"]):
        quantized = TensorFlowVariables(net("int8"), exclude=exclude)
        refuse(quantized, floats, names, tmp_path / "floats", message)


@mostly_bound
@pytest.mark.parametrize("names", [same_names, old, only_kernels])
def test_an_int8_model_does_not_set_floats(names: Names, tmp_path: Path) -> None:
    quantized = TensorFlowVariables(net("int8")).get_weights()
    message = r"'dense/kernel': expected float32, got int8: only the weights have 'dense/kernel_"
    refuse(TensorFlowVariables(net()), quantized, names, tmp_path / "quantized", message)
    given = FlatWeights({old(name): part for name, part in quantized.items()})
    with pytest.raises(ValueError, match=r"only the weights have 'old/dense/kernel_scale'"):
        # The scales are not renamed with their kernels.
        TensorFlowVariables(net()).set_weights(given, rename={"old/dense/kernel": "dense/kernel"})


def test_kernels_and_scales_set_an_int8_model_in_any_dtype_of_whole_numbers() -> None:
    variables = TensorFlowVariables(net("int8"))
    scale = np.full(16, 0.5)
    for kernel in (np.full((8, 16), 3.0), np.full((8, 16), 4)):
        variables.set_weights({"dense/kernel": kernel, "dense/kernel_scale": scale})
        np.testing.assert_array_equal(variables.get_weights()["dense/kernel"], kernel)
    variables.set_weights({"dense/kernel": np.full((8, 16), 5)})
    assert (variables.get_weights()["dense/kernel"] == 5).all()
    with pytest.raises(ValueError, match=r"expected whole numbers, got float64 with fractions"):
        variables.set_weights({"dense/kernel": kernel + 0.5, "dense/kernel_scale": scale})


def test_integers_set_floats_that_are_no_kernels_of_quantized_models() -> None:
    model = {"a": tf.Variable([0.0, 0.0]), "a_scale": tf.Variable(0.0)}
    whole = {"a": np.array([1, 2], np.int8), "a_scale": np.array(3, np.int8)}
    for exclude, given in ((None, whole), ("a_scale", whole), (None, {"a": whole["a"]})):
        TensorFlowVariables(model, exclude=exclude).set_weights(given)
        np.testing.assert_array_equal(model["a"], [1, 2])
        model["a"].assign([0, 0])


def change(model: Any, how: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if how == "lora":
            model.layers[0].enable_lora(2)
        elif how == "head":  # as a rule, another one of as many variables
            model.pop()
            model.add(keras.layers.Dense(4))
        else:
            model.quantize(how)


@mostly_bound
@pytest.mark.parametrize("how", ["int8", "int4", "float8", "lora", "head"])
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


@pytest.mark.parametrize("library", [keras, tf_keras])
def test_layers_without_variables_may_be_replaced_and_others_not(library: Any) -> None:
    layers = [library.layers.Dense(2), library.layers.ReLU()]
    inside = library.Sequential([library.Input((3,)), *layers])
    variables = TensorFlowVariables({"in": {"a list": [inside]}})
    inside.pop()
    flat = variables.get_flat()
    inside.add(library.layers.Softmax())
    np.testing.assert_array_equal(variables.get_flat(), flat)
    inside.pop()
    inside.pop()
    with pytest.raises(RuntimeError, match=r"got one that lacks '.*dense.*kernel.*make a new"):
        variables.get_flat()
    inside.add(library.layers.Dense(2))
    with pytest.raises(RuntimeError, match="make a new TensorFlowVariables"):
        variables.set_flat(flat)


def test_a_sequential_of_tf_keras_with_layers_and_modules_in_attributes() -> None:
    class Both(tf_keras.Sequential):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__([tf_keras.Input((3,)), tf_keras.layers.Dense(2)])
            self.more = [tf_keras.layers.Dense(1)]
            self.more[0].build((3,))
            self.module = tf.Module()
            self.module.w = tf.Variable([1.0])

    model = Both()
    variables = TensorFlowVariables(model)
    assert len(variables.variables) == len(model.variables)  # those of the layers in the list
    variables.set_flat(np.arange(8))
    np.testing.assert_array_equal(variables.get_flat(), np.arange(8))
