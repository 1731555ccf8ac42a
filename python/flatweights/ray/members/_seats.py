"""The record of one member, and what a meeting waits for: its next ask."""

from __future__ import annotations

import functools
import pickle
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import ray
from numpy.typing import NDArray

from flatweights._layout import Layout, unpickle_layout
from flatweights._sources import Kind, Template
from flatweights._weights import FlatWeights
from flatweights.ray._result import Packed
from flatweights.ray.lanes._driver_lane import DriverLane
from flatweights.ray.lanes._message import Message, buffer_message
from flatweights.ray.lanes._protocol import COMMAND, NUMBER
from flatweights.ray.lanes._windows import Windows
from flatweights.ray.members._asks import Ask, MemberDiedError, remember
from flatweights.ray.members._news import News
from flatweights.ray.peers._by_agent import AgentEnd
from flatweights.ray.peers._contract import Answer
from flatweights.ray.peers._summary import Summary

SLICE = 1.0  # seconds between two looks at what rings no bell


class Letter(NamedTuple):
    """An ask that came through Ray: its body, its buffer, and where its caller waits."""

    body: bytes | None
    buffer: NDArray[np.uint8] | Away | None
    outcome: Future[Any] | None


class Away(NamedTuple):
    """In place of weights: they stay on the member's node.

    Attributes:
        spoiled: The error about NaN or infinity, if they were screened and hold any.
    """

    spoiled: Exception | None


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
        outcome: What its call through Ray waits for.
        layouts: Those that its asks have brought, by digest.
        agent: The agent of its node, if that has the lane to it.
        is_waiting: Whether a call through that agent waits for an outcome.
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
    outcome: Future[Any] | None = None
    layouts: dict[str, Layout] = field(default_factory=dict)
    agent: AgentEnd | None = None
    is_waiting: bool = False

    @property
    def is_present(self) -> bool:
        """Whether it is alive and has not left."""
        return self.gone is None and not self.left

    @property
    def is_ready(self) -> bool:
        """Whether it can be given an outcome."""
        can_be_told = self.lane is not None or self.outcome is not None or self.is_waiting
        return self.is_present and can_be_told


class SeatAnswer(Answer):
    """What the host waits for: the next ask of a member, or news that came through Ray.

    Attributes:
        seat: The member; None for news.
        ask: The ask, once it has come.
        body: The ask as it came.
        away: What stands for weights that stay on their node.
        error: Why no ask comes any more: the member has died.
    """

    is_in_store = False  # a letter's array is there while the call that brought it runs

    def __init__(self, news: News, seat: Seat | None = None) -> None:
        """Wait for the next ask of ``seat``; without one, for ``news``."""
        self.seat = seat
        self.ask: Ask | None = None
        self.body = b""
        self.away: Away | None = None
        self._layout: Layout | None = None
        self._news = news
        self._value: Packed | None = None
        self.error: Exception | None = None

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
            # A member that has no outcome yet asks for nothing: its mailbox looks answered.
            seats = [one.seat for one in missing if one.seat and one.seat.has is not None]
            lanes = [seat.lane for seat in seats if seat.lane]
            # All but the last are read while that member still works.
            answers[0]._news.lanes.wait(lanes, left, max(1, enough - len(there) - 1))

    def is_there(self) -> bool:
        """Whether there is something to take; an ask that has come is read at once."""
        if self.seat is None:
            return bool(self._news)
        if self.ask is None and self.error is None:
            try:
                self._read(self.seat)
            except Exception as error:  # it died while it sent a window, or sends nonsense
                why = f"{type(error).__name__}: {error}"
                self.error = MemberDiedError(f"{self.seat.who}: its call could not be read: {why}")
        return self.ask is not None or self.error is not None

    @property
    def is_urgent(self) -> bool:
        """Whether the wait for others ends at once."""
        return self.ask is None or self.ask.timeout is not None or self.ask.operation == "leave"

    def _read(self, seat: Seat) -> None:
        """Read the ask, if it has come."""
        lane = seat.lane
        body: bytes | None = None
        buffer: Any = None
        if seat.gone is not None:
            self.error = seat.gone
        elif lane is not None and lane.is_answered and seat.has is not None:
            body, buffers = lane.take()[1]
            buffer = buffers[0] if buffers else None
        elif lane is not None and lane.is_closed:
            self.error = MemberDiedError(f"{seat.who} has ended without leave()")
        if seat.letters and (lane is None or body == b""):
            body, buffer, seat.outcome = seat.letters.popleft()
        if body is None:
            return
        asked, layout = _ask_in(body)
        if layout is not None:
            known = unpickle_layout(layout)
            remember(seat.layouts, known.digest, known)
        if asked.digest is not None:
            self._layout = seat.layouts[asked.digest]
        if isinstance(buffer, Away):
            self.away = buffer
        elif self._layout is not None and asked.root in (None, seat.rank):
            self._value = Packed(as_array(buffer), self._layout)
        self.ask, self.body = asked, body

    @property
    def layout(self) -> Layout:
        """The layout that the ask names."""
        assert self._layout is not None
        return self._layout

    def take(self) -> Any:
        """Return the weights; a summary of them, if they are to stay with `agent`."""
        if self.error is not None:
            raise self.error
        if self.agent is not None and self.away is not None:
            template = Template(Kind.FLAT_WEIGHTS, self.layout)
            return Summary(template, spoiled=self.away.spoiled, nbytes=self.layout.nbytes)
        packed = self.packed()
        return None if packed is None else FlatWeights.wrap(*packed)

    def packed(self) -> Packed | None:
        """Return the weights without views of their parts; they are fetched if they are away."""
        if self._value is None and self.away is not None:
            assert self.seat is not None
            assert self.seat.agent is not None
            buffer = ray.get(self.seat.agent.handle.give.remote(self.seat.rank))
            self._value = Packed(buffer, self.layout)
        return self._value

    def let_go(self) -> None:
        """Drop the weights."""
        self._value = self.away = None


@functools.lru_cache(maxsize=256)
def _ask_in(body: bytes) -> tuple[Ask, bytes | None]:
    """Return an ask, the same one for the same body; and the layout that comes with it."""
    fields, layout = pickle.loads(body)
    return Ask(*fields), layout


def as_array(buffer: Any) -> NDArray[np.uint8]:
    """Return the packed buffer that came with an ask or an outcome; none has no bytes."""
    return np.empty(0, np.uint8) if buffer is None else buffer


def outcome_message(
    number: int, body: bytes, buffer: NDArray[np.uint8] | None, windows: Windows
) -> Message:
    """Return the message of an outcome: without a window, or if it is too long, its number alone.

    The member then fetches the outcome through Ray.
    """
    message = buffer_message(COMMAND, body, buffer, windows)
    message = message or buffer_message(COMMAND, NUMBER.pack(number), None, windows)
    assert message is not None
    return message
