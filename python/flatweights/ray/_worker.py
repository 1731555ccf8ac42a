"""Actors whose weights travel as one buffer."""

from __future__ import annotations

import functools
import inspect
import threading
import types
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flatweights._frameworks import holder_of
from flatweights._layout import Layout
from flatweights._weights import FlatWeights
from flatweights.ray.channels._worker_channel import NoChannel, WorkerChannels
from flatweights.ray.peers._platform import PLATFORM, GroupPlatform
from flatweights.ray.peers._transport import Head, Stamp, read_plain_call, weights_of
from flatweights.ray.results import _variables
from flatweights.ray.results._result import Packed
from flatweights.ray.results._variables import Variables
from flatweights.ray.results._wire import WireMessage, WorkerWire
from flatweights.ray.support._errors import (
    RefusedWeightsError,
    StaleWorkerError,
    note_unchanged,
    reason_of,
)
from flatweights.wire import MissedUpdateError, Snapshot

_NOT_PLAIN: dict[type, str] = {
    types.CoroutineType: "an async one",
    types.AsyncGeneratorType: "an async one",
    types.GeneratorType: "one that yields",
}
_MOST_GROUPS = 64  # whose last calls a worker remembers


class _GroupState:
    """The state that an actor keeps for the groups that call it.

    Attributes:
        platform: What the actor uses of Ray and channels.
        turn: The lock that admits one of their calls at a time. Actors may run several calls at a
            time (``max_concurrency``). Without the lock, a call that was broken off would continue
            to train on weights that were sent in the meantime.
        version: The stamp of the weights that a `WorkerGroup` has sent; None if none has.
        is_whole: Whether the model has all of them: an error may have ended `set_weights` half-way.
        wire: The weights and rounding errors, if weights travel in 16 bits.
        channels: The channels to groups on this machine.
    """

    def __init__(self, platform: GroupPlatform = PLATFORM) -> None:
        self.platform = platform
        self.turn = threading.RLock()
        self.version: Stamp | None = None
        self.is_whole = True
        self.wire = WorkerWire()
        self.channels = WorkerChannels(platform.worker_channel)
        self._last_calls: dict[str, int] = {}  # the number of each group's last call

    def admit(self, stamp: Stamp) -> None:
        """Raise unless ``stamp`` is above all earlier stamps of its group; then remember it."""
        group, number = stamp
        last = self._last_calls.pop(group, -1)
        self._last_calls[group] = number if number > last else last  # now the newest in the dict
        if len(self._last_calls) > _MOST_GROUPS:
            del self._last_calls[next(iter(self._last_calls))]
        if number <= last:
            raise StaleWorkerError(
                f"call {number} came again or too late, after call {last}: it is not run"
            )

    def check(self, group: str, version: Stamp | None) -> None:
        """Raise unless the actor has the weights of ``version``.

        If ``version`` is None, the actor may have any weights, unless it was restarted, or
        ``group`` has sent it weights that no other worker took.
        """
        got_from, got = (None, None) if self.version is None else self.version
        if version is None and got is None and self.platform.was_restarted():
            raise StaleWorkerError("restarted, and not sent any weights since")
        if version is None and got_from == group:
            raise StaleWorkerError(f"expected no weights of the group, got version {got}")
        if version is not None and version != self.version:
            whose = "" if got is None or got_from == version[0] else " of another group"
            raise StaleWorkerError(
                f"expected weights of version {version[1]}, got {got}{whose}: restarted since, "
                "or sent others"
            )
        if not self.is_whole:
            raise StaleWorkerError("sent other weights since, of which it may have set only some")


class FlatWorker:
    """Base of an actor class: a model built in the actor, its weights moved as one buffer.

    Write `build`, and methods that train; make it an actor with `ray.remote`. The constructor takes
    the arguments of `build`. Weights leave and enter as `FlatWeights` or a vector: one buffer in
    the object store, which every process of the node reads in place::

        @ray.remote
        class Worker(FlatWorker):
            def build(self):
                import keras

                self.model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
                self.model.compile("sgd", "mse")
                return self.model

            def train(self, x, y):
                self.model.fit(x, y, verbose=0)
                return self.get_weights()

        workers = [Worker.remote() for _ in range(4)]
        mean = average([w.train.remote(x, y) for w in workers])
        ray.get([w.set_weights.remote(mean.ref) for w in workers])
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Build the model; arguments go to `build`.

        Raises:
            NotImplementedError: If `build` is not defined.
            TypeError: If `build` returns None, or an object that is neither a `Variables` nor
                TensorFlow's.
            Exception: As `TensorFlowVariables`.
        """
        built = self.build(*args, **kwargs)
        where = f"{type(self).__name__}.build()"
        if built is None:
            raise TypeError(f"{where} returned None: return the model")
        holder = built if isinstance(built, Variables) else holder_of(built)
        if holder is None:
            raise TypeError(
                f"{where} returned {_variables.text_of(built)}: expected an object with layout, "
                "gather_into and scatter (flatweights.ray.Variables), or a model of TensorFlow"
            )
        self.variables = holder

    @functools.cached_property
    def variables(self) -> Any:
        """The object that `build` returned; a `TensorFlowVariables` over it if it is TensorFlow's.

        The constructor sets it.
        """
        raise AttributeError(
            f"{type(self).__name__} has no variables: its __init__ must call super().__init__(), "
            "which calls build()"
        )

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Build the model, and import its framework here; written by the user.

        Returns:
            Anything that `TensorFlowVariables` takes as ``output``; a `TensorFlowVariables`, in a
            graph with its session, or with ``exclude=`` for layers that stay at home; or, for any
            other framework, a `Variables`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define build()")

    def get_weights(self) -> FlatWeights:
        """Return the weights by name; see `TensorFlowVariables.get_weights`."""
        return _variables.get_weights(self.variables)

    def set_weights(self, new_weights: Mapping[str, ArrayLike], *, share: bool = False) -> None:
        """Set weights by name; see `TensorFlowVariables.set_weights`.

        States of seed generators stay the worker's own, or all workers would draw the same random
        numbers; ``self.variables.set_weights(new_weights)`` sets them, too.
        """
        _variables.set_weights(self.variables, new_weights, share=share)

    def get_flat(self) -> NDArray[Any]:
        """Return the weights as one vector; see `TensorFlowVariables.get_flat`."""
        return _variables.get_flat(self.variables)

    def set_flat(
        self, new_weights: ArrayLike | Mapping[str, ArrayLike], *, share: bool = False
    ) -> None:
        """Set all weights from one vector; see `TensorFlowVariables.set_flat`.

        States of seed generators stay the worker's own, as in `set_weights`.

        Weights by name, such as the result of `get_weights` or an average, are set by
        `set_weights`.
        """
        if isinstance(new_weights, Mapping):
            self.set_weights(new_weights, share=share)
        else:
            _variables.set_flat(self.variables, new_weights, share=share)

    def ping(self) -> str:
        """Return ``"pong"``: the actor is alive and built."""
        return "pong"

    def call_version(
        self, head: Head, new_weights: Any, method: str | None, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Set the weights that a `WorkerGroup` sends, and call a method; each is optional.

        Ray repeats calls on a restarted actor, which has the weights that it was built with, or
        newer ones. Such an answer must not be averaged with the others, and such a call must
        not train. So each call carries its number and the version of its weights. If no weights
        were ever sent, the actor may have any, unless it was restarted.

        Args:
            head: The number of the call, the version of its weights, and whether to encode the
                result.
            new_weights: The weights of that version: a mapping, a vector or a message of the wire.
                None, if they were sent to this actor before.
            method: Name of the method; None, if the weights are only set.
            *args: Its arguments.
            **kwargs: Its keyword arguments.

        Raises:
            StaleWorkerError: If this actor has other weights, or has already run this call or a
                later one.
            RefusedWeightsError: If ``new_weights`` could not be set, so that the method was not
                called. Without a method, the error itself is raised.
            TypeError: If the method is async, or yields.
        """
        return _run(self, self._group_state, head, new_weights, method, *args, **kwargs)

    @property
    def _group_state(self) -> _GroupState:
        """The state, made on first use: subclasses need not call this constructor."""
        kept = self.__dict__
        state: _GroupState = kept.get("_of_groups") or kept.setdefault("_of_groups", _GroupState())
        return state

    def attach_channel(self, address: bytes, token: bytes, node: str) -> bytes | NoChannel:
        """Make a channel to a `WorkerGroup` on this ``node``; groups call it."""
        state = self._group_state
        here = state.platform.node()
        if here != node:
            return NoChannel("the worker is on another node", may_pass=False, node=here)
        return state.channels.attach(address, token)

    def serve_channel(self, token: bytes, number: int) -> Any:
        """Run commands of a channel until none comes; return a result that goes through Ray.

        Raises:
            StaleWorkerError: If there is no such channel.
            Exception: The exception of a method.
        """
        try:
            channel = self._group_state.channels[token]
        except KeyError:
            raise StaleWorkerError("restarted since: it has not attached again") from None
        return channel.serve(_Commands(self), number)


# These are functions, not methods: Ray wraps every method of an actor's class to trace its calls.


def _run(
    worker: FlatWorker,
    state: _GroupState,
    head: Head,
    new_weights: Any,
    method: str | None,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    stamp, version, wire = head
    with state.turn:
        state.admit(stamp)
        if new_weights is not None:
            try:
                _receive(worker, state, version, new_weights)
            except StaleWorkerError:
                raise
            except Exception as error:
                if method is None:
                    _note_if_unchanged(state, error)
                    raise
                # No frame refers to the error: the weights would be held until the next collection.
                raise _note_if_unchanged(state, RefusedWeightsError(reason_of(error))) from error
        state.check(stamp[0], version)
        if method is None:
            return None
        result = _call(worker, method, args, kwargs)
        kind = _NOT_PLAIN.get(type(result))
        if kind is not None:
            if type(result) is not types.AsyncGeneratorType:  # which has not begun
                result.close()
            raise TypeError(f"expected a plain method, got {kind}: {method!r}")
        if wire is None:
            return result
        wire_dtype, payload_kind = wire
        try:
            return state.wire.encode(result, payload_kind, wire_dtype, method)
        except MissedUpdateError as error:
            raise StaleWorkerError(str(error)) from error


def _note_if_unchanged(state: _GroupState, error: Exception) -> Exception:
    """Return the error of weights that could not be set; it says whether nothing has changed."""
    if state.is_whole:
        note_unchanged(error)
    return error


class _Commands:
    """The methods of a worker that commands of a channel call, without Ray's wrapper."""

    def __init__(self, worker: FlatWorker) -> None:
        self.call_version = functools.partial(_run, worker, worker._group_state)

    def run_plain(self, body: bytes, buffers: list[NDArray[np.uint8]]) -> Any:
        """Run a call without arguments; see `read_plain_call`."""
        return self.call_version(*read_plain_call(body, buffers))


def _receive(
    worker: FlatWorker, state: _GroupState, version: Stamp | None, new_weights: Any
) -> None:
    new_weights = weights_of(new_weights, state.platform)
    if type(new_weights) is Packed:
        if _may_scatter(worker, new_weights.layout):
            state.is_whole = _sets_all_or_none(worker)
            _variables.scatter(worker.variables, new_weights.buffer)
            state.is_whole, state.version = True, version
            return
        new_weights = new_weights.weights()
    sent = new_weights.weights if isinstance(new_weights, Snapshot) else new_weights
    if state.version is None and state.platform.was_restarted() and _is_subset(worker, sent):
        raise ValueError(
            f"expected all weights, got {len(sent)} of {len(worker.variables.layout)}: "
            "restarted, and not sent the others since"
        )
    if isinstance(new_weights, WireMessage):
        try:
            state.wire.receive(new_weights, functools.partial(_set, worker, state))
        except MissedUpdateError as error:
            raise StaleWorkerError(str(error)) from error
    else:
        _set(worker, state, new_weights)
    state.version = version


def _call(worker: FlatWorker, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    kind: Any = type(worker)
    function = None if method in worker.__dict__ else _function_of(kind, method)
    if function is None:
        return getattr(worker, method)(*args, **kwargs)
    return function(worker, *args, **kwargs)


@functools.lru_cache(maxsize=256)
def _function_of(kind: Any, name: str) -> Any:
    """Return a method, as `_unwrapped`; None for anything that is not called with the object."""
    found = inspect.getattr_static(kind, name, None)
    return _unwrapped(found) if isinstance(found, types.FunctionType) else None


def _unwrapped(method: Any) -> Any:
    """Return a method without the function that Ray wraps around it, to trace calls of Ray's."""
    while vars(method).get("__ray_tracing_wrapped__"):
        method = method.__wrapped__
    return method


def _may_scatter(worker: FlatWorker, layout: Layout) -> bool:
    """Whether weights of ``layout`` can be set without a view for each part."""
    kept = worker.__dict__
    variables: Any = kept.get("variables")  # subclasses need not have any
    kinds: tuple[Any, Any] = type(worker), type(variables)
    return (
        variables is not None
        and "set_weights" not in kept
        and _sets_as_usual(*kinds)
        and bool(variables.layout == layout)
    )


def _owner_of(name: str, kind: type) -> type | None:
    """Return the class whose method ``name`` objects of ``kind`` have; None if there is none."""
    return next((one for one in kind.__mro__ if name in vars(one)), None)


@functools.lru_cache(maxsize=64)
def _sets_as_usual(worker: Any, variables: Any) -> bool:
    """Whether `set_weights` does the same as `Variables.scatter`: no subclass has its own."""
    if _unwrapped(worker.set_weights) is not FlatWorker.set_weights:
        return False
    owner = _owner_of("set_weights", variables)
    return owner is None or "scatters_weights" in vars(owner)


def _sets_all_or_none(worker: FlatWorker) -> bool:
    """Whether weights that raise an error when they are set have changed nothing."""
    kept = worker.__dict__
    if "set_weights" in kept or "set_flat" in kept:
        return False
    kinds: tuple[Any, Any] = type(worker), type(kept.get("variables"))
    return _checks_first(*kinds)


@functools.lru_cache(maxsize=64)
def _checks_first(worker: Any, variables: Any) -> bool:
    """Whether weights are set by TensorFlowVariables alone, which checks them all first."""
    names = ("set_weights", "set_flat")
    if any(_unwrapped(getattr(worker, n)) is not getattr(FlatWorker, n) for n in names):
        return False
    owners = [_owner_of(name, variables) for name in names]
    return all(owner is not None and "scatters_weights" in vars(owner) for owner in owners)


def _is_subset(worker: FlatWorker, new_weights: Any) -> bool:
    variables: Any = worker.__dict__.get("variables")  # subclasses need not have any
    is_by_name = isinstance(new_weights, Mapping) and variables is not None
    return is_by_name and len(new_weights) < len(variables.layout)


def _set(
    worker: FlatWorker,
    state: _GroupState,
    new_weights: Mapping[str, ArrayLike] | NDArray[Any],
) -> None:
    state.is_whole = _sets_all_or_none(worker)
    if isinstance(new_weights, np.ndarray):
        worker.set_flat(new_weights)
    else:
        worker.set_weights(new_weights)
    state.is_whole = True
