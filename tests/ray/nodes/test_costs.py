"""`flatweights.ray.plan`, compared with exchanges that are counted message by message."""

from collections import Counter
from typing import Any

import pytest

from flatweights.ray import plan

M = 1_000_000
GBIT = 1e9


class Links:
    """Bytes that pass the link of each node, message by message."""

    def __init__(self) -> None:
        self.sent: Counter[int] = Counter()
        self.received: Counter[int] = Counter()

    def send(self, sender: int, receiver: int, nbytes: float) -> None:
        if sender != receiver:
            self.sent[sender] += nbytes  # type: ignore[assignment]
            self.received[receiver] += nbytes  # type: ignore[assignment]


def through_the_driver(nodes: int, workers: int) -> Links:
    links = Links()
    for rank in range(nodes * workers):
        links.send(rank // workers, 0, M)
    for node in range(nodes):
        links.send(0, node, M)
    return links


def by_agents(nodes: int, of_node: float, mean: float) -> Links:
    links = Links()
    for sender in range(nodes):
        for receiver in range(nodes):
            links.send(sender, receiver, of_node * M / nodes)  # its part of a node's sums
            links.send(sender, receiver, mean * M / nodes)  # a shard of the mean
    return links


@pytest.mark.parametrize(("nodes", "workers"), [(2, 1), (3, 1), (4, 4), (6, 2), (125, 8)])
def test_bytes_are_those_of_the_messages(nodes: int, workers: int) -> None:
    found = plan(nodes=nodes, workers=workers, model=M, link=GBIT)
    exact = {1: 1, 2: 2}.get(workers, 2)  # models: its own values, or a float64 sum
    expected: dict[Any, Links] = {
        "the guide's loop": through_the_driver(nodes, workers),
        "driver": through_the_driver(nodes, workers),
        "streams": by_agents(nodes, exact, 1),
    }
    if workers > 1:
        expected["streams", 'reduce_dtype="float32"'] = by_agents(nodes, 1, 1)
    expected["streams", 'wire_dtype="bfloat16"'] = by_agents(nodes, 0.5, 0.5)
    for key, links in expected.items():
        assert found[key].sent == pytest.approx(max(links.sent.values())), key
        assert found[key].received == pytest.approx(max(links.received.values())), key
        least = found[key].critical / (GBIT / 8)
        assert found[key].seconds > least, key


def test_sums_of_16_bits_are_four_times_as_wide() -> None:
    for workers, models in ((1, 1), (3, 3), (4, 4), (8, 4)):
        found = plan(nodes=2, workers=workers, model=M, link=GBIT, dtype="bfloat16")["streams"]
        assert found.sent == M * (models + 1) / 2


def test_small_models_and_single_nodes_go_through_the_driver() -> None:
    assert plan(nodes=4, workers=1, model="30kB", link=GBIT).chosen.transport == "driver"
    assert plan(nodes=4, workers=1, model="30MB", link=GBIT).chosen.transport == "streams"
    alone = plan(nodes=1, workers=8, model="30MB", link=GBIT)
    assert (alone.chosen.transport, alone.chosen.sent, alone.chosen.received) == ("shm", 0, 0)
    assert alone.chosen.seconds < alone["driver"].seconds < alone["the guide's loop"].seconds


def test_one_node_needs_no_link() -> None:
    alone = plan(nodes=1, workers=8, model="30MB")
    assert alone.transports == plan(nodes=1, workers=8, model="30MB", link=GBIT).transports
    assert "bit/s" not in str(alone)


def test_texts_have_units() -> None:
    for model, nbytes in (("500MB", 500e6), ("1.5 GB", 1.5e9), ("2MiB", 2**21), ("10_000", 1e4)):
        assert plan(nodes=2, workers=1, model=model, link=1e9)["driver"].sent == nbytes
    seconds = [
        plan(nodes=2, workers=1, model=M, link=link)["driver"].seconds
        for link in (1e10, "10Gbit", "10 Gbit/s", "10000Mbit", "10g")
    ]
    assert len(set(seconds)) == 1


@pytest.mark.parametrize(
    ("argument", "value", "expected"),
    [
        ("nodes", 0, "nodes: expected at least 1, got 0"),
        ("workers", 1.5, "workers: expected an integer, got 1.5"),
        ("model", "1Mbit", "model: expected bytes, such as 500_000_000 or '500MB', got '1Mbit'"),
        ("model", -1, "model: expected bytes"),
        ("model", float("nan"), "model: expected bytes"),
        ("link", None, "link: expected bits per second, such as 10e9 or '10Gbit', for 2 nodes"),
        ("link", "fast", "link: expected bits per second"),
        ("link", "10GB", "link: expected bits per second"),
        ("link", "10", "link: expected bits per second, such as 10e9 or '10Gbit', got '10'"),
        ("memory", "1.2.3GB", "memory: expected bytes"),
        ("dtype", "int8", "dtype: expected one that has a mean, got 'int8'"),
        ("dtype", "float33", "dtype: expected the name of a dtype, got 'float33'"),
    ],
)
def test_bad_arguments_say_what_was_expected(argument: str, value: Any, expected: str) -> None:
    given = {"nodes": 2, "workers": 1, "model": M, "link": GBIT} | {argument: value}
    with pytest.raises((TypeError, ValueError)) as raised:
        plan(**given)
    assert expected in str(raised.value)


def test_table_marks_the_way_that_is_chosen() -> None:
    lines = str(plan(nodes=4, workers=8, model="500MB", link="10Gbit")).splitlines()
    assert lines[0] == "4 nodes of 8 workers, 500 MB, 10 Gbit/s"
    (chosen,) = [line for line in lines if line.startswith("->")]
    assert chosen.split()[1] == "streams"
    assert "(K - 1) / K x (2 + 1) M each way" in chosen
    assert lines[-2].startswith("M: the bytes of the model. N workers on K nodes, W on each.")


def test_a_round_over_channels_keeps_a_segment_of_each_worker_and_three_of_the_driver() -> None:
    table = plan(nodes=1, workers=4, model="200MB", link="10Gbit")
    assert str(table).startswith("1 node of 4 workers, 200 MB")
    assert table.chosen.kept == 7 * 200e6
    assert table["driver"].kept == 6 * 200e6
    (chosen,) = [line for line in str(table).splitlines() if line.startswith("->")]
    assert chosen.split()[1:8] == [
        "shm",
        "0",
        "B",
        "0",
        "B",
        f"{table.chosen.seconds:.3g}",
        "1.4",
    ]
    slower = plan(nodes=1, workers=4, model="200MB", link="10Gbit", memory="10GB")
    assert slower.chosen.seconds > 4 * table.chosen.seconds
