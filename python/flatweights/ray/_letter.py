"""Values that pass through a mailbox: a pickle, whose large buffers lie in windows.

A letter is a header, a table of buffers, and a stream of pickle's protocol 5. A buffer is
named by window, generation of that window, offset and size. What is larger than a mailbox,
or names objects of Ray, is no letter: it goes through Ray.
"""

import pickle
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from flatweights import _core
from flatweights._weights import FlatWeights

_HEADER = struct.Struct("<II")  # what it is, how many buffers
_PLACE = struct.Struct("<IIQQ")
_IN_BAND = 1024  # bytes up to which a buffer travels in the stream

_LEAVES = {int, float, complex, bool, str, bytes, type(None), FlatWeights}

Keep = Callable[[pickle.PickleBuffer], Any]
Dumps = Callable[[Any, Keep], bytes]


class Place(NamedTuple):
    """Where a buffer lies.

    Attributes:
        window: Index of the window.
        generation: Which file is meant by the index.
        offset: In bytes.
        nbytes: How many.
    """

    window: int
    generation: int
    offset: int
    nbytes: int


def dump(value: Any, other: Dumps) -> tuple[bytes, list[memoryview]]:
    """Return the stream of ``value``, and its large buffers.

    Args:
        value: Anything.
        other: Pickles what is not made of numbers, texts, arrays and containers of these.
    """
    buffers: list[memoryview] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes <= _IN_BAND:
            return True
        buffers.append(raw)
        return False

    if _is_plain(value):
        return pickle.dumps(value, protocol=5, buffer_callback=keep), buffers
    return other(value, keep), buffers


def _is_plain(value: Any) -> bool:
    """Whether `pickle` alone gives what another process reads: nothing of ``__main__``."""
    kind = type(value)
    if kind in _LEAVES or isinstance(value, np.generic):
        return True
    if kind is np.ndarray:
        return not value.dtype.hasobject
    if kind is dict:
        return all(type(key) is str for key in value) and _is_plain([*value.values()])
    if kind is tuple or kind is list:
        return all(type(one) in _LEAVES or _is_plain(one) for one in value)
    return False


def fits(stream: bytes, count: int) -> bool:
    """Whether a letter of ``stream`` and ``count`` buffers fits into a mailbox."""
    return _HEADER.size + count * _PLACE.size + len(stream) <= _core.MAILBOX_ROOM


def write(kind: int, stream: bytes, places: Sequence[Place] = ()) -> bytes:
    """Return a letter."""
    table = [_PLACE.pack(*place) for place in places]
    return b"".join([_HEADER.pack(kind, len(places)), *table, stream])


def read(letter: bytes) -> tuple[int, list[Place], bytes]:
    """Return kind, places and stream of a letter."""
    kind, count = _HEADER.unpack_from(letter)
    if not count:
        return kind, [], letter[_HEADER.size :]
    end = _HEADER.size + count * _PLACE.size
    places = [*map(Place._make, _PLACE.iter_unpack(letter[_HEADER.size : end]))]
    return kind, places, letter[end:]
