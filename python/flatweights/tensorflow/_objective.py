"""A loss as a function of the vector of weights, and its gradient."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import ArrayLike, DTypeLike, NDArray

from flatweights._core import is_settable, move_parts
from flatweights._dtypes import is_floating, read_dtype
from flatweights._flatten import new_vector
from flatweights._layout import Layout, layout_at
from flatweights._trees import as_array
from flatweights.tensorflow._eager import check_outside_of_scopes, eagerly
from flatweights.tensorflow._gradients import concat, trained_positions
from flatweights.tensorflow._kinds import inner_variable
from flatweights.tensorflow._session import SessionOperations, check_unfinished, run


class Objective:
    """Makes functions that evaluate a loss and its gradient at a vector of weights."""

    def __init__(
        self,
        variables: Mapping[str, Any],
        layout: Layout,
        set_flat: Callable[[ArrayLike], None],
        dtype: DTypeLike,
        states: Collection[int],
    ) -> None:
        """Take the ``variables`` at the slots of ``layout``, and the function that sets them.

        Those at the positions ``states`` stay constant, as `trained_positions` says.
        """
        self._set_flat = set_flat
        self._layout = layout
        self._dtype = read_dtype(dtype, "dtype")
        listed = list(variables.values())
        self._positions = trained_positions(listed, states)
        if not self._positions:
            raise ValueError("expected trainable variables, found none")
        self._variables = [inner_variable(listed[i]) for i in self._positions]
        self._trained = layout_at(layout, self._positions)
        if not is_floating(self._dtype) or not is_settable(self._trained.dtype, self._dtype):
            raise TypeError(
                f"dtype: expected a floating one that holds {self._trained.dtype}, got "
                f"{self._dtype}"
            )

    def eager(
        self, loss_fn: Callable[[], Any]
    ) -> Callable[[ArrayLike], tuple[float, NDArray[Any]]]:
        """Return a function of the weights; ``loss_fn`` is called once, to trace it."""
        if tf.inside_function():
            raise RuntimeError("expected to be called outside of any tf.function, got inside one")
        check_outside_of_scopes()
        # Trace it with autograph, as its author expects, unless it is a tf.function already.
        is_traced = hasattr(loss_fn, "get_concrete_function")
        traced = loss_fn if is_traced else tf.function(loss_fn)

        def compute() -> tuple[tf.Tensor, tf.Tensor]:
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(self._variables)
                loss = tf.convert_to_tensor(traced())
            return loss, self._flat(loss, tape.gradient(loss, self._variables))

        function = tf.function(compute, autograph=False)
        with eagerly():
            function.get_concrete_function()

        def evaluate(x: ArrayLike) -> tuple[float, NDArray[Any]]:
            check_outside_of_scopes()
            self._set_flat(x)
            with eagerly():
                loss, gradient = function()
                return self._result(as_array(loss, "loss"), np.asarray(gradient))

        return evaluate

    def in_session(
        self, loss_fn: Callable[[], Any], session: SessionOperations
    ) -> Callable[..., tuple[float, NDArray[Any]]]:
        """Return a function of the weights and a feed; ``loss_fn`` is called once, to add ops."""
        check_unfinished(session.graph, "call value_and_gradient")
        with session.graph.as_default():
            loss = tf.convert_to_tensor(loss_fn())
            fetches = [loss, self._flat(loss, tf.gradients(loss, self._variables))]

        def evaluate(
            x: ArrayLike, feed_dict: Mapping[Any, Any] | None = None
        ) -> tuple[float, NDArray[Any]]:
            self._set_flat(x)
            loss, gradient = run(session.opened()[0], fetches, feed_dict)
            return self._result(loss, np.asarray(gradient))

        return evaluate

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

    def _result(self, loss: Any, gradient: NDArray[Any]) -> tuple[float, NDArray[Any]]:
        """Return loss and ``gradient``, the latter as a new vector of all variables."""
        flat = new_vector(self._layout.size, self._dtype)
        if self._trained.size == self._layout.size:
            move_parts([flat], [gradient])
        else:
            flat.fill(0)  # for variables that are not trained
            views = self._layout.vector_views(flat)
            move_parts([views[i] for i in self._positions], self._trained.vector_views(gradient))
        return float(loss), flat
