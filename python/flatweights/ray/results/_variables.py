"""`Variables` and `Saved`: the protocols of objects that hold weights, or parts of a state."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flatweights import _core
from flatweights._core import move_parts
from flatweights._flatten import flatten
from flatweights._layout import ALIGNMENT, Layout, cast_for_slot
from flatweights._match import match_slots
from flatweights._trees import as_vector
from flatweights._weights import FlatWeights

Memory: TypeAlias = NDArray[np.uint8] | _core.DeviceSegment | _core.PeerDeviceSegment
"""Packed weights, in memory of the host or in a segment of a GPU."""


@runtime_checkable
class Variables(Protocol):
    """An object that holds the weights of a model, of any framework.

    `FlatWorker.build` may return one, and `Member.average_variables` averages one in place.
    `flatweights.tensorflow.TensorFlowVariables` is one. Your own class needs these three members
    and no base class:

    >>> import flatweights
    >>> class Holder:
    ...     def __init__(self, arrays):
    ...         self.arrays = arrays
    ...         self.layout = flatweights.Layout.of(arrays)
    ...     def gather_into(self, buffer):
    ...         for name, view in zip(self.arrays, self.layout.packed_views(buffer)):
    ...             view[...] = self.arrays[name]
    ...     def scatter(self, buffer):
    ...         for name, view in zip(self.arrays, self.layout.packed_views(buffer)):
    ...             self.arrays[name][...] = view
    >>> isinstance(Holder({"w": np.zeros(3)}), Variables)
    True

    A `FlatWorker` gets and sets weights by these three. If the object has its own
    ``get_weights()``, ``set_weights(weights, share=)``, ``get_flat()`` or
    ``set_flat(vector, share=)``, as `flatweights.tensorflow.TensorFlowVariables` has, the worker
    calls that method instead.

    If the object has an attribute ``seed_names`` that is not empty, as that class has for models
    with Dropout, averages and published weights are set with ``seeds=False``: by
    ``scatter(buffer, seeds=False)``, and in a `FlatWorker` also by ``set_weights`` and
    ``set_flat``. The states of random numbers then stay each process's own. The ``state`` that
    heals a `Member` is set by ``scatter(buffer)``.
    """

    @property
    def layout(self) -> Layout:
        """The layout of the variables: the same in every process that builds the same model."""

    def gather_into(self, buffer: NDArray[np.uint8]) -> None:
        """Read all variables into a packed ``buffer``, whose padding is zero."""

    def scatter(self, buffer: NDArray[np.uint8]) -> None:
        """Set all variables from a packed ``buffer``, which may be read-only.

        The buffer is valid only during the call: copy its values.
        """


@runtime_checkable
class Saved(Protocol):
    """A part of a training's state that is saved as bytes: a place in the data, for example.

    The ``state`` of a `Member`'s calls may contain such objects. Bytes may be of any length, and of
    another one each time. Your own class needs these two methods and no base class:

    >>> class Place:
    ...     batch = 0
    ...     def save(self):
    ...         return b"%d" % self.batch
    ...     def restore(self, saved):
    ...         self.batch = int(saved)
    >>> isinstance(Place(), Saved)
    True
    """

    def save(self) -> bytes:
        """Return what `restore` needs, and change nothing."""

    def restore(self, saved: bytes) -> None:
        """Go on from where the object was whose `save`, in another process, returned ``saved``."""


State: TypeAlias = Variables | Saved | Sequence[Variables | Saved]
"""The state of a training, which heals members."""


class WholeState:
    """A state of several parts, or with parts that are saved as bytes, as one `Variables`.

    The packed form is: the lengths of the saved parts, if there are any, and then all parts in
    their order, each from a multiple of 64 bytes on.

    Attributes:
        parts: The parts.
        layout: The layout of the state. Saved parts are empty in it, so it is the same in all
            members; only in a `copy` they have their length.
    """

    def __init__(self, parts: Sequence[Any], saved: Sequence[bytes] | None = None) -> None:
        """Take the parts.

        Args:
            parts: The parts.
            saved: The bytes of the saved parts; None, if they are still to be saved.
        """
        self.parts = tuple(parts)
        self._layouts = [one.layout if _moves(one) else None for one in self.parts]
        count = self._layouts.count(None)
        self._saved = saved
        lengths = [0] * count if saved is None else map(len, saved)
        self._header = struct.Struct(f"<{count}q")
        slots: list[tuple[str, tuple[int, ...], Any]] = []
        if count:
            slots.append(("lengths of saved parts", (self._header.size,), np.uint8))
        rest = iter(lengths)
        for i, (part, layout) in enumerate(zip(self.parts, self._layouts, strict=True)):
            if layout is None:
                slots.append((f"{i}/{type(part).__name__}", (next(rest),), np.uint8))
            else:
                slots += [(f"{i}/{slot.name}", slot.shape, slot.dtype) for slot in layout.slots]
        names, shapes, dtypes = zip(*slots, strict=True) if slots else ((), (), ())
        self.layout = Layout(names, shapes, dtypes)

    def is_of(self, parts: Sequence[Any]) -> bool:
        """Whether it has these ``parts``, with the layouts that they have now."""
        return len(parts) == len(self.parts) and all(
            one is own and (layout is None or one.layout is layout or one.layout == layout)
            for one, own, layout in zip(parts, self.parts, self._layouts, strict=True)
        )

    def copy(self) -> WholeState:
        """Save the parts that are saved as bytes; return the state with these bytes.

        Raises:
            TypeError: If one returns something else.
        """
        saved: list[bytes] = []
        for i, (part, layout) in enumerate(zip(self.parts, self._layouts, strict=True)):
            if layout is None:
                one = part.save()
                if not isinstance(one, (bytes, bytearray, memoryview)):
                    raise TypeError(
                        f"state, part {i}: expected bytes of {type(part).__name__}.save(), got "
                        f"{type(one).__name__}"
                    )
                saved.append(bytes(one))
        return WholeState(self.parts, saved)

    def gather_into(self, buffer: NDArray[np.uint8]) -> None:
        """Copy all parts into ``buffer``."""
        saved = [] if self._saved is None else [*self._saved]
        if saved:
            buffer[: self._header.size] = _bytes_of(self._header.pack(*map(len, saved)))
        begin, rest = _aligned(self._header.size), iter(saved)
        for part, layout in zip(self.parts, self._layouts, strict=True):
            if layout is None:
                one = next(rest)
                buffer[begin : begin + len(one)] = _bytes_of(one)
                begin += _aligned(len(one))
            else:
                part.gather_into(buffer[begin : begin + layout.nbytes])
                begin += layout.nbytes

    def scatter(self, buffer: NDArray[np.uint8]) -> None:
        """Set all parts from ``buffer``, in which saved parts have any length."""
        rest = iter(self._header.unpack(buffer[: self._header.size].tobytes()))
        begin = _aligned(self._header.size)
        for part, layout in zip(self.parts, self._layouts, strict=True):
            if layout is None:
                length = next(rest)
                part.restore(buffer[begin : begin + length].tobytes())
                begin += _aligned(length)
            else:
                part.scatter(buffer[begin : begin + layout.nbytes])
                begin += layout.nbytes


def whole_state(state: Any, known: Sequence[WholeState]) -> WholeState:
    """Return a ``state`` that is no `Variables` as one; that of ``known`` with the same parts.

    Raises:
        TypeError: If it, or a part of it, is none of the kinds of `State`.
    """
    is_list = isinstance(state, (list, tuple))
    parts = [*state] if is_list else [state]
    for one in known:
        if one.is_of(parts):
            return one
    for i, part in enumerate(parts):
        is_saved = isinstance(part, Saved) and not isinstance(part, type)
        if not (_moves(part) and isinstance(part.layout, Layout)) and not is_saved:
            where = f"state, part {i}" if is_list else "state"
            raise TypeError(
                f"{where}: expected an object with layout, gather_into and scatter, such as "
                "TensorFlowVariables(model), or one with save and restore of bytes, got "
                f"{text_of(part)}"
            )
    if not parts:
        raise TypeError("state: expected one or several objects, got none")
    whole = WholeState(parts)
    whole.copy()  # an error here is better than one when a member is to be healed
    return whole


def _moves(part: Any) -> bool:
    return all(hasattr(part, name) for name in ("layout", "gather_into", "scatter"))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _bytes_of(saved: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(saved, np.uint8)


def text_of(value: Any) -> str:
    """Return how errors name ``value``, which is no `Variables`: its type, and members it lacks."""
    name = type(value).__name__
    arrays = list(value.values()) if isinstance(value, Mapping) else value
    if isinstance(arrays, (list, tuple)):
        is_of_arrays = bool(arrays) and all(isinstance(array, np.ndarray) for array in arrays)
        return f"a {name} of NumPy arrays" if is_of_arrays else f"a {name}"
    members = ("layout", "gather_into", "scatter")
    lacking = [member for member in members if not hasattr(value, member)]
    return name if len(lacking) == len(members) else f"{name}, which lacks {', '.join(lacking)}"


def get_weights(variables: Variables) -> FlatWeights:
    """Return the weights of ``variables`` by name."""
    own = getattr(variables, "get_weights", None)
    if own is not None:
        weights: FlatWeights = own()
        return weights
    return _gathered(variables)


def get_flat(variables: Variables) -> NDArray[Any]:
    """Return the weights of ``variables`` as one vector."""
    own = getattr(variables, "get_flat", None)
    vector: NDArray[Any] = flatten(_gathered(variables)) if own is None else own()
    return vector


def set_weights(
    variables: Variables, new_weights: Mapping[str, ArrayLike], *, share: bool = False
) -> None:
    """Set ``variables`` by name, as `flatweights.tensorflow.TensorFlowVariables.set_weights`."""
    own = getattr(variables, "set_weights", None)
    if own is not None:
        own(new_weights, share=share, **without_seeds(variables))
        return
    _refuse_sharing(variables, share)
    layout = variables.layout
    if isinstance(new_weights, FlatWeights) and new_weights.layout == layout:
        scatter(variables, new_weights.buffer)
        return
    keys = match_slots(new_weights, layout)
    _scatter(variables, {i: cast_for_slot(layout, i, new_weights[key]) for i, key in keys.items()})


def set_flat(variables: Variables, new_weights: ArrayLike, *, share: bool = False) -> None:
    """Set all ``variables`` from one vector."""
    own = getattr(variables, "set_flat", None)
    if own is not None:
        own(new_weights, share=share, **without_seeds(variables))
        return
    _refuse_sharing(variables, share)
    layout = variables.layout
    flat = as_vector(new_weights, layout.size, "new_weights")
    views = layout.vector_views(np.ascontiguousarray(flat))
    _scatter(variables, {i: cast_for_slot(layout, i, view) for i, view in enumerate(views)})


def scatter(variables: Any, memory: Memory) -> None:
    """Set ``variables`` from packed weights, except states of seed generators."""
    move = variables.scatter if isinstance(memory, np.ndarray) else variables.scatter_segment
    move(memory, **without_seeds(variables))


def without_seeds(variables: Variables) -> dict[str, bool]:
    """Return the options of ``scatter`` that leave states of seed generators as they are."""
    return {"seeds": False} if getattr(variables, "seed_names", ()) else {}


def _gathered(variables: Variables) -> FlatWeights:
    weights = FlatWeights.empty(variables.layout)
    variables.gather_into(weights.buffer)
    return weights


def _scatter(variables: Variables, values: Mapping[int, NDArray[Any]]) -> None:
    """Set the variables at some positions of the layout; the others keep their values."""
    layout = variables.layout
    buffer = layout.new_buffer()
    if len(values) < len(layout):
        variables.gather_into(buffer)
    views = layout.packed_views(buffer)
    move_parts([views[i] for i in values], list(values.values()))
    scatter(variables, buffer)


def _refuse_sharing(variables: Variables, share: bool) -> None:
    if share:
        raise TypeError(
            f"share: expected False, got {share!r}: {type(variables).__name__} copies the weights "
            "that it is set to"
        )
