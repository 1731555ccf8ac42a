"""`average_gradients`: an optimizer that averages gradients over members before it applies them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from flatweights import Layout
from flatweights._average import Nonfinite
from flatweights._core import move_parts
from flatweights.keras._lease import MemberLease, calls_are_equal
from flatweights.ray import Member
from flatweights.robust import AnyRule, Rule
from flatweights.tensorflow import TensorFlowVariables
from flatweights.tensorflow._python_op import compute_in_python

Optimizer = TypeVar("Optimizer", bound=keras.optimizers.Optimizer)


def average_gradients(
    optimizer: Optimizer,
    *,
    member: Member | None = None,
    timeout: float | None = None,
    nonfinite: Nonfinite = "propagate",
    rule: AnyRule | None = None,
) -> Optimizer:
    """Have ``optimizer`` average the gradients of all members before it applies them.

    Each member computes the gradient of its own batch; all apply the average, and so stay alike.
    With batches of one size, that is the step of one process with all of the batches. It works in
    ``fit``, in a `tf.function` and in eager loops. Clipping, weight decay, moving averages of the
    weights (``use_ema``) and a `keras.optimizers.LossScaleOptimizer` see the averaged gradient;
    with ``gradient_accumulation_steps``, accumulated gradients are averaged, once for all steps.
    All gradients travel as one buffer; those of embeddings become dense, so that clipping sees the
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
        rule: What takes the place of the mean, such as ``flatweights.robust.Median()``; see
            `flatweights.ray.Member.average`.

    Returns:
        ``optimizer``.

    Raises:
        TypeError: If it is not an optimizer of Keras 3, ``member`` not a `Member`, or ``rule``
            not a rule.
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
    options = {
        "timeout": timeout,
        "nonfinite": nonfinite,
        "rule": None if rule is None else Rule.of(rule),
    }
    _Averaging(optimizer, MemberLease(member), options)
    return optimizer


class _Averaging:
    """Takes the place of some methods of one optimizer."""

    def __init__(self, optimizer: Any, lease: MemberLease, options: dict[str, Any]) -> None:
        self._optimizer = optimizer
        self._lease = lease
        self._options = options  # of each average
        self._timeout = options["timeout"]
        self._applied: Sequence[Any] = ()  # variables of the call of `apply` that is under way
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
        member = self._lease.take()
        state = TensorFlowVariables([*variables, self._optimizer])
        member.broadcast_variables(state, timeout=self._timeout)
        self._is_started = True

    def _average(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the averages of ``grads``, dense; of a graph inside a `tf.function`."""
        if not grads:
            return []
        key = tuple(id(_inner(variable)) for variable in variables)
        exchange = self._exchanges.get(key)
        dense = [tf.convert_to_tensor(grad) for grad in grads]
        if exchange is None:
            with tf.init_scope():
                exchange = self._exchanges[key] = _Exchange(variables, dense)
        compute = functools.partial(self._exchange, exchange)
        with tf.device("CPU:0"):
            averages: list[tf.Tensor] = compute_in_python(compute, dense)
        return averages

    def _exchange(
        self,
        exchange: _Exchange,
        grads: list[NDArray[Any]],
        averages: list[NDArray[Any]],
    ) -> None:
        """Write the averages of ``grads`` to ``averages``."""
        if not self._is_started:
            self._start(exchange.variables)
        member = self._lease.take()
        exchange.grads, exchange.averages = grads, averages
        try:
            with calls_are_equal("gradients"):
                member.average_variables(exchange, **self._options)
        finally:
            exchange.grads, exchange.averages = [], []

    def _end(self, var_list: Any) -> None:
        """At the end of `fit`, see that all members have come to it."""
        if self._is_started:
            self._is_started = False
            end = {"the end of training": np.zeros(1)}
            with calls_are_equal("the end of training"):
                self._lease.take().average(end, timeout=self._timeout)
        self._finalize(var_list)


class _Exchange:
    """The gradients of some variables, as `Member.average_variables` wants them.

    Attributes:
        variables: Which they are of.
        layout: One vector for each.
        grads: Their arrays, while they are averaged.
        averages: Where the averages go, meanwhile.
    """

    def __init__(self, variables: Sequence[Any], grads: Sequence[tf.Tensor]) -> None:
        self.variables = variables
        slots = TensorFlowVariables(list(variables)).layout.slots
        names, shapes = [slot.name for slot in slots], [(slot.size,) for slot in slots]
        self.layout = Layout(names, shapes, [grad.dtype.as_numpy_dtype for grad in grads])
        self.grads: list[NDArray[Any]] = []
        self.averages: list[NDArray[Any]] = []

    def gather_into(self, buffer: NDArray[np.uint8]) -> None:
        move_parts(self.layout.packed_views(buffer), self.grads)

    def scatter(self, buffer: NDArray[np.uint8]) -> None:
        move_parts(self.averages, self.layout.packed_views(buffer))


def _is_averaged(grad: Any, variable: Any) -> bool:
    """Whether there is a gradient: of some variables, Keras passes the next value instead."""
    return grad is not None and not getattr(variable, "overwrite_with_gradient", False)


def _inner(variable: Any) -> Any:
    return variable.value if isinstance(variable, keras.Variable) else variable
