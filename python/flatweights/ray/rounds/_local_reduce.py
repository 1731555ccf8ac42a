"""The average in the driver: it adds results in place, in the order of the ranks."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from flatweights._average import average_used, mean_of_packed
from flatweights._running_average import RunningAverage
from flatweights._sources import Template
from flatweights._weights import FlatWeights, frozen
from flatweights.ray import _clock
from flatweights.ray.peers._wait import Arrivals, RoundSpec
from flatweights.ray.results._result import Packed, copied, split
from flatweights.ray.results._round import Round
from flatweights.ray.results._wire import nbytes_of
from flatweights.ray.rounds._cleanup import forget_values
from flatweights.ray.rounds._codec import PLAIN, Codec
from flatweights.ray.support._failpoints import reach
from flatweights.robust import Rule


class DriverAverage:
    """One average that the driver adds up.

    A value keeps its object mapped, so the object store cannot drop it. So at most ``max_inflight``
    values are held at once; a value that arrives out of turn is taken again in its turn.
    """

    def __init__(
        self,
        arrivals: Arrivals,
        spec: RoundSpec,
        out: Any = None,
        codec: Codec = PLAIN,
    ) -> None:
        """Prepare the average.

        Args:
            arrivals: The answers to wait for.
            spec: The arguments of the round.
            out: The model to write to; a new one, if None.
            codec: The encoding of weights.
        """
        self._arrivals = arrivals
        self._spec = spec
        self._out = out
        self._codec = codec
        self._order = sorted(arrivals.answers)
        self._next = 0  # index of the first rank that was not added
        self._held: dict[int, Any] = {}
        self._packed: dict[int, Packed] = {}  # of those that are weights alone, in segments
        self._template: Template | None = None
        self._first = 0  # the rank of the template
        self._used: list[int] = []
        self._extras: dict[int, Any] = {}
        self._nbytes: dict[int, int] = {}
        self._seconds = 0.0
        self._left_out: list[int] = []  # by the rule
        self._scores: dict[int, float] = {}

    def run(self) -> Round:
        """Wait, average, and let go of all values, even after an error."""
        outer = sys.exc_info()[1]
        try:
            return self.average()
        except BaseException as error:
            forget_values(error, outer)
            raise
        finally:
            self._held.clear()
            self._packed.clear()
            self._arrivals.release()

    def average(self) -> Round:
        """Wait and average; the caller lets go of all values."""
        # "skip" may leave too few ranks, which is known only after the pass that writes ``out``.
        skips = self._spec.nonfinite == "skip" and self._out is not None
        at_once = self._spec.rule is not None or (self._may_hold_all() and not skips)
        mean = self._codec.finish(self._at_once() if at_once else self._by_runs())
        return Round(
            frozen(mean) if self._out is None else mean,
            self._used,
            failed=self._arrivals.failed and dict(sorted(self._arrivals.failed.items())),
            quarantined=sorted({*self._arrivals.quarantined, *self._left_out}),
            scores=self._scores,
            late=self._arrivals.late,
            extras=self._extras and {k: self._extras[k] for k in self._used if k in self._extras},
            seconds={"wait": self._arrivals.seconds_waited, "average": self._seconds},
            nbytes=sum(self._nbytes.values()),
        )

    def _may_hold_all(self) -> bool:
        """Whether at most ``max_inflight`` answers have to be mapped from the store."""
        answers, most = self._arrivals.answers, self._spec.max_inflight
        if len(answers) <= most:
            return True
        return sum(answer.is_in_store for answer in answers.values()) <= most

    def _at_once(self) -> Any:
        """Wait for all answers, then average in one pass."""
        came: Collection[int] | None = self._arrivals.arrived  # all, if others have waited
        while came is not None:
            self._hold(came)
            self._check()
            came = self._arrivals.wait(all_at_once=True)
        mean = self._mean_in_place()
        if mean is not None:
            return mean
        # Large results may have come through the store nevertheless.
        if not self._may_hold_all() and self._spec.rule is None:
            return self._by_runs()
        run = next(self._runs(to_the_end=True, most=len(self._order)), {})
        models, weights = self._read_run(run)
        self._check()
        reach("averaging")
        begin = _clock.now()
        spec = self._spec
        if spec.rule is not None and spec.nonfinite == "skip" and self._out is not None:
            # A rule writes ``out``, which must stay as it is if too few ranks are left.
            self._leave_out_spoiled(models, weights)
        ranks = self._used
        try:
            if self._spec.rule is None:
                mean, used = average_used(
                    models,
                    weights,
                    out=self._out,
                    nonfinite=self._spec.nonfinite,
                    names=[f"rank {rank}" for rank in ranks],
                    template=self._template,
                )
            else:
                mean, used = self._apply(self._spec.rule, models, weights)
        except ValueError:
            if self._spec.nonfinite == "skip":
                self._arrivals.quarantine(self._find_spoiled(ranks, models))
                self._check()
            raise
        if len(used) < len(models):
            self._arrivals.quarantine(self._find_spoiled(ranks, models))
            self._check()
            self._used = [ranks[k] for k in used]
        self._used = [rank for rank in self._used if rank not in self._left_out]
        self._seconds += _clock.now() - begin
        return mean

    def _leave_out_spoiled(self, models: list[Any], weights: list[float]) -> None:
        """Remove the models that hold NaN or infinity, and their weights, from these lists."""
        not_finite = self._find_spoiled(self._used, models)
        self._arrivals.quarantine(not_finite)
        self._check()
        left = [k for k, rank in enumerate(self._used) if rank not in not_finite]
        models[:], weights[:] = [models[k] for k in left], [weights[k] for k in left]
        self._used = [self._used[k] for k in left]

    def _apply(self, rule: Rule, models: list[Any], weights: list[float]) -> tuple[Any, list[int]]:
        """Return the result of ``rule``, and the positions of the models not found spoiled."""
        ranks, nonfinite = self._used, self._spec.nonfinite
        aggregate = rule.converted(self._codec.relative).apply(
            models,
            weights if rule.takes_weights else None,
            out=self._out,
            nonfinite=nonfinite,
            names=[f"rank {rank}" for rank in ranks],
        )
        rest = [k for k in range(len(ranks)) if k not in set(aggregate.used)]
        not_finite: set[int] = set()
        if nonfinite == "skip":
            not_finite = {*self._find_spoiled([ranks[k] for k in rest], [models[k] for k in rest])}
        self._left_out = [ranks[k] for k in rest if ranks[k] not in not_finite]
        if aggregate.scores is not None:
            scores = zip(ranks, aggregate.scores, strict=True)
            self._scores = {rank: score for rank, score in scores if rank not in not_finite}
        return aggregate.weights, [k for k, rank in enumerate(ranks) if rank not in not_finite]

    def _mean_in_place(self) -> FlatWeights | None:
        """Return the mean, read-only, of weights of one layout that are all in segments.

        It has the bits of the general way, but makes no view of each part of each rank's weights.

        Returns:
            None for anything else, and for NaN and infinity unless they are to be averaged.
        """
        spec = self._spec
        if self._out is not None or callable(spec.weights) or spec.rule is not None:
            return None
        if not self._packed.keys() >= self._arrivals.arrived:
            return None
        ranks = sorted(self._arrivals.arrived)
        weights = spec.numbers_of(ranks)
        if not any(weights):
            return None
        models = [self._packed[rank] for rank in ranks]
        layout, where = models[0].layout, f"rank {ranks[0]}"
        self._codec.accept(layout, where)
        reach("averaging")
        begin = _clock.now()
        mean = layout.new_buffer()
        layouts, buffers = [model.layout for model in models], [[model.buffer] for model in models]
        is_finite = mean_of_packed(mean, layouts, buffers, weights, where)
        if is_finite is None:
            return None
        if not (is_finite or spec.nonfinite == "propagate"):
            return None
        self._used = ranks
        self._nbytes = dict.fromkeys(ranks, mean.nbytes)
        self._seconds += _clock.now() - begin
        return FlatWeights.wrap(frozen(mean), layout)

    def _by_runs(self) -> Any:
        """Add runs of ranks to a running sum while waiting for others."""
        total = RunningAverage()
        while (came := self._arrivals.wait()) is not None:
            self._hold(came)
            self._check()
            self._add(total, to_the_end=False)
        self._check()
        self._add(total, to_the_end=True)
        self._check()  # an object may be lost after it arrived
        if self._spec.nonfinite == "propagate":
            return self._mean(total, self._out)
        mean = self._mean(total)
        if self._find_spoiled([self._first], [mean]):
            not_finite: dict[int, Exception] = {}
            for rank in self._used:
                not_finite |= self._take_and_screen(rank)
            if not_finite and self._spec.nonfinite == "raise":
                raise next(iter(not_finite.values()))
            self._arrivals.quarantine(not_finite)
            self._check()
            if self._arrivals.failed:
                # Average again without them, since the others are still held.
                self._next, self._used, total = 0, [], RunningAverage()
                self._add(total, to_the_end=True)
                self._check()
                mean = self._mean(total)
        return mean if self._out is None else self._mean(total, self._out)

    def _hold(self, came: Iterable[int]) -> None:
        """Take the arrived values, which shows failures at once; hold those whose turn is near.

        Later ranks come first, so that their values are dropped before values to hold are taken.
        """
        near = self._order[self._next : self._next + self._spec.max_inflight]
        for rank in sorted(came, reverse=True):
            packed = self._arrivals.packed(rank)
            if packed is None:
                self._take(rank, hold=rank in near)
            else:
                self._packed[rank] = packed

    # Separate functions, so that a value is unmapped when they return.

    def _take(self, rank: int, *, hold: bool) -> None:
        value = self._arrivals.result(rank)
        if hold and rank in self._arrivals.arrived:
            self._held[rank] = value

    def _take_and_screen(self, rank: int) -> dict[int, Exception]:
        value = self._arrivals.result(rank)
        if rank in self._arrivals.failed:
            return {}
        return self._find_spoiled([rank], [self._codec.decode(split(value)[0])])

    def _runs(self, *, to_the_end: bool, most: int) -> Iterator[dict[int, Any]]:
        """Yield values in runs of consecutive ranks.

        Failed ranks are skipped. The caller clears each run before it asks for the next.

        Args:
            to_the_end: Also skip ranks that have not answered.
            most: The largest number of ranks in a run.
        """
        while True:
            run: dict[int, Any] = {}
            while self._next < len(self._order) and len(run) < most:
                rank = self._order[self._next]
                arrived = rank in self._arrivals.arrived
                if not (arrived or to_the_end or rank in self._arrivals.failed):
                    break
                self._next += 1
                if not arrived:
                    continue
                run[rank] = self._held.pop(rank, None)
                if run[rank] is None:
                    run[rank] = self._arrivals.result(rank)
                if rank in self._arrivals.failed:
                    del run[rank]
            if not run:
                return
            yield run

    def _add(self, total: RunningAverage, *, to_the_end: bool) -> None:
        for run in self._runs(to_the_end=to_the_end, most=self._spec.max_inflight):
            begin = _clock.now()
            models, weights = self._read_run(run)
            total.add_all(models, weights)
            models.clear()
            self._seconds += _clock.now() - begin

    def _mean(self, total: RunningAverage, out: Any = None) -> Any:
        begin = _clock.now()
        mean = total.mean(out=out)
        self._seconds += _clock.now() - begin
        return mean

    def _read_run(self, run: dict[int, Any]) -> tuple[list[Any], list[float]]:
        """Return the checked models of a run, and their weights; empty the run."""
        models = [self._read(rank, value) for rank, value in run.items()]
        weights = [self._spec.weight_of(rank, value) for rank, value in run.items()]
        run.clear()
        return models, weights

    def _read(self, rank: int, value: Any) -> Any:
        """Return the checked model in ``value``; keep the extras."""
        received, extras = split(value)
        model = self._codec.decode(received)
        name = f"rank {rank}"
        if self._template is None:
            self._codec.accept(model, name)
            self._template, self._first = Template.of(model, name), rank
        else:
            try:
                self._template.match(model, name)
            except (TypeError, ValueError) as error:
                raise type(error)(f"{error} (rank {self._first} gave what is expected)") from None
        is_decoded = model is not received
        nbytes = nbytes_of(received) if is_decoded else self._template.layout.nbytes
        self._nbytes[rank] = nbytes or 0
        if extras is not None:
            self._extras[rank] = copied(extras)
        self._used.append(rank)
        return model

    def _find_spoiled(self, ranks: Iterable[int], models: Iterable[Any]) -> dict[int, Exception]:
        """Return, for the ranks whose models hold NaN or infinity, errors that name the slot."""
        assert self._template is not None
        not_finite: dict[int, Exception] = {}
        for rank, model in zip(ranks, models, strict=True):
            name = f"rank {rank}"
            error = self._template.find_nonfinite(self._template.read(model, name), name)
            if error is not None:
                not_finite[rank] = error
        return not_finite

    def _check(self) -> None:
        self._arrivals.check(self._spec, self._sample)

    def _sample(self) -> Any:
        """Return a model of the round, if there is one."""
        if self._out is not None:
            return self._out
        arrived = sorted(self._arrivals.arrived)
        return split(self._arrivals.result(arrived[0]))[0] if arrived else None
