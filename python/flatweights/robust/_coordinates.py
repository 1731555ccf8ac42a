"""Rules by coordinate: each number of the result depends on that number of the sources alone."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from flatweights._average import Nonfinite
from flatweights._numbers import check_count, real_number
from flatweights.robust._rules import CoordinateRule, Source, set_checked


def _count_of(trim: Any) -> int | None:
    """Return ``trim`` as an integer; None if it is a fraction."""
    try:
        return operator.index(trim)
    except Exception:  # an array of no dimension has the method, even if it holds a fraction
        return None


@dataclass(frozen=True)
class Median(CoordinateRule):
    """`median` as a value, for ``rule=``."""

    def ranks(self, count: int) -> tuple[int, int, int]:
        """Return the one or two ranks in the middle."""
        return (count - 1) // 2, count // 2 + 1, 0


@dataclass(frozen=True)
class TrimmedMean(CoordinateRule):
    """`trimmed_mean` as a value, for ``rule=``.

    >>> TrimmedMean(0.2)([[np.array([k])] for k in (1.0, 2.0, 3.0, 4.0, 500.0)])
    [array([3.])]

    Attributes:
        trim: Numbers dropped at each end: an integer, or a fraction of the number of sources.
    """

    trim: float

    def __post_init__(self) -> None:
        """Check the fraction, or the number."""
        number = real_number(self.trim, "trim")
        count = _count_of(self.trim)
        if not 0 <= number < (0.5 if count is None else math.inf):
            raise ValueError(
                f"trim: expected an integer of at least 0, or a fraction below 0.5, "
                f"got {self.trim!r}"
            )
        set_checked(self, trim=number if count is None else count)

    def ranks(self, count: int) -> tuple[int, int, int]:
        """Return the ranks that stay."""
        cut = _count_of(self.trim)
        if cut is None:
            cut = int(float(self.trim) * count)
        if 2 * cut >= count:
            raise ValueError(
                f"trim: expected less than half of the {count} sources, got {self.trim!r}"
            )
        return cut, count - cut, 0


@dataclass(frozen=True)
class MeanAroundMedian(CoordinateRule):
    """`mean_around_median` as a value, for ``rule=``.

    Attributes:
        keep: The number of values to average.
    """

    keep: int

    def __post_init__(self) -> None:
        """Check the number."""
        set_checked(self, keep=check_count(self.keep, "keep"))

    def ranks(self, count: int) -> tuple[int, int, int]:
        """Return the number to keep."""
        if self.keep > count:
            raise ValueError(f"keep: expected at most the {count} sources, got {self.keep!r}")
        return 0, count, self.keep


def median(
    sources: Iterable[Source], *, out: Source | None = None, nonfinite: Nonfinite = "propagate"
) -> Source:
    """Return the median of ``sources``, number by number.

    For an even number of sources it is the mean of the middle two, as in NumPy. It has the bits
    of ``np.median`` in float64, rounded once (except that zeros are positive), whatever the order
    of the sources, the number of threads, the alignment and the instruction set. NaN in a source
    gives NaN. More than half of the sources must be honest. Yin et al., "Byzantine-Robust
    Distributed Learning", ICML 2018, bound its distance from the mean of the honest sources.

    One pass reads each source once, without the GIL. Its only extra memory is blocks of about 32
    kB. Within a model, integer and boolean parts keep the value of the first source.

    It replaces ``np.median(np.stack(sources), axis=0)``.

    >>> import numpy as np
    >>> from flatweights import robust
    >>> robust.median([np.array([1.0, 2.0]), np.array([2.0, 3.0]), np.array([1e9, -1e9])])
    array([2., 2.])

    Args:
        sources: Models, all of one kind, as for `flatweights.average`, of real numbers.
        out: Model to write to: of the same kind, writable and contiguous. It may be one of the
            sources.
        nonfinite: What to do about NaN and infinity, as for `flatweights.average`:
            ``"propagate"`` NaN and order infinity; ``"raise"``, naming source and slot; or
            ``"skip"`` the source.

    Returns:
        ``out``, or a new model.

    Raises:
        TypeError: As `flatweights.average`; or for complex numbers, which have no order.
        ValueError: As `flatweights.average`.
    """
    return Median()(sources, out=out, nonfinite=nonfinite)


def trimmed_mean(
    sources: Iterable[Source],
    trim: float,
    *,
    out: Source | None = None,
    nonfinite: Nonfinite = "propagate",
) -> Source:
    """Return the mean of ``sources`` without the smallest and largest, number by number.

    Yin et al., "Byzantine-Robust Distributed Learning", ICML 2018: of n sorted numbers, ``trim``
    are dropped at each end, and the others are averaged. They are summed in ascending order as in
    `flatweights.average`, so the bits do not depend on the order of the sources either. Everything
    else is as for `median`, which is this rule with the largest possible trim.

    >>> import numpy as np
    >>> from flatweights import robust
    >>> robust.trimmed_mean([np.array([x]) for x in (1.0, 2.0, 6.0, 1e9)], 1)
    array([4.])

    Args:
        sources: Models, all of one kind, as for `flatweights.average`, of real numbers.
        trim: The number of values to drop at each end, less than half of them: an integer; or a
            fraction (a float) of the number of sources, rounded down, as in Flower and SciPy. It
            must be at least the number of sources that may be wrong.
        out: As for `median`.
        nonfinite: As for `median`.

    Returns:
        ``out``, or a new model.

    Raises:
        TypeError: As `median`.
        ValueError: As `median`; or if ``trim`` leaves nothing.
    """
    return TrimmedMean(trim)(sources, out=out, nonfinite=nonfinite)


def mean_around_median(
    sources: Iterable[Source],
    keep: int,
    *,
    out: Source | None = None,
    nonfinite: Nonfinite = "propagate",
) -> Source:
    """Return the mean of the ``keep`` numbers nearest to the median, number by number.

    This is MeaMed: Xie et al., "Generalized Byzantine-tolerant SGD", 2018. Of two numbers that are
    equally far from the median, the smaller counts as nearer; distances are compared exactly.
    Everything else is as for `median`.

    >>> import numpy as np
    >>> from flatweights import robust
    >>> robust.mean_around_median([np.array([x]) for x in (1.0, 5.0, 6.0, 7.0, 1e9)], 3)
    array([6.])

    Args:
        sources: Models, all of one kind, as for `flatweights.average`, of real numbers.
        keep: The number of values to average: n - f, if f of n sources may be wrong.
        out: As for `median`.
        nonfinite: As for `median`.

    Returns:
        ``out``, or a new model.

    Raises:
        TypeError: As `median`.
        ValueError: As `median`; or if there are fewer sources than ``keep``.
    """
    return MeanAroundMedian(keep)(sources, out=out, nonfinite=nonfinite)
