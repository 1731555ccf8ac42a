"""`average_gradients`: an optimizer that averages gradients over members before it applies them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from tensorflow.python.eager import context as eager_context
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from flatweights import Layout
from flatweights._average import Nonfinite
from flatweights.keras._seat import Seat, calls_are_equal
from flatweights.ray import Member
from flatweights.tensorflow import TensorFlowVariables

Optimizer = TypeVar("Optimizer", bound=keras.optimizers.Optimizer)


def average_gradients(
    optimizer: Optimizer,
    *,
    member: Member | None = None,
    timeout: float | None = None,
    nonfinite: Nonfinite = "propagate",
) -> Optimizer:
    """Have ``optimizer`` average the gradients of all members before it applies them.

    Each member computes the gradient of its own batch; all apply the average, and so stay alike.
    With batches of one size, that is the step of one process with all of the batches. It works in
    ``fit``, in a `tf.function` and in eager loops. Clipping, weight decay, moving averages of the
    weights (``use_ema``) and a `keras.optimizers.LossScaleOptimizer` see the averaged gradient;
    with ``gradient_accumulation_steps``, accumulated gradients are averaged, once for all steps.
    All gradients travel as one vector; those of embeddings become dense, so that clipping sees the
    sum of rows that occur twice, and not each of them.

    The optimizer is changed in place: it keeps its class, and is saved and loaded like any other,
    without this; after loading, call this again. Under the policy ``mixed_float16``, an
    optimizer that is not in a `keras.optimizers.LossScaleOptimizer` is put into one first, as
    ``compile`` does.

    Before the first step, all members get the trainable variables and the optimizer's slots of
    rank 0. In a loop of your own, call ``optimizer.build(model.trainable_variables)`` before the
    first gradients are computed, which does that. Other variables, such as BatchNormalization's
    moving statistics, stay each member's own; `AverageWeights` beside this averages them, too.

    >>> import keras
    >>> import flatweights.ray
    >>> member = flatweights.ray.join("gradients", rank=0, size=1)
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile(average_gradients(keras.optimizers.Adam(), member=member), "mse")
    >>> history = model.fit(np.ones((8, 2)), np.ones(8), verbose=0)
    >>> member.leave()

    Args:
        optimizer: Of Keras 3.
        member: This process's member. If None, that of the worker of Ray Train, shared with the
            callbacks, which is joined at the first step.
        timeout: Seconds that other members may be late for a step; for ever, if None.
        nonfinite: What to do about NaN and infinity; see `flatweights.average`. A
            `keras.optimizers.LossScaleOptimizer` needs ``"propagate"``: all members then skip
            the step.

    Returns:
        ``optimizer``.

    Raises:
        TypeError: If it is no optimizer of Keras 3, or ``member`` is no member.
        ValueError: If it averages gradients already, or ``nonfinite`` does not suit it.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            f"optimizer: expected one of Keras 3, got {type(optimizer).__module__}."
            f"{type(optimizer).__name__}"
        )
    if isinstance(getattr(optimizer.apply, "__self__", None), _Averaging):
        raise ValueError("optimizer: it averages gradients already")
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if not scales and keras.config.dtype_policy().name == "mixed_float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        scales = True
    if scales and nonfinite != "propagate":
        raise ValueError(
            f"nonfinite: expected 'propagate' for a LossScaleOptimizer, got {nonfinite!r}"
        )
    _Averaging(optimizer, Seat(member), timeout, nonfinite)
    return optimizer


class _Averaging:
    """Takes the place of some methods of one optimizer."""

    def __init__(
        self, optimizer: Any, seat: Seat, timeout: float | None, nonfinite: Nonfinite
    ) -> None:
        self._optimizer = optimizer
        self._seat = seat
        self._timeout = timeout
        self._nonfinite = nonfinite
        self._applied: Sequence[Any] = ()  # variables of the call of `apply` that is under way
        self._state: TensorFlowVariables | None = None
        self._is_started = False
        self._exchanges: dict[tuple[int, ...], _Exchange] = {}
        self._apply: Callable[..., None] = optimizer.apply
        self._finalize: Callable[[Any], None] = optimizer.finalize_variable_values
        self._make: Callable[[Any], None] = optimizer.build
        self._clip: Callable[[list[Any]], list[Any]] = optimizer._clip_gradients
        # Those that call others' `apply` decide whether, and what of: they have to see averages.
        inner = hasattr(optimizer, "inner_optimizer") or hasattr(optimizer, "_inner_optimizers")
        # On the object itself, past Keras' tracking: its class is what is saved.
        methods = vars(optimizer)
        methods["apply"] = self._apply_averages if inner else self._apply_own
        methods["build"] = self._build
        methods["finalize_variable_values"] = self._end
        if not inner:
            methods["_clip_gradients"] = self._clip_averages

    def _apply_own(self, grads: Any, trainable_variables: Any = None) -> None:
        grads, variables = self._begin(grads, trainable_variables)
        self._applied = [v for g, v in zip(grads, variables, strict=True) if _is_averaged(g, v)]
        self._apply(grads, None if trainable_variables is None else variables)

    def _clip_averages(self, grads: list[Any]) -> list[Any]:
        return self._clip(self._average(grads, self._applied))

    def _apply_averages(self, grads: Any, trainable_variables: Any = None) -> None:
        grads, variables = self._begin(grads, trainable_variables)
        pairs = enumerate(zip(grads, variables, strict=True))
        positions = [i for i, pair in pairs if _is_averaged(*pair)]
        averages = self._average([grads[i] for i in positions], [variables[i] for i in positions])
        for i, average in zip(positions, averages, strict=True):
            grads[i] = average
        self._apply(grads, None if trainable_variables is None else variables)

    def _begin(self, grads: Any, trainable_variables: Any) -> tuple[list[Any], list[Any]]:
        """Check where this is called, and have all members start alike, if that is possible yet."""
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        if graph is not None and not tf.inside_function():
            raise RuntimeError("average_gradients: expected eager TensorFlow, got a TF1 graph")
        if graph is not None and GraphOrParentsInXlaContext(graph):
            raise RuntimeError(
                "average_gradients: XLA compiles this step, and cannot wait for other members. "
                "Use model.compile(..., jit_compile=False), or in a loop of your own "
                "tf.function(jit_compile=True) around the computation of the gradients alone"
            )
        if type(graph).__name__ == "CondBranchFuncGraph":
            raise RuntimeError(
                "average_gradients: gradients are applied under a condition, on which members may "
                "disagree. If the condition is that of a LossScaleOptimizer, pass that one: "
                "average_gradients(keras.optimizers.LossScaleOptimizer(optimizer))"
            )
        optimizer = self._optimizer
        if trainable_variables is None:
            trainable_variables = optimizer._trainable_variables
        variables = list(trainable_variables)
        if not self._is_started:
            with tf.init_scope():
                # Of a model that is built in this function, the first trace only makes variables.
                if all(_inner(variable).is_initialized() for variable in variables):
                    if optimizer.built:
                        self._start(variables)
                    else:
                        with keras.name_scope(optimizer.name):
                            optimizer.build(variables)
        return list(grads), variables

    def _build(self, variables: Sequence[Any]) -> None:
        self._make(variables)
        if tf.executing_eagerly() and not self._is_started:
            self._start(variables)

    def _start(self, variables: Sequence[Any]) -> None:
        """Give all members the variables and slots of rank 0."""
        member = self._seat.take()
        state = TensorFlowVariables([*variables, self._optimizer])
        member.broadcast_variables(state, timeout=self._timeout)
        self._is_started = True

    def _average(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the averages of ``grads``, dense; of a graph inside a `tf.function`."""
        if not grads:
            return []
        key = tuple(id(_inner(variable)) for variable in variables)
        exchange = self._exchanges.get(key)
        if exchange is None:
            with tf.init_scope():
                exchange = self._exchanges[key] = _Exchange(variables)
        dense = [tf.convert_to_tensor(grad) for grad in grads]
        if tf.executing_eagerly():
            return exchange.cut(self._exchange(exchange, dense), dense)
        with tf.device("CPU:0"):
            flat = tf.py_function(
                lambda *tensors: self._exchange(exchange, tensors), dense, exchange.dtype
            )
        flat.set_shape([exchange.size])
        return exchange.cut(flat, dense)

    def _exchange(self, exchange: _Exchange, grads: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return the average of ``grads`` as one vector."""
        if not self._is_started:
            self._start(exchange.variables)
        member = self._seat.take()
        exchange.grads = list(grads)
        try:
            with calls_are_equal("gradients"):
                member.average_variables(exchange, timeout=self._timeout, nonfinite=self._nonfinite)
        finally:
            exchange.grads = []
        return exchange.take()

    def _end(self, var_list: Any) -> None:
        """At the end of `fit`, see that all members have come to it."""
        if self._is_started:
            self._is_started = False
            end = {"the end of training": np.zeros(1)}
            with calls_are_equal("the end of training"):
                self._seat.take().average(end, timeout=self._timeout)
        self._finalize(var_list)


class _Exchange:
    """The gradients of some variables, as `Member.average_variables` wants them.

    Attributes:
        variables: Which they are of.
        grads: One eager tensor per variable, while they are averaged.
        size: Their number of elements.
        dtype: That of the vector.
        layout: Of the vector.
    """

    def __init__(self, variables: Sequence[Any]) -> None:
        self.variables = variables
        self.grads: list[tf.Tensor] = []
        self._model = TensorFlowVariables(list(variables))
        self.size = self._model.layout.size
        self.dtype = tf.as_dtype(self._model.layout.dtype)
        self.layout = Layout(["gradients"], [(self.size,)], [self._model.layout.dtype])
        self._sizes = [slot.size for slot in self._model.layout.slots]
        self._shapes = [slot.shape for slot in self._model.layout.slots]
        self._mean: NDArray[Any] | None = None

    def _gather_into(self, buffer: NDArray[np.uint8]) -> None:
        """Gather the gradients."""
        (flat,) = self.layout.packed_views(buffer)
        self._model.flatten_gradients(self.grads, out=flat)

    def _scatter(self, buffer: NDArray[np.uint8]) -> None:
        """Keep a copy of the average."""
        (mean,) = self.layout.packed_views(buffer)
        self._mean = mean.copy()

    def take(self) -> tf.Tensor:
        """Return the average, as a tensor over its memory, which is TensorFlow's from now on."""
        mean, self._mean = self._mean, None
        device = eager_context.context().device_name
        return tf.__internal__.EagerTensor(mean, device, self.dtype.as_datatype_enum)

    def cut(self, flat: tf.Tensor, like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return the parts of ``flat``, in the dtypes of ``like``."""
        parts = tf.split(flat, self._sizes)
        shaped = zip(parts, self._shapes, like, strict=True)
        return [tf.cast(tf.reshape(part, shape), one.dtype) for part, shape, one in shaped]


def _is_averaged(grad: Any, variable: Any) -> bool:
    """Whether there is a gradient: of some variables, Keras passes the next value instead."""
    return grad is not None and not getattr(variable, "overwrite_with_gradient", False)


def _inner(variable: Any) -> Any:
    return variable.value if isinstance(variable, keras.Variable) else variable
