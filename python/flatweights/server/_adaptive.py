"""FedAdagrad, FedAdam and FedYogi: optimizers with a step size for each weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from flatweights import _core
from flatweights._inplace import Model
from flatweights.server._optimizer import Hyperparameter, ServerOptimizer
from flatweights.server._state import Block

# Squares of a smaller tau vanish in float32, and steps come close to 0 / 0.
_LEAST_TAU = 1e-15


class _Adaptive(ServerOptimizer[Model]):
    """The step of Algorithm 2 of Reddi et al., which the classes below share."""

    learning_rate = Hyperparameter.positive()
    beta1 = Hyperparameter.fraction(fixed=True)
    tau = Hyperparameter(
        f"a number from {_LEAST_TAU} to 1e6", lambda value: _LEAST_TAU <= value <= 1e6, fixed=True
    )
    _wants_whole = True

    _moment: ClassVar[Literal["sum", "mean", "sign"]]
    """How the squared difference updates the second moment; the core knows these names."""

    def vectors(self) -> Mapping[str, float]:
        """Keep the smoothed differences and squares."""
        first = {"momentum": 0.0} if self.beta1 else {}
        return {**first, "second": self.tau**2}

    def update(self, block: Block, /) -> None:
        """Divide the smoothed difference by the root of the smoothed squares."""
        average = block.average
        _core.adapt_(
            self._moment,
            block.weights,
            block.vectors.get("momentum"),
            block.vectors["second"],
            average if average.flags.aligned else average.copy(),
            block.published,
            self.learning_rate,
            self.beta1,
            getattr(self, "beta2", 0.0),
            self.tau,
        )


class FedAdagrad(_Adaptive[Model]):
    """Adagrad on the server: ``v += delta**2; weights += learning_rate * m / (sqrt(v) + tau)``.

    ``delta`` is the average minus the weights, and ``m = beta1 * m + (1 - beta1) * delta``.
    Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 2, after Duchi, Hazan
    and Singer, JMLR 12, 2011. As in the paper, ``v`` begins with ``tau**2``, and nothing corrects
    the bias of the first steps.

    The optimizer keeps ``v`` beside the weights, and ``m`` unless ``beta1`` is 0. A step over
    float32 reads average and weights once to check them, then reads four vectors and writes three,
    in one pass without the GIL: 36 bytes per number, 28 without ``m``.

    >>> optimizer = FedAdagrad(np.zeros(1), learning_rate=0.1)
    >>> [round(float(optimizer.step(np.array([1.0]))[0]), 3) for _ in range(3)]
    [0.1, 0.167, 0.219]

    Args:
        initial: `FlatWeights` or an array; it is copied.
        learning_rate: The server's, in units of the weights: positive. It may be set between steps.
        beta1: From 0 to below 1: the share of ``m`` that a step keeps. It cannot be set later.
        tau: From 1e-15 to 1e6, in units of the weights: differences well below it take small steps.
            The larger it is, the less the step size of a weight adapts. It cannot be set later.
    """

    _moment = "sum"

    def __init__(
        self,
        initial: Model,
        *,
        learning_rate: float = 0.01,
        beta1: float = 0.0,
        tau: float = 1e-3,
    ) -> None:
        super().__init__(initial, learning_rate=learning_rate, beta1=beta1, tau=tau)


class FedAdam(_Adaptive[Model]):
    """Adam on the server: `FedAdagrad` with ``v = beta2 * v + (1 - beta2) * delta**2``.

    Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 2, after Kingma and
    Ba, ICLR 2015. As in the paper, ``v`` begins with ``tau**2``, and nothing corrects the bias of
    the first steps.

    The optimizer keeps ``v`` beside the weights, and ``m`` unless ``beta1`` is 0. A step over
    float32 moves 36 bytes per number, 28 without ``m``.

    >>> optimizer = FedAdam(np.zeros(1), learning_rate=0.1)
    >>> [round(float(optimizer.step(np.array([1.0]))[0]), 3) for _ in range(3)]
    [0.099, 0.232, 0.386]

    Args:
        initial, learning_rate, beta1, tau: As in `FedAdagrad`.
        beta2: From 0 to below 1: the share of ``v`` that a step keeps. It may be set between steps.
    """

    beta2 = Hyperparameter.fraction()
    _moment = "mean"

    def __init__(
        self,
        initial: Model,
        *,
        learning_rate: float = 0.01,
        beta1: float = 0.9,
        beta2: float = 0.99,
        tau: float = 1e-3,
    ) -> None:
        numbers = {"learning_rate": learning_rate, "beta1": beta1, "beta2": beta2, "tau": tau}
        super().__init__(initial, **numbers)


class FedYogi(_Adaptive[Model]):
    """Yogi on the server: `FedAdam`, but ``v`` moves by at most ``(1 - beta2) * delta**2``.

    The rule is ``v -= (1 - beta2) * delta**2 * sign(v - delta**2)``. Reddi et al., "Adaptive
    Federated Optimization", ICLR 2021, Algorithm 2, after Zaheer et al., "Adaptive
    Methods for Nonconvex Optimization", NeurIPS 2018. ``v`` begins with ``tau**2``, and nothing
    corrects the bias of the first steps.

    The optimizer keeps ``v`` beside the weights, and ``m`` unless ``beta1`` is 0. A step over
    float32 moves 36 bytes per number, 28 without ``m``.

    >>> optimizer = FedYogi(np.zeros(1), learning_rate=0.1)
    >>> [round(float(optimizer.step(np.array([1.0]))[0]), 3) for _ in range(3)]
    [0.099, 0.232, 0.385]

    Args:
        initial, learning_rate, beta1, tau: As in `FedAdagrad`.
        beta2: From 0 to below 1: the share of ``v`` that a step keeps. It may be set between steps.
    """

    beta2 = Hyperparameter.fraction()
    _moment = "sign"

    def __init__(
        self,
        initial: Model,
        *,
        learning_rate: float = 0.01,
        beta1: float = 0.9,
        beta2: float = 0.99,
        tau: float = 1e-3,
    ) -> None:
        numbers = {"learning_rate": learning_rate, "beta1": beta1, "beta2": beta2, "tau": tau}
        super().__init__(initial, **numbers)
