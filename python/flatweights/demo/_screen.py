"""Progress on the screen while the demo runs, and its plots."""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress

from flatweights.examples import Panel, open_figure

if TYPE_CHECKING:
    from flatweights.demo._training import Exchange

LINES = 10  # of progress, where there is no terminal to draw a bar on
BLUE, RED = "#0b5fa5", "#d1495b"


class Screen:
    """A progress bar on a terminal, a few plain lines elsewhere.

    It goes on writing to the `sys.stdout` that it was created with.
    """

    def __init__(self, rounds: int) -> None:
        """Show nothing before ``progress`` is entered."""
        self._rounds = rounds
        self._console = Console(file=sys.stdout, highlight=False)
        self.progress = Progress(
            *Progress.get_default_columns(),
            console=self._console,
            redirect_stdout=False,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self.progress.add_task("", total=rounds)

    def line(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(text, soft_wrap=True, markup=False)
        self._console.file.flush()

    def stage(self, text: str) -> None:
        """Name the current stage."""
        self.progress.update(self._task, description=text)
        if not self._console.is_terminal:
            self.line(text)

    def advance(self, number: int, text: str) -> None:
        """Show that a round is done, and its result."""
        self.progress.update(self._task, completed=number, description=text)
        is_printed = number in (1, self._rounds) or number % max(1, self._rounds // LINES) == 0
        if is_printed and not self._console.is_terminal:
            self.line(f"round {number} of {self._rounds}: {text}")


def plural(n: int, noun: str) -> str:
    """Return ``n`` and the noun, in the plural unless ``n`` is 1."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def milliseconds(seconds: float) -> str:
    """Return three digits, or more before the point, and the unit."""
    value = 1e3 * seconds
    return f"{value:.{max(0, 2 - math.floor(math.log10(value))) if value else 0}f} ms"


def summary(options: argparse.Namespace) -> str:
    """Return how many workers there are, and for how long they train."""
    rounds, steps = plural(options.rounds, "round"), plural(options.local_steps, "local step")
    return f"on {plural(options.workers, 'worker')}: {rounds} of {steps}"


def draw_comparison(
    options: argparse.Namespace,
    tests: Sequence[tuple[float, float]],
    costs: Mapping[str, "Exchange"],
    others: Mapping[str, Mapping[float, float]],
    steps: Mapping[str, str],
) -> None:
    """Draw the training, the steps of its exchange, and exchanges of other sizes."""
    title = f"Handwritten digits {summary(options)}, averaging {options.mode}"
    with open_figure(options.plot, title, 11.0, 7.2) as figure:
        exchange, sizes, loss, accuracy = figure.subplots(2, 2).flat
        ends = [0.0] * len(costs)
        for step, label in steps.items():
            widths = [1e3 * cost.seconds[step] for cost in costs.values()]
            bars = exchange.barh(list(costs), widths, 0.55, ends, label=label)
            ends = [a + b for a, b in zip(ends, widths, strict=True)]
        exchange.bar_label(bars, [f"{end:.3g} ms" for end in ends], padding=6)
        exchange.invert_yaxis()
        exchange.set_xlim(0, 1.2 * max(ends))
        exchange.set(title="Exchange of one round, by step", xlabel="milliseconds, median")
        exchange.legend(loc="upper right")
        curves = {}
        for name, cost in costs.items():
            points = sorted({**others[name], cost.nbytes / 1e6: cost.total}.items())
            curves[name] = [x for x, _ in points], [1e3 * y for _, y in points]
        arrays = max(cost.arrays for cost in costs.values())
        Panel("Exchange by size, ms", f"MB in {arrays} arrays", curves, "log").draw(sizes)
        sizes.set_xscale("log")
        rounds = range(1, len(tests) + 1)
        losses, accuracies = zip(*tests, strict=True)
        Panel("Test loss", "round", {"": (rounds, losses)}, "log").draw(loss)
        Panel("Test accuracy", "round", {"": (rounds, accuracies)}).draw(accuracy)


def draw_survival(
    options: argparse.Namespace, accuracies: Sequence[float], used: Sequence[int], victim: int
) -> None:
    """Draw the accuracy, and how many ranks each average was of."""
    title = f"Handwritten digits {summary(options)}; one worker killed"
    with open_figure(options.plot, title, 9.0, 7.2) as figure:
        accuracy, ranks = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
        rounds = range(1, len(used) + 1)
        Panel("Test accuracy", "", {"": (rounds, accuracies)}).draw(accuracy)
        away = [n for n, count in zip(rounds, used, strict=True) if count < options.workers]
        label = f"without rank {victim}"
        accuracy.axvspan(away[0] - 0.5, away[-1] + 0.5, color=RED, alpha=0.13, lw=0, label=label)
        accuracy.legend(loc="lower right")
        ranks.bar(rounds, used, width=0.85, color=[RED if n in away else BLUE for n in rounds])
        ranks.set(title="Ranks averaged", xlabel="round", yticks=range(options.workers + 1))
