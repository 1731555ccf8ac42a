"""One node's part of an exchange: its sums go out, its piece is averaged, the others' come in."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from flatweights import _core
from flatweights._sources import Kind
from flatweights._weights import FlatWeights, sealed
from flatweights.ray._failpoints import reach
from flatweights.ray.nodes._address import Address, chosen_ports
from flatweights.ray.nodes._links import StreamError
from flatweights.ray.nodes._pieces import Bytes
from flatweights.ray.nodes._plan import Plan, nbytes_of
from flatweights.ray.nodes._rounding import Residuals
from flatweights.ray.nodes._stream_exchange import StreamExchange
from flatweights.ray.nodes._streams import Streams
from flatweights.wire import Difference

PATIENCE = 2.0
"""Seconds without a byte from a node after which an exchange over streams is broken off."""
OPENING = 5.0
"""Seconds that nodes are given to connect to each other."""
_SHARE = 3
"""Neither takes more than this share of the time that is left: another attempt may follow."""


class Traffic(NamedTuple):
    """Bytes of one exchange.

    Attributes:
        sent: Those that left this node.
        received: Those that came.
    """

    sent: int
    received: int


class Route(NamedTuple):
    """How nodes reach each other by streams.

    Attributes:
        peers: The addresses of all nodes, in the order of the plan.
        epoch: Tells this attempt from others.
        left: Seconds until it has failed; None for as many as it takes.
    """

    peers: tuple[Address, ...]
    epoch: bytes
    left: float | None


class NodeEnd:
    """The part of one process, driver or agent, in the exchanges of a group.

    Attributes:
        models: All bytes of what the ranks of this node have returned, by rank.
    """

    def __init__(self, offer: Callable[[int], None], host: str) -> None:
        """Prepare.

        Args:
            offer: Has the next array of so many bytes that this thread makes lie in a window.
            host: The node's own address.
        """
        self.models: dict[int, Bytes] = {}
        self._residuals = Residuals()
        self._offer = offer
        self._host = host
        self._streams: Streams | None = None
        self._close: Callable[[], object] | None = None
        self._mean: tuple[Plan, Any, Bytes] | None = None

    @property
    def address(self) -> Address:
        """Where other nodes connect; from now on this process listens there.

        Raises:
            OSError: If it cannot.
            ValueError: If ``FLATWEIGHTS_PORTS`` is malformed.
        """
        if self._streams is None:
            self._streams = Streams(self._host, chosen_ports())
            self._close = weakref.finalize(self, self._streams.close)
        return self._streams.address

    def close(self) -> None:
        """Listen no more."""
        if self._close is not None:
            self._close()
            self._streams = self._close = None

    def break_off(self, epoch: bytes) -> None:
        """End the exchange over streams of ``epoch``, which goes on in another thread."""
        if self._streams is not None:
            self._streams.break_off(epoch)

    def stream(self, plan: Plan, me: int, route: Route) -> Traffic:
        """Exchange with all other nodes, piece by piece.

        Raises:
            StreamError: If a node does not answer, or answers nonsense; or if the round is over.
        """
        assert self._streams is not None
        if not self.models.keys() >= {*plan.groups[me]}:
            raise StreamError(-1, "the round is over, and its results are gone")
        reach("exchanging")
        now = time.monotonic()
        end = None if route.left is None else now + route.left
        share = OPENING if route.left is None else route.left / _SHARE
        opened, patience = now + min(OPENING, share), min(PATIENCE, share)
        plan = self._begin(plan, me)
        links = self._streams.open(route.peers, me, route.epoch, opened)
        before = Traffic(sum(links.sent_bytes), sum(links.received_bytes))
        exchange = StreamExchange(plan, me, self.models, self._new_mean(plan))
        exchange.run(links, patience=patience, end=end)
        after = Traffic(sum(links.sent_bytes), sum(links.received_bytes))
        return Traffic(after.sent - before.sent, after.received - before.received)

    def weights(self, number: int, version: int | None = None) -> Any:
        """Return the average of the exchange ``number``, read-only: a dict of anything nested.

        If models were encoded, it is a `Difference`, to weights of a ``version`` if that is given.

        Raises:
            KeyError: If it is another one that this process has.
        """
        if self._mean is None or self._mean[0].number != number:
            raise KeyError(f"the average of exchange {number} is not here")
        template, model, coding = self._mean[0].template, self._mean[1], self._mean[0].coding
        if coding is not None:
            return Difference(sealed(model), coding.layout, coding.base, version)
        if template.kind in (Kind.FLAT_WEIGHTS, Kind.ARRAY):
            return sealed(model)
        return sealed(template.build(template.layout.packed_views(model)))

    def _begin(self, plan: Plan, me: int) -> Plan:
        """Return a ``plan`` of models in 16 bits with the residuals of this node."""
        if plan.coding is None:
            return plan
        self._residuals.begin(plan.number, plan.settled[me], plan.coding)
        return plan._replace(residuals=self._residuals)

    def _new_mean(self, plan: Plan) -> Bytes:
        """Return new memory for the average, in a window if one is free."""
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
        self._mean = plan, model, flat
        return flat
