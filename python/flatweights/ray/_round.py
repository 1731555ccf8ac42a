"""What came of one round."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flatweights.ray._errors import reason_in_a_line
from flatweights.ray._store import put


@dataclass
class Round:
    """The average of one round, and which ranks it is of.

    Attributes:
        weights: The average, of the kind that the workers returned.
        used: The ranks that it was taken over, in the order in which they were added.
        failed: By rank, what its worker raised, or the error about NaN and infinity for which
            ``nonfinite="skip"`` left it out.
        quarantined: Those of the failed ranks that ``nonfinite="skip"`` left out.
        late: The ranks that had not answered when the time was up.
        extras: By rank, what workers returned beside their weights.
        seconds: How long it took: ``"wait"`` for results, ``"average"`` to add them up,
            ``"put"`` to bring the average into the object store, once it is there. A
            `WorkerGroup` adds ``"broadcast"``, until its workers had it, and `WorkerGroup.run`
            the whole ``"round"``.
        nbytes: Bytes of weights that were read.
        nbytes_sent: Bytes of weights that a `WorkerGroup` sent to those who took the average.
        number: Which round of `WorkerGroup.run` it was, from 1.
    """

    weights: Any
    used: Sequence[int]
    failed: Mapping[int, Exception] = field(default_factory=dict)
    late: Sequence[int] = ()
    extras: Mapping[int, Any] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    nbytes: int = 0
    nbytes_sent: int = 0
    quarantined: Sequence[int] = ()
    number: int | None = None
    _ref: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Make what is given unchangeable."""
        self.used = tuple(self.used)
        self.late = tuple(self.late)
        self.quarantined = tuple(self.quarantined)

    @property
    def ref(self) -> Any:
        """The average in the object store: put there on first use, once."""
        if self._ref is None:
            begin = time.monotonic()
            self._ref = put(self.weights, len(self.used) + len(self.failed) + len(self.late))
            self.seconds = {**self.seconds, "put": time.monotonic() - begin}
        return self._ref

    def record(self) -> dict[str, Any]:
        """Return what there is to know of the round but for its weights and extras, as plain data.

        For a line of JSON per round, or a row of a table: numbers, texts, lists and dicts with
        texts as keys, which JSON gives back as they were.

        >>> found = Round([1.0], used=[0, 2], failed={1: ValueError("diverged")}, nbytes=16)
        >>> found.record()["used"], found.record()["failed"]
        ([0, 2], {'1': 'ValueError: diverged'})

        Returns:
            ``round``, its number or None; ``used``, ``late`` and ``quarantined``, lists of
            ranks; ``failed``, by rank the reason in one line; ``seconds`` by step;
            ``bytes``, those read as ``in`` and those sent as ``out``.
        """
        return {
            "round": self.number,
            "used": list(self.used),
            "late": list(self.late),
            "failed": {str(rank): reason_in_a_line(error) for rank, error in self.failed.items()},
            "quarantined": list(self.quarantined),
            "seconds": dict(self.seconds),
            "bytes": {"in": self.nbytes, "out": self.nbytes_sent},
        }
