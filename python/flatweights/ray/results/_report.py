"""A round in the log, in the metrics, and on a progress bar."""

import collections
import contextlib
import functools
import itertools
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from ray.util.metrics import Counter, Gauge, Histogram

from flatweights._numbers import readable_bytes
from flatweights.ray import _clock
from flatweights.ray.results._round import Round, ranks_left_out
from flatweights.ray.support._errors import reason_in_a_line

_log = logging.getLogger("flatweights")

_DELAY = 0.1  # seconds until a round is in Ray's instruments

# Buckets of the histogram: 1, 2, 5 times 0.1 ms to 1,000 s.
_SECONDS = [factor * 10.0**power for power in range(-4, 4) for factor in (1, 2, 5)]

Count: TypeAlias = tuple[str, str, str]
"""A counter: one of the instruments, and a tag and its value, or two empty texts."""

_Added: TypeAlias = tuple[Mapping[Count, int], Mapping[str, float], int | None, int]
"""The arguments of `Metrics.add`."""

ROUND = "rounds", "", ""
FAILED_ROUND = "failed_rounds", "", ""
SENT, RECEIVED = ("bytes", "direction", "out"), ("bytes", "direction", "in")


class _Instruments:
    """Ray's instruments; Ray puts ``ray_`` before the names, ``_total`` behind a counter's."""

    def __init__(self) -> None:
        self.rounds = Counter("flatweights_rounds", "Rounds that gave an average.")
        self.failed_rounds = Counter("flatweights_failed_rounds", "Rounds that gave none.")
        self.ranks_used = Gauge("flatweights_ranks_used", "Ranks in the last average.")
        self.ranks_left_out = Counter(
            "flatweights_ranks_left_out",
            "Ranks left out of averages, counted in every round without them.",
            ("reason",),
        )
        self.bytes = Counter(
            "flatweights_bytes", "Bytes of weights from (in) and to (out) workers.", ("direction",)
        )
        self.transports = Counter(
            "flatweights_ranks_by_transport",
            "Ranks that rounds called, by transport.",
            ("transport",),
        )
        self.seconds = Histogram(
            "flatweights_round_seconds", "Seconds of each step of a round.", _SECONDS, ("step",)
        )
        # Ray computes the sum of a histogram from the middles of its buckets.
        self.seconds_in_all = Counter(
            "flatweights_step_seconds", "Seconds of each step, added up.", ("step",)
        )


class Metrics:
    """The metrics of this process, registered with Ray on first use.

    One call of an instrument takes 4 µs, a round of a group would make fifteen, and a round of a
    small model takes only 400 µs. So rounds are counted here, and a thread hands the counts to Ray
    every tenth of a second, as long as there are some: while all processors are busy, starting a
    thread takes milliseconds, and the round waits for it. Ray sends them on every ten seconds, or
    every ``metrics_report_interval_ms``. If Ray's agent is not installed (``ray[default]``), it
    does not send them.

    Attributes:
        works: Whether no error has occurred yet: an error ends the metrics, never a round.
    """

    def __init__(self) -> None:
        """Register nothing yet."""
        self.works = True
        self._lock = threading.RLock()  # held while the thread is started or ends
        self._thread: threading.Thread | None = None
        self._added: collections.deque[_Added] = collections.deque()

    @functools.cached_property
    def _to(self) -> _Instruments:
        return _Instruments()

    def add(
        self,
        counts: Mapping[Count, int] = {},
        seconds: Mapping[str, float] = {},
        used: int | None = None,
        rounds: int = 1,
    ) -> None:
        """Add to the counts, which are handed over soon; the caller does not change them any more.

        Args:
            counts: By counter.
            seconds: The seconds of each step, of all rounds together.
            used: The number of ranks in the last average.
            rounds: The number of rounds, whose mean is one observation of the histogram.
        """
        if self.works:
            self._added.append((counts, seconds, used, rounds))
            if self._thread is None:
                self._start()

    def _start(self) -> None:
        thread = threading.Thread(target=self._work, name="flatweights-metrics", daemon=True)
        with self._lock:
            if self._thread is None:
                # A signal handler that interrupts the start, which waits for the thread, may add.
                self._thread = thread
                try:
                    thread.start()
                except RuntimeError as error:
                    if not str(error).startswith("can't"):  # start a thread: a handler has raised
                        raise
                finally:
                    if thread.ident is None:  # the next call tries again
                        self._thread = None

    def _work(self) -> None:
        while True:
            _clock.sleep(_DELAY)
            with self._lock:
                # A thread that adds now either is seen here, or sees that there is no thread.
                own, self._thread = self._thread, None
                if not self._added:
                    return
                self._thread = own
            self.hand_over()

    def hand_over(self) -> None:
        """Hand the counts to Ray's instruments."""
        counts: collections.Counter[Count] = collections.Counter()
        seconds: list[tuple[str, float, int]] = []
        used: int | None = None
        with contextlib.suppress(IndexError):  # until there are no more
            while True:
                more, steps, last, rounds = self._added.popleft()
                counts.update(more)  # adds them
                seconds += [(step, spent, rounds) for step, spent in steps.items()]
                used = used if last is None else last
        if not (self.works and (counts or seconds)):
            return
        try:
            self._record(counts, seconds, used)
        except Exception as error:
            self.works = False
            _log.warning("no metrics of rounds from now on: %s", reason_in_a_line(error))

    def _record(
        self,
        counts: Mapping[Count, int],
        seconds: Iterable[tuple[str, float, int]],
        used: int | None,
    ) -> None:
        to: Any = self._to
        for (name, tag, value), count in counts.items():
            if count:  # Ray refuses to add zero
                getattr(to, name).inc(count, {tag: value} if tag else None)
        if used is not None:
            to.ranks_used.set(used)
        in_all: collections.defaultdict[str, float] = collections.defaultdict(float)
        for step, duration, rounds in seconds:
            to.seconds.observe(duration / rounds, {"step": step})
            in_all[step] += duration
        for step, total in in_all.items():
            if total > 0:
                to.seconds_in_all.inc(total, {"step": step})


METRICS = Metrics()


def report(result: Round, *, already_named: Collection[int] = (), has_sent: bool = False) -> None:
    """Count a round, and log a line about it.

    If ranks were late or have failed that no warning has named yet, the line is a warning with the
    reasons; otherwise it has the level INFO.

    Args:
        result: The round.
        already_named: Ranks that a warning has named.
        has_sent: Whether to count the bytes that it sent, if they were not counted before.
    """
    is_complete = not (result.late or result.failed or result.quarantined)
    left_out = {} if is_complete else ranks_left_out(result)
    counts: dict[Count, int] = {ROUND: 1, RECEIVED: result.nbytes}
    for reason, ranks in left_out.items():
        counts["ranks_left_out", "reason", reason] = len(ranks)
    if has_sent:
        counts[SENT] = result.nbytes_sent
    for transport in result.transports.values():
        by_transport = "transports", "transport", transport.partition(":")[0]
        counts[by_transport] = counts.get(by_transport, 0) + 1
    seconds = {step: result.seconds[step] for step in _OWN if step in result.seconds}
    METRICS.add(counts, seconds, len(result.used))
    lost = {*result.late, *result.failed}
    level = logging.WARNING if lost - {*already_named} else logging.INFO
    if not _log.isEnabledFor(level):
        return
    name = "average" if result.number is None else f"round {result.number}"
    total = len(result.used) + sum(map(len, left_out.values()))
    texts = [f"{len(result.used)} of {total} ranks"]
    for reason, ranks in left_out.items():
        texts.append(f"{len(ranks)} {reason} ({', '.join(map(str, ranks))})")
    texts[-1] += _news(result)
    steps = {step: value for step, value in result.seconds.items() if step != "round"}
    times = ", ".join(f"{step} {value:.3f}" for step, value in steps.items())
    reasons = "".join(
        f"; rank {rank}: {reason_in_a_line(error)}"
        for rank, error in result.failed.items()
        if rank not in already_named
    )
    _log.log(
        level,
        "%s: %s, %.3f s (%s), %s%s",
        name,
        ", ".join(texts),
        result.total_seconds,
        times,
        _in_bytes(result) + _by_transports(result),
        reasons,
    )


_OWN = ("wait", "average", "round")
"""The steps of a round itself; the time to send the average counts with the call that sends it."""


def _in_bytes(result: Round) -> str:
    """Return the bytes that were read, and those that were sent, if any, as text."""
    if not result.nbytes_sent:
        return readable_bytes(result.nbytes)
    return f"{readable_bytes(result.nbytes)} in, {readable_bytes(result.nbytes_sent)} out"


def _by_transports(result: Round) -> str:
    """Return the transport of each rank, with its reason if it is not shm; "" if none is shm."""
    ranks: dict[str, list[int]] = {}
    for rank, transport in result.transports.items():
        ranks.setdefault(transport, []).append(rank)
    if "shm" not in ranks:
        return ""
    if len(ranks) == 1:
        return " by shm"
    texts = [f"{', '.join(map(str, of))} by {transport}" for transport, of in ranks.items()]
    return f" ({'; '.join(texts)})"


@contextlib.contextmanager
def rounds_bar(rounds: int) -> Iterator[Callable[[Round], None]]:
    """Show a progress bar of ``rounds``; yield the function to call after each round.

    It shows the number of finished rounds, and the ranks that were left out of the last average.
    It is drawn only on a terminal or in a notebook, since a file would get fragments of it.

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
    in_notebook = console.is_jupyter
    is_drawn = console.is_terminal or in_notebook
    bar = progress.Progress(*columns, console=console, disable=not is_drawn, transient=in_notebook)
    try:
        with bar:
            task = bar.add_task("", total=rounds)
            yield lambda result: bar.update(task, advance=1, description=_ranks(result))
    finally:
        if in_notebook:  # a saved notebook does not contain the widget of the bar
            console.print(bar.get_renderable())


def _ranks(result: Round) -> str:
    left_out = sorted(itertools.chain(*ranks_left_out(result).values()))
    news = _news(result)
    if not left_out:
        return f"{len(result.used)} ranks{news}"
    without = ", ".join(map(str, left_out))
    total = len(result.used) + len(left_out)
    return f"[yellow]{len(result.used)} of {total} ranks, without {without}{news}[/]"


def _news(result: Round) -> str:
    """Return the ranks that were added and removed since the last round, as text."""
    texts = [
        f"; {', '.join(map(str, ranks))} {verb}"
        for ranks, verb in ((result.joined, "joined"), (result.left, "left"))
        if ranks
    ]
    return "".join(texts)
