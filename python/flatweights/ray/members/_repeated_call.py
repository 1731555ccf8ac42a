"""A member's call that may be made again: what need not be found out anew.

If the coordinator repeats calls (`RepeatedCalls`), an average consists of three steps: the
variables, or the parts of a model, are gathered into a segment of this process, one function of C++
asks and waits, and they are set from the coordinator's segment. Anything else makes it a call like
the first.

The tensors of a step of TensorFlow's (`flatweights.keras`) need no Python for these three: from the
second such call on, the op makes them, as long as it has the member's turn (`_core.MemberTurn`) and
nothing has changed on which the next call depends. If the response is no repetition, or there is
none in time, Python goes on with the call.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from flatweights._layout import Layout
from flatweights.ray.channels._member_channel import Shortcut
from flatweights.ray.core._requests import Request, Response
from flatweights.ray.members._twins import Twins
from flatweights.ray.results._round import repeated_arguments
from flatweights.ray.results._variables import Variables, without_seeds

# Types of arguments that stay what they are: an array of one number, such as a weight, may change.
_FIXED = (str, int, float, np.generic, type(None))


@dataclass
class Repeatable:
    """What a member may ask for again.

    Attributes:
        response: The response of the last such call that was not a repetition.
        was_repeated: Whether the last one was a repetition.
    """

    response: Response
    was_repeated: bool = False


def response_again(response: Response, number: int, *seconds: float) -> Response:
    """Return the response of a call that repeats that of ``response``; see `repeated_arguments`."""
    return response._replace(
        number=number, arguments=repeated_arguments(response.arguments, number, *seconds)
    )


class RepeatedCall(NamedTuple):
    """A call of a member, an average or a broadcast, that may be made again.

    Attributes:
        key: What the next such call has, too: the same variables, or the layout of its model.
        state: The state that heals members; None without one.
        arguments: Its other arguments, in their order.
        layout: The layout of the variables.
        request: What it asks.
        shortcut: The way to ask for it again.
        known: What is known of such calls.
        changes: How often another model had taken its turn.
        options: Those with which the variables are set.
        sets: Whether it sets the variables: not if they are the root's of a broadcast.
        is_in_step: Whether the variables are the tensors of a step, whose op may repeat the call
            without Python.
    """

    key: weakref.ref[Any]
    state: weakref.ref[Any] | None
    arguments: tuple[Any, ...]
    layout: Layout
    request: Request
    shortcut: Shortcut
    known: Repeatable
    changes: int
    options: dict[str, bool]
    sets: bool
    is_in_step: bool

    @classmethod
    def of(
        cls,
        variables: Any,
        key: Any,
        state: Any,
        arguments: tuple[Any, ...],
        request: Request,
        way: tuple[Shortcut, Repeatable],
        twins: Twins,
        *,
        sets: bool,
    ) -> RepeatedCall | None:
        """Return a call that was just made; None, if it cannot be made again.

        Args:
            variables: What it averaged or broadcast.
            key: See the attribute, also for the following.
            state: See the attribute.
            arguments: See the attribute.
            request: See the attribute.
            way: The shortcut, and what is known of such calls.
            twins: Those of the member.
            sets: See the attribute.
        """
        if not all(isinstance(one, _FIXED) for one in arguments):
            return None
        try:
            refs = weakref.ref(key), None if state is None else weakref.ref(state)
        except TypeError:  # a class has no weak references
            return None
        options, is_in_step = without_seeds(variables), hasattr(variables, "let_repeat")
        layout, changes = variables.layout, twins.changes
        return cls(*refs, arguments, layout, request, *way, changes, options, sets, is_in_step)

    def is_for(self, key: Any, variables: Variables, state: Any, twins: Twins) -> bool:
        """Whether the next call with these objects is like this one."""
        if self.key() is not key:
            return False
        layout: Layout = variables.layout
        if layout is not self.layout:
            return False
        if (None if self.state is None else self.state()) is not state:
            return False
        is_there = self.shortcut.segments.changes == self.shortcut.changes
        return self.changes == twins.changes and self.known.was_repeated and is_there
