"""The actor of the demo: a network, a share of the digits, and both ways to exchange."""

import argparse
import hashlib
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from flatweights import FlatWeights
from flatweights.demo import SIZES, Size
from flatweights.ray import FlatWorker

BATCH = 32


def build_model(size: Size, seed: int) -> Any:
    """Return a residual network of dense layers, compiled."""
    import keras

    keras.utils.set_random_seed(seed)
    dense = keras.layers.Dense
    pixels = keras.Input((64,))
    x = dense(size.width, activation="relu")(pixels)
    for _ in range(size.depth):
        start = keras.initializers.VarianceScaling(1 / size.depth)
        inside = dense(size.width, activation="relu", kernel_initializer=start)(x)
        x = keras.layers.Add()([x, inside])
    model = keras.Model(pixels, dense(10)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"])
    return model


class DigitsWorker(FlatWorker):
    """Trains a network; it holds the exchanged variables twice, once for each way."""

    def build(self, options: argparse.Namespace, rank: int) -> Any:
        """Build the network; return the variables that travel as one buffer."""
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)  # the workers share the cores
        tf.config.threading.set_inter_op_parallelism_threads(1)
        tf.config.experimental.enable_op_determinism()  # a seed gives the same bits
        images, labels = load_digits(return_X_y=True)
        images = (images / 16).astype(np.float32)
        parts = train_test_split(images, labels, test_size=359, random_state=options.seed)
        end = len(parts[0]) // options.workers * options.workers  # equal shares for all workers
        self.digits = [part[rank : end : options.workers] for part in (parts[0], parts[2])]
        self.test = parts[1], parts[3]
        self.rng = np.random.default_rng([options.seed, rank])
        self.local_steps = options.local_steps
        self.model = build_model(SIZES[options.size], options.seed)
        self.trained = [v.value for v in self.model.trainable_variables]
        self.gradients = None
        if options.mode == "gradients":
            self.gradients = [tf.Variable(tf.zeros(v.shape)) for v in self.trained]
            optimizer = self.model.optimizer
            optimizer.build(self.model.trainable_variables)
            self.apply = tf.function(optimizer.apply)

            @tf.function  # type: ignore[untyped-decorator]
            def differentiate(images: Any, labels: Any) -> Any:
                with tf.GradientTape() as tape:
                    loss = self.model.compute_loss(y=labels, y_pred=self.model(images))
                return tape.gradient(loss, self.trained)

            # No method: Ray adds a parameter to an actor's methods, which TensorFlow refuses.
            self.differentiate = differentiate
        paths = [v.path for v in self.model.trainable_variables]
        self.ours = dict(zip(paths, self.gradients or self.trained, strict=True))
        self.rival = {path: tf.Variable(v) for path, v in self.ours.items()}
        return self.ours

    def size(self) -> int:
        """Return the number of digits to train on."""
        return len(self.digits[1])

    def train(self) -> float:
        """Take the round's steps, or compute its mean gradient; return the seconds."""
        import tensorflow as tf

        begin = time.perf_counter()
        # Batches are of one size, so that TensorFlow traces once.
        size = min(BATCH, self.size())
        chosen = [self.rng.choice(self.size(), size, False) for _ in range(self.local_steps)]
        batches = [[part[batch] for part in self.digits] for batch in chosen]
        if self.gradients is None:
            for batch in batches:
                self.model.train_on_batch(*batch)
        else:
            gradients = zip(*(self.differentiate(*batch) for batch in batches), strict=True)
            for variable, some in zip(self.gradients, gradients, strict=True):
                variable.assign(tf.add_n(some) / len(some))
        seconds = time.perf_counter() - begin
        for path, variable in self.rival.items():
            variable.assign(self.ours[path].numpy())  # not the tensor, which they would share
        return seconds

    def finish(self) -> float:
        """Apply the mean gradient, if gradients are averaged; return the seconds."""
        begin = time.perf_counter()
        if self.gradients is not None:
            self.apply([v.read_value() for v in self.gradients])
        return time.perf_counter() - begin

    def evaluate(self) -> Any:
        """Return loss and accuracy on digits that no worker trains on."""
        return self.model.evaluate(*self.test, verbose=0)

    def digest(self) -> str:
        """Return the SHA-256 of the network's weights."""
        return hashlib.sha256(b"".join(v.numpy().tobytes() for v in self.trained)).hexdigest()

    # The guide's way: one read, one assignment, one array for each variable.

    def get_dict(self) -> dict[str, NDArray[Any]]:
        """Return the exchanged variables, one by one."""
        return {path: variable.numpy() for path, variable in self.rival.items()}

    def set_dict(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Set the exchanged variables, one by one."""
        for path, variable in self.rival.items():
            variable.assign(arrays[path])

    def exchange_others(self, nbytes: float) -> None:
        """From now on, exchange as many variables of ``nbytes`` in all, without a network."""
        import tensorflow as tf

        from flatweights.tensorflow import TensorFlowVariables

        length = max(16, int(nbytes / 4 / len(self.rival)) // 16 * 16)
        paths = list(self.rival)
        ours, self.rival = ({p: tf.Variable(tf.ones(length)) for p in paths} for _ in range(2))
        self.variables = TensorFlowVariables(ours)

    def train_on(self) -> FlatWeights:
        """Train, and return the weights."""
        self.train()
        return self.get_weights()
