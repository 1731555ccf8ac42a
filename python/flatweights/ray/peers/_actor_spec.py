"""How the actors of a group are started, and the arguments that their restarts need."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ray

from flatweights.ray.channels._message import RAY_REFS
from flatweights.ray.peers._by_rank import ByRank, check_by_rank, more_arguments
from flatweights.ray.peers._transport import BY_VALUE

# Up to this size, all arguments of an actor together travel with the call that starts it. Ray lets
# some 10 MB do so, and keeps the rest only until the actor is built.
_ALL_BY_VALUE = 4 << 20
_REFERENCE = 256  # bytes of a reference, about


@dataclasses.dataclass(frozen=True)
class ActorSpec:
    """The class, the arguments and the options of the actors of a group.

    Attributes:
        remote: The result of `ray.remote` for their class.
        args: Arguments of each constructor.
        arguments: A function of the rank that returns more arguments.
        options: Ray's options.
        kept: The arguments of the actors by rank: if Ray restarts one, it needs them.
    """

    remote: ray.actor.ActorClass[Any]
    args: Sequence[Any]
    arguments: ByRank | None
    options: Mapping[str, Any]
    kept: dict[int, tuple[Sequence[Any], Sequence[Any]]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check that ``arguments`` is a function."""
        check_by_rank(self.arguments)

    def with_more(
        self, args: Sequence[Any], arguments: ByRank | None, options: Mapping[str, Any]
    ) -> ActorSpec:
        """Return the spec with other arguments, if there are any, and more options."""
        more = dataclasses.replace(self, options={**self.options, **options})
        if args or arguments is not None:
            return dataclasses.replace(more, args=args, arguments=arguments)
        return more

    def start(
        self, ranks: Iterable[int], check: Callable[[], object] = lambda: None
    ) -> list[ray.actor.ActorHandle]:
        """Start an actor for each rank; return them.

        Args:
            ranks: The ranks.
            check: Called after the function of the ``arguments``, and before any actor is started.
        """
        remote = self.remote.options(**self.options) if self.options else self.remote
        args = self.args
        by_rank = {
            rank: more_arguments(self.arguments, rank) if self.arguments else () for rank in ranks
        }
        check()
        decorated = getattr(self.remote, "_default_options", {})  # by `ray.remote`
        if {**decorated, **self.options}.get("max_restarts"):
            # Ray drops large arguments once an actor is built, but a restart needs them.
            args, nbytes = _by_reference(args)
            by_rank = {rank: _by_reference(own, nbytes)[0] for rank, own in by_rank.items()}
        actors: list[ray.actor.ActorHandle] = []
        try:
            for own in by_rank.values():
                actors.append(remote.remote(*args, *own))
        except BaseException:
            for actor in actors:
                ray.kill(actor)
            raise
        self.kept.update((rank, (args, own)) for rank, own in by_rank.items())
        return actors

    def forget(self, ranks: Iterable[int]) -> None:
        """Drop the arguments of actors that are not started again."""
        for rank in ranks:
            self.kept.pop(rank, None)


def _by_reference(arguments: Sequence[Any], nbytes: int = 0) -> tuple[tuple[Any, ...], int]:
    """Return ``arguments`` with references to those that are too large to travel with a call.

    Args:
        arguments: Some arguments of a call.
        nbytes: The bytes of those before them that travel with it.

    Returns:
        The arguments, and ``nbytes`` with the bytes of theirs that travel with the call.
    """
    passed = list[Any]()
    for one in arguments:
        size = _nbytes_of(one)
        is_small = size <= BY_VALUE and nbytes + size <= _ALL_BY_VALUE
        travels = is_small or isinstance(one, ray.ObjectRef)
        nbytes += size if travels else 0
        passed.append(one if travels else ray.put(one))
    return tuple(passed), nbytes


def _nbytes_of(argument: Any) -> int:
    """Return the size of ``argument`` as it travels, without what is in the store."""
    written = io.BytesIO()
    _Measuring(written).dump(argument)
    return written.tell()


class _Measuring(ray.cloudpickle.CloudPickler):  # type: ignore[misc]
    """Pickles all but objects of Ray: it keeps these for ever once they are pickled so."""

    def persistent_id(self, value: Any) -> str | None:
        if not isinstance(value, RAY_REFS):
            return None
        return f"{id(value):<{_REFERENCE}}"  # texts that differ, since equal ones are written once
