"""The work of a round: the call that all its workers receive."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flatweights.ray.peers._by_rank import ByRank, check_by_rank, more_arguments

_READS = ("get_weights", "get_flat", "ping")  # methods that need no initial weights


@dataclasses.dataclass(eq=False)
class Work:
    """The call that all workers of a round receive.

    Attributes:
        method: Name of the method.
        args: Its arguments.
        kwargs: Its keyword arguments.
        arguments: A function of the rank that returns more arguments.
    """

    method: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    arguments: ByRank | None

    def __post_init__(self) -> None:
        """Check that the method has a name: a call without one would only set weights."""
        if not isinstance(self.method, str):
            raise TypeError(f"method: expected a name, got {self.method!r}")
        check_by_rank(self.arguments)

    @property
    def needs_weights(self) -> bool:
        """Whether the method works on weights rather than reading them."""
        return self.method not in _READS

    def arguments_of(self, ranks: Iterable[int]) -> dict[int, Sequence[Any]]:
        """Return the additional arguments by rank; none, if no rank has any."""
        if self.arguments is None:
            return {}
        return {rank: more_arguments(self.arguments, rank) for rank in ranks}
