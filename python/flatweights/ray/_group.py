"""Several workers that are called together, some of which may be slow or dead."""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import ray

from flatweights._average import Nonfinite, read_weights
from flatweights._weights import FlatWeights
from flatweights.ray._actors import Actors, raised
from flatweights.ray._average import Job, Weights, count, late_error
from flatweights.ray._errors import WorkerError
from flatweights.ray._metrics import METRICS
from flatweights.ray._progress import RoundsBar
from flatweights.ray._report import report
from flatweights.ray._round import Round
from flatweights.ray._sharded import ShardedAverage
from flatweights.ray._sharded_job import ShardedJob
from flatweights.ray._sharded_round import ShardedRound, ShardedWeights
from flatweights.ray._shards import Reading
from flatweights.ray._store import StoreTooSmallError, put, size_of
from flatweights.ray._wire import GroupWire, Travels, nbytes_of, widen
from flatweights.ray._worker import FlatWorker
from flatweights.wire import WireDType

# Up to here arguments travel with the call and results with its reply; beyond, a value is
# better put into the object store once than pickled into each call.
# Measured: with four actors, by value 2.3 ms against 3.3 ms by reference up to 100 KiB of
# pickle, 4.8 ms beyond. Some of that is the layout's.
_BY_VALUE = 96 * 1024

_versions = itertools.count()  # no two groups of a driver send weights of one version


class _Outgoing(NamedTuple):
    """What workers are sent: a value, or a reference to one, and its bytes if they are known."""

    message: Any = None
    nbytes: int = 0


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
                Workers have what was broadcast but for the rounding of one difference,
                and all the same. Weights have to be by name, with the same layout both ways.

        Raises:
            ValueError: If there is no actor, or ``wire_dtype`` is another one.
            TypeError: If one is no actor of a `FlatWorker` class.
        """
        self._actors = Actors(actors)
        self._max_inflight = count(max_inflight, "max_inflight", None)
        self._version: int | None = None  # of the latest weights that were sent
        self._latest = _Outgoing()
        self._wire = None if wire_dtype is None else GroupWire(wire_dtype)
        # In full, of the latest weights, once it is needed.
        self._snapshot: _Outgoing | None = None
        self._in_round = False  # of run(): workers may have trained since the latest weights
        self._arguments: list[Sequence[Any]] = []  # of the actors, for those that are restarted

    @classmethod
    def create(
        cls,
        worker: type[FlatWorker],
        n: int,
        *args: Any,
        max_inflight: int = 4,
        wire_dtype: WireDType | None = None,
        arguments: Callable[[int], Sequence[Any]] | None = None,
        **ray_options: Any,
    ) -> "WorkerGroup":
        """Start ``n`` actors of the class ``worker``.

        Args:
            worker: A subclass of `FlatWorker`, not yet made an actor.
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
        if not (isinstance(worker, type) and issubclass(worker, FlatWorker)):
            raise TypeError(f"worker: expected a subclass of FlatWorker, got {worker!r}")
        if n < 1:
            raise ValueError(f"n: expected at least 1, got {n}")
        if wire_dtype is not None:
            GroupWire(wire_dtype)  # raises before an actor is started
        remote = ray.remote(worker)
        if ray_options:
            remote = remote.options(**ray_options)
        given = [arguments(rank) if arguments else () for rank in range(n)]
        if ray_options.get("max_restarts"):
            # Ray lets go of large arguments once an actor is built, and a restart wants them.
            args = _by_reference(args)
            given = [_by_reference(own) for own in given]
        group = cls(
            [remote.remote(*args, *own) for own in given],
            max_inflight=max_inflight,
            wire_dtype=wire_dtype,
        )
        group._arguments = [args, *given]
        return group

    def actors(self) -> dict[int, Any]:
        """Return the actors by rank."""
        return dict(enumerate(self._actors.handles))

    def healthy_actor_ids(self) -> list[int]:
        """Return the ranks that are called."""
        return self._actors.healthy()

    def num_healthy_actors(self) -> int:
        """Return how many ranks are called."""
        return len(self.healthy_actor_ids())

    def is_actor_healthy(self, rank: int) -> bool:
        """Whether ``rank`` is called."""
        return rank not in self._actors.unhealthy

    @property
    def unhealthy(self) -> Mapping[int, Exception]:
        """By rank, why actors are not called."""
        return dict(sorted(self._actors.unhealthy.items()))

    def step(
        self, method: str, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> dict[int, Any]:
        """Call ``method`` of all healthy workers; return the results by rank.

        Ranks that die, or that are late, are left out and unhealthy from then on.

        Args:
            method: Name of the method.
            *args: Arguments; ``ray.put`` large ones once.
            timeout: Seconds to wait; for ever, if None.
            **kwargs: Keyword arguments.

        Raises:
            WorkerError: If a method raised, or no rank has answered.
        """
        refs = self._call(method, args, kwargs)
        results, failed = self._actors.collect(refs, timeout)
        self._actors.note(failed)
        by_methods = raised(failed)
        if by_methods or not results:
            raise WorkerError(by_methods or self._actors.unhealthy)
        return results

    def average(
        self,
        method: str = "get_weights",
        *args: Any,
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

        Args:
            method: Name of a method that returns weights, or weights and extras.
            *args: Its arguments; ``ray.put`` large ones once.
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
            sharded: Averages past the driver; gives a `ShardedRound`. Workers then cut what they
                return themselves, unless nodes add up first. Not with ``out`` or a ``wire_dtype``.
            **kwargs: Keyword arguments of the method.

        Raises:
            WorkerError: If fewer than ``min_results`` ranks can give a result; those that
                died or are late are unhealthy then.
            TypeError: As `flatweights.ray.average`.
            ValueError: As `flatweights.ray.average`.
        """
        found = self._average(
            method,
            *args,
            weights=weights,
            out=out,
            timeout=timeout,
            min_results=min_results,
            nonfinite=nonfinite,
            travels=travels,
            sharded=sharded,
            **kwargs,
        )
        report(found, said=self._actors.unhealthy)
        return found

    def _average(
        self,
        method: str,
        *args: Any,
        weights: Weights,
        timeout: float | None,
        min_results: int | None,
        nonfinite: Nonfinite,
        out: Any = None,
        travels: Travels = "weights",
        sharded: ShardedAverage | None = None,
        **kwargs: Any,
    ) -> Round:
        """As `average`, which reports it."""
        if sharded is not None and (out is not None or self._wire is not None):
            raise ValueError("sharded: expected neither out nor a wire_dtype with it")
        given = weights
        if not (given is None or callable(given)):
            given = read_weights(given, len(self._actors))
        count(min_results, "min_results", len(self._actors))
        ranks = self.healthy_actor_ids()
        if len(ranks) < (min_results or 1):
            raise WorkerError(self._actors.unhealthy)
        values = [given[rank] for rank in ranks] if isinstance(given, list) else given
        limits: dict[str, Any] = {
            "timeout": timeout,
            "min_results": min_results,
            "nonfinite": nonfinite,
        }
        job: Job | ShardedJob
        if sharded is None:
            wide = self._wire.widen if self._wire is not None else widen
            limits |= {"max_inflight": self._max_inflight, "widen": wide}
            job = Job.of(len(ranks), values, **limits)
        else:
            job = sharded.job(len(ranks), values, **limits)
        before = dict(self._actors.unhealthy)
        encoded = self._wire is not None and (travels == "gradients" or self._wire.has_sent)
        pieces: list[list[Any]] | None = None
        if isinstance(job, ShardedJob) and job.reading.shards:
            refs, pieces = self._call_cut(job.reading, method, args, kwargs)
        else:
            refs = self._call(method, args, kwargs, travels if encoded else None)
        found: Round
        try:
            if isinstance(job, ShardedJob):
                found = job.run(list(refs.values()), pieces)
            else:
                found = job.run(list(refs.values()), out)
        except WorkerError as error:
            failed = {ranks[k]: reason for k, reason in error.failed.items()}
            raise WorkerError(dict(sorted((before | failed).items()))) from error.__cause__
        finally:
            # Also if it was not for a rank's failure that there is no average.
            late = {ranks[k]: late_error(timeout) for k in job.arrivals.late}
            self._actors.owed |= {rank: refs[rank] for rank in late}
            self._actors.note({ranks[k]: error for k, error in job.arrivals.failed.items()} | late)
            refs.clear()  # who keeps an error keeps this frame
            if pieces is not None:
                pieces.clear()
        if self._wire is not None and encoded:
            found.weights = self._wire.decode(found.weights, travels)
        found.used = tuple(ranks[k] for k in found.used)
        found.late = tuple(late)
        found.quarantined = tuple(ranks[k] for k in found.quarantined)
        failed = {ranks[k]: reason for k, reason in found.failed.items()}
        found.failed = dict(sorted((before | failed).items()))
        found.extras = {ranks[k]: extras for k, extras in found.extras.items()}
        if isinstance(found, ShardedRound):
            found.groups = tuple(tuple(ranks[k] for k in group) for group in found.groups)
        return found

    def broadcast(self, weights: Any, *, timeout: float | None = None) -> list[int]:
        """Send ``weights`` to all healthy workers; they have them from then on.

        Args:
            weights: What `FlatWorker.set_weights` takes, a vector, a `Round` (of a `ShardedRound`
                workers fetch the pieces themselves), its `ShardedRound.pieces`, or a reference
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
        ranks = self.healthy_actor_ids()
        if not ranks:
            raise WorkerError(self._actors.unhealthy)
        before = self._version, self._latest
        begin = time.monotonic()
        self._latest = self._to_send(weights)
        self._snapshot = None
        self._version = next(_versions)
        put = time.monotonic()
        answered, failed = self._send(ranks, timeout)
        seconds = {"put": put - begin, "broadcast": time.monotonic() - put}
        METRICS.observe(seconds)
        if isinstance(weights, Round):
            weights.seconds = {**weights.seconds, **seconds}
            weights.nbytes_sent = len(answered) * self._latest.nbytes
        by_methods = raised(failed)
        if by_methods and not answered:
            self._version, self._latest = before
            if self._wire is not None:
                self._wire.forget()
            raise WorkerError(by_methods)
        self._actors.unhealthy |= by_methods
        if by_methods or not answered:
            raise WorkerError(by_methods or failed)
        return list(answered)

    def restore(self, *, timeout: float | None = 10.0) -> list[int]:
        """Send unhealthy workers the latest weights; return the ranks that have them.

        They are healthy again. A worker that was late is sent them once it has answered.

        Args:
            timeout: Seconds to wait for answers; for ever, if None.
        """
        ranks = self._actors.to_probe()
        if self._version is None:
            # Nothing to send: good is who has not lost what it had.
            asked = {rank: self._actors[rank].call_version.remote(None, "ping") for rank in ranks}
            answered, failed = self._actors.collect(asked, timeout)
        else:
            answered, failed = self._send(ranks, timeout, in_full=True)
        self._actors.unhealthy |= failed
        self._actors.heal(answered)
        return list(answered)

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
            sharded: See `average`; workers fetch the pieces, and no whole buffer is in the driver.
            progress: Show a progress bar, and the ranks that the last average is not of, if
                the standard output is a terminal or a notebook (needs ``rich``).
            **kwargs: Keyword arguments of the method.

        Raises:
            WorkerError: As `average` and `broadcast`.
        """
        with RoundsBar(rounds) if progress else contextlib.nullcontext() as bar:
            for number in range(1, rounds + 1):
                if self._actors.unhealthy:
                    self.restore()
                if self._in_round and self._version is not None:
                    ranks = self.healthy_actor_ids()
                    self._actors.unhealthy |= self._send(ranks, timeout, in_full=True)[1]
                self._in_round = True
                begin = time.monotonic()
                found = self._average(
                    method,
                    *args,
                    weights=weights,
                    timeout=timeout,
                    min_results=min_results,
                    nonfinite=nonfinite,
                    sharded=sharded,
                    **kwargs,
                )
                self.broadcast(found, timeout=timeout)
                self._in_round = False
                found.seconds = {**found.seconds, "round": time.monotonic() - begin}
                found.number = number
                report(found, said=self._actors.unhealthy)
                if bar is not None:
                    bar.advance(found)
                yield found
                del found  # while the next one is made

    def shutdown(self) -> None:
        """End all actors; their processes are gone soon after."""
        self._actors.shut_down()
        self._arguments.clear()
        self._latest, self._snapshot = _Outgoing(), None

    def _call(
        self,
        method: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        travels: Travels | None = None,
    ) -> dict[int, Any]:
        if self._wire is not None and travels is not None:
            wire = self._wire.wire_dtype, travels
            return {
                rank: self._actors[rank].call_encoded.remote(
                    self._version, wire, method, *args, **kwargs
                )
                for rank in self.healthy_actor_ids()
            }
        return {
            rank: self._actors[rank].call_version.remote(self._version, method, *args, **kwargs)
            for rank in self.healthy_actor_ids()
        }

    def _call_cut(
        self, reading: Reading, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[dict[int, Any], list[list[Any]]]:
        """Call ``method`` of workers that cut its result; return headers, and pieces."""
        headers: dict[int, Any] = {}
        pieces = []
        for k, rank in enumerate(self.healthy_actor_ids()):
            call = self._actors[rank].call_cut.options(num_returns=1 + reading.shards)
            headers[rank], *row = call.remote(self._version, reading, k, method, *args, **kwargs)
            pieces.append(row)
        return headers, pieces

    def _to_send(self, weights: Any) -> _Outgoing:
        pieces = weights.pieces if isinstance(weights, ShardedRound) else weights
        if isinstance(pieces, ShardedWeights) and self._wire is None:
            return _Outgoing(pieces, pieces.layout.nbytes)
        is_round = isinstance(weights, Round)
        if self._wire is not None:
            given = ray.get(weights) if isinstance(weights, ray.ObjectRef) else weights
            return self._small_or_put(self._wire.message(given.weights if is_round else given))
        if isinstance(weights, ray.ObjectRef):
            return _Outgoing(weights)
        value = weights.weights if is_round else weights
        nbytes = size_of(value) or 0
        if isinstance(value, FlatWeights) and value.buffer.nbytes <= _BY_VALUE:
            # The caller's may change before a restart wants it.
            return _Outgoing(value.copy(), nbytes)
        return _Outgoing(weights.ref if is_round else put(value, len(self._actors)), nbytes)

    def _small_or_put(self, message: Any) -> _Outgoing:
        nbytes = nbytes_of(message) or 0
        if 0 < nbytes <= _BY_VALUE:
            return _Outgoing(message, nbytes)
        try:
            return _Outgoing(put(message, len(self._actors)), nbytes)
        except StoreTooSmallError:
            if self._wire is not None:
                self._wire.forget()
            raise

    def _send(
        self, ranks: Sequence[int], timeout: float | None, *, in_full: bool = False
    ) -> tuple[dict[int, Any], dict[int, Exception]]:
        """Send the latest weights; return who has answered, and errors.

        Those who may have missed others before need them in full.
        """
        sent = self._latest
        if in_full and self._wire is not None:
            if self._snapshot is None:
                self._snapshot = self._small_or_put(self._wire.snapshot())
            sent = self._snapshot
        refs = {
            rank: self._actors[rank].receive_version.remote(self._version, sent.message)
            for rank in ranks
        }
        answered, failed = self._actors.collect(refs, timeout)
        METRICS.count_sent(len(answered) * sent.nbytes)
        self._actors.note(failed)
        return answered, failed


def _by_reference(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Return ``arguments`` with references to those that are too large to travel with a call."""
    return tuple(
        one
        if isinstance(one, ray.ObjectRef) or len(ray.cloudpickle.dumps(one)) <= _BY_VALUE
        else ray.put(one)
        for one in arguments
    )
