"""A meeting: it averages for members as a driver does for workers, but members call it.

One thread (`Meeting.run`) owns all state; other threads send it calls to make (`Meeting.news`). It
waits for the members' asks, averages them as in every round (`DriverAverage`), and posts one
outcome for all. Its record of each member is a `Seat`, whose table lists the states.

- Outcomes are numbered. A member whose outcome is older than the last is late, or has joined again.
  Its ask is answered at once by the last outcome of a call like it (`Past`), until none is newer.
  It then takes part in a call if it has the last outcome of that kind of call. If it does not, or
  if that outcome is no longer kept, it waits for the next one.
- The open call consists of the asks of members that wait for its outcome (`Waiting`). If one of
  them dies meanwhile, its ask is dropped. A process that takes its rank has a seat of its own.
- Nobody waits for a member that has died or left. A call waits for late members only if it needs
  them.
- Members that lack the state of a training (`Ask.lacks`) wait for the next call like theirs. Its
  average does not contain their weights, but they get the state and its outcome; see `Healing`.
- The meeting ends when no member is left. Its `Door` lets members in.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import pickle
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from flatweights import _core
from flatweights._average import Nonfinite
from flatweights._sources import first_difference
from flatweights._weights import FlatWeights
from flatweights.ray import _clock
from flatweights.ray._errors import (
    WorkerError,
    error_of_rank,
    late_error,
    portable,
    reason_in_a_line,
)
from flatweights.ray._failpoints import reach
from flatweights.ray._report import METRICS, SENT, report
from flatweights.ray._result import Packed
from flatweights.ray._round import Round, facts_of
from flatweights.ray.lanes._end import LaneError
from flatweights.ray.lanes._member_lane import HostDiedError
from flatweights.ray.lanes._protocol import RESEND
from flatweights.ray.members._asks import (
    Ask,
    CallsDifferError,
    ElsewhereError,
    LacksStateError,
    MemberDiedError,
    Outcome,
)
from flatweights.ray.members._branch import BranchAgent, BranchOutcome, SentWeights
from flatweights.ray.members._door import Door
from flatweights.ray.members._gpu_rounds import AskAgainError, GpuRounds, Stayed
from flatweights.ray.members._healing import Healing
from flatweights.ray.members._news import News
from flatweights.ray.members._past import Past
from flatweights.ray.members._platform import PLATFORM, Platform
from flatweights.ray.members._seats import (
    Letter,
    Post,
    Reply,
    Seat,
    State,
    fetched,
    wait_for,
)
from flatweights.ray.members._terms import Terms
from flatweights.ray.members._waiting import Waiting
from flatweights.ray.peers._agent import AverageOf
from flatweights.ray.peers._by_agent import AgentEnd
from flatweights.ray.peers._summary import Exchanged
from flatweights.ray.peers._wait import Arrivals, Deadline, Request, seconds_left
from flatweights.ray.rounds._between_nodes import NodesAverage
from flatweights.ray.rounds._in_one_place import DriverAverage
from flatweights.robust import Rule

_AGAIN = 2.0  # seconds, at least, in which members send weights again that were on a GPU
_CALLS = 16  # calls that an agent runs at a time, without waiting for each other

_log = logging.getLogger("flatweights")


class Meeting:
    """The members, by rank, and their calls.

    Attributes:
        news: The calls that other threads want the meeting's thread to make.
        door: The members, and those that come in.
    """

    def __init__(
        self,
        name: str,
        terms: Terms,
        node: str,
        host: ray.actor.ActorHandle,
        platform: Platform = PLATFORM,
    ) -> None:
        """Prepare; `run` holds the meeting.

        Args:
            name: The name.
            terms: The terms: the number of members, and others.
            node: This node.
            host: The actor of this process.
            platform: What it uses of Ray and lanes.

        Raises:
            OSError: If there can be no lanes on this system.
        """
        self._name = name
        self._terms = terms
        self._size = terms.size
        self._node = node
        self._lanes = platform.lanes()
        offer = self._lanes.windows.offer
        self._agents = platform.agents(offer, terms.sums, BranchAgent, (host,), _CALLS)
        self._put = platform.put
        self._waiting = Waiting()
        self._past = Past()
        self._gpu = GpuRounds(self._lanes)
        self._healings: list[Healing] = []
        self._seconds_waited = 0.0  # for the open call
        self._again: Deadline | None = None  # of the open call, if its members were asked again
        self._untold: list[Seat] = []  # deaths that were not logged yet
        self._away: set[int] = set()  # ranks that the log calls dead or late, until they are back
        self.news = News(self._lanes)
        self.door = Door(
            name, terms, node, self._lanes, self._agents, self.news, self._hear, self._lose
        )
        self._number = 0  # of the last outcome
        self._posts = 0

    def run(self) -> None:
        """Run the meeting until no member is left."""
        try:
            while self.door.is_in_use:
                self._step()
        except Exception as error:
            _log.exception("the host of meeting %r has failed", self._name)
            self._tell_failure(error)
        self._agents.shut_down()
        self.door.close()
        self._lanes.close()

    def _step(self) -> None:
        """Do everything that is due, or wait until something happens."""
        self.door.admit()
        self._welcome()
        self._heal()
        if self._waiting.behind and not self._count_of_whole():
            self._end_waiting()
        self._give_up_waiting()
        if self._is_due():
            self._close_call()
            return
        if self._waiting.lacking and not self._count_of_whole():
            self._end_healing()
        if not self.door.is_in_use:  # the last member has died meanwhile
            return
        seats = [*self.door.present.values()]
        working = [seat for seat in seats if seat.state is State.WORKING]
        on_time = all(map(self._is_on_time, working))  # late members are answered at once
        begin = _clock.now()
        enough = max(1, len(working)) if on_time else 1
        heard = wait_for(seats, self.news, self._patience(begin), enough)
        self._seconds_waited += _clock.now() - begin
        for seat in heard:
            self._hear(seat)
        self.news.read()

    def _end_waiting(self) -> None:
        """Give late members the last outcome of their call, since nobody else will make it.

        If it is no longer kept, they make the call themselves.
        """
        for seat in self._waiting.open_late_call():
            kept = self._past.last_for(seat)
            if kept is not None and self._gpu.reaches(kept.weights, seat):
                self._waiting.drop([seat])
                self._post(kept.number, kept.body, kept.weights, [seat])

    def _give_up_waiting(self) -> None:
        """Raise in members whose time is up before the others make a call like theirs."""
        for seat in self._waiting.overdue():
            others = [rank for rank in self.door.ranks() if rank != seat.rank]
            why = dict.fromkeys(others, late_error(seat.ask.timeout))
            self._answer([seat], portable(WorkerError(why)))

    def _tell_failure(self, error: Exception) -> None:
        """Tell members that wait why the meeting ends; others see that it has."""
        asking = [seat for seat in self.door.present.values() if seat.state is State.ASKING]
        with contextlib.suppress(Exception):  # memory may be short
            self._answer(asking, HostDiedError(f"the host has failed: {reason_in_a_line(error)}"))

    def _end_healing(self) -> None:
        """Raise in all members, because no member with the state is left.

        Members that set `Member.lacks_state` to False then begin anew, from a checkpoint.
        """
        seats = [*self._waiting.lacking]
        for seat in seats:
            self._past.forget(seat.ask.state)
        why = RuntimeError("no member is left that has the state: go on from a checkpoint")
        self._answer(seats, portable(WorkerError({seat.rank: why for seat in seats})))

    def _is_on_time(self, seat: Seat) -> bool:
        """Whether the open call waits for the ask of a member."""
        return seat.state is State.WORKING and seat.has == self._number

    def _patience(self, now: float) -> float | None:
        """Return the seconds until something is due even if nothing happens."""
        healings = [healing.deadline.end for healing in self._healings if healing.is_waited_for]
        ends = [end for end in healings if end is not None]
        ends += self._waiting.ends() + self.door.ends()
        return max(0.0, min(ends) - now) if ends else None

    def _is_due(self) -> bool:
        """Whether to close the open call now."""
        if not self._waiting.asking:
            return False
        if seconds_left(self._waiting.deadline().end) == 0.0:
            return True
        if any(map(self._is_on_time, self.door.present.values())):
            return False
        # The other members are late, or join again.
        return len(self._waiting.asking) == self._count_of_whole() or self._are_enough()

    def _count_of_whole(self) -> int:
        """Return the number of members that wait for no other call than the open one."""
        return len(self.door.present) - len(self._waiting.elsewhere)

    def _are_enough(self) -> bool:
        """Whether the open call needs no late members."""
        asks = self._waiting.asks()
        first = asks[min(asks)]
        if first.operation == "broadcast":
            return first.root in asks or first.root not in self.door.ranks()
        if first.min_results is None:
            return len(asks) >= len(self.door.missed()) - len(self._waiting.elsewhere)
        return len(asks) >= min(first.min_results, self._count_of_whole())

    def _hear(self, seat: Seat) -> None:
        """Handle a member's ask, or its end."""
        if seat.why is not None:
            self._lose(seat, seat.why)
            return
        assert seat.answer is not None
        ask = seat.answer.ask
        if ask.operation not in ("give", "heal"):  # with these, it has yet to read the average
            self._gpu.hear(seat)
        if ask.operation == "leave":
            seat.leave()
            self._forget(seat)
            return
        if ask.operation in ("give", "heal"):
            self._hear_of_state(seat)
            return
        for healing in self._healings:
            healing.lose(seat)  # it neither asks for the state nor gives it
        try:
            kept = self._past.answer_for(seat)
        except RuntimeError as error:
            self._answer([seat], error)
            return
        if ask.twins:
            for other, why in self._past.astray(self._waiting.asking):
                self._answer([other], why)
        if kept is not None and self._gpu.reaches(kept.weights, seat):
            self._post(kept.number, kept.body, kept.weights, [seat])
        elif kept is not None and ask.state is not None:
            self._answer([seat], LacksStateError("the outcome is on a GPU that it does not use"))
        elif kept is not None:
            self._waiting.behind.append(seat)
        elif ask.lacks:
            self._waiting.lacking.append(seat)
        elif self._past.is_behind(seat):
            self._waiting.behind.append(seat)
            text = "meeting %r: rank %d was late for %s, and waits for the next such call"
            _log.warning(text, self._name, seat.rank, ask)
        else:
            self._waiting.ask(seat)
            if self._again is not None:
                seat.answer.deadline = self._again
            self._tell_deaths()

    def _hear_of_state(self, seat: Seat) -> None:
        """Take the state from a giver, or note that a member waits for it."""
        assert seat.answer is not None
        if seat.answer.ask.operation == "heal":
            healing = next((one for one in self._healings if seat in one.lacking), None)
            if healing is None:
                self._answer([seat], LacksStateError("nobody gives the state"))
            else:
                healing.waiting.append(seat)
            return
        healing = next((one for one in self._healings if one.giver is seat), None)
        try:
            seat.answer.bring()
            state = seat.answer.take()
        except Exception as error:  # its node or the agent there has died, or lost the state
            why = f"{seat.who}: its state could not be read: {reason_in_a_line(error)}"
            self._lose(seat, MemberDiedError(why))
            return
        self._answer([seat])  # the giver goes on while its state is copied
        if healing is not None and healing.is_waited_for and state is not None:
            try:
                healing.state = self._copied(state)
            except Exception as error:  # memory is short; only those that wait need it
                why = f"the state could not be copied: {reason_in_a_line(error)}"
                healing.fail(RuntimeError(why))

    def _heal(self) -> None:
        """Answer members that wait for a state, if it is known; give up on late givers."""
        for healing in self._healings:
            healing.give_up_in_time()
            if not healing.is_known:
                continue
            seats, healing.waiting = healing.waiting, []
            healing.lacking = [seat for seat in healing.lacking if seat not in seats]
            if healing.state is None:
                self._answer(seats, healing.why)
            else:
                body = pickle.dumps(tuple(Outcome(healing.number, self._size, self.door.ranks())))
                self._post(-healing.number, body, healing.state, seats)
                for seat in seats:
                    self._away.discard(seat.rank)
                    text = "meeting %r: rank %d is healed, with the state of rank %d"
                    _log.warning(text, self._name, seat.rank, healing.giver.rank)

    def _answer(self, seats: Sequence[Seat], error: Exception | None = None) -> None:
        """Answer asks that are part of no call."""
        self._waiting.drop(seats)
        for seat in seats:
            outcome = Outcome(seat.has, self._size, self.door.ranks(), error=error)
            self._post(seat.has, ray.cloudpickle.dumps(tuple(outcome)), None, [seat])

    def _close_call(self) -> None:
        """Average, relay or gather, and post the outcome to all members that have asked."""
        waiting = self._waiting
        asks, deadline = waiting.asks(), waiting.deadline()
        first = asks[min(asks)]
        elsewhere = {seat.rank for seat in waiting.elsewhere}
        arrivals = Arrivals.over(
            {seat.rank: seat.answer for seat in waiting.asking if seat.answer is not None},
            failed={k: seat.why for k, seat in self.door.seats.items() if seat.why is not None},
            late=sorted(self.door.missed() - {*asks} - elsewhere),
            timeout=deadline.timeout,
            seconds_waited=self._seconds_waited,
        )
        is_average = first.operation == "average"
        weights: Packed | Stayed | None = None
        result: Round | None = None
        error: Exception | None = None
        try:
            self._check_agree(asks, arrivals)
            if first.operation == "all_gather":
                result = self._gather(asks, arrivals)
            elif any(ask.is_in_window for ask in asks.values()):
                result, weights = self._stay_on_gpu(asks, arrivals)
            else:
                average = self._average if is_average else self._relay
                result = average(asks, arrivals)
                weights = Packed(result.weights.buffer, result.weights.layout)
        except AskAgainError as why:
            self._ask_again(why)
            return
        except Exception as raised:  # all members raise it; a rule may raise anything
            error = portable(raised)
        finally:
            _core.withdraw_offer()
        arrivals.let_go()
        self._number += 1
        self._seconds_waited = 0.0
        self._again = None
        number, asking = self._number, waiting.close_call()
        lacking, missed = waiting.healed_by(first), waiting.missed_by(first)
        facts: tuple[Any, ...] = ()
        giver = 0
        layout: bytes | None = None
        pickler: Any = pickle if error is None else ray.cloudpickle
        if result is not None:
            layout = weights.layout.pickled if weights and not is_average else None
            result.number, result.ways = number, self._ways(asks) | result.ways
            if lacking:
                giver = self._begin_healing(number, result, asking, lacking, deadline)
                result.healed = tuple(sorted(seat.rank for seat in lacking))
            late = {seat.rank for seat in (*missed, *waiting.behind)}
            result.late = tuple(sorted({*result.late, *late}))
            if result.failed:
                result.failed = {rank: portable(why) for rank, why in result.failed.items()}
                pickler = ray.cloudpickle
            facts = facts_of(result)
        took_part = tuple(seat.number for seat in asking)
        healed = tuple(seat.number for seat in lacking) if giver else ()
        served: list[Seat] = [] if result is None else waiting.late_for(first)
        may_stay = self._gpu.may_stay(first, [*asking, *lacking, *served])
        stayed = weights if isinstance(weights, Stayed) else None
        outcome = Outcome(
            number,
            self._size,
            self.door.ranks(),
            took_part,
            giver,
            healed,
            error,
            layout,
            facts,
            None if stayed is None else stayed.handle.placed,
            may_stay,
            result.weights if result is not None and first.operation == "all_gather" else {},
        )
        body = pickler.dumps(tuple(outcome))
        if result is not None:
            self._past.keep(first, number, body, weights, [*asking, *lacking], served)
            waiting.drop([*lacking, *served])
        reach("sending")
        # The last member to ask may still be awake. It gets the outcome first, and goes on while
        # the others wake up.
        asking.reverse()
        asking += lacking if giver else []
        asking += served
        self._answer(missed, ElsewhereError(f"the others have called {first}"))
        exchanged = None if result is None else result._exchanged
        self._post(number, body, weights, asking, exchanged)
        self._gpu.let_go(self._past.has, self.door.present.values())
        # No member waits for the rest.
        for rank in sorted(self._away & asks.keys()):
            self._away.remove(rank)
            _log.warning("meeting %r: rank %d is back", self._name, rank)
        if result is not None and first.operation != "broadcast":
            report(result, already_named=self._away)
            self._away |= {*result.late}
            nbytes = self._agents.nbytes if is_average else result.nbytes
            METRICS.add({SENT: nbytes * len(asks)})

    def _begin_healing(
        self,
        number: int,
        result: Round,
        asking: Sequence[Seat],
        lacking: list[Seat],
        deadline: Deadline,
    ) -> int:
        """Choose the giver among the averaged members; return the number of its seat."""
        giver = min((seat for seat in asking if seat.rank in result.used), key=lambda s: s.rank)
        self._healings = [healing for healing in self._healings if healing.lacking]
        until = Deadline.after(deadline.timeout)
        self._healings.append(Healing(number, giver, [*lacking], until))
        return giver.number

    def _check_agree(self, asks: dict[int, Ask], arrivals: Arrivals) -> None:
        """Raise `CallsDifferError`, naming all ranks, unless all ask for the same call."""
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
            raise CallsDifferError(f"expected the same call of all members, got {calls}{where}")

    def _stay_on_gpu(self, asks: dict[int, Ask], arrivals: Arrivals) -> tuple[Round, Stayed]:
        """Average, or relay, weights that are in windows of a GPU.

        Raises:
            AskAgainError: If they have to come through memory of the host.
            WorkerError: If fewer ranks than needed take part.
        """
        waiting, first = self._waiting, asks[min(asks)]
        seats = {seat.rank: seat for seat in waiting.asking}
        layout = next(
            seat.answer.layout for seat in seats.values() if seat.answer and seat.ask.is_in_window
        )
        others = [*waiting.healed_by(first), *waiting.late_for(first)]
        begin = _clock.now()
        if first.operation == "average":
            request = self._request(asks, arrivals)
            ranks = sorted(seats)
            members, weights = [seats[rank] for rank in ranks], request.numbers_of(ranks)
            stayed = self._gpu.average(first, members, others, layout, weights)
        else:
            root = seats.get(first.root or 0)
            if root is None:
                raise self._lost_root(first, arrivals)
            stayed = self._gpu.relay(first, root, [*seats.values(), *others], layout)
            ranks = [root.rank]
        self._agents.nbytes = layout.nbytes
        result = Round(
            None,
            ranks,
            failed=dict(sorted(arrivals.failed.items())),
            late=arrivals.late,
            seconds={"wait": arrivals.seconds_waited, "average": _clock.now() - begin},
            nbytes=len(ranks) * layout.nbytes,
            ways=dict.fromkeys(sorted(seats), "gpu"),
        )
        return result, stayed

    def _ask_again(self, why: AskAgainError) -> None:
        """Have members whose weights are on a GPU send them through memory of the host.

        The call stays open until they have, or their time is up.
        """
        _log.info("meeting %r: weights leave the GPU to be averaged: %s", self._name, why)
        seats = [seat for seat in self._waiting.asking if seat.ask.is_in_window]
        timeout, end = self._waiting.deadline()
        self._again = Deadline(timeout, end and max(end, _clock.now() + _AGAIN))
        self._waiting.drop(seats)
        for seat in self._waiting.asking:
            assert seat.answer is not None
            seat.answer.deadline = self._again
        for seat in seats:
            seat.tell(seat.has)
            assert seat.lane is not None
            if seat.lane.is_answered:  # one that still averages is asked once it has
                try:
                    seat.lane.order(RESEND)
                except Exception as error:  # it died meanwhile
                    fault = reason_in_a_line(error)
                    self._lose(seat, MemberDiedError(f"{seat.who}: {fault}"))

    def _request(self, asks: dict[int, Ask], arrivals: Arrivals) -> Request:
        """Return what is asked of an average, after checking that enough ranks take part."""
        first = asks[min(asks)]
        weights = tuple(asks[k].weight if k in asks else 0.0 for k in range(self._size))
        if not any(weights):
            weighted = ", ".join(f"rank {rank}" for rank in sorted(asks))
            raise ValueError(f"expected a positive weight, got only zeros of {weighted}")
        request = _request_of(weights, first.min_results, first.nonfinite, first.rule)
        arrivals.check(request)
        return request

    def _average(self, asks: dict[int, Ask], arrivals: Arrivals) -> Round:
        request = self._request(asks, arrivals)
        answers: dict[int, Any] = {rank: arrivals.answers[rank] for rank in asks}
        self._agents.nbytes = answers[min(asks)].layout.nbytes
        away = [rank for rank, answer in answers.items() if answer.away is not None]
        why = "a rule needs all results in one place" if request.rule else self._agents.why_not()
        if away and why is None:
            return NodesAverage(self._agents, arrivals, request).run()
        arrivals.bring()
        self._lanes.windows.offer(self._agents.nbytes)
        result = DriverAverage(arrivals, request).run()
        result.ways = dict.fromkeys(away, f"store: {why}")
        return result

    def _gather(self, asks: dict[int, Ask], arrivals: Arrivals) -> Round:
        """Return a round with the objects of the members, by rank, pickled."""
        self._request(asks, arrivals)
        values = {rank: ask.value for rank, ask in sorted(asks.items())}
        return Round(
            values,
            [*values],
            failed=dict(sorted(arrivals.failed.items())),
            late=arrivals.late,
            seconds={"wait": arrivals.seconds_waited},
            nbytes=sum(map(len, values.values())),
        )

    def _relay(self, asks: dict[int, Ask], arrivals: Arrivals) -> Round:
        """Return a round with a copy of the root's weights.

        Raises:
            WorkerError: If the root is dead or late.
        """
        first = asks[min(asks)]
        assert first.root is not None
        begin = _clock.now()
        arrivals.bring()
        weights = arrivals.collect().get(first.root)
        if weights is None:
            raise self._lost_root(first, arrivals)
        copied = self._copied(weights)
        return Round(
            copied.weights(),
            (first.root,),
            failed=dict(sorted(arrivals.failed.items())),
            late=arrivals.late,
            seconds={"wait": arrivals.seconds_waited, "copy": _clock.now() - begin},
            nbytes=copied.buffer.nbytes,
        )

    def _lost_root(self, first: Ask, arrivals: Arrivals) -> WorkerError:
        """Return the error about a root whose weights are not there."""
        assert first.root is not None
        why = arrivals.errors.get(first.root) or self._absence(first)
        return WorkerError({first.root: why})

    def _absence(self, first: Ask) -> Exception:
        """Return the reason for which the root of a broadcast does not take part."""
        assert first.root is not None
        seat = self.door.seats.get(first.root)
        if seat is None:
            return RuntimeError("it has not joined the meeting")
        if seat in self._waiting.elsewhere:
            return RuntimeError(f"it waits for the others to call {seat.ask}")
        # A process that is joining is late for nobody else.
        return late_error(first.timeout) if seat.is_present else RuntimeError("it has left")

    def _copied(self, weights: FlatWeights) -> Packed:
        """Return a copy, if possible in memory that all members of this node read."""
        self._lanes.windows.offer(weights.layout.nbytes)
        try:
            copied = weights.layout.new_buffer()
        finally:
            _core.withdraw_offer()
        _core.move_parts([copied], [weights.buffer])
        return Packed(copied, weights.layout)

    def _ways(self, asks: dict[int, Ask]) -> dict[int, str]:
        """Return, by rank, the way by which its ask came."""
        return {k: "store" if self.door.seats[k].lane is None else "lane" for k in sorted(asks)}

    def _welcome(self) -> None:
        """Give members that are ready their first outcome, once the meeting is open."""
        ready = [seat for seat in self.door.present.values() if seat.state is State.READY]
        was_open = self.door.is_open
        self.door.open_for(len(ready))
        if ready and self.door.is_open:
            for seat in [] if was_open else ready:  # others join with their first ask
                seat.join()
            first = Outcome(self._number, self._size, self.door.ranks())
            self._post(0, pickle.dumps(tuple(first)), None, ready)

    def _post(
        self,
        number: int,
        body: bytes,
        weights: Packed | Stayed | None,
        seats: Sequence[Seat],
        exchanged: Exchanged | None = None,
    ) -> None:
        """Give ``seats`` an outcome.

        Args:
            number: The number of the outcome; for the state that goes with it, its negative.
            body: The outcome.
            weights: Its weights.
            seats: The members, which wait for it.
            exchanged: The agents that already have the weights.
        """
        buffer = weights.buffer if isinstance(weights, Packed) else None
        post: Post | None = None
        ref: ray.ObjectRef | None = None
        away: dict[AgentEnd, list[Seat]] = {}
        posted: list[_core.Mailbox] = []
        wake = self._lanes.wake
        for seat in seats:
            caller = seat.tell(abs(number))
            try:
                if isinstance(weights, Stayed):
                    weights.send(seat)
                if seat.lane is not None:
                    if post is None:
                        self._posts += 1
                        post = Post(self._posts, body, buffer, self._lanes.windows)
                    post.to(seat, posted)
                elif caller is not None:
                    if buffer is not None and ref is None:
                        wake(posted)  # do not let them sleep while weights are put
                        posted.clear()
                        ref = self._put(buffer)
                    caller.set_result((body, None if ref is None else [ref]))
                elif seat.agent is not None:
                    away.setdefault(seat.agent, []).append(seat)
            except Exception as error:  # the member died meanwhile, or Ray's store is full
                why = MemberDiedError(f"{seat.who}: {reason_in_a_line(error)}")
                if caller is not None and not caller.done():
                    caller.set_exception(why)
                self._lose(seat, why)
        wake(posted)
        for agent, there in away.items():
            sent: SentWeights = None
            try:
                if exchanged is not None and agent.has(exchanged):
                    sent = AverageOf(exchanged.number)
                elif buffer is not None:
                    ref = self._put(buffer) if ref is None else ref
                    sent = [ref]
                tokens = [seat.token for seat in there]
                agent.handle.post.remote(BranchOutcome(number, body, sent, tokens))
            except Exception as error:  # Ray's store is full
                fault = f"its outcome was not sent: {reason_in_a_line(error)}"
                for seat in there:
                    self._lose(seat, MemberDiedError(f"{seat.who}: {fault}"))

    def _lose(self, seat: Seat, why: MemberDiedError) -> None:
        """Count a member as dead."""
        if seat.is_present:
            seat.die(why)
            self._forget(seat)
            self._untold.append(seat)
            self._tell_deaths()

    def _forget(self, seat: Seat) -> None:
        """Wait for nothing more of a member that has left or is dead."""
        self.door.forget(seat)
        self._gpu.forget(seat)
        self._waiting.drop([seat])
        for healing in self._healings:
            healing.lose(seat)
        self._forget_lane(seat)

    def _forget_lane(self, seat: Seat) -> None:
        """Stop using a member's lane, or expecting one."""
        if seat.agent is not None:
            seat.agent.handle.forget.remote(seat.token)
        if seat.lane is not None:
            self._lanes.give_up(seat.lane)
        else:
            self._lanes.forget(seat.token)

    def _tell_deaths(self) -> None:
        """Log deaths, but only once a member waits: at the end of a training they do not matter."""
        if self._waiting.asking or not self.door.is_open:
            for seat in self._untold:
                assert seat.why is not None
                text = error_of_rank(seat.rank, seat.why)
                _log.warning("meeting %r: %s", self._name, text)
                if seat.has_joined:
                    self._away.add(seat.rank)
            self._untold.clear()

    # The calls that other threads ask the meeting's thread to make.

    def attach(self, token: bytes, nonce: bytes) -> None:
        """Make the lane to a member.

        Raises:
            LaneError: If it has not connected.
        """
        seat = self.door.present.get(token)
        if seat is None or seat.state is not State.ENTERING:
            raise LaneError("no such member")
        seat.attach(self._lanes.connect(token, nonce))

    def expect(self, token: bytes, caller: Future[Reply] | None) -> None:
        """Note that a member waits for its first outcome, in a call through Ray or at a branch."""
        seat = self.door.present.get(token)
        if seat is not None:
            if caller is not None:  # it has made no lane
                self._forget_lane(seat)
            seat.expect(caller)
        elif caller is not None:
            caller.set_exception(_not_here())

    def put(self, token: bytes, letter: Letter) -> None:
        """Take an ask that came through Ray."""
        seat = self.door.present.get(token)
        if seat is not None:
            seat.receive(letter)
        elif letter.caller is not None:
            letter.caller.set_exception(_not_here())

    def lose(self, token: bytes, why: MemberDiedError) -> None:
        """Count a member as dead, or drop a process that no longer wants to be a member."""
        self.door.drop(token, why)
        seat = self.door.present.get(token)
        if seat is not None and seat.look():  # it may have left before
            self._hear(seat)
        if seat is not None:
            self._lose(seat, why)

    def fetch(self, number: int) -> tuple[bytes, NDArray[np.uint8] | None]:
        """Return the body of an outcome that was announced by ``number``, and its weights.

        Raises:
            KeyError: If no member has to fetch it.
        """
        return fetched(self.door.present.values(), number)


def _not_here() -> MemberDiedError:
    return MemberDiedError("the host has counted this member as dead")


@functools.lru_cache(maxsize=16)
def _request_of(
    weights: tuple[float, ...],
    min_results: int | None,  # if None, all ranks of the arrivals, including dead and late ones
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
