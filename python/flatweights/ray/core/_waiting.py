"""The members of a process group that wait for the outcome of a call, in three lists.

| list | the member | waits for |
| --- | --- | --- |
| `asking` | takes part in the open call | its outcome |
| `lacking` | lacks the state of a training (`Ask.lacks`) | the next call of the kind of its ask |
| `behind` | lacks the last outcome of its kind of call (`Past.is_behind`) | the next of that kind |
"""

from __future__ import annotations

from collections.abc import Iterable

from flatweights.ray.core._asks import Ask
from flatweights.ray.core._deadline import NEVER, Deadline
from flatweights.ray.core._peer import Peer


class Waiting:
    """The three lists; a member is in one of them at most.

    Attributes:
        asking: The members of the open call, in the order of their asks.
        lacking: The members that lack the state.
        behind: The late members.
    """

    def __init__(self) -> None:
        """Begin without members."""
        self.asking: list[Peer] = []
        self.lacking: list[Peer] = []
        self.behind: list[Peer] = []

    @property
    def out_of_sync(self) -> list[Peer]:
        """The members that wait for another call than the open one."""
        return self.lacking + self.behind

    def ask(self, seat: Peer) -> None:
        """Add a member to the open call, and the root of its broadcast, if that waits for one.

        All take a root's weights as they are, and nobody else can send them.
        """
        self.asking.append(seat)
        for root in self.behind:
            if root.ask.kind == seat.ask.kind and root.rank == seat.ask.root:
                self.behind.remove(root)
                self.asking.append(root)
                return

    def needs(self, seat: Peer) -> bool:
        """Whether the open call is the broadcast of this member, which can be late for it."""
        kinds = (one.ask.kind for one in self.asking)
        return seat.rank == seat.ask.root and seat.ask.kind in kinds

    def asks(self) -> dict[int, Ask]:
        """Return the asks of the open call by rank, in their order."""
        return {seat.rank: seat.ask for seat in self.asking}

    def deadline(self) -> Deadline:
        """Return the end of the open call: the earliest deadline of its asks."""
        first = NEVER
        for seat in self.asking:
            end = seat.deadline.end
            if end is not None and (first.end is None or end < first.end):
                first = seat.deadline
        return first

    def ends(self) -> list[float]:
        """Return the times at which the time of a member is up."""
        end = self.deadline().end
        ends = [] if end is None else [end]
        return ends + [seat.deadline.end for seat in self.behind if seat.deadline.end is not None]

    def overdue(self, now: float) -> list[Peer]:
        """Return the late members whose time is up."""
        return [seat for seat in self.behind if seat.deadline.is_over(now)]

    def late_for(self, first: Ask) -> list[Peer]:
        """Return the late members that the outcome of the call of ``first`` answers."""
        return [seat for seat in self.behind if seat.ask.kind == first.kind]

    def healed_by(self, first: Ask) -> list[Peer]:
        """Return the members that get the state that they lack from the call of ``first``."""
        return [seat for seat in self.lacking if seat.ask.kind == first.kind]

    def missed_by(self, first: Ask) -> list[Peer]:
        """Return the members that wait for another call with the state of ``first``."""
        asks = [(seat, seat.ask) for seat in self.lacking]
        return [seat for seat, ask in asks if ask.state == first.state and ask.kind != first.kind]

    def close_call(self) -> list[Peer]:
        """Take out the members of the open call, and return them."""
        asking, self.asking = self.asking, []
        return asking

    def open_late_call(self) -> list[Peer]:
        """Make the late members those of the open call, since it has none; return them."""
        self.asking, self.behind = self.behind, []
        return [*self.asking]

    def drop(self, seats: Iterable[Peer]) -> None:
        """Take out ``seats``, as far as they wait."""
        for seat in seats:
            for waiting in (self.asking, self.lacking, self.behind):
                if seat in waiting:
                    waiting.remove(seat)
