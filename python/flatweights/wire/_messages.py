"""The messages: a difference, a snapshot, and the average of differences."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from flatweights import _core
from flatweights._average import read_sources, read_weights
from flatweights._core import move_parts
from flatweights._layout import Layout
from flatweights._sources import check_flat_weights
from flatweights._weights import FlatWeights
from flatweights.wire._layouts import (
    WIRE_DTYPES,
    Layouts,
    WireDType,
    check_kind,
    check_layout,
    check_weights,
    check_writable,
    dtype_on_wire,
    layouts_for,
)


class MissedUpdateError(RuntimeError):
    """A message is a difference from weights that its receiver does not have.

    A worker that raises it needs a `Snapshot`.

    >>> from flatweights.wire import DeltaBroadcaster, DeltaEncoder
    >>> driver = DeltaBroadcaster(FlatWeights({"w": np.float32([1, 2])}), "bfloat16")
    >>> worker = DeltaEncoder(driver.snapshot())
    >>> missed, latest = driver.encode(driver.weights), driver.encode(driver.weights)
    >>> try:
    ...     worker.receive(latest)
    ... except MissedUpdateError:
    ...     worker.receive(driver.snapshot())
    {'w': array([1., 2.], dtype=float32)}
    """


@dataclass(frozen=True)
class Difference:
    """A difference from weights that both sides have, or a gradient, in 16 bits.

    Encoders return it. With protocol 5, it pickles as one out-of-band buffer. A transport of bare
    bytes sends the bytes of ``values.buffer`` and the two versions; the receiver, which knows the
    layout, rebuilds the difference with `wire_layout`.

    >>> from flatweights.wire import GradientEncoder, wire_layout
    >>> sent = GradientEncoder("bfloat16").encode(FlatWeights({"w": np.float32([1, 2.5])}))
    >>> received = FlatWeights.empty(wire_layout(sent.layout, "bfloat16"))
    >>> received.buffer[...] = np.frombuffer(sent.values.buffer.tobytes(), np.uint8)
    >>> Difference(received, sent.layout, sent.base, sent.version).widen()
    {'w': array([1. , 2.5], dtype=float32)}

    Attributes:
        values: The numbers, in ``wire_layout(layout, wire_dtype)``: 16 bits where ``layout`` has
            float32 or float64.
        layout: The layout of the model or gradient before encoding.
        base: The version of the weights that it is a difference from; None for gradients.
        version: The version of the weights once it is added; None in messages of workers.
    """

    values: FlatWeights
    layout: Layout
    base: int | None = None
    version: int | None = None

    def widen(self, out: FlatWeights | None = None) -> FlatWeights:
        """Return the values in the dtypes of `layout`, without rounding.

        Each number is read once and written once, without the GIL.

        >>> from flatweights.wire import GradientEncoder
        >>> GradientEncoder("float16").encode(np.array([0.1])).widen()
        {'vector': array([0.09997559])}

        Args:
            out: Weights of `layout` to write to; new ones, if None.

        Raises:
            TypeError: If ``out`` is not `FlatWeights`.
            ValueError: If ``out`` has another layout, is read-only or overlaps `values`; or these
                are not in the 16-bit form of `layout`.
        """
        layouts_of(self, "difference")
        if out is None:
            out = FlatWeights.empty(self.layout)
        else:
            check_writable(out, self.layout, "out")
            if np.may_share_memory(out.buffer, self.values.buffer):
                raise ValueError("out: overlaps the values, which are read while it is written")
        move_parts(list(out.values()), list(self.values.values()))
        return out


@dataclass(frozen=True)
class Snapshot:
    """The weights in full, for a worker that has none or has missed a difference.

    `DeltaBroadcaster.snapshot` returns it. With protocol 5, it pickles as one out-of-band buffer.

    >>> from flatweights.wire import DeltaBroadcaster
    >>> driver = DeltaBroadcaster(FlatWeights({"w": np.float32([1, 2])}), "bfloat16")
    >>> snapshot = driver.snapshot()
    >>> snapshot.weights, snapshot.version == driver.version
    ({'w': array([1., 2.], dtype=float32)}, True)

    Attributes:
        weights: The weights that all workers have, bit for bit.
        version: Their version.
        wire_dtype: The dtype that later differences are rounded to.
    """

    weights: FlatWeights
    version: int
    wire_dtype: WireDType


def average_differences(
    sources: Iterable[Difference],
    weights: Iterable[float] | None = None,
    *,
    out: FlatWeights | None = None,
) -> FlatWeights:
    """Return the weighted mean of ``sources``, in the dtypes before encoding.

    It has the bits of `flatweights.average` over the widened sources (`Difference.widen`), but no
    source is widened as a whole. For float32, one pass without the GIL reads 2 bytes of each number
    of each source, adds in float64, and writes 4 bytes.

    >>> from flatweights.wire import GradientEncoder
    >>> a, b = (GradientEncoder("bfloat16").encode(np.float32([x, 1])) for x in (1, 1.0078125))
    >>> average_differences([a, b])["vector"]
    array([1.0039062, 1.       ], dtype=float32)

    Args:
        sources: Messages of encoders, all with the same `Difference.base`.
        weights: One weight per source; see `flatweights.average`.
        out: Weights of the layout before encoding to write to; new ones, if None.

    Raises:
        TypeError: If a source is not a `Difference`, or has parts that have no mean, or ``out`` is
            not `FlatWeights`.
        ValueError: If there is no source, layouts differ, ``weights`` are invalid, or ``out`` is
            read-only or overlaps a source.
        MissedUpdateError: If the sources are differences from several versions.
    """
    models = read_sources(sources)
    factors = read_weights(weights, len(models))
    layouts = layouts_of(models[0], "source 0")
    check_flat_weights(layouts.model, "source 0")
    for k, model in enumerate(models):
        check_difference(model, layouts, f"source {k}")
        check_base(model, models[0].base, f"source {k}")
    if out is None:
        out = FlatWeights.empty(layouts.model)
    else:
        check_weights(out, layouts.model, "out")
    _core.average_widened_into(
        layouts.model.core,
        out.buffer,
        layouts.wire.core,
        [model.values.buffer for model in models],
        factors,
    )
    return out


def layouts_of(difference: Any, where: str) -> Layouts:
    """Return the layouts that ``difference`` was encoded with; errors name it ``where``."""
    check_fields(difference, where)
    for dtype in WIRE_DTYPES.values():
        layouts = layouts_for(difference.layout, dtype)
        if layouts.wire == difference.values.layout:
            return layouts
    raise ValueError(f"{where}: expected values of 16 bits in the layout that was encoded")


def layouts_of_snapshot(snapshot: Any, where: str) -> Layouts:
    """Return the layouts for differences from ``snapshot``; errors name it ``where``."""
    check_kind(snapshot, Snapshot, where)
    check_kind(snapshot.weights, FlatWeights, f"{where}, weights")
    check_kind(snapshot.version, int, f"{where}, version")
    return layouts_for(snapshot.weights.layout, dtype_on_wire(snapshot.wire_dtype))


def check_difference(message: Any, layouts: Layouts, where: str) -> None:
    """Raise unless ``message`` is a `Difference` in these ``layouts``."""
    check_fields(message, where)
    check_layout(layouts.model, message.layout, where)
    check_layout(layouts.wire, message.values.layout, where)


def check_base(message: Difference, version: int | None, where: str) -> None:
    """Raise `MissedUpdateError` unless ``message`` is a difference from weights of ``version``."""
    if message.base != version:
        raise MissedUpdateError(
            f"{where}: expected a difference from weights of version {version}, "
            f"got one from version {message.base}; a snapshot is needed"
        )


def check_message(message: Any) -> None:
    """Raise `TypeError` unless ``message`` is one that a driver sends."""
    if not isinstance(message, (Difference, Snapshot)):
        got = type(message).__name__
        raise TypeError(f"message: expected a Difference or a Snapshot, got {got}")


def check_fields(message: Any, where: str) -> None:
    """Raise `TypeError` unless ``message`` is a `Difference` with fields of the right types."""
    if not isinstance(message, Difference):
        raise TypeError(f"{where}: expected a Difference, got {type(message).__name__}")
    check_kind(message.layout, Layout, f"{where}, layout")
    check_kind(message.values, FlatWeights, f"{where}, values")
    for name in ("base", "version"):
        if getattr(message, name) is not None:
            check_kind(getattr(message, name), int, f"{where}, {name}")
