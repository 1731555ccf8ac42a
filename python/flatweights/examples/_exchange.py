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


def read_dict(weights: Any) -> Arrays:
    """Return the weights of a `TensorFlowVariables` as Ray's guide does: one read for each."""
    if weights.sess is not None:
        return dict(weights.sess.run(dict(weights.variables)))
    return read_tensors(weights.variables)


def assign_dict(weights: Any, arrays: Arrays) -> None:
    """Set the weights of a `TensorFlowVariables` as Ray's guide does: one assignment for each."""
    if weights.sess is None:
        assign_variables(weights.variables, arrays)
        return
    feeds = {weights.placeholders[name]: array for name, array in arrays.items()}
    weights.sess.run([weights.assignment_nodes[name] for name in arrays], feeds)


class ComparedWorker(FlatWorker):
    """A worker whose weights can also be had, and set, as a dict with one array per variable."""

    def get_dict(self) -> Arrays:
        """Return the weights as Ray's guide does: one read for each variable."""
        return read_dict(self.variables)

    def set_dict(self, arrays: Arrays) -> None:
        """Set the weights as Ray's guide does: one assignment for each variable."""
        assign_dict(self.variables, arrays)

    def pass_flat(self, weights: NDArray[Any]) -> NDArray[Any]:
        """Set the weights, and return a vector as long as that of the gradients."""
        self.set_flat(weights)
        return self.get_flat()

    def pass_dict(self, arrays: Arrays) -> Arrays:
        """Set the weights, and return a dict of arrays as large as those of the gradients."""
        self.set_dict(arrays)
        return self.get_dict()


class Seconds(NamedTuple):
    """Time of one round's exchange: get, average, put and set, without any computation.

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
    return compare(lambda: _exchange_flat(workers), lambda: _exchange_dicts(workers), rounds)


def time_gradients(workers: Sequence[Any], weights: Any, rounds: int = 7) -> Seconds:
    """As `time_exchange`, for weights that go to the workers and gradients that come back.

    The workers return weights in the place of gradients, of the same shapes: what takes
    its time is the exchange alone.

    Args:
        workers: Actors of a `ComparedWorker` class.
        weights: The `TensorFlowVariables` of the same model in the driver.
        rounds: How many to time, after one of each that is not.
    """
    return compare(
        lambda: _pass_flat(workers, weights), lambda: _pass_dicts(workers, weights), rounds
    )


def compare(flat: Callable[[], None], dicts: Callable[[], None], rounds: int = 7) -> Seconds:
    """Return the median times of ``rounds`` calls of each, taken in turn, after one that is not."""
    seconds: dict[Callable[[], None], list[float]] = {flat: [], dicts: []}
    for _ in range(rounds + 1):
        for exchange, times in seconds.items():
            begin = perf_counter()
            exchange()
            times.append(perf_counter() - begin)
    return Seconds(*(median(times[1:]) for times in seconds.values()))


def _exchange_flat(workers: Sequence[Any]) -> None:
    found = average([worker.get_weights.remote() for worker in workers])
    ray.get([worker.set_weights.remote(found.ref) for worker in workers])


def _exchange_dicts(workers: Sequence[Any]) -> None:
    ref = ray.put(_mean_of_dicts(ray.get([worker.get_dict.remote() for worker in workers])))
    ray.get([worker.set_dict.remote(ref) for worker in workers])


def _pass_flat(workers: Sequence[Any], weights: Any) -> None:
    ref = ray.put(weights.get_flat())
    weights.set_flat(average([worker.pass_flat.remote(ref) for worker in workers]).weights)


def _pass_dicts(workers: Sequence[Any], weights: Any) -> None:
    ref = ray.put(read_dict(weights))
    found = ray.get([worker.pass_dict.remote(ref) for worker in workers])
    assign_dict(weights, _mean_of_dicts(found))


def _mean_of_dicts(found: Sequence[Arrays]) -> Arrays:
    # An integer, such as a counter, must not become a fraction: TensorFlow would refuse it.
    return {k: np.asarray(v, found[0][k].dtype) for k, v in mean(found, None).items()}
