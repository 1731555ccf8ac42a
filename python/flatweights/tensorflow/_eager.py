"""Operations on eager variables: called directly on the host, traced for other devices."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from tensorflow.python.eager import context as eager_context
from tensorflow.python.eager.execute import execute

from flatweights._core import move_parts
from flatweights._flatten import new_vector
from flatweights._locks import TurnLock
from flatweights._trees import as_array
from flatweights.tensorflow._buckets import (
    Bucket,
    Operations,
    assign,
    is_synchronized_on_reading,
)
from flatweights.tensorflow.library._load import Library

_lock = TurnLock()

# Errors of reading a variable that has no value, or that was destroyed.
_UNREADABLE = (tf.errors.FailedPreconditionError, tf.errors.InvalidArgumentError)


class EagerOperations(Operations):
    """Reads and writes eager variables."""

    def __init__(self, buckets: list[Bucket], library: Library | None) -> None:
        """Take the variables of ``buckets``."""
        self.buckets = buckets
        self.context = eager_context.context()
        self.lock = _lock
        self._library = library
        self._ways = {
            id(bucket): (_OnHost if _is_on_host(bucket) else _Elsewhere)(bucket, self.context)
            for bucket in buckets
        }

    def check(self) -> None:
        """Wait for operations that this thread dispatched asynchronously."""
        if tf.inside_function():
            raise RuntimeError(
                "inside a tf.function weights would be moved once, when it is traced, and never "
                "again: call this outside"
            )
        wait()

    def raw_session(self) -> object:
        """Return None."""
        return None

    def bind(self, buckets: Sequence[Bucket]) -> list[NDArray[np.int64]]:
        """Run the op for each variable of ``buckets``."""
        assert self._library is not None
        with eagerly():
            return [
                np.asarray(self._library.bind(variable.handle))
                for bucket in buckets
                for variable in bucket.variables
            ]

    def read(self, buckets: Sequence[Bucket]) -> dict[int, NDArray[Any]]:
        """Run one operation per bucket."""
        values: dict[int, NDArray[Any]] = {}
        with eagerly():
            for bucket in buckets:
                values.update(zip(bucket.slots, self._ways[id(bucket)].read(), strict=True))
        return values

    def write(self, values: Mapping[int, NDArray[Any]]) -> None:
        """Assign variables one by one on the host, and whole buckets at once elsewhere.

        All values are converted before the first assignment, which a lack of memory or an interrupt
        in the conversion then leaves undone; except those of a part of a bucket elsewhere.
        """
        with eagerly():
            parts = [(bucket, bucket.among(values)) for bucket in self.buckets]
            writes = [self._ways[id(bucket)].converted(own) for bucket, own in parts if own]
            for write in writes:
                write()


class _OnHost:
    """A bucket of variables in this process's memory, which needs no tracing.

    One operation reads all of them, and the results alias their memory.
    """

    def __init__(self, bucket: Bucket, context: Any) -> None:
        self._bucket = bucket
        self._context = context
        count = len(bucket.variables)
        self._reading = ("N", count, "dtypes", [bucket.dtype.as_datatype_enum] * count)

    def read(self) -> list[NDArray[Any]]:
        try:
            tensors = execute(
                b"_ReadVariablesOp",
                len(self._bucket.variables),
                [variable.handle for variable in self._bucket.variables],
                self._reading,
                self._context,
            )
        except _UNREADABLE as error:
            _raise_uninitialized(self._bucket, error)
            raise
        values = [as_array(tensor, "variable") for tensor in tensors]
        slots = self._bucket.layout.slots
        if any(value.size != slot.size for value, slot in zip(values, slots, strict=True)):
            _raise_uninitialized(self._bucket, None)
        # A raw operation may have given a variable another shape.
        return [value.reshape(slot.shape) for value, slot in zip(values, slots, strict=True)]

    def converted(self, values: Mapping[int, NDArray[Any]]) -> Callable[[], None]:
        """Return a function that writes ``values``."""
        dtype = self._bucket.layout.dtype
        own = {j: new_vector(v.size, dtype).reshape(v.shape) for j, v in values.items()}
        move_parts(list(own.values()), list(values.values()))
        pairs = [
            (self._bucket.variables[j].handle, _aliased(array, self._bucket.dtype, self._context))
            for j, array in own.items()
        ]

        def write() -> None:
            for handle, value in pairs:
                tf.raw_ops.AssignVariableOp(resource=handle, value=value)

        return write


class _Elsewhere:
    """A bucket of variables on an accelerator or another machine, or with a value per replica.

    One `tf.function` reads all of them by one concat, in one transfer; another writes them.
    Both are traced at their first use. To avoid a cycle, neither refers to this object.
    """

    def __init__(self, bucket: Bucket, context: Any) -> None:
        self._bucket = bucket
        self._context = context

        def write(packed: tf.Tensor) -> None:
            for variable, value in zip(bucket.variables, bucket.cut(packed), strict=True):
                assign(variable, value)

        signature = [tf.TensorSpec([bucket.packed_size], bucket.dtype)]
        self._read = tf.function(bucket.concat, autograph=False)
        self._write = tf.function(write, autograph=False, input_signature=signature)

    def read(self) -> list[NDArray[Any]]:
        try:
            vector = as_array(self._read(), "variables")
        except _UNREADABLE as error:
            _raise_uninitialized(self._bucket, error)
            raise
        if vector.size != self._bucket.layout.size:
            _raise_uninitialized(self._bucket, None)
        return self._bucket.layout.vector_views(vector)

    def converted(self, values: Mapping[int, NDArray[Any]]) -> Callable[[], None]:
        """Return a function that writes ``values``."""
        if len(values) == len(self._bucket.slots):
            packed = self._bucket.copy_packed(values.values())
            return partial(self._write, _aliased(packed, self._bucket.dtype, self._context))

        def write() -> None:
            for j, value in values.items():
                assign(self._bucket.variables[j], value)

        return write


def _raise_uninitialized(bucket: Bucket, error: Exception | None) -> None:
    """Raise `RuntimeError` if variables are not initialized."""
    pairs = zip(bucket.layout.slots, bucket.variables, strict=True)
    names = [repr(slot.name) for slot, v in pairs if not v.is_initialized()]
    if names:
        raise RuntimeError(
            f"expected initialized variables, got uninitialized: {', '.join(names)}; assign "
            "values first"
        ) from error


def _aliased(array: NDArray[Any], dtype: tf.DType, context: Any) -> tf.Tensor:
    """Return a tensor over the memory of ``array``, which belongs to TensorFlow from now on.

    `tf.convert_to_tensor` would copy.
    """
    return tf.__internal__.EagerTensor(array, context.device_name, dtype.as_datatype_enum)


def _is_on_host(bucket: Bucket) -> bool:
    device = tf.DeviceSpec.from_string(bucket.device)
    is_here = device.device_type == "CPU" and device.job == "localhost"
    return is_here and not is_synchronized_on_reading(bucket.variables[0])


def wait() -> None:
    """Wait for operations that this thread dispatched asynchronously."""
    context = eager_context.context()
    if context.is_async():
        context.executor.wait()


def check_outside_of_scopes() -> None:
    """Raise `RuntimeError` within the scope of a strategy, where TensorFlow trains nothing."""
    if tf.distribute.in_cross_replica_context():
        raise RuntimeError(
            "within the scope of a tf.distribute strategy TensorFlow computes and applies no "
            "gradients: call this outside, which updates all replicas"
        )


def eagerly() -> Any:
    """Return a context that executes eagerly, even within ``with Graph().as_default()``."""
    return tf.__internal__.eager_context.eager_mode()
