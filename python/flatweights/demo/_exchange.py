"""How weights or gradients leave TensorFlow and enter it, in a worker, both ways."""

from typing import Any, Protocol

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from flatweights import FlatWeights, Layout, flatten, unflatten
from flatweights.demo import _dict_loop
from flatweights.ray import FlatWorker


class Exchange(Protocol):
    """What a worker does before it sends and after it has received."""

    def gather(self, gradients: list[tf.Tensor]) -> Any:
        """Return what to send: the weights, or these gradients."""

    def scatter(self, received: Any) -> list[tf.Tensor]:
        """Set the weights; or return the gradients."""


class FlatWeightsExchange:
    """Weights in one packed buffer."""

    def __init__(self, worker: FlatWorker) -> None:
        self._worker = worker

    def gather(self, gradients: list[tf.Tensor]) -> FlatWeights:
        """Return the weights."""
        return self._worker.get_weights()

    def scatter(self, received: FlatWeights) -> list[tf.Tensor]:
        """Set the weights."""
        self._worker.set_weights(received)
        return []


class FlatGradientsExchange:
    """Gradients in one vector."""

    def __init__(self, variables: list[Any]) -> None:
        self._layout = Layout.of([np.zeros(v.shape, np.float32) for v in variables])

    def gather(self, gradients: list[tf.Tensor]) -> NDArray[Any]:
        """Return the gradients."""
        return flatten([np.asarray(gradient) for gradient in gradients])

    def scatter(self, received: NDArray[Any]) -> list[tf.Tensor]:
        """Return the gradients."""
        return [tf.constant(part) for part in unflatten(received, self._layout)]


class DictWeightsExchange:
    """Weights in a dict, one array per variable."""

    def __init__(self, variables: list[Any]) -> None:
        self._variables = {v.path: v.value for v in variables}

    def gather(self, gradients: list[tf.Tensor]) -> _dict_loop.Weights:
        """Return the weights."""
        return _dict_loop.read_tensors(self._variables)

    def scatter(self, received: _dict_loop.Weights) -> list[tf.Tensor]:
        """Set the weights."""
        _dict_loop.assign_variables(self._variables, received)
        return []


class DictGradientsExchange:
    """Gradients in a dict, one array per variable."""

    def __init__(self, variables: list[Any]) -> None:
        self._names = [v.path for v in variables]

    def gather(self, gradients: list[tf.Tensor]) -> _dict_loop.Weights:
        """Return the gradients."""
        return _dict_loop.read_tensors(dict(zip(self._names, gradients, strict=True)))

    def scatter(self, received: _dict_loop.Weights) -> list[tf.Tensor]:
        """Return the gradients."""
        return [tf.constant(received[name]) for name in self._names]
