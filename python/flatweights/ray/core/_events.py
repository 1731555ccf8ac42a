"""What a process group's calls are told, and what they say is to be done: plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from flatweights.ray.core._peer import Peer
from flatweights.ray.core._requests import MemberDiedError, Request
from flatweights.ray.core._response_cache import CacheChanges

# Events.


class Requested(NamedTuple):
    """A member asks for a call, or for the state that it lacks."""

    peer: Peer


class Gave(NamedTuple):
    """A donor has sent its state."""

    peer: Peer


class Ended(NamedTuple):
    """A member has left or, with a reason, ended in another way."""

    peer: Peer
    why: MemberDiedError | None = None


class Reduced(NamedTuple):
    """The call of `Reduce` has a result.

    Attributes:
        used: The ranks whose weights it consists of.
        nbytes: The bytes of its response.
        gpu: The GPU on which its weights are; None, if they are on the host.
    """

    used: Sequence[int]
    nbytes: int
    gpu: bytes | None = None


class Refused(NamedTuple):
    """The call of `Reduce` is an error, which all that take part in it raise."""


class LastCall(NamedTuple):
    """The last call of one kind in a series.

    Attributes:
        request: The request of the lowest rank.
        number: The number of its response.
        nbytes: The bytes of its response.
    """

    request: Request
    number: int
    nbytes: int


class Repeated(NamedTuple):
    """All members have repeated calls, and have the responses.

    Attributes:
        calls: The number of calls.
        made: The last one of each kind, in the order of their numbers.
    """

    calls: int
    made: Sequence[LastCall]


class RequestAgain(NamedTuple):
    """The call of `Reduce` needs weights that are on a GPU, through memory of the host."""


class StateCopied(NamedTuple):
    """The state of `CopyState` was copied; or, with a reason, it could not be."""

    number: int
    why: Exception | None = None


class Tick(NamedTuple):
    """All that has happened so far was told: what is due now?"""


Event: TypeAlias = (
    Requested | Gave | Ended | Reduced | Refused | Repeated | RequestAgain | StateCopied | Tick
)


# Actions.


class Reduce(NamedTuple):
    """Average, relay or gather what the members ask for, and tell what came of it.

    Attributes:
        first: The request of the lowest rank.
        requests: The requests by rank, in their order.
        peers: The members that take part, likewise.
        others: The members that get the response without taking part.
        late: The ranks that are late.
        lost: By rank, the reasons for which members have ended without leaving.
        timeout: The seconds after which the late ones were.
    """

    first: Request
    requests: dict[int, Request]
    peers: Sequence[Peer]
    others: Sequence[Peer]
    late: Sequence[int]
    lost: dict[int, MemberDiedError]
    timeout: float | None


class Send(NamedTuple):
    """Give members the response of the call that was reduced, and keep it.

    Attributes:
        number: Its number.
        peers: The members, in the order in which they get it.
        took_part: The numbers of those whose requests it answers.
        donor: The number of the member that gives its state; 0 without one.
        recovering: The members that get that state.
        readers: If the weights of the first are on a GPU, all members that read the response, with
            their requests.
        late: The ranks that were late.
        named: The ranks that the log calls dead or late.
    """

    number: int
    peers: Sequence[Peer]
    took_part: tuple[int, ...]
    donor: int
    recovering: Sequence[Peer]
    readers: Sequence[tuple[Peer, Request]]
    late: tuple[int, ...]
    named: frozenset[int]


class SendKept(NamedTuple):
    """Give members a response that is kept."""

    number: int
    peers: Sequence[Peer]


class Respond(NamedTuple):
    """Answer requests that are part of no call: by an error, unless it is None."""

    peers: Sequence[Peer]
    error: Exception | None = None


class TimeIsUp(NamedTuple):
    """Tell members that the ``others`` have not called in time."""

    peers: Sequence[Peer]
    others: Sequence[int]
    timeout: float | None


class NobodyHas(NamedTuple):
    """Tell members that nobody is left that has the state of the training."""

    peers: Sequence[Peer]


class SendAgain(NamedTuple):
    """Tell members to send their weights again, through memory of the host."""

    peers: Sequence[Peer]


class CopyState(NamedTuple):
    """Copy the state that has just come, for the healing of this number."""

    number: int


class SendState(NamedTuple):
    """Give members the state of the healing of this number."""

    number: int
    peers: Sequence[Peer]


class Release(NamedTuple):
    """Forget the state of the healing of this number."""

    number: int


class Keep(NamedTuple):
    """Change which responses are kept, and where."""

    changes: CacheChanges


class Detach(NamedTuple):
    """A member is gone: close what leads to it."""

    peer: Peer


class Log(NamedTuple):
    """Write a line to the log."""

    level: int
    text: str
    args: tuple[Any, ...] = ()


class LogDeath(NamedTuple):
    """Write to the log that a member has ended, and why."""

    peer: Peer


Action: TypeAlias = (
    Reduce
    | Send
    | SendKept
    | Respond
    | TimeIsUp
    | NobodyHas
    | SendAgain
    | CopyState
    | SendState
    | Release
    | Keep
    | Detach
    | Log
    | LogDeath
)
