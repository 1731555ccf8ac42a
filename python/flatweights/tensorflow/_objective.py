"""A loss as a function of the vector of weights, and its gradient."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import ArrayLike, DTypeLike, NDArray

from flatweights._cast import is_settable, move_parts
from flatweights._dtypes import is_floating
from flatweights._flatten import new_vector
from flatweights._layout import Layout
from flatweights.tensorflow._eager import eagerly
from flatweights.tensorflow._gradients import concat, trained_positions
from flatweights.tensorflow._kinds import inner_variable
from flatweights.tensorflow._session import SessionOperations


class Objective(ABC):
    """Evaluates a loss and its gradient at a vector of weights."""

    def __init__(
        self,
        variables: Mapping[str, Any],
        layout: Layout,
        set_flat: Callable[[ArrayLike], None],
        dtype: DTypeLike,
    ) -> None:
        """Take the ``variables`` at the slots of ``layout``, and the function that sets them."""
        self._set_flat = set_flat
        self._layout = layout
        self._dtype = np.dtype(dtype)
        listed = list(variables.values())
        self._positions = trained_positions(listed)
        if not self._positions:
            raise ValueError("expected trainable variables, found none")
        self._variables = [inner_variable(listed[i]) for i in self._positions]
        slots = [layout.slots[i] for i in self._positions]
        self._trained = Layout(
            [slot.name for slot in slots],
            [slot.shape for slot in slots],
            [slot.dtype for slot in slots],
        )
        if not is_floating(self._dtype) or not is_settable(self._trained.dtype, self._dtype):
            raise TypeError(
                f"dtype: expected a floating one that holds {self._trained.dtype}, got "
                f"{self._dtype}"
            )

    def _evaluate_at(self, x: ArrayLike, feed: Any) -> tuple[float, NDArray[Any]]:
        self._set_flat(x)
        loss, gradient = self._run(feed)
        return float(loss), self._vector(gradient)

    @abstractmethod
    def _run(self, feed: Any) -> tuple[Any, NDArray[Any]]:
        """Return the loss and its gradient for the trainable variables; it may be an alias."""

    def _vector(self, gradient: NDArray[Any]) -> NDArray[Any]:
        """Return ``gradient`` as a new vector, with zeros for variables that are not trained."""
        flat = new_vector(self._layout.size, self._dtype)
        if self._trained.size == self._layout.size:
            move_parts([flat], [gradient])
            return flat
        flat.fill(0)
        views = self._layout.vector_views(flat)
        move_parts([views[i] for i in self._positions], self._trained.vector_views(gradient))
        return flat

    def _flat(self, loss: tf.Tensor, gradients: Sequence[Any]) -> tf.Tensor:
        """Return the op that concatenates the gradients of ``loss`` to a vector."""
        if loss.shape.rank not in (0, None) or not loss.dtype.is_floating:
            raise ValueError(
                f"loss_fn: expected a scalar of a floating dtype, got {loss.dtype.name} "
                f"{loss.shape}"
            )
        if all(gradient is None for gradient in gradients):
            raise ValueError("loss_fn: expected a loss that depends on the variables, got none")
        return concat(gradients, self._trained, self._trained.dtype)


class EagerObjective(Objective):
    """Evaluates by a `tf.function` that the constructor traces."""

    def __init__(self, loss_fn: Callable[[], Any], *args: Any) -> None:
        """Trace ``loss_fn``, which is called once."""
        if tf.inside_function():
            raise RuntimeError("expected to be called outside of any tf.function, got inside one")
        super().__init__(*args)
        # Trace it with autograph, as its author expects, unless it is a tf.function already.
        is_traced = hasattr(loss_fn, "get_concrete_function")
        traced = loss_fn if is_traced else tf.function(loss_fn)

        def evaluate() -> tuple[tf.Tensor, tf.Tensor]:
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(self._variables)
                loss = tf.convert_to_tensor(traced())
            return loss, self._flat(loss, tape.gradient(loss, self._variables))

        self._function = tf.function(evaluate, autograph=False)
        with eagerly():
            self._function.get_concrete_function()

    def __call__(self, x: ArrayLike) -> tuple[float, NDArray[Any]]:
        """Set the weights to ``x``; return the loss and its gradient there."""
        return self._evaluate_at(x, None)

    def _run(self, feed: Any) -> tuple[Any, NDArray[Any]]:
        with eagerly():
            loss, gradient = self._function()
            return np.asarray(loss), np.asarray(gradient)


class SessionObjective(Objective):
    """Evaluates by operations that the constructor adds to a graph."""

    def __init__(self, loss_fn: Callable[[], Any], session: SessionOperations, *args: Any) -> None:
        """Call ``loss_fn`` once, and add the operations to the graph of ``session``."""
        super().__init__(*args)
        self._session = session
        if session.graph.finalized:
            raise RuntimeError(
                "the graph is finalized: call value_and_gradient before that (before "
                "tf.compat.v1.train.MonitoredTrainingSession), because it adds operations"
            )
        with session.graph.as_default():
            loss = tf.convert_to_tensor(loss_fn())
            gradients = tf.gradients(loss, self._variables)
            self._fetches = [loss, self._flat(loss, gradients)]

    def __call__(
        self, x: ArrayLike, feed_dict: Mapping[Any, Any] | None = None
    ) -> tuple[float, NDArray[Any]]:
        """Set the weights to ``x``; return the loss and its gradient there."""
        return self._evaluate_at(x, feed_dict)

    def _run(self, feed: Any) -> tuple[Any, NDArray[Any]]:
        loss, gradient = self._session.session.run(self._fetches, feed)
        return loss, np.asarray(gradient)
