"""What the fits by L-BFGS-B share: the search, what came of it, and its report."""

import argparse
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from threadpoolctl import threadpool_limits

from flatweights._arguments import integer
from flatweights.examples._curves import Panel, draw
from flatweights.examples._options import make_parser
from flatweights.examples._table import print_table

ENOUGH = 0.95

Objective = Callable[[NDArray[Any]], tuple[float, NDArray[Any]]]


class Search(NamedTuple):
    """How SciPy asked.

    Attributes:
        x: The best weights that it found.
        iterations: Steps that L-BFGS-B took.
        losses: The loss at each question.
        seconds: When each was answered, since the first was asked.
    """

    x: NDArray[Any]
    iterations: int
    losses: list[float]
    seconds: list[float]


class Fit(NamedTuple):
    """What came of one way to fit.

    Attributes:
        search: How it was found.
        train: Accuracy on the examples that were fitted.
        test: Accuracy on others.
    """

    search: Search
    train: float
    test: float


def search(objective: Objective, start: NDArray[Any], iterations: int) -> Search:
    """Ask ``objective`` from ``start`` on, for so many ``iterations`` at most."""
    start = start.astype(np.float64)
    objective(start)  # what is traced at the first question is no part of the comparison
    losses: list[float] = []
    seconds: list[float] = []

    def recorded(x: NDArray[Any]) -> tuple[float, NDArray[Any]]:
        answer = objective(x)
        losses.append(answer[0])
        seconds.append(time.perf_counter() - began)
        return answer

    limits = {"maxiter": iterations, "maxfun": 10 * iterations}
    with threadpool_limits(1):  # SciPy's own threads wait busily where TensorFlow has to run
        began = time.perf_counter()
        result = minimize(recorded, start, jac=True, method="L-BFGS-B", options=limits)
    return Search(result.x, int(result.nit), losses, seconds)


def make_lbfgs_parser(description: str | None, layers: int, width: int) -> argparse.ArgumentParser:
    """Return a parser of the options that the programs share.

    Args:
        description: What ``--help`` says first: the docstring of the program.
        layers: Of the network, by default.
        width: Of a hidden layer, by default.
    """
    parser = make_parser(description, plot="the losses over time")
    for option, default, help_ in (
        ("--layers", layers, "of the network; default: %(default)s"),
        ("--width", width, "of a hidden layer; default: %(default)s"),
        ("--iterations", 150, "at most; default: %(default)s"),
    ):
        parser.add_argument(option, type=integer(1), default=default, metavar="N", help=help_)
    return parser


def report(fits: Mapping[str, Fit], options: argparse.Namespace) -> None:
    """Print one row for each way to fit; draw them, if asked to.

    Raises:
        SystemExit: If one is worse than `ENOUGH`.
    """
    titles = ("", "iterations", "evaluations", "loss", "train", "test", "seconds", "ms, median")
    print_table(
        titles,
        [
            (
                name,
                str(found.iterations),
                str(len(found.losses)),
                f"{min(found.losses):.4f}",
                f"{train:.3f}",
                f"{test:.3f}",
                f"{found.seconds[-1]:.2f}",
                f"{1e3 * np.median(np.diff(found.seconds)):.2f}",
            )
            for name, (found, train, test) in fits.items()
        ],
    )
    if options.plot:
        curves = {
            name: (found.seconds, np.minimum.accumulate(found.losses).tolist())
            for name, (found, _, _) in fits.items()
        }
        panel = Panel("lowest loss so far", "seconds", curves, "log")
        draw(options.plot, "Handwritten digits, fitted by L-BFGS-B", panel)
    if min(fit.test for fit in fits.values()) < ENOUGH:
        raise SystemExit(f"accuracy below {ENOUGH}: it needs more --iterations")
