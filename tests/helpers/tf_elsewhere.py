"""Another process, in which other models were built before: it builds, gets and sets models."""

import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

from tf_forks import Forks

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


class Elsewhere:
    """Runs functions of this module in another process, one after the other."""

    def __init__(self, forks: Forks) -> None:
        with Listener(family="AF_UNIX") as listener:
            program = (
                "import sys; sys.path[:0] = sys.argv[1:2]; import tf_elsewhere as e; e.serve()"
            )
            self._process = forks.start(program, Path(__file__).parent, listener.address)
            self._here = listener.accept()

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        self._here.send((function.__name__, args))

    def result(self) -> Any:
        value, error = self._here.recv()
        if error:
            raise RuntimeError(error)
        return value

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        self.start(function, *args)
        return self.result()

    def stop(self) -> None:
        self._here.close()
        _, errors = self._process.communicate(60)
        assert self._process.returncode == 0, errors


def serve() -> None:
    os.environ["FLATWEIGHTS_TENSORFLOW"] = "ops"
    make_history()
    with Client(sys.argv[2]) as connection:
        while True:
            try:
                name, args = connection.recv()
            except EOFError:
                return
            try:
                connection.send((globals()[name](*args), None))
            except Exception:
                connection.send((None, traceback.format_exc()))


def make_history() -> None:
    """Advance the counters by which Keras and TensorFlow number names."""
    import keras
    import tf_keras
    from tf_kinds import KINDS

    keras.utils.set_random_seed(1)
    for name in ("keras_functional", "tf_keras_sequential"):
        KINDS[name]()
    for _ in range(9):  # the next names have two digits
        keras.Variable(0.0), keras.random.SeedGenerator(), keras.optimizers.Adam()
        keras.Sequential(), keras.layers.Dense(1), keras.layers.Conv2D(1, 1), keras.layers.LSTM(1)
        tf_keras.Sequential(), tf_keras.layers.Dense(1), tf_keras.layers.LSTM(1)
        tf_keras.optimizers.Adam()


_given: list[Any] = []


def give(name: str) -> Any:
    """Build a kind of model; return its weights."""
    from tf_kinds import KINDS

    from flatweights.tensorflow import TensorFlowVariables

    _given[:] = [TensorFlowVariables(KINDS[name]().output)]
    return _given[0].get_weights()


def take(weights: Any) -> dict[str, Any]:
    """Set the model of `give`; return the values that its own framework then reads."""
    from tf_kinds import value

    (model,) = _given
    model.set_weights(weights, strict=True)
    return {key: value(variable) for key, variable in model.variables.items()}


def give_application(module: str, name: str) -> Any:
    """Build an architecture; return its weights."""
    from flatweights.tensorflow import TensorFlowVariables

    return TensorFlowVariables(application(module, name)).get_weights()


def application(module: str, name: str) -> Any:
    """Build an architecture of `keras.applications` with random weights."""
    import keras
    import tf_keras

    applications = {"keras": keras, "tf_keras": tf_keras}[module].applications
    return getattr(applications, name)(
        weights=None, include_top=False, pooling="avg", input_shape=(96, 96, 3)
    )


def train(module: str, steps: int, start: Any, more: int) -> tuple[Any, Any]:
    """Train from ``start``, if any; return the whole state after ``steps``, and after ``more``."""
    import keras
    import numpy as np
    import tf_keras

    from flatweights.tensorflow import TensorFlowVariables

    of_module = {"keras": keras, "tf_keras": tf_keras}[module]
    layers = [of_module.layers.Dense(3, activation="tanh"), of_module.layers.BatchNormalization()]
    if module == "keras":  # the state of `tf_keras`'s dropout is not a variable
        layers.append(of_module.layers.Dropout(0.5))
    model = of_module.Sequential([of_module.Input((4,)), *layers, of_module.layers.Dense(2)])
    model.compile(of_module.optimizers.Adam(0.05), "mse")
    model.optimizer.build(model.trainable_variables)
    weights = TensorFlowVariables([model, model.optimizer])
    if start is not None:
        weights.set_weights(start, strict=True)

    def fit(epochs: int) -> Any:
        x, y = np.random.default_rng(0).normal(size=(2, 8, 4)).astype(np.float32)
        model.fit(x, y[:, :2], epochs=epochs, shuffle=False, verbose=0)
        return weights.get_weights()

    return (fit(steps) if steps else start), fit(more)
