"""Gradient descent on averaged gradients, with clipping by norm and momentum."""

from __future__ import annotations

import math
from collections.abc import Mapping

from flatweights._inplace import Model, axpy_, norm, scale_
from flatweights.server._optimizer import Hyperparameter, ServerOptimizer
from flatweights.server._state import Block


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

    Args:
        initial: `FlatWeights` or an array; it is copied.
        learning_rate: Positive. It may be set between steps.
        max_norm: Positive: averaged gradients with a larger norm are clipped. It may be set between
            steps.
        momentum: From 0 to below 1: the share of the velocity that a step keeps. It cannot be set
            later.

    Attributes:
        gradient_norm: The norm of the last gradient before clipping; NaN before the first step.
            It is not part of the state.
    """

    learning_rate = Hyperparameter.positive()
    max_norm = Hyperparameter("a positive number", lambda value: value > 0)
    momentum = Hyperparameter.fraction(fixed=True)
    gradient_norm = math.nan
    _wants_whole = True

    def __init__(
        self,
        initial: Model,
        *,
        learning_rate: float,
        max_norm: float = math.inf,
        momentum: float = 0.0,
    ) -> None:
        numbers = {"learning_rate": learning_rate, "max_norm": max_norm, "momentum": momentum}
        super().__init__(initial, **numbers)

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
        return self._step(gradient, "gradient", {})

    def vectors(self) -> Mapping[str, float]:
        """Keep the velocity."""
        return {"momentum": 0.0} if self.momentum else {}

    def check(self, gradient: Model, /) -> None:
        """Refuse a gradient without a finite norm; remember the norm."""
        length = norm(gradient)
        if not math.isfinite(length):
            self._check_finite(gradient, "gradient")
            raise ValueError(f"gradient: expected a finite norm, got {length}")
        self.gradient_norm = length

    def update(self, block: Block, /) -> None:
        """Add the clipped gradient to the velocity, and step against the velocity."""
        length, most = self.gradient_norm, self.max_norm
        factor = 1.0 if length <= most else most / length
        if not self.momentum:
            axpy_(block.weights, -self.learning_rate * factor, block.average)
            return
        velocity = block.vectors["momentum"]
        scale_(velocity, self.momentum)
        axpy_(velocity, factor, block.average)
        axpy_(block.weights, -self.learning_rate, velocity)
