"""What came of one round."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flatweights.ray._store import put


@dataclass
class Round:
    """The average of one round, and which ranks it is of.

    Attributes:
        weights: The average, of the kind that the workers returned.
        used: The ranks that it was taken over, in the order in which they were added.
        failed: By rank, what its worker raised, or the error about NaN and infinity for which
            ``nonfinite="skip"`` left it out.
        late: The ranks that had not answered when the time was up.
        extras: By rank, what workers returned beside their weights.
        seconds: How long it took: ``"wait"`` for results, ``"average"`` to add them up.
        nbytes: Bytes of weights that were read.
    """

    weights: Any
    used: Sequence[int]
    failed: Mapping[int, Exception] = field(default_factory=dict)
    late: Sequence[int] = ()
    extras: Mapping[int, Any] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    nbytes: int = 0
    _ref: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Make what is given unchangeable."""
        self.used = tuple(self.used)
        self.late = tuple(self.late)

    @property
    def ref(self) -> Any:
        """The average in the object store: put there on first use, once."""
        if self._ref is None:
            self._ref = put(self.weights, len(self.used) + len(self.failed) + len(self.late))
        return self._ref
