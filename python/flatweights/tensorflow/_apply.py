"""Optimizer steps along a gradient that is one vector.

TensorFlow gets one tensor per dtype. Functions and operations are built once per optimizer.
"""

import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from flatweights._dtypes import is_averaged
from flatweights._layout import Layout, cast_for_slot
from flatweights._locks import TurnLock
from flatweights.tensorflow._buckets import Bucket
from flatweights.tensorflow._eager import check_outside_of_scopes, eagerly
from flatweights.tensorflow._gradients import trained_positions
from flatweights.tensorflow._kinds import inner_variable, is_of_keras_3
from flatweights.tensorflow._session import SessionOperations, isolated, run, uninitialized

tf1 = tf.compat.v1


class Steps:
    """The steps of all optimizers that were used with a model.

    A step is dropped together with its optimizer.
    """

    def __init__(
        self,
        variables: Mapping[str, Any],
        layout: Layout,
        session: SessionOperations | None,
        states: Collection[int],
    ) -> None:
        """Take the ``variables`` at the slots of ``layout``.

        Args:
            variables: In the form that the user passed.
            layout: Their layout.
            session: Operations of the variables' graph; None for eager variables.
            states: The positions of those that `trained_positions` leaves out.
        """
        self._wrappers = list(variables.values())
        self._layout = layout
        self._session = session
        self._states = states
        self._steps: weakref.WeakKeyDictionary[Any, _EagerStep | _SessionStep]
        self._steps = weakref.WeakKeyDictionary()
        self._lock = TurnLock()

    def prepare(self, optimizer: Any) -> "_EagerStep | _SessionStep":
        """Return the step of ``optimizer``, built at the first call."""
        if self._session is None:
            if tf.inside_function():
                raise RuntimeError(
                    "inside a tf.function a step would be taken once, when it is traced, and never "
                    "again: call this outside"
                )
            check_outside_of_scopes()
        if not callable(getattr(optimizer, "apply_gradients", None)):
            raise TypeError(f"expected an optimizer, got {type(optimizer).__name__}")
        with self._lock.ready():
            step = self._steps.get(optimizer)
            if step is None:
                step = self._steps[optimizer] = self._new(optimizer)
        return step

    def apply(self, optimizer: Any, flat: NDArray[Any]) -> None:
        """Take one step along the contiguous vector ``flat``."""
        if self._session is not None:
            self._session.check()
        step = self.prepare(optimizer)
        views = self._layout.vector_views(flat)
        buffers = []
        for bucket in step.buckets:
            values = [cast_for_slot(self._layout, i, views[i]) for i in bucket.slots]
            # An optimizer may keep an alias of its gradient, so it gets a copy.
            buffers.append(bucket.copy_packed(values))
        step.run(buffers)

    def _new(self, optimizer: Any) -> "_EagerStep | _SessionStep":
        slots: dict[np.dtype[Any], list[int]] = {}
        for i in trained_positions(self._wrappers, self._states):
            dtype = self._layout.slots[i].dtype
            if is_averaged(dtype):  # others, such as a counter of steps, have no gradient
                slots.setdefault(dtype, []).append(i)
        if not slots:
            raise ValueError("expected trainable variables, found none")
        inner = [inner_variable(wrapper) for wrapper in self._wrappers]
        buckets = [Bucket(inner, members, self._layout) for members in slots.values()]
        if self._session is not None:
            return _SessionStep(optimizer, buckets, self._session)
        return _EagerStep(optimizer, buckets, self._wrappers)


class _EagerStep:
    """The step of one optimizer: a `tf.function`, traced once.

    Attributes:
        buckets: The trainable variables by dtype.
    """

    def __init__(self, optimizer: Any, buckets: list[Bucket], wrappers: Sequence[Any]) -> None:
        self.buckets = buckets
        positions = [i for bucket in buckets for i in bucket.slots]
        known = {i: _as_known_to(optimizer, wrappers[i]) for i in positions}
        variables = [*known.values()]
        with eagerly():
            if is_of_keras_3(optimizer, "Optimizer") and not optimizer.built:
                # Unlike other optimizers, it cannot create its variables inside the function. It
                # maps gradients without variables to these in order.
                optimizer.build([known[i] for i in sorted(positions)])
        # The function lives as long as the optimizer, so it must not keep the optimizer alive.
        optimizer_ref: Any = weakref.ref(optimizer)

        def step(*buffers: tf.Tensor) -> None:
            pieces = []
            for bucket, buffer in zip(buckets, buffers, strict=True):
                pieces += bucket.cut(buffer)
            optimizer_ref().apply_gradients(list(zip(pieces, variables, strict=True)))

        signature = [tf.TensorSpec([bucket.packed_size], bucket.dtype) for bucket in buckets]
        self._function = tf.function(step, input_signature=signature)

    def run(self, buffers: Sequence[NDArray[Any]]) -> None:
        """Take the step along one packed buffer per bucket, which TensorFlow may keep."""
        with eagerly():
            self._function(*map(tf.convert_to_tensor, buffers))


class _SessionStep:
    """The step of one optimizer: operations of a graph, with one placeholder per bucket.

    Attributes:
        buckets: The trainable variables by dtype.
    """

    def __init__(self, optimizer: Any, buckets: list[Bucket], session: SessionOperations) -> None:
        self.buckets = buckets
        # Other optimizers return before the step is taken, or return no operation.
        if not isinstance(optimizer, tf1.train.Optimizer):
            raise TypeError(
                "in a graph, expected an optimizer of tf.compat.v1.train, got "
                f"{type(optimizer).__module__}.{type(optimizer).__name__}"
            )
        self._session = session
        self._lock = TurnLock()
        self._checked: weakref.ref[Any] | None = None
        with isolated(session.graph, "call prepare_gradients(optimizer)"):
            self._add_nodes(optimizer)

    def _add_nodes(self, optimizer: Any) -> None:
        self._fed = [tf1.placeholder(bucket.dtype, [bucket.packed_size]) for bucket in self.buckets]
        pairs: list[tuple[tf.Tensor, tf.Variable]] = []
        for bucket, fed in zip(self.buckets, self._fed, strict=True):
            pairs += zip(bucket.cut(fed), bucket.variables, strict=True)
        before = {id(variable) for variable in tf1.global_variables()}
        self._train = optimizer.apply_gradients(pairs)
        new = [variable for variable in tf1.global_variables() if id(variable) not in before]
        # Slots may be older than this step: another object's step may have created them.
        own = {variable.op.name: variable for variable in (*optimizer.variables(), *new)}
        self._initializers = {name: variable.initializer for name, variable in own.items()}
        distinct = {variable.op.name: variable for _, variable in pairs} | own
        self._uninitialized = tf1.report_uninitialized_variables(list(distinct.values()))

    def run(self, buffers: Sequence[NDArray[Any]]) -> None:
        """Take the step along one packed buffer per bucket, which TensorFlow may keep."""
        session, raw = self._session.opened()
        with self._lock.ready():
            self._initialize(raw)
        run(session, self._train, dict(zip(self._fed, buffers, strict=True)))

    def _initialize(self, raw: Any) -> None:
        """Initialize the optimizer's variables in a raw session, because nothing else may do so.

        Raises:
            RuntimeError: If other variables are not initialized.
        """
        if self._checked is not None and self._checked() is raw:
            return
        # In the raw session, since hooks of a monitored one must count only steps.
        names = [name.decode() for name in run(raw, self._uninitialized)]
        others = [name for name in names if name not in self._initializers]
        if others:
            raise uninitialized(others)
        if names:
            run(raw, [self._initializers[name] for name in names])
        self._checked = weakref.ref(raw)


def _as_known_to(optimizer: Any, variable: Any) -> Any:
    # Keras 3 optimizers read constraints, which only Keras 3 variables have.
    is_known = is_of_keras_3(optimizer, "Optimizer") or isinstance(variable, tf.Variable)
    return variable if is_known else inner_variable(variable)
