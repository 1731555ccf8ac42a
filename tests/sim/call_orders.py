"""The core of members' calls, with processes that do whatever members may do; see `orders`.

A process stands for a `Member`, and for a training that makes the calls of a program in turn. It is
not the package's own code, but what the core relies on: a process asks for one thing at a time,
gives its state if the response says so, and is healed if it lacks the state. It dies silently; the
core hears of that at once, later, or when a response cannot be sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from tests.sim.orders import Move, WrongError

from flatweights.ray.core import _response_cache
from flatweights.ray.core._calls import Calls
from flatweights.ray.core._events import (
    Action,
    CopyState,
    Detach,
    Ended,
    Event,
    Gave,
    Keep,
    LastCall,
    NobodyHas,
    Reduce,
    Reduced,
    Refused,
    Release,
    Repeated,
    Requested,
    Respond,
    Send,
    SendKept,
    SendState,
    StateCopied,
    Tick,
    TimeIsUp,
)
from flatweights.ray.core._peer import Peer, Peers, PeerState, ranks_of
from flatweights.ray.core._requests import Kind, LacksStateError, MemberDiedError, Request

_NBYTES = 1 << 20  # those that are not kept in memory of their own
_FAIR = 400  # moves without faults, in which all take part in one call again


class Setup(NamedTuple):
    """Members, what they call, and how often something goes wrong.

    Attributes:
        program: The calls that each process makes in turn.
        size: The number of ranks.
        calls: The number of calls that a process makes before it leaves.
        deaths: How many processes die.
        leaves: How many leave before they have made all calls.
        entries: How many come in for one that is gone.
        pauses: How often the time of a call is up.
        failures: How often a call, or a copy of the state, fails, or a rank is left out of a call.
        repeats: How many calls are made without the core.
        keeps_few: Whether only the last response of one kind is kept.
    """

    program: tuple[Request, ...]
    size: int = 2
    calls: int = 2
    deaths: int = 1
    leaves: int = 0
    entries: int = 1
    pauses: int = 1
    failures: int = 0
    repeats: int = 0
    keeps_few: bool = False


AVERAGE = Request("average", "weights")
SHORT = AVERAGE._replace(timeout=1.0, min_results=1)
BROADCAST = SHORT._replace(operation="broadcast", root=0)
_GIVE, _HEAL = Request("give", "state"), Request("heal", "state")
STEP = SHORT._replace(state="state")
OTHER = SHORT._replace(digest="others")

SETUPS = {
    "average": Setup((AVERAGE,), size=3, leaves=1, deaths=2, entries=2, failures=1),
    "late": Setup((SHORT,), size=3, pauses=2),
    "two models": Setup((SHORT, OTHER), calls=4, pauses=2),
    "few are kept": Setup((SHORT, OTHER), calls=4, pauses=2, keeps_few=True),
    "most of them": Setup((SHORT._replace(min_results=2),), size=3, leaves=1),
    "broadcast": Setup((BROADCAST, SHORT), calls=3, keeps_few=True),
    "state": Setup((STEP,), calls=3, deaths=2, entries=2, pauses=2, failures=1),
    "three with a state": Setup((STEP,), size=3, deaths=3, entries=3, leaves=1),
    "nobody waits": Setup((STEP._replace(timeout=None, min_results=None),), size=3, leaves=1),
    "two calls with a state": Setup((STEP, STEP._replace(digest="others")), calls=3, pauses=2),
    "repeated": Setup((SHORT,), calls=4, repeats=2),
    "repeated with a state": Setup((STEP,), calls=4, repeats=2),
}


@dataclass(eq=False)
class Process:
    """One process.

    Attributes:
        peer: What the core knows of it.
        before: Whether the last member of its rank has died; None, once this one is a member.
        at: The number of calls that it has made.
        holds: By kind of call, the last response that it has.
        state: The last call of its state.
        lacks: Whether it lacks the state.
        asked: What it asks, until it is told.
        owes: What it asks next, if that is no call: to ``"give"`` its state or to ``"heal"``.
        heals_by: The response whose state it gets.
        end: The time after which it waits no longer.
        told: The number of the last response that it has.
        is_alive: Whether it lives.
        is_closed: Whether a response to it cannot be sent, since it is dead.
    """

    peer: Peer
    before: bool | None = False
    at: int = 0
    holds: dict[Kind, int] = field(default_factory=dict)
    state: int = 0
    lacks: bool = False
    asked: Request | None = None
    owes: str = ""
    heals_by: int = 0
    end: float | None = None
    told: int = 0
    is_alive: bool = True
    is_closed: bool = False


class CallsModel:
    """The core of members' calls, their processes, and what has to be true."""

    entities: ClassVar[type] = Peer
    values: ClassVar[type] = Request

    def __init__(self, setup: Setup) -> None:
        self.left = setup._asdict()  # what may yet happen
        self.program: tuple[Request, ...] = self.left.pop("program")
        self.size: int = self.left.pop("size")
        self.most: int = self.left.pop("calls")
        self.keeps_few: bool = self.left.pop("keeps_few")
        self.peers = Peers()
        self.core = Calls("orders", self.peers)
        self.core.is_open = True
        self.processes: dict[int, Process] = {}
        self.entered = 0
        self.now = 100.0
        self.is_due = False  # whether the core has not been told that it knows all
        self.pending: Reduce | CopyState | None = None
        self.kept: dict[int, Kind] = {}  # responses, by number
        self.last: dict[Kind, int] = {}  # of each kind
        self.state = 0  # the last call with the state
        self.before: dict[int, int] = {}  # by number, the last call with the state before it
        # By number: who gives its state, where it was, and until when it is waited for.
        self.donors: dict[int, tuple[int, int, float | None]] = {}
        self.died: dict[int, bool] = {}  # by rank: whether the last member has
        self.states: set[int] = set()  # that were copied
        for rank in range(self.size):
            self._enter(rank)
            self._is_ready(self.processes[rank + 1])
            self.processes[rank + 1].peer.join()
            self.processes[rank + 1].before = None

    # What may happen.

    def moves(self) -> Iterator[Move]:
        if isinstance(self.pending, Reduce):
            yield from self._results(self.pending)
            return
        if self.pending is not None:
            yield ("copied",)
            if self.left["failures"]:
                yield ("not copied",)
            return
        if self.is_due:
            yield ("step",)
        for number, process in self.processes.items():
            yield from self._moves_of(number, process)
        if self.left["entries"]:
            gone = [rank for rank, peer in self.peers.newest.items() if not peer.is_present]
            yield from (("enters", rank) for rank in gone)
        if self.left["pauses"] and not self.is_due and self.core.awaited().end is not None:
            yield ("time",)
        if self.left["repeats"] and not self.is_due and self._may_repeat():
            yield ("repeat",)

    def _moves_of(self, number: int, process: Process) -> Iterator[Move]:
        state = process.peer.state
        if not process.is_alive:
            yield ("noticed", number)
            return
        if state is PeerState.ENTERING:
            yield ("ready", number)
        elif state is PeerState.WORKING:
            yield self._next_of(number, process)
            if self.left["leaves"] and not process.owes and process.at < self.most:
                yield ("leaves", number)
        elif process.asked is not None and process.asked.operation == "give":
            yield ("gives", number)
        if self.left["deaths"]:
            yield ("dies", number)
            yield ("dies", number, "closed")

    def _next_of(self, number: int, process: Process) -> Move:
        if process.owes:
            return process.owes, number
        return ("asks" if process.at < self.most else "leaves"), number

    def _results(self, call: Reduce) -> Iterator[Move]:
        if self._differ(call) or self._lacks_root(call):
            yield ("refused",)
            return
        ranks = tuple(sorted(call.requests))
        yield ("reduced", *ranks)
        if self.left["failures"]:
            yield ("refused",)
            if call.first.operation == "average" and len(ranks) > (call.first.min_results or 2):
                yield from (("reduced", *(k for k in ranks if k != out)) for out in ranks)

    def _may_repeat(self) -> bool:
        present = [one for one in self.processes.values() if one.peer.is_present]
        return (
            self.core.may_repeat
            and len({one.at % len(self.program) for one in present}) == 1
            and all(one.is_alive and not (one.owes or one.lacks) for one in present)
            and all(0 < one.at < self.most for one in present)
        )

    def make(self, move: Move) -> None:
        kept = _response_cache._KEPT
        if self.keeps_few:
            _response_cache._KEPT = 1
        try:
            self._make(*move)
        finally:
            _response_cache._KEPT = kept

    def _make(self, kind: str, *about: Any) -> None:
        if kind == "step":
            present = len(self.processes)
            self._tell(Tick())
            self.is_due = self.pending is not None or len(self.processes) < present
            if not self.is_due:
                self._check_waits()
        elif kind == "time":
            self.left["pauses"] -= 1
            end = self.core.awaited().end
            assert end is not None
            self.now, self.is_due = end, True
        elif kind == "repeat":
            self._repeat()
        elif kind == "enters":
            self.left["entries"] -= 1
            self._enter(about[0])
        elif kind in ("reduced", "refused"):
            is_forced = self._differ(self._call) or self._lacks_root(self._call)
            is_whole = kind == "reduced" and len(about) == len(self._call.requests)
            self.left["failures"] -= not (is_forced or is_whole)
            self._close(about if kind == "reduced" else None)
        elif kind in ("copied", "not copied"):
            self._copy(kind == "copied")
        else:
            self._make_of(kind, self.processes[about[0]], is_closed="closed" in about)

    def _make_of(self, kind: str, process: Process, *, is_closed: bool) -> None:
        peer = process.peer
        if kind == "ready":
            self._is_ready(process)
        elif kind == "asks":
            request = self.program[process.at % len(self.program)]
            self._ask(process, request._replace(lacks=process.lacks and request.state is not None))
        elif kind in ("give", "heal"):
            process.owes = ""
            self._ask(process, _GIVE if kind == "give" else _HEAL)
        elif kind == "gives":
            self._tell(Gave(peer))
        elif kind == "leaves":
            self.left["leaves"] -= process.at < self.most
            process.is_alive = False
            self._end(process, None)
        elif kind == "dies":
            self.left["deaths"] -= 1
            process.is_alive, process.is_closed = False, is_closed
        else:
            assert kind == "noticed"
            self._end(process, MemberDiedError("it died"))

    def recovers(self) -> bool:
        self.left = dict.fromkeys(self.left, 0)
        for number, process in [*self.processes.items()]:
            if not process.is_alive:
                self.make(("noticed", number))
        self.most = sum((process.at for process in self.processes.values()), self.core.number) + 99
        for _ in range(_FAIR):
            moves = [*self.moves()]
            if not moves:
                end = self.core.awaited().end
                if end is None:
                    return not self.processes
                self.now, self.is_due = end, True
                continue
            order = [move for move in moves if move[0] != "asks"] or moves
            self.make(min(order, key=self._calls_of))
            if isinstance(self.pending, Reduce) and len(self.pending.requests) == len(
                self.processes
            ):
                return True
        return False

    def _calls_of(self, move: Move) -> int:
        return self.processes[move[1]].at if move[0] == "asks" else 0

    # What processes do.

    def _enter(self, rank: int) -> None:
        self.entered += 1
        before = self.peers.newest.get(rank)
        peer = Peer(rank, f"process {self.entered}", b"", self.entered, before)
        self.peers.add(peer)
        self.processes[self.entered] = Process(peer, self.died.get(rank, False))

    def _is_ready(self, process: Process) -> None:
        process.peer.ready()
        process.peer.told(0)
        process.lacks = self.core.number > 0
        self.is_due = True

    def _ask(self, process: Process, request: Request) -> None:
        process.asked, process.before = request, None
        process.end = None if request.timeout is None else self.now + request.timeout
        process.peer.requests(request, self.now)
        if request.operation != "give":
            self._tell(Requested(process.peer))

    def _end(self, process: Process, why: MemberDiedError | None) -> None:
        if process.before is None:
            self.died[process.peer.rank] = why is not None
        self._tell(Ended(process.peer, why))

    def _repeat(self) -> None:
        self.left["repeats"] -= 1
        number = self.core.number + 1
        request = self.program[next(iter(self.processes.values())).at % len(self.program)]
        for process in self.processes.values():
            self._check_fresh(process, request)
        self._note(number, request)
        self.kept[number] = request.kind
        self._tell(Repeated(1, [LastCall(request, number, _NBYTES)]))
        for process in self.processes.values():
            process.told = number
            self._apply(process, number, request)

    # What the core says.

    def _tell(self, event: Event) -> None:
        self.is_due = True
        self.core.receive(event, self.now)
        self._obey()

    def _obey(self) -> None:
        while self.core.has_actions:
            for action in self.core.actions():
                if self.pending is not None:
                    raise WrongError(f"{action} while {self.pending}")
                self._do(action)

    def _do(self, action: Action) -> None:
        if isinstance(action, Reduce):
            self._check_call(action)
            self.pending = action
        elif isinstance(action, CopyState):
            self.pending = action
        elif isinstance(action, Keep):
            for number in action.changes.moved:
                self._check(number in self.kept, f"response {number} is to be moved")
            for number in action.changes.released:
                self.kept.pop(number, None)
        elif isinstance(action, SendKept):
            self._check(action.number in self.kept, f"response {action.number} is not kept")
            for process in self._told(action.peers, action.number):
                self._take(process, action.number, self.kept[action.number])
        elif isinstance(action, SendState):
            self._heal(action)
        elif isinstance(action, Release):
            self.states.discard(action.number)
        elif isinstance(action, Detach):
            process = self.processes.pop(action.peer.number)
            self._check(not process.is_alive, f"{process.peer.who} is alive")
        else:
            self._refuse(action)

    def _refuse(self, action: Action) -> None:
        """Take what the core says to members whose requests have no response."""
        if isinstance(action, Respond):
            self._respond(action)
        elif isinstance(action, TimeIsUp):
            for process in self._told(action.peers):
                self._check(process.end is not None and process.end <= self.now, "it has time")
        elif isinstance(action, NobodyHas):
            self.state = 0
            for process in self._told(action.peers):
                process.lacks, process.state, process.at = False, 0, 0

    def _told(self, peers: Sequence[Peer], number: int | None = None) -> Iterator[Process]:
        """Yield the live processes of ``peers``, which have asked, and wait no longer.

        Args:
            peers: What the core knows of them.
            number: That of the response, if they get one.
        """
        for peer in peers:
            process = self.processes.get(peer.number)
            if process is None:
                raise WrongError(f"{peer.who} is told something after its end")
            self._check(process.asked is not None, f"{peer.who} is told what it has not asked")
            self._check(peer.state is PeerState.WORKING, f"{peer.who} is told, but {peer.state}")
            process.told = process.told if number is None else number
            if process.is_alive:
                yield process
                process.asked = process.end = None
            elif process.is_closed:
                self._end(process, MemberDiedError("its response was not sent"))
            else:
                process.asked = None

    def _respond(self, action: Respond) -> None:
        for process in self._told(action.peers):
            if action.error is None:
                asked = process.asked
                self._check(asked is not None and asked.operation == "give", "no answer")
            elif isinstance(action.error, LacksStateError):
                has_it = process.state == self.state and not (process.lacks or process.heals_by)
                self._check(not has_it, f"{process.peer.who} has the state")
                process.lacks = True
            else:  # its state could not be copied
                self._check(process.heals_by > 0, f"{process.peer.who}: {action.error}")

    @property
    def _call(self) -> Reduce:
        assert isinstance(self.pending, Reduce)
        return self.pending

    def _differ(self, call: Reduce) -> bool:
        return len({request.kind for request in call.requests.values()}) > 1

    def _lacks_root(self, call: Reduce) -> bool:
        return call.first.operation == "broadcast" and call.first.root not in call.requests

    def _close(self, used: Sequence[int] | None) -> None:
        """Reduce the open call; ``used`` are the ranks of its result, if it has one."""
        call, self.pending, self.is_due = self._call, None, True
        number = self.core.number + 1
        others = [one for one in self.processes.values() if one.asked and one.asked.digest]
        others = [one for one in others if one.peer not in call.peers and one.asked != _GIVE]
        alike = [one for one in others if one.asked and one.asked.kind == call.first.kind]
        lacking = [one.peer.number for one in alike if one.asked and one.asked.lacks]
        missed = (one.peer for one in others if one.peer.number not in lacking)
        late = {*call.late, *ranks_of(missed)}
        event = Refused() if used is None else Reduced(used, _NBYTES)
        self.core.receive(event, self.now)
        sent = 0
        for action in self.core.actions():
            if not isinstance(action, Send):
                self._do(action)
                continue
            sent += 1
            self._check(action.number == number, f"response {action.number} after {number - 1}")
            self._check(action.took_part == tuple(one.number for one in call.peers), "took part")
            healed = [one.number for one in action.recovering]
            self._check(
                sorted(healed) == (sorted(lacking) if used else []),
                f"{healed} are healed, not {lacking}",
            )
            told = {*call.peers, *(one.peer for one in alike if used)}
            self._check({*action.peers} == told, f"{ranks_of(action.peers)} are told")
            self._check(not used or {*action.late} == late, f"{action.late} are late, not {late}")
            self._send(action, call, used)
        self._check(sent == 1, f"{sent} responses")
        self._obey()

    def _send(self, send: Send, call: Reduce, used: Sequence[int] | None) -> None:
        if send.recovering:
            assert used is not None
            ranks = {one.number: one.rank for one in call.peers}
            self._check(ranks.get(send.donor) == min(used), f"process {send.donor} gives")
            donor = self.processes[send.donor]
            end = None if call.timeout is None else self.now + call.timeout
            self.donors[send.number] = send.donor, donor.at, end
        if used is not None:
            self._note(send.number, call.first)
            self.kept[send.number] = call.first.kind
        recovering = {one.number for one in send.recovering}
        for process in self._told(send.peers, send.number):
            number = process.peer.number
            if used is None:
                continue
            if number in recovering:
                process.owes, process.heals_by = "heal", send.number
                continue
            self._take(process, send.number, call.first.kind)
            if number == send.donor:
                process.owes = "give"

    def _copy(self, is_copied: bool) -> None:
        assert isinstance(self.pending, CopyState)
        number, self.pending = self.pending.number, None
        why = None if is_copied else RuntimeError("memory is short")
        if is_copied:
            self.states.add(number)
        else:
            self.left["failures"] -= 1
        self._tell(StateCopied(number, why))

    def _heal(self, action: SendState) -> None:
        number = action.number
        self._check(number in self.states, f"the state of {number} was not copied")
        for process in self._told(action.peers, number):
            self._check(process.heals_by == number, f"{process.peer.who} waits for another state")
            kind = next(kind for kind, last in self.last.items() if last >= number)
            process.at = self.donors[number][1] + 1
            process.holds[kind] = process.state = number
            process.lacks, process.heals_by = False, 0

    def _note(self, number: int, request: Request) -> None:
        """Note that a call has been made."""
        self.last[request.kind] = number
        if request.state is not None:
            self.before[number], self.state = self.state, number

    def _take(self, process: Process, number: int, kind: Kind) -> None:
        """Let a process have a response."""
        assert process.asked is not None
        self._check(process.asked.kind == kind, f"{process.peer.who} asked {process.asked}")
        self._apply(process, number, process.asked)

    def _apply(self, process: Process, number: int, request: Request) -> None:
        held = process.holds.get(request.kind, 0)
        self._check(number > held, f"{process.peer.who} gets {number} after {held}")
        process.holds[request.kind] = number
        process.at += 1
        if request.state is not None:
            before = self.before[number]
            self._check(
                process.state == before, f"{process.peer.who} is at {process.state}, not {before}"
            )
            process.state = number

    # What has to be true.

    def _check(self, is_right: bool, text: str) -> None:
        if not is_right:
            raise WrongError(text)

    def _is_on_time(self, process: Process) -> bool:
        """Whether a process may yet ask for the call that is next."""
        is_working = process.peer.state is PeerState.WORKING
        return is_working and process.told == self.core.number

    def _versions(self, process: Process, request: Request) -> tuple[int, int]:
        """Return the number of the response whose weights a process has, and of the last one."""
        if request.state is not None:
            return process.state, self.state
        return process.holds.get(request.kind, 0), self.last.get(request.kind, 0)

    def _is_fresh(self, process: Process) -> bool:
        has, last = self._versions(process, process.asked) if process.asked else (0, 1)
        return has == last

    def _check_fresh(self, process: Process, request: Request) -> None:
        """Check that the weights of a process are those of the last response."""
        if request.operation == "average":
            has, last = self._versions(process, request)
            who = process.peer.who
            # If the response is no longer kept, and nobody has it, the others begin anew.
            others = (self._versions(one, request)[0] for one in self.processes.values())
            is_right = has == last or (self.keeps_few and last not in others)
            self._check(is_right, f"the weights of {who} are of {has}, not of {last}")

    def _check_call(self, call: Reduce) -> None:
        taking = {one.number for one in call.peers}
        asking = {k: one for k, one in self.processes.items() if one.asked is not None}
        self._check(call.first is call.requests[min(call.requests)], "the first request")
        ends = []
        for peer in call.peers:
            process = asking.get(peer.number)
            if process is None or process.asked is not call.requests[peer.rank]:
                raise WrongError(f"{peer.who} takes part with what it has not asked")
            self._check(not process.asked.lacks, f"{peer.who} lacks the state, and takes part")
            self._check_fresh(process, process.asked)
            ends += [] if process.end is None else [process.end]
        is_over = bool(ends) and min(ends) <= self.now
        elsewhere = {one.peer.rank for k, one in asking.items() if k not in taking}
        missed = {one.peer.rank for one in self.processes.values() if one.before is not False}
        late = sorted(missed - call.requests.keys() - elsewhere)
        entering = {one.peer.rank for one in self.processes.values()}
        # That a member is dead may be noticed after this call began: when it is told that its own
        # time is up.
        noticed = {*call.late} - entering
        found = [rank for rank in call.late if rank not in noticed]
        self._check(found == late, f"{found} are late, not {late}")
        lost = {rank for rank, has_died in self.died.items() if has_died} - entering
        self._check({*call.lost} | noticed == lost, f"{[*call.lost]} are lost, not {lost}")
        for number, process in self.processes.items():
            if number in taking:
                continue
            request = process.asked
            if request is None:
                on_time = self._is_on_time(process)
                self._check(is_over or not on_time, f"{process.peer.who} is not waited for")
            elif request.operation == "average" and not request.lacks and request.state is None:
                is_fresh = self._is_fresh(process)
                self._check(not is_fresh, f"{process.peer.who} has asked, and takes no part")
        if is_over or self._differ(call):
            return
        first, there = call.first, len(call.requests)
        if first.operation == "broadcast":
            kinds = {one.peer.rank: one.asked.kind for one in asking.values() if one.asked}
            others = {one.rank for one in self.peers.present.values()}
            others -= {rank for rank in elsewhere if kinds[rank] != first.kind}
            self._check(not self._lacks_root(call) or first.root not in others, "no root")
        elif first.min_results is None:
            self._check(not late, f"{late} are not waited for")
        else:
            left = len(self.peers.present) - there - len(elsewhere)
            self._check(there >= first.min_results or not left, f"{there} are not enough")

    def _check_waits(self) -> None:
        """Check that nobody waits in vain, now that the core has done all that is due."""
        waiting, can_move = [], False
        for number, process in self.processes.items():
            if not process.is_alive:
                can_move = True  # the core has yet to hear of that
                continue
            request = process.asked
            if request is None or request.operation == "give":
                can_move = True
                continue
            waiting.append(number)
            if request.operation == "heal":
                self._check_heals(process)
            elif process.end is not None and not request.lacks:
                self._check(process.end > self.now, f"{process.peer.who} waits for too long")
        if waiting and not can_move:
            self._check(self.core.awaited().end is not None, f"processes {waiting} wait for ever")
        self._check_enough()

    def _check_heals(self, process: Process) -> None:
        """Check that a process waits for a state that somebody is to give."""
        number, _, end = self.donors[process.heals_by]
        donor = self.processes.get(number)
        gives = donor is not None and (donor.owes == "give" or donor.asked == _GIVE)
        self._check(gives, f"{process.peer.who} waits for a state that nobody gives")
        self._check(end is None or end > self.now, f"process {number} is late, and waited for")

    def _check_enough(self) -> None:
        """Check that no call waits for members that it does not need."""
        fresh: dict[Kind, int] = {}
        for process in self.processes.values():
            request = process.asked
            if request is None:
                if self._is_on_time(process):
                    return
            elif request.operation == "average" and not request.lacks and self._is_fresh(process):
                fresh[request.kind] = fresh.get(request.kind, 0) + 1
        for request in self.program:
            there = fresh.get(request.kind, 0)
            is_enough = request.min_results is not None and there >= request.min_results
            self._check(not is_enough, f"{there} members of {request} are not enough")
