"""Calls that all members of a process group repeat: C++ makes them, as long as nothing happens.

If a call is plain, such as a mean of weights in shared memory in which all members take part, its
response has a number (`Response.prepared`), and a member that asks for the same again sends
that number. Once all have, the call is made ready: two segments for its results, of which all
members know. From then on `_core.RepeatedCalls` waits for the members, averages, and tells them. It
ends with whatever is no repetition, and leaves it for the process group's thread; `Repeated` then
tells the core what was done.

This is the coordinator's side. What is no repetition is decided in four places:

- `Request.may_repeat`: no rule, nothing on a GPU, no state that is lacked, no twins.
- `Calls.may_repeat`, and `Repetitions.prepare`: all members are on time, by channels, and none has
  failed, is late, or recovers. A member that dies or joins ends all repetitions.
- The member, in `_repeated_call`: the same variables, layout, arguments and segments as last time.
- `csrc/flatweights/repeated_calls.cpp`: a message with anything else, NaN, a weight that is no
  weight, a segment that is held, a time that is up, an event at another socket.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flatweights import _core
from flatweights._layout import Layout
from flatweights.ray.channels._driver_channel import Channels
from flatweights.ray.channels._segments import Extent, new_buffer
from flatweights.ray.core._events import LastCall, Reduce, Send
from flatweights.ray.core._requests import Request, Response, remember
from flatweights.ray.members._repeated_call import response_again
from flatweights.ray.members._sessions import Prepared, Session
from flatweights.ray.results._report import METRICS, RECEIVED, ROUND, SENT
from flatweights.ray.results._result import Packed
from flatweights.ray.results._round import Round

_MOST = 8  # calls that are ready, and have two segments of their own
_SMALL = 1 << 14  # bytes of results that share two segments, as those of a layer
_SHARED = 1 << 20  # bytes of such a segment
_UNUSED = 1000  # calls after which one that is ready may give its segments to another
_PAUSE = 1.0  # seconds after which the log and the metrics hear of calls

_log = logging.getLogger("flatweights")


class Ending(enum.Enum):
    """Why a series of calls has ended; see `RepeatedCalls::Ended` in csrc."""

    OTHER = 0
    QUEUE = 1
    SOCKET = 2
    LATE = 3
    PAUSE = 4


class Series(NamedTuple):
    """What has come of a series of calls.

    Attributes:
        ending: Why it has ended.
        calls: The number of calls.
        made: The last one of each kind, in the order of their numbers.
        responses: By number, the responses of these, and their weights.
        seconds_waited: For the call after them.
    """

    ending: Ending
    calls: int
    made: list[LastCall]
    responses: dict[int, tuple[Response, Packed]]
    seconds_waited: float


@dataclass
class _Ready:
    """A call that C++ can make.

    Attributes:
        request: The request of the lowest rank.
        response: The response of the last one that was made in the general way.
        layout: The layout of its weights.
        results: Where its results go.
        is_shared: Whether that is in the segments of small results.
        used: The number of its last response.
    """

    request: Request
    response: Response
    layout: Layout
    results: list[_Result]
    is_shared: bool
    used: int


class _Result(NamedTuple):
    """Where a result goes: its position, and the buffer."""

    extent: Extent
    buffer: NDArray[np.uint8]


_SHARED_LAYOUT = Layout(["shared"], [(_SHARED,)], [np.dtype(np.uint8)])


class Repetitions:
    """The calls that members may repeat, and those that are ready."""

    def __init__(self, name: str, channels: Channels) -> None:
        """Begin without calls, in the process group ``name``."""
        self._name = name
        self._channels = channels
        self._sessions: list[Session] = []  # those of the calls that are ready, by rank
        self._ready: dict[int, _Ready] = {}  # by number, the oldest first
        self._shared: list[NDArray[np.uint8]] = []  # the segments of small results
        self._shared_used = 0  # bytes of each
        self._calls: _core.RepeatedCalls | None = None

    def are_ready(self, present: Mapping[bytes, Session]) -> bool:
        """Whether there is a call that all ``present`` members may repeat."""
        if self._ready and not self._are_all(present):
            self.clear()
        return bool(self._ready)

    def _are_all(self, present: Mapping[bytes, Session]) -> bool:
        """Whether these calls are those of all ``present`` members, and none has ended."""
        if len(present) != len(self._sessions):
            return False
        for session in self._sessions:
            if (
                present.get(session.token) is not session
                or session.channel is None
                or session.channel.is_closed
            ):
                return False
        return True

    def clear(self) -> None:
        """Forget all calls that are ready, and release their segments."""
        self._calls = None
        self._sessions = []
        self._ready.clear()
        self._shared, self._shared_used = [], 0

    def prepare(
        self,
        call: Reduce,
        send: Send,
        result: Round | None,
        weights: object,
        sessions: Sequence[Session],
    ) -> int:
        """Return the number by which ``sessions`` may repeat a call that they took part in.

        Args:
            call: The call.
            send: The members that get its response.
            result: The round; None, if there was an error.
            weights: Its weights.
            sessions: Those that took part, which still have their requests.

        Returns:
            0, if they may not.
        """
        if result is None or not isinstance(weights, Packed):
            return 0
        if send.late or send.recovering or call.lost or result.failed or not weights.buffer.nbytes:
            return 0
        known = set()
        for session in sessions:
            channel, answer = session.channel, session.answer
            if (
                channel is None
                or channel.is_closed
                or answer is None
                or not answer.request.may_repeat
            ):
                return 0
            known.add(answer.prepared)
        if len(known) == 1 and 0 not in known:
            return known.pop()
        for session in sessions:
            assert session.answer is not None
            again = Prepared(session.answer.request, session.answer.known_layout)
            remember(session.prepared, send.number, again)
        return send.number

    def make_ready(self, response: Response, layout: Layout, sessions: Sequence[Session]) -> None:
        """Make a call ready that ``sessions``, all members, have just repeated.

        Args:
            response: Its response.
            layout: The layout of its weights.
            sessions: The members, which still have their requests.
        """
        sessions = sorted(sessions, key=lambda session: session.rank)
        if self._calls is None or sessions != self._sessions:
            self.clear()
            channels = [session.channel for session in sessions if session.channel is not None]
            self._calls = self._channels.repeated_calls(channels)
            self._sessions = sessions
        if response.prepared in self._ready:
            return
        requests = [session.answer.request for session in sessions if session.answer is not None]
        request = requests[0]
        shared = self._small_results(layout, sessions)
        results = shared or self._own_results(response, layout, sessions)
        if len(results) < 2:
            return
        ranks = [session.rank for session in sessions]
        self._calls.prepare(
            response.prepared,
            layout.core,
            [(*extent[:3], buffer) for extent, buffer in results],
            None if request.root is None else ranks.index(request.root),
            request.nonfinite == "propagate" or request.operation == "broadcast",
            [one.timeout for one in requests],
        )
        self._ready[response.prepared] = _Ready(
            request, response, layout, results, bool(shared), response.number
        )

    def _small_results(self, layout: Layout, sessions: Sequence[Session]) -> list[_Result]:
        """Return parts of the two segments of small results; none, if they do not fit."""
        begin, end = self._shared_used, self._shared_used + layout.nbytes
        if layout.nbytes > _SMALL or end > _SHARED:
            return []
        if not self._shared:
            whole = [self._new_result(_SHARED_LAYOUT, sessions) for _ in range(2)]
            if None in whole:
                return []
            self._shared = [one.buffer for one in whole if one is not None]
        self._shared_used = end
        parts = [buffer[begin:end] for buffer in self._shared]
        found = [(self._channels.segments.find(part), part) for part in parts]
        return [_Result(extent, part) for extent, part in found if extent is not None]

    def _own_results(
        self, response: Response, layout: Layout, sessions: Sequence[Session]
    ) -> list[_Result]:
        """Return two segments, perhaps those of a call that is not used any more."""
        assert self._calls is not None
        own = {call: ready.used for call, ready in self._ready.items() if not ready.is_shared}
        if len(own) >= _MOST:
            oldest = min(own, key=own.__getitem__)
            if response.number - own[oldest] < _UNUSED:
                return []
            self._calls.forget(oldest)
            del self._ready[oldest]
        found = [self._new_result(layout, sessions) for _ in range(2)]
        return [one for one in found if one is not None]

    def _new_result(self, layout: Layout, sessions: Sequence[Session]) -> _Result | None:
        """Return a buffer in a segment that all members know; None if there is none."""
        segments = self._channels.segments
        buffer = new_buffer(layout, segments.offer)
        extent = segments.find(buffer)
        if extent is None:
            return None
        for session in sessions:
            assert session.channel is not None
            try:
                session.channel.share(segments, [extent])
            except OSError:  # it is dead, or its socket is full
                return None
            session.channel.release([extent])
        return _Result(extent, buffer)

    def run(self, number: int, patience: float | None) -> Series:
        """Make calls, with responses after ``number``, until something else is to be done.

        Args:
            number: The number of the last response.
            patience: Seconds after which something else is due; never, if None.
        """
        assert self._calls is not None
        seconds = _PAUSE if patience is None else min(_PAUSE, patience)
        times = [session.seen for session in self._sessions]
        run = self._channels.run_repeated(self._calls, number, seconds, times)
        code, count, pending, seen, last = run
        ending = Ending(code)
        for session, time in zip(self._sessions, seen, strict=True):
            session.seen = time
        if not count:
            return Series(ending, 0, [], {}, pending)
        last.sort(key=lambda one: one[1])
        made, responses = [], {}
        for call, at, position, times_made, waited, averaged, *in_all in last:
            ready = self._ready[call]
            ready.used = at
            responses[at] = self.response_of(call, at, position, (waited, averaged))
            made.append(LastCall(ready.request, at, ready.layout.nbytes))
            if ready.request.operation != "broadcast":
                self._report(ready, at, times_made, *in_all)
        extent = self._ready[call].results[position].extent
        for session in self._sessions:
            assert session.channel is not None
            session.channel.was_posted([extent])
            session.announced, session.is_quiet = None, True
        return Series(ending, count, made, responses, pending)

    def response_of(
        self, call: int, number: int, position: int, seconds: Sequence[float]
    ) -> tuple[Response, Packed]:
        """Return a response of a call that was repeated, and its weights.

        Args:
            call: The number by which it was repeated.
            number: The number of the response.
            position: Which of the results has the weights.
            seconds: The seconds of its steps.
        """
        ready = self._ready[call]
        weights = Packed(ready.results[position].buffer, ready.layout)
        return response_again(ready.response, number, *seconds), weights

    def _report(
        self, ready: _Ready, number: int, count: int, waited: float, averaged: float
    ) -> None:
        """Count averages of one kind in the metrics, and log a line about them.

        Args:
            ready: The call.
            number: The number of its last response.
            count: How often it was made.
            waited: The seconds waited, in all.
            averaged: The seconds that the averages took, in all.
        """
        members = len(self._sessions)
        sent = count * members * ready.layout.nbytes
        by_channel = "transports", "transport", "shm"
        counts = {ROUND: count, RECEIVED: sent, SENT: sent, by_channel: count * members}
        METRICS.add(counts, {"wait": waited, "average": averaged}, members, count)
        _log.info(
            "process group %r: %d averages as before, the last one round %d, of %d ranks: wait "
            "%.6f, average %.6f seconds each",
            self._name,
            count,
            number,
            members,
            waited / count,
            averaged / count,
        )
