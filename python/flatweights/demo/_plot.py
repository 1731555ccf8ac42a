"""Loss, accuracy and the time split, as a picture."""

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from flatweights.demo._history import History
from flatweights.demo._options import Options
from flatweights.demo._plot_style import STYLE
from flatweights.demo._rounds import Times
from flatweights.demo._screen import TIME_LABELS, count

_NAMES = ("flatweights", "dict of arrays")
LINE_COLOURS = ("#0b5fa5", "#e07b00")
_TIME_COLOURS = {
    "compute": "#c9ced6",
    "gather": "#0b5fa5",
    "average": "#d1495b",
    "put": "#edae49",
    "scatter": "#66a182",
    "ray": "#8d96a3",
}


def draw(path: Path, options: Options, ours: History, rival: History) -> None:
    """Write the picture to ``path``.

    Raises:
        OSError: If it cannot be written.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11, 7.2), layout="constrained")
        figure.suptitle(
            f"Handwritten digits, {count(options.workers, 'worker')}: "
            f"{count(options.rounds, 'round')} of {count(options.local_steps, 'local step')}, "
            f"averaging {options.mode}",
            fontsize=13,
        )
        loss, accuracy, whole, exchange = figure.subplots(2, 2).flat
        _curves(loss, "Test loss", ours.losses, rival.losses)
        loss.set_yscale("log")
        loss.yaxis.set_major_formatter("{x:g}")
        loss.legend()
        _curves(accuracy, "Test accuracy", ours.accuracies, rival.accuracies)
        splits = [ours.split(), rival.split()]
        _bars(whole, "One round", splits, list(Times._fields))
        _bars(exchange, "Exchange alone", splits, [f for f in Times._fields if f != "compute"])
        handles, labels = whole.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
        figure.savefig(path, dpi=150)


def _curves(axes: Any, title: str, ours: list[float], rival: list[float]) -> None:
    rounds = range(1, len(ours) + 1)
    marker = "o" if len(ours) <= 40 else ""
    # The rival's is broad and below: the curves should lie on each other.
    axes.plot(
        rounds,
        rival,
        marker=marker,
        ms=7,
        lw=4,
        alpha=0.45,
        color=LINE_COLOURS[1],
        label=_NAMES[1],
    )
    axes.plot(rounds, ours, marker=marker, ms=3, lw=1.5, color=LINE_COLOURS[0], label=_NAMES[0])
    axes.set(title=title, xlabel="round")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(axis="y", color="#e6e8eb", which="both")
    axes.set_axisbelow(True)


def _bars(axes: Any, title: str, splits: list[Times], fields: list[str]) -> None:
    left = [0.0] * len(splits)
    for field in fields:
        widths = [1e3 * getattr(split, field) for split in splits]
        axes.barh(
            _NAMES,
            widths,
            left=left,
            height=0.55,
            color=_TIME_COLOURS[field],
            label=TIME_LABELS[field],
        )
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for name, total in zip(_NAMES, left, strict=True):
        axes.text(total, name, f"  {total:.1f} ms", va="center")
    axes.invert_yaxis()
    axes.set_xlim(0, 1.18 * max(left))
    axes.set(title=title, xlabel="milliseconds, median")
    axes.grid(axis="x", color="#e6e8eb")
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)
