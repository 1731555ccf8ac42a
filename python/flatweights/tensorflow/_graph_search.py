"""The variables that operations of a graph depend on."""

from collections import deque
from collections.abc import Iterable
from typing import Any

import tensorflow as tf


def is_symbolic(value: Any) -> bool:
    """Whether ``value`` is an operation or a tensor of a graph."""
    return isinstance(value, tf.Operation) or (
        isinstance(value, tf.Tensor) and tf.is_symbolic_tensor(value)
    )


def graph_of(variable: tf.Variable) -> tf.Graph | None:
    """Return the graph that ``variable`` is in; None if it is eager."""
    if isinstance(variable, tf.distribute.DistributedValues):
        variable = variable.values[0]  # within the scope of its strategy, it has no handle itself
    handle = getattr(variable, "handle", None)  # ref-type variables have none
    return None if handle is not None and not is_symbolic(handle) else variable.graph


def find_dependencies(
    outputs: Iterable[Any], variables: Iterable[tf.Variable], graph: tf.Graph
) -> list[tf.Variable]:
    """Return the global variables that ``outputs`` depend on, in order of creation.

    Breadth-first search over inputs and control inputs, as in Ray's `TensorFlowVariables`.

    Args:
        outputs: Operations and tensors of ``graph``.
        variables: Variables of ``graph`` that are outputs themselves.
        graph: The graph.
    """
    queue = deque(
        [
            *(out if isinstance(out, tf.Operation) else out.op for out in outputs),
            *(variable.op for variable in variables),
        ]
    )
    explored = set(queue)
    while queue:
        operation = queue.popleft()
        for before in [*(tensor.op for tensor in operation.inputs), *operation.control_inputs]:
            if before not in explored:
                explored.add(before)
                queue.append(before)
    with graph.as_default():
        candidates = tf.compat.v1.global_variables()
    return [variable for variable in candidates if variable.op in explored]
