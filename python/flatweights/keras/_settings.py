"""The settings by which the members of a training decide, and their comparison at its start.

Averaged gradients keep the weights of all members equal only if all apply them alike.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

import keras

from flatweights.keras._member_handle import named
from flatweights.ray import CallsDifferError

# Callbacks of Keras that change the learning rate, and those that end the training.
_CHANGING: tuple[type[Any], ...] = (
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ReduceLROnPlateau,
)
_ENDING: tuple[type[Any], ...] = (
    keras.callbacks.EarlyStopping,
    keras.callbacks.TerminateOnNaN,
)
# Parameters of them: at the end of the first epoch, Keras changes the sign of `min_delta`.
_NOT_COMPARED = ("min_delta", "verbose", "kwargs")


def settings_of(
    optimizer: Any, callbacks: Sequence[Any] | None, *, may_end_apart: bool
) -> dict[str, str]:
    """Return the settings of ``optimizer`` and of the deciding ``callbacks``: texts by name.

    They are compared by the names that all members have, so what has no text is left out.

    Args:
        optimizer: An optimizer of Keras.
        callbacks: The callbacks of the `fit`; None, if they are not known.
        may_end_apart: Whether a callback of one member may end the training of all.
    """
    settings = {"optimizer": type(optimizer).__name__}
    try:
        config = optimizer.get_config()
    except Exception:  # an optimizer of a user's own need not have one
        config = {}
    settings.update(_texts(config, type(optimizer).__name__))
    kinds = _CHANGING if may_end_apart else (*_CHANGING, *_ENDING)
    for kind in () if callbacks is None else kinds:
        some = [one for one in callbacks or () if isinstance(one, kind)]
        settings[f"{kind.__name__} callbacks"] = str(len(some))
        names = [name for name in inspect.signature(kind).parameters if name not in _NOT_COMPARED]
        for number, one in enumerate(some):
            which = f"{kind.__name__}{f' {number}' if number else ''}"
            for name in names:
                settings.update(_texts(getattr(one, name, None), f"{which}.{name}"))
    return settings


def _texts(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield names and texts of the numbers and strings in a setting, as Keras serializes it."""
    if isinstance(value, Mapping):
        if "class_name" in value:
            yield name, str(value["class_name"])
            value = value.get("config")
        for key, one in value.items() if isinstance(value, Mapping) else ():
            if key not in ("name", "value"):  # a process's own; the code of a lambda
                yield from _texts(one, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        yield name, f"{len(value)} values"
        for k, one in enumerate(value):
            yield from _texts(one, f"{name}[{k}]")
    elif value is None or isinstance(value, bool | str):
        yield name, str(value)
    elif isinstance(value, Real):
        # All members get rank 0's learning rate, unless it is a schedule.
        is_rate = name.endswith(".learning_rate")
        yield name, "a number" if is_rate else repr(float(value)).removesuffix(".0")


def check_alike(expected: str, settings: Mapping[int, Mapping[str, str]]) -> None:
    """Raise an error that names each of the settings in which members differ.

    Args:
        expected: The beginning of the error.
        settings: The settings of each rank, texts by name.

    Raises:
        CallsDifferError: If there are such settings.
    """
    differences = []
    for name in next(iter(settings.values()), ()):
        ranks: dict[str | None, list[int]] = {}
        for rank, some in settings.items():
            ranks.setdefault(some.get(name), []).append(rank)
        if len(ranks) > 1 and None not in ranks:
            has = [named(those, f"has {text}") for text, those in ranks.items()]
            differences.append(f"{name}: {', '.join(has)}")
    if differences:
        raise CallsDifferError(f"{expected}, got {'; '.join(differences)}")
