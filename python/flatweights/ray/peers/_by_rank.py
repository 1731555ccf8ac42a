"""Functions of users that return more arguments for one rank, or for one round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

ByRank = Callable[[int], Sequence[Any]]
"""A function of the rank that returns arguments."""


def check_by_rank(arguments: Any, name: str = "arguments", of: str = "rank") -> None:
    """Raise `TypeError` unless ``arguments`` is a function or None."""
    if arguments is not None and not callable(arguments):
        raise TypeError(f"{name}: expected a function of the {of}, got {arguments!r}")


def more_arguments(
    arguments: ByRank, number: int, name: str = "arguments", of: str = "rank"
) -> tuple[Any, ...]:
    """Return the arguments of one ``number``; raise `TypeError` if they are no sequence.

    Args:
        arguments: The function.
        number: The number to call it with.
        name: The name of the function in errors.
        of: The kind of number.
    """
    more: Any = arguments(number)
    if not isinstance(more, (Sequence, Iterator)):
        raise TypeError(
            f"{name}: expected a function that returns a sequence, such as [{more!r}], got "
            f"{type(more).__name__} for {of} {number}"
        )
    return tuple(more)
