"""Moving all variables at once, one vector per device and dtype.

Dispatching one TensorFlow op per variable is what makes reading a model slow; here one
concat per device and dtype reads all, and one split writes all.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from flatweights._cast import move_parts
from flatweights._layout import Layout


class Group:
    """The variables of one device and one dtype.

    Attributes:
        slots: Their positions in the layout, ascending.
        variables: The variables themselves.
        layout: They alone, as a vector of their dtype.
        device: Where they live; empty if TensorFlow decides.
    """

    def __init__(self, variables: Sequence[tf.Variable], slots: Sequence[int], layout: Layout):
        """Take those of ``variables`` that are at ``slots``."""
        self.slots = list(slots)
        self.variables = [variables[i] for i in slots]
        members = [layout.slots[i] for i in slots]
        self.layout = Layout(
            [slot.name for slot in members],
            [slot.shape for slot in members],
            [slot.dtype for slot in members],
        )
        self.dtype: tf.DType = self.variables[0].dtype.base_dtype
        self.device: str = self.variables[0].device

    def concat(self) -> tf.Tensor:
        """Return the op that reads the variables into one vector."""
        with tf.device(self.device or None):
            return tf.concat([tf.reshape(v.read_value(), [-1]) for v in self.variables], axis=0)

    def split(self, vector: tf.Tensor) -> list[tf.Tensor]:
        """Return the ops that cut a vector into values for the variables."""
        with tf.device(self.device or None):
            pieces = tf.split(vector, [slot.size for slot in self.layout.slots])
            return [
                tf.reshape(piece, slot.shape)
                for piece, slot in zip(pieces, self.layout.slots, strict=True)
            ]


def make_groups(variables: Sequence[tf.Variable], layout: Layout) -> list[Group]:
    """Return ``variables`` in groups of one device and dtype."""
    slots: dict[tuple[str, tf.DType], list[int]] = {}
    for i, variable in enumerate(variables):
        slots.setdefault((variable.device, variable.dtype.base_dtype), []).append(i)
    return [Group(variables, members, layout) for members in slots.values()]


class Transport(ABC):
    """All variables of a model, read and written together."""

    def __init__(self, variables: Sequence[tf.Variable], layout: Layout) -> None:
        """Take ``variables`` in the order of the slots of ``layout``."""
        self._layout = layout
        self._groups = make_groups(variables, layout)

    def gather(self, targets: Sequence[NDArray[Any]]) -> None:
        """Read every variable into its target, one array per slot, cast to its dtype."""
        pairs: list[tuple[NDArray[Any], NDArray[Any]]] = []
        for group, vector in zip(self._groups, self._read(), strict=True):
            pieces = group.layout.vector_views(vector)
            pairs += zip((targets[i] for i in group.slots), pieces, strict=True)
        move_parts([target for target, _ in pairs], [piece for _, piece in pairs])

    def scatter(self, sources: Sequence[NDArray[Any]]) -> None:
        """Write every variable from its source, one array per slot, made by `settable`."""
        vectors = []
        for group in self._groups:
            vector = np.empty(group.layout.size, group.dtype.as_numpy_dtype)
            move_parts(group.layout.vector_views(vector), [sources[i] for i in group.slots])
            vectors.append(vector)
        self._write(vectors)

    def scatter_some(self, sources: Mapping[int, NDArray[Any]]) -> None:
        """Write the variables at these positions, from arrays made by `settable`."""
        # A session aliases aligned arrays that it is fed, and a variable that they are
        # assigned to goes on doing so: it must not see what becomes of the caller's.
        slots = [self._layout.slots[i] for i in sources]
        private = [np.empty(slot.shape, slot.dtype) for slot in slots]
        move_parts(private, list(sources.values()))
        self._write_some(dict(zip(sources, private, strict=True)))

    @abstractmethod
    def _read(self) -> list[NDArray[Any]]:
        """Return one vector per group, which may alias a variable: it is not written to."""

    @abstractmethod
    def _write(self, vectors: list[NDArray[Any]]) -> None:
        """Set the variables from one vector per group, which TensorFlow may keep."""

    @abstractmethod
    def _write_some(self, values: dict[int, NDArray[Any]]) -> None:
        """Set the variables at these positions, from arrays that TensorFlow may keep."""
