"""What this package knows of Keras beyond its documentation: eight attributes and two functions.

Each has its reason here. The attributes begin with ``_``; of the functions, local variables are
read.

No other file uses one. tests/keras/test_hooks.py has a test for each, with the versions of Keras
that have it. So if a new Keras changes one, that test fails, and only this file needs to change.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager import cancellation

_thread = threading.local()
_context_of_all = cancellation.context

_FIT = inspect.unwrap(keras.Model.fit).__code__

# Whether `keras.callbacks.SwapEMAWeights` has swapped the weights. A member that is healed gets the
# weights of another as they are, swapped or not, and must know it.
SWAPPED = "_ema_weights_in_model"


class Fit(NamedTuple):
    """A `fit` that runs.

    Attributes:
        model: Its model.
        callbacks: Its callbacks; None before their list is made.
        data: What makes the batches of its epochs, with the adapter of its data.
        validation: The inputs, targets and sample weights of its validation; None without one.
    """

    model: Any
    callbacks: list[Any] | None
    data: Any
    validation: tuple[Any, Any, Any] | None


def running_fit(*, outermost: bool = False) -> Fit | None:
    """Return the `fit` that calls this function, or traces its caller; None without one.

    That is the innermost one, unless the ``outermost`` is asked for: a callback may call another.

    An optimizer learns only gradients and variables from Keras. Without a callback of ours, two
    local variables of `fit`, ``self`` and ``callbacks``, tell the names of the variables, and the
    callbacks in which members may differ. Others, ``epoch_iterator`` and ``val_x``, have the data.
    """
    found: FrameType | None = None
    for frame in _callers():
        if frame.f_code is _FIT:
            found = frame
            if not outermost:
                break
    if found is None:
        return None
    of_fit = found.f_locals
    made: Any = of_fit.get("callbacks")
    is_made = isinstance(made, keras.callbacks.CallbackList)
    callbacks = made.callbacks if is_made else None
    validation = None
    if "val_x" in of_fit:
        validation = of_fit["val_x"], of_fit["val_y"], of_fit["val_sample_weight"]
    return Fit(of_fit["self"], callbacks, of_fit.get("epoch_iterator"), validation)


def end_data() -> None:
    """Tell the data of the `fit` that calls this that their epoch is over.

    Keras does not, if a callback ends an epoch before its last batch, since it then ends the `fit`.
    If that goes on nevertheless, a `keras.utils.PyDataset` refuses another epoch.
    """
    fit = running_fit()
    if fit is not None and fit.data is not None:
        fit.data.data_adapter.on_epoch_end()


def prepare_steps() -> None:
    """Trace and optimise the steps of the `fit` that calls this, and of its validation.

    That takes seconds, in which no step is made. The functions of TensorFlow that the steps consist
    of are traced for batches of the kind that the data have. If that raises an error, the first
    step raises it, too.
    """
    fit = running_fit()
    if fit is None or fit.model.run_eagerly:
        return
    model = fit.model
    if _is_keras(model, "make_train_function"):
        with contextlib.suppress(Exception):
            _prepare(model.train_function, fit.data)
    if fit.validation is not None and _is_keras(model, "make_test_function"):
        model.make_test_function()
        with contextlib.suppress(Exception):
            _prepare(model.test_function, _like(fit, fit.validation))


def _is_keras(model: Any, name: str) -> bool:
    """Whether a method of a model is that of Keras: another may execute something at once."""
    return getattr(getattr(model, name), "__func__", None) is getattr(keras.Model, name)


def _like(fit: Fit, validation: tuple[Any, Any, Any]) -> Any:
    """Return what makes batches of the kind that a validation with arrays or a Dataset has.

    Of arrays, one row will do. Nothing but the validation itself draws from a generator.
    """

    def row(array: Any) -> Any:
        if array is None:  # there are no weights
            return None
        if isinstance(array, (np.ndarray, tf.Tensor)):
            return array[:1]
        raise NotImplementedError

    if not isinstance(validation[0], tf.data.Dataset):
        validation = keras.tree.map_structure(row, validation)
    (x, y, weight), strategy = validation, fit.model.distribute_strategy
    return type(fit.data)(x=x, y=y, sample_weight=weight, distribute_strategy=strategy)


def _prepare(function: Callable[[Any], object], data: Any) -> None:
    """Trace and optimise what ``function`` makes of an iterator over the batches of ``data``."""
    batches = getattr(data, "_distributed_dataset", None)
    if not isinstance(batches, tf.data.Dataset):
        return
    spec = batches.element_spec
    with contextlib.suppress(Exception):  # of Keras, which looks at the result
        traced = tf.function(function, autograph=False)
        traced.get_concrete_function(tf.data.IteratorSpec(spec))
    # TensorFlow optimises a function when it is called first, even if that call is cancelled.
    nothing = tf.data.Dataset.from_generator(lambda: iter(()), output_signature=spec)
    with contextlib.suppress(Exception), _cancelled():
        function(iter(nothing))


@contextlib.contextmanager
def _cancelled() -> Iterator[None]:
    """Cancel all functions that this thread calls meanwhile."""
    manager = cancellation.CancellationManager()
    manager.start_cancel()
    cancellation.context = _context
    _thread.cancelled = manager
    try:
        yield
    finally:
        del _thread.cancelled


def _context() -> Any:
    """Return what cancels the functions that this thread calls.

    That of TensorFlow would cancel those of all threads.
    """
    return getattr(_thread, "cancelled", None) or _context_of_all()


def call_after_begin(callback: Any, do: Callable[[], object]) -> None:
    """Call ``do`` once all callbacks of a `fit` have begun; ``callback`` is beginning now.

    A callback at the end of their list calls it, and leaves the list.
    """
    callbacks = callbacks_of_fit(callback)
    if not isinstance(callbacks[-1], _Last):  # two would not both be called: they leave the list
        callbacks.append(_Last(callbacks))
    callbacks[-1].todo.append(do)


class _Last(keras.callbacks.Callback):  # type: ignore[misc]
    """Does something once all others of ``callbacks`` have begun."""

    def __init__(self, callbacks: list[Any]) -> None:
        super().__init__()
        self.todo: list[Callable[[], object]] = []
        self.callbacks = callbacks

    def on_train_begin(self, logs: Any = None) -> None:
        self.callbacks.remove(self)
        for do in self.todo:
            do()


def callbacks_of_fit(callback: Any) -> list[Any]:
    """Return all callbacks of the `fit` in which ``callback`` begins, in the list of Keras.

    Another callback may call it, which is in that list in its place.
    """
    fit = running_fit()
    return callbacks_beside(callback) if fit is None or fit.callbacks is None else fit.callbacks


def callbacks_beside(callback: Any) -> list[Any]:
    """Return all callbacks of the `fit` that calls ``callback.on_train_begin``, in their order.

    Keras gives a callback no access to the others. But it calls all of them by a
    `keras.callbacks.CallbackList`, whose method is a caller of this function.

    Returns:
        The list's own list; only ``callback``, if a user or another callback calls it.

    Raises:
        RuntimeError: If `fit` calls it in another way.
    """
    is_listed = False
    for frame in _callers():
        if frame.f_code.co_name == "on_train_begin" and frame.f_code.co_argcount:
            caller = frame.f_locals.get(frame.f_code.co_varnames[0])
            if isinstance(caller, keras.callbacks.CallbackList):
                is_listed = True
                if any(one is callback for one in caller.callbacks):
                    callbacks: list[Any] = caller.callbacks
                    return callbacks
        if frame.f_code is _FIT:
            if is_listed:
                break
            raise RuntimeError(
                f"{type(callback).__name__}: expected that keras.Model.fit calls callbacks by a "
                f"keras.callbacks.CallbackList, but that of Keras {keras.__version__} does not"
            )
    return [callback]


def _callers() -> Iterator[FrameType]:
    """Yield the frames of the callers, the last one first."""
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def begin_at(model: Any, epoch: int | None) -> None:
    """Make the `fit` that begins start at ``epoch``; None: at its own ``initial_epoch``.

    A member that joins a training under way starts where the others are. Keras lets a callback
    decide that only in this way, which `keras.callbacks.BackupAndRestore` uses.
    """
    model._initial_epoch = epoch


def variables_of(optimizer: Any) -> list[Any]:
    """Return the variables that ``optimizer`` was built with; none before.

    A loaded optimizer was built without our knowledge, and ``apply(grads)`` means all of these.
    In Keras 3.5, only the inner one of a `keras.optimizers.LossScaleOptimizer` has them.
    """
    variables: list[Any] = getattr(optimizer, "inner_optimizer", optimizer)._trainable_variables
    return variables


def replace_clipping(optimizer: Any, averaged: Callable[[list[Any]], list[Any]]) -> None:
    """Make ``optimizer`` clip what ``averaged`` returns for gradients, instead of these.

    With ``gradient_accumulation_steps``, it is the only method that Keras calls with accumulated
    gradients before it applies them, and only in the steps that do.
    """
    clip = optimizer._clip_gradients
    vars(optimizer)["_clip_gradients"] = lambda grads: clip(averaged(grads))


def losses_of_outputs(model: Any) -> list[Any]:
    """Return the metrics of the losses of a model's outputs, which are among its metrics.

    They count samples or batches, depending on what TensorFlow knows of the batches' shape, so
    their counts are no weights. Keras marks them in no other way.
    """
    return list(getattr(getattr(model, "_compile_loss", None), "metrics", []))


def know_direction(callback: Any) -> None:
    """Make a callback that compares a metric decide now which values of it are better.

    It would do so at the end of its first epoch, and forget the best value then (before Keras 3.8),
    which a healed member has from the others.
    """
    if getattr(callback, "monitor_op", callback) is None:
        callback._set_monitor_op()


def replace_moments(moments: Callable[[Any, Any, Any, Callable[[], Any]], Any]) -> None:
    """Make all layers ``BatchNormalization(synchronized=True)`` use ``moments`` in training.

    It is called with the layer, its inputs, their mask or None, and a function that returns Keras'
    own mean and variance. Keras computes them over the replicas of a `tf.distribute.Strategy`,
    which has no other members, by three calls for each layer. Everything else of the layer, such as
    its moving statistics, stays Keras' own, and models are saved as they are.
    """
    kind: Any = keras.layers.BatchNormalization
    own = vars(kind)["_moments"]
    if hasattr(own, "replaced"):
        own = own.replaced

    def _moments(self: Any, inputs: Any, mask: Any) -> Any:
        if not self.synchronized:
            return own(self, inputs, mask)
        return moments(self, inputs, mask, lambda: own(self, inputs, mask))

    _moments.replaced = own  # type: ignore[attr-defined]
    kind._moments = _moments
