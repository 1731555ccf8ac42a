"""Adam for gradients, as in deep-learning frameworks."""

from __future__ import annotations

import math
from collections.abc import Mapping

from flatweights import _core
from flatweights._inplace import Model
from flatweights.server._optimizer import Hyperparameter, ServerOptimizer
from flatweights.server._state import Block


class Adam(ServerOptimizer[Model]):
    """Adam for gradients, for a parameter server: it computes the steps of Keras's ``Adam``.

    ``m = beta1 * m + (1 - beta1) * g``, ``v = beta2 * v + (1 - beta2) * g**2``, and
    ``weights -= a * m / (sqrt(v) + epsilon)``. The bias of the first steps is corrected by
    ``a = learning_rate * sqrt(1 - beta2**t) / (1 - beta1**t)`` in step ``t`` (Kingma and Ba, "Adam:
    A Method for Stochastic Optimization", ICLR 2015). `FedAdam` takes averages of weights instead,
    and corrects no bias.

    The optimizer keeps ``m`` and ``v`` beside the weights. A step over float32 reads the gradient
    once to check it, then reads four vectors and writes three, in one pass without the GIL.

    >>> import numpy as np
    >>> optimizer = Adam(np.zeros(2), learning_rate=0.1)
    >>> for gradient in ([1.0, -3.0], [1.0, -1.0]):
    ...     weights = optimizer.step(np.array(gradient))
    >>> weights.round(3)
    array([-0.2 ,  0.187])

    Args:
        initial: `FlatWeights` or an array; it is copied.
        learning_rate: Positive. It may be set between steps.
        beta1: From 0 to below 1: the share of ``m`` that a step keeps. It cannot be set later.
        beta2: From 0 to below 1: the share of ``v`` that a step keeps. It cannot be set later.
        epsilon: Positive: gradients well below it take small steps. It cannot be set later.
    """

    learning_rate = Hyperparameter.positive()
    beta1 = Hyperparameter.fraction(fixed=True)
    beta2 = Hyperparameter.fraction(fixed=True)
    epsilon = Hyperparameter(
        "a number from 1e-15 to 1e6", lambda value: 1e-15 <= value <= 1e6, fixed=True
    )
    _wants_whole = True

    def __init__(
        self,
        initial: Model,
        *,
        learning_rate: float = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-7,
    ) -> None:
        numbers = {"learning_rate": learning_rate, "beta1": beta1, "beta2": beta2}
        super().__init__(initial, **numbers, epsilon=epsilon)

    def step(self, gradient: Model, /) -> Model:
        """Take a step against a gradient; return the model.

        Integer and boolean parts of the model stay as they are.

        Args:
            gradient: It has the kind, shapes and dtypes of the model. It is read and not kept; a
                strided array is copied first.

        Returns:
            The `weights`, read-only and changed in place by the next step.

        Raises:
            TypeError: If the gradient is of another kind or dtype.
            ValueError: If its shape or digest differs, or it holds NaN, infinity or numbers whose
                squares are not finite. The model has not changed.
            RuntimeError: If an earlier step was interrupted.
        """
        return self._step(gradient, "gradient", {})

    def vectors(self) -> Mapping[str, float]:
        """Keep the smoothed gradients and squares; no first moment without ``beta1``."""
        first = {"momentum": 0.0} if self.beta1 else {}
        return {**first, "second": 0.0}

    def check(self, gradient: Model, /) -> None:
        """Refuse a gradient whose squares are not finite."""
        self._check_norm(gradient, "gradient")

    def update(self, block: Block, /) -> None:
        """Step against the smoothed gradient, divided by the root of the smoothed squares."""
        gradient, step = block.average, self.steps + 1
        correction = math.sqrt(1 - self.beta2**step) / (1 - self.beta1**step)
        _core.adapt_(
            "mean",
            block.weights,
            block.vectors.get("momentum"),
            block.vectors["second"],
            gradient if gradient.flags.aligned else gradient.copy(),
            None,
            self.learning_rate * correction,
            self.beta1,
            self.beta2,
            self.epsilon,
        )
