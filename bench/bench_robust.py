"""Robust averages of N buffers, compared with the mean, one read of them, and other libraries.

``python -m bench.bench_robust [--quick] [--json FILE] [--plot FILE]``

The last rows measure each instruction set. If the environment chooses one (``FLATWEIGHTS_ISA=avx2``
or ``portable``), only its rows are measured.
"""

import json
import os
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import flatweights
from bench import machine, models, peers, runner
from flatweights import robust

MB = 1_000_000
TRIM = 0.2
# Bytes. Rivals take seconds and twice the memory, so beyond this only ours are timed.
MOST_OF_RIVALS = 2**31
SETS = ("avx512", "avx2", "portable")


def _by_coordinate(sources: list[Any], *, rivals: bool) -> dict[str, Callable[[], Any]]:
    out, count = np.zeros_like(sources[0]), len(sources)
    found: dict[str, Callable[[], Any]] = {
        runner.OURS: lambda: robust.median(sources, out=out),
        f"{runner.OURS}, trimmed_mean({TRIM})": lambda: robust.trimmed_mean(sources, TRIM, out=out),
        f"{runner.OURS}, mean_around_median": lambda: robust.mean_around_median(
            sources, count - count // 4, out=out
        ),
        f"{runner.OURS}, average": lambda: flatweights.average(sources, out=out),
    }
    if not rivals:
        return found
    found["Flower's median (np.median)"] = lambda: peers.flower_median(sources)
    found["Flower's trimmed mean (np.partition)"] = lambda: peers.flower_trimmed_mean(sources, TRIM)
    if sources[0].dtype in (np.float32, np.float64):
        found["tf.sort"] = peers.tensorflow_median(sources)
        bottleneck = peers.bottleneck_median(sources)
        if bottleneck:
            found["bottleneck.median"] = bottleneck
    return found


def _by_distance(sources: list[Any], *, rivals: bool) -> dict[str, Callable[[], Any]]:
    out, byzantine = np.zeros_like(sources[0]), max(0, (len(sources) - 3) // 4)
    found: dict[str, Callable[[], Any]] = {
        runner.OURS: lambda: robust.krum(sources, byzantine, out=out),
        f"{runner.OURS}, distances": lambda: robust.distances(sources),
        f"{runner.OURS}, geometric_median": lambda: robust.geometric_median(sources, out=out),
        f"{runner.OURS}, one read (isfinite)": lambda: [flatweights.isfinite(s) for s in sources],
    }
    if rivals:
        found["Flower's distances"] = lambda: peers.flower_distances(sources)
    return found


def _buffers(nbytes: int, count: int, dtype: Any) -> list[Any]:
    size = nbytes // np.dtype(dtype).itemsize
    return [models.random_vector(size, dtype, seed) for seed in range(count)]


def _check(sources: list[Any]) -> None:
    """Compare with NumPy in float64 on the first numbers."""
    few = [source[:10_000] for source in sources]
    wide = np.stack(few).astype(np.float64)
    assert np.array_equal(robust.median(few), np.median(wide, axis=0).astype(few[0].dtype))
    expected = peers.flower_trimmed_mean(list(wide), TRIM)
    assert np.allclose(robust.trimmed_mean(few, TRIM).astype(np.float64), expected, atol=1e-2)
    exact = ((wide[:, None] - wide[None]) ** 2).sum(axis=2) if len(few) <= 16 else None
    assert exact is None or np.allclose(robust.distances(few), exact, rtol=1e-6)


def case(
    nbytes: int, count: int, dtype: Any, *, budget: float, only: str | None = None
) -> list[runner.Row]:
    """Return the rows for ``count`` buffers of ``nbytes``, by coordinate and by distance.

    Args:
        nbytes: The size of each buffer.
        count: The number of buffers.
        dtype: Their dtype.
        budget: Seconds for each of the two kinds.
        only: The name of the only instruction set to measure, without rivals; all, if empty.
    """
    sources = _buffers(nbytes, count, dtype)
    _check(sources)
    rivals = only is None and count * nbytes <= MOST_OF_RIVALS
    label = f"{np.dtype(dtype).name}, N={count}, {nbytes / MB:g} MB" + (f", {only}" if only else "")
    rows = []
    for kind, contenders in (("coordinate", _by_coordinate), ("distance", _by_distance)):
        rows += runner.time_case(
            f"by {kind}: {label}",
            contenders(sources, rivals=rivals),
            nbytes=(count + (kind == "coordinate")) * nbytes,
            budget=budget,
        )
    return rows


def model_case(name: str, shapes: models.Shapes, *, budget: float) -> list[runner.Row]:
    """Return the rows for eight models of many parts."""
    sources = [models.random_parts(shapes, seed=seed) for seed in range(8)]
    out = models.random_parts(shapes)

    def flower() -> None:
        for i in range(len(out)):
            peers.flower_median([source[i] for source in sources])

    found: dict[str, Callable[[], Any]] = {
        runner.OURS: lambda: robust.median(sources, out=out),
        f"{runner.OURS}, trimmed_mean({TRIM})": lambda: robust.trimmed_mean(sources, TRIM, out=out),
        f"{runner.OURS}, krum": lambda: robust.krum(sources, 1, out=out),
        f"{runner.OURS}, average": lambda: flatweights.average(sources, out=out),
        "Flower's median (np.median)": flower,
    }
    nbytes = 9 * sum(part.nbytes for part in out)
    return runner.time_case(f"lists, N=8, {name}", found, nbytes=nbytes, budget=budget)


def rows_of_set(name: str) -> list[runner.Row]:
    """Return the rows of another process, whose kernels are those of an instruction set."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.json")
        done = subprocess.run(
            [sys.executable, "-m", "bench.bench_robust", "--json", str(path)],
            env={**os.environ, "FLATWEIGHTS_ISA": name},
            capture_output=True,
            text=True,
            check=False,
        )
        if "FLATWEIGHTS_ISA: expected one of" in done.stderr:
            return []  # this processor lacks it
        assert done.returncode == 0, done.stderr
        return [runner.Row(**row) for row in json.loads(path.read_text())["rows"]]


def run(options: Namespace) -> None:
    """Run the bench."""
    if only := os.environ.get("FLATWEIGHTS_ISA"):
        rows = case(20 * MB, 16, np.float32, budget=2, only=only)
        runner.report("robust", rows, {}, options)
        return
    cases: list[tuple[int, int, Any]] = [
        *((20 * MB, n, np.float32) for n in (4, 8, 16)),
        (100 * MB, 16, np.float32),
        *((10 * MB, n, np.float32) for n in (32, 64)),
        *((10 * MB, 16, dtype) for dtype in (np.float16, ml_dtypes.bfloat16, np.float64)),
    ]
    if options.quick:
        cases = [(20 * MB, 16, np.float32), (5 * MB, 16, np.float16), (5 * MB, 64, np.float32)]
    limits = machine.limits(rounds=3 if options.quick else 7)
    rows = []
    for nbytes, count, dtype in cases:
        rows += case(nbytes, count, dtype, budget=1 if options.quick else 4)
    for name, shapes in (("policy", models.POLICY), ("resnet20", models.resnet20())):
        rows += model_case(name, shapes, budget=1)
    for name in SETS:
        rows += rows_of_set(name)
    runner.report("robust", rows, limits, options)


if __name__ == "__main__":
    run(runner.arguments(__doc__ or ""))
