"""Exchanges of models in 16 bits, without Ray, against error feedback written in NumPy."""

import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import flatweights as fw
from flatweights._sources import Template
from flatweights.ray.nodes._node_reducer import Endpoints, NodeReducer
from flatweights.ray.nodes._plan import Plan
from flatweights.ray.nodes._rounding import Coding, Residuals
from flatweights.ray.nodes._shards import Bytes
from flatweights.ray.peers._by_channel import GroupChannels
from flatweights.ray.peers._result_metadata import ReadOptions, read_into
from flatweights.wire import Difference, WireDType, average_differences, wire_layout

READING = ReadOptions(screen=True, weigh=None, is_encoded=True)
SIZES = {"a": 1_003, "b": 70, "c": 1}  # elements; those of "b" are float64

Groups = Sequence[Sequence[int]]
Errors = dict[str, NDArray[Any]]


def model_of(rng: np.random.Generator, rank: int) -> fw.FlatWeights:
    parts: dict[str, Any] = {name: rng.normal(size=size) for name, size in SIZES.items()}
    parts["a"] = parts["a"].astype(np.float32)
    parts["n"] = np.int64(rank)
    parts["nothing"] = np.zeros((0, 3), np.float32)
    return fw.FlatWeights(parts)


def to_bfloat16(values: NDArray[Any]) -> NDArray[Any]:
    """Rounded once, which ml_dtypes does not do with float64."""
    fraction, exponent = np.frexp(values.astype(np.float64))
    rounded: NDArray[Any] = np.ldexp(np.rint(256 * fraction), exponent - 8)
    return rounded


def encoded(model: fw.FlatWeights, base: int | None = 5) -> Difference:
    """The message of a worker without errors of earlier messages."""
    values = fw.FlatWeights.empty(wire_layout(model.layout, "bfloat16"))
    for name, part in model.items():
        rounded = to_bfloat16(part) if part.dtype.kind == "f" else part
        values[name] = rounded.astype(values[name].dtype)
    return Difference(values, model.layout, base)


def plan_of(
    number: int, groups: Groups, weights: Mapping[int, float], sent: Mapping[int, Difference]
) -> Plan:
    one = next(iter(sent.values()))
    settled = (number - 1,) * len(groups)
    return Plan(
        number,
        Template.of(one.values),
        tuple(map(tuple, groups)),
        weights,
        "float64",
        coding=Coding(one.layout, one.base),
        settled=settled,
    )


class Oracle:
    """Error feedback by the papers, number by number."""

    def __init__(self, nodes: int) -> None:
        self.of_ranks = [self.zeros() for _ in range(nodes)]
        self.of_shards = [self.zeros() for _ in range(nodes)]

    @staticmethod
    def zeros() -> Errors:
        return {name: np.zeros(size) for name, size in SIZES.items()}

    @staticmethod
    def round(mean: fw.FlatWeights, errors: Errors, where: Mapping[str, Any]) -> fw.FlatWeights:
        out = mean.copy()
        for name, error in errors.items():
            at = where[name]
            exact = (mean[name] + error.astype(mean[name].dtype))[at]
            out[name][at] = to_bfloat16(exact)
            error[at] = exact - out[name][at]
        return out

    def exchange(self, plan: Plan, sent: Mapping[int, Difference]) -> fw.FlatWeights:
        everywhere = {name: np.ones(size, bool) for name, size in SIZES.items()}
        sources: list[Difference] = []
        weights: list[float] = []
        for node, group in enumerate(plan.groups):
            of_group = [plan.weights[rank] for rank in group]
            if len(group) > 1 and any(of_group):
                mean = average_differences([sent[rank] for rank in group], of_group)
                rounded = encoded(self.round(mean, self.of_ranks[node], everywhere))
                sources, weights = [*sources, rounded], [*weights, sum(of_group)]
            else:
                sources, weights = [*sources, *(sent[k] for k in group)], [*weights, *of_group]
        mean = average_differences(sources, weights)
        slots = {slot.name: slot for slot in plan.template.layout.slots}
        for node in range(len(plan.groups)):
            bounds = plan.bounds(node)
            where = {}
            for name, size in SIZES.items():
                at = slots[name].offset + 2 * np.arange(size)
                where[name] = (at >= bounds.start) & (at < bounds.stop)
            mean = self.round(mean, self.of_shards[node], where)
        return mean


class End:
    """A node whose messages reach the others at once."""

    def __init__(self) -> None:
        self.models: dict[int, Bytes] = {}
        self.residuals = Residuals()

    def cut(self, plan: Plan, me: int) -> list[list[Bytes]]:
        """Its contribution to each shard."""
        assert plan.coding is not None
        self.residuals.begin(plan.number, plan.settled[me], plan.coding)
        plan = plan._replace(residuals=self.residuals)
        return [plan.contribution(me, shard, self.models) for shard in range(len(plan.groups))]

    def merge(
        self, plan: Plan, me: int, parts: Sequence[Sequence[Sequence[Bytes]]], mean: Bytes
    ) -> None:
        """Write the average of its shard."""
        plan = plan._replace(residuals=self.residuals)
        plan.merge(me, [each[me] for each in parts], mean[plan.bounds(me)])


def exchanged(ends: Sequence[End], plan: Plan, sent: Mapping[int, Difference]) -> Difference:
    """The average, the same on all nodes."""
    assert plan.coding is not None
    read(ends, plan, sent)
    parts = [end.cut(plan, me) for me, end in enumerate(ends)]
    mean = fw.FlatWeights.empty(plan.template.layout)
    for me, end in enumerate(ends):
        end.merge(plan, me, parts, mean.buffer)
    return Difference(mean, plan.coding.layout, plan.coding.base)


def read(ends: Sequence[End | NodeReducer], plan: Plan, sent: Mapping[int, Difference]) -> None:
    for end, group in zip(ends, plan.groups, strict=True):
        end.models.clear()
        for rank in group:
            assert read_into(end.models, rank, sent[rank], READING).error is None


CASES: list[tuple[Groups, list[float]]] = [
    ([[0], [1], [2]], [1, 1, 1]),
    ([[0, 3], [1, 4, 5], [2]], [1, 1, 1, 1, 1, 1]),
    ([[0, 2], [], [1, 3, 4]], [1, 0, 2.5, 3, 0.5]),  # a node without ranks
    ([[0, 1], [2, 3], [4]], [0, 0, 1, 2, 3]),  # one whose ranks weigh nothing
]


def test_nodes_have_the_differences_that_error_feedback_gives(rng: np.random.Generator) -> None:
    ends, oracle = [End() for _ in range(3)], Oracle(3)
    settled = dict.fromkeys(range(3), 0)
    for number in range(1, 25):
        # Groups change, and so do the shards of a node, with the nodes that take part.
        groups, weights = CASES[number % len(CASES)]
        nodes = range(2) if number % 5 == 0 else range(3)
        groups = groups if len(nodes) == 3 else [groups[0], [*groups[1], *groups[2]]]
        sent = {rank: encoded(model_of(rng, rank)) for group in groups for rank in group}
        plan = plan_of(number, groups, dict(enumerate(weights)), sent)
        plan = plan._replace(settled=tuple(settled[k] for k in nodes))
        settled.update(dict.fromkeys(nodes, number))
        expected = oracle.exchange(plan, sent)
        for name, part in exchanged([ends[k] for k in nodes], plan, sent).widen().items():
            np.testing.assert_array_equal(part, expected[name], f"{number} {name}")
        assert bool(plan.merged_groups()) == (len(sent) > len(groups))


def test_nothing_is_lost_over_many_exchanges(rng: np.random.Generator) -> None:
    ends = [End() for _ in range(3)]
    groups = [[0, 3, 4], [1], [2, 5]]
    exact, got, largest = np.zeros(1_003), np.zeros(1_003), 0.0
    for number in range(1, 101):
        sent = {rank: encoded(model_of(rng, rank)) for rank in range(6)}
        plan = plan_of(number, groups, dict.fromkeys(range(6), 1.0), sent)
        got += exchanged(ends, plan, sent).widen()["a"]
        exact += np.mean([sent[rank].widen()["a"] for rank in range(6)], axis=0, dtype=np.float64)
        # The error is that of the last roundings: of two nodes' averages, and of their average.
        largest = max(largest, float(np.abs(got - exact).max()))
    assert largest < 3 * 2**-9 * 4
    # Without feedback, errors would add up as in a random walk.
    assert np.abs(exact).max() > 10


def test_an_attempt_that_failed_leaves_no_trace(rng: np.random.Generator) -> None:
    ends, same = [End() for _ in range(3)], [End() for _ in range(3)]
    groups = [[0, 1], [2, 3]]
    settled, settled_third = 0, 0
    for number in range(2, 18, 2):
        sent = {rank: encoded(model_of(rng, rank)) for rank in range(4)}
        plan = plan_of(number, groups, dict.fromkeys(range(4), 1.0), sent)
        plan = plan._replace(settled=(settled, settled))
        # One node is done, the other has not begun to merge.
        read(ends[:2], plan, sent)
        parts = [end.cut(plan, me) for me, end in enumerate(ends[:2])]
        ends[0].merge(plan, 0, parts, plan.template.layout.new_buffer())
        again = plan._replace(number=number + 1)
        if number % 4 == 0:  # with a third node, to which a part of the others' shards goes
            again = plan_of(again.number, [[0, 1], [2], [3]], dict.fromkeys(range(4), 1.0), sent)
            again = again._replace(settled=(settled, settled, settled_third))
            settled_third = again.number
        settled = again.number
        count = len(again.groups)
        found = exchanged(ends[:count], again, sent)
        expected = exchanged(same[:count], again, sent)
        assert found.values.buffer.tobytes() == expected.values.buffer.tobytes()


def test_an_agent_that_is_restarted_begins_with_errors_of_zero(rng: np.random.Generator) -> None:
    ends, oracle = [End() for _ in range(3)], Oracle(3)
    for number in range(1, 7):
        if number == 4:
            ends[1] = End()
            oracle.of_ranks[1], oracle.of_shards[1] = Oracle.zeros(), Oracle.zeros()
        sent = {rank: encoded(model_of(rng, rank)) for rank in range(6)}
        groups = [[0, 3], [1, 4], [2, 5]]
        plan = plan_of(number, groups, dict.fromkeys(range(6), 1.0), sent)
        if number == 4:
            plan = plan._replace(settled=(3, 0, 3))
        expected = oracle.exchange(plan, sent)
        for name, part in exchanged(ends, plan, sent).widen().items():
            np.testing.assert_array_equal(part, expected[name])


def test_gradients_have_errors_of_their_own_and_a_new_layout_begins_anew(
    rng: np.random.Generator,
) -> None:
    ends, weights_only, gradients_only = (tuple(End() for _ in range(2)) for _ in range(3))
    number = 0
    for _ in range(4):
        models = [model_of(rng, rank) for rank in range(2)]
        for base, others in ((5, weights_only), (None, gradients_only)):
            number += 1
            sent = {rank: encoded(model, base) for rank, model in enumerate(models)}
            plan = plan_of(number, [[0], [1]], {0: 1.0, 1: 1.0}, sent)
            found = exchanged(ends, plan, sent)
            expected = exchanged(others, plan._replace(settled=(max(0, number - 2),) * 2), sent)
            assert found.values.buffer.tobytes() == expected.values.buffer.tobytes()
    vector = fw.FlatWeights({"vector": rng.normal(size=333).astype(np.float32)})
    sent = {rank: encoded(vector, None) for rank in range(2)}
    plan = plan_of(number + 1, [[0], [1]], {0: 1.0, 1: 1.0}, sent)
    found = exchanged(ends, plan, sent)
    assert found.values.buffer.tobytes() == sent[0].values.buffer.tobytes()


def test_an_average_that_does_not_fit_is_an_error(rng: np.random.Generator) -> None:
    layout = fw.Layout.of({"w": np.zeros(100, np.float32)})
    ends = [End() for _ in range(2)]
    largest = fw.FlatWeights.empty(wire_layout(layout, "float16"))
    largest["w"] = np.full(100, np.inf, np.float16)
    sent = {rank: Difference(largest, layout, 1) for rank in range(2)}
    plan = plan_of(1, [[0], [1]], {0: 1.0, 1: 1.0}, sent)
    for end, group in zip(ends, plan.groups, strict=True):
        summary = read_into(end.models, group[0], sent[group[0]], READING)
        assert summary.not_finite is not None
    parts = [end.cut(plan, me) for me, end in enumerate(ends)]
    with pytest.raises(ValueError, match="does not fit"):
        ends[0].merge(plan, 0, parts, plan.template.layout.new_buffer())


@pytest.mark.parametrize(
    "wire_dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)]
)
def test_streams_and_blocks_do_not_change_the_bits(
    wire_dtype: WireDType, rng: np.random.Generator
) -> None:
    by_stream = [NodeReducer(GroupChannels().offer, "127.0.0.1") for _ in range(3)]
    whole = [End() for _ in range(3)]
    addresses, epoch = tuple(end.address for end in by_stream), secrets.token_bytes(16)
    try:
        for number in (1, 2):
            sent = {}
            for rank in range(5):
                layout = fw.Layout.of({"w": np.zeros(2_000_003, np.float32), "n": np.int64(0)})
                values = fw.FlatWeights.empty(wire_layout(layout, wire_dtype))
                values["w"] = rng.random(2_000_003, np.float32)
                values["n"] = rank
                sent[rank] = Difference(values, layout, 1)
            plan = plan_of(number, [[0, 2], [1], [3, 4]], dict.fromkeys(range(5), 1.0), sent)
            assert plan.in_blocks().blocks > 1
            read(by_stream, plan, sent)
            endpoints = Endpoints(addresses, epoch, 60.0)
            with ThreadPoolExecutor(3) as pool:
                ended = [pool.submit(by_stream[me].stream, plan, me, endpoints) for me in range(3)]
                for future in ended:
                    future.result()
            expected = exchanged(whole, plan, sent)
            for end in by_stream:
                got = end.weights(number, 9)
                assert (got.layout, got.base, got.version) == (layout, 1, 9)
                assert got.values.buffer.tobytes() == expected.values.buffer.tobytes()
    finally:
        for end in by_stream:
            end.close()
