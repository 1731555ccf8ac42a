"""The workers of a group, and the weights that they should have.

`WorkerSet` is the state of a `WorkerGroup` between two calls:

- The latest weights have a version, the stamp of their message. They are replaced as a whole,
  before any worker is sent them. If all workers refuse them, the previous weights are the latest
  again.
- The record of a worker has the last version that it took, as far as is known. A healthy worker
  that may lack the latest weights (its call raised, was broken off, or was never made) is sent them
  before its next call.
- A worker is unhealthy if it died, is late or stale, or has refused weights that others took. It is
  not called until it has taken the latest weights.
- A worker that owes an answer is sent nothing before it has answered, since new weights could
  change those that it works on.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import ray

from flatweights._layout import Layout
from flatweights._weights import FlatWeights, frozen
from flatweights.ray import _clock
from flatweights.ray.core._deadline import Deadline
from flatweights.ray.nodes._plan import ReduceDType
from flatweights.ray.peers._agent import Agent
from flatweights.ray.peers._by_agent import AgentClient, Agents, NodeAnswer
from flatweights.ray.peers._by_channel import Worker
from flatweights.ray.peers._latest import Latest, model_of
from flatweights.ray.peers._platform import PLATFORM, GroupPlatform
from flatweights.ray.peers._ranks import Ranks, WorkerRecord
from flatweights.ray.peers._ready_workers import ReadyWorkers
from flatweights.ray.peers._result_metadata import ReadOptions
from flatweights.ray.peers._start import GroupStart
from flatweights.ray.peers._store import RayResult, argument_of, check_cluster
from flatweights.ray.peers._transport import Call, Payload, PendingResult, Stamp, error_in
from flatweights.ray.peers._wait import Arrivals, RoundSpec, deadline_in, wait_any
from flatweights.ray.results._report import METRICS, SENT
from flatweights.ray.results._result import copied
from flatweights.ray.results._round import Round
from flatweights.ray.results._wire import GroupWire, PayloadKind, nbytes_of
from flatweights.ray.support._errors import (
    DEAD,
    FULL,
    SHUT_DOWN,
    WorkerError,
    has_left_weights,
    is_refusal,
    is_restarting,
    is_stale,
    late_error,
    raised,
    reason_of,
    too_small,
)
from flatweights.ray.support._failpoints import reach

Outcome = TypeVar("Outcome")

_PAUSE = 0.05  # seconds until it asks an actor again that Ray is restarting
_MOMENT = 0.02  # seconds in which a process that Ray has started again answers

_log = logging.getLogger("flatweights")


class WorkerSet:
    """The workers of a group, the latest weights, and the calls that bring them.

    Attributes:
        ranks: The workers, by rank.
        platform: What the group uses of Ray and channels.
        channels: The channels to workers on this node.
        latest: The weights that workers should have.
        agents: The agents of other nodes.
    """

    def __init__(
        self,
        handles: Sequence[ray.actor.ActorHandle],
        wire: GroupWire | None,
        initial: Any,
        reduce_dtype: ReduceDType = "float64",
        platform: GroupPlatform = PLATFORM,
    ) -> None:
        """Take actors of `FlatWorker` classes; all count as healthy.

        Args:
            handles: The actors.
            wire: The encoder, if weights travel in 16 bits.
            initial: The weights that all workers start from; see `WorkerGroup`.
            reduce_dtype: The dtype in which sums travel between nodes.
            platform: What the group uses of Ray and channels.

        Raises:
            ValueError: If there is no actor, one is given twice, or ``reduce_dtype`` is not
                one of the dtypes.
            TypeError: If one is not an actor of a `FlatWorker` class.
        """
        check_cluster()
        self.ranks = Ranks(handles, platform)
        self.platform, self.channels = platform, self.ranks.channels
        self.agents = Agents(self.channels.offer, reduce_dtype, Agent, (), platform=platform)
        self.latest = Latest(wire, platform=platform)
        self._start = GroupStart(initial, platform)
        self._nbytes = 0  # of the last average that was made in this process
        self._ready: ReadyWorkers | None = None
        self._name, self._counts = secrets.token_hex(8), itertools.count(1)
        self._is_closed = False

    @property
    def layout(self) -> Layout | None:
        """The layout of all weights of the workers; None if unknown."""
        return self._start.layout

    def remove(self, ranks: Iterable[int] | int, *, kill: bool) -> list[int]:
        """Remove ``ranks`` from all later rounds, and the agents of nodes without workers."""
        removed = self.ranks.remove(ranks, kill=kill)
        self.forget_ready()
        self.agents.keep({record.worker.far_node for record in self.ranks.every().values()})
        return removed

    def start(self, timeout: float | None) -> None:
        """Get the weights that all workers start from, unless some were sent; send nothing.

        If no worker is healthy, workers that can be reached get the latest weights.

        Raises:
            WorkerError: If no worker can give its weights.
        """
        self.ranks.admit()
        self._restore_if_none_is_healthy(timeout)
        self._complete_published(timeout)
        if self.latest.version is None and self._start.initial is not None:
            self._await_in_flight(deadline_in(timeout))
            self.publish(self._first_weights(None, timeout))
        elif self._start.initial is None and not self.latest.own:
            # Weights that are published later may be a subset, and `publish` asks no worker.
            self._await_in_flight(deadline_in(timeout))
            self._learn_names(timeout)
        if self.latest.version is not None:
            self._start.initial = None

    def begin(
        self,
        weights: Any,
        timeout: float | None,
        ranks: Sequence[int] | None = None,
        *,
        starts: bool = True,
    ) -> tuple[list[int], Any]:
        """Return the ranks in ``ranks`` to call, and the weights that these calls must bring.

        1. It waits for answers that healthy ranks owe to broken-off calls; some may be lost.
        2. The first calls bring the initial weights.
        3. If no rank is healthy, those that can be reached are sent weights at once: the latest
           ones, if ``weights`` is None, after which it goes on with these ranks; otherwise
           ``weights``, and it returns these ranks, and None.
        4. If the calls bring no weights, or only changes of the latest ones, ranks that may lack
           these are sent them.

        Args:
            weights: The weights to bring; None, if workers use the weights that they have.
            starts: Whether workers need the initial weights for these calls.
            timeout: Seconds for each of these steps: a late rank may use all of them without making
                others late.
            ranks: The ranks; all, if None.

        Raises:
            WorkerError: If no rank is healthy, and none took the weights.
        """
        self._await_owed(timeout)
        if weights is None:
            self._restore_if_none_is_healthy(timeout)
        self._complete_published(timeout)
        weights = self._completed(weights, timeout, starts=starts)
        called = self.ranks.healthy(ranks)
        if weights is not None and not called and not self.ranks.healthy():
            took = self._send_to_unhealthy(weights, deadline_in(timeout))
            return [rank for rank in took if ranks is None or rank in ranks], None
        if behind := self._behind(called, weights):
            self._send_latest(behind, deadline_in(timeout))
            called = self.ranks.healthy(ranks)
        return called, weights

    def _restore_if_none_is_healthy(self, timeout: float | None) -> None:
        """Send ranks that can be reached the latest weights: they may have refused others."""
        if not self.ranks.healthy():
            self.restore(deadline_in(timeout), patient=False)

    def _completed(self, weights: Any, timeout: float | None, *, starts: bool) -> Any:
        """Return the initial weights, changed by ``weights``, if these calls are the first."""
        if self.latest.version is not None:
            self._start.initial = None  # not needed again
        is_needed = starts or weights is not None or self._start.was_sent
        is_first = self._start.initial is not None and is_needed
        if is_first and self.ranks.healthy():
            return self._first_weights(weights, timeout)
        if weights is not None and self.latest.is_unclear(weights):
            self._learn_names(timeout)
        return weights

    def _behind(self, ranks: Iterable[int], weights: Any) -> list[int]:
        """Return the ranks that may lack the latest weights, and need them besides ``weights``."""
        version, records = self.latest.version, self.ranks.records
        if version is None:
            return []
        behind = [rank for rank in ranks if records[rank].version != version]
        if behind and weights is not None and not self._needs_latest(weights):
            behind = [rank for rank in behind if records[rank].is_new]
        return behind

    def _needs_latest(self, weights: Any) -> bool:
        """Whether ``weights`` may change the latest ones: a subset of them, or on a wire."""
        model = model_of(weights)
        is_unknown = isinstance(model, ray.ObjectRef) or self.latest.wire is not None
        return is_unknown or self.latest.is_changed_by(model)

    def call(
        self,
        method: str | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] = {},
        payload: Payload | None = None,
        payload_kind: PayloadKind | None = None,
    ) -> Call:
        """Return the next call, on the latest weights, which ``payload`` brings, if given.

        Args:
            method: See `Call`.
            args: See `Call`.
            kwargs: See `Call`.
            payload: See `Call`.
            payload_kind: The kind of the result, if it is to be encoded.
        """
        wire = self.latest.wire
        encoding = None if payload_kind is None or wire is None else (wire.wire_dtype, payload_kind)
        head = self._next_stamp(), self.latest.version, encoding
        return Call(head, method, args, kwargs, payload)

    def send_out(
        self,
        call: Call,
        arrivals: Arrivals,
        ranks: Collection[int],
        by_rank: Mapping[int, Sequence[Any]] = {},
        reading: ReadOptions | None = None,
    ) -> None:
        """Call ``ranks``; their answers arrive in ``arrivals``.

        Agents call the workers of their nodes if results stay there, or if the agents have the
        weights that the call brings.

        Args:
            call: The call.
            arrivals: The wait for the answers.
            ranks: The ranks.
            by_rank: More arguments by rank.
            reading: The way in which agents read results, which then stay on their nodes.
        """
        exchanged = None if call.payload is None else call.payload.exchanged
        records = self.ranks.records
        far: dict[AgentClient, dict[int, Worker]] = {}
        may_be_far = reading is not None or exchanged is not None
        for rank in [r for r in ranks if records[r].worker.far_node] if may_be_far else ():
            worker = records[rank].worker
            agent = self.agents.of(worker, starts=reading is not None)
            if agent is not None and (reading is not None or agent.has(exchanged)):
                far.setdefault(agent, {})[rank] = worker
        by_agent = {rank for workers in far.values() for rank in workers} if far else ()
        answers: dict[int, PendingResult] = {}
        try:
            self.channels.let_sleep()
            for agent, workers in far.items():
                number = self.agents.next_number()
                answers.update(agent.call(number, call, workers, by_rank, reading))
                for rank in workers:
                    records[rank].track(answers[rank])
            if by_agent:
                ranks = [rank for rank in ranks if rank not in by_agent]
            for rank in ranks:
                record = records[rank]
                this = call.with_more(by_rank[rank]) if by_rank else call
                # In one statement, so that an interrupt finds the answer in both or in neither.
                record.in_flight = answers[rank] = record.worker.call(this)
                record.kept = None
        except BaseException as error:
            # The one that was being called may have the call, and take the weights that it brings.
            others = [records[rank] for rank in ranks if rank not in answers]
            for record in others:
                record.mark_stale()
            is_posted = any(record.worker.has_command for record in others)
            arrivals.were_interrupted = is_posted or not isinstance(error, Exception)
            raise
        finally:
            try:
                arrivals.expect(answers)
            finally:
                self.channels.wake()

    def round(
        self,
        weights: Any,
        ranks: Sequence[int],
        arrivals: Arrivals,
        work: Callable[[Payload | None], Outcome],
        *,
        alone: bool = False,
    ) -> Outcome:
        """Run a round whose calls carry ``weights``, unless None; note which ranks then have them.

        If all ranks refused them, or no call could be made, nothing was sent. Otherwise they are
        the latest weights, and ranks that refused are unhealthy.

        Args:
            weights: The weights.
            ranks: The ranks that are called.
            arrivals: Their answers.
            work: A function that takes the payload with the weights, makes the calls, and returns
                the outcome of the answers.
            alone: Whether the calls run no method, so that all errors concern the weights.
        """
        before, made = self.latest, list[Payload]()

        def begin() -> Outcome:
            if weights is not None and ranks:
                made.append(self._make_latest(weights, ranks))
            return work(made[0] if made else None)

        return self._until_closed(weights, before, made, arrivals, begin, alone=alone)

    def _until_closed(
        self,
        weights: Any,
        before: Latest,
        made: Sequence[Payload],
        arrivals: Arrivals,
        work: Callable[[], Outcome],
        *,
        alone: bool,
    ) -> Outcome:
        """Do ``work``, and the work of `round` after it.

        Args:
            weights: See `round`.
            before: The latest weights before it.
            made: The payload with ``weights``, once they are the latest.
            arrivals: See `round`.
            work: See `round`.
            alone: See `round`.
        """
        try:
            return work()
        except WorkerError as error:
            # It was raised at the first refusal. Read on to find out whether all refuse.
            while (refused := _refusals(arrivals)) and not _took(arrivals, refused):
                if (came := arrivals.wait()) is None:
                    break
                for rank in came:
                    arrivals.result(rank)
            raise error._and(refused) from error.__cause__
        finally:
            # Even if the round was broken off by something else than a rank's failure.
            if not made:
                self._close(arrivals)
            else:
                self._close_sent(made[0], arrivals, before, alone=alone)
                if isinstance(weights, Round):
                    weights.nbytes_sent = made[0].nbytes_sent

    def ready(self, ranks: Sequence[int]) -> ReadyWorkers | None:
        """Return the workers of ``ranks`` for `round_at_once`; None if `begin` has to do something.

        Workers of other ranks may still owe answers.
        """
        latest, start, ready = self.latest, self._start, self._ready
        if start.initial is not None or latest is start.published or latest.wire is not None:
            return None
        if ready is None or ready.ranks != ranks:
            ready = ReadyWorkers.of([self.ranks.records[rank] for rank in ranks], self.channels)
        if ready is not None and not ready.are_ready(latest.version):
            ready = None
        self._ready = ready
        return ready

    def forget_ready(self) -> None:
        """Forget the workers that `ready` has returned, whose segments stay mapped until then."""
        self._ready = None

    def round_at_once(
        self,
        ready: ReadyWorkers,
        weights: Any,
        timeout: float | None,
        work: tuple[str | None, Sequence[Any], Mapping[str, Any]],
        by_rank: Mapping[int, Sequence[Any]],
        read: Callable[[], Outcome | None],
        collect: Callable[[Arrivals], Outcome],
        *,
        alone: bool = False,
    ) -> Outcome | None:
        """Do the work of `round` with workers that are `ready`, in one step of C++.

        Args:
            ready: The workers.
            weights: See `round`.
            timeout: Seconds to wait for the answers; for ever, if None.
            work: The method that is called, its arguments and its keyword arguments.
            by_rank: More arguments by rank; none, if empty.
            read: A function that waits for the answers, reads them in one step, and returns the
                outcome; or returns None, and reads nothing.
            collect: A function that returns the outcome of the answers, in place of ``read``.
            alone: See `round`.

        Returns:
            None if nothing was sent: then `round` is to do it.
        """
        begin, before, posts = _clock.now(), self.latest, ready.posts
        is_flat = weights is None or type(model_of(weights)) is FlatWeights
        if not is_flat or (weights is not None and before.is_unclear(weights)):
            return None
        made, outcome, call, arrivals = list[Payload](), None, None, None
        try:
            if weights is not None:
                latest = before.after(weights, self._next_stamp())
                if latest.payload is None or not latest.payload.is_frozen:
                    return None
                made.append(latest.payload)
                self.latest = latest
            call = Call((self._next_stamp(), self.latest.version, None), *work, *made)
            put = _clock.now() - begin
            if not ready.post(call, by_rank):
                if made:
                    self.latest = before
                return None
            outcome = read()
            if outcome is None:
                arrivals = Arrivals(Deadline.after(timeout, begin))
                arrivals.seconds_waited = _clock.now() - begin - put
                arrivals.expect(ready.owe(call, by_rank, withdraws=False))
        except BaseException:
            arrivals = arrivals or Arrivals(Deadline.after(timeout, begin))
            if call is not None and ready.posts > posts:
                arrivals.expect(ready.owe(call, by_rank, withdraws=True))
            self._until_closed(weights, before, made, arrivals, lambda: None, alone=alone)
            raise
        if made:
            note_seconds(weights, "put", put)
        if arrivals is not None:
            rest = functools.partial(collect, arrivals)
            return self._until_closed(weights, before, made, arrivals, rest, alone=alone)
        self.channels.done()
        for payload in made:
            ready.take(self.latest.version)
            _count(payload, len(ready.ranks))
            if isinstance(weights, Round):
                weights.nbytes_sent = payload.nbytes_sent
        return outcome

    def _close_sent(
        self, payload: Payload, arrivals: Arrivals, before: Latest, *, alone: bool
    ) -> None:
        """Do the work of `_close` for calls that brought weights; note which ranks have them."""
        refused: Mapping[int, Exception] = {}
        if arrivals.failed:
            refused = raised(arrivals.failed) if alone else _refusals(arrivals)
        took = _took(arrivals, refused)
        may_have_taken = took or arrivals.arrived  # after an interrupt, not all were read
        is_refused = (
            refused and not may_have_taken and arrivals.unanswered.keys() <= {*arrivals.late}
        )
        is_sent = bool(arrivals.answers or arrivals.were_interrupted) and not is_refused
        if not is_sent:
            self.latest = before
        # If no method gave a result, the calls may not have begun, because an argument was missing.
        # If one did, they began, or the next call finds the rank stale.
        has_begun = is_sent and (arrivals.arrived or arrivals.quarantined)
        self._close(arrivals, took if has_begun else ())
        if is_sent and refused:
            self._leave_out(refused)
        torn = [rank for rank, error in refused.items() if not has_left_weights(error)]
        for rank in torn:
            self.ranks.records[rank].mark_stale()  # it may have set some of them
        if torn or arrivals.unanswered:
            self._start.was_sent = True
        _count_sent(payload, arrivals, took)

    def why_no_agents(self, ranks: Iterable[int], spec: RoundSpec) -> str | None:
        """Return why an average is made without agents; empty if all ranks are on this node."""
        if not [rank for rank in ranks if self.ranks.records[rank].worker.far_node]:
            return ""
        if spec.rule is not None:
            return "a rule needs all results in one place"
        if callable(spec.weights):
            try:
                ray.cloudpickle.dumps(spec.weights)
            except Exception as error:
                return f"the function of weights cannot be sent: {type(error).__name__}"
        backoff = self.channels.backoff
        return self.agents.why_not() if backoff.is_over or not backoff.reason else backoff.reason

    def offer(self) -> None:
        """Offer a free segment, if there is one, to the next average, as large as the last."""
        self.channels.offer(self._nbytes)

    def complete(
        self, result: Round, ranks: Iterable[int], why_no_agents: str | None, *, is_kept: bool
    ) -> None:
        """Note in an average how ranks were reached, and which joined and left; note its size.

        Args:
            result: The average.
            ranks: The ranks that were called.
            why_no_agents: The reason for which no agents reached them; None if agents did.
            is_kept: Whether this process chose the memory of the average.
        """
        transports: dict[int, str] = {}
        for rank in ranks:
            worker = self.ranks.records[rank].worker
            is_far = why_no_agents and worker.far_node
            transports[rank] = f"store: {why_no_agents}" if is_far else worker.transport
        transports.update(result.transports)
        result.transports = transports
        result.joined, result.left = self.ranks.news
        if result.used:
            self.agents.nbytes = result.nbytes // len(result.used)
        weights = result.weights
        array = weights.buffer if type(weights) is FlatWeights else weights
        if is_kept and isinstance(array, np.ndarray):
            self._nbytes = array.nbytes

    def mark_stale(self) -> None:
        """Send all workers the latest weights again before their next call."""
        for record in self.ranks.records.values():
            record.mark_stale()

    def publish(self, weights: Any, *, in_segment: bool = True) -> None:
        """Make a copy of ``weights`` the latest; workers get them with a later call.

        Another thread may be in a loop of `as_completed`, but not if the copy is ``in_segment``.
        """
        copy_of = functools.partial(self.channels.copy_of, in_segment=in_segment)
        before, weights = self.latest, self._start.publication(weights, self.latest)
        self.latest = before.published(weights, self._next_stamp(), copy_of)
        self._start.note_published(before, self.latest)

    def call_on_latest(
        self, rank: int, method: str | None, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Call, Latest]:
        """Return a call for one worker, and the latest weights, which it brings, if there are any.

        A worker that took them before may have trained since. Another thread may `publish`
        meanwhile.
        """
        latest, payload = self.latest, None
        if latest.version is not None:
            payload = latest.in_full()
            assert payload is not None
            self._prepare([rank], payload)
        self.ranks.records[rank].mark_stale()  # it may refuse them half-way
        head = self._next_stamp(), latest.version, None
        return Call(head, method, args, kwargs, payload), latest

    def take_back(self, seconds: float, timeout: float | None) -> list[int]:
        """Bring back unhealthy ranks that can be reached; return these ranks.

        Before that, it waits for answers that healthy ranks owe, which may show them to be lost.

        A dead rank, which Ray may be restarting, is asked by a call that later rounds look at: its
        answer may take seconds.

        Args:
            seconds: The longest wait for ranks that are alive.
            timeout: Seconds to wait for answers that are owed.
        """
        if self.ranks.over:
            return []
        self.ranks.check_open()
        self._await_owed(timeout)
        unhealthy = self.ranks.unhealthy()
        if not unhealthy:
            return []
        dead = [
            rank for rank, why in unhealthy.items() if isinstance(why, ray.exceptions.RayActorError)
        ]
        alive = [rank for rank in unhealthy if rank not in dead]
        back = self.restore(deadline_in(seconds), alive, patient=False) if alive else []
        return [*back, *self._probe(dead)]

    def _probe(self, ranks: Sequence[int]) -> list[int]:
        """Ask dead ranks to take the latest weights; return those that have."""
        self.ranks.check_open()
        now, sent, back = _clock.now(), list[PendingResult](), list[int]()
        records = [self.ranks.records[rank] for rank in ranks]
        for record in records:
            if record.in_flight is not None and not record.is_probed:  # from before its death
                self._drop_in_flight([record.worker.rank], 0.0)
            if record.in_flight is None and record.next_probe <= now:
                sent.append(self.probe(record.worker.rank)[0])
        self.channels.done()  # maybe no round follows, which would forget the command
        if sent:
            wait_any(sent, now + _MOMENT, len(sent))
        for record in records:
            if (
                record.in_flight is not None
                and wait_any([record.in_flight], now)
                and record.end_probe()
            ):
                back.append(record.worker.rank)
        return self.mark_healthy(back)

    def probe(self, rank: int) -> tuple[PendingResult, Call, Latest]:
        """Ask a worker that was lost to take the latest weights; see `WorkerRecord.end_probe`."""
        record = self.ranks.records[rank]
        call, latest = self.call_on_latest(rank, None, (), {})
        answer = self._ping(record) if self._may_have_any else record.worker.call(call)
        return record.probe(answer, call.head[1]), call, latest

    def restore(
        self, deadline: Deadline, ranks: Iterable[int] | None = None, *, patient: bool = True
    ) -> list[int]:
        """Send unhealthy ranks the latest weights; return the ranks that have them.

        Args:
            deadline: The time at which to stop.
            ranks: The ranks; all that are unhealthy, if None.
            patient: Whether to wait for answers in flight, and for actors that Ray restarts,
                instead of asking each rank once.
        """
        if self.ranks.over:
            return []
        self.ranks.check_open()
        asked = [*self.ranks.unhealthy(ranks)]
        self._drop_in_flight(asked, 0.0)
        return self.mark_healthy(sorted(self._send_latest(asked, deadline, patient=patient)))

    def mark_healthy(self, ranks: list[int]) -> list[int]:
        """Count ``ranks`` as healthy, and return them."""
        for rank in ranks:
            self.ranks.records[rank].readmit()
            _log.warning("rank %d is back", rank)
        return ranks

    def shut_down(self) -> None:
        """End all workers; none is called any more. A call that runs notices it.

        In a fork of the process, it does nothing.
        """
        if self.ranks.over not in ("", SHUT_DOWN) or self._is_closed:
            return
        self.ranks.over = SHUT_DOWN
        self.ranks.end_all()
        self.agents.shut_down()

    def close(self) -> None:
        """Release the memory, after `shut_down`, once no call runs."""
        if self.ranks.over == SHUT_DOWN:
            self.forget_ready()
            self.channels.close()
            self.latest = Latest(platform=self.platform)
            self._is_closed = True

    def _next_stamp(self) -> Stamp:
        return self._name, next(self._counts)

    @property
    def _may_have_any(self) -> bool:
        """Whether it does not matter what workers have: the first call brings initial weights."""
        return self.latest.version is None and self._start.initial is not None

    def _ping(self, record: WorkerRecord) -> RayResult:
        return RayResult(record.worker.handle.ping.remote(), self.platform)

    def _complete_published(self, timeout: float | None) -> None:
        """Complete weights that were published before the first call, and may be a subset."""
        start = self._start
        if self.latest is start.published and self.ranks.healthy():
            if start.initial is None:
                self._learn_names(timeout)
                start.published = None
                return
            published = self.latest.model()
            whole = self._first_weights(published, timeout)
            start.published = start.initial = None
            if whole is not published:
                self.publish(whole)

    def _first_weights(self, weights: Any, timeout: float | None) -> Any:
        """Return the first weights to send, if the call sends ``weights``; see `GroupStart`."""
        lowest = functools.partial(self._weights_of_lowest, timeout)
        return self._start.weights_with(weights, self.latest, lowest, timeout)

    def _learn_names(self, timeout: float | None) -> None:
        """Ask the lowest healthy rank for the names of all weights, if it can give its weights."""
        with contextlib.suppress(WorkerError):
            self.latest.learn(self._weights_of_lowest(timeout))

    def _weights_of_lowest(self, timeout: float | None) -> Any:
        """Return a copy of the weights of the lowest healthy rank; note lost ranks.

        Raises:
            WorkerError: If that rank raises, or no rank is left.
        """
        for rank in self.ranks.healthy():
            # Without a version: an actor that was restarted before the start is as good as any
            # other.
            arrivals = Arrivals(deadline_in(timeout))
            record = self.ranks.records[rank]
            answer = RayResult(record.worker.handle.get_weights.remote(), self.platform)
            record.track(answer)
            arrivals.expect({rank: answer})
            try:
                values = copied(arrivals.collect())
            finally:
                self._close(arrivals)
            if values:
                return frozen(values[rank])
            if record.why is None:
                error = arrivals.failed[rank]
                asked = "get_weights, which all workers start from unless initial= is given"
                raise WorkerError({rank: RuntimeError(f"{asked}: {reason_of(error)}")}) from error
        raise WorkerError(self.ranks.unhealthy())

    def _await_owed(self, timeout: float | None) -> None:
        if [r for r in self.ranks.records.values() if r.in_flight is not None and r.why is None]:
            self._await_in_flight(deadline_in(timeout))

    def _await_in_flight(self, deadline: Deadline) -> None:
        """Wait for the answers that healthy ranks owe to broken-off calls."""
        late = self._drop_in_flight(self.ranks.healthy(), deadline.end)
        self.ranks.note_lost(dict.fromkeys(late, late_error(deadline.timeout)))

    def _drop_in_flight(self, ranks: Iterable[int], end: float | None) -> list[int]:
        """Drop answers in flight as they arrive; return those of ``ranks`` that still owe one.

        Nobody else learns of healthy ranks that have died or are stale, so they are noted.
        """
        owing = {
            in_flight: rank
            for rank in ranks
            if (in_flight := self.ranks.records[rank].in_flight) is not None
        }
        while owing and (there := wait_any(owing, end)):
            for answer in there:
                rank = owing.pop(answer)
                record = self.ranks.records[rank]
                error = error_in(answer) if record.why is None else None
                record.drop_in_flight()
                if error is not None and (is_stale(error) or isinstance(error, DEAD)):
                    self.ranks.note_lost({rank: error})
        return list(owing.values())

    def _close(self, arrivals: Arrivals, took: Collection[int] = ()) -> None:
        """Note the failed, late and missing answers of a round that is over or was broken off.

        Args:
            arrivals: The answers.
            took: The ranks that have the latest weights.
        """
        self.channels.done()
        unanswered, late, version = arrivals.unanswered, arrivals.late, self.latest.version
        for rank, answer in arrivals.answers.items():
            self.ranks.records[rank].complete(
                answer,
                is_there=rank not in unanswered,
                is_late=rank in late,
                version=version if rank in took else None,
            )
        arrivals.release()
        if arrivals.failed or late:
            self.ranks.note_lost(arrivals.errors)
            self.forget_ready()

    def _leave_out(self, failed: Mapping[int, Exception]) -> None:
        """Count all ``failed`` ranks as unhealthy."""
        for rank, error in failed.items():
            self.ranks.records[rank].leave_out(error)

    def _make_latest(self, weights: Any, ranks: Iterable[int] | None) -> Payload:
        """Make ``weights`` ready for ``ranks``, or for any; from then on they are the latest.

        An error before that changes nothing.
        """
        begin = _clock.now()
        latest = self.latest.after(weights, self._next_stamp())
        assert latest.payload is not None
        if ranks is not None and latest.payload.exchanged is not None:
            ranks = [rank for rank in ranks if not self._is_with_agent(rank, latest.payload)]
        self._prepare(ranks, latest.payload)
        note_seconds(weights, "put", _clock.now() - begin)
        self.latest = latest
        reach("sending")
        return latest.payload

    def _prepare(self, ranks: Iterable[int] | None, payload: Payload) -> None:
        """Bring ``payload`` within reach of the workers of ``ranks``; if that is None, of any.

        Raises:
            StoreTooSmallError: If the object store has no room for it.
        """
        try:
            if ranks is None:
                argument_of(payload)  # the caller's weights may change until they are sent
            else:
                for rank in ranks:
                    self.ranks.records[rank].worker.prepare(payload)
        except FULL as error:
            raise too_small(len(self.ranks), nbytes_of(payload.value)) from error

    def _is_with_agent(self, rank: int, payload: Payload) -> bool:
        """Whether the agent of a worker's node has the weights of ``payload``."""
        agent = self.agents.of(self.ranks.records[rank].worker)
        return agent is not None and agent.has(payload.exchanged)

    def _send_to_unhealthy(self, weights: Any, deadline: Deadline) -> list[int]:
        """Send ``weights`` to all ranks, none of which is healthy; return the ranks that took them.

        Raises:
            WorkerError: If none took them. Then nothing was sent, unless some ranks are late.
        """
        before, took = self.latest, list[int]()
        try:
            self._make_latest(weights, None)
            took = self.restore(deadline, patient=False)
        finally:
            if not took and not any(record.in_flight for record in self.ranks.records.values()):
                # Some may have set a half of them.
                self._start.was_sent = self._start.was_sent or self.latest is not before
                self.latest = before
        if not took:
            raise WorkerError(self.ranks.unhealthy())
        sent = self.latest.in_full()
        if isinstance(weights, Round) and sent is not None:
            weights.nbytes_sent = sent.nbytes_sent
        return took

    def _send_latest(
        self, ranks: Sequence[int], deadline: Deadline, *, patient: bool = False
    ) -> set[int]:
        """Send the latest weights to ``ranks``; return the ranks that have them.

        If no weights were sent yet, these ranks only report whether they were restarted; or, if
        there are weights that all start from, whether they are alive. Ranks that fail are
        unhealthy.

        Args:
            ranks: The ranks. A rank that owes an answer is not asked, unless ``patient``.
            deadline: The time at which to stop.
            patient: Whether to wait for answers in flight, and for actors that Ray restarts.
        """
        payload = None if self.latest.version is None else self.latest.in_full()
        arrivals = Arrivals(deadline)

        def ask(ranks: Sequence[int]) -> None:
            if self._may_have_any:
                for rank in ranks:
                    answer = self._ping(self.ranks.records[rank])
                    self.ranks.records[rank].track(answer)
                    arrivals.expect({rank: answer})
                return
            if payload is not None:
                self._prepare(ranks, payload)
            self.send_out(self.call(payload=payload), arrivals, ranks)

        def to_be_asked(came: Sequence[int]) -> list[int]:
            asked = [rank for rank in came if owing.pop(rank, None) is not None]
            for rank in asked:
                self.ranks.records[rank].drop_in_flight()
                arrivals.arrived.discard(rank)
            answered = [rank for rank in came if rank not in asked]
            for rank in answered:
                arrivals.result(rank)
            restarting = [r for r in answered if is_restarting(arrivals.failed.get(r))]
            is_over = deadline.end is not None and _clock.now() + _PAUSE > deadline.end
            if patient and restarting and not is_over:
                _clock.sleep(_PAUSE)
                for rank in restarting:
                    del arrivals.failed[rank]
                asked += restarting
            return asked

        owing = {
            rank: in_flight for rank in ranks if (in_flight := self.ranks.records[rank].in_flight)
        }
        try:
            if patient:
                arrivals.expect(owing)
            ask([rank for rank in ranks if rank not in owing])
            while (came := arrivals.wait()) is not None:
                ask(to_be_asked(came))
        finally:
            self._close(arrivals)
            self._leave_out(arrivals.failed)
            if payload is not None:
                for rank in arrivals.given:
                    self.ranks.records[rank].take(self.latest.version)
                _count_sent(payload, arrivals, arrivals.given)
        return arrivals.given


def note_seconds(weights: Any, step: str, seconds: float) -> None:
    """Note the seconds of a step of sending ``weights``, in the metrics and in a round."""
    METRICS.add(seconds={step: seconds})
    if isinstance(weights, Round):
        weights.seconds[step] = seconds


def _count_sent(payload: Payload, arrivals: Arrivals, took: Collection[int]) -> None:
    """Count the bytes of a ``payload`` that were sent to the ranks that took it.

    A command of an agent brings them once, unless the agent has them.
    """
    count, answers = len(took), arrivals.answers
    commands = [answer.call for rank in took if type(answer := answers[rank]) is NodeAnswer]
    if commands:
        count += len({command for command in commands if not command.exchange}) - len(commands)
    _count(payload, count)


def _count(payload: Payload, times: int) -> None:
    """Count the bytes of a ``payload`` that were sent so many times."""
    nbytes = times * payload.nbytes
    METRICS.add({SENT: nbytes})
    payload.nbytes_sent += nbytes


def _refusals(arrivals: Arrivals) -> dict[int, Exception]:
    """Return the errors of ranks that could not set the weights that a call brought."""
    return {rank: error for rank, error in arrivals.failed.items() if is_refusal(error)}


def _took(arrivals: Arrivals, refused: Mapping[int, Exception]) -> set[int]:
    """Return the ranks that have answered a call with weights, and have not refused these."""
    if not arrivals.failed:
        return arrivals.given
    return arrivals.given | raised(arrivals.failed).keys() - refused.keys()
