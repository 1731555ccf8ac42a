"""Averaging the results of Ray actors, and actors whose weights travel as one buffer.

Imports Ray, and TensorFlow only where a `FlatWorker` is built.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray
from numpy.typing import ArrayLike, NDArray

from flatweights._average import Nonfinite, average_used, read_weights
from flatweights._weights import FlatWeights

__all__ = ["FlatWorker", "Round", "WorkerError", "average"]


class WorkerError(RuntimeError):
    """Some workers gave no result that could be averaged.

    Attributes:
        failed: By rank, what each of them raised.
    """

    def __init__(self, failed: Mapping[int, Exception]) -> None:
        """Say which ranks failed, and why."""
        self.failed = dict(failed)
        reasons = [f"rank {rank}: {_reason(error)}" for rank, error in self.failed.items()]
        super().__init__("\n".join(reasons))  # Ray's own errors have several lines

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by what the constructor takes."""
        return type(self), (self.failed,)


class Round:
    """The average of one round.

    Attributes:
        weights: The average, of the kind that the workers returned.
        used: The ranks that it was taken over, in the order in which they were added; the
            others were left out by ``nonfinite="skip"``.
    """

    def __init__(self, weights: Any, used: Sequence[int]) -> None:
        """Hold the average of the ranks in ``used``."""
        self.weights = weights
        self.used = tuple(used)
        self._ref: Any = None

    @property
    def ref(self) -> Any:
        """The average in the object store: put there on first use, once."""
        if self._ref is None:
            self._ref = ray.put(self.weights)
        return self._ref


def average(
    refs: Iterable[Any],
    weights: Iterable[float] | None = None,
    *,
    out: Any = None,
    nonfinite: Nonfinite = "raise",
) -> Round:
    """Average what ``refs`` refer to, in one pass over shared memory.

    Results are read where they lie in the object store and not copied. They are added in
    the order of ``refs``, whatever the order in which they arrive, so the bits are those of
    `flatweights.average`. It replaces, in a driver,
    ``{k: sum(w[k] for w in ray.get(refs)) / n for k in ...}``.

    >>> import numpy as np
    >>> _ = ray.init(num_cpus=1, log_to_driver=False, ignore_reinit_error=True)
    >>> refs = [ray.put(np.array([1.0, 2.0])), ray.put(np.array([3.0, 6.0]))]
    >>> average(refs).weights
    array([2., 4.])

    Args:
        refs: One reference per rank, each to an array, `FlatWeights`, a dict or a list of
            arrays; of one kind, with equal shapes and dtypes.
        weights: One weight per rank, such as the number of samples it saw.
        out: Where to write; see `flatweights.average`. A buffer given to each round in
            turn spares its allocation, once the last `Round.ref` has been made.
        nonfinite: What to do about NaN and infinity; see `flatweights.average`. Errors
            name the rank as the source.

    Returns:
        The average, and which ranks it is of.

    Raises:
        WorkerError: If a rank failed: at once, with all that had failed by then. Those
            still running are left to run.
        TypeError: If ``refs`` holds anything but references; else as `flatweights.average`.
        ValueError: If there is no reference; else as `flatweights.average`. Weights are
            checked before any result is waited for.
    """
    ranks = _references(refs)
    given = read_weights(weights, len(ranks))
    mean, used = average_used(_get(ranks), given, out=out, nonfinite=nonfinite)
    return Round(mean, used)


def _references(refs: Iterable[Any]) -> list[Any]:
    if not isinstance(refs, Iterable):
        raise TypeError(f"refs: expected a list of references, got {type(refs).__name__}")
    ranks = list(refs)
    if not ranks:
        raise ValueError("expected at least one reference, got none")
    for rank, ref in enumerate(ranks):
        if not isinstance(ref, ray.ObjectRef):
            raise TypeError(
                f"rank {rank}: expected a ray.ObjectRef, got {type(ref).__name__}; "
                "flatweights.average takes the values themselves"
            )
    return ranks


def _get(ranks: list[Any]) -> list[Any]:
    try:
        return list(ray.get(ranks))
    except ray.exceptions.RayError as error:
        # The frames of its traceback hold results of other ranks.
        first = error.with_traceback(None)
    # That was the first failure alone, and without its rank.
    failures = [(rank, _failure(ref)) for rank, ref in enumerate(ranks)]
    failed = {rank: error for rank, error in failures if error is not None}
    if not failed:
        raise first
    raise WorkerError(failed) from next(iter(failed.values()))


def _failure(ref: Any) -> Exception | None:
    try:
        ray.get(ref, timeout=0)
    except ray.exceptions.RayError as error:
        # A worker's own GetTimeoutError comes as a subclass.
        running = type(error) is ray.exceptions.GetTimeoutError
        return None if running else error
    return None


def _reason(error: Exception) -> str:
    cause = getattr(error, "cause", None)  # what a RayTaskError was raised from
    shown = cause if isinstance(cause, Exception) else error
    return f"{type(shown).__name__}: {shown}"


class FlatWorker:
    """Base of an actor class: a model built in the actor, its weights moved as one buffer.

    Write `build`, and methods that train; make it an actor with `ray.remote`. The
    constructor takes what `build` takes. Weights leave and enter as `FlatWeights` or a vector:
    one buffer in the object store, which every process of the node reads in place.

        @ray.remote
        class Worker(FlatWorker):
            def build(self):
                import keras

                self.model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
                self.model.compile("sgd", "mse")
                return self.model

            def train(self, x, y):
                self.model.fit(x, y, verbose=0)
                return self.get_weights()

        workers = [Worker.remote() for _ in range(4)]
        mean = average([w.train.remote(x, y) for w in workers])
        ray.get([w.set_weights.remote(mean.ref) for w in workers])

    Attributes:
        variables: The `TensorFlowVariables` of what `build` returned.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Build the model; arguments go to `build`.

        Raises:
            NotImplementedError: If `build` is not defined.
            TypeError: If `build` returns nothing; else as `TensorFlowVariables`.
        """
        built = self.build(*args, **kwargs)
        if built is None:
            raise TypeError(f"{type(self).__name__}.build() returned None: return the model")
        # Not before build(), which may set environment variables that TensorFlow reads.
        from flatweights.tensorflow import TensorFlowVariables

        self.variables = (
            built if isinstance(built, TensorFlowVariables) else TensorFlowVariables(built)
        )

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Build the model, and import TensorFlow for it here; written by the user.

        Returns:
            Whatever `TensorFlowVariables` takes as ``output``, or a `TensorFlowVariables`:
            in a graph, one with its session.
        """
        raise NotImplementedError(f"{type(self).__name__} must define build()")

    def get_weights(self) -> FlatWeights:
        """Return the weights by name; see `TensorFlowVariables.get_weights`."""
        return self.variables.get_weights()

    def set_weights(self, new_weights: Mapping[str, ArrayLike]) -> None:
        """Set weights by name; see `TensorFlowVariables.set_weights`."""
        self.variables.set_weights(new_weights)

    def get_flat(self) -> NDArray[Any]:
        """Return the weights as one vector; see `TensorFlowVariables.get_flat`."""
        return self.variables.get_flat()

    def set_flat(self, new_weights: ArrayLike) -> None:
        """Set all weights from one vector; see `TensorFlowVariables.set_flat`."""
        self.variables.set_flat(new_weights)
