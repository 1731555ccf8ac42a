"""A meeting: what a driver is elsewhere, for members that call by themselves.

One thread (`Meeting.run`) owns all state. Other threads only have it do things (`Meeting.news`).
It waits for the members' asks by the same wait as every round (`Arrivals`), averages them as every
round does (`DriverAverage`), and posts one outcome for all.

- Outcomes are numbered. A member that has the outcome before the present call takes part in it.
  One that has an older outcome is late, or has joined again: its ask is answered at once by the
  last outcome of a call like it, until none is newer; then it takes part again.
- A member that has died, or left, is not waited for. A call waits for those that are late only if
  it cannot be done without them.
- The meeting ends when no member is left.
"""

from __future__ import annotations

import functools
import logging
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
import ray
from numpy.typing import NDArray

from flatweights import _core
from flatweights._average import Nonfinite
from flatweights._sources import first_difference
from flatweights._weights import FlatWeights
from flatweights.ray._errors import WorkerError, portable
from flatweights.ray._failpoints import reach
from flatweights.ray._report import METRICS, SENT, report
from flatweights.ray._result import Packed
from flatweights.ray._round import Round, facts_of
from flatweights.ray.lanes._driver_lane import DriverLane, Lanes, wake
from flatweights.ray.lanes._end import LaneError
from flatweights.ray.lanes._message import Message
from flatweights.ray.members._asks import Ask, MemberDiedError, Outcome
from flatweights.ray.members._branch import BranchAgent, BranchOutcome
from flatweights.ray.members._news import News
from flatweights.ray.members._seats import SLICE, Letter, Seat, SeatAnswer, outcome_message
from flatweights.ray.nodes._plan import Sums
from flatweights.ray.peers._agent import AverageOf
from flatweights.ray.peers._by_agent import AgentEnd, Agents
from flatweights.ray.peers._summary import Exchanged
from flatweights.ray.peers._wait import Arrivals, Deadline, Request, seconds_left
from flatweights.ray.rounds._between_nodes import NodesAverage
from flatweights.ray.rounds._in_one_place import DriverAverage
from flatweights.robust import Rule

_GRACE = 5.0  # seconds in which the process that had a rank may be seen to have ended
_KEPT = 8  # kinds of call of which the last outcome is kept, for members that are late
_EMPTY = 60.0  # seconds for which a meeting without members waits for the first one

_log = logging.getLogger("flatweights")


class Ticket(NamedTuple):
    """What a member is given when it enters.

    Attributes:
        rank: Its rank.
        token: What tells the host which member calls.
        address: Where to make a lane to; None, if it is to call through Ray.
        branch: The agent of its node, to which it makes a lane instead, if it is on another one.
    """

    rank: int
    token: bytes
    address: bytes | None
    branch: Any = None


class Entry(NamedTuple):
    """A process that wants to be a member."""

    rank: int | None
    size: int
    sums: Sums
    who: str
    node: str
    wants_lane: bool
    since: float
    ticket: Future[Ticket]


class Kept(NamedTuple):
    """The last outcome of one kind of call, for members that are late."""

    ask: Ask
    number: int
    body: bytes
    weights: Packed


class Meeting:
    """The members, by rank, and their calls.

    Attributes:
        news: The calls that other threads want the meeting's thread to make.
    """

    def __init__(self, name: str, size: int, sums: Sums, node: str, host: Any) -> None:
        """Prepare.

        Args:
            name: The name.
            size: How many members there are.
            sums: How sums travel between nodes.
            node: This node.
            host: The actor of this process.

        Raises:
            OSError: If there can be no lanes on this system.
        """
        self._name = name
        self._size = size
        self._node = node
        self._lanes = Lanes()
        offer, calls = self._lanes.windows.offer, 2 * size + 8
        self._agents = Agents(offer, sums, BranchAgent, (host,), calls)
        self._watched: set[str] = set()  # the tokens of agents
        self._seats: dict[int, Seat] = {}
        self._entries: list[Entry] = []
        self.news = News(self._lanes)
        self._news_answer = SeatAnswer(self.news)
        self._kept: list[Kept] = []
        self._number = 0
        self._is_open = False  # whether all have joined
        self._ticks = False  # whether the news will soon be read again

    def has(self, token: bytes) -> bool:
        """Whether a member takes part."""
        seat = self._seat_of(token)
        return seat is not None and seat.is_present

    def absent(self) -> list[int]:
        """Return the ranks that do not take part."""
        present = self._ranks()
        return [rank for rank in range(self._size) if rank not in present]

    def fetch(self, number: int) -> tuple[bytes, NDArray[np.uint8]]:
        """Return the body of an outcome, and its weights.

        Raises:
            KeyError: If it is no longer kept.
        """
        for kept in [*self._kept]:
            if kept.number == number:
                return kept.body, kept.weights.buffer
        raise KeyError(f"outcome {number} is no longer kept")

    def run(self) -> None:
        """Run the meeting until no member is left."""
        empty_until = time.monotonic() + _EMPTY
        try:
            while self._ranks() or (not self._seats and time.monotonic() < empty_until):
                if self._is_open:
                    self._round()
                else:
                    self._gather()
        except Exception:
            _log.exception("the host of meeting %r has failed", self._name)
        self._agents.shut_down()
        for entry in self._entries:
            entry.ticket.set_exception(RuntimeError("the meeting has ended"))
        self._lanes.close()

    def _gather(self) -> None:
        """Wait until something happens; open the meeting once all have joined."""
        there = SeatAnswer.wait([self._news_answer, *self._awaited(lambda seat: True)], SLICE)
        for answer in there:
            seat = answer.seat
            if seat is not None:  # before the first outcome a member asks for nothing: it is dead
                self._lose(seat, f"{seat.who} has ended before all had joined")
        self._read_news()
        ready = [seat for seat in self._seats.values() if seat.is_ready]
        if len(ready) == self._size:
            self._is_open = True
            self._welcome(ready)

    def _welcome(self, seats: Sequence[Seat]) -> None:
        """Give new members their first outcome: which call was the last one."""
        if seats:
            welcome = Outcome(0, self._size, self._ranks(), before=self._number)
            self._post(0, pickle.dumps(tuple(welcome)), None, seats)

    def _awaited(self, which: Callable[[Seat], bool]) -> list[SeatAnswer]:
        """Return the answers of those present members for whom ``which`` is true."""
        seats = [seat for seat in self._seats.values() if seat.is_present and which(seat)]
        return [seat.answer for seat in seats if seat.answer is not None]

    def _round(self) -> None:
        """Wait for one call of all that take part, and give them its outcome."""
        arrivals = Arrivals(Deadline(None, None))
        asks: dict[int, Ask] = {}
        arrivals.listen(self._news_answer)
        for answer in self._awaited(lambda seat: seat.has is not None):
            self._expect(answer, arrivals)
        while True:
            came = arrivals.wait(all_at_once=True)
            there: list[Any] = [arrivals.answers[rank] for rank in came or ()] + arrivals.heard
            arrivals.heard = []
            if came is None:
                if len(asks) == len(self._seats):  # the usual case
                    break
                left = seconds_left(arrivals.deadline.end)
                if not self._ranks() or (asks and (left == 0.0 or self._are_enough(asks))):
                    break
                # Only those that are late, or join again, can bring the call about.
                waiting: list[Any] = [*arrivals.listening]
                there = SeatAnswer.wait(waiting, left)
                for answer in there:
                    del arrivals.listening[answer]
            for answer in there:
                if answer is self._news_answer:
                    self._read_news()
                    arrivals.listen(answer)
                    again = [s for s in self._seats.values() if s.is_ready and s.has is None]
                    self._welcome(again)
                    for seat in again:
                        assert seat.answer is not None
                        self._expect(seat.answer, arrivals)
                else:
                    self._hear(answer, arrivals, asks)
        if asks:
            self._number += 1
            self._close_round(asks, arrivals)

    def _are_enough(self, asks: dict[int, Ask]) -> bool:
        """Whether a call need not wait for members that are late."""
        first = asks[min(asks)]
        if first.operation == "broadcast":
            return first.root in asks or first.root not in self._ranks()
        return len(asks) >= min(self._need(first), len(self._ranks()))

    def _need(self, ask: Ask) -> int:
        """Return how many ranks make the average that ``ask`` is part of."""
        joined = sum(not seat.left for seat in self._seats.values())
        return joined if ask.min_results is None else ask.min_results

    def _expect(self, answer: SeatAnswer, arrivals: Arrivals) -> None:
        """Wait for the ask of a member: if it is late, only beside the others."""
        assert answer.seat is not None
        if answer.seat.has == self._number:
            arrivals.expect(answer.seat.rank, answer)
        else:
            arrivals.listen(answer)

    def _hear(self, answer: SeatAnswer, arrivals: Arrivals, asks: dict[int, Ask]) -> None:
        """Take what a member asks for, or the news of its death."""
        seat, ask = answer.seat, answer.ask
        assert seat is not None
        assert seat.has is not None
        if ask is None:
            self._lose(seat, str(answer.error))
            arrivals.forget(seat.rank)
            return
        if ask.operation == "leave":
            seat.left = True
            arrivals.forget(seat.rank)
            return
        kept = next((kept for kept in self._kept if ask.is_served_by(kept.ask)), None)
        if kept is not None and kept.number > seat.has:
            answer.let_go()
            arrivals.forget(seat.rank)
            self._post(kept.number, kept.body, kept.weights.buffer, [seat])
            if seat.answer is not None and seat.is_present:
                self._expect(seat.answer, arrivals)
            return
        arrivals.arrive(seat.rank, answer)  # maybe it was late, and has caught up
        asks[seat.rank] = ask
        if ask.timeout is not None:
            deadline, now = Deadline.after(ask.timeout), arrivals.deadline.end
            if now is None or (deadline.end is not None and deadline.end < now):
                arrivals.deadline = deadline

    def _close_round(self, asks: dict[int, Ask], arrivals: Arrivals) -> None:
        """Average or relay, and post the outcome to all that have asked."""
        number = self._number
        for seat in self._seats.values():  # those that were lost or late before this call
            if seat.rank in asks or seat.left or seat.answer is None:
                continue
            arrivals.answers[seat.rank] = seat.answer
            if seat.gone is not None:
                arrivals.failed[seat.rank] = seat.gone
            elif seat.rank not in arrivals.late:
                arrivals.late = sorted([*arrivals.late, seat.rank])
        first = asks[min(asks)]
        is_average = first.operation == "average"
        weights: Packed | None = None
        result: Round | None = None
        error: Exception | None = None
        try:
            self._check_agree(asks, arrivals)
            result = self._average(asks, arrivals) if is_average else self._relay(first, arrivals)
            weights = Packed(result.weights.buffer, result.weights.layout)
        except Exception as raised:  # all members raise it; a rule may raise anything
            error = portable(raised)
        finally:
            _core.withdraw_offer()
        arrivals.let_go()
        facts: tuple[Any, ...] = ()
        layout: bytes | None = None
        pickler: Any = pickle if error is None else ray.cloudpickle
        if result is not None and weights is not None:
            layout = None if is_average else weights.layout.pickled
            result.number, result.ways = number, self._ways(asks) | result.ways
            if result.failed:
                result.failed = {rank: portable(why) for rank, why in result.failed.items()}
                pickler = ray.cloudpickle
            facts = facts_of(result)
        outcome = Outcome(number, self._size, self._ranks(), 0, error, layout, facts)
        body = pickler.dumps(tuple(outcome))
        if weights is not None:
            self._kept = [k for k in self._kept if not first.is_served_by(k.ask)][: _KEPT - 1]
            if first.digest != weights.layout.digest:
                first = first._replace(digest=weights.layout.digest)
            self._kept.insert(0, Kept(first, number, body, weights))
        reach("sending")
        buffer = None if weights is None else weights.buffer
        # The last to ask may not even sleep yet: told first, it goes on while the others wake.
        seats = [self._seats[rank] for rank in reversed(asks)]
        self._post(number, body, buffer, seats, None if result is None else result._exchanged)
        if result is not None and is_average:  # nobody waits for this
            # A death was told when it was noticed.
            dead = [seat.rank for seat in self._seats.values() if seat.gone]
            report(result, already_named=dead)
            METRICS.add({SENT: self._agents.nbytes * len(asks)})

    def _check_agree(self, asks: dict[int, Ask], arrivals: Arrivals) -> None:
        """Raise `ValueError`, naming all ranks, unless all ask for the same call."""
        alike: list[tuple[Ask, list[int]]] = []
        for rank, ask in sorted(asks.items()):
            for other, ranks in alike:
                if ask is other or ask.agrees_with(other):
                    ranks.append(rank)
                    break
            else:
                alike.append((ask, [rank]))
        if len(alike) > 1:
            calls = "; ".join(f"{_named(ranks)}: {ask}" for ask, ranks in alike)
            (ask, ranks), (other, others) = alike[:2]
            difference: str | None = None
            if ask.operation == other.operation and None not in (ask.digest, other.digest):
                answers: dict[int, Any] = arrivals.answers
                layouts = answers[ranks[0]].layout, answers[others[0]].layout
                difference = first_difference(*layouts)
            where = "" if difference is None else f"; weights of {_named(others)}: {difference}"
            raise ValueError(f"expected the same call of all members, got {calls}{where}")

    def _average(self, asks: dict[int, Ask], arrivals: Arrivals) -> Round:
        first = asks[min(asks)]
        weights = tuple(asks[k].weight if k in asks else 0.0 for k in range(self._size))
        if not any(weights):
            weighted = ", ".join(f"rank {rank}" for rank in sorted(asks))
            raise ValueError(f"expected a positive weight, got only zeros of {weighted}")
        request = _request_of(weights, first.min_results, first.nonfinite, first.rule)
        arrivals.check(request)
        answers: dict[int, Any] = {rank: arrivals.answers[rank] for rank in asks}
        self._agents.nbytes = answers[min(asks)].layout.nbytes
        is_away = any(answer.away is not None for answer in answers.values())
        if is_away and request.rule is None and self._agents.why_not() is None:
            for answer in answers.values():
                if answer.away is not None:
                    answer.agent = answer.seat.agent
            arrivals.deadline = arrivals.deadline._replace(end=None)  # it was for late members
            return NodesAverage(self._agents, arrivals, request).run()
        self._lanes.windows.offer(self._agents.nbytes)
        return DriverAverage(arrivals, request).run()

    def _relay(self, first: Ask, arrivals: Arrivals) -> Round:
        """Return a round with a copy of the root's weights.

        Raises:
            WorkerError: If the root is dead or late.
        """
        assert first.root is not None
        begin = time.monotonic()
        answer = arrivals.answers.get(first.root)
        packed = None if answer is None else answer.packed()
        if packed is None:
            why = arrivals.errors.get(first.root) or RuntimeError("it has left the meeting")
            raise WorkerError({first.root: why})
        self._lanes.windows.offer(packed.layout.nbytes)
        copied = packed.layout.new_buffer()
        _core.move_parts([copied], [packed.buffer])
        return Round(
            FlatWeights.wrap(copied, packed.layout),
            (first.root,),
            failed=dict(sorted(arrivals.failed.items())),
            late=arrivals.late,
            seconds={"wait": arrivals.seconds_waited, "copy": time.monotonic() - begin},
            nbytes=copied.nbytes,
        )

    def _ways(self, asks: dict[int, Ask]) -> dict[int, str]:
        """Return by which way each of those that ask does so."""
        return {k: "store" if self._seats[k].lane is None else "lane" for k in sorted(asks)}

    def _ranks(self) -> tuple[int, ...]:
        seats = [*self._seats.items()]
        return tuple(sorted([rank for rank, seat in seats if seat.is_present]))

    def _post(
        self,
        number: int,
        body: bytes,
        buffer: NDArray[np.uint8] | None,
        seats: Sequence[Seat],
        exchanged: Exchanged | None = None,
    ) -> None:
        """Give ``seats`` an outcome.

        Args:
            number: That of the outcome.
            body: The outcome.
            buffer: Its weights.
            seats: The members.
            exchanged: Which agents have the weights already.
        """
        windows = self._lanes.windows
        message: Message | None = None
        ref: Any = None
        away: dict[AgentEnd, list[bytes]] = {}
        posted: list[DriverLane] = []
        for seat in seats:
            seat.has = number
            seat.answer = SeatAnswer(self.news, seat)
            try:
                if seat.lane is not None:
                    message = message or outcome_message(number, body, buffer, windows)
                    seat.lane.post(message, windows, wakes=False)
                    posted.append(seat.lane)
                elif seat.is_waiting and seat.agent is not None:
                    seat.is_waiting = False
                    away.setdefault(seat.agent, []).append(seat.token)
                elif seat.outcome is not None:
                    outcome, seat.outcome = seat.outcome, None
                    if buffer is not None and ref is None:
                        wake(posted)  # nobody sleeps while weights are put
                        posted.clear()
                        ref = ray.put(buffer)
                    outcome.set_result((body, None if ref is None else [ref]))
            except Exception as error:  # it died meanwhile
                self._lose(seat, f"{seat.who}: {type(error).__name__}: {error}")
        wake(posted)
        for agent, tokens in away.items():
            weights: Any = None
            if exchanged is not None and agent.has(exchanged):
                weights = AverageOf(exchanged.number)
            elif buffer is not None:
                ref = ray.put(buffer) if ref is None else ref
                weights = [ref]
            agent.handle.post.remote(BranchOutcome(number, body, weights, tokens))

    def _lose(self, seat: Seat, why: str) -> None:
        """Count a member as dead."""
        if seat.is_present:
            seat.gone = MemberDiedError(why)
            _log.warning("meeting %r: rank %d: %s", self._name, seat.rank, why)
        if seat.lane is not None:
            self._lanes.give_up(seat.lane)
        if seat.outcome is not None:
            seat.outcome.set_exception(seat.gone or MemberDiedError(why))
            seat.outcome = None

    def _read_news(self) -> None:
        self.news.read()
        now = time.monotonic()
        entries, self._entries = self._entries, []
        for entry in entries:
            try:
                ticket = self._seat(entry, now)
            except ValueError as error:
                entry.ticket.set_exception(error)
                continue
            if ticket is None:
                self._entries.append(entry)
            else:
                entry.ticket.set_result(ticket)
        if self._entries and not self._ticks:  # no bell rings when their time is up
            self._ticks = True
            threading.Timer(SLICE / 4, self.news.tell, (self._tick,)).start()

    def _tick(self) -> None:
        self._ticks = False

    def _seat(self, entry: Entry, now: float) -> Ticket | None:
        """Return the ticket for a process; None while another process may be about to end.

        Raises:
            ValueError: If it cannot have one.
        """
        if entry.size != self._size:
            raise ValueError(f"size: expected {self._size}, as the others, got {entry.size}")
        if entry.sums != self._agents.sums:
            expected = f"{self._agents.sums!r}, as the others"
            raise ValueError(f"sums: expected {expected}, got {entry.sums!r}")
        free = [r for r in range(self._size) if r not in self._seats]
        free += [rank for rank, seat in self._seats.items() if not seat.is_present]
        rank = entry.rank if entry.rank is not None else next(iter(free), None)
        if rank is not None and not 0 <= rank < self._size:
            raise ValueError(f"rank: expected 0 to {self._size - 1}, got {rank}")
        if rank is None or rank not in free:
            if now - entry.since < _GRACE:
                return None
            if rank is None:
                raise ValueError(f"meeting {self._name!r}: all {self._size} ranks are taken")
            taken = self._seats[rank].who
            raise ValueError(f"rank: expected one that is free, got {rank}, which is {taken}'s")
        token = self._lanes.new_token()
        seat = self._seats[rank] = Seat(rank, entry.who, token)
        seat.answer = SeatAnswer(self.news, seat)
        if not entry.wants_lane:
            return Ticket(rank, token, None)
        if entry.node == self._node:
            return Ticket(rank, token, self._lanes.address)
        agent = seat.agent = self._agents.at(entry.node, starts=True)
        assert agent is not None
        if agent.token not in self._watched:
            self._watched.add(agent.token)
            self.news.watch(agent.handle.stay.remote(), functools.partial(self._lose_all, agent))
        return Ticket(rank, token, None, agent.handle)

    def _lose_all(self, agent: AgentEnd, why: str) -> None:
        """Count the members of a dead agent's node as dead."""
        agent.is_dead = True
        for seat in self._seats.values():
            if seat.agent is agent and seat.is_present:
                self._lose(seat, f"{seat.who}: the agent of its node: {why}")

    def _seat_of(self, token: bytes) -> Seat | None:
        return next((seat for seat in [*self._seats.values()] if seat.token == token), None)

    # What other threads have the meeting's thread do.

    def enter(self, entry: Entry) -> None:
        """Give ``entry`` a ticket, or an error, once that can be said."""
        self._entries.append(entry)

    def attach(self, token: bytes, nonce: bytes) -> None:
        """Make the lane to a member.

        Raises:
            LaneError: If it has not connected.
        """
        seat = self._seat_of(token)
        if seat is None:
            raise LaneError("no such member")
        seat.lane = self._lanes.connect(token, nonce)
        seat.answer = SeatAnswer(self.news, seat)

    def put(self, token: bytes, letter: Letter) -> None:
        """Take a letter: an ask; without content, the wish for the first outcome."""
        seat = self._seat_of(token)
        if seat is None or not seat.is_present:
            if letter.outcome is not None:
                error = MemberDiedError("the host has counted this member as dead")
                letter.outcome.set_exception(error)
        else:
            if letter.outcome is not None:  # it has made no lane to the agent of its node
                seat.agent = None
            seat.is_waiting = seat.agent is not None
            if letter.body is None:
                seat.outcome = letter.outcome
            else:
                seat.letters.append(letter)

    def lose(self, token: bytes, why: str) -> None:
        """Count a member as dead."""
        seat = self._seat_of(token)
        if seat is not None and seat.is_present:
            self._lose(seat, f"{seat.who}: {why}")


@functools.lru_cache(maxsize=16)
def _request_of(
    weights: tuple[float, ...],
    min_results: int | None,  # if None, all in the wait's arrivals, dead and late ones too
    nonfinite: Nonfinite,
    rule: tuple[str, bytes] | None,
) -> Request:
    """Return the request of an average; the same object for the same arguments."""
    applied = None if rule is None else _rule_of(rule[1])
    return Request(weights, None, min_results, nonfinite, len(weights), applied)


@functools.lru_cache(maxsize=16)
def _rule_of(pickled: bytes) -> Rule:
    rule: Rule = pickle.loads(pickled)
    return rule


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
