"""The kinds of model that can be averaged, read as arrays in one order."""

import functools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatweights import _core
from flatweights._dtypes import is_averaged, is_integer
from flatweights._flatten import new_vector
from flatweights._layout import Layout
from flatweights._trees import Tree, as_array, has_array_protocol, is_tree
from flatweights._weights import FlatWeights


class Kind(Enum):
    """The form in which a model was passed."""

    FLAT_WEIGHTS = "FlatWeights"
    ARRAY = "an array"
    MAPPING = "a mapping of arrays"
    SEQUENCE = "a sequence of arrays"
    TREE = "nested containers of arrays"


@dataclass(frozen=True)
class Template:
    """The kind and layout that the models of one average share.

    Attributes:
        kind: The form in which they were passed.
        layout: The slots; a bare array is one slot with an empty name.
        keys: The keys of a mapping, in the order of the slots; the paths of a tree.
        tree: The containers, if they are nested.
    """

    kind: Kind
    layout: Layout
    keys: tuple[Hashable, ...] = ()
    tree: Tree | None = None

    @classmethod
    def of(cls, source: Any, where: str = "source 0") -> "Template":
        """Return the template that ``source`` sets for later sources.

        Args:
            source: A model.
            where: How errors name it.

        Raises:
            TypeError: If ``source`` is of no known kind, or has a part without a mean.
        """
        kind = _kind_of(source, where)
        # Hot loops average the same layouts and shapes again and again: checks are cached.
        if kind is Kind.FLAT_WEIGHTS:
            check_flat_weights(source.layout, where)
            return cls(kind, source.layout)
        if kind is Kind.ARRAY:
            array = as_array(source, where)
            return _array_template(array.shape, array.dtype, where)
        keys = tuple(source) if kind is Kind.MAPPING else tuple(range(len(source)))
        values = [source[key] for key in keys]
        tree = None
        if is_tree(values):
            kind, tree = Kind.TREE, Tree.of(source, where)
            keys, values = tuple(tree.paths()), tree.leaves(source, where)
        arrays = _parts(keys, values, where)
        shapes, dtypes = tuple([a.shape for a in arrays]), tuple([a.dtype for a in arrays])
        names = _position_names(len(keys)) if kind is Kind.SEQUENCE else _names(keys)
        return cls(kind, _parts_layout(kind, names, shapes, dtypes, where), keys, tree)

    @property
    def packed(self) -> bool:
        """Whether models are read and written as one packed buffer."""
        return self.kind is Kind.FLAT_WEIGHTS

    def at_slot(self, i: int) -> str:
        """Return how errors name slot ``i``, to be appended to the name of the source."""
        is_array = self.kind is Kind.ARRAY or self.layout.names == ("",)  # also one that was packed
        return "" if is_array else f", slot {i} {self.layout.names[i]!r}"

    def read(
        self, source: Any, where: str, written: Sequence[NDArray[Any]] = ()
    ) -> list[NDArray[Any]]:
        """Return the parts of ``source`` in the order of the slots, or its packed buffer.

        Strided parts are copied. Except for `FlatWeights`, the kernels check shapes and
        dtypes later.

        Args:
            source: A model.
            where: How errors name it.
            written: The memory that the kernels will write to. They check that contiguous parts
                do not overlap it, but of strided parts they see only copies.

        Raises:
            TypeError: If it is of another kind.
            ValueError: If its keys, its number of parts or its digest differ, or a strided part
                overlaps ``written``.
        """
        parts = self._arrays(source, where)
        for i, part in enumerate(parts):
            if part.flags.c_contiguous:  # the usual case
                continue
            if any(np.shares_memory(part, target) for target in written):
                raise ValueError(
                    f"{where}{self.at_slot(i)}: overlaps out; only the very same array may be a "
                    "source and the result"
                )
            parts[i] = part.copy(order="C")
        return parts

    def read_all(
        self, sources: list[Any], written: Sequence[NDArray[Any]]
    ) -> list[list[NDArray[Any]]]:
        """Return the result of `read` for each of ``sources``; errors number them from 0."""
        # Fast paths for what hot loops average.
        if self.kind is Kind.ARRAY and _core.are_plain(sources):
            return [[source] for source in sources]
        if self.packed and {type(source) for source in sources} == {FlatWeights}:
            # The properties would cost a function call each.
            ours = self.layout
            buffers = [
                [source._buffer]
                for source in sources
                if source._layout is ours or source._layout.digest == ours.digest
            ]
            if len(buffers) == len(sources):
                return buffers
        return [self.read(source, f"source {k}", written) for k, source in enumerate(sources)]

    def match(self, source: Any, where: str) -> None:
        """Check that ``source`` matches this template, including shapes and dtypes.

        Args:
            source: A model.
            where: How errors name it.

        Raises:
            TypeError: If it is of another kind, or a dtype differs.
            ValueError: If its keys, its number of parts, a shape or its digest differ.
        """
        arrays = self._arrays(source, where)
        if not self.packed:
            self.match_arrays(arrays, where)

    def match_arrays(self, arrays: Sequence[NDArray[Any]], where: str) -> None:
        """Raise as `match` if a shape or dtype of ``arrays``, one for each slot, differs."""
        for i, (array, slot) in enumerate(zip(arrays, self.layout.slots, strict=True)):
            if array.dtype != slot.dtype or array.shape != slot.shape:
                kind = ValueError if array.dtype == slot.dtype else TypeError
                raise kind(
                    f"{where}{self.at_slot(i)}: expected {slot.dtype} {slot.shape}, "
                    f"got {array.dtype} {array.shape}"
                )

    def read_out(self, out: Any, where: str = "out") -> list[NDArray[Any]]:
        """Return the parts of ``out``, to be written to; raises as `read` does."""
        targets = self._values(out, where)
        for i, target in enumerate(targets):
            if not isinstance(target, np.ndarray):  # a converted copy would be written and lost
                got = type(target).__name__
                raise TypeError(f"{where}{self.at_slot(i)}: expected a NumPy array, got {got}")
        return targets

    def targets(self, out: Any, where: str = "out") -> list[NDArray[Any]]:
        """Return the parts of ``out`` after checking that bytes can be moved straight into them.

        Raises:
            TypeError: As `match`; or if one is not a NumPy array.
            ValueError: As `match`; or if one is read-only or not contiguous.
        """
        if not self.packed:
            self.match(out, where)
        targets = self.read_out(out, where)
        for i, target in enumerate(targets):
            if not (target.flags.writeable and target.flags.c_contiguous):
                lacks = "contiguous" if target.flags.writeable else "writable"
                raise ValueError(f"{where}{self.at_slot(i)}: expected an array that is {lacks}")
        return targets

    def check_apart(self, targets: Sequence[NDArray[Any]], where: str = "out") -> None:
        """Raise `ValueError` if two contiguous ``targets`` overlap: a part of one would be lost."""
        begins = {
            i: target.__array_interface__["data"][0]
            for i, target in enumerate(targets)
            if target.nbytes and target.flags.c_contiguous
        }
        for i, k in pairwise(sorted(begins, key=begins.__getitem__)):
            if begins[k] < begins[i] + targets[i].nbytes:
                raise ValueError(
                    f"{where}{self.at_slot(max(i, k))}: overlaps another part of {where}"
                )

    def parts_in(self, buffer: NDArray[np.uint8]) -> list[NDArray[Any]]:
        """Return what a packed ``buffer`` holds, as `read` returns it: views, or the buffer."""
        return [buffer] if self.packed else self.layout.packed_views(buffer)

    def first_nonfinite(self, parts: list[NDArray[Any]]) -> int | None:
        """Return the first slot of ``parts``, a result of `read`, that holds NaN or infinity."""
        i = _core.first_nonfinite(self.layout.core, self.packed, parts, 0)
        return i if i < len(self.layout) else None

    def nonfinite_error(self, i: int, where: str) -> ValueError:
        """Return the error that says that slot ``i`` of a source holds NaN or infinity."""
        return ValueError(f"{where}{self.at_slot(i)}: holds NaN or infinity")

    def find_nonfinite(self, parts: list[NDArray[Any]], where: str) -> ValueError | None:
        """Return an error that names the first slot with NaN or infinity; None without one.

        Args:
            parts: A result of `read`.
            where: How the error names the source.
        """
        i = self.first_nonfinite(parts)
        return None if i is None else self.nonfinite_error(i, where)

    def views(self, source: Any) -> list[NDArray[Any]]:
        """Return one array per slot of ``source``, even if it is packed."""
        return list(source.values()) if self.packed else self._arrays(source, "source")

    def _arrays(self, source: Any, where: str) -> list[NDArray[Any]]:
        values = self._values(source, where)
        if self.packed:
            return values
        if self.kind is Kind.ARRAY:
            return [as_array(source, where)]
        return _parts(self.keys, values, where)

    def _values(self, source: Any, where: str) -> list[Any]:
        """Return the parts of ``source`` as they are, or its packed buffer."""
        if self.tree is not None:
            return self.tree.leaves(source, where)
        kind = _kind_of(source, where)
        if kind is not self.kind:
            raise TypeError(f"{where}: expected {self.kind.value}, got {kind.value}")
        if kind is Kind.FLAT_WEIGHTS:
            self.check_layout(source.layout, where)
            return [source.buffer]
        if kind is Kind.ARRAY:
            return [source]
        if kind is Kind.SEQUENCE:
            if len(source) != len(self.keys):
                raise ValueError(f"{where}: expected {len(self.keys)} parts, got {len(source)}")
            return list(source)
        if len(source) != len(self.keys) or any(key not in source for key in self.keys):
            missing = [key for key in self.keys if key not in source]
            unknown = [key for key in source if key not in self.keys]
            raise ValueError(
                f"{where}: expected the keys of the first; missing {missing}, unknown {unknown}"
            )
        return [source[key] for key in self.keys]

    def check_layout(self, layout: Layout, where: str) -> None:
        """Raise `ValueError`, naming the first difference, unless the digests agree."""
        difference = first_difference(self.layout, layout)
        if difference is not None:
            raise ValueError(f"{where}: {difference}")

    def new(self) -> Any:
        """Return a model of this kind over new memory, with undefined values."""
        if self.kind is Kind.FLAT_WEIGHTS:
            return FlatWeights.empty(self.layout)
        if self.kind is Kind.ARRAY:
            slot = self.layout.slots[0]
            return new_vector(slot.size, slot.dtype).reshape(slot.shape)
        return self.build(self.layout.packed_views(self.layout.new_buffer()))

    def build(self, parts: Sequence[NDArray[Any]]) -> Any:
        """Return ``parts`` as a model of this kind, which is not packed."""
        if self.kind is Kind.ARRAY:
            return parts[0]
        if self.tree is not None:
            return self.tree.build(parts)
        is_list = self.kind is Kind.SEQUENCE
        return [*parts] if is_list else dict(zip(self.keys, parts, strict=True))


def first_difference(expected: Layout, layout: Layout) -> str | None:
    """Return how errors name the first difference of ``layout``; None if the digests agree."""
    if layout is expected or layout.digest == expected.digest:
        return None
    if len(layout) != len(expected):
        counts = f"expected {len(expected)} slots, got {len(layout)}"
        if not (expected.named and layout.named):
            return counts
        lacking = [f", without {name!r}" for name in expected.names if name not in layout]
        added = [f", with {name!r}" for name in layout.names if name not in expected]
        return "".join([counts, *lacking[:1], *added[:1]])
    return next(
        f"slot {i}: expected {ours}, got {theirs}"
        for i, (ours, theirs) in enumerate(zip(expected.slots, layout.slots, strict=True))
        if ours != theirs
    )


@functools.lru_cache(maxsize=256)
def check_flat_weights(layout: Layout, where: str) -> None:
    """Raise `TypeError` unless `FlatWeights` of this ``layout`` have a mean."""
    _check_dtypes(Kind.FLAT_WEIGHTS, layout, where)


@functools.lru_cache(maxsize=256)
def _array_template(shape: tuple[int, ...], dtype: np.dtype[Any], where: str) -> Template:
    _check_no_objects(dtype, where)
    layout = Layout([""], [shape], [dtype], named=False)
    _check_dtypes(Kind.ARRAY, layout, where)
    return Template(Kind.ARRAY, layout)


# By names and not by keys: keys may be equal and yet differ, as 1 and True do, and may hold memory.
@functools.lru_cache(maxsize=64)
def _parts_layout(
    kind: Kind,
    names: tuple[str, ...],
    shapes: tuple[tuple[int, ...], ...],
    dtypes: tuple[np.dtype[Any], ...],
    where: str,
) -> Layout:
    for i, (name, dtype) in enumerate(zip(names, dtypes, strict=True)):
        _check_no_objects(dtype, f"{where}, slot {i} {name!r}")
    layout = Layout(names, shapes, dtypes, named=kind is not Kind.SEQUENCE)
    _check_dtypes(kind, layout, where)
    return layout


def _check_no_objects(dtype: np.dtype[Any], where: str) -> None:
    """Raise `TypeError` if ``dtype`` has Python objects, of which there is no layout."""
    if dtype.hasobject:
        raise TypeError(f"{where}: expected an array of numbers, got one of Python objects")


def _check_dtypes(kind: Kind, layout: Layout, where: str) -> None:
    """Raise `TypeError` unless models of this ``layout`` have a mean."""
    for i, slot in enumerate(layout.slots):
        is_kept = is_integer(slot.dtype) and kind is not Kind.ARRAY
        if not is_kept and not is_averaged(slot.dtype):
            raise TypeError(
                f"{where}{Template(kind, layout).at_slot(i)}: expected float16, bfloat16, float32, "
                f"float64 or complex numbers in native byte order, got {slot.dtype}"
            )


@functools.lru_cache(maxsize=64)
def _position_names(count: int) -> tuple[str, ...]:
    return tuple(map(str, range(count)))


def _names(keys: tuple[Any, ...]) -> tuple[str, ...]:
    if set(map(type, keys)) <= {str}:  # the usual case
        return keys
    # repr tells 1 from "1"; str would not.
    named = all(isinstance(key, str) for key in keys)
    return tuple([str(key) if named else repr(key) for key in keys])


def _parts(keys: Iterable[Hashable], values: list[Any], where: str) -> list[NDArray[Any]]:
    if all(type(value) is np.ndarray for value in values):  # the usual case
        return values
    named = enumerate(zip(keys, values, strict=True))
    return [as_array(value, f"{where}, slot {i} {str(key)!r}") for i, (key, value) in named]


def _kind_of(source: Any, where: str) -> Kind:
    # Exact types first: isinstance of an abstract base class takes longer than all the rest.
    if type(source) is np.ndarray:
        return Kind.ARRAY
    if isinstance(source, FlatWeights):
        return Kind.FLAT_WEIGHTS
    if isinstance(source, dict | Mapping):
        return Kind.MAPPING
    if isinstance(source, (list, tuple)):
        return Kind.SEQUENCE
    if has_array_protocol(source) or _has_buffer(source):
        return Kind.ARRAY
    if isinstance(source, Sequence) and not isinstance(source, (str, bytes, bytearray)):
        return Kind.SEQUENCE
    calls = {"get_weights": "get_weights()", "weights": "weights"}  # of a model, or of a Round
    held = [call for name, call in calls.items() if hasattr(source, name)]
    hint = f"; pass its {held[0]}" if held else ""
    raise TypeError(
        f"{where}: expected an array, FlatWeights, a mapping of arrays or a sequence of arrays, "
        f"got {type(source).__name__}{hint}"
    )


def _has_buffer(source: Any) -> bool:
    if isinstance(source, (bytes, bytearray)):
        return False
    try:
        memoryview(source)
    except TypeError:
        return False
    except Exception:  # a buffer that was released, for example: `as_array` reports it
        return True
    return True
