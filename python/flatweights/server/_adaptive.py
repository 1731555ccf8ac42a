"""FedAdagrad, FedAdam and FedYogi: steps that adapt to each number."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatweights._inplace import Model
from flatweights.server._optimizer import AveragedOptimizer, Hyperparameter, fraction, positive
from flatweights.server._state import MASTER, Run

_FIRST = "momentum"
_SECOND = "second"

# Below, the squares of float32 would be lost, and 0 / 0 would be near.
_LEAST_TAU = 1e-15


class _Adaptive(AveragedOptimizer[Model]):
    """A step of Algorithm 2 of Reddi et al.; see the classes."""

    learning_rate = positive()
    beta1 = fraction(fixed=True)
    tau = Hyperparameter(
        f"a number from {_LEAST_TAU} to 1e6", lambda value: _LEAST_TAU <= value <= 1e6, fixed=True
    )

    @classmethod
    def _kept(cls, numbers: Mapping[str, float]) -> tuple[str, ...]:
        return (MASTER, _FIRST, _SECOND) if numbers["beta1"] else (MASTER, _SECOND)

    def _first(self, name: str) -> float:
        return self.tau**2 if name == _SECOND else 0.0

    @abstractmethod
    def _accumulate(
        self, second: NDArray[Any], square: NDArray[Any], scratch: NDArray[Any]
    ) -> None:
        """Take ``square`` into the second moment; both others may be overwritten."""

    def _advance(self, pairs: list[tuple[Run, NDArray[Any]]]) -> None:
        for run, average in pairs:
            self._advance_run(run, average)

    def _advance_run(self, run: Run, average: NDArray[Any]) -> None:
        first_share, rate, tau = 1 - self.beta1, self.learning_rate, self.tau
        third = None if _FIRST in run.kept else run.scratch()
        scratches = run.scratch(), run.scratch()
        for block in run.blocks():
            size = block.stop - block.start
            weights, second = run.wide[block], run.kept[_SECOND][block]
            square, other = (scratch[:size] for scratch in scratches)
            delta = run.subtract(square if third is None else third, average, block, other)
            if third is None:
                first = run.kept[_FIRST][block]
                np.subtract(delta, first, out=other)
                np.multiply(other, first_share, out=other)
                np.add(first, other, out=first)
            else:
                first = delta
            np.multiply(delta, delta, out=square)
            self._accumulate(second, square, other)
            np.sqrt(second, out=square)
            np.add(square, tau, out=square)
            np.divide(first, square, out=square)
            np.multiply(square, rate, out=square)
            np.add(weights, square, out=weights)
            run.publish(block)


class FedAdagrad(_Adaptive[Model]):
    """Adagrad on the server: ``v += delta**2; weights += learning_rate * m / (sqrt(v) + tau)``.

    ``delta`` is the average minus the weights, and ``m = beta1 * m + (1 - beta1) * delta``.
    Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 2, after Duchi, Hazan
    and Singer, JMLR 12, 2011. As there, ``v`` begins with ``tau**2``, and nothing corrects the
    bias of the first steps.

    Beside the weights ``v`` is kept, and ``m`` unless ``beta1`` is 0. A step over float32
    reads average and weights once to check them, then reads four vectors and writes three, in
    blocks that stay in the cache: 36 bytes per number, 28 without ``m``.

    >>> optimizer = FedAdagrad(np.zeros(1), learning_rate=0.1)
    >>> [round(float(optimizer.step(np.array([1.0]))[0]), 3) for _ in range(3)]
    [0.1, 0.167, 0.219]

    Attributes:
        learning_rate: Of the server; it may be set between steps.
        beta1: Fixed.
        tau: Fixed.
    """

    def __init__(
        self,
        initial: Model,
        *,
        learning_rate: float = 0.01,
        beta1: float = 0.0,
        tau: float = 1e-3,
    ) -> None:
        """Start from a model.

        Args:
            initial: `FlatWeights` or an array; it is copied.
            learning_rate: Of the server, in units of the weights: positive.
            beta1: From 0 to below 1: how much of ``m`` a step keeps.
            tau: From 1e-15 to 1e6, in units of the weights: how small a difference counts
                as small. The larger, the less does a step adapt.

        Raises:
            TypeError: If ``initial`` is neither, or a part has no mean; or an argument is
                no real number.
            ValueError: If ``initial`` holds NaN or infinity, or an argument is out of range.
        """
        self._begin(initial, {"learning_rate": learning_rate, "beta1": beta1, "tau": tau})

    def _accumulate(
        self, second: NDArray[Any], square: NDArray[Any], scratch: NDArray[Any]
    ) -> None:
        np.add(second, square, out=second)


class _WithBeta2(_Adaptive[Model]):
    """What forgets old squares at the rate ``beta2``."""

    beta2 = fraction()

    def __init__(
        self,
        initial: Model,
        *,
        learning_rate: float = 0.01,
        beta1: float = 0.9,
        beta2: float = 0.99,
        tau: float = 1e-3,
    ) -> None:
        """Start from a model.

        Args:
            initial: `FlatWeights` or an array; it is copied.
            learning_rate: Of the server, in units of the weights: positive.
            beta1: From 0 to below 1: how much of ``m`` a step keeps.
            beta2: From 0 to below 1: how much of ``v`` a step keeps.
            tau: From 1e-15 to 1e6, in units of the weights: how small a difference counts
                as small. The larger, the less does a step adapt.

        Raises:
            TypeError: If ``initial`` is neither, or a part has no mean; or an argument is
                no real number.
            ValueError: If ``initial`` holds NaN or infinity, or an argument is out of range.
        """
        numbers = {"learning_rate": learning_rate, "beta1": beta1, "beta2": beta2, "tau": tau}
        self._begin(initial, numbers)


class FedAdam(_WithBeta2[Model]):
    """Adam on the server: ``v = beta2 * v + (1 - beta2) * delta**2``, and else as `FedAdagrad`.

    Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 2, after Kingma and
    Ba, ICLR 2015. As there, ``v`` begins with ``tau**2``, and nothing corrects the bias of
    the first steps.

    Beside the weights ``m`` and ``v`` are kept. A step over float32 moves 36 bytes per number.

    >>> optimizer = FedAdam(np.zeros(1), learning_rate=0.1)
    >>> [round(float(optimizer.step(np.array([1.0]))[0]), 3) for _ in range(3)]
    [0.099, 0.232, 0.386]

    Attributes:
        learning_rate: Of the server; it may be set between steps.
        beta1: Fixed.
        beta2: It may be set between steps.
        tau: Fixed.
    """

    def _accumulate(
        self, second: NDArray[Any], square: NDArray[Any], scratch: NDArray[Any]
    ) -> None:
        np.subtract(square, second, out=square)
        np.multiply(square, 1 - self.beta2, out=square)
        np.add(second, square, out=second)


class FedYogi(_WithBeta2[Model]):
    """Yogi on the server: as `FedAdam`, but ``v`` changes by what the square is, not by how far.

    ``v -= (1 - beta2) * delta**2 * sign(v - delta**2)``. Reddi et al., "Adaptive Federated
    Optimization", ICLR 2021, Algorithm 2, after Zaheer et al., "Adaptive Methods for Nonconvex
    Optimization", NeurIPS 2018. ``v`` begins with ``tau**2``; nothing corrects the bias.

    Beside the weights ``m`` and ``v`` are kept. A step over float32 moves 36 bytes per number.

    >>> optimizer = FedYogi(np.zeros(1), learning_rate=0.1)
    >>> [round(float(optimizer.step(np.array([1.0]))[0]), 3) for _ in range(3)]
    [0.099, 0.232, 0.385]

    Attributes:
        learning_rate: Of the server; it may be set between steps.
        beta1: Fixed.
        beta2: It may be set between steps.
        tau: Fixed.
    """

    def _accumulate(
        self, second: NDArray[Any], square: NDArray[Any], scratch: NDArray[Any]
    ) -> None:
        np.subtract(second, square, out=scratch)
        np.multiply(square, 1 - self.beta2, out=square)
        if not scratch.all():
            square[scratch == 0] = 0  # whose sign is 0
        # The sign by its bit: `numpy.sign` and `numpy.copysign` take as long as all the rest.
        width = scratch.dtype.itemsize
        signs, bits = scratch.view(f"u{width}"), square.view(f"u{width}")
        np.bitwise_and(signs, 1 << (8 * width - 1), out=signs)
        np.bitwise_or(bits, signs, out=bits)
        np.subtract(second, square, out=second)
