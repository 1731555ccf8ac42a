"""The member that a callback or an optimizer averages with: its own, or a shared one."""

import re
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from flatweights._locks import CallLock
from flatweights._numbers import check_count, real_number
from flatweights.keras._hooks import Fit
from flatweights.ray import CallsDifferError, Member, NotInTrainError, Round, is_replaceable, join

_lock = CallLock("member that callbacks and optimizers share")
_shared: Member | None = None
_handles: weakref.WeakSet["MemberHandle"] = weakref.WeakSet()  # of the shared member


Place = Literal["start", "epoch", "step", "weights", "logs", "report", "end"]

# The places in a training at which members call, as errors describe them.
_PLACES: dict[Place, str] = {
    "start": "begins its training",
    "epoch": "is at the beginning or the end of an epoch",
    "step": "is at a step of its epoch",
    "weights": "averages its weights",
    "logs": "has ended its epoch",
    "report": "reports its epoch",
    "end": "has ended its training",
}
# What all members need, if they are all at that place, but their calls differ.
_SAME: dict[Place, str] = {
    "start": "the same model, optimizer and callbacks",
    "epoch": "the same model, optimizer and callbacks",
    "step": "the same model, gradients of the same variables, and the same arguments of "
    "average_gradients",
    "weights": "the same model and the same arguments of AverageWeights",
    "logs": "the same metrics, the same arguments of AverageLogs, a batch of data or more, and "
    "validation data in all of them or in none",
    "report": "the same callbacks in the same order",
    "end": "the same callbacks in the same order",
}
_BATCHES = (
    "as many batches in an epoch and as many epochs: give fit the same steps_per_epoch and epochs, "
    "and repeat the data. They also need the same callbacks in the same order; one that stops only "
    "some members stands before AverageLogs"
)
_EPOCHS = (
    "the same callbacks in the same order, and as many epochs. A callback that stops only some "
    "members stands before AverageLogs"
)
_PATIENCE = 5.0  # seconds that members wait for each other's places


@contextmanager
def calls_are_equal(member: Member, place: Place) -> Iterator[None]:
    """Enclose a call of ``member``; if the members' calls differ, add their places to the error.

    Raises:
        CallsDifferError: If the calls differ.
    """
    try:
        yield
    except CallsDifferError as error:
        where, need = _where_all_are(member, place, error)
        raise CallsDifferError(f"{where}. All members need {need}") from error


@contextmanager
def out_of_sync_is_error(member: Member, is_error: bool) -> Iterator[None]:
    """Enclose calls of ``member`` with that value of `Member.raise_if_out_of_sync`."""
    before, member.raise_if_out_of_sync = member.raise_if_out_of_sync, is_error
    try:
        yield
    finally:
        member.raise_if_out_of_sync = before


def _where_all_are(member: Member, place: Place, error: Exception) -> tuple[str, str]:
    """Return the places of all members, and the remedy.

    They got the same ``error``, so all of them ask here. If all are at one place, the error tells
    how their calls differ there. Otherwise, it compares calls that are not meant to be equal.
    """
    try:
        given = member.all_gather(place, "places", timeout=_PATIENCE, min_results=1).weights
    except Exception:  # one does not ask: it is not in a training, or has ended
        need = "to be in the same fit, with the same callbacks, and to make no other calls"
        return f"rank {member.rank} {_PLACES[place]}, others do not: {error}", need
    ranks = {
        name: [rank for rank, there in given.items() if there == name]
        for name in _PLACES
        if name in given.values()
    }
    places = [named(those, _PLACES[name]) for name, those in ranks.items()]
    if len(ranks) == 1:
        return f"{places[0]}, but their calls differ: {error}", _SAME[place]
    if ranks.keys() == {"step", "logs"}:
        places = [named(ranks["logs"], _PLACES["logs"]), named(ranks["step"], "has not")]
    differ_in_batches = "start" not in ranks and not ranks.keys().isdisjoint(("step", "weights"))
    return ", ".join(places), _BATCHES if differ_in_batches else _EPOCHS


def named(ranks: Sequence[int], does: str) -> str:
    """Return a sentence about ``ranks``; ``does`` is its predicate for one rank."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} {does}"
    plural = {"has": "have", "is": "are"}
    verb, _, rest = does.partition(" ")
    verb = plural.get(verb, verb.removesuffix("s"))
    rest = re.sub(r"\bits\b", "their", rest)
    return f"ranks {', '.join(map(str, ranks))} {verb} {rest}"


def check_in_time(result: Round, what: str) -> None:
    """Raise if the member got the average of an earlier call, because it has missed some."""
    if result.late:
        raise TimeoutError(
            f"{what}: expected the result of this call, got an earlier one: rank "
            f"{result.late[0]} was late, or has joined again. Start the training of all members "
            "again"
        )


class MemberHandle:
    """A callback's or an optimizer's use of a member, with the terms on which its calls wait.

    The terms are ``timeout`` and ``min_results``.

    Callbacks and optimizers that are given no member share one, which joins with the first handle
    and leaves when the last handle ends.

    Attributes:
        timeout: Seconds that other members may be late; for ever, if None.
        min_results: The number of members that an average needs; all, if None.
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
            who: The name of the callback or the optimizer in errors.
            member: The member.
            timeout: See the attribute.
            min_results: See the attribute.
            needs_all: The feature of it that needs all members, if there is one.
        """
        if not isinstance(member, Member | None):
            raise TypeError(f"member: expected a Member, got {type(member).__name__}")
        if timeout is not None and not real_number(timeout, "timeout") >= 0:
            raise ValueError(f"timeout: expected seconds, not negative, got {timeout!r}")
        if min_results is not None:
            check_count(min_results, "min_results")
        self.who = who
        self.needs_all = needs_all
        self._used_by: tuple[int, list[Any]] = (0, [])  # a thread, and the callbacks of its `fit`
        self.given = {"member": member, "timeout": timeout, "min_results": min_results}
        self.use(self.given)

    def use(self, terms: dict[str, Any]) -> None:
        """Make calls on these terms from now on."""
        self._given: Member | None = terms["member"]
        self.timeout = terms["timeout"]
        self.min_results = terms["min_results"]

    def begin(self, fit: Fit | None) -> Member:
        """Return the member, for a `fit` that begins in this thread; see `take`.

        Handles of an earlier `fit` of this thread are forgotten: it has ended by an exception, of
        which Keras tells nobody. Whether the shared member leaves must not depend on when their
        garbage is collected, since then it might stay in some processes, and leave in others.

        Args:
            fit: The outermost `fit` that runs, if there is one: its callbacks may call others.
        """
        if fit is not None and fit.callbacks is not None:
            thread = threading.get_ident()
            with _lock.ready():
                for one in [*_handles]:
                    if one._used_by[0] == thread and one._used_by[1] is not fit.callbacks:
                        _handles.discard(one)
            self._used_by = thread, fit.callbacks
        return self.take()

    def take(self) -> Member:
        """Return the member; join first, if it is shared and there is none, or it has ended.

        Raises:
            RuntimeError: If there is no process group to join, outside of Ray Train.
            ValueError: If Ray Train replaces single workers, and an average needs all.
        """
        global _shared
        if self.min_results is None and self.is_replaceable:
            raise ValueError(
                f"min_results: expected a number of {self.who} in a worker that ReplaceWorkers "
                "replaces, got None: the others could not go on without it"
            )
        if self._given is not None:
            return self._given
        with _lock.ready():
            if _shared is None or _shared.is_over:
                try:
                    _shared = join()
                except NotInTrainError as error:
                    raise RuntimeError(
                        "member: outside of Ray Train expected flatweights.ray.join(name, "
                        "rank=..., size=...), got None"
                    ) from error
            _handles.add(self)
            return _shared

    @property
    def is_replaceable(self) -> bool:
        """Whether this process is replaced if it dies; see `flatweights.ray.is_replaceable`."""
        return is_replaceable()

    @property
    def terms(self) -> dict[str, Any]:
        """The terms on which calls wait, as arguments."""
        return {"timeout": self.timeout, "min_results": self.min_results}

    @property
    def may_be_late(self) -> bool:
        """Whether others go on without a member that is late."""
        return self.timeout is not None and self.min_results is not None

    def timeout_of(self, seconds: float) -> float | None:
        """Return the timeout of calls for which all members wait for at least ``seconds``."""
        return None if self.timeout is None else max(self.timeout, seconds)

    def gather(
        self, value: object, name: str, *, at: Place, state: Any = None, at_least: float = 0.0
    ) -> Round:
        """Return the objects of all members; see `Member.all_gather`.

        Args:
            value: An object.
            name: What it is.
            at: The place of the call, for errors.
            state: The state that heals members.
            at_least: Seconds for which all members wait, if the timeout is shorter.
        """
        member = self.take()
        timeout = self.timeout_of(at_least)
        with calls_are_equal(member, at):
            return member.all_gather(
                value, name, state=state, timeout=timeout, min_results=self.min_results
            )

    def end(self) -> None:
        """End the handle. With the last handle, the shared member leaves; a given member stays."""
        global _shared
        self.use(self.given)
        self._used_by = 0, []
        with _lock.ready():
            _handles.discard(self)
            is_last = not _handles
            shared, _shared = (_shared, None) if is_last else (None, _shared)
        # Without the lock: a step may need it to give the member's turn back.
        if shared is not None:
            shared.leave()


def agree(handles: Sequence[MemberHandle]) -> None:
    """Make all ``handles`` of a training wait on the same terms, those that one of them was given.

    If only one of them went on without a member that is late or dead, the next would wait for it.

    Raises:
        ValueError: If they were given different terms.
    """
    terms: dict[str, Any] = {}
    for name in ("member", "timeout", "min_results"):
        said = [handle for handle in handles if handle.given[name] is not None]
        for handle in said[1:]:
            if handle.given[name] != said[0].given[name]:
                raise ValueError(
                    f"{name}: expected one value for all callbacks and optimizers of a training, "
                    f"got {said[0].given[name]!r} for {said[0].who} and {handle.given[name]!r} "
                    f"for {handle.who}. It is enough to pass it to one of them"
                )
        terms[name] = said[0].given[name] if said else None
        for handle in handles:
            if name == "min_results" and said and handle.needs_all:
                raise ValueError(
                    f"min_results: expected None with {handle.needs_all}, which needs all members, "
                    f"got {terms[name]!r} for {said[0].who}"
                )
    for handle in handles:
        handle.use(terms)
