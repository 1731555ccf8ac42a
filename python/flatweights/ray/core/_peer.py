"""One member as the calls see it: its states, what it has, and what it asks.

A peer is one process, not a rank: a process that takes the rank of a dead one is a peer of its own,
and a request belongs to the peer that made it. The states of a peer:

| state | the member | what ends it |
| --- | --- | --- |
| `ENTERING` | has a join reply, and is making its channel | `ready`: `READY` |
| `READY` | waits for its first response | `told`: `WORKING` |
| `WORKING` | has the response `has`, and has not asked again | `requests`: `ASKING` |
| `ASKING` | has asked, and waits for the response | `told`: `WORKING` |
| `LEFT` | has said that it leaves | nothing |
| `DEAD` | has ended in another way | nothing |

From each of the first four, `ends` leads to `LEFT` or `DEAD`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from flatweights.ray.core._deadline import NEVER, Deadline
from flatweights.ray.core._requests import MemberDiedError, Request

_NOTHING = Request("leave")


class PeerState(enum.Enum):
    """The state of a member; see the table above."""

    ENTERING = enum.auto()
    READY = enum.auto()
    WORKING = enum.auto()
    ASKING = enum.auto()
    LEFT = enum.auto()
    DEAD = enum.auto()


@dataclass(eq=False)
class Peer:
    """One member.

    Attributes:
        rank: Its rank.
        who: The name of the process in errors.
        token: The token by which it is recognised.
        number: A number that no other process of the process group has, from 1.
        before: Until it has joined, the last process of its rank that had.
        has_joined: Whether it was there when the process group opened, or has asked since.
        has_channel: Whether its weights come through memory that it shares with the coordinator.
        state: Its state.
        has: The largest number of the responses that it got; 0 after the first response.
        states: By layout of a state, the number of the last call whose response it has.
        request: Its request, while it is `ASKING`.
        deadline: The time after which others that have not asked, too, are late.
        why: The error that describes its end, if it ended without leaving.
        peers: Those that count it, if any do.
    """

    rank: int
    who: str
    token: bytes
    number: int = 0
    before: Peer | None = None
    has_joined: bool = False
    has_channel: bool = False
    state: PeerState = PeerState.ENTERING
    has: int = 0
    states: dict[str, int] = field(default_factory=dict)
    request: Request = _NOTHING
    deadline: Deadline = NEVER
    why: MemberDiedError | None = None
    peers: Peers | None = None

    @property
    def is_present(self) -> bool:
        """Whether it takes part: it is alive, and has not left."""
        return self.state not in (PeerState.LEFT, PeerState.DEAD)

    @property
    def is_missed(self) -> bool:
        """Whether others may need it: it has joined, or takes the place of one that has died."""
        return self.has_joined or (self.before is not None and self.before.why is not None)

    def ready(self) -> None:
        """Note that it can be told its first response."""
        self._move(PeerState.READY)

    def join(self) -> None:
        """Note that it is a member from now on: if it dies, the others miss it."""
        self.has_joined, self.before = True, None

    def requests(self, request: Request, now: float) -> None:
        """Note what it asks."""
        self.request, self.deadline = request, Deadline.after(request.timeout, now)
        self._move(PeerState.ASKING)
        self.join()

    def told(self, number: int) -> None:
        """Note that it gets response ``number``."""
        self._move(PeerState.WORKING, max(number, self.has))
        self.request = _NOTHING

    def ends(self, why: MemberDiedError | None) -> None:
        """Note that it has left or, with a reason, ended in another way."""
        self._move(PeerState.DEAD if why else PeerState.LEFT)
        self.why, self.request = why, _NOTHING

    def _move(self, state: PeerState, has: int | None = None) -> None:
        """Change the state, and the response that it has; let those that count it know."""
        if self.peers is not None:
            self.peers.count(self, -1)
        self.state = state
        if has is not None:
            self.has = has
        if self.peers is not None:
            self.peers.count(self, 1)


class Peers:
    """The members of a process group, with those that are coming in.

    Attributes:
        newest: By rank, the newest process that has joined, and may have ended, or is coming in.
        present: The present ones.
        ready: The number of those that wait for their first response.
    """

    def __init__(self) -> None:
        """Begin without members."""
        self.newest: dict[int, Peer] = {}
        self.present: dict[int, Peer] = {}  # by number
        self.ready = 0
        self._working: dict[int, int] = {}  # by the response that they have: how many

    def add(self, peer: Peer) -> None:
        """Add one that is coming in."""
        self.newest[peer.rank] = self.present[peer.number] = peer
        peer.peers = self
        self.count(peer, 1)

    def drop(self, peer: Peer) -> None:
        """Drop one that has left or died; one that has not joined leaves no trace."""
        del self.present[peer.number]
        if not peer.has_joined:
            del self.newest[peer.rank]
            if peer.before is not None:
                self.newest[peer.rank] = peer.before

    def ranks(self) -> tuple[int, ...]:
        """Return the ranks of the present members."""
        return tuple(sorted(peer.rank for peer in self.present.values()))

    def missed(self) -> set[int]:
        """Return the ranks of the present members, without those that may yet give up to join."""
        return {peer.rank for peer in self.present.values() if peer.is_missed}

    def lost(self) -> dict[int, MemberDiedError]:
        """Return, by rank, the reasons for which members have ended without leaving."""
        return {k: peer.why for k, peer in self.newest.items() if peer.why is not None}

    def count(self, peer: Peer, added: int) -> None:
        """Count ``peer`` once more, or once less, if it is ready or works.

        Looking at all members after each request would take the square of their number.
        """
        if peer.state is PeerState.READY:
            self.ready += added
        elif peer.state is PeerState.WORKING:
            working = self._working.get(peer.has, 0) + added
            if working:
                self._working[peer.has] = working
            else:
                del self._working[peer.has]

    def working(self) -> int:
        """Return the number of members that have not asked again."""
        return sum(self._working.values())

    def on_time(self, number: int) -> int:
        """Return how many of these have response ``number``, which is the last one."""
        return self._working.get(number, 0)


def ranks_of(peers: Iterable[Peer]) -> list[int]:
    """Return the ranks of ``peers``, in order."""
    return sorted(peer.rank for peer in peers)
