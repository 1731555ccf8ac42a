"""The member that a callback or an optimizer averages with: its own, or a shared one."""

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np

from flatweights.ray import CallsDifferError, Member, NotInTrainError, join

_lock = threading.Lock()
_shared: Member | None = None
_leases: weakref.WeakSet["MemberLease"] = weakref.WeakSet()  # of the shared member


Place = Literal["start", "epoch", "step", "weights", "logs", "end"]

# Where in a training calls are made, as errors say it of a rank.
_PLACES: dict[Place, str] = {
    "start": "begins its training",
    "epoch": "begins or ends an epoch",
    "step": "is at a step of its epoch",
    "weights": "averages its weights",
    "logs": "has ended its epoch",
    "end": "has ended its training",
}
_PATIENCE = 5.0  # seconds that members wait to tell each other where they are


@contextmanager
def calls_are_equal(member: Member, place: Place) -> Iterator[None]:
    """Enclose a call of ``member``: if members have called different things, say where each is.

    Raises:
        CallsDifferError: If they have.
    """
    try:
        yield
    except CallsDifferError as error:
        raise CallsDifferError(
            f"{_where_all_are(member, place)}. All members need the same model, the same callbacks "
            "in the same order, validation data in all of them or in none, and as many batches in "
            "an epoch: give fit the same steps_per_epoch, and repeat the data. Their calls: "
            f"{error}"
        ) from error


def _where_all_are(member: Member, place: Place) -> str:
    """Return where the members are, all of which have had the same error and so ask here, too."""
    own = np.zeros(member.size)
    own[member.rank] = 1 + [*_PLACES].index(place)
    try:
        met = member.average({"places": own}, timeout=_PATIENCE, min_results=1)
    except Exception:  # one does not ask: it is no training, or its process has ended
        return f"rank {member.rank} {_PLACES[place]}, others do not"
    codes = np.rint(met.weights["places"] * len(met.used)).astype(int)
    ranks = {
        name: [rank for rank in met.used if codes[rank] == code]
        for code, name in enumerate(_PLACES, 1)
        if code in codes
    }
    if ranks.keys() == {"step", "logs"}:
        return f"{_named(ranks['logs'], _PLACES['logs'])}, {_named(ranks['step'], 'has not')}"
    places = [_named(those, _PLACES[name]) for name, those in ranks.items()]
    return ", ".join(places) if len(ranks) > 1 else f"{places[0]}, with different arguments"


def _named(ranks: Sequence[int], does: str) -> str:
    """Return a sentence about ``ranks``, of what one of them does."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} {does}"
    plural = {"has": "have", "is": "are"}
    verb, _, rest = does.partition(" ")
    verb = plural.get(verb, verb.removesuffix("s"))
    rest = rest.replace("its", "their")
    return f"ranks {', '.join(map(str, ranks))} {verb} {rest}"


class MemberLease:
    """A callback's or an optimizer's use of a member, and how long and for whom its calls wait.

    Those that are given no member share one, which joins with the first lease and leaves when the
    last one ends.

    Attributes:
        timeout: Seconds that other members may be late; for ever, if None.
        min_results: How many members make an average; all, if None.
    """

    timeout: float | None
    min_results: int | None

    def __init__(
        self,
        who: str,
        member: Member | None,
        timeout: float | None = None,
        min_results: int | None = None,
        needs_all: str = "",
    ) -> None:
        """Use ``member``, or the shared one if None.

        Args:
            who: What errors call the callback or the optimizer.
            member: The member.
            timeout: See the attribute.
            min_results: See the attribute.
            needs_all: What of it needs all members, if anything does.
        """
        if not isinstance(member, Member | None):
            raise TypeError(f"member: expected a Member, got {type(member).__name__}")
        self.who = who
        self.needs_all = needs_all
        self.given = {"member": member, "timeout": timeout, "min_results": min_results}
        self.use(self.given)

    def use(self, terms: dict[str, Any]) -> None:
        """Have calls be made on these terms."""
        self._given: Member | None = terms["member"]
        self.timeout = terms["timeout"]
        self.min_results = terms["min_results"]

    def take(self) -> Member:
        """Return the member; join, if it is shared and nobody has yet.

        Raises:
            RuntimeError: If there is nothing that says which meeting to join.
        """
        global _shared
        if self._given is not None:
            return self._given
        with _lock:
            if _shared is None:
                try:
                    _shared = join()
                except NotInTrainError as error:
                    raise RuntimeError(
                        "member: outside of Ray Train expected flatweights.ray.join(name, "
                        "rank=..., size=...), got None"
                    ) from error
            _leases.add(self)
            return _shared

    def end(self) -> None:
        """End the lease. With the last lease, the shared member leaves; a given member stays."""
        global _shared
        self.use(self.given)
        with _lock:
            _leases.discard(self)
            if not _leases and _shared is not None:
                _shared.leave()
                _shared = None


def agree(leases: Sequence[MemberLease]) -> None:
    """Have all ``leases`` of a training wait alike: who is given terms says them for all.

    A member that is late or dead for one of them is so for the others: if only one went on without
    it, the next would wait for it.

    Raises:
        ValueError: If they were given different ones.
    """
    terms: dict[str, Any] = {}
    for name in ("member", "timeout", "min_results"):
        said = [lease for lease in leases if lease.given[name] is not None]
        for lease in said[1:]:
            if lease.given[name] != said[0].given[name]:
                raise ValueError(
                    f"{name}: expected the same of all that average in one training, got "
                    f"{said[0].given[name]!r} of {said[0].who} and {lease.given[name]!r} of "
                    f"{lease.who}. It need be given to one of them only"
                )
        terms[name] = said[0].given[name] if said else None
        for lease in leases:
            if name == "min_results" and said and lease.needs_all:
                raise ValueError(
                    f"min_results: expected None with {lease.needs_all}, which needs all members, "
                    f"got {terms[name]!r} of {said[0].who}"
                )
    for lease in leases:
        lease.use(terms)
