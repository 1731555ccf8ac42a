"""The calls that a process group has made: what it knows of them, for members that are late.

The last responses of a few kinds of call are kept, and of many more kinds if they are small, such
as those that a `fit` makes when it begins. They answer late requests at once. Of other kinds, only
the number of the last response is known, and a late member waits for the next. There may be none
after a broadcast at the start of a training, so an average has to go before a broadcast, and
gathered objects, which may have a new name in each step, before both.

A call is recognised by the layouts of its weights and of its state. If two models of one layout
take turns in a member's calls (`Twins`), a response of one could be given to a member that asks for
the other; so the requests of such twins are refused. So are those of a member that was given a
response before the twins were noticed, in the first cycle of a loop.

A member that has the last response of one kind of call may lack that of another: a restarted
process that got the latest critic still has its first actor. So each kind knows the members that
have its last response.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from flatweights.ray.core._peer import Peer
from flatweights.ray.core._requests import Kind, LacksStateError, Request

_KEPT = 8  # kinds of call of which the last response is kept, without older small ones
_KEPT_SMALL = 1024  # kinds of which older small ones are kept
_SMALL = 1 << 16  # bytes
_KINDS = 1024  # kinds of call of which the number of the last response is known


class CachedResponse(NamedTuple):
    """The last response of one kind of call.

    Attributes:
        number: Its number.
        nbytes: Its bytes.
        gpu: The GPU on which its weights are; None, if they are on the host.
        previous: The number of the call with the same state before it; 0 without a state.
    """

    number: int
    nbytes: int
    gpu: bytes | None
    previous: int

    @property
    def is_small(self) -> bool:
        """Whether it is small enough to be copied out of memory that members map."""
        return self.gpu is None and self.nbytes <= _SMALL

    def reaches(self, peer: Peer) -> bool:
        """Whether a member can read it, where its variables are now."""
        if self.gpu is None:
            return True
        return (
            peer.has_channel and peer.request.gpu is not None and peer.request.gpu.uuid == self.gpu
        )


class CacheChanges(NamedTuple):
    """The numbers of responses that are kept in another way from now on.

    Attributes:
        released: Those that are not kept any more.
        moved: Those to be copied out of memory that members map, of which there is little.
    """

    released: list[int]
    moved: list[int]


class PastCall(NamedTuple):
    """The last call of one kind.

    Attributes:
        number: Its number.
        peers: The numbers of the peers that have its response.
        late: The numbers of the peers that were ever given a response of this kind for which
            they were late.
    """

    number: int
    peers: set[int]
    late: set[int]


class ResponseCache:
    """The responses with weights, and the keys of twins."""

    def __init__(self) -> None:
        """Begin without calls."""
        self._kept: dict[Kind, CachedResponse] = {}  # the oldest first
        # Small responses that were in `_kept` before; the oldest first.
        self._small: dict[Kind, CachedResponse] = {}
        self._made: dict[Kind, PastCall] = {}  # the oldest first
        self._states: dict[str, int] = {}  # by layout of a state, the last call with it
        self._twins: set[str] = set()  # the keys of requests that are twins

    @property
    def has_twins(self) -> bool:
        """Whether two models of one layout take turns in the calls of a member."""
        return bool(self._twins)

    def answer_for(self, peer: Peer) -> CachedResponse | None:
        """Return the response that ``peer`` gets at once; None if it has to wait.

        If it gets that response, `give` notes it.

        Raises:
            LacksStateError: If that response, or the next, would not bring its state to that of the
                others.
            RuntimeError: If it could be given the weights, or the state, of another model.
        """
        request = peer.request
        is_twin = bool(self._twins) and not self._twins.isdisjoint(request.keys)
        if request.lacks:
            if is_twin:
                raise _twin_error(peer)
            return None
        kept = self._last(request.kind)
        if kept is not None and kept.number <= peer.has:
            kept = None  # it takes part in the open call, or waits for it
        if request.state is not None:
            before = self._states.get(request.state, 0) if kept is None else kept.previous
            if peer.states.get(request.state, 0) < before:
                raise LacksStateError(f"rank {peer.rank} has missed calls with a state")
        elif is_twin and (kept is not None or self.is_behind(peer) or self._was_late(peer)):
            raise _twin_error(peer)
        return kept

    def give(self, kept: CachedResponse, peer: Peer) -> None:
        """Note that ``peer``, which is late, gets a response of its kind of call."""
        if peer.request.state is not None:
            peer.states[peer.request.state] = kept.number
        made = self._made.get(peer.request.kind)
        if made is not None:
            made.peers.add(peer.number)
            made.late.add(peer.number)

    def note_twins(
        self, keys: Iterable[str], peers: Sequence[Peer]
    ) -> list[tuple[Peer, RuntimeError]]:
        """Note keys of twins; return the members that may be at the other twin's, with errors.

        Args:
            keys: The keys.
            peers: The members of the open call, which have asked before that was noticed.
        """
        self._twins.update(keys)
        return [
            (peer, _twin_error(peer))
            for peer in peers
            if not self._twins.isdisjoint(peer.request.keys) and self._was_late(peer)
        ]

    def is_behind(self, peer: Peer) -> bool:
        """Whether ``peer`` lacks the last response of its kind of call, and gets the next one.

        Its weights do not count in that call: they are from before the response that it lacks. With
        a state, it is healed instead, and after that takes part at once in calls whose values come
        from the state. In a broadcast, only weights of the root count, which all take as they are:
        so a member takes part once it has a response of any kind since the last.
        """
        request, made = peer.request, self._made.get(peer.request.kind)
        if made is None or request.state is not None:
            return False
        if request.operation == "broadcast":
            return made.number > peer.has
        if request.from_state and self._has_states(peer, made.number):
            return False
        return peer.number not in made.peers

    def last_for(self, peer: Peer) -> CachedResponse | None:
        """Return the last response of the call that ``peer`` makes; None if it is not kept."""
        return self._last(peer.request.kind)

    def keep(
        self,
        request: Request,
        made: CachedResponse,
        peers: Sequence[Peer],
        late: Sequence[Peer] = (),
    ) -> CacheChanges:
        """Keep a response of the call of ``request`` instead of the last one of its kind.

        The ``peers`` get it, and with it the state; so do those that are ``late`` for it.
        """
        changes = CacheChanges([], [])
        kind = request.kind
        last = self._kept.pop(kind, None) or self._small.pop(kind, None)
        if last is not None:
            changes.released.append(last.number)
        self._kept[kind] = made
        self._make_room(changes)
        before = self._made.get(kind)
        ever = set() if before is None else before.late
        ever.update([peer.number for peer in late])
        have = {peer.number for peer in peers} | {peer.number for peer in late}
        self._made.pop(kind, None)
        self._made[kind] = PastCall(made.number, have, ever)
        if len(self._made) > _KINDS:
            del self._made[next(iter(self._made))]
        if request.state is not None:
            self._states[request.state] = made.number
            for peer in peers:
                peer.states[request.state] = made.number
        return changes

    def before(self, request: Request) -> int:
        """Return the number of the last call with the state of ``request``; 0 without one."""
        return 0 if request.state is None else self._states.get(request.state, 0)

    def forget(self, state: str | None) -> CacheChanges:
        """Forget all calls with a state that no member has any more."""
        changes = CacheChanges([], [])
        for calls in (self._kept, self._small):
            for kind in [kind for kind in calls if kind[-1] == state]:
                changes.released.append(calls.pop(kind).number)
        for kind in [kind for kind in self._made if kind[-1] == state]:
            del self._made[kind]
        self._states.pop(state or "", None)
        return changes

    def _make_room(self, changes: CacheChanges) -> None:
        """Move small responses, and release others, until few enough are kept; never the newest."""
        kept, small = self._kept, self._small
        while len(kept) > _KEPT:
            *older, newest = kept
            kind = next((kind for kind in older if kept[kind].is_small), None)
            if kind is not None:
                changes.moved.append(kept[kind].number)
                small[kind] = kept.pop(kind)
            elif kept[newest].is_small:
                break  # it moves at the next call
            else:
                changes.released.append(kept.pop(_least_needed(older)).number)
        while len(small) > _KEPT_SMALL:
            changes.released.append(small.pop(_least_needed(small)).number)

    def _has_states(self, peer: Peer, number: int) -> bool:
        """Whether ``peer`` has the last of all states, one of them from after call ``number``."""
        last = max(self._states.values(), default=0)
        return last > number and all(
            peer.states.get(state, 0) >= made for state, made in self._states.items()
        )

    def _last(self, kind: Kind) -> CachedResponse | None:
        return self._kept.get(kind) or self._small.get(kind)

    def _was_late(self, peer: Peer) -> bool:
        """Whether ``peer`` was ever late for a call like its request, without a state."""
        made = self._made.get(peer.request.kind)
        return peer.request.state is None and made is not None and peer.number in made.late


def _least_needed(kinds: Iterable[Kind]) -> Kind:
    """Return the kind of call, the oldest first, whose response has to go."""
    for operation in ("all_gather", "average"):
        for kind in kinds:
            if kind[0] == operation:
                return kind
    return next(iter(kinds))


def _twin_error(peer: Peer) -> RuntimeError:
    return RuntimeError(
        f"rank {peer.rank} was late, or has joined again, and could be given another model's "
        "weights: several models of one layout take turns in this process group. Give their parts "
        "names of their own, as in TensorFlowVariables({'critic 1': model}), or use a process "
        "group for each"
    )
