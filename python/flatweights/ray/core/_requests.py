"""The messages between members and coordinator: a member's request, and a call's response."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from flatweights._average import Nonfinite

_MOST_KNOWN = 256  # layouts that need not be sent again, and requests

Operation = Literal["average", "broadcast", "all_gather", "leave", "give", "heal"]

Kind = tuple[Operation, str | None, int | None, str | None, str | None]
"""The operation of a `Request`, its layout, its root, its name, and the layout of its state."""


class MemberError(RuntimeError):
    """A process cannot join a process group, or a member cannot continue in it."""


class MemberDiedError(RuntimeError):
    """A member's process has ended, or dropped its `Member`, without `Member.leave`."""


class MemberRaisedError(MemberDiedError):
    """A member has left its ``with`` with an exception, or a call was interrupted."""

    follows_rank = True  # "rank 1 left with RuntimeError: ..."


def end_of(who: str, raised: str = "") -> MemberDiedError:
    """Return the error of process ``who``, which ended without `leave`: perhaps it ``raised``."""
    if raised:
        return MemberRaisedError(f"left with {raised} ({who})")
    return MemberDiedError(f"{who} has ended without leave()")


class CallsDifferError(ValueError):
    """Members have made different calls, or have different layouts: nothing was averaged."""


class LacksStateError(RuntimeError):
    """A member needs the state of the training: it asks again, as a member that lacks it."""


class OutOfSyncError(LacksStateError):
    """The others made another call meanwhile: they may be at another place in the training."""


class SegmentRef(NamedTuple):
    """Where weights are on a GPU.

    Attributes:
        owner: The number of the session whose segment it is.
        segment: The index of the segment among those of its owner.
        generation: The number of segments that have had this index.
    """

    owner: int
    segment: int
    generation: int


class OnGpu(NamedTuple):
    """The GPU that a member's variables are on, and where their values are.

    Attributes:
        uuid: The UUID of the GPU.
        placed: The segment of the member that has the values; None, if they come through memory of
            the coordinator.
    """

    uuid: bytes
    placed: SegmentRef | None = None


class Request(NamedTuple):
    """One member's part of a call.

    Attributes:
        operation: The operation that it asks for.
        digest: The digest of the layout of its weights; None, if it has no weights to send or
            compare.
        root: The rank whose weights a broadcast takes.
        weight: The weight of this member's model.
        timeout: Seconds that others may be later than the first member.
        min_results: The number of ranks that an average needs; all that have joined and not left,
            if None.
        nonfinite: What to do about NaN and infinity.
        rule: The rule that replaces the mean, pickled, and its name in errors and comparisons.
        state: The digest of the layout of the state that heals members; None, if this call heals
            none.
        lacks: Whether this member lacks the state: its weights are not part of the average.
        twins: Those of `keys` that are also those of calls with other variables, or with another
            state: two of one layout take turns in this member's calls.
        gpu: The GPU that its variables are on; None, if they are not on one.
        name: The name of the objects that all members gather; None in other calls.
        value: This member's object, pickled.
        only_next: Whether it is about the next call only: if others have made one since this
            member's last response, it is answered by `OutOfSyncError`.
        from_state: Whether what it brings is as new as the states of this member: an object that it
            gathers, or a tensor of a step, but not weights.
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
    twins: tuple[str, ...] = ()
    gpu: OnGpu | None = None
    name: str | None = None
    value: bytes = b""
    only_next: bool = False
    from_state: bool = False

    @property
    def is_urgent(self) -> bool:
        """Whether the coordinator must read it before all others have asked."""
        is_call = self.operation in ("average", "broadcast", "all_gather")
        return self.timeout is not None or self.lacks or not is_call

    @property
    def brings_weights(self) -> bool:
        """Whether the member sends the weights that the request names, if it is their root."""
        return not (self.lacks or self.operation == "heal")

    @property
    def is_in_segment(self) -> bool:
        """Whether its weights are in a segment of a GPU."""
        return self.gpu is not None and self.gpu.placed is not None

    def through_host(self) -> Request:
        """Return the same request, with weights in memory of the host."""
        return self._replace(gpu=self.gpu._replace(placed=None)) if self.gpu else self

    @property
    def keys(self) -> tuple[str, str]:
        """The layouts that tell the state, and then the weights, from those of other calls."""
        state = self.state or "no state"
        return state, f"{self.operation} of {self.digest}, root {self.root}, with {state}"

    @property
    def fields(self) -> tuple[Any, ...]:
        """The fields, without those that few requests have."""
        is_whole = self.name is not None or self.gpu is not None or self.only_next
        return tuple(self) if is_whole or self.from_state else self[:-5]

    @property
    def signature(self) -> tuple[Any, ...]:
        """Everything but the weight: a request of the same signature repeats this one."""
        return self[:3] + self[4:]

    @property
    def may_repeat(self) -> bool:
        """Whether all that the coordinator has to know of it is in the messages of repetitions."""
        is_plain = self.operation in ("average", "broadcast") and self.rule is None
        return is_plain and self.gpu is None and not (self.lacks or self.twins)

    @property
    def kind(self) -> Kind:
        """The kind of call: the response of one answers requests of the same kind."""
        return self.operation, self.digest, self.root, self.name, self.state

    @property
    def rule_name(self) -> str | None:
        """The name of the rule, with its arguments."""
        return None if self.rule is None else self.rule[0]

    def agrees_with(self, other: Request) -> bool:
        """Whether both can be parts of one call."""
        return (
            self.kind == other.kind
            and self.min_results == other.min_results
            and self.nonfinite == other.nonfinite
            and self.rule_name == other.rule_name
        )

    def __str__(self) -> str:
        """Return the call as errors show it."""
        options = [] if self.digest is None else [f"layout {self.digest[:12]}"]
        options += [] if self.name is None else [f"name={self.name!r}"]
        options += [] if self.root is None else [f"root={self.root}"]
        options += [] if self.min_results is None else [f"min_results={self.min_results}"]
        options += [] if self.nonfinite == "raise" else [f"nonfinite={self.nonfinite!r}"]
        options += [] if self.rule is None else [f"rule={self.rule_name}"]
        options += [] if self.state is None else [f"state of layout {self.state[:12]}"]
        return f"{self.operation}({', '.join(options)})"


class Response(NamedTuple):
    """The response of a call; the weights travel beside it.

    Attributes:
        number: The number of the call in the process group, from 1; 0 for the first response of
            each member.
        size: The number of members of the process group.
        ranks: The ranks that take part at present.
        sessions: The numbers of the sessions whose requests it answers: a rank may have had several
            sessions.
        donor: The session that gives its state to `recovering`; 0 without a donor.
        recovering: The sessions that lack the state.
        error: The error that all members raise.
        layout: The layout of the weights, pickled; None, if the requests contain it.
        arguments: The arguments of `Round` after the weights; empty with an error.
        prepared: The number by which those whose requests it answers may repeat them; 0, if they
            may not.
        placed: The segment of a GPU that has the weights; None, if they are on the host.
        may_stay: Whether members may leave their weights on the GPU in the next such call.
        values: The objects that all have gathered, by rank, pickled.
    """

    number: int
    size: int
    ranks: tuple[int, ...]
    sessions: tuple[int, ...] = ()
    donor: int = 0
    recovering: tuple[int, ...] = ()
    error: Exception | None = None
    layout: bytes | None = None
    arguments: tuple[Any, ...] = ()
    prepared: int = 0
    placed: SegmentRef | None = None
    may_stay: bool = False
    values: Mapping[int, bytes] = {}

    @property
    def fields(self) -> tuple[Any, ...]:
        """The fields, without those that few responses have."""
        return tuple(self) if self.values or self.may_stay or self.placed else self[:-3]


Told: TypeAlias = tuple[bytes | Response, NDArray[np.uint8] | None]
"""A response as a member gets it, pickled unless it repeats one; and its weights, or a state."""


def remember(known: dict[Any, Any], key: Any, value: Any = None) -> None:
    """Add what a member and its coordinator both know from now on, and forget the oldest."""
    known[key] = value
    if len(known) > _MOST_KNOWN:
        del known[next(iter(known))]
