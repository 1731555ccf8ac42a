"""The record of one member, and what a meeting waits for: its next ask."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flatweights._layout import Layout, unpickle_layout
from flatweights._weights import FlatWeights
from flatweights.ray._calls import Answer, Packed
from flatweights.ray.lanes._driver import DriverLane, Lanes
from flatweights.ray.members._asks import Ask, MemberDiedError

SLICE = 1.0  # seconds between two looks at what rings no bell
_LAYOUTS = 64  # that a meeting remembers


class Letter(NamedTuple):
    """An ask that came through Ray, and what its caller waits for: an outcome."""

    content: tuple[Any, ...] | None
    reply: Future[Any] | None


@dataclass
class Seat:
    """All that the host knows of the member of one rank.

    Attributes:
        rank: The rank.
        who: The process, as errors name it.
        token: That of its ticket.
        lane: The lane to it; None, if it calls through Ray.
        has: The number of the last outcome that it was given; None before the first.
        gone: Why it does not take part any more; None while it does.
        left: Whether it has left.
        answer: What the host waits for: its next ask.
        letters: Asks of its that came through Ray.
        reply: What its call through Ray waits for: an outcome.
    """

    rank: int
    who: str
    token: bytes
    lane: DriverLane | None = None
    has: int | None = None
    gone: Exception | None = None
    left: bool = False
    answer: SeatAnswer | None = None
    letters: deque[Letter] = field(default_factory=deque)
    reply: Future[Any] | None = None

    @property
    def is_present(self) -> bool:
        """Whether it is alive and has not left."""
        return self.gone is None and not self.left

    @property
    def is_ready(self) -> bool:
        """Whether it can be given an outcome."""
        return self.is_present and (self.lane is not None or self.reply is not None)


class SeatAnswer(Answer):
    """What the host waits for: the next ask of a member, or news that came through Ray."""

    def __init__(
        self, lanes: Lanes, layouts: dict[str, Layout], seat: Seat | None, news: Any
    ) -> None:
        """Wait for the next ask of ``seat``; without one, for ``news``.

        Args:
            lanes: Those of the host.
            layouts: By digest; those that asks bring are added.
            seat: The member.
            news: What has come through Ray.
        """
        self.seat = seat
        self.ask: Ask | None = None
        self._lanes = lanes
        self._layouts = layouts
        self._news = news
        self._value: Packed | None = None
        self._error: Exception | None = None

    @property
    def is_in_store(self) -> bool:
        """A letter's array is in the store while the call that brought it runs."""
        return False

    @classmethod
    def wait(
        cls, answers: Sequence[SeatAnswer], timeout: float | None, enough: int = 1
    ) -> list[SeatAnswer]:
        """Return those that are there."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            there = [answer for answer in answers if answer.is_there()]
            left = SLICE if end is None else min(SLICE, end - time.monotonic())
            if len(there) >= enough or left <= 0 or any(one.is_urgent for one in there):
                return there
            missing = {*answers}.difference(there)
            lanes = [one.seat.lane for one in missing if one.seat and one.seat.lane]
            # All but the last are read while that member still works.
            answers[0]._lanes.wait(lanes, left, max(1, enough - len(there) - 1))

    def is_there(self) -> bool:
        """Whether there is something to take; an ask that has come is read at once."""
        if self.seat is None:
            return bool(self._news)
        if self.ask is None and self._error is None:
            try:
                self._read(self.seat)
            except Exception as error:  # it died while it sent a window, or sends nonsense
                why = f"{type(error).__name__}: {error}"
                self._error = MemberDiedError(f"{self.seat.who}: its call could not be read: {why}")
        return self.ask is not None or self._error is not None

    @property
    def is_urgent(self) -> bool:
        """Whether the wait for others ends at once."""
        return self.ask is None or self.ask.timeout is not None or self.ask.operation == "leave"

    def _read(self, seat: Seat) -> None:
        """Read the ask, if it has come."""
        lane = seat.lane
        content: tuple[Any, ...] | None = None
        if seat.gone is not None:
            self._error = seat.gone
        elif lane is not None and lane.is_answered and seat.has is not None:
            _, content = lane.take()
        elif lane is not None and lane.is_closed:
            self._error = MemberDiedError(f"{seat.who} has ended without leave()")
        if seat.letters and (lane is None or (content is not None and len(content) == 1)):
            letter = seat.letters.popleft()
            seat.reply, content = letter.reply, letter.content
        if content is None:
            return
        ask, layout, buffer = content
        asked = Ask(*ask)
        if layout is not None:
            known = unpickle_layout(layout)
            self._layouts[known.digest] = known
            if len(self._layouts) > _LAYOUTS:
                del self._layouts[next(iter(self._layouts))]
        if buffer is not None:
            assert asked.digest is not None
            self._value = Packed(as_array(buffer), self._layouts[asked.digest])
        self.ask = asked

    def take(self) -> Any:
        """Return the weights."""
        if self._error is not None:
            raise self._error
        return None if self._value is None else FlatWeights.wrap(*self._value)

    def packed(self) -> Packed | None:
        """Return the weights without views of their parts."""
        return self._value

    def let_go(self) -> None:
        """Drop the weights."""
        self._value = None


def as_array(buffer: Any) -> NDArray[np.uint8]:
    """Return the packed buffer that came with an ask or an outcome."""
    return buffer if isinstance(buffer, np.ndarray) else np.frombuffer(buffer, np.uint8)
