"""Programs to run, to read and to copy: ``flatweights examples`` lists them.

Each program is one file. This module holds what they share: options, the handwritten digits, the
start of Ray and TensorFlow, the returns of a policy, the table and the plot at the end.
"""

import argparse
import contextlib
import errno
import logging
import os
import sys
import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from flatweights._arguments import PLOT_SUFFIXES, plot_file
from flatweights._arguments import fraction as fraction
from flatweights._arguments import integer as integer
from flatweights._arguments import output_file as output_file
from flatweights._arguments import positive as positive
from flatweights._supervise import supervise

if TYPE_CHECKING:
    from flatweights.ray import WorkerGroup

STYLE = {
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "font.size": 9.5,
    "legend.frameon": False,
}
"""Matplotlib's settings for all plots."""
EPISODES = 100
"""The number of a policy's last episodes whose mean return counts."""
_ENVIRONMENT = {  # actors inherit it
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else Ray warns that this will be the default
    "RAY_USAGE_STATS_ENABLED": "0",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_ENABLE_ONEDNN_OPTS": "0",
}


def make_parser(
    description: str | None, plot: str, **numbers: tuple[int, str]
) -> argparse.ArgumentParser:
    """Return a parser of a program's command line, with ``--seed`` and ``--plot``.

    Args:
        description: The docstring of the program.
        plot: What ``--plot`` draws.
        **numbers: By name, the default and the help of options that are integers of 1 or more.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=_Help)
    add = parser.add_argument
    for name, (default, text) in numbers.items():
        add(f"--{name.replace('_', '-')}", type=integer(1), default=default, help=text)
    seed = "of the data and the first weights"
    add("--seed", type=integer(0, 2**32 - 1), default=0, help=seed)
    add("--plot", type=plot_file, help=f"file to draw {plot} to ({', '.join(PLOT_SUFFIXES)})")
    return parser


def make_policy_parser(description: str | None, updates: int) -> argparse.ArgumentParser:
    """Return a parser of the command line of a program in which a policy learns."""
    parser = make_parser(
        description,
        "the returns",
        workers=(2, "actors that play"),
        updates=(updates, "at most"),
        goal=(475, f"mean return of {EPISODES} episodes to stop at"),
    )
    parser.add_argument("--save", type=output_file, help="a file for the weights")
    return parser


class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Keeps the lines of the description, and says the default of each option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        has_none = action.default is None or action.default is False
        return action.help if has_none else super()._get_help_string(action)


class Digits(NamedTuple):
    """Images, float32 of shape (n, 64) from 0 to 1, and their labels, int64."""

    images: NDArray[np.float32]
    labels: NDArray[np.int64]

    def shard(self, rank: int, workers: int) -> "Digits":
        """Return the digits of one worker out of ``workers``."""
        return Digits._make(np.array_split(part, workers)[rank] for part in self)


def load_digits(seed: int) -> tuple[Digits, Digits]:
    """Return scikit-learn's handwritten digits: 1,438 to train on, and 359 to test with.

    The split depends on ``seed``, and so does their order.
    """
    from sklearn import datasets

    images, labels = datasets.load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    test, train = np.split(np.random.default_rng(seed).permutation(len(labels)), [359])
    return Digits(images[train], labels[train]), Digits(images[test], labels[test])


def run(main: Callable[[], None]) -> NoReturn:
    """Run a program; none of its processes outlives it, and Ctrl-C ends it with one line.

    Raises:
        SystemExit: At the end.
    """

    def explained() -> None:
        try:
            main()
        except Exception as error:
            raise SystemExit(explain(error)) from error

    sys.exit(supervise(explained))


def explain(error: Exception) -> str:
    """Return one line that says what failed and what to do about it.

    Raises:
        Exception: ``error``, if it is a mistake of the program itself.
    """
    if isinstance(error, OSError):
        file = f"{error.filename}: " if error.filename else ""
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = ": free some space, or choose another folder" if is_full else ""
        return f"{file}{error.strerror or error}{remedy}"
    if "ray" in sys.modules:
        import ray

        from flatweights.ray import StoreTooSmallError, WorkerError

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


def start_ray(cpus: int, **reserved: int) -> None:
    """Start Ray for actors that want ``cpus`` in all, however few cores there are.

    A Ray that runs in this process is used, and with ``RAY_ADDRESS`` set that cluster.

    Args:
        cpus: At least so many; a cluster may have fewer, and actors share them.
        **reserved: By name, what actors reserve as long as they live: ``CPU``, ``GPU``.

    Raises:
        SystemExit: If it does not start, or has less than is ``reserved``: actors would wait for
            ever.
    """
    import ray

    if not ray.is_initialized():
        _init_ray(cpus)
    for name, wanted in reserved.items():
        there = ray.cluster_resources().get(name, 0)
        if there < wanted:
            raise SystemExit(f"{name}s of Ray: expected at least {wanted}, got {there:g}")


def _init_ray(cpus: int) -> None:
    import ray

    os.environ.update(_ENVIRONMENT | dict(os.environ))
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
    """Import TensorFlow quietly and set it up; to be called before its first use.

    Once TensorFlow is in use, this changes nothing.

    Args:
        threads: Threads of one operation. With 1, several processes do not compete for cores.
        deterministic: Whether every run gives the same bits.
        gpus: Whether to use the GPUs. A process takes the memory of all GPUs that it sees.
    """
    os.environ.update(_ENVIRONMENT | dict(os.environ))
    sys.stderr.flush()
    with contextlib.ExitStack() as stack, Path(os.devnull).open("w") as nowhere:
        stderr = os.dup(2)  # no setting stops the first lines of TensorFlow's C++
        stack.callback(os.close, stderr)
        stack.callback(os.dup2, stderr, 2)
        os.dup2(nowhere.fileno(), 2)
        import tensorflow as tf
    with contextlib.suppress(RuntimeError):  # it is in use
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(1)
        if not gpus:
            tf.config.set_visible_devices([], "GPU")
        if deterministic:
            tf.config.experimental.enable_op_determinism()


def time_exchange(group: "WorkerGroup", rounds: int = 7) -> str:
    """Return how long a round's exchange takes: get, average and set, without any computation.

    Medians: as one buffer by the `WorkerGroup`, and as a dict of arrays through Ray's object store.
    Afterwards all workers have the weights of the first one.
    """
    import ray

    actors = list(group.actors().values())
    # A group that has sent no weights refuses a worker that was restarted.
    group.broadcast(ray.get(actors[0].get_weights.remote()))

    def flat() -> None:
        group.broadcast(group.average())

    def dicts() -> None:
        replies = ray.get([actor.__ray_call__.remote(_get_dict) for actor in actors])
        average = {k: sum(reply[k] for reply in replies) / len(replies) for k in replies[0]}
        ref = ray.put({k: v.astype(replies[0][k].dtype) for k, v in average.items()})
        ray.get([actor.set_weights.remote(ref) for actor in actors])

    ours, theirs = (
        1e3 * median(timeit.repeat(exchange, number=1, repeat=rounds + 1)[1:])
        for exchange in (flat, dicts)
    )
    ratio = f"{theirs:.1f} ms as a dict of arrays ({theirs / ours:.1f} times)"
    return f"exchange per round: {ours:.1f} ms as one buffer, {ratio}"


def _get_dict(worker: Any) -> dict[str, Any]:
    return {name: array.copy() for name, array in worker.get_weights().items()}


def print_table(rows: Sequence[Mapping[str, object]]) -> None:
    """Print ``rows`` as a table; where that is too wide, one table per row. No number is cut."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    def table(titles: Sequence[object], *lines: Sequence[object]) -> Table:
        table = Table(box=box.SIMPLE_HEAD)
        for i, title in enumerate(titles):
            table.add_column(str(title), justify="right" if i else "left", overflow="fold")
        for line in lines:
            table.add_row(*map(str, line))
        return table

    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 200  # a file has no edge to wrap at
    whole = table(list(rows[0]), *(list(row.values()) for row in rows))
    needed = console.measure(whole, options=console.options.update(width=10_000)).maximum
    for each in [whole] if needed <= console.width else [table(*row.items()) for row in rows]:
        console.print(each)


class Panel(NamedTuple):
    """One pair of axes.

    Attributes:
        title: What is shown.
        xlabel: What is along the horizontal axis.
        curves: By name, the horizontal and the vertical coordinates of points.
        scale: Of the vertical axis.
    """

    title: str
    xlabel: str
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    scale: str = "linear"

    def draw(self, axes: Any) -> None:
        """Draw the curves: the first ones as bands, seen below others that agree."""
        for above, (name, (x, y)) in zip(
            reversed(range(len(self.curves))), self.curves.items(), strict=True
        ):
            marker = {"marker": "o", "ms": 3 + 2 * above} if len(x) <= 40 else {}
            axes.plot(x, y, lw=1.5 + 2 * above, alpha=0.5 if above else 1, label=name, **marker)
            axes.xaxis.get_major_locator().set_params(integer=np.asarray(x).dtype.kind == "i")
        axes.set(title=self.title, xlabel=self.xlabel, yscale=self.scale)
        axes.grid(axis="y", color="#e6e8eb")
        axes.set_axisbelow(True)
        if len(self.curves) > 1:
            axes.legend()


def report(
    rows: Sequence[Mapping[str, object]], plot: Path | None, title: str, *panels: Panel
) -> None:
    """Print ``rows`` as a table, and draw ``panels`` from left to right if a ``plot`` is wanted.

    Raises:
        OSError: If the plot cannot be written.
    """
    print_table(rows)
    if plot is not None:
        with open_figure(plot, title, width=1.0 + 5.0 * len(panels), height=4.0) as figure:
            row = figure.subplots(1, len(panels), squeeze=False).flat
            for axes, panel in zip(row, panels, strict=True):
                panel.draw(axes)


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


class Returns:
    """The returns of a policy that learns, until the mean of the last episodes reaches the goal.

    Attributes:
        is_over: Whether the goal is reached, or all updates are made.
    """

    def __init__(self, options: argparse.Namespace, every: int) -> None:
        """Print a line per ``every`` updates; ``options`` are those of a `make_policy_parser`."""
        self._options, self._every = options, every
        self._returns: list[float] = []
        self._curve: list[tuple[float, float]] = []  # by update: thousands of steps, mean return
        self._steps, self._mean = 0, 0.0
        self._is_reached = self.is_over = False

    def add(self, steps: int, returns: Sequence[float]) -> None:
        """Add the steps of one update, and the returns of the episodes that ended with it."""
        self._steps += steps
        self._returns += returns
        self._mean = mean(self._returns[-EPISODES:] or [0.0])
        self._curve.append((1e-3 * self._steps, self._mean))
        updates, has_enough = len(self._curve), len(self._returns) >= EPISODES
        self._is_reached = has_enough and self._mean >= self._options.goal
        self.is_over = self._is_reached or updates == self._options.updates
        if updates % self._every == 0 or self._is_reached:
            line = f"update {updates}: {self._steps} steps, mean return {self._mean:.1f}"
            print(line, flush=True)

    def report(self, title: str, cells: Mapping[str, object]) -> None:
        """Print a table, with ``cells`` at its end, and draw the plot if one is wanted.

        Raises:
            SystemExit: If the goal is not reached.
        """
        row = {
            "updates": len(self._curve),
            "environment steps": f"{self._steps:,}",
            f"last {EPISODES} episodes": f"{self._mean:.1f}",
            **cells,
        }
        x, y = zip(*self._curve, strict=True)
        panel = Panel("return", "thousand steps", {"": (x, y)})
        report([row], self._options.plot, f"CartPole, {title}", panel)
        if not self._is_reached:
            goal = self._options.goal
            raise SystemExit(f"mean return {self._mean:.1f}, not {goal}: it needs more --updates")
