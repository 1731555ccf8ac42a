"""One node's part of an exchange: it sends sums, averages its shard, and receives the others."""

from __future__ import annotations

import socket
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from flatweights import _core
from flatweights._sources import Kind
from flatweights._weights import FlatWeights, frozen, sealed
from flatweights.ray import _clock
from flatweights.ray.nodes._address import Address, chosen_ports
from flatweights.ray.nodes._connections import StreamError
from flatweights.ray.nodes._plan import Plan, nbytes_of
from flatweights.ray.nodes._rounding import Residuals
from flatweights.ray.nodes._shards import Bytes
from flatweights.ray.nodes._stream_allreduce import StreamAllreduce
from flatweights.ray.nodes._streams import Streams
from flatweights.ray.support._failpoints import reach
from flatweights.wire import Difference

PATIENCE = 2.0
"""Seconds without a byte from a node after which an exchange over streams is broken off."""
OPENING = 5.0
"""Seconds in which nodes have to connect to each other."""
_SHARE = 3
"""The largest share of the remaining time for either: another attempt may follow."""


class Traffic(NamedTuple):
    """Bytes of one exchange.

    Attributes:
        sent: The bytes that left this node.
        received: The bytes that arrived.
    """

    sent: int
    received: int


class Endpoints(NamedTuple):
    """The way by which nodes reach each other: streams.

    Attributes:
        peers: The addresses of all nodes, in the order of the plan.
        epoch: The id of this attempt, by which it differs from others.
        left: Seconds until it has failed; no limit, if None.
    """

    peers: tuple[Address, ...]
    epoch: bytes
    left: float | None


class NodeReducer:
    """The part of one process, driver or agent, in the exchanges of a group.

    Attributes:
        models: By rank, all bytes of the models that the ranks of this node have returned.
    """

    def __init__(self, offer: Callable[[int], None], host: str) -> None:
        """Prepare; this process does not listen yet.

        Args:
            offer: A function that offers a segment to the next array of a number of bytes that this
                thread makes.
            host: The node's own address.
        """
        self.models: dict[int, Bytes] = {}
        self._residuals = Residuals()
        self._offer = offer
        self._host = host
        self._making = threading.Lock()
        self._streams: Streams | None = None
        self._close: Callable[[], object] | None = None
        self._mean: tuple[Plan, Any] | None = None

    @property
    def address(self) -> Address:
        """The address for other nodes; this process listens there from the first use on.

        Raises:
            OSError: If it cannot.
            ValueError: If ``FLATWEIGHTS_PORTS`` is malformed.
        """
        return self._listening().address

    def _listening(self) -> Streams:
        """Return the streams, which listen from the first use on, in any thread."""
        with self._making:
            if self._streams is None:
                self._streams = Streams(self._host, chosen_ports())
                self._close = weakref.finalize(self, self._streams.close)
            return self._streams

    def close(self) -> None:
        """Listen no more."""
        if self._close is not None:
            self._close()
            self._streams = self._close = None

    def expect(self, epoch: bytes, take: Callable[[socket.socket], object]) -> Address:
        """Have ``take`` called with a connection to this process; return the address for it.

        Raises:
            OSError: If this process cannot listen.
        """
        streams = self._listening()
        streams.expect(epoch, take)
        return streams.address

    def connect(self, address: Address, epoch: bytes) -> socket.socket:
        """Return a connection to a process that expects it.

        Raises:
            OSError: If this process cannot listen, or cannot reach that one.
        """
        return self._listening().connect(address, epoch, _clock.now() + OPENING)

    def break_off(self, epoch: bytes) -> None:
        """End the exchange over streams of ``epoch``, which another thread runs."""
        if self._streams is not None:
            self._streams.break_off(epoch)

    def stream(self, plan: Plan, me: int, endpoints: Endpoints) -> Traffic:
        """Exchange with all other nodes, shard by shard.

        Raises:
            StreamError: If a node does not answer, its answer is invalid, or the round is over.
        """
        assert self._streams is not None
        try:  # another thread may replace them meanwhile
            models = {rank: self.models[rank] for rank in plan.groups[me]}
        except KeyError:
            raise StreamError(-1, "the round is over, and its results are gone") from None
        reach("exchanging")
        now = _clock.now()
        end = None if endpoints.left is None else now + endpoints.left
        share = OPENING if endpoints.left is None else endpoints.left / _SHARE
        opened, patience = now + min(OPENING, share), min(PATIENCE, share)
        plan = self._begin(plan, me)
        connections = self._streams.open(endpoints.peers, me, endpoints.epoch, opened)
        exchange = StreamAllreduce(plan, me, models, self._new_mean(plan))
        return Traffic(*exchange.run(connections, patience=patience, end=end))

    def weights(self, number: int, version: int | None = None) -> Any:
        """Return the average of the exchange ``number``, read-only; nested models become a dict.

        If models were encoded, it is a `Difference`; with a ``version``, one that leads to these
        weights.

        Raises:
            KeyError: If this process has the average of another exchange.
        """
        if self._mean is None or self._mean[0].number != number:
            raise KeyError(f"the average of exchange {number} is not here")
        template, model, coding = self._mean[0].template, self._mean[1], self._mean[0].coding
        if coding is not None:
            return Difference(sealed(model), coding.layout, coding.base, version)
        if template.kind in (Kind.FLAT_WEIGHTS, Kind.ARRAY):
            return frozen(model)
        return frozen(template.build(template.layout.packed_views(model)))

    def _begin(self, plan: Plan, me: int) -> Plan:
        """Return ``plan``; for models in 16 bits, with the residuals of this node."""
        if plan.coding is None:
            return plan
        self._residuals.begin(plan.number, plan.settled[me], plan.coding)
        return plan._replace(residuals=self._residuals)

    def _new_mean(self, plan: Plan) -> Bytes:
        """Return new memory for the average, in a segment if one is free."""
        template = plan.template
        self._mean = None
        self._offer(nbytes_of(template))
        try:
            if template.kind in (Kind.FLAT_WEIGHTS, Kind.ARRAY):
                model = template.new()
            else:
                model = template.layout.new_buffer()
        finally:
            _core.withdraw_offer()
        array = model.buffer if isinstance(model, FlatWeights) else model
        flat: Bytes = array.reshape(-1).view(np.uint8)
        self._mean = plan, model
        return flat
