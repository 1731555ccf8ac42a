"""Segments in the memory of a GPU: this process's own, and those that others have told it of.

A segment of the host is read through the channel that it belongs to. A GPU's segment is also read
by other members, to which its owner has no channel. So the owner sends a descriptor of it to the
coordinator, which sends it on to the members that need it. How often the segment is held is
counted in the mailbox of its owner, as for segments in memory of the host; the indices of the two
kinds differ.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable
from typing import NamedTuple

from flatweights import _core
from flatweights.ray.core._requests import SegmentRef

FIRST = 32  # the index of the first one; segments of the host have lower ones
# Of one process: weights that are averaged, the result of this call and of the last one, and those
# that the coordinator keeps for members that are late, one for each kind of call.
MOST = 12

_HANDLE = struct.Struct("<IIIQ16s")  # owner, index, generation, bytes, UUID of the GPU


class SegmentHandle:
    """A descriptor of a segment, by which a process maps the memory, or sends it on.

    Attributes:
        placed: The segment.
        nbytes: Its bytes.
        uuid: The GPU.
        descriptor: The descriptor, which belongs to this object.
    """

    def __init__(self, placed: SegmentRef, nbytes: int, uuid: bytes, descriptor: int) -> None:
        """Take a descriptor."""
        self.placed = placed
        self.nbytes = nbytes
        self.uuid = uuid
        self.descriptor = descriptor

    @classmethod
    def read(cls, body: bytes, descriptor: int) -> SegmentHandle:
        """Read the body of a packet; the descriptor is duplicated.

        Raises:
            struct.error: If it is no such body.
            OSError: If there is no free descriptor.
        """
        *placed, nbytes, uuid = _HANDLE.unpack(body)
        return cls(SegmentRef(*placed), nbytes, uuid, os.dup(descriptor))

    def body(self) -> bytes:
        """Return the body of a packet that tells another process of it."""
        return _HANDLE.pack(*self.placed, self.nbytes, self.uuid)

    def __del__(self) -> None:
        """Close the descriptor."""
        os.close(self.descriptor)


class OwnSegment(NamedTuple):
    """A segment of this process, and what others map it by."""

    memory: _core.DeviceSegment
    handle: SegmentHandle


class GpuSegments:
    """The segments of this process: made when they are needed, reused when nobody reads them."""

    def __init__(self, owner: int, holds: Callable[[int], int]) -> None:
        """Start without segments.

        Args:
            owner: The number of this process's session.
            holds: A function of an index: how often that segment is held by others.
        """
        self._owner = owner
        self._holds = holds
        self._segments: dict[int, OwnSegment] = {}  # by index, from 0
        self._generations = [0] * MOST  # of the last segment of each index

    def take(self, uuid: bytes, nbytes: int, besides: Iterable[int] = ()) -> OwnSegment | None:
        """Return a free segment of ``nbytes`` or more; None if all are held.

        Args:
            uuid: The GPU.
            nbytes: The bytes.
            besides: The indices of segments that are not free, although nobody holds them.

        Raises:
            MemoryError: If the GPU's memory is short.
            RuntimeError: If the driver fails.
        """
        free = [
            at for at in range(MOST) if FIRST + at not in besides and not self._holds(FIRST + at)
        ]
        for at in free:
            if at in self._segments and _suits(self._segments[at].handle, uuid, nbytes):
                return self._segments[at]
        if not free:
            return None
        at = next((at for at in free if at not in self._segments), free[0])
        self._segments.pop(at, None)  # it was made for another model; its memory goes first
        self._generations[at] += 1
        try:
            memory = _core.DeviceSegment(uuid, nbytes)
        except MemoryError:
            others = self._segments.keys() & free
            if not others:
                raise
            for other in others:
                del self._segments[other]
            memory = _core.DeviceSegment(uuid, nbytes)
        descriptor = os.dup(memory.descriptor)
        memory.close_descriptor()
        placed = SegmentRef(self._owner, FIRST + at, self._generations[at])
        handle = SegmentHandle(placed, nbytes, uuid, descriptor)
        made = self._segments[at] = OwnSegment(memory, handle)
        return made

    def find(self, placed: SegmentRef) -> OwnSegment | None:
        """Return one of the segments; None if it is another process's, or there is a newer one."""
        segment = self._segments.get(placed.segment - FIRST)
        return segment if segment is not None and segment.handle.placed == placed else None

    def clear(self) -> None:
        """Forget the segments; their memory is freed once no process maps it."""
        self._segments.clear()


def _suits(handle: SegmentHandle, uuid: bytes, nbytes: int) -> bool:
    """Whether a segment may be used again for ``nbytes`` of a GPU: it is not much too large."""
    return handle.uuid == uuid and nbytes <= handle.nbytes <= 4 * nbytes
