"""save and load in both modes, and TensorFlow's own checkpoints beside them."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import safetensors.numpy
import tensorflow as tf
from tf_models import Model, build_eager, build_graph, mixed_values, only_bound, random_values, tf1

from flatweights import FlatWeights
from flatweights.tensorflow import TensorFlowVariables

pytestmark = only_bound  # differences between the ways of moving are tested elsewhere


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def assert_values(model: Model, values: dict[str, Any]) -> None:
    for name, value in model.read().items():
        np.testing.assert_array_equal(value, values[name], strict=True)


def build_keras(seed: int, history: int = 0) -> keras.Model:
    for _ in range(history):  # shifts the automatic names
        keras.layers.Dense(1).build((None, 1))
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(3), keras.layers.BatchNormalization()]
    )
    model.compile(keras.optimizers.Adam(0.1), "mse", run_eagerly=True)
    return model


# From one model into another.


def test_what_is_saved_is_loaded(build: Callable[..., Model], file: Path) -> None:
    build(mixed_values(0)).weights.save(file)
    other = build(mixed_values(1))
    other.weights.load(file)
    assert_values(other, mixed_values(0))


@pytest.mark.parametrize(
    ("source", "target"), [(build_eager, build_graph), (build_graph, build_eager)]
)
@pytest.mark.parametrize(
    "values", [pytest.param(random_values, marks=pytest.mark.slow), mixed_values]
)
def test_a_file_crosses_modes(source: Any, target: Any, values: Any, file: Path) -> None:
    source(values(0)).weights.save(str(file))
    other = target(values(1))
    other.weights.load(str(file), strict=True)
    assert_values(other, values(0))
    assert other.weights.get_weights().layout == FlatWeights.load(file).layout


@pytest.mark.parametrize(
    "dtype",
    ["complex64", "complex128", "float8_e5m2", "float8_e4m3fn", "uint16", "uint64", "int8"],
)
def test_uncommon_dtypes_are_saved_and_loaded(dtype: str, file: Path) -> None:
    numbers = np.array([0.0, 1.0, 2.0]).astype(tf.as_dtype(dtype).as_numpy_dtype)
    variable = tf.Variable(numbers)
    weights = TensorFlowVariables({"v": variable})
    weights.save(file)
    variable.assign(numbers[::-1])
    weights.load(file)
    np.testing.assert_array_equal(np.array(variable.numpy()), numbers, strict=True)


def test_keras_models_and_optimizers_go_on_where_they_were(file: Path) -> None:
    x = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    y = x[:, :3]
    first, second = build_keras(1), build_keras(2, history=2)
    first.train_on_batch(x, y)
    TensorFlowVariables([first, first.optimizer]).save(file)
    second.optimizer.build(second.trainable_variables)
    TensorFlowVariables([second, second.optimizer]).load(file, strict=True)
    for model in (first, second):
        for _ in range(2):
            model.train_on_batch(x, y)
    for a, b in zip(first.get_weights(), second.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_loaded_variables_depend_on_the_file_no_more(
    build: Callable[..., Model], file: Path
) -> None:
    values = {"w": np.arange(4096, dtype=np.float32), "v": np.ones((64, 64), np.float32)}
    build(values).weights.save(file)
    before = file.read_bytes()
    model = build({name: np.zeros_like(value) for name, value in values.items()})
    model.weights.load(file)
    model.write("v", np.full((64, 64), 7, np.float32))
    model.weights.add_flat(np.ones(8192, np.float32))
    assert file.read_bytes() == before
    os.truncate(file, 0)  # reading from mapped memory would end the process
    assert_values(model, {"w": values["w"] + 1, "v": np.full((64, 64), 8, np.float32)})


def test_loading_again_and_again_adds_nothing_to_the_graph(file: Path) -> None:
    model = build_graph(mixed_values(0), is_shared=False)
    model.weights.save(file)
    graph = model.weights.sess.graph
    model.weights.load(file)
    graph.finalize()
    operations = len(graph.get_operations())
    for _ in range(3):
        model.weights.load(file)
        model.weights.save(file)
    assert len(graph.get_operations()) == operations


# Parts of a model, and other names.


def test_a_file_of_some_weights_sets_those(build: Callable[..., Model], file: Path) -> None:
    some = {name: mixed_values(1)[name] for name in ("single2", "flag", "half")}
    FlatWeights(some).save(file)
    model = build(mixed_values(0))
    model.weights.load(file)
    assert_values(model, {**mixed_values(0), **some})
    with pytest.raises(ValueError, match="strict: expected the names of the model; missing"):
        model.weights.load(file, strict=True)


def test_weights_that_the_model_has_not_are_named_by_a_warning(
    build: Callable[..., Model], file: Path
) -> None:
    FlatWeights({**random_values(1), "slots/m": np.zeros(3)}).save(file)
    model = build(random_values(0))
    with pytest.warns(UserWarning, match=r"1 weights .*\['slots/m'\]") as caught:
        model.weights.load(file)
    assert caught[0].filename == __file__
    assert_values(model, random_values(1))


def test_a_full_file_with_other_names_is_loaded_by_position(
    build: Callable[..., Model], file: Path
) -> None:
    # In the order of the model: the file has another, by dtype and name.
    values = {"b": np.zeros(3), "a": np.ones(3), "n": np.int64(7), "c": np.full(3, 2.0)}
    FlatWeights({f"old/{9 - i}": v for i, v in enumerate(values.values())}).save(file)
    model = build({name: np.zeros_like(value) for name, value in values.items()})
    model.weights.load(file)
    assert_values(model, values)


def test_names_are_mapped(build: Callable[..., Model], file: Path) -> None:
    FlatWeights({"old": np.float32([1, 2]), "b": np.float32(3)}).save(file)  # type: ignore[arg-type]
    model = build({"a": np.zeros(2, np.float32), "b": np.float32(0)})
    model.weights.load(file, rename={"old": "a"}, strict=True)
    assert_values(model, {"a": np.float32([1, 2]), "b": np.float32(3)})  # type: ignore[arg-type]


def test_values_are_cast_as_set_weights_casts_them(build: Callable[..., Model], file: Path) -> None:
    FlatWeights({"w": np.array([1.5, 2.5]), "n": np.array(2.6)}).save(file)
    model = build({"w": np.zeros(2, np.float32), "n": np.int32(0)})
    model.weights.load(file)
    assert_values(model, {"w": np.float32([1.5, 2.5]), "n": np.int32(3)})  # type: ignore[arg-type]


# Files of other programs.


@pytest.mark.parametrize("padding", [0, 1, 4])
def test_a_file_of_another_program_is_loaded_by_name(
    build: Callable[..., Model], file: Path, padding: int
) -> None:
    values = {name: np.array(v) for name, v in mixed_values(1).items()}
    data = safetensors.numpy.save(values)
    size = int.from_bytes(data[:8], "little") + padding  # not aligned
    file.write_bytes(size.to_bytes(8, "little") + data[8 : size - padding + 8])
    with file.open("ab") as stream:
        stream.write(b" " * padding + data[size - padding + 8 :])
    model = build(mixed_values(0))
    model.weights.load(file, strict=True)
    assert_values(model, values)


@pytest.mark.parametrize("padding", [1, 2])
def test_values_of_another_dtype_need_not_be_aligned(
    build: Callable[..., Model], file: Path, padding: int
) -> None:
    data = safetensors.numpy.save({"w": np.arange(99.0), "v": np.arange(5.0)})
    size = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + size] + b" " * padding
    file.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])
    model = build({"w": np.zeros(99, np.float32), "v": np.zeros(5, np.float16)})
    model.weights.load(file)
    assert_values(model, {"w": np.arange(99, dtype="f4"), "v": np.arange(5, dtype="f2")})


def test_a_file_of_another_program_is_never_loaded_by_position(
    build: Callable[..., Model], file: Path
) -> None:
    # Such a file has its tensors by dtype and name: the order of the model is lost.
    model = build({"a": np.zeros(3), "b": np.zeros(3)})
    for names in (["a", "x"], ["x", "y"]):
        safetensors.numpy.save_file(
            dict(zip(names, (np.ones(3), np.full(3, 2.0)), strict=True)), file
        )
        with pytest.raises(
            ValueError, match=r"expected names of the model, got \['.', '.'\].*rename="
        ):
            model.weights.load(file)
        assert_values(model, {"a": np.zeros(3), "b": np.zeros(3)})
    model.weights.load(file, rename={"x": "b", "y": "a"})
    assert_values(model, {"a": np.full(3, 2.0), "b": np.ones(3)})


# Refusals change nothing.


def test_a_file_that_is_changed_or_cut_short_changes_nothing(
    build: Callable[..., Model], file: Path
) -> None:
    build(mixed_values(1)).weights.save(file)
    model = build(mixed_values(0))
    content = bytearray(file.read_bytes())
    for i in (len(content) - 1, len(content) - 100, 20):
        content[i] ^= 1
        file.write_bytes(content)
        content[i] ^= 1
        with pytest.raises(ValueError, match=r"model\.safetensors: "):
            model.weights.load(file)
    file.write_bytes(content)
    whole = file.stat().st_size
    for size in (whole - 1, whole - 64, whole // 2, 100, 8, 7, 1, 0):
        os.truncate(file, size)
        with pytest.raises(ValueError, match=r"model\.safetensors: expected a"):
            model.weights.load(file)
    file.unlink()
    with pytest.raises(FileNotFoundError, match="model"):
        model.weights.load(file)
    assert_values(model, mixed_values(0))


@pytest.mark.parametrize(
    ("saved", "error", "message"),
    [
        (
            {"kernel": np.zeros((7, 5)), "bias": np.zeros(4)},
            ValueError,
            r"slot 4 'bias': expected f"
            r"loat32 \(5,\), got float64 \(4,\)",
        ),
        ({"bias": np.zeros(5, np.complex64)}, TypeError, "slot 4 'bias': expected float32"),
        ({"other": np.zeros(5)}, AssertionError, "No variables in the input matched"),
        ({}, AssertionError, "No variables in the input matched"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(
    build: Callable[..., Model], file: Path, saved: Any, error: Any, message: str
) -> None:
    FlatWeights(saved).save(file)
    model = build(random_values())
    with pytest.raises(error, match=message) as caught:
        model.weights.load(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert_values(model, random_values())


def test_a_value_that_does_not_fit_an_integer_changes_nothing(
    build: Callable[..., Model], file: Path
) -> None:
    FlatWeights({"w": np.ones(2), "n": np.array(300)}).save(file)
    model = build({"w": np.zeros(2), "n": np.int8(1)})
    with pytest.raises(ValueError, match="slot 1 'n': expected values that fit int8"):
        model.weights.load(file)
    assert_values(model, {"w": np.zeros(2), "n": np.int8(1)})


def test_a_graph_without_a_session_is_neither_saved_nor_loaded(file: Path) -> None:
    model = build_graph(random_values())
    model.weights.save(file)
    before = file.read_bytes()
    model.weights.set_session(None)
    for call in (model.weights.save, model.weights.load):
        with pytest.raises(RuntimeError, match="session"):
            call(file)
    assert file.read_bytes() == before


# TensorFlow's own checkpoints.


def variables_of(values: dict[str, np.ndarray]) -> dict[str, tf.Variable]:
    return {name: tf.Variable(value) for name, value in values.items()}


def test_tensorflows_checkpoint_works_beside_it(tmp_path: Path, file: Path) -> None:
    variables = variables_of(mixed_values(0))
    weights = TensorFlowVariables(variables)
    checkpoint = tf.train.Checkpoint(**variables)
    weights.set_weights(mixed_values(1))
    saved = checkpoint.save(str(tmp_path / "ckpt"))
    weights.save(file)
    weights.set_flat(np.zeros(weights.get_flat_size()))
    checkpoint.restore(saved).assert_consumed()
    for name, value in mixed_values(1).items():
        np.testing.assert_array_equal(weights.get_weights()[name], value)
    # A checkpoint saves the values that were set since.
    weights.set_flat(np.zeros(weights.get_flat_size()))
    weights.load(file)
    saved = checkpoint.save(str(tmp_path / "ckpt"))
    fresh = variables_of(mixed_values(0))
    tf.train.Checkpoint(**fresh).restore(saved).assert_consumed()
    for name, value in mixed_values(1).items():
        np.testing.assert_array_equal(fresh[name].numpy(), value)


@pytest.mark.parametrize("use_resource", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_tensorflows_saver_works_beside_it(tmp_path: Path, file: Path, use_resource: bool) -> None:
    model = build_graph(mixed_values(0), use_resource=use_resource)
    session, prefix = model.weights.sess, str(tmp_path / "saver")
    model.weights.set_weights(mixed_values(1))
    with session.graph.as_default():
        saver = tf1.train.Saver()
        saved = saver.save(session, prefix, write_meta_graph=False)
    model.weights.save(file)
    model.weights.set_weights(mixed_values(2))
    with session.graph.as_default():
        saver.restore(session, saved)
    np.testing.assert_array_equal(model.weights.get_weights()["double"], mixed_values(1)["double"])
    assert_values(model, mixed_values(1))
    model.weights.set_weights(mixed_values(2))
    model.weights.load(file)
    with session.graph.as_default():
        saved = saver.save(session, prefix, write_meta_graph=False)
    reader = tf.train.load_checkpoint(saved)
    for name, value in mixed_values(1).items():
        np.testing.assert_array_equal(reader.get_tensor(name), value)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras's
def test_a_keras_models_checkpoint_works_beside_it(tmp_path: Path, file: Path) -> None:
    model = build_keras(1)
    weights = TensorFlowVariables(model)
    checkpoint = tf.train.Checkpoint(model=model)
    before = weights.get_flat()
    weights.save(file)
    saved = checkpoint.write(str(tmp_path / "ckpt"))
    model.save_weights(tmp_path / "keras.weights.h5")
    for restore in (
        lambda: checkpoint.read(saved).assert_consumed(),
        lambda: model.load_weights(tmp_path / "keras.weights.h5"),
        lambda: weights.load(file),
    ):
        weights.set_flat(np.zeros(weights.get_flat_size()))
        restore()
        np.testing.assert_array_equal(weights.get_flat(), before)


def test_mirrored_variables_are_loaded_on_every_device(file: Path) -> None:
    devices = tf.config.list_logical_devices("CPU")
    strategy = tf.distribute.MirroredStrategy([device.name for device in devices])
    with strategy.scope():
        variable = tf.Variable([1.0, 2.0])
    weights = TensorFlowVariables({"v": variable})
    weights.save(file)
    weights.set_flat([0, 0])
    weights.load(file)
    for part in strategy.experimental_local_results(variable):
        np.testing.assert_array_equal(part.numpy(), [1, 2])
