"""Models and gradients in 16 bits on their way between processes, without what that loses.

Rounded to 16 bits in every round, weights would lose every update that is smaller than
their last place: 1/256 of a weight for bfloat16. So what travels is the difference from
what both sides have, and what rounding takes from one message is added to the next: error
feedback (Seide, Fu, Droppo, Li and Yu, "1-Bit Stochastic Gradient Descent and its
Application to Data-Parallel Distributed Training of Speech DNNs", Interspeech 2014; Stich,
Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018; Karimireddy, Rebjock, Stich
and Jaggi, "Error Feedback Fixes SignSGD and Other Gradient Compression Schemes", ICML 2019);
both ways, as in Tang, Yu, Lian, Zhang and Liu, "DoubleSqueeze: Parallel Stochastic Gradient
Descent with Double-Pass Error-Compensated Compression", ICML 2019.

Parts of float32 and float64 travel so. Others travel as they are: integers, booleans, complex
numbers, and what has 16 bits or fewer already.
"""

import functools
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from flatweights import _core
from flatweights._average import average_into, read_weights
from flatweights._cast import move_parts
from flatweights._inplace import isfinite
from flatweights._layout import Layout, Slot, place_of
from flatweights._sources import Kind, Template
from flatweights._weights import FlatWeights

WireDType = Literal["bfloat16", "float16"]

# Numbers of a block: what is computed between two reads of memory stays in a cache, and the
# core shares the averages among its threads.
# Every number is computed by itself, so the bits do not depend on it.
BLOCK = 1 << 17

_VECTOR = "vector"
_WIRE_DTYPES: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}


class MissedUpdateError(RuntimeError):
    """A difference is from weights that the receiver does not have: send it a `Snapshot`."""


@dataclass(frozen=True)
class Difference:
    """What is to be added to weights that both sides have, in 16 bits; or a gradient.

    It pickles, with protocol 5 as one out-of-band buffer.

    Attributes:
        values: The numbers, in 16 bits where ``layout`` has float32 or float64.
        layout: The layout of what was encoded.
        base: Version of the weights that it is to be added to; None for gradients.
        version: Version of the weights that this makes; None for what workers send.
    """

    values: FlatWeights
    layout: Layout
    base: int | None = None
    version: int | None = None

    def widen(self, out: FlatWeights | None = None) -> FlatWeights:
        """Return the values in the dtypes of `layout`, without rounding.

        Each number is read once and written once, without the GIL.

        Args:
            out: Where to write, of `layout`. New weights, if None.

        Raises:
            ValueError: If ``out`` has another layout or is read-only.
        """
        if out is None:
            out = FlatWeights.empty(self.layout)
        else:
            _check_layout(self.layout, out.layout, "out")
        move_parts(list(out.values()), list(self.values.values()))
        return out


@dataclass(frozen=True)
class Snapshot:
    """Weights in full, for who has none or has missed a difference.

    Attributes:
        weights: What all workers have, bit for bit.
        version: Their version.
        wire_dtype: What differences are rounded to.
    """

    weights: FlatWeights
    version: int
    wire_dtype: WireDType


def wire_layout(layout: Layout, wire_dtype: WireDType) -> Layout:
    """Return ``layout`` with its float32 and float64 slots changed to ``wire_dtype``.

    >>> layout = Layout.of({"w": np.zeros(3), "step": np.int64(0)})
    >>> [str(slot.dtype) for slot in wire_layout(layout, "bfloat16").slots]
    ['bfloat16', 'int64']

    Args:
        layout: Of a model.
        wire_dtype: ``"bfloat16"`` or ``"float16"``.

    Raises:
        ValueError: If ``wire_dtype`` is another one.
    """
    return _plan(layout, dtype_on_wire(wire_dtype).name).wire


def average_differences(
    sources: Iterable[Difference],
    weights: Iterable[float] | None = None,
    *,
    out: FlatWeights | None = None,
) -> FlatWeights:
    """Return the weighted mean of ``sources`` in the dtypes of what was encoded.

    The bits are those of `flatweights.average` over what `Difference.widen` gives: sums in
    float64, rounded once, to float32. But no source is widened as a whole: one pass, by
    blocks, reads 2 bytes for each number and source and writes 4.

    >>> a, b = (GradientEncoder("bfloat16").encode(np.float32([x, 1])) for x in (1, 1.0078125))
    >>> average_differences([a, b])["vector"]
    array([1.0039062, 1.       ], dtype=float32)

    Args:
        sources: What encoders gave, all from weights of one version.
        weights: One weight per source; see `flatweights.average`.
        out: Where to write: weights of the layout that was encoded. New ones, if None.

    Raises:
        TypeError: If a source is no `Difference`.
        ValueError: If there is none, layouts differ, or ``weights`` are not as they should be.
        MissedUpdateError: If they are from weights of several versions.
    """
    models = list(sources)
    if not models:
        raise ValueError("expected at least one source, got none")
    given = read_weights(weights, len(models))
    for k, model in enumerate(models):
        _check_difference(model, models[0].layout, models[0].values.layout, f"source {k}")
        _check_base(model, models[0].base, f"source {k}")
    first = models[0]
    result = FlatWeights.empty(first.layout) if out is None else out
    _check_layout(first.layout, result.layout, "out")
    plan = _plan_of(first)
    _average_blocks(plan, result, [_flat_views(model.values) for model in models], given)
    if plan.kept:
        views = [list(model.values.values()) for model in models]
        written = list(result.values())
        average_into(
            [written[i] for i in plan.kept], [[v[i] for i in plan.kept] for v in views], given
        )
    return result


class DeltaEncoder:
    """A worker's side: its weights go out, and those of all come in, as 16-bit differences.

    Kept are the reference (the weights that were received last: bit for bit those that the
    driver and all other workers have) and what rounding has taken from what was sent, in two
    buffers by turns; 12 bytes for each number of float32.

    >>> driver = DeltaBroadcaster(FlatWeights({"w": np.float32([1, 2])}), "bfloat16")
    >>> worker = DeltaEncoder(driver.snapshot())
    >>> trained = worker.reference.copy()
    >>> trained["w"] += np.float32(1e-3)
    >>> mean = driver.average([worker.encode(trained)])
    >>> worker.receive(driver.encode(mean))["w"].round(5)
    array([1.001, 2.001], dtype=float32)
    """

    def __init__(self, snapshot: Snapshot) -> None:
        """Start from what `DeltaBroadcaster.snapshot` gave; it is copied."""
        self._plan = _plan(snapshot.weights.layout, dtype_on_wire(snapshot.wire_dtype).name)
        self._reference = snapshot.weights.copy()
        self._version = snapshot.version
        self._residual = _Residual(self._plan)

    @property
    def reference(self) -> FlatWeights:
        """The weights received last, read-only: a view, which the next ones change."""
        return _read_only(self._reference)

    @property
    def version(self) -> int:
        """Their version."""
        return self._version

    @property
    def residual(self) -> FlatWeights:
        """What rounding has taken so far, read-only: a view, which `encode` changes."""
        return _read_only(self._residual.now)

    def fits(self, message: Difference | Snapshot) -> bool:
        """Whether ``message`` is of the layout and the wire dtype of this encoder."""
        if isinstance(message, Difference):
            digests = message.layout.digest, message.values.layout.digest
            return digests == (self._plan.layout.digest, self._plan.wire.digest)
        plan = _plan(message.weights.layout, dtype_on_wire(message.wire_dtype).name)
        return plan.wire.digest == self._plan.wire.digest and (
            plan.layout.digest == self._plan.layout.digest
        )

    def encode(self, weights: FlatWeights) -> Difference:
        """Return the difference of ``weights`` from `reference`, and of what was lost before.

        One pass by blocks: for each number of float32, 12 bytes are read and 6 written;
        then the 2 that go out are read once more, for NaN and infinity.

        Args:
            weights: Of the layout of `reference`; they are read, not kept.

        Raises:
            ValueError: If they have another layout, hold NaN or infinity, or differ from
                `reference` by more than the dtype holds (65504 for float16). All is then
                as it was.
        """
        _check_layout(self._plan.layout, weights.layout, "weights")
        values = self._residual.encode(weights, weights.buffer, self._reference.buffer)
        return Difference(values, self._plan.layout, base=self._version)

    def receive(self, message: Difference | Snapshot) -> FlatWeights:
        """Take the weights that a driver sent; return `reference`, read-only.

        What was lost in what this worker has sent so far is not forgotten by a snapshot.

        Args:
            message: What `DeltaBroadcaster.encode` or `DeltaBroadcaster.snapshot` gave.

        Raises:
            MissedUpdateError: If it is a difference from other weights than `reference`. All
                is then as it was, and a snapshot is needed.
            ValueError: If it has another layout or wire dtype.
            TypeError: If it is no such message.
        """
        if isinstance(message, Snapshot):
            _check_layout(self._plan.layout, message.weights.layout, "snapshot")
            move_parts([self._reference.buffer], [message.weights.buffer])
            self._version = message.version
            return self.reference
        _check_difference(message, self._plan.layout, self._plan.wire, "difference")
        _check_base(message, self._version, "difference")
        if message.version is None:
            raise ValueError("difference: expected one from a driver, got one from a worker")
        _add(self._plan, self._reference, message.values)
        self._version = message.version
        return self.reference


class DeltaBroadcaster:
    """A driver's side: weights go out, and averages are made, from 16-bit differences.

    Kept are the reference, bit for bit what all workers have, and the weights that they
    were meant to have: those given last, which the reference differs from by the rounding
    of one difference. That is never more, for what was lost is in the next difference again.
    8 bytes for each number of float32.

    Averages are the weights given last plus the mean of the workers' differences. So the
    optimizers of `flatweights.server`, whose weights are those given last, see that mean
    itself.

    Versions count up from a random number: what belongs to another driver is refused.

    >>> driver = DeltaBroadcaster(FlatWeights({"w": np.float32([1, 2])}), "bfloat16")
    >>> update = driver.encode(FlatWeights({"w": np.float32([1.001, 2])}))
    >>> update.values["w"].dtype, driver.reference["w"].round(5)
    (dtype(bfloat16), array([1.001, 2.   ], dtype=float32))
    """

    def __init__(self, weights: FlatWeights, wire_dtype: WireDType) -> None:
        """Start from weights, which are copied; send workers a `snapshot` first.

        Args:
            weights: Those that workers shall have.
            wire_dtype: ``"bfloat16"`` or ``"float16"``. float16 has 11 significant bits instead
                of 8, but reaches from 6e-8 to 65504 only.

        Raises:
            ValueError: If ``wire_dtype`` is another one, or ``weights`` hold NaN or infinity.
        """
        self._plan = _plan(weights.layout, dtype_on_wire(wire_dtype).name)
        self._wire_dtype = wire_dtype
        _check_finite(weights, weights, "weights")
        self._reference = weights.copy()
        self._weights = weights.copy()
        self._version = secrets.randbits(62)

    @property
    def reference(self) -> FlatWeights:
        """What all workers have, read-only: a view, which the next `encode` changes."""
        return _read_only(self._reference)

    @property
    def weights(self) -> FlatWeights:
        """What they were meant to have, read-only: a view, which the next `encode` changes."""
        return _read_only(self._weights)

    @property
    def version(self) -> int:
        """Version of `reference`."""
        return self._version

    def snapshot(self) -> Snapshot:
        """Return a copy of `reference`, for workers that have none or missed an update."""
        return Snapshot(self._reference.copy(), self._version, self._wire_dtype)

    def encode(self, weights: FlatWeights) -> Difference:
        """Return the difference that brings workers from `reference` to ``weights``, nearly.

        `reference` becomes what they have then. Two passes by blocks, one that rounds and one
        that adds, as workers do: for each number of float32, 20 bytes are read and 10 written,
        the copy of ``weights`` included.

        Args:
            weights: Those that workers shall have; they are copied.

        Raises:
            ValueError: If they have another layout, hold NaN or infinity, or differ from
                `reference` by more than the dtype holds. All is then as it was.
        """
        plan = self._plan
        _check_layout(plan.layout, weights.layout, "weights")
        values = FlatWeights.empty(plan.wire)
        wire = _flat_views(values)
        scratch = _Scratch(plan)
        with np.errstate(all="ignore"):
            for block in plan.blocks:
                delta = scratch.of(block)
                np.subtract(
                    block.read(weights.buffer), block.read(self._reference.buffer), out=delta
                )
                move_parts(block.pieces(wire), block.cut(delta))
        _keep(plan, values, weights)
        _check_finite(values, weights, "weights")
        _add(plan, self._reference, values)
        if weights.buffer is not self._weights.buffer:
            move_parts([self._weights.buffer], [weights.buffer])
        base, self._version = self._version, self._version + 1
        return Difference(values, plan.layout, base, self._version)

    def average(
        self,
        sources: Iterable[Difference],
        weights: Iterable[float] | None = None,
        *,
        out: FlatWeights | None = None,
    ) -> FlatWeights:
        """Return `weights` plus the weighted mean of what workers sent.

        Args:
            sources: What their `DeltaEncoder.encode` gave.
            weights: One weight per source; see `flatweights.average`.
            out: Where to write, of the layout of `weights`. New ones, if None.

        Raises:
            MissedUpdateError: If one is from other weights than `reference`.
            TypeError: As `average_differences`.
            ValueError: As `average_differences`.
        """
        models = list(sources)
        for k, model in enumerate(models):
            self.check(model, f"source {k}")
        return self.add_to(average_differences(models, weights, out=out))

    def check(self, source: Any, where: str = "source") -> None:
        """Check that ``source`` is a difference from `reference`; see `average`."""
        _check_difference(source, self._plan.layout, self._plan.wire, where)
        _check_base(source, self._version, where)

    def add_to(self, mean: FlatWeights) -> FlatWeights:
        """Add `weights` to a mean of differences, in place; return it.

        What travels as it is stays so.

        Raises:
            ValueError: If it has another layout or is read-only.
        """
        _check_layout(self._plan.layout, mean.layout, "mean")
        with np.errstate(all="ignore"):
            for block in self._plan.blocks:
                numbers = block.read(mean.buffer)
                np.add(numbers, block.read(self._weights.buffer), out=numbers)
        return mean


class GradientEncoder:
    """Gradients in 16 bits: what rounding takes from one is added to the next.

    Kept is what was lost, in two buffers by turns; 8 bytes for each number of float32.
    Decode with `average_differences`, or `Difference.widen`.

    >>> encoder = GradientEncoder("bfloat16")
    >>> gradient = np.float32([1.001])  # 1 in bfloat16
    >>> sent = [encoder.encode(gradient).widen()["vector"] for _ in range(1000)]
    >>> round(float(sum(sent)[0]), 2)
    1001.0
    """

    def __init__(self, wire_dtype: WireDType) -> None:
        """Begin with nothing lost; the first gradient sets the layout.

        Args:
            wire_dtype: ``"bfloat16"`` or ``"float16"``.

        Raises:
            ValueError: If it is another one.
        """
        self._wire_dtype = dtype_on_wire(wire_dtype)
        self._residual: _Residual | None = None

    @property
    def residual(self) -> FlatWeights:
        """What rounding has taken so far, read-only: a view, which `encode` changes.

        Raises:
            ValueError: Before the first gradient.
        """
        if self._residual is None:
            raise ValueError("expected a gradient first, got none")
        return _read_only(self._residual.now)

    def encode(self, gradient: FlatWeights | NDArray[Any]) -> Difference:
        """Return ``gradient``, and what was lost before, in 16 bits.

        Args:
            gradient: `FlatWeights`, or a vector without strides, which becomes one part called
                ``"vector"``: Ray pickles bare arrays of bfloat16 number by number.

        Raises:
            ValueError: If it has another layout than the first one, holds NaN or infinity,
                or is too large for the dtype. All is then as it was.
            TypeError: If it is neither.
        """
        model: Any
        if isinstance(gradient, FlatWeights):
            model, memory, layout = gradient, gradient.buffer, gradient.layout
        elif isinstance(gradient, np.ndarray) and gradient.ndim == 1:
            if not gradient.flags.c_contiguous:
                raise ValueError("gradient: expected a vector without strides")
            layout = _vector_layout(gradient.size, gradient.dtype)
            model, memory = {_VECTOR: gradient}, gradient.view(np.uint8)
        else:
            raise TypeError(
                f"gradient: expected FlatWeights or a vector, got {type(gradient).__name__}"
            )
        residual = self._residual
        if residual is None:
            residual = _Residual(_plan(layout, self._wire_dtype.name))
        _check_layout(residual.plan.layout, layout, "gradient")
        values = residual.encode(model, memory, None, "gradient")
        self._residual = residual
        return Difference(values, residual.plan.layout)


@dataclass(frozen=True)
class _Block:
    """Numbers of one dtype that lie within reach of one another in a packed model.

    Attributes:
        dtype: Their dtype.
        begin: First byte in the model.
        end: Byte after the last number.
        ranges: Slot, and first and last number in it, for each slot that has some of them.
        starts: Where these begin, counted in numbers from `begin`.
    """

    dtype: np.dtype[Any]
    begin: int
    end: int
    ranges: tuple[tuple[int, int, int], ...]
    starts: tuple[int, ...]

    @property
    def is_padded(self) -> bool:
        return len(self.ranges) > 1

    @property
    def size(self) -> int:
        """How many numbers, padding included."""
        return (self.end - self.begin) // self.dtype.itemsize

    def read(self, memory: NDArray[np.uint8]) -> NDArray[Any]:
        """Return the numbers in a model's memory, padding included."""
        return memory[self.begin : self.end].view(self.dtype)

    def pieces(self, slots: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Return the numbers of each slot, of flat views of all slots of some model."""
        return [slots[i][first:last] for i, first, last in self.ranges]

    def cut(self, numbers: NDArray[Any]) -> list[NDArray[Any]]:
        """Return the numbers of each slot, of what `read` returns."""
        pairs = zip(self.starts, self.ranges, strict=True)
        return [numbers[start : start + last - first] for start, (_, first, last) in pairs]


@dataclass(frozen=True)
class _Plan:
    """How models of one layout become 16-bit ones.

    Attributes:
        layout: Of the models.
        wire: Of what travels.
        blocks: All numbers that are rounded.
        kept: The slots that travel as they are.
    """

    layout: Layout
    wire: Layout
    blocks: tuple[_Block, ...]
    kept: tuple[int, ...]


@functools.lru_cache(maxsize=64)
def _plan(layout: Layout, wire_dtype: str) -> _Plan:
    slots = layout.slots
    rounded = [_is_rounded(slot) for slot in slots]
    dtype = _WIRE_DTYPES[wire_dtype]
    dtypes = [
        dtype if is_rounded else slot.dtype for slot, is_rounded in zip(slots, rounded, strict=True)
    ]
    return _Plan(
        layout,
        Layout(layout.names, [slot.shape for slot in slots], dtypes, named=layout.named),
        tuple(_blocks(slots, rounded)),
        tuple(i for i, is_rounded in enumerate(rounded) if not is_rounded),
    )


def _plan_of(difference: Difference) -> _Plan:
    """Return the plan that ``difference`` was made by."""
    for name in _WIRE_DTYPES:
        plan = _plan(difference.layout, name)
        if plan.wire == difference.values.layout:
            return plan
    raise ValueError("source 0: expected values of 16 bits in the layout that was encoded")


def _is_rounded(slot: Slot) -> bool:
    return slot.dtype.isnative and slot.dtype.char in "fd"


def _blocks(slots: Sequence[Slot], rounded: Sequence[bool]) -> list[_Block]:
    """Cut large slots into pieces, and join small ones that follow one another."""
    found: list[_Block] = []
    group: list[tuple[int, int, int]] = []

    def place(at: tuple[int, int, int], number: int) -> int:
        return slots[at[0]].offset + number * slots[at[0]].dtype.itemsize

    def close() -> None:
        if group:
            dtype = slots[group[0][0]].dtype
            begin, end = place(group[0], group[0][1]), place(group[-1], group[-1][2])
            starts = [(place(at, at[1]) - begin) // dtype.itemsize for at in group]
            found.append(_Block(dtype, begin, end, tuple(group), tuple(starts)))
            group.clear()

    for i, slot in enumerate(slots):
        if not rounded[i]:
            close()
            continue
        for first in range(0, slot.size, BLOCK):
            piece = (i, first, min(first + BLOCK, slot.size))
            most = BLOCK * slot.dtype.itemsize
            if group and (
                slots[group[0][0]].dtype != slot.dtype
                or place(piece, piece[2]) - place(group[0], group[0][1]) > most
            ):
                close()
            group.append(piece)
    close()
    return found


class _Scratch:
    """Room for one block, used by one after the other."""

    def __init__(self, plan: _Plan) -> None:
        most = max((block.end - block.begin for block in plan.blocks), default=0)
        self._memory = _core.empty(most)

    def of(self, block: _Block, *, zero: bool = False) -> NDArray[Any]:
        """Return room for ``block``; zeroed where it has padding, if so asked."""
        numbers: NDArray[Any] = self._memory[: block.end - block.begin].view(block.dtype)
        if zero and block.is_padded:
            numbers[...] = 0
        return numbers


class _Residual:
    """What rounding has taken, and is added to what is sent next.

    Attributes:
        plan: For the models that are sent.
        now: What was lost.
    """

    def __init__(self, plan: _Plan) -> None:
        self.plan = plan
        self.now = _zeros(plan.layout)
        self._next = _zeros(plan.layout)
        self._scratch = _Scratch(plan)

    def encode(
        self,
        model: Any,
        memory: NDArray[np.uint8],
        reference: NDArray[np.uint8] | None,
        where: str = "weights",
    ) -> FlatWeights:
        """Return ``model``, less the ``reference``, plus `now`, rounded; only then set `now`."""
        values = FlatWeights.empty(self.plan.wire)
        wire, lost = _flat_views(values), _flat_views(self._next)
        with np.errstate(all="ignore"):
            for block in self.plan.blocks:
                wanted, numbers = self._scratch.of(block), block.read(memory)
                before, after = block.read(self.now.buffer), block.read(self._next.buffer)
                if reference is None:
                    np.add(numbers, before, out=wanted)
                else:
                    # In this order: the sum of weight and residual would lose the latter.
                    np.subtract(numbers, block.read(reference), out=wanted)
                    np.add(wanted, before, out=wanted)
                sent = block.pieces(wire)
                move_parts(sent, block.cut(wanted))
                move_parts(block.pieces(lost), sent)
                np.subtract(wanted, after, out=after)
        _keep(self.plan, values, model)
        _check_finite(values, model, where)
        self.now, self._next = self._next, self.now
        return values


def _average_blocks(
    plan: _Plan,
    out: FlatWeights,
    sources: Sequence[Sequence[NDArray[Any]]],
    weights: Sequence[float],
) -> None:
    scratches = [_Scratch(plan) for _ in sources]
    for block in plan.blocks:
        wide = [scratch.of(block, zero=True) for scratch in scratches]
        targets = [piece for numbers in wide for piece in block.cut(numbers)]
        move_parts(targets, [piece for source in sources for piece in block.pieces(source)])
        average_into(block.read(out.buffer), wide, weights)


def _add(plan: _Plan, reference: FlatWeights, values: FlatWeights) -> None:
    """Add a difference to ``reference``: the one way, by which all come to have the same."""
    wire, scratch = _flat_views(values), _Scratch(plan)
    with np.errstate(all="ignore"):
        for block in plan.blocks:
            delta, numbers = scratch.of(block, zero=True), block.read(reference.buffer)
            move_parts(block.cut(delta), block.pieces(wire))
            np.add(numbers, delta, out=numbers)
    _keep(plan, reference, values)


def _keep(plan: _Plan, target: FlatWeights, source: Any) -> None:
    """Copy what travels as it is."""
    names = [plan.layout.names[i] for i in plan.kept]
    move_parts([target[name] for name in names], [source[name] for name in names])


def _check_finite(values: FlatWeights, model: Any, where: str) -> None:
    """Raise if ``values`` hold NaN or infinity; say whether ``model`` does, or it is too large."""
    layout = values.layout
    i = _core.first_nonfinite(layout.code, True, [values.buffer], 0)
    if i == len(layout):
        return
    slot = layout.slots[i]
    place = f"{where}, {place_of(i, slot)}"
    if values is not model and isfinite(np.ascontiguousarray(model[slot.name])):
        raise ValueError(f"{place}: expected a difference that fits {slot.dtype}, got a larger one")
    raise ValueError(f"{place}: holds NaN or infinity")


def _check_difference(message: Any, layout: Layout, wire: Layout, where: str) -> None:
    if not isinstance(message, Difference):
        raise TypeError(f"{where}: expected a Difference, got {type(message).__name__}")
    _check_layout(layout, message.layout, where)
    _check_layout(wire, message.values.layout, where)


def _check_base(message: Difference, version: int | None, where: str) -> None:
    if message.base != version:
        raise MissedUpdateError(
            f"{where}: expected a difference from weights of version {version}, "
            f"got one from version {message.base}; a snapshot is needed"
        )


def _check_layout(expected: Layout, got: Layout, where: str) -> None:
    Template(Kind.FLAT_WEIGHTS, expected).check_layout(got, where)


def dtype_on_wire(name: str) -> np.dtype[Any]:
    """Return the dtype of this name.

    Raises:
        ValueError: If it is none that differences are rounded to.
    """
    for known, dtype in _WIRE_DTYPES.items():
        if isinstance(name, str) and name == known:
            return dtype
    raise ValueError(f"wire_dtype: expected 'bfloat16' or 'float16', got {name!r}")


@functools.lru_cache(maxsize=64)
def _vector_layout(size: int, dtype: np.dtype[Any]) -> Layout:
    return Layout([_VECTOR], [(size,)], [dtype])


def _flat_views(weights: FlatWeights) -> list[NDArray[Any]]:
    return [part.reshape(-1) for part in weights.values()]


def _zeros(layout: Layout) -> FlatWeights:
    weights = FlatWeights.empty(layout)
    weights.buffer[...] = 0
    return weights


def _read_only(weights: FlatWeights) -> FlatWeights:
    buffer = weights.buffer.view()
    buffer.flags.writeable = False
    return FlatWeights.wrap(buffer, weights.layout)
