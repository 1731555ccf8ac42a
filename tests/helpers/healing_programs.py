"""A training whose processes are killed and stopped, and its oracle in NumPy."""

import contextlib
import hashlib
import os
import pickle
import random
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import ray
from numpy.typing import NDArray

import flatweights as fw
from flatweights.ray import join

SIZE, ELEMENTS = 4, 3000
TIMEOUT = 1.0
_FAR = 1 << 40  # steps


class Training:
    """Momentum, with gradients that depend only on the weights, the rank and the step."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.weights = np.ones(ELEMENTS, np.float32)
        self.momentum = np.zeros(ELEMENTS)
        self.steps = np.zeros(1, np.int64)
        self._parts: tuple[NDArray[Any], ...] = (self.weights, self.momentum, self.steps)
        self.layout = fw.Layout.of(list(self._parts))

    def gather_into(self, buffer: NDArray[np.uint8]) -> None:
        for view, part in zip(self.layout.packed_views(buffer), self._parts, strict=True):
            view[...] = part

    def scatter(self, buffer: NDArray[np.uint8]) -> None:
        for view, part in zip(self.layout.packed_views(buffer), self._parts, strict=True):
            part[...] = view

    def gradient(self, rank: int) -> NDArray[np.float32]:
        rng = np.random.default_rng([self.seed, rank, int(self.steps[0])])
        return self.weights + rng.standard_normal(ELEMENTS, np.float32)

    def apply(self, mean: NDArray[Any]) -> None:
        self.momentum[:] = 0.9 * self.momentum + mean
        self.weights[:] = self.weights - 0.01 * self.momentum
        self.steps += 1

    def digest(self) -> bytes:
        digest = hashlib.blake2b(digest_size=8)
        for part in self._parts:
            digest.update(part.tobytes())
        return digest.digest()


class Seen(NamedTuple):
    """A member's note of one step: its number, its ranks, and all bits of the state."""

    steps: int
    used: tuple[int, ...]
    digest: bytes


@ray.remote(num_cpus=0, max_retries=0)  # type: ignore[untyped-decorator]
def train(name: str, rank: int, life: int, seed: int, folder: str) -> None:
    """Train until a file in ``folder`` names the last step."""
    beats = np.memmap(Path(folder, "beats"), np.int64)
    training = Training(seed)
    with (
        join(name, rank=rank, size=SIZE, timeout=120.0) as member,
        Path(folder, f"{rank}.{life}.log").open("xb", buffering=0) as log,
    ):
        beats[SIZE + 1 + rank] = os.getpid()
        while training.steps[0] < beats[SIZE]:
            result = member.average(
                {"g": training.gradient(rank)}, min_results=1, timeout=TIMEOUT, state=training
            )
            training.apply(result.weights["g"])
            seen = Seen(int(training.steps[0]), result.used, training.digest())
            log.write(pickle.dumps(tuple(seen)))
            if rank in result.used:
                beats[rank] = seen.steps
            time.sleep(0.002)
        member.average({"end": np.zeros(1)}, min_results=1, timeout=60.0)


class Run:
    """A training whose members are killed and stopped from outside."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed = folder, seed
        self.name = f"healing {folder}"
        self.beats = np.memmap(folder / "beats", np.int64, mode="w+", shape=(2 * SIZE + 1,))
        self.beats[SIZE] = _FAR
        self.lives = [0] * SIZE
        self.pids: list[int] = []
        self.refs = [self._start(rank) for rank in range(SIZE)]
        self.until_all_take_part()

    def _start(self, rank: int) -> Any:
        return train.remote(self.name, rank, self.lives[rank], self.seed, str(self.folder))

    def until_all_take_part(self) -> None:
        target, end = int(self.beats[:SIZE].max()) + 5, time.monotonic() + 120
        while self.beats[:SIZE].min() < target:
            ended, _ = ray.wait(self.refs, timeout=0)
            ray.get(ended)  # it was not killed
            assert time.monotonic() < end, f"a hang: {self.beats.tolist()}"
            time.sleep(0.005)

    def kill(self, rank: int) -> None:
        pid = int(self.beats[SIZE + 1 + rank])
        self.pids.append(pid)
        os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ray.exceptions.WorkerCrashedError):
            ray.get(self.refs[rank], timeout=60)
        self.lives[rank] += 1
        self.refs[rank] = self._start(rank)

    def stop(self, rank: int, seconds: float) -> None:
        pid = int(self.beats[SIZE + 1 + rank])
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            os.kill(pid, signal.SIGCONT)

    def fault(self, rng: random.Random) -> int:
        """Kill one or two members, or stop one and maybe kill another; return their number."""
        time.sleep(rng.random() * 0.05)
        first, second = rng.sample(range(SIZE), 2)
        what = rng.random()
        if what < 0.2:
            self.stop(first, TIMEOUT * rng.choice([0.2, 1.3]))
        else:
            self.kill(first)
            if what < 0.4:
                self.kill(second)
        self.until_all_take_part()
        return 2 if 0.2 <= what < 0.4 else 1

    def end(self) -> None:
        self.beats[SIZE] = self.beats[:SIZE].max() + 200
        ray.get(self.refs, timeout=120)

    def check(self) -> int:
        """Compare the states of all members after each step with the oracle; return the steps."""
        seen: dict[int, set[tuple[tuple[int, ...], bytes]]] = {}
        for path in self.folder.glob("*.log"):
            with path.open("rb") as log, contextlib.suppress(EOFError, pickle.UnpicklingError):
                while True:
                    one = Seen(*pickle.load(log))
                    seen.setdefault(one.steps, set()).add((one.used, one.digest))
        oracle = Training(self.seed)
        assert sorted(seen) == [*range(1, int(self.beats[SIZE]) + 1)], "a step is missing"
        for step in sorted(seen):
            assert len(seen[step]) == 1, f"step {step}: members differ"
            used, digest = next(iter(seen[step]))
            gradients = [oracle.gradient(rank) for rank in used]
            mean: Any = np.mean(gradients, axis=0, dtype=np.float64)
            oracle.apply(mean.astype(np.float32))
            assert oracle.digest() == digest, f"step {step} of {used}"
        return len(seen)
