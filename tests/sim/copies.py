"""What another process gets of a value."""

from __future__ import annotations

import io
import pickle
from typing import Any

import ray


class _Pickler(ray.cloudpickle.CloudPickler):  # type: ignore[misc]
    """Copies values as Ray does, and keeps objects of some kinds."""

    kept: list[Any]
    kinds: tuple[type, ...]

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, self.kinds):
            return None
        self.kept.append(value)
        return len(self.kept) - 1


class _Unpickler(pickle.Unpickler):
    kept: list[Any]

    def persistent_load(self, index: Any) -> Any:
        return self.kept[index]


def copied(value: Any, *kinds: type) -> Any:
    """Return a copy of a value, whose arrays are read-only; objects of ``kinds`` are the same."""
    buffers: list[pickle.PickleBuffer] = []
    with io.BytesIO() as file:
        pickler = _Pickler(file, protocol=5, buffer_callback=buffers.append)
        pickler.kept, pickler.kinds = [], kinds
        pickler.dump(value)
        file.seek(0)
        unpickler = _Unpickler(file, buffers=[bytes(buffer.raw()) for buffer in buffers])
        unpickler.kept = pickler.kept
        return unpickler.load()
