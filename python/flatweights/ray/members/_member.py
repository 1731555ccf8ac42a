"""Averages that processes ask for by themselves: `join`, and the member that it returns."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import zlib
from asyncio import _get_running_loop
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar, cast

import numpy as np
import ray
from numpy.typing import NDArray

from flatweights import _core
from flatweights._average import Nonfinite, check_nonfinite, read_weight
from flatweights._dtypes import is_averaged
from flatweights._forks import finalizer
from flatweights._layout import Layout
from flatweights._numbers import as_integer, check_count
from flatweights._sources import Kind, Template, check_flat_weights
from flatweights._trees import as_array
from flatweights._weights import FlatWeights, frozen
from flatweights.ray import _clock
from flatweights.ray.channels._member_channel import SLICE, CoordinatorDiedError
from flatweights.ray.core._requests import (
    LacksStateError,
    MemberError,
    OutOfSyncError,
    Request,
    Response,
    remember,
)
from flatweights.ray.members._client import CoordinatorClient, Sent, enter
from flatweights.ray.members._config import GRACE, GroupConfig
from flatweights.ray.members._platform import PLATFORM, MemberPlatform
from flatweights.ray.members._rendezvous import JoinReply
from flatweights.ray.members._repeated_call import RepeatedCall
from flatweights.ray.members._train import train_worker
from flatweights.ray.members._twins import Twins
from flatweights.ray.nodes._plan import ReduceDType
from flatweights.ray.peers._wait import check_timeout, seconds_left
from flatweights.ray.results._round import Round, repeated_arguments
from flatweights.ray.results._variables import (
    State,
    Variables,
    WholeState,
    scatter,
    text_of,
    whole_state,
)
from flatweights.ray.support import _failpoints
from flatweights.ray.support._errors import DEAD, IN_FORK, check_connected, reason_in_a_line
from flatweights.robust import AnyRule, Rule

Model = TypeVar("Model")


class NotInTrainError(TypeError):
    """`join` was called without a ``size``, in a process that is not a worker of Ray Train."""


_NO_WEIGHTS = Layout([], [], [])
_RETRY = 0.05  # seconds between two tries to find the coordinator of a process group
_MOST_STATES = 8  # whose parts are remembered
_MOST_TOLD = 200  # characters
_RESTART = 10.0  # seconds in which another coordinator may take the place of one that has ended


def join(
    name: str | None = None,
    *,
    rank: int | None = None,
    size: int | None = None,
    min_size: int | None = None,
    grace: float | None = GRACE,
    timeout: float | None = 300.0,
    reduce_dtype: ReduceDType = "float64",
) -> Member:
    """Join a process group: a set of processes that average their weights, each by its own calls.

    Any process of a Ray program can be a member: a task, an actor, the driver, a worker of Ray
    Train, a trial of Ray Tune. The call returns once ``size`` members have joined. The first member
    starts the coordinator, an actor without CPUs on its node, which ends with the last member.
    Within a node, members and coordinator exchange weights through memory that both map. On every
    other node the coordinator starts an agent, which that node's members reach in the same way.

    In a worker of Ray Train no argument is needed: name, rank and size come from its context, and
    each attempt of a run is a separate process group. That needs Ray 2.50 or later.

    >>> import numpy as np
    >>> import ray
    >>> _ = ray.init(num_cpus=2, log_to_driver=False, ignore_reinit_error=True)
    >>> @ray.remote(num_cpus=0)
    ... def train(rank):
    ...     with join("doctest", rank=rank, size=2) as member:
    ...         return member.average({"w": np.full(2, float(rank))}).weights
    >>> ray.get([train.remote(rank) for rank in range(2)])
    [{'w': array([0.5, 0.5])}, {'w': array([0.5, 0.5])}]

    Args:
        name: The name of the process group, local to the Ray job. If None, ``"default"``. A process
            that has left a group of this name waits for its end, unless it has a ``min_size`` below
            ``size``.
        rank: The rank of this member, below ``size``; the lowest free rank, if None.
        size: The number of members; with ``min_size``, the largest number.
        min_size: The number of members with which the process group opens once ``grace`` is over;
            ``size``, if None. Others join later, as a restarted process does.
        grace: Seconds for which the process group waits for all members, after the first is ready;
            for ever, if None. Without ``min_size`` it has no effect.
        timeout: Seconds to wait until all, or enough, members have joined; for ever, if None.
        reduce_dtype: How sums of several members of a node travel to other nodes: ``"float64"`` or
            ``"float32"``; see `WorkerGroup`.

    Raises:
        TimeoutError: If not enough have joined in time; it lists the missing ranks. Or if others
            have not left the last group, which this process has left.
        ValueError: If ``rank`` is out of range or another process has it, ``size``, ``min_size``,
            ``grace`` or ``reduce_dtype`` differs from that of the others, or ``grace`` is not less
            than ``timeout``.
        RuntimeError: If Ray is not initialized, or this thread runs an event loop, which the wait
            would block.
        MemberError: If the coordinator ended while this process joined.
        NotImplementedError: Without arguments in a worker of Ray Train, if Ray is older than 2.50.
    """
    _check_thread()
    check_connected()
    timeout = check_timeout(timeout)
    end = None if timeout is None else _clock.now() + timeout
    if name is None and rank is None and size is None:
        worker = train_worker(seconds_left(end))
        if worker is not None:
            name, rank, size = worker
    if size is None:
        raise NotInTrainError(
            "outside of Ray Train expected join(name, rank=..., size=...), got no size"
        )
    config = GroupConfig.of(size, reduce_dtype, min_size, grace)
    if rank is not None:
        rank = _check_rank(rank, config.size, "rank")
    if config.grace is not None and timeout is not None and config.grace >= timeout:
        raise ValueError(f"grace: expected less than timeout ({timeout} s), got {grace} s")
    name = "default" if name is None else name
    if not isinstance(name, str):
        raise TypeError(f"name: expected a text, got {name!r}")
    return joined(name, rank, config, timeout, end)


def joined(
    name: str,
    rank: int | None,
    config: GroupConfig,
    timeout: float | None,
    end: float | None,
    platform: MemberPlatform = PLATFORM,
) -> Member:
    """Return the member that `join` returns, whose arguments were checked; see `enter`.

    Raises:
        MemberError: If the coordinator has ended meanwhile, and those after it.
        Exception: As `enter`.
    """
    give_up: float | None = None
    make = functools.partial(Member, name)
    while True:
        try:
            return enter(name, rank, config, timeout, end, make, platform)
        except (*DEAD, CoordinatorDiedError) as error:
            # It may have been the coordinator of an earlier process group of this name, for the end
            # of which this process has waited.
            give_up = give_up or _clock.now() + _RESTART
            if _clock.now() >= give_up:
                raise MemberError(
                    f"process group {name!r}: its coordinator has ended: {error}"
                ) from None
            _clock.sleep(_RETRY)
            platform.check_connected()


class Member:
    """A process that takes part in averages with others; `join` makes it.

    All members make the same calls in the same order: the n-th call of one meets the n-th of the
    others. If one makes a different call, or has another layout, all raise `CallsDifferError`, and
    nothing is averaged.

    A member that dies is left out, at once. ``min_results`` decides whether the others go on: if it
    is None, all that have joined and not left have to take part, and each member raises the same
    `WorkerError`. A member that is late (``timeout``) is left out, too. Its call then returns the
    latest average of the others, with its own rank in `Round.late`, and its next call of that kind
    takes part again. A process that is restarted joins again under its rank, and is late at first
    for each kind of call.

    Calls may come from any thread, one at a time. A call that is interrupted while it asks the
    others ends this member, as does one that gets the result but cannot set the variables. With a
    ``state``, the latter lacks the state instead. A call that is interrupted or raises earlier,
    such as while it reads the variables, has not asked: the next one takes its place. A signal
    handler that runs within a call cannot make another one.

    Attributes:
        name: The name of the process group.
        rank: The rank of this member.
        size: The largest number of members; ranks are below it. `ranks` are those that take part.
        raise_if_out_of_sync: Whether a call of this member, if it lacks the state, raises
            `OutOfSyncError` once the others have made another call with that state, such as one at
            the end of their training; and a broadcast, if they have made any other call since. If
            False, as at first, the call goes on waiting.
    """

    def __init__(
        self, name: str, coordinator: CoordinatorClient, join_reply: JoinReply, response: Response
    ) -> None:
        """Take the results of `join`; not for users."""
        self.name = name
        self.rank = join_reply.rank
        self.size = response.size
        self._ranks = response.ranks
        self._session = join_reply.session
        self._lacks_state = response.number > 0
        self.raise_if_out_of_sync = False
        self._coordinator = coordinator
        self._twins = Twins(name)
        # By the id of their key, and the root.
        self._again: dict[tuple[int, int | None], RepeatedCall | None] = {}
        self._states: list[WholeState] = []  # of the last calls, the newest first
        self._turn = _core.MemberTurn()
        self._over: str = ""
        self._process = os.getpid()
        self._finalizer = finalizer(self, coordinator.close)
        self._is_closed = False

    @property
    def lacks_state(self) -> bool:
        """Whether this member lacks the state of the training.

        That is so if it joined after the first call, missed more than one call with a ``state``, or
        did not get to set its variables in one. The next such call heals it. You may set this to
        have the member healed.
        """
        return self._lacks_state

    @lacks_state.setter
    def lacks_state(self, lacks: bool) -> None:
        self._lacks_state = lacks
        self._turn.forget_steps()

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that took part in the process group at the last call: neither dead nor gone."""
        return self._ranks

    @property
    def is_over(self) -> bool:
        """Whether this member has left, or cannot continue: its process may join again."""
        return bool(self._over)

    def average(
        self,
        weights: Model,
        weight: float = 1.0,
        *,
        out: Model | None = None,
        timeout: float | None = None,
        min_results: int | None = None,
        nonfinite: Nonfinite = "raise",
        rule: AnyRule | None = None,
        state: State | None = None,
    ) -> Round:
        """Average ``weights`` with those of the other members.

        The result has the bits of `flatweights.average` over the ranks in `Round.used`. The weights
        are copied once into memory that the coordinator maps, and the mean once out of it.

        With ``state``, a member that lacks the state of the training is healed: a new member, a
        restarted one, or one that has missed more than one such call. Its weights are not part of
        the average, and it waits for the next average of the others. Then its ``state`` is set to
        that of the lowest rank in `Round.used`, as it was before this call, and the call returns
        the average to all. So all members are equal again if they do the same with the average.
        `Round.healed` lists the healed ranks. The others wait for the donor only while it copies
        its state.

        Args:
            weights: Any model that `flatweights.average` takes: an array, `FlatWeights`, a mapping
                or a sequence of arrays, nested containers. The same kind and layout in all members.
            weight: The weight of this member, such as its number of samples.
            out: Where to write: of the same kind, contiguous, in parts that do not overlap; it may
                be ``weights``.
            timeout: Seconds that others may be later than the first member that calls; the
                shortest of all members counts. For ever, if None.
            min_results: The number of ranks that an average needs; all that have joined and not
                left, if None. The same in all members, as is ``nonfinite``.
            nonfinite: What to do about NaN and infinity; see `flatweights.average`.
            rule: A rule that replaces the mean, such as ``flatweights.robust.Median()``; the same
                in all members. A function runs in the coordinator, on a list of `FlatWeights`. A
                center, such as the last average, is of the kind of ``weights``, or `FlatWeights`.
            state: The state of the training, which heals members: a
                `flatweights.tensorflow.TensorFlowVariables`, or any `Variables`; an object with
                ``save`` and ``restore`` of bytes (`Saved`), such as a place in the data; or a list
                of these, which are set in its order. The same kinds in the same order in all
                members, and `Variables` of the same layout. The member that gives its state saves
                it then; the first call with such an object saves it once, to see that it can.
                Without a state, no member is healed.

        Returns:
            A `Round`, whose ``weights`` are of the given kind. They are the same in all members.

        Raises:
            WorkerError: If fewer than ``min_results`` ranks take part; all members raise it. Or if
                no member with the state is left.
            CallsDifferError: If members make different calls.
            ValueError: If an argument is out of range, or parts of ``out`` overlap; or if a
                member's weights hold NaN or infinity, and ``nonfinite="raise"``.
            TypeError: If ``weights`` or ``out`` are of a kind that has no average.
            MemberError: If the coordinator has ended, or this member has left.
        """
        self._check_process()
        state = self._whole(state)
        arguments = weight, timeout, min_results, nonfinite
        moved = _MovedModel(weights, out)
        template, layout = moved.template, moved.layout
        if rule is None:
            result = self._call_again(moved, layout, arguments, state)
            if result is not None:
                return result
        named = None if rule is None else _SentRule.of(rule, template)
        request = self._request(layout, *arguments, rule=named, state=state)
        return self._call_once(moved, layout, arguments, request, state)

    def average_variables(
        self,
        variables: Variables,
        weight: float = 1.0,
        *,
        timeout: float | None = None,
        min_results: int | None = None,
        nonfinite: Nonfinite = "raise",
        rule: AnyRule | None = None,
        state: State | None = None,
    ) -> Round:
        """Average ``variables`` with those of the other members, in place.

        They are gathered into memory that the coordinator maps, and set from the coordinator's
        memory, without other copies. Afterwards all members have the same values, including late
        ones, except for states of seed generators, which stay each member's own; ``state`` contains
        them.

        Args:
            variables: A `flatweights.tensorflow.TensorFlowVariables`, or any object with its
                ``layout``, ``gather_into`` and ``scatter``; of the same layout in all members. With
                its ``exclude=``, other variables of the model stay each member's own.
            weight: See `average`.
            timeout: See `average`.
            min_results: See `average`.
            nonfinite: See `average`.
            rule: See `average`. A center is `FlatWeights`, or a mapping by name.
            state: See `average`. It is set before ``variables``.

        Returns:
            A `Round`, whose ``weights`` are None.

        Raises:
            TypeError: If ``variables`` have no layout.
            Exception: As `average`; the variables have not changed.
        """
        arguments = weight, timeout, min_results, nonfinite
        again = self._again.get((id(variables), None))
        if again is not None and again.is_in_step and self._process == os.getpid():
            has_come = self._turn.resume()
            if has_come is not None:
                return self._go_on(again, variables, state, has_come)
        if rule is None:
            result = self._call_again(variables, variables, arguments, state)
            if result is not None:
                return result
        self._check_process()
        state = self._whole(state)
        layout = _layout_of(variables, "variables")
        check_flat_weights(layout, "variables")
        named = None if rule is None else _SentRule.of(rule, _by_name(layout))
        request = self._request(layout, *arguments, rule=named, state=state)
        if self._twins.is_twin(variables, request.keys[1]):
            request = request._replace(twins=(*request.twins, request.keys[1]))
        if state is None and hasattr(variables, "let_repeat"):  # a tensor of a step
            request = request._replace(from_state=True)
        return self._call_once(variables, variables, arguments, request, state)

    def _call_once(
        self,
        variables: Variables,
        key: Any,
        arguments: tuple[Any, ...],
        request: Request,
        state: Variables | None,
    ) -> Round:
        """Average or broadcast ``variables``, and note how to make the same call again.

        Args:
            variables: What is averaged or broadcast.
            key: An object by which `_call_again` recognises the next such call.
            arguments: The arguments that make up the request.
            request: What to ask.
            state: The state that heals members.
        """
        root, layout = request.root, variables.layout
        sets = root != self.rank or key is not variables  # models are made anew
        with self._call(state) as coordinator:
            sent: Sent = None
            if root is None or root == self.rank:
                request, sent = coordinator.gather(variables, request)
            else:
                request = coordinator.on_gpu(variables, request)
            response, got = self._exchange(coordinator, request, layout, sent, state)
            # If the root has joined again, the weights are those of its predecessor.
            if sets or self._session not in response.sessions:
                scatter(variables, got)
            result = self._round(response, _made_by(variables))
            way = coordinator.again(request, layout.nbytes, sent)
            if way is not None:
                again = RepeatedCall.of(
                    variables, key, state, arguments, request, way, self._twins, sets=sets
                )
                remember(self._again, (id(key), root), again)
            return result

    def _go_on(
        self, again: RepeatedCall, variables: Variables, state: Any, has_come: bool
    ) -> Round:
        """Go on with a call for which a step has asked without Python; it has the turn."""
        try:
            self._check_there()
            result = self._exchange_again(again, variables, state, has_come)
            assert result is not None
            return result
        finally:
            self._turn.give_back()

    def _call_again(
        self,
        variables: Variables,
        key: Any,
        arguments: tuple[Any, ...],
        state: State | None = None,
        root: int | None = None,
    ) -> Round | None:
        """Make a call as before; None, with nothing done, if there was none like it."""
        again = self._again.get((id(key), root))
        try:
            if again is None or again.arguments != arguments:
                return None
        except (ValueError, RuntimeWarning):  # a weight is an array, or too large for the other
            return None
        if self._process != os.getpid() or _get_running_loop() is not None:
            return None
        if state is not None:
            state = self._whole(state)
        if self._turn.is_taken:  # by another thread's call, or by one of this thread
            return None
        with self._turn:
            is_healthy = state is None or not self._lacks_state
            if (
                self._over
                or self._turn.is_left
                or not (is_healthy and again.is_for(key, variables, state, self._twins))
            ):
                return None
            return self._exchange_again(again, variables, state)

    def _exchange_again(
        self,
        again: RepeatedCall,
        variables: Variables,
        state: State | None,
        has_come: bool | None = None,
    ) -> Round | None:
        """Make the call as before; None, with nothing done, if the segment is not free.

        Args:
            again: The call.
            variables: Its variables.
            state: Its state.
            has_come: If its step has asked already: whether the response has come.
        """
        coordinator, shortcut = self._coordinator, again.shortcut
        try:
            coordinator.stage = "idle" if has_come is None else "asking"
            told: Any = has_come
            whole = None if state is None else self._whole(state)
            if has_come is None:
                if not shortcut.request.may_ask:  # the coordinator still reads that memory
                    return None
                if shortcut.memory is not None:
                    variables.gather_into(shortcut.memory)
                coordinator.stage = "asking"
                if _failpoints.hook is not None:
                    _failpoints.reach("asking")
                told = shortcut.request.exchange(again.request.weight, SLICE)
                if told is None:
                    coordinator.stage = "idle"
                    return None
            response = None
            if isinstance(told, bool):
                self._turn.forget_steps()
                coordinator.was_asked(again.request, again.known, told)
                sent = shortcut.memory
                response, mean = self._exchange(
                    coordinator, again.request, again.layout, sent, whole
                )
            else:
                coordinator.stage = "told"
                if _failpoints.hook is not None:
                    _failpoints.reach("told")
                *numbers, mean = told
                if again.is_in_step and _failpoints.hook is None:
                    cast("Any", variables).let_repeat(shortcut.request, self._turn, SLICE)
            if again.sets or (response is not None and self._session not in response.sessions):
                variables.scatter(mean, **again.options)
            weights = _made_by(variables)
            if response is not None:
                return self._round(response, weights)
            return Round(weights, *repeated_arguments(again.known.response.arguments, *numbers))
        except BaseException as error:
            self._fail(error, state)
            raise

    def broadcast(self, weights: Model, root: int = 0, *, timeout: float | None = None) -> Model:
        """Return the weights of rank ``root`` in all members.

        Args:
            weights: The weights, of the kinds that `average` takes; also integers of any kind. In
                members other than the root they only show the expected layout. NaN and infinity
                are sent, too.
            root: The rank whose weights are sent.
            timeout: See `average`.

        Raises:
            WorkerError: If the root has died or is late.
            CallsDifferError: If members make different calls, or have different layouts.
            TypeError: If ``weights`` are of another kind.
            MemberError: As `average`.
        """
        self._check_process()
        if not isinstance(weights, (Mapping, Sequence)):  # a bare array of integers has no mean
            bare = [as_array(weights, "weights")]
            return cast("Model", self.broadcast(bare, root, timeout=timeout)[0])
        moved = _MovedModel(weights, None)
        self._broadcast(moved, moved.layout, root, timeout)
        result: Model = moved.result
        return result

    def broadcast_variables(
        self, variables: Variables, root: int = 0, *, timeout: float | None = None
    ) -> Round:
        """Set ``variables`` to those of rank ``root``, in place, in all members.

        Args:
            variables: As in `average_variables`; of the same layout in all members.
            root: The rank whose variables are sent.
            timeout: See `average`.

        Returns:
            A `Round`, whose ``weights`` are None; `Round.used` is the root.

        Raises:
            Exception: As `broadcast`; the variables have not changed.
        """
        self._check_process()
        _layout_of(variables, "variables")
        return self._broadcast(variables, variables, root, timeout)

    def _broadcast(self, variables: Variables, key: Any, root: int, timeout: float | None) -> Round:
        root = _check_rank(root, self.size, "root")
        only_next = self.raise_if_out_of_sync
        arguments = 1.0, timeout, only_next
        result = self._call_again(variables, key, arguments, None, root)
        if result is not None:
            return result
        request = self._request(variables.layout, 1.0, timeout, None, "propagate", root)
        request = request._replace(only_next=only_next)
        if key is variables and self._twins.is_twin(variables, request.keys[1]):
            request = request._replace(twins=request.keys[1:])
        return self._call_once(variables, key, arguments, request, None)

    def all_gather(
        self,
        value: object,
        name: str = "values",
        *,
        timeout: float | None = None,
        min_results: int | None = None,
        state: State | None = None,
    ) -> Round:
        """Give every member the objects of all: settings, scores, places in the data.

        They are pickled into the messages of the call, so they should be small: each member gets
        all of them. Weights are averaged or broadcast instead.

        >>> import flatweights.ray
        >>> member = flatweights.ray.join("gathering", rank=0, size=1)
        >>> member.all_gather({"samples": 512}).weights
        {0: {'samples': 512}}
        >>> member.leave()

        Args:
            value: An object that cloudpickle can pickle, and that the others can unpickle.
            name: What is gathered; the same in all members. It tells this call from others, as
                layouts do for averages.
            timeout: See `average`.
            min_results: See `average`.
            state: See `average`. A member that lacks the state gets the objects of the others.

        Returns:
            A `Round`, whose ``weights`` are the objects by rank, of the ranks in `Round.used`.

        Raises:
            TypeError: If ``value`` cannot be pickled, or ``name`` is not a text; or if a member's
                value cannot be unpickled here, after which the next call works normally.
            WorkerError: As `average`.
            CallsDifferError: If members make different calls, or with different names.
            MemberError: As `average`.
        """
        self._check_process()
        state = self._whole(state)
        if not isinstance(name, str):
            raise TypeError(f"name: expected a text, got {name!r}")
        try:
            pickled = ray.cloudpickle.dumps(value)
        except Exception as error:
            raise TypeError(f"value: cannot be pickled: {reason_in_a_line(error)}") from error
        request = self._request(None, 1.0, timeout, min_results, "propagate", state=state)
        request = request._replace(
            operation="all_gather", name=name, value=pickled, from_state=state is None
        )
        with self._call(state) as coordinator:
            response, _ = self._exchange(coordinator, request, _NO_WEIGHTS, None, state)
            result = self._round(response, {})
            wrong: tuple[int, Exception] | None = None
            for rank, one in response.values.items():
                try:
                    result.weights[rank] = pickle.loads(one)
                except Exception as error:
                    wrong = rank, error.with_traceback(None)  # which has this frame
                    break
        if wrong is not None:
            rank, cause = wrong
            reason = reason_in_a_line(cause)
            raise TypeError(f"value of rank {rank}: cannot be unpickled: {reason}") from cause
        return result

    def leave(self) -> None:
        """Leave the process group: the others continue without this member, and see no failure."""
        self._check_process()
        with self._alone():
            try:
                if not self._over:
                    self._over = "this member has left the process group"
                    with contextlib.suppress(CoordinatorDiedError, ray.exceptions.RayError):
                        self._coordinator.leave()
            finally:  # if it was interrupted, the others see a member that has died
                self._close()
                self._again.clear()

    def __enter__(self) -> Member:
        """Return the member itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave; after an error, the others see a member that has died."""
        if error is None:
            self.leave()
        elif self._process == os.getpid():
            self._break_off(f"this member ended with {type(error).__name__}", error)

    def __repr__(self) -> str:
        """Return name, rank and size."""
        state = f", {self._over}" if self._over else ""
        return f"<Member {self.rank} of {self.size} of {self.name!r}{state}>"

    def __reduce__(self) -> NoReturn:
        """Refuse: a member belongs to its process."""
        raise TypeError("a Member cannot be pickled: each process joins by itself")

    def _request(
        self,
        layout: Layout | None,
        weight: float,
        timeout: float | None,
        min_results: int | None,
        nonfinite: Nonfinite,
        root: int | None = None,
        rule: _SentRule | None = None,
        state: Variables | None = None,
    ) -> Request:
        """Return the request, after checking its values."""
        check_nonfinite(nonfinite)
        if rule is not None and weight != 1.0 and not rule.rule.takes_weights:
            raise TypeError(f"weight: {rule.rule.name} has no weights, all ranks count alike")
        if min_results is not None:
            min_results = check_count(min_results, "min_results", self.size)
        request = Request(
            "average" if root is None else "broadcast",
            None if layout is None else layout.digest,
            root,
            read_weight(weight, "weight"),
            check_timeout(timeout),
            min_results,
            nonfinite,
            None if rule is None else (rule.name, ray.cloudpickle.dumps(rule.rule)),
            None if state is None else _layout_of(state, "state").digest,
        )
        parts = state.parts if isinstance(state, WholeState) else () if state is None else (state,)
        key = request.keys[0]
        found = [self._twins.is_twin(part, f"{key}, part {i}") for i, part in enumerate(parts)]
        if any(found):
            request = request._replace(twins=(key,))
        return request

    def _whole(self, state: State | None) -> Variables | None:
        """Return ``state`` as one `Variables`."""
        if state is None or hasattr(state, "gather_into"):
            return cast("Variables | None", state)
        whole = whole_state(state, self._states)
        if not self._states or whole is not self._states[0]:
            others = [one for one in self._states if one is not whole]
            self._states = [whole, *others[: _MOST_STATES - 1]]
        return whole

    def _exchange(
        self,
        coordinator: CoordinatorClient,
        request: Request,
        layout: Layout,
        weights: Sent,
        state: Variables | None,
    ) -> tuple[Response, Any]:
        """Ask for an average; give ``state``, or set it, if the response says so."""
        while True:
            try:
                sent = request._replace(lacks=state is not None and self.lacks_state)
                if sent.lacks:
                    response, mean = coordinator.exchange(sent.through_host(), layout, None)
                else:
                    response, mean = coordinator.exchange(sent, layout, weights)
                if state is not None and response.donor == self._session:
                    given = state.copy() if isinstance(state, WholeState) else state
                    coordinator.exchange(
                        _state_request("give", given), given.layout, coordinator.packed(given)
                    )
                if state is not None and self._session in response.recovering:
                    _, got = coordinator.exchange(_state_request("heal", state), state.layout, None)
                    state.scatter(got)
                    self.lacks_state = False
                return response, mean
            except LacksStateError as error:  # also if the donor died: the next has another
                if state is None:  # a broadcast that has come too late
                    raise
                self.lacks_state = True
                if self.raise_if_out_of_sync and isinstance(error, OutOfSyncError):
                    raise

    @contextlib.contextmanager
    def _call(self, state: Variables | None = None) -> Iterator[CoordinatorClient]:
        """Run one call; if anything interrupts it, this member ends.

        If the response has come, and cannot be applied, the others are ahead of this member: it
        lacks the ``state`` that they have now. Without a state, it ends.
        """
        _check_thread()
        with self._alone():
            self._check_there()
            self._coordinator.stage = "idle"
            try:
                yield self._coordinator
            except BaseException as error:
                self._fail(error, state)
                raise

    def _fail(self, error: BaseException, state: State | None) -> None:
        """Note that ``error`` has ended a call.

        Raises:
            MemberError: Instead of ``error``, if the coordinator is gone.
        """
        if isinstance(error, CoordinatorDiedError):
            # Without effect if another thread has ended this member. There is a cause if the
            # response could not be read, which the others cannot know.
            self._break_off(str(error), error.__cause__)
            raise MemberError(f"process group {self.name!r}: {self._over}") from None
        if self._coordinator.stage == "told" and state is not None:
            self.lacks_state = True
        elif self._coordinator.stage != "idle":
            # A later call would receive this response, or bring weights without it.
            self._break_off(f"a call was broken off by {type(error).__name__}", error)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep the calls of other threads waiting.

        Raises:
            RuntimeError: If this thread is in a call already, for which it would wait for ever.
        """
        if self._turn.is_own:
            raise RuntimeError(
                "this thread is in a call of the member already. In a signal handler, set a flag, "
                "and make the call, such as leave(), later"
            )
        with self._turn:
            self._turn.forget_steps()
            if self._turn.is_left:  # a later call would receive the response
                self._break_off("a step was broken off that had asked for an average")
            yield

    def _check_there(self) -> None:
        """Raise if this member has left, or cannot continue."""
        if self._over:
            raise MemberError(f"process group {self.name!r}: {self._over}")

    def _check_process(self) -> None:
        """Raise in a fork of the member's process: before any lock, which it may have inherited."""
        if self._process != os.getpid():
            raise MemberError(f"this process is a fork of the member's. {IN_FORK}")

    def _break_off(self, why: str, error: BaseException | None = None) -> None:
        self._over = self._over or why
        self._turn.forget_steps()
        self._again.clear()
        self._close("" if error is None else _line_of(error))

    def _close(self, raised: str = "") -> None:
        """Close this end. After an interrupt, the next call, or the finalizer, does it again."""
        if not self._is_closed:
            self._coordinator.close(raised)
            self._is_closed = True
        self._finalizer.detach()

    def _round(self, response: Response, weights: Any) -> Round:
        self._ranks = response.ranks
        result = Round(weights, *response.arguments)
        if self._session not in (
            *response.sessions,
            *response.recovering,
        ):  # the response of a call in which this member took no part
            result.failed.pop(self.rank, None)
            result.late = tuple(sorted({*result.late, self.rank}))
        return result


def _line_of(error: BaseException) -> str:
    """Return the line by which others learn of the error with which a member left."""
    if isinstance(error, Exception):
        return reason_in_a_line(error)[:_MOST_TOLD]
    return type(error).__name__


class _NamedRule:
    """A user's function as a rule, whose errors name it; called for all members."""

    def __init__(self, name: str, function: Callable[[list[Any]], Any]) -> None:
        """Take the function."""
        self.__name__ = name
        self._function = function

    def __call__(self, models: list[Any]) -> Any:
        """Return the function's model; raise `RuntimeError` if it raises."""
        try:
            return self._function(models)
        except BaseException as error:  # such as SystemExit, which would end the coordinator
            raise RuntimeError(f"rule {self.__name__}: {_line_of(error)}") from error


class _SentRule(NamedTuple):
    """A rule for packed weights, as members send them.

    Attributes:
        rule: The rule.
        name: A name that is the same for equal rules.
    """

    rule: Rule
    name: str

    @classmethod
    def of(cls, rule: AnyRule, template: Template) -> _SentRule:
        """Return ``rule``, whose models are like the members' and match ``template``."""
        checked = Rule.of(rule)
        if not isinstance(rule, Rule):
            checked = Rule.of(_NamedRule(checked.name, rule))
        names = [repr(checked)]

        def packed(model: Any, where: str) -> FlatWeights:
            weights = _packed(template, model, where)
            names.append(f"{where} {_checksum(weights):08x}")
            return weights

        checked = checked.converted(packed)
        return cls(checked, ", ".join(names))


def _packed(template: Template, model: Any, where: str) -> FlatWeights:
    """Return ``model`` as packed weights of the layout of ``template``."""
    if isinstance(model, FlatWeights):
        template.check_layout(model.layout, where)
        return model
    template.match(model, where)
    buffer = template.layout.new_buffer()
    _core.move_parts(template.parts_in(buffer), template.read(model, where))
    return FlatWeights.wrap(buffer, template.layout)


def _checksum(weights: FlatWeights) -> int:
    """Return a checksum of all numbers that have a mean; others stay each member's own."""
    checksum = 0
    for slot in weights.layout.slots:
        if is_averaged(slot.dtype):
            checksum = zlib.crc32(weights.buffer[slot.offset :][: slot.nbytes].data, checksum)
    return checksum


def _by_name(layout: Layout) -> Template:
    """Return the template of variables of this ``layout`` as weights by name."""
    kind = Kind.MAPPING if layout.named else Kind.SEQUENCE
    return Template(kind, layout, layout.names)


def _check_thread() -> None:
    """Raise if this thread runs an event loop."""
    if _get_running_loop() is None:
        return
    raise RuntimeError(
        "a member's calls wait for other processes, and would block the event loop of this "
        "thread: call them in another one, as with asyncio.to_thread"
    )


def _state_request(operation: Literal["give", "heal"], state: Variables) -> Request:
    return Request(operation, state.layout.digest, nonfinite="propagate")


def _layout_of(variables: Any, name: str) -> Layout:
    """Return the layout of ``variables``; raise `TypeError` unless they are a `Variables`."""
    layout = getattr(variables, "layout", None)
    moves = hasattr(variables, "gather_into") and hasattr(variables, "scatter")
    if not (isinstance(layout, Layout) and moves):
        raise TypeError(
            f"{name}: expected an object with layout, gather_into and scatter, such as "
            f"TensorFlowVariables(model), got {text_of(variables)}"
        )
    return layout


def _check_rank(rank: int, size: int, name: str) -> int:
    checked = as_integer(rank, name)
    if not 0 <= checked < size:
        raise ValueError(f"{name}: expected 0 to {size - 1}, got {rank!r}")
    return checked


def _model_of(template: Template, mean: NDArray[np.uint8]) -> Any:
    """Return a new model with the values of the packed ``mean``."""
    model = template.new()
    _core.move_parts(template.read_out(model), template.parts_in(mean))
    return frozen(model)


def _made_by(variables: Variables) -> Any:
    """Return the model that ``variables``, which were just set, have made; None for others."""
    return variables.result if isinstance(variables, _MovedModel) else None


class _MovedModel:
    """A model that is averaged, as `Variables`, which are set by making or writing another one.

    Attributes:
        template: The kind and layout of the model.
        layout: The layout.
        result: The average, once it is set.
    """

    def __init__(self, weights: Model, out: Model | None) -> None:
        """Read the parts of both; raises as `Member.average` does."""
        self.template = Template.of(weights, "weights")
        self.layout = self.template.layout
        self.result: Any = out
        self._parts = self.template.read(weights, "weights")
        self._targets = None if out is None else self.template.targets(out)
        if self._targets is not None and out is not weights:  # shared parts of it have one mean
            self.template.check_apart(self._targets)

    def gather_into(self, buffer: NDArray[np.uint8]) -> None:
        _core.move_parts(self.template.parts_in(buffer), self._parts)

    def scatter(self, buffer: NDArray[np.uint8]) -> None:
        if self._targets is None:
            self.result = _model_of(self.template, buffer)
        else:
            _core.move_parts(self._targets, self.template.parts_in(buffer))
