"""Workers that are called, waited for and read in one step of C++.

In most rounds nothing is to be done for a worker but to post a command to its channel, and to read
its answer. Then all commands are posted, and all answers are read, by one `_core.WorkerAnswers`.
Whatever takes more is left to calls of one worker after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flatweights import _core
from flatweights._layout import Layout
from flatweights._weights import FlatWeights, frozen
from flatweights.ray.channels._driver_channel import Channels
from flatweights.ray.peers._by_channel import ChannelResult, GroupChannels, slice_of
from flatweights.ray.peers._ranks import WorkerRecord
from flatweights.ray.peers._transport import Call, PendingResult, Stamp
from flatweights.ray.results._round import Round


class ReadyWorkers:
    """Some workers that have attached, and are expected to answer weights of one layout.

    Attributes:
        ranks: Their ranks, in order.
        layout: The layout.
    """

    def __init__(
        self,
        records: Sequence[WorkerRecord],
        layout: Layout,
        group: GroupChannels,
        channels: Channels,
        answers: _core.WorkerAnswers,
    ) -> None:
        """Take the workers and their group; see `of`."""
        workers = [record.worker for record in records]
        self.ranks = [worker.rank for worker in workers]
        self.layout, self._group, self._channels = layout, group, channels
        self._answers = answers
        self._ends: list[Any] = [worker.channel for worker in workers]
        logs: list[Any] = [worker.log for worker in workers]
        tokens = [worker.token for worker in workers]
        self._each = [*zip(records, workers, self._ends, logs, tokens, strict=True)]

    @classmethod
    def of(cls, records: Sequence[WorkerRecord], group: GroupChannels) -> ReadyWorkers | None:
        """Return the workers of ``records``; None if they cannot be called in one step."""
        channels, ends = group.made, list[Any](record.worker.channel for record in records)
        if channels is None or not ends or None in ends:
            return None
        layout = ends[0].layout
        answers = channels.answers_of(ends, layout) if layout and layout.nbytes else None
        return None if answers is None else cls(records, layout, group, channels, answers)

    def are_ready(self, version: Stamp | None) -> bool:
        """Whether nothing has happened to them, they have ``version``, and owe no answer."""
        for record, worker, channel, log, token in self._each:
            is_at_hand = record.why is None and record.in_flight is None and not record.has_left
            if not (is_at_hand and record.version == version):
                return False
            if worker.channel is not channel or log.last != token:
                return False
        return self._ends[0].layout is self.layout

    @property
    def posts(self) -> int:
        """How often calls were posted: after an exception, it tells whether the last ones were."""
        return self._answers.posts

    def post(self, call: Call, by_rank: Mapping[int, Sequence[Any]]) -> bool:
        """Post a call to each, with its arguments in ``by_rank``; return whether it was done.

        If not, nothing was posted.
        """
        command = self._group.command
        if by_rank:
            commands = [command(call.with_more(by_rank[rank])) for rank in self.ranks]
        else:
            commands = [command(call)] * len(self.ranks)
        ready = [one for one in commands if one is not None]
        if len(ready) < len(commands):
            return False
        uncalled = self._channels.post_at_once(self._answers, self._ends, ready)
        if uncalled is None:
            return False
        for k in uncalled:
            _, worker, channel, _, _ = self._each[k]
            worker.serve(channel)
        return True

    def mean(self, weights: list[float], timeout: float | None, *, finite: bool) -> Round | None:
        """Wait for the answers to `post`, which are weights; return the round of their mean.

        Args:
            weights: One for each worker.
            timeout: Seconds to wait; for ever, if None.
            finite: Whether a mean with NaN or infinity is none.

        Returns:
            None if there is no such mean, and no answer was read.
        """
        layout = self.layout
        mean, seconds, takes = layout.new_buffer(), slice_of(timeout), not finite
        found = self._channels.mean_of(self._answers, mean, weights, seconds, takes_nonfinite=takes)
        if found is None:
            del mean  # it may have taken the segment that was offered
            self._group.offer(layout.nbytes)
            return None
        waited, averaged = found
        return Round(
            FlatWeights.wrap(frozen(mean), layout),
            self.ranks,
            seconds={"wait": waited, "average": averaged},
            nbytes=mean.nbytes * len(self.ranks),
        )

    def are_done(self, timeout: float | None) -> bool:
        """Wait until all have answered None to `post`; return whether they have."""
        return self._channels.are_done(self._answers, len(self.ranks), slice_of(timeout))

    def owe(
        self, call: Call, by_rank: Mapping[int, Sequence[Any]], *, withdraws: bool
    ) -> dict[int, PendingResult]:
        """Return the answers to the last `post` by rank, which workers owe from now on.

        Args:
            call: See `post`.
            by_rank: See `post`.
            withdraws: Whether to withdraw it from workers that have not taken it, since some of the
                Ray calls that would take it may be missing.
        """
        answers: dict[int, PendingResult] = {}
        for record, worker, channel, _, _ in self._each:
            if withdraws and channel.withdraw():
                continue
            this = call.with_more(by_rank[worker.rank]) if by_rank else call
            answers[worker.rank] = answer = ChannelResult(worker, self._channels, channel, this)
            record.track(answer)
        return answers

    def take(self, version: Stamp | None) -> None:
        """Note that all have taken the weights of ``version``."""
        for record, _, _, _, _ in self._each:
            record.take(version)
