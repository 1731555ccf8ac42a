"""Workers without TensorFlow, which start fast and misbehave when told to."""

import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from flatweights import FlatWeights, RunningAverage
from flatweights.ray import FlatWorker

POISON = 1e30
"""The weights of a worker until it is sent some: they would spoil every average."""


class PlainWorker(FlatWorker):
    """Weights ``{"w": ..., "n": ...}``; training adds a number that the rank decides."""

    def __init__(self, rank: int = 0, size: int = 5) -> None:
        self.rank, self.size = rank, size
        self.model = FlatWeights({"w": np.full(size, POISON), "n": np.int64(0)})
        self.calls = self.received = 0

    def build_anew(self) -> int:
        """Return to the state in which it was built, for the next test; return the process."""
        self.__init__(self.rank, self.size)  # type: ignore[misc]
        return self.pid()

    def get_weights(self) -> FlatWeights:
        return self.model.copy()

    def set_weights(self, new_weights: Mapping[str, Any], *, share: bool = False) -> None:
        unknown = set(new_weights) - set(self.model)
        if unknown:
            raise KeyError(f"unknown names: {unknown}")
        self.received += 1
        self.model = FlatWeights({**self.model, **new_weights})  # of any size

    def get_flat(self) -> NDArray[Any]:
        return np.concatenate([part.ravel() for part in self.model.values()])

    def set_flat(self, new_weights: Any, *, share: bool = False) -> None:
        self.model = FlatWeights({"w": new_weights[:-1], "n": np.int64(new_weights[-1])})

    def train(self, step: float = 1.0) -> FlatWeights:
        """Add ``step`` times the rank and one."""
        self.calls += 1
        self.model["w"] += step * (self.rank + 1)
        return self.get_weights()

    def train_counted(self, step: float = 1.0) -> tuple[FlatWeights, dict[str, Any]]:
        return self.train(step), {"samples": self.rank + 1, "calls": self.calls}

    def act(self, plan: Mapping[int, str], where: str = "", step: float = 1.0) -> Any:
        """Train, but misbehave as ``plan`` says for this rank: see the code."""
        action = plan.get(self.rank, "")
        if action == "die before":
            die()
        weights = self.train(step)
        if action == "die during":
            return Dying(weights)
        if action == "die after":
            threading.Thread(target=_die_once_told, args=(Path(where),), daemon=True).start()
        if action == "die once":
            first = Path(where) / "died"
            if not first.exists():
                first.touch()
                die()
        if action == "raise":
            raise ArithmeticError("diverged")
        if action == "nan":
            weights["w"][1] = np.nan
        if action == "other layout":
            return FlatWeights({"v": np.zeros(3)})
        if where and Path(where).is_dir():
            (Path(where) / f"{self.rank} trained").touch()
        if action == "hang":
            wait_for(Path(where) / "go on")
        if action == "interrupt":
            os.kill(int(where), signal.SIGINT)
            time.sleep(30)
        return weights

    def forget_calls(self) -> None:
        self.calls = self.received = 0

    def how_often_set(self) -> int:
        return self.received

    def how_often(self) -> int:
        return self.calls

    def pid(self) -> int:
        return os.getpid()

    def node(self) -> str:
        node: str = ray.get_runtime_context().get_node_id()
        return node


class Dying:
    """Kills the process that pickles it: an actor that is about to return it."""

    def __init__(self, weights: Any) -> None:
        self.weights = weights

    def __reduce__(self) -> Any:
        die()


def die() -> None:
    os._exit(1)


def _die_once_told(where: Path) -> None:
    wait_for(where / "die")
    die()


def wait_for(path: Path, timeout: float = 120) -> None:
    """Wait until the file exists."""
    end = time.monotonic() + timeout
    while not path.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"{path} does not exist after {timeout} s")
        time.sleep(0.01)


def weights_of(value: float, size: int = 5) -> FlatWeights:
    """The first weights."""
    return FlatWeights({"w": np.full(size, value), "n": np.int64(3)})


def trained(before: FlatWeights, rank: int, step: float = 1.0) -> FlatWeights:
    """The oracle of `PlainWorker.train`."""
    after = before.copy()
    after["w"] += step * (rank + 1)
    return after


def running(models: Sequence[Any], weights: Sequence[float] | None = None) -> RunningAverage:
    total = RunningAverage()
    total.add_all(models, weights)
    return total


def merged(models: Sequence[Any], groups: Any, weights: Sequence[float] | None = None) -> Any:
    """One running average for each group, merged: the order that is documented."""
    given = weights or [1.0] * len(models)
    total = RunningAverage()
    for group in groups:
        total.merge(running([models[k] for k in group], [given[k] for k in group]))
    return total.mean()
