"""The coordinator's part in averages that stay on a GPU: it decides which member does what.

Members whose variables are on one GPU leave their weights in segments of it and send the
coordinator only where they are. The coordinator then has the lowest rank average all into another
segment (`Reduction`), and tells every member where that is. The bytes never leave the GPU. (The
coordinator does not average itself, since a process that computes on a GPU takes half a GB of its
memory. The rank that averages has two segments more than the others: one for the new average, one
for the last, which others may read.)

Whatever stands in the way - a rule, a member on another GPU or node, NaN or infinity to be named, a
GPU's memory that is short, a rank that dies or stops while it averages - ends in the same way: the
members are asked again, through memory of the host (`RESEND`), and the call goes on as any other.

A segment with a response is held, so that its owner does not write to it, as long as a member may
still read it: until that member has asked again, or is gone. It is held, too, while the response is
kept for members that are late. Segments with the weights to be averaged need no hold: their owners
wait for the response.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterable, Sequence

from flatweights._layout import Layout
from flatweights.ray import _clock
from flatweights.ray.channels._driver_channel import Channels, DriverChannel
from flatweights.ray.channels._end import ChannelError
from flatweights.ray.channels._gpu_segments import SegmentHandle
from flatweights.ray.channels._protocol import REDUCE
from flatweights.ray.core._peer import Peer
from flatweights.ray.core._requests import Request, SegmentRef
from flatweights.ray.members._reductions import Reduction, SegmentsReduced
from flatweights.ray.members._sessions import Session
from flatweights.ray.support._errors import reason_in_a_line
from flatweights.ray.support._failpoints import reach

_PATIENCE = 2.0  # seconds for an average: milliseconds, unless that member is stopped or has died

_log = logging.getLogger("flatweights")


class OnDevice:
    """Weights in a segment of a member: an average, or those of the root of a broadcast.

    Attributes:
        owner: The member.
        layout: Their layout.
        handle: The segment.
    """

    def __init__(self, owner: Session, handle: SegmentHandle, layout: Layout) -> None:
        """Hold the segment."""
        assert owner.channel is not None
        self.layout = layout
        self.handle = handle
        self.owner = owner
        self._mailbox = owner.channel.mailbox
        self._readers: set[Session] = set()
        self._mailbox.add_hold(False, handle.placed.segment)

    def send(self, session: Session) -> None:
        """Let a member read the segment.

        Raises:
            OSError: If it is dead.
        """
        assert session.channel is not None
        if session is not self.owner:
            session.channel.send_handle(self.handle)
        self._readers.add(session)

    def lose(self, session: Session) -> None:
        """Note that a member reads it no more."""
        self._readers.discard(session)

    @property
    def is_read(self) -> bool:
        """Whether a member may still read it."""
        return bool(self._readers)

    def release(self) -> None:
        """Hold the segment no more."""
        self._mailbox.drop_hold(False, self.handle.placed.segment)


class RequestAgainError(Exception):
    """The weights have to come through memory of the host; the text says why."""


class GpuRounds:
    """The weights that have stayed on GPUs."""

    def __init__(self, channels: Channels) -> None:
        """Start without any."""
        self._channels = channels
        self._is_off = False  # once a GPU has failed: it may fail each member in turn
        self._stayed: list[OnDevice] = []
        self._gone: list[Session] = []  # members that are gone, whose segments others still have

    def may_stay(self, first: Request, readers: Iterable[tuple[Peer, Request]]) -> bool:
        """Whether the weights of members may stay on their GPU in the next call like this.

        Args:
            first: The request of one of them.
            readers: The members, with their requests.
        """
        if first.gpu is None or first.rule is not None or self._is_off:
            return False
        uuids = {
            request.gpu.uuid if request.gpu is not None and peer.has_channel else None
            for peer, request in readers
        }
        return len(uuids) == 1 and None not in uuids

    def average(
        self,
        first: Request,
        sessions: Sequence[Session],
        others: Sequence[Session],
        layout: Layout,
        weights: Sequence[float],
    ) -> OnDevice:
        """Have the member with the lowest rank average the segments of all.

        Args:
            first: The request of one of them.
            sessions: The members of the call, in the order of their ranks.
            others: Other members that get the response.
            layout: The layout of the weights.
            weights: The weights of the members, in that order.

        Raises:
            RequestAgainError: If it cannot be done there.
        """
        self._check(first, sessions, [*sessions, *others])
        reducer = sessions[0]
        channel = reducer.channel
        assert channel is not None
        try:
            reduced = self._reduced(channel, sessions, weights)
        except Exception as error:  # it died, or its answer cannot be read
            raise RequestAgainError(f"{reducer.who}: {reason_in_a_line(error)}") from None
        if reduced.placed is None:
            self._is_off = self._is_off or reduced.is_fault
            raise RequestAgainError(f"rank {reducer.rank} could not average: {reduced.why}")
        if reduced.not_finite and first.nonfinite != "propagate":
            ranks = [sessions[k].rank for k in reduced.not_finite]
            raise RequestAgainError(f"ranks {ranks} hold NaN or infinity")
        return self._kept(reducer, layout, reduced.placed)

    def relay(
        self, first: Request, root: Session, sessions: Sequence[Session], layout: Layout
    ) -> OnDevice:
        """Let all members read the segment of the root of a broadcast.

        Args:
            first: The request of one of them.
            root: The root.
            sessions: All members that get the response.
            layout: The layout of the weights.

        Raises:
            RequestAgainError: If some cannot.
        """
        self._check(first, [root], sessions)
        return self._kept(root, layout, _placed(root))

    def note_request(self, session: Session) -> None:
        """Note that a member has asked again or is gone: it reads nothing more."""
        for stayed in self._stayed:
            stayed.lose(session)

    def forget(self, session: Session) -> None:
        """Note that a member is gone: `release` has others forget its segments."""
        self.note_request(session)
        self._gone.append(session)

    def release(self, is_kept: Callable[[OnDevice], bool], sessions: Iterable[Session]) -> None:
        """Let go of segments that are neither read nor kept for members that are late.

        Args:
            is_kept: Whether weights are kept.
            sessions: The present members. They let go of the segments of those that are gone, since
                a GPU's memory is free only once nobody maps it.
        """
        if not self._stayed and not self._gone:
            return
        rest = []
        for stayed in self._stayed:
            if stayed.is_read or is_kept(stayed):
                rest.append(stayed)
            else:
                stayed.release()
        self._stayed = rest
        owners = {stayed.owner for stayed in rest}
        channels = [session.channel for session in sessions if session.channel is not None]
        for gone in [session for session in self._gone if session not in owners]:
            self._gone.remove(gone)
            if gone.channel is not None:
                gone.channel.forget_handles(gone.number)
                for channel in channels:
                    channel.send_forget(gone.number)

    def _check(
        self, first: Request, senders: Sequence[Session], sessions: Sequence[Session]
    ) -> None:
        """Raise unless the weights of ``senders`` are in segments that ``sessions`` can read."""
        if not self.may_stay(first, [(session, session.request) for session in sessions]):
            raise RequestAgainError(
                "not all members are on one GPU, or a rule needs the coordinator"
            )
        if not all(session.request.is_in_segment for session in senders):
            raise RequestAgainError("some weights are in memory of the host")

    def _reduced(
        self, channel: DriverChannel, sessions: Sequence[Session], weights: Sequence[float]
    ) -> SegmentsReduced:
        segments = []
        for session in sessions:
            assert session.channel is not None
            placed = _placed(session)
            segments.append(placed)
            if session.channel is not channel:
                channel.send_handle(session.channel.handle_of(placed))
        reach("ordering")
        channel.order(REDUCE, pickle.dumps(tuple(Reduction(tuple(segments), tuple(weights)))))
        end = _clock.now() + _PATIENCE
        while not channel.is_answered:
            left = end - _clock.now()
            if channel.is_closed:
                raise RuntimeError("it has died while it averaged")
            if left <= 0:
                raise TimeoutError(f"it has not averaged within {_PATIENCE} s")
            self._channels.wait([channel], left)
        _, (body, _) = channel.take()
        return SegmentsReduced(*pickle.loads(body))

    def _kept(self, owner: Session, layout: Layout, placed: SegmentRef) -> OnDevice:
        assert owner.channel is not None
        try:
            handle = owner.channel.handle_of(placed)
        except ChannelError as error:  # this process had no descriptor for it
            raise RequestAgainError(f"{owner.who}: {error}") from None
        stayed = OnDevice(owner, handle, layout)
        self._stayed.append(stayed)
        return stayed


def _placed(session: Session) -> SegmentRef:
    """Return the segment that has the weights of a member."""
    assert session.request.gpu is not None
    assert session.request.gpu.placed is not None
    return session.request.gpu.placed
