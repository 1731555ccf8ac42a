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
from flatweights.ray.publishing import _names
from flatweights.ray.publishing._relay_tree import RelayTree
from flatweights.ray.publishing._transports import proxy_of

pytestmark = [
    pytest.mark.ray(own=True),
    pytest.mark.skipif(os.uname().sysname != "Linux", reason="such memory is Linux's"),
]

SIZE = 50_000
NODE = LEAN | {"object_store_memory": 75 * 2**20, "num_cpus": 1}


class Actor:
    def __init__(self, name: str = "nodes") -> None:
        self.weights = np.zeros(SIZE)
        self.subscriber = Subscriber(name, self.weights, timeout=120)

    def update(self) -> tuple[bool, int, float, str]:
        is_new = self.subscriber.update()
        assert (self.weights == self.weights[0]).all()
        return is_new, self.subscriber.version, float(self.weights[0]), self.subscriber.transport

    def read(self) -> float:
        return float(next(iter(self.subscriber.read().values()))[0])


class Away:
    """A publisher in a process of its own."""

    def publish(self, value: float) -> int:
        self.publisher = Publisher("nodes", np.full(SIZE, value))
        return self.publisher.publish()


def read_at_once(setting: str) -> tuple[str, float]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLATWEIGHTS_RAY", setting)
        with Subscriber("nodes", timeout=120) as subscriber:
            (part,) = subscriber.read().values()
            return subscriber.transport, float(part[0])


remote_reader: Any = ray.remote(num_cpus=0, resources={"away": 1})(read_at_once)
remote_actor: Any = ray.remote(num_cpus=0, resources={"away": 1})(Actor)
remote_publisher: Any = ray.remote(num_cpus=0, resources={"away": 1})(Away)
any_actor: Any = ray.remote(num_cpus=0)(Actor)


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


def wait_until(condition: Callable[[], Any], seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def has(actors: list[Any], version: int, value: float) -> bool:
    found = ray.get([actor.update.remote() for actor in actors])
    return all(one[1:] == (version, value, "agent") for one in found)


def take_over_and_end(weights: Any, actors: list[Any]) -> None:
    """Let another publisher take over, and wait until processes without readers have ended."""
    weights[:] = 21
    newer = Publisher("nodes", weights)
    version = newer.publish()
    assert version == 10**12 + 1
    wait_until(lambda: has(actors, version, 21.0))
    for actor in actors:
        ray.kill(actor)
    for kind in ("Relay", "Proxy"):
        expect_readers_soon(kind)
        wait_until(functools.partial(is_gone, kind))
    newer.close()


def publish_to_nodes(until: str) -> None:
    cluster = start_lean_cluster(**NODE)
    cluster.add_node(resources={"away": 10}, **NODE)
    weights = np.ones(SIZE)
    publisher = Publisher("nodes", weights)
    publisher.publish()
    found: dict[str, Any] = {}
    # What was published before is there for a first reader of its node.
    found["at once"] = ray.get([remote_reader.remote(setting) for setting in ("", "store")])
    actors = [remote_actor.remote() for _ in range(2)]
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
    if until == "all have ended":
        take_over_and_end(weights, actors)
    publisher.close()
    print(json.dumps(found))


@pytest.mark.slow
@pytest.mark.parametrize(
    "until", ["all have read", pytest.param("all have ended", marks=pytest.mark.slow)]
)
def test_one_actor_of_a_node_reads_for_all_of_its_processes(until: str) -> None:
    found = json.loads(output_of(publish_to_nodes, until).splitlines()[-1])
    at_once = [["agent", 1.0], ["store", 1.0]]
    assert found == {"at once": at_once, "relays": 1}


def publish_here_and_there() -> None:
    """Publish on another node, whose relay does not read it in time; then here again."""
    cluster = start_lean_cluster(**NODE)
    cluster.add_node(resources={"away": 10}, **NODE)
    weights = np.ones(SIZE)
    first = Publisher("nodes", weights)
    first.publish()
    actor, away = remote_actor.remote(), remote_publisher.remote()
    wait_until(lambda: has([actor], 1, 1.0))
    (relay,) = alive("Relay")
    os.kill(relay, signal.SIGSTOP)
    version = ray.get(away.publish.remote(2.0))
    wait_until(lambda: ray.get(actor.update.remote())[1] == version)
    ray.kill(away)
    os.kill(relay, signal.SIGCONT)
    last, read, end = Publisher("nodes", weights), set[float](), time.monotonic() + 5
    while time.monotonic() < end:
        read.add(ray.get(actor.read.remote()))
    weights[:] = 3
    newest = last.publish()
    at_once = ray.get(remote_reader.remote(""))
    wait_until(lambda: has([actor], newest, 3.0))
    print(json.dumps([sorted(read), at_once]))


@pytest.mark.slow
def test_the_relay_of_a_node_brings_no_weights_of_an_earlier_publisher() -> None:
    assert output_of(publish_here_and_there).splitlines()[-1] == '[[2.0], ["agent", 3.0]]'


class Chain:
    """A publisher and two relays, one of which passes weights on to the other."""

    def __init__(self) -> None:
        cluster = start_lean_cluster(**NODE)
        for name in "ab":
            cluster.add_node(resources={name: 10}, **NODE)
        self.weights = np.zeros(SIZE)
        self.publisher = Publisher("chain", self.weights)
        self.publish()
        record = _names.find("chain")
        assert record is not None
        proxy = proxy_of("chain", record)

        def make_chain(actor: Any) -> None:
            actor._tree = RelayTree(1)

        ray.get(proxy.__ray_call__.remote(make_chain))
        self.actors = {name: self.reader(name) for name in "ab"}

    def reader(self, node: str) -> Any:
        actor = any_actor.options(resources={node: 1}).remote("chain")
        ray.get(actor.update.remote())
        return actor

    def relay(self, node: str) -> Any:
        """Return the relay of a node."""
        (name,) = [
            one
            for one in ray.util.list_named_actors(all_namespaces=True)
            if one["name"] == f"flatweights:relay:chain:{self.id_of(node)}"
        ]
        return ray.get_actor(name["name"], name["namespace"])

    def id_of(self, node: str) -> str:
        (found,) = [one["NodeID"] for one in ray.nodes() if node in one["Resources"]]
        return str(found)

    def process(self, node: str) -> int:
        return int(ray.get(self.relay(node).__ray_call__.remote(lambda _: os.getpid())))

    def has_parent(self, node: str) -> bool:
        """Whether the relay of a node gets weights from another relay."""
        call = self.relay(node).__ray_call__
        return bool(ray.get(call.remote(lambda relay: relay._source._pull._parent is not None)))

    def publish(self) -> None:
        self.weights += 1
        self.publisher.publish()

    def wait(self, *nodes: str, seconds: float = 240) -> None:
        """Wait until the readers of these nodes have the newest weights."""
        actors = [self.actors[node] for node in nodes]
        version = self.publisher.version
        wait_until(lambda: has(actors, version, float(self.weights[0])), seconds)

    def follow_newer_publishers(self) -> None:
        """Publish as another publisher while the last one's node answers nothing: twice.

        First the relays wait for weights from there, then a relay asks whether there are any.
        """
        for node in "ab":
            ray.get(self.relay(node).__ray_call__.remote(be_patient))
        self.publish()
        self.wait("a", "b")
        (stopped,) = alive("Proxy")
        os.kill(stopped, signal.SIGSTOP)
        self.publisher = Publisher("chain", self.weights)
        self.publish()
        self.wait("a", "b", seconds=60)
        (proxy,) = set(alive("Proxy")) - {stopped}
        os.kill(proxy, signal.SIGSTOP)
        os.kill(self.process("a"), signal.SIGKILL)
        late = self.actors["a"].update.remote()
        wait_until(lambda: len(alive("Relay")) == 2)
        self.publisher = Publisher("chain", self.weights)
        self.publish()
        self.wait("a", "b", seconds=40)  # less than a relay waits for an answer
        ray.get(late)
        for process in (stopped, proxy):
            os.kill(process, signal.SIGKILL)


def be_patient(_: Any) -> None:
    from flatweights.ray.publishing import _transports

    _transports._GRACE = _transports._RELAY_GRACE = 10_000.0


def fetch_slowly_from_a_proxy() -> None:
    """Fetch weights long after a proxy without readers would have ended."""
    publisher = Publisher("slow", np.ones(SIZE))
    publisher.publish()
    record = _names.find("slow")
    assert record is not None
    proxy = proxy_of("slow", record)
    ray.get(proxy.ping.remote())
    expect_readers_soon("Proxy")
    _, _, told = ray.get(proxy.newer.remote(0))
    time.sleep(3.0)
    buffer = ray.get(told[0], timeout=10)
    assert (buffer.view(np.float64) == 1.0).all()
    publisher.close()


def publish_along_a_chain() -> None:
    chain = Chain()
    assert not chain.has_parent("a")
    assert chain.has_parent("b")
    for _ in range(5):
        chain.publish()
        chain.wait("a", "b")
    process = chain.process("a")
    os.kill(process, signal.SIGSTOP)
    chain.publish()
    chain.wait("b")
    assert not chain.has_parent("b")
    os.kill(process, signal.SIGCONT)
    chain.wait("a", "b")
    os.kill(process, signal.SIGKILL)
    chain.publish()
    chain.wait("a", "b")
    # Another relay takes the place of that of each node.
    os.kill(chain.process("b"), signal.SIGKILL)
    chain.publish()
    chain.wait("a", "b")
    assert chain.has_parent("b")
    os.kill(chain.process("a"), signal.SIGKILL)
    chain.publish()
    chain.wait("a", "b")
    chain.follow_newer_publishers()
    chain.publisher.close()
    fetch_slowly_from_a_proxy()
    print("all have all versions")


@pytest.mark.slow
def test_a_relay_that_is_stopped_or_killed_keeps_no_weights_from_others() -> None:
    assert output_of(publish_along_a_chain).splitlines()[-1] == "all have all versions"
