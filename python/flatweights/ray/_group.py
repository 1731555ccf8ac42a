"""Several workers that are called together, some of which may be slow or dead."""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import ray

from flatweights._average import Nonfinite
from flatweights._weights import FlatWeights
from flatweights.ray._calls import Call, Head, Payload, Stamp, Stamps
from flatweights.ray._driver import DriverAverage
from flatweights.ray._engine import (
    Arrivals,
    Deadline,
    Request,
    Weights,
    check_count,
)
from flatweights.ray._errors import (
    RefusedWeightsError,
    WorkerError,
    is_lost,
    is_refusal,
    is_stale,
    put,
    reason_of,
    size_of,
)
from flatweights.ray._failpoints import reach
from flatweights.ray._metrics import METRICS
from flatweights.ray._ray_calls import BY_VALUE, argument_of
from flatweights.ray._report import report, rounds_bar
from flatweights.ray._round import Round, ShardedRound, ShardedWeights
from flatweights.ray._sharded import ShardedAverage, ShardedPlan
from flatweights.ray._wire import GroupWire, Travels, nbytes_of
from flatweights.ray._worker import FlatWorker
from flatweights.ray._workers import Workers
from flatweights.wire import WireDType

_PROBE = 10.0  # seconds that an unhealthy worker is given to answer


class _Sent(NamedTuple):
    """The weights that a group sent last: replaced as a whole, so a broadcast happened or not.

    Attributes:
        version: Their stamp; None before the first broadcast.
        payload: The weights as they were sent.
        wire: The wire after them, if there is one.
        full: The same weights in full, for workers that missed earlier ones; None until needed.
    """

    version: Stamp | None = None
    payload: Payload | None = None
    wire: GroupWire | None = None
    full: Payload | None = None


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
        self._workers = Workers(actors)
        self._max_inflight = check_count(max_inflight, "max_inflight")
        self._sent = _Sent(wire=None if wire_dtype is None else GroupWire(wire_dtype))
        self._stamps = Stamps()
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
        return self._workers.handles()

    def healthy_actor_ids(self) -> list[int]:
        """Return the ranks that are called."""
        return self._workers.healthy()

    def num_healthy_actors(self) -> int:
        """Return how many ranks are called."""
        return len(self.healthy_actor_ids())

    def is_actor_healthy(self, rank: int) -> bool:
        """Whether ``rank`` is called."""
        return rank not in self._workers.unhealthy

    @property
    def unhealthy(self) -> Mapping[int, Exception]:
        """By rank, why actors are not called."""
        return dict(sorted(self._workers.unhealthy.items()))

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
        deadline = Deadline.after(timeout)
        ranks, broadcast = self._to_call(broadcast, deadline)
        arrivals = Arrivals(deadline)
        with self._bringing(broadcast, ranks, arrivals) as payload:
            self._send_out(self._call(method, args, kwargs, payload), arrivals, ranks)
            results = arrivals.collect()
        by_methods = _raised(arrivals.failed)
        if by_methods or not results:
            raise WorkerError(by_methods or self._workers.unhealthy)
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
            **kwargs: Keyword arguments of the method.

        Raises:
            WorkerError: If fewer than ``min_results`` ranks can give a result; those that
                died or are late are unhealthy then.
            TypeError: As `flatweights.ray.average`.
            ValueError: As `flatweights.ray.average`.
        """
        _check_method(method)
        request = self._request(
            weights, sharded, timeout=timeout, min_results=min_results, nonfinite=nonfinite
        )
        result = self._average(method, args, kwargs, request, broadcast, out, travels, sharded)
        report(result, already_named=self._workers.unhealthy)
        return result

    def _request(self, weights: Weights, sharded: ShardedAverage | None, **options: Any) -> Request:
        """Return the checked arguments of a round, for all ranks of the group."""
        if sharded is not None:
            return sharded.request(len(self._workers), weights, **options)
        return Request.of(len(self._workers), weights, max_inflight=self._max_inflight, **options)

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
        if sharded is not None and (out is not None or self._sent.wire is not None):
            raise ValueError("sharded: expected neither out nor a wire_dtype with it")
        deadline = Deadline.after(request.timeout)
        ranks, broadcast = self._to_call(broadcast, deadline)
        if len(ranks) < (request.min_results or 1):
            raise WorkerError(self._workers.unhealthy)
        before = dict(self._workers.unhealthy)
        patience = math.inf if sharded is None else sharded.patience
        arrivals = Arrivals(deadline, patience=patience)
        try:
            with self._bringing(broadcast, ranks, arrivals) as payload:
                wire = self._sent.wire
                call = self._call(method, args, kwargs, payload)
                plan: ShardedPlan | DriverAverage
                if sharded is not None:
                    plan = ShardedPlan(sharded, arrivals, request)
                    self._send_out_cut(call, plan, ranks)
                elif wire is not None and (travels == "gradients" or wire.has_sent):
                    head = call.head._replace(wire=(wire.wire_dtype, travels))
                    self._send_out(call._replace(head=head), arrivals, ranks)
                    finish = functools.partial(wire.decode, travels=travels)
                    plan = DriverAverage(arrivals, request, out, widen=wire.widen, finish=finish)
                else:
                    self._send_out(call, arrivals, ranks)
                    plan = DriverAverage(arrivals, request, out)
                self._workers.lanes.offer()
                result: Round = plan.run()
                if sharded is None and out is None:
                    self._workers.lanes.made(result.weights)
        except WorkerError as error:
            raise WorkerError(before | error.failed) from error.__cause__
        if before:
            result.failed = dict(sorted((before | result.failed).items()))
        result.ways = {rank: self._workers[rank].way for rank in ranks}
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
        deadline = Deadline.after(timeout)
        ranks, rest = self._to_call(weights, deadline)
        if rest is None:
            return ranks
        arrivals = Arrivals(deadline)
        with self._bringing(weights, ranks, arrivals, alone=True) as payload:
            begin = time.monotonic()
            self._send_out(self._call(payload=payload), arrivals, ranks)
            arrivals.collect()
            _note_seconds(weights, "broadcast", time.monotonic() - begin)
        raised = _raised(arrivals.failed)
        if raised or not arrivals.arrived:
            raise WorkerError(raised or self._workers.unhealthy)
        return sorted(arrivals.arrived)

    def restore(self, *, timeout: float | None = _PROBE) -> list[int]:
        """Send unhealthy workers the latest weights; return the ranks that have them.

        They are healthy again. It asks each worker once: one that Ray is still restarting, or that
        still owes a late answer, stays unhealthy. Call it again later, as `run` does before
        each round.

        Args:
            timeout: Seconds to wait for the answers of those that were asked; for ever, if None.
        """
        return sorted(self._probe(Deadline.after(timeout)).arrived)

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
            weights, sharded, timeout=timeout, min_results=min_results, nonfinite=nonfinite
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
                if self._in_round and self._sent.version is not None:
                    ranks = self._workers.settle(Deadline.after(timeout))
                    # A late rank may have taken all of the time, and the others are not late.
                    arrivals = self._send_in_full(ranks, Deadline.after(timeout))
                    self._workers.unhealthy |= arrivals.failed
                if self._workers.unhealthy:
                    self.restore(timeout=_PROBE if timeout is None else min(_PROBE, timeout))
                self._in_round = True
                result = average()
                self.broadcast(result, timeout=timeout)
                self._in_round = False
                result.seconds["round"] = time.monotonic() - begin
                result.number = number
                report(result, already_named=self._workers.unhealthy)
                if show is not None:
                    show(result)
                yield result
                del result  # while the next one is made

    def shutdown(self) -> None:
        """End all actors; their processes are gone soon after."""
        self._workers.shut_down()
        self._arguments.clear()
        self._sent = _Sent()

    def _call(
        self,
        method: str | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] = {},
        payload: Payload | None = None,
    ) -> Call:
        """Return the next call, on the latest weights, which ``payload`` brings if it is given."""
        head = Head(self._stamps.next(), self._sent.version)
        return Call(head, method, args, kwargs, payload)

    def _send_out(self, call: Call, arrivals: Arrivals, ranks: Sequence[int]) -> None:
        """Call ``ranks``; their answers are to arrive in ``arrivals``."""
        for rank in ranks:
            arrivals.expect(rank, self._workers[rank].call(call))

    def _send_out_cut(self, call: Call, plan: ShardedPlan, ranks: Sequence[int]) -> None:
        """As `_send_out`, for a plan over shards; workers cut the result unless nodes add up."""
        head, method, args, kwargs, payload = call
        weights = argument_of(payload)
        num_shards = plan.reading.num_shards
        for rank in ranks:
            handle = self._workers[rank].handle
            if num_shards:
                run = handle.call_cut.options(num_returns=1 + num_shards)
                refs = run.remote(head, weights, plan.reading, rank, method, *args, **kwargs)
            else:
                refs = [handle.call_version.remote(head, weights, method, *args, **kwargs)]
            plan.expect(rank, *refs)

    def _make_latest(self, weights: Any, ranks: Sequence[int]) -> Payload:
        """Make ``weights`` ready for ``ranks``; from then on they are the latest.

        An error before that changes nothing; workers that do not answer afterwards miss them.
        """
        begin = time.monotonic()
        payload, wire = self._to_send(weights)
        for rank in ranks:
            self._workers[rank].prepare(payload)
        _note_seconds(weights, "put", time.monotonic() - begin)
        self._sent = _Sent(self._stamps.next(), payload, wire)
        reach("sending")
        return payload

    @contextlib.contextmanager
    def _bringing(
        self, weights: Any, ranks: Sequence[int], arrivals: Arrivals, *, alone: bool = False
    ) -> Iterator[Payload | None]:
        """Have calls bring ``weights``, unless these are None; end their round.

        Where some ranks refused them, those are unhealthy; where all did, nothing was sent. The
        same if no call could be made.

        Args:
            weights: The weights.
            ranks: The ranks that are called.
            arrivals: Their answers.
            alone: Whether the calls run no method, so that all errors are about the weights.
        """
        before = self._sent
        payload = None
        took: set[int] | None = None
        try:
            if weights is not None and ranks:
                payload = self._make_latest(weights, ranks)
            yield payload
            if payload is not None and not alone:
                took = self._find_out_who_took(arrivals)
        except WorkerError as error:
            if payload is not None:
                took = self._find_out_who_took(arrivals)
                # Raised for the first that refused: others may have set them, or refused, too.
                while _refusals(arrivals) and not took and (came := arrivals.wait()) is not None:
                    for rank in came:
                        arrivals.take(rank)
                    took = self._find_out_who_took(arrivals)
            raise WorkerError(error.failed | _refusals(arrivals)) from error.__cause__
        except Exception:
            if not arrivals.answers:  # no call could be made
                self._sent = before
            raise
        finally:
            # Also if something other than a rank's failure has broken the round off.
            self._workers.close(arrivals)
            if payload is not None:
                refused = _raised(arrivals.failed) if alone else _refusals(arrivals)
                if took is None:
                    took = arrivals.arrived if alone else _may_have_taken(arrivals)
                if refused and not took and arrivals.unanswered.keys() <= {*arrivals.late}:
                    self._sent = before
                else:
                    self._workers.unhealthy |= refused
                METRICS.count_sent(len(took) * payload.nbytes)
                if isinstance(weights, Round):
                    weights.nbytes_sent = len(took) * payload.nbytes

    def _find_out_who_took(self, arrivals: Arrivals) -> set[int]:
        """Return the ranks that have set the weights that a call brought.

        If no rank gave a result, those that raised are asked. One that has other weights did not
        begin the call: an argument failed, such as a reference to an object that is lost. It
        counts as one that refused.
        """
        raised = _may_have_taken(arrivals)
        if arrivals.arrived or arrivals.quarantined or not raised:
            return raised
        asked = Arrivals(Deadline.after(_PROBE))
        try:
            self._send_out(self._call(), asked, sorted(raised))
            asked.collect()
            for rank in [rank for rank, error in asked.failed.items() if is_stale(error)]:
                del asked.failed[rank]
                raised.remove(rank)
                error = arrivals.failed[rank]
                refusal = RefusedWeightsError(f"the call did not begin: {reason_of(error)}")
                refusal.__cause__ = error
                arrivals.failed[rank] = refusal
        finally:
            self._workers.close(asked)
        return raised

    def _to_send(self, weights: Any) -> tuple[Payload, GroupWire | None]:
        """Return the payload for ``weights``, and the wire once it is sent."""
        value, wire = weights, self._sent.wire
        if isinstance(weights, ShardedRound) and wire is None and not weights.is_changed:
            value = weights.shards
        elif isinstance(weights, Round):
            value = weights.weights
        if wire is not None:
            model = ray.get(value) if isinstance(value, ray.ObjectRef) else value
            message, wire = wire.message(model)
            return self._payload(message), wire
        if isinstance(value, FlatWeights) and value.buffer.nbytes <= BY_VALUE:
            # The caller's may change before a restart wants it.
            value = value.copy() if value.buffer.flags.writeable else value
        payload = self._payload(value)
        if isinstance(weights, Round) and not isinstance(value, ShardedWeights):
            payload.put = weights.current_ref
        return payload, None

    def _payload(self, value: Any) -> Payload:
        """Return ``value`` as a payload."""
        is_sharded = isinstance(value, ShardedWeights)
        nbytes = value.layout.nbytes if is_sharded else nbytes_of(value) or size_of(value) or 0
        ranks = len(self._workers)  # not the group: a cycle would keep its actors
        return Payload(value, nbytes, lambda: put(value, ranks))

    def _to_call(self, weights: Any, deadline: Deadline) -> tuple[list[int], Any]:
        """Return the healthy ranks, and the weights that calls are to bring them.

        If none is healthy, ``weights`` are sent at once to those that can be reached: these ranks
        are returned, and None.

        Raises:
            WorkerError: If none took them.
        """
        ranks = self._workers.settle(deadline)
        if ranks or weights is None:
            return ranks, weights
        before, arrivals = self._sent, None
        try:
            self._make_latest(weights, ranks)
            arrivals = self._probe(deadline)
        finally:
            if arrivals is None or not (arrivals.arrived or arrivals.late):
                self._sent = before
        if not arrivals.arrived:
            raise WorkerError(self._workers.unhealthy)
        if isinstance(weights, Round):
            sent = self._sent.full or self._sent.payload
            assert sent is not None
            weights.nbytes_sent = len(arrivals.arrived) * sent.nbytes
        return sorted(arrivals.arrived), None

    def _probe(self, deadline: Deadline) -> Arrivals:
        """Send unhealthy ranks the latest weights; those that have them are healthy again."""
        arrivals = self._send_in_full(self._workers.to_probe(), deadline)
        self._workers.unhealthy |= arrivals.failed
        self._workers.heal(sorted(arrivals.arrived))
        return arrivals

    def _send_in_full(self, ranks: Sequence[int], deadline: Deadline) -> Arrivals:
        """Send the latest weights to ``ranks``, which may have missed earlier ones.

        If none were broadcast yet, these ranks only say whether they were restarted.
        """
        sent = self._sent
        if sent.wire is not None and sent.wire.has_sent and sent.full is None:
            self._sent = sent = sent._replace(full=self._payload(sent.wire.snapshot()))
        payload = sent.full or sent.payload
        arrivals = Arrivals(deadline)
        try:
            if payload is not None:
                for rank in ranks:
                    self._workers[rank].prepare(payload)
            self._send_out(self._call(payload=payload), arrivals, ranks)
            arrivals.collect()
        finally:
            self._workers.close(arrivals)
            if payload is not None:
                METRICS.count_sent(len(arrivals.arrived) * payload.nbytes)
        return arrivals


def _check_method(method: str) -> None:
    """Raise unless ``method`` is a name: a call without one would only set weights."""
    if not isinstance(method, str):
        raise TypeError(f"method: expected a name, got {method!r}")


def _note_seconds(weights: Any, step: str, seconds: float) -> None:
    """Note how long a step of sending ``weights`` took: in the metrics, and in a round."""
    METRICS.observe({step: seconds})
    if isinstance(weights, Round):
        weights.seconds[step] = seconds


def _refusals(arrivals: Arrivals) -> dict[int, Exception]:
    """Return the errors of ranks that could not set the weights that a call brought."""
    return {rank: error for rank, error in arrivals.failed.items() if is_refusal(error)}


def _may_have_taken(arrivals: Arrivals) -> set[int]:
    """Return the ranks that have answered a call that brought weights, and did not refuse them."""
    if not arrivals.failed:
        return arrivals.arrived
    return arrivals.arrived | _raised(arrivals.failed).keys() - _refusals(arrivals).keys()


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
