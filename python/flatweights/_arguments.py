"""Types of command-line arguments that reject invalid values and say what they expect."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

PLOT_SUFFIXES = (".png", ".svg", ".pdf")

Number = TypeVar("Number", int, float)


def _number(
    read: Callable[[str], Number], accepts: Callable[[Number], bool], expected: str
) -> Callable[[str], Number]:
    def parse(text: str) -> Number:
        try:
            value = read(text)
        except ValueError:
            value = None
        if value is None or not accepts(value):
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
        return value

    return parse


def integer(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return a type for integers from ``least`` to ``most``, both included."""
    expected = f"at least {least}" if most is None else f"an integer from {least} to {most}"
    return _number(int, lambda n: n >= least and (most is None or n <= most), expected)


def positive(most: float = math.inf) -> Callable[[str], float]:
    """Return a type for finite numbers above 0 and at most ``most``."""
    expected = "a number above 0" if most == math.inf else f"a number above 0, at most {most:g}"
    return _number(float, lambda x: 0.0 < x <= most and x < math.inf, expected)


fraction = _number(float, lambda x: 0.0 <= x < 1.0, "a number of at least 0 and below 1")
"""The type for numbers of at least 0 and below 1."""


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
