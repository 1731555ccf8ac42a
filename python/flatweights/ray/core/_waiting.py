"""The members of a process group that wait for the response of a call, in three lists.

| list | the member | waits for |
| --- | --- | --- |
| `asking` | takes part in the open call | its response |
| `recovering` | lacks the state of a training (`Request.lacks`) | the next call of its kind |
| `behind` | lacks its kind's last response (`ResponseCache.is_behind`) | the next of that kind |
"""

from __future__ import annotations

from collections.abc import Iterable

from flatweights.ray.core._deadline import NEVER, Deadline
from flatweights.ray.core._peer import Peer
from flatweights.ray.core._requests import Request


class Waiting:
    """The three lists; a member is in one of them at most.

    Attributes:
        asking: The members of the open call, in the order of their requests.
        recovering: The members that lack the state.
        behind: The late members.
    """

    def __init__(self) -> None:
        """Begin without members."""
        self.asking: list[Peer] = []
        self.recovering: list[Peer] = []
        self.behind: list[Peer] = []
        self._first: Deadline | None = NEVER  # the earliest deadline of `asking`; None if not known
        self._is_late = False  # whether those of `asking` are late members, by `open_late_call`

    @property
    def out_of_sync(self) -> list[Peer]:
        """The members that wait for another call than the open one."""
        return self.recovering + self.behind

    def add(self, peer: Peer) -> None:
        """Add a member to the open call, and the root of its broadcast, if that waits for one.

        All take a root's weights as they are, and nobody else can send them. Late members that have
        opened the call wait again: their weights are older than those of the member that is added.
        """
        if self._is_late:
            self.behind += self.close_call()
        self._add(peer)
        for root in self.behind:
            if root.request.kind == peer.request.kind and root.rank == peer.request.root:
                self.behind.remove(root)
                self._add(root)
                return

    def _add(self, peer: Peer) -> None:
        self.asking.append(peer)
        first, end = self._first, peer.deadline.end
        if first is not None and end is not None and (first.end is None or end < first.end):
            self._first = peer.deadline

    def needs(self, peer: Peer) -> bool:
        """Whether the open call is the broadcast of this member, which can be late for it."""
        kinds = (one.request.kind for one in self.asking)
        return peer.rank == peer.request.root and peer.request.kind in kinds

    def requests(self) -> dict[int, Request]:
        """Return the requests of the open call by rank, in their order."""
        return {peer.rank: peer.request for peer in self.asking}

    def deadline(self) -> Deadline:
        """Return the end of the open call: the earliest deadline of its requests."""
        if self._first is None:
            ends = [one.deadline for one in self.asking if one.deadline.end is not None]
            self._first = min(ends, key=lambda deadline: deadline.end or 0.0, default=NEVER)
        return self._first

    def postpone(self, deadline: Deadline) -> None:
        """Give all members of the open call another deadline."""
        for peer in self.asking:
            peer.deadline = deadline
        self._first = None

    def ends(self) -> list[float]:
        """Return the times at which the time of a member is up."""
        end = self.deadline().end
        ends = [] if end is None else [end]
        return ends + [peer.deadline.end for peer in self.behind if peer.deadline.end is not None]

    def overdue(self, now: float) -> list[Peer]:
        """Return the late members whose time is up."""
        return [peer for peer in self.behind if peer.deadline.is_over(now)]

    def late_for(self, first: Request) -> list[Peer]:
        """Return the late members that the response of the call of ``first`` answers."""
        return [peer for peer in self.behind if peer.request.kind == first.kind]

    def healed_by(self, first: Request) -> list[Peer]:
        """Return the members that get the state that they lack from the call of ``first``."""
        return [peer for peer in self.recovering if peer.request.kind == first.kind]

    def missed_by(self, first: Request) -> list[Peer]:
        """Return the members that wait for another call with the state of ``first``."""
        requests = [(peer, peer.request) for peer in self.recovering]
        return [
            peer
            for peer, request in requests
            if request.state == first.state and request.kind != first.kind
        ]

    def close_call(self) -> list[Peer]:
        """Take out the members of the open call, and return them."""
        asking, self.asking, self._first, self._is_late = self.asking, [], NEVER, False
        return asking

    def open_late_call(self) -> list[Peer]:
        """Make the late members those of the open call, since it has none; return them."""
        self.asking, self.behind, self._first, self._is_late = self.behind, [], None, True
        return [*self.asking]

    def drop(self, peers: Iterable[Peer]) -> None:
        """Take out ``peers``, as far as they wait."""
        for peer in peers:
            for waiting in (self.asking, self.recovering, self.behind):
                if peer in waiting:
                    waiting.remove(peer)
        self._first = None
