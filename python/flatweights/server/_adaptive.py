"""FedAdagrad, FedAdam and FedYogi: optimizers with a step size for each weight."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from numpy.typing import NDArray

from flatweights import _core
from flatweights._inplace import Model
from flatweights.server._optimizer import AveragedOptimizer, Hyperparameter, fraction, positive
from flatweights.server._state import MOMENTUM, Run

_SECOND = "second"

# Squares of a smaller tau vanish in float32, and steps come close to 0 / 0.
_LEAST_TAU = 1e-15


class _Adaptive(AveragedOptimizer[Model]):
    """The step of Algorithm 2 of Reddi et al., which the classes below share."""

    learning_rate = positive()
    beta1 = fraction(fixed=True)
    tau = Hyperparameter(
        f"a number from {_LEAST_TAU} to 1e6", lambda value: _LEAST_TAU <= value <= 1e6, fixed=True
    )

    _vectors: ClassVar = {MOMENTUM: "beta1", _SECOND: None}

    def _first(self, name: str) -> float:
        return self.tau**2 if name == _SECOND else 0.0

    _moment: ClassVar[Literal["sum", "mean", "sign"]]
    """How the squared difference updates the second moment; the core knows these names."""

    def _second_share(self) -> float:
        return 1.0

    def _advance(self, pairs: list[tuple[Run, NDArray[Any]]]) -> None:
        for run, average in pairs:
            aligned = average if average.flags.aligned else average.copy()
            first = run.kept.get(MOMENTUM)
            for block, numbers, before in run.blocks(aligned, run.weights):
                _core.adapt_(
                    self._moment,
                    run.wide[block],
                    None if first is None else first[block],
                    run.kept[_SECOND][block],
                    numbers,
                    before,
                    self.learning_rate,
                    1 - self.beta1,
                    self._second_share(),
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

    Attributes:
        learning_rate: The server's; it may be set between steps.
        beta1: It cannot be set later.
        tau: It cannot be set later.
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
        """Start from a model.

        Args:
            initial: `FlatWeights` or an array; it is copied.
            learning_rate: The server's, in units of the weights: positive.
            beta1: From 0 to below 1: the share of ``m`` that a step keeps.
            tau: From 1e-15 to 1e6, in units of the weights: differences well below it take small
                steps. The larger it is, the less the step size of a weight adapts.

        Raises:
            TypeError: If ``initial`` is neither, or has a dtype that `flatweights.average` refuses;
                or an argument is no real number.
            ValueError: If ``initial`` holds NaN or infinity, or an argument is out of range.
        """
        self._begin(initial, {"learning_rate": learning_rate, "beta1": beta1, "tau": tau})


class _WithBeta2(_Adaptive[Model]):
    """An optimizer whose second moment forgets old squares at the rate ``beta2``."""

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
            learning_rate: The server's, in units of the weights: positive.
            beta1: From 0 to below 1: the share of ``m`` that a step keeps.
            beta2: From 0 to below 1: the share of ``v`` that a step keeps.
            tau: From 1e-15 to 1e6, in units of the weights: differences well below it take small
                steps. The larger it is, the less the step size of a weight adapts.

        Raises:
            TypeError: If ``initial`` is neither, or has a dtype that `flatweights.average` refuses;
                or an argument is no real number.
            ValueError: If ``initial`` holds NaN or infinity, or an argument is out of range.
        """
        numbers = {"learning_rate": learning_rate, "beta1": beta1, "beta2": beta2, "tau": tau}
        self._begin(initial, numbers)

    def _second_share(self) -> float:
        return 1 - self.beta2


class FedAdam(_WithBeta2[Model]):
    """Adam on the server: `FedAdagrad` with ``v = beta2 * v + (1 - beta2) * delta**2``.

    Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 2, after Kingma and
    Ba, ICLR 2015. As in the paper, ``v`` begins with ``tau**2``, and nothing corrects the bias of
    the first steps.

    The optimizer keeps ``v`` beside the weights, and ``m`` unless ``beta1`` is 0. A step over
    float32 moves 36 bytes per number, 28 without ``m``.

    >>> optimizer = FedAdam(np.zeros(1), learning_rate=0.1)
    >>> [round(float(optimizer.step(np.array([1.0]))[0]), 3) for _ in range(3)]
    [0.099, 0.232, 0.386]

    Attributes:
        learning_rate: The server's; it may be set between steps.
        beta1: It cannot be set later.
        beta2: It may be set between steps.
        tau: It cannot be set later.
    """

    _moment = "mean"


class FedYogi(_WithBeta2[Model]):
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

    Attributes:
        learning_rate: The server's; it may be set between steps.
        beta1: It cannot be set later.
        beta2: It may be set between steps.
        tau: It cannot be set later.
    """

    _moment = "sign"
