"""Scaling, adding, interpolating, clipping in place and norms, against NumPy and BLAS.

``python -m bench.bench_inplace [--quick] [--json FILE] [--plot FILE]``
"""

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import flatweights
from bench import machine, models, peers, runner

MB = 1_000_000
A = 1e-3

Array = NDArray[Any]
Contenders = dict[str, Callable[[], Any]]


class Case:
    """Two models, and all ways to apply one operation to the first.

    Each contender changes a copy of its own; the first call is compared.
    """

    def __init__(self, y: Array, x: Array) -> None:
        self.y, self.x = y, x
        self.wide_y, self.wide_x = y.astype(np.float64), x.astype(np.float64)

    def scale(self) -> tuple[Contenders, Array]:
        """Return the ways to compute ``y *= -1``, which can go on for ever."""
        y, numpy_y = self.y.copy(), self.y.copy()
        factor = self.y.dtype.type(-1)

        def ours() -> Any:
            flatweights.scale_(y, -1.0)
            return y

        found: Contenders = {
            runner.OURS: ours,
            "np.multiply(y, a, out=y)": lambda: np.multiply(numpy_y, factor, out=numpy_y),
        }
        scal = peers.blas("scal", self.y.dtype)
        if scal:
            blas_y = self.y.copy()
            found["BLAS scal"] = lambda: scal(-1.0, blas_y)
        return found, -self.wide_y

    def axpy(self) -> tuple[Contenders, Array]:
        """Return the ways to compute ``y += a * x``."""
        y, numpy_y, expression_y = (self.y.copy() for _ in range(3))
        factor = self.y.dtype.type(A)

        def ours() -> Any:
            flatweights.axpy_(y, A, self.x)
            return y

        def numpy() -> Any:
            nonlocal numpy_y
            numpy_y += factor * self.x
            return numpy_y

        found: Contenders = {runner.OURS: ours, "y += a * x": numpy}
        if self.y.dtype in (np.float32, np.float64):
            found["numexpr"] = lambda: peers.numexpr_axpy(expression_y, factor, self.x)
        axpy = peers.blas("axpy", self.y.dtype)
        if axpy:
            blas_y = self.y.copy()
            found["BLAS axpy"] = lambda: axpy(self.x, blas_y, a=A)
        return found, self.wide_y + A * self.wide_x

    def lerp(self) -> tuple[Contenders, Array]:
        """Return the ways to compute ``y += a * (x - y)``."""
        y, numpy_y = self.y.copy(), self.y.copy()
        factor = self.y.dtype.type(A)

        def ours() -> Any:
            flatweights.lerp_(y, self.x, A)
            return y

        def numpy() -> Any:
            nonlocal numpy_y
            numpy_y += factor * (self.x - numpy_y)
            return numpy_y

        found: Contenders = {runner.OURS: ours, "y += a * (x - y)": numpy}
        return found, self.wide_y + A * (self.wide_x - self.wide_y)

    def norm(self) -> tuple[Contenders, Array]:
        """Return the ways to compute the norm."""
        found: Contenders = {
            runner.OURS: lambda: flatweights.norm(self.y),
            "np.linalg.norm": lambda: np.linalg.norm(self.y),
        }
        nrm2 = peers.blas("nrm2", self.y.dtype)
        if nrm2:
            found["BLAS nrm2"] = lambda: nrm2(self.y)
        blocks = np.array_split(self.wide_y, 64)  # added up pairwise, in 80 bits
        squares = sum(np.sum(np.square(block.astype(np.longdouble))) for block in blocks)
        return found, np.array([np.sqrt(squares)], np.float64)

    def clip(self) -> tuple[Contenders, Array]:
        """Return the ways to clip to a norm that is always a little smaller."""
        y, numpy_y = self.y.copy(), self.y.copy()
        begin = 0.9 * flatweights.norm(y)
        most = {"ours": begin, "NumPy": begin}

        def next_of(name: str) -> float:
            most[name] *= 0.9999
            return most[name]

        def ours() -> Any:
            flatweights.clip_by_norm_(y, next_of("ours"))
            return y

        def numpy() -> Any:
            nonlocal numpy_y
            norm, limit = np.linalg.norm(numpy_y), next_of("NumPy")
            if norm > limit:
                numpy_y *= self.y.dtype.type(limit / norm)
            return numpy_y

        found: Contenders = {runner.OURS: ours, "np.linalg.norm, y *= a": numpy}
        return found, self.wide_y * (0.9 * 0.9999)

    def isfinite(self) -> tuple[Contenders, Array]:
        """Return the ways to look for NaN and infinity."""
        found: Contenders = {
            runner.OURS: lambda: flatweights.isfinite(self.y),
            "np.isfinite(x).all()": lambda: np.isfinite(self.y).all(),
        }
        return found, np.ones(1)


# The operations, and the number of times that each byte of a model has to move.
OPERATIONS: dict[str, tuple[Callable[[Case], tuple[Contenders, Array]], int]] = {
    "scale_": (Case.scale, 2),
    "axpy_": (Case.axpy, 3),
    "lerp_": (Case.lerp, 3),
    "norm": (Case.norm, 1),
    "clip_by_norm_": (Case.clip, 3),
    "isfinite": (Case.isfinite, 1),
}


def run(options: Namespace) -> None:
    """Run the bench."""
    cases: list[tuple[int, Any]] = [(1000, np.float32), (MB, np.float32), (100 * MB, np.float32)]
    if not options.quick:
        cases += [(200 * MB, np.float64), (50 * MB, np.float16), (50 * MB, ml_dtypes.bfloat16)]
    limits = machine.limits(rounds=3 if options.quick else 7)
    rows = []
    for nbytes, dtype in cases:
        size = nbytes // np.dtype(dtype).itemsize
        case = Case(*(models.random_vector(size, dtype, seed) for seed in range(2)))
        label = f"{nbytes / MB:g} MB" if nbytes >= MB else f"{nbytes / 1000:g} kB"
        for name, (operation, passes) in OPERATIONS.items():
            contenders, oracle = operation(case)
            rows += runner.time_case(
                f"{name}, {np.dtype(dtype).name}, {label}",
                contenders,
                nbytes=passes * nbytes,
                oracle=oracle,
                # NumPy's norms of 16-bit numbers overflow.
                tolerance=np.inf if np.dtype(dtype).itemsize == 2 else 0.05,
                budget=0.15 if options.quick else 1,
            )
    runner.report("in place", rows, limits, options)


if __name__ == "__main__":
    run(runner.arguments(__doc__ or ""))
