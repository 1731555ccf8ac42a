"""The average of results that references name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import ray

from flatweights._average import Nonfinite
from flatweights.ray._report import report
from flatweights.ray._round import Round
from flatweights.ray.peers._contract import Answer
from flatweights.ray.peers._store import RayAnswer, check_cluster
from flatweights.ray.peers._wait import Arrivals, Deadline, Request, Weights
from flatweights.ray.rounds._in_one_place import DriverAverage
from flatweights.robust import AnyRule


def average(
    refs: Iterable[Any],
    weights: Weights = None,
    *,
    out: Any = None,
    timeout: float | None = None,
    min_results: int | None = None,
    nonfinite: Nonfinite = "raise",
    max_inflight: int = 4,
    rule: AnyRule | None = None,
) -> Round:
    """Average the results that ``refs`` refer to, as they arrive.

    Results are read in the object store, and not copied. They are added in the order of ``refs``,
    whatever the order in which they arrive, so the average has the bits of `flatweights.average`
    over the ranks in `Round.used`. In a driver, it replaces
    ``{k: sum(w[k] for w in ray.get(refs)) / n for k in ...}``.

    Up to ``max_inflight`` ranks are averaged in one pass once all have answered; so is any
    number of ranks whose results a `WorkerGroup` reads in windows instead of in the object store.
    More ranks are added to a running sum, by runs of consecutive ranks, while others still work:
    the sum takes 8 bytes for each number, and no more than ``max_inflight`` results are
    mapped at once; those that arrive before their turn wait in the object store.

    Results that were encoded in 16 bits (a `flatweights.wire.Difference`) are averaged in the
    dtypes before encoding: float32.

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
            name the rank. Ranks that ``"skip"`` leaves out count as failed, and ``min_results``
            ranks have to be left; one, if None.
        max_inflight: How many results are mapped at once.
        rule: What takes the place of the mean: a value such as
            ``flatweights.robust.TrimmedMean(0.2)``, or any function from a list of models to one.
            It needs all results at once, so ``max_inflight`` does not apply; what a function
            returns is copied. `Round.used` are the ranks that the rule selected, all for rules by
            coordinate; `Round.quarantined` those that it left out, which have not failed.

    Returns:
        The average, the ranks in it, and why others were left out.

    Raises:
        WorkerError: If fewer than ``min_results`` ranks can give a result: as soon as too
            many have failed, or when the time is up, naming all that failed or are late.
            Those still running are left to run; ``out`` is as it was. If results did not
            fit into the object store, it says how large that must be.
        TypeError: If ``refs`` holds anything but references; if ``weights`` are given for a
            ``rule`` that has none; else as `flatweights.average`.
        ValueError: If there is no reference, or ``min_results``, ``max_inflight`` or
            ``timeout`` are out of range; else as `flatweights.average`. Weights that are
            given as numbers are checked before any result is waited for. Only after
            ``nonfinite="raise"`` has found a rank, ``out`` may hold nothing of use.
    """
    answers = references(refs)
    request = Request.of(
        len(answers),
        weights,
        timeout=timeout,
        min_results=min_results,
        nonfinite=nonfinite,
        max_inflight=max_inflight,
        rule=rule,
    )
    arrivals = Arrivals(Deadline.after(request.timeout), answers)
    result = DriverAverage(arrivals, request, out).run()
    report(result)
    return result


def references(refs: Iterable[Any]) -> dict[int, Answer]:
    """Return answers by rank for ``refs``, checked to be references, one at least."""
    check_cluster()
    if not isinstance(refs, Iterable):
        raise TypeError(f"refs: expected a list of references, got {type(refs).__name__}")
    answers: dict[int, Answer] = {}
    for rank, ref in enumerate(refs):
        if not isinstance(ref, ray.ObjectRef):
            raise TypeError(
                f"rank {rank}: expected a ray.ObjectRef, got {type(ref).__name__}; "
                "flatweights.average takes the values themselves"
            )
        answers[rank] = RayAnswer(ref)
    if not answers:
        raise ValueError("expected at least one reference, got none")
    return answers
