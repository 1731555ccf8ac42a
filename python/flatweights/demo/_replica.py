"""The model, and a worker's part of its training."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from flatweights.demo._digits import Examples
from flatweights.demo._options import Mode

_BATCH = 32
_LEARNING_RATE = 2e-3


def make_tensorflow_deterministic() -> None:
    """Give the same bits in every run; to be called before TensorFlow is used."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.experimental.enable_op_determinism()


def build_model() -> keras.Model:
    """Return the network: 16 variables, none of which is changed but by gradients."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )


class Replica:
    """A worker's model, its optimizer and the batches of its shard.

    Attributes:
        model: The model.
    """

    def __init__(self, mode: Mode, local_steps: int, seed: int, rank: int, shard: Examples) -> None:
        """Build the model: the same for every rank."""
        keras.utils.set_random_seed(seed)
        self.model = build_model()
        self._variables = self.model.trainable_variables
        self._optimizer = keras.optimizers.Adam(_LEARNING_RATE)
        self._optimizer.build(self._variables)
        self._mode = mode
        self._local_steps = local_steps
        self._batches = _batches(shard, np.random.default_rng([seed, rank]))
        self._step = tf.function(self._take_step)
        self._differentiate = tf.function(self._gradients)
        self._apply = tf.function(self._optimizer.apply)
        self._measure = tf.function(self._losses)

    def compute(self) -> list[tf.Tensor]:
        """Do this round's work.

        Returns:
            The mean gradient over this round's batches. When weights are averaged, nothing: the
            optimizer has taken its steps.
        """
        if self._mode == "weights":
            for _ in range(self._local_steps):
                self._step(*next(self._batches))
            return []
        steps = [self._differentiate(*next(self._batches)) for _ in range(self._local_steps)]
        if len(steps) == 1:
            return list(steps[0])
        return [tf.add_n(gradients) / len(steps) for gradients in zip(*steps, strict=True)]

    def finish(self, gradients: list[tf.Tensor]) -> None:
        """Take the optimizer's step along the averaged gradients, if there are any."""
        if gradients:
            self._apply(gradients)

    def evaluate(self, examples: Examples) -> tuple[float, float]:
        """Return the mean loss and the accuracy."""
        logits, losses = self._measure(*examples)
        hits = np.argmax(logits, axis=1) == examples.labels
        return float(np.mean(losses)), float(np.mean(hits))

    def _losses(self, images: Any, labels: Any) -> tuple[tf.Tensor, tf.Tensor]:
        logits = self.model(images)
        return logits, tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)

    def _gradients(self, images: Any, labels: Any) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            _, losses = self._losses(images, labels)
            loss = tf.reduce_mean(losses)
        return tape.gradient(loss, [v.value for v in self._variables])  # type: ignore[no-any-return]

    def _take_step(self, images: Any, labels: Any) -> None:
        self._optimizer.apply(self._gradients(images, labels))


def _batches(shard: Examples, rng: np.random.Generator) -> Iterator[tuple[tf.Tensor, tf.Tensor]]:
    size = min(_BATCH, len(shard.labels))
    while True:
        order = rng.permutation(len(shard.labels))
        # Batches are of one size, so that TensorFlow traces once; the rest waits for its turn.
        for begin in range(0, len(order) - size + 1, size):
            batch = order[begin : begin + size]
            yield tf.constant(shard.images[batch]), tf.constant(shard.labels[batch])
