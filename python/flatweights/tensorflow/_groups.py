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
        has_handles: Whether they are resources; TF1's ref-type variables are not.
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
        self.has_handles = has_handle(self.variables[0])

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


def has_handle(variable: tf.Variable) -> bool:
    """Whether ``variable`` is a resource."""
    return getattr(variable, "handle", None) is not None


def make_groups(variables: Sequence[tf.Variable], layout: Layout) -> list[Group]:
    """Return ``variables``, in the order of the slots of ``layout``, in groups."""
    slots: dict[tuple[str, tf.DType, bool], list[int]] = {}
    for i, variable in enumerate(variables):
        key = (variable.device, variable.dtype.base_dtype, has_handle(variable))
        slots.setdefault(key, []).append(i)
    return [Group(variables, members, layout) for members in slots.values()]
