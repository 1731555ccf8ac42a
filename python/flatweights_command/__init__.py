"""The command `flatweights`: beside the package, for Ctrl-C while that is being imported."""

import os
import signal
from types import FrameType
from typing import NoReturn


def main() -> int:
    """Run `flatweights.cli.main`; Ctrl-C ends the process with one line, from the start.

    Unless the process ignores it, as one that a script has started in the background.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _exit)
    from flatweights.cli import main  # imports NumPy, which takes a moment

    return main()


def _exit(signum: int, frame: FrameType | None) -> NoReturn:
    os.write(2, b"interrupted\n")
    os._exit(128 + signum)
