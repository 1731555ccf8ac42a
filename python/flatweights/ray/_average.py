"""The average of what workers return."""

import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from flatweights import _core
from flatweights._average import Nonfinite, average_used, read_weight, read_weights
from flatweights._running_average import RunningAverage
from flatweights._sources import Template
from flatweights.ray._arrivals import Arrival, Arrivals
from flatweights.ray._errors import WorkerError
from flatweights.ray._round import Round

Weights = Iterable[float] | Callable[[Any], float] | None


def average(
    refs: Iterable[Any],
    weights: Weights = None,
    *,
    out: Any = None,
    timeout: float | None = None,
    min_results: int | None = None,
    nonfinite: Nonfinite = "raise",
    max_inflight: int = 4,
) -> Round:
    """Average what ``refs`` refer to, as it arrives, where it lies in the object store.

    Results are read in place and not copied. They are added in the order of ``refs``,
    whatever the order in which they arrive, so the bits are those of
    `flatweights.average` over the ranks in `Round.used`. It replaces, in a driver,
    ``{k: sum(w[k] for w in ray.get(refs)) / n for k in ...}``.

    Up to ``max_inflight`` ranks are averaged in one pass when all have answered. More
    are added to a running sum, by runs of consecutive ranks, while others still work:
    the sum takes 8 bytes for each number, and no more than ``max_inflight`` results are
    mapped at once; those that arrive before their turn wait in the object store.

    A worker may return ``(weights, extras)``, a tuple of two: the extras come back by rank.

    >>> import numpy as np
    >>> _ = ray.init(num_cpus=1, log_to_driver=False, ignore_reinit_error=True)
    >>> refs = [ray.put(np.array([1.0, 2.0])), ray.put(np.array([3.0, 6.0]))]
    >>> average(refs).weights
    array([2., 4.])

    Args:
        refs: One reference per rank, each to an array, `FlatWeights`, a dict or a list of
            arrays; of one kind, with equal shapes and dtypes. Or to a tuple of that and
            anything else.
        weights: One weight per rank, such as the number of samples it saw; or a function
            of what a worker returned, such as ``lambda result: result[1]["samples"]``.
        out: Where to write; see `flatweights.average`. A buffer given to each round in
            turn spares its allocation, once the last `Round.ref` has been made.
        timeout: Seconds to wait for results; for ever, if None.
        min_results: How many ranks make an average. If so many have answered when the
            time is up, or when the others have failed, they are averaged, their weights
            renormalised; `Round` names the others. All ranks, if None.
        nonfinite: What to do about NaN and infinity; see `flatweights.average`. Errors
            name the rank. What ``"skip"`` leaves out counts as failed.
        max_inflight: How many results are mapped at once.

    Returns:
        The average, which ranks it is of, and what became of the others.

    Raises:
        WorkerError: If fewer than ``min_results`` ranks can give a result: as soon as too
            many have failed, or when the time is up, naming all that failed or are late.
            Those still running are left to run; ``out`` is as it was.
        TypeError: If ``refs`` holds anything but references; else as `flatweights.average`.
        ValueError: If there is no reference, or ``min_results``, ``max_inflight`` or
            ``timeout`` are out of range; else as `flatweights.average`. Weights that are
            given as numbers are checked before any result is waited for.
    """
    ranks = _references(refs)
    job = _Job(
        refs=ranks,
        weigh=weights if callable(weights) else read_weights(weights, len(ranks)),
        need=_count(min_results, "min_results", len(ranks), default=len(ranks)),
        max_inflight=_count(max_inflight, "max_inflight", None),
        timeout=_timeout(timeout),
        nonfinite=nonfinite,
    )
    return job.at_once(out) if len(ranks) <= job.max_inflight else job.streamed(out)


def _references(refs: Iterable[Any]) -> list[Any]:
    if not isinstance(refs, Iterable):
        raise TypeError(f"refs: expected a list of references, got {type(refs).__name__}")
    ranks = list(refs)
    if not ranks:
        raise ValueError("expected at least one reference, got none")
    for rank, ref in enumerate(ranks):
        if not isinstance(ref, ray.ObjectRef):
            raise TypeError(
                f"rank {rank}: expected a ray.ObjectRef, got {type(ref).__name__}; "
                "flatweights.average takes the values themselves"
            )
    return ranks


def _count(value: int | None, name: str, most: int | None, default: int = 1) -> int:
    if value is None:
        return default
    if value < 1 or (most is not None and value > most):
        bound = "at least 1" if most is None else f"1 to {most}, the number of references"
        raise ValueError(f"{name}: expected {bound}, got {value!r}")
    return value


def _timeout(timeout: float | None) -> float | None:
    if timeout is not None and not timeout >= 0:
        raise ValueError(f"timeout: expected seconds, not negative, got {timeout!r}")
    return timeout


def _split(value: Any) -> tuple[Any, Any]:
    """Return the weights and the extras, None if there are none."""
    is_pair = isinstance(value, tuple) and len(value) == 2
    return value if is_pair else (value, None)


@dataclass
class _Job:
    """One average: what is asked for."""

    refs: Sequence[Any]
    weigh: list[float] | Callable[[Any], float]
    need: int
    max_inflight: int
    timeout: float | None
    nonfinite: Nonfinite
    begin: float = field(default_factory=time.monotonic)

    def at_once(self, out: Any) -> Round:
        """Wait for all, then average in one pass."""
        arrivals = self._arrivals()
        while arrivals.wait():
            self._check(arrivals)
        self._check_end(arrivals)
        arrived = [item for run in arrivals.runs(to_the_end=True) for item in run]
        sums = _Sums(self.weigh)
        models, values = sums.read(arrived)
        begin = time.monotonic()
        try:
            mean, used = average_used(models, values, out=out, nonfinite=self.nonfinite)
        except ValueError as error:
            # Errors count the sources that there are, and users count ranks.
            raise _by_rank(error, [item.rank for item in arrived]) from None
        ranks = [arrived[k].rank for k in used]
        return self._round(mean, ranks, arrivals, sums, time.monotonic() - begin)

    def streamed(self, out: Any) -> Round:
        """Add runs to a running sum while others are waited for."""
        arrivals = self._arrivals()
        sums = _Sums(self.weigh)
        while arrivals.wait():
            self._check(arrivals)
            for run in arrivals.runs():
                sums.add(run)
        self._check_end(arrivals)
        for run in arrivals.runs(to_the_end=True):
            sums.add(run)
        self._check(arrivals)  # an object may have been lost since it arrived
        begin = time.monotonic()
        spoiled: dict[int, Exception] = {}
        if self.nonfinite != "propagate":
            spoiled = sums.nonfinite_ranks(self.refs)
            if spoiled and self.nonfinite == "raise":
                raise next(iter(spoiled.values()))
            if spoiled:
                sums = self._without(set(spoiled), sums)
        mean = sums.running.mean(out=out)
        sums.seconds += time.monotonic() - begin
        arrivals.failed |= spoiled
        return self._round(mean, sums.ranks, arrivals, sums, sums.seconds)

    def _arrivals(self) -> Arrivals:
        deadline = None if self.timeout is None else self.begin + self.timeout
        return Arrivals(self.refs, max_inflight=self.max_inflight, deadline=deadline)

    def _check(self, arrivals: Arrivals) -> None:
        if len(self.refs) - len(arrivals.failed) < self.need:
            arrivals.let_go()
            raise WorkerError(arrivals.failed) from next(iter(arrivals.failed.values()))

    def _check_end(self, arrivals: Arrivals) -> None:
        late = arrivals.late
        if len(self.refs) - len(arrivals.failed) - len(late) < self.need:
            arrivals.let_go()
            silent = TimeoutError(f"no result after {self.timeout} s")
            raise WorkerError(dict(sorted((arrivals.failed | dict.fromkeys(late, silent)).items())))

    def _without(self, ranks: set[int], sums: "_Sums") -> "_Sums":
        """Sum up once more, without ``ranks``; the others are still in the object store."""
        again = _Sums(self.weigh)
        rest = [rank for rank in sums.ranks if rank not in ranks]
        if not rest:
            raise ValueError("every rank holds NaN or infinity")
        for k in range(0, len(rest), self.max_inflight):
            some = rest[k : k + self.max_inflight]
            again.add([Arrival(r, ray.get(self.refs[r])) for r in some])
        again.extras = sums.extras
        return again

    def _round(
        self, mean: Any, used: Sequence[int], arrivals: Arrivals, sums: "_Sums", seconds: float
    ) -> Round:
        return Round(
            mean,
            used,
            failed=dict(sorted((sums.left_out(used) | arrivals.failed).items())),
            late=arrivals.late,
            extras=sums.extras,
            seconds={"wait": arrivals.seconds_waited, "average": seconds},
            nbytes=sums.nbytes,
        )


class _Sums:
    """What has been added so far."""

    def __init__(self, weigh: list[float] | Callable[[Any], float]) -> None:
        self._weigh = weigh
        self._template: Template | None = None
        self._first = 0
        self.running = RunningAverage()
        self.ranks: list[int] = []
        self.extras: dict[int, Any] = {}
        self.nbytes = 0
        self.seconds = 0.0

    def read(self, run: Sequence[Arrival]) -> tuple[list[Any], list[float]]:
        """Return the models and the weights of ``run``, checked; keep the extras."""
        models, values = [], []
        for rank, value, _ in run:
            model, extras = _split(value)
            self._check(rank, model)
            models.append(model)
            values.append(
                read_weight(self._weigh(value), f"weight of rank {rank}")
                if callable(self._weigh)
                else self._weigh[rank]
            )
            if extras is not None:
                self.extras[rank] = extras
            self.ranks.append(rank)
        return models, values

    def add(self, run: list[Arrival]) -> None:
        """Add the ranks of ``run``, and let go of it."""
        begin = time.monotonic()
        models, values = self.read(run)
        self.running.add_all(models, values)
        run.clear()
        self.seconds += time.monotonic() - begin

    def nonfinite_ranks(self, refs: Sequence[Any]) -> dict[int, Exception]:
        """Return the ranks that hold NaN or infinity; looked for only if the mean does."""
        assert self._template is not None
        if self._place_of_nonfinite(self.running.mean(), "the mean") is None:
            return {}
        found: dict[int, Exception] = {}
        for rank in self.ranks:
            model, _ = _split(ray.get(refs[rank]))
            place = self._place_of_nonfinite(model, f"rank {rank}")
            if place is not None:
                found[rank] = _nonfinite_error(rank, place)
        return found

    def left_out(self, used: Sequence[int]) -> dict[int, Exception]:
        """Return the ranks that were read and not ``used``."""
        return {rank: _nonfinite_error(rank) for rank in self.ranks if rank not in used}

    def _place_of_nonfinite(self, model: Any, where: str) -> str | None:
        assert self._template is not None
        template = self._template
        i = _core.first_nonfinite(
            template.layout.code, template.packed, template.read(model, where), 0
        )
        return None if i == len(template.layout) else template.place(i)

    def _check(self, rank: int, model: Any) -> None:
        try:
            if self._template is None:
                self._template, self._first = Template.of(model, f"rank {rank}"), rank
            else:
                self._template.match(model, f"rank {rank}")
        except (TypeError, ValueError) as error:
            if rank == self._first:
                raise
            raise type(error)(f"{error} (rank {self._first} gave what is expected)") from None
        self.nbytes += self._template.layout.nbytes


def _nonfinite_error(rank: int, place: str = "") -> ValueError:
    return ValueError(f"rank {rank}{place}: holds NaN or infinity")


def _by_rank(error: ValueError, ranks: Sequence[int]) -> ValueError:
    found = re.match(r"source (\d+)(.*)", str(error), re.DOTALL)
    return ValueError(f"rank {ranks[int(found[1])]}{found[2]}") if found else error
