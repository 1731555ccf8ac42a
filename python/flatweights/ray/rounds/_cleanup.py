"""The end of a round that an error ends: it lets go of all values."""

from __future__ import annotations

import traceback

from flatweights.ray.results._report import FAILED_ROUND, METRICS


def forget_values(error: BaseException, outer: BaseException | None) -> None:
    """Clear the frames of the traceback of an ``error`` that ends a round; count the round.

    The frames would keep values alive. All code that touches values runs where such an error is
    caught.

    Args:
        error: The error.
        outer: The error that was handled when the round began, which is left as it is.
    """
    if isinstance(error, Exception):
        METRICS.add({FAILED_ROUND: 1})
    link: BaseException | None = error
    while link is not None and link is not outer:
        traceback.clear_frames(link.__traceback__)
        link = link.__context__
