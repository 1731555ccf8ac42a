"""What one way of exchange did, round by round."""

from dataclasses import dataclass, field
from statistics import median

from flatweights.demo._rounds import Times


@dataclass
class History:
    """Measurements of one way of exchange.

    Attributes:
        losses: By round, on the examples held out.
        accuracies: By round, on the examples held out.
        times: By round.
        nbytes: Of one message.
        arrays: That one message consists of.
    """

    losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    times: list[Times] = field(default_factory=list)
    nbytes: int = 0
    arrays: int = 0

    @property
    def measured(self) -> list[Times]:
        """All rounds but the first, in which TensorFlow traces; unless there is no other."""
        return self.times[1:] or self.times

    def split(self) -> Times:
        """Return the median of each part over the measured rounds."""
        return Times(*map(median, zip(*self.measured, strict=True)))
