"""Rounds with a barrier, which call all workers of a group and wait for all of them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from flatweights._numbers import check_count
from flatweights.ray import _clock
from flatweights.ray.peers._transport import Payload, PendingResult
from flatweights.ray.peers._wait import Arrivals, RoundSpec, deadline_in
from flatweights.ray.peers._worker_set import WorkerSet, note_seconds
from flatweights.ray.results._report import report
from flatweights.ray.results._round import Round
from flatweights.ray.results._wire import PayloadKind
from flatweights.ray.rounds._allreduce import NodesAverage
from flatweights.ray.rounds._codec import Codec, plain_codec
from flatweights.ray.rounds._local_reduce import DriverAverage
from flatweights.ray.rounds._work import Work
from flatweights.ray.support._errors import WorkerError, raised

Averaged = TypeVar("Averaged", bound=Round | None)

_NUMBERS = {int, float, bool, type(None)}
_SHORT = 1000  # characters


def average_of(
    worker_set: WorkerSet,
    work: Work,
    spec: RoundSpec,
    ranks: Iterable[int] | None,
    broadcast: Any = None,
    out: Any = None,
    payload_kind: PayloadKind = "weights",
) -> Round:
    """Let workers do ``work``, and average their results; see `WorkerGroup.average`.

    The caller has admitted workers that are ready.
    """
    asked, by_rank = _asked(worker_set, work, ranks)
    need, count = spec.min_results or 1, len(asked)
    if need > count:
        check_count(need, "min_results", count)
    called = worker_set.ranks.healthy(asked)
    before = worker_set.ranks.unhealthy(asked) if len(called) < count else {}
    has_all = work.arguments is None or by_rank.keys() >= {*called}
    if out is None and len(called) >= need and has_all:
        found = _naming(
            before, lambda: _average_at_once(worker_set, work, spec, called, by_rank, broadcast)
        )
        if found is not None:
            return found
    called, asked, broadcast = _begin(worker_set, work, spec.timeout, asked, by_rank, broadcast)
    before = worker_set.ranks.unhealthy(asked) if len(called) < count else {}
    if len(called) < need:
        check_count(need, "min_results", len(asked))
        raise WorkerError(before)
    return _naming(
        before,
        lambda: _average(worker_set, work, spec, called, by_rank, broadcast, out, payload_kind),
    )


def _naming(before: Mapping[int, Exception], average: Callable[[], Averaged]) -> Averaged:
    """Return an average, or raise its error, which also names the ranks that failed ``before``."""
    try:
        result = average()
    except WorkerError as error:
        raise error._and(before) from error.__cause__
    if before and result is not None:
        result.failed = dict(sorted({**before, **result.failed}.items()))
    return result


def _average(
    worker_set: WorkerSet,
    work: Work,
    spec: RoundSpec,
    called: Sequence[int],
    by_rank: Mapping[int, Sequence[Any]],
    broadcast: Any,
    out: Any,
    payload_kind: PayloadKind,
) -> Round:
    """Do the work of `average_of` with the ranks to call, one after the other."""
    arrivals = Arrivals(deadline_in(spec.timeout))

    def average(payload: Payload | None) -> Round:
        wire = worker_set.latest.wire
        is_encoded = wire is not None and (payload_kind == "gradients" or wire.has_sent)
        encoded = payload_kind if is_encoded else None
        call = worker_set.call(work.method, work.args, work.kwargs, payload, encoded)
        codec = plain_codec(worker_set.layout, work.method)
        if wire is not None and is_encoded:
            codec = Codec(
                wire.widen,
                functools.partial(wire.decode, payload_kind=payload_kind),
                functools.partial(wire.relative, payload_kind=payload_kind),
            )
        why = worker_set.why_no_agents(called, spec)
        if why is None:
            between = NodesAverage(worker_set.agents, arrivals, spec, out, codec)
            worker_set.send_out(call, arrivals, called, by_rank, between.reading)
            result = between.run()
        else:
            worker_set.send_out(call, arrivals, called, by_rank)
            worker_set.offer()
            result = DriverAverage(arrivals, spec, out, codec).run()
        worker_set.complete(result, called, why, is_kept=out is None)
        return result

    return worker_set.round(broadcast, called, arrivals, average)


def _average_at_once(
    worker_set: WorkerSet,
    work: Work,
    spec: RoundSpec,
    called: Sequence[int],
    by_rank: Mapping[int, Sequence[Any]],
    broadcast: Any,
) -> Round | None:
    """Do the work of `_average` in one step of C++; return None if it takes more.

    Then nothing was sent.
    """
    if spec.rule is not None or callable(spec.weights) or 0 < len(spec.weights) <= called[-1]:
        return None
    arguments = itertools.chain(work.args, work.kwargs.values(), *by_rank.values())
    if not all(map(_is_small, arguments)):
        return None  # large ones may have to go through Ray, and would be pickled twice
    ready, codec = worker_set.ready(called), plain_codec(worker_set.layout, work.method)
    if ready is None or not codec.accepts(ready.layout):
        return None
    numbers, finite = spec.numbers_of(called), spec.nonfinite != "propagate"

    def read() -> Round | None:
        worker_set.offer()
        return ready.mean(numbers, spec.timeout, finite=finite)

    def collect(arrivals: Arrivals) -> Round:
        return DriverAverage(arrivals, spec, None, codec).run()

    call = work.method, work.args, work.kwargs
    result = worker_set.round_at_once(ready, broadcast, spec.timeout, call, by_rank, read, collect)
    if result is not None:
        worker_set.complete(result, called, "", is_kept=True)
    return result


def _is_small(argument: Any) -> bool:
    """Whether an argument is a number or a short text."""
    kind = type(argument)
    if kind is str:
        return len(argument) <= _SHORT
    return kind in _NUMBERS or issubclass(kind, np.generic)


def _asked(
    worker_set: WorkerSet, work: Work, ranks: Iterable[int] | None
) -> tuple[Sequence[int], dict[int, Sequence[Any]]]:
    """Return the ranks to call, and the additional arguments of the healthy ones.

    The function of the arguments may call the group, which must not be in a call then.
    """
    asked = worker_set.ranks.ready(ranks)
    if work.arguments is None:
        return asked, {}
    by_rank = work.arguments_of(worker_set.ranks.healthy(asked))
    return worker_set.ranks.ready(None if ranks is None else asked), by_rank


def _begin(
    worker_set: WorkerSet,
    work: Work,
    timeout: float | None,
    asked: Sequence[int],
    by_rank: dict[int, Sequence[Any]],
    broadcast: Any,
) -> tuple[list[int], Sequence[int], Any]:
    """Return the ranks to call, those that were asked and not removed, and the weights to bring.

    Workers that come back only now need arguments, too, which ``by_rank`` gets. Their function may
    call the group, which may change what was begun.
    """
    starts = work.needs_weights
    while True:
        called, broadcast = worker_set.begin(broadcast, timeout, asked, starts=starts)
        missing = [rank for rank in called if rank not in by_rank]
        if work.arguments is None or not missing:
            return called, asked, broadcast
        by_rank |= work.arguments_of(missing)
        asked = [rank for rank in asked if rank in worker_set.ranks.records]


def average_of_answers(answers: Mapping[int, PendingResult], spec: RoundSpec, out: Any) -> Round:
    """Average the results of calls that the caller has made; see `flatweights.ray.average`."""
    arrivals = Arrivals(deadline_in(spec.timeout), answers)
    result = DriverAverage(arrivals, spec, out).run()
    report(result)
    return result


def results_of(
    worker_set: WorkerSet,
    work: Work,
    timeout: float | None,
    ranks: Iterable[int] | None,
    broadcast: Any,
) -> dict[int, Any]:
    """Let workers do ``work``; return their results by rank; see `WorkerGroup.step`."""
    worker_set.ranks.admit()
    asked, by_rank = _asked(worker_set, work, ranks)
    called, asked, broadcast = _begin(worker_set, work, timeout, asked, by_rank, broadcast)
    arrivals = Arrivals(deadline_in(timeout))

    def collect(payload: Payload | None) -> dict[int, Any]:
        call = worker_set.call(work.method, work.args, work.kwargs, payload)
        worker_set.send_out(call, arrivals, called, by_rank)
        return arrivals.collect()

    results = worker_set.round(broadcast, called, arrivals, collect)
    by_methods = raised(arrivals.failed)
    if by_methods or not results:
        raise WorkerError(by_methods or worker_set.ranks.unhealthy(asked))
    return results


def send(worker_set: WorkerSet, weights: Any, timeout: float | None) -> list[int]:
    """Let workers set ``weights``; return the ranks that did so; see `WorkerGroup.broadcast`."""
    worker_set.ranks.admit()
    begin, ready = _clock.now(), worker_set.ready(worker_set.ranks.healthy())
    found: Arrivals | list[int] | None = None

    def collect(arrivals: Arrivals) -> Arrivals | list[int]:
        arrivals.collect()
        return arrivals

    if ready is not None:

        def read() -> Arrivals | list[int] | None:
            return ready.ranks if ready.are_done(timeout) else None

        found = worker_set.round_at_once(
            ready, weights, timeout, (None, (), {}), {}, read, collect, alone=True
        )
    if found is None:
        ranks, weights = worker_set.begin(weights, timeout)
        if weights is None:
            return ranks
        arrivals = Arrivals(deadline_in(timeout))

        def send_out(payload: Payload | None) -> Arrivals | list[int]:
            nonlocal begin
            begin = _clock.now()
            worker_set.send_out(worker_set.call(payload=payload), arrivals, ranks)
            return collect(arrivals)

        found = worker_set.round(weights, ranks, arrivals, send_out, alone=True)
    note_seconds(weights, "broadcast", _clock.now() - begin)
    if isinstance(found, list):
        return [*found]
    by_workers = raised(found.failed)
    if by_workers or not found.arrived:
        raise WorkerError(by_workers or worker_set.ranks.unhealthy())
    return sorted(found.arrived)
