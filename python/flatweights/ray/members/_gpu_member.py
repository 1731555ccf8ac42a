"""A member's part in averages that stay on a GPU: its segments, and its sums for others."""

from __future__ import annotations

import logging
import pickle
from typing import Any

from flatweights import _core
from flatweights._layout import Layout
from flatweights._settings import gpu_setting
from flatweights.ray.channels._end import ChannelError
from flatweights.ray.channels._gpu_segments import GpuSegments, OwnSegment, SegmentHandle
from flatweights.ray.channels._member_channel import MemberChannel
from flatweights.ray.core._requests import SegmentRef
from flatweights.ray.members._reductions import Reduction, SegmentsReduced
from flatweights.ray.support._errors import reason_in_a_line
from flatweights.ray.support._failpoints import reach

# Bytes of weights that stay on a GPU. It runs the kernels of one process at a time, and takes 0.2
# to 0.7 ms to go from one to another, which an average needs twice. Between two members on an H100,
# 1.1 MB take 1.1 ms on it and 0.86 through the host, 103 MB 1.7 and 12.4 ms; between eight, 3.4 and
# 2.9 ms, 5.2 and 44 ms.
_LEAST = 3 << 20

_log = logging.getLogger("flatweights")


def gpu_of(variables: Any) -> bytes | None:
    """Return the GPU on which ``variables`` may be averaged, if they are on one.

    Raises:
        ValueError: If ``FLATWEIGHTS_GPU`` is something unknown.
    """
    uuid: bytes | None = getattr(variables, "gpu", None)
    if uuid is None or (wanted := gpu_setting()) == "host":
        return None
    return uuid if wanted == "device" or variables.layout.nbytes >= _LEAST else None


class GpuMember:
    """The segments that this member writes and reads."""

    def __init__(self, channel: MemberChannel, session: int) -> None:
        """Start without segments.

        Args:
            channel: The channel to the coordinator.
            session: The number of this member's session.
        """
        self._channel = channel
        self._segments = GpuSegments(session, channel.count_holds)
        # Segments of others that are mapped here, by owner and index.
        self._peers: dict[tuple[int, int], tuple[SegmentHandle, _core.PeerDeviceSegment]] = {}
        self._gathered: tuple[Layout, OwnSegment] | None = None  # last: the segment has them
        self._has_warned = False

    def gather(self, variables: Any, uuid: bytes) -> OwnSegment | None:
        """Read ``variables`` into a segment, which is complete then; None if that cannot be done.

        Raises:
            RuntimeError: If ``FLATWEIGHTS_GPU=device`` requires it.
            MemoryError: Likewise, if the GPU's memory is short.
            OSError: Likewise, if there is no free descriptor.
        """
        layout: Layout = variables.layout
        self._gathered = None  # it may have to go, to make room
        try:
            if why := _core.device_segment_obstacle(uuid):
                raise RuntimeError(why)
            segment = self._segments.take(uuid, layout.nbytes)
            if segment is None:
                return None
            variables.gather_into_segment(segment.memory)
        except _core.UnreadyError:  # the way through the host binds them again
            return None
        except (MemoryError, RuntimeError, OSError) as error:
            if gpu_setting() == "device":
                raise
            if not self._has_warned:
                self._has_warned = True
                why = reason_in_a_line(error)
                _log.warning("weights leave the GPU to be averaged, since there: %s", why)
            return None
        self._gathered = layout, segment
        return segment

    def announce(self, segment: OwnSegment) -> None:
        """Let the coordinator send others to a segment of this member.

        Raises:
            OSError: If the coordinator is dead.
        """
        self._channel.send_handle(segment.handle)

    def reduce(self, body: bytes) -> bytes:
        """Average segments of members into one of this member's; return the answer."""
        reach("reducing")
        try:
            reduced = self._reduced(Reduction(*pickle.loads(body)))
        except Exception as error:  # the weights are averaged on the host then
            is_fault = not isinstance(error, (MemoryError, OSError, ChannelError))
            reduced = SegmentsReduced(None, (), reason_in_a_line(error), is_fault)
        return pickle.dumps(tuple(reduced))

    def _reduced(self, wanted: Reduction) -> SegmentsReduced:
        if self._gathered is None:
            raise RuntimeError("this member has gathered nothing")
        layout, own = self._gathered
        handle = own.handle
        # The average goes to a segment that neither this call nor anybody else reads.
        out = self._segments.take(handle.uuid, layout.nbytes, besides=[handle.placed.segment])
        if out is None:
            raise MemoryError("all segments are still being read")
        models = [self.memory(placed) for placed in wanted.segments]
        flags = _core.average_on_gpu(layout.core, out.memory, models, wanted.weights)
        self.announce(out)
        reach("reduced")
        not_finite = tuple(k for k, is_flagged in enumerate(flags) if is_flagged)
        return SegmentsReduced(out.handle.placed, not_finite)

    def memory(self, placed: SegmentRef) -> _core.DeviceSegment | _core.PeerDeviceSegment:
        """Return a segment of this member or of another, mapped.

        Raises:
            ChannelError: If the coordinator has not told of it.
            RuntimeError: If the driver fails.
        """
        self._channel.receive()  # the coordinator may have told of members that are gone
        has = self._channel.has_handle
        self._peers = {at: known for at, known in self._peers.items() if has(known[0])}
        own = self._segments.find(placed)
        if own is not None:
            return own.memory
        handle = self._channel.handle_of(placed)
        known = self._peers.get(placed[:2])
        if known is None or known[0] is not handle:
            known = None
            self._peers.pop(placed[:2], None)  # its memory goes first
            segment = _core.PeerDeviceSegment(handle.descriptor, handle.nbytes, handle.uuid)
            known = self._peers[placed[:2]] = handle, segment
        return known[1]

    def clear(self) -> None:
        """Let go of all segments."""
        self._segments.clear()
        self._peers.clear()
        self._gathered = None
