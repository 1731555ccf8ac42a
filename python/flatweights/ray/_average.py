"""The average of results behind references."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import ray

from flatweights._average import Nonfinite
from flatweights._numbers import check_count
from flatweights.ray.peers._store import RayResult, check_cluster
from flatweights.ray.peers._transport import PendingResult
from flatweights.ray.peers._wait import RoundSpec, Weights
from flatweights.ray.results._round import Round
from flatweights.ray.rounds._barrier import average_of_answers
from flatweights.robust import AnyRule


def average(
    refs: Iterable[ray.ObjectRef],
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

    Results are read in the object store and not copied. They are added in the order of ``refs``,
    in whatever order they arrive, so the average has the bits of `flatweights.average`
    over the ranks in `Round.used`. In a driver, it replaces
    ``{k: sum(w[k] for w in ray.get(refs)) / n for k in ...}``.

    Up to ``max_inflight`` ranks are averaged in one pass once all have answered. So is any
    number of ranks whose results a `WorkerGroup` reads in segments instead of in the object store.
    More ranks are added to a running sum, in runs of consecutive ranks, while others still work.
    The sum takes 8 bytes for each number. No more than ``max_inflight`` results are mapped at
    once; results that arrive before their turn wait in the object store.

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
        weights: One weight per rank, such as its number of samples; or a function of a
            worker's result, such as ``lambda result: result[1]["samples"]``.
        out: Where to write; see `flatweights.average`. Passing one buffer to every round
            avoids its allocation, once the last `Round.ref` has been made.
        timeout: Seconds to wait for results; for ever, if None.
        min_results: The number of ranks that an average needs. If at least so many have answered
            when the time is up, or when the others have failed, they are averaged with renormalised
            weights; `Round` lists the others. All ranks, if None.
        nonfinite: What to do about NaN and infinity; see `flatweights.average`. Errors
            name the rank. Ranks that ``"skip"`` leaves out count as failed, and ``min_results``
            ranks must remain; one, if None.
        max_inflight: The number of results that may be mapped at once.
        rule: A rule that replaces the mean: a value such as
            ``flatweights.robust.TrimmedMean(0.2)``, or any function from a list of models to one.
            It needs all results at once, so ``max_inflight`` does not apply; the result of a
            function is copied. `Round.used` are the ranks that the rule selected, all for rules by
            coordinate. `Round.quarantined` are the ranks that it left out, which have not failed.

    Returns:
        The average, the ranks in it, and the reasons for which others were left out.

    Raises:
        WorkerError: If fewer than ``min_results`` ranks can give a result: as soon as too
            many have failed, or when the time is up. It names all ranks that failed or are
            late. Workers that are still running keep running; ``out`` is unchanged. If results
            did not fit into the object store, it says how large the store must be.
        TypeError: If ``refs`` holds anything but references; if ``weights`` are given for a
            ``rule`` that has none; else as `flatweights.average`.
        ValueError: If there is no reference, or ``min_results``, ``max_inflight`` or
            ``timeout`` are out of range; else as `flatweights.average`. Weights that are
            given as numbers are checked before the wait for results. After an error of
            ``nonfinite="raise"``, and only then, the contents of ``out`` are undefined.
    """
    answers = references(refs)
    spec = RoundSpec.of(
        len(answers),
        weights,
        timeout=timeout,
        min_results=min_results,
        nonfinite=nonfinite,
        max_inflight=check_count(max_inflight, "max_inflight"),
        rule=rule,
    )
    return average_of_answers(answers, spec, out)


def references(refs: Iterable[ray.ObjectRef]) -> dict[int, PendingResult]:
    """Return answers by rank for ``refs``, after checking that these are at least one reference."""
    check_cluster()
    if not isinstance(refs, Iterable) or isinstance(refs, Mapping):
        hint = "; pass list(refs.values())" if isinstance(refs, Mapping) else ""
        got = type(refs).__name__
        raise TypeError(f"refs: expected a list of references, got {got}{hint}")
    answers: dict[int, PendingResult] = {}
    for rank, ref in enumerate(refs):
        if not isinstance(ref, ray.ObjectRef):
            raise TypeError(
                f"rank {rank}: expected a ray.ObjectRef, got {type(ref).__name__}; "
                "flatweights.average takes the values themselves"
            )
        answers[rank] = RayResult(ref)
    if not answers:
        raise ValueError("expected at least one reference, got none")
    return answers
