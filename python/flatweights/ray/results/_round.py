"""The result of a round: the average, and the ranks in it."""

from __future__ import annotations

import html
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from numpy.typing import NDArray

from flatweights.ray import _clock
from flatweights.ray.results._result import may_change, packed_nbytes, parts_of
from flatweights.ray.support._errors import FULL, reason_in_a_line, session_of_ray, too_small


class Round:
    """The average of one round, and the ranks in it.

    Attributes:
        used: The ranks in the average, in the order in which they were added.
        failed: By rank, the exception of its worker, or the error about NaN and infinity for which
            ``nonfinite="skip"`` left it out.
        quarantined: The failed ranks that ``nonfinite="skip"`` left out; and the ranks
            that a ``rule`` left out, which have not failed.
        scores: By rank, the number by which a ``rule`` selected or weighed it; none for the mean
            and for rules by coordinate.
        late: The ranks that had not answered when the time was up.
        extras: By used rank, the extras that its worker returned with its weights.
        seconds: The time of each step: ``"wait"`` for results, ``"average"`` to add them up,
            ``"put"`` to put the average into the object store, once it is there. A
            `WorkerGroup` adds ``"broadcast"``, until its workers had it, and `WorkerGroup.run`
            the whole ``"round"``. If the next call brought the average (``broadcast=``), the
            time until workers had it is in that call's ``"wait"``.
        nbytes: Bytes of weights that were read.
        nbytes_sent: Bytes of weights that a `WorkerGroup` sent to workers that took the average:
            once to each worker that it calls itself, once to an agent for all of its workers, and
            none to an agent that has exchanged the average.
        number: The number of the round in `WorkerGroup.run`, from 1.
        transports: By rank, how a `WorkerGroup` reached its worker, or a `Member` its
            coordinator: ``"shm"``, through shared memory; ``"gpu"``, for weights that have stayed
            on a GPU; ``"agent"``, through the agent of its node, with the kind of exchange; or
            ``"store"``, through Ray, with the reason.
        groups: The ranks that nodes added up first, in the order in which the sums were merged;
            none if the average has the bits of `flatweights.average` over `used`.
        staleness: By rank, for results of `WorkerGroup.as_completed`: the number of publications
            since the weights that its result was computed from.
        stale: The ranks whose results `WorkerGroup.as_completed` has left out since the last round,
            because they were staler than ``max_staleness``; one for each result.
        joined: The ranks of workers that were added to the group and are ready, since the last
            round.
        left: The ranks that were removed from the group since the last round.
        healed: The ranks that lacked the state of the training, and got it with this average, which
            does not contain their weights; see `Member.average`.
        links: By the id of a node, the bytes that it exchanged with others, ``"in"`` and ``"out"``;
            empty without an exchange.
    """

    def __init__(
        self,
        weights: Any,
        used: Sequence[int],
        failed: Mapping[int, Exception] | None = None,
        late: Sequence[int] = (),
        extras: Mapping[int, Any] | None = None,
        seconds: Mapping[str, float] | None = None,
        nbytes: int = 0,
        nbytes_sent: int = 0,
        quarantined: Sequence[int] = (),
        number: int | None = None,
        scores: Mapping[int, float] | None = None,
        transports: Mapping[int, str] | None = None,
        groups: Sequence[tuple[int, ...]] = (),
        links: Mapping[str, dict[str, int]] | None = None,
        staleness: Mapping[int, int] | None = None,
        stale: Sequence[int] = (),
        joined: Sequence[int] = (),
        left: Sequence[int] = (),
        healed: Sequence[int] = (),
    ) -> None:
        """Take the values of the attributes."""
        self._weights = weights
        self.used = tuple(used)
        self.failed = dict(failed or {})
        self.late = tuple(late)
        self.extras = dict(extras or {})
        self.seconds = dict(seconds or {})
        self.nbytes = nbytes
        self.nbytes_sent = nbytes_sent
        self.quarantined = tuple(quarantined)
        self.number = number
        self.scores = dict(scores or {})
        self.transports = dict(transports or {})
        self.groups = tuple(groups)
        self.links = dict(links or {})
        self.staleness = dict(staleness or {})
        self.stale = tuple(stale)
        self.joined = tuple(joined)
        self.left = tuple(left)
        self.healed = tuple(healed)
        self._exchanged: Any = None  # the agents that have the average
        self._ref: ray.ObjectRef | None = None
        self._session: str | None = None  # the session of Ray in which it was put
        self._in_store: list[NDArray[Any]] = []  # the parts in the store, if none can change

    @property
    def weights(self) -> Any:
        """The average, of the kind that the workers returned.

        It is read-only, so that it cannot differ from the weights that workers are sent; change a
        copy. If a buffer was passed as ``out``, it is that buffer.
        """
        return self._weights

    @property
    def ref(self) -> ray.ObjectRef:
        """A reference to the average, which is put into the object store once per Ray session."""
        return self._ref_in(session_of_ray(), ray.put)

    def _ref_in(self, session: str, put: Callable[[Any], ray.ObjectRef]) -> ray.ObjectRef:
        if self._ref is None or self._session != session:
            begin = _clock.now()
            self._session, self._ref = session, self._put(put)
            parts = parts_of(self.weights)
            self._in_store = [] if may_change(self.weights) else parts
            self.seconds["put"] = _clock.now() - begin
        return self._ref

    def _put(self, put: Callable[[Any], ray.ObjectRef]) -> ray.ObjectRef:
        try:
            return put(self.weights)
        except FULL as error:
            ranks = len(self.used) + len(self.failed) + len(self.late)
            raise too_small(ranks, packed_nbytes(self.weights)) from error

    def current_ref(
        self, session: str = "", put: Callable[[Any], ray.ObjectRef] | None = None
    ) -> ray.ObjectRef:
        """Return `ref`, but put `weights` anew if they may have changed since they were put.

        Args:
            session: The session of Ray; that of this process, if empty.
            put: Puts a value into its store; `ray.put`, if None.
        """
        if self._ref is not None and not _consists_of(self.weights, self._in_store):
            self._ref = None
        return self._ref_in(session or session_of_ray(), put or ray.put)

    def record(self) -> dict[str, Any]:
        """Return everything about the round except its weights and extras, as plain data.

        Use it for a line of JSON per round, or a row of a table. It consists of numbers, texts,
        lists, and dicts with texts as keys, so it survives a round trip through JSON.

        >>> result = Round([1.0], used=[0, 2], failed={1: ValueError("diverged")}, nbytes=16)
        >>> result.record()["used"], result.record()["failed"]
        ([0, 2], {'1': 'ValueError: diverged'})

        Returns:
            ``round``, its number or None; ``used``, ``late`` and ``quarantined``, lists of
            ranks; ``failed``, by rank the reason in one line; ``seconds`` by step;
            ``bytes``, those read as ``in`` and those sent as ``out``; ``transports`` and
            ``scores``, by rank; ``groups`` and ``links``; ``staleness``, by rank; ``stale``,
            ``joined``, ``left`` and ``healed``, lists of ranks.
        """
        return {
            "round": self.number,
            "used": list(self.used),
            "late": list(self.late),
            "failed": {str(rank): reason_in_a_line(error) for rank, error in self.failed.items()},
            "quarantined": list(self.quarantined),
            "seconds": dict(self.seconds),
            "bytes": {"in": self.nbytes, "out": self.nbytes_sent},
            "transports": {str(rank): transport for rank, transport in self.transports.items()},
            "groups": [list(group) for group in self.groups],
            "links": {node: dict(nbytes) for node, nbytes in self.links.items()},
            "scores": {str(rank): score for rank, score in self.scores.items()},
            "staleness": {str(rank): count for rank, count in self.staleness.items()},
            "stale": list(self.stale),
            "joined": list(self.joined),
            "left": list(self.left),
            "healed": list(self.healed),
        }

    @property
    def total_seconds(self) -> float:
        """The seconds that the round took, as far as they are known."""
        return self.seconds.get("round", sum(self.seconds.values()))

    def __repr__(self) -> str:
        """Ranks and seconds, without the weights.

        >>> Round([1.0], used=[0, 2], late=[1], seconds={"wait": 0.25})
        <Round: 2 of 3 ranks (0, 2), late (1), 0.250 s>
        """
        name = type(self).__name__ + ("" if self.number is None else f" {self.number}")
        left_out = ranks_left_out(self)
        total = len(self.used) + sum(map(len, left_out.values()))
        counts = [f"{len(self.used)} of {total} ranks {_ranks(self.used)}"]
        counts += [f"{reason} {_ranks(ranks)}" for reason, ranks in left_out.items()]
        return f"<{name}: {', '.join(counts)}, {self.total_seconds:.3f} s>"

    def _repr_html_(self) -> str:
        """As `record`, a table for notebooks."""
        cells: dict[str, Any] = self.record()
        cells["failed"] = "; ".join(f"rank {k}: {why}" for k, why in cells["failed"].items())
        cells["seconds"] = ", ".join(f"{k} {v:.3f}" for k, v in cells["seconds"].items())
        cells["bytes"] = ", ".join(f"{k} {v:,}" for k, v in cells["bytes"].items())
        cells["scores"] = ", ".join(f"{k} {v:.3g}" for k, v in cells["scores"].items())
        cells["transports"] = ", ".join(f"{k} {v}" for k, v in cells["transports"].items())
        rows = [
            f"<tr><th>{name}</th><td>{html.escape(str(value))}</td></tr>"
            for name, value in cells.items()
            if value not in (None, "", [], {})
        ]
        return f"<table>{''.join(rows)}</table>"


_ARGUMENTS = [*inspect.signature(Round).parameters][1:]
_NUMBER, _SECONDS = _ARGUMENTS.index("number"), _ARGUMENTS.index("seconds")

arguments_of = operator.attrgetter(*_ARGUMENTS)
"""Returns the arguments of `Round` after the weights, for a process that has the weights."""


def repeated_arguments(arguments: tuple[Any, ...], number: int, *seconds: float) -> tuple[Any, ...]:
    """Return the `arguments_of` a round with the ``number``, like one that had these.

    Args:
        arguments: Those of that one.
        number: The number of the round.
        seconds: The seconds of each step of that one, in their order.
    """
    again = [*arguments]
    again[_NUMBER] = number
    again[_SECONDS] = dict(zip(arguments[_SECONDS], seconds, strict=True))
    return tuple(again)


def ranks_left_out(result: Round) -> dict[str, list[int]]:
    """Return the ranks left out of the average, by reason."""
    failed = [rank for rank in result.failed if rank not in result.quarantined]
    reasons = {"late": [*result.late], "quarantined": [*result.quarantined], "failed": failed}
    return {reason: ranks for reason, ranks in reasons.items() if ranks}


def _ranks(ranks: Sequence[int]) -> str:
    shown = [*map(str, ranks[:16]), *(["..."] if len(ranks) > 16 else [])]
    return f"({', '.join(shown)})"


def _consists_of(model: Any, arrays: Sequence[NDArray[Any]]) -> bool:
    """Whether the arrays of ``model`` are these very objects."""
    parts = parts_of(model)
    return len(parts) == len(arrays) and all(map(operator.is_, parts, arrays))
