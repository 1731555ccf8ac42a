"""Shards of the packed form: equal sizes, whole elements, and the bits of the whole average."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from reference import same_bits

import flatweights as fw
from flatweights import FlatWeights
from flatweights._sources import Template
from flatweights.ray.nodes._shards import canonical, model_of, packed_bytes, shards_of


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
    "tree": lambda rng, size: {"b": [make_parts(rng, size)], "a": rng.normal(size=size)},
}


def assert_same_tree(got: Any, expected: Any) -> None:
    assert type(got) is type(expected)
    if isinstance(expected, np.ndarray):
        assert same_bits(got, expected)
        return
    keys = list(expected) if isinstance(expected, dict) else range(len(expected))
    assert list(got) == keys if isinstance(expected, dict) else len(got) == len(keys)
    for key in keys:
        assert_same_tree(got[key], expected[key])


@pytest.mark.parametrize("count", [1, 3, 7, 50, 10_000])
def test_shards_are_even_and_cover_everything(rng: np.random.Generator, count: int) -> None:
    layout = fw.Layout.of(make_parts(rng, 100))
    shards = shards_of(layout, count)
    assert len(shards) == min(count, layout.nbytes // 64)
    ends = [0, *(shard.end for shard in shards)]
    assert [shard.begin for shard in shards] == ends[:-1]
    assert ends[-1] == layout.nbytes
    sizes = [shard.end - shard.begin for shard in shards]
    assert max(sizes) - min(sizes) <= 64
    assert all(s.layout.nbytes == size for s, size in zip(shards, sizes, strict=True))
    assert sum(shard.layout.size for shard in shards) == layout.size


def test_nothing_has_no_shards() -> None:
    assert shards_of(fw.Layout.of([np.zeros((0, 3))]), 4) == ()


@pytest.mark.parametrize("weights", [None, [3, 0, 2.5]], ids=["equal", "weighted"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_averages_of_shards_are_those_of_the_whole(
    rng: np.random.Generator, kind: str, weights: list[float] | None
) -> None:
    for size, count in [(1, 2), (17, 3), (5000, 7)]:  # at 17 elements, fewer lines than shards
        values = [KINDS[kind](rng, size) for _ in range(3)]
        models = [canonical(value)[0] for value in values]
        template = Template.of(models[0])
        packed = [packed_bytes(template, model) for model in models]
        mean = np.empty_like(packed[0])
        for shard in shards_of(template.layout, count):
            shards = [model_of(p[shard.begin : shard.end], shard.layout) for p in packed]
            fw.average(shards, weights, out=model_of(mean[shard.begin : shard.end], shard.layout))
        got: Any
        if template.packed:
            got = dict(FlatWeights.wrap(mean, template.layout))
        elif mean.size == template.layout.nbytes:
            got = template.build(template.layout.packed_views(mean))
        else:  # an array has no padding
            got = mean.view(template.layout.dtype).reshape(values[0].shape)
        expected = canonical(fw.average(values, weights))[0]
        assert_same_tree(got, dict(expected) if kind == "FlatWeights" else expected)


def test_dicts_are_ordered_by_their_keys_and_restored(rng: np.random.Generator) -> None:
    model: dict[str, Any] = {
        "b": [{"y": rng.normal(size=2), "x": rng.normal(size=3)}],
        "a": rng.normal(size=1),
    }
    ordered, containers = canonical(model)
    assert list(ordered) == ["a", "b"]
    assert list(ordered["b"][0]) == ["x", "y"]
    assert containers is not None
    restored = containers.build(containers.leaves(ordered, "model"))
    assert list(restored) == ["b", "a"]
    assert list(restored["b"][0]) == ["y", "x"]
    assert restored["b"][0]["x"] is model["b"][0]["x"]
    for plain in (np.zeros(3), FlatWeights({"w": np.zeros(3)})):
        same, containers = canonical(plain)
        assert same is plain
        assert containers is None
