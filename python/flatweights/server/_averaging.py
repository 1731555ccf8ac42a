"""FedAvg, FedAvgM and ExponentialMovingAverage: averaging, plain, with momentum and smoothed."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from flatweights._core import move_parts
from flatweights._inplace import Model, axpy_, lerp_
from flatweights.server._optimizer import Hyperparameter, ServerOptimizer
from flatweights.server._state import Block


class FedAvg(ServerOptimizer[Model]):
    """Plain averaging: the model becomes the average, to the bit.

    McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized
    Data", AISTATS 2017. Each number of the average is read twice and written once.

    >>> optimizer = FedAvg(np.zeros(2))
    >>> optimizer.step(np.array([1.0, 3.0]))
    array([1., 3.])

    Args:
        initial: `FlatWeights` or an array; it is copied.
    """

    _has_master = False
    _wants_whole = True

    def __init__(self, initial: Model) -> None:
        super().__init__(initial)

    def check(self, average: Model, /) -> None:
        """Refuse an average that holds NaN or infinity."""
        self._check_finite(average, "average")

    def update(self, block: Block, /) -> None:
        """Copy the average."""
        move_parts([block.weights], [block.average])


class FedAvgM(ServerOptimizer[Model]):
    """Averaging with momentum: ``v = momentum * v + delta; weights += learning_rate * v``.

    ``delta`` is the average minus the weights. Hsu, Qi and Brown, "Measuring the Effects of
    Non-Identical Data Distribution for Federated Visual Classification", 2019. With momentum 0
    and learning rate 1 the model becomes the average, to the bit, as in `FedAvg`.

    With ``nesterov``, ``weights += learning_rate * (delta + momentum * v)``: the form of Sutskever
    et al., "On the Importance of Initialization and Momentum in Deep Learning", ICML 2013, that
    PyTorch's and Keras's SGD have. With momentum 0.9 and learning rate 0.7 this is the outer
    optimizer of Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language
    Models", 2023.

    With momentum, the optimizer keeps one vector beside the weights. A step over float32 reads
    average and weights once to check them, then reads three vectors and writes two: 28 bytes per
    number.

    >>> optimizer = FedAvgM(np.zeros(1), momentum=0.5)
    >>> [float(optimizer.step(np.array([average]))[0]) for average in (1.0, 2.0, 2.0)]
    [1.0, 2.5, 2.75]

    Args:
        initial: `FlatWeights` or an array; it is copied.
        momentum: From 0 to below 1: the share of the velocity that a step keeps. It cannot be set
            later.
        learning_rate: The server's: positive. It may be set between steps.
        nesterov: Whether a step looks ahead along the velocity. It cannot be set later; as an
            attribute and in the state it is 0 or 1.
    """

    learning_rate = Hyperparameter.positive()
    momentum = Hyperparameter.fraction(fixed=True)
    nesterov = Hyperparameter("False or True", lambda value: value in (0, 1), fixed=True)

    def __init__(
        self,
        initial: Model,
        *,
        momentum: float = 0.9,
        learning_rate: float = 1.0,
        nesterov: bool = False,
    ) -> None:
        super().__init__(initial, momentum=momentum, learning_rate=learning_rate, nesterov=nesterov)

    def vectors(self) -> Mapping[str, float]:
        """Keep the velocity."""
        return {"momentum": 0.0} if self.momentum else {}

    @property
    def _wants_whole(self) -> bool:
        return not self.momentum

    def update(self, block: Block, /) -> None:
        """Add the difference to the velocity, and the velocity to the weights."""
        momentum, rate = self.momentum, self.learning_rate
        if not momentum and rate == 1:
            move_parts([block.weights], [block.average])
        elif not momentum and block.published is block.weights:
            lerp_(block.weights, block.average, rate)
        else:
            step = change = block.delta
            if momentum:
                velocity = block.vectors["momentum"]
                np.multiply(velocity, momentum, out=velocity)
                np.add(velocity, change, out=velocity)
                if self.nesterov:
                    axpy_(change, momentum, velocity)
                else:
                    step = velocity
            np.multiply(step, rate, out=change)
            np.add(block.weights, change, out=block.weights)


class ExponentialMovingAverage(ServerOptimizer[Model]):
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

    Args:
        initial: `FlatWeights` or an array; it is copied.
        decay: From 0 to 1: the share of the model that a step keeps. It may be set between steps.
    """

    decay = Hyperparameter("a number from 0 to 1", lambda value: 0 <= value <= 1)
    _wants_whole = True

    def __init__(self, initial: Model, *, decay: float = 0.999) -> None:
        super().__init__(initial, decay=decay)

    def check(self, average: Model, /) -> None:
        """Refuse an average that holds NaN or infinity."""
        self._check_finite(average, "average")

    def update(self, block: Block, /) -> None:
        """Move the weights a part of the way to the average."""
        lerp_(block.weights, block.average, 1 - self.decay)
