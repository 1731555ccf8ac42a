"""What one round's exchange costs: as one buffer, and as the dict of arrays of Ray's guide."""

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import ray
from numpy.typing import NDArray

from flatweights.demo._dict_loop import assign_variables, mean, read_tensors
from flatweights.ray import FlatWorker, average

Arrays = dict[str, NDArray[Any]]


class ComparedWorker(FlatWorker):
    """A worker whose weights can also be had, and set, as a dict with one array per variable."""

    def get_dict(self) -> Arrays:
        """Return the weights as Ray's guide does: one read for each variable."""
        weights = self.variables
        if weights.sess is not None:
            return dict(weights.sess.run(dict(weights.variables)))
        return read_tensors(weights.variables)

    def set_dict(self, arrays: Arrays) -> None:
        """Set the weights as Ray's guide does: one assignment for each variable."""
        weights = self.variables
        if weights.sess is None:
            assign_variables(weights.variables, arrays)
            return
        feeds = {weights.placeholders[name]: array for name, array in arrays.items()}
        weights.sess.run([weights.assignment_nodes[name] for name in arrays], feeds)


class Seconds(NamedTuple):
    """Time of one round's exchange: get, average, put and set, without any training.

    Attributes:
        flat: As one buffer.
        dicts: As a dict of arrays.
    """

    flat: float
    dicts: float

    def __str__(self) -> str:
        return (
            f"exchange per round: {1e3 * self.flat:.1f} ms as one buffer, "
            f"{1e3 * self.dicts:.1f} ms as a dict of arrays ({self.dicts / self.flat:.1f} times)"
        )


def time_exchange(workers: Sequence[Any], rounds: int = 7) -> Seconds:
    """Return the median times of ``rounds`` rounds of either kind, taken in turn.

    Afterwards all workers have the average of the weights that they had.

    Args:
        workers: Actors of a `ComparedWorker` class.
        rounds: How many to time, after one of each that is not.
    """
    ways: dict[Callable[[Sequence[Any]], None], list[float]] = {
        _exchange_flat: [],
        _exchange_dicts: [],
    }
    for _ in range(rounds + 1):
        for way, seconds in ways.items():
            begin = perf_counter()
            way(workers)
            seconds.append(perf_counter() - begin)
    return Seconds(*(median(seconds[1:]) for seconds in ways.values()))


def _exchange_flat(workers: Sequence[Any]) -> None:
    found = average([worker.get_weights.remote() for worker in workers])
    ray.get([worker.set_weights.remote(found.ref) for worker in workers])


def _exchange_dicts(workers: Sequence[Any]) -> None:
    found = ray.get([worker.get_dict.remote() for worker in workers])
    # An integer, such as a counter, must not become a fraction: TensorFlow would refuse it.
    means = {k: np.asarray(v, found[0][k].dtype) for k, v in mean(found, None).items()}
    ref = ray.put(means)
    ray.get([worker.set_dict.remote(ref) for worker in workers])
