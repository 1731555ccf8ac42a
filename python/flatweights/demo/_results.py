"""The output of the demo: progress while it runs, then tables and a plot."""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from flatweights.examples import number_ticks, open_figure, plot

LINES = 10  # of progress, if there is no terminal to draw a bar on
PALE_RED = "#f9e8ea"
FLAT, STORE, GUIDE = "flatweights", "object store", "Ray's guide"
STEPS = {
    "wait": "collect results",
    "average": "average",
    "put": "hand it over",
    "broadcast": "set variables",
}
"""The titles of the steps of an exchange, by the names in `Round.seconds`."""


class Screen(Progress):
    """A progress bar on a terminal, a few plain lines elsewhere.

    It goes on writing to the `sys.stdout` that it was created with.
    """

    def __init__(self, rounds: int) -> None:
        """Show nothing before it is entered."""
        console = Console(file=sys.stdout, highlight=False)
        is_plain = not console.is_terminal
        super().__init__(console=console, redirect_stdout=False, transient=True, disable=is_plain)
        self._rounds, self._bar = rounds, self.add_task("", total=rounds)

    def line(self, text: str) -> None:
        """Print a line above the bar."""
        self.console.print(text, soft_wrap=True, markup=False)

    def stage(self, text: str) -> None:
        """Name the current stage."""
        self.update(self._bar, description=text)
        if self.disable:
            self.line(text)

    def round(self, number: int, text: str) -> None:
        """Show that a round is done, and its result."""
        self.update(self._bar, completed=number, description=text)
        is_printed = number in (1, self._rounds) or number % max(1, self._rounds // LINES) == 0
        if self.disable and is_printed:
            self.line(f"round {number} of {self._rounds}: {text}")


def milliseconds(seconds: float) -> str:
    """Return three digits, at most two of them after the point, and the unit."""
    value = 1e3 * seconds
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} ms"


def summary(options: argparse.Namespace) -> str:
    """Return the numbers of workers, rounds and local steps, as text."""
    rounds = f"rounds: {options.rounds}, local steps: {options.local_steps}"
    return f"workers: {options.workers}, {rounds}"


class Cost(NamedTuple):
    """The cost of one way to exchange: seconds by step, and bytes and arrays of one message."""

    seconds: Mapping[str, float]
    nbytes: int
    arrays: int

    @property
    def total(self) -> float:
        """The seconds of all steps."""
        return sum(self.seconds.values())


def show_comparison(
    options: argparse.Namespace,
    tests: Sequence[tuple[float, float]],
    computing: Sequence[float],
    costs: Mapping[str, Cost],
    others: Mapping[str, Mapping[float, float]],
) -> None:
    """Print a table of exchanges and the test's result, and draw the picture.

    Args:
        options: Of the command.
        tests: By round, test loss and accuracy.
        computing: By round, the seconds without the exchanges.
        costs: By way.
        others: By way and megabytes, the seconds of an exchange of other sizes.
    """
    ours, rows = costs[FLAT], list[tuple[object, ...]]()
    trains = median(computing[1:] or computing)

    def add_times(title: str, seconds: Sequence[float]) -> None:
        rows.append((title, *map(milliseconds, seconds)))
        rows.append(("  times as long", *(f"{each / seconds[0]:.1f}" for each in seconds)))

    totals = [cost.total for cost in costs.values()]
    add_times(f"exchange of {ours.nbytes / 1e6:.3g} MB", totals)
    for step, title in STEPS.items():
        times = (milliseconds(cost.seconds[step]) for cost in costs.values())
        rows.append((f"  {title}", *times))
    rows.append(("computing", *[milliseconds(trains)] * len(costs)))
    rows.append(("  share of the round", *(f"{trains / (trains + x):.0%}" for x in totals)))
    for size in others[FLAT]:
        add_times(f"exchange of {size:g} MB", [others[name][size] for name in costs])
    rows.append(("bytes of a model as sent", *(f"{cost.nbytes:,}" for cost in costs.values())))
    rows.append(("  in how many arrays", *(cost.arrays for cost in costs.values())))
    print_rows(["per round", *costs], rows)
    print(f"{FLAT}: as one buffer, through memory that the processes of a machine share")
    print(f"{STORE}: as one buffer, through Ray's object store")
    print(f"{GUIDE}: as a dict of arrays, through Ray's object store")
    print(f"All exchange the same {options.mode}, in turn, on this machine; times are medians.")
    guide = trains + costs[GUIDE].total
    saved = (guide - trains - ours.total) / guide
    print(f"A whole round takes {saved:.0%} less time than with the exchange of {GUIDE}.")
    print(f"rounds: {options.rounds}, test loss: {tests[-1][0]:.4f}")
    draw_comparison(options, tests, costs, others)


def draw_comparison(
    options: argparse.Namespace,
    tests: Sequence[tuple[float, float]],
    costs: Mapping[str, Cost],
    others: Mapping[str, Mapping[float, float]],
) -> None:
    """Draw the training, the steps of its exchange, and exchanges of other sizes."""
    title = f"Handwritten digits, averaging {options.mode} ({summary(options)})"
    with open_figure(options.plot, title, 11.0, 7.2) as figure:
        exchange, sizes, loss, accuracy = figure.subplots(2, 2).flat
        widths = [[1e3 * cost.seconds[step] for cost in costs.values()] for step in STEPS]
        ends = np.cumsum(widths, axis=0)
        for label, width, end in zip(STEPS.values(), widths, ends, strict=True):
            bars = exchange.barh(list(costs), width, 0.55, end - width, label=label)
        exchange.bar_label(bars, [f"{end:.3g} ms" for end in ends[-1]], padding=6)
        exchange.invert_yaxis()
        exchange.set_xlim(0, 1.2 * ends.max())
        exchange.set(title="Exchange of one round, by step", xlabel="milliseconds, median")
        exchange.legend(loc="upper right")
        curves = {}
        for name, cost in costs.items():
            points = sorted({**others[name], cost.nbytes / 1e6: cost.total}.items())
            curves[name] = [x for x, _ in points], [1e3 * y for _, y in points]
        across = f"MB in {costs[GUIDE].arrays} arrays"
        plot(sizes, "Exchange by size, ms", across, curves, "log")
        sizes.set_xscale("log")
        number_ticks(sizes.xaxis)
        rounds = range(1, len(tests) + 1)
        losses, accuracies = zip(*tests, strict=True)
        plot(loss, "Test loss", "round", {"": (rounds, losses)}, "log")
        plot(accuracy, "Test accuracy", "round", {"": (rounds, accuracies)})


def show_survival(
    options: argparse.Namespace,
    tests: Sequence[tuple[float, float]],
    away: Sequence[int],
    victim: int,
) -> None:
    """Print the number of rounds without the killed worker, and the test's result; draw a plot.

    Args:
        options: Of the command.
        tests: By round, test loss and accuracy.
        away: The rounds without the worker that was killed.
        victim: Its rank.
    """
    complete = options.rounds - len(away)
    print(f"rounds with all workers: {complete}, without rank {victim}: {len(away)}")
    print(f"test loss {tests[-1][0]:.4f}")
    title = f"Handwritten digits, one worker killed ({summary(options)})"
    with open_figure(options.plot, title, 9.0, 5.0) as figure:
        axes = figure.subplots()
        curve = range(1, len(tests) + 1), [accuracy for _, accuracy in tests]
        plot(axes, "Test accuracy", "round", {"": curve})
        without = f"without rank {victim}"
        axes.axvspan(away[0] - 0.5, away[-1] + 0.5, color=PALE_RED, label=without)
        axes.legend(loc="lower right")


def print_rows(titles: Sequence[str], rows: Sequence[tuple[object, ...]]) -> None:
    """Print a table; where it is too wide, the titles of rows fold. No number is cut."""
    table = Table(box=box.SIMPLE_HEAD)
    for i, title in enumerate(titles):
        table.add_column(title, justify="right" if i else "left", no_wrap=i > 0)
    for row in rows:
        table.add_row(*map(str, row))
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 200  # a file has no edge to wrap at
    console.width = max(60, console.width)  # the columns of numbers need 60
    console.print(table)
