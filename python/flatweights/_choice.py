"""The choice of some of a model's variables: ``exclude=`` and ``only=``."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from flatweights._layout import Slot

Which: TypeAlias = str | Iterable[str] | Callable[[Slot], Any]
"""Names of variables or prefixes of names, or a function that is true of the slots that it means.

A prefix ends where a part of a name ends: ``dense`` means ``dense/kernel``, not ``dense_1/kernel``.
"""

_SHOWN = 3  # names in an error


class Choice:
    """The variables that ``exclude=`` leaves out, or that ``only=`` keeps.

    Attributes:
        by_slot: Whether a function of slots decides.
    """

    def __init__(self, exclude: Which | None = None, only: Which | None = None) -> None:
        """Check the arguments, of which one may be given.

        Raises:
            TypeError: If one is neither a text, nor texts, nor a function.
            ValueError: If both are given.
        """
        if exclude is not None and only is not None:
            raise ValueError("exclude: expected None with only, got both")
        self._keeps = only is not None
        self._argument = "only" if self._keeps else "exclude"
        which = only if self._keeps else () if exclude is None else exclude
        self._function: Callable[[Slot], Any] | None = None
        self._texts: Sequence[str] = ()
        if callable(which):
            self._function = which
        else:
            self._texts = self._texts_of(which)
        self.by_slot = self._function is not None

    @property
    def arguments(self) -> dict[str, Which]:
        """The arguments that make an equal choice, whatever was given: an iterator is used up."""
        return {self._argument: self._function or self._texts}

    def __bool__(self) -> bool:
        """Whether it may leave out any variable."""
        return self._keeps or self.by_slot or bool(self._texts)

    def kept(
        self,
        names: Sequence[str],
        owners: Mapping[str, str] | None = None,
        slots: Sequence[Slot] = (),
    ) -> list[str]:
        """Return the names of the variables that are left, in order.

        Args:
            names: The names of all variables.
            owners: The names of optimizers' slots, each with that of the variable which it is for:
                where a variable is left out, its slots are. Only a text of ``only=`` that means
                slots, and none of a variable that is left, has them without their variables.
            slots: The slots of all variables, if a function decides.

        Raises:
            TypeError: If the function returns what is neither true nor false, such as an array.
            ValueError: If a text means none of them, or none is left.
        """
        owners = owners or {}
        if self._function is None:
            by_text = self._meant(names)
            meant = set[str]().union(*by_text)
            if self._keeps:
                meant = set[str]().union(*(_with_owners(some, meant, owners) for some in by_text))
            meant |= {name for name, owner in owners.items() if owner in meant}
        else:
            meant = {slot.name for slot in slots if self._is_true(self._function(slot), slot)}
        left = meant if self._keeps else {*names} - meant
        if self._function is not None:
            left -= {name for name, owner in owners.items() if owner not in left}
        if not left:
            raise ValueError(
                f"{self._argument}: expected variables that are left, got none of "
                f"{len(names)}: {first_of(names)}"
            )
        return [name for name in names if name in left]

    def _is_true(self, result: Any, slot: Slot) -> bool:
        """Return the truth of what the function returned for ``slot``."""
        try:
            return bool(result)
        except Exception as error:  # another library's method may raise anything
            raise TypeError(
                f"{self._argument}: expected a function that returns True or False, got "
                f"{type(result).__name__} for {slot}: {error}"
            ) from error

    def _meant(self, names: Sequence[str]) -> list[set[str]]:
        """Return the names that each text means."""
        meant = []
        for text in self._texts:
            prefix = text.rstrip("/") + "/"
            found = {name for name in names if name == text or name.startswith(prefix)}
            if not found:
                raise ValueError(
                    f"{self._argument}: expected names of variables or prefixes of names, got "
                    f"{text!r}, which none has; {_near(text, names)}"
                )
            meant.append(found)
        return meant

    def _texts_of(self, which: Any) -> Sequence[str]:
        expected = f"{self._argument}: expected names, prefixes of names, or a function of a slot"
        if isinstance(which, str):
            return (which,)
        if isinstance(which, bytes) or not isinstance(which, Iterable):
            raise TypeError(f"{expected}, got {which!r}")
        try:
            texts = [*which]
        except TypeError as error:  # an array of no dimension, which only looks iterable
            raise TypeError(f"{expected}, got {which!r}: {error}") from error
        for text in texts:
            if not isinstance(text, str):
                raise TypeError(f"{expected}, got {text!r} among them")
        return texts


def _with_owners(some: set[str], meant: set[str], owners: Mapping[str, str]) -> set[str]:
    """Return ``some`` without the slots whose owners are not ``meant``, if it has other slots.

    So ``["body", "optimizer"]`` has the slots of ``body``, and ``"optimizer"`` alone has all.
    """
    slots = some & owners.keys()
    left = {name for name in slots if owners[name] in meant}
    return some - (slots - left) if left else some


def _near(text: str, names: Sequence[str]) -> str:
    """Return a clause about names and prefixes that are like ``text``."""
    prefixes = {
        "/".join(parts[:count]): None
        for parts in (name.split("/") for name in names)
        for count in range(1, len(parts) + 1)
    }
    near = difflib.get_close_matches(text, prefixes, _SHOWN)
    if near:
        return f"near it are {', '.join(map(repr, near))}"
    return f"the variables are {first_of(names)}"


def first_of(names: Sequence[str]) -> str:
    """Return the first of ``names`` for an error, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (", ".join(map(repr, names[:_SHOWN])) or "no names") + more
