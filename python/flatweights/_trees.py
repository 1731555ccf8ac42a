"""Arrays in nested dicts, lists and tuples, as in models of Flax and other JAX libraries."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_PROTOCOLS = ("__array__", "__array_interface__", "__dlpack__")
_MOST_LEVELS = 64


def listed(values: Any, expected: str) -> list[Any]:
    """Return ``values`` as a list.

    Raises:
        TypeError: What was ``expected``, and the type, if they are not iterable, or a text.
    """
    cause = None
    if not isinstance(values, (str, bytes)):
        try:
            rest = iter(values)
        except TypeError as error:
            cause = error
        else:
            return list(rest)
    raise TypeError(f"{expected}, got {type(values).__name__}") from cause


def as_array(value: Any, where: str) -> NDArray[Any]:
    """Return ``value`` as an array, without a copy where its memory can be shared.

    Accepts numbers, nested lists of them, and anything with the buffer protocol,
    ``__array_interface__`` or ``__array__`` (NumPy, eager tensors of TensorFlow, PyTorch, JAX), or
    with ``__dlpack__`` on the CPU. Errors name it ``where``.

    Raises:
        TypeError: If it is a container, None, or anything else that is not an array of numbers, or
            if its own conversion fails, or it masks elements.
        ValueError: If it is a ragged list.
    """
    if type(value) is np.ndarray:
        return value
    if isinstance(value, np.ndarray) and np.ma.is_masked(value):
        raise TypeError(
            f"{where}: expected an array without masked elements, got {type(value).__name__}; "
            "array.filled(value) has none"
        )
    try:
        array = _converted(value)
    except (MemoryError, SystemError):  # SystemError: an interrupt in another library's C code
        raise
    except Exception as error:  # another library's method may raise anything
        kind = ValueError if isinstance(error, (ValueError, RecursionError)) else TypeError
        raise kind(f"{where}: expected an array, got {type(value).__name__}: {error}") from error
    if array.dtype == object and not isinstance(value, np.ndarray):
        is_one = array.ndim == 0 and array[()] is value
        got = f"{type(value).__name__}{'' if is_one else ' of Python objects'}"
        raise TypeError(f"{where}: expected an array, got {got}")
    return array


def as_vector(value: Any, size: int, where: str) -> NDArray[Any]:
    """Return ``value`` as `as_array` does, checked to be a vector of ``size`` elements.

    Raises:
        TypeError: As `as_array`.
        ValueError: As `as_array`; or if it has another shape.
    """
    if type(value) is not np.ndarray and isinstance(value, Mapping):
        hint = "set_weights takes weights by name, and flatweights.flatten makes a vector of them"
        raise TypeError(f"{where}: expected an array, got {type(value).__name__}; {hint}")
    flat = as_array(value, where)
    if flat.shape != (size,):
        raise ValueError(f"{where}: expected shape ({size},), got {flat.shape}")
    return flat


def _converted(value: Any) -> NDArray[Any]:
    # Only if NumPy finds no other way: TensorFlow's string tensors have `__dlpack__`, too, and
    # calling it aborts the process.
    if [name for name in _PROTOCOLS if hasattr(value, name)] == ["__dlpack__"]:
        return np.from_dlpack(value)
    try:
        return np.asarray(value)
    except ValueError:
        # `__array__` of TensorFlow's 0-d bfloat16 and float8 tensors returns a scalar.
        scalar = value.__array__() if hasattr(value, "__array__") else None
        if not isinstance(scalar, np.generic):
            raise
        return np.asarray(scalar)


def has_array_protocol(value: Any) -> bool:
    """Whether ``value`` says, by one of its attributes, that it is an array."""
    try:
        return any(hasattr(value, name) for name in _PROTOCOLS)
    except Exception:  # an attribute that raises: `as_array` reports it
        return True


def is_tree(values: Iterable[Any]) -> bool:
    """Whether one of ``values`` is a container of arrays instead of an array.

    A list or tuple of numbers is an array, as it is for NumPy. An empty one is a container: NumPy
    would make an array of float64 of it.
    """
    return any(type(value) is not np.ndarray and _is_branch(value, 0) for value in values)


def _is_branch(value: Any, level: int) -> bool:
    if isinstance(value, Mapping) or level > _MOST_LEVELS:
        return True
    if not isinstance(value, (list, tuple)):
        return False
    return not len(value) or any(_is_array(one) or _is_branch(one, level + 1) for one in value)


def _is_array(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return True
    if isinstance(value, (int, float, complex, np.generic, str, bytes, list, tuple)):
        return False
    return has_array_protocol(value)


@dataclass(frozen=True)
class Tree:
    """The structure of a container, without the arrays in it.

    Attributes:
        kind: Its type: dict for every mapping, list, or the class of a (named) tuple.
        keys: Keys of the mapping, or positions in the sequence.
        branches: For each key the nested container, or None for an array.
    """

    kind: type
    keys: tuple[Any, ...]
    branches: "tuple[Tree | None, ...]"

    @classmethod
    def of(cls, source: Any, where: str, level: int = 0) -> "Tree":
        """Return the tree of ``source``, inside ``level`` others; errors name it ``where``.

        Raises:
            ValueError: If it has too many levels: most likely, it contains itself.
        """
        if level > _MOST_LEVELS:
            raise ValueError(
                f"{where}: expected at most {_MOST_LEVELS} levels of containers, got more; "
                "does one contain itself?"
            )
        is_mapping = isinstance(source, Mapping)
        kind: type = dict if is_mapping else type(source) if isinstance(source, tuple) else list
        keys: tuple[Any, ...] = tuple(source) if is_mapping else tuple(range(len(source)))
        branches = [
            cls.of(source[key], where, level + 1) if _is_branch(source[key], 0) else None
            for key in keys
        ]
        return cls(kind, keys, tuple(branches))

    def sorted(self) -> "Tree":
        """Return this tree with the keys of dicts sorted, whatever their insertion order."""
        items = list(zip(self.keys, self.branches, strict=True))
        if self.kind is dict:
            items.sort(key=lambda item: repr(item[0]))
        keys = tuple(key for key, _ in items)
        return Tree(self.kind, keys, tuple(branch and branch.sorted() for _, branch in items))

    def paths(self) -> list[str]:
        """Return the names of the arrays, in order: ``"encoder/layers/0/kernel"``.

        If two were the same, keys are quoted: ``"'a'/1"`` and ``"'a'/'1'"``.
        """
        paths = self._paths(str)
        return paths if len(set(paths)) == len(paths) else self._paths(repr)

    def _paths(self, text_of: Callable[[Any], str]) -> list[str]:
        paths = []
        for key, branch in zip(self.keys, self.branches, strict=True):
            text = text_of(key)
            paths += [text] if branch is None else [f"{text}/{p}" for p in branch._paths(text_of)]
        return paths

    def leaves(self, source: Any, where: str, path: tuple[Hashable, ...] = ()) -> list[Any]:
        """Return the values of ``source`` at the places of this tree's arrays, in order.

        Errors name ``source`` by ``where`` and a container in it by its ``path``.

        Raises:
            TypeError: If a container is of another kind.
            ValueError: If its keys or its length differ.
        """
        place = f"{where}, {'/'.join(map(str, path))!r}" if path else where
        is_mapping = isinstance(source, Mapping)
        if is_mapping != (self.kind is dict) or not isinstance(source, (Mapping, list, tuple)):
            kind = "a mapping" if self.kind is dict else "a sequence"
            raise TypeError(f"{place}: expected {kind}, got {type(source).__name__}")
        keys: tuple[Any, ...] = tuple(source) if self.kind is dict else tuple(range(len(source)))
        if set(keys) != set(self.keys):
            raise ValueError(
                f"{place}: expected the keys of the first; missing "
                f"{[key for key in self.keys if key not in keys]}, "
                f"unknown {[key for key in keys if key not in self.keys]}"
            )
        arrays: list[Any] = []
        for key, branch in zip(self.keys, self.branches, strict=True):
            if branch is None:
                arrays.append(source[key])
            else:
                arrays += branch.leaves(source[key], where, (*path, key))
        return arrays

    def build(self, leaves: Iterable[Any]) -> Any:
        """Return new containers that hold ``leaves``, in order."""
        rest = iter(leaves)
        values = [next(rest) if b is None else b.build(rest) for b in self.branches]
        if self.kind is dict:
            return dict(zip(self.keys, values, strict=True))
        return self.kind(*values) if hasattr(self.kind, "_fields") else self.kind(values)
