"""What groups and workers use of Ray and of channels, in one place; see `members/_platform.py`.

`PLATFORM` is that of production. `tests/sim` has one of its own, on which the same groups and
workers run in one process, with a virtual clock (`_clock`), and die as a seed says.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from flatweights.ray.channels._driver_channel import Channels
from flatweights.ray.channels._worker_channel import WorkerChannel
from flatweights.ray.nodes._link import LinkPlatform
from flatweights.ray.nodes._node_reducer import NodeReducer
from flatweights.ray.nodes._plan import SMALL
from flatweights.ray.peers._shared_actor import actor_class
from flatweights.ray.support._errors import check_connected, session_of_ray

_Result = TypeVar("_Result")


class GroupPlatform(LinkPlatform):
    """Ray, threads, and memory that two processes map.

    Attributes:
        least_exchanged: Bytes of a model from which nodes exchange it; smaller ones are sent on.
    """

    least_exchanged = SMALL

    # Of a driver.

    session = staticmethod(session_of_ray)
    check_connected = staticmethod(check_connected)

    thread = staticmethod(threading.get_ident)

    def channels(self) -> Channels:
        """Return the driver's ends of channels, without any.

        Raises:
            OSError: If there can be no channels on this system.
        """
        return Channels()

    def wait(
        self, refs: Sequence[ray.ObjectRef], timeout: float | None = 0, enough: int = 1
    ) -> list[ray.ObjectRef]:
        """Wait for ``enough`` of ``refs``, which differ; return those that are there."""
        there: list[ray.ObjectRef] = ray.wait(refs, num_returns=enough, timeout=timeout)[0]
        return there

    def put(self, value: Any) -> ray.ObjectRef:
        """Put a value into the object store.

        Raises:
            ray.exceptions.ObjectStoreFullError: If it is full.
        """
        return ray.put(value)

    def kill(self, handle: ray.actor.ActorHandle) -> None:
        """End an actor; Ray does not start it again."""
        ray.kill(handle)

    def end(self, handle: ray.actor.ActorHandle) -> None:
        """End an actor, unless Ray was shut down, which has ended it: `kill` would start a Ray."""
        if ray.is_initialized():
            with contextlib.suppress(ValueError):  # the actor belongs to an earlier session of Ray
                self.kill(handle)

    # Of a driver, a coordinator and agents.

    def start_agent(
        self, node: str, cls: type, args: Sequence[Any], calls: int
    ) -> ray.actor.ActorHandle:
        """Start an actor without CPUs on ``node``, which runs ``calls`` calls at a time."""
        where = NodeAffinitySchedulingStrategy(node, soft=False)
        options: Any = {"num_cpus": 0, "max_concurrency": calls}
        made: Any = actor_class(cls).options(scheduling_strategy=where, **options)
        return made.remote(*args)

    def node_reducer(self, offer: Callable[[int], None]) -> NodeReducer:
        """Return this node's part of exchanges; see `NodeReducer`."""
        return NodeReducer(offer, ray.util.get_node_ip_address())

    def queue(self) -> Any:
        """Return a queue, whose `get` waits for what `put` has put there."""
        return SimpleQueue()

    def later(self, seconds: float, call: Callable[..., object], *args: Any) -> None:
        """Make a call later, in another thread."""
        timer = threading.Timer(seconds, call, args)
        timer.daemon = True
        timer.start()

    def future_of(self, ref: ray.ObjectRef) -> Future[Any]:
        """Return the future of the result of a call."""
        made: Future[Any] = ref.future()
        return made

    def when_done(self, ref: ray.ObjectRef, look: Callable[[Future[Any]], object]) -> None:
        """Call ``look`` with the future of a result once it is there, in any thread."""
        self.future_of(ref).add_done_callback(look)

    def result_of(self, done: Future[_Result]) -> _Result:
        """Wait until ``done``; return its result, or raise its exception."""
        return done.result()

    def wait_for_all(self, futures: Iterable[Future[Any]], seconds: float) -> set[Future[Any]]:
        """Wait for all ``futures``, for at most ``seconds``; return those that are done."""
        return concurrent.futures.wait(futures, seconds).done

    # Of a driver and of a worker.

    def get(self, ref: ray.ObjectRef, timeout: float | None = None) -> Any:
        """Return the result of a call or an object of the store, or raise its exception."""
        return ray.get(ref, timeout=timeout)

    def node(self) -> str:
        """Return the id of this node."""
        node: str = ray.get_runtime_context().get_node_id()
        return node

    # Of a worker.

    def worker_channel(self, address: bytes, token: bytes) -> WorkerChannel:
        """Connect to a driver; see `WorkerChannel`."""
        return WorkerChannel(address, token)

    def was_restarted(self) -> bool:
        """Whether Ray has started this actor more than once."""
        return _was_restarted()


@functools.cache
def _was_restarted() -> bool:
    context = ray.get_runtime_context()
    if context.get_actor_id() is None:
        return False
    with warnings.catch_warnings():  # Ray itself calls a deprecated function here
        warnings.simplefilter("ignore")
        return bool(context.was_current_actor_reconstructed)


PLATFORM = GroupPlatform()
