"""Types of command-line arguments that reject invalid values and say what they expect."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path

PLOT_SUFFIXES = (".png", ".svg", ".pdf")


def integer(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return a type for integers from ``least`` to ``most``, both included."""
    expected = f"at least {least}" if most is None else f"an integer from {least} to {most}"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
        return value

    return parse


def fraction(text: str) -> float:
    """Return a number that is at least 0 and below 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < 1.0:
        raise argparse.ArgumentTypeError(
            f"expected a number of at least 0 and below 1, got {text!r}"
        )
    return value


def positive(most: float = math.inf) -> Callable[[str], float]:
    """Return a type for finite numbers above 0 and at most ``most``."""
    expected = "a number above 0" if most == math.inf else f"a number above 0, at most {most:g}"

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (0.0 < value <= most and value < math.inf):
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
    return output_file(text)


def output_file(text: str) -> Path:
    """Return a path, after checking that it is writable."""
    path = Path(text)
    existed = path.exists()
    try:
        # Permissions alone do not show that a file system is read-only or full.
        with path.open("ab"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"expected a file that can be written, got {text!r}: {error.strerror}"
        ) from None
    return path
