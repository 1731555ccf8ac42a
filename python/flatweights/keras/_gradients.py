"""`average_gradients`: an optimizer that averages gradients over members before it applies them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, TypeVar

import keras
import tensorflow as tf

from flatweights._average import Nonfinite, check_nonfinite
from flatweights.keras._exchanges import Exchanges, adds_up_own, takes_next_value
from flatweights.keras._hooks import replace_clipping, running_fit, variables_of
from flatweights.keras._member_handle import MemberHandle
from flatweights.keras._moments import check_synchronized, synchronize
from flatweights.keras._names import inner_variable, state_names
from flatweights.keras._sparse import Sparse, check_sparse
from flatweights.keras._step_average import StepAverage, checked_graph, computed
from flatweights.keras._training import Training
from flatweights.keras._weak_set import SharedWeakSet
from flatweights.ray import Member, Saved, Variables
from flatweights.robust import AnyRule, Rule
from flatweights.tensorflow._python_op import end_copy_on_read, unconverted

Optimizer = TypeVar("Optimizer", bound=keras.optimizers.Optimizer)

_SCALED = (
    "If the policy, or that of the model, is mixed_float16, compile puts the optimizer into a "
    "LossScaleOptimizer. Pass this to compile: "
    "average_gradients(keras.optimizers.LossScaleOptimizer(optimizer))"
)

_averagings = SharedWeakSet["Averaging"]()
_numbers = count()


def average_gradients(
    optimizer: Optimizer,
    *,
    member: Member | None = None,
    timeout: float | None = None,
    min_results: int | None = None,
    nonfinite: Nonfinite = "propagate",
    rule: AnyRule | None = None,
    state: Variables | Saved | Sequence[Variables | Saved] | None = None,
    sparse: Sparse = "auto",
) -> Optimizer:
    """Make ``optimizer`` average the gradients of all members before it applies them.

    Each member computes the gradient of its own batch. All apply the average, so they stay equal.
    With batches of equal size, that is the step of one process with all of the batches. It works in
    ``fit``, in a `tf.function` and in eager loops. Clipping, weight decay, moving averages of the
    weights (``use_ema``) and a `keras.optimizers.LossScaleOptimizer` see the averaged gradient.
    With ``gradient_accumulation_steps``, accumulated gradients are averaged once for all steps.
    All gradients travel as one buffer. Of large embeddings, only the rows that a batch takes travel
    (``sparse``). Rows that occur twice are added first, so clipping and Adam's squares see their
    sum, instead of each of them.

    The optimizer is changed in place: it keeps its class, and is saved and loaded like any other,
    without the averaging. After loading, call this function again. Under the policy
    ``mixed_float16``, put it into a `keras.optimizers.LossScaleOptimizer` first, as ``compile``
    would: the one that is outside averages.

    Before the first step of the first ``fit``, all members get the trainable variables and the
    optimizer's slots of rank 0. ``optimizer.build(model.trainable_variables)`` does that. Call it
    yourself before the first gradients of your own loop, and, if members may differ, before
    another ``fit`` or one with ``run_eagerly=True``; each of several optimizers with its own
    variables. `AverageLogs` and `AverageWeights` call it at the start of each ``fit``, of several
    optimizers for those that are built. Otherwise a difference is an error at the first step.
    All members need optimizers with the same settings, and the same callbacks that change the
    learning rate or end the training: if these differ, all raise `flatweights.ray.CallsDifferError`
    before the first step. They need gradients of the same variables in each step: a variable that
    gets one in some members only is an error in all. Each member keeps its own values of other
    variables, such as BatchNormalization's moving statistics and frozen layers; add
    `AverageWeights` to average them, too. ``BatchNormalization(synchronized=True)`` normalizes over
    the batches of all members, so its moving statistics are equal, too.

    >>> import keras
    >>> import numpy as np
    >>> import flatweights.ray
    >>> member = flatweights.ray.join("gradients", rank=0, size=1)
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile(average_gradients(keras.optimizers.Adam(), member=member), "mse")
    >>> history = model.fit(np.ones((8, 2)), np.ones(8), verbose=0)
    >>> member.leave()

    Args:
        optimizer: An optimizer of Keras 3.
        member: This process's member. If None, the member of this worker of Ray Train, which is
            shared with the callbacks and joins at the first step.
        timeout: Seconds that other members may be late for a step; for ever, if None. The shortest
            of all members counts.
        min_results: The number of members that a step needs; all, if None. Members that are late or
            have died are left out, and healed when they come back.
        nonfinite: What to do about NaN and infinity; see `flatweights.average`. A
            `keras.optimizers.LossScaleOptimizer` needs ``"propagate"``: all members then skip
            the step.
        rule: A rule that replaces the mean, such as ``flatweights.robust.Median()``; see
            `flatweights.ray.Member.average`.
        state: What heals members besides the variables and the optimizer's slots, such as the
            position in the data, as ``state`` of `flatweights.ray.Member.average`: an object with
            ``save`` and ``restore`` of bytes, or a `flatweights.ray.Variables`, or a list of these.
            The same kinds in all members. In ``fit``, a member that begins with a later epoch gets
            it before that epoch. Without ``min_results``, no member is healed.
        sparse: Whether gradients of tables (`tf.IndexedSlices`, as of embeddings) travel as rows.
            If ``"auto"``, those of a table of at least 4 MiB do; between nodes, of 1 MiB. True
            means all tables, False none. The weights are the same. With a ``rule``, and with
            ``gradient_accumulation_steps`` of this optimizer, whole gradients travel.

    Returns:
        ``optimizer``.

    Raises:
        TypeError: If it is not an optimizer of Keras 3, ``member`` is not a `Member`, ``rule`` is
            not a rule, or ``state`` is of another kind (at the first step that needs it).
        ValueError: If it averages gradients already, or ``nonfinite`` or ``sparse`` does not suit
            it, or the policy is ``mixed_float16``, which takes a
            `keras.optimizers.LossScaleOptimizer`.
        RuntimeError: If it was made in the scope of a `tf.distribute.MirroredStrategy`.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        got = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
        if isinstance(optimizer, str):
            got = repr(optimizer)
        elif isinstance(optimizer, type):
            got = f"the class {optimizer.__name__}"
        raise TypeError(
            "optimizer: expected an optimizer object of Keras 3, such as keras.optimizers.Adam(), "
            f"got {got}"
        )
    if averaging_of_optimizer(optimizer) is not None:
        raise ValueError("optimizer: it averages gradients already")
    _check_strategy(optimizer)
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if not scales and keras.config.dtype_policy().name == "mixed_float16":
        raise ValueError(
            "optimizer: expected a LossScaleOptimizer under the policy mixed_float16, got "
            f"{type(optimizer).__name__}. {_SCALED}"
        )
    if scales and nonfinite != "propagate":
        raise ValueError(
            f"nonfinite: expected 'propagate' for a LossScaleOptimizer, got {nonfinite!r}"
        )
    options = {"nonfinite": nonfinite, "rule": None if rule is None else Rule.of(rule)}
    check_nonfinite(nonfinite)
    check_sparse(sparse, optimizer, options["rule"])
    handle = MemberHandle("average_gradients", member, timeout, min_results)
    more = [*state] if isinstance(state, (list, tuple)) else [] if state is None else [state]
    Averaging(optimizer, handle, options, more, sparse)
    synchronize(_averaging_of_layer)
    return optimizer


class Averaging:
    """Replaces some methods of one optimizer.

    Attributes:
        number: Its number in this process; later ones have higher numbers.
        handle: The member, and the time and the number of members that its calls wait for.
        training: The `fit`, or the loop of a user's own, in which it averages.
        step: What averages the gradients of each step.
    """

    def __init__(
        self,
        optimizer: Any,
        handle: MemberHandle,
        options: dict[str, Any],
        more: Sequence[Any],
        sparse: Sparse,
    ) -> None:
        """Change ``optimizer``.

        Args:
            optimizer: The optimizer.
            handle: See the attribute.
            options: Those of each average.
            more: Parts of the state that heals members, besides variables and slots.
            sparse: Whether rows of tables travel, or "auto".
        """
        self.handle = handle
        self.number = next(_numbers)
        self._optimizer = optimizer
        self._exchanges = Exchanges(optimizer, sparse)
        self.training = Training(optimizer, handle, self._exchanges, more, _trainings_in)
        self.step = StepAverage(optimizer, handle, options, self._exchanges, more, self.training)
        self._steps_to_check = optimizer.gradient_accumulation_steps or 1
        self._accumulated: list[Any] = []  # variables whose gradients are accumulated
        self._apply: Callable[..., None] = optimizer.apply
        self._finalize: Callable[[Any], None] = optimizer.finalize_variable_values
        self._make: Callable[[Any], None] = optimizer.build
        _averagings.add(self)
        # On the object itself, without Keras's tracking: saving looks only at its class. A wrapper
        # would be saved in its place, and loading would need this package.
        methods = vars(optimizer)
        methods["apply"] = self._apply_averages  # before Keras clips and applies gradients
        methods["build"] = self._build  # all members get the values of rank 0
        methods["finalize_variable_values"] = self._end  # what `fit` calls at its end
        # Wrappers decide whether to call the inner optimizer's `apply`, and with which gradients,
        # so they must see averages.
        if adds_up_own(optimizer):
            methods["apply"] = self._accumulate
            replace_clipping(optimizer, lambda sums: self.step.average(sums, self._accumulated))

    def _accumulate(self, grads: Any, trainable_variables: Any = None) -> None:
        """Apply gradients that are averaged after they have been accumulated."""
        grads, variables = self._begin(grads, trainable_variables)
        self._accumulated = [variables[i] for i in _averaged(grads, variables)]
        self._apply_with_all_slots(grads, None if trainable_variables is None else variables)

    def _apply_averages(self, grads: Any, trainable_variables: Any = None) -> None:
        grads, variables = self._begin(grads, trainable_variables)
        positions = _averaged(grads, variables)
        averages = self.step.average(
            [grads[i] for i in positions], [variables[i] for i in positions]
        )
        for i, average in zip(positions, averages, strict=True):
            grads[i] = average
        with tf.control_dependencies(computed(averages)):  # before that, no slot is read
            self._apply_with_all_slots(grads, None if trainable_variables is None else variables)
        for i, average in zip(positions, averages, strict=True):
            if isinstance(average, tf.IndexedSlices):
                end_copy_on_read(inner_variable(variables[i]))

    def _apply_with_all_slots(self, grads: list[Any], variables: list[Any] | None) -> None:
        """Apply ``grads``; raise if the first step makes state that no healed member would get."""
        optimizer, checks = self._optimizer, self._steps_to_check > 0
        if not (checks and optimizer.built and self.handle.min_results is not None):
            self._apply(grads, variables)
            return
        before = state_names(optimizer)
        self._apply(grads, variables)
        made = [name for name in state_names(optimizer) if name not in before]
        if made:
            raise ValueError(
                "min_results: expected an optimizer that makes all of its variables in build, got "
                f"{type(optimizer).__name__}, which made {made[0]!r} in its first step: a "
                "member that comes back would not get it. Make it in build, or leave out "
                "min_results"
            )
        self._steps_to_check -= 1

    @unconverted
    def _begin(self, grads: Any, trainable_variables: Any) -> tuple[list[Any], list[Any]]:
        """Check the context of the call, and build; return the gradients and their variables."""
        graph = checked_graph(
            "average_gradients",
            ", or in a loop of your own tf.function(jit_compile=True) around the computation of "
            "the gradients alone",
        )
        if type(graph).__name__ == "CondBranchFuncGraph":
            raise RuntimeError(
                "average_gradients: gradients are applied under a condition, on which members may "
                "disagree. If the condition is that of a LossScaleOptimizer, pass this: "
                "average_gradients(keras.optimizers.LossScaleOptimizer(optimizer))"
            )
        optimizer = self._optimizer
        _check_strategy(optimizer)
        if trainable_variables is None:
            trainable_variables = variables_of(optimizer)
        variables = list(trainable_variables)
        check_synchronized(variables)
        fit = running_fit()
        if fit is not None:
            averaging_of(fit.model)  # it may not be inside of another: members skip steps alone
        self.training.enter_step(fit)
        if graph is not None:
            _check_known(optimizer, variables)
        with tf.init_scope():
            # If the model is built in this function, its first trace only makes variables.
            values = map(inner_variable, variables)
            if graph is None or all(value.is_initialized() for value in values):
                if not optimizer.built:
                    with keras.name_scope(optimizer.name):
                        self._make(variables)
                if tf.executing_eagerly():
                    self.training.start_in_step(is_traced=graph is not None)
        return list(grads), variables

    def _build(self, variables: Sequence[Any] | None = None) -> None:
        if not isinstance(variables, Sequence):
            raise TypeError(
                "optimizer.build: expected a list of variables, such as model.trainable_variables, "
                f"got {'nothing' if variables is None else type(variables).__name__}"
            )
        self.training.enter_build()
        if not self._optimizer.built:
            self._make(variables)
        if tf.executing_eagerly():
            self.training.start(variables, in_step=False)

    def _end(self, var_list: Any) -> None:
        self.training.finish()
        self._finalize(var_list)
        self.handle.end()

    def trains(self, ids: set[int]) -> bool:
        """Whether the optimizer was built with a variable whose `id` is among ``ids``."""
        optimizer = self._optimizer
        return optimizer.built and not ids.isdisjoint(map(id, variables_of(optimizer)))

    def may_train(self, ids: set[int]) -> bool:
        """Whether the optimizer trains a variable of ``ids``, or is not built yet."""
        return not self._optimizer.built or self.trains(ids)

    def moments_of(self, layer: Any) -> str:
        """Return a name for the moments of ``layer``, equal in all members."""
        fit = running_fit()
        if fit is not None and averaging_of(fit.model) is self:
            self._exchanges.know(fit.model, at_first=True)
        return f"moments beside {self._exchanges.name_of(layer.variables[0])}"


def averaging_of(model: Any) -> Averaging | None:
    """Return the `Averaging` of the optimizer of ``model``; None without one.

    Raises:
        ValueError: If another optimizer is around that one.
    """
    optimizer = getattr(model, "optimizer", None)
    if averaging_of_optimizer(getattr(optimizer, "inner_optimizer", None)) is not None:
        raise ValueError(
            f"average_gradients: expected the optimizer of the model, got the one inside of its "
            f"{type(optimizer).__name__}. {_SCALED}"
        )
    return averaging_of_optimizer(optimizer)


def averagings_in(model: Any) -> list[Averaging]:
    """Return the `Averaging` of each optimizer of ``model``, its attributes or items of these.

    A `train_step` of a user's own may use several optimizers.
    """
    found: dict[Averaging, None] = {}
    for value in vars(model).values():
        items = value.values() if isinstance(value, dict) else value
        for one in items if isinstance(value, (dict, list, tuple)) else [value]:
            averaging = averaging_of_optimizer(one)
            if averaging is not None:
                found[averaging] = None
    return [*found]


def _trainings_in(model: Any) -> list[Training]:
    return [one.training for one in averagings_in(model)]


def averaging_of_optimizer(optimizer: Any) -> Averaging | None:
    """Return the `Averaging` of ``optimizer``; None without one."""
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        return None
    averaging = getattr(optimizer.apply, "__self__", None)
    return averaging if isinstance(averaging, Averaging) else None


def _averaging_of_layer(variables: Sequence[Any]) -> Averaging | None:
    """Return the `Averaging` of the optimizer that trains a layer of ``variables``, if any.

    That is the optimizer of the `fit` that runs, unless another one was built with them. Of several
    such, the newest counts: a model that was compiled again has left its older ones.
    """
    ids = {id(one) for one in variables}
    fit = running_fit()
    own = None if fit is None else averaging_of(fit.model)
    if own is not None and own.may_train(ids):
        return own
    built = [one for one in _averagings if one.trains(ids)]
    return max(built, key=lambda one: one.number) if built else own


def _check_strategy(optimizer: Any) -> None:
    """Raise if the steps of ``optimizer`` run in several replicas of this process."""
    strategy = tf.distribute.get_strategy()
    is_mirrored = isinstance(inner_variable(optimizer.iterations), tf.distribute.DistributedValues)
    if is_mirrored or strategy.num_replicas_in_sync > 1:
        name = type(strategy).__name__ if tf.distribute.has_strategy() else "MirroredStrategy"
        raise RuntimeError(
            f"average_gradients: expected one replica a member, got an optimizer of a {name}: "
            "each replica would wait for the other members. Use AverageWeights, which works with "
            "it, or one member for each device"
        )


def _check_known(optimizer: Any, variables: Sequence[Any]) -> None:
    """Raise if ``optimizer`` was built without some of ``variables``."""
    known = {id(one) for one in variables_of(optimizer)} if optimizer.built else set()
    unknown = [one.path for one in variables if known and id(one) not in known]
    if unknown:
        raise ValueError(
            f"average_gradients: expected the variables with which the optimizer was built, got "
            f"also {unknown[0]!r}. If the first batch has built it, call the model on a batch "
            "before fit, as in model(x[:1]). If it was frozen, or the optimizer is that of another "
            "model, compile the model with a new optimizer"
        )


@unconverted
def _averaged(grads: Sequence[Any], variables: Sequence[Any]) -> list[int]:
    """Return the positions of gradients; for some variables, Keras passes the next value."""
    return [
        i
        for i, (grad, variable) in enumerate(zip(grads, variables, strict=True))
        if grad is not None and not takes_next_value(variable)
    ]
