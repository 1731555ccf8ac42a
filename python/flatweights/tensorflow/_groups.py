"""The variables of a model, in groups that are moved in one way."""

from collections.abc import Sequence

import tensorflow as tf

from flatweights._layout import Layout


class Group:
    """The variables of one device, one dtype and one kind.

    Attributes:
        slots: Their positions in the layout, ascending.
        variables: The variables themselves.
        layout: They alone, as a vector of their dtype.
        device: Where they live; empty if TensorFlow decides.
        obstacle: Why they cannot be bound, if that is known beforehand; else empty.
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
        self.obstacle = obstacle(self.variables[0])

    def concat(self) -> tf.Tensor:
        """Return the op that reads the variables into one vector."""
        with tf.device(self.device or None):
            # With its size, not -1: a raw operation may have given it another shape.
            pieces = [
                tf.reshape(variable.read_value(), [slot.size])
                for variable, slot in zip(self.variables, self.layout.slots, strict=True)
            ]
            return tf.concat(pieces, axis=0)

    def split(self, vector: tf.Tensor) -> list[tf.Tensor]:
        """Return the ops that cut a vector into values for the variables."""
        with tf.device(self.device or None):
            pieces = tf.split(vector, [slot.size for slot in self.layout.slots])
            return [
                tf.reshape(piece, slot.shape)
                for piece, slot in zip(pieces, self.layout.slots, strict=True)
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


def make_groups(variables: Sequence[tf.Variable], layout: Layout) -> list[Group]:
    """Return ``variables``, in the order of the slots of ``layout``, in groups."""
    slots: dict[tuple[str, tf.DType, str], list[int]] = {}
    for i, variable in enumerate(variables):
        key = (variable.device, variable.dtype.base_dtype, obstacle(variable))
        slots.setdefault(key, []).append(i)
    return [Group(variables, members, layout) for members in slots.values()]
