"""Healing: members that lack the state of a training get it from one that has it.

An average with a `state` (`Member.average`) tells by its outcome who lacks the state, and who gives
it: the lowest rank that was averaged. The giver then sends its state, as it was before that average
is applied, and those that lack it ask for it; the other members go on. If the giver is lost, those
that still lack the state ask again as part of the next average, which has another giver.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from flatweights.ray._result import Packed
from flatweights.ray.members._asks import LacksStateError
from flatweights.ray.members._seats import Seat
from flatweights.ray.peers._wait import Deadline


@dataclass(eq=False)
class Healing:
    """What is left to do after one average.

    Attributes:
        number: That of the outcome.
        giver: The member that gives its state.
        lacking: Those that have not been given it.
        deadline: When the giver is too late.
        state: The state, once it is here.
        why: Why there will be none.
        waiting: Those of `lacking` that have asked for it.
    """

    number: int
    giver: Seat
    lacking: list[Seat]
    deadline: Deadline
    state: Packed | None = None
    why: LacksStateError | None = None
    waiting: list[Seat] = field(default_factory=list)

    def lose(self, seat: Seat) -> None:
        """Note that a member is gone, or does something else."""
        for seats in (self.lacking, self.waiting):
            if seat in seats:
                seats.remove(seat)
        if seat is self.giver and self.state is None:
            self._fail("is gone")

    def give_up_in_time(self) -> None:
        """Wait for the giver no longer than its time."""
        end = self.deadline.end
        if self.is_waited_for and end is not None and time.monotonic() >= end:
            self._fail("is late")

    @property
    def is_waited_for(self) -> bool:
        """Whether the giver still has to give."""
        return self.state is None and self.why is None

    @property
    def is_known(self) -> bool:
        """Whether those that wait can be told something."""
        return bool(self.waiting) and not self.is_waited_for

    def _fail(self, what: str) -> None:
        self.why = self.why or LacksStateError(f"rank {self.giver.rank}, which gives it, {what}")
