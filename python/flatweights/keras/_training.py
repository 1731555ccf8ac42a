"""What an optimizer that averages gradients knows of its training."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from flatweights.keras._exchanges import Exchanges, takes_next_value
from flatweights.keras._hooks import (
    Fit,
    call_after_begin,
    callbacks_of_fit,
    running_fit,
    variables_of,
)
from flatweights.keras._member_handle import MemberHandle, calls_are_equal
from flatweights.keras._progress import Progress
from flatweights.keras._settings import settings_of
from flatweights.keras._start import FitStart, start_alike


class Training:
    """The `fit` in which an optimizer averages gradients, or a loop of the user's own.

    There is one object for each optimizer, since nothing tells when a loop begins, or that a `fit`
    has ended by an exception.

    Attributes:
        progress: The member's progress in a `fit` that goes on without members that are late or
            have died; None if it needs all.
        is_started: Whether all members have been given the same start.
    """

    def __init__(
        self,
        optimizer: Any,
        handle: MemberHandle,
        exchanges: Exchanges,
        more: Sequence[Any],
        trainings_in: Callable[[Any], list[Training]],
    ) -> None:
        """Begin without a `fit`.

        Args:
            optimizer: The optimizer.
            handle: The member, and the time and the number of members that its calls wait for.
            exchanges: The names of the optimizer's variables, and its state.
            more: Parts of the state that heals members, besides variables and slots.
            trainings_in: Returns the trainings of all optimizers of a model.
        """
        self.progress: Progress | None = None
        self.is_started = False
        self._optimizer = optimizer
        self._handle = handle
        self._exchanges = exchanges
        self._more = more
        self._trainings_in = trainings_in
        # The last `fit` that has begun: its parameters, and the callbacks that have told of it.
        self._params: Any = None
        self._told_by = weakref.WeakSet[Any]()
        # What returns the variables of a `fit` that has begun, until its first epoch.
        self._begun: Callable[[], Sequence[Any]] | None = None
        # Steps after which nothing has to have been averaged.
        self._steps_before: float = int(optimizer.iterations)
        self._errors: list[BaseException] | None = None  # of the step of a `fit` that runs
        self._callbacks: list[Any] | None = None  # of the `fit` that begins, if they are known
        # The list by which Keras calls the callbacks of the last `fit`, until that has ended.
        self._unfinished: list[Any] | None = None
        self._batches: Callable[[], Any] = lambda: None  # what the last step took its batch from

    def begin(self, callback: Any, *, is_alone: bool) -> None:
        """Give all members the same start in a `fit`; make the model raise the errors of steps.

        Args:
            callback: A callback of the `fit`; each of this package calls this.
            is_alone: Whether no other optimizer of the model averages gradients.
        """
        model = callback.model
        if not self._is_first_told(callback):
            return
        self.progress, self._unfinished = None, _callbacks_of(running_fit())
        self._exchanges.know(model)
        if not model.built and self._handle.min_results is not None:
            raise ValueError("min_results: expected a model that is built before fit")
        callbacks = callbacks_of_fit(callback)
        self._callbacks = callbacks
        function = model.train_function
        if function is not None and not hasattr(function, "raises_causes"):
            # It may have been traced by an earlier fit, without the average.
            model.make_train_function(force=True)
            model.train_function = self._raising_causes(model.train_function)

        def variables() -> Sequence[Any]:
            return model.trainable_variables if is_alone else variables_of(self._optimizer)

        # Only the first steps of several optimizers tell which variables each of them has.
        if model.built and (is_alone or self._optimizer.built):
            # Even if the last training did not end, or a member has other weights since `build`.
            self.is_started = False
            self._optimizer.build(variables())
            if self._handle.min_results is not None:
                state = self._exchanges.state_of(model.weights)
                self.progress = Progress(self._handle, callback, callbacks, state, self._more)
                if self.progress.has_joined:
                    call_after_begin(callback, self.progress.join)
            self._begun = variables

    def begin_beside(self, callback: Any) -> None:
        """Give all members the same start in a `fit` whose model has another optimizer, too.

        A step builds an optimizer that is not built yet, which does the same.
        """
        is_ready = self._optimizer.built and self._handle.min_results is None
        if self._is_first_told(callback):
            self._unfinished = _callbacks_of(running_fit())
            if is_ready:
                self._begun = functools.partial(variables_of, self._optimizer)

    def end(self) -> None:
        """Note that a `fit` has ended: Keras tells only the optimizer of `compile`."""
        self._unfinished, self.is_started = None, False
        self._handle.end()

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
        self.is_started = False
        self.start(variables(), in_step=False, epoch=epoch)

    def _raising_causes(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return ``function``, but raising the error of a step instead of TensorFlow's.

        TensorFlow's has forty lines about the graph before the cause.
        """

        def train(iterator: Any) -> Any:
            errors = self._errors = []
            if self._batches() is not iterator:  # in another epoch, and perhaps another `fit`
                with contextlib.suppress(TypeError):  # as for that of a list: each step looks
                    self._batches = weakref.ref(iterator)
                fit = running_fit()
                of_fit = dict.fromkeys((self, *self._others_of(fit)))
                anew = [one for one in of_fit if one._forget_unfinished(fit)]
                self._check_fit(fit)
                for one in anew:
                    if one._optimizer.built:
                        one.start_in_step()
            try:
                return function(iterator)
            except tf.errors.OpError:
                if not errors:
                    raise
                error = errors.pop()
                # The frames of its traceback have arrays whose memory belonged to the step.
                error.__context__ = None
                raise error.with_traceback(None) from None
            finally:
                self._errors = None

        vars(train)["raises_causes"] = True
        return train

    def enter_step(self, fit: Fit | None) -> None:
        """Note that a step of ``fit`` begins, or is traced; None: of the user's own loop."""
        self._forget_unfinished(fit)
        if fit is None:
            self.progress = None  # of a fit that was before
            return
        self._exchanges.know(fit.model, at_first=True)
        if not self.is_started:
            self._callbacks = fit.callbacks
        self._check_fit(fit)

    def enter_build(self) -> None:
        """Note that the optimizer is built, or given the values of rank 0 again."""
        fit = running_fit()
        if fit is not None:
            self._exchanges.know(fit.model, at_first=True)
        else:  # for a loop of the user's own, perhaps after a fit
            self._forget_unfinished(fit)
            self.progress = None
            self._exchanges.know(None)  # nor does a member know the model that joins in this loop

    def _forget_unfinished(self, fit: Fit | None) -> bool:
        """If the last `fit` has ended by an exception, forget it, and return True.

        Nothing tells that, but its callbacks are not those of ``fit``, which runs now.
        """
        if self._unfinished is None or _callbacks_of(fit) is self._unfinished:
            return False
        self.progress = self._unfinished = None
        self.is_started = False
        self._handle.use(self._handle.given)
        return True

    def _check_fit(self, fit: Fit | None) -> None:
        """Raise if ``fit`` is one whose members may come back, without our callbacks."""
        if self._handle.min_results is not None and self.progress is None and fit is not None:
            own = getattr(fit.model, "optimizer", None)
            if own is not self._optimizer or self._others_of(fit):
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

    def _others_of(self, fit: Fit | None) -> list[Training]:
        """Return the trainings of the other optimizers of the model of ``fit``."""
        found = [] if fit is None else self._trainings_in(fit.model)
        return [one for one in found if one is not self]

    def start_in_step(self, *, is_traced: bool = False) -> None:
        """Start before the first call of a step, whichever that is.

        A member that traces the step again starts meanwhile, the others at their first exchange. So
        what they compare depends on the optimizer alone: its variables that are not frozen.

        Args:
            is_traced: Whether the step is only traced now, and has no gradients yet.
        """
        if not self.is_started:
            variables = [one for one in variables_of(self._optimizer) if one.trainable]
            self.start(variables, in_step=not is_traced)

    def start(self, variables: Sequence[Any], in_step: bool, epoch: int | None = None) -> None:
        """Give all members the variables and slots of rank 0, unless they have them.

        In a step it is too late for that: the gradients were computed from the member's own
        variables.

        Args:
            variables: The variables.
            in_step: Whether this is called in a step.
            epoch: The first epoch of the `fit`, if it begins now.
        """
        if self.is_started:
            return
        callbacks, self._callbacks = self._callbacks, None
        member = self._handle.begin(running_fit(outermost=True))
        if self._handle.min_results is not None and member.lacks_state:  # it will be healed
            self.is_started = True
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
            may_end_apart = self._handle.min_results is not None
            settings = settings_of(self._optimizer, callbacks, may_end_apart=may_end_apart)
            names = _digest(json.dumps(state.layout.names).encode())
            return FitStart(in_step, epoch, names, _digest(values), settings)

        started = start_alike(self._handle, state, own)
        if self._handle.min_results is None:
            self._exchanges.is_far = any(
                transport != "shm" for transport in started.transports.values()
            )
        self.is_started = True

    @contextlib.contextmanager
    def errors_noted(self) -> Iterator[None]:
        """Enclose a call of a step, whose error `fit` is to raise."""
        try:
            with calls_are_equal(self._handle.take(), "step"):
                yield
        except BaseException as error:
            self.is_started = False  # all members start again in the next fit
            self._steps_before = np.inf
            if self._errors is not None:
                self._errors.append(error)
            raise

    def finish(self) -> None:
        """Wait at the end of `fit` until all members have reached it."""
        fit = running_fit()
        for one in self._others_of(fit):
            one.end()
        was_started, self.is_started = self.is_started, False
        steps, before = int(self._optimizer.iterations), self._steps_before
        self._steps_before = steps
        self._unfinished = None
        if self.progress is not None:
            self.progress.end()
            self.progress = None
        elif was_started:
            self._handle.gather(None, "the end of training", at="end")
        elif steps > before and not (fit is not None and _had_no_epoch(fit)):
            raise RuntimeError(
                "average_gradients: this fit has averaged nothing, since Keras had traced its step "
                "before. Call average_gradients before compile, or compile the model again"
            )


def _callbacks_of(fit: Fit | None) -> list[Any] | None:
    return None if fit is None else fit.callbacks


def _had_no_epoch(fit: Fit) -> bool:
    """Whether ``fit`` ends without an epoch, so that steps counted meanwhile are not its own."""
    callbacks = fit.callbacks or []
    return any(isinstance(one, keras.callbacks.History) and not one.epoch for one in callbacks)


def _digest(values: Any) -> bytes:
    return hashlib.blake2b(values, digest_size=16).digest()
