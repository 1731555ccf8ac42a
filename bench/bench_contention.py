"""Several processes at once on the same cores, each averaging in a loop.

``python -m bench.bench_contention [--quick] [--json FILE]``

Ray runs many workers on one machine, and each worker has its own threads. Together, all workers
should move as many bytes per second as a single one.
"""

import json
import multiprocessing
import os
import time
from argparse import Namespace
from dataclasses import asdict, dataclass
from multiprocessing.synchronize import Barrier
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import flatweights
from bench import machine, runner

SOURCES = 4
ELEMENTS = 2_500_000  # of float32: 10 MB
NBYTES = (SOURCES + 1) * ELEMENTS * 4


@dataclass
class Row:
    """The result of several processes that ran at once.

    Attributes:
        contender: The way to average that each of them ran.
        processes: The number of processes.
        rate: Bytes per second of all processes together, counting only bytes that must move.
        median: Seconds of the median call.
        slowest: Seconds of the slowest call.
    """

    contender: str
    processes: int
    rate: float
    median: float
    slowest: float


def _work(contender: str, barrier: Barrier, seconds: float, results: Any) -> None:
    sources = [np.full(ELEMENTS, k, np.float32) for k in range(SOURCES)]
    out = np.empty(ELEMENTS, np.float32)
    if contender == "flatweights, 1 thread":
        flatweights.set_num_threads(1)

    def call() -> None:
        if contender.startswith(runner.OURS):
            flatweights.average(sources, out=out)
        else:
            np.mean(sources, axis=0, out=out)

    call()
    assert np.all(out == (SOURCES - 1) / 2)
    barrier.wait()
    times = []
    begin = last = time.perf_counter()
    while last < begin + seconds:
        call()
        now = time.perf_counter()
        times.append(now - last)
        last = now
    results.put(times)


def measure(contender: str, processes: int, seconds: float) -> Row:
    """Run ``contender`` in ``processes`` at once for ``seconds``."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(processes), context.Queue()
    workers = [
        context.Process(target=_work, args=(contender, barrier, seconds, results))
        for _ in range(processes)
    ]
    for worker in workers:
        worker.start()
    times: list[list[float]] = [results.get(timeout=120) for _ in workers]
    for worker in workers:
        worker.join()
    calls = np.concatenate(times)
    rate = sum(len(own) * NBYTES / sum(own) for own in times)
    return Row(contender, processes, rate, float(np.median(calls)), float(calls.max()))


def run(options: Namespace) -> None:
    """Measure all and print the table."""
    seconds = 0.3 if options.quick else 1
    processes = (1, 4) if options.quick else (1, 2, 4, 8)
    contenders = (runner.OURS, f"{runner.OURS}, 1 thread", "np.mean(axis=0)")
    rows = [measure(c, n, seconds) for c in contenders for n in processes]
    info = machine.describe()
    console = Console(width=120)
    console.print(f"[bold]{SOURCES} x 10 MB averaged by several processes at once[/bold]")
    console.print("  ".join(f"{key}: {value}" for key, value in info.items()), highlight=False)
    table = Table(
        "contender", "processes", "GB/s together", "of one alone", "median call", "slowest call"
    )
    for column in table.columns[1:]:
        column.justify = "right"
    alone = {row.contender: row.rate for row in rows if row.processes == 1}
    for row in rows:
        table.add_row(
            row.contender,
            str(row.processes),
            f"{row.rate / 1e9:.1f}",
            f"{100 * row.rate / alone[row.contender]:.0f} %",
            f"{row.median * 1e3:.1f} ms",
            f"{row.slowest * 1e3:.1f} ms",
            style="bold" if row.contender == runner.OURS else None,
            end_section=row.processes == processes[-1],
        )
    console.print(table)
    console.print(f"threads of each process: {flatweights.get_num_threads()}, cores: {_cores()}")
    if options.json:
        record = {"machine": info, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(record, indent=1))


def _cores() -> int:
    return len(os.sched_getaffinity(0))


if __name__ == "__main__":
    run(runner.arguments(__doc__ or ""))
