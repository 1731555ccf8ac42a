"""A dict of arrays over one packed buffer."""

from __future__ import annotations

import html
import os
import pickle
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flatweights._core import move_parts
from flatweights._layout import Layout, Parts, cast_for_slot, check_layout_kind, named_arrays

_SHOWN_PARTS = 10
_SHOWN_ELEMENTS = 100


class FlatWeights(dict[str, NDArray[Any]]):
    """A ``dict`` from name to array whose arrays are views of one packed buffer.

    Code that reads a dict of arrays, adds to its items, or builds a new dict from them
    works unchanged. Pickled with protocol 5, as by Ray, it travels as one out-of-band
    buffer and is unpickled as views of that, without a copy (in Ray read-only).

    It differs from a dict of arrays as follows:

    * The keys are fixed: adding or deleting one raises `TypeError`. ``dict(w)`` is a
      plain dict over the same arrays.
    * Assigning writes to the buffer instead of replacing the array: ``w[k] = a`` casts
      ``a`` to the part's dtype as ``np.copyto(casting="same_kind")`` does (integer parts
      take the rounded value) and requires its exact shape. `update` and ``|=`` check
      everything before they write anything.
    * Over a read-only buffer, such as `ray.get` returns, assigning raises `ValueError`.
      ``w.copy()`` is writable. (NumPy itself rejects ``w[k] += 1``, as for any read-only
      array.)
    * ``w.copy()``, ``copy.copy(w)`` and ``copy.deepcopy(w)`` copy the buffer, once, and give
      `FlatWeights`; ``w | other`` gives a plain dict.
    * ``repr`` and ``print`` show the arrays only of a small model.
    * Libraries that rebuild mappings by ``type(w)()`` (`tf.nest.map_structure`) raise;
      pass ``dict(w)``.

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
            TypeError: If a name is not a string, or an array holds Python objects.
        """
        super().__init__()
        names, arrays = named_arrays(parts)
        layout = Layout.of_arrays(names, arrays)
        self._buffer, self._layout = layout.new_buffer(), layout
        layout._core.put_packed_views(self._buffer, layout._names, self)
        move_parts(list(self.values()), arrays)

    @classmethod
    def wrap(cls, buffer: NDArray[np.uint8], layout: Layout) -> FlatWeights:
        """Return a view of the packed ``buffer``. No bytes move.

        The views keep ``buffer`` alive and are read-only if it is.

        Args:
            buffer: Contiguous uint8 vector of ``layout.nbytes`` bytes.
            layout: Layout of the buffer.

        Raises:
            TypeError: If ``buffer`` is not a NumPy array, or ``layout`` no `Layout`.
            ValueError: If ``buffer`` is not such a vector.
        """
        check_layout_kind(layout)
        self = cls.__new__(cls)
        layout._core.put_packed_views(buffer, layout._names, self)
        self._buffer, self._layout = buffer, layout
        return self

    @classmethod
    def empty(cls, layout: Layout) -> FlatWeights:
        """Return weights over a new buffer of ``layout``: values undefined, padding zero.

        Raises:
            TypeError: If ``layout`` is no `Layout`.
        """
        check_layout_kind(layout)
        return cls.wrap(layout.new_buffer(), layout)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the weights to a safetensors file; an existing file is replaced.

        The layout and a checksum are in the file's metadata. Any program that supports the
        format can read the file, as a dict of arrays in an arbitrary order. Parts whose dtype
        the format lacks get one more axis at the end: complex128 is stored as pairs of
        float64, other dtypes as bytes.

        The file is replaced atomically: the weights are written to a temporary file beside it
        (``.flatweights-*.tmp``, left behind if the process is killed), synced to the disk, and
        renamed. If the disk is full or the process dies, the old file stays. Each byte is
        read twice, for the checksum and for the file, and written once. So nothing may change the
        weights meanwhile: `load` would refuse the file.

        >>> import tempfile
        >>> w = FlatWeights({"kernel": np.ones((2, 2), np.float32), "step": np.int64(7)})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     w.save(f"{folder}/weights.safetensors")
        ...     FlatWeights.load(f"{folder}/weights.safetensors")["step"]
        array(7)

        Args:
            path: The file. The target of a symbolic link is replaced, not the link.

        Raises:
            OSError: If it cannot be written, or exists and is not a regular file.
        """
        from flatweights import _safetensors  # it imports a library that is rarely needed

        _safetensors.write(path, self._layout, self._buffer)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> FlatWeights:
        """Return the weights in a safetensors file, over a new buffer.

        The file is read and checked; each byte is copied once. It may be replaced, changed or
        deleted afterwards; changing it while it is read raises.

        Weights written by `save` keep their order and dtypes, and must be unaltered. The
        checksum, a CRC-32, detects accidents, not tampering. Files of other programs have no
        checksum, and their tensors are sorted by name.

        Args:
            path: A file that `save` or any other program wrote.

        Raises:
            OSError: If it cannot be opened, or is not a regular file.
            ValueError: If it is not a complete safetensors file, has dtypes that NumPy lacks,
                differs from what `save` wrote, or changes while it is read.
        """
        from flatweights import _safetensors

        saved = _safetensors.read(path)
        return cls.wrap(saved.buffer, saved.layout)

    @property
    def layout(self) -> Layout:
        """The layout of the buffer."""
        return self._layout

    @property
    def buffer(self) -> NDArray[np.uint8]:
        """The packed buffer itself."""
        return self._buffer

    def __repr__(self) -> str:
        """Show a small model as a dict; of others the size, and dtypes and shapes of some parts.

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
        """Show the size and some parts as a table, for notebooks."""
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
            array = cast_for_slot(self._layout, i, value)
            # A source in this buffer must not change while its neighbours are written.
            if array is not self[name] and np.may_share_memory(array, self._buffer):
                array = array.copy()
            prepared.append(array)
        if not self._buffer.flags.writeable:
            raise ValueError(
                "these weights are read-only (ray.get returns such views of shared memory); "
                "assign to a copy() of them"
            )
        move_parts([self[name] for name in values], prepared)

    def _refuse_key(self, name: object) -> NoReturn:
        raise TypeError(
            f"the keys of FlatWeights are fixed and {name!r} is not one of them; "
            "dict(weights) is a plain dict over the same arrays"
        )

    def _refuse_deletion(self, *args: Any) -> NoReturn:
        """Raise `TypeError`: the keys are fixed."""
        raise TypeError(
            "the keys of FlatWeights are fixed; dict(weights) is a plain dict over the same "
            "arrays, from which items can be deleted"
        )

    __delitem__ = pop = popitem = clear = _refuse_deletion

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


@overload
def sealed(model: FlatWeights) -> FlatWeights: ...
@overload
def sealed(model: Any) -> Any: ...
def sealed(model: Any) -> Any:
    """Return a view of ``model`` that cannot be written to; new dicts, lists, tuples of such."""
    if not isinstance(model, (dict, list, tuple)):
        view = model.view()
        view.flags.writeable = False
        return view
    if isinstance(model, FlatWeights):
        if not model._buffer.flags.writeable:
            return model
        return FlatWeights.wrap(sealed(model._buffer), model._layout)
    if isinstance(model, dict):
        return {key: sealed(part) for key, part in model.items()}
    parts = map(sealed, model)
    return type(model)(*parts) if hasattr(model, "_fields") else type(model)(parts)


@overload
def frozen(model: FlatWeights) -> FlatWeights: ...
@overload
def frozen(model: Any) -> Any: ...
def frozen(model: Any) -> Any:
    """Return a view as `sealed` does of a new ``model``, which cannot be written to itself, either.

    So its numbers stay as they are, which `sealed` alone does not show.
    """
    view = sealed(model)
    _freeze(view)
    return view


def _freeze(model: Any) -> None:
    if isinstance(model, FlatWeights):
        model = model._buffer
    if isinstance(model, (dict, list, tuple)):
        for part in model.values() if isinstance(model, dict) else model:
            _freeze(part)
        return
    memory = model.base
    while isinstance(memory, np.ndarray):
        memory.flags.writeable = False
        memory = memory.base
