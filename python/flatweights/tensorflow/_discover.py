"""Finds and names the variables in the objects that a user passes."""

import contextlib
import re
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from flatweights._choice import Choice
from flatweights._layout import Layout, Slot
from flatweights.tensorflow._buckets import is_synchronized_on_reading
from flatweights.tensorflow._kinds import is_symbolic, unique_names
from flatweights.tensorflow._layers import leaves
from flatweights.tensorflow._optimizers import owner_key
from flatweights.tensorflow._structure import Held, find_variables

_MOVED = frozenset(
    {
        *(tf.bfloat16, tf.float16, tf.float32, tf.float64, tf.complex64, tf.complex128),
        *(tf.dtypes.experimental.float8_e4m3fn, tf.dtypes.experimental.float8_e5m2),
        *(tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.uint16, tf.uint32, tf.uint64),
        tf.bool,
    }
)
_STEP = re.compile("(Resource)?(Sparse)?Apply")


class Discovered(NamedTuple):
    """The variables of a model.

    Attributes:
        wrappers: By name, in the form that the user passed: Keras variables stay Keras
            variables, except in graphs, which can only run the `tf.Variable` inside.
        variables: By name, the `tf.Variable` of each.
        replicas: By name, the other replicas of a mirrored variable, which are kept equal.
        graph: The graph of the variables; None for eager ones.
        layers: The layers that hold some of them.
        owners: By name, the variable of the model that a slot of an optimizer is for.
        states: The names of the variables of optimizers and of the states of recurrent layers, none
            of which is trained.
        left_out: The names of variables that are not among them by choice.
    """

    wrappers: dict[str, Any]
    variables: dict[str, tf.Variable]
    replicas: dict[str, Sequence[tf.Variable]]
    graph: tf.Graph | None
    layers: Sequence[Any] = ()
    owners: Mapping[str, str] = {}
    states: Collection[str] = ()
    left_out: Collection[str] = ()


def discover(
    output: Any,
    input_variables: Any,
    session: Any,
    *,
    trainable_only: bool = False,
    choice: Choice | None = None,
) -> Discovered:
    """Return the variables of ``output`` and ``input_variables``, each once, in order.

    Raises:
        TypeError: If something else is passed, or a variable's dtype cannot be moved.
        ValueError: If there are no variables; or if some are eager and others of a graph, or
            of several graphs; or if one has no fixed shape, is not built, or is a sharded DTensor;
            or as `Choice.kept`.
    """
    items = [item for _, item in leaves(output, ())]
    symbolic = [item for item in items if is_symbolic(item)]
    layers: list[Any] = []
    graph = getattr(session, "graph", None)
    # TF1's optimizers know their slots only within the graph.
    with graph.as_default() if isinstance(graph, tf.Graph) else contextlib.nullcontext():
        held = find_variables(
            [item for item in items if not is_symbolic(item)] if symbolic else output, layers=layers
        )
        listed = find_variables(input_variables, beside=held, layers=layers)
    untrained = set[int]()
    if trainable_only:
        untrained = {id(item.variable) for item in (*held, *listed)}
        held, listed = ([item for item in items if item.is_trained] for items in (held, listed))
        untrained -= {id(item.variable) for item in (*held, *listed)}
    if symbolic or any(_graph_of(entry.variable) for entry in (*held, *listed)):
        discovered = _in_graph(symbolic, held, listed, untrained, trainable_only=trainable_only)
    else:
        discovered = _eager(held, listed)
    if not discovered.variables:
        which = "trainable variables" if trainable_only else "variables"
        raise ValueError(f"expected output or input_variables to have {which}, found none")
    if discovered.graph is None and session is not None:
        raise ValueError("expected variables of the session's graph, got eager ones")
    if choice:
        discovered = _chosen(discovered, choice)
    _check_movable(discovered.variables)
    return discovered._replace(layers=layers)


def layout_of(variables: Mapping[str, tf.Variable]) -> Layout:
    """Return the layout of ``variables``, by name."""
    return Layout(
        list(variables),
        [v.shape.as_list() for v in variables.values()],
        [v.dtype.base_dtype.as_numpy_dtype for v in variables.values()],
    )


def _chosen(discovered: Discovered, choice: Choice) -> Discovered:
    """Return what ``choice`` leaves of the variables, under the names that they have among all."""
    variables = discovered.variables
    slots: Sequence[Slot] = ()
    if choice.by_slot:
        _check_movable(variables)
        slots = layout_of(variables).slots
    left = choice.kept(list(variables), discovered.owners, slots)
    return discovered._replace(
        wrappers={name: discovered.wrappers[name] for name in left},
        variables={name: variables[name] for name in left},
        replicas={name: discovered.replicas[name] for name in left if name in discovered.replicas},
        left_out=variables.keys() - {*left},
    )


def _eager(held: list[Held], listed: list[Held]) -> Discovered:
    first: dict[int, Held] = {}
    for item in (*held, *listed):
        first.setdefault(id(item.variable), item)
    items = list(first.values())
    names = unique_names("/".join(item.path) for item in items)
    wrappers, variables, replicas = {}, {}, {}
    for name, item in zip(names, items, strict=True):
        wrappers[name] = item.wrapper
        variables[name] = item.variable
        if isinstance(
            item.variable, tf.distribute.DistributedValues
        ) and not is_synchronized_on_reading(item.variable):
            variables[name], *replicas[name] = item.variable.values
    keys: dict[Hashable, str] = {
        owner_key(item.variable): name for name, item in zip(names, items, strict=True)
    }
    owners = {
        name: keys[item.owner]
        for name, item in zip(names, items, strict=True)
        if item.owner in keys
    }
    states = {name for name, item in zip(names, items, strict=True) if item.is_state}
    return Discovered(wrappers, variables, replicas, None, owners=owners, states=states)


def _in_graph(
    symbolic: list[Any],
    held: list[Held],
    listed: list[Held],
    untrained: Collection[int],
    *,
    trainable_only: bool,
) -> Discovered:
    explicit = [item.variable for item in (*held, *listed)]
    if any(isinstance(variable, tf.distribute.DistributedValues) for variable in explicit):
        raise TypeError("distributed variables of a graph: expected those of one replica")
    graphs = {_graph_of(variable) for variable in explicit} | {leaf.graph for leaf in symbolic}
    if None in graphs:
        raise ValueError("expected variables of a graph, got eager ones among them")
    if len(graphs) > 1:
        raise ValueError(f"expected variables of one graph, got some of {len(graphs)} graphs")
    graph = graphs.pop()
    from_output = _find_dependencies(symbolic, [item.variable for item in held], graph)
    if trainable_only:
        from_output = [v for v in from_output if v.trainable and id(v) not in untrained]
    ordered = {id(v): v for v in (*from_output, *explicit)}.values()
    variables = {variable.op.name: variable for variable in ordered}
    states = {item.variable.op.name for item in (*held, *listed) if item.is_state}
    keys: dict[Hashable, str] = {owner_key(v): name for name, v in variables.items()}
    keys |= {(graph, name): name for name in variables}
    owners = {
        slot: name
        for slot, name in _owners_in_steps(graph)
        if slot in variables and name in variables
    }
    owners |= {
        item.variable.op.name: keys[item.owner] for item in (*held, *listed) if item.owner in keys
    }
    return Discovered(dict(variables), variables, {}, graph, owners=owners, states=states)


def _owners_in_steps(graph: tf.Graph) -> Iterator[tuple[str, str]]:
    """Yield the names of slot and variable for each slot in an optimizer's steps in ``graph``.

    Their operations take the variable, then its slots, then tensors.
    """
    for operation in graph.get_operations():
        if _STEP.match(operation.type):
            names = [
                tensor.op.name
                for tensor in operation.inputs
                if tensor.dtype == tf.resource or tensor.dtype != tensor.dtype.base_dtype
            ]
            yield from ((slot, names[0]) for slot in names[1:])


def _graph_of(variable: tf.Variable) -> tf.Graph | None:
    """Return the graph that ``variable`` is in; None if it is eager."""
    if isinstance(variable, tf.distribute.DistributedValues):
        variable = variable.values[0]  # within the scope of its strategy, it has no handle itself
    handle = getattr(variable, "handle", None)  # ref-type variables have none
    return None if handle is not None and not is_symbolic(handle) else variable.graph


def _find_dependencies(
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


def _check_movable(variables: Mapping[str, tf.Variable]) -> None:
    for name, variable in variables.items():
        _check_one(name, variable)


def _check_one(name: str, variable: tf.Variable) -> None:
    if is_synchronized_on_reading(variable) and variable.aggregation == tf.VariableAggregation.NONE:
        raise ValueError(
            f"variable {name!r}: expected an aggregation, without which TensorFlow does not read "
            f"a variable that is synchronized on reading; leave it out by exclude={name!r}"
        )
    layout = getattr(variable, "layout", None)  # of a DTensor
    if layout is not None and not layout.is_fully_replicated():
        raise ValueError(
            f"variable {name!r}: expected a DTensor with all values on each device, got the layout "
            f"{layout.sharding_specs}; leave it out by exclude={name!r}"
        )
    if variable.dtype.base_dtype not in _MOVED:
        raise TypeError(
            f"variable {name!r}: expected numbers or booleans, got {variable.dtype.name}; "
            f"leave it out by exclude={name!r}"
        )
    if not variable.shape.is_fully_defined():
        raise ValueError(
            f"variable {name!r}: expected a fixed shape, got {variable.shape}; leave it out by "
            f"exclude={name!r}"
        )
