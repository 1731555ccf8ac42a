"""Programs to run, to read and to copy: ``flatweights examples`` lists them.

Each program is one file that needs no other, and uses public names only. With this module, the
commands ``flatweights examples`` and ``flatweights demo`` end all processes of a program, report
an error in one line, and draw the curves that the program returns.
"""

import contextlib
import errno
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from flatweights.examples._supervise import supervise

STYLE = {
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "font.size": 11,
    "legend.frameon": False,
}
"""Matplotlib's settings for all plots."""
_ENVIRONMENT = {  # actors inherit it
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",  # actors without GPUs see none, and no warning
    "RAY_LOG_TO_DRIVER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_ENABLE_ONEDNN_OPTS": "0",
}

Curves = Mapping[str, Mapping[str, Sequence[Any]]]
"""By title, by name: vertical coordinates, or a pair of horizontal and vertical ones. In a title,
the words after the last " by " name the horizontal axis."""

Points = Mapping[str, tuple[Sequence[float], Sequence[float]]]
"""By name: horizontal and vertical coordinates."""


def run(main: Callable[[], object]) -> NoReturn:
    """Run a program; none of its processes outlives it, and Ctrl-C ends it with one line.

    Raises:
        SystemExit: At the end.
    """
    os.environ.update(_ENVIRONMENT | dict(os.environ))

    def explained() -> None:
        if gone := _gone_cluster():
            print(gone, file=sys.stderr, flush=True)
        try:
            main()
        except Exception as error:
            raise SystemExit(explain(error)) from error

    sys.exit(supervise(explained))


def _gone_cluster() -> str:
    """Return a line if Ray would wait for a cluster that has ended; it does so for minutes."""
    if os.environ.get("RAY_ADDRESS"):
        return ""
    file = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")
    try:
        host, _, port = file.read_text().strip().rpartition(":")
    except OSError:  # there is none, so Ray starts one
        return ""
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, ValueError):
        return (
            f"no Ray answers at the address in {file}: delete that file, or set RAY_ADDRESS=local"
        )
    return ""


def explain(error: Exception) -> str:
    """Return one line that says what failed and what to do about it.

    Raises:
        Exception: ``error``, if it is a mistake of the program itself.
    """
    import ray

    from flatweights.ray import StoreTooSmallError, WorkerError

    frames = traceback.walk_tb(error.__traceback__)
    modules = {frame.f_globals.get("__name__") for frame, _ in frames}
    if "ray._private.worker" in modules and not ray.is_initialized():
        return f"Ray did not start: {_in_a_line(error)}: {_remedy_for_start(error)}"
    if isinstance(error, OSError):
        file = f"{error.filename}: " if error.filename else ""
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = ": free some space, or choose another folder" if is_full else ""
        return f"{file}{error.strerror or error}{remedy}"
    if isinstance(error, WorkerError):
        return "; ".join(f"rank {rank}: {_in_a_line(e)}" for rank, e in error.failed.items())
    if isinstance(error, (ray.exceptions.RayError, StoreTooSmallError)):
        return _in_a_line(error)
    raise error


def _in_a_line(error: Exception) -> str:
    import ray

    from flatweights.ray import Round

    reason: str = Round(None, (), {0: error}).record()["failed"]["0"]
    if isinstance(error, (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError)):
        return f"{reason} Free memory in /dev/shm, or space where Ray spills (RAY_TMPDIR)."
    if isinstance(error, ray.exceptions.ActorDiedError) and "creation task" not in str(error):
        return f"{reason} Start again; if memory was short, with fewer workers."
    return reason


def _remedy_for_start(error: Exception) -> str:
    if "timed out" in str(error):
        return "is the machine busy? RAY_raylet_start_wait_time_s=120 gives it longer"
    if os.environ.get("RAY_ADDRESS", "local") != "local":
        return "is the cluster there? Without RAY_ADDRESS, one is started here"
    return "it needs a folder to write to (RAY_TMPDIR, /tmp), with some free space"


def plot(axes: Any, title: str, xlabel: str, curves: Points, scale: str = "linear") -> None:
    """Draw curves into one pair of axes; a curve that later ones cover is a band behind them.

    Args:
        axes: The axes of Matplotlib.
        title: The title above the axes.
        xlabel: The label of the horizontal axis.
        curves: The curves.
        scale: The scale of the vertical axis.
    """
    points = list(curves.values())
    for i, (name, (x, y)) in enumerate(curves.items()):
        above = sum(len(y) == len(z) and np.allclose(y, z, rtol=0.02) for _, z in points[i + 1 :])
        marker = {"marker": "o", "ms": 4 + 2 * above} if len(x) <= 40 else {}
        axes.plot(x, y, lw=1.5 + 2 * above, alpha=0.5 if above else 1, label=name, **marker)
        axes.xaxis.get_major_locator().set_params(integer=np.asarray(x).dtype.kind == "i")
    axes.set(title=title, xlabel=xlabel, yscale=scale)
    if scale == "log":
        number_ticks(axes.yaxis)
    axes.grid(axis="y", color="#e6e8eb")
    axes.set_axisbelow(True)
    if len(curves) > 1:
        axes.legend()


def number_ticks(axis: Any) -> None:
    """Put as many ticks on a logarithmic axis as fit, each with its number."""
    from matplotlib.ticker import LogLocator, NullLocator

    low, high = sorted(axis.get_view_interval())
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,), numticks=20))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(NullLocator())


def draw(path: Path, title: str, curves: Curves) -> None:
    """Draw the curves that the ``main`` of a program returns, one panel for each title.

    Raises:
        OSError: If the plot cannot be written.
    """
    with open_figure(path, title, width=1.0 + 5.0 * len(curves), height=4.0) as figure:
        row = figure.subplots(1, len(curves), squeeze=False).flat
        for axes, (heading, by_name) in zip(row, curves.items(), strict=True):
            name, _, xlabel = heading.rpartition(" by ")
            points = {
                k: (y[0], y[1]) if np.ndim(y) == 2 else (range(1, len(y) + 1), y)
                for k, y in by_name.items()
            }
            values = np.concatenate([y for _, y in points.values()])
            is_wide = values.min() > 0 and values.max() > 30 * values.min()
            plot(axes, name, xlabel, points, "log" if is_wide else "linear")


@contextlib.contextmanager
def open_figure(path: Path, title: str, width: float, height: float) -> Iterator[Any]:
    """Yield an empty figure of a size in inches, and write it to ``path`` at the end."""
    import matplotlib as mpl  # takes a second
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        figure.suptitle(title, fontsize=12)
        yield figure
        figure.savefig(path, dpi=150)
