"""Calls of workers as Ray's actor calls: answers are references to objects."""

from collections.abc import Sequence
from typing import Any

import ray

from flatweights.ray._calls import Answer, Call, Payload, Worker
from flatweights.ray._round import ShardedWeights
from flatweights.ray._wire import nbytes_of

# Up to here arguments travel with the call and results with its reply; beyond, a value is
# better put into the object store once than pickled into each call.
# Measured: with four actors, by value 2.3 ms against 3.3 ms by reference up to 100 KiB of
# pickle, 4.8 ms beyond. Some of that is the layout's.
BY_VALUE = 96 * 1024


class RayAnswer(Answer):
    """A reference to an object that a worker or somebody else makes.

    Attributes:
        ref: The reference; None once it was let go of.
    """

    def __init__(self, ref: Any, *, fetch: bool = True) -> None:
        """Take a reference.

        Args:
            ref: The reference; several answers may have the same.
            fetch: Whether it is there once its object is on this node, rather than on any.
        """
        self.ref = ref
        self._fetch = fetch

    @classmethod
    def wait(
        cls, answers: Sequence["RayAnswer"], timeout: float | None, enough: int = 1
    ) -> list[Answer]:
        """Return those that are there, once there is one: each may have failed."""
        refs = list({answer.ref: None for answer in answers})
        fetch = all(answer._fetch for answer in answers)
        there, _ = ray.wait(refs, num_returns=1, timeout=timeout, fetch_local=fetch)
        # All that have arrived meanwhile.
        if there and len(refs) > 1:
            there, _ = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=fetch)
        arrived = set(there)
        return [answer for answer in answers if answer.ref in arrived]

    def take(self) -> Any:
        """Return the object: mapped from the object store, if it is large."""
        return ray.get(self.ref)

    def abandon(self) -> None:
        """Drop the reference, or the store would keep the value: actors take turns."""
        self.ref = None

    def let_go(self) -> None:
        """Drop the reference."""
        self.ref = None


def argument_of(payload: Payload | None) -> Any:
    """Return the argument by which a Ray call brings the weights: a value or a reference.

    The weights are put into the object store, once, unless they are small or there. None for None.
    """
    if payload is None:
        return None
    if RayWorker not in payload.ready:
        value = payload.value
        by_value = isinstance(value, (ray.ObjectRef, ShardedWeights))
        by_value = by_value or (nbytes_of(value) or BY_VALUE + 1) <= BY_VALUE
        payload.ready[RayWorker] = value if by_value else payload.put()
    return payload.ready[RayWorker]


class RayWorker(Worker):
    """A worker that is called as an actor."""

    def __init__(self, handle: Any) -> None:
        """Take the handle of an actor of a `FlatWorker` class."""
        self.handle = handle

    def call(self, call: Call) -> RayAnswer:
        """Call the worker; references among the arguments are resolved, as Ray does."""
        run = self.handle.call_version
        weights = argument_of(call.payload)
        return RayAnswer(run.remote(call.head, weights, call.method, *call.args, **call.kwargs))

    def prepare(self, payload: Payload) -> None:
        """Put the weights into the object store, unless they are small or there."""
        argument_of(payload)

    def end(self) -> None:
        """Kill the actor."""
        ray.kill(self.handle)
