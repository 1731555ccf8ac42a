"""The sources of a subscriber's weights: memory of a publication, or calls of a proxy."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
import ray
from numpy.typing import NDArray

from flatweights.ray import _clock
from flatweights.ray.publishing._answer import answer_of
from flatweights.ray.publishing._names import PublisherRecord
from flatweights.ray.publishing._publication_server import PublicationAddress, PublicationConnection
from flatweights.ray.support._errors import check_connected
from flatweights.ray.support._listener import closed_in_forks, milliseconds

News = tuple[int, float, NDArray[np.uint8]]
"""A version, the `time.monotonic` of its publication on this machine, and its packed buffer."""

Told: TypeAlias = NDArray[np.uint8] | list[ray.ObjectRef]
"""A packed buffer, or a reference to it, in a list."""

Newest: TypeAlias = tuple[int, float, Told]
"""A version, its age in seconds, and its bytes."""


class AnnouncedWeights(NamedTuple):
    """Weights of which a process was told, or tells others; perhaps they have not come yet.

    Attributes:
        version: Their version.
        published: The `time.monotonic` of their publication on this machine.
        told: Their bytes.
    """

    version: int
    published: float
    told: Told

    def answer(self) -> Newest:
        """Return what one answers to those that ask for them."""
        return self.version, _clock.now() - self.published, self.told


Answer: TypeAlias = Newest | tuple[()] | None
"""Newer weights; or an empty tuple, if there are none for a while; or None, if none will come."""

PULL = 2.0
"""Seconds after which a proxy or a relay answers that there is nothing new."""
_FETCH = 60.0  # seconds to wait for weights that were announced
_SLOWEST = 10e6  # bytes per second that come in any case: more seconds for large weights
_SOON = 2.0  # seconds in which small weights that were announced usually come
_USUAL = 100e6  # bytes per second that usually come


def patience_of(nbytes: int) -> float:
    """Return the seconds to wait for weights that were announced."""
    return _FETCH + nbytes / _SLOWEST


class Source(ABC):
    """A source of the newest weights.

    Attributes:
        transport: The transport by which they come; see `Subscriber.transport`.
        number: The number of the publisher among those of its name.
        layout: The layout of the weights, pickled.
    """

    def __init__(self, transport: str, number: int, layout: bytes) -> None:
        """Take the attributes."""
        self.transport = transport
        self.number = number
        self.layout = layout

    @property
    @abstractmethod
    def take(self) -> Callable[[int], News | None]:
        """A function that returns the newest weights if their version is above its argument.

        Else it returns None, at once. The buffer does not change as long as a reference to it
        exists; there may be references to only one buffer.
        """

    @property
    @abstractmethod
    def newest(self) -> int:
        """The newest version; 0 if there is none."""

    @abstractmethod
    def drop(self) -> None:
        """Allow the last buffer to change, although references to it may exist."""

    @abstractmethod
    def wait(self, seen: int, seconds: float) -> bool:
        """Sleep until there is a version above ``seen``; return whether there is one."""

    @abstractmethod
    def wait_for_end(self, seconds: float) -> bool:
        """Wait until this source has ended, and brings nothing new; return whether it has."""

    @abstractmethod
    def interrupt(self) -> None:
        """Make `wait_for_end` return, in another thread."""

    @abstractmethod
    def close(self) -> None:
        """Read no more, and keep no weights; no other thread may use this.

        Views of a buffer may change from then on.
        """


class SharedMemorySource(Source):
    """The memory of a publication."""

    def __init__(
        self,
        transport: str,
        number: int,
        layout: bytes,
        address: PublicationAddress,
        end: float,
        *,
        for_others: bool = False,
    ) -> None:
        """Connect; takes ``for_others`` and raises as `PublicationConnection` does."""
        self._server = PublicationConnection(address, end, for_others=for_others)
        self._reader = self._server.reader
        super().__init__(transport, number, layout)
        self._ours, self._waker = map(closed_in_forks, socket.socketpair())

    @property
    def take(self) -> Callable[[int], News | None]:
        """The reader's function."""
        return self._reader.take

    @property
    def newest(self) -> int:
        """The newest version there."""
        return self._reader.newest

    def drop(self) -> None:
        """Release the slot."""
        self._reader.drop()

    def wait(self, seen: int, seconds: float) -> bool:
        """Sleep on the memory."""
        return self._reader.wait(seen, seconds)

    def wait_for_end(self, seconds: float) -> bool:
        """Wait for the end of the socket."""
        poll = select.poll()
        poll.register(self._server.connection, select.POLLIN)
        poll.register(self._ours, select.POLLIN)
        poll.poll(milliseconds(_clock.now() + seconds))
        return self._server.is_over

    def interrupt(self) -> None:
        """End the pair of sockets that `wait_for_end` looks at."""
        self._waker.close()

    def close(self) -> None:
        """Disconnect."""
        self._waker.close()
        self._ours.close()
        self._server.close()


def _pull(source: weakref.ref[PulledSource]) -> None:
    while (there := source()) is not None and there.pull():
        del there


class PulledSource(Source):
    """Calls through Ray: each brings the newest weights once there are newer ones.

    A thread makes them, so `take` waits for none. It ends when nobody has this object any more, as
    after an interrupt before its maker had it.
    """

    def __init__(self, record: PublisherRecord, pull: Callable[[int], Answer]) -> None:
        """Begin to get the weights of a publisher.

        Args:
            record: The publisher.
            pull: Makes one call: returns weights of versions above its argument.
        """
        super().__init__("store", record.number, record.layout)
        self._pull = pull
        self._nbytes = record.address.nbytes
        self._newest = 0
        # What has arrived, as it was told, and its bytes.
        self._arrived: tuple[AnnouncedWeights, NDArray[np.uint8]] | None = None
        # What is fetched, and the time since which it is.
        self._coming: tuple[AnnouncedWeights, float] | None = None
        self._is_closed = False
        self._changed = threading.Condition()
        self._is_over = False
        self._thread = threading.Thread(
            target=_pull, args=(weakref.ref(self),), name="flatweights-pull", daemon=True
        )
        self._thread.start()

    @property
    def newest(self) -> int:
        """The newest version that has arrived."""
        return self._newest

    @property
    def take(self) -> Callable[[int], News | None]:
        """Returns what has arrived."""
        return self._take

    def drop(self) -> None:
        """Do nothing: weights that have arrived are never written to."""

    def wait(self, seen: int, seconds: float) -> bool:
        """Sleep until the thread has brought something, or this has ended."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.newest > seen or self._is_over or self._is_closed, seconds
            )
            return self.newest > seen

    def told(self) -> Newest:
        """Return the newest weights as they were told, to pass them on."""
        assert self._arrived is not None
        return self._arrived[0].answer()

    def overdue(self, seen: int) -> Newest | None:
        """Return weights above ``seen`` that take long to fetch here: others may be faster."""
        coming = self._coming
        if coming is None or coming[0].version <= seen:
            return None
        is_late = _clock.now() - coming[1] >= _SOON + self._nbytes / _USUAL
        return coming[0].answer() if is_late else None

    def wait_for_end(self, seconds: float) -> bool:
        """Wait until a call says that the publisher has ended, or cannot be made."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._is_closed, seconds)
        return self._is_over

    def interrupt(self) -> None:
        """Make no further call."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """Make no further call, and keep no weights."""
        self.interrupt()
        with self._changed:
            self._arrived = self._coming = None

    def _take(self, seen: int) -> News | None:
        arrived = self._arrived
        if arrived is None or arrived[0].version <= seen:
            return None
        (version, published, _), buffer = arrived
        return version, published, buffer

    def pull(self) -> bool:
        """Make a call, and take what it brings; return whether there is another call to make."""
        with contextlib.suppress(Exception):  # nobody can be asked, or Ray is shut down
            check_connected()
            answer = None if self._is_closed else self._pull(self.newest)
            if answer is not None:
                if answer:
                    self._fetch(*answer)
                return True
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        return False

    def _fetch(self, version: int, age: float, told: Told) -> None:
        announced = AnnouncedWeights(version, _clock.now() - age, told)
        self._coming = announced, _clock.now()
        buffer: NDArray[np.uint8] = (
            answer_of(told[0], patience_of(self._nbytes)) if isinstance(told, list) else told
        )
        with self._changed:
            if self._is_closed:
                return
            self._arrived, self._newest, self._coming = (announced, buffer), version, None
            self._changed.notify_all()
