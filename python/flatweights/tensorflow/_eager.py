"""Eager variables, moved by one `tf.function` that reads and one that writes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from flatweights._layout import Layout
from flatweights.tensorflow._transport import Transport


class EagerTransport(Transport):
    """Reads and writes eager variables; each function is traced once."""

    def __init__(self, variables: Sequence[tf.Variable], layout: Layout) -> None:
        """Take ``variables`` in the order of the slots of ``layout``."""
        super().__init__(variables, layout)
        self._variables = list(variables)
        groups = self._groups  # the functions hold no reference to self: no cycle

        def read() -> list[tf.Tensor]:
            return [group.concat() for group in groups]

        def write(*vectors: tf.Tensor) -> None:
            for group, vector in zip(groups, vectors, strict=True):
                for variable, value in zip(group.variables, group.split(vector), strict=True):
                    variable.assign(value, read_value=False)

        signature = [tf.TensorSpec([group.layout.size], group.dtype) for group in groups]
        self._read_function = tf.function(read, autograph=False)
        self._write_function = tf.function(write, autograph=False, input_signature=signature)

    def _read(self) -> list[NDArray[Any]]:
        with _eagerly():
            return [np.asarray(vector) for vector in self._read_function()]

    def _write(self, vectors: list[NDArray[Any]]) -> None:
        with _eagerly():
            self._write_function(*(tf.convert_to_tensor(vector) for vector in vectors))

    def _write_some(self, values: dict[int, NDArray[Any]]) -> None:
        with _eagerly():
            for i, value in values.items():
                self._variables[i].assign(value, read_value=False)


def _eagerly() -> Any:
    """Return a context in which calls run at once, also within ``with Graph().as_default()``."""
    if tf.inside_function():
        raise RuntimeError(
            "inside a tf.function weights would be moved once, when it is traced, and never "
            "again: call this outside"
        )
    return tf.__internal__.eager_context.eager_mode()
