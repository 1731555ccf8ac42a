"""`WorkerGroup` with a ``wire_dtype``: half the bytes, the results of float32."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray_pool import Lend, only_late, restored
from ray_workers import PlainWorker

from flatweights import FlatWeights
from flatweights.ray import WorkerError, WorkerGroup
from flatweights.robust import CenteredClipping

pytestmark = pytest.mark.ray

Make = Callable[..., WorkerGroup]


class Float32Worker(PlainWorker):
    """Training adds to ``w`` a little, and a different amount in each element."""

    def __init__(self, rank: int = 0, size: int = 5) -> None:
        super().__init__(rank, size)
        self.model = FlatWeights({"w": np.ones(size, np.float32), "n": np.int64(0)})
        self.rng = np.random.default_rng(rank)

    def train(self, step: float = 1e-4) -> FlatWeights:
        self.model["w"] += np.float32(step) * self.rng.random(self.model["w"].size, np.float32)
        self.model["n"] += 1
        return self.get_weights()

    def gradient(self, scale: float = 1.0) -> np.ndarray[Any, Any]:
        return np.full(70, np.float32(scale * 1.001))

    def spoil(self, value: float) -> FlatWeights:
        result = self.get_weights()
        if self.rank == 1:
            result["w"][3] = value
        return result


@pytest.fixture
def make(way: str, lend: Lend) -> Make:
    return lambda n=3, size=5, **options: lend(Float32Worker, n, size, **options)


def bits(group: WorkerGroup) -> list[bytes]:
    return [w.buffer.tobytes() for w in group.step("get_weights").values()]


@pytest.mark.parametrize(
    ("wire", "size"),
    [
        ("bfloat16", 80_000),
        pytest.param("float16", 5, marks=pytest.mark.slow),
        pytest.param("bfloat16", 5, marks=pytest.mark.slow),
        pytest.param("float16", 80_000, marks=pytest.mark.slow),
    ],
)
def test_rounds_give_what_float32_gives_with_half_the_bytes(
    make: Make, wire: str, size: int
) -> None:
    plain = make(2, size=size)
    start = FlatWeights({"w": np.linspace(1, 2, size, dtype=np.float32), "n": np.int64(0)})
    plain.broadcast(start)
    in_full = [(found.weights["w"].copy(), found.nbytes) for found in plain.run(4, "train")]
    plain.step("build_anew")
    group = WorkerGroup(list(plain.actors().values()), wire_dtype=wire)  # type: ignore[arg-type]
    group.broadcast(start)
    for (expected, nbytes), found in zip(in_full, group.run(4, "train"), strict=True):
        assert found.weights["w"].dtype == np.float32
        assert np.abs(found.weights["w"] - expected).max() < 2e-6
        if size > 100:
            assert found.nbytes < 0.51 * nbytes
    assert int(found.weights["n"]) == 4
    assert len(set(bits(group))) == 1


def test_a_late_worker_comes_back_with_the_bits_of_the_others(make: Make, tmp_path: Path) -> None:
    group = make(wire_dtype="bfloat16")
    for _ in group.run(1, "train"):
        assert len(set(bits(group))) == 1
    hangs: Any = {1: "hang"}
    with only_late():
        found = group.average("act", hangs, str(tmp_path), 1e-4, timeout=0.05, min_results=2)
    assert found.late == (1,)
    group.broadcast(found)
    (tmp_path / "go on").touch()
    assert restored(group) == [1]
    for found in group.run(2, "train"):
        assert found.used == (0, 1, 2)
    assert len(set(bits(group))) == 1


def test_what_does_not_fit_names_rank_and_slot(make: Make) -> None:
    group = make(wire_dtype="float16")
    for _ in group.run(1, "train"):
        pass
    for value, reason in [(np.nan, "holds NaN"), (1e6, "fits float16")]:
        expected = f"rank 1: ValueError: weights, slot 0 'w': .*{reason}"
        with pytest.raises(WorkerError, match=expected):
            group.average("spoil", value)
        assert group.average("spoil", value, min_results=2).used == (0, 2)
    assert group.healthy_actor_ids() == [0, 1, 2]
    for found in group.run(1, "train"):
        assert found.used == (0, 1, 2)


def test_gradients_travel_with_feedback(make: Make) -> None:
    group = make(wire_dtype="bfloat16")
    total = sum(
        group.average("gradient", payload_kind="gradients").weights["vector"] for _ in range(50)
    )
    assert total.dtype == np.float32
    assert np.allclose(total, 50 * 1.001, rtol=2**-13 * 2, atol=2**-8)


def test_the_centre_of_a_rule_is_compared_with_differences(make: Make) -> None:
    group = make(wire_dtype="bfloat16")
    start = FlatWeights({"w": np.full(5, 5, np.float32), "n": np.int64(7)})
    center = FlatWeights({"w": np.full(5, 6, np.float32), "n": np.int64(9)})
    for given in (center, dict(center)):
        group.broadcast(start)
        rule = CenteredClipping(0.5, steps=1, center=given)
        found = group.average("train", rule=rule).weights
        assert np.allclose(found["w"], 6 - 0.5 / np.sqrt(5), atol=3e-4)
        assert found["n"] == 8
    assert center["w"].tolist() == [6] * 5
    rule = CenteredClipping(0.5, steps=1, center={"vector": np.zeros(70, np.float32)})
    found = group.average("gradient", payload_kind="gradients", rule=rule).weights
    assert np.allclose(found["vector"], 0.5 / np.sqrt(70), rtol=1e-6)
    with pytest.raises(ValueError, match="center: expected 2 slots, got 1, without 'n'"):
        group.average("train", rule=CenteredClipping(0.5, center={"w": center["w"]}))
