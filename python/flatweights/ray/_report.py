"""A round in the log, in the metrics, and on a progress bar."""

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator

from flatweights.ray._errors import reason_in_a_line
from flatweights.ray._metrics import METRICS
from flatweights.ray._round import Round, ranks_left_out

_log = logging.getLogger("flatweights")


def report(result: Round, *, already_named: Collection[int] = ()) -> None:
    """Count a round, and log a line about it.

    If the average lacks ranks that no warning has named, the line is a warning with the reasons;
    else it is for information.

    Args:
        result: The round.
        already_named: Ranks that a warning has named.
    """
    left_out = ranks_left_out(result)
    ways = [way.split(":")[0] for way in result.ways.values()]
    seconds = {step: result.seconds[step] for step in _OWN if step in result.seconds}
    METRICS.count_round(len(result.used), left_out, result.nbytes, ways, seconds)
    lost = {*result.late, *result.failed}
    level = logging.WARNING if lost.difference(already_named) else logging.INFO
    if not _log.isEnabledFor(level):
        return
    name = "average" if result.number is None else f"round {result.number}"
    counts = [f"{len(result.used)} of {len(result.used) + len(lost)} ranks"]
    for reason, ranks in left_out.items():
        if ranks:
            counts.append(f"{len(ranks)} {reason} ({', '.join(map(str, ranks))})")
    steps = {step: value for step, value in result.seconds.items() if step != "round"}
    times = ", ".join(f"{step} {value:.3f}" for step, value in steps.items())
    reasons = "".join(
        f"; rank {rank}: {reason_in_a_line(error)}"
        for rank, error in result.failed.items()
        if rank not in already_named
    )
    _log.log(
        level,
        "flatweights: %s: %s, %.3f s (%s), %s%s",
        name,
        ", ".join(counts),
        result.total_seconds,
        times,
        _in_bytes(result) + _by_ways(result),
        reasons,
    )


_OWN = ("wait", "average", "round")
"""Steps that a round itself takes; sending the average counts where it is sent."""


def _in_bytes(result: Round) -> str:
    """Return how much was read, and sent if any was."""
    if not result.nbytes_sent:
        return readable_bytes(result.nbytes)
    return f"{readable_bytes(result.nbytes)} in, {readable_bytes(result.nbytes_sent)} out"


def _by_ways(result: Round) -> str:
    """Return how ranks were reached, and why some not by lanes; nothing, if none was by a lane."""
    ranks: dict[str, list[str]] = {}
    for rank, way in result.ways.items():
        ranks.setdefault(way, []).append(str(rank))
    if "lane" not in ranks:
        return ""
    if len(ranks) == 1:
        return " by lanes"
    texts = [f"{', '.join(of)} by {way}" for way, of in ranks.items()]
    return f" ({'; '.join(texts)})"


def readable_bytes(nbytes: int) -> str:
    """Return ``nbytes`` with three digits and a decimal unit."""
    value = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:,.0f} TB"


@contextlib.contextmanager
def rounds_bar(rounds: int) -> Iterator[Callable[[Round], None]]:
    """Show a progress bar of ``rounds``; yield the function to call after each round.

    It shows how many are done, and which ranks the last average is not of. It is drawn only on a
    terminal or in a notebook: a file would get fragments of it.

    Raises:
        ImportError: If ``rich`` is not installed.
    """
    try:
        from rich import progress
        from rich.console import Console
    except ImportError as error:
        raise ImportError("progress=True needs rich: pip install rich") from error
    console = Console()
    columns = (
        progress.TextColumn("rounds"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.description}"),
    )
    is_drawn = console.is_terminal or console.is_jupyter
    with progress.Progress(*columns, console=console, disable=not is_drawn) as bar:
        task = bar.add_task("", total=rounds)
        yield lambda result: bar.update(task, advance=1, description=_ranks(result))


def _ranks(result: Round) -> str:
    lost = sorted({*result.late, *result.failed})
    if not lost:
        return f"{len(result.used)} ranks"
    without = ", ".join(map(str, lost))
    return (
        f"[yellow]{len(result.used)} of {len(result.used) + len(lost)} ranks, without {without}[/]"
    )
