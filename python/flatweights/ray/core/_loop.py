"""Rounds without a barrier: which result is next, and how long a loop waits for what.

| state | a worker of the loop | what ends it |
| --- | --- | --- |
| `idle` | is to be called | a call: `out` |
| `out` | has a call: of the loop, a probe, or one from before | its answer, or its time is up |
| `there` | has answered; its result is in no round yet | `next_result`: a round has it |
| `lost` | has died, or was late | a pause, after which it is probed: `out` |

Among the results that are there, that of the oldest call is next. If more rounds than usual have
passed a call, the loop waits a moment for it: on a busy machine, one worker may not have run yet,
while another has answered several times. If the call takes longer than that moment, its worker is
slow rather than late, and from then on more rounds may pass it: twice as many, until it is faster.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

_MOMENT = 0.1  # seconds to wait for the oldest call


class LoopRecord(Protocol):
    """What a loop has to know of a worker.

    Attributes:
        why: The reason for which it is not called; None while it is healthy.
        has_left: Whether it was removed.
    """

    why: Exception | None
    has_left: bool


Record = TypeVar("Record", bound=LoopRecord)


@dataclass(eq=False)
class LoopCall(Generic[Record]):
    """A call that was made.

    Attributes:
        rank: The rank of the worker.
        record: The record of the worker.
        answer: The answer to the call.
        kind: ``"work"``; ``"probe"``, which only brings weights; or ``"in_flight"``, an earlier
            call whose answer has not arrived yet.
        version: The stamp of the latest weights at the time.
        publication: The number of those weights.
        rounds: The number of rounds before it.
        end: The time after which it is late.
        patience: The time until which the loop waits for it while others have answered; None
            before.
        is_free: Whether the worker may be called again, since the value was copied for its round.
    """

    rank: int
    record: Record
    answer: Any
    kind: Literal["work", "probe", "in_flight"]
    version: Any
    publication: int
    rounds: int
    end: float | None
    patience: float | None = None
    is_free: bool = False


class Loop(Generic[Record]):
    """The calls of one loop, and the order of their results.

    Attributes:
        out: The calls that have no answer yet, by their answer, the oldest first.
        there: The calls that have answered, and are in no round yet.
        idle: The ranks to call.
        lost: The ranks to ask whether they are back.
        rounds: The number of rounds so far.
    """

    def __init__(self, max_staleness: int | None) -> None:
        """Begin without calls.

        Args:
            max_staleness: The largest number of publications since the weights of a result.
        """
        self.out: dict[Any, LoopCall[Record]] = {}
        self.there: list[LoopCall[Record]] = []
        self.idle: list[int] = []
        self.lost: set[int] = set()
        self.rounds = 0
        self._max_staleness = max_staleness
        self._patience: dict[int, int] = {}  # rounds that may pass a slow call

    def call(self, call: LoopCall[Record]) -> None:
        """Note a call that was just made."""
        self.out[call.answer] = call

    def deadline(self) -> float | None:
        """Return the time at which the first call is late; None, if none will be."""
        ends = [call.end for call in self.out.values() if call.end is not None]
        return min(ends, default=None)

    def overdue(self, now: float) -> list[LoopCall[Record]]:
        """Return the calls whose time is up."""
        return [call for call in self.out.values() if call.end is not None and call.end <= now]

    def take_out(self, answer: Any) -> LoopCall[Record] | None:
        """Return the call of an answer, and forget it; None, if the loop waits for it no longer."""
        call = self.out.pop(answer, None)
        if call is None:
            call = next((one for one in self.there if one.answer is answer), None)
            if call is not None:
                self.there.remove(call)
        return call

    def is_anyone_at_work(self, besides: Collection[int]) -> bool:
        """Whether a healthy worker of another rank than ``besides`` may answer."""
        return any(
            call.record.why is None and not call.record.has_left and call.rank not in besides
            for call in self.out.values()
        )

    def passed_over(self) -> LoopCall[Record] | None:
        """Return the oldest call, if more rounds than usual have passed it; see the module."""
        oldest = next((one for one in self.out.values() if one.kind == "work"), None)
        if oldest is None or not self.there:
            return None
        usual = 2 * (len(self.out) + len(self.there) + len(self.idle)) - 1
        most = max(usual, self._patience.get(oldest.rank, 0))
        return None if self.rounds - oldest.rounds < most else oldest

    def patience(self, oldest: LoopCall[Record], now: float) -> float | None:
        """Return the seconds to wait for a call that was passed over; None, if it is slow."""
        if oldest.patience is None:
            oldest.patience = now + _MOMENT
        if now >= oldest.patience:
            self._patience[oldest.rank] = 2 * (self.rounds - oldest.rounds)
            oldest.patience = None
            return None
        return oldest.patience - now

    def next_result(self, besides: Collection[int]) -> LoopCall[Record] | None:
        """Take out the oldest call that has answered, of another rank than ``besides``."""
        others = [call for call in self.there if call.rank not in besides]
        if not others:
            return None
        oldest = min(others, key=lambda call: call.rounds)
        self.there.remove(oldest)
        passed = self.rounds - oldest.rounds
        if 4 * passed < self._patience.get(oldest.rank, 0):
            self._patience[oldest.rank] //= 2
        return oldest

    def is_stale(self, call: LoopCall[Record], publications: int) -> bool:
        """Whether a result is too stale, after so many publications."""
        most = self._max_staleness
        return most is not None and publications - call.publication > most
