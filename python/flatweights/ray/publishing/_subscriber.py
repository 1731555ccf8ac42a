"""A subscriber of a name: it reads the newest weights when asked, and waits for no publisher."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import ray

from flatweights._forks import close_by, finalizer, in_forks
from flatweights._layout import Layout, unpickle_layout
from flatweights._locks import CallLock
from flatweights._weights import FlatWeights
from flatweights.ray import _clock
from flatweights.ray.channels._end import ChannelError
from flatweights.ray.peers._wait import check_timeout
from flatweights.ray.publishing import _names
from flatweights.ray.publishing._errors import StaleWeightsError
from flatweights.ray.publishing._models import check_layout, copy_of, target_of
from flatweights.ray.publishing._publication_server import FullError
from flatweights.ray.publishing._sources import News, Source
from flatweights.ray.publishing._transports import connect
from flatweights.ray.results._variables import Variables, scatter
from flatweights.ray.support._errors import (
    EARLIER_SESSION,
    IN_FORK,
    has_other_session,
    session_of_ray,
)

_TICK = 1.0  # seconds between two searches for a newer publisher, while this one is quiet
_SOON = 0.2  # the same, once this one has ended
_RETRY = 0.05  # seconds between two tries to connect at first
_NOTHING = object()  # no argument of `update` is this

# The errors of a publisher that has just ended, or whose relay has.
_GONE = (OSError, ChannelError, FullError, TimeoutError, ray.exceptions.RayError)


class Subscriber:
    """Reads the newest weights that the `Publisher` of a name has published.

    Any process of the Ray job can have one: a task, an actor, the driver. `update` looks for newer
    weights: this reads memory that the publisher maps, too, and makes no call. If there are newer
    weights, the variables are set straight from that memory. Publisher and subscriber never wait
    for each other, even if one of them is stopped or killed. A read returns one whole version, and
    versions only grow.

    A publisher that ends leaves its last weights to its subscribers. When there is a new publisher
    of its name, they find it by themselves, within about two seconds.

    Methods may be called from any thread; in a fork of the process, they raise.

    Attributes:
        name: The name.
        version: The version that `update` set last, or that `read` read if there are no variables;
            0 if there is none yet.
    """

    def __init__(
        self,
        name: str,
        variables: Any = None,
        *,
        timeout: float | None = 60.0,
        max_age: float | None = None,
    ) -> None:
        """Wait until there is a publisher of ``name``; it need not have published anything yet.

        If it has, it also waits until its weights have come to this node, if they do in time.

        Args:
            name: The name of the weights, within the Ray job.
            variables: The variables that `update` sets, with the layout of the published weights: a
                `flatweights.tensorflow.TensorFlowVariables` or any other `Variables`; or writable
                arrays, of the kinds that `flatweights.average` takes. If None, `update` needs an
                ``out``.
            timeout: Seconds to wait for a publisher; for ever, if None.
            max_age: Seconds. If the newest weights are older, `update` and `read` raise: a process
                whose learner is dead or cannot be reached does not act on for ever.

        Raises:
            TimeoutError: If there is no publisher in time; the error gives the reason.
            ValueError: If ``variables`` have another layout than the published weights, or
                ``timeout`` is negative, or ``max_age`` is not positive.
            TypeError: If ``variables`` are of a kind that cannot be set, or a time is no number.
            RuntimeError: If Ray is not initialized.
        """
        if not isinstance(name, str):
            raise TypeError(f"name: expected a text, got {name!r}")
        timeout, max_age = check_timeout(timeout), check_timeout(max_age, "max_age")
        if max_age is not None and not max_age > 0:
            raise ValueError(f"max_age: expected a positive number of seconds, got {max_age!r}")
        _names.this_node()
        self.name = name
        self.version = 0
        self._target = None if variables is None else target_of(variables, "variables")
        self._max_age = max_age
        self._checked: Any = _NOTHING  # the last argument of `update`: polls check it once
        self._published = 0.0  # the time of `version`, by `time.monotonic`
        self._state = state = _Subscription(name, self._target)
        state.connect(timeout)
        watcher = threading.Thread(target=state.watch, name="flatweights-subscriber", daemon=True)
        try:
            self._finalizer = finalizer(self, state.close)
            in_forks(self, Subscriber._end_copy)
            watcher.start()
        except BaseException:  # an interrupt, after which it may run
            state.close()
            raise

    @property
    def transport(self) -> str:
        """The transport by which the weights come.

        ``"shm"``: through memory of the publisher, on this node; ``"agent"``: through memory of an
        actor of this node that subscribes for all its processes; ``"store"``: through Ray's object
        store, if no memory can be shared.
        """
        return self._state.source.transport

    @property
    def age(self) -> float:
        """The seconds since `version` was published; infinite without a version."""
        return _clock.now() - self._published if self.version else float("inf")

    @property
    def behind(self) -> int:
        """The number of publications since `version`.

        If the publisher was restarted since, only those of the new publisher count.
        """
        newest = self._state.source.newest
        if newest // _names.VERSIONS == self.version // _names.VERSIONS:
            return max(0, newest - self.version)
        return max(0, newest % _names.VERSIONS)

    def update(self, out: Any = None) -> bool:
        """Set the variables to the newest weights; return False, at once, if nothing is new.

        Args:
            out: The variables to set instead of those of this subscriber: of the same kinds.

        Raises:
            StaleWeightsError: If the newest weights are older than ``max_age``.
            ValueError: If ``out`` has another layout, even if nothing is new; or the weights of a
                new publisher have.
            TypeError: If there are neither variables nor ``out``.
            RuntimeError: If this subscriber was closed, is of an earlier session of Ray, or in a
                fork of its process; or in a signal handler that interrupts a call of it in its
                thread.
            Exception: The exception of setting the variables.
        """
        with self._state.calls.ready():  # the buffer goes with that frame, before the lock
            return self._update(out)

    def read(self) -> FlatWeights:
        """Return a copy of the newest weights.

        Raises:
            StaleWeightsError: If they are older than ``max_age``.
            RuntimeError: If nothing has been published yet; or as `update`.
        """
        with self._state.calls.ready():
            return self._read()

    def _update(self, out: Any) -> bool:
        state = self._state
        target: Variables | None = None
        if out is not self._checked:  # a wrong one raises even if nothing is new
            target, self._checked = self._target_of(out), out
        news = state.take(self.version)
        if news is None:
            if self._max_age is not None:
                self._check_age(self._published if self.version else state.began)
            return False
        try:
            state.check_session()
            version, published, buffer = news
            if target is None:  # its arrays may have been replaced since
                target = self._target_of(out)
            self._check_age(published)
            scatter(target, buffer)
        except BaseException:
            state.source.drop()  # the traceback refers to the buffer
            raise
        self.version, self._published = version, published
        return True

    def _read(self) -> FlatWeights:
        state = self._state
        news = state.take(0)
        if news is None:
            raise RuntimeError(f"nothing has been published under {self.name!r} yet")
        try:
            state.check_session()
            version, published, buffer = news
            self._check_age(published)
            weights = copy_of(buffer, state.layout)
        except BaseException:
            state.source.drop()
            raise
        if self._target is None:
            self.version, self._published = version, published
        return weights

    def close(self) -> None:
        """Read no more. More calls do nothing."""
        close_by(self._finalizer)

    def __enter__(self) -> Subscriber:
        """Return the subscriber itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close it."""
        self.close()

    def __repr__(self) -> str:
        """Return name, version and transport."""
        return (
            f"<Subscriber of {self.name!r}, version {self.version}, transport {self.transport!r}>"
        )

    def __reduce__(self) -> NoReturn:
        """Refuse: a subscriber belongs to its process."""
        raise TypeError("a Subscriber cannot be pickled: make it in the process that reads")

    def _end_copy(self) -> None:
        self._state.calls = CallLock("subscriber")
        self._state.refuse(f"this process is a fork of its process. {IN_FORK}")

    def _target_of(self, out: Any) -> Variables:
        """Return the variables to set: ``out``, if given; raise unless they have the layout."""
        if out is None:
            if self._target is None:
                raise TypeError("update: expected variables or out, got neither: see read")
            self._state.check_variables()
            return self._target
        target = target_of(out, "out")
        check_layout(target.layout, self._state.layout, "out")
        return target

    def _check_age(self, published: float) -> None:
        age = _clock.now() - published
        if self._max_age is not None and age > self._max_age:
            raise StaleWeightsError(
                f"{self.name!r}: nothing was published for {age:.1f} s, expected at most "
                f"{self._max_age:g} s (max_age): {self._state.what_is_known()}"
            )


class _Subscription:
    """The state that a subscriber shares with the thread that watches over its source.

    Attributes:
        calls: Those that read; its lock is also held by a thread that changes the source.
        source: The source of the weights.
        take: The function of that name of the source.
        layout: The layout of the weights.
        began: The time at which the first source was found, by `time.monotonic`.
    """

    source: Source
    take: Callable[[int], News | None]
    layout: Layout

    def __init__(self, name: str, target: Variables | None) -> None:
        self.calls = CallLock("subscriber")
        self.began = 0.0
        self._name = name
        self._session = session_of_ray()
        self._target = target
        self._mismatch: ValueError | None = None
        # A newer publisher that has published nothing yet.
        self._next: tuple[Source, _names.PublisherRecord] | None = None
        self._who = ""
        self._is_over = False
        self._is_closed = False

    def connect(self, timeout: float | None) -> None:
        """Find the first source."""
        end = float("inf") if timeout is None else _clock.now() + timeout
        why, of = "there was none yet", -1  # and the number of the publisher
        while True:
            record = _names.find(self._name)
            if record is not None:
                try:
                    source = connect(self._name, record, min(end, _clock.now() + 3600))
                except _GONE as error:
                    # The end cuts the last attempt short, which tells less than one before it.
                    if of != record.number or not isinstance(error, TimeoutError):
                        why = f"{record.who} was the last: {type(error).__name__}: {error}"
                        of = record.number
                else:
                    self.began = _clock.now()
                    self._set(source, record)
                    if self._mismatch is not None:
                        source.close()
                        raise self._mismatch
                    return
            if _clock.now() >= end:
                others = _names.other_jobs_with(self._name)
                if others:
                    jobs = ", ".join(others)
                    why += f"; a name is local to its Ray job, and job {jobs} has used it, too"
                raise TimeoutError(
                    f"expected a publisher of {self._name!r} within {timeout:g} s; {why}"
                )
            _clock.sleep(_RETRY)

    def check_session(self) -> None:
        """Raise if this process has joined another session of Ray."""
        if has_other_session(self._session):
            self.refuse(EARLIER_SESSION)
            self.take(0)

    def check_variables(self) -> None:
        """Raise unless the weights have the layout of the variables."""
        if self._mismatch is not None:
            raise ValueError(str(self._mismatch))

    def what_is_known(self) -> str:
        """Return a clause for errors about the state of the publisher."""
        state = "has ended" if self._is_over else "is silent"
        if self.source.transport == "agent":  # an agent outlives its publisher, and may end before
            state = "has ended or is silent"
        return f"its publisher, {self._who}, {state}"

    def watch(self) -> None:
        """Look for another source when this one has ended, or there is a newer publisher."""
        seen = -1
        while True:
            source = self.source
            if self._is_over:
                _clock.sleep(_SOON)
            self._is_over = source.wait_for_end(0.0 if self._is_over else _TICK)
            if has_other_session(self._session):  # calls look only when there are weights
                self.refuse(EARLIER_SESSION)
                self._is_closed = True
            if self._is_closed:
                break
            # While weights come, their publisher is the newest of the name, or will soon learn that
            # it is not.
            if self._is_over or seen == source.newest:
                with contextlib.suppress(Exception):  # the publisher has ended, or Ray is shut down
                    self._switch()
            seen = source.newest
        with self.calls.ready():
            self.source.close()
            if self._next is not None:
                self._next[0].close()

    def _switch(self) -> None:
        """Go on with a newer publisher, once it has published something."""
        if self._next is None or self._has_ended_empty(self._next[0]):
            self._find()
        if self._next is None:
            return
        old, (source, record) = self.source, self._next
        if _has_published(source) or not old.newest:
            with self.calls.ready():
                self._next = None
                self._set(source, record)
                old.close()
            self._is_over = False

    def _find(self) -> None:
        """Connect to a newer publisher, if there is one."""
        if self._next is not None:
            self._next[0].close()
            self._next = None
        old = self.source
        if not _names.is_superseded(self._name, old.number) and (
            old.transport == "shm" or not self._is_over
        ):
            return  # if it has ended, nothing is new until there is another publisher
        record = _names.find(self._name)
        if record is not None:
            source = connect(self._name, record, _clock.now() + 10 * _TICK)
            self._next = source, record

    def _has_ended_empty(self, source: Source) -> bool:
        """Whether ``source`` has nothing, and will have nothing any more."""
        if _has_published(source):
            return False
        return source.wait_for_end(0.0) or _names.is_superseded(self._name, source.number)

    def _set(self, source: Source, record: _names.PublisherRecord) -> None:
        self.layout = unpickle_layout(source.layout)
        self.source = source
        self.take = source.take
        self._who = record.who
        self._mismatch = None
        if self._target is not None:
            try:
                check_layout(self._target.layout, self.layout, "variables")
            except ValueError as error:
                self._mismatch = error
        if self._is_closed:  # another thread has closed it since
            self.refuse("it was closed")

    def close(self) -> None:
        """Make the thread close the source; nothing can be taken any more."""
        self._is_closed = True
        self.refuse("it was closed")
        self.source.interrupt()

    def refuse(self, why: str) -> None:
        """Make `take` raise."""
        self.take = functools.partial(_refuse, f"the subscriber of {self._name!r}: {why}")


def _has_published(source: Source) -> bool:
    """Whether weights of its own publisher have come: a relay may have those of an earlier one."""
    return source.newest > source.number * _names.VERSIONS


def _refuse(why: str, seen: int) -> NoReturn:
    raise RuntimeError(why)
