"""Inference actors that share one copy of the weights, in Ray's object store."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray_forks import ALONE

from flatweights import FlatWeights

pytestmark = pytest.mark.ray

ACTORS = 2
SHAPES = {
    "in": (1024, 4096),
    "hidden": (4096, 4096),
    "out": (4096, 1000),
    "bias": (4096,),
}
COPY = 4 * sum(int(np.prod(shape)) for shape in SHAPES.values())  # bytes of one model


# Otherwise, TensorFlow keeps freed memory; and copies, which come and go, share that of imports.
@ray.remote(num_cpus=0, runtime_env={"env_vars": {"TF_ENABLE_ONEDNN_OPTS": "0", ALONE: "1"}})
class Inference:
    """A model that is built on request; it measures its own process."""

    def __init__(self) -> None:
        os.environ.pop("FLATWEIGHTS_TENSORFLOW", None)
        import tensorflow as tf

        from flatweights.tensorflow import TensorFlowVariables

        self.tf = tf
        self.make = TensorFlowVariables
        # Memory of the first use is not part of a model.
        small = tf.Variable(tf.zeros(8))
        TensorFlowVariables(small).set_flat(np.ones(8, np.float32))
        small.assign_add(tf.ones(8))
        self.checksum_of(small)

    def build(self) -> dict[str, str]:
        """Build it of zeros; return the unbound variables, with the reasons."""
        zeros = {name: self.tf.zeros(shape) for name, shape in SHAPES.items()}
        self.model = {name: self.tf.Variable(zeros.pop(name), name=name) for name in SHAPES}
        self.weights = self.make(list(self.model.values()))
        return self.weights.unbound

    def set(self, weights: FlatWeights, share: bool) -> None:
        self.weights.set_weights(weights, share=share)

    def train(self) -> None:
        for variable in self.model.values():
            variable.assign_add(self.tf.ones_like(variable))

    def checksum_of(self, variable: Any) -> str:
        return hashlib.sha256(memoryview(variable.value())).hexdigest()

    def checksums(self) -> dict[str, str]:
        """Of each variable; reads every byte, so that every page counts."""
        return {name: self.checksum_of(v) for name, v in self.model.items()}

    def pss(self) -> int:
        """The proportional set size: memory that n processes map counts 1 / n in each."""
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


@pytest.fixture(scope="module")
def actors() -> Iterator[list[Any]]:
    made = [Inference.remote() for _ in range(ACTORS)]  # type: ignore[attr-defined]
    ray.get([actor.pss.remote() for actor in made])
    yield made
    for actor in made:
        ray.kill(actor)


@pytest.fixture(scope="module")
def source() -> tuple[Any, dict[str, str]]:
    """Weights, put once, and the checksum of each part."""
    rng = np.random.default_rng(0)
    parts = {name: rng.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}
    return ray.put(FlatWeights(parts)), checksums(parts)


def checksums(parts: dict[str, Any]) -> dict[str, str]:
    return {name: hashlib.sha256(np.ascontiguousarray(a)).hexdigest() for name, a in parts.items()}  # type: ignore[arg-type]


def everyone(actors: list[Any], method: str, *args: Any) -> list[Any]:
    return ray.get([getattr(actor, method).remote(*args) for actor in actors])  # type: ignore[no-any-return]


def test_actors_share_one_copy(actors: list[Any], source: tuple[Any, dict[str, str]]) -> None:
    """Measure the growth of the sum of the actors' proportional set sizes, in models.

    It counts from before they build their models until each has read every byte of its
    weights. Pages that several processes map are split among them, the driver included.
    """
    ref, expected = source
    before = sum(everyone(actors, "pss"))

    def copies() -> float:
        assert everyone(actors, "checksums") == [expected] * ACTORS
        return (sum(everyone(actors, "pss")) - before) / COPY  # type: ignore[no-any-return]

    assert everyone(actors, "build") == [{}] * ACTORS, "all variables are bound"
    everyone(actors, "set", ref, True)
    shared = copies()
    everyone(actors, "set", ref, False)
    copied = copies()  # the store's pages stay mapped beside the copies
    assert shared < 1.3
    assert copied > 1.7
    assert copied - shared > 1.4


def test_a_step_of_one_actor_changes_nothing_for_the_others(
    actors: list[Any], source: tuple[Any, dict[str, str]]
) -> None:
    ref, expected = source
    everyone(actors, "build")
    everyone(actors, "set", ref, True)
    for _ in range(2):  # the first leaves the store's memory, the second its own
        ray.get(actors[0].train.remote())
    first, *others = everyone(actors, "checksums")
    assert others == [expected] * (ACTORS - 1)
    weights = ray.get(ref)
    assert checksums(weights) == expected
    assert first == checksums({name: part + 1 + 1 for name, part in weights.items()})
