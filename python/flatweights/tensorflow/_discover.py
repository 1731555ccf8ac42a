"""What a user hands over, turned into named variables."""

from typing import Any, NamedTuple

import tensorflow as tf

from flatweights.tensorflow._graph_search import find_dependencies, graph_of, is_symbolic
from flatweights.tensorflow._names import unique_names
from flatweights.tensorflow._structure import Found, find_variables

_MOVED = frozenset(
    {
        *(tf.bfloat16, tf.float16, tf.float32, tf.float64, tf.complex64, tf.complex128),
        *(tf.dtypes.experimental.float8_e4m3fn, tf.dtypes.experimental.float8_e5m2),
        *(tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.uint16, tf.uint32, tf.uint64),
        tf.bool,
    }
)


class Discovered(NamedTuple):
    """The variables of a model.

    Attributes:
        given: By name, as the user knows them: Keras variables stay Keras variables, but
            in graphs, where only what is inside can be run.
        variables: By name, the `tf.Variable` of each.
        graph: The graph they are in; None for eager ones.
    """

    given: dict[str, Any]
    variables: dict[str, tf.Variable]
    graph: tf.Graph | None


def discover(output: Any, input_variables: Any, session: Any) -> Discovered:
    """Return the variables of ``output`` and ``input_variables``, each once, in order.

    Raises:
        TypeError: If anything else is given, or a variable's dtype cannot be moved.
        ValueError: If there are no variables, they are eager and of a graph at once, of
            several graphs, without a fixed shape, or not built.
    """
    leaves = tf.nest.flatten(output)
    symbolic = [leaf for leaf in leaves if is_symbolic(leaf)]
    held = find_variables(
        [leaf for leaf in leaves if not is_symbolic(leaf)] if symbolic else output
    )
    listed = find_variables(input_variables)
    if symbolic or any(graph_of(found.variable) for found in (*held, *listed)):
        discovered = _in_graph(symbolic, held, listed)
    else:
        discovered = _eager(held, listed)
    if not discovered.variables:
        raise ValueError("expected output or input_variables to have variables, found none")
    if discovered.graph is None and session is not None:
        raise ValueError("expected variables of the session's graph, got eager ones")
    for name, variable in discovered.variables.items():
        _check_movable(name, variable)
    return discovered


def _eager(held: list[Found], listed: list[Found]) -> Discovered:
    first: dict[int, Found] = {}
    for item in (*held, *listed):
        first.setdefault(id(item.variable), item)
    found = list(first.values())
    names = unique_names("/".join(item.path) for item in found)
    return Discovered(
        {name: item.given for name, item in zip(names, found, strict=True)},
        {name: item.variable for name, item in zip(names, found, strict=True)},
        None,
    )


def _in_graph(symbolic: list[Any], held: list[Found], listed: list[Found]) -> Discovered:
    explicit = [item.variable for item in (*held, *listed)]
    graphs = {graph_of(variable) for variable in explicit} | {leaf.graph for leaf in symbolic}
    if None in graphs:
        raise ValueError("expected variables of a graph, got eager ones among them")
    if len(graphs) > 1:
        raise ValueError(f"expected variables of one graph, got some of {len(graphs)} graphs")
    graph = graphs.pop()
    from_output = find_dependencies(symbolic, [item.variable for item in held], graph)
    ordered = {id(v): v for v in (*from_output, *explicit)}.values()
    variables = {variable.op.name: variable for variable in ordered}
    return Discovered(dict(variables), variables, graph)


def _check_movable(name: str, variable: tf.Variable) -> None:
    if variable.dtype.base_dtype not in _MOVED:
        raise TypeError(
            f"variable {name!r}: expected numbers or booleans, got {variable.dtype.name}; "
            "leave it out by passing the list of the other variables"
        )
    if not variable.shape.is_fully_defined():
        raise ValueError(f"variable {name!r}: expected a fixed shape, got {variable.shape}")
