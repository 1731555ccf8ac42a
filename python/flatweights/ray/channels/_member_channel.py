"""A member's end of a channel: it asks when it is ready, and waits for the response.

The coordinator posts each response as a command, and the member's next request is the answer to it.
So between two calls the mailbox is BUSY: the member works, and the coordinator waits for its
answer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flatweights import _core
from flatweights.ray import _clock
from flatweights.ray.channels._end import ChannelError
from flatweights.ray.channels._message import buffer_message
from flatweights.ray.channels._protocol import REQUEST
from flatweights.ray.channels._segments import Segments
from flatweights.ray.channels._worker_channel import WorkerChannel
from flatweights.ray.support._failpoints import reach

SLICE = 0.25  # seconds between two checks that the coordinator is alive
_STAY = 1  # a member is in one call of the mailbox's protocol for ever: its number


class CoordinatorDiedError(RuntimeError):
    """The coordinator of the process group has ended, or the agent of the member's node."""


class Shortcut(NamedTuple):
    """The way to ask for a call again, without Python; valid until segments change.

    Attributes:
        request: Its `exchange` asks and waits. If that returns a truth value, this is to become
            `MemberChannel.pending`.
        memory: The memory in a segment from which the coordinator reads the weights; None, if none
            are sent.
        segments: The segments of the channel.
        changes: How often they had changed.
    """

    request: _core.RepeatedRequest
    memory: NDArray[np.uint8] | None
    segments: Segments
    changes: int


class MemberChannel(WorkerChannel):
    """A member's end of the channel to its coordinator, or to the agent of its node.

    Attributes:
        peer: Which of the two has the other end, for errors.
        pending: If a `Shortcut` has asked, and could not read the response: whether it has come.
            The next `response` is that one. None otherwise.
    """

    pending: bool | None = None

    def __init__(self, address: bytes, token: bytes, peer: str = "the coordinator") -> None:
        """Connect to ``peer``; for the rest, see `WorkerChannel`."""
        super().__init__(address, token)
        self.peer = peer

    def close(self) -> None:
        """Close the socket, and release the memory of all segments without a live array."""
        super().close()
        self.forget_segments()
        self._segments.clear()

    def offer(self, nbytes: int) -> None:
        """Offer a free segment to the next buffer of ``nbytes`` that this thread makes."""
        self._segments.offer(nbytes)

    def count_holds(self, index: int) -> int:
        """Return how often others hold this member's segment ``index``."""
        return self.mailbox.holds(False, index)

    def request(
        self, body: bytes, buffer: NDArray[np.uint8] | None, *, is_urgent: bool, kind: int = REQUEST
    ) -> bool:
        """Answer the last command with ``body``, and a buffer that lies in a segment.

        A buffer that lies elsewhere is copied into a segment. It must not change before the
        response.

        Args:
            body: The request.
            buffer: The packed weights.
            is_urgent: Whether to wake the coordinator before all others have asked.
            kind: The kind of answer.

        Returns:
            False, with nothing sent, if no segment is free and none can be made.

        Raises:
            CoordinatorDiedError: If the peer is gone.
        """
        if self._doorbell is None:
            self.receive()
        if self.is_closed or self._doorbell is None:
            raise CoordinatorDiedError(f"{self.peer} has closed its end")
        message = buffer_message(kind, body, buffer, self._segments)
        if message is None:
            return False
        try:
            self.share(self._segments, message.extents)
        except OSError as error:
            raise self.not_sent(error) from error
        reach("asking")
        self.mailbox.answer_with(message.content, 0)
        if is_urgent:
            self._doorbell.ring()
        else:
            self._doorbell.count_down()
        reach("asked")
        return True

    def not_sent(self, error: OSError) -> CoordinatorDiedError:
        """Return the error for a segment that cannot be sent to the peer."""
        has_ended = isinstance(error, ConnectionError)
        why = "has ended" if has_ended else f"did not get a segment: {error}"
        return CoordinatorDiedError(f"{self.peer} {why}")

    def shortcut(self, call: int, size: int, buffer: NDArray[np.uint8] | None) -> Shortcut | None:
        """Return the way to ask again for ``call``, with weights where ``buffer`` is.

        Args:
            call: The number by which the coordinator knows it.
            size: The bytes of its weights.
            buffer: The packed weights; None, if none are sent.

        Returns:
            None, if the buffer does not lie in a segment.
        """
        segments = self._segments
        if self._doorbell is None:
            return None
        extent = segment = memory = None
        if buffer is not None:
            extent = segments.find(buffer)
            if extent is None:
                return None
            segment = segments[extent.segment]
            memory = segment.memory()[extent.offset : extent.offset + extent.nbytes]
        ends = self.mailbox, self._doorbell
        request = _core.RepeatedRequest(*ends, self.peer_segments, call, size, extent, segment)
        return Shortcut(request, memory, segments, segments.changes)

    def response(self, seconds: float | None) -> tuple[bytes, list[Any], int]:
        """Wait for the next command; return its body, its buffers and its kind.

        Raises:
            TimeoutError: If there is no command within ``seconds``; never, if None.
            CoordinatorDiedError: If the peer is gone.
        """
        end = None if seconds is None else _clock.now() + seconds
        has_come, self.pending = self.pending, None
        while not has_come:
            left = SLICE if end is None else min(SLICE, end - _clock.now())
            self.mailbox.enter(_STAY)
            if self.mailbox.wait(max(0.0, left), _STAY):
                break
            self.receive()
            if self.is_closed:
                raise CoordinatorDiedError(f"{self.peer} has ended")
            if end is not None and _clock.now() >= end:
                raise TimeoutError(f"no answer of {self.peer} within {seconds} s")
        try:
            kind, buffers, body = self.read()
        except (ChannelError, ValueError) as error:
            raise CoordinatorDiedError(f"the response could not be read: {error}") from error
        reach("told")
        return body, buffers, kind
