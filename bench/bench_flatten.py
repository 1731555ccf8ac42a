"""Parts to a vector and back, against NumPy, optree and one memcpy of the bytes.

``python -m bench.bench_flatten [--quick] [--json FILE] [--plot FILE]``
"""

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import numpy as np

import flatweights
from bench import machine, models, peers, runner

_SMALL = 10_000_000  # bytes read and written of a model that fits the caches


def flatten_contenders(parts: list[Any]) -> dict[str, Callable[[], Any]]:
    """Return all ways to flatten ``parts``."""
    out, source = (np.zeros(sum(part.size for part in parts), np.float32) for _ in range(2))
    peers_out = np.concatenate([part.ravel() for part in parts])
    source[:] = peers_out

    def memcpy() -> Any:
        np.copyto(peers_out, source)
        return peers_out

    return {
        runner.OURS: lambda: flatweights.flatten(parts, out=out),
        f"{runner.OURS}, fresh result": lambda: flatweights.flatten(parts),
        "one memcpy of the bytes": memcpy,
        "np.concatenate of ravels": lambda: peers.ravel_concatenate(parts),
        "optree tree_ravel": peers.optree_ravel(parts),
    }


def unflatten_contenders(parts: list[Any]) -> dict[str, Callable[[], Any]]:
    """Return all ways to write a vector into ``parts``."""
    flat = np.concatenate([part.ravel() for part in parts])
    copy = np.zeros_like(flat)

    def slices() -> None:
        begin = 0
        for part in parts:
            part[...] = flat[begin : begin + part.size].reshape(part.shape)
            begin += part.size

    return {
        runner.OURS: lambda: flatweights.unflatten_into(parts, flat),
        "one memcpy of the bytes": lambda: np.copyto(copy, flat),
        "slices and reshapes": slices,
    }


def view_contenders(parts: list[Any]) -> dict[str, Callable[[], Any]]:
    """Return the ways to have a vector's parts as views of it: no byte moves."""
    flat = np.concatenate([part.ravel() for part in parts])
    layout = flatweights.Layout.of(parts)

    def slices() -> list[Any]:
        begin, views = 0, []
        for part in parts:
            views.append(flat[begin : begin + part.size].reshape(part.shape))
            begin += part.size
        return views

    return {
        runner.OURS: lambda: flatweights.unflatten(flat, layout),
        "slices and reshapes": slices,
    }


def run(options: Namespace) -> None:
    """Run the bench."""
    shapes: dict[str, models.Shapes] = {
        "policy": models.POLICY,
        "resnet20": models.resnet20(),
        "300 parts of 1 kB": [(16, 16)] * 300,
        "resnet50": models.resnet50(),
    }
    budget = 0.2 if options.quick else 2
    rows = []
    for name, model in shapes.items():
        parts = models.random_parts(model)
        oracle = np.concatenate([part.ravel() for part in parts]).astype(np.float64)
        nbytes = 2 * sum(part.nbytes for part in parts)
        # Larger models leave the caches cold by themselves.
        for cold in (False, True) if nbytes <= _SMALL else (False,):
            rows += runner.time_case(
                f"flatten {name}",
                flatten_contenders(parts),
                nbytes=nbytes,
                oracle=oracle,
                tolerance=0,
                budget=budget,
                cold=cold,
            )
            rows += runner.time_case(
                f"unflatten_into {name}",
                unflatten_contenders(parts),
                nbytes=nbytes,
                budget=budget,
                cold=cold,
            )
        rows += runner.time_case(
            f"unflatten {name}", view_contenders(parts), nbytes=0, budget=budget / 2
        )
    runner.report("flatten", rows, machine.limits(rounds=3), options)


if __name__ == "__main__":
    run(runner.arguments(__doc__ or ""))
