"""The variables of a model, grouped by how they are moved, and the operations that move them.

Dispatching one op per variable makes reading a model slow, so one operation per bucket reads
all of its variables.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from flatweights._core import move_parts
from flatweights._layout import Layout, layout_at
from flatweights._locks import TurnLock


class Bucket:
    """The variables of one device, one dtype and one kind.

    Attributes:
        slots: Their positions in the layout, ascending.
        variables: The variables themselves.
        layout: The layout of these variables alone.
        dtype: Their dtype.
        packed_size: Elements of their packed form, including the padding between slots.
        device: Their device; empty if TensorFlow decides.
        obstacle: Why they cannot be bound in any process; else empty.
    """

    def __init__(self, variables: Sequence[tf.Variable], slots: Sequence[int], layout: Layout):
        """Take those of ``variables`` that are at ``slots``."""
        self.slots = list(slots)
        self.variables = [variables[i] for i in slots]
        self.layout = layout_at(layout, slots)
        self.dtype: tf.DType = self.variables[0].dtype.base_dtype
        self.packed_size = self.layout.nbytes // self.dtype.size
        self.device: str = self.variables[0].device
        self.obstacle = obstacle(self.variables[0])

    def concat(self) -> tf.Tensor:
        """Return the op that reads the variables into one vector."""
        with tf.device(self.device or None):
            # The size, instead of -1, detects a shape that a raw operation has changed.
            pieces = [
                tf.reshape(variable.read_value(), [slot.size])
                for variable, slot in zip(self.variables, self.layout.slots, strict=True)
            ]
            return tf.concat(pieces, axis=0)

    def among(self, values: Mapping[int, NDArray[Any]]) -> dict[int, NDArray[Any]]:
        """Return the ``values`` of this bucket, by position in the bucket instead of the layout."""
        return {j: values[i] for j, i in enumerate(self.slots) if i in values}

    def copy_packed(self, values: Iterable[NDArray[Any]]) -> NDArray[Any]:
        """Return a packed copy of ``values``, one per variable, for `cut`."""
        buffer = self.layout.new_buffer()
        move_parts(self.layout.packed_views(buffer), list(values))
        return buffer.view(self.layout.dtype)

    def cut(self, packed: tf.Tensor) -> list[tf.Tensor]:
        """Return the ops that cut the packed form into values for the variables.

        They alias its memory where TensorFlow can: the slots are aligned for that.
        """
        with tf.device(self.device or None):
            return [
                tf.reshape(
                    tf.slice(packed, [slot.offset // slot.dtype.itemsize], [slot.size]), slot.shape
                )
                for slot in self.layout.slots
            ]


def obstacle(variable: tf.Variable) -> str:
    """Return why ``variable`` cannot be bound, whatever the process; empty if it can."""
    if is_synchronized_on_reading(variable):
        return "it is put together from its replicas when it is read"
    if getattr(variable, "handle", None) is None:
        return "it is of TF1's ref type, which has no handle"
    return ""


def is_synchronized_on_reading(variable: tf.Variable) -> bool:
    """Whether each replica has its own value, and reading combines them."""
    return (
        isinstance(variable, tf.distribute.DistributedValues)
        and variable.synchronization == tf.VariableSynchronization.ON_READ
    )


def assign(variable: tf.Variable, value: Any) -> None:
    """Assign ``value`` to an eager ``variable``, so that a read returns it.

    Of replicas that are summed when they are read, the first gets all of it. TensorFlow would give
    each an equal share, which integers lose the remainder of, and floats an error of rounding. It
    does so if other processes have some of the replicas.
    """
    if not (
        is_synchronized_on_reading(variable)
        and variable.aggregation == tf.VariableAggregation.SUM
        and variable.distribute_strategy.num_replicas_in_sync == len(variable.values)
    ):
        variable.assign(value, read_value=False)
        return
    first, *others = variable.values
    nothing = tf.zeros(first.shape, first.dtype)
    first.assign(value, read_value=False)
    for other in others:
        other.assign(nothing, read_value=False)


def make_buckets(variables: Sequence[tf.Variable], layout: Layout) -> list[Bucket]:
    """Return ``variables``, in the order of the slots of ``layout``, in buckets."""
    slots: dict[tuple[str, tf.DType, str], list[int]] = {}
    for i, variable in enumerate(variables):
        key = (variable.device, variable.dtype.base_dtype, obstacle(variable))
        slots.setdefault(key, []).append(i)
    return [Bucket(variables, members, layout) for members in slots.values()]


class Operations(ABC):
    """The operations on the variables of one model.

    Attributes:
        buckets: The variables.
        lock: Held from the first to the last operation of a call, and shared by all models that
            may have variables in common: so calls are atomic to each other.
        context: The context of eager TensorFlow; None for the variables of a session.
    """

    buckets: list[Bucket]
    lock: TurnLock
    context: Any = None

    @abstractmethod
    def check(self) -> None:
        """Wait for operations that were dispatched earlier.

        Raises:
            RuntimeError: If nothing can be moved now.
        """

    @abstractmethod
    def raw_session(self) -> object:
        """Return the session that holds the values; None if it is closed, or for eager variables.

        A binding is valid only in the session that it was made in.
        """

    @abstractmethod
    def bind(self, buckets: Sequence[Bucket]) -> list[NDArray[np.int64]]:
        """Run the binding op for each variable of ``buckets``; return its results."""

    @abstractmethod
    def read(self, buckets: Sequence[Bucket]) -> dict[int, NDArray[Any]]:
        """Return the values by position. Do not write to them: they may alias variables.

        Raises:
            RuntimeError: If a variable is not initialized; the message names it.
        """

    @abstractmethod
    def write(self, values: Mapping[int, NDArray[Any]]) -> None:
        """Set the variables at these positions to copies of results of `cast_for_slot`."""
