"""Weights in Ray's object store, and the error if it is full."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
import ray.util.client

from flatweights._weights import FlatWeights
from flatweights.ray.peers._platform import PLATFORM, GroupPlatform
from flatweights.ray.peers._transport import BY_VALUE, Call, Payload, PendingResult, weights_of
from flatweights.ray.results._result import is_arrays
from flatweights.ray.results._wire import WireMessage, nbytes_of
from flatweights.ray.support._errors import check_not_forked


def check_cluster() -> None:
    """Raise unless this process is part of Ray's cluster: a driver of Ray Client is not.

    Raises:
        RuntimeError: If Ray is connected by ``ray://``, or in a fork of a process with Ray.
    """
    check_not_forked()
    if ray.util.client.ray.is_connected():
        raise RuntimeError(
            "expected a driver in Ray's cluster, got one that is connected by Ray Client (ray://), "
            "which has no object store of its own: run it on a node of the cluster, with "
            "ray.init(address='auto') or as ray job submit -- python PROGRAM"
        )


def payload_of(value: Any, platform: GroupPlatform = PLATFORM) -> Payload:
    """Return the payload that brings ``value`` to workers."""
    nbytes = value.buffer.nbytes if type(value) is FlatWeights else nbytes_of(value)
    return Payload(value, nbytes or 0, lambda: platform.put(value), platform=platform)


class RayResult(PendingResult):
    """A reference to an object that a worker or another process makes.

    Attributes:
        ref: The reference; None once it was let go of.
    """

    def __init__(self, ref: ray.ObjectRef | None, platform: GroupPlatform = PLATFORM) -> None:
        """Take a reference; several answers may have the same."""
        self.ref = ref
        self._platform = platform

    @classmethod
    def wait(
        cls, answers: Sequence[RayResult], timeout: float | None, enough: int = 1
    ) -> list[PendingResult]:
        """Wait for an answer; return all that have arrived, of which each may have failed."""
        refs = list({answer.ref: None for answer in answers})
        if None in refs:  # an interrupt came after it was let go of
            return [answer for answer in answers if answer.ref is None]
        wait = answers[0]._platform.wait
        there = wait(refs, timeout)
        # All answers that have arrived meanwhile.
        if there and len(refs) > 1:
            there = wait(refs, 0, len(refs))
        arrived = set(there)
        return [answer for answer in answers if answer.ref in arrived]

    def result(self) -> Any:
        """Return the object: mapped from the object store, if it is large."""
        return self._platform.get(self.ref)

    def release(self) -> None:
        """Drop the reference."""
        self.ref = None

    abandon = release  # otherwise the store would keep the value; actors queue calls


def argument_of(payload: Payload | None) -> Any:
    """Return the argument by which a Ray call brings the weights; None for None.

    It is a value, or a reference: the weights are put into the object store, once, unless they are
    small or already in it. References that Ray may fail to resolve are in a tuple, for
    `weights_of`. If Ray itself failed to resolve an argument, the call would not begin, and the
    error could come from any argument.
    """
    if payload is None:
        return None
    if payload.argument is None:
        value = payload.value
        is_message = isinstance(value, FlatWeights | WireMessage)
        if is_message and payload.nbytes <= BY_VALUE:
            payload.argument = value
        elif isinstance(value, ray.ObjectRef):
            payload.argument = (value,)
        else:
            resolves = is_message or is_arrays(value)
            payload.argument = payload.put() if resolves else (payload.put(),)
    return payload.argument


def sent_weights(payload: Payload) -> Any:
    """Return the weights of a prepared payload, in the form in which they were sent."""
    sent = payload.value if payload.argument is None else payload.argument
    if type(sent) is FlatWeights:
        return sent
    if isinstance(sent, ray.ObjectRef):
        sent = payload.platform.get(sent)
    return weights_of(sent, payload.platform)


def call_actor(handle: ray.actor.ActorHandle, call: Call, platform: GroupPlatform) -> RayResult:
    """Make a call on an actor; references among the arguments are resolved, as Ray does."""
    run, weights = handle.call_version, argument_of(call.payload)
    ref = run.remote(call.head, weights, call.method, *call.args, **call.kwargs)
    return RayResult(ref, platform)
