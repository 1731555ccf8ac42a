"""The end of a round: it lets go of all values, even if an error ends the round."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator

from flatweights.ray._report import FAILED_ROUND, METRICS


@contextlib.contextmanager
def letting_go(*let_go: Callable[[], None]) -> Iterator[None]:
    """Let go of all values of a round at its end, by calling each of ``let_go``.

    All code that touches values runs inside it. If an error leaves it, the frames of its traceback
    are cleared, since they would keep values alive. Errors that were being handled before are left
    as they are.
    """
    outer = sys.exc_info()[1]
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception):
            METRICS.add({FAILED_ROUND: 1})
        link: BaseException | None = error
        while link is not None and link is not outer:
            traceback.clear_frames(link.__traceback__)
            link = link.__context__
        raise
    finally:
        for release in let_go:
            release()
