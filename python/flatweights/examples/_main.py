"""How a program runs to its end, or is interrupted."""

import signal
import sys
from collections.abc import Callable


def run(main: Callable[[], None]) -> None:
    """Call ``main``; Ctrl-C ends it with one line and exit code 130.

    Raises:
        SystemExit: If it is interrupted; else whatever ``main`` raises.
    """
    try:
        main()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing is left to be stopped
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
