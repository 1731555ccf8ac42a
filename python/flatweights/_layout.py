"""The position of each part of a model, in the vector and in the packed form."""

from __future__ import annotations

import hashlib
import json
import math
import operator
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from flatweights import _core
from flatweights._dtypes import decode_dtype, encode_dtype, is_floating, promote, read_dtype
from flatweights._trees import Tree, as_array, is_tree, listed

Parts = Mapping[str, Any] | Sequence[Any]
"""Arrays by name or by position; or, where a function says so, nested containers of arrays."""

ALIGNMENT = 64
_FORMAT = "flatweights.layout/1"
_MOST_PICKLED_BYTES = 1 << 28
_MOST_RECENT = 64


class Slot(NamedTuple):
    """The position of one part.

    Attributes:
        name: Name of the part.
        shape: Its shape.
        dtype: Its dtype in the packed form.
        start: First element in the vector.
        offset: First byte in the packed form.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    start: int
    offset: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes, without padding."""
        return self.size * self.dtype.itemsize

    def __str__(self) -> str:
        """Name, dtype and shape, as error messages show them."""
        return f"{self.name!r} {self.dtype} {self.shape}"


def place_of(i: int, slot: Slot) -> str:
    """Return how errors name slot ``i`` of a layout."""
    return f"slot {i} {slot.name!r}"


class Layout:
    """The ordered slots of one model: immutable, hashable, the same in every process.

    In the **vector** the parts lie back to back, all in one dtype; slot ``s`` begins at
    element ``s.start``. In the **packed** form each part keeps its own dtype and begins
    at byte ``s.offset``, a multiple of 64, with zeros between.

    Build one with `Layout.of`. Two layouts are equal if they have the same names,
    order, shapes and dtypes and were both named by a mapping or both by position.

    >>> layout = Layout.of({"kernel": np.zeros((2, 3), np.float32), "step": np.int64(0)})
    >>> layout.names, layout.size, layout.nbytes, str(layout.dtype)
    (('kernel', 'step'), 7, 128, 'float64')
    >>> layout["step"].start, layout["step"].offset
    (6, 64)
    """

    def __init__(
        self,
        names: Sequence[str],
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[DTypeLike],
        *,
        named: bool = True,
    ) -> None:
        """Place parts of the given names, shapes and dtypes one after the other.

        Args:
            names: One unique name per part.
            shapes: One shape per part.
            dtypes: One dtype of fixed size per part.
            named: Whether a mapping gave the names; else they are positions and
                `flatweights.unflatten` returns a list.

        Raises:
            TypeError: If a name is not a string, a shape not a sequence of integers, or a dtype
                none or one with Python objects.
            ValueError: If a name occurs twice or is not Unicode, a dimension is negative,
                or the arguments differ in length.
            OverflowError: If the parts need more bytes than can be addressed.
        """
        each = "expected a sequence, one for each part"
        self._names = tuple(listed(names, f"names: {each}"))
        kinds = listed(dtypes, f"dtypes: {each}")
        self._dtypes = tuple(read_dtype(dtype, f"dtype {i}") for i, dtype in enumerate(kinds))
        sizes = listed(shapes, f"shapes: {each}")
        self._shapes = tuple(_shape(shape, f"shape {i}") for i, shape in enumerate(sizes))
        named = bool(named)
        self._compared = (named, self._names, self._shapes, self._dtypes)
        self._core = _core.Layout(self._names, self._shapes, self._dtypes)
        self._by_name = {name: i for i, name in enumerate(self._names)}
        if len(self._by_name) != len(self._names):
            twice = next(n for i, n in enumerate(self._names) if self._by_name[n] != i)
            raise ValueError(f"expected unique names, got {twice!r} twice")
        self._named = named
        self._dtype = promote(self._dtypes)
        self._slots: tuple[Slot, ...] | None = None
        self._digest: str | None = None
        self._signature: str | None = None
        self._hash: int | None = None
        self._pickled: bytes | None = None

    @classmethod
    def of(cls, parts: Parts) -> Layout:
        """Return the layout of ``parts``.

        Args:
            parts: A mapping from name to array, or a sequence of arrays, whose
                names become ``"0"``, ``"1"``, and so on. Arrays in nested dicts, lists and
                tuples are named by their paths: ``"encoder/layers/0/kernel"``. If two paths
                would be the same, all keys are quoted.

        Raises:
            TypeError: If a name is not a string, or an array holds Python objects.
        """
        names, arrays = named_arrays(parts)
        by_position = not isinstance(parts, Mapping) and names == list(map(str, range(len(parts))))
        return cls.of_arrays(names, arrays, named=not by_position)

    @classmethod
    def of_arrays(
        cls, names: Sequence[str], arrays: Sequence[NDArray[Any]], *, named: bool = True
    ) -> Layout:
        """Return the layout of ``arrays`` under ``names``."""
        return cls(names, [a.shape for a in arrays], [a.dtype for a in arrays], named=named)

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The slots in order."""
        if self._slots is None:
            starts, offsets = self._core.starts, self._core.offsets
            rows = zip(self._names, self._shapes, self._dtypes, starts, offsets, strict=True)
            self._slots = tuple(Slot(*row) for row in rows)
        return self._slots

    @property
    def names(self) -> tuple[str, ...]:
        """The names in order."""
        return self._names

    @property
    def named(self) -> bool:
        """Whether a mapping gave the names; else they are positions."""
        return self._named

    @property
    def size(self) -> int:
        """Elements of the vector."""
        return self._core.size

    @property
    def nbytes(self) -> int:
        """Bytes of the packed form, a multiple of 64."""
        return self._core.nbytes

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the vector, promoted as by `numpy.concatenate`.

        Raises:
            TypeError: If the parts have no common dtype.
        """
        if self._dtype is None:
            kinds = ", ".join(sorted({str(d) for d in self._dtypes}))
            raise TypeError(f"no vector holds these dtypes: {kinds}; use the packed form")
        return self._dtype

    @property
    def digest(self) -> str:
        """SHA-256, in hexadecimal, of names, order, shapes and dtypes."""
        if self._digest is None:
            self._digest = self._sha256(self._names)
        return self._digest

    @property
    def signature(self) -> str:
        """SHA-256, in hexadecimal, of order, shapes and dtypes, without names."""
        if self._signature is None:
            self._signature = self._sha256()
        return self._signature

    def _sha256(self, *columns: Sequence[str]) -> str:
        codes = map(encode_dtype, self._dtypes)
        rows = list(zip(*columns, self._shapes, codes, strict=True))
        return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()

    def astype(self, dtype: DTypeLike) -> Layout:
        """Return this layout with its real floating slots changed to ``dtype``.

        >>> Layout.of({"w": np.zeros(3), "step": np.int64(0)}).astype("float16").nbytes
        128

        Args:
            dtype: A real floating dtype.

        Raises:
            TypeError: If it is not.
        """
        target = read_dtype(dtype, "dtype")
        if not is_floating(target):
            raise TypeError(f"dtype: expected one of real floating-point numbers, got {target}")
        dtypes = [target if is_floating(d) else d for d in self._dtypes]
        return Layout(self._names, self._shapes, dtypes, named=self._named)

    def index(self, name: str) -> int:
        """Return the position of the slot called ``name``.

        Raises:
            KeyError: If there is none.
        """
        return self._by_name[name]

    def __getitem__(self, key: str | int) -> Slot:
        """Return the slot of this name or position.

        Raises:
            KeyError: If no slot has this name.
            IndexError: If no slot is at this position.
        """
        if isinstance(key, str):
            return self.slots[self._by_name[key]]
        try:
            return self.slots[key]
        except IndexError:
            raise IndexError(f"expected a position below {len(self)}, got {key}") from None
        except TypeError:
            raise TypeError(f"expected a name or a position, got {type(key).__name__}") from None

    def __contains__(self, name: object) -> bool:
        """Whether there is a slot called ``name``."""
        return name in self._by_name

    def __len__(self) -> int:
        """Return the number of slots."""
        return len(self._names)

    def __eq__(self, other: object) -> bool:
        """Whether both have equal slots, named in the same way."""
        if self is other:
            return True
        if not isinstance(other, Layout):
            return NotImplemented
        return self._compared == other._compared

    def __hash__(self) -> int:
        """Hash of what `__eq__` compares."""
        if self._hash is None:
            self._hash = hash(self._compared)
        return self._hash

    def __repr__(self) -> str:
        """Sizes and the beginning of the digest."""
        return (
            f"<Layout of {len(self)} slots, {self.size} elements, {self.nbytes} bytes packed, "
            f"digest {self.digest[:12]}>"
        )

    def to_json(self) -> str:
        """Return a JSON text that `from_json` reads back, here or on another machine."""
        record = {
            "format": _FORMAT,
            "named": self._named,
            "size": self.size,
            "nbytes": self.nbytes,
            "digest": self.digest,
            "slots": [s._asdict() | {"dtype": encode_dtype(s.dtype)} for s in self.slots],
        }
        return json.dumps(record, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Layout:
        """Return the layout that `to_json` wrote.

        Raises:
            ValueError: If ``text`` is anything else: truncated, altered, or with slots
                that overlap, overflow, are negative or unaligned.
        """
        try:
            record = json.loads(text)
            if record["format"] != _FORMAT:
                raise ValueError(f"expected format {_FORMAT!r}, got {record['format']!r}")
            slots = record["slots"]
            layout = cls(
                [_typed(slot["name"], str) for slot in slots],
                [[_typed(n, int) for n in _typed(slot["shape"], list)] for slot in slots],
                [decode_dtype(_typed(slot["dtype"], str)) for slot in slots],
                named=_typed(record["named"], bool),
            )
            _check_places(layout, slots)
            for key in ("size", "nbytes", "digest"):
                if record[key] != getattr(layout, key):
                    raise ValueError(f"{key}: expected {getattr(layout, key)}, got {record[key]}")
        except ValueError as error:
            raise ValueError(f"not a layout: {error}") from error
        except (KeyError, TypeError, OverflowError, RecursionError) as error:
            raise ValueError(f"not a layout: {type(error).__name__}: {error}") from error
        return layout

    def new_buffer(self) -> NDArray[np.uint8]:
        """Return a packed buffer, 64-byte aligned: padding zero, parts undefined."""
        return self._core.new_buffer()

    def packed_views(self, buffer: NDArray[np.uint8]) -> list[NDArray[Any]]:
        """Return one view of the packed ``buffer`` per slot. No bytes move.

        Raises:
            ValueError: If ``buffer`` is not a contiguous uint8 vector of `nbytes`.
        """
        return self._core.packed_views(buffer)

    def vector_views(self, flat: NDArray[Any]) -> list[NDArray[Any]]:
        """Return one view of the vector ``flat`` per slot, in its dtype. No bytes move.

        Raises:
            ValueError: If ``flat`` is not a contiguous vector of `size` elements.
        """
        return self._core.vector_views(flat)

    @property
    def core(self) -> _core.Layout:
        """This layout in the form that functions of the core take; private to the package."""
        return self._core

    @property
    def pickled(self) -> bytes:
        """This layout as compressed JSON; see `unpickle_layout`. Private to the package."""
        if self._pickled is None:
            pickled = self._pickled = zlib.compress(self.to_json().encode())
            if all(layout._pickled != pickled for layout in _recent):
                _remember(self)
        return self._pickled

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as compressed JSON; unpickling reuses a layout that the process has seen."""
        return unpickle_layout, (self.pickled,)


# Data-parallel training sends one layout with every message; a process builds it once.
_recent: tuple[Layout, ...] = ()  # the layouts that were pickled or unpickled last; newest first


def _remember(layout: Layout) -> None:
    global _recent
    _recent = (layout, *_recent[: _MOST_RECENT - 1])  # replaced, since any thread may read it


def unpickle_layout(pickled: bytes) -> Layout:
    """Return the layout of `Layout.pickled`: one that this process has, if it knows it."""
    if not isinstance(pickled, bytes):
        raise ValueError(f"not a layout: expected bytes, got {type(pickled).__name__}")
    for layout in _recent:  # comparing takes less than hashing
        if layout._pickled == pickled:
            return layout
    layout = Layout.from_json(_decompress(pickled))
    layout._pickled = pickled
    _remember(layout)
    return layout


def _decompress(pickled: bytes) -> bytes:
    stream = zlib.decompressobj()
    try:
        text = stream.decompress(pickled, _MOST_PICKLED_BYTES)
    except zlib.error as error:
        raise ValueError(f"not a layout: {error}") from error
    if not stream.eof or stream.unused_data:
        raise ValueError("not a layout: truncated, too large, or followed by more data")
    return text


def layout_at(layout: Layout, positions: Sequence[int]) -> Layout:
    """Return the layout of the slots at ``positions`` alone."""
    slots = [layout.slots[i] for i in positions]
    return Layout(
        [slot.name for slot in slots],
        [slot.shape for slot in slots],
        [slot.dtype for slot in slots],
    )


def check_layout_kind(layout: object) -> None:
    """Raise `TypeError` unless ``layout`` is a `Layout`: its weights are easily passed instead."""
    if not isinstance(layout, Layout):
        is_held = isinstance(getattr(layout, "layout", None), Layout)
        hint = "its .layout" if is_held else "Layout.of(parts)"
        raise TypeError(f"layout: expected a Layout, got {type(layout).__name__}; pass {hint}")


def cast_for_slot(
    layout: Layout, i: int, value: ArrayLike, dtype: np.dtype[Any] | None = None
) -> NDArray[Any]:
    """Return ``value`` as an array that `_core.move_parts` can write to slot ``i``.

    Values are cast as ``np.copyto(casting="same_kind")`` does; beyond that, any real floating type
    is cast to any other, and integer slots take rounded values. Only values for an integer slot of
    another dtype are copied.

    Args:
        layout: The layout.
        i: Position of the slot.
        value: What to write.
        dtype: Dtype to write in; that of the slot, if None.

    Raises:
        ValueError: If the shape differs, or a value does not fit an integer dtype.
        TypeError: If the dtype cannot be cast.
    """
    if type(value) is not np.ndarray:  # the place would cost more than the check
        value = as_array(value, place_of(i, layout.slots[i]))
    return layout.core.cast_for_slot(i, value, dtype)


def named_arrays(parts: Parts) -> tuple[list[str], list[NDArray[Any]]]:
    """Return the names and the arrays of ``parts``, in order.

    Arrays are returned as they are; other values go through `as_array`. Arrays in nested
    containers are named by their paths.
    """
    values = _values(parts)
    names: list[Any] = (
        list(parts) if isinstance(parts, Mapping) else list(map(str, range(len(values))))
    )
    if is_tree(values):
        tree = Tree.of(parts, "parts")
        names, values = tree.paths(), tree.leaves(parts, "parts")
    return names, [
        value if type(value) is np.ndarray else as_array(value, f"slot {i} {names[i]!r}")
        for i, value in enumerate(values)
    ]


def arrays_of(parts: Parts) -> list[NDArray[Any]]:
    """Return the arrays of ``parts``, in order."""
    values = _values(parts)
    if all(type(value) is np.ndarray for value in values):
        return values
    return named_arrays(parts)[1]


def _values(parts: Parts) -> list[Any]:
    if isinstance(parts, Mapping):
        return list(parts.values())
    if isinstance(parts, Sequence) and not isinstance(parts, (str, bytes)):
        return list(parts)
    raise TypeError(f"expected a mapping or a sequence of arrays, got {type(parts).__name__}")


def _shape(shape: Any, where: str) -> tuple[int, ...]:
    try:
        return tuple(int(operator.index(n)) for n in shape)
    except TypeError:
        raise TypeError(f"{where}: expected a sequence of integers, got {shape!r}") from None


def _typed(value: Any, expected: type) -> Any:
    # isinstance would accept JSON's true as an int.
    if type(value) is not expected:
        raise ValueError(f"expected {expected.__name__}, got {value!r}")
    return value


def _check_places(layout: Layout, records: list[dict[str, Any]]) -> None:
    """Raise unless each record puts its slot where ``layout`` does."""
    ends = {"start": 0, "offset": 0}
    for i, (slot, record) in enumerate(zip(layout.slots, records, strict=True)):
        for key, end in ends.items():
            got, expected = _typed(record[key], int), getattr(slot, key)
            if got == expected:
                continue
            if got < 0:
                why = "negative"
            elif key == "offset" and got % ALIGNMENT:
                why = f"not a multiple of {ALIGNMENT}"
            elif got < end:
                why = "overlaps the slot before it"
            else:
                why = "leaves a gap or lies beyond the end"
            raise ValueError(f"{place_of(i, slot)}: expected {key} {expected}, got {got} ({why})")
        ends = {"start": slot.start + slot.size, "offset": slot.offset + slot.nbytes}
