"""A training that a worker was missing from for some rounds, as a picture."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure

from flatweights.demo._options import Options
from flatweights.demo._plot import LINE_COLOURS
from flatweights.demo._plot_style import STYLE
from flatweights.demo._screen import count

if TYPE_CHECKING:
    from flatweights.demo._survival import Survival

_AWAY = "#d1495b"


def draw(path: Path, options: Options, survival: "Survival") -> None:
    """Write the picture to ``path``.

    Raises:
        OSError: If it cannot be written.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9, 7.2), layout="constrained")
        figure.suptitle(
            f"Handwritten digits, {count(options.workers, 'worker')}: "
            f"{count(options.rounds, 'round')} of {count(options.local_steps, 'local step')}; "
            f"one worker killed",
            fontsize=13,
        )
        accuracy, ranks = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
        rounds = [one["round"] for one in survival.records]
        marker = "o" if len(rounds) <= 40 else ""
        accuracy.plot(
            rounds, survival.accuracies, marker=marker, ms=3.5, lw=1.6, color=LINE_COLOURS[0]
        )
        accuracy.set(title="Test accuracy")
        accuracy.grid(axis="y", color="#e6e8eb")
        accuracy.set_axisbelow(True)
        _mark(accuracy, survival)
        used = [len(one["used"]) for one in survival.records]
        colours = [_AWAY if n < options.workers else LINE_COLOURS[0] for n in used]
        ranks.bar(rounds, used, width=0.85, color=colours)
        ranks.set(title="Ranks averaged", xlabel="round", yticks=range(options.workers + 1))
        ranks.xaxis.get_major_locator().set_params(integer=True)
        figure.savefig(path, dpi=150)


def _mark(axes: Any, survival: "Survival") -> None:
    """Shade the rounds without the worker."""
    away = survival.without
    if not away:
        return
    axes.axvspan(away[0] - 0.5, away[-1] + 0.5, color=_AWAY, alpha=0.13, lw=0)
    for x, text, side in (
        (away[0] - 0.5, f"rank {survival.victim} killed ", "right"),
        (away[-1] + 0.5, f" rank {survival.victim} is back", "left"),
    ):
        axes.axvline(x, color=_AWAY, lw=1, ls="--")
        axes.text(x, 0.04, text, ha=side, color=_AWAY, transform=axes.get_xaxis_transform())
