"""The arguments of a round, the wait for its answers, and the check that enough ranks are left."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from flatweights._average import Nonfinite, check_nonfinite, read_weights
from flatweights._numbers import check_count
from flatweights.ray import _clock
from flatweights.ray.core._deadline import Deadline
from flatweights.ray.peers._store import RayResult
from flatweights.ray.peers._transport import PendingResult
from flatweights.ray.results._result import Packed, weight_of
from flatweights.ray.results._wire import nbytes_of
from flatweights.ray.support._errors import FULL, WorkerError, late_error, too_small
from flatweights.robust import AnyRule, Rule

FindLost = Callable[[Mapping[int, PendingResult]], Mapping[int, Exception]]

_FOREVER = 1e8  # seconds, three years: clocks that count nanoseconds overflow later

_LOOK = 10.0  # seconds of waiting after which an answer's process may be gone

Weights = Iterable[float] | Callable[[Any], float] | None


class RoundSpec(NamedTuple):
    """The checked arguments of a round.

    Attributes:
        weights: One weight for each rank; none, if all count alike; or a function of a worker's
            result.
        timeout: Seconds to wait for results; for ever, if None.
        min_results: The number of ranks that an average needs; all that are called, if None.
        nonfinite: What to do about NaN and infinity.
        max_inflight: The number of results that are mapped at once.
        rule: The rule that replaces the mean, if there is one.
    """

    weights: tuple[float, ...] | Callable[[Any], float]
    timeout: float | None
    min_results: int | None
    nonfinite: Nonfinite
    max_inflight: int
    rule: Rule | None = None

    @classmethod
    def of(
        cls,
        ranks: int,
        weights: Weights,
        *,
        span: int | None = None,
        timeout: float | None,
        min_results: int | None,
        nonfinite: Nonfinite,
        max_inflight: int,
        rule: AnyRule | None = None,
    ) -> "RoundSpec":
        """Check the arguments of an average over this number of ``ranks``, numbered up to ``span``.

        ``max_inflight`` is checked where it was given.

        Raises:
            ValueError: If one is out of range.
            TypeError: If one that should be a number is not.
        """
        check_nonfinite(nonfinite)
        checked = None if rule is None else Rule.of(rule)
        if checked is not None and weights is not None and not checked.takes_weights:
            raise TypeError(f"weights: {checked.name} has no weights, all ranks count alike")
        return cls(
            () if weights is None else _numbers(weights, span or ranks),
            None if timeout is None else check_timeout(timeout),
            None if min_results is None else check_count(min_results, "min_results", ranks),
            nonfinite,
            max_inflight,
            checked,
        )

    def weight_of(self, rank: int, result: Any) -> float:
        """Return the weight of a rank that returned ``result``.

        Raises:
            Exception: As `weight_of`, if weights are a function.
        """
        if callable(self.weights):
            return weight_of(self.weights, result, f"rank {rank}")
        return self.number_of(rank)

    def number_of(self, rank: int) -> float:
        """Return the weight of a rank, if weights are numbers.

        Raises:
            ValueError: If the rank was added after the numbers were given.
        """
        return self.numbers_of([rank])[0]

    def numbers_of(self, ranks: Sequence[int]) -> list[float]:
        """Return the weights of ``ranks``; see `number_of`."""
        assert not callable(self.weights)
        if not self.weights:
            return [1.0] * len(ranks)
        count = len(self.weights)
        for rank in ranks:
            if rank >= count:
                raise ValueError(
                    f"weights: expected one for rank {rank}, which was added later, got {count} "
                    "numbers: give a function of a worker's result"
                )
        return [self.weights[rank] for rank in ranks]


def _numbers(
    weights: Iterable[float] | Callable[[Any], float], count: int
) -> tuple[float, ...] | Callable[[Any], float]:
    return weights if callable(weights) else tuple(read_weights(weights, count))


def check_timeout(timeout: float | None, name: str = "timeout") -> float | None:
    """Return ``timeout`` after checking that it is seconds; None if too long for a clock."""
    if timeout is None:
        return None
    if not hasattr(timeout, "__float__"):
        raise TypeError(f"{name}: expected seconds or None, got {timeout!r}")
    try:
        seconds = float(timeout)
    except OverflowError:  # an integer
        seconds = math.inf if timeout > 0 else -math.inf
    if not seconds >= 0:
        raise ValueError(f"{name}: expected seconds, not negative, got {timeout!r}")
    return None if seconds > _FOREVER else seconds


def deadline_in(timeout: float | None) -> Deadline:
    """Return the deadline in ``timeout`` seconds, which are checked; see `check_timeout`."""
    seconds = None if timeout is None else check_timeout(timeout)
    return Deadline.after(seconds, _clock.now())


class Arrivals:
    """The wait for answers by rank: the ranks that have answered, failed, or are late.

    Attributes:
        answers: The answers by rank, until they are let go of.
        arrived: The ranks whose answers have arrived, without failed ranks.
        given: Those of them whose answers are known to be results. After an interrupt, others may
            not have been read yet: these may be errors.
        failed: By rank, the workers' exceptions so far, and the errors of ranks in quarantine.
        quarantined: The failed ranks that hold NaN or infinity, and are skipped.
        late: The ranks that had not answered when the time was up.
        recovering: The ranks that give nothing, and wait for what a round brings that succeeds.
        were_interrupted: Whether an interrupt came while calls were made: one call more than there
            are answers here may have been made.
        seconds_waited: The seconds that it has waited.
        deadline: The time after which ranks that have not answered are late.
        find_lost: Called again and again while the wait lasts: of the ranks whose answers it gets,
            it returns those whose process does not answer, and why. Without it, they are waited
            for.
    """

    def __init__(self, deadline: Deadline, answers: Mapping[int, PendingResult] = {}) -> None:
        """Take answers by rank; `expect` adds more.

        Args:
            deadline: The time after which ranks that have not answered are late.
            answers: The answers.
        """
        self.answers: dict[int, PendingResult] = {}
        self.arrived: set[int] = set()
        self.given: set[int] = set()
        self.failed: dict[int, Exception] = {}
        self.quarantined: set[int] = set()
        self.late: list[int] = []
        self.recovering: list[int] = []
        self.were_interrupted = False
        self.seconds_waited = 0.0
        self.deadline = deadline
        self.find_lost: FindLost | None = None
        self._pending: dict[PendingResult, int] = {}
        self._is_let_go = False  # whether all answers that have come were let go of
        if answers:
            self.expect(answers)

    @classmethod
    def over(
        cls,
        answers: Mapping[int, PendingResult],
        *,
        failed: Mapping[int, Exception],
        late: Sequence[int],
        recovering: Sequence[int],
        timeout: float | None,
        seconds_waited: float,
    ) -> "Arrivals":
        """Return a wait that is over.

        Args:
            answers: The answers that have arrived.
            failed: By rank, the reasons for which others have not.
            late: The ranks whose time was up.
            recovering: The ranks that give nothing, and wait for what this round brings.
            timeout: The seconds after which it was.
            seconds_waited: The seconds of the wait.
        """
        arrivals = cls(Deadline(timeout, None))
        nobody = RayResult(None)  # for which nobody waits
        arrivals.answers = {**answers, **dict.fromkeys([*failed, *late], nobody)}
        arrivals.arrived = {*answers}
        arrivals.given = {*answers}
        arrivals.failed = {**failed}
        arrivals.late = sorted(late)
        arrivals.recovering = [*recovering]
        arrivals.seconds_waited = seconds_waited
        return arrivals

    def expect(self, answers: Mapping[int, PendingResult]) -> None:
        """Wait for ``answers``, too."""
        self.answers |= answers
        self._pending |= {answer: rank for rank, answer in answers.items()}

    def arrive(self, rank: int, answer: PendingResult) -> None:
        """Count ``answer``, which has arrived, as the answer of a rank."""
        self.answers[rank] = answer
        self.arrived.add(rank)
        self._is_let_go = False

    @property
    def unanswered(self) -> dict[int, PendingResult]:
        """The answers that workers still owe: of late ranks, and of ranks not waited for."""
        if not (self.late or self._pending):
            return {}
        owing = {*self.late, *self._pending.values()}
        return {rank: answer for rank, answer in self.answers.items() if rank in owing}

    @property
    def errors(self) -> dict[int, Exception]:
        """By rank, the reason for a missing result: an exception, or that the rank is late."""
        if not self.late:
            return self.failed
        return self.failed | dict.fromkeys(self.late, late_error(self.deadline.timeout))

    def wait(self, *, all_at_once: bool = False) -> list[int] | None:
        """Wait until something happens; return the ranks of answers that arrived.

        Args:
            all_at_once: Whether to return only when all results have arrived, or one has failed.

        Returns:
            The ranks, maybe none; None if there is nothing left to wait for.
        """
        pending = self._pending
        if not pending:
            return None
        begin = _clock.now()
        end = pause = self.deadline.end
        if self.find_lost is not None:
            pause = min(begin + _LOOK, math.inf if end is None else end)
        there = wait_any([*pending], pause, len(pending) if all_at_once else 1)
        now = _clock.now()
        self.seconds_waited += now - begin
        came = sorted([pending[answer] for answer in there])
        for answer in there:
            del pending[answer]
        self.arrived.update(came)
        self._is_let_go = False
        if pending and end is not None and now >= end:
            self.late = sorted({*self.late, *pending.values()})
            pending.clear()
        elif self.find_lost is not None and not there:
            lost = self.find_lost({rank: answer for answer, rank in pending.items()})
            for rank in lost:
                del pending[self.answers[rank]]
            self.lose(lost)
        return came

    def collect(self) -> dict[int, Any]:
        """Wait for all answers; return the values by rank."""
        while self.wait(all_at_once=True) is not None:
            pass
        values: dict[int, Any] = {}
        for rank in sorted(self.arrived):
            value = self.result(rank)
            if rank in self.given:
                values[rank] = value
        return values

    def fetch(self) -> None:
        """Ask for the values of all arrived answers, and wait for them."""
        for rank in sorted(self.arrived):
            answer = self.answers[rank]
            if answer.fetch():
                self.arrived.remove(rank)
                self._pending[answer] = rank

    def result(self, rank: int) -> Any:
        """Return the value of a rank that has answered; None if it has failed, now or before."""
        if rank in self.failed:
            return None
        try:
            value = self.answers[rank].result()
        except Exception as error:
            self._fail(rank, error)
            return None
        self.given.add(rank)
        return value

    def packed(self, rank: int) -> Packed | None:
        """Return the value of a rank that has answered, if it is only weights, read in place."""
        packed = self.answers[rank].packed
        if packed is not None:
            self.given.add(rank)
        return packed

    def _fail(self, rank: int, error: Exception) -> None:
        # The frames of its traceback would hold other ranks' results.
        self.lose({rank: error.with_traceback(None)})

    def lose(self, reasons: Mapping[int, Exception]) -> None:
        """Count ranks as failed."""
        self.failed.update(reasons)
        self.arrived.difference_update(reasons)
        self.given.difference_update(reasons)

    def quarantine(self, not_finite: Mapping[int, Exception]) -> None:
        """Leave out ranks that hold NaN or infinity, for ``nonfinite="skip"``."""
        self.quarantined |= not_finite.keys()
        self.lose(not_finite)

    def check(self, spec: RoundSpec, sample: Callable[[], Any] = lambda: None) -> None:
        """Raise if too few ranks can give a result.

        All called ranks, or ``min_results`` of them, must give a result. Ranks in quarantine have
        given one. Without them, ``min_results`` ranks must be left, or one, if it is None.

        Args:
            spec: The arguments of the round, for ``min_results``.
            sample: A function that returns a model of the round, for the size that the store must
                have.

        Raises:
            WorkerError: It names all ranks that failed, are late or in quarantine.
        """
        if not (self.failed or self.late or spec.min_results) and self.answers:
            return
        left = len(self.answers) - len(self.failed) - len(self.late)
        need = len(self.answers) if spec.min_results is None else spec.min_results
        if left + len(self.quarantined) >= need and left >= (spec.min_results or 1):
            return
        errors = self.errors
        first = next(iter(self.failed.values()), None)
        full = [rank for rank, error in errors.items() if isinstance(error, FULL)]
        if full:
            errors = errors | dict.fromkeys(full, too_small(len(self.answers), nbytes_of(sample())))
        remedy = ""
        if self.late and left > 0 and spec.min_results is None:
            remedy = f"pass min_results={left} to average the ranks that answer in time"
        elif not errors:  # members have left
            others = "there are no others"
            if self.recovering:
                ranks = ", ".join(map(str, self.recovering))
                others = f"only a call that succeeds gives what ({ranks}) wait for"
            remedy = f"min_results: expected {need} ranks, got {left}: {others}"
        raise WorkerError(errors, remedy) from first

    def release(self) -> None:
        """Let go of all answers except those in flight; a second call does nothing."""
        if self._is_let_go:
            return
        in_flight = self.unanswered if self.late or self._pending else {}
        for rank, answer in self.answers.items():
            if rank not in in_flight:
                answer.release()
        self._is_let_go = True


# Seconds to wait for one transport while there are others, and their share of the time so far.
_LEAST, _MOST, _SHARE = 1e-3, 0.05, 1 / 16


def seconds_left(end: float | None) -> float | None:
    """Return the seconds until ``end``, by `time.monotonic`; None, if there is no end."""
    return None if end is None else max(0.0, end - _clock.now())


def wait_any(
    answers: Collection[PendingResult], deadline: float | None = None, enough: int = 1
) -> list[PendingResult]:
    """Wait for the first of ``answers``; return all that have arrived, none if the time is up.

    Args:
        answers: At least one answer, of any transports.
        deadline: The time at which to stop, by `time.monotonic`; never, if None.
        enough: See `PendingResult.wait`.
    """
    transports: dict[type[PendingResult], list[PendingResult]] = {}
    for answer in answers:
        transports.setdefault(type(answer), []).append(answer)
    is_alone = len(transports) == 1
    begin = _clock.now()
    while True:
        left = patience = None if deadline is None else seconds_left(deadline)
        if not is_alone:
            part = min(max(_LEAST, _SHARE * (_clock.now() - begin)), _MOST)
            patience = part if left is None else min(part, left)
        there: list[PendingResult] = []
        for transport, expected in transports.items():
            count = len(expected)
            most = enough if enough < count else count
            there += transport.wait(expected, 0.0 if there else patience, most)
        if there or left == 0:
            return there
