"""The messages: a difference, a snapshot, and the average of differences."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from flatweights import _core
from flatweights._average import add_up, read_weights, relative_weights
from flatweights._cast import move_parts
from flatweights._layout import Layout
from flatweights._weights import FlatWeights
from flatweights.wire._plan import (
    WIRE_DTYPES,
    Plan,
    WireDType,
    check_kind,
    check_layout,
    check_writable,
    dtype_on_wire,
    plan_for,
)


class MissedUpdateError(RuntimeError):
    """A difference is from weights that the receiver does not have: send it a `Snapshot`.

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
    """A difference from weights that both sides have, in 16 bits; or a gradient.

    Encoders return it. It pickles, with protocol 5 as one out-of-band buffer. A transport of bare
    bytes sends those of ``values.buffer`` and the two versions; the other side, which knows the
    layout, rebuilds the difference with `wire_layout`.

    >>> from flatweights.wire import GradientEncoder, wire_layout
    >>> sent = GradientEncoder("bfloat16").encode(FlatWeights({"w": np.float32([1, 2.5])}))
    >>> received = FlatWeights.empty(wire_layout(sent.layout, "bfloat16"))
    >>> received.buffer[...] = np.frombuffer(sent.values.buffer.tobytes(), np.uint8)
    >>> Difference(received, sent.layout, sent.base, sent.version).widen()
    {'w': array([1. , 2.5], dtype=float32)}

    Attributes:
        values: The numbers, in 16 bits where ``layout`` has float32 or float64: of
            ``wire_layout(layout, wire_dtype)``.
        layout: The layout of the encoded model or gradient.
        base: Version of the weights to add it to; None for gradients.
        version: Version of the weights with it added; None in messages of workers.
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
            out: Where to write, of `layout`. New weights, if None.

        Raises:
            TypeError: If ``out`` is no `FlatWeights`.
            ValueError: If ``out`` has another layout or is read-only; or `values` are not of
                `layout` in 16 bits.
        """
        plan_of(self, "difference")
        if out is None:
            out = FlatWeights.empty(self.layout)
        else:
            check_writable(out, self.layout, "out")
        move_parts(list(out.values()), list(self.values.values()))
        return out


@dataclass(frozen=True)
class Snapshot:
    """All weights, for a worker that has none or has missed a difference.

    `DeltaBroadcaster.snapshot` returns it. It pickles, with protocol 5 as one out-of-band buffer.

    >>> from flatweights.wire import DeltaBroadcaster
    >>> driver = DeltaBroadcaster(FlatWeights({"w": np.float32([1, 2])}), "bfloat16")
    >>> snapshot = driver.snapshot()
    >>> snapshot.weights, snapshot.version == driver.version
    ({'w': array([1., 2.], dtype=float32)}, True)

    Attributes:
        weights: The weights of all workers, bit for bit.
        version: Their version.
        wire_dtype: The dtype that differences are rounded to.
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
    """Return the weighted mean of ``sources`` in the dtypes before encoding.

    The bits are those of `flatweights.average` over widened sources (`Difference.widen`): sums in
    float64, rounded once, to float32. But no source is widened as a whole: one pass reads 2
    bytes for each number and source and writes 4, without the GIL.

    >>> from flatweights.wire import GradientEncoder
    >>> a, b = (GradientEncoder("bfloat16").encode(np.float32([x, 1])) for x in (1, 1.0078125))
    >>> average_differences([a, b])["vector"]
    array([1.0039062, 1.       ], dtype=float32)

    Args:
        sources: From encoders, all based on weights of one version.
        weights: One weight per source; see `flatweights.average`.
        out: Where to write: weights of the layout before encoding. New ones, if None.

    Raises:
        TypeError: If a source is no `Difference`, or ``out`` no `FlatWeights`.
        ValueError: If there is none, layouts differ, ``weights`` are invalid, or ``out`` is
            read-only.
        MissedUpdateError: If they are from weights of several versions.
    """
    models = list(sources)
    if not models:
        raise ValueError("expected at least one source, got none")
    factors = read_weights(weights, len(models))
    plan = plan_of(models[0], "source 0")
    for k, model in enumerate(models):
        check_difference(model, plan, f"source {k}")
        check_base(model, models[0].base, f"source {k}")
    if out is None:
        out = FlatWeights.empty(plan.layout)
    else:
        check_writable(out, plan.layout, "out")
    relative = relative_weights(factors)
    _core.average_widened_into(
        plan.layout.core,
        out.buffer,
        plan.wire.core,
        [model.values.buffer for model in models],
        relative,
        add_up(relative),
    )
    return out


def plan_of(difference: Any, where: str) -> Plan:
    """Return the plan that ``difference`` was encoded by; errors name it ``where``."""
    check_fields(difference, where)
    for dtype in WIRE_DTYPES.values():
        plan = plan_for(difference.layout, dtype)
        if plan.wire == difference.values.layout:
            return plan
    raise ValueError(f"{where}: expected values of 16 bits in the layout that was encoded")


def plan_of_snapshot(snapshot: Any, where: str) -> Plan:
    """Return the plan for differences from ``snapshot``; errors name it ``where``."""
    check_kind(snapshot, Snapshot, where)
    check_kind(snapshot.weights, FlatWeights, f"{where}, weights")
    check_kind(snapshot.version, int, f"{where}, version")
    return plan_for(snapshot.weights.layout, dtype_on_wire(snapshot.wire_dtype))


def check_difference(message: Any, plan: Plan, where: str) -> None:
    """Raise unless ``message`` is a `Difference` of the layouts of ``plan``."""
    check_fields(message, where)
    check_layout(plan.layout, message.layout, where)
    check_layout(plan.wire, message.values.layout, where)


def check_base(message: Difference, version: int | None, where: str) -> None:
    """Raise `MissedUpdateError` unless ``message`` is from weights of ``version``."""
    if message.base != version:
        raise MissedUpdateError(
            f"{where}: expected a difference from weights of version {version}, "
            f"got one from version {message.base}; a snapshot is needed"
        )


def check_fields(message: Any, where: str) -> None:
    """Raise `TypeError` unless ``message`` is a `Difference` of `FlatWeights` and versions."""
    if not isinstance(message, Difference):
        raise TypeError(f"{where}: expected a Difference, got {type(message).__name__}")
    check_kind(message.layout, Layout, f"{where}, layout")
    check_kind(message.values, FlatWeights, f"{where}, values")
    for name in ("base", "version"):
        if getattr(message, name) is not None:
            check_kind(getattr(message, name), int, f"{where}, {name}")
