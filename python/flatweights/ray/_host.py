"""The host of a meeting: what a driver is elsewhere, for members that call by themselves.

An actor without CPUs, on the node of the first member. Its one thread of its own (`Host._run`)
owns all state; the methods that Ray calls only hand over letters and ring the doorbell. The
thread waits for the members' asks by the same wait as every round (`Arrivals`), averages them as
every round is (`DriverAverage`), and posts one outcome for all.

- Outcomes are numbered. A member that has the outcome before the present call takes part in it.
  One that has an older outcome is late, or has joined again: its ask is answered at once by the
  last outcome of a call like it, until none is newer; then it takes part again.
- A member that dies, or leaves, is no longer waited for. So no call waits for anything but members
  that are alive, and the time that the first member allows.
- The host ends when no member is left.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import ray
from numpy.typing import NDArray

from flatweights import _core
from flatweights._layout import Layout, unpickle_layout
from flatweights._weights import FlatWeights, sealed
from flatweights.ray._calls import Answer, Packed
from flatweights.ray._driver import DriverAverage
from flatweights.ray._engine import Arrivals, Deadline, Request
from flatweights.ray._errors import WorkerError, late_error, reason_in_a_line
from flatweights.ray._failpoints import reach
from flatweights.ray._meeting import Ask, MemberDiedError, Outcome
from flatweights.ray.lanes._driver import DriverLane, Lanes
from flatweights.ray.lanes._end import LaneError
from flatweights.ray.lanes._message import Message, make_message

_SLICE = 1.0  # seconds between two looks at what rings no bell: the time of those who wait to enter
_GRACE = 5.0  # seconds in which the process that had a rank may be seen to have ended
_KEPT = 8  # kinds of call of which the last outcome is kept, for members that are late
_LAYOUTS = 64  # that the host remembers
_EMPTY = 60.0  # seconds for which a host without members waits for the first one

_log = logging.getLogger("flatweights")


class Ticket(NamedTuple):
    """What a member is given when it enters.

    Attributes:
        rank: Its rank.
        token: What tells the host which member calls.
        address: Where to make a lane to; None, if it is to call through Ray.
    """

    rank: int
    token: bytes
    address: bytes | None


class Letter(NamedTuple):
    """An ask that came through Ray, and what its caller waits for."""

    content: tuple[Any, ...]
    reply: Future[Any] | None


@dataclass
class Seat:
    """All that the host knows of the member of one rank.

    Attributes:
        rank: The rank.
        who: The process, as errors name it.
        token: That of its ticket.
        lane: The lane to it; None, if it calls through Ray.
        has: The number of the last outcome that it was given; None before the first.
        gone: Why it does not take part any more; None while it does.
        left: Whether it has left.
        answer: What the host waits for: its next ask.
        letters: Asks of its that came through Ray.
        reply: What its call through Ray waits for: an outcome.
    """

    rank: int
    who: str
    token: bytes
    lane: DriverLane | None = None
    has: int | None = None
    gone: Exception | None = None
    left: bool = False
    answer: SeatAnswer | None = None
    letters: deque[Letter] = field(default_factory=deque)
    reply: Future[Any] | None = None

    @property
    def is_present(self) -> bool:
        """Whether it is alive and has not left."""
        return self.gone is None and not self.left

    @property
    def is_ready(self) -> bool:
        """Whether it can be given an outcome."""
        return self.is_present and (self.lane is not None or self.reply is not None)


class Entry(NamedTuple):
    """A process that wants to be a member."""

    rank: int | None
    size: int
    who: str
    wants_lane: bool
    since: float
    ticket: Future[Ticket]


class SeatAnswer(Answer):
    """What the host waits for: the next ask of a member, or news that came through Ray."""

    def __init__(
        self, lanes: Lanes, layouts: dict[str, Layout], seat: Seat | None, news: Any
    ) -> None:
        """Wait for the next ask of ``seat``; without one, for ``news``.

        Args:
            lanes: Those of the host.
            layouts: By digest; those that asks bring are added.
            seat: The member.
            news: What has come through Ray.
        """
        self.seat = seat
        self.ask: Ask | None = None
        self._lanes = lanes
        self._layouts = layouts
        self._news = news
        self._value: Packed | None = None
        self._error: Exception | None = None

    @property
    def is_in_store(self) -> bool:
        """A letter's array is in the store while the call that brought it runs."""
        return False

    @classmethod
    def wait(
        cls, answers: Sequence[SeatAnswer], timeout: float | None, enough: int = 1
    ) -> list[SeatAnswer]:
        """Return those that are there."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            there = [answer for answer in answers if answer.is_there()]
            left = _SLICE if end is None else min(_SLICE, end - time.monotonic())
            if len(there) >= enough or left <= 0 or any(one.is_urgent for one in there):
                return there
            missing = {*answers}.difference(there)
            lanes = [one.seat.lane for one in missing if one.seat and one.seat.lane]
            # All but the last are read while that member still works.
            answers[0]._lanes.wait(lanes, left, max(1, enough - len(there) - 1))

    def is_there(self) -> bool:
        """Whether there is something to take; an ask that has come is read at once."""
        if self.seat is None:
            return bool(self._news)
        if self.ask is None and self._error is None:
            try:
                self._read(self.seat)
            except Exception as error:  # it died while it sent a window, or sends nonsense
                why = f"{type(error).__name__}: {error}"
                self._error = MemberDiedError(f"{self.seat.who}: its call could not be read: {why}")
        return self.ask is not None or self._error is not None

    @property
    def is_urgent(self) -> bool:
        """Whether the wait for others ends at once."""
        return self.ask is None or self.ask.timeout is not None or self.ask.operation == "leave"

    def _read(self, seat: Seat) -> None:
        """Read the ask, if it has come."""
        lane = seat.lane
        content: tuple[Any, ...] | None = None
        if seat.gone is not None:
            self._error = seat.gone
        elif lane is not None and lane.is_answered and seat.has is not None:
            content = lane.take().content
        elif lane is not None and lane.is_closed:
            self._error = MemberDiedError(f"{seat.who} has ended without leave()")
        if seat.letters and (lane is None or (content is not None and len(content) == 1)):
            letter = seat.letters.popleft()
            seat.reply, content = letter.reply, letter.content
        if content is None:
            return
        ask, layout, buffer = content
        asked = Ask(*ask)
        if layout is not None:
            known = unpickle_layout(layout)
            self._layouts[known.digest] = known
            if len(self._layouts) > _LAYOUTS:
                del self._layouts[next(iter(self._layouts))]
        if buffer is not None:
            assert asked.digest is not None
            self._value = Packed(as_array(buffer), self._layouts[asked.digest])
        self.ask = asked

    def take(self) -> Any:
        """Return the weights."""
        if self._error is not None:
            raise self._error
        return None if self._value is None else FlatWeights.wrap(*self._value)

    def packed(self) -> Packed | None:
        """Return the weights without views of their parts."""
        return self._value

    def let_go(self) -> None:
        """Drop the weights."""
        self._value = None


class Kept(NamedTuple):
    """The last outcome of one kind of call, for members that are late."""

    ask: Ask
    outcome: Outcome
    weights: FlatWeights | None


class Host:
    """The actor. Members call `enter`, and then `attach` or `stay`, `watch` and `exchange`."""

    def __init__(self, name: str, size: int) -> None:
        """Prepare for ``size`` members of the meeting ``name``."""
        # An actor without CPUs is given one thread; but while it averages, its members wait.
        os.environ.pop("OMP_NUM_THREADS", None)
        self._name = name
        self._size = size
        context = ray.get_runtime_context()
        self._handle, self._node = context.current_actor, context.get_node_id()
        self._lanes = Lanes()
        self._seats: dict[int, Seat] = {}
        self._news: deque[Callable[[], None]] = deque()  # what the thread is to do
        self._entries: list[Entry] = []
        self._layouts: dict[str, Layout] = {}
        self._news_answer = SeatAnswer(self._lanes, self._layouts, None, self._news)
        self._kept: list[Kept] = []
        self._number = 0
        self._is_open = False  # whether all have joined
        self._running = 0  # exchanges that have not returned
        threading.Thread(target=self._run, name="flatweights-host", daemon=True).start()

    # What Ray calls, in any thread.

    def enter(self, rank: int | None, size: int, who: str, node: str, wants_lane: bool) -> Ticket:
        """Take a seat; wait while a process that may have ended has it.

        Raises:
            ValueError: If ``size`` is not that of the meeting, or ``rank`` is taken or too large.
        """
        ticket: Future[Ticket] = Future()
        wants_lane = wants_lane and node == self._node
        entry = Entry(rank, size, who, wants_lane, time.monotonic(), ticket)
        self._tell(lambda: self._entries.append(entry))
        return ticket.result()

    def attach(self, token: bytes, nonce: bytes) -> None:
        """Make the lane to a member that has connected.

        Raises:
            LaneError: If it has not.
        """
        done: Future[None] = Future()
        self._tell(functools.partial(self._attach, token, nonce, done))
        done.result()

    def stay(self, token: bytes) -> None:
        """Return when the member is gone: its process owns the result, so Ray says if it dies."""
        while (seat := self._seat_of(token)) is not None and seat.is_present:
            time.sleep(1.0)

    def watch(self, token: bytes, stays: Sequence[Any]) -> None:
        """Learn of the death of a member that calls through Ray, by the result of its `stay`."""
        threading.Thread(target=self._watch, args=(token, stays[0]), daemon=True).start()

    def exchange(self, token: bytes, content: tuple[Any, ...] | None) -> tuple[Any, ...]:
        """Ask for a call; return what `MemberLane.outcome` does. No content: the first outcome."""
        reply: Future[Any] = Future()
        self._running += 1
        try:
            if content is None:
                self._tell(functools.partial(self._wait_for_start, token, reply))
            else:
                letter = Letter(content, reply)
                self._tell(functools.partial(self._put_letter, token, letter))
            outcome: tuple[Any, ...] = reply.result()
            return outcome
        finally:
            self._running -= 1

    def deliver(self, token: bytes, content: tuple[Any, ...]) -> None:
        """Take an ask that does not fit into a lane; the lane then says that it is here."""
        done: Future[None] = Future()
        self._tell(functools.partial(self._put_letter, token, Letter(content, None)))
        self._tell(functools.partial(done.set_result, None))
        done.result()

    def fetch(self, number: int) -> tuple[Any, ...]:
        """Return an outcome that did not fit into a lane.

        Raises:
            KeyError: If it is no longer kept.
        """
        for kept in self._kept:
            if kept.outcome.number == number:
                buffer = None if kept.weights is None else kept.weights.buffer
                return (*_plain(kept.outcome), buffer)
        raise KeyError(f"outcome {number} is no longer kept")

    def gone(self, token: bytes) -> None:
        """Count a member as dead that has dropped its end."""
        self._tell(functools.partial(self._lose_by_token, token, "it has ended without leave()"))

    def absent(self) -> list[int]:
        """Return the ranks that have not joined."""
        return [rank for rank in range(self._size) if not self._has_joined(rank)]

    def _has_joined(self, rank: int) -> bool:
        seat = self._seats.get(rank)
        return seat is not None and seat.is_present

    def _tell(self, news: Callable[[], Any]) -> None:
        self._news.append(news)
        self._lanes.ring()

    # The thread.

    def _run(self) -> None:
        try:
            since = time.monotonic()
            while any(seat.is_present for seat in self._seats.values()) or (
                not self._seats and time.monotonic() - since < _EMPTY
            ):
                if self._is_open:
                    self._round()
                else:
                    self._gather()
        except Exception:
            _log.exception("flatweights: the host of meeting %r has failed", self._name)
        finally:
            self._end()

    def _end(self) -> None:
        for entry in self._entries:
            entry.ticket.set_exception(RuntimeError("the meeting has ended"))
        end = time.monotonic() + 1.0
        while self._running and time.monotonic() < end:
            time.sleep(0.01)
        self._lanes.close()
        ray.kill(self._handle)

    def _gather(self) -> None:
        """Wait until something happens; open the meeting once all have joined."""
        there = SeatAnswer.wait([self._news_answer, *self._awaited(lambda seat: True)], _SLICE)
        for answer in there:
            seat = answer.seat
            if seat is not None:  # before the first outcome a member asks for nothing: it is dead
                self._lose(seat, f"{seat.who} has ended before all had joined")
        self._read_news()
        ready = [seat for seat in self._seats.values() if seat.is_ready]
        if len(ready) == self._size:
            self._is_open = True
            self._post(self._welcome(), None, ready)

    def _welcome(self) -> Outcome:
        """Return the first outcome of a member: which call was the last one."""
        return Outcome(0, self._size, self._ranks(), fields={"number": self._number})

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
                end = arrivals.deadline.end
                left = None if end is None else max(0.0, end - time.monotonic())
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
                    self._post(self._welcome(), None, again)
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
            return first.root in asks or not self._has_joined(first.root or 0)
        here = sum(self._seats[rank].is_present for rank in self._seats)
        return len(asks) >= min(self._need(first), here)

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
            try:
                answer.take()
            except MemberDiedError as error:
                self._lose(seat, str(error))
            arrivals.forget(seat.rank)
            return
        if ask.operation == "leave":
            seat.left = True
            arrivals.forget(seat.rank)
            return
        kept = next((kept for kept in self._kept if ask.is_served_by(kept.ask)), None)
        if kept is not None and kept.outcome.number > seat.has:
            answer.let_go()
            arrivals.forget(seat.rank)
            self._post(kept.outcome, kept.weights, [seat])
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
        error: Exception | None = None
        weights: FlatWeights | None = None
        fields: dict[str, Any] = {}
        begin = time.monotonic()
        try:
            self._check_agree(asks)
            if first.operation == "broadcast":
                weights = self._relay(first, arrivals)
                fields = {
                    "used": [first.root],
                    "failed": dict(sorted(arrivals.failed.items())),
                    "late": arrivals.late,
                    "quarantined": (),
                    "seconds": {"wait": arrivals.seconds_waited, "copy": time.monotonic() - begin},
                    "nbytes": weights.buffer.nbytes,
                }
            else:
                weights, fields = self._average(asks, arrivals)
        except (ValueError, TypeError, WorkerError, MemoryError) as raised:
            error = raised.with_traceback(None)
            error.__context__ = error.__cause__ = None
        finally:
            _core.withdraw_offer()
        arrivals.let_go()
        ways = {rank: "store" if self._seats[rank].lane is None else "lane" for rank in asks}
        fields |= {"number": number, "ways": ways}
        has_layout = weights is not None and first.operation == "broadcast"
        layout = weights.layout.pickled if has_layout and weights is not None else None
        outcome = Outcome(number, self._size, self._ranks(), error, layout, fields)
        if weights is not None:
            self._kept = [k for k in self._kept if not first.is_served_by(k.ask)][: _KEPT - 1]
            digest = weights.layout.digest
            self._kept.insert(0, Kept(first._replace(digest=digest), outcome, weights))
        reach("posting outcome")
        self._post(outcome, weights, [self._seats[rank] for rank in asks])

    def _check_agree(self, asks: dict[int, Ask]) -> None:
        """Raise `ValueError`, naming all ranks, unless all ask for the same call."""
        alike: list[tuple[Ask, list[int]]] = []
        for rank, ask in sorted(asks.items()):
            for other, ranks in alike:
                if ask.agrees_with(other):
                    ranks.append(rank)
                    break
            else:
                alike.append((ask, [rank]))
        if len(alike) > 1:
            calls = "; ".join(f"{_named(ranks)}: {ask}" for ask, ranks in alike)
            raise ValueError(f"expected the same call of all members, got {calls}")

    def _average(
        self, asks: dict[int, Ask], arrivals: Arrivals
    ) -> tuple[FlatWeights, dict[str, Any]]:
        first = asks[min(asks)]
        weights = [asks[rank].weight if rank in asks else 0.0 for rank in range(self._size)]
        if not any(weights):
            weighted = ", ".join(f"rank {rank}" for rank in sorted(asks))
            raise ValueError(f"expected a positive weight, got only zeros of {weighted}")
        request = Request(
            weights=tuple(weights),
            timeout=None,
            min_results=first.min_results,  # else all in `arrivals`, dead and late ones too
            nonfinite=first.nonfinite,
            max_inflight=self._size,
        )
        arrivals.check(request)
        assert first.digest is not None
        self._lanes.windows.offer(self._layouts[first.digest].nbytes)
        result = DriverAverage(arrivals, request).run()
        fields = {
            "used": result.used,
            "failed": result.failed,
            "late": result.late,
            "quarantined": result.quarantined,
            "seconds": result.seconds,
            "nbytes": result.nbytes,
        }
        mean: FlatWeights = result.weights
        return mean, fields

    def _relay(self, first: Ask, arrivals: Arrivals) -> FlatWeights:
        """Return a copy of the root's weights.

        Raises:
            WorkerError: If the root is dead or late.
        """
        assert first.root is not None
        answer = arrivals.answers.get(first.root)
        packed = None if answer is None else answer.packed()
        if packed is None:
            why = arrivals.failed.get(first.root)
            if first.root in arrivals.late:
                why = late_error(arrivals.deadline.timeout)
            raise WorkerError({first.root: why or RuntimeError("it has left the meeting")})
        self._lanes.windows.offer(packed.layout.nbytes)
        copied = packed.layout.new_buffer()
        _core.move_parts([copied], [packed.buffer])
        return FlatWeights.wrap(sealed(copied), packed.layout)

    def _ranks(self) -> tuple[int, ...]:
        return tuple(sorted(seat.rank for seat in self._seats.values() if seat.is_present))

    def _post(self, outcome: Outcome, weights: FlatWeights | None, seats: Sequence[Seat]) -> None:
        """Give ``seats`` an outcome."""
        buffer = None if weights is None else weights.buffer
        content = (*_plain(outcome), buffer)
        message: Message | None = None
        if any(seat.lane is not None for seat in seats):
            message = make_message(1, [content], self._lanes.windows, frozen=True)
            if message is None:  # no window, or too long for a mailbox: it is fetched through Ray
                message = make_message(1, [(outcome.number,)], None, frozen=True)
        ref: Any = None
        for seat in seats:
            seat.has = outcome.number
            seat.answer = SeatAnswer(self._lanes, self._layouts, seat, self._news)
            try:
                if seat.lane is not None:
                    assert message is not None
                    seat.lane.post(message, self._lanes.windows)
                elif seat.reply is not None:
                    reply, seat.reply = seat.reply, None
                    if buffer is not None and ref is None:
                        ref = ray.put(buffer)
                    reply.set_result((*content[:-1], None if buffer is None else [ref]))
            except Exception as error:  # it died meanwhile
                self._lose(seat, f"{seat.who}: {type(error).__name__}: {error}")

    def _lose(self, seat: Seat, why: str) -> None:
        """Count a member as dead."""
        if seat.is_present:
            seat.gone = MemberDiedError(why)
            _log.warning("flatweights: meeting %r: rank %d: %s", self._name, seat.rank, why)
        if seat.lane is not None:
            self._lanes.give_up(seat.lane)
        if seat.reply is not None:
            seat.reply.set_exception(seat.gone or MemberDiedError(why))
            seat.reply = None

    def _read_news(self) -> None:
        while self._news:
            self._news.popleft()()
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
        if self._entries:  # no bell rings when their time is up
            threading.Timer(_SLICE / 4, self._tell, (lambda: None,)).start()

    def _seat(self, entry: Entry, now: float) -> Ticket | None:
        """Return the ticket for a process; None while another process may be about to end.

        Raises:
            ValueError: If it cannot have one.
        """
        if entry.size != self._size:
            raise ValueError(f"size: expected {self._size}, as the others, got {entry.size}")
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
        seat.answer = SeatAnswer(self._lanes, self._layouts, seat, self._news)
        return Ticket(rank, token, self._lanes.address if entry.wants_lane else None)

    def _seat_of(self, token: bytes) -> Seat | None:
        return next((seat for seat in [*self._seats.values()] if seat.token == token), None)

    def _attach(self, token: bytes, nonce: bytes, done: Future[None]) -> None:
        seat = self._seat_of(token)
        try:
            if seat is None:
                raise LaneError("no such member")
            seat.lane = self._lanes.connect(token, nonce)
            seat.answer = SeatAnswer(self._lanes, self._layouts, seat, self._news)
        except (LaneError, OSError) as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    def _put_letter(self, token: bytes, letter: Letter) -> None:
        seat = self._seat_of(token)
        if seat is not None and seat.is_present:
            seat.letters.append(letter)
        elif letter.reply is not None:
            letter.reply.set_exception(MemberDiedError("the host took this member for dead"))

    def _wait_for_start(self, token: bytes, reply: Future[Any]) -> None:
        seat = self._seat_of(token)
        if seat is None:
            reply.set_exception(MemberDiedError("no such member"))
        else:
            seat.reply = reply

    def _watch(self, token: bytes, stays: Any) -> None:
        try:
            ray.get(stays)
        except Exception as error:
            why = reason_in_a_line(error)
            self._tell(functools.partial(self._lose_by_token, token, why))

    def _lose_by_token(self, token: bytes, why: str) -> None:
        seat = self._seat_of(token)
        if seat is not None and seat.is_present:
            self._lose(seat, f"{seat.who}: {why}")


def _plain(outcome: Outcome) -> tuple[Any, ...]:
    return tuple(outcome)


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def as_array(buffer: Any) -> NDArray[np.uint8]:
    """Return the packed buffer that came with an outcome."""
    return buffer if isinstance(buffer, np.ndarray) else np.frombuffer(buffer, np.uint8)
