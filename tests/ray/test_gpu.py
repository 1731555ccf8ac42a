"""Two workers on one GPU."""

from typing import Any

import numpy as np
import pytest
import ray
from gpus import shown_gpus
from numpy.typing import NDArray
from ray_forks import ALONE
from reference import same_bits

from flatweights import FlatWeights
from flatweights.ray import FlatWorker, WorkerGroup

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(shown_gpus() == 0, reason="there is no GPU, or it is hidden"),
]

WORKERS = 2

# The workers are no copies of a process with TensorFlow, and neither takes all of the memory.
ENVIRONMENT = {ALONE: "1", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}


def first_values() -> dict[str, NDArray[Any]]:
    """Even numbers: all means of this test are exact."""
    rng = np.random.default_rng(0)
    return {
        "kernel": 2 * rng.integers(-9, 9, (300, 7)).astype(np.float32),
        "scalar": np.array(4, np.float32),
        "large": 2 * rng.integers(-9, 9, 1_000_001).astype(np.float32),
        "empty": np.zeros((0, 3), np.float32),
        "wide": 2 * rng.integers(-9, 9, 11).astype(np.float64),
        "step": np.array(6, np.int64),
    }


class OnGPU(FlatWorker):
    """All its variables are on the GPU; rank 0 adds 0 in a call, and rank 1 adds 4."""

    def build(self, rank: int) -> Any:
        import tensorflow as tf

        assert tf.config.list_physical_devices("GPU"), "TensorFlow sees no GPU in the worker"
        with tf.device("GPU:0"):
            self.model = [tf.Variable(v, name=n) for n, v in first_values().items()]
        self.rank = rank

        @tf.function(autograph=False)  # type: ignore[untyped-decorator]
        def steps() -> None:
            for variable in self.model:
                for _ in range(4):
                    step = tf.fill(variable.shape, tf.cast(rank, variable.dtype))
                    variable.assign_add(step, read_value=False)

        self.steps = steps
        return self.model

    def train(self) -> FlatWeights:
        self.steps()
        return self.get_weights()

    def train_flat(self) -> NDArray[Any]:
        self.steps()
        return self.get_flat()

    def read(self) -> dict[str, NDArray[Any]]:
        """What TensorFlow reads."""
        return {v.name.partition(":")[0]: np.asarray(v.numpy()) for v in self.model}

    def devices(self) -> set[str]:
        return {variable.device.rpartition("device:")[2] for variable in self.model}


@pytest.mark.starts_actors
def test_two_workers_on_one_gpu_average_and_set() -> None:
    worker: Any = ray.remote(num_cpus=0, runtime_env={"env_vars": ENVIRONMENT})(OnGPU)
    with WorkerGroup.create(
        worker, WORKERS, arguments=lambda rank: [rank], num_gpus=1 / WORKERS
    ) as group:
        assert group.step("devices") == {0: {"GPU:0"}, 1: {"GPU:0"}}
        expected = first_values()
        for result in group.run(3, "train", timeout=300):
            assert result.used == (0, 1)
            for value in expected.values():
                value += 2 * (value.dtype.kind == "f")  # integers keep those of rank 0
            for name, value in expected.items():
                assert same_bits(result.weights[name], value), name
        for read in group.step("read").values():
            assert all(same_bits(read[name], v) for name, v in expected.items())
        before = group.step("get_flat")
        flat = np.concatenate([v.reshape(-1).astype(np.float64) for v in expected.values()])
        assert all(same_bits(one, flat) for one in before.values())
        mean = group.average("train_flat", timeout=300)
        assert same_bits(mean.weights, flat + 2)
        group.broadcast(mean.weights - 1)
        for one in group.step("get_flat").values():
            assert same_bits(one, flat + 1)
