"""The actor of the demo: a network, a share of the digits, and both ways to exchange."""

import argparse
import hashlib
import os
import signal
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatweights import FlatWeights
from flatweights.demo import SIZES, Size
from flatweights.examples import prepare_tensorflow
from flatweights.ray import FlatWorker

HELD_OUT = 359  # digits that no worker trains on
BATCH = 32
LEARNING_RATE = 1e-3

Data = tuple[NDArray[np.float32], NDArray[np.int32]]  # images and labels


def load_shards(workers: int, seed: int) -> tuple[list[Data], Data]:
    """Return the digits of each worker, and those that no worker has."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16).astype(np.float32), labels.astype(np.int32)
    order = np.random.default_rng(seed).permutation(len(labels))
    held_out, shards = order[:HELD_OUT], np.array_split(order[HELD_OUT:], workers)
    return [(images[s], labels[s]) for s in shards], (images[held_out], labels[held_out])


def build_model(size: Size, seed: int) -> Any:
    """Return a residual network of dense layers."""
    import keras

    keras.utils.set_random_seed(seed)
    dense = keras.layers.Dense
    pixels = keras.Input((64,))
    x = dense(size.width, activation="relu")(pixels)
    for _ in range(size.depth):
        start = keras.initializers.VarianceScaling(1 / size.depth)
        inside = dense(size.width, activation="relu", kernel_initializer=start)(x)
        x = keras.layers.Add()([x, inside])
    return keras.Model(pixels, dense(10)(x))


class DigitsWorker(FlatWorker):
    """Trains a network; it holds what it exchanges twice, once for each way."""

    def build(self, options: argparse.Namespace, rank: int) -> Any:
        """Build the network; return the variables that travel as one buffer."""
        prepare_tensorflow()
        import keras
        import tensorflow as tf

        shards, self.held_out = load_shards(options.workers, options.seed)
        self.images, self.labels = shards[rank]
        self.rng = np.random.default_rng([options.seed, rank])
        self.local_steps = options.local_steps
        self.model = build_model(SIZES[options.size], options.seed)
        self.trained = [v.value for v in self.model.trainable_variables]
        optimizer = keras.optimizers.Adam(LEARNING_RATE)
        optimizer.build(self.model.trainable_variables)
        self.gradients = None
        if options.mode == "gradients":
            self.gradients = [tf.Variable(tf.zeros(v.shape)) for v in self.trained]
        self.ours = self.gradients or self.trained
        paths = [v.path for v in self.model.trainable_variables]
        self.rival = dict(zip(paths, (tf.Variable(v) for v in self.ours), strict=True))
        self.doomed = False

        def losses(images: Any, labels: Any) -> Any:
            logits = self.model(images)
            return logits, tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)

        def differentiate(images: Any, labels: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(losses(images, labels)[1])
            return tape.gradient(loss, self.trained)

        def step(images: Any, labels: Any) -> None:
            optimizer.apply(differentiate(images, labels))

        self.step, self.differentiate = tf.function(step), tf.function(differentiate)
        self.apply_gradients, self.measure = tf.function(optimizer.apply), tf.function(losses)
        return dict(zip(paths, self.ours, strict=True))

    def size(self) -> int:
        """Return how many digits there are to train on."""
        return len(self.labels)

    def train(self) -> float:
        """Take the round's steps, or compute its mean gradient; return the seconds."""
        import tensorflow as tf

        begin = time.perf_counter()
        batches = [self._draw_batch() for _ in range(self.local_steps)]
        if self.gradients is None:
            for batch in batches:
                self.step(*batch)
        else:
            gradients = zip(*(self.differentiate(*batch) for batch in batches), strict=True)
            for variable, some in zip(self.gradients, gradients, strict=True):
                variable.assign(tf.add_n(some) / len(some))
        seconds = time.perf_counter() - begin
        for variable, ours in zip(self.rival.values(), self.ours, strict=True):
            variable.assign(ours.numpy())  # not the tensor, which they would share
        return seconds

    def finish(self) -> float:
        """Apply the mean of all gradients, if it is these that travel; return the seconds."""
        begin = time.perf_counter()
        if self.gradients is not None:
            self.apply_gradients([v.read_value() for v in self.gradients])
        return time.perf_counter() - begin

    def _draw_batch(self) -> Any:
        import tensorflow as tf

        # Batches are of one size, so that TensorFlow traces once.
        size = min(BATCH, len(self.labels))
        chosen = self.rng.choice(len(self.labels), size, replace=False)
        return tf.constant(self.images[chosen]), tf.constant(self.labels[chosen])

    def evaluate(self) -> tuple[float, float]:
        """Return loss and accuracy on the digits that are held out."""
        logits, losses = self.measure(*self.held_out)
        hits = np.argmax(logits, axis=1) == self.held_out[1]
        return float(np.mean(losses)), float(np.mean(hits))

    def digest(self) -> str:
        """Return the SHA-256 of the network's weights."""
        return hashlib.sha256(b"".join(v.numpy().tobytes() for v in self.trained)).hexdigest()

    # The guide's way: one read, one assignment, one array for each variable.

    def get_dict(self) -> dict[str, NDArray[Any]]:
        """Return what travels, variable by variable."""
        return {name: variable.numpy() for name, variable in self.rival.items()}

    def set_dict(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Set what travels, variable by variable."""
        for name, variable in self.rival.items():
            variable.assign(arrays[name])

    def exchange_others(self, nbytes: float) -> None:
        """From now on, exchange as many variables of so many bytes in all: bare arrays."""
        import tensorflow as tf

        from flatweights.tensorflow import TensorFlowVariables

        length = max(16, int(nbytes / 4 / len(self.rival)) // 16 * 16)
        names = list(self.rival)
        ours, self.rival = ({n: tf.Variable(tf.ones(length)) for n in names} for _ in range(2))
        self.variables = TensorFlowVariables(ours)

    # To be killed, once: the process that Ray starts in its place is not doomed.

    def die_in_next_round(self) -> None:
        """Have this process die in the next `train_on`."""
        self.doomed = True

    def train_on(self) -> FlatWeights:
        """Train, and return the weights, or die before that."""
        self.train()
        if self.doomed:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.get_weights()
