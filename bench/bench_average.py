"""The average of N buffers, compared with other ways to compute it.

``python -m bench.bench_average [--quick] [--json FILE] [--plot FILE]``
"""

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

import flatweights
from bench import machine, models, peers, runner

MB = 1_000_000


def contenders(sources: list[Any], *, tensorflow: bool) -> dict[str, Callable[[], Any]]:
    """Return all ways to average ``sources``."""
    out, numpy_out, expression_out = (np.zeros_like(sources[0]) for _ in range(3))
    threads = flatweights.get_num_threads()

    def on_one_thread() -> Any:
        flatweights.set_num_threads(1)
        try:
            return flatweights.average(sources, out=out)
        finally:
            flatweights.set_num_threads(threads)

    found: dict[str, Callable[[], Any]] = {
        runner.OURS: lambda: flatweights.average(sources, out=out),
        f"{runner.OURS}, one thread": on_one_thread,
        f"{runner.OURS}, fresh result": lambda: flatweights.average(sources),
        f"{runner.OURS}, weighted": lambda: flatweights.average(
            sources, [1.0 + 1e-9 * k for k in range(len(sources))], out=out
        ),
        f"{runner.OURS}, nonfinite='raise'": lambda: flatweights.average(
            sources, out=out, nonfinite="raise"
        ),
        "NumPy in place": lambda: peers.numpy_in_place(sources, numpy_out),
        "sum(ws) / n": lambda: peers.python_sum(sources),
        "np.mean(ws, axis=0)": lambda: peers.numpy_mean(sources),
        "Flower's aggregate (as described)": lambda: peers.flower_aggregate(sources),
        "Flower's aggregate_inplace (same)": lambda: peers.flower_aggregate_in_place(sources),
    }
    if sources[0].dtype in (np.float32, np.float64):
        if len(sources) <= 30:  # numexpr takes no more operands
            found["numexpr"] = lambda: peers.numexpr_mean(sources, expression_out)
        torch = peers.torch_mean(sources)
        if torch:
            found["torch in place"] = torch
        if tensorflow:
            found["tf.add_n"] = peers.tensorflow_add_n(sources, jit=False)
            found["tf.add_n, XLA"] = peers.tensorflow_add_n(sources, jit=True)
    return found


def case(nbytes: int, count: int, dtype: Any, *, budget: float, tensorflow: bool) -> list[Any]:
    """Return the rows for ``count`` buffers of ``nbytes``."""
    size = nbytes // np.dtype(dtype).itemsize
    sources = [models.random_vector(size, dtype, seed) for seed in range(count)]
    oracle = np.zeros(size)
    for source in sources:
        oracle += source.astype(np.float64)
    oracle /= count
    label = f"{nbytes / MB:g} MB" if nbytes >= MB else f"{nbytes / 1000:g} kB"
    return runner.time_case(
        f"{np.dtype(dtype).name}, N={count}, {label}",
        contenders(sources, tensorflow=tensorflow),
        nbytes=(count + 1) * nbytes,
        oracle=oracle,
        tolerance=0.05,
        budget=budget,
    )


def model_case(name: str, shapes: models.Shapes, *, budget: float) -> list[Any]:
    """Return the rows for four models of many parts, whose sources a training step left cold."""
    sources = [models.random_parts(shapes, seed=seed) for seed in range(4)]
    out, numpy_out = (models.random_parts(shapes) for _ in range(2))

    def in_place() -> None:
        for i, target in enumerate(numpy_out):
            peers.numpy_in_place([source[i] for source in sources], target)

    in_place()
    ours = flatweights.average(sources, out=out)
    assert all(np.allclose(a, b, atol=1e-6) for a, b in zip(ours, numpy_out, strict=True))
    found: dict[str, Callable[[], Any]] = {
        runner.OURS: lambda: flatweights.average(sources, out=out),
        "NumPy in place": in_place,
    }
    nbytes = 5 * sum(part.nbytes for part in out)
    return [
        row
        for cold in (False, True)
        for row in runner.time_case(
            f"lists, N=4, {name}", found, nbytes=nbytes, budget=budget, cold=cold
        )
    ]


def run(options: Namespace) -> None:
    """Run the bench."""
    cases: list[tuple[int, int, Any]] = [
        (1000, 4, np.float32),
        (MB, 4, np.float32),
        *((100 * MB, n, np.float32) for n in (2, 4, 8, 16)),
        *((50 * MB, 4, dtype) for dtype in (np.float16, ml_dtypes.bfloat16)),
        (200 * MB, 4, np.float64),
    ]
    if options.quick:
        cases = [(MB, 4, np.float32), (100 * MB, 4, np.float32), (5 * MB, 4, np.float16)]
    else:
        cases += [(400 * MB, 4, np.float32), (10 * MB, 64, np.float32), (MB, 4, np.float64)]
    limits = machine.limits(rounds=3 if options.quick else 7)
    rows = []
    for nbytes, count, dtype in cases:
        rows += case(nbytes, count, dtype, budget=1 if options.quick else 4, tensorflow=True)
    if not options.quick:
        for name, shapes in (("policy", models.POLICY), ("resnet20", models.resnet20())):
            rows += model_case(name, shapes, budget=4)
    runner.report("average", rows, limits, options)


if __name__ == "__main__":
    run(runner.arguments(__doc__ or ""))
