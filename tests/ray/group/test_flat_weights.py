"""`FlatWeights` on their way through Ray's object store."""

import gc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import ray
from numpy.typing import NDArray
from reference import assert_same, same_bits

from flatweights import FlatWeights, Layout

pytestmark = pytest.mark.ray

SIZES = {"none": None, "empty": 0, "inline": 100, "shared": 300_000}


@ray.remote
class Holder:
    """A worker that inspects the weights that it gets, and returns them."""

    def __init__(self) -> None:
        self._layouts: list[Layout] = []

    def echo(self, weights: FlatWeights) -> FlatWeights:
        return weights

    def describe(self, weights: FlatWeights) -> tuple[type, bool]:
        return type(weights), weights.buffer.flags.writeable

    def knows_layout(self, weights: FlatWeights) -> bool:
        known = any(weights.layout is layout for layout in self._layouts)
        self._layouts.append(weights.layout)
        return known


@pytest.fixture(scope="module")
def holder() -> Any:
    return Holder.remote()  # type: ignore[attr-defined]


def make(size: int | None, seed: int = 0) -> FlatWeights:
    if size is None:
        return FlatWeights({})
    rng = np.random.default_rng(seed)
    return FlatWeights(
        {
            "kernel": rng.normal(size=(size, 2)).astype(np.float32),
            "half": rng.normal(size=5).astype(ml_dtypes.bfloat16),
            "bias": rng.normal(size=3),
            "step": np.int64(seed),
            "frozen": np.array([True, False]),
        }
    )


@pytest.fixture(params=SIZES)
def weights(request: pytest.FixtureRequest) -> FlatWeights:
    return make(SIZES[request.param])


def test_put_and_get_keep_type_layout_and_bits(weights: FlatWeights) -> None:
    assert_same(ray.get(ray.put(weights)), weights)


def test_actors_take_and_return_flat_weights(holder: Any, weights: FlatWeights) -> None:
    assert ray.get(holder.describe.remote(weights)) == (FlatWeights, False)
    assert_same(ray.get(holder.echo.remote(weights)), weights)
    assert_same(ray.get(holder.echo.remote(ray.put(weights))), weights)


def test_what_is_got_are_read_only_views_of_one_buffer(weights: FlatWeights) -> None:
    got = ray.get(ray.put(weights))
    assert not got.buffer.flags.writeable
    assert not got.buffer.flags.owndata
    for view in got.values():
        assert not view.flags.writeable
        assert view.size == 0 or np.shares_memory(view, got.buffer)


def test_comprehension_of_the_guide_works_on_what_is_got(holder: Any) -> None:
    values = [make(100, seed) for seed in range(3)]
    ws = ray.get([holder.echo.remote(value) for value in values])
    averaged = {k: sum(w[k] for w in ws) / len(ws) for k in ws[0]}
    plain = [{k: np.array(v) for k, v in value.items()} for value in values]
    expected = {k: sum(p[k] for p in plain) / len(plain) for k in plain[0]}
    assert list(averaged) == list(expected)
    for k in expected:
        assert same_bits(np.asarray(averaged[k]), np.asarray(expected[k]))


def test_layout_is_not_rebuilt(holder: Any) -> None:
    first, second = make(100, seed=1), make(100, seed=2)
    got = ray.get([ray.put(first), ray.put(second), holder.echo.remote(first)])
    assert got[0].layout is got[1].layout
    assert got[0].layout is got[2].layout
    other = FlatWeights({"only here": np.zeros(3)})
    assert not ray.get(holder.knows_layout.remote(other))
    assert ray.get(holder.knows_layout.remote(other))


def test_gets_on_one_node_share_an_object_that_a_view_keeps() -> None:
    size = SIZES["shared"]
    expected = make(size)
    ref = ray.put(expected)
    assert np.shares_memory(ray.get(ref).buffer, ray.get(ref).buffer)
    kernel: NDArray[Any] = ray.get(ref)["kernel"]
    del ref
    gc.collect()
    for seed in range(1, 4):  # would take the memory that a lost object leaves
        ray.put(make(size, seed))
    assert same_bits(kernel, expected["kernel"])
