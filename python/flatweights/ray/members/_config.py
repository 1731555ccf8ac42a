"""The configuration on which the members of a process group have to agree before it can open."""

from __future__ import annotations

from typing import NamedTuple

from flatweights._numbers import check_count
from flatweights.ray.nodes._plan import ReduceDType, check_reduce_dtype
from flatweights.ray.peers._wait import check_timeout

GRACE = 30.0  # seconds


class GroupConfig(NamedTuple):
    """The configuration of a process group.

    Attributes:
        size: The largest number of members.
        reduce_dtype: The dtype in which sums travel between nodes.
        min_size: The number of members with which it opens once the grace is over.
        grace: Seconds for which it waits for the others, after the first one is ready; for ever, if
            None.
    """

    size: int
    reduce_dtype: ReduceDType
    min_size: int
    grace: float | None

    @classmethod
    def of(
        cls,
        size: int,
        reduce_dtype: ReduceDType = "float64",
        min_size: int | None = None,
        grace: float | None = GRACE,
    ) -> GroupConfig:
        """Return the checked configuration; ``min_size`` is ``size``, if it is None.

        Raises:
            ValueError: If one is out of range.
            TypeError: If one that should be a number is not.
        """
        size = check_count(size, "size")
        check_reduce_dtype(reduce_dtype)
        if min_size is None:
            return cls(size, reduce_dtype, size, None)
        return cls(
            size,
            reduce_dtype,
            check_count(min_size, "min_size", size),
            check_timeout(grace, "grace"),
        )

    def check_same(self, other: GroupConfig) -> None:
        """Raise `ValueError`, naming the first difference, if ``other``, a newcomer's, differs."""
        for name, ours, theirs in zip(self._fields, self, other, strict=True):
            if ours != theirs:
                raise ValueError(f"{name}: expected {ours!r}, as the others, got {theirs!r}")

    def __str__(self) -> str:
        least = "" if self.min_size == self.size else f"at least {self.min_size} of "
        return f"{least}{self.size} members"
