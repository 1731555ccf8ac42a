"""Both ends of an exchange: the workers' encoders, and the driver's broadcaster."""

from __future__ import annotations

import copy
import functools
import secrets
from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from flatweights import _core
from flatweights._average import list_of
from flatweights._layout import Layout
from flatweights._sources import Kind, Template
from flatweights._weights import FlatWeights, sealed
from flatweights.wire._layouts import (
    Layouts,
    WireDType,
    check_kind,
    check_layout,
    check_weights,
    check_writable,
    dtype_on_wire,
    layouts_for,
    nonfinite_error,
)
from flatweights.wire._messages import (
    Difference,
    Snapshot,
    average_differences,
    check_base,
    check_difference,
    check_fields,
    check_message,
    layouts_of_snapshot,
)

Side = TypeVar("Side", bound="_Side")


def _owned(weights: FlatWeights) -> FlatWeights:
    """Return ``weights``, or a copy if they are read-only."""
    return weights if weights.buffer.flags.writeable else weights.copy()


class _Residual:
    """The accumulated rounding errors of past messages, which the next message makes up for.

    Attributes:
        layouts: The layouts of the models that are sent.
    """

    def __init__(self, layouts: Layouts) -> None:
        """Start with errors of zero."""
        self.layouts = layouts
        self._pair = FlatWeights.empty(layouts.model), FlatWeights.empty(layouts.model)
        for errors in self._pair:  # as of the last message, and of the next one
            errors.buffer[...] = 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Own the errors: out of Ray's store, they are read-only."""
        vars(self).update(state)
        self._pair = _owned(self._pair[0]), _owned(self._pair[1])

    @property
    def now(self) -> FlatWeights:
        """The errors as of the last message."""
        return self._pair[0]

    def encode(
        self,
        parts: list[NDArray[Any]],
        reference: FlatWeights | None,
        where: str,
        base: int | None = None,
    ) -> Difference:
        """Return ``parts - reference + now``, rounded; the rounding errors become `now`.

        Args:
            parts: The arrays of the model, contiguous.
            reference: The weights to subtract; nothing is subtracted, if None.
            where: The name of the model in errors.
            base: The version of ``reference``.

        Raises:
            ValueError: If a rounded number is NaN or infinite; `now` has not changed.
        """
        values = _encode(self.layouts, parts, reference, where, self._pair)
        message = Difference(values, self.layouts.model, base=base)
        self._pair = self._pair[1], self._pair[0]
        return message


class _Side:
    """One side of an exchange. It keeps the reference: the weights that both sides have."""

    def __init__(self, layouts: Layouts, weights: FlatWeights, version: int) -> None:
        self._layouts = layouts
        self._reference = weights.copy()
        self._held = [version]  # a list, which the core sets in the call that adds to the reference

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Own the weights: out of Ray's store, they are read-only."""
        owned = {
            k: _owned(one) if isinstance(one, FlatWeights) else one for k, one in state.items()
        }
        vars(self).update(owned)

    @property
    def reference(self) -> FlatWeights:
        """The weights of all workers, as a read-only view, which the next message changes."""
        return sealed(self._reference)

    @property
    def version(self) -> int:
        """The version of `reference`."""
        return self._held[0]

    def _copy(self: Side) -> Side:
        """Return a copy that has its own reference and shares the rest."""
        other = copy.copy(self)
        other._reference, other._held = self._reference.copy(), list(self._held)
        return other

    def _advance(
        self,
        version: int,
        difference: NDArray[np.uint8] | None,
        *copied: tuple[FlatWeights, FlatWeights],
    ) -> None:
        """Change the reference and its version in one call of the core.

        So an interrupt changes both or neither.

        Args:
            version: The new version.
            difference: The bytes of a difference to add to the reference; nothing, if None.
            *copied: Pairs of a target and the weights to copy into it.
        """
        core, wire = self._layouts.model.core, self._layouts.wire.core
        pairs = [(target.buffer, source.buffer) for target, source in copied]
        _core.advance(core, self._reference.buffer, wire, difference, pairs, self._held, version)


class DeltaEncoder(_Side):
    """A worker's side: it sends its weights, and receives the average, as 16-bit differences.

    It keeps the reference, which is bit for bit the weights of the driver and of all other workers,
    and the rounding errors of the messages that it has sent. The errors alternate between two
    buffers, so it keeps 12 bytes for each number of float32. The error feedback is that of Seide et
    al., Interspeech 2014, in both directions as by Tang et al., ICML 2019; see `flatweights.wire`.

    >>> driver = DeltaBroadcaster(FlatWeights({"w": np.float32([1, 2])}), "bfloat16")
    >>> worker = DeltaEncoder(driver.snapshot())
    >>> trained = worker.reference.copy()
    >>> trained["w"] += np.float32(1e-3)
    >>> mean = driver.average([worker.encode(trained)])
    >>> worker.receive(driver.encode(mean))["w"].round(5)
    array([1.001, 2.001], dtype=float32)

    Attributes:
        reference: The weights that were received last, as a read-only view, which the next message
            changes.
        version: Their version.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        """Start from the weights that a driver has sent in full.

        Args:
            snapshot: From `DeltaBroadcaster.snapshot`; it is copied.

        Raises:
            TypeError: If it is not a `Snapshot`.
            ValueError: If its wire dtype is unknown.
        """
        layouts = layouts_of_snapshot(snapshot, "snapshot")
        super().__init__(layouts, snapshot.weights, snapshot.version)
        self._residual = _Residual(self._layouts)

    @property
    def residual(self) -> FlatWeights:
        """The rounding errors that are not sent yet, read-only: a view, which `encode` changes."""
        return sealed(self._residual.now)

    def fits(self, message: Difference | Snapshot) -> bool:
        """Whether ``message`` has the layout and the wire dtype of this encoder.

        If a snapshot does not fit, the model has changed: make a new encoder from the snapshot.

        Args:
            message: A message of the driver.

        Raises:
            TypeError: If it is neither a `Difference` nor a `Snapshot`.
        """
        if isinstance(message, Difference):
            check_fields(message, "message")
            layout, wire = message.layout, message.values.layout
        else:
            check_message(message)
            layouts = layouts_of_snapshot(message, "message")
            layout, wire = layouts.model, layouts.wire
        expected = self._layouts.model.digest, self._layouts.wire.digest
        return (layout.digest, wire.digest) == expected

    def encode(self, weights: FlatWeights) -> Difference:
        """Return ``weights - reference + residual`` in 16 bits.

        One pass over memory without the GIL reads 12 bytes and writes 6 for each number of float32.

        Args:
            weights: Weights in the layout of `reference`. They are read and not kept.

        Raises:
            TypeError: If ``weights`` are not `FlatWeights`.
            ValueError: If they have another layout, hold NaN or infinity, or differ from
                `reference` by more than the dtype holds (65504 for float16). The encoder has not
                changed.
        """
        check_weights(weights, self._layouts.model, "weights")
        parts = list(weights.values())
        return self._residual.encode(parts, self._reference, "weights", self.version)

    def receive(self, message: Difference | Snapshot) -> FlatWeights:
        """Update `reference` by a message of the driver; return it, read-only.

        A snapshot does not change `residual`: errors of earlier messages are still sent.

        Args:
            message: A message from `DeltaBroadcaster.encode` or `DeltaBroadcaster.snapshot`.

        Raises:
            MissedUpdateError: If it is a difference from other weights than `reference`. The
                encoder has not changed, and needs a snapshot.
            ValueError: If it has another layout or wire dtype.
            TypeError: If it is not such a message.
        """
        if isinstance(message, Snapshot):
            layouts = layouts_of_snapshot(message, "snapshot")
            check_layout(self._layouts.model, layouts.model, "snapshot")
            check_layout(self._layouts.wire, layouts.wire, "snapshot, wire_dtype")
            self._advance(message.version, None, (self._reference, message.weights))
            return self.reference
        check_message(message)
        check_difference(message, self._layouts, "difference")
        check_base(message, self.version, "difference")
        if message.version is None:
            raise ValueError("difference: expected one from a driver, got one from a worker")
        self._advance(message.version, message.values.buffer)
        return self.reference

    def after(self, message: Difference | Snapshot) -> DeltaEncoder:
        """Return an encoder that has received ``message``, and leave this one unchanged.

        A caller that sets the weights of a model can keep the new encoder if that succeeds, and
        this one if it fails. `reference` is copied; the two encoders share their `residual`.

        Args:
            message: As for `receive`.

        Raises:
            MissedUpdateError: As `receive`.
            ValueError: As `receive`.
            TypeError: As `receive`.
        """
        other = self._copy()
        other.receive(message)
        return other


class DeltaBroadcaster(_Side):
    """The driver's side: it sends weights, and averages results, as 16-bit differences.

    It keeps the reference, which is bit for bit the weights of all workers, and the exact weights
    of the last `encode`: 8 bytes for each number of float32. The two differ by the rounding of one
    difference and never by more, because the next difference makes up for it (error feedback from
    driver to workers: Tang et al., ICML 2019; see `flatweights.wire`).

    An average is the exact weights plus the mean of the workers' differences. The model of an
    optimizer of `flatweights.server` is these exact weights, so the optimizer sees that mean
    without a rounding error.

    Versions count up from a random number, so that messages of another driver are refused.

    >>> driver = DeltaBroadcaster(FlatWeights({"w": np.float32([1, 2])}), "bfloat16")
    >>> update = driver.encode(FlatWeights({"w": np.float32([1.001, 2])}))
    >>> update.values["w"].dtype, driver.reference["w"].round(5)
    (dtype(bfloat16), array([1.001, 2.   ], dtype=float32))

    Attributes:
        reference: The weights of all workers, as a read-only view, which the next `encode` changes.
        version: Their version.
    """

    def __init__(self, weights: FlatWeights, wire_dtype: WireDType) -> None:
        """Start from weights; the workers need a `snapshot` of them first.

        Args:
            weights: The first weights of all workers; they are copied.
            wire_dtype: ``"bfloat16"`` or ``"float16"``; see `dtype_on_wire`.

        Raises:
            TypeError: If ``weights`` are not `FlatWeights`.
            ValueError: If ``wire_dtype`` is anything else, or ``weights`` hold NaN or infinity.
        """
        check_kind(weights, FlatWeights, "weights")
        layouts = layouts_for(weights.layout, dtype_on_wire(wire_dtype))
        super().__init__(layouts, weights, secrets.randbits(62))
        self._wire_dtype = wire_dtype
        _check_finite(weights, "weights")
        self._weights = weights.copy()

    @property
    def weights(self) -> FlatWeights:
        """The exact weights, before rounding, as a read-only view, which `encode` changes."""
        return sealed(self._weights)

    def snapshot(self) -> Snapshot:
        """Return `reference`, copied, for workers that have no weights or missed an update."""
        return Snapshot(self._reference.copy(), self.version, self._wire_dtype)

    def encode(self, weights: FlatWeights) -> Difference:
        """Return the rounded difference that brings workers from `reference` to ``weights``.

        `reference` becomes the weights that workers have after it. One pass without the GIL rounds,
        and another adds the difference as workers do: for each number of float32, they read 18
        bytes and write 10, including the copy of ``weights``.

        Args:
            weights: The next weights of the workers; they are copied.

        Raises:
            TypeError: If ``weights`` are not `FlatWeights`.
            ValueError: If they have another layout, hold NaN or infinity, or differ from
                `reference` by more than the dtype holds; or if they are so large that `reference`
                plus the rounded difference would be infinite. The broadcaster has not changed.
        """
        return self._encode(weights, self.version + 1)

    def after(
        self, weights: FlatWeights, values: FlatWeights | None = None
    ) -> tuple[Difference, DeltaBroadcaster]:
        """Return the difference of `encode`, and a broadcaster after it; this one stays unchanged.

        A caller can keep the new broadcaster if the difference could be sent, and this one if not.
        `reference` is copied.

        Args:
            weights: As for `encode`.
            values: The difference in 16 bits, if it was rounded elsewhere: ``weights`` is the sum
                of `weights` and these, which differs from `reference` by as much as before.

        Raises:
            TypeError: As `encode`.
            ValueError: As `encode`.
        """
        if values is not None:
            check_weights(values, self._layouts.wire, "values")
        other = self._copy()
        other._weights = FlatWeights.empty(self._layouts.model)
        # If the caller keeps this one instead, its next difference gets another version.
        version = self.version + 1 + secrets.randbelow(1 << 20)
        update = other._encode(weights, version, values)
        if values is not None:
            _check_finite(other._weights, "weights")
            _check_finite(other._reference, "weights")
        return update, other

    def _encode(
        self, weights: FlatWeights, version: int, values: FlatWeights | None = None
    ) -> Difference:
        layouts = self._layouts
        check_weights(weights, layouts.model, "weights")
        if values is None:
            values = _encode(layouts, list(weights.values()), self._reference, "weights")
        update = Difference(values, layouts.model, self.version, version)
        self._advance(version, values.buffer, (self._weights, weights))
        return update

    def average(
        self,
        sources: Iterable[Difference],
        weights: Iterable[float] | None = None,
        *,
        out: FlatWeights | None = None,
    ) -> FlatWeights:
        """Return `weights` plus the weighted mean of the workers' differences.

        Args:
            sources: Messages of workers, from `DeltaEncoder.encode`.
            weights: One weight per source; see `flatweights.average`.
            out: Weights of this layout to write to; new ones, if None.

        Raises:
            MissedUpdateError: If a source is a difference from other weights than `reference`.
            TypeError: As `average_differences`.
            ValueError: As `average_differences`.
        """
        models = list_of(sources)
        for k, model in enumerate(models):
            self.check(model, f"source {k}")
        return self.add_to(average_differences(models, weights, out=out))

    def check(self, source: Any, where: str = "source") -> None:
        """Raise unless ``source`` is a difference from `reference`; `average` checks the same.

        Args:
            source: A message of a worker.
            where: Its name in errors.

        Raises:
            MissedUpdateError: If it is a difference from other weights.
            TypeError: If it is not a `Difference`.
            ValueError: If it has another layout or wire dtype.
        """
        check_difference(source, self._layouts, where)
        check_base(source, self.version, where)

    def add_to(self, mean: FlatWeights) -> FlatWeights:
        """Add `weights` to a mean of differences, in place; return it, the average of the models.

        `average` does this itself. Call it for a mean that was made in another way: for example, by
        a `flatweights.RunningAverage` of differences that were widened (`Difference.widen`) as they
        arrived. Parts that travel unchanged are left as they are.

        Args:
            mean: Writable weights in the layout of `weights`.

        Raises:
            TypeError: If ``mean`` is not `FlatWeights`.
            ValueError: If it has another layout or is read-only.
        """
        return self._add_to(mean, 1.0, "mean")

    def subtract_from(self, model: FlatWeights) -> FlatWeights:
        """Subtract `weights` from a model, in place; return it, as a difference like the workers'.

        This undoes `add_to`. Call it for the center of a rule of `flatweights.robust` whose sources
        are differences that were widened.

        >>> driver = DeltaBroadcaster(FlatWeights({"w": np.float32([1, 2])}), "bfloat16")
        >>> driver.subtract_from(FlatWeights({"w": np.float32([1.5, 2])}))
        {'w': array([0.5, 0. ], dtype=float32)}

        Args:
            model: As for `add_to`.

        Raises:
            TypeError: As `add_to`.
            ValueError: As `add_to`.
        """
        return self._add_to(model, -1.0, "model")

    def _add_to(self, model: FlatWeights, factor: float, where: str) -> FlatWeights:
        check_writable(model, self._layouts.model, where)
        names = self._layouts.rounded.names
        _core.axpy_(
            self._layouts.rounded.core,
            False,
            [model[name] for name in names],
            factor,
            [self._weights[name] for name in names],
        )
        return model


class GradientEncoder:
    """Encodes gradients in 16 bits, and adds the rounding errors of each to the next.

    The error feedback is that of Seide, Fu, Droppo, Li and Yu, Interspeech 2014; see
    `flatweights.wire`. The errors alternate between two buffers, so an encoder keeps 8 bytes for
    each number of float32. Each worker has its own. `average_differences` averages the messages of
    all, and `Difference.widen` decodes one.

    >>> encoder = GradientEncoder("bfloat16")
    >>> gradient = np.float32([1.001])  # 1 in bfloat16
    >>> sent = [encoder.encode(gradient).widen()["vector"] for _ in range(1000)]
    >>> round(float(sum(sent)[0]), 2)
    1001.0
    """

    def __init__(self, wire_dtype: WireDType) -> None:
        """Start with errors of zero; the first gradient determines the layout.

        Args:
            wire_dtype: ``"bfloat16"`` or ``"float16"``; see `dtype_on_wire`.

        Raises:
            ValueError: If ``wire_dtype`` is anything else.
        """
        self._wire_dtype = dtype_on_wire(wire_dtype)
        self._residual: _Residual | None = None

    @property
    def residual(self) -> FlatWeights:
        """The rounding errors that are not sent yet, read-only: a view, which `encode` changes.

        Raises:
            ValueError: Before the first gradient.
        """
        if self._residual is None:
            raise ValueError("expected a gradient first, got none")
        return sealed(self._residual.now)

    def fits(self, gradient: FlatWeights | NDArray[Any]) -> bool:
        """Whether `encode` takes a gradient of this layout: that of the first one.

        Raises:
            ValueError: As `encode`, for a vector with strides.
            TypeError: As `encode`.
        """
        _, layout = _parts_of(gradient)
        return self._residual is None or self._residual.layouts.model.digest == layout.digest

    def encode(self, gradient: FlatWeights | NDArray[Any]) -> Difference:
        """Return ``gradient + residual`` in 16 bits.

        One pass over memory without the GIL reads 8 bytes and writes 6 for each number of float32.

        >>> GradientEncoder("float16").encode(np.float32([0.5, 1.0])).values
        {'vector': array([0.5, 1. ], dtype=float16)}

        Args:
            gradient: `FlatWeights`, or a contiguous vector, which becomes a single part named
                ``"vector"``. It is read and not kept.

        Raises:
            ValueError: If ``gradient`` has another layout than the first one, is a vector with
                strides, holds NaN or infinity, or is too large for the dtype. The encoder has not
                changed.
            TypeError: If it is neither.
        """
        parts, layout = _parts_of(gradient)
        residual = self._residual or _Residual(layouts_for(layout, self._wire_dtype))
        check_layout(residual.layouts.model, layout, "gradient, against the first one")
        message = residual.encode(parts, None, "gradient")
        self._residual = residual
        return message


def _parts_of(gradient: FlatWeights | NDArray[Any]) -> tuple[list[NDArray[Any]], Layout]:
    """Return the parts of a gradient, and their layout.

    A vector is made a part of a model, because bare arrays of bfloat16 pickle number by number.
    """
    if isinstance(gradient, FlatWeights):
        return list(gradient.values()), gradient.layout
    if isinstance(gradient, np.ndarray) and gradient.ndim == 1:
        if not gradient.flags.c_contiguous:
            raise ValueError("gradient: expected a vector without strides")
        return [gradient], _vector_layout(gradient.size, gradient.dtype)
    raise TypeError(
        "gradient: expected FlatWeights or a vector, such as flatten(gradient), got "
        f"{type(gradient).__name__}"
    )


def _check_finite(weights: FlatWeights, where: str) -> None:
    i = Template(Kind.FLAT_WEIGHTS, weights.layout).first_nonfinite([weights.buffer])
    if i is not None:
        raise nonfinite_error(i, weights, list(weights.values())[i], where)


def _encode(
    layouts: Layouts,
    parts: list[NDArray[Any]],
    reference: FlatWeights | None,
    where: str,
    errors: tuple[FlatWeights | None, FlatWeights | None] = (None, None),
) -> FlatWeights:
    """Return ``parts - reference + errors[0]``, rounded.

    The rounding errors are written to ``errors[1]``; without one, they are dropped.

    Raises:
        ValueError: If a rounded number is NaN or infinite; or, without ``errors``, the reference
            plus a rounded number.
    """
    values = FlatWeights.empty(layouts.wire)
    core, wire = layouts.model.core, layouts.wire.core
    buffers = [None if given is None else given.buffer for given in (reference, *errors)]
    nonfinite = _core.encode_difference(core, False, parts, wire, values.buffer, *buffers)
    if nonfinite is not None:
        raise nonfinite_error(nonfinite, values, parts[nonfinite], where)
    return values


@functools.lru_cache(maxsize=64)
def _vector_layout(size: int, dtype: np.dtype[Any]) -> Layout:
    """Return the layout of a gradient that is a bare array."""
    return Layout(["vector"], [(size,)], [dtype])
