"""What this package knows of Keras beyond its documentation."""

from __future__ import annotations

import inspect
from typing import Any

import keras

_FIT = inspect.unwrap(keras.Model.fit).__code__


def callbacks_beside(callback: Any) -> list[Any]:
    """Return all callbacks of the `fit` that calls ``callback.on_train_begin``, in their order.

    Keras gives a callback no access to the others. But `fit` calls all of them by a
    `keras.callbacks.CallbackList`, whose method is a caller of this function.

    Returns:
        The list's own list; only ``callback``, if a user or another callback calls it.

    Raises:
        RuntimeError: If `fit` calls it in another way.
    """
    frame = inspect.currentframe()
    is_listed = False
    while frame is not None and frame.f_code is not _FIT:
        if frame.f_code.co_name == "on_train_begin" and frame.f_code.co_argcount:
            caller = frame.f_locals.get(frame.f_code.co_varnames[0])
            if isinstance(caller, keras.callbacks.CallbackList):
                is_listed = True
                if any(one is callback for one in caller.callbacks):
                    callbacks: list[Any] = caller.callbacks
                    return callbacks
        frame = frame.f_back
    if frame is not None and not is_listed:
        raise RuntimeError(
            f"{type(callback).__name__}: expected that keras.Model.fit calls callbacks by a "
            f"keras.callbacks.CallbackList, but that of Keras {keras.__version__} does not"
        )
    return [callback]
