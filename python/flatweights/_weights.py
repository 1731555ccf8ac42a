"""A dict of arrays over one packed buffer."""

from __future__ import annotations

import html
import os
import pickle
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flatweights._cast import move_parts, settable_at
from flatweights._layout import Layout, Parts, named_arrays

_SHOWN_PARTS = 10
_SHOWN_ELEMENTS = 100


class FlatWeights(dict[str, NDArray[Any]]):
    """A ``dict`` from name to array whose arrays are views of one packed buffer.

    Code that reads a dict of arrays, adds to its items, or builds a new dict from them
    works unchanged. Pickled with protocol 5, as Ray does, the whole travels as one
    out-of-band buffer, and is unpickled as read-only views of it without a copy.

    It differs from a dict of arrays in this:

    * The keys are fixed: adding or deleting one raises `TypeError`. ``dict(w)`` is a
      plain dict over the same arrays.
    * Assigning writes through to the buffer instead of putting another array in place:
      ``w[k] = a`` casts ``a`` to the part's dtype as ``np.copyto(casting="same_kind")``
      does (integer parts take the rounded value) and wants its exact shape. `update`
      and ``|=`` check everything before they write anything.
    * Over a read-only buffer, which is what `ray.get` gives, assigning raises
      `ValueError`. ``w.copy()`` is writable. (``w[k] += 1`` is refused by NumPy itself, as
      for any read-only array.)
    * ``w.copy()``, ``copy.copy(w)`` and ``copy.deepcopy(w)`` copy the buffer, once, and give
      `FlatWeights`; ``w | other`` gives a plain dict.
    * ``repr`` and ``print`` show the arrays of a small model only.
    * Libraries that rebuild mappings by ``type(w)()`` (`tf.nest.map_structure`) raise;
      hand them ``dict(w)``.

    >>> w = FlatWeights({"kernel": np.ones((2, 2), np.float32), "bias": np.zeros(2)})
    >>> w["kernel"] += 1
    >>> w["bias"] = [3.0, 4.0]
    >>> w["kernel"].sum(), w["bias"].sum(), w.buffer.nbytes
    (np.float32(8.0), np.float64(7.0), 128)
    """

    __slots__ = ("__weakref__", "_buffer", "_layout")

    _buffer: NDArray[np.uint8]
    _layout: Layout

    def __init__(self, parts: Parts) -> None:
        """Copy ``parts`` into a new buffer; each byte moves once.

        Args:
            parts: A mapping from name to array, or a sequence of arrays, whose names
                become ``"0"``, ``"1"``, and so on. Arrays in nested dicts, lists and tuples
                are named by their paths: ``"encoder/layers/0/kernel"``.

        Raises:
            TypeError: If a name is no string, or an array holds Python objects.
        """
        super().__init__()
        names, arrays = named_arrays(parts)
        layout = Layout.of_arrays(names, arrays)
        self._view(layout.new_buffer(), layout)
        move_parts(list(self.values()), arrays)

    @classmethod
    def wrap(cls, buffer: NDArray[np.uint8], layout: Layout) -> FlatWeights:
        """Return a view of the packed ``buffer``. No bytes move.

        The views keep ``buffer`` alive and are read-only if it is.

        Args:
            buffer: Contiguous uint8 vector of ``layout.nbytes`` bytes.
            layout: What lies where in it.

        Raises:
            ValueError: If ``buffer`` is not such a vector.
        """
        self = cls.__new__(cls)
        self._view(buffer, layout)
        return self

    @classmethod
    def empty(cls, layout: Layout) -> FlatWeights:
        """Return weights of ``layout`` over a new buffer, values undefined, padding zero."""
        return cls.wrap(layout.new_buffer(), layout)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the weights to a safetensors file, in place of what was there.

        The layout and a checksum are in the file's metadata. Any program that knows the format
        reads the file, as a dict of arrays in an order of its own. What the format has no dtype
        for is stored otherwise, with one more axis at the end: complex128 as pairs of
        float64, the rest as bytes.

        The file is there at once and whole, or not at all: it is written under another name
        beside the old one (``.flatweights-*.tmp``, which a process that is killed leaves
        behind), brought to the disk, and renamed. Where the disk is full, or the process
        dies, the old file stays. Each byte is read twice and written once.

        >>> import tempfile
        >>> w = FlatWeights({"kernel": np.ones((2, 2), np.float32), "step": np.int64(7)})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     w.save(f"{folder}/weights.safetensors")
        ...     FlatWeights.load(f"{folder}/weights.safetensors")["step"]
        array(7)

        Args:
            path: Where. What a symbolic link points to is replaced, not the link.

        Raises:
            OSError: If it cannot be written, or is there and no file.
        """
        from flatweights import _safetensors  # it imports a library that few uses need

        _safetensors.write(path, self._layout, self._buffer)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> FlatWeights:
        """Return the weights in a safetensors file, over a new buffer.

        The file is read and checked; each byte is copied once. It may be replaced, changed or
        deleted afterwards. One that is changed meanwhile is refused.

        What `save` wrote comes back in its order and dtypes, and only as it was written. The
        checksum, a CRC-32, finds accidents: it is no signature. The files of other
        programs have no checksum, and their tensors come in the order of their names.

        Args:
            path: A file that `save` or any other program wrote.

        Raises:
            OSError: If it cannot be opened, or is no file.
            ValueError: If it is not a whole safetensors file, has dtypes that NumPy has not,
                is not as `save` wrote it, or changes while it is read.
        """
        from flatweights import _safetensors

        parts = _safetensors.read(path).parts
        return cls.wrap(parts.buffer, parts.layout)

    def _view(self, buffer: NDArray[np.uint8], layout: Layout) -> None:
        views = layout.packed_views(buffer)
        self._buffer = buffer
        self._layout = layout
        super().update(zip(layout.names, views, strict=True))

    @property
    def layout(self) -> Layout:
        """What lies where in the buffer."""
        return self._layout

    @property
    def buffer(self) -> NDArray[np.uint8]:
        """The packed buffer itself."""
        return self._buffer

    def __repr__(self) -> str:
        """A small model as a dict; else its size, and the first parts by shape and dtype.

        >>> FlatWeights({"kernel": np.zeros((100, 10)), "bias": np.zeros(10)})
        <FlatWeights of 2 parts, 1,010 elements, 8,128 bytes:
          'kernel' float64 (100, 10)
          'bias' float64 (10,)>
        """
        slots = self._layout.slots
        if len(slots) <= _SHOWN_PARTS and self._layout.size <= _SHOWN_ELEMENTS:
            return super().__repr__()
        lines = [f"{self._heading()}:", *(f"  {slot}" for slot in slots[:_SHOWN_PARTS])]
        if len(slots) > _SHOWN_PARTS:
            lines.append(f"  and {len(slots) - _SHOWN_PARTS:,} more")
        text = "\n".join(lines)
        return f"<{text}>"

    def _repr_html_(self) -> str:
        """The same as a table, for notebooks."""
        slots = self._layout.slots
        rows = [
            f"<tr><td>{html.escape(slot.name)}</td><td>{slot.dtype}</td><td>{slot.shape}</td></tr>"
            for slot in slots[:_SHOWN_PARTS]
        ]
        if len(slots) > _SHOWN_PARTS:
            rows.append(
                f"<tr><td>and {len(slots) - _SHOWN_PARTS:,} more</td><td></td><td></td></tr>"
            )
        return (
            f"<table><caption>{self._heading()}</caption>"
            f"<tr><th>part</th><th>dtype</th><th>shape</th></tr>{''.join(rows)}</table>"
        )

    def _heading(self) -> str:
        layout = self._layout
        return (
            f"{type(self).__name__} of {len(layout):,} parts, {layout.size:,} elements, "
            f"{layout.nbytes:,} bytes"
        )

    def __setitem__(self, name: str, value: ArrayLike) -> None:
        """Write ``value`` to the part called ``name``.

        Raises:
            TypeError: If there is no such part, or the dtype cannot be cast.
            ValueError: If the shape differs, or the buffer is read-only.
        """
        if name in self and self[name] is value and self._buffer.flags.writeable:
            return  # the last step of ``w[name] += x``: the view has been changed in place
        self._write({name: value})

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Write many parts, checking all of them first; arguments as for `dict.update`.

        Raises:
            TypeError: If there is no such part, or a dtype cannot be cast.
            ValueError: If a shape differs, or the buffer is read-only.
        """
        self._write(dict(*args, **kwargs))

    def __ior__(  # type: ignore[override, misc]
        self, other: Mapping[str, ArrayLike] | Iterable[tuple[str, ArrayLike]]
    ) -> FlatWeights:
        """Write the parts of ``other``, as `update` does."""
        self.update(other)
        return self

    def setdefault(self, name: str, default: Any = None) -> NDArray[Any]:
        """Return the part called ``name``. Keys are fixed, so ``default`` is never used.

        Raises:
            TypeError: If there is no such part.
        """
        if name not in self:
            self._refuse_key(name)
        return self[name]

    def _write(self, values: Mapping[str, Any]) -> None:
        prepared = []
        for name, value in values.items():
            if name not in self:
                self._refuse_key(name)
            i = self._layout.index(name)
            array = settable_at(self._layout, i, value)
            # What is read must not change while its neighbours are written.
            if array is not self[name] and np.may_share_memory(array, self._buffer):
                array = array.copy()
            prepared.append(array)
        if not self._buffer.flags.writeable:
            raise ValueError(
                "these weights are read-only (ray.get gives such views of shared memory); "
                "assign to what copy() returns"
            )
        move_parts([self[name] for name in values], prepared)

    def _refuse_key(self, name: object) -> NoReturn:
        raise TypeError(
            f"the keys of FlatWeights are fixed and {name!r} is none of them; "
            "dict(weights) is a plain dict over the same arrays"
        )

    def _refuse_deletion(self) -> NoReturn:
        raise TypeError(
            "the keys of FlatWeights are fixed; dict(weights) is a plain dict over the same "
            "arrays, from which items can be deleted"
        )

    def __delitem__(self, name: str) -> NoReturn:
        """Raise `TypeError`: the keys are fixed."""
        self._refuse_deletion()

    def pop(self, *args: Any) -> NoReturn:
        """Raise `TypeError`: the keys are fixed."""
        self._refuse_deletion()

    def popitem(self) -> NoReturn:
        """Raise `TypeError`: the keys are fixed."""
        self._refuse_deletion()

    def clear(self) -> NoReturn:
        """Raise `TypeError`: the keys are fixed."""
        self._refuse_deletion()

    @classmethod
    def fromkeys(cls, *args: Any) -> NoReturn:
        """Raise `TypeError`: a name alone has no shape; see `empty`."""
        raise TypeError("FlatWeights cannot be made from names alone; see FlatWeights.empty")

    def copy(self) -> FlatWeights:
        """Return a writable copy: one buffer, copied once."""
        buffer = self._layout.new_buffer()
        move_parts([buffer], [self._buffer])
        return type(self).wrap(buffer, self._layout)

    def __copy__(self) -> FlatWeights:
        """Copy the buffer."""
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatWeights:
        """Copy the buffer."""
        return self.copy()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle as layout and buffer; with protocol 5 the buffer is out of band."""
        if protocol >= 5:
            return _unpickle, (type(self), self._layout, pickle.PickleBuffer(self._buffer.data))
        return _unpickle, (type(self), self._layout, bytearray(self._buffer))


def _unpickle(cls: type[FlatWeights], layout: Layout, buffer: Any) -> FlatWeights:
    return cls.wrap(np.frombuffer(buffer, np.uint8), layout)
