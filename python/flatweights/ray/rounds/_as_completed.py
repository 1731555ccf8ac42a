"""Rounds without a barrier: each result is a round when it arrives, and no worker waits.

Every worker has a call, except workers whose results are in the caller's current round. These
workers are called again, with the latest weights, once the caller asks for the next round.

- The core (`core/_loop`) says which result is next, and which call a round waits for.
- The next round lists a worker that has died or is late. The loop asks it to take the latest
  weights until it does, and then calls it again.
- A worker that owes an answer to an earlier call is called once it has answered.
- Other calls of the group in between wait for the workers; results are kept for later rounds.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from flatweights import _core
from flatweights._average import mean_of_packed
from flatweights._layout import Layout
from flatweights._sources import check_flat_weights
from flatweights._weights import FlatWeights, frozen
from flatweights.ray import _clock
from flatweights.ray.core._deadline import Deadline
from flatweights.ray.core._loop import Loop, LoopCall
from flatweights.ray.peers._latest import Latest
from flatweights.ray.peers._ranks import WorkerRecord
from flatweights.ray.peers._transport import PendingResult, error_in
from flatweights.ray.peers._wait import Arrivals, RoundSpec, wait_any
from flatweights.ray.peers._worker_set import WorkerSet
from flatweights.ray.results._report import report
from flatweights.ray.results._result import copied
from flatweights.ray.results._round import Round
from flatweights.ray.rounds._codec import plain_codec
from flatweights.ray.rounds._local_reduce import DriverAverage
from flatweights.ray.rounds._work import Work
from flatweights.ray.support._errors import WorkerError, is_lost, late_error
from flatweights.ray.support._failpoints import reach

_SLICE = 0.05  # seconds between two checks of workers that are being added, or are lost
_LOOK = 1e-3  # seconds between two looks for workers that have died, while others answer

_log = logging.getLogger("flatweights")


_Sent: TypeAlias = LoopCall[WorkerRecord]


class _KeptResult(PendingResult):
    """A value, or an error, that was copied before its worker was called again."""

    is_in_store = False

    def __init__(self, answer: PendingResult) -> None:
        self._value: Any = None
        self._error: Exception | None = None
        try:
            self._value = copied(answer.result())
        except Exception as error:
            self._error = error.with_traceback(None)

    @classmethod
    def wait(cls, answers: Any, timeout: float | None, enough: int = 1) -> Any:
        return answers

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value

    def release(self) -> None:
        self._value = None


@dataclasses.dataclass
class _SinceLast:
    """What has happened since the last round, for the next one to list; see `Round`."""

    failed: dict[int, Exception] = dataclasses.field(default_factory=dict)
    late: list[int] = dataclasses.field(default_factory=list)
    quarantined: set[int] = dataclasses.field(default_factory=set)
    stale: list[int] = dataclasses.field(default_factory=list)
    nbytes_sent: int = 0

    def add_to(self, result: Round) -> None:
        """Have ``result`` list it, beside what it lists itself."""
        if self.failed or self.late or self.quarantined:
            result.failed = dict(sorted((self.failed | result.failed).items()))
            result.quarantined = tuple(sorted(self.quarantined.union(result.quarantined)))
            result.late = tuple(self.late)
        if self.stale:
            result.stale = tuple(self.stale)
        result.nbytes_sent = self.nbytes_sent


class AsCompleted:
    """The calls of one loop, and the rounds of their results.

    Attributes:
        worker_set: The workers.
    """

    def __init__(
        self,
        worker_set: WorkerSet,
        work: Work,
        spec: RoundSpec,
        ranks: Iterable[int] | None,
        buffer: int,
        max_staleness: int | None,
    ) -> None:
        """Make no calls yet.

        Args:
            worker_set: The workers.
            work: The call that they receive.
            spec: The arguments of each round.
            ranks: The ranks that are called; if None, all, including ranks that are added later.
            buffer: The number of results in a round.
            max_staleness: The largest number of publications since the weights of a result.
        """
        self.worker_set = worker_set
        self._work = work
        self._spec = spec
        self._asked = None if ranks is None else {*ranks}
        self._buffer = buffer
        self._loop = Loop[WorkerRecord](max_staleness)
        self._admitted = 0  # the first ranks of `Ranks.admitted`, which were taken up
        self._since = _SinceLast()
        self._waited = 0.0  # seconds for answers, in this round
        self._next_look = 0.0  # the time from which `_look` looks at all answers
        self._accepted: Layout | None = None  # of the last results

    def begin(self) -> None:
        """Get the weights that all start from, if none were sent yet; make no calls.

        Raises:
            WorkerError: If no worker is healthy.
        """
        worker_set = self.worker_set
        worker_set.forget_ready()
        if self._work.needs_weights:
            worker_set.start(self._spec.timeout)
        worker_set.ranks.admit()
        self._admitted = len(worker_set.ranks.admitted)
        for rank in worker_set.ranks.check(self._asked):
            if worker_set.ranks.get(rank) is not None:  # it is ready
                self._take_up(rank)

    def _take_up(self, rank: int) -> None:
        """Call ``rank`` once it has given its answer in flight, and has the latest weights."""
        record = self.worker_set.ranks[rank]
        if record.in_flight is not None:
            timeout = self._spec.timeout if record.why is None else None
            self._expect(rank, record.in_flight, "in_flight", self.worker_set.latest, timeout)
        elif record.why is None:
            self._loop.idle.append(rank)
        else:
            self._loop.lost.add(rank)

    def next(self) -> Round:
        """Return the next round.

        Raises:
            WorkerError: If all workers are dead or late, or a method has raised; or if all have
                returned NaN or infinity since the last round, which are left out.
        """
        begin = _clock.now()
        self._waited = 0.0
        taken: dict[int, _Sent] = {}
        self._call_idle()
        self._look(begin)
        loop = self._loop
        while True:
            if loop.idle or loop.lost or self.worker_set.ranks.joining:
                self._call_idle()
            while (oldest := loop.passed_over()) is not None:
                patience = loop.patience(oldest, _clock.now())
                if patience is None:
                    break
                self._receive(patience)
            if not self._take(taken):
                if loop.idle:
                    continue
                if self._is_anyone_at_work(taken):
                    self._receive(None)
                    continue
                if not taken:
                    errors = self.worker_set.ranks.unhealthy(self._asked_now()) | self._since.failed
                    raise WorkerError(errors, "" if errors else "no worker of the loop is left")
                # A round with fewer results: no other worker is left.
            publications = self.worker_set.latest.number
            if self._leave_out_stale(taken, publications):
                continue
            result = self._round(taken, publications)
            if result is not None:
                break
            self._check_not_all_spoiled()
            taken = {}
        loop.rounds += 1
        result.number = loop.rounds
        result.seconds["wait"] = self._waited
        result.seconds["round"] = _clock.now() - begin
        named = self.worker_set.ranks.unhealthy() if result.failed or result.late else {}
        report(result, already_named=named.keys() - result.failed.keys(), has_sent=True)
        return result

    def close(self) -> None:
        """Wait for no more answers; workers owe their answers to the group."""
        loop, self._loop = self._loop, Loop(None)
        for answer, sent in loop.out.items():
            if sent.kind != "in_flight":
                is_late = sent.record.why is not None  # by a call in the body
                sent.record.complete(answer, is_there=False, is_late=is_late)
        for sent in loop.there:
            # A worker whose method has raised may have refused the weights.
            version = sent.version if error_in(sent.answer) is None else None
            sent.record.complete(sent.answer, version=version)
            sent.answer.release()
        self.worker_set.channels.done()

    # Calls.

    def _asked_now(self) -> list[int]:
        """Return the ranks of the loop that are in the group now."""
        self.worker_set.ranks.admit()
        return [rank for rank in self.worker_set.ranks.check(None) if self._is_asked(rank)]

    def _is_asked(self, rank: int) -> bool:
        return self._asked is None or rank in self._asked

    def _call_idle(self) -> None:
        worker_set = self.worker_set
        worker_set.ranks.admit()
        # A call in the body may have admitted them, and removed some.
        for rank in worker_set.ranks.admitted[self._admitted :]:
            self._admitted += 1
            if self._is_asked(rank) and worker_set.ranks.get(rank) is not None:
                self._take_up(rank)
        if self._loop.lost:
            now = _clock.now()
            for rank in sorted(self._loop.lost):
                self._probe(rank, now)
        idle, self._loop.idle = self._loop.idle, []
        for k, rank in enumerate(idle):
            if not self._may_be_called(rank):
                continue
            try:
                more = self._work.arguments_of([rank]).get(rank, ())
                if self._work.arguments is None or self._may_be_called(rank):
                    self._send(rank, "work", more)
            except BaseException:
                self._loop.idle = [*idle[k:], *self._loop.idle]
                raise

    def _may_be_called(self, rank: int) -> bool:
        """Whether ``rank`` is still idle; a call in the body, or by a function, may change it."""
        record = self.worker_set.ranks.get(rank)
        if record is None:  # it was removed
            return False
        if record.why is not None or record.in_flight is not None:
            self._take_up(rank)
            return False
        return True

    def _send(self, rank: int, kind: Literal["work", "probe"], more: Sequence[Any] = ()) -> None:
        worker_set, work, timeout = self.worker_set, self._work, self._spec.timeout
        if kind == "work":
            args = *work.args, *more
            call, latest = worker_set.call_on_latest(rank, work.method, args, work.kwargs)
            answer = worker_set.ranks[rank].send(call)
        else:
            answer, call, latest = worker_set.probe(rank)
            timeout = None
        self._expect(rank, answer, kind, latest, timeout)
        if call.payload is not None:
            self._since.nbytes_sent += call.payload.nbytes
        reach("called")

    def _expect(
        self,
        rank: int,
        answer: PendingResult,
        kind: Literal["work", "probe", "in_flight"],
        latest: Latest,
        timeout: float | None = None,
    ) -> None:
        end = None if timeout is None else _clock.now() + timeout
        record, loop = self.worker_set.ranks[rank], self._loop
        record.kept = functools.partial(self._keep, answer, record.kept)
        version, number = latest.version, latest.number
        loop.call(LoopCall(rank, record, answer, kind, version, number, loop.rounds, end))

    def _probe(self, rank: int, now: float) -> None:
        """Send the latest weights to a worker that was lost, if it is time to."""
        record = self.worker_set.ranks.get(rank)
        if record is not None and record.next_probe > now:
            return
        self._loop.lost.remove(rank)
        if record is None:
            return
        if record.why is not None and record.in_flight is None:
            self._send(rank, "probe")
        else:  # a call in the loop's body has restored or called it
            self._take_up(rank)

    # Answers.

    def _is_anyone_at_work(self, besides: Collection[int]) -> bool:
        """Whether a healthy worker of another rank may answer, or one that is being added.

        A round does not wait for the start of the latter if it has results.
        """
        is_joining = not besides and any(map(self._is_asked, self.worker_set.ranks.joining))
        return is_joining or self._loop.is_anyone_at_work(besides)

    def _look(self, now: float) -> None:
        """Take the answers that are there, if results are to be put in order, or a look is due.

        While answers keep coming, only a look that does not wait learns of deaths.
        """
        if self._loop.there or now >= self._next_look:
            self._next_look = now + _LOOK
            self._receive(0.0)

    def _receive(self, seconds: float | None) -> None:
        """Wait for an answer, for at most ``seconds``, or until something else is due."""
        loop = self._loop
        if not loop.out:
            if seconds is None:
                _clock.sleep(_SLICE)
            return
        late = loop.deadline()
        ends = [] if late is None else [late]
        ends += [
            record.next_probe for rank in loop.lost if (record := self.worker_set.ranks.get(rank))
        ]
        begin = _clock.now()
        if seconds is not None:
            ends.append(begin + seconds)
        if self.worker_set.ranks.joining:
            ends.append(begin + _SLICE)
        there = wait_any([*loop.out], min(ends, default=None))
        for answer in there:
            self._arrive(loop.out.pop(answer))
        if seconds == 0.0:
            return
        now = _clock.now()
        self._waited += now - begin
        for sent in loop.overdue(now):
            self._note_late(sent)

    def _note_late(self, sent: _Sent) -> None:
        self._loop.take_out(sent.answer)
        sent.record.complete(sent.answer, is_there=False, is_late=True)
        if sent.record.has_left:
            return
        self._since.late.append(sent.rank)
        self._lose(sent, late_error(self._spec.timeout))

    def _lose(self, sent: _Sent, error: Exception) -> None:
        """Count a worker as lost, and ask it to take the latest weights once it owes no answer."""
        self.worker_set.ranks.note_lost({sent.rank: error})
        if sent.record.in_flight is None:
            sent.record.back_off()
        self._take_up(sent.rank)

    def _arrive(self, sent: _Sent) -> None:
        record = sent.record
        if record.has_left:
            record.drop_in_flight()
        elif sent.kind == "work" and record.why is None:
            self._loop.there.append(sent)
        elif sent.kind == "probe" or record.is_probed:  # by another loop or call
            if record.end_probe():
                self.worker_set.mark_healthy([sent.rank])
            self._take_up(sent.rank)
        else:
            record.drop_in_flight()
            self._take_up(sent.rank)

    def _keep(
        self, answer: PendingResult, before: Callable[[bool], None] | None, is_there: bool
    ) -> None:
        """Keep the value of an answer that another call of the group has waited for.

        If that call or loop waits no longer, although the answer has not arrived, this loop begins
        anew to wait for the worker.

        Args:
            answer: The answer.
            before: The same function of another loop, which waits for the same answer.
            is_there: Whether it has arrived.
        """
        if before is not None:
            before(is_there)
        sent = self._loop.take_out(answer)
        if sent is None or sent.record.has_left:
            return
        if sent.kind == "work" and sent.record.why is None and is_there:
            self._loop.there.append(dataclasses.replace(sent, answer=_KeptResult(answer)))
        else:
            self._loop.idle.append(sent.rank)

    # Rounds.

    def _take(self, taken: dict[int, _Sent]) -> bool:
        """Take results for a round; return whether there are enough."""
        while len(taken) < self._buffer and (sent := self._loop.next_result(taken)) is not None:
            if not self._is_used(sent):
                continue
            taken[sent.rank] = sent
            if len(taken) < self._buffer:
                sent.answer, answer = _KeptResult(sent.answer), sent.answer
                answer.release()
                sent.is_free = True
                self._loop.idle.append(sent.rank)
        return len(taken) == self._buffer

    def _is_used(self, sent: _Sent) -> bool:
        """Whether a result belongs in a round; settle it.

        Raises:
            WorkerError: If the method raised.
        """
        rank, record = sent.rank, sent.record
        if record.has_left:
            record.drop_in_flight()
            sent.answer.release()
            return False
        if sent.answer.packed is None:
            try:
                sent.answer.result()
            except Exception as error:
                sent.answer.release()
                self._fail(sent, error.with_traceback(None))
                return False
        record.complete(sent.answer, version=sent.version)
        return not self._leave_out_stale({rank: sent}, self.worker_set.latest.number)

    def _leave_out_stale(self, taken: dict[int, _Sent], publications: int) -> bool:
        """Remove results that are too stale after so many publications; return whether any is."""
        stale = [k for k, sent in taken.items() if self._loop.is_stale(sent, publications)]
        for rank in stale:
            sent = taken.pop(rank)
            sent.answer.release()
            self._since.stale.append(rank)
            old = publications - sent.publication
            _log.info("rank %d: a result is left out, %d publications old", rank, old)
            if not sent.is_free:
                self._loop.idle.append(rank)
        return bool(stale)

    def _fail(self, sent: _Sent, error: Exception) -> None:
        sent.record.complete(sent.answer)
        if not is_lost(error):
            self._loop.idle.append(sent.rank)
            raise WorkerError({sent.rank: error}) from error
        self._since.failed[sent.rank] = error
        self._lose(sent, error)

    def _round(self, taken: Mapping[int, _Sent], publications: int) -> Round | None:
        """Return the average of the results; None, if all hold NaN or infinity.

        Args:
            taken: The results.
            publications: The number of publications so far.
        """
        worker_set, spec = self.worker_set, self._spec
        self._loop.idle += [rank for rank, sent in taken.items() if not sent.is_free]
        worker_set.channels.done()
        result = self._of_one(*taken.values()) if len(taken) == 1 else None
        if result is None:
            codec = plain_codec(worker_set.layout, self._work.method)
            arrivals = Arrivals(Deadline(None, None))
            for rank, sent in taken.items():
                arrivals.arrive(rank, sent.answer)
            try:
                result = DriverAverage(arrivals, spec, None, codec).run()
            except WorkerError:
                if arrivals.quarantined != taken.keys():
                    raise
                self._since.failed |= arrivals.failed
                self._since.quarantined.update(arrivals.quarantined)
                return None
        result.staleness = {rank: publications - taken[rank].publication for rank in taken}
        result.transports = {rank: sent.record.worker.transport for rank, sent in taken.items()}
        since, self._since = self._since, _SinceLast()
        since.add_to(result)
        result.joined, result.left = worker_set.ranks.news
        worker_set.ranks.forget_news(result.joined, result.left)
        return result

    def _check_not_all_spoiled(self) -> None:
        """Raise if each worker has returned NaN or infinity: there might be no round any more."""
        ranks = self.worker_set.ranks
        if any(map(self._is_asked, ranks.joining)):
            return
        healthy = {rank for rank in ranks.healthy() if self._is_asked(rank)}
        if healthy <= self._since.quarantined:
            raise WorkerError(ranks.unhealthy(self._asked_now()) | self._since.failed)

    def _of_one(self, sent: _Sent) -> Round | None:
        """Return the round of a single result of weights only, as `DriverAverage`, but faster.

        It is not copied out of the worker's segment, unless the caller keeps an earlier result of
        this worker: a worker that had no free segment would answer through Ray.

        Returns:
            None for other results, and for NaN and infinity unless these are averaged.
        """
        spec, packed = self._spec, sent.answer.packed
        if packed is None or spec.rule is not None or callable(spec.weights):
            return None
        if not spec.number_of(sent.rank):
            return None
        layout, where = packed.layout, f"rank {sent.rank}"
        if layout is not self._accepted:
            plain_codec(self.worker_set.layout, self._work.method).accept(layout, where)
            self._accepted = layout
        takes_all = spec.nonfinite == "propagate"
        reach("averaging")
        begin = _clock.now()
        if sent.answer.may_be_kept():
            check_flat_weights(layout, where)
            mean = packed.buffer
            is_finite = takes_all or _core.isfinite(layout.core, True, [mean])
        else:
            mean = layout.new_buffer()
            is_finite = bool(mean_of_packed(mean, [layout], [[packed.buffer]], [1.0], where))
        if not (is_finite or takes_all):
            return None
        del packed
        sent.answer.release()
        return Round(
            FlatWeights.wrap(frozen(mean), layout),
            (sent.rank,),
            seconds={"wait": 0.0, "average": _clock.now() - begin},
            nbytes=mean.nbytes,
        )
