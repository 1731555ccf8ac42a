"""The parts that both ends of a channel share: the mailbox, the socket, the peer's segments.

A channel leads from a driver to one worker on the same machine. The worker connects to an
abstract Unix socket of the driver and hands over its mailbox; segments follow over the socket
as they are made, before a message mentions them. The socket stays open, and its end of file
tells each side that the other is dead. Both check that the peer belongs to the same user.
"""

import contextlib
import errno
import os
import socket
import struct
from typing import Any

from flatweights import _core
from flatweights.ray.channels._gpu_segments import SegmentHandle
from flatweights.ray.channels._segments import Extent, Segments
from flatweights.ray.core._requests import SegmentRef

_SEGMENT = struct.Struct("<IIQ16s")  # index, generation, bytes, nonce
_OWNER = struct.Struct("<I")
_MOST = 512  # bytes of a packet


# Errors of a shortage of file descriptors or memory, which may be over soon.
_SHORTAGES = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN}


class ChannelError(RuntimeError):
    """A channel cannot be made, or a message cannot pass through it."""


class NoDescriptorsError(ChannelError):
    """This process had no free file descriptors for those of a packet, which are lost."""


def is_shortage(error: Exception) -> bool:
    """Whether ``error`` comes from a shortage: another try may succeed later."""
    return isinstance(error, (MemoryError, TimeoutError, NoDescriptorsError)) or (
        isinstance(error, OSError) and error.errno in _SHORTAGES
    )


def receive_packet(connection: socket.socket) -> tuple[bytes, _core.Descriptors] | None:
    """Return the next packet (empty at the end of the file) and its descriptors, without waiting.

    Returns:
        None if there is no packet.

    Raises:
        OSError: If the connection is broken.
        NoDescriptorsError: If this process had no free descriptors for those of the packet.
    """
    received = _core.receive_packet(connection.fileno(), _MOST)
    if received is None:
        return None
    packet, descriptors, are_short = received
    if are_short:
        raise NoDescriptorsError(os.strerror(errno.EMFILE))
    return packet, descriptors


class ChannelEnd:
    """One end of a channel.

    Attributes:
        mailbox: The mailbox that both sides map.
        is_closed: Whether the peer is dead, or has closed its end.
        last_words: The last words of the peer, about the reason.
        peer_segments: The peer's segments, by index, with their generations.
    """

    def __init__(
        self, connection: socket.socket, mailbox: _core.Mailbox, *, is_worker: bool
    ) -> None:
        """Take a socket and a mailbox.

        Args:
            connection: A connected Unix socket of sequenced packets.
            mailbox: The mailbox.
            is_worker: Whether this is the worker's end.
        """
        self.connection = connection
        self.connection.setblocking(False)
        self.mailbox = mailbox
        self.is_closed = False
        self.last_words = ""
        self._is_worker = is_worker
        self.peer_segments: dict[int, tuple[int, _core.PeerSegment]] = {}
        self._peer_has: dict[int, int] = {}  # by index, the generation of the segment
        self._refused: Exception | None = None  # the error of a packet, for what misses it
        self._handles: dict[tuple[int, int], SegmentHandle] = {}  # by owner and index: what came
        self._sent_handles: dict[tuple[int, int], int] = {}  # by owner and index, the generation

    def close(self) -> None:
        """Close the socket; views of segments stay valid."""
        self.is_closed = True
        self.connection.close()

    def forget_segments(self) -> None:
        """Unmap the peer's segments without a live view; no message can be read any more."""
        self.peer_segments.clear()
        self._handles.clear()

    def send_last_words(self, words: str) -> None:
        """Send the peer ``words``: the reason for which this end is about to close."""
        with contextlib.suppress(OSError):  # the peer is dead, or its socket is full
            self.connection.send(b"P" + words.encode()[: _MOST - 1])

    def share(self, segments: Segments, extents: list[Extent]) -> None:
        """Count this side's segments in ``extents`` as held by the peer; send it missing segments.

        Raises:
            OSError: If the peer is dead, or its socket is full.
        """
        sent = self._peer_has
        for index, generation, _, _ in extents:
            if index in sent and sent[index] == generation:
                continue
            segment = segments[index]
            packet = _SEGMENT.pack(index, generation, segment.nbytes, segment.nonce)
            socket.send_fds(self.connection, [b"W" + packet], [segment.descriptor])
            sent[index] = generation
            if self._is_worker:  # a worker's segments have one reader
                segment.close_descriptor()
        for index, _, _, _ in extents:
            self.mailbox.add_hold(not self._is_worker, index)

    def release(self, extents: list[Extent]) -> None:
        """Undo `share` for ``extents`` that the peer will never read."""
        for extent in extents:
            self.mailbox.drop_hold(not self._is_worker, extent.segment)

    def send_handle(self, handle: SegmentHandle) -> None:
        """Tell the peer of a segment in a GPU's memory, unless it knows of it.

        Raises:
            OSError: If the peer is dead, or its socket is full.
        """
        owner, index, generation = handle.placed
        if self._sent_handles.get((owner, index)) != generation:
            packet = b"G" + handle.body()
            socket.send_fds(self.connection, [packet], [handle.descriptor])
            self._sent_handles[owner, index] = generation

    def send_forget(self, owner: int) -> None:
        """Have the peer forget the handles of an owner that is gone, if it was sent any."""
        known = [at for at in self._sent_handles if at[0] == owner]
        for at in known:
            del self._sent_handles[at]
        if known:
            with contextlib.suppress(OSError):  # the peer is dead, or its socket is full
                self.connection.send(b"F" + _OWNER.pack(owner))

    def forget_handles(self, owner: int) -> None:
        """Forget the handles of an owner that the peer has told of."""
        for at in [at for at in self._handles if at[0] == owner]:
            del self._handles[at]

    def has_handle(self, handle: SegmentHandle) -> bool:
        """Whether ``handle`` is the last one that the peer has told of."""
        return self._handles.get(handle.placed[:2]) is handle

    def handle_of(self, placed: SegmentRef) -> SegmentHandle:
        """Return the handle of a segment that the peer has told of.

        Raises:
            ChannelError: If it has not.
        """
        for is_last in (False, True):
            handle = self._handles.get(placed[:2])
            if handle is not None and handle.placed == placed:
                return handle
            if not is_last:
                self.receive()
        raise self._missing(
            f"segment {placed.segment} of session {placed.owner} on a GPU was not sent"
        )

    def read(self) -> tuple[int, list[Any], bytes]:
        """Return kind, buffers and body of the peer's message.

        The buffers are read-only views of the peer's segments. Each counts as held as long as it
        exists.

        Raises:
            ChannelError: If the peer has not sent a segment of the message, or it cannot be mapped.
            ValueError: If the message is malformed.
        """
        try:
            return self.mailbox.read_message(self._is_worker, self.peer_segments)
        except IndexError:  # the segment may have been sent since the last `receive`
            pass
        try:
            self.receive()
        except BaseException:
            self.mailbox.release_message(self._is_worker)
            raise
        try:
            return self.mailbox.read_message(self._is_worker, self.peer_segments)
        except IndexError as error:
            self.mailbox.release_message(self._is_worker)
            raise self._missing(str(error)) from None

    def receive(self) -> None:
        """Read all packets that have arrived.

        If a packet cannot be used, nothing is raised here; the message that needs it cannot be
        read.
        """
        was_reset = False
        while not self.is_closed:
            try:
                received = receive_packet(self.connection)
            except ConnectionResetError:  # the peer left packets unread; its own come next
                if was_reset:
                    self.is_closed = True
                was_reset = True
                continue
            except OSError:
                self.is_closed = True
                return
            except ChannelError as error:
                self._refused = error.with_traceback(None)
                continue
            if received is None:
                return
            packet, descriptors = received
            if not packet:
                self.is_closed = True
                return
            try:
                self._take(packet[:1], packet[1:], descriptors)
            except (ChannelError, OSError, ValueError, struct.error) as error:
                self._refused = error.with_traceback(None)
            finally:
                descriptors.close()

    def _missing(self, text: str) -> ChannelError:
        """Return the error about a packet that the peer should have sent."""
        refused, self._refused = self._refused, None
        return ChannelError(text + (f" ({type(refused).__name__}: {refused})" if refused else ""))

    def _take(self, kind: bytes, body: bytes, descriptors: _core.Descriptors) -> None:
        numbers = descriptors.numbers
        if kind == b"P" and not numbers:
            self.last_words = body.decode(errors="replace")
            return
        if kind == b"G" and len(numbers) == 1:
            handle = SegmentHandle.read(body, numbers[0])
            self._handles[handle.placed[:2]] = handle
            return
        if kind == b"F" and not numbers:
            self.forget_handles(*_OWNER.unpack(body))
            return
        if kind != b"W" or len(body) != _SEGMENT.size or len(numbers) != 1:
            raise ChannelError(f"expected a segment, got a packet {kind!r} of {len(body)} bytes")
        index, generation, nbytes, nonce = _SEGMENT.unpack(body)
        segment = _core.PeerSegment(numbers[0], nonce)
        if segment.nbytes != nbytes:
            raise ChannelError(f"segment {index}: expected {nbytes} bytes, got {segment.nbytes}")
        self.peer_segments[index] = generation, segment


_PEER = struct.Struct("3i")  # process, user, group


def check_user(connection: socket.socket) -> None:
    """Raise `ChannelError` unless the peer belongs to the user of this process."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    _, user, _ = _PEER.unpack(credentials)
    if user != os.geteuid():
        raise ChannelError(f"the peer belongs to user {user}, and this process to {os.geteuid()}")
