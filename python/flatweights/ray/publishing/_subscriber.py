"""A subscriber of a name: it reads the newest weights when it wants them, and waits for nobody."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import ray

from flatweights._layout import Layout, unpickle_layout
from flatweights._weights import FlatWeights
from flatweights.ray._variables import Variables
from flatweights.ray.lanes._end import LaneError
from flatweights.ray.peers._wait import check_timeout
from flatweights.ray.publishing import _names
from flatweights.ray.publishing._board import FullError
from flatweights.ray.publishing._errors import StaleWeightsError
from flatweights.ray.publishing._models import check_layout, copy_of, target_of
from flatweights.ray.publishing._sources import News, Source
from flatweights.ray.publishing._ways import connect

_TICK = 1.0  # seconds between two looks for a newer publisher, while this one is quiet
_SOON = 0.2  # the same, once this one has ended
_RETRY = 0.05  # seconds between two tries to connect at first

# What may go wrong with a publisher that has just ended, or whose relay has.
_GONE = (OSError, LaneError, FullError, TimeoutError, ray.exceptions.RayError)


class Subscriber:
    """Reads the newest weights that the `Publisher` of a name has published.

    Any process of the Ray job can have one: a task, an actor, the driver. `update` asks whether
    there is something new: a read of memory that the publisher maps, too, without a call. If there
    is, the variables are set straight from that memory. Neither waits for the other, whatever is
    stopped or killed; what is read is always one version as a whole, and versions only grow.

    A publisher that ends leaves its last weights to its subscribers; when one comes under its name
    again, they find it by themselves, within a second.

    Methods may be called from any thread; a fork of the process needs a subscriber of its own.

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

        Args:
            name: Of the weights, within the Ray job.
            variables: What `update` sets, with the layout of what is published: a
                `flatweights.tensorflow.TensorFlowVariables` or any other `Variables`; or writable
                arrays, of the kinds that `flatweights.average` takes. If None, `update` needs an
                ``out``.
            timeout: Seconds to wait for a publisher; for ever, if None.
            max_age: Seconds. If the newest weights are older, `update` and `read` raise: a process
                whose learner is dead or cannot be reached does not act on for ever.

        Raises:
            TimeoutError: If there is no publisher in time; it says why.
            ValueError: If ``variables`` have another layout than what is published.
            TypeError: If ``variables`` are of no kind that can be set.
            RuntimeError: If Ray is not initialized.
        """
        if not isinstance(name, str):
            raise TypeError(f"name: expected a text, got {name!r}")
        check_timeout(timeout)
        if max_age is not None and not max_age > 0:
            raise ValueError(f"max_age: expected a positive number of seconds, got {max_age!r}")
        _names.this_node()
        self.name = name
        self.version = 0
        self._target = None if variables is None else target_of(variables, "variables")
        self._max_age = max_age
        self._published = 0.0  # when `version` was, by `time.monotonic`
        self._state = state = _State(name, self._target)
        self._lock = state.lock
        state.connect(timeout)
        threading.Thread(target=state.watch, name="flatweights-subscriber", daemon=True).start()
        self._finalizer = weakref.finalize(self, _close, state, os.getpid())
        _alive.add(self)

    @property
    def way(self) -> str:
        """How the weights come here.

        ``"lane"``: through memory of the publisher, on this node; ``"agent"``: through memory of
        an actor of this node that subscribes for all its processes; ``"store"``: through Ray's
        object store, where no memory can be shared.
        """
        return self._state.source.way

    @property
    def age(self) -> float:
        """For how many seconds the weights of `version` have been published; infinite if none."""
        return time.monotonic() - self._published if self.version else float("inf")

    @property
    def behind(self) -> int:
        """How many publications there were since `version`.

        After a restart of the publisher only its own count.
        """
        newest = self._state.source.newest
        if newest // _names.VERSIONS == self.version // _names.VERSIONS:
            return max(0, newest - self.version)
        return max(0, newest % _names.VERSIONS)

    def update(self, out: Any = None) -> bool:
        """Set the variables to the newest weights; return False, at once, if nothing is new.

        Args:
            out: What to set in place of the variables of this subscriber: of the same kinds.

        Raises:
            StaleWeightsError: If the newest weights are older than ``max_age``.
            ValueError: If ``out``, or what a new publisher publishes, has another layout.
            TypeError: If there are neither variables nor ``out``.
            RuntimeError: If this subscriber was closed, or in a fork of its process.
            Exception: What setting the variables raises.
        """
        with self._lock:
            state = self._state
            news = state.take(self.version)
            if news is None:
                if out is None and self._target is None:
                    raise TypeError("update: expected variables or out, got neither: see read")
                if self._max_age is not None:
                    self._check_age(self._published if self.version else state.began)
                return False
            try:
                version, published, buffer = news
                if out is None:
                    target, layout = self._target, state.checked_layout()
                else:
                    target, layout = target_of(out, "out"), state.layout
                    check_layout(layout, target.layout, "out")
                if target is None:
                    raise TypeError("update: expected variables or out, got neither: see read")
                self._check_age(published)
                target.scatter(buffer)
            except BaseException:
                state.source.drop()  # the traceback refers to the buffer
                raise
            self.version, self._published = version, published
            return True

    def read(self) -> FlatWeights:
        """Return a copy of the newest weights.

        Raises:
            StaleWeightsError: If they are older than ``max_age``.
            RuntimeError: If nothing has been published yet; or as `update`.
        """
        with self._lock:
            state = self._state
            news = state.take(0)
            if news is None:
                raise RuntimeError(f"nothing has been published under {self.name!r} yet")
            try:
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
        self._finalizer()

    def __enter__(self) -> Subscriber:
        """Return the subscriber itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close it."""
        self.close()

    def __repr__(self) -> str:
        """Return name, version and way."""
        return f"<Subscriber of {self.name!r}, version {self.version}, way {self.way!r}>"

    def __reduce__(self) -> NoReturn:
        """Refuse: a subscriber is its process."""
        raise TypeError("a Subscriber cannot be pickled: make it in the process that reads")

    def _check_age(self, published: float) -> None:
        age = time.monotonic() - published
        if self._max_age is not None and age > self._max_age:
            raise StaleWeightsError(
                f"{self.name!r}: nothing was published for {age:.1f} s, expected at most "
                f"{self._max_age:g} s (max_age): {self._state.what_is_known()}"
            )


class _State:
    """What a subscriber and the thread that watches over its source share.

    Attributes:
        lock: Held by whoever reads, or changes the source.
        source: Where the weights come from.
        take: That of the source.
        layout: That of the weights.
        began: When the first source was found, by `time.monotonic`.
    """

    source: Source
    take: Callable[[int], News | None]
    layout: Layout

    def __init__(self, name: str, target: Variables | None) -> None:
        self.lock = threading.Lock()
        self.began = 0.0
        self._name = name
        self._target = target
        self._mismatch: ValueError | None = None
        self._who = ""
        self._is_over = False
        self._is_closed = False

    def connect(self, timeout: float | None) -> None:
        """Find the first source."""
        end = float("inf") if timeout is None else time.monotonic() + timeout
        why = "there was none yet"
        while True:
            record = _names.find(self._name)
            if record is not None:
                try:
                    source = connect(self._name, record, min(end, time.monotonic() + 3600))
                except _GONE as error:
                    why = f"{record.who} was the last: {type(error).__name__}: {error}"
                else:
                    self.began = time.monotonic()
                    self._set(source, record)
                    if self._mismatch is not None:
                        source.close()
                        raise self._mismatch
                    return
            if time.monotonic() >= end:
                raise TimeoutError(
                    f"expected a publisher of {self._name!r} within {timeout:g} s; {why}"
                )
            time.sleep(_RETRY)

    def checked_layout(self) -> Layout:
        """Return the layout of the weights; raise if it is not that of the variables."""
        if self._mismatch is not None:
            raise ValueError(str(self._mismatch))
        return self.layout

    def what_is_known(self) -> str:
        """Return how errors say what has become of the publisher."""
        return f"its publisher, {self._who}, {'has ended' if self._is_over else 'is silent'}"

    def watch(self) -> None:
        """Look for another source when this one has ended, or there is a newer publisher."""
        seen = -1
        while True:
            source = self.source
            if self._is_over:
                time.sleep(_SOON)
            self._is_over = source.wait_for_end(0.0 if self._is_over else _TICK)
            if self._is_closed:
                break
            # While weights come, their publisher is the last one of the name, or soon told so.
            if self._is_over or seen == source.newest:
                with contextlib.suppress(Exception):  # gone meanwhile, or Ray is shut down
                    self._look()
            seen = source.newest
        with self.lock:
            self.source.close()

    def _look(self) -> None:
        old = self.source
        if not _names.is_superseded(self._name, old.number) and (
            old.way == "lane" or not self._is_over
        ):
            return  # if it has ended, nothing comes until there is another one
        record = _names.find(self._name)
        if record is None:
            return
        source = connect(self._name, record, time.monotonic() + 10 * _TICK)
        with self.lock:
            self._set(source, record)
            old.close()
        self._is_over = False

    def _set(self, source: Source, record: _names.Record) -> None:
        self.source = source
        self.layout = unpickle_layout(source.layout)
        self.take = source.take
        self._who = record.who
        self._mismatch = None
        if self._target is not None:
            try:
                check_layout(self.layout, self._target.layout, "variables")
            except ValueError as error:
                self._mismatch = error

    def close(self) -> None:
        """Have the thread close the source; nothing can be taken any more."""
        self._is_closed = True
        self.refuse("it was closed")
        self.source.interrupt()

    def refuse(self, why: str) -> None:
        """Have `take` raise."""

        def take(seen: int) -> NoReturn:
            raise RuntimeError(f"the subscriber of {self._name!r}: {why}")

        self.take = take


def _close(state: _State, process: int) -> None:
    """Close ``state``, unless this is a fork of its process."""
    if process == os.getpid():
        state.close()


_alive: weakref.WeakSet[Subscriber] = weakref.WeakSet()


def _end_copies() -> None:
    for subscriber in list(_alive):
        subscriber._lock = subscriber._state.lock = threading.Lock()
        subscriber._state.refuse("this process is a fork of its process: make one here")


os.register_at_fork(after_in_child=_end_copies)
