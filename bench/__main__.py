"""Runs every bench: ``python -m bench [--quick]``."""

from bench import bench_average, bench_flatten, bench_inplace


def main() -> None:
    """Run all benches one after the other, with the options of this command."""
    for bench in (bench_average, bench_flatten, bench_inplace):
        bench.main()


if __name__ == "__main__":
    main()
