"""16-bit differences between a `WorkerGroup` and its workers; imports nothing of Ray."""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from flatweights._weights import FlatWeights
from flatweights.ray._result import with_weights
from flatweights.wire import (
    DeltaBroadcaster,
    DeltaEncoder,
    Difference,
    GradientEncoder,
    MissedUpdateError,
    Snapshot,
    WireDType,
    dtype_on_wire,
)

Message = Difference | Snapshot
"""What a group sends."""

Travels = Literal["weights", "gradients"]
"""What a method returns: weights, that travel as differences, or gradients, that are ones."""


class WorkerWire:
    """What a worker keeps: the weights that all have, and what rounding has taken."""

    def __init__(self) -> None:
        """Begin with nothing: the first message has to be a snapshot."""
        self._weights: DeltaEncoder | None = None
        self._gradients: GradientEncoder | None = None

    def receive(self, message: Message) -> FlatWeights:
        """Return the weights that ``message`` stands for, read-only.

        Raises:
            MissedUpdateError: If it is a difference from weights that this worker has not.
        """
        if self._weights is None or not self._weights.fits(message):
            if not isinstance(message, Snapshot):
                raise MissedUpdateError("a difference from weights that were never received")
            self._weights = DeltaEncoder(message)
            return self._weights.reference
        return self._weights.receive(message)

    def encode(self, result: Any, travels: Travels, wire_dtype: WireDType) -> Any:
        """Return what a method returned, its weights or gradients in 16 bits; extras stay.

        Raises:
            TypeError: If these are no `FlatWeights`, dict, or, for gradients, vector.
            ValueError: If they hold NaN or infinity, or do not fit; see `DeltaEncoder.encode`.
            MissedUpdateError: If no weights have been received yet.
        """
        return with_weights(result, lambda model: self._encode(model, travels, wire_dtype))

    def _encode(self, model: Any, travels: Travels, wire_dtype: WireDType) -> Difference:
        if isinstance(model, Mapping) and not isinstance(model, FlatWeights):
            model = FlatWeights(model)
        if travels == "gradients":
            if self._gradients is None:
                self._gradients = GradientEncoder(wire_dtype)
            return self._gradients.encode(model)
        if not isinstance(model, FlatWeights):
            raise TypeError(
                f"wire_dtype: expected weights by name (get_weights), got {type(model).__name__}"
            )
        if self._weights is None:
            raise MissedUpdateError("no weights have been received yet")
        return self._weights.encode(model)


class GroupWire:
    """What a group keeps: the weights that all workers have, and those that they should have."""

    def __init__(self, wire_dtype: WireDType) -> None:
        """Begin with nothing: the first message is a snapshot.

        Args:
            wire_dtype: ``"bfloat16"`` or ``"float16"``.

        Raises:
            ValueError: If it is another one.
        """
        dtype_on_wire(wire_dtype)
        self.wire_dtype: WireDType = wire_dtype
        self._driver: DeltaBroadcaster | None = None
        self._is_known = False

    @property
    def has_sent(self) -> bool:
        """Whether workers have weights that differences can be taken from."""
        return self._is_known

    def forget(self) -> None:
        """Note that the last message was not sent or not taken: the next one goes in full."""
        self._is_known = False

    def message(self, weights: Any) -> Message:
        """Return what brings workers to ``weights``: a difference, or the first time a snapshot.

        Args:
            weights: `FlatWeights`, or a dict of arrays.

        Raises:
            TypeError: If they are neither.
            ValueError: As `DeltaBroadcaster.encode`; nothing has changed then.
        """
        if isinstance(weights, np.ndarray) or not isinstance(weights, Mapping):
            raise TypeError(
                f"wire_dtype: expected weights by name (get_weights), got {type(weights).__name__}"
            )
        model = weights if isinstance(weights, FlatWeights) else FlatWeights(weights)
        driver = self._driver if self._is_known else None
        if driver is not None and driver.weights.layout.digest == model.layout.digest:
            return driver.encode(model)
        self._driver = DeltaBroadcaster(model, self.wire_dtype)
        self._is_known = True
        return self._driver.snapshot()

    def snapshot(self) -> Snapshot:
        """Return what all workers have, for one that has lost it."""
        assert self._driver is not None
        return self._driver.snapshot()

    def widen(self, model: Any) -> Any:
        """Return a worker's difference in float32, checked to be from what all have."""
        if isinstance(model, Difference) and model.base is not None and self._driver is not None:
            self._driver.check(model, "result")
        return widen(model)

    def decode(self, mean: Any, travels: Travels) -> Any:
        """Return the average of models, of a mean of differences; it is changed in place."""
        if travels == "gradients" or self._driver is None:
            return mean
        return self._driver.add_to(mean)


def widen(model: Any) -> Any:
    """Return what ``model`` stands for: a `Difference` in float32, others as they are."""
    return model.widen() if isinstance(model, Difference) else model


def nbytes_of(message: Any) -> int | None:
    """Return the bytes of the buffer that ``message`` travels as, if it is one."""
    if isinstance(message, Difference):
        return message.values.buffer.nbytes
    if isinstance(message, Snapshot):
        message = message.weights
    return message.buffer.nbytes if isinstance(message, FlatWeights) else None
