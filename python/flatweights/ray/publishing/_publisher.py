"""The publisher of a name: it writes each version once, for all readers."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any, NoReturn

from flatweights._forks import close_by, finalizer, in_forks
from flatweights._locks import CallLock
from flatweights.ray import _clock
from flatweights.ray.publishing import _names
from flatweights.ray.publishing._errors import SupersededError
from flatweights.ray.publishing._models import check_layout, source_of
from flatweights.ray.publishing._publication_server import PublicationServer, take_over
from flatweights.ray.support._errors import (
    EARLIER_SESSION,
    IN_FORK,
    has_other_session,
    session_of_ray,
)

_HANDOVER = 2.0  # seconds for which a publisher waits for the one before it to stop


class Publisher:
    """Publishes the newest weights of a model to any process of a Ray job.

    `publish` copies the weights once, into memory that every `Subscriber` of this node maps, and
    does not wait for them. A subscriber gets the newest weights when it asks; there is no queue.

    There is one publisher for each name. A new publisher of a name takes over: the older one
    raises, and subscribers continue with the new one's weights. So a restarted learner publishes
    again under its name. Versions always grow: the n-th restart begins with ``n * 10**12 + 1``.

    >>> import numpy as np
    >>> import ray
    >>> _ = ray.init(num_cpus=2, log_to_driver=False, ignore_reinit_error=True)
    >>> weights = {"w": np.zeros(2)}
    >>> publisher = Publisher("doctest", weights)
    >>> weights["w"] += 1.0
    >>> publisher.publish()
    1
    >>> from flatweights.ray import Subscriber
    >>> actor_weights = {"w": np.zeros(2)}
    >>> subscriber = Subscriber("doctest", actor_weights)
    >>> subscriber.update(), actor_weights["w"], subscriber.update()
    (True, array([1., 1.]), False)

    Methods may be called from any thread.

    Attributes:
        name: The name.
    """

    def __init__(self, name: str, variables: Any) -> None:
        """Become the publisher of ``name``; nothing is published yet.

        Args:
            name: The name of the weights, within the Ray job.
            variables: The source from which `publish` reads them: a
                `flatweights.tensorflow.TensorFlowVariables` or any other `Variables`, gathered
                straight into the published memory; or any model that `flatweights.average` takes:
                an array, `FlatWeights`, a mapping or a sequence of arrays, nested containers.

        Raises:
            TypeError: If ``variables`` is something else.
            RuntimeError: If Ray is not initialized.
            OSError: If there is no memory for three copies; or if the system has no such memory,
                because it is not Linux.
        """
        if not isinstance(name, str):
            raise TypeError(f"name: expected a text, got {name!r}")
        _names.this_node()
        self._session = session_of_ray()
        self.name = name
        self._source = source_of(variables, "variables")
        self._layout = self._source.layout
        self._calls = CallLock("publisher")
        self._over = ""
        tick = weakref.WeakMethod(self._tick)
        self._server = PublicationServer(self._layout.nbytes, lambda: _call(tick))
        self._finalizer = finalizer(self, self._server.close)
        try:
            self._server.start()
            self._record, before = _names.register(name, self._layout.pickled, self._server.address)
        except BaseException:
            close_by(self._finalizer)
            raise
        self._before = self._record.number * _names.VERSIONS  # no version is that low
        in_forks(self, Publisher._end_copy)
        if before is not None and before.node == self._record.node:
            end = _clock.now() + _HANDOVER
            # The last publisher may have ended, or be stopped: then it learns it from the records.
            with contextlib.suppress(OSError, RuntimeError, ValueError):
                take_over(before.address, end)

    @property
    def version(self) -> int:
        """The version that was published last; 0 if there is none."""
        return self._server.publication.newest

    def publish(self, weights: Any = None) -> int:
        """Publish the weights as they are now; return their version.

        Each byte is copied once. It never waits for a reader, even if readers are stopped or
        killed. NaN and infinity are published, too: `flatweights.isfinite` looks for them.

        Args:
            weights: Weights to publish instead of ``variables``, with the same layout: for
                frameworks that replace their arrays at each step.

        Raises:
            SupersededError: If another publisher of this name has taken over.
            ValueError: If ``weights`` have another layout.
            RuntimeError: If this publisher was closed, is of an earlier session of Ray, or in a
                fork of its process; or in a signal handler that interrupts a call of this method in
                its thread.
            OSError: If there is no memory for another slot, because stopped readers hold the
                others.
            Exception: The exception of reading ``variables``; then nothing is published.
        """
        self._check()
        source = self._source
        if weights is not None:
            source = source_of(weights, "weights")
            check_layout(source.layout, self._layout, "weights")
        with self._calls.ready():
            self._check()
            publication = self._server.publication
            try:
                buffer = publication.begin()
            except RuntimeError:
                self._check()  # it was closed meanwhile
                raise
            try:
                source.gather_into(buffer)
            except BaseException:
                publication.abandon()
                raise
            del buffer
            number = max(publication.newest, self._before) + 1  # also after an interrupt
            publication.commit(number)
            return number

    def close(self) -> None:
        """Stop publishing; subscribers keep their weights. Further calls do nothing."""
        self._over = self._over or "it was closed"
        close_by(self._finalizer)

    def __enter__(self) -> Publisher:
        """Return the publisher itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close it."""
        self.close()

    def __repr__(self) -> str:
        """Return name and version."""
        return f"<Publisher of {self.name!r}, version {self.version}>"

    def __reduce__(self) -> NoReturn:
        """Refuse: a publisher belongs to its process."""
        raise TypeError("a Publisher cannot be pickled: make it in the process that publishes")

    def _check(self) -> None:
        if not self._over and has_other_session(self._session):
            self._over = EARLIER_SESSION
            close_by(self._finalizer)
        if self._over:
            raise RuntimeError(f"the publisher of {self.name!r}: {self._over}")
        if self._server.is_superseded:
            who = ""
            with contextlib.suppress(Exception):  # Ray may be shut down
                newer = _names.find(self.name)
                who = "" if newer is None else f": {newer.who}"
            raise SupersededError(f"another publisher of {self.name!r} has taken over{who}")
        if self._server.is_closed:  # at the end of the process
            raise RuntimeError(f"the publisher of {self.name!r}: it was closed")

    def _end_copy(self) -> None:
        self._over = f"this process is a fork of the publisher's. {IN_FORK}"

    def _tick(self) -> None:
        """Close the server if this publisher is superseded and the newer one could not tell it."""
        with contextlib.suppress(Exception):  # Ray may be shut down
            if _names.is_superseded(self.name, self._record.number):
                self._server.supersede()


def _call(method: weakref.WeakMethod[Any]) -> None:
    bound = method()
    if bound is not None:
        bound()
