"""Publishing to other nodes: an actor on each subscribes for all its processes; one program."""

import contextlib
import functools
import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import ray
from ray_cluster import LEAN, start_lean_cluster
from ray_programs import output_of

from flatweights.ray import Publisher, Subscriber

pytestmark = [
    pytest.mark.ray(own=True),
    pytest.mark.skipif(os.uname().sysname != "Linux", reason="such memory is Linux's"),
]

SIZE = 50_000
NODE = LEAN | {"object_store_memory": 75 * 2**20, "num_cpus": 1}


class Actor:
    def __init__(self) -> None:
        self.weights = np.zeros(SIZE)
        self.subscriber = Subscriber("nodes", self.weights, timeout=120)

    def update(self) -> tuple[bool, int, float, str]:
        is_new = self.subscriber.update()
        assert (self.weights == self.weights[0]).all()
        return is_new, self.subscriber.version, float(self.weights[0]), self.subscriber.transport


def read_at_once(setting: str) -> tuple[str, float]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLATWEIGHTS_RAY", setting)
        with Subscriber("nodes", timeout=120) as subscriber:
            (part,) = subscriber.read().values()
            return subscriber.transport, float(part[0])


remote_reader: Any = ray.remote(num_cpus=0, resources={"away": 1})(read_at_once)
remote_actor: Any = ray.remote(num_cpus=0, resources={"away": 1})(Actor)


def alive(kind: str) -> list[int]:
    """Return the processes of the actors of a class."""
    actors = ray._private.state.actors().values()
    return [a["Pid"] for a in actors if a["State"] == "ALIVE" and a["ActorClassName"] == kind]


def is_gone(kind: str) -> bool:
    return not alive(kind)


def expect_readers_soon(kind: str) -> None:
    """Let the actors of a class end a second after their last reader, in place of ten."""

    def shorten(_: Any) -> None:
        from flatweights.ray.publishing import _transports

        _transports._IDLE = 1.0

    for one in ray.util.list_named_actors(all_namespaces=True):
        if one["name"].startswith(f"flatweights:{kind.lower()}:"):
            with contextlib.suppress(ray.exceptions.RayError, ValueError):  # it has just ended
                actor = ray.get_actor(one["name"], one["namespace"])
                ray.get(actor.__ray_call__.remote(shorten))


def wait_until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def has(actors: list[Any], version: int, value: float) -> bool:
    found = ray.get([actor.update.remote() for actor in actors])
    return all(one[1:] == (version, value, "agent") for one in found)


def publish_to_nodes() -> None:
    cluster = start_lean_cluster(**NODE)
    cluster.add_node(resources={"away": 10}, **NODE)
    weights = np.ones(SIZE)
    publisher = Publisher("nodes", weights)
    publisher.publish()
    found: dict[str, Any] = {}
    # What was published before is there for a first reader of its node.
    found["at once"] = ray.get([remote_reader.remote(setting) for setting in ("", "store")])
    actors = [remote_actor.remote() for _ in range(3)]
    wait_until(lambda: has(actors, 1, 1.0))
    found["relays"] = len(alive("Relay"))
    for version in range(2, 20):
        weights[:] = version
        publisher.publish()
    wait_until(lambda: has(actors, 19, 19.0))
    # The actor of the node is killed: another one takes its place.
    os.kill(alive("Relay")[0], signal.SIGKILL)
    weights[:] = 20
    publisher.publish()
    wait_until(lambda: has(actors, 20, 20.0))
    # A publisher takes over.
    weights[:] = 21
    newer = Publisher("nodes", weights)
    version = newer.publish()
    wait_until(lambda: has(actors, version, 21.0))
    found["version"] = version
    # Processes without readers end.
    for actor in actors:
        ray.kill(actor)
    for kind in ("Relay", "Proxy"):
        expect_readers_soon(kind)
        wait_until(functools.partial(is_gone, kind))
    newer.close()
    print(json.dumps(found))


def test_one_actor_of_a_node_reads_for_all_of_its_processes() -> None:
    found = json.loads(output_of(publish_to_nodes).splitlines()[-1])
    at_once = [["agent", 1.0], ["store", 1.0]]
    assert found == {"at once": at_once, "relays": 1, "version": 10**12 + 1}
