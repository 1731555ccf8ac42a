"""Actors that all processes of a Ray job find by a name; the first one that asks starts them."""

from __future__ import annotations

import functools
import hashlib
import inspect
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from flatweights.ray import _clock

_TRIES = 10
_PAUSE = 0.05  # seconds between two tries
_SPACE = "flatweights-"


def actor_class(cls: type) -> Any:
    """Return what `ray.remote` makes of a class, made once: Ray keeps each, until the job ends.

    A class that has changed since is made again: Ray pickles a class only once, and looks once at
    its methods, of which a class that is pickled by its name tells nothing.
    """
    try:
        content = hashlib.blake2b(ray.cloudpickle.dumps(cls)).digest()
    except Exception:  # Ray says what cannot be pickled, when it starts an actor
        return ray.remote(cls)
    # Ray writes to their signatures, but not to their code.
    methods = inspect.getmembers(cls, lambda one: hasattr(one, "__code__"))
    codes = tuple((name, one.__code__, len(one.__defaults__ or ())) for name, one in methods)
    return _actor_class(cls, content, codes)


@functools.cache
def _actor_class(cls: type, content: bytes, codes: tuple[Any, ...]) -> Any:
    return ray.remote(cls)


def shared_actor(
    cls: type, name: str, node: str, concurrency: int, *args: object
) -> ray.actor.ActorHandle:
    """Find the actor ``name``; if there is none, start it on ``node``, without CPUs.

    The actor outlives the process that starts it, so it has to end by itself.

    Args:
        cls: The class of the actor.
        name: Its name.
        node: The id of the node, as a text.
        concurrency: The number of calls that it runs at a time.
        *args: The arguments of its constructor.

    Raises:
        ConnectionError: If, again and again, another process starts it meanwhile and it ends at
            once.
    """
    options = actor_class(cls).options(
        **_address(name),
        get_if_exists=True,
        lifetime="detached",
        num_cpus=0,
        max_concurrency=concurrency,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
    )
    tries = _TRIES
    while True:
        try:
            return options.remote(*args)
        except ValueError as error:
            # Ray finds no actor, loses against another process that starts it, and looks again. By
            # then, it may have ended.
            tries -= 1
            if not tries:
                raise ConnectionError(f"actor {name!r} ended as it was found: {error}") from None
        _clock.sleep(_PAUSE)


def has_shared_actor(name: str) -> bool:
    """Return whether there is an actor ``name``."""
    try:
        ray.get_actor(**_address(name))
    except ValueError:
        return False
    return True


def other_jobs_with(name: str) -> list[str]:
    """Return the ids of other Ray jobs of the cluster that have an actor ``name``."""
    own = _address(name)
    every = ray.util.list_named_actors(all_namespaces=True)
    spaces = [one["namespace"] for one in every if one["name"] == own["name"]]
    return sorted(one.removeprefix(_SPACE) for one in spaces if one != own["namespace"])


def _address(name: str) -> dict[str, str]:
    job = ray.get_runtime_context().get_job_id()
    return {"name": f"flatweights:{name}", "namespace": f"{_SPACE}{job}"}
