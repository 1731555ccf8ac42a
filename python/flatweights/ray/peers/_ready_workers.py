"""All workers of a group at once: called, waited for and read in one step of C++.

In most rounds nothing has happened to any worker since the last one, and all of them get the same
command. Then it is posted to all, and their answers are read, by the `_core.WorkerAnswers` that has
read the last ones. Whatever is different is left to calls of one worker after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flatweights import _core
from flatweights.ray.channels._driver_channel import Channels
from flatweights.ray.peers._by_channel import ChannelResult, GroupChannels, mean_at, slice_of
from flatweights.ray.peers._ranks import WorkerRecord
from flatweights.ray.peers._transport import Call, MeanOfAnswers, PendingResult, Stamp


class ReadyWorkers:
    """All workers of a group, whose last answers were read at once.

    Attributes:
        ranks: Their ranks, in order.
    """

    def __init__(
        self,
        records: Mapping[int, WorkerRecord],
        group: GroupChannels,
        channels: Channels,
        reader: _core.WorkerAnswers,
    ) -> None:
        """Take all records of a group, its channels, and what has read the last answers."""
        self.ranks = [*records]
        self._group, self._channels, self._reader = group, channels, reader
        workers = [record.worker for record in records.values()]
        self._ends: list[Any] = [worker.channel for worker in workers]
        logs: list[Any] = [worker.log for worker in workers]
        tokens = [worker.token for worker in workers]
        self._each = [*zip(records.values(), workers, self._ends, logs, tokens, strict=True)]

    @classmethod
    def of(cls, records: Mapping[int, WorkerRecord], group: GroupChannels) -> ReadyWorkers | None:
        """Return the workers of ``records``; None, unless all answers were just read at once."""
        ends: list[Any] = [record.worker.channel for record in records.values()]
        reader = None if group.made is None else group.made.reader_of(ends)
        if group.made is None or reader is None:
            return None
        return cls(records, group, group.made, reader)

    def are_ready(self, records: Mapping[int, WorkerRecord], version: Stamp | None) -> bool:
        """Whether they are still all workers, are healthy, have ``version``, and owe nothing."""
        for record, worker, channel, log, token in self._each:
            is_at_hand = record.why is None and record.in_flight is None and not record.has_left
            if not (is_at_hand and record.version == version):
                return False
            if worker.channel is not channel or log.last != token:
                return False
        return len(records) == len(self._each)

    @property
    def posts(self) -> int:
        """How often a call was posted; it tells whether one was that an exception broke off."""
        return self._reader.posts

    def post(self, call: Call) -> bool:
        """Post a call to all workers; return whether it was: if not, nothing was."""
        command = self._group.command(call)
        if command is None:
            return False
        uncalled = self._channels.post_at_once(self._reader, self._ends, command)
        if uncalled is None:
            return False
        for k in uncalled:
            _, worker, channel, _, _ = self._each[k]
            worker.serve(channel)
        return True

    def mean(
        self, weights: list[float], timeout: float | None, *, finite: bool
    ) -> MeanOfAnswers | None:
        """Wait for the answers to `post`, and average them; see `PendingResult.mean`."""
        offer = self._group.offer
        return mean_at(self._channels, self._ends, offer, weights, timeout, finite=finite)

    def are_done(self, timeout: float | None) -> bool:
        """Wait until workers have answered None; see `PendingResult.are_done`."""
        return self._channels.are_done(self._ends, slice_of(timeout))

    def owe(self, call: Call) -> dict[int, PendingResult]:
        """Return the answers to ``call``, which was posted, by rank; workers owe them from now."""
        answers: dict[int, PendingResult] = {}
        for record, worker, channel, _, _ in self._each:
            answer = ChannelResult(worker, self._channels, channel, call)
            record.track(answer)
            answers[worker.rank] = answer
        return answers

    def take(self, version: Stamp | None) -> None:
        """Note that all have taken the weights of ``version``."""
        for record, _, _, _, _ in self._each:
            record.version, record.is_new = version, False
