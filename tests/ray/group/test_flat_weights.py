"""`FlatWeights` on their way through Ray's object store."""

import gc
import pickle
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import ray
from numpy.typing import NDArray
from reference import assert_same, same_bits

from flatweights import FlatWeights, Layout

pytestmark = pytest.mark.ray

SIZES = {"empty": 0, "inline": 100, "shared": 300_000}


@ray.remote
class Holder:
    """A worker that inspects the weights that it gets, and returns them."""

    def __init__(self) -> None:
        self._layouts: list[Layout] = []

    def echo(self, weights: FlatWeights) -> FlatWeights:
        return weights

    def add(self, weights: FlatWeights, amount: float) -> FlatWeights:
        weights = weights.copy()
        weights["kernel"] += amount
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


def make(size: int, seed: int = 0) -> FlatWeights:
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


def test_an_actor_changes_a_copy(holder: Any) -> None:
    weights = make(10)
    changed = ray.get(holder.add.remote(weights, 2.0))
    assert same_bits(changed["kernel"], weights["kernel"] + np.float32(2))
    assert same_bits(changed["bias"], weights["bias"])


def test_weights_without_parts_travel() -> None:
    assert ray.get(ray.put(FlatWeights({}))) == {}


def test_one_buffer_travels_out_of_band(weights: FlatWeights) -> None:
    buffers: list[pickle.PickleBuffer] = []
    ray.cloudpickle.dumps(weights, protocol=5, buffer_callback=buffers.append)
    assert len(buffers) == 1
    raw = np.frombuffer(buffers[0], np.uint8)  # type: ignore[call-overload]
    assert np.shares_memory(raw, weights.buffer)
    assert raw.nbytes == weights.buffer.nbytes


def test_layouts_cost_few_bytes_beside_the_buffer(weights: FlatWeights) -> None:
    in_band = ray.cloudpickle.dumps(weights, protocol=5, buffer_callback=lambda buffer: None)
    assert len(in_band) < 1000


def test_what_is_got_are_read_only_views_of_one_buffer(weights: FlatWeights) -> None:
    got = ray.get(ray.put(weights))
    assert not got.buffer.flags.writeable
    assert not got.buffer.flags.owndata
    for view in got.values():
        assert not view.flags.writeable
        assert view.size == 0 or np.shares_memory(view, got.buffer)


def test_two_gets_share_memory_on_one_node() -> None:
    ref = ray.put(make(SIZES["shared"]))
    assert np.shares_memory(ray.get(ref).buffer, ray.get(ref).buffer)


def test_assigning_names_copy_and_changes_nothing(weights: FlatWeights) -> None:
    got = ray.get(ray.put(weights))
    for assign in (
        lambda: got.__setitem__("bias", np.zeros(3)),
        lambda: got.update(bias=np.zeros(3)),
        lambda: got.__ior__({"bias": np.zeros(3)}),
    ):
        with pytest.raises(ValueError, match=r"read-only .*copy\(\)"):
            assign()  # type: ignore[no-untyped-call]
    with pytest.raises(ValueError, match="read-only"):
        got["bias"] += 1
    assert_same(got, weights)


def test_copy_is_writable_and_apart(weights: FlatWeights) -> None:
    got = ray.get(ray.put(weights))
    copy = got.copy()
    assert copy.buffer.flags.writeable
    copy["bias"] += 1
    copy["kernel"] = np.zeros(copy["kernel"].shape)
    assert same_bits(copy["bias"], weights["bias"] + 1)
    assert not copy["kernel"].any()
    assert_same(got, weights)


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


def test_a_view_keeps_the_object_in_the_store() -> None:
    size = SIZES["shared"]
    expected = make(size)
    ref = ray.put(expected)
    kernel: NDArray[Any] = ray.get(ref)["kernel"]
    del ref
    gc.collect()
    for seed in range(1, 4):  # would take the memory that a lost object leaves
        ray.put(make(size, seed))
    assert same_bits(kernel, expected["kernel"])
