"""Operations on eager variables: called directly on the host, traced for other devices."""

import logging
from collections.abc import Mapping, Sequence
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
from flatweights.tensorflow._groups import Group, Operations, is_synchronized_on_reading
from flatweights.tensorflow.library._load import Library

# Tracing this many variables takes a second or more.
_MANY = 100

_lock = TurnLock()
_log = logging.getLogger("flatweights")


class EagerOperations(Operations):
    """Reads and writes eager variables."""

    def __init__(self, groups: list[Group], library: Library | None) -> None:
        """Take the variables of ``groups``."""
        self.groups = groups
        self.context = eager_context.context()
        self.lock = _lock
        self._library = library
        self._ways = {
            id(group): (_OnHost if _is_on_host(group) else _Elsewhere)(group, self.context)
            for group in groups
        }

    def check(self) -> None:
        """Wait for operations that this thread dispatched asynchronously."""
        if tf.inside_function():
            raise RuntimeError(
                "inside a tf.function weights would be moved once, when it is traced, and never "
                "again: call this outside"
            )
        wait()

    def place(self) -> object:
        """Return None, the one place of all eager variables."""
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

    def read(self, groups: Sequence[Group]) -> dict[int, NDArray[Any]]:
        """Run one operation per group."""
        values: dict[int, NDArray[Any]] = {}
        with eagerly():
            for group in groups:
                values.update(zip(group.slots, self._ways[id(group)].read(), strict=True))
        return values

    def write(self, values: Mapping[int, NDArray[Any]]) -> None:
        """Assign variables one by one on the host, and whole groups at once elsewhere."""
        with eagerly():
            for group in self.groups:
                own = group.among(values)
                if own:
                    self._ways[id(group)].write(own)


class _OnHost:
    """A group of variables in this process's memory, which needs no tracing.

    One operation reads all of them, and the results alias their memory.
    """

    def __init__(self, group: Group, context: Any) -> None:
        self._group = group
        self._context = context
        self._dtype = group.dtype.as_datatype_enum
        count = len(group.variables)
        self._reading = ("N", count, "dtypes", [self._dtype] * count)
        self._assigning = ("dtype", self._dtype, "validate_shape", False)

    def read(self) -> list[NDArray[Any]]:
        try:
            tensors = execute(
                b"_ReadVariablesOp",
                len(self._group.variables),
                [variable.handle for variable in self._group.variables],
                self._reading,
                self._context,
            )
        except (tf.errors.FailedPreconditionError, tf.errors.InvalidArgumentError) as error:
            self._raise_uninitialized(error)
            raise
        values = [as_array(tensor, "variable") for tensor in tensors]
        slots = self._group.layout.slots
        if any(value.size != slot.size for value, slot in zip(values, slots, strict=True)):
            self._raise_uninitialized(None)
        # A raw operation may have given a variable another shape.
        return [value.reshape(slot.shape) for value, slot in zip(values, slots, strict=True)]

    def write(self, values: Mapping[int, NDArray[Any]]) -> None:
        dtype = self._group.dtype.as_numpy_dtype
        own = {j: new_vector(v.size, np.dtype(dtype)).reshape(v.shape) for j, v in values.items()}
        move_parts(list(own.values()), list(values.values()))
        for j, array in own.items():
            handle = self._group.variables[j].handle
            execute(
                b"AssignVariableOp",
                0,
                [handle, _aliased(array, self._group.dtype, self._context)],
                self._assigning,
                self._context,
            )

    def _raise_uninitialized(self, error: Exception | None) -> None:
        pairs = zip(self._group.layout.slots, self._group.variables, strict=True)
        names = [repr(slot.name) for slot, v in pairs if not v.is_initialized()]
        if names:
            raise RuntimeError(
                f"expected initialized variables, got uninitialized: {', '.join(names)}; assign "
                "values first"
            ) from error


class _Elsewhere:
    """A group of variables on an accelerator or another machine, or with a value per replica.

    One `tf.function` reads all of them by one concat, in one transfer; another writes them.
    Both are traced at their first use. To avoid a cycle, neither refers to this object.
    """

    def __init__(self, group: Group, context: Any) -> None:
        self._group = group
        self._context = context

        def read() -> tf.Tensor:
            _tell_of_tracing(group)
            return group.concat()

        def write(packed: tf.Tensor) -> None:
            _tell_of_tracing(group)
            for variable, value in zip(group.variables, group.cut(packed), strict=True):
                variable.assign(value, read_value=False)

        signature = [tf.TensorSpec([group.packed_size], group.dtype)]
        self._read = tf.function(read, autograph=False)
        self._write = tf.function(write, autograph=False, input_signature=signature)

    def read(self) -> list[NDArray[Any]]:
        return self._group.layout.vector_views(as_array(self._read(), "variables"))

    def write(self, values: Mapping[int, NDArray[Any]]) -> None:
        if len(values) == len(self._group.slots):
            packed = self._group.copy_packed(values)
            self._write(_aliased(packed, self._group.dtype, self._context))
            return
        for j, value in values.items():
            self._group.variables[j].assign(value, read_value=False)


def _tell_of_tracing(group: Group) -> None:
    count = len(group.variables)
    if count >= _MANY:
        _log.warning("tracing the operations for %d variables, once", count)


def _aliased(array: NDArray[Any], dtype: tf.DType, context: Any) -> tf.Tensor:
    """Return a tensor over the memory of ``array``, which belongs to TensorFlow from now on.

    `tf.convert_to_tensor` would copy.
    """
    return tf.__internal__.EagerTensor(array, context.device_name, dtype.as_datatype_enum)


def _is_on_host(group: Group) -> bool:
    device = tf.DeviceSpec.from_string(group.device)
    is_here = device.device_type == "CPU" and device.job == "localhost"
    return is_here and not is_synchronized_on_reading(group.variables[0])


def wait() -> None:
    """Wait for operations that this thread dispatched asynchronously."""
    context = eager_context.context()
    if context.is_async():
        context.executor.wait()


def eagerly() -> Any:
    """Return a context that executes eagerly, even within ``with Graph().as_default()``."""
    return tf.__internal__.eager_context.eager_mode()
