"""Draws the figures of these pages: ``python docs/draw_figures.py``.

It reads ``figures/rounds.json``, the output of ``python -m bench.bench_sizes --json``, and
``figures/hostile.json``, the accuracies by round of ``flatweights examples federated`` with the
options in that file; and ``figures/chaos.json``, the output of ``python -m bench.chaos --json``
for several modes; and ``figures/scale.json``, which ``python -m tests.sim --scale --figure``
writes. Bytes between nodes are computed. It writes each figure twice beside these files,
for light and for dark pages.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt

FOLDER = Path(__file__).with_name("figures")
WORKERS = 4
NODES = 4
STORE = "flatweights, object store"
NAMES = {
    "dict of arrays": "the guide's loop",
    STORE: "object store",
    "flatweights": "shared memory",
}

# Bytes that each step of a round reads and writes, in models: variables to arrays, results into
# the store, the average, the average into the store, arrays to variables. The guide's loop sums
# into a new array for each worker (0 + a, then + b ...), and divides into one more.
STEPS = ("variables to buffers", "into the store", "average", "into the store", "set variables")
MODELS = {
    "dict of arrays": (2 * WORKERS, 2 * WORKERS, 2 + 3 * (WORKERS - 1) + 2, 2, 2 * WORKERS),
    STORE: (2 * WORKERS, 2 * WORKERS, WORKERS + 1, 2, 2 * WORKERS),
    "flatweights": (2 * WORKERS, 0, WORKERS + 1, 0, 2 * WORKERS),
}


@dataclass(frozen=True)
class Theme:
    """Colours of a page.

    Attributes:
        text: The colour of letters and axes.
        grid: The colour of lines behind the data.
        ways: The colours of the guide's loop, the object store and shared memory.
        steps: The colours of the steps that move bytes; see `STEPS`.
        inside: The colour of letters in a bar.
    """

    text: str
    grid: str
    ways: tuple[str, ...]
    steps: tuple[str, ...]
    inside: str


# Okabe and Ito's colours, which colour-blind readers can tell apart.
LIGHT = Theme(
    text="#1f2328",
    grid="#d8dee4",
    ways=("#6e7781", "#b45f06", "#0072b2"),
    steps=("#56b4e9", "#e69f00", "#2fa583", "#e69f00", "#c88bb0"),
    inside="#101418",
)
DARK = Theme(
    text="#d0d4d9",
    grid="#3a4048",
    ways=("#a0a8b0", "#f0a040", "#56b4e9"),
    steps=("#56b4e9", "#e69f00", "#2fa583", "#e69f00", "#c88bb0"),
    inside="#101418",
)


def draw_bytes(record: dict[str, Any], theme: Theme) -> None:
    """Draw the bytes that each step of a round moves, to scale, and the times measured."""
    _, axes = plt.subplots(figsize=(5, 3.4), layout="constrained")
    seconds = {(row["case"], row["contender"]): row["seconds"] for row in record["rows"]}
    for position, (way, models) in enumerate(MODELS.items()):
        begin = 0
        for step, count in enumerate(models):
            if count:
                axes.barh(position, count, left=begin, color=theme.steps[step], height=0.5)
                place = begin + count / 2, position
                axes.text(*place, str(count), ha="center", va="center", color=theme.inside)
            begin += count
        times = " / ".join(_time(seconds[size, way]) for size in ("1 MB", "100 MB"))
        axes.text(0, position - 0.34, f"{NAMES[way]}: {begin} models, {times}", va="bottom")
    axes.set_ylim(2.4, -0.75)
    axes.set_axis_off()
    handles = [plt.Rectangle((0, 0), 1, 1, color=theme.steps[i]) for i in (0, 1, 2, 4)]
    axes.legend(
        *(handles, [STEPS[i] for i in (0, 1, 2, 4)]),
        loc="upper center",
        bbox_to_anchor=(0.5, 0.02),
        ncols=2,
        frameon=False,
        handlelength=1.0,
    )


def draw_times(record: dict[str, Any], theme: Theme) -> None:
    """Draw the time of a round against the size of the model."""
    _, axes = plt.subplots(figsize=(5, 4), layout="constrained")
    rows = [row for row in record["rows"] if ": " not in row["case"]]
    for way, colour in zip(MODELS, theme.ways, strict=True):
        points = [
            (_bytes(row["case"]), 1e3 * row["seconds"]) for row in rows if row["contender"] == way
        ]
        sizes, times = zip(*points, strict=True)
        axes.loglog(sizes, times, "o-", color=colour, lw=2, ms=5)
        axes.annotate(
            *(NAMES[way], (sizes[0], times[0])),
            xytext=(0, 10),
            textcoords="offset points",
            color=colour,
        )
    fastest = max(record["limits"].values())
    ends = (_bytes("1 MB"), _bytes("100 MB"))
    traffic = [1e3 * sum(MODELS["flatweights"]) * size / fastest for size in ends]
    axes.loglog(ends, traffic, "--", color=theme.text, lw=1)
    axes.text(2.5 * ends[0], traffic[0], "memory traffic\nof shared memory", va="center")
    axes.set_xlabel("model, in 100 variables")
    axes.set_ylabel("a round of 4 workers, ms")
    names = list(dict.fromkeys(row["case"] for row in rows))
    axes.set_xticks([_bytes(name) for name in names], names)
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(color=theme.grid, lw=0.7)
    axes.spines[["top", "right"]].set_visible(False)


def draw_hostile(record: dict[str, Any], theme: Theme) -> None:
    """Draw the accuracy by round with hostile clients, for the mean and for robust rules."""
    _, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
    colours = (theme.ways[0], *theme.steps[:3], theme.steps[4])
    for (name, accuracies), colour in zip(record["accuracy"].items(), colours, strict=True):
        rounds = range(1, len(accuracies) + 1)
        axes.plot(rounds, accuracies, "o-", color=colour, lw=2, ms=4, label=name)
    axes.set_xlabel("round")
    axes.set_ylabel("accuracy")
    axes.set_ylim(0, 1)
    axes.grid(color=theme.grid, lw=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, labelcolor=theme.text, loc="center right", bbox_to_anchor=(1, 0.34))


def draw_links(record: dict[str, Any], theme: Theme) -> None:
    """Draw the bytes over the busiest link between nodes, against the workers of each node."""
    _, axes = plt.subplots(figsize=(5, 4), layout="constrained")
    workers = range(1, 9)
    far = NODES - 1
    lines: dict[str, list[float]] = {
        "guide's loop, and through the driver": [far * n for n in workers],
        "agents": [far / NODES * (1 + min(n, 2)) for n in workers],
        'agents, reduce_dtype="float32"': [far / NODES * 2 for n in workers],
    }
    colours = (theme.ways[0], theme.ways[2], theme.ways[1])
    for (name, models), colour, above in zip(lines.items(), colours, (8, 7, -17), strict=True):
        axes.plot(workers, models, "o-", color=colour, lw=2, ms=5)
        axes.annotate(
            *(name, (workers[-1], models[-1])),
            xytext=(0, above),
            textcoords="offset points",
            ha="right",
            color=colour,
        )
    axes.set_yscale("log")
    axes.set_ylim(1, 32)
    axes.set_yticks([1, 1.5, 2.25, 3, 6, 12, 24])
    axes.minorticks_off()
    axes.set_xlabel(f"workers on each of {NODES} nodes")
    axes.set_ylabel("models over the busiest link, one way")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(color=theme.grid, lw=0.7)
    axes.spines[["top", "right"]].set_visible(False)


def draw_faults(record: dict[str, Any], theme: Theme) -> None:
    """Draw the steps of each second of runs with faults, and a line for each fault."""
    _, all_axes = plt.subplots(
        len(record), figsize=(7, 1.5 * len(record)), sharex=True, layout="constrained"
    )
    for axes, (mode, run) in zip(all_axes, record.items(), strict=True):
        times = [fault["at"] for fault in run["faults"]]
        axes.vlines(times, 0, max(run["steps"]), color=theme.ways[1], lw=1)
        axes.step(range(len(run["steps"])), run["steps"], color=theme.ways[2], lw=1)
        axes.set_title(mode, loc="left", fontsize=11, color=theme.text)
        axes.set_ylim(bottom=0)
        axes.grid(color=theme.grid, lw=0.7)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[-1].set_xlabel("seconds")
    all_axes[len(record) // 2].set_ylabel("steps a second")


def draw_scale(record: list[dict[str, float]], theme: Theme) -> None:
    """Draw the seconds of a call against the nodes, for each link and size of model."""
    _, all_axes = plt.subplots(1, 2, figsize=(7, 4), sharey=True, layout="constrained")
    colours = (*theme.ways, theme.text)
    for axes, bits in zip(all_axes, sorted({row["bits"] for row in record}), strict=True):
        for nbytes, colour in zip(sorted({row["bytes"] for row in record}), colours, strict=True):
            rows = [row for row in record if (row["bits"], row["bytes"]) == (bits, nbytes)]
            nodes, seconds = zip(*((row["nodes"], row["seconds"]) for row in rows), strict=True)
            axes.plot(nodes, seconds, "o-", color=colour, lw=2, ms=4)
            size = f"{nbytes / 1e9:g} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:g} MB"
            axes.annotate(
                *(size, (nodes[-1], seconds[-1])),
                xytext=(0, 6),
                textcoords="offset points",
                ha="right",
                color=colour,
            )
        axes.set_title(f"{bits / 1e9:g} Gbit/s", loc="left", fontsize=11, color=theme.text)
        axes.set_xscale("log", base=2)
        axes.set_xticks([2, 8, 32, 125])
        axes.xaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.set_yscale("log")
        axes.set_xlabel("nodes of 8 members")
        axes.grid(color=theme.grid, lw=0.7)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[0].set_ylabel("seconds of a call, simulated")


# By name: the record that the figure shows, if it was measured, and what draws it.
FIGURES: dict[str, tuple[str, Callable[[Any, Theme], None]]] = {
    "bytes-of-a-round": ("rounds", draw_bytes),
    "time-of-a-round": ("rounds", draw_times),
    "hostile-clients": ("hostile", draw_hostile),
    "steps-with-faults": ("chaos", draw_faults),
    "bytes-between-nodes": ("", draw_links),
    "seconds-at-scale": ("scale", draw_scale),
}


def _bytes(size: str) -> float:
    number, unit = size.split()
    return float(number) * {"kB": 1e3, "MB": 1e6}[unit]


def _time(seconds: float) -> str:
    milliseconds = 1e3 * seconds
    return f"{milliseconds:.0f} ms" if milliseconds >= 10 else f"{milliseconds:.1f} ms"


def main() -> None:
    """Draw all figures in both colours."""
    for colours, theme in (("light", LIGHT), ("dark", DARK)):
        settings = {
            "svg.fonttype": "none",  # letters stay text: selectable, searchable, small
            "svg.hashsalt": "flatweights",
            "font.size": 11,  # to be read on a telephone, too: figures are narrow, letters large
            "text.color": theme.text,
            "axes.labelcolor": theme.text,
            "axes.edgecolor": theme.text,
            "xtick.color": theme.text,
            "ytick.color": theme.text,
        }
        for name, (source, draw) in FIGURES.items():
            record = json.loads((FOLDER / f"{source}.json").read_text()) if source else {}
            with mpl.rc_context(settings):
                draw(record, theme)
                file = FOLDER / f"{name}-{colours}.svg"
                plt.savefig(file, transparent=True, metadata={"Date": None})
                plt.close()


if __name__ == "__main__":
    mpl.use("Agg")
    main()
