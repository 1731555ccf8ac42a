"""16-bit differences between a `WorkerGroup` and its workers; imports nothing of Ray."""

from collections.abc import Callable, Mapping
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

    def receive(self, message: Message, take: Callable[[FlatWeights], Any]) -> None:
        """Give ``take`` the weights that ``message`` stands for, read-only; keep them if it does.

        Raises:
            MissedUpdateError: If it is a difference from weights that this worker does not have.
        """
        if self._weights is not None and self._weights.fits(message):
            received = self._weights.after(message)
        elif isinstance(message, Snapshot):
            received = DeltaEncoder(message)
        else:
            raise MissedUpdateError("a difference from weights that were never received")
        take(received.reference)
        self._weights = received

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
    """What a group keeps: the weights that all workers have, and those that they should have.

    It does not change: `message` gives the next one, to be kept once the message is sent.
    """

    def __init__(self, wire_dtype: WireDType, driver: DeltaBroadcaster | None = None) -> None:
        """Begin with what was sent before; if that is nothing, the first message is a snapshot.

        Raises:
            ValueError: If ``wire_dtype`` is no dtype of the wire.
        """
        dtype_on_wire(wire_dtype)
        self.wire_dtype = wire_dtype
        self._driver = driver

    @property
    def has_sent(self) -> bool:
        """Whether workers have weights that differences can be taken from."""
        return self._driver is not None

    def message(self, weights: Any) -> "tuple[Message, GroupWire]":
        """Return a message that brings workers to ``weights``, and the wire once it is sent.

        A difference; the first time, and for another layout, a snapshot.

        Args:
            weights: `FlatWeights`, or a dict of arrays.

        Raises:
            TypeError: If they are neither.
            ValueError: As `DeltaBroadcaster.encode`.
        """
        if isinstance(weights, np.ndarray) or not isinstance(weights, Mapping):
            raise TypeError(
                f"wire_dtype: expected weights by name (get_weights), got {type(weights).__name__}"
            )
        model = weights if isinstance(weights, FlatWeights) else FlatWeights(weights)
        driver = self._driver
        message: Message
        if driver is not None and driver.weights.layout.digest == model.layout.digest:
            message, driver = driver.after(model)
        else:
            driver = DeltaBroadcaster(model, self.wire_dtype)
            message = driver.snapshot()
        return message, GroupWire(self.wire_dtype, driver)

    def snapshot(self) -> Snapshot:
        """Return the weights that all workers have, for one that has lost them."""
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
