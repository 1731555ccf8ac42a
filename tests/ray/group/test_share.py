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
SMALL = {"in": (64, 512), "out": (512, 100), "bias": (100,)}


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

    def build(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, str]:
        """Build it of zeros; return the unbound variables, with the reasons."""
        zeros = {name: self.tf.zeros(shape) for name, shape in shapes.items()}
        self.model = {name: self.tf.Variable(zeros.pop(name), name=name) for name in shapes}
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

    def are_shared(self) -> dict[str, bool]:
        """For each variable, whether it lies in memory that processes share."""
        maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
        kinds = {tuple(int(end, 16) for end in line[0].split("-")): line[1][3] for line in maps}
        at = {k: np.asarray(memoryview(v.value())).ctypes.data for k, v in self.model.items()}
        return {
            name: next(kind for (begin, end), kind in kinds.items() if begin <= one < end) == "s"
            for name, one in at.items()
        }

    def pss(self) -> int:
        """The proportional set size: memory that n processes map counts 1 / n in each."""
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


@pytest.fixture(scope="module")
def actors() -> Iterator[list[Any]]:
    # Otherwise, TensorFlow keeps freed memory; and copies of a process share that of imports.
    variables = {"TF_ENABLE_ONEDNN_OPTS": "0", ALONE: "1"}
    actor: Any = ray.remote(num_cpus=0, runtime_env={"env_vars": variables})(Inference)
    made = [actor.remote() for _ in range(ACTORS)]
    ray.get([actor.pss.remote() for actor in made])
    yield made
    for actor in made:
        ray.kill(actor)


def source(shapes: dict[str, tuple[int, ...]]) -> tuple[Any, dict[str, str]]:
    """Return weights, put once, and the checksum of each part."""
    rng = np.random.default_rng(0)
    parts = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    return ray.put(FlatWeights(parts)), checksums(parts)


def checksums(parts: dict[str, Any]) -> dict[str, str]:
    return {name: hashlib.sha256(np.ascontiguousarray(a)).hexdigest() for name, a in parts.items()}  # type: ignore[arg-type]


def everyone(actors: list[Any], method: str, *args: Any) -> list[Any]:
    return ray.get([getattr(actor, method).remote(*args) for actor in actors])  # type: ignore[no-any-return]


@pytest.mark.slow
def test_actors_share_one_copy(actors: list[Any]) -> None:
    """Measure the growth of the sum of the actors' proportional set sizes, in models.

    It counts from before they build their models until each has read every byte of its
    weights. Pages that several processes map are split among them, the driver included.
    """
    ref, expected = source(SHAPES)
    before = sum(everyone(actors, "pss"))

    def copies() -> float:
        assert everyone(actors, "checksums") == [expected] * ACTORS
        return (sum(everyone(actors, "pss")) - before) / COPY  # type: ignore[no-any-return]

    assert everyone(actors, "build", SHAPES) == [{}] * ACTORS, "all variables are bound"
    everyone(actors, "set", ref, True)
    shared = copies()
    everyone(actors, "set", ref, False)
    copied = copies()  # the store's pages stay mapped beside the copies
    assert shared < 1.3
    assert copied > 1.7
    assert copied - shared > 1.4


def test_a_step_of_one_actor_changes_nothing_for_the_others() -> None:
    ref, expected = source(SMALL)
    actor: Any = ray.remote(num_cpus=0)(Inference)
    actors = [actor.remote() for _ in range(ACTORS)]
    assert everyone(actors, "build", SMALL) == [{}] * ACTORS, "all variables are bound"
    for share in (False, True):
        everyone(actors, "set", ref, share)
        assert everyone(actors, "are_shared") == [dict.fromkeys(SMALL, share)] * ACTORS
    for _ in range(2):  # the first leaves the store's memory, the second its own
        ray.get(actors[0].train.remote())
    assert ray.get(actors[0].are_shared.remote()) == dict.fromkeys(SMALL, False)
    first, *others = everyone(actors, "checksums")
    assert others == [expected] * (ACTORS - 1)
    weights = ray.get(ref)
    assert checksums(weights) == expected
    assert first == checksums({name: part + 1 + 1 for name, part in weights.items()})
    for one in actors:
        ray.kill(one)
