"""Rounds in Ray's metrics: its dashboard, and what Prometheus scrapes from each node."""

import collections
import functools
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Concatenate, ParamSpec

from ray.util.metrics import Counter, Gauge, Histogram

_log = logging.getLogger("flatweights")

# Buckets of the histogram: 1, 2, 5 times 0.1 ms to 1,000 s.
_SECONDS = [factor * 10.0**power for power in range(-4, 4) for factor in (1, 2, 5)]

_Arguments = ParamSpec("_Arguments")


def _at_no_risk(
    method: Callable[Concatenate["Metrics", _Arguments], None],
) -> Callable[Concatenate["Metrics", _Arguments], None]:
    """Let an error of Ray's metrics end these, and never a round."""

    def call(self: "Metrics", /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> None:
        if not self.works:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            self.works = False
            _log.warning("flatweights: no metrics from now on: %s: %s", type(error).__name__, error)

    functools.update_wrapper(call, method)
    return call


class _Instruments:
    """What Ray counts with; it puts ``ray_`` before the names, ``_total`` behind a counter's."""

    def __init__(self) -> None:
        self.rounds = Counter("flatweights_rounds", "Rounds that gave an average.")
        self.failed_rounds = Counter("flatweights_failed_rounds", "Rounds that gave none.")
        self.ranks_used = Gauge("flatweights_ranks_used", "Ranks that the last average is of.")
        self.ranks_left_out = Counter(
            "flatweights_ranks_left_out",
            "Ranks that averages are not of, counted in every round without them.",
            ("reason",),
        )
        self.bytes = Counter(
            "flatweights_bytes", "Bytes of weights from (in) and to (out) workers.", ("direction",)
        )
        self.ways = Counter(
            "flatweights_ranks_by_way", "Ranks that rounds asked, by the way there.", ("way",)
        )
        self.seconds = Histogram(
            "flatweights_round_seconds", "Seconds of each step of a round.", _SECONDS, ("step",)
        )
        # Ray takes the sum of a histogram over the middles of its buckets.
        self.seconds_in_all = Counter(
            "flatweights_step_seconds", "Seconds of each step, added up.", ("step",)
        )


class Metrics:
    """The metrics of this process, registered with Ray on first use.

    Ray sends them on every ten seconds, or as its ``metrics_report_interval_ms`` says; where
    its agent is not installed (``ray[default]``), nowhere. One call of an instrument takes 2 µs
    and a round of a group makes fifteen, where its calls alone take a millisecond.

    Attributes:
        works: Whether there has been no error yet.
    """

    def __init__(self) -> None:
        """Register nothing yet."""
        self.works = True

    @functools.cached_property
    def _to(self) -> _Instruments:
        return _Instruments()

    @_at_no_risk
    def count_round(
        self,
        used: int,
        left_out: Mapping[str, Collection[int]],
        nbytes: int,
        ways: Iterable[str] = (),
    ) -> None:
        """Count a round.

        Args:
            used: How many ranks the average is of.
            left_out: Ranks by the reason why they are not in it.
            nbytes: Bytes that were read.
            ways: How ranks were reached, a lane or the store, for each.
        """
        for way, number in collections.Counter(ways).items():
            self._to.ways.inc(number, {"way": way})
        self._to.rounds.inc()
        self._to.ranks_used.set(used)
        for reason, ranks in left_out.items():
            if ranks:  # Ray refuses to add zero
                self._to.ranks_left_out.inc(len(ranks), {"reason": reason})
        if nbytes:
            self._to.bytes.inc(nbytes, {"direction": "in"})

    @_at_no_risk
    def count_failed_round(self) -> None:
        """Count a round that raised."""
        self._to.failed_rounds.inc()

    @_at_no_risk
    def count_sent(self, nbytes: int) -> None:
        """Count bytes that workers were sent."""
        if nbytes:
            self._to.bytes.inc(nbytes, {"direction": "out"})

    @_at_no_risk
    def observe(self, seconds: Mapping[str, float]) -> None:
        """Note how long each step took."""
        for step, value in seconds.items():
            self._to.seconds.observe(value, {"step": step})
            if value > 0:
                self._to.seconds_in_all.inc(value, {"step": step})


METRICS = Metrics()
