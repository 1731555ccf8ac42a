"""The driver's side of a round, both ways."""

from collections.abc import Sequence
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import ray

from flatweights import FlatWeights
from flatweights.demo import _dict_loop
from flatweights.demo._worker import Received, Way, Worked
from flatweights.ray import Round, WorkerError, average


class Times(NamedTuple):
    """Seconds of one round, which add up to its wall time.

    Of what runs in the workers, the slowest one's.

    Attributes:
        compute: Training.
        gather: From TensorFlow's variables to what is sent.
        average: Reading the results from the object store, and their mean.
        put: The mean to the object store.
        scatter: From what was received to TensorFlow's variables.
        ray: The rest: calls, the workers' results to the object store, waiting.
    """

    compute: float
    gather: float
    average: float
    put: float
    scatter: float
    ray: float


class Loop(Protocol):
    """How the driver averages."""

    way: Way

    def average(self, refs: list[Any]) -> Any:
        """Return the mean of what ``refs`` refer to."""

    def put(self) -> Any:
        """Return a reference to the mean."""


class FlatLoop:
    """`flatweights.ray.average`, into one buffer that is used again every round."""

    way: Way = "flat"

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._round: Round | None = None

    def average(self, refs: list[Any]) -> Any:
        """Return the mean of what ``refs`` refer to."""
        out = self._round.weights if self._round else None
        self._round = average(refs, self._sizes, out=out)
        return self._round.weights

    def put(self) -> Any:
        """Return a reference to the mean."""
        assert self._round is not None
        return self._round.ref


class DictLoop:
    """The guide's comprehension."""

    way: Way = "dict"

    def __init__(self, sizes: Sequence[int]) -> None:
        equal = min(sizes) == max(sizes)
        self._shares = None if equal else [size / sum(sizes) for size in sizes]
        self._mean: _dict_loop.Weights = {}

    def average(self, refs: list[Any]) -> Any:
        """Return the mean of what ``refs`` refer to."""
        self._mean = _dict_loop.mean(get_all(refs), self._shares)
        return self._mean

    def put(self) -> Any:
        """Return a reference to the mean."""
        return ray.put(self._mean)


def run_round(actors: list[Any], loop: Loop) -> tuple[Any, Times]:
    """Train, average, and let every actor take over the average.

    Returns:
        The average, and the time it all took.

    Raises:
        WorkerError: If an actor failed.
    """
    start = perf_counter()
    results = [actor.work.options(num_returns=2).remote(loop.way) for actor in actors]
    refs = [sent for sent, _ in results]
    ray.wait(refs, num_returns=len(refs))  # or the slowest worker's time would be the average's

    arrived = perf_counter()
    mean = loop.average(refs)
    averaged = perf_counter()
    ref = loop.put()
    put = perf_counter()

    received = [actor.receive.remote(loop.way, ref) for actor in actors]
    after: Received = max(get_all(received), key=sum)
    wall = perf_counter() - start
    before: Worked = max(get_all([worked for _, worked in results]), key=sum)

    parts = {
        "compute": before.compute + after.compute,
        "gather": before.gather,
        "average": averaged - arrived,
        "put": put - averaged,
        "scatter": after.scatter,
    }
    return mean, Times(**parts, ray=wall - sum(parts.values()))


def get_all(refs: list[Any]) -> list[Any]:
    """Return the results by rank.

    Raises:
        WorkerError: If a rank failed; `ray.get` of a list would not say which.
    """
    results = []
    failed = {}
    for rank, ref in enumerate(refs):
        try:
            results.append(ray.get(ref))
        except ray.exceptions.RayError as error:
            failed[rank] = error
    if failed:
        raise WorkerError(failed)
    return results


def exchanged(mean: Any) -> tuple[int, int]:
    """Return the bytes and the number of arrays that one such message consists of."""
    if isinstance(mean, FlatWeights):
        return mean.buffer.nbytes, 1
    if isinstance(mean, dict):
        return sum(array.nbytes for array in mean.values()), len(mean)
    return mean.nbytes, 1
