"""The simulation of averages and publications, against bytes and times by hand, and `plan`."""

import pytest
from tests.sim import scale
from tests.sim.cluster import Cluster
from tests.sim.scale import Made, made, planned, seconds_of
from tests.sim.scale_averages import Average

MB = 10**6
AVERAGES = ["members", "group"]


def average_of(
    nodes: int,
    workers: int,
    nbytes: int,
    bits: float,
    *,
    path: str = "members",
    dead: int = 0,
    latency: float = 1e-4,
) -> Average:
    one = made(path, Cluster.of(nodes, workers, nbytes, bits, latency, dead))
    assert isinstance(one, Average)
    return one


def seconds(one: Made) -> float:
    return max(one.times.values())


@pytest.mark.parametrize("path", AVERAGES)
@pytest.mark.parametrize(("nodes", "workers"), [(2, 1), (6, 1), (3, 2), (4, 4), (5, 7)])
def test_each_link_passes_the_bytes_of_an_allreduce(path: str, nodes: int, workers: int) -> None:
    nbytes = 20 * MB  # in shards that are equal but for 64 bytes
    call = average_of(nodes, workers, nbytes, 1e9, path=path)
    assert call.used == tuple(range(nodes * workers))
    # A node sends the values of up to two members; otherwise their sum, with its weights.
    models = min(workers, 2)
    least = (nodes - 1) / nodes * (models + 1) * nbytes
    for node in call.nodes:
        assert node.out.served == pytest.approx(least, rel=1e-3)
        assert node.into.served == pytest.approx(least, rel=1e-3)


def test_the_time_of_an_exchange_is_that_of_its_bytes() -> None:
    call = average_of(6, 1, 100 * MB, 1e8)
    limit = 2 * 5 / 6 * 100 * MB / call.cluster.link
    assert limit < dict(scale.phases(call))["averaged"] < 1.1 * limit


def test_latency_is_paid_a_few_times_and_not_for_each_block() -> None:
    near, far = (
        seconds(average_of(4, 1, 20 * MB, 1e9, latency=latency)) for latency in (1e-4, 20e-3)
    )
    assert 3 * 20e-3 < far - near < 12 * 20e-3


@pytest.mark.parametrize("path", AVERAGES)
@pytest.mark.parametrize(
    ("nodes", "workers", "bits", "mbytes"),
    [
        (6, 1, 1e9, 20),
        (3, 2, 1e9, 100),
        (4, 4, 4e8, 20),
        (16, 8, 1e10, 100),
        pytest.param(125, 8, 1e10, 20, marks=pytest.mark.slow),
        pytest.param(125, 8, 1e11, 100, marks=pytest.mark.slow),
    ],
)
def test_the_plan_of_an_average_says_the_same_within_a_fifth(
    path: str, nodes: int, workers: int, bits: float, mbytes: int
) -> None:
    cluster = Cluster.of(nodes, workers, mbytes * MB, bits)
    assert 0.8 < planned(path, cluster, bits) / seconds_of(cluster, path) < 1.25


@pytest.mark.parametrize("nbytes", [10 * MB, 10**10])
@pytest.mark.parametrize("nodes", [1, 2, 4, 7, 16, 60, 125])
def test_the_plan_of_a_publication_says_the_same_within_a_fifth(nodes: int, nbytes: int) -> None:
    cluster = Cluster.of(nodes, 8, nbytes, 1e9)
    assert 0.8 < planned("published", cluster, 1e9) / seconds_of(cluster, "published") < 1.25


def test_no_link_passes_published_weights_to_all_nodes() -> None:
    one = made("published", Cluster.of(125, 8, 100 * MB, 1e10))
    assert sum(node.out.served for node in one.nodes) == pytest.approx(124 * 100 * MB)
    for node in one.nodes[1:]:
        assert node.into.served == pytest.approx(100 * MB)
    assert max(node.out.served for node in one.nodes) < 12 * 100 * MB


def test_a_step_is_computed_by_all_at_the_same_time_before_it_is_averaged() -> None:
    alone = average_of(4, 4, 20 * MB, 1e9)
    fit = made("fit", Cluster.of(4, 4, 20 * MB, 1e9, step=0.5))
    assert seconds(fit) == pytest.approx(seconds(alone) + 0.5)


@pytest.mark.parametrize("path", AVERAGES)
@pytest.mark.parametrize("nbytes", [4_000, 20 * MB])
def test_the_dead_are_left_out_and_the_others_go_on(path: str, nbytes: int) -> None:
    call = average_of(4, 4, nbytes, 1e9, dead=3, path=path)
    assert len(call.used) == 13
    assert seconds(call) < 1.2 * seconds(average_of(4, 4, nbytes, 1e9, path=path))


@pytest.mark.parametrize("path", AVERAGES)
def test_messages_grow_with_the_members_of_the_first_node_and_with_nodes(path: str) -> None:
    def messages(nodes: int, workers: int) -> float:
        return average_of(nodes, workers, 20 * MB, 1e9, path=path).nodes[0].agent.served

    assert messages(4, 8) - messages(4, 4) == pytest.approx(2 * 4)
    assert messages(8, 4) - messages(4, 4) == pytest.approx(4 * 4)
