"""The weights that the workers of a group should have, in full for workers that missed some."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

from flatweights._layout import Layout
from flatweights._weights import FlatWeights, frozen
from flatweights.ray.peers._platform import PLATFORM, GroupPlatform
from flatweights.ray.peers._store import payload_of, sent_weights
from flatweights.ray.peers._transport import BY_VALUE, Payload, Stamp
from flatweights.ray.results._result import is_arrays, may_change
from flatweights.ray.results._round import Round
from flatweights.ray.results._wire import GroupWire
from flatweights.wire import Difference


@dataclass(eq=False)
class Latest:
    """The weights that a group sent last; later weights are another object.

    Attributes:
        wire: The encoder after them, if weights travel in 16 bits.
        payload: The weights in the form in which they were sent.
        version: Their stamp; None before the first weights are sent.
        number: The number of these weights among all that were the latest.
        names: The names of all weights, as far as they are known, in the form in which these were
            sent: workers set all weights of other names by position.
        own: The names that all weights have in the workers, if they are known.
        base: All weights before these, if ``payload`` has only some of them.
        before: The latest weights before these, if ``payload`` is a reference to an object that is
            not here, so that it is not known whether it has all weights.
        platform: What it uses of Ray.
    """

    wire: GroupWire | None = None
    payload: Payload | None = None
    version: Stamp | None = None
    number: int = 0
    names: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    base: Payload | None = None
    before: Latest | None = None
    platform: GroupPlatform = PLATFORM
    _full: Payload | None = None

    def after(self, weights: Any, version: Stamp) -> Latest:
        """Return the latest weights after ``weights`` are sent with the stamp ``version``.

        Raises:
            ValueError: If they are a subset, and the earlier weights are not known by name.
        """
        value, exchanged = weights, None
        is_round = isinstance(weights, Round)
        if is_round:
            value, exchanged = weights.weights, weights._exchanged
        wire, base = self.wire, None
        if wire is not None:
            model = self.platform.get(value) if isinstance(value, ray.ObjectRef) else value
            if self.is_changed_by(model):
                self._check_is_by_name(wire.weights, model)
                model = merged(wire.weights, model)
            difference = None if exchanged is None else exchanged.difference
            message, wire = wire.message(model, difference)
            payload = self._payload_of(message)
            if isinstance(message, Difference) and difference is not None:
                payload.exchanged = exchanged if message.values is difference.values else None
            names = self._names_after(model)
            return self._next(payload, version, names, wire)
        model = self._if_here(value) if isinstance(value, ray.ObjectRef) else value
        if self.is_changed_by(model):
            base = self._base_for(model)
        is_frozen = False
        if isinstance(value, FlatWeights):
            changes = may_change(value)
            if changes and value.buffer.nbytes <= BY_VALUE:
                value = value.copy()  # it may change before a restarted worker needs it
            is_frozen = type(value) is FlatWeights and not changes
        payload = self._payload_of(value)
        payload.is_frozen, payload.exchanged = is_frozen, exchanged
        if is_round:
            platform = self.platform
            payload.put = lambda: weights.current_ref(platform.session(), platform.put)
        names = self._names_after(model, base is not None)
        before = self._for_references() if model is None else None
        following = self._next(payload, version, names)
        following.base, following.before = base, before
        return following

    def published(self, weights: Any, version: Stamp, copy_of: Callable[[Any], Any]) -> Latest:
        """Return the latest weights after ``weights`` are published with the stamp ``version``.

        They are a full copy, so that each worker can get them with its next call, at any time.

        Args:
            weights: The weights.
            version: The stamp.
            copy_of: A function that returns an immutable copy of arrays.

        Raises:
            TypeError: If they are not arrays, or, with a wire, not weights by name.
            ValueError: If they are a subset, and the earlier weights are not known by name.
        """
        value = model_of(weights)
        if isinstance(value, ray.ObjectRef):
            value = self.platform.get(value)
        if isinstance(value, Mapping) and not isinstance(value, FlatWeights):
            value = {name: np.asarray(part) for name, part in value.items()}
        if not is_arrays(value):
            raise TypeError(
                f"weights: expected weights by name, or a vector, got {type(value).__name__}"
            )
        if self.is_changed_by(value):
            whole = self.model()
            self._check_is_by_name(whole, value)
            value = merged(whole, value)
        names = self._names_after(value)
        if self.wire is not None:
            if isinstance(value, np.ndarray):
                raise TypeError("wire_dtype: expected weights by name, got a vector")
            message, wire = GroupWire(self.wire.wire_dtype).message(value)
            return self._next(self._payload_of(message), version, names, wire)
        payload = self._payload_of(copy_of(value))
        payload.is_frozen = True
        return self._next(payload, version, names)

    def learn(self, weights: Any) -> None:
        """Note the names of all weights, which ``weights`` have, if they are by name."""
        if isinstance(weights, Mapping):
            self.names = self.own = tuple(weights)

    def is_changed_by(self, weights: Any) -> bool:
        """Whether ``weights`` leave some of these as they are; see `is_change`."""
        if self.version is None:
            return False
        if isinstance(weights, (dict, Mapping)) and tuple(weights) == self.names:  # the usual case
            return False
        return is_change(weights, self.own or self.names, bool(self.own), self.model)

    def is_unclear(self, weights: Any) -> bool:
        """Whether only the workers' own names show that ``weights`` leave some as they are.

        Weights of other names may be other weights of the model, or the same by position. And if
        they are fewer, those before may have been set by position.
        """
        if self.own or self.version is None:
            return False
        model = model_of(weights)
        if isinstance(model, ray.ObjectRef):
            model = self._if_here(model)
            if model is None:
                return True
        if not isinstance(model, (dict, Mapping)):
            return False
        return len(model) <= len(self.names) and not {*model} <= {*self.names}

    def _names_after(self, weights: Any, is_change: bool = False) -> tuple[str, ...]:
        """Return the names after ``weights``."""
        if not isinstance(weights, (dict, Mapping)):
            return self.names
        given = tuple(weights)
        if not is_change and not {*given} < {*self.own}:
            return given
        return (*self.names, *[n for n in given if n not in self.names])

    def _for_references(self) -> Latest | None:
        """Return these weights for a reference that may have only some; None if there are none."""
        if self.before is not None:
            self.in_full()  # so that it does not keep all weights before
        return None if self.version is None else self

    def model(self) -> Any:
        """Return all weights; there must be some."""
        if self.wire is not None:
            return self.wire.weights
        full = self.in_full()
        assert full is not None
        return sent_weights(full)

    def in_full(self) -> Payload | None:
        """Return the weights for workers that may have missed earlier ones; None before the first.

        If only a subset was sent last, these are all weights; with a wire, they are a snapshot.
        """
        self._resolve()
        if self._full is None and self.wire is not None and self.wire.has_sent:
            self._full = self._payload_of(self.wire.snapshot())
        elif self._full is None and self.base is not None and self.payload is not None:
            full = merged(sent_weights(self.base), sent_weights(self.payload))
            self._full = self._payload_of(full)
        return self._full or self.payload

    def _resolve(self) -> None:
        """Read the weights of a reference, and note whether these are all or a subset."""
        if self.before is None or self.payload is None:
            return
        before, model = self.before, sent_weights(self.payload)
        is_partial = before.is_changed_by(model)
        if is_partial:
            self.base = before._base_for(model)
        self.names, self.before = before._names_after(model, is_partial), None

    def _base_for(self, subset: Mapping[str, Any]) -> Payload | None:
        """Return all weights, for a ``subset`` that is sent next, whose own values may be old."""
        if self.base is not None and self.payload is not None:
            last = sent_weights(self.payload)
            if subset.keys() >= last.keys():
                return self.base
        base = self.in_full()
        if base is not None:
            self._check_is_by_name(sent_weights(base), subset)
        return base

    def _if_here(self, ref: ray.ObjectRef) -> Any:
        """Return the weights that ``ref`` refers to; None, unless they are in this node's store."""
        try:
            return self.platform.get(ref, 0)
        except Exception:  # not yet, or never: the workers say why
            return None

    def _payload_of(self, value: Any) -> Payload:
        return payload_of(value, self.platform)

    def _next(
        self,
        payload: Payload,
        version: Stamp,
        names: tuple[str, ...],
        wire: GroupWire | None = None,
    ) -> Latest:
        """Return the latest weights after ``payload``."""
        number, platform = self.number + 1, self.platform
        return Latest(wire, payload, version, number, names, self.own, platform=platform)

    def _check_is_by_name(self, whole: Any, subset: Mapping[str, Any]) -> None:
        if not isinstance(whole, Mapping):
            raise _no_base(f"{len(self.names)} parts", len(subset))
        check_names(whole, self.own, subset)


def model_of(weights: Any) -> Any:
    """Return the weights of a `Round`, and other ``weights`` as they are."""
    return weights.weights if isinstance(weights, Round) else weights


def is_change(
    weights: Any,
    names: tuple[str, ...],
    are_all: bool,
    model: Callable[[], Any],
) -> bool:
    """Whether ``weights`` are by name, and leave some of the weights before them as they are.

    Weights of other names may be all weights, which workers set by position.

    Args:
        weights: The weights.
        names: The names of the weights before, as far as they are known.
        are_all: Whether these are certainly all names.
        model: A function that returns the weights before.

    Raises:
        ValueError: If they are fewer than a vector, whose names are not known.
    """
    if not isinstance(weights, (dict, Mapping)):  # dicts are recognised faster
        return False
    if not names:
        check_follows(weights, model())
        return False
    given = tuple(weights)
    if given == names or not (missing := set(names).difference(given)):
        return False
    if len(missing) == len(names) - len(given):  # all are known
        return True
    if len(given) == len(names):
        before = model()
        if isinstance(before, Mapping):
            before, after = Layout.of(before), Layout.of(weights)
            if before.signature == after.signature:
                return False
    return len(missing) < len(names) or not are_all


def check_names(before: Mapping[str, Any], own: tuple[str, ...], subset: Mapping[str, Any]) -> None:
    """Raise `ValueError` if weights ``before`` a ``subset`` have other names than workers' own."""
    if own and not before.keys() <= {*own}:
        other = next(name for name in before if name not in own)
        raise ValueError(
            f"weights: expected all {len(own)} weights, got {len(subset)}: those sent before were "
            f"set by position, since the workers have no {other!r}"
        )


def check_follows(weights: Mapping[str, Any], before: Any) -> None:
    """Raise `ValueError` if ``before`` is a vector of more numbers than ``weights`` by name."""
    size = before.size if isinstance(before, np.ndarray) else 0
    got = sum(np.size(part) for part in weights.values())
    if size > got:
        raise _no_base(f"{size} numbers", got)


def _no_base(expected: str, got: int) -> ValueError:
    return ValueError(
        f"weights: expected all {expected}, got {got}: a subset can follow weights by name, "
        "and those sent before are not by name"
    )


def merged(weights: Mapping[str, Any], subset: Mapping[str, Any]) -> FlatWeights:
    """Return a copy of ``weights`` with the values of ``subset``."""
    parts = {name: np.asarray(part) for name, part in subset.items()}
    if not all(name in weights for name in parts):
        return frozen(FlatWeights({**weights, **parts}))
    whole = FlatWeights(weights)
    whole.update(parts)
    return frozen(whole)
