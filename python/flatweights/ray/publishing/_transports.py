"""The transports by which published weights reach a process, and the choice among them.

On the publisher's node, subscribers read its server. On another node, they read the server of that
node's relay, which the first subscriber starts, so each version travels there once. The first
relays pull from the proxy on the publisher's node, later ones from earlier ones (`RelayTree`): one
answers with large weights once these are in Ray's store on its node, and Ray fetches them from any
node that has them. If no memory can be shared, a subscriber pulls from the proxy itself.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from flatweights._settings import ray_setting
from flatweights.ray import _clock
from flatweights.ray.channels._end import ChannelError, is_shortage
from flatweights.ray.peers._shared_actor import shared_actor
from flatweights.ray.publishing._answer import answer_of
from flatweights.ray.publishing._names import PublisherRecord, find, is_superseded, this_node
from flatweights.ray.publishing._publication_server import (
    FullError,
    PublicationAddress,
    PublicationServer,
)
from flatweights.ray.publishing._relay_tree import CHILDREN, MANY_CHILDREN, RelayTree
from flatweights.ray.publishing._sources import (
    PULL,
    AnnouncedWeights,
    Answer,
    PulledSource,
    SharedMemorySource,
    Source,
    Told,
    patience_of,
)

_TRY = 2.0  # seconds after which a publication server that does not answer counts as stopped
_IDLE = 10.0  # seconds without readers after which an actor of a node ends
_LOOK = 0.5  # seconds between two looks of an actor at its readers
_INLINE = 100 << 10  # bytes up to which an array travels with the answer
_START = 60.0  # seconds in which an actor has to start
_GRACE = 10.0  # seconds beyond `PULL` after which a proxy that does not answer counts as ended
_RELAY_GRACE = 3.0  # the same of a relay, in whose place another one answers
_AGAIN = 60.0  # seconds after which a relay asks for its place again: others may be back
_KNOWN = 0.5  # seconds in which Ray knows of a copy
_SOON = 0.002  # seconds between two looks whether it does

_log = logging.getLogger("flatweights")


def connect(name: str, record: PublisherRecord, end: float) -> Source:
    """Return the source from which this process gets the weights of a publisher.

    If there are some, it waits until they have come to this node.

    Args:
        name: The name.
        record: The publisher.
        end: The time at which to give up, by `time.monotonic`.

    Raises:
        OSError: If the publisher has ended, or does not answer; or cannot be read from this node;
            or, on its way through Ray, if there is a newer one meanwhile; or if descriptors are
            short.
        ChannelError: If descriptors are short.
        FullError: If it has too many readers.
        ray.exceptions.RayError: If an actor cannot be reached.
    """
    node, layout = this_node(), record.layout
    why = f"{os.environ.get('FLATWEIGHTS_RAY')!r} is chosen"
    if ray_setting() != "store":
        transport, address = "shm", record.address
        relay = None if record.node == node else _relay_of(name, node)
        try:
            if relay is not None:
                transport = "agent"
                layout, address = _relay_address(relay, record.number, end)
                if layout != record.layout:
                    raise TimeoutError("its node still reads from another publisher of the name")
            until = min(end, _clock.now() + _TRY)
            return SharedMemorySource(transport, record.number, layout, address, until)
        except (OSError, ChannelError, ValueError) as error:
            # It is stopped or slow, or descriptors are short: perhaps not for long. Memory that is
            # short for one model may stay so.
            if is_shortage(error) and getattr(error, "errno", None) != errno.ENOMEM:
                raise
            why = f"{type(error).__name__}: {error}"
    try:
        proxy, newest = _answering_proxy(name, record, end)
    except ray.exceptions.RayTaskError as error:
        raise ConnectionError(str(error.cause)) from None
    except ray.exceptions.GetTimeoutError as error:
        raise ConnectionError(f"{why}; through Ray, {error}") from None
    _log.info("weights of %r come through Ray: %s", name, why)
    source = PulledSource(record, lambda seen: _pulled(proxy, seen))
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


def _answering_proxy(
    name: str, record: PublisherRecord, end: float
) -> tuple[ray.actor.ActorHandle, int]:
    """Return a publisher's proxy, and the newest version that it has; see `connect`.

    The publisher may have ended: nothing else tells a process that cannot share its memory. So it
    looks for a newer one before it starts the proxy, which takes seconds, and meanwhile.
    """
    asked: tuple[ray.actor.ActorHandle, ray.ObjectRef] | None = None
    while True:
        if is_superseded(name, record.number):
            raise ConnectionError(f"another publisher has taken over from {record.who}")
        if asked is None:
            proxy = proxy_of(name, record)
            asked = proxy, proxy.ping.remote()
        left = end - _clock.now()
        try:
            return asked[0], answer_of(asked[1], max(0.0, min(left, _LOOK)))
        except ray.exceptions.GetTimeoutError:
            if left <= _LOOK:
                raise


def _relay_of(name: str, node: str) -> ray.actor.ActorHandle:
    """Return the relay of this ``node``."""
    return shared_actor(Relay, f"relay:{name}:{node}", node, 256, name)


def _relay_address(
    relay: ray.actor.ActorHandle, number: int, end: float
) -> tuple[bytes, PublicationAddress]:
    """Return layout and address of the server of a relay; see `Relay.serve`."""
    try:
        call = relay.serve.remote(number, end)
        layout, address = answer_of(call, max(0.0, end - _clock.now()) + _LOOK)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    return layout, PublicationAddress(*address)


def _pulled(proxy: ray.actor.ActorHandle, seen: int) -> Answer:
    answer: Answer = answer_of(proxy.newer.remote(seen), PULL + _GRACE)
    return answer


class Proxy:
    """The actor on the publisher's node from which others pull. It ends when none of them does."""

    def __init__(self, name: str, record: tuple[Any, ...]) -> None:
        """Connect to the server of the publisher."""
        self._name = name
        self._record = PublisherRecord(*record)
        self._asked = _clock.now()
        self._turn = threading.Lock()
        self._put: AnnouncedWeights | None = None
        self._source: SharedMemorySource | None = None
        self._fetched_until = 0.0  # the time until which others may fetch what they were told of
        is_small = self._record.address.nbytes <= _INLINE
        self._tree: RelayTree[Any] = RelayTree(MANY_CHILDREN if is_small else CHILDREN)
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
                    self._source = SharedMemorySource(
                        "shm", self._record.number, b"", address, end, for_others=True
                    )
                except (OSError, FullError, ChannelError, ValueError) as error:
                    raise ConnectionError(f"{type(error).__name__}: {error}") from None
            if self._source.wait_for_end(0.0):
                raise ConnectionError("the publisher has ended")
            return self._source.newest

    def place(
        self, node: str, relay: ray.actor.ActorHandle, lost: ray.actor.ActorHandle | None
    ) -> ray.actor.ActorHandle | None:
        """Return the relay from which that of ``node`` is to pull; None, if from this actor.

        Args:
            node: The node.
            relay: Its relay.
            lost: A relay from which it cannot pull any more.
        """
        self._asked = _clock.now()
        with self._turn:
            return self._tree.parent_of(node, relay, lost)

    def newer(self, seen: int) -> Answer:
        """Return weights newer than ``seen``, once there are any.

        Returns:
            None if the publisher has ended or is superseded.
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
            newest = self._newest(source)
            self._asked = _clock.now()
            if isinstance(newest.told, list):
                self._fetched_until = self._asked + patience_of(self._record.address.nbytes)
            return newest.answer()

    def _newest(self, source: SharedMemorySource) -> AnnouncedWeights:
        """Return the newest weights; of each version, there is one object in Ray's store."""
        before = 0 if self._put is None else self._put.version
        news = source.take(before)
        if news is not None:
            version, published, buffer = news
            try:
                kept = [ray.put(buffer)] if buffer.nbytes > _INLINE else buffer.copy()
            except BaseException:
                source.drop()  # the traceback refers to the buffer
                raise
            self._put = AnnouncedWeights(version, published, kept)
        assert self._put is not None
        return self._put

    def _watch(self) -> None:
        while True:
            # The object is lost with this process, while others may still fetch it.
            if _clock.now() >= max(self._asked + _IDLE, self._fetched_until):
                break
            _clock.sleep(_LOOK)


class Relay:
    """The actor of a node that reads for all its processes, and for relays of other nodes.

    It ends when nobody has asked it for a while.
    """

    def __init__(self, name: str) -> None:
        """Begin to look for the publisher of ``name``."""
        self._name = name
        self._asked = _clock.now()
        self._asking = 0  # calls of `serve` that wait
        self._seen = 0
        self._layout = b""
        self._server: PublicationServer | None = None
        self._number = -1  # of the last publisher that it could read
        self._is_offered = False  # once it has what that publisher had then
        # The arguments of the `OSError` by which there is none for the weights, now.
        self._no_server: tuple[Any, ...] | None = None
        self._why = "it has not been tried"  # that the publisher cannot be read
        self._source: PulledSource | None = None
        self._changed = threading.Condition()
        self._actor = ray.get_runtime_context().current_actor
        _start(self._run, self._actor)

    def serve(self, number: int, end: float) -> tuple[bytes, tuple[Any, ...]]:
        """Return the layout of the weights, and the address of the server.

        It waits for the first weights if the publisher has some, for otherwise readers on this node
        would find nothing that was published long ago.

        Args:
            number: The number of the publisher; a later one is as good.
            end: The time at which to give up, by `time.monotonic`, which is the same in all
                processes of the node.

        Raises:
            OSError: If there is no memory for a server.
            TimeoutError: If there is no server at that time; the error gives the reason.
        """
        with self._changed:
            self._asking += 1
            try:
                self._changed.wait_for(
                    lambda: (
                        self._no_server is not None or (self._is_offered and self._number >= number)
                    ),
                    max(0.0, end - _clock.now()),
                )
                if self._no_server is not None:
                    raise OSError(*self._no_server)
                if self._server is None or self._number < number:
                    raise TimeoutError(f"the publisher cannot be read from this node: {self._why}")
                return self._layout, tuple(self._server.address)
            finally:
                self._asking -= 1
                self._asked = _clock.now()

    def newer(self, number: int, seen: int) -> Answer:
        """Return weights of a publisher newer than ``seen``, once they have come to this node.

        Args:
            number: The number of the publisher.
            seen: A version.

        Returns:
            None if this relay has lost that publisher, or goes on with a newer one.
        """
        self._asked = _clock.now()
        with self._changed:
            source = self._source
        if source is None or source.number != number:
            return None
        if source.wait(seen, PULL):
            _wait_until_known(source.told()[2])
            return source.told()
        return None if source.wait_for_end(0.0) else source.overdue(seen) or ()

    @property
    def _is_needed(self) -> bool:
        server = self._server
        idle = _clock.now() - self._asked
        return self._asking > 0 or (idle if server is None else min(idle, server.idle)) < _IDLE

    def _run(self) -> None:
        ended = -1  # the number of the last publisher that has ended
        while self._is_needed:
            try:
                record = find(self._name)
                if record is not None and record.number > ended:
                    self._relay(record)
                    ended = record.number if is_superseded(self._name, record.number) else ended
            except Exception as error:  # it is tried again, and readers are told
                cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
                self._why = f"{type(cause).__name__}: {cause}"
            _clock.sleep(_LOOK)

    def _relay(self, record: PublisherRecord) -> None:
        """Copy the versions of a publisher to the server, until it has ended."""
        proxy, newest = _answering_proxy(self._name, record, _clock.now() + _START)
        server = self._server_for(record, newest)
        pull = RelayPull(record.number, proxy, self._actor)
        with self._changed:  # others may ask as soon as it has a place
            source = self._source = PulledSource(record, pull)
        try:
            while self._is_needed and not source.wait_for_end(0.0):
                if source.wait(self._seen, _LOOK):
                    self._pass_on(server, source)
                elif is_superseded(self._name, record.number):
                    break  # the proxy would say so, too, unless it is stopped
            self._pass_on(server, source)  # the last weights, if they came just then
        finally:
            self._source = None
            source.interrupt()
            self._offer()

    def _pass_on(self, server: PublicationServer, source: PulledSource) -> None:
        news = source.take(self._seen)
        if news is not None:
            self._publish(server, *news)
            self._offer()

    def _offer(self) -> None:
        if not self._is_offered:
            with self._changed:
                self._is_offered = True
                self._changed.notify_all()

    def _server_for(self, record: PublisherRecord, newest: int) -> PublicationServer:
        """Return a server for the weights of a publisher that has published ``newest``."""
        with self._changed:
            old = self._server
            if old is None or self._layout != record.layout:
                try:
                    server = PublicationServer(record.address.nbytes)
                except OSError as error:
                    self._no_server = error.args
                    self._changed.notify_all()
                    raise
                server.start()
                self._server, self._layout = server, record.layout
                if old is not None:
                    old.close()
            assert self._server is not None
            self._no_server, self._number = None, record.number
            self._is_offered = newest <= self._seen
            self._changed.notify_all()
            return self._server

    def _publish(
        self, server: PublicationServer, version: int, published: float, buffer: NDArray[np.uint8]
    ) -> None:
        target: NDArray[np.uint8] = server.publication.begin()
        np.copyto(target, buffer)
        del target
        server.publication.commit(version, _clock.now() - published)
        self._seen = version


def _wait_until_known(told: Told) -> None:
    """Wait until Ray fetches large weights from this node, too: it learns of copies later."""
    node, end = this_node(), _clock.now() + _KNOWN
    # The owner may be too busy to answer: then others fetch from elsewhere.
    with contextlib.suppress(ray.exceptions.RayError):
        while isinstance(told, list) and (left := end - _clock.now()) > 0:
            found = ray.experimental.get_object_locations(told, max(1, int(1000 * left)))
            if any(node in one["node_ids"] for one in found.values()):
                break
            _clock.sleep(_SOON)


class RelayPull:
    """The calls by which a relay gets newer weights, of another relay or the proxy."""

    def __init__(
        self, number: int, proxy: ray.actor.ActorHandle, relay: ray.actor.ActorHandle
    ) -> None:
        """Take the number of the publisher, its proxy, and the relay itself."""
        self._number = number
        self._proxy = proxy
        self._relay = relay
        self._parent: ray.actor.ActorHandle | None = None
        self._placed = -float("inf")  # the time at which it has got its place
        self._lasts = _AGAIN  # seconds for which it keeps that

    def __call__(self, seen: int) -> Answer:
        """Return what there is above ``seen``; a relay that does not answer is asked no more."""
        if _clock.now() - self._placed > self._lasts:
            self._place(None)
        while self._parent is not None:
            answer: Answer = None
            with contextlib.suppress(ray.exceptions.RayError):
                call = self._parent.newer.remote(self._number, seen)
                answer = answer_of(call, PULL + _RELAY_GRACE)
            if answer is not None:
                return answer
            self._lasts *= 2
            self._place(self._parent)
        return _pulled(self._proxy, seen)

    def _place(self, lost: ray.actor.ActorHandle | None) -> None:
        """Get a parent, another one than that which is ``lost``."""
        call = self._proxy.place.remote(this_node(), self._relay, lost)
        self._parent, self._placed = answer_of(call, _START), _clock.now()


def _start(run: Callable[[], None], actor: ray.actor.ActorHandle) -> None:
    """Run a thread, and end the ``actor`` with it."""

    def serve() -> None:
        try:
            run()
        finally:
            ray.kill(actor)

    threading.Thread(target=serve, name="flatweights-publishing", daemon=True).start()
