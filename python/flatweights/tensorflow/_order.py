"""Keeps operations that call Python in the order of the program, across functions and loops, too.

TensorFlow keeps the order of stateful operations without resources only within one body: that of a
function, a loop or a branch. Operations that run such bodies are ordered by the variables in them
alone. So the exchanges of two models, each in a function of its own, would run in any order, and
members would average gradients of different models.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps

CALL = "FlatweightsCallPython"
"""Part of the name of each operation that calls Python, and of no other."""

# The attributes with functions that an operation may run.
_FUNCTIONS = {
    "StatefulPartitionedCall": ("f",),
    "While": ("cond", "body"),
    "If": ("then_branch", "else_branch"),
    "Case": ("branches",),
}

# Stands for what all these operations change. It is never run, nor an input of anything: a variable
# in its place would be one that functions capture, and that a saved model lacks.
with tf.Graph().as_default():
    _PYTHON = tf.compat.v1.placeholder(tf.resource)


@auto_control_deps.register_acd_resource_resolver  # type: ignore[untyped-decorator]
def flatweights_order(op: Any, reads: Any, writes: Any) -> bool:
    """Tell TensorFlow that ``op`` changes `_PYTHON`, if it may call Python, in any depth.

    So does each stateful operation without resources, to remain in one order with those calls.

    Args:
        op: An operation of a graph that is complete.
        reads: The resources that it reads, in an ``ObjectIdentitySet``.
        writes: The others, to which this one is added.

    Returns:
        Whether it was added.
    """
    if _PYTHON in writes or op._control_flow_context is not None:
        return False
    has_none = not reads and not writes and auto_control_deps.op_is_stateful(op)
    if not has_none and not _runs_calls(op):
        return False
    writes.add(_PYTHON)
    return True


def _runs_calls(op: Any) -> bool:
    """Whether ``op`` runs a function in which an operation calls Python."""
    for attribute in _FUNCTIONS.get(op.type, ()):
        value = op.get_attr(attribute)
        for one in value if isinstance(value, list) else [value]:
            body = _body_of(op.graph, one.name)
            if body is not None and any(
                CALL in inner.name or _runs_calls(inner) for inner in body.get_operations()
            ):
                return True
    return False


def _body_of(graph: Any, name: str) -> Any:
    """Return the graph of the function ``name``, which ``graph`` or one around it has."""
    while graph is not None:
        function = graph._get_function(name)
        if function is not None:
            return getattr(function, "graph", None)
        graph = getattr(graph, "outer_graph", None)
    return None
