"""What the demo shows: progress while it runs, and pictures."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from flatweights.examples import STYLE, Panel, draw_panel

if TYPE_CHECKING:
    from flatweights.demo._training import Costs

LINES = 10  # of progress, where there is no terminal to draw a bar on
BLUE, RED = "#0b5fa5", "#d1495b"
STEP_COLOURS = ("#8d96a3", RED, "#edae49", "#66a182")


class Screen:
    """A progress bar on a terminal, a few plain lines elsewhere.

    Writes to what `sys.stdout` was when it was made.
    """

    def __init__(self, rounds: int) -> None:
        """Show nothing yet."""
        self._rounds = rounds
        self._console = Console(file=sys.stdout, highlight=False)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            redirect_stdout=False,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("", total=rounds)

    def __enter__(self) -> "Screen":
        """Start the progress bar."""
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Remove the progress bar."""
        self._progress.stop()

    def line(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(text, soft_wrap=True, markup=False)
        self._console.file.flush()

    def stage(self, text: str) -> None:
        """Say what is being done."""
        self._progress.update(self._task, description=text)
        self._plain(text)

    def advance(self, number: int, text: str) -> None:
        """Say that a round is done, and with which result."""
        self._progress.update(self._task, completed=number, description=text)
        every = max(1, self._rounds // LINES)
        if number == 1 or number % every == 0 or number == self._rounds:
            self._plain(f"round {number} of {self._rounds}: {text}")

    def _plain(self, text: str) -> None:
        if not self._console.is_terminal:
            self.line(text)


def plural(n: int, noun: str) -> str:
    """Return ``n`` and the noun, in the plural unless ``n`` is 1."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def milliseconds(seconds: float) -> str:
    """Return three digits and the unit."""
    value = 1e3 * seconds
    return f"{value:.{max(0, 3 - len(str(int(value))))}f} ms"


def draw_comparison(
    options: argparse.Namespace,
    losses: Sequence[float],
    accuracies: Sequence[float],
    costs: Mapping[str, "Costs"],
    steps: Mapping[str, str],
) -> None:
    """Draw the training, the steps of its exchange, and exchanges of other sizes.

    Raises:
        OSError: If the picture cannot be written.
    """
    import matplotlib as mpl  # takes a second
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11, 7.2), layout="constrained")
        figure.suptitle(_title(options) + f", averaging {options.mode}", fontsize=13)
        exchange, sizes, loss, accuracy = figure.subplots(2, 2).flat
        left = [0.0] * len(costs)
        for (step, label), colour in zip(steps.items(), STEP_COLOURS, strict=True):
            widths = [1e3 * cost.seconds[step] for cost in costs.values()]
            exchange.barh(list(costs), widths, 0.55, left, color=colour, label=label)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        for name, end in zip(costs, left, strict=True):
            exchange.text(end, name, f"  {end:.3g} ms", va="center")
        exchange.invert_yaxis()
        exchange.set_xlim(0, 1.2 * max(left))
        exchange.set(title="Exchange of one round, by step", xlabel="milliseconds, median")
        exchange.legend(loc="lower right")
        curves = {}
        for name, cost in costs.items():
            points = sorted({**cost.others, cost.nbytes / 1e6: cost.total}.items())
            curves[name] = [x for x, _ in points], [1e3 * y for _, y in points]
        draw_panel(sizes, Panel("Exchange by size, ms", "MB in 100 arrays", curves, "log"))
        sizes.set_xscale("log")
        rounds = range(1, len(losses) + 1)
        draw_panel(loss, Panel("Test loss", "round", {"": (rounds, losses)}, "log"))
        draw_panel(accuracy, Panel("Test accuracy", "round", {"": (rounds, accuracies)}))
        figure.savefig(options.plot, dpi=150)


def draw_survival(
    options: argparse.Namespace, accuracies: Sequence[float], used: Sequence[int], victim: int
) -> None:
    """Draw the accuracy, and how many ranks each average was of.

    Raises:
        OSError: If the picture cannot be written.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9, 7.2), layout="constrained")
        figure.suptitle(_title(options) + "; one worker killed", fontsize=13)
        accuracy, ranks = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
        rounds = range(1, len(used) + 1)
        draw_panel(accuracy, Panel("Test accuracy", "", {"": (rounds, accuracies)}))
        away = [n for n, count in zip(rounds, used, strict=True) if count < options.workers]
        if away:
            _mark(accuracy, away, victim)
        colours = [RED if n in away else BLUE for n in rounds]
        ranks.bar(rounds, used, width=0.85, color=colours)
        ranks.set(title="Ranks averaged", xlabel="round", yticks=range(options.workers + 1))
        ranks.xaxis.get_major_locator().set_params(integer=True)
        figure.savefig(options.plot, dpi=150)


def _mark(axes: Any, away: Sequence[int], victim: int) -> None:
    """Shade the rounds without the worker."""
    begin, end = away[0] - 0.5, away[-1] + 0.5
    axes.axvspan(begin, end, color=RED, alpha=0.13, lw=0)
    for x, text, side in (
        (begin, f"rank {victim} killed ", "right"),
        (end, f" rank {victim} is back", "left"),
    ):
        axes.axvline(x, color=RED, lw=1, ls="--")
        axes.text(x, 0.04, text, ha=side, color=RED, transform=axes.get_xaxis_transform())


def _title(options: argparse.Namespace) -> str:
    return (
        f"Handwritten digits, {plural(options.workers, 'worker')}: "
        f"{plural(options.rounds, 'round')} of {plural(options.local_steps, 'local step')}"
    )
