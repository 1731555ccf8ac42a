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
import tf_keras
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


def build_keras(seed: int, history: int = 0, of: Any = keras) -> Any:
    for _ in range(history):  # shifts the automatic names
        of.layers.Dense(1).build((None, 1))
    of.utils.set_random_seed(seed)
    model = of.Sequential([of.Input((4,)), of.layers.Dense(3), of.layers.BatchNormalization()])
    model.compile(of.optimizers.Adam(0.1), "mse", run_eagerly=True)
    return model


# From one model into another.


@pytest.mark.parametrize("source", [build_eager, build_graph])
@pytest.mark.parametrize(
    "values", [pytest.param(random_values, marks=pytest.mark.slow), mixed_values]
)
def test_what_is_saved_is_loaded_in_any_mode(
    source: Any, build: Callable[..., Model], values: Any, file: Path
) -> None:
    source(values(0)).weights.save(str(file))
    other = build(values(1))
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


# Parts of a model, and other names.


def ones_like(values: dict[str, Any]) -> dict[str, Any]:
    return {name: np.ones_like(value) for name, value in values.items()}


SOME = {name: mixed_values(1)[name] for name in ("single2", "flag", "half")}
FOUR = {"b": np.zeros(3), "a": np.ones(3), "n": np.int64(7), "c": np.full(3, 2.0)}


@pytest.mark.parametrize(
    ("saved", "model", "options", "expected"),
    [
        pytest.param(SOME, mixed_values(0), {}, mixed_values(0) | SOME, id="some"),
        pytest.param(
            # In the order of the model: the file has another, by dtype and name.
            {f"old/{9 - i}": v for i, v in enumerate(FOUR.values())},
            ones_like(FOUR),
            {},
            FOUR,
            id="by position",
        ),
        pytest.param(
            {"old": np.float32([1, 2]), "b": np.float32(3)},  # type: ignore[arg-type]
            {"a": np.zeros(2, np.float32), "b": np.float32(0)},
            {"rename": {"old": "a"}, "strict": True},
            {"a": np.float32([1, 2]), "b": np.float32(3)},  # type: ignore[arg-type]
            id="renamed",
        ),
        pytest.param(
            {"w": np.array([1.5, 2.5]), "n": np.array(2.6)},
            {"w": np.zeros(2, np.float32), "n": np.int32(0)},
            {},
            {"w": np.float32([1.5, 2.5]), "n": np.int32(3)},  # type: ignore[arg-type]
            id="cast",
        ),
    ],
)
def test_a_file_sets_what_set_weights_sets(
    build: Callable[..., Model], file: Path, saved: Any, model: Any, options: Any, expected: Any
) -> None:
    FlatWeights(saved).save(file)
    target = build(model)
    target.weights.load(file, **options)
    assert_values(target, expected)


def test_a_file_with_more_or_fewer_weights_is_refused_or_told(
    build: Callable[..., Model], file: Path
) -> None:
    FlatWeights({**random_values(1), "slots/m": np.zeros(3)}).save(file)
    model = build(random_values(0))
    with pytest.warns(UserWarning, match=r"1 weights .*\['slots/m'\]") as caught:
        model.weights.load(file)
    assert caught[0].filename == __file__
    FlatWeights({"bias": random_values(0)["bias"]}).save(file)
    with pytest.raises(ValueError, match="strict: expected the names of the model; missing"):
        model.weights.load(file, strict=True)
    assert_values(model, random_values(1))


# Files of other programs.


OTHER_VALUES = {"w": np.arange(99.0), "v": np.arange(5.0)}
NARROW_VALUES = {"w": np.arange(99, dtype="f4"), "v": np.arange(5, dtype="f2")}


@pytest.mark.parametrize(
    ("saved", "loaded", "padding"),
    [
        *((mixed_values(1), mixed_values(1), padding) for padding in (0, 1, 4)),
        *((OTHER_VALUES, NARROW_VALUES, padding) for padding in (1, 2)),
    ],
)
def test_a_file_of_another_program_is_loaded_by_name(
    build: Callable[..., Model], file: Path, saved: Any, loaded: Any, padding: int
) -> None:
    data = safetensors.numpy.save({name: np.array(value) for name, value in saved.items()})
    size = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + size] + b" " * padding  # values need not be aligned
    file.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])
    model = build({name: np.zeros_like(value) for name, value in loaded.items()})
    model.weights.load(file, strict=True)
    assert_values(model, loaded)


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
            r"slot 4 'bias': expected float32 \(5,\), got float64 \(4,\)",
        ),
        ({"bias": np.zeros(5, np.complex64)}, TypeError, "slot 4 'bias': expected float32"),
        (
            {"bias": np.zeros(5), "count": np.array(300)},
            ValueError,
            "slot 5 'count': expected values that fit int8",
        ),
        ({"other": np.zeros(5)}, AssertionError, "No variables in the input matched"),
        ({}, AssertionError, "No variables in the input matched"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(
    build: Callable[..., Model], file: Path, saved: Any, error: Any, message: str
) -> None:
    FlatWeights(saved).save(file)
    values = {**random_values(), "count": np.int8(1)}
    model = build(values)
    with pytest.raises(error, match=message) as caught:
        model.weights.load(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert_values(model, values)


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
    assert not any(value.any() for value in weights.get_weights().values())
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
    np.testing.assert_array_equal(model.weights.get_weights()["double"], mixed_values(2)["double"])
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
@pytest.mark.parametrize("of", [keras, tf_keras])
def test_a_keras_models_checkpoint_works_beside_it(tmp_path: Path, file: Path, of: Any) -> None:
    model = build_keras(1, of=of)
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
        assert not weights.get_flat().any()
        restore()
        np.testing.assert_array_equal(weights.get_flat(), before)
