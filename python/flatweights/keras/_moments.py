"""Moments over the batches of all members, for ``BatchNormalization(synchronized=True)``.

Each member computes count, mean and variance of its own batch. Their sums over members travel as
one vector, in float64, since the variance is the difference of two of them. Its gradient is another
call, in the backward pass. All members run the same program, and make these calls in its order, so
the n-th layer of one meets the n-th of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from flatweights.keras._hooks import replace_moments
from flatweights.keras._weak_set import SharedWeakSet

Find = Callable[[Sequence[Any]], Any]

# Layers whose moments were computed without members, because no optimizer was known for them.
_alone = SharedWeakSet[Any]()


def synchronize(find: Find) -> None:
    """Make synchronized layers of this process use the moments of all members.

    Args:
        find: Called with the trainable variables of a layer; returns the `Averaging` of the
            optimizer that trains it. If that is None, Keras computes the layer's moments.
    """
    replace_moments(lambda layer, inputs, mask, local: _moments(find, layer, inputs, mask, local))


def check_synchronized(variables: Sequence[Any]) -> None:
    """Raise if a step that trains ``variables`` has used a layer's own moments.

    A step computes moments before it applies gradients, so a loop that does not build the optimizer
    first leaves the layer without one.
    """
    alone = [*_alone]
    if not alone:
        return
    ids = {id(one) for one in variables}
    for layer in alone:
        if not ids.isdisjoint(map(id, layer.trainable_variables)):
            raise RuntimeError(
                f"average_gradients: expected an optimizer that is built before the first call of "
                f"the layer {layer.name!r}, which is synchronized, got one that is built after it. "
                "Call optimizer.build(model.trainable_variables) before the loop"
            )


def _moments(
    find: Find, layer: Any, inputs: tf.Tensor, mask: Any, local: Callable[[], Any]
) -> tuple[tf.Tensor, tf.Tensor]:
    averaging = find(layer.trainable_variables)
    if averaging is None:
        _alone.add(layer)
        own: tuple[tf.Tensor, tf.Tensor] = local()
        return own
    _alone.discard(layer)
    if averaging.step.rule is not None:
        raise ValueError(
            f"rule: expected None with the layer {layer.name!r}, which is synchronized, got "
            f"{averaging.step.rule.name}: moments are means, so one member can spoil those of all"
        )
    axes = [k for k in range(inputs.shape.rank) if k != layer.axis % inputs.shape.rank]
    if mask is None:
        mean, variance = tf.nn.moments(inputs, axes)
        count = tf.size(inputs) // tf.size(mean) * tf.ones(tf.shape(mean), tf.int32)
    else:
        mean, variance = (tf.reshape(one, [-1]) for one in local())
        present = tf.broadcast_to(tf.cast(mask, tf.bool)[..., tf.newaxis], tf.shape(inputs))
        count = tf.math.count_nonzero(present, axes, dtype=tf.int32)
    count, mean, variance = (tf.cast(one, tf.float64) for one in (count, mean, variance))
    # Means over no samples are NaN, which must not reach the other members.
    moments = (tf.math.multiply_no_nan(one, count) for one in (mean, variance + mean**2))
    sums = tf.concat([count, *moments], 0)
    sums.set_shape(3 * inputs.shape[layer.axis])
    count, mean, square = tf.split(averaging.step.mean(sums, averaging.moments_of(layer)), 3)
    mean = tf.math.divide_no_nan(mean, count)
    variance = tf.maximum(tf.math.divide_no_nan(square, count) - mean**2, 0.0)
    return tf.cast(mean, inputs.dtype), tf.cast(variance, inputs.dtype)
