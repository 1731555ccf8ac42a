"""A call of `Member.average_variables` that may be made again: what need not be found out anew.

If the host repeats calls (`RepeatedCalls`), such a call consists of three steps: the variables are
gathered into a window of this process, one function of C++ asks and waits, and the variables are
set from the host's window. Anything else makes it a call like the first.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

from flatweights._layout import Layout
from flatweights.ray._round import Round
from flatweights.ray._variables import Variables, without_seeds
from flatweights.ray.core._asks import Ask
from flatweights.ray.members._host_end import Repeating
from flatweights.ray.members._turns import Turns

_MOST = 8  # calls that a member remembers


class Again(NamedTuple):
    """A call that may be made again.

    Attributes:
        variables: The variables that it averages.
        state: The state that heals members; None without one.
        arguments: Its other arguments, in their order.
        layout: The layout of the variables.
        ask: What it asks.
        repeating: The way to ask for it again.
        turns: How often another model had taken its turn.
        like: The `Round` of the last such call, without weights.
        options: Those with which the variables are set.
    """

    variables: weakref.ref[Any]
    state: weakref.ref[Any] | None
    arguments: tuple[Any, ...]
    layout: Layout
    ask: Ask
    repeating: Repeating
    turns: int
    like: Round
    options: dict[str, bool]

    def is_for(self, variables: Variables, state: Any, turns: Turns) -> bool:
        """Whether the next call with these objects is like this one."""
        if self.variables() is not variables:
            return False
        layout: Layout = variables.layout
        if layout is not self.layout:
            return False
        if (None if self.state is None else self.state()) is not state:
            return False
        way, known = self.repeating
        is_there = way.windows.changes == way.changes
        return self.turns == turns.changes and known.was_repeated and is_there


class Calls(dict[int, Again]):
    """The calls that a member may make again, by the id of their variables."""

    def note(
        self,
        variables: Any,
        state: Any,
        arguments: tuple[Any, ...],
        ask: Ask,
        more: tuple[Repeating, int, Round],
    ) -> None:
        """Note a call that was just made, if it may be made again.

        Args:
            variables: See `Again`.
            state: See `Again`.
            arguments: See `Again`.
            ask: See `Again`.
            more: The way to ask again, the turns so far, and the round.
        """
        try:
            refs = weakref.ref(variables), None if state is None else weakref.ref(state)
        except TypeError:  # a class has no weak references
            return
        self.pop(id(variables), None)
        way, turns, like = more
        layout, options = variables.layout, without_seeds(variables)
        self[id(variables)] = Again(*refs, arguments, layout, ask, way, turns, like, options)
        if len(self) > _MOST:
            del self[next(iter(self))]
