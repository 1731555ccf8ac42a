"""What the demo shows: progress while it runs, then a table."""

import sys
from collections.abc import Sequence
from statistics import median
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from flatweights.demo._history import History
from flatweights.demo._options import Options

if TYPE_CHECKING:
    from flatweights.demo._survival import Survival

_LINES = 10  # of progress, where there is no terminal to draw a bar on

TIME_LABELS = {
    "compute": "compute",
    "gather": "gather",
    "average": "average",
    "put": "put",
    "scatter": "scatter",
    "ray": "Ray calls, waiting",
}
"""What to call the fields of `Times`."""

SURVIVAL_LABELS = {
    "wait": "training, waiting",
    "average": "average",
    "put": "put",
    "broadcast": "broadcast, scatter",
    "round": "whole round",
}
"""What to call the steps of `Round.seconds`."""


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
        """Say what takes time now."""
        self._progress.update(self._task, description=text)
        self._plain(text)

    def round_done(self, done: int, accuracy: float) -> None:
        """Move on by one round."""
        self.advance(done, f"test accuracy {accuracy:.3f}")

    def advance(self, done: int, text: str) -> None:
        """Show how many rounds are done, and something about the last one."""
        self._progress.update(self._task, description=text, completed=done)
        lines, before = (n * _LINES // self._rounds for n in (done, done - 1))
        if done == 1 or lines > before:
            self._plain(f"round {done} of {self._rounds}: {text}")

    def _plain(self, text: str) -> None:
        if not self._console.is_terminal:
            self.line(text)

    def digits(self, sizes: Sequence[int], held_out: int) -> None:
        """Say how the examples are split."""
        per_worker = " or ".join(map(str, sorted(set(sizes))))
        self.line(f"digits: {sum(sizes)} to train on, {per_worker} per worker; {held_out} held out")

    def training(self, options: Options) -> None:
        """Say that the rounds begin."""
        self.stage(
            f"training: {count(options.rounds, 'round')} of "
            f"{count(options.local_steps, 'local step')}, averaging {options.mode}"
        )

    def table(self, ours: History, rival: History, workers: int) -> None:
        """Print both ways side by side."""
        table = Table(box=box.SIMPLE_HEAD)
        for column in ("per round", "flatweights", "dict of arrays", "dict / flat"):
            table.add_column(column, justify="right" if table.columns else "left")

        def add_times(label: str, flat: float, dicts: float) -> None:
            table.add_row(label, _ms(flat), _ms(dicts), f"{dicts / flat:.1f}x")

        split, rival_split = ours.split(), rival.split()
        for field, label in TIME_LABELS.items():
            add_times(label, getattr(split, field), getattr(rival_split, field))
        table.add_section()
        add_times("sum", sum(split), sum(rival_split))
        add_times(
            "  without compute", sum(split) - split.compute, sum(rival_split) - rival_split.compute
        )
        table.add_section()
        sent = workers + 1
        table.add_row("bytes exchanged", f"{sent * ours.nbytes:,}", f"{sent * rival.nbytes:,}")
        table.add_row("  in arrays", f"{sent * ours.arrays}", f"{sent * rival.arrays}")
        table.add_section()
        table.add_row("test loss", f"{ours.losses[-1]:.4f}", f"{rival.losses[-1]:.4f}")
        table.add_row("test accuracy", f"{ours.accuracies[-1]:.4f}", f"{rival.accuracies[-1]:.4f}")
        self._console.print(table)

        rounds = len(ours.measured)
        if rounds < len(ours.times):
            self.line(f"Times: medians of {count(rounds, 'round')}, all but the first.")
        else:
            self.line("Times: of one round, in which TensorFlow traced.")
        self.line("What runs in workers: the slowest one's.")
        self.line(f"Bytes: {count(workers, 'result')} and their average.")

    def survival_table(self, survival: "Survival") -> None:
        """Print the rounds of all workers beside those without the one that was killed."""
        table = Table(box=box.SIMPLE_HEAD)
        for column in ("per round", "all workers", f"without rank {survival.victim}"):
            table.add_column(column, justify="right" if table.columns else "left")
        away = set(survival.without)
        parts: list[list[dict[str, Any]]] = [[], []]
        for one in survival.records:
            parts[one["round"] in away].append(one)
        table.add_row("rounds", *(str(len(part)) for part in parts))
        table.add_row("results averaged", *(str(len(part[-1]["used"])) for part in parts))
        table.add_section()
        for step, label in SURVIVAL_LABELS.items():
            table.add_row(label, *(_ms(median(r["seconds"][step] for r in part)) for part in parts))
        table.add_section()
        for direction in ("in", "out"):
            cells = (f"{part[-1]['bytes'][direction]:,}" for part in parts)
            table.add_row(f"bytes {direction}", *cells)
        table.add_section()
        for label, values in (
            ("test loss, last", survival.losses),
            ("test accuracy, last", survival.accuracies),
        ):
            cells = (f"{values[part[-1]['round'] - 1]:.4f}" for part in parts)
            table.add_row(label, *cells)
        self._console.print(table)
        self.line("Times: medians.")


def count(n: int, noun: str) -> str:
    """Return ``n`` and the noun in its right number."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
