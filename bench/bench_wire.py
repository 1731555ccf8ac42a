"""16-bit differences: making, receiving and averaging them, against NumPy with ml_dtypes.

``python -m bench.bench_wire [--quick] [--json FILE] [--plot FILE]``
"""

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench import machine, models, runner
from flatweights import FlatWeights
from flatweights.wire import (
    DeltaBroadcaster,
    DeltaEncoder,
    GradientEncoder,
    WireDType,
    average_differences,
    dtype_on_wire,
)

MB = 1_000_000
WORKERS = 4

Array = NDArray[Any]
Contenders = dict[str, Callable[[], Any]]


class Case:
    """A float32 model of one part before and after training, and its ways over the wire."""

    def __init__(self, nbytes: int, wire_dtype: WireDType) -> None:
        size = nbytes // 4
        self.nbytes = nbytes
        self.wire_dtype = wire_dtype
        self.dtype = dtype_on_wire(wire_dtype)
        self.start = models.random_vector(size, np.float32, 0)
        self.step = np.float32(1e-3) * models.random_vector(size, np.float32, 1)
        self.weights = FlatWeights({"w": self.start})
        self.trained = FlatWeights({"w": self.start + self.step})
        self.driver = DeltaBroadcaster(self.weights, wire_dtype)

    def encode(self) -> tuple[Contenders, Array]:
        """Return the ways to make a worker's difference and keep the rounding errors."""
        encoder = DeltaEncoder(self.driver.snapshot())
        residual = np.zeros_like(self.start)

        def numpy() -> Any:
            wanted = self.trained["w"] - self.start
            wanted += residual
            sent = wanted.astype(self.dtype)
            np.subtract(wanted, sent.astype(np.float32), out=residual)
            return sent

        contenders: Contenders = {
            runner.OURS: lambda: encoder.encode(self.trained).values["w"],
            "NumPy": numpy,
        }
        return contenders, self.step.astype(np.float64)

    def encode_gradient(self) -> tuple[Contenders, Array]:
        """Return the ways to round a gradient and keep the rounding errors."""
        encoder = GradientEncoder(self.wire_dtype)
        residual = np.zeros_like(self.start)

        def numpy() -> Any:
            wanted = self.start + residual
            sent = wanted.astype(self.dtype)
            np.subtract(wanted, sent.astype(np.float32), out=residual)
            return sent

        contenders: Contenders = {
            runner.OURS: lambda: encoder.encode(self.start).values["vector"],
            "NumPy": numpy,
        }
        return contenders, self.start.astype(np.float64)

    def broadcast(self) -> tuple[Contenders, Array]:
        """Return the ways to bring a driver from some weights to others and back."""
        driver = DeltaBroadcaster(self.weights, self.wire_dtype)
        turns = [self.trained, self.weights]
        reference = self.start.copy()
        numpy_turns = [self.trained["w"], self.weights["w"]]

        def ours() -> Any:
            turns.reverse()
            driver.encode(turns[0])
            return driver.reference["w"]

        def numpy() -> Any:
            nonlocal reference
            numpy_turns.reverse()
            sent = (numpy_turns[0] - reference).astype(self.dtype)
            reference += sent.astype(np.float32)
            numpy_turns[0].copy()
            return reference

        return {runner.OURS: ours, "NumPy": numpy}, self.start.astype(np.float64)

    def average(self) -> tuple[Contenders, Array]:
        """Return the ways to average the differences of some workers."""
        encoder = DeltaEncoder(self.driver.snapshot())
        sources = [encoder.encode(self.trained) for _ in range(WORKERS)]
        out = FlatWeights.empty(self.weights.layout)

        def numpy() -> Any:
            return sum(source.values["w"].astype(np.float32) for source in sources) / WORKERS

        contenders: Contenders = {
            runner.OURS: lambda: average_differences(sources, out=out)["w"],
            "NumPy": numpy,
        }
        return contenders, self.step.astype(np.float64)


# The operations, and the bytes that have to move for each number of float32.
OPERATIONS: dict[str, tuple[Callable[[Case], tuple[Contenders, Array]], int]] = {
    "encode weights": (Case.encode, 3 * 4 + 4 + 2),
    "encode a gradient": (Case.encode_gradient, 2 * 4 + 4 + 2),
    "broadcast": (Case.broadcast, 2 * 4 + 2 + 2 + 2 * 4 + 2 * 4),
    f"average {WORKERS}": (Case.average, 2 * WORKERS + 4),
}


def run(options: Namespace) -> None:
    """Run the bench."""
    limits = machine.limits(rounds=3 if options.quick else 7)
    wires: list[WireDType] = ["bfloat16"] if options.quick else ["bfloat16", "float16"]
    rows = []
    for nbytes in (MB, 100 * MB):
        for wire_dtype in wires:
            case = Case(nbytes, wire_dtype)
            for name, (operation, moved) in OPERATIONS.items():
                contenders, oracle = operation(case)
                rows += runner.time_case(
                    f"{name}, {wire_dtype}, {nbytes // MB} MB",
                    contenders,
                    nbytes=moved * nbytes // 4,
                    oracle=oracle,
                    tolerance=0.05,
                    budget=0.15 if options.quick else 1,
                )
    runner.report("wire", rows, limits, options)


if __name__ == "__main__":
    run(runner.arguments(__doc__ or ""))
