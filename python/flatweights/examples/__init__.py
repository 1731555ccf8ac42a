"""Programs to run, to read and to copy: ``flatweights examples`` lists them.

Each is one file. What they share is in this module: options, the start of Ray, and what is
printed and drawn at the end. Nothing of it has to do with how weights travel, except for
`time_exchange`, which measures that.
"""

import argparse
import contextlib
import errno
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from flatweights._arguments import (
    PLOT_SUFFIXES,
    fraction,
    integer,
    output_file,
    plot_file,
    positive,
)
from flatweights._supervise import supervise

if TYPE_CHECKING:
    from flatweights.ray import WorkerGroup

__all__ = [
    "Exchange",
    "Panel",
    "draw",
    "explain",
    "fraction",
    "integer",
    "make_parser",
    "output_file",
    "positive",
    "prepare_tensorflow",
    "print_table",
    "run",
    "start_ray",
    "time_exchange",
]

_ENVIRONMENT = {  # actors inherit it
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # or Ray warns that this will be the default
    "RAY_USAGE_STATS_ENABLED": "0",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_ENABLE_ONEDNN_OPTS": "0",
}
_COLOURS = ("#0b5fa5", "#e07b00", "#66a182", "#d1495b", "#8d6fb8", "#8d96a3")
STYLE = {
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "font.size": 9.5,
    "legend.frameon": False,
}
"""Matplotlib's settings for all pictures."""


def make_parser(
    description: str | None, plot: str, **numbers: tuple[int, str]
) -> argparse.ArgumentParser:
    """Return a parser of a program's command line, with ``--seed`` and ``--plot``.

    Args:
        description: What ``--help`` says first: the docstring of the program.
        plot: What ``--plot`` draws.
        **numbers: By name, options that are integers of 1 or more: default and help.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, (default, text) in numbers.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=integer(1),
            default=default,
            metavar="N",
            help=f"{text}; default: %(default)s",
        )
    parser.add_argument(
        "--seed",
        type=integer(0, 2**32 - 1),
        default=0,
        metavar="N",
        help="of the data and the first weights; default: %(default)s",
    )
    parser.add_argument(
        "--plot",
        type=plot_file,
        metavar="FILE",
        help=f"draw {plot} ({', '.join(PLOT_SUFFIXES)})",
    )
    return parser


def run(main: Callable[[], None], *, grace: float = 0.0) -> NoReturn:
    """Run a program; none of its processes outlives it, and Ctrl-C ends it with one line.

    Args:
        main: The program.
        grace: Seconds that it has to deal with the `KeyboardInterrupt` of Ctrl-C; with 0 it is
            ended at once.

    Raises:
        SystemExit: At the end.
    """

    def explained() -> None:
        try:
            main()
        except Exception as error:
            raise SystemExit(explain(error)) from error

    sys.exit(supervise(explained, grace=grace))


def explain(error: Exception) -> str:
    """Return one line that says what failed and what to do about it.

    Raises:
        Exception: ``error``, if it is a mistake of the program itself.
    """
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = ": free some space, or choose another folder" if full else ""
        return f"{where}{error.strerror or error}{remedy}"
    if "ray" not in sys.modules:
        raise error
    import ray

    from flatweights.ray import WorkerError

    if isinstance(error, WorkerError):
        return "; ".join(f"rank {rank}: {_in_a_line(e)}" for rank, e in error.failed.items())
    if isinstance(error, ray.exceptions.RayError):
        return _in_a_line(error)
    raise error


def _in_a_line(error: BaseException) -> str:
    import ray

    error = getattr(error, "cause", None) or error  # what a worker raised, not Ray's wrapping
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip() or "no reason given"
    lines = text.splitlines()
    # Of an error in the constructor of an actor, the last line of the traceback says which.
    line = lines[-1 if "creation task" in lines[0] else 0].strip()
    remedy = ""
    if isinstance(error, ray.exceptions.ActorDiedError) and "creation task" not in lines[0]:
        remedy = " Start again; if memory was short, with fewer workers."
    if isinstance(error, ray.exceptions.ObjectStoreFullError | ray.exceptions.OutOfDiskError):
        remedy = " Free memory in /dev/shm, or space where Ray spills (RAY_TMPDIR)."
    return f"{type(error).__name__}: {line}{remedy}"


def start_ray(cpus: int) -> None:
    """Start Ray for actors that want ``cpus`` in all, however few cores there are.

    A Ray that runs in this process is used, and with ``RAY_ADDRESS`` set that cluster.

    Raises:
        SystemExit: If it does not start.
    """
    import ray

    if ray.is_initialized():
        return
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    remedy = "is the cluster there? Without RAY_ADDRESS, one is started here"
    if os.environ.get("RAY_ADDRESS", "local") == "local":
        cpus = max(cpus, os.cpu_count() or 1)
        options |= {"address": "local", "num_cpus": cpus, "include_dashboard": False}
        remedy = "it needs a folder to write to (RAY_TMPDIR, /tmp), with some free space"
    try:
        ray.init(**options)
    except Exception as error:
        if "timed out" in str(error):
            remedy = "is the machine busy? RAY_raylet_start_wait_time_s=120 gives it longer"
        raise SystemExit(f"Ray did not start: {_in_a_line(error)}: {remedy}") from error


def prepare_tensorflow(*, threads: int = 1, deterministic: bool = True, gpus: bool = False) -> None:
    """Import TensorFlow, without what it logs as it starts; to be called before it is used.

    Does no more than that if TensorFlow is in use already.

    Args:
        threads: For one operation. With 1, several processes do not stand in each other's way.
        deterministic: Give the same bits in every run.
        gpus: Use those that there are. A process takes the memory of all that it sees.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with _silent():
        import tensorflow as tf
    with contextlib.suppress(RuntimeError):  # it is in use
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(1)
        if not gpus:
            tf.config.set_visible_devices([], "GPU")
        if deterministic:
            tf.config.experimental.enable_op_determinism()


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Drop what C++ writes to the standard error: no setting stops TensorFlow's first lines."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


class Exchange(NamedTuple):
    """Seconds of one round's exchange: get, average and set, without any computation.

    Attributes:
        flat: As one buffer, by a `WorkerGroup`.
        dicts: As a dict of arrays, as in Ray's guide.
    """

    flat: float
    dicts: float

    def __str__(self) -> str:
        return (
            f"exchange per round: {1e3 * self.flat:.1f} ms as one buffer, "
            f"{1e3 * self.dicts:.1f} ms as a dict of arrays ({self.dicts / self.flat:.1f} times)"
        )


def time_exchange(group: "WorkerGroup", rounds: int = 7) -> Exchange:
    """Return the median times of ``rounds`` rounds of either kind, taken in turn.

    Afterwards all workers have the average of the weights that they had.

    Args:
        group: The workers. They need no methods besides those of `FlatWorker`.
        rounds: How many to time, after one of each that is not.
    """
    import ray

    actors = list(group.actors().values())

    def flat() -> None:
        group.broadcast(group.average())

    def dicts() -> None:
        replies = ray.get([actor.__ray_call__.remote(_read_dict) for actor in actors])
        mean = {k: sum(one[k] for one in replies) / len(replies) for k in replies[0]}
        ref = ray.put({k: v.astype(replies[0][k].dtype) for k, v in mean.items()})
        ray.get([actor.__ray_call__.remote(_assign_dict, ref) for actor in actors])

    seconds: dict[Callable[[], None], list[float]] = {flat: [], dicts: []}
    for _ in range(rounds + 1):
        for exchange, times in seconds.items():
            begin = time.perf_counter()
            exchange()
            times.append(time.perf_counter() - begin)
    return Exchange(*(median(times[1:]) for times in seconds.values()))


def _read_dict(worker: Any) -> dict[str, Any]:
    weights = worker.variables
    if weights.sess is not None:
        return dict(weights.sess.run(dict(weights.variables)))
    return {name: variable.numpy() for name, variable in weights.variables.items()}


def _assign_dict(worker: Any, arrays: dict[str, Any]) -> None:
    weights = worker.variables
    if weights.sess is None:
        for name, variable in weights.variables.items():
            variable.assign(arrays[name])
        return
    feeds = {weights.placeholders[name]: array for name, array in arrays.items()}
    weights.sess.run([weights.assignment_nodes[name] for name in arrays], feeds)


def print_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print ``rows`` below ``titles``: the first column to the left, the others to the right.

    Where that is too wide for the terminal, titles become the first column; where there are too
    many rows for that, each gets a table of its own. Nothing is cut.
    """
    from rich.console import Console

    rows = list(rows)
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 200  # a file has no edge to wrap at
    wide = console.options.update(width=10_000)  # measured for a narrow one, all would fit

    def fits(table: Any) -> bool:
        return bool(console.measure(table, options=wide).minimum <= console.width)

    whole, turned = [titles, *rows], list(zip(titles, *rows, strict=True))
    apart = [[*zip(titles, row, strict=True)] for row in rows]
    for tables in ([whole], [turned], apart):
        if all(fits(_table(lines)) for lines in tables):
            break
    for lines in tables:
        table = _table(lines)
        if not fits(table):
            for column in table.columns:
                column.no_wrap = False  # which then folds
        console.print(table)


def _table(lines: Sequence[Sequence[str]]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for title in lines[0]:
        justify: Any = "right" if table.columns else "left"
        table.add_column(title, justify=justify, no_wrap=True, overflow="fold")
    for line in lines[1:]:
        table.add_row(*line)
    return table


class Panel(NamedTuple):
    """One pair of axes.

    Attributes:
        title: What is shown.
        xlabel: What is along the horizontal axis.
        curves: By name, where points are: along the horizontal axis, and the vertical one.
        scale: Of the vertical axis.
        alike: Curves that should lie on each other: the first ones are broad bands below.
    """

    title: str
    xlabel: str
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    scale: str = "linear"
    alike: bool = False


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
        row = figure.subplots(1, len(panels), squeeze=False).flat
        for axes, panel in zip(row, panels, strict=True):
            draw_panel(axes, panel)
        figure.savefig(path, dpi=150)


def draw_panel(axes: Any, panel: Panel) -> None:
    """Draw the curves of ``panel``."""
    count = len(panel.curves)
    for i, (name, (x, y)) in enumerate(panel.curves.items()):
        below = count - 1 - i if panel.alike else 0
        axes.plot(
            x,
            y,
            marker="o" if len(x) <= 40 else "",
            ms=3 + 3 * below,
            lw=1.5 + 2.5 * below,
            alpha=0.45 if below else 1.0,
            color=_COLOURS[i % len(_COLOURS)],
            label=name,
        )
    axes.set(title=panel.title, xlabel=panel.xlabel, yscale=panel.scale)
    axes.grid(axis="y", color="#e6e8eb")
    axes.set_axisbelow(True)
    if count > 1:
        axes.legend()
