"""16-bit differences between a `WorkerGroup` and its workers. It does not import Ray."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from flatweights._weights import FlatWeights
from flatweights.ray.results._result import packed_nbytes, with_weights
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

WireMessage = Difference | Snapshot
"""A message of a group to its workers."""

PayloadKind = Literal["weights", "gradients"]
"""The kind of a method's result: weights travel as differences, gradients are rounded directly."""


class WorkerWire:
    """A worker's encoders: they keep the weights of all workers, and the rounding errors."""

    def __init__(self) -> None:
        """Begin with no weights: the first message must be a snapshot."""
        self._weights: DeltaEncoder | None = None
        # By method and dtype, since each has rounding errors of its own.
        self._gradients: dict[tuple[str, WireDType], GradientEncoder] = {}

    def receive(self, message: WireMessage, take: Callable[[FlatWeights], Any]) -> None:
        """Pass the weights of ``message`` to ``take``, read-only; keep them unless it raises.

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

    def encode(
        self, result: Any, payload_kind: PayloadKind, wire_dtype: WireDType, method: str = ""
    ) -> Any:
        """Return ``result`` with its weights or gradients in 16 bits; the extras stay.

        Args:
            result: What the ``method`` has returned.
            payload_kind: Whether it is weights or gradients.
            wire_dtype: The dtype of gradients; that of weights is that of the message before.
            method: Its name: gradients of other methods are others.

        Raises:
            TypeError: If they are neither `FlatWeights` nor a dict nor, for gradients, a vector.
            ValueError: If they hold NaN or infinity, or do not fit; see `DeltaEncoder.encode`.
            MissedUpdateError: If no weights have been received yet.
        """
        key = method, wire_dtype
        return with_weights(result, lambda model: self._encode(model, payload_kind, key))

    def _encode(
        self, model: Any, payload_kind: PayloadKind, key: tuple[str, WireDType]
    ) -> Difference:
        if payload_kind == "gradients":
            gradient = _named(model) if isinstance(model, Mapping) else model
            encoder = self._gradients.get(key)
            if encoder is None or not encoder.fits(gradient):
                encoder = self._gradients[key] = GradientEncoder(key[1])
            return encoder.encode(gradient)
        weights = _named(model)
        if self._weights is None:
            raise MissedUpdateError("no weights have been received yet")
        return self._weights.encode(weights)


class GroupWire:
    """A group's encoder: it keeps the weights of all workers, and the exact ones before rounding.

    It is immutable: `message` also returns the next encoder, to be kept once the message is sent.
    """

    def __init__(self, wire_dtype: WireDType, driver: DeltaBroadcaster | None = None) -> None:
        """Continue from the broadcaster of earlier messages; without one, begin with a snapshot.

        Raises:
            ValueError: If ``wire_dtype`` is not a dtype of the wire.
        """
        dtype_on_wire(wire_dtype)
        self.wire_dtype = wire_dtype
        self._driver = driver

    @property
    def has_sent(self) -> bool:
        """Whether workers have weights that differences can be taken from."""
        return self._driver is not None

    @property
    def weights(self) -> FlatWeights:
        """The exact weights of the last message, before rounding, read-only."""
        assert self._driver is not None
        return self._driver.weights

    def message(
        self, weights: Any, difference: Difference | None = None
    ) -> "tuple[WireMessage, GroupWire]":
        """Return a message that brings workers to ``weights``, and the encoder after it.

        The message is a difference; the first time, and for another layout, it is a snapshot.

        Args:
            weights: `FlatWeights`, or a dict of arrays.
            difference: The rounded difference by which nodes reached these weights. The last
                message shows whether it is a difference from the weights that workers have.

        Raises:
            TypeError: If they are neither.
            ValueError: As `DeltaBroadcaster.encode`.
        """
        model = _named(weights)
        driver = self._driver
        message: WireMessage
        if driver is not None and driver.weights.layout.digest == model.layout.digest:
            if difference is not None and difference.base != driver.version:
                difference = None
            message, driver = driver.after(model, None if difference is None else difference.values)
        else:
            driver = DeltaBroadcaster(model, self.wire_dtype)
            message = driver.snapshot()
        return message, GroupWire(self.wire_dtype, driver)

    def snapshot(self) -> Snapshot:
        """Return the weights of all workers, for a worker that has lost them."""
        assert self._driver is not None
        return self._driver.snapshot()

    def widen(self, model: Any) -> Any:
        """Return a worker's difference in float32, checked to be from all workers' weights."""
        if isinstance(model, Difference) and model.base is not None and self._driver is not None:
            self._driver.check(model, "result")
        return widen(model)

    def decode(self, mean: Any, payload_kind: PayloadKind) -> Any:
        """Return the average of the models, from the mean of differences, which it overwrites."""
        if payload_kind == "gradients" or self._driver is None:
            return mean
        return self._driver.add_to(mean)

    def relative(self, model: Any, where: str, payload_kind: PayloadKind) -> Any:
        """Return a model that a rule compares with workers' differences, as such a difference.

        A model of another layout is returned as it is: the rule says what it expects.
        """
        if isinstance(model, Mapping):  # as workers may return it
            model = _named(model)
        driver = self._driver
        if payload_kind == "gradients" or driver is None or not isinstance(model, FlatWeights):
            return model
        if model.layout.digest != driver.weights.layout.digest:
            return model
        return driver.subtract_from(model.copy())


def _named(weights: Any) -> FlatWeights:
    """Return ``weights`` as `FlatWeights`."""
    if isinstance(weights, FlatWeights):
        return weights
    if isinstance(weights, Mapping):
        return FlatWeights(weights)
    got = type(weights).__name__
    raise TypeError(f"wire_dtype: expected weights by name (get_weights), got {got}")


def widen(model: Any) -> Any:
    """Return ``model``; a `Difference` in float32."""
    return model.widen() if isinstance(model, Difference) else model


def nbytes_of(weights: Any) -> int | None:
    """Return the bytes of ``weights`` as they travel; None if their kind cannot be averaged."""
    if isinstance(weights, Difference):
        return weights.values.buffer.nbytes
    if isinstance(weights, Snapshot):
        weights = weights.weights
    return packed_nbytes(weights)
