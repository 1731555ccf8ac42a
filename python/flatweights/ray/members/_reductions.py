"""What a member that averages segments of a GPU is asked for, and what it answers."""

from __future__ import annotations

from typing import NamedTuple

from flatweights.ray.core._requests import SegmentRef


class Reduction(NamedTuple):
    """The average that a member is to make of its own segment and those of others.

    Attributes:
        segments: The segments, in the order of the ranks; their layout is that of its own request.
        weights: Their weights.
    """

    segments: tuple[SegmentRef, ...]
    weights: tuple[float, ...]


class SegmentsReduced(NamedTuple):
    """The answer.

    Attributes:
        placed: The segment with the average; None after an error.
        not_finite: The positions in `Reduction.segments` of those that hold NaN or infinity.
        why: The error.
        is_fault: Whether the GPU or its driver has failed, so that the next try may fail, too.
    """

    placed: SegmentRef | None
    not_finite: tuple[int, ...] = ()
    why: str = ""
    is_fault: bool = False
