"""Rules by selection: they compare whole models by their distances and leave outliers out."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatweights import _core
from flatweights._average import Job, Nonfinite, read_sources
from flatweights._numbers import check_count
from flatweights._sources import Template
from flatweights.robust._rules import Rule, Source, set_checked, write_ranks

Arrays = list[NDArray[Any]]
Distances = NDArray[np.float64]


def distances(sources: Iterable[Any]) -> Distances:
    """Return the squared distances between all pairs of ``sources``.

    One pass reads each source once, without the GIL. Numbers of up to 32 bits are subtracted and
    squared in float32, and blocks of squares are added in float64. So each distance is exact to
    about seven digits, even if two sources are close to each other and far from zero: unlike in
    ``norms[:, None] + norms - 2 * x @ x.T``, nothing cancels. float64 is squared in float64. The
    bits do not depend on threads, alignment or instruction set. Integer and boolean parts of a
    model do not count.

    >>> import numpy as np
    >>> from flatweights import robust
    >>> robust.distances([np.array([0.0, 0.0]), np.array([3.0, 4.0])])
    array([[ 0., 25.],
           [25.,  0.]])

    Args:
        sources: Models, all of one kind, as for `flatweights.average`.

    Returns:
        float64 of shape ``(n, n)`` for n sources. NaN or infinite where a source holds NaN or
        infinity.

    Raises:
        TypeError: As `flatweights.average`.
        ValueError: As `flatweights.average`.
    """
    models = read_sources(sources)
    template = Template.of(models[0])
    return _core.distances(template.layout.core, template.packed, template.read_all(models, []))


def krum_scores(squares: Distances, byzantine: int) -> list[float]:
    """Return Krum's score of each source: the sum of the squared distances to its nearest others.

    Args:
        squares: Squared distances between all pairs.
        byzantine: The number of sources that may be wrong. Of n sources, the n - byzantine - 2
            nearest count.
    """
    count = len(squares)
    scores = []
    for k in range(count):
        others = np.sort(np.delete(squares[k], k))
        try:
            scores.append(math.fsum(others[: count - byzantine - 2].tolist()))
        except OverflowError:  # the sum of finite distances
            scores.append(math.inf)
    return scores


class DistanceRule(Rule):
    """A rule that uses only the distances between sources."""

    def _run(self, job: Job) -> tuple[list[int], list[float] | None]:
        used = job.everything
        points = self._points(job)
        squares = _core.distances(job.template.layout.core, job.template.packed, points)
        # The distances of a single source show nothing: it is checked by its numbers.
        is_finite = len(job.parts) > 1 and np.isfinite(squares).all()
        if job.nonfinite != "propagate" and not is_finite:
            used = job.finite()
            if len(used) < len(job.parts):
                # Once more, as without the others: next to infinity, all were computed in float64.
                rest = [points[k] for k in (*used, *range(len(job.parts), len(points)))]
                squares = _core.distances(job.template.layout.core, job.template.packed, rest)
        # A source with NaN is as far away as one with infinity: it is never near.
        squares = np.where(np.isnan(squares), np.inf, squares)
        chosen, used_scores = self._combine(job, points, squares, used)
        scores = [math.nan] * len(job.parts)
        for k, score in zip(used, used_scores, strict=True):
            scores[k] = score
        return chosen, scores

    def _points(self, job: Job) -> list[Arrays]:
        """Return the sources, and other points whose distances the rule needs."""
        return job.parts

    @abstractmethod
    def _combine(
        self, job: Job, points: list[Arrays], squares: Distances, present: list[int]
    ) -> tuple[list[int], list[float]]:
        """Write the result; return the positions used and a score for each of ``present``.

        Args:
            job: The sources.
            points: They, and the other points of `_points`.
            squares: Their squared distances: of those in ``present``, then of other points.
            present: The positions of the sources that were not left out.
        """


def _check_sources(job: Job, present: list[int], byzantine: int, factor: int) -> None:
    least, count = factor * byzantine + 3, len(present)
    if count < least:
        skipped = len(job.parts) - count
        without = f", without {skipped} that hold NaN or infinity" if skipped else ""
        raise ValueError(
            f"expected at least {least} sources ({factor} * byzantine + 3) "
            f"for {byzantine} byzantine ones, got {count}{without}"
        )


@dataclass(frozen=True)
class MultiKrum(DistanceRule):
    """`multi_krum` as a value, for ``rule=``.

    Attributes:
        byzantine: The number of sources that may be wrong.
        keep: The number of sources to average.
    """

    byzantine: int
    keep: int

    def __post_init__(self) -> None:
        """Check the numbers."""
        set_checked(self, byzantine=check_count(self.byzantine, "byzantine", least=0))
        set_checked(self, keep=check_count(self.keep, "keep"))

    def _combine(
        self, job: Job, points: list[Arrays], squares: Distances, present: list[int]
    ) -> tuple[list[int], list[float]]:
        _check_sources(job, present, self.byzantine, 2)
        if self.keep > len(present):
            raise ValueError(f"keep: expected at most the {len(present)} sources, got {self.keep}")
        scores = krum_scores(squares, self.byzantine)
        best = sorted(range(len(present)), key=lambda k: (scores[k], k))[: self.keep]
        used = sorted(present[k] for k in best)
        job.average(dict.fromkeys(used, 1.0))
        return used, scores


@dataclass(frozen=True)
class Krum(MultiKrum):
    """`krum` as a value, for ``rule=``.

    Attributes:
        byzantine: The number of sources that may be wrong.
    """

    keep: int = field(default=1, init=False, repr=False)


@dataclass(frozen=True)
class Bulyan(DistanceRule):
    """`bulyan` as a value, for ``rule=``.

    Attributes:
        byzantine: The number of sources that may be wrong.
    """

    byzantine: int

    def __post_init__(self) -> None:
        """Check the number."""
        set_checked(self, byzantine=check_count(self.byzantine, "byzantine", least=0))

    def _combine(
        self, job: Job, points: list[Arrays], squares: Distances, present: list[int]
    ) -> tuple[list[int], list[float]]:
        count, byzantine = len(present), self.byzantine
        _check_sources(job, present, byzantine, 4)
        scores = krum_scores(squares, byzantine)
        left = list(range(count))
        chosen: list[int] = []
        while len(chosen) < count - 2 * byzantine:
            rest = krum_scores(squares[np.ix_(left, left)], byzantine)
            # With few sources left, none has neighbours that count, so the lower ranks are chosen.
            chosen.append(left.pop(rest.index(min(rest))))
        used = sorted(present[k] for k in chosen)
        write_ranks(job, used, 0, len(used), len(used) - 2 * byzantine)
        return used, scores


def krum(
    sources: Iterable[Source],
    byzantine: int,
    *,
    out: Source | None = None,
    nonfinite: Nonfinite = "propagate",
) -> Source:
    """Return a copy of the source that is nearest to its neighbours.

    This is the rule of Blanchard et al., "Machine Learning with Adversaries: Byzantine Tolerant
    Gradient Descent", NeurIPS 2017. If f of n sources may be wrong, the score of a source is the
    sum of the squared distances to the n - f - 2 sources nearest to it. The lowest score wins;
    among equal scores, the lowest position wins. Flower does the same; ByzFL takes n - f - 1
    neighbours. At least 2 f + 3 sources are needed, as in the paper.

    Distances are computed as by `distances`: even float32 models that differ by only a millionth of
    their weights are ordered as in float64.

    >>> import numpy as np
    >>> from flatweights import robust
    >>> robust.krum([np.array([x]) for x in (1.0, 1.1, 1.3, 2.0, -1e9)], 1)
    array([1.1])

    Args:
        sources: Models, all of one kind, as for `flatweights.average`.
        byzantine: The number of them that may be wrong: f.
        out: Model to write to: of the same kind, writable and contiguous. It may be one of the
            sources.
        nonfinite: What to do about NaN and infinity. ``"propagate"``: such a source is infinitely
            far from all others; ``"raise"``, naming source and slot; or ``"skip"`` the source.

    Returns:
        ``out``, or a new model. Its integer and boolean parts come from the chosen source.

    Raises:
        TypeError: As `flatweights.average`.
        ValueError: As `flatweights.average`; or if there are too few sources.
    """
    return Krum(byzantine)(sources, out=out, nonfinite=nonfinite)


def multi_krum(
    sources: Iterable[Source],
    byzantine: int,
    keep: int,
    *,
    out: Source | None = None,
    nonfinite: Nonfinite = "propagate",
) -> Source:
    """Return the mean of the ``keep`` sources with the lowest scores of `krum`.

    Blanchard et al., 2017, as for `krum`. The mean has no weights; Flower weighs it by the number
    of samples, which a wrong source may exaggerate.

    >>> import numpy as np
    >>> from flatweights import robust
    >>> robust.multi_krum([np.array([x]) for x in (1.0, 2.0, 3.0, 4.0, -1e9)], 1, 3)
    array([2.])

    Args:
        sources: As for `krum`.
        byzantine: The number of them that may be wrong: f.
        keep: The number of sources to average: at most n - f, to leave out all wrong ones.
        out: As for `krum`.
        nonfinite: As for `krum`.

    Returns:
        ``out``, or a new model. Integer and boolean parts are those of the first source chosen.

    Raises:
        TypeError: As `krum`.
        ValueError: As `krum`; or if there are fewer sources than ``keep``.
    """
    return MultiKrum(byzantine, keep)(sources, out=out, nonfinite=nonfinite)


def bulyan(
    sources: Iterable[Source],
    byzantine: int,
    *,
    out: Source | None = None,
    nonfinite: Nonfinite = "propagate",
) -> Source:
    """Return the mean around the median of sources that `krum` chooses one after the other.

    This is the rule of El Mhamdi et al., "The Hidden Vulnerability of Distributed Learning in
    Byzantium", ICML 2018. If f of n sources may be wrong, it chooses n - 2 f sources, one after the
    other. Each time, it takes the source that Krum chooses among the rest, as in the paper (Flower
    chooses all at once, as `multi_krum` does). Then, number by number, it averages the n - 4 f
    chosen values nearest to their median. At least 4 f + 3 sources are needed.

    >>> import numpy as np
    >>> from flatweights import robust
    >>> sources = [np.array([x]) for x in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, -1e9)]
    >>> robust.bulyan(sources, 1)
    array([3.])

    Args:
        sources: Models, all of one kind, as for `flatweights.average`, of real numbers.
        byzantine: The number of them that may be wrong: f.
        out: As for `krum`.
        nonfinite: As for `krum`.

    Returns:
        ``out``, or a new model. Integer and boolean parts are those of the first source chosen.

    Raises:
        TypeError: As `krum`; or for complex numbers, which have no order.
        ValueError: As `krum`.
    """
    return Bulyan(byzantine)(sources, out=out, nonfinite=nonfinite)
