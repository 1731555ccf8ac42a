"""The weights that the workers of a group should have, in full for workers that missed some."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

from flatweights._weights import FlatWeights, sealed
from flatweights.ray._result import is_arrays
from flatweights.ray._round import Round
from flatweights.ray._wire import GroupWire
from flatweights.ray.peers._contract import BY_VALUE, Payload, Stamp
from flatweights.ray.peers._store import payload_of, sent_weights
from flatweights.wire import Difference


@dataclass(eq=False)
class Latest:
    """The weights that a group sent last; later weights are another object.

    Attributes:
        wire: The encoder after them, if weights travel in 16 bits.
        payload: The weights in the form in which they were sent.
        version: Their stamp; None before the first weights are sent.
        number: The number of these weights among all that were the latest.
        names: The names of all weights, as far as they are known.
        base: All weights before these, if ``payload`` has only some of them.
    """

    wire: GroupWire | None = None
    payload: Payload | None = None
    version: Stamp | None = None
    number: int = 0
    names: tuple[str, ...] = ()
    base: Payload | None = None
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
            model = ray.get(value) if isinstance(value, ray.ObjectRef) else value
            if is_subset(model, self.names):
                model = merged(wire.weights, model)
            difference = None if exchanged is None else exchanged.difference
            message, wire = wire.message(model, difference)
            payload = payload_of(message)
            if isinstance(message, Difference) and difference is not None:
                payload.exchanged = exchanged if message.values is difference.values else None
            return Latest(wire, payload, version, self.number + 1, tuple(model))
        if is_subset(value, self.names):
            base = self._base_for(value)
        if isinstance(value, FlatWeights):
            buffer = value.buffer
            if buffer.nbytes <= BY_VALUE and buffer.flags.writeable:
                value = value.copy()  # it may change before a restarted worker needs it
        payload = payload_of(value)
        payload.exchanged = exchanged
        if is_round:
            payload.put = weights.current_ref
        names = self.names if base or not isinstance(value, (dict, Mapping)) else tuple(value)
        return Latest(None, payload, version, self.number + 1, names, base)

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
        names, number = self.names, self.number + 1
        if isinstance(value, ray.ObjectRef):
            value = ray.get(value)
        if isinstance(value, Mapping) and not isinstance(value, FlatWeights):
            value = {name: np.asarray(part) for name, part in value.items()}
        if not is_arrays(value):
            raise TypeError(
                f"weights: expected weights by name, or a vector, got {type(value).__name__}"
            )
        if is_subset(value, names):
            self._base_for(value)  # raises unless the earlier weights are by name
            value = merged(self.model(), value)
        names = tuple(value) if isinstance(value, Mapping) else names
        if self.wire is not None:
            if isinstance(value, np.ndarray):
                raise TypeError("wire_dtype: expected weights by name, got a vector")
            message, wire = GroupWire(self.wire.wire_dtype).message(value)
            return Latest(wire, payload_of(message), version, number, names)
        payload = payload_of(copy_of(value))
        payload.is_frozen = True
        return Latest(None, payload, version, number, names)

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
        if self._full is None and self.wire is not None and self.wire.has_sent:
            self._full = payload_of(self.wire.snapshot())
        elif self._full is None and self.base is not None and self.payload is not None:
            full = merged(sent_weights(self.base), sent_weights(self.payload))
            self._full = payload_of(full)
        return self._full or self.payload

    def _base_for(self, subset: Mapping[str, Any]) -> Payload | None:
        """Return all weights, for a ``subset`` that is sent next, whose own values may be old."""
        if self.base is not None and self.payload is not None:
            last = sent_weights(self.payload)
            if subset.keys() >= last.keys():
                return self.base
        base = self.in_full()
        if base is not None and not isinstance(sent_weights(base), Mapping):
            raise ValueError(
                f"weights: expected all {len(self.names)} parts, got {len(subset)}: a subset can "
                "follow weights by name, and those sent before are not by name"
            )
        return base


def model_of(weights: Any) -> Any:
    """Return the weights of a `Round`, and other ``weights`` as they are."""
    return weights.weights if isinstance(weights, Round) else weights


def is_subset(weights: Any, names: Any) -> bool:
    """Whether ``weights`` are by name, and only some of ``names``."""
    is_by_name = isinstance(weights, (dict, Mapping))  # dicts are recognised faster
    return is_by_name and len(weights) < len(names) and set(names).issuperset(weights)


def merged(weights: Mapping[str, Any], subset: Mapping[str, Any]) -> FlatWeights:
    """Return a copy of ``weights`` with the values of ``subset``."""
    whole = FlatWeights(weights)
    whole.update({name: np.asarray(part) for name, part in subset.items()})
    return sealed(whole)
