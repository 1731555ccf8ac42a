"""Warns when a layer goes on with constants that it took from its variables when it was adapted."""

import warnings
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from flatweights.tensorflow._eager import eagerly
from flatweights.tensorflow._kinds import inner_variable, is_variable

# Variable and constant: of `Normalization`, and of lookups and `TextVectorization` with tf-idf.
_PAIRS = (
    ("adapt_mean", "mean"),
    ("adapt_variance", "variance"),
    ("idf_weights", "idf_weights_const"),
)


class Adapted:
    """The variables of a model from which layers of Keras took constants."""

    def __init__(self, layers: Iterable[Any], variables: Mapping[str, Any]) -> None:
        """Find those of ``variables``, by name, that are in ``layers``."""
        names = {id(inner_variable(one)): name for name, one in variables.items()}
        self._found = []
        for layer in layers:
            for attribute, constant in _PAIRS:
                variable = getattr(layer, attribute, None)
                name = names.get(id(inner_variable(variable))) if is_variable(variable) else None
                if name is not None and hasattr(layer, constant):
                    self._found.append((name, variable, weakref.ref(layer), constant))

    def check(self) -> None:
        """Warn, once, of the first variable whose value is not that of the layer's constant."""
        name = self._differing() if self._found else None
        if name is None:
            return
        self._found = []
        warnings.warn(
            f"{name!r}: its layer computes with the constants that it took when it was "
            "adapted, so the value that was set has no effect; adapt the layer with the "
            "same data in every process",
            RuntimeWarning,
            stacklevel=3,
        )

    def _differing(self) -> str | None:
        # A value that float16 does not hold is infinite in the constant, too.
        with eagerly(), np.errstate(over="ignore"):
            for name, variable, layer, constant in self._found:
                value = getattr(layer(), constant, None)
                if value is None or tf.is_symbolic_tensor(value):
                    continue
                used = np.asarray(value)
                held = np.asarray(variable).astype(used.dtype)
                if not np.array_equal(held.ravel(), used.ravel()):
                    return name
        return None
