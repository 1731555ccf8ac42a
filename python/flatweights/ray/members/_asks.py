"""The messages between members and their host: a member's ask, and the outcome of a call."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from flatweights._average import Nonfinite

_MOST_LAYOUTS = 64  # that need not be sent again

Operation = Literal["average", "broadcast", "leave", "give", "heal"]


class MemberError(RuntimeError):
    """A meeting cannot be joined, or a member of it cannot go on."""


class MemberDiedError(RuntimeError):
    """A member's process has ended, or dropped its `Member`, without `Member.leave`."""


class MemberRaisedError(MemberDiedError):
    """A member has left its ``with`` with an exception, or a call was interrupted."""

    follows_rank = True  # "rank 1 left with RuntimeError: ..."


def end_of(who: str, raised: str = "") -> MemberDiedError:
    """Return how process ``who`` ended without `leave`: with what it ``raised``, if anything."""
    if raised:
        return MemberRaisedError(f"left with {raised} ({who})")
    return MemberDiedError(f"{who} has ended without leave()")


class CallsDifferError(ValueError):
    """Members have called different things, or with other layouts: nothing was averaged."""


class LacksStateError(RuntimeError):
    """A member has to be given the state of the training: it asks again, as one that lacks it."""


class ElsewhereError(LacksStateError):
    """The others have made another call with a state: they may be elsewhere in the training."""


class Ask(NamedTuple):
    """One member's part of a call.

    Attributes:
        operation: The operation that it asks for.
        digest: The digest of the layout of its weights; None, if it has none to send or compare.
        root: The rank whose weights a broadcast takes.
        weight: The weight of this member's model.
        timeout: Seconds that others may be later than the first member.
        min_results: The number of ranks that make an average; all that have joined and not left,
            if None.
        nonfinite: What to do about NaN and infinity.
        rule: The rule that replaces the mean, pickled, and its name in errors and comparisons.
        state: The digest of the layout of the state that those that lack it are given; None if this
            call gives none.
        lacks: Whether this member lacks the state: its weights are not part of the average.
    """

    operation: Operation
    digest: str | None = None
    root: int | None = None
    weight: float = 1.0
    timeout: float | None = None
    min_results: int | None = None
    nonfinite: Nonfinite = "raise"
    rule: tuple[str, bytes] | None = None
    state: str | None = None
    lacks: bool = False

    @property
    def is_urgent(self) -> bool:
        """Whether the host is to hear it before all others have asked."""
        is_call = self.operation in ("average", "broadcast")
        return self.timeout is not None or self.lacks or not is_call

    @property
    def rule_name(self) -> str | None:
        """The name of the rule, with its arguments."""
        return None if self.rule is None else self.rule[0]

    def is_served_by(self, other: Ask) -> bool:
        """Whether the outcome of the call that ``other`` was part of is one for this part."""
        return (
            self.operation == other.operation
            and self.root == other.root
            and (None in (self.digest, other.digest) or self.digest == other.digest)
        )

    def agrees_with(self, other: Ask) -> bool:
        """Whether both can be parts of one call."""
        return (
            self.is_served_by(other)
            and self.min_results == other.min_results
            and self.nonfinite == other.nonfinite
            and self.rule_name == other.rule_name
            and self.state == other.state
        )

    def __str__(self) -> str:
        """Return the call as errors show it."""
        options = [] if self.digest is None else [f"layout {self.digest[:12]}"]
        options += [] if self.root is None else [f"root={self.root}"]
        options += [] if self.min_results is None else [f"min_results={self.min_results}"]
        options += [] if self.nonfinite == "raise" else [f"nonfinite={self.nonfinite!r}"]
        options += [] if self.rule is None else [f"rule={self.rule_name}"]
        options += [] if self.state is None else [f"state of layout {self.state[:12]}"]
        return f"{self.operation}({', '.join(options)})"


class Outcome(NamedTuple):
    """What came of a call: the weights travel beside it.

    Attributes:
        number: Counts the calls of the meeting, from 1; 0 is the first one of each member.
        size: How many members the meeting has.
        ranks: Those that take part at present.
        seats: The numbers of the seats whose asks it is of: a rank may have had several.
        giver: The seat that gives its state to `lacking`; 0 if none is to.
        lacking: The seats that lack the state.
        error: What all members raise.
        layout: That of the weights, pickled, unless all members have said what they expect.
        facts: What `Round` takes after the weights; nothing with an error.
    """

    number: int
    size: int
    ranks: tuple[int, ...]
    seats: tuple[int, ...] = ()
    giver: int = 0
    lacking: tuple[int, ...] = ()
    error: Exception | None = None
    layout: bytes | None = None
    facts: tuple[Any, ...] = ()


def remember(known: dict[str, Any], digest: str, layout: Any = None) -> None:
    """Add a layout that a member sends its host, and forget the oldest: both ends forget alike."""
    known[digest] = layout
    if len(known) > _MOST_LAYOUTS:
        del known[next(iter(known))]
