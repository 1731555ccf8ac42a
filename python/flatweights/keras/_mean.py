"""`mean_over_members`: a tensor of a step, averaged over members."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from flatweights.keras._gradients import averaging_of, averaging_of_optimizer
from flatweights.keras._hooks import running_fit
from flatweights.tensorflow._python_op import unconverted


@unconverted
def mean_over_members(tensor: Any, optimizer: Any = None, *, name: str = "tensor") -> tf.Tensor:
    """Return the mean of ``tensor`` over all members, within a step of `average_gradients`.

    It is differentiable: its gradient is the mean of the members' gradients. So the gradients that
    `average_gradients` averages are those of the mean of the members' losses, as in one process.
    Each call waits for the other members, and so does its gradient. All members make the same calls
    in the same order, with tensors of one shape and dtype, and only in a step that trains: a layer
    that calls it does so if ``training``, so that ``evaluate`` and ``predict`` do not wait.

    >>> import keras
    >>> import flatweights.ray
    >>> member = flatweights.ray.join("mean", rank=0, size=1)
    >>> optimizer = average_gradients(keras.optimizers.SGD(), member=member)
    >>> mean_over_members(tf.constant([1.0, 2.0]), optimizer).numpy()
    array([1., 2.], dtype=float32)
    >>> member.leave()

    Args:
        tensor: A tensor of floating-point numbers, whose shape is known when the step is traced.
        optimizer: An optimizer of `average_gradients`, whose ``member``, ``timeout`` and
            ``min_results`` this call uses. If None, that of the ``fit`` that runs.
        name: What it is, such as ``"centers"``. If one step averages several tensors of one shape,
            their names keep them apart for a member that is late.

    Returns:
        A tensor of the same shape and dtype.

    Raises:
        RuntimeError: If there is no such optimizer, or XLA compiles the step.
        TypeError: If the tensor has no floating-point numbers.
        ValueError: If the shape is not known, or the tensor is empty.
    """
    tensor = tf.convert_to_tensor(tensor)
    if not tensor.dtype.is_floating:
        raise TypeError(f"tensor: expected floating-point numbers, got {tensor.dtype.name}")
    if not tensor.shape.num_elements():
        raise ValueError(
            f"tensor: expected a known shape, not empty, got {tensor.shape}: all members average "
            "tensors of one shape"
        )
    if optimizer is None:
        fit = running_fit()
        averaging = None if fit is None else averaging_of(fit.model)
    else:
        averaging = averaging_of_optimizer(optimizer)
    if averaging is None:
        raise RuntimeError(
            "mean_over_members: expected a fit whose optimizer averages gradients, or such an "
            "optimizer as an argument, as in mean_over_members(tensor, average_gradients(...)), "
            f"got {'no such fit' if optimizer is None else type(optimizer).__name__}"
        )
    return averaging.step.mean(tensor, name)
