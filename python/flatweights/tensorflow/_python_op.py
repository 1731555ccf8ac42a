"""Runs Python functions as operations of a graph, by the op library or else by TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from flatweights import _core
from flatweights.tensorflow.library._load import load_library

Compute = Callable[[list[NDArray[Any]], list[NDArray[Any]]], None]

_CALLS = "_flatweights_calls"  # attribute of a graph: the calls that it keeps alive


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def compute_in_python(compute: Compute, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return the tensors that ``compute(inputs, outputs)`` computes from ``tensors``.

    There are as many, of the same shapes. In a `tf.function`, the op library lets ``compute`` read
    and write the memory of the tensors directly, which costs a tenth of a `tf.py_function`; without
    the library, TensorFlow copies them. Either way, an exception of ``compute`` becomes a
    `tf.errors.OpError` with its text.

    Args:
        compute: Called with one-dimensional arrays to read and to write. The two may be the same
            memory, and become invalid when it returns.
        tensors: At least one, on the host.
    """
    library = None if tf.executing_eagerly() else load_library()
    if library is None:
        return _compute_in_numpy(compute, tensors)
    dtypes = [tensor.dtype.as_numpy_dtype for tensor in tensors]
    call = _core.PythonCall(compute, [np.dtype(dtype) for dtype in dtypes])
    graph = tf.compat.v1.get_default_graph()
    while hasattr(graph, "outer_graph"):  # the op may run as long as one of these graphs exists
        if not hasattr(graph, _CALLS):
            setattr(graph, _CALLS, [])
        getattr(graph, _CALLS).append((call, compute))
        graph = graph.outer_graph
    outputs: list[tf.Tensor] = library.call(tensors, id=call.id)
    return outputs


def _compute_in_numpy(compute: Compute, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    def call(*inputs: NDArray[Any]) -> list[NDArray[Any]]:
        outputs = [np.empty_like(one) for one in inputs]
        compute([one.reshape(-1) for one in inputs], [one.reshape(-1) for one in outputs])
        return outputs

    if tf.executing_eagerly():
        return [*map(tf.convert_to_tensor, call(*(tensor.numpy() for tensor in tensors)))]
    outputs: list[tf.Tensor] = tf.numpy_function(call, tensors, [one.dtype for one in tensors])
    for output, tensor in zip(outputs, tensors, strict=True):
        output.set_shape(tensor.shape)
    return outputs
