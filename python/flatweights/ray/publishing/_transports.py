"""The transports by which published weights reach a process, and the choice among them.

On the publisher's node, subscribers read its server. On another node, they read the server of that
node's relay, which the first subscriber starts. The relay pulls from the proxy on the publisher's
node, so each version travels there once. If no memory can be shared, a subscriber pulls from the
proxy itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import ray
from numpy.typing import NDArray

from flatweights._settings import ray_setting
from flatweights.ray import _clock
from flatweights.ray.channels._end import ChannelError
from flatweights.ray.peers._shared_actor import shared_actor
from flatweights.ray.publishing._answer import answer_of
from flatweights.ray.publishing._names import PublisherRecord, find, is_superseded, this_node
from flatweights.ray.publishing._publication_server import (
    FullError,
    PublicationAddress,
    PublicationServer,
)
from flatweights.ray.publishing._sources import PULL, BoardSource, PulledSource, Source

_TRY = 2.0  # seconds after which a publication server that does not answer counts as stopped
_IDLE = 10.0  # seconds without readers after which an actor of a node ends
_LOOK = 0.5  # seconds between two looks of an actor at its readers
_INLINE = 100 << 10  # bytes up to which an array travels with the answer
_START = 60.0  # seconds in which an actor has to start

_log = logging.getLogger("flatweights")


def connect(name: str, record: PublisherRecord, end: float) -> Source:
    """Return the source from which this process gets the weights of a publisher.

    If there are some, it waits until they have come to this node.

    Args:
        name: The name.
        record: The publisher.
        end: The time at which to give up, by `time.monotonic`.

    Raises:
        OSError: If the publisher has ended, or does not answer.
        FullError: If it has too many readers.
        ray.exceptions.RayError: If an actor cannot be reached.
    """
    node, layout = this_node(), record.layout
    why = f"{os.environ.get('FLATWEIGHTS_RAY')!r} is chosen"
    if ray_setting() != "store":
        transport, address = "shm", record.address
        try:
            if record.node != node:
                transport = "agent"
                layout, address = _relay_board(name, node, end)
            until = min(end, _clock.now() + _TRY)
            return BoardSource(transport, record.number, layout, address, until)
        except TimeoutError:  # it is stopped or slow, perhaps not for long
            raise
        except (OSError, ChannelError, ValueError) as error:
            why = f"{type(error).__name__}: {error}"
    proxy = proxy_of(name, record)
    try:
        newest = answer_of(proxy.ping.remote(), max(0.0, end - _clock.now()))
    except ray.exceptions.RayTaskError as error:
        raise ConnectionError(str(error.cause)) from None
    _log.info("weights of %r come through Ray: %s", name, why)
    source = PulledSource("store", record.number, record.layout, proxy)
    try:
        while newest and not (source.wait(0, _LOOK) or source.wait_for_end(0.0)):
            if _clock.now() >= end:
                break
    except BaseException:
        source.close()
        raise
    return source


def proxy_of(name: str, record: PublisherRecord) -> ray.actor.ActorHandle:
    """Return the actor on the publisher's node that reads for others."""
    proxy = f"proxy:{name}:{record.number}"
    return shared_actor(Proxy, proxy, record.node, 64, name, tuple(record))


def _relay_board(name: str, node: str, end: float) -> tuple[bytes, PublicationAddress]:
    """Return layout and address of the server of the relay of this ``node``."""
    relay = shared_actor(Relay, f"relay:{name}:{node}", node, 16, name)
    seconds = max(0.0, end - _clock.now())
    layout, address = answer_of(relay.serve.remote(seconds), seconds + _LOOK)
    return layout, PublicationAddress(*address)


Newest: TypeAlias = tuple[int, float, "NDArray[np.uint8] | list[ray.ObjectRef]"]
"""Version, time and bytes of weights; the bytes perhaps as a reference, in a list."""


class Proxy:
    """The actor on the publisher's node from which others pull. It ends when none of them does."""

    def __init__(self, name: str, record: tuple[Any, ...]) -> None:
        """Connect to the server of the publisher."""
        self._name = name
        self._record = PublisherRecord(*record)
        self._asked = _clock.now()
        self._turn = threading.Lock()
        self._put: Newest | None = None
        self._source: BoardSource | None = None
        _start(self._watch, ray.get_runtime_context().current_actor)

    def ping(self) -> int:
        """Return the newest version, 0 if there is none yet, if the publisher can be read.

        Raises:
            ConnectionError: If the publisher cannot be read.
        """
        self._asked = _clock.now()
        with self._turn:
            if self._source is None:
                address, end = PublicationAddress(*self._record.address), _clock.now() + _TRY
                try:
                    self._source = BoardSource("shm", self._record.number, b"", address, end)
                except (OSError, FullError, ChannelError, ValueError) as error:
                    raise ConnectionError(f"{type(error).__name__}: {error}") from None
            if self._source.wait_for_end(0.0):
                raise ConnectionError("the publisher has ended")
            return self._source.newest

    def newer(self, seen: int) -> Newest | tuple[()] | None:
        """Return version, age and bytes of weights newer than ``seen``, once there are any.

        Returns:
            The bytes as an array, or a reference to it in a list; an empty tuple if there is
            nothing new for a while; None if the publisher has ended or is superseded.
        """
        self._asked = _clock.now()
        source = self._source
        if source is None:
            return None
        end = self._asked + PULL
        while not source.wait(seen, max(0.0, min(_LOOK, end - _clock.now()))):
            if source.wait_for_end(0.0) or is_superseded(self._name, self._record.number):
                return None
            if _clock.now() >= end:
                return ()
        with self._turn:
            version, published, buffer = self._newest(source)
            return version, _clock.now() - published, buffer

    def _newest(self, source: BoardSource) -> Newest:
        """Return version, time and bytes; of each version, there is one object in Ray's store."""
        before = 0 if self._put is None else self._put[0]
        news = source.take(before)
        if news is not None:
            version, published, buffer = news
            kept = [ray.put(buffer)] if buffer.nbytes > _INLINE else buffer.copy()
            self._put = version, published, kept
        assert self._put is not None
        return self._put

    def _watch(self) -> None:
        while _clock.now() - self._asked < _IDLE:
            _clock.sleep(_LOOK)


class Relay:
    """The actor of a node that reads for all its processes. It ends when it has no readers."""

    def __init__(self, name: str) -> None:
        """Begin to look for the publisher of ``name``."""
        self._name = name
        self._asked = _clock.now()
        self._asking = 0  # calls of `serve` that wait
        self._seen = 0
        self._layout = b""
        self._server: PublicationServer | None = None
        self._is_offered = False  # once it has what there was to read when it was made
        self._changed = threading.Condition()
        _start(self._run, ray.get_runtime_context().current_actor)

    def serve(self, seconds: float) -> tuple[bytes, tuple[Any, ...]]:
        """Return the layout of the weights, and the address of the server.

        It waits for the first weights if the publisher has some, for otherwise readers on this node
        would find nothing that was published long ago.

        Raises:
            TimeoutError: If there is no server within ``seconds``.
        """
        with self._changed:
            self._asking += 1
            try:
                self._changed.wait_for(lambda: self._is_offered, seconds)
                if self._server is None:
                    raise TimeoutError("the publisher cannot be read from this node")
                return self._layout, tuple(self._server.address)
            finally:
                self._asking -= 1
                self._asked = _clock.now()

    @property
    def _is_needed(self) -> bool:
        server = self._server
        idle = _clock.now() - self._asked
        return self._asking > 0 or (idle if server is None else min(idle, server.idle)) < _IDLE

    def _run(self) -> None:
        ended = -1  # the number of the last publisher that has ended
        while self._is_needed:
            with contextlib.suppress(ray.exceptions.RayError):
                record = find(self._name)
                if record is not None and record.number > ended:
                    self._relay(record)
                    ended = record.number if is_superseded(self._name, record.number) else ended
            _clock.sleep(_LOOK)

    def _relay(self, record: PublisherRecord) -> None:
        """Copy the versions of a publisher to the server, until it has ended."""
        proxy = proxy_of(self._name, record)
        newest = answer_of(proxy.ping.remote(), _START)
        server = self._server_for(record, is_offered=not newest)
        source = PulledSource("store", record.number, record.layout, proxy)
        try:
            while self._is_needed and not source.wait_for_end(0.0):
                if not source.wait(self._seen, _LOOK):
                    continue
                news = source.take(self._seen)
                if news is not None:
                    self._publish(server, *news)
                    self._offer()
        finally:
            source.interrupt()
            self._offer()

    def _offer(self) -> None:
        if not self._is_offered:
            with self._changed:
                self._is_offered = True
                self._changed.notify_all()

    def _server_for(self, record: PublisherRecord, *, is_offered: bool) -> PublicationServer:
        with self._changed:
            old = self._server
            if old is None or self._layout != record.layout:
                self._server = PublicationServer(record.address.nbytes)
                self._layout = record.layout
                self._is_offered = is_offered
                self._changed.notify_all()
                if old is not None:
                    old.close()
            assert self._server is not None
            return self._server

    def _publish(
        self, server: PublicationServer, version: int, published: float, buffer: NDArray[np.uint8]
    ) -> None:
        target: NDArray[np.uint8] = server.publication.begin()
        np.copyto(target, buffer)
        del target
        server.publication.commit(version, _clock.now() - published)
        self._seen = version


def _start(run: Callable[[], None], actor: ray.actor.ActorHandle) -> None:
    """Run a thread, and end the ``actor`` with it."""

    def serve() -> None:
        try:
            run()
        finally:
            ray.kill(actor)

    threading.Thread(target=serve, name="flatweights-publishing", daemon=True).start()
