"""The calls of a process group's members: which one is due, who takes part, and what each is told.

- Responses are numbered. A member whose response is older than the last is late, or has joined
  again. Its request is answered at once by the last response of a call like it (`ResponseCache`),
  until none is newer. It then takes part in a call if it has the last response of that kind. If it
  does not, or if that response is no longer kept, it waits for the next one.
- The open call consists of the requests of members that wait for its response (`Waiting`). If one
  of them dies meanwhile, its request is dropped. A process that takes its rank is a peer of its
  own.
- Nobody waits for a member that has died or left. A call waits for late members only if it needs
  them.
- Members that lack the state of a training (`Request.lacks`) wait for the next call like theirs.
  Its average does not contain their weights, but they get the state and its response; see
  `Healing`.

`Calls.receive` takes an event (`_events`), and the time; `Calls.actions` returns what is to be
done, in this order. A call is reduced in between: `Reduce` says which, and `Reduced` or `Refused`
what came of it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from flatweights.ray.core._deadline import Deadline
from flatweights.ray.core._events import (
    Action,
    CopyState,
    Detach,
    Ended,
    Event,
    Gave,
    Keep,
    Log,
    LogDeath,
    NobodyHas,
    Reduce,
    Reduced,
    Refused,
    Release,
    Repeated,
    Requested,
    Respond,
    Send,
    SendAgain,
    SendKept,
    SendState,
    StateCopied,
    Tick,
    TimeIsUp,
)
from flatweights.ray.core._healing import Healing
from flatweights.ray.core._peer import Peer, Peers, ranks_of
from flatweights.ray.core._requests import (
    LacksStateError,
    MemberDiedError,
    OutOfSyncError,
    Request,
)
from flatweights.ray.core._response_cache import CachedResponse, ResponseCache
from flatweights.ray.core._waiting import Waiting

_AGAIN = 2.0  # seconds, at least, in which members send weights again that were on a GPU


class Awaited(NamedTuple):
    """What is worth waiting for.

    Attributes:
        requests: The number of requests.
        end: The time at which something is due even if nothing happens; None, if nothing is.
    """

    requests: int
    end: float | None


class Calls:
    """The calls of members.

    Attributes:
        peers: The members; whoever lets them in adds them.
        waiting: Those that wait for the response of a call.
        healings: The healings that are not over.
        number: The number of the last response.
        is_open: Whether the process group is open: before that, each death is worth a line of the
            log.
    """

    def __init__(self, name: str, peers: Peers) -> None:
        """Begin without calls.

        Args:
            name: The name of the process group, for the log.
            peers: The members.
        """
        self.peers = peers
        self.waiting = Waiting()
        self.healings: list[Healing] = []
        self.number = 0
        self.is_open = False
        self._name = name
        self._cache = ResponseCache()
        self._again: Deadline | None = None  # of the open call, if its members were asked again
        self._asked_again: list[Peer] = []  # those
        self._untold: list[Peer] = []  # deaths that were not logged yet
        self._away: set[int] = set()  # ranks that the log calls dead or late, until they are back
        self._reducing: Reduce | None = None
        self._actions: list[Action] = []

    def receive(self, event: Event, now: float) -> None:
        """Take an event."""
        if isinstance(event, Requested):
            self._on_request(event.peer)
        elif isinstance(event, Tick):
            self._go_on(now)
        elif isinstance(event, (Reduced, Refused)):
            self._close(event if isinstance(event, Reduced) else None, now)
        elif isinstance(event, Gave):
            self._take_state(event.peer)
        elif isinstance(event, Ended):
            self._lose(event.peer, event.why)
        elif isinstance(event, StateCopied):
            self._state_copied(event)
        elif isinstance(event, Repeated):
            self._note_series(event)
        else:
            self._request_again(now)

    @property
    def has_actions(self) -> bool:
        """Whether something is to be done."""
        return bool(self._actions)

    def actions(self) -> list[Action]:
        """Return what is to be done, once."""
        actions, self._actions = self._actions, []
        return actions

    def awaited(self) -> Awaited:
        """Return what to wait for."""
        working = self.peers.working()
        # Late members are answered at once.
        on_time = working == self.peers.on_time(self.number)
        ends = self.waiting.ends()
        for healing in self.healings:
            if healing.is_waited_for and healing.deadline.end is not None:
                ends.append(healing.deadline.end)
        return Awaited(max(1, working) if on_time else 1, min(ends) if ends else None)

    @property
    def may_repeat(self) -> bool:
        """Whether `Repeated` may be the next event: all members are on time, and none waits."""
        on_time = self.peers.on_time(self.number)
        return not self._cache.has_twins and on_time == len(self.peers.present)

    def _note_series(self, event: Repeated) -> None:
        """Note calls that were made without the core."""
        peers = [*self.peers.present.values()]
        self.number += event.calls
        for request, number, nbytes in event.made:
            kept = CachedResponse(number, nbytes, None, self._cache.before(request))
            self._do(Keep(self._cache.keep(request, kept, peers)))
        for peer in peers:
            peer.told(self.number)

    def _do(self, action: Action) -> None:
        self._actions.append(action)

    def _warn(self, text: str, *args: object) -> None:
        self._do(Log(logging.WARNING, f"process group %r: {text}", (self._name, *args)))

    # What is due.

    def _go_on(self, now: float) -> None:
        """Do what is due."""
        self._heal(now)
        waiting = self.waiting
        if waiting.behind and not self._count_of_whole():
            self._end_waiting()
        self._give_up_waiting(now)
        if self._is_due(now):
            self._reduce()
        elif waiting.recovering and not self._count_of_whole():
            self._end_healing()

    def _is_due(self, now: float) -> bool:
        """Whether to close the open call now."""
        if not self.waiting.asking:
            return False
        if self.waiting.deadline().is_over(now):
            return True
        if self.peers.on_time(self.number):
            return False
        # The other members are late, or join again.
        return len(self.waiting.asking) == self._count_of_whole() or self._are_enough()

    def _count_of_whole(self) -> int:
        """Return the number of members that wait for no other call than the open one."""
        return len(self.peers.present) - len(self.waiting.out_of_sync)

    def _are_enough(self) -> bool:
        """Whether the open call needs no late members."""
        requests = self.waiting.requests()
        first = requests[min(requests)]
        if first.operation == "broadcast":
            return first.root in requests or first.root not in self.peers.ranks()
        if first.min_results is None:
            return len(requests) >= len(self.peers.missed()) - len(self.waiting.out_of_sync)
        return len(requests) >= min(first.min_results, self._count_of_whole())

    def _end_waiting(self) -> None:
        """Give late members the last response of their call, since nobody else will make it.

        If it is no longer kept, they make the call themselves.
        """
        for peer in self.waiting.open_late_call():
            kept = self._cache.last_for(peer)
            if kept is not None and kept.reaches(peer):
                self.waiting.drop([peer])
                self._send_kept(kept, peer)

    def _give_up_waiting(self, now: float) -> None:
        """Raise in members whose time is up before the others make a call like theirs."""
        for peer in self.waiting.overdue(now):
            others = [rank for rank in self.peers.ranks() if rank != peer.rank]
            timeout = peer.request.timeout
            self._settle([peer])
            self._do(TimeIsUp([peer], others, timeout))

    def _end_healing(self) -> None:
        """Raise in all members, because no member with the state is left.

        Members that set `Member.lacks_state` to False then begin anew, from a checkpoint.
        """
        peers = [*self.waiting.recovering]
        for peer in peers:
            self._do(Keep(self._cache.forget(peer.request.state)))
        self._settle(peers)
        self._do(NobodyHas(peers))

    # What members ask.

    def _on_request(self, peer: Peer) -> None:
        """Take a request: answer it at once, or let the member wait."""
        request = peer.request
        if request.operation == "heal":
            self._await_state(peer)
            return
        for healing in self.healings:
            healing.lose(peer)  # it neither asks for the state nor gives it
        if request.twins:
            for other, why in self._cache.note_twins(request.twins, self.waiting.asking):
                self._answer([other], why)
        try:
            kept = self._cache.answer_for(peer)
        except RuntimeError as error:
            self._answer([peer], error)
            return
        if kept is not None and kept.reaches(peer):
            self._send_kept(kept, peer)
        elif kept is not None and request.state is not None:
            self._answer([peer], LacksStateError("the response is on a GPU that it does not use"))
        elif kept is not None:
            self.waiting.behind.append(peer)
        elif request.only_next and peer.has != self.number:
            self._answer([peer], OutOfSyncError(f"the others have made other calls than {request}"))
        elif request.lacks:
            self.waiting.recovering.append(peer)
        elif self._cache.is_behind(peer) and not self.waiting.needs(peer):
            self.waiting.behind.append(peer)
            text = "rank %d was late for %s, and waits for the next such call"
            self._warn(text, peer.rank, request)
        else:
            self._postpone(peer)
            self.waiting.add(peer)
            self._tell_deaths()

    def _postpone(self, peer: Peer) -> None:
        """Give a member that joins the open call its deadline, if members were asked again."""
        if self._again is None:
            return
        if self.waiting.asking or any(one.is_present for one in self._asked_again):
            peer.deadline = self._again
        else:  # all members of that call have died
            self._again = None

    def _settle(self, peers: Iterable[Peer], number: int | None = None) -> None:
        """Note that members get response ``number`` or, if it is None, none that is newer."""
        peers = [*peers]
        self.waiting.drop(peers)
        for peer in peers:
            peer.told(peer.has if number is None else number)

    def _answer(self, peers: Sequence[Peer], error: Exception | None = None) -> None:
        """Answer requests that are part of no call."""
        self._settle(peers)
        self._do(Respond(peers, error))

    def _send_kept(self, kept: CachedResponse, peer: Peer) -> None:
        self._cache.give(kept, peer)
        self._settle([peer], kept.number)
        self._do(SendKept(kept.number, [peer]))

    # The open call.

    def _reduce(self) -> None:
        waiting = self.waiting
        requests, timeout = waiting.requests(), waiting.deadline().timeout
        first = requests[min(requests)]
        late, others = self.peers.missed() - requests.keys(), []
        if waiting.out_of_sync:
            late.difference_update(ranks_of(waiting.out_of_sync))
            others = [*waiting.healed_by(first), *waiting.late_for(first)]
        self._reducing = Reduce(
            first, requests, [*waiting.asking], others, sorted(late), self.peers.lost(), timeout
        )
        self._do(self._reducing)

    def _request_again(self, now: float) -> None:
        """Have members whose weights are on a GPU send them through memory of the host.

        The call stays open until they have, or their time is up.
        """
        asking = self.waiting.asking
        again = [peer for peer in asking if peer.request.is_in_segment]
        timeout, end = self.waiting.deadline()
        self._again = Deadline(timeout, end and max(end, now + _AGAIN))
        self._asked_again = again
        self._settle(again)
        self.waiting.postpone(self._again)
        self._do(SendAgain(again))

    def _close(self, result: Reduced | None, now: float) -> None:
        """Close the open call, which has a result or is an error."""
        call, waiting, cache = self._reducing, self.waiting, self._cache
        assert call is not None
        self._reducing = self._again = None
        self._asked_again = []
        first, requests = call.first, call.requests
        self.number += 1
        number, asking = self.number, waiting.close_call()
        recovering, missed, served = waiting.healed_by(first), waiting.missed_by(first), []
        donor = 0
        healed: list[Peer] = []
        late: tuple[int, ...] = ()
        readers: list[tuple[Peer, Request]] = []
        if result is not None:
            served = waiting.late_for(first)
            if recovering:
                donor = self._begin_healing(number, result.used, asking, recovering, call, now)
                healed = recovering
            late = tuple(call.late)
            if missed or waiting.behind:
                late = tuple(sorted({*late, *ranks_of([*missed, *waiting.behind])}))
            made = CachedResponse(number, result.nbytes, result.gpu, cache.before(first))
            changes = cache.keep(first, made, [*asking, *recovering], served)
            self._do(Keep(changes))
        if first.gpu is not None:
            readers = [(peer, peer.request) for peer in (*asking, *recovering, *served)]
        took_part = tuple([peer.number for peer in asking])
        # The last member to ask may still be awake. It gets the response first, and goes on while
        # the others wake up.
        told = [*reversed(asking), *healed, *served]
        if missed:
            self._answer(missed, OutOfSyncError(f"the others have called {first}"))
        if healed or served:
            waiting.drop([*healed, *served])
        for peer in told:
            peer.told(number)
        back = sorted(self._away & requests.keys()) if self._away else []
        self._away -= {*back}
        named = frozenset(self._away)
        send = Send(number, told, took_part, donor, healed, readers, late, named)
        self._do(send)
        for rank in back:  # no member waits for the log
            self._warn("rank %d is back", rank)
        if result is not None and first.operation != "broadcast":
            self._away |= {*late}

    def _begin_healing(
        self,
        number: int,
        used: Sequence[int],
        asking: Sequence[Peer],
        recovering: Sequence[Peer],
        call: Reduce,
        now: float,
    ) -> int:
        """Choose the donor among the averaged members; return its number."""
        donor = min((peer for peer in asking if peer.rank in used), key=lambda peer: peer.rank)
        until = Deadline.after(call.timeout, now)
        self.healings.append(Healing(number, donor, [*recovering], until))
        return donor.number

    # Healing.

    def _await_state(self, peer: Peer) -> None:
        """Note that a member waits for the state."""
        healing = next((one for one in self.healings if peer in one.recovering), None)
        if healing is None:
            self._answer([peer], LacksStateError("nobody gives the state"))
        else:
            healing.waiting.append(peer)

    def _take_state(self, peer: Peer) -> None:
        """Have the state of a donor copied, if members wait for it; the donor goes on meanwhile."""
        # It may have given the state before, to members that have yet to ask for it.
        due = (one for one in self.healings if one.donor is peer and one.is_waited_for)
        healing = next(due, None)
        self._answer([peer])
        if healing is not None:
            self._do(CopyState(healing.number))

    def _state_copied(self, event: StateCopied) -> None:
        for healing in self.healings:
            if healing.number != event.number:
                continue
            if event.why is None:
                healing.is_given = True
            else:
                healing.fail(event.why)

    def _heal(self, now: float) -> None:
        """Answer members that wait for a state, if it is known; give up on late donors.

        A state that nobody needs any more is released at once: it is as large as a model and the
        slots of its optimizer.
        """
        for healing in self.healings:
            healing.give_up_in_time(now)
            if not healing.is_known:
                continue
            peers, healing.waiting = healing.waiting, []
            healing.recovering = [peer for peer in healing.recovering if peer not in peers]
            if not healing.is_given:
                self._answer(peers, healing.why)
                continue
            self._settle(peers, healing.number)
            self._do(SendState(healing.number, peers))
            for peer in peers:
                self._away.discard(peer.rank)
                text = "rank %d is healed, with the state of rank %d"
                self._warn(text, peer.rank, healing.donor.rank)
        for healing in [one for one in self.healings if not one.recovering]:
            self.healings.remove(healing)
            self._do(Release(healing.number))

    # Ends.

    def _lose(self, peer: Peer, why: MemberDiedError | None) -> None:
        """Wait for nothing more of a member that has left or is dead."""
        if not peer.is_present:
            return
        self.waiting.drop([peer])
        peer.ends(why)
        self.peers.drop(peer)
        for healing in self.healings:
            healing.lose(peer)
        self._do(Detach(peer))
        if why is not None:
            self._untold.append(peer)
            self._tell_deaths()

    def _tell_deaths(self) -> None:
        """Log deaths, but only once a member waits: at the end of a training they do not matter."""
        if self.waiting.asking or not self.is_open:
            for peer in self._untold:
                self._do(LogDeath(peer))
                if peer.has_joined:
                    self._away.add(peer.rank)
            self._untold.clear()
