"""Times rivals in turn, checks their results, prints a table, writes JSON, draws a plot."""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from bench import machine

OURS = "flatweights"

COLUMNS = ("case", "contender", "time", "±%", "GB/s", "% of limit", "vs. ours", "error")

_LARGE = 10**8  # bytes that are above most caches
_TURN = 3e-3  # least seconds of a contender's turn
_TRAMPLED = 128 << 20  # bytes that are written before a cold call


@dataclass
class Row:
    """The time that one contender took for one case.

    Attributes:
        case: The name of the case, such as ``"float32, N=4, 100 MB"``.
        contender: The name of the contender; ours begin with `OURS`.
        seconds: Median.
        spread: Half the distance between the quartiles, relative to the median.
        nbytes: The fewest bytes that must move for the case.
        error: Largest difference from the float64 result, relative to its largest value.
    """

    case: str
    contender: str
    seconds: float
    spread: float
    nbytes: int
    error: float | None = None
    ratio: float | None = field(default=None)

    @property
    def rate(self) -> float:
        """Bytes per second, counting only bytes that must move."""
        return self.nbytes / self.seconds


def time_case(
    case: str,
    contenders: dict[str, Callable[[], Any]],
    *,
    nbytes: int,
    oracle: NDArray[Any] | None = None,
    tolerance: float = 1e-2,
    budget: float = 1.0,
    between: Callable[[], Any] | None = None,
    cold: bool = False,
) -> list[Row]:
    """Run ``contenders`` in turn until the time is used up, and return a row for each.

    Args:
        case: The name of the case; ", cold" is added to the rows with cold caches.
        contenders: Calls by name; each returns its result.
        nbytes: The fewest bytes that must move.
        oracle: The float64 result; none for calls without a result to compare.
        tolerance: Largest relative error that still counts as the same result.
        budget: Seconds for all of them together, including the calls that are not timed.
        between: A function that is called before each turn, to end anything that the last contender
            left running. Then the first call of the turn is not timed.
        cold: Write 128 MB before each call, as a training step does, so that the caches are cold.
            This matters for models that fit the caches. There are at least 30 turns of one call
            each.

    Raises:
        AssertionError: If a result is wrong.
    """
    errors = _check(case, contenders, oracle, tolerance)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    trampled = np.zeros(_TRAMPLED if cold else 0, np.uint8)
    turns = 30 if cold else 3
    end = time.perf_counter() + budget
    while time.perf_counter() < end or len(times[next(iter(times))]) < turns:
        for name, call in contenders.items():
            if between is not None:
                between()
                call()
            previous = times[name]
            repeats = 1
            if cold:
                # Read and written, since stores alone may bypass the caches and leave them
                # unchanged.
                np.add(trampled, 1, out=trampled)
            elif previous and previous[-1] < _TURN:
                # Fast calls are repeated, on data that their first call has brought back into
                # the caches, until their time is long enough for the clock.
                repeats = min(1000, int(_TURN / previous[-1]) + 1)
                call()
            begin = time.perf_counter()
            for _ in range(repeats):
                call()
            previous.append((time.perf_counter() - begin) / repeats)
    return _rows(f"{case}, cold" if cold else case, times, nbytes, errors)


def _check(
    case: str,
    contenders: dict[str, Callable[[], Any]],
    oracle: NDArray[Any] | None,
    tolerance: float,
) -> dict[str, float | None]:
    """Return the error of each contender's first call, which also warms up."""
    errors: dict[str, float | None] = {}
    for name, call in contenders.items():
        result = call()  # compilation, page faults, caches
        error = None if oracle is None else _error(result, oracle)
        assert error is None or error <= tolerance, f"{case}: {name} is off by {error}"
        errors[name] = error
    return errors


def _rows(
    case: str,
    times: dict[str, list[float]],
    nbytes: int,
    errors: dict[str, float | None],
) -> list[Row]:
    rows = [row_of(case, name, times[name], nbytes, errors[name]) for name in times]
    ours = next((row for row in rows if row.contender == OURS), None)
    for row in rows:
        row.ratio = row.seconds / ours.seconds if ours else None
    return rows


def row_of(
    case: str, contender: str, times: Sequence[float], nbytes: int = 0, error: float | None = None
) -> Row:
    """Return the row for calls that took ``times``, seconds each."""
    low, middle, high = statistics.quantiles(times, n=4)
    return Row(case, contender, middle, (high - low) / 2 / middle, nbytes, error)


def _error(result: Any, oracle: NDArray[Any]) -> float:
    got = np.asarray(result).reshape(-1).astype(oracle.dtype)
    scale = float(np.max(np.abs(oracle), initial=0)) or 1.0
    return float(np.max(np.abs(got - oracle.reshape(-1)), initial=0)) / scale


def arguments(description: str) -> argparse.Namespace:
    """Return the options that all benches share."""
    return parser(description).parse_args()


def parser(description: str) -> argparse.ArgumentParser:
    """Return the parser of `arguments`, for a bench that has more of them."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="fewer sizes, less time for each")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw times, ours = 1")
    return parser


def report(
    title: str, rows: Sequence[Row], limits: dict[str, float], options: argparse.Namespace
) -> None:
    """Print a table of ``rows``, and write what ``options`` ask for."""
    console = Console(width=120)
    info = machine.describe()
    console.print(f"[bold]{title}[/bold]")
    console.print("  ".join(f"{key}: {value}" for key, value in info.items()), highlight=False)
    best = best_rate(rows, limits)
    if limits:
        console.print("GB/s: " + ", ".join(f"{k} {v / 1e9:.1f}" for k, v in limits.items()))
    console.print(table_of(COLUMNS, [(r.case, r.contender, *cells(r, best)) for r in rows]))
    if options.json:
        record = {"machine": info, "limits": limits, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(record, indent=1))
    if options.plot:
        _plot(title, rows, options.plot)


def table_of(columns: Sequence[str], rows: Iterable[tuple[str, ...]]) -> Table:
    """Return a table of ``rows``: case, contender, cells. Cases have sections, and ours is bold."""
    table = Table(*columns)
    for column in table.columns[2:]:
        column.justify = "right"
    last = None
    for case, contender, *cells in rows:
        if last is not None and case != last:
            table.add_section()
        style = "bold" if contender.startswith(OURS) else None
        table.add_row(case if case != last else "", contender, *cells, style=style)
        last = case
    return table


def best_rate(rows: Sequence[Row], limits: dict[str, float]) -> float:
    """Return the limit: the fastest bytes per second of any sweep or row above the caches."""
    return max((*limits.values(), *(r.rate for r in rows if r.nbytes >= _LARGE)), default=0.0)


def cells(row: Row, best: float) -> list[str]:
    """Return the cells of the columns after the contender's; see `COLUMNS`."""
    return [
        _duration(row.seconds),
        f"{100 * row.spread:.0f}",
        f"{row.rate / 1e9:.1f}" if row.nbytes else "",
        f"{100 * row.rate / best:.0f}" if best and row.nbytes >= _LARGE else "",
        f"{row.ratio:.2f}" if row.ratio is not None else "",
        f"{row.error:.1e}" if row.error is not None else "",
    ]


def _duration(seconds: float) -> str:
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.2f} ms"
    return f"{seconds * 1e6:.1f} µs"


def _plot(title: str, all_rows: Sequence[Row], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = [row for row in all_rows if row.ratio is not None]
    cases = list(dict.fromkeys(row.case for row in rows))
    figure, axes = plt.subplots(figsize=(10, 0.32 * len(rows) + 1.5), layout="constrained")
    labels = [f"{row.case}: {row.contender}" for row in rows]
    colours = ["tab:blue" if row.contender.startswith(OURS) else "tab:gray" for row in rows]
    axes.barh(range(len(rows)), [row.ratio for row in rows], color=colours)
    axes.set_yticks(range(len(rows)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("time, ours = 1")
    axes.set_title(f"{title} ({len(cases)} cases)")
    figure.savefig(path, dpi=120)
    plt.close(figure)
