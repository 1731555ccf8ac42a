"""Tells apart models, layers, optimizers and variables of Keras 3, `tf_keras` and TensorFlow.

Names of variables here depend only on the structure. TensorFlow and Keras repeat names (every
layer has a ``kernel``) and number automatic ones by counters of the process (``dense_7`` in one,
``dense`` in the other).
"""

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute.sharded_variable import ShardedVariableMixin

KeyPath = tuple[str, ...]
"""Attribute names, keys and positions that lead to a variable."""


def is_of_keras_3(value: Any, name: str) -> bool:
    """Whether ``value`` is an instance of Keras 3's class of this name; False without Keras."""
    kind: Any = sys.modules.get("keras")
    for part in name.split("."):
        kind = getattr(kind, part, None)
    if name == "Variable" and isinstance(kind, type):
        kind = kind.__mro__[1]  # up to Keras 3.6, layers have variables of that class only
    return isinstance(kind, type) and isinstance(value, kind)


def is_variable(value: Any) -> bool:
    """Whether ``value`` is a `tf.Variable`, partitioned or not, or a Keras 3 variable."""
    return (
        isinstance(value, tf.Variable) or is_of_keras_3(value, "Variable") or is_partitioned(value)
    )


def is_symbolic(value: Any) -> bool:
    """Whether ``value`` is an operation or a tensor of a graph."""
    return isinstance(value, tf.Operation) or (
        isinstance(value, tf.Tensor) and tf.is_symbolic_tensor(value)
    )


def is_partitioned(value: Any) -> bool:
    """Whether ``value`` presents several variables as one, and iterates over them."""
    return isinstance(value, ShardedVariableMixin) or (
        type(value).__name__ == "PartitionedVariable" and hasattr(value, "_variable_list")
    )


def is_layer(value: Any) -> bool:
    """Whether ``value`` is a model or layer, of Keras 3 or `tf_keras`."""
    return is_of_keras_3(value, "Layer") or is_layer_of_keras_2(value)


def is_layer_of_keras_2(value: Any) -> bool:
    """Whether ``value`` is a model or layer of `tf_keras`, or of TensorFlow's own copy of it."""
    return _is_of_keras_2(value) and hasattr(value, "_flatten_layers")


def is_optimizer(value: Any) -> bool:
    """Whether ``value`` is an optimizer of Keras 3, `tf_keras` or TF1."""
    if is_of_keras_3(value, "Optimizer") or isinstance(value, tf.compat.v1.train.Optimizer):
        return True
    return _is_of_keras_2(value) and hasattr(value, "apply_gradients")


def is_sequential(layer: Any) -> bool:
    """Whether ``layer`` is a `Sequential`, whose layers may be replaced."""
    return any(kind.__name__ == "Sequential" for kind in type(layer).__mro__)


def is_sequential_or_functional(layer: Any) -> bool:
    """Whether ``layer`` holds its layers in a list of its own, rather than in attributes."""
    return is_sequential(layer) or any(k.__name__ == "Functional" for k in type(layer).__mro__)


def _is_of_keras_2(value: Any) -> bool:
    modules = {kind.__module__ for kind in type(value).__mro__}
    return any(m.startswith(("tf_keras.", "tensorflow.python.keras.")) for m in modules)


def inner_variable(wrapper: Any) -> tf.Variable:
    """Return the `tf.Variable` of a variable of TensorFlow or Keras.

    Raises:
        TypeError: If it belongs to another backend of Keras.
        ValueError: If it has no value yet.
    """
    variable = wrapper
    if is_of_keras_3(wrapper, "Variable"):
        variable = wrapper._value
    elif type(wrapper).__name__.startswith("AutoCast"):
        variable = wrapper._variable  # is never cast, whatever the scope
    if variable is None:
        raise ValueError(f"variable {own_name(wrapper)!r} has no value yet: build the model first")
    if not isinstance(variable, tf.Variable):
        raise TypeError(
            f"variable {own_name(wrapper)!r}: expected a variable of TensorFlow, got "
            f"{type(variable).__name__}: Keras runs on another backend"
        )
    return variable


def is_seed(variable: tf.Variable) -> bool:
    """Whether ``variable`` is the state of a Keras seed generator or a `tf.random.Generator`."""
    name = last_name(variable)
    return re.fullmatch(r"(seed_generator_state|StateVar)(_\d+)?", name) is not None and (
        variable.dtype.is_integer and not variable.trainable
    )


def key_texts(keys: Iterable[Any]) -> list[str]:
    """Return a text for each key of a mapping, equal in all processes.

    Keys whose text may contain an address or a value, such as references to variables, become their
    position. A text that a subclass of `str`, `bytes`, `int` or `float` has of its own may, too, so
    these are named by their value.
    """
    return [str(_plain(key)) if _has_text(key) else str(i) for i, key in enumerate(keys)]


def _has_text(key: Any) -> bool:
    if isinstance(key, tuple):
        return all(map(_has_text, key))
    return key is None or isinstance(key, (str, bytes, int, float, Enum, np.generic))


def _plain(key: Any) -> Any:
    """Return the value of ``key`` without its class, if that is a subclass of Python's own."""
    if type(key) is tuple:
        return tuple(map(_plain, key))
    if not isinstance(key, (bool, Enum, np.generic)):
        for kind, value in _VALUES:
            if isinstance(key, kind):
                return value(key)
    return key


_VALUES: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (str, str.__str__),
    (bytes, lambda key: memoryview(key).tobytes()),
    (int, int.__int__),
    (float, float.__float__),
)


def own_name(variable: Any) -> str:
    """Return a variable's name as its author wrote it, without TensorFlow's and Keras's numbers."""
    name = str(variable.name).partition(":")[0]
    # Keras numbers variables without a name: `variable_7`.
    return "variable" if re.fullmatch(r"variable_\d+", name) else name


def last_name(variable: Any) -> str:
    """Return `own_name` without scopes, such as the layer name that `tf_keras` prepends."""
    return own_name(variable).rpartition("/")[2]


def unique_names(names: Iterable[str]) -> list[str]:
    """Return ``names`` with repeats numbered in order: ``w, w, w`` become ``w, w_1, w_2``."""
    listed = list(names)
    taken = set(listed)
    repeats: Counter[str] = Counter()
    seen: set[str] = set()
    unique = []
    for name in listed:
        candidate = name
        while candidate in seen or (candidate != name and candidate in taken):
            repeats[name] += 1
            candidate = f"{name}_{repeats[name]}"
        seen.add(candidate)
        unique.append(candidate)
    return unique
