"""Operations on eager variables: one `tf.function` for each group that reads, one that writes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from tensorflow.python.eager import context as eager_context

from flatweights.tensorflow._groups import Group
from flatweights.tensorflow._library import Library
from flatweights.tensorflow._operations import Operations


class EagerOperations(Operations):
    """Reads and writes eager variables; each function is traced once, at its first use."""

    def __init__(
        self, variables: Sequence[tf.Variable], groups: list[Group], library: Library | None
    ) -> None:
        """Take ``variables`` in the order of the slots of their layout, and in ``groups``."""
        self.groups = groups
        self.context = eager_context.context()
        self._variables = list(variables)
        self._library = library
        self._functions = {id(group): _Functions(group) for group in groups}

    def check(self) -> None:
        """Wait for operations that this thread dispatched to run later."""
        if tf.inside_function():
            raise RuntimeError(
                "inside a tf.function weights would be moved once, when it is traced, and never "
                "again: call this outside"
            )
        if self.context.is_async():
            self.context.executor.wait()

    def place(self) -> object:
        """Return the one place there is."""
        return None

    def bind(self, groups: Sequence[Group]) -> list[NDArray[np.int64]]:
        """Run the op for each variable of ``groups``."""
        assert self._library is not None
        with eagerly():
            return [
                np.asarray(self._library.bind(variable.handle))
                for group in groups
                for variable in group.variables
            ]

    def read(self, groups: Sequence[Group]) -> list[NDArray[Any]]:
        """Run one concat per group."""
        with eagerly():
            return [np.asarray(self._functions[id(group)].read()) for group in groups]

    def write(self, groups: Sequence[Group], vectors: Sequence[NDArray[Any]]) -> None:
        """Run one split per group."""
        with eagerly():
            tensors = [tf.convert_to_tensor(vector) for vector in vectors]
            for group, tensor in zip(groups, tensors, strict=True):
                self._functions[id(group)].write(tensor)

    def write_some(self, values: Mapping[int, NDArray[Any]]) -> None:
        """Assign each."""
        with eagerly():
            for i, value in values.items():
                self._variables[i].assign(value, read_value=False)


class _Functions:
    """The functions of one group; they hold no reference to their owner: no cycle."""

    def __init__(self, group: Group) -> None:
        def write(vector: tf.Tensor) -> None:
            for variable, value in zip(group.variables, group.split(vector), strict=True):
                variable.assign(value, read_value=False)

        signature = [tf.TensorSpec([group.layout.size], group.dtype)]
        self.read = tf.function(group.concat, autograph=False)
        self.write = tf.function(write, autograph=False, input_signature=signature)


def eagerly() -> Any:
    """Return a context in which calls run at once, also within ``with Graph().as_default()``."""
    return tf.__internal__.eager_context.eager_mode()
