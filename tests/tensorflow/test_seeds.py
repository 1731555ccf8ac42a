"""States of seed generators stay a process's own if it says so; checkpoints contain them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tf_models import mostly_bound

from flatweights import FlatWeights
from flatweights.tensorflow import TensorFlowVariables


class Noisy(tf.Module):  # type: ignore[misc]
    """Random numbers of Keras, of TensorFlow, and a counter, which is no seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        layers = [keras.layers.Dropout(0.5, seed=seed), keras.layers.Dense(2)]
        self.model = keras.Sequential([keras.Input((3,)), *layers])
        self.generator = tf.random.Generator.from_seed(seed)
        self.counter = tf.Variable(seed, trainable=False)


SEEDS = ("generator/state_var", "model/dropout/seed_generator_state")


@mostly_bound
@pytest.mark.parametrize(
    "move",
    [
        lambda target, w: target.scatter(w.buffer, seeds=False),
        lambda target, w: target.set_weights(w, seeds=False),
        lambda target, w: target.set_weights(dict(reversed(w.items())), seeds=False),
        lambda target, w: target.set_weights({f"a/{k}": v for k, v in w.items()}, seeds=False),
        lambda target, w: target.set_flat(flat(w), seeds=False),
        lambda target, w: target.set_weights(frozen(w), seeds=False, share=True),
        lambda target, w: target.set_flat(frozen_array(flat(w)), seeds=False, share=True),
    ],
)
def test_all_but_the_seeds_are_set(move: Callable[[Any, FlatWeights], None]) -> None:
    target = TensorFlowVariables(Noisy(1))
    assert sorted(target.seed_names) == sorted(SEEDS)
    before, given = target.get_weights(), TensorFlowVariables(Noisy(2)).get_weights()
    move(target, given)
    for name, value in target.get_weights().items():
        np.testing.assert_array_equal(value, (before if name in SEEDS else given)[name])


def flat(weights: FlatWeights) -> Any:
    return np.concatenate([part.ravel().astype(np.float64) for part in weights.values()])


def frozen_array(array: Any) -> Any:
    array.setflags(write=False)
    return array


def frozen(weights: FlatWeights) -> FlatWeights:
    return FlatWeights.wrap(frozen_array(weights.buffer.copy()), weights.layout)


def test_checkpoints_and_states_contain_seeds(tmp_path: Path) -> None:
    given = TensorFlowVariables(Noisy(2))
    given.save(tmp_path / "saved")
    weights = given.get_weights()
    restores: list[Callable[[TensorFlowVariables], None]] = [
        lambda target: target.load(tmp_path / "saved"),
        lambda target: target.set_weights(weights),
        lambda target: target.scatter(weights.buffer),
    ]
    for restore in restores:
        target = TensorFlowVariables(Noisy(1))
        restore(target)
        np.testing.assert_array_equal(target.get_weights().buffer, weights.buffer)
