"""Variables of a TF1 graph, moved by operations that are built once and run in a session."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from flatweights._layout import Layout
from flatweights.tensorflow._transport import Transport


class SessionTransport(Transport):
    """Reads and writes the variables of one graph in a session.

    Attributes:
        graph: The graph.
        session: Where operations run; None until one is set.
        placeholders: By name, where one variable's value is fed, as in Ray's class.
        assignment_nodes: By name, what assigns it, as in Ray's class.
    """

    def __init__(
        self, variables: Mapping[str, tf.Variable], graph: tf.Graph, layout: Layout
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
        super().__init__(list(variables.values()), layout)
        self.graph = graph
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
            self._reads = [group.concat() for group in self._groups]
            self._add_writes()

    def _add_nodes_per_variable(self, variables: Mapping[str, tf.Variable]) -> None:
        for name, variable in variables.items():
            placeholder = tf.compat.v1.placeholder(
                variable.dtype.base_dtype, variable.shape, name=f"Placeholder_{name}"
            )
            self.placeholders[name] = placeholder
            self.assignment_nodes[name] = variable.assign(placeholder)

    def _add_writes(self) -> None:
        self._fed = []
        assignments = []
        for group in self._groups:
            vector = tf.compat.v1.placeholder(group.dtype, [group.layout.size])
            self._fed.append(vector)
            values = group.split(vector)
            assignments += [
                _operation(variable.assign(value, read_value=False))
                for variable, value in zip(group.variables, values, strict=True)
            ]
        self._write_all = tf.group(*assignments)

    def set_session(self, session: Any) -> None:
        """Run in ``session`` from now on.

        Raises:
            ValueError: If it is a session of another graph.
        """
        graph = getattr(session, "graph", None)
        if session is not None and graph is not self.graph:
            raise ValueError("expected a session of the graph that the variables are in")
        self.session = session

    def _run(self, fetches: Any, feed: dict[tf.Tensor, NDArray[Any]] | None = None) -> Any:
        if self.session is None:
            raise RuntimeError(
                "the session is not set: pass it to the constructor, or call set_session(sess)"
            )
        return self.session.run(fetches, feed)

    def _read(self) -> list[NDArray[Any]]:
        try:
            return [np.asarray(vector) for vector in self._run(self._reads)]
        except tf.errors.FailedPreconditionError as error:
            raise RuntimeError(
                f"expected initialized variables, got uninitialized: {self._uninitialized()}; "
                "run tf.compat.v1.global_variables_initializer() first"
            ) from error

    def _uninitialized(self) -> str:
        names = []
        for group, vector in zip(self._groups, self._reads, strict=True):
            # Each input of the concat reads one variable; the last says along which axis.
            for slot, read in zip(group.layout.slots, vector.op.inputs, strict=False):
                try:
                    self._run(read)
                except tf.errors.FailedPreconditionError:
                    names.append(repr(slot.name))
        return ", ".join(names)

    def _write(self, vectors: list[NDArray[Any]]) -> None:
        self._run(self._write_all, dict(zip(self._fed, vectors, strict=True)))

    def _write_some(self, values: dict[int, NDArray[Any]]) -> None:
        names = {self._names[i]: value for i, value in values.items()}
        fetches = [_operation(self.assignment_nodes[name]) for name in names]
        self._run(fetches, {self.placeholders[name]: value for name, value in names.items()})


def _operation(assignment: Any) -> tf.Operation:
    # Fetching the operation, unlike its output, brings no value back.
    return assignment if isinstance(assignment, tf.Operation) else assignment.op
