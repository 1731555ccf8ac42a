"""The messages in mailboxes, commands and answers: pickles whose large buffers lie in segments.

A message is a header, a table of buffers, and a body of pickle's protocol 5. The table gives
the segment, its generation, the offset and the size of each buffer. A value that is too large for
a mailbox, or refers to objects of Ray, cannot be a message: it goes through Ray.

A command is a method's name, its arguments and its keyword arguments. Its answer is the result,
whose large buffers lie in a segment of the worker, to be read in place.
"""

import io
import pickle
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import ray
from numpy.typing import NDArray

from flatweights import _core
from flatweights._weights import FlatWeights
from flatweights.ray.channels._segments import Extent, Segments

# The core reads headers; both ends are on one machine, so the byte order is native.
_HEADER = struct.Struct("=II")  # kind, number of buffers
_EXTENT = struct.Struct("=IIQQ")
_MOST_BESIDE_A_BUFFER = _core.MAILBOX_BYTES - _HEADER.size - _EXTENT.size  # bytes of a body
IN_BAND = 1024  # bytes of the largest buffer that travels in the body

_LEAVES = {int, float, complex, bool, str, bytes, type(None), pickle.PickleBuffer, FlatWeights}

# Objects of Ray, which counts the references to them: only Ray itself may pickle these.
RAY_REFS = (ray.ObjectRef, ray.actor.ActorHandle)


class Message(NamedTuple):
    """A value that is ready for mailboxes.

    Attributes:
        content: The bytes that go into a mailbox.
        extents: The buffers that it mentions.
    """

    content: bytes
    extents: list[Extent]


class _Pickler(ray.cloudpickle.CloudPickler):  # type: ignore[misc]
    def reducer_override(self, value: Any) -> Any:
        """Refuse objects of Ray."""
        if isinstance(value, RAY_REFS):
            raise TypeError(f"{type(value).__name__} is not for channels")
        return super().reducer_override(value)


def pickled(value: Any) -> tuple[bytes, list[memoryview]]:
    """Return the body of ``value``, pickled as Ray does, and its large buffers.

    Raises:
        TypeError: If it refers to objects of Ray.
        Exception: If it cannot be pickled.
    """
    buffers: list[memoryview] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes <= IN_BAND:
            return True
        buffers.append(raw)
        return False

    if is_plain(value):
        return pickle.dumps(value, protocol=5, buffer_callback=keep), buffers
    with io.BytesIO() as file:
        _Pickler(file, protocol=5, buffer_callback=keep).dump(value)
        return file.getvalue(), buffers


def is_plain(value: Any) -> bool:
    """Whether `pickle` is enough, which is faster: ``value`` has no object of a user's class."""
    kind = type(value)
    if kind in _LEAVES:
        return True
    if kind is dict:
        return {str}.issuperset(map(type, value)) and is_plain([*value.values()])
    if kind is tuple or kind is list:
        return _LEAVES.issuperset(map(type, value)) or all(map(is_plain, value))
    if kind is np.ndarray:
        return not value.dtype.hasobject
    return isinstance(value, np.generic)


def fits(body: bytes, count: int) -> bool:
    """Whether a message of ``body`` and ``count`` buffers fits into a mailbox."""
    return _HEADER.size + count * _EXTENT.size + len(body) <= _core.MAILBOX_BYTES


def join_message(kind: int, body: bytes, extents: Sequence[Extent] = ()) -> bytes:
    """Return the content of a message."""
    content = _HEADER.pack(kind, len(extents))
    for extent in extents:
        content += _EXTENT.pack(*extent)
    return content + body


def buffer_message(
    kind: int, body: bytes, buffer: NDArray[np.uint8] | None, segments: Segments
) -> Message | None:
    """Return a message of a body and at most one buffer, to which nobody writes any more.

    The buffer is not moved if it lies in a segment; else it is copied into one.

    Args:
        kind: The kind of message.
        body: The body.
        buffer: The buffer; a buffer without bytes is left out.
        segments: The segments of this process.

    Returns:
        None if the body is too long, or no segment is free.
    """
    extents: list[Extent] = []
    if len(body) > _MOST_BESIDE_A_BUFFER:
        return None
    if buffer is not None and buffer.nbytes:
        extent = segments.find(buffer)
        copied = segments.copy_in([buffer.data]) if extent is None else [extent]
        if copied is None:
            return None
        extents = copied
    return Message(join_message(kind, body, extents), extents)


def make_message(kind: int, box: list[Any], segments: Segments, *, frozen: bool) -> Message | None:
    """Return a message with the value in ``box``.

    Buffers that lie in segments are not moved, unless a process could still write to them;
    others are copied into a segment, once.

    Args:
        kind: The kind of message.
        box: A list that holds only the value. It is emptied, so that this function can tell
            whether anything else refers to the value; without a message, the value is put back.
        segments: The segments of this process.
        frozen: Whether read-only buffers are never written to. If not, a buffer that lies in a
            segment is copied if an array over it is still alive.

    Returns:
        None if the value is too large, no segment is free, or it cannot be pickled for a channel.
    """
    try:
        body, buffers = pickled(box[0])
    except Exception:  # if it cannot be pickled at all, Ray will raise
        return None
    if not fits(body, len(buffers)):
        return None
    if not buffers:
        box.clear()
        return Message(join_message(kind, body), [])
    extents = [segments.find(b) if b.readonly or not frozen else None for b in buffers]
    filled: int | None = None  # the segment of the copies, which nobody holds yet
    if None in extents:
        outside = {i: buffers[i] for i, extent in enumerate(extents) if extent is None}
        copied = _copy_in(segments, extents, outside)
        if not copied:
            return None
        filled = copied[0].segment
        del outside
    # From here on nothing in this function keeps the value alive.
    del buffers
    box.clear()
    whole = [extent for extent in extents if extent is not None]
    if not frozen:
        kept = {i: extent for i, extent in enumerate(whole) if segments.is_taken(extent)}
        if kept and not _copy_in(segments, whole, kept, besides=filled):
            copies = [*map(segments.copy_of, whole)]
            box.append(pickle.loads(body, buffers=copies))
            return None
    return Message(join_message(kind, body, whole), whole)


def _copy_in(
    segments: Segments,
    extents: list[Any],
    sources: Mapping[int, memoryview | Extent],
    *,
    besides: int | None = None,
) -> list[Extent] | None:
    """Copy the ``sources`` into a segment, and note their extents; see `Segments.copy_in`."""
    copied = segments.copy_in([*sources.values()], besides=besides)
    if copied is not None:
        for i, extent in zip(sources, copied, strict=True):
            extents[i] = extent
    return copied
