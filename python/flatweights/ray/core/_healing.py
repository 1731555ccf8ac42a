"""Healing: members that lack the state of a training get it from one that has it.

The response of an average with a `state` (`Member.average`) names the members that lack the state,
and the donor, which `Calls` chooses: the lowest rank that was averaged. The donor then sends its
state, as it was before that average is applied. The members that lack it ask for it; the others go
on. If the donor is lost, the members that still lack the state ask again as part of the next
average, which has another donor.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flatweights.ray.core._deadline import Deadline
from flatweights.ray.core._peer import Peer
from flatweights.ray.core._requests import LacksStateError


@dataclass(eq=False)
class Healing:
    """The healing after one average.

    Attributes:
        number: The number of the response.
        donor: The member that gives its state.
        recovering: The members that have not got it yet.
        deadline: The time after which the donor is too late.
        is_given: Whether the state has arrived.
        why: The reason for which there will be no state.
        waiting: The members in `recovering` that have asked for it.
    """

    number: int
    donor: Peer
    recovering: list[Peer]
    deadline: Deadline
    is_given: bool = False
    why: Exception | None = None
    waiting: list[Peer] = field(default_factory=list)

    def lose(self, peer: Peer) -> None:
        """Note that a member has gone, or asks for something else."""
        for peers in (self.recovering, self.waiting):
            if peer in peers:
                peers.remove(peer)
        if peer is self.donor and not self.is_given:
            self._fail("is gone")

    def give_up_in_time(self, now: float) -> None:
        """Give up if the donor is too late."""
        if self.is_waited_for and self.deadline.is_over(now):
            self._fail("is late")

    @property
    def is_waited_for(self) -> bool:
        """Whether the donor has yet to send the state."""
        return not self.is_given and self.why is None

    @property
    def is_known(self) -> bool:
        """Whether there is an answer for the members that wait."""
        return bool(self.waiting) and not self.is_waited_for

    def fail(self, why: Exception) -> None:
        """Note that there will be no state."""
        self.why = self.why or why

    def _fail(self, fault: str) -> None:
        self.fail(LacksStateError(f"rank {self.donor.rank}, which gives it, {fault}"))
