"""Rounds between three nodes of this machine: averages bit for bit, and faults inside exchanges.

One program starts the nodes and runs the checks; a test waits for the outcome of one check.
"""

import contextlib
import gc
import json
import logging
import os
import re
import signal
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from certificates import make_authority, make_certificate, tls_environment
from node_members import check_members
from numpy.typing import NDArray
from ray_cluster import LEAN, MISSED_SOON, start_lean_cluster
from ray_programs import program
from ray_workers import PlainWorker, merged, trained, wait_for, weights_of
from reference import same_bits

import flatweights as fw
from flatweights.ray import Round, WorkerError, WorkerGroup
from flatweights.ray.nodes._address import Address
from flatweights.ray.peers._agent import AverageOf, Command
from flatweights.ray.peers._backoff import Backoff
from flatweights.ray.peers._by_agent import AgentClient, NodeCall
from flatweights.ray.results._result import copied
from flatweights.ray.support import _failpoints

pytestmark = [pytest.mark.ray(own=True), pytest.mark.starts_actors]

NODE = LEAN | {"object_store_memory": 100 * 2**20, "num_cpus": 1}
PLACES = ("home", "a", "b", "a", "a", "b")  # by rank
SIZE = 70_001  # elements
SLACK = 5.0  # seconds after its timeout in which a round has ended; one, on a machine that is idle
KINDS = ("FlatWeights", "vector", "dict", "list", "tree")

Check = Callable[["Nodes"], None]
CHECKS: dict[str, Check] = {}
SLOW: set[str] = set()


def check(function: Check) -> Check:
    """Make the check a test of its outcome in the program."""
    CHECKS[function.__name__] = function
    return function


def slow_check(function: Check) -> Check:
    SLOW.add(function.__name__)
    return check(function)


def model_of(kind: str, rank: int, seed: int = 0) -> Any:
    """The result of `NodeWorker.give`; its size is not a multiple of 64 bytes."""
    rng = np.random.default_rng([seed, rank])
    values = rng.normal(size=SIZE).astype(np.float32)
    parts = {
        "w": values,
        "n": np.array(rank),
        "v": rng.normal(size=(7, 11)),
        "nothing": np.zeros((0, 3), np.float32),
    }
    if kind == "vector":
        return values
    if kind == "list":
        return [*parts.values()]
    if kind == "tree":
        return {"b": [parts["w"], {"x": parts["v"]}], "a": (values[:10].copy(),)}
    return fw.FlatWeights(parts) if kind == "FlatWeights" else parts


def drift_of(rank: int, seed: int) -> NDArray[Any]:
    """The step of `NodeWorker.drift`: too small for weights of 16 bits."""
    return 1e-3 * np.random.default_rng([seed, rank]).random(SIZE)


class NodeWorker(PlainWorker):
    """Also returns models of any kind, late or not at all."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank, SIZE)

    def give(
        self, kind: str, seed: int = 0, plan: Mapping[int, str] = {}, *, extras: bool = False
    ) -> Any:
        action = plan.get(self.rank, "")
        model = model_of(kind, self.rank, seed)
        if action == "raise":
            raise ArithmeticError("diverged")
        if action == "nan":
            model["w"][5] = np.nan
        if action.startswith("sleep"):
            time.sleep(float(action.split()[1]))
        if action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if action == "exit":
            os._exit(1)
        return (model, {"samples": self.rank + 1}) if extras else model

    def small(self) -> NDArray[Any]:
        return np.full(100, float(self.rank))

    def drift(self, seed: int, plan: Mapping[int, str] = {}) -> fw.FlatWeights:
        if plan.get(self.rank, "").startswith("sleep"):
            time.sleep(float(plan[self.rank].split()[1]))
        self.model["w"] += drift_of(self.rank, seed)
        self.model["n"] += 1
        return self.get_weights()

    def push(self, seed: int) -> fw.FlatWeights:
        return fw.FlatWeights({"w": drift_of(self.rank, seed).astype(np.float32)})

    def set_w(self, value: float) -> None:
        self.model["w"][:] = value

    def train_once_told(self, rank: int, where: str) -> fw.FlatWeights:
        """Train; a ``rank`` waits for a file, and writes another."""
        if self.rank == rank:
            wait_for(Path(where, "go on"))
            Path(where, "trained").touch()
        return self.train()


def leaves(model: Any) -> Iterator[NDArray[Any]]:
    if isinstance(model, Mapping):
        for name in sorted(model):
            yield from leaves(model[name])
    elif isinstance(model, list | tuple):
        for one in model:
            yield from leaves(one)
    else:
        yield np.asarray(model)


def assert_same(got: Any, expected: Any) -> None:
    for one, other in zip(leaves(got), leaves(expected), strict=True):
        assert same_bits(one, other)


def oracle(result: Round, models: Mapping[int, Any], weights: Sequence[float] | None = None) -> Any:
    """The average that `Round.used` and `Round.groups` determine."""
    ranks = [*result.used]
    given = [1.0 if weights is None else weights[rank] for rank in ranks]
    if not result.groups:
        return fw.average([models[rank] for rank in ranks], given)
    places = [[ranks.index(rank) for rank in group] for group in result.groups]
    return merged([models[rank] for rank in ranks], places, given)


def assert_right(
    result: Round, kind: str, seed: int = 0, weights: Sequence[float] | None = None
) -> None:
    models = {rank: model_of(kind, rank, seed) for rank in range(6)}
    assert_same(result.weights, oracle(result, models, weights))


class Nodes:
    """The cluster, its workers, and their groups."""

    def __init__(self) -> None:
        self.cluster = start_lean_cluster(
            resources={"home": 100}, _system_config=MISSED_SOON, **NODE
        )
        self.added = [self.cluster.add_node(resources={name: 100}, **NODE) for name in "ab"]
        self.cluster.wait_for_nodes()
        worker = ray.remote(num_cpus=0, max_restarts=-1)(NodeWorker)
        self.actors = [
            worker.options(resources={place: 1}).remote(rank) for rank, place in enumerate(PLACES)
        ]
        self.groups: dict[str, WorkerGroup] = {}
        self.last: str | None = None

    def group(self, way: str) -> WorkerGroup:
        """The group of all actors that takes this way; all agents take part in its next round."""
        if way not in self.groups:
            self.groups[way] = self.new_group(way)
        if self.last != way:  # workers have the weights of the group that sent the last ones
            self.groups[way].broadcast(weights_of(1.0, SIZE))
            self.last = way
        meet(self.groups[way])
        return self.groups[way]

    def new_group(self, way: str, **options: Any) -> WorkerGroup:
        self.last = None
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("FLATWEIGHTS_BETWEEN_NODES", way)
            return WorkerGroup(self.actors, initial=None, **options)


def meet(group: WorkerGroup) -> None:
    """Wait until all ranks take part, by channels and agents."""
    end = time.monotonic() + 100
    while True:
        group.restore(timeout=10)
        found = group.average("give", "FlatWeights", 9, min_results=1)
        assert_right(found, "FlatWeights", 9)
        by_memory = [k for k in found.used if found.transports[k].startswith(("shm", "agent"))]
        if len(by_memory) == 6:
            try_streams_again(group)
            return
        assert time.monotonic() < end, (found, found.transports, group.unhealthy)
        time.sleep(0.05)


def try_streams_again(group: WorkerGroup) -> None:
    """Make the next round try streams, although they failed a moment ago."""
    group._worker_set.agents.streams = Backoff("other nodes are")


@contextlib.contextmanager
def closed_port(group: WorkerGroup, rank: int) -> Iterator[None]:
    """Announce an address of a rank's agent at which nobody listens."""
    agent = group._worker_set.agents._by_node[ray.get(group.actors()[rank].node.remote())]
    address = agent.address(60)
    assert isinstance(address, Address), address
    with socket.socket() as unused:
        unused.bind((address.host, 0))
        agent._address = address._replace(port=unused.getsockname()[1])
        group._worker_set.agents.epoch = (), b""  # the sockets that are open have broken, too
        try:
            yield
        finally:
            agent._address = address
            try_streams_again(group)


def agents_of(group: WorkerGroup) -> list[Any]:
    return [agent.handle for agent in group._worker_set.agents._by_node.values()]


def agent_at(group: WorkerGroup, rank: int) -> Any:
    node = ray.get(group.actors()[rank].node.remote())
    return group._worker_set.agents._by_node[node].handle


def pid_of(actor: Any) -> int:
    pid: int = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))
    return pid


def set_hook(actor: Any, point: str, action: str) -> None:
    """Make an agent act at the next ``point``, once."""

    def install(_: Any, point: str = point, action: str = action) -> None:
        import ctypes
        import os
        import signal
        import time

        from flatweights.ray.support import _failpoints

        def hook(reached: str) -> None:
            if reached == point:
                _failpoints.hook = None
                if action == "exit":
                    os._exit(1)
                if action == "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                if action == "freeze":  # stop all threads, as Ray's store does to make room
                    ctypes.PyDLL(None).sleep(4)
                time.sleep(float(action.partition(" ")[2] or 0))

        _failpoints.hook = hook

    ray.get(actor.__ray_call__.remote(install))


# Averages


@check
def all_ranks_take_part_by_channels_and_agents(nodes: Nodes) -> None:
    assert len(agents_of(nodes.group("streams"))) == 2


@check
def averages_have_the_bits_that_are_documented(nodes: Nodes) -> None:
    weights = [0.0, 1.0, 2.5, 1.0, 3.0, 0.5]
    group = nodes.group("streams")
    # One to three workers a node, also none on the driver's.
    for ranks in ([1, 2], [0, 1, 2], [0, 1, 3, 2, 5], [*range(6)]):
        for kind in KINDS if len(ranks) > 4 else KINDS[:1]:
            found = group.average("give", kind, 7, weights=weights, ranks=ranks)
            assert found.used == tuple(sorted(ranks)), found
            assert_right(found, kind, 7, weights)
            assert bool(found.groups) == (len(ranks) == 6), (ranks, found.groups)
            for rank in ranks:
                expected = "shm" if PLACES[rank] == "home" else "agent: streams"
                assert found.transports[rank] == expected, found.transports
            links = found.record()["links"]
            assert len(links) == len({PLACES[rank] for rank in ranks} | {"home"}), links


@slow_check
def sums_of_float32_are_the_average_of_averages(nodes: Nodes) -> None:
    group = nodes.new_group("streams", reduce_dtype="float32")
    meet_anyhow(group)
    given = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    found = group.average("give", "vector", weights=given)
    models = [model_of("vector", rank) for rank in range(6)]
    assert sorted(found.groups) == [(0,), (1, 3, 4), (2, 5)]
    total = fw.RunningAverage()
    for ranks in found.groups:
        of_group = [given[rank] for rank in ranks]
        total.add(fw.average([models[rank] for rank in ranks], of_group), sum(of_group))
    assert_same(found.weights, total.mean())


def meet_anyhow(group: WorkerGroup) -> None:
    """Wait until agents take part."""
    end = time.monotonic() + 100
    while not group.average("give", "vector").groups:
        assert time.monotonic() < end
        time.sleep(0.05)


@check
def extras_weights_by_function_and_out(nodes: Nodes) -> None:
    group = nodes.group("streams")
    samples = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    found = group.average("give", "dict", 2, extras=True, weights=lambda one: one[1]["samples"])
    assert found.extras == {k: {"samples": k + 1} for k in range(6)}
    assert_right(found, "dict", 2, samples)
    for kind in KINDS:
        out = model_of(kind, 0)
        found = group.average("give", kind, 3, out=out)
        assert found.weights is out
        assert_right(found, kind, 3)
    # A function that cannot be sent is called here.
    lock = threading.Lock()

    def weigh(one: Any) -> float:
        with lock:
            return float(one[1]["samples"])

    found = group.average("give", "FlatWeights", 4, extras=True, weights=weigh)
    assert "cannot be sent" in found.transports[1], found.transports
    assert_right(found, "FlatWeights", 4, samples)
    with pytest.raises(ZeroDivisionError):
        group.average("give", "FlatWeights", weights=lambda one: 1 / 0)
    with pytest.raises(ValueError, match="rank 0"):
        group.average("give", "FlatWeights", weights=lambda one: -1.0)
    assert_right(group.average("give", "FlatWeights"), "FlatWeights")


@check
def ranks_without_a_result_are_left_out_by_name(nodes: Nodes) -> None:
    group = nodes.group("streams")
    for rank in (0, 3):
        with pytest.raises(WorkerError, match="diverged") as raised:
            group.average("give", "FlatWeights", 0, {rank: "raise"})
        assert [*raised.value.failed] == [rank]
        cause = getattr(raised.value.failed[rank], "cause", None)
        assert type(cause) is ArithmeticError
        found = group.average("give", "FlatWeights", 1, {rank: "raise"}, min_results=3)
        assert [*found.failed] == [rank]
        assert rank not in found.used
        assert_right(found, "FlatWeights", 1)
        with pytest.raises(ValueError, match=f"rank {rank}"):
            group.average("give", "FlatWeights", 0, {rank: "nan"})
        found = group.average("give", "FlatWeights", 2, {rank: "nan"}, nonfinite="skip")
        assert found.quarantined == (rank,)
        assert_right(found, "FlatWeights", 2)
        weights = [float(k == rank) for k in range(6)]
        with pytest.raises(ValueError, match="every source of positive weight holds NaN"):
            group.average(
                "give", "FlatWeights", 2, {rank: "nan"}, weights=weights, nonfinite="skip"
            )
        found = group.average("give", "FlatWeights", 2, {rank: "nan"}, nonfinite="propagate")
        assert found.used == tuple(range(6))
        assert np.isnan(found.weights["w"]).sum() == 1
    assert not group.unhealthy
    found = group.average("give", "FlatWeights", 5, ranks=[1, 4, 5])
    assert found.used == (1, 4, 5)
    assert_right(found, "FlatWeights", 5)
    with pytest.raises(TypeError, match="rank 3"):
        group.average("give", arguments=lambda k: ("dict" if k == 3 else "list",))
    assert_right(group.average("give", "FlatWeights"), "FlatWeights")


@check
def weights_reach_all_workers(nodes: Nodes) -> None:
    group = nodes.group("streams")
    start = weights_of(1.0, SIZE)
    group.broadcast(start)
    first = group.average("train")
    one = oracle(first, {k: trained(start, k) for k in range(6)})
    assert_same(first.weights, one)
    # With the next call, and the one after, which trains on it.
    second = group.average("train", broadcast=first)
    two = oracle(second, {k: trained(one, k) for k in range(6)})
    assert_same(second.weights, two)
    for got in group.step("get_weights", broadcast=second).values():
        assert_same(got, two)
    # The agents have another average by now.
    third = group.average("give", "FlatWeights")
    assert group.broadcast(first) == [*range(6)]
    for got in group.step("get_weights").values():
        assert_same(got, one)
    assert_right(third, "FlatWeights")
    # Back to the one before the last: agents keep one average for their workers.
    fourth = group.average("train")
    models = {2: two, 4: oracle(fourth, {k: trained(one, k) for k in range(6)})}
    for number in (4, 2, 4, 2):
        assert group.broadcast({2: second, 4: fourth}[number]) == [*range(6)]
        for got in group.step("get_weights").values():
            assert_same(got, models[number])
    assert group.broadcast(first) == [*range(6)]
    for found in group.run(3, "train"):
        one = oracle(found, {k: trained(one, k) for k in range(6)})
        assert_same(found.weights, one)
    for got in group.step("get_weights").values():
        assert_same(got, one)


@slow_check
def calls_of_the_user_keep_their_order(nodes: Nodes) -> None:
    groups = [nodes.new_group(way) for way in ("streams", "driver")]  # over the same actors
    meet_anyhow(groups[0])
    for value in range(1, 7):
        for actor in nodes.actors:
            actor.set_w.remote(float(value))
        found = groups[value % 2].average("get_weights")
        assert set(found.weights["w"].tolist()) == {float(value)}


@slow_check
def small_models_go_through_the_driver(nodes: Nodes) -> None:
    group = nodes.group("")
    found = group.average("give", "vector")
    assert found.transports[1] == "agent: streams", found.transports
    group.average("small")
    found = group.average("small")
    assert found.transports[1].endswith("go through the driver"), found.transports
    assert_same(found.weights, fw.average([np.full(100, float(k)) for k in range(6)]))
    group = nodes.new_group("driver")
    for _ in range(3):
        found = group.average("give", "vector")
        assert_right(found, "vector")
        assert not found.groups
    assert not agents_of(group)
    with pytest.raises(ValueError, match="BETWEEN_NODES: expected driver or streams, got 'object"):
        nodes.new_group("objects")


@slow_check
def a_late_rank_takes_no_more_than_the_time_of_the_round(nodes: Nodes) -> None:
    for rank in (3, 0):
        for timeout in (0.5, 2.0, 6.0, 20.0):  # on a slow machine, others may be late, too
            group = nodes.group("streams")
            begin = time.monotonic()
            plan = {rank: f"sleep {2 * timeout}"}
            try:
                found = group.average(
                    "give", "FlatWeights", 1, plan, timeout=timeout, min_results=5
                )
            except WorkerError:
                assert timeout < 20
                continue
            break
        took = time.monotonic() - begin
        assert found.late == (rank,), found
        assert took < timeout + SLACK, took
        assert_right(found, "FlatWeights", 1)
        assert group.restore(timeout=30) == [rank]
        found = group.average("give", "FlatWeights", 2)
        assert found.used == tuple(range(6))
        assert_right(found, "FlatWeights", 2)
        begin = time.monotonic()
        with pytest.raises(WorkerError, match="no result after") as error:
            group.average("give", "FlatWeights", 3, {rank: "sleep 1"}, timeout=0.5)
        (said,) = set(re.findall(r"no result after ([\d.]+) s", str(error.value)))
        assert float(said) <= time.monotonic() - begin
        group.restore(timeout=30)


@check
def bytes_out_are_those_that_are_sent(nodes: Nodes) -> None:
    group = nodes.new_group("streams")
    group.broadcast(weights_of(1.0, SIZE))
    commands: list[Command] = []

    def spy(call: NodeCall, agent: AgentClient, command: Command) -> None:
        commands.append(command)
        begin(call, agent, command)

    def counted() -> int:
        """The number of models sent to rank 0 by the driver, and to agents with a command."""
        to_agents = [one for one in commands if one.weights is not None]
        commands.clear()
        return 1 + sum(not isinstance(one.weights, AverageOf) for one in to_agents)

    begin = NodeCall.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NodeCall, "__init__", spy)
        first = group.average("get_weights")
        assert not commands  # the size of the weights is not known yet
        second = group.average("get_weights", broadcast=first)
        nbytes = first.weights.buffer.nbytes
        assert first.nbytes_sent == counted() * nbytes == 3 * nbytes
        third = group.average("get_weights", broadcast=second)
        assert second.nbytes_sent == counted() * nbytes == nbytes  # agents have the average
        group.broadcast(third)
        assert third.nbytes_sent == counted() * nbytes == nbytes
        assert third.record()["bytes"] == {"in": 6 * nbytes, "out": nbytes}


ROUNDING = 4 * 2**-9 * 1e-3  # of a step: worker, node's average, shard's average, driver


@slow_check
def differences_in_16_bits_lose_nothing_over_many_rounds(nodes: Nodes) -> None:
    group = nodes.new_group("streams", wire_dtype="bfloat16")
    exact = np.linspace(1, 2, SIZE)
    group.broadcast(fw.FlatWeights({"w": exact, "n": np.int64(0)}))
    by_agents = 0
    for found in group.run(15, "drift", round_arguments=lambda number: (number,)):
        by_agents += assert_nothing_lost(found, exact)
    assert by_agents >= 10, by_agents
    assert_agree(group, exact)
    # The driver sends other weights, which agents do not have; then averages of theirs again.
    group.broadcast(fw.FlatWeights({"w": exact, "n": np.int64(15)}))
    result = None
    for seed in range(16, 20):
        result = group.average("drift", seed, broadcast=result)
        assert assert_nothing_lost(result, exact)
    # Streams break in some rounds, whose results the driver averages.
    for seed in range(20, 32):
        with closed_port(group, 1) if seed % 3 else contextlib.nullcontext():
            result = group.average("drift", seed, broadcast=result)
        assert assert_nothing_lost(result, exact) == (not seed % 3), result.transports
    group.broadcast(result)
    assert_agree(group, exact)


def assert_nothing_lost(found: Round, exact: NDArray[Any]) -> bool:
    """Add a round of `NodeWorker.drift` to the ``exact`` weights; whether it was made by agents."""
    seed = int(found.weights["n"])
    exact += np.mean([drift_of(rank, seed) for rank in found.used], axis=0)
    error = np.abs(found.weights["w"] - exact).max()
    assert error < ROUNDING, (seed, error)
    if found.transports[1] != "agent: streams":
        return False
    assert found.groups == ((0,), (1, 3, 4), (2, 5)), found.groups
    most = max(one["out"] for one in found.links.values())
    assert most < 1.05 * 4 / 3 * 2 * SIZE, found.links  # two thirds of a model of 16 bits, twice
    return True


def assert_agree(group: WorkerGroup, exact: NDArray[Any]) -> None:
    """Check that all ranks have the same bits: those of ``exact``, except for roundings."""
    values = [*group.step("get_weights").values()]
    assert len(values) == 6
    for one in values:
        assert_same(one, values[0])
    assert np.abs(values[0]["w"] - exact).max() < 2 * ROUNDING


@slow_check
def faults_with_16_bits_lose_roundings_at_most(nodes: Nodes) -> None:
    group = nodes.new_group("streams", wire_dtype="bfloat16")
    exact = np.linspace(1, 2, SIZE)
    group.broadcast(fw.FlatWeights({"w": exact, "n": np.int64(0)}))
    by_agents: list[int] = []
    for number in range(1, 13):
        plan = {3: "sleep 4"} if number == 5 else {}
        if number == 8:
            set_hook(agent_at(group, 2), "merging", "exit")
        timeout = 2.0 if plan else 30.0
        found = group.average("drift", number, plan, min_results=1, timeout=timeout)
        assert found.used, found
        exact += np.mean([drift_of(rank, number) for rank in found.used], axis=0)
        assert np.abs(found.weights["w"] - exact).max() < 3 * ROUNDING, (number, found)
        if number == 5:
            assert 3 in found.late, found
        by_agents.append(sum(found.transports[k].startswith("agent") for k in found.used))
        group.broadcast(found)
        group.restore(timeout=30)
    assert by_agents[-1] == 5, by_agents
    assert_agree(group, exact)


@slow_check
def gradients_of_16_bits_are_averaged_with_feedback(nodes: Nodes) -> None:
    group = nodes.new_group("streams", wire_dtype="bfloat16")
    exact = got = np.zeros(SIZE)
    group.broadcast(weights_of(1.0, SIZE))
    for seed in range(12):
        found = group.average("push", seed, payload_kind="gradients")
        assert found.weights["w"].dtype == np.float32
        got = got + found.weights["w"]
        exact = exact + np.mean([drift_of(rank, seed) for rank in range(6)], axis=0)
    assert found.transports[1] == "agent: streams", found.transports
    assert np.abs(got - exact).max() < ROUNDING


# Faults


def fault(
    nodes: Nodes, rank: int, point: str, action: str, timeout: float
) -> tuple[WorkerGroup, Round]:
    """Make a round in whose exchange the agent of ``rank`` acts."""
    group = nodes.group("streams")
    agent = agent_at(group, rank)
    pid = pid_of(agent)
    set_hook(agent, point, action)
    begin = time.monotonic()
    try:
        found = group.average("give", "FlatWeights", 3, timeout=timeout, min_results=1)
    finally:
        if action == "stop":
            os.kill(pid, signal.SIGCONT)
    took = time.monotonic() - begin
    assert took < timeout + SLACK, (point, took)
    assert 0 in found.used, (point, found)
    assert_right(found, "FlatWeights", 3)
    return group, found


def kill_agent(nodes: Nodes, point: str) -> None:
    group, found = fault(nodes, 1, point, "exit", 8.0)
    assert set(found.used) >= {0, 2, 5}, (point, found)
    meet(group)


def stop_agent(nodes: Nodes, point: str) -> None:
    group, _ = fault(nodes, 2, point, "stop", 3.0)
    meet(group)


@check
def an_agent_that_dies_in_an_exchange_takes_only_its_ranks_along(nodes: Nodes) -> None:
    kill_agent(nodes, "merging")


@slow_check
def workers_of_an_agent_that_died_take_part_in_the_next_round_of_a_run(nodes: Nodes) -> None:
    group = nodes.group("streams")
    weights = weights_of(1.0, SIZE)
    group.broadcast(weights)
    used = []
    for found in group.run(4, "train", min_results=1):
        weights = oracle(found, {k: trained(weights, k) for k in range(6)})
        assert_same(found.weights, weights)
        used.append(len(found.used))
        if found.number == 1:
            set_hook(agent_at(group, 1), "merging", "exit")
    for got in group.step("get_weights").values():
        assert_same(got, weights)
    assert used == [6, 3, 6, 6], used


@slow_check
def an_agent_that_dies_at_any_point(nodes: Nodes) -> None:
    for point in _failpoints.NODE:
        kill_agent(nodes, point)


@slow_check
def an_agent_that_stops_at_any_point(nodes: Nodes) -> None:
    for point in _failpoints.NODE:
        stop_agent(nodes, point)


# Streams that fail, while all nodes answer


def assert_by_driver(found: Round, why: str) -> None:
    """Check that all ranks are in, no node added up results, and the reason is given."""
    assert found.used == tuple(range(6)), found
    assert not found.groups
    assert found.transports[0] == "shm"
    for rank in range(1, 6):
        assert found.transports[rank].startswith("store: "), found.transports
        assert why in found.transports[rank], found.transports


@check
def streams_that_cannot_be_opened_are_replaced_by_the_driver_in_the_same_round(
    nodes: Nodes,
) -> None:
    group = nodes.group("streams")
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("flatweights").addHandler(handler)
    weights = [0.0, 1.0, 2.5, 1.0, 3.0, 0.5]
    with closed_port(group, 1):
        for kind in ("FlatWeights", "tree"):
            try_streams_again(group)
            found = group.average("give", kind, 4, weights=weights)
            assert_by_driver(found, "cannot connect")
            assert_right(found, kind, 4, weights)
            out = copied(model_of(kind, 0))
            try_streams_again(group)
            found = group.average("give", kind, 5, out=out)
            assert_by_driver(found, "cannot connect")
            assert found.weights is out
            assert_right(found, kind, 5)
        told = [text for text in said if text.startswith("other nodes are reached through Ray: ")]
        assert told, said
        assert "cannot connect" in told[0]
        # For a while, the next rounds go through the driver from the start.
        group._worker_set.agents.streams._end = float("inf")
        assert_by_driver(group.average("give", "FlatWeights"), "cannot connect")
        # Extras, weights by a function, and values that are not finite.
        try_streams_again(group)
        found = group.average("give", "dict", 2, extras=True, weights=lambda one: one[1]["samples"])
        assert_by_driver(found, "cannot connect")
        assert found.extras == {k: {"samples": k + 1} for k in range(6)}
        assert_right(found, "dict", 2, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
        try_streams_again(group)
        found = group.average("give", "FlatWeights", 2, {4: "nan"}, nonfinite="skip")
        assert found.quarantined == (4,)
        assert found.used == (0, 1, 2, 3, 5), found
        assert_right(found, "FlatWeights", 2)
        # Workers take the average, and go on.
        start = weights_of(1.0, SIZE)
        group.broadcast(start)
        for found in group.run(2, "train"):
            start = oracle(found, {k: trained(start, k) for k in range(6)})
            assert_same(found.weights, start)
    logging.getLogger("flatweights").removeHandler(handler)
    found = group.average("give", "FlatWeights")
    assert found.transports[1] == "agent: streams", found.transports
    assert not group.unhealthy


@slow_check
def two_nodes_that_cannot_reach_each_other_are_both_averaged(nodes: Nodes) -> None:
    group = nodes.group("streams")

    def cut(agent: Any) -> None:
        from flatweights.ray.nodes._connections import StreamError

        reach = agent.end._streams._reach

        def to_some(links: Any, place: int, *args: Any) -> Any:
            if place == 2:
                raise StreamError(place, "cannot connect: no route to host")
            return reach(links, place, *args)

        agent.end._streams._reach = to_some

    def mend(agent: Any) -> None:
        del agent.end._streams._reach

    agent = agent_at(group, 1)
    ray.get(agent.__ray_call__.remote(cut))
    group._worker_set.agents.epoch = (), b""  # the sockets that are open have broken, too
    found = group.average("give", "FlatWeights", 4)
    assert_by_driver(found, "")
    assert_right(found, "FlatWeights", 4)
    ray.get(agent.__ray_call__.remote(mend))
    meet(group)


@slow_check
def a_stream_that_stalls_is_replaced_by_the_driver_in_the_same_round(nodes: Nodes) -> None:
    group = nodes.group("streams")
    set_hook(agent_at(group, 2), "merging", "sleep 2.5")
    found = group.average("give", "FlatWeights", 4)
    assert_by_driver(found, "stalled")
    assert_right(found, "FlatWeights", 4)


@slow_check
def a_driver_without_a_free_port_or_with_other_certificates_averages_itself(nodes: Nodes) -> None:
    host = ray.util.get_node_ip_address()
    with socket.create_server((host, 0)) as taken, tempfile.TemporaryDirectory() as folder:
        ports = {"FLATWEIGHTS_PORTS": str(taken.getsockname()[1])}
        certificate = make_certificate(make_authority(Path(folder) / "theirs"), "other", host)
        for environment, why in ((ports, "no port of"), (tls_environment(certificate), "")):
            group = nodes.new_group("streams")
            with pytest.MonkeyPatch.context() as patch:
                for name, value in environment.items():
                    patch.setenv(name, value)
                end = time.monotonic() + 100
                while not group._worker_set.agents.streams.reason:  # until agents take part
                    assert time.monotonic() < end
                    found = group.average("give", "FlatWeights", 4, timeout=60)
            assert_by_driver(found, why)
            assert_right(found, "FlatWeights", 4)


@slow_check
def an_agent_that_dies_or_stops_as_it_hands_over_takes_only_its_ranks_along(nodes: Nodes) -> None:
    # On a slow machine, others may be late, too: then once more, with a longer time.
    rounds = [("exit", 20.0), ("stop", 3.0), ("stop", 10.0), ("stop", 30.0)]
    are_in: dict[str, bool] = {}
    for action, timeout in rounds:
        if are_in.get(action):
            continue
        group = nodes.group("streams")
        agent = agent_at(group, 2)
        pid = pid_of(agent)

        def fail(agent: Any, action: str = action) -> None:
            def result(rank: int) -> None:
                import os
                import signal
                import time

                if action == "exit":
                    os._exit(1)
                os.kill(os.getpid(), signal.SIGSTOP)
                time.sleep(60)  # until it has stopped

            agent._result = result

        ray.get(agent.__ray_call__.remote(fail))
        begin = time.monotonic()
        with closed_port(group, 1):
            found = group.average("give", "FlatWeights", 3, timeout=timeout, min_results=1)
        took = time.monotonic() - begin
        assert took < timeout + SLACK, (action, took)
        assert not {2, 5} & {*found.used}, (action, found)
        are_in[action] = found.used == (0, 1, 3, 4)
        assert_right(found, "FlatWeights", 3)
        if action == "stop":
            os.kill(pid, signal.SIGKILL)
        meet(group)
    assert all(are_in.values()), are_in


@slow_check
def an_agent_that_is_busy_is_not_left_out(nodes: Nodes) -> None:
    group = nodes.group("streams")
    set_hook(agent_at(group, 2), "merging", "freeze")
    found = group.average("give", "FlatWeights", 4)
    assert found.used == tuple(range(6)), found
    assert_right(found, "FlatWeights", 4)


@slow_check
def workers_die_or_stop_behind_an_agent(nodes: Nodes) -> None:
    group = nodes.group("streams")
    found = group.average("give", "FlatWeights", 3, {3: "exit"}, timeout=10, min_results=1)
    assert found.used == (0, 1, 2, 4, 5), found
    assert_right(found, "FlatWeights", 3)
    meet(group)
    pid = ray.get(nodes.actors[4].pid.remote())
    for timeout in (2.0, 6.0, 20.0):  # on a slow machine, others may be late, too
        begin = time.monotonic()
        plan = {4: "stop"}
        found = group.average("give", "FlatWeights", 3, plan, timeout=timeout, min_results=1)
        took = time.monotonic() - begin
        os.kill(pid, signal.SIGCONT)
        assert took < timeout + SLACK, took
        assert_right(found, "FlatWeights", 3)
        meet(group)
        if found.late == (4,):
            break
    assert found.late == (4,), found


@slow_check
def an_interrupt_in_an_exchange_leaves_a_group_that_works(nodes: Nodes) -> None:
    group = nodes.group("streams")
    for point in (*_failpoints.NODE, "averaging"):

        def interrupt(reached: str, point: str = point) -> None:
            if reached == point:
                _failpoints.hook = None
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.01)

        _failpoints.hook = interrupt
        port = closed_port(group, 1) if point == "averaging" else contextlib.nullcontext()
        with port, pytest.raises(KeyboardInterrupt):
            group.average("give", "FlatWeights", 3, ranks=[0, 1, 2])
        found = group.average("give", "FlatWeights", 4)
        assert found.used == tuple(range(6))
        assert_right(found, "FlatWeights", 4)
        assert found.transports[1] == "agent: streams", found.transports


# Remains


def listeners() -> int:
    return sum(one.name == "flatweights-streams" for one in threading.enumerate())


def wait_until(is_so: Callable[[], bool], what: str, timeout: float = 60) -> None:
    end = time.monotonic() + timeout
    while not is_so():
        gc.collect()
        assert time.monotonic() < end, what
        time.sleep(0.05)


def start_worker(rank: int, place: str) -> Any:
    return ray.remote(num_cpus=0)(NodeWorker).options(resources={place: 1}).remote(rank)


def nodes_with_agents(group: WorkerGroup) -> set[str]:
    return {*group._worker_set.agents._by_node}


@slow_check
def workers_of_other_nodes_come_and_go_in_the_body_of_as_completed(nodes: Nodes) -> None:
    with WorkerGroup([start_worker(rank, "home") for rank in range(2)]) as group:
        version, used = 0, list[int]()

        def look_at(found: Round) -> None:
            (rank,) = found.used
            start = weights_of(float(version - found.staleness[rank]), SIZE)
            assert same_bits(found.weights.buffer, trained(start, rank).buffer), found
            used.append(rank)

        def rounds_until(is_enough: Callable[[], bool]) -> None:
            nonlocal version
            end = time.monotonic() + 100
            while not is_enough():
                look_at(next(rounds))
                version += 1
                group.publish(weights_of(float(version), SIZE))
                assert time.monotonic() < end

        group.publish(weights_of(0.0, SIZE))
        rounds = group.as_completed("train")
        rounds_until(lambda: len(used) == 3)
        added = group.add(actors=[start_worker(2, "a"), start_worker(3, "b")])
        assert added == [2, 3]
        pids = [pid_of(group.actors()[rank]) for rank in added]
        rounds_until(lambda: {*used} == {0, 1, 2, 3})
        group.remove(added)
        used.clear()
        rounds_until(lambda: len(used) >= 12)
        assert {*used} == {0, 1}
        rounds.close()
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "workers")
        assert group.average("get_weights").used == (0, 1)


@slow_check
def an_agent_starts_for_a_new_node_and_ends_with_its_last_worker(nodes: Nodes) -> None:
    home = [start_worker(rank, "home") for rank in range(2)]
    with WorkerGroup(home) as group, tempfile.TemporaryDirectory() as where:
        start = weights_of(1.0, SIZE)
        group.broadcast(start)
        rounds, latest = group.run(1_000_000, "train"), start

        def rounds_until(is_enough: Callable[[Round], bool]) -> None:
            nonlocal latest
            end = time.monotonic() + 100
            for found in rounds:
                latest = fw.average([trained(latest, rank) for rank in found.used])
                np.testing.assert_allclose(found.weights["w"], latest["w"], rtol=1e-12)
                latest = found.weights
                if is_enough(found):
                    return
                assert time.monotonic() < end, (found, found.transports)

        rounds_until(lambda found: found.number == 2)
        group.add(actors=[start_worker(2, "a"), start_worker(3, "b"), start_worker(4, "b")])
        rounds_until(lambda f: [f.transports.get(k, "")[:5] for k in (2, 3, 4)] == 3 * ["agent"])
        agents = nodes_with_agents(group)
        assert agents == {ray.get(group.actors()[rank].node.remote()) for rank in (2, 3)}
        pids = {rank: pid_of(agent_at(group, rank)) for rank in (2, 3)}
        group.remove([2, 3])
        wait_until(lambda: not Path(f"/proc/{pids[2]}").exists(), "the agent of a")
        assert len(nodes_with_agents(group)) == 1
        rounds_until(lambda found: found.used == (0, 1, 4))
        # The last worker of a node first ends its call.
        worker = group.actors()[4]
        pids[4] = pid_of(worker)
        found = group.average("train_once_told", 4, where, timeout=5.0, min_results=1)
        assert 4 in found.late
        group.remove(4)
        group.restore(timeout=60)
        assert group.average("get_weights").used == (0, 1)
        wait_until(lambda: not Path(f"/proc/{pids[3]}").exists(), "the agent of b")
        (Path(where) / "go on").touch()
        wait_until((Path(where) / "trained").exists, "the end of the call")
        while Path(f"/proc/{pids[4]}").exists():  # a call of the group sees that it has answered
            assert group.average("get_weights").used == (0, 1)
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(worker.ping.remote())


@check
def nothing_is_left_of_groups_that_are_dropped(nodes: Nodes) -> None:
    group = nodes.group("streams")
    assert_right(group.average("give", "vector"), "vector")
    addresses = [agent._address for agent in group._worker_set.agents._by_node.values()]
    addresses.append(group._worker_set.agents.end.address)
    pids = [pid_of(agent) for agent in agents_of(group)]
    assert len(pids) == 2
    del group
    nodes.groups.clear()
    nodes.last = None
    wait_until(lambda: not listeners(), f"{listeners()} threads that listen")
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), f"agents {pids}")
    for address in addresses:
        with pytest.raises(ConnectionRefusedError), socket.socket() as one:
            one.connect((address.host, address.port))


@check
def members_exchange_large_weights_and_outlive_agents(nodes: Nodes) -> None:
    check_members("home", "a", "b")


@slow_check
def a_node_that_dies_takes_its_agent_and_its_ranks_along(nodes: Nodes) -> None:
    group = nodes.group("streams")
    gone = {one.node_id: one for one in nodes.added}[ray.get(nodes.actors[2].node.remote())]

    def lose(reached: str) -> None:
        if reached == "exchanging":
            _failpoints.hook = None
            nodes.cluster.remove_node(gone, allow_graceful=False)

    _failpoints.hook = lose
    begin = time.monotonic()
    found = group.average("give", "FlatWeights", 3, timeout=10.0, min_results=1)
    took = time.monotonic() - begin
    assert took < 10 + SLACK, took
    assert set(found.used) >= {0, 1, 3, 4}, found
    assert_right(found, "FlatWeights", 3)
    # Its workers get a node of their own, and are restored with an agent there.
    nodes.cluster.add_node(resources={"b": 100}, **NODE)
    meet(group)


def run_all(*names: str) -> None:
    nodes = Nodes()
    print(json.dumps(["started"]), flush=True)
    for name in names:
        fault = ""
        try:
            CHECKS[name](nodes)
        except (Exception, pytest.fail.Exception):
            fault = traceback.format_exc()
            _failpoints.hook = None
        print(json.dumps([name, fault]), flush=True)
    ray.shutdown()
    nodes.cluster.shutdown()


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Iterator[Iterator[list[str]]]:
    """The name and the fault of each check that was asked for, as the program goes on."""
    items = [item for item in request.session.items if item.path == request.path]
    functions = [item for item in items if isinstance(item, pytest.Function)]
    names = [str(function.callspec.params["name"]) for function in functions]
    with program(run_all, *names) as process:
        assert process.stdout is not None
        end = threading.Timer(600, process.kill)
        end.start()
        said = (json.loads(line) for line in process.stdout if line.startswith('["'))
        assert next(said) == ["started"]
        yield said
        end.cancel()


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CHECKS],
)
def test_nodes(outcomes: Iterator[list[str]], name: str) -> None:
    ran, fault = next(outcomes)
    assert ran == name
    assert not fault, fault
