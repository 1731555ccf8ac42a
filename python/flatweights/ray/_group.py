"""Several workers that are called together; some of them may be slow or dead."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import ray

from flatweights._average import Nonfinite
from flatweights._numbers import check_count
from flatweights.ray import _clock
from flatweights.ray._worker import FlatWorker
from flatweights.ray.nodes._plan import ReduceDType, check_reduce_dtype
from flatweights.ray.peers._actor_spec import ActorSpec
from flatweights.ray.peers._by_rank import ByRank, check_by_rank
from flatweights.ray.peers._platform import PLATFORM, GroupPlatform
from flatweights.ray.peers._shared_actor import actor_class
from flatweights.ray.peers._store import check_cluster
from flatweights.ray.peers._wait import RoundSpec, Weights, check_timeout, deadline_in
from flatweights.ray.peers._worker_set import WorkerSet
from flatweights.ray.results._report import report, rounds_bar
from flatweights.ray.results._round import Round
from flatweights.ray.results._variables import Variables
from flatweights.ray.results._wire import GroupWire, PayloadKind
from flatweights.ray.rounds._as_completed import AsCompleted
from flatweights.ray.rounds._barrier import average_of, results_of, send
from flatweights.ray.rounds._run import RoundRun
from flatweights.ray.rounds._work import Work
from flatweights.ray.support._errors import SHUT_DOWN
from flatweights.ray.support._turn import Turn, alone
from flatweights.robust import AnyRule
from flatweights.wire import WireDType

_PROBE = 10.0  # seconds in which an unhealthy worker has to answer


class WorkerGroup:
    """Actors of a `FlatWorker` class, called together; ranks that fail are left out.

    The vocabulary is that of RLlib's actor manager: an actor is healthy until a call to it
    fails for a reason that Ray reports (it died, its node is gone) or because it does not answer
    in time. Weights that are sent bring unhealthy actors back: `broadcast`, a call with
    ``broadcast=`` and each round of `run` first send the latest weights to those that can be
    reached, without waiting for any. `restore` also waits. A method that raises leaves its actor
    healthy.

    Weights that the group sends have a version, and every call names the version that it needs.
    So an actor that Ray restarts (``max_restarts``) does not answer with the weights that it
    was built with, and no average contains results computed from older weights. A late actor is
    not called again before it has answered; that answer is dropped. The first call sends all actors
    the same weights (``initial``). Without them, a restarted actor stays unhealthy until there is a
    `broadcast`.

    One thread at a time may call a group: a call during another thread's call raises
    `RuntimeError`. So does a call within another one, in a function passed as ``weights=`` or
    ``rule=``, or in a signal handler; functions passed as ``arguments=`` and the like may call it.

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

    _platform: ClassVar[GroupPlatform] = PLATFORM

    def __init__(
        self,
        actors: Sequence[ray.actor.ActorHandle],
        *,
        max_inflight: int = 4,
        wire_dtype: WireDType | None = None,
        initial: Any = "lowest",
        reduce_dtype: ReduceDType = "float64",
    ) -> None:
        """Take actors of `FlatWorker` classes, by rank.

        Args:
            actors: Handles of the actors.
            max_inflight: The number of results that may be mapped at once; see `average`.
            wire_dtype: ``"bfloat16"`` or ``"float16"``: after the first `broadcast`, weights
                travel as differences of 16 bits, half the bytes of float32 both ways.
                The rounding error of each difference is added to the next one, and averages are
                float32. All workers have the same weights: the broadcast ones, except for the
                rounding of one difference. Between nodes, agents exchange 16 bits in both steps,
                and also add the rounding errors to the next exchange. Weights must be given by
                name, with the same layout both ways.
            initial: The weights that all workers start from. The first call sends them, unless it
                carries other weights. Any weights that `broadcast` takes; or ``"lowest"``, those of
                the lowest healthy rank; or None, if workers start from weights of their own.
                `FlatWorker.get_weights`, `FlatWorker.get_flat` and `FlatWorker.ping` read the
                workers' state and send no initial weights.
            reduce_dtype: How sums of several workers of a node travel to other nodes:
                ``"float64"``; or ``"float32"``, the average of a node's workers, rounded to their
                dtype, in half the bytes. It adds an error of half a unit in the last place of that
                average. With a ``wire_dtype``, sums travel in 16 bits, and this has no effect.

        Raises:
            ValueError: If there is no actor, or ``wire_dtype``, ``initial`` or ``reduce_dtype`` is
                not one of these.
            TypeError: If one is not an actor of a `FlatWorker` class.
        """
        wire = None if wire_dtype is None else GroupWire(wire_dtype)
        _check_initial(initial)
        self._worker_set = WorkerSet(actors, wire, initial, reduce_dtype, self._platform)
        self._max_inflight = check_count(max_inflight, "max_inflight")
        self._turn = Turn("WorkerGroup", self._platform.lock(), self._platform.thread)
        self._count = 0  # of rounds
        # The number of the latest weights when a round of `run` broke off: workers may have trained
        # since.
        self._unfinished = -1
        self._actor_spec: ActorSpec | None = None  # for the actors, from `create`

    @classmethod
    def create(
        cls,
        worker: type[FlatWorker] | Any,
        n: int,
        *args: Any,
        max_inflight: int = 4,
        wire_dtype: WireDType | None = None,
        initial: Any = "lowest",
        reduce_dtype: ReduceDType = "float64",
        arguments: Callable[[int], Sequence[Any]] | None = None,
        **ray_options: Any,
    ) -> WorkerGroup:
        """Start ``n`` actors of the class ``worker``.

        Args:
            worker: A subclass of `FlatWorker`, or the result of `ray.remote` for one.
            n: The number of actors.
            *args: Arguments for each constructor, and so for `FlatWorker.build`.
            max_inflight: See `average`.
            wire_dtype: See the constructor.
            initial: See the constructor.
            reduce_dtype: See the constructor.
            arguments: A function of the rank that returns more arguments, after ``args``.
            **ray_options: Ray's options for the actors: ``num_gpus=1``, ``max_restarts=-1``.

        Raises:
            TypeError: If ``worker`` is not a subclass of `FlatWorker`.
            ValueError: If ``n`` is less than 1.
        """
        check_cluster()
        remote = worker if isinstance(worker, ray.actor.ActorClass) else None
        plain = remote.__ray_actor_class__ if remote is not None else worker
        if not (isinstance(plain, type) and issubclass(plain, FlatWorker)):
            raise TypeError(f"worker: expected a subclass of FlatWorker, got {worker!r}")
        check_count(n, "n")
        check_count(max_inflight, "max_inflight")
        check_reduce_dtype(reduce_dtype)  # before an actor is started
        _check_initial(initial)
        if wire_dtype is not None:
            GroupWire(wire_dtype)
        actor_spec = ActorSpec(remote or actor_class(plain), args, arguments, ray_options)
        actors = actor_spec.start(range(n))
        try:
            group = cls(
                actors,
                max_inflight=max_inflight,
                wire_dtype=wire_dtype,
                initial=initial,
                reduce_dtype=reduce_dtype,
            )
        except BaseException:
            for actor in actors:
                ray.kill(actor)
            raise
        group._actor_spec = actor_spec
        return group

    def actors(self) -> dict[int, ray.actor.ActorHandle]:
        """Return the actors by rank."""
        return self._worker_set.ranks.handles()

    @alone
    def add(
        self,
        n: int = 1,
        *args: Any,
        actors: Iterable[ray.actor.ActorHandle] | None = None,
        arguments: Callable[[int], Sequence[Any]] | None = None,
        **ray_options: Any,
    ) -> list[int]:
        """Add workers; return their ranks at once, while their processes start.

        They take part, with the latest weights, in the first round after they are ready. This also
        holds in the body of a `run` or an `as_completed`, unless that has ``ranks`` without them.
        `Round.joined` then lists them. Until they are ready, calls leave them out, also if
        ``ranks`` name them. A worker that cannot be built is unhealthy. Ranks count up, and are
        never used again.

        ::

            for result in group.run(1_000, "train"):
                if result.number == 100:
                    group.add(2)

        Args:
            n: The number of workers.
            *args: Arguments for each constructor; without these and ``arguments``, those of
                `create`.
            actors: Actors of the group's class that already exist, instead of all other arguments.
            arguments: A function of the rank that returns more arguments.
            **ray_options: Ray's options for the actors, in addition to those of `create`.

        Raises:
            TypeError: If the group was made from actors, and ``actors`` are not given; or one of
                them is not an actor of a class that the group has.
            ValueError: If ``n`` is less than 1, or one of the actors is in the group.
            RuntimeError: If the group was shut down.
        """
        if actors is not None:
            if n != 1 or args or arguments is not None or ray_options:
                raise TypeError("actors: expected no other arguments beside them")
            return self._worker_set.ranks.add(actors)
        check_count(n, "n")
        if self._actor_spec is None:
            raise TypeError("actors: expected actors, since the group was made from actors")
        self._worker_set.ranks.check_open()
        actor_spec = self._actor_spec.with_more(args, arguments, ray_options)
        opened = self._turn.open_to_calls(actor_spec.arguments)
        actor_spec = dataclasses.replace(actor_spec, arguments=opened)
        first = self._worker_set.ranks.span

        def check() -> None:
            if self._worker_set.ranks.span != first:
                raise RuntimeError("arguments: expected a function that adds no workers itself")

        return self._worker_set.ranks.add(actor_spec.start(range(first, first + n), check))

    @alone
    def remove(self, ranks: Iterable[int] | int, *, kill: bool = True) -> None:
        """Remove workers: later rounds do not contain them.

        A worker that owes an answer first finishes its call, whose result is dropped. `Round.left`
        lists the ranks in the next round.

        Args:
            ranks: The ranks, or one rank.
            kill: Whether to end their processes; if not, the actors stay alive.

        Raises:
            TypeError: If a rank is not an integer.
            ValueError: If a rank is not in the group, is given twice, or no worker that is ready
                would be left.
        """
        removed = self._worker_set.remove(ranks, kill=kill)
        if kill and self._actor_spec is not None:
            self._actor_spec.forget(removed)

    def healthy_actor_ids(self) -> list[int]:
        """Return the ranks that are called."""
        return self._worker_set.ranks.healthy()

    def num_healthy_actors(self) -> int:
        """Return the number of ranks that are called."""
        return len(self.healthy_actor_ids())

    def is_actor_healthy(self, rank: int) -> bool:
        """Whether ``rank`` is called: the worker is ready, healthy, and was not removed."""
        return rank in self._worker_set.ranks.healthy()

    @property
    def unhealthy(self) -> Mapping[int, Exception]:
        """By rank, the reason for which an unhealthy actor is not called."""
        return self._worker_set.ranks.unhealthy()

    @alone
    def step(
        self,
        method: str,
        *args: Any,
        broadcast: Any = None,
        timeout: float | None = None,
        ranks: Iterable[int] | None = None,
        arguments: ByRank | None = None,
        **kwargs: Any,
    ) -> dict[int, Any]:
        """Call ``method`` of all healthy workers; return the results by rank.

        Ranks that die or are late are left out, and are unhealthy until weights are sent.

        Args:
            method: Name of the method.
            *args: Arguments; ``ray.put`` large ones once.
            broadcast: Weights that the workers set first, in the same call; see `average`.
            timeout: Seconds to wait; for ever, if None.
            ranks: The ranks to call; all, if None.
            arguments: A function of the rank that returns more arguments, after ``args``.
            **kwargs: Keyword arguments.

        Raises:
            WorkerError: If a method raised, or no rank has answered.
            TypeError: If ``method`` is not a name.
            ValueError: If ``ranks`` are not those of workers, each once.
        """
        work, timeout = self._work(method, args, kwargs, arguments), check_timeout(timeout)
        _refuse_model(broadcast, "broadcast")
        if broadcast is not None and self._worker_set.ranks.healthy():
            self._take_back(timeout)
        return results_of(self._worker_set, work, timeout, ranks, broadcast)

    @alone
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
        payload_kind: PayloadKind = "weights",
        rule: AnyRule | None = None,
        ranks: Iterable[int] | None = None,
        arguments: ByRank | None = None,
        **kwargs: Any,
    ) -> Round:
        """Call ``method`` of all healthy workers and average their results.

        See `flatweights.ray.average`. All ranks are those of the group.

        With ``broadcast``, workers first set these weights, in the same call. That does the same
        as `broadcast` followed by `average`, with half the messages. A worker that cannot set
        them does not run the method: its rank fails with a `RefusedWeightsError` and becomes
        unhealthy. If all ranks refuse them, all stay healthy, and the previous weights remain the
        latest. Unhealthy workers that can be reached come back. This loop sends each average with
        the next call::

            result = None
            for _ in range(1_000):
                result = group.average("train", broadcast=result)
            group.broadcast(result)

        Args:
            method: Name of a method that returns weights, or weights and extras.
            *args: Its arguments; ``ray.put`` large ones once.
            broadcast: Weights that the workers set first, in the same call, of any kind that
                `broadcast` takes. If None, they work on the weights that they have.
            weights: A sequence of weights by rank, from rank 0 to the last one, or a function of a
                worker's result. The weights of ranks that were removed do not count.
            out: The model to write to; a new one, if None.
            timeout: Seconds to wait for results.
            min_results: The number of ranks that an average needs. All healthy ranks, if None.
            nonfinite: What to do about NaN and infinity. With a ``wire_dtype``, workers refuse to
                send these, or numbers that do not fit, and the rank fails.
            payload_kind: With a ``wire_dtype``, the kind of the method's result: ``"weights"``, or
                ``"gradients"``, which are rounded directly and may be a vector; a vector comes
                back as the part ``"vector"``.
            rule: A rule that replaces the mean; see `flatweights.ray.average`.
            ranks: The ranks to call, such as a sample of them; all, if None. `Round.used`,
                `Round.failed` and `Round.late` contain no others. Workers that are not called get
                the weights of ``broadcast`` with a later call.
            arguments: A function of the rank that returns more arguments, after ``args``.
            **kwargs: Keyword arguments of the method.

        Raises:
            WorkerError: If fewer than ``min_results`` ranks can give a result; those that
                died or are late are unhealthy then.
            TypeError: As `flatweights.ray.average`; or if the method returned neither weights
                of the workers nor gradients.
            ValueError: As `flatweights.ray.average`; or if ``ranks`` are not those of workers,
                each once.
        """
        work = self._work(method, args, kwargs, arguments)
        spec = self._spec(
            weights, timeout=timeout, min_results=min_results, nonfinite=nonfinite, rule=rule
        )
        _refuse_model(broadcast, "broadcast")
        if payload_kind not in ("weights", "gradients"):
            raise ValueError(
                f"payload_kind: expected 'weights' or 'gradients', got {payload_kind!r}"
            )
        if broadcast is not None and self._worker_set.ranks.healthy():
            self._take_back(spec.timeout)
        result = average_of(self._worker_set, work, spec, ranks, broadcast, out, payload_kind)
        self._count += 1
        self._report(result)
        return result

    def _work(
        self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], arguments: ByRank | None
    ) -> Work:
        """Return the call of a round; its function of the ``arguments`` may call the group."""
        work = Work(method, args, kwargs, arguments)
        work.arguments = self._turn.open_to_calls(arguments)
        return work

    def _spec(self, weights: Weights, **options: Any) -> RoundSpec:
        """Return the checked arguments of a round, for all ranks of the group."""
        ranks = self._worker_set.ranks
        ranks.admit()
        options["max_inflight"] = self._max_inflight
        return RoundSpec.of(len(ranks), weights, span=ranks.span, **options)

    @alone
    def broadcast(self, weights: Any, *, timeout: float | None = None) -> list[int]:
        """Send ``weights`` to all healthy workers, which set them.

        Then it sends them to unhealthy workers that owe no answer; those that set them are healthy
        again. If no worker is healthy, and none sets them or is late, nothing has changed.

        Args:
            weights: Weights that `FlatWorker.set_weights` takes, a vector, a `Round`, or a
                reference to one of the first two. They are put into the object store once, unless
                they are small. With a ``wire_dtype``, no vector. NaN and infinity are not looked
                for (`flatweights.isfinite` does), except with a ``wire_dtype``, which refuses them.
            timeout: Seconds to wait; for ever, if None.

        Returns:
            The ranks that have the weights. Ranks that died or are late get them with a later call
            that sends weights, or from `restore`.

        Raises:
            WorkerError: If a worker raised, or none has the weights. If none set them and some
                raised, the previous weights remain the latest; workers with a ``set_weights`` of
                their own, which may have failed half-way, get them again before their next call. If
                only some raised, those are unhealthy: they do not have the weights of the others.
            StoreTooSmallError: If the object store has no room for them; nothing was sent.
        """
        if weights is None:
            raise TypeError("weights: expected weights to send, got None")
        _refuse_model(weights, "weights")
        timeout = check_timeout(timeout)
        ranks = send(self._worker_set, weights, timeout)
        return sorted({*ranks, *self._take_back(timeout)})

    def publish(self, weights: Any) -> None:
        """Make a copy of ``weights`` the latest; return at once.

        Each worker gets the latest weights with its next call, and skips those that were published
        in between; no worker gets a mixture of two publications. Use it with loops of
        `as_completed`: in the body, or in another thread, which may be one that optimizes while the
        loop waits for results. Workers of other calls get these weights before their next call.
        Each byte moves once, in the calling thread; and once more for each worker, in the thread of
        the loop, if that was waiting.

        Args:
            weights: Arrays by name, a vector, a `Round`, or a reference to one of the first two. A
                subset of the weights by name leaves the others unchanged. NaN and infinity: as in
                `broadcast`.

        Raises:
            TypeError: If they are anything else.
            ValueError: If a subset follows a vector.
            RuntimeError: If another thread is in a call of the group, other than `as_completed`.
        """

        def publish(is_alone: bool) -> None:
            self._worker_set.ranks.check_open()
            self._worker_set.publish(weights, in_segment=is_alone)

        self._turn.beside(publish)

    def as_completed(
        self,
        method: str,
        *args: Any,
        updates: int | None = None,
        buffer: int = 1,
        max_staleness: int | None = None,
        weights: Weights = None,
        nonfinite: Nonfinite = "raise",
        rule: AnyRule | None = None,
        timeout: float | None = None,
        ranks: Iterable[int] | None = None,
        arguments: ByRank | None = None,
        **kwargs: Any,
    ) -> Generator[Round, None, None]:
        """Yield results as they arrive, each as a `Round`: no worker waits for another.

        All healthy workers always have a call. A worker is called again, with the latest weights,
        when the body of the loop asks for the next result. The body sets the latest weights by
        `publish`::

            for result in group.as_completed("gradient", updates=10_000):
                optimizer.step(result.weights)  # an Adam of flatweights.server
                group.publish(optimizer.weights)

        `Round.staleness` is the number of publications since the weights that a result was
        computed from. With N workers it is N - 1 on average, if each result is followed by a
        publication. A fast worker cannot delay the results of others: the oldest call comes first.

        A worker that dies or is late is listed in the next `Round.failed` or `Round.late`. It
        comes back with the latest weights, as in `run`, and its earlier results are not yielded.
        After the loop, also after ``break`` or an error, workers finish their current call. The
        group is then ready for any other call, which waits for them. Calls in the body also wait
        for all workers, and keep their results for later rounds.

        Results of workers on other nodes come through Ray's object store, and so do weights of a
        group with a ``wire_dtype``, in full.

        Args:
            method: Name of a method that returns weights or gradients, perhaps with extras.
            *args: Its arguments.
            updates: The number of rounds; no limit, if None.
            buffer: The number of results in a round: the next ones, of different workers, are
                averaged, as in FedBuff. No round has two results of one worker: while a worker's
                second result waits for the next round, the worker is not called. If fewer workers
                are left, because others died, are late or were removed, a round has fewer results.
            max_staleness: Results staler than this are left out; `Round.stale` lists their ranks.
                Their workers continue with the latest weights.
            weights: See `average`.
            nonfinite: What to do about NaN and infinity; with ``"skip"``, the next round lists the
                ranks. If every worker returns some before there is one, that is an error.
            rule: See `average`.
            timeout: Seconds after which a worker that has not answered is late.
            ranks: The ranks to call; if None, all, including workers that are added later.
            arguments: A function of the rank that returns more arguments, after ``args``.
            **kwargs: Keyword arguments of the method.

        Raises:
            WorkerError: If a method raised, all workers are dead or late, or all have returned NaN
                or infinity.
            TypeError: As `average`.
            ValueError: As `average`; or if ``updates``, ``buffer`` or ``max_staleness`` is out of
                range.
        """
        work = self._work(method, args, kwargs, arguments)
        if updates is not None:
            updates = check_count(updates, "updates", least=0)
        if max_staleness is not None:
            max_staleness = check_count(max_staleness, "max_staleness", least=0)

        def loop() -> AsCompleted:
            spec = self._spec(
                weights, timeout=timeout, min_results=None, nonfinite=nonfinite, rule=rule
            )
            asked = None if ranks is None else self._worker_set.ranks.check(ranks)
            most = len(asked or self._worker_set.ranks)
            size = check_count(buffer, "buffer", most)
            return AsCompleted(self._worker_set, work, spec, asked, size, max_staleness)

        return self._results(self._turn.run(loop), updates)

    def _results(self, loop: AsCompleted, updates: int | None) -> Generator[Round, None, None]:
        """Yield at most ``updates`` rounds of a loop; end it when the caller ends."""
        is_closing = False

        def close() -> None:
            nonlocal is_closing
            is_closing = True
            loop.close()

        try:
            self._turn.briefly(loop.begin)
            number = 0
            while updates is None or number < updates:
                number += 1
                result = self._turn.run(loop.next, admits=True)
                self._count += 1
                yield result
                del result  # before the next one is made
        finally:
            # It changes nothing within another call: the next call drops the answers.
            try:
                self._turn.briefly(close)
            except RuntimeError:
                if is_closing:
                    raise

    @alone
    def restore(self, *, timeout: float | None = _PROBE) -> list[int]:
        """Send unhealthy workers the latest weights; return the ranks that have them.

        These ranks are healthy again. Until its time is up, it waits for workers that still owe a
        late answer and for workers that Ray is restarting, but not for workers that Ray gave up.
        `broadcast`, calls with ``broadcast=`` and rounds of `run` do the same without waiting, and
        so do all calls if no worker is healthy.

        Args:
            timeout: Seconds to wait; for ever, if None.
        """
        return self._worker_set.restore(deadline_in(timeout))

    @alone
    def run(
        self,
        rounds: int,
        method: str,
        *args: Any,
        weights: Weights = None,
        timeout: float | None = None,
        min_results: int | None = None,
        nonfinite: Nonfinite = "raise",
        rule: AnyRule | None = None,
        ranks: Iterable[int] | Callable[[int], Iterable[int]] | None = None,
        arguments: ByRank | None = None,
        round_arguments: Callable[[int], Sequence[Any]] | None = None,
        progress: bool = False,
        **kwargs: Any,
    ) -> Iterator[Round]:
        """Yield ``rounds`` rounds: average the results of ``method``, send it to all workers.

        Unhealthy workers are probed before each round, and come back with the latest weights. If
        an earlier run broke off in the middle of a round, all workers are first sent the latest
        weights, since some may have continued to train.

        Args:
            rounds: The number of rounds.
            method: Name of the method that trains and returns weights.
            *args: Its arguments.
            weights: See `average`.
            timeout: Seconds to wait for the results of each round, and for workers to take
                the average.
            min_results: The number of ranks that an average needs.
            nonfinite: What to do about NaN and infinity.
            rule: See `average`.
            ranks: The ranks to call; or a function of the number of the round, from 1, that
                returns them. All ranks get the average.
            arguments: A function of the rank that returns more arguments, at the end.
            round_arguments: A function of the number of the round, from 1, that returns more
                arguments, after ``args``: a step, a learning rate, a seed.
            progress: Show a progress bar, and the ranks that were left out of the last average, if
                the standard output is a terminal or a notebook (needs ``rich``).
            **kwargs: Keyword arguments of the method.

        Raises:
            WorkerError: As `average` and `broadcast`.
            TypeError: As `average`; or if the method returned a list, or another vector than the
                weights, which workers cannot be sent.
        """
        rounds = check_count(rounds, "rounds", least=0)
        check_by_rank(round_arguments, "round_arguments", "number of the round")
        work = self._work(method, args, kwargs, arguments)
        spec = self._spec(
            weights, timeout=timeout, min_results=min_results, nonfinite=nonfinite, rule=rule
        )

        if callable(ranks):
            ranks = self._turn.open_to_calls(ranks)
        elif ranks is not None:
            ranks = self._worker_set.ranks.check(ranks)
        more = self._turn.open_to_calls(round_arguments)
        run = RoundRun(self._worker_set, work, spec, ranks, more)
        return self._rounds(rounds, run, progress)

    def _rounds(self, rounds: int, run: RoundRun, progress: bool) -> Iterator[Round]:
        """Yield the rounds of `run`, whose arguments are checked."""
        with rounds_bar(rounds) if progress else contextlib.nullcontext() as show:
            for number in range(1, rounds + 1):
                result = self._round(number, run)
                if show is not None:
                    show(result)
                yield result
                del result  # before the next one is made

    @alone
    def _round(self, number: int, run: RoundRun) -> Round:
        """Make the round ``number`` of `run`: average, and send the average to all workers."""
        begin, timeout = _clock.now(), run.spec.timeout
        if self._unfinished == self._worker_set.latest.number:
            self._worker_set.mark_stale()
        self._take_back(timeout)
        try:
            result = run.average(number)
            self._count += 1
            send(self._worker_set, result, timeout)
        except BaseException:
            self._unfinished = self._worker_set.latest.number
            raise
        result.seconds["round"] = _clock.now() - begin
        result.number = number
        self._report(result)
        return result

    def _take_back(self, timeout: float | None) -> list[int]:
        """Send the latest weights to unhealthy workers that can be reached; return their ranks.

        Answers that healthy workers owe are waited for first, for ``timeout`` at most.
        """
        seconds = _PROBE if timeout is None else min(_PROBE, timeout)
        return self._worker_set.take_back(seconds, timeout)

    def _report(self, result: Round) -> None:
        """Report a round; no later one lists the ranks again that have joined and left."""
        self._worker_set.ranks.forget_news(result.joined, result.left)
        report(result, already_named=self.unhealthy if result.failed or result.late else ())

    def shutdown(self) -> None:
        """End all actors; their processes end soon after.

        A signal handler and other threads may do so while a call runs, which then raises
        `RuntimeError`.

        A group is also a context manager that calls this at its end::

            with WorkerGroup.create(Worker, 4) as group:
                ...
        """
        self._worker_set.shut_down()
        if self._worker_set.ranks.over == SHUT_DOWN:  # unless this is a fork
            self._turn.end(SHUT_DOWN, self._worker_set.close)
        if self._actor_spec is not None:
            self._actor_spec.forget([*self._actor_spec.kept])

    def __enter__(self) -> WorkerGroup:
        """Return the group."""
        return self

    def __exit__(self, *error: object) -> None:
        """Shut down, even after an error."""
        self.shutdown()

    def __reduce__(self) -> NoReturn:
        """Refuse: a group belongs to its process."""
        raise TypeError(
            "a WorkerGroup cannot be pickled: pass list(group.actors().values()), and make a "
            "WorkerGroup of them in the process that calls it"
        )

    def __repr__(self) -> str:
        """Ranks, health, rounds and the transports to the workers.

        For example, ``<WorkerGroup of 4 ranks, 3 healthy (2: ActorDiedError), 2 rounds, shm>``.
        """
        worker_set = self._worker_set
        whys = [
            f"{rank}: {type(why).__name__}" for rank, why in worker_set.ranks.unhealthy().items()
        ]
        healthy = f"{len(worker_set.ranks) - len(whys)} healthy" + (
            f" ({', '.join(whys)})" if whys else ""
        )
        transports = {
            worker_set.ranks[rank].worker.transport.partition(":")[0]
            for rank in worker_set.ranks.healthy()
        }
        names = [name for name in ("shm", "store") if name in transports]
        parts = [
            f"{len(worker_set.ranks)} ranks",
            healthy,
            f"{self._count} rounds",
            " and ".join(names),
        ]
        return f"<{type(self).__name__} of {', '.join(filter(None, parts))}>"


def _check_initial(initial: Any) -> None:
    """Raise unless a group can start from ``initial``, as far as that is known now."""
    if isinstance(initial, str) and initial != "lowest":
        raise ValueError(f"initial: expected 'lowest', weights or None, got {initial!r}")
    _refuse_model(initial, "initial")


def _refuse_model(weights: Any, where: str) -> None:
    """Raise `TypeError` for a model in place of its weights."""
    if hasattr(weights, "get_weights"):
        held = type(weights).__name__
        its = held if isinstance(weights, Variables) else "TensorFlowVariables(model)"
        raise TypeError(f"{where}: expected weights to send, got {held}; pass {its}.get_weights()")
