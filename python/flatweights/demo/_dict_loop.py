"""The rival: the loop from Ray's guide, with a dict of arrays per model.

Reads and assigns one variable at a time, as Ray's own `TensorFlowVariables` does in eager mode,
and averages with the guide's comprehension.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Weights = dict[str, NDArray[np.float32]]


def read_tensors(tensors: Mapping[str, Any]) -> Weights:
    """Return the values of TensorFlow variables or tensors."""
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def assign_variables(variables: Mapping[str, Any], weights: Weights) -> None:
    """Set TensorFlow variables."""
    for name, variable in variables.items():
        variable.assign(weights[name])


def mean(all_weights: Sequence[Weights], shares: Sequence[float] | None) -> Weights:
    """Return the mean; weighted, if ``shares`` are given, which add up to 1."""
    if shares is None:
        n = len(all_weights)
        return {k: sum(w[k] for w in all_weights) / n for k in all_weights[0]}  # type: ignore[misc]
    return {
        k: sum(share * w[k] for share, w in zip(shares, all_weights, strict=True))  # type: ignore[misc]
        for k in all_weights[0]
    }
