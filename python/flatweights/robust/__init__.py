"""Averages that a few wrong models cannot spoil.

One diverged or malicious worker can move a mean arbitrarily far. The functions of this module take
the same sources as `flatweights.average`, and return a model that stays near the majority. Each
function has a class of the same name, such as ``TrimmedMean(0.2)``, whose instances are values for
``rule=``.

`median`, `trimmed_mean` and `mean_around_median` work by coordinate. `krum`, `multi_krum` and
`bulyan` select whole models. `geometric_median` and `centered_clipping` weigh models by their
distance from a centre. The last two kinds compare models by `distances`.
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
