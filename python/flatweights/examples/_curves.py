"""Curves side by side, as a picture."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flatweights.demo._plot_style import STYLE

_COLOURS = ("#0b5fa5", "#e07b00", "#66a182", "#d1495b", "#8d6fb8", "#8d96a3")


@dataclass
class Panel:
    """One pair of axes.

    Attributes:
        title: What is shown.
        xlabel: What is along the horizontal axis.
        curves: By name, where points are: along the horizontal axis, and the vertical one.
        scale: Of the vertical axis.
    """

    title: str
    xlabel: str
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    scale: Literal["linear", "log"] = "linear"


def draw(path: Path, title: str, *panels: Panel) -> None:
    """Write a picture of ``panels``, from left to right, to ``path``.

    Raises:
        OSError: If it cannot be written.
    """
    import matplotlib as mpl  # takes a second
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(1.0 + 5.0 * len(panels), 4.0), layout="constrained")
        figure.suptitle(title, fontsize=12)
        for axes, panel in zip(
            figure.subplots(1, len(panels), squeeze=False).flat, panels, strict=True
        ):
            _fill(axes, panel)
        figure.savefig(path, dpi=150)


def _fill(axes: Any, panel: Panel) -> None:
    for i, (name, (x, y)) in enumerate(panel.curves.items()):
        marker = "o" if len(x) <= 30 else ""
        axes.plot(x, y, marker=marker, ms=3, lw=1.5, color=_COLOURS[i % len(_COLOURS)], label=name)
    axes.set(title=panel.title, xlabel=panel.xlabel, yscale=panel.scale)
    axes.grid(axis="y", color="#e6e8eb")
    axes.set_axisbelow(True)
    if len(panel.curves) > 1:
        axes.legend()
