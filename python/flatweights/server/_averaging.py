"""FedAvg, FedAvgM and ExponentialMovingAverage: averaging, plain, with momentum and smoothed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from flatweights._core import move_parts
from flatweights._inplace import Model, axpy_, lerp_
from flatweights.server._optimizer import AveragedOptimizer, Hyperparameter, fraction, positive
from flatweights.server._state import MOMENTUM, Run


class FedAvg(AveragedOptimizer[Model]):
    """Plain averaging: the model becomes the average, to the bit.

    McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized
    Data", AISTATS 2017. Each number of the average is read twice and written once.

    >>> optimizer = FedAvg(np.zeros(2))
    >>> optimizer.step(np.array([1.0, 3.0]))
    array([1., 3.])
    """

    def __init__(self, initial: Model) -> None:
        """Start from a model.

        Args:
            initial: `FlatWeights` or an array; it is copied.

        Raises:
            TypeError: If it is neither, or has a dtype that `flatweights.average` refuses.
            ValueError: If it holds NaN or infinity.
        """
        self._begin(initial, {})

    @classmethod
    def _kept(cls, numbers: Mapping[str, float]) -> tuple[str, ...]:
        return ()

    def _check(self, average: Any) -> None:
        self._check_finite(average, "average")

    def _advance(self, pairs: list[tuple[Run, NDArray[Any]]]) -> None:
        move_parts([run.weights for run, _ in pairs], [average for _, average in pairs])


class FedAvgM(AveragedOptimizer[Model]):
    """Averaging with momentum: ``v = momentum * v + delta; weights += learning_rate * v``.

    ``delta`` is the average minus the weights. Hsu, Qi and Brown, "Measuring the Effects of
    Non-Identical Data Distribution for Federated Visual Classification", 2019. With momentum 0
    and learning rate 1 the model becomes the average, to the bit, as in `FedAvg`.

    With momentum, the optimizer keeps one vector beside the weights. A step over float32 reads
    average and weights once to check them, then reads three vectors and writes two: 28 bytes per
    number.

    >>> optimizer = FedAvgM(np.zeros(1), momentum=0.5)
    >>> [float(optimizer.step(np.array([average]))[0]) for average in (1.0, 2.0, 2.0)]
    [1.0, 2.5, 2.75]

    Attributes:
        learning_rate: The server's; it may be set between steps.
        momentum: It cannot be set later.
    """

    learning_rate = positive()
    momentum = fraction(fixed=True)
    _vectors: ClassVar = {MOMENTUM: "momentum"}

    def __init__(
        self, initial: Model, *, momentum: float = 0.9, learning_rate: float = 1.0
    ) -> None:
        """Start from a model.

        Args:
            initial: `FlatWeights` or an array; it is copied.
            momentum: From 0 to below 1: the share of the velocity that a step keeps.
            learning_rate: The server's: positive.

        Raises:
            TypeError: If ``initial`` is neither, or has a dtype that `flatweights.average` refuses;
                or an argument is no real number.
            ValueError: If ``initial`` holds NaN or infinity, or an argument is out of range.
        """
        self._begin(initial, {"momentum": momentum, "learning_rate": learning_rate})

    def _advance(self, pairs: list[tuple[Run, NDArray[Any]]]) -> None:
        momentum, rate = self.momentum, self.learning_rate
        for run, average in pairs:
            if momentum:
                _follow(run, average, momentum, rate)
            elif rate == 1:
                targets = [run.weights, run.wide] if run.has_master else [run.weights]
                move_parts(targets, [average] * len(targets))
            elif run.has_master:
                for block, numbers, before in run.blocks(average, run.weights):
                    np.subtract(numbers, before, out=numbers)
                    axpy_(run.wide[block], rate, numbers)
            else:
                lerp_(run.weights, average, rate)


class ExponentialMovingAverage(AveragedOptimizer[Model]):
    """Smoothed averages: ``weights = decay * weights + (1 - decay) * average``.

    This is the teacher of Tarvainen and Valpola, "Mean Teachers Are Better Role Models", NeurIPS
    2017. If ``decay`` is set to ``t / (t + 1)`` before each step t = 0, 1, ..., the model is the
    mean of all averages so far: Polyak and Juditsky, "Acceleration of Stochastic Approximation by
    Averaging", SIAM J. Control Optim. 30(4), 1992, and Ruppert, 1988.

    16-bit parts have a master copy, because rounding would lose their small steps; the optimizer
    keeps no other vector. A step is one pass that checks the average, and one of
    `flatweights.lerp_`.

    >>> optimizer = ExponentialMovingAverage(np.zeros(2), decay=0.75)
    >>> optimizer.step(np.array([4.0, 8.0]))
    array([1., 2.])

    Attributes:
        decay: It may be set between steps.
    """

    decay = Hyperparameter("a number from 0 to 1", lambda value: 0 <= value <= 1)

    def __init__(self, initial: Model, *, decay: float = 0.999) -> None:
        """Start from a model.

        Args:
            initial: `FlatWeights` or an array; it is copied.
            decay: From 0 to 1: the share of the model that a step keeps.

        Raises:
            TypeError: If ``initial`` is neither, or has a dtype that `flatweights.average` refuses;
                or ``decay`` is no real number.
            ValueError: If ``initial`` holds NaN or infinity, or ``decay`` is out of range.
        """
        self._begin(initial, {"decay": decay})

    def _check(self, average: Any) -> None:
        self._check_finite(average, "average")

    def _advance(self, pairs: list[tuple[Run, NDArray[Any]]]) -> None:
        share = 1 - self.decay
        for run, average in pairs:
            for block, numbers in run.blocks(average):
                lerp_(run.wide[block], numbers, share)


def _follow(run: Run, average: NDArray[Any], momentum: float, rate: float) -> None:
    """Add the difference to the velocity, and the velocity to the weights."""
    scratch = run.scratch()
    with np.errstate(all="ignore"):
        for block, numbers, before in run.blocks(average, run.weights, whole=False):
            velocity, weights = run.kept[MOMENTUM][block], run.wide[block]
            delta = np.subtract(numbers, before, out=scratch[: weights.size])
            np.multiply(velocity, momentum, out=velocity)
            np.add(velocity, delta, out=velocity)
            np.multiply(velocity, rate, out=delta)
            np.add(weights, delta, out=weights)
