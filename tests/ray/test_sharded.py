"""`ShardedAverage`: on one node, and on clusters of several, one of which dies."""

import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import ray
from numpy.typing import NDArray
from ray_pool import Actors, restored
from ray_workers import PlainWorker, die, merged, running, trained, weights_of
from reference import arrays_of, assert_mean, assert_same, same_bits

import flatweights as fw
from flatweights import FlatWeights
from flatweights._sources import Template
from flatweights.ray import (
    ShardedAverage,
    ShardedRound,
    ShardedWeights,
    WorkerError,
    WorkerGroup,
)
from flatweights.ray._shard_tasks import ShardOwner, add_up_node
from flatweights.ray._shards import canonical, shards_of

LARGE = 200_000  # elements; beyond 100 KiB shards lie in shared memory


def make_parts(rng: np.random.Generator, size: int) -> dict[str, NDArray[Any]]:
    return {
        "kernel": rng.normal(size=(size, 1)).astype(np.float32),
        "half": rng.normal(size=777).astype(ml_dtypes.bfloat16),
        "float16": rng.normal(size=(3, 50)).astype(np.float16),
        "step": np.int64(rng.integers(1000)),
        "nothing": np.zeros((2, 0)),
        "wide": rng.normal(size=1111) * 10.0 ** rng.integers(-8, 8, size=1111),
        "mask": rng.integers(0, 2, size=100).astype(bool),
        "waves": (rng.normal(size=40) + 1j * rng.normal(size=40)).astype(np.complex64),
        "spins": rng.normal(size=33) + 1j * rng.normal(size=33),
        "alpha": rng.normal(size=()),
    }


KINDS: dict[str, Callable[[np.random.Generator, int], Any]] = {
    "array": lambda rng, size: rng.normal(size=(size, 1)).astype(np.float32),
    "bfloat16": lambda rng, size: rng.normal(size=size).astype(ml_dtypes.bfloat16),
    "FlatWeights": lambda rng, size: FlatWeights(make_parts(rng, size)),
    "dict": make_parts,
    "list": lambda rng, size: list(make_parts(rng, size).values()),
}


@pytest.fixture(scope="module")
def by_shard() -> Iterator[ShardedAverage]:
    with ShardedAverage(3) as sharded:
        yield sharded


@pytest.fixture(scope="module")
def by_node() -> Iterator[ShardedAverage]:
    with ShardedAverage(2, per_node=True) as sharded:
        yield sharded


@pytest.fixture(scope="module")
def group(way: str, all_actors: Actors) -> Iterator[WorkerGroup]:
    with all_actors.loan() as lend:
        yield lend(PlainWorker, 3, LARGE, max_restarts=-1)


@pytest.mark.parametrize("weights", [None, [0, 5, 2.5]], ids=["equal", "weighted"])
@pytest.mark.parametrize("size", [3, LARGE], ids=["inline", "shared"])
@pytest.mark.parametrize("kind", KINDS)
def test_shards_give_the_bits_of_average(
    by_shard: ShardedAverage,
    rng: np.random.Generator,
    kind: str,
    size: int,
    weights: list[float] | None,
) -> None:
    values = [KINDS[kind](rng, size) for _ in range(3)]
    found = by_shard.average(list(map(ray.put, values)), weights)
    assert_same(found.weights, fw.average(values, weights))
    assert found.used == (0, 1, 2)
    assert found.groups == ()
    first = [arrays_of(value)[0] for value in values]
    assert_mean(arrays_of(found.weights)[0], first, weights)


class Moments(NamedTuple):
    mean: NDArray[Any]
    square: NDArray[Any]


def tree(rng: np.random.Generator, size: int, *, reverse: bool = False) -> dict[str, Any]:
    """Nested containers; dicts of two ranks may be filled in another order."""
    layer = {"kernel": rng.normal(size=(size, 2)), "bias": rng.normal(size=size)}
    model: dict[str, Any] = {
        "params": {"layers": [layer, {"kernel": rng.normal(size=3)}], "alone": rng.normal(size=())},
        "moments": Moments(rng.normal(size=size), rng.normal(size=size)),
        "empty": {},
    }
    if reverse:
        layer["bias"] = layer.pop("bias")
        layer["kernel"] = layer.pop("kernel")
        model["params"] = dict(reversed(model["params"].items()))
        model = dict(reversed(model.items()))
    return model


def assert_same_tree(got: Any, expected: Any) -> None:
    assert type(got) is type(expected)
    if isinstance(expected, np.ndarray):
        assert same_bits(got, expected)
        return
    keys = list(expected) if isinstance(expected, dict) else range(len(expected))
    assert list(got) == keys if isinstance(expected, dict) else len(got) == len(keys)
    for key in keys:
        assert_same_tree(got[key], expected[key])


@pytest.mark.parametrize("way", ["by_shard", "by_node"])
def test_trees_are_averaged_into_trees(
    way: str, request: pytest.FixtureRequest, rng: np.random.Generator
) -> None:
    values = [tree(rng, 500, reverse=k == 1) for k in range(3)]
    found = request.getfixturevalue(way).average(list(map(ray.put, values)))
    expected = merged(values, [(0, 1, 2)]) if way == "by_node" else fw.average(values)
    assert_same_tree(found.weights, expected)
    assert_same_tree(found.shards.get_in_place(), expected)


def test_another_tree_is_refused_by_rank_and_path(
    by_shard: ShardedAverage, rng: np.random.Generator
) -> None:
    values = [tree(rng, 5), tree(rng, 5)]
    values[1]["params"]["layers"][0]["bias"] = np.zeros(6)
    with pytest.raises(ValueError, match=r"rank 1, slot \d+ 'params/layers/0/bias': .*\(6,\)"):
        by_shard.average(list(map(ray.put, values)))
    values[1]["params"]["layers"] = np.zeros(2)
    with pytest.raises(TypeError, match="rank 1, 'params/layers': expected a sequence"):
        by_shard.average(list(map(ray.put, values)))


@pytest.mark.parametrize("shards", [1, 7])
def test_any_number_of_shards_gives_the_same_bits(rng: np.random.Generator, shards: int) -> None:
    values = [FlatWeights(make_parts(rng, 100)) for _ in range(3)]
    few = [np.arange(17.0) + k for k in range(3)]  # fewer lines of 64 bytes than shards
    with ShardedAverage(shards, max_inflight=2) as sharded:
        found = sharded.average(list(map(ray.put, values)))
        assert len(found.shards.refs) == shards
        assert_same(found.weights, fw.average(values))
        assert_same(sharded.average(list(map(ray.put, few))).weights, fw.average(few))
        nothing = sharded.average([ray.put(np.zeros((0, 3)))]).weights
        assert nothing.shape == (0, 3)


@pytest.mark.parametrize("count", [1, 3, 7, 50, 10_000])
def test_shards_are_even_and_cover_everything(rng: np.random.Generator, count: int) -> None:
    layout = fw.Layout.of(make_parts(rng, 100))
    shards = shards_of(layout, count)
    assert len(shards) == min(count, layout.nbytes // 64)
    ends = [0, *(r.end for r in shards)]
    assert [r.begin for r in shards] == ends[:-1]
    assert ends[-1] == layout.nbytes
    sizes = [r.end - r.begin for r in shards]
    assert max(sizes) - min(sizes) <= 64
    assert all(r.layout.nbytes == size for r, size in zip(shards, sizes, strict=True))
    assert sum(r.layout.size for r in shards) == layout.size


@pytest.mark.parametrize("weights", [None, [3, 5, 2.5]], ids=["equal", "weighted"])
@pytest.mark.parametrize("kind", KINDS)
def test_sums_of_a_node_give_the_bits_of_a_running_average(
    by_node: ShardedAverage, rng: np.random.Generator, kind: str, weights: list[float] | None
) -> None:
    values = [KINDS[kind](rng, 5000) for _ in range(3)]
    found = by_node.average(list(map(ray.put, values)), weights)
    assert found.groups == ((0, 1, 2),)
    assert_same(found.weights, merged(values, found.groups, weights))


@pytest.mark.parametrize("kind", KINDS)
def test_sums_of_nodes_are_merged_as_running_averages_are(
    rng: np.random.Generator, kind: str
) -> None:
    # What nodes and owners run, in this process: there is but one node here.
    values = [KINDS[kind](rng, 5000) for _ in range(7)]
    weights = [3, 1.5, 0, 2.25, 7, 1 / 3, 0.1]
    groups = [[0, 3], [2], [1, 4, 5], [6]]
    model, containers = canonical(values[0])
    template = Template.of(model)
    rows = []
    for group in groups:
        refs = {k: ray.put(values[k]) for k in group}
        outcome, *row = add_up_node(refs, dict(enumerate(weights)), 3, 10.0)
        assert outcome.lost == {}
        rows.append([ray.put(value) for value in row])
    shards = []
    for k, r in enumerate(shards_of(template.layout, 3)):
        refs = {i: row[k] for i, row in enumerate(rows)}
        of_groups = {i: weights[group[0]] for i, group in enumerate(groups)}
        outcome, shard = ShardOwner().average(r.layout, refs, of_groups, 2, 10.0, merges=True)
        assert outcome.lost == {}
        shards.append(ray.put(shard))
    assert_same(ShardedWeights(template, containers, shards).get(), merged(values, groups, weights))


def test_sums_keep_what_is_not_finite(by_node: ShardedAverage) -> None:
    values = [np.array([np.inf, np.inf, -np.nan, 1e308, -0.0]) for _ in range(2)]
    values[1][:2] = np.inf, -np.inf
    found = by_node.average(list(map(ray.put, values)), nonfinite="propagate")
    assert_same(found.weights, merged(values, [[0, 1]]))


def test_keys_may_come_in_any_order(by_shard: ShardedAverage, rng: np.random.Generator) -> None:
    values = [make_parts(rng, 10) for _ in range(3)]
    values[1] = dict(reversed(values[1].items()))
    assert_same(by_shard.average(list(map(ray.put, values))).weights, fw.average(values))


def test_parts_are_views_of_the_shards(by_shard: ShardedAverage, rng: np.random.Generator) -> None:
    values = [FlatWeights({f"w{k}": rng.normal(size=20_000) for k in range(6)}) for _ in range(2)]
    found = by_shard.average(list(map(ray.put, values)))
    parts = found.shards.get_in_place()
    expected = fw.average(values)
    assert list(parts) == list(expected)
    for k, name in enumerate(parts):
        assert same_bits(parts[name], expected[name])
        assert not parts[name].flags.writeable
        shards = ray.get(found.shards.refs[k // 2])  # two parts lie in each shard
        assert np.shares_memory(parts[name], shards)


@ray.remote(num_cpus=0)  # type: ignore[untyped-decorator]
def bits_of(shards: ShardedWeights) -> bytes:
    buffer: bytes = shards.get().buffer.tobytes()
    return buffer


def test_shards_can_be_sent(by_shard: ShardedAverage, rng: np.random.Generator) -> None:
    values = [FlatWeights(make_parts(rng, LARGE)) for _ in range(2)]
    found = by_shard.average(list(map(ray.put, values)))
    expected = fw.average(values).buffer.tobytes()
    assert ray.get(bits_of.remote(found.shards)) == expected
    assert ray.get(found.ref).buffer.tobytes() == expected


def test_a_function_of_the_result_weighs_it(
    by_shard: ShardedAverage, by_node: ShardedAverage
) -> None:
    values = [(np.full(5, float(k)), {"samples": k + 1, "at": np.ones(2)}) for k in range(3)]
    for sharded in (by_shard, by_node):
        found = sharded.average(list(map(ray.put, values)), lambda r: r[1]["samples"])
        assert_same(found.weights, fw.average([value[0] for value in values], [1, 2, 3]))
        assert [found.extras[k]["samples"] for k in range(3)] == [1, 2, 3]
        assert found.nbytes == 3 * 64
        assert found.record()["used"] == [0, 1, 2]
    with pytest.raises(ValueError, match="weight of rank 1: expected a finite weight"):
        by_shard.average(list(map(ray.put, values)), lambda r: 1.5 - r[1]["samples"])


A = {"w": np.zeros((2, 3), np.float32), "b": np.zeros(3, np.float32)}


@pytest.mark.parametrize(
    ("first", "other", "error", "message"),
    [
        (
            FlatWeights(A),
            FlatWeights(A | {"b": np.zeros(4, np.float32)}),
            ValueError,
            r"slot 1: expected 'b' ",
        ),
        (FlatWeights(A), FlatWeights({"w": A["w"]}), ValueError, "expected 2 slots, got 1"),
        (FlatWeights(A), A, TypeError, "expected FlatWeights, got a mapping"),
        (FlatWeights(A), None, TypeError, "NoneType"),
        (A, {"w": A["w"], "c": A["b"]}, ValueError, r"missing \['b'\], unknown \['c'\]"),
        (np.zeros(3), np.zeros(4), ValueError, r"expected float64 \(3,\), got float64 \(4,\)"),
        ([np.zeros(3)], [np.zeros(3, np.float32)], TypeError, "slot 0 '0': expected float64"),
        ([np.zeros(3)], [np.zeros(3)] * 2, ValueError, "expected 1 parts, got 2"),
        (np.zeros(3), np.zeros(3, np.int32), TypeError, "got int32"),
    ],
    ids=["shape", "slots", "dict", "None", "keys", "size", "dtype", "parts", "integers"],
)
def test_another_layout_is_refused_by_rank(
    by_shard: ShardedAverage, first: Any, other: Any, error: type[Exception], message: str
) -> None:
    refs = [ray.put(first), ray.put(first), ray.put(other)]
    with pytest.raises(error, match=rf"rank 2\b.*{message}"):
        by_shard.average(refs)


@pytest.mark.parametrize("per_node", [False, True], ids=["by shard", "by node"])
def test_a_rank_with_nan_is_left_out_of_all_ranges(
    by_shard: ShardedAverage,
    by_node: ShardedAverage,
    rng: np.random.Generator,
    per_node: bool,
) -> None:
    sharded = by_node if per_node else by_shard
    values = [FlatWeights(make_parts(rng, 5000)) for _ in range(4)]
    values[1]["kernel"][17] = np.nan  # in the first shard alone
    values[2]["spins"][3] = np.inf * 1j  # in the last one
    refs = list(map(ray.put, values))
    with pytest.raises(ValueError, match=r"rank 1, slot 0 'kernel': holds NaN or infinity"):
        sharded.average(refs)
    found = sharded.average(refs, [1, 2, 3, 4], nonfinite="skip")
    assert found.used == (0, 3)
    assert found.quarantined == (1, 2)
    assert str(found.failed[2]) == "rank 2, slot 8 'spins': holds NaN or infinity"
    assert_same(found.weights, running([values[0], values[3]], [1, 4]).mean())
    with pytest.raises(WorkerError, match=r"^rank 1: ValueError: rank 1, slot 0 'kernel'"):
        sharded.average(refs, nonfinite="skip", min_results=3)
    through = sharded.average(refs, nonfinite="propagate")
    assert_same(through.weights, running(values).mean())


@ray.remote(num_cpus=0)
class Rank:
    """A worker that does as it is told."""

    def give(self, value: Any) -> Any:
        return value

    def fail(self, error: Exception) -> None:
        raise error

    def hang(self) -> None:
        time.sleep(600)

    def die(self) -> None:
        die()


@pytest.mark.parametrize("per_node", [False, True], ids=["by shard", "by node"])
def test_who_fails_hangs_or_dies_is_named(
    by_shard: ShardedAverage, by_node: ShardedAverage, per_node: bool
) -> None:
    sharded = by_node if per_node else by_shard
    ranks = [Rank.remote() for _ in range(5)]  # type: ignore[attr-defined]
    value = np.arange(LARGE, dtype=np.float32)
    ray.get([rank.give.remote(0) for rank in ranks])
    refs = [
        ranks[0].fail.remote(KeyError("batch")),
        ranks[1].give.remote(value),
        ranks[2].hang.remote(),
        ranks[3].die.remote(),
        ranks[4].give.remote(value * 3),
    ]
    ray.wait([refs[rank] for rank in (0, 1, 3, 4)], num_returns=4)
    found = sharded.average(refs, timeout=0.2, min_results=2)
    assert found.used == (1, 4)
    assert found.late == (2,)
    assert isinstance(found.failed[0], KeyError)
    assert isinstance(found.failed[3], ray.exceptions.ActorDiedError)
    assert_same(found.weights, value * 2)
    with pytest.raises(WorkerError) as caught:
        sharded.average(refs, timeout=0.2, min_results=3)
    assert sorted(caught.value.failed) == [0, 2, 3]
    assert "rank 2: TimeoutError: no result after 0.2 s" in str(caught.value)
    with pytest.raises(WorkerError, match="rank 0: KeyError: 'batch'"):
        sharded.average(refs)  # at once: it does not wait for who hangs
    for rank in ranks:
        ray.kill(rank)


def test_owners_that_die_are_replaced(rng: np.random.Generator) -> None:
    values = [rng.normal(size=LARGE) for _ in range(3)]
    refs = list(map(ray.put, values))
    with ShardedAverage(2) as sharded:
        assert_same(sharded.average(refs).weights, fw.average(values))
        for owner in sharded._owners:
            ray.kill(owner)
        assert_same(sharded.average(refs).weights, fw.average(values))


def test_a_group_trains_without_a_whole_buffer_in_the_driver(
    by_shard: ShardedAverage, by_node: ShardedAverage, group: WorkerGroup
) -> None:
    expected = weights_of(1.0, LARGE)
    group.broadcast(expected)
    for sharded in (by_shard, by_node):
        for found in group.run(2, "train_counted", sharded=sharded):
            expected = fw.average([trained(expected, rank) for rank in range(3)])
            assert isinstance(found, ShardedRound)
            assert found._weights is None  # nobody has asked
            assert found.nbytes_sent == 3 * expected.layout.nbytes
            assert found.extras[2]["samples"] == 3
            for weights in group.step("get_weights").values():
                assert same_bits(weights.buffer, expected.buffer)
    assert same_bits(found.weights.buffer, expected.buffer)
    group.broadcast(found)
    kept = weakref.ref(found)
    del found
    assert kept() is None, "what a user has put together is not kept for the workers"
    for flat in group.step("get_flat").values():
        assert flat[-1] == 3
    with pytest.raises(ValueError, match="sharded: expected neither out nor"):
        group.average("train", sharded=by_shard, out=expected)


@pytest.mark.starts_actors
def test_a_group_leaves_ranks_out_and_brings_them_back(
    by_shard: ShardedAverage, group: WorkerGroup, tmp_path: Path
) -> None:
    start = weights_of(1.0, LARGE)
    group.broadcast(start)
    plan = {0: "nan", 1: "die before"}
    found = group.average(
        "act", plan, str(tmp_path), sharded=by_shard, min_results=1, nonfinite="skip"
    )
    assert found.used == (2,)
    assert found.quarantined == (0,)
    assert list(found.failed) == [0, 1]
    assert group.healthy_actor_ids() == [0, 2]
    assert same_bits(found.weights.buffer, trained(start, 2).buffer)
    # Ranks are those of the group, though one is not called.
    assert group.average("train", sharded=by_shard).used == (0, 2)
    assert group.broadcast(found) == [0, 2]
    restored(group)
    after = group.average("train", sharded=by_shard)
    expected = fw.average([trained(trained(start, 2), rank) for rank in range(3)])
    assert same_bits(after.weights.buffer, expected.buffer)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_shards": 0}, ValueError, "num_shards: expected at least 1, got 0"),
        ({"num_shards": 1.5}, TypeError, "num_shards: expected an integer, got 1.5"),
        ({"nodes": []}, ValueError, "nodes: expected at least one id"),
        ({"num_cpus": -1}, ValueError, "num_cpus: expected not less than 0"),
        ({"max_inflight": 0}, ValueError, "max_inflight: expected at least 1"),
        ({"patience": 0}, ValueError, "patience: expected seconds"),
        ({"patience": float("nan")}, ValueError, "patience: expected seconds"),
    ],
)
def test_wrong_options_are_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ShardedAverage(**options)


def test_wrong_arguments_are_refused_before_anything_is_waited_for() -> None:
    failing = Rank.remote().hang.remote()  # type: ignore[attr-defined]
    sharded = ShardedAverage(2)
    with pytest.raises(ValueError, match="at least one reference, got none"):
        sharded.average([])
    with pytest.raises(TypeError, match=r"rank 1: expected a ray\.ObjectRef, got ndarray"):
        sharded.average([failing, np.zeros(2)])
    with pytest.raises(ValueError, match="weight 1: expected a finite weight"):
        sharded.average([failing, failing], [1, -1])
    with pytest.raises(ValueError, match="min_results: expected 1 to 1"):
        sharded.average([failing], min_results=2)
    with pytest.raises(ValueError, match="timeout: expected seconds"):
        sharded.average([failing], timeout=-1)
    with pytest.raises(ValueError, match="nonfinite: expected"):
        sharded.average([failing], nonfinite="ignore")  # type: ignore[arg-type]
    assert sharded._owners == []
    sharded.shutdown()
    with pytest.raises(RuntimeError, match="was shut down"):
        sharded.average([failing])
