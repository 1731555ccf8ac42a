"""`average_gradients`: an optimizer that averages gradients over members before it applies them."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from flatweights._average import Nonfinite, check_nonfinite
from flatweights._core import CalledTensors
from flatweights.keras._exchange import Exchange
from flatweights.keras._exchanges import Exchanges, adds_up_own, own_slots, takes_next_value
from flatweights.keras._hooks import (
    Fit,
    call_after_begin,
    callbacks_of_fit,
    replace_clipping,
    running_fit,
    variables_of,
)
from flatweights.keras._member_handle import (
    MemberHandle,
    calls_are_equal,
    check_in_time,
    out_of_sync_is_error,
)
from flatweights.keras._moments import check_synchronized, synchronize
from flatweights.keras._names import inner_variable, state_names
from flatweights.keras._progress import AnyState, Progress
from flatweights.keras._settings import settings_of
from flatweights.keras._sparse import (
    Sparse,
    SparseExchange,
    Tables,
    check_sparse,
    takes_rows,
)
from flatweights.keras._start import FitStart, start_alike
from flatweights.keras._weak_set import SharedWeakSet
from flatweights.ray import (
    Member,
    OutOfSyncError,
    Round,
    Saved,
    Variables,
)
from flatweights.robust import AnyRule, Rule
from flatweights.tensorflow import TensorFlowVariables
from flatweights.tensorflow._python_op import (
    Compute,
    compute_in_python,
    device_of,
    end_copy_on_read,
    unconverted,
)

Optimizer = TypeVar("Optimizer", bound=keras.optimizers.Optimizer)

_SCALED = (
    "If the policy, or that of the model, is mixed_float16, compile puts the optimizer into a "
    "LossScaleOptimizer. Pass this to compile: "
    "average_gradients(keras.optimizers.LossScaleOptimizer(optimizer))"
)

_averagings = SharedWeakSet["Averaging"]()
_numbers = count()
_log = logging.getLogger("flatweights")


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
        rule: The rule that replaces the mean of gradients.
        handle: The member, and the time and the number of members that its calls wait for.
        progress: The member's progress in a `fit` that goes on without members that are late or
            have died; None if it needs all.
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
        self.rule = options["rule"]
        self._more = more
        self._optimizer = optimizer
        self._options = options
        self._exchanges = Exchanges(optimizer, sparse)
        self._is_started = False
        self._steps_to_check = optimizer.gradient_accumulation_steps or 1
        # The last `fit` that has begun: its parameters, and the callbacks that have told of it.
        self._params: Any = None
        self._told_by = weakref.WeakSet[Any]()
        # What returns the variables of a `fit` that has begun, until its first epoch.
        self._begun: Callable[[], Sequence[Any]] | None = None
        # Steps after which nothing has to have been averaged.
        self._steps_before: float = int(optimizer.iterations)
        self._errors: list[BaseException] = []  # raised by the step that runs
        self._computations: list[Compute] = []  # of the steps that were traced
        self._callbacks: list[Any] | None = None  # of the `fit` that begins, if they are known
        # The list by which Keras calls the callbacks of the last `fit`, until that has ended.
        self._unfinished: list[Any] | None = None
        self._batches: Callable[[], Any] = lambda: None  # what the last step took its batch from
        self.progress: Progress | None = None
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
            replace_clipping(optimizer, self._average_accumulated)

    def begin_fit(self, callback: Any) -> None:
        """Give all members the same start; make the model raise the errors of steps."""
        model = callback.model
        if not self._is_first_told(callback):
            return
        self.progress, self._unfinished = None, _callbacks_of(running_fit())
        self._exchanges.know(model)
        if not model.built and self.handle.min_results is not None:
            raise ValueError("min_results: expected a model that is built before fit")
        callbacks = callbacks_of_fit(callback)
        self._callbacks = callbacks
        function = model.train_function
        if function is not None and not hasattr(function, "raises_causes"):
            # It may have been traced by an earlier fit, without the average.
            model.make_train_function(force=True)
            model.train_function = self._raising_causes(model.train_function)
        is_alone = len(averagings_in(model)) == 1

        def variables() -> Sequence[Any]:
            return model.trainable_variables if is_alone else variables_of(self._optimizer)

        # Only the first steps of several optimizers tell which variables each of them has.
        if model.built and (is_alone or self._optimizer.built):
            # Even if the last training did not end, or a member has other weights since `build`.
            self._is_started = False
            self._optimizer.build(variables())
            if self.handle.min_results is not None:
                state = self._exchanges.state_of(model.weights)
                self.progress = Progress(self.handle, callback, callbacks, state, self._more)
                if self.progress.has_joined:
                    call_after_begin(callback, self.progress.join)
            self._begun = variables

    def begin_fit_beside(self, callback: Any) -> None:
        """Give all members the same start in a `fit` whose model has another optimizer, too.

        A step builds an optimizer that is not built yet, which does the same.
        """
        is_ready = self._optimizer.built and self.handle.min_results is None
        if self._is_first_told(callback):
            self._unfinished = _callbacks_of(running_fit())
            if is_ready:
                self._begun = functools.partial(variables_of, self._optimizer)

    def end_fit(self) -> None:
        """Note that a `fit` has ended: Keras tells only the optimizer of `compile`."""
        self._unfinished, self._is_started = None, False
        self.handle.end()

    def _is_first_told(self, callback: Any) -> bool:
        """Whether ``callback`` is the first one that tells of its `fit`."""
        # Several `fit` with one `CallbackList` have the same parameters.
        is_known = self._params is callback.params is not None and callback not in self._told_by
        if not is_known:
            self._told_by.clear()
            self._params, self._begun = callback.params, None
        self._told_by.add(callback)
        return not is_known

    def begin_epoch(self, epoch: int) -> None:
        """Before the first epoch of a `fit`, give all members the same start again.

        A callback may have set weights, and the first epoch, when the training began, as
        `keras.callbacks.BackupAndRestore` does.

        Raises:
            CallsDifferError: If members begin with different epochs.
        """
        variables, self._begun = self._begun, None
        if variables is None:
            return
        if self.progress is not None and self.progress.has_joined:
            return
        self._is_started = False
        self._start(variables(), in_step=False, epoch=epoch)

    def _raising_causes(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return ``function``, but raising the error of a step instead of TensorFlow's.

        TensorFlow's has forty lines about the graph before the cause.
        """

        def train(iterator: Any) -> Any:
            self._errors.clear()
            if self._batches() is not iterator:  # in another epoch, and perhaps another `fit`
                with contextlib.suppress(TypeError):  # as for that of a list: each step looks
                    self._batches = weakref.ref(iterator)
                fit = running_fit()
                of_fit = dict.fromkeys((self, *_averagings_of(fit)))
                anew = [one for one in of_fit if one._forget_unfinished(fit)]
                self._check_fit(fit)
                for one in anew:
                    if one._optimizer.built:
                        one._start_in_step()
            try:
                return function(iterator)
            except tf.errors.OpError:
                if not self._errors:
                    raise
                error = self._errors.pop()
                # The frames of its traceback have arrays whose memory belonged to the step.
                error.__context__ = None
                raise error.with_traceback(None) from None

        vars(train)["raises_causes"] = True
        return train

    def _accumulate(self, grads: Any, trainable_variables: Any = None) -> None:
        """Apply gradients that are averaged after they have been accumulated."""
        grads, variables = self._begin(grads, trainable_variables)
        self._accumulated = [variables[i] for i in _averaged(grads, variables)]
        self._apply_with_all_slots(grads, None if trainable_variables is None else variables)

    def _average_accumulated(self, sums: list[Any]) -> list[Any]:
        """Return the averages of accumulated gradients, in a step that applies them."""
        return self._average(sums, self._accumulated)

    def _apply_averages(self, grads: Any, trainable_variables: Any = None) -> None:
        grads, variables = self._begin(grads, trainable_variables)
        positions = _averaged(grads, variables)
        averages = self._average([grads[i] for i in positions], [variables[i] for i in positions])
        for i, average in zip(positions, averages, strict=True):
            grads[i] = average
        with tf.control_dependencies(_computed(averages)):  # before that, no slot is read
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
        self._forget_unfinished(fit)
        if fit is None:
            self.progress = None  # of a fit that was before
        else:
            averaging_of(fit.model)  # it may not be inside of another: members skip steps alone
            self._exchanges.know(fit.model, at_first=True)
            if not self._is_started:
                self._callbacks = fit.callbacks
            self._check_fit(fit)
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
                    self._start_in_step(is_traced=graph is not None)
        return list(grads), variables

    def _forget_unfinished(self, fit: Fit | None) -> bool:
        """If the last `fit` has ended by an exception, forget it, and return True.

        Nothing tells that, but its callbacks are not those of ``fit``, which runs now.
        """
        if self._unfinished is None or _callbacks_of(fit) is self._unfinished:
            return False
        self.progress = self._unfinished = None
        self._is_started = False
        self.handle.use(self.handle.given)
        return True

    def _check_fit(self, fit: Fit | None) -> None:
        """Raise if ``fit`` is one whose members may come back, without our callbacks."""
        if self.handle.min_results is not None and self.progress is None and fit is not None:
            if averaging_of(fit.model) is not self or len(averagings_in(fit.model)) > 1:
                raise ValueError(
                    "average_gradients(min_results=): expected the optimizer that the model was "
                    "compiled with, got another one. Members that come back are healed for one "
                    "optimizer: with several, leave out min_results"
                )
            raise ValueError(
                "average_gradients(min_results=): expected the callback AverageLogs or "
                "AverageWeights in fit, which tells members that come back the epoch of the "
                "others; got neither"
            )

    def _build(self, variables: Sequence[Any] | None = None) -> None:
        if not isinstance(variables, Sequence):
            raise TypeError(
                "optimizer.build: expected a list of variables, such as model.trainable_variables, "
                f"got {'nothing' if variables is None else type(variables).__name__}"
            )
        fit = running_fit()
        if fit is not None:
            self._exchanges.know(fit.model, at_first=True)
        else:  # for a loop of the user's own, perhaps after a fit
            self._forget_unfinished(fit)
            self.progress = None
            self._exchanges.know(None)  # nor does a member know the model that joins in this loop
        if not self._optimizer.built:
            self._make(variables)
        if tf.executing_eagerly():
            self._start(variables, in_step=False)

    def _start_in_step(self, *, is_traced: bool = False) -> None:
        """Start before the first call of a step, whichever that is.

        A member that traces the step again starts meanwhile, the others at their first exchange. So
        what they compare depends on the optimizer alone: its variables that are not frozen.

        Args:
            is_traced: Whether the step is only traced now, and has no gradients yet.
        """
        if not self._is_started:
            variables = [one for one in variables_of(self._optimizer) if one.trainable]
            self._start(variables, in_step=not is_traced)

    def _start(self, variables: Sequence[Any], in_step: bool, epoch: int | None = None) -> None:
        """Give all members the variables and slots of rank 0, unless they have them.

        In a step it is too late for that: the gradients were computed from the member's own
        variables.

        Args:
            variables: The variables.
            in_step: Whether this is called in a step.
            epoch: The first epoch of the `fit`, if it begins now.
        """
        if self._is_started:
            return
        callbacks, self._callbacks = self._callbacks, None
        member = self.handle.begin(running_fit(outermost=True))
        if self.handle.min_results is not None and member.lacks_state:  # it will be healed
            self._is_started = True
            return
        differ = [one for one in variables if takes_next_value(one)]
        state = self._exchanges.with_slots(variables, without=differ)

        def own() -> FitStart:
            try:
                values: Any = state.get_weights().buffer
            except RuntimeError as error:
                raise RuntimeError(
                    "average_gradients: expected a model that is built before its first step, got "
                    "one whose optimizer has slots without values. Call the model on a batch, as "
                    "in model(x[:1]), or begin it with keras.Input"
                ) from error
            may_end_apart = self.handle.min_results is not None
            settings = settings_of(self._optimizer, callbacks, may_end_apart=may_end_apart)
            names = _digest(json.dumps(state.layout.names).encode())
            return FitStart(in_step, epoch, names, _digest(values), settings)

        started = start_alike(self.handle, state, own)
        if self.handle.min_results is None:
            self._exchanges.is_far = any(
                transport != "shm" for transport in started.transports.values()
            )
        self._is_started = True

    @unconverted
    def _average(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the averages of ``grads``; of a graph inside a `tf.function`.

        They are dense, except those of tables in an optimizer that takes rows.
        """
        if not grads:
            return []
        state = self._state_of_step(variables)
        with tf.control_dependencies(_in_order(state)):
            averages = self._averages(grads, variables)
        if state:
            with tf.control_dependencies([tf.group(*_computed(averages))]):
                _in_order(state)
        return averages

    def _state_of_step(self, variables: Sequence[Any]) -> list[Any]:
        """Return the variables that the average of a graph may set, since it heals members."""
        if self.handle.min_results is None or tf.executing_eagerly():
            return []
        fit, own = running_fit(), {id(slot) for slot in own_slots(self._optimizer)}
        slots = [slot for slot in self._optimizer.variables if id(slot) not in own]
        of_user = [one for one in self._more if isinstance(one, TensorFlowVariables)]
        more = [one for some in of_user for one in some.variables.values()]
        state = [*(variables if fit is None else fit.model.weights), *slots, *more]
        return [*{id(one): one for one in map(inner_variable, state)}.values()]

    def _averages(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        device = device_of([*map(inner_variable, variables)])
        tables = None
        if self.rule is None:
            tables = self._exchanges.tables_of(grads, variables, device)
        if tables is not None:
            gather = functools.partial(self._gather_rows, tables)
            dtypes = [tf.as_dtype(grad.dtype).as_numpy_dtype for grad in grads]
            average = functools.partial(self._exchange_rows, tables, dtypes)
            as_rows = takes_rows(self._optimizer)
            return tables.average(grads, gather, average, as_rows, self._computations)
        dense = [tf.convert_to_tensor(grad) for grad in grads]
        dtypes = [grad.dtype.as_numpy_dtype for grad in dense]
        compute = functools.partial(self._exchange_dense, dtypes, variables)
        averages: list[tf.Tensor] = compute_in_python(
            compute, dense, device, kept_in=self._computations
        )
        return averages

    def trains(self, ids: set[int]) -> bool:
        """Whether the optimizer was built with a variable whose `id` is among ``ids``."""
        optimizer = self._optimizer
        return optimizer.built and not ids.isdisjoint(map(id, variables_of(optimizer)))

    def may_train(self, ids: set[int]) -> bool:
        """Whether the optimizer trains a variable of ``ids``, or is not built yet."""
        return not self._optimizer.built or self.trains(ids)

    def mean(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Return the mean of ``tensor`` over members; its gradient is the mean of the gradients.

        Args:
            tensor: A tensor whose shape is known.
            name: What it is. It tells this call from others, as variables tell gradients.
        """
        checked_graph(f"mean over members of the {name}")
        weak = weakref.ref(self)  # TensorFlow keeps for ever what is below

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def averaged(own: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
            averaging = _there(weak)
            return averaging._mean(own, name), lambda grad: _there(weak).mean(
                grad, f"gradient of {name}"
            )

        mean: tf.Tensor = averaged(tensor)
        return mean

    def _mean(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        exchange = self._exchanges.of_tensor(tensor, name)
        compute = functools.partial(self._exchange_mean, exchange)
        mean: tf.Tensor = compute_in_python(compute, [tensor], kept_in=self._computations)[0]
        mean.set_shape(tensor.shape)
        return mean

    def _exchange_mean(self, exchange: Exchange, tensors: CalledTensors) -> None:
        """Average a tensor of a step, whose gradients are averaged later.

        It sends no state: members are healed with the gradients, since their variables must not
        change before that. A member that is to be healed meets the others there.
        """
        is_whole = self.handle.min_results is None
        is_apart = self.progress is not None and self.progress.is_apart
        if not (self._is_started or is_apart) and self._optimizer.built:
            with self._step():
                self._start_in_step()
        if is_apart or (not is_whole and self.handle.take().lacks_state):
            exchange.pass_on(tensors)
            return
        with self._step(), exchange.of(tensors):
            result = self.handle.take().average_variables(
                exchange, nonfinite=self._options["nonfinite"], **self.handle.terms
            )
            if is_whole:
                check_in_time(result, exchange.layout.slots[0].name)

    @contextlib.contextmanager
    def _step(self) -> Iterator[None]:
        """Enclose a call of a step, whose error `fit` is to raise."""
        try:
            with calls_are_equal(self.handle.take(), "step"):
                yield
        except BaseException as error:
            self._is_started = False  # all members start again in the next fit
            self._steps_before = np.inf
            self._errors.append(error)
            raise

    def moments_of(self, layer: Any) -> str:
        """Return a name for the moments of ``layer``, equal in all members."""
        fit = running_fit()
        if fit is not None and averaging_of(fit.model) is self:
            self._exchanges.know(fit.model, at_first=True)
        return f"moments beside {self._exchanges.name_of(layer.variables[0])}"

    def _gather_rows(self, tables: Tables, called: CalledTensors) -> None:
        """Gather the numbers of the rows of tables; their values are averaged later.

        It sends no state, as other calls of a step before its gradients. A member that lacks the
        state takes part nevertheless, to learn how many rows there are. In a `fit`, it goes on to
        where it is healed: the others may be at the end of an epoch.
        """
        progress, is_whole = self.progress, self.handle.min_results is None
        if progress is not None and (progress.is_apart or self.handle.take().lacks_state):
            tables.write(called, [tables.read(called)], is_among=True)
            return
        with self._step():
            self._start_in_step()
            member, terms = self.handle.take(), self.handle.terms
            if member.lacks_state:
                terms["timeout"] = None  # as in all calls in which it waits for the others
            result = member.all_gather(tables.read(called), tables.what, **terms)
            if is_whole:
                check_in_time(result, tables.what)
            told = [result.weights[rank] for rank in sorted(result.weights)]
            tables.write(called, told, is_among=member.rank not in result.late)

    def _exchange_dense(
        self, dtypes: Sequence[Any], variables: Sequence[Any], grads: CalledTensors
    ) -> None:
        """Average gradients, by the names that are in use now."""
        self._exchange(self._exchanges.of_gradients(dtypes, variables), grads)

    def _exchange_rows(self, tables: Tables, dtypes: Sequence[Any], grads: CalledTensors) -> None:
        """Average gradients, of tables only rows."""
        self._exchange(tables.exchange_of(dtypes), grads)

    def _exchange(self, exchange: Exchange, grads: CalledTensors) -> None:
        """Average ``grads``."""
        progress = self.progress
        if progress is not None and progress.is_apart:
            exchange.pass_on(grads)
            return
        with self._step(), exchange.of(grads):
            self._start_in_step()
            result: Round | None
            if progress is not None:
                result = progress.average(functools.partial(self._call, exchange), in_step=True)
            elif self.handle.min_results is not None:
                state = [self._exchanges.state_of(exchange.variables), *self._more]
                result = self._call_or_pass(exchange, state)
            else:
                result = self._call(exchange, self.handle.take(), None)
                check_in_time(result, "gradients")
            if result is not None:
                rank = self.handle.take().rank
                if rank in result.used and rank not in (*result.late, *result.healed):
                    exchange.check()
                return
        exchange.pass_on(grads)

    def _call_or_pass(self, exchange: Exchange, state: AnyState) -> Round | None:
        """Return the result of a call in a loop of the user's own; None, if it has none.

        That is so if the member lacks the state, and the others average another number of rows: it
        cannot learn that number here. Its next step can, which heals it.
        """
        member = self.handle.take()
        try:
            with out_of_sync_is_error(member, isinstance(exchange, SparseExchange)):
                return self._call(exchange, member, state)
        except OutOfSyncError:
            return None

    def _call(self, exchange: Exchange, member: Member, state: AnyState | None) -> Round:
        return member.average_variables(
            exchange,
            exchange.weight,
            state=state,
            **self.handle.terms,
            **self._options,
        )

    def _end(self, var_list: Any) -> None:
        """Wait at the end of `fit` until all members have reached it."""
        fit = running_fit()
        for one in _averagings_of(fit):
            if one is not self:
                one.end_fit()
        was_started, self._is_started = self._is_started, False
        steps, before = int(self._optimizer.iterations), self._steps_before
        self._steps_before = steps
        self._unfinished = None
        if self.progress is not None:
            self.progress.end()
            self.progress = None
        elif was_started:
            self.handle.gather(None, "the end of training", at="end")
        elif steps > before and not (fit is not None and _had_no_epoch(fit)):
            raise RuntimeError(
                "average_gradients: this fit has averaged nothing, since Keras had traced its step "
                "before. Call average_gradients before compile, or compile the model again"
            )
        self._finalize(var_list)
        self.handle.end()


def _averagings_of(fit: Fit | None) -> list[Averaging]:
    return [] if fit is None else averagings_in(fit.model)


def _callbacks_of(fit: Fit | None) -> list[Any] | None:
    return None if fit is None else fit.callbacks


def _had_no_epoch(fit: Fit) -> bool:
    """Whether ``fit`` ends without an epoch, so that steps counted meanwhile are not its own."""
    callbacks = fit.callbacks or []
    return any(isinstance(one, keras.callbacks.History) and not one.epoch for one in callbacks)


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


def averaging_of_optimizer(optimizer: Any) -> Averaging | None:
    """Return the `Averaging` of ``optimizer``; None without one."""
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        return None
    averaging = getattr(optimizer.apply, "__self__", None)
    return averaging if isinstance(averaging, Averaging) else None


def _in_order(variables: Sequence[Any]) -> list[tf.Operation]:
    """Return operations after those on ``variables`` so far; later ones come after them.

    TensorFlow orders the operations of a function by the variables that they use, and does not know
    that an average writes to these. These operations use them, and move no memory.
    """
    used = [tf.raw_ops.VarIsInitializedOp(resource=one.handle) for one in variables]
    return [tf.group(*used)] if used else []


def _computed(averages: Sequence[Any]) -> list[tf.Tensor]:
    return [getattr(average, "values", average) for average in averages]


def _there(averaging: weakref.ref[Averaging]) -> Averaging:
    found = averaging()
    assert found is not None
    return found


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


def checked_graph(who: str, jit: str = "") -> Any:
    """Return the graph that is traced, in which members can meet; None without one.

    Args:
        who: Whose calls the members make, for errors.
        jit: Another remedy for a step that XLA compiles.

    Raises:
        RuntimeError: If members cannot meet in this graph.
    """
    if tf.executing_eagerly():
        return None
    graph = tf.compat.v1.get_default_graph()
    if not tf.inside_function():
        raise RuntimeError(f"{who}: expected eager TensorFlow, got a TF1 graph")
    if GraphOrParentsInXlaContext(graph):
        raise RuntimeError(
            f"{who}: XLA compiles this step, and cannot wait for other members. Use "
            f"model.compile(..., jit_compile=False){jit}"
        )
    return graph


def _digest(values: Any) -> bytes:
    return hashlib.blake2b(values, digest_size=16).digest()


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
