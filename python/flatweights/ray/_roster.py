"""The workers of a group, one record for each, and the weights that they should have.

`Roster` holds everything that a `WorkerGroup` knows between two calls:

- The latest weights have a version, the stamp of their message. They are replaced as a whole,
  before a worker is sent them. If all workers refuse them, the ones before are the latest again.
- The record of a worker has the version that it is known to have. A healthy worker that may lack
  the latest (its call raised, was broken off, or never went out) is sent them before its next call.
- A worker that died, is late, stale, or has refused weights that others took, is unhealthy. It is
  not called until it has taken the latest weights.
- A worker that owes an answer is sent nothing before it has answered: that could change the
  weights that it works on.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import ray

from flatweights._weights import FlatWeights
from flatweights.ray._calls import BY_VALUE, Answer, Call, Payload, Stamp, Worker, wait_any
from flatweights.ray._engine import Arrivals, Deadline
from flatweights.ray._errors import WorkerError, is_lost, is_refusal, late_error, reason_of
from flatweights.ray._failpoints import reach
from flatweights.ray._report import METRICS
from flatweights.ray._round import Round, ShardedRound, ShardedWeights
from flatweights.ray._store import put
from flatweights.ray._wire import GroupWire, Travels, nbytes_of
from flatweights.ray.lanes._calls import GroupLanes, NearWorker

_log = logging.getLogger("flatweights")


@dataclass
class Record:
    """The state of one worker.

    Attributes:
        worker: The driver's end of it.
        why: Why it is not called; None while it is healthy.
        owed: The answer that it still owes to a call that was broken off, or was late.
        version: The stamp of the last weights that it is known to have taken.
    """

    worker: Worker
    why: Exception | None = None
    owed: Answer | None = None
    version: Stamp | None = None


class Latest(NamedTuple):
    """The weights that workers should have.

    Attributes:
        version: Their stamp; None before the first are sent.
        payload: The weights as they were sent.
        wire: The wire after them, if there is one.
        full: The same weights for workers that missed earlier ones; None until needed, or if
            ``payload`` serves.
    """

    version: Stamp | None = None
    payload: Payload | None = None
    wire: GroupWire | None = None
    full: Payload | None = None


class Roster:
    """The records of the workers, by rank, and the latest weights.

    Attributes:
        latest: The weights that workers should have.
        lanes: Those to workers on this machine.
    """

    def __init__(self, handles: Sequence[Any], wire: GroupWire | None) -> None:
        """Take actors of `FlatWorker` classes; all count as healthy.

        Raises:
            ValueError: If there is none, or one is given twice.
            TypeError: If one is not an actor of a `FlatWorker` class.
        """
        actors = list(handles)
        if not actors:
            raise ValueError("expected at least one actor, got none")
        ranks: dict[Any, int] = {}
        for rank, actor in enumerate(actors):
            if not isinstance(actor, ray.actor.ActorHandle) or not hasattr(actor, "call_version"):
                raise TypeError(
                    f"rank {rank}: expected an actor of a FlatWorker class, "
                    f"got {type(actor).__name__}"
                )
            first = ranks.setdefault(actor._actor_id, rank)
            if first != rank:
                raise ValueError(f"rank {rank}: expected another actor than that of rank {first}")
        self.lanes = GroupLanes(len(actors))
        self.latest = Latest(wire=wire)
        self._records = [
            Record(NearWorker(actor, rank, self.lanes)) for rank, actor in enumerate(actors)
        ]
        self._is_shut_down = False
        self._begin_to_count()

    def _begin_to_count(self) -> None:
        self._name, self._count = secrets.token_hex(8), 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Count as another group: two processes would give the same stamps."""
        self.__dict__.update(state)
        self._begin_to_count()

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, rank: int) -> Record:
        return self._records[rank]

    def healthy(self) -> list[int]:
        """Return the ranks that are called."""
        return [rank for rank, record in enumerate(self._records) if record.why is None]

    def unhealthy(self) -> dict[int, Exception]:
        """Return, by rank, why workers are not called."""
        whys = enumerate(record.why for record in self._records)
        return {rank: why for rank, why in whys if why is not None}

    def begin(self, weights: Any, timeout: float | None) -> tuple[list[int], Any]:
        """Return the ranks to call, and the weights that these calls are to bring.

        Waits for answers that healthy ranks owe to broken-off calls. If the calls bring no
        weights, ranks that may lack the latest are sent them. If no rank is healthy, ``weights``
        are sent at once to those that can be reached: these ranks are returned, and None.

        Args:
            weights: The weights to bring; None for those that the workers have.
            timeout: Seconds for each of these steps: a late rank may take all of them, and the
                others are not late.

        Raises:
            WorkerError: If no rank is healthy, and none took the weights.
        """
        self._settle(Deadline.after(timeout))
        if weights is None:
            version = self.latest.version
            lacking = [k for k in self.healthy() if self._records[k].version != version]
            if version is not None and lacking:
                self._leave_out(self._send_in_full(lacking, Deadline.after(timeout)).failed)
        elif not self.healthy():
            return self._send_to_unhealthy(weights, Deadline.after(timeout)), None
        return self.healthy(), weights

    def call(
        self,
        method: str | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] = {},
        payload: Payload | None = None,
        travels: Travels | None = None,
    ) -> Call:
        """Return the next call, on the latest weights, which ``payload`` brings if it is given.

        Args:
            method: See `Call`.
            args: See `Call`.
            kwargs: See `Call`.
            payload: See `Call`.
            travels: What the result is, if it is to be encoded.
        """
        wire = self.latest.wire
        encoding = None if travels is None or wire is None else (wire.wire_dtype, travels)
        head = self._next_stamp(), self.latest.version, encoding
        return Call(head, method, args, kwargs, payload)

    def send_out(self, call: Call, arrivals: Arrivals, ranks: Iterable[int]) -> None:
        """Call ``ranks``; their answers are to arrive in ``arrivals``."""
        for rank in ranks:
            arrivals.expect(rank, self._records[rank].worker.call(call))

    @contextlib.contextmanager
    def bringing(
        self, weights: Any, ranks: Sequence[int], arrivals: Arrivals, *, alone: bool = False
    ) -> Iterator[Payload | None]:
        """Run a round whose calls carry ``weights``, unless they are None; then note who has them.

        Where all ranks refused them, or no call could be made, nothing was sent. Otherwise they
        are the latest, and ranks that refused are unhealthy.

        Args:
            weights: The weights.
            ranks: The ranks that are called.
            arrivals: Their answers.
            alone: Whether the calls run no method, so that all errors are about the weights.
        """
        before, payload = self.latest, None
        try:
            if weights is not None and ranks:
                payload = self._make_latest(weights, ranks)
            yield payload
        except WorkerError as error:
            # It was raised at the first refusal. Read on until it is known whether all refuse.
            while (refused := _refusals(arrivals)) and not _took(arrivals, refused):
                if (came := arrivals.wait()) is None:
                    break
                for rank in came:
                    arrivals.take(rank)
            raise WorkerError(error.failed | refused) from error.__cause__
        finally:
            # Also if something other than a rank's failure has broken the round off.
            self._close(arrivals)
            if payload is not None:
                refused = _raised(arrivals.failed) if alone else _refusals(arrivals)
                took = _took(arrivals, refused)
                is_over = arrivals.unanswered.keys() <= {*arrivals.late}
                if not arrivals.answers or (refused and not took and is_over):
                    self.latest = before
                else:
                    self._leave_out(refused)
                    # If no method gave a result, the calls may not have begun, for lack of an
                    # argument. If one did, they began, or the next call finds the rank stale.
                    self._note_taken(took if arrivals.arrived or arrivals.quarantined else ())
                METRICS.count_sent(len(took) * payload.nbytes)
                if isinstance(weights, Round):
                    weights.nbytes_sent = len(took) * payload.nbytes

    def distrust(self) -> None:
        """Have all workers sent the latest weights again before their next call."""
        for record in self._records:
            record.version = None

    def probe(self, deadline: Deadline) -> list[int]:
        """Send unhealthy ranks the latest weights; return those that have them.

        Ranks that owe an answer are not asked. None are once the actors were ended.
        """
        if self._is_shut_down:
            return []
        unhealthy = self.unhealthy()
        self._drop_owed(unhealthy, 0.0)
        asked = [rank for rank in unhealthy if self._records[rank].owed is None]
        arrivals = self._send_in_full(asked, deadline)
        self._leave_out(arrivals.failed)
        for rank in sorted(arrivals.arrived):
            self._records[rank].why = None
            _log.warning("rank %d is back", rank)
        return sorted(arrivals.arrived)

    def shut_down(self) -> None:
        """End all; none is called any more."""
        for record in self._records:
            record.worker.end()
            record.owed = None
            record.why = RuntimeError("the group was shut down")
        self._is_shut_down = True
        self.latest = Latest()

    def _next_stamp(self) -> Stamp:
        self._count += 1
        return self._name, self._count

    def _settle(self, deadline: Deadline) -> None:
        """Wait for the answers that healthy ranks owe to calls that were broken off."""
        late = self._drop_owed(self.healthy(), deadline.end)
        self._note_lost(dict.fromkeys(late, late_error(deadline.timeout)))

    def _drop_owed(self, ranks: Iterable[int], end: float | None) -> list[int]:
        """Drop the answers that ``ranks`` owe as they come; return the ranks that still owe one."""
        owing = {owed: rank for rank in ranks if (owed := self._records[rank].owed) is not None}
        while owing and (there := wait_any(owing, end)):
            for answer in there:
                answer.let_go()
                self._records[owing.pop(answer)].owed = None
        return list(owing.values())

    def _close(self, arrivals: Arrivals) -> None:
        """Note the failed, late and missing answers of a round that is over, or was broken off."""
        self.lanes.done()
        for rank, answer in arrivals.unanswered.items():
            rest = answer if rank in arrivals.late else answer.abandon()
            if rest is not None:
                self._records[rank].owed = rest
        arrivals.let_go()
        self._note_lost(arrivals.failed)
        self._note_lost(dict.fromkeys(arrivals.late, late_error(arrivals.deadline.timeout)))

    def _note_lost(self, failed: Mapping[int, Exception]) -> None:
        """Count those of the ``failed`` ranks as unhealthy whose worker is lost."""
        for rank, error in failed.items():
            if is_lost(error):
                if self._records[rank].why is None:
                    _log.warning("rank %d is left out: %s", rank, reason_of(error))
                self._records[rank].why = error

    def _leave_out(self, failed: Mapping[int, Exception]) -> None:
        """Count all ``failed`` ranks as unhealthy."""
        for rank, error in failed.items():
            self._records[rank].why = error

    def _note_taken(self, ranks: Iterable[int]) -> None:
        """Note that ``ranks`` have the latest weights."""
        for rank in ranks:
            self._records[rank].version = self.latest.version

    def _make_latest(self, weights: Any, ranks: Iterable[int]) -> Payload:
        """Make ``weights`` ready for ``ranks``; from then on they are the latest.

        An error before that changes nothing.
        """
        begin = time.monotonic()
        payload, wire = self._to_send(weights)
        for rank in ranks:
            self._records[rank].worker.prepare(payload)
        note_seconds(weights, "put", time.monotonic() - begin)
        self.latest = Latest(self._next_stamp(), payload, wire)
        reach("sending")
        return payload

    def _to_send(self, weights: Any) -> tuple[Payload, GroupWire | None]:
        """Return the payload for ``weights``, and the wire once it is sent."""
        value, wire = weights, self.latest.wire
        if isinstance(weights, ShardedRound) and wire is None and not weights.is_changed:
            value = weights.shards
        elif isinstance(weights, Round):
            value = weights.weights
        if wire is not None:
            model = ray.get(value) if isinstance(value, ray.ObjectRef) else value
            message, wire = wire.message(model)
            return self._payload(message), wire
        if isinstance(value, FlatWeights) and value.buffer.nbytes <= BY_VALUE:
            # The caller's may change before a restart wants it.
            value = value.copy() if value.buffer.flags.writeable else value
        payload = self._payload(value)
        if isinstance(weights, Round) and not isinstance(value, ShardedWeights):
            payload.put = weights.current_ref
        return payload, None

    def _payload(self, value: Any) -> Payload:
        """Return ``value`` as a payload."""
        is_sharded = isinstance(value, ShardedWeights)
        nbytes = value.layout.nbytes if is_sharded else nbytes_of(value) or 0
        ranks = len(self)  # not the roster: a cycle would keep its actors
        return Payload(value, nbytes, lambda: put(value, ranks))

    def _send_to_unhealthy(self, weights: Any, deadline: Deadline) -> list[int]:
        """Send ``weights`` to all ranks, none of which is healthy; return those that took them.

        Raises:
            WorkerError: If none did; unless some are late, nothing was sent then.
        """
        before, took = self.latest, list[int]()
        try:
            self._make_latest(weights, ())
            took = self.probe(deadline)
        finally:
            if not took and not any(record.owed for record in self._records):
                self.latest = before
        if not took:
            raise WorkerError(self.unhealthy())
        if isinstance(weights, Round):
            sent = self.latest.full or self.latest.payload
            assert sent is not None
            weights.nbytes_sent = len(took) * sent.nbytes
        return took

    def _send_in_full(self, ranks: Iterable[int], deadline: Deadline) -> Arrivals:
        """Send the latest weights to ``ranks``, which may have missed earlier ones.

        If none were sent yet, these ranks only say whether they were restarted.
        """
        latest = self.latest
        if latest.wire is not None and latest.wire.has_sent and latest.full is None:
            self.latest = latest = latest._replace(full=self._payload(latest.wire.snapshot()))
        payload = latest.full or latest.payload
        arrivals = Arrivals(deadline)
        try:
            if payload is not None:
                for rank in ranks:
                    self._records[rank].worker.prepare(payload)
            self.send_out(self.call(payload=payload), arrivals, ranks)
            arrivals.collect()
        finally:
            self._close(arrivals)
            if payload is not None:
                self._note_taken(arrivals.arrived)
                METRICS.count_sent(len(arrivals.arrived) * payload.nbytes)
        return arrivals


def note_seconds(weights: Any, step: str, seconds: float) -> None:
    """Note how long a step of sending ``weights`` took: in the metrics, and in a round."""
    METRICS.observe({step: seconds})
    if isinstance(weights, Round):
        weights.seconds[step] = seconds


def _raised(failed: Mapping[int, Exception]) -> dict[int, Exception]:
    """Return those of the errors that methods raised."""
    return {rank: error for rank, error in failed.items() if not is_lost(error)}


def _refusals(arrivals: Arrivals) -> dict[int, Exception]:
    """Return the errors of ranks that could not set the weights that a call brought."""
    return {rank: error for rank, error in arrivals.failed.items() if is_refusal(error)}


def _took(arrivals: Arrivals, refused: Mapping[int, Exception]) -> set[int]:
    """Return the ranks that have answered a call that brought weights, and have not refused."""
    return arrivals.arrived | _raised(arrivals.failed).keys() - refused.keys()
