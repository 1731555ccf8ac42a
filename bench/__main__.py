"""Runs every bench: ``python -m bench [--quick] [--json FILE] [--plot FILE]``.

Each bench puts its name before the ending of the files: ``out.json`` becomes
``out.average.json`` and so on.
"""

from argparse import Namespace
from pathlib import Path

from bench import (
    bench_average,
    bench_contention,
    bench_exchange,
    bench_flatten,
    bench_inplace,
    bench_variables,
    bench_wire,
    runner,
)

BENCHES = {
    "average": bench_average,
    "flatten": bench_flatten,
    "inplace": bench_inplace,
    "variables": bench_variables,
    "exchange": bench_exchange,
    "contention": bench_contention,
    "wire": bench_wire,
}


def main() -> None:
    """Run all benches one after the other."""
    options = runner.arguments(__doc__ or "")
    for name, bench in BENCHES.items():
        bench.run(_named(options, name))


def _named(options: Namespace, name: str) -> Namespace:
    def named(path: Path | None) -> Path | None:
        return path and path.with_suffix(f".{name}{path.suffix}")

    return Namespace(quick=options.quick, json=named(options.json), plot=named(options.plot))


if __name__ == "__main__":
    main()
