"""Several workers that are called together, some of which may be slow or dead."""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ray

from flatweights._average import Nonfinite
from flatweights.ray._calls import BY_VALUE, Call, argument_of
from flatweights.ray._driver import DriverAverage
from flatweights.ray._engine import (
    AnyRule,
    Arrivals,
    Deadline,
    Request,
    Weights,
    check_count,
    check_timeout,
)
from flatweights.ray._errors import WorkerError, is_lost
from flatweights.ray._report import report, rounds_bar
from flatweights.ray._roster import Roster, note_seconds
from flatweights.ray._round import Round
from flatweights.ray._sharded import ShardedAverage, ShardedPlan
from flatweights.ray._wire import GroupWire, Travels
from flatweights.ray._worker import FlatWorker
from flatweights.wire import WireDType

_PROBE = 10.0  # seconds that an unhealthy worker is given to answer


class WorkerGroup:
    """Actors of a `FlatWorker` class, called together; ranks that fail are left out.

    The vocabulary is that of RLlib's actor manager: an actor is healthy until a call to it
    fails for a reason of Ray's (it died, its node is gone, it does not answer in time).
    Unhealthy ones are not called until `restore` has reached them and sent the weights that
    the others have. A method that raises leaves its actor healthy.

    Weights that the group sends have a version, and every call says which one it means. So
    an actor that Ray restarts (``max_restarts``) does not answer with the weights that it
    was built with, and what it computed from older weights is in no later average. An actor
    that is late is not asked again before it has answered; that answer is dropped. Before
    the first `broadcast` there are no weights to send: a restarted actor stays unhealthy
    until there are.

    A group is for one thread: calls from several at a time are not supported.

    >>> import numpy as np
    >>> import ray
    >>> _ = ray.init(num_cpus=2, log_to_driver=False, ignore_reinit_error=True)
    >>> class Worker(FlatWorker):
    ...     def build(self, rank=0):
    ...         import tensorflow as tf
    ...         return {"w": tf.Variable([1.0, 2.0])}
    ...     def train(self, step):
    ...         self.variables.add_flat([step, step])
    ...         return self.get_weights()
    >>> group = WorkerGroup.create(Worker, 2, num_cpus=0)
    >>> group.average("train", 1.0).weights
    {'w': array([2., 3.], dtype=float32)}
    >>> group.shutdown()
    """

    def __init__(
        self,
        actors: Sequence[Any],
        *,
        max_inflight: int = 4,
        wire_dtype: WireDType | None = None,
    ) -> None:
        """Take actors of `FlatWorker` classes, by rank.

        Args:
            actors: Handles of the actors.
            max_inflight: How many results are mapped at once; see `average`.
            wire_dtype: ``"bfloat16"`` or ``"float16"``: after the first `broadcast`, weights
                travel as differences of 16 bits, half the bytes of float32 both ways.
                What rounding takes from one is added to the next, and averages are float32.
                All workers have the same weights: those that were broadcast, except for the
                rounding of one difference. Weights have to be by name, with the same layout
                both ways.

        Raises:
            ValueError: If there is no actor, or ``wire_dtype`` is another one.
            TypeError: If one is no actor of a `FlatWorker` class.
        """
        self._roster = Roster(actors, None if wire_dtype is None else GroupWire(wire_dtype))
        self._max_inflight = check_count(max_inflight, "max_inflight")
        self._in_round = False  # of run(): workers may have trained since the latest weights
        self._arguments: list[Sequence[Any]] = []  # of the actors, for those that are restarted

    @classmethod
    def create(
        cls,
        worker: type[FlatWorker] | Any,
        n: int,
        *args: Any,
        max_inflight: int = 4,
        wire_dtype: WireDType | None = None,
        arguments: Callable[[int], Sequence[Any]] | None = None,
        **ray_options: Any,
    ) -> WorkerGroup:
        """Start ``n`` actors of the class ``worker``.

        Args:
            worker: A subclass of `FlatWorker`, or what `ray.remote` made of one.
            n: How many.
            *args: Arguments for each constructor, and so for `FlatWorker.build`.
            max_inflight: See `average`.
            wire_dtype: See the constructor.
            arguments: A function of the rank that gives more arguments, after ``args``.
            **ray_options: Ray's options for the actors: ``num_gpus=1``, ``max_restarts=-1``.

        Raises:
            TypeError: If ``worker`` is no subclass of `FlatWorker`.
            ValueError: If ``n`` is less than 1.
        """
        remote = worker if isinstance(worker, ray.actor.ActorClass) else None
        plain = remote.__ray_actor_class__ if remote is not None else worker
        if not (isinstance(plain, type) and issubclass(plain, FlatWorker)):
            raise TypeError(f"worker: expected a subclass of FlatWorker, got {worker!r}")
        check_count(n, "n")
        check_count(max_inflight, "max_inflight")
        if wire_dtype is not None:
            GroupWire(wire_dtype)  # raises before an actor is started
        remote = remote or ray.remote(plain)
        if ray_options:
            remote = remote.options(**ray_options)
        arguments_of = [arguments(rank) if arguments else () for rank in range(n)]
        if ray_options.get("max_restarts"):
            # Ray lets go of large arguments once an actor is built, and a restart wants them.
            args = _by_reference(args)
            arguments_of = [_by_reference(own) for own in arguments_of]
        group = cls(
            [remote.remote(*args, *own) for own in arguments_of],
            max_inflight=max_inflight,
            wire_dtype=wire_dtype,
        )
        group._arguments = [args, *arguments_of]
        return group

    def actors(self) -> dict[int, Any]:
        """Return the actors by rank."""
        return {rank: self._roster[rank].worker.handle for rank in range(len(self._roster))}

    def healthy_actor_ids(self) -> list[int]:
        """Return the ranks that are called."""
        return self._roster.healthy()

    def num_healthy_actors(self) -> int:
        """Return how many ranks are called."""
        return len(self.healthy_actor_ids())

    def is_actor_healthy(self, rank: int) -> bool:
        """Whether ``rank`` is called."""
        return rank not in self._roster.unhealthy()

    @property
    def unhealthy(self) -> Mapping[int, Exception]:
        """By rank, why actors are not called."""
        return self._roster.unhealthy()

    def step(
        self,
        method: str,
        *args: Any,
        broadcast: Any = None,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> dict[int, Any]:
        """Call ``method`` of all healthy workers; return the results by rank.

        Ranks that die, or that are late, are left out and unhealthy from then on.

        Args:
            method: Name of the method.
            *args: Arguments; ``ray.put`` large ones once.
            broadcast: Weights that the workers set first, in the same call; see `average`.
            timeout: Seconds to wait; for ever, if None.
            **kwargs: Keyword arguments.

        Raises:
            WorkerError: If a method raised, or no rank has answered.
            TypeError: If ``method`` is no name.
        """
        _check_method(method)
        timeout = check_timeout(timeout)
        ranks, broadcast = self._roster.begin(broadcast, timeout)
        arrivals = Arrivals(Deadline.after(timeout))
        with self._roster.bringing(broadcast, ranks, arrivals) as payload:
            call = self._roster.call(method, args, kwargs, payload)
            self._roster.send_out(call, arrivals, ranks)
            results = arrivals.collect()
        by_methods = _raised(arrivals.failed)
        if by_methods or not results:
            raise WorkerError(by_methods or self.unhealthy)
        return results

    def average(
        self,
        method: str = "get_weights",
        *args: Any,
        broadcast: Any = None,
        weights: Weights = None,
        out: Any = None,
        timeout: float | None = None,
        min_results: int | None = None,
        nonfinite: Nonfinite = "raise",
        travels: Travels = "weights",
        sharded: ShardedAverage | None = None,
        rule: AnyRule | None = None,
        **kwargs: Any,
    ) -> Round:
        """Call ``method`` of all healthy workers and average what they return.

        See `flatweights.ray.average`. Ranks are those of the group throughout.

        With ``broadcast``, workers set these weights first, in the same call: as much as
        `broadcast` and `average` one after the other, with half the messages. A worker that
        cannot set them does not run the method: its rank has failed with a
        `RefusedWeightsError`, and is unhealthy unless all ranks refused; the weights sent before
        remain the latest then. A loop of rounds that sends each average with the next call::

            result = None
            for _ in range(1_000):
                result = group.average("train", broadcast=result)
            group.broadcast(result)

        Args:
            method: Name of a method that returns weights, or weights and extras.
            *args: Its arguments; ``ray.put`` large ones once.
            broadcast: Weights that the workers set first, in the same call: what `broadcast`
                takes. If None, they work on those that they have.
            weights: One weight for each rank of the group, or a function of what a worker
                returned.
            out: Where to write.
            timeout: Seconds to wait for results.
            min_results: How many ranks make an average. All that are healthy, if None.
            nonfinite: What to do about NaN and infinity. With a ``wire_dtype``, workers refuse to
                send them, or what does not fit: a rank has failed then.
            travels: With a ``wire_dtype``, what the method returns: ``"weights"``, or
                ``"gradients"``, which are rounded themselves and may be a vector; it comes
                back as the part ``"vector"``.
            sharded: Averages without the driver, and gives a `ShardedRound`. Workers then cut their
                results into shards, unless nodes add up first. It cannot be combined with ``out``
                or a ``wire_dtype``.
            rule: What takes the place of the mean; see `flatweights.ray.average`. It cannot be
                combined with ``sharded``.
            **kwargs: Keyword arguments of the method.

        Raises:
            WorkerError: If fewer than ``min_results`` ranks can give a result; those that
                died or are late are unhealthy then.
            TypeError: As `flatweights.ray.average`.
            ValueError: As `flatweights.ray.average`.
        """
        _check_method(method)
        request = self._request(
            weights,
            sharded,
            timeout=timeout,
            min_results=min_results,
            nonfinite=nonfinite,
            rule=rule,
        )
        result = self._average(method, args, kwargs, request, broadcast, out, travels, sharded)
        report(result, already_named=self.unhealthy)
        return result

    def _request(self, weights: Weights, sharded: ShardedAverage | None, **options: Any) -> Request:
        """Return the checked arguments of a round, for all ranks of the group."""
        if sharded is not None:
            if options.pop("rule") is not None:
                raise ValueError("rule: expected no sharded= with it: a rule needs all results")
            return sharded.request(len(self._roster), weights, **options)
        return Request.of(len(self._roster), weights, max_inflight=self._max_inflight, **options)

    def _average(
        self,
        method: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        request: Request,
        broadcast: Any = None,
        out: Any = None,
        travels: Travels = "weights",
        sharded: ShardedAverage | None = None,
    ) -> Round:
        """As `average`, which reports it."""
        roster, wire = self._roster, self._roster.latest.wire
        if sharded is not None and (out is not None or wire is not None):
            raise ValueError("sharded: expected neither out nor a wire_dtype with it")
        ranks, broadcast = roster.begin(broadcast, request.timeout)
        before = roster.unhealthy()
        if len(ranks) < (request.min_results or 1):
            raise WorkerError(before)
        patience = math.inf if sharded is None else sharded.patience
        arrivals = Arrivals(Deadline.after(request.timeout), patience=patience)
        try:
            with roster.bringing(broadcast, ranks, arrivals) as payload:
                wire = roster.latest.wire
                is_encoded = wire is not None and (travels == "gradients" or wire.has_sent)
                call = roster.call(method, args, kwargs, payload, travels if is_encoded else None)
                plan: ShardedPlan | DriverAverage
                if sharded is not None:
                    plan = ShardedPlan(sharded, arrivals, request)
                    self._send_out_cut(call, plan, ranks)
                else:
                    roster.send_out(call, arrivals, ranks)
                    plan = DriverAverage(arrivals, request, out)
                    if wire is not None and is_encoded:
                        finish = functools.partial(wire.decode, travels=travels)
                        plan = DriverAverage(
                            arrivals, request, out, decode=wire.widen, finish=finish
                        )
                roster.lanes.offer()
                result: Round = plan.run()
                if sharded is None and out is None:
                    roster.lanes.made(result.weights)
        except WorkerError as error:
            raise WorkerError(before | error.failed) from error.__cause__
        result.failed = dict(sorted((before | result.failed).items()))
        result.ways = {rank: roster[rank].worker.way for rank in ranks}
        return result

    def broadcast(self, weights: Any, *, timeout: float | None = None) -> list[int]:
        """Send ``weights`` to all healthy workers; they have them from then on.

        If no worker is healthy, they are sent to all that owe no answer: those that take them are
        healthy again. If none takes them, and none is late, nothing has changed.

        Args:
            weights: What `FlatWorker.set_weights` takes, a vector, a `Round` (of a `ShardedRound`
                workers fetch the shards themselves), its `ShardedRound.shards`, or a reference
                to one of the former. It is put into the object store once, unless it is small.
                With a ``wire_dtype``, no vector.
            timeout: Seconds to wait; for ever, if None.

        Returns:
            The ranks that have them. Those that died or are late get them from `restore`.

        Raises:
            WorkerError: If a worker raised, or none has them. If none took them and some
                raised, the weights sent before remain the latest. If only some raised, those
                are unhealthy: they do not have the weights of the others.
            StoreTooSmallError: If the object store has no room for them; nothing was sent.
        """
        if weights is None:
            raise TypeError("weights: expected weights to send, got None")
        timeout = check_timeout(timeout)
        ranks, rest = self._roster.begin(weights, timeout)
        if rest is None:
            return ranks
        arrivals = Arrivals(Deadline.after(timeout))
        with self._roster.bringing(weights, ranks, arrivals, alone=True) as payload:
            begin = time.monotonic()
            self._roster.send_out(self._roster.call(payload=payload), arrivals, ranks)
            arrivals.collect()
            note_seconds(weights, "broadcast", time.monotonic() - begin)
        raised = _raised(arrivals.failed)
        if raised or not arrivals.arrived:
            raise WorkerError(raised or self.unhealthy)
        return sorted(arrivals.arrived)

    def restore(self, *, timeout: float | None = _PROBE) -> list[int]:
        """Send unhealthy workers the latest weights; return the ranks that have them.

        They are healthy again. It asks each worker once: one that Ray is still restarting, or that
        still owes a late answer, stays unhealthy. Call it again later, as `run` does before
        each round.

        Args:
            timeout: Seconds to wait for the answers of those that were asked; for ever, if None.
        """
        return self._roster.probe(Deadline.after(timeout))

    def run(
        self,
        rounds: int,
        method: str,
        *args: Any,
        weights: Weights = None,
        timeout: float | None = None,
        min_results: int | None = None,
        nonfinite: Nonfinite = "raise",
        sharded: ShardedAverage | None = None,
        rule: AnyRule | None = None,
        progress: bool = False,
        **kwargs: Any,
    ) -> Iterator[Round]:
        """Yield ``rounds`` rounds: average what ``method`` returns, send it to all workers.

        Workers that are unhealthy are probed before each round, and come back with the
        latest weights. If an earlier run broke off in the middle of a round, all workers are
        sent the latest weights first: some may have trained on.

        Args:
            rounds: How many.
            method: Name of the method that trains and returns weights.
            *args: Its arguments.
            weights: See `average`.
            timeout: Seconds to wait for the results of each round, and for workers to take
                the average.
            min_results: How many ranks make an average.
            nonfinite: What to do about NaN and infinity.
            sharded: See `average`; workers fetch the shards, and no whole buffer is in the driver.
            rule: See `average`.
            progress: Show a progress bar, and the ranks that the last average is not of, if
                the standard output is a terminal or a notebook (needs ``rich``).
            **kwargs: Keyword arguments of the method.

        Raises:
            WorkerError: As `average` and `broadcast`.
        """
        try:
            rounds = operator.index(rounds)
        except TypeError:
            raise TypeError(f"rounds: expected an integer, got {rounds!r}") from None
        _check_method(method)
        request = self._request(
            weights,
            sharded,
            timeout=timeout,
            min_results=min_results,
            nonfinite=nonfinite,
            rule=rule,
        )
        average = functools.partial(self._average, method, args, kwargs, request, sharded=sharded)
        return self._rounds(rounds, average, request.timeout, progress)

    def _rounds(
        self,
        rounds: int,
        average: Callable[[], Round],
        timeout: float | None,
        progress: bool,
    ) -> Iterator[Round]:
        """Yield the rounds of `run`, whose arguments are checked."""
        with rounds_bar(rounds) if progress else contextlib.nullcontext() as show:
            for number in range(1, rounds + 1):
                begin = time.monotonic()
                if self._in_round:
                    self._roster.distrust()
                if self.unhealthy:
                    patience = _PROBE if timeout is None else min(_PROBE, timeout)
                    self._roster.probe(Deadline.after(patience))
                self._in_round = True
                result = average()
                self.broadcast(result, timeout=timeout)
                self._in_round = False
                result.seconds["round"] = time.monotonic() - begin
                result.number = number
                report(result, already_named=self.unhealthy)
                if show is not None:
                    show(result)
                yield result
                del result  # while the next one is made

    def shutdown(self) -> None:
        """End all actors; their processes are gone soon after."""
        self._roster.shut_down()
        self._arguments.clear()

    def _send_out_cut(self, call: Call, plan: ShardedPlan, ranks: Sequence[int]) -> None:
        """As `_send_out`, for a plan over shards; workers cut the result unless nodes add up."""
        head, method, args, kwargs, payload = call
        weights = argument_of(payload)
        num_shards = plan.reading.num_shards
        for rank in ranks:
            handle = self._roster[rank].worker.handle
            if num_shards:
                run = handle.call_cut.options(num_returns=1 + num_shards)
                refs = run.remote(head, weights, plan.reading, rank, method, *args, **kwargs)
            else:
                refs = [handle.call_version.remote(head, weights, method, *args, **kwargs)]
            plan.expect(rank, *refs)


def _check_method(method: str) -> None:
    """Raise unless ``method`` is a name: a call without one would only set weights."""
    if not isinstance(method, str):
        raise TypeError(f"method: expected a name, got {method!r}")


def _raised(failed: Mapping[int, Exception]) -> dict[int, Exception]:
    """Return those of the errors that methods raised."""
    return {rank: error for rank, error in failed.items() if not is_lost(error)}


def _by_reference(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Return ``arguments`` with references to those that are too large to travel with a call."""
    return tuple(
        one
        if isinstance(one, ray.ObjectRef) or len(ray.cloudpickle.dumps(one)) <= BY_VALUE
        else ray.put(one)
        for one in arguments
    )
