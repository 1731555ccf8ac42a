"""Types of command-line arguments that reject invalid values and say what they expect."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

PLOT_SUFFIXES = (".png", ".svg", ".pdf")


def integer(least: int, most: int) -> Callable[[str], int]:
    """Return a type for integers from ``least`` to ``most``, both included."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            expected = f"an integer from {least} to {most}"
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
        return value

    return parse


def plot_file(text: str) -> Path:
    """Return the path of a plot, after checking that its type is known and it is writable."""
    path = Path(text)
    if path.suffix.lower() not in PLOT_SUFFIXES:
        raise argparse.ArgumentTypeError(
            f"expected a file name ending in {', '.join(PLOT_SUFFIXES)}, got {text!r}"
        )
    try:
        file = Path(os.path.realpath(path))  # what a link names
        existed = file.exists()
        # Permissions alone do not show that a file system is read-only or full.
        with file.open("ab"):
            pass
        if not existed:
            file.unlink()
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"expected a file that can be written, got {text!r}: {error.strerror}"
        ) from None
    return path
