"""Actors that tests share one after the other: starting a process takes longer than most tests."""

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import ray
from ray_workers import PlainWorker

from flatweights.ray import WorkerGroup
from flatweights.ray.peers import _wait as engine
from flatweights.ray.peers._wait import wait_any

Lend = Callable[..., WorkerGroup]


class _Kind(NamedTuple):
    """The unchangeable part of an actor: Ray restarts it with the same arguments."""

    worker: type[PlainWorker]
    rank: int
    size: int
    options: Hashable


class Actors:
    """Actors of `PlainWorker` classes, lent to groups.

    A group gets actors in the state in which they were built. An actor is lent again if it answers
    when it is taken back, still in the same process, and nobody has killed it: Ray may take a while
    to do so.
    """

    def __init__(self) -> None:
        self._idle: defaultdict[_Kind, list[Any]] = defaultdict(list)

    @contextmanager
    def loan(self) -> Iterator[Lend]:
        """Yield a function that lends groups; their actors are taken back at the end.

        It takes a class, the number of workers, the size of their weights, arguments of
        `WorkerGroup`, and options of Ray.
        """
        lent: list[tuple[_Kind, Any, Any]] = []  # with a reference to the process
        killed, kill = set[Any](), ray.kill

        def noted(actor: Any, **options: Any) -> None:
            killed.add(actor._actor_id)
            kill(actor, **options)

        def lend(
            worker: type[PlainWorker],
            n: int,
            size: int = 5,
            *,
            max_inflight: int = 4,
            wire_dtype: Any = None,
            initial: Any = "lowest",
            **options: Any,
        ) -> WorkerGroup:
            kinds = [_Kind(worker, rank, size, tuple(sorted(options.items()))) for rank in range(n)]
            actors = [self._take(kind, options) for kind in kinds]
            lent.extend((k, a, a.pid.remote()) for k, a in zip(kinds, actors, strict=True))
            return WorkerGroup(
                actors, max_inflight=max_inflight, wire_dtype=wire_dtype, initial=initial
            )

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(ray, "kill", noted)
            try:
                yield lend
            finally:
                patched.undo()
                self._take_back(lent, killed)

    def stop(self) -> None:
        """End all actors that are not lent: a waiting process of Ray uses the processor, too."""
        for actors in self._idle.values():
            for actor in actors:
                ray.kill(actor)
        self._idle.clear()

    def _take(self, kind: _Kind, options: dict[str, Any]) -> Any:
        if self._idle[kind]:
            return self._idle[kind].pop()
        remote: Any = ray.remote(kind.worker)
        return remote.options(num_cpus=0, **options).remote(kind.rank, kind.size)

    def _take_back(self, lent: list[tuple[_Kind, Any, Any]], killed: Container[Any]) -> None:
        for _, actor, _ in lent:
            if actor._actor_id in killed:  # perhaps Ray restarts it
                ray.kill(actor)
        lent = [one for one in lent if one[1]._actor_id not in killed]
        rebuilt = [actor.build_anew.remote() for _, actor, _ in lent]
        for (kind, actor, before), after in zip(lent, rebuilt, strict=True):
            try:
                if len({*ray.get([before, after], timeout=5)}) == 1:
                    self._idle[kind].append(actor)
                    continue
            except (ray.exceptions.RayError, TimeoutError):
                pass  # it died, or still works
            ray.kill(actor)


@contextmanager
def only_late(count: int = 1) -> Iterator[None]:
    """Let a round's time end only for its last ``count`` ranks, however slow the machine is."""

    def wait(answers: Collection[Any], deadline: float | None = None, enough: int = 1) -> list[Any]:
        others = len(answers) - count
        if others <= 0:
            return wait_any(answers, deadline, enough)
        while len(there := wait_any(answers, None, others)) < others:
            pass  # some by channels, the others by Ray
        return there

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(engine, "wait_any", wait)
        yield


def restored(group: WorkerGroup, timeout: float = 60) -> list[int]:
    """`restore` until some rank is back: Ray takes a while to restart an actor."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if found := group.restore():
            return found
        time.sleep(0.02)
    raise AssertionError(f"nobody is back: {group.unhealthy}")


def wait_until_dead(actor: Any) -> None:
    """Wait until Ray has ended an actor that was killed: it takes a while."""
    while True:
        try:
            ray.get(actor.ping.remote())
        except ray.exceptions.ActorDiedError:
            return
