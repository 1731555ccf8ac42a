"""Rules that weigh sources by their distance from a centre.

A centre is a weighted mean of the sources, so its distances follow from those between the
sources: the models are read once for all distances, and once for the mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatweights._average import Job, Nonfinite
from flatweights._numbers import check_count, real_number
from flatweights.robust._rules import Source, set_checked
from flatweights.robust._selection import Arrays, DistanceRule, Distances

# The geometric median is found if no direction makes the sum of distances fall by more than this
# part of the sum of weights, for each unit of length. The sum exceeds the smallest one by at most
# twice this part of itself then: the centre of the smallest is at most 2 * sum / weights away.
_FLAT = 1e-11
# Shares that change by no more than this have changed by rounding errors.
_STILL = 2.0**-52
# Sums that differ by less than this factor are equal, except for rounding errors.
_EQUAL = 1 + 1e-12
# A smoothing outside of these parts of the longest distance counts as the nearer one: so neither
# it nor its reciprocal overflows.
_LEAST_SMOOTHING, _MOST_SMOOTHING = 1e-100, 1e100
# A smaller share changes nothing, and a mean takes no weights that differ much more.
_LEAST_SHARE = 1e-150
# A source is left out if it is this many times as far from most others as those are from each
# other.
_FAR = 1e5


def _from_center(squares: Distances, shares: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the distance of each point from the mean of all with these ``shares``, of sum 1."""
    with np.errstate(invalid="ignore", over="ignore"):
        # No matrix product: the bits of BLAS depend on the machine. Infinity times 0 is 0 here.
        spread = np.where(shares != 0, squares * shares, 0.0).sum(axis=1)
        within = np.where(shares != 0, spread * shares, 0.0).sum()
        squared = spread - within / 2
    distance: NDArray[np.float64] = np.sqrt(
        np.maximum(np.where(spread < np.inf, squared, np.inf), 0)
    )
    return distance


def _length(squares: Distances, shares: NDArray[np.float64]) -> float:
    """Return the length of the sum of all points, each times its one of ``shares``, of sum 0."""
    square = -0.5 * (shares * (squares * shares).sum(axis=1)).sum()
    return math.sqrt(max(float(square), 0.0))


@dataclass(frozen=True)
class _Sum:
    """The weighted sum of smoothed distances, whose smallest value `geometric_median` finds.

    Attributes:
        squares: Squared distances between all points.
        weights: One for each point, above 0.
        smoothing: The length below which a distance counts by its square, so that the sum has a
            gradient everywhere.
    """

    squares: Distances
    weights: NDArray[np.float64]
    smoothing: float

    def pulls(self, distance: Distances) -> NDArray[np.float64]:
        """Return the weights that Weiszfeld's algorithm gives to points at this ``distance``."""
        return self.weights / np.maximum(distance, self.smoothing)

    def cost(self, distance: Distances) -> Any:
        """Return the sum for points at this ``distance`` from a centre; or one for each row."""
        beyond = np.maximum(distance, self.smoothing) - self.smoothing
        within = np.minimum(distance, self.smoothing)
        return (self.weights * (beyond + within * (within / self.smoothing) / 2)).sum(axis=-1)

    def start(self) -> NDArray[np.float64]:
        """Return the shares of the centre to start from: the one of three with the smallest sum.

        They are the mean; the best source, or the mean of several that are equally good; and a
        step off the best source as of Vardi and Zhang, "The multivariate L1-median and associated
        data depth", PNAS 97(4), 2000. No later centre has a larger sum. So none is near a source
        that is not the median, where steps are tiny (Beck and Sabach, "Weiszfeld's Method: Old and
        New Results", J. Optim. Theory Appl. 164, 2015).
        """
        lengths = np.sqrt(self.squares)
        costs = self.cost(lengths)
        best = costs <= costs.min() * _EQUAL
        starts = [self.weights, self.weights * best]
        first = int(np.argmax(best))
        is_here = self.squares[first] == 0
        here = self.weights * is_here
        pulls = np.where(is_here, 0.0, self.pulls(lengths[first]))
        if (total := pulls.sum()) > 0:
            away = pulls / total
            force = total * _length(self.squares, away - here / here.sum())
            if force > here.sum():
                starts.append(here + (force - here.sum()) * away)
        shares = [start / start.sum() for start in starts]
        return min(shares, key=self._cost_of)

    def step(self, shares: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
        """Return the shares after a step of Weiszfeld's algorithm; and the sum of all pulls."""
        pulls = self.pulls(_from_center(self.squares, shares))
        total = float(pulls.sum())
        return (pulls / total if total else shares), total

    def center(self, steps: int) -> NDArray[np.float64]:
        """Return the shares of the centre with the smallest sum, after at most this many steps."""
        shares = self.start()
        for _ in range(steps):
            first, total = self.step(shares)
            change = first - shares
            length = _length(self.squares, change)
            if np.abs(change).max() <= _STILL or total * length <= _FLAT * self.weights.sum():
                return first
            second, _ = self.step(first)
            bend = second - first - change
            bent = _length(self.squares, bend)
            if length > bent > 0:
                far = length / bent
                leap, _ = self.step(shares + far * (2 * change + far * bend))
                second = min(second, leap, key=self._cost_of)
            shares = second
        return shares

    def _cost_of(self, shares: NDArray[np.float64]) -> float:
        return float(self.cost(_from_center(self.squares, shares)))


def _weighted_median(values: Distances, weights: NDArray[np.float64]) -> float:
    """Return the lower median of ``values``, each counted by its weight."""
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    return float(values[order[np.searchsorted(reached, reached[-1] / 2)]])


def _near(
    squares: Distances, weights: NDArray[np.float64], *, like_most: bool
) -> NDArray[np.bool_]:
    """Return which sources are so near to most others that their distances have a direction.

    The distances of a far source from the others differ by less than their rounding errors, so they
    do not show in which direction the source lies. From equal sources it has one distance, which is
    exact.

    Args:
        squares: Squared distances between all pairs.
        weights: One for each source.
        like_most: Whether only sources that equal most others are near, if most are equal. If not,
            those that differ show what is far.
    """
    rows = np.array([_weighted_median(row, weights) for row in squares])
    middle = _weighted_median(rows, weights)
    if not (middle or like_most) and (differ := rows > 0).any():
        middle = _weighted_median(rows[differ], weights[differ])
    near: NDArray[np.bool_] = rows <= _FAR**2 * middle
    return near if (weights * near).any() else np.ones_like(near)


def _middle(squares: Distances) -> int:
    """Return the source with the smallest sum of distances from the others.

    One infinitely far source makes all sums infinite, so the number of infinite distances counts
    first.
    """
    lengths = np.sqrt(squares)
    is_finite = np.isfinite(lengths)
    sums = np.where(is_finite, lengths, 0.0).sum(axis=1)
    return int(np.lexsort((sums, (~is_finite).sum(axis=1)))[0])


def _length_of(value: float, name: str) -> float:
    length = real_number(value, name)
    if not 0 < length < math.inf:
        raise ValueError(f"{name}: expected a finite number above 0, got {value!r}")
    return length


@dataclass(frozen=True)
class GeometricMedian(DistanceRule):
    """`geometric_median` as a value, for ``rule=``.

    Attributes:
        smoothing: The smallest distance that counts, in the unit of the weights.
        steps: The largest number of steps.
    """

    takes_weights = True

    smoothing: float = 1e-6
    steps: int = 100

    def __post_init__(self) -> None:
        """Check the numbers."""
        set_checked(self, smoothing=_length_of(self.smoothing, "smoothing"))
        set_checked(self, steps=check_count(self.steps, "steps"))

    def _combine(
        self, job: Job, points: list[Arrays], squares: Distances, present: list[int]
    ) -> tuple[list[int], list[float]]:
        weights = np.array([job.weights[k] for k in present])
        # As average does, so that only ratios matter, and their sum is finite.
        weights /= weights.max()
        weights *= _near(squares, weights, like_most=True)  # which are the median then
        shares = np.zeros_like(weights)
        is_used = weights > 0
        used = squares[np.ix_(is_used, is_used)]
        scale = math.sqrt(used.max(initial=0.0, where=used < np.inf)) or 1.0
        smoothing = max(float(self.smoothing) / scale, _LEAST_SMOOTHING)
        with np.errstate(invalid="ignore", over="ignore", under="ignore"):
            least = _Sum(used / scale / scale, weights[is_used], min(smoothing, _MOST_SMOOTHING))
            shares[is_used] = least.center(self.steps)
        shares[shares < _LEAST_SHARE] = 0
        final = {k: s for k, s in zip(present, shares.tolist(), strict=True) if s > 0}
        job.average(final)
        return list(final), _from_center(squares, shares).tolist()


@dataclass(frozen=True)
class CenteredClipping(DistanceRule):
    """`centered_clipping` as a value, for ``rule=``.

    Attributes:
        radius: The length to which differences from the centre are clipped.
        steps: The number of times that the centre moves.
        center: The first centre, a model of the kind of the sources; the source nearest to all
            others, if None. In calls of a `flatweights.ray.Member`, equal in all members.
    """

    radius: float
    steps: int = 5
    center: Any = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Check the numbers."""
        set_checked(self, radius=_length_of(self.radius, "radius"))
        set_checked(self, steps=check_count(self.steps, "steps"))

    def converted(self, convert: Callable[[Any, str], Any]) -> CenteredClipping:
        """Return this rule with a converted centre."""
        if self.center is None:
            return self
        return replace(self, center=convert(self.center, "center"))

    def _points(self, job: Job) -> list[Arrays]:
        if self.center is None:
            return job.parts
        job.template.match(self.center, "center")
        center = job.template.read(self.center, "center")
        if job.nonfinite != "propagate":  # a centre cannot be left out
            error = job.template.find_nonfinite(center, "center")
            if error is not None:
                raise error
        return [*job.parts, center]

    def _combine(
        self, job: Job, points: list[Arrays], squares: Distances, present: list[int]
    ) -> tuple[list[int], list[float]]:
        count = len(present)
        near = _near(squares[:count, :count], np.ones(count), like_most=False)
        shares = np.zeros(len(squares))
        shares[-1 if self.center is not None else _middle(squares)] = 1.0
        distance = _from_center(squares, shares)
        for _ in range(self.steps):
            clip = np.minimum(1.0, self.radius / np.maximum(distance[:count], self.radius / 2))
            clip *= near
            shares = shares * (1.0 - clip.sum() / count)
            shares[:count] += clip / count
            distance = _from_center(squares, shares)
        shares[shares < _LEAST_SHARE] = 0
        places = [*present, len(job.parts)][: len(squares)]
        final = {k: s for k, s in zip(places, shares.tolist(), strict=True) if s > 0}
        job.average(final, points)
        return [k for k in final if k < len(job.parts)], distance[:count].tolist()


def geometric_median(
    sources: Iterable[Source],
    weights: Iterable[float] | None = None,
    *,
    smoothing: float = 1e-6,
    steps: int = 100,
    out: Source | None = None,
    nonfinite: Nonfinite = "propagate",
) -> Source:
    """Return the model with the smallest sum of distances from ``sources``.

    It uses Weiszfeld's algorithm with smoothing (RFA: Pillutla et al., "Robust Aggregation for
    Federated Learning", 2019). Each step computes a weighted mean of the sources; the weight of a
    source is divided by its distance from the previous mean. Wrong sources that have less than half
    of the weight can move the result only by a bounded distance. RFA takes few steps, since each is
    a round of messages. Here all steps together cost one pass for `distances` and one for the mean.
    So the algorithm goes on until no direction makes the sum smaller, except for rounding errors,
    or until it has made ``steps`` steps. Each is two steps of Weiszfeld and a leap in their
    direction, if that makes the sum smaller (SQUAREM: Varadhan and Roland, "Simple and Globally
    Convergent Methods for Accelerating the Convergence of Any EM Algorithm", Scand. J. Stat. 35,
    2008). Usually, ten steps are enough; the default is for sources almost on a line. If several
    models have the smallest sum, the result is one of them.

    A source that is 100,000 times as far from most others as those are from each other counts as
    infinitely far, and is left out.

    >>> import numpy as np
    >>> from flatweights import robust
    >>> sources = [np.array(x) for x in ([0.0, 1.0], [0.0, -1.0], [1.0, 0.0], [1e3, 0.0])]
    >>> robust.geometric_median(sources).round(3)
    array([1., 0.])

    Args:
        sources: Models, all of one kind, as for `flatweights.average`.
        weights: One weight per source, as for `flatweights.average`.
        smoothing: Smaller distances count as this one, in the unit of the weights.
        steps: The largest number of steps.
        out: As for `krum`.
        nonfinite: As for `krum`.

    Returns:
        ``out``, or a new model. Integer and boolean parts keep the value of the first source that
        counts.

    Raises:
        TypeError: As `flatweights.average`.
        ValueError: As `flatweights.average`; or if ``smoothing`` or ``steps`` is not positive.
    """
    rule = GeometricMedian(smoothing, steps)
    return rule(sources, weights, out=out, nonfinite=nonfinite)


def centered_clipping(
    sources: Iterable[Source],
    center: Source | None = None,
    *,
    radius: float,
    steps: int = 5,
    out: Source | None = None,
    nonfinite: Nonfinite = "propagate",
) -> Source:
    """Return ``center``, moved by the mean of clipped differences from it.

    This is the rule of Karimireddy et al., "Learning from History for Byzantine Robust
    Optimization", ICML 2021. In each step the centre moves by the mean of the sources' differences
    from it, after each difference longer than ``radius`` is scaled to that length. So a source
    moves the result by at most ``radius / n`` per step. A source that is 100,000 times as far from
    most others as those are from each other does not move it. If most are equal, only the others
    count for this.

    >>> import numpy as np
    >>> from flatweights import robust
    >>> sources = [np.array([x]) for x in (1.0, 2.0, 3.0, 1e3)]
    >>> robust.centered_clipping(sources, np.array([2.0]), radius=2.0, steps=1)
    array([2.5])

    Args:
        sources: Models, all of one kind, as for `flatweights.average`.
        center: The model to start from, such as the last average, of the same kind; if None, the
            source with the smallest sum of distances from the others (ByzFL starts from
            zeros).
        radius: The length that differences are clipped to, in the unit of the weights.
        steps: The number of times that the centre moves.
        out: As for `krum`.
        nonfinite: As for `krum`. A ``center`` that holds NaN or infinity is an error, too, unless
            this is ``"propagate"``.

    Returns:
        ``out``, or a new model. Integer and boolean parts keep the value of the first source that
        counts.

    Raises:
        TypeError: As `flatweights.average`.
        ValueError: As `flatweights.average`; or if ``radius`` or ``steps`` is not positive.
    """
    rule = CenteredClipping(radius, steps, center)
    return rule(sources, out=out, nonfinite=nonfinite)
