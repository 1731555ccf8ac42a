"""Bound variables: the core moves them without a TensorFlow operation."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from flatweights import _core
from flatweights._layout import Layout
from flatweights.tensorflow._buckets import Bucket, Operations
from flatweights.tensorflow.library._load import Library

# The op's status of a variable.
_BOUND, _UNINITIALIZED, _OUT_OF_REACH, _BOUND_ON_GPU = range(4)

_NOT_INITIALIZED = "it is not initialized"


class Binding(NamedTuple):
    """Which variables of a model are bound, at one time and in one session.

    Attributes:
        bound: The bound variables, for the core; None if there are none.
        positions: Positions of the bound variables in the layout, ascending.
        others: Groups that TensorFlow's operations have to move, and why they are not bound.
        session: The raw session of the variables, in which alone the binding is valid; None for
            eager variables.
        may_improve: Whether more may be bound later: some are not initialized yet.
    """

    bound: _core.BoundVariables | None
    positions: list[int]
    others: dict[Bucket, str]
    session: object
    may_improve: bool


def unbound(
    buckets: Sequence[Bucket], reason: str, *, session: object = None, may_improve: bool = False
) -> Binding:
    """Return a binding of nothing."""
    return Binding(None, [], dict.fromkeys(buckets, reason), session, may_improve)


def bind(operations: Operations, layout: Layout, library: Library) -> Binding:
    """Bind the buckets of ``operations`` whose variables can all be bound.

    Args:
        operations: Operations on the variables, usable now.
        layout: Slots of the variables.
        library: The op library.
    """
    session = operations.raw_session()
    try:
        results = operations.bind([bucket for bucket in operations.buckets if not bucket.obstacle])
    except tf.errors.OpError as error:  # a remote server lacks the op
        return unbound(operations.buckets, f"binding failed: {error.message}", session=session)
    rows = iter(results)
    chosen: list[tuple[int, int, int]] = []  # position, id and dtype
    others: dict[Bucket, str] = {}
    for bucket in operations.buckets:
        answers = [] if bucket.obstacle else [next(rows) for _ in bucket.slots]
        reason = bucket.obstacle or _obstacle(answers, library)
        if reason:
            others[bucket] = reason
            continue
        dtype = bucket.dtype.as_datatype_enum
        pairs = zip(bucket.slots, answers, strict=True)
        chosen += [(i, int(answer[0]), dtype) for i, answer in pairs]
    chosen.sort()
    bound = None
    if chosen:
        positions, ids, dtypes = map(list, zip(*chosen, strict=True))
        try:
            bound = _core.BoundVariables(
                library.core, layout.core, positions, ids, dtypes, operations.context
            )
        except _core.UnreadyError:  # another thread destroyed a variable, or its session
            reason = "it, or one beside it, was destroyed while it was being bound"
            return unbound(operations.buckets, reason, session=session, may_improve=True)
        except ValueError as error:  # two variables share memory
            return unbound(operations.buckets, str(error), session=session)
    may_improve = _NOT_INITIALIZED in others.values()
    return Binding(bound, [i for i, _, _ in chosen], others, session, may_improve)


def _obstacle(answers: Sequence[NDArray[np.int64]], library: Library) -> str:
    """Return why variables whose op gave these ``answers`` cannot be bound; empty if they can."""
    if any(answer[1] != library.core.nonce for answer in answers):
        return "its session runs in another process"
    statuses = {int(answer[2]) for answer in answers}
    if _OUT_OF_REACH in statuses:
        return "it is neither in host memory nor on one of NVIDIA's GPUs"
    if _BOUND_ON_GPU in statuses and (reason := _core.device_obstacle()):
        return f"it is on a GPU, and {reason}"
    return _NOT_INITIALIZED if _UNINITIALIZED in statuses else ""
