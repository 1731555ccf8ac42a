"""Runs Python functions as operations of a graph, by the op library or else by TensorFlow."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from flatweights import _core
from flatweights._layout import Layout
from flatweights.tensorflow._eager import wait
from flatweights.tensorflow._order import CALL
from flatweights.tensorflow.library._load import load_library

Compute = Callable[[_core.CalledTensors], None]
Function = TypeVar("Function", bound=Callable[..., Any])

HOST = "CPU:0"

# Attributes of a graph: the calls that it keeps alive, and the operation of the last one, since
# TensorFlow keeps no order in the gradient of a function that is called eagerly.
_CALLS, _LAST = "_flatweights_calls", "_flatweights_last_call"


def unconverted(function: Function) -> Function:
    """Return ``function``, so that AutoGraph leaves it, and what it calls, as they are.

    They have no conditions on tensors. Rewriting them would take seconds when a user's function is
    first traced.
    """
    left: Function = tf.autograph.experimental.do_not_convert(function)
    return left


def device_of(variables: Sequence[Any]) -> str:
    """Return the device on which to compute tensors like ``variables``.

    It is the GPU that all of them are on, if the op library reads and writes its memory; else the
    host, to which TensorFlow copies tensors of GPUs one by one.
    """
    devices = {str(variable.device) for variable in variables}
    device = devices.pop() if len(devices) == 1 else ""
    if "GPU:" in device and load_library() is not None and not _core.device_obstacle():
        return device
    return HOST


@unconverted
def end_copy_on_read(variable: tf.Variable) -> None:
    """Have TensorFlow no longer copy all of a variable of the host at each read.

    It does so from the first update of some rows on: with a large table, that takes longer than all
    else in a step. Without the op library, it goes on to.
    """
    library = load_library()
    if library is not None:
        library.end_copy_on_read(variable.handle)


@unconverted
def compute_in_python(
    compute: Compute,
    tensors: Sequence[tf.Tensor],
    device: str = HOST,
    *,
    kept_in: list[Compute] | None = None,
) -> list[tf.Tensor]:
    """Return the tensors that ``compute(called)`` computes from ``tensors``.

    There are as many, of the same shapes. Calls are made in the order of the program. In a
    `tf.function`, the op library lets ``compute`` read and write the memory of the tensors
    directly, on the host or on a GPU, which costs a tenth of a `tf.py_function`; without the
    library, TensorFlow copies them. Either way, an exception of ``compute`` becomes a
    `tf.errors.OpError` with its text.

    Args:
        compute: Called with the tensors, which `flatweights._core.CalledTensors` moves to and from
            packed buffers. They are invalid when it returns.
        tensors: At least one.
        device: One that `device_of` has returned.
        kept_in: What keeps ``compute``, in place of the graph that is traced. TensorFlow keeps
            some graphs for ever, with all that they refer to: the registry of gradients has the
            tensors of each `tf.custom_gradient`, such as that of the ``all_reduce`` in every step
            of Keras.
    """
    if tf.executing_eagerly():
        return _compute_eagerly(compute, tensors, device)
    if kept_in is not None:
        kept_in.append(compute)
        compute = _weakly(compute)
    library = load_library()
    graph = tf.compat.v1.get_default_graph()
    before = getattr(graph, _LAST, None)
    with tf.device(device), tf.control_dependencies([] if before is None else [before]):
        if library is None:
            outputs = _compute_in_numpy(compute, tensors)
        else:
            outputs = library.call(tensors, id=_kept(compute, tensors, graph), name=CALL)
    setattr(graph, _LAST, outputs[0].op)
    return outputs


def _weakly(compute: Compute) -> Compute:
    """Return what calls ``compute``, but does not keep it."""
    found = weakref.ref(compute)

    def call(called: _core.CalledTensors) -> None:
        kept = found()
        if kept is None:
            raise RuntimeError(
                "expected that the optimizer of a step lives as long as the step, but it is gone"
            )
        kept(called)

    return call


def _kept(compute: Compute, tensors: Sequence[tf.Tensor], graph: Any) -> int:
    """Return the id by which the op library calls ``compute``, as long as ``graph`` exists."""
    dtypes = [tensor.dtype.as_numpy_dtype for tensor in tensors]
    call = _core.PythonCall(compute, [np.dtype(dtype) for dtype in dtypes])
    while hasattr(graph, "outer_graph"):  # the op may run as long as one of these exists
        if not hasattr(graph, _CALLS):
            setattr(graph, _CALLS, [])
        getattr(graph, _CALLS).append((call, compute))
        graph = graph.outer_graph
    return call.id


def _compute_eagerly(
    compute: Compute, tensors: Sequence[tf.Tensor], device: str
) -> list[tf.Tensor]:
    if device != HOST:
        with tf.device(device):
            results = [tf.raw_ops.Empty(shape=one.shape, dtype=one.dtype) for one in tensors]
        wait()
        layout = _layout_of(*((one.shape.num_elements(), one.dtype) for one in tensors))
        on_gpu = _core.CalledTensors.on_gpu([*tensors], results, layout.core)
        if on_gpu is not None:
            compute(on_gpu)
            return results
    outputs = _computed(compute, [tensor.numpy() for tensor in tensors])
    return [*map(tf.convert_to_tensor, outputs)]


@functools.lru_cache(maxsize=64)
def _layout_of(*vectors: tuple[int, tf.DType]) -> Layout:
    names = [*map(str, range(len(vectors)))]
    shapes = [(size,) for size, _ in vectors]
    return Layout(names, shapes, [dtype.as_numpy_dtype for _, dtype in vectors])


def _compute_in_numpy(compute: Compute, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    def call(*inputs: Any) -> list[NDArray[Any]]:
        return _computed(compute, inputs)

    dtypes = [tensor.dtype for tensor in tensors]
    outputs: list[tf.Tensor] = tf.numpy_function(call, tensors, dtypes, name=CALL)
    for output, tensor in zip(outputs, tensors, strict=True):
        output.set_shape(tensor.shape)
    return outputs


def _computed(compute: Compute, values: Sequence[Any]) -> list[NDArray[Any]]:
    inputs = [*map(np.asarray, values)]  # scalars, too
    outputs = [*map(np.empty_like, inputs)]
    compute(_core.CalledTensors(inputs, outputs))
    return outputs
