"""Views of models."""

from typing import Any

from numpy.typing import NDArray

from flatweights._weights import FlatWeights


def flat_views(weights: FlatWeights) -> list[NDArray[Any]]:
    """Return each part as a vector."""
    return [part.reshape(-1) for part in weights.values()]


def read_only(weights: FlatWeights) -> FlatWeights:
    """Return the same weights, not to be written to."""
    buffer = weights.buffer.view()
    buffer.flags.writeable = False
    return FlatWeights.wrap(buffer, weights.layout)
