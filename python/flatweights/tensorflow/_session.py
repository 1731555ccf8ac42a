"""Operations on the variables of a TF1 graph, built once and run in a session."""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from flatweights._core import move_parts
from flatweights._locks import TurnLock
from flatweights.tensorflow._buckets import Bucket, Operations
from flatweights.tensorflow.library._load import Library

_CLOSED = "the session is closed: call set_session(sess) with an open one"

_locks: weakref.WeakKeyDictionary[tf.Graph, TurnLock] = weakref.WeakKeyDictionary()


class SessionOperations(Operations):
    """Reads and writes the variables of one graph in a session.

    Attributes:
        graph: The graph.
        session: Where operations run; None until one is set.
        placeholders: By name, the placeholder for a variable's value, as in Ray's class.
        assignment_nodes: By name, the op that assigns it, as in Ray's class.
    """

    def __init__(
        self,
        variables: Mapping[str, tf.Variable],
        graph: tf.Graph,
        buckets: list[Bucket],
        library: Library | None,
    ) -> None:
        """Add the operations to ``graph``.

        Raises:
            RuntimeError: If the graph is finalized.
        """
        self.graph = graph
        self.lock = _locks.setdefault(graph, TurnLock())
        self.buckets = buckets
        self.session: Any = None
        self.placeholders: dict[str, tf.Tensor] = {}
        self.assignment_nodes: dict[str, Any] = {}
        with isolated(graph, "construct TensorFlowVariables"):
            for name, variable in variables.items():
                placeholder = tf.compat.v1.placeholder(
                    variable.dtype.base_dtype, variable.shape, name=f"Placeholder_{name}"
                )
                self.placeholders[name] = placeholder
                self.assignment_nodes[name] = variable.assign(placeholder)
            self._nodes = {id(bucket): _Nodes(bucket, library) for bucket in buckets}

    def set_session(self, session: Any) -> None:
        """Run in ``session`` from now on.

        Raises:
            ValueError: If it is a session of another graph.
        """
        graph = getattr(session, "graph", None)
        if session is not None and graph is not self.graph:
            raise ValueError("expected a session of the graph that the variables are in")
        self.session = session

    def check(self) -> None:
        """Check that a session is set and open."""
        self.opened()

    def opened(self) -> tuple[Any, Any]:
        """Return the session and its raw one; another thread may set or close it afterwards.

        Raises:
            RuntimeError: If none is set, or it is closed.
        """
        session = self.session
        if session is None:
            raise RuntimeError(
                "the session is not set: pass it to the constructor, or call set_session(sess)"
            )
        raw = _raw(session)
        if raw is None:
            raise RuntimeError(_CLOSED)
        return session, raw

    def raw_session(self) -> Any:
        """Return the raw session, which a monitored one may recreate; None if it is closed."""
        return _raw(self.session)

    def bind(self, buckets: Sequence[Bucket]) -> list[NDArray[np.int64]]:
        """Run the op for each variable of ``buckets``, all in one run."""
        return list(self._run([op for bucket in buckets for op in self._nodes[id(bucket)].bind]))

    def read(self, buckets: Sequence[Bucket]) -> dict[int, NDArray[Any]]:
        """Run one concat per bucket, all in one run."""
        try:
            vectors = self._run([self._nodes[id(bucket)].read for bucket in buckets])
        except tf.errors.FailedPreconditionError as error:
            raise uninitialized(self._uninitialized()) from error
        values: dict[int, NDArray[Any]] = {}
        for bucket, vector in zip(buckets, vectors, strict=True):
            pieces = bucket.layout.vector_views(np.asarray(vector))
            values.update(zip(bucket.slots, pieces, strict=True))
        return values

    def write(self, values: Mapping[int, NDArray[Any]]) -> None:
        """Feed each whole bucket at once, and other variables one by one, all in one run.

        A session aliases aligned arrays in its feed, and so do variables that get such a
        value. So the feed consists of copies.
        """
        fetches: list[Any] = []
        feed: dict[tf.Tensor, NDArray[Any]] = {}
        for bucket in self.buckets:
            own = bucket.among(values)
            if len(own) == len(bucket.slots):
                nodes = self._nodes[id(bucket)]
                fetches.append(nodes.write)
                feed[nodes.fed] = bucket.copy_packed(own.values())
                continue
            for j, value in own.items():
                name = bucket.layout.names[j]
                fetches.append(_operation(self.assignment_nodes[name]))
                copy = np.empty(value.shape, bucket.layout.slots[j].dtype)
                move_parts([copy], [value])
                feed[self.placeholders[name]] = copy
        self._run(fetches, feed)

    def _run(self, fetches: Any, feed: dict[tf.Tensor, NDArray[Any]] | None = None) -> Any:
        # The raw session: hooks of a monitored one must count only training steps.
        return run(self.opened()[1], fetches, feed)

    def _uninitialized(self) -> list[str]:
        names = []
        for bucket in self.buckets:
            # Each input of the concat reads one variable; the last one is the axis.
            reads = self._nodes[id(bucket)].read.op.inputs
            for slot, read in zip(bucket.layout.slots, reads, strict=False):
                try:
                    self._run(read)
                except tf.errors.FailedPreconditionError:
                    names.append(slot.name)
        return names


def run(session: Any, fetches: Any, feed: Mapping[Any, Any] | None = None) -> Any:
    """Run ``fetches`` in an `opened` session.

    Raises:
        RuntimeError: If it has been closed since, or by ``Session.reset``, which it does not show.
    """
    try:
        return session.run(fetches, feed)
    except tf.errors.CancelledError as error:
        # A call that had begun already is merely cancelled.
        if _raw(session) is not None and "Session has been closed" not in error.message:
            raise
        raise RuntimeError(_CLOSED) from error


def _raw(session: Any) -> Any:
    """Return the raw session in ``session``; None if there is none, or it is closed."""
    if hasattr(session, "_tf_sess"):  # a monitored one
        session = None if session._is_closed() else session._tf_sess()
    return None if getattr(session, "_closed", session is None) else session


class _Nodes:
    """The nodes of the graph for one bucket."""

    def __init__(self, bucket: Bucket, library: Library | None) -> None:
        self.read = bucket.concat()
        self.fed = tf.compat.v1.placeholder(bucket.dtype, [bucket.packed_size])
        values = bucket.cut(self.fed)
        assignments = [
            _operation(variable.assign(value, read_value=False))
            for variable, value in zip(bucket.variables, values, strict=True)
        ]
        self.write = tf.group(*assignments)
        # One op per variable: an op over handles on two devices could not be placed.
        self.bind = (
            [library.bind(variable.handle) for variable in bucket.variables]
            if library is not None and not bucket.obstacle
            else []
        )


def _operation(assignment: Any) -> tf.Operation:
    # Fetching the operation, unlike its output, returns no value.
    return assignment if isinstance(assignment, tf.Operation) else assignment.op


def check_unfinished(graph: tf.Graph, call: str) -> None:
    """Raise `RuntimeError` if ``graph`` is finalized; ``call`` says what would add operations."""
    if graph.finalized:
        raise RuntimeError(
            f"the graph is finalized: {call} before that (before "
            "tf.compat.v1.train.MonitoredTrainingSession), because it adds operations"
        )


@contextmanager
def isolated(graph: tf.Graph, call: str) -> Iterator[None]:
    """Return a context that adds operations to ``graph``; raises as `check_unfinished` does.

    They do not inherit the caller's device, name scope or control dependencies.
    """
    check_unfinished(graph, call)
    with (
        graph.as_default(),
        tf.compat.v1.name_scope(None),
        tf.device(None),
        tf.control_dependencies(None),
    ):
        yield


def uninitialized(names: Sequence[str]) -> RuntimeError:
    """Return the error that says which variables are not initialized."""
    return RuntimeError(
        f"expected initialized variables, got uninitialized: {', '.join(map(repr, names))}; first "
        "run tf.compat.v1.variables_initializer([...]) of these, or at the beginning "
        "tf.compat.v1.global_variables_initializer(), which resets all"
    )
