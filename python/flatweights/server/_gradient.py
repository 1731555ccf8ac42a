"""Gradient descent on averaged gradients, with clipping by norm and momentum."""

from __future__ import annotations

import math
from typing import ClassVar

from flatweights._inplace import Model, axpy_, norm, scale_
from flatweights.server._optimizer import Hyperparameter, ServerOptimizer, fraction, positive
from flatweights.server._state import MOMENTUM


class GradientDescent(ServerOptimizer[Model]):
    """Gradient descent: ``v = momentum * v + c * gradient; weights -= learning_rate * v``.

    ``c`` clips the gradient: it is ``max_norm / norm`` if the norm exceeds ``max_norm``, and 1
    otherwise (Pascanu, Mikolov and Bengio, "On the Difficulty of Training Recurrent Neural
    Networks", ICML 2013). The momentum is that of Polyak, "Some Methods of Speeding up the
    Convergence of Iteration Methods", 1964.

    With momentum, the optimizer keeps one vector beside the weights. A step does not change the
    gradient. It makes one pass of `flatweights.norm` and one of `flatweights.axpy_`, which move 16
    bytes per number of float32. With momentum it makes a second pass of `axpy_` and one of
    `flatweights.scale_`, and moves 36 bytes.

    >>> optimizer = GradientDescent(np.zeros(2), learning_rate=0.5, max_norm=1.0)
    >>> optimizer.step(np.array([3.0, 4.0]))
    array([-0.3, -0.4])

    Attributes:
        learning_rate: It may be set between steps.
        max_norm: It may be set between steps; with infinity, nothing is clipped.
        momentum: It cannot be set later.
        gradient_norm: The norm of the last gradient before clipping; NaN before the first step.
            It is not part of the state.
    """

    learning_rate = positive()
    max_norm = Hyperparameter("a positive number", lambda value: value > 0)
    momentum = fraction(fixed=True)
    gradient_norm = math.nan
    _vectors: ClassVar = {MOMENTUM: "momentum"}

    def __init__(
        self,
        initial: Model,
        *,
        learning_rate: float,
        max_norm: float = math.inf,
        momentum: float = 0.0,
    ) -> None:
        """Start from a model.

        Args:
            initial: `FlatWeights` or an array; it is copied.
            learning_rate: Positive.
            max_norm: Positive: averaged gradients with a larger norm are clipped.
            momentum: From 0 to below 1: the share of the velocity that a step keeps.

        Raises:
            TypeError: If ``initial`` is neither, or has a dtype that `flatweights.average` refuses;
                or an argument is no real number.
            ValueError: If ``initial`` holds NaN or infinity, or an argument is out of range.
        """
        numbers = {"learning_rate": learning_rate, "max_norm": max_norm, "momentum": momentum}
        self._begin(initial, numbers)

    def step(self, gradient: Model, /) -> Model:
        """Take a step against this round's averaged gradient; return the model.

        Integer and boolean parts of the model stay as they are.

        Args:
            gradient: It has the kind, shapes and dtypes of the model. It is read and not kept; a
                strided array is copied first.

        Returns:
            The `weights`, read-only and changed in place by the next step.

        Raises:
            TypeError: If the gradient is of another kind or dtype.
            ValueError: If its shape or digest differs, or its norm is not finite. The model has not
                changed.
            RuntimeError: If an earlier step was interrupted.
        """
        memory = self._read(gradient, "gradient")
        length = norm(gradient)
        if not math.isfinite(length):
            self._check_finite(gradient, "gradient")
            raise ValueError(f"gradient: expected a finite norm, got {length}")
        most = self.max_norm
        factor = 1.0 if length <= most else most / length
        with self._stepping():
            for run in self._runs:
                velocity = run.kept.get(MOMENTUM)
                for block, numbers in run.blocks(run.read(memory)):
                    if velocity is None:
                        axpy_(run.wide[block], -self.learning_rate * factor, numbers)
                        continue
                    change = velocity[block]
                    scale_(change, self.momentum)
                    axpy_(change, factor, numbers)
                    axpy_(run.wide[block], -self.learning_rate, change)
            self.gradient_norm = length
        return self.weights
