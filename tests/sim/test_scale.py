"""The simulation of a call in a cluster, against bytes and times by hand, and against `plan`."""

import pytest
from tests.sim import scale
from tests.sim.scale import Cluster, MembersCall

from flatweights.ray import plan

MB = 10**6


def call_of(
    nodes: int, workers: int, nbytes: int, bits: float, *, dead: int = 0, latency: float = 1e-4
) -> MembersCall:
    call = MembersCall(Cluster.of(nodes, workers, nbytes, bits, latency, dead))
    call.run()
    return call


@pytest.mark.parametrize(("nodes", "workers"), [(2, 1), (6, 1), (3, 2), (4, 4), (5, 7)])
def test_each_link_passes_the_bytes_of_an_allreduce(nodes: int, workers: int) -> None:
    nbytes = 20 * MB  # in shards that are equal but for 64 bytes
    call = call_of(nodes, workers, nbytes, 1e9)
    # A node sends the values of up to two members; otherwise their sum, with its weights.
    models = min(workers, 2)
    least = (nodes - 1) / nodes * (models + 1) * nbytes
    for node in call.nodes:
        assert node.out.served == pytest.approx(least, rel=1e-3)
        assert node.into.served == pytest.approx(least, rel=1e-3)


def test_the_time_of_an_exchange_is_that_of_its_bytes() -> None:
    call = call_of(6, 1, 100 * MB, 1e8)
    limit = 2 * 5 / 6 * 100 * MB / call.cluster.link
    seconds = dict(scale.phases(call))["averaged"]
    assert limit < seconds < 1.1 * limit


def test_latency_is_paid_a_few_times_and_not_for_each_block() -> None:
    near, far = (
        max(call_of(4, 1, 20 * MB, 1e9, latency=latency).times.values())
        for latency in (1e-4, 20e-3)
    )
    assert 3 * 20e-3 < far - near < 12 * 20e-3


@pytest.mark.parametrize("mbytes", [20, 100])
@pytest.mark.parametrize(("nodes", "workers"), [(6, 1), (3, 2), (4, 4)])
def test_the_plan_says_the_same_within_a_fifth(nodes: int, workers: int, mbytes: int) -> None:
    simulated = max(call_of(nodes, workers, mbytes * MB, 1e9).times.values())
    cost = plan(nodes=nodes, workers=workers, model=mbytes * MB, link=1e9).chosen
    assert 0.8 < cost.seconds / simulated < 1.25


@pytest.mark.parametrize("nbytes", [4_000, 20 * MB])
def test_the_dead_are_left_out_and_the_others_go_on(nbytes: int) -> None:
    call = call_of(4, 4, nbytes, 1e9, dead=3)
    assert len(call.used) == 13
    assert call.times["variables are set"] < 1.2 * max(call_of(4, 4, nbytes, 1e9).times.values())


def test_messages_at_the_coordinator_grow_with_the_members_of_its_node_and_with_nodes() -> None:
    def messages(nodes: int, workers: int) -> float:
        return call_of(nodes, workers, 20 * MB, 1e9).nodes[0].agent.served

    assert messages(4, 8) - messages(4, 4) == pytest.approx(2 * 4)
    assert messages(8, 4) - messages(4, 4) == pytest.approx(4 * 4)
