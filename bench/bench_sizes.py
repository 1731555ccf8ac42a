"""A round on Ray by the size of the model: the guide's loop, the object store, channels.

``python -m bench.bench_sizes [--quick] [--json FILE] [--plot FILE]``

Four workers hold 100 float32 variables of equal size, and do not train. Each way runs in a loop of
its own, as in a program that uses it. The documentation's figures are drawn from ``python -m
bench.bench_sizes --json docs/figures/rounds.json``.
"""

from argparse import Namespace

import numpy as np
import ray

from bench import bench_exchange, machine, runner

WORKERS = 4
VARIABLES = 100
SIZES = {"10 kB": 10**4, "100 kB": 10**5, "1 MB": 10**6, "10 MB": 10**7, "100 MB": 10**8}


def run(options: Namespace) -> None:
    """Run the bench."""
    sizes = ["1 MB"] if options.quick else list(SIZES)
    rows: list[runner.Row] = []
    bench_exchange.start_ray()
    actor = ray.remote(num_cpus=0)(bench_exchange.Worker)
    for name in sizes:
        elements = SIZES[name] // 4 // VARIABLES
        workers = [actor.remote([(elements,)] * VARIABLES, seed) for seed in range(WORKERS)]
        rounds = bench_exchange.Rounds(workers)
        results = [way() for way in (rounds.in_channels, rounds.flat, rounds.dict_loop)]
        for result in results:
            np.testing.assert_allclose(result, results[0], rtol=1e-6, atol=1e-6)
        rounds.steps.clear()
        rows += bench_exchange.run_loops(rounds, name, 2 if options.quick else 9)
        rows += [
            runner.row_of(f"{name}: steps", f"{way}: {step}", seconds)
            for (way, step), seconds in rounds.steps.items()
        ]
        for worker in workers:
            ray.kill(worker)
    ray.shutdown()
    runner.report("sizes", rows, machine.limits(rounds=3), options)


if __name__ == "__main__":
    run(runner.arguments(__doc__ or ""))
