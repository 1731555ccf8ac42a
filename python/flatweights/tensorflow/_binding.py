"""Bound variables: the core moves them without a TensorFlow operation."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from flatweights import _core
from flatweights._layout import Layout
from flatweights.tensorflow._groups import Group
from flatweights.tensorflow._library import Library
from flatweights.tensorflow._operations import Operations

# The op's status of a variable.
_BOUND, _UNINITIALIZED, _NOT_ON_HOST = range(3)


class Binding(NamedTuple):
    """Which variables of a model are bound, at one time and in one place.

    Attributes:
        bound: The bound variables, for the core; None if there are none.
        positions: Positions of the bound variables in the layout, ascending.
        others: Groups that TensorFlow's operations have to move.
        reasons: By name, why each variable of ``others`` is not bound.
        place: Where the variables are bound; the binding is invalid elsewhere.
        may_improve: Whether more may be bound later: some are not initialized yet.
    """

    bound: _core.BoundVariables | None
    positions: list[int]
    others: list[Group]
    reasons: dict[str, str]
    place: object = None
    may_improve: bool = True


def unbound(
    groups: Sequence[Group], reason: str, *, place: object = None, may_improve: bool = False
) -> Binding:
    """Return a binding of nothing."""
    reasons = {slot.name: reason for group in groups for slot in group.layout.slots}
    return Binding(None, [], list(groups), reasons, place, may_improve)


def bind(operations: Operations, layout: Layout, library: Library) -> Binding:
    """Bind the groups of ``operations`` whose variables can all be bound.

    Args:
        operations: Operations on the variables, usable now.
        layout: Slots of the variables.
        library: The op library.
    """
    groups = [group for group in operations.groups if not group.obstacle]
    try:
        results = operations.bind(groups)
    except tf.errors.OpError as error:  # a remote server lacks the op
        failure = f"binding failed: {error.message}"
        return unbound(operations.groups, failure, place=operations.place())
    rows = iter(results)
    chosen: list[tuple[int, tf.Variable, NDArray[np.int64]]] = []
    others: list[Group] = []
    reasons: dict[str, str] = {}
    may_improve = False
    for group in operations.groups:
        answers = [] if group.obstacle else [next(rows) for _ in group.slots]
        reason, later = _obstacle(group, answers, library)
        if reason is None:
            chosen += zip(group.slots, group.variables, answers, strict=True)
        else:
            others.append(group)
            reasons |= {slot.name: reason for slot in group.layout.slots}
            may_improve |= later
    chosen.sort(key=lambda item: item[0])
    bound = None
    if chosen:
        try:
            bound = _bound(chosen, layout, library, operations.context)
        except ValueError as error:  # two variables share memory
            return unbound(operations.groups, str(error), place=operations.place())
    positions = [position for position, _, _ in chosen]
    return Binding(bound, positions, others, reasons, operations.place(), may_improve)


def _obstacle(
    group: Group, answers: Sequence[NDArray[np.int64]], library: Library
) -> tuple[str | None, bool]:
    """Return why ``group`` cannot be bound, or None, and whether that may change."""
    if group.obstacle:
        return group.obstacle, False
    if any(result[1] != library.core.nonce for result in answers):
        return "its session runs in another process", False
    statuses = {int(result[2]) for result in answers}
    if _NOT_ON_HOST in statuses:
        return "it is not in host memory", False
    if _UNINITIALIZED in statuses:
        return "it is not initialized", True
    return None, False


def _bound(
    chosen: Sequence[tuple[int, tf.Variable, NDArray[np.int64]]],
    layout: Layout,
    library: Library,
    context: Any,
) -> _core.BoundVariables:
    return _core.BoundVariables(
        library.core,
        layout.core,
        [position for position, _, _ in chosen],
        [int(result[0]) for _, _, result in chosen],
        [variable.dtype.base_dtype.as_datatype_enum for _, variable, _ in chosen],
        context,
    )
