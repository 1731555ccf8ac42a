"""Operations on the variables of a TF1 graph, built once and run in a session."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from flatweights.tensorflow._groups import Group
from flatweights.tensorflow._library import Library
from flatweights.tensorflow._operations import Operations


class SessionOperations(Operations):
    """Reads and writes the variables of one graph in a session.

    Attributes:
        graph: The graph.
        session: Where operations run; None until one is set.
        placeholders: By name, where one variable's value is fed, as in Ray's class.
        assignment_nodes: By name, what assigns it, as in Ray's class.
    """

    def __init__(
        self,
        variables: Mapping[str, tf.Variable],
        graph: tf.Graph,
        groups: list[Group],
        library: Library | None,
    ) -> None:
        """Add the operations to ``graph``.

        Raises:
            RuntimeError: If the graph is finalized.
        """
        if graph.finalized:
            raise RuntimeError(
                "the graph is finalized: construct TensorFlowVariables before that "
                "(before tf.compat.v1.train.MonitoredTrainingSession), for it adds operations"
            )
        self.graph = graph
        self.groups = groups
        self.session: Any = None
        self._names = list(variables)
        self.placeholders: dict[str, tf.Tensor] = {}
        self.assignment_nodes: dict[str, Any] = {}
        # Neither the caller's device, name scope nor control dependencies are ours.
        with (
            self.graph.as_default(),
            tf.compat.v1.name_scope(None),
            tf.device(None),
            tf.control_dependencies(None),
        ):
            self._add_nodes_per_variable(variables)
            self._nodes = {id(group): _Nodes(group, library) for group in groups}

    def _add_nodes_per_variable(self, variables: Mapping[str, tf.Variable]) -> None:
        for name, variable in variables.items():
            placeholder = tf.compat.v1.placeholder(
                variable.dtype.base_dtype, variable.shape, name=f"Placeholder_{name}"
            )
            self.placeholders[name] = placeholder
            self.assignment_nodes[name] = variable.assign(placeholder)

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
        """Check that there is a session that is open."""
        if self.session is None:
            raise RuntimeError(
                "the session is not set: pass it to the constructor, or call set_session(sess)"
            )
        if self.place() is None:
            raise RuntimeError("the session is closed: set one that is open by set_session(sess)")

    def place(self) -> Any:
        """Return the session proper, which a monitored one makes anew; None if it is closed."""
        session = self.session
        if hasattr(session, "_tf_sess"):
            session = None if session._is_closed() else session._tf_sess()
        return None if session is None or session._closed else session

    def bind(self, groups: Sequence[Group]) -> list[NDArray[np.int64]]:
        """Run the op for each variable of ``groups``, all in one run."""
        return list(self._run([op for group in groups for op in self._nodes[id(group)].bind]))

    def read(self, groups: Sequence[Group]) -> list[NDArray[Any]]:
        """Run one concat per group, all in one run."""
        try:
            return [
                np.asarray(vector)
                for vector in self._run([self._nodes[id(group)].read for group in groups])
            ]
        except tf.errors.FailedPreconditionError as error:
            raise RuntimeError(
                f"expected initialized variables, got uninitialized: {self._uninitialized()}; "
                "run tf.compat.v1.global_variables_initializer() first"
            ) from error

    def write(self, groups: Sequence[Group], vectors: Sequence[NDArray[Any]]) -> None:
        """Run one split per group, all in one run."""
        nodes = [self._nodes[id(group)] for group in groups]
        self._run(
            [node.write for node in nodes],
            {node.fed: vector for node, vector in zip(nodes, vectors, strict=True)},
        )

    def write_some(self, values: Mapping[int, NDArray[Any]]) -> None:
        """Run the assignments, all in one run."""
        names = {self._names[i]: value for i, value in values.items()}
        fetches = [_operation(self.assignment_nodes[name]) for name in names]
        self._run(fetches, {self.placeholders[name]: value for name, value in names.items()})

    def _run(self, fetches: Any, feed: dict[tf.Tensor, NDArray[Any]] | None = None) -> Any:
        # The session proper: hooks of a monitored one count steps of training, not these.
        return self.place().run(fetches, feed)

    def _uninitialized(self) -> str:
        names = []
        for group in self.groups:
            # Each input of the concat reads one variable; the last says along which axis.
            reads = self._nodes[id(group)].read.op.inputs
            for slot, read in zip(group.layout.slots, reads, strict=False):
                try:
                    self._run(read)
                except tf.errors.FailedPreconditionError:
                    names.append(repr(slot.name))
        return ", ".join(names)


class _Nodes:
    """What the graph has for one group."""

    def __init__(self, group: Group, library: Library | None) -> None:
        self.read = group.concat()
        self.fed = tf.compat.v1.placeholder(group.dtype, [group.layout.size])
        values = group.split(self.fed)
        assignments = [
            _operation(variable.assign(value, read_value=False))
            for variable, value in zip(group.variables, values, strict=True)
        ]
        self.write = tf.group(*assignments)
        # One for each variable: one op over handles on two devices could not be placed.
        self.bind = (
            [library.bind(variable.handle) for variable in group.variables]
            if library is not None and not group.obstacle
            else []
        )


def _operation(assignment: Any) -> tf.Operation:
    # Fetching the operation, unlike its output, brings no value back.
    return assignment if isinstance(assignment, tf.Operation) else assignment.op
