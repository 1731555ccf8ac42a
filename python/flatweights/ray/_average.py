"""The average of what workers return."""

import math
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray

from flatweights import _core
from flatweights._average import (
    Nonfinite,
    average_used,
    check_nonfinite,
    read_weight,
    read_weights,
)
from flatweights._running_average import RunningAverage
from flatweights._sources import Template
from flatweights._weights import FlatWeights
from flatweights.ray._arrivals import Arrival, Arrivals
from flatweights.ray._errors import WorkerError
from flatweights.ray._metrics import METRICS
from flatweights.ray._report import report
from flatweights.ray._result import split
from flatweights.ray._round import Round
from flatweights.ray._store import FULL, too_small
from flatweights.ray._wire import nbytes_of, widen

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

    What was encoded in 16 bits (a `flatweights.wire.Difference`) is averaged in the dtypes that
    it was encoded from: float32.

    A worker may return ``(weights, extras)``, a tuple of two: the extras come back by rank,
    arrays in them as copies, so that they hold nothing in the object store.

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
            name the rank. What ``"skip"`` leaves out counts as failed, and ``min_results``
            have to be left; one, if None.
        max_inflight: How many results are mapped at once.

    Returns:
        The average, which ranks it is of, and what became of the others.

    Raises:
        WorkerError: If fewer than ``min_results`` ranks can give a result: as soon as too
            many have failed, or when the time is up, naming all that failed or are late.
            Those still running are left to run; ``out`` is as it was. If results did not
            fit into the object store, it says how large that must be.
        TypeError: If ``refs`` holds anything but references; else as `flatweights.average`.
        ValueError: If there is no reference, or ``min_results``, ``max_inflight`` or
            ``timeout`` are out of range; else as `flatweights.average`. Weights that are
            given as numbers are checked before any result is waited for. Only after
            ``nonfinite="raise"`` has found a rank, ``out`` may hold nothing of use.
    """
    ranks = references(refs)
    job = Job.of(
        len(ranks),
        weights,
        timeout=timeout,
        min_results=min_results,
        nonfinite=nonfinite,
        max_inflight=max_inflight,
    )
    found = job.run(ranks, out)
    report(found)
    return found


def references(refs: Iterable[Any]) -> list[Any]:
    """Return ``refs``, checked to be references, one at least."""
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


def count(value: int | None, name: str, most: int | None, default: int = 1) -> int:
    """Return ``value``, checked to be in 1 to ``most``; ``default`` if it is None."""
    if value is None:
        return default
    if value < 1 or (most is not None and value > most):
        bound = "at least 1" if most is None else f"1 to {most}, the number of ranks"
        raise ValueError(f"{name}: expected {bound}, got {value!r}")
    return value


def _timeout(timeout: float | None) -> float | None:
    if timeout is not None and not timeout >= 0:
        raise ValueError(f"timeout: expected seconds, not negative, got {timeout!r}")
    return None if timeout == math.inf else timeout


def late_error(timeout: float | None) -> TimeoutError:
    """Return what stands for the result of a rank that did not answer."""
    return TimeoutError(f"no result after {timeout} s")


def own(extras: Any) -> Any:
    """Return ``extras`` with copies of the arrays in it, which are views of the object store."""
    if isinstance(extras, (np.ndarray, FlatWeights)):
        return extras.copy()
    if type(extras) is dict:
        return {key: own(value) for key, value in extras.items()}
    if type(extras) in (list, tuple):
        return type(extras)(map(own, extras))
    return extras


def _let_go(error: BaseException, outer: BaseException | None) -> None:
    """Clear the frames that ``error`` keeps: in them are results, mapped in the object store."""
    found: BaseException | None = error
    while found is not None and found is not outer:
        traceback.clear_frames(found.__traceback__)
        found = found.__context__


@dataclass
class Job:
    """One average: what is asked for, and what has become of the ranks.

    Attributes:
        need: How many ranks must give a result.
        need_finite: How many must be left by ``nonfinite="skip"``.
        quarantined: The ranks that it has left out.
        widen: Gives the model that a result stands for.
        arrivals: The results, once it runs.
    """

    weigh: list[float] | Callable[[Any], float]
    need: int
    need_finite: int
    max_inflight: int
    timeout: float | None
    nonfinite: Nonfinite
    widen: Callable[[Any], Any] = widen
    arrivals: Arrivals = field(init=False)
    quarantined: tuple[int, ...] = field(default=(), init=False)

    @classmethod
    def of(
        cls,
        ranks: int,
        weights: Weights,
        *,
        timeout: float | None,
        min_results: int | None,
        nonfinite: Nonfinite,
        max_inflight: int,
        widen: Callable[[Any], Any] = widen,
    ) -> "Job":
        """Check what `average` was given, for so many ``ranks``."""
        check_nonfinite(nonfinite)
        return cls(
            weigh=weights if callable(weights) else read_weights(weights, ranks),
            need=count(min_results, "min_results", ranks, default=ranks),
            need_finite=count(min_results, "min_results", ranks),
            max_inflight=count(max_inflight, "max_inflight", None),
            timeout=_timeout(timeout),
            nonfinite=nonfinite,
            widen=widen,
        )

    def run(self, refs: list[Any], out: Any) -> Round:
        """Average what ``refs`` refer to; after an error, the list has been cleared."""
        outer = sys.exc_info()[1]
        deadline = None if self.timeout is None else time.monotonic() + self.timeout
        self.arrivals = Arrivals(refs, max_inflight=self.max_inflight, deadline=deadline)
        # "skip" may leave too few, which is known only after the pass that writes ``out``.
        fused = len(refs) <= self.max_inflight and (out is None or self.nonfinite != "skip")
        average = self._at_once if fused else self._streamed
        try:
            return average(self.arrivals, len(refs), out)
        except BaseException as error:
            if isinstance(error, Exception):
                METRICS.count_failed_round()
            refs.clear()
            self.arrivals.let_go()
            _let_go(error, outer)
            raise

    def _at_once(self, arrivals: Arrivals, ranks: int, out: Any) -> Round:
        """Wait for all, then average in one pass."""
        sums = _Sums(self.weigh, self.widen)
        while arrivals.wait():
            self._check(arrivals, ranks, out)
        self._check(arrivals, ranks, out)
        arrived = [item for run in arrivals.runs(to_the_end=True) for item in run]
        models, values = sums.read(arrived)
        begin = time.monotonic()
        try:
            mean, used = average_used(models, values, out=out, nonfinite=self.nonfinite)
        except ValueError as error:
            if self.nonfinite == "skip":
                self._check(arrivals, ranks, out, sums.spoiled(sums.ranks, models))
            # Errors count the sources that there are, and users count ranks.
            raise _by_rank(error, sums.ranks) from None
        if len(used) < len(models):
            spoiled = sums.spoiled(sums.ranks, models)
            self._check(arrivals, ranks, out, spoiled)
            arrivals.failed.update(spoiled)
            self.quarantined = tuple(spoiled)
            sums.ranks = [sums.ranks[k] for k in used]
        sums.seconds += time.monotonic() - begin
        return self._round(mean, arrivals, sums)

    def _streamed(self, arrivals: Arrivals, ranks: int, out: Any) -> Round:
        """Add runs to a running sum while others are waited for."""
        sums = _Sums(self.weigh, self.widen)
        while arrivals.wait():
            self._check(arrivals, ranks, out)
            for run in arrivals.runs():
                sums.add(run)
        self._check(arrivals, ranks, out)
        for run in arrivals.runs(to_the_end=True):
            sums.add(run)
        self._check(arrivals, ranks, out)  # an object may have been lost since it arrived
        if self.nonfinite == "propagate":
            return self._round(sums.mean(out), arrivals, sums)
        mean = sums.mean()
        if sums.spoiled([0], [mean]):
            spoiled = sums.spoiled_among(arrivals)
            if spoiled and self.nonfinite == "raise":
                raise next(iter(spoiled.values()))
            self._check(arrivals, ranks, out, spoiled)
            if spoiled or arrivals.failed:
                # Without them, once more: the others are still in the object store.
                arrivals.rewind(spoiled)
                self.quarantined = tuple(spoiled)
                first, sums = sums, _Sums(self.weigh, self.widen, sums.extras)
                sums.seconds = first.seconds
                for run in arrivals.runs(to_the_end=True):
                    sums.add(run)
                sums.nbytes = first.nbytes  # each result counts once
                mean = sums.mean()
        return self._round(mean if out is None else sums.mean(out), arrivals, sums)

    def _check(
        self,
        arrivals: Arrivals,
        ranks: int,
        out: Any,
        spoiled: Mapping[int, Exception] | None = None,
    ) -> None:
        """Raise if too few can give a result, or too few are left by the ``spoiled``."""
        left = ranks - len(arrivals.failed) - len(arrivals.late)
        if left >= self.need and left - len(spoiled or ()) >= self.need_finite:
            return
        failed = {**arrivals.failed, **(spoiled or {})}
        first = next(iter(failed.values()), None)
        full = [rank for rank, error in failed.items() if isinstance(error, FULL)]
        if full:
            sample = split(arrivals.any())[0]
            failed |= dict.fromkeys(full, too_small(ranks, out if sample is None else sample))
        failed |= dict.fromkeys(arrivals.late, late_error(self.timeout))
        raise WorkerError(dict(sorted(failed.items()))) from first

    def _round(self, mean: Any, arrivals: Arrivals, sums: "_Sums") -> Round:
        return Round(
            mean,
            sums.ranks,
            failed=dict(sorted(arrivals.failed.items())),
            quarantined=self.quarantined,
            late=arrivals.late,
            extras=sums.extras,
            seconds={"wait": arrivals.seconds_waited, "average": sums.seconds},
            nbytes=sums.nbytes,
        )


class _Sums:
    """What has been added so far."""

    def __init__(
        self,
        weigh: list[float] | Callable[[Any], float],
        widen: Callable[[Any], Any],
        extras: dict[int, Any] | None = None,
    ) -> None:
        self._weigh = weigh
        self._widen = widen
        self._template: Template | None = None
        self._running = RunningAverage()
        self.ranks: list[int] = []
        self.extras = {} if extras is None else extras
        self.nbytes = 0
        self.seconds = 0.0

    def read(self, run: Sequence[Arrival]) -> tuple[list[Any], list[float]]:
        """Return the models and the weights of ``run``, checked; keep the extras."""
        models, values = [], []
        for rank, value in run:
            received, extras = split(value)
            model = self._widen(received)
            self._check(rank, model, nbytes_of(received))
            models.append(model)
            values.append(
                read_weight(self._weigh(value), f"weight of rank {rank}")
                if callable(self._weigh)
                else self._weigh[rank]
            )
            if extras is not None:
                self.extras[rank] = own(extras)
            self.ranks.append(rank)
        return models, values

    def add(self, run: list[Arrival]) -> None:
        """Add the ranks of ``run``, and let go of it."""
        begin = time.monotonic()
        models, values = self.read(run)
        self._running.add_all(models, values)
        run.clear()
        self.seconds += time.monotonic() - begin

    def mean(self, out: Any = None) -> Any:
        """Return the mean of what was added."""
        begin = time.monotonic()
        mean = self._running.mean(out=out)
        self.seconds += time.monotonic() - begin
        return mean

    def spoiled(self, ranks: Iterable[int], models: Iterable[Any]) -> dict[int, Exception]:
        """Return, for the ranks whose models hold NaN or infinity, errors that name the slot."""
        assert self._template is not None
        template = self._template
        found: dict[int, Exception] = {}
        for rank, model in zip(ranks, models, strict=True):
            parts = template.read(model, f"rank {rank}")
            i = _core.first_nonfinite(template.layout.code, template.packed, parts, 0)
            if i < len(template.layout):
                found[rank] = ValueError(f"rank {rank}{template.place(i)}: holds NaN or infinity")
        return found

    def spoiled_among(self, arrivals: Arrivals) -> dict[int, Exception]:
        """As `spoiled`, for all that were added; one is mapped at a time."""
        found: dict[int, Exception] = {}
        for rank in self.ranks:
            model = [self._widen(split(arrivals.one(rank))[0])]
            if rank not in arrivals.failed:
                found |= self.spoiled([rank], model)
            model.clear()
        return found

    def _check(self, rank: int, model: Any, nbytes: int | None) -> None:
        if self._template is None:
            self._template = Template.of(model, f"rank {rank}")
        else:
            try:
                self._template.match(model, f"rank {rank}")
            except (TypeError, ValueError) as error:
                raise type(error)(f"{error} (rank {self.ranks[0]} gave what is expected)") from None
        self.nbytes += self._template.layout.nbytes if nbytes is None else nbytes


def _by_rank(error: ValueError, ranks: Sequence[int]) -> ValueError:
    found = re.match(r"source (\d+)(.*)", str(error), re.DOTALL)
    return ValueError(f"rank {ranks[int(found[1])]}{found[2]}") if found else error
