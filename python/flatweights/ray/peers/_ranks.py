"""The records of a group's workers, by rank; workers are added and removed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

from flatweights._forks import in_forks
from flatweights._numbers import as_integer
from flatweights.ray import _clock
from flatweights.ray.peers._by_channel import GroupChannels, Worker
from flatweights.ray.peers._platform import PLATFORM, GroupPlatform
from flatweights.ray.peers._store import RayResult
from flatweights.ray.peers._transport import Call, PendingResult, Stamp
from flatweights.ray.peers._wait import wait_any
from flatweights.ray.support._errors import (
    SHUT_DOWN,
    is_lost,
    is_restarting,
    reason_in_a_line,
)

_PAUSE, _MOST_PAUSE = 0.05, 1.0  # seconds until it asks a worker again whether it is back

_log = logging.getLogger("flatweights")


@dataclass(eq=False)
class WorkerRecord:
    """The state of one worker.

    Attributes:
        worker: The driver's end of the worker.
        why: The reason for which it is not called; None while it is healthy.
        in_flight: The answer that it owes, from the call until it is complete.
        version: The stamp of the last weights that it has taken, as far as is known.
        is_new: Whether it was added, and has not taken weights of the group yet.
        has_left: Whether it was removed from the group.
        kept: A function of the loops that wait for the answer in flight, too: called once, before
            the answer is dropped or waited for anew. Its argument is whether the answer has
            arrived, so that they can keep a copy of the value.
        is_busy: Whether it may be in a call that was broken off, although it owes no answer.
        next_probe: While it is unhealthy, the time from which it is asked again whether it is back.
    """

    worker: Worker
    why: Exception | None = None
    in_flight: PendingResult | None = None
    version: Stamp | None = None
    is_new: bool = False
    has_left: bool = False
    kept: Callable[[bool], None] | None = None
    is_busy: bool = False
    next_probe: float = 0.0
    _pause: float = 0.0  # seconds before that
    # The answer to `probe`, and the version of the weights that it sent.
    _probe: tuple[PendingResult, Stamp | None] | None = None

    def send(self, call: Call) -> PendingResult:
        """Make a call; the worker owes the answer from then on."""
        self.in_flight = answer = self.worker.call(call)
        self.kept = None
        return answer

    def track(self, answer: PendingResult) -> None:
        """Note the answer to a call that was not made by `send`."""
        self.in_flight, self.kept = answer, None

    def complete(
        self,
        answer: PendingResult,
        *,
        is_there: bool = True,
        is_late: bool = False,
        version: Stamp | None = None,
    ) -> None:
        """Note the outcome of a call.

        Args:
            answer: The answer. If the worker owes another one, nothing is noted.
            is_there: Whether it has arrived. If not, nobody waits for it any more, and nothing is
                sent to the worker before it has answered.
            is_late: Whether its time was up.
            version: The stamp of the weights that the worker has taken with the call.
        """
        if self.in_flight is not answer:
            return
        if self.kept is not None:
            self._notify(is_there)
        if is_there:
            self.in_flight = None
        else:
            self.in_flight = answer.overdue() if is_late else answer.abandon()
            self.is_busy = self.is_busy or self.in_flight is None
            if self.has_left:
                self._owe_until_free()
        if version is not None:
            self.version, self.is_new = version, False

    def take(self, version: Stamp | None) -> None:
        """Note that the worker has the weights of ``version``."""
        self.version, self.is_new = version, False

    def mark_stale(self) -> None:
        """Note that the worker may have other weights than it has taken."""
        self.version = None

    def leave_out(self, why: Exception) -> None:
        """Count the worker as unhealthy: it is not called until `readmit`."""
        self.why = why

    def readmit(self) -> None:
        """Count the worker as healthy again."""
        self.why = None
        self.next_probe = self._pause = 0.0

    def probe(self, answer: PendingResult, version: Stamp | None) -> PendingResult:
        """Note the answer to a call that asks an unhealthy worker to take weights."""
        self.track(answer)
        self._probe = answer, version
        return answer

    @property
    def is_probed(self) -> bool:
        """Whether the worker owes the answer to `probe`."""
        return self._probe is not None and self.in_flight is self._probe[0]

    def end_probe(self) -> bool:
        """Read the answer to `probe`, which has arrived; return whether the worker is back."""
        assert self._probe is not None
        answer, version = self._probe
        try:
            answer.result()  # after an interrupt, it is taken again
        except Exception as error:
            self.complete(answer)
            self.leave_out(error.with_traceback(None))
            self.back_off()
            is_back = False
        else:
            self.complete(answer, version=version)
            is_back = True
        self._probe = None
        answer.release()
        return is_back

    def back_off(self) -> None:
        """Ask the worker, which is not back, only after a pause, ever longer if it is dead."""
        is_dead = not is_restarting(self.why)
        self._pause = min(max(2 * self._pause, _PAUSE), _MOST_PAUSE) if is_dead else _PAUSE
        self.next_probe = _clock.now() + self._pause

    def _notify(self, is_there: bool) -> None:
        kept, self.kept = self.kept, None
        if kept is not None:
            kept(is_there)

    def end(self, why: Exception) -> None:
        """Note that the worker was ended, and owes nothing any more."""
        self.in_flight, self.why = None, why

    def leave(self) -> None:
        """Note that the worker was removed; it owes an answer as long as it may be in a call."""
        self._owe_until_free()
        self.has_left = True

    def _owe_until_free(self) -> None:
        """Owe an answer that comes after a call for which nobody waits, if it may be in one."""
        if self.in_flight is None and self.is_busy:
            self.track(RayResult(self.worker.handle.ping.remote(), self.worker.platform))

    def drop_in_flight(self) -> None:
        """Let go of an answer in flight that has arrived; if its value is needed, keep it first."""
        self._notify(True)
        in_flight, self.in_flight = self.in_flight, None
        if in_flight is not None:
            in_flight.release()


class Ranks:
    """The records of the workers, by rank.

    Attributes:
        platform: What the group uses of Ray and channels.
        channels: The channels to workers on this node.
        records: The records by rank, in order, of the workers that are ready.
        admitted: The ranks of workers that were added, in the order in which they were ready.
        over: The reason for which no worker can be called any more; empty while they can.
    """

    def __init__(
        self, handles: Iterable[ray.actor.ActorHandle], platform: GroupPlatform = PLATFORM
    ) -> None:
        """Take actors of `FlatWorker` classes; all count as healthy.

        Raises:
            ValueError: If there is none, or one is given twice.
            TypeError: If one is not an actor of a `FlatWorker` class.
        """
        self.records: dict[int, WorkerRecord] = {}
        self._joining: dict[int, tuple[WorkerRecord, ray.ObjectRef]] = {}  # a `ping` of its actor
        # They were removed, or are to be, and owe answers; whether to end them then.
        self._leaving: list[tuple[WorkerRecord, bool]] = []
        self.admitted: list[int] = []
        self._news: tuple[list[int], list[int]] = [], []  # the ranks that were added and removed
        self._span = 0
        self.over = ""
        actors = self._checked(handles)
        self.platform = platform
        self._session = platform.session()
        self.channels = GroupChannels(platform)
        self.records = {rank: self._record_of(actor) for rank, actor in enumerate(actors)}
        in_forks(self, Ranks._end_copy)

    def _end_copy(self) -> None:
        self.over = "this process is a fork of the group's: call the group where it was made"

    def _checked(self, handles: Iterable[ray.actor.ActorHandle]) -> list[ray.actor.ActorHandle]:
        """Return the actors, checked to be at least one, of a right class, and not in the group."""
        _refuse_class(handles)
        if not isinstance(handles, Iterable) or isinstance(handles, Mapping):
            hint = "; pass list(actors.values())" if isinstance(handles, Mapping) else ""
            got = type(handles).__name__
            raise TypeError(f"actors: expected a list of actors, got {got}{hint}")
        actors = list(handles)
        if not actors:
            raise ValueError("expected at least one actor, got none")
        there = self.every()
        ranks = {record.worker.handle._actor_id: rank for rank, record in there.items()}
        classes = {_class_of(record.worker.handle) for record in there.values()}
        for rank, actor in enumerate(actors, self._span):
            _refuse_class(actor)
            if not isinstance(actor, ray.actor.ActorHandle) or not hasattr(actor, "call_version"):
                is_actor = isinstance(actor, ray.actor.ActorHandle)
                got = f"one of {_class_of(actor)[1]}" if is_actor else type(actor).__name__
                raise TypeError(f"rank {rank}: expected an actor of a FlatWorker class, got {got}")
            if classes and _class_of(actor) not in classes:
                expected = " or ".join(sorted(name for _, name in classes))
                got = _class_of(actor)[1]
                raise TypeError(f"rank {rank}: expected an actor of {expected}, got one of {got}")
            first = ranks.setdefault(actor._actor_id, rank)
            if first != rank:
                raise ValueError(f"rank {rank}: expected another actor than that of rank {first}")
        return actors

    def _record_of(self, actor: ray.actor.ActorHandle) -> WorkerRecord:
        """Return a new record, with the next rank."""
        self._span += 1
        return WorkerRecord(Worker(actor, self._span - 1, self.channels))

    def every(self) -> dict[int, WorkerRecord]:
        """Return the records by rank, including workers that are being added."""
        return self.records | {rank: record for rank, (record, _) in self._joining.items()}

    @property
    def span(self) -> int:
        """The number of ranks that were ever assigned."""
        return self._span

    @property
    def joining(self) -> Sequence[int]:
        """The ranks of workers that were added, and are not ready yet."""
        return [*self._joining]

    def handles(self) -> dict[int, ray.actor.ActorHandle]:
        """Return the actors by rank."""
        return {rank: record.worker.handle for rank, record in sorted(self.every().items())}

    def add(self, handles: Iterable[ray.actor.ActorHandle]) -> list[int]:
        """Take more actors, which become workers once they are ready; return their ranks.

        Raises:
            TypeError: If one is not an actor of a class that the group has.
            ValueError: If one is in the group, or is given twice.
        """
        self.check_open()
        actors = self._checked(handles)
        records = [self._record_of(actor) for actor in actors]
        for record in records:
            record.is_new = True
            self._joining[record.worker.rank] = record, record.worker.handle.ping.remote()
        return [record.worker.rank for record in records]

    def check_open(self) -> None:
        """Raise `RuntimeError` if the group or Ray was shut down, or in a fork."""
        if self.over:
            raise RuntimeError(self.over)
        self.platform.check_connected(self._session)

    def admit(self) -> None:
        """Count added actors that are ready as workers.

        An actor that could not be built becomes an unhealthy worker.

        Raises:
            RuntimeError: If the group was shut down, or Ray was.
        """
        self.check_open()
        if self._leaving:
            self._reap()
        if not self._joining:
            return
        # Not by futures: an interrupt may leave the lock of one taken, and Ray's own thread, which
        # needs it for the result, would then handle no answer of this process any more.
        pings = [ping for _, ping in self._joining.values()]
        answered = {*self.platform.wait(pings, 0, len(pings))}
        for rank in [rank for rank, (_, ping) in self._joining.items() if ping in answered]:
            record, ping = self._joining[rank]
            self.records = dict(sorted({**self.records, rank: record}.items()))
            del self._joining[rank]
            self._news[0].append(rank)
            self.admitted.append(rank)
            try:
                self.platform.get(ping)
            except Exception as error:
                self.note_lost({rank: error})
                record.leave_out(record.why or error)
            else:
                _log.info("rank %d has joined", rank)

    def remove(self, ranks: Iterable[int] | int, *, kill: bool) -> list[int]:
        """Remove ``ranks`` from all later rounds; if ``kill``, end them once they owe no answer.

        Returns:
            The ranks, in order.

        Raises:
            TypeError: If one is not an integer.
            ValueError: If a rank is not in the group or is given twice, or no worker that is ready
                would be left.
            RuntimeError: If the group was shut down, or Ray was.
        """
        self.admit()
        there = self.every()
        checked = self._check_of(there, [ranks] if isinstance(ranks, (int, np.integer)) else ranks)
        if self.records.keys() <= {*checked}:
            raise ValueError("ranks: expected at least one worker that is ready to stay, got all")
        self._leaving += [(there[rank], kill) for rank in checked]
        self._reap()
        return checked

    def _reap(self) -> None:
        """Remove workers that are to leave, and part with those that owe no answer any more.

        What an interrupt breaks off, the next call does.
        """
        for one in [*self._leaving]:
            if self.over:  # a signal handler or another thread has shut the group down
                return
            record, kill = one
            rank = record.worker.rank
            if not record.has_left:
                self.records.pop(rank, None)
                self._joining.pop(rank, None)
                record.leave()
                self._news[1].append(rank)
                _log.info("rank %d has left", rank)
            if record.in_flight is not None and wait_any([record.in_flight], _clock.now()):
                record.drop_in_flight()
            if record.in_flight is None:
                record.worker.detach()
                if kill:
                    self.platform.end(record.worker.handle)
                self._leaving = [other for other in self._leaving if other is not one]

    def end_all(self) -> None:
        """End all workers, and those that were to end when they leave."""
        leaving = [record for record, kill in self._leaving if kill]
        for record in [*self.every().values(), *leaving]:
            self.platform.end(record.worker.handle)
            record.end(RuntimeError(SHUT_DOWN))
        self._joining.clear()
        self._leaving.clear()

    @property
    def news(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ranks that were added, and those that were removed, and that no round has listed."""
        joined, left = self._news
        return tuple(joined), tuple(left)

    def forget_news(self, joined: Sequence[int], left: Sequence[int]) -> None:
        """Forget the oldest `news`, which a round has listed."""
        del self._news[0][: len(joined)], self._news[1][: len(left)]

    def get(self, rank: int) -> WorkerRecord | None:
        """Return the record of ``rank``; None if no worker has this rank."""
        return self.records.get(rank)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, rank: int) -> WorkerRecord:
        return self.records[rank]

    def check(self, ranks: Iterable[int] | None) -> Sequence[int]:
        """Return ``ranks`` in order, checked to be ranks of workers, each once; all for None.

        Among them may be workers that are not ready yet: see `ready`.

        Raises:
            TypeError: If one is not an integer.
            ValueError: If there is no rank, or one is out of range or given twice.
        """
        return [*self.records] if ranks is None else self._check_of(self.every(), ranks)

    def ready(self, ranks: Iterable[int] | None) -> Sequence[int]:
        """Return those of ``ranks`` whose workers are ready, after the checks of `check`.

        Call `admit` before: it adds the workers that are ready.

        Raises:
            TypeError: As `check`.
            ValueError: As `check`; or if none of them is ready.
        """
        checked = self.check(ranks)
        ready = checked if ranks is None else [rank for rank in checked if rank in self.records]
        if not ready:
            raise ValueError(
                "ranks: expected at least one worker that is ready, as healthy_actor_ids() lists "
                f"them, got {checked}, which are still starting"
            )
        return ready

    def _check_of(self, there: Mapping[int, WorkerRecord], ranks: Iterable[int]) -> list[int]:
        if not isinstance(ranks, Iterable):
            raise TypeError(f"ranks: expected a list of integers, got {ranks!r}")
        checked = sorted(as_integer(rank, "ranks") for rank in ranks)
        if not checked or not there.keys() >= {*checked}:
            raise ValueError(f"ranks: expected some of {_span(there)}, got {checked}")
        if len({*checked}) < len(checked):
            raise ValueError(f"ranks: expected each once, got {checked}")
        return checked

    def healthy(self, ranks: Iterable[int] | None = None) -> list[int]:
        """Return the healthy ranks among ``ranks``, or among all."""
        asked = self.records if ranks is None else ranks
        return [rank for rank in asked if self.records[rank].why is None]

    def unhealthy(self, ranks: Iterable[int] | None = None) -> dict[int, Exception]:
        """Return the unhealthy ranks among ``ranks``, or among all, with the reasons."""
        asked = self.records if ranks is None else ranks
        return {rank: why for rank in asked if (why := self.records[rank].why) is not None}

    def note_lost(self, failed: Mapping[int, Exception]) -> None:
        """Count ``failed`` ranks as unhealthy if their worker is lost."""
        for rank, error in failed.items():
            if is_lost(error):
                worker = self.records[rank].worker
                if getattr(error, "actor_id", None) == worker.handle._actor_id.hex():
                    worker.look_for_node()  # Ray may restart it on another node
                if self.records[rank].why is None:
                    _log.warning("rank %d is left out: %s", rank, reason_in_a_line(error))
                self.records[rank].leave_out(error)


def _refuse_class(actor: Any) -> None:
    """Raise `TypeError` if ``actor``, or all of them, is a class."""
    if isinstance(actor, (type, ray.actor.ActorClass)):
        plain = actor if isinstance(actor, type) else actor.__ray_actor_class__
        raise TypeError(
            "actors: expected handles of actors, got a class; use "
            f"WorkerGroup.create({plain.__name__}, n)"
        )


def _class_of(actor: ray.actor.ActorHandle) -> tuple[str, str]:
    """Return the module and the name of the class of an actor."""
    descriptor = actor._ray_actor_creation_function_descriptor
    return descriptor.module_name, descriptor.class_name


def _span(ranks: Iterable[int]) -> str:
    """Return the text of ranks for errors."""
    there = sorted(ranks)
    is_whole = there == [*range(len(there))]
    return f"0 to {there[-1]}" if is_whole else ", ".join(map(str, there))
