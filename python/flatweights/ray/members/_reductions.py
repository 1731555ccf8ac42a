"""What a host asks of the member that averages windows of a GPU, and what that answers."""

from __future__ import annotations

from typing import NamedTuple

from flatweights.ray.core._asks import Placed


class Reduction(NamedTuple):
    """The average that a member is to make of its own window and those of others.

    Attributes:
        windows: The windows, in the order of the ranks; their layout is that of its own ask.
        weights: Their weights.
    """

    windows: tuple[Placed, ...]
    weights: tuple[float, ...]


class Reduced(NamedTuple):
    """The answer.

    Attributes:
        placed: The window with the average; None after an error.
        spoiled: The positions in `Reduction.windows` of those that hold NaN or infinity.
        why: The error.
        is_fault: Whether the GPU or its driver has failed, so that the next try may fail, too.
    """

    placed: Placed | None
    spoiled: tuple[int, ...] = ()
    why: str = ""
    is_fault: bool = False
