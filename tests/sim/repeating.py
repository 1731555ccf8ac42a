"""Calls that members repeat, as `_core.RepeatedCalls` makes them, in a simulated world."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from flatweights import _core
from flatweights.ray.channels._protocol import ASKED_AGAIN, REPEAT, REPEATED, TOLD_AGAIN
from flatweights.ray.members._repetitions import Ending

if TYPE_CHECKING:
    from tests.sim.platform import CoordinatorChannel, SimulatedChannels


class _Prepared(NamedTuple):
    layout: Any
    results: list[Any]
    root: int | None
    takes_nonfinite: bool
    timeouts: list[float]


class SimulatedCalls:
    """What `_core.RepeatedCalls` does, in Python, with a chance to end before each call."""

    def __init__(
        self, channels: SimulatedChannels, members: Sequence[CoordinatorChannel], share: float
    ) -> None:
        """Take the ends of the members' channels, and the share of calls that are repeated here."""
        self._channels, self._members, self._share = channels, members, share
        self._world, self._oracle = channels.platform.world, channels.platform.oracle
        self._prepared: dict[int, _Prepared] = {}
        self._last: dict[int, int] = {}  # by call, the position of its last result
        self._seen: list[float] = []
        self._before: list[float] = []  # times at which messages were seen in the last series

    def prepare(
        self,
        call: int,
        layout: Any,
        results: list[Any],
        root: int | None,
        takes_nonfinite: bool,
        timeouts: list[float | None],
    ) -> None:
        buffers = [result[3] for result in results]
        ends = [math.inf if timeout is None else timeout for timeout in timeouts]
        self._prepared[call] = _Prepared(layout, buffers, root, takes_nonfinite, ends)
        self._last[call] = 0

    def forget(self, call: int) -> None:
        del self._prepared[call]

    def run(self, number: int, seconds: float, seen: list[float]) -> Any:
        end = self._world.now + seconds
        made: dict[int, tuple[int, int, int, int, float, float, float, float]] = {}
        calls = 0
        while True:
            begin = self._world.now
            self._seen = [0.0] * len(self._members)
            self._before = seen if calls == 0 else [*self._seen]
            ending = self._wait(end)
            pending = self._world.now - begin
            requests = {k: ASKED_AGAIN.unpack(one.link.request[1]) for k, one in self._asking()}
            if ending is None and not self._may_make(requests):
                ending = Ending.OTHER
            if ending is not None:
                break
            (call, _) = requests[0]
            told = number + calls + 1, pending, 0.0
            if not self._make(call, requests, told):
                ending = Ending.OTHER
                break
            count, in_all = (made[call][3], made[call][6]) if call in made else (0, 0.0)
            last = self._last[call]
            made[call] = call, told[0], last, count + 1, *told[1:], in_all + pending, 0.0
            calls += 1
        if ending is Ending.QUEUE:
            self._channels.has_news = False
        return ending.value, calls, pending, self._seen, [*made.values()]

    def _asking(self) -> list[tuple[int, Any]]:
        """Return the members whose repetitions were seen, with their positions."""
        return [
            (k, one)
            for k, one in enumerate(self._members)
            if self._seen[k] and one.link.request is not None and one.link.request[0] == REPEAT
        ]

    def _wait(self, end: float) -> Ending | None:
        world, channels = self._world, self._channels
        while True:
            for k, one in enumerate(self._members):
                if one.is_answered and not self._seen[k]:
                    self._seen[k] = self._before[k] or world.now
                    kind, body, _ = one.link.request or (0, b"", [])
                    if kind != REPEAT or ASKED_AGAIN.unpack(body)[0] not in self._prepared:
                        return Ending.OTHER
            if channels.has_news:
                return Ending.QUEUE
            if all(self._seen):
                return None
            ends = [
                self._seen[k]
                + self._prepared[ASKED_AGAIN.unpack(one.link.request[1])[0]].timeouts[k]
                for k, one in self._asking()
            ]
            late = min(ends, default=math.inf)
            if world.now >= late:
                return Ending.LATE
            if world.now >= end:
                return Ending.PAUSE
            is_timed = any(min(one.timeouts) < math.inf for one in self._prepared.values())
            missing = self._seen.count(0.0)
            awaited = 1 if is_timed and missing == len(self._seen) else missing
            channels.sleep(awaited, self._has_more, min(end, late) - world.now)
            if channels.has_packets():
                return Ending.SOCKET

    def _has_more(self) -> bool:
        return any(
            one.is_answered and not seen
            for one, seen in zip(self._members, self._seen, strict=True)
        )

    def _may_make(self, requests: dict[int, Any]) -> bool:
        if len({call for call, _ in requests.values()}) != 1 or self._world.draw() >= self._share:
            return False
        (call, _) = requests[0]
        root = self._prepared[call].root
        return all(bool(one.link.request[2]) == (root in (None, k)) for k, one in self._asking())

    def _make(self, call: int, requests: dict[int, Any], told: tuple[int, float, float]) -> bool:
        prepared, world = self._prepared[call], self._world
        position = 1 - self._last[call]
        result = prepared.results[position]
        models = [one.link.request[2] for _, one in self._asking()]
        weights = [weight for _, weight in requests.values()]
        if prepared.root is not None:
            result[:] = models[prepared.root][0]
        elif not any(weights):
            return False
        else:
            is_finite = _core.average_into(prepared.layout, True, [result], models, weights)
            if not (is_finite or prepared.takes_nonfinite):
                return False
        del models
        for one in self._members:
            one.take()
        self._last[call] = position
        world.point("repeated")
        assert self._channels.shows is not None
        self._oracle.counts["calls again"] += 1
        self._channels.shows(call, told[0], position, told[1:])
        for one in self._members:
            self._oracle.answered(one.link)
            one.put(REPEATED, TOLD_AGAIN.pack(*told), result)
            world.point("posted")
        self._channels.wake([one.link for one in self._members])
        return True
