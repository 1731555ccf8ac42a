"""Averages that a few wrong models cannot spoil.

One worker that diverged, or lies, moves a mean as far as it likes. The functions of this module
take what `flatweights.average` takes, and return a model that stays near the others. Each has a
value of the same name, such as ``TrimmedMean(0.2)``, for ``rule=``.

By coordinate: `median`, `trimmed_mean`, `mean_around_median`. By selection of whole models: `krum`,
`multi_krum`, `bulyan`. By distance from a centre: `geometric_median`, `centered_clipping`.
`distances` is what the last two kinds go by.
"""

from flatweights.robust._centers import (
    CenteredClipping,
    GeometricMedian,
    centered_clipping,
    geometric_median,
)
from flatweights.robust._coordinates import (
    MeanAroundMedian,
    Median,
    TrimmedMean,
    mean_around_median,
    median,
    trimmed_mean,
)
from flatweights.robust._rules import Aggregate, AnyRule, Rule
from flatweights.robust._selection import (
    Bulyan,
    Krum,
    MultiKrum,
    bulyan,
    distances,
    krum,
    multi_krum,
)

__all__ = [
    "Aggregate",
    "AnyRule",
    "Bulyan",
    "CenteredClipping",
    "GeometricMedian",
    "Krum",
    "MeanAroundMedian",
    "Median",
    "MultiKrum",
    "Rule",
    "TrimmedMean",
    "bulyan",
    "centered_clipping",
    "distances",
    "geometric_median",
    "krum",
    "mean_around_median",
    "median",
    "multi_krum",
    "trimmed_mean",
]
