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

    def ask(self, session: Peer) -> None:
        """Add a member to the open call, and the root of its broadcast, if that waits for one.

        All take a root's weights as they are, and nobody else can send them.
        """
        self.asking.append(session)
        for root in self.behind:
            if root.ask.kind == session.ask.kind and root.rank == session.ask.root:
                self.behind.remove(root)
                self.asking.append(root)
                return

    def needs(self, session: Peer) -> bool:
        """Whether the open call is the broadcast of this member, which can be late for it."""
        kinds = (one.ask.kind for one in self.asking)
        return session.rank == session.ask.root and session.ask.kind in kinds

    def asks(self) -> dict[int, Ask]:
        """Return the asks of the open call by rank, in their order."""
        return {session.rank: session.ask for session in self.asking}

    def deadline(self) -> Deadline:
        """Return the end of the open call: the earliest deadline of its asks."""
        first = NEVER
        for session in self.asking:
            end = session.deadline.end
            if end is not None and (first.end is None or end < first.end):
                first = session.deadline
        return first

    def ends(self) -> list[float]:
        """Return the times at which the time of a member is up."""
        end = self.deadline().end
        ends = [] if end is None else [end]
        return ends + [
            session.deadline.end for session in self.behind if session.deadline.end is not None
        ]

    def overdue(self, now: float) -> list[Peer]:
        """Return the late members whose time is up."""
        return [session for session in self.behind if session.deadline.is_over(now)]

    def late_for(self, first: Ask) -> list[Peer]:
        """Return the late members that the outcome of the call of ``first`` answers."""
        return [session for session in self.behind if session.ask.kind == first.kind]

    def healed_by(self, first: Ask) -> list[Peer]:
        """Return the members that get the state that they lack from the call of ``first``."""
        return [session for session in self.lacking if session.ask.kind == first.kind]

    def missed_by(self, first: Ask) -> list[Peer]:
        """Return the members that wait for another call with the state of ``first``."""
        asks = [(session, session.ask) for session in self.lacking]
        return [
            session for session, ask in asks if ask.state == first.state and ask.kind != first.kind
        ]

    def close_call(self) -> list[Peer]:
        """Take out the members of the open call, and return them."""
        asking, self.asking = self.asking, []
        return asking

    def open_late_call(self) -> list[Peer]:
        """Make the late members those of the open call, since it has none; return them."""
        self.asking, self.behind = self.behind, []
        return [*self.asking]

    def drop(self, sessions: Iterable[Peer]) -> None:
        """Take out ``sessions``, as far as they wait."""
        for session in sessions:
            for waiting in (self.asking, self.lacking, self.behind):
                if session in waiting:
                    waiting.remove(session)
