"""The core of a process group with some members, and a clock that a test sets."""

from typing import Any

from flatweights.ray.core._calls import Calls
from flatweights.ray.core._events import (
    Action,
    Event,
    Requested,
    Tick,
)
from flatweights.ray.core._peer import Peer, Peers
from flatweights.ray.core._requests import Request

PLAIN = Request("average", "weights")


class TheProcessGroup:
    """The core and its members.

    Attributes:
        now: The time.
        done: The last actions.
    """

    def __init__(self, size: int = 3) -> None:
        self.peers = Peers()
        self.calls = Calls("test", self.peers)
        self.calls.is_open = True
        self.now = 100.0
        self.done: list[Action] = []
        self._entered = 0
        for rank in range(size):
            self.join(rank)

    def join(self, rank: int) -> Peer:
        """Let a process in, and tell it its first response."""
        self._entered += 1
        before = self.peers.newest.get(rank)
        peer = Peer(rank, f"process of rank {rank}", b"", self._entered, before)
        self.peers.add(peer)
        peer.ready()
        peer.told(0)
        if self.calls.number == 0:
            peer.join()
        return peer

    def __getitem__(self, rank: int) -> Peer:
        """Return the newest process of a rank."""
        return self.peers.newest[rank]

    def receive(self, *events: Event) -> list[Action]:
        """Return the actions after events, and whatever is due then."""
        for event in (*events, Tick()):
            self.calls.receive(event, self.now)
        self.done = self.calls.actions()
        self.calls.awaited()  # as the coordinator does, before it waits
        return self.done

    def request(self, rank: int, request: Request = PLAIN, **options: Any) -> list[Action]:
        """Let a member ask."""
        self[rank].requests(request._replace(**options), self.now)
        return self.receive(Requested(self[rank]))
