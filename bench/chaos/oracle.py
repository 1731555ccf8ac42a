"""Logs of the models that processes send and get, and an oracle in NumPy.

Nothing here calls flatweights. Weights are multiples of 1/1024 below 256, so sums in float64 are
exact in any order: there is one right average, bit for bit. A model is computed from a key, such as
the seed, the rank and the number of the step. So a log holds keys and digests, and the oracle
computes the models again.
"""

import faulthandler
import functools
import hashlib
import os
import pickle
import signal
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Model = dict[str, NDArray[Any]]
BEGUN = "begun"
"""The first note of each process."""
FULL = "full"
"""The file whose time is that of the last step that all ranks were in."""
_SPAN = 1 << 17  # elements of the table that noise is cut from


@functools.lru_cache(1)
def _table(seed: int) -> NDArray[np.float32]:
    draws = np.random.default_rng(seed).integers(-(1 << 14), 1 << 14, 2 * _SPAN)
    return (draws / 1024).astype(np.float32)


def noise(size: int, seed: int, *key: int) -> NDArray[np.float32]:
    """Return multiples of 1/1024 below 48, which differ for each key."""
    mixed = zlib.crc32(repr(key).encode())
    begin = mixed % (2 * _SPAN - size)
    cut: NDArray[np.float32] = _table(seed)[begin : begin + size] + np.float32(mixed >> 27)
    return cut


def model_of(size: int, seed: int, *key: int) -> Model:
    """Return the model of a key: float32 in two parts, and an integer."""
    values = noise(size, seed, *key)
    return {"kernel": values[3:], "bias": values[:3], "n": np.array(3)}


def trained(before: Mapping[str, Any], seed: int, *key: int) -> Model:
    """Return the result of a worker's training from ``before``: half of it, plus noise."""
    size = before["kernel"].size + 3
    after = model_of(size, seed, *key)
    for name in ("kernel", "bias"):
        after[name] = np.rint(before[name] * np.float32(512)) / np.float32(1024) + after[name]
    return after


def mean_of(models: Sequence[Model], weights: Sequence[float] | None = None) -> Model:
    """Return the average in float64, rounded to the dtype; integers come from the first model."""
    factors = [1.0] * len(models) if weights is None else weights
    mean = dict(models[0])
    for name, part in mean.items():
        if part.dtype.kind == "f":
            total = np.zeros(part.shape)
            for model, factor in zip(models, factors, strict=True):
                total += factor * model[name].astype(np.float64)
            mean[name] = (total / sum(factors)).astype(part.dtype)
    return mean


def digest_of(model: Mapping[str, Any]) -> bytes:
    """Return 8 bytes that differ if a bit does."""
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(model):
        digest.update(np.ascontiguousarray(model[name]).data)
    return digest.digest()


class Sent(NamedTuple):
    """A model that a process is about to send.

    Attributes:
        rank: The rank of the process.
        life: The number of processes that had this rank before.
        at: The time.
        key: The key that the model is computed from.
        digest: The digest of the model; or the model itself, if it has no key.
    """

    rank: int
    life: int
    at: float
    key: tuple[int, ...]
    digest: bytes


class Got(NamedTuple):
    """A result that a process got: a step.

    Attributes:
        rank: The rank of the process; -1 is the driver.
        life: The number of processes that had this rank before.
        at: The time.
        number: The number of the step, within ``group``.
        used: The ranks in it.
        expected: The ranks that could have been in it.
        digest: The digest of the average, or of the weights that were read.
        key: The key of the model that this process sent for it.
        group: The series that ``number`` belongs to.
        is_late: Whether this process was too late for it.
    """

    rank: int
    life: int
    at: float
    number: int
    used: tuple[int, ...]
    expected: tuple[int, ...]
    digest: bytes
    key: tuple[int, ...] = ()
    group: str = ""
    is_late: bool = False


class Note(NamedTuple):
    """Another event; the text begins with "wrong" if it must not happen."""

    rank: int
    at: float
    text: str


Entry = Sent | Got | Note


class Log:
    """The notes of one process, and its orders.

    Attributes:
        rank: The rank of the process.
        life: The number of processes that had this rank before.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        """Begin a log; from now on, the process can be found by its rank."""
        self.rank = rank
        self.life = sum(1 for _ in folder.glob(f"{rank}.*.log"))
        self._folder = folder
        self._order = folder / f"{rank}.order"
        self._file = folder.joinpath(f"{rank}.{self.life}.log").open("xb", buffering=0)
        self._stacks = folder.joinpath(f"{rank}.{self.life}.stacks").open("w")
        if rank >= 0:
            faulthandler.register(signal.SIGUSR1, self._stacks)
        folder.joinpath(f"{rank}.pid").write_text(str(os.getpid()))
        self.note(BEGUN)

    def sent(self, key: tuple[int, ...], model: Mapping[str, Any] | bytes) -> None:
        """Note a model that is about to be sent."""
        digest = model if isinstance(model, bytes) else digest_of(model)
        self._write(Sent(self.rank, self.life, time.monotonic(), key, digest))

    def got(
        self,
        number: int,
        used: Sequence[int],
        expected: Sequence[int],
        model: Mapping[str, Any] | bytes,
        key: tuple[int, ...] = (),
        group: str = "",
        is_late: bool = False,
    ) -> None:
        """Note a received result; see `Got`."""
        digest = model if isinstance(model, bytes) else digest_of(model)
        at, ranks = time.monotonic(), tuple(used)
        for rank in ranks:
            self._folder.joinpath(f"{rank}.seen").touch()
        if set(ranks).issuperset(expected):
            self._folder.joinpath(FULL).touch()
        entry = (number, ranks, tuple(expected), digest, key, group, is_late)
        self._write(Got(self.rank, self.life, at, *entry))

    def note(self, text: str) -> None:
        """Note anything else."""
        self._write(Note(self.rank, time.monotonic(), text))

    def order(self) -> str:
        """Return the order of this process, once; usually, there is none."""
        try:
            text = self._order.read_text()
            self._order.unlink()
        except FileNotFoundError:
            return ""
        return text

    def close(self) -> None:
        """End the log."""
        self._file.close()
        self._stacks.close()

    def _write(self, entry: Entry) -> None:
        self._file.write(pickle.dumps(entry))


def read_logs(folder: Path) -> Iterator[Entry]:
    """Yield the entries of all processes; the last entry of a killed process may be cut off."""
    for path in sorted(folder.glob("*.log")):
        with path.open("rb") as log:
            while True:
                try:
                    yield pickle.load(log)
                except (EOFError, pickle.UnpicklingError):
                    break
