"""Names of variables that are equal in all members, whatever else their processes have built.

Members compare names before they average. So variables that change places, because a program
iterates over a set or freezes other layers in each member, are an error instead of a mixture.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from flatweights.tensorflow import TensorFlowVariables


def named_variables(variables: Sequence[Any], model: Any = None) -> dict[str, Any]:
    """Return ``variables`` by name, in their order.

    Args:
        variables: Variables of Keras or TensorFlow.
        model: The model whose structure names them, as `TensorFlowVariables` does. Variables that
            it does not hold, and those of a model that is not built, are named by their path in
            Keras, without the numbers that Keras counts in each process.
    """
    known: dict[int, str] = {}
    if model is not None:
        try:
            held = TensorFlowVariables(model).variables
        except (TypeError, ValueError):  # layers that are not built, or variables of strings
            held = {}
        known = {id(inner_variable(variable)): name for name, variable in held.items()}
    named: dict[str, Any] = {}
    for variable, path in zip(variables, _paths(variables), strict=True):
        name = unique = known.get(id(inner_variable(variable)), path)
        count = 0
        while unique in named:
            count += 1
            unique = f"{name}_{count}"
        named[unique] = variable
    return named


def with_slots(
    named: dict[str, Any],
    optimizer: Any,
    prefix: str = "",
    *,
    without: Iterable[Any] = (),
    **choice: Any,
) -> TensorFlowVariables:
    """Return the variables ``named``, and the slots of ``optimizer`` named after them.

    Args:
        named: Variables by name.
        optimizer: An optimizer of Keras that is built.
        prefix: The beginning of all names.
        without: Variables and slots that are left out.
        **choice: ``exclude`` and ``only`` of `TensorFlowVariables`.
    """
    whole = TensorFlowVariables([named, optimizer], **choice).variables
    left_out = {id(inner_variable(one)) for one in without}
    return TensorFlowVariables(
        {
            prefix + name: one
            for name, one in whole.items()
            if id(inner_variable(one)) not in left_out
        }
    )


def state_names(optimizer: Any) -> list[str]:
    """Return the names of all variables of an ``optimizer`` that is built."""
    with tf.init_scope():
        return [*TensorFlowVariables(optimizer).variables]


def inner_variable(variable: Any) -> Any:
    """Return the `tf.Variable` of a variable of Keras or TensorFlow."""
    return variable if isinstance(variable, tf.Variable | tf.Tensor) else variable.value


def _paths(variables: Sequence[Any]) -> list[str]:
    """Return the path of each variable in Keras, with automatic numbers counted in their order."""
    automatic = {"variable"}
    kinds: list[Any] = [keras.Layer]
    while kinds:
        kind = kinds.pop()
        automatic.add(_snake_case(kind.__name__))
        kinds += kind.__subclasses__()
    counts: Counter[str] = Counter()
    renamed: dict[str, str] = {}  # by the path up to and with a part, that path with new numbers

    def rename(path: str) -> str:
        if path not in renamed:
            parent, slash, part = path.rpartition("/")
            stem = re.sub(r"_\d+$", "", part)
            where = (rename(parent) if slash else "") + slash
            above = parent.rpartition("/")[2]
            if re.sub("^(for|back)ward_", "", stem) in automatic:  # with it, in a Bidirectional
                part = f"{stem}_{counts[where + stem]}" if counts[where + stem] else stem
                counts[where + stem] += 1
            elif above and part.startswith(f"{above}_"):  # such as f"{self.name}_inner"
                part = where[:-1].rpartition("/")[2] + part.removeprefix(above)
            renamed[path] = where + part
        return renamed[path]

    return [rename(str(getattr(v, "path", None) or v.name).partition(":")[0]) for v in variables]


def _snake_case(name: str) -> str:
    """Return the name that Keras gives to a layer of the class ``name``, without a number."""
    name = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", re.sub(r"\W+", "", name))
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()
