"""Averages that a few wrong models cannot spoil.

One worker that diverged, or lies, moves a mean as far as it likes. The functions of this module
take what `flatweights.average` takes, and return a model that stays near the others. Each has a
value of the same name, such as ``TrimmedMean(0.2)``, for ``rule=``.

By coordinate: `median`, `trimmed_mean`, `mean_around_median`.
"""

from flatweights.robust._coordinates import (
    MeanAroundMedian,
    Median,
    TrimmedMean,
    mean_around_median,
    median,
    trimmed_mean,
)
from flatweights.robust._rules import Outcome, Rule

__all__ = [
    "Median",
    "MeanAroundMedian",
    "Outcome",
    "Rule",
    "TrimmedMean",
    "mean_around_median",
    "median",
    "trimmed_mean",
]
